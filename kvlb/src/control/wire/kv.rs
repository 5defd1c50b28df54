//! The KV fields of the body.

use std::str::FromStr;
use std::time::Duration;

use super::fields::shown;
use super::{Body, KvArguments};
use crate::contract::{BlockSize, HashAlgo};
use crate::control::Problem;
use crate::fleet::{BlendRule, Endpoint, EngineType, ExactMode, Keying, KvRule, Relief, Role, Score, TierWeights};
use crate::policy::{BLENDS, UnknownBlend};

/// vLLM's default on GPUs, and the document's.
const BLOCK_SIZE: u32 = 16;
/// vLLM's default event port.
const ZMQ_PORT: u16 = 5557;
/// The document's default for a field without effect.
const WARMUP_SECONDS: u32 = 30;

/// The KV settings that `body` asks for.
pub(super) fn kv(body: &Body) -> Result<KvRule, Problem> {
    let args = &body.args().kv;
    let mode = exact_mode(args)?;
    let engine = engine(args)?;
    if engine == EngineType::LlamaCpp {
        llamacpp_has_no_kv(body)?;
    }
    let kv = KvRule {
        mode,
        engine,
        block_size: block_size(args)?,
        algo: algo(args)?,
        zmq_port: args.zmq_port.unwrap_or(ZMQ_PORT),
        replay_port: args.replay_port,
        warmup: Duration::from_secs(args.warmup_sec.unwrap_or(WARMUP_SECONDS).into()),
        dp_ranks: args.dp_rank_count,
        keying: keying(args)?,
        tier_weights: tier_weights(args)?,
        observe: args.observe.unwrap_or(false),
        score: score(args)?,
        blend: blend(args)?,
    };
    let ranks = kv.dp_ranks.unwrap_or(1);
    ranks_fit("kvZmqPort", kv.zmq_port, ranks)?;
    kv.replay_port.map_or(Ok(()), |port| ranks_fit("kvReplayPort", port, ranks))?;
    if kv.replay_port == Some(kv.zmq_port) {
        return Err(Problem::Contradiction(format!("kvReplayPort and kvZmqPort are both {}", kv.zmq_port)));
    }
    Ok(kv)
}

fn exact_mode(args: &KvArguments) -> Result<ExactMode, Problem> {
    match args.exact_mode {
        None | Some(0) => Ok(ExactMode::Off),
        Some(1) => Ok(ExactMode::PrefillDecode),
        Some(3) => Ok(ExactMode::SinglePool),
        Some(_) => Err(Problem::KvModeReserved),
    }
}

fn engine(args: &KvArguments) -> Result<EngineType, Problem> {
    match args.engine_type.as_deref() {
        None | Some("" | "vllm") => Ok(EngineType::Vllm),
        Some("llamacpp") => Ok(EngineType::LlamaCpp),
        Some(engine @ ("sglang" | "trtllm")) => Err(Problem::EngineNotSupportedYet(engine.to_owned())),
        Some(other) => Err(bad("kvEngineType", other, "use vllm or llamacpp")),
    }
}

/// llama.cpp announces no blocks, so a KV field would be a promise that nothing keeps.
fn llamacpp_has_no_kv(body: &Body) -> Result<(), Problem> {
    let service = body.json().get("serviceArguments").and_then(serde_json::Value::as_object);
    let kv_fields: Vec<_> = service
        .into_iter()
        .flatten()
        .filter(|(name, value)| {
            let off = name.as_str() == "kvExactMode" && value.as_u64() == Some(0);
            name.starts_with("kv") && name.as_str() != "kvEngineType" && !off
        })
        .map(|(name, _)| name.as_str())
        .collect();
    if kv_fields.is_empty() { Ok(()) } else { Err(Problem::LlamaCppKv(kv_fields.join(", "))) }
}

fn block_size(args: &KvArguments) -> Result<BlockSize, Problem> {
    BlockSize::new(args.block_size.unwrap_or(BLOCK_SIZE)).ok_or_else(|| Problem::OutOfRange {
        field: "kvBlockSize".to_owned(),
        value: "0".to_owned(),
        range: "1 and more".to_owned(),
    })
}

fn algo(args: &KvArguments) -> Result<HashAlgo, Problem> {
    let Some(text) = args.hash_algo.as_deref().filter(|text| !text.is_empty()) else {
        return Ok(HashAlgo::Sha256Cbor);
    };
    let use_these =
        "use sha256_cbor, xxhash_cbor, sha256 or xxhash, the value of the engine's --prefix-caching-hash-algo";
    HashAlgo::from_str(text).map_err(|()| match text {
        "sha256_sglang" | "blockhash_trtllm" => {
            Problem::AlgorithmEngine { algo: text.to_owned(), engine: "vllm", expected: "sha256_cbor or xxhash_cbor" }
        }
        _ => bad("kvHashAlgo", text, use_these),
    })
}

fn score(args: &KvArguments) -> Result<Score, Problem> {
    match args.score.as_deref() {
        None | Some("" | "prefix") => Ok(Score::Prefix),
        Some("count") => Ok(Score::Count),
        Some(other) => Err(bad("kvScore", other, "use prefix or count")),
    }
}

fn blend(args: &KvArguments) -> Result<BlendRule, Problem> {
    let mode = args.lb_mode.as_deref().filter(|text| !text.is_empty());
    let relief = args.spill_relief.as_deref().filter(|text| !text.is_empty());
    Ok(BlendRule {
        mode: mode
            .map(|text| text.parse().map_err(|UnknownBlend(_)| bad("kvLbMode", text, &format!("use {BLENDS}"))))
            .transpose()?,
        load_floor: args.load_floor,
        mean_load_factor: args.mean_load_factor,
        load_penalty: args.load_penalty,
        cap_sum_milli: args.cap_sum_milli,
        spill_relief: relief
            .map(|text| match text {
                "auto" => Ok(Relief::Auto),
                "on" => Ok(Relief::On),
                "off" => Ok(Relief::Off),
                other => Err(bad("kvSpillRelief", other, "use auto, on or off")),
            })
            .transpose()?,
        seed_every: args.cold_start_seed_n,
        seed_min_blocks: args.cold_start_min_blocks,
        min_match_tokens: args.min_match_tokens,
    })
}

fn keying(args: &KvArguments) -> Result<Keying, Problem> {
    match args.keying.as_deref() {
        None | Some("" | "auto") => Ok(Keying::Auto),
        Some("parity") => Ok(Keying::Parity),
        Some("rehash") => Ok(Keying::Rehash),
        Some(other) => Err(bad("kvKeying", other, "use auto, parity or rehash")),
    }
}

fn tier_weights(args: &KvArguments) -> Result<TierWeights, Problem> {
    let mut weights = TierWeights::default();
    for (medium, weight) in args.tier_weights.iter().flatten() {
        let of_medium = match medium.as_str() {
            "cpu" => &mut weights.cpu,
            "storage" => &mut weights.storage,
            other => return Err(bad("kvTierWeights", other, "the media are cpu and storage")),
        };
        *of_medium = thousandths(weight).ok_or_else(|| Problem::OutOfRange {
            field: format!("kvTierWeights.{medium}"),
            value: shown(&weight.to_string()),
            range: "0 to 1, where 1 is a block in the accelerator's memory".to_owned(),
        })?;
    }
    Ok(weights)
}

fn thousandths(weight: &serde_json::Value) -> Option<u16> {
    let weight = weight.as_f64().filter(|weight| (0.0..=1.0).contains(weight))?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it lies between 0 and 1000")]
    Some((weight * 1000.0).round() as u16)
}

/// Rank n publishes at the port plus n.
fn ranks_fit(field: &str, port: u16, ranks: u8) -> Result<(), Problem> {
    if port.checked_add(u16::from(ranks.saturating_sub(1))).is_some() {
        return Ok(());
    }
    let range = format!("1 to {} with kvDpRankCount {ranks}", 65_536 - u32::from(ranks));
    Err(Problem::OutOfRange { field: field.to_owned(), value: port.to_string(), range })
}

fn bad(field: &str, value: &str, expected: &str) -> Problem {
    Problem::BadValue { field: field.to_owned(), value: format!("{:?}", shown(value)), expected: expected.to_owned() }
}

/// Whether the endpoints' roles go with the mode.
pub(super) fn check_roles(mode: ExactMode, pd_disagg: Option<bool>, endpoints: &[Endpoint]) -> Result<(), Problem> {
    let has = |role| endpoints.iter().any(|endpoint| endpoint.role == role);
    let both = has(Role::Prefill) && has(Role::Decode);
    match (mode, pd_disagg) {
        (ExactMode::SinglePool, Some(true)) => {
            Err(Problem::Contradiction("kvExactMode 3 is one pool: it does not go with pd_disagg_mode".to_owned()))
        }
        (ExactMode::SinglePool, _) => match endpoints.iter().find(|endpoint| endpoint.role != Role::Any) {
            Some(endpoint) => Err(Problem::RolesRefused(endpoint.key.to_string())),
            None => Ok(()),
        },
        (ExactMode::PrefillDecode, Some(false)) => Err(Problem::Contradiction(
            "kvExactMode 1 is prefill/decode: it does not go with pd_disagg_mode false".to_owned(),
        )),
        (ExactMode::PrefillDecode, _) if !both => Err(Problem::RolesMissing("kvExactMode 1 is prefill/decode")),
        (ExactMode::Off, Some(true)) if !both => Err(Problem::RolesMissing("pd_disagg_mode is on")),
        (ExactMode::Off, _) if !both && (has(Role::Prefill) || has(Role::Decode)) => {
            Err(Problem::RolesMissing("an endpoint has an ep_role"))
        }
        _ => Ok(()),
    }
}

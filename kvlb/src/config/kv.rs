//! The document's variables, `LLB_*` and `LOXILB_*`.
//!
//! Sources: the source document, sections 6.5, 8.2 and 12; ranges from LoxiLB's inference gateway.

use std::time::Duration;

use super::env::{ConfigError, Env, Setting};
use crate::contract::NoneSeed;
use crate::fleet::Relief;
use crate::policy::{BLENDS, Blend, CAP_SUM_MILLI, Settings, UnknownBlend};

/// Settings of the KV tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kv {
    /// `LLB_KV_NONE_HASH_SEED`: the engines' `PYTHONHASHSEED`.
    pub none_seed: NoneSeed,
    /// `LLB_KV_HASH_DEBUG`: a log line per computed block.
    pub hash_debug: bool,
    /// `LLB_KV_MIN_MATCH_TOKENS`, 0 to 4096, 16 unless set.
    pub min_match_tokens: u32,
    /// `LOXILB_KV_LB_MODE`, `_MEAN_LOAD_FACTOR`, `_LOAD_PENALTY`, `_CAP_SUM_MILLI`, `_COLDSTART_SEED_N` and
    /// `_COLDSTART_MIN_BLOCKS`; rules may say otherwise. `spill_relief` in it is not told yet: that is `relief`.
    pub settings: Settings,
    /// `LOXILB_KV_SPILL_RELIEF`.
    pub relief: Relief,
    /// `LOXILB_KV_MAX_BLOCKS`, names kept per endpoint and rank, 1000 to 100 million. `None`: by the engine's own number.
    pub max_blocks: Option<usize>,
    /// `LLB_KV_REPLAY_PORT_OFFSET`: from the event port to the replay port, 1000 unless set. `None` (0): no replay.
    pub replay_offset: Option<u16>,
    /// `KVLB_DECISION_BUDGET_MS`.
    pub decision_budget: Duration,
}

/// A prompt must share this many tokens before its overlap is used: with block size 1, one shared first token would else
/// be a hit.
const MIN_MATCH_TOKENS: u32 = 16;
/// LoxiLB's distance from the event port to the replay port.
const REPLAY_OFFSET: u16 = 1_000;
/// A choice that takes longer costs more than it saves.
const DECISION_BUDGET_MS: u64 = 20;

/// Documented by LoxiLB, and without effect here so far.
pub(super) const NOT_SERVED: [(&str, &str); 6] = [
    ("LOXILB_KV_ZERO_HIT_N", "kvlb proves the contract from the engine's events instead"),
    ("LLB_KV_LOADGUARD", "the load bound of LOXILB_KV_LB_MODE=hard does its work"),
    ("LLB_PD_MAX_INFLIGHT_PER_EP", "use fc_ep_max_inflight of the rule"),
    ("LLB_PD_MAX_PARK_SEC", "use fc_max_queue_wait_ms of the rule"),
    ("LLB_PD_ORIGIN_ERR_THRESHOLD", "use cb_answer_failures of the rule"),
    ("LOXILB_AI_CTRL_ADDR", "the AI controller is not served"),
];

/// The variables that have their effect.
pub(super) const SERVED: [&str; 13] = [
    "LLB_KV_NONE_HASH_SEED",
    "LLB_KV_HASH_DEBUG",
    "LLB_KV_MIN_MATCH_TOKENS",
    "LOXILB_KV_LB_MODE",
    "LOXILB_KV_MEAN_LOAD_FACTOR",
    "LOXILB_KV_LOAD_PENALTY",
    "LOXILB_KV_CAP_SUM_MILLI",
    "LOXILB_KV_SPILL_RELIEF",
    "LOXILB_KV_COLDSTART_SEED_N",
    "LOXILB_KV_COLDSTART_MIN_BLOCKS",
    "LOXILB_KV_MAX_BLOCKS",
    "LLB_KV_REPLAY_PORT_OFFSET",
    "LLB_PD_PREFILL_TIMEOUT_SEC",
];

impl Kv {
    pub(super) fn read(env: &Env, decision_budget_ms: Option<Setting<'_>>) -> Result<Self, ConfigError> {
        let number =
            |name, first, last, default| env.setting(name)?.map_or(Ok(default), |setting| setting.number(first, last));
        let small = |name, first, last: u32, default: u32| {
            number(name, first, last.into(), default.into()).map(|n| u32::try_from(n).unwrap_or(last))
        };
        let budget = decision_budget_ms.map_or(Ok(DECISION_BUDGET_MS), |setting| setting.number(1, 10_000))?;
        let offset = small("LLB_KV_REPLAY_PORT_OFFSET", 0, 65_534, REPLAY_OFFSET.into())?;
        let default = Settings::default();
        let cap_sum_milli = env
            .setting("LOXILB_KV_CAP_SUM_MILLI")?
            .map(|setting| setting.number(CAP_SUM_MILLI.div_ceil(8), CAP_SUM_MILLI * 8))
            .transpose()?;
        let settings = Settings {
            blend: blend(env)?,
            mean_load_factor: small("LOXILB_KV_MEAN_LOAD_FACTOR", 100, 1_000, default.mean_load_factor)?,
            load_penalty: small("LOXILB_KV_LOAD_PENALTY", 1, 100_000, default.load_penalty)?,
            cap_sum_milli,
            seed_every: small("LOXILB_KV_COLDSTART_SEED_N", 0, 1_000_000, default.seed_every)?,
            seed_min_blocks: small("LOXILB_KV_COLDSTART_MIN_BLOCKS", 0, 100_000_000, default.seed_min_blocks)?.max(1),
            ..default
        };
        Ok(Self {
            none_seed: none_seed(env)?,
            hash_debug: env.setting("LLB_KV_HASH_DEBUG")?.map_or(Ok(false), |setting| setting.switch())?,
            min_match_tokens: small("LLB_KV_MIN_MATCH_TOKENS", 0, 4_096, MIN_MATCH_TOKENS)?,
            settings,
            relief: env.setting("LOXILB_KV_SPILL_RELIEF")?.map_or(Ok(Relief::Auto), relief)?,
            max_blocks: max_blocks(env)?,
            replay_offset: u16::try_from(offset).ok().filter(|offset| *offset != 0),
            decision_budget: Duration::from_millis(budget),
        })
    }

    /// What an operator should know of these values.
    pub(super) fn warnings(env: &Env) -> Vec<String> {
        let mut warnings = Vec::new();
        for (name, why) in NOT_SERVED {
            if env.names().any(|set| set == name) {
                warnings.push(format!("{name} has no effect: {why}"));
            }
        }
        // What Python accepts; an engine with another PYTHONHASHSEED does not even start.
        if let Ok(Some(seed)) = env.text("LLB_KV_NONE_HASH_SEED")
            && !seed.is_empty()
            && seed != "random"
            && seed.parse::<u32>().is_err()
        {
            warnings.push(format!(
                "LLB_KV_NONE_HASH_SEED is {seed:?}, which no engine's PYTHONHASHSEED can be: Python takes 0 to 4294967295"
            ));
        }
        warnings
    }
}

/// `LLB_KV_NONE_HASH_SEED`, whose empty text is a text.
pub(super) fn none_seed(env: &Env) -> Result<NoneSeed, ConfigError> {
    let seed = env.text("LLB_KV_NONE_HASH_SEED")?;
    Ok(seed.map_or(NoneSeed::Unset, |seed| NoneSeed::Text(seed.to_owned())))
}

fn blend(env: &Env) -> Result<Blend, ConfigError> {
    let Some(setting) = env.setting("LOXILB_KV_LB_MODE")? else { return Ok(Blend::default()) };
    setting.value.trim().parse().map_err(|UnknownBlend(_)| setting.bad(BLENDS))
}

fn relief(setting: Setting<'_>) -> Result<Relief, ConfigError> {
    if setting.value.trim() == "auto" {
        return Ok(Relief::Auto);
    }
    match setting.switch() {
        Ok(true) => Ok(Relief::On),
        Ok(false) => Ok(Relief::Off),
        Err(_) => Err(setting.bad("auto, 1, true, on, yes, or 0, false, off, no")),
    }
}

fn max_blocks(env: &Env) -> Result<Option<usize>, ConfigError> {
    let Some(setting) = env.setting("LOXILB_KV_MAX_BLOCKS")? else { return Ok(None) };
    Ok(usize::try_from(setting.number(1_000, 100_000_000)?).ok())
}

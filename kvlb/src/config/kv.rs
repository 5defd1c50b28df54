//! The document's variables, `LLB_*` and `LOXILB_*`.
//!
//! Sources: the source document, sections 6.5, 8.2 and 12; ranges from LoxiLB's inference gateway.

use std::time::Duration;

use super::env::{ConfigError, Env, Setting};
use crate::contract::NoneSeed;
use crate::policy::{BlendError, Settings};

/// Settings of the KV tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kv {
    /// `LLB_KV_NONE_HASH_SEED`: the engines' `PYTHONHASHSEED`.
    pub none_seed: NoneSeed,
    /// `LLB_KV_HASH_DEBUG`: a log line per computed block.
    pub hash_debug: bool,
    /// `LLB_KV_MIN_MATCH_TOKENS`, 0 to 4096, 16 unless set.
    pub min_match_tokens: u32,
    /// `LOXILB_KV_LB_MODE` and `LOXILB_KV_MEAN_LOAD_FACTOR`; rules may say otherwise. `spill_relief` in it is not told
    /// yet: that is `relief`.
    pub settings: Settings,
    /// `LOXILB_KV_SPILL_RELIEF`.
    pub relief: Relief,
    /// `LOXILB_KV_MAX_BLOCKS`, names kept per endpoint and rank, 1000 to 100 million. `None`: by the engine's own number.
    pub max_blocks: Option<usize>,
    /// `LLB_KV_REPLAY_PORT_OFFSET`: from the event port to the replay port, 1000 unless set. `None` (0): no replay.
    pub replay_offset: Option<u16>,
    /// `KVLB_DECISION_BUDGET_MS`.
    pub decision_budget: Duration,
    /// `LOXILB_KV_COLDSTART_SEED_N` and `_MIN_BLOCKS`.
    pub cold_start: ColdStart,
}

/// `LOXILB_KV_SPILL_RELIEF`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Relief {
    /// On for single pools, off for prefill/decode.
    #[default]
    Auto,
    /// On for all rules.
    On,
    /// Off for all rules.
    Off,
}

impl Relief {
    /// `None` for auto, as `state` takes it.
    pub const fn forced(self) -> Option<bool> {
        match self {
            Self::Auto => None,
            Self::On => Some(true),
            Self::Off => Some(false),
        }
    }
}

/// How endpoints without blocks get their first ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColdStart {
    /// Every so many hits of a rule, one goes to a cold endpoint; 0: never. 16 unless set.
    pub every: u32,
    /// An endpoint with fewer blocks is cold. 16 unless set.
    pub min_blocks: u32,
}

impl Default for ColdStart {
    fn default() -> Self {
        Self { every: 16, min_blocks: 16 }
    }
}

/// A prompt must share this many tokens before its overlap is used: with block size 1, one shared first token would else
/// be a hit.
const MIN_MATCH_TOKENS: u32 = 16;
/// LoxiLB's distance from the event port to the replay port.
const REPLAY_OFFSET: u16 = 1_000;
/// A choice that takes longer costs more than it saves.
const DECISION_BUDGET_MS: u64 = 20;

/// Documented by LoxiLB, and without effect here so far.
pub(super) const NOT_SERVED: [(&str, &str); 8] = [
    ("LOXILB_KV_LOAD_PENALTY", "it belongs to the soft blends, which are not served yet"),
    ("LOXILB_KV_CAP_SUM_MILLI", "it belongs to the adaptive blends, which are not served yet"),
    ("LOXILB_KV_ZERO_HIT_N", "kvlb proves the contract from the engine's events instead"),
    ("LLB_KV_LOADGUARD", "the load bound of LOXILB_KV_LB_MODE=hard does its work"),
    ("LLB_PD_MAX_INFLIGHT_PER_EP", "admission control is not served"),
    ("LLB_PD_MAX_PARK_SEC", "admission control is not served"),
    ("LLB_PD_ORIGIN_ERR_THRESHOLD", "use cb_answer_failures of the rule"),
    ("LOXILB_AI_CTRL_ADDR", "the AI controller is not served"),
];

/// Accepted and checked, and without effect so far.
pub(super) const CHECKED_ONLY: [(&str, &str); 3] = [
    ("LLB_PD_PREFILL_TIMEOUT_SEC", "prefill/decode hand-over is not served yet"),
    ("LOXILB_KV_COLDSTART_SEED_N", "cold-start seeding is not served yet"),
    ("LOXILB_KV_COLDSTART_MIN_BLOCKS", "cold-start seeding is not served yet"),
];

/// The variables that have their effect.
pub(super) const SERVED: [&str; 8] = [
    "LLB_KV_NONE_HASH_SEED",
    "LLB_KV_HASH_DEBUG",
    "LLB_KV_MIN_MATCH_TOKENS",
    "LOXILB_KV_LB_MODE",
    "LOXILB_KV_MEAN_LOAD_FACTOR",
    "LOXILB_KV_SPILL_RELIEF",
    "LOXILB_KV_MAX_BLOCKS",
    "LLB_KV_REPLAY_PORT_OFFSET",
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
        let cold = ColdStart::default();
        Ok(Self {
            none_seed: none_seed(env)?,
            hash_debug: env.setting("LLB_KV_HASH_DEBUG")?.map_or(Ok(false), |setting| setting.switch())?,
            min_match_tokens: small("LLB_KV_MIN_MATCH_TOKENS", 0, 4_096, MIN_MATCH_TOKENS)?,
            settings: settings(
                env,
                small("LOXILB_KV_MEAN_LOAD_FACTOR", 100, 1_000, Settings::default().mean_load_factor)?,
            )?,
            relief: env.setting("LOXILB_KV_SPILL_RELIEF")?.map_or(Ok(Relief::Auto), relief)?,
            max_blocks: max_blocks(env)?,
            replay_offset: u16::try_from(offset).ok().filter(|offset| *offset != 0),
            decision_budget: Duration::from_millis(budget),
            cold_start: ColdStart {
                every: small("LOXILB_KV_COLDSTART_SEED_N", 0, 1_000_000, cold.every)?,
                min_blocks: small("LOXILB_KV_COLDSTART_MIN_BLOCKS", 0, 100_000_000, cold.min_blocks)?.max(1),
            },
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
        for (name, why) in CHECKED_ONLY {
            if env.names().any(|set| set == name) {
                warnings.push(format!("{name} has no effect yet: {why}"));
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

fn settings(env: &Env, mean_load_factor: u32) -> Result<Settings, ConfigError> {
    let default = Settings { mean_load_factor, ..Settings::default() };
    let Some(setting) = env.setting("LOXILB_KV_LB_MODE")? else { return Ok(default) };
    let blend = setting.value.trim().parse().map_err(|error| match error {
        BlendError::NotYet(_) => setting.bad("off, hard (the other modes are not served yet)"),
        BlendError::Unknown(_) => setting.bad("off, hard"),
    })?;
    Ok(Settings { blend, ..default })
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

//! The rule and its endpoints as values: what the operator wrote, checked once and valid from there on.
//!
//! Owns the words of a rule ([`Rule`], [`RuleKey`], [`Endpoint`], [`Role`], [`KvRule`]) and what makes an endpoint
//! eligible ([`Condition`]). Holds no counters, locks or sockets: what changes while traffic flows lives in `state`.

mod condition;
#[cfg(test)]
pub(crate) mod fixtures;
mod rule;

pub use condition::{Admin, Breaker, Condition, Probe};
pub use rule::{
    Endpoint, EndpointKey, EngineType, ExactMode, Keying, KvRule, Limits, Mode, Monitor, PortRange, ProbeKind, Role,
    Rule, RuleId, RuleKey, Score, Selector, TierWeights,
};

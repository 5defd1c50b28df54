//! The rule and its endpoints as values: what the operator wrote, checked once and valid from there on.
//!
//! Owns the words of a rule ([`Rule`], [`RuleKey`], [`Endpoint`], [`Role`], [`KvRule`]), what makes an endpoint eligible
//! ([`Condition`]), what an engine says of itself ([`EngineFacts`]) and of its work ([`Readings`]). Holds no counters, locks
//! or sockets: what changes while traffic flows lives in `state`.

mod condition;
mod facts;
#[cfg(test)]
pub(crate) mod fixtures;
mod pinning;
mod readings;
mod rule;
mod split;

pub use condition::{Admin, Breaker, Condition, Probe};
pub use facts::{CacheConfig, EngineFacts, EventSource, Fact, Missing, Model, Version};
pub use pinning::{Pinning, SessionSource, TrieRule};
pub use readings::{Dialect, FirstTokens, Reading, Readings};
pub use rule::{
    AdmissionMode, AdmissionRule, BadStatusCodes, BlendRule, BreakerRule, Endpoint, EndpointKey, EngineType, ExactMode,
    Keying, KvRule, Limits, Mode, Monitor, NoEndpoint, PortRange, ProbeKind, Relief, Role, Rule, RuleId, RuleKey,
    Score, Selector, StatusCodes, SynRule, TierWeights,
};
pub use split::{HandoffKind, SplitRule};

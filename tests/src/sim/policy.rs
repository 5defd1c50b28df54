//! Who chooses: kvlb in each of its modes, and models of others.

use serde_json::{Value, json};

use super::mirror::Mirror;
use super::peers::Kind;

/// How a policy chooses.
#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    /// By kvlb's router, with this `kvLbMode` and selector.
    Kvlb {
        /// `kvLbMode`.
        mode: &'static str,
        /// `sel`, for requests of which nobody holds anything.
        selector: u8,
    },
    /// As somebody else publishes.
    Peer(Kind),
}

/// A policy by its name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Policy {
    /// Its name.
    pub(super) name: &'static str,
    /// What it is.
    pub(super) about: &'static str,
    /// How it chooses.
    pub(super) how: How,
}

const ROUND_ROBIN: u8 = 0;
const LEAST_CONNECTIONS: u8 = 4;

/// Every policy.
pub(super) const ALL: &[Policy] = &[
    kvlb("off", "kvlb, kvLbMode off: the largest overlap whatever the load", "off", ROUND_ROBIN),
    kvlb("hard", "kvlb, kvLbMode hard: the largest overlap under a bound of load", "hard", ROUND_ROBIN),
    kvlb("hard-lc", "the same with selector lc: what nobody holds goes to the least loaded", "hard", LEAST_CONNECTIONS),
    kvlb("soft", "kvlb, kvLbMode soft", "soft", LEAST_CONNECTIONS),
    kvlb("adaptive", "kvlb, kvLbMode adaptive", "adaptive", LEAST_CONNECTIONS),
    kvlb("adaptive-soft", "kvlb, kvLbMode adaptive-soft", "adaptive-soft", LEAST_CONNECTIONS),
    kvlb("cost", "kvlb, kvLbMode cost: the least to compute, with what waits", "cost", LEAST_CONNECTIONS),
    peer("round-robin", "in turn", Kind::RoundRobin),
    peer("random", "by chance: a Kubernetes service", Kind::Random),
    peer("llmd-precise", "model of llm-d: match by events 3, queue 2, cache use 2", Kind::LlmdPrecise),
    peer("llmd-approximate", "model of llm-d: match by what was sent where", Kind::LlmdApproximate),
    peer("llmd-load", "model of llm-d: queue and cache use", Kind::LlmdLoad),
    peer("dynamo", "model of Dynamo: blocks to compute and blocks in use", Kind::Dynamo),
    peer("vllm-kv-aware", "model of vllm-router kv_aware: tokens to compute times requests", Kind::VllmKvAware),
    peer(
        "vllm-cache-aware",
        "model of vllm-router cache_aware: the best tree unless loads are far apart",
        Kind::VllmCacheAware,
    ),
];

const fn kvlb(name: &'static str, about: &'static str, mode: &'static str, selector: u8) -> Policy {
    Policy { name, about, how: How::Kvlb { mode, selector } }
}

const fn peer(name: &'static str, about: &'static str, kind: Kind) -> Policy {
    Policy { name, about, how: How::Peer(kind) }
}

impl Policy {
    /// The fields of the rule that it sets.
    pub(super) fn fields(&self) -> Value {
        match self.how {
            How::Kvlb { mode, selector } => json!({"kvLbMode": mode, "sel": selector}),
            How::Peer(_) => json!({}),
        }
    }

    /// Whether it is kvlb's own.
    pub(super) fn is_ours(&self) -> bool {
        matches!(self.how, How::Kvlb { .. })
    }

    /// Whether this kvlb has it.
    pub(super) fn is_there(&self) -> bool {
        Mirror::new(1, 16, 1, &self.fields()).is_ok()
    }
}

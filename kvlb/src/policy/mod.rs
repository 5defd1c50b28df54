//! Given candidates with overlap and load, which endpoint.
//!
//! Owns the blend of affinity and load ([`choose`]), the limits of what is only guessed ([`Grounds`]), and the selectors that
//! serve where affinity has no word ([`select`]). All are side-effect free over a snapshot. Invariant: a candidate that is not eligible is never
//! chosen.

mod blend;
mod bound;
mod pin;
mod selector;

pub use blend::{BLENDS, Blend, CAP_SUM_MILLI, Choice, Refusal, Settings, UnknownBlend, cheapest, choose, cold_seed};
pub use bound::Bound;
pub use pin::{Grounds, Leave, YIELD_BLOCKS, bytes_wanted};
pub use selector::{Turn, select};

/// What is known of one endpoint at the moment of the choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// Its position in the rule (`ep_idx`).
    pub endpoint: usize,
    /// Whether it may be asked: condition, role and the tries of this request taken together.
    pub eligible: bool,
    /// Blocks of the prompt that it would not have to compute, by the rule's measure.
    pub overlap: u32,
    /// Requests in flight there.
    pub load: u32,
    /// Its share of the fleet's capacity: KV blocks where known, else 1, times its weight. Never 0 for an eligible one.
    pub capacity: u64,
    /// What the operator says of its size, for selectors that go by that alone. Never 0 for an eligible one.
    pub weight: u32,
    /// Tokens of the prompt that it would have to compute; 0 where the prompt has no tokens.
    pub uncached_tokens: u64,
    /// Tokens of other requests' prompts that it has yet to compute, as far as kvlb knows.
    pub waiting_tokens: u64,
    /// Blocks that it holds at all; `None` where nothing tells.
    pub inventory: Option<u64>,
    /// When it was last chosen, as a running number of the rule's choices; 0: never.
    pub last_chosen: u64,
    /// Requests in its engine's own queue, where it has said so of late.
    pub queued: Option<u32>,
}

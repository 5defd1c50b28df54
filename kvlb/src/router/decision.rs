//! What was decided, with everything needed to explain it.

use std::fmt;

use crate::policy::Leave;

/// The guard of the ladder that a request failed: the `reason` label of
/// `loxilb_pd_kv_tier15_miss_reason_total`.
///
/// Source: the guard ladder of LoxiLB's KV-cache-aware routing document, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The rule's KV tier is off.
    ModeOff,
    /// The rule waits for its inventory.
    Warmup,
    /// The request has no prompt text.
    TextEmpty,
    /// No model could be told from the request.
    ModelEmpty,
    /// The prompt could not be turned into tokens exactly.
    Tokenize,
    /// The tokens could not be turned into block names.
    Hashes,
    /// No endpoint holds a block of the prompt.
    NoWorker,
    /// Only endpoints that may not be asked hold blocks of the prompt.
    Excluded,
    /// Too little of the prompt is held, or the prompt is too short.
    Shallow,
}

impl Reason {
    /// Every reason, in the order of the ladder.
    pub const ALL: [Self; 9] = [
        Self::ModeOff,
        Self::Warmup,
        Self::TextEmpty,
        Self::ModelEmpty,
        Self::Tokenize,
        Self::Hashes,
        Self::NoWorker,
        Self::Excluded,
        Self::Shallow,
    ];

    /// The metric's label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::ModeOff => "mode_off",
            Self::Warmup => "warmup",
            Self::TextEmpty => "text_empty",
            Self::ModelEmpty => "model_empty",
            Self::Tokenize => "tokenize",
            Self::Hashes => "hashes",
            Self::NoWorker => "no_worker",
            Self::Excluded => "excluded",
            Self::Shallow => "shallow",
        }
    }
}

/// Why affinity had no word: a normal answer, counted and never logged loudly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Miss {
    /// The guard.
    pub reason: Reason,
    /// What exactly, where the guard covers several causes; a closed set of words, may be empty.
    pub detail: &'static str,
}

impl Miss {
    /// A miss without further detail.
    pub const fn new(reason: Reason) -> Self {
        Self { reason, detail: "" }
    }

    /// A miss with its cause.
    pub const fn because(reason: Reason, detail: &'static str) -> Self {
        Self { reason, detail }
    }
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason.label())?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " ({})", self.detail) }
    }
}

/// The step of the ladder that chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// Tier 1: where its conversation was.
    Conversation,
    /// Tier 1: where prompts that begin alike were.
    Trie,
    /// Tier 1.5: KV block overlap.
    Overlap,
    /// Tier 2: the rule's own selector, or the least load among prefill endpoints.
    #[default]
    Selector,
}

impl Tier {
    /// Every tier, in the order of the ladder.
    pub const ALL: [Self; 4] = [Self::Conversation, Self::Trie, Self::Overlap, Self::Selector];

    /// The word in headers, logs and `explain`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Conversation => "1",
            Self::Trie => "1-trie",
            Self::Overlap => "1.5",
            Self::Selector => "2",
        }
    }
}

/// How long one prompt of a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptShape {
    /// Tokens.
    pub tokens: usize,
    /// Full blocks.
    pub blocks: usize,
}

/// What the KV tier would have chosen, on a rule that only observes (`kvObserve`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Position of the endpoint.
    pub endpoint: usize,
    /// Blocks of the prompts that it holds as a usable run.
    pub depth: u32,
    /// Whether only requests under way there spoke for it.
    pub expected: bool,
}

/// Which endpoint, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Position of the endpoint in the rule; `None` where nobody is eligible.
    pub endpoint: Option<usize>,
    /// Which step chose.
    pub tier: Tier,
    /// Blocks of the prompts that the endpoint holds as a usable run, summed over the request's prompts.
    pub depth: u32,
    /// Blocks of the prompts that the endpoint holds at all.
    pub count: u32,
    /// The data-parallel rank of the endpoint that holds them, where it has several.
    pub rank: Option<i64>,
    /// The load bound moved the request away from the largest overlap.
    pub spill: bool,
    /// The endpoint is one that holds next to nothing, and was chosen to get blocks of its own.
    pub seeded: bool,
    /// Tokens of the prompts that the endpoint has to compute, as far as they were named.
    pub uncached_tokens: u64,
    /// The endpoint holds too little yet, but requests under way there bring the same blocks.
    pub expected: bool,
    /// What the KV tier would have chosen, where it may not.
    pub observed: Option<Observed>,
    /// Why the request did not go where its conversation was, where that was known.
    pub left: Option<Leave>,
    /// Why it did not go where its session was, where the selector knew.
    pub moved: Option<Leave>,
    /// Why affinity had no word, where it had none.
    pub miss: Option<Miss>,
    /// The request's prompts, as far as they were named.
    pub prompts: Vec<PromptShape>,
}

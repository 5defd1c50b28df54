//! What a rule remembers of clients, beside blocks.

use std::time::Duration;

use super::{ExactMode, Rule, Selector};

/// How long a conversation is remembered unless the rule says otherwise.
///
/// Source: LoxiLB's `pd_session_ttl_sec`, whose 0 means this.
const CONVERSATION_TTL: Duration = Duration::from_mins(5);
/// How long a session is: one that a selector keeps.
///
/// Source: LoxiLB's `persist`.
const SESSION_TTL: Duration = Duration::from_hours(3);

/// What a rule remembers of clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinning {
    /// `pd_session_ttl_sec`, where it is said.
    pub ttl: Option<Duration>,
    /// `session_from_user`: the body's `user` tells a conversation, also without prefill/decode.
    pub from_user: bool,
    /// `session_header_name`: what tells a session that a selector keeps.
    pub session: Option<SessionSource>,
    /// `pd_cache_aware_mode`: prompts are remembered as text.
    pub trie: Option<TrieRule>,
}

/// What of a request tells its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionSource {
    /// A header field.
    Header(String),
    /// A cookie (`cookie:NAME`).
    Cookie(String),
    /// A member of the query (`query:NAME`).
    Query(String),
    /// The credentials of HTTP's basic authentication (`basic-auth`).
    BasicAuth,
}

/// When the memory of prompts has a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrieRule {
    /// `pd_cache_threshold`: percent of the prompt's bytes that must be known.
    pub threshold: u8,
    /// `pd_balance_abs_threshold`: it is passed over while endpoints' loads lie further apart than this.
    pub balance: u32,
}

impl Default for TrieRule {
    /// Source: LoxiLB.
    fn default() -> Self {
        Self { threshold: 20, balance: 3 }
    }
}

impl Pinning {
    /// How long a conversation is remembered after its last answer.
    pub fn conversation_ttl(&self) -> Duration {
        self.ttl.unwrap_or(CONVERSATION_TTL)
    }

    /// The same of a session.
    pub fn session_ttl(&self) -> Duration {
        self.ttl.unwrap_or(SESSION_TTL)
    }
}

impl Rule {
    /// Whether the body's `user` tells a conversation.
    pub fn knows_users(&self) -> bool {
        self.pinning.from_user || self.kv.mode == ExactMode::PrefillDecode || self.is_split()
    }

    /// Whether its selector goes by what prompts begin with.
    pub const fn hashes_prompts(&self) -> bool {
        matches!(self.selector, Selector::Chwbl | Selector::WrrHash)
    }

    /// Whether its selector keeps sessions where they are: `persist` always, `rr` where it is told what a session is.
    pub fn keeps_sessions(&self) -> bool {
        match self.selector {
            // Prefill/decode does not ask it.
            _ if self.is_split() => false,
            Selector::Persist => true,
            Selector::RoundRobin => self.pinning.session.is_some(),
            _ => false,
        }
    }
}

//! What one rule remembers of clients: conversations, sessions, and the texts of prompts.

use std::sync::Arc;

use super::sessions::Sessions;
use super::table::Endpoint;
use super::trie::Trie;
use crate::fleet::Rule;

/// One rule's memories. They live as long as the rule, through changes of it, and not beyond the process.
#[derive(Debug, Default)]
pub struct Pins {
    /// Where conversations were (tier 1).
    pub conversations: Arc<Sessions>,
    /// Where sessions were that the selector keeps: apart from conversations, which many of may come of one client.
    pub sessions: Arc<Sessions>,
    /// What was sent where (`pd_cache_aware_mode`).
    pub texts: Trie,
}

impl Pins {
    /// Forgets what is not of this version of the rule: endpoints that went leave nothing.
    pub(super) fn retain(&self, rule: &Rule, endpoints: &[Endpoint]) {
        let known: Vec<_> = endpoints.iter().map(|endpoint| endpoint.meters.id).collect();
        self.conversations.retain(&known);
        self.sessions.retain(if rule.keeps_sessions() { &known } else { &[] });
        match rule.pinning.trie {
            Some(_) => self.texts.retain(&known),
            None => self.texts.clear(),
        }
    }
}

//! Tier 1: where the conversation was, else where prompts that begin alike were.

use super::ladder::{Service, View};
use super::{Caller, Text, Tier};
use crate::fleet::TrieRule;
use crate::policy::{Grounds, Leave};

/// What tier 1 says of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Word {
    /// Where it goes, if anywhere.
    pub(super) choice: Option<(usize, Tier)>,
    /// Where its conversation was, and why it does not go there.
    pub(super) left: Option<(usize, Leave)>,
}

/// What is remembered of a caller, held against the moment.
pub(super) fn word(service: &Service, view: &dyn View, caller: &Caller, grounds: &Grounds<'_>) -> Word {
    let mut left = None;
    if let Some(endpoint) = caller.conversation.and_then(|key| view.conversation(key)) {
        match grounds.allow(endpoint) {
            Ok(()) => return Word { choice: Some((endpoint, Tier::Conversation)), left: None },
            Err(leave) => left = Some((endpoint, leave)),
        }
    }
    let by_text = match (service.rule.pinning.trie, &caller.text) {
        (Some(rule), Some(text)) => by_text(rule, view, text, grounds),
        _ => None,
    };
    Word { choice: by_text.map(|endpoint| (endpoint, Tier::Trie)), left }
}

/// The endpoint that was sent the longest beginning of this text, unless too little of it is known or loads lie too far
/// apart: what many prompts begin with would else draw all of them to one endpoint.
fn by_text(rule: TrieRule, view: &dyn View, text: &Text, grounds: &Grounds<'_>) -> Option<usize> {
    if !grounds.is_balanced(rule.balance) {
        return None;
    }
    let known = view.known(text.bytes(), text.least(rule.threshold));
    known.iter().find_map(|endpoints| grounds.least_loaded(endpoints))
}

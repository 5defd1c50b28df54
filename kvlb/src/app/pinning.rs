//! What a request on its way has to do with where its conversation and its session were.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock;
use crate::policy::Candidate;
use crate::router::{self, Caller, Decision, Key, Text, Tier, View as _, told};
use crate::state::{Claim, Claimed, Endpoint, EndpointId, Pin, Service, Sessions};
use crate::{fleet, openai};

/// The field by which a client names its conversation. Never `X-Request-Id`, which is another for each request.
const CONVERSATION_FIELD: &str = "x-conversation-id";

/// Who sends a request, as its rule wants to know it.
pub(super) fn caller<'a>(
    rule: &fleet::Rule,
    client: Option<IpAddr>,
    field: impl Fn(&str) -> Option<&'a [u8]>,
    query: Option<&'a str>,
    body: &Read<'_>,
) -> Caller {
    let user = if rule.knows_users() { body.user() } else { None };
    let session = || {
        let told = rule.pinning.session.as_ref().and_then(|source| told(source, &field, query)).map(Key::session);
        // Without a session of its own, `persist` keeps the client.
        told.or_else(|| client.filter(|_| rule.selector == fleet::Selector::Persist).map(Key::client))
    };
    Caller {
        client,
        conversation: Key::conversation(field(CONVERSATION_FIELD), user.as_deref()),
        session: if rule.keeps_sessions() { session() } else { None },
        prefix: if rule.hashes_prompts() { body.prompt().and_then(router::prefix) } else { None },
        text: if rule.pinning.trie.is_some() { body.prompt().map(Text::of) } else { None },
    }
}

/// A body, as far as somebody has read it.
pub(super) enum Read<'a> {
    /// Not at all.
    Unseen,
    /// It is a prompt.
    Prompt(&'a openai::Prompt),
    /// It is here, and no prompt that can be read.
    Other(&'a openai::Request<'a>),
}

impl Read<'_> {
    fn prompt(&self) -> Option<&openai::Prompt> {
        match self {
            Self::Prompt(prompt) => Some(prompt),
            Self::Unseen | Self::Other(_) => None,
        }
    }

    fn user(&self) -> Option<String> {
        match self {
            Self::Unseen => None,
            Self::Prompt(prompt) => prompt.user.clone(),
            Self::Other(request) => openai::user(request),
        }
    }
}

/// The pins of one request, from its choice to its end.
#[derive(Debug, Default)]
pub(super) struct Pinning {
    /// Withdrawn where the request does not get to be answered.
    claims: Vec<Claim>,
    /// The selector chose its endpoint, and keeps sessions there.
    by_selector: bool,
    /// The endpoint has answered, and has its keys.
    is_kept: bool,
    /// The endpoint that computed the prompt, where another decodes.
    prefill: Option<EndpointId>,
    /// It is decoded by an endpoint for that, as the conversation's next turns will be.
    decodes: bool,
}

impl Pinning {
    /// An endpoint has been chosen. False where another request with the same key has been faster, to another endpoint that
    /// may be asked: then the choice is to be made anew.
    pub(super) fn chosen(&mut self, service: &Service, caller: &Caller, decision: &Decision, tried: &[usize]) -> bool {
        if caller.is_nobody() {
            return true;
        }
        self.claims.clear();
        self.by_selector = decision.tier == Tier::Selector;
        let Some(endpoint) = decision.endpoint.and_then(|position| service.endpoints.get(position)) else {
            return true;
        };
        let id = endpoint.meters.id;
        for (sessions, key, ttl) in self.tables(service, caller).filter(|_| !decodes(service, endpoint)) {
            match claim(service, sessions, key, id, ttl, tried) {
                Claimed::New(claim) => self.claims.push(claim),
                Claimed::Same => {}
                // One that was left for its load, or for blocks known elsewhere, moves once the request is answered.
                Claimed::Other(_) if decision.left.is_some() => {}
                Claimed::Other(_) => return false,
            }
        }
        if let Some(text) = caller.text.as_ref() {
            service.pins.texts.learn(text.bytes(), id);
        }
        true
    }

    /// The endpoint has computed the prompt, and another will decode: the conversation stays with it whatever becomes of that.
    pub(super) fn prefilled(&mut self, service: &Service, caller: &Caller, position: usize) {
        let Some(endpoint) = service.endpoints.get(position) else { return };
        (self.prefill, self.decodes) = (Some(endpoint.meters.id), true);
        if caller.is_nobody() {
            return;
        }
        let now = clock::now();
        for (sessions, key, ttl) in self.tables(service, caller) {
            sessions.keep(key, Pin::at(endpoint.meters.id), (ttl, now));
        }
        self.claims.clear();
    }

    /// The prompt is to be computed once more.
    pub(super) fn begun_anew(&mut self) {
        (self.prefill, self.decodes) = (None, false);
    }

    /// An endpoint that decodes serves the request alone, since it has the conversation's blocks.
    pub(super) fn bypasses(&mut self) {
        self.decodes = true;
    }

    /// Where a request is that this endpoint answers: a half that took no part stays where it was. Nowhere for one that merely
    /// stands in for those that compute prompts.
    fn pin(&self, service: &Service, endpoint: &Endpoint) -> Option<Pin> {
        let id = endpoint.meters.id;
        match (decodes(service, endpoint), self.decodes) {
            (false, _) => Some(Pin::at(id)),
            (true, true) => Some(Pin { endpoint: self.prefill, decode: Some(id) }),
            (true, false) => None,
        }
    }

    /// The endpoint answers, and not that it cannot: the request's keys are pinned to it.
    pub(super) fn answered(&mut self, service: &Service, caller: &Caller, position: usize) {
        if caller.is_nobody() {
            return;
        }
        let Some(pin) = service.endpoints.get(position).and_then(|endpoint| self.pin(service, endpoint)) else {
            return;
        };
        let now = clock::now();
        for (sessions, key, ttl) in self.tables(service, caller) {
            sessions.keep(key, pin, (ttl, now));
        }
        self.claims.clear();
        self.is_kept = true;
    }

    /// The whole answer is there: the time of its keys begins.
    pub(super) fn finished(&self, service: &Service, caller: &Caller, position: usize) {
        if !self.is_kept {
            return;
        }
        let Some(pin) = service.endpoints.get(position).and_then(|endpoint| self.pin(service, endpoint)) else {
            return;
        };
        let now = clock::now();
        for (sessions, key, ttl) in self.tables(service, caller) {
            sessions.prolong(key, pin, (ttl, now));
        }
    }

    /// The endpoint failed the request: its keys are not pinned to it any more. They stay with an endpoint that did its part.
    pub(super) fn failed(&mut self, service: &Service, caller: &Caller, position: usize) {
        if caller.is_nobody() {
            return;
        }
        self.claims.clear();
        let Some(endpoint) = service.endpoints.get(position) else { return };
        if let Some(text) = caller.text.as_ref() {
            service.pins.texts.unlearn(text.bytes(), endpoint.meters.id);
        }
        for (sessions, key, _) in self.tables(service, caller) {
            sessions.forget(key, endpoint.meters.id);
        }
    }

    /// The request got no connection there: another endpoint is asked, and its keys move if that one answers.
    pub(super) fn passed_over(&mut self, service: &Service, caller: &Caller, position: usize) {
        if caller.is_nobody() {
            return;
        }
        self.claims.clear();
        if let (Some(endpoint), Some(text)) = (service.endpoints.get(position), caller.text.as_ref()) {
            service.pins.texts.unlearn(text.bytes(), endpoint.meters.id);
        }
    }

    /// The tables that the request is in, each with its key and how long it counts.
    fn tables<'a>(
        &self,
        service: &'a Service,
        caller: &Caller,
    ) -> impl Iterator<Item = (&'a Arc<Sessions>, Key, Duration)> + use<'a> {
        let (pins, rule) = (&service.pins, &service.rule().pinning);
        let conversation = caller.conversation.map(|key| (&pins.conversations, key, rule.conversation_ttl()));
        let session = caller.session.filter(|_| self.by_selector);
        conversation.into_iter().chain(session.map(|key| (&pins.sessions, key, rule.session_ttl())))
    }
}

/// Whether an endpoint computes no prompts for others, so that no conversation's prompts are pinned to it.
fn decodes(service: &Service, endpoint: &Endpoint) -> bool {
    service.rule().is_split() && endpoint.spec.role == fleet::Role::Decode
}

/// Pins a key unless it is pinned to another endpoint that may be asked.
fn claim(
    service: &Service,
    sessions: &Arc<Sessions>,
    key: Key,
    id: EndpointId,
    ttl: Duration,
    tried: &[usize],
) -> Claimed {
    let now: Instant = clock::now();
    let claimed = sessions.claim(key, id, None, (ttl, now));
    let Claimed::Other(there) = claimed else { return claimed };
    let may_be_asked = |position: usize| {
        let eligible = |candidate: &Candidate| candidate.endpoint == position && candidate.eligible;
        !tried.contains(&position) && service.candidates().iter().any(eligible)
    };
    if service.position(there).is_some_and(may_be_asked) {
        return claimed;
    }
    sessions.claim(key, id, Some(there), (ttl, now))
}

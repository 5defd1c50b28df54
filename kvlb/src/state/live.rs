//! What changes at an endpoint while traffic flows.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use arc_swap::{ArcSwap, ArcSwapOption};
use serde_json::Value;

use super::admission::Permit;
use super::breaker::Breaker;
use super::vitals::Vitals;
use crate::clock;
use crate::contract::handoff::Bootstrap;
use crate::fleet::{Admin, Condition, EngineFacts, Probe};

/// The number of one endpoint of one rule, unique in the life of the process: it survives changes of the rule, and a
/// removed endpoint's number is never given to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId(pub u32);

/// A model as an engine's `GET /v1/models` lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedModel {
    /// The name that clients send.
    pub id: String,
    /// The base model, where this one is an adapter.
    ///
    /// Source: vLLM lists an adapter as a model whose `parent` is its base model.
    pub parent: Option<String>,
    /// The engine's whole entry.
    pub card: Value,
}

/// An endpoint's moving parts, shared by every version of its rule that lists it.
#[derive(Debug)]
pub struct Meters {
    /// Which endpoint.
    pub id: EndpointId,
    load: AtomicU32,
    waiting_tokens: AtomicU64,
    probe: AtomicU8,
    last_chosen: AtomicU64,
    requests: AtomicU64,
    bytes: AtomicU64,
    addresses: ArcSwap<Vec<SocketAddr>>,
    models: ArcSwap<Vec<ListedModel>>,
    facts: ArcSwapOption<EngineFacts>,
    bootstrap: ArcSwapOption<Bootstrap>,
    /// What the proxy has seen of it of late.
    pub breaker: Breaker,
    /// What the engine says of its work.
    pub vitals: Vitals,
}

impl Meters {
    /// A fresh endpoint that nothing is known of.
    pub fn new(id: EndpointId) -> Self {
        Self {
            id,
            load: AtomicU32::new(0),
            waiting_tokens: AtomicU64::new(0),
            probe: AtomicU8::new(0),
            last_chosen: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            addresses: ArcSwap::default(),
            models: ArcSwap::default(),
            facts: ArcSwapOption::empty(),
            bootstrap: ArcSwapOption::empty(),
            breaker: Breaker::new(clock::now()),
            vitals: Vitals::default(),
        }
    }

    /// What it has told for handoffs that need it.
    pub fn bootstrap(&self) -> Option<Arc<Bootstrap>> {
        self.bootstrap.load_full()
    }

    /// Notes what it tells.
    pub fn set_bootstrap(&self, told: Option<Bootstrap>) {
        self.bootstrap.store(told.map(Arc::new));
    }

    /// Requests in flight.
    pub fn load(&self) -> u32 {
        self.load.load(Ordering::Relaxed)
    }

    /// Tokens of prompts that it has yet to compute, as far as kvlb knows.
    pub fn waiting_tokens(&self) -> u64 {
        self.waiting_tokens.load(Ordering::Relaxed)
    }

    /// Counts tokens as yet to be computed there, until they are released.
    pub fn await_tokens(self: &Arc<Self>, tokens: u64) -> Arc<Backlog> {
        self.waiting_tokens.fetch_add(tokens, Ordering::Relaxed);
        Arc::new(Backlog { meters: Arc::clone(self), tokens: AtomicU64::new(tokens) })
    }

    /// Requests sent there since the endpoint was added.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Bytes of answers relayed from there.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Counts bytes of an answer.
    pub fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts one request, of `weight` prompts, as in flight until the guard is dropped.
    pub fn enter(self: &Arc<Self>, weight: u32, turn: u64) -> InFlight {
        self.load.fetch_add(weight, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.last_chosen.store(turn, Ordering::Relaxed);
        InFlight { meters: Arc::clone(self), weight, trial: false, permit: None }
    }

    /// When it was last chosen, as the rule's turn number.
    pub fn last_chosen(&self) -> u64 {
        self.last_chosen.load(Ordering::Relaxed)
    }

    /// The probe's verdict; true when that is another one than before.
    pub fn set_probe(&self, probe: Probe) -> bool {
        let word = probe as u8;
        self.probe.swap(word, Ordering::AcqRel) != word
    }

    /// The probe's last verdict.
    pub fn probe(&self) -> Probe {
        match self.probe.load(Ordering::Acquire) {
            word if word == Probe::Up as u8 => Probe::Up,
            word if word == Probe::Down as u8 => Probe::Down,
            _ => Probe::Unknown,
        }
    }

    /// The endpoint's condition, given what the rule says of it.
    pub fn condition(&self, admin: Admin) -> Condition {
        Condition { probe: self.probe(), admin, breaker: self.breaker.word(clock::now) }
    }

    /// Where to connect; empty while the name has not been resolved.
    pub fn addresses(&self) -> Arc<Vec<SocketAddr>> {
        self.addresses.load_full()
    }

    /// Learns where to connect.
    pub fn set_addresses(&self, addresses: Vec<SocketAddr>) {
        if **self.addresses.load() != addresses {
            self.addresses.store(Arc::new(addresses));
        }
    }

    /// Models that the engine lists, adapters included.
    pub fn models(&self) -> Arc<Vec<ListedModel>> {
        self.models.load_full()
    }

    /// Learns what the engine serves.
    pub fn set_models(&self, models: Vec<ListedModel>) {
        self.models.store(Arc::new(models));
    }

    /// What the engine said of itself when it was last asked; `None` before the first time.
    pub fn facts(&self) -> Option<Arc<EngineFacts>> {
        self.facts.load_full()
    }

    /// Learns what the engine says of itself.
    pub fn set_facts(&self, facts: EngineFacts) {
        self.facts.store(Some(Arc::new(facts)));
    }
}

/// One request in flight at an endpoint: counted from its making to its end, whatever way it ends.
#[derive(Debug)]
pub struct InFlight {
    meters: Arc<Meters>,
    weight: u32,
    trial: bool,
    permit: Option<Permit>,
}

impl InFlight {
    /// The request has one of the places for trials that the endpoint's breaker gives, until it ends.
    #[must_use]
    pub fn as_trial(mut self) -> Self {
        self.trial = true;
        self
    }

    /// The request has one of the places that its rule's admission gives, until it ends.
    #[must_use]
    pub fn with_permit(mut self, permit: Permit) -> Self {
        self.permit = Some(permit);
        self
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.trial {
            self.meters.breaker.dismiss();
        }
        let before = self.meters.load.fetch_sub(self.weight, Ordering::Relaxed);
        debug_assert!(before >= self.weight, "load went below zero");
    }
}

/// Tokens that an endpoint has yet to compute for one request: counted until the answer's first byte, the announcement of the
/// prompt's blocks, or the request's end, whichever comes first.
#[derive(Debug)]
pub struct Backlog {
    meters: Arc<Meters>,
    tokens: AtomicU64,
}

impl Backlog {
    /// They are computed, or will not be.
    pub fn release(&self) {
        let tokens = self.tokens.swap(0, Ordering::Relaxed);
        let before = self.meters.waiting_tokens.fetch_sub(tokens, Ordering::Relaxed);
        debug_assert!(before >= tokens, "waiting tokens went below zero");
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_returns_to_zero_when_the_guards_are_gone() {
        let meters = Arc::new(Meters::new(EndpointId(1)));
        let first = meters.enter(1, 1);
        let batch = meters.enter(5, 2);
        assert_eq!(meters.load(), 6);
        drop(first);
        assert_eq!(meters.load(), 5);
        drop(batch);
        assert_eq!((meters.load(), meters.requests(), meters.last_chosen()), (0, 2, 2));
    }

    #[test]
    fn tokens_wait_until_they_are_released_once() {
        let meters = Arc::new(Meters::new(EndpointId(1)));
        let first = meters.await_tokens(700);
        let second = meters.await_tokens(30);
        assert_eq!(meters.waiting_tokens(), 730);
        let announced = Arc::clone(&first);
        announced.release();
        assert_eq!(meters.waiting_tokens(), 30);
        drop((first, announced, second));
        assert_eq!(meters.waiting_tokens(), 0);
    }

    #[test]
    fn every_cause_of_being_out_shows_in_the_condition() {
        let meters = Meters::new(EndpointId(1));
        assert!(meters.condition(Admin::Up).eligible());
        assert!(meters.set_probe(Probe::Down) && !meters.set_probe(Probe::Down));
        assert_eq!(meters.condition(Admin::Up).label(), "inactive");
        meters.set_probe(Probe::Up);
        assert_eq!(meters.condition(Admin::Up).label(), "active");
        assert_eq!(meters.condition(Admin::Draining).label(), "draining");
        assert_eq!(meters.condition(Admin::Down).label(), "admin-down");
    }
}

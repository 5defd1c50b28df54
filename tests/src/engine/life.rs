//! One life of an engine: the state between its sockets. What computes is in its ranks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::call::Call;
use super::chance::Chance;
use super::clock;
use super::config::EngineConfig;
use super::faults::Faults;
use super::handoff::legs::Handoffs;
use super::journal::Journal;
use super::metrics::HttpCounts;
use super::rank::{Origin, Rank, Running};
use super::tokens::Tokens;

/// What the tasks of one life share.
#[derive(Debug)]
pub(super) struct Life {
    /// How the engine was built.
    pub(super) config: Arc<EngineConfig>,
    /// Text to tokens and back.
    pub(super) tokens: Arc<Tokens>,
    /// What goes wrong.
    pub(super) faults: Arc<Faults>,
    /// What was asked.
    pub(super) journal: Arc<Journal>,
    /// Number of this life, from 0.
    pub(super) number: u64,
    /// Start of this life, seconds since the Unix epoch.
    pub(super) started: f64,
    /// Answers counted for `/metrics`.
    pub(super) answered: Mutex<HttpCounts>,
    ranks: Vec<Mutex<Arc<Rank>>>,
    next_rank: AtomicUsize,
}

/// What outlives a life.
#[derive(Debug, Clone)]
pub(super) struct Inherited {
    pub(super) config: Arc<EngineConfig>,
    pub(super) tokens: Arc<Tokens>,
    pub(super) faults: Arc<Faults>,
    pub(super) journal: Arc<Journal>,
}

impl Life {
    /// A life with these ranks, in their order.
    pub(super) fn new(inherited: Inherited, number: u64, ranks: Vec<Arc<Rank>>) -> Self {
        let Inherited { config, tokens, faults, journal } = inherited;
        Self {
            number,
            started: clock::unix_seconds(),
            answered: Mutex::default(),
            ranks: ranks.into_iter().map(Mutex::new).collect(),
            next_rank: AtomicUsize::new(0),
            config,
            tokens,
            faults,
            journal,
        }
    }

    /// Every rank as it is now.
    pub(super) fn ranks(&self) -> Vec<Arc<Rank>> {
        self.ranks.iter().map(|rank| Arc::clone(&rank.lock().unwrap_or_else(PoisonError::into_inner))).collect()
    }

    /// Puts a new rank in the place of the one with its number.
    pub(super) fn replace(&self, rank: Arc<Rank>) {
        if let Some(place) = self.ranks.get(rank.number) {
            *place.lock().unwrap_or_else(PoisonError::into_inner) = rank;
        }
    }

    /// Runs a call where it wants to be, else on the next rank in turn.
    pub(super) fn submit(&self, call: &Call, origin: Origin<'_>) -> Option<Running> {
        let ranks = self.ranks();
        let rank = call.rank.unwrap_or_else(|| self.next_rank.fetch_add(1, Ordering::Relaxed) % ranks.len());
        ranks.get(rank).map(|rank| rank.submit(call, origin))
    }

    /// What the handoffs of all lives add up to, and what is open now.
    pub(super) fn handoffs(&self) -> Handoffs {
        let pinned = self.ranks().into_iter().map(|rank| rank.scheduler().pinned());
        let (leases_open, blocks_pinned) = pinned.fold((0, 0), |(leases, blocks), of| (leases + of.0, blocks + of.1));
        Handoffs { leases_open, blocks_pinned, ..self.journal.legs.sums() }
    }

    /// Requests being computed by all ranks.
    pub(super) fn running(&self) -> usize {
        self.ranks().iter().map(|rank| rank.scheduler().running()).sum()
    }

    /// Requests waiting at all ranks.
    pub(super) fn waiting(&self) -> usize {
        self.ranks().iter().map(|rank| rank.scheduler().waiting()).sum()
    }

    /// Loses a share of the idle blocks of every rank without telling; how many.
    pub(super) fn forget(&self, share: f64) -> usize {
        let seed = Chance::seed_of("forget", &[self.config.chance_seed, self.number]);
        self.ranks().iter().map(|rank| rank.forget(share, seed)).sum()
    }

    /// Cached names and how many copies of each, over all ranks.
    pub(super) fn blocks(&self) -> BTreeMap<u64, usize> {
        let mut blocks = BTreeMap::new();
        for (name, copies) in self.ranks().iter().flat_map(|rank| rank.blocks()) {
            *blocks.entry(name).or_default() += copies;
        }
        blocks
    }
}

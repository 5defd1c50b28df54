//! What is known of one endpoint's cache: the slots of its ranks, its contract, and how its event stream fares.
//!
//! Ingest writes it, everybody reads it. Dropping it removes its slots from the index.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::index::{Index, Overlap, SlotId};
use crate::contract::attest::{Attestor, Contract, EngineLabel};
use crate::contract::events::{Batch, Event};
use crate::contract::{BlockHash, EventSeq, KeyEra};

/// Data-parallel ranks of one endpoint. Source: the document's `kvDpRankCount`.
pub const RANKS_MAX: usize = 8;

/// How an endpoint's replay fares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplayState {
    /// The rule wants none.
    Off,
    /// One is wanted or running.
    #[default]
    Pending,
    /// The last one was applied.
    Applied,
    /// The engine did not answer.
    Unavailable,
}

impl ReplayState {
    const ALL: [Self; 4] = [Self::Off, Self::Pending, Self::Applied, Self::Unavailable];

    /// The word that REST and CLI use.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Pending => "pending",
            Self::Applied => "applied",
            Self::Unavailable => "unavailable",
        }
    }
}

/// What befell an endpoint's event stream since its rule was made.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections made after the first.
    pub reconnects: AtomicU64,
    /// Connections that broke, and messages that were none.
    pub recv_errors: AtomicU64,
    /// Times that batches were missing.
    pub gaps: AtomicU64,
    /// Batches that were lost for good.
    pub missed: AtomicU64,
    /// New engine lives.
    pub restarts: AtomicU64,
    /// Replays asked for.
    pub replays: AtomicU64,
    /// Batches that arrived again.
    pub duplicates: AtomicU64,
    /// Messages dropped because the apply side was behind; each is a gap.
    pub dropped: AtomicU64,
    /// Batches applied.
    pub batches: AtomicU64,
    /// Batches and events that could not be read.
    pub undecodable: AtomicU64,
    /// Events of kinds that are not known, or whose blocks no prompt can name.
    pub unknown: AtomicU64,
    /// Blocks stored.
    pub stored: AtomicU64,
    /// Blocks removed.
    pub removed: AtomicU64,
    /// Removals of copies that were not known.
    pub unknown_removals: AtomicU64,
    /// Blocks dropped because the endpoint held too many.
    pub evicted: AtomicU64,
    /// Batches of ranks beyond [`RANKS_MAX`], or for which no slot was left.
    pub ranks_refused: AtomicU64,
}

/// An endpoint's state at one moment.
#[derive(Clone, Debug)]
pub struct KvStatus {
    /// Whether its names agree with the rule.
    pub contract: Arc<Contract>,
    /// Blocks held over all ranks.
    pub blocks: usize,
    /// Ranks seen.
    pub ranks: usize,
    /// Whether its event socket is connected.
    pub connected: bool,
    /// How its replay fares.
    pub replay: ReplayState,
    /// The number of the last batch applied.
    pub sequence: Option<EventSeq>,
    /// How long ago that was.
    pub last_event_age: Option<Duration>,
}

/// One endpoint's cache.
#[derive(Debug)]
pub struct EndpointKv {
    index: Arc<Index>,
    slots: ArcSwap<Vec<(i64, SlotId)>>,
    attestor: Mutex<Attestor>,
    contract: ArcSwap<Contract>,
    untagged: AtomicBool,
    label: ArcSwap<EngineLabel>,
    connected: AtomicBool,
    replay: AtomicU8,
    /// The last sequence number and when it was applied.
    last: Mutex<Option<(EventSeq, Instant)>>,
    /// Microseconds from the making of the last batch to its arrival here.
    lag_micros: AtomicU64,
    /// What befell its event stream.
    pub counters: Counters,
}

impl EndpointKv {
    /// An endpoint that has announced nothing, whose blocks go to `index`.
    pub fn new(index: Arc<Index>, attestor: Attestor) -> Self {
        Self {
            index,
            slots: ArcSwap::default(),
            contract: ArcSwap::from_pointee(attestor.contract().clone()),
            attestor: Mutex::new(attestor),
            untagged: AtomicBool::new(false),
            label: ArcSwap::default(),
            connected: AtomicBool::new(false),
            replay: AtomicU8::new(ReplayState::Pending as u8),
            last: Mutex::new(None),
            lag_micros: AtomicU64::new(0),
            counters: Counters::default(),
        }
    }

    /// Notes how long the last batch was under way.
    pub fn set_lag(&self, lag: Duration) {
        self.lag_micros.store(u64::try_from(lag.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// How long the last batch was under way, by the engine's clock and ours; a replayed one was for long.
    pub fn lag(&self) -> Duration {
        Duration::from_micros(self.lag_micros.load(Ordering::Relaxed))
    }

    /// The index that holds its blocks.
    pub const fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// The slots of its ranks, in the order in which they appeared.
    pub fn slots(&self) -> Vec<(i64, SlotId)> {
        self.slots.load().to_vec()
    }

    /// Blocks held over all ranks.
    pub fn blocks(&self) -> usize {
        self.slots.load().iter().map(|&(_, slot)| self.index.blocks(slot)).sum()
    }

    /// The names that any rank holds, in order.
    pub fn names(&self) -> Vec<BlockHash> {
        let mut names: Vec<_> = self.slots.load().iter().flat_map(|&(_, slot)| self.index.names(slot)).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Its depth and count among the answers of [`Index::overlaps`]: those of the rank that holds most.
    pub fn overlap(&self, overlaps: &[Overlap]) -> (u32, u32) {
        let of_slot = |slot: SlotId| {
            let found = overlaps.binary_search_by_key(&slot, |overlap| overlap.slot).ok();
            found.map_or((0, 0), |at| (overlaps[at].depth, overlaps[at].count))
        };
        self.slots.load().iter().map(|&(_, slot)| of_slot(slot)).max().unwrap_or((0, 0))
    }

    /// Whether its names agree with the rule.
    pub fn contract(&self) -> Arc<Contract> {
        self.contract.load_full()
    }

    /// How it writes extra keys, as far as its announcements show.
    pub fn era(&self) -> KeyEra {
        if self.untagged.load(Ordering::Relaxed) { KeyEra::Untagged } else { KeyEra::Tagged }
    }

    /// What it says of itself.
    pub fn label(&self) -> Arc<EngineLabel> {
        self.label.load_full()
    }

    /// Its state at `now`.
    pub fn status(&self, now: Instant) -> KvStatus {
        let last = *self.last.lock();
        let replay = self.replay.load(Ordering::Relaxed);
        KvStatus {
            contract: self.contract(),
            blocks: self.blocks(),
            ranks: self.slots.load().len(),
            connected: self.connected.load(Ordering::Relaxed),
            replay: ReplayState::ALL.get(usize::from(replay)).copied().unwrap_or_default(),
            sequence: last.map(|(seq, _)| seq),
            last_event_age: last.map(|(_, at)| now.saturating_duration_since(at)),
        }
    }

    /// Applies a batch. Gives the contract where its verdict has changed.
    pub fn apply(&self, seq: EventSeq, batch: &Batch, now: Instant) -> Option<Arc<Contract>> {
        let counters = &self.counters;
        count(&counters.batches, 1);
        count(&counters.undecodable, batch.undecodable);
        count(&counters.unknown, batch.unknown + batch.skipped);
        *self.last.lock() = Some((seq, now));
        let Some(slot) = self.slot(batch.dp_rank.unwrap_or(0)) else {
            count(&counters.ranks_refused, 1);
            return None;
        };
        let mut changed = false;
        // What comes before the last clearing leaves nothing, and each clearing walks through the whole index.
        let last_clearing = batch.events.iter().rposition(|event| matches!(event, Event::Cleared)).unwrap_or(0);
        for (position, event) in batch.events.iter().enumerate() {
            if let Event::Stored(stored) = event {
                let mut attestor = self.attestor.lock();
                changed |= attestor.check(stored);
                self.untagged.store(attestor.era() == KeyEra::Untagged, Ordering::Relaxed);
            }
            if position < last_clearing {
                continue;
            }
            let applied = self.index.apply(slot, event);
            count(&counters.stored, applied.stored);
            count(&counters.removed, applied.removed);
            count(&counters.unknown_removals, applied.unknown);
            count(&counters.evicted, applied.evicted);
        }
        changed.then(|| self.publish())
    }

    /// Empties its slots. A new engine life may also run with other flags, so its contract is open again; gives the
    /// contract where its verdict has changed.
    pub fn clear(&self, new_life: bool) -> Option<Arc<Contract>> {
        for &(_, slot) in self.slots.load().iter() {
            self.index.clear(slot);
        }
        if !new_life {
            return None;
        }
        *self.last.lock() = None;
        self.attestor.lock().new_life();
        let before = self.contract();
        let after = self.publish();
        (before != after).then_some(after)
    }

    /// Notes what the engine says of itself. Gives the contract where its verdict has changed.
    pub fn set_label(&self, label: EngineLabel) -> Option<Arc<Contract>> {
        if let Some(blocks) = label.num_gpu_blocks.filter(|_| **self.label.load() != label) {
            for &(_, slot) in self.slots.load().iter() {
                self.index.set_gpu_blocks(slot, blocks);
            }
        }
        self.label.store(Arc::new(label.clone()));
        let changed = self.attestor.lock().set_label(label);
        changed.then(|| self.publish())
    }

    /// Notes that the names of a request met announced ones. Gives the contract where its verdict has changed.
    pub fn proved_by_request(&self) -> Option<Arc<Contract>> {
        if **self.contract.load() == Contract::ProvedByRequest {
            return None;
        }
        let changed = self.attestor.lock().proved_by_request();
        changed.then(|| self.publish())
    }

    /// Notes whether its event socket is connected.
    pub fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Ordering::Relaxed);
    }

    /// Notes how its replay fares.
    pub fn set_replay(&self, replay: ReplayState) {
        self.replay.store(replay as u8, Ordering::Relaxed);
    }

    fn publish(&self) -> Arc<Contract> {
        let attestor = self.attestor.lock();
        self.untagged.store(attestor.era() == KeyEra::Untagged, Ordering::Relaxed);
        let contract = Arc::new(attestor.contract().clone());
        self.contract.store(Arc::clone(&contract));
        contract
    }

    /// The slot of a rank; its first batch makes one.
    fn slot(&self, rank: i64) -> Option<SlotId> {
        let slots = self.slots.load();
        if let Some(&(_, slot)) = slots.iter().find(|(known, _)| *known == rank) {
            return Some(slot);
        }
        if slots.len() >= RANKS_MAX {
            return None;
        }
        let slot = self.index.add_slot()?;
        if let Some(blocks) = self.label.load().num_gpu_blocks {
            self.index.set_gpu_blocks(slot, blocks);
        }
        let mut more = slots.to_vec();
        more.push((rank, slot));
        self.slots.store(Arc::new(more));
        Some(slot)
    }
}

impl Drop for EndpointKv {
    fn drop(&mut self) {
        for &(_, slot) in self.slots.load().iter() {
            self.index.remove_slot(slot);
        }
    }
}

fn count(counter: &AtomicU64, by: u32) {
    if by > 0 {
        counter.fetch_add(by.into(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::events::Stored;
    use crate::contract::{BlockSize, HashAlgo, NoneSeed};
    use crate::state::index::IndexConfig;

    fn endpoint(index: &Arc<Index>) -> EndpointKv {
        let attestor = Attestor::new(HashAlgo::Sha256Cbor, NoneSeed::Text("0".into()), BlockSize::new(16).unwrap());
        EndpointKv::new(Arc::clone(index), attestor)
    }

    fn batch(rank: i64, names: &[u64]) -> Batch {
        let hashes = names.iter().map(|&name| BlockHash(name).into()).collect();
        let events = vec![Event::Stored(Stored { hashes, ..Stored::default() })];
        Batch { ts: 0.0, dp_rank: Some(rank), events, undecodable: 0, unknown: 0, skipped: 0 }
    }

    fn apply(endpoint: &EndpointKv, batch: &Batch) {
        endpoint.apply(EventSeq(1), batch, crate::clock::now());
    }

    #[test]
    fn ranks_are_caches_of_their_own_and_the_fullest_speaks_for_the_endpoint() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let (one, other) = (endpoint(&index), endpoint(&index));
        apply(&one, &batch(0, &[1, 2]));
        apply(&one, &batch(1, &[1, 2, 3]));
        apply(&other, &batch(0, &[1]));
        let mut overlaps = Vec::new();
        index.overlaps(&[1, 2, 3, 4].map(BlockHash), &mut overlaps);
        assert_eq!((one.overlap(&overlaps), other.overlap(&overlaps)), ((3, 3), (1, 1)));
        assert_eq!((one.blocks(), one.names().len(), one.status(crate::clock::now()).ranks), (5, 3, 2));
    }

    #[test]
    fn of_many_clearings_in_a_batch_only_what_follows_the_last_is_left() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = endpoint(&index);
        apply(&endpoint, &batch(0, &[9]));
        let mut events = batch(0, &[1]).events;
        for name in 2..6 {
            events.push(Event::Cleared);
            events.extend(batch(0, &[name]).events);
        }
        apply(&endpoint, &Batch { events, ..batch(0, &[]) });
        assert_eq!(endpoint.names(), [BlockHash(5)]);
        apply(&endpoint, &Batch { events: vec![Event::Cleared; 3], ..batch(0, &[]) });
        assert_eq!(endpoint.blocks(), 0);
    }

    #[test]
    fn ranks_are_bounded() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = endpoint(&index);
        for rank in 0..20 {
            apply(&endpoint, &batch(rank, &[1]));
        }
        assert_eq!(endpoint.slots().len(), RANKS_MAX);
        assert_eq!(endpoint.counters.ranks_refused.load(Ordering::Relaxed), 12);
    }

    #[test]
    fn an_endpoint_that_goes_leaves_nothing() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = endpoint(&index);
        apply(&endpoint, &batch(0, &[1, 2]));
        let slot = endpoint.slots()[0].1;
        drop(endpoint);
        assert_eq!(index.blocks(slot), 0);
        let mut overlaps = Vec::new();
        index.overlaps(&[BlockHash(1)], &mut overlaps);
        assert_eq!(overlaps, []);
    }

    #[test]
    fn the_engines_size_bounds_slots_that_come_before_and_after_it_is_known() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = endpoint(&index);
        let names: Vec<_> = (0..100).collect();
        apply(&endpoint, &batch(0, &names));
        endpoint.set_label(EngineLabel { num_gpu_blocks: Some(5), ..EngineLabel::default() });
        apply(&endpoint, &batch(1, &names));
        assert_eq!(endpoint.slots().iter().map(|&(_, slot)| index.blocks(slot)).collect::<Vec<_>>(), [20, 20]);
    }
}

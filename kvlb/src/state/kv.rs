//! What is known of one endpoint's cache: the slots of its ranks, its contract, and how its event stream fares.
//!
//! Ingest writes it, everybody reads it. Dropping it removes its slots from the index.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::expect::Expectations;
use super::index::{Applied, Index, Overlap, SlotId};
use super::ledger::Ledger;
use super::live::EndpointId;
use crate::contract::attest::{Attestor, Contract, EngineLabel};
use crate::contract::events::{Attention, Batch, Event, Stored, WireHash};
use crate::contract::{BlockHash, BlockSize, EventSeq, HashAlgo, Hasher, KeyEra, KeySpace, NoneSeed, Rehash};
use crate::fleet::Keying;
use crate::inventory::Aliases;
use crate::router;

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
    /// Blocks that have no name of ours because their parent was never announced.
    pub orphans: AtomicU64,
    /// Copies taken back because the engine cannot have so many: hits that it announced again.
    pub disproved: AtomicU64,
    /// Times that the engine's own reports gave the mirror the lie.
    pub distrusted: AtomicU64,
}

/// An endpoint's state at one moment.
#[derive(Clone, Debug)]
pub struct KvStatus {
    /// Whether its names agree with the rule.
    pub contract: Arc<Contract>,
    /// Whether its blocks have names of ours.
    pub rehashed: bool,
    /// Blocks held over all ranks.
    pub blocks: usize,
    /// Ranks seen.
    pub ranks: usize,
    /// Whether all its event sockets are connected.
    pub connected: bool,
    /// How its replay fares: the rank that has least.
    pub replay: ReplayState,
    /// The number of the last batch applied, of the first rank.
    pub sequence: Option<EventSeq>,
    /// How long ago the last batch of any rank was applied.
    pub last_event_age: Option<Duration>,
}

/// How an endpoint's blocks are to be named.
#[derive(Clone, Debug)]
pub struct Naming {
    /// The rule's `kvHashAlgo`.
    pub algo: HashAlgo,
    /// The engines' `PYTHONHASHSEED`, as the operator says.
    pub seed: NoneSeed,
    /// The rule's `kvBlockSize`.
    pub block_size: BlockSize,
    /// The rule's `kvKeying`.
    pub keying: Keying,
    /// How blocks are named here where the engine's names are of no use.
    pub rehash: Rehash,
}

/// One event stream of an endpoint: that of one data-parallel rank, or of all where one socket publishes for all.
#[derive(Debug)]
pub struct Feed {
    /// Its position: the rank of batches that do not say one.
    number: usize,
    connected: AtomicBool,
    replay: AtomicU8,
    /// The last sequence number and when it was applied.
    last: Mutex<Option<(EventSeq, Instant)>>,
    /// Microseconds from the making of the last batch to its arrival here.
    lag_micros: AtomicU64,
    /// Whether what it told of is not to be believed any more.
    doubted: AtomicBool,
}

impl Feed {
    fn new(number: usize) -> Self {
        Self {
            number,
            connected: AtomicBool::new(false),
            replay: AtomicU8::new(ReplayState::Pending as u8),
            last: Mutex::new(None),
            lag_micros: AtomicU64::new(0),
            doubted: AtomicBool::new(false),
        }
    }

    /// Notes how long the last batch was under way.
    pub fn set_lag(&self, lag: Duration) {
        self.lag_micros.store(u64::try_from(lag.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Notes whether its event socket is connected.
    pub fn set_connected(&self, connected: bool) {
        self.connected.store(connected, Ordering::Relaxed);
    }

    /// Whether what it told of is not to be believed any more, until [`EndpointKv::clear`] forgets it.
    pub fn is_doubted(&self) -> bool {
        self.doubted.load(Ordering::Relaxed)
    }

    /// Notes how its replay fares.
    pub fn set_replay(&self, replay: ReplayState) {
        self.replay.store(replay as u8, Ordering::Relaxed);
    }

    fn replay(&self) -> ReplayState {
        ReplayState::ALL.get(usize::from(self.replay.load(Ordering::Relaxed))).copied().unwrap_or_default()
    }
}

/// The cache of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rank {
    number: i64,
    /// The feed that tells of it.
    feed: usize,
    slot: SlotId,
}

/// How blocks are named now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    /// As the engine names them.
    Engine,
    /// In our own way; the size of a block is the first that the engine announces.
    Ours(Option<BlockSize>),
}

/// One endpoint's cache.
#[derive(Debug)]
pub struct EndpointKv {
    index: Arc<Index>,
    hasher: Hasher,
    keying: Keying,
    rehash: Rehash,
    feeds: ArcSwap<Vec<Arc<Feed>>>,
    ranks: ArcSwap<Vec<Rank>>,
    attestor: Mutex<Attestor>,
    contract: ArcSwap<Contract>,
    untagged: AtomicBool,
    label: ArcSwap<EngineLabel>,
    names: ArcSwap<Names>,
    /// What the engine calls blocks that have names of ours, by slot.
    aliases: Mutex<HashMap<SlotId, Aliases>>,
    /// Grows when every feed has to tell its story again.
    renamed: watch::Sender<u64>,
    /// What was predicted of it, and what its engine reports.
    pub ledger: Ledger,
    /// Where requests that are under way to it leave what they bring.
    expectations: OnceLock<(Arc<Expectations>, EndpointId)>,
    /// What befell its event streams.
    pub counters: Counters,
}

impl EndpointKv {
    /// An endpoint that has announced nothing, whose blocks go to `index`.
    pub fn new(index: Arc<Index>, naming: &Naming) -> Self {
        let attestor = Attestor::new(naming.algo, naming.seed.clone(), naming.block_size);
        let names = if naming.keying == Keying::Rehash { Names::Ours(None) } else { Names::Engine };
        Self {
            index,
            hasher: Hasher::new(naming.algo, &naming.seed, naming.block_size),
            keying: naming.keying,
            rehash: naming.rehash,
            feeds: ArcSwap::default(),
            ranks: ArcSwap::default(),
            contract: ArcSwap::from_pointee(attestor.contract().clone()),
            attestor: Mutex::new(attestor),
            untagged: AtomicBool::new(false),
            label: ArcSwap::default(),
            names: ArcSwap::from_pointee(names),
            aliases: Mutex::default(),
            renamed: watch::Sender::new(0),
            ledger: Ledger::default(),
            expectations: OnceLock::new(),
            counters: Counters::default(),
        }
    }

    /// Tells where requests under way to this endpoint leave what they bring; the first word counts.
    pub fn set_expectations(&self, expectations: &Arc<Expectations>, id: EndpointId) {
        self.expectations.get_or_init(|| (Arc::clone(expectations), id));
    }

    /// What has been announced is not expected any more.
    fn fulfil(&self, hashes: &[WireHash]) {
        if let Some((expectations, id)) = self.expectations.get() {
            expectations.announced(*id, hashes.iter().map(|hash| hash.name));
        }
    }

    /// The event stream with this number, below [`RANKS_MAX`]; the first call makes it.
    pub fn feed(&self, number: usize) -> Arc<Feed> {
        let number = number.min(RANKS_MAX - 1);
        self.feeds.rcu(|feeds| {
            let mut feeds = feeds.to_vec();
            let known = feeds.len();
            feeds.extend((known..=number).map(|number| Arc::new(Feed::new(number))));
            feeds
        });
        Arc::clone(&self.feeds.load()[number])
    }

    /// Keeps the first `feeds` event streams; what the others told of is forgotten.
    pub fn keep_feeds(&self, feeds: usize) {
        if self.feeds.load().len() <= feeds {
            return;
        }
        self.feeds.rcu(|before| before.iter().take(feeds).cloned().collect::<Vec<_>>());
        let (kept, gone): (Vec<Rank>, Vec<Rank>) = self.ranks.load().iter().partition(|rank| rank.feed < feeds);
        self.ranks.store(Arc::new(kept));
        for rank in gone {
            self.aliases.lock().remove(&rank.slot);
            self.index.remove_slot(rank.slot);
        }
    }

    /// How long the last batch was under way, by the engine's clock and ours; a replayed one was for long.
    pub fn lag(&self) -> Duration {
        let micros = self.feeds.load().iter().map(|feed| feed.lag_micros.load(Ordering::Relaxed)).max();
        Duration::from_micros(micros.unwrap_or_default())
    }

    /// The index that holds its blocks.
    pub const fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// The slots of its ranks, in the order in which they appeared.
    pub fn slots(&self) -> Vec<(i64, SlotId)> {
        self.ranks.load().iter().map(|rank| (rank.number, rank.slot)).collect()
    }

    /// Blocks held over all ranks.
    pub fn blocks(&self) -> usize {
        self.ranks.load().iter().map(|rank| self.index.blocks(rank.slot)).sum()
    }

    /// The names in the index that any rank holds, in order.
    pub fn names(&self) -> Vec<BlockHash> {
        let mut names: Vec<_> = self.ranks.load().iter().flat_map(|rank| self.index.names(rank.slot)).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The blocks that any rank holds, in order of the engine's names; with our own where they have one.
    pub fn inventory(&self) -> Vec<(BlockHash, Option<BlockHash>)> {
        let held = self.names();
        if **self.names.load() == Names::Engine {
            return held.into_iter().map(|name| (name, None)).collect();
        }
        let aliases: Vec<_> = self.aliases.lock().values().flat_map(Aliases::all).collect();
        let is_held = |ours: &BlockHash| held.binary_search(ours).is_ok();
        let mut all: Vec<_> =
            aliases.into_iter().filter(|(_, ours)| is_held(ours)).map(|(theirs, ours)| (theirs, Some(ours))).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// What it holds of a request's prompts, in blocks of its own size, among the answers of [`Index::overlaps`] for each of
    /// them: by the rank that holds most of all of them.
    pub fn holding(&self, prompts: &[Vec<Overlap>]) -> router::Overlap {
        let ranks = self.ranks.load();
        // One that has announced nothing yet is a rank all the same.
        let several = ranks.len() > 1 || self.feeds.load().len() > 1;
        let of_rank = |rank: &Rank| {
            let mut holding = router::Overlap { rank: several.then_some(rank.number), ..router::Overlap::default() };
            for overlaps in prompts {
                if let Ok(at) = overlaps.binary_search_by_key(&rank.slot, |overlap| overlap.slot) {
                    holding.depth += overlaps[at].depth;
                    holding.count += overlaps[at].count;
                }
            }
            holding
        };
        let best = ranks.iter().map(of_rank).max_by_key(|holding| (holding.depth, holding.count)).unwrap_or_default();
        // A rank is named for what it holds; where it holds nothing the engine may choose.
        router::Overlap { rank: best.rank.filter(|_| best.count > 0), ..best }
    }

    /// Whether its names agree with the rule.
    pub fn contract(&self) -> Arc<Contract> {
        self.contract.load_full()
    }

    /// How it writes extra keys, as far as its announcements or its version show.
    pub fn era(&self) -> KeyEra {
        if self.untagged.load(Ordering::Relaxed) { KeyEra::Untagged } else { KeyEra::Tagged }
    }

    /// The key space in which a request's blocks are looked for here; none where its names cannot be computed.
    pub fn key_space(&self) -> Option<KeySpace> {
        match **self.names.load() {
            Names::Engine => self.hasher.provable().then(|| self.hasher.key_space(self.era())),
            Names::Ours(size) => Some(KeySpace::rehash(self.rehash, size.unwrap_or_else(|| self.hasher.block_size()))),
        }
    }

    /// Whether its blocks have names of ours.
    pub fn is_rehashed(&self) -> bool {
        matches!(**self.names.load(), Names::Ours(_))
    }

    /// Tells when everything is to be told again, because blocks get other names or the mirror proved wrong.
    pub fn watch_names(&self) -> watch::Receiver<u64> {
        self.renamed.subscribe()
    }

    /// What it says of itself.
    pub fn label(&self) -> Arc<EngineLabel> {
        self.label.load_full()
    }

    /// Whether all of its event streams are heard.
    pub fn is_connected(&self) -> bool {
        let feeds = self.feeds.load();
        !feeds.is_empty() && feeds.iter().all(|feed| feed.connected.load(Ordering::Relaxed))
    }

    /// Its state at `now`.
    pub fn status(&self, now: Instant) -> KvStatus {
        let feeds = self.feeds.load();
        let last = |feed: &Arc<Feed>| *feed.last.lock();
        let newest = feeds.iter().filter_map(last).map(|(_, at)| at).max();
        // In the order of `ReplayState`, what is missing most comes first, apart from what nobody wants.
        let replays = feeds.iter().map(|feed| feed.replay());
        let worst = replays.max_by_key(|replay| match replay {
            ReplayState::Off => 0,
            ReplayState::Applied => 1,
            ReplayState::Unavailable => 2,
            ReplayState::Pending => 3,
        });
        KvStatus {
            contract: self.contract(),
            rehashed: self.is_rehashed(),
            blocks: self.blocks(),
            ranks: self.ranks.load().len(),
            connected: self.is_connected(),
            replay: worst.unwrap_or_default(),
            sequence: feeds.first().and_then(last).map(|(seq, _)| seq),
            last_event_age: newest.map(|at| now.saturating_duration_since(at)),
        }
    }

    /// Applies a batch. Gives the contract where its verdict has changed.
    pub fn apply(&self, feed: &Feed, seq: EventSeq, batch: &Batch, now: Instant) -> Option<Arc<Contract>> {
        let counters = &self.counters;
        count(&counters.batches, 1);
        count(&counters.undecodable, batch.undecodable);
        count(&counters.unknown, batch.unknown + batch.skipped);
        *feed.last.lock() = Some((seq, now));
        let number = batch.dp_rank.unwrap_or_else(|| i64::try_from(feed.number).unwrap_or(i64::MAX));
        let Some(slot) = self.slot(number, feed.number) else {
            count(&counters.ranks_refused, 1);
            return None;
        };
        let mut changed = None;
        // What comes before the last clearing leaves nothing, and each clearing walks through the whole index.
        let last_clearing = batch.events.iter().rposition(|event| matches!(event, Event::Cleared)).unwrap_or(0);
        for (position, event) in batch.events.iter().enumerate() {
            if let Event::Stored(stored) = event
                && let Some(contract) = self.check(stored)
            {
                changed = Some(contract);
            }
            if position < last_clearing {
                continue;
            }
            let applied = match **self.names.load() {
                Names::Engine => {
                    let applied = self.index.apply(slot, event);
                    if let Event::Stored(stored) = event {
                        self.fulfil(&stored.hashes);
                    }
                    applied
                }
                Names::Ours(size) => self.apply_renamed(slot, event, size),
            };
            count(&counters.stored, applied.stored);
            count(&counters.removed, applied.removed);
            count(&counters.unknown_removals, applied.unknown);
            count(&counters.evicted, applied.evicted);
            count(&counters.disproved, applied.disproved);
        }
        changed
    }

    /// Looks at an announcement for what it says of the contract, while that decides anything.
    fn check(&self, stored: &Stored) -> Option<Arc<Contract>> {
        if self.is_rehashed() {
            return None;
        }
        let mut attestor = self.attestor.lock();
        let changed = attestor.check(stored);
        self.untagged.store(attestor.era() == KeyEra::Untagged, Ordering::Relaxed);
        drop(attestor);
        changed.then(|| self.publish())
    }

    /// Applies an event of an engine whose names are of no use.
    fn apply_renamed(&self, slot: SlotId, event: &Event, size: Option<BlockSize>) -> Applied {
        let mut all = self.aliases.lock();
        let size = match (event, size) {
            (Event::Stored(stored), None) => self.learn_size(stored),
            (_, size) => size.unwrap_or_else(|| self.hasher.block_size()),
        };
        let aliases = all.entry(slot).or_insert_with(|| Aliases::new(self.rehash, size));
        let holds = |name| self.index.holds_copy(slot, name);
        match event {
            Event::Stored(stored) => {
                let (ours, orphans) = aliases.stored(stored);
                count(&self.counters.orphans, orphans);
                if ours.hashes.is_empty() && !stored.hashes.is_empty() {
                    return Applied::default();
                }
                let (mut dropped, event) = (Vec::new(), Event::Stored(ours));
                let applied = self.index.apply_noting(slot, &event, &mut dropped);
                if let Event::Stored(ours) = &event {
                    self.fulfil(&ours.hashes);
                }
                if !dropped.is_empty() {
                    aliases.dropped(dropped.len(), holds);
                }
                applied
            }
            Event::Removed(removed) => {
                let (ours, unknown) = aliases.removed(removed);
                let applied = self.index.apply(slot, &Event::Removed(ours));
                aliases.forget(removed, holds);
                Applied { unknown: applied.unknown + unknown, ..applied }
            }
            Event::Cleared => {
                aliases.clear();
                self.index.apply(slot, event)
            }
        }
    }

    /// The size of the blocks that have names of ours: that of the first announcement whose blocks make a prefix usable.
    fn learn_size(&self, stored: &Stored) -> BlockSize {
        let announced = BlockSize::new(stored.block_size).filter(|_| stored.attention != Attention::Partial);
        if let Some(size) = announced {
            self.names.store(Arc::new(Names::Ours(Some(size))));
        }
        announced.unwrap_or_else(|| self.hasher.block_size())
    }

    /// Empties what a feed told of. A new engine life may also run with other flags, so its contract is open again; gives
    /// the contract where its verdict has changed.
    pub fn clear(&self, feed: &Feed, new_life: bool) -> Option<Arc<Contract>> {
        feed.doubted.store(false, Ordering::Relaxed);
        self.empty(|rank| rank.feed == feed.number);
        if !new_life {
            return None;
        }
        *feed.last.lock() = None;
        self.attestor.lock().new_life();
        let before = self.contract();
        let after = self.publish();
        (before != after).then_some(after)
    }

    fn empty(&self, which: impl Fn(&Rank) -> bool) {
        for rank in self.ranks.load().iter().filter(|rank| which(rank)) {
            self.index.clear(rank.slot);
            self.aliases.lock().remove(&rank.slot);
        }
    }

    /// Notes what the engine says of itself. Gives the contract where its verdict has changed.
    pub fn set_label(&self, label: EngineLabel) -> Option<Arc<Contract>> {
        if let Some(blocks) = label.num_gpu_blocks.filter(|_| **self.label.load() != label) {
            for rank in self.ranks.load().iter() {
                self.index.set_gpu_blocks(rank.slot, blocks);
            }
        }
        self.label.store(Arc::new(label.clone()));
        let changed = self.attestor.lock().set_label(label);
        changed.then(|| self.publish())
    }

    /// Notes how the engine's version writes extra keys, which counts until its announcements show it.
    pub fn set_era(&self, era: KeyEra) {
        let mut attestor = self.attestor.lock();
        attestor.set_era(era);
        self.untagged.store(attestor.era() == KeyEra::Untagged, Ordering::Relaxed);
    }

    /// Notes that the names of a request met announced ones. Gives the contract where its verdict has changed.
    pub fn proved_by_request(&self) -> Option<Arc<Contract>> {
        // Names of ours prove tokens and template, and say nothing of a leg that is broken.
        let contract = self.contract.load();
        if **contract == Contract::ProvedByRequest || (contract.leg().is_some() && self.is_rehashed()) {
            return None;
        }
        let changed = self.attestor.lock().proved_by_request();
        changed.then(|| self.publish())
    }

    /// Puts the attestor's verdict in force.
    fn publish(&self) -> Arc<Contract> {
        let attestor = self.attestor.lock();
        self.untagged.store(attestor.era() == KeyEra::Untagged, Ordering::Relaxed);
        let contract = Arc::new(attestor.contract().clone());
        self.contract.store(Arc::clone(&contract));
        drop(attestor);
        self.choose_names(&contract);
        contract
    }

    /// Names blocks in our own way from the moment that the engine's names are disproved, until its next life. What was
    /// announced before is dropped: its tokens are gone.
    fn choose_names(&self, contract: &Contract) {
        if self.keying != Keying::Auto || self.is_rehashed() == contract.leg().is_some() {
            return;
        }
        let names = if contract.leg().is_some() { Names::Ours(None) } else { Names::Engine };
        self.names.store(Arc::new(names));
        self.empty(|_| true);
        self.renamed.send_modify(|times| *times += 1);
    }

    /// The engine reports so little of what was predicted that the mirror is not to be believed: whoever follows a feed forgets
    /// what it told of, and lets it tell its story again where it can be replayed. Nothing is emptied here, on a data thread.
    pub fn distrust(&self) {
        count(&self.counters.distrusted, 1);
        self.ledger.start_over();
        for feed in self.feeds.load().iter() {
            feed.doubted.store(true, Ordering::Relaxed);
        }
        self.renamed.send_modify(|times| *times += 1);
    }

    /// The slot of a rank; its first batch makes one.
    fn slot(&self, number: i64, feed: usize) -> Option<SlotId> {
        let ranks = self.ranks.load();
        if let Some(rank) = ranks.iter().find(|rank| rank.number == number && rank.feed == feed) {
            return Some(rank.slot);
        }
        if ranks.len() >= RANKS_MAX {
            return None;
        }
        let slot = self.index.add_slot()?;
        if let Some(blocks) = self.label.load().num_gpu_blocks {
            self.index.set_gpu_blocks(slot, blocks);
        }
        self.ranks.rcu(|ranks| {
            let mut ranks = ranks.to_vec();
            ranks.push(Rank { number, feed, slot });
            ranks
        });
        Some(slot)
    }
}

impl Drop for EndpointKv {
    fn drop(&mut self) {
        for rank in self.ranks.load().iter() {
            self.index.remove_slot(rank.slot);
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
    use crate::contract::{Extra, TokenId};
    use crate::state::index::IndexConfig;

    fn endpoint(index: &Arc<Index>) -> EndpointKv {
        keyed(index, Keying::Auto)
    }

    fn keyed(index: &Arc<Index>, keying: Keying) -> EndpointKv {
        let (seed, size) = (NoneSeed::Text("0".into()), BlockSize::new(16).unwrap());
        let naming = Naming { algo: HashAlgo::Sha256Cbor, seed, block_size: size, keying, rehash: Rehash::new(3) };
        EndpointKv::new(Arc::clone(index), &naming)
    }

    fn batch(rank: i64, names: &[u64]) -> Batch {
        let hashes = names.iter().map(|&name| BlockHash(name).into()).collect();
        let events = vec![Event::Stored(Stored { hashes, ..Stored::default() })];
        Batch { ts: 0.0, dp_rank: Some(rank), events, undecodable: 0, unknown: 0, skipped: 0 }
    }

    fn apply(endpoint: &EndpointKv, batch: &Batch) {
        endpoint.apply(&endpoint.feed(0), EventSeq(1), batch, crate::clock::now());
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
        let held = |endpoint: &EndpointKv| {
            let holding = endpoint.holding(std::slice::from_ref(&overlaps));
            (holding.depth, holding.count, holding.rank)
        };
        assert_eq!((held(&one), held(&other)), ((3, 3, Some(1)), (1, 1, None)));
        assert_eq!((one.blocks(), one.names().len(), one.status(crate::clock::now()).ranks), (5, 3, 2));
    }

    #[test]
    fn a_mirror_that_is_not_believed_is_forgotten_by_whoever_follows_the_feed() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = endpoint(&index);
        let (feed, told_again) = (endpoint.feed(0), endpoint.watch_names());
        apply(&endpoint, &batch(0, &[1, 2]));
        endpoint.distrust();
        assert!(feed.is_doubted() && told_again.has_changed().unwrap());
        assert_eq!(endpoint.blocks(), 2, "a data thread walks through no index");
        endpoint.clear(&feed, false);
        assert!(!feed.is_doubted() && endpoint.blocks() == 0);
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

    /// Announcements with made-up names, as of an engine whose seed nobody knows.
    fn foreign(first_name: u64, parent: Option<u64>, tokens: std::ops::Range<u32>) -> Event {
        let blocks = u64::from(tokens.end - tokens.start) / 16;
        Event::Stored(Stored {
            hashes: (first_name..first_name + blocks).map(|name| BlockHash(name).into()).collect(),
            parent: parent.map(|name| BlockHash(name).into()),
            tokens: tokens.map(TokenId).collect(),
            block_size: 16,
            extra_keys: Some(Vec::new()),
            ..Stored::default()
        })
    }

    fn request(endpoint: &EndpointKv, tokens: std::ops::Range<u32>) -> Vec<BlockHash> {
        let mut names = Vec::new();
        let ids: Vec<_> = tokens.map(TokenId).collect();
        endpoint.key_space().unwrap().begin(&Extra::default()).unwrap().extend(&ids, &mut names);
        names
    }

    #[test]
    fn an_endpoint_whose_names_are_disproved_gets_names_of_ours_and_the_next_life_its_own_again() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = endpoint(&index);
        let renamed = endpoint.watch_names();
        let told = |events| Batch { events, ..batch(0, &[]) };
        apply(&endpoint, &told(vec![foreign(100, None, 0..64)]));
        assert_eq!(endpoint.contract().label(), "mismatch");
        assert!(endpoint.is_rehashed() && renamed.has_changed().unwrap());
        assert_eq!(endpoint.names().len(), 4, "the announcement that told counts already");
        apply(&endpoint, &told(vec![foreign(104, Some(103), 64..96)]));
        let mut overlaps = Vec::new();
        index.overlaps(&request(&endpoint, 0..100), &mut overlaps);
        assert_eq!((overlaps[0].depth, overlaps[0].count), (6, 6));
        assert_eq!(
            endpoint.inventory().iter().map(|(theirs, _)| theirs.0).collect::<Vec<_>>(),
            [100, 101, 102, 103, 104, 105]
        );
        assert!(endpoint.proved_by_request().is_none(), "hits by our names do not hide a broken leg");
        endpoint.clear(&endpoint.feed(0), true);
        assert!(!endpoint.is_rehashed() && endpoint.blocks() == 0);
        assert_eq!(endpoint.contract().label(), "unverified");
    }

    #[test]
    fn removals_and_orphans_are_told_by_the_engines_names() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = keyed(&index, Keying::Rehash);
        let remove = |name: u64| {
            Event::Removed(crate::contract::events::Removed {
                hashes: vec![BlockHash(name).into()],
                ..Default::default()
            })
        };
        let told = |events| Batch { events, ..batch(0, &[]) };
        apply(
            &endpoint,
            &told(vec![foreign(1, None, 0..48), foreign(3, Some(2), 32..48), foreign(9, Some(77), 0..32)]),
        );
        assert_eq!(endpoint.counters.orphans.load(Ordering::Relaxed), 2);
        apply(&endpoint, &told(vec![remove(3)]));
        assert_eq!(endpoint.inventory().len(), 3, "one of two copies");
        apply(&endpoint, &told(vec![remove(3), remove(50)]));
        assert_eq!(endpoint.inventory().iter().map(|(theirs, _)| theirs.0).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(endpoint.counters.unknown_removals.load(Ordering::Relaxed), 1);
        assert_eq!(endpoint.contract().label(), "unverified", "nothing is compared");
        apply(&endpoint, &told(vec![Event::Cleared]));
        assert_eq!((endpoint.inventory().len(), endpoint.blocks()), (0, 0));
    }

    #[test]
    fn who_wants_the_engines_names_keeps_them() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = keyed(&index, Keying::Parity);
        apply(&endpoint, &Batch { events: vec![foreign(100, None, 0..64)], ..batch(0, &[]) });
        assert!(endpoint.contract().leg().is_some() && !endpoint.is_rehashed());
        assert_eq!(endpoint.inventory()[0], (BlockHash(100), None));
    }

    #[test]
    fn a_block_of_another_size_than_the_rules_is_named_at_its_own() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = endpoint(&index);
        let Event::Stored(stored) = foreign(100, None, 0..64) else { unreachable!() };
        let wide = Stored { block_size: 32, hashes: stored.hashes[..2].to_vec(), ..stored };
        apply(&endpoint, &Batch { events: vec![Event::Stored(wide)], ..batch(0, &[]) });
        assert_eq!(endpoint.key_space().unwrap().block_size().get(), 32);
        let mut overlaps = Vec::new();
        index.overlaps(&request(&endpoint, 0..64), &mut overlaps);
        assert_eq!(overlaps[0].depth, 2);
    }

    #[test]
    fn feeds_that_are_gone_leave_nothing() {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let endpoint = endpoint(&index);
        for rank in 0..3 {
            let of_rank = batch(i64::try_from(rank).unwrap(), &[1, 2]);
            endpoint.apply(&endpoint.feed(rank), EventSeq(1), &of_rank, crate::clock::now());
        }
        endpoint.clear(&endpoint.feed(1), true);
        assert_eq!(endpoint.blocks(), 4, "one rank's new life is its own");
        endpoint.keep_feeds(1);
        assert_eq!((endpoint.slots().len(), endpoint.blocks()), (1, 2));
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

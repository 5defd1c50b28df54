//! Blocks that requests under way are going to bring to their endpoints.
//!
//! An engine announces a prompt's blocks when it has computed them, so the requests of a burst with one prefix would all find
//! nobody who holds it and scatter. Each request therefore leaves the names of its prompt here from its choice on, until a
//! while after its answer has begun. Names chain: two prompts share blocks up to the first that differs.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::live::{Backlog, EndpointId};
use crate::contract::BlockHash;

/// Locks over which first names are spread, so that data threads rarely meet.
const SHARDS: usize = 16;
/// Names of one endpoint that are expected at a time: ten prompts of 100,000 tokens, or 128 of 8,000.
const NAMES_MAX: usize = 64 << 10;
/// Prompts that begin alike and are compared: more say nothing new.
const ALIKE_MAX: usize = 256;
/// How long after an answer's first byte its blocks are announced at the latest.
const LINGER: Duration = Duration::from_secs(2);
/// A shard is cleared of what has expired once in this many additions.
const SWEEP_EVERY: u64 = 256;

/// What the requests of one rule are going to bring.
#[derive(Debug)]
pub struct Expectations {
    shards: [Mutex<Shard>; SHARDS],
    /// Over all shards. Locked after a shard, where both are.
    sums: Mutex<Sums>,
    next: AtomicU64,
}

impl Default for Expectations {
    fn default() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::default()), sums: Mutex::default(), next: AtomicU64::new(0) }
    }
}

#[derive(Debug, Default)]
struct Sums {
    /// Names expected of each endpoint.
    names: HashMap<EndpointId, usize>,
    /// Of the prompts that end with a name at an endpoint, how they begin and how many there are: with the announcement of
    /// their end they are there.
    ends: HashMap<(EndpointId, BlockHash), (BlockHash, usize)>,
}

impl Sums {
    fn add(&mut self, entry: &Entry) {
        *self.names.entry(entry.endpoint).or_default() += entry.names.len();
        if let (Some(first), Some(last)) = (entry.names.first(), entry.names.last()) {
            self.ends.entry((entry.endpoint, *last)).or_insert((*first, 0)).1 += 1;
        }
    }

    fn remove(&mut self, entry: &Entry) {
        if let Some(names) = self.names.get_mut(&entry.endpoint) {
            *names = names.saturating_sub(entry.names.len());
            if *names == 0 {
                self.names.remove(&entry.endpoint);
            }
        }
        let Some(last) = entry.names.last() else { return };
        if let Some((_, prompts)) = self.ends.get_mut(&(entry.endpoint, *last)) {
            *prompts -= 1;
            if *prompts == 0 {
                self.ends.remove(&(entry.endpoint, *last));
            }
        }
    }
}

#[derive(Debug, Default)]
struct Shard {
    by_first: HashMap<BlockHash, Vec<Entry>>,
    added: u64,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    endpoint: EndpointId,
    names: Arc<[BlockHash]>,
    /// The work that is done when they are announced.
    work: Option<Arc<Backlog>>,
    /// When it ends; none while its request is not answered.
    until: Option<Instant>,
}

impl Entry {
    fn holds(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| until > now)
    }
}

/// A request's expectation. Dropped before its answer has begun it is withdrawn.
#[derive(Debug)]
pub struct Expectation {
    all: Arc<Expectations>,
    first: BlockHash,
    number: u64,
    answered: bool,
}

impl Expectation {
    /// The answer has begun: the blocks are computed, and will be announced soon.
    pub fn answered(mut self, now: Instant) {
        self.answered = true;
        let mut shard = self.all.shard(self.first).lock();
        if let Some(entry) =
            shard.by_first.get_mut(&self.first).and_then(|alike| alike.iter_mut().find(|e| e.number == self.number))
        {
            entry.until = Some(now + LINGER);
        }
    }
}

impl Drop for Expectation {
    fn drop(&mut self) {
        if !self.answered {
            let mut shard = self.all.shard(self.first).lock();
            shard.remove(&self.all.sums, self.first, |entry| entry.number == self.number);
        }
    }
}

impl Expectations {
    fn shard(&self, first: BlockHash) -> &Mutex<Shard> {
        // Names are hashes: any bits of theirs will do.
        &self.shards[usize::try_from(first.0 % SHARDS as u64).unwrap_or_default()]
    }

    /// Expects the blocks of one prompt at an endpoint, with whose announcement `work` is done. Nothing is expected of a prompt without a full block, nor beyond the
    /// bound of names.
    pub fn add(
        self: &Arc<Self>,
        endpoint: EndpointId,
        names: impl Into<Arc<[BlockHash]>>,
        work: Option<Arc<Backlog>>,
        now: Instant,
    ) -> Option<Expectation> {
        let names: Arc<[BlockHash]> = names.into();
        let first = *names.first()?;
        let mut shard = self.shard(first).lock();
        shard.sweep_sometimes(&self.sums, now);
        if shard.by_first.get(&first).map_or(0, Vec::len) >= ALIKE_MAX {
            return None;
        }
        let mut sums = self.sums.lock();
        if sums.names.get(&endpoint).copied().unwrap_or_default() + names.len() > NAMES_MAX {
            return None;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = Entry { number, endpoint, names, work, until: None };
        sums.add(&entry);
        drop(sums);
        shard.by_first.entry(first).or_default().push(entry);
        drop(shard);
        Some(Expectation { all: Arc::clone(self), first, number, answered: false })
    }

    /// An endpoint has announced blocks: prompts that end with one of them are there, and no longer expected.
    pub fn announced(&self, endpoint: EndpointId, names: impl Iterator<Item = BlockHash>) {
        let sums = self.sums.lock();
        if sums.ends.is_empty() {
            return;
        }
        let there: Vec<_> =
            names.filter_map(|name| sums.ends.get(&(endpoint, name)).map(|(first, _)| (*first, name))).collect();
        drop(sums);
        for (first, last) in there {
            let is_it = |entry: &Entry| {
                let is_it = entry.endpoint == endpoint && entry.names.last() == Some(&last);
                if is_it && let Some(work) = &entry.work {
                    work.release();
                }
                is_it
            };
            self.shard(first).lock().remove(&self.sums, first, is_it);
        }
    }

    /// How many leading blocks of a prompt with these names each endpoint is going to hold, for those that are going to hold
    /// any.
    pub fn depths(&self, names: &[BlockHash], now: Instant) -> Vec<(EndpointId, u32)> {
        let Some(first) = names.first() else { return Vec::new() };
        let mut depths: Vec<(EndpointId, u32)> = Vec::new();
        let shard = self.shard(*first).lock();
        for entry in shard.by_first.get(first).into_iter().flatten().filter(|entry| entry.holds(now)) {
            let depth = u32::try_from(shared(&entry.names, names)).unwrap_or(u32::MAX);
            match depths.iter_mut().find(|(endpoint, _)| *endpoint == entry.endpoint) {
                Some((_, most)) => *most = depth.max(*most),
                None => depths.push((entry.endpoint, depth)),
            }
        }
        depths
    }

    /// Names that are expected, over all endpoints.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.sums.lock().names.values().sum()
    }
}

impl Shard {
    fn remove(&mut self, sums: &Mutex<Sums>, first: BlockHash, which: impl Fn(&Entry) -> bool) {
        let Some(alike) = self.by_first.get_mut(&first) else { return };
        let mut sums = sums.lock();
        alike.retain(|entry| {
            let goes = which(entry);
            if goes {
                sums.remove(entry);
            }
            !goes
        });
        drop(sums);
        if alike.is_empty() {
            self.by_first.remove(&first);
        }
    }

    fn sweep_sometimes(&mut self, sums: &Mutex<Sums>, now: Instant) {
        self.added += 1;
        if !self.added.is_multiple_of(SWEEP_EVERY) {
            return;
        }
        let mut firsts: Vec<_> = self.by_first.keys().copied().collect();
        firsts.sort_unstable();
        for first in firsts {
            self.remove(sums, first, |entry| !entry.holds(now));
        }
    }
}

/// Leading names that two prompts share: each name covers all before it, so the first difference can be searched for.
fn shared(one: &[BlockHash], other: &[BlockHash]) -> usize {
    let most = one.len().min(other.len());
    let (mut alike, mut differ) = (0, most + 1);
    while differ - alike > 1 {
        let middle = usize::midpoint(alike, differ);
        if one[middle - 1] == other[middle - 1] {
            alike = middle;
        } else {
            differ = middle;
        }
    }
    alike
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn names(names: &[u64]) -> Vec<BlockHash> {
        names.iter().copied().map(BlockHash).collect()
    }

    #[test]
    fn a_prompt_is_expected_where_one_like_it_is_under_way() {
        let (all, now) = (Arc::new(Expectations::default()), clock::now());
        let one = all.add(EndpointId(1), names(&[1, 2, 3]), None, now);
        let _other = all.add(EndpointId(2), names(&[1, 2, 9, 10]), None, now);
        let mut depths = all.depths(&names(&[1, 2, 9, 11]), now);
        depths.sort_unstable();
        assert_eq!(depths, [(EndpointId(1), 2), (EndpointId(2), 3)]);
        assert_eq!(all.depths(&names(&[7]), now), []);
        drop(one);
        assert_eq!(all.depths(&names(&[1, 2, 3]), now), [(EndpointId(2), 2)], "withdrawn");
    }

    #[test]
    fn an_answered_request_lingers_and_then_leaves_nothing() {
        let (all, now) = (Arc::new(Expectations::default()), clock::now());
        all.add(EndpointId(1), names(&[1, 2]), None, now).unwrap().answered(now);
        assert_eq!(all.depths(&names(&[1]), now + LINGER / 2), [(EndpointId(1), 1)]);
        assert_eq!(all.depths(&names(&[1]), now + LINGER), []);
        let _rest: Vec<_> =
            (0..SWEEP_EVERY).map(|_| all.add(EndpointId(3), names(&[1 + SHARDS as u64]), None, now + LINGER)).collect();
        assert_eq!(all.depths(&names(&[1]), now), [], "swept");
    }

    #[test]
    fn what_has_been_announced_is_not_expected_any_more() {
        let (all, now) = (Arc::new(Expectations::default()), clock::now());
        let kept: Vec<_> = (0..3).map(|_| all.add(EndpointId(1), names(&[1, 2, 3]), None, now)).collect();
        let _longer = all.add(EndpointId(1), names(&[1, 2, 3, 4]), None, now);
        let _elsewhere = all.add(EndpointId(2), names(&[1, 2, 3]), None, now);
        all.announced(EndpointId(1), names(&[1, 2]).into_iter());
        assert_eq!(all.len(), 16);
        all.announced(EndpointId(1), names(&[3, 9]).into_iter());
        assert_eq!(all.len(), 7, "the longer prompt is still to come, and so is the other endpoint's");
        drop(kept);
        assert_eq!((all.len(), all.sums.lock().ends.len()), (7, 2));
    }

    #[test]
    fn with_the_announcement_of_its_last_block_a_prompts_work_is_done() {
        let (all, now) = (Arc::new(Expectations::default()), clock::now());
        let meters = Arc::new(super::super::Meters::new(EndpointId(1)));
        let work = meters.await_tokens(48);
        let _kept = all.add(EndpointId(1), names(&[1, 2, 3]), Some(Arc::clone(&work)), now);
        all.announced(EndpointId(1), names(&[1, 2]).into_iter());
        assert_eq!(meters.waiting_tokens(), 48);
        all.announced(EndpointId(1), names(&[3]).into_iter());
        assert_eq!(meters.waiting_tokens(), 0);
        drop(work);
        assert_eq!(meters.waiting_tokens(), 0);
    }

    #[test]
    fn what_is_expected_is_bounded() {
        let (all, now) = (Arc::new(Expectations::default()), clock::now());
        let long: Vec<_> = (0..1000).map(BlockHash).collect();
        let kept: Vec<_> = (0..10_000).filter_map(|_| all.add(EndpointId(1), long.clone(), None, now)).collect();
        assert!(kept.len() < ALIKE_MAX && all.len() <= NAMES_MAX, "{} {}", kept.len(), all.len());
        drop(kept);
        assert_eq!(all.len(), 0);
        assert!(all.add(EndpointId(1), names(&[]), None, now).is_none());
    }

    #[test]
    fn shared_names_are_found_at_every_length() {
        let long: Vec<_> = (0..40).map(BlockHash).collect();
        for length in 0..40 {
            let mut other = long[..length].to_vec();
            other.extend((100..110).map(BlockHash));
            assert_eq!(shared(&long, &other), length);
            assert_eq!(shared(&long, &long[..length]), length);
        }
    }
}

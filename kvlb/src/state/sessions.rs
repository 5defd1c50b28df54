//! Where conversations and sessions were: the memory behind tier 1, and behind the selectors that keep clients.
//!
//! Keys are hashes, so that nothing a client wrote stays here. An entry lasts for a time after its last answer, and of one
//! table's entries so many are kept as there is room for: what was answered longest ago goes first. Split by key into
//! shards, each under a lock of its own that is held for one look-up; time is an argument.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::live::EndpointId;
use super::recency::Recency;
use crate::router::Key;

/// Entries of one table: with the shortest usual time, five minutes, room for 218 new conversations a second. LoxiLB has
/// room for 4096, or 14 a second. Full it takes some 6 MiB.
const ENTRIES_MAX: usize = 64 << 10;
/// Locks over which keys are spread, so that data threads rarely meet.
const SHARDS: usize = 16;

/// Where a conversation was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The endpoint that computed its prompts.
    pub endpoint: EndpointId,
    /// The one that decoded, where another did.
    pub decode: Option<EndpointId>,
}

impl Pin {
    /// At an endpoint that does both.
    pub const fn at(endpoint: EndpointId) -> Self {
        Self { endpoint, decode: None }
    }

    fn names(&self, endpoint: EndpointId) -> bool {
        self.endpoint == endpoint || self.decode == Some(endpoint)
    }
}

/// One rule's conversations, or its sessions.
#[derive(Debug)]
pub struct Sessions {
    shards: [Mutex<Shard>; SHARDS],
    entries_max: usize,
    claims: AtomicU64,
    evicted: AtomicU64,
}

/// What a [`Sessions`] has and has done, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionsUse {
    /// Entries.
    pub entries: usize,
    /// Entries that went for want of room.
    pub evicted: u64,
}

/// What became of a request's wish to pin its key.
#[derive(Debug)]
pub enum Claimed {
    /// It is pinned until the request fails; requests with the same key follow meanwhile.
    New(Claim),
    /// It is pinned to that endpoint already.
    Same,
    /// It is pinned to another one.
    Other(Pin),
}

/// The pin of a request that has not been answered yet. Dropped before it is [kept](Sessions::keep), it is withdrawn.
#[derive(Debug)]
pub struct Claim {
    sessions: Arc<Sessions>,
    key: Key,
    number: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.sessions.shard(self.key).lock().remove_if(self.key, |entry| entry.claim == Some(self.number));
    }
}

#[derive(Debug, Default)]
struct Shard {
    by_key: HashMap<Key, u32>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    recency: Recency,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: Key,
    pin: Pin,
    /// The request that has pinned it and is not answered yet.
    claim: Option<u64>,
    until: Instant,
}

impl Default for Sessions {
    fn default() -> Self {
        Self::with_room_for(ENTRIES_MAX)
    }
}

impl Sessions {
    fn with_room_for(entries_max: usize) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            entries_max,
            claims: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    /// Where a key is pinned.
    pub fn find(&self, key: Key, now: Instant) -> Option<Pin> {
        let shard = self.shard(key).lock();
        shard.get(key).filter(|entry| entry.until > now).map(|entry| entry.pin)
    }

    /// Pins a key for a request that has yet to be answered: where it is not pinned, or is at `over`.
    pub fn claim(self: &Arc<Self>, key: Key, pin: Pin, over: Option<Pin>, (ttl, now): (Duration, Instant)) -> Claimed {
        let mut shard = self.shard(key).lock();
        match shard.get(key).filter(|entry| entry.until > now).map(|entry| entry.pin) {
            Some(there) if there.endpoint == pin.endpoint => return Claimed::Same,
            Some(there) if Some(there) != over => return Claimed::Other(there),
            _ => {}
        }
        let number = self.claims.fetch_add(1, Ordering::Relaxed);
        self.put(&mut shard, Entry { key, pin, claim: Some(number), until: now + ttl }, now);
        drop(shard);
        Claimed::New(Claim { sessions: Arc::clone(self), key, number })
    }

    /// A request with this key has been answered there: so it is pinned.
    pub fn keep(&self, key: Key, pin: Pin, (ttl, now): (Duration, Instant)) {
        let mut shard = self.shard(key).lock();
        self.put(&mut shard, Entry { key, pin, claim: None, until: now + ttl }, now);
    }

    /// An answer from there has ended: its time begins anew, unless the key has moved since.
    pub fn prolong(&self, key: Key, pin: Pin, (ttl, now): (Duration, Instant)) {
        let mut shard = self.shard(key).lock();
        if shard.get(key).is_none_or(|entry| entry.pin == pin || entry.until <= now) {
            self.put(&mut shard, Entry { key, pin, claim: None, until: now + ttl }, now);
        }
    }

    /// Forgets a key that is pinned to this endpoint: it failed there.
    pub fn forget(&self, key: Key, endpoint: EndpointId) {
        self.shard(key).lock().remove_if(key, |entry| entry.pin.names(endpoint));
    }

    /// Forgets what is pinned to endpoints that are none of these.
    pub fn retain(&self, endpoints: &[EndpointId]) {
        for shard in &self.shards {
            let gone = |pin: &Pin| {
                !endpoints.contains(&pin.endpoint) || pin.decode.is_some_and(|decode| !endpoints.contains(&decode))
            };
            shard.lock().remove_all(|entry| gone(&entry.pin));
        }
    }

    /// What it has and has done. What has expired is swept out.
    pub fn usage(&self, now: Instant) -> SessionsUse {
        let sum = |entries: usize, shard: &Mutex<Shard>| {
            let mut shard = shard.lock();
            shard.sweep(usize::MAX, now);
            entries + shard.by_key.len()
        };
        SessionsUse { entries: self.shards.iter().fold(0, sum), evicted: self.evicted.load(Ordering::Relaxed) }
    }

    fn shard(&self, key: Key) -> &Mutex<Shard> {
        // The map inside goes by other bits of the hash.
        let [high, ..] = key.0.to_be_bytes();
        &self.shards[usize::from(high) % SHARDS]
    }

    fn put(&self, shard: &mut Shard, entry: Entry, now: Instant) {
        if let Some(place) = shard.by_key.get(&entry.key).copied() {
            shard.entries[place as usize] = entry;
            shard.recency.touch(place);
            return;
        }
        // Two go for each that comes, until none is left that has expired.
        shard.sweep(2, now);
        if shard.by_key.len() >= self.entries_max.div_ceil(SHARDS)
            && let Some(oldest) = shard.recency.oldest()
        {
            shard.remove(oldest);
            self.evicted.fetch_add(1, Ordering::Relaxed);
        }
        shard.add(entry);
    }
}

impl Shard {
    fn get(&self, key: Key) -> Option<&Entry> {
        self.by_key.get(&key).map(|place| &self.entries[*place as usize])
    }

    fn add(&mut self, entry: Entry) {
        let place = if let Some(place) = self.free.pop() {
            self.entries[place as usize] = entry;
            place
        } else {
            self.entries.push(entry);
            u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
        };
        self.by_key.insert(entry.key, place);
        self.recency.add(place);
    }

    fn remove(&mut self, place: u32) {
        self.by_key.remove(&self.entries[place as usize].key);
        self.recency.remove(place);
        self.free.push(place);
        if self.by_key.is_empty() {
            *self = Self::default();
        }
    }

    fn remove_if(&mut self, key: Key, goes: impl Fn(&Entry) -> bool) {
        if let Some(place) = self.by_key.get(&key).copied()
            && goes(&self.entries[place as usize])
        {
            self.remove(place);
        }
    }

    fn remove_all(&mut self, goes: impl Fn(&Entry) -> bool) {
        let mut places: Vec<u32> = self.by_key.values().copied().collect();
        places.sort_unstable();
        for place in places.into_iter().filter(|place| goes(&self.entries[*place as usize])).collect::<Vec<_>>() {
            self.remove(place);
        }
    }

    /// Removes expired entries from the old end. Where the rule's time has changed, one that lasts may hide some for a while.
    fn sweep(&mut self, most: usize, now: Instant) {
        for _ in 0..most {
            match self.recency.oldest() {
                Some(oldest) if self.entries[oldest as usize].until <= now => self.remove(oldest),
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::router::Whose;

    const TTL: Duration = Duration::from_mins(5);
    const NEARLY: Duration = Duration::from_secs(299);
    const A: Pin = Pin::at(EndpointId(1));
    const B: Pin = Pin::at(EndpointId(2));

    fn key(number: usize) -> Key {
        Key::new(Whose::Conversation, &number.to_le_bytes())
    }

    #[test]
    fn the_time_slides_with_every_answer_and_then_is_over() {
        let (all, start) = (Sessions::default(), clock::now());
        all.keep(key(1), A, (TTL, start));
        let later = start + NEARLY;
        assert_eq!(all.find(key(1), later), Some(A));
        all.prolong(key(1), A, (TTL, later));
        let last = later + NEARLY;
        assert_eq!((all.find(key(1), last), all.find(key(1), later + TTL)), (Some(A), None));
        assert_eq!(all.usage(later + TTL).entries, 0, "swept");
    }

    #[test]
    fn an_answer_that_ends_late_does_not_call_back_what_has_moved() {
        let (all, now) = (Sessions::default(), clock::now());
        all.keep(key(1), A, (TTL, now));
        all.keep(key(1), B, (TTL, now));
        all.prolong(key(1), A, (TTL, now));
        assert_eq!(all.find(key(1), now), Some(B));
        all.prolong(key(2), A, (TTL, now));
        assert_eq!(all.find(key(2), now), Some(A), "one that went during a long answer is back");
    }

    #[test]
    fn a_claim_holds_until_it_fails_and_others_follow_it() {
        let (all, now) = (Arc::new(Sessions::default()), clock::now());
        let claim = |pin, over| all.claim(key(1), pin, over, (TTL, now));
        let Claimed::New(first) = claim(A, None) else { panic!("nobody else is there") };
        assert!(matches!(claim(B, None), Claimed::Other(A)) && matches!(claim(A, None), Claimed::Same));
        drop(first);
        assert_eq!(all.find(key(1), now), None, "withdrawn");
        let Claimed::New(second) = claim(A, None) else { panic!("it is free again") };
        all.keep(key(1), A, (TTL, now));
        drop(second);
        assert_eq!(all.find(key(1), now), Some(A), "answered");
        let Claimed::New(third) = claim(B, Some(A)) else { panic!("it may move") };
        assert!(matches!(claim(A, Some(A)), Claimed::Other(B)), "it has moved already");
        drop(third);
        assert_eq!(all.find(key(1), now), None);
    }

    #[test]
    fn what_was_answered_longest_ago_goes_for_want_of_room() {
        let (all, now) = (Sessions::with_room_for(16 * SHARDS), clock::now());
        all.keep(key(0), A, (TTL, now));
        for number in 1..10_000 {
            all.keep(key(number), A, (TTL, now));
            all.prolong(key(0), A, (TTL, now));
        }
        let usage = all.usage(now);
        assert!(usage.entries <= 16 * SHARDS, "{usage:?}");
        assert_eq!(usage.evicted + usage.entries as u64, 10_000);
        assert_eq!(all.find(key(0), now), Some(A), "it was in use");
        assert_eq!((all.find(key(9_999), now), all.find(key(1), now)), (Some(A), None));
    }

    #[test]
    fn an_endpoint_that_is_removed_leaves_nothing_and_one_that_fails_loses_the_key() {
        let (all, now) = (Sessions::default(), clock::now());
        for number in 0..100 {
            all.keep(key(number), if number % 2 == 0 { A } else { B }, (TTL, now));
        }
        all.keep(key(100), Pin { endpoint: A.endpoint, decode: Some(B.endpoint) }, (TTL, now));
        all.forget(key(0), B.endpoint);
        assert_eq!(all.find(key(0), now), Some(A), "another's failure");
        all.retain(&[A.endpoint]);
        assert_eq!((all.usage(now).entries, all.find(key(1), now)), (50, None));
        all.forget(key(0), A.endpoint);
        assert_eq!(all.find(key(0), now), None);
        all.retain(&[]);
        assert_eq!(all.usage(now), SessionsUse::default());
    }
}

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

/// Where a conversation was. Each half comes, moves and goes without the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pin {
    /// The endpoint that computed its prompts.
    pub endpoint: Option<EndpointId>,
    /// The one that decoded, where another did.
    pub decode: Option<EndpointId>,
}

impl Pin {
    /// At an endpoint that does both, or of which no more is known.
    pub const fn at(endpoint: EndpointId) -> Self {
        Self { endpoint: Some(endpoint), decode: None }
    }

    /// Decoded there; of the other half no more is known.
    pub const fn decoded_at(endpoint: EndpointId) -> Self {
        Self { endpoint: None, decode: Some(endpoint) }
    }

    /// These halves, and where they say nothing the `others`.
    fn or(self, others: Self) -> Self {
        Self { endpoint: self.endpoint.or(others.endpoint), decode: self.decode.or(others.decode) }
    }

    /// Without the halves at endpoints that `goes` is true for.
    fn without(self, goes: impl Fn(EndpointId) -> bool) -> Self {
        let stays = |endpoint: &EndpointId| !goes(*endpoint);
        Self { endpoint: self.endpoint.filter(stays), decode: self.decode.filter(stays) }
    }

    fn is_nowhere(&self) -> bool {
        *self == Self::default()
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
    /// It is pinned to this other one.
    Other(EndpointId),
}

/// The pin of a request that has not been answered yet. Dropped before it is [kept](Sessions::keep), it is withdrawn.
///
/// It is of the endpoint that computes the prompt: the one that decodes has been chosen late, and is pinned once it answers.
#[derive(Debug)]
pub struct Claim {
    sessions: Arc<Sessions>,
    key: Key,
    number: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.sessions.shard(self.key).lock().change(self.key, |entry| {
            if entry.claim == Some(self.number) {
                (entry.claim, entry.pin.endpoint) = (None, None);
            }
        });
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

impl Entry {
    /// Goes from the endpoints that `goes` is true for.
    fn leave(&mut self, goes: impl Fn(EndpointId) -> bool) {
        self.pin = self.pin.without(goes);
        self.claim = self.claim.filter(|_| self.pin.endpoint.is_some());
    }
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

    /// Where a key is pinned, which may be nowhere.
    pub fn find(&self, key: Key, now: Instant) -> Pin {
        self.shard(key).lock().pin(key, now)
    }

    /// Pins a key for a request that has yet to be answered: where it is not pinned, or is at `over`.
    pub fn claim(
        self: &Arc<Self>,
        key: Key,
        endpoint: EndpointId,
        over: Option<EndpointId>,
        (ttl, now): (Duration, Instant),
    ) -> Claimed {
        let mut shard = self.shard(key).lock();
        let there = shard.pin(key, now);
        match there.endpoint {
            Some(there) if there == endpoint => return Claimed::Same,
            Some(there) if Some(there) != over => return Claimed::Other(there),
            _ => {}
        }
        let number = self.claims.fetch_add(1, Ordering::Relaxed);
        let pin = Pin::at(endpoint).or(there);
        self.put(&mut shard, Entry { key, pin, claim: Some(number), until: now + ttl }, now);
        drop(shard);
        Claimed::New(Claim { sessions: Arc::clone(self), key, number })
    }

    /// A request with this key has been answered there: so it is pinned, and a half that took no part stays where it was.
    pub fn keep(&self, key: Key, pin: Pin, (ttl, now): (Duration, Instant)) {
        let mut shard = self.shard(key).lock();
        let claim = shard.get(key).and_then(|entry| entry.claim).filter(|_| pin.endpoint.is_none());
        let pin = pin.or(shard.pin(key, now));
        self.put(&mut shard, Entry { key, pin, claim, until: now + ttl }, now);
    }

    /// An answer from there has ended: its time begins anew, but for a half that has moved since.
    pub fn prolong(&self, key: Key, pin: Pin, (ttl, now): (Duration, Instant)) {
        let mut shard = self.shard(key).lock();
        let there = shard.pin(key, now);
        let unmoved = |own: Option<EndpointId>, there: Option<EndpointId>| {
            own.filter(|own| there.is_none_or(|there| there == *own))
        };
        let stays = Pin { endpoint: unmoved(pin.endpoint, there.endpoint), decode: unmoved(pin.decode, there.decode) };
        if stays.is_nowhere() {
            return;
        }
        let claim = shard.get(key).and_then(|entry| entry.claim).filter(|_| stays.endpoint.is_none());
        self.put(&mut shard, Entry { key, pin: stays.or(there), claim, until: now + ttl }, now);
    }

    /// Forgets that a key is pinned to this endpoint: it failed there. The other half did not.
    pub fn forget(&self, key: Key, endpoint: EndpointId) {
        self.shard(key).lock().change(key, |entry| entry.leave(|at| at == endpoint));
    }

    /// Forgets what is pinned to endpoints that are none of these.
    pub fn retain(&self, endpoints: &[EndpointId]) {
        for shard in &self.shards {
            shard.lock().change_all(|entry| entry.leave(|at| !endpoints.contains(&at)));
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

    /// Where a key is pinned, which may be nowhere.
    fn pin(&self, key: Key, now: Instant) -> Pin {
        self.get(key).filter(|entry| entry.until > now).map_or_else(Pin::default, |entry| entry.pin)
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

    /// Changes an entry, which goes if it is pinned nowhere then.
    fn change(&mut self, key: Key, change: impl Fn(&mut Entry)) {
        if let Some(place) = self.by_key.get(&key).copied() {
            let entry = &mut self.entries[place as usize];
            change(entry);
            if entry.pin.is_nowhere() {
                self.remove(place);
            }
        }
    }

    fn change_all(&mut self, change: impl Fn(&mut Entry)) {
        let mut keys: Vec<(u32, Key)> = self.by_key.iter().map(|(key, place)| (*place, *key)).collect();
        keys.sort_unstable_by_key(|(place, _)| *place);
        for (_, key) in keys {
            self.change(key, &change);
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
    const ONE: EndpointId = EndpointId(1);
    const TWO: EndpointId = EndpointId(2);
    const THREE: EndpointId = EndpointId(3);
    const A: Pin = Pin::at(ONE);
    const B: Pin = Pin::at(TWO);
    const NOWHERE: Pin = Pin { endpoint: None, decode: None };

    fn key(number: usize) -> Key {
        Key::new(Whose::Conversation, &number.to_le_bytes())
    }

    #[test]
    fn the_time_slides_with_every_answer_and_then_is_over() {
        let (all, start) = (Sessions::default(), clock::now());
        all.keep(key(1), A, (TTL, start));
        let later = start + NEARLY;
        assert_eq!(all.find(key(1), later), A);
        all.prolong(key(1), A, (TTL, later));
        let last = later + NEARLY;
        assert_eq!((all.find(key(1), last), all.find(key(1), later + TTL)), (A, NOWHERE));
        assert_eq!(all.usage(later + TTL).entries, 0, "swept");
    }

    #[test]
    fn an_answer_that_ends_late_does_not_call_back_what_has_moved() {
        let (all, now) = (Sessions::default(), clock::now());
        all.keep(key(1), A, (TTL, now));
        all.keep(key(1), B, (TTL, now));
        all.prolong(key(1), A, (TTL, now));
        assert_eq!(all.find(key(1), now), B);
        all.prolong(key(2), A, (TTL, now));
        assert_eq!(all.find(key(2), now), A, "one that went during a long answer is back");
    }

    #[test]
    fn a_claim_holds_until_it_fails_and_others_follow_it() {
        let (all, now) = (Arc::new(Sessions::default()), clock::now());
        let claim = |endpoint, over| all.claim(key(1), endpoint, over, (TTL, now));
        let Claimed::New(first) = claim(ONE, None) else { panic!("nobody else is there") };
        assert!(matches!(claim(TWO, None), Claimed::Other(ONE)) && matches!(claim(ONE, None), Claimed::Same));
        drop(first);
        assert_eq!(all.find(key(1), now), NOWHERE, "withdrawn");
        let Claimed::New(second) = claim(ONE, None) else { panic!("it is free again") };
        all.keep(key(1), A, (TTL, now));
        drop(second);
        assert_eq!(all.find(key(1), now), A, "answered");
        let Claimed::New(third) = claim(TWO, Some(ONE)) else { panic!("it may move") };
        assert!(matches!(claim(ONE, Some(ONE)), Claimed::Other(TWO)), "it has moved already");
        drop(third);
        assert_eq!(all.find(key(1), now), NOWHERE);
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
        assert_eq!(all.find(key(0), now), A, "it was in use");
        assert_eq!((all.find(key(9_999), now), all.find(key(1), now)), (A, NOWHERE));
    }

    #[test]
    fn an_endpoint_that_is_removed_leaves_nothing_and_one_that_fails_loses_the_key() {
        let (all, now) = (Sessions::default(), clock::now());
        for number in 0..100 {
            all.keep(key(number), if number % 2 == 0 { A } else { B }, (TTL, now));
        }
        all.keep(key(100), Pin { endpoint: Some(TWO), decode: Some(THREE) }, (TTL, now));
        all.forget(key(0), TWO);
        assert_eq!(all.find(key(0), now), A, "another's failure");
        all.retain(&[ONE]);
        assert_eq!((all.usage(now).entries, all.find(key(1), now)), (50, NOWHERE));
        all.forget(key(0), ONE);
        assert_eq!(all.find(key(0), now), NOWHERE);
        all.retain(&[]);
        assert_eq!(all.usage(now), SessionsUse::default());
    }

    #[test]
    fn each_half_moves_and_goes_without_the_other() {
        let (all, now) = (Arc::new(Sessions::default()), clock::now());
        let pair = |endpoint, decode| Pin { endpoint: Some(endpoint), decode: Some(decode) };
        let here = || all.find(key(1), now);
        all.keep(key(1), pair(ONE, TWO), (TTL, now));
        all.keep(key(1), A, (TTL, now));
        assert_eq!(here(), pair(ONE, TWO), "one leg says nothing of the other");
        let Claimed::New(moves) = all.claim(key(1), THREE, Some(ONE), (TTL, now)) else { panic!("it may move") };
        assert_eq!(here(), pair(THREE, TWO));
        all.keep(key(1), Pin::decoded_at(TWO), (TTL, now));
        drop(moves);
        assert_eq!(here(), Pin::decoded_at(TWO), "withdrawn, though it was decoded again meanwhile");
        all.keep(key(1), A, (TTL, now));
        all.forget(key(1), TWO);
        assert_eq!(here(), A);
        all.prolong(key(1), pair(ONE, TWO), (TTL, now));
        all.keep(key(1), B, (TTL, now));
        let later = now + NEARLY;
        all.prolong(key(1), pair(ONE, TWO), (TTL, later));
        assert_eq!(all.find(key(1), later + NEARLY), pair(TWO, TWO), "the half that has moved is not called back");
        all.keep(key(1), pair(ONE, TWO), (TTL, now));
        all.retain(&[TWO]);
        assert_eq!(here(), Pin::decoded_at(TWO));
        all.forget(key(1), TWO);
        assert_eq!(all.usage(now), SessionsUse::default());
    }
}

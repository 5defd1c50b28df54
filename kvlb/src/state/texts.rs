//! What prompts of late began with: the memory of [`Tokenizer::names`](crate::tokenize::Tokenizer::names).
//!
//! Bounded in bytes. What was asked for longest ago goes first, in two generations: what is asked for lives in the young
//! one; when that has half of the room, the old one goes and the young one becomes the old. So what is kept has been
//! asked for within the last half of the room's worth of new parts, and nothing is searched to make room. Split by key into shards, each
//! under a lock of its own that is held for one look-up.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::tokenize::{Link, Memory};

/// Shards: many more than threads that name prompts, so that two seldom meet, and so many that dropping a generation of
/// one takes less than a millisecond.
const SHARDS: usize = 256;

/// Bytes that one entry takes besides its link: the key, the reference and its counts, the map's own byte, the slack of a
/// map that has just doubled, and what the allocator adds to each of some four pieces.
const ENTRY_BYTES: usize = 144;

/// Remembers the names of what prompts of late began with.
#[derive(Debug)]
pub struct Texts {
    seed: u64,
    /// Bytes that one generation of one shard may have.
    generation_bytes: usize,
    shards: Box<[Mutex<Shard>]>,
    recalled: AtomicU64,
    unknown: AtomicU64,
}

/// What a [`Texts`] has done and has, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextsUse {
    /// Parts of prompts that were known.
    pub recalled: u64,
    /// Parts of prompts that were not.
    pub unknown: u64,
    /// Parts in memory.
    pub parts: usize,
    /// Bytes that they take.
    pub bytes: usize,
}

impl Texts {
    /// A memory of at most `bytes_max` bytes. `seed` is a random number that nobody outside knows.
    pub fn new(bytes_max: usize, seed: u64) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let generation_bytes = bytes_max / SHARDS / 2;
        Self { seed, generation_bytes, shards, recalled: AtomicU64::new(0), unknown: AtomicU64::new(0) }
    }

    /// What it has done and has.
    pub fn usage(&self) -> TextsUse {
        let (mut parts, mut bytes) = (0, 0);
        for shard in &self.shards {
            let shard = shard.lock();
            parts += shard.young.links.len() + shard.old.links.len();
            bytes += shard.young.bytes + shard.old.bytes;
        }
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TextsUse { recalled: count(&self.recalled), unknown: count(&self.unknown), parts, bytes }
    }

    /// Forgets everything.
    pub fn clear(&self) {
        for shard in &self.shards {
            let forgotten = std::mem::take(&mut *shard.lock());
            drop(forgotten);
        }
    }

    fn shard(&self, key: u128) -> &Mutex<Shard> {
        // The map inside goes by the low bits.
        let [high, ..] = key.to_be_bytes();
        &self.shards[usize::from(high) % SHARDS]
    }
}

impl Memory for Texts {
    fn seed(&self) -> u64 {
        self.seed
    }

    fn recall(&self, key: u128) -> Option<Arc<Link>> {
        let (link, forgotten) = self.shard(key).lock().recall(key, self.generation_bytes);
        // Not under the lock: there may be a thousand of them.
        drop(forgotten);
        let count = if link.is_some() { &self.recalled } else { &self.unknown };
        count.fetch_add(1, Ordering::Relaxed);
        link
    }

    fn keep(&self, key: u128, link: Arc<Link>) {
        let forgotten = self.shard(key).lock().keep(key, link, self.generation_bytes);
        drop(forgotten);
    }
}

/// Part of the memory.
#[derive(Debug, Default)]
struct Shard {
    young: Generation,
    old: Generation,
}

/// Links of about the same age.
#[derive(Debug, Default)]
struct Generation {
    links: HashMap<u128, Arc<Link>, BuildHasherDefault<AlreadyHashed>>,
    bytes: usize,
}

impl Shard {
    fn recall(&mut self, key: u128, room: usize) -> (Option<Arc<Link>>, Option<Generation>) {
        if let Some(link) = self.young.links.get(&key) {
            return (Some(Arc::clone(link)), None);
        }
        let Some(link) = self.old.links.remove(&key) else { return (None, None) };
        self.old.bytes -= bytes(&link);
        let forgotten = self.keep(key, Arc::clone(&link), room);
        (Some(link), forgotten)
    }

    /// Adds a link; gives back the generation that has to go for it.
    fn keep(&mut self, key: u128, link: Arc<Link>, room: usize) -> Option<Generation> {
        let more = bytes(&link);
        if more > room {
            return None;
        }
        let full = self.young.bytes + more > room;
        let forgotten = full.then(|| std::mem::replace(&mut self.old, std::mem::take(&mut self.young)));
        self.young.bytes += more;
        if let Some(same) = self.young.links.insert(key, link) {
            self.young.bytes -= bytes(&same);
        }
        forgotten
    }
}

fn bytes(link: &Link) -> usize {
    link.bytes() + ENTRY_BYTES
}

/// For keys that are hashes: their low half is as good a hash as any.
#[derive(Debug, Default)]
struct AlreadyHashed(u64);

impl Hasher for AlreadyHashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u128(&mut self, key: u128) {
        let [low @ .., _, _, _, _, _, _, _, _] = key.to_le_bytes();
        self.0 = u64::from_le_bytes(low);
    }
}

#[cfg(test)]
mod tests;

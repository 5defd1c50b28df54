//! What prompts of late began with, and the shapes of chats: the memory of [`Tokenizer::names`](crate::tokenize::Tokenizer::names).
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

use crate::courtesy;
use crate::tokenize::{Link, Memory, Shape};

/// Shards: many more than threads that name prompts, so that two seldom meet, and so many that dropping a generation of
/// one takes less than a millisecond.
const SHARDS: usize = 256;

/// Bytes of a shard, at least: each of its two generations must have room for many parts, which have some KiB.
const SHARD_BYTES: usize = 128 << 10;

/// Shapes of chats are few, and large where they have tools in them.
const SHAPE_SHARDS: usize = 16;

/// The part of the room that shapes have.
const SHAPES_SHARE: usize = 16;

/// Bytes that one entry takes besides its link: the key, the reference and its counts, the map's own byte, the slack of a
/// map that has just doubled, and what the allocator adds to each of some four pieces.
const ENTRY_BYTES: usize = 144;

/// Remembers the names of what prompts of late began with.
#[derive(Debug)]
pub struct Texts {
    seed: u64,
    links: Shards<Link>,
    shapes: Shards<Shape>,
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
    /// Bytes that they take, and what is known of shapes.
    pub bytes: usize,
}

impl Texts {
    /// A memory of at most `bytes_max` bytes. `seed` is a random number that nobody outside knows.
    pub fn new(bytes_max: usize, seed: u64) -> Self {
        let for_shapes = bytes_max / SHAPES_SHARE;
        Self {
            seed,
            links: Shards::new(SHARDS, bytes_max - for_shapes),
            shapes: Shards::new(SHAPE_SHARDS, for_shapes),
            recalled: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
        }
    }

    /// What it has done and has.
    pub fn usage(&self) -> TextsUse {
        let (parts, links) = self.links.usage();
        let (_, shapes) = self.shapes.usage();
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TextsUse { recalled: count(&self.recalled), unknown: count(&self.unknown), parts, bytes: links + shapes }
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.links.clear();
        self.shapes.clear();
    }
}

impl Memory for Texts {
    fn seed(&self) -> u64 {
        self.seed
    }

    fn recall(&self, key: u128) -> Option<Arc<Link>> {
        // It is asked once for every part of a text, which may be long, and all its locks are free.
        courtesy::give_way();
        let link = self.links.recall(key);
        let count = if link.is_some() { &self.recalled } else { &self.unknown };
        count.fetch_add(1, Ordering::Relaxed);
        link
    }

    fn keep(&self, key: u128, link: Arc<Link>) {
        self.links.keep(key, link);
    }

    fn shape(&self, key: u128) -> Option<Arc<Shape>> {
        self.shapes.recall(key)
    }

    fn keep_shape(&self, key: u128, shape: Arc<Shape>) {
        self.shapes.keep(key, shape);
    }
}

/// What is kept, and takes bytes.
trait Kept {
    /// How many, with the entry around it.
    fn room(&self) -> usize;
}

impl Kept for Link {
    fn room(&self) -> usize {
        self.bytes() + ENTRY_BYTES
    }
}

impl Kept for Shape {
    fn room(&self) -> usize {
        self.bytes() + ENTRY_BYTES
    }
}

/// Things of one kind.
#[derive(Debug)]
struct Shards<T> {
    /// Bytes that one generation of one shard may have.
    generation_bytes: usize,
    shards: Box<[Mutex<Shard<T>>]>,
}

impl<T: Kept> Shards<T> {
    /// With at most `most` shards.
    fn new(most: usize, bytes_max: usize) -> Self {
        let shards = (bytes_max / SHARD_BYTES).clamp(1, most);
        let generation_bytes = bytes_max / shards / 2;
        Self { generation_bytes, shards: (0..shards).map(|_| Mutex::default()).collect() }
    }

    /// How many there are, and bytes that they take.
    fn usage(&self) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        for shard in &self.shards {
            let shard = shard.lock();
            count += shard.young.things.len() + shard.old.things.len();
            bytes += shard.young.bytes + shard.old.bytes;
        }
        (count, bytes)
    }

    fn clear(&self) {
        for shard in &self.shards {
            let forgotten = std::mem::take(&mut *shard.lock());
            drop(forgotten);
        }
    }

    fn recall(&self, key: u128) -> Option<Arc<T>> {
        let (found, forgotten) = self.shard(key).lock().recall(key, self.generation_bytes);
        // Not under the lock: there may be a thousand of them.
        drop(forgotten);
        found
    }

    fn keep(&self, key: u128, thing: Arc<T>) {
        let forgotten = self.shard(key).lock().keep(key, thing, self.generation_bytes);
        drop(forgotten);
    }

    fn shard(&self, key: u128) -> &Mutex<Shard<T>> {
        // The map inside goes by the low bits.
        let [high, ..] = key.to_be_bytes();
        &self.shards[usize::from(high) % self.shards.len()]
    }
}

/// Part of the memory.
#[derive(Debug)]
struct Shard<T> {
    young: Generation<T>,
    old: Generation<T>,
}

impl<T> Default for Shard<T> {
    fn default() -> Self {
        Self { young: Generation::default(), old: Generation::default() }
    }
}

/// Things of about the same age.
#[derive(Debug)]
struct Generation<T> {
    things: HashMap<u128, Arc<T>, BuildHasherDefault<AlreadyHashed>>,
    bytes: usize,
}

impl<T> Default for Generation<T> {
    fn default() -> Self {
        Self { things: HashMap::default(), bytes: 0 }
    }
}

impl<T: Kept> Shard<T> {
    fn recall(&mut self, key: u128, room: usize) -> (Option<Arc<T>>, Option<Generation<T>>) {
        if let Some(thing) = self.young.things.get(&key) {
            return (Some(Arc::clone(thing)), None);
        }
        let Some(thing) = self.old.things.remove(&key) else { return (None, None) };
        self.old.bytes -= thing.room();
        let forgotten = self.keep(key, Arc::clone(&thing), room);
        (Some(thing), forgotten)
    }

    /// Adds a thing; gives back the generation that has to go for it.
    fn keep(&mut self, key: u128, thing: Arc<T>, room: usize) -> Option<Generation<T>> {
        let more = thing.room();
        if more > room {
            return None;
        }
        let full = self.young.bytes + more > room;
        let forgotten = full.then(|| std::mem::replace(&mut self.old, std::mem::take(&mut self.young)));
        self.young.bytes += more;
        if let Some(same) = self.young.things.insert(key, thing) {
            self.young.bytes -= same.room();
        }
        forgotten
    }
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

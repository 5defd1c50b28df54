//! Who holds which block: one index per key space, shared by its one writer and all readers.
//!
//! An inverted map answers for every cache at once: name → one bit per slot, where a slot is the cache of one
//! data-parallel rank of one endpoint. A second map of the same form keeps which slots removed a name, and is looked at
//! only for names that some slot did remove.
//!
//! Readers take no lock and write nothing: cells are atomics, and a rebuilt table reaches readers through a snapshot that
//! they load once per query. Writers take turns behind a mutex, so callers need not arrange for there being one only.
//! A reader may see an event half applied; a wrong route costs time, never correctness.

mod table;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::contract::BlockHash;
use crate::contract::events::{Event, Removed, Stored};
use crate::inventory::{Book, Limits, Place, Removal, Scorer, Storing, bits};
use table::{Cell, Key, Map, Mixer, SHARDS, View};

/// Slots at most: 128 endpoints of eight ranks.
pub const SLOTS_MAX: usize = 1024;
/// Names whose searches wait for memory together: enough to cover its latency, few enough for the stack.
const TOGETHER: usize = 64;
/// Blocks a slot may hold for each that its engine can: four leave room for what an engine announces and does not keep.
const NAMES_PER_GPU_BLOCK: u64 = 4;

/// The cache of one data-parallel rank of one endpoint. May name another cache once it was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(u16);

impl SlotId {
    fn new(index: usize) -> Self {
        debug_assert!(index < SLOTS_MAX, "slots are numbered below their maximum");
        Self(u16::try_from(index).unwrap_or(u16::MAX))
    }

    fn index(self) -> usize {
        self.0.into()
    }

    fn word(self) -> usize {
        self.index() / 64
    }

    fn bit(self) -> u64 {
        1 << (self.index() % 64)
    }
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How large an index may grow.
#[derive(Clone, Copy, Debug)]
pub struct IndexConfig {
    /// Names per slot (`LOXILB_KV_MAX_BLOCKS`). Without it the smaller of `names_max` and four times what the slot's
    /// engine can hold, see [`Index::set_gpu_blocks`].
    pub max_blocks: Option<usize>,
    /// Names per slot where nothing better is known: the largest engines hold a few million blocks.
    pub names_max: usize,
    /// Names per slot remembered as removed once no slot holds them.
    pub removed_max: usize,
    /// Any number; makes the places of names unforeseeable.
    pub seed: u64,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self { max_blocks: None, names_max: 10_000_000, removed_max: 1 << 16, seed: 0 }
    }
}

/// What one event changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks that are held from now on.
    pub stored: u32,
    /// Blocks that are no longer held.
    pub removed: u32,
    /// Removals of copies that were not known.
    pub unknown: u32,
    /// Blocks dropped because their slot held too many, and copies refused for that reason.
    pub evicted: u32,
}

/// How much of a prompt one slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The slot.
    pub slot: SlotId,
    /// The length of its usable leading run, in blocks (`kvScore: prefix`).
    pub depth: u32,
    /// The blocks it holds, wherever they are (`kvScore: count`).
    pub count: u32,
}

/// The blocks of all slots of one key space.
pub struct Index {
    snapshot: ArcSwap<Snapshot>,
    writer: Mutex<Writer>,
    names: Box<[AtomicUsize]>,
    mixer: Mixer,
}

/// What readers see.
struct Snapshot {
    held: View,
    removed: View,
    /// Slots in use, 64 a word; as many words as names have values.
    slots: Vec<u64>,
}

struct Writer {
    config: IndexConfig,
    held: Map,
    removed: Map,
    slots: Vec<u64>,
    books: Vec<Option<Book>>,
    /// Applies events wrongly on purpose, to see that the tests notice.
    #[cfg(test)]
    broken: bool,
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index").field("slots", &self.snapshot.load().slots).finish_non_exhaustive()
    }
}

impl Index {
    /// An index without slots.
    pub fn new(config: IndexConfig) -> Self {
        let mixer = Mixer::new(config.seed);
        let writer = Writer {
            config,
            held: Map::new(mixer),
            removed: Map::new(mixer),
            slots: vec![0],
            books: Vec::new(),
            #[cfg(test)]
            broken: false,
        };
        Self {
            snapshot: ArcSwap::from_pointee(writer.snapshot()),
            writer: Mutex::new(writer),
            names: (0..SLOTS_MAX).map(|_| AtomicUsize::new(0)).collect(),
            mixer,
        }
    }

    /// A new, empty slot; none when all [`SLOTS_MAX`] are taken.
    pub fn add_slot(&self) -> Option<SlotId> {
        let mut writer = self.writer.lock();
        let slot = writer.add_slot()?;
        self.names[slot.index()].store(0, Ordering::Relaxed);
        self.publish(&mut writer, true);
        Some(slot)
    }

    /// Removes a slot and everything known of it.
    pub fn remove_slot(&self, slot: SlotId) {
        let mut writer = self.writer.lock();
        writer.clear(slot);
        writer.slots[slot.word()] &= !slot.bit();
        writer.books[slot.index()] = None;
        self.names[slot.index()].store(0, Ordering::Relaxed);
        self.publish(&mut writer, true);
    }

    /// Tells how many blocks a slot's engine can hold, which bounds the names kept of it unless the operator did.
    pub fn set_gpu_blocks(&self, slot: SlotId, gpu_blocks: u64) {
        let mut writer = self.writer.lock();
        let of_engine = usize::try_from(gpu_blocks.saturating_mul(NAMES_PER_GPU_BLOCK)).unwrap_or(usize::MAX);
        let names = writer.config.max_blocks.unwrap_or_else(|| of_engine.min(writer.config.names_max));
        if let Some(book) = writer.books[slot.index()].as_mut() {
            book.set_names_max(names);
            writer.evict(slot, &mut Vec::new());
        }
        self.publish_slot(&mut writer, slot);
    }

    /// Applies one event of a slot.
    pub fn apply(&self, slot: SlotId, event: &Event) -> Applied {
        self.apply_noting(slot, event, &mut Vec::new())
    }

    /// As [`Index::apply`]; adds the names that a bound took copies of to `dropped`, which are [`Applied::evicted`] in
    /// number. Whether any copy is left, [`Index::holds_copy`] says.
    pub fn apply_noting(&self, slot: SlotId, event: &Event, dropped: &mut Vec<BlockHash>) -> Applied {
        let mut writer = self.writer.lock();
        let applied = match event {
            Event::Stored(stored) => writer.store(slot, stored, dropped),
            Event::Removed(removed) => writer.remove(slot, removed),
            Event::Cleared => Applied { removed: writer.clear(slot), ..Applied::default() },
        };
        self.publish_slot(&mut writer, slot);
        applied
    }

    /// Forgets everything known of a slot.
    pub fn clear(&self, slot: SlotId) {
        self.apply(slot, &Event::Cleared);
    }

    fn publish_slot(&self, writer: &mut Writer, slot: SlotId) {
        let names = writer.books[slot.index()].as_ref().map_or(0, Book::names);
        self.names[slot.index()].store(names, Ordering::Relaxed);
        self.publish(writer, false);
    }

    fn publish(&self, writer: &mut Writer, slots_changed: bool) {
        if slots_changed || writer.held.rebuilt || writer.removed.rebuilt {
            (writer.held.rebuilt, writer.removed.rebuilt) = (false, false);
            self.snapshot.store(Arc::new(writer.snapshot()));
        }
    }

    /// How many blocks a slot holds.
    pub fn blocks(&self, slot: SlotId) -> usize {
        self.names[slot.index()].load(Ordering::Relaxed)
    }

    /// The blocks that a slot holds, in order of their names.
    pub fn names(&self, slot: SlotId) -> Vec<BlockHash> {
        let snapshot = self.snapshot.load();
        let mut names: Vec<_> =
            (0..SHARDS).flat_map(|shard| snapshot.held.with_bits(self.mixer, shard, slot.word(), slot.bit())).collect();
        names.sort_unstable();
        names
    }

    /// Whether a slot holds any copy of a block, in whatever KV group and medium.
    pub fn holds_copy(&self, slot: SlotId, name: BlockHash) -> bool {
        let writer = self.writer.lock();
        writer.holds(writer.held_key(name), slot)
            || writer.books[slot.index()].as_ref().is_some_and(|book| book.has_other_copies(name))
    }

    /// The copies of blocks that a slot holds beyond those of [`Index::names`], with a number for group and medium.
    pub fn copies(&self, slot: SlotId) -> Vec<(BlockHash, u32, u32)> {
        self.writer.lock().books[slot.index()].as_ref().map_or_else(Vec::new, Book::copies)
    }

    /// Scores every slot in use against the names of a prompt's blocks, in prompt order.
    pub fn overlaps(&self, names: &[BlockHash], out: &mut Vec<Overlap>) {
        out.clear();
        let snapshot = self.snapshot.load();
        for (word, &slots) in snapshot.slots.iter().enumerate().filter(|(_, slots)| **slots != 0) {
            let mut scorer = Scorer::default();
            for names in names.chunks(TOGETHER) {
                snapshot.answer(self.mixer, names, word, |held, removed| scorer.next(held, removed));
            }
            scorer.finish(slots, |slot, depth, count| {
                out.push(Overlap { slot: SlotId::new(64 * word + slot), depth, count });
            });
        }
    }
}

impl Snapshot {
    /// Looks up at most [`TOGETHER`] names and passes on which of 64 slots hold, and which removed, each.
    #[inline]
    fn answer(&self, mixer: Mixer, names: &[BlockHash], word: usize, mut pass: impl FnMut(u64, u64)) {
        // All first reads are started before any is needed, so that their cache misses overlap.
        let mut begun = [(Cell::default(), 0); TOGETHER];
        for (begun, &name) in begun.iter_mut().zip(names) {
            let key = mixer.key(name);
            *begun = self.held.tables[key.shard()].begin(key);
        }
        for (&begun, &name) in begun.iter().zip(names) {
            let key = mixer.key(name);
            let table = &self.held.tables[key.shard()];
            match table.end(key, begun) {
                Ok((cell, marked)) => {
                    let removed = if marked { self.removals(key, word) } else { 0 };
                    pass(table.value(cell, word), removed);
                }
                Err(_) => pass(0, 0),
            }
        }
    }

    #[cold]
    fn removals(&self, key: Key, word: usize) -> u64 {
        let table = &self.removed.tables[key.shard()];
        table.find(key).map_or(0, |(cell, _)| table.value(cell, word))
    }
}

impl Writer {
    fn snapshot(&self) -> Snapshot {
        Snapshot { held: self.held.view.clone(), removed: self.removed.view.clone(), slots: self.slots.clone() }
    }

    fn add_slot(&mut self) -> Option<SlotId> {
        let free = (0..SLOTS_MAX).find(|&index| self.books.get(index).is_none_or(Option::is_none))?;
        let slot = SlotId::new(free);
        if slot.word() >= self.slots.len() {
            self.slots.resize(slot.word() + 1, 0);
            self.held.widen(self.slots.len());
            self.removed.widen(self.slots.len());
        }
        let names = self.config.max_blocks.unwrap_or(self.config.names_max).max(1);
        let book = Book::new(Limits { names, forgotten: self.config.removed_max });
        if self.books.len() <= free {
            self.books.resize_with(free + 1, || None);
        }
        self.books[free] = Some(book);
        self.slots[slot.word()] |= slot.bit();
        Some(slot)
    }

    fn holds(&self, key: Key, slot: SlotId) -> bool {
        self.held.get(key, slot.word()) & slot.bit() != 0
    }

    fn store(&mut self, slot: SlotId, stored: &Stored, dropped: &mut Vec<BlockHash>) -> Applied {
        let mut applied = Applied::default();
        let Some(mut book) = self.books[slot.index()].take() else { return applied };
        let mut place = book.place(stored);
        if place == Place::Demote {
            let held = self.names(slot);
            for &name in &held {
                self.drop_bit(slot, name);
            }
            book.demote(held);
            place = Place::Aside;
        }
        if place == Place::Counts && book.names() == 0 {
            for name in book.promote() {
                self.store_one(slot, &mut book, name, &mut applied);
            }
        }
        for hashes in stored.hashes.chunks(TOGETHER) {
            if place == Place::Counts {
                self.held.fetch(hashes.iter().map(|hash| hash.name));
            }
            for hash in hashes {
                match place {
                    Place::Counts => self.store_one(slot, &mut book, hash.name, &mut applied),
                    _ if book.store_aside(hash.name, stored) == Storing::Refused => {
                        applied.evicted += 1;
                        dropped.push(hash.name);
                    }
                    _ => {}
                }
            }
        }
        self.books[slot.index()] = Some(book);
        applied.evicted += self.evict(slot, dropped);
        applied
    }

    fn store_one(&mut self, slot: SlotId, book: &mut Book, name: BlockHash, applied: &mut Applied) {
        let key = self.held_key(name);
        let held = self.holds(key, slot);
        if book.store(name, held) != Storing::Held {
            return;
        }
        applied.stored += 1;
        if self.held.is_zero(key) {
            // Somebody holds it again: its removals are remembered for as long.
            self.recall(key, name, slot, book);
        }
        self.held.change(key, slot.word(), slot.bit(), true);
        self.set_removed(key, slot, false);
    }

    fn held_key(&self, name: BlockHash) -> Key {
        self.held.key(name)
    }

    /// Takes a name that nobody held out of the queues of those that remember it as removed.
    fn recall(&mut self, key: Key, name: BlockHash, own: SlotId, own_book: &mut Book) {
        for (word, slots) in self.removed.values(key).enumerate().filter(|(_, slots)| *slots != 0).collect::<Vec<_>>() {
            for slot in bits(slots).map(|bit| SlotId::new(64 * word + bit)) {
                match &mut self.books[slot.index()] {
                    _ if slot == own => own_book.recall(name),
                    Some(book) => book.recall(name),
                    None => {}
                }
            }
        }
    }

    fn remove(&mut self, slot: SlotId, removed: &Removed) -> Applied {
        let mut applied = Applied::default();
        for hash in &removed.hashes {
            let key = self.held_key(hash.name);
            let held = self.holds(key, slot);
            let Some(book) = self.books[slot.index()].as_mut() else { return applied };
            match book.remove(hash.name, removed, held) {
                #[cfg(test)]
                Removal::Fewer if self.broken => self.drop_bit(slot, hash.name),
                Removal::Fewer => {}
                Removal::Unknown => applied.unknown += 1,
                Removal::Gone => {
                    applied.removed += 1;
                    self.set_removed(key, slot, true);
                    self.drop_bit(slot, hash.name);
                }
            }
        }
        applied
    }

    /// Takes a slot's bit back.
    fn drop_bit(&mut self, slot: SlotId, name: BlockHash) {
        let key = self.held_key(name);
        self.held.change(key, slot.word(), slot.bit(), false);
        self.abandoned(key, name);
        self.held.settle(key.shard());
    }

    /// Where nobody holds a name any more, the slots that removed it remember it for a while.
    fn abandoned(&mut self, key: Key, name: BlockHash) {
        if !self.held.is_zero(key) {
            return;
        }
        let removals: Vec<_> = self.removed.values(key).enumerate().filter(|(_, slots)| *slots != 0).collect();
        for (word, slots) in removals {
            for slot in bits(slots).map(|bit| SlotId::new(64 * word + bit)) {
                let forgotten = self.books[slot.index()].as_mut().and_then(|book| book.remember(name));
                if let Some(forgotten) = forgotten {
                    self.set_removed(self.held_key(forgotten), slot, false);
                }
            }
        }
    }

    fn set_removed(&mut self, key: Key, slot: SlotId, removed: bool) {
        let before = self.removed.change(key, slot.word(), slot.bit(), removed);
        if (before & slot.bit() != 0) == removed {
            return;
        }
        self.held.mark(key, removed || !self.removed.is_zero(key));
        if !removed {
            self.removed.settle(key.shard());
            self.held.settle(key.shard());
        }
    }

    fn evict(&mut self, slot: SlotId, dropped: &mut Vec<BlockHash>) -> u32 {
        let mut evicted = 0;
        if self.books[slot.index()].as_ref().is_some_and(Book::wants_order) {
            let held = self.names(slot);
            if let Some(book) = self.books[slot.index()].as_mut() {
                book.start_order(held);
            }
        }
        while let Some(oldest) = self.books[slot.index()].as_mut().and_then(Book::evict) {
            self.drop_bit(slot, oldest);
            dropped.push(oldest);
            evicted += 1;
        }
        evicted
    }

    /// Empties a slot; says how many blocks it held.
    fn clear(&mut self, slot: SlotId) -> u32 {
        let Some(book) = self.books[slot.index()].as_mut() else { return 0 };
        let held = book.names();
        book.clear();
        for shard in 0..SHARDS {
            for name in self.removed.with_bits(shard, slot.word(), slot.bit()) {
                self.set_removed(self.held_key(name), slot, false);
            }
            for name in self.held.with_bits(shard, slot.word(), slot.bit()) {
                self.drop_bit(slot, name);
            }
        }
        u32::try_from(held).unwrap_or(u32::MAX)
    }

    fn names(&self, slot: SlotId) -> Vec<BlockHash> {
        (0..SHARDS).flat_map(|shard| self.held.with_bits(shard, slot.word(), slot.bit())).collect()
    }
}

#[cfg(test)]
mod tests;

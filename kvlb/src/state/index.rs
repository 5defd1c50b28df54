//! Who holds which block: one index per key space, shared by its one writer and all readers.
//!
//! An inverted map answers for every cache at once: name → the slots that hold it and those that removed it, one bit each,
//! where a slot is the cache of one data-parallel rank of one endpoint. Names lie in the order in which they were
//! announced ([`arena`]), so a prompt is read like a list, with one search ([`names`]) for each stretch of it.
//!
//! Readers take no lock and write nothing: cells are atomics, and new pages and tables reach readers through a snapshot
//! that they load once per query. Writers take turns behind a mutex, so callers need not arrange for there being one only.
//! A reader may see an event half applied; a wrong route costs time, never correctness.

mod arena;
mod names;
mod writer;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::contract::BlockHash;
use crate::contract::events::Event;
use crate::inventory::Scorer;
use arena::{Cell, HELD, REMOVED, View};
use names::Mixer;
use writer::Writer;

/// Slots at most: 128 endpoints of eight ranks.
pub const SLOTS_MAX: usize = 1024;
/// Views that a query asks for at most: a cell is moved at most once between two of them.
const VIEWS_MAX: u32 = 4;
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
}

/// What readers see.
struct Snapshot {
    view: View,
    /// Slots in use, 64 a word; as many words as cells have in each layer.
    slots: Vec<u64>,
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index").field("slots", &self.snapshot.load().slots).finish_non_exhaustive()
    }
}

impl Index {
    /// An index without slots.
    pub fn new(config: IndexConfig) -> Self {
        let mut writer = Writer::new(config, Mixer::new(config.seed));
        let snapshot = Snapshot { view: writer.arena.view(), slots: writer.slots.clone() };
        Self {
            snapshot: ArcSwap::from_pointee(snapshot),
            writer: Mutex::new(writer),
            names: (0..SLOTS_MAX).map(|_| AtomicUsize::new(0)).collect(),
        }
    }

    /// A new, empty slot; none when all [`SLOTS_MAX`] are taken.
    pub fn add_slot(&self) -> Option<SlotId> {
        let mut writer = self.writer.lock();
        let slot = writer.add_slot()?;
        self.names[slot.index()].store(0, Ordering::Relaxed);
        self.publish_all(&mut writer);
        Some(slot)
    }

    /// Removes a slot and everything known of it.
    pub fn remove_slot(&self, slot: SlotId) {
        let mut writer = self.writer.lock();
        writer.remove_slot(slot);
        self.names[slot.index()].store(0, Ordering::Relaxed);
        self.compact(&mut writer);
        self.publish_all(&mut writer);
    }

    /// Tells how many blocks a slot's engine can hold, which bounds the names kept of it unless the operator did.
    pub fn set_gpu_blocks(&self, slot: SlotId, gpu_blocks: u64) {
        let mut writer = self.writer.lock();
        writer.set_gpu_blocks(slot, gpu_blocks);
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
        let applied = writer.apply(slot, event, dropped);
        self.publish_slot(&mut writer, slot);
        applied
    }

    /// Forgets everything known of a slot.
    pub fn clear(&self, slot: SlotId) {
        self.apply(slot, &Event::Cleared);
    }

    fn publish_slot(&self, writer: &mut Writer, slot: SlotId) {
        self.names[slot.index()].store(writer.names(slot), Ordering::Relaxed);
        self.compact(writer);
        self.publish(writer);
    }

    /// Moves cells together where too many are dead. Readers know where cells go before they are sent there.
    fn compact(&self, writer: &mut Writer) {
        while let Some(moved) = writer.copy_out() {
            self.publish(writer);
            writer.move_over(moved);
        }
    }

    /// Gives readers what their view lacks.
    fn publish(&self, writer: &mut Writer) {
        if let Some(view) = writer.new_view() {
            self.snapshot.store(Arc::new(Snapshot { view, slots: writer.slots.clone() }));
        }
    }

    fn publish_all(&self, writer: &mut Writer) {
        let view = writer.arena.view();
        self.snapshot.store(Arc::new(Snapshot { view, slots: writer.slots.clone() }));
    }

    /// How many blocks a slot holds.
    pub fn blocks(&self, slot: SlotId) -> usize {
        self.names[slot.index()].load(Ordering::Relaxed)
    }

    /// The blocks that a slot holds, in order of their names.
    pub fn names(&self, slot: SlotId) -> Vec<BlockHash> {
        let mut names = self.snapshot.load().view.with_bits(slot.word(), HELD, slot.bit());
        names.sort_unstable();
        // A cell that is being moved is there twice.
        names.dedup();
        names
    }

    /// Whether a slot holds any copy of a block, in whatever KV group and medium.
    pub fn holds_copy(&self, slot: SlotId, name: BlockHash) -> bool {
        self.writer.lock().holds_copy(slot, name)
    }

    /// The copies of blocks that a slot holds beyond those of [`Index::names`], with a number for group and medium.
    pub fn copies(&self, slot: SlotId) -> Vec<(BlockHash, u32, u32)> {
        self.writer.lock().copies(slot)
    }

    /// Scores every slot in use against the names of a prompt's blocks, in prompt order.
    pub fn overlaps(&self, names: &[BlockHash], out: &mut Vec<Overlap>) {
        out.clear();
        let snapshot = self.snapshot.load();
        // Nearly always there are at most 64 slots, and the one scorer needs no memory of its own.
        let mut first = Scorer::default();
        let mut others = vec![Scorer::default(); snapshot.slots.len() - 1];
        self.walk(&snapshot, names, |cell| {
            first.next(cell.slots(0, HELD), cell.slots(0, REMOVED));
            for (word, scorer) in (1..).zip(&mut others) {
                scorer.next(cell.slots(word, HELD), cell.slots(word, REMOVED));
            }
        });
        let scorers = std::iter::once(first).chain(others);
        for ((word, &slots), scorer) in snapshot.slots.iter().enumerate().zip(scorers) {
            scorer.finish(slots, |slot, depth, count| {
                out.push(Overlap { slot: SlotId::new(64 * word + slot), depth, count });
            });
        }
    }

    /// Passes on the cells of all names, if need be from newer views.
    #[inline]
    fn walk(&self, snapshot: &Snapshot, names: &[BlockHash], mut pass: impl FnMut(Cell<'_>)) {
        let mut walked = snapshot.view.walk(names, false, &mut pass);
        for views in 2..=VIEWS_MAX {
            if walked == names.len() {
                return;
            }
            let snapshot = self.snapshot.load();
            walked += snapshot.view.walk(&names[walked..], views == VIEWS_MAX, &mut pass);
        }
    }
}

#[cfg(test)]
mod tests;

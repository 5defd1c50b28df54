//! Who holds which block: one index per rule, shared by its writers and all readers.
//!
//! Its names may come from several key spaces: being 64 bits of a digest, equal ones are of equal blocks in all of them.
//!
//! An inverted map answers for every cache at once: name → the slots that hold it and those that removed it, one bit each,
//! where a slot is the cache of one data-parallel rank of one endpoint. Names lie in the order in which they were
//! announced ([`arena`]), so a prompt is read like a list, with one search ([`names`]) for each stretch of it.
//!
//! Readers take no lock and write nothing: cells are atomics, and new pages and tables reach readers through a snapshot
//! that they load once per query. Writers take turns behind a mutex, so callers need not arrange for there being one only.
//! A reader may see an event half applied; a wrong route costs time, never correctness.

mod arena;
mod memory;
mod names;
mod writer;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::contract::BlockHash;
use crate::contract::events::{Event, Medium};
use crate::fleet::TierWeights;
use crate::inventory::{Credit, Scorer};
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
    /// What a block is worth that only another medium holds. A medium of weight zero costs nothing.
    pub tier_weights: TierWeights,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self {
            max_blocks: None,
            names_max: 10_000_000,
            removed_max: 1 << 16,
            seed: 0,
            tier_weights: TierWeights::default(),
        }
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
    /// Copies taken back because the slot had more than its engine can have: hits that were announced again.
    pub disproved: u32,
}

/// How much of a prompt one slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The slot.
    pub slot: SlotId,
    /// The length of its usable leading run, in blocks (`kvScore: prefix`). Blocks that only another medium holds add
    /// their weight ([`IndexConfig::tier_weights`]), and the sum is rounded down.
    pub depth: u32,
    /// The blocks it holds in the accelerator's memory, at whatever position (`kvScore: count`).
    pub count: u32,
}

/// The blocks of all slots of one rule.
pub struct Index {
    snapshot: ArcSwap<Snapshot>,
    writer: Mutex<Writer>,
    names: Box<[AtomicUsize]>,
    tiers: Tiers,
}

/// The media that have a weight, and the layer of cells that knows what they have.
#[derive(Clone, Copy, Debug)]
struct Tiers {
    weights: TierWeights,
    cpu: Option<usize>,
    storage: Option<usize>,
}

impl Tiers {
    fn new(weights: TierWeights) -> Self {
        let cpu = (weights.cpu > 0).then_some(REMOVED + 1);
        let storage = (weights.storage > 0).then(|| cpu.unwrap_or(REMOVED) + 1);
        Self { weights, cpu, storage }
    }

    /// Layers that cells have.
    fn layers(self) -> usize {
        1 + self.storage.or(self.cpu).unwrap_or(REMOVED)
    }

    fn layer(self, medium: Medium) -> Option<usize> {
        match medium {
            Medium::Cpu => self.cpu,
            Medium::Storage => self.storage,
            Medium::Gpu | Medium::Other => None,
        }
    }

    fn media(self) -> impl Iterator<Item = (Medium, usize)> {
        [Medium::Cpu, Medium::Storage].into_iter().filter_map(move |medium| Some((medium, self.layer(medium)?)))
    }
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
        let tiers = Tiers::new(config.tier_weights);
        let mut writer = Writer::new(config, Mixer::new(config.seed), tiers);
        let snapshot = Snapshot { view: writer.arena.view(), slots: writer.slots.clone() };
        Self {
            snapshot: ArcSwap::from_pointee(snapshot),
            writer: Mutex::new(writer),
            names: (0..SLOTS_MAX).map(|_| AtomicUsize::new(0)).collect(),
            tiers,
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

    /// As [`Index::apply`]; adds the names to `dropped` that a bound took copies of. Whether any copy is left of one,
    /// [`Index::holds_copy`] says.
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
        writer.rehouse();
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
        if self.tiers.cpu.or(self.tiers.storage).is_some() {
            return self.overlaps_in_tiers(&snapshot, names, out);
        }
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

    #[cold]
    fn overlaps_in_tiers(&self, snapshot: &Snapshot, names: &[BlockHash], out: &mut Vec<Overlap>) {
        let fresh = (Scorer::default(), Credit::new(self.tiers.weights));
        let mut scorers = vec![fresh; snapshot.slots.len()];
        self.walk(snapshot, names, |cell| {
            for (word, (scorer, credit)) in scorers.iter_mut().enumerate() {
                let slots = |layer| cell.slots(word, layer);
                let [cpu, storage] = [self.tiers.cpu, self.tiers.storage].map(|layer| layer.map_or(0, slots));
                credit.next(scorer, slots(HELD), slots(REMOVED), cpu, storage);
            }
        });
        for ((word, &slots), (scorer, credit)) in snapshot.slots.iter().enumerate().zip(scorers) {
            credit.finish(scorer, slots, |slot, depth, count| {
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

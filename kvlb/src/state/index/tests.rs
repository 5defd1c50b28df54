//! The index against a plain model of the same rules, on random streams; and readers beside a busy writer.

mod pool;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use super::writer::Defect;
use super::*;
use crate::contract::TokenId;
use crate::contract::events::{Attention, Medium, Removed, Stored, WireHash};

/// Group 0 has full attention and group 1 a window.
const FULL: (u32, Medium) = (0, Medium::Gpu);

#[derive(Clone, Debug)]
enum Step {
    Store { slot: usize, names: Vec<u64>, kind: (u32, Medium) },
    Remove { slot: usize, name: u64, kind: (u32, Medium) },
    Clear { slot: usize },
    Replace { slot: usize },
}

/// The rules in the plainest words.
#[derive(Default)]
struct Plain {
    slots: Vec<PlainSlot>,
    names_max: usize,
    removed_max: usize,
    weights: TierWeights,
}

#[derive(Default)]
struct PlainSlot {
    copies: BTreeMap<(u64, (u32, Medium)), u32>,
    held: Vec<u64>,
    removed: BTreeSet<u64>,
    /// Removed names that nobody holds, the oldest first.
    forgotten: Vec<u64>,
}

impl Plain {
    fn is_held(&self, name: u64) -> bool {
        self.slots.iter().any(|slot| slot.held.contains(&name))
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Store { slot, names, kind } => names.iter().for_each(|&name| self.store(*slot, name, *kind)),
            Step::Remove { slot, name, kind } => self.remove(*slot, *name, *kind),
            Step::Clear { slot } | Step::Replace { slot } => {
                let gone = std::mem::take(&mut self.slots[*slot]);
                gone.held.into_iter().for_each(|name| self.abandon(name));
            }
        }
        for slot in 0..self.slots.len() {
            while self.slots[slot].held.len() > self.names_max {
                let oldest = self.slots[slot].held.remove(0);
                self.slots[slot].copies.remove(&(oldest, FULL));
                self.abandon(oldest);
            }
        }
    }

    fn store(&mut self, slot: usize, name: u64, kind: (u32, Medium)) {
        let held_before = self.is_held(name);
        let own = &mut self.slots[slot];
        // The first copy that counts is bounded by eviction, the others by refusal.
        let beyond_first = |(key, &copies): (&(u64, (u32, Medium)), &u32)| key.1 != FULL || copies > 1;
        let others = own.copies.iter().filter(|&entry| beyond_first(entry)).count();
        let before = own.copies.get(&(name, kind)).copied().unwrap_or(0);
        let is_new_other = if kind == FULL { before == 1 } else { before == 0 };
        if is_new_other && others >= self.names_max {
            return;
        }
        let copies = own.copies.entry((name, kind)).or_insert(0);
        *copies += 1;
        if kind != FULL || own.held.contains(&name) {
            return;
        }
        own.held.push(name);
        own.removed.remove(&name);
        if !held_before {
            self.slots.iter_mut().for_each(|slot| slot.forgotten.retain(|&other| other != name));
        }
    }

    fn remove(&mut self, slot: usize, name: u64, kind: (u32, Medium)) {
        let own = &mut self.slots[slot];
        let Some(copies) = own.copies.get_mut(&(name, kind)) else { return };
        *copies -= 1;
        if *copies > 0 {
            return;
        }
        own.copies.remove(&(name, kind));
        if kind == FULL {
            own.held.retain(|&other| other != name);
            own.removed.insert(name);
            self.abandon(name);
        }
    }

    fn abandon(&mut self, name: u64) {
        if self.is_held(name) {
            return;
        }
        let removed_max = self.removed_max;
        for slot in self.slots.iter_mut().filter(|slot| slot.removed.contains(&name)) {
            slot.forgotten.push(name);
            if slot.forgotten.len() > removed_max {
                let oldest = slot.forgotten.remove(0);
                slot.removed.remove(&oldest);
            }
        }
    }

    /// What a block is worth that only other media hold, in thousandths.
    fn weight(&self, slot: usize, name: u64) -> u32 {
        let has = |medium| self.slots[slot].copies.contains_key(&(name, (0, medium)));
        let weight = |medium, weight: u16| if has(medium) { u32::from(weight) } else { 0 };
        weight(Medium::Cpu, self.weights.cpu).max(weight(Medium::Storage, self.weights.storage))
    }

    fn overlap(&self, slot: usize, names: &[u64]) -> (u32, u32) {
        let own = &self.slots[slot];
        let (mut credit, mut vouched, mut removed_run) = (0, 0, 0);
        for name in names {
            let held = own.held.contains(name);
            let weight = if held { 1000 } else { self.weight(slot, *name) };
            removed_run = if own.removed.contains(name) && weight == 0 { removed_run + 1 } else { 0 };
            if removed_run > 2 {
                break;
            }
            if weight == 0 {
                vouched += 1000;
            } else {
                credit += vouched + weight;
                vouched = 0;
            }
        }
        let count = names.iter().filter(|name| own.held.contains(name)).count();
        (credit / 1000, count.try_into().unwrap())
    }
}

fn wire(names: &[u64]) -> Vec<WireHash> {
    names.iter().map(|&name| BlockHash(name).into()).collect()
}

fn store(names: &[u64], (group, medium): (u32, Medium)) -> Event {
    let attention = if group == 0 { Attention::Full } else { Attention::Partial };
    Event::Stored(Stored { hashes: wire(names), group: Some(group), medium, attention, ..Stored::default() })
}

fn remove(name: u64, (group, medium): (u32, Medium)) -> Event {
    Event::Removed(Removed { hashes: wire(&[name]), medium, group: Some(group) })
}

const SLOTS: usize = 3;

fn step(clears: bool) -> impl Strategy<Value = Step> {
    let slot = 0..SLOTS;
    // Zero and its neighbours are names like any other.
    let name = prop_oneof![0..40u64, (0..6u64).prop_map(|low| u64::MAX - low), (0..6u64).prop_map(|high| high << 58)];
    let others = [(1, Medium::Gpu), (0, Medium::Cpu), (0, Medium::Storage), (1, Medium::Cpu), (0, Medium::Other)];
    let kind = prop_oneof![3 => Just(FULL), 1 => prop::sample::select(others.to_vec())];
    let names = prop::collection::vec(name.clone(), 0..8);
    let clear = u32::from(clears);
    prop_oneof![
        12 => (slot.clone(), names, kind.clone()).prop_map(|(slot, names, kind)| Step::Store { slot, names, kind }),
        20 => (slot.clone(), name, kind).prop_map(|(slot, name, kind)| Step::Remove { slot, name, kind }),
        clear => slot.clone().prop_map(|slot| Step::Clear { slot }),
        clear => slot.prop_map(|slot| Step::Replace { slot }),
    ]
}

/// Runs steps through the index and the plain model, and compares everything that can be asked after each.
fn differential(
    config: IndexConfig,
    padding: usize,
    defect: Defect,
    steps: &[Step],
    query: &[u64],
) -> Result<(), TestCaseError> {
    let index = Index::new(config);
    index.writer.lock().defect = defect;
    // Slots in front move those under test to other words of the bitmap.
    for _ in 0..padding {
        index.add_slot().unwrap();
    }
    let mut slots: Vec<_> = (0..SLOTS).map(|_| index.add_slot().unwrap()).collect();
    let mut plain = Plain {
        slots: (0..SLOTS).map(|_| PlainSlot::default()).collect(),
        names_max: config.max_blocks.unwrap_or(usize::MAX),
        removed_max: config.removed_max,
        weights: config.tier_weights,
    };
    for step in steps {
        match step {
            Step::Store { slot, names, kind } => {
                index.apply(slots[*slot], &store(names, *kind));
            }
            Step::Remove { slot, name, kind } => {
                index.apply(slots[*slot], &remove(*name, *kind));
            }
            Step::Clear { slot } => index.clear(slots[*slot]),
            Step::Replace { slot } => {
                index.remove_slot(slots[*slot]);
                slots[*slot] = index.add_slot().unwrap();
            }
        }
        plain.apply(step);
        compare(&index, &slots, &plain, query)?;
    }
    for &slot in &slots {
        index.remove_slot(slot);
    }
    let writer = index.writer.lock();
    for word in 0..writer.slots.len() {
        for layer in 0..index.tiers.layers() {
            prop_assert!(writer.arena.with_bits(word, layer, u64::MAX).is_empty(), "removed slots leave nothing");
        }
    }
    Ok(())
}

fn compare(index: &Index, slots: &[SlotId], plain: &Plain, query: &[u64]) -> Result<(), TestCaseError> {
    let names: Vec<_> = query.iter().map(|&name| BlockHash(name)).collect();
    let mut overlaps = Vec::new();
    index.overlaps(&names, &mut overlaps);
    for (number, &slot) in slots.iter().enumerate() {
        let own = &plain.slots[number];
        let mut held: Vec<_> = own.held.iter().map(|&name| BlockHash(name)).collect();
        held.sort_unstable();
        prop_assert_eq!(index.blocks(slot), held.len());
        prop_assert_eq!(index.names(slot), held);
        let aside: u32 = own.copies.iter().map(|(key, &copies)| copies - u32::from(key.1 == FULL)).sum();
        prop_assert_eq!(index.copies(slot).iter().map(|copy| copy.2).sum::<u32>(), aside);
        let (depth, count) = plain.overlap(number, query);
        let overlap = overlaps.iter().find(|overlap| overlap.slot == slot);
        prop_assert_eq!(overlap, Some(&Overlap { slot, depth, count }));
    }
    Ok(())
}

fn run(clears: bool, config: IndexConfig, padding: usize, defect: Defect) -> Result<(), String> {
    let steps = prop::collection::vec(step(clears), 0..120);
    let query = prop::collection::vec(0..45u64, 0..140);
    // Nobody reads how a deliberate defect fails, so that its failure need not be made small.
    let (cases, max_shrink_iters) = if defect == Defect::None { (300, 1000) } else { (5000, 0) };
    let config_of_runs = Config { failure_persistence: None, max_shrink_iters, ..Config::with_cases(cases) };
    let mut runner = match defect {
        Defect::None => TestRunner::new(config_of_runs),
        // What catches it today catches it tomorrow.
        _ => TestRunner::new_with_rng(config_of_runs, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
    };
    let result = runner.run(&(steps, query), |(steps, query)| differential(config, padding, defect, &steps, &query));
    result.map_err(|failure| failure.to_string())
}

fn bounded(max_blocks: Option<usize>, removed_max: usize) -> IndexConfig {
    IndexConfig { max_blocks, removed_max, seed: 77, ..IndexConfig::default() }
}

#[test]
fn it_agrees_with_a_plain_model_on_random_streams() {
    run(true, bounded(None, 1000), 0, Defect::None).unwrap();
}

#[test]
fn it_agrees_within_small_bounds() {
    // A cleared slot hands its names over to other slots' memories in no particular order, so none is cleared here.
    run(false, bounded(Some(6), 5), 0, Defect::None).unwrap();
    run(false, bounded(Some(1), 0), 0, Defect::None).unwrap();
}

#[test]
fn it_agrees_with_weights_for_other_media() {
    for (cpu, storage) in [(500, 250), (0, 1000), (333, 0)] {
        let config = IndexConfig { tier_weights: TierWeights { cpu, storage }, ..bounded(None, 1000) };
        run(true, config, 0, Defect::None).unwrap();
    }
    let config = IndexConfig { tier_weights: TierWeights { cpu: 500, storage: 900 }, ..bounded(Some(20), 1000) };
    run(false, config, 62, Defect::None).unwrap();
}

#[test]
fn it_agrees_with_more_slots_than_one_word_holds() {
    run(true, bounded(Some(20), 1000), 62, Defect::None).unwrap();
    run(true, bounded(None, 1000), 200, Defect::None).unwrap();
}

#[test]
fn an_index_that_breaks_a_rule_is_caught() {
    for defect in Defect::ALL {
        let Err(failure) = run(true, bounded(None, 1000), 0, defect) else { panic!("nobody notices {defect:?}") };
        assert!(failure.contains("Test failed"), "{defect:?}: {failure}");
    }
}

fn index_with(names: &[u64]) -> (Index, SlotId) {
    let index = Index::new(IndexConfig::default());
    let slot = index.add_slot().unwrap();
    index.apply(slot, &store(names, FULL));
    (index, slot)
}

fn depth(index: &Index, names: &[u64]) -> u32 {
    let mut overlaps = Vec::new();
    index.overlaps(&names.iter().map(|&name| BlockHash(name)).collect::<Vec<_>>(), &mut overlaps);
    overlaps[0].depth
}

#[test]
fn an_event_says_what_it_changed() {
    let (index, slot) = index_with(&[1, 2]);
    assert_eq!(index.apply(slot, &store(&[2, 3], FULL)), Applied { stored: 1, ..Applied::default() });
    assert_eq!(index.apply(slot, &remove(2, FULL)), Applied::default(), "one of two copies");
    assert_eq!(index.apply(slot, &remove(2, FULL)), Applied { removed: 1, ..Applied::default() });
    assert_eq!(index.apply(slot, &remove(2, FULL)), Applied { unknown: 1, ..Applied::default() });
    assert_eq!(index.apply(slot, &Event::Cleared), Applied { removed: 2, ..Applied::default() });
}

#[test]
fn a_block_stored_again_restores_the_depth() {
    let names = [1, 2, 3, 4, 5, 6, 7];
    let (index, slot) = index_with(&names);
    assert_eq!(depth(&index, &names), 7);
    for name in [3, 4, 5] {
        index.apply(slot, &remove(name, FULL));
    }
    assert_eq!(depth(&index, &names), 2);
    index.apply(slot, &store(&[3], FULL));
    assert_eq!(depth(&index, &names), 7, "two removed blocks may be spurious");
}

#[test]
fn a_window_never_makes_a_block_present() {
    let index = Index::new(IndexConfig::default());
    let slot = index.add_slot().unwrap();
    index.apply(slot, &store(&[1, 2], (1, Medium::Gpu)));
    assert_eq!((depth(&index, &[1, 2]), index.blocks(slot)), (0, 0));
    index.apply(slot, &store(&[1, 2], FULL));
    index.apply(slot, &remove(2, (1, Medium::Gpu)));
    assert_eq!((depth(&index, &[1, 2]), index.blocks(slot)), (2, 2));
}

#[test]
fn a_group_that_proves_to_be_a_window_no_longer_counts() {
    let index = Index::new(IndexConfig::default());
    let slot = index.add_slot().unwrap();
    let unstated = |group, names: &[u64], tokens: usize| {
        let tokens = vec![TokenId(0); tokens];
        Event::Stored(Stored { hashes: wire(names), tokens, block_size: 16, group: Some(group), ..Stored::default() })
    };
    index.apply(slot, &unstated(0, &[1, 2], 32));
    index.apply(slot, &unstated(1, &[1, 2], 32));
    assert_eq!(depth(&index, &[1, 2, 3]), 2);
    index.apply(slot, &unstated(0, &[3], 48));
    assert_eq!((depth(&index, &[1, 2, 3]), index.blocks(slot)), (0, 0));
    index.apply(slot, &unstated(1, &[3], 16));
    assert_eq!((depth(&index, &[1, 2, 3]), index.blocks(slot)), (3, 3), "the other group's copies were kept");
}

#[test]
fn the_engines_size_bounds_what_is_kept_and_the_operator_overrules_it() {
    let names: Vec<_> = (0..100).collect();
    let (index, slot) = index_with(&names);
    index.set_gpu_blocks(slot, 10);
    assert_eq!(index.blocks(slot), 40);
    assert_eq!(index.apply(slot, &store(&[1000, 1001], FULL)).evicted, 2);
    assert!(depth(&index, &[1000, 1001]) == 2);
    let index = Index::new(IndexConfig { max_blocks: Some(60), ..IndexConfig::default() });
    let slot = index.add_slot().unwrap();
    index.set_gpu_blocks(slot, 10);
    assert_eq!(index.apply(slot, &store(&names, FULL)).evicted, 40);
    assert_eq!(index.names(slot), (40..100).map(BlockHash).collect::<Vec<_>>(), "the oldest went");
}

#[test]
fn what_a_bound_drops_is_told_and_any_copy_left_is_known() {
    let index = Index::new(IndexConfig { max_blocks: Some(2), ..IndexConfig::default() });
    let slot = index.add_slot().unwrap();
    let mut dropped = Vec::new();
    index.apply_noting(slot, &store(&[1, 2, 3], FULL), &mut dropped);
    assert_eq!(dropped, [BlockHash(1)], "the oldest");
    index.apply_noting(slot, &store(&[1, 4, 5], (1, Medium::Gpu)), &mut dropped);
    assert_eq!(dropped, [BlockHash(1), BlockHash(5)], "and copies that were refused");
    let left = (0..=5).filter(|&name| index.holds_copy(slot, BlockHash(name))).collect::<Vec<_>>();
    assert_eq!(left, [1, 2, 3, 4], "in whatever group");
    index.apply(slot, &remove(1, (1, Medium::Gpu)));
    assert!(!index.holds_copy(slot, BlockHash(1)));
}

#[test]
fn announcements_of_an_offload_tier_need_no_tokens() {
    let weights = TierWeights { cpu: 500, storage: 0 };
    let index = Index::new(IndexConfig { tier_weights: weights, ..IndexConfig::default() });
    let slot = index.add_slot().unwrap();
    index.apply(slot, &store(&[1, 2, 3, 4], FULL));
    for name in [4, 3, 2] {
        // The bare form: one name, no tokens, a block size of zero.
        let bare = Stored { hashes: wire(&[name]), medium: Medium::Cpu, group: Some(0), ..Stored::default() };
        assert_eq!(index.apply(slot, &Event::Stored(bare)), Applied::default());
        index.apply(slot, &remove(name, FULL));
    }
    assert_eq!((depth(&index, &[1, 2, 3, 4, 5]), index.blocks(slot)), (2, 1), "one and three halves");
    index.apply(slot, &remove(3, (0, Medium::Cpu)));
    assert_eq!(depth(&index, &[1, 2, 3, 4, 5]), 3, "the third block is passed over as one that may be there");
    index.apply(slot, &Event::Cleared);
    assert_eq!(depth(&index, &[1, 2, 3, 4, 5]), 0);
}

#[test]
fn names_that_come_and_go_for_ever_take_no_room() {
    let index = Index::new(IndexConfig { removed_max: 1000, ..IndexConfig::default() });
    let slot = index.add_slot().unwrap();
    for round in 0..3000 {
        let names: Vec<_> = (round * 100..round * 100 + 100).collect();
        index.apply(slot, &store(&names, FULL));
        for &name in &names {
            index.apply(slot, &remove(name, FULL));
        }
    }
    let (cells, entries) = index.writer.lock().arena.room();
    assert!(cells < 2000 && entries < 6000, "a thousand names are remembered in {cells} cells, {entries} entries");
    assert_eq!(index.blocks(slot), 0);
}

#[test]
fn an_index_that_shrinks_leaves_huge_pages_and_keeps_its_names() {
    let (index, slot) = index_with(&[]);
    for first in (0..5000).step_by(50) {
        index.apply(slot, &store(&(first..first + 50).collect::<Vec<_>>(), FULL));
    }
    let in_regions = || index.writer.lock().arena.in_regions();
    let (pages, tables) = in_regions();
    assert!(pages > 600 && tables == 64, "{pages} pages and {tables} tables");
    let before = index.snapshot.load_full();
    for name in (0..5000).filter(|name| name % 50 != 0) {
        index.apply(slot, &remove(name, FULL));
        index.apply(slot, &store(&[1 << 40 | name], FULL));
    }
    assert_eq!(index.blocks(slot), 5000);
    let left: Vec<_> = (0..5000).step_by(50).collect();
    for name in (0..5000).filter(|name| name % 50 != 0) {
        index.apply(slot, &remove(1 << 40 | name, FULL));
    }
    assert_eq!(index.names(slot), left.iter().copied().map(BlockHash).collect::<Vec<_>>());
    assert_eq!(depth(&index, &left), 100);
    let stale = before.view.with_bits(slot.word(), HELD, slot.bit());
    assert!(left.iter().all(|&name| stale.contains(&BlockHash(name))), "who has an old view reads what it had");
    index.remove_slot(slot);
    assert_eq!(in_regions(), (0, 0));
}

#[test]
fn slots_run_out_and_come_back() {
    let index = Index::new(IndexConfig::default());
    let slots: Vec<_> = std::iter::from_fn(|| index.add_slot()).collect();
    assert_eq!(slots.len(), SLOTS_MAX);
    index.apply(slots[1023], &store(&[5], FULL));
    assert_eq!(index.names(slots[1023]), [BlockHash(5)]);
    index.remove_slot(slots[7]);
    assert_eq!(index.add_slot(), Some(slots[7]));
}

/// The writer stores and removes whole prompts; a reader never sees a block of a prompt that was never stored, and
/// always sees one that is never removed.
#[test]
fn readers_beside_a_busy_writer_see_what_stays_and_nothing_that_never_was() {
    let index = Index::new(IndexConfig::default());
    let slot = index.add_slot().unwrap();
    let stays: Vec<u64> = (0..500).map(|name| name * 3 + 1).collect();
    index.apply(slot, &store(&stays, FULL));
    let never: Vec<_> = (0..500).map(|name| BlockHash(1 << 40 | name)).collect();
    let stays: Vec<_> = stays.into_iter().map(BlockHash).collect();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for round in 0..60_u64 {
                let names: Vec<_> = (0..2000).map(|name| (round + 2) << 44 | name).collect();
                index.apply(slot, &store(&names, FULL));
                for &name in &names {
                    index.apply(slot, &remove(name, FULL));
                }
            }
        });
        let mut overlaps = Vec::new();
        while !writer.is_finished() {
            index.overlaps(&stays, &mut overlaps);
            assert_eq!((overlaps[0].depth, overlaps[0].count), (500, 500));
            index.overlaps(&never, &mut overlaps);
            assert_eq!((overlaps[0].depth, overlaps[0].count), (0, 0));
        }
    });
    assert_eq!(index.names(slot), stays);
}

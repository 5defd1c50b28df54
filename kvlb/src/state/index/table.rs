//! Open-addressed tables of atomics, written by one thread and read by any number without a lock.
//!
//! A cell is a key word and one or more value words. A cell once given to a key keeps it for the table's life: a value of
//! zero is as good as absent, and dead cells go when the table is rebuilt at another size. So a reader that finds its key
//! finds its key's value, whatever the writer does meanwhile, and never has to look twice. A rebuilt table is a new one;
//! readers move to it with their next query.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::contract::BlockHash;

/// Tables per map. Each is rebuilt by itself, so that growing a map of a million names never copies more than a 64th.
pub(super) const SHARDS: usize = 64;

/// The low bits of a key say its shard, so that cells have room for flags there.
const FLAGS: u64 = SHARDS as u64 - 1;
const TAKEN: u64 = 1;
/// Set on names that some cache has removed: only then does a query look at the map of removals.
const MARKED: u64 = 2;

/// The smallest table.
const CAPACITY_MIN: usize = 8;

/// Spreads names over shards and cells, by a multiplication that can be undone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixer {
    factor: u64,
    inverse: u64,
}

impl Mixer {
    /// A mixer of its own kind for each seed. Names are digests and need no mixing, but nothing forces an engine to send
    /// digests, and numbers that count up must not all fall into one place.
    pub(super) fn new(seed: u64) -> Self {
        // The golden ratio's 64 bits; any odd number can be undone.
        let factor = (0x9e37_79b9_7f4a_7c15 ^ seed) | 1;
        // Newton's iteration doubles the right bits each time, from three.
        let inverse = (0..5)
            .fold(factor, |inverse: u64, _| inverse.wrapping_mul(2_u64.wrapping_sub(factor.wrapping_mul(inverse))));
        Self { factor, inverse }
    }

    #[inline]
    pub(super) const fn key(self, name: BlockHash) -> Key {
        Key(name.0.wrapping_mul(self.factor))
    }

    const fn name(self, key: Key) -> BlockHash {
        BlockHash(key.0.wrapping_mul(self.inverse))
    }
}

/// A mixed name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u64);

impl Key {
    #[inline]
    pub(super) const fn shard(self) -> usize {
        (self.0 & FLAGS) as usize
    }
}

/// A cell's place in its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cell(usize);

/// One shard of a map, as readers see it.
#[derive(Clone, Debug)]
pub(super) struct Table {
    words: Arc<[AtomicU64]>,
    capacity: usize,
    stride: usize,
}

impl Table {
    pub(super) fn new(capacity: usize, values: usize) -> Self {
        let capacity = capacity.max(CAPACITY_MIN);
        let stride = 1 + values;
        let words = (0..capacity * stride).map(|_| AtomicU64::new(0)).collect();
        Self { words, capacity, stride }
    }

    /// Cells, given to a key or not.
    #[cfg(test)]
    pub(super) const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where a key's search begins, and what stands there: reading it early lets many searches wait for memory at once.
    #[inline]
    pub(super) fn begin(&self, key: Key) -> (Cell, u64) {
        // The high half as a fraction of the capacity, which need not be a power of two then.
        let at = usize::try_from(((u128::from(key.0 & !FLAGS)) * self.capacity as u128) >> 64).unwrap_or(0);
        let cell = Cell(at * self.stride);
        (cell, self.words[cell.0].load(Ordering::Acquire))
    }

    /// Ends a search: the key's cell and whether it is marked, or the free cell where it would go.
    #[inline]
    pub(super) fn end(&self, key: Key, begun: (Cell, u64)) -> Result<(Cell, bool), Cell> {
        let (mut cell, mut word) = begun;
        loop {
            if word == 0 {
                return Err(cell);
            }
            if (word ^ key.0) & !FLAGS == 0 {
                return Ok((cell, word & MARKED != 0));
            }
            cell.0 += self.stride;
            if cell.0 == self.words.len() {
                cell.0 = 0;
            }
            word = self.words[cell.0].load(Ordering::Acquire);
        }
    }

    #[inline]
    pub(super) fn find(&self, key: Key) -> Result<(Cell, bool), Cell> {
        self.end(key, self.begin(key))
    }

    #[inline]
    pub(super) fn value(&self, cell: Cell, value: usize) -> u64 {
        self.words[cell.0 + 1 + value].load(Ordering::Acquire)
    }

    fn set_value(&self, cell: Cell, value: usize, to: u64) {
        self.words[cell.0 + 1 + value].store(to, Ordering::Release);
    }

    fn is_live(&self, cell: Cell) -> bool {
        self.words[cell.0].load(Ordering::Relaxed) & MARKED != 0
            || (0..self.stride - 1).any(|v| self.value(cell, v) != 0)
    }

    /// Every cell that was given to a key, with its key.
    fn taken(&self, shard: usize) -> impl Iterator<Item = (Cell, Key, bool)> {
        (0..self.words.len()).step_by(self.stride).filter_map(move |at| {
            let word = self.words[at].load(Ordering::Acquire);
            (word != 0).then_some((Cell(at), Key(word & !FLAGS | shard as u64), word & MARKED != 0))
        })
    }
}

/// A map from names to value words, as readers see it.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) tables: [Table; SHARDS],
}

/// A map from names to value words, as its one writer sees it.
#[derive(Debug)]
pub(super) struct Map {
    pub(super) view: View,
    /// Cells given to a key, per shard.
    taken: [usize; SHARDS],
    /// Cells whose value is not all zero or that are marked, per shard.
    live: [usize; SHARDS],
    values: usize,
    mixer: Mixer,
    /// Whether a table was rebuilt since readers were last given the view.
    pub(super) rebuilt: bool,
}

impl Map {
    pub(super) fn new(mixer: Mixer) -> Self {
        let view = View { tables: std::array::from_fn(|_| Table::new(CAPACITY_MIN, 1)) };
        Self { view, taken: [0; SHARDS], live: [0; SHARDS], values: 1, mixer, rebuilt: false }
    }

    pub(super) const fn key(&self, name: BlockHash) -> Key {
        self.mixer.key(name)
    }

    /// Has the cells of many names brought near before they are needed one by one.
    pub(super) fn fetch(&self, names: impl Iterator<Item = BlockHash>) {
        for name in names {
            let key = self.key(name);
            std::hint::black_box(self.view.tables[key.shard()].begin(key));
        }
    }

    pub(super) fn get(&self, key: Key, value: usize) -> u64 {
        let table = &self.view.tables[key.shard()];
        table.find(key).map_or(0, |(cell, _)| table.value(cell, value))
    }

    /// Whether no value word of a name is set.
    pub(super) fn is_zero(&self, key: Key) -> bool {
        let table = &self.view.tables[key.shard()];
        table.find(key).map_or(true, |(cell, _)| (0..self.values).all(|value| table.value(cell, value) == 0))
    }

    pub(super) fn values(&self, key: Key) -> impl Iterator<Item = u64> {
        let table = &self.view.tables[key.shard()];
        let cell = table.find(key).ok();
        (0..self.values).map(move |value| cell.map_or(0, |(cell, _)| table.value(cell, value)))
    }

    /// Sets or clears bits of one value word; says what the word was.
    pub(super) fn change(&mut self, key: Key, value: usize, bits: u64, set: bool) -> u64 {
        let shard = key.shard();
        let table = &self.view.tables[shard];
        let (cell, old) = match table.find(key) {
            Ok((cell, _)) => (cell, table.value(cell, value)),
            Err(_) if !set => return 0,
            Err(free) => (self.take(key, free), 0),
        };
        let new = if set { old | bits } else { old & !bits };
        if new != old {
            self.update(shard, cell, |table| table.set_value(cell, value, new));
        }
        old
    }

    /// Marks a name, or takes its mark back.
    pub(super) fn mark(&mut self, key: Key, marked: bool) {
        let shard = key.shard();
        let cell = match self.view.tables[shard].find(key) {
            Ok((_, already)) if already == marked => return,
            Ok((cell, _)) => cell,
            Err(_) if !marked => return,
            Err(free) => self.take(key, free),
        };
        let word = key.0 & !FLAGS | TAKEN | if marked { MARKED } else { 0 };
        self.update(shard, cell, |table| table.words[cell.0].store(word, Ordering::Release));
    }

    fn update(&mut self, shard: usize, cell: Cell, change: impl FnOnce(&Table)) {
        let table = &self.view.tables[shard];
        let before = table.is_live(cell);
        change(table);
        match (before, table.is_live(cell)) {
            (false, true) => self.live[shard] += 1,
            (true, false) => self.live[shard] -= 1,
            _ => {}
        }
    }

    /// Gives a free cell to a key, in a larger table where this one fills up.
    fn take(&mut self, key: Key, free: Cell) -> Cell {
        let shard = key.shard();
        let mut free = free;
        // At four fifths a search for an absent name looks at 13 cells, three cache lines.
        if (self.taken[shard] + 1) * 5 > self.view.tables[shard].capacity * 4 {
            self.rebuild(shard);
            // The key is in no table, so the search ends at a free cell.
            free = self.view.tables[shard].find(key).map_or_else(|free| free, |(cell, _)| cell);
        }
        self.taken[shard] += 1;
        self.view.tables[shard].words[free.0].store(key.0 & !FLAGS | TAKEN, Ordering::Release);
        free
    }

    /// Gives memory back where names have gone. Cells may move.
    pub(super) fn settle(&mut self, shard: usize) {
        let capacity = self.view.tables[shard].capacity;
        if capacity > CAPACITY_MIN && self.live[shard] * 4 < capacity {
            self.rebuild(shard);
        }
    }

    /// Copies the live cells of a shard into a table of a fitting size, four ninths full: it fills up after 1.8 times as
    /// many names, and a cell of 16 bytes costs 20 to 36 bytes a name.
    fn rebuild(&mut self, shard: usize) {
        let old = &self.view.tables[shard];
        let new = Table::new(self.live[shard] * 9 / 4 + 1, self.values);
        let mut taken = 0;
        for (cell, key, _) in old.taken(shard).filter(|&(cell, ..)| old.is_live(cell)) {
            let Err(free) = new.find(key) else { continue };
            for value in 0..self.values.min(old.stride - 1) {
                new.set_value(free, value, old.value(cell, value));
            }
            let flags = old.words[cell.0].load(Ordering::Relaxed) & (TAKEN | MARKED);
            new.words[free.0].store(key.0 & !FLAGS | flags, Ordering::Release);
            taken += 1;
        }
        self.taken[shard] = taken;
        self.view.tables[shard] = new;
        self.rebuilt = true;
    }

    /// Gives every name room for `values` value words.
    pub(super) fn widen(&mut self, values: usize) {
        self.values = values.max(self.values);
        (0..SHARDS).for_each(|shard| self.rebuild(shard));
    }

    /// Every name of a shard whose value word has one of these bits.
    pub(super) fn with_bits(&self, shard: usize, value: usize, bits: u64) -> Vec<BlockHash> {
        self.view.with_bits(self.mixer, shard, value, bits)
    }
}

impl View {
    /// Every name of a shard whose value word has one of these bits.
    pub(super) fn with_bits(&self, mixer: Mixer, shard: usize, value: usize, bits: u64) -> Vec<BlockHash> {
        let table = &self.tables[shard];
        let held = table.taken(shard).filter(|&(cell, ..)| table.value(cell, value) & bits != 0);
        held.map(|(_, key, _)| mixer.name(key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn mixing_can_be_undone() {
        for seed in [0, 1, u64::MAX, 12345] {
            let mixer = Mixer::new(seed);
            for name in [0, 1, 63, 64, u64::MAX, 0x0123_4567_89ab_cdef] {
                assert_eq!(mixer.name(mixer.key(BlockHash(name))), BlockHash(name));
            }
        }
    }

    #[test]
    fn names_that_count_up_do_not_fall_into_one_place() {
        let mixer = Mixer::new(0);
        let mut map = Map::new(mixer);
        for name in 0..100_000 {
            map.change(mixer.key(BlockHash(name)), 0, 1, true);
        }
        let table = &map.view.tables[0];
        let steps = |key: Key| {
            let (begun, found) = (table.begin(key).0, table.find(key).map_or_else(|free| free, |(cell, _)| cell));
            (found.0 + table.words.len() - begun.0) % table.words.len() / table.stride
        };
        let most = (0..100_000).step_by(64).map(|name| steps(mixer.key(BlockHash(name)))).max();
        assert!(most < Some(64), "{most:?}");
    }

    #[test]
    fn a_map_that_was_emptied_is_small_again() {
        let mixer = Mixer::new(0);
        let mut map = Map::new(mixer);
        let size = |map: &Map| map.view.tables.iter().map(|table| table.words.len()).sum::<usize>();
        let empty = size(&map);
        for name in 0..50_000 {
            map.change(mixer.key(BlockHash(name)), 0, 1, true);
        }
        assert!(size(&map) > 50_000);
        for name in 0..50_000 {
            let key = mixer.key(BlockHash(name));
            map.change(key, 0, 1, false);
            map.settle(key.shard());
        }
        assert_eq!(size(&map), empty);
    }

    #[test]
    fn coming_and_going_for_ever_takes_no_room() {
        let mixer = Mixer::new(0);
        let mut map = Map::new(mixer);
        for name in 0..200_000 {
            map.change(mixer.key(BlockHash(name)), 0, 1, true);
            map.change(mixer.key(BlockHash(name)), 0, 1, false);
        }
        assert!(map.view.tables.iter().all(|table| table.capacity <= 64));
    }

    proptest! {
        #[test]
        fn a_map_behaves_as_a_plain_one(
            steps in prop::collection::vec((0..5u8, 0..300u64, 0..2usize, any::<u64>()), 0..1500),
            seed: u64,
        ) {
            let mixer = Mixer::new(seed);
            let mut map = Map::new(mixer);
            map.widen(2);
            let mut plain: BTreeMap<u64, ([u64; 2], bool)> = BTreeMap::new();
            for (step, name, value, bits) in steps {
                let key = mixer.key(BlockHash(name));
                let entry = plain.entry(name).or_default();
                match step {
                    0 | 1 => {
                        let old = map.change(key, value, bits, step == 0);
                        prop_assert_eq!(old, entry.0[value]);
                        entry.0[value] = if step == 0 { old | bits } else { old & !bits };
                    }
                    2 => {
                        map.mark(key, bits & 1 == 1);
                        entry.1 = bits & 1 == 1;
                    }
                    3 => map.settle(key.shard()),
                    _ => prop_assert_eq!(map.is_zero(key), entry.0 == [0, 0]),
                }
            }
            for (&name, &(values, marked)) in &plain {
                let key = mixer.key(BlockHash(name));
                prop_assert_eq!(map.values(key).collect::<Vec<_>>(), values.to_vec());
                let found = map.view.tables[key.shard()].find(key);
                prop_assert_eq!(found.is_ok_and(|(_, found)| found), marked);
            }
            let mut held: Vec<_> = (0..SHARDS).flat_map(|shard| map.with_bits(shard, 1, u64::MAX)).collect();
            held.sort_unstable();
            let plainly: Vec<_> = plain.iter().filter(|(_, entry)| entry.0[1] != 0).map(|(&name, _)| BlockHash(name)).collect();
            prop_assert_eq!(held, plainly);
        }
    }
}

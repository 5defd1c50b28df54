//! From a name to the place of its cell: open-addressed tables of atomics, written by one thread and read without a lock.
//!
//! An entry holds half of the mixed name and the place. The other half is in the cell, so an entry only says where to
//! look: whoever follows it compares the cell's own key. An entry that is no longer needed is a blank until its table is
//! rebuilt; a rebuilt table is a new one, to which readers move with their next query.

use std::sync::atomic::Ordering;

use super::memory::{Home, Words};
use crate::contract::BlockHash;

/// Tables. Each is rebuilt by itself, so that growing an index of a million names never copies more than a 64th.
pub(super) const SHARDS: usize = 64;

/// The low bits of a key say its shard.
const SHARD: u64 = SHARDS as u64 - 1;
/// The smallest table.
const CAPACITY_MIN: usize = 8;
/// Entries that a guess looks at beyond the first: most names are not farther off, and most of these in its cache line.
const NEAR: usize = 5;
/// The low half of an entry for a name that is gone.
const BLANK: u64 = u32::MAX as u64;

/// Spreads names over shards and entries, by a multiplication that can be undone.
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

    pub(super) const fn name(self, key: Key) -> BlockHash {
        BlockHash(key.0.wrapping_mul(self.inverse))
    }
}

/// A mixed name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(pub(super) u64);

impl Key {
    #[inline]
    pub(super) const fn shard(self) -> usize {
        (self.0 & SHARD) as usize
    }

    #[inline]
    const fn tag(self) -> u64 {
        self.0 >> 32
    }
}

/// Where a name's search begins, and what stands there.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Begun {
    at: usize,
    entry: u64,
}

/// A search that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Absent {
    /// The entry where the name would go.
    free: usize,
    /// Whether an entry looked right and its cell was not: as a rule chance, but the cell may have been moved.
    pub(super) tagged: bool,
}

/// One shard, as readers see it.
#[derive(Clone, Debug)]
pub(super) struct Table {
    entries: Words,
}

impl Table {
    fn new(capacity: usize, home: &mut Home) -> Self {
        Self { entries: home.take(capacity.max(CAPACITY_MIN)) }
    }

    pub(super) fn is_in_region(&self) -> bool {
        self.entries.is_in_region()
    }

    /// Entries, in use or not.
    pub(super) fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// Starts a search: reading this early lets many searches wait for memory at once.
    #[inline]
    pub(super) fn begin(&self, key: Key) -> Begun {
        let at = self.home(key.tag());
        Begun { at, entry: self.entries[at].load(Ordering::Acquire) }
    }

    /// The tag as a fraction of the capacity, which need not be a power of two then.
    #[inline]
    fn home(&self, tag: u64) -> usize {
        usize::try_from((tag * self.entries.len() as u64) >> 32).unwrap_or(0)
    }

    /// Where the first entry of a search that looks right points, if it is near.
    #[inline]
    pub(super) fn guess(&self, key: Key, begun: Begun) -> Option<u32> {
        let looks_right = |entry: u64| if entry >> 32 == key.tag() { place(entry) } else { None };
        looks_right(begun.entry).or_else(|| {
            let near = self.entries.get(begun.at + 1..)?.iter().take(NEAR);
            near.map(|entry| entry.load(Ordering::Acquire)).take_while(|&entry| entry != 0).find_map(looks_right)
        })
    }

    /// Ends a search, which asks `is` whether a place is the name's.
    #[inline]
    pub(super) fn end(&self, key: Key, begun: Begun, mut is: impl FnMut(u32) -> bool) -> Result<(usize, u32), Absent> {
        let Begun { mut at, mut entry } = begun;
        let (mut blank, mut tagged) = (None, false);
        loop {
            if entry == 0 {
                return Err(Absent { free: blank.unwrap_or(at), tagged });
            }
            match place(entry) {
                None => blank = blank.or(Some(at)),
                Some(place) if entry >> 32 == key.tag() => {
                    if is(place) {
                        return Ok((at, place));
                    }
                    tagged = true;
                }
                Some(_) => {}
            }
            at += 1;
            if at == self.entries.len() {
                at = 0;
            }
            entry = self.entries[at].load(Ordering::Acquire);
        }
    }

    #[inline]
    pub(super) fn find(&self, key: Key, is: impl FnMut(u32) -> bool) -> Result<(usize, u32), Absent> {
        self.end(key, self.begin(key), is)
    }
}

/// The place in an entry; none in a blank one.
#[inline]
fn place(entry: u64) -> Option<u32> {
    // Low halves are places plus one, so that no entry in use is zero.
    let low = (entry & BLANK).checked_sub(1)?;
    if low == BLANK - 1 { None } else { u32::try_from(low).ok() }
}

/// One shard, as its one writer sees it.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) table: Table,
    /// Entries that are not empty: names and blanks.
    filled: usize,
    names: usize,
    /// Whether the table was rebuilt since readers were last given it.
    pub(super) rebuilt: bool,
}

impl Shard {
    pub(super) fn new() -> Self {
        Self { table: Table::new(0, &mut Home::default()), filled: 0, names: 0, rebuilt: false }
    }

    /// Enters a name that was searched for and not found.
    pub(super) fn enter(&mut self, key: Key, place: u32, absent: Absent, home: &mut Home) {
        let mut free = absent.free;
        // At four fifths a search for an absent name looks at 13 entries, two cache lines.
        if (self.filled + 1) * 5 > self.table.capacity() * 4 {
            self.rebuild(home);
            // The name is in no table, so the search ends at a free entry.
            free = self.table.find(key, |_| false).map_or_else(|absent| absent.free, |(at, _)| at);
        }
        let entry = &self.table.entries[free];
        self.filled += usize::from(entry.load(Ordering::Relaxed) == 0);
        self.names += 1;
        entry.store(key.tag() << 32 | (u64::from(place) + 1), Ordering::Release);
    }

    /// Points a name's entry to another place.
    pub(super) fn repoint(&mut self, key: Key, from: u32, to: u32) {
        if let Ok((at, _)) = self.table.find(key, |place| place == from) {
            self.table.entries[at].store(key.tag() << 32 | (u64::from(to) + 1), Ordering::Release);
        }
    }

    /// Takes out a name's entry.
    pub(super) fn blank(&mut self, key: Key, from: u32, home: &mut Home) {
        if let Ok((at, _)) = self.table.find(key, |place| place == from) {
            self.table.entries[at].store(BLANK, Ordering::Release);
            self.names -= 1;
            if self.table.capacity() > CAPACITY_MIN && self.names * 4 < self.table.capacity() {
                self.rebuild(home);
            }
        }
    }

    /// Copies the entries in use into a table of a fitting size, half full: it fills up after 1.5 times as many names,
    /// and an entry of 8 bytes costs 10 to 15 bytes a name.
    pub(super) fn rebuild(&mut self, home: &mut Home) {
        let new = Table::new(self.names * 15 / 8 + 1, home);
        for entry in self.table.entries.iter().map(|entry| entry.load(Ordering::Relaxed)) {
            if place(entry).is_none() {
                continue;
            }
            let mut at = new.home(entry >> 32);
            while new.entries[at].load(Ordering::Relaxed) != 0 {
                at = if at + 1 == new.entries.len() { 0 } else { at + 1 };
            }
            new.entries[at].store(entry, Ordering::Relaxed);
        }
        self.filled = self.names;
        self.table = new;
        self.rebuilt = true;
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
        let mut shard = Shard::new();
        let keys: Vec<_> = (0..100_000).map(|name| mixer.key(BlockHash(name))).filter(|key| key.shard() == 0).collect();
        for (place, &key) in (0..).zip(&keys) {
            let absent = shard.table.find(key, |other| other == place).unwrap_err();
            shard.enter(key, place, absent, &mut Home::default());
        }
        let steps = |place: u32, key: Key| {
            let (at, _) = shard.table.find(key, |other| other == place).unwrap();
            (at + shard.table.capacity() - shard.table.begin(key).at) % shard.table.capacity()
        };
        let most = (0..).zip(&keys).map(|(place, &key)| steps(place, key)).max();
        assert!(most < Some(64), "{most:?}");
    }

    #[test]
    fn coming_and_going_for_ever_takes_no_room() {
        let mixer = Mixer::new(0);
        let mut shard = Shard::new();
        for name in 0..200_000 {
            let key = mixer.key(BlockHash(name));
            let absent = shard.table.find(key, |_| true).unwrap_err();
            shard.enter(key, 7, absent, &mut Home::default());
            shard.blank(key, 7, &mut Home::default());
        }
        assert!(shard.table.capacity() <= 64);
    }

    proptest! {
        #[test]
        fn a_shard_behaves_as_a_plain_map(steps in prop::collection::vec((0..3u8, 0..300u64, 0..1000u32), 0..1500), seed: u64) {
            let mixer = Mixer::new(seed);
            let mut shard = Shard::new();
            let mut plain = BTreeMap::new();
            // A place says whose it is: what the cell's key does in an index.
            let owner = |plain: &BTreeMap<u64, u32>, name: u64| plain.get(&name).copied();
            for (step, name, place) in steps {
                let key = mixer.key(BlockHash(name));
                let own = owner(&plain, name);
                let found = shard.table.find(key, |place| own == Some(place));
                prop_assert_eq!(found.ok().map(|(_, place)| place), own);
                // Places are distinct, as cells are.
                let place = place * 300 + u32::try_from(name).unwrap();
                match (step, found) {
                    (0, Err(absent)) => {
                        shard.enter(key, place, absent, &mut Home::default());
                        plain.insert(name, place);
                    }
                    (1, Ok((_, from))) => {
                        shard.repoint(key, from, place);
                        plain.insert(name, place);
                    }
                    (2, Ok((_, from))) => {
                        shard.blank(key, from, &mut Home::default());
                        plain.remove(&name);
                    }
                    _ => {}
                }
                prop_assert_eq!(shard.names, plain.len());
            }
            for (&name, &place) in &plain {
                prop_assert!(shard.table.find(mixer.key(BlockHash(name)), |other| other == place).is_ok());
            }
        }
    }
}

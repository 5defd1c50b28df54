//! Where the words of an index lie: on the heap while it is small, then in huge pages.
//!
//! Lookups read a large index in no order, so in small pages nearly each read is two: one of memory and one of where that
//! memory is. Where the system has transparent huge pages, memory is asked for in *regions* of the size of one, each a
//! mapping of its own that ends with the last block in it. Regions that are mostly empty are left ([`Home::leave`]) by
//! moving what is in them, since a hole in a huge page is no free memory. A small index would only pay for room that it
//! does not use.
//!
//! One writer takes blocks. Readers have them for as long as they please, and whoever drops a block last frees it.

use std::io;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use memmap2::{Advice, MmapMut, MmapRaw};
use tracing::debug;

use super::arena::PAGE;

/// Words in a unit, of which blocks have whole ones: 32 KiB, and as many units in a page of cells as words in a cell.
const UNIT: usize = PAGE;
/// Units in a region: bits of one word.
const UNITS: usize = 64;
/// Bytes in a region: 2 MiB, a huge page. Tests have small ones, which come and go often.
const REGION: usize = UNITS * UNIT * size_of::<u64>();

/// A block of words. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Words {
    /// Beside the owner, not behind it: a lookup has one read less to wait for.
    words: NonNull<[AtomicU64]>,
    owner: Option<Arc<Owner>>,
}

#[derive(Debug)]
enum Owner {
    Heap(Box<[AtomicU64]>),
    Units { region: Arc<Region>, units: u64 },
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Self::Units { region, units } = self {
            // Whoever takes the units next sees all that was done here.
            region.free.fetch_or(*units, Ordering::Release);
        }
    }
}

#[expect(unsafe_code, reason = "words in huge pages are reached through a pointer")]
// SAFETY: the pointer is only read as a shared slice of atomics, which threads may share, and so may they its owner.
unsafe impl Send for Words {}

#[expect(unsafe_code, reason = "words in huge pages are reached through a pointer")]
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Deref for Words {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        #[expect(unsafe_code, reason = "words in huge pages are reached through a pointer")]
        // SAFETY: the words are initialised and aligned and lie in memory of `owner`, which lives and stays where it is
        // for as long as this, and which gives them to no other block meanwhile; everybody reaches them as atomics only.
        unsafe {
            self.words.as_ref()
        }
    }
}

impl Default for Words {
    /// No words.
    fn default() -> Self {
        Self { words: NonNull::from(&[]), owner: None }
    }
}

impl Words {
    fn on_heap(len: usize) -> Self {
        let owner = Arc::new(Owner::Heap((0..len).map(|_| AtomicU64::new(0)).collect()));
        let Owner::Heap(words) = &*owner else { return Self::default() };
        Self { words: NonNull::from(&**words), owner: Some(owner) }
    }

    fn in_region(region: Arc<Region>, first: usize, len: usize, units: u64) -> Self {
        let words = region.words(first, len);
        Self { words, owner: Some(Arc::new(Owner::Units { region, units })) }
    }

    fn region(&self) -> Option<&Arc<Region>> {
        match self.owner.as_deref() {
            Some(Owner::Units { region, .. }) => Some(region),
            _ => None,
        }
    }

    pub(super) fn is_in_region(&self) -> bool {
        self.region().is_some()
    }

    pub(super) fn is_in(&self, left: &Left) -> bool {
        self.region().is_some_and(|region| std::ptr::eq(Arc::as_ptr(region), left.0.as_ptr()))
    }
}

/// A mapping of its own: one huge page, or a block that is larger.
#[derive(Debug)]
struct Region {
    mapping: MmapRaw,
    /// Its units that no block has.
    free: AtomicU64,
}

impl Region {
    /// # Errors
    /// Where the system has no such mapping to give, or no huge pages.
    fn new(bytes: usize) -> io::Result<Self> {
        let mut mapping = MmapMut::map_anon(bytes)?;
        if mapping.as_ptr().align_offset(REGION) > 0 {
            // The kernel did not align it: what is beyond is never touched, and costs nothing.
            mapping = MmapMut::map_anon(bytes + REGION)?;
        }
        mapping.advise(Advice::HugePage)?;
        Ok(Self { mapping: mapping.into(), free: AtomicU64::new(u64::MAX) })
    }

    /// Some of its words: zero until they are first written.
    fn words(&self, first: usize, len: usize) -> NonNull<[AtomicU64]> {
        let start = self.mapping.as_mut_ptr();
        let aligned = start.wrapping_add(start.align_offset(REGION));
        let words = NonNull::new(aligned.wrapping_add(first * size_of::<u64>())).unwrap_or(NonNull::dangling());
        let end = aligned.addr() - start.addr() + (first + len) * size_of::<u64>();
        assert!(end <= self.mapping.len(), "words are within their region");
        NonNull::slice_from_raw_parts(words.cast(), len)
    }
}

/// A region that takes no more blocks.
#[derive(Debug)]
pub(super) struct Left(Weak<Region>);

/// A region that takes blocks, for as long as it has any.
#[derive(Debug)]
struct Open {
    region: Weak<Region>,
    /// Its units that a block ever had: all others are zero.
    touched: u64,
}

/// Where blocks are taken from.
#[derive(Debug, Default)]
pub(super) struct Home {
    /// Whether blocks are to lie in huge pages.
    pub(super) large: bool,
    open: Vec<Open>,
    /// Whether the system refused a region: it is not asked again and again.
    refused: bool,
}

impl Home {
    /// At least `len` words, all zero; in huge pages rounded up to whole units.
    pub(super) fn take(&mut self, len: usize) -> Words {
        // What would leave most of a unit unused is as well on the heap.
        if !self.large || self.refused || len < UNIT / 2 {
            return Words::on_heap(len);
        }
        self.take_units(len.div_ceil(UNIT)).unwrap_or_else(|error| {
            debug!(%error, "no huge pages for an index");
            self.refused = true;
            Words::on_heap(len)
        })
    }

    fn take_units(&mut self, units: usize) -> io::Result<Words> {
        let len = units * UNIT;
        if units > UNITS {
            return Ok(Words::in_region(Arc::new(Region::new(len * size_of::<u64>())?), 0, len, 0));
        }
        self.open.retain(|open| open.region.strong_count() > 0);
        for open in &mut self.open {
            if let Some(region) = open.region.upgrade()
                && let Some(words) = Self::take_from(region, units, &mut open.touched)
            {
                return Ok(words);
            }
        }
        let region = Arc::new(Region::new(REGION)?);
        let mut open = Open { region: Arc::downgrade(&region), touched: 0 };
        let words = Self::take_from(region, units, &mut open.touched).unwrap_or_else(|| Words::on_heap(len));
        self.open.push(open);
        Ok(words)
    }

    fn take_from(region: Arc<Region>, units: usize, touched: &mut u64) -> Option<Words> {
        let first = first_run(region.free.load(Ordering::Acquire), units)?;
        let taken = u64::MAX >> (UNITS - units) << first;
        region.free.fetch_and(!taken, Ordering::Relaxed);
        let words = Words::in_region(region, first as usize * UNIT, units * UNIT, taken);
        if *touched & taken != 0 {
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        *touched |= taken;
        Some(words)
    }

    /// The emptiest region, where more than a ninth of the room is free: its blocks, all of `len` words, are to move.
    /// They find room in the others.
    pub(super) fn leave(&mut self, len: usize) -> Option<Left> {
        let units = len.div_ceil(UNIT);
        if units > UNITS {
            return None;
        }
        let each = UNITS / units;
        let free = |open: &Open| {
            let region = open.region.upgrade();
            region.map_or(0, |region| region.free.load(Ordering::Relaxed).count_ones() as usize / units)
        };
        self.open.retain(|open| open.region.strong_count() > 0);
        let all_free: usize = self.open.iter().map(free).sum();
        let used = self.open.len() * each - all_free;
        if all_free <= used / 8 + each {
            return None;
        }
        let emptiest = (0..self.open.len()).max_by_key(|&number| free(&self.open[number]))?;
        Some(Left(self.open.swap_remove(emptiest).region))
    }

    /// Takes no more blocks from the regions there are.
    pub(super) fn leave_all(&mut self) {
        self.open.clear();
    }

    /// Regions that blocks are in.
    #[cfg(test)]
    fn regions(&self) -> usize {
        self.open.iter().filter(|open| open.region.strong_count() > 0).count()
    }
}

/// Where `count` ones in a row begin.
fn first_run(bits: u64, count: usize) -> Option<u32> {
    // A one stays where as many follow it as were asked for.
    let starts = (1..count).fold(bits, |starts, _| starts & starts >> 1);
    (starts != 0).then(|| starts.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn large() -> Home {
        Home { large: true, ..Home::default() }
    }

    fn fill(words: &Words, with: u64) {
        words.iter().for_each(|word| word.store(with, Ordering::Relaxed));
    }

    fn is_all(words: &Words, expected: u64) -> bool {
        words.iter().all(|word| word.load(Ordering::Relaxed) == expected)
    }

    #[test]
    fn a_run_of_ones_is_found_where_there_is_one() {
        assert_eq!(first_run(0b0110_1110, 3), Some(1));
        assert_eq!(first_run(0b0110_1110, 4), None);
        assert_eq!(first_run(u64::MAX, 64), Some(0));
        assert_eq!(first_run(u64::MAX << 1, 64), None);
        assert_eq!(first_run(0, 1), None);
    }

    #[test]
    fn a_region_ends_with_its_last_block() {
        let mut home = large();
        let mut blocks: Vec<_> = (0..50).map(|_| home.take(3 * UNIT)).collect();
        assert!(blocks.iter().all(Words::is_in_region));
        assert_eq!(home.regions(), 3, "21 blocks of three units each");
        let region = blocks[0].region().map(Arc::downgrade).unwrap();
        let last = blocks[20].clone();
        blocks.drain(..21);
        assert!(region.upgrade().is_some(), "somebody has a block of it");
        drop(last);
        assert!(region.upgrade().is_none());
        drop(blocks);
        assert_eq!(home.regions(), 0);
    }

    #[test]
    fn units_are_taken_again_once_their_last_reader_is_gone_and_are_zero_then() {
        let mut home = large();
        let (one, two) = (home.take(3 * UNIT), home.take(3 * UNIT));
        let at = one.as_ptr();
        fill(&one, 7);
        fill(&two, 8);
        let reader = one.clone();
        drop(one);
        let three = home.take(3 * UNIT);
        fill(&three, 9);
        assert!(three.as_ptr() != at && is_all(&reader, 7) && is_all(&two, 8), "each has words of its own");
        drop(reader);
        let four = home.take(3 * UNIT);
        assert!(four.as_ptr() == at && is_all(&four, 0));
        assert!(is_all(&two, 8) && is_all(&three, 9));
    }

    #[test]
    fn regions_that_are_mostly_empty_are_left_for_good() {
        let mut home = large();
        let blocks: Vec<_> = (0..210).map(|_| home.take(3 * UNIT)).collect();
        assert_eq!(home.regions(), 10);
        assert!(home.leave(3 * UNIT).is_none(), "all are full");
        // One block in seven stays: three in each region.
        let mut blocks: Vec<_> = blocks.into_iter().step_by(7).collect();
        while let Some(left) = home.leave(3 * UNIT) {
            for block in blocks.iter_mut().filter(|block| block.is_in(&left)) {
                *block = home.take(3 * UNIT);
            }
            assert!(left.0.upgrade().is_none(), "nothing is in it any more");
        }
        assert!(home.regions() <= 3, "30 blocks are in {} regions", home.regions());
    }

    #[test]
    fn what_is_small_or_refused_lies_on_the_heap_and_what_is_larger_than_a_region_has_its_own() {
        assert!(!Home::default().take(3 * UNIT).is_in_region());
        let mut home = large();
        assert!(!home.take(UNIT / 2 - 1).is_in_region());
        let huge = home.take(65 * UNIT + 1);
        assert!(huge.is_in_region() && huge.len() == 66 * UNIT && is_all(&huge, 0));
        fill(&huge, 1);
        assert_eq!(home.regions(), 0);
        home.refused = true;
        let refused = home.take(3 * UNIT);
        assert!(!refused.is_in_region() && refused.len() == 3 * UNIT);
    }

    #[test]
    fn the_last_reader_may_be_another_thread() {
        let mut home = large();
        for round in 0..2000 {
            let block = home.take(2 * UNIT);
            assert!(is_all(&block, 0));
            fill(&block, round);
            std::thread::scope(|scope| {
                let reader = block.clone();
                scope.spawn(move || assert!(is_all(&reader, round)));
                drop(block);
                assert!(is_all(&home.take(2 * UNIT), 0));
            });
        }
        assert_eq!(home.regions(), 0);
    }
}

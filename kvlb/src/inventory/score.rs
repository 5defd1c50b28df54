//! How much of a prompt each cache holds.

/// Removed blocks in a row that a leading run survives. One removal may be spurious (an engine announces it although
/// another copy is left) and two are still likelier a lost announcement than a lost prefix; the simulator may revise it.
pub(super) const REMOVED_RUN_MAX: u32 = 2;

/// Bits of the largest block count: a prompt of a million tokens has a million blocks at most.
const COUNT_BITS: usize = 24;

/// Walks a prompt's blocks once and scores 64 caches at a time, one bit each.
///
/// Depth: the position after the last held block before which no run of more than two removed blocks lies. A block that
/// was never announced is vouched for by its held descendants. Count: held blocks, wherever they are.
///
/// Prompts repeat their answer from block to block, so equal answers in a row cost an addition.
#[derive(Clone, Debug)]
pub struct Scorer {
    position: u32,
    /// Caches whose leading run is not broken.
    running: u64,
    /// Caches that had removed the last block, and the last two.
    removed_once: u64,
    removed_twice: u64,
    /// The last answer, and how often it came in a row.
    held: u64,
    repeats: u32,
    /// Caches whose depth is the current position.
    deepest: u64,
    depth: [u32; 64],
    /// Counts, bit by bit: bit `c` of `counts[b]` is bit `b` of the count of cache `c`.
    counts: [u64; COUNT_BITS],
}

impl Default for Scorer {
    fn default() -> Self {
        Self {
            position: 0,
            running: u64::MAX,
            removed_once: 0,
            removed_twice: 0,
            held: 0,
            repeats: 0,
            deepest: 0,
            depth: [0; 64],
            counts: [0; COUNT_BITS],
        }
    }
}

impl Scorer {
    /// Takes the next block: the caches that hold it, and those that held and removed it.
    #[inline]
    pub fn next(&mut self, held: u64, removed: u64) {
        if held == self.held && (removed & !held) | self.removed_once == 0 {
            self.repeats += 1;
            self.position += 1;
            return;
        }
        self.change(held, removed & !held);
    }

    fn change(&mut self, held: u64, removed: u64) {
        const { assert!(REMOVED_RUN_MAX == 2, "two words keep runs of up to two") };
        self.running &= !(removed & self.removed_twice);
        self.removed_twice = removed & self.removed_once;
        self.removed_once = removed;
        let deepest = held & self.running;
        for cache in bits(self.deepest & !deepest) {
            self.depth[cache] = self.position;
        }
        self.deepest = deepest;
        if held == self.held {
            self.repeats += 1;
        } else {
            self.add_counts();
            (self.held, self.repeats) = (held, 1);
        }
        self.position += 1;
    }

    /// Adds `repeats` to the count of every cache in `held`: binary addition on all of them at once.
    fn add_counts(&mut self) {
        if self.held == 0 {
            return;
        }
        for bit in bits(u64::from(self.repeats)) {
            let mut carry = self.held;
            for digit in self.counts.iter_mut().skip(bit) {
                (*digit, carry) = (*digit ^ carry, *digit & carry);
                if carry == 0 {
                    break;
                }
            }
        }
    }

    /// Ends the walk and reports cache, depth and count of each of `caches`.
    pub fn finish(mut self, caches: u64, mut report: impl FnMut(usize, u32, u32)) {
        self.add_counts();
        for cache in bits(self.deepest) {
            self.depth[cache] = self.position;
        }
        let used = self.counts.iter().rposition(|&digit| digit != 0).map_or(0, |top| top + 1);
        for cache in bits(caches) {
            let digits = self.counts[..used].iter().enumerate();
            let count = digits.fold(0, |count, (bit, digit)| count | ((digit >> cache & 1) as u32) << bit);
            report(cache, self.depth[cache], count);
        }
    }
}

/// The positions of the ones, from the lowest.
pub(crate) fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (lowest < 64).then_some(lowest)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What one cache knows of one block.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Block {
        Held,
        Removed,
        Unknown,
    }

    /// The definition, word by word, for one cache.
    fn plainly(blocks: &[Block]) -> (u32, u32) {
        let mut depth = 0;
        let mut removed_in_a_row = 0;
        for (position, block) in blocks.iter().enumerate() {
            removed_in_a_row = if *block == Block::Removed { removed_in_a_row + 1 } else { 0 };
            if removed_in_a_row > REMOVED_RUN_MAX {
                break;
            }
            if *block == Block::Held {
                depth = position + 1;
            }
        }
        (depth.try_into().unwrap(), blocks.iter().filter(|block| **block == Block::Held).count().try_into().unwrap())
    }

    /// The scorer's answer for caches that all know the same number of blocks.
    fn score(caches: &[Vec<Block>]) -> Vec<(u32, u32)> {
        let mut scorer = Scorer::default();
        let word = |position: usize, wanted: Block| {
            caches.iter().enumerate().fold(0, |word, (at, blocks)| word | u64::from(blocks[position] == wanted) << at)
        };
        for position in 0..caches[0].len() {
            scorer.next(word(position, Block::Held), word(position, Block::Removed));
        }
        let mut results = Vec::new();
        let all = u64::MAX >> (64 - caches.len());
        scorer.finish(all, |cache, depth, count| {
            assert_eq!(cache, results.len());
            results.push((depth, count));
        });
        results
    }

    fn parse(text: &str) -> Vec<Block> {
        let block = |letter| match letter {
            'h' => Block::Held,
            'r' => Block::Removed,
            _ => Block::Unknown,
        };
        text.chars().map(block).collect()
    }

    #[test]
    fn unknown_blocks_are_vouched_for_by_held_descendants() {
        assert_eq!(score(&[parse("hh..h...")]), [(5, 3)]);
    }

    #[test]
    fn two_removed_blocks_are_passed_over_and_three_end_the_run() {
        assert_eq!(score(&[parse("hrrh")]), [(4, 2)]);
        assert_eq!(score(&[parse("hrrrh")]), [(1, 2)]);
        assert_eq!(score(&[parse("rrrhhh")]), [(0, 3)]);
        assert_eq!(score(&[parse("hrr.rrh")]), [(7, 2)], "a run is removed blocks in a row");
    }

    #[test]
    fn a_prompt_that_nobody_holds_scores_nothing() {
        assert_eq!(score(&[parse("....."), parse("rr.rr")]), [(0, 0), (0, 0)]);
    }

    proptest! {
        #[test]
        fn caches_are_scored_together_as_one_by_one(
            caches in (1..=64usize, 0..90usize).prop_flat_map(|(caches, blocks)| {
                let block = prop_oneof![4 => Just(Block::Held), 2 => Just(Block::Removed), 1 => Just(Block::Unknown)];
                prop::collection::vec(prop::collection::vec(block, blocks), caches)
            })
        ) {
            let plain: Vec<_> = caches.iter().map(|blocks| plainly(blocks)).collect();
            prop_assert_eq!(score(&caches), plain);
        }

        #[test]
        fn long_repeats_are_counted_exactly(runs in prop::collection::vec((any::<u64>(), 1..3000u32), 1..20)) {
            let mut scorer = Scorer::default();
            let mut counts = [0; 64];
            for &(held, repeats) in &runs {
                for _ in 0..repeats {
                    scorer.next(held, 0);
                }
                bits(held).for_each(|cache| counts[cache] += repeats);
            }
            scorer.finish(u64::MAX, |cache, _, count| assert_eq!(count, counts[cache]));
        }
    }
}

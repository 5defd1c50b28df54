//! How much of a prompt each cache holds.

use crate::fleet::TierWeights;

/// Removed blocks in a row that a leading run survives. One removal may be spurious (an engine announces it although
/// another copy is left) and two are still likelier a lost announcement than a lost prefix; the simulator may revise it.
pub(super) const REMOVED_RUN_MAX: u32 = 2;

/// The weight of a whole block.
const WHOLE: u16 = 1000;

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

/// What blocks are worth that only another medium than the accelerator's memory holds.
///
/// Such a block neither breaks a leading run nor is it one that counts as held. It adds its weight to the depth instead of
/// one, or the larger where two media hold it; the sum is rounded down to whole blocks.
#[derive(Clone, Debug)]
pub struct Credit {
    weights: TierWeights,
    /// What each cache's depth is too large by, in thousandths of a block.
    lost: [u64; 64],
    /// The blocks among each cache's count that it holds elsewhere only.
    elsewhere: [u32; 64],
}

impl Credit {
    /// Credits by `weights`.
    pub const fn new(weights: TierWeights) -> Self {
        Self { weights, lost: [0; 64], elsewhere: [0; 64] }
    }

    /// Has `scorer` take the next block: the caches that hold it, those that held and removed it, and those that hold it
    /// in the host's memory and in storage.
    pub fn next(&mut self, scorer: &mut Scorer, held: u64, removed: u64, cpu: u64, storage: u64) {
        let elsewhere = (cpu | storage) & !held;
        scorer.next(held | elsewhere, removed);
        for cache in bits(elsewhere) {
            let weight = |slots: u64, weight: u16| if slots >> cache & 1 == 1 { weight } else { 0 };
            let weight = weight(cpu, self.weights.cpu).max(weight(storage, self.weights.storage));
            self.elsewhere[cache] += 1;
            if scorer.running >> cache & 1 == 1 {
                self.lost[cache] += u64::from(WHOLE.saturating_sub(weight));
            }
        }
    }

    /// Ends the walk as [`Scorer::finish`] does.
    pub fn finish(&self, scorer: Scorer, caches: u64, mut report: impl FnMut(usize, u32, u32)) {
        scorer.finish(caches, |cache, depth, count| {
            let credited = (u64::from(depth) * u64::from(WHOLE)).saturating_sub(self.lost[cache]) / u64::from(WHOLE);
            report(cache, u32::try_from(credited).unwrap_or(depth), count - self.elsewhere[cache]);
        });
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

    /// Letters as [`parse`] knows them, and `c`, `s` and `b` for blocks in the host's memory, in storage, in both; `C` is
    /// also held.
    fn credit(weights: TierWeights, text: &str) -> (u32, u32) {
        let (mut scorer, mut credit) = (Scorer::default(), Credit::new(weights));
        for letter in text.chars() {
            let is = |letters: &str| u64::from(letters.contains(letter));
            credit.next(&mut scorer, is("hC"), is("r"), is("cbC"), is("sb"));
        }
        let mut result = (0, 0);
        credit.finish(scorer, 1, |_, depth, count| result = (depth, count));
        result
    }

    #[test]
    fn blocks_in_other_media_are_worth_their_weight_and_leave_the_run_whole() {
        let weights = TierWeights { cpu: 500, storage: 250 };
        assert_eq!(credit(weights, "hhcc"), (3, 2));
        assert_eq!(credit(weights, "hhc"), (2, 2), "rounded down");
        assert_eq!(credit(weights, "ssss"), (1, 0));
        assert_eq!(credit(weights, "bb"), (1, 0), "the larger weight");
        assert_eq!(credit(weights, "CC"), (2, 2), "held in the accelerator's memory all the same");
        assert_eq!(credit(weights, "hcccch"), (4, 2));
        assert_eq!(credit(weights, "hrrcrrh"), (6, 2), "not a removed block");
        assert_eq!(credit(weights, "hrrrcch"), (1, 2), "behind a broken run nothing is credited");
        assert_eq!(credit(weights, "h..c"), (3, 1), "vouched for");
        assert_eq!(credit(TierWeights { cpu: 1000, storage: 0 }, "hccs"), (3, 1));
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

//! The index beside a model of vLLM's block pool, which also announces hits again where a request asks for that.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::*;

/// Numbers that look random and are the same each time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap()
    }
}

/// A request: its full blocks, and whether tokens are left over.
struct Prompt {
    names: Vec<u64>,
    tail: bool,
    /// `kv_cache_report_mode: "full"`.
    reports_hits: bool,
    /// Whether it computes everything anew, as one that asks for the prompt's probabilities.
    skips_cache: bool,
}

/// A pool of physical blocks. Source: `BlockPool` and `KVCacheManager` of vLLM 0.32.
struct Pool {
    /// What each block has cached, and how many requests use it.
    blocks: Vec<(Option<u64>, u32)>,
    /// Blocks that nobody uses, those first that are taken first.
    free: VecDeque<usize>,
    /// Blocks that have the same name, the oldest first.
    cached: BTreeMap<u64, Vec<usize>>,
    running: Vec<Vec<usize>>,
}

impl Pool {
    fn new(blocks: usize) -> Self {
        Self {
            blocks: vec![(None, 0); blocks],
            free: (0..blocks).collect(),
            cached: BTreeMap::new(),
            running: Vec::new(),
        }
    }

    /// Blocks that have nothing cached.
    fn unfilled(&self) -> usize {
        self.blocks.iter().filter(|block| block.0.is_none()).count()
    }

    fn start(&mut self, prompt: &Prompt) -> Vec<Event> {
        let mut events = Vec::new();
        let names = &prompt.names;
        // The last token is computed in any case, and with it its block.
        let usable = &names[..names.len() - usize::from(!prompt.tail)];
        let hits = usable.iter().take_while(|name| self.cached.contains_key(name) && !prompt.skips_cache).count();
        if prompt.reports_hits && hits > 0 {
            events.push(store(&names[..hits], FULL));
        }
        let mut used: Vec<_> = names[..hits].iter().map(|name| self.cached[name][0]).collect();
        let free = self.free.iter().filter(|block| !used.contains(block)).count();
        let new = names.len() - hits + usize::from(prompt.tail);
        if free < new {
            return events;
        }
        for &block in &used {
            self.free.retain(|&other| other != block);
            self.blocks[block].1 += 1;
        }
        for _ in 0..new {
            let block = self.free.pop_front().unwrap();
            events.extend(self.evict(block));
            self.blocks[block].1 = 1;
            used.push(block);
        }
        for (number, &name) in names.iter().enumerate().skip(hits) {
            self.blocks[used[number]].0 = Some(name);
            self.cached.entry(name).or_default().push(used[number]);
        }
        if hits < names.len() {
            let parent = hits.checked_sub(1).map(|last| BlockHash(names[last]).into());
            let Event::Stored(stored) = store(&names[hits..], FULL) else { unreachable!() };
            events.push(Event::Stored(Stored { parent, ..stored }));
        }
        self.running.push(used);
        events
    }

    fn evict(&mut self, block: usize) -> Option<Event> {
        let name = self.blocks[block].0.take()?;
        let copies = self.cached.get_mut(&name).unwrap();
        copies.retain(|&other| other != block);
        if copies.is_empty() {
            self.cached.remove(&name);
        }
        Some(remove(name, FULL))
    }

    fn finish(&mut self, number: usize) {
        let used = self.running.swap_remove(number);
        for &block in used.iter().rev() {
            self.blocks[block].1 -= 1;
            match self.blocks[block] {
                (Some(_), 0) => self.free.push_back(block),
                (None, 0) => self.free.push_front(block),
                _ => {}
            }
        }
    }
}

/// Chains of names: equal beginnings have equal names.
fn prompt(dice: &mut Dice, reports_hits: bool) -> Prompt {
    let (family, variant) = (dice.below(12), dice.below(30) + 1);
    let (shared, length) = (dice.below(9), 1 + dice.below(14));
    let mut chain = family;
    let names = (0..length).map(|block| {
        chain = chain.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (block << 8 | if block < shared { 0 } else { variant });
        chain = (chain ^ chain >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        chain
    });
    Prompt { names: names.collect(), tail: dice.below(3) > 0, reports_hits, skips_cache: dice.below(20) == 0 }
}

/// What went wrong over a run, at most at any time.
#[derive(Debug, Default)]
struct Errors {
    /// Blocks held in the index only.
    ghosts: usize,
    /// The same beyond the blocks that the engine had not filled.
    ghosts_beyond_room: usize,
    /// Blocks held by the engine only.
    lost: usize,
    /// Sums over all steps.
    ghosts_sum: usize,
    lost_sum: usize,
    disproved: u32,
    unknown: u32,
}

const BLOCKS: usize = 300;
const STEPS: usize = 2500;
const LOOK_EVERY: usize = 5;

/// Runs random requests, a share of which asks for announcements of hits.
fn run_pool(seed: u64, reporting_percent: u64, gpu_blocks: Option<u64>) -> Errors {
    let (mut dice, mut pool, mut errors) = (Dice(seed), Pool::new(BLOCKS), Errors::default());
    let index = Index::new(IndexConfig::default());
    let slot = index.add_slot().unwrap();
    if let Some(blocks) = gpu_blocks {
        index.set_gpu_blocks(slot, blocks);
    }
    for step in 0..STEPS {
        let reports_hits = dice.below(100) < reporting_percent;
        let prompt = prompt(&mut dice, reports_hits);
        // One that skips the cache comes several times, so that its blocks have many copies.
        for _ in 0..if prompt.skips_cache { 4 } else { 1 } {
            for event in pool.start(&prompt) {
                let applied = index.apply(slot, &event);
                errors.disproved += applied.disproved;
                errors.unknown += applied.unknown;
            }
        }
        while pool.running.len() > 12 {
            let number = dice.index(pool.running.len());
            pool.finish(number);
        }
        if step % LOOK_EVERY > 0 {
            continue;
        }
        let held: BTreeSet<_> = index.names(slot).into_iter().map(|name| name.0).collect();
        let truth: BTreeSet<_> = pool.cached.keys().copied().collect();
        let (ghosts, lost) = (held.difference(&truth).count(), truth.difference(&held).count());
        errors.ghosts = errors.ghosts.max(ghosts);
        errors.ghosts_beyond_room = errors.ghosts_beyond_room.max(ghosts.saturating_sub(pool.unfilled()));
        errors.lost = errors.lost.max(lost);
        errors.ghosts_sum += ghosts * LOOK_EVERY;
        errors.lost_sum += lost * LOOK_EVERY;
    }
    errors
}

const SEEDS: std::ops::Range<u64> = 1..4;

#[test]
fn without_announcements_of_hits_the_index_holds_what_the_engine_does() {
    for seed in SEEDS {
        for gpu_blocks in [Some(BLOCKS as u64), None] {
            let Errors { ghosts, lost, disproved, unknown, .. } = run_pool(seed, 0, gpu_blocks);
            assert_eq!((ghosts, lost, disproved, unknown), (0, 0, 0, 0), "{seed}");
        }
    }
}

/// Measured: a block in 100 to 300 is a ghost at any time, at most one in 25; about as many, of which a copy was left, are
/// thought gone.
#[test]
fn hits_that_are_announced_again_leave_few_ghosts_for_a_short_time() {
    for (seed, percent) in SEEDS.flat_map(|seed| [5, 30, 100].map(|percent| (seed, percent))) {
        let errors = run_pool(seed, percent, Some(BLOCKS as u64));
        assert!(errors.disproved > 100, "{seed} {percent} {errors:?}");
        assert!(errors.ghosts < BLOCKS / 20 && errors.ghosts_sum < STEPS * BLOCKS / 80, "{seed} {percent} {errors:?}");
        assert!(errors.ghosts_beyond_room < BLOCKS / 40, "{seed} {percent} {errors:?}");
        assert!(errors.lost < BLOCKS / 12 && errors.lost_sum < STEPS * BLOCKS / 60, "{seed} {percent} {errors:?}");
    }
}

/// What the rule is for: the same requests where every announcement counts.
#[test]
fn counting_every_announcement_would_leave_ghosts_for_ever() {
    for seed in SEEDS {
        let errors = run_pool(seed, 30, None);
        assert!(errors.ghosts_sum > STEPS * BLOCKS / 20, "{seed} {errors:?}");
    }
}

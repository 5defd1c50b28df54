//! One engine: requests wait, run in steps, and leave their blocks behind.
//!
//! Each step continues what runs and then takes what waits, first come first served, as far as its tokens, its requests and the free
//! blocks reach. A long prompt is computed in pieces. A block can be found from the step on that computes it; what became of blocks
//! is told when the step has ended. Where no block is left for what runs, the request that came last starts over.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

#[cfg(test)]
use kvlb::contract::BlockHash;
use kvlb::contract::events::{Event, Removed, Stored, WireHash};

use super::figures::{float, small};
use super::pool::Pool;
use super::timing::{Timing, Work};
use super::workload::Ask;

/// How an engine is built.
#[derive(Clone, Copy, Debug)]
pub(super) struct Build {
    /// Tokens a block.
    pub(super) block_size: u32,
    /// Blocks of its cache.
    pub(super) blocks: u32,
    /// Tokens that one step computes at most.
    pub(super) step_tokens: u32,
    /// Requests that run at a time.
    pub(super) sequences: usize,
    /// Prompts that one step computes at most.
    pub(super) prompts: usize,
    /// How long steps take.
    pub(super) timing: Timing,
}

/// A request on its way through an engine.
#[derive(Clone, Debug)]
struct Sequence {
    number: usize,
    ask: Arc<Ask>,
    /// Tokens whose KV is there.
    computed: u32,
    /// Tokens of its answer.
    answered: u32,
    /// Prompt tokens found when it first ran.
    hit: Option<u32>,
    blocks: Vec<u32>,
    /// Leading blocks whose names are known.
    named: usize,
    /// Tokens that the present step computes.
    planned: u32,
}

impl Sequence {
    fn new(number: usize, ask: Arc<Ask>) -> Self {
        Self { number, ask, computed: 0, answered: 0, hit: None, blocks: Vec::new(), named: 0, planned: 0 }
    }

    fn tokens(&self) -> u32 {
        self.ask.tokens + self.answered
    }

    /// Tokens that are to be computed before the next one comes.
    fn due(&self) -> u32 {
        self.tokens() - self.computed
    }
}

/// What became of a request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It runs, for the first time, with so many prompt tokens found.
    Started {
        /// Prompt tokens that need not be computed.
        hit: u32,
    },
    /// Its first token came.
    First,
    /// Its last token came.
    Done,
}

/// What a step did.
#[derive(Clone, Debug, Default)]
pub(super) struct Step {
    /// Requests and what became of them.
    pub(super) outcomes: Vec<(usize, Outcome)>,
    /// What became of blocks.
    pub(super) events: Vec<Event>,
}

/// What an engine says of itself, as of its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Gauges {
    /// Requests that wait.
    pub(super) waiting: usize,
    /// Requests that run.
    pub(super) running: usize,
    /// The share of blocks in use.
    pub(super) kv_use: f64,
}

/// An engine.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    build: Build,
    pool: Pool,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    events: Vec<Event>,
    started: Vec<(usize, Outcome)>,
    gauges: Gauges,
    preempted: usize,
}

impl Engine {
    /// An engine with an empty cache.
    pub(super) fn new(build: Build) -> Self {
        Self {
            build,
            pool: Pool::new(build.blocks),
            waiting: VecDeque::new(),
            running: Vec::new(),
            events: Vec::new(),
            started: Vec::new(),
            gauges: Gauges::default(),
            preempted: 0,
        }
    }

    /// A request arrives; says whether it fits at all.
    pub(super) fn take(&mut self, number: usize, ask: Arc<Ask>) -> bool {
        let fits = (ask.tokens + ask.output).div_ceil(self.build.block_size) <= self.build.blocks;
        if fits {
            self.waiting.push_back(Sequence::new(number, ask));
        }
        fits
    }

    /// What it last said of itself.
    pub(super) fn gauges(&self) -> Gauges {
        self.gauges
    }

    /// Times that a request had to start over.
    pub(super) fn preempted(&self) -> usize {
        self.preempted
    }

    /// Blocks whose names can be found.
    pub(super) fn named(&self) -> usize {
        self.pool.named()
    }

    /// Begins a step and says how long it takes; none where there is nothing to do.
    pub(super) fn begin(&mut self) -> Option<Duration> {
        let mut left = self.build.step_tokens;
        let mut prompts = 0;
        let preempted = self.go_on(&mut left, &mut prompts);
        if !preempted {
            self.admit(&mut left, &mut prompts);
        }
        let planned = || self.running.iter().filter(|sequence| sequence.planned > 0);
        planned().next()?;
        let is_decode = |sequence: &&Sequence| sequence.answered > 0 && sequence.due() == 1;
        let decodes = small(planned().filter(is_decode).count());
        let contexts: u64 = planned().map(|s| u64::from(s.computed + s.planned)).sum();
        let capacity = f64::from(self.build.blocks) * f64::from(self.build.block_size);
        Some(self.build.timing.step(&Work {
            prefill_tokens: self.build.step_tokens - left - decodes,
            decodes,
            crowd: float(self.running.len()) / float(self.build.sequences),
            contexts: float(usize::try_from(contexts).unwrap_or(usize::MAX)) / capacity.max(1.0),
        }))
    }

    /// Plans tokens for what runs; says whether something had to make way.
    fn go_on(&mut self, left: &mut u32, prompts: &mut usize) -> bool {
        let mut preempted = false;
        let mut at = 0;
        while at < self.running.len() {
            let sequence = &mut self.running[at];
            let is_prompt = sequence.due() > 1;
            let may = !is_prompt || *prompts < self.build.prompts;
            let tokens = if may { sequence.due().min(*left) } else { 0 };
            sequence.planned = 0;
            while tokens > 0 && !self.allocate(at, tokens) {
                preempted = true;
                self.preempt();
                if at >= self.running.len() {
                    return true;
                }
            }
            self.running[at].planned = tokens;
            *left -= tokens;
            *prompts += usize::from(is_prompt && tokens > 0);
            at += 1;
        }
        preempted
    }

    /// Takes from those that wait.
    fn admit(&mut self, left: &mut u32, prompts: &mut usize) {
        while *left > 0 && *prompts < self.build.prompts && self.running.len() < self.build.sequences {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            let size = self.build.block_size;
            // The last token is always computed: something must come of it.
            let usable = ((sequence.tokens() - 1) / size) as usize;
            let usable = &sequence.ask.names[..usable.min(sequence.ask.names.len())];
            let found = self.pool.run(usable);
            let hit = small(found) * size;
            let tokens = (sequence.tokens() - hit).min(*left);
            let needed = (hit + tokens).div_ceil(size) as usize - found;
            if needed + self.pool.idle_among(&usable[..found]) > self.pool.idle() {
                self.waiting.push_front(sequence);
                return;
            }
            self.pool.share(&usable[..found], &mut sequence.blocks);
            (sequence.computed, sequence.named) = (hit, found);
            if sequence.hit.is_none() {
                sequence.hit = Some(hit);
                self.started.push((sequence.number, Outcome::Started { hit }));
            }
            let is_prompt = sequence.due() > 1;
            self.running.push(sequence);
            let at = self.running.len() - 1;
            let given = self.allocate(at, tokens);
            debug_assert!(given, "it was counted before");
            self.running[at].planned = tokens;
            *left -= tokens;
            *prompts += usize::from(is_prompt);
        }
    }

    /// The request that came last gives everything back and waits again, before all others.
    fn preempt(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        self.pool.release(&sequence.blocks);
        sequence.blocks.clear();
        (sequence.computed, sequence.named, sequence.planned) = (0, 0, 0);
        self.waiting.push_front(sequence);
        self.preempted += 1;
    }

    /// Gives a running request the blocks for so many more tokens, and names those that become full.
    fn allocate(&mut self, at: usize, tokens: u32) -> bool {
        let sequence = &mut self.running[at];
        let until = sequence.computed + tokens;
        let needed = (until.div_ceil(self.build.block_size) as usize).saturating_sub(sequence.blocks.len());
        if needed > self.pool.idle() {
            return false;
        }
        let mut lost = Vec::new();
        for _ in 0..needed {
            let Some((block, name)) = self.pool.take() else { break };
            sequence.blocks.push(block);
            lost.extend(name.map(WireHash::from));
        }
        if !lost.is_empty() {
            self.events.push(Event::Removed(Removed { hashes: lost, ..Removed::default() }));
        }
        let full = ((until / self.build.block_size) as usize).min(sequence.ask.names.len());
        let names = &sequence.ask.names;
        let parent = |at: usize| at.checked_sub(1).map(|before| names[before].into());
        for index in sequence.named..full {
            if !self.pool.name(sequence.blocks[index], names[index]) {
                continue;
            }
            match self.events.last_mut() {
                Some(Event::Stored(stored)) if stored.hashes.last().map(|hash| Some(*hash)) == Some(parent(index)) => {
                    stored.hashes.push(names[index].into());
                }
                _ => self.events.push(Event::Stored(Stored {
                    hashes: vec![names[index].into()],
                    parent: parent(index),
                    block_size: self.build.block_size,
                    ..Stored::default()
                })),
            }
        }
        sequence.named = full.max(sequence.named);
        true
    }

    /// Ends the step that was begun.
    pub(super) fn end(&mut self) -> Step {
        let mut outcomes = std::mem::take(&mut self.started);
        for sequence in &mut self.running {
            if sequence.planned == 0 {
                continue;
            }
            sequence.computed += std::mem::take(&mut sequence.planned);
            if sequence.due() > 0 {
                continue;
            }
            sequence.answered += 1;
            if sequence.answered == 1 {
                outcomes.push((sequence.number, Outcome::First));
            }
        }
        let done = |sequence: &Sequence| sequence.answered >= sequence.ask.output.max(1);
        for sequence in self.running.extract_if(.., |sequence| done(sequence)) {
            self.pool.release(&sequence.blocks);
            outcomes.push((sequence.number, Outcome::Done));
        }
        let used = self.pool.blocks() - self.pool.idle();
        let kv_use = float(used) / float(self.pool.blocks().max(1));
        self.gauges = Gauges { waiting: self.waiting.len(), running: self.running.len(), kv_use };
        Step { outcomes, events: std::mem::take(&mut self.events) }
    }

    /// All requests that are not done.
    pub(super) fn unfinished(&self) -> Vec<usize> {
        self.waiting.iter().chain(&self.running).map(|sequence| sequence.number).collect()
    }
}

/// The names of blocks that events tell of as stored, less those of removals.
#[cfg(test)]
fn told(events: &[Event]) -> (Vec<BlockHash>, Vec<BlockHash>) {
    let (mut stored, mut removed) = (Vec::new(), Vec::new());
    for event in events {
        match event {
            Event::Stored(of) => stored.extend(of.hashes.iter().map(|hash| hash.name)),
            Event::Removed(of) => removed.extend(of.hashes.iter().map(|hash| hash.name)),
            Event::Cleared => {}
        }
    }
    (stored, removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMING: Timing = Timing::PerToken { overhead_ms: 1.0, token_ms: 1.0, decode_ms: 10.0, crowded: 1.0 };

    fn build(blocks: u32) -> Build {
        Build { block_size: 4, blocks, step_tokens: 16, sequences: 4, prompts: 4, timing: TIMING }
    }

    fn ask(tokens: u32, output: u32, names: &[u64]) -> Arc<Ask> {
        let names = names.iter().copied().map(BlockHash).collect();
        Arc::new(Ask { tokens, output, names, ..Ask::default() })
    }

    fn step(engine: &mut Engine) -> (u64, Step) {
        let takes = engine.begin().map_or(0, |takes| takes.as_millis().try_into().unwrap());
        (takes, engine.end())
    }

    #[test]
    fn a_long_prompt_comes_in_pieces_and_its_blocks_are_told_of_at_the_end_of_each() {
        let mut engine = Engine::new(build(20));
        assert!(engine.take(7, ask(22, 2, &[1, 2, 3, 4, 5])));
        assert!(engine.begin().is_some());
        assert_eq!(engine.named(), 4, "they can be found at once");
        let first = engine.end();
        assert_eq!(told(&first.events).0, [1, 2, 3, 4].map(BlockHash));
        assert_eq!(first.outcomes, [(7, Outcome::Started { hit: 0 })]);
        let (takes, second) = step(&mut engine);
        assert_eq!((takes, told(&second.events).0), (7, vec![BlockHash(5)]));
        assert_eq!(second.outcomes, [(7, Outcome::First)]);
        let (takes, third) = step(&mut engine);
        assert_eq!((takes, third.outcomes), (10, vec![(7, Outcome::Done)]));
        assert_eq!((engine.begin(), engine.unfinished()), (None, Vec::new()));
    }

    #[test]
    fn what_was_computed_is_found_except_for_the_last_token() {
        let mut engine = Engine::new(build(20));
        engine.take(0, ask(8, 1, &[1, 2]));
        step(&mut engine);
        engine.take(1, ask(8, 1, &[1, 2]));
        engine.take(2, ask(12, 1, &[1, 2, 9]));
        let (takes, done) = step(&mut engine);
        assert_eq!(takes, 1 + 4 + 4);
        assert_eq!(done.outcomes[..2], [(1, Outcome::Started { hit: 4 }), (2, Outcome::Started { hit: 8 })]);
    }

    #[test]
    fn the_step_that_is_full_leaves_the_rest_waiting_in_order() {
        let mut engine = Engine::new(build(50));
        for number in 0..3 {
            engine.take(number, ask(10, 3, &[]));
        }
        let (_, done) = step(&mut engine);
        assert_eq!(
            done.outcomes,
            [(0, Outcome::Started { hit: 0 }), (1, Outcome::Started { hit: 0 }), (0, Outcome::First)]
        );
        assert_eq!(engine.gauges().waiting, 1);
        let (takes, done) = step(&mut engine);
        // One answer goes on, four tokens of the second prompt and ten of the third are computed.
        assert_eq!((takes, done.outcomes.len()), (1 + 14 + 10, 3));
    }

    #[test]
    fn where_no_block_is_left_the_last_starts_over_and_all_get_done() {
        let mut engine = Engine::new(build(6));
        engine.take(0, ask(8, 9, &[1, 2]));
        engine.take(1, ask(8, 9, &[3, 4]));
        assert!(!engine.take(2, ask(25, 1, &[])), "longer than the cache");
        let mut done = Vec::new();
        for _ in 0..60 {
            let (_, step) = step(&mut engine);
            done.extend(step.outcomes.into_iter().filter(|(_, outcome)| *outcome == Outcome::Done));
        }
        assert_eq!(done.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1]);
        assert!(engine.preempted() > 0 && engine.unfinished().is_empty());
    }

    #[test]
    fn what_makes_way_is_told_of_before_what_takes_its_place() {
        let mut engine = Engine::new(build(3));
        engine.take(0, ask(8, 1, &[1, 2]));
        step(&mut engine);
        engine.take(1, ask(8, 1, &[3, 4]));
        let (_, done) = step(&mut engine);
        let (stored, removed) = told(&done.events);
        assert_eq!((stored, removed), ([3, 4].map(BlockHash).to_vec(), vec![BlockHash(2)]));
        assert!(matches!(done.events[0], Event::Removed(_)));
    }
}

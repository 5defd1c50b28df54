//! The engine's step loop as a value: requests in, one step at a time, tokens and cache events out. No clock, no tasks.
//!
//! As vLLM's: first come first served; running requests before waiting ones; a prompt longer than the step's budget is prefilled in
//! chunks; a full pool preempts the youngest running request, which starts over later; blocks are cached when their step is scheduled
//! and announced when it has run.

mod handoff;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::cache::{Cache, Hits, Sequence, Shape};
use super::call::Lora;
use super::handoff::Part;
use super::names::{Digest, Naming};
use super::pool::Pool;
use super::stats::Stats;
use super::tokens::Tokens;
use super::wire::Event;
pub(super) use handoff::Fact;
use handoff::Handoffs;

/// Identity of a request inside one engine.
pub(super) type SeqId = u64;

/// Why a request ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finish {
    /// The output reached its limit.
    Length,
    /// The model stopped.
    Stop,
    /// It could not go on.
    Error,
}

impl Finish {
    /// `finish_reason` in answers and metrics.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop => "stop",
            Self::Error => "error",
        }
    }
}

/// One generated token, sent to whoever waits for the request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Output {
    /// Which of the call's answers it belongs to.
    pub(super) choice: usize,
    /// The token.
    pub(super) token: u32,
    /// Prompt tokens that came from the cache, or from another engine, when the request first ran.
    pub(super) cached_tokens: usize,
    /// Set on the last token.
    pub(super) finish: Option<Finish>,
}

/// What the model says where it does not see the prompt that it was asked.
#[derive(Debug, Clone)]
pub(super) struct Voice {
    /// What tokens it has.
    pub(super) tokens: Arc<Tokens>,
    /// The request's seed.
    pub(super) seed: u64,
}

/// One prompt to run.
#[derive(Debug)]
pub(super) struct Request {
    /// The prompt.
    pub(super) prompt: Vec<u32>,
    /// What the model will say; never empty.
    pub(super) outputs: Vec<u32>,
    /// How it ends.
    pub(super) finish: Finish,
    /// The adapter it uses.
    pub(super) lora: Option<Lora>,
    /// `cache_salt`; an empty one counts as none.
    pub(super) salt: Option<String>,
    /// Session shown in events.
    pub(super) session: Option<String>,
    /// Announce hits again (`kv_cache_report_mode: full`).
    pub(super) report_hits: bool,
    /// Compute the whole prompt, cached or not.
    pub(super) skips_cache: bool,
    /// Which of the call's answers this is.
    pub(super) choice: usize,
    /// `n` of the call, for the metrics.
    pub(super) n: usize,
    /// Its part in a handoff.
    pub(super) part: Option<Part>,
    /// What it says instead of `outputs` when the KV under it is somebody else's.
    pub(super) voice: Option<Voice>,
    /// Where tokens go.
    pub(super) sink: mpsc::UnboundedSender<Output>,
}

impl Request {
    /// A plain one: one answer, which ends at its length; the base model, and nothing that enters names besides tokens.
    fn plain(prompt: Vec<u32>, outputs: Vec<u32>, sink: mpsc::UnboundedSender<Output>) -> Self {
        Self {
            prompt,
            outputs,
            finish: Finish::Length,
            lora: None,
            salt: None,
            session: None,
            report_hits: false,
            skips_cache: false,
            choice: 0,
            n: 1,
            part: None,
            voice: None,
            sink,
        }
    }
}

/// What the next step computes.
#[derive(Debug, Default)]
pub(super) struct Step {
    work: Vec<(SeqId, usize)>,
    /// Prompt tokens computed, recomputed ones after a preemption included.
    pub(super) prefill_tokens: usize,
    /// Requests that get their next token from one decode.
    pub(super) decodes: usize,
}

impl Step {
    /// Nothing to compute.
    pub(super) fn is_empty(&self) -> bool {
        self.work.is_empty()
    }
}

/// What a step brought.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Cache events in the order they happened; one batch on the wire.
    pub(super) events: Vec<Event>,
    /// Tokens for the waiting clients.
    pub(super) outputs: Vec<(mpsc::UnboundedSender<Output>, Output)>,
}

/// What does not change in an engine's life.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    /// Requests running at once.
    pub(super) max_num_seqs: usize,
    /// Tokens per step.
    pub(super) max_num_batched_tokens: usize,
    /// What is cached, and where.
    pub(super) shape: Shape,
    /// How long blocks are kept for a decode elsewhere.
    pub(super) lease: Duration,
}

/// All requests of one engine and its pool.
#[derive(Debug)]
pub(super) struct Scheduler {
    limits: Limits,
    cache: Cache,
    /// Arrived since the last step.
    inbox: VecDeque<Sequence>,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// Aborted while a step is under way; they go when it ends.
    aborted: Vec<SeqId>,
    stepping: bool,
    next_id: SeqId,
    handoffs: Handoffs,
    /// What the metrics show.
    pub(super) stats: Stats,
}

impl Scheduler {
    /// An idle engine with `blocks` blocks, the null block included.
    pub(super) fn new(naming: Naming, blocks: usize, limits: Limits) -> Self {
        Self {
            cache: Cache::new(naming, blocks, limits.shape),
            handoffs: Handoffs::new(limits.lease),
            limits,
            inbox: VecDeque::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            aborted: Vec::new(),
            stepping: false,
            next_id: 0,
            stats: Stats::default(),
        }
    }

    /// The blocks and what they hold.
    pub(super) fn pool(&self) -> &Pool {
        self.cache.pool()
    }

    /// What host memory holds.
    pub(super) fn host(&self) -> impl Iterator<Item = &Digest> {
        self.cache.host()
    }

    /// Loses idle blocks without telling; how many.
    pub(super) fn forget(&mut self, chosen: impl FnMut() -> bool) -> usize {
        self.cache.forget(chosen)
    }

    /// Caches a prompt that nobody asked for; the events of it, each of at most `per_event` blocks.
    pub(super) fn preload(&mut self, prompt: Vec<u32>, per_event: usize, now: Instant) -> Vec<Event> {
        let request = Request::plain(prompt, Vec::new(), mpsc::unbounded_channel().0);
        self.cache.preload(Sequence::new(0, request, now), per_event)
    }

    /// Requests being computed, those just aborted not counted.
    pub(super) fn running(&self) -> usize {
        self.running.len() - self.aborted.len()
    }

    /// Requests that wait for their turn.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len() + self.inbox.len() + self.pulling()
    }

    /// Whether a step would compute something.
    pub(super) fn has_work(&self) -> bool {
        !(self.running.is_empty() && self.waiting.is_empty() && self.inbox.is_empty())
    }

    /// Queues a request.
    pub(super) fn submit(&mut self, request: Request, now: Instant) -> SeqId {
        let id = self.next_id;
        self.next_id += 1;
        let mut seq = Sequence::new(id, request, now);
        self.cache.name_blocks(&mut seq);
        self.arrived(&seq);
        self.inbox.push_back(seq);
        id
    }

    /// Drops a request wherever it is. Its blocks stay cached; while a step runs they stay in use until it ends.
    pub(super) fn abort(&mut self, id: SeqId) {
        if self.abort_waiting(id) {
            return;
        }
        let Some(index) = self.running.iter().position(|seq| seq.id == id) else { return };
        if !self.stepping {
            let mut seq = self.running.remove(index);
            self.cache.release(&mut seq);
            self.dropped(&seq);
        } else if !self.aborted.contains(&id) {
            self.aborted.push(id);
        }
    }

    /// Forgets the cache, unless something runs. The event leaves with the next step.
    pub(super) fn reset_cache(&mut self) -> bool {
        self.cache.clear()
    }

    /// Decides what the next step computes and takes the blocks for it.
    pub(super) fn schedule(&mut self, now: Instant) -> Step {
        self.admit();
        let mut step = Step::default();
        let mut budget = self.limits.max_num_batched_tokens;
        let preempted = self.schedule_running(&mut step, &mut budget);
        if !preempted {
            self.schedule_waiting(&mut step, &mut budget, now);
        }
        self.stepping = !step.is_empty();
        step
    }

    /// An idle engine starts with the first arrival alone: vLLM's input queue hands requests over one by one, and the step begins
    /// with the first (recorded: the parts of a list, or of `n`, start one step apart).
    fn admit(&mut self) {
        let count = if self.running.is_empty() && self.waiting.is_empty() { 1 } else { self.inbox.len() };
        self.waiting.extend(self.inbox.drain(..count.min(self.inbox.len())));
    }

    fn schedule_running(&mut self, step: &mut Step, budget: &mut usize) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let tokens = (self.running[index].tokens.len() - self.running[index].computed).min(*budget);
            let allocated = loop {
                if self.cache.allocate(&mut self.running[index], tokens, &Hits::default()) {
                    break true;
                }
                preempted = true;
                self.preempt_last();
                if index >= self.running.len() {
                    break false;
                }
            };
            if !allocated {
                break;
            }
            self.plan(index, tokens, step);
            *budget -= tokens;
            index += 1;
        }
        preempted
    }

    fn schedule_waiting(&mut self, step: &mut Step, budget: &mut usize, now: Instant) {
        while *budget > 0 && self.running.len() < self.limits.max_num_seqs {
            let Some(mut seq) = self.waiting.pop_front() else { break };
            if seq.pull_is_due() {
                if self.begin_pull(seq, now) {
                    continue;
                }
                break;
            }
            // Who comes back from a pull has its blocks.
            let hits = if seq.has_blocks() { Hits::default() } else { self.cache.hits(&seq) };
            let hit_tokens = hits.blocks() * self.cache.block_size();
            let before = seq.computed;
            seq.computed += hit_tokens;
            let tokens = (seq.tokens.len() - seq.computed).min(*budget);
            if !self.cache.allocate(&mut seq, tokens, &hits) {
                seq.computed = before;
                self.waiting.push_front(seq);
                break;
            }
            self.admitted(&mut seq, hit_tokens, now);
            self.running.push(seq);
            self.plan(self.running.len() - 1, tokens, step);
            *budget -= tokens;
        }
    }

    fn admitted(&mut self, seq: &mut Sequence, hit_tokens: usize, now: Instant) {
        if seq.hit_tokens.is_none() {
            seq.hit_tokens = Some(hit_tokens);
            seq.started = Some(now);
            self.stats.admitted(seq.tokens.len(), hit_tokens);
        }
    }

    fn plan(&mut self, index: usize, tokens: usize, step: &mut Step) {
        let seq = &self.running[index];
        // The last token before the next one is a decode, unless it ends a prefill.
        if seq.generated() > 0 && tokens == 1 {
            step.decodes += 1;
        } else {
            step.prefill_tokens += tokens;
        }
        step.work.push((seq.id, tokens));
    }

    /// The youngest running request gives its blocks back and starts over, its generated tokens kept.
    fn preempt_last(&mut self) {
        let Some(mut seq) = self.running.pop() else { return };
        self.cache.release(&mut seq);
        seq.preemptions += 1;
        self.stats.preemptions += 1;
        if self.forget_abort(seq.id) {
            self.dropped(&seq);
            return;
        }
        self.waiting.push_front(seq);
    }

    fn forget_abort(&mut self, id: SeqId) -> bool {
        let index = self.aborted.iter().position(|aborted| *aborted == id);
        index.map(|index| self.aborted.swap_remove(index)).is_some()
    }

    /// Ends a step: its tokens are there, its events can be told.
    pub(super) fn complete(&mut self, step: &Step, now: Instant) -> Outcome {
        self.stepping = false;
        let mut outcome = Outcome { events: self.cache.take_events(), outputs: Vec::new() };
        self.stats.step(step.prefill_tokens, step.decodes);
        for (id, tokens) in &step.work {
            let Some(index) = self.running.iter().position(|seq| seq.id == *id) else { continue };
            self.cache.compute(&mut self.running[index], *tokens);
            if self.aborted.contains(id) || self.running[index].computed < self.running[index].tokens.len() {
                continue;
            }
            let output = self.sample(index, now);
            outcome.outputs.push((self.running[index].request.sink.clone(), output));
            if let Some(finish) = output.finish {
                let mut seq = self.running.remove(index);
                if !self.keep(&mut seq, now) {
                    self.cache.release(&mut seq);
                }
                self.finished(&seq, finish, now);
            }
        }
        for id in std::mem::take(&mut self.aborted) {
            self.abort(id);
        }
        outcome
    }

    fn sample(&mut self, index: usize, now: Instant) -> Output {
        let seq = &mut self.running[index];
        let position = seq.generated();
        if position == 0 {
            self.cache.hear(seq);
        }
        let token = seq.request.outputs[position];
        let last = position + 1 == seq.request.outputs.len();
        seq.tokens.push(token);
        self.cache.name_blocks(seq);
        let (hits, pulled) = (seq.hit_tokens.unwrap_or(0), seq.pulled_tokens);
        let cached_tokens = seq.reported_cached.unwrap_or(hits + pulled);
        match seq.last_token.replace(now) {
            None => {
                seq.first_token = Some(now);
                self.stats.first_token(seq.request.prompt.len(), hits, pulled, now - seq.queued);
            }
            Some(before) => self.stats.next_token(now - before),
        }
        Output { choice: seq.request.choice, token, cached_tokens, finish: last.then_some(seq.request.finish) }
    }

    fn finished(&mut self, seq: &Sequence, finish: Finish, now: Instant) {
        let started = seq.started.unwrap_or(seq.queued);
        let first = seq.first_token.unwrap_or(now);
        self.stats.finished(&super::stats::Finished {
            reason: finish.label(),
            prompt: seq.request.prompt.len(),
            computed: seq.request.prompt.len() - seq.hit_tokens.unwrap_or(0) - seq.pulled_tokens,
            generated: seq.generated(),
            n: seq.request.n,
            preemptions: seq.preemptions,
            queued: started - seq.queued,
            prefill: first - started,
            decode: now - first,
        });
    }
}

#[cfg(test)]
mod handoff_tests;
#[cfg(test)]
mod tests;

//! One data-parallel rank: a scheduler with a cache of its own, the loop that steps the model, and an event stream of its own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};

use super::cache::Shape;
use super::call::Call;
use super::chance::Chance;
use super::config::EngineConfig;
use super::faults::Faults;
use super::life::Inherited;
use super::names::Digest;
use super::publish::Publisher;
use super::scheduler::{Limits, Output, Request, Scheduler, SeqId};
use super::tokens::Tokens;

/// How far a step's start may lie before now: what one late wake-up can cost, not a pause of the machine.
const LATENESS_MAX: Duration = Duration::from_millis(5);

/// What the tasks of one rank share in one life.
#[derive(Debug)]
pub(super) struct Rank {
    /// Its number, from 0.
    pub(super) number: usize,
    /// Its event stream.
    pub(super) publisher: Publisher,
    /// `NONE_HASH` of this life.
    pub(super) none_hash: Digest,
    /// Ports as bound: events, then replay.
    pub(super) ports: (Option<u16>, Option<u16>),
    config: Arc<EngineConfig>,
    tokens: Arc<Tokens>,
    faults: Arc<Faults>,
    scheduler: Mutex<Scheduler>,
    arrived: Notify,
}

impl Rank {
    /// An empty rank; `life` counts the lives of this rank, since each has another random `NONE_HASH`.
    pub(super) fn new(inherited: &Inherited, life: u64, number: usize, ports: (Option<u16>, Option<u16>)) -> Self {
        let config = Arc::clone(&inherited.config);
        let mut origin = vec![config.chance_seed, life];
        origin.extend(u64::try_from(number).ok().filter(|number| *number > 0));
        let naming = config.naming(Chance::seed_of(&config.name, &origin));
        let limits = Limits {
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            shape: Shape {
                disabled: config.no_prefix_caching,
                window: config.sliding_window,
                host_blocks: config.cpu_blocks,
                host_describes: config.self_describing_kv_events,
            },
        };
        Self {
            number,
            none_hash: naming.none_hash(),
            publisher: Publisher::new(&config, Arc::clone(&inherited.faults), number),
            ports,
            scheduler: Mutex::new(Scheduler::new(naming, config.num_gpu_blocks, limits)),
            arrived: Notify::new(),
            config,
            tokens: Arc::clone(&inherited.tokens),
            faults: Arc::clone(&inherited.faults),
        }
    }

    /// The scheduler, for a look or a change between two steps.
    pub(super) fn scheduler(&self) -> MutexGuard<'_, Scheduler> {
        self.scheduler.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Steps the model for ever.
    pub(super) async fn run(self: Arc<Self>) {
        let mut free_at = Instant::now();
        loop {
            if !self.scheduler().has_work() {
                self.arrived.notified().await;
                free_at = Instant::now();
                continue;
            }
            self.faults.until(|plan| !plan.pause).await;
            // Steps follow each other without a gap while there is work: a late wake-up of the timer does not add up.
            let start = free_at.max(Instant::now() - LATENESS_MAX);
            let step = self.scheduler().schedule(Instant::now());
            if step.is_empty() {
                tokio::task::yield_now().await;
                continue;
            }
            free_at = start + self.config.step_time(step.prefill_tokens, step.decodes > 0);
            if free_at > Instant::now() {
                sleep_until(free_at).await;
            } else {
                tokio::task::yield_now().await;
            }
            let outcome = self.scheduler().complete(&step, Instant::now());
            // Events leave before the tokens do, as vLLM hands them over.
            if !outcome.events.is_empty() && !self.config.no_events {
                self.publisher.publish(&outcome.events);
            }
            for (sink, output) in outcome.outputs {
                if sink.send(output).is_err() {
                    tracing::trace!("whoever asked is gone; the abort is on its way");
                }
            }
        }
    }

    /// Runs all prompts of a call; what comes back drops them all when it is dropped.
    pub(super) fn submit(self: &Arc<Self>, call: &Call) -> Running {
        let (sink, outputs) = mpsc::unbounded_channel();
        let mut scheduler = self.scheduler();
        let mut ids = Vec::new();
        for (index, prompt) in call.prompts.iter().enumerate() {
            for copy in 0..call.n {
                let request = self.request(call, prompt, copy, index * call.n + copy, sink.clone());
                ids.push(scheduler.submit(request, Instant::now()));
            }
        }
        drop(scheduler);
        self.arrived.notify_one();
        Running { rank: Arc::clone(self), ids, outputs }
    }

    fn request(
        &self,
        call: &Call,
        prompt: &[u32],
        copy: usize,
        choice: usize,
        sink: mpsc::UnboundedSender<Output>,
    ) -> Request {
        let (len, finish) = call.output_len(prompt, self.config.natural_output_tokens, self.config.token_limit());
        let seed = call.seed ^ (u64::try_from(copy).unwrap_or(0) << 32) ^ self.config.chance_seed;
        let outputs = self.config.outputs.of(prompt, copy).filter(|outputs| !outputs.is_empty());
        Request {
            prompt: prompt.to_vec(),
            outputs: outputs.unwrap_or_else(|| self.tokens.outputs(prompt, seed, len)),
            finish,
            lora: call.lora.clone(),
            salt: call.salt.clone(),
            session: call.session.clone(),
            report_hits: call.report_hits,
            skips_cache: call.skips_cache,
            choice,
            n: call.n,
            sink,
        }
    }

    /// Cached names and how many copies of each, of all groups; host memory is not in it.
    pub(super) fn blocks(&self) -> BTreeMap<u64, usize> {
        let mut blocks = BTreeMap::new();
        for (key, copies) in self.scheduler().pool().cached() {
            *blocks.entry(key.digest.name()).or_default() += copies;
        }
        blocks
    }

    /// Names in host memory.
    pub(super) fn host_blocks(&self) -> Vec<u64> {
        self.scheduler().host().map(Digest::name).collect()
    }

    /// Loses a share of the idle blocks without telling; how many.
    pub(super) fn forget(&self, share: f64, chance_seed: u64) -> usize {
        let mut chance = Chance::new(chance_seed);
        self.scheduler().forget(|| chance.happens(share))
    }

    /// Holds these prompts' full blocks from now on, and has told of them in batches of `per_batch` blocks of one prompt.
    pub(super) fn preload(&self, prompts: impl Iterator<Item = Vec<u32>>, per_batch: usize) {
        for prompt in prompts {
            let events = self.scheduler().preload(prompt, per_batch, Instant::now());
            for event in events.iter().filter(|_| !self.config.no_events) {
                self.publisher.publish(std::slice::from_ref(event));
            }
        }
    }
}

/// The requests of one call, running or waiting.
#[derive(Debug)]
pub(super) struct Running {
    /// Where they run.
    pub(super) rank: Arc<Rank>,
    ids: Vec<SeqId>,
    /// Their tokens as they come.
    pub(super) outputs: mpsc::UnboundedReceiver<Output>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut scheduler = self.rank.scheduler();
        self.ids.iter().for_each(|id| scheduler.abort(*id));
    }
}

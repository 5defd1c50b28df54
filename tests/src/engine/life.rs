//! One life of an engine: the state between its sockets, and the loop that steps the model.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};

use super::call::Call;
use super::chance::Chance;
use super::clock;
use super::config::EngineConfig;
use super::faults::Faults;
use super::journal::Journal;
use super::metrics::HttpCounts;
use super::names::Digest;
use super::publish::Publisher;
use super::scheduler::{Limits, Output, Request, Scheduler, SeqId};
use super::tokens::Tokens;

/// What the tasks of one life share.
#[derive(Debug)]
pub(super) struct Life {
    /// How the engine was built.
    pub(super) config: Arc<EngineConfig>,
    /// Text to tokens and back.
    pub(super) tokens: Arc<Tokens>,
    /// What goes wrong.
    pub(super) faults: Arc<Faults>,
    /// What was asked.
    pub(super) journal: Arc<Journal>,
    /// The event stream.
    pub(super) publisher: Arc<Publisher>,
    /// Number of this life, from 0.
    pub(super) number: u64,
    /// Start of this life, seconds since the Unix epoch.
    pub(super) started: f64,
    /// `NONE_HASH` of this life.
    pub(super) none_hash: Digest,
    /// Answers counted for `/metrics`.
    pub(super) answered: Mutex<HttpCounts>,
    /// Ports as bound: events, then replay.
    pub(super) event_ports: (Option<u16>, Option<u16>),
    scheduler: Mutex<Scheduler>,
    arrived: Notify,
}

/// What outlives a life.
#[derive(Debug, Clone)]
pub(super) struct Inherited {
    pub(super) config: Arc<EngineConfig>,
    pub(super) tokens: Arc<Tokens>,
    pub(super) faults: Arc<Faults>,
    pub(super) journal: Arc<Journal>,
}

impl Life {
    pub(super) fn new(inherited: Inherited, number: u64, event_ports: (Option<u16>, Option<u16>)) -> Self {
        let Inherited { config, tokens, faults, journal } = inherited;
        let naming = config.naming(Chance::seed_of(&config.name, &[config.chance_seed, number]));
        let none_hash = naming.none_hash();
        let limits = Limits {
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            caching: !config.no_prefix_caching,
        };
        Self {
            publisher: Arc::new(Publisher::new(&config, Arc::clone(&faults))),
            scheduler: Mutex::new(Scheduler::new(naming, config.num_gpu_blocks, limits)),
            number,
            started: clock::unix_seconds(),
            none_hash,
            answered: Mutex::default(),
            event_ports,
            arrived: Notify::new(),
            config,
            tokens,
            faults,
            journal,
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
        Running { life: Arc::clone(self), ids, outputs }
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
            choice,
            n: call.n,
            sink,
        }
    }

    /// Cached names and how many copies of each.
    pub(super) fn blocks(&self) -> BTreeMap<u64, usize> {
        let mut blocks = BTreeMap::new();
        for (digest, copies) in self.scheduler().pool().cached() {
            *blocks.entry(digest.name()).or_default() += copies;
        }
        blocks
    }
}

/// How far a step's start may lie before now: what one late wake-up can cost, not a pause of the machine.
const LATENESS_MAX: std::time::Duration = std::time::Duration::from_millis(5);

/// The requests of one call, running or waiting.
#[derive(Debug)]
pub(super) struct Running {
    life: Arc<Life>,
    ids: Vec<SeqId>,
    /// Their tokens as they come.
    pub(super) outputs: mpsc::UnboundedReceiver<Output>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut scheduler = self.life.scheduler();
        self.ids.iter().for_each(|id| scheduler.abort(*id));
    }
}

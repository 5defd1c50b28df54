//! One data-parallel rank: a scheduler with a cache of its own, the loop that steps the model, and an event stream of its own.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::cache::Shape;
use super::call::{Call, Kind};
use super::chance::Chance;
use super::config::EngineConfig;
use super::faults::Faults;
use super::handoff::contents::Content;
use super::handoff::legs::{LegFate, LegId};
use super::handoff::pull::{self, Pull};
use super::handoff::side::{Ask, Told, What};
use super::handoff::{Handed, Identity, KvConnector, Part, Source, Wish};
use super::journal::Journal;
use super::life::Inherited;
use super::names::Digest;
use super::publish::Publisher;
use super::scheduler::{Fact, Limits, Output, Request, Scheduler, SeqId, Voice};
use super::tokens::Tokens;
use super::wire::Event;

/// How far a step's start may lie before now: what one late wake-up can cost, not a pause of the machine.
const LATENESS_MAX: Duration = Duration::from_millis(5);

/// How often the queue is looked at while nothing in it fits: blocks come back without a step when a lease ends.
const LOOK_EVERY: Duration = Duration::from_millis(1);

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
    /// How the engine was built.
    pub(super) config: Arc<EngineConfig>,
    /// What goes wrong.
    pub(super) faults: Arc<Faults>,
    tokens: Arc<Tokens>,
    journal: Arc<Journal>,
    identity: Option<Identity>,
    /// The life of this rank, for ids.
    life: u64,
    scheduler: Mutex<Scheduler>,
    arrived: Notify,
    /// A lease was given, or a prefill has none to give.
    handed: Notify,
}

/// What names a call's requests in handoffs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin<'c> {
    /// `id` of the answer.
    pub(super) id: &'c str,
    /// The legs that the call is, one for each prompt and copy.
    pub(super) legs: &'c [LegId],
    /// Where a prefill of the first prompt leaves what it keeps.
    pub(super) handed: &'c Handed,
}

impl Rank {
    /// An empty rank; `life` counts the lives of this rank, since each has another random `NONE_HASH`.
    pub(super) fn new(
        inherited: &Inherited,
        life: u64,
        number: usize,
        ports: (Option<u16>, Option<u16>),
        side_channel: Option<SocketAddr>,
    ) -> Self {
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
                contents: config.kv_connector != KvConnector::None,
            },
            lease: config.lease(),
        };
        let identity = side_channel.map(|address| Identity::new(&config, life, number, address));
        Self {
            number,
            none_hash: naming.none_hash(),
            publisher: Publisher::new(&config, Arc::clone(&inherited.faults), number),
            ports,
            scheduler: Mutex::new(Scheduler::new(naming, config.num_gpu_blocks, limits)),
            arrived: Notify::new(),
            handed: Notify::new(),
            identity,
            life,
            journal: Arc::clone(&inherited.journal),
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
        let mut errands = JoinSet::new();
        loop {
            self.settle();
            while errands.try_join_next().is_some() {}
            let due = self.scheduler().take_errands();
            for errand in due {
                errands.spawn(pull::run(Arc::clone(&self), errand));
            }
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
                self.wait_for_room().await;
                continue;
            }
            free_at = start + self.config.step_time(step.prefill_tokens, step.decodes > 0);
            if free_at > Instant::now() {
                sleep_until(free_at).await;
            } else {
                tokio::task::yield_now().await;
            }
            let outcome = self.scheduler().complete(&step, Instant::now());
            self.settle();
            // Events leave before the tokens do, as vLLM hands them over.
            self.publish(&outcome.events);
            for (sink, output) in outcome.outputs {
                if sink.send(output).is_err() {
                    tracing::trace!("whoever asked is gone; the abort is on its way");
                }
            }
        }
    }

    fn publish(&self, events: &[Event]) {
        if !events.is_empty() && !self.config.no_events {
            self.publisher.publish(events);
        }
    }

    /// Nothing that waits could begin: either another step will change that, or blocks that come back.
    async fn wait_for_room(&self) {
        if self.identity.is_none() {
            return tokio::task::yield_now().await;
        }
        let events = self.scheduler().take_events();
        self.publish(&events);
        self.settle();
        if timeout(LOOK_EVERY, self.arrived.notified()).await.is_err() {
            tracing::trace!("nothing has changed");
        }
    }

    /// Ends leases when their time is over, for ever.
    pub(super) async fn expire_leases(self: Arc<Self>) {
        loop {
            // What is given while this looks wakes it all the same.
            let mut given = std::pin::pin!(self.handed.notified());
            given.as_mut().enable();
            let next = self.scheduler().next_expiry();
            match next {
                Some(next) if next <= Instant::now() => {
                    self.scheduler().expire_leases(Instant::now());
                    self.settle();
                    self.arrived.notify_one();
                }
                // A renewal moves the end, so that it is looked at again.
                Some(next) => {
                    tokio::select! {
                        () = sleep_until(next) => {}
                        () = given => {}
                    }
                }
                None => given.await,
            }
        }
    }

    /// How other engines find this rank; none without a connector.
    pub(super) fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    /// Tells the journal what happened to legs.
    fn settle(&self) {
        let legs = &self.journal.legs;
        let facts = self.scheduler().take_facts();
        let told = !facts.is_empty();
        for fact in facts {
            match fact {
                Fact::Granted { leg, key, blocks } => {
                    legs.fate(leg, LegFate::Granted, |leg| (leg.key, leg.blocks) = (Some(key), blocks));
                }
                Fact::Dropped(leg) => legs.fate(leg, LegFate::Dropped, |_| {}),
                Fact::Read(leg) => legs.fate(leg, LegFate::Read, |_| {}),
                Fact::Expired(leg) => legs.fate(leg, LegFate::Expired, |_| {}),
                Fact::Abandoned(leg) => legs.fate(leg, LegFate::Abandoned, |_| {}),
            }
        }
        if told {
            self.handed.notify_waiters();
        }
    }

    /// Answers a decode side.
    pub(super) async fn told(&self, ask: Ask) -> Told {
        let known = self.identity.as_ref().is_some_and(|identity| identity.engine_id == ask.engine_id);
        if !known {
            return Told::Refused(format!("unknown engine {}", ask.engine_id));
        }
        let contents = match ask.what {
            What::Read(blocks) => {
                self.scheduler().read(&ask.key, &blocks).ok_or_else(|| format!("unknown request {}", ask.key))
            }
            What::Transfer(from, until) => self.transfer(&ask.key, from, until).await,
            What::Done => {
                self.scheduler().end_lease(&ask.key);
                self.settle();
                self.arrived.notify_one();
                return Told::Noted;
            }
            What::Renew => {
                self.scheduler().renew_lease(&ask.key, Instant::now());
                return Told::Noted;
            }
        };
        match contents {
            Ok(contents) => Told::Contents { block_size: self.config.block_size, contents },
            Err(why) => Told::Refused(why),
        }
    }

    /// What a transfer's blocks hold, as soon as they are computed.
    async fn transfer(&self, key: &str, from: usize, until: usize) -> Result<Vec<Content>, String> {
        let computed = async {
            loop {
                let mut given = std::pin::pin!(self.handed.notified());
                given.as_mut().enable();
                let now = self.scheduler().transfer(key, from, until)?;
                if let Some(contents) = now {
                    return Ok(contents);
                }
                given.await;
            }
        };
        let limit = self.config.transfer_wait();
        timeout(limit, computed).await.unwrap_or_else(|_| Err(format!("no prefill of {key} within {limit:?}")))
    }

    /// What a decode waited for has come, or has not.
    pub(super) fn pulled(&self, pull: &Pull, read: anyhow::Result<Vec<Content>>) {
        let reports = match &pull.source {
            Source::Blocks { cached, .. } => cached.filter(|_| self.config.report_remote_cached_tokens),
            Source::Transfer { .. } => None,
        };
        let (blocks, why) = (pull.until - pull.from, read.as_ref().err().map(|cause| format!("{cause:#}")));
        let fails = self.faults.plan().fail_on_pull_failure;
        let came = {
            let mut scheduler = self.scheduler();
            match read {
                Ok(contents) => scheduler.pulled(pull, contents, reports),
                Err(_) => scheduler.pull_failed(pull.id, fails).then_some((fails, 0)),
            }
        };
        let (fate, tokens) = match (came, &why) {
            (Some((true, tokens)), None) => (LegFate::PulledOwn, tokens),
            (Some((false, tokens)), None) => (LegFate::PulledForeign, tokens),
            (Some((true, _)), Some(_)) => (LegFate::Failed, 0),
            (Some((false, _)), Some(_)) => (LegFate::Recomputed, 0),
            (None, _) => (LegFate::Lost, 0),
        };
        self.journal.legs.fate(pull.leg, fate, |leg| (leg.blocks, leg.tokens, leg.why) = (blocks, tokens, why));
        self.arrived.notify_one();
    }

    /// Runs all prompts of a call; what comes back drops them all when it is dropped.
    pub(super) fn submit(self: &Arc<Self>, call: &Call, origin: Origin<'_>) -> Running {
        let (sink, outputs) = mpsc::unbounded_channel();
        let mut scheduler = self.scheduler();
        let mut ids = Vec::new();
        for (index, prompt) in call.prompts.iter().enumerate() {
            for copy in 0..call.n {
                let mut request = self.request(call, prompt, copy, index * call.n + copy, sink.clone());
                request.part = self.part(call, origin, index, copy);
                ids.push(scheduler.submit(request, Instant::now()));
            }
        }
        drop(scheduler);
        self.arrived.notify_one();
        Running { rank: Arc::clone(self), ids, outputs }
    }

    /// What one prompt of a call, and one copy of it, has to do with a handoff. An answer has room for what one request keeps: as in
    /// vLLM that is the first prompt's, and what the others keep nobody hears of.
    fn part(&self, call: &Call, origin: Origin<'_>, index: usize, copy: usize) -> Option<Part> {
        let leg = *origin.legs.get(index * call.n + copy)?;
        let part = match &call.wish {
            Wish::Prefill { transfer_id } => {
                let of_first = if index == 0 { origin.handed.clone() } else { Handed::default() };
                let key = transfer_id.clone().unwrap_or_else(|| self.internal_id(call, origin.id, index, copy, leg));
                Part::Prefill { key, leg, handed: of_first }
            }
            Wish::Decode(source) => Part::Decode { source: source.clone(), leg },
            Wish::None | Wish::Unusable => return None,
        };
        Some(part)
    }

    /// The request's identity inside the engine: the answer's, the number of the prompt where there can be several, and eight hex
    /// digits; a copy has its number before it.
    fn internal_id(&self, call: &Call, id: &str, index: usize, copy: usize, leg: LegId) -> String {
        let copy = if call.n > 1 { format!("{copy}_") } else { String::new() };
        let prompt = if call.kind == Kind::Completion { format!("-{index}") } else { String::new() };
        let suffix = Chance::seed_of(id, &[self.life, self.config.chance_seed, leg]) & 0xffff_ffff;
        format!("{copy}{id}{prompt}-{suffix:08x}")
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
            part: None,
            voice: self.identity.as_ref().map(|_| Voice { tokens: Arc::clone(&self.tokens), seed }),
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
        drop(scheduler);
        if self.rank.identity.is_some() {
            self.rank.settle();
            self.rank.arrived.notify_one();
        }
    }
}

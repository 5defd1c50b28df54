//! A simulated vLLM: OpenAI HTTP, a real block pool, and its event stream, with faults on demand.
//!
//! [`Engine::start`] runs one on the calling tokio runtime; the binary `sim-engine` runs one in a process of its own. It behaves like
//! vLLM 0.32 unless told another version; `fidelity.rs` holds it against recordings of the real one.
//!
//! What it adds for tests: the headers `x-sim-engine` and `x-sim-rank` in answers, and `/debug/blocks`, `/debug/requests`,
//! `/debug/counters`, `/debug/legs`, `/debug/handoffs`, `/debug/fault`, `/debug/forget`.

mod answers;
mod cache;
mod call;
pub(crate) mod chance;
mod clock;
mod config;
mod debug;
mod dialect;
mod faults;
#[cfg(test)]
mod fidelity;
mod gate;
mod handoff;
mod host;
mod http;
mod journal;
mod life;
mod metrics;
mod names;
mod pool;
mod ports;
mod publish;
mod rank;
mod scheduler;
mod server;
mod stats;
mod tokens;
mod wire;
mod zmtp;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

pub use config::{Adapter, EngineConfig, OutputHook, Outputs, Version};
pub use faults::{Death, FaultPlan, Faults};
pub use handoff::legs::{Handoffs, Leg, LegFate, LegKind};
pub use handoff::{KvConnector, KvRole};
pub use journal::{Counters, Seen};
pub use names::{Algorithm, Digest, Extra, KeyForm, Naming};
pub use publish::Published;
pub use wire::{Encoder, Event, Stored};

pub(crate) use gate::reset_on_close;

use gate::Gate;
use handoff::{bootstrap, side};
use journal::Journal;
use life::{Inherited, Life};
use ports::{Gates, RankGates};
use publish::Publisher;
use rank::Rank;
use tokens::Tokens;

/// How long [`Engine::stop`] waits for requests under way.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// A running engine. Dropping it is [`Engine::kill`] without the wait.
#[derive(Debug)]
pub struct Engine {
    inherited: Inherited,
    addresses: Addresses,
    running: Option<Tasks>,
    lives: u64,
    rank_restarts: u64,
}

/// Where an engine listens. Data-parallel ranks have the same HTTP port; rank r has the next r-th ports for the other two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// HTTP.
    pub http: SocketAddr,
    /// Event publisher of rank 0, unless switched off.
    pub events: Option<SocketAddr>,
    /// Replay socket of rank 0, unless switched off.
    pub replay: Option<SocketAddr>,
    /// Side channel of rank 0, with a connector; rank r has the next r-th port.
    pub side_channel: Option<SocketAddr>,
    /// Mooncake's bootstrap, of all ranks.
    pub bootstrap: Option<SocketAddr>,
}

#[derive(Debug)]
struct Tasks {
    life: Arc<Life>,
    stopping: watch::Sender<bool>,
    /// Set when the last connection is gone after `stopping`.
    ended: watch::Receiver<bool>,
    handles: Vec<JoinHandle<()>>,
    /// Each rank's own tasks.
    ranks: Vec<Vec<JoinHandle<()>>>,
}

impl Tasks {
    fn abort(&self) {
        self.handles.iter().chain(self.ranks.iter().flatten()).for_each(JoinHandle::abort);
    }
}

impl Engine {
    /// Starts an engine; it is ready when this returns.
    ///
    /// # Errors
    /// When an option makes no sense, a tokenizer file is unreadable, or a port is taken.
    #[expect(clippy::unused_async, reason = "it takes a runtime, and says so by its form")]
    pub async fn start(config: EngineConfig) -> anyhow::Result<Self> {
        config.check()?;
        let tokens = Tokens::load(config.tokenizer.as_deref())?;
        let faults = Arc::new(Faults::new(chance::Chance::seed_of(&config.name, &[config.chance_seed])));
        let inherited = Inherited {
            config: Arc::new(config),
            tokens: Arc::new(tokens),
            faults,
            journal: Arc::new(Journal::default()),
        };
        let gates = Gates::first(&inherited)?;
        let addresses = gates.addresses();
        let mut engine = Self { inherited, addresses, running: None, lives: 0, rank_restarts: 0 };
        engine.live(gates);
        Ok(engine)
    }

    /// Where it listens; the same over all its lives.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// `http://ADDRESS:PORT` and a path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addresses.http)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.inherited.config.name
    }

    /// What goes wrong with it, to be changed at any time.
    pub fn faults(&self) -> &Faults {
        &self.inherited.faults
    }

    /// Every request it has seen, `/debug/…` left out.
    pub fn requests(&self) -> Vec<Seen> {
        self.inherited.journal.requests()
    }

    /// Takes the requests that have ended out of what [`Engine::requests`] gives: a long run has more than it remembers.
    pub fn take_ended(&self) -> Vec<Seen> {
        self.inherited.journal.take_ended()
    }

    /// How many requests there are in each state.
    pub fn counters(&self) -> Counters {
        self.inherited.journal.counters()
    }

    /// Every leg of a handoff it has seen, and what became of it.
    pub fn legs(&self) -> Vec<Leg> {
        self.inherited.journal.legs.all()
    }

    /// Takes the legs whose fate is sealed out of what [`Engine::legs`] gives.
    pub fn take_ended_legs(&self) -> Vec<Leg> {
        self.inherited.journal.legs.take_ended()
    }

    /// What its handoffs add up to, and the leases and pinned blocks of this moment (none while it is dead).
    pub fn handoffs(&self) -> Handoffs {
        self.running.as_ref().map_or_else(|| self.inherited.journal.legs.sums(), |tasks| tasks.life.handoffs())
    }

    /// `remote_engine_id` of a rank in this life; none without a connector.
    pub fn engine_id(&self, rank: usize) -> Option<String> {
        self.rank(rank)?.identity().map(|identity| identity.engine_id.clone())
    }

    /// The names it holds and how many copies of each, over all its ranks; empty while it is dead.
    pub fn blocks(&self) -> BTreeMap<u64, usize> {
        self.running.as_ref().map(|tasks| tasks.life.blocks()).unwrap_or_default()
    }

    /// The names that one rank holds; empty while it is dead.
    pub fn blocks_of(&self, rank: usize) -> BTreeMap<u64, usize> {
        self.rank(rank).map(|rank| rank.blocks()).unwrap_or_default()
    }

    /// The names in one rank's host memory, in no order.
    pub fn host_blocks_of(&self, rank: usize) -> Vec<u64> {
        self.rank(rank).map(|rank| rank.host_blocks()).unwrap_or_default()
    }

    /// What rank 0 published in this life.
    pub fn published(&self) -> Published {
        self.published_of(0)
    }

    /// What a rank published in this life.
    pub fn published_of(&self, rank: usize) -> Published {
        self.rank(rank).map(|rank| rank.publisher.published()).unwrap_or_default()
    }

    /// Requests the model works on.
    pub fn running(&self) -> usize {
        self.running.as_ref().map_or(0, |tasks| tasks.life.running())
    }

    /// Requests that wait for the model.
    pub fn waiting(&self) -> usize {
        self.running.as_ref().map_or(0, |tasks| tasks.life.waiting())
    }

    /// `NONE_HASH` of rank 0 in this life, unless it is dead.
    pub fn none_hash(&self) -> Option<Digest> {
        self.rank(0).map(|rank| rank.none_hash)
    }

    /// Publishes a batch of rank 0 that no step made, for events the model never makes by itself.
    pub fn publish(&self, events: &[Event]) {
        if let Some(rank) = self.rank(0) {
            rank.publisher.publish(events);
        }
    }

    /// Loses a share of the idle cached blocks without telling anybody; how many.
    pub fn forget(&self, share: f64) -> usize {
        self.running.as_ref().map_or(0, |tasks| tasks.life.forget(share))
    }

    /// Makes rank 0 hold these prompts' full blocks, told in batches of at most `per_batch` blocks, as if it had computed them. It takes
    /// the calling thread for as long as the naming takes.
    pub fn preload(&self, prompts: impl Iterator<Item = Vec<u32>>, per_batch: usize) {
        if let Some(rank) = self.rank(0) {
            rank.preload(prompts, per_batch);
        }
    }

    fn rank(&self, number: usize) -> Option<Arc<Rank>> {
        self.running.as_ref()?.life.ranks().get(number).map(Arc::clone)
    }

    /// Ends as on SIGTERM: no new connection, requests under way are answered.
    pub async fn stop(&mut self) {
        let Some(tasks) = self.running.take() else { return };
        tasks.stopping.send_replace(true);
        let mut ended = tasks.ended.clone();
        if timeout(STOP_GRACE, ended.wait_for(|ended| *ended)).await.is_err() {
            tracing::warn!(engine = self.name(), "requests still under way after the grace time");
        }
        end(tasks).await;
        self.inherited.journal.legs.lost(None);
    }

    /// Ends as on SIGKILL: every socket goes at once.
    pub async fn kill(&mut self) {
        if let Some(tasks) = self.running.take() {
            end(tasks).await;
            self.inherited.journal.legs.lost(None);
        }
    }

    /// Kills it if it lives, and starts a new life on the same ports: sequence 0, empty pool, same faults.
    ///
    /// # Errors
    /// When a port cannot be taken again.
    pub async fn restart(&mut self) -> anyhow::Result<()> {
        self.kill().await;
        let gates = Gates::again(&self.inherited, self.addresses)?;
        self.live(gates);
        Ok(())
    }

    /// Starts a new life of one rank on the same ports: sequence 0, empty pool; its requests under way are cut off.
    ///
    /// # Errors
    /// When a port cannot be taken again, or there is no such rank.
    pub async fn restart_rank(&mut self, number: usize) -> anyhow::Result<()> {
        let handles = self.running.as_mut().and_then(|tasks| tasks.ranks.get_mut(number)).map(std::mem::take);
        for handle in handles.context("no such rank is running")? {
            handle.abort();
            // Aborted or ended: either way its sockets are gone.
            drop(handle.await);
        }
        self.inherited.journal.legs.lost(Some(number));
        let mut gates = RankGates::again(&self.inherited, self.addresses, number);
        // A subscriber's own task ends a moment after the socket's.
        for _ in 0..100 {
            if gates.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            gates = RankGates::again(&self.inherited, self.addresses, number);
        }
        let gates = gates?;
        let (rank, handles) = self.rank_tasks(number, gates);
        if let Some(tasks) = &mut self.running {
            tasks.life.replace(rank);
            tasks.ranks[number] = handles;
        }
        Ok(())
    }

    fn live(&mut self, gates: Gates) {
        let ranks: Vec<_> =
            gates.ranks.into_iter().enumerate().map(|(number, gates)| self.rank_tasks(number, gates)).collect();
        let (ranks, rank_handles): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
        let life = Arc::new(Life::new(self.inherited.clone(), self.lives, ranks));
        self.lives += 1;
        let (stopping, stop) = watch::channel(false);
        let faults = Arc::clone(&self.inherited.faults);
        let mut handles = vec![tokio::spawn(async move { faults.flap().await })];
        let (serving_ended, ended) = watch::channel(false);
        let serving = server::serve(Arc::clone(&life), gates.http, stop);
        handles.push(tokio::spawn(async move {
            serving.await;
            serving_ended.send_replace(true);
        }));
        handles.extend(gates.bootstrap.map(|gate| tokio::spawn(bootstrap::serve(Arc::clone(&life), gate))));
        self.running = Some(Tasks { life, stopping, ended, handles, ranks: rank_handles });
    }

    fn rank_tasks(&mut self, number: usize, gates: RankGates) -> (Arc<Rank>, Vec<JoinHandle<()>>) {
        let port = |gate: &Option<Gate>| gate.as_ref().map(|gate| gate.address().port());
        let ports = (port(&gates.events), port(&gates.replay));
        // A rank that restarts alone has had more lives than the engine.
        let life = self.lives + (self.rank_restarts << 32);
        if self.running.is_some() {
            self.rank_restarts += 1;
        }
        let side_channel = gates.side_channel.as_ref().map(Gate::address);
        let rank = Arc::new(Rank::new(&self.inherited, life, number, ports, side_channel));
        let mut handles = vec![tokio::spawn(Arc::clone(&rank).run())];
        handles.extend(gates.events.map(|gate| tokio::spawn(Publisher::serve_events(Arc::clone(&rank), gate))));
        handles.extend(gates.replay.map(|gate| tokio::spawn(Publisher::serve_replay(Arc::clone(&rank), gate))));
        if let Some(gate) = gates.side_channel {
            handles.push(tokio::spawn(side::serve(Arc::clone(&rank), gate)));
            handles.push(tokio::spawn(Arc::clone(&rank).expire_leases()));
        }
        (rank, handles)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(tasks) = &self.running {
            tasks.abort();
        }
    }
}

async fn end(tasks: Tasks) {
    tasks.abort();
    for handle in tasks.handles.into_iter().chain(tasks.ranks.into_iter().flatten()) {
        // Aborted or ended: either way its sockets are gone.
        drop(handle.await);
    }
}

//! A simulated vLLM: OpenAI HTTP, a real block pool, and its event stream, with faults on demand.
//!
//! [`Engine::start`] runs one on the calling tokio runtime; the binary `sim-engine` runs one in a process of its own. It behaves like
//! vLLM 0.32 unless told another version; `fidelity.rs` holds it against recordings of the real one.
//!
//! What it adds for tests: the header `x-sim-engine` in every answer, and `/debug/blocks`, `/debug/requests`, `/debug/counters`,
//! `/debug/fault`.

mod answers;
mod cache;
mod call;
mod chance;
mod clock;
mod config;
mod faults;
#[cfg(test)]
mod fidelity;
mod gate;
mod http;
mod journal;
mod life;
mod metrics;
mod names;
mod pool;
mod publish;
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
pub use faults::{FaultPlan, Faults};
pub use journal::{Counters, Seen};
pub use names::{Algorithm, Digest, Extra, Naming};
pub use publish::Published;
pub use wire::{Encoder, Event, Stored};

pub(crate) use gate::reset_on_close;

use gate::Gate;
use journal::Journal;
use life::{Inherited, Life};
use tokens::Tokens;

/// How long [`Engine::stop`] waits for requests under way.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// LoxiLB's rule for the replay port where nothing says otherwise.
const REPLAY_PORT_OFFSET: u16 = 1000;

/// Tries to find a free event port whose replay port is free too.
const PORT_TRIES: usize = 64;

/// A running engine. Dropping it is [`Engine::kill`] without the wait.
#[derive(Debug)]
pub struct Engine {
    inherited: Inherited,
    addresses: Addresses,
    running: Option<Tasks>,
    lives: u64,
}

/// Where an engine listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// HTTP.
    pub http: SocketAddr,
    /// Event publisher, unless switched off.
    pub events: Option<SocketAddr>,
    /// Replay socket, unless switched off.
    pub replay: Option<SocketAddr>,
}

#[derive(Debug)]
struct Tasks {
    life: Arc<Life>,
    stopping: watch::Sender<bool>,
    /// Set when the last connection is gone after `stopping`.
    ended: watch::Receiver<bool>,
    handles: Vec<JoinHandle<()>>,
}

impl Tasks {
    fn abort(&self) {
        self.handles.iter().for_each(JoinHandle::abort);
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
        let mut engine = Self { inherited, addresses, running: None, lives: 0 };
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

    /// How many requests are in each state.
    pub fn counters(&self) -> Counters {
        self.inherited.journal.counters()
    }

    /// The names it holds and how many copies of each; empty while it is dead.
    pub fn blocks(&self) -> BTreeMap<u64, usize> {
        self.running.as_ref().map(|tasks| tasks.life.blocks()).unwrap_or_default()
    }

    /// What it published in this life.
    pub fn published(&self) -> Published {
        self.running.as_ref().map(|tasks| tasks.life.publisher.published()).unwrap_or_default()
    }

    /// Requests the model works on.
    pub fn running(&self) -> usize {
        self.running.as_ref().map_or(0, |tasks| tasks.life.scheduler().running())
    }

    /// Requests that wait for the model.
    pub fn waiting(&self) -> usize {
        self.running.as_ref().map_or(0, |tasks| tasks.life.scheduler().waiting())
    }

    /// `NONE_HASH` of this life, unless it is dead.
    pub fn none_hash(&self) -> Option<Digest> {
        self.running.as_ref().map(|tasks| tasks.life.none_hash)
    }

    /// Publishes a batch that no step made, for events the model never makes by itself.
    pub fn publish(&self, events: &[Event]) {
        if let Some(tasks) = &self.running {
            tasks.life.publisher.publish(events);
        }
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
    }

    /// Ends as on SIGKILL: every socket goes at once.
    pub async fn kill(&mut self) {
        if let Some(tasks) = self.running.take() {
            end(tasks).await;
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

    fn live(&mut self, gates: Gates) {
        let ports =
            (self.addresses.events.map(|address| address.port()), self.addresses.replay.map(|address| address.port()));
        let life = Arc::new(Life::new(self.inherited.clone(), self.lives, ports));
        self.lives += 1;
        let (stopping, stop) = watch::channel(false);
        let faults = Arc::clone(&self.inherited.faults);
        let mut handles = vec![tokio::spawn(Arc::clone(&life).run()), tokio::spawn(async move { faults.flap().await })];
        let publisher = || Arc::clone(&life.publisher);
        handles.extend(gates.events.map(|gate| tokio::spawn(publisher().serve_events(gate))));
        handles.extend(gates.replay.map(|gate| tokio::spawn(publisher().serve_replay(gate))));
        let (serving_ended, ended) = watch::channel(false);
        let serving = server::serve(Arc::clone(&life), gates.http, stop);
        handles.push(tokio::spawn(async move {
            serving.await;
            serving_ended.send_replace(true);
        }));
        self.running = Some(Tasks { life, stopping, ended, handles });
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
    for handle in tasks.handles {
        // Aborted or ended: either way its sockets are gone.
        drop(handle.await);
    }
}

/// The listening sockets of one life.
struct Gates {
    http: Gate,
    events: Option<Gate>,
    replay: Option<Gate>,
}

impl Gates {
    fn first(inherited: &Inherited) -> anyhow::Result<Self> {
        let config = &inherited.config;
        let at = |port| SocketAddr::new(config.host, port);
        let http = Gate::bind(at(config.http_port), inherited.faults.http_gate())
            .with_context(|| format!("listen for HTTP on {}", at(config.http_port)))?;
        let tries = if config.events_port == 0 { PORT_TRIES } else { 1 };
        let mut events = event_gates(inherited);
        for _ in 1..tries {
            if events.is_ok() {
                break;
            }
            events = event_gates(inherited);
        }
        let (events, replay) = events?;
        Ok(Self { http, events, replay })
    }

    fn again(inherited: &Inherited, addresses: Addresses) -> anyhow::Result<Self> {
        let faults = &inherited.faults;
        let gate = |address, open| Gate::bind(address, open).with_context(|| format!("listen again on {address}"));
        Ok(Self {
            http: gate(addresses.http, faults.http_gate())?,
            events: addresses.events.map(|address| gate(address, faults.events_gate())).transpose()?,
            replay: addresses.replay.map(|address| gate(address, faults.replay_gate())).transpose()?,
        })
    }

    fn addresses(&self) -> Addresses {
        Addresses {
            http: self.http.address(),
            events: self.events.as_ref().map(Gate::address),
            replay: self.replay.as_ref().map(Gate::address),
        }
    }
}

fn event_gates(inherited: &Inherited) -> anyhow::Result<(Option<Gate>, Option<Gate>)> {
    let (config, faults) = (&inherited.config, &inherited.faults);
    if config.no_events {
        return Ok((None, None));
    }
    let at = |port| SocketAddr::new(config.host, port);
    let events = Gate::bind(at(config.events_port), faults.events_gate())
        .with_context(|| format!("listen for subscribers on {}", at(config.events_port)))?;
    if config.no_replay {
        return Ok((Some(events), None));
    }
    let port = match config.replay_port {
        Some(port) => port,
        None => events.address().port().checked_add(REPLAY_PORT_OFFSET).context("the event port + 1000 is no port")?,
    };
    let replay = Gate::bind(at(port), faults.replay_gate())
        .with_context(|| format!("listen for replay requests on {}", at(port)))?;
    Ok((Some(events), Some(replay)))
}

//! Virtual time: requests come, a policy chooses, engines take steps, events travel, and things go wrong.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use kvlb::contract::events::Event;

use super::fault::{Change, Plan};
use super::mirror::{Errand, Mirror, Told};
use super::model::{Engine, Gauges, Outcome};
use super::peers::{Peer, Sent, Sight};
use super::planted::Planted;
use super::policy::{How, Policy};
use super::workload::{Ask, Workload};
use crate::engine::chance::Chance;

/// Tries of one request. Source: kvlb's own limit.
const TRIES: usize = 3;
/// Batches that an engine keeps to replay. Source: vLLM's default.
const REPLAYED_MAX: usize = 10_000;
/// Longer than any run.
const STEPS_MAX: u64 = 200_000_000;

/// What became of one request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Record {
    /// Its stage.
    pub(super) stage: usize,
    /// Whether the figures tell of it.
    pub(super) counts: bool,
    /// Who got it last.
    pub(super) endpoint: Option<usize>,
    /// Prompt tokens, and those of them that were found.
    pub(super) tokens: u32,
    pub(super) hit: u32,
    /// What the policy believed would be found, in tokens.
    pub(super) believed: u32,
    /// Tokens of its answer.
    pub(super) output: u32,
    /// Another endpoint that might have been asked held more.
    pub(super) spilled: bool,
    pub(super) arrived: Duration,
    pub(super) started: Option<Duration>,
    pub(super) first: Option<Duration>,
    pub(super) done: Option<Duration>,
    /// Nobody took it, or who took it died.
    pub(super) failed: bool,
}

/// What a run brought.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    /// One for each request, in order.
    pub(super) records: Vec<Record>,
    /// Times that a request had to start over for want of blocks.
    pub(super) preempted: usize,
    /// What must not be.
    pub(super) breaches: Vec<String>,
}

#[derive(Debug)]
enum Happening {
    Arrives(usize),
    StepEnds { endpoint: usize, life: u32 },
    Told(Told),
    Changes(usize, Change),
}

/// What is due when; of equals what was planned first.
#[derive(Debug)]
struct Due(Duration, u64, Happening);

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

/// An engine and what the world knows of it.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a condition of its own")]
struct Host {
    engine: Engine,
    /// Grows with each death: what was planned for an earlier one is void.
    life: u32,
    alive: bool,
    busy: bool,
    slow: f64,
    next_batch: u64,
    /// Batches that nobody heard, and that a replay brings.
    unheard: VecDeque<Told>,
    drains: bool,
    probed_down: bool,
}

#[derive(Debug)]
struct Flight {
    errand: Errand,
    sent: Option<Sent>,
}

/// One run.
struct World<'a> {
    workload: &'a Workload,
    plan: &'a Plan,
    asks: Vec<Arc<Ask>>,
    mirror: Mirror,
    peer: Option<Peer>,
    planted: Option<Planted>,
    hosts: Vec<Host>,
    flights: Vec<Option<Flight>>,
    flying: usize,
    due: BinaryHeap<Reverse<Due>>,
    planned: u64,
    to_come: usize,
    next_stage: usize,
    now: Duration,
    chance: Chance,
    run: Run,
}

/// Runs a workload under a policy while things go wrong.
///
/// # Errors
/// When kvlb refuses the rule, or the run does not end.
pub(super) fn run(
    workload: &Workload,
    policy: &Policy,
    plan: &Plan,
    seed: u64,
    planted: Option<Planted>,
) -> Result<Run> {
    let build = workload.build;
    let mirror = Mirror::new(workload.engines, build.block_size, build.blocks, &policy.fields())?;
    let peer = match policy.how {
        How::Kvlb { .. } => None,
        How::Peer(kind) => Some(Peer::new(kind, build.block_size, seed)),
    };
    let asks: Vec<_> = workload.stages.iter().flat_map(|stage| stage.asks.iter().cloned()).collect();
    let mut world = World {
        workload,
        plan,
        mirror,
        peer,
        planted,
        hosts: (0..workload.engines).map(|_| Host::new(workload)).collect(),
        flights: asks.iter().map(|_| None).collect(),
        flying: 0,
        due: BinaryHeap::new(),
        planned: 0,
        to_come: 0,
        next_stage: 0,
        now: Duration::ZERO,
        chance: Chance::new(Chance::seed_of("world", &[seed])),
        run: Run { records: vec![Record::default(); asks.len()], ..Run::default() },
        asks,
    };
    for (at, endpoint, change) in &plan.changes {
        world.plan(*at, Happening::Changes(*endpoint, *change));
    }
    world.go()?;
    Ok(world.run)
}

impl Host {
    fn new(workload: &Workload) -> Self {
        Self {
            engine: Engine::new(workload.build),
            life: 0,
            alive: true,
            busy: false,
            slow: 1.0,
            next_batch: 0,
            unheard: VecDeque::new(),
            drains: false,
            probed_down: false,
        }
    }
}

impl World<'_> {
    fn plan(&mut self, at: Duration, happening: Happening) {
        self.planned += 1;
        self.due.push(Reverse(Due(at, self.planned, happening)));
    }

    fn go(&mut self) -> Result<()> {
        self.begin_stage();
        let mut steps: u64 = 0;
        while let Some(Reverse(Due(at, _, happening))) = self.due.pop() {
            steps += 1;
            ensure!(steps < STEPS_MAX, "the run does not end");
            self.now = at;
            match happening {
                Happening::Arrives(number) => self.arrives(number),
                Happening::StepEnds { endpoint, life } => self.step_ends(endpoint, life),
                Happening::Told(told) => self.told(&told),
                Happening::Changes(endpoint, change) => self.changes(endpoint, change)?,
            }
            if self.to_come == 0 && self.flying == 0 {
                self.begin_stage();
            }
        }
        self.run.preempted += self.hosts.iter().map(|host| host.engine.preempted()).sum::<usize>();
        self.judge();
        Ok(())
    }

    /// What must hold when all is over.
    fn judge(&mut self) {
        let loads = self.mirror.loads();
        if loads.iter().any(|load| *load > 0) {
            self.run.breaches.push(format!("loads are not back at zero: {loads:?}"));
        }
        let starved = |record: &Record| record.done.is_none() && !record.failed;
        for (number, record) in self.run.records.iter().enumerate().filter(|(_, record)| starved(record)) {
            let breach = format!("request {number} starved: it came at {:?} and never ended", record.arrived);
            self.run.breaches.push(breach);
        }
        if self.plan.lost == 0.0 && self.plan.lost_removals == 0.0 && self.plan.joins.is_zero() {
            for (at, host) in self.hosts.iter().enumerate().filter(|(_, host)| host.life == 0) {
                let (held, believed) = (host.engine.named(), self.mirror.blocks(at));
                if held != believed {
                    let breach = format!("endpoint {at} holds {held} blocks and is believed to hold {believed}");
                    self.run.breaches.push(breach);
                }
            }
        }
    }

    fn begin_stage(&mut self) {
        let Some(stage) = self.workload.stages.get(self.next_stage) else { return };
        let before: usize = self.workload.stages[..self.next_stage].iter().map(|stage| stage.asks.len()).sum();
        for (number, ask) in stage.asks.iter().enumerate() {
            let (number, arrived) = (before + number, self.now + ask.at);
            self.run.records[number] = Record {
                stage: self.next_stage,
                counts: ask.counts,
                tokens: ask.tokens,
                output: ask.output,
                arrived,
                ..Record::default()
            };
            self.plan(arrived, Happening::Arrives(number));
        }
        self.to_come = stage.asks.len();
        self.next_stage += 1;
    }

    /// A request finds an endpoint whose engine takes the connection.
    fn arrives(&mut self, number: usize) {
        self.to_come -= 1;
        let ask = Arc::clone(&self.asks[number]);
        let named = self.mirror.named(&ask);
        let mut tried = Vec::new();
        while tried.len() < TRIES {
            let depths = self.mirror.depths(&named);
            let candidates = self.mirror.candidates();
            let untried = |endpoint: usize| !tried.contains(&endpoint);
            let eligible = candidates.iter().filter(|c| c.eligible && untried(c.endpoint));
            let most = eligible.map(|c| depths[c.endpoint]).max().unwrap_or_default();
            let mut uncached = None;
            let chosen = match &mut self.peer {
                None => {
                    let decision = self.mirror.route(&named, &tried, self.now);
                    uncached = Some(decision.uncached_tokens);
                    decision.endpoint
                }
                Some(peer) => {
                    let mut candidates = candidates;
                    for candidate in &mut candidates {
                        candidate.eligible &= untried(candidate.endpoint);
                    }
                    let gauges: Vec<Gauges> = self.hosts.iter().map(|host| host.engine.gauges()).collect();
                    peer.choose(&ask, &Sight { candidates: &candidates, depths: &depths, gauges: &gauges })
                }
            };
            if self.planted == Some(Planted::Forgets) && number.is_multiple_of(Planted::EACH) {
                return;
            }
            let blind = self.planted == Some(Planted::AsksAnybody) && number.is_multiple_of(Planted::EACH);
            let chosen = if blind { Some(number / Planted::EACH % self.hosts.len()) } else { chosen };
            let Some(endpoint) = chosen else { break };
            let host = &self.hosts[endpoint];
            if tried.contains(&endpoint) || host.drains || host.probed_down {
                self.run.breaches.push(format!("request {number} went to endpoint {endpoint}, which is excluded"));
            }
            if !host.alive {
                tried.push(endpoint);
                continue;
            }
            let depth = depths.get(endpoint).copied().unwrap_or_default();
            let to_compute = || u64::from(ask.tokens.saturating_sub(depth * self.workload.build.block_size));
            let uncached = uncached.unwrap_or_else(to_compute);
            self.send(number, &ask, endpoint, (depth, uncached));
            self.run.records[number].spilled = depth < most;
            return;
        }
        self.run.records[number].failed = true;
    }

    fn send(&mut self, number: usize, ask: &Arc<Ask>, endpoint: usize, (depth, uncached): (u32, u64)) {
        let record = &mut self.run.records[number];
        record.endpoint = Some(endpoint);
        record.believed = (depth * self.workload.build.block_size).min(ask.tokens - 1);
        if !self.hosts[endpoint].engine.take(number, Arc::clone(ask)) {
            record.failed = true;
            return;
        }
        let Some(errand) = self.mirror.send(ask, endpoint, (depth, uncached), self.now) else { return };
        let sent = self.peer.as_mut().map(|peer| peer.sent(ask, endpoint, depth));
        self.flights[number] = Some(Flight { errand, sent });
        self.flying += 1;
        self.step(endpoint);
    }

    /// Has an engine begin its next step, where there is something to do.
    fn step(&mut self, endpoint: usize) {
        let host = &mut self.hosts[endpoint];
        if host.busy {
            return;
        }
        let Some(takes) = host.engine.begin() else { return };
        host.busy = true;
        let (life, ends) = (host.life, self.now + takes.mul_f64(host.slow));
        self.plan(ends, Happening::StepEnds { endpoint, life });
    }

    fn step_ends(&mut self, endpoint: usize, life: u32) {
        if self.hosts[endpoint].life != life {
            return;
        }
        let step = self.hosts[endpoint].engine.end();
        self.hosts[endpoint].busy = false;
        for (number, outcome) in step.outcomes {
            self.became(number, outcome);
        }
        if !step.events.is_empty() {
            self.tell(endpoint, step.events);
        }
        self.step(endpoint);
    }

    fn became(&mut self, number: usize, outcome: Outcome) {
        let record = &mut self.run.records[number];
        match outcome {
            Outcome::Started { hit } => {
                record.hit = hit;
                record.started = Some(self.now);
            }
            Outcome::First => {
                record.first = Some(self.now);
                let Some(flight) = &mut self.flights[number] else { return };
                self.mirror.answered(&mut flight.errand, self.now);
                if let (Some(peer), Some(sent)) = (&mut self.peer, &mut flight.sent) {
                    peer.answered(sent);
                }
            }
            Outcome::Done => {
                record.done = Some(self.now);
                self.ended(number);
            }
        }
    }

    fn ended(&mut self, number: usize) {
        let Some(flight) = self.flights[number].take() else { return };
        self.flying -= 1;
        if let (Some(peer), Some(sent)) = (&mut self.peer, flight.sent) {
            peer.ended(sent, &self.asks[number]);
        }
        if self.planted == Some(Planted::KeepsLoads) && number.is_multiple_of(Planted::EACH) {
            std::mem::forget(flight.errand);
        }
    }

    /// A batch leaves an engine.
    fn tell(&mut self, endpoint: usize, mut events: Vec<Event>) {
        let chance = &mut self.chance;
        let deaf = self.planted == Some(Planted::BelievesForEver);
        let lost_removals = if deaf { 1.0 } else { self.plan.lost_removals };
        events.retain(|event| !(matches!(event, Event::Removed(_)) && chance.happens(lost_removals)));
        let host = &mut self.hosts[endpoint];
        let told = Told { endpoint, seq: host.next_batch, events: Arc::new(events) };
        host.next_batch += 1;
        if self.now < self.plan.joins || chance.happens(self.plan.lost) {
            host.unheard.push_back(told);
            if host.unheard.len() > REPLAYED_MAX {
                host.unheard.pop_front();
            }
            return;
        }
        self.plan(self.now + self.plan.delay, Happening::Told(told));
    }

    fn told(&mut self, told: &Told) {
        let host = &mut self.hosts[told.endpoint];
        let before: Vec<Told> = host.unheard.iter().filter(|other| other.seq < told.seq).cloned().collect();
        host.unheard.retain(|other| other.seq > told.seq);
        let heard = self.mirror.heard(told.endpoint);
        let continues = heard.is_none_or(|heard| heard < told.seq);
        let missed = if self.plan.replays && continues { before } else { Vec::new() };
        self.mirror.told(told, &missed, self.now);
    }

    fn changes(&mut self, endpoint: usize, change: Change) -> Result<()> {
        if endpoint >= self.hosts.len() {
            self.hosts.push(Host::new(self.workload));
        }
        match change {
            Change::Dies => self.dies(endpoint),
            Change::ProbedDown => {
                if !self.hosts[endpoint].alive {
                    self.hosts[endpoint].probed_down = true;
                    self.mirror.set_probe(endpoint, false);
                }
            }
            Change::Lives => {
                self.hosts[endpoint].alive = true;
                self.hosts[endpoint].probed_down = false;
                self.mirror.set_probe(endpoint, true);
            }
            Change::Slows(times) => self.hosts[endpoint].slow = times,
            Change::Drains => {
                self.hosts[endpoint].drains = true;
                self.mirror.set_weight(endpoint, 0)?;
            }
            Change::Serves => {
                self.hosts[endpoint].drains = false;
                self.mirror.set_weight(endpoint, 1)?;
            }
        }
        Ok(())
    }

    fn dies(&mut self, endpoint: usize) {
        let host = &mut self.hosts[endpoint];
        let lost = host.engine.unfinished();
        self.run.preempted += host.engine.preempted();
        let (life, slow, drains) = (host.life + 1, host.slow, host.drains);
        *host = Host { life, slow, drains, alive: false, probed_down: host.probed_down, ..Host::new(self.workload) };
        for number in lost {
            self.run.records[number].failed = true;
            self.ended(number);
        }
    }
}

//! Engines that fail in every way under many clients, and a judge that compares what each client got with what the engines
//! say of its request.
//!
//! Everything is random and comes from one seed. Each engine has a task that troubles it ([`trouble`]), each client sends
//! one request after the other in its own manner ([`clients`]), and [`judge`] holds the table of what may come of what.

mod clients;
mod judge;
mod trouble;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::engine::{Engine, EngineConfig, Handoffs, KvConnector, Outputs};
use crate::harness::kvlb::{Kvlb, KvlbConfig};
use crate::harness::stage::Metrics;
use crate::harness::{eventually, free_ports, temp_dir};
use clients::{Client, Told};
use judge::{Fate, Judge};

pub use judge::Verdicts;

/// Tokens in a block.
const BLOCK: usize = 16;
/// How long everything may take to be quiet after the last trouble.
const QUIET: Duration = Duration::from_mins(1);
/// Longer than kvlb keeps an idle connection to an engine.
const IDLE: Duration = Duration::from_secs(6);
/// Requests after the storm, each of which must be answered.
const AFTERWARDS: usize = 200;
/// How long engines keep blocks that nobody has fetched: beyond all that kvlb's limits let a decode leg wait.
const LEASE: Duration = Duration::from_secs(10);
/// How often the engines' journals are read: they remember a limited number of requests.
const READ_EVERY: Duration = Duration::from_secs(1);
/// How often the progress is told.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How long engines are troubled.
    pub length: Duration,
    /// Clients at a time.
    pub clients: usize,
    /// Engines.
    pub engines: usize,
    /// The first half of them compute prompts, the others fetch the blocks and generate.
    pub pd: bool,
    /// Where all chance comes from.
    pub seed: u64,
    /// Arguments of `kvlb up` beyond the usual ones.
    pub args: Vec<String>,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Report {
    /// What the judge found.
    pub verdicts: Verdicts,
    /// How often engines were troubled, by kind.
    pub troubles: BTreeMap<&'static str, usize>,
    /// What is left over though everything is quiet: connections, counters, descriptors, panics.
    pub leftovers: Vec<String>,
    /// kvlb's resident memory in bytes, before and after.
    pub resident: [u64; 2],
}

impl Plan {
    /// Engines that compute prompts for others.
    fn prefills(&self) -> usize {
        if self.pd { self.engines / 2 } else { 0 }
    }
}

impl Report {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.verdicts.violations.is_empty() && self.leftovers.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "troubles: {:?}", self.troubles)?;
        write!(f, "{}", self.verdicts)?;
        writeln!(f, "resident memory: {} KB before, {} KB after", self.resident[0] >> 10, self.resident[1] >> 10)?;
        for leftover in &self.leftovers {
            writeln!(f, "LEFT OVER: {leftover}")?;
        }
        write!(f, "{}", if self.is_clean() { "clean" } else { "NOT CLEAN" })
    }
}

/// Lets the storm go over kvlb; `tell` gets a line of progress now and then.
///
/// # Errors
/// When kvlb or an engine cannot be started, or does not come to rest afterwards. What the judge finds is in the report.
pub async fn run(plan: &Plan, tell: impl Fn(&str)) -> anyhow::Result<Report> {
    let [port] = free_ports()?;
    let vip = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut engines = Vec::new();
    for number in 0..plan.engines {
        let connector = if plan.pd { KvConnector::Nixl } else { KvConnector::None };
        let config =
            EngineConfig { kv_connector: connector, kv_lease_s: LEASE.as_secs_f64(), ..engine(number, plan.seed)? };
        engines.push(Engine::start(config).await.context("start an engine")?);
    }
    let dir = temp_dir()?;
    let state = dir.path().join("state").display().to_string();
    let mut args = vec!["--datapath".to_owned(), "none".to_owned(), "--state-dir".to_owned(), state];
    args.extend(plan.args.iter().cloned());
    let config = KvlbConfig { args, ..KvlbConfig::default() }.env("LLB_KV_NONE_HASH_SEED", "0");
    let kvlb = Kvlb::start(config).await?;
    create_rule(&kvlb, vip, &engines, plan.prefills()).await?;
    let judge = Arc::new(Judge::new(plan.prefills()));
    // Everything was there once, and connections are counted from here.
    afterwards(vip, plan.seed, &judge, "before").await?;
    sleep(IDLE).await;
    let before = Footprint::of(&kvlb)?;

    let until = Instant::now() + plan.length;
    let (engines, troubles) = storm(plan, vip, engines, &judge, until, &tell).await?;

    tell("the storm is over; waiting until everything is quiet");
    quiet(&kvlb, &engines).await?;
    afterwards(vip, plan.seed, &judge, "after").await?;
    sleep(IDLE).await;
    quiet(&kvlb, &engines).await?;
    read_journals(&engines, &judge);
    let after = Footprint::of(&kvlb)?;
    let mut leftovers = after.leftovers(&before);
    leftovers.extend(uncounted(&kvlb, &judge).await?);
    if plan.pd {
        // What nobody fetched is freed in time.
        sleep(LEASE).await;
        leftovers.extend(engines.iter().enumerate().flat_map(|(number, engine)| kept(number, &engine.handoffs())));
    }
    kvlb.stop().await?;
    let verdicts = judge.verdicts();
    Ok(Report { verdicts, troubles, leftovers, resident: [before.resident, after.resident] })
}

/// Has clients ask and engines fail until it is time, and all clients have ended.
async fn storm(
    plan: &Plan,
    vip: SocketAddr,
    engines: Vec<Engine>,
    judge: &Arc<Judge>,
    until: Instant,
    tell: &impl Fn(&str),
) -> anyhow::Result<(Vec<Engine>, BTreeMap<&'static str, usize>)> {
    let count = engines.len();
    let places: Arc<Vec<_>> =
        Arc::new(engines.into_iter().map(|engine| Arc::new(tokio::sync::Mutex::new(engine))).collect());
    let (mut troubling, troubles) = (JoinSet::new(), Arc::new(Mutex::new(BTreeMap::new())));
    for (number, engine) in places.iter().enumerate() {
        let seed = seed(plan.seed, 1_000_003, number);
        troubling.spawn(trouble::go_on(Arc::clone(engine), seed, until, Arc::clone(&troubles)));
    }
    let mut asking = JoinSet::new();
    for number in 0..plan.clients {
        let (client, judge) = (Client::new(vip, number.to_string(), seed(plan.seed, 7_919, number)), Arc::clone(judge));
        asking.spawn(client.ask_until(until, judge));
    }
    let reading = async {
        let began = Instant::now();
        let mut told = began;
        loop {
            sleep(READ_EVERY).await;
            for (number, engine) in places.iter().enumerate() {
                let ended = engine.lock().await.take_ended();
                judge.saw(number, ended.iter().filter_map(Fate::of));
            }
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                tell(&format!("{:3.0} s: {}", began.elapsed().as_secs_f64(), judge.progress()));
            }
        }
    };
    tokio::select! {
        _ = asking.join_all() => {}
        () = reading => {}
    }
    while let Some(ended) = troubling.join_next().await {
        ended.context("trouble an engine")??;
    }
    let places = Arc::into_inner(places).context("have the engines back")?;
    let engines: Vec<_> = places.into_iter().filter_map(Arc::into_inner).map(tokio::sync::Mutex::into_inner).collect();
    ensure!(engines.len() == count, "an engine is still troubled");
    let troubles = troubles.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Ok((engines, troubles))
}

/// A seed of its own for each of many.
fn seed(of_all: u64, kind: u64, number: usize) -> u64 {
    of_all.wrapping_mul(kind).wrapping_add(u64::try_from(number).unwrap_or_default() + 1)
}

/// Engines whose every answer follows from the prompt.
fn engine(number: usize, seed: u64) -> anyhow::Result<EngineConfig> {
    let [http_port, events_port, replay_port] = free_ports()?;
    Ok(EngineConfig {
        http_port,
        events_port,
        replay_port: Some(replay_port),
        python_hash_seed: Some("0".to_owned()),
        chance_seed: seed,
        prefill_us_per_token: 5.0,
        decode_ms_per_token: 3.0,
        outputs: Outputs::forced(|prompt, _| Some(clients::answer_to(prompt))),
        ..EngineConfig::named(&format!("engine-{number}"))
    })
}

/// What is wrong with an engine's handoffs, now that all is quiet.
fn kept(number: usize, handoffs: &Handoffs) -> Vec<String> {
    let mut wrong = Vec::new();
    if handoffs.leases_open > 0 || handoffs.blocks_pinned > 0 {
        wrong.push(format!(
            "engine {number} keeps {} blocks in {} leases",
            handoffs.blocks_pinned, handoffs.leases_open
        ));
    }
    if handoffs.granted != handoffs.read + handoffs.expired + handoffs.lost {
        wrong.push(format!("engine {number} does not know what became of its leases: {handoffs:?}"));
    }
    if handoffs.pulled_foreign > 0 {
        wrong.push(format!("engine {number} fetched blocks of other requests {} times", handoffs.pulled_foreign));
    }
    wrong
}

async fn create_rule(kvlb: &Kvlb, vip: SocketAddr, engines: &[Engine], prefills: usize) -> anyhow::Result<()> {
    let endpoint = |(number, engine): (usize, &Engine)| {
        let at = engine.addresses();
        let role = if prefills == 0 { 0 } else { 1 + u8::from(number >= prefills) };
        json!({"endpointIP": at.http.ip(), "targetPort": at.http.port(), "weight": 1, "ep_role": role,
            "kvZmqPort": at.events.map(|at| at.port()), "kvReplayPort": at.replay.map(|at| at.port())})
    };
    let endpoints: Vec<_> = engines.iter().enumerate().map(endpoint).collect();
    let rule = json!({
        "serviceArguments": {
            "externalIP": vip.ip(), "port": vip.port(), "protocol": "tcp", "sel": 0, "mode": 4,
            "monitor": true, "probeTimeout": 1, "probeRetries": 2,
            "kvExactMode": if prefills == 0 { 3 } else { 1 }, "timeoutPdPrefill": 3000, "timeoutPdHandoff": 2000, "kvBlockSize": BLOCK, "kvHashAlgo": "sha256_cbor", "decisionHeaders": true,
            "timeoutFirstByte": 3000, "inactiveTimeOut": 3, "clientHalfClose": "allow",
        },
        "endpoints": endpoints,
    });
    let (status, answer) = kvlb.api("POST", "/netlox/v1/config/loadbalancer", Some(&rule)).await?;
    ensure!(status == 200, "the rule is refused with {status}: {answer}");
    eventually(QUIET, "the VIP is served", async || kvlb.connect(vip).await.is_ok()).await
}

/// Requests that nothing troubles: every one of them is answered.
async fn afterwards(vip: SocketAddr, seed: u64, judge: &Judge, when: &str) -> anyhow::Result<()> {
    let mut client = Client::new(vip, "first".to_owned(), seed);
    // An engine that was down a moment ago may be found up a moment later.
    let served = async || client.ask_plainly(judge, when).await.is_ok_and(|told| told.is_whole());
    eventually(QUIET, "a request is answered", served).await?;
    let mut client = Client::new(vip, "then".to_owned(), seed);
    for number in 0..AFTERWARDS {
        let told = client.ask_plainly(judge, when).await?;
        ensure!(
            matches!(&told, Told::Answer(_)) && told.is_whole(),
            "{when} the storm request {number} came to {told:?}"
        );
    }
    Ok(())
}

/// Waits until neither kvlb nor any engine has a request.
async fn quiet(kvlb: &Kvlb, engines: &[Engine]) -> anyhow::Result<()> {
    eventually(QUIET, "nothing is in flight", async || {
        let busy = engines.iter().any(|engine| engine.counters().running > 0 || engine.running() > 0);
        !busy && kvlb.metrics().await.is_ok_and(|metrics| metrics.sum("kvlb_endpoint_load") == 0.0)
    })
    .await
}

fn read_journals(engines: &[Engine], judge: &Judge) {
    for (number, engine) in engines.iter().enumerate() {
        judge.saw(number, engine.take_ended().iter().filter_map(Fate::of));
    }
}

/// What of kvlb's own counters does not agree with the clients.
async fn uncounted(kvlb: &Kvlb, judge: &Judge) -> anyhow::Result<Vec<String>> {
    let metrics: Metrics = kvlb.metrics().await?;
    let mut wrong = Vec::new();
    for series in ["kvlb_panics_total", "kvlb_endpoint_load", "kvlb_client_connections_open"] {
        let value = metrics.sum(series);
        if value != 0.0 {
            wrong.push(format!("{series} is {value}"));
        }
    }
    let (certain, possible) = judge.requests();
    let counted = metrics.sum("kvlb_requests_total");
    #[expect(clippy::cast_precision_loss, reason = "far fewer requests than a float counts")]
    if counted < certain as f64 || counted > (certain + possible) as f64 {
        wrong.push(format!(
            "kvlb counted {counted} requests; clients sent {certain}, and {possible} that may not have come"
        ));
    }
    Ok(wrong)
}

/// What kvlb's process holds.
#[derive(Clone, Copy, Debug)]
struct Footprint {
    descriptors: usize,
    resident: u64,
}

impl Footprint {
    fn of(kvlb: &Kvlb) -> anyhow::Result<Self> {
        let process = format!("/proc/{}", kvlb.id());
        let descriptors = std::fs::read_dir(format!("{process}/fd")).context("list kvlb's descriptors")?.count();
        let status = std::fs::read_to_string(format!("{process}/status")).context("read kvlb's status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("find kvlb's memory")?;
        let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().context("read kvlb's memory")?;
        Ok(Self { descriptors, resident: kilobytes << 10 })
    }

    fn leftovers(&self, before: &Self) -> Vec<String> {
        // A probe, a scrape or our own question may be under way, at each engine.
        const PASSING: usize = 16;
        let more = self.descriptors.saturating_sub(before.descriptors);
        (more > PASSING).then(|| format!("{more} descriptors more than before")).into_iter().collect()
    }
}

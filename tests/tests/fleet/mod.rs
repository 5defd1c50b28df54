//! kvlb in front of simulated engines, for tests that compare the two sides.
//!
//! A rule has one event port for all its endpoints, so each engine gets a loopback address of its own, from a network that no
//! other fleet on this machine has.

#![allow(dead_code, unused_imports, reason = "each test program uses its own part")]

pub(crate) mod trio;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kvlb_tests::engine::{Digest, Engine, EngineConfig, Naming, Version};
pub(crate) use kvlb_tests::harness::dice::Dice;
use kvlb_tests::harness::http::{Answer, Client};
use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig, binary};
use kvlb_tests::harness::stage::Metrics;
use kvlb_tests::harness::{eventually, temp_dir, until_some};
use serde_json::{Value, json};

/// Tokens per block.
pub(crate) const BLOCK: usize = 16;
/// What kvlb promises: a second after something happened, inventory and engine agree.
pub(crate) const PROMISED: Duration = Duration::from_secs(1);
/// What has no promise of its own is expected at once; a busy machine gets more.
pub(crate) const SOON: Duration = Duration::from_secs(20);
/// Where completions are asked for.
pub(crate) const PATH: &str = "/v1/completions";

const MODEL: &str = "tiny";
const SEED: &str = "0";
const HTTP_PORT: u16 = 8000;
const EVENT_PORT: u16 = 5557;
const REPLAY_PORT: u16 = 6557;
const VIP_PORT: u16 = 8080;
const API_PORT: u16 = 11_111;
/// Held by the fleet that uses a network; below the ports that the kernel gives out, as all of these.
const CLAIM_PORT: u16 = 10_007;

/// An engine that answers at once.
pub(crate) fn quick(name: &str) -> EngineConfig {
    EngineConfig { prefill_us_per_token: 0.0, decode_ms_per_token: 0.0, ..EngineConfig::named(name) }
}

/// What a fleet is made of.
#[derive(Default)]
pub(crate) struct Setup {
    /// The engines; hosts, ports and seed are the fleet's business.
    pub(crate) engines: Vec<EngineConfig>,
    /// Endpoints that are no simulated engines, behind these in the rule.
    pub(crate) others: Vec<SocketAddr>,
    /// Whose `PYTHONHASHSEED` the engines have.
    pub(crate) seeds: Seeds,
    /// Fields of `serviceArguments` beyond the usual ones; null leaves a usual one out.
    pub(crate) rule: Value,
    /// Arguments of `kvlb up` beyond the usual ones.
    pub(crate) args: Vec<&'static str>,
    /// kvlb's environment.
    pub(crate) env: Vec<(&'static str, &'static str)>,
}

/// Whose seed an engine hashes with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Seeds {
    /// kvlb's and the engines' are the same.
    #[default]
    Shared,
    /// Each engine's configuration says its own; kvlb has its own.
    Own,
    /// As `Own`, and kvlb is told none.
    Unset,
}

/// kvlb, one rule, its engines.
pub(crate) struct Fleet {
    pub(crate) kvlb: Kvlb,
    pub(crate) engines: Vec<Engine>,
    /// Where clients go.
    pub(crate) vip: SocketAddr,
    config: KvlbConfig,
    rule: Value,
    id: u64,
    _dir: tempfile::TempDir,
    network: Network,
}

impl Fleet {
    /// Starts everything; each event stream is up when this returns.
    pub(crate) async fn start(setup: Setup) -> anyhow::Result<Self> {
        let network = Network::claim()?;
        let mut engines = Vec::new();
        for (number, config) in (1..).zip(setup.engines) {
            let mut config = placed(network.host(number), config);
            if setup.seeds == Seeds::Shared {
                config.python_hash_seed = Some(SEED.to_owned());
            }
            engines.push(Engine::start(config).await?);
        }
        let dir = temp_dir()?;
        let (api, state) = (network.at(200, API_PORT).to_string(), dir.path().join("state").display().to_string());
        let mut args = vec!["--datapath", "none", "--api", &api, "--state-dir", &state];
        args.extend(setup.args);
        let mut config = KvlbConfig::with(&args);
        if setup.seeds != Seeds::Unset {
            config = config.env("LLB_KV_NONE_HASH_SEED", SEED);
        }
        for (name, value) in setup.env {
            config = config.env(name, value);
        }
        let vip = network.at(100, VIP_PORT);
        let rule = rule(vip, &engines, &setup.others, &setup.rule);
        let kvlb = Kvlb::start(config.clone()).await?;
        let mut fleet = Self { kvlb, engines, vip, config, rule, id: 0, _dir: dir, network };
        fleet.id = fleet.put_rule(|_| ()).await?;
        fleet.ready().await?;
        Ok(fleet)
    }

    /// Writes the rule again, changed; gives its number.
    pub(crate) async fn put_rule(&self, change: impl FnOnce(&mut Value)) -> anyhow::Result<u64> {
        let mut rule = self.rule.clone();
        change(&mut rule);
        let (status, answer) = self.kvlb.api("POST", "/netlox/v1/config/loadbalancer", Some(&rule)).await?;
        ensure!(status == 200, "the rule is refused with {status}: {answer}");
        answer["id"].as_u64().context("read the rule's id")
    }

    /// Waits until the VIP takes connections and every event stream that can be up is.
    async fn ready(&self) -> anyhow::Result<()> {
        eventually(SOON, "the VIP is served", async || Client::connect(self.vip).await.is_ok()).await?;
        for (number, engine) in self.engines.iter().enumerate() {
            if engine.addresses().events.is_some() {
                self.connected(number, true).await?;
            }
        }
        Ok(())
    }

    /// Ends an engine and starts another at its addresses.
    pub(crate) async fn replace(&mut self, number: usize, config: EngineConfig) -> anyhow::Result<()> {
        let host = self.engine_at(number).ip();
        self.engines[number].kill().await;
        self.engines[number] = Engine::start(placed(host, config)).await?;
        Ok(())
    }

    /// Runs the CLI against this fleet's API, with `input` as its standard input; exit code and standard output.
    pub(crate) fn cli(&self, args: &[&str], input: &str) -> anyhow::Result<(Option<i32>, String)> {
        let api = self.kvlb.api_address();
        let mut child = std::process::Command::new(binary("kvlb")?)
            .args(args)
            .env("KVLB_APISERVER", api.ip().to_string())
            .env("KVLB_APIPORT", api.port().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the CLI")?;
        // A command that reads no input closes it.
        drop(child.stdin.take().map(|mut stdin| stdin.write_all(input.as_bytes())));
        let output = child.wait_with_output().context("wait for the CLI")?;
        Ok((output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// The rule's number.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// One reading of all metrics.
    pub(crate) async fn metrics(&self) -> anyhow::Result<Metrics> {
        self.kvlb.metrics().await
    }

    /// One completion over a connection of its own.
    pub(crate) async fn ask(&self, body: &Value) -> anyhow::Result<Answer> {
        self.ask_with(&[], body).await
    }

    /// The same with header fields.
    pub(crate) async fn ask_with(&self, headers: &[(&str, &str)], body: &Value) -> anyhow::Result<Answer> {
        let answer = Talker::new(self.vip).ask(headers, body).await?;
        ensure!(answer.head.status == 200, "{}: {}", answer.head.status, answer.body.text());
        Ok(answer)
    }

    /// How many blocks of a request an endpoint holds as a leading run, as `explain` says.
    pub(crate) async fn depth(&self, number: usize, body: &Value) -> anyhow::Result<u64> {
        let explained = self.explain(body).await?;
        explained["candidates"][number]["depth"].as_u64().with_context(|| format!("no depth in {explained}"))
    }

    /// Waits until an endpoint's status is as wanted, and gives it.
    pub(crate) async fn status_when(
        &self,
        number: usize,
        what: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let mut last = Value::Null;
        let found = until_some(SOON, what, async || {
            last = self.status(number).await.ok()?;
            wanted(&last).then(|| last.clone())
        });
        let found = found.await;
        found.with_context(|| format!("endpoint {number}: {last}; the log ends:\n{}", self.log_end()))
    }

    /// Kills kvlb and starts it again on the same state.
    pub(crate) async fn restart_kvlb(&mut self) -> anyhow::Result<()> {
        self.kvlb.signal(nix::sys::signal::Signal::SIGKILL)?;
        self.kvlb.ended(SOON).await?;
        self.kvlb = Kvlb::start(self.config.clone()).await?;
        self.ready().await
    }

    /// Starts kvlb again on the same state, after it has ended; waits for its VIP only.
    pub(crate) async fn start_kvlb(&mut self) -> anyhow::Result<()> {
        self.kvlb = Kvlb::start(self.config.clone()).await?;
        eventually(SOON, "the VIP is served", async || Client::connect(self.vip).await.is_ok()).await
    }

    /// Where an engine serves HTTP.
    pub(crate) fn engine_at(&self, number: usize) -> SocketAddr {
        self.engines[number].addresses().http
    }

    /// The position of the engine that gave an answer.
    pub(crate) fn who(&self, answer: &Answer) -> Option<usize> {
        self.engines.iter().position(|engine| engine.name() == answer.engine())
    }

    /// An endpoint as the API shows it.
    pub(crate) async fn endpoint(&self, number: usize) -> anyhow::Result<Value> {
        let (_, all) = self.kvlb.api("GET", "/netlox/v1/config/loadbalancer/all", None).await?;
        Ok(all["lbAttr"][0]["endpoints"][number].clone())
    }

    /// An endpoint's `kvStatus`.
    pub(crate) async fn status(&self, number: usize) -> anyhow::Result<Value> {
        Ok(self.endpoint(number).await?["kvStatus"].clone())
    }

    /// Waits until an endpoint's event stream is up, at both ends, or down.
    pub(crate) async fn connected(&self, number: usize, wanted: bool) -> anyhow::Result<()> {
        let what = format!("the event stream of engine {number} is {}", if wanted { "up" } else { "down" });
        eventually(SOON, &what, async || {
            // A publisher learns of a subscription a moment after the connection, and does not say so.
            let subscribed = self.engines[number].published().subscribers > 0;
            let shown = self.status(number).await.is_ok_and(|status| status["connected"] == json!(wanted));
            shown && (subscribed || !wanted)
        })
        .await
    }

    /// A counter or a whole gauge of kvlb's metrics, written as `name{label="value"}`; 0 where it is absent.
    pub(crate) async fn count(&self, series: &str) -> anyhow::Result<u64> {
        self.total(|line| line == series).await
    }

    /// The sum over all series of a family of whole numbers.
    pub(crate) async fn sum(&self, family: &str) -> anyhow::Result<u64> {
        self.total(|line| line.split('{').next() == Some(family)).await
    }

    /// What befell an endpoint's event stream: `kvlb_event_stream_total`.
    pub(crate) async fn stream(&self, number: usize, what: &str) -> anyhow::Result<u64> {
        let labels = format!("service=\"{}\",what=\"{what}\"", self.id);
        self.count(&format!("kvlb_event_stream_total{{ep_idx=\"{number}\",{labels}}}")).await
    }

    /// Requests in flight at an endpoint: `kvlb_endpoint_load`.
    pub(crate) async fn load(&self, number: usize) -> anyhow::Result<u64> {
        self.count(&format!("kvlb_endpoint_load{{ep_idx=\"{number}\",service=\"{}\"}}", self.id)).await
    }

    async fn total(&self, wanted: impl Fn(&str) -> bool) -> anyhow::Result<u64> {
        let page = self.kvlb.ask("GET", "/netlox/v1/metrics", None).await?;
        ensure!(page.head.status == 200, "the metrics page is refused with {}", page.head.status);
        let text = page.body.text();
        let series = text.lines().filter_map(|line| line.rsplit_once(' ')).filter(|(series, _)| wanted(series));
        series.map(|(series, value)| value.parse::<u64>().with_context(|| format!("read {series}"))).sum()
    }

    /// What kvlb believes an engine to hold.
    pub(crate) async fn inventory(&self, number: usize) -> anyhow::Result<BTreeSet<u64>> {
        let rule = self.id;
        let path = format!("/netlox/v1/config/ai/kv/inventory?service_id={rule}&ep_idx={number}");
        let (status, listing) = self.kvlb.api("GET", &path, None).await?;
        ensure!(status == 200, "the inventory is refused with {status}: {listing}");
        let blocks = listing["blocks"].as_array().context("read the blocks")?;
        ensure!(listing["total"] == json!(blocks.len()), "not all blocks are listed: {}", listing["total"]);
        blocks.iter().map(|block| block["hash_uint64"].as_u64().context("read a block's name")).collect()
    }

    /// What an engine holds.
    pub(crate) fn dump(&self, number: usize) -> BTreeSet<u64> {
        self.engines[number].blocks().into_keys().collect()
    }

    /// Waits until inventory and engine agree, as promised, at every endpoint.
    pub(crate) async fn agree(&self) -> anyhow::Result<()> {
        for number in 0..self.engines.len() {
            self.holds(number, &self.dump(number)).await?;
        }
        Ok(())
    }

    /// Waits until an inventory is exactly this, as promised.
    pub(crate) async fn holds(&self, number: usize, expected: &BTreeSet<u64>) -> anyhow::Result<()> {
        let mut last = None;
        let waited = until_some(PROMISED, "the inventory is right", async || {
            let held = self.inventory(number).await.ok()?;
            let right = held == *expected;
            last = Some(held);
            right.then_some(())
        });
        let Err(late) = waited.await else { return Ok(()) };
        let held = last.unwrap_or_default();
        let (missing, ghosts) = (expected.difference(&held).count(), held.difference(expected).count());
        Err(late.context(format!(
            "endpoint {number}: {} of {} blocks, {missing} missing, {ghosts} ghosts; {}; the log ends:\n{}",
            held.len(),
            expected.len(),
            self.status(number).await?,
            self.log_end(),
        )))
    }

    /// Has an engine compute a prompt, past kvlb.
    pub(crate) async fn warm(&self, number: usize, tokens: &[u32]) -> anyhow::Result<()> {
        let answer = Talker::new(self.engine_at(number)).ask(&[], &completion(tokens, 1)).await?;
        ensure!(answer.head.status == 200, "engine {number} answers {}", answer.body.text());
        Ok(())
    }

    /// What would become of a completion request.
    pub(crate) async fn explain(&self, body: &Value) -> anyhow::Result<Value> {
        let rule = self.id;
        let path = format!("/netlox/v1/config/ai/kv/explain?service_id={rule}");
        let (status, explained) = self.kvlb.api("POST", &path, Some(body)).await?;
        ensure!(status == 200, "explain answers {status}: {explained}");
        Ok(explained)
    }

    fn log_end(&self) -> String {
        let log = self.kvlb.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }
}

fn placed(host: IpAddr, config: EngineConfig) -> EngineConfig {
    EngineConfig { host, http_port: HTTP_PORT, events_port: EVENT_PORT, replay_port: Some(REPLAY_PORT), ..config }
}

fn rule(vip: SocketAddr, engines: &[Engine], others: &[SocketAddr], more: &Value) -> Value {
    let mut service = json!({
        "externalIP": vip.ip(), "port": vip.port(), "protocol": "tcp", "sel": 0, "mode": 4, "monitor": false,
        "kvExactMode": 3, "kvBlockSize": BLOCK, "kvHashAlgo": "sha256_cbor", "kvZmqPort": EVENT_PORT,
        "decisionHeaders": true,
    });
    for (name, value) in more.as_object().into_iter().flatten() {
        service[name] = value.clone();
    }
    if let Some(fields) = service.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
    let places = engines.iter().map(|engine| engine.addresses().http).chain(others.iter().copied());
    let endpoints = places.map(|at| json!({"endpointIP": at.ip(), "targetPort": at.port(), "weight": 1}));
    json!({"serviceArguments": service, "endpoints": endpoints.collect::<Vec<_>>()})
}

/// A /24 of the loopback network that nobody else on this machine uses, for as long as this lives.
pub(crate) struct Network {
    prefix: [u8; 3],
    _claim: TcpListener,
}

impl Network {
    fn claim() -> anyhow::Result<Self> {
        // Fleets of one process never share a number, whose sockets may close late; those of others begin elsewhere.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        for _ in 0..4096 {
            let number = std::process::id().wrapping_mul(31).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
            let [_, _, middle, low] = number.to_be_bytes();
            let prefix = [127, middle.max(1), low];
            let place = SocketAddr::from((Ipv4Addr::new(127, prefix[1], low, 250), CLAIM_PORT));
            if let Ok(claim) = TcpListener::bind(place) {
                return Ok(Self { prefix, _claim: claim });
            }
        }
        anyhow::bail!("no loopback network is free")
    }

    fn host(&self, last: u8) -> IpAddr {
        let [a, b, c] = self.prefix;
        Ipv4Addr::new(a, b, c, last).into()
    }

    /// An address of this network.
    pub(crate) fn at(&self, last: u8, port: u16) -> SocketAddr {
        SocketAddr::new(self.host(last), port)
    }
}

/// A client that keeps its connection as long as it may.
pub(crate) struct Talker {
    to: SocketAddr,
    client: Option<Client>,
}

impl Talker {
    pub(crate) fn new(to: SocketAddr) -> Self {
        Self { to, client: None }
    }

    /// One request and its whole answer.
    pub(crate) async fn ask(&mut self, headers: &[(&str, &str)], body: &Value) -> anyhow::Result<Answer> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => Client::connect(self.to).await.with_context(|| format!("connect to {}", self.to))?,
        };
        let mut all = vec![("Content-Type", "application/json")];
        all.extend_from_slice(headers);
        client.request("POST", PATH, &all, body.to_string().as_bytes()).await?;
        let answer = client.answer().await?;
        let closes = answer.head.header("connection").is_some_and(|word| word.eq_ignore_ascii_case("close"));
        if !closes && answer.body.end == kvlb_tests::harness::http::End::Complete {
            self.client = Some(client);
        }
        Ok(answer)
    }
}

/// A completion request for these tokens.
pub(crate) fn completion(tokens: &[u32], max_tokens: usize) -> Value {
    json!({"model": MODEL, "prompt": tokens, "max_tokens": max_tokens})
}

/// How the fleet's engines name blocks.
pub(crate) fn naming() -> Naming {
    Naming::new(EngineConfig::default().prefix_caching_hash_algo, BLOCK, Some(SEED), true, true, 1)
}

/// The names of a prompt's full blocks.
pub(crate) fn names(naming: &Naming, tokens: &[u32]) -> Vec<u64> {
    let mut parent: Option<Digest> = None;
    let name = |block: &[u32]| {
        let digest = naming.block(parent.as_ref(), block, &[]);
        parent = Some(digest);
        digest.name()
    };
    tokens.chunks_exact(BLOCK).map(name).collect()
}

/// Prompts of exactly one block each, none like another: with one token asked for, each is exactly one batch of events.
pub(crate) struct Singles {
    next: u32,
    naming: Naming,
}

impl Default for Singles {
    fn default() -> Self {
        Self { next: 0, naming: naming() }
    }
}

impl Singles {
    pub(crate) fn prompt(&mut self) -> Vec<u32> {
        self.next += 1;
        vec![self.next; BLOCK]
    }

    /// Asks an engine itself for `count` prompts, one after the other; gives the names of their blocks.
    pub(crate) async fn send(&mut self, fleet: &Fleet, number: usize, count: usize) -> anyhow::Result<BTreeSet<u64>> {
        let mut engine = Talker::new(fleet.engine_at(number));
        let mut stored = BTreeSet::new();
        for _ in 0..count {
            let prompt = self.prompt();
            let answer = engine.ask(&[], &completion(&prompt, 1)).await?;
            ensure!(answer.head.status == 200, "engine {number} answers {}", answer.body.text());
            stored.extend(names(&self.naming, &prompt));
        }
        Ok(stored)
    }
}

/// An older engine.
pub(crate) fn version(minor: u16) -> Version {
    Version::new(minor, 0)
}

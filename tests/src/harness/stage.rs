//! A whole deployment in a network namespace of its own: simulated engines, the real kvlb, its CLI, and clients of its VIPs.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::http::{Answer, Client};
use super::kvlb::{Kvlb, KvlbConfig, binary};
use super::netns::{Netns, NetnsRuntime};
use super::{eventually, skips, temp_dir};
use crate::engine::{Engine, EngineConfig};

/// The VIP of the source document.
pub const VIP: Ipv4Addr = Ipv4Addr::new(10, 10, 10, 254);
/// The model that the repository's small tokenizer belongs to.
pub const MODEL: &str = "kvlb/demo";
/// Where the API listens inside a stage: the place that the CLI asks unless told.
pub const API: &str = "127.0.0.1:11111";
/// How long anything may take that should take a moment, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

const LB: &str = "/netlox/v1/config/loadbalancer";

/// A network namespace with a place for files, ended with everything in it when dropped.
#[derive(Debug)]
pub struct Stage {
    netns: Arc<Netns>,
    runtime: NetnsRuntime,
    dir: tempfile::TempDir,
    pins: PathBuf,
}

impl Stage {
    /// Sets one up, with the small tokenizer staged for [`MODEL`]. Nothing without root, with the reason on the terminal.
    ///
    /// # Errors
    /// When the kernel or the file system refuses.
    pub fn new(label: &str) -> anyhow::Result<Option<Self>> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !nix::unistd::geteuid().is_root() {
            skips::skipped(label, "network namespaces need root");
            return Ok(None);
        }
        skips::ran();
        let netns = Arc::new(Netns::new(label)?);
        let runtime = netns.runtime()?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let pins = PathBuf::from(format!("/sys/fs/bpf/kvlb-stage-{}-{number}", std::process::id()));
        let stage = Self { netns, runtime, dir: temp_dir()?, pins };
        stage.stage_tokenizer(MODEL)?;
        Ok(Some(stage))
    }

    /// The namespace.
    pub fn netns(&self) -> &Arc<Netns> {
        &self.netns
    }

    /// A directory of its own.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where kvlb pins its maps.
    pub fn pins(&self) -> &Path {
        &self.pins
    }

    /// Stages the small tokenizer for another model.
    ///
    /// # Errors
    /// When a file cannot be copied.
    pub fn stage_tokenizer(&self, model: &str) -> anyhow::Result<()> {
        let folder = self.tokenizers().join(model.replace('/', "__"));
        std::fs::create_dir_all(&folder).context("make a tokenizer directory")?;
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(tiny_tokenizer().join(file), folder.join(file)).with_context(|| format!("stage {file}"))?;
        }
        Ok(())
    }

    fn tokenizers(&self) -> PathBuf {
        self.dir().join("tokenizers")
    }

    /// Makes an address one of this host's, as `--datapath none` needs it for a VIP.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn own(&self, address: Ipv4Addr) -> anyhow::Result<()> {
        self.netns.address("lo", (IpAddr::V4(address), 32))
    }

    /// Starts an engine inside.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub async fn engine(&self, config: EngineConfig) -> anyhow::Result<Engine> {
        self.runtime.run(Engine::start(config)).await?
    }

    /// Starts several, at 127.0.0.`first` and the addresses after it, by the same configuration.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub async fn engines(&self, first: u8, how_many: u8, config: &EngineConfig) -> anyhow::Result<Vec<Engine>> {
        let mut engines = Vec::new();
        for number in first..first + how_many {
            engines.push(self.engine(at(number, config.clone())).await?);
        }
        Ok(engines)
    }

    /// Starts a new life of an engine, on the runtime that it belongs to.
    ///
    /// # Errors
    /// As [`Engine::restart`].
    pub async fn restart(&self, mut engine: Engine) -> anyhow::Result<Engine> {
        self.runtime.run(async move { engine.restart().await.map(|()| engine) }).await?
    }

    /// How `kvlb up` is started inside: its API at [`API`], its files here, `LLB_KV_NONE_HASH_SEED` as the engines of
    /// [`engine`] have it, unless `args` say otherwise.
    pub fn config(&self, args: &[&str]) -> KvlbConfig {
        let (tokenizers, pins) = (self.tokenizers().display().to_string(), self.pins.display().to_string());
        let state = self.dir().join("state").display().to_string();
        let own = [("--tokenizer-dir", &*tokenizers), ("--pin-dir", &pins), ("--state-dir", &state), ("--api", API)];
        let own = own.into_iter().filter(|(flag, _)| !args.contains(flag));
        let all: Vec<_> = own.flat_map(|(flag, value)| [flag, value]).chain(args.iter().copied()).collect();
        KvlbConfig::with(&all).env("LLB_KV_NONE_HASH_SEED", "0").inside(&self.netns)
    }

    /// Starts kvlb inside.
    ///
    /// # Errors
    /// As [`Kvlb::start`].
    pub async fn kvlb(&self, args: &[&str]) -> anyhow::Result<Kvlb> {
        Kvlb::start(self.config(args)).await
    }

    /// Runs a program inside, to its end.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn program(&self, program: &Path, args: &[&str]) -> anyhow::Result<Output> {
        let output = self.netns.run(|| Command::new(program).args(args).output())?;
        let output = output.with_context(|| format!("run {}", program.display()))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Output { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) })
    }

    /// Runs the CLI inside.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn cli(&self, args: &[&str]) -> anyhow::Result<Output> {
        self.program(&binary("kvlb")?, args)
    }

    /// A connection from inside.
    ///
    /// # Errors
    /// When it is refused.
    pub fn connect(&self, address: SocketAddr) -> anyhow::Result<Client> {
        Ok(Client::over(self.netns.connect(address)?.with_context(|| format!("connect to {address}"))?))
    }

    /// One request of a client inside, over a connection of its own.
    ///
    /// # Errors
    /// When there is no whole answer.
    pub async fn exchange(
        &self,
        address: SocketAddr,
        (method, path): (&str, &str),
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> anyhow::Result<Answer> {
        let mut client = self.connect(address)?;
        client.request(method, path, headers, body).await.with_context(|| format!("send {method} {path}"))?;
        client.answer().await.with_context(|| format!("{method} {path} at {address}"))
    }

    /// POST of JSON to a port of the VIP.
    ///
    /// # Errors
    /// When there is no whole answer.
    pub async fn ask(&self, port: u16, path: &str, body: &Value) -> anyhow::Result<Answer> {
        self.post(vip(port), path, body).await
    }

    /// POST of JSON to any address.
    ///
    /// # Errors
    /// When there is no whole answer.
    pub async fn post(&self, address: SocketAddr, path: &str, body: &Value) -> anyhow::Result<Answer> {
        let headers = [("Content-Type", "application/json")];
        self.exchange(address, ("POST", path), &headers, body.to_string().as_bytes()).await
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // What a test that failed has left; mostly nothing is there.
        drop(std::fs::remove_dir_all(&self.pins));
    }
}

/// How a program ended and what it wrote.
#[derive(Debug, Clone)]
pub struct Output {
    /// Its exit code; none after a signal.
    pub code: Option<i32>,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

impl Output {
    /// Its standard output, of a program that succeeded.
    ///
    /// # Errors
    /// When it did not.
    pub fn ok(self) -> anyhow::Result<String> {
        ensure!(self.code == Some(0), "exit code {:?}: {}{}", self.code, self.out, self.err);
        Ok(self.out)
    }
}

/// A port of the VIP.
pub fn vip(port: u16) -> SocketAddr {
    SocketAddr::from((VIP, port))
}

/// The repository's small tokenizer.
pub fn tiny_tokenizer() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tiny-tokenizer")
}

/// An engine as the document runs it, with the small tokenizer: ports 8000 and 5557, `PYTHONHASHSEED=0`.
pub fn engine() -> EngineConfig {
    EngineConfig {
        http_port: 8000,
        events_port: 5557,
        model: MODEL.to_owned(),
        python_hash_seed: Some("0".to_owned()),
        tokenizer: Some(tiny_tokenizer()),
        ..EngineConfig::default()
    }
}

/// The same at 127.0.0.`number`, named `engine-NUMBER`.
#[must_use]
pub fn at(number: u8, config: EngineConfig) -> EngineConfig {
    EngineConfig { host: IpAddr::from([127, 0, 0, number]), name: format!("engine-{number}"), ..config }
}

/// A rule in mode 3 at a port of the VIP over these engines; `more` are further service arguments, or others.
pub fn rule(port: u16, engines: &[Engine], more: &Value) -> Value {
    let mut arguments = json!({
        "externalIP": VIP, "port": port, "protocol": "tcp", "sel": 0, "mode": 4,
        "kvExactMode": 3, "kvZmqPort": 5557, "kvHashAlgo": "sha256_cbor", "kvBlockSize": 16,
    });
    for (name, value) in more.as_object().into_iter().flatten() {
        arguments[name] = value.clone();
    }
    let endpoints: Vec<_> = engines.iter().map(endpoint).collect();
    json!({"serviceArguments": arguments, "endpoints": endpoints})
}

/// An engine as an endpoint of a rule.
pub fn endpoint(engine: &Engine) -> Value {
    let address = engine.addresses().http;
    json!({"endpointIP": address.ip(), "targetPort": address.port(), "weight": 1})
}

/// What tests ask a running kvlb.
impl Kvlb {
    /// Creates a rule, and gives its number.
    ///
    /// # Errors
    /// When it is refused.
    pub async fn create(&self, rule: &Value) -> anyhow::Result<u64> {
        let (status, answer) = self.api("POST", LB, Some(rule)).await?;
        ensure!(status == 200, "{status}: {answer}");
        answer["id"].as_u64().with_context(|| format!("no id in {answer}"))
    }

    /// Every rule as the API shows it.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn rules(&self) -> anyhow::Result<Vec<Value>> {
        let (status, mut answer) = self.api("GET", &format!("{LB}/all"), None).await?;
        ensure!(status == 200, "{status}: {answer}");
        serde_json::from_value(answer["lbAttr"].take()).context("read the list of rules")
    }

    /// One rule as the API shows it.
    ///
    /// # Errors
    /// When it is not there.
    pub async fn rule(&self, id: u64) -> anyhow::Result<Value> {
        self.rules().await?.into_iter().find(|rule| rule["id"] == id).with_context(|| format!("no rule {id}"))
    }

    /// The `kvStatus` of each endpoint of a rule; null where it is not subscribed.
    ///
    /// # Errors
    /// When the rule is not there.
    pub async fn statuses(&self, id: u64) -> anyhow::Result<Vec<Value>> {
        let rule = self.rule(id).await?;
        Ok(rule["endpoints"].as_array().into_iter().flatten().map(|endpoint| endpoint["kvStatus"].clone()).collect())
    }

    /// Waits until a status of an endpoint is as wanted, and gives it.
    ///
    /// # Errors
    /// When it is not in time; the error has the last one.
    pub async fn status_when(
        &self,
        within: Duration,
        (rule, ep_idx): (u64, usize),
        wanted: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let mut last = Value::Null;
        let look = async || {
            last = self.statuses(rule).await.ok()?.get(ep_idx)?.clone();
            wanted(&last).then(|| last.clone())
        };
        let found = super::until_some(within, "a status of an endpoint", look).await;
        found.with_context(|| format!("rule {rule} endpoint {ep_idx}: {last}"))
    }

    /// Waits until the events of every endpoint of a rule are listened to.
    ///
    /// # Errors
    /// When they are not in time.
    pub async fn subscribed(&self, rule: u64) -> anyhow::Result<()> {
        let heard =
            |statuses: Vec<Value>| statuses.iter().all(|status| status.is_null() || status["connected"] == true);
        eventually(PATIENCE, "every endpoint's events are listened to", async || {
            self.statuses(rule).await.is_ok_and(heard)
        })
        .await
    }

    /// Waits until the tokenizer of a model is in use: a rule without a model learns its engines' models a moment after it is made.
    ///
    /// # Errors
    /// When it is not in time.
    pub async fn tokenizes(&self, rule: u64, model: &str) -> anyhow::Result<()> {
        let path = format!("/netlox/v1/config/ai/kv/explain?service_id={rule}");
        let body = json!({"model": model, "prompt": "x"});
        eventually(PATIENCE, "the tokenizer is loaded", async || {
            self.api("POST", &path, Some(&body)).await.is_ok_and(|(_, answer)| answer["reason"] != "tokenize")
        })
        .await
    }

    /// Waits until kvlb knows as many blocks of each engine as it holds.
    ///
    /// # Errors
    /// When it does not in time.
    pub async fn settled(&self, rule: u64, engines: &[Engine]) -> anyhow::Result<()> {
        eventually(PATIENCE, "the inventory is the engines' own", async || {
            let Ok(statuses) = self.statuses(rule).await else { return false };
            statuses.iter().zip(engines).all(|(status, engine)| status["blocks"] == engine.blocks().len())
        })
        .await
    }

    /// Every series of its metrics page.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn metrics(&self) -> anyhow::Result<Metrics> {
        Ok(Metrics::read(&self.ask("GET", "/netlox/v1/metrics", None).await?.body.text()))
    }
}

/// One reading of a metrics page: series as they are written there, and their values.
#[derive(Debug, Clone, Default)]
pub struct Metrics(pub BTreeMap<String, f64>);

impl Metrics {
    /// Reads a page.
    pub fn read(page: &str) -> Self {
        let series = page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series.to_owned(), value.parse().ok()?))
        });
        Self(series.collect())
    }

    /// The value of a series; 0 where it is absent.
    pub fn value(&self, series: &str) -> f64 {
        self.0.get(series).copied().unwrap_or_default()
    }

    /// The sum over all series of a family.
    pub fn sum(&self, family: &str) -> f64 {
        self.family(family).map(|(_, value)| value).sum()
    }

    /// The series of a family.
    pub fn family<'a>(&'a self, family: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
        let of_family = move |series: &str| series.split('{').next() == Some(family);
        self.0.iter().filter(move |(series, _)| of_family(series)).map(|(series, value)| (series.as_str(), *value))
    }

    /// What moved since `before` in families whose names begin so.
    pub fn moved(&self, before: &Self, prefix: &str) -> Vec<(String, f64)> {
        let delta = |(series, value): (&String, &f64)| (series.clone(), value - before.value(series));
        self.0.iter().filter(|(series, _)| series.starts_with(prefix)).map(delta).filter(|(_, by)| *by != 0.0).collect()
    }
}

/// The tokens that the engine of an answer took from its cache, by its own word; of a stream from the chunk with the usage.
pub fn cached_tokens(answer: &Answer) -> Option<u64> {
    answer.cached_tokens().or_else(|| {
        let usage = |event: &String| serde_json::from_str::<Value>(event).ok().map(|chunk| chunk["usage"].clone());
        let usage = answer.body.events().iter().filter_map(usage).rfind(Value::is_object)?;
        usage["prompt_tokens_details"]["cached_tokens"].as_u64()
    })
}

//! A daemon with engines, on addresses of its own.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvlb_tests::engine::{Engine, EngineConfig};
use kvlb_tests::harness::http::{Answer, Client, request};
use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig, binary};
use kvlb_tests::harness::{eventually, temp_dir};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::timeout;

/// Patience for what takes milliseconds on an idle machine.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The model that engines serve and whose tokenizer is staged.
pub(crate) const MODEL: &str = "tiny";

pub(crate) const EVENTS_PORT: u16 = 5557;
pub(crate) const REPLAY_PORT: u16 = 6557;
pub(crate) const HTTP_PORT: u16 = 8000;

/// 250 loopback addresses that are ours while this lives.
#[derive(Debug)]
pub(crate) struct Place {
    net: [u8; 2],
    _held: UdpSocket,
}

impl Place {
    pub(crate) fn new() -> Self {
        let id = std::process::id();
        for attempt in 0..10_000_u32 {
            let mixed = id.wrapping_mul(2_654_435_761).wrapping_add(attempt.wrapping_mul(40_503)).to_be_bytes();
            // 127.0 and 127.1 are left to everybody else.
            let net = [mixed[0] | 2, mixed[1]];
            let lock = Ipv4Addr::new(127, net[0], net[1], 251);
            if let Ok(held) = UdpSocket::bind((lock, 1)) {
                return Self { net, _held: held };
            }
        }
        panic!("no loopback network is free");
    }

    pub(crate) fn at(&self, host: u8, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(host), port)
    }

    pub(crate) fn ip(&self, host: u8) -> IpAddr {
        Ipv4Addr::new(127, self.net[0], self.net[1], host).into()
    }

    pub(crate) fn vip(&self) -> SocketAddr {
        self.at(100, 8080)
    }

    /// The address of the endpoint at a position.
    pub(crate) fn endpoint(&self, position: u8) -> IpAddr {
        self.ip(11 + position)
    }

    pub(crate) fn engine_config(&self, position: u8) -> EngineConfig {
        EngineConfig {
            host: self.endpoint(position),
            http_port: HTTP_PORT,
            events_port: EVENTS_PORT,
            replay_port: Some(REPLAY_PORT),
            tokenizer: Some(tiny()),
            python_hash_seed: Some("0".into()),
            prefill_us_per_token: 1.0,
            decode_ms_per_token: 0.5,
            max_num_seqs: 4096,
            ..EngineConfig::named(&format!("engine-{position}"))
        }
    }

    /// The rule that a stage creates: one pool, decision headers on.
    pub(crate) fn rule(&self, endpoints: u8, changes: &Value) -> Value {
        let endpoints: Vec<_> = (0..endpoints)
            .map(|n| json!({"endpointIP": self.endpoint(n).to_string(), "targetPort": HTTP_PORT}))
            .collect();
        let vip = self.vip();
        let mut rule = json!({
            "serviceArguments": {"externalIP": vip.ip().to_string(), "port": vip.port(), "protocol": "tcp", "mode": 4,
                "kvExactMode": 3, "kvZmqPort": EVENTS_PORT, "kvReplayPort": REPLAY_PORT, "decisionHeaders": true,
                "probeTimeout": 1},
            "endpoints": endpoints,
        });
        for (name, value) in changes.as_object().into_iter().flatten() {
            rule["serviceArguments"][name] = value.clone();
        }
        rule
    }

    /// `kvlb up` here, with the small tokenizer staged in `dir`.
    pub(crate) fn config(&self, dir: &Path) -> KvlbConfig {
        let tokenizers = dir.join("tokenizers");
        let api = self.at(1, 11_111).to_string();
        let args =
            ["--api", &api, "--datapath", "none", "--threads", "2", "--tokenizer-dir", tokenizers.to_str().unwrap()];
        KvlbConfig::with(&args).env("LLB_KV_NONE_HASH_SEED", "0")
    }
}

/// Where the repository keeps its small tokenizer.
pub(crate) fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tiny-tokenizer")
}

/// Lays a copy of it out for a model.
pub(crate) fn stage_tokenizer(dir: &Path, slug: &str) -> PathBuf {
    let folder = dir.join("tokenizers").join(slug);
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tiny().join(file), folder.join(file)).unwrap();
    }
    folder
}

/// A running daemon with engines behind one rule, all subscribed.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) kvlb: Kvlb,
    pub(crate) engines: Vec<Engine>,
    pub(crate) place: Place,
    pub(crate) dir: TempDir,
    pub(crate) rule_id: u64,
}

impl Stage {
    /// `engines` engines and a rule with `changes`.
    pub(crate) async fn set(engines: u8, changes: Value) -> Self {
        Self::with(engines, changes, |config| config, |config| config).await
    }

    pub(crate) async fn with(
        engines: u8,
        changes: Value,
        daemon: impl FnOnce(KvlbConfig) -> KvlbConfig,
        engine: impl Fn(EngineConfig) -> EngineConfig,
    ) -> Self {
        Self::with_program(&binary("kvlb").unwrap(), engines, changes, daemon, engine).await
    }

    /// The same with another program in the daemon's place.
    pub(crate) async fn with_program(
        program: &Path,
        engines: u8,
        changes: Value,
        daemon: impl FnOnce(KvlbConfig) -> KvlbConfig,
        engine: impl Fn(EngineConfig) -> EngineConfig,
    ) -> Self {
        let (place, dir) = (Place::new(), temp_dir().unwrap());
        stage_tokenizer(dir.path(), MODEL);
        let mut running = Vec::new();
        for position in 0..engines {
            running.push(Engine::start(engine(place.engine_config(position))).await.unwrap());
        }
        let kvlb = Kvlb::start_program(program, daemon(place.config(dir.path()))).await.unwrap();
        let mut stage = Self { kvlb, engines: running, place, dir, rule_id: 0 };
        stage.rule_id = stage.create(&stage.place.rule(engines, &changes)).await;
        let publishes = stage.engines.iter().all(|engine| engine.addresses().events.is_some());
        if publishes && changes["kvExactMode"] != json!(0) {
            stage.until_subscribed().await;
        }
        stage.until_served().await;
        stage
    }

    pub(crate) fn vip(&self) -> SocketAddr {
        self.place.vip()
    }

    /// Creates a rule and gives its number.
    pub(crate) async fn create(&self, rule: &Value) -> u64 {
        let (status, answer) = self.kvlb.api("POST", "/netlox/v1/config/loadbalancer", Some(rule)).await.unwrap();
        assert_eq!(status, 200, "{answer}");
        answer["id"].as_u64().unwrap()
    }

    /// The `kvStatus` of an endpoint.
    pub(crate) async fn kv_status(&self, position: usize) -> Value {
        let path = format!("/netlox/v1/config/ai/kv/status?service_id={}", self.rule_id);
        let (status, answer) = self.kvlb.api("GET", &path, None).await.unwrap();
        assert_eq!(status, 200, "{answer}");
        answer["endpoints"][position]["kvStatus"].clone()
    }

    /// What happened on an endpoint's event stream, by the metrics.
    pub(crate) async fn stream_count(&self, position: usize, what: &str) -> u64 {
        let (mut name, mut labels) = ("kvlb_event_stream_total", vec![format!("service=\"{}\"", self.rule_id)]);
        if what == "recv_errors" {
            name = "loxilb_kv_subscriber_recv_error_total";
            labels.push(format!("ep=\"{}:{HTTP_PORT}\"", self.place.ip(11 + u8::try_from(position).unwrap())));
        } else {
            labels.extend([format!("ep_idx=\"{position}\""), format!("what=\"{what}\"")]);
        }
        let page = self.kvlb.ask("GET", "/metrics", None).await.unwrap().body.text();
        let line = page.lines().find(|line| line.starts_with(name) && labels.iter().all(|label| line.contains(label)));
        let value: f64 = line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0);
        format!("{value:.0}").parse().unwrap()
    }

    pub(crate) async fn until_subscribed(&self) {
        for position in 0..self.engines.len() {
            let connected = async || self.kv_status(position).await["connected"] == json!(true);
            eventually(SOON, "every engine's events are listened to", connected).await.unwrap();
        }
    }

    pub(crate) async fn until_served(&self) {
        // Whatever it says of the model: it is the engine that says it.
        let served = async || self.try_ask(&completion("hello")).await.is_ok_and(|answer| !answer.engine().is_empty());
        eventually(SOON, "the VIP serves", served).await.unwrap();
    }

    /// One completion over a connection of its own.
    pub(crate) async fn try_ask(&self, body: &Value) -> anyhow::Result<Answer> {
        exchange(self.vip(), &post("/v1/completions", &[], body.to_string().as_bytes())).await
    }

    /// One completion that must be answered.
    pub(crate) async fn ask(&self, body: &Value) -> Answer {
        let answer = self.try_ask(body).await.unwrap();
        assert_eq!(answer.head.status, 200, "{}", answer.body.text());
        answer
    }

    /// Whether the daemon is as well as it was at the start.
    pub(crate) async fn assert_well(&self) {
        self.ask(&completion("still there?")).await;
        assert!(self.kvlb.metric("kvlb_panics_total").await.unwrap().abs() < f64::EPSILON, "{}", self.kvlb.log());
        let log = self.kvlb.log();
        assert!(!log.contains("panicked at"), "{log}");
    }

    /// Checks that it is well and that it ends cleanly.
    pub(crate) async fn close(self) {
        self.assert_well().await;
        let (api, log) = (self.kvlb.api_address(), self.kvlb.log());
        self.kvlb.stop().await.unwrap();
        assert!(Client::connect(api).await.is_err(), "it has ended: {log}");
    }

    pub(crate) fn memory(&self) -> u64 {
        memory(self.kvlb.id())
    }

    pub(crate) fn descriptors(&self) -> usize {
        descriptors(self.kvlb.id())
    }
}

/// A completion that few tokens answer.
pub(crate) fn completion(prompt: &str) -> Value {
    json!({"model": MODEL, "prompt": prompt, "max_tokens": 2})
}

/// The bytes of a POST of JSON.
pub(crate) fn post(path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let headers: Vec<_> = [("Content-Type", "application/json")].into_iter().chain(headers.iter().copied()).collect();
    request("POST", path, "kvlb.test", &headers, body)
}

/// Sends bytes on a connection of their own and reads one answer.
pub(crate) async fn exchange(address: SocketAddr, bytes: &[u8]) -> anyhow::Result<Answer> {
    let mut client = Client::connect(address).await?;
    // A refusal may come before all is sent.
    client.send(bytes).await.ok();
    timeout(SOON, client.answer()).await?
}

/// Resident bytes of a process.
pub(crate) fn memory(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024
}

/// Open descriptors of a process.
pub(crate) fn descriptors(id: u32) -> usize {
    std::fs::read_dir(format!("/proc/{id}/fd")).unwrap().count()
}

/// Processor time that a process has used so far.
pub(crate) fn cpu_time(id: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    // Linux counts in hundredths of a second for every program.
    Duration::from_millis(ticks * 10)
}

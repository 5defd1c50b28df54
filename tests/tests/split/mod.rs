//! kvlb with one rule that splits requests, and engines that hand over.

#![allow(dead_code, reason = "each test uses what it needs")]

pub(crate) mod scripted;

use std::net::SocketAddr;
use std::time::Duration;

use kvlb_tests::engine::{Engine, EngineConfig, FaultPlan, KvConnector};
use kvlb_tests::harness::http::{Answer, Client, exchange};
use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig};
use kvlb_tests::harness::{eventually, free_ports};
use serde_json::{Value, json};

pub(crate) const SOON: Duration = Duration::from_secs(10);
pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const JSON: &[(&str, &str)] = &[("Content-Type", "application/json")];
/// `ep_role`.
pub(crate) const PREFILL: u8 = 1;
pub(crate) const DECODE: u8 = 2;

/// kvlb and one rule.
pub(crate) struct Split {
    pub(crate) vip: SocketAddr,
    pub(crate) kvlb: Kvlb,
    pub(crate) id: u64,
}

impl Split {
    pub(crate) async fn over(endpoints: Vec<Value>, more: &Value) -> Self {
        Self::with(&[], endpoints, more).await
    }

    /// `args` are more of `kvlb up`.
    pub(crate) async fn with(args: &[&str], endpoints: Vec<Value>, more: &Value) -> Self {
        let args: Vec<_> = ["--datapath", "none"].into_iter().chain(args.iter().copied()).collect();
        let config = KvlbConfig::with(&args).env("LLB_KV_NONE_HASH_SEED", "0");
        Self::rule(Kvlb::start(config).await.unwrap(), endpoints, more).await
    }

    /// The same kvlb with one more rule.
    pub(crate) async fn another(self, endpoints: Vec<Value>, more: &Value) -> Self {
        Self::rule(self.kvlb, endpoints, more).await
    }

    async fn rule(kvlb: Kvlb, endpoints: Vec<Value>, more: &Value) -> Self {
        let [port] = free_ports().unwrap();
        let vip = SocketAddr::from(([127, 0, 0, 1], port));
        let mut arguments = json!({"externalIP": vip.ip(), "port": port, "protocol": "tcp", "sel": 0, "mode": 4, "kvExactMode": 1,
            "kvBlockSize": 16, "kvHashAlgo": "sha256_cbor", "decisionHeaders": true, "probeTimeout": 1});
        more.as_object().unwrap().iter().for_each(|(name, value)| arguments[name] = value.clone());
        let rule = json!({"serviceArguments": arguments, "endpoints": endpoints});
        let id = kvlb.create(&rule).await.unwrap();
        eventually(SOON, "the VIP is served", async || kvlb.connect(vip).await.is_ok()).await.unwrap();
        Self { vip, kvlb, id }
    }

    pub(crate) async fn post(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let headers: Vec<_> =
            [("Content-Type", "application/json")].into_iter().chain(headers.iter().copied()).collect();
        exchange(self.vip, "POST", path, &headers, body).await.unwrap()
    }

    pub(crate) async fn ask(&self, body: &Value) -> Answer {
        self.post(COMPLETIONS, &[], body.to_string().as_bytes()).await
    }

    pub(crate) async fn metric(&self, series: &str) -> f64 {
        self.kvlb.metrics().await.unwrap().value(series)
    }

    pub(crate) async fn whole(&self, reason: &str) -> f64 {
        self.metric(&format!("kvlb_pd_whole_total{{reason=\"{reason}\",service=\"{}\"}}", self.id)).await
    }

    pub(crate) async fn explain(&self, body: &Value) -> Value {
        let path = format!("/netlox/v1/config/ai/kv/explain?service_id={}", self.id);
        self.kvlb.api("POST", &path, Some(body)).await.unwrap().1
    }
}

/// The rule, with engines that hand over.
pub(crate) struct Fleet {
    pub(crate) split: Split,
    pub(crate) engines: Vec<Engine>,
}

impl Fleet {
    pub(crate) async fn new(roles: &[u8], more: Value) -> Self {
        Self::of(roles, more, |config| config).await
    }

    pub(crate) async fn of(roles: &[u8], more: Value, adjust: impl Fn(EngineConfig) -> EngineConfig) -> Self {
        Self::with(&[], roles, more, adjust).await
    }

    pub(crate) async fn with(
        args: &[&str],
        roles: &[u8],
        more: Value,
        adjust: impl Fn(EngineConfig) -> EngineConfig,
    ) -> Self {
        let (mut engines, mut endpoints) = (Vec::new(), Vec::new());
        for (number, role) in roles.iter().enumerate() {
            let config = EngineConfig {
                replay_port: Some(0),
                kv_connector: KvConnector::Nixl,
                python_hash_seed: Some("0".to_owned()),
                prefill_us_per_token: 5.0,
                decode_ms_per_token: 1.0,
                kv_lease_s: 5.0,
                ..EngineConfig::named(&format!("engine-{number}"))
            };
            let engine = Engine::start(adjust(config)).await.unwrap();
            let addresses = engine.addresses();
            let mut endpoint = json!({"endpointIP": addresses.http.ip(), "targetPort": addresses.http.port(), "weight": 1, "ep_role": role});
            if let (Some(events), Some(replay)) = (addresses.events, addresses.replay) {
                (endpoint["kvZmqPort"], endpoint["kvReplayPort"]) = (json!(events.port()), json!(replay.port()));
            }
            endpoints.push(endpoint);
            engines.push(engine);
        }
        let split = Split::with(args, endpoints, &more).await;
        split.kvlb.subscribed(split.id).await.unwrap();
        Self { split, engines }
    }

    pub(crate) fn faults(&self, number: usize, plan: FaultPlan) {
        self.engines[number].faults().set(|now| *now = plan);
    }

    /// Position of the endpoint that computed an answer's prompt.
    pub(crate) fn prefill(&self, answer: &Answer) -> usize {
        let told = answer.head.header("x-kvlb-prefill-endpoint").expect("a prefill endpoint is named");
        self.engines.iter().position(|engine| engine.addresses().http.to_string() == told).unwrap()
    }

    /// A client that has asked, and may leave.
    pub(crate) async fn begun(&self, asks: &Value) -> Client {
        let mut client = self.split.kvlb.connect(self.split.vip).await.unwrap();
        client.request("POST", COMPLETIONS, JSON, asks.to_string().as_bytes()).await.unwrap();
        client
    }

    /// POSTs that an engine got.
    pub(crate) fn asked(&self, number: usize) -> usize {
        self.engines[number].requests().iter().filter(|seen| seen.method == "POST").count()
    }

    /// Nobody keeps blocks any more, and nobody has fetched those of another request.
    pub(crate) async fn ends_clean(self) {
        let clean = || self.engines.iter().all(|engine| engine.handoffs().leases_open == 0);
        eventually(SOON, "no lease is open", async || clean()).await.unwrap();
        let foreign: u64 = self.engines.iter().map(|engine| engine.handoffs().pulled_foreign).sum();
        assert_eq!(foreign, 0);
        let quiet = async || self.split.kvlb.metrics().await.is_ok_and(|m| m.sum("kvlb_endpoint_load") == 0.0);
        eventually(SOON, "nothing is in flight", quiet).await.unwrap();
        self.split.kvlb.stop().await.unwrap();
    }
}

pub(crate) fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| seed * 1000 + at).collect()
}

pub(crate) fn body(prompt: &[u32]) -> Value {
    json!({"model": "tiny", "prompt": prompt, "max_tokens": 6})
}

/// A body with more members, or others.
pub(crate) fn with(mut body: Value, more: &Value) -> Value {
    more.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

/// One that is decoded until its client leaves.
pub(crate) fn long(seed: u32) -> Value {
    with(body(&prompt(seed, 20)), &json!({"max_tokens": 20_000, "stream": true}))
}

pub(crate) fn code(answer: &Answer) -> (u16, Option<&str>) {
    (answer.head.status, answer.head.header("x-kvlb-error"))
}

/// What an engine says that computes everything itself.
pub(crate) async fn alone(body: &Value) -> String {
    let engine = Engine::start(EngineConfig { python_hash_seed: Some("0".to_owned()), ..EngineConfig::named("alone") });
    let engine = engine.await.unwrap();
    let headers = [("Content-Type", "application/json")];
    let answer =
        exchange(engine.addresses().http, "POST", COMPLETIONS, &headers, body.to_string().as_bytes()).await.unwrap();
    text(&answer)
}

pub(crate) fn text(answer: &Answer) -> String {
    assert_eq!(answer.head.status, 200, "{}", answer.body.text());
    answer.body.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

//! The simulated engine with data-parallel ranks, host memory, adapters of each era, full caches and lies: as recorded, where it was.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so")]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use kvlb_tests::engine::{Adapter, Engine, EngineConfig, Extra, KeyForm, Naming, Version};
use kvlb_tests::harness::http::{Answer, exchange, get, post};
use kvlb_tests::harness::until_some;
use rmpv::Value as Msg;
use serde_json::{Value, json};
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

const SOON: Duration = Duration::from_secs(5);
const PATH: &str = "/v1/completions";

async fn started(config: EngineConfig) -> Engine {
    Engine::start(EngineConfig { prefill_us_per_token: 0.0, decode_ms_per_token: 0.0, ..config }).await.unwrap()
}

fn body(number: u32) -> Value {
    json!({"prompt": (0..40).map(|at| number * 1000 + at).collect::<Vec<_>>(), "max_tokens": 1})
}

async fn at_rank(engine: &Engine, rank: &str, body: &Value) -> Answer {
    let headers = [("Content-Type", "application/json"), ("X-data-parallel-rank", rank)];
    exchange(engine.addresses().http, "POST", PATH, &headers, body.to_string().as_bytes()).await.unwrap()
}

/// Every batch that a replay socket remembers.
async fn batches(replay: SocketAddr) -> Vec<Msg> {
    let mut dealer = DealerSocket::new();
    dealer.connect(&format!("tcp://{replay}")).await.unwrap();
    let mut request = ZmqMessage::from(Vec::new());
    request.push_back(0_u64.to_be_bytes().to_vec().into());
    dealer.send(request).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let answer = timeout(SOON, dealer.recv()).await.expect("an answer in time").unwrap();
        if answer.iter().any(|frame| frame.as_ref() == [0xff; 8]) {
            return batches;
        }
        let payload = answer.iter().next_back().unwrap();
        batches.push(rmpv::decode::read_value(&mut payload.as_ref()).unwrap());
    }
}

fn events(batch: &Msg) -> &[Msg] {
    batch.as_array().unwrap()[1].as_array().unwrap()
}

fn field<'m>(event: &'m Msg, name: &str) -> &'m Msg {
    let mut fields = event.as_map().unwrap().iter();
    fields.find(|(key, _)| key.as_str() == Some(name)).map_or(&Msg::Nil, |(_, value)| value)
}

fn next_port(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port() + 1)
}

#[tokio::test]
async fn each_rank_has_a_cache_and_an_event_stream_of_its_own() {
    let engine = started(EngineConfig { data_parallel_size: 2, ..EngineConfig::named("dp") }).await;
    let in_turn = [0, 1, 2, 3].map(body);
    for (number, body) in in_turn.iter().enumerate() {
        let answer = post(engine.addresses().http, PATH, body).await.unwrap();
        assert_eq!(answer.head.header("x-sim-rank"), Some(["0", "1"][number % 2]));
    }
    assert_eq!([0, 1].map(|rank| engine.blocks_of(rank).len()), [4, 4]);
    assert_eq!([0, 1].map(|rank| engine.published_of(rank).batches), [2, 2]);
    // Pinned, a prompt is found where it was computed and nowhere else.
    assert_eq!(at_rank(&engine, "1", &in_turn[1]).await.cached_tokens(), Some(32));
    assert_eq!(at_rank(&engine, "0", &in_turn[1]).await.cached_tokens(), Some(0));
    assert_eq!(engine.requests().last().unwrap().rank, Some(0));
    let wrong = at_rank(&engine, "7", &in_turn[1]).await;
    assert_eq!(wrong.head.status, 400);
    let message = "data_parallel_rank 7 is out of range [0, 2).";
    let error = json!({"error": {"message": message, "type": "BadRequestError", "param": null, "code": 400}});
    assert_eq!(wrong.body.json(), error, "the recorded words");

    let replay = engine.addresses().replay.unwrap();
    for (rank, address) in [replay, next_port(replay)].into_iter().enumerate() {
        let batches = batches(address).await;
        assert_eq!(batches.len(), [3, 2][rank]);
        assert!(batches.iter().all(|batch| batch.as_array().unwrap()[2].as_u64() == u64::try_from(rank).ok()));
    }
    let sources = get(engine.addresses().http, "/kv_event_sources").await.unwrap().body.json();
    let events = engine.addresses().events.unwrap().port();
    for rank in 0..2_u16 {
        let source = &sources[rank.to_string()];
        assert_eq!(source["endpoint"], format!("tcp://*:{}", events + rank));
        assert_eq!(source["replay_endpoint"], format!("tcp://*:{}", replay.port() + rank));
    }
    let metrics = get(engine.addresses().http, "/metrics").await.unwrap().body.text();
    for rank in ["0", "1"] {
        let line =
            |line: &&str| line.starts_with("vllm:cache_config_info{") && line.contains(&format!("engine=\"{rank}\""));
        let line = metrics.lines().find(line).unwrap();
        assert!(line.contains("enable_prefix_caching=\"True\"") && line.contains("block_size=\"16\""), "{line}");
    }
}

#[tokio::test]
async fn a_rank_restarts_alone_and_a_reset_is_each_rank_s_own() {
    let mut engine = started(EngineConfig { data_parallel_size: 2, ..EngineConfig::named("dp") }).await;
    for rank in ["0", "1"] {
        at_rank(&engine, rank, &body(1)).await;
    }
    engine.restart_rank(1).await.unwrap();
    assert_eq!([0, 1].map(|rank| engine.blocks_of(rank).len()), [2, 0]);
    assert_eq!([0, 1].map(|rank| engine.published_of(rank).batches), [1, 0]);
    assert_eq!(at_rank(&engine, "1", &body(1)).await.cached_tokens(), Some(0));
    assert!(engine.restart_rank(2).await.is_err());
    post(engine.addresses().http, "/reset_prefix_cache", &Value::Null).await.unwrap();
    for (rank, batches) in [("0", 2), ("1", 2)] {
        at_rank(&engine, rank, &body(2)).await;
        assert_eq!(engine.published_of(rank.parse().unwrap()).batches, batches);
    }
    assert_eq!(engine.blocks().len(), 2, "both hold the same two");
    engine.restart().await.unwrap();
    assert_eq!(engine.blocks().len(), 0);
}

#[tokio::test]
async fn host_memory_keeps_what_the_pool_evicts_and_tells_names_only() {
    let config = EngineConfig { num_gpu_blocks: 8, cpu_blocks: 100, ..EngineConfig::named("host") };
    for describes in [false, true] {
        let engine = started(EngineConfig { self_describing_kv_events: describes, ..config.clone() }).await;
        let http = engine.addresses().http;
        for number in 0..5 {
            post(http, PATH, &body(number)).await.unwrap();
        }
        assert!(engine.blocks().len() <= 7);
        assert_eq!(engine.host_blocks_of(0).len(), 10);
        // Gone from the pool, back from host memory, without being computed.
        assert_eq!(post(http, PATH, &body(0)).await.unwrap().cached_tokens(), Some(32));
        let batches = batches(engine.addresses().replay.unwrap()).await;
        let told: Vec<_> =
            batches.iter().flat_map(events).filter(|event| field(event, "medium").as_str() == Some("CPU")).collect();
        let names: BTreeSet<u64> = told
            .iter()
            .flat_map(|event| field(event, "block_hashes").as_array().unwrap())
            .filter_map(Msg::as_u64)
            .collect();
        assert_eq!(names, engine.host_blocks_of(0).into_iter().collect());
        for event in told {
            let (tokens, size) = if describes { (32, 16) } else { (0, 0) };
            assert_eq!(field(event, "token_ids").as_array().unwrap().len(), tokens);
            assert_eq!(field(event, "block_size").as_u64(), Some(size));
            assert!(field(event, "parent_block_hash").is_nil());
        }
    }
}

#[tokio::test]
async fn an_adapter_is_hashed_and_told_as_its_version_does() {
    let adapters =
        || vec!["first", "lora"].into_iter().map(|name| Adapter { name: name.into(), path: format!("/srv/{name}") });
    let eras = [((10, 2), KeyForm::Numbered), ((18, 0), KeyForm::Named), ((32, 0), KeyForm::Tagged)];
    for ((minor, patch), form) in eras {
        let version = Version::new(minor, patch);
        let config = EngineConfig {
            version,
            python_hash_seed: Some("0".into()),
            adapters: adapters().collect(),
            ..EngineConfig::default()
        };
        let engine = started(config.clone()).await;
        let mut body = body(1);
        body["model"] = json!("lora");
        post(engine.addresses().http, PATH, &body).await.unwrap();
        let naming = Naming::new(config.prefix_caching_hash_algo, 16, Some("0"), form, true, 1);
        let extra = Extra::Lora { id: 2, name: "lora".into(), path: "/srv/lora".into() };
        let tokens: Vec<u32> = (1000..1016).collect();
        assert!(engine.blocks().contains_key(&naming.block(None, &tokens, &[extra]).name()), "{version}");
    }
}

#[tokio::test]
async fn hits_are_announced_again_where_asked_for_since_0_26() {
    for (minor, again) in [(25, 0), (26, 1)] {
        let engine = started(EngineConfig { version: Version::new(minor, 0), ..EngineConfig::default() }).await;
        let mut body = body(1);
        post(engine.addresses().http, PATH, &body).await.unwrap();
        body["vllm_xargs"] = json!({"kv_cache_report_mode": "full"});
        post(engine.addresses().http, PATH, &body).await.unwrap();
        assert_eq!(engine.published().batches, 1 + again, "0.{minor}");
    }
}

#[tokio::test]
async fn a_lie_a_loss_and_a_cache_filled_at_once() {
    let engine = started(EngineConfig { num_gpu_blocks: 100, ..EngineConfig::default() }).await;
    let http = engine.addresses().http;
    engine.preload((0..10).map(|number| (0..40).map(|at| number * 1000 + at).collect()), 1);
    assert_eq!((engine.blocks().len(), engine.published().batches), (20, 20));
    assert_eq!(post(http, PATH, &body(3)).await.unwrap().cached_tokens(), Some(32));
    engine.faults().set(|plan| plan.reported_cached_share = Some(0.25));
    assert_eq!(post(http, PATH, &body(3)).await.unwrap().cached_tokens(), Some(8));
    engine.faults().clear();
    let told = engine.published().batches;
    let answer = post(http, "/debug/forget", &json!({"share": 1.0})).await.unwrap().body.json();
    assert_eq!((answer, engine.blocks().len(), engine.published().batches), (json!({"forgotten": 20}), 0, told));
    assert_eq!(post(http, PATH, &body(3)).await.unwrap().cached_tokens(), Some(0));
    let replayed =
        until_some(SOON, "the replay", async || Some(batches(engine.addresses().replay.unwrap()).await.len()));
    assert_eq!(replayed.await.unwrap(), usize::try_from(told + 1).unwrap());
}

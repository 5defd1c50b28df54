//! The simulated engine answers as the recorded one: the same request bytes get the same fields, in the same order.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so")]

use std::io::Read as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvlb_tests::engine::{Adapter, Digest, Engine, EngineConfig};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::{Answer, Client, get, post};
use serde_json::{Value, json};
use tokio::time::Instant;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/vllm-0.32.0").join(name)
}

/// The recorded engine's set-up, as far as it shows in answers.
async fn recorded_engine() -> Engine {
    let config =
        EngineConfig { max_model_len: 4096, model_root: "models/qwen3-tiny".into(), ..EngineConfig::named("sim-1") };
    Engine::start(config).await.unwrap()
}

fn request_bytes(name: &str) -> Vec<u8> {
    let plain = golden(&format!("http/{name}.request"));
    if plain.exists() {
        return std::fs::read(plain).unwrap();
    }
    let mut bytes = Vec::new();
    let packed = std::fs::File::open(golden(&format!("http/{name}.request.gz"))).unwrap();
    flate2::read::GzDecoder::new(packed).read_to_end(&mut bytes).unwrap();
    bytes
}

/// A recorded answer, read by the same client as a live one.
async fn recorded(name: &str) -> Answer {
    let bytes = std::fs::read(golden(&format!("http/{name}.response"))).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = Client::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stream, &bytes).await.unwrap();
    drop(stream);
    client.answer().await.unwrap()
}

async fn simulated(address: SocketAddr, name: &str) -> Answer {
    let mut client = Client::connect(address).await.unwrap();
    client.send(&request_bytes(name)).await.unwrap();
    client.answer().await.unwrap()
}

/// Keys in order, and the kind of each value.
fn shape(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "bool".into(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "text".into(),
        Value::Array(items) => {
            // A list of tokens has any length; a list of objects has its own.
            let mut shapes: Vec<String> = items.iter().map(shape).collect();
            if items.iter().all(|item| item.is_number() || item.is_string()) {
                shapes.dedup();
            }
            format!("[{}]", shapes.join(","))
        }
        Value::Object(fields) => {
            let fields: Vec<String> = fields.iter().map(|(key, value)| format!("{key}:{}", shape(value))).collect();
            format!("{{{}}}", fields.join(","))
        }
    }
}

/// The shapes of a stream's events in order, repeats left out: the real engine puts several tokens in one event when it is busy.
fn shapes(answer: &Answer) -> Vec<String> {
    let of = |event: &String| serde_json::from_str(event).map_or_else(|_| event.clone(), |event: Value| shape(&event));
    let mut shapes: Vec<String> = answer.body.events().iter().map(of).collect();
    shapes.dedup();
    shapes
}

fn field_names(answer: &Answer) -> Vec<String> {
    let mut names: Vec<String> = answer.head.headers.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
    names.retain(|name| !name.starts_with("x-sim-"));
    names.sort();
    names
}

#[tokio::test]
async fn whole_answers_have_the_recorded_fields() {
    let engine = recorded_engine().await;
    let names = [
        "completions",
        "completions-again-cached",
        "completions-list",
        "completions-token-ids",
        "completions-x-request-id",
        "err-no-model-field",
        "chat",
        "messages",
        "responses",
        "get-models",
        "get-health",
        "get-ping",
        "get-load",
        "get-kv_event_sources",
        "tokenize",
        "tokenize-chat",
        "detokenize",
        "err-bad-json",
    ];
    for name in names {
        let (expected, got) = (recorded(name).await, simulated(engine.addresses().http, name).await);
        assert_eq!(got.head.status, expected.head.status, "{name}: {}", got.body.text());
        assert_eq!(field_names(&got), field_names(&expected), "{name}");
        assert_eq!(got.head.header("content-type"), expected.head.header("content-type"), "{name}");
        assert_eq!(shape(&got.body.json()), shape(&expected.body.json()), "{name}");
        assert_eq!(got.engine(), "sim-1");
    }
}

#[tokio::test]
async fn errors_and_constants_are_the_recorded_ones_word_for_word() {
    let engine = recorded_engine().await;
    let names = [
        "err-unknown-model",
        "err-text-plain",
        "err-empty-body",
        "err-dp-rank",
        "err-too-long",
        "get-notfound",
        "get-version",
    ];
    for name in names {
        let (expected, got) = (recorded(name).await, simulated(engine.addresses().http, name).await);
        assert_eq!((got.head.status, got.body.text()), (expected.head.status, expected.body.text()), "{name}");
    }
    let echoed = simulated(engine.addresses().http, "completions-x-request-id").await;
    assert_eq!(echoed.head.header("x-request-id"), Some("my-id-123"));
    assert_eq!(echoed.body.json()["id"], "cmpl-my-id-123");
}

#[tokio::test]
async fn streams_have_the_recorded_events_one_chunk_each() {
    let engine = recorded_engine().await;
    for name in
        ["completions-stream", "completions-stream-usage", "completions-n2-stream", "chat-stream", "chat-stream-usage"]
    {
        let (expected, got) = (recorded(name).await, simulated(engine.addresses().http, name).await);
        assert_eq!(field_names(&got), field_names(&expected), "{name}");
        assert_eq!(got.head.header("content-type"), expected.head.header("content-type"), "{name}");
        assert_eq!(got.body.events().len(), got.body.pieces.len(), "{name}: one event, one chunk");
        // The two choices of n=2 take turns in any order; each event's shape is the same.
        let (mut expected, mut got) = (shapes(&expected), shapes(&got));
        if name == "completions-n2-stream" {
            expected.sort();
            expected.dedup();
            got.sort();
            got.dedup();
        }
        assert_eq!(got, expected, "{name}");
    }
}

/// Name and shape of each event of a stream whose events have names, neighbours of one kind as one.
fn named(answer: &Answer) -> Vec<String> {
    let text = answer.body.text();
    let frames =
        text.split("\n\n").filter_map(|frame| frame.trim_start().strip_prefix("event: ")?.split_once("\ndata: "));
    let mut named: Vec<String> =
        frames.map(|(name, data)| format!("{name} {}", shape(&serde_json::from_str(data).unwrap()))).collect();
    named.dedup();
    named
}

#[tokio::test]
async fn streams_of_messages_and_responses_have_the_recorded_named_events() {
    let engine = recorded_engine().await;
    for name in ["messages-stream", "responses-stream"] {
        let (expected, got) = (recorded(name).await, simulated(engine.addresses().http, name).await);
        assert_eq!(field_names(&got), field_names(&expected), "{name}");
        assert!(named(&got).len() > 5 && !got.body.text().contains("[DONE]"), "{name}: {}", got.body.text());
        assert_eq!(named(&got), named(&expected), "{name}");
    }
}

#[tokio::test]
async fn adapters_are_listed_as_recorded_and_their_requests_miss_the_base_s_blocks() {
    let adapter = Adapter { name: "lora-a".into(), path: "models/lora-a".into() };
    let engine = Engine::start(EngineConfig { adapters: vec![adapter], ..EngineConfig::named("sim") }).await.unwrap();
    let address = engine.addresses().http;
    let models = get(address, "/v1/models").await.unwrap().body.json();
    assert_eq!(shape(&models), shape(&recorded("get-models-with-lora").await.body.json()));
    assert_eq!((&models["data"][1]["parent"], &models["data"][1]["root"]), (&json!("tiny"), &json!("models/lora-a")));
    let prompt: Vec<u32> = (0..40).collect();
    let mut cached = Vec::new();
    for (model, salt) in [("tiny", ""), ("tiny", ""), ("lora-a", ""), ("lora-a", ""), ("lora-a", "s")] {
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 1, "cache_salt": salt});
        cached.push(post(address, "/v1/completions", &body).await.unwrap().cached_tokens().unwrap());
    }
    assert_eq!(cached, [0, 32, 0, 32, 0]);
}

#[tokio::test]
async fn the_metrics_have_every_recorded_family_and_live_values() {
    let engine = recorded_engine().await;
    let address = engine.addresses().http;
    for _ in 0..2 {
        let body = json!({"prompt": (0..40).collect::<Vec<u32>>(), "max_tokens": 4});
        assert_eq!(post(address, "/v1/completions", &body).await.unwrap().head.status, 200);
    }
    let mut text = String::new();
    let packed = std::fs::File::open(golden("metrics.txt.gz")).unwrap();
    flate2::read::GzDecoder::new(packed).read_to_string(&mut text).unwrap();
    let live = get(address, "/metrics").await.unwrap().body.text();
    let families = |text: &str| -> Vec<String> {
        text.lines().filter(|line| line.starts_with("# TYPE")).map(str::to_owned).collect()
    };
    assert_eq!(families(&live), families(&text));
    let value = |series: &str| -> f64 {
        let found = live.lines().find_map(|text| text.strip_prefix(series)?.strip_prefix(' '));
        found.unwrap_or_else(|| panic!("no {series}")).parse().unwrap()
    };
    let labelled = |name: &str| value(&format!("{name}{{engine=\"0\",model_name=\"tiny\"}}"));
    let whole = [
        ("vllm:prefix_cache_queries_total", 80.0),
        ("vllm:prefix_cache_hits_total", 32.0),
        ("vllm:prompt_tokens_total", 80.0),
        ("vllm:generation_tokens_total", 8.0),
        ("vllm:time_to_first_token_seconds_count", 2.0),
        ("vllm:inter_token_latency_seconds_count", 6.0),
        ("vllm:request_prompt_tokens_sum", 80.0),
        ("vllm:num_requests_running", 0.0),
        ("vllm:kv_cache_usage_perc", 0.0),
    ];
    for (name, expected) in whole {
        assert!((labelled(name) - expected).abs() < 1e-9, "{name} is {}", labelled(name));
    }
    assert!(value("process_start_time_seconds") > 1.7e9);
    let bucket = "vllm:request_prompt_tokens_bucket{engine=\"0\",le=\"50.0\",model_name=\"tiny\"}";
    assert!((value(bucket) - 2.0).abs() < 1e-9);
    let config = live.lines().find(|line| line.starts_with("vllm:cache_config_info{")).unwrap();
    for label in [
        "block_size=\"16\"",
        "num_gpu_blocks=\"4096\"",
        "prefix_caching_hash_algo=\"sha256_cbor\"",
        "enable_prefix_caching=\"True\"",
    ] {
        assert!(config.contains(label), "{config}");
    }
    // Every recorded series of the engine itself is there, by name and label names.
    let series = |text: &str| -> Vec<String> {
        let names = text
            .lines()
            .filter(|line| line.starts_with("vllm:"))
            .map(|line| line.split('{').next().unwrap().to_owned());
        let mut names: Vec<String> = names.collect();
        names.dedup();
        names
    };
    assert_eq!(series(&live), series(&text));
}

#[tokio::test]
async fn usage_tells_what_came_from_the_cache_unless_switched_off() {
    let engine = recorded_engine().await;
    let address = engine.addresses().http;
    let ids = |n: u32| (0..n).collect::<Vec<u32>>();
    let mut cached = Vec::new();
    // 32 tokens again: the last block is computed again, as the recorded engine does.
    for (len, _why) in [(41, "cold"), (41, "warm"), (32, "exact multiple"), (33, "one more")] {
        let answer = post(address, "/v1/completions", &json!({"prompt": ids(len), "max_tokens": 1})).await.unwrap();
        cached.push(answer.cached_tokens());
    }
    assert_eq!(cached, [Some(0), Some(32), Some(16), Some(32)]);
    let silent = EngineConfig { no_prompt_tokens_details: true, ..EngineConfig::named("silent") };
    let silent = Engine::start(silent).await.unwrap();
    let answer =
        post(silent.addresses().http, "/v1/completions", &json!({"prompt": ids(41), "max_tokens": 1})).await.unwrap();
    assert_eq!((answer.cached_tokens(), answer.body.json()["usage"]["prompt_tokens_details"].is_null()), (None, true));
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request_at_once_in_every_phase() {
    let slow = EngineConfig { decode_ms_per_token: 20.0, prefill_us_per_token: 1000.0, ..EngineConfig::named("slow") };
    let engine = Engine::start(EngineConfig { max_num_seqs: 1, ..slow }).await.unwrap();
    let address = engine.addresses().http;
    let body = |stream: bool| json!({"prompt": [1, 2, 3], "max_tokens": 500, "stream": stream}).to_string();
    let json_type = [("Content-Type", "application/json")];
    // Streaming, after some chunks.
    let mut streaming = Client::connect(address).await.unwrap();
    streaming.request("POST", "/v1/completions", &json_type, body(true).as_bytes()).await.unwrap();
    streaming.head().await.unwrap();
    streaming.chunk().await.unwrap().unwrap();
    // Not streaming, and waiting for its turn behind the first.
    let mut waiting = Client::connect(address).await.unwrap();
    waiting.request("POST", "/v1/completions", &json_type, body(false).as_bytes()).await.unwrap();
    eventually(Duration::from_secs(5), "both there", async || (engine.running(), engine.waiting()) == (1, 1))
        .await
        .unwrap();
    drop(waiting);
    eventually(Duration::from_millis(100), "the waiting one gone", async || engine.waiting() == 0).await.unwrap();
    drop(streaming);
    eventually(Duration::from_millis(100), "the running one gone", async || engine.running() == 0).await.unwrap();
    let counters = engine.counters();
    assert_eq!((counters.seen, counters.running, counters.finished, counters.aborted), (2, 0, 0, 2));
    assert!(engine.requests().iter().all(|seen| seen.aborted && !seen.finished));
    // Neither counts as a success or an abort in the engine's own metrics (recorded).
    let metrics = get(address, "/metrics").await.unwrap().body.text();
    assert!(!metrics.lines().any(|line| line.starts_with("vllm:request_success_total") && !line.ends_with(" 0.0")));
}

#[tokio::test]
async fn requests_are_kept_with_their_exact_body_and_headers() {
    let engine = recorded_engine().await;
    let body = br#"{"prompt" :  "hi", "x":1e2,"x":3, "max_tokens":1}"#;
    let headers = [("Content-Type", "application/json"), ("X-Conversation-Id", "c 1")];
    let answer =
        kvlb_tests::harness::http::exchange(engine.addresses().http, "POST", "/v1/completions?a=b", &headers, body);
    assert_eq!(answer.await.unwrap().head.status, 200);
    let seen = engine.requests().pop().unwrap();
    let digest = <sha2::Sha256 as sha2::Digest>::digest(body);
    let hex = format!("{:?}", Digest::from_slice(&digest));
    assert_eq!((seen.path.as_str(), seen.body_bytes, &seen.body_sha256), ("/v1/completions?a=b", body.len(), &hex));
    assert_eq!((seen.method.as_str(), seen.header("x-conversation-id"), seen.status), ("POST", Some("c 1"), Some(200)));
    let over_http = get(engine.addresses().http, "/debug/requests").await.unwrap().body.json();
    assert_eq!(over_http[0]["path"], "/v1/completions?a=b");
}

#[tokio::test]
async fn prefill_and_decode_take_the_time_they_are_told() {
    let config =
        EngineConfig { prefill_us_per_token: 1000.0, decode_ms_per_token: 5.0, ..EngineConfig::named("timed") };
    let engine = Engine::start(config).await.unwrap();
    let prompt: Vec<u32> = (0..100).collect();
    let timed = async |body: Value| {
        let start = Instant::now();
        assert_eq!(post(engine.addresses().http, "/v1/completions", &body).await.unwrap().head.status, 200);
        start.elapsed()
    };
    let cold = timed(json!({"prompt": prompt, "max_tokens": 1})).await;
    let warm = timed(json!({"prompt": prompt, "max_tokens": 1})).await;
    let long = timed(json!({"prompt": prompt, "max_tokens": 41})).await;
    // 100 tokens cold, 4 beside 6 cached blocks, and 40 decode steps after that; upper bounds leave room for a busy machine.
    assert!((Duration::from_millis(100)..Duration::from_millis(400)).contains(&cold), "{cold:?}");
    assert!((Duration::from_millis(4)..Duration::from_millis(90)).contains(&warm), "{warm:?}");
    assert!((Duration::from_millis(200)..Duration::from_millis(600)).contains(&long), "{long:?}");
}

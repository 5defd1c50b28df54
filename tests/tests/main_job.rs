//! The main job: a warm request lands on the endpoint that holds its blocks, with both proofs, whatever way it came and whatever
//! form it has.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test says by a panic what went wrong")]

use std::cell::Cell;

use kvlb_tests::engine::{Algorithm, Engine, EngineConfig, Version};
use kvlb_tests::harness::http::Answer;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::stage::{MODEL, Metrics, Stage, VIP, cached_tokens, engine, rule};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
/// The first engine of a rule is at 127.0.0.11.
const FIRST: u8 = 11;

/// How traffic reaches kvlb.
#[derive(Clone, Copy)]
struct Way {
    datapath: &'static str,
    io: &'static str,
}

#[tokio::test]
async fn through_the_kernel_on_io_uring() {
    the_main_job(Way { datapath: "auto", io: "uring" }).await;
}

#[tokio::test]
async fn through_the_kernel_on_epoll() {
    the_main_job(Way { datapath: "auto", io: "epoll" }).await;
}

#[tokio::test]
async fn on_a_socket_of_its_own_on_io_uring() {
    the_main_job(Way { datapath: "none", io: "uring" }).await;
}

#[tokio::test]
async fn on_a_socket_of_its_own_on_epoll() {
    the_main_job(Way { datapath: "none", io: "epoll" }).await;
}

async fn the_main_job(way: Way) {
    let Some(stage) = Stage::new("main-job").unwrap() else { return };
    let engines = stage.engines(FIRST, 3, &engine()).await.unwrap();
    let kvlb = started(&stage, way).await;
    let scenario = Scenario::new(&stage, &kvlb, 8080, engines, &json!({})).await;
    for streamed in [false, true] {
        scenario.proves(COMPLETIONS, &|beginning, question| with(streamed, text(beginning, question))).await;
        scenario.proves(CHAT, &|beginning, question| with(streamed, chat(beginning, question))).await;
        scenario.proves(COMPLETIONS, &|beginning, question| with(streamed, token_ids(beginning, question))).await;
    }
    scenario.proves(COMPLETIONS, &batch).await;
    scenario.proves(COMPLETIONS, &batch_of_token_ids).await;
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn each_way_in_which_an_engine_may_speak_and_hash() {
    let Some(stage) = Stage::new("ways").unwrap() else { return };
    let kvlb = started(&stage, Way { datapath: "auto", io: "auto" }).await;
    let of = |minor: u16| EngineConfig { version: Version::new(minor, 0), ..engine() };
    let way = async |number: u8, config: EngineConfig, more: Value| {
        let engines = stage.engines(20 + 10 * number, 2, &config).await.unwrap();
        Scenario::new(&stage, &kvlb, 8000 + u16::from(number), engines, &more).await
    };
    // Arrays on the wire, no topic in replays.
    let arrays = way(1, of(23), json!({})).await;
    arrays.proves(COMPLETIONS, &text).await;
    arrays.proves(COMPLETIONS, &salted).await;
    // Maps, and extra keys without a tag.
    let untagged = way(2, of(30), json!({})).await;
    untagged.proves(COMPLETIONS, &salted).await;
    untagged.proves(CHAT, &chat).await;
    // Tagged extra keys, and a salt met before any event without one.
    let tagged = way(3, of(32), json!({})).await;
    tagged.proves(COMPLETIONS, &salted).await;
    tagged.proves(CHAT, &chat).await;
    tagged.is_cold_under_another_salt().await;
    // Whole digests on the wire, in both forms of events.
    for (number, minor) in [(4, 23), (5, 32)] {
        let bytes = way(number, EngineConfig { byte_hashes: true, ..of(minor) }, json!({})).await;
        bytes.proves(COMPLETIONS, &text).await;
        bytes.proves(COMPLETIONS, &salted).await;
    }
    let xxhash = EngineConfig { prefix_caching_hash_algo: Algorithm::XxhashCbor, ..engine() };
    way(6, xxhash, json!({"kvHashAlgo": "xxhash_cbor"})).await.proves(CHAT, &chat).await;
    let wide = EngineConfig { block_size: 32, ..engine() };
    way(7, wide, json!({"kvBlockSize": 32})).await.proves(CHAT, &chat).await;
    kvlb.stop().await.unwrap();
}

/// The source document's worked example, in its mode-3 form: prompts of 40 and 38 tokens with a common preamble of 32, blocks of 16.
#[tokio::test]
async fn the_documents_worked_example_with_its_numbers() {
    let Some(stage) = Stage::new("example").unwrap() else { return };
    let engines = stage.engines(FIRST, 2, &engine()).await.unwrap();
    let kvlb = started(&stage, Way { datapath: "auto", io: "auto" }).await;
    let id = kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    kvlb.subscribed(id).await.unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();
    let preamble = "A".to_owned() + &" the".repeat(31);
    let ask = |prompt: &str| json!({"model": MODEL, "prompt": prompt, "max_tokens": 1});
    let prompt_a = ask(&(preamble.clone() + &" of".repeat(8)));
    let prompt_b = ask(&(preamble + &" and".repeat(6)));

    let explain_path = format!("/netlox/v1/config/ai/kv/explain?service_id={id}");
    let explain = async |body: &Value| kvlb.api("POST", &explain_path, Some(body)).await.unwrap().1;
    let cold = explain(&prompt_a).await;
    assert_eq!(cold["prompts"].as_array().map(Vec::len), Some(1), "{cold}");
    assert_eq!((&cold["prompts"][0]["tokens"], &cold["prompts"][0]["blocks"]), (&json!(40), &json!(2)), "{cold}");
    assert_eq!((&cold["tier"], &cold["reason"]), (&json!("2"), &json!("no_worker")));
    assert_eq!(held(&cold), [(0, 0), (0, 0)]);
    let answered_a = stage.ask(8080, COMPLETIONS, &prompt_a).await.unwrap();
    assert_eq!(answered_a.body.json()["usage"]["prompt_tokens"], 40);
    let owner = engines.iter().position(|engine| engine.name() == answered_a.engine()).unwrap();
    kvlb.settled(id, &engines).await.unwrap();
    let statuses = kvlb.statuses(id).await.unwrap();
    assert_eq!((&statuses[owner]["blocks"], &statuses[1 - owner]["blocks"]), (&json!(2), &json!(0)));

    let warm = explain(&prompt_b).await;
    assert_eq!((&warm["prompts"][0]["tokens"], &warm["prompts"][0]["blocks"]), (&json!(38), &json!(2)), "{warm}");
    assert_eq!((&warm["tier"], &warm["endpoint"]), (&json!("1.5"), &json!(owner)));
    assert_eq!((held(&warm)[owner], held(&warm)[1 - owner]), ((2, 2), (0, 0)));
    let before = kvlb.metrics().await.unwrap();
    let answered_b = stage.ask(8080, COMPLETIONS, &prompt_b).await.unwrap();
    assert_eq!(answered_b.body.json()["usage"]["prompt_tokens"], 38);
    assert_eq!((answered_b.engine(), answered_b.cached_tokens()), (answered_a.engine(), Some(32)));
    let moved = kvlb.metrics().await.unwrap().moved(&before, "loxilb_pd_kv_tier15");
    assert_eq!(moved, [(format!("loxilb_pd_kv_tier15_hits_total{{ep_idx=\"{owner}\"}}"), 1.0)]);

    let inventory = format!("/netlox/v1/config/ai/kv/inventory?service_id={id}&ep_idx={owner}");
    let inventory = kvlb.api("GET", &inventory, None).await.unwrap().1;
    let names: Vec<u64> =
        inventory["blocks"].as_array().unwrap().iter().map(|block| block["hash_uint64"].as_u64().unwrap()).collect();
    let of_engine: Vec<u64> = engines[owner].blocks().into_keys().collect();
    assert_eq!((names, &inventory["total"]), (of_engine, &json!(2)));
    kvlb.stop().await.unwrap();
}

/// kvlb with its VIP made reachable.
async fn started(stage: &Stage, way: Way) -> Kvlb {
    if way.datapath == "none" {
        stage.own(VIP).unwrap();
    }
    let kvlb = stage.kvlb(&["--datapath", way.datapath, "--io", way.io]).await.unwrap();
    let status = kvlb.api("GET", "/netlox/v1/status", None).await.unwrap().1;
    let mode = if way.datapath == "none" { "none" } else { "sk_lookup" };
    assert_eq!(status["datapath"]["mode"], mode, "{status}");
    assert!(way.io == "auto" || status["io"].as_str().unwrap().ends_with(way.io), "{status}");
    kvlb
}

/// A rule with its engines.
struct Scenario<'a> {
    stage: &'a Stage,
    kvlb: &'a Kvlb,
    id: u64,
    port: u16,
    engines: Vec<Engine>,
    scenes: Cell<usize>,
}

impl<'a> Scenario<'a> {
    async fn new(stage: &'a Stage, kvlb: &'a Kvlb, port: u16, engines: Vec<Engine>, more: &Value) -> Self {
        let id = kvlb.create(&rule(port, &engines, more)).await.unwrap();
        kvlb.subscribed(id).await.unwrap();
        kvlb.tokenizes(id, MODEL).await.unwrap();
        Self { stage, kvlb, id, port, engines, scenes: Cell::new(0) }
    }

    /// Two requests with one beginning: the first is cold, and the second lands where the first left its blocks.
    async fn proves(&self, path: &str, body: &dyn Fn(&str, &str) -> Value) {
        let beginning = preamble(self.scenes.replace(self.scenes.get() + 1));
        let (cold_body, warm_body) = (body(&beginning, "What is the capital?"), body(&beginning, "Who wrote Faust?"));
        let start = self.kvlb.metrics().await.unwrap();
        let cold = self.stage.ask(self.port, path, &cold_body).await.unwrap();
        assert_eq!(cold.head.status, 200, "{}", cold.body.text());
        let owner = self.position(&cold);
        self.kvlb.settled(self.id, &self.engines).await.unwrap();
        let before = self.kvlb.metrics().await.unwrap();
        assert_eq!(moved(&start, &before), ["fallthrough_total", "miss_reason_total{reason=\"no_worker\"}"]);

        let warm = self.stage.ask(self.port, path, &warm_body).await.unwrap();
        let after = self.kvlb.metrics().await.unwrap();
        assert_eq!(self.position(&warm), owner, "{warm_body}");
        assert_eq!(moved(&before, &after), [format!("hits_total{{ep_idx=\"{owner}\"}}")], "{warm_body}");
        assert!(cached_tokens(&warm) > Some(0), "{}", warm.body.text());
        let status = &self.kvlb.statuses(self.id).await.unwrap()[owner];
        assert_eq!(status["contract"], "proved_by_request", "{status}");
    }

    /// A salt keeps tenants apart: what is warm under one is cold under another.
    async fn is_cold_under_another_salt(&self) {
        let mut body = salted(&preamble(0), "Who wrote Faust?");
        let before = self.kvlb.metrics().await.unwrap();
        self.stage.ask(self.port, COMPLETIONS, &body).await.unwrap();
        body["cache_salt"] = json!("tenant-b");
        self.stage.ask(self.port, COMPLETIONS, &body).await.unwrap();
        let after = self.kvlb.metrics().await.unwrap();
        let misses = after.moved(&before, "loxilb_pd_kv_tier15_miss_reason_total");
        assert_eq!(misses, [("loxilb_pd_kv_tier15_miss_reason_total{reason=\"no_worker\"}".to_owned(), 1.0)]);
    }

    /// The position of the engine that answered, by its own word.
    fn position(&self, answer: &Answer) -> usize {
        let by_name = |engine: &Engine| engine.name() == answer.engine();
        self.engines.iter().position(by_name).unwrap_or_else(|| panic!("no engine is named {:?}", answer.engine()))
    }
}

/// The tier's counters that moved, by one each.
fn moved(before: &Metrics, after: &Metrics) -> Vec<String> {
    let moved = after.moved(before, "loxilb_pd_kv_tier15_");
    let short = |(series, by): (String, f64)| {
        assert!((by - 1.0).abs() < f64::EPSILON, "{series} +{by}");
        series.trim_start_matches("loxilb_pd_kv_tier15_").to_owned()
    };
    moved.into_iter().map(short).collect()
}

/// Depth and count of each candidate of an explanation.
fn held(explanation: &Value) -> Vec<(u64, u64)> {
    let number = |value: &Value| value.as_u64().unwrap();
    explanation["candidates"].as_array().unwrap().iter().map(|c| (number(&c["depth"]), number(&c["count"]))).collect()
}

/// Some hundred tokens that differ from the first block on.
fn preamble(scene: usize) -> String {
    format!(
        "Scene {scene}. You are a careful librarian. Answer every question in one short sentence and name the source that you rely \
         on. The library holds novels, plays, atlases and letters in many languages. "
    )
}

fn text(beginning: &str, question: &str) -> Value {
    json!({"model": MODEL, "prompt": format!("{beginning}{question}"), "max_tokens": 4})
}

fn salted(beginning: &str, question: &str) -> Value {
    let mut body = text(beginning, question);
    body["cache_salt"] = json!("tenant-a");
    body
}

fn chat(beginning: &str, question: &str) -> Value {
    json!({"model": MODEL, "max_tokens": 4, "messages": [
        {"role": "system", "content": beginning},
        {"role": "user", "content": question},
    ]})
}

/// One token per byte, as ids: any will do, no tokenizer looks at them.
fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(|byte| u32::from(byte) + 10).collect()
}

fn token_ids(beginning: &str, question: &str) -> Value {
    json!({"model": MODEL, "prompt": ids(&format!("{beginning}{question}")), "max_tokens": 4})
}

/// Two prompts in one request, the second with a beginning of its own.
fn batch(beginning: &str, question: &str) -> Value {
    let prompts = [format!("{beginning}{question}"), format!("And also: {beginning}{question}")];
    json!({"model": MODEL, "prompt": prompts, "max_tokens": 4})
}

fn batch_of_token_ids(beginning: &str, question: &str) -> Value {
    let prompts = [ids(&format!("{beginning}{question}")), ids(&format!("And also: {beginning}{question}"))];
    json!({"model": MODEL, "prompt": prompts, "max_tokens": 4})
}

fn with(streamed: bool, mut body: Value) -> Value {
    if streamed {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}

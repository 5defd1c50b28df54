//! The source document's example with texts, and what an operator sees of two legs: `explain`, `get`, `preflight`, `verify`, metrics and
//! the access log.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::float_cmp, reason = "counters are whole numbers")]

mod split;

use kvlb_tests::engine::{Engine, EngineConfig, FaultPlan, KvConnector};
use kvlb_tests::harness::http::{Answer, Client};
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::stage::{MODEL, PATIENCE, Stage, at, engine, rule, vip};
use kvlb_tests::harness::{eventually, temp_dir};
use serde_json::{Value, json};

use split::{COMPLETIONS, DECODE, Fleet, PREFILL, SOON, body, code, prompt};

/// EP0 and EP2 prefill, EP1 decodes; what decodes tells nobody what it holds.
struct Document {
    stage: Stage,
    engines: Vec<Engine>,
    kvlb: Kvlb,
    id: u64,
}

impl Document {
    async fn new(label: &str) -> Option<Self> {
        let stage = Stage::new(label).unwrap()?;
        stage.own(std::net::Ipv4Addr::new(10, 10, 10, 254)).unwrap();
        let mut engines = Vec::new();
        for number in 0..3_u8 {
            let config = EngineConfig { kv_connector: KvConnector::Nixl, no_events: number == 1, ..engine() };
            engines.push(stage.engine(at(11 + number, config)).await.unwrap());
        }
        let kvlb = stage.kvlb(&["--datapath", "none"]).await.unwrap();
        let mut wanted = rule(8080, &engines, &json!({"kvExactMode": 1, "name": "chat", "decisionHeaders": true}));
        for (endpoint, role) in wanted["endpoints"].as_array_mut().unwrap().iter_mut().zip([1, 2, 1]) {
            endpoint["ep_role"] = json!(role);
        }
        let id = kvlb.create(&wanted).await.unwrap();
        kvlb.subscribed(id).await.unwrap();
        kvlb.tokenizes(id, MODEL).await.unwrap();
        Some(Self { stage, engines, kvlb, id })
    }

    async fn ask(&self, prompt: &str) -> Answer {
        let asks = json!({"model": MODEL, "prompt": prompt, "max_tokens": 4});
        self.stage.ask(8080, COMPLETIONS, &asks).await.unwrap()
    }

    async fn explain(&self, prompt: &str) -> Value {
        let path = format!("/netlox/v1/config/ai/kv/explain?service_id={}", self.id);
        let asks = json!({"model": MODEL, "prompt": prompt, "max_tokens": 4});
        self.kvlb.api("POST", &path, Some(&asks)).await.unwrap().1
    }

    /// `text` with words behind it until it has so many tokens.
    async fn of_tokens(&self, mut text: String, words: &str, tokens: usize) -> String {
        for word in words.split(' ').cycle() {
            let len = self.explain(&text).await["prompts"][0]["tokens"].as_u64().unwrap_or_default();
            match usize::try_from(len).unwrap() {
                len if len == tokens => return text,
                len if len > tokens => text.pop().map(|_| ()).unwrap(),
                _ => text.extend([" ", word]),
            }
        }
        text
    }

    fn cli(&self, args: &[&str]) -> String {
        self.stage.cli(args).unwrap().ok().unwrap()
    }

    fn explained(&self, asks: &Value) -> String {
        let file = self.stage.dir().join("body.json");
        std::fs::write(&file, asks.to_string()).unwrap();
        self.cli(&["explain", "chat", file.to_str().unwrap()])
    }
}

fn place(engine: &Engine) -> String {
    engine.addresses().http.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_worked_example_goes_as_printed_with_texts() {
    let Some(mut document) = Document::new("example").await else { return };
    let words = "You are a careful librarian who answers in one short sentence and names the source";
    let preamble = document.of_tokens("Hello".to_owned(), words, 32).await;
    let a = document.of_tokens(preamble.clone(), "Which atlas is the oldest", 40).await;
    let b = document.of_tokens(preamble, "Who wrote Faust then", 38).await;
    let (told_a, told_b) = (document.explain(&a).await, document.explain(&b).await);
    let ids = |told: &Value| told["prompts"][0]["token_ids"].as_array().unwrap().clone();
    assert_eq!((ids(&told_a).len(), ids(&told_b).len()), (40, 38));
    assert!(ids(&told_a)[..32] == ids(&told_b)[..32] && ids(&told_a)[32..38] != ids(&told_b)[32..]);
    assert_eq!(told_a["reason"], "no_worker");

    let before = document.kvlb.metrics().await.unwrap();
    let cold = document.ask(&a).await;
    assert_eq!((cold.head.status, cold.engine()), (200, "engine-12"), "{}", cold.body.text());
    assert_eq!(cold.head.header("x-kvlb-prefill-endpoint"), Some(&*place(&document.engines[0])), "the first in turn");
    let known = async || document.explain(&b).await["candidates"][0]["depth"] == 2;
    eventually(PATIENCE, "EP0 is known to hold both blocks", known).await.unwrap();
    let told = document.explain(&b).await;
    let of = |number: usize, name: &str| told["candidates"][number][name].clone();
    assert_eq!([of(0, "depth"), of(2, "depth"), of(0, "count"), of(2, "count")], [2, 0, 2, 0].map(|n| json!(n)));
    assert_eq!([of(0, "role"), of(1, "role"), of(2, "role")], ["prefill", "decode", "prefill"].map(|n| json!(n)));

    let warm = document.ask(&b).await;
    assert_eq!((warm.head.status, warm.engine()), (200, "engine-12"));
    assert_eq!(warm.head.header("x-kvlb-prefill-endpoint"), Some(&*place(&document.engines[0])));
    let says = |name: &str| warm.head.header(name).unwrap_or_default().to_owned();
    assert_eq!(
        (says("x-kvlb-tier"), says("x-kvlb-depth"), says("x-kvlb-blocks")),
        ("1.5".into(), "2".into(), "2".into())
    );
    assert_eq!(warm.cached_tokens(), Some(32));
    let moved = document.kvlb.metrics().await.unwrap().moved(&before, "loxilb_pd_kv_tier15_hits_total");
    assert_eq!(moved, [("loxilb_pd_kv_tier15_hits_total{ep_idx=\"0\"}".to_owned(), 1.0)]);
    let asked = |document: &Document, number: usize| {
        let seen = document.engines[number].requests();
        seen.iter().filter(|seen| seen.method == "POST" && seen.path == COMPLETIONS).count()
    };
    assert_eq!([0, 1, 2].map(|number| asked(&document, number)), [2, 2, 0]);

    // The coda: EP0 refuses.
    document.engines[0].kill().await;
    let coda = document.ask(&b).await;
    assert_eq!((coda.head.status, coda.engine()), (200, "engine-12"));
    assert_eq!(coda.head.header("x-kvlb-prefill-endpoint"), Some(&*place(&document.engines[2])));
    assert_eq!([0, 1, 2].map(|number| asked(&document, number)), [2, 3, 1]);
    assert_eq!(document.engines[1].handoffs().pulled_own, 3);
    document.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_tells_of_roles_legs_and_nothing_that_is_wrong() {
    let Some(document) = Document::new("operator").await else { return };
    let asks = json!({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4});
    let text = document.explained(&asks);
    assert!(text.contains("handoff   nixl\ndecode    1\n"), "{text}");
    assert!(text.contains("prefill") && text.contains("decode"), "{text}");
    let mut samples = asks.clone();
    samples["n"] = json!(2);
    let text = document.explained(&samples);
    assert!(text.contains("alone     samples\n") && !text.contains("handoff"), "{text}");

    let roles = |text: &str| {
        let lines = text.lines().filter(|line| line.contains("127.0.0.1"));
        let role = |line: &str| {
            if line.contains("prefill") {
                'p'
            } else if line.contains("decode") {
                'd'
            } else {
                '-'
            }
        };
        lines.map(role).collect::<String>()
    };
    let wide = document.cli(&["get", "lb", "-o", "wide"]);
    assert_eq!(roles(&wide), "pdp", "{wide}");
    let status = document.cli(&["get", "kvstatus"]);
    assert_eq!(roles(&status), "pdp", "{status}");

    // Both prefill engines announce something, so that their seed can be told.
    for engine in [0, 2] {
        let warm = json!({"model": MODEL, "prompt": (1..40).collect::<Vec<u32>>(), "max_tokens": 1});
        document.stage.post(document.engines[engine].addresses().http, COMPLETIONS, &warm).await.unwrap();
    }
    let heard = async || {
        let statuses = document.kvlb.statuses(document.id).await.unwrap();
        [0, 2].iter().all(|number| statuses[*number]["blocks"] == 2)
    };
    eventually(PATIENCE, "both are heard", heard).await.unwrap();
    let output = document.stage.cli(&["preflight", "chat", "-o", "json"]).unwrap();
    let report: Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!((output.code, &report["verdict"]), (Some(0), &json!("ok")), "{}", output.out);
    let legs = |number: usize| {
        let legs = report["endpoints"][number]["legs"].as_array().unwrap();
        legs.iter().map(|row| row["leg"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    for (number, publishes) in [(0, true), (1, false), (2, true)] {
        assert_eq!(legs(number).contains(&"events".to_owned()), publishes, "{number}: {:?}", legs(number));
    }
    let verified = document.stage.cli(&["verify", "chat"]).unwrap();
    assert_eq!(verified.code, Some(0), "{}{}", verified.out, verified.err);
    document.kvlb.stop().await.unwrap();
}

/// Lines of an access log as far as they are there.
fn lines(log: &std::path::Path) -> Vec<Value> {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn times_and_records_are_those_of_both_legs_also_where_one_fails() {
    let dir = temp_dir().unwrap();
    let log = dir.path().join("access.log");
    let args = ["--access-log", "full", "--access-log-file", log.to_str().unwrap()];
    let rule = json!({"timeoutPdPrefill": 5000, "timeoutPdDecode": 400, "cb_enable": false});
    // 300 ms for a prompt.
    let fleet = Fleet::with(&args, &[PREFILL, DECODE], rule, |config| EngineConfig {
        prefill_us_per_token: if config.name == "engine-0" { 7500.0 } else { 5.0 },
        ..config
    })
    .await;
    let before = fleet.split.kvlb.metrics().await.unwrap();
    assert_eq!(fleet.split.ask(&body(&prompt(1, 40))).await.head.status, 200);
    let moved = |now: &kvlb_tests::harness::stage::Metrics, family: &str| now.sum(family) - before.sum(family);
    let now = fleet.split.kvlb.metrics().await.unwrap();
    assert_eq!(moved(&now, "kvlb_first_byte_seconds_count"), 1.0);
    assert!(moved(&now, "kvlb_first_byte_seconds_sum") >= 0.3, "{}", moved(&now, "kvlb_first_byte_seconds_sum"));
    assert!(moved(&now, "kvlb_pd_prefill_seconds_sum") >= 0.3);
    assert_eq!(moved(&now, "kvlb_pd_legs_total"), 2.0);
    // A decode that does not begin in its own time, behind a prefill that took longer than that.
    fleet.faults(1, FaultPlan { decode_stall: true, ..FaultPlan::default() });
    assert_eq!(code(&fleet.split.ask(&body(&prompt(2, 60))).await), (504, Some("pd_decode_timeout")));
    fleet.engines[1].faults().clear();
    // A client that leaves while its prompt is computed.
    let mut client: Client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
    let asks = body(&prompt(3, 400)).to_string();
    client.request("POST", COMPLETIONS, &[("Content-Type", "application/json")], asks.as_bytes()).await.unwrap();
    eventually(SOON, "it is computed", async || fleet.engines[0].running() == 1).await.unwrap();
    drop(client);
    fleet.faults(0, FaultPlan { prefill_status: Some(400), ..FaultPlan::default() });
    assert_eq!(fleet.split.ask(&body(&prompt(4, 40))).await.head.status, 400);
    fleet.engines[0].faults().clear();
    eventually(SOON, "all are written", async || lines(&log).len() == 4).await.unwrap();
    let lines = lines(&log);
    let fields = |number: usize, names: [&str; 3]| names.map(|name| lines[number][name].clone());
    let ends: Vec<_> = (0..4).map(|number| fields(number, ["status", "end", "phase"])).collect();
    assert_eq!(ends[0], [json!(200), json!("complete"), Value::Null], "{lines:?}");
    assert_eq!(ends[1], [json!(504), json!("timed_out"), json!("wait")], "{lines:?}");
    let left = ends.iter().find(|end| end[1] == "client_left").unwrap_or_else(|| panic!("{lines:?}"));
    assert_eq!((&left[0], &left[2]), (&Value::Null, &json!("prefill")), "{lines:?}");
    let refused = lines.iter().find(|line| line["status"] == 400).unwrap_or_else(|| panic!("{lines:?}"));
    assert_eq!((&refused["end"], &refused["code"]), (&json!("complete"), &Value::Null), "the engine's own word");
    let places = [place(&fleet.engines[0]), place(&fleet.engines[1])].map(|place| json!(place));
    for number in 0..2 {
        let [prefill, decode, time] = fields(number, ["prefill_endpoint", "endpoint", "prefill_us"]);
        assert_eq!([prefill, decode], places, "{lines:?}");
        assert!(time.as_u64().unwrap() >= 300_000, "{lines:?}");
    }
    fleet.ends_clean().await;
}

/// What computes prompts is idle while answers are made, and `get ep`'s numbers say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_answer_is_load_where_it_is_made_and_nowhere_else() {
    let Some(document) = Document::new("load").await else { return };
    let asks = json!({"model": MODEL, "prompt": "Tell me everything.", "max_tokens": 20_000, "stream": true});
    let mut client = document.stage.connect(vip(8080)).unwrap();
    let headers = [("Content-Type", "application/json")];
    client.request("POST", COMPLETIONS, &headers, asks.to_string().as_bytes()).await.unwrap();
    assert_eq!(client.head().await.unwrap().status, 200);
    let told = document.explain("Tell me everything.").await;
    let loads: Vec<_> = told["candidates"].as_array().unwrap().iter().map(|c| c["load"].clone()).collect();
    assert_eq!(loads, [json!(0), json!(1), json!(0)], "{told}");
    let gauge = document.kvlb.metrics().await.unwrap();
    let by: Vec<_> = gauge.family("kvlb_endpoint_load").filter(|(_, load)| *load != 0.0).collect();
    assert!(by.len() == 1 && by[0].0.contains("ep_idx=\"1\""), "{by:?}");
    drop(client);
    eventually(PATIENCE, "it is given up", async || document.engines[1].running() == 0).await.unwrap();
    document.kvlb.stop().await.unwrap();
}

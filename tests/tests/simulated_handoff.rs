//! Simulated engines hand prefills to decodes as recorded ones did, and a handoff that goes wrong can be seen: in the answer, in the
//! journal, and in the blocks that are kept.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on says so")]

mod golden;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use kvlb_tests::engine::{Engine, EngineConfig, KvConnector, KvRole, LegFate, LegKind};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::{Answer, Client, exchange, get, post};
use kvlb_tests::harness::kvlb::binary;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(5);

fn nixl(name: &str) -> EngineConfig {
    EngineConfig {
        kv_connector: KvConnector::Nixl,
        prefill_us_per_token: 1.0,
        decode_ms_per_token: 0.1,
        python_hash_seed: Some("0".into()),
        ..EngineConfig::named(name)
    }
}

fn mooncake(name: &str, kv_role: KvRole) -> EngineConfig {
    EngineConfig { kv_connector: KvConnector::Mooncake, kv_role, ..nixl(name) }
}

async fn start(config: EngineConfig) -> Engine {
    Engine::start(config).await.unwrap()
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| seed * 1000 + i).collect()
}

fn http(engine: &Engine) -> SocketAddr {
    engine.addresses().http
}

async fn ask(engine: &Engine, body: &Value, id: &str) -> Answer {
    let path = if body["messages"].is_null() { "/v1/completions" } else { "/v1/chat/completions" };
    let headers = [("Content-Type", "application/json"), ("X-Request-Id", id)];
    exchange(http(engine), "POST", path, &headers, body.to_string().as_bytes()).await.unwrap()
}

fn text(answer: &Answer) -> String {
    assert_eq!(answer.head.status, 200, "{}", answer.body.text());
    answer.body.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// The parameters a prefill of this prompt answers.
async fn prefill(engine: &Engine, prompt: &[u32]) -> Value {
    let params = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    let body = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params});
    let answer = ask(engine, &body, "leg").await;
    assert_eq!(answer.head.status, 200, "{}", answer.body.text());
    answer.body.json()["kv_transfer_params"].clone()
}

async fn decode(engine: &Engine, prompt: &[u32], params: &Value) -> Answer {
    ask(engine, &json!({"prompt": prompt, "max_tokens": 12, "kv_transfer_params": params}), "leg").await
}

/// What an engine says that computes the prompt itself.
async fn alone(prompt: &[u32]) -> String {
    let engine = start(EngineConfig { kv_connector: KvConnector::None, ..nixl("alone") }).await;
    text(&ask(&engine, &json!({"prompt": prompt, "max_tokens": 12}), "alone").await)
}

fn fates(engine: &Engine, kind: LegKind) -> Vec<LegFate> {
    engine.legs().iter().filter(|leg| leg.kind == kind).map(|leg| leg.fate).collect()
}

async fn metric(engine: &Engine, series: &str) -> f64 {
    let text = get(http(engine), "/metrics").await.unwrap().body.text();
    let found = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')).map(str::to_owned);
    found.unwrap_or_else(|| panic!("no {series}")).parse().unwrap()
}

/// Keys in order and kinds of values; a list of numbers is as long as it is.
fn shape(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "text".into(),
        Value::Array(items) => format!("[{}]", items.iter().map(shape).collect::<Vec<_>>().join(",")),
        Value::Object(fields) => {
            let fields: Vec<String> = fields.iter().map(|(key, value)| format!("{key}:{}", shape(value))).collect();
            format!("{{{}}}", fields.join(","))
        }
    }
}

fn parsed(text: &Value) -> Value {
    serde_json::from_str(text.as_str().unwrap()).unwrap()
}

#[tokio::test]
async fn the_recorded_exchanges_go_the_same_way_between_two_simulated_engines() {
    let recorded_engine =
        |name| EngineConfig { max_model_len: 4096, no_prompt_tokens_details: true, tokenizer: None, ..nixl(name) };
    let (p, d) = (start(recorded_engine("p")).await, start(recorded_engine("d")).await);
    let exchanges = golden::json("vllm-0.32.0/http/pd-nixl-exchanges.json.gz");
    let exchanges = exchanges.as_array().unwrap();
    assert_eq!(exchanges.len(), 4);
    for recorded in exchanges {
        let label = recorded["label"].as_str().unwrap();
        let chat = label == "chat-stream";
        let got = ask(&p, &recorded["prefill_request"], &format!("pd-{label}")).await;
        let (expected, got) = (parsed(&recorded["prefill_response"]), got.body.json());
        let (theirs, ours) = (&expected["kv_transfer_params"], got["kv_transfer_params"].clone());
        // Without the recorded tokenizer a chat has another number of tokens, and of blocks.
        let (mut theirs_cut, mut ours_cut) = (expected.clone(), got.clone());
        if chat {
            theirs_cut["kv_transfer_params"]["remote_block_ids"] = json!([[]]);
            ours_cut["kv_transfer_params"]["remote_block_ids"] = json!([[]]);
            let tokens = usize::try_from(ours["remote_num_tokens"].as_u64().unwrap()).unwrap();
            assert_eq!(ours["remote_block_ids"][0].as_array().unwrap().len(), tokens.div_ceil(16));
        } else {
            assert_eq!(ours["remote_num_tokens"], theirs["remote_num_tokens"], "{label}");
            // The pool gives the recorded numbers, but for those of the last token of a prompt that ends with a block.
            assert_eq!(ours["remote_block_ids"], theirs["remote_block_ids"], "{label}");
        }
        assert_eq!(shape(&ours_cut), shape(&theirs_cut), "{label}");
        let id = |params: &Value| {
            let id = params["remote_request_id"].as_str().unwrap();
            let (id, suffix) = id.rsplit_once('-').unwrap();
            (id.to_owned(), suffix.len())
        };
        assert_eq!(id(&ours), id(theirs), "{label}");
        assert_eq!(ours["remote_engine_id"].as_str().unwrap(), p.engine_id(0).unwrap());
        assert_eq!(
            ours["remote_engine_id"].as_str().unwrap().len(),
            theirs["remote_engine_id"].as_str().unwrap().len()
        );
        for (key, fixed) in
            [("transfer_mode", json!("pull")), ("tp_size", json!(1)), ("remote_prefill_cached_tokens", json!(0))]
        {
            assert_eq!((&ours[key], &theirs[key]), (&fixed, &fixed), "{label}");
        }

        let series = recorded["decode_metric_delta"].as_object().unwrap();
        let mut before = BTreeMap::new();
        for name in series.keys() {
            before.insert(name.clone(), metric(&d, name).await);
        }
        let mut request = recorded["decode_request"].clone();
        request["kv_transfer_params"] = ours;
        let answer = ask(&d, &request, &format!("pd-{label}")).await;
        if chat {
            let events = |text: &str| -> Vec<String> {
                let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
                events
                    .map(|event| serde_json::from_str(event).map_or_else(|_| event.into(), |event| shape(&event)))
                    .collect()
            };
            assert_eq!(events(&answer.body.text()), events(recorded["decode_response"].as_str().unwrap()), "{label}");
        } else {
            assert_eq!(shape(&answer.body.json()), shape(&parsed(&recorded["decode_response"])), "{label}");
            assert_eq!(answer.body.json()["usage"], parsed(&recorded["decode_response"])["usage"], "{label}");
        }
        for (name, delta) in series {
            let moved = metric(&d, name).await - before[name];
            if !chat || name.contains("success") {
                assert!((moved - delta.as_f64().unwrap()).abs() < 1e-9, "{label}: {name} moved by {moved}");
            } else {
                assert!(moved > 0.0, "{label}: {name}");
            }
        }
        assert_eq!(p.handoffs().leases_open, 0, "{label}");
    }
    assert_eq!(fates(&p, LegKind::Prefill), [LegFate::Read; 4]);
    assert_eq!(fates(&d, LegKind::Decode), [LegFate::PulledOwn; 4]);
    let local =
        metric(&d, "vllm:prompt_tokens_by_source_total{engine=\"0\",model_name=\"tiny\",source=\"local_compute\"}");
    assert!(local.await.abs() < 1e-9, "nothing was computed twice");
}

#[tokio::test]
async fn the_decode_side_tells_of_the_transferred_blocks_with_the_recorded_names() {
    let (p, d) = (start(nixl("p")).await, start(nixl("d")).await);
    let recorded = golden::lines("vllm-0.32.0/events/pd_nixl_events.jsonl.gz");
    let names = |frame: &Value| -> Vec<u64> {
        let hashes = frame["decoded"][1][0]["block_hashes"].as_array().unwrap();
        hashes.iter().map(|hash| hash.as_u64().unwrap()).collect()
    };
    assert_eq!(names(&recorded[0]), names(&recorded[1]));
    let exchanges = golden::json("vllm-0.32.0/http/pd-nixl-exchanges.json.gz");
    let prompt = exchanges[0]["prefill_request"]["prompt"].clone();
    let prompt: Vec<u32> = serde_json::from_value(prompt).unwrap();
    let params = prefill(&p, &prompt).await;
    assert!(d.blocks().is_empty());
    let answer = ask(&d, &json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}), "leg").await;
    assert_eq!((answer.head.status, answer.cached_tokens()), (200, Some(70)));
    let mut expected = names(&recorded[1]);
    expected.sort_unstable();
    assert_eq!(d.blocks().into_keys().collect::<Vec<_>>(), expected);
    assert_eq!(d.published().batches, 1, "in one batch");
}

#[tokio::test]
async fn a_decode_says_what_an_engine_says_that_computed_the_prompt_itself_and_frees_the_prefill_s_blocks() {
    let (p, d) = (start(nixl("p")).await, start(nixl("d")).await);
    for len in [1, 15, 16, 17, 100] {
        let prompt = prompt(len, len);
        let params = prefill(&p, &prompt).await;
        let open = p.handoffs();
        assert_eq!((open.leases_open, open.blocks_pinned), (1, usize::try_from(len).unwrap().div_ceil(16)));
        assert_eq!(text(&decode(&d, &prompt, &params).await), alone(&prompt).await, "{len}");
        let over = p.handoffs();
        assert_eq!((over.leases_open, over.blocks_pinned), (0, 0), "told when it has read");
    }
    let (legs, read) = (d.legs(), p.legs());
    assert_eq!(legs.iter().map(|leg| leg.tokens).collect::<Vec<_>>(), [1, 15, 16, 17, 100]);
    for (decode, prefill) in legs.iter().zip(&read) {
        assert_eq!((decode.request_id.as_deref(), decode.fate), (Some("leg"), LegFate::PulledOwn));
        assert_eq!((&decode.key, prefill.fate), (&prefill.key, LegFate::Read));
        assert_eq!(decode.from_engine, p.engine_id(0));
    }
}

#[tokio::test]
async fn what_the_decode_side_has_cached_is_not_pulled_again() {
    let (p, d) = (start(nixl("p")).await, start(nixl("d")).await);
    let (whole, longer) = (prompt(1, 64), [prompt(1, 64), prompt(2, 20)].concat());
    for (prompt, pulled, cached) in [(&whole, 64, 64), (&whole, 16, 64), (&longer, 20, 84)] {
        let params = prefill(&p, prompt).await;
        let answer = decode(&d, prompt, &params).await;
        assert_eq!((text(&answer), answer.cached_tokens()), (alone(prompt).await, Some(cached)));
        let leg = d.legs().pop().unwrap();
        assert_eq!((leg.tokens, leg.fate), (pulled, LegFate::PulledOwn));
    }
    let counted = EngineConfig { report_remote_cached_tokens: true, ..nixl("counted") };
    let counted = start(counted).await;
    let params = prefill(&p, &longer).await;
    assert_eq!(params["remote_prefill_cached_tokens"], 80);
    assert_eq!(decode(&counted, &longer, &params).await.cached_tokens(), Some(80));
}

#[tokio::test]
async fn a_lease_that_ends_frees_its_blocks_and_a_late_decode_gets_somebody_else_s() {
    let small = EngineConfig { num_gpu_blocks: 9, kv_lease_s: 0.3, ..nixl("p") };
    let (p, d) = (start(small).await, start(nixl("d")).await);
    let (mine, theirs) = (prompt(1, 100), prompt(2, 100));
    let params = prefill(&p, &mine).await;
    // While the lease is open, nobody takes the blocks: seven of eight are pinned, and another prompt waits.
    let other = json!({"prompt": theirs, "max_tokens": 1});
    let waiting = tokio::time::timeout(Duration::from_millis(100), post(http(&p), "/v1/completions", &other)).await;
    assert!(waiting.is_err());
    eventually(SOON, "it ends", async || p.handoffs().expired == 1).await.unwrap();
    assert_eq!((p.handoffs().leases_open, p.handoffs().blocks_pinned), (0, 0));
    assert_eq!(fates(&p, LegKind::Prefill), [LegFate::Expired]);
    assert!(
        (metric(&p, "vllm:nixl_num_kv_expired_reqs_total{engine=\"0\",model_name=\"tiny\"}").await - 1.0).abs() < 1e-9
    );
    // Nobody has taken the blocks yet: late, and still right.
    assert_eq!(text(&decode(&d, &mine, &params).await), alone(&mine).await);
    post(http(&p), "/v1/completions", &other).await.unwrap();
    let fresh = start(nixl("fresh")).await;
    let wrong = decode(&fresh, &mine, &params).await;
    assert_ne!(text(&wrong), alone(&mine).await, "200, and wrong");
    assert_eq!(fates(&fresh, LegKind::Decode), [LegFate::PulledForeign]);
    // And it stays in that engine's cache, as it would in a real one.
    let again = ask(&fresh, &json!({"prompt": mine, "max_tokens": 12}), "again").await;
    assert_ne!(text(&again), alone(&mine).await);
}

#[tokio::test]
async fn a_decode_that_waits_for_its_turn_keeps_the_lease_alive_and_one_that_reads_slowly_does_not() {
    let p = start(EngineConfig { kv_lease_s: 0.6, ..nixl("p") }).await;
    let busy =
        start(EngineConfig { kv_lease_s: 0.6, max_num_seqs: 1, decode_ms_per_token: 10.0, ..nixl("busy") }).await;
    let prompt = prompt(1, 40);
    let params = prefill(&p, &prompt).await;
    let long = json!({"prompt": [1, 2, 3], "max_tokens": 150});
    let (_, late) = tokio::join!(post(http(&busy), "/v1/completions", &long), async {
        eventually(SOON, "the first runs", async || busy.running() == 1).await.unwrap();
        decode(&busy, &prompt, &params).await
    });
    assert_eq!((text(&late), fates(&busy, LegKind::Decode)), (alone(&prompt).await, vec![LegFate::PulledOwn]));
    assert_eq!(fates(&p, LegKind::Prefill), [LegFate::Read]);
    busy.faults().set(|plan| plan.pull_delay_ms = 800);
    let params = prefill(&p, &prompt).await;
    decode(&busy, &prompt, &params).await;
    assert_eq!(fates(&p, LegKind::Prefill), [LegFate::Read, LegFate::Expired]);
}

#[tokio::test]
async fn an_aborted_prefill_keeps_nothing_and_an_aborted_decode_tells_the_prefill_side() {
    let slow = EngineConfig { decode_ms_per_token: 20.0, max_num_seqs: 1, ..nixl("slow") };
    let (p, d) = (start(EngineConfig { prefill_us_per_token: 5000.0, ..slow.clone() }).await, start(slow).await);
    let prompt = prompt(1, 40);
    let body = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}});
    let json_type = [("Content-Type", "application/json")];
    let mut leaving = Client::connect(http(&p)).await.unwrap();
    leaving.request("POST", "/v1/completions", &json_type, body.to_string().as_bytes()).await.unwrap();
    eventually(SOON, "it runs", async || p.running() == 1).await.unwrap();
    drop(leaving);
    eventually(SOON, "it is gone", async || fates(&p, LegKind::Prefill) == [LegFate::Dropped]).await.unwrap();
    assert_eq!((p.handoffs().granted, p.handoffs().blocks_pinned), (0, 0));

    let params = prefill(&p, &prompt).await;
    let mut running = Client::connect(http(&d)).await.unwrap();
    let long = json!({"prompt": [1, 2, 3], "max_tokens": 500, "stream": true}).to_string();
    running.request("POST", "/v1/completions", &json_type, long.as_bytes()).await.unwrap();
    eventually(SOON, "the first runs", async || d.running() == 1).await.unwrap();
    let mut leaving = Client::connect(http(&d)).await.unwrap();
    let body = json!({"prompt": prompt, "max_tokens": 12, "kv_transfer_params": params}).to_string();
    leaving.request("POST", "/v1/completions", &json_type, body.as_bytes()).await.unwrap();
    eventually(SOON, "it waits", async || d.waiting() == 1).await.unwrap();
    assert_eq!(p.handoffs().leases_open, 1);
    drop(leaving);
    eventually(SOON, "the prefill side is told", async || p.handoffs().leases_open == 0).await.unwrap();
    assert_eq!(fates(&d, LegKind::Decode), [LegFate::Abandoned]);
    assert_eq!(p.handoffs().read, 1);
    // A decode that is refused says so too.
    let params = prefill(&p, &prompt).await;
    let refused = json!({"prompt": prompt, "max_tokens": 0, "kv_transfer_params": params});
    assert_eq!(ask(&d, &refused, "leg").await.head.status, 400);
    eventually(SOON, "the prefill side is told", async || p.handoffs().leases_open == 0).await.unwrap();
}

#[tokio::test]
async fn a_decode_computes_what_it_cannot_read_or_fails_where_it_is_told_to() {
    let (mut p, d) = (start(nixl("p")).await, start(nixl("d")).await);
    let failed = "vllm:nixl_num_failed_transfers_total{engine=\"0\",model_name=\"tiny\"}";
    let mut wrong = Vec::new();
    let params = prefill(&p, &prompt(1, 40)).await;
    let with = |key: &str, value: Value| {
        let mut params = params.clone();
        params[key] = value;
        params
    };
    wrong.push(with("remote_port", json!(1)));
    wrong.push(with("remote_engine_id", json!("nobody")));
    wrong.push(with("remote_request_id", json!("nothing")));
    wrong.push(with("remote_block_ids", json!([[1]])));
    for (number, params) in (1_u32..).zip(&wrong) {
        let prompt = prompt(number + 10, 40);
        let answer = decode(&d, &prompt, params).await;
        assert_eq!((text(&answer), answer.cached_tokens()), (alone(&prompt).await, Some(0)));
        let leg = d.legs().pop().unwrap();
        assert!(leg.fate == LegFate::Recomputed && leg.why.is_some(), "{leg:?}");
        assert!((metric(&d, failed).await - f64::from(number)).abs() < 1e-9);
    }
    d.faults().set(|plan| plan.fail_on_pull_failure = true);
    let answer = decode(&d, &prompt(30, 40), &wrong[0]).await;
    assert_eq!((answer.head.status, answer.body.json()["error"]["code"].as_u64()), (500, Some(500)));
    assert_eq!(d.legs().pop().unwrap().fate, LegFate::Failed);
    // A new life of the engine is another engine.
    p.restart().await.unwrap();
    assert_eq!(fates(&p, LegKind::Prefill), [LegFate::Lost]);
    assert_eq!(decode(&d, &prompt(1, 40), &params).await.head.status, 500);
    d.faults().clear();
    let missing = with("remote_host", Value::Null);
    assert_eq!(text(&decode(&d, &prompt(1, 40), &missing).await), alone(&prompt(1, 40)).await);
    assert_eq!((d.legs().pop().unwrap().fate, d.handoffs().ignored), (LegFate::Ignored, 1));
    assert_eq!((d.running(), d.waiting()), (0, 0));
}

#[tokio::test]
async fn parameters_that_are_no_object_are_refused_with_or_without_a_connector() {
    for connector in [KvConnector::None, KvConnector::Nixl] {
        let engine = start(EngineConfig { kv_connector: connector, ..nixl("e") }).await;
        for wrong in [json!("x"), json!(1), json!([]), json!(true)] {
            let body = json!({"prompt": "hi", "max_tokens": 1, "kv_transfer_params": wrong});
            let answer = ask(&engine, &body, "leg").await;
            assert_eq!(answer.head.status, 400, "{wrong}");
            let error = &answer.body.json()["error"];
            assert_eq!((&error["type"], &error["param"]), (&json!("Bad Request"), &json!("kv_transfer_params")));
            assert!(
                error["message"].as_str().unwrap().contains("'type': 'dict_type', 'loc': 'body.kv_transfer_params'")
            );
        }
        let null = json!({"prompt": "hi", "max_tokens": 1, "kv_transfer_params": null});
        assert_eq!(ask(&engine, &null, "leg").await.head.status, 200);
        assert!(engine.legs().is_empty());
    }
}

#[tokio::test]
async fn of_a_list_of_prompts_the_first_one_s_blocks_are_told_of_and_the_others_wait_for_the_lease_s_end() {
    let p = start(EngineConfig { kv_lease_s: 0.3, ..nixl("p") }).await;
    let body = json!({"prompt": [prompt(1, 20), prompt(2, 40)], "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true}});
    let params = ask(&p, &body, "leg").await.body.json()["kv_transfer_params"].clone();
    assert_eq!((&params["remote_num_tokens"], p.handoffs().leases_open), (&json!(20), 2));
    let d = start(nixl("d")).await;
    assert_eq!(text(&decode(&d, &prompt(1, 20), &params).await), alone(&prompt(1, 20)).await);
    eventually(SOON, "the other ends", async || p.handoffs().leases_open == 0).await.unwrap();
    assert_eq!(fates(&p, LegKind::Prefill), [LegFate::Read, LegFate::Expired]);
}

#[tokio::test]
async fn mooncake_s_legs_meet_in_either_order_and_a_prefill_that_never_comes_is_done_without() {
    let p = start(mooncake("p", KvRole::Producer)).await;
    let d = start(EngineConfig { kv_transfer_wait_s: 0.5, ..mooncake("d", KvRole::Consumer) }).await;
    let bootstrap = p.addresses().bootstrap.unwrap();
    assert!(d.addresses().bootstrap.is_none());
    let known = get(bootstrap, "/query").await.unwrap().body.json();
    let engine_id = p.engine_id(0).unwrap();
    assert_eq!(known["0"]["engine_id"], engine_id);
    let prompt = prompt(1, 70);
    let first = |id: &str| {
        json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params":
        {"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id}})
    };
    let second = |id: &str| {
        json!({"do_remote_prefill": true, "do_remote_decode": false, "transfer_id": id,
        "remote_bootstrap_addr": format!("http://{bootstrap}"), "remote_engine_id": engine_id})
    };
    let right = alone(&prompt).await;
    // Prefill first; it answers no parameters.
    let answer = ask(&p, &first("a"), "leg").await.body.json();
    assert!(answer["kv_transfer_params"].is_null() && answer.as_object().unwrap().contains_key("kv_transfer_params"));
    assert_eq!(text(&decode(&d, &prompt, &second("a")).await), right);
    // Decode first. An engine that has nothing cached of it shows that it waits.
    for (id, ahead) in [("b", Duration::from_millis(100)), ("c", Duration::ZERO)] {
        let cold = start(mooncake("cold", KvRole::Consumer)).await;
        let (params, prefilled) = (second(id), first(id));
        let (answer, _) = tokio::join!(decode(&cold, &prompt, &params), async {
            tokio::time::sleep(ahead).await;
            ask(&p, &prefilled, "leg").await
        });
        assert_eq!((text(&answer), fates(&cold, LegKind::Decode)), (right.clone(), vec![LegFate::PulledOwn]));
    }
    assert_eq!((fates(&p, LegKind::Prefill), p.handoffs().leases_open), (vec![LegFate::Read; 3], 0));
    // Never; and once a transfer is over.
    for id in ["never", "a"] {
        assert_eq!(text(&decode(&d, &prompt, &second(id)).await), right);
        assert_eq!(d.legs().pop().unwrap().fate, LegFate::Recomputed, "{id}");
    }
}

#[tokio::test]
async fn blocks_of_a_window_group_and_of_an_engine_without_a_cache_are_handed_over_too() {
    let prompt = prompt(1, 100);
    let window = |name| EngineConfig { sliding_window: Some(32), ..nixl(name) };
    let uncached = |name| EngineConfig { no_prefix_caching: true, ..nixl(name) };
    for (prefills, decodes, groups) in [(window("p"), window("d"), 2), (uncached("p"), uncached("d"), 1)] {
        let (p, d) = (start(prefills).await, start(decodes).await);
        for _ in 0..2 {
            let params = prefill(&p, &prompt).await;
            assert_eq!(params["remote_block_ids"].as_array().unwrap().len(), groups);
            assert_eq!(text(&decode(&d, &prompt, &params).await), alone(&prompt).await);
        }
        assert_eq!(fates(&d, LegKind::Decode), [LegFate::PulledOwn; 2]);
        assert_eq!((p.handoffs().leases_open, p.handoffs().blocks_pinned), (0, 0));
    }
}

#[tokio::test]
async fn each_rank_is_an_engine_of_its_own_on_the_next_port() {
    let ranks = |name| EngineConfig { data_parallel_size: 2, ..nixl(name) };
    let (p, d) = (start(ranks("p")).await, start(ranks("d")).await);
    let prompt = prompt(1, 40);
    let body = json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}}).to_string();
    let headers = [("Content-Type", "application/json"), ("X-data-parallel-rank", "1")];
    let answer = exchange(http(&p), "POST", "/v1/completions", &headers, body.as_bytes()).await.unwrap();
    let params = answer.body.json()["kv_transfer_params"].clone();
    let first = p.addresses().side_channel.unwrap().port();
    assert_eq!(params["remote_port"], first + 1);
    let engine_id = params["remote_engine_id"].as_str().unwrap();
    assert!(engine_id.ends_with("_dp1") && Some(engine_id) == p.engine_id(1).as_deref(), "{engine_id}");
    assert_eq!(text(&decode(&d, &prompt, &params).await), alone(&prompt).await);
    assert_eq!((p.legs()[0].rank, fates(&d, LegKind::Decode)), (Some(1), vec![LegFate::PulledOwn]));
}

#[tokio::test]
async fn copies_of_one_prompt_each_keep_and_read_blocks_under_ids_of_their_own() {
    let p = start(EngineConfig { kv_lease_s: 0.3, ..nixl("p") }).await;
    let d = start(nixl("d")).await;
    let prompt = prompt(1, 40);
    let body = json!({"prompt": prompt, "max_tokens": 1, "n": 2, "kv_transfer_params": {"do_remote_decode": true}});
    let params = ask(&p, &body, "leg").await.body.json()["kv_transfer_params"].clone();
    assert!(params["remote_request_id"].as_str().unwrap().starts_with("1_cmpl-leg-0-"), "{params}");
    let body = json!({"prompt": prompt, "max_tokens": 12, "n": 2, "kv_transfer_params": params});
    assert_eq!(text(&ask(&d, &body, "leg").await), alone(&prompt).await);
    assert_eq!(fates(&d, LegKind::Decode), [LegFate::PulledOwn; 2]);
    eventually(SOON, "the other copy's lease ends", async || p.handoffs().leases_open == 0).await.unwrap();
}

#[tokio::test]
async fn the_program_tells_its_ports_and_shows_its_legs() {
    let mut command = std::process::Command::new(binary("sim-engine").unwrap());
    command.args(["--port", "0", "--events-port", "0", "--kv-connector", "mooncake", "--kv-role", "kv_producer"]);
    command.args(["--kv-side-channel-port", "0", "--kv-bootstrap-port", "0", "--kv-lease-s", "0.5"]);
    let mut child = Ended(command.stdout(std::process::Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.0.stdout.take().unwrap()), &mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    let at = |key: &str| SocketAddr::from(([127, 0, 0, 1], u16::try_from(ready[key].as_u64().unwrap()).unwrap()));
    let query = get(at("bootstrap_port"), "/query").await.unwrap().body.json();
    assert_eq!(query["0"]["engine_id"], ready["engine_id"]);
    assert_eq!(query["0"]["worker_addr"]["0"]["0"], at("side_channel_port").to_string());
    let body = json!({"prompt": "hello", "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true, "transfer_id": "t"}});
    post(at("http_port"), "/v1/completions", &body).await.unwrap();
    let debug = async |path: &str| get(at("http_port"), path).await.unwrap().body.json();
    let leg = debug("/debug/legs").await[0].clone();
    assert_eq!((&leg["kind"], &leg["fate"], &leg["key"]), (&json!("prefill"), &json!("granted"), &json!("t")));
    assert_eq!(debug("/debug/handoffs").await["leases_open"], 1);
}

/// Ends a child when the test does, however it ends.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        if self.0.kill().is_ok() {
            drop(self.0.wait());
        }
    }
}

//! Handoffs that need more than the two legs, and what an operator is told of both.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod split;

use std::net::IpAddr;

use kvlb_tests::engine::{Death, Engine, EngineConfig, FaultPlan, KvConnector, KvRole, LegFate, LegKind};
use kvlb_tests::harness::http::Answer;
use kvlb_tests::harness::{eventually, free_ports, temp_dir, until_some};
use serde_json::{Value, json};

use split::{COMPLETIONS, DECODE, Fleet, PREFILL, SOON, alone, body, code, prompt, text};

/// Engines with the other connector, each at an address of its own: a rule has one bootstrap port.
async fn mooncake(roles: &[u8]) -> Fleet {
    let [port] = free_ports().unwrap();
    let rule = json!({"pdHandoff": "mooncake", "pdBootstrapPort": port, "cb_enable": false});
    Fleet::of(roles, rule, |config| {
        let number = config.name.trim_start_matches("engine-").parse::<u8>().unwrap();
        let is_prefill = roles[usize::from(number)] == PREFILL;
        EngineConfig {
            host: IpAddr::from([127, 0, 0, 81 + number]),
            kv_connector: KvConnector::Mooncake,
            kv_role: if is_prefill { KvRole::Producer } else { KvRole::Consumer },
            kv_bootstrap_port: if is_prefill { port } else { 0 },
            ..config
        }
    })
    .await
}

fn last_decode(engine: &Engine) -> Option<LegFate> {
    engine.legs().iter().rfind(|leg| leg.kind == LegKind::Decode).map(|leg| leg.fate)
}

async fn handed_over(fleet: &Fleet, seed: u32) -> Answer {
    let asks = body(&prompt(seed, 40));
    let mut answer = fleet.split.ask(&asks).await;
    // Its bootstrap server is asked every two seconds.
    eventually(SOON, "a request is handed over", async || {
        answer = fleet.split.ask(&asks).await;
        answer.head.status == 200 && last_decode(&fleet.engines[1]) == Some(LegFate::PulledOwn)
    })
    .await
    .unwrap();
    assert_eq!(text(&answer), alone(&asks).await);
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mooncake_finds_the_prefill_engine_also_when_it_began_anew() {
    let mut fleet = mooncake(&[PREFILL, DECODE]).await;
    let answer = handed_over(&fleet, 1).await;
    assert_eq!((fleet.prefill(&answer), answer.engine()), (0, "engine-1"));
    let before = fleet.engines[0].engine_id(0).unwrap();
    fleet.engines[0].restart().await.unwrap();
    assert_ne!(fleet.engines[0].engine_id(0).unwrap(), before);
    handed_over(&fleet, 2).await;
    fleet.ends_clean().await;
}

/// Ids of the transfers that a request began, or took part in.
fn transfers(fleet: &Fleet, request: &str, kind: LegKind) -> Vec<String> {
    let legs = fleet.engines.iter().flat_map(Engine::legs);
    let legs = legs.filter(|leg| leg.kind == kind && leg.request_id.as_deref() == Some(request));
    let mut ids: Vec<_> = legs.filter_map(|leg| leg.key).collect();
    ids.sort();
    ids
}

/// An engine that was asked before may know a transfer still, and answer with what it had for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_that_begins_anew_has_another_id() {
    let fleet = mooncake(&[PREFILL, DECODE, PREFILL]).await;
    handed_over(&fleet, 1).await;
    let known = async || {
        let told = fleet.split.explain(&body(&prompt(1, 40))).await;
        [0, 2].iter().all(|number| told["candidates"][*number]["eligible"] == true)
    };
    eventually(SOON, "both are up", known).await.unwrap();
    let ask = async |seed: u32| {
        let (asks, name) = (body(&prompt(seed, 40)).to_string(), format!("request-{seed}"));
        let answer = fleet.split.post(COMPLETIONS, &[("X-Request-Id", &name)], asks.as_bytes()).await;
        let (prefills, decodes) =
            (transfers(&fleet, &name, LegKind::Prefill), transfers(&fleet, &name, LegKind::Decode));
        let is_twice = prefills.windows(2).any(|pair| pair[0] == pair[1]);
        assert!(!is_twice && decodes.iter().all(|id| prefills.contains(id)), "{prefills:?} {decodes:?}");
        (answer, prefills.len())
    };
    // A prefill endpoint computes the prompt and says nothing.
    fleet.faults(0, FaultPlan { prefill_dies: Some(Death::Before), ..FaultPlan::default() });
    let mut began = Vec::new();
    for seed in 20..26 {
        let (answer, prefills) = ask(seed).await;
        assert_eq!((answer.head.status, fleet.prefill(&answer)), (200, 2));
        began.push(prefills);
    }
    assert!(began.contains(&2), "{began:?}");
    fleet.faults(0, FaultPlan::default());
    // A decode endpoint ends a used connection without a word; which data thread has one is a matter of chance.
    began.clear();
    for seed in (30..70).step_by(2) {
        ask(seed).await;
        fleet.faults(1, FaultPlan { decode_die_after_chunks: Some(0), ..FaultPlan::default() });
        let (answer, prefills) = ask(seed + 1).await;
        assert_eq!(code(&answer), (502, Some("pd_decode_backend_died")));
        fleet.faults(1, FaultPlan::default());
        began.push(prefills);
    }
    assert!(began.contains(&2), "{began:?}");
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_endpoint_that_has_not_told_who_it_is_is_not_asked() {
    let fleet = mooncake(&[PREFILL, DECODE, PREFILL]).await;
    handed_over(&fleet, 1).await;
    let known = async || fleet.split.explain(&body(&prompt(1, 40))).await["candidates"][0]["eligible"] == true;
    eventually(SOON, "both are up", known).await.unwrap();
    // One that is silent for long enough is left out, whatever it holds.
    fleet.faults(0, FaultPlan { refuse_side_channel: true, ..FaultPlan::default() });
    eventually(SOON, "the other one is asked", async || {
        let answer = fleet.split.ask(&body(&prompt(1, 40))).await;
        answer.head.status == 200 && fleet.prefill(&answer) == 2
    })
    .await
    .unwrap();
    fleet.faults(2, FaultPlan { refuse_side_channel: true, ..FaultPlan::default() });
    let mut answer = fleet.split.ask(&body(&prompt(2, 40))).await;
    eventually(SOON, "nobody is left", async || {
        answer = fleet.split.ask(&body(&prompt(2, 40))).await;
        code(&answer) == (503, Some("pd_pool_unavailable"))
    })
    .await
    .unwrap();
    assert!(answer.body.text().contains("pdBootstrapPort"), "{}", answer.body.text());
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_sees_roles_both_legs_and_what_each_engine_must_tell() {
    let dir = temp_dir().unwrap();
    let log = dir.path().join("access.log");
    let args = ["--access-log", "full", "--access-log-file", log.to_str().unwrap()];
    // Decode engines need not publish.
    let fleet = Fleet::with(&args, &[PREFILL, DECODE], json!({}), |config| {
        let is_decode = config.name == "engine-1";
        EngineConfig { no_events: is_decode, ..config }
    })
    .await;
    let answer = fleet.split.ask(&body(&prompt(1, 40))).await;
    assert_eq!(answer.engine(), "engine-1");
    let line: Value = until_some(SOON, "a line is written", async || {
        serde_json::from_str(std::fs::read_to_string(&log).ok()?.lines().next()?).ok()
    })
    .await
    .unwrap();
    let place = |number: usize| json!(fleet.engines[number].addresses().http.to_string());
    assert_eq!((&line["prefill_endpoint"], &line["endpoint"]), (&place(0), &place(1)), "{line}");
    assert_eq!((&line["prefill_ep_idx"], &line["ep_idx"]), (&json!(0), &json!(1)));
    let (prefill, first) = (line["prefill_us"].as_u64().unwrap(), line["first_byte_us"].as_u64().unwrap());
    assert!(prefill > 0 && first > prefill, "the first byte comes behind both legs: {line}");
    let (_, report) = fleet
        .split
        .kvlb
        .api("GET", &format!("/netlox/v1/config/ai/kv/preflight?service_id={}", fleet.split.id), None)
        .await
        .unwrap();
    let legs = |number: usize| -> Vec<&str> {
        report["endpoints"][number]["legs"].as_array().unwrap().iter().map(|row| row["leg"].as_str().unwrap()).collect()
    };
    assert!(legs(0).contains(&"events") && !legs(1).contains(&"events"), "{report}");
    // No tokenizer is staged here, which says nothing of the engine.
    let broken = report["endpoints"][1]["legs"]
        .as_array()
        .unwrap()
        .iter()
        .any(|row| row["verdict"] == "broken" && row["leg"] != "tokenizer" && row["leg"] != "chat_template");
    assert!(!broken, "{report}");
    let rule = fleet.split.kvlb.rule(fleet.split.id).await.unwrap();
    let roles: Vec<_> = rule["endpoints"].as_array().unwrap().iter().map(|endpoint| &endpoint["ep_role"]).collect();
    assert_eq!(roles, [&json!(1), &json!(2)]);
    fleet.ends_clean().await;
}

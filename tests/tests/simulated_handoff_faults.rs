//! Handoffs of the simulated engine fail as they are told, and only handoffs do.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so")]

use std::time::Duration;

use kvlb_tests::engine::{Death, Engine, EngineConfig, FaultPlan, KvConnector, LegFate, LegKind};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::{Answer, End, post};
use serde_json::{Value, json};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(5);

async fn engine(name: &str) -> Engine {
    let config = EngineConfig {
        kv_connector: KvConnector::Nixl,
        kv_lease_s: 0.5,
        prefill_us_per_token: 0.0,
        decode_ms_per_token: 0.0,
        ..EngineConfig::named(name)
    };
    Engine::start(config).await.unwrap()
}

fn body(params: &Value, stream: bool) -> Value {
    let prompt: Vec<u32> = (0..40).collect();
    json!({"prompt": prompt, "max_tokens": 8, "stream": stream, "kv_transfer_params": params})
}

async fn ask(engine: &Engine, params: &Value) -> anyhow::Result<Answer> {
    post(engine.addresses().http, "/v1/completions", &body(params, false)).await
}

async fn prefill(engine: &Engine) -> anyhow::Result<Answer> {
    ask(engine, &json!({"do_remote_decode": true})).await
}

async fn params(engine: &Engine) -> Value {
    prefill(engine).await.unwrap().body.json()["kv_transfer_params"].clone()
}

fn last(engine: &Engine, kind: LegKind) -> LegFate {
    engine.legs().iter().rfind(|leg| leg.kind == kind).unwrap().fate
}

/// With this going wrong, plain requests are answered all the same.
async fn only_handoffs(engine: &Engine, change: impl FnOnce(&mut FaultPlan)) {
    engine.faults().clear();
    engine.faults().set(change);
    let plain = ask(engine, &Value::Null).await.unwrap();
    assert_eq!((plain.head.status, plain.body.end), (200, End::Complete));
    assert_eq!(plain.body.json()["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_prefill_says_nothing_of_its_blocks_and_keeps_none() {
    let p = engine("p").await;
    only_handoffs(&p, |plan| plan.prefill_without_params = true).await;
    let answer = prefill(&p).await.unwrap().body.json();
    assert!(!answer.as_object().unwrap().contains_key("kv_transfer_params") && answer["usage"].is_object());
    for finish in ["stop", "abort"] {
        only_handoffs(&p, |plan| plan.prefill_finish = Some(finish.into())).await;
        let answer = prefill(&p).await.unwrap().body.json();
        assert_eq!(
            (&answer["choices"][0]["finish_reason"], &answer["kv_transfer_params"]),
            (&json!(finish), &Value::Null)
        );
    }
    for status in [400, 429, 500, 503] {
        only_handoffs(&p, |plan| plan.prefill_status = Some(status)).await;
        let answer = prefill(&p).await.unwrap();
        assert_eq!(
            (answer.head.status, answer.body.json()["error"]["code"].as_u64()),
            (status, Some(u64::from(status)))
        );
    }
    let fates: Vec<_> = p.legs().iter().map(|leg| leg.fate).collect();
    assert_eq!((fates, p.handoffs().granted), (vec![LegFate::Dropped; 7], 0));
}

#[tokio::test]
async fn a_prefill_s_parameters_are_as_long_as_they_are_told_to_be_and_still_good() {
    let (p, d) = (engine("p").await, engine("d").await);
    for padding in [64 * 1024, 1024 * 1024] {
        only_handoffs(&p, |plan| plan.prefill_padding = Some(padding)).await;
        let answer = prefill(&p).await.unwrap();
        assert!(answer.body.bytes().len() > padding);
        let params = &answer.body.json()["kv_transfer_params"];
        assert_eq!(ask(&d, params).await.unwrap().head.status, 200);
        assert_eq!((last(&p, LegKind::Prefill), last(&d, LegKind::Decode)), (LegFate::Read, LegFate::PulledOwn));
    }
}

#[tokio::test]
async fn a_prefill_breaks_off_with_its_blocks_kept_until_the_lease_ends() {
    let p = engine("p").await;
    for reset in [false, true] {
        only_handoffs(&p, |plan| (plan.prefill_dies, plan.die_with_reset) = (Some(Death::Before), reset)).await;
        assert!(prefill(&p).await.is_err(), "no head at all");
        only_handoffs(&p, |plan| (plan.prefill_dies, plan.die_with_reset) = (Some(Death::Middle), reset)).await;
        let answer = prefill(&p).await.unwrap();
        let promised: usize = answer.head.header("content-length").unwrap().parse().unwrap();
        assert_eq!(answer.body.bytes().len(), promised / 2);
        assert_eq!(answer.body.end, if reset { End::Reset } else { End::Closed });
    }
    assert_eq!(p.handoffs().granted, 4);
    eventually(SOON, "all end", async || p.handoffs().expired == 4).await.unwrap();
    assert_eq!((p.handoffs().leases_open, p.handoffs().blocks_pinned), (0, 0));
}

#[tokio::test]
async fn a_decode_is_never_answered_or_breaks_off() {
    let (p, d) = (engine("p").await, engine("d").await);
    only_handoffs(&d, |plan| plan.decode_stall = true).await;
    let given = params(&p).await;
    assert!(timeout(Duration::from_millis(100), ask(&d, &given)).await.is_err());
    // Its client has left: the prefill side is told, as of any decode that did not begin.
    eventually(SOON, "it is told", async || p.handoffs().leases_open == 0).await.unwrap();
    assert_eq!((last(&d, LegKind::Decode), p.handoffs().read), (LegFate::Abandoned, 1));
    only_handoffs(&d, |plan| plan.decode_die_after_chunks = Some(3)).await;
    let given = params(&p).await;
    let answer = post(d.addresses().http, "/v1/completions", &body(&given, true)).await.unwrap();
    assert_eq!((answer.body.events().len(), answer.body.end), (3, End::Closed));
    assert_eq!(ask(&d, &params(&p).await).await.unwrap().body.end, End::Closed);
    only_handoffs(&d, |plan| plan.decode_die_after_chunks = Some(0)).await;
    assert!(ask(&d, &params(&p).await).await.is_err());
    d.faults().clear();
    assert_eq!(ask(&d, &params(&p).await).await.unwrap().head.status, 200);
    eventually(SOON, "nothing is kept", async || p.handoffs().blocks_pinned == 0).await.unwrap();
}

#[tokio::test]
async fn a_share_of_the_legs_fails_and_a_shut_side_channel_makes_decodes_compute() {
    let (p, d) = (engine("p").await, engine("d").await);
    p.faults().set(|plan| (plan.prefill_status, plan.handoff_fraction) = (Some(503), 0.3));
    let mut failed = 0;
    for _ in 0..100 {
        failed += usize::from(prefill(&p).await.unwrap().head.status == 503);
    }
    assert!((10..50).contains(&failed), "{failed}");
    p.faults().clear();
    let given = params(&p).await;
    p.faults().set(|plan| plan.refuse_side_channel = true);
    assert_eq!(ask(&d, &given).await.unwrap().head.status, 200);
    assert_eq!(last(&d, LegKind::Decode), LegFate::Recomputed);
    p.faults().clear();
    let sums = d.handoffs();
    assert_eq!((sums.recomputed, sums.pulled_own, sums.leases_open), (1, 0, 0));
}

#[tokio::test]
async fn a_failed_read_ends_a_stream_with_an_error_event() {
    let d = engine("d").await;
    d.faults().set(|plan| plan.fail_on_pull_failure = true);
    let nowhere = json!({"do_remote_prefill": true, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e",
        "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 1});
    let answer = post(d.addresses().http, "/v1/completions", &body(&nowhere, true)).await.unwrap();
    let events = answer.body.events();
    assert!(events.len() == 2 && events[0].starts_with("{\"error\"") && events[1].starts_with("[DONE]"), "{events:?}");
}

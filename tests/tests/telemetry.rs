//! What engines say of their work is known while it is fresh, unknown when it is not, and asked for without anybody waiting.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]
#![expect(clippy::float_cmp, reason = "counts and gauges here are whole numbers")]

use std::time::Duration;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::stage::{MODEL, PATIENCE, Stage, engine, rule};
use serde_json::{Value, json};
use tokio::time::Instant;

const COMPLETIONS: &str = "/v1/completions";
/// What was seen so long ago is not known any more.
const STALE_AFTER: Duration = Duration::from_secs(30);

fn body(tokens: u32) -> Value {
    json!({"model": MODEL, "prompt": "Sing, goddess, of the wrath of Achilles, son of Peleus.", "max_tokens": tokens})
}

async fn telemetry(kvlb: &Kvlb, id: u64, position: usize) -> Value {
    kvlb.rule(id).await.unwrap()["endpoints"][position]["telemetry"].clone()
}

fn series(family: &str, id: u64, position: usize) -> String {
    format!("{family}{{ep_idx=\"{position}\",service=\"{id}\"}}")
}

#[tokio::test]
async fn an_engine_s_queue_is_known_until_it_stops_and_then_is_unknown() {
    let Some(stage) = Stage::new("telemetry").unwrap() else { return };
    let kvlb = stage.kvlb(&["--scrape-interval", "1s"]).await.unwrap();
    let narrow = kvlb_tests::engine::EngineConfig { max_num_seqs: 1, ..engine() };
    let engines = stage.engines(11, 2, &narrow).await.unwrap();
    let id = kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();
    // The model computes nothing: one request runs, two wait.
    engines[0].faults().set(|plan| plan.pause = true);
    let asked: Vec<_> = (0..3)
        .map(|_| {
            let mut client = stage.connect(engines[0].addresses().http).unwrap();
            tokio::spawn(async move {
                let headers = [("Content-Type", "application/json")];
                client.request("POST", COMPLETIONS, &headers, body(2).to_string().as_bytes()).await.unwrap();
                client.answer().await.unwrap()
            })
        })
        .collect();
    let waiting = series("kvlb_engine_requests_waiting", id, 0);
    eventually(PATIENCE, "the queue is seen", async || kvlb.metric(&waiting).await.unwrap() >= 2.0).await.unwrap();
    let seen = telemetry(&kvlb, id, 0).await;
    assert_eq!((&seen["engine"], &seen["missing"], &seen["stale"]), (&json!("vllm"), &json!([]), &json!(false)));
    assert_eq!(seen["blocks"], json!(narrow.num_gpu_blocks));
    let wide = stage.cli(&["get", "ep", "-o", "wide"]).unwrap().ok().unwrap();
    assert!(wide.contains("WAITING") && !wide.contains("unknown:"), "{wide}");
    engines[0].faults().clear();
    for task in asked {
        assert_eq!(task.await.unwrap().head.status, 200);
    }
    eventually(PATIENCE, "the queue is empty", async || {
        let page = kvlb.metrics().await.unwrap();
        page.0.contains_key(&waiting) && page.value(&waiting) == 0.0
    })
    .await
    .unwrap();
    assert!(kvlb.metric(&series("kvlb_engine_first_tokens_total", id, 0)).await.unwrap() >= 3.0);
    // It stops: what it said holds for half a minute, and is unknown then, which is not zero.
    engines[0].faults().set(|plan| plan.refuse_http = true);
    let stopped = Instant::now();
    let refused = format!("kvlb_engine_scrape_failures_total{{ep_idx=\"0\",reason=\"unreachable\",service=\"{id}\"}}");
    eventually(PATIENCE, "a failure is counted", async || kvlb.metric(&refused).await.unwrap() >= 2.0).await.unwrap();
    assert!(kvlb.metrics().await.unwrap().0.contains_key(&waiting), "it is known for a while");
    eventually(STALE_AFTER + PATIENCE, "it is unknown", async || {
        !kvlb.metrics().await.unwrap().0.contains_key(&waiting)
    })
    .await
    .unwrap();
    assert!(stopped.elapsed() + Duration::from_secs(3) > STALE_AFTER, "{:?}", stopped.elapsed());
    let late = telemetry(&kvlb, id, 0).await;
    assert_eq!((&late["stale"], &late["waiting"], &late["kvUsage"]), (&json!(true), &Value::Null, &Value::Null));
    let other = kvlb.metrics().await.unwrap();
    assert!(other.0.contains_key(&series("kvlb_engine_requests_waiting", id, 1)), "the other is known");
    let wide = stage.cli(&["get", "ep", "-o", "wide"]).unwrap().ok().unwrap();
    assert!(wide.contains(&format!("rule {id} endpoint 0: no metrics of late: unreachable ")), "{wide}");
    engines[0].faults().clear();
    eventually(PATIENCE, "it is known again", async || kvlb.metrics().await.unwrap().0.contains_key(&waiting))
        .await
        .unwrap();
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_family_that_is_missing_is_unknown_and_named_and_no_request_waits_for_a_slow_page() {
    let Some(stage) = Stage::new("families-missing").unwrap() else { return };
    let kvlb = stage.kvlb(&["--scrape-interval", "1s"]).await.unwrap();
    let engines = stage.engines(11, 2, &engine()).await.unwrap();
    engines[0].faults().set(|plan| {
        plan.metrics_without = vec!["vllm:num_requests_waiting".to_owned(), "vllm:time_to_first".to_owned()];
    });
    let id = kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();
    eventually(PATIENCE, "both were asked", async || {
        !telemetry(&kvlb, id, 0).await.is_null() && !telemetry(&kvlb, id, 1).await.is_null()
    })
    .await
    .unwrap();
    let seen = telemetry(&kvlb, id, 0).await;
    assert_eq!(seen["missing"], json!(["vllm:num_requests_waiting", "vllm:time_to_first_token_seconds"]));
    assert_eq!((&seen["waiting"], &seen["running"]), (&Value::Null, &json!(0)));
    let page = kvlb.metrics().await.unwrap();
    let shown = |position| page.0.contains_key(&series("kvlb_engine_requests_waiting", id, position));
    assert!(!shown(0) && shown(1));
    assert_eq!(page.value(&series("kvlb_engine_missing_families", id, 0)), 2.0);
    let wide = stage.cli(&["get", "ep", "-o", "wide"]).unwrap().ok().unwrap();
    let named = "unknown: not among its metrics: vllm:num_requests_waiting, vllm:time_to_first_token_seconds";
    assert!(wide.contains(&format!("rule {id} endpoint 0: {named}\n")), "{wide}");
    // A page that takes a minute is given up, and delays nobody.
    for engine in &engines {
        engine.faults().set(|plan| plan.metrics_delay_ms = 60_000);
    }
    let late = format!("kvlb_engine_scrape_failures_total{{ep_idx=\"1\",reason=\"unreachable\",service=\"{id}\"}}");
    let mut slowest = Duration::ZERO;
    eventually(PATIENCE, "looks are given up", async || {
        let began = Instant::now();
        assert_eq!(stage.ask(8080, COMPLETIONS, &body(1)).await.unwrap().head.status, 200);
        slowest = slowest.max(began.elapsed());
        kvlb.metric(&late).await.unwrap() >= 2.0
    })
    .await
    .unwrap();
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    // The series go with the rule.
    assert_eq!(kvlb.api("DELETE", "/netlox/v1/config/loadbalancer/all", None).await.unwrap().0, 200);
    let left = kvlb.metrics().await.unwrap();
    assert!(!left.0.keys().any(|series| series.starts_with("kvlb_engine_")), "{:?}", left.0.keys());
    kvlb.stop().await.unwrap();
}

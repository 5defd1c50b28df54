//! Health is shared: what kvlb knows of its endpoints stands in the kernel's maps, readable with field names, and in `get lb`.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::path::Path;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::stage::{MODEL, PATIENCE, Stage, engine, rule};
use serde_json::{Value, json};

#[tokio::test]
async fn an_endpoint_that_is_killed_is_down_in_the_maps_and_in_get_lb() {
    let Some(stage) = Stage::new("health").unwrap() else { return };
    let mut engines = stage.engines(11, 2, &engine()).await.unwrap();
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let fast = json!({"probeTimeout": 1, "probeRetries": 1});
    let id = kvlb.create(&rule(8080, &engines, &fast)).await.unwrap();
    becomes(&stage, &kvlb, id, ["Up", "Up"], 2).await;
    let vips = dump(&stage, "VIPS");
    assert_eq!(vips.len(), 1, "{vips:?}");
    let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 10, 10, 254];
    assert_eq!((&vips[0]["key"]["addr"], &vips[0]["key"]["port"]), (&json!(mapped), &json!(8080)));
    assert_eq!((&vips[0]["value"]["rule"], &vips[0]["value"]["ep_count"]), (&json!(id), &json!(2)));
    let endpoints = endpoints(&stage);
    assert_eq!(endpoints[0]["addr"].as_array().unwrap()[12..], [127, 0, 0, 11].map(Value::from));
    assert_eq!((&endpoints[0]["port"], &endpoints[0]["weight"]), (&json!(8000), &json!(1)));
    // Every connection to the VIP is counted, over all CPUs and in the metric.
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 1});
    for _ in 0..5 {
        stage.ask(8080, "/v1/completions", &body).await.unwrap();
    }
    let of_cpus = dump(&stage, "STATS")[0]["values"].as_array().unwrap().clone();
    assert_eq!(of_cpus.iter().map(|cpu| cpu["value"]["steered"].as_u64().unwrap()).sum::<u64>(), 5, "{of_cpus:?}");
    let page = kvlb.metrics().await.unwrap();
    let steered: Vec<_> = page.family("kvlb_kernel_steered_total").collect();
    assert_eq!(steered, [("kvlb_kernel_steered_total{vip=\"10.10.10.254:8080\"}", 5.0)]);

    engines[0].kill().await;
    becomes(&stage, &kvlb, id, ["ProbeDown", "Up"], 1).await;
    let shown = stage.cli(&["get", "lb", "-o", "wide"]).unwrap().ok().unwrap();
    assert!(shown.contains("inactive") && shown.contains("active"), "{shown}");
    // A request goes to the one that is left, and an operator's word is in the maps as well.
    assert_eq!(stage.ask(8080, "/v1/completions", &body).await.unwrap().engine(), "engine-12");
    stage.cli(&["set", "ep", "127.0.0.12:8000", "drain"]).unwrap().ok().unwrap();
    becomes(&stage, &kvlb, id, ["ProbeDown", "Draining"], 0).await;
    stage.cli(&["set", "ep", "127.0.0.12:8000", "up"]).unwrap().ok().unwrap();
    let dead = engines.remove(0);
    let _back = stage.restart(dead).await.unwrap();
    becomes(&stage, &kvlb, id, ["Up", "Up"], 2).await;
    kvlb.stop().await.unwrap();
}

/// Waits until the maps and the API say the same of both endpoints.
async fn becomes(stage: &Stage, kvlb: &Kvlb, id: u64, states: [&str; 2], healthy: u64) {
    let word = |state: &str| match state {
        "Up" => "active",
        "ProbeDown" => "inactive",
        _ => "draining",
    };
    eventually(PATIENCE, &format!("the endpoints are {states:?} everywhere"), async || {
        let in_map = endpoints(stage).iter().zip(states).all(|(endpoint, state)| endpoint["state"] == state);
        let rule = kvlb.rule(id).await.unwrap();
        let shown =
            rule["endpoints"].as_array().unwrap().iter().zip(states).all(|(e, state)| e["state"] == word(state));
        in_map && shown && dump(stage, "VIPS")[0]["value"]["healthy"] == healthy
    })
    .await
    .unwrap();
}

/// The entries of the VIP's endpoints.
fn endpoints(stage: &Stage) -> Vec<Value> {
    dump(stage, "EPS")[..2].iter().map(|entry| entry["value"].clone()).collect()
}

/// The entries of a map as bpftool prints them, by field names.
fn dump(stage: &Stage, map: &str) -> Vec<Value> {
    let pin = stage.pins().join(map).display().to_string();
    let text = stage.program(Path::new("bpftool"), &["--json", "map", "dump", "pinned", &pin]).unwrap().ok().unwrap();
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    entries.into_iter().map(|mut entry| entry["formatted"].take()).collect()
}

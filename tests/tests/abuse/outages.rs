//! Engines that come, go, and were never there.

use std::time::Duration;

use kvlb_tests::engine::Engine;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::{eventually, temp_dir};
use serde_json::json;

use super::stage::{MODEL, Place, SOON, Stage, completion, stage_tokenizer};

const LONG: &str =
    "a prompt that is long enough for some blocks of sixteen tokens each, so that it is worth to find them again";

/// The mirror of an engine is what the engine holds.
async fn until_mirrored(stage: &Stage, position: usize) {
    let path = format!("/netlox/v1/config/ai/kv/inventory?service_id={}&ep_idx={position}", stage.rule_id);
    let mirrored = async || {
        let (_, page) = stage.kvlb.api("GET", &path, None).await.unwrap();
        let listed = page["blocks"].as_array().unwrap().iter().filter_map(|block| block["hash_uint64"].as_u64());
        listed.collect::<Vec<_>>() == stage.engines[position].blocks().into_keys().collect::<Vec<_>>()
    };
    eventually(SOON, "the mirror is the engine's own", mirrored).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishers_that_vanish_and_return_twenty_times_are_followed() {
    let stage = Stage::set(2, json!({})).await;
    let descriptors = stage.descriptors();
    for round in 0..20 {
        stage.engines[0].faults().disconnect_events();
        stage.ask(&completion(&format!("{round}: {LONG}"))).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    stage.until_subscribed().await;
    for position in 0..2 {
        until_mirrored(&stage, position).await;
    }
    let back = async || stage.descriptors() <= descriptors + 16;
    eventually(SOON, "no descriptor is lost", back).await.unwrap();
    let status = stage.kv_status(0).await;
    assert_eq!(status["restarts"], json!(0), "it was the same engine all the time: {status}");
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_restarts_again_and_again_is_never_believed_to_hold_what_it_lost() {
    let mut stage = Stage::set(2, json!({})).await;
    for round in 0..5 {
        for _ in 0..2 {
            stage.ask(&completion(&format!("{round}: {LONG}"))).await;
        }
        stage.engines[0].restart().await.unwrap();
    }
    for position in 0..2 {
        until_mirrored(&stage, position).await;
    }
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_all_engines_down_clients_are_told_at_once_and_served_when_one_is_back() {
    let mut stage = Stage::set(2, json!({})).await;
    for engine in &mut stage.engines {
        engine.kill().await;
    }
    for _ in 0..50 {
        let answer = stage.try_ask(&completion(LONG)).await.unwrap();
        let code = answer.head.header("x-kvlb-error").unwrap_or_default().to_owned();
        assert!(
            matches!(
                (answer.head.status, code.as_str()),
                (502, "backend_unreachable" | "backend_died") | (503, "no_healthy_backend")
            ),
            "{} {code}",
            answer.head.status
        );
        assert_eq!(answer.body.json()["error"]["code"], code.as_str());
    }
    let down = async || {
        let answer = stage.try_ask(&completion(LONG)).await.unwrap();
        answer.head.header("x-kvlb-error") == Some("no_healthy_backend")
    };
    eventually(SOON, "both are known to be down", down).await.unwrap();
    for engine in &mut stage.engines {
        engine.restart().await.unwrap();
    }
    stage.until_served().await;
    let served = async || stage.try_ask(&completion(LONG)).await.is_ok_and(|answer| answer.head.status == 200);
    eventually(SOON, "it is served again", served).await.unwrap();
    for position in 0..2 {
        until_mirrored(&stage, position).await;
    }
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_starts_before_any_engine_finds_them_when_they_come() {
    let (place, dir) = (Place::new(), temp_dir().unwrap());
    stage_tokenizer(dir.path(), MODEL);
    let kvlb = Kvlb::start(place.config(dir.path())).await.unwrap();
    let mut stage = Stage { kvlb, engines: Vec::new(), place, dir, rule_id: 0 };
    stage.rule_id = stage.create(&stage.place.rule(2, &json!({}))).await;
    let refused = async || {
        let answer = stage.try_ask(&completion("anybody?")).await;
        answer.is_ok_and(|answer| matches!(answer.head.status, 502 | 503))
    };
    eventually(SOON, "clients are told", refused).await.unwrap();
    for position in 0..2 {
        stage.engines.push(Engine::start(stage.place.engine_config(position)).await.unwrap());
    }
    stage.until_served().await;
    stage.until_subscribed().await;
    stage.ask(&completion(LONG)).await;
    let warm =
        async || stage.ask(&completion(LONG)).await.head.header("x-kvlb-depth").is_some_and(|depth| depth != "0");
    eventually(SOON, "the overlap is found", warm).await.unwrap();
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_resolve_to_nothing_and_ports_that_nobody_opens_hold_up_no_rule() {
    let stage = Stage::set(1, json!({})).await;
    let mut rule = stage.place.rule(1, &json!({"port": 8090}));
    rule["endpoints"] = json!([
        {"endpointIP": "no-such-host.invalid", "targetPort": 8000},
        {"endpointIP": stage.place.ip(77).to_string(), "targetPort": 1},
        {"endpointIP": stage.place.endpoint(0).to_string(), "targetPort": 8000},
    ]);
    stage.create(&rule).await;
    let vip = stage.place.at(100, 8090);
    let bytes = super::stage::post("/v1/completions", &[], completion(LONG).to_string().as_bytes());
    let served = async || super::stage::exchange(vip, &bytes).await.is_ok_and(|answer| answer.head.status == 200);
    eventually(SOON, "the one that is there serves", served).await.unwrap();
    for _ in 0..20 {
        assert_eq!(super::stage::exchange(vip, &bytes).await.unwrap().head.status, 200);
    }
    stage.close().await;
}

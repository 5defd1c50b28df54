//! Endpoints that fail again and again get no traffic for a while, unless it is not their fault.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::{Answer, End};
use serde_json::json;
use tokio::task::JoinSet;

use fleet::trio::{all_quiet, completions, own, prompt, three};
use fleet::{Fleet, SOON, Talker, completion};

async fn ask(client: &mut Talker, number: u32) -> Answer {
    client.ask(&[], &completion(&prompt(number), 1)).await.unwrap()
}

async fn state(fleet: &Fleet, number: usize, wanted: &str) {
    let is_it = async || fleet.endpoint(number).await.is_ok_and(|shown| shown["state"] == wanted);
    eventually(SOON, wanted, is_it).await.unwrap();
}

async fn opened(fleet: &Fleet, cause: &str) -> u64 {
    let id = fleet.id();
    let of = async |number: usize| {
        fleet
            .count(&format!("kvlb_breaker_opened_total{{cause=\"{cause}\",ep_idx=\"{number}\",service=\"{id}\"}}"))
            .await
            .unwrap_or_default()
    };
    of(0).await + of(1).await + of(2).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_fails_three_times_rests_is_tried_and_comes_back() {
    let fleet = three(json!({"cb_enable": true, "cb_open_sec": 1})).await;
    for number in 1..=3 {
        own(&fleet, number).await;
    }
    fleet.agree().await.unwrap();
    let mut client = Talker::new(fleet.vip);
    fleet.engines[0].faults().set(|plan| plan.status = Some(500));
    for number in [1, 2] {
        assert_eq!(ask(&mut client, number).await.head.status, 500);
    }
    fleet.engines[0].faults().clear();
    assert_eq!(ask(&mut client, 1).await.engine(), "a", "a sound answer forgets");
    fleet.engines[0].faults().set(|plan| plan.status = Some(500));
    for number in 1..=3 {
        assert_eq!(ask(&mut client, number).await.head.status, 500);
    }
    assert_eq!(opened(&fleet, "answer").await, 1);
    let before = completions(&fleet, 0).len();
    let answer = ask(&mut client, 1).await;
    assert_eq!((answer.head.status, answer.engine()), (200, "b"), "the second best");
    assert_eq!(completions(&fleet, 0).len(), before);
    // An operator who switches breakers off gets the endpoint back at once.
    fleet.put_rule(|rule| rule["serviceArguments"]["cb_enable"] = json!(false)).await.unwrap();
    assert_eq!(ask(&mut client, 2).await.head.status, 500);
    fleet.put_rule(|_| ()).await.unwrap();
    // Tried when its time is over, it fails once more and rests again.
    state(&fleet, 0, "half-open").await;
    assert_eq!(ask(&mut client, 2).await.head.status, 500);
    state(&fleet, 0, "breaker-open").await;
    assert_eq!(opened(&fleet, "answer").await, 2);
    fleet.engines[0].faults().clear();
    state(&fleet, 0, "half-open").await;
    for number in [2, 3] {
        assert_eq!(ask(&mut client, number).await.engine(), "a");
    }
    state(&fleet, 0, "-").await;
    all_quiet(&fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_fails_everywhere_takes_out_one_endpoint_at_most() {
    let fleet = three(json!({"cb_enable": true, "cb_open_sec": 60})).await;
    own(&fleet, 1).await;
    fleet.agree().await.unwrap();
    let mut client = Talker::new(fleet.vip);
    fleet.engines.iter().for_each(|engine| engine.faults().set(|plan| plan.status = Some(500)));
    for _ in 0..20 {
        assert_eq!(ask(&mut client, 1).await.head.status, 500, "passed on as it is");
    }
    assert_eq!(opened(&fleet, "answer").await, 1);
    state(&fleet, 0, "breaker-open").await;
    state(&fleet, 1, "-").await;
    assert!(completions(&fleet, 1).len() >= 17);
}

/// A streamed answer of some tokens, on a connection of its own.
async fn stream(vip: std::net::SocketAddr, number: u32) -> Answer {
    let mut body = completion(&prompt(number), 10);
    body["stream"] = json!(true);
    Talker::new(vip).ask(&[], &body).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_dies_under_each_stream_rests() {
    let fleet = three(json!({"cb_enable": true, "cb_open_sec": 1})).await;
    for number in 1..=4 {
        own(&fleet, number).await;
    }
    fleet.agree().await.unwrap();
    let dying = |chunks: Option<usize>| fleet.engines[0].faults().set(|plan| plan.die_after_chunks = chunks);
    let broken = async |number: u32| {
        let answer = stream(fleet.vip, number).await;
        assert_eq!((answer.head.status, answer.engine()), (200, "a"));
        assert!(answer.body.end != End::Complete, "{:?}", answer.body);
    };
    dying(Some(3));
    broken(1).await;
    broken(2).await;
    dying(None);
    assert_eq!(stream(fleet.vip, 1).await.body.end, End::Complete, "a whole one forgets");
    dying(Some(3));
    for number in 1..=3 {
        broken(number).await;
    }
    eventually(SOON, "its breaker opens", async || opened(&fleet, "broken_off").await == 1).await.unwrap();
    let answer = stream(fleet.vip, 4).await;
    assert_eq!((answer.engine(), answer.body.end), ("b", End::Complete), "the second best");
    // Tried when its time is over, it breaks off once more and rests again.
    state(&fleet, 0, "half-open").await;
    broken(4).await;
    eventually(SOON, "its breaker opens again", async || opened(&fleet, "broken_off").await == 2).await.unwrap();
    dying(None);
    state(&fleet, 0, "half-open").await;
    for number in [1, 2] {
        assert_eq!(stream(fleet.vip, number).await.engine(), "a");
    }
    state(&fleet, 0, "-").await;
    assert_eq!(opened(&fleet, "answer").await + opened(&fleet, "connect").await, 0);
    all_quiet(&fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_killed_under_many_streams_has_failed_once_and_is_used_when_it_is_back() {
    let mut fleet = three(json!({"cb_enable": true, "cb_open_sec": 60})).await;
    own(&fleet, 1).await;
    fleet.agree().await.unwrap();
    fleet.engines[0].faults().set(|plan| plan.stall_after_chunks = Some(2));
    let mut streams = JoinSet::new();
    for _ in 0..10 {
        streams.spawn(stream(fleet.vip, 1));
    }
    let begun = "loxilb_pd_kv_tier15_hits_total{ep_idx=\"0\"}";
    eventually(SOON, "all stream", async || fleet.count(begun).await.is_ok_and(|count| count == 10)).await.unwrap();
    fleet.engines[0].kill().await;
    while let Some(answer) = streams.join_next().await {
        assert!(answer.unwrap().body.end != End::Complete);
    }
    fleet.engines[0].faults().clear();
    fleet.engines[0].restart().await.unwrap();
    own(&fleet, 1).await;
    fleet.agree().await.unwrap();
    let answer = stream(fleet.vip, 1).await;
    assert_eq!((answer.engine(), answer.body.end), ("a", End::Complete));
    assert_eq!(opened(&fleet, "broken_off").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_off_everywhere_takes_out_one_endpoint_at_most() {
    let fleet = three(json!({"cb_enable": true, "cb_open_sec": 60})).await;
    own(&fleet, 1).await;
    fleet.agree().await.unwrap();
    fleet.engines.iter().for_each(|engine| engine.faults().set(|plan| plan.die_after_chunks = Some(1)));
    for _ in 0..12 {
        assert!(stream(fleet.vip, 1).await.body.end != End::Complete);
    }
    assert_eq!(opened(&fleet, "broken_off").await, 1);
    state(&fleet, 1, "-").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_endpoint_costs_five_connects() {
    let mut fleet = three(json!({"cb_enable": true, "cb_open_sec": 60})).await;
    for number in 1..=20 {
        own(&fleet, number).await;
    }
    fleet.agree().await.unwrap();
    fleet.engines[0].kill().await;
    let mut client = Talker::new(fleet.vip);
    for number in 1..=20 {
        assert_eq!(ask(&mut client, number).await.head.status, 200);
    }
    assert_eq!(opened(&fleet, "connect").await, 1);
    let refused = "kvlb_endpoint_connects_total{result=\"refused\"}";
    assert_eq!(fleet.count(refused).await.unwrap(), 5);
    // Two of three: more than half, so it says more of what they have in common, and whoever is left must not bear it alone.
    fleet.engines[1].kill().await;
    for number in 1..=20 {
        assert_eq!(ask(&mut client, number).await.engine(), "c");
    }
    assert!(fleet.sum("kvlb_breaker_panic_total").await.unwrap() > 0);
    state(&fleet, 1, "breaker-open").await;
}

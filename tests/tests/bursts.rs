//! Requests with one beginning that come together stay together, although no event can tell of it yet: the choice just made is
//! expected to hold, within the bound on load, and no longer than it may.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use std::time::Duration;

use kvlb_tests::engine::EngineConfig;
use kvlb_tests::harness::eventually;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::sleep;

use fleet::{Fleet, SOON, Setup, Talker, completion, quick};

const EXPECTED: &str = "kvlb_expected_choices_total";
const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
const BURST: usize = 20;

fn prompt(number: u32) -> Value {
    completion(&(0..136).map(|at| number * 10_000 + at).collect::<Vec<_>>(), 1)
}

/// An engine whose first token, and with it its first event, takes a second and a half.
fn slow(name: &str) -> EngineConfig {
    EngineConfig { prefill_us_per_token: 11_000.0, max_num_batched_tokens: 136, ..quick(name) }
}

async fn slow_fleet(engines: usize, rule: Value) -> Fleet {
    let engines = ["a", "b", "c"][..engines].iter().map(|name| slow(name)).collect();
    Fleet::start(Setup { engines, rule, ..Setup::default() }).await.unwrap()
}

/// Sends the same request over as many connections as `count`, one right after the other; who answered each.
async fn burst(fleet: &Fleet, body: &Value, count: usize) -> Vec<usize> {
    let mut asking = JoinSet::new();
    for number in 0..count {
        let (vip, body) = (fleet.vip, body.clone());
        asking.spawn(async move { (number, Talker::new(vip).ask(&[], &body).await.unwrap()) });
        sleep(Duration::from_millis(5)).await;
    }
    let mut answers = vec![0; count];
    while let Some(answer) = asking.join_next().await {
        let (number, answer) = answer.unwrap();
        answers[number] = fleet.who(&answer).unwrap();
    }
    answers
}

#[tokio::test]
async fn a_cold_burst_with_one_beginning_goes_to_one_endpoint_and_is_no_hit() {
    let fleet = slow_fleet(3, json!({"kvLoadFloor": 100})).await;
    let answers = burst(&fleet, &prompt(1), BURST).await;
    assert_eq!(answers, [answers[0]; BURST]);
    assert_eq!(fleet.sum(EXPECTED).await.unwrap(), 19);
    assert_eq!(fleet.sum(HITS).await.unwrap(), 0, "only what is announced is a hit");
    // What has been announced since is.
    fleet.agree().await.unwrap();
    let hit = fleet.ask(&prompt(1)).await.unwrap();
    assert_eq!(fleet.who(&hit), Some(answers[0]));
    assert_eq!((fleet.sum(HITS).await.unwrap(), fleet.sum(EXPECTED).await.unwrap()), (1, 19));
}

#[tokio::test]
async fn different_beginnings_are_spread() {
    let fleet = slow_fleet(3, json!({"kvLoadFloor": 100})).await;
    let mut asking = JoinSet::new();
    for number in 0..9 {
        let vip = fleet.vip;
        asking.spawn(async move { Talker::new(vip).ask(&[], &prompt(number)).await.unwrap() });
        sleep(Duration::from_millis(10)).await;
    }
    let mut answers = [0; 3];
    while let Some(answer) = asking.join_next().await {
        answers[fleet.who(&answer.unwrap()).unwrap()] += 1;
    }
    assert_eq!(answers, [3, 3, 3]);
    assert_eq!(fleet.sum(EXPECTED).await.unwrap(), 0);
}

#[tokio::test]
async fn a_burst_overflows_at_the_bound_on_load() {
    let fleet = slow_fleet(2, json!({"kvLbMode": "hard"})).await;
    let answers = burst(&fleet, &prompt(1), BURST).await;
    // The bound is never below four requests, and below all twenty. Whoever got one over the bound is expected to hold the beginning too.
    assert_eq!(answers[..4], [answers[0]; 4], "{answers:?}");
    assert!(answers.iter().any(|answer| *answer != answers[0]), "there is no bound");
    let expected = fleet.sum(EXPECTED).await.unwrap();
    assert!((17..=19).contains(&expected), "{expected} of {answers:?}");
    assert_eq!(fleet.sum(HITS).await.unwrap(), 0);
}

#[tokio::test]
async fn an_engine_that_refused_is_not_expected_to_hold_anything() {
    let fleet = slow_fleet(2, json!({"kvLoadFloor": 100})).await;
    let mut refusals = 0;
    for number in 0..4 {
        let body = prompt(number);
        // It says that it does not begin, so another one gets the request.
        fleet.engines[0].faults().set(|plan| plan.status = Some(503));
        let refused = || fleet.engines[0].requests().iter().filter(|seen| seen.status == Some(503)).count();
        let (before, expected) = (refused(), fleet.sum(EXPECTED).await.unwrap());
        let (vip, first) = (fleet.vip, body.clone());
        let first = tokio::spawn(async move { Talker::new(vip).ask(&[], &first).await.unwrap() });
        let begun = async || fleet.engines[1].running() == 1;
        eventually(SOON, "the second engine computes", begun).await.unwrap();
        refusals += refused() - before;
        fleet.engines[0].faults().clear();
        let second = fleet.ask(&body).await.unwrap();
        assert_eq!(fleet.who(&second), Some(1), "prompt {number}");
        assert_eq!(fleet.sum(EXPECTED).await.unwrap(), expected + 1);
        assert_eq!(fleet.who(&first.await.unwrap()), Some(1));
    }
    assert!(refusals > 0, "the first engine was never asked");
}

#[tokio::test]
async fn an_expectation_that_nothing_fulfils_is_dropped_in_seconds() {
    // It computes, but caches nothing and says nothing.
    let engines = ["a", "b"].map(|name| EngineConfig { no_prefix_caching: true, ..quick(name) }).to_vec();
    let fleet = Fleet::start(Setup { engines, ..Setup::default() }).await.unwrap();
    fleet.ask(&prompt(1)).await.unwrap();
    fleet.ask(&prompt(1)).await.unwrap();
    assert_eq!(fleet.sum(EXPECTED).await.unwrap(), 1);
    // Two seconds after the end of the request that made it; the second made one too.
    sleep(Duration::from_millis(2500)).await;
    fleet.ask(&prompt(1)).await.unwrap();
    assert_eq!(fleet.sum(EXPECTED).await.unwrap(), 1);
}

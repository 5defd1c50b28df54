//! What an engine says of its cache is held against what kvlb believed: shown, and acted on where they differ.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use kvlb_tests::engine::EngineConfig;
use kvlb_tests::harness::eventually;
use serde_json::{Value, json};
use tokio::time::{Duration, sleep};

use fleet::{Fleet, SOON, Setup, completion, quick};

const PREDICTED: &str = "kvlb_predicted_cached_tokens_total";
const REPORTED: &str = "kvlb_reported_cached_tokens_total";
/// Requests after which an engine that reports too little is no longer believed.
const PATIENCE: u32 = 20;

fn prompt(number: u32) -> Value {
    completion(&(0..136).map(|at| number * 10_000 + at).collect::<Vec<_>>(), 1)
}

fn streamed(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

async fn warm(fleet: &Fleet, number: usize, body: &Value) {
    let answer = fleet::Talker::new(fleet.engine_at(number)).ask(&[], body).await.unwrap();
    assert_eq!(answer.head.status, 200);
    known(fleet, number, body).await;
}

async fn known(fleet: &Fleet, number: usize, body: &Value) {
    let deep = async || fleet.depth(number, body).await.is_ok_and(|depth| depth == 8);
    eventually(SOON, "the blocks are known", deep).await.unwrap();
}

/// Waits until the counter of an endpoint is this: the tail of an answer is read beside it.
async fn counted(fleet: &Fleet, family: &str, ep_idx: usize, wanted: u64) {
    let series = format!("{family}{{ep_idx=\"{ep_idx}\",service=\"{}\"}}", fleet.id());
    let right = async || fleet.count(&series).await.is_ok_and(|count| count == wanted);
    eventually(SOON, &format!("{series} is {wanted}"), right).await.unwrap();
}

/// Whether a number stands anywhere in a value.
fn mentions(value: &Value, number: u64) -> bool {
    match value {
        Value::Array(items) => items.iter().any(|item| mentions(item, number)),
        Value::Object(fields) => fields.values().any(|field| mentions(field, number)),
        other => other.as_u64() == Some(number) || other.as_str() == Some(&number.to_string()),
    }
}

#[tokio::test]
async fn an_honest_engine_reports_what_was_predicted_and_the_savings_are_shown() {
    let engines = ["a", "b"].map(quick).to_vec();
    let fleet = Fleet::start(Setup { engines, ..Setup::default() }).await.unwrap();
    warm(&fleet, 0, &prompt(0)).await;
    warm(&fleet, 1, &prompt(1)).await;
    let asked = [(0, 3), (1, 2)];
    for (number, times) in asked {
        let body = prompt(u32::try_from(number).unwrap());
        for _ in 0..times {
            assert_eq!(fleet.who(&fleet.ask(&body).await.unwrap()), Some(number));
            assert_eq!(fleet.who(&fleet.ask(&streamed(body.clone())).await.unwrap()), Some(number));
        }
    }
    // A request that finds nothing promises nothing.
    assert_eq!(fleet.ask(&prompt(9)).await.unwrap().cached_tokens(), Some(0));
    for (number, times) in asked {
        let tokens = 2 * times * 128;
        counted(&fleet, PREDICTED, number, tokens).await;
        counted(&fleet, REPORTED, number, tokens).await;
    }
    let (code, text) = fleet.cli(&["get", "savings"], "").unwrap();
    assert!(code == Some(0) && text.contains("768") && text.contains("512"), "{code:?}: {text}");
    let (code, text) = fleet.cli(&["get", "savings", "-o", "json"], "").unwrap();
    let savings: Value = serde_json::from_str(&text).unwrap();
    assert!(code == Some(0) && mentions(&savings, 768) && mentions(&savings, 512), "{code:?}: {savings}");
}

#[tokio::test]
async fn an_engine_that_does_not_report_is_not_held_to_anything() {
    let engines = vec![EngineConfig { no_prompt_tokens_details: true, ..quick("a") }];
    let fleet = Fleet::start(Setup { engines, ..Setup::default() }).await.unwrap();
    warm(&fleet, 0, &prompt(0)).await;
    let replays = fleet.engines[0].published().replays;
    for _ in 0..2 * PATIENCE {
        fleet.ask(&prompt(0)).await.unwrap();
    }
    sleep(Duration::from_millis(500)).await;
    assert_eq!(fleet.engines[0].published().replays, replays);
    assert_eq!(fleet.sum(REPORTED).await.unwrap(), 0);
    assert_eq!(fleet.depth(0, &prompt(0)).await.unwrap(), 8);
}

#[tokio::test]
async fn requests_for_which_an_engine_does_not_look_into_its_cache_prove_nothing() {
    let engines = vec![EngineConfig { no_replay: true, ..quick("a") }];
    let fleet = Fleet::start(Setup { engines, ..Setup::default() }).await.unwrap();
    warm(&fleet, 0, &prompt(0)).await;
    for number in 0..3 * PATIENCE {
        let mut body = prompt(0);
        if number % 2 == 0 {
            body["prompt_logprobs"] = json!(1);
        } else {
            (body["echo"], body["logprobs"]) = (json!(true), json!(1));
        }
        assert_eq!(fleet.ask(&body).await.unwrap().cached_tokens(), Some(0));
    }
    sleep(Duration::from_millis(500)).await;
    assert_eq!((fleet.sum(PREDICTED).await.unwrap(), fleet.depth(0, &prompt(0)).await.unwrap()), (0, 8));
    assert_eq!(fleet.ask(&prompt(0)).await.unwrap().cached_tokens(), Some(128));
}

#[tokio::test]
async fn an_engine_that_reports_less_than_half_is_replayed_and_that_is_said() {
    let fleet = Fleet::start(Setup { engines: vec![quick("a")], ..Setup::default() }).await.unwrap();
    for number in 0..4 {
        warm(&fleet, 0, &prompt(number)).await;
    }
    let replays = fleet.engines[0].published().replays;
    // More than half is a rounding, an eviction on the way, bad luck.
    fleet.engines[0].faults().set(|plan| plan.reported_cached_share = Some(0.6));
    for number in 0..2 * PATIENCE {
        fleet.ask(&prompt(number % 4)).await.unwrap();
    }
    sleep(Duration::from_millis(200)).await;
    assert_eq!(fleet.engines[0].published().replays, replays);
    fleet.engines[0].faults().set(|plan| plan.reported_cached_share = Some(0.2));
    for number in 0..3 * PATIENCE {
        fleet.ask(&prompt(number % 4)).await.unwrap();
    }
    let asked = async || fleet.engines[0].published().replays > replays;
    eventually(SOON, "a replay is asked for", asked).await.unwrap();
    let told = |line: &&str| line.contains("WARN") && line.contains("the engine reports");
    let lines: Vec<_> = fleet.kvlb.log().lines().filter(told).map(str::to_owned).collect();
    assert!(!lines.is_empty(), "{}", fleet.kvlb.log());
    assert!(lines.len() <= 3, "said again and again: {lines:?}");
}

#[tokio::test]
async fn blocks_that_an_engine_lost_without_a_word_are_cleared_where_nothing_can_be_replayed() {
    const PROMPTS: u32 = 60;
    let engines = vec![EngineConfig { no_replay: true, ..quick("a") }];
    let fleet = Fleet::start(Setup { engines, ..Setup::default() }).await.unwrap();
    for number in 0..PROMPTS {
        warm(&fleet, 0, &prompt(number)).await;
    }
    assert_eq!(fleet.engines[0].forget(1.0), usize::try_from(PROMPTS * 8).unwrap());
    // Each request tells of its own blocks again; only the last prompt, never asked for, shows that all were dropped.
    let mut requests = 0;
    while fleet.depth(0, &prompt(PROMPTS - 1)).await.unwrap() > 0 {
        assert!(
            requests < 2 * PATIENCE,
            "still believed after {requests} requests: {}",
            fleet.status(0).await.unwrap()
        );
        assert_eq!(fleet.ask(&prompt(requests)).await.unwrap().cached_tokens(), Some(0));
        requests += 1;
        // The verdict is another task's.
        sleep(Duration::from_millis(20)).await;
    }
    assert!(requests >= PATIENCE, "after {requests} requests it may still be bad luck");
    assert!(
        fleet.kvlb.log().lines().any(|line| line.contains("WARN") && line.contains("the engine reports")),
        "not said"
    );
    // It is believed again as it tells again.
    fleet.ask(&prompt(PROMPTS - 1)).await.unwrap();
    known(&fleet, 0, &prompt(PROMPTS - 1)).await;
    assert_eq!(fleet.ask(&prompt(PROMPTS - 1)).await.unwrap().cached_tokens(), Some(128));
}

#[tokio::test]
async fn a_rule_that_only_observes_counts_its_choices_and_lets_the_selector_choose() {
    let engines = ["a", "b"].map(quick).to_vec();
    let rule = json!({"kvObserve": true});
    let fleet = Fleet::start(Setup { engines, rule, ..Setup::default() }).await.unwrap();
    warm(&fleet, 0, &prompt(0)).await;
    let mut answers = [0, 0];
    for _ in 0..10 {
        let answer = fleet.ask(&prompt(0)).await.unwrap();
        answers[fleet.who(&answer).unwrap()] += 1;
        assert_ne!(answer.head.header("x-kvlb-tier"), Some("1.5"));
    }
    assert_eq!(answers, [5, 5], "round robin");
    assert_eq!(fleet.sum("kvlb_observed_choices_total").await.unwrap(), 10);
    let metrics = fleet.metrics().await.unwrap();
    let of_rule = |series: &str| series.contains(&format!("service=\"{}\"", fleet.id())) && series.contains("result=");
    assert!(metrics.family("kvlb_observed_choices_total").all(|(series, _)| of_rule(series)));
    // Written again without it, the same request goes to its blocks.
    fleet.put_rule(|rule| rule["serviceArguments"]["kvObserve"] = json!(false)).await.unwrap();
    let enforced = async || {
        let answer = fleet.ask(&prompt(0)).await;
        answer.is_ok_and(|answer| answer.head.header("x-kvlb-tier") == Some("1.5"))
    };
    eventually(SOON, "the tier chooses", enforced).await.unwrap();
}

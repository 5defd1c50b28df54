//! How a rule weighs overlap against load, and whom its selector chooses, seen from outside.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use std::collections::BTreeSet;
use std::time::Duration;

use kvlb_tests::engine::EngineConfig;
use kvlb_tests::harness::eventually;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::sleep;

use fleet::{Fleet, SOON, Setup, Talker, completion, quick};

const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
const SPILLS: &str = "loxilb_pd_kv_tier15_spills_total";
const SEEDS: &str = "loxilb_pd_kv_tier15_cold_seeds_total";

/// A prompt of eight blocks and a bit, of its own group.
fn prompt(group: u32, tail: u32) -> Value {
    let beginning = (0..128).map(|at| group * 10_000 + at);
    completion(&beginning.chain((0..8).map(|at| 900_000_000 + tail * 10 + at)).collect::<Vec<_>>(), 1)
}

async fn fleet(engines: &[EngineConfig], rule: Value) -> Fleet {
    Fleet::start(Setup { engines: engines.to_vec(), rule, ..Setup::default() }).await.unwrap()
}

/// The blend in force, as the API shows it.
async fn blend(fleet: &Fleet) -> Value {
    let (status, answer) = fleet.kvlb.api("GET", "/netlox/v1/config/loadbalancer/all", None).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    answer["lbAttr"][0]["kvBlend"].clone()
}

#[tokio::test]
async fn every_number_changes_without_a_restart_and_is_shown() {
    let fleet = fleet(&[quick("a"), quick("b")], json!({})).await;
    let defaults = json!({"mode": "hard", "meanLoadFactor": 175, "loadFloor": 4, "loadPenalty": 32,
        "capSumMilli": 15_284_310, "spillRelief": true, "coldStartSeedN": 16, "coldStartMinBlocks": 16,
        "minMatchTokens": 16});
    assert_eq!(blend(&fleet).await, defaults);
    for mode in ["off", "soft", "adaptive", "adaptive-soft", "cost", "hard"] {
        let changed = json!({"kvLbMode": mode, "kvMeanLoadFactor": 300, "kvLoadFloor": 1, "kvLoadPenalty": 1000,
            "kvCapSumMilli": 2_000_000, "kvSpillRelief": "off", "kvColdStartSeedN": 3, "kvColdStartMinBlocks": 9,
            "kvMinMatchTokens": 64});
        fleet
            .put_rule(|rule| {
                let service = rule["serviceArguments"].as_object_mut().unwrap();
                service.extend(changed.as_object().unwrap().clone());
            })
            .await
            .unwrap();
        let shown = json!({"mode": mode, "meanLoadFactor": 300, "loadFloor": 1, "loadPenalty": 1000,
            "capSumMilli": 2_000_000, "spillRelief": false, "coldStartSeedN": 3, "coldStartMinBlocks": 9,
            "minMatchTokens": 64});
        assert_eq!(blend(&fleet).await, shown);
        let (code, table) = fleet.cli(&["get", "lb", "-o", "wide"], "").unwrap();
        assert!(code == Some(0) && table.contains(mode) && table.contains("match 64"), "{table}");
        fleet.ask(&prompt(1, 0)).await.unwrap();
    }
}

#[tokio::test]
async fn every_third_hit_seeds_cold_endpoints_until_they_are_warm() {
    let rule = json!({"kvColdStartSeedN": 3, "kvColdStartMinBlocks": 8});
    let fleet = fleet(&[quick("a"), quick("b"), quick("c")], rule).await;
    fleet.ask(&prompt(1, 0)).await.unwrap();
    fleet.agree().await.unwrap();
    let mut answered = Vec::new();
    for tail in 1..=12 {
        answered.push(fleet.who(&fleet.ask(&prompt(1, tail)).await.unwrap()).unwrap());
        fleet.agree().await.unwrap();
    }
    // The third seeds one, the sixth the other; then all hold the eight blocks.
    assert_eq!(fleet.sum(SEEDS).await.unwrap(), 2, "{answered:?}");
    assert_ne!(answered[2], answered[0]);
    assert_ne!(answered[5], answered[0]);
    assert_ne!(answered[2], answered[5]);
    assert_eq!(fleet.sum(HITS).await.unwrap(), 12);
    assert_eq!(fleet.sum(SPILLS).await.unwrap(), 0);
}

/// An engine that computes a prompt of [`prompt`] in two seconds and a half, and what is new behind a known beginning in a
/// sixth of a second.
fn slow(name: &str) -> EngineConfig {
    EngineConfig { prefill_us_per_token: 20_000.0, max_num_batched_tokens: 136, ..quick(name) }
}

/// An engine without events, whose second token takes a while.
fn silent(name: &str) -> EngineConfig {
    EngineConfig { no_events: true, decode_ms_per_token: 400.0, ..quick(name) }
}

/// Sends prompts at once, each over a connection of its own; who answered how many.
async fn at_once(fleet: &Fleet, bodies: Vec<Value>) -> Vec<usize> {
    let mut asking = JoinSet::new();
    for body in bodies {
        let vip = fleet.vip;
        asking.spawn(async move { Talker::new(vip).ask(&[], &body).await.unwrap() });
        sleep(Duration::from_millis(10)).await;
    }
    let mut counts = vec![0; fleet.engines.len()];
    while let Some(answer) = asking.join_next().await {
        counts[fleet.who(&answer.unwrap()).unwrap()] += 1;
    }
    counts
}

#[tokio::test]
async fn cost_leaves_the_owner_when_computing_elsewhere_is_sooner_done() {
    let fleet = fleet(&[slow("a"), slow("b")], json!({"kvLbMode": "cost", "kvColdStartSeedN": 0})).await;
    let owner = fleet.who(&fleet.ask(&prompt(1, 0)).await.unwrap()).unwrap();
    fleet.agree().await.unwrap();
    // A tail of 8 tokens stays; beside a sequence, which counts for 256, the 136 of the whole are sooner computed elsewhere.
    let counts = at_once(&fleet, vec![prompt(1, 1)]).await;
    assert_eq!(counts[owner], 1);
    let counts = at_once(&fleet, vec![prompt(1, 2), prompt(1, 3)]).await;
    assert_eq!(counts, [1, 1]);
    fleet.agree().await.unwrap();
    let counts = at_once(&fleet, (10..=21).map(|tail| prompt(1, tail)).collect()).await;
    assert!(counts.iter().all(|count| *count >= 5), "{counts:?}");
    // Prompts that nobody knows go where least is to be computed: one in turn, however many there are.
    let counts = at_once(&fleet, (50..=53).map(|group| prompt(group, 0)).collect()).await;
    assert_eq!(counts, [2, 2]);
}

#[tokio::test]
async fn soft_trades_blocks_for_requests() {
    let rule = json!({"kvLbMode": "soft", "kvLoadPenalty": 4_000, "kvColdStartSeedN": 0});
    let fleet = fleet(&[slow("a"), slow("b")], rule).await;
    let owner = fleet.who(&fleet.ask(&prompt(1, 0)).await.unwrap()).unwrap();
    fleet.agree().await.unwrap();
    // Eight blocks are worth two requests at four blocks each: the third is a tie, the fourth goes.
    let counts = at_once(&fleet, (1..=4).map(|tail| prompt(1, tail)).collect()).await;
    assert_eq!((counts[owner], counts[1 - owner]), (3, 1));
    assert_eq!(fleet.sum(SPILLS).await.unwrap(), 1);
}

fn plain(sel: u32) -> Value {
    json!({"kvExactMode": 0, "sel": sel})
}

#[tokio::test]
async fn chwbl_keeps_a_beginning_together_and_a_hot_one_within_its_bound() {
    for sel in [8, 10] {
        let fleet = fleet(&[silent("a"), silent("b"), silent("c")], plain(sel)).await;
        let mut used = BTreeSet::new();
        for group in 0..12 {
            let first = fleet.who(&fleet.ask(&prompt(group, 0)).await.unwrap()).unwrap();
            assert_eq!(fleet.who(&fleet.ask(&prompt(group, 1)).await.unwrap()).unwrap(), first);
            used.insert(first);
        }
        assert!(used.len() > 1, "twelve beginnings on one endpoint");
        // Of 12 at once each carries at most ceil(1.25 * 12 / 3) = 5.
        let held = |tail| {
            let mut body = prompt(3, tail);
            body["max_tokens"] = json!(2);
            body
        };
        let counts = at_once(&fleet, (0..12).map(held).collect()).await;
        assert!(counts.iter().all(|count| *count <= 5), "{counts:?}");
    }
}

#[tokio::test]
async fn priority_gives_each_endpoint_exactly_its_weight() {
    let fleet = fleet(&[silent("a"), silent("b"), silent("c")], plain(2)).await;
    let weights = [5, 1, 2];
    fleet
        .put_rule(|rule| {
            for (row, weight) in rule["endpoints"].as_array_mut().unwrap().iter_mut().zip(weights) {
                row["weight"] = json!(weight);
            }
        })
        .await
        .unwrap();
    let served = async || fleet.who(&fleet.ask(&prompt(0, 0)).await.unwrap()).unwrap();
    let mut counts = [0; 3];
    for _ in 0..24 {
        counts[served().await] += 1;
    }
    assert_eq!(counts, [15, 3, 6]);
    // Weight 0 drains.
    fleet.put_rule(|rule| rule["endpoints"][0]["weight"] = json!(0)).await.unwrap();
    let drained = async || fleet.sum("kvlb_endpoint_eligible").await.is_ok_and(|eligible| eligible == 2);
    eventually(SOON, "the endpoint drains", drained).await.unwrap();
    for _ in 0..12 {
        assert_ne!(served().await, 0);
    }
}

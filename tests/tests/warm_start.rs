//! A kvlb that starts before engines with full caches serves at once, and shows how it comes to know them.
//!
//! The promise is for 2.3 million blocks of 7 engines; that is what an optimised build is held to. An unoptimised one, in which naming
//! the engines' blocks alone would take a minute, is held to a tenth of it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvlb_tests::engine::{Algorithm, EngineConfig};
use kvlb_tests::harness::http::Client;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use fleet::{BLOCK, Fleet, Setup, Talker, completion, quick};

const ENGINES: usize = 7;
const BLOCKS: usize = if cfg!(debug_assertions) { 230_000 } else { 2_300_000 };
/// Blocks of one prompt, and of one batch: the replay buffer has room for 10,000 batches.
const PROMPT_BLOCKS: usize = 500;
const BATCH_BLOCKS: usize = 50;
const EACH: usize = BLOCKS / ENGINES / PROMPT_BLOCKS * PROMPT_BLOCKS;
/// Until everything is known.
const RECOVERED: Duration = Duration::from_mins(1);

fn prompt(engine: usize, number: usize) -> Vec<u32> {
    let from = (engine * EACH / PROMPT_BLOCKS + number) * 37;
    (0..PROMPT_BLOCKS * BLOCK).map(|at| u32::try_from(from + at * (1 + number % 7)).unwrap()).collect()
}

/// Sends one cold prompt after the other, each of which needs a decision whatever is known by then; how many, and the longest time of one.
async fn ask_until(vip: SocketAddr, over: Arc<AtomicBool>) -> (u32, Duration) {
    let (mut served, mut slowest) = (0, Duration::ZERO);
    while !over.load(Ordering::Relaxed) {
        let asked = Instant::now();
        let body = completion(&[4_000_000_000 + served; 40], 1);
        let answer =
            timeout(Duration::from_secs(5), Talker::new(vip).ask(&[], &body)).await.expect("an answer in time");
        assert_eq!(answer.unwrap().head.status, 200);
        slowest = slowest.max(asked.elapsed());
        served += 1;
        sleep(Duration::from_millis(5)).await;
    }
    (served, slowest)
}

async fn statuses(fleet: &Fleet) -> Vec<Value> {
    let (_, all) = fleet.kvlb.api("GET", "/netlox/v1/config/loadbalancer/all", None).await.unwrap();
    let endpoints = all["lbAttr"][0]["endpoints"].as_array().into_iter().flatten();
    endpoints.map(|endpoint| endpoint["kvStatus"].clone()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_served_from_the_first_second_while_seven_full_engines_are_replayed() {
    let engine = |number: usize| EngineConfig {
        num_gpu_blocks: EACH + 2000,
        prefix_caching_hash_algo: Algorithm::XxhashCbor,
        ..quick(&number.to_string())
    };
    // Nothing can be heard until the engines are full.
    let setup = Setup {
        engines: (0..ENGINES).map(engine).collect(),
        rule: json!({"kvHashAlgo": "xxhash_cbor", "kvMaxBlocks": null}),
        ..Setup::default()
    };
    let mut fleet = Fleet::start(setup).await.unwrap();
    fleet.kvlb.signal(nix::sys::signal::Signal::SIGTERM).unwrap();
    fleet.kvlb.ended(Duration::from_secs(20)).await.unwrap();
    let filling = Instant::now();
    for (number, engine) in fleet.engines.iter().enumerate() {
        engine.preload((0..EACH / PROMPT_BLOCKS).map(|at| prompt(number, at)), BATCH_BLOCKS);
        assert_eq!(engine.blocks().len(), EACH, "engine {number}");
        assert!(engine.published().batches <= 10_000);
    }
    eprintln!("{} blocks filled in after {:?}", EACH * ENGINES, filling.elapsed());

    let started = Instant::now();
    fleet.start_kvlb().await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let asking = tokio::spawn(ask_until(fleet.vip, Arc::clone(&over)));
    let (mut seen, mut words) = (BTreeSet::new(), BTreeSet::new());
    loop {
        let statuses = statuses(&fleet).await;
        let known: u64 = statuses.iter().filter_map(|status| status["blocks"].as_u64()).sum();
        seen.insert(known);
        words.extend(statuses.iter().map(|status| status["replay"].to_string()));
        let applied = statuses.iter().all(|status| status["replay"] == "applied");
        if applied && known >= u64::try_from(EACH * ENGINES).unwrap() {
            break;
        }
        assert!(started.elapsed() < RECOVERED, "{known} of {} blocks; replays {words:?}", EACH * ENGINES);
        sleep(Duration::from_millis(10)).await;
    }
    let recovered = started.elapsed();
    over.store(true, Ordering::Relaxed);
    let (served, slowest) = asking.await.unwrap();
    eprintln!(
        "recovered after {recovered:?}; {served} requests, slowest {slowest:?}; {words:?}; {} readings",
        seen.len()
    );
    assert!(slowest < Duration::from_secs(1), "a request took {slowest:?}");
    assert!(served > 20, "only {served} requests were served");
    assert!(words.contains("\"pending\"") && words.contains("\"applied\""), "{words:?}");
    assert!(seen.len() > 3, "no progress was to be seen: {seen:?}");
    assert!(Client::connect(fleet.vip).await.is_ok());
    for number in 0..ENGINES {
        let body = completion(&prompt(number, 3), 1);
        let warm = fleet.ask(&body).await.unwrap();
        assert_eq!(fleet.who(&warm), Some(number));
        // The last token is computed in any case.
        assert_eq!(warm.cached_tokens(), Some(u64::try_from((PROMPT_BLOCKS - 1) * BLOCK).unwrap()));
    }
}

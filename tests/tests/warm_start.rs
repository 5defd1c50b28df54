//! A kvlb that starts before engines with full caches serves at once, and shows how it comes to know them.
//!
//! The promise is for 2.3 million blocks of 7 engines; that is what an optimised build is held to. An unoptimised one, in which naming
//! the engines' blocks alone would take a minute, is held to a tenth of it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use std::collections::BTreeSet;
use std::time::Duration;

use kvlb_tests::engine::{Algorithm, EngineConfig};
use kvlb_tests::harness::http::Client;
use serde_json::json;
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
    let (mut served, mut slowest, mut seen) = (0_u32, Duration::ZERO, BTreeSet::new());
    let mut words = BTreeSet::new();
    loop {
        let asked = Instant::now();
        // A cold prompt each time: it needs a decision, whatever is known by now.
        let body = completion(&[4_000_000_000 + served; 40], 1);
        let answer = timeout(Duration::from_secs(5), Talker::new(fleet.vip).ask(&[], &body)).await;
        assert_eq!(answer.expect("an answer").unwrap().head.status, 200);
        slowest = slowest.max(asked.elapsed());
        if served == 0 {
            eprintln!("the first answer came {:?} after the start", started.elapsed());
        }
        served += 1;
        let (mut known, mut pending) = (0, 0);
        for number in 0..ENGINES {
            let status = fleet.status(number).await.unwrap();
            known += usize::try_from(status["blocks"].as_u64().unwrap()).unwrap();
            pending += usize::from(status["replay"] != "applied");
            words.insert(status["replay"].to_string());
        }
        seen.insert(known);
        if known >= EACH * ENGINES && pending == 0 {
            break;
        }
        assert!(started.elapsed() < RECOVERED, "{known} of {} blocks; replays {words:?}", EACH * ENGINES);
        sleep(Duration::from_millis(10)).await;
    }
    eprintln!("recovered after {:?}; {served} requests, slowest {slowest:?}; {words:?}", started.elapsed());
    assert!(slowest < Duration::from_secs(1), "a request took {slowest:?}");
    assert!(served > 3, "it was over before it could be watched");
    assert!(seen.iter().filter(|known| **known < EACH * ENGINES).count() > 2, "no progress was to be seen: {seen:?}");
    assert!(Client::connect(fleet.vip).await.is_ok());
    for number in 0..ENGINES {
        let body = completion(&prompt(number, 3), 1);
        let warm = fleet.ask(&body).await.unwrap();
        assert_eq!(fleet.who(&warm), Some(number));
        // The last token is computed in any case.
        assert_eq!(warm.cached_tokens(), Some(u64::try_from((PROMPT_BLOCKS - 1) * BLOCK).unwrap()));
    }
}

//! vLLM's default ways of naming, pickle under SHA-256 or XXH3, are computed like the portable ones: in parity, block for block.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use kvlb_tests::engine::{Algorithm, EngineConfig};
use kvlb_tests::harness::eventually;
use serde_json::json;

use fleet::{Fleet, SOON, Seeds, Setup, completion, quick, version};

async fn is_served_in_parity(engine: &EngineConfig, seeds: Seeds) {
    let word = engine.prefix_caching_hash_algo.label();
    let engines = ["a", "b"].map(|name| EngineConfig { name: name.to_owned(), ..engine.clone() }).to_vec();
    let rule = json!({"kvHashAlgo": word, "kvKeying": "parity"});
    let fleet = Fleet::start(Setup { engines, seeds, rule, ..Setup::default() }).await.unwrap();
    for owner in [1, 0] {
        // Numbers on both sides of each length that pickle writes an integer in.
        let base: u32 = if owner == 0 { 200 } else { 65_500 };
        let mut tokens: Vec<u32> = (base..base + 100).collect();
        tokens[70] = u32::MAX - base;
        let body = completion(&tokens, 1);
        fleet.warm(owner, &tokens).await.unwrap();
        let deep = async || fleet.depth(owner, &body).await.is_ok_and(|depth| depth == 6);
        eventually(SOON, &format!("the blocks of {word} are found"), deep).await.unwrap();
        let mut salted = body.clone();
        salted["cache_salt"] = json!("tenant-a");
        for body in [&body, &salted] {
            let first = fleet.ask(body).await.unwrap();
            let held = fleet.who(&first).unwrap();
            let known = async || fleet.depth(held, body).await.is_ok_and(|depth| depth == 6);
            eventually(SOON, "a request's own blocks are found", known).await.unwrap();
            let again = fleet.ask(body).await.unwrap();
            assert_eq!((fleet.who(&again), again.cached_tokens()), (Some(held), Some(96)), "{word}");
        }
        let proved = |status: &serde_json::Value| status["contract"] == "proved_by_request";
        let status = fleet.status_when(owner, "proof", proved).await.unwrap();
        assert_eq!(status["keying"], "parity");
    }
    fleet.agree().await.unwrap();
}

#[tokio::test]
async fn pickle_under_sha256_with_a_seed() {
    let engine = EngineConfig { prefix_caching_hash_algo: Algorithm::Sha256, ..quick("") };
    is_served_in_parity(&engine, Seeds::Shared).await;
}

#[tokio::test]
async fn pickle_under_sha256_with_no_seed_on_either_side() {
    let engine = EngineConfig { prefix_caching_hash_algo: Algorithm::Sha256, python_hash_seed: None, ..quick("") };
    is_served_in_parity(&engine, Seeds::Unset).await;
}

#[tokio::test]
async fn pickle_under_xxhash_with_a_seed() {
    for (minor, byte_hashes) in [(23, true), (32, false)] {
        let engine = EngineConfig {
            prefix_caching_hash_algo: Algorithm::Xxhash,
            version: version(minor),
            byte_hashes,
            ..quick("")
        };
        is_served_in_parity(&engine, Seeds::Shared).await;
    }
}

//! An adapter's blocks are its own: a request for it finds them, a request for the base model or another adapter does not, in each form
//! in which vLLM has put the adapter into the hash.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fleet;

use kvlb_tests::engine::{Adapter, EngineConfig, Version};
use kvlb_tests::harness::eventually;
use serde_json::{Value, json};

use fleet::{Fleet, SOON, Setup, completion, quick};

const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
const MISSES: &str = "loxilb_pd_kv_tier15_miss_reason_total";

fn adapter(name: &str, path: &str) -> Adapter {
    Adapter { name: name.to_owned(), path: path.to_owned() }
}

fn prompt(number: u32) -> Vec<u32> {
    (0..100).map(|at| number * 10_000 + at).collect()
}

fn of(model: &str, tokens: &[u32]) -> Value {
    let mut body = completion(tokens, 1);
    body["model"] = json!(model);
    body
}

/// Waits until kvlb knows the adapters: it reads them from the engines a moment after the rule is made.
async fn known(fleet: &Fleet, number: usize, body: &Value) {
    let deep = async || fleet.depth(number, body).await.is_ok_and(|depth| depth == 6);
    let found = eventually(SOON, &format!("6 blocks of {} are known at {number}", body["model"]), deep).await;
    if let Err(late) = found {
        let explained = fleet.explain(body).await.unwrap();
        panic!("{late}: {explained}; {}", fleet.status(number).await.unwrap());
    }
}

async fn finds_its_own_blocks_only(version: Version) {
    let adapters = vec![adapter("lora-a", "/srv/a"), adapter("lora-b", "/srv/b")];
    let engines = ["a", "b"].map(|name| EngineConfig { version, adapters: adapters.clone(), ..quick(name) });
    let fleet = Fleet::start(Setup { engines: engines.to_vec(), ..Setup::default() }).await.unwrap();
    for model in ["lora-b", "lora-a", "tiny"] {
        let body = of(model, &prompt(1));
        let before = fleet.sum(HITS).await.unwrap();
        let cold = fleet.ask(&body).await.unwrap();
        assert_eq!((cold.cached_tokens(), fleet.sum(HITS).await.unwrap()), (Some(0), before), "{model} of {version}");
        let owner = fleet.who(&cold).unwrap();
        known(&fleet, owner, &body).await;
        for _ in 0..2 {
            let warm = fleet.ask(&body).await.unwrap();
            assert_eq!((fleet.who(&warm), warm.cached_tokens()), (Some(owner), Some(96)), "{model} of {version}");
        }
        assert_eq!(fleet.sum(HITS).await.unwrap(), before + 2);
    }
    for number in 0..2 {
        let status = fleet.status(number).await.unwrap();
        assert_ne!(status["contract"], "mismatch", "{version}: {status}");
    }
    fleet.agree().await.unwrap();
}

#[tokio::test]
async fn hashed_by_its_number() {
    finds_its_own_blocks_only(Version::new(10, 2)).await;
}

#[tokio::test]
async fn hashed_by_its_name() {
    finds_its_own_blocks_only(Version::new(18, 0)).await;
}

#[tokio::test]
async fn hashed_by_its_name_and_path_with_a_tag() {
    finds_its_own_blocks_only(Version::new(32, 0)).await;
}

#[tokio::test]
async fn engines_that_have_one_adapter_at_different_places_both_hit() {
    let engine = |name, path| EngineConfig { adapters: vec![adapter("lora", path)], ..quick(name) };
    let engines = vec![engine("a", "/srv/first/lora"), engine("b", "/mnt/second")];
    let fleet = Fleet::start(Setup { engines, ..Setup::default() }).await.unwrap();
    for owner in [0, 1] {
        let body = of("lora", &prompt(u32::try_from(owner).unwrap()));
        let answer = fleet::Talker::new(fleet.engine_at(owner)).ask(&[], &body).await.unwrap();
        assert_eq!(answer.head.status, 200);
        known(&fleet, owner, &body).await;
        let warm = fleet.ask(&body).await.unwrap();
        assert_eq!((fleet.who(&warm), warm.cached_tokens()), (Some(owner), Some(96)));
    }
}

#[tokio::test]
async fn an_adapter_whose_place_is_not_told_is_a_counted_miss_and_never_a_wrong_hit() {
    // The simulated engine lists an empty place as none.
    let engine = |name| EngineConfig { adapters: vec![adapter("lora", "")], ..quick(name) };
    let rule = json!({"kvKeying": "parity"});
    let engines = vec![engine("a"), engine("b")];
    let fleet = Fleet::start(Setup { engines, rule, ..Setup::default() }).await.unwrap();
    let base = of("tiny", &prompt(1));
    let owner = fleet.who(&fleet.ask(&base).await.unwrap()).unwrap();
    known(&fleet, owner, &base).await;
    let before = (fleet.sum(HITS).await.unwrap(), fleet.sum(MISSES).await.unwrap());
    for _ in 0..3 {
        fleet.ask(&of("lora", &prompt(1))).await.unwrap();
    }
    assert_eq!((fleet.sum(HITS).await.unwrap(), fleet.sum(MISSES).await.unwrap()), (before.0, before.1 + 3));
}

#[tokio::test]
async fn the_header_that_tells_the_rule_makes_no_adapter_s_request_one_for_the_base_model() {
    let engine = |name| EngineConfig { adapters: vec![adapter("lora", "/srv/lora")], ..quick(name) };
    let fleet = Fleet::start(Setup { engines: vec![engine("a"), engine("b")], ..Setup::default() }).await.unwrap();
    let base = of("tiny", &prompt(1));
    let owner = fleet.who(&fleet.ask(&base).await.unwrap()).unwrap();
    known(&fleet, owner, &base).await;
    let other = of("lora", &prompt(2));
    let owner_of_other = fleet.who(&fleet.ask(&other).await.unwrap()).unwrap();
    known(&fleet, owner_of_other, &other).await;
    let before = fleet.sum(HITS).await.unwrap();
    let answer = fleet.ask_with(&[("X-Model", "tiny")], &of("lora", &prompt(1))).await.unwrap();
    assert_eq!((answer.cached_tokens(), fleet.sum(HITS).await.unwrap()), (Some(0), before));
    let own = fleet.ask_with(&[("X-Model", "lora")], &base).await.unwrap();
    assert_eq!((own.cached_tokens(), fleet.sum(HITS).await.unwrap()), (Some(96), before + 1));
}

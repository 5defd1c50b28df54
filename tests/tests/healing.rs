//! An engine that names its blocks otherwise than kvlb computes is served all the same: in `kvKeying: auto` kvlb names its blocks by
//! itself from then on, says so, and reaches the hit rate of a healthy engine.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fleet;

use std::time::Duration;

use kvlb_tests::engine::{Adapter, Algorithm, EngineConfig};
use kvlb_tests::harness::eventually;
use serde_json::{Value, json};
use tokio::time::Instant;

use fleet::{BLOCK, Dice, Fleet, SOON, Seeds, Setup, Talker, completion, quick, version};

/// From the verdict until an endpoint with a replay socket is whole again.
const HEALED: Duration = Duration::from_secs(2);

/// An engine under a seed of its own; none is unset.
fn seeded(name: &str, algorithm: Algorithm, seed: Option<&str>) -> EngineConfig {
    EngineConfig { prefix_caching_hash_algo: algorithm, python_hash_seed: seed.map(str::to_owned), ..quick(name) }
}

/// An engine whose seed is not kvlb's.
fn foreign(name: &str) -> EngineConfig {
    seeded(name, Algorithm::Sha256Cbor, Some("6502"))
}

async fn fleet(engines: Vec<EngineConfig>, rule: Value) -> Fleet {
    Fleet::start(Setup { engines, rule, seeds: Seeds::Own, ..Setup::default() }).await.unwrap()
}

/// `blocks` full blocks and half a one, like those of no other number.
fn prompt(number: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * 16 + 8).map(|at| number * 10_000 + at).collect()
}

fn rehash(status: &Value) -> bool {
    status["keying"] == "rehash"
}

/// Waits until a request's prompt is known as deep at an endpoint.
async fn known(fleet: &Fleet, number: usize, body: &Value, depth: u64) {
    let deep = async || fleet.depth(number, body).await.is_ok_and(|found| found == depth);
    eventually(SOON, &format!("{depth} blocks are known at {number}"), deep).await.unwrap();
}

// --- the hit rate ---

/// Groups of requests with a common beginning.
const GROUPS: u32 = 32;
const REQUESTS: usize = 2000;

/// What became of a workload's requests.
#[derive(Clone, Copy, Debug)]
struct Rate {
    /// The share of prompt tokens that the engines took from their caches, by their own word.
    cached: f64,
    /// The share of requests that went to announced blocks.
    hits: f64,
}

impl Rate {
    /// Within a point of another.
    fn reaches(self, healthy: Self) -> bool {
        self.cached >= healthy.cached - 0.01 && self.hits >= healthy.hits - 0.01
    }
}

/// Three engines that together hold all groups' beginnings and some answers, and none of which holds two thirds of them: at random a
/// request finds little, well placed nearly all. Expectations alone place it well too, since it is fast; hence the count of hits.
async fn rate(engine: EngineConfig, rule: Value) -> Rate {
    let unit = if engine.block_size == BLOCK { 1 } else { engine.block_size / BLOCK };
    let engines = ["a", "b", "c"].map(|name| EngineConfig {
        name: name.to_owned(),
        num_gpu_blocks: 400 / unit,
        ..engine.clone()
    });
    let mut rule = rule;
    rule["kvLoadFloor"] = json!(100_000);
    let fleet = fleet(engines.to_vec(), rule).await;
    let (mut client, mut dice) = (Talker::new(fleet.vip), Dice::new(5));
    let (mut cached, mut asked) = (0, 0);
    for number in 0..REQUESTS {
        let group = dice.below(GROUPS);
        let mut tokens: Vec<u32> = (0..24 * 16).map(|at| group * 1000 + at).collect();
        tokens.extend((0..40).map(|at| 1_000_000 + u32::try_from(number).unwrap() * 100 + at));
        let answer = client.ask(&[], &completion(&tokens, 1)).await.unwrap();
        assert_eq!(answer.head.status, 200, "{}", answer.body.text());
        cached += answer.cached_tokens().unwrap();
        asked += u64::try_from(tokens.len()).unwrap();
    }
    assert_eq!(fleet.sum("kvlb_panics_total").await.unwrap(), 0);
    let hits = fleet.metrics().await.unwrap().sum("loxilb_pd_kv_tier15_hits_total");
    #[expect(clippy::cast_precision_loss, reason = "a million tokens")]
    let rate = Rate { cached: cached as f64 / asked as f64, hits: hits / REQUESTS as f64 };
    rate
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_leg_is_broken_the_hit_rate_is_a_healthy_engine_s_within_a_point() {
    let healthy = rate(seeded("", Algorithm::Sha256Cbor, Some("0")), json!({})).await;
    assert!(healthy.cached > 0.8 && healthy.hits > 0.95, "a healthy fleet hits only {healthy:?}");
    let lost = rate(foreign(""), json!({"kvKeying": "parity"})).await;
    assert!(lost.hits < 0.01, "a broken contract is no obstacle: {lost:?} against {healthy:?}");
    let cases = [
        ("a random seed", seeded("", Algorithm::XxhashCbor, None), json!({"kvHashAlgo": "xxhash_cbor"})),
        ("a wrong seed", foreign(""), json!({})),
        ("a wrong algorithm", seeded("", Algorithm::XxhashCbor, Some("0")), json!({})),
        ("vLLM's own default", seeded("", Algorithm::Sha256, None), json!({})),
    ];
    for (what, engine, rule) in cases {
        let healed = rate(engine, rule).await;
        eprintln!("{what}: {healed:?}, healthy {healthy:?}");
        assert!(healed.reaches(healthy), "{what}: {healed:?} against {healthy:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_wrong_block_size_the_hit_rate_is_a_healthy_engine_s_within_a_point() {
    let engine = EngineConfig { block_size: 32, ..seeded("", Algorithm::Sha256Cbor, Some("0")) };
    let healthy = rate(engine.clone(), json!({"kvBlockSize": 32})).await;
    let healed = rate(engine, json!({})).await;
    eprintln!("a wrong block size: {healed:?}, healthy {healthy:?}");
    assert!(healthy.cached > 0.8 && healthy.hits > 0.95, "a healthy fleet hits only {healthy:?}");
    assert!(healed.reaches(healthy), "{healed:?} against {healthy:?}");
}

// --- how fast, and what is said ---

#[tokio::test]
async fn with_a_replay_socket_everything_is_known_again_within_two_seconds_of_the_verdict() {
    let fleet = fleet(vec![foreign("a")], json!({})).await;
    for number in 0..300 {
        fleet.warm(0, &prompt(number, 8)).await.unwrap();
    }
    let status = fleet.status_when(0, "the verdict", |status| status["contract"] == "mismatch").await.unwrap();
    let verdict = Instant::now();
    eventually(SOON, "every block is known", async || {
        fleet.status(0).await.is_ok_and(|status| rehash(&status) && status["blocks"] == fleet.dump(0).len())
    })
    .await
    .unwrap();
    assert!(verdict.elapsed() <= HEALED, "healed after {:?}; at the verdict: {status}", verdict.elapsed());
    for number in 0..300 {
        assert_eq!(fleet.depth(0, &completion(&prompt(number, 8), 1)).await.unwrap(), 8, "prompt {number}");
    }
    fleet.agree().await.unwrap();
}

#[tokio::test]
async fn without_a_replay_socket_each_prefix_is_known_again_with_its_next_announcement() {
    let engines = ["a", "b"].map(|name| EngineConfig { no_replay: true, ..foreign(name) });
    let fleet = fleet(engines.to_vec(), json!({})).await;
    for number in 0..2 {
        fleet.warm(number, &prompt(99, 2)).await.unwrap();
        fleet.status_when(number, "healing", rehash).await.unwrap();
    }
    for number in 0..16 {
        let body = completion(&prompt(number, 8), 1);
        let cold = fleet.who(&fleet.ask(&body).await.unwrap()).unwrap();
        known(&fleet, cold, &body, 8).await;
        let before = fleet.sum("loxilb_pd_kv_tier15_hits_total").await.unwrap();
        let warm = fleet.ask(&body).await.unwrap();
        assert_eq!(fleet.who(&warm), Some(cold), "prompt {number}");
        assert_eq!(warm.cached_tokens(), Some(8 * 16));
        assert_eq!(fleet.sum("loxilb_pd_kv_tier15_hits_total").await.unwrap(), before + 1);
    }
}

#[tokio::test]
async fn healing_shows_in_the_status_the_log_and_the_metrics_once() {
    let fleet = fleet(vec![foreign("broken"), seeded("good", Algorithm::Sha256Cbor, Some("0"))], json!({})).await;
    for number in 0..40 {
        fleet.warm(0, &prompt(number, 4)).await.unwrap();
        fleet.warm(1, &prompt(number, 4)).await.unwrap();
    }
    let status = fleet.status_when(0, "the leg", |status| status["leg"] == "seed" && rehash(status)).await.unwrap();
    assert_eq!(status["contract"], "mismatch", "{status}");
    let good = fleet.status_when(1, "proof", |status| status["contract"] == "verified").await.unwrap();
    assert_eq!((&good["keying"], &good["leg"]), (&json!("parity"), &Value::Null), "{good}");
    let metrics = fleet.metrics().await.unwrap();
    let keying = |ep_idx: usize, keying: &str| {
        metrics.value(&format!("kvlb_keying{{ep_idx=\"{ep_idx}\",keying=\"{keying}\",service=\"{}\"}}", fleet.id()))
    };
    let shown = [(0, "rehash"), (0, "parity"), (1, "rehash"), (1, "parity")].map(|(at, word)| keying(at, word) > 0.5);
    assert_eq!(shown, [true, false, false, true], "{:?}", metrics.family("kvlb_keying").collect::<Vec<_>>());
    let log = fleet.kvlb.log();
    let told: Vec<_> = log.lines().filter(|line| line.contains("WARN") && line.contains("rehash")).collect();
    assert_eq!(told.len(), 1, "{told:?}");
    let place = fleet.engine_at(0).ip().to_string();
    assert!(told[0].contains(&place) && told[0].contains("seed"), "{}", told[0]);
}

#[tokio::test]
async fn a_good_and_a_broken_endpoint_of_one_rule_are_both_found() {
    let fleet = fleet(vec![seeded("good", Algorithm::Sha256Cbor, Some("0")), foreign("broken")], json!({})).await;
    for number in 0..2 {
        fleet.warm(number, &prompt(90, 2)).await.unwrap();
    }
    fleet.status_when(1, "healing", rehash).await.unwrap();
    for owner in [0, 1, 1, 0] {
        let number = u32::try_from(owner).unwrap();
        fleet.warm(owner, &prompt(number, 6)).await.unwrap();
        let body = completion(&prompt(number, 6), 1);
        known(&fleet, owner, &body, 6).await;
        assert_eq!(fleet.who(&fleet.ask(&body).await.unwrap()), Some(owner));
        let explained = fleet.explain(&body).await.unwrap();
        let keyings = ["parity", "rehash"].map(Value::from);
        assert_eq!([0, 1].map(|at| explained["candidates"][at]["keying"].clone()), keyings, "{explained}");
    }
}

#[tokio::test]
async fn an_endpoint_that_may_not_be_healed_stays_broken_and_says_so() {
    let fleet = fleet(vec![foreign("a"), foreign("b")], json!({"kvKeying": "parity"})).await;
    let body = completion(&prompt(1, 6), 1);
    for number in 0..2 {
        fleet.warm(number, &prompt(1, 6)).await.unwrap();
    }
    for number in 0..2 {
        let status = fleet.status_when(number, "the leg", |status| status["leg"] == "seed").await.unwrap();
        assert_eq!((&status["contract"], &status["keying"]), (&json!("mismatch"), &json!("parity")), "{status}");
    }
    for _ in 0..4 {
        fleet.ask(&body).await.unwrap();
    }
    // What was just sent is expected where it was sent; nothing is known.
    assert_eq!(fleet.sum("loxilb_pd_kv_tier15_hits_total").await.unwrap(), 0);
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_miss_reason_total{reason=\"no_worker\"}").await.unwrap(), 4);
    assert_eq!(fleet.cli(&["get", "kvstatus"], "").unwrap().0, Some(6));
}

#[tokio::test]
async fn from_the_start_every_algorithm_and_every_form_of_event_is_served() {
    let algorithms = [Algorithm::Sha256Cbor, Algorithm::XxhashCbor, Algorithm::Sha256, Algorithm::Xxhash];
    for (algorithm, minor, byte_hashes) in
        algorithms.into_iter().zip([32, 23, 25, 31]).zip([false, true, false, true]).map(|((a, b), c)| (a, b, c))
    {
        let engine = |name| EngineConfig {
            version: version(minor),
            byte_hashes,
            // No seed anybody could guess.
            ..seeded(name, algorithm, (algorithm == Algorithm::Sha256).then_some("77"))
        };
        let fleet = fleet(vec![engine("a"), engine("b")], json!({"kvKeying": "rehash"})).await;
        for owner in [1, 0] {
            let tokens = prompt(u32::try_from(owner).unwrap(), 6);
            fleet.warm(owner, &tokens).await.unwrap();
            known(&fleet, owner, &completion(&tokens, 1), 6).await;
            let answer = fleet.ask(&completion(&tokens, 1)).await.unwrap();
            assert_eq!((fleet.who(&answer), answer.cached_tokens()), (Some(owner), Some(96)), "{algorithm:?}");
            assert!(rehash(&fleet.status(owner).await.unwrap()));
        }
        fleet.agree().await.unwrap();
    }
}

/// vLLM with events switched on and nothing else: pickle, no seed, no replay socket; and a rule that says nothing of names.
#[tokio::test]
async fn an_engine_without_flags_is_served_by_a_rule_of_defaults() {
    for minor in [32, 28] {
        let engine =
            |name| EngineConfig { version: version(minor), no_replay: true, ..seeded(name, Algorithm::Sha256, None) };
        let rule = json!({"kvHashAlgo": null, "kvBlockSize": null});
        let setup = Setup { engines: vec![engine("a"), engine("b")], rule, seeds: Seeds::Unset, ..Setup::default() };
        let fleet = Fleet::start(setup).await.unwrap();
        for number in 0..2 {
            // The first event may be what shows how the engine names; its block need not be known after that.
            fleet.warm(number, &prompt(90, 2)).await.unwrap();
        }
        for number in 0..2 {
            let judged = |status: &Value| status["contract"] != "unverified" && status["contract"] != "unknown";
            fleet.status_when(number, "a verdict", judged).await.unwrap();
        }
        for owner in [1, 0] {
            let tokens = prompt(u32::try_from(owner).unwrap(), 6);
            fleet.warm(owner, &tokens).await.unwrap();
            known(&fleet, owner, &completion(&tokens, 1), 6).await;
            let answer = fleet.ask(&completion(&tokens, 1)).await.unwrap();
            assert_eq!((fleet.who(&answer), answer.cached_tokens()), (Some(owner), Some(96)), "0.{minor}");
        }
    }
}

// --- what cannot be named, and what must go ---

#[tokio::test]
async fn a_block_whose_parent_is_unknown_is_counted_and_never_believed() {
    let engines = vec![foreign("a")];
    let rule = json!({"kvKeying": "rehash"});
    let env = vec![("LLB_KV_REPLAY_PORT_OFFSET", "0")];
    let setup = Setup { engines, rule, env, seeds: Seeds::Own, ..Setup::default() };
    let mut fleet = Fleet::start(setup).await.unwrap();
    fleet.warm(0, &prompt(1, 4)).await.unwrap();
    fleet.restart_kvlb().await.unwrap();
    // Only what is new is announced, after a parent from before.
    let longer = prompt(1, 4)[..64].iter().copied().chain(500_000..500_040).collect::<Vec<_>>();
    fleet.warm(0, &longer).await.unwrap();
    let orphans = fleet.status_when(0, "an orphan", |status| status["orphans"].as_u64() > Some(0)).await.unwrap();
    assert_eq!(orphans["orphans"], 2, "{orphans}");
    assert_eq!(fleet.sum("kvlb_rehash_orphans_total").await.unwrap(), 2);
    assert_eq!(fleet.depth(0, &completion(&longer, 1)).await.unwrap(), 0);
    // The same tokens at the start of a prompt are another block.
    let tail: Vec<u32> = (500_000..500_040).collect();
    assert_eq!(fleet.depth(0, &completion(&tail, 1)).await.unwrap(), 0);
    fleet.warm(0, &prompt(2, 4)).await.unwrap();
    known(&fleet, 0, &completion(&prompt(2, 4), 1), 4).await;
}

#[tokio::test]
async fn an_engine_that_comes_back_with_a_good_contract_is_named_in_parity_again() {
    let mut fleet = fleet(vec![foreign("a")], json!({})).await;
    fleet.warm(0, &prompt(1, 4)).await.unwrap();
    fleet.status_when(0, "healing", |status| rehash(status) && status["blocks"] == 4).await.unwrap();
    is_replaced_by_a_good_one(&mut fleet).await;
}

#[tokio::test]
async fn an_engine_that_goes_before_it_told_its_story_again_is_in_another_life_after_it() {
    let mut fleet = fleet(vec![foreign("a")], json!({})).await;
    fleet.status_when(0, "the first replay", |status| status["replay"] == "applied").await.unwrap();
    fleet.engines[0].faults().set(|plan| plan.stall_replay = true);
    fleet.warm(0, &prompt(1, 4)).await.unwrap();
    fleet.status_when(0, "healing", rehash).await.unwrap();
    is_replaced_by_a_good_one(&mut fleet).await;
}

async fn is_replaced_by_a_good_one(fleet: &mut Fleet) {
    fleet.replace(0, seeded("a", Algorithm::Sha256Cbor, Some("0"))).await.unwrap();
    fleet.connected(0, true).await.unwrap();
    fleet.warm(0, &prompt(2, 4)).await.unwrap();
    let status = fleet.status_when(0, "parity", |status| status["contract"] == "verified").await.unwrap();
    assert_eq!((&status["keying"], &status["leg"]), (&json!("parity"), &Value::Null), "{status}");
    known(fleet, 0, &completion(&prompt(2, 4), 1), 4).await;
    assert_eq!(fleet.depth(0, &completion(&prompt(1, 4), 1)).await.unwrap(), 0, "a block of the life before");
    fleet.agree().await.unwrap();
}

#[tokio::test]
async fn salts_and_adapters_are_kept_apart() {
    let adapter = |name: &str| Adapter { name: name.to_owned(), path: format!("/srv/{name}") };
    let engine = EngineConfig { adapters: vec![adapter("lora-a"), adapter("lora-b")], ..foreign("a") };
    let fleet = fleet(vec![engine], json!({"kvKeying": "rehash"})).await;
    let tokens = prompt(1, 6);
    let with = |model: &str, salt: &str| {
        let mut body = completion(&tokens, 1);
        body["model"] = json!(model);
        body["cache_salt"] = json!(salt);
        body
    };
    let kinds = [("tiny", ""), ("tiny", "x"), ("tiny", "y"), ("lora-a", ""), ("lora-b", ""), ("lora-a", "x")];
    let bodies = kinds.map(|(model, salt)| with(model, salt));
    for (number, body) in bodies.iter().enumerate() {
        assert_eq!(fleet.depth(0, body).await.unwrap(), 0, "{body}");
        assert_eq!(fleet.ask(body).await.unwrap().cached_tokens(), Some(0));
        known(&fleet, 0, body, 6).await;
        let before = fleet.sum("loxilb_pd_kv_tier15_hits_total").await.unwrap();
        assert_eq!(before, u64::try_from(number).unwrap());
        assert_eq!(fleet.ask(body).await.unwrap().cached_tokens(), Some(96));
        assert_eq!(fleet.sum("loxilb_pd_kv_tier15_hits_total").await.unwrap(), before + 1);
    }
    fleet.agree().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evictions_and_copies_are_followed_block_for_block() {
    let engine = |name| EngineConfig {
        num_gpu_blocks: 160,
        byte_hashes: name == "b",
        ..seeded(name, Algorithm::XxhashCbor, None)
    };
    let fleet = fleet(vec![engine("a"), engine("b")], json!({"kvHashAlgo": "xxhash_cbor"})).await;
    for number in 0..2 {
        fleet.warm(number, &prompt(50, 4)).await.unwrap();
        fleet.status_when(number, "healing", rehash).await.unwrap();
    }
    let (mut client, mut dice) = (Talker::new(fleet.vip), Dice::new(3));
    for _ in 0..1500 {
        let (family, shared) = (dice.below(12), 16 * dice.below(8));
        let length = if dice.once_in(3) { 16 * (1 + dice.below(9)) } else { 1 + dice.below(160) };
        let own = dice.below(5) * 100_000;
        let tokens: Vec<u32> = (0..length).map(|at| family * 1000 + at + if at < shared { 0 } else { own }).collect();
        let body = completion(&tokens, 1 + usize::try_from(dice.below(20)).unwrap());
        assert_eq!(client.ask(&[], &body).await.unwrap().head.status, 200);
    }
    fleet.agree().await.unwrap();
    for number in 0..2 {
        assert!(fleet.stream(number, "removed").await.unwrap() > 200, "the pools are too large to prove anything");
        assert!(rehash(&fleet.status(number).await.unwrap()));
    }
}

//! The inventory is the truth: whatever happens, it is soon what the engine holds, and the choice follows it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fleet;

use std::collections::BTreeSet;

use kvlb_tests::engine::{Algorithm, Engine, EngineConfig, Event, Stored};
use kvlb_tests::harness::{eventually, until_some};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::sleep;

use fleet::{BLOCK, Dice, Fleet, PROMISED, SOON, Setup, Singles, Talker, completion, names, naming, quick, version};

/// The widest gap that keeps an inventory where nothing can be replayed, from the document.
const WINDOW: usize = 64;

/// How an endpoint's replays are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replay {
    /// The engine has a replay socket.
    Served,
    /// It has none, as vLLM unless told.
    Missing,
    /// kvlb is told not to ask.
    Off,
}

/// A fleet of one engine that never has to evict.
async fn alone(replay: Replay) -> Fleet {
    let engine = EngineConfig { no_replay: replay == Replay::Missing, ..quick("alone") };
    let env = if replay == Replay::Off { vec![("LLB_KV_REPLAY_PORT_OFFSET", "0")] } else { Vec::new() };
    Fleet::start(Setup { engines: vec![engine], env, ..Setup::default() }).await.unwrap()
}

/// Small pools: a few prompts fill them. Connections stay, however long a client of a busy machine takes between two requests.
fn small(name: &str) -> EngineConfig {
    EngineConfig { num_gpu_blocks: 160, keep_alive_ms: 600_000, ..quick(name) }
}

/// A prompt of one of a dozen families, which share their beginnings; every third one ends with a full block.
fn random_prompt(dice: &mut Dice) -> Vec<u32> {
    let (family, variant) = (dice.below(12), dice.below(5) + 1);
    let (length, shared) = (1 + dice.below(160), 16 * dice.below(8));
    let length = if dice.once_in(3) { (length / 16).max(1) * 16 } else { length };
    let token = |at: u32| family * 1000 + at + if at < shared { 0 } else { variant * 100_000 };
    (0..length).map(token).collect()
}

/// Sends `count` random requests over `clients` connections at a time, half of them through kvlb and half to engines.
async fn storm(fleet: &Fleet, clients: u64, count: usize) {
    let targets: Vec<_> = (0..fleet.engines.len()).map(|number| fleet.engine_at(number)).collect();
    let mut storm = JoinSet::new();
    for client in 0..clients {
        let (vip, targets) = (fleet.vip, targets.clone());
        let share = count / usize::try_from(clients).unwrap();
        storm.spawn(async move {
            let mut dice = Dice::new(client + 1);
            let mut through_kvlb = Talker::new(vip);
            let mut direct: Vec<_> = targets.into_iter().map(Talker::new).collect();
            for _ in 0..share {
                let body = completion(&random_prompt(&mut dice), 1 + usize::try_from(dice.below(20)).unwrap());
                let which = usize::try_from(dice.below(u32::try_from(2 * direct.len()).unwrap())).unwrap();
                let talker = direct.get_mut(which).unwrap_or(&mut through_kvlb);
                let answer = talker.ask(&[], &body).await.unwrap();
                assert_eq!(answer.head.status, 200, "{}", answer.body.text());
            }
        });
    }
    while let Some(done) = storm.join_next().await {
        done.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_ten_thousand_random_requests_inventories_agree_and_choices_follow_them() {
    let engines = ["a", "b", "c"].map(small).to_vec();
    let fleet = Fleet::start(Setup { engines, ..Setup::default() }).await.unwrap();
    storm(&fleet, 16, 10_000).await;
    fleet.agree().await.unwrap();
    for number in 0..3 {
        for what in ["gaps", "missed", "dropped", "undecodable", "unknown", "unknown_removals", "restarts"] {
            assert!(fleet.stream(number, what).await.unwrap() == 0, "{what} at {number}");
        }
        assert!(fleet.stream(number, "removed").await.unwrap() > 3000, "the pools are too large to prove anything");
        assert_eq!(fleet.status(number).await.unwrap()["leg"], Value::Null);
    }
    assert_eq!(fleet.sum("kvlb_errors_total").await.unwrap(), 0);
    every_depth_is_the_leading_run_that_the_engine_can_use(&fleet).await;
    choices_go_to_the_deepest_run(&fleet).await;
}

async fn every_depth_is_the_leading_run_that_the_engine_can_use(fleet: &Fleet) {
    let (mut dice, naming) = (Dice::new(77), naming());
    let mut deep = 0;
    for _ in 0..300 {
        let prompt = random_prompt(&mut dice);
        let explained = fleet.explain(&completion(&prompt, 1)).await.unwrap();
        let names = names(&naming, &prompt);
        for number in 0..fleet.engines.len() {
            let dump = fleet.dump(number);
            let run = names.iter().take_while(|name| dump.contains(*name)).count();
            let count = names.iter().filter(|name| dump.contains(*name)).count();
            let candidate = &explained["candidates"][number];
            assert_eq!((&candidate["depth"], &candidate["count"]), (&json!(run), &json!(count)), "{prompt:?}");
            deep += usize::from(run > 2);
        }
    }
    assert!(deep > 50, "only {deep} runs were worth comparing");
}

async fn choices_go_to_the_deepest_run(fleet: &Fleet) {
    let (mut dice, naming) = (Dice::new(78), naming());
    let mut client = Talker::new(fleet.vip);
    let mut hits = 0;
    for _ in 0..100 {
        let prompt = random_prompt(&mut dice);
        let names = names(&naming, &prompt);
        fleet.agree().await.unwrap();
        let runs: Vec<usize> = (0..fleet.engines.len())
            .map(|number| names.iter().take_while(|name| fleet.dump(number).contains(*name)).count())
            .collect();
        let answer = client.ask(&[], &completion(&prompt, 1)).await.unwrap();
        let chosen = fleet.who(&answer).unwrap();
        let deepest = runs.iter().max().unwrap();
        if *deepest > 0 {
            assert_eq!((runs[chosen], answer.head.header("x-kvlb-tier")), (*deepest, Some("1.5")), "{runs:?}");
            hits += 1;
        }
        // The engine computes the last token in any case.
        let usable = runs[chosen].min((prompt.len() - 1) / BLOCK) * BLOCK;
        assert_eq!(answer.cached_tokens(), Some(u64::try_from(usable).unwrap()));
    }
    assert!(hits > 30, "only {hits} hits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wire_form_is_mirrored() {
    let array = |name, minor, byte_hashes| EngineConfig { version: version(minor), byte_hashes, ..small(name) };
    for (word, algorithm) in [("sha256_cbor", Algorithm::Sha256Cbor), ("xxhash_cbor", Algorithm::XxhashCbor)] {
        let mut engines = vec![
            array("maps", 32, false),
            array("maps-bytes", 33, true),
            array("arrays", 23, false),
            array("arrays-bytes", 20, true),
        ];
        for engine in &mut engines {
            engine.prefix_caching_hash_algo = algorithm;
        }
        let rule = json!({"kvHashAlgo": word});
        let fleet = Fleet::start(Setup { engines, rule, ..Setup::default() }).await.unwrap();
        storm(&fleet, 8, 1200).await;
        fleet.agree().await.unwrap();
        for number in 0..4 {
            let status = fleet.status(number).await.unwrap();
            let contract = status["contract"].as_str().unwrap();
            assert!(["verified", "proved_by_request"].contains(&contract), "{number}: {status}");
            assert!(fleet.stream(number, "undecodable").await.unwrap() == 0, "{status}");
            assert!(fleet.stream(number, "removed").await.unwrap() > 50, "{status}");
        }
    }
}

#[tokio::test]
async fn a_lost_batch_is_replayed() {
    let (fleet, mut singles) = (alone(Replay::Served).await, Singles::default());
    singles.send(&fleet, 0, 5).await.unwrap();
    for (number, lost) in [(1, 1), (2, WINDOW + 1)] {
        fleet.engines[0].faults().set(|plan| plan.lose_batches = (1..=u64::try_from(lost).unwrap()).collect());
        singles.send(&fleet, 0, lost + 1).await.unwrap();
        fleet.agree().await.unwrap();
        assert_eq!(fleet.engines[0].published().lost, u64::try_from(if number == 1 { 1 } else { lost + 1 }).unwrap());
        assert_eq!(fleet.status(0).await.unwrap()["gaps"], json!(number));
    }
    for (what, count) in [("missed", 0), ("restarts", 0), ("gaps", 2), ("replays", 3)] {
        assert!(fleet.stream(0, what).await.unwrap() == count, "{what}");
    }
}

/// As the document says: a narrow gap keeps what was known, a wide one does not.
async fn a_lost_batch_stays_lost(replay: Replay) {
    let (fleet, mut singles) = (alone(replay).await, Singles::default());
    let mut expected = singles.send(&fleet, 0, 5).await.unwrap();
    fleet.holds(0, &expected).await.unwrap();
    let mut missed = 0;
    for (gaps, lost, keeps) in [(1, 1, true), (2, WINDOW, true), (3, WINDOW + 1, false)] {
        fleet.engines[0].faults().set(|plan| plan.lose_batches = (1..=u64::try_from(lost).unwrap()).collect());
        singles.send(&fleet, 0, lost).await.unwrap();
        let heard = singles.send(&fleet, 0, 2).await.unwrap();
        if !keeps {
            expected.clear();
        }
        expected.extend(heard);
        fleet.holds(0, &expected).await.unwrap();
        missed += lost;
        assert_eq!(fleet.status(0).await.unwrap()["gaps"], json!(gaps));
        let counted = fleet.stream(0, "missed").await.unwrap();
        assert_eq!(counted, u64::try_from(missed).unwrap());
    }
    assert_eq!(fleet.status(0).await.unwrap()["restarts"], json!(0));
}

#[tokio::test]
async fn without_a_replay_socket_a_narrow_gap_keeps_and_a_wide_one_clears() {
    a_lost_batch_stays_lost(Replay::Missing).await;
}

#[tokio::test]
async fn with_replay_off_a_narrow_gap_keeps_and_a_wide_one_clears() {
    a_lost_batch_stays_lost(Replay::Off).await;
}

/// A restart on the same ports: the old blocks go by themselves, and the new life is followed.
async fn a_restart(replay: Replay) {
    let (mut fleet, mut singles) = (alone(replay).await, Singles::default());
    let old = singles.send(&fleet, 0, 20).await.unwrap();
    fleet.holds(0, &old).await.unwrap();
    fleet.engines[0].restart().await.unwrap();
    fleet.agree().await.unwrap();
    fleet.connected(0, true).await.unwrap();
    // With nobody holding anything the selector answers, and the block of this first batch is a hit at once.
    let prompt = singles.prompt();
    let mut client = Talker::new(fleet.vip);
    let cold = client.ask(&[], &completion(&prompt, 1)).await.unwrap();
    assert_eq!(cold.head.header("x-kvlb-reason"), Some("no_worker"), "{:?}", cold.head);
    fleet.agree().await.unwrap();
    let warm = client.ask(&[], &completion(&prompt, 1)).await.unwrap();
    assert_eq!((warm.head.header("x-kvlb-tier"), warm.head.header("x-kvlb-depth")), (Some("1.5"), Some("1")));
    let status = fleet.status(0).await.unwrap();
    assert_eq!((&status["restarts"], &status["gaps"]), (&json!(1), &json!(0)), "{status}");
}

#[tokio::test]
async fn a_restart_is_followed() {
    a_restart(Replay::Served).await;
}

#[tokio::test]
async fn a_restart_is_followed_without_a_replay_socket() {
    a_restart(Replay::Missing).await;
}

#[tokio::test]
async fn a_restart_is_followed_with_replay_off() {
    a_restart(Replay::Off).await;
}

#[tokio::test]
async fn with_the_first_batch_after_a_restart_the_old_blocks_are_gone() {
    for sent in [1, 40] {
        let (mut fleet, mut singles) = (alone(Replay::Served).await, Singles::default());
        let old = singles.send(&fleet, 0, 20).await.unwrap();
        fleet.holds(0, &old).await.unwrap();
        fleet.engines[0].restart().await.unwrap();
        // Before kvlb is back: the new life's numbers end below the old one's, or above.
        let new = singles.send(&fleet, 0, sent).await.unwrap();
        let first = until_some(PROMISED, "a block of the new life", async || {
            let held = fleet.inventory(0).await.ok()?;
            held.intersection(&new).next().is_some().then_some(held)
        });
        let first = first.await.unwrap();
        assert!(first.is_disjoint(&old), "blocks of both lives at once");
        fleet.holds(0, &new).await.unwrap();
    }
}

/// The engine restarts while nobody can reach its events, and gets to number `sent` before anybody can.
async fn a_restart_behind_a_partition(replay: Replay, sent: usize) {
    let (mut fleet, mut singles) = (alone(replay).await, Singles::default());
    let old = singles.send(&fleet, 0, 20).await.unwrap();
    fleet.holds(0, &old).await.unwrap();
    partition(&fleet.engines[0], true);
    fleet.connected(0, false).await.unwrap();
    fleet.engines[0].restart().await.unwrap();
    let unheard = singles.send(&fleet, 0, sent).await.unwrap();
    // Long enough for the pauses between attempts to connect to be the longest.
    sleep(2 * PROMISED).await;
    assert_eq!(fleet.status(0).await.unwrap()["connected"], json!(false));
    partition(&fleet.engines[0], false);
    if replay == Replay::Served {
        fleet.holds(0, &unheard).await.unwrap();
    } else {
        // Nobody can tell what the new life did so far; that it is one, can be told.
        fleet.holds(0, &BTreeSet::new()).await.unwrap();
    }
    fleet.connected(0, true).await.unwrap();
    let heard = singles.send(&fleet, 0, 3).await.unwrap();
    if replay == Replay::Served {
        fleet.agree().await.unwrap();
    } else {
        fleet.holds(0, &heard).await.unwrap();
    }
    let status = fleet.status(0).await.unwrap();
    let word = match replay {
        Replay::Served => "applied",
        Replay::Missing => "unavailable",
        Replay::Off => "off",
    };
    assert_eq!((&status["restarts"], &status["replay"]), (&json!(1), &json!(word)), "{status}");
    for (what, count) in [("restarts", 1), ("missed", 0)] {
        assert!(fleet.stream(0, what).await.unwrap() == count, "{what}: {status}");
    }
}

fn partition(engine: &Engine, cut: bool) {
    engine.faults().set(|plan| (plan.refuse_events, plan.refuse_replay) = (cut, cut));
    if cut {
        engine.faults().disconnect_events();
    }
}

#[tokio::test]
async fn a_restart_behind_a_partition_to_a_higher_number() {
    a_restart_behind_a_partition(Replay::Served, 40).await;
}

#[tokio::test]
async fn a_restart_behind_a_partition_to_a_lower_number() {
    a_restart_behind_a_partition(Replay::Served, 5).await;
}

#[tokio::test]
async fn a_restart_behind_a_partition_to_the_same_number() {
    a_restart_behind_a_partition(Replay::Served, 20).await;
}

#[tokio::test]
async fn a_restart_behind_a_partition_without_a_replay_socket() {
    a_restart_behind_a_partition(Replay::Missing, 40).await;
}

#[tokio::test]
async fn a_restart_behind_a_partition_with_replay_off_to_a_higher_number() {
    a_restart_behind_a_partition(Replay::Off, 40).await;
}

#[tokio::test]
async fn a_restart_behind_a_partition_with_replay_off_to_a_lower_number() {
    a_restart_behind_a_partition(Replay::Off, 5).await;
}

#[tokio::test]
async fn a_partition_alone_loses_nothing_where_there_is_replay() {
    let (fleet, mut singles) = (alone(Replay::Served).await, Singles::default());
    singles.send(&fleet, 0, 20).await.unwrap();
    partition(&fleet.engines[0], true);
    fleet.connected(0, false).await.unwrap();
    singles.send(&fleet, 0, WINDOW + 10).await.unwrap();
    partition(&fleet.engines[0], false);
    fleet.agree().await.unwrap();
    assert_eq!(fleet.status(0).await.unwrap()["restarts"], json!(0));
    assert!(fleet.stream(0, "missed").await.unwrap() == 0);
}

#[tokio::test]
async fn without_replay_a_restart_that_is_proved_late_still_clears() {
    let (mut fleet, mut singles) = (alone(Replay::Off).await, Singles::default());
    let old = singles.send(&fleet, 0, 20).await.unwrap();
    fleet.holds(0, &old).await.unwrap();
    // The event socket is back before any attempt to connect, the web server much later: only its metrics tell.
    fleet.engines[0].faults().set(|plan| plan.refuse_http = true);
    fleet.engines[0].restart().await.unwrap();
    eventually(SOON, "kvlb reconnects", async || {
        fleet.sum("loxilb_kv_subscriber_reconnect_total").await.is_ok_and(|count| count == 1)
    })
    .await
    .unwrap();
    // Longer than kvlb waits for the engine to say who it is.
    sleep(3 * PROMISED).await;
    fleet.engines[0].faults().clear();
    eventually(5 * PROMISED, "the old blocks go", async || fleet.inventory(0).await.is_ok_and(|held| held.is_empty()))
        .await
        .unwrap();
    let heard = singles.send(&fleet, 0, 3).await.unwrap();
    fleet.holds(0, &heard).await.unwrap();
    assert_eq!(fleet.status(0).await.unwrap()["restarts"], json!(1));
}

/// vLLM publishes before its web server answers; what it says there of its sockets comes when much has been heard.
#[tokio::test]
async fn an_engine_that_says_late_what_sockets_it_has_loses_nothing_that_was_heard() {
    for (replay, word) in [(Replay::Missing, "unavailable"), (Replay::Served, "applied")] {
        let (mut fleet, mut singles) = (alone(replay).await, Singles::default());
        let engine = &fleet.engines[0];
        engine.faults().set(|plan| plan.keep_alive_ms = Some(600_000));
        let mut inside = Talker::new(fleet.engine_at(0));
        let before = inside.ask(&[], &completion(&singles.prompt(), 1)).await.unwrap();
        assert_eq!(before.head.status, 200);
        engine.faults().set(|plan| plan.refuse_http = true);
        fleet.restart_kvlb().await.unwrap();
        let naming = naming();
        let mut told = BTreeSet::new();
        for _ in 0..20 {
            let prompt = singles.prompt();
            let answer = inside.ask(&[], &completion(&prompt, 1)).await.unwrap();
            assert_eq!(answer.head.status, 200, "{}", answer.body.text());
            told.extend(names(&naming, &prompt));
        }
        let held = || async { fleet.inventory(0).await.is_ok_and(|held| held.is_superset(&told)) };
        eventually(SOON, "what was told is known", held).await.unwrap();
        let asked = || fleet.engines[0].requests().iter().filter(|seen| seen.path == "/kv_event_sources").count();
        let before = asked();
        fleet.engines[0].faults().set(|plan| plan.refuse_http = false);
        eventually(SOON, "the engine says what sockets it has", async || asked() > before).await.unwrap();
        // Whoever starts over has nothing for a while, and where nothing is replayed for ever.
        for _ in 0..20 {
            assert!(held().await, "{:?}", fleet.status(0).await);
            sleep(PROMISED / 20).await;
        }
        let status = fleet.status(0).await.unwrap();
        assert_eq!((&status["replay"], &status["restarts"]), (&json!(word), &json!(0)), "{status}");
    }
}

#[tokio::test]
async fn a_cache_reset_shows_with_the_next_request() {
    let (fleet, mut singles) = (alone(Replay::Served).await, Singles::default());
    let old = singles.send(&fleet, 0, 20).await.unwrap();
    fleet.holds(0, &old).await.unwrap();
    let url = fleet.engine_at(0);
    let reset = kvlb_tests::harness::http::exchange(url, "POST", "/reset_prefix_cache", &[], b"").await.unwrap();
    assert_eq!((reset.head.status, fleet.dump(0).len()), (200, 0));
    // vLLM tells of it with its next step only.
    let new = singles.send(&fleet, 0, 1).await.unwrap();
    fleet.holds(0, &new).await.unwrap();
    let status = fleet.status(0).await.unwrap();
    assert_eq!((&status["restarts"], &status["gaps"]), (&json!(0), &json!(0)));
}

#[tokio::test]
async fn a_burst_is_taken_although_kvlb_stood_still() {
    let (fleet, mut singles) = (alone(Replay::Served).await, Singles::default());
    let mut expected = singles.send(&fleet, 0, 3).await.unwrap();
    fleet.holds(0, &expected).await.unwrap();
    let naming = naming();
    fleet.kvlb.signal(Signal::SIGSTOP).unwrap();
    for number in 0..5000_u32 {
        let tokens = vec![1_000_000 + number; BLOCK];
        let digest = naming.block(None, &tokens, &[]);
        expected.insert(digest.name());
        let stored =
            Stored { hashes: vec![digest], tokens, block_size: BLOCK, medium: "GPU".into(), ..Stored::default() };
        fleet.engines[0].publish(&[Event::Stored(stored)]);
    }
    sleep(PROMISED).await;
    fleet.kvlb.signal(Signal::SIGCONT).unwrap();
    fleet.holds(0, &expected).await.unwrap();
    assert!(fleet.stream(0, "missed").await.unwrap() == 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kvlb_that_starts_before_warm_engines_knows_them() {
    let engines = ["a", "b", "c"].map(small).to_vec();
    let mut fleet = Fleet::start(Setup { engines, ..Setup::default() }).await.unwrap();
    storm(&fleet, 8, 800).await;
    fleet.restart_kvlb().await.unwrap();
    fleet.agree().await.unwrap();
    for number in 0..3 {
        assert_eq!(fleet.status(number).await.unwrap()["replay"], json!("applied"));
    }
}

//! Data-parallel ranks are caches of their own behind one address: each is heard, the one that holds a prompt is named to the engine,
//! and each forgets by itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use kvlb_tests::engine::{EngineConfig, Seen};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::Answer;
use serde_json::{Value, json};

use fleet::{Fleet, PATH, SOON, Setup, Talker, completion, quick};

const HEADER: &str = "X-data-parallel-rank";
const HITS: &str = "loxilb_pd_kv_tier15_hits_total";

fn two_ranks(name: &str) -> EngineConfig {
    EngineConfig { data_parallel_size: 2, ..quick(name) }
}

fn prompt(number: u32) -> Value {
    completion(&(0..100).map(|at| number * 10_000 + at).collect::<Vec<_>>(), 1)
}

async fn fleet(engines: Vec<EngineConfig>, rule: Value) -> Fleet {
    let fleet = Fleet::start(Setup { engines, rule, ..Setup::default() }).await.unwrap();
    for (number, engine) in fleet.engines.iter().enumerate() {
        let heard = async || engine.published_of(0).subscribers > 0 && engine.published_of(1).subscribers > 0;
        eventually(SOON, &format!("both ranks of engine {number} are heard"), heard).await.unwrap();
    }
    fleet
}

/// Has one rank of an engine compute a prompt, past kvlb, and waits until kvlb knows.
async fn own(fleet: &Fleet, number: usize, rank: usize, body: &Value) {
    let rank = rank.to_string();
    let answer = Talker::new(fleet.engine_at(number)).ask(&[(HEADER, &rank)], body).await.unwrap();
    assert_eq!((answer.head.status, answer.head.header("x-sim-rank")), (200, Some(rank.as_str())));
    let deep = async || fleet.depth(number, body).await.is_ok_and(|depth| depth == 6);
    eventually(SOON, "the rank's blocks are known", deep).await.unwrap();
}

fn last_seen(fleet: &Fleet, number: usize) -> Seen {
    fleet.engines[number].requests().into_iter().rfind(|seen| seen.path == PATH).unwrap()
}

fn rank_of(answer: &Answer) -> &str {
    answer.head.header("x-sim-rank").unwrap()
}

async fn the_rank_that_holds_a_prompt_gets_it(rule: Value) {
    let fleet = fleet(vec![two_ranks("a"), two_ranks("b")], rule).await;
    for (number, (engine, rank)) in (0..).zip([(0, 1), (1, 0), (0, 0), (1, 1)]) {
        let body = prompt(number);
        own(&fleet, engine, rank, &body).await;
        let explained = fleet.explain(&body).await.unwrap();
        let holder = explained["candidates"].as_array().unwrap().iter().find(|candidate| candidate["depth"] == 6);
        assert_eq!(holder.unwrap()["rank"], rank, "{explained}");
        let before = fleet.sum(HITS).await.unwrap();
        for _ in 0..3 {
            let answer = fleet.ask(&body).await.unwrap();
            assert_eq!((fleet.who(&answer), rank_of(&answer)), (Some(engine), rank.to_string().as_str()));
            assert_eq!(answer.cached_tokens(), Some(96));
            assert_eq!(last_seen(&fleet, engine).header(HEADER), Some(rank.to_string().as_str()));
        }
        assert_eq!(fleet.sum(HITS).await.unwrap(), before + 3);
    }
    fleet.agree().await.unwrap();
}

#[tokio::test]
async fn with_as_many_ranks_as_the_rule_says() {
    the_rank_that_holds_a_prompt_gets_it(json!({"kvDpRankCount": 2})).await;
}

#[tokio::test]
async fn with_as_many_ranks_as_the_engine_shows() {
    the_rank_that_holds_a_prompt_gets_it(json!({})).await;
}

#[tokio::test]
async fn a_rank_that_the_client_names_is_not_overruled() {
    let fleet = fleet(vec![two_ranks("a")], json!({"kvDpRankCount": 2})).await;
    let body = prompt(1);
    own(&fleet, 0, 1, &body).await;
    let answer = fleet.ask_with(&[(HEADER, "0")], &body).await.unwrap();
    assert_eq!((rank_of(&answer), answer.cached_tokens()), ("0", Some(0)));
    let fields = last_seen(&fleet, 0).headers.into_iter().filter(|(name, _)| name.eq_ignore_ascii_case(HEADER));
    assert_eq!(fields.map(|(_, value)| value).collect::<Vec<_>>(), ["0"]);
    // An answer of the engine's own reaches the client as it is.
    let refused = Talker::new(fleet.vip).ask(&[(HEADER, "7")], &body).await.unwrap();
    assert_eq!(refused.head.status, 400);
    assert_eq!(refused.body.json()["error"]["message"], "data_parallel_rank 7 is out of range [0, 2).");
}

#[tokio::test]
async fn an_engine_of_one_rank_is_sent_no_header() {
    let fleet = Fleet::start(Setup { engines: vec![quick("a")], ..Setup::default() }).await.unwrap();
    for _ in 0..3 {
        fleet.ask(&prompt(1)).await.unwrap();
        fleet.agree().await.unwrap();
        assert_eq!(last_seen(&fleet, 0).header(HEADER), None);
    }
}

#[tokio::test]
async fn a_rank_that_starts_anew_loses_its_blocks_and_no_others() {
    let mut fleet = fleet(vec![two_ranks("a")], json!({"kvDpRankCount": 2})).await;
    let bodies = [prompt(1), prompt(2)];
    for (rank, body) in bodies.iter().enumerate() {
        own(&fleet, 0, rank, body).await;
    }
    fleet.engines[0].restart_rank(1).await.unwrap();
    let gone = async || fleet.depth(0, &bodies[1]).await.is_ok_and(|depth| depth == 0);
    eventually(SOON, "the blocks of rank 1 are gone", gone).await.unwrap();
    assert_eq!(fleet.depth(0, &bodies[0]).await.unwrap(), 6);
    assert_eq!(fleet.ask(&bodies[0]).await.unwrap().cached_tokens(), Some(96));
    // Its new life is followed as the first.
    own(&fleet, 0, 1, &bodies[1]).await;
    let answer = fleet.ask(&bodies[1]).await.unwrap();
    assert_eq!((rank_of(&answer), answer.cached_tokens()), ("1", Some(96)));
    fleet.agree().await.unwrap();
}

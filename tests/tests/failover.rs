//! Endpoints fail in every way they can: what clients see of it, who answers instead, and what the engines were asked.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fleet;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvlb_tests::engine::EngineConfig;
use kvlb_tests::harness::http::{Answer, End};
use kvlb_tests::harness::upstream::{Act, Upstream};
use kvlb_tests::harness::{eventually, temp_dir, until_some};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use fleet::trio::{all_quiet, completions, journal, own, prompt, three, three_told};
use fleet::{Dice, Fleet, SOON, Setup, Talker, completion, quick};

/// An endpoint's answer, in a scripted server's bytes.
const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";

/// The completions that a scripted server read.
fn received(upstream: &Upstream) -> Vec<Vec<u8>> {
    upstream.received().into_iter().filter(|request| request.starts_with(b"POST")).collect()
}

fn error_code(answer: &Answer) -> String {
    let body = answer.body.json();
    assert_eq!((&body["error"]["type"], answer.body.end), (&json!("kvlb_error"), End::Complete), "{body}");
    assert!(body["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
    let code = body["error"]["code"].as_str().unwrap().to_owned();
    assert_eq!(answer.head.header("x-kvlb-error"), Some(code.as_str()));
    code
}

async fn requests_to_an_owner_that_refuses_at_random(rule: Value) {
    const GROUPS: u32 = 40;
    let fleet = three(rule).await;
    for group in 0..GROUPS {
        own(&fleet, group).await;
    }
    fleet.agree().await.unwrap();
    // Without connections that wait, each request meets the port as it is.
    fleet.engines[0].faults().set(|plan| {
        (plan.refuse_http_fraction, plan.refuse_http_slot_ms, plan.keep_alive_ms) = (0.5, 5, Some(1));
    });
    let by: Arc<[AtomicU32; 3]> = Arc::default();
    // A thousand, and more where a probe that was refused keeps the owner out for most of that time.
    let both = |by: &[AtomicU32; 3]| by[..2].iter().all(|by| by.load(Ordering::Relaxed) > 100);
    let mut clients = JoinSet::new();
    for client in 0..8_u32 {
        let (vip, by) = (fleet.vip, Arc::clone(&by));
        clients.spawn(async move {
            let (mut talker, mut dice) = (Talker::new(vip), Dice::new(u64::from(client)));
            for number in 0..2000 {
                if number >= 125 && both(&by) {
                    break;
                }
                let id = format!("{client}-{number}");
                let body = completion(&prompt(dice.below(GROUPS)), 1);
                let answer = talker.ask(&[("X-Request-Id", &id)], &body).await.unwrap();
                assert_eq!(answer.head.status, 200, "{}", answer.body.text());
                let depth: u32 = answer.head.header("x-kvlb-depth").unwrap().parse().unwrap();
                assert!(depth >= 5, "{:?}", answer.head);
                let by = &by[["a", "b", "c"].iter().position(|name| *name == answer.engine()).unwrap()];
                by.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    clients.join_all().await;
    let by = by.each_ref().map(|by| by.load(Ordering::Relaxed));
    assert!(by[0] > 100 && by[1] > 100 && by[2] == 0, "{by:?}");
    let (journal, all) = (journal(&fleet), by[0] + by[1]);
    let longest = journal.values().map(Vec::len).max();
    assert_eq!((u32::try_from(journal.len()).unwrap(), longest), (all, Some(1)), "each ran exactly once");
    let count = async |series: &str| fleet.count(series).await.unwrap();
    let hits = [
        count("loxilb_pd_kv_tier15_hits_total{ep_idx=\"0\"}").await,
        count("loxilb_pd_kv_tier15_hits_total{ep_idx=\"1\"}").await,
    ];
    assert_eq!(hits, [u64::from(by[0]), u64::from(by[1])]);
    assert_eq!(fleet.sum("loxilb_pd_kv_tier15_miss_reason_total").await.unwrap(), 0);
    assert_eq!(fleet.sum("kvlb_requests_total").await.unwrap(), u64::from(all));
    assert_eq!(fleet.sum("kvlb_errors_total").await.unwrap(), 0);
    // A SYN that meets the port as it shuts gets no answer at all.
    let attempts = fleet.sum("kvlb_endpoint_connects_total").await.unwrap();
    let failed = attempts - count("kvlb_endpoint_connects_total{result=\"ok\"}").await;
    assert!(count("kvlb_endpoint_connects_total{result=\"refused\"}").await > 0);
    assert_eq!(count("kvlb_retries_total{reason=\"connect\"}").await, failed);
    all_quiet(&fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_refuses_at_random_is_replaced_by_the_second_best() {
    requests_to_an_owner_that_refuses_at_random(json!({})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_refuses_and_is_probed_is_replaced_by_the_second_best() {
    let probed = json!({"monitor": true, "probeTimeout": 1, "probeRetries": 1});
    requests_to_an_owner_that_refuses_at_random(probed).await;
}

#[tokio::test]
async fn a_killed_owner_takes_along_only_what_it_had_accepted() {
    let mut fleet = three(json!({})).await;
    own(&fleet, 1).await;
    fleet.agree().await.unwrap();
    fleet.engines[0].faults().set(|plan| plan.pause = true);
    let mut accepted = JoinSet::new();
    for number in 0..12 {
        let vip = fleet.vip;
        accepted.spawn(async move {
            let id = format!("accepted-{number}");
            Talker::new(vip).ask(&[("X-Request-Id", &id)], &completion(&prompt(1), 1)).await.unwrap()
        });
    }
    eventually(SOON, "the owner has them all", async || fleet.engines[0].counters().running == 12).await.unwrap();
    fleet.engines[0].kill().await;
    while let Some(answer) = accepted.join_next().await {
        let answer = answer.unwrap();
        assert_eq!((answer.head.status, error_code(&answer).as_str()), (502, "backend_died"));
    }
    let mut client = Talker::new(fleet.vip);
    for number in 0..100 {
        let id = format!("later-{number}");
        let answer = client.ask(&[("X-Request-Id", &id)], &completion(&prompt(1), 1)).await.unwrap();
        assert_eq!((answer.head.status, answer.engine()), (200, "b"), "{}", answer.body.text());
    }
    let journal = journal(&fleet);
    assert_eq!((journal.len(), journal.values().map(Vec::len).max()), (112, Some(1)), "nothing was sent twice");
    all_quiet(&fleet).await;
    fleet.engines[0].faults().clear();
    fleet.engines[0].restart().await.unwrap();
    fleet.agree().await.unwrap();
}

/// The access log's line of one request, once it is there.
fn line_of(log: &str, id: &str) -> Option<Value> {
    let lines = std::fs::read_to_string(log).ok()?;
    lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).find(|line| line["request_id"] == id)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_killed_in_full_flight_loses_nothing_that_it_had_not_begun() {
    let dir = temp_dir().unwrap();
    let log: &'static str = dir.path().join("access.log").display().to_string().leak();
    let mut fleet = three_told(json!({}), vec!["--access-log", "full", "--access-log-file", log]).await;
    for group in 0..10 {
        own(&fleet, group).await;
    }
    fleet.agree().await.unwrap();
    let mut clients = JoinSet::new();
    for client in 0..8_u32 {
        let vip = fleet.vip;
        clients.spawn(async move {
            let (mut talker, mut dice) = (Talker::new(vip), Dice::new(u64::from(client)));
            let mut lost = Vec::new();
            for number in 0..150 {
                let id = format!("{client}-{number}");
                let body = completion(&prompt(dice.below(10)), 4);
                let answer = talker.ask(&[("X-Request-Id", &id)], &body).await.unwrap();
                let whole = answer.head.status == 200 && answer.body.end == End::Complete;
                if !whole {
                    lost.push(id);
                }
            }
            lost
        });
    }
    for _ in 0..3 {
        let before = fleet.engines[0].counters().seen;
        eventually(SOON, "the owner works", async || fleet.engines[0].counters().seen > before + 30).await.unwrap();
        fleet.engines[0].restart().await.unwrap();
        // Its blocks come back to it, else nobody would ask it any more.
        for group in 0..10 {
            fleet.warm(0, &[prompt(group), prompt(group + 100)].concat()).await.unwrap();
        }
    }
    let mut lost = Vec::new();
    while let Some(of_client) = clients.join_next().await {
        lost.extend(of_client.unwrap());
    }
    let journal = journal(&fleet);
    for id in &lost {
        let Some(seen) = journal.get(id) else {
            // A new connection that the kernel took for the engine just as that ended: nothing tells kvlb that nobody read it. On one
            // that had waited the request would have gone out again.
            let line = until_some(SOON, "its line is written", async || line_of(log, id)).await.unwrap();
            assert_eq!(line["reused"], false, "{id} was lost although no engine had begun it: {line}");
            continue;
        };
        assert!(seen.len() == 1 && seen[0].0 == 0 && seen[0].1.aborted, "{seen:?}");
    }
    for (id, seen) in &journal {
        let finished = seen.iter().filter(|(_, seen)| seen.finished).count();
        assert!(finished <= 1, "{id} was answered twice: {seen:?}");
    }
    assert!(lost.len() <= 24, "more than were in flight: {lost:?}");
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn a_connection_that_dies_under_a_request_is_replaced_once_if_it_was_reused() {
    // Each connection answers one request; the next one it reads and dies.
    let upstream = Upstream::start(vec![Act::Read, Act::Send(OK.to_vec()), Act::Read]).await.unwrap();
    let others = vec![upstream.address()];
    let fleet = Fleet::start(Setup { others, args: vec!["--threads", "1"], ..Setup::default() }).await.unwrap();
    let mut client = Talker::new(fleet.vip);
    for number in [1, 2] {
        let answer = client.ask(&[], &completion(&[number; 20], 1)).await.unwrap();
        assert_eq!((answer.head.status, answer.body.text().as_str()), (200, "{}"));
    }
    let received = received(&upstream);
    assert_eq!(received.len(), 3, "the second request was sent once more");
    assert_eq!(received[1], received[2], "and the same");
    assert_eq!(fleet.count("kvlb_retries_total{reason=\"stale_connection\"}").await.unwrap(), 1);
}

#[tokio::test]
async fn a_fresh_connection_that_dies_under_a_request_is_an_error_and_the_request_is_not_sent_again() {
    let upstream = Upstream::start(vec![Act::Read]).await.unwrap();
    let resetting = Upstream::start(vec![Act::Read, Act::Reset]).await.unwrap();
    for dead in [&upstream, &resetting] {
        // The others would take it gladly.
        let setup = Setup { engines: vec![quick("idle")], others: vec![dead.address()], ..Setup::default() };
        let fleet = Fleet::start(setup).await.unwrap();
        let mut client = Talker::new(fleet.vip);
        let mut errors = 0;
        for number in 0..6 {
            let answer = client.ask(&[("X-Request-Id", &number.to_string())], &completion(&[number; 20], 1)).await;
            let answer = answer.unwrap();
            if answer.head.status != 200 {
                assert_eq!((answer.head.status, error_code(&answer).as_str()), (502, "backend_died"));
                errors += 1;
            }
        }
        assert_eq!((errors, received(dead).len(), completions(&fleet, 0).len()), (3, 3, 3), "in turn");
        all_quiet(&fleet).await;
    }
}

#[tokio::test]
async fn an_engine_that_dies_under_every_request_gets_each_at_most_twice_and_nobody_else_does() {
    let fleet = three(json!({})).await;
    own(&fleet, 1).await;
    fleet.agree().await.unwrap();
    let mut client = Talker::new(fleet.vip);
    assert_eq!(client.ask(&[], &completion(&prompt(1), 1)).await.unwrap().engine(), "a");
    fleet.engines[0].faults().set(|plan| plan.die_after_chunks = Some(0));
    for number in 0..10 {
        let id = number.to_string();
        let answer = client.ask(&[("X-Request-Id", &id)], &completion(&prompt(1), 1)).await.unwrap();
        assert_eq!((answer.head.status, error_code(&answer).as_str()), (502, "backend_died"));
    }
    for (id, seen) in journal(&fleet) {
        assert!(seen.len() <= 2 && seen.iter().all(|(engine, seen)| *engine == 0 && !seen.finished), "{id}: {seen:?}");
    }
    let stale = fleet.count("kvlb_retries_total{reason=\"stale_connection\"}").await.unwrap();
    assert_eq!(journal(&fleet).values().map(Vec::len).sum::<usize>() - 10, usize::from(stale > 0));
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn an_answer_that_dies_midway_never_ends_cleanly() {
    let fleet = three(json!({})).await;
    for reset in [false, true] {
        fleet.engines.iter().for_each(|engine| {
            engine.faults().set(|plan| (plan.die_after_chunks, plan.die_with_reset) = (Some(3), reset));
        });
        for stream in [true, false] {
            let mut body = completion(&prompt(9), 10);
            body["stream"] = json!(stream);
            let answer = Talker::new(fleet.vip).ask(&[], &body).await.unwrap();
            assert_eq!(answer.head.status, 200);
            assert!(answer.body.end != End::Complete, "{:?}", answer.body);
            assert!(!answer.body.text().contains("[DONE]"));
            if stream {
                assert_eq!(answer.body.events().len(), 3, "what came was passed on: {}", answer.body.text());
            } else {
                let promised: usize = answer.head.header("content-length").unwrap().parse().unwrap();
                assert!(answer.body.bytes().len() < promised);
            }
        }
    }
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn an_engine_that_says_it_is_busy_is_passed_over_once() {
    let fleet = three(json!({})).await;
    for number in 1..=4 {
        own(&fleet, number).await;
    }
    fleet.agree().await.unwrap();
    let mut client = Talker::new(fleet.vip);
    for (number, status) in [(1, 503), (2, 429)] {
        fleet.engines[0].faults().set(|plan| plan.status = Some(status));
        let answer = client.ask(&[("X-Request-Id", "once")], &completion(&prompt(number), 1)).await.unwrap();
        assert_eq!((answer.head.status, answer.engine()), (200, "b"), "the second best");
    }
    assert_eq!(fleet.count("kvlb_retries_total{reason=\"busy\"}").await.unwrap(), 2);
    let counted = async |series: &str| fleet.count(series).await.unwrap();
    // Each request is counted once, by the answer that the client got.
    assert_eq!(fleet.sum("kvlb_requests_total").await.unwrap(), 2);
    assert_eq!(counted("loxilb_pd_kv_tier15_hits_total{ep_idx=\"0\"}").await, 0);
    assert_eq!(counted("loxilb_pd_kv_tier15_hits_total{ep_idx=\"1\"}").await, 2);
    for (number, status) in [(3, 503), (4, 429)] {
        fleet.engines.iter().for_each(|engine| engine.faults().set(|plan| plan.status = Some(status)));
        let direct = Talker::new(fleet.engine_at(0)).ask(&[], &completion(&prompt(number), 1)).await.unwrap();
        let id = format!("busy-{status}");
        let answer = client.ask(&[("X-Request-Id", &id)], &completion(&prompt(number), 1)).await.unwrap();
        assert_eq!((answer.head.status, answer.body.text()), (status, direct.body.text()), "passed on as it is");
        assert_eq!(answer.head.header("x-kvlb-error"), None);
        assert_eq!(journal(&fleet)[&id].len(), 2, "one other was asked");
    }
    for status in [400, 500, 501, 502, 504] {
        fleet.engines.iter().for_each(|engine| engine.faults().set(|plan| plan.status = Some(status)));
        let id = format!("final-{status}");
        let answer = client.ask(&[("X-Request-Id", &id)], &completion(&prompt(1), 1)).await.unwrap();
        assert_eq!((answer.head.status, answer.head.header("x-kvlb-error")), (status, None));
        assert_eq!(journal(&fleet)[&id].len(), 1, "nobody else was asked");
    }
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn an_engine_that_said_it_was_busy_carries_no_load_while_another_answers() {
    let fleet = three(json!({})).await;
    own(&fleet, 1).await;
    fleet.agree().await.unwrap();
    fleet.engines[0].faults().set(|plan| plan.status = Some(503));
    fleet.engines[1].faults().set(|plan| plan.stall_before_head = true);
    let vip = fleet.vip;
    let asking = tokio::spawn(async move { Talker::new(vip).ask(&[], &completion(&prompt(1), 1)).await.unwrap() });
    eventually(SOON, "the other has it", async || fleet.load(1).await.is_ok_and(|load| load == 1)).await.unwrap();
    assert_eq!(fleet.load(0).await.unwrap(), 0);
    fleet.engines[1].faults().clear();
    assert_eq!(asking.await.unwrap().engine(), "b");
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn an_answer_of_a_busy_engine_is_counted_at_that_engine_when_nobody_else_answers() {
    let mut fleet = three(json!({})).await;
    own(&fleet, 1).await;
    fleet.agree().await.unwrap();
    fleet.engines[0].faults().set(|plan| plan.status = Some(503));
    for number in [1, 2] {
        fleet.engines[number].kill().await;
    }
    let answer = Talker::new(fleet.vip).ask(&[], &completion(&prompt(1), 1)).await.unwrap();
    assert_eq!((answer.head.status, answer.engine()), (503, "a"));
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_hits_total{ep_idx=\"0\"}").await.unwrap(), 1);
    assert_eq!(fleet.sum("loxilb_pd_kv_tier15_hits_total").await.unwrap(), 1);
    assert_eq!(fleet.sum("loxilb_pd_kv_tier15_miss_reason_total").await.unwrap(), 0);
    assert_eq!(fleet.sum("kvlb_requests_total").await.unwrap(), 1);
}

#[tokio::test]
async fn an_endpoint_that_refuses_costs_the_selector_only_its_own_turns() {
    let mut fleet = three(json!({})).await;
    fleet.engines[1].kill().await;
    let mut client = Talker::new(fleet.vip);
    let mut by = BTreeMap::new();
    for number in 0..60 {
        // Explaining takes no turn either.
        fleet.explain(&completion(&[number; 20], 1)).await.unwrap();
        let answer = client.ask(&[], &completion(&[number; 20], 1)).await.unwrap();
        *by.entry(answer.engine().to_owned()).or_insert(0) += 1;
    }
    assert_eq!(by, BTreeMap::from([("a".to_owned(), 30), ("c".to_owned(), 30)]));
    assert_eq!(fleet.count("kvlb_retries_total{reason=\"connect\"}").await.unwrap(), 20);
}

#[tokio::test]
async fn with_all_endpoints_down_the_client_gets_an_error_that_says_so() {
    let probed = json!({"monitor": true, "probeTimeout": 1, "probeRetries": 1});
    for (rule, status, code) in [(json!({}), 502, "backend_unreachable"), (probed, 503, "no_healthy_backend")] {
        let mut fleet = three(rule).await;
        own(&fleet, 1).await;
        for number in 0..3 {
            fleet.engines[number].kill().await;
        }
        if status == 503 {
            eventually(SOON, "the probes see it", async || {
                fleet.sum("kvlb_endpoint_eligible").await.is_ok_and(|eligible| eligible == 0)
            })
            .await
            .unwrap();
        }
        for body in [completion(&prompt(1), 1), completion(&prompt(2), 1)] {
            let answer = Talker::new(fleet.vip).ask(&[], &body).await.unwrap();
            assert_eq!((answer.head.status, error_code(&answer).as_str()), (status, code));
        }
        all_quiet(&fleet).await;
    }
}

/// Engines close what has been idle, at the very moment when it is used again.
async fn connections_are_used_when_engines_close_them(io: &'static str) {
    const CLIENTS: u32 = 8;
    const KEEP_ALIVE: Duration = Duration::from_millis(150);
    let engine = EngineConfig { keep_alive_ms: 150, ..quick("hasty") };
    let args = vec!["--threads", "1", "--io", io];
    let fleet = Fleet::start(Setup { engines: vec![engine], args, ..Setup::default() }).await.unwrap();
    let client = |client: u32| (client, (Talker::new(fleet.vip), Dice::new(u64::from(client))));
    let mut clients: Vec<_> = (0..CLIENTS).map(client).collect();
    let reuses = async || fleet.sum("kvlb_endpoint_reuses_total").await.unwrap();
    let (mut pause, mut rounds) = (KEEP_ALIVE / 2, [0, 0]);
    for number in 0..48 {
        let before = reuses().await;
        // All at once, so that each takes a connection of its own.
        let mut asking = JoinSet::new();
        for (client, (mut talker, mut dice)) in clients.drain(..) {
            asking.spawn(async move {
                sleep(Duration::from_micros(u64::from(dice.below(1000)))).await;
                let id = format!("{client}-{number}");
                let answer = talker.ask(&[("X-Request-Id", &id)], &completion(&[client; 20], 1)).await.unwrap();
                assert_eq!(answer.head.status, 200, "{}", answer.body.text());
                (client, (talker, dice))
            });
        }
        clients.extend(asking.join_all().await);
        let in_time = reuses().await > before;
        rounds[usize::from(in_time)] += 1;
        // Where the very moment is depends on the machine: longer while connections are still open, shorter when they are not.
        let step = Duration::from_millis(if number < 16 { 8 } else { 1 });
        pause = if in_time { pause + step } else { pause.saturating_sub(step) };
        sleep(pause).await;
    }
    assert!(journal(&fleet).values().all(|seen| seen.iter().filter(|(_, seen)| seen.finished).count() == 1));
    let stale = fleet.count("kvlb_retries_total{reason=\"stale_connection\"}").await.unwrap();
    assert!(rounds.iter().all(|&count| count > 0), "rounds too late, in time: {rounds:?} ({stale} stale)");
    assert_eq!(fleet.sum("kvlb_errors_total").await.unwrap(), 0);
}

#[tokio::test]
async fn connections_used_when_engines_close_them_cost_no_error_on_io_uring() {
    connections_are_used_when_engines_close_them("uring").await;
}

#[tokio::test]
async fn connections_used_when_engines_close_them_cost_no_error_on_epoll() {
    connections_are_used_when_engines_close_them("epoll").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_stands_still_leaves_the_others_alone() {
    let fleet = three(json!({})).await;
    own(&fleet, 1).await;
    let other = prompt(2);
    fleet.warm(1, &other).await.unwrap();
    fleet.agree().await.unwrap();
    let typical = median_latency(&fleet, &other).await;
    fleet.engines[0].faults().set(|plan| plan.stall_before_head = true);
    let mut waiting = JoinSet::new();
    for _ in 0..100 {
        let vip = fleet.vip;
        waiting.spawn(async move { Talker::new(vip).ask(&[], &completion(&prompt(1), 1)).await.unwrap() });
    }
    eventually(SOON, "they wait", async || fleet.engines[0].counters().running == 100).await.unwrap();
    assert_eq!(fleet.load(0).await.unwrap(), 100);
    let beside = median_latency(&fleet, &other).await;
    assert!(beside < 3 * typical + Duration::from_millis(20), "{typical:?} became {beside:?}");
    assert!(waiting.try_join_next().is_none());
    fleet.engines[0].faults().clear();
    while let Some(answer) = waiting.join_next().await {
        let answer = answer.unwrap();
        assert_eq!((answer.head.status, answer.engine()), (200, "a"));
    }
    all_quiet(&fleet).await;
}

async fn median_latency(fleet: &Fleet, prompt: &[u32]) -> Duration {
    let mut client = Talker::new(fleet.vip);
    let mut latencies = Vec::new();
    for _ in 0..100 {
        let start = Instant::now();
        let answer = client.ask(&[], &completion(prompt, 1)).await.unwrap();
        latencies.push(start.elapsed());
        assert_eq!((answer.head.status, answer.engine()), (200, "b"));
    }
    latencies.sort_unstable();
    latencies[latencies.len() / 2]
}

/// How often an engine was asked for its health, and had answered.
fn probes(fleet: &Fleet, number: usize) -> usize {
    fleet.engines[number].requests().iter().filter(|seen| seen.path == "/health" && seen.finished).count()
}

async fn probed(fleet: &Fleet, number: usize, times: usize) {
    let before = probes(fleet, number);
    let what = format!("engine {number} is probed {times} times");
    eventually(SOON, &what, async || probes(fleet, number) >= before + times).await.unwrap();
}

async fn shown(fleet: &Fleet, number: usize, wanted: &str) {
    let state = async || fleet.endpoint(number).await.is_ok_and(|shown| shown["state"] == wanted);
    eventually(SOON, wanted, state).await.unwrap();
}

#[tokio::test]
async fn probes_are_judged_by_the_time_the_codes_and_the_rows_that_their_rule_or_endpoint_says() {
    let one_second = json!({"monitor": true, "probetype": "http", "probereq": "health", "probeTimeout": 1});
    let fleet = three(one_second.clone()).await;
    // An engine whose health takes a second is fine.
    fleet.engines[0].faults().set(|plan| plan.health_delay_ms = Some(1200));
    fleet.engines[1].faults().set(|plan| plan.health_status = Some(204));
    fleet.engines[2].faults().set(|plan| plan.health_status = Some(429));
    shown(&fleet, 2, "inactive").await;
    probed(&fleet, 0, 3).await;
    shown(&fleet, 0, "active").await;
    shown(&fleet, 1, "active").await;
    // Where the rule says otherwise it is not, at once, and an endpoint's own word goes before its rule's.
    let own = |rise: u32| json!({"monitor": true, "probetype": "http", "probereq": "health", "probeTimeout": 1, "probeRise": rise});
    let change = |rule: &mut Value| {
        let service = &mut rule["serviceArguments"];
        (service["probeAnswerTimeout"], service["expectedCodes"]) = (json!(1), json!("200,429-430"));
        rule["endpoints"][1]["probe"] = own(3);
    };
    fleet.put_rule(change).await.unwrap();
    shown(&fleet, 0, "inactive").await;
    shown(&fleet, 2, "active").await;
    shown(&fleet, 1, "active").await;
    fleet.engines[1].faults().set(|plan| plan.health_status = Some(500));
    shown(&fleet, 1, "inactive").await;
    let before = probes(&fleet, 1);
    fleet.engines[1].faults().clear();
    shown(&fleet, 1, "active").await;
    assert!(probes(&fleet, 1) >= before + 3, "up before its third good result");
}

#[tokio::test]
async fn an_endpoint_that_its_probe_finds_ill_gets_nothing_until_it_is_well() {
    let probed =
        json!({"monitor": true, "probetype": "http", "probereq": "health", "probeTimeout": 1, "probeRetries": 1});
    let fleet = three(probed).await;
    fleet.warm(0, &prompt(1)).await.unwrap();
    fleet.agree().await.unwrap();
    let mut client = Talker::new(fleet.vip);
    assert_eq!(client.ask(&[], &completion(&prompt(1), 1)).await.unwrap().engine(), "a");
    fleet.engines[0].faults().set(|plan| plan.health_status = Some(503));
    let state = async |wanted: &str| {
        eventually(SOON, wanted, async || fleet.endpoint(0).await.is_ok_and(|shown| shown["state"] == wanted)).await
    };
    state("inactive").await.unwrap();
    let excluded = "loxilb_pd_kv_tier15_miss_reason_total{reason=\"excluded\"}";
    let before = fleet.count(excluded).await.unwrap();
    let answer = client.ask(&[], &completion(&prompt(1), 1)).await.unwrap();
    assert_eq!((answer.engine() == "a", answer.head.header("x-kvlb-reason")), (false, Some("excluded")));
    assert_eq!(fleet.count(excluded).await.unwrap() - before, 1);
    for _ in 0..60 {
        let answer = client.ask(&[], &completion(&prompt(1), 1)).await.unwrap();
        assert!(answer.head.status == 200 && answer.engine() != "a");
    }
    fleet.engines[0].faults().clear();
    fleet.warm(0, &[prompt(1), prompt(2)].concat()).await.unwrap();
    fleet.agree().await.unwrap();
    state("active").await.unwrap();
    let longer = [prompt(1), prompt(2)].concat();
    assert_eq!(client.ask(&[], &completion(&longer, 1)).await.unwrap().engine(), "a", "the best again");
}

#[tokio::test]
async fn weight_0_lets_finish_what_runs_and_sends_nothing_new() {
    let fleet = three(json!({})).await;
    own(&fleet, 1).await;
    fleet.agree().await.unwrap();
    fleet.engines[0].faults().set(|plan| plan.stall_after_chunks = Some(2));
    let mut body = completion(&prompt(1), 10);
    body["stream"] = json!(true);
    let vip = fleet.vip;
    let running = tokio::spawn(async move { Talker::new(vip).ask(&[], &body).await.unwrap() });
    eventually(SOON, "it runs", async || fleet.engines[0].counters().running == 1).await.unwrap();
    fleet.put_rule(|rule| rule["endpoints"][0]["weight"] = json!(0)).await.unwrap();
    assert_eq!(fleet.endpoint(0).await.unwrap()["state"], json!("draining"));
    let mut client = Talker::new(fleet.vip);
    for number in 0..30 {
        let answer = client.ask(&[], &completion(&prompt(number), 1)).await.unwrap();
        assert!(answer.head.status == 200 && answer.engine() != "a", "{:?}", answer.head);
    }
    fleet.engines[0].faults().clear();
    let answer = timeout(SOON, running).await.unwrap().unwrap();
    assert_eq!((answer.engine(), answer.body.end), ("a", End::Complete));
    assert_eq!(answer.body.events().last().map(String::as_str), Some("[DONE]"));
    assert_eq!(fleet.load(0).await.unwrap(), 0);
    fleet.put_rule(|_| ()).await.unwrap();
    let longer = [prompt(1), prompt(2)].concat();
    fleet.warm(0, &longer).await.unwrap();
    fleet.agree().await.unwrap();
    assert_eq!(client.ask(&[], &completion(&longer, 1)).await.unwrap().engine(), "a", "what it knew was kept");
}

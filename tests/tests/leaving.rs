//! Clients leave at any time, endpoints fail at random: nothing stays in flight, and nothing runs twice.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod fleet;

use std::net::SocketAddr;
use std::time::Duration;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::Client;
use serde_json::json;
use socket2::{Domain, Socket, Type};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use fleet::trio::{all_quiet, completions, journal, own, prompt, three};
use fleet::{Dice, Fleet, PATH, SOON, Setup, Talker, completion, quick};

/// A client that leaves is gone from its engine within this time.
const LEAVING: Duration = Duration::from_millis(100);

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    /// While its engine computes the first token, streamed or not.
    Waiting { stream: bool },
    /// Behind the third event.
    Streaming,
}

async fn clients_that_leave_are_gone_from_the_engine(io: &'static str) {
    const TIMES: usize = 9;
    let args = vec!["--io", io];
    let fleet = Fleet::start(Setup { engines: vec![quick("left")], args, ..Setup::default() }).await.unwrap();
    let engine = &fleet.engines[0];
    for leaving in [Leaving::Waiting { stream: true }, Leaving::Waiting { stream: false }, Leaving::Streaming] {
        let mut times = Vec::new();
        for _ in 0..TIMES {
            engine.faults().set(|plan| match leaving {
                Leaving::Waiting { .. } => plan.pause = true,
                Leaving::Streaming => plan.stall_after_chunks = Some(3),
            });
            let mut body = completion(&prompt(1), 50);
            body["stream"] = json!(!matches!(leaving, Leaving::Waiting { stream: false }));
            let mut client = Client::connect(fleet.vip).await.unwrap();
            let json = [("Content-Type", "application/json")];
            client.request("POST", PATH, &json, body.to_string().as_bytes()).await.unwrap();
            if let Leaving::Streaming = leaving {
                client.head().await.unwrap();
                for _ in 0..3 {
                    client.chunk().await.unwrap().unwrap();
                }
            }
            eventually(SOON, "the engine has it", async || engine.counters().running == 1).await.unwrap();
            let left = Instant::now();
            drop(client);
            eventually(SOON, "the engine sees it leave", async || engine.counters().running == 0).await.unwrap();
            times.push(left.elapsed());
            engine.faults().clear();
            eventually(SOON, "the model drops it", async || engine.running() + engine.waiting() == 0).await.unwrap();
        }
        times.sort_unstable();
        // A busy machine may be late for some, not for most.
        assert!(times[TIMES / 2] < LEAVING, "{leaving:?}: {times:?}");
    }
    let seen = completions(&fleet, 0);
    assert!(seen.len() == 27 && seen.iter().all(|seen| seen.aborted), "none ran to its end: {seen:?}");
    let aborts =
        async |phase: &str| fleet.count(&format!("kvlb_client_aborts_total{{phase=\"{phase}\"}}")).await.unwrap();
    // A stream's head leaves before its first token.
    let (wait, stream) = (aborts("wait").await, aborts("stream").await);
    assert!(wait >= 9 && stream >= 9 && wait + stream == 27, "{wait} + {stream}");
    leave_before_any_engine_is_asked(&fleet).await;
    all_quiet(&fleet).await;
}

async fn leave_before_any_engine_is_asked(fleet: &Fleet) {
    for (phase, part) in
        [("head", "POST /v1/comp"), ("body", "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")]
    {
        let mut client = Client::connect(fleet.vip).await.unwrap();
        client.send(part.as_bytes()).await.unwrap();
        sleep(Duration::from_millis(30)).await;
        drop(client);
        let series = format!("kvlb_client_aborts_total{{phase=\"{phase}\"}}");
        eventually(SOON, phase, async || fleet.count(&series).await.is_ok_and(|count| count == 1)).await.unwrap();
    }
    assert_eq!(completions(fleet, 0).len(), 27);
}

#[tokio::test]
async fn clients_that_leave_are_gone_from_the_engine_on_io_uring() {
    clients_that_leave_are_gone_from_the_engine("uring").await;
}

#[tokio::test]
async fn clients_that_leave_are_gone_from_the_engine_on_epoll() {
    clients_that_leave_are_gone_from_the_engine("epoll").await;
}

/// A port on which connections are neither taken nor refused: its queue is full and nobody accepts.
struct Deaf {
    address: SocketAddr,
    _listener: Socket,
    _queued: Vec<tokio::net::TcpStream>,
}

impl Deaf {
    async fn listen() -> Self {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let mut queued = Vec::new();
        while let Ok(connected) = timeout(Duration::from_millis(100), tokio::net::TcpStream::connect(address)).await {
            queued.push(connected.unwrap());
        }
        Self { address, _listener: listener, _queued: queued }
    }
}

#[tokio::test]
async fn an_endpoint_that_does_not_answer_the_connect_is_passed_over_and_may_be_left() {
    let deaf = Deaf::listen().await;
    let rule = json!({"timeoutMemberConnect": 300});
    let setup = Setup { engines: vec![quick("well")], others: vec![deaf.address], rule, ..Setup::default() };
    let fleet = Fleet::start(setup).await.unwrap();
    let mut client = Talker::new(fleet.vip);
    for number in 0..4 {
        let answer = client.ask(&[], &completion(&[number; 20], 1)).await.unwrap();
        assert_eq!((answer.head.status, answer.engine()), (200, "well"));
    }
    assert_eq!(fleet.count("kvlb_endpoint_connects_total{result=\"timed_out\"}").await.unwrap(), 2);
    fleet
        .put_rule(|rule| {
            rule["serviceArguments"]["timeoutMemberConnect"] = json!(20_000);
            rule["endpoints"][0]["weight"] = json!(0);
        })
        .await
        .unwrap();
    let mut client = Client::connect(fleet.vip).await.unwrap();
    let body = completion(&[9; 20], 1).to_string();
    client.request("POST", PATH, &[("Content-Type", "application/json")], body.as_bytes()).await.unwrap();
    eventually(SOON, "it is on its way", async || fleet.load(1).await.is_ok_and(|load| load == 1)).await.unwrap();
    drop(client);
    all_quiet(&fleet).await;
    assert_eq!(fleet.count("kvlb_client_aborts_total{phase=\"connect\"}").await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_chaos_nothing_is_in_flight_and_nothing_ran_twice() {
    let fleet = three(json!({})).await;
    for group in 0..20 {
        own(&fleet, group).await;
    }
    fleet.engines[0].faults().set(|plan| {
        (plan.refuse_http_fraction, plan.refuse_http_slot_ms, plan.keep_alive_ms) = (0.3, 5, Some(3));
        (plan.die_after_chunks, plan.die_fraction) = (Some(2), 0.1);
    });
    fleet.engines[1].faults().set(|plan| {
        (plan.status, plan.status_fraction) = (Some(503), 0.2);
        (plan.die_after_chunks, plan.die_fraction, plan.die_with_reset) = (Some(0), 0.1, true);
    });
    fleet.engines[2].faults().set(|plan| plan.reset_http_fraction = 0.2);
    let mut clients = JoinSet::new();
    for client in 0..12_u32 {
        clients.spawn(be_a_nuisance(fleet.vip, client));
    }
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
    fleet.engines.iter().for_each(|engine| engine.faults().clear());
    all_quiet(&fleet).await;
    for (id, seen) in journal(&fleet) {
        let ran = seen.iter().filter(|(_, seen)| seen.status == Some(200)).count();
        assert!(ran <= 1, "{id} ran {ran} times: {seen:?}");
    }
    eventually(SOON, "client connections are gone", async || {
        fleet.sum("kvlb_client_connections_open").await.is_ok_and(|open| open == 0)
    })
    .await
    .unwrap();
    fleet.agree().await.unwrap();
    let answer = Talker::new(fleet.vip).ask(&[], &completion(&prompt(1), 1)).await.unwrap();
    assert_eq!(answer.head.status, 200);
}

/// Sends requests of all kinds, and leaves a third of them at some time.
async fn be_a_nuisance(vip: SocketAddr, client: u32) {
    let mut dice = Dice::new(u64::from(client) + 500);
    for number in 0..80 {
        let mut body = completion(&prompt(dice.below(30)), 1 + usize::try_from(dice.below(8)).unwrap());
        body["stream"] = json!(dice.once_in(2));
        let id = format!("{client}-{number}");
        let mut talker = Talker::new(vip);
        let headers = [("X-Request-Id", id.as_str())];
        let asking = talker.ask(&headers, &body);
        let patience = if dice.once_in(3) { Duration::from_micros(u64::from(dice.below(4000))) } else { SOON };
        match timeout(patience, asking).await {
            Ok(answer) => {
                let answer = answer.unwrap();
                assert!([200, 502, 503].contains(&answer.head.status), "{:?}", answer.head);
            }
            Err(_left) => assert!(patience < SOON, "{id} has no answer"),
        }
    }
}

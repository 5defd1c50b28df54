//! A rule without the KV tier: a plain proxy, which wastes nothing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use fleet::trio::all_quiet;
use fleet::{Fleet, Setup, Talker, quick};
use kvlb_tests::harness::http::Client;
use serde_json::{Value, json};

/// A completion whose body has about so many bytes.
fn of_size(bytes: usize) -> Value {
    json!({"model": "tiny", "prompt": "a", "max_tokens": 1, "user": "x".repeat(bytes)})
}

async fn plain(number: usize) -> Fleet {
    let engines = ["a", "b", "c"][..number].iter().map(|name| quick(name)).collect();
    let fleet = Fleet::start(Setup { engines, ..Setup::default() }).await.unwrap();
    fleet.put_rule(|rule| rule["serviceArguments"]["kvExactMode"] = json!(0)).await.unwrap();
    fleet
}

#[tokio::test]
async fn bodies_of_some_size_go_out_on_connections_that_wait() {
    let fleet = plain(1).await;
    let mut client = Talker::new(fleet.vip);
    for bytes in [10, 5_000, 70_000, 200_000].repeat(5) {
        assert_eq!(client.ask(&[], &of_size(bytes)).await.unwrap().head.status, 200);
    }
    assert_eq!(fleet.count("kvlb_endpoint_connects_total{result=\"ok\"}").await.unwrap(), 1);
    assert_eq!(fleet.count("kvlb_endpoint_reuses_total").await.unwrap(), 19);
    assert_eq!(fleet.count("kvlb_decisions_offloaded_total").await.unwrap(), 0, "nobody reads them");
    // A large one goes through as it comes.
    assert_eq!(client.ask(&[], &of_size(2_000_000)).await.unwrap().head.status, 200);
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn a_rule_takes_as_many_connections_as_it_says() {
    let fleet = plain(1).await;
    let limit = async |max: u32| fleet.put_rule(|rule| rule["serviceArguments"]["connectionsMax"] = json!(max)).await;
    let refused = "kvlb_client_connections_refused_total{reason=\"rule_full\"}";
    limit(2).await.unwrap();
    let (mut first, mut second) = (Talker::new(fleet.vip), Talker::new(fleet.vip));
    for client in [&mut first, &mut second] {
        assert_eq!(client.ask(&[], &of_size(10)).await.unwrap().head.status, 200);
    }
    assert!(Talker::new(fleet.vip).ask(&[], &of_size(10)).await.is_err(), "the third is turned away");
    assert_eq!(fleet.count(refused).await.unwrap(), 1);
    // Those who are in stay in, also when there is less room than there are.
    limit(1).await.unwrap();
    assert_eq!(second.ask(&[], &of_size(10)).await.unwrap().head.status, 200);
    drop(first);
    assert!(Talker::new(fleet.vip).ask(&[], &of_size(10)).await.is_err());
    limit(0).await.unwrap();
    assert_eq!(Talker::new(fleet.vip).ask(&[], &of_size(10)).await.unwrap().head.status, 200);
    drop(second);
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn who_has_seen_the_end_of_a_connection_finds_its_place_free() {
    let fleet = plain(1).await;
    fleet.put_rule(|rule| rule["serviceArguments"]["connectionsMax"] = json!(1)).await.unwrap();
    let closing = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    for _ in 0..300 {
        let mut client = Client::connect(fleet.vip).await.unwrap();
        client.send(closing).await.unwrap();
        assert_eq!(client.answer().await.unwrap().head.status, 200);
        client.closed().await;
    }
    assert_eq!(fleet.count("kvlb_client_connections_refused_total{reason=\"rule_full\"}").await.unwrap(), 0);
}

#[tokio::test]
async fn a_busy_engine_is_passed_over() {
    let fleet = plain(2).await;
    fleet.engines[0].faults().set(|plan| plan.status = Some(503));
    let mut client = Talker::new(fleet.vip);
    for _ in 0..6 {
        let answer = client.ask(&[], &of_size(100_000)).await.unwrap();
        assert_eq!((answer.head.status, answer.engine()), (200, "b"));
    }
    all_quiet(&fleet).await;
}

//! The simulated engine fails as it is told, and only as it is told.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so")]

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use kvlb_tests::engine::{Engine, EngineConfig};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::{Client, End, exchange, get, post};
use kvlb_tests::harness::kvlb::binary;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];
const SOON: Duration = Duration::from_secs(5);

async fn quick() -> Engine {
    let config = EngineConfig { prefill_us_per_token: 0.0, decode_ms_per_token: 0.0, ..EngineConfig::named("quick") };
    Engine::start(config).await.unwrap()
}

fn body(stream: bool) -> Value {
    json!({"prompt": "hello", "max_tokens": 10, "stream": stream})
}

/// Head and body of one request, as far as they come.
async fn ask(address: SocketAddr, stream: bool) -> anyhow::Result<(u16, usize, End)> {
    let answer = post(address, "/v1/completions", &body(stream)).await?;
    Ok((answer.head.status, answer.body.events().len(), answer.body.end))
}

#[tokio::test]
async fn an_answer_dies_after_the_chunks_it_was_given() {
    let engine = quick().await;
    let address = engine.addresses().http;
    for (reset, end) in [(false, End::Closed), (true, End::Reset)] {
        engine.faults().set(|plan| (plan.die_after_chunks, plan.die_with_reset) = (Some(3), reset));
        assert_eq!(ask(address, true).await.unwrap(), (200, 3, end));
        let whole = post(address, "/v1/completions", &body(false)).await.unwrap();
        let promised: usize = whole.head.header("content-length").unwrap().parse().unwrap();
        assert_eq!((whole.body.bytes().len(), whole.body.end), (promised / 2, end));
        engine.faults().set(|plan| plan.die_after_chunks = Some(0));
        assert!(ask(address, true).await.is_err(), "no head at all");
    }
    eventually(SOON, "all are gone", async || engine.running() == 0 && engine.counters().running == 0).await.unwrap();
    assert_eq!(engine.counters().aborted, 6);
    engine.faults().clear();
    assert_eq!(ask(address, true).await.unwrap(), (200, 11, End::Complete));
}

#[tokio::test]
async fn an_answer_stalls_and_goes_on_when_the_fault_is_over() {
    let engine = quick().await;
    let address = engine.addresses().http;
    engine.faults().set(|plan| plan.stall_after_chunks = Some(2));
    let mut client = Client::connect(address).await.unwrap();
    client.request("POST", "/v1/completions", &JSON, body(true).to_string().as_bytes()).await.unwrap();
    client.head().await.unwrap();
    for _ in 0..2 {
        client.chunk().await.unwrap().unwrap();
    }
    assert!(timeout(Duration::from_millis(100), client.chunk()).await.is_err());
    engine.faults().clear();
    let mut rest = 0;
    while client.chunk().await.unwrap().is_some() {
        rest += 1;
    }
    assert_eq!(rest, 9);
    engine.faults().set(|plan| plan.stall_before_head = true);
    assert!(timeout(Duration::from_millis(100), ask(address, false)).await.is_err());
    assert_eq!(get(address, "/health").await.unwrap().head.status, 200, "only inference stalls");
    engine.faults().set(|plan| (plan.stall_before_head, plan.pause) = (false, true));
    assert!(timeout(Duration::from_millis(100), ask(address, false)).await.is_err());
    engine.faults().clear();
    assert_eq!(ask(address, false).await.unwrap().0, 200);
}

#[tokio::test]
async fn statuses_are_injected_at_the_rate_asked_for() {
    let engine = quick().await;
    let address = engine.addresses().http;
    for status in [429, 500, 503] {
        engine.faults().set(|plan| plan.status = Some(status));
        let answer = post(address, "/v1/completions", &body(false)).await.unwrap();
        assert_eq!(
            (answer.head.status, answer.body.json()["error"]["code"].as_u64()),
            (status, Some(u64::from(status)))
        );
        assert_eq!(answer.engine(), "quick");
    }
    engine.faults().set(|plan| plan.status_fraction = 0.3);
    let mut failed = 0;
    for _ in 0..200 {
        failed += usize::from(ask(address, false).await.unwrap().0 == 503);
    }
    assert!((30..90).contains(&failed), "{failed}");
    engine.faults().set(|plan| (plan.health_status, plan.health_delay_ms) = (Some(503), Some(50)));
    let start = Instant::now();
    assert_eq!(get(address, "/health").await.unwrap().head.status, 503);
    assert!(start.elapsed() >= Duration::from_millis(50));
}

#[tokio::test]
async fn a_port_that_refuses_at_random_never_breaks_a_connection_it_took() {
    let engine = quick().await;
    let address = engine.addresses().http;
    engine.faults().set(|plan| (plan.refuse_http_fraction, plan.refuse_http_slot_ms) = (0.5, 3));
    let (mut served, mut refused) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(30);
    while (served < 200 || refused < 200) && Instant::now() < deadline {
        match Client::connect(address).await {
            Err(cause) => {
                assert_eq!(cause.kind(), std::io::ErrorKind::ConnectionRefused);
                refused += 1;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Ok(mut client) => {
                client.request("POST", "/v1/completions", &JSON, body(false).to_string().as_bytes()).await.unwrap();
                assert_eq!(client.answer().await.unwrap().head.status, 200);
                served += 1;
            }
        }
    }
    assert!(served >= 200 && refused >= 200, "{served} served, {refused} refused");
    engine.faults().clear();
    eventually(SOON, "it listens again", async || TcpStream::connect(address).await.is_ok()).await.unwrap();
    engine.faults().set(|plan| plan.refuse_http = true);
    eventually(SOON, "it refuses all", async || TcpStream::connect(address).await.is_err()).await.unwrap();
}

#[tokio::test]
async fn connections_are_reset_after_they_were_accepted() {
    let engine = quick().await;
    let address = engine.addresses().http;
    engine.faults().set(|plan| plan.reset_http_fraction = 1.0);
    let mut client = Client::connect(address).await.unwrap();
    assert_eq!(client.closed().await, End::Reset);
    assert_eq!(engine.counters().seen, 0);
    engine.faults().clear();
    assert_eq!(ask(address, false).await.unwrap().0, 200);
}

#[tokio::test]
async fn idle_connections_are_closed_after_the_keep_alive_time_and_not_before() {
    let engine = quick().await;
    engine.faults().set(|plan| plan.keep_alive_ms = Some(150));
    let address = engine.addresses().http;
    let mut untouched = Client::connect(address).await.unwrap();
    let mut client = Client::connect(address).await.unwrap();
    for pause in [0, 50, 50] {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        client.request("POST", "/v1/completions", &JSON, body(true).to_string().as_bytes()).await.unwrap();
        assert_eq!(client.answer().await.unwrap().body.end, End::Complete);
    }
    let start = Instant::now();
    assert_eq!(timeout(SOON, client.closed()).await.unwrap(), End::Closed);
    assert!(start.elapsed() >= Duration::from_millis(140), "{:?}", start.elapsed());
    // One that has not asked yet may take its time.
    assert!(timeout(Duration::from_millis(50), untouched.closed()).await.is_err());
    untouched.request("GET", "/health", &[], b"").await.unwrap();
    assert_eq!(untouched.answer().await.unwrap().head.status, 200);
}

#[tokio::test]
async fn stopping_answers_what_is_under_way_and_killing_cuts_it() {
    let config = EngineConfig { decode_ms_per_token: 10.0, ..EngineConfig::named("slow") };
    for kill in [false, true] {
        let mut engine = Engine::start(config.clone()).await.unwrap();
        let mut client = Client::connect(engine.addresses().http).await.unwrap();
        let idle = Client::connect(engine.addresses().http).await.unwrap();
        client.request("POST", "/v1/completions", &JSON, body(true).to_string().as_bytes()).await.unwrap();
        let head = client.head().await.unwrap();
        if kill {
            engine.kill().await;
            assert_ne!(client.body(&head).await.unwrap().end, End::Complete);
        } else {
            let (body, ()) = tokio::join!(client.body(&head), engine.stop());
            let body = body.unwrap();
            assert_eq!((body.events().len(), body.end), (11, End::Complete));
        }
        drop(idle);
        assert!(TcpStream::connect(engine.addresses().http).await.is_err());
    }
}

#[tokio::test]
async fn faults_are_set_over_http_and_a_wrong_one_changes_nothing() {
    let engine = quick().await;
    let address = engine.addresses().http;
    let set = async |fault: Value| post(address, "/debug/fault", &fault).await.unwrap();
    assert_eq!(set(json!({"status": 503})).await.body.json()["status"], 503);
    assert_eq!(ask(address, false).await.unwrap().0, 503);
    let refused = set(json!({"status": 500, "statu": 1})).await;
    assert_eq!(refused.head.status, 400);
    assert!(refused.body.text().contains("statu"), "{}", refused.body.text());
    assert_eq!(get(address, "/debug/fault").await.unwrap().body.json()["status"], 503);
    assert_eq!(set(json!({"clear": true})).await.body.json()["status"], Value::Null);
    assert_eq!(ask(address, false).await.unwrap().0, 200);
}

#[tokio::test]
async fn odd_requests_are_answered_and_never_end_the_engine() {
    let engine = quick().await;
    let address = engine.addresses().http;
    let bodies: [(&[u8], u16); 14] = [
        (b"[]", 400),
        (b"\"x\"", 400),
        (b"{}", 400),
        (b"{\"prompt\": []}", 400),
        (b"{\"prompt\": \"\"}", 400),
        (b"{\"prompt\": [-1]}", 400),
        (b"{\"prompt\": [[1],[\"x\"]]}", 400),
        (b"{\"prompt\": [4294967296]}", 400),
        (b"{\"prompt\": \"x\", \"max_tokens\": 0}", 400),
        (b"{\"prompt\": \"x\", \"max_tokens\": 18446744073709551615}", 400),
        (b"{\"prompt\": \"x\", \"n\": 0}", 400),
        (b"{\"prompt\": \"x\", \"max_tokens\": \"y\"}", 400),
        (b"{\"prompt\": \"x\", \"n\": 3, \"max_tokens\": 1}", 200),
        (b"\xff\xfe", 400),
    ];
    for (body, status) in bodies {
        let answer = exchange(address, "POST", "/v1/completions", &JSON, body).await.unwrap();
        assert_eq!(answer.head.status, status, "{}: {}", String::from_utf8_lossy(body), answer.body.text());
    }
    let chat = exchange(
        address,
        "POST",
        "/v1/chat/completions",
        &JSON,
        b"{\"messages\": [{\"content\": [{\"type\": \"image_url\"}]}]}",
    );
    assert_eq!(chat.await.unwrap().head.status, 400);
    for (method, path, status) in [("GET", "/v1/completions", 405), ("PUT", "/health", 405), ("DELETE", "/x", 404)] {
        assert_eq!(exchange(address, method, path, &[], b"").await.unwrap().head.status, status, "{method} {path}");
    }
    assert_eq!(engine.counters().running, 0);
}

/// Ends a child when the test does, however it ends.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        if self.0.kill().is_ok() {
            drop(self.0.wait());
        }
    }
}

#[tokio::test]
async fn the_program_says_where_it_listens_and_ends_cleanly_on_sigterm() {
    let mut command = Command::new(binary("sim-engine").unwrap());
    command.args(["--name", "own", "--port", "0", "--events-port", "0", "--seed", "0"]).stdout(Stdio::piped());
    let mut child = Ended(command.spawn().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.0.stdout.take().unwrap()), &mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], u16::try_from(ready["http_port"].as_u64().unwrap()).unwrap()));
    let answer = post(address, "/v1/completions", &body(false)).await.unwrap();
    assert_eq!((answer.head.status, answer.engine()), (200, "own"));
    let dump = get(address, "/debug/blocks").await.unwrap().body.json();
    assert_eq!(dump["none_hash"], "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e");
    let id = nix::unistd::Pid::from_raw(i32::try_from(child.0.id()).unwrap());
    nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).unwrap();
    let mut status = None;
    let exited = eventually(SOON, "it ends", async || {
        status = child.0.try_wait().unwrap();
        status.is_some()
    });
    exited.await.unwrap();
    assert!(status.unwrap().success());
}

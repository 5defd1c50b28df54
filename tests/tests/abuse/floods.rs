//! Too much of everything at once: kvlb sheds load, says so, and is as before afterwards.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::Client;
use kvlb_tests::harness::kvlb::{KvlbConfig, binary};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

use super::stage::{SOON, Stage, completion, cpu_time, post};

const LOAD: &str = "kvlb_endpoint_load{ep_idx=\"0\",service=\"1\"}";

fn stream(tokens: u64) -> Vec<u8> {
    let body = json!({"model": "tiny", "prompt": "a stream", "max_tokens": tokens, "ignore_eos": true, "stream": true});
    post("/v1/completions", &[], body.to_string().as_bytes())
}

/// Memory and descriptors return near where they were, and nothing is in flight.
async fn assert_back(stage: &Stage, memory: u64, descriptors: usize, allowed: u64) {
    let idle = async || {
        stage.kvlb.metric(LOAD).await.unwrap() < 0.5
            && stage.kvlb.metric("kvlb_client_connections_open").await.unwrap() < 0.5
            && stage.descriptors() <= descriptors + 16
    };
    let waited = eventually(SOON, "connections and requests are gone", idle).await;
    assert!(
        waited.is_ok(),
        "{} descriptors and not {descriptors}; load {:?}",
        stage.descriptors(),
        stage.kvlb.metric(LOAD).await
    );
    let grown = stage.memory().saturating_sub(memory);
    assert!(grown < allowed, "{} MB more", grown >> 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_aborted_connections_leave_nothing() {
    let stage = Stage::set(1, json!({})).await;
    let whole = stream(100);
    let abort = async |count: usize| {
        for number in 0..count {
            let mut client = Client::connect(stage.vip()).await.unwrap();
            match number % 5 {
                // Nothing, half a head, half a body, a request and no patience, a stream cut after its first piece.
                0 => {}
                1 => client.send(&whole[..20]).await.unwrap(),
                2 => client.send(&whole[..whole.len() - 5]).await.unwrap(),
                3 => client.send(&whole).await.unwrap(),
                _ => {
                    client.send(&whole).await.unwrap();
                    client.head().await.unwrap();
                }
            }
            if number % 2 == 0 {
                socket2::SockRef::from(client.socket()).set_linger(Some(Duration::ZERO)).unwrap();
            }
        }
    };
    // Buffers that are kept for reuse, and an allocator's habits, come first.
    abort(300).await;
    eventually(SOON, "idle", async || stage.kvlb.metric(LOAD).await.unwrap() < 0.5).await.unwrap();
    let (memory, descriptors) = (stage.memory(), stage.descriptors());
    abort(2000).await;
    assert_back(&stage, memory, descriptors, 16 << 20).await;
    let running = async || stage.engines[0].counters().running == 0;
    eventually(SOON, "the engine is left alone", running).await.unwrap();
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_thousand_connections_at_once_come_and_go() {
    let stage = Stage::set(1, json!({})).await;
    let (memory, descriptors) = (stage.memory(), stage.descriptors());
    let mut open = Vec::with_capacity(3000);
    for _ in 0..3000 {
        open.push(Client::connect(stage.vip()).await.unwrap());
    }
    // All are taken, and the last is served as the first.
    let taken = async || stage.kvlb.metric("kvlb_client_connections_open").await.unwrap() > 2999.5;
    eventually(SOON, "all are taken", taken).await.unwrap();
    for client in [0, 1500, 2999] {
        let body = completion("hello").to_string();
        open[client].send(&post("/v1/completions", &[], body.as_bytes())).await.unwrap();
        assert_eq!(open[client].answer().await.unwrap().head.status, 200);
    }
    let per_connection = stage.memory().saturating_sub(memory) / 3000;
    assert!(per_connection < 20 << 10, "{per_connection} bytes for a connection that only waits");
    drop(open);
    assert_back(&stage, memory, descriptors, 64 << 20).await;
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_hundred_streams_a_third_is_aborted_and_the_others_end_whole() {
    let stage = Stage::set(2, json!({"kvLoadFloor": 1000})).await;
    let mut streams = JoinSet::new();
    for number in 0..300 {
        let mut client = Client::connect(stage.vip()).await.unwrap();
        streams.spawn(async move {
            client.send(&stream(40)).await.unwrap();
            let head = client.head().await.unwrap();
            assert_eq!(head.status, 200);
            if number % 3 == 0 {
                client.chunk().await.unwrap();
                return;
            }
            let body = client.body(&head).await.unwrap();
            assert_eq!(body.events().last().map(String::as_str), Some("[DONE]"), "{:?}", body.end);
        });
    }
    while let Some(ended) = streams.join_next().await {
        ended.unwrap();
    }
    let over = async || stage.engines.iter().all(|engine| engine.counters().running == 0);
    eventually(SOON, "the engines are idle", over).await.unwrap();
    eventually(SOON, "nothing is in flight", async || stage.kvlb.metric(LOAD).await.unwrap() < 0.5).await.unwrap();
    stage.close().await;
}

/// An endpoint that answers every request with a chunked body that never ends, as fast as it is taken.
struct Fountain {
    address: SocketAddr,
    sent: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Drop for Fountain {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fountain {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, sent) = (listener.local_addr().unwrap(), Arc::new(AtomicU64::new(0)));
        let counter = Arc::clone(&sent);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let counter = Arc::clone(&counter);
                connections.spawn(async move {
                    let mut request = [0; 4096];
                    if !matches!(stream.read(&mut request).await, Ok(length) if request[..length].starts_with(b"POST"))
                    {
                        return;
                    }
                    let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
                    let chunk = [&b"10000\r\n"[..], &vec![b'x'; 0x10000], b"\r\n"].concat();
                    let mut sent = stream.write_all(head).await;
                    while sent.is_ok() {
                        sent = stream.write_all(&chunk).await;
                        counter.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                    }
                });
            }
        });
        Self { address, sent, task }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_readers_of_endless_answers_hold_little_memory_and_nobody_else() {
    let stage = Stage::set(1, json!({})).await;
    let fountain = Fountain::start().await;
    let mut rule = stage.place.rule(1, &json!({"port": 8090, "kvExactMode": 0, "monitor": false}));
    rule["endpoints"] = json!([{"endpointIP": "127.0.0.1", "targetPort": fountain.address.port()}]);
    stage.create(&rule).await;
    let vip = stage.place.at(100, 8090);
    eventually(SOON, "the other VIP is bound", async || Client::connect(vip).await.is_ok()).await.unwrap();
    let before = stage.memory();
    let mut slow = Vec::new();
    for _ in 0..50 {
        let mut client = Client::connect(vip).await.unwrap();
        socket2::SockRef::from(client.socket()).set_recv_buffer_size(4096).unwrap();
        client.send(&stream(1)).await.unwrap();
        assert_eq!(client.head().await.unwrap().status, 200);
        slow.push(client);
    }
    // Until no byte moves any more: all buffers are full.
    let mut last = 0;
    let full = async || {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = fountain.sent.load(Ordering::Relaxed);
        std::mem::replace(&mut last, now) == now
    };
    eventually(SOON, "the endpoint is held back", full).await.unwrap();
    let grown = stage.memory().saturating_sub(before);
    assert!(grown < 32 << 20, "{} MB for 50 readers", grown >> 20);
    stage.ask(&completion("others are served")).await;
    drop(slow);
    let gone = async || stage.kvlb.metric("kvlb_client_connections_open").await.unwrap() < 1.5;
    eventually(SOON, "they are gone", gone).await.unwrap();
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_descriptors_it_sheds_connections_and_recovers_and_blames_nobody() {
    let stage = Stage::set_limited(160).await;
    let refusals = async |reason: &str| {
        let series = format!("kvlb_client_connections_refused_total{{reason=\"{reason}\"}}");
        stage.kvlb.metric(&series).await.unwrap()
    };
    // More clients than there are descriptors for: the first are kept, the others reset.
    let mut kept = connections(100, stage.vip()).await;
    let shed = async || refusals("too_many").await > 0.5;
    eventually(SOON, "some are turned away", shed).await.unwrap();
    // Then the API's connections take what is left, so that nothing can be opened or accepted any more.
    let idle = connections(150, stage.kvlb.api_address()).await;
    let full = async || stage.descriptors() >= 159;
    eventually(SOON, "all descriptors are in use", full).await.unwrap();
    let mut answered = 0;
    for client in &mut kept {
        let request = post("/v1/completions", &[], completion("full").to_string().as_bytes());
        if client.send(&request).await.is_err() {
            continue;
        }
        match tokio::time::timeout(Duration::from_secs(5), client.answer()).await {
            Ok(Ok(answer)) if answer.head.status == 503 => {
                assert_eq!(answer.head.header("x-kvlb-error"), Some("out_of_resources"));
                answered += 1;
            }
            Ok(Ok(answer)) => assert_eq!(answer.head.status, 200, "{}", answer.body.text()),
            // One of those that were turned away.
            Ok(Err(_)) => {}
            Err(late) => panic!("a client that was taken hangs: {late}"),
        }
    }
    assert!(answered > 0, "clients are told that there is no descriptor for the engine's side");
    // Whoever comes now waits in the kernel's queue, and the wait costs nothing.
    let waiting = connections(20, stage.vip()).await;
    let cpu = cpu_time(stage.kvlb.id());
    tokio::time::sleep(Duration::from_secs(3)).await;
    let used = cpu_time(stage.kvlb.id()).saturating_sub(cpu);
    assert!(used < Duration::from_millis(900), "{used:?} of processor time in 3 s of waiting for a descriptor");
    drop((kept, waiting, idle));
    let again = async || stage.try_ask(&completion("again")).await.is_ok_and(|answer| answer.head.status == 200);
    eventually(SOON, "it serves again", again).await.unwrap();
    assert!(refusals("accept_failed").await > 0.5);
    let log = stage.kvlb.log();
    assert!(!log.contains("endpoint is down"), "{log}");
    stage.close().await;
}

/// Connections that the kernel makes, whether kvlb takes them or not.
async fn connections(count: usize, address: SocketAddr) -> Vec<Client> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.extend(Client::connect(address).await);
    }
    clients
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listeners_leave_descriptors_for_traffic() {
    let stage = Stage::set_limited(256).await;
    // 200 ports take 400 sockets, of 256 descriptors.
    stage.create(&stage.place.rule(1, &json!({"port": 9001, "portMax": 9200}))).await;
    let told = async || {
        let (_, status) = stage.kvlb.api("GET", "/netlox/v1/status", None).await.unwrap();
        status["degraded"].to_string().contains("half of the open files allowed")
    };
    eventually(SOON, "the status says what is missing", told).await.unwrap();
    stage.ask(&completion("the first rule is served")).await;
    assert!(Client::connect(stage.place.at(100, 9001)).await.is_ok(), "and some of the second's ports");
    stage.close().await;
}

impl Stage {
    /// One engine, and a daemon that may open so many files.
    async fn set_limited(files: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("limited");
        let kvlb = binary("kvlb").unwrap();
        std::fs::write(&script, format!("#!/bin/sh\nulimit -n {files}\nexec {} \"$@\"\n", kvlb.display())).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
        Self::with_program(&script, 1, json!({}), |config| config, |engine| engine).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_daemon_uses_next_to_no_processor_time() {
    for io in ["uring", "epoll"] {
        let with_io = |mut config: KvlbConfig| {
            config.args.extend(["--io".into(), io.into()]);
            config
        };
        let stage = Stage::with(3, json!({}), with_io, |engine| engine).await;
        let mut waiting = Vec::new();
        for _ in 0..100 {
            let mut client = Client::connect(stage.vip()).await.unwrap();
            client.send(&post("/v1/completions", &[], completion("hello").to_string().as_bytes())).await.unwrap();
            client.answer().await.unwrap();
            waiting.push(client);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = cpu_time(stage.kvlb.id());
        tokio::time::sleep(Duration::from_secs(3)).await;
        let used = cpu_time(stage.kvlb.id()).saturating_sub(before);
        assert!(used <= Duration::from_millis(150), "{io}: {used:?} in 3 s");
        drop(waiting);
        stage.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_outlives_a_flood_of_its_own() {
    let stage = Stage::set(1, json!({})).await;
    let api = stage.kvlb.api_address();
    let descriptors = stage.descriptors();
    let mut idle = Vec::new();
    for number in 0..250 {
        let mut client = Client::connect(api).await.unwrap();
        if number % 2 == 0 {
            client.send(b"GET /netlox/v1/version HT").await.unwrap();
        }
        idle.push(client);
    }
    assert!(stage.descriptors() < descriptors + 150, "they do not take all descriptors");
    let answer = tokio::time::timeout(SOON, stage.kvlb.metric("kvlb_panics_total")).await;
    assert!(answer.is_ok_and(|value| value.is_ok()), "who asks is let in before who says nothing");
    drop(idle);
    let back = async || stage.descriptors() <= descriptors + 8;
    eventually(SOON, "the API's connections are gone", back).await.unwrap();
    stage.close().await;
}

//! An endpoint's event stream is followed through everything that befalls it, over real ZeroMQ sockets.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod golden;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kvlb::clock;
use kvlb::contract::attest::{Contract, Leg};
use kvlb::contract::{BlockHash, BlockSize, HashAlgo, KeyEra, NoneSeed, Rehash, TokenId};
use kvlb::fleet::Keying;
use kvlb::ingest::{ReplayPort, Subscription, follow};
use kvlb::state::index::{Index, IndexConfig};
use kvlb::state::kv::{EndpointKv, Naming, ReplayState};
use rmpv::Value as Packed;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use zeromq::{Endpoint, PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Everything here is expected within a second or two; a busy machine gets more.
const DEADLINE: Duration = Duration::from_secs(20);

type History = Arc<Mutex<Vec<Bytes>>>;

/// An engine's event side: a publisher and, where it has one, a replay socket over all that it published.
struct Engine {
    publisher: PubSocket,
    port: u16,
    replay_port: Option<u16>,
    history: History,
    _replayer: Option<Task>,
}

struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// How an engine answers replays.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answers {
    None,
    /// vLLM to 0.25.
    WithoutTopic,
    /// vLLM from 0.26.
    WithTopic,
}

impl Engine {
    async fn start(answers: Answers) -> Self {
        Self::start_at(0, 0, answers).await
    }

    async fn start_at(port: u16, replay_port: u16, answers: Answers) -> Self {
        let mut publisher = PubSocket::new();
        let port = bind(&mut publisher, port).await;
        let history = History::default();
        let (replayer, replay_port) = if answers == Answers::None {
            (None, None)
        } else {
            let mut router = RouterSocket::new();
            let port = bind(&mut router, replay_port).await;
            let task = Task(tokio::spawn(serve_replays(router, Arc::clone(&history), answers)));
            (Some(task), Some(port))
        };
        Self { publisher, port, replay_port, history, _replayer: replayer }
    }

    /// Publishes a batch under the next number.
    async fn publish(&mut self, batch: impl Into<Bytes>) {
        let batch = batch.into();
        let mut history = self.history.lock().await;
        let seq = Bytes::copy_from_slice(&(history.len() as u64).to_be_bytes());
        history.push(batch.clone());
        drop(history);
        self.publisher.send(vec![Bytes::new(), seq, batch].try_into().unwrap()).await.unwrap();
    }

    /// Numbers a batch that nobody hears.
    async fn lose(&self, batch: impl Into<Bytes>) {
        self.history.lock().await.push(batch.into());
    }

    async fn send_raw(&mut self, frames: Vec<Bytes>) {
        self.publisher.send(frames.try_into().unwrap()).await.unwrap();
    }
}

async fn bind(socket: &mut impl Socket, port: u16) -> u16 {
    // A port that was just closed may need a moment.
    for _ in 0..100 {
        if let Ok(endpoint) = socket.bind(&format!("tcp://127.0.0.1:{port}")).await {
            let Endpoint::Tcp(_, port) = endpoint else { panic!("{endpoint}") };
            return port;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("port {port} does not come free");
}

async fn serve_replays(mut router: RouterSocket, history: History, answers: Answers) {
    while let Ok(request) = router.recv().await {
        let frames = request.into_vec();
        let (peer, start) = (frames[0].clone(), u64::from_be_bytes(frames[2][..].try_into().unwrap()));
        let answer = |seq: u64, batch: Bytes| -> ZmqMessage {
            let mut frames = vec![peer.clone(), Bytes::new()];
            if answers == Answers::WithTopic {
                frames.push(Bytes::new());
            }
            frames.extend([Bytes::copy_from_slice(&seq.to_be_bytes()), batch]);
            frames.try_into().unwrap()
        };
        let batches: Vec<_> = history.lock().await.iter().cloned().enumerate().collect();
        for (seq, batch) in batches.into_iter().skip(usize::try_from(start).unwrap()) {
            router.send(answer(seq as u64, batch)).await.unwrap();
        }
        router.send(answer(u64::MAX, Bytes::new())).await.unwrap();
    }
}

/// kvlb's side.
struct Follower {
    kv: Arc<EndpointKv>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Follower {
    fn start(subscription: Subscription, naming: &Naming) -> Self {
        let index = Arc::new(Index::new(IndexConfig::default()));
        let kv = Arc::new(EndpointKv::new(index, naming));
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(follow(subscription, Arc::clone(&kv), stopped));
        Self { kv, stop, task }
    }

    fn of(engine: &Engine) -> Self {
        Self::start(subscription(engine.port, engine.replay_port), &naming())
    }

    async fn holds(&self, names: &[u64]) {
        let names: Vec<_> = names.iter().map(|&name| BlockHash(name)).collect();
        until("the blocks", || self.kv.names() == names, || format!("{:?}", self.kv)).await;
    }

    /// Publishes a batch again and again until it holds these blocks: a publisher says nothing of who listens.
    async fn hears(&self, engine: &mut Engine, batch: &[u8], names: &[u64]) {
        let names: Vec<_> = names.iter().map(|&name| BlockHash(name)).collect();
        let start = clock::now();
        while self.kv.names() != names {
            assert!(start.elapsed() < DEADLINE, "waited in vain for {names:?}: {:?}", self.kv);
            engine.publish(batch.to_vec()).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn counts(&self, what: &str, counter: impl Fn(&EndpointKv) -> &AtomicU64, number: u64) {
        let read = || counter(&self.kv).load(Ordering::Relaxed);
        until(what, || read() == number, || format!("{} and not {number}", read())).await;
    }

    async fn stop(self) {
        self.stop.send(true).unwrap();
        tokio::time::timeout(DEADLINE, self.task).await.unwrap().unwrap();
    }
}

fn subscription(port: u16, replay_port: Option<u16>) -> Subscription {
    Subscription {
        label: "test".into(),
        feed: 0,
        host: "127.0.0.1".into(),
        port,
        replay: watch::channel(replay_port.map_or(ReplayPort::Off, ReplayPort::Port)).1,
        http: None,
    }
}

/// Names stay as the engine gives them: what is tested here is the stream.
fn naming() -> Naming {
    Naming {
        algo: HashAlgo::Sha256Cbor,
        seed: NoneSeed::Text("0".into()),
        block_size: BlockSize::new(16).unwrap(),
        keying: Keying::Parity,
        rehash: Rehash::new(1),
    }
}

async fn until(what: &str, condition: impl Fn() -> bool, found: impl Fn() -> String) {
    let start = clock::now();
    while !condition() {
        assert!(start.elapsed() < DEADLINE, "waited in vain for {what}: {}", found());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A batch at a time of its own.
fn batch(time: f64, events: Vec<Packed>) -> Vec<u8> {
    let mut out = Vec::new();
    let batch = Packed::Array(vec![time.into(), Packed::Array(events), 0.into()]);
    rmpv::encode::write_value(&mut out, &batch).unwrap();
    out
}

fn stored(names: &[u64]) -> Packed {
    let names = Packed::Array(names.iter().map(|&name| name.into()).collect());
    Packed::Array(vec!["BlockStored".into(), names, Packed::Nil, Packed::Array(Vec::new()), 0.into()])
}

fn removed(name: u64) -> Packed {
    let fields = [("type", "BlockRemoved".into()), ("block_hashes", Packed::Array(vec![name.into()]))];
    Packed::Map(fields.into_iter().map(|(key, value)| (key.into(), value)).collect())
}

/// Publishes empty batches until one is heard: a publisher says nothing of who listens.
async fn until_heard(engine: &mut Engine, follower: &Follower) {
    while follower.kv.status(clock::now()).sequence.is_none() {
        engine.publish(batch(0.5, Vec::new())).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // And until the last of them is.
    let last = engine.history.lock().await.len() as u64 - 1;
    let heard = || follower.kv.status(clock::now()).sequence.map(|seq| seq.0);
    until("the last of the batches", || heard() == Some(last), || format!("{:?}", heard())).await;
}

// Recorded engines ---------------------------------------------------------------------------------------------------

/// A recorded stream: the payloads of its frames, and the blocks that the engine held at their end.
struct Recording {
    batches: Vec<Bytes>,
    held: Vec<u64>,
}

fn recording(name: &str) -> Recording {
    let lines = golden::lines(&format!("vllm-0.32.0/events/{name}.jsonl.gz"));
    let frames: Vec<_> = lines.iter().filter(|line| line["t"] == "frame").collect();
    for (number, frame) in frames.iter().enumerate() {
        assert_eq!(frame["seq"].as_u64(), Some(number as u64), "one stream without gaps");
    }
    Recording {
        batches: frames.iter().map(|frame| golden::hex(frame["frames"][2].as_str().unwrap()).into()).collect(),
        held: held(frames.iter().flat_map(|frame| frame["decoded"][1].as_array().unwrap())),
    }
}

/// Counts copies per block of the group with full attention, in the plainest way.
fn held<'a>(events: impl Iterator<Item = &'a Value> + Clone) -> Vec<u64> {
    let full = events.clone().find(|event| event["kv_cache_spec_kind"] == "full_attention");
    let full = full.unwrap()["group_idx"].clone();
    let mut copies: BTreeMap<u64, u32> = BTreeMap::new();
    for event in events {
        let names = event["block_hashes"].as_array().into_iter().flatten().map(name);
        match event["type"].as_str().unwrap() {
            "AllBlocksCleared" => copies.clear(),
            _ if event["group_idx"] != full => {}
            "BlockStored" => names.for_each(|name| *copies.entry(name).or_insert(0) += 1),
            "BlockRemoved" => names.for_each(|name| *copies.get_mut(&name).unwrap() -= 1),
            other => panic!("{other}"),
        }
        copies.retain(|_, count| *count > 0);
    }
    copies.into_keys().collect()
}

fn name(hash: &Value) -> u64 {
    let last_8 = |bytes: Vec<u8>| u64::from_be_bytes(*bytes.last_chunk().unwrap());
    golden::hex_value(hash).map_or_else(|| hash.as_u64().unwrap(), last_8)
}

/// A rule, and the verdict to expect on a recorded engine.
struct Case {
    recording: &'static str,
    algo: HashAlgo,
    seed: NoneSeed,
    block_size: u32,
    verdict: Result<(), (Leg, &'static str)>,
}

fn cases() -> Vec<Case> {
    let zero = || NoneSeed::Text("0".into());
    let agreed = |recording, block_size| Case {
        recording,
        algo: HashAlgo::Sha256Cbor,
        seed: zero(),
        block_size,
        verdict: Ok(()),
    };
    let basic = "basic_b16_sha256cbor_seed0_int";
    let defaults = "small_b32_defaults_unset";
    vec![
        agreed(basic, 16),
        agreed("evict_b16_sha256cbor_seed0_int", 16),
        agreed("small_b16_sha256cbor_seed0_bytes", 16),
        agreed("hybrid_gemma3_b32_sha256cbor_seed0", 32),
        Case {
            algo: HashAlgo::XxhashCbor,
            seed: NoneSeed::Unset,
            verdict: Err((Leg::Unknown, "unprovable")),
            ..agreed("small_b16_xxhashcbor_unset_bytes", 16)
        },
        Case { verdict: Err((Leg::Algorithm, "xxhash")), ..agreed("small_b16_xxhashcbor_unset_bytes", 16) },
        Case { verdict: Err((Leg::BlockSize, "engine block size 32, rule kvBlockSize 16")), ..agreed(defaults, 16) },
        Case { verdict: Err((Leg::Algorithm, "engine algorithm sha256, rule kvHashAlgo")), ..agreed(defaults, 32) },
        Case {
            seed: NoneSeed::Text("42".into()),
            verdict: Err((Leg::Seed, "engine PYTHONHASHSEED \"0\", LLB_KV_NONE_HASH_SEED \"42\"")),
            ..agreed(basic, 16)
        },
        Case {
            algo: HashAlgo::XxhashCbor,
            verdict: Err((Leg::Algorithm, "create the rule with kvHashAlgo sha256_cbor")),
            ..agreed(basic, 16)
        },
    ]
}

async fn expect_verdict(case: &Case, kv: &EndpointKv) {
    let agrees = |contract: &Contract| match &case.verdict {
        Ok(()) => *contract == Contract::Verified,
        Err((leg, part)) => {
            contract.leg() == Some(*leg) && contract.detail().is_some_and(|detail| detail.contains(part))
        }
    };
    until("the verdict", || agrees(&kv.contract()), || format!("{} {:?}", case.recording, kv.contract())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recorded_engine_that_was_warm_before_is_known_in_full_by_replay() {
    for (case, answers) in cases().iter().zip([Answers::WithTopic, Answers::WithoutTopic].into_iter().cycle()) {
        let recording = recording(case.recording);
        let engine = Engine::start(answers).await;
        for batch in &recording.batches {
            engine.lose(batch.clone()).await;
        }
        let size = BlockSize::new(case.block_size).unwrap();
        let rule = Naming { algo: case.algo, seed: case.seed.clone(), block_size: size, ..naming() };
        let follower = Follower::start(subscription(engine.port, engine.replay_port), &rule);
        follower.holds(&recording.held).await;
        expect_verdict(case, &follower.kv).await;
        assert_eq!(follower.kv.status(clock::now()).replay, ReplayState::Applied);
        follower.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recorded_engine_is_followed_live_to_the_same_blocks() {
    for case in cases() {
        let recording = recording(case.recording);
        let mut engine = Engine::start(Answers::WithTopic).await;
        let size = BlockSize::new(case.block_size).unwrap();
        let rule = Naming { algo: case.algo, seed: case.seed.clone(), block_size: size, ..naming() };
        let follower = Follower::start(subscription(engine.port, engine.replay_port), &rule);
        for batch in &recording.batches {
            engine.publish(batch.clone()).await;
        }
        let last = recording.batches.len() as u64 - 1;
        let sequence = || follower.kv.status(clock::now()).sequence.map(|seq| seq.0);
        // The last batch may be one that nobody was there to hear; it is not a gap until another follows.
        engine.publish(batch(9e9, Vec::new())).await;
        until("the last batch", || sequence() == Some(last + 1), || format!("{:?}", sequence())).await;
        follower.holds(&recording.held).await;
        expect_verdict(&case, &follower.kv).await;
        let counters = &follower.kv.counters;
        assert_eq!((counters.missed.load(Ordering::Relaxed), counters.undecodable.load(Ordering::Relaxed)), (0, 0));
        assert_eq!(counters.unknown_removals.load(Ordering::Relaxed), 0, "each removal met its block");
        follower.stop().await;
    }
}

// Losses and lives ---------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_batch_is_replayed_at_once() {
    let mut engine = Engine::start(Answers::WithTopic).await;
    let follower = Follower::of(&engine);
    until_heard(&mut engine, &follower).await;
    engine.publish(batch(1.0, vec![stored(&[1, 2, 3])])).await;
    engine.lose(batch(2.0, vec![removed(2), stored(&[4])])).await;
    engine.publish(batch(3.0, vec![stored(&[5])])).await;
    follower.holds(&[1, 3, 4, 5]).await;
    follower.counts("gaps", |kv| &kv.counters.gaps, 1).await;
    assert_eq!(follower.kv.counters.missed.load(Ordering::Relaxed), 0);
    follower.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_replay_a_narrow_gap_keeps_and_a_wide_one_clears() {
    let mut engine = Engine::start(Answers::None).await;
    let follower = Follower::of(&engine);
    until_heard(&mut engine, &follower).await;
    engine.publish(batch(1.0, vec![stored(&[1, 2])])).await;
    engine.lose(batch(2.0, vec![removed(2)])).await;
    engine.publish(batch(3.0, vec![stored(&[3])])).await;
    follower.holds(&[1, 2, 3]).await;
    follower.counts("missed", |kv| &kv.counters.missed, 1).await;
    for _ in 0..65 {
        engine.lose(batch(4.0, Vec::new())).await;
    }
    engine.publish(batch(5.0, vec![stored(&[9])])).await;
    follower.holds(&[9]).await;
    assert_eq!(follower.kv.counters.gaps.load(Ordering::Relaxed), 2);
    assert_eq!(follower.kv.status(clock::now()).replay, ReplayState::Off);
    follower.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_engine_starts_with_nothing() {
    for answers in [Answers::WithTopic, Answers::WithoutTopic, Answers::None] {
        let mut engine = Engine::start(answers).await;
        let (port, replay_port) = (engine.port, engine.replay_port.unwrap_or(0));
        let follower = Follower::of(&engine);
        until_heard(&mut engine, &follower).await;
        engine.publish(batch(1.0, vec![stored(&[1, 2, 3])])).await;
        follower.holds(&[1, 2, 3]).await;
        drop(engine);
        until("the loss", || !follower.kv.status(clock::now()).connected, String::new).await;
        // Long enough down to refuse a connection, which is all there is to see without a replay socket.
        tokio::time::sleep(Duration::from_millis(700)).await;
        let mut engine = Engine::start_at(port, replay_port, answers).await;
        follower.hears(&mut engine, &batch(100.0, vec![stored(&[3, 4])]), &[3, 4]).await;
        follower.counts("restarts", |kv| &kv.counters.restarts, 1).await;
        follower.counts("reconnects", |kv| &kv.counters.reconnects, 1).await;
        follower.stop().await;
    }
}

/// Passes connections on to a port that can be changed, and cuts them.
struct Switch {
    port: u16,
    target: Arc<AtomicU16>,
    cut: watch::Sender<u64>,
    _task: Task,
}

impl Switch {
    async fn start(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let target = Arc::new(AtomicU16::new(target));
        let (cut, cuts) = watch::channel(0);
        let to = Arc::clone(&target);
        let task = Task(tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (to, mut cuts) = (to.load(Ordering::Relaxed), cuts.clone());
                cuts.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(("127.0.0.1", to)).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        _ = cuts.changed() => {}
                    }
                });
            }
        }));
        Self { port, target, cut, _task: task }
    }

    fn switch(&self, target: u16) {
        self.target.store(target, Ordering::Relaxed);
        self.cut.send_modify(|cuts| *cuts += 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_behind_a_partition_is_seen_though_its_numbers_go_on() {
    let mut engine = Engine::start(Answers::WithTopic).await;
    let (events, replays) = (Switch::start(engine.port).await, Switch::start(engine.replay_port.unwrap()).await);
    let follower = Follower::start(subscription(events.port, Some(replays.port)), &naming());
    for number in 0..5_u32 {
        engine.publish(batch(f64::from(number), vec![stored(&[number.into()])])).await;
    }
    follower.holds(&[0, 1, 2, 3, 4]).await;
    // The next life is just as long and one batch longer.
    let mut other = Engine::start(Answers::WithTopic).await;
    for number in 0..6_u32 {
        other.publish(batch(f64::from(number) + 1000.0, vec![stored(&[u64::from(number) + 100])])).await;
    }
    replays.switch(other.replay_port.unwrap());
    events.switch(other.port);
    follower.holds(&[100, 101, 102, 103, 104, 105]).await;
    follower.counts("restarts", |kv| &kv.counters.restarts, 1).await;
    // And a cut alone changes nothing.
    events.switch(other.port);
    follower.counts("reconnects", |kv| &kv.counters.reconnects, 2).await;
    other.publish(batch(2000.0, vec![stored(&[106])])).await;
    follower.holds(&[100, 101, 102, 103, 104, 105, 106]).await;
    assert_eq!(follower.kv.counters.restarts.load(Ordering::Relaxed), 1);
    follower.stop().await;
}

/// Answers every request with one text.
async fn http(text: Arc<Mutex<String>>) -> (String, Task) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    let task = Task(tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let body = text.lock().await.clone();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            // The head comes in one piece here, and what it says does not matter.
            let mut request = Vec::with_capacity(1024);
            client.read_buf(&mut request).await.ok();
            client.write_all((head + &body).as_bytes()).await.ok();
        }
    }));
    (authority, task)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_replay_another_process_behind_a_partition_is_another_life() {
    let start = |time: u32| format!("process_start_time_seconds {time}\n");
    let metrics = Arc::new(Mutex::new(start(1)));
    let (authority, _server) = http(Arc::clone(&metrics)).await;
    let mut engine = Engine::start(Answers::None).await;
    let events = Switch::start(engine.port).await;
    let subscription = Subscription { http: Some(authority), ..subscription(events.port, None) };
    let follower = Follower::start(subscription, &naming());
    until_heard(&mut engine, &follower).await;
    engine.publish(batch(1.0, vec![stored(&[1])])).await;
    follower.holds(&[1]).await;
    let mut reconnects = 0;
    for (time, expected) in [(1, vec![1, 2]), (2, vec![2])] {
        *metrics.lock().await = start(time);
        events.switch(engine.port);
        reconnects += 1;
        follower.counts("reconnects", |kv| &kv.counters.reconnects, reconnects).await;
        follower.hears(&mut engine, &batch(2.0, vec![stored(&[2])]), &expected).await;
    }
    assert_eq!(follower.kv.counters.restarts.load(Ordering::Relaxed), 1);
    follower.stop().await;
}

// Bad company --------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_read_is_counted_and_costs_nothing_else() {
    let mut engine = Engine::start(Answers::None).await;
    let follower = Follower::of(&engine);
    until_heard(&mut engine, &follower).await;
    engine.publish(batch(1.0, vec![stored(&[1]), Packed::Nil, stored(&[2])])).await;
    engine.publish(&b"{\"not\": \"msgpack\"}"[..]).await;
    engine.publish(&b"\xdd\xff\xff\xff\xff"[..]).await;
    engine.publish(batch(2.0, vec![Packed::Array(vec!["BlockMoved".into(), 7.into()])])).await;
    engine.send_raw(vec![Bytes::from_static(b"alone")]).await;
    engine.send_raw(vec![Bytes::new(), Bytes::from_static(b"short"), Bytes::new()]).await;
    engine.publish(batch(3.0, vec![stored(&[3])])).await;
    follower.holds(&[1, 2, 3]).await;
    let counters = &follower.kv.counters;
    assert_eq!(counters.undecodable.load(Ordering::Relaxed), 3);
    assert_eq!(counters.unknown.load(Ordering::Relaxed), 1);
    assert_eq!(counters.recv_errors.load(Ordering::Relaxed), 2);
    assert_eq!((counters.reconnects.load(Ordering::Relaxed), counters.gaps.load(Ordering::Relaxed)), (0, 0));
    follower.stop().await;
}

/// A ZMTP greeting and a publisher's handshake.
fn handshake() -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    let command = b"\x05READY\x0bSocket-Type\0\0\0\x03PUB";
    bytes.extend([4, u8::try_from(command.len()).unwrap()]);
    bytes.extend(command);
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_speaks_nonsense_is_left_and_tried_again() {
    let long = |flags: u8, length: u64| [&handshake()[..], &[flags], &length.to_be_bytes()].concat();
    let nonsense = [
        Vec::new(),
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        vec![0; 200],
        vec![0xff; 200],
        handshake()[..70].to_vec(),
        long(2, 1 << 40),
        long(2, u64::MAX),
        long(3, 63 << 20),
        long(6, 1 << 30),
        [&handshake()[..], &b"\x01\x00".repeat(1000)].concat(),
        [&handshake()[..], &b"\x04\x05\x04PING"[..]].concat(),
    ];
    let count = nonsense.len() as u64;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let follower = Follower::start(subscription(port, None), &naming());
    for bytes in nonsense {
        let (mut client, _) = tokio::time::timeout(DEADLINE, listener.accept()).await.unwrap().unwrap();
        // It may be gone before all is said.
        client.write_all(&bytes).await.ok();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(listener);
    let mut engine = Engine::start_at(port, 0, Answers::None).await;
    until_heard(&mut engine, &follower).await;
    engine.publish(batch(1.0, vec![stored(&[1])])).await;
    follower.holds(&[1]).await;
    let errors = follower.kv.counters.recv_errors.load(Ordering::Relaxed);
    assert!(errors >= count - 2, "{errors} of {count}");
    follower.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_socket_that_never_answers_delays_nothing_for_long() {
    let mut engine = Engine::start(Answers::None).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let follower = Follower::start(subscription(engine.port, Some(port)), &naming());
    until("the connection", || follower.kv.status(clock::now()).connected, String::new).await;
    let state = || follower.kv.status(clock::now()).replay;
    assert_eq!(state(), ReplayState::Pending);
    until("the verdict", || state() == ReplayState::Unavailable, || format!("{:?}", state())).await;
    until_heard(&mut engine, &follower).await;
    engine.publish(batch(1.0, vec![stored(&[1])])).await;
    follower.holds(&[1]).await;
    follower.stop().await;
}

// The rest -----------------------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_is_applied_in_full() {
    let mut engine = Engine::start(Answers::WithTopic).await;
    let follower = Follower::of(&engine);
    until_heard(&mut engine, &follower).await;
    for number in 0..20_000_u32 {
        engine.publish(batch(f64::from(number), vec![stored(&[u64::from(number)])])).await;
    }
    // A publisher drops what a subscriber is too slow for, and the last loss shows with the next batch only.
    let start = clock::now();
    while follower.kv.blocks() < 20_000 {
        assert!(start.elapsed() < DEADLINE, "{:?}", follower.kv.counters);
        engine.publish(batch(1e9, Vec::new())).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(follower.kv.counters.missed.load(Ordering::Relaxed), 0);
    follower.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engines_own_label_names_an_uncommon_seed_and_bounds_the_inventory() {
    let metrics =
        golden::text("vllm-0.32.0/metrics.txt.gz").replace("num_gpu_blocks=\"131072\"", "num_gpu_blocks=\"10\"");
    let (authority, _server) = http(Arc::new(Mutex::new(metrics))).await;
    let mut engine = Engine::start(Answers::WithTopic).await;
    let subscription = Subscription { http: Some(authority), ..subscription(engine.port, engine.replay_port) };
    let follower = Follower::start(subscription, &naming());
    let algo = HashAlgo::Sha256Cbor;
    let tokens: Vec<_> = (0..16).map(TokenId).collect();
    let root = algo.none_hash(&NoneSeed::Text("an uncommon seed".into())).unwrap();
    let name = algo.step(&root, &tokens, kvlb::contract::BlockExtra::default(), KeyEra::Tagged).unwrap().name();
    let ids = Packed::Array(tokens.iter().map(|token| token.0.into()).collect());
    let names = Packed::Array(vec![name.0.into()]);
    let honest = Packed::Array(vec!["BlockStored".into(), names, Packed::Nil, ids, 16.into()]);
    engine.publish(batch(1.0, vec![honest, stored(&(0..100).collect::<Vec<_>>())])).await;
    engine.publish(batch(2.0, Vec::new())).await;
    let contract = || follower.kv.contract();
    until("the leg", || contract().leg() == Some(Leg::Seed), || format!("{:?}", contract())).await;
    until("the bound", || follower.kv.blocks() == 40, || follower.kv.blocks().to_string()).await;
    assert_eq!(follower.kv.label().hash_algo.as_deref(), Some("sha256_cbor"));
    follower.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_on_ipv6_or_by_name_is_followed_and_stopping_hangs_up() {
    for (bound, host) in [("[::1]", "::1"), ("[::1]", "[::1]"), ("127.0.0.1", "localhost")] {
        let mut publisher = PubSocket::new();
        let Ok(Endpoint::Tcp(_, port)) = publisher.bind(&format!("tcp://{bound}:0")).await else {
            eprintln!("skipped for {host}: this machine has no such loopback address");
            continue;
        };
        let subscription = Subscription { host: host.into(), ..subscription(port, None) };
        let follower = Follower::start(subscription, &naming());
        until("the connection", || follower.kv.status(clock::now()).connected, || host.to_owned()).await;
        let kv = Arc::clone(&follower.kv);
        follower.stop().await;
        assert!(!kv.status(clock::now()).connected);
    }
}

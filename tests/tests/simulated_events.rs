//! The simulated engine's event stream over the `zeromq` crate, the one kvlb uses: what a subscriber sees adds up to what the engine
//! holds, through losses, cuts and restarts.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use kvlb_tests::engine::{Engine, EngineConfig};
use kvlb_tests::harness::http::{get, post};
use kvlb_tests::harness::{eventually, until_some};
use rmpv::Value as Msg;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

const SOON: Duration = Duration::from_secs(5);

/// A batch off the wire.
#[derive(Debug, Clone, PartialEq)]
struct Batch {
    sequence: u64,
    payload: Vec<u8>,
}

/// What a faithful subscriber knows: names and how many copies of each.
#[derive(Debug, Default, PartialEq)]
struct Mirror(BTreeMap<u64, usize>);

impl Mirror {
    fn apply(&mut self, batch: &Batch) {
        let value = rmpv::decode::read_value(&mut batch.payload.as_slice()).unwrap();
        for event in value.as_array().unwrap()[1].as_array().unwrap() {
            let (kind, hashes) = read(event);
            match kind {
                "BlockStored" => hashes.iter().for_each(|hash| *self.0.entry(*hash).or_default() += 1),
                "BlockRemoved" => hashes.iter().for_each(|hash| {
                    *self.0.get_mut(hash).unwrap() -= 1;
                    self.0.retain(|_, copies| *copies > 0);
                }),
                _ => self.0.clear(),
            }
        }
    }
}

/// Kind and names of an event in either form.
fn read(event: &Msg) -> (&str, Vec<u64>) {
    let field = |name: &str| {
        let fields = event.as_map()?.iter();
        fields.into_iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
    };
    let (kind, hashes) = match event.as_array() {
        Some(fields) => (&fields[0], fields.get(1)),
        None => (field("type").unwrap(), field("block_hashes")),
    };
    let kind = kind.as_str().unwrap();
    let name = |hash: &Msg| match hash {
        Msg::Binary(bytes) => u64::from_be_bytes(bytes[bytes.len() - 8..].try_into().unwrap()),
        _ => hash.as_u64().unwrap(),
    };
    (kind, hashes.and_then(Msg::as_array).map(|hashes| hashes.iter().map(name).collect()).unwrap_or_default())
}

async fn subscribe(engine: &Engine) -> SubSocket {
    let mut socket = SubSocket::new();
    let already = engine.published().subscribers;
    socket.connect(&format!("tcp://{}", engine.addresses().events.unwrap())).await.unwrap();
    socket.subscribe("").await.unwrap();
    eventually(SOON, "the subscription arrives", async || engine.published().subscribers > already).await.unwrap();
    socket
}

async fn receive(socket: &mut SubSocket) -> Batch {
    let message = timeout(SOON, socket.recv()).await.expect("a batch in time").unwrap();
    batch(&message, 0)
}

/// Reads `topic | sequence | payload` from frame `at` on.
fn batch(message: &ZmqMessage, at: usize) -> Batch {
    assert_eq!(message.len(), at + 3, "{message:?}");
    let frame = |index: usize| message.get(at + index).unwrap().to_vec();
    assert!(frame(0).is_empty(), "the topic");
    Batch { sequence: u64::from_be_bytes(frame(1).try_into().unwrap()), payload: frame(2) }
}

async fn replay(engine: &Engine, start: u64) -> Vec<ZmqMessage> {
    let mut dealer = DealerSocket::new();
    dealer.connect(&format!("tcp://{}", engine.addresses().replay.unwrap())).await.unwrap();
    let mut request = ZmqMessage::from(Vec::new());
    request.push_back(start.to_be_bytes().to_vec().into());
    dealer.send(request).await.unwrap();
    let mut answers = Vec::new();
    loop {
        let answer = timeout(SOON, dealer.recv()).await.expect("an answer in time").unwrap();
        let ended = answer.iter().any(|frame| frame.as_ref() == [0xff; 8]);
        answers.push(answer);
        if ended {
            return answers;
        }
    }
}

async fn complete(engine: &Engine, prompt: &[u32], max_tokens: usize) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": max_tokens});
    let answer = post(engine.addresses().http, "/v1/completions", &body).await.unwrap();
    assert_eq!(answer.head.status, 200, "{}", answer.body.text());
    answer.body.json()
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| seed * 1000 + i).collect()
}

#[tokio::test]
async fn a_subscriber_s_sum_is_what_the_engine_holds_under_eviction_and_load() {
    let config = EngineConfig {
        num_gpu_blocks: 60,
        prefill_us_per_token: 0.0,
        decode_ms_per_token: 0.0,
        ..EngineConfig::named("a")
    };
    let engine = Engine::start(config).await.unwrap();
    let mut socket = subscribe(&engine).await;
    let clients = (0..8_u32).map(|client| {
        let address = engine.addresses().http;
        tokio::spawn(async move {
            for round in 0..40 {
                // Shared heads, exact multiples (duplicates) and long tails, in a pool too small for all of them.
                let seed = (client * 7 + round * 3) % 11;
                let body = json!({"prompt": prompt(seed, 16 * (1 + round % 5) + client % 2 * 5), "max_tokens": 1 + round % 20});
                assert_eq!(post(address, "/v1/completions", &body).await.unwrap().head.status, 200);
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    let published = engine.published();
    assert!(published.batches > 100 && published.dropped == 0, "{published:?}");
    let mut mirror = Mirror::default();
    for expected in 0..published.batches {
        let batch = receive(&mut socket).await;
        assert_eq!(batch.sequence, expected);
        mirror.apply(&batch);
    }
    assert_eq!(mirror.0, engine.blocks());
    let dump = get(engine.addresses().http, "/debug/blocks").await.unwrap().body.json();
    let dumped: BTreeMap<u64, u64> = dump["blocks"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, n)| (name.parse().unwrap(), n.as_u64().unwrap()))
        .collect();
    assert_eq!(dumped.len(), mirror.0.len());
    assert_eq!((engine.running(), engine.waiting()), (0, 0));
}

#[tokio::test]
async fn events_come_when_the_prefill_is_done_and_before_the_answer() {
    let engine =
        Engine::start(EngineConfig { prefill_us_per_token: 2000.0, ..EngineConfig::named("a") }).await.unwrap();
    let mut socket = subscribe(&engine).await;
    let prompt = prompt(1, 64);
    let asking = complete(&engine, &prompt, 1);
    tokio::pin!(asking);
    tokio::select! {
        () = tokio::time::sleep(Duration::from_millis(60)) => {}
        _ = &mut asking => panic!("an answer before the prefill time"),
        batch = receive(&mut socket) => panic!("an event before the prefill time: {batch:?}"),
    }
    asking.await;
    let mut mirror = Mirror::default();
    mirror.apply(&receive(&mut socket).await);
    assert_eq!(mirror.0.len(), 4);
}

#[tokio::test]
async fn replay_answers_in_the_form_of_the_version_from_the_asked_sequence_on() {
    for (version, topic) in [("0.32.0", true), ("0.25.1", false), ("0.23.0", false)] {
        let config = EngineConfig { version: version.parse().unwrap(), buffer_steps: 5, ..EngineConfig::named("a") };
        let engine = Engine::start(config).await.unwrap();
        let mut socket = subscribe(&engine).await;
        let mut live = Vec::new();
        for seed in 0..8 {
            complete(&engine, &prompt(seed, 33), 1).await;
            live.push(receive(&mut socket).await);
        }
        let answers = replay(&engine, 2).await;
        // Batches 0 to 2 are out of the buffer: the replay silently starts later.
        assert_eq!(answers.len(), 6, "{version}");
        for (answer, expected) in answers.iter().zip(&live[3..]) {
            let frames: Vec<Vec<u8>> = answer.iter().map(|frame| frame.to_vec()).collect();
            let (empty, rest) = frames.split_first().unwrap();
            assert!(empty.is_empty());
            let rest = if topic { &rest[1..] } else { rest };
            assert_eq!(rest, [expected.sequence.to_be_bytes().to_vec(), expected.payload.clone()], "{version}");
        }
        assert_eq!(answers[5].len(), if topic { 4 } else { 3 });
        assert_eq!(replay(&engine, 1_000_000).await.len(), 1, "beyond the end there is only the end");
        let maps = rmpv::decode::read_value(&mut live[0].payload.as_slice()).unwrap()[1][0].is_map();
        assert_eq!(maps, version == "0.32.0" || version == "0.25.1");
    }
}

#[tokio::test]
async fn a_lost_batch_leaves_a_gap_that_replay_fills() {
    let engine = Engine::start(EngineConfig::named("a")).await.unwrap();
    let mut socket = subscribe(&engine).await;
    engine.faults().set(|plan| plan.lose_batches = vec![2]);
    for seed in 0..3 {
        complete(&engine, &prompt(seed, 33), 1).await;
    }
    let first = receive(&mut socket).await;
    let third = receive(&mut socket).await;
    assert_eq!((first.sequence, third.sequence), (0, 2));
    let replayed: Vec<Batch> = replay(&engine, 1).await[..2].iter().map(|answer| batch(answer, 1)).collect();
    assert_eq!(replayed[1], third);
    let mut mirror = Mirror::default();
    for batch in [first, replayed[0].clone(), third] {
        mirror.apply(&batch);
    }
    assert_eq!(mirror.0, engine.blocks());
    assert_eq!(engine.published().lost, 1);
}

#[tokio::test]
async fn a_restart_begins_again_at_sequence_0_with_an_empty_pool_on_the_same_ports() {
    let random = EngineConfig { version: "0.28.0".parse().unwrap(), ..EngineConfig::named("a") };
    let mut engine = Engine::start(random).await.unwrap();
    complete(&engine, &prompt(1, 40), 1).await;
    complete(&engine, &prompt(2, 40), 1).await;
    let (addresses, none_hash, blocks) = (engine.addresses(), engine.none_hash(), engine.blocks());
    engine.restart().await.unwrap();
    assert_eq!((engine.addresses(), engine.blocks().len(), engine.published().batches), (addresses, 0, 0));
    assert_ne!(engine.none_hash(), none_hash, "an unset seed is random in every life before 0.29");
    let mut socket = subscribe(&engine).await;
    assert_eq!(complete(&engine, &prompt(1, 40), 1).await["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(receive(&mut socket).await.sequence, 0);
    assert!(engine.blocks().keys().all(|name| !blocks.contains_key(name)));
    engine.kill().await;
    assert!(TcpStream::connect(addresses.http).await.is_err());
    assert!(TcpStream::connect(addresses.events.unwrap()).await.is_err());
}

#[tokio::test]
async fn a_reset_is_told_with_the_next_step_only() {
    let engine = Engine::start(EngineConfig::named("a")).await.unwrap();
    let mut socket = subscribe(&engine).await;
    complete(&engine, &prompt(1, 40), 1).await;
    let mut mirror = Mirror::default();
    mirror.apply(&receive(&mut socket).await);
    assert_eq!(post(engine.addresses().http, "/reset_prefix_cache", &json!({})).await.unwrap().head.status, 200);
    assert!(timeout(Duration::from_millis(100), socket.recv()).await.is_err(), "nothing before the next step");
    assert_eq!(complete(&engine, &prompt(1, 40), 1).await["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let batch = receive(&mut socket).await;
    let kinds = rmpv::decode::read_value(&mut batch.payload.as_slice()).unwrap();
    let kinds: Vec<&str> = kinds[1].as_array().unwrap().iter().map(|event| read(event).0).collect();
    assert_eq!(kinds, ["AllBlocksCleared", "BlockStored"]);
    mirror.apply(&batch);
    assert_eq!(mirror.0, engine.blocks());
}

#[tokio::test]
async fn subscribers_are_cut_and_refused_on_demand() {
    let engine = Engine::start(EngineConfig::named("a")).await.unwrap();
    let events = engine.addresses().events.unwrap();
    let socket = subscribe(&engine).await;
    engine.faults().set(|plan| (plan.refuse_events, plan.refuse_replay) = (true, true));
    engine.faults().disconnect_events();
    eventually(SOON, "the subscriber is cut", async || engine.published().subscribers == 0).await.unwrap();
    eventually(SOON, "the port refuses", async || TcpStream::connect(events).await.is_err()).await.unwrap();
    assert!(TcpStream::connect(engine.addresses().replay.unwrap()).await.is_err());
    drop(socket);
    engine.faults().clear();
    eventually(SOON, "the port listens", async || TcpStream::connect(events).await.is_ok()).await.unwrap();
    let mut socket = subscribe(&engine).await;
    complete(&engine, &prompt(1, 40), 1).await;
    assert_eq!(receive(&mut socket).await.sequence, 0);
}

/// A ZMTP subscriber by hand that never reads.
async fn deaf_subscriber(events: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(events).await.unwrap();
    let mut greeting = [0_u8; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await.unwrap();
    stream.read_exact(&mut greeting).await.unwrap();
    stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB").await.unwrap();
    stream.write_all(b"\x00\x01\x01").await.unwrap();
    stream
}

#[tokio::test]
async fn a_deaf_subscriber_loses_messages_and_holds_nobody_up() {
    let config =
        EngineConfig { event_hwm: 4, prefill_us_per_token: 0.0, num_gpu_blocks: 10_000, ..EngineConfig::named("a") };
    let engine = Engine::start(config).await.unwrap();
    let deaf = deaf_subscriber(engine.addresses().events.unwrap()).await;
    eventually(SOON, "the subscription arrives", async || engine.published().subscribers == 1).await.unwrap();
    let dropped = until_some(Duration::from_mins(1), "messages are dropped", async || {
        let seed = u32::try_from(engine.published().batches).unwrap();
        complete(&engine, &prompt(seed, 8000), 1).await;
        Some(engine.published()).filter(|published| published.dropped > 3)
    });
    let dropped = dropped.await.unwrap();
    assert!(dropped.batches > dropped.dropped);
    drop(deaf);
    eventually(SOON, "it is forgotten", async || engine.published().subscribers == 0).await.unwrap();
    let mut socket = subscribe(&engine).await;
    complete(&engine, &prompt(999_999, 40), 1).await;
    assert_eq!(receive(&mut socket).await.sequence, dropped.batches);
}

#[tokio::test]
async fn strangers_at_the_event_port_are_shown_the_door() {
    let engine = Engine::start(EngineConfig::named("a")).await.unwrap();
    let mut socket = subscribe(&engine).await;
    let replay_port = engine.addresses().replay.unwrap();
    for address in [engine.addresses().events.unwrap(), replay_port] {
        let garbage = [b"GET / HTTP/1.1\r\n\r\n".repeat(5), vec![0xff; 200], vec![0; 70]];
        for bytes in garbage {
            let mut stranger = TcpStream::connect(address).await.unwrap();
            stranger.write_all(&bytes).await.unwrap();
            let mut answer = Vec::new();
            // A greeting comes, then the end; a reset is as good.
            drop(timeout(SOON, stranger.read_to_end(&mut answer)).await.expect("the stranger is dropped"));
            assert!(answer.len() <= 64 + 64, "{}", answer.len());
        }
    }
    complete(&engine, &prompt(1, 40), 1).await;
    assert_eq!(receive(&mut socket).await.sequence, 0);
    assert_eq!(replay(&engine, 0).await.len(), 2);
}

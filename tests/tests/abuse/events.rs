//! Event streams that are broken in every way: each fault is counted, and costs no more than it must.

use std::time::Duration;

use kvlb_tests::engine::EngineConfig;
use kvlb_tests::harness::eventually;
use rmpv::Value as Packed;
use serde_json::{Value, json};

use super::publisher::{Manner, Publisher, batch, greeting, packed, ready, stored};
use super::stage::{EVENTS_PORT, REPLAY_PORT, SOON, Stage, completion};

/// A stage with two engines: the first one's events are the test's own, the second's are honest.
struct Scene {
    stage: Stage,
    publisher: Publisher,
    /// The names of good blocks run from 1000.
    good: u64,
}

impl Scene {
    async fn set() -> Self {
        // The replay port of the first engine is free: nobody answers there.
        Self::with(json!({})).await
    }

    async fn with(changes: Value) -> Self {
        let stage = Stage::with(2, changes, |config| config, first_is_quiet).await;
        let publisher = Publisher::listen(stage.place.at(11, EVENTS_PORT), Manner::Publisher).await;
        publisher.until_heard().await;
        let scene = Self { stage, publisher, good: 1000 };
        scene.until_live().await;
        scene
    }

    /// Waits until nothing holds the events back: the replay that follows a connection has been given up.
    async fn until_live(&self) {
        let live = async || {
            let status = self.stage.kv_status(0).await;
            status["connected"] == json!(true) && status["replay"] != json!("pending")
        };
        eventually(SOON, "the first engine's events are listened to", live).await.unwrap();
    }

    /// A block that was not named before.
    fn good_block(&mut self) -> Packed {
        self.good += 1;
        stored(self.good)
    }

    /// Waits until the last good block is known.
    async fn until_known(&self, name: &str) {
        let path = format!("/netlox/v1/config/ai/kv/inventory?service_id={}&ep_idx=0", self.stage.rule_id);
        let last = json!(self.good);
        let known = async || {
            let (_, page) = self.stage.kvlb.api("GET", &path, None).await.unwrap();
            page["blocks"].as_array().unwrap().iter().any(|block| block["hash_uint64"] == last)
        };
        eventually(SOON, &format!("the good event behind or beside `{name}` is applied"), known).await.unwrap();
    }

    /// The second engine and all traffic are as ever.
    async fn close(self) {
        let honest = self.stage.kv_status(1).await;
        assert_eq!((&honest["connected"], &honest["gaps"], &honest["restarts"]), (&json!(true), &json!(0), &json!(0)));
        let text =
            format!("traffic flows and blocks of {} are found again, whoever holds them, word by word", self.good);
        // Both engines in turn, until the honest one has answered and announced.
        let warm = async || {
            self.stage.ask(&completion(&text)).await.head.header("x-kvlb-depth").is_some_and(|depth| depth != "0")
        };
        eventually(SOON, "the honest engine's blocks are used", warm).await.unwrap();
        self.stage.close().await;
    }
}

fn first_is_quiet(config: EngineConfig) -> EngineConfig {
    EngineConfig { no_events: config.name == "engine-0", ..config }
}

/// Where a fault shows.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Counted {
    RecvError,
    Undecodable,
    Unknown,
    RankRefused,
    /// It is as good as any.
    Nowhere,
}

impl Counted {
    const ALL: [&'static str; 4] = ["recv_errors", "undecodable", "unknown", "ranks_refused"];

    fn what(self) -> Option<&'static str> {
        Some(match self {
            Self::RecvError => "recv_errors",
            Self::Undecodable => "undecodable",
            Self::Unknown => "unknown",
            Self::RankRefused => "ranks_refused",
            Self::Nowhere => return None,
        })
    }
}

fn array(values: Vec<Packed>) -> Packed {
    Packed::Array(values)
}

fn map(fields: Vec<(&str, Packed)>) -> Packed {
    Packed::Map(fields.into_iter().map(|(key, value)| (key.into(), value)).collect())
}

/// A stored event in the map form, with one field more or other.
fn odd(field: &str, value: Packed) -> Packed {
    let mut fields = vec![
        ("type", "BlockStored".into()),
        ("block_hashes", array(vec![7.into()])),
        ("parent_block_hash", Packed::Nil),
        ("token_ids", array(Vec::new())),
        ("block_size", 16.into()),
    ];
    fields.retain(|(key, _)| *key != field);
    fields.push((field, value));
    map(fields)
}

/// Events that stand beside a good one in a batch.
fn odd_events() -> Vec<(&'static str, Packed, Counted)> {
    use Counted::{Nowhere, Undecodable, Unknown};
    let nested = (0..2000).fold(Packed::Nil, |inner, _| array(vec![inner]));
    let pair = array(vec![1.into(), 2.into()]);
    let plain = vec!["BlockStored".into(), array(vec![7.into()]), Packed::Nil, array(vec![]), 0.into(), Packed::Nil];
    vec![
        ("nil", Packed::Nil, Undecodable),
        ("a number", 7.into(), Undecodable),
        ("a text", "BlockStored".into(), Undecodable),
        ("an empty array", array(vec![]), Undecodable),
        ("an empty map", map(vec![]), Undecodable),
        ("an array whose kind is a number", array(vec![7.into(), 8.into()]), Undecodable),
        ("an unknown kind", array(vec!["BlockTeleported".into(), 7.into()]), Unknown),
        ("an unknown kind in a map", map(vec![("type", "BlockTeleported".into())]), Unknown),
        ("a kind in another case", map(vec![("type", "blockstored".into())]), Unknown),
        ("a map without a type", map(vec![("block_hashes", array(vec![7.into()]))]), Undecodable),
        (
            "a map with numbers as keys",
            Packed::Map(vec![(1.into(), 2.into()), ("type".into(), "AllBlocksRenamed".into())]),
            Unknown,
        ),
        ("a stored event of one field", array(vec!["BlockStored".into()]), Undecodable),
        (
            "a stored event of 40 fields",
            array([vec!["BlockStored".into(), array(vec![7.into()])], vec![Packed::Nil; 38]].concat()),
            Nowhere,
        ),
        ("a removed event without names", array(vec!["BlockRemoved".into(), Packed::Nil]), Undecodable),
        ("names as a number", odd("block_hashes", 7.into()), Undecodable),
        ("names as nil", odd("block_hashes", Packed::Nil), Undecodable),
        ("a name as a float", odd("block_hashes", array(vec![7.5.into()])), Undecodable),
        ("a name as a text", odd("block_hashes", array(vec!["7".into()])), Undecodable),
        ("a name as nil", odd("block_hashes", array(vec![Packed::Nil])), Undecodable),
        ("a name as a map", odd("block_hashes", array(vec![map(vec![])])), Undecodable),
        ("a negative name", odd("block_hashes", array(vec![(-7).into()])), Nowhere),
        ("a name of no bytes", odd("block_hashes", array(vec![Packed::Binary(vec![])])), Undecodable),
        ("a name of 32 bytes", odd("block_hashes", array(vec![Packed::Binary(vec![9; 32])])), Nowhere),
        ("a parent as a text", odd("parent_block_hash", "x".into()), Undecodable),
        ("a negative token", odd("token_ids", array(vec![(-1).into()])), Undecodable),
        ("a token of 2^40", odd("token_ids", array(vec![(1_u64 << 40).into()])), Undecodable),
        ("tokens as a text", odd("token_ids", "1 2 3".into()), Undecodable),
        ("pairs of tokens", odd("token_ids", array(vec![pair.clone(), pair])), Unknown),
        ("a negative block size", odd("block_size", (-16).into()), Undecodable),
        ("a block size of 2^32", odd("block_size", (1_u64 << 32).into()), Undecodable),
        ("a block size as a float", odd("block_size", 16.0.into()), Undecodable),
        ("an adapter's number as a text", odd("lora_id", "x".into()), Nowhere),
        ("a medium as a number", odd("medium", 3.into()), Nowhere),
        ("a medium nobody knows", odd("medium", "TAPE".into()), Nowhere),
        ("a negative group", odd("group_idx", (-1).into()), Undecodable),
        ("extra keys as a number", odd("extra_keys", 3.into()), Undecodable),
        (
            "an attention nobody knows",
            array([plain, vec!["GPU".into(), Packed::Nil, Packed::Nil, 9.into(), "tunnel_vision".into()]].concat()),
            Nowhere,
        ),
        ("a field nobody knows", odd("x", nested.clone()), Nowhere),
        ("2000 arrays in each other", nested, Undecodable),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_odd_event_is_counted_and_the_good_one_beside_it_is_applied() {
    let mut scene = Scene::set().await;
    for (name, event, counted) in odd_events() {
        let before = counts(&scene).await;
        let good = scene.good_block();
        scene.publisher.publish(&batch(vec![event, good])).await;
        scene.until_known(name).await;
        assert_counted(&scene, name, &before, counted).await;
    }
    assert_eq!(scene.publisher.accepted(), 1, "one connection all the time");
    scene.close().await;
}

async fn counts(scene: &Scene) -> Vec<u64> {
    let mut counts = Vec::new();
    for what in Counted::ALL {
        counts.push(scene.stage.stream_count(0, what).await);
    }
    counts
}

async fn assert_counted(scene: &Scene, name: &str, before: &[u64], counted: Counted) {
    let after = counts(scene).await;
    let moved: Vec<_> = Counted::ALL.into_iter().zip(before.iter().zip(&after)).filter(|(_, (a, b))| a != b).collect();
    let expected: Vec<_> = counted.what().into_iter().collect();
    assert_eq!(moved.iter().map(|(what, _)| *what).collect::<Vec<_>>(), expected, "{name}: {moved:?}");
}

/// Batches that are none, and bytes that are no msgpack.
fn odd_batches() -> Vec<(&'static str, Vec<u8>, Counted)> {
    use Counted::{Nowhere, RankRefused, Undecodable};
    let good = batch(vec![stored(7), stored(8), stored(9)]);
    let events = array(vec![]);
    let with_rank = |rank: Packed| packed(&array(vec![1.0.into(), array(vec![]), rank]));
    let with_time = |time: Packed| packed(&array(vec![time, array(vec![]), 0.into()]));
    vec![
        ("nothing", vec![], Undecodable),
        ("one byte that msgpack reserves", vec![0xc1], Undecodable),
        ("noise", (0..=255).rev().cycle().take(5000).collect(), Undecodable),
        ("JSON", b"{\"ts\": 1, \"events\": []}".to_vec(), Undecodable),
        ("nil", packed(&Packed::Nil), Undecodable),
        ("a map", packed(&map(vec![("ts", 1.0.into()), ("events", events.clone())])), Undecodable),
        ("an empty array", packed(&array(vec![])), Undecodable),
        ("a time alone", packed(&array(vec![1.0.into()])), Undecodable),
        ("a time as a text", with_time("now".into()), Undecodable),
        ("a time that is no number", with_time(f64::NAN.into()), Nowhere),
        ("a time without end", with_time(f64::INFINITY.into()), Nowhere),
        ("a time before all times", with_time((-1e300).into()), Nowhere),
        ("events as a map", packed(&array(vec![1.0.into(), map(vec![])])), Undecodable),
        ("events as nil", packed(&array(vec![1.0.into(), Packed::Nil])), Undecodable),
        ("cut in its middle", good[..good.len() / 2].to_vec(), Undecodable),
        ("cut by a byte", good[..good.len() - 1].to_vec(), Nowhere),
        ("with bytes behind it", [good, vec![0xff; 100]].concat(), Nowhere),
        (
            "an array that claims 4 billion",
            [&[0x93, 0xcb][..], &1.0_f64.to_be_bytes(), &[0xdd, 0xff, 0xff, 0xff, 0xff]].concat(),
            Undecodable,
        ),
        (
            "a text that claims 4 billion",
            [&[0x93, 0xcb][..], &1.0_f64.to_be_bytes(), &[0x91, 0x92, 0xdb, 0xff, 0xff, 0xff, 0xff]].concat(),
            Undecodable,
        ),
        ("100,000 arrays in each other", [vec![0x91; 100_000], vec![0xc0]].concat(), Undecodable),
        ("a rank as a text", with_rank("zero".into()), Nowhere),
        ("the lowest rank", with_rank(i64::MIN.into()), Nowhere),
        ("the highest rank", with_rank(u64::MAX.into()), Nowhere),
        ("a ninth rank", [1, 2, 3, 4, 5, 6, 77].map(|rank| with_rank(rank.into())).pop_last(), RankRefused),
    ]
}

/// The batches of an array but the last are for [`fill_ranks`].
trait PopLast {
    fn pop_last(self) -> Vec<u8>;
}

impl<const N: usize> PopLast for [Vec<u8>; N] {
    fn pop_last(self) -> Vec<u8> {
        self.into_iter().next_back().unwrap_or_default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_odd_batch_is_counted_and_the_next_one_is_applied_on_the_same_connection() {
    let mut scene = Scene::set().await;
    for rank in 1..7 {
        // With rank 0 and the lowest one these are all the ranks that an endpoint may have.
        scene.publisher.publish(&packed(&array(vec![1.0.into(), array(vec![]), rank.into()]))).await;
    }
    for (name, payload, counted) in odd_batches() {
        let before = counts(&scene).await;
        scene.publisher.publish(&payload).await;
        let good = scene.good_block();
        scene.publisher.publish(&batch(vec![good])).await;
        scene.until_known(name).await;
        assert_counted(&scene, name, &before, counted).await;
    }
    for (name, frames, counted) in [
        ("one frame", vec![b"x".to_vec()], Counted::RecvError),
        ("an empty message", vec![vec![]], Counted::RecvError),
        ("a number of 7 bytes", vec![vec![], vec![0; 7], batch(vec![])], Counted::RecvError),
        ("a number of 9 bytes", vec![vec![], vec![0; 9], batch(vec![])], Counted::RecvError),
        ("no number", vec![vec![], vec![], batch(vec![])], Counted::RecvError),
        ("the number last", vec![vec![], batch(vec![]), 5_u64.to_be_bytes().to_vec()], Counted::RecvError),
        ("16 frames", vec![vec![]; 16], Counted::RecvError),
    ] {
        let before = counts(&scene).await;
        scene.publisher.send(&frames).await;
        let good = scene.good_block();
        scene.publisher.publish(&batch(vec![good])).await;
        scene.until_known(name).await;
        assert_counted(&scene, name, &before, counted).await;
    }
    assert_eq!(scene.publisher.accepted(), 1, "one connection all the time");
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_that_jump_anywhere_are_followed() {
    let mut scene = Scene::set().await;
    let jumps =
        [0, 1, 2, 50, 1000, 3, u64::MAX - 1, u64::MAX, 0, u64::MAX, 5, u64::MAX - 7, 5, 1 << 63, 0, u64::MAX, 0, 1];
    for seq in jumps {
        let good = scene.good_block();
        scene.publisher.publish_as(seq, &batch(vec![good])).await;
        scene.until_known(&format!("number {seq}")).await;
    }
    let status = scene.stage.kv_status(0).await;
    assert_eq!((&status["restarts"], &status["connected"]), (&json!(6), &json!(true)), "{status}");
    assert_eq!(scene.publisher.accepted(), 1);
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn huge_messages_cost_no_more_than_their_own_connection() {
    let mut scene = Scene::set().await;
    scene.publisher.publish(&batch(vec![stored(1)])).await;
    let before = scene.stage.memory();
    // A claim of more than a message may have ends the connection, and nothing is reserved for it.
    for length in [65 << 20, 1_u64 << 40, u64::MAX] {
        scene.publisher.until_all_heard().await;
        let connections = scene.publisher.accepted();
        scene.publisher.send_raw(&[&[2][..], &length.to_be_bytes()].concat()).await;
        let again = async || scene.publisher.accepted() > connections;
        eventually(SOON, "it is dialled again", again).await.unwrap();
        scene.until_live().await;
    }
    // Well-formed batches: 50 MB of events, and one event of 9 MB of names.
    let mut many = [&[0x93, 0xcb][..], &1.0_f64.to_be_bytes(), &[0xdd]].concat();
    let event = packed(&array(vec!["AllBlocksCleared".into()]));
    let number = (50 << 20) / event.len();
    many.extend(u32::try_from(number).unwrap().to_be_bytes());
    many.extend(event.repeat(number));
    many.push(0);
    let names = array((0..1_000_000_u64).map(|name| (u64::MAX - name).into()).collect());
    let one = batch(vec![array(vec!["BlockStored".into(), names, Packed::Nil, array(vec![]), 0.into()])]);
    for (what, huge) in [("events", many), ("names", one)] {
        scene.publisher.publish(&huge).await;
        let good = scene.good_block();
        scene.publisher.publish(&batch(vec![good])).await;
        // The other endpoint and the API answer meanwhile.
        scene.stage.ask(&completion("meanwhile")).await;
        scene.until_known(&format!("megabytes of {what}")).await;
    }
    let grown = scene.stage.memory().saturating_sub(before);
    assert!(grown < 400 << 20, "{} MB more", grown >> 20);
    scene.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_speaks_another_protocol_is_dialled_again_now_and_then() {
    let mut secured = greeting();
    secured[12..17].copy_from_slice(b"PLAIN");
    let mut old = greeting();
    old[10] = 1;
    let hello = greeting();
    let commands = [&[4, 6][..], b"\x05ERROR"].concat();
    let says = |bytes: Vec<u8>| Manner::Says(bytes);
    let manners = [
        ("nothing at all", says(Vec::new())),
        ("HTTP", says(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n".repeat(3))),
        ("noise", says((0..=255).cycle().take(100_000).collect())),
        ("half a greeting", says(hello[..30].to_vec())),
        ("a secured greeting", says(secured)),
        ("an old greeting", says(old)),
        ("a greeting and no more", says(hello.clone())),
        ("a greeting and another socket's type", says([hello.clone(), ready("PULL")].concat())),
        ("a greeting and an error", says([hello.clone(), commands].concat())),
        ("a message before READY", says([hello.clone(), vec![0, 1, b'x']].concat())),
        ("reserved flags", says([hello, ready("PUB"), vec![0xf8, 0]].concat())),
        ("closes at once", Manner::Closes),
    ];
    let names = manners.each_ref().map(|(name, _)| *name);
    let (stage, mut publishers) = stage_of(&manners.map(|(_, manner)| (manner, Manner::Closes))).await;
    for (name, (publisher, _)) in names.into_iter().zip(&publishers) {
        let twice = async || publisher.accepted() >= 2;
        eventually(SOON, &format!("{name}: it is dialled again"), twice).await.unwrap();
        // Two seconds apart in the end, and the others were waited for.
        assert!(publisher.accepted() < 20, "{name}: {} times, which is all the time", publisher.accepted());
        stage.ask(&completion("meanwhile")).await;
    }
    publishers.remove(0);
    // An honest one at last.
    let mut publisher = Publisher::listen(stage.place.at(11, EVENTS_PORT), Manner::Publisher).await;
    publisher.until_heard().await;
    publisher.publish(&batch(vec![stored(77)])).await;
    let known = async || stage.kv_status(0).await["blocks"] == json!(1);
    eventually(SOON, "it is heard", known).await.unwrap();
    stage.close().await;
}

/// Whatever a replay socket says, live events are applied before long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_that_makes_no_sense_or_never_ends_does_not_hold_the_stream() {
    let number = |seq: u64| seq.to_be_bytes().to_vec();
    let good = |seq: u64| vec![vec![], vec![], number(seq), batch(vec![])];
    let quick = Duration::from_millis(1);
    let forever = usize::MAX;
    let answers = |messages, pause, times| Manner::Answers { messages, pause, times };
    let manners = [
        ("says nothing", Manner::Says(Vec::new())),
        ("speaks HTTP", Manner::Says(b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(3))),
        ("closes", Manner::Closes),
        ("shakes hands and falls silent", answers(vec![], quick, 0)),
        ("one short answer, then silence", answers(vec![vec![vec![], b"x".to_vec()]], quick, 1)),
        ("nonsense for ever", answers(vec![vec![vec![], b"x".to_vec()]], Duration::from_millis(200), forever)),
        ("nonsense as fast as it can", answers(vec![vec![b"x".to_vec()]], Duration::ZERO, forever)),
        ("one batch for ever", answers(vec![good(0)], Duration::from_millis(50), forever)),
        ("two batches in turn for ever", answers(vec![good(7), good(3)], Duration::from_millis(50), forever)),
        ("garbage with a number for ever", answers(vec![vec![vec![], number(1), b"\xc1".to_vec()]], quick, forever)),
        ("a batch and no end", answers(vec![good(0)], quick, 1)),
    ];
    let names = manners.each_ref().map(|(name, _)| *name);
    let (stage, mut publishers) = stage_of(&manners.map(|(_, manner)| (Manner::Publisher, manner))).await;
    for (publisher, _) in &mut publishers {
        publisher.until_heard().await;
        for seq in 100..110 {
            publisher.publish_as(seq, &batch(vec![stored(seq)])).await;
        }
    }
    for (position, name) in names.into_iter().enumerate() {
        let applied = async || stage.kv_status(position).await["blocks"] == json!(10);
        eventually(SOON, &format!("{name}: live events are applied"), applied).await.unwrap();
    }
    stage.close().await;
}

/// A stage whose engines publish nothing, with a publisher and a replay socket of the test's own at each.
async fn stage_of(manners: &[(Manner, Manner)]) -> (Stage, Vec<(Publisher, Publisher)>) {
    let quiet = |config| EngineConfig { no_events: true, ..config };
    let stage = Stage::with(u8::try_from(manners.len()).unwrap(), json!({}), |config| config, quiet).await;
    let mut publishers = Vec::new();
    for (host, (live, replay)) in (11..).zip(manners) {
        let live = Publisher::listen(stage.place.at(host, EVENTS_PORT), live.clone()).await;
        publishers.push((live, Publisher::listen(stage.place.at(host, REPLAY_PORT), replay.clone()).await));
    }
    (stage, publishers)
}

//! Every request ends in one way, and its rule is told which.
//!
//! [`Rig`](super::rig::Rig) checks the promise of [`Event`] for every call of every test; here as many ways as possible
//! come together by chance.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::on_both_back_ends;
use super::rig::{Endpoint, Rig, Wire, eventually, get, post};
use crate::proxy::{Event, Io};

on_both_back_ends![
    however_a_request_ends_its_rule_is_told_once,
    an_order_to_end_is_the_last_event,
    a_list_of_models_ends_for_each_of_its_rules,
];

/// A sequence that looks random and is the same each time, shared by all who ask.
#[derive(Debug)]
pub(super) struct Chance(AtomicU64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    fn below(&self, below: usize) -> usize {
        let seed = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        usize::try_from((mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33).unwrap() % below
    }
}

/// Answers that leave the connection fit for another request.
const SOUND: [&[u8]; 5] = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy",
    b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy",
    b"HTTP/1.1 429 Busy\r\ncontent-length: 4\r\n\r\nbusy",
];

/// Answers that end with it, soundly or not.
const FINAL: [&[u8]; 6] = [
    b"HTTP/1.1 200 OK\r\nx: y\r\n\r\nto the end",
    b"HTTP/1.1 200 OK\r\ncontent-le",
    b"nonsense\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzzz",
    b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello",
    b"",
];

/// Serves one request in one of many ways; says whether the connection goes on.
fn serve(wire: &mut Wire, chance: &Chance) -> bool {
    let (way, last) = (chance.below(7), FINAL[chance.below(FINAL.len())]);
    if way < 4 {
        return wire.stream.write_all(SOUND[chance.below(SOUND.len())]).is_ok();
    }
    let sent = wire.stream.write_all(last).is_ok();
    if way == 4 && sent {
        // Stands still until its client has had enough.
        wire.ends_within(Duration::from_secs(5));
    }
    false
}

fn endpoint(chance: &Arc<Chance>) -> Endpoint {
    let chance = Arc::clone(chance);
    Endpoint::start(move |wire, _| {
        while let Some(head) = wire.head() {
            let is_early = chance.below(8) == 0;
            let length =
                head.to_lowercase().lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
            if !is_early && !wire.skip(length.unwrap_or(0)) {
                return;
            }
            // What follows an early answer, or a head without a length, is no other request.
            let is_framed = !is_early && !head.contains("transfer-encoding");
            if !serve(wire, &chance) || !is_framed {
                return;
            }
        }
    })
}

/// One request in one of many ways.
fn ask(address: SocketAddr, chance: &Chance) {
    let mut wire = Wire::connect(address);
    wire.stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let length = [0, 10, 5000, 40_000][chance.below(4)];
    let request = match chance.below(6) {
        0 => get("/"),
        1 => [
            &b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"[..],
            [&b"0\r\n\r\n"[..], b"zzz"][chance.below(2)],
        ]
        .concat(),
        _ => post(&vec![b'x'; length]),
    };
    let cut = if chance.below(6) == 0 { chance.below(request.len()) } else { request.len() };
    if wire.stream.write_all(&request[..cut]).is_err() {
        return;
    }
    match chance.below(4) {
        0 => std::thread::sleep(Duration::from_micros(chance.below(3000) as u64)),
        way => {
            wire.ends_within(Duration::from_millis(if way == 1 { 10 } else { 150 }));
        }
    }
}

fn kind(event: &Event) -> String {
    format!("{event:?}").split(' ').next().unwrap_or_default().to_owned()
}

/// Three endpoints that end their answers in many ways, by the same chance as the requests that [`ask_in_every_way`] sends.
pub(super) fn three(chance: &Arc<Chance>) -> [Endpoint; 3] {
    [endpoint(chance), endpoint(chance), endpoint(chance)]
}

pub(super) fn addresses(endpoints: &[Endpoint; 3]) -> [SocketAddr; 3] {
    endpoints.each_ref().map(|endpoint| endpoint.address)
}

/// Hundreds of requests that end in every way; `last` is done at the end of each client, with the client's number.
pub(super) fn ask_in_every_way(rig: &Rig, endpoints: &[Endpoint; 3], chance: &Chance, last: impl Fn(usize) + Sync) {
    {
        let mut limits = rig.fake.limits.lock();
        limits.first_byte = Some(Duration::from_millis(60));
        limits.idle = Some(Duration::from_millis(50));
        limits.request_body = Duration::from_millis(40);
        limits.total = Some(Duration::from_millis(90));
    }
    let [first, second, third] = addresses(endpoints);
    for round in 0..4_i64 {
        // Of what nobody listens to, of bodies that go through, of retries that the budget has no room for.
        let first = if round % 3 == 1 { Endpoint::refusing() } else { first };
        *rig.fake.endpoints.lock() = vec![first, second, third];
        *rig.fake.inspect.lock() = (round % 2 == 0).then_some(1 << 20);
        rig.fake.retries_left.store(if round % 3 == 2 { 3 } else { i64::MAX }, Ordering::SeqCst);
        std::thread::scope(|scope| {
            for number in 0..8 {
                let last = &last;
                scope.spawn(move || {
                    (0..25).for_each(|_| ask(rig.address, chance));
                    last(number);
                });
            }
        });
    }
    rig.settled();
}

fn however_a_request_ends_its_rule_is_told_once(io: Io) {
    let chance = Arc::new(Chance::new(5));
    let endpoints = three(&chance);
    let rig = Rig::start(io, &addresses(&endpoints));
    ask_in_every_way(&rig, &endpoints, &chance, |_number| ());
    let told = rig.fake.told.lock().clone();
    assert!(told.len() > 400, "{} calls", told.len());
    let seen: BTreeSet<String> = told.iter().flat_map(|told| &told.events).map(kind).collect();
    for expected in [
        "Answered",
        "Busy",
        "BrokeOff",
        "ClientLeft",
        "ConnectFailed",
        "Died",
        "Finished",
        "Lost",
        "Replied",
        "TimedOut",
        "Unasked",
    ] {
        assert!(seen.contains(expected), "no {expected} among {seen:?}");
    }
}

fn an_order_to_end_is_the_last_event(io: Io) {
    let arrived = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&arrived);
    let silent = Endpoint::start(move |wire, number| {
        wire.request().unwrap();
        if number > 0 {
            wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello");
        }
        count.fetch_add(1, Ordering::SeqCst);
        wire.rest();
    });
    let mut rig = Rig::start(io, &[silent.address]);
    let (mut waiting, mut streaming) = (rig.client(), rig.client());
    waiting.send(&post(b"{}"));
    eventually("the first is there", || arrived.load(Ordering::SeqCst) == 1);
    streaming.send(&post(b"{}"));
    streaming.head().unwrap();
    eventually("both are there", || arrived.load(Ordering::SeqCst) == 2);
    rig.drain(Duration::from_millis(30)).join().unwrap();
    let told = rig.fake.told.lock().clone();
    assert_eq!(told.len(), 2);
    for told in told {
        assert_eq!(told.events.last(), Some(&Event::CutOff { position: Some(0) }));
    }
}

fn a_list_of_models_ends_for_each_of_its_rules(io: Io) {
    let list = Endpoint::answering(br#"{"data": [{"id": "a"}]}"#);
    let silent = Endpoint::start(|wire, _| drop(wire.request()));
    let nonsense = Endpoint::answering(b"not a list");
    let stands_still = Endpoint::start(|wire, _| {
        wire.request().unwrap();
        wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{");
        wire.rest();
    });
    let rig = Rig::start(io, &[list.address, silent.address, nonsense.address, stands_still.address]);
    rig.fake.limits.lock().idle = Some(Duration::from_millis(50));
    *rig.fake.rules_with_models.lock() = vec![0, 1, 2];
    assert_eq!(rig.client().ask(&get("/v1/models")).status(), 200);
    *rig.fake.rules_with_models.lock() = vec![0, 3, 1];
    assert_eq!(rig.client().ask(&get("/v1/models")).status(), 200, "one that stands still keeps nobody's list back");
    *rig.fake.rules_with_models.lock() = vec![3];
    assert_eq!(rig.client().ask(&get("/v1/models")).own_code(), "idle_timeout");
    rig.settled();
    let ends: Vec<_> = rig.fake.told.lock().iter().map(|told| told.events.last().map(kind)).collect();
    let expected = ["Finished", "Died", "Died", "Finished", "TimedOut", "Died", "TimedOut"];
    assert_eq!(ends, expected.map(|kind| Some(kind.to_owned())));
}

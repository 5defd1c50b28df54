//! Bodies of every size, read here or passed through.

use std::io::Write;
use std::sync::mpsc;
use std::time::Duration;

use parking_lot::Mutex;

use super::on_both_back_ends;
use super::rig::{Endpoint, PATIENCE, Rig, eventually, ok, pattern, post};
use crate::clock;
use crate::proxy::Io;

on_both_back_ends![
    a_body_beyond_the_rules_limit_goes_through_unread,
    a_body_beyond_the_memory_budget_goes_through_unread,
    what_was_read_of_a_body_counts_until_it_has_gone_out,
    a_huge_body_goes_through_without_being_held,
    an_answer_may_come_before_the_body_has_gone_through,
    an_answer_may_come_before_a_whole_body_is_taken,
    an_endpoint_may_answer_while_it_reads,
    a_body_in_many_pieces_is_read_whole,
    bodies_beyond_the_limits_of_others_pass_byte_for_byte,
    what_follows_a_body_that_went_through_is_the_next_request,
];

fn echo() -> Endpoint {
    Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            wire.send(&ok(&request.body));
        }
    })
}

/// A POST in one chunk.
fn in_chunks(body: &[u8]) -> Vec<u8> {
    let head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    [&head[..], format!("{:x}\r\n", body.len()).as_bytes(), body, b"\r\n0\r\n\r\n"].concat()
}

fn a_body_beyond_the_rules_limit_goes_through_unread(io: Io) {
    let endpoint = echo();
    let rig = Rig::start(io, &[endpoint.address]);
    *rig.fake.inspect.lock() = Some(100_000);
    let mut client = rig.client();
    for (size, seen) in [(100_000, true), (100_001, false), (300_000, false), (10, true)] {
        assert!(client.ask(&post(&pattern(size))).body == pattern(size), "{size}");
        let decided = rig.fake.bodies.lock().pop().unwrap();
        assert_eq!(decided.map(|body| body.len()), if seen { Ok(size) } else { Err("too_large") });
    }
}

fn a_body_beyond_the_memory_budget_goes_through_unread(io: Io) {
    let endpoint = echo();
    let rig = Rig::with(io, &[endpoint.address], |config| config.body_budget = 300_000);
    // One client holds most of the budget and does not go on.
    let mut holder = rig.client();
    holder.send(&post(&pattern(250_000))[..200_000]);
    eventually("the budget is held", || rig.counts.get("body bytes held") > 200_000);
    let mut client = rig.client();
    for chunked in [false, true] {
        let body = pattern(150_000);
        let request = if chunked { in_chunks(&body) } else { post(&body) };
        assert!(client.ask(&request).body == body);
        assert_eq!(rig.fake.bodies.lock().pop().unwrap().map(|body| body.len()), Err("over_memory"));
        assert_eq!(client.ask(&post(b"small")).body, b"small");
        assert_eq!(rig.fake.bodies.lock().pop().unwrap().as_deref(), Ok(&b"small"[..]));
    }
    drop(holder);
    eventually("the budget is free again", || rig.counts.get("body bytes held") == 0);
    assert!(client.ask(&post(&pattern(150_000))).body == pattern(150_000));
    assert_eq!(rig.fake.bodies.lock().pop().unwrap().map(|body| body.len()), Ok(150_000));
}

fn what_was_read_of_a_body_counts_until_it_has_gone_out(io: Io) {
    // More than the sockets on the way take in: most of it waits here while the endpoint does not read.
    const READ: usize = 24 << 20;
    const SIZE: usize = 32 << 20;
    let body = vec![b'x'; SIZE];
    let (go_on, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let endpoint = Endpoint::start(move |wire, _| {
        wait.lock().recv_timeout(PATIENCE).unwrap();
        let request = wire.request().unwrap();
        assert!(request.body.len() == SIZE && request.body.iter().all(|byte| *byte == b'x'));
        wire.send(&ok(b"whole"));
    });
    for (request, why) in
        [(in_chunks(&body), "too_large"), (in_chunks(&body), "over_memory"), (post(&body), "over_memory")]
    {
        let (inspect, budget) = if why == "too_large" { (READ, 1 << 30) } else { (1 << 30, READ) };
        let rig = Rig::with(io, &[endpoint.address], |config| config.body_budget = budget);
        *rig.fake.inspect.lock() = Some(inspect);
        let mut client = rig.client();
        let mut sender = client.stream.try_clone().unwrap();
        let last = request.len() - 10;
        std::thread::scope(|scope| {
            let sent = scope.spawn(|| sender.write_all(&request[..last]).unwrap());
            eventually("it goes through", || rig.fake.in_flight() == 1);
            assert_eq!(rig.fake.bodies.lock().pop(), Some(Err(why)));
            let ticks = rig.counts.get("ticks");
            eventually("some ticks", || rig.counts.get("ticks") > ticks + 2);
            let held = usize::try_from(rig.counts.get("body bytes held")).unwrap();
            assert!((READ - (1 << 20)..=READ).contains(&held), "{held} of {READ} bytes are counted: {why}");
            go_on.send(()).unwrap();
            sent.join().unwrap();
        });
        eventually("it has gone out", || rig.counts.get("body bytes held") == 0);
        assert_eq!(rig.fake.in_flight(), 1, "it still goes through");
        client.send(&request[last..]);
        assert_eq!(client.answer().body, b"whole");
        drop((client, sender));
        rig.settled();
    }
}

fn a_huge_body_goes_through_without_being_held(io: Io) {
    const SIZE: usize = 64 << 20;
    let endpoint = Endpoint::start(|wire, _| {
        wire.head().unwrap();
        let (mut sum, mut got) = (0_u64, 0);
        while got < SIZE {
            let piece = wire.bytes((1 << 20).min(SIZE - got));
            sum = piece.iter().fold(sum, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
            got += piece.len();
        }
        wire.send(&ok(sum.to_string().as_bytes()));
        wire.rest();
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {SIZE}\r\n\r\n").as_bytes());
    let mut sum = 0_u64;
    for number in 0..SIZE >> 20 {
        let piece: Vec<u8> = vec![number.to_le_bytes()[0]; 1 << 20];
        sum = piece.iter().fold(sum, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
        client.send(&piece);
        assert!(rig.counts.get("buffers") < 400 << 10, "{} bytes held", rig.counts.get("buffers"));
    }
    let answer = client.answer();
    assert_eq!(answer.body, sum.to_string().as_bytes());
    assert_eq!(answer.field("connection"), None);
}

fn an_answer_may_come_before_the_body_has_gone_through(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        wire.head().unwrap();
        wire.bytes(1000);
        wire.send(b"HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 3\r\n\r\nbig");
        wire.stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(wire.ends_within(Duration::from_secs(3)).is_some());
    });
    let rig = Rig::start(io, &[endpoint.address]);
    *rig.fake.inspect.lock() = None;
    let mut client = rig.client();
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n");
    client.send(&pattern(1000));
    let answer = client.answer();
    assert_eq!((answer.status(), answer.field("connection"), &answer.body[..]), (413, Some("close"), &b"big"[..]));
    // The rest of the body is of no use to anybody, but sending it for a while does no harm.
    client.send(&pattern(100_000));
    assert!(client.ends_within(Duration::from_secs(4)).is_some());
    rig.settled();
}

fn an_answer_may_come_before_a_whole_body_is_taken(io: Io) {
    let endpoint = Endpoint::start(|wire, number| {
        if number == 0 {
            wire.head().unwrap();
            wire.send(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\nno");
            // Reads no more for a while: the rest fills the sockets, and nobody waits for it to go.
            std::thread::sleep(Duration::from_millis(500));
            assert!(wire.ends_within(Duration::from_secs(3)).is_some());
        } else {
            wire.request();
            wire.send(&ok(b"yes"));
            wire.rest();
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    let answer = client.ask(&post(&pattern(25_000_000)));
    assert_eq!((answer.status(), &answer.body[..]), (401, &b"no"[..]));
    // The client's body was read whole, so its connection goes on.
    assert_eq!(client.ask(&post(b"x")).body, b"yes");
    assert_eq!(endpoint.connections(), 2);
}

fn an_endpoint_may_answer_while_it_reads(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(_head) = wire.head() {
            wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 3000000\r\n\r\n");
            for _ in 0..300 {
                let piece = wire.bytes(10_000);
                wire.send(&piece);
            }
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    for inspect in [None, Some(32 << 20)] {
        *rig.fake.inspect.lock() = inspect;
        let mut client = rig.client();
        let mut sender = client.stream.try_clone().unwrap();
        let sent = std::thread::spawn(move || sender.write_all(&post(&pattern(3_000_000))).unwrap());
        assert!(client.answer().body == pattern(3_000_000));
        sent.join().unwrap();
    }
}

fn a_body_in_many_pieces_is_read_whole(io: Io) {
    let endpoint = echo();
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    let request = post(&pattern(40_000));
    for piece in request.chunks(501) {
        client.send(piece);
        std::thread::sleep(Duration::from_micros(300));
    }
    let done = clock::now();
    assert!(client.answer().body == pattern(40_000));
    assert!(done.elapsed() < Duration::from_secs(2));
}

/// gateway-api-inference-extension#2058, ai-gateway#827: limits of 32 KiB and of 4 MiB within a chain of proxies.
fn bodies_beyond_the_limits_of_others_pass_byte_for_byte(io: Io) {
    let endpoint = echo();
    let rig = Rig::start(io, &[endpoint.address]);
    for inspect in [Some(32 << 20), None] {
        *rig.fake.inspect.lock() = inspect;
        let mut client = rig.client();
        for size in [32_768, 32_769, 4_194_304, 4_194_305] {
            let body = pattern(size);
            assert!(client.ask(&post(&body)).body == body, "{size} {inspect:?}");
            assert!(client.ask(&in_chunks(&body)).body == body, "{size} in chunks, {inspect:?}");
        }
    }
}

fn what_follows_a_body_that_went_through_is_the_next_request(io: Io) {
    let endpoint = echo();
    let rig = Rig::start(io, &[endpoint.address]);
    *rig.fake.inspect.lock() = None;
    let mut client = rig.client();
    client.send(&[post(&pattern(100_000)), post(b"second"), post(&pattern(70_000)), post(b"last")].concat());
    assert!(client.answer().body == pattern(100_000));
    assert_eq!(client.answer().body, b"second");
    assert!(client.answer().body == pattern(70_000));
    assert_eq!(client.answer().body, b"last");
}

//! Clients that leave.

use std::io::Write;
use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::on_both_back_ends;
use super::rig::{Endpoint, LEAVING, PATIENCE, Rig, Wire, eventually, get, ok, post};
use crate::clock;
use crate::proxy::{Event, Io, Phase, Usage};

on_both_back_ends![
    leaving_within_the_head_or_body_bothers_no_endpoint,
    leaving_while_the_endpoint_thinks_is_passed_on_at_once,
    leaving_is_passed_on_whatever_the_path,
    leaving_while_the_answer_streams_is_passed_on_at_once,
    leaving_a_stalled_answer_is_passed_on_at_once,
    leaving_behind_the_last_event_of_a_stream_is_no_leaving,
    leaving_while_a_body_goes_through_is_passed_on_at_once,
    leaving_during_a_decision_or_a_connect_ends_them,
    a_fin_behind_a_request_counts_as_leaving_unless_the_rule_says_otherwise,
    a_fin_while_a_decision_is_made_is_no_leaving_where_a_rule_says_so,
    leaving_with_a_pipelined_request_unread_is_seen,
    load_never_drifts_however_clients_leave,
];

/// An endpoint that reads a request, runs `then`, and tells when its client was gone.
fn watching(then: impl Fn(&mut Wire) + Send + Sync + 'static) -> (Endpoint, mpsc::Receiver<Instant>) {
    let (gone, told) = mpsc::sync_channel(100);
    let endpoint = Endpoint::start(move |wire, _| {
        if wire.request().is_some() {
            then(wire);
            assert!(wire.ends_within(PATIENCE).is_some(), "the endpoint's client never left");
            gone.send(clock::now()).unwrap();
        }
    });
    (endpoint, told)
}

fn passed_on(left: Instant, told: &mpsc::Receiver<Instant>) {
    let seen = told.recv_timeout(PATIENCE).unwrap();
    assert!(seen.saturating_duration_since(left) < LEAVING, "{:?}", seen.saturating_duration_since(left));
}

fn leaving_within_the_head_or_body_bothers_no_endpoint(io: Io) {
    let endpoint = Endpoint::answering(b"never");
    let rig = Rig::start(io, &[endpoint.address]);
    for part in ["GET / HT", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"] {
        let mut client = rig.client();
        client.send(part.as_bytes());
        std::thread::sleep(Duration::from_millis(20));
        client.leave();
    }
    rig.client().leave();
    eventually("all have been here", || rig.counts.get("opened") == 3);
    rig.settled();
    assert_eq!((rig.counts.get("left head"), rig.counts.get("left body")), (1, 1));
    assert_eq!(endpoint.connections(), 0);
}

fn leaving_while_the_endpoint_thinks_is_passed_on_at_once(io: Io) {
    let (endpoint, told) = watching(|_wire| ());
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    eventually("the request is in flight", || rig.fake.in_flight() == 1);
    std::thread::sleep(Duration::from_millis(50));
    passed_on(client.leave(), &told);
    rig.settled();
    assert_eq!(rig.counts.get("left wait"), 1);
    assert_eq!(*rig.fake.events.lock(), [Event::ClientLeft { position: Some(0), phase: Phase::Wait }]);
}

/// litellm#36123: mended for one path, broken for the others.
fn leaving_is_passed_on_whatever_the_path(io: Io) {
    let (endpoint, told) = watching(|_wire| ());
    let rig = Rig::start(io, &[endpoint.address]);
    let paths = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/unknown?x"];
    for (path, inspect) in paths.iter().flat_map(|path| [(path, Some(1 << 20)), (path, None)]) {
        *rig.fake.inspect.lock() = inspect;
        let mut client = rig.client();
        client.send(format!("POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}").as_bytes());
        eventually("the request is in flight", || rig.fake.in_flight() == 1);
        std::thread::sleep(Duration::from_millis(20));
        passed_on(client.leave(), &told);
        eventually("it is over", || rig.fake.in_flight() == 0);
    }
    rig.settled();
    assert_eq!(rig.counts.get("left wait"), 10);
}

fn leaving_while_the_answer_streams_is_passed_on_at_once(io: Io) {
    let (endpoint, told) =
        watching(|wire| wire.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"));
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    client.head().unwrap();
    client.bytes(8);
    passed_on(client.leave(), &told);
    rig.settled();
    assert_eq!(rig.counts.get("left stream"), 1);
}

/// openai's client does not wait for what ends the framing.
fn leaving_behind_the_last_event_of_a_stream_is_no_leaving(io: Io) {
    let event = r#"data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}"#;
    let usage = Some(Usage { prompt_tokens: 9, cached_tokens: Some(8), output_tokens: None });
    for (last, is_end) in
        [("data: [DONE]\n\n", true), ("data: {\"text\":\"[DONE]\"}\n\n", false), ("data: [DONE]", false)]
    {
        let events = format!("{event}\n\n{last}");
        let (endpoint, told) = watching(move |wire| {
            wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
            wire.send(format!("{:x}\r\n{events}\r\n", events.len()).as_bytes());
        });
        let rig = Rig::start(io, &[endpoint.address]);
        let mut client = rig.client();
        client.send(&post(b"{}"));
        client.head().unwrap();
        client.bytes(format!("{:x}\r\n{event}\n\n{last}\r\n", event.len() + 2 + last.len()).len());
        passed_on(client.leave(), &told);
        rig.settled();
        let events = rig.fake.events.lock();
        if is_end {
            assert!(
                matches!(events.last(), Some(Event::Finished { usage: found, .. }) if *found == usage),
                "{events:?}"
            );
        } else {
            let left = Event::ClientLeft { position: Some(0), phase: Phase::Stream };
            assert_eq!(events.last(), Some(&left), "{last}");
        }
        assert_eq!(rig.counts.get("left stream"), u64::from(!is_end), "{last}");
    }
}

fn leaving_a_stalled_answer_is_passed_on_at_once(io: Io) {
    // The client reads nothing, so the answer stands still in every buffer, and then it leaves.
    let (endpoint, told) = watching(|wire| {
        wire.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n");
        wire.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        while wire.stream.write_all(&vec![b'x'; 65536]).is_ok() {}
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(&get("/"));
    client.head().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    passed_on(client.leave(), &told);
    rig.settled();
    assert_eq!(rig.counts.get("left stream"), 1);
}

fn leaving_while_a_body_goes_through_is_passed_on_at_once(io: Io) {
    let (gone, told) = mpsc::channel();
    let gone = parking_lot::Mutex::new(gone);
    let endpoint = Endpoint::start(move |wire, _| {
        wire.head().unwrap();
        wire.bytes(100);
        assert!(wire.ends_within(PATIENCE).is_some());
        gone.lock().send(clock::now()).unwrap();
    });
    let rig = Rig::start(io, &[endpoint.address]);
    *rig.fake.inspect.lock() = None;
    let mut client = rig.client();
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n");
    client.send(&[b'x'; 100]);
    eventually("the body arrives", || endpoint.connections() == 1);
    std::thread::sleep(Duration::from_millis(50));
    passed_on(client.leave(), &told);
    rig.settled();
    assert_eq!(rig.counts.get("left body"), 1);
}

fn leaving_during_a_decision_or_a_connect_ends_them(io: Io) {
    let endpoint = Endpoint::answering(b"never");
    let rig = Rig::with(io, &[endpoint.address], |config| config.decision_budget = PATIENCE);
    rig.fake.heavy.store(true, Ordering::SeqCst);
    *rig.fake.decision_takes.lock() = Duration::from_millis(300);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    eventually("the decision is on its way", || rig.counts.get("offloaded") == 1);
    client.leave();
    eventually("the leaving is seen", || rig.counts.get("left decide") == 1);
    rig.settled();
    assert_eq!(endpoint.connections(), 0);

    // A listener whose queue is full answers no more SYNs.
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    full.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    full.listen(0).unwrap();
    let full = TcpListener::from(full);
    let address = full.local_addr().unwrap();
    let _queue: Vec<_> = (0..4)
        .filter_map(|_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(100)).ok())
        .collect();
    let rig = Rig::start(io, &[address]);
    rig.fake.limits.lock().connect = PATIENCE;
    let mut client = rig.client();
    client.send(&post(b"{}"));
    eventually("the request is in flight", || rig.fake.in_flight() == 1);
    client.leave();
    eventually("the leaving is seen", || rig.counts.get("left connect") == 1);
    rig.settled();
}

fn a_fin_behind_a_request_counts_as_leaving_unless_the_rule_says_otherwise(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(_request) = wire.request() {
            std::thread::sleep(Duration::from_millis(150));
            // Nobody is there to read it in the first case.
            drop(wire.stream.write_all(&ok(b"late")));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    eventually("the request is in flight", || rig.fake.in_flight() == 1);
    std::thread::sleep(Duration::from_millis(30));
    client.finish();
    assert_eq!(client.rest(), b"");
    eventually("it is counted", || rig.counts.get("left wait") == 1);
    rig.fake.half_close.store(true, Ordering::SeqCst);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    client.finish();
    assert_eq!(client.answer().body, b"late");
    assert_eq!(client.rest(), b"");
    // A reset is a leaving in any case.
    let (endpoint, told) = watching(|_wire| ());
    rig.fake.endpoints.lock()[0] = endpoint.address;
    let mut client = rig.client();
    client.send(&post(b"{}"));
    client.finish();
    eventually("the request is in flight", || rig.fake.in_flight() == 1);
    std::thread::sleep(Duration::from_millis(50));
    socket2::SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
    passed_on(client.leave(), &told);
    rig.settled();
}

fn a_fin_while_a_decision_is_made_is_no_leaving_where_a_rule_says_so(io: Io) {
    let endpoint = Endpoint::answering(b"fine");
    let rig = Rig::with(io, &[endpoint.address], |config| config.decision_budget = Duration::from_secs(5));
    rig.fake.half_close.store(true, Ordering::SeqCst);
    rig.fake.heavy.store(true, Ordering::SeqCst);
    *rig.fake.decision_takes.lock() = Duration::from_millis(100);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    client.finish();
    assert_eq!(client.answer().body, b"fine");
    rig.fake.half_close.store(false, Ordering::SeqCst);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    client.finish();
    assert_eq!(client.rest(), b"");
    eventually("it is counted", || rig.counts.get("left decide") == 1);
    rig.settled();
}

fn leaving_with_a_pipelined_request_unread_is_seen(io: Io) {
    let (endpoint, told) = watching(|_wire| ());
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    eventually("the request is in flight", || rig.fake.in_flight() == 1);
    client.send(&post(&vec![b'x'; 50_000]));
    std::thread::sleep(Duration::from_millis(50));
    passed_on(client.leave(), &told);
    rig.settled();
}

fn load_never_drifts_however_clients_leave(io: Io) {
    let endpoint = Endpoint::start(|wire, number| {
        while let Some(_request) = wire.request() {
            std::thread::sleep(Duration::from_micros(number as u64 % 7 * 300));
            let stream = &mut wire.stream;
            let sent = stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n").is_ok();
            std::thread::sleep(Duration::from_micros(number as u64 % 5 * 300));
            if number % 11 == 3 || !sent || stream.write_all(b"0\r\n\r\n").is_err() {
                return;
            }
        }
    });
    let rig = Rig::start(io, &[endpoint.address, Endpoint::refusing()]);
    // A fixed sequence that looks random: which clients leave when.
    let mut state = 7_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..400 {
        let mut client = rig.client();
        let request = post(&vec![b'x'; usize::try_from(random(9000)).unwrap()]);
        let cut = usize::try_from(random(request.len() as u64 * 2)).unwrap().min(request.len());
        client.send(&request[..cut]);
        std::thread::sleep(Duration::from_micros(random(1500)));
        if random(3) == 0 {
            socket2::SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
    }
    eventually("all have been here", || rig.counts.get("opened") == 400);
    rig.settled();
    eventually("nothing of a body is held", || rig.counts.get("body bytes held") == 0);
    assert_eq!(rig.counts.get("panicked"), 0);
}

//! Answers that come bit by bit.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::on_both_back_ends;
use super::rig::{Ended, Endpoint, PATIENCE, Rig, Wire, eventually, get, pattern, post};
use crate::clock;
use crate::proxy::{Event, Io, bind};

on_both_back_ends![
    each_event_arrives_before_the_next_is_sent,
    a_slow_reader_holds_little_and_hinders_nobody,
    a_stream_that_dies_midway_is_never_ended_cleanly,
    an_error_event_within_a_stream_is_the_engine_s_answer,
    a_thousand_streams_at_once,
    a_large_answer_arrives_whole,
];

const STREAM: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

fn event(number: usize) -> Vec<u8> {
    let data = format!("data: {{\"number\": {number}}}\n\n");
    format!("{:x}\r\n{data}\r\n", data.len()).into_bytes()
}

fn each_event_arrives_before_the_next_is_sent(io: Io) {
    // The endpoint sends an event only when the client says that it has the one before.
    let (seen, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let endpoint = Endpoint::start(move |wire, _| {
        wire.request().unwrap();
        wire.send(STREAM);
        let wait = wait.lock();
        for number in 0..30 {
            wait.recv_timeout(Duration::from_secs(5)).unwrap();
            wire.send(&event(number));
        }
        wait.recv_timeout(Duration::from_secs(5)).unwrap();
        wire.send(b"0\r\n\r\n");
        wire.rest();
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(&post(b"{\"stream\": true}"));
    let head = client.head().unwrap();
    assert!(head.contains("transfer-encoding: chunked") && head.contains("content-type: text/event-stream"), "{head}");
    for number in 0..30 {
        let sent = clock::now();
        seen.send(()).unwrap();
        let expected = event(number);
        assert_eq!(client.bytes(expected.len()), expected);
        assert!(sent.elapsed() < Duration::from_millis(500), "event {number} took {:?}", sent.elapsed());
    }
    seen.send(()).unwrap();
    assert_eq!(client.bytes(5), b"0\r\n\r\n");
}

fn a_slow_reader_holds_little_and_hinders_nobody(io: Io) {
    let pushed = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&pushed);
    let endpoint = Endpoint::start(move |wire, _| {
        while let Some(request) = wire.request() {
            if request.body == b"small" {
                wire.send(&super::rig::ok(b"quick"));
                continue;
            }
            wire.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
            let piece = [b"4000\r\n", &[b'x'; 0x4000][..], b"\r\n"].concat();
            wire.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
            // Goes on until nobody takes any more.
            while let Ok(count) = wire.stream.write(&piece) {
                counted.fetch_add(count, Ordering::SeqCst);
            }
            wire.rest();
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut slow = rig.client();
    slow.send(&post(b"large"));
    eventually("the endpoint is held back", || {
        let before = pushed.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(600));
        before > 0 && before == pushed.load(Ordering::SeqCst)
    });
    let last = pushed.load(Ordering::SeqCst);
    // What lies between is in the sockets' buffers of the kernel (at most 6 MB a direction on loopback) and one of ours.
    assert!(last < 24 << 20, "{last} bytes were taken from the endpoint");
    eventually("a tick", || rig.counts.get("ticks") > 2);
    assert!(rig.counts.get("buffers") <= 90 << 10, "{} bytes in our own buffers", rig.counts.get("buffers"));
    let mut other = rig.client();
    for _ in 0..50 {
        let asked = clock::now();
        assert_eq!(other.ask(&post(b"small")).body, b"quick");
        assert!(asked.elapsed() < Duration::from_millis(500));
    }
    drop(slow);
    drop(other);
    rig.settled();
}

fn a_stream_that_dies_midway_is_never_ended_cleanly(io: Io) {
    let fronts: [&'static [u8]; 4] = [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nx: y\r\n\r\nhello",
    ];
    for (number, front) in fronts.into_iter().enumerate() {
        for reset in [false, true] {
            if number == 3 && !reset {
                continue; // That is its clean end.
            }
            let endpoint = Endpoint::start(move |wire, _| {
                wire.request().unwrap();
                wire.send(front);
                std::thread::sleep(Duration::from_millis(30));
                if reset {
                    socket2::SockRef::from(&wire.stream).set_linger(Some(Duration::ZERO)).unwrap();
                }
            });
            let rig = Rig::start(io, &[endpoint.address]);
            let mut client = rig.client();
            client.send(&get("/"));
            let head = client.head().unwrap();
            assert!(head.starts_with("HTTP/1.1 200 OK"));
            let body = front.split(|byte| *byte == b'\n').next_back().unwrap().len().min(5);
            drop(client.bytes(body));
            let ended = client.ends_within(Duration::from_secs(2));
            // Chunks and lengths show by themselves that something is missing; only a reset shows it for the last.
            assert!(
                ended == Some(Ended::ByReset) || (number != 3 && ended == Some(Ended::Cleanly)),
                "{number} {ended:?}"
            );
            rig.settled();
            let events = rig.fake.events.lock().clone();
            assert!(events.iter().any(|event| matches!(event, Event::BrokeOff { .. })), "{events:?}");
            assert_eq!(endpoint.connections(), 1, "it is not sent again");
        }
    }
}

/// dynamo#12786: what an engine says of its error behind the first event is passed on as it is. The stream counts as what it
/// is: an answer with status 200, whole where it has its end.
fn an_error_event_within_a_stream_is_the_engine_s_answer(io: Io) {
    let error =
        "data: {\"error\": {\"message\": \"out of memory\", \"type\": \"InternalServerError\", \"code\": 500}}\n\n";
    for (last, is_whole) in [("data: [DONE]\n\n", true), ("", true), ("", false)] {
        let told = format!("{error}{last}");
        let chunk = format!("{:x}\r\n{told}\r\n", told.len());
        let sent = chunk.clone();
        let endpoint = Endpoint::start(move |wire, _| {
            while let Some(_request) = wire.request() {
                wire.send(STREAM);
                wire.send(&event(0));
                std::thread::sleep(Duration::from_millis(20));
                wire.send(sent.as_bytes());
                if !is_whole {
                    return;
                }
                wire.send(b"0\r\n\r\n");
            }
        });
        let rig = Rig::start(io, &[endpoint.address]);
        let mut client = rig.client();
        client.send(&post(b"{\"stream\": true}"));
        assert!(client.head().unwrap().starts_with("HTTP/1.1 200 OK\r\n"));
        let expected = [&event(0)[..], chunk.as_bytes()].concat();
        assert_eq!(client.bytes(expected.len()), expected);
        if is_whole {
            assert_eq!(client.bytes(5), b"0\r\n\r\n");
        } else {
            assert_eq!(client.rest(), b"", "no end that the engine did not send");
        }
        eventually("it is over", || !rig.fake.told.lock().is_empty());
        let events = rig.fake.told.lock()[0].events.clone();
        assert!(matches!(events[0], Event::Answered { position: 0, status: 200, .. }), "{events:?}");
        match events[1..] {
            [Event::Finished { position: 0, usage: None, .. }] if is_whole => {
                assert_eq!(client.ask(&get("/nobody")).status(), 404, "the connection is as good as before");
            }
            [Event::BrokeOff { position: 0 }] if !is_whole => {}
            _ => panic!("{events:?}"),
        }
        assert_eq!(rig.counts.get("200"), 1);
        assert_eq!(rig.counts.sum(|what| what.starts_with('5') || what.starts_with("left")), 0);
        drop(client);
        rig.settled();
    }
}

fn a_thousand_streams_at_once(io: Io) {
    const STREAMS: usize = 1000;
    let arrived = Mutex::new(0);
    let all_here = Condvar::new();
    // Room for all to knock at once.
    let listener = bind(([127, 0, 0, 1], 0).into(), 1).unwrap().remove(0);
    let endpoint = Endpoint::on(listener, move |wire, _| {
        while let Some(request) = wire.request() {
            wire.send(STREAM);
            wire.send(&event(0));
            let mut arrived = arrived.lock();
            *arrived += 1;
            if *arrived == STREAMS {
                all_here.notify_all();
            } else {
                let late = all_here.wait_while_for(&mut arrived, |arrived| *arrived < STREAMS, 3 * PATIENCE);
                assert!(!late.timed_out(), "only {arrived} streams at once");
            }
            drop(arrived);
            wire.send(format!("{:x}\r\n", request.body.len()).as_bytes());
            wire.send(&request.body);
            wire.send(b"\r\n0\r\n\r\n");
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    rig.fake.limits.lock().connect = PATIENCE;
    let mut clients: Vec<Wire> = (0..STREAMS).map(|_| rig.client()).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.send(&post(format!("{{\"number\": {number}}}").as_bytes()));
    }
    for (number, client) in clients.iter_mut().enumerate() {
        let answer = client.answer();
        let expected = [b"data: {\"number\": 0}\n\n", format!("{{\"number\": {number}}}").as_bytes()].concat();
        assert_eq!(answer.body, expected);
    }
    drop(clients);
    rig.settled();
}

fn a_large_answer_arrives_whole(io: Io) {
    let body: Vec<u8> = pattern(20_000_000);
    let sent = body.clone();
    let endpoint = Endpoint::start(move |wire, _| {
        while let Some(_request) = wire.request() {
            wire.send(&super::rig::ok(&sent));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for _ in 0..2 {
        assert!(client.ask(&get("/")).body == body);
    }
    assert!(rig.counts.get("bytes to_client") > 20_000_000);
}

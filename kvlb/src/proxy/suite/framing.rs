//! Messages whose ends could be mistaken.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::on_both_back_ends;
use super::rig::{Ended, Endpoint, Rig, get, ok, pattern};
use crate::clock;
use crate::proxy::Io;

on_both_back_ends![
    ambiguous_requests_are_refused_before_any_endpoint_sees_them,
    garbage_is_refused,
    large_heads_pass_up_to_their_limit,
    the_limit_of_heads_can_be_set,
    a_chunked_request_goes_on_chunked_with_the_same_payload,
    a_chunked_answer_passes_byte_for_byte,
    broken_chunks_are_refused,
    expect_continue_is_answered_when_the_body_is_read_here,
    expect_continue_is_the_endpoints_business_when_the_body_goes_through,
    a_client_that_asks_before_it_sends_megabytes_hardly_waits,
    an_early_refusal_reaches_a_client_that_waits_to_send,
    interim_answers_pass,
    answers_that_make_no_sense_are_told_so,
    bytes_behind_an_answer_are_not_taken_for_the_next,
];

fn ambiguous_requests_are_refused_before_any_endpoint_sees_them(io: Io) {
    let endpoint = Endpoint::answering(b"reached");
    let rig = Rig::start(io, &[endpoint.address]);
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
    let cases = [
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", 400, "bad_framing"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5", 400, "bad_framing"),
        ("Content-Length: 5\r\nContent-Length: 35", 400, "bad_framing"),
        ("Content-Length: 5, 35", 400, "bad_framing"),
        ("Content-Length: +0", 400, "bad_framing"),
        ("Content-Length: 99999999999999999999", 400, "bad_framing"),
        ("Transfer-Encoding: chunked, identity", 400, "bad_framing"),
        ("Transfer-Encoding: xchunked", 400, "bad_framing"),
        ("Transfer-Encoding: \u{b}chunked", 400, "bad_request"),
        ("Transfer-Encoding : chunked", 400, "bad_request"),
        ("Transfer-Encoding:\r\n chunked", 400, "bad_request"),
        ("Transfer-Encoding: gzip, chunked", 501, "transfer_coding_not_supported"),
        ("Content-Length: 0\r\n X: folded", 400, "bad_request"),
        ("Host: b", 400, "bad_request"),
        ("X: \0", 400, "bad_request"),
        ("X: a\rX", 400, "bad_request"),
        ("Connection: Upgrade\r\nUpgrade: websocket", 501, "upgrade_not_supported"),
        ("Expect: tea", 417, "expectation_not_supported"),
    ];
    for (fields, status, code) in cases {
        let mut client = rig.client();
        client.send(format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n\r\n0\r\n\r\n{smuggled}").as_bytes());
        let answer = client.answer();
        assert_eq!((answer.status(), answer.own_code().as_str()), (status, code), "{fields:?}");
        assert_eq!(answer.field("connection"), Some("close"));
        assert_eq!(client.rest(), b"", "{fields:?}");
    }
    let mut client = rig.client();
    client.send(format!("CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n{smuggled}").as_bytes());
    assert_eq!(client.answer().own_code(), "connect_not_supported");
    assert_eq!(client.rest(), b"");
    assert_eq!(endpoint.connections(), 0);
}

fn garbage_is_refused(io: Io) {
    let rig = Rig::start(io, &[]);
    let cases: [(&[u8], u16); 7] = [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"\0\0\0\0", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 400),
        (b"GET http://[::1 HTTP/1.1\r\n\r\n", 400),
        (b"{\"prompt\": 1}\r\n", 400),
    ];
    for (bytes, status) in cases {
        let mut client = rig.client();
        client.send(bytes);
        let answer = client.answer();
        assert_eq!(answer.status(), status, "{}", bytes.escape_ascii());
        answer.own_code();
        assert_eq!(client.rest(), b"");
    }
}

fn large_heads_pass_up_to_their_limit(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            wire.send(&ok(request.field("x").unwrap().len().to_string().as_bytes()));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let head = |filler: usize| format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(filler));
    let frame = head(0).len();
    let mut client = rig.client();
    for filler in [3_000, 3_700, 15_800, 20_000, 60_000, 65_536 - frame] {
        assert_eq!(client.ask(head(filler).as_bytes()).body, filler.to_string().as_bytes());
    }
    client.send(head(65_536 - frame + 1).as_bytes());
    let answer = client.answer();
    assert_eq!((answer.status(), answer.own_code().as_str()), (431, "header_too_large"));
    let mut client = rig.client();
    client.send(format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(20_000)).as_bytes());
    assert_eq!(client.answer().status(), 414);
    let mut client = rig.client();
    client.send(format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "a: b\r\n".repeat(200)).as_bytes());
    assert_eq!(client.answer().status(), 431);
}

fn the_limit_of_heads_can_be_set(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    let head = |size: usize| {
        let frame = "GET / HTTP/1.1\r\nHost: a\r\nX: \r\n\r\n".len();
        format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(size - frame))
    };
    for limit in [5_000, 200_000] {
        let rig = Rig::with(io, &[endpoint.address], |config| config.head_max = limit);
        let mut client = rig.client();
        assert_eq!(client.ask(head(limit).as_bytes()).status(), 200);
        client.send(head(limit + 1).as_bytes());
        let answer = client.answer();
        assert_eq!((answer.status(), answer.own_code().as_str()), (431, "header_too_large"));
    }
}

/// A body in chunks of every size up to its own, with an extension and a trailer.
fn chunks(payload: &[u8], sizes: &[usize]) -> Vec<u8> {
    let mut raw = Vec::new();
    let mut rest = payload;
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (chunk, tail) = rest.split_at((*size).min(rest.len()));
        raw.extend_from_slice(format!("{:X};n=\"v\"\r\n", chunk.len()).as_bytes());
        raw.extend_from_slice(chunk);
        raw.extend_from_slice(b"\r\n");
        rest = tail;
    }
    raw.extend_from_slice(b"0\r\nX-Trailer: yes\r\n\r\n");
    raw
}

const CHUNKED: &[u8] = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";

fn a_chunked_request_goes_on_chunked_with_the_same_payload(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            assert_eq!(request.field("transfer-encoding"), Some("chunked"));
            assert_eq!(request.field("content-length"), None);
            assert!(request.raw.ends_with(b"\r\n0\r\nX-Trailer: yes\r\n\r\n") || request.body.is_empty());
            wire.send(&ok(&request.body));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    for inspect in [Some(1 << 20), Some(50), None] {
        *rig.fake.inspect.lock() = inspect;
        let mut client = rig.client();
        for (size, sizes) in
            [(0, &[1][..]), (10, &[1]), (300, &[7, 1, 90]), (9000, &[4000, 3]), (200_000, &[65_536, 1, 5000])]
        {
            let payload: Vec<u8> = pattern(size);
            let raw = chunks(&payload, sizes);
            client.send(CHUNKED);
            for piece in raw.chunks(1.max(raw.len() / 7)) {
                std::thread::sleep(Duration::from_millis(1));
                client.send(piece);
            }
            let answer = client.answer();
            assert_eq!(answer.status(), 200, "{size} {inspect:?}");
            assert!(answer.body == payload, "{size} {inspect:?}");
            if inspect == Some(1 << 20) {
                assert_eq!(rig.fake.bodies.lock().pop().unwrap().as_deref(), Ok(&payload[..]));
            }
        }
        // A request right behind the body's end is the next request.
        client.send(&[CHUNKED, &chunks(b"hello", &[3]), CHUNKED, &chunks(b"world", &[5])].concat());
        let (first, second) = (client.answer(), client.answer());
        assert_eq!((&first.body[..], &second.body[..]), (&b"hello"[..], &b"world"[..]), "{inspect:?}");
    }
}

fn a_chunked_answer_passes_byte_for_byte(io: Io) {
    let payload: Vec<u8> = pattern(150_000);
    let raw = chunks(&payload, &[1, 70_000, 333]);
    let sent = raw.clone();
    let endpoint = Endpoint::start(move |wire, _| {
        while let Some(_request) = wire.request() {
            wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            for piece in sent.chunks(40_001) {
                wire.send(piece);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for _ in 0..3 {
        let answer = client.ask(&get("/"));
        assert!(answer.raw == raw && answer.body == payload);
    }
    assert_eq!(endpoint.connections(), 1);
}

fn broken_chunks_are_refused(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        wire.head();
        wire.rest();
    });
    let rig = Rig::start(io, &[endpoint.address]);
    for inspect in [Some(1 << 20), None] {
        *rig.fake.inspect.lock() = inspect;
        for broken in ["5\nhello", "5\r\nhelloX", "zz\r\n", "-5\r\n", "5;a\0\r\n", "0\r\nContent-Length: 5\r\n\r\n"] {
            let mut client = rig.client();
            client.send(CHUNKED);
            client.send(b"3\r\nabc\r\n");
            std::thread::sleep(Duration::from_millis(10));
            client.send(broken.as_bytes());
            let answer = client.answer();
            assert_eq!((answer.status(), answer.own_code().as_str()), (400, "bad_framing"), "{broken:?}");
            assert_eq!(client.rest(), b"");
        }
    }
    rig.settled();
}

fn expect_continue_is_answered_when_the_body_is_read_here(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            assert_eq!(request.field("expect"), None);
            wire.send(&ok(&request.body));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 5\r\n\r\n");
    assert_eq!(client.head().unwrap(), "HTTP/1.1 100 Continue\r\n\r\n");
    client.send(b"hello");
    assert_eq!(client.answer().body, b"hello");
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n");
    assert_eq!(client.head().unwrap(), "HTTP/1.1 100 Continue\r\n\r\n");
    client.send(b"1\r\nx\r\n0\r\n\r\n");
    assert_eq!(client.answer().body, b"x");
    // A client that did not wait is not told.
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello");
    assert_eq!(client.answer().status(), 200);
}

fn expect_continue_is_the_endpoints_business_when_the_body_goes_through(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        let head = wire.head().unwrap();
        assert!(head.to_ascii_lowercase().contains("expect: 100-continue"), "{head}");
        std::thread::sleep(Duration::from_millis(30));
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\n");
        assert_eq!(wire.bytes(5), b"hello");
        wire.send(&ok(b"fine"));
    });
    let rig = Rig::start(io, &[endpoint.address]);
    *rig.fake.inspect.lock() = None;
    let mut client = rig.client();
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
    assert_eq!(client.head().unwrap(), "HTTP/1.1 100 Continue\r\n\r\n");
    client.send(b"hello");
    let answer = client.answer();
    assert_eq!((&answer.body[..], answer.field("connection")), (&b"fine"[..], None));
}

/// As curl sends what is larger than 1 MB: without the 100 it waits for a second.
fn a_client_that_asks_before_it_sends_megabytes_hardly_waits(io: Io) {
    const SIZE: usize = 2_000_000;
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(head) = wire.head() {
            if head.to_ascii_lowercase().contains("\r\nexpect: 100-continue\r\n") {
                wire.send(b"HTTP/1.1 100 Continue\r\n\r\n");
            }
            let body = wire.bytes(SIZE);
            wire.send(&ok(&body));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    for inspect in [Some(32 << 20), None] {
        *rig.fake.inspect.lock() = inspect;
        let mut client = rig.client();
        for _ in 0..2 {
            let head = "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n";
            let asked = clock::now();
            client.send(format!("{head}Content-Length: {SIZE}\r\n\r\n").as_bytes());
            assert_eq!(client.head().unwrap(), "HTTP/1.1 100 Continue\r\n\r\n", "{inspect:?}");
            assert!(asked.elapsed() < Duration::from_millis(900), "{:?} {inspect:?}", asked.elapsed());
            assert!(client.ask(&pattern(SIZE)).body == pattern(SIZE), "{inspect:?}");
        }
    }
    assert_eq!(rig.fake.bodies.lock().iter().filter(|seen| seen.is_ok()).count(), 2);
}

fn an_early_refusal_reaches_a_client_that_waits_to_send(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        wire.head().unwrap();
        wire.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig");
        assert!(wire.ends_within(Duration::from_secs(2)).is_some());
    });
    let rig = Rig::start(io, &[endpoint.address]);
    *rig.fake.inspect.lock() = None;
    let mut client = rig.client();
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 50000000\r\n\r\n");
    let answer = client.answer();
    assert_eq!((answer.status(), answer.field("connection"), &answer.body[..]), (413, Some("close"), &b"big"[..]));
    assert_eq!(client.ends_within(Duration::from_secs(1)), Some(Ended::Cleanly));
}

fn interim_answers_pass(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(_request) = wire.request() {
            wire.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\nConnection: x\r\n\r\n");
            std::thread::sleep(Duration::from_millis(10));
            wire.send(b"HTTP/1.1 102 Processing\r\n\r\n");
            wire.send(&ok(b"done"));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for _ in 0..2 {
        client.send(&get("/"));
        assert_eq!(client.head().unwrap(), "HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n");
        assert_eq!(client.head().unwrap(), "HTTP/1.1 102 Processing\r\n\r\n");
        assert_eq!(client.answer().body, b"done");
    }
}

fn answers_that_make_no_sense_are_told_so(io: Io) {
    let cases: [&[u8]; 7] = [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnot a chunk\r\n",
    ];
    for bytes in cases {
        let endpoint = Endpoint::start(move |wire, _| {
            wire.request();
            wire.send(bytes);
            wire.rest();
        });
        let rig = Rig::start(io, &[endpoint.address]);
        let mut client = rig.client();
        let answer = client.ask(&get("/"));
        assert_eq!(
            (answer.status(), answer.own_code().as_str()),
            (502, "backend_bad_answer"),
            "{}",
            bytes.escape_ascii()
        );
        assert_eq!(client.ask(&get("/nobody")).status(), 404, "the client's connection is as good as before");
    }
    let endpoint = Endpoint::start(|wire, _| {
        wire.request();
        wire.stream.shutdown(std::net::Shutdown::Write).unwrap();
        wire.rest();
    });
    let rig = Rig::start(io, &[endpoint.address]);
    assert_eq!(rig.client().ask(&get("/")).own_code(), "backend_died");
}

fn bytes_behind_an_answer_are_not_taken_for_the_next(io: Io) {
    let endpoint = Endpoint::start(|wire, number| {
        while let Some(_request) = wire.request() {
            let answer = ok(number.to_string().as_bytes());
            wire.send(&[&answer[..], b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"].concat());
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for number in 0..5 {
        assert_eq!(client.ask(&get("/")).body, number.to_string().as_bytes());
    }
    // The same, with the excess coming while the connection waits for another request.
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    let endpoint = Endpoint::start(move |wire, number| {
        while let Some(_request) = wire.request() {
            wire.send(&ok(number.to_string().as_bytes()));
            std::thread::sleep(Duration::from_millis(5));
            wire.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 4\r\n\r\nevil");
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for number in 0..5 {
        assert_eq!(client.ask(&get("/")).body, number.to_string().as_bytes());
        // Over loopback what was sent has come.
        while sent.load(Ordering::SeqCst) <= number {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

//! What the rule learns of an answer from its end.

use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use super::on_both_back_ends;
use super::rig::{Endpoint, Rig, eventually, post};
use crate::proxy::{Event, Io, Usage};

on_both_back_ends![
    usage_is_read_however_an_answer_is_framed_and_cut,
    nothing_is_said_where_nothing_can_be_read_or_nobody_asked,
    reading_it_delays_nothing_and_changes_nothing,
];

const USAGE: Usage = Usage { prompt_tokens: 41, cached_tokens: Some(32), output_tokens: Some(6) };
const SAID: &str = r#""usage":{"prompt_tokens":41,"total_tokens":47,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":32}}"#;

fn document(letters: usize) -> String {
    format!(r#"{{"choices":[{{"text":"{}"}}],{SAID}}}"#, "\\\"usage\\\":{}".repeat(letters / 12))
}

fn events(count: usize) -> String {
    let event = "data: {\"choices\":[{\"delta\":{\"content\":\" and\"}}],\"usage\":null}\n\n".repeat(count);
    format!("{event}data: {{\"choices\":[],{SAID}}}\n\ndata: [DONE]\n\n")
}

/// A sequence that looks random and is the same each time.
fn random(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*state >> 33).unwrap() % below
}

fn chunked(body: &[u8], state: &mut u64) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::new(), body);
    while !rest.is_empty() {
        let (chunk, after) = rest.split_at((1 + random(state, 700)).min(rest.len()));
        out.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        out.extend_from_slice(chunk);
        out.extend_from_slice(b"\r\n");
        rest = after;
    }
    [out, b"0\r\n\r\n".to_vec()].concat()
}

/// What the last request's call was told at its end.
fn told(rig: &Rig) -> Option<Usage> {
    eventually("the request is over", || matches!(rig.fake.events.lock().last(), Some(Event::Finished { .. })));
    let last = rig.fake.events.lock().drain(..).next_back();
    match last {
        Some(Event::Finished { position: 0, usage, .. }) => usage,
        other => panic!("{other:?}"),
    }
}

/// An endpoint that sends what is set, in pieces, and closes.
fn sending() -> (Endpoint, std::sync::Arc<Mutex<Vec<Vec<u8>>>>) {
    let pieces = std::sync::Arc::new(Mutex::new(Vec::<Vec<u8>>::new()));
    let to_send = std::sync::Arc::clone(&pieces);
    let endpoint = Endpoint::start(move |wire, _| {
        wire.request().unwrap();
        let pieces = to_send.lock().clone();
        for piece in pieces {
            wire.send(&piece);
            std::thread::sleep(Duration::from_micros(300));
        }
    });
    (endpoint, pieces)
}

fn usage_is_read_however_an_answer_is_framed_and_cut(io: Io) {
    let (endpoint, pieces) = sending();
    let rig = Rig::start(io, &[endpoint.address]);
    let mut state = 11;
    for round in 0..24_usize {
        let (kind, body) = if round % 2 == 0 {
            ("Application/JSON", document(random(&mut state, 9000)))
        } else {
            ("text/event-stream; charset=utf-8", events(random(&mut state, 120)))
        };
        let (framing, raw) = match round / 2 % 4 {
            0 => (format!("content-length: {}\r\n", body.len()), body.clone().into_bytes()),
            1 => (String::new(), body.clone().into_bytes()),
            _ => ("transfer-encoding: chunked\r\n".to_owned(), chunked(body.as_bytes(), &mut state)),
        };
        let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{framing}connection: close\r\n\r\n");
        let mut whole = [head.into_bytes(), raw].concat();
        let mut cut = Vec::new();
        while !whole.is_empty() {
            cut.push(whole.drain(..(1 + random(&mut state, 2000)).min(whole.len())).collect());
        }
        *pieces.lock() = cut;
        let mut request = post(b"{}");
        if round % 8 >= 6 {
            // Such a client gets the payload without its chunks.
            request = String::from_utf8(request).unwrap().replace("HTTP/1.1", "HTTP/1.0").into_bytes();
        }
        let answer = rig.client().ask(&request);
        assert_eq!(String::from_utf8(answer.body).unwrap(), body, "{round}");
        assert_eq!(told(&rig), Some(USAGE), "{round}");
    }
}

fn nothing_is_said_where_nothing_can_be_read_or_nobody_asked(io: Io) {
    let (endpoint, pieces) = sending();
    let rig = Rig::start(io, &[endpoint.address]);
    let cases = [
        ("200 OK", "content-type: application/json\r\n", Some(USAGE)),
        ("200 OK", "content-type: application/json\r\ncontent-encoding: identity\r\n", Some(USAGE)),
        ("200 OK", "content-type: application/json\r\ncontent-encoding: gzip\r\n", None),
        ("200 OK", "content-type: text/plain\r\n", None),
        ("200 OK", "", None),
        ("201 Created", "content-type: application/json\r\n", None),
        ("400 Bad Request", "content-type: application/json\r\n", None),
    ];
    for (status, fields, expected) in cases {
        let body = document(100);
        let head = format!("HTTP/1.1 {status}\r\n{fields}content-length: {}\r\nconnection: close\r\n\r\n", body.len());
        *pieces.lock() = vec![[head.as_bytes(), body.as_bytes()].concat()];
        assert_eq!(rig.client().ask(&post(b"{}")).body, body.as_bytes());
        assert_eq!(told(&rig), expected, "{status} {fields}");
    }
    rig.fake.usage.store(false, Ordering::SeqCst);
    let head =
        format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", document(9).len());
    *pieces.lock() = vec![[head.as_bytes(), document(9).as_bytes()].concat()];
    rig.client().ask(&post(b"{}"));
    assert_eq!(told(&rig), None);
    // An answer that breaks off has no end to be read.
    rig.fake.usage.store(true, Ordering::SeqCst);
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        document(9).len() + 1
    );
    *pieces.lock() = vec![[head.as_bytes(), document(9).as_bytes()].concat()];
    let mut client = rig.client();
    client.send(&post(b"{}"));
    client.rest();
    eventually("it broke off", || matches!(rig.fake.events.lock().last(), Some(Event::BrokeOff { position: 0 })));
}

fn reading_it_delays_nothing_and_changes_nothing(io: Io) {
    // The endpoint sends a byte only when the client has the one before, and the event comes behind the last.
    let (seen, wait) = std::sync::mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let body = events(2);
    let sent = body.clone();
    let endpoint = Endpoint::start(move |wire, _| {
        wire.request().unwrap();
        let length = sent.len();
        wire.send(
            format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n")
                .as_bytes(),
        );
        let wait = wait.lock();
        for byte in sent.bytes() {
            wait.recv_timeout(super::rig::PATIENCE).unwrap();
            wire.send(&[byte]);
        }
        wire.rest();
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    client.head().unwrap();
    for byte in body.bytes() {
        seen.send(()).unwrap();
        assert_eq!(client.bytes(1), [byte]);
    }
    assert_eq!(told(&rig), Some(USAGE));
    drop(client);
    rig.settled();
}

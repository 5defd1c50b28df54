//! Requests in two legs, and what becomes of them where either fails.

use std::io::Write as _;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use super::on_both_back_ends;
use super::rig::{Endpoint, LEAVING, PATIENCE, Rig, eventually, ok, post};
use crate::clock;
use crate::proxy::{Event, Io, LegTerms};

on_both_back_ends![
    one_leg_follows_the_other,
    a_prefill_leg_s_refusal_is_the_client_s,
    a_prefill_leg_goes_elsewhere_however_it_fails,
    a_prefill_leg_that_everybody_fails_is_told,
    a_prefill_answer_may_be_large,
    each_leg_has_its_limit,
    a_decode_leg_goes_elsewhere_only_before_it_is_begun,
    both_legs_begin_anew_when_the_blocks_may_be_gone,
    both_legs_begin_anew_when_a_used_connection_ends_without_a_word,
    a_client_that_leaves_takes_either_leg_along,
    a_client_that_leaves_between_the_legs_has_blocks_freed,
    what_was_fetched_is_not_told_as_cached,
];

fn terms() -> LegTerms {
    LegTerms {
        prefill: PATIENCE,
        decode: Some(PATIENCE),
        handoff: PATIENCE,
        fields: "x-request-id: ours\r\n".to_owned(),
    }
}

fn rig(io: Io, endpoints: &[std::net::SocketAddr], terms: LegTerms) -> Rig {
    let rig = Rig::start(io, endpoints);
    *rig.fake.legs.lock() = Some(terms);
    rig
}

/// Heads, in lower case, and bodies.
type Asked = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// An endpoint that notes what it is asked, and answers every request with this.
fn noting(answer: Vec<u8>) -> (Endpoint, Asked) {
    let asked = Asked::default();
    let noted = Arc::clone(&asked);
    let endpoint = Endpoint::start(move |wire, _| {
        while let Some(request) = wire.request() {
            noted.lock().push((request.head.to_lowercase(), request.body));
            wire.send(&answer);
        }
    });
    (endpoint, asked)
}

fn status(status: u16, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} Some\r\ncontent-length: {}\r\nx-own: 1\r\n\r\n{body}", body.len()).into_bytes()
}

/// An endpoint that swallows connects.
fn swallowing() -> (TcpListener, Vec<std::net::TcpStream>) {
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    full.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    full.listen(0).unwrap();
    let full = TcpListener::from(full);
    let address = full.local_addr().unwrap();
    let connect = |_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(100)).ok();
    let queue = (0..4).filter_map(connect).collect();
    (full, queue)
}

fn one_leg_follows_the_other(io: Io) {
    let (prefill, first) = noting(ok(b"{blocks}"));
    let (decode, second) = noting(ok(b"answer"));
    let rig = rig(io, &[prefill.address, Endpoint::refusing(), decode.address], terms());
    let mut client = rig.client();
    for _ in 0..3 {
        let answer = client.ask(&post(b"body"));
        assert_eq!((answer.status(), answer.body.as_slice()), (200, b"answer".as_slice()));
    }
    let (first, second) = (first.lock().clone(), second.lock().clone());
    assert_eq!((first.len(), second.len()), (3, 3));
    assert!(first.iter().all(|(head, body)| body == b"prefill body" && head.contains("content-length: 12\r\n")));
    assert!(second.iter().all(|(_, body)| body == b"decode body with {blocks}"));
    for (head, _) in first.iter().chain(&second) {
        assert_eq!(head.matches("x-request-id: ours\r\n").count(), 1, "{head}");
    }
    assert_eq!((prefill.connections(), decode.connections()), (1, 1), "connections are used again");
    // A client's own id gives way only to one of ours, and chunks become a length.
    rig.fake.legs.lock().as_mut().unwrap().fields.clear();
    let chunked =
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: theirs\r\nTransfer-Encoding: chunked\r\n\r\n\
        2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n";
    assert_eq!(client.ask(chunked).body, b"answer");
    drop(client);
    rig.settled();
}

fn a_prefill_leg_s_refusal_is_the_client_s(io: Io) {
    for code in [400, 404, 422, 302] {
        let (prefill, _) = noting(status(code, "{\"error\":\"theirs\"}"));
        let (decode, second) = noting(ok(b"answer"));
        let rig = rig(io, &[prefill.address, Endpoint::refusing(), decode.address], terms());
        let answer = rig.client().ask(&post(b"body"));
        assert_eq!((answer.status(), answer.body.as_slice()), (code, b"{\"error\":\"theirs\"}".as_slice()));
        assert!(answer.head.contains("x-own: 1") && second.lock().is_empty());
        assert!(matches!(rig.fake.events.lock()[0], Event::Answered { position: 0, .. }));
        rig.settled();
    }
}

fn a_prefill_leg_goes_elsewhere_however_it_fails(io: Io) {
    let failures: [Vec<u8>; 7] = [
        status(500, "x"),
        status(503, "x"),
        status(429, "x"),
        Vec::new(),
        b"HTTP/1.1 200 OK\r\ncontent-le".to_vec(),
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf".to_vec(),
        b"nonsense\r\n\r\n".to_vec(),
    ];
    for failure in failures {
        let shown = String::from_utf8_lossy(&failure).into_owned();
        let broken = Endpoint::start(move |wire, _| {
            wire.request();
            wire.send(&failure);
        });
        let (prefill, first) = noting(ok(b"{blocks}"));
        let (decode, second) = noting(ok(b"answer"));
        let rig = rig(io, &[broken.address, prefill.address, decode.address], terms());
        assert_eq!(rig.client().ask(&post(b"body")).body, b"answer", "{shown:?}");
        assert_eq!((broken.connections(), first.lock().len(), second.lock().len()), (1, 1, 1), "{shown:?}");
        assert_eq!(rig.counts.get("retried prefill"), 1);
        rig.settled();
    }
    // Nobody listens at the first; that costs no retry budget.
    let (prefill, _) = noting(ok(b"{blocks}"));
    let (decode, _) = noting(ok(b"answer"));
    let rig = rig(io, &[Endpoint::refusing(), prefill.address, decode.address], terms());
    assert_eq!(rig.client().ask(&post(b"body")).body, b"answer");
    assert_eq!((rig.counts.get("retried connect"), rig.counts.get("retried prefill")), (1, 0));
    rig.settled();
}

fn a_prefill_leg_that_everybody_fails_is_told(io: Io) {
    let (decode, second) = noting(ok(b"answer"));
    let dead = || {
        Endpoint::start(|wire, _| {
            wire.request();
        })
    };
    let two = [dead(), dead()];
    let rig_of = |first, other| rig(io, &[first, other, decode.address], terms());
    let nobody = rig_of(two[0].address, two[1].address);
    let answer = nobody.client().ask(&post(b"body"));
    assert_eq!((answer.status(), answer.own_code().as_str()), (502, "pd_prefill_backend_died"));
    nobody.settled();
    // Who says what is wrong has the last word.
    let (angry, _) = noting(status(500, "theirs"));
    for rig in [rig_of(angry.address, two[0].address), rig_of(two[0].address, angry.address)] {
        let answer = rig.client().ask(&post(b"body"));
        assert_eq!((answer.status(), answer.body.as_slice()), (500, b"theirs".as_slice()));
        rig.settled();
    }
    // Without a budget nobody else is asked.
    let rig = rig_of(two[0].address, angry.address);
    rig.fake.retries_left.store(0, Ordering::SeqCst);
    let answer = rig.client().ask(&post(b"body"));
    assert_eq!((answer.status(), answer.own_code().as_str()), (502, "pd_prefill_backend_died"));
    assert!(second.lock().is_empty());
    rig.settled();
}

fn a_prefill_answer_may_be_large(io: Io) {
    let object = vec![b'7'; 3 << 20];
    let head = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n", object.len());
    let (prefill, _) = noting([head.as_bytes(), &object, b"\r\n0\r\n\r\n"].concat());
    let (decode, second) = noting(ok(b"answer"));
    let rig = rig(io, &[prefill.address, Endpoint::refusing(), decode.address], terms());
    assert_eq!(rig.client().ask(&post(b"body")).body, b"answer");
    assert!(second.lock()[0].1 == [b"decode body with ".as_slice(), &object].concat());
    rig.settled();
}

fn each_leg_has_its_limit(io: Io) {
    let silent = || {
        Endpoint::start(|wire, _| {
            wire.request();
            wire.request();
        })
    };
    let (prefill, _) = noting(ok(b"{blocks}"));
    let short = Duration::from_millis(150);
    let (mute, slow) = (
        silent(),
        Endpoint::start(|wire, _| {
            wire.request();
            wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n");
            while wire.stream.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        }),
    );
    for endpoint in [&mute, &slow] {
        let rig = rig(io, &[endpoint.address, prefill.address, mute.address], LegTerms { prefill: short, ..terms() });
        let answer = rig.client().ask(&post(b"body"));
        assert_eq!((answer.status(), answer.own_code().as_str()), (504, "pd_prefill_timeout"));
        assert!(matches!(rig.fake.events.lock()[0], Event::TimedOut { position: 0, status: Some(504) }));
        rig.settled();
    }
    let rig = rig(io, &[prefill.address, mute.address, mute.address], LegTerms { decode: Some(short), ..terms() });
    let answer = rig.client().ask(&post(b"body"));
    assert_eq!((answer.status(), answer.own_code().as_str()), (504, "pd_decode_timeout"));
    assert!(matches!(rig.fake.events.lock()[0], Event::TimedOut { position: 2, status: Some(504) }));
    rig.settled();
}

fn a_decode_leg_goes_elsewhere_only_before_it_is_begun(io: Io) {
    let (prefill, first) = noting(ok(b"{blocks}"));
    let (decode, second) = noting(ok(b"answer"));
    let (busy, _) = noting(status(503, "busy"));
    for early in [Endpoint::refusing(), busy.address] {
        let rig = rig(io, &[prefill.address, Endpoint::refusing(), early, decode.address], terms());
        assert_eq!(rig.client().ask(&post(b"body")).body, b"answer");
        rig.settled();
    }
    assert!(second.lock().iter().all(|(_, body)| body == b"decode body with {blocks}") && second.lock().len() == 2);
    assert_eq!(first.lock().len(), 2, "its blocks serve another decode endpoint as well");
    let dead = Endpoint::start(|wire, _| {
        wire.request();
    });
    let rig_of_dead = rig(io, &[prefill.address, Endpoint::refusing(), dead.address, decode.address], terms());
    let answer = rig_of_dead.client().ask(&post(b"body"));
    assert_eq!((answer.status(), answer.own_code().as_str()), (502, "pd_decode_backend_died"));
    rig_of_dead.settled();
    let torn = Endpoint::start(|wire, _| {
        wire.request();
        wire.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n");
    });
    let rig = rig(io, &[prefill.address, Endpoint::refusing(), torn.address, decode.address], terms());
    let mut client = rig.client();
    client.send(&post(b"body"));
    let rest = client.rest();
    assert!(rest.ends_with(b"3\r\nabc\r\n"), "what the client sees does not end cleanly");
    assert_eq!(second.lock().len(), 2, "nothing is sent twice");
    rig.settled();
}

fn both_legs_begin_anew_when_the_blocks_may_be_gone(io: Io) {
    let (prefill, first) = noting(ok(b"{blocks}"));
    let (decode, second) = noting(ok(b"answer"));
    let (full, _queue) = swallowing();
    let lease = LegTerms { handoff: Duration::from_millis(200), ..terms() };
    let rig = rig(io, &[prefill.address, Endpoint::refusing(), full.local_addr().unwrap()], lease);
    rig.fake.limits.lock().connect = PATIENCE;
    let start = clock::now();
    let mut client = rig.client();
    client.send(&post(b"body"));
    eventually("the second round has begun", || first.lock().len() == 2);
    let answer = client.answer();
    assert_eq!((answer.status(), answer.own_code().as_str()), (504, "pd_handoff_timeout"));
    assert!(start.elapsed() >= Duration::from_millis(390) && first.lock().len() == 2);
    assert_eq!(rig.counts.get("retried handoff"), 1);
    drop(client);
    // Between the rounds somebody comes who takes it.
    let mut client = rig.client();
    client.send(&post(b"body"));
    eventually("the first round is under way", || first.lock().len() == 3);
    rig.fake.endpoints.lock()[2] = decode.address;
    assert_eq!(client.answer().body, b"answer");
    assert_eq!((first.lock().len(), second.lock().len()), (4, 1));
    drop(client);
    rig.settled();
}

fn both_legs_begin_anew_when_a_used_connection_ends_without_a_word(io: Io) {
    let (prefill, first) = noting(ok(b"{blocks}"));
    // Who may have begun, and fetched the blocks, does not say so.
    let decode = Endpoint::start(|wire, number| {
        wire.request().unwrap();
        wire.send(&ok(number.to_string().as_bytes()));
        wire.request();
    });
    let (other, second) = noting(ok(b"other"));
    let rig = rig(io, &[prefill.address, Endpoint::refusing(), decode.address, other.address], terms());
    let mut client = rig.client();
    for number in 0..4 {
        assert_eq!(client.ask(&post(b"body")).body, number.to_string().as_bytes());
    }
    assert_eq!((rig.counts.get("retried stale_connection"), first.lock().len()), (3, 7));
    assert!(second.lock().is_empty(), "no other endpoint is told where blocks were");
    drop(client);
    rig.settled();
}

fn a_client_that_leaves_takes_either_leg_along(io: Io) {
    let left = Arc::new(Mutex::new(Vec::new()));
    let watching = |answers: bool| {
        let left = Arc::clone(&left);
        Endpoint::start(move |wire, _| {
            while wire.request().is_some() {
                if answers {
                    wire.send(&ok(b"{blocks}"));
                    continue;
                }
                assert!(wire.request().is_none());
                left.lock().push(clock::now());
                return;
            }
        })
    };
    let (quick, silent) = (watching(true), watching(false));
    for endpoints in [[silent.address; 3], [quick.address, quick.address, silent.address]] {
        let rig = rig(io, &endpoints, terms());
        let mut client = rig.client();
        client.send(&post(b"body"));
        eventually("the silent endpoint is asked", || {
            rig.fake.load[if endpoints[0] == silent.address { 0 } else { 2 }].load(Ordering::SeqCst) == 1
        });
        std::thread::sleep(Duration::from_millis(30));
        let gone = clock::now();
        drop(client);
        eventually("it sees its client leave", || !left.lock().is_empty());
        let seen = left.lock().remove(0);
        assert!(seen.saturating_duration_since(gone) < LEAVING, "{:?}", seen.saturating_duration_since(gone));
        rig.settled();
    }
}

fn a_client_that_leaves_between_the_legs_has_blocks_freed(io: Io) {
    let (prefill, first) = noting(ok(b"{blocks}"));
    let (decode, second) = noting(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".to_vec());
    let rig = rig(io, &[prefill.address, Endpoint::refusing(), decode.address], terms());
    rig.fake.full.store(1, Ordering::SeqCst);
    let mut client = rig.client();
    client.send(&post(b"body"));
    eventually("the prompt is computed", || first.lock().len() == 1);
    std::thread::sleep(Duration::from_millis(30));
    rig.fake.full.store(0, Ordering::SeqCst);
    drop(client);
    eventually("its blocks are freed", || !second.lock().is_empty());
    let (head, body) = second.lock()[0].clone();
    assert_eq!(body, b"release body");
    assert!(head.contains("connection: close\r\n") && head.contains("x-request-id: ours\r\n"), "{head}");
    rig.settled();
}

fn what_was_fetched_is_not_told_as_cached(io: Io) {
    let json = br#"{"usage":{"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":69}}}"#;
    let plain = [
        format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", json.len())
            .as_bytes(),
        json,
    ]
    .concat();
    let events = |cut: usize| {
        let event = [b"data: ", json.as_slice(), b"\n\ndata: [DONE]\n\n"].concat();
        let (one, two) = event.split_at(cut);
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        let chunk = |bytes: &[u8]| [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
        [head.as_bytes(), &chunk(one), &chunk(two), b"0\r\n\r\n"].concat()
    };
    let (prefill, _) = noting(ok(b"{blocks}"));
    let mut answers = vec![plain];
    answers.extend([10, 50, 60, 68].map(events));
    for answer in answers {
        let (decode, _) = noting(answer);
        let rig = rig(io, &[prefill.address, Endpoint::refusing(), decode.address], terms());
        let got = rig.client().ask(&post(b"body")).body;
        let text = String::from_utf8(got).unwrap();
        assert!(text.contains("\"cached_tokens\":32}"), "{text}");
        rig.settled();
    }
}

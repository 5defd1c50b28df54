//! Heads, framings and ways of talking that are odd, hostile, or no HTTP at all.

use std::time::Duration;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::{Client, End};
use serde_json::json;
use tokio::time::timeout;

use super::stage::{SOON, Stage, completion, exchange, post};

/// What is to become of some bytes.
enum Fate {
    /// kvlb refuses with this status and code.
    Refused(u16, &'static str),
    /// The engine answers, and has seen a body of this many bytes.
    Passed(usize),
}
use Fate::{Passed, Refused};

const BODY: &str = r#"{"model": "tiny", "prompt": "hello", "max_tokens": 1}"#;

fn head(line: &str, fields: &str) -> Vec<u8> {
    format!("{line}\r\nHost: kvlb.test\r\nContent-Type: application/json\r\n{fields}\r\n").into_bytes()
}

/// A completion with these fields, and these bytes behind its head.
fn completions(fields: &str, rest: &str) -> Vec<u8> {
    [head("POST /v1/completions HTTP/1.1", fields), rest.as_bytes().to_vec()].concat()
}

fn length(body: &str) -> String {
    format!("Content-Length: {}\r\n", body.len())
}

fn chunked(rest: &str) -> Vec<u8> {
    completions("Transfer-Encoding: chunked\r\n", rest)
}

fn get(line: &str, fields: &str) -> Vec<u8> {
    head(line, fields)
}

/// `BODY` as chunks of `size` bytes, each line with `extension`.
fn chunks(size: usize, extension: &str, trailers: &str) -> String {
    let pieces = BODY.as_bytes().chunks(size);
    let pieces = pieces.map(|piece| format!("{:x}{extension}\r\n{}\r\n", piece.len(), String::from_utf8_lossy(piece)));
    format!("{}0{extension}\r\n{trailers}\r\n", pieces.collect::<String>())
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn cases() -> Vec<(&'static str, Vec<u8>, Fate)> {
    let whole = length(BODY);
    vec![
        // Framing.
        ("one-byte chunks", chunked(&chunks(1, "", "")), Passed(BODY.len())),
        ("chunk extensions", chunked(&chunks(7, ";a=b; c=\"d;e\" ", "")), Passed(BODY.len())),
        (
            "chunk sizes with zeros",
            chunked(&format!("000000000{:X}\r\n{BODY}\r\n0\r\n\r\n", BODY.len())),
            Passed(BODY.len()),
        ),
        ("trailers", chunked(&chunks(9, "", "X-Sum: 1\r\nX-Empty:\r\n")), Passed(BODY.len())),
        ("a trailer that frames", chunked(&chunks(9, "", "Content-Length: 5\r\n")), Refused(400, "bad_framing")),
        ("a trailer that folds", chunked(&chunks(9, "", "X: 1\r\n 2\r\n")), Refused(400, "bad_framing")),
        ("a chunk size of minus one", chunked("-1\r\n\r\n"), Refused(400, "bad_framing")),
        ("a chunk size in 0x", chunked("0x5\r\nhello\r\n0\r\n\r\n"), Refused(400, "bad_framing")),
        ("a chunk size of 2^64", chunked("10000000000000000\r\n"), Refused(400, "bad_framing")),
        ("a chunk longer than it says", chunked("1\r\nab\r\n0\r\n\r\n"), Refused(400, "bad_framing")),
        ("chunk lines in bare LF", chunked("5\nhello\n0\n\n"), Refused(400, "bad_framing")),
        (
            "20 KB of chunk extension",
            chunked(&format!("5;{}\r\nhello\r\n0\r\n\r\n", "a".repeat(20_000))),
            Refused(400, "bad_framing"),
        ),
        (
            "length and chunks",
            completions(&format!("{whole}Transfer-Encoding: chunked\r\n"), &chunks(9, "", "")),
            Refused(400, "bad_framing"),
        ),
        (
            "chunks and length",
            completions(&format!("Transfer-Encoding: chunked\r\n{whole}"), &chunks(9, "", "")),
            Refused(400, "bad_framing"),
        ),
        (
            "two lengths",
            completions("Content-Length: 5\r\nContent-Length: 6\r\n", "hello!"),
            Refused(400, "bad_framing"),
        ),
        ("a list of lengths", completions("Content-Length: 5, 6\r\n", "hello!"), Refused(400, "bad_framing")),
        ("one length twice", completions(&format!("{whole}{whole}"), BODY), Passed(BODY.len())),
        ("a negative length", completions("Content-Length: -5\r\n", ""), Refused(400, "bad_framing")),
        ("a signed length", completions("Content-Length: +5\r\n", "hello"), Refused(400, "bad_framing")),
        ("a length in hex", completions("Content-Length: 0x5\r\n", "hello"), Refused(400, "bad_framing")),
        ("a length of 2^64", completions("Content-Length: 18446744073709551616\r\n", ""), Refused(400, "bad_framing")),
        ("an empty length", completions("Content-Length:\r\n", ""), Refused(400, "bad_framing")),
        (
            "gzip, then chunked",
            completions("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"),
            Refused(501, "transfer_coding_not_supported"),
        ),
        (
            "chunked twice",
            completions("Transfer-Encoding: chunked, chunked\r\n", "0\r\n\r\n"),
            Refused(400, "bad_framing"),
        ),
        ("identity", completions("Transfer-Encoding: identity\r\n", ""), Refused(400, "bad_framing")),
        ("xchunked", completions("Transfer-Encoding: xchunked\r\n", ""), Refused(400, "bad_framing")),
        (
            "chunked with a vertical tab",
            completions("Transfer-Encoding: \x0bchunked\r\n", ""),
            Refused(400, "bad_request"),
        ),
        (
            "chunked in another case",
            completions("transfer-ENCODING: ChUnKeD\r\n", &chunks(9, "", "")),
            Passed(BODY.len()),
        ),
        ("a space before the colon", completions("Content-Length : 5\r\n", "hello"), Refused(400, "bad_request")),
        ("a folded field", completions("X-Fold: a\r\n b\r\nContent-Length: 0\r\n", ""), Refused(400, "bad_request")),
        ("a folded length", completions("Content-Length: 1\r\n 0\r\n", "0123456789"), Refused(400, "bad_request")),
        (
            "chunked in HTTP/1.0",
            [
                b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(),
                chunks(9, "", "").into_bytes(),
            ]
            .concat(),
            Refused(400, "bad_framing"),
        ),
        ("an empty body", completions("Content-Length: 0\r\n", ""), Passed(0)),
        ("no body at all", completions("", ""), Passed(0)),
        // Request lines.
        ("absolute form", get("GET http://other.test/v1/models HTTP/1.1", ""), Passed(0)),
        (
            "absolute form with a user",
            get("GET http://me@other.test/v1/models HTTP/1.1", ""),
            Refused(400, "bad_request"),
        ),
        ("absolute form without a host", get("GET http:///v1/models HTTP/1.1", ""), Refused(400, "bad_request")),
        ("a relative target", get("GET v1/models HTTP/1.1", ""), Refused(400, "bad_request")),
        ("an asterisk", get("OPTIONS * HTTP/1.1", ""), Passed(0)),
        ("an asterisk for GET", get("GET * HTTP/1.1", ""), Refused(400, "bad_request")),
        ("a fragment", get("GET /v1/models#x HTTP/1.1", ""), Passed(0)),
        (
            "CONNECT",
            b"CONNECT other.test:443 HTTP/1.1\r\nHost: other.test\r\n\r\n".to_vec(),
            Refused(501, "connect_not_supported"),
        ),
        ("TRACE", get("TRACE /v1/models HTTP/1.1", ""), Passed(0)),
        ("a made-up method", get("B!R#E$W /v1/models HTTP/1.1", ""), Passed(0)),
        ("a method of no token", get("GE(T /v1/models HTTP/1.1", ""), Refused(400, "bad_request")),
        (
            "a method of 1 KB",
            get(&format!("{} / HTTP/1.1", "M".repeat(1000)), ""),
            Refused(501, "method_not_supported"),
        ),
        ("an empty line first", [b"\r\n".to_vec(), get("GET /v1/models HTTP/1.1", "")].concat(), Passed(0)),
        ("HTTP/1.0 without Host", b"GET /v1/models HTTP/1.0\r\n\r\n".to_vec(), Passed(0)),
        ("HTTP/1.1 without Host", b"GET /v1/models HTTP/1.1\r\n\r\n".to_vec(), Refused(400, "bad_request")),
        ("two Hosts", get("GET /v1/models HTTP/1.1", "Host: other.test\r\n"), Refused(400, "bad_request")),
        ("a Host of two names", b"GET /v1/models HTTP/1.1\r\nHost: a, b\r\n\r\n".to_vec(), Refused(400, "bad_request")),
        ("HTTP/1.2", get("GET /v1/models HTTP/1.2", ""), Refused(505, "http_version_not_supported")),
        (
            "HTTP/2 by prior knowledge",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec(),
            Refused(505, "http_version_not_supported"),
        ),
        (
            "TLS",
            [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), vec![0x55; 500]].concat(),
            Refused(400, "bad_request"),
        ),
        ("SSH", b"SSH-2.0-OpenSSH_9.2\r\n\r\n".to_vec(), Refused(400, "bad_request")),
        ("a Redis command", b"*1\r\n$4\r\nPING\r\n".to_vec(), Refused(400, "bad_request")),
        ("NUL bytes", vec![0; 200], Refused(400, "bad_request")),
        (
            "a target of 17 KB",
            get(&format!("GET /{} HTTP/1.1", "x".repeat(17 << 10)), ""),
            Refused(414, "uri_too_long"),
        ),
        ("a target with a space", get("GET /a b HTTP/1.1", ""), Refused(505, "http_version_not_supported")),
        ("a target with a NUL", get("GET /a\0b HTTP/1.1", ""), Refused(400, "bad_request")),
        ("a target in UTF-8", get("GET /é HTTP/1.1", ""), Passed(0)),
        // Fields.
        (
            "a head of 64 KiB and more",
            get("GET /v1/models HTTP/1.1", &format!("X: {}\r\n", "x".repeat(64 << 10))),
            Refused(431, "header_too_large"),
        ),
        ("a head of 60 KB", get("GET /v1/models HTTP/1.1", &format!("X: {}\r\n", "x".repeat(60_000))), Passed(0)),
        ("200 fields", get("GET /v1/models HTTP/1.1", &"X: 1\r\n".repeat(200)), Refused(431, "header_too_large")),
        ("a field without a name", get("GET /v1/models HTTP/1.1", ": x\r\n"), Refused(400, "bad_request")),
        ("a field without a colon", get("GET /v1/models HTTP/1.1", "garbage\r\n"), Refused(400, "bad_request")),
        ("a field with a NUL", get("GET /v1/models HTTP/1.1", "X: a\0b\r\n"), Refused(400, "bad_request")),
        ("a field with a bare CR", get("GET /v1/models HTTP/1.1", "X: a\rb\r\n"), Refused(400, "bad_request")),
        (
            "a field with a letter of no ASCII",
            get("GET /v1/models HTTP/1.1", "X-Ünlaut: 1\r\n"),
            Refused(400, "bad_request"),
        ),
        (
            "Connection names Host",
            get("GET /v1/models HTTP/1.1", "Connection: host, content-length, x-a\r\nX-A: 1\r\n"),
            Passed(0),
        ),
        (
            "an upgrade to WebSocket",
            get("GET /v1/models HTTP/1.1", "Connection: Upgrade\r\nUpgrade: websocket\r\n"),
            Refused(501, "upgrade_not_supported"),
        ),
        (
            "an offer of h2c",
            get(
                "GET /v1/models HTTP/1.1",
                "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n",
            ),
            Passed(0),
        ),
        (
            "another expectation",
            completions(&format!("{whole}Expect: 200-maybe\r\n"), BODY),
            Refused(417, "expectation_not_supported"),
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_heads_and_framings_pass_cleanly_or_are_refused_by_name() {
    let stage = Stage::set(1, json!({})).await;
    for (name, bytes, fate) in cases() {
        let before = stage.engines[0].requests().len();
        let answer = exchange(stage.vip(), &bytes).await.unwrap_or_else(|error| panic!("{name}: {error:#}"));
        let text = answer.body.text();
        // kvlb's own questions may come in between.
        let asked =
            |seen: &kvlb_tests::engine::Seen| !["/metrics", "/version", "/kv_event_sources"].contains(&&*seen.path);
        let seen: Vec<_> = stage.engines[0].requests().split_off(before).into_iter().filter(asked).collect();
        match fate {
            Refused(status, code) => {
                let told = (answer.head.status, answer.head.header("x-kvlb-error"));
                assert_eq!(told, (status, Some(code)), "{name}: {text}");
                assert_eq!(answer.body.json()["error"]["code"], code, "{name}: {text}");
                assert_eq!(answer.head.header("connection"), Some("close"), "{name}");
                assert_eq!(seen.len(), 0, "{name}: nothing of it reaches the engine");
            }
            Passed(body) => {
                assert_eq!(answer.engine(), "engine-0", "{name}: {} {text}", answer.head.status);
                assert_eq!(seen.iter().map(|seen| seen.body_bytes).collect::<Vec<_>>(), [body], "{name}");
                let hop = ["connection", "upgrade", "http2-settings", "x-a"]
                    .iter()
                    .find(|field| seen[0].header(field).is_some());
                assert_eq!(hop, None, "{name}: what concerns one connection stays there");
            }
        }
    }
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_behind_a_refused_request_are_never_taken_for_another() {
    let stage = Stage::set(1, json!({})).await;
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: kvlb.test\r\n\r\n";
    for (name, bytes, fate) in cases() {
        if matches!(fate, Passed(_)) {
            continue;
        }
        let mut client = Client::connect(stage.vip()).await.unwrap();
        client.send(&[bytes, smuggled.as_bytes().to_vec()].concat()).await.ok();
        let answer = timeout(SOON, client.answer()).await.unwrap().unwrap_or_else(|error| panic!("{name}: {error:#}"));
        assert!(answer.head.status >= 400, "{name}");
        timeout(SOON, client.closed()).await.unwrap_or_else(|_| panic!("{name}: the connection stays open"));
    }
    let seen = stage.engines[0].requests();
    assert!(seen.iter().all(|seen| seen.path != "/smuggled"), "{seen:?}");
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_with_odd_manners_are_served_or_let_go() {
    let stage = Stage::set(1, json!({"timeoutTcpInspect": 1500})).await;
    tokio::join!(
        asks_first(&stage),
        sends_byte_by_byte(&stage),
        half_closes(&stage),
        stops_in_the_body(&stage),
        pipelines(&stage),
        never_reads_its_pipeline(&stage),
        leaves_at_every_byte(&stage),
    );
    stage.close().await;
}

async fn asks_first(stage: &Stage) {
    let mut client = Client::connect(stage.vip()).await.unwrap();
    client.send(&completions(&format!("{}Expect: 100-continue\r\n", length(BODY)), "")).await.unwrap();
    assert_eq!(timeout(SOON, client.head()).await.unwrap().unwrap().status, 100);
    client.send(BODY.as_bytes()).await.unwrap();
    assert_eq!(client.answer().await.unwrap().head.status, 200);
}

async fn sends_byte_by_byte(stage: &Stage) {
    let mut client = Client::connect(stage.vip()).await.unwrap();
    for byte in chunked(&chunks(9, ";x", "X-Sum: 1\r\n")) {
        client.send(&[byte]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(client.answer().await.unwrap().head.status, 200);
}

/// A client that says it is done after its request counts as gone, and its request ends at the engine.
async fn half_closes(stage: &Stage) {
    let mut client = Client::connect(stage.vip()).await.unwrap();
    let body = json!({"model": "tiny", "prompt": "half", "max_tokens": 20_000, "ignore_eos": true}).to_string();
    client.send(&post("/v1/completions", &[("X-Request-Id", "half")], body.as_bytes())).await.unwrap();
    let find = || stage.engines[0].requests().into_iter().find(|seen| seen.header("x-request-id") == Some("half"));
    eventually(SOON, "the engine has it", async || find().is_some_and(|seen| seen.status == Some(200))).await.unwrap();
    client.finish_sending().await.unwrap();
    eventually(SOON, "the engine is let go", async || find().is_some_and(|seen| seen.aborted)).await.unwrap();
    assert_eq!(timeout(SOON, client.closed()).await.unwrap(), End::Closed);
}

async fn stops_in_the_body(stage: &Stage) {
    let mut client = Client::connect(stage.vip()).await.unwrap();
    client.send(&completions("Content-Length: 1000\r\n", "{\"prompt")).await.unwrap();
    let answer = timeout(SOON, client.answer()).await.unwrap().unwrap();
    assert_eq!((answer.head.status, answer.head.header("x-kvlb-error")), (408, Some("request_body_timeout")));
    timeout(SOON, client.closed()).await.unwrap();
}

async fn pipelines(stage: &Stage) {
    let mut client = Client::connect(stage.vip()).await.unwrap();
    let all: Vec<u8> = (0..100)
        .flat_map(|n| get(&format!("GET /v1/models?{n} HTTP/1.1"), ""))
        .chain(post("/v1/completions", &[], BODY.as_bytes()))
        .chain(get("GET /v1/models HTTP/1.1", "Connection: close\r\n"))
        .chain(get("GET /never HTTP/1.1", ""))
        .collect();
    client.send(&all).await.unwrap();
    for _ in 0..102 {
        assert_eq!(client.answer().await.unwrap().head.status, 200);
    }
    timeout(SOON, client.closed()).await.unwrap();
    assert!(stage.engines[0].requests().iter().all(|seen| seen.path != "/never"));
}

/// Requests pile up in front of a client that reads nothing: kvlb takes no more than it can hand on.
async fn never_reads_its_pipeline(stage: &Stage) {
    let mut client = Client::connect(stage.vip()).await.unwrap();
    socket2::SockRef::from(client.socket()).set_recv_buffer_size(4096).unwrap();
    let many: Vec<u8> = get("GET /v1/models HTTP/1.1", "").repeat(1000);
    let before = stage.memory();
    // 200,000 requests are more than all buffers between us hold.
    let flood = async {
        for _ in 0..200 {
            client.send(&many).await.unwrap();
        }
    };
    assert!(timeout(Duration::from_secs(4), flood).await.is_err(), "nobody holds the client back");
    let grown = stage.memory().saturating_sub(before);
    assert!(grown < 48 << 20, "{grown} bytes more");
}

/// A connection that ends at any byte of a request leaves nothing behind.
async fn leaves_at_every_byte(stage: &Stage) {
    let whole = post("/v1/completions", &[], BODY.as_bytes());
    for end in 0..whole.len() {
        let mut client = Client::connect(stage.vip()).await.unwrap();
        client.send(&whole[..end]).await.unwrap();
        if end % 2 == 0 {
            socket2::SockRef::from(client.socket()).set_linger(Some(Duration::ZERO)).unwrap();
        }
    }
    let open = async || stage.kvlb.metric("kvlb_endpoint_load{ep_idx=\"0\",service=\"1\"}").await.unwrap() < 3.0;
    eventually(SOON, "their requests are over", open).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_heads_hold_nobody_else() {
    let stage = Stage::set(1, json!({})).await;
    let mut slow = Vec::new();
    for _ in 0..300 {
        let mut client = Client::connect(stage.vip()).await.unwrap();
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: k").await.unwrap();
        slow.push(client);
    }
    for _ in 0..5 {
        for client in &mut slow {
            client.send(b"x").await.unwrap();
        }
        timeout(Duration::from_secs(5), stage.ask(&completion("quick"))).await.expect("others are served meanwhile");
    }
    drop(slow);
    let gone = async || stage.kvlb.metric("kvlb_client_connections_open").await.unwrap() < 2.0;
    eventually(SOON, "the slow ones are gone", gone).await.unwrap();
    stage.close().await;
}

//! The access log: one line for each request, however it ends.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;

use super::endings::{Chance, addresses, ask_in_every_way, three};
use super::on_both_back_ends;
use super::rig::{Endpoint, Rig, eventually, get, ok, post};
use crate::proxy::Io;
use crate::telemetry::Metrics;
use crate::telemetry::access::{AccessLog, Destination, Sampling, Writer};

on_both_back_ends![
    however_a_request_ends_it_has_one_line,
    a_line_tells_what_happened,
    a_connection_without_a_request_has_no_line,
    a_sample_holds_whatever_failed_or_was_sent_twice,
    a_panic_of_ours_has_its_line,
    an_order_to_end_has_its_line,
];

/// A log in a file.
struct Log {
    dir: tempfile::TempDir,
    metrics: Metrics,
    writer: Option<Writer>,
    handle: AccessLog,
}

impl Log {
    fn open(sampling: Sampling) -> Self {
        let (dir, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let destination = Destination::File(dir.path().join("log"));
        let (handle, writer) = AccessLog::open(sampling, &destination, &metrics).unwrap().unwrap();
        Self { dir, metrics, writer: Some(writer), handle }
    }

    fn rig(&self, io: Io, endpoints: &[std::net::SocketAddr]) -> Rig {
        Rig::with(io, endpoints, |config| config.access_log = Some(self.handle.clone()))
    }

    /// Every line, once the proxy is gone.
    fn lines(mut self) -> Vec<Value> {
        self.writer.take().unwrap().finish(Duration::from_secs(20));
        let text = std::fs::read_to_string(self.dir.path().join("log")).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len() as u64, self.metrics.access_log_lines.get());
        assert_eq!(self.metrics.access_log_dropped.with_label_values(&["queue_full"]).get(), 0);
        lines
    }
}

fn words<'a>(lines: &'a [Value], field: &str) -> BTreeSet<&'a str> {
    lines.iter().filter_map(|line| line[field].as_str()).collect()
}

fn however_a_request_ends_it_has_one_line(io: Io) {
    let chance = Arc::new(Chance::new(11));
    let endpoints = three(&chance);
    let log = Log::open(Sampling::Full);
    let rig = log.rig(io, &addresses(&endpoints));
    // Refused before and behind their heads.
    let refused: [&[u8]; 4] = [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/3.0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /nobody HTTP/1.1\r\nHost: a\r\n\r\n",
    ];
    ask_in_every_way(&rig, &endpoints, &chance, |number| {
        rig.client().ask(refused[number % 4]);
    });
    let answers = rig.counts.sum(|what| what.starts_with(|first: char| first.is_ascii_digit()));
    // Those that left in the middle of an answer are among the answered.
    let left = rig.counts.sum(|what| what.starts_with("left ") && what != "left stream");
    drop(rig);
    let lines = log.lines();
    assert!(answers > 400 && left > 0, "{answers} answers, {left} left before one");
    assert_eq!(lines.len() as u64, answers + left);
    for end in ["complete", "refused", "client_left", "endpoint_died", "timed_out"] {
        assert!(words(&lines, "end").contains(end), "no {end} among {:?}", words(&lines, "end"));
    }
    assert_eq!(words(&lines, "span_id").len(), lines.len());
    for line in &lines {
        assert_eq!(line["trace_id"].as_str().map(str::len), Some(32), "{line}");
        assert_eq!(line["status"].is_u64(), line["end"] != "client_left" || line["phase"] == "stream", "{line}");
        assert_eq!(line["code"].is_string(), own_status(line), "{line}");
    }
}

/// Whether the status is one of our own: an answer of an endpoint's has the time that it was waited for.
fn own_status(line: &Value) -> bool {
    line["status"].is_u64() && !line["wait_us"].is_u64()
}

fn a_line_tells_what_happened(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            if request.head.starts_with("GET /stream") {
                wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n");
            } else {
                wire.send(&ok(b"hello"));
            }
        }
    });
    let log = Log::open(Sampling::Full);
    let rig = log.rig(io, &[Endpoint::refusing(), endpoint.address]);
    let mut client = rig.client();
    let from = client.stream.local_addr().unwrap().to_string();
    client.ask(b"POST /v1/x?key=SECRET HTTP/1.1\r\nHost: a\r\nAuthorization: SECRET\r\nX-Request-Id: r \"1\"\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nContent-Length: 6\r\n\r\nSECRET");
    client.ask(&get("/stream"));
    client.ask(b"GET /nobody HTTP/1.0\r\n\r\n");
    drop(client);
    rig.settled();
    let vip = rig.address.to_string();
    drop(rig);
    let lines = log.lines();
    assert!(!format!("{lines:?}").contains("SECRET"));
    let ours: Vec<&Value> = lines.iter().collect();
    let [first, second, third] = ours[..] else { unreachable!("{} lines", ours.len()) };
    for (line, field, value) in [
        (first, "client", Value::from(from)),
        (first, "vip", vip.into()),
        (first, "method", "POST".into()),
        (first, "path", "/v1/x".into()),
        (first, "protocol", "HTTP/1.1".into()),
        (first, "status", 200.into()),
        (first, "end", "complete".into()),
        (first, "endpoint", endpoint.address.to_string().into()),
        (first, "ep_idx", 1.into()),
        (first, "reused", false.into()),
        (first, "retries", 1.into()),
        (first, "stream", false.into()),
        (first, "request_bytes", 6.into()),
        (first, "response_bytes", 5.into()),
        (first, "trace_id", "0af7651916cd43dd8448eb211c80319c".into()),
        (first, "parent_id", "b7ad6b7169203331".into()),
        (first, "request_id", "r \"1\"".into()),
        (second, "path", "/stream".into()),
        (second, "reused", true.into()),
        (second, "stream", true.into()),
        // The chunks' framing is among them.
        (second, "response_bytes", 15.into()),
        (third, "protocol", "HTTP/1.0".into()),
        (third, "status", 404.into()),
        (third, "code", "model_not_found".into()),
        (third, "end", "refused".into()),
    ] {
        assert_eq!(line[field], value, "{field} of {line}");
    }
    for line in [first, second] {
        let us = |field: &str| line[field].as_u64().unwrap_or_else(|| unreachable!("{field} of {line}"));
        let parts = us("head_us") + us("body_us") + us("decide_us") + us("connect_us") + us("wait_us");
        assert!(parts <= us("total_us") && us("first_byte_us") <= us("total_us"), "{line}");
    }
    assert!(third["endpoint"].is_null() && third["first_byte_us"].is_null() && third["parent_id"].is_null());
}

fn a_connection_without_a_request_has_no_line(io: Io) {
    let log = Log::open(Sampling::Full);
    let rig = log.rig(io, &[]);
    drop(rig.client());
    let client = rig.client();
    client.finish();
    eventually("both are gone", || rig.counts.get("closed") == 2);
    let mut half = rig.client();
    half.send(b"GET /");
    eventually("it is read", || rig.counts.get("opened") == 3);
    drop(half);
    rig.settled();
    let left = rig.counts.get("left head");
    drop(rig);
    let lines = log.lines();
    assert_eq!((lines.len() as u64, left), (1, 1));
    assert_eq!((&lines[0]["end"], &lines[0]["phase"]), (&"client_left".into(), &"head".into()));
    assert!(lines[0]["method"].is_null() && lines[0]["status"].is_null());
}

fn a_sample_holds_whatever_failed_or_was_sent_twice(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            match request.head.split(' ').nth(1) {
                Some("/fails") => wire.send(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"),
                Some("/dies") => return,
                _ => wire.send(&ok(b"hello")),
            }
        }
    });
    let log = Log::open(Sampling::OneIn(NonZeroU64::new(u64::MAX).unwrap()));
    let rig = log.rig(io, &[endpoint.address]);
    for path in ["/", "/fails", "/", "/dies", "/nobody"] {
        rig.client().ask(&get(path));
    }
    *rig.fake.endpoints.lock() = vec![Endpoint::refusing(), endpoint.address];
    rig.client().ask(&get("/again"));
    // The trace of an id that can be divided is in the sample.
    *rig.fake.endpoints.lock() = vec![endpoint.address];
    let traced =
        |id: &str| format!("GET /{id} HTTP/1.1\r\nHost: a\r\ntraceparent: 00-{id}-b7ad6b7169203331-00\r\n\r\n");
    rig.client().ask(traced("0000000000000000ffffffffffffffff").as_bytes());
    rig.client().ask(traced("0000000000000000fffffffffffffff0").as_bytes());
    rig.settled();
    drop(rig);
    let lines = log.lines();
    let paths: Vec<&str> = lines.iter().filter_map(|line| line["path"].as_str()).collect();
    assert_eq!(paths, ["/fails", "/dies", "/nobody", "/again", "/0000000000000000ffffffffffffffff"]);
}

fn a_panic_of_ours_has_its_line(io: Io) {
    let log = Log::open(Sampling::Full);
    let rig = log.rig(io, &[Endpoint::refusing()]);
    rig.fake.panics.store(true, Ordering::SeqCst);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    assert!(client.ends_within(Duration::from_secs(10)).is_some());
    rig.settled();
    drop(rig);
    let lines = log.lines();
    assert_eq!((lines.len(), &lines[0]["end"]), (1, &"lost".into()));
}

fn an_order_to_end_has_its_line(io: Io) {
    let arrived = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&arrived);
    let silent = Endpoint::start(move |wire, _| {
        wire.request().unwrap();
        count.fetch_add(1, Ordering::SeqCst);
        wire.rest();
    });
    let log = Log::open(Sampling::Full);
    let mut rig = log.rig(io, &[silent.address]);
    let mut client = rig.client();
    client.send(&post(b"{}"));
    eventually("it is there", || arrived.load(Ordering::SeqCst) == 1);
    rig.drain(Duration::from_millis(30)).join().unwrap();
    drop(rig);
    let lines = log.lines();
    assert_eq!((lines.len(), &lines[0]["end"], &lines[0]["phase"]), (1, &"cut_off".into(), &"wait".into()));
    assert_eq!(lines[0]["request_bytes"], 2);
}

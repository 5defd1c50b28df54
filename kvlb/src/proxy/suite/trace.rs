//! W3C trace context, as endpoints get it.

use std::collections::BTreeSet;

use super::on_both_back_ends;
use super::rig::{Endpoint, Rig, Wire, ok};
use crate::proxy::Io;

on_both_back_ends![
    a_client_s_trace_goes_on_with_a_span_of_ours,
    a_trace_begins_where_a_client_has_none,
    what_makes_no_sense_is_replaced_and_nothing_of_it_goes_on,
    a_request_that_is_sent_again_stays_in_its_trace,
    a_body_that_goes_through_is_in_its_trace_too,
    the_parts_of_a_list_of_models_are_in_one_trace,
    switched_off_the_fields_are_left_alone,
];

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";

/// Answers with the head that came.
fn echo(wire: &mut Wire, _number: usize) {
    while let Some(request) = wire.request() {
        wire.send(&ok(request.head.as_bytes()));
    }
}

fn request(fields: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\n{fields}Content-Length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

/// The values of all fields of a name.
fn values(head: &str, name: &str) -> Vec<String> {
    let fields = head.lines().filter_map(|line| line.split_once(": "));
    fields.filter(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned()).collect()
}

/// Trace, span and flags of the only `traceparent`.
fn parent(head: &str) -> (String, String, String) {
    let all = values(head, "traceparent");
    assert_eq!(all.len(), 1, "{head}");
    let parts: Vec<&str> = all[0].split('-').collect();
    let hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    assert!(parts.len() == 4 && parts[0] == "00" && parts.iter().all(|part| hex(part)), "{head}");
    assert_eq!((parts[1].len(), parts[2].len(), parts[3].len()), (32, 16, 2), "{head}");
    assert!(parts[1..3].iter().all(|id| !id.trim_matches('0').is_empty()), "{head}");
    (parts[1].to_owned(), parts[2].to_owned(), parts[3].to_owned())
}

fn head(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn a_client_s_trace_goes_on_with_a_span_of_ours(io: Io) {
    let endpoint = Endpoint::start(echo);
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    let mut spans = BTreeSet::new();
    for (sent, flags) in [("00", "00"), ("01", "01"), ("03", "03"), ("fe", "02")] {
        let fields = format!("TraceParent: 00-{TRACE}-{SPAN}-{sent}\r\nTraceState: a=1,b=2\r\ntracestate:  c=3\r\n");
        let seen = head(&client.ask(&request(&fields, b"{}")).body);
        let (trace, span, own_flags) = parent(&seen);
        assert_eq!((trace.as_str(), own_flags.as_str()), (TRACE, flags));
        assert_ne!(span, SPAN);
        assert!(spans.insert(span), "each request has a span of its own");
        assert_eq!(values(&seen, "tracestate"), ["a=1,b=2", "c=3"]);
    }
    let later = format!("traceparent: 7f-{TRACE}-{SPAN}-01-and-more\r\ntracestate: a=1\r\n");
    let seen = head(&client.ask(&request(&later, b"{}")).body);
    assert_eq!((parent(&seen).0.as_str(), parent(&seen).2.as_str()), (TRACE, "01"));
    assert_eq!(values(&seen, "tracestate"), ["a=1"]);
}

fn a_trace_begins_where_a_client_has_none(io: Io) {
    let endpoint = Endpoint::start(echo);
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    let mut ids = BTreeSet::new();
    for fields in ["", "tracestate: a=1\r\n", "X-Trace: 1\r\n"].repeat(10) {
        let seen = head(&client.ask(&request(fields, b"{}")).body);
        let (trace, span, flags) = parent(&seen);
        assert_eq!(flags, "01");
        assert!(ids.insert(trace) && ids.insert(span));
        assert_eq!(values(&seen, "tracestate"), Vec::<String>::new(), "it belongs to no trace");
    }
}

fn what_makes_no_sense_is_replaced_and_nothing_of_it_goes_on(io: Io) {
    let endpoint = Endpoint::start(echo);
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    let sound = format!("00-{TRACE}-{SPAN}-01");
    let senseless = [
        format!("traceparent: {}\r\n", sound.to_uppercase()),
        format!("traceparent: ff-{TRACE}-{SPAN}-01\r\n"),
        format!("traceparent: {sound}\r\ntraceparent: {sound}\r\n"),
        format!("traceparent: {sound}\r\nTRACEPARENT: 1\r\n"),
        format!("traceparent: {sound}, {sound}\r\n"),
        format!("traceparent: 00-{}-{SPAN}-01\r\n", "0".repeat(32)),
        format!("traceparent: {sound}\u{e9}\r\n"),
        format!("traceparent: {sound}-x: y\r\n"),
        "traceparent:\r\n".to_owned(),
        format!("traceparent: {}\r\n", "00-".repeat(5000)),
    ];
    for fields in senseless {
        let seen = head(&client.ask(&request(&format!("{fields}tracestate: a=1\r\n"), b"{}")).body);
        assert_ne!(parent(&seen).0, TRACE, "{fields}");
        assert_eq!(values(&seen, "tracestate"), Vec::<String>::new(), "{fields}");
        assert!(!seen.to_lowercase().contains(TRACE), "{seen}");
        let names: Vec<&str> = seen.lines().skip(1).filter_map(|line| line.split(':').next()).collect();
        let expected = ["Host", "traceparent", "x-forwarded-for", "x-forwarded-proto", "content-length", ""];
        assert_eq!(names, expected, "{fields}");
    }
}

fn a_request_that_is_sent_again_stays_in_its_trace(io: Io) {
    let (seen, heads) = std::sync::mpsc::sync_channel(100);
    let busy = Endpoint::start(move |wire, _| {
        while let Some(request) = wire.request() {
            seen.send(request.head).unwrap();
            wire.send(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n");
        }
    });
    let other = Endpoint::start(echo);
    let rig = Rig::start(io, &[busy.address, other.address]);
    let mut client = rig.client();
    for fields in ["", &format!("traceparent: 00-{TRACE}-{SPAN}-00\r\n")] {
        let second = head(&client.ask(&request(fields, b"{}")).body);
        assert_eq!(parent(&second), parent(&heads.recv().unwrap()));
    }
    assert_eq!(rig.counts.get("retried busy"), 2);
}

fn a_body_that_goes_through_is_in_its_trace_too(io: Io) {
    let endpoint = Endpoint::start(echo);
    let rig = Rig::start(io, &[endpoint.address]);
    *rig.fake.inspect.lock() = None;
    let fields = format!("traceparent: 00-{TRACE}-{SPAN}-01\r\ntracestate: a=1\r\n");
    let seen = head(&rig.client().ask(&request(&fields, &vec![b'x'; 300_000])).body);
    assert_eq!((parent(&seen).0.as_str(), values(&seen, "tracestate")), (TRACE, vec!["a=1".to_owned()]));
}

fn the_parts_of_a_list_of_models_are_in_one_trace(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            let list = serde_json::json!({"data": [{"id": request.head}]});
            wire.send(&ok(list.to_string().as_bytes()));
        }
    });
    let rig = Rig::start(io, &[endpoint.address, endpoint.address]);
    *rig.fake.rules_with_models.lock() = vec![0, 1];
    let fields = format!("traceparent: 00-{TRACE}-{SPAN}-01\r\n");
    let answer = rig.client().ask(format!("GET /v1/models HTTP/1.1\r\nHost: a\r\n{fields}\r\n").as_bytes());
    let list: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    for model in list["data"].as_array().unwrap() {
        assert_eq!(parent(model["id"].as_str().unwrap()).0, TRACE);
    }
}

fn switched_off_the_fields_are_left_alone(io: Io) {
    let endpoint = Endpoint::start(echo);
    let rig = Rig::with(io, &[endpoint.address], |config| config.trace_context = false);
    let mut client = rig.client();
    let seen = head(&client.ask(&request("", b"{}")).body);
    assert_eq!(values(&seen, "traceparent"), Vec::<String>::new());
    let seen = head(&client.ask(&request("TraceParent: what\r\nTraceParent: ever\r\ntracestate: a\r\n", b"{}")).body);
    assert_eq!(
        (values(&seen, "traceparent"), values(&seen, "tracestate")),
        (vec!["what".to_owned(), "ever".to_owned()], vec!["a".to_owned()])
    );
}

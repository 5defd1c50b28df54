//! A record as a line.

use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};

use super::Record;
use crate::tokenize::WallTime;

/// The fields in their order. Those that are not known are left out.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<u32>,
    client: Shown<std::net::SocketAddr>,
    vip: Shown<std::net::SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    #[serde(skip_serializing_if = "str::is_empty")]
    code: &'static str,
    end: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    phase: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<Shown<std::net::SocketAddr>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ep_idx: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_endpoint: Option<Shown<std::net::SocketAddr>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_ep_idx: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reused: Option<bool>,
    retries: u32,
    #[serde(skip_serializing_if = "str::is_empty")]
    tier: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    repin: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    depth: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<u64>,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    detail: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_cached_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reported_cached_tokens: Option<u64>,
    stream: bool,
    request_bytes: u64,
    response_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    head_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decide_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    connect_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wait_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_byte_us: Option<u64>,
    total_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    span_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
}

/// As it is displayed.
struct Shown<T>(T);

impl<T: std::fmt::Display> Serialize for Shown<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

/// Writes a record and the line's end behind what `out` holds.
///
/// # Errors
/// Where it has no form in JSON, which none has; `out` is as it was then.
pub(super) fn write(out: &mut Vec<u8>, record: &Record) -> Result<(), serde_json::Error> {
    let before = out.len();
    let written = serde_json::to_writer(&mut *out, &line(record));
    if written.is_ok() {
        out.push(b'\n');
    } else {
        out.truncate(before);
    }
    written
}

fn line(record: &Record) -> Line<'_> {
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let facts = record.facts.as_ref();
    let prefill = record.prefill.as_deref();
    let end = record.end.unwrap_or(super::End::Lost);
    let chosen = facts.filter(|facts| !facts.tier.is_empty());
    let span = |id: u64| format!("{id:016x}");
    Line {
        time: rfc_3339(record.time),
        rule: facts.map(|facts| facts.rule),
        client: Shown(record.client),
        vip: Shown(record.vip),
        method: record.method.as_deref(),
        path: record.path.as_deref(),
        protocol: record.method.as_ref().map(|_| if record.http_1_0 { "HTTP/1.0" } else { "HTTP/1.1" }),
        status: record.status,
        code: record.code,
        end: end.label(),
        phase: (end != super::End::Complete).then_some(record.phase),
        model: facts.and_then(|facts| facts.model.as_deref()),
        endpoint: record.endpoint.map(Shown),
        ep_idx: record.ep_idx,
        prefill_endpoint: prefill.map(|leg| Shown(leg.endpoint)),
        prefill_ep_idx: prefill.map(|leg| leg.ep_idx),
        reused: record.endpoint.map(|_| record.reused),
        retries: record.retries,
        tier: chosen.map_or("", |facts| facts.tier),
        repin: chosen.map_or("", |facts| facts.repin),
        depth: chosen.map(|facts| facts.depth),
        blocks: chosen.map(|facts| facts.blocks),
        reason: facts.map_or("", |facts| facts.reason),
        detail: facts.map_or("", |facts| facts.detail),
        prompt_tokens: facts.and_then(|facts| facts.prompt_tokens).or(record.reported_prompt_tokens),
        predicted_cached_tokens: facts.and_then(|facts| facts.predicted_cached_tokens),
        reported_cached_tokens: record.reported_cached_tokens,
        stream: record.streams,
        request_bytes: record.request_bytes,
        response_bytes: record.response_bytes,
        head_us: record.head.map(us),
        body_us: record.body.map(us),
        decide_us: record.decide.map(us),
        connect_us: record.connect.map(us),
        prefill_us: prefill.map(|leg| us(leg.took)),
        wait_us: record.wait.map(us),
        first_byte_us: record.first_byte.map(us),
        total_us: us(record.total),
        trace_id: record.trace.map(|trace| format!("{:032x}", trace.trace_id)),
        span_id: record.trace.and_then(|trace| trace.span_id).map(span),
        parent_id: record.trace.and_then(|trace| trace.parent_id).map(span),
        request_id: record.request_id.as_deref(),
    }
}

/// UTC, to the millisecond.
fn rfc_3339(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let wall = WallTime::from_seconds(i64::try_from(since.as_secs()).unwrap_or(0));
    let seconds = wall.format("%Y-%m-%dT%H:%M:%S").unwrap_or_default();
    format!("{seconds}.{:03}Z", since.subsec_millis())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::super::{End, Facts, PrefillLeg, TraceIds};
    use super::*;
    use crate::clock;

    fn record() -> Record {
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1_796_000_000_042);
        Record::new(clock::now(), time, "[2001:db8::1]:40000".parse().unwrap(), "10.0.0.1:80".parse().unwrap())
    }

    fn full() -> Record {
        Record {
            method: Some("POST".into()),
            path: Some("/v1/\"a\"\n\u{1}b".into()),
            request_id: Some("r-1".into()),
            trace: Some(TraceIds { trace_id: 0xab, span_id: Some(0xc), parent_id: Some(0xd) }),
            status: Some(200),
            code: "some_code",
            end: Some(End::TimedOut),
            phase: "wait",
            facts: Some(Facts {
                rule: 3,
                model: Some("m".into()),
                tier: "1.5",
                repin: "overload",
                depth: 2,
                blocks: 4,
                reason: "shallow",
                detail: "prompt",
                prompt_tokens: Some(64),
                predicted_cached_tokens: Some(32),
            }),
            ep_idx: Some(1),
            endpoint: Some("[::1]:8000".parse().unwrap()),
            prefill: Some(Box::new(PrefillLeg {
                ep_idx: 0,
                endpoint: "[::1]:7000".parse().unwrap(),
                took: Duration::from_micros(8),
            })),
            reported_cached_tokens: Some(16),
            head: Some(Duration::from_micros(1)),
            body: Some(Duration::from_micros(2)),
            decide: Some(Duration::from_micros(3)),
            connect: Some(Duration::from_micros(4)),
            wait: Some(Duration::from_micros(5)),
            first_byte: Some(Duration::from_micros(6)),
            total: Duration::from_millis(7),
            ..record()
        }
    }

    fn lines(records: &[Record]) -> Vec<Value> {
        let mut out = Vec::new();
        for record in records {
            write(&mut out, record).unwrap();
        }
        assert_eq!(out.split(|byte| *byte == b'\n').skip(1).count(), records.len(), "one line each");
        std::str::from_utf8(&out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_record_is_one_line_of_json_whatever_stands_in_it() {
        let line = &lines(&[full()])[0];
        assert_eq!(line["time"], "2026-11-30T00:53:20.042Z");
        assert_eq!(line["path"], "/v1/\"a\"\n\u{1}b");
        assert_eq!((&line["client"], &line["endpoint"]), (&"[2001:db8::1]:40000".into(), &"[::1]:8000".into()));
        assert_eq!(line["trace_id"], "000000000000000000000000000000ab");
        assert_eq!((&line["span_id"], &line["parent_id"]), (&"000000000000000c".into(), &"000000000000000d".into()));
        assert_eq!(
            (&line["end"], &line["phase"], &line["total_us"]),
            (&"timed_out".into(), &"wait".into(), &7000.into())
        );
    }

    #[test]
    fn what_is_not_known_is_left_out() {
        let line = &lines(&[record()])[0];
        let names: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
        let expected = [
            "time",
            "client",
            "vip",
            "end",
            "phase",
            "retries",
            "stream",
            "request_bytes",
            "response_bytes",
            "total_us",
        ];
        assert_eq!(names, expected);
    }

    /// The table in the documentation names every field, in the order of the line, and no other.
    #[test]
    fn every_field_is_documented() {
        let line = &lines(&[full()])[0];
        let page = include_str!("../../../../docs/access-log.md");
        let table = page.split("## Fields").nth(1).and_then(|rest| rest.split("## ").next()).unwrap();
        let rows = table.lines().filter_map(|row| row.strip_prefix("| `")?.split_once('`')).map(|(name, _)| name);
        let documented: Vec<&str> = rows.collect();
        let written: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
        let (known, told): (BTreeSet<_>, BTreeSet<_>) = (documented.iter().collect(), written.iter().collect());
        assert_eq!(known, told);
        assert_eq!(documented, written);
    }
}

//! Endpoints, probes and hosts of the body.

use std::net::IpAddr;
use std::time::Duration;

use serde_json::{Value, json};

use super::fields::{self, shown};
use super::{EndpointArguments, ProbeArguments};
use crate::control::Problem;
use crate::fleet::{BadStatusCodes, Endpoint, EndpointKey, Monitor, ProbeKind, Role};

/// A DNS name is at most this long (RFC 1035, 2.3.4).
const NAME_MAX: usize = 253;

/// What an endpoint's address and port are.
pub(super) fn key(args: &EndpointArguments, place: &str) -> Result<EndpointKey, Problem> {
    let host = args.endpoint_ip.as_deref().ok_or_else(|| Problem::MissingField(format!("{place}.endpointIP")))?;
    let port = args.target_port.ok_or_else(|| Problem::MissingField(format!("{place}.targetPort")))?;
    Ok(EndpointKey { host: host_name(host, &format!("{place}.endpointIP"))?, port })
}

/// One of `endpoints`, checked.
pub(super) fn endpoint(args: &EndpointArguments, place: &str) -> Result<Endpoint, Problem> {
    let key = key(args, place)?;
    let state = match args.admin_state.as_deref() {
        None | Some("" | "up") => AdminState::Up,
        Some("drain") => AdminState::Drain,
        Some("down") => AdminState::Down,
        Some(other) => {
            return Err(Problem::BadValue {
                field: format!("{place}.adminState"),
                value: format!("{:?}", shown(other)),
                expected: "use up, drain or down".to_owned(),
            });
        }
    };
    Ok(Endpoint {
        key,
        weight: if state == AdminState::Drain { 0 } else { args.weight.unwrap_or(1) },
        role: role(args),
        admin_down: state == AdminState::Down,
        monitor: args.probe.as_ref().map(|probe| monitor(probe, &format!("{place}.probe."))).transpose()?,
        zmq_port: args.zmq_port,
        replay_port: args.replay_port,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AdminState {
    Up,
    Drain,
    Down,
}

fn role(args: &EndpointArguments) -> Role {
    match args.ep_role {
        Some(1) => Role::Prefill,
        Some(2) => Role::Decode,
        _ => Role::Any,
    }
}

/// An address or a DNS name, in the one spelling that compares: addresses canonical, names in lower case.
pub(super) fn host_name(text: &str, field: &str) -> Result<String, Problem> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return endpoint_address(address.to_canonical(), text, field);
    }
    if is_dns_name(bare) {
        return Ok(bare.trim_end_matches('.').to_ascii_lowercase());
    }
    Err(bad_host(text, field, "use an IPv4 or IPv6 address or a DNS name"))
}

fn endpoint_address(address: IpAddr, text: &str, field: &str) -> Result<String, Problem> {
    if address.is_unspecified() || address.is_multicast() {
        return Err(bad_host(text, field, "nobody can be reached at this address"));
    }
    Ok(address.to_string())
}

fn bad_host(text: &str, field: &str, expected: &str) -> Problem {
    Problem::BadValue { field: field.to_owned(), value: format!("{:?}", shown(text)), expected: expected.to_owned() }
}

/// Letters, digits, `-` and `_` in labels of 1 to 63; the last label is no number, which would be a misspelt address.
pub(super) fn is_dns_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let last = name.rsplit('.').next().unwrap_or_default();
    name.len() <= NAME_MAX && name.split('.').all(label) && !last.bytes().all(|b| b.is_ascii_digit())
}

/// How endpoints are probed; `place` is put before field names in errors.
pub(super) fn monitor(args: &ProbeArguments, place: &str) -> Result<Monitor, Problem> {
    let default = Monitor::default();
    let kind = match args.probetype.as_deref() {
        None | Some("" | "tcp") => Some(ProbeKind::Tcp),
        Some("http") => Some(ProbeKind::Http),
        Some("none") => None,
        Some(other) => return Err(probe_kind(other, place)),
    };
    if kind.is_none() && args.monitor == Some(true) {
        return Err(Problem::Contradiction(format!("{place}monitor true and {place}probetype none contradict")));
    }
    let text = |name: &str, value: Option<&String>| probe_text(kind, value, &format!("{place}{name}"));
    let path = text("probereq", args.probereq.as_ref())?;
    if !path.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Problem::BadValue {
            field: format!("{place}probereq"),
            value: format!("{:?}", shown(&path)),
            expected: "a path has no spaces or control characters".to_owned(),
        });
    }
    let codes = text("expectedCodes", args.expected_codes.as_ref())?;
    let codes = codes.parse().map_err(|bad: BadStatusCodes| Problem::BadValue {
        field: format!("{place}expectedCodes"),
        value: format!("{:?}", shown(&codes)),
        expected: bad.to_string(),
    })?;
    let seconds = |seconds: Option<u32>| seconds.filter(|s| *s != 0).map(|s| Duration::from_secs(s.into()));
    Ok(Monitor {
        enabled: kind.is_some() && args.monitor != Some(false),
        kind: kind.unwrap_or_default(),
        port: args.probeport.filter(|port| *port != 0),
        request: if path.is_empty() || path.starts_with('/') { path } else { format!("/{path}") },
        response: text("proberesp", args.proberesp.as_ref())?,
        codes,
        interval: seconds(args.probe_timeout).unwrap_or(default.interval),
        retries: args.probe_retries.filter(|n| *n != 0).unwrap_or(default.retries),
        rise: args.probe_rise.filter(|n| *n != 0).unwrap_or(default.rise),
        answer_timeout: seconds(args.probe_answer_timeout).unwrap_or(default.answer_timeout),
    })
}

fn probe_kind(kind: &str, place: &str) -> Problem {
    let (field, value) = (format!("{place}probetype"), format!("{:?}", shown(kind)));
    match kind {
        "https" => Problem::NotSupportedYet { field, value, reason: "TLS is not served; use http or tcp".to_owned() },
        "udp" | "sctp" | "ping" => Problem::NotSupported {
            field,
            value,
            reason: "an engine that answers it may still serve nobody; use tcp or http".to_owned(),
        },
        _ => Problem::BadValue { field, value, expected: "use tcp, http or none".to_owned() },
    }
}

/// Texts of an http probe; with a tcp one they would be ignored in silence.
fn probe_text(kind: Option<ProbeKind>, value: Option<&String>, field: &str) -> Result<String, Problem> {
    /// Longer requests or answers to look for are no health check.
    const PROBE_TEXT_MAX: usize = 1_024;
    let text = value.cloned().unwrap_or_default();
    if text.len() > PROBE_TEXT_MAX {
        let limit = PROBE_TEXT_MAX;
        return Err(Problem::TooMany { what: "bytes", count: text.len(), limit, of: "probe text" });
    }
    if !text.is_empty() && kind != Some(ProbeKind::Http) {
        return Err(Problem::Contradiction(format!("{field} needs probetype http")));
    }
    Ok(text)
}

/// `POST /config/endpoint`: the probe of an endpoint of some rules.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HostProbe {
    /// The endpoint's host, in its comparable spelling.
    pub(crate) host: String,
    /// What becomes the endpoints' `probe`.
    pub(crate) probe: Value,
}

impl HostProbe {
    /// Reads the body.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, Problem> {
        let object = fields::checked(&super::json::parse(bytes)?, fields::HOST, "")?;
        let take = |name: &str, default: Value| object.get(name).cloned().unwrap_or(default);
        let seconds = match object.get("probeDuration").and_then(Value::as_u64) {
            None | Some(0) => 60, // LoxiLB's own default for endpoint objects
            Some(seconds) => seconds,
        };
        let probe = json!({
            "probetype": take("probeType", json!("tcp")),
            "probeport": take("probePort", json!(0)),
            "probereq": take("probeReq", json!("")),
            "proberesp": take("probeResp", json!("")),
            "probeTimeout": seconds,
            "probeRetries": take("inactiveReTries", json!(0)),
        });
        Ok(Self { host: host_of(&object)?, probe })
    }
}

/// `POST /config/endpointhoststate`: an operator's word on an endpoint.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HostState {
    /// The endpoint's host, in its comparable spelling.
    pub(crate) host: String,
    /// Its port; `None`: all of that host.
    pub(crate) port: Option<u16>,
    /// What becomes the endpoints' `adminState`; `None`: up.
    pub(crate) state: Option<&'static str>,
}

impl HostState {
    /// Reads the body.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, Problem> {
        let object = fields::checked(&super::json::parse(bytes)?, fields::HOST_STATE, "")?;
        let text = |name: &str| object.get(name).and_then(Value::as_str);
        if let Some(protocol) = text("epProto").filter(|p| !p.is_empty() && !p.eq_ignore_ascii_case("tcp")) {
            return Err(super::rule::protocol_refused("epProto", protocol));
        }
        let state = match text("state") {
            Some("green") => None,
            Some("yellow") => Some("drain"),
            Some("red") => Some("down"),
            None => return Err(Problem::MissingField("state".to_owned())),
            Some(other) => {
                return Err(Problem::BadValue {
                    field: "state".to_owned(),
                    value: format!("{:?}", shown(other)),
                    expected: "use green (up), yellow (drain) or red (down)".to_owned(),
                });
            }
        };
        let port = object.get("epPort").and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok());
        Ok(Self { host: host_of(&object)?, port: port.filter(|port| *port != 0), state })
    }
}

fn host_of(object: &serde_json::Map<String, Value>) -> Result<String, Problem> {
    let host = object.get("hostName").and_then(Value::as_str);
    host_key(host.ok_or_else(|| Problem::MissingField("hostName".to_owned()))?)
}

/// A host in its comparable spelling.
pub(crate) fn host_key(text: &str) -> Result<String, Problem> {
    host_name(text, "hostName")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_addresses_or_names_in_one_spelling() {
        for (text, key) in [
            ("192.0.2.1", "192.0.2.1"),
            ("2001:DB8::1", "2001:db8::1"),
            ("[2001:db8:0::1]", "2001:db8::1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("Engine-0.Pool.svc.", "engine-0.pool.svc"),
            ("localhost", "localhost"),
            ("my_engine", "my_engine"),
        ] {
            assert_eq!(host_name(text, "f").as_deref(), Ok(key));
        }
        for bad in [
            "",
            "192.0.2.256",
            "10.0.0",
            "a..b",
            "-a",
            "a b",
            "é",
            "http://x",
            "x:80",
            "0.0.0.0",
            "::",
            "[::1",
            "224.0.0.1",
            "fe80::1%eth0",
            "a/b",
        ] {
            assert_eq!(host_name(bad, "f").map_err(|p| p.code()), Err("bad_value"), "{bad}");
        }
        assert!(is_dns_name(&format!("{}.x", "a".repeat(63))) && !is_dns_name(&format!("{}.x", "a".repeat(64))));
        assert!(!is_dns_name(&"a.".repeat(128)));
    }

    #[test]
    fn a_missing_monitor_is_a_tcp_probe_and_false_is_none() {
        let on = monitor(&ProbeArguments::default(), "");
        assert_eq!(on, Ok(Monitor::default()));
        assert!(on.is_ok_and(|m| m.enabled && m.kind == ProbeKind::Tcp));
        let off = ProbeArguments { monitor: Some(false), ..ProbeArguments::default() };
        assert!(monitor(&off, "").is_ok_and(|m| !m.enabled));
        let none = ProbeArguments { probetype: Some("none".to_owned()), ..ProbeArguments::default() };
        assert!(monitor(&none, "").is_ok_and(|m| !m.enabled));
    }

    #[test]
    fn the_three_lights_are_up_drain_and_down() {
        let read = |state: &str| {
            HostState::read(format!(r#"{{"hostName":"[::1]","epPort":8000,"state":"{state}"}}"#).as_bytes())
        };
        assert_eq!(read("yellow"), Ok(HostState { host: "::1".to_owned(), port: Some(8000), state: Some("drain") }));
        assert_eq!(read("green").map(|s| s.state), Ok(None));
        assert_eq!(read("red").map(|s| s.state), Ok(Some("down")));
        assert_eq!(read("blue").map_err(|p| p.code()), Err("bad_value"));
    }
}

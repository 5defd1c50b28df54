//! The body becomes a rule.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Duration;

use super::fields::shown;
use super::{
    AdmissionArguments, Body, ENDPOINTS_MAX, SOURCES_MAX, ServiceArguments, SourceArguments, SplitArguments, endpoint,
    kv, pinning,
};
use crate::control::Problem;
use crate::fleet::{
    AdmissionMode, AdmissionRule, BreakerRule, HandoffKind, Limits, Mode, NoEndpoint, PortRange, Rule, RuleId, RuleKey,
    Selector, SplitRule, SynRule,
};

/// LoxiLB's number of the full proxy.
pub(crate) const FULLPROXY: i64 = 4;
/// What LoxiLB documents as the default of `chwbl_mean_load_factor`.
const HASH_LOAD_FACTOR: u32 = 125;
/// Bodies are read for the choice up to this size unless the rule says otherwise.
const MAX_INSPECT_BYTES: u32 = 32 << 20;
/// Names, models, paths: longer ones do not fit a line, a label or a file name.
const TEXT_MAX: usize = 256;

impl TryFrom<(RuleId, &Body)> for Rule {
    type Error = Problem;

    fn try_from((id, body): (RuleId, &Body)) -> Result<Self, Problem> {
        let args = body.args();
        let key = key(args)?;
        let mode = mode(args)?;
        let kv = kv::kv(body)?;
        let endpoints = endpoints(body)?;
        kv::check_roles(kv.mode, args.pd_disagg_mode, &endpoints)?;
        let selector = selector(args)?;
        Ok(Self {
            id,
            key,
            name: text("name", args.name.as_ref())?,
            selector,
            mode,
            endpoints,
            monitor: endpoint::monitor(&args.probe, "")?,
            kv,
            pinning: pinning::pinning(&args.pinning, selector)?,
            allowed_sources: sources(&body.sources)?,
            syn: syn(args)?,
            no_endpoint: no_endpoint(args)?,
            decision_headers: args.decision_headers.unwrap_or(false),
            max_inspect_bytes: args.max_inspect_bytes.unwrap_or(MAX_INSPECT_BYTES) as usize,
            connections_max: args.connections_max.filter(|max| *max != 0),
            forwarded_headers: args.forwarded_headers.unwrap_or(true),
            client_half_close: client_half_close(args)?,
            hash_load_factor: hash_load_factor(args)?,
            limits: limits(args)?,
            breaker: breaker(args),
            admission: admission(&args.admission)?,
            split: split(&args.split)?,
            admin_down: args.admin_state_up == Some(false),
        })
    }
}

/// What tells the rule from others.
pub(super) fn key(args: &ServiceArguments) -> Result<RuleKey, Problem> {
    let missing = |name: &str| Problem::MissingField(name.to_owned());
    let vip = vip(args.external_ip.as_deref().ok_or_else(|| missing("externalIP"))?)?;
    let first = args.port.ok_or_else(|| missing("port"))?;
    let last = args.port_max.filter(|port| *port != 0).unwrap_or(first);
    if last < first {
        let range = format!("{first} to 65535 with port {first}, or 0");
        return Err(Problem::OutOfRange { field: "portMax".to_owned(), value: last.to_string(), range });
    }
    if let Some(protocol) = args.protocol.as_deref().filter(|p| !p.is_empty() && !p.eq_ignore_ascii_case("tcp")) {
        return Err(protocol_refused("protocol", protocol));
    }
    Ok(RuleKey {
        vip,
        ports: PortRange { first, last },
        host: host(args.host.as_deref().unwrap_or_default())?,
        path_prefix: path_prefix(args)?,
        model: model(args.model_name.as_deref().unwrap_or_default())?,
    })
}

/// A VIP, plain or in brackets. The unspecified address is every address of the host.
pub(crate) fn vip(text: &str) -> Result<IpAddr, Problem> {
    let bad = |expected: &str| Problem::BadValue {
        field: "externalIP".to_owned(),
        value: format!("{:?}", shown(text)),
        expected: expected.to_owned(),
    };
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let address: IpAddr = bare.parse().map_err(|_error| bad("use an IPv4 or IPv6 address"))?;
    let address = address.to_canonical();
    if address.is_multicast() {
        return Err(bad("clients cannot connect to a group"));
    }
    Ok(address)
}

/// Anything but TCP.
pub(crate) fn protocol_refused(field: &str, protocol: &str) -> Problem {
    let (field, value) = (field.to_owned(), format!("{:?}", shown(protocol)));
    match protocol.to_ascii_lowercase().as_str() {
        "udp" | "sctp" | "icmp" => {
            Problem::NotSupported { field, value, reason: "kvlb proxies HTTP over tcp".to_owned() }
        }
        _ => Problem::BadValue { field, value, expected: "use tcp".to_owned() },
    }
}

/// A host as the `Host` header is compared: lower case, without port; `any` is LoxiLB's word for none.
pub(crate) fn host(text: &str) -> Result<String, Problem> {
    if text.is_empty() || text == "any" {
        return Ok(String::new());
    }
    endpoint::host_name(text, "host")
}

/// A model's name; empty: any model.
pub(crate) fn model(name: &str) -> Result<Option<String>, Problem> {
    let name = text("model_name", Some(&name.to_owned()))?;
    Ok(Some(name).filter(|name| !name.is_empty()))
}

fn path_prefix(args: &ServiceArguments) -> Result<String, Problem> {
    let path = text("path_prefix", args.path_prefix.as_ref())?;
    let bad = |expected: &str| Problem::BadValue {
        field: "path_prefix".to_owned(),
        value: format!("{:?}", shown(&path)),
        expected: expected.to_owned(),
    };
    if !path.is_empty() && (!path.starts_with('/') || !path.bytes().all(|b| b.is_ascii_graphic())) {
        return Err(bad("a path begins with / and has no spaces"));
    }
    match args.path_match_mode.as_deref() {
        None | Some("" | "prefix") => Ok(path),
        Some("disabled") if path.is_empty() => Ok(path),
        Some("disabled") => {
            Err(Problem::Contradiction("path_prefix and path_match_mode disabled contradict".to_owned()))
        }
        Some("exact") => Err(Problem::NotSupportedYet {
            field: "path_match_mode".to_owned(),
            value: "\"exact\"".to_owned(),
            reason: "use prefix".to_owned(),
        }),
        Some(other) => Err(Problem::BadValue {
            field: "path_match_mode".to_owned(),
            value: format!("{:?}", shown(other)),
            expected: "use prefix or disabled".to_owned(),
        }),
    }
}

fn text(field: &str, value: Option<&String>) -> Result<String, Problem> {
    let value = value.cloned().unwrap_or_default();
    let bad = |expected: String| Problem::BadValue {
        field: field.to_owned(),
        value: format!("{:?}", shown(&value)),
        expected,
    };
    if value.len() > TEXT_MAX {
        return Err(bad(format!("at most {TEXT_MAX} bytes")));
    }
    if value.chars().any(char::is_control) {
        return Err(bad("no control characters".to_owned()));
    }
    Ok(value)
}

fn mode(args: &ServiceArguments) -> Result<Mode, Problem> {
    match args.mode.unwrap_or(0) {
        FULLPROXY => Ok(Mode::FullProxy),
        other if args.kv.exact_mode.is_some_and(|mode| mode != 0) => Err(Problem::KvNeedsFullproxy(other)),
        other @ 0..=6 => Err(Problem::ModeNotServed(other)),
        other => Err(Problem::OutOfRange {
            field: "mode".to_owned(),
            value: other.to_string(),
            range: "4 (fullproxy)".to_owned(),
        }),
    }
}

fn selector(args: &ServiceArguments) -> Result<Selector, Problem> {
    let served = "use 0 rr, 1 hash, 2 priority, 3 persist, 4 lc, 8 chwbl, 9 gpuaware or 10 wrr-hash";
    let field = || "sel".to_owned();
    match args.sel.unwrap_or(0) {
        0 => Ok(Selector::RoundRobin),
        1 => Ok(Selector::Hash),
        2 => Ok(Selector::Priority),
        3 => Ok(Selector::Persist),
        4 => Ok(Selector::LeastConnections),
        8 => Ok(Selector::Chwbl),
        9 => Ok(Selector::GpuAware),
        10 => Ok(Selector::WrrHash),
        sel @ (5..=7) => {
            let word = ["n2", "n3", "reserved"][usize::try_from(sel - 5).unwrap_or_default()];
            let value = format!("{sel} ({word})");
            Err(Problem::NotSupported { field: field(), value, reason: served.to_owned() })
        }
        sel => {
            Err(Problem::OutOfRange { field: field(), value: sel.to_string(), range: "0 to 4, and 8 to 10".to_owned() })
        }
    }
}

/// Below a fair share for each, nobody would be left when all are busy.
fn hash_load_factor(args: &ServiceArguments) -> Result<u32, Problem> {
    match args.chwbl_mean_load_factor.unwrap_or(0) {
        0 => Ok(HASH_LOAD_FACTOR),
        percent @ 100.. => Ok(percent),
        percent => Err(Problem::OutOfRange {
            field: "chwbl_mean_load_factor".to_owned(),
            value: percent.to_string(),
            range: "100 to 1000, or 0".to_owned(),
        }),
    }
}

fn endpoints(body: &Body) -> Result<Vec<crate::fleet::Endpoint>, Problem> {
    let rows = &body.endpoints;
    if rows.is_empty() {
        return Err(Problem::NoEndpoints);
    }
    if rows.len() > ENDPOINTS_MAX {
        return Err(Problem::TooMany { what: "endpoints", count: rows.len(), limit: ENDPOINTS_MAX, of: "rule" });
    }
    let mut seen = HashSet::new();
    let mut endpoints = Vec::with_capacity(rows.len());
    for (i, row) in rows.iter().enumerate() {
        let endpoint = endpoint::endpoint(row, &format!("endpoints[{i}]"))?;
        if !seen.insert(endpoint.key.clone()) {
            return Err(Problem::DuplicateEndpoint(endpoint.key.to_string()));
        }
        endpoints.push(endpoint);
    }
    Ok(endpoints)
}

fn sources(rows: &[SourceArguments]) -> Result<Vec<(IpAddr, u8)>, Problem> {
    if rows.len() > SOURCES_MAX {
        return Err(Problem::TooMany { what: "allowedSources", count: rows.len(), limit: SOURCES_MAX, of: "rule" });
    }
    let network = |(i, row): (usize, &SourceArguments)| {
        let field = format!("allowedSources[{i}].prefix");
        let text = row.prefix.as_deref().ok_or_else(|| Problem::MissingField(field.clone()))?;
        network(text).ok_or_else(|| Problem::BadValue {
            field,
            value: format!("{:?}", shown(text)),
            expected: "use an address or a network, as 10.0.0.0/8".to_owned(),
        })
    };
    rows.iter().enumerate().map(network).collect()
}

/// A network with the bits behind its length cleared, as LoxiLB's parser does.
fn network(text: &str) -> Option<(IpAddr, u8)> {
    let (address, length) = match text.split_once('/') {
        Some((address, length)) if length.bytes().all(|b| b.is_ascii_digit()) => {
            (address.parse::<IpAddr>().ok()?, Some(length.parse::<u8>().ok()?))
        }
        Some(_) => return None,
        None => (text.parse::<IpAddr>().ok()?, None),
    };
    match address {
        IpAddr::V4(v4) => {
            let length = length.unwrap_or(32);
            let mask = u32::MAX.checked_shl(32_u32.checked_sub(length.into())?).unwrap_or(0);
            Some((IpAddr::V4((v4.to_bits() & mask).into()), length))
        }
        IpAddr::V6(v6) => {
            let length = length.unwrap_or(128);
            let mask = u128::MAX.checked_shl(128_u32.checked_sub(length.into())?).unwrap_or(0);
            Some((IpAddr::V6((v6.to_bits() & mask).into()), length))
        }
    }
}

/// A burst is a second's worth unless the operator says otherwise.
fn syn(args: &ServiceArguments) -> Result<Option<SynRule>, Problem> {
    let number = |number: Option<u32>| number.filter(|number| *number != 0);
    match (number(args.syn_rate), number(args.syn_burst)) {
        (None, None) => Ok(None),
        (None, Some(_)) => {
            Err(Problem::Contradiction("synBurst is how many SYNs pass before synRate counts: set that too".to_owned()))
        }
        (Some(per_sec), burst) => Ok(Some(SynRule { per_sec, burst: burst.unwrap_or(per_sec) })),
    }
}

/// On unless the operator says otherwise.
fn breaker(args: &ServiceArguments) -> Option<BreakerRule> {
    let default = BreakerRule::default();
    (args.cb_enable != Some(false)).then(|| BreakerRule {
        connects: args.cb_connect_failures.unwrap_or(default.connects),
        answers: args.cb_answer_failures.unwrap_or(default.answers),
        open: args.cb_open_sec.map_or(default.open, |seconds| Duration::from_secs(seconds.into())),
    })
}

/// Zero is LoxiLB's word for "no bound", and for "nobody waits".
fn admission(args: &AdmissionArguments) -> Result<Option<AdmissionRule>, Problem> {
    let mode = match args.mode.as_deref() {
        // What a rule inherits is off: there is no process default.
        None | Some("" | "off" | "inherit") => None,
        Some("observe") => Some(AdmissionMode::Observe),
        Some("enforce") => Some(AdmissionMode::Enforce),
        Some(other) => {
            return Err(Problem::BadValue {
                field: "fc_mode".to_owned(),
                value: format!("{:?}", shown(other)),
                expected: "use off, observe or enforce".to_owned(),
            });
        }
    };
    let number = |number: Option<u32>| number.filter(|number| *number != 0);
    let (depth, wait) = (args.max_queue_depth.unwrap_or(0), number(args.max_queue_wait_ms));
    if depth > 0 && wait.is_none() {
        return Err(Problem::Contradiction(
            "fc_max_queue_depth lets requests wait: say with fc_max_queue_wait_ms for how long".to_owned(),
        ));
    }
    Ok(mode.map(|mode| AdmissionRule {
        mode,
        outstanding: number(args.max_outstanding),
        normal: number(args.ep_max_inflight),
        prefill: number(args.prefill_max_inflight),
        decode: number(args.decode_max_inflight),
        queue_depth: depth,
        queue_wait: Duration::from_millis(wait.unwrap_or(0).into()),
    }))
}

/// Zero is LoxiLB's word for "as by default".
fn split(args: &SplitArguments) -> Result<SplitRule, Problem> {
    let default = SplitRule::default();
    let kinds = HandoffKind::ALL;
    let handoff = match args.handoff.as_deref().filter(|word| !word.is_empty()) {
        None => default.handoff,
        Some(word) => {
            kinds.into_iter().find(|kind| kind.handoff().label() == word).ok_or_else(|| Problem::BadValue {
                field: "pdHandoff".to_owned(),
                value: format!("{:?}", shown(word)),
                expected: format!("use {}", kinds.map(|kind| kind.handoff().label()).join(" or ")),
            })?
        }
    };
    let millis = |value: Option<u32>| value.filter(|n| *n != 0).map(|n| Duration::from_millis(n.into()));
    Ok(SplitRule {
        handoff,
        prefill: millis(args.timeout_prefill),
        decode: millis(args.timeout_decode),
        between: millis(args.timeout_handoff).unwrap_or(default.between),
        bypass: args.bypass_tokens.filter(|tokens| *tokens != 0),
        bootstrap_port: args.bootstrap_port.filter(|port| *port != 0).unwrap_or(default.bootstrap_port),
    })
}

fn no_endpoint(args: &ServiceArguments) -> Result<NoEndpoint, Problem> {
    match args.no_endpoint.as_deref() {
        None | Some("" | "503") => Ok(NoEndpoint::Proxy),
        Some("reset") => Ok(NoEndpoint::Reset),
        Some(other) => Err(Problem::BadValue {
            field: "noEndpoint".to_owned(),
            value: format!("{:?}", shown(other)),
            expected: "use 503 or reset".to_owned(),
        }),
    }
}

fn client_half_close(args: &ServiceArguments) -> Result<bool, Problem> {
    match args.client_half_close.as_deref() {
        None | Some("" | "leave") => Ok(false),
        Some("allow") => Ok(true),
        Some(other) => Err(Problem::BadValue {
            field: "clientHalfClose".to_owned(),
            value: format!("{:?}", shown(other)),
            expected: "use leave or allow".to_owned(),
        }),
    }
}

/// Zero is LoxiLB's word for "as by default".
fn limits(args: &ServiceArguments) -> Result<Limits, Problem> {
    let default = Limits::default();
    let seconds = |value: Option<u32>| value.filter(|n| *n != 0).map(|n| Duration::from_secs(n.into()));
    let millis = |value: Option<u32>| value.filter(|n| *n != 0).map(|n| Duration::from_millis(n.into()));
    let idle = match (seconds(args.inactive_timeout), millis(args.timeout_member_data)) {
        (Some(a), Some(b)) if a != b => {
            return Err(Problem::Contradiction(
                "inactiveTimeOut (seconds) and timeoutMemberData (milliseconds) say different times".to_owned(),
            ));
        }
        (a, b) => a.or(b),
    };
    Ok(Limits {
        connect: millis(args.timeout_member_connect).unwrap_or(default.connect),
        request_body: millis(args.timeout_tcp_inspect).unwrap_or(default.request_body),
        first_byte: millis(args.timeout_first_byte).or(default.first_byte),
        idle: idle.or(default.idle),
        total: seconds(args.max_stream_duration_sec).or(default.total),
    })
}

/// What an operator should know of a rule that is in force.
pub(crate) fn notes(rule: &Rule) -> Vec<&'static str> {
    let mut notes = Vec::new();
    if rule.admin_down {
        notes.push("adminStateUp is false: the rule takes no traffic");
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_lose_the_bits_behind_their_length() {
        let text = |text| network(text).map(|(a, n)| format!("{a}/{n}"));
        for (sent, kept) in [
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("10.1.2.3", "10.1.2.3/32"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("2001:db8::ff/32", "2001:db8::/32"),
            ("::1", "::1/128"),
            ("::/0", "::/0"),
        ] {
            assert_eq!(text(sent).as_deref(), Some(kept));
        }
        for bad in ["", "10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/+8", "x/8", "10.0.0.0/-1", "10.0.0/8"] {
            assert_eq!(text(bad), None, "{bad}");
        }
    }
}

//! What the API shows of rules and endpoints.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::control::live::Live;
use crate::control::store::Entry;
use crate::control::wire;
use crate::fleet::{Endpoint, Monitor, ProbeKind, Rule};

/// Rules as they were sent, with what changes while traffic flows.
pub(super) fn rules(entries: &[Arc<Entry>], live: &dyn Live) -> Vec<Value> {
    entries.iter().map(|entry| rule(entry, live)).collect()
}

fn rule(entry: &Entry, live: &dyn Live) -> Value {
    let mut shown = Map::new();
    shown.insert("id".to_owned(), entry.id.0.into());
    shown.extend(entry.json.clone());
    match &entry.rule {
        Ok(rule) => {
            if let Some(Value::Array(rows)) = shown.get_mut("endpoints") {
                for (position, row) in rows.iter_mut().enumerate() {
                    add_live(row, rule, position, live);
                }
            }
            if let Some(blend) = live.blend(rule.id) {
                shown.insert("kvBlend".to_owned(), json!(blend));
            }
            if let (Some(admission), Some(service)) = (live.admission(rule.id), shown.get_mut("serviceArguments")) {
                service["fc_effective"] = json!(admission);
            }
            let vips = live.vips(rule.id);
            if !vips.is_empty() {
                shown.insert("vips".to_owned(), json!(vips));
            }
            let mut notes: Vec<String> = wire::notes(rule).into_iter().map(Into::into).collect();
            if entry.volatile {
                notes.push("made of --listen and --endpoint: not kept over restarts, unless it is posted".to_owned());
            }
            notes.extend(live.notes(rule.id));
            if !notes.is_empty() {
                shown.insert("notes".to_owned(), json!(notes));
            }
        }
        Err(why) => {
            shown.insert("refused".to_owned(), why.as_str().into());
        }
    }
    Value::Object(shown)
}

fn add_live(row: &mut Value, rule: &Rule, position: usize, live: &dyn Live) {
    let Value::Object(row) = row else { return };
    let view = live.endpoint(rule.id, position).unwrap_or_default();
    row.insert("ep_idx".to_owned(), position.into());
    row.insert("state".to_owned(), if view.state.is_empty() { "-" } else { view.state }.into());
    row.insert("counter".to_owned(), format!("{}:{}", view.requests, view.bytes).into());
    if let Some(kv) = view.kv {
        row.insert("kvStatus".to_owned(), json!(kv));
    }
    if let Some(telemetry) = view.telemetry {
        row.insert("telemetry".to_owned(), json!(telemetry));
    }
}

/// `kvStatus` of every endpoint of a rule; null where the rule does not subscribe it.
pub(super) fn kv_status(rule: &Rule, live: &dyn Live) -> Value {
    let endpoint = |(position, endpoint): (usize, &Endpoint)| {
        json!({
            "ep_idx": position,
            "endpointIP": endpoint.key.host,
            "targetPort": endpoint.key.port,
            "role": endpoint.role.label(),
            "kvStatus": live.endpoint(rule.id, position).and_then(|view| view.kv),
        })
    };
    let endpoints: Vec<_> = rule.endpoints.iter().enumerate().map(endpoint).collect();
    json!({
        "service_id": rule.id.0,
        "kvExactMode": match rule.kv.mode {
            crate::fleet::ExactMode::Off => 0,
            crate::fleet::ExactMode::PrefillDecode => 1,
            crate::fleet::ExactMode::SinglePool => 3,
        },
        "hash_algo": rule.kv.algo.label(),
        "kvBlockSize": rule.kv.block_size.get(),
        "endpoints": endpoints,
    })
}

/// What the caches of a rule's subscribed endpoints spared.
pub(super) fn savings(rule: &Rule, live: &dyn Live) -> Value {
    let endpoint = |(position, endpoint): (usize, &Endpoint)| {
        let savings = live.savings(rule.id, position)?;
        Some(json!({
            "ep_idx": position,
            "endpointIP": endpoint.key.host,
            "targetPort": endpoint.key.port,
            "savings": savings,
        }))
    };
    let endpoints: Vec<_> = rule.endpoints.iter().enumerate().filter_map(endpoint).collect();
    json!({"service_id": rule.id.0, "name": rule.name, "endpoints": endpoints})
}

/// Every endpoint of every rule in force, as LoxiLB's `GET /config/endpoint/all` shows its probe objects.
pub(super) fn hosts(entries: &[Arc<Entry>], live: &dyn Live) -> Vec<Value> {
    let mut shown = Vec::new();
    for rule in entries.iter().filter_map(|entry| entry.rule.as_ref().ok()) {
        for (position, endpoint) in rule.endpoints.iter().enumerate() {
            let view = live.endpoint(rule.id, position).unwrap_or_default();
            let mut host = host(rule, position, endpoint, view.state);
            if let Some(telemetry) = view.telemetry {
                host["telemetry"] = json!(telemetry);
            }
            shown.push(host);
        }
    }
    shown
}

fn host(rule: &Rule, position: usize, endpoint: &Endpoint, state: &str) -> Value {
    let monitor = rule.monitor_of(endpoint);
    let kind = probe_kind(monitor);
    let port = monitor.port.unwrap_or(endpoint.key.port);
    json!({
        "hostName": endpoint.key.host,
        "name": format!("{}_{kind}_{port}", endpoint.key.host),
        "inactiveReTries": monitor.retries,
        "probeType": kind,
        "probeReq": monitor.request,
        "probeResp": monitor.response,
        "probeDuration": monitor.interval.as_secs(),
        "probePort": port,
        "currState": match state {
            "" | "-" => "-",
            "active" => "ok",
            _ => "nok",
        },
        "state": if state.is_empty() { "-" } else { state },
        "service_id": rule.id.0,
        "ep_idx": position,
        "targetPort": endpoint.key.port,
        "role": endpoint.role.label(),
    })
}

fn probe_kind(monitor: &Monitor) -> &'static str {
    match (monitor.enabled, monitor.kind) {
        (false, _) => "none",
        (true, ProbeKind::Tcp) => "tcp",
        (true, ProbeKind::Http) => "http",
    }
}

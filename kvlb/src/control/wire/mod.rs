//! The LoxiLB body: from an operator's bytes to a checked rule.
//!
//! Owns the field tables (`fields`), the serde types of the body ([`Body`], `ServiceArguments`) and their conversion
//! into `fleet::Rule`. Never guesses: a field that is unknown, misspelt or asks for something that is not served is an
//! error that names it. Invariant: what [`Body::json`] holds converts into the same rule again, whenever it is read.

mod endpoint;
pub(crate) mod fields;
mod json;
mod kv;
mod pinning;
mod rule;

#[cfg(test)]
pub(crate) mod cases;

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[cfg(test)]
pub(crate) use cases::DOCUMENT_BODY;
pub(crate) use endpoint::{HostProbe, HostState, host_key};
pub(crate) use fields::shown;
pub(crate) use rule::{FULLPROXY, host, model, notes, protocol_refused, vip};

use super::Problem;
use crate::fleet::{RuleId, RuleKey};

/// Endpoints of one rule: four times LoxiLB's 32. A decision compares all of them.
pub(crate) const ENDPOINTS_MAX: usize = 128;

/// Networks of one rule's `allowedSources`: each new connection is compared with all of them.
pub(crate) const SOURCES_MAX: usize = 256;

/// A body whose fields are known, of their type and within their range.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    json: Map<String, Value>,
    args: ServiceArguments,
    endpoints: Vec<EndpointArguments>,
    sources: Vec<SourceArguments>,
}

/// `serviceArguments`, as far as it is served. Field meanings and ranges: `fields::SERVICE`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ServiceArguments {
    #[serde(rename = "externalIP")]
    pub(crate) external_ip: Option<String>,
    pub(crate) port: Option<u16>,
    #[serde(rename = "portMax")]
    pub(crate) port_max: Option<u16>,
    pub(crate) protocol: Option<String>,
    pub(crate) host: Option<String>,
    pub(crate) path_prefix: Option<String>,
    pub(crate) path_match_mode: Option<String>,
    pub(crate) model_name: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) mode: Option<i64>,
    pub(crate) sel: Option<i64>,
    pub(crate) oper: Option<u8>,
    #[serde(rename = "adminStateUp")]
    pub(crate) admin_state_up: Option<bool>,
    #[serde(flatten)]
    pub(crate) probe: ProbeArguments,
    #[serde(rename = "inactiveTimeOut")]
    pub(crate) inactive_timeout: Option<u32>,
    #[serde(rename = "timeoutMemberData")]
    pub(crate) timeout_member_data: Option<u32>,
    #[serde(rename = "timeoutMemberConnect")]
    pub(crate) timeout_member_connect: Option<u32>,
    #[serde(rename = "timeoutTcpInspect")]
    pub(crate) timeout_tcp_inspect: Option<u32>,
    #[serde(rename = "timeoutFirstByte")]
    pub(crate) timeout_first_byte: Option<u32>,
    pub(crate) max_stream_duration_sec: Option<u32>,
    pub(crate) pd_disagg_mode: Option<bool>,
    #[serde(flatten)]
    pub(crate) split: SplitArguments,
    #[serde(flatten)]
    pub(crate) pinning: PinningArguments,
    #[serde(flatten)]
    pub(crate) kv: KvArguments,
    #[serde(rename = "decisionHeaders")]
    pub(crate) decision_headers: Option<bool>,
    #[serde(rename = "maxInspectBytes")]
    pub(crate) max_inspect_bytes: Option<u32>,
    #[serde(rename = "connectionsMax")]
    pub(crate) connections_max: Option<u32>,
    #[serde(rename = "synRate")]
    pub(crate) syn_rate: Option<u32>,
    #[serde(rename = "synBurst")]
    pub(crate) syn_burst: Option<u32>,
    #[serde(rename = "noEndpoint")]
    pub(crate) no_endpoint: Option<String>,
    #[serde(rename = "forwardedHeaders")]
    pub(crate) forwarded_headers: Option<bool>,
    #[serde(rename = "clientHalfClose")]
    pub(crate) client_half_close: Option<String>,
    pub(crate) cb_enable: Option<bool>,
    pub(crate) cb_connect_failures: Option<u32>,
    pub(crate) cb_answer_failures: Option<u32>,
    pub(crate) cb_open_sec: Option<u32>,
    pub(crate) chwbl_mean_load_factor: Option<u32>,
    #[serde(flatten)]
    pub(crate) admission: AdmissionArguments,
}

/// The `fc_*` fields of `serviceArguments`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct AdmissionArguments {
    #[serde(rename = "fc_mode")]
    pub(crate) mode: Option<String>,
    #[serde(rename = "fc_max_outstanding")]
    pub(crate) max_outstanding: Option<u32>,
    #[serde(rename = "fc_ep_max_inflight")]
    pub(crate) ep_max_inflight: Option<u32>,
    #[serde(rename = "fc_prefill_max_inflight")]
    pub(crate) prefill_max_inflight: Option<u32>,
    #[serde(rename = "fc_decode_max_inflight")]
    pub(crate) decode_max_inflight: Option<u32>,
    #[serde(rename = "fc_max_queue_depth")]
    pub(crate) max_queue_depth: Option<u32>,
    #[serde(rename = "fc_max_queue_wait_ms")]
    pub(crate) max_queue_wait_ms: Option<u32>,
}

/// The KV fields of `serviceArguments`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct KvArguments {
    #[serde(rename = "kvExactMode")]
    pub(crate) exact_mode: Option<u8>,
    #[serde(rename = "kvBlockSize")]
    pub(crate) block_size: Option<u32>,
    #[serde(rename = "kvHashAlgo")]
    pub(crate) hash_algo: Option<String>,
    #[serde(rename = "kvZmqPort")]
    pub(crate) zmq_port: Option<u16>,
    #[serde(rename = "kvWarmupSec")]
    pub(crate) warmup_sec: Option<u32>,
    #[serde(rename = "kvEngineType")]
    pub(crate) engine_type: Option<String>,
    #[serde(rename = "kvDpRankCount")]
    pub(crate) dp_rank_count: Option<u8>,
    #[serde(rename = "kvReplayPort")]
    pub(crate) replay_port: Option<u16>,
    #[serde(rename = "kvScore")]
    pub(crate) score: Option<String>,
    #[serde(rename = "kvLbMode")]
    pub(crate) lb_mode: Option<String>,
    #[serde(rename = "kvLoadFloor")]
    pub(crate) load_floor: Option<u32>,
    #[serde(rename = "kvMeanLoadFactor")]
    pub(crate) mean_load_factor: Option<u32>,
    #[serde(rename = "kvLoadPenalty")]
    pub(crate) load_penalty: Option<u32>,
    #[serde(rename = "kvCapSumMilli")]
    pub(crate) cap_sum_milli: Option<u64>,
    #[serde(rename = "kvSpillRelief")]
    pub(crate) spill_relief: Option<String>,
    #[serde(rename = "kvColdStartSeedN")]
    pub(crate) cold_start_seed_n: Option<u32>,
    #[serde(rename = "kvColdStartMinBlocks")]
    pub(crate) cold_start_min_blocks: Option<u32>,
    #[serde(rename = "kvMinMatchTokens")]
    pub(crate) min_match_tokens: Option<u32>,
    #[serde(rename = "kvKeying")]
    pub(crate) keying: Option<String>,
    #[serde(rename = "kvTierWeights")]
    pub(crate) tier_weights: Option<serde_json::Map<String, serde_json::Value>>,
    #[serde(rename = "kvObserve")]
    pub(crate) observe: Option<bool>,
}

/// How requests are split.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SplitArguments {
    #[serde(rename = "pdHandoff")]
    pub(crate) handoff: Option<String>,
    #[serde(rename = "timeoutPdPrefill")]
    pub(crate) timeout_prefill: Option<u32>,
    #[serde(rename = "timeoutPdDecode")]
    pub(crate) timeout_decode: Option<u32>,
    #[serde(rename = "timeoutPdHandoff")]
    pub(crate) timeout_handoff: Option<u32>,
    #[serde(rename = "pdBypassTokens")]
    pub(crate) bypass_tokens: Option<u32>,
    #[serde(rename = "pdBootstrapPort")]
    pub(crate) bootstrap_port: Option<u16>,
}

/// What is remembered of clients.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PinningArguments {
    pub(crate) pd_cache_aware_mode: Option<bool>,
    pub(crate) pd_session_ttl_sec: Option<u32>,
    pub(crate) pd_cache_threshold: Option<u8>,
    pub(crate) pd_balance_abs_threshold: Option<u32>,
    pub(crate) session_from_user: Option<bool>,
    pub(crate) session_header_name: Option<String>,
}

/// How endpoints are probed: of a rule, or of one endpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ProbeArguments {
    pub(crate) monitor: Option<bool>,
    pub(crate) probetype: Option<String>,
    pub(crate) probeport: Option<u16>,
    pub(crate) probereq: Option<String>,
    pub(crate) proberesp: Option<String>,
    #[serde(rename = "probeTimeout")]
    pub(crate) probe_timeout: Option<u32>,
    #[serde(rename = "probeRetries")]
    pub(crate) probe_retries: Option<u32>,
    #[serde(rename = "probeRise")]
    pub(crate) probe_rise: Option<u32>,
    #[serde(rename = "probeAnswerTimeout")]
    pub(crate) probe_answer_timeout: Option<u32>,
    #[serde(rename = "expectedCodes")]
    pub(crate) expected_codes: Option<String>,
}

/// One of `endpoints`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointArguments {
    #[serde(rename = "endpointIP")]
    pub(crate) endpoint_ip: Option<String>,
    #[serde(rename = "targetPort")]
    pub(crate) target_port: Option<u16>,
    pub(crate) weight: Option<u8>,
    pub(crate) ep_role: Option<u8>,
    #[serde(rename = "adminState")]
    pub(crate) admin_state: Option<String>,
    pub(crate) probe: Option<ProbeArguments>,
    #[serde(rename = "kvZmqPort")]
    pub(crate) zmq_port: Option<u16>,
    #[serde(rename = "kvReplayPort")]
    pub(crate) replay_port: Option<u16>,
}

/// One of `allowedSources`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SourceArguments {
    pub(crate) prefix: Option<String>,
}

/// What `oper` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Oper {
    /// 0: the body is the rule.
    Put,
    /// 1: its endpoints join the rule.
    Attach,
    /// 2: its endpoints leave the rule.
    Detach,
}

impl Body {
    /// Reads a body as it came over the wire.
    ///
    /// # Errors
    /// A [`Problem`] that names the first field that is wrong.
    pub fn read(bytes: &[u8]) -> Result<Self, Problem> {
        Self::from_json(&json::parse(bytes)?)
    }

    /// Checks a body that is JSON already.
    ///
    /// # Errors
    /// As [`Body::read`].
    pub fn from_json(value: &Value) -> Result<Self, Problem> {
        let mut json = fields::checked(value, fields::BODY, "")?;
        let service =
            json.get("serviceArguments").ok_or_else(|| Problem::MissingField("serviceArguments".to_owned()))?;
        let service = fields::checked(service, fields::SERVICE, "")?;
        let args = typed(&service, "serviceArguments")?;
        json.insert("serviceArguments".to_owned(), Value::Object(service));
        let endpoints = list(&mut json, "endpoints", fields::ENDPOINT)?;
        let sources = list(&mut json, "allowedSources", fields::SOURCE)?;
        Ok(Self { json, args, endpoints, sources })
    }

    /// The fields as they were sent, without those that only the API writes.
    pub fn json(&self) -> &Map<String, Value> {
        &self.json
    }

    pub(crate) fn args(&self) -> &ServiceArguments {
        &self.args
    }

    /// One field of `serviceArguments`, as it was sent.
    pub(crate) fn service_field(&self, name: &str) -> Option<&Value> {
        self.json.get("serviceArguments").and_then(|service| service.get(name))
    }

    pub(crate) fn oper(&self) -> Oper {
        match self.args.oper {
            Some(1) => Oper::Attach,
            Some(2) => Oper::Detach,
            _ => Oper::Put,
        }
    }

    /// What tells the rule from others.
    ///
    /// # Errors
    /// A [`Problem`] for a field of the key.
    pub fn key(&self) -> Result<RuleKey, Problem> {
        rule::key(&self.args)
    }

    /// The rule, under the number `id`.
    ///
    /// # Errors
    /// A [`Problem`] for the first field that does not make sense, alone or with another.
    pub fn rule(&self, id: RuleId) -> Result<crate::fleet::Rule, Problem> {
        crate::fleet::Rule::try_from((id, self))
    }

    /// This body with `join`'s endpoints attached: those already there take `join`'s settings, in their place.
    ///
    /// # Errors
    /// [`Problem::EndpointsOnly`] where `join` says something else of the rule.
    pub(crate) fn attached(&self, join: &Self) -> Result<Self, Problem> {
        self.endpoints_only(join)?;
        let mut rows = self.endpoint_rows();
        for (key, row) in join.keyed_rows()? {
            match self.position(&key)? {
                Some(position) => rows[position] = row,
                None => rows.push(row),
            }
        }
        self.with_rows(rows)
    }

    /// This body without the endpoints that `leave` names.
    ///
    /// # Errors
    /// [`Problem::EndpointsOnly`] as above, [`Problem::NoEndpoint`] for one that is not there.
    pub(crate) fn detached(&self, leave: &Self) -> Result<Self, Problem> {
        self.endpoints_only(leave)?;
        let mut gone = HashSet::new();
        for (key, _) in leave.keyed_rows()? {
            let position = self.position(&key)?.ok_or_else(|| Problem::NoEndpoint(format!("{key} in this rule")))?;
            gone.insert(position);
        }
        let rows = self.endpoint_rows().into_iter().enumerate().filter(|(i, _)| !gone.contains(i));
        self.with_rows(rows.map(|(_, row)| row).collect())
    }

    /// This body with a member of some endpoints set, or removed where `value` is `None`. `None` where no endpoint is
    /// chosen.
    pub(crate) fn with_endpoint_field(
        &self,
        chosen: impl Fn(&crate::fleet::EndpointKey) -> bool,
        name: &str,
        value: Option<&Value>,
    ) -> Result<Option<Self>, Problem> {
        let mut rows = self.endpoint_rows();
        let mut any = false;
        for (row, args) in rows.iter_mut().zip(&self.endpoints) {
            let Value::Object(row) = row else { continue };
            if !chosen(&endpoint::key(args, "endpoint")?) {
                continue;
            }
            any = true;
            match value {
                Some(value) => row.insert(name.to_owned(), value.clone()),
                None => row.shift_remove(name),
            };
        }
        if any { self.with_rows(rows).map(Some) } else { Ok(None) }
    }

    fn endpoints_only(&self, other: &Self) -> Result<(), Problem> {
        let oper = other.args.oper.unwrap_or(0);
        let Some(Value::Object(service)) = other.json.get("serviceArguments") else { return Ok(()) };
        for (name, value) in service {
            let part_of_key = matches!(name.as_str(), "oper" | "externalIP" | "protocol" | "host" | "model_name");
            if !part_of_key && self.service_field(name) != Some(value) {
                return Err(Problem::EndpointsOnly { oper, field: name.clone() });
            }
        }
        if other.json.contains_key("allowedSources") && other.sources != self.sources {
            return Err(Problem::EndpointsOnly { oper, field: "allowedSources".to_owned() });
        }
        Ok(())
    }

    fn endpoint_rows(&self) -> Vec<Value> {
        self.json.get("endpoints").and_then(Value::as_array).cloned().unwrap_or_default()
    }

    fn keyed_rows(&self) -> Result<Vec<(crate::fleet::EndpointKey, Value)>, Problem> {
        if self.endpoints.is_empty() {
            return Err(Problem::NoEndpoints);
        }
        let keys = self.endpoints.iter().enumerate().map(|(i, args)| endpoint::key(args, &format!("endpoints[{i}]")));
        keys.zip(self.endpoint_rows()).map(|(key, row)| Ok((key?, row))).collect()
    }

    fn position(&self, key: &crate::fleet::EndpointKey) -> Result<Option<usize>, Problem> {
        for (i, args) in self.endpoints.iter().enumerate() {
            if endpoint::key(args, &format!("endpoints[{i}]"))? == *key {
                return Ok(Some(i));
            }
        }
        Ok(None)
    }

    fn with_rows(&self, rows: Vec<Value>) -> Result<Self, Problem> {
        let mut json = self.json.clone();
        json.insert("endpoints".to_owned(), Value::Array(rows));
        Self::from_json(&Value::Object(json))
    }

    /// This body without `oper`, which is an order and not part of the rule.
    pub(crate) fn without_oper(mut self) -> Self {
        self.args.oper = None;
        if let Some(Value::Object(service)) = self.json.get_mut("serviceArguments") {
            service.shift_remove("oper");
        }
        self
    }
}

/// The members of the list `name`, checked in place.
fn list<T: for<'de> Deserialize<'de>>(
    json: &mut Map<String, Value>,
    name: &str,
    table: &[fields::Field],
) -> Result<Vec<T>, Problem> {
    let Some(Value::Array(rows)) = json.get_mut(name) else { return Ok(Vec::new()) };
    let mut typed_rows = Vec::with_capacity(rows.len());
    for (i, row) in rows.iter_mut().enumerate() {
        let place = format!("{name}[{i}]");
        let mut kept = fields::checked(row, table, &place)?;
        if let Some(probe) = kept.get_mut("probe") {
            *probe = Value::Object(fields::checked(probe, fields::PROBE, &format!("{place}.probe"))?);
        }
        typed_rows.push(typed(&kept, &place)?);
        *row = Value::Object(kept);
    }
    Ok(typed_rows)
}

/// An object whose fields were checked, as its type. The tables allow nothing that does not fit; were they wrong, the
/// request would be refused and not half understood.
fn typed<T: for<'de> Deserialize<'de>>(object: &Map<String, Value>, place: &str) -> Result<T, Problem> {
    T::deserialize(Value::Object(object.clone())).map_err(|error| Problem::BadValue {
        field: place.to_owned(),
        value: String::new(),
        expected: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::fields::{ENDPOINT, Field, Part, SERVICE, SOURCE};
    use super::*;

    fn names_of<T: Serialize + Default>() -> HashSet<String> {
        match serde_json::to_value(T::default()) {
            Ok(Value::Object(members)) => members.keys().cloned().collect(),
            _ => HashSet::new(),
        }
    }

    fn served(table: &[Field]) -> HashSet<String> {
        let acts = |f: &&Field| f.part == Part::Served || f.name == "kvWarmupSec";
        table.iter().filter(acts).map(|f| f.name.to_owned()).collect()
    }

    #[test]
    fn the_types_and_the_tables_name_the_same_fields() {
        assert_eq!(names_of::<ServiceArguments>(), served(SERVICE));
        assert_eq!(names_of::<EndpointArguments>(), served(ENDPOINT));
        assert_eq!(names_of::<SourceArguments>(), served(SOURCE));
        assert_eq!(names_of::<ProbeArguments>(), served(fields::PROBE));
    }

    #[test]
    fn attaching_and_detaching_change_endpoints_only() {
        let service = json!({"externalIP": "127.0.0.9", "port": 80, "mode": 4});
        let body = |endpoints: Value, service: &Value| {
            Body::from_json(&json!({"serviceArguments": service, "endpoints": endpoints}))
        };
        let row = |ip: &str, weight: u8| json!({"endpointIP": ip, "targetPort": 8000, "weight": weight});
        let rule = body(json!([row("192.0.2.1", 1), row("192.0.2.2", 1)]), &service).unwrap();

        let join = body(json!([row("192.0.2.3", 1), row("192.0.2.1", 9)]), &json!({"oper": 1})).unwrap();
        let joined = rule.attached(&join).unwrap();
        assert_eq!(
            joined.json().get("endpoints"),
            Some(&json!([row("192.0.2.1", 9), row("192.0.2.2", 1), row("192.0.2.3", 1)]))
        );
        let leave = body(json!([row("192.0.2.1", 1)]), &json!({"oper": 2})).unwrap();
        let left = joined.detached(&leave).unwrap();
        assert_eq!(left.json().get("endpoints"), Some(&json!([row("192.0.2.2", 1), row("192.0.2.3", 1)])));
        assert_eq!(left.detached(&leave).map_err(|p| p.code()), Err("endpoint_not_found"));

        let more = body(json!([row("192.0.2.3", 1)]), &json!({"oper": 1, "sel": 3})).unwrap();
        assert_eq!(rule.attached(&more).map_err(|p| p.code()), Err("endpoints_only"));
    }
}

//! Every field of LoxiLB's load-balancer body that kvlb knows, and what becomes of it.
//!
//! Sources: the field tables of LoxiLB's REST documentation, and the source document's section 8.1. `docs/rest.md` shows
//! this table to operators; a test holds the two together.

use serde_json::{Map, Value};

use self::Kind::{Any, Bool, List, Object, Text, Whole};
use crate::control::Problem;

/// A field's JSON type, with its range where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Bool,
    /// A whole number, both ends allowed.
    Whole(i64, i64),
    List,
    Object,
    Any,
}

/// What becomes of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// It has its effect.
    Served,
    /// It is checked, kept and shown again, and has no effect; the note says why that is harmless.
    Stored,
    /// The API writes it; in a request it is dropped, so that an answer can be sent back.
    ReadOnly,
    /// Only values that ask for nothing are accepted; the note says what to do instead.
    Refused,
    /// As `Refused`, and a later version is meant to serve it.
    NotYet,
}

/// One field.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) part: Part,
    /// What it does, or why not.
    pub(crate) note: &'static str,
    /// A value, as JSON, that asks for nothing although it is not empty, zero or false.
    pub(crate) neutral: &'static str,
}

const fn field(name: &'static str, kind: Kind, part: Part, note: &'static str) -> Field {
    Field { name, kind, part, note, neutral: "" }
}

const fn served(name: &'static str, kind: Kind, note: &'static str) -> Field {
    field(name, kind, Part::Served, note)
}

const fn stored(name: &'static str, kind: Kind, note: &'static str) -> Field {
    field(name, kind, Part::Stored, note)
}

const fn refused(name: &'static str, kind: Kind, note: &'static str) -> Field {
    field(name, kind, Part::Refused, note)
}

const fn not_yet(name: &'static str, kind: Kind, note: &'static str) -> Field {
    field(name, kind, Part::NotYet, note)
}

const fn neutral(field: Field, neutral: &'static str) -> Field {
    Field { neutral, ..field }
}

const PORT: Kind = Whole(1, 65_535);
const PORT_OR_NONE: Kind = Whole(0, 65_535);
/// A day: LoxiLB's longest inactivity time.
const DAY_SECONDS: Kind = Whole(0, 86_400);
const DAY_MILLIS: Kind = Whole(0, 86_400_000);
/// A second has a million microseconds, and one source no more use for connections.
const SYNS: Kind = Whole(0, 1_000_000);
const COUNT: Kind = Whole(0, u32::MAX as i64);
const TLS: &str = "TLS is not served; put a TLS terminator in front";
const ADMISSION: &str = "admission goes by fixed bounds";
/// LoxiLB's range.
const CEILING: Kind = Whole(0, 100_000);
const PREFIX_RING: &str = "sel 8 and 10 hash the first 512 bytes of the prompt, and need no ring";
const ONE_PROBE: &str = "an endpoint's own probe is set with its \"probe\", or POST /config/endpoint";

/// The members of the body itself.
pub(crate) const BODY: &[Field] = &[
    served("serviceArguments", Object, "the rule"),
    served("endpoints", List, "who serves it"),
    refused("secondaryIPs", List, "secondary addresses belong to SCTP"),
    served("allowedSources", List, "networks whose clients are served; none: all"),
    field("id", Any, Part::ReadOnly, "the rule's number: service_id, the service label of metrics"),
    field(
        "kvBlend",
        Any,
        Part::ReadOnly,
        "the numbers by which overlap is weighed against load, the process's included",
    ),
    field("vips", Any, Part::ReadOnly, "what became of connections to its VIPs in the kernel"),
    field("notes", Any, Part::ReadOnly, "what an operator should know of the rule"),
    field("refused", Any, Part::ReadOnly, "why a kept rule is not in force"),
];

/// The members of `serviceArguments`.
pub(crate) const SERVICE: &[Field] = &[
    served("externalIP", Text, "the VIP, IPv4 or IPv6; part of the key"),
    served("port", PORT, "the VIP's port; part of the key"),
    served("portMax", PORT_OR_NONE, "last port of a range; 0: just port; part of the key"),
    served("protocol", Text, "tcp; part of the key"),
    served("host", Text, "only requests with this Host; part of the key"),
    served("path_prefix", Text, "only requests whose path begins so; part of the key"),
    served("path_match_mode", Text, "prefix; \"disabled\" without path_prefix"),
    served("model_name", Text, "only requests for this model; part of the key"),
    served("name", Text, "a free name"),
    served("mode", Whole(0, i64::MAX), "4 (fullproxy)"),
    served("sel", Whole(0, i64::MAX), "0 rr, 1 hash, 2 priority, 3 persist, 4 lc, 8 chwbl, 9 gpuaware, 10 wrr-hash"),
    served("oper", Whole(0, 2), "0: the whole rule, 1: attach these endpoints, 2: detach them"),
    served("adminStateUp", Bool, "false: the rule takes no traffic"),
    served("monitor", Bool, "absent or true: endpoints are probed"),
    served("probetype", Text, "tcp (default), http, none"),
    served("probeport", PORT_OR_NONE, "0: the endpoint's own"),
    served("probereq", Text, "path of an http probe"),
    served("proberesp", Text, "text that an http answer must contain"),
    served("probeTimeout", Whole(0, 3_600), "seconds between probes; 0: 10"),
    served("probeRetries", Whole(0, 100), "bad results in a row that turn an endpoint down; 0: 2"),
    served("probeRise", Whole(0, 100), "good results in a row that turn it up again; 0: 1"),
    served("probeAnswerTimeout", Whole(0, 3_600), "seconds that one probe may take; 0: 5"),
    served("expectedCodes", Text, "good statuses of an http probe, as 200,202 or 200-204; empty: 200-299"),
    served("inactiveTimeOut", DAY_SECONDS, "seconds between two pieces of an answer; 0: 600"),
    served("timeoutMemberData", DAY_MILLIS, "the same in milliseconds"),
    served("timeoutMemberConnect", DAY_MILLIS, "milliseconds to connect to an endpoint; 0: 500"),
    served(
        "timeoutTcpInspect",
        DAY_MILLIS,
        "milliseconds between two pieces of a request's body, and for all its pauses together, to which each 512 bytes add a second; 0: 60000",
    ),
    served("timeoutFirstByte", DAY_MILLIS, "milliseconds from a request's end to the answer's first byte; 0: no limit"),
    served("max_stream_duration_sec", DAY_SECONDS, "seconds of a whole request; 0: no limit"),
    served("kvExactMode", Whole(0, 3), "0 off, 1 prefill/decode, 3 single pool; 2 is reserved"),
    served("kvBlockSize", Whole(1, u32::MAX as i64), "tokens per block, 16 unless said"),
    served("kvHashAlgo", Text, "sha256_cbor (default), xxhash_cbor, sha256 (vLLM's own default), xxhash"),
    served("kvZmqPort", PORT, "the engine's event port, 5557 unless said"),
    stored("kvWarmupSec", COUNT, "inert, as LoxiLB's; 30 unless said"),
    served("kvEngineType", Text, "vllm (default), llamacpp; never changes"),
    served(
        "kvDpRankCount",
        Whole(1, 8),
        "data-parallel ranks, at consecutive ports; as many as the engine says unless said",
    ),
    served("kvReplayPort", PORT, "the engine's replay port, kvZmqPort plus LLB_KV_REPLAY_PORT_OFFSET unless said"),
    served("kvScore", Text, "prefix (default): the run that the engine can use; count: LoxiLB's literal count"),
    served("kvLbMode", Text, "off, hard, soft, adaptive, adaptive-soft or cost; LOXILB_KV_LB_MODE unless said"),
    served("kvLoadFloor", COUNT, "no load bound is below this many requests; 4 unless said"),
    served(
        "kvMeanLoadFactor",
        Whole(100, 1_000),
        "percent of its fair share that an endpoint may carry in hard; LOXILB_KV_MEAN_LOAD_FACTOR unless said",
    ),
    served(
        "kvLoadPenalty",
        Whole(1, 100_000),
        "thousandths of a block that a request in flight weighs in soft; LOXILB_KV_LOAD_PENALTY unless said",
    ),
    served(
        "kvCapSumMilli",
        Whole(1_910_539, 122_274_480),
        "the fleet's capacity for adaptive and adaptive-soft, in thousandths; LOXILB_KV_CAP_SUM_MILLI unless said",
    ),
    served(
        "kvSpillRelief",
        Text,
        "an owner over its bound hands over to endpoints that hold nothing: auto (single pools), on, off; LOXILB_KV_SPILL_RELIEF unless said",
    ),
    served(
        "kvColdStartSeedN",
        Whole(0, 1_000_000),
        "every so many hits one goes to an endpoint that holds nothing yet; 0: never; LOXILB_KV_COLDSTART_SEED_N unless said",
    ),
    served(
        "kvColdStartMinBlocks",
        Whole(0, 100_000_000),
        "an endpoint with fewer blocks holds nothing yet; LOXILB_KV_COLDSTART_MIN_BLOCKS unless said",
    ),
    served(
        "kvMinMatchTokens",
        Whole(0, 4_096),
        "tokens that must match before the KV tier is used; LLB_KV_MIN_MATCH_TOKENS unless said",
    ),
    served("kvKeying", Text, "auto (default): parity until it is disproved, then rehash; parity; rehash"),
    served("kvTierWeights", Object, "what a block in cpu or storage is worth, 0 to 1 of one on the GPU; 0 unless said"),
    served("kvObserve", Bool, "score and count what the KV tier would choose, and let sel choose"),
    not_yet("kvWarmupEnforce", Bool, "the tier answers as soon as it knows blocks"),
    not_yet("kvModelProfile", Text, "stage the tokenizer by the model's slug"),
    not_yet("kvExactApiMode", Text, "completions and chat are both read"),
    served("pd_disagg_mode", Bool, "prefill/decode; kvExactMode 1 implies it"),
    served("pd_cache_aware_mode", Bool, "remember prompts as text, and send what begins alike to one endpoint"),
    served(
        "pd_session_ttl_sec",
        DAY_SECONDS,
        "seconds from a conversation's last answer until its endpoint is forgotten; 0: 300, and 10800 for what sel keeps",
    ),
    served("pd_cache_threshold", Whole(0, 100), "percent of a prompt's bytes that must be remembered; 0: 20"),
    served(
        "pd_balance_abs_threshold",
        COUNT,
        "remembered prompts have no word while endpoints' loads lie further apart than this; 0: 3",
    ),
    served(
        "session_from_user",
        Bool,
        "the body's user tells a conversation where X-Conversation-Id does not; in prefill/decode rules it always does",
    ),
    served(
        "session_header_name",
        Text,
        "what sel 3 keeps at its endpoint, and sel 0 then too: a header, cookie:NAME, query:NAME or basic-auth; empty: sel 3 keeps client addresses",
    ),
    served("pdHandoff", Text, "how blocks get from prefill to decode endpoints: nixl (default) or mooncake"),
    served(
        "timeoutPdPrefill",
        DAY_MILLIS,
        "milliseconds that a prefill leg may take; 0: LLB_PD_PREFILL_TIMEOUT_SEC, 30 s unless set",
    ),
    served(
        "timeoutPdDecode",
        DAY_MILLIS,
        "milliseconds to the first byte of a decode leg's answer, which of one that is not streamed is its last token; 0: as `timeoutFirstByte` says",
    ),
    served(
        "timeoutPdHandoff",
        DAY_MILLIS,
        "milliseconds from a prefill leg's answer until its decode leg is under way; 0: 10000",
    ),
    served(
        "pdBypassTokens",
        COUNT,
        "a decode endpoint that has to compute at most so many tokens of a prompt serves it alone; 0: never",
    ),
    served("pdBootstrapPort", PORT_OR_NONE, "Mooncake's bootstrap port at prefill endpoints; 0: 8998"),
    served("decisionHeaders", Bool, "answers carry x-kvlb-* headers that explain the choice"),
    served("connectionsMax", COUNT, "client connections at a time to the rule's VIP; 0: no limit but kvlb's own"),
    served(
        "synRate",
        SYNS,
        "connections that one source may begin each second, at all VIPs of the rule; more are dropped at the devices of --xdp-dev; 0: no limit",
    ),
    served("synBurst", SYNS, "connections that one source may begin at once under synRate; 0: as many as in a second"),
    served("maxInspectBytes", Whole(0, 1 << 30), "bodies up to this many bytes are read; 33554432 unless said"),
    served("forwardedHeaders", Bool, "add X-Forwarded-For and -Proto; true unless said"),
    served("clientHalfClose", Text, "leave (default): a client's FIN ends its request; allow: it does not"),
    served(
        "cb_enable",
        Bool,
        "false: endpoints that fail keep their traffic until their probes find them down; true unless said",
    ),
    served(
        "cb_connect_failures",
        Whole(0, 1000),
        "failed connects in a row that open an endpoint's breaker; 0: none; 5 unless said",
    ),
    served(
        "cb_answer_failures",
        Whole(0, 1000),
        "answers in a row of 500 and above (not 501, 503), or none at all, that open it, or as many in a row that break off midway (those that do so together count once); 0: none; 3 unless said",
    ),
    served("cb_open_sec", Whole(1, 86_400), "seconds without traffic before three requests try; 30 unless said"),
    served(
        "noEndpoint",
        Text,
        "while no endpoint may be asked: 503 (default), the proxy's answer, or reset: new connections are refused, by the kernel where it steers",
    ),
    not_yet("vipRouted", Bool, "kvlb routes the VIP itself"),
    not_yet("security", Whole(0, i64::MAX), TLS),
    neutral(refused("backend_protocol", Text, "endpoints are spoken to in HTTP/1.1"), "\"http1\""),
    refused("privateIP", Text, "a proxy does not translate addresses"),
    refused("bgp", Bool, "kvlb announces no routes"),
    refused("block", Any, "kvlb has no address blocks"),
    refused("snat", Bool, "a proxy always uses its own address"),
    refused("egress", Bool, "kvlb is no egress gateway"),
    not_yet("proxyprotocolv2", Bool, "use forwardedHeaders"),
    neutral(not_yet("connectionLimit", Whole(-1, i64::MAX), "see connectionsMax"), "-1"),
    stored("managed", Bool, "a mark for controllers"),
    stored("id", Any, "another system's identity; kvlb's own number is the body's id"),
    stored("projectId", Text, "a mark for controllers"),
    stored("annotations", Any, "a mark for controllers"),
    stored("sse_mode", Bool, "streamed answers are always relayed as they come"),
    stored("backend_keepalive_interval_sec", DAY_SECONDS, "idle endpoint connections are checked before reuse"),
    stored("chwbl_prefix_hash_level", COUNT, PREFIX_RING),
    stored("chwbl_prefix_hash_flags", COUNT, PREFIX_RING),
    served(
        "chwbl_mean_load_factor",
        Whole(0, 1_000),
        "percent of its fair share that an endpoint may carry with sel 8 and 10, 100 at least; 0: 125",
    ),
    stored("chwbl_replication", COUNT, PREFIX_RING),
    stored("chwbl_enable_cache_salt", Bool, PREFIX_RING),
    not_yet("alpn_protocols", Any, TLS),
    not_yet("tls_versions", Any, TLS),
    not_yet("tls_ciphers", Any, TLS),
    not_yet("hsts_max_age", Any, TLS),
    not_yet("hsts_include_subdomains", Any, TLS),
    not_yet("hsts_preload", Any, TLS),
    not_yet("mtls_frontend", Any, TLS),
    not_yet("mtls_backend", Any, TLS),
    served(
        "fc_mode",
        Text,
        "off (default), observe: count what would wait or be refused, enforce: let it wait, or refuse it",
    ),
    served("fc_max_outstanding", CEILING, "requests at all of the rule's endpoints together; 0: no bound"),
    served("fc_ep_max_inflight", CEILING, "requests at one endpoint, of all rules with admission; 0: no bound"),
    served("fc_prefill_max_inflight", CEILING, "the same at a prefill endpoint"),
    served("fc_decode_max_inflight", CEILING, "the same at a decode endpoint"),
    served(
        "fc_max_queue_depth",
        Whole(0, 65_536),
        "requests that may wait for a place; more are refused with 429; 0: none waits",
    ),
    served(
        "fc_max_queue_wait_ms",
        Whole(0, 3_600_000),
        "milliseconds that a request may wait before it gets 504; must be there where requests may wait",
    ),
    field("fc_effective", Any, Part::ReadOnly, "what is in force, and how many are in flight and wait"),
    not_yet("fc_adaptive", Any, ADMISSION),
    not_yet("fc_warmup_ms", Any, ADMISSION),
    not_yet("fc_ttft_target_ms", Any, ADMISSION),
    not_yet("fc_tenant_max_share_pct", Any, "kvlb knows no tenants"),
    not_yet("fc_telemetry_stale_ms", Any, "what engines say is known for 30 s"),
    not_yet("fc_expose_headers", Any, "decisionHeaders adds them"),
];

/// The members of one of `endpoints`.
pub(crate) const ENDPOINT: &[Field] = &[
    served("endpointIP", Text, "an address or a DNS name"),
    served("targetPort", PORT, "its port"),
    served("weight", Whole(0, 255), "relative capacity, 1 unless said; 0 drains"),
    served("ep_role", Whole(0, 2), "0 any, 1 prefill, 2 decode"),
    served("adminState", Text, "up (default), drain, down"),
    served("probe", Object, "its own probe, instead of the rule's"),
    served("kvZmqPort", PORT, "its own event port, instead of the rule's: engines of one host cannot share one"),
    served("kvReplayPort", PORT, "its own replay port, likewise"),
    stored("nixl_port", PORT_OR_NONE, "the engine tells it with each transfer"),
    not_yet("backup", Bool, "give it a small weight"),
    not_yet("monitorAddress", Text, ONE_PROBE),
    neutral(not_yet("httpMethod", Text, ONE_PROBE), "\"GET\""),
    not_yet("urlPath", Text, ONE_PROBE),
    not_yet("expectedCodes", Text, ONE_PROBE),
    not_yet("httpVersion", Any, ONE_PROBE),
    not_yet("domainName", Text, ONE_PROBE),
    field("ep_idx", Any, Part::ReadOnly, "its position"),
    field(
        "state",
        Any,
        Part::ReadOnly,
        "active, inactive, breaker-open, half-open, draining, admin-down, or - where unknown",
    ),
    field("counter", Any, Part::ReadOnly, "requests:bytes"),
    field("kvStatus", Any, Part::ReadOnly, "the state of its block inventory and contract"),
    field("telemetry", Any, Part::ReadOnly, "what its engine says of its work"),
];

/// The members of an endpoint's `probe`; they mean what they mean in the rule.
pub(crate) const PROBE: &[Field] = &[
    served("monitor", Bool, "as the rule's"),
    served("probetype", Text, "as the rule's"),
    served("probeport", PORT_OR_NONE, "as the rule's"),
    served("probereq", Text, "as the rule's"),
    served("proberesp", Text, "as the rule's"),
    served("probeTimeout", Whole(0, 3_600), "as the rule's"),
    served("probeRetries", Whole(0, 100), "as the rule's"),
    served("probeRise", Whole(0, 100), "as the rule's"),
    served("probeAnswerTimeout", Whole(0, 3_600), "as the rule's"),
    served("expectedCodes", Text, "as the rule's"),
];

/// The members of one of `allowedSources`.
pub(crate) const SOURCE: &[Field] = &[served("prefix", Text, "a network, as 10.0.0.0/8")];

/// The members of `POST /config/endpoint`.
pub(crate) const HOST: &[Field] = &[
    served("hostName", Text, "the endpoint's address or name, as in its rules"),
    served("probeType", Text, "tcp (default), http, none"),
    served("probeReq", Text, "path of an http probe"),
    served("probeResp", Text, "text that an http answer must contain"),
    served("probePort", PORT_OR_NONE, "0: the endpoint's own"),
    served("probeDuration", Whole(0, 3_600), "seconds between probes; 0: 60"),
    served("inactiveReTries", Whole(0, 100), "bad results in a row that turn it down; 0: 2"),
    stored("name", Text, "the answer names an endpoint by address, port and probe"),
    field("minDelay", Any, Part::ReadOnly, "of its probes"),
    field("avgDelay", Any, Part::ReadOnly, "of its probes"),
    field("maxDelay", Any, Part::ReadOnly, "of its probes"),
    field("currState", Any, Part::ReadOnly, "ok or nok"),
];

/// The members of `POST /config/endpointhoststate`.
pub(crate) const HOST_STATE: &[Field] = &[
    served("hostName", Text, "the endpoint's address or name, as in its rules"),
    served("epPort", PORT_OR_NONE, "its port; 0 or absent: every port of that host"),
    served("epProto", Text, "tcp"),
    served("state", Text, "green: up, yellow: drain, red: down"),
];

/// The tables in which a misplaced field is looked for, with the place to name.
const PLACES: [(&[Field], &str); 4] = [
    (SERVICE, "serviceArguments"),
    (ENDPOINT, "each of endpoints"),
    (SOURCE, "each of allowedSources"),
    (BODY, "the body itself"),
];

/// The members of `value` that count: checked against `fields`, without those that are null or read-only.
///
/// `place` is how errors name the object; empty for the rule's own.
pub(crate) fn checked(value: &Value, fields: &[Field], place: &str) -> Result<Map<String, Value>, Problem> {
    let Value::Object(object) = value else {
        let place = if place.is_empty() { "the body" } else { place };
        return Err(Problem::NotObject { place: place.to_owned(), found: type_of(value) });
    };
    let mut kept = Map::new();
    for (name, value) in object {
        let field = fields.iter().find(|f| f.name == name).ok_or_else(|| unknown(name, fields, place))?;
        if value.is_null() || field.part == Part::ReadOnly {
            continue;
        }
        field.check(value, place)?;
        kept.insert(name.clone(), value.clone());
    }
    Ok(kept)
}

impl Field {
    fn check(&self, value: &Value, place: &str) -> Result<(), Problem> {
        let (expected, fits) = match self.kind {
            Kind::Text => ("a text", value.is_string()),
            Kind::Bool => ("true or false", value.is_boolean()),
            Kind::Whole(..) => ("a whole number", value.is_i64() || value.is_u64()),
            Kind::List => ("a list", value.is_array()),
            Kind::Object => ("an object", value.is_object()),
            Kind::Any => ("", true),
        };
        if !fits {
            return Err(Problem::WrongType { field: self.path(place), expected, found: type_of(value) });
        }
        let asks = || !is_empty(value) && serde_json::from_str::<Value>(self.neutral).ok().as_ref() != Some(value);
        match self.part {
            Part::Refused if asks() => {
                Err(self.refusal(value, place, |field, value, reason| Problem::NotSupported { field, value, reason }))
            }
            Part::NotYet if asks() => {
                Err(self.refusal(value, place, |field, value, reason| Problem::NotSupportedYet {
                    field,
                    value,
                    reason,
                }))
            }
            _ => self.check_range(value, place),
        }
    }

    fn check_range(&self, value: &Value, place: &str) -> Result<(), Problem> {
        let Kind::Whole(first, last) = self.kind else { return Ok(()) };
        if value.as_i64().is_some_and(|n| (first..=last).contains(&n)) {
            return Ok(());
        }
        let range = if last == i64::MAX { format!("{first} and more") } else { format!("{first} to {last}") };
        Err(Problem::OutOfRange { field: self.path(place), value: value.to_string(), range })
    }

    fn refusal(&self, value: &Value, place: &str, with: impl Fn(String, String, String) -> Problem) -> Problem {
        with(self.path(place), shown(&value.to_string()), self.note.to_owned())
    }

    fn path(&self, place: &str) -> String {
        if place.is_empty() { self.name.to_owned() } else { format!("{place}.{}", self.name) }
    }
}

/// A value that asks for nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
    }
}

/// How an error shows a value: the beginning of it, so that a huge one does not come back whole.
pub(crate) fn shown(text: &str) -> String {
    const SHOWN_CHARS: usize = 60;
    if text.chars().count() <= SHOWN_CHARS {
        return text.to_owned();
    }
    text.chars().take(SHOWN_CHARS).chain("…".chars()).collect()
}

pub(crate) fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(n) if n.is_f64() => "a fraction",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn unknown(name: &str, fields: &[Field], place: &str) -> Problem {
    let hint = match nearest(name, fields) {
        Some(near) => format!("; did you mean {near:?}?"),
        None => PLACES
            .iter()
            .find(|(fields, _)| fields.iter().any(|f| f.name == name))
            .map_or_else(String::new, |(_, place)| format!("; it belongs in {place}")),
    };
    let place = if place.is_empty() { String::new() } else { format!(" in {place}") };
    Problem::UnknownField { field: shown(name), place, hint }
}

/// The field that `name` was probably meant to be: the same but for case and underscores, or at most two slips away.
fn nearest(name: &str, fields: &[Field]) -> Option<&'static str> {
    const SLIPS_MAX: usize = 2;
    let bare = |text: &str| text.replace(['_', '-'], "").to_ascii_lowercase();
    let wanted = bare(name);
    fields
        .iter()
        .map(|f| (strsim::damerau_levenshtein(&wanted, &bare(f.name)), f.name))
        .filter(|(slips, known)| *slips == 0 || (*slips <= SLIPS_MAX && known.len() > 2 * SLIPS_MAX))
        .min()
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text_of(value: &Value, fields: &[Field], place: &str) -> String {
        checked(value, fields, place).map_or_else(|problem| problem.to_string(), |kept| json!(kept).to_string())
    }

    #[test]
    fn a_wrongly_cased_field_is_refused_with_the_right_spelling() {
        for (sent, meant) in [
            ("kvexactmode", "kvExactMode"),
            ("kv_exact_mode", "kvExactMode"),
            ("KvZmqPort", "kvZmqPort"),
            ("probeType", "probetype"),
            ("epsrole", "sel"), // no near name at all
            ("modelName", "model_name"),
            ("externalIp", "externalIP"),
            ("kvBlokSize", "kvBlockSize"),
        ] {
            let text = text_of(&json!({sent: 1}), SERVICE, "");
            assert!(text.starts_with(&format!("unknown field {sent:?}")), "{text}");
            assert_eq!(text.contains(&format!("did you mean {meant:?}?")), sent != "epsrole", "{text}");
        }
    }

    #[test]
    fn a_field_in_the_wrong_object_is_sent_to_its_place() {
        assert_eq!(
            text_of(&json!({"ep_role": 1}), SERVICE, ""),
            "unknown field \"ep_role\"; it belongs in each of endpoints"
        );
        assert_eq!(
            text_of(&json!({"kvExactMode": 1}), ENDPOINT, "endpoints[2]"),
            "unknown field \"kvExactMode\" in endpoints[2]; it belongs in serviceArguments"
        );
    }

    #[test]
    fn values_that_ask_for_nothing_pass_where_a_field_is_refused() {
        let asks_nothing = json!({"bgp": false, "privateIP": "", "connectionLimit": -1, "fc_mode": "off",
            "mtls_frontend": {}, "tls_versions": [], "backend_protocol": "http1", "security": 0, "egress": null});
        assert!(checked(&asks_nothing, SERVICE, "").is_ok());
        assert_eq!(text_of(&json!({"bgp": true}), SERVICE, ""), "bgp true is not supported: kvlb announces no routes");
        let problem = checked(&json!({"security": 1}), SERVICE, "").map_err(|p| p.code());
        assert_eq!(problem, Err("not_supported_yet"));
    }

    #[test]
    fn what_the_api_itself_writes_is_dropped() {
        let kept = checked(&json!({"targetPort": 1, "state": "active", "kvStatus": {"blocks": 3}}), ENDPOINT, "e");
        assert_eq!(kept.map(Value::Object), Ok(json!({"targetPort": 1})));
    }

    #[test]
    fn a_long_value_is_shown_by_its_beginning() {
        let text = text_of(&json!({"privateIP": "é".repeat(500)}), SERVICE, "");
        assert!(text.chars().count() < 160, "{text}");
    }

    /// A table as `docs/rest.md` shows it.
    fn markdown(fields: &[Field]) -> String {
        let row = |f: &Field| {
            let word = match f.part {
                Part::Served => "served",
                Part::Stored => "stored",
                Part::ReadOnly => "read-only",
                Part::Refused => "refused",
                Part::NotYet => "not yet",
            };
            let kind = match f.kind {
                Kind::Text => "text".to_owned(),
                Kind::Bool => "bool".to_owned(),
                Kind::Whole(first, i64::MAX) => format!("int, {first} and more"),
                Kind::Whole(first, last) => format!("int, {first} to {last}"),
                Kind::List => "list".to_owned(),
                Kind::Object => "object".to_owned(),
                Kind::Any => "any".to_owned(),
            };
            format!("| `{}` | {word} | {kind} | {} |\n", f.name, f.note)
        };
        fields.iter().map(row).collect()
    }

    #[test]
    fn the_documentation_shows_these_tables() {
        let docs = include_str!("../../../../docs/rest.md");
        for (name, fields) in [
            ("the body", BODY),
            ("serviceArguments", SERVICE),
            ("endpoints[]", ENDPOINT),
            ("probe", PROBE),
            ("allowedSources[]", SOURCE),
            ("/config/endpoint", HOST),
            ("/config/endpointhoststate", HOST_STATE),
        ] {
            let table = markdown(fields);
            assert!(docs.contains(&table), "docs/rest.md should show of {name}:\n{table}");
        }
    }

    #[test]
    fn no_name_stands_twice_in_a_table() {
        for fields in [BODY, SERVICE, ENDPOINT, PROBE, SOURCE, HOST, HOST_STATE] {
            let mut names: Vec<_> = fields.iter().map(|f| f.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), fields.len());
        }
    }
}

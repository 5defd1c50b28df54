//! `kvlb create`: flags become bodies.

#![expect(clippy::doc_markdown, reason = "these comments are help texts")]

use clap::Args;
use clap::builder::PossibleValue;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::CliError;
use super::unserved::Unserved;

/// `--select`, and the rule's `sel`.
pub(super) const SELECTORS: [(&str, u8); 11] = [
    ("rr", 0),
    ("hash", 1),
    ("priority", 2),
    ("persist", 3),
    ("lc", 4),
    ("n2", 5),
    ("n3", 6),
    ("chwbl", 8),
    ("gpuaware", 9),
    ("wrr-hash", 10),
    ("chwbl-wrr", 10),
];

/// `--mode`, and the rule's `mode`.
pub(super) const MODES: [(&str, u8); 6] =
    [("default", 0), ("onearm", 1), ("fullnat", 2), ("dsr", 3), ("fullproxy", 4), ("hostonearm", 5)];

/// `--security`, and the rule's `security`.
const SECURITIES: [(&str, u8); 5] = [("plain", 0), ("https", 1), ("tls", 1), ("e2ehttps", 2), ("e2etls", 2)];

/// `--ep-role`, and the endpoint's `ep_role`.
const ROLES: [(&str, u8); 4] = [("normal", 0), ("any", 0), ("prefill", 1), ("decode", 2)];

/// Words for clap, which names those that are served when another one is given. The others are sent too: the API says
/// why it does not serve them.
fn words<const N: usize>(table: [(&'static str, u8); N], served: &[u8]) -> [PossibleValue; N] {
    table.map(|(word, number)| PossibleValue::new(word).hide(!served.contains(&number)))
}

fn number(table: &[(&str, u8)], word: &str) -> u8 {
    table.iter().find(|(known, _)| *known == word).map_or(0, |(_, number)| *number)
}

#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  kvlb create lb 10.10.10.254 --tcp=8080:8000 --endpoints=192.0.2.1:1,192.0.2.2:1 --mode=fullproxy \\
      --select=rr --kv-exact-mode=3 --kv-block-size=16
  kvlb create lb 10.10.10.254 --tcp=8080:8000 --endpoints=192.0.2.1:1,192.0.2.2:1 --mode=fullproxy \\
      --select=persist --kv-exact-mode=1 --ep-role=prefill,decode
  kvlb create lb ::1 --tcp=8080:8000 --endpoints=127.0.0.1:8001:1,[::1]:8002:1
  kvlb create lb 10.10.10.254 --tcp=8080:8000 --endpoints=192.0.2.3:1 --attachEP")]
pub(super) struct LoadBalancer {
    /// The VIP, IPv4 or IPv6
    #[arg(value_name = "IP")]
    ip: String,

    /// VIP port or port range, and the endpoints' port: 8080:8000 or 8080-8090:8000; several make several rules
    #[arg(long, value_name = "PORT:TARGET", value_delimiter = ',', required = true)]
    tcp: Vec<String>,

    #[arg(
        long,
        value_name = "HOST:WEIGHT",
        value_delimiter = ',',
        required = true,
        help = "Engines, as address:weight (weight 0 drains), or address:port:weight for a target port of their own; \
                IPv6 as [::1]:1 or ::1:1"
    )]
    endpoints: Vec<String>,

    /// Who is chosen where the KV tier has no word
    #[arg(long, value_name = "SELECTOR", value_parser = words(SELECTORS, &[0, 1, 2, 3, 4, 8, 9, 10]))]
    select: Option<String>,

    /// How traffic is forwarded; kvlb serves fullproxy, which is the default here
    #[arg(long, value_name = "MODE", value_parser = words(MODES, &[4]))]
    mode: Option<String>,

    /// A free name, for delete lb --name
    #[arg(long)]
    name: Option<String>,

    /// Only requests with this Host
    #[arg(long)]
    host: Option<String>,

    /// Only requests for this model
    #[arg(long, value_name = "MODEL")]
    model_name: Option<String>,

    /// Only requests whose path begins so
    #[arg(long, value_name = "PATH")]
    path_prefix: Option<String>,

    /// prefix or disabled
    #[arg(long, value_name = "MODE")]
    path_match_mode: Option<String>,

    /// Networks whose clients are served
    #[arg(long, value_name = "NETWORK", value_delimiter = ',')]
    sources: Vec<String>,

    /// Add the endpoints to the rule that is there
    #[arg(long = "attachEP", conflicts_with = "detach")]
    attach: bool,

    /// Take the endpoints out of the rule
    #[arg(long = "detachEP")]
    detach: bool,

    /// Take no traffic until the rule is created again without this
    #[arg(long)]
    admin_down: bool,

    /// plain; TLS is not served yet
    #[arg(long, value_name = "KIND", value_parser = words(SECURITIES, &[0]))]
    security: Option<String>,

    #[command(flatten)]
    probe: ProbeFlags,
    #[command(flatten)]
    kv: KvFlags,
    #[command(flatten)]
    pinning: PinningFlags,
    #[command(flatten)]
    proxy: ProxyFlags,
    #[command(flatten)]
    stored: StoredFlags,
    #[command(flatten)]
    unserved: Unserved,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Probes")]
struct ProbeFlags {
    /// Probe the endpoints: on unless said; --monitor=false switches it off
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    monitor: Option<bool>,
    /// tcp, http or none
    #[arg(long, value_name = "KIND")]
    probetype: Option<String>,
    /// Port, if not the endpoint's own
    #[arg(long, value_name = "PORT")]
    probeport: Option<i64>,
    /// Path of an http probe
    #[arg(long, value_name = "PATH")]
    probereq: Option<String>,
    /// Text that an http answer must contain
    #[arg(long, value_name = "TEXT")]
    proberesp: Option<String>,
    /// Seconds between probes
    #[arg(long, value_name = "SECONDS")]
    probetimeout: Option<i64>,
    /// Bad results in a row that turn an endpoint down
    #[arg(long, value_name = "N")]
    proberetries: Option<i64>,
    /// Good results in a row that turn it up again
    #[arg(long, value_name = "N")]
    proberise: Option<i64>,
    /// Seconds that one probe may take
    #[arg(long, value_name = "SECONDS")]
    probe_answer_timeout: Option<i64>,
    /// Good statuses of an http probe, as 200,202 or 200-204
    #[arg(long, value_name = "CODES")]
    expected_codes: Option<String>,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "KV tier")]
struct KvFlags {
    /// 0 off, 1 prefill/decode, 3 single pool
    #[arg(long, value_name = "MODE")]
    kv_exact_mode: Option<i64>,
    /// Tokens per block: the engine's --block-size
    #[arg(long, value_name = "TOKENS")]
    kv_block_size: Option<i64>,
    /// sha256_cbor, xxhash_cbor, sha256 or xxhash: the engine's --prefix-caching-hash-algo
    #[arg(long, value_name = "ALGO")]
    kv_hash_algo: Option<String>,
    /// The engine's event port
    #[arg(long, value_name = "PORT")]
    kv_zmq_port: Option<i64>,
    /// The engine's replay port
    #[arg(long, value_name = "PORT")]
    kv_replay_port: Option<i64>,
    /// vllm or llamacpp; never changes for a rule
    #[arg(long, value_name = "ENGINE")]
    kv_engine_type: Option<String>,
    /// Data-parallel ranks of an engine, 1 to 8; as many as it says unless said
    #[arg(long, value_name = "N")]
    kv_dp_ranks: Option<i64>,
    /// prefix (what the engine can use) or count
    #[arg(long, value_name = "SCORE")]
    kv_score: Option<String>,
    /// How affinity and load are blended: off, hard, soft, adaptive, adaptive-soft or cost
    #[arg(long, value_name = "MODE")]
    kv_lb_mode: Option<String>,
    /// No load bound is below this many requests
    #[arg(long, value_name = "N")]
    kv_load_floor: Option<i64>,
    /// Percent of its fair share that an endpoint may carry in hard
    #[arg(long, value_name = "PERCENT")]
    kv_mean_load_factor: Option<i64>,
    /// Thousandths of a block that a request in flight weighs in soft
    #[arg(long, value_name = "N")]
    kv_load_penalty: Option<i64>,
    /// The fleet's capacity for adaptive and adaptive-soft, in thousandths
    #[arg(long, value_name = "N")]
    kv_cap_sum_milli: Option<i64>,
    /// An owner over its bound hands over to endpoints that hold nothing: auto (single pools), on, off
    #[arg(long, value_name = "RELIEF")]
    kv_spill_relief: Option<String>,
    /// Every so many hits one goes to an endpoint that holds nothing yet; 0: never
    #[arg(long, value_name = "N")]
    kv_cold_start_seed_n: Option<i64>,
    /// An endpoint with fewer blocks holds nothing yet
    #[arg(long, value_name = "N")]
    kv_cold_start_min_blocks: Option<i64>,
    /// Tokens that must match before the KV tier is used
    #[arg(long, value_name = "N")]
    kv_min_match_tokens: Option<i64>,
    /// auto, parity or rehash: blocks are named as the engine does, or in kvlb's own way
    #[arg(long, value_name = "KEYING")]
    kv_keying: Option<String>,
    /// What a block in an offload tier is worth, 0 to 1 of one on the GPU: cpu=0.5,storage=0.2
    #[arg(long, value_name = "MEDIUM=WEIGHT", value_delimiter = ',', value_parser = tier_weight)]
    kv_tier_weights: Vec<(String, serde_json::Value)>,
    /// Score and count what the KV tier would choose, and let --select choose
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    kv_observe: Option<bool>,
    /// Parts of the endpoints in their order: prefill, decode, normal
    #[arg(long, value_name = "ROLE", value_delimiter = ',', value_parser = words(ROLES, &[0, 1, 2]))]
    ep_role: Vec<String>,
    /// Prefill/decode; --kv-exact-mode=1 implies it
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pd_disagg: Option<bool>,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Conversations and sessions")]
struct PinningFlags {
    /// Seconds from a conversation's last answer until its endpoint is forgotten; 0: 300, and 10800 for sessions of --select persist
    #[arg(long, value_name = "SECONDS")]
    pd_session_ttl: Option<i64>,
    /// The body's user tells a conversation where X-Conversation-Id does not
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    session_from_user: Option<bool>,
    /// What --select=persist keeps, and rr then too: a header, cookie:NAME, query:NAME or basic-auth
    #[arg(long, value_name = "SOURCE")]
    session_header_name: Option<String>,
    /// Remember prompts as text, and send what begins alike to one endpoint
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pd_cache_aware: Option<bool>,
    /// Percent of a prompt's bytes that must be remembered; 0: 20
    #[arg(long, value_name = "PERCENT")]
    pd_cache_threshold: Option<i64>,
    /// Remembered prompts have no word while loads lie further apart than this; 0: 3
    #[arg(long, value_name = "N")]
    pd_balance_abs_threshold: Option<i64>,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Proxy")]
struct ProxyFlags {
    /// Answers carry x-kvlb-* headers that explain the choice
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    decision_headers: Option<bool>,
    /// Add X-Forwarded-For and -Proto: on unless said
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    forwarded_headers: Option<bool>,
    /// Client connections at a time; 0: no limit but kvlb's own
    #[arg(long, value_name = "N")]
    connections_max: Option<i64>,
    /// Connections that one source may begin each second; more are dropped at the devices of --xdp-dev; 0: no limit
    #[arg(long, value_name = "N")]
    syn_rate: Option<i64>,
    /// Connections that one source may begin at once under --syn-rate; 0: as many as in a second
    #[arg(long, value_name = "N")]
    syn_burst: Option<i64>,
    /// While no endpoint may be asked: 503, or reset, which refuses new connections
    #[arg(long, value_name = "ANSWER")]
    no_endpoint: Option<String>,
    /// Percent of its fair share that an endpoint may carry with --select chwbl and wrr-hash
    #[arg(long, value_name = "PERCENT")]
    chwbl_load_factor: Option<i64>,
    /// Bodies up to this size are read before choosing
    #[arg(long, value_name = "BYTES")]
    max_inspect_bytes: Option<i64>,
    /// leave or allow: whether a client's FIN ends its request
    #[arg(long, value_name = "MODE")]
    client_half_close: Option<String>,
    /// Seconds between two pieces of an answer
    #[arg(long, value_name = "SECONDS")]
    inatimeout: Option<i64>,
    /// Milliseconds to connect to an endpoint
    #[arg(long, value_name = "MS")]
    connect_timeout: Option<i64>,
    /// Milliseconds to an answer's first byte; 0: no limit
    #[arg(long, value_name = "MS")]
    first_byte_timeout: Option<i64>,
    /// Seconds of a whole request; 0: no limit
    #[arg(long, value_name = "SECONDS")]
    max_stream_duration: Option<i64>,
    /// How blocks get from prefill to decode endpoints: nixl or mooncake
    #[arg(long, value_name = "CONNECTOR")]
    pd_handoff: Option<String>,
    /// Milliseconds that a prefill leg may take; 0: LLB_PD_PREFILL_TIMEOUT_SEC
    #[arg(long, value_name = "MS")]
    pd_prefill_timeout: Option<i64>,
    /// Milliseconds to the first byte of a decode leg's answer, which of one that is not streamed is its last token; 0: as
    /// --first-byte-timeout says
    #[arg(long, value_name = "MS")]
    pd_decode_timeout: Option<i64>,
    /// Milliseconds from a prefill leg's answer until its decode leg is under way; 0: 10000
    #[arg(long, value_name = "MS")]
    pd_handoff_timeout: Option<i64>,
    /// A decode endpoint that has to compute at most so many tokens of a prompt serves it alone; 0: never
    #[arg(long, value_name = "TOKENS")]
    pd_bypass_tokens: Option<i64>,
    /// Mooncake's bootstrap port at prefill endpoints; 0: 8998
    #[arg(long, value_name = "PORT")]
    pd_bootstrap_port: Option<i64>,
    /// Endpoints that fail again and again get no traffic for a while; true unless said
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    cb_enable: Option<bool>,
    /// Failed connects in a row that open an endpoint's breaker; 0: none
    #[arg(long, value_name = "N")]
    cb_connect_failures: Option<i64>,
    /// Failed answers in a row that open it; 0: none
    #[arg(long, value_name = "N")]
    cb_answer_failures: Option<i64>,
    /// How long it stays open before three requests try
    #[arg(long, value_name = "SECONDS")]
    cb_open: Option<i64>,
    /// off, observe or enforce: bounds on requests in flight are counted against, or held
    #[arg(long, value_name = "MODE")]
    fc_mode: Option<String>,
    /// Requests at all endpoints together; 0: no bound
    #[arg(long, value_name = "N")]
    fc_max_outstanding: Option<i64>,
    /// Requests at one endpoint; 0: no bound
    #[arg(long, value_name = "N")]
    fc_ep_max_inflight: Option<i64>,
    /// The same at a prefill endpoint
    #[arg(long, value_name = "N")]
    fc_prefill_max_inflight: Option<i64>,
    /// The same at a decode endpoint
    #[arg(long, value_name = "N")]
    fc_decode_max_inflight: Option<i64>,
    /// Requests that may wait for a place; 0: they are refused
    #[arg(long, value_name = "N")]
    fc_max_queue_depth: Option<i64>,
    /// Milliseconds that they may
    #[arg(long, value_name = "MS")]
    fc_max_queue_wait_ms: Option<i64>,
    /// http1
    #[arg(long, value_name = "PROTOCOL")]
    backend_protocol: Option<String>,
}

/// Flags of loxicmd whose fields are accepted, shown again, and without effect.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Accepted without effect so far (docs/rest.md)")]
struct StoredFlags {
    /// Inert, as in LoxiLB
    #[arg(long, value_name = "SECONDS")]
    kv_warmup: Option<i64>,
    /// Inert: engines tell each other (kv_transfer_params)
    #[arg(long, value_name = "PORT", value_delimiter = ',', hide_short_help = true)]
    nixl_port: Vec<i64>,
    /// Inert: streamed answers are always relayed as they come
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    sse_mode: Option<bool>,
    /// Inert: idle connections to endpoints are checked before they are used again
    #[arg(long, value_name = "SECONDS")]
    backend_keepalive_interval: Option<i64>,
}

impl LoadBalancer {
    /// The bodies to send: one for each of `--tcp`.
    pub(super) fn bodies(&self) -> Result<Vec<Value>, CliError> {
        self.unserved.refuse()?;
        self.tcp.iter().map(|pair| self.body(Ports::read(pair)?)).collect()
    }

    fn body(&self, ports: Ports) -> Result<Value, CliError> {
        let mut body = Map::new();
        body.insert("serviceArguments".to_owned(), Value::Object(self.service(ports)));
        body.insert("endpoints".to_owned(), Value::Array(self.endpoints(ports.target)?));
        if !self.sources.is_empty() {
            let sources: Vec<_> = self.sources.iter().map(|prefix| json!({"prefix": prefix})).collect();
            body.insert("allowedSources".to_owned(), Value::Array(sources));
        }
        Ok(Value::Object(body))
    }

    fn service(&self, ports: Ports) -> Map<String, Value> {
        let moves = self.attach || self.detach;
        let mut f = Fields::default();
        f.set("externalIP", Some(&self.ip));
        f.set("port", Some(ports.first));
        f.set("portMax", ports.last);
        f.set("protocol", Some("tcp"));
        f.set("sel", self.select.as_ref().map(|word| number(&SELECTORS, word)));
        // An order to move endpoints says nothing of the rule that it does not have to.
        let mode = self.mode.as_deref().or_else(|| (!moves).then_some("fullproxy"));
        f.set("mode", mode.map(|word| number(&MODES, word)));
        f.set("security", self.security.as_ref().map(|word| number(&SECURITIES, word)));
        f.set("oper", if self.attach { Some(1) } else { self.detach.then_some(2) });
        f.set("name", self.name.as_ref());
        f.set("host", self.host.as_ref());
        f.set("model_name", self.model_name.as_ref());
        f.set("path_prefix", self.path_prefix.as_ref());
        f.set("path_match_mode", self.path_match_mode.as_ref());
        f.set("adminStateUp", self.admin_down.then_some(false));
        self.probe.fill(&mut f);
        self.kv.fill(&mut f);
        self.pinning.fill(&mut f);
        self.proxy.fill(&mut f);
        self.stored.fill(&mut f);
        f.0
    }

    fn endpoints(&self, target: u16) -> Result<Vec<Value>, CliError> {
        for (flag, count) in [("--ep-role", self.kv.ep_role.len()), ("--nixl-port", self.stored.nixl_port.len())] {
            if count != 0 && count != self.endpoints.len() {
                let message = format!("{flag} names {count} endpoints, --endpoints {}", self.endpoints.len());
                return Err(CliError::Argument(format!("{message}: give one for each, in the same order")));
            }
        }
        let row = |(i, text): (usize, &String)| {
            let endpoint = EndpointFlag::read(text)?;
            let mut f = Fields::default();
            f.set("endpointIP", Some(endpoint.host));
            f.set("targetPort", Some(endpoint.port.unwrap_or(target)));
            f.set("weight", Some(endpoint.weight));
            f.set("ep_role", self.kv.ep_role.get(i).map(|word| number(&ROLES, word)));
            f.set("nixl_port", self.stored.nixl_port.get(i).copied());
            Ok(Value::Object(f.0))
        };
        self.endpoints.iter().enumerate().map(row).collect()
    }
}

/// Fields that were given.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn set(&mut self, name: &str, value: Option<impl Serialize>) {
        if let Some(value) = value {
            self.0.insert(name.to_owned(), json!(value));
        }
    }
}

impl ProbeFlags {
    fn fill(&self, f: &mut Fields) {
        f.set("monitor", self.monitor);
        f.set("probetype", self.probetype.as_ref());
        f.set("probeport", self.probeport);
        f.set("probereq", self.probereq.as_ref());
        f.set("proberesp", self.proberesp.as_ref());
        f.set("probeTimeout", self.probetimeout);
        f.set("probeRetries", self.proberetries);
        f.set("probeRise", self.proberise);
        f.set("probeAnswerTimeout", self.probe_answer_timeout);
        f.set("expectedCodes", self.expected_codes.as_ref());
    }
}

impl KvFlags {
    fn fill(&self, f: &mut Fields) {
        f.set("kvExactMode", self.kv_exact_mode);
        f.set("kvBlockSize", self.kv_block_size);
        f.set("kvHashAlgo", self.kv_hash_algo.as_ref());
        f.set("kvZmqPort", self.kv_zmq_port);
        f.set("kvReplayPort", self.kv_replay_port);
        f.set("kvEngineType", self.kv_engine_type.as_ref());
        f.set("kvDpRankCount", self.kv_dp_ranks);
        f.set("kvScore", self.kv_score.as_ref());
        f.set("kvLbMode", self.kv_lb_mode.as_ref());
        f.set("kvLoadFloor", self.kv_load_floor);
        f.set("kvMeanLoadFactor", self.kv_mean_load_factor);
        f.set("kvLoadPenalty", self.kv_load_penalty);
        f.set("kvCapSumMilli", self.kv_cap_sum_milli);
        f.set("kvSpillRelief", self.kv_spill_relief.as_ref());
        f.set("kvColdStartSeedN", self.kv_cold_start_seed_n);
        f.set("kvColdStartMinBlocks", self.kv_cold_start_min_blocks);
        f.set("kvMinMatchTokens", self.kv_min_match_tokens);
        f.set("kvKeying", self.kv_keying.as_ref());
        let weights: serde_json::Map<_, _> = self.kv_tier_weights.iter().cloned().collect();
        f.set("kvTierWeights", (!weights.is_empty()).then_some(weights));
        f.set("kvObserve", self.kv_observe);
        f.set("pd_disagg_mode", self.pd_disagg);
    }
}

impl ProxyFlags {
    fn fill(&self, f: &mut Fields) {
        f.set("decisionHeaders", self.decision_headers);
        f.set("forwardedHeaders", self.forwarded_headers);
        f.set("connectionsMax", self.connections_max);
        f.set("synRate", self.syn_rate);
        f.set("synBurst", self.syn_burst);
        f.set("noEndpoint", self.no_endpoint.as_ref());
        f.set("chwbl_mean_load_factor", self.chwbl_load_factor);
        f.set("maxInspectBytes", self.max_inspect_bytes);
        f.set("clientHalfClose", self.client_half_close.as_ref());
        f.set("inactiveTimeOut", self.inatimeout);
        f.set("timeoutMemberConnect", self.connect_timeout);
        f.set("timeoutFirstByte", self.first_byte_timeout);
        f.set("max_stream_duration_sec", self.max_stream_duration);
        f.set("pdHandoff", self.pd_handoff.as_ref());
        f.set("timeoutPdPrefill", self.pd_prefill_timeout);
        f.set("timeoutPdDecode", self.pd_decode_timeout);
        f.set("timeoutPdHandoff", self.pd_handoff_timeout);
        f.set("pdBypassTokens", self.pd_bypass_tokens);
        f.set("pdBootstrapPort", self.pd_bootstrap_port);
        f.set("cb_enable", self.cb_enable);
        f.set("cb_connect_failures", self.cb_connect_failures);
        f.set("cb_answer_failures", self.cb_answer_failures);
        f.set("cb_open_sec", self.cb_open);
        f.set("fc_mode", self.fc_mode.as_ref());
        f.set("fc_max_outstanding", self.fc_max_outstanding);
        f.set("fc_ep_max_inflight", self.fc_ep_max_inflight);
        f.set("fc_prefill_max_inflight", self.fc_prefill_max_inflight);
        f.set("fc_decode_max_inflight", self.fc_decode_max_inflight);
        f.set("fc_max_queue_depth", self.fc_max_queue_depth);
        f.set("fc_max_queue_wait_ms", self.fc_max_queue_wait_ms);
        f.set("backend_protocol", self.backend_protocol.as_ref());
    }
}

impl PinningFlags {
    fn fill(&self, f: &mut Fields) {
        f.set("pd_session_ttl_sec", self.pd_session_ttl);
        f.set("session_from_user", self.session_from_user);
        f.set("session_header_name", self.session_header_name.as_ref());
        f.set("pd_cache_aware_mode", self.pd_cache_aware);
        f.set("pd_cache_threshold", self.pd_cache_threshold);
        f.set("pd_balance_abs_threshold", self.pd_balance_abs_threshold);
    }
}

impl StoredFlags {
    fn fill(&self, f: &mut Fields) {
        f.set("kvWarmupSec", self.kv_warmup);
        f.set("sse_mode", self.sse_mode);
        f.set("backend_keepalive_interval_sec", self.backend_keepalive_interval);
    }
}

/// One of `--kv-tier-weights`.
fn tier_weight(text: &str) -> Result<(String, serde_json::Value), String> {
    let (medium, weight) = text.split_once('=').ok_or("write MEDIUM=WEIGHT, as cpu=0.5")?;
    let weight = weight.parse::<serde_json::Number>().map_err(|error| format!("weight {weight:?}: {error}"))?;
    Ok((medium.to_owned(), weight.into()))
}

/// One of `--tcp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ports {
    first: u16,
    /// `None` where it is one port.
    last: Option<u16>,
    target: u16,
}

impl Ports {
    fn read(text: &str) -> Result<Self, CliError> {
        let bad = |why: &str| {
            CliError::Argument(format!(
                "--tcp {text:?}: {why}; write VIPPORT:TARGETPORT, as 8080:8000 or 8080-8090:8000"
            ))
        };
        let (vip, target) = text.split_once(':').ok_or_else(|| bad("no target port"))?;
        if target.contains('-') {
            return Err(bad("every port of a range goes to one target port"));
        }
        let (first, last) = port_range(vip).ok_or_else(|| bad("no port or range from 1 to 65535"))?;
        let target = port(target).ok_or_else(|| bad("no target port from 1 to 65535"))?;
        Ok(Self { first, last, target })
    }
}

/// `8080`, or `8080-8090`.
pub(super) fn port_range(text: &str) -> Option<(u16, Option<u16>)> {
    match text.split_once('-') {
        None => Some((port(text)?, None)),
        Some((first, last)) => {
            let (first, last) = (port(first)?, port(last)?);
            (first <= last).then_some((first, Some(last)))
        }
    }
}

pub(super) fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port != 0)
}

/// One of `--endpoints`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EndpointFlag {
    host: String,
    /// `None`: the target port of `--tcp`.
    port: Option<u16>,
    weight: u8,
}

impl EndpointFlag {
    /// `host:weight`, `host:port:weight`, `host` (weight 1); an IPv6 address in brackets, or without them everything
    /// before the last colon.
    fn read(text: &str) -> Result<Self, CliError> {
        let bad = |why: String| {
            CliError::Argument(format!("--endpoints {text:?}: {why}; write HOST:WEIGHT or HOST:PORT:WEIGHT"))
        };
        let (host, rest) = split_host(text).ok_or_else(|| bad("no host".to_owned()))?;
        let (port_text, weight_text) = match rest.map(|rest| (rest, rest.split_once(':'))) {
            None => (None, "1"),
            Some((_, Some((port, weight)))) => (Some(port), weight),
            Some((weight, None)) => (None, weight),
        };
        let port = match port_text {
            None => None,
            Some(text) => Some(port(text).ok_or_else(|| bad(format!("{text:?} is no port from 1 to 65535")))?),
        };
        let weight = weight_text.parse().map_err(|_error| {
            let meant = self::port(weight_text).map(|port| format!(" (for a target port write {host}:{port}:1)"));
            bad(format!("weight {weight_text:?} is not 0 to 255{}", meant.unwrap_or_default()))
        })?;
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        Ok(Self { host: bare.to_owned(), port, weight })
    }
}

/// A host, and what follows its colon.
fn split_host(text: &str) -> Option<(&str, Option<&str>)> {
    let (host, rest) = if text.starts_with('[') {
        let (host, rest) = text.split_at(text.find(']')? + 1);
        (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
    } else {
        let split = match text.matches(':').count() {
            // A name or an IPv4 address has no colon, so its port may stand between two.
            1 | 2 if !text.contains("::") => text.split_once(':'),
            _ => text.rsplit_once(':'),
        };
        split.map_or((text, None), |(host, rest)| (host, Some(rest)))
    };
    (!host.is_empty() && host != "[]").then_some((host, rest))
}

#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  kvlb create ep 192.0.2.1 --probetype=http --probereq=/health --period=5")]
pub(super) struct EndpointProbe {
    /// The endpoint's address or name, as in its rules
    #[arg(value_name = "HOST")]
    host: String,
    /// A label; kvlb names endpoints by address, port and probe
    #[arg(long)]
    name: Option<String>,
    /// tcp, http or none
    #[arg(long, value_name = "KIND", default_value = "tcp")]
    probetype: String,
    /// Path of an http probe
    #[arg(long, value_name = "PATH")]
    probereq: Option<String>,
    /// Text that an http answer must contain
    #[arg(long, value_name = "TEXT")]
    proberesp: Option<String>,
    /// Port, if not the endpoint's own
    #[arg(long, value_name = "PORT")]
    probeport: Option<i64>,
    /// Seconds between probes
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    period: i64,
    /// Verdicts in a row that turn the endpoint up or down
    #[arg(long, value_name = "N", default_value_t = 2)]
    retries: i64,
}

impl EndpointProbe {
    /// The body to send.
    pub(super) fn body(&self) -> Value {
        let mut f = Fields::default();
        f.set("hostName", Some(&self.host));
        f.set("name", self.name.as_ref());
        f.set("probeType", Some(&self.probetype));
        f.set("probeReq", self.probereq.as_ref());
        f.set("probeResp", self.proberesp.as_ref());
        f.set("probePort", self.probeport);
        f.set("probeDuration", Some(self.period));
        f.set("inactiveReTries", Some(self.retries));
        Value::Object(f.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_hosts_with_a_weight_and_perhaps_a_port() {
        for (text, host, port, weight) in [
            ("192.0.2.1:1", "192.0.2.1", None, 1),
            ("192.0.2.1:0", "192.0.2.1", None, 0),
            ("192.0.2.1:255", "192.0.2.1", None, 255),
            ("192.0.2.1", "192.0.2.1", None, 1),
            ("192.0.2.1:8000:3", "192.0.2.1", Some(8000), 3),
            ("engine-0.local:2", "engine-0.local", None, 2),
            ("engine-0.local:8000:2", "engine-0.local", Some(8000), 2),
            ("[::1]:1", "::1", None, 1),
            ("[::1]:8000:1", "::1", Some(8000), 1),
            ("[2001:db8::1]", "2001:db8::1", None, 1),
            ("::1:1", "::1", None, 1),
            ("2001:db8::1:7", "2001:db8::1", None, 7),
            ("2001:db8:0:0:0:0:0:1:7", "2001:db8:0:0:0:0:0:1", None, 7),
        ] {
            let expected = EndpointFlag { host: host.to_owned(), port, weight };
            assert_eq!(EndpointFlag::read(text).map_err(|e| e.to_string()), Ok(expected), "{text}");
        }
        for (text, part) in [
            ("192.0.2.1:256", "not 0 to 255"),
            ("192.0.2.1:8000", "write 192.0.2.1:8000:1"),
            ("[::1]:8000", "write [::1]:8000:1"),
            ("192.0.2.1:-1", "not 0 to 255"),
            ("192.0.2.1:", "weight \"\" is not"),
            ("192.0.2.1:0:1", "no port"),
            ("192.0.2.1:70000:1", "no port"),
            (":1", "no host"),
            ("", "no host"),
            ("[]:1", "no host"),
            ("[::1:1", "no host"),
            ("[::1]1", "no host"),
        ] {
            let error = EndpointFlag::read(text).map_err(|error| error.to_string());
            assert!(error.as_ref().is_err_and(|e| e.contains(part)), "{text}: {error:?}");
        }
    }

    #[test]
    fn ports_are_one_or_a_range_with_one_target() {
        let ports = |text| Ports::read(text).map_err(|error| error.to_string());
        assert_eq!(ports("8080:8000"), Ok(Ports { first: 8080, last: None, target: 8000 }));
        assert_eq!(ports("8080-8090:8000"), Ok(Ports { first: 8080, last: Some(8090), target: 8000 }));
        for (bad, why) in [
            ("8080", "no target port"),
            ("8080:8000-8010", "one target port"),
            ("8090-8080:1", "no port or range"),
            ("0:8000", "no port or range"),
            ("65536:1", "no port or range"),
            ("8080:0", "no target port from"),
            ("8080:x", "no target port from"),
            ("", "no target port"),
        ] {
            assert!(ports(bad).is_err_and(|text| text.contains(why)), "{bad}");
        }
    }
}

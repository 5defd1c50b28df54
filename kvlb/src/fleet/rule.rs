//! A rule, as a value.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use super::{Pinning, SplitRule};
use crate::contract::{BlockSize, HashAlgo};

/// The number of a rule: `id` in REST, `service_id` of the inventory, the `service` label of metrics. Never used twice
/// in one state directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub u32);

impl fmt::Display for RuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A range of TCP ports, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortRange {
    /// First port, at least 1.
    pub first: u16,
    /// Last port, not below the first.
    pub last: u16,
}

impl PortRange {
    /// The range that holds just `port`.
    pub const fn single(port: u16) -> Self {
        Self { first: port, last: port }
    }

    /// Whether `port` lies in the range.
    pub const fn contains(self, port: u16) -> bool {
        self.first <= port && port <= self.last
    }

    /// All ports of the range.
    pub fn iter(self) -> impl Iterator<Item = u16> {
        self.first..=self.last
    }
}

/// What tells one rule from another. Rules that differ only in host, path or model share their VIP's listeners.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleKey {
    /// The VIP's address (`externalIP`).
    pub vip: IpAddr,
    /// The VIP's ports (`port` to `portMax`).
    pub ports: PortRange,
    /// Only requests with this `Host` (without port, lower case); empty: any.
    pub host: String,
    /// Only requests whose path begins with this; empty: any.
    pub path_prefix: String,
    /// Only requests for this model; `None`: any (the wildcard rule).
    pub model: Option<String>,
}

/// What the operator wrote, checked.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own in the operator's body")]
pub struct Rule {
    /// The rule's number.
    pub id: RuleId,
    /// What tells it from others.
    pub key: RuleKey,
    /// A free name.
    pub name: String,
    /// How an endpoint is chosen where affinity has no word (`sel`).
    pub selector: Selector,
    /// `mode`.
    pub mode: Mode,
    /// Endpoints, in the operator's order: the position is `ep_idx`.
    pub endpoints: Vec<Endpoint>,
    /// Active probing.
    pub monitor: Monitor,
    /// The KV tier's settings; kept also where the tier is off.
    pub kv: KvRule,
    /// What is remembered of clients.
    pub pinning: Pinning,
    /// Networks whose clients are served; empty: all.
    pub allowed_sources: Vec<(IpAddr, u8)>,
    /// How often one source may open a connection (`synRate`); `None`: as often as it likes.
    pub syn: Option<SynRule>,
    /// What becomes of a new connection while no endpoint may be asked (`noEndpoint`).
    pub no_endpoint: NoEndpoint,
    /// Answers carry `x-kvlb-*` headers that explain the choice (`decisionHeaders`).
    pub decision_headers: bool,
    /// Bodies up to this many bytes are read before choosing (`maxInspectBytes`).
    pub max_inspect_bytes: usize,
    /// Client connections at a time (`connectionsMax`); `None`: as many as kvlb takes in all.
    pub connections_max: Option<u32>,
    /// Add `X-Forwarded-For` and `X-Forwarded-Proto` (`forwardedHeaders`).
    pub forwarded_headers: bool,
    /// A client's FIN after a complete request does not count as its leaving (`clientHalfClose: allow`).
    pub client_half_close: bool,
    /// Percent of its fair share that an endpoint may carry of requests that `chwbl` and `wrr-hash` place
    /// (`chwbl_mean_load_factor`). Default 125.
    pub hash_load_factor: u32,
    /// Time limits of the proxy.
    pub limits: Limits,
    /// When endpoints that fail get no traffic for a while (`cb_enable`); `None`: never.
    pub breaker: Option<BreakerRule>,
    /// How many requests its endpoints may have at a time (`fc_mode`); `None`: as many as come.
    pub admission: Option<AdmissionRule>,
    /// How requests are split, where the rule has prefill and decode endpoints.
    pub split: SplitRule,
    /// Set by the operator: the rule takes no traffic (`adminStateUp: false`).
    pub admin_down: bool,
}

impl Rule {
    /// The probe that `endpoint` is under: its own, else the rule's.
    pub fn monitor_of<'a>(&'a self, endpoint: &'a Endpoint) -> &'a Monitor {
        endpoint.monitor.as_ref().unwrap_or(&self.monitor)
    }

    /// The event port of `endpoint`: its own, else the rule's.
    pub fn event_port(&self, endpoint: &Endpoint) -> u16 {
        endpoint.zmq_port.unwrap_or(self.kv.zmq_port)
    }

    /// The replay port that is set for `endpoint`: its own, else the rule's; `None`: as far above its event port as usual.
    pub fn replay_port(&self, endpoint: &Endpoint) -> Option<u16> {
        endpoint.replay_port.or_else(|| self.kv.replay_port.filter(|_| endpoint.zmq_port.is_none()))
    }
}

/// How often one source may open a connection, judged where frames arrive (`--xdp-dev`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SynRule {
    /// `synRate`: SYNs a second, at least one.
    pub per_sec: u32,
    /// `synBurst`: SYNs at once, at least one.
    pub burst: u32,
}

/// `noEndpoint`: who answers a new connection while no endpoint may be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NoEndpoint {
    /// The proxy takes it, and answers its requests with 503.
    #[default]
    Proxy,
    /// It is reset: by the kernel where that steers, else as soon as it is accepted.
    Reset,
}

/// When the breaker of an endpoint opens, and for how long.
///
/// Source of the defaults: LoxiLB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRule {
    /// Failed connects in a row; 0: they do not open it.
    pub connects: u32,
    /// Answers in a row that say that the server failed, or none at all; as many in a row that break off midway; 0: they do
    /// not open it.
    pub answers: u32,
    /// How long it stays open before a few requests try.
    pub open: Duration,
}

impl Default for BreakerRule {
    fn default() -> Self {
        Self { connects: 5, answers: 3, open: Duration::from_secs(30) }
    }
}

/// `fc_*`: how many requests of a rule there may be at a time, and what becomes of more.
///
/// Source of the fields and their meaning: LoxiLB's admission flow control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionRule {
    /// `fc_mode`.
    pub mode: AdmissionMode,
    /// `fc_max_outstanding`: at all endpoints together; `None`: no bound.
    pub outstanding: Option<u32>,
    /// `fc_ep_max_inflight`: at an endpoint without a role.
    pub normal: Option<u32>,
    /// `fc_prefill_max_inflight`: at a prefill endpoint.
    pub prefill: Option<u32>,
    /// `fc_decode_max_inflight`: at a decode endpoint.
    pub decode: Option<u32>,
    /// `fc_max_queue_depth`: so many may wait; 0: none.
    pub queue_depth: u32,
    /// `fc_max_queue_wait_ms`: for so long.
    pub queue_wait: Duration,
}

impl AdmissionRule {
    /// Requests at an endpoint with this role.
    pub fn endpoint_max(&self, role: Role) -> u32 {
        let max = match role {
            Role::Any => self.normal,
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
        };
        max.unwrap_or(u32::MAX)
    }

    /// Requests at all endpoints.
    pub fn outstanding_max(&self) -> u32 {
        self.outstanding.unwrap_or(u32::MAX)
    }
}

/// `fc_mode`, where it is not `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionMode {
    /// What would be queued or refused is counted, and goes on.
    Observe,
    /// It is queued or refused.
    Enforce,
}

impl AdmissionMode {
    /// The word of the rule's field.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::Enforce => "enforce",
        }
    }
}

/// Time limits of one rule's requests. `None`: no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// To connect to an endpoint. Default 500 ms, as LoxiLB's.
    pub connect: Duration,
    /// Between two pieces of a request's body, and for all its pauses together, to which each 512 bytes add a second.
    /// Default 60 s.
    pub request_body: Duration,
    /// From the request's end to the answer's first byte. Off by default: a prefill can take minutes.
    pub first_byte: Option<Duration>,
    /// Between two pieces of an answer. Default 600 s.
    pub idle: Option<Duration>,
    /// A whole request. Off by default.
    pub total: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_millis(500),
            request_body: Duration::from_mins(1),
            first_byte: None,
            idle: Some(Duration::from_mins(10)),
            total: None,
        }
    }
}

/// How a rule forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `mode` 4: the userspace L7 proxy, the only mode that kvlb serves.
    FullProxy,
}

/// `sel`: how an endpoint is chosen where affinity has no word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Selector {
    /// 0: in turn.
    #[default]
    RoundRobin,
    /// 1: by a hash of the client's address.
    Hash,
    /// 2: in turn, by weight.
    Priority,
    /// 3: a client stays where it was.
    Persist,
    /// 4: the least requests in flight.
    LeastConnections,
    /// 8: by a bounded hash of the prompt's beginning.
    Chwbl,
    /// 9: by GPU capacity.
    GpuAware,
    /// 10: as 8, with weights.
    WrrHash,
}

/// One engine behind a rule, as the operator named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Where it listens.
    pub key: EndpointKey,
    /// 0 drains; else relative capacity.
    pub weight: u8,
    /// Its part.
    pub role: Role,
    /// Set by the operator: takes no new request.
    pub admin_down: bool,
    /// Its own probe (`POST …/config/endpoint`); `None`: the rule's.
    pub monitor: Option<Monitor>,
    /// Its own `kvZmqPort`: several engines of one host cannot share a port.
    pub zmq_port: Option<u16>,
    /// Its own `kvReplayPort`.
    pub replay_port: Option<u16>,
}

/// What tells an endpoint of a rule from the others.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointKey {
    /// An address or a DNS name (`endpointIP`).
    pub host: String,
    /// `targetPort`.
    pub port: u16,
}

impl fmt::Display for EndpointKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// An endpoint's part (`ep_role` 0, 1, 2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// 0: does all.
    #[default]
    Any,
    /// 1: computes the prompt.
    Prefill,
    /// 2: generates.
    Decode,
}

impl Role {
    /// The word that the CLI uses.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Any => "normal",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// `kvExactMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExactMode {
    /// 0: the KV tier is off.
    #[default]
    Off,
    /// 1: endpoints are partitioned into prefill and decode; prefill ones are subscribed.
    PrefillDecode,
    /// 3: one pool without roles; every endpoint is subscribed.
    SinglePool,
}

/// `kvEngineType`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineType {
    /// vLLM.
    #[default]
    Vllm,
    /// llama.cpp: served, without the KV tier.
    LlamaCpp,
}

/// `kvScore`: how overlap is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Score {
    /// The leading run that the engine can use.
    #[default]
    Prefix,
    /// The document's literal count.
    Count,
}

/// `kvKeying`: how an endpoint's blocks are named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keying {
    /// As the engine names them while that is not disproved, else in our own way.
    #[default]
    Auto,
    /// As the engine names them, whatever happens.
    Parity,
    /// In our own way.
    Rehash,
}

impl Keying {
    /// The word of the rule's field.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Parity => "parity",
            Self::Rehash => "rehash",
        }
    }
}

/// `kvTierWeights`: what a block is worth that only an offload tier holds, in thousandths of one in the accelerator's
/// memory. Zero, the default: nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierWeights {
    /// In the host's memory.
    pub cpu: u16,
    /// On disks and in remote stores.
    pub storage: u16,
}

/// The KV tier's settings of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvRule {
    /// `kvExactMode`.
    pub mode: ExactMode,
    /// `kvEngineType`.
    pub engine: EngineType,
    /// `kvBlockSize`, tokens per block.
    pub block_size: BlockSize,
    /// `kvHashAlgo`.
    pub algo: HashAlgo,
    /// `kvZmqPort`.
    pub zmq_port: u16,
    /// `kvReplayPort`; `None`: `kvZmqPort` plus the offset (`LLB_KV_REPLAY_PORT_OFFSET`, 1000).
    pub replay_port: Option<u16>,
    /// `kvWarmupSec`: stored, inert as the source document says.
    pub warmup: Duration,
    /// `kvDpRankCount`: ranks, at consecutive ports; `None`: as many as the engine says it has, else one.
    pub dp_ranks: Option<u8>,
    /// `kvKeying`.
    pub keying: Keying,
    /// `kvTierWeights`.
    pub tier_weights: TierWeights,
    /// `kvObserve`: the tier names, scores and counts what it would choose, and the selector chooses.
    pub observe: bool,
    /// `kvScore`.
    pub score: Score,
    /// How affinity and load are blended.
    pub blend: BlendRule,
}

/// The rule's own numbers for blending affinity and load. `None`: the process's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlendRule {
    /// `kvLbMode`.
    pub mode: Option<crate::policy::Blend>,
    /// `kvLoadFloor`: no bound is below this many requests.
    pub load_floor: Option<u32>,
    /// `kvMeanLoadFactor`, percent.
    pub mean_load_factor: Option<u32>,
    /// `kvLoadPenalty`, thousandths of a block.
    pub load_penalty: Option<u32>,
    /// `kvCapSumMilli`, thousandths.
    pub cap_sum_milli: Option<u64>,
    /// `kvSpillRelief`.
    pub spill_relief: Option<Relief>,
    /// `kvColdStartSeedN`, hits; 0: never.
    pub seed_every: Option<u32>,
    /// `kvColdStartMinBlocks`.
    pub seed_min_blocks: Option<u32>,
    /// `kvMinMatchTokens`.
    pub min_match_tokens: Option<u32>,
}

/// Whether an owner of blocks that is over its bound may hand over to an endpoint that holds none: `LOXILB_KV_SPILL_RELIEF`,
/// `kvSpillRelief`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Relief {
    /// In single pools, not in prefill/decode.
    #[default]
    Auto,
    /// Yes.
    On,
    /// No.
    Off,
}

impl Relief {
    /// What it means for a rule of this mode.
    pub fn applies(self, mode: ExactMode) -> bool {
        match self {
            Self::Auto => mode == ExactMode::SinglePool,
            Self::On => true,
            Self::Off => false,
        }
    }

    /// The word of the rule's field.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

/// Active probing of a rule's endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Monitor {
    /// `monitor`: absent means on.
    pub enabled: bool,
    /// `probetype`.
    pub kind: ProbeKind,
    /// `probeport`; `None`: the endpoint's own.
    pub port: Option<u16>,
    /// `probereq`: path of an http probe.
    pub request: String,
    /// `proberesp`: what an http answer must contain; empty: anything.
    pub response: String,
    /// `expectedCodes`: the statuses of an http answer that are good.
    pub codes: StatusCodes,
    /// `probeTimeout`: seconds between probes. Default 10 s, as LoxiLB's rules.
    pub interval: Duration,
    /// `probeRetries`: bad results in a row that turn an endpoint down. Default 2.
    pub retries: u32,
    /// `probeRise`: good results in a row that turn one up that was down. Default 1.
    pub rise: u32,
    /// `probeAnswerTimeout`: how long one probe may take. Default 5 s.
    pub answer_timeout: Duration,
}

impl Default for Monitor {
    fn default() -> Self {
        Self {
            enabled: true,
            kind: ProbeKind::Tcp,
            port: None,
            request: String::new(),
            response: String::new(),
            codes: StatusCodes::default(),
            interval: Duration::from_secs(10),
            retries: 2,
            rise: 1,
            answer_timeout: Duration::from_secs(5),
        }
    }
}

/// A set of HTTP statuses, written as LoxiLB writes `expectedCodes`: `200`, `200,202` or `200-204,301`. None named: 200 to 299.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatusCodes(Vec<RangeInclusive<u16>>);

impl StatusCodes {
    /// Whether `status` is one of them.
    pub fn contains(&self, status: u16) -> bool {
        if self.0.is_empty() {
            return (200..=299).contains(&status);
        }
        self.0.iter().any(|range| range.contains(&status))
    }
}

/// A text that names no set of statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("statuses are 100 to 599, as in 200, 200,202 or 200-204")]
pub struct BadStatusCodes;

impl FromStr for StatusCodes {
    type Err = BadStatusCodes;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let status = |text: &str| {
            let digits = text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|status| digits && (100..=599).contains(status)).ok_or(BadStatusCodes)
        };
        let range = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let (first, last) = (status(first.trim())?, status(last.trim())?);
            if first <= last { Ok(first..=last) } else { Err(BadStatusCodes) }
        };
        text.split(',')
            .filter(|_| !text.trim().is_empty())
            .map(|part| range(part.trim()))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

/// `probetype`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProbeKind {
    /// A TCP connect.
    #[default]
    Tcp,
    /// A GET that must answer with one of the [`StatusCodes`].
    Http,
}

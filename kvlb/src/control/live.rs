//! What the API shows that changes while traffic flows.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::contract::BlockHash;
use crate::discover::Report;
use crate::fleet::RuleId;

/// The source of everything that is shown and not written by an operator. Calls may compute, so they are made off the
/// API's own threads.
pub trait Live: Send + Sync {
    /// One endpoint of a rule, by its position; `None` where the rule is not in force, or has no such endpoint.
    fn endpoint(&self, rule: RuleId, position: usize) -> Option<EndpointView>;

    /// The blocks that an endpoint holds; `None` where it is not subscribed.
    fn inventory(&self, rule: RuleId, position: usize) -> Option<Inventory>;

    /// The numbers by which a rule weighs overlap against load; `None` where the rule is not in force or its KV tier is off.
    fn blend(&self, _rule: RuleId) -> Option<BlendView> {
        None
    }

    /// What would become of a request; `None` where the rule is not in force.
    fn explain(&self, rule: RuleId, request: &Request<'_>) -> Option<Explanation>;

    /// What an endpoint's cache spared so far; `None` where it is not subscribed.
    fn savings(&self, _rule: RuleId, _position: usize) -> Option<SavingsView> {
        None
    }

    /// A rule's admission; `None` where it has none.
    fn admission(&self, _rule: RuleId) -> Option<AdmissionView> {
        None
    }

    /// What an operator should know of a rule that traffic has shown, in words.
    fn notes(&self, rule: RuleId) -> Vec<String>;

    /// What the engines of a rule that was just made say of themselves and the rule contradicts, in words. May wait a
    /// moment for their answers.
    fn contradictions(&self, _rule: RuleId) -> Vec<String> {
        Vec::new()
    }

    /// Every leg of a rule's contract, endpoint by endpoint; `None` where the rule is not in force. Asks the engines, so
    /// it takes seconds where they are slow.
    fn preflight(&self, _rule: RuleId) -> Option<Report> {
        None
    }

    /// All metrics, as Prometheus text.
    fn metrics(&self) -> String;

    /// The devices at which frames are judged, each with the word for where.
    fn admission_devices(&self) -> Vec<(String, &'static str)> {
        Vec::new()
    }

    /// A rule's VIPs for which the kernel has counted something.
    fn vips(&self, _rule: RuleId) -> Vec<VipView> {
        Vec::new()
    }

    /// What the kernel drops.
    fn drops(&self) -> DropsView {
        DropsView::default()
    }

    /// What does not work as it should, and why.
    fn degraded(&self) -> Vec<(String, String)>;
}

/// One endpoint now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EndpointView {
    /// `fleet::Condition::label`.
    pub state: &'static str,
    /// Requests sent there since it was added.
    pub requests: u64,
    /// Bytes of answers relayed from there.
    pub bytes: u64,
    /// Requests in flight.
    pub load: u32,
    /// Its inventory and contract; `None` where the rule does not subscribe it.
    pub kv: Option<KvView>,
    /// What its engine says of its work; `None` where it is not asked, or has not answered yet.
    pub telemetry: Option<TelemetryView>,
}

/// An endpoint's `telemetry`: what its engine says of its work. What is not known is null.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TelemetryView {
    /// The kind of engine by whose names its metrics were read.
    pub engine: String,
    /// Milliseconds since they were read; null before the first time.
    pub age_ms: Option<u64>,
    /// They were read too long ago: nothing is known now.
    pub stale: bool,
    /// Requests in its queue.
    pub waiting: Option<u32>,
    /// Requests that it works on.
    pub running: Option<u32>,
    /// The share of its KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// KV blocks of its cache.
    pub blocks: Option<u64>,
    /// Tokens of prompts so far.
    pub prompt_tokens: Option<u64>,
    /// Tokens made so far.
    pub generated_tokens: Option<u64>,
    /// Answers that began so far.
    pub first_tokens: Option<u64>,
    /// Seconds until they did, in all.
    pub first_token_seconds: Option<f64>,
    /// Families that it should show and does not.
    pub missing: Vec<String>,
    /// Looks that came to nothing, by cause; absent where none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub failures: BTreeMap<String, u64>,
}

/// An endpoint's `kvStatus`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KvView {
    /// `unverified`, `verified`, `proved_by_request` or `mismatch`.
    pub contract: String,
    /// The part of the contract that is broken; null unless it is a mismatch.
    pub leg: Option<String>,
    /// What to do about it, or what it was found by.
    pub detail: Option<String>,
    /// `parity` or `rehash`.
    pub keying: String,
    /// Blocks held now.
    pub blocks: u64,
    /// Whether the event socket is up, on all ranks.
    pub connected: bool,
    /// `pending`, `applied`, `unavailable` or `off`.
    pub replay: String,
    /// The last event batch's number; null before the first.
    pub sequence: Option<u64>,
    /// Milliseconds since the last event batch; null before the first.
    pub last_event_age_ms: Option<u64>,
    /// Data-parallel ranks that announced blocks.
    pub ranks: usize,
    /// Blocks that have no name of ours because their parent was never announced.
    pub orphans: u64,
    /// Holes in the numbers so far.
    pub gaps: u64,
    /// New lives of the engine so far.
    pub restarts: u64,
    /// What its engine says of itself and the rule contradicts; absent where nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// How a rule weighs overlap against load, with the process's numbers where it has none of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BlendView {
    /// `kvLbMode`.
    pub mode: &'static str,
    /// `kvMeanLoadFactor`, percent.
    pub mean_load_factor: u32,
    /// `kvLoadFloor`, requests.
    pub load_floor: u32,
    /// `kvLoadPenalty`, thousandths of a block.
    pub load_penalty: u32,
    /// `kvCapSumMilli`, thousandths.
    pub cap_sum_milli: u64,
    /// `kvSpillRelief`, as it applies to the rule.
    pub spill_relief: bool,
    /// `kvColdStartSeedN`, hits.
    pub cold_start_seed_n: u32,
    /// `kvColdStartMinBlocks`.
    pub cold_start_min_blocks: u32,
    /// `kvMinMatchTokens`.
    pub min_match_tokens: u32,
}

/// A rule's `fc_effective`, in LoxiLB's words. 0: no bound.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AdmissionView {
    /// `observe` or `enforce`.
    pub mode: String,
    /// Requests at all endpoints together.
    pub max_outstanding: u32,
    /// At one without a role.
    pub ep_max_inflight: u32,
    /// At a prefill endpoint.
    pub prefill_max_inflight: u32,
    /// At a decode endpoint.
    pub decode_max_inflight: u32,
    /// Requests that may wait.
    pub queue_depth: u32,
    /// Milliseconds that they may.
    pub queue_wait_ms: u64,
    /// Requests at endpoints now.
    pub inflight: u32,
    /// Requests that wait now.
    pub queued: u32,
}

/// What one endpoint's cache spared, in tokens of the requests whose engine reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SavingsView {
    /// Requests that were reported on.
    pub requests: u64,
    /// Their prompts' tokens.
    pub prompt_tokens: u64,
    /// Tokens that the mirror of the cache promised.
    pub predicted_tokens: u64,
    /// Tokens that the engine took from its cache: so many were not computed again.
    pub reported_tokens: u64,
    /// Times that the mirror was dropped because the engine reported less than half of what it promised.
    pub distrusted: u64,
}

/// What became of connections to one VIP in the kernel, since the VIP was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VipView {
    /// Its address and port.
    pub vip: String,
    /// Handed to a data thread.
    pub steered: u64,
    /// Refused since no endpoint may be chosen.
    pub refused: u64,
    /// Refused since the source is in no rule's `allowedSources`.
    pub denied: u64,
    /// Refused since no data thread was there to take it.
    pub no_listener: u64,
    /// Its frames at the devices of `--xdp-dev`; `None` without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frames: Option<FramesView>,
}

/// What became of frames for one VIP at devices with admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FramesView {
    /// SYNs that passed.
    pub syn: u64,
    /// SYNs beyond `synRate`.
    pub rate: u64,
    /// SYNs from sources that may not connect.
    pub acl: u64,
    /// Fragments that hide TCP's flags.
    pub cut: u64,
    /// Anything else, which passed.
    pub other: u64,
}

/// What the kernel drops.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DropsView {
    /// How much for each reason, at the VIPs that there are now.
    pub totals: BTreeMap<&'static str, u64>,
    /// Some of them, the latest first.
    pub latest: Vec<DropView>,
}

/// One drop that the kernel told of. What the frame did not say is null.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DropView {
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// Why.
    pub reason: &'static str,
    /// Who sent it, with its port.
    pub source: Option<String>,
    /// The VIP, with the port.
    pub vip: Option<String>,
    /// The oldest rule at that VIP.
    pub rule: Option<u32>,
    /// Drops for this reason on the same CPU since the last one that was told of.
    pub count: u32,
}

/// The blocks that an endpoint holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The engine's name of each, in order, and ours where it has another one.
    pub blocks: Vec<(BlockHash, Option<BlockHash>)>,
    /// `parity` or `rehash`.
    pub keying: &'static str,
}

/// A request to be explained.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Its path, as `/v1/chat/completions`.
    pub path: &'a str,
    /// `X-Model`.
    pub model: Option<&'a str>,
    /// Its header fields.
    pub fields: &'a [(&'a str, &'a [u8])],
    /// Its body.
    pub body: &'a [u8],
}

/// What would become of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The tier that chose.
    pub tier: String,
    /// Why the KV tier did not; null where it did.
    pub reason: Option<String>,
    /// More on the reason.
    pub detail: Option<String>,
    /// Where the request would go; null where nobody is eligible.
    pub endpoint: Option<usize>,
    /// Why it would not go where its conversation or session was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repin: Option<String>,
    /// Where the KV tier would send it, on a rule that only observes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would_choose: Option<usize>,
    /// How the request would be split, on a rule with prefill and decode endpoints: `endpoint` is the prefill endpoint then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<SplitView>,
    /// The prompts of the request.
    pub prompts: Vec<PromptView>,
    /// What was known of every endpoint.
    pub candidates: Vec<CandidateView>,
}

/// How a request would be split.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SplitView {
    /// `nixl` or `mooncake` where it would go out in two legs; null where one endpoint would serve it alone.
    pub handoff: Option<&'static str>,
    /// Why one would.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alone: Option<&'static str>,
    /// Where the decode leg would go; null where nobody is eligible, or there would be none.
    pub decode: Option<usize>,
}

/// One prompt of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptView {
    /// Its tokens.
    pub tokens: usize,
    /// Its full blocks.
    pub blocks: usize,
    /// Their names, in hex digits.
    pub names: Vec<String>,
    /// Its token ids.
    pub token_ids: Vec<u32>,
}

/// What was known of an endpoint when it was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CandidateView {
    /// Its position in the rule.
    pub ep_idx: usize,
    /// The leading run that its engine can use, in blocks.
    pub depth: u32,
    /// Blocks of the prompt that it holds anywhere.
    pub count: u32,
    /// Requests in flight there.
    pub load: u32,
    /// `normal`, `prefill` or `decode`.
    pub role: &'static str,
    /// Whether it may be asked, for the leg of its role.
    pub eligible: bool,
    /// `parity` or `rehash`; null where it is not subscribed.
    pub keying: Option<&'static str>,
    /// The data-parallel rank that holds them; null where it has one only, or holds none.
    pub rank: Option<i64>,
}

//! What the API shows of the state.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::{desk, learn};
use crate::clock;
use crate::control::Live;
use crate::control::live::{
    AdmissionView, BlendView, CandidateView, DropView, DropsView, EndpointView, Explanation, FramesView, Inventory,
    KvView, PromptView, Request, SavingsView, SplitView, TelemetryView, VipView,
};
use crate::discover::{Asker, Ours, Report};
use crate::fleet::{ExactMode, RuleId};
use crate::kernel::{DropReason, FrameStats, Kernel, VipStats};
use crate::router::{self, Decision, Overlap, PromptShape, View as _};
use crate::state::kv::EndpointKv;
use crate::state::{self, Onlooker, Service, Staged, State};
use crate::telemetry::Metrics;

/// A rule's answer waits this long for what its engines say of themselves: on a local network they need some 20 ms.
const FIRST_WORDS: Duration = Duration::from_millis(400);

/// Of a long range of ports, a few are enough to see what is the matter.
const OWNED_SHOWN: usize = 4;

/// kvlb's state, as the API reads it.
pub(super) struct LiveState {
    state: Arc<State>,
    asker: Asker,
    /// `LLB_KV_REPLAY_PORT_OFFSET`.
    replay_offset: Option<u16>,
    /// Weak, so that the kernel side can be taken down while the API still answers.
    kernel: Option<Weak<Mutex<Kernel>>>,
}

impl LiveState {
    pub(super) fn new(
        state: Arc<State>,
        kernel: Option<&Arc<Mutex<Kernel>>>,
        asker: Asker,
        replay_offset: Option<u16>,
    ) -> Self {
        Self { state, asker, replay_offset, kernel: kernel.map(Arc::downgrade) }
    }

    fn ours(&self, service: &Service, endpoint: &state::Endpoint) -> Ours {
        learn::ours(service.rule(), &endpoint.spec, &self.state.config().none_seed, self.replay_offset)
    }

    /// What the engines of a rule say that the rule contradicts, by endpoint.
    fn contradictions_of(&self, service: &Service) -> Vec<String> {
        let of_endpoint = |(position, endpoint): (usize, &state::Endpoint)| {
            let who = format!("endpoint {position} ({})", endpoint.spec.key);
            let said = learn::contradictions(&self.ours(service, endpoint), endpoint);
            said.into_iter().map(move |said| format!("{who}: {said}")).collect::<Vec<_>>()
        };
        service.endpoints.iter().enumerate().flat_map(of_endpoint).collect()
    }

    /// VIPs of a rule that the kernel does not steer, since other programs have them.
    fn owned_by_others(&self, service: &Service) -> Vec<String> {
        let Some(kernel) = self.kernel.as_ref().and_then(Weak::upgrade) else { return Vec::new() };
        let key = &service.rule().key;
        let owned = kernel.lock().owned(key.vip, key.ports.first..=key.ports.last);
        let note = |(at, who): (SocketAddr, String)| format!("{at} is not served: {who} listens there");
        owned.into_iter().take(OWNED_SHOWN).map(note).collect()
    }

    fn service(&self, rule: RuleId) -> Option<Arc<Service>> {
        self.state.table().service(rule).cloned()
    }

    /// Copies the kernel's counters into the metrics.
    fn read_kernel(&self, metrics: &Metrics) {
        let Some(kernel) = self.kernel.as_ref().and_then(Weak::upgrade) else { return };
        let (stats, frames, devices) = {
            let kernel = kernel.lock();
            (kernel.stats(), kernel.frames(), kernel.admission())
        };
        let (Ok(stats), Ok(frames)) = (stats, frames) else { return };
        metrics.steered.reset();
        metrics.not_steered.reset();
        metrics.drops.reset();
        metrics.xdp_packets.reset();
        metrics.xdp_frames.reset();
        metrics.xdp_attached.reset();
        for (device, mode) in &devices {
            metrics.xdp_attached.with_label_values(&[device.as_str(), mode.label()]).set(1);
        }
        if !devices.is_empty() {
            let kinds = [
                ("foreign", frames.foreign),
                ("fragment", frames.fragments),
                ("malformed", frames.malformed),
                ("chain", frames.chains),
            ];
            for (kind, count) in kinds {
                metrics.xdp_frames.with_label_values(&[kind]).inc_by(count);
            }
            metrics.drops.with_label_values(&["", DropReason::Chain.label()]).inc_by(frames.chains);
        }
        for (vip, counts) in stats {
            let vip = vip.to_string();
            metrics.steered.with_label_values(&[vip.as_str()]).inc_by(counts.steered);
            metrics.not_steered.with_label_values(&[vip.as_str()]).inc_by(counts.not_steered());
            for (reason, count) in dropped(&counts).into_iter().filter(|(_, count)| *count > 0) {
                metrics.drops.with_label_values(&[vip.as_str(), reason.label()]).inc_by(count);
            }
            if !devices.is_empty() {
                for (verdict, count) in verdicts(&counts) {
                    metrics.xdp_packets.with_label_values(&[vip.as_str(), verdict]).inc_by(count);
                }
            }
        }
    }
}

impl fmt::Debug for LiveState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveState").field("kernel", &self.kernel.is_some()).finish_non_exhaustive()
    }
}

impl Live for LiveState {
    fn endpoint(&self, rule: RuleId, position: usize) -> Option<EndpointView> {
        let service = self.service(rule)?;
        let endpoint = service.endpoints.get(position)?;
        Some(EndpointView {
            state: endpoint.condition().label(),
            requests: endpoint.meters.requests(),
            bytes: endpoint.meters.bytes(),
            load: endpoint.meters.load(),
            kv: endpoint.kv.as_ref().map(|kv| KvView {
                notes: learn::contradictions(&self.ours(&service, endpoint), endpoint),
                ..kv_view(kv)
            }),
            telemetry: telemetry(&endpoint.meters.vitals),
        })
    }

    fn blend(&self, rule: RuleId) -> Option<BlendView> {
        let service = self.service(rule)?;
        let (numbers, ready) = (&service.ready.settings, &service.ready);
        (ready.rule.kv.mode != ExactMode::Off).then(|| BlendView {
            mode: numbers.blend.label(),
            mean_load_factor: numbers.mean_load_factor,
            load_floor: numbers.load_floor,
            load_penalty: numbers.load_penalty,
            cap_sum_milli: numbers.cap_sum_milli.unwrap_or(crate::policy::CAP_SUM_MILLI),
            spill_relief: numbers.spill_relief,
            cold_start_seed_n: numbers.seed_every,
            cold_start_min_blocks: numbers.seed_min_blocks,
            min_match_tokens: ready.min_match_tokens,
        })
    }

    fn inventory(&self, rule: RuleId, position: usize) -> Option<Inventory> {
        let service = self.service(rule)?;
        let kv = service.endpoints.get(position)?.kv.as_ref()?;
        Some(Inventory { blocks: kv.inventory(), keying: keying(kv) })
    }

    fn savings(&self, rule: RuleId, position: usize) -> Option<SavingsView> {
        let service = self.service(rule)?;
        let kv = service.endpoints.get(position)?.kv.as_ref()?;
        let totals = kv.ledger.totals();
        Some(SavingsView {
            requests: totals.requests,
            prompt_tokens: totals.tokens.prompt,
            predicted_tokens: totals.tokens.predicted,
            reported_tokens: totals.tokens.reported,
            distrusted: kv.counters.distrusted.load(Ordering::Relaxed),
        })
    }

    fn explain(&self, rule: RuleId, request: &Request<'_>) -> Option<Explanation> {
        let service = self.service(rule)?;
        let seen = desk::see(&self.state, &service, request);
        let onlooker = Onlooker(&service);
        let mut decision = router::route(&service.ready, &seen.named, &onlooker, &seen.caller, &[]);
        let named = seen.named.as_ref().ok().filter(|_| service.rule().is_split());
        let bypass = named.and_then(|named| desk::bypass(&service, named, &seen.caller));
        let split = service.rule().is_split().then(|| {
            let handoff = service.rule().split.handoff.handoff().label();
            match desk::why_alone(request) {
                Ok(None) if bypass.is_some() => SplitView { alone: Some("bypass"), ..SplitView::default() },
                Ok(None) => SplitView {
                    handoff: Some(handoff),
                    alone: None,
                    decode: router::route_decode(&service.ready, &onlooker, &seen.caller, &[]),
                },
                Ok(Some(why)) => SplitView { alone: Some(why.label()), ..SplitView::default() },
                Err(_bad) => SplitView { alone: Some("unreadable"), ..SplitView::default() },
            }
        });
        if split.as_ref().is_some_and(|split| split.alone.is_some()) && decision.endpoint.is_none() {
            decision.endpoint = router::route_anywhere(&service.ready, &onlooker, &[]);
        }
        if split.as_ref().is_some_and(|split| split.alone == Some("bypass"))
            && let Some((endpoint, _)) = bypass
        {
            (decision.endpoint, decision.tier) = (Some(endpoint), router::Tier::Overlap);
        }
        let mut held = vec![Overlap::default(); service.endpoints.len()];
        if let Ok(named) = &seen.named {
            held = service.held(named);
        }
        let candidate = |(known, held): (crate::policy::Candidate, &Overlap)| CandidateView {
            ep_idx: known.endpoint,
            depth: held.depth,
            count: held.count,
            load: known.load,
            role: service.endpoints[known.endpoint].spec.role.label(),
            eligible: known.eligible,
            keying: service.endpoints[known.endpoint].kv.as_ref().map(|kv| keying(kv)),
            rank: held.rank,
        };
        Some(Explanation {
            tier: decision.tier.label().to_owned(),
            reason: decision.miss.map(|miss| miss.reason.label().to_owned()),
            detail: decision.miss.map(|miss| miss.detail.to_owned()).filter(|detail| !detail.is_empty()),
            endpoint: decision.endpoint,
            repin: decision.left.or(decision.moved).map(|leave| leave.label().to_owned()),
            would_choose: decision.observed.map(|observed| observed.endpoint),
            split,
            prompts: prompts(&seen, &decision),
            candidates: service.candidates().into_iter().zip(&held).map(candidate).collect(),
        })
    }

    fn admission(&self, rule: RuleId) -> Option<AdmissionView> {
        let service = self.service(rule)?;
        let rule = service.rule().admission?;
        Some(AdmissionView {
            mode: rule.mode.label().to_owned(),
            max_outstanding: rule.outstanding.unwrap_or(0),
            ep_max_inflight: rule.normal.unwrap_or(0),
            prefill_max_inflight: rule.prefill.unwrap_or(0),
            decode_max_inflight: rule.decode.unwrap_or(0),
            queue_depth: rule.queue_depth,
            queue_wait_ms: u64::try_from(rule.queue_wait.as_millis()).unwrap_or(u64::MAX),
            inflight: service.line.held(),
            queued: service.line.queued(),
        })
    }

    fn notes(&self, rule: RuleId) -> Vec<String> {
        let Some(service) = self.service(rule) else { return Vec::new() };
        let mut notes = tokenizer_notes(&self.state, &service);
        if service.rule().syn.is_some() && self.admission_devices().is_empty() {
            notes.push("synRate has no effect: no device judges SYNs (--xdp-dev)".to_owned());
        }
        notes.extend(self.owned_by_others(&service));
        notes.extend(self.contradictions_of(&service));
        notes
    }

    fn contradictions(&self, rule: RuleId) -> Vec<String> {
        let Some(service) = self.service(rule) else { return Vec::new() };
        let mut notes = self.owned_by_others(&service);
        learn::wait_for_first_answers(&service, FIRST_WORDS);
        notes.extend(self.contradictions_of(&service));
        notes
    }

    fn preflight(&self, rule: RuleId) -> Option<Report> {
        let service = self.service(rule)?;
        let ours = |endpoint: &state::Endpoint| self.ours(&service, endpoint);
        let looking = learn::preflight(&self.state, &service, ours, &self.asker);
        Some(tokio::runtime::Handle::try_current().ok()?.block_on(looking))
    }

    fn metrics(&self) -> String {
        state::page(&self.state, |metrics| self.read_kernel(metrics)).unwrap_or_else(|error| {
            tracing::error!(%error, "the metrics page could not be made");
            String::new()
        })
    }

    fn admission_devices(&self) -> Vec<(String, &'static str)> {
        let Some(kernel) = self.kernel.as_ref().and_then(Weak::upgrade) else { return Vec::new() };
        let devices = kernel.lock().admission();
        devices.into_iter().map(|(device, mode)| (device, mode.label())).collect()
    }

    fn vips(&self, rule: RuleId) -> Vec<VipView> {
        let Some(service) = self.service(rule) else { return Vec::new() };
        let Some(kernel) = self.kernel.as_ref().and_then(Weak::upgrade) else { return Vec::new() };
        let key = &service.rule().key;
        let (stats, devices) = {
            let kernel = kernel.lock();
            (kernel.stats_of(key.vip, key.ports.first..=key.ports.last), !kernel.admission().is_empty())
        };
        let of_vip = |(vip, counts): (SocketAddr, VipStats)| VipView {
            vip: vip.to_string(),
            steered: counts.steered,
            refused: counts.refused,
            denied: counts.denied,
            no_listener: counts.no_listener,
            frames: devices.then_some(FramesView {
                syn: counts.syn_passed,
                rate: counts.syn_over_rate,
                acl: counts.syn_denied,
                cut: counts.cut,
                other: counts.other,
            }),
        };
        let counted = stats.unwrap_or_default().into_iter().filter(|(_, counts)| *counts != VipStats::default());
        counted.map(of_vip).collect()
    }

    fn drops(&self) -> DropsView {
        let kernel = self.kernel.as_ref().and_then(Weak::upgrade);
        let (stats, frames) = kernel.map_or((Ok(Vec::new()), Ok(FrameStats::default())), |kernel| {
            let kernel = kernel.lock();
            (kernel.stats(), kernel.frames())
        });
        let mut totals: BTreeMap<_, u64> = DropReason::ALL.map(|reason| (reason.label(), 0)).into_iter().collect();
        let of_vips = stats.unwrap_or_default().into_iter().flat_map(|(_, counts)| dropped(&counts));
        for (reason, count) in of_vips.chain([(DropReason::Chain, frames.unwrap_or_default().chains)]) {
            *totals.entry(reason.label()).or_default() += count;
        }
        let view = |seen: state::DropSeen| DropView {
            at: seen.at,
            reason: seen.reason,
            source: seen.between.map(|(source, _)| source.to_string()),
            vip: seen.between.map(|(_, vip)| vip.to_string()),
            rule: seen.rule,
            count: seen.count,
        };
        DropsView { totals, latest: self.state.drops.latest().into_iter().map(view).collect() }
    }

    fn degraded(&self) -> Vec<(String, String)> {
        self.state.degraded().into_iter().map(|(what, why)| (what.to_owned(), why)).collect()
    }
}

/// What was dropped of a VIP's.
fn dropped(counts: &VipStats) -> [(DropReason, u64); 6] {
    [
        (DropReason::Denied, counts.denied),
        (DropReason::NoEndpoint, counts.refused),
        (DropReason::NoListener, counts.no_listener),
        (DropReason::Acl, counts.syn_denied),
        (DropReason::Rate, counts.syn_over_rate),
        (DropReason::Cut, counts.cut),
    ]
}

/// What became of a VIP's frames at devices with admission, by the metric's words.
fn verdicts(counts: &VipStats) -> [(&'static str, u64); 5] {
    [
        ("syn", counts.syn_passed),
        ("rate", counts.syn_over_rate),
        ("acl", counts.syn_denied),
        ("cut", counts.cut),
        ("other", counts.other),
    ]
}

/// What keeps a rule's prompts from becoming tokens: files that are missing, or not understood.
fn tokenizer_notes(state: &State, service: &Service) -> Vec<String> {
    if service.rule().kv.mode == ExactMode::Off {
        return Vec::new();
    }
    let mut models: BTreeSet<String> = service.rule().key.model.iter().cloned().collect();
    for endpoint in &service.endpoints {
        let listed = endpoint.meters.models();
        models.extend(listed.iter().filter(|model| model.parent.is_none()).map(|model| model.id.clone()));
    }
    models.iter().filter_map(|model| Some(format!("{model}: {}", trouble(&state.tokenizers.status(model)?)?))).collect()
}

/// What is wrong with a staged tokenizer; `None`: nothing.
fn trouble(staged: &Staged) -> Option<String> {
    let tokenizer = match staged {
        Staged::Unusable(why) => return Some(format!("prompts cannot become tokens: {why}")),
        Staged::Ready(tokenizer) => tokenizer,
    };
    let status = tokenizer.status();
    if tokenizer.is_heavy() {
        return Some(
            "the chat template does so much work that prompts are read aside, and late ones are not named".to_owned(),
        );
    }
    if let Some(miss) = status.text {
        return Some(format!("prompts cannot become tokens exactly ({})", miss.detail()));
    }
    let miss = status.chat?;
    let template = status.template.map(|why| format!(": {why}")).unwrap_or_default();
    Some(format!("chats cannot be rendered exactly ({}){template}", miss.detail()))
}

/// A request's prompts with the names of their blocks, each of which is shown in the way of the first endpoint's.
fn prompts(seen: &desk::Seen, decision: &Decision) -> Vec<PromptView> {
    let prompt = |(position, shape): (usize, &PromptShape)| {
        let prompt = seen.named.as_ref().ok().and_then(|named| named.prompts.get(position));
        let names = prompt.and_then(|prompt| prompt.names.first());
        let tokens = seen.tokens.get(position);
        PromptView {
            tokens: shape.tokens,
            blocks: shape.blocks,
            names: names.into_iter().flatten().map(ToString::to_string).collect(),
            token_ids: tokens.into_iter().flatten().map(|token| token.0).collect(),
        }
    };
    decision.prompts.iter().enumerate().map(prompt).collect()
}

/// The word for how an endpoint's blocks are named.
fn keying(kv: &EndpointKv) -> &'static str {
    if kv.is_rehashed() { "rehash" } else { "parity" }
}

/// What is known of an engine's work; nothing where nobody has asked.
fn telemetry(vitals: &state::Vitals) -> Option<TelemetryView> {
    let (now, last) = (clock::now(), vitals.last());
    let failures: BTreeMap<_, _> =
        vitals.failures().filter(|(_, count)| *count > 0).map(|(why, count)| (why.label().to_owned(), count)).collect();
    let Some(last) = last else {
        return (!failures.is_empty()).then(|| TelemetryView { failures, ..TelemetryView::default() });
    };
    let (age, said) = (now.saturating_duration_since(last.0), &last.1);
    let view = TelemetryView {
        engine: said.dialect.label().to_owned(),
        age_ms: Some(u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
        missing: said.missing().map(str::to_owned).collect(),
        failures,
        ..TelemetryView::default()
    };
    if vitals.fresh(now).is_none() {
        return Some(TelemetryView { stale: true, ..view });
    }
    Some(TelemetryView {
        waiting: said.waiting,
        running: said.running,
        kv_usage: said.kv_usage,
        blocks: said.blocks,
        prompt_tokens: said.prompt_tokens,
        generated_tokens: said.generated_tokens,
        first_tokens: said.first_token.map(|first| first.count),
        first_token_seconds: said.first_token.map(|first| first.seconds),
        ..view
    })
}

fn kv_view(kv: &EndpointKv) -> KvView {
    let status = kv.status(clock::now());
    KvView {
        contract: status.contract.label().to_owned(),
        leg: status.contract.leg().map(|leg| leg.label().to_owned()),
        detail: status.contract.detail().map(str::to_owned),
        keying: keying(kv).to_owned(),
        blocks: status.blocks as u64,
        connected: status.connected,
        replay: status.replay.label().to_owned(),
        sequence: status.sequence.map(|seq| seq.0),
        last_event_age_ms: status.last_event_age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
        ranks: status.ranks,
        orphans: kv.counters.orphans.load(Ordering::Relaxed),
        gaps: kv.counters.gaps.load(Ordering::Relaxed),
        restarts: kv.counters.restarts.load(Ordering::Relaxed),
        notes: Vec::new(),
    }
}

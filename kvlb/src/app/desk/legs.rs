//! Requests of a rule with prefill and decode endpoints: which go out in two legs, and what the desk does between them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Errand, Failed, asked};
use crate::contract::handoff::{
    ARGUMENT_MEMBERS, Change, Handoff, Receipt, SAMPLING_MEMBER, TRANSFER_MEMBERS, Transfer,
};
use crate::control::live;
use crate::fleet::EndpointKey;
use crate::openai::{self, Edit, Members, Patch, Whole};
use crate::proxy::{Body, HandedOver, LegTerms, Plan, Prefilled, Reply, Request, Standing, Target, Unseen, Usage};
use crate::router::{self, Caller, Decision, Named, Overlap, Part, View};
use crate::state::{InFlight, Onlooker, Permit, Service};

/// What is read of a body by whoever decides in haste, on a data thread: reading this takes a millisecond at most.
pub(super) const HASTY_BODY: usize = 1 << 20;
/// When a request that could not be looked at should come again.
const SOON: Duration = Duration::from_secs(1);

/// How a request goes through its rule.
#[derive(Debug)]
pub(super) enum Way {
    /// The rule does not split requests.
    Unsplit,
    /// One endpoint serves it alone, for this reason, with this body where its own may not go on.
    Alone(Whole, Option<Vec<u8>>),
    /// In two legs.
    Legs(Box<Legs>),
}

/// A request in two legs.
#[derive(Debug)]
pub(super) struct Legs {
    handoff: &'static dyn Handoff,
    prefill: Patch,
    decode: Patch,
    /// A decode leg without a transfer.
    plain: Patch,
    /// One that is as short as can be.
    release: Patch,
    /// What nobody else calls a request of theirs.
    id: String,
    transfer: Transfer,
    /// Transfers that have begun with it.
    transfers: u32,
    /// Field lines for both legs.
    fields: String,
    receipt: Receipt,
    /// Which leg is under way.
    now: Part,
    /// The decode endpoint that holds enough of the prompt to serve the request alone, and how much.
    bypass: Option<(usize, Overlap)>,
    /// The prefill endpoint that has done its leg, by its name (its rule may be another one by now), and why it was chosen.
    done: Option<(Option<EndpointKey>, Decision)>,
    /// Only the release is still to be sent. It frees blocks and computes one token, so it waits for no room.
    is_release: bool,
}

/// Ids that nobody else makes.
#[derive(Debug, Default)]
pub(super) struct Ids {
    keys: std::hash::RandomState,
    last: AtomicU64,
}

impl Ids {
    fn next(&self) -> String {
        use std::hash::BuildHasher as _;
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}{:016x}", self.keys.hash_one((number, 0_u8)), self.keys.hash_one((number, 1_u8)))
    }
}

/// How a request goes through its rule.
///
/// # Errors
/// The answer to a request whose body nobody could look into: it may tell an engine to fetch blocks from anywhere.
pub(super) fn way(service: &Service, request: &Request, ids: &Ids, in_haste: bool) -> Result<Way, Reply> {
    if !service.rule().is_split() {
        return Ok(Way::Unsplit);
    }
    let asked = asked(request);
    let kind = openai::kind(asked.path);
    if asked.method != "POST" {
        return Ok(Way::Alone(Whole::NotInference, None));
    }
    let may_generate = openai::may_generate(asked.path);
    let body = match request.body() {
        Body::Unseen(_) if !may_generate => return Ok(Way::Alone(Whole::NotInference, None)),
        Body::Whole(body) if in_haste && body.len() > HASTY_BODY && !may_generate && !may_be_json(body) => {
            return Ok(Way::Alone(Whole::NotInference, None));
        }
        Body::Whole(body) if in_haste && body.len() > HASTY_BODY => {
            let reply = Reply::error(503, "pd_overloaded", "the request's body could not be looked at in time");
            return Err(reply.with_field("retry-after", SOON.as_secs()));
        }
        Body::Whole(body) => body,
        Body::Unseen(Unseen::OverMemory) => {
            let reply = Reply::error(503, "pd_overloaded", "there is no memory left to look at the request's body");
            return Err(reply.with_field("retry-after", SOON.as_secs()));
        }
        Body::Unseen(Unseen::TooLarge | Unseen::NotNeeded) => {
            let max = service.rule().max_inspect_bytes;
            let message = format!("a rule that splits requests reads bodies of up to {max} bytes (maxInspectBytes)");
            return Err(Reply::error(413, "pd_body_too_large", &message));
        }
    };
    let members = match Members::read(body) {
        Ok(members) => members,
        // A recording, say.
        Err(_bad) if !may_generate && !may_be_json(body) => return Ok(Way::Alone(Whole::NotInference, None)),
        Err(_bad) => {
            let message = "the body is no JSON object, and a rule that splits requests edits it";
            return Err(Reply::error(400, "pd_body_unreadable", message));
        }
    };
    if let Some(why) = openai::whole(kind, &members) {
        let patch = patch(&members, &[]);
        return Ok(Way::Alone(why, (!patch.is_empty()).then(|| patch.apply(body, b""))));
    }
    let handoff = service.rule().split.handoff.handoff();
    let id = ids.next();
    let own = request.head.fields().end_to_end("x-request-id").is_some_and(|id| !id.is_empty());
    Ok(Way::Legs(Box::new(Legs {
        handoff,
        prefill: patch(&members, handoff.prefill_changes()),
        decode: patch(&members, handoff.decode_changes()),
        plain: patch(&members, &[]),
        release: patch(&members, handoff.prefill_changes()),
        fields: if own { String::new() } else { format!("x-request-id: {id}\r\n") },
        transfer: Transfer::default(),
        transfers: 0,
        id,
        receipt: Receipt::default(),
        now: Part::Prompt,
        bypass: None,
        done: None,
        is_release: false,
    })))
}

/// Whether an engine may find an object in a body, though nobody here does: Python reads other encodings than UTF-8, and
/// numbers that JSON has not.
fn may_be_json(body: &[u8]) -> bool {
    let marks_and_space =
        |byte: &&u8| matches!(**byte, 0 | b' ' | b'\t' | b'\r' | b'\n' | 0xef | 0xbb | 0xbf | 0xfe | 0xff);
    body.iter().find(|byte| !marks_and_space(byte)) == Some(&b'{')
}

/// Why one endpoint serves a request alone, for those who explain it; `None` where it goes out in two legs.
///
/// # Errors
/// Where its body cannot be read.
pub(in crate::app) fn why_alone(told: &live::Request<'_>) -> Result<Option<Whole>, openai::BadBody> {
    let path = told.path.split_once('?').map_or(told.path, |(path, _)| path);
    Ok(openai::whole(openai::kind(path), &Members::read(told.body)?))
}

/// The decode endpoint that would be chosen, where it holds enough of the prompts to serve the request alone.
pub(in crate::app) fn bypass(service: &Service, named: &Named, caller: &Caller) -> Option<(usize, Overlap)> {
    let (most, onlooker) = (service.rule().split.bypass?, Onlooker(service));
    let endpoint = router::route_decode(&service.ready, &onlooker, caller, &[])?;
    let held = onlooker.held(named).get(endpoint).copied()?;
    let uncached = router::uncached(&service.ready, named, held.depth);
    (uncached <= u64::from(most)).then_some((endpoint, held))
}

/// What a leg's body says, and none of what a client has to say about transfers.
fn patch(members: &Members<'_>, changes: &[Change]) -> Patch {
    let edit = |change: &Change| match *change {
        Change::Set(key, value) => Edit::Set(key, value.as_bytes()),
        Change::Replace(key, value) => Edit::Replace(key, value.as_bytes()),
        Change::Remove(key) => Edit::Remove(key),
        Change::Fill(key) => Edit::Fill(key),
    };
    let untold = TRANSFER_MEMBERS.map(Edit::Remove);
    let arguments = ARGUMENT_MEMBERS.map(|key| Edit::Within(key, &untold));
    let sampling = [&untold[..], &arguments].concat();
    // Of two for one member the first counts.
    let edits: Vec<Edit<'_>> = changes
        .iter()
        .map(edit)
        .chain(sampling.iter().copied())
        .chain([Edit::Within(SAMPLING_MEMBER, &sampling)])
        .collect();
    members.patch(&edits)
}

impl Errand {
    /// What endpoints are chosen for.
    pub(super) fn part(&self) -> Part {
        match &self.way {
            Way::Unsplit => Part::Prompt,
            Way::Alone(..) => Part::Anything,
            Way::Legs(legs) => legs.now,
        }
    }

    pub(super) fn legs(&self) -> Option<&Legs> {
        match &self.way {
            Way::Legs(legs) => Some(legs),
            _ => None,
        }
    }

    fn legs_mut(&mut self) -> Option<&mut Legs> {
        match &mut self.way {
            Way::Legs(legs) => Some(legs),
            _ => None,
        }
    }

    /// Whether its prefill leg is done.
    pub(super) fn is_prefilled(&self) -> bool {
        self.legs().is_some_and(|legs| legs.done.is_some())
    }

    pub(super) fn make_plan(&mut self, body: &[u8]) -> Plan {
        let named = self.legs().and_then(|_| self.named.as_ref().ok());
        let bypass = named.and_then(|named| bypass(&self.service, named, &self.caller));
        let rule = self.service.rule();
        match &mut self.way {
            Way::Unsplit => Plan::AsItIs,
            Way::Alone(why, edited) => {
                let service = rule.id.0.to_string();
                self.state.metrics.pd_whole.with_label_values(&[service.as_str(), why.label()]).inc();
                edited.take().map_or(Plan::AsItIs, Plan::Edited)
            }
            Way::Legs(legs) if bypass.is_some() => {
                (legs.now, legs.bypass) = (Part::Decode, bypass);
                self.pinning.bypasses();
                let service = rule.id.0.to_string();
                self.state.metrics.pd_whole.with_label_values(&[service.as_str(), "bypass"]).inc();
                if legs.plain.is_empty() { Plan::AsItIs } else { Plan::Edited(legs.plain.apply(body, b"")) }
            }
            Way::Legs(legs) => {
                let prefill = rule.split.prefill.unwrap_or_else(|| self.state.config().prefill_timeout);
                Plan::TwoLegs(LegTerms {
                    prefill,
                    decode: rule.split.decode.or(rule.limits.first_byte),
                    handoff: rule.split.between,
                    fields: std::mem::take(&mut legs.fields),
                })
            }
        }
    }

    /// What the ladder says of the part that is under way.
    pub(super) fn route(&self, view: &dyn View, tried: &[usize]) -> Decision {
        let ready = &self.service.ready;
        let nobody = Decision::default();
        match self.part() {
            Part::Decode => {
                let may_be_asked = |endpoint| self.service.askable(Part::Decode, tried).any(|other| other == endpoint);
                let bypass = self.legs().and_then(|legs| legs.bypass);
                match bypass.filter(|(endpoint, _)| may_be_asked(*endpoint)) {
                    Some((endpoint, Overlap { depth, count, rank })) => {
                        let tier = router::Tier::Overlap;
                        let prompts = router::shapes(&self.named, self.service.rule().kv.block_size);
                        let uncached_tokens =
                            self.named.as_ref().map_or(0, |named| router::uncached(ready, named, depth));
                        Decision {
                            endpoint: Some(endpoint),
                            tier,
                            depth,
                            count,
                            rank,
                            prompts,
                            uncached_tokens,
                            ..nobody
                        }
                    }
                    None => Decision { endpoint: router::route_decode(ready, view, &self.caller, tried), ..nobody },
                }
            }
            Part::Anything => {
                let decision = router::route(ready, &self.named, view, &self.caller, tried);
                let endpoint = decision.endpoint.or_else(|| router::route_anywhere(ready, view, tried));
                Decision { endpoint, ..decision }
            }
            Part::Prompt => match self.legs() {
                // Whoever computes a prompt keeps its blocks for somebody.
                Some(_) if self.service.askable(Part::Decode, &[]).next().is_none() => nobody,
                Some(legs) if legs.handoff.needs_bootstrap() => {
                    let silent = |position: &usize| self.service.endpoints[*position].meters.bootstrap().is_none();
                    let silent = (0..self.service.endpoints.len()).filter(silent);
                    let passed_over: Vec<usize> = tried.iter().copied().chain(silent).collect();
                    router::route(ready, &self.named, view, &self.caller, &passed_over)
                }
                _ => router::route(ready, &self.named, view, &self.caller, tried),
            },
        }
    }

    /// The data-parallel rank that a prompt is sent to, unless the client has chosen one: that which holds its blocks, or any
    /// where the decode engine has to be told which it was.
    pub(super) fn rank(&self, position: usize, decision: &Decision) -> Option<i64> {
        if self.ranked {
            return None;
        }
        let of_bootstrap = || {
            self.legs().filter(|legs| legs.handoff.needs_bootstrap())?;
            let told = self.service.endpoints.get(position)?.meters.bootstrap()?;
            told.engines.first().filter(|_| told.engines.len() > 1).map(|(rank, _)| *rank)
        };
        decision.rank.filter(|_| decision.tier != router::Tier::Selector).or_else(of_bootstrap)
    }

    /// Where a request in two legs stands for which there is nobody.
    pub(super) fn stand_in_pool(&self) -> Standing {
        let Some(legs) = self.legs() else { return Standing::Nobody };
        let (part, service) = (self.part(), &self.service);
        let none = |part| service.askable(part, &[]).next().is_none();
        let message = if part == Part::Decode || none(Part::Decode) {
            "no decode endpoint of the rule may be asked, or none could be reached"
        } else if !none(Part::Prompt) && legs.handoff.needs_bootstrap() {
            "no prefill endpoint that could be reached has told its engine's id (pdBootstrapPort)"
        } else {
            "no prefill endpoint of the rule may be asked, or none could be reached"
        };
        Standing::Refused(Reply::error(503, "pd_pool_unavailable", message))
    }

    /// The endpoint of a decode leg.
    pub(super) fn go_on(
        &self,
        decision: &Decision,
        is_trial: bool,
        permit: Option<Permit>,
    ) -> Option<Target<InFlight>> {
        let chosen = self.legs()?.done.as_ref().map(|(_, chosen)| chosen);
        let mut target = self.target(decision.endpoint?, chosen.unwrap_or(decision), is_trial, permit)?;
        // A rank is the prefill endpoint's.
        target.request_fields.clear();
        if self.service.rule().decision_headers
            && let Some(prefill) = self.prefill_endpoint()
        {
            target.fields.extend_from_slice(format!("x-kvlb-prefill-endpoint: {prefill}\r\n").as_bytes());
        }
        Some(target)
    }

    fn prefill_endpoint(&self) -> Option<String> {
        let (key, _) = self.legs()?.done.as_ref()?;
        key.as_ref().map(ToString::to_string)
    }

    pub(super) fn write_prefill_body(&mut self, body: &[u8]) -> Vec<u8> {
        let decision = self.decision.as_ref();
        let position = decision.and_then(|decision| decision.endpoint);
        let rank = position.and_then(|position| self.rank(position, decision?));
        let bootstrap = position
            .and_then(|position| self.service.endpoints.get(position))
            .and_then(|endpoint| endpoint.meters.bootstrap());
        let Some(legs) = self.legs_mut() else { return body.to_vec() };
        // An engine that gave up a transfer may know it still.
        legs.transfers += 1;
        legs.transfer = Transfer { id: format!("{}-{}", legs.id, legs.transfers), bootstrap, rank };
        legs.prefill.apply(body, legs.handoff.prefill(&legs.transfer).as_bytes())
    }

    /// The prefill leg is done: what is known of it is counted, and what it returned goes on.
    pub(super) fn finish_prefill(&mut self, prefilled: &Prefilled<'_>, body: &[u8]) -> HandedOver {
        let Prefilled { position, took, answer } = *prefilled;
        self.answered();
        self.judge(position, 200);
        if let Some(endpoint) = self.service.endpoints.get(position) {
            endpoint.meters.breaker.completed();
        }
        self.pinning.prefilled(&self.service, &self.caller, position);
        let decision = self.decision.clone().unwrap_or_default();
        self.settle();
        self.earlier.clear();
        self.gate = None;
        self.stay = if self.counts { self.state.admission.stay(&self.service) } else { None };
        let key = self.service.endpoints.get(position).map(|endpoint| endpoint.spec.key.clone());
        self.count_leg("prefill", "done");
        let rule = self.service.rule().id.0.to_string();
        self.state.metrics.pd_prefill_seconds.with_label_values(&[rule.as_str()]).observe(took.as_secs_f64());
        let Some(legs) = self.legs_mut() else { return HandedOver { body: body.to_vec(), cached_tokens: None } };
        let receipt = legs.handoff.receipt(answer);
        let filling = legs.handoff.decode(&legs.transfer, &receipt);
        let handed = match &filling {
            Some(filling) => legs.decode.apply(body, filling.as_bytes()),
            None => legs.plain.apply(body, b""),
        };
        // vLLM leaves the number out where it is zero.
        let cached_tokens = filling.as_ref().map(|_| receipt.cached_tokens.unwrap_or(0));
        let reported = receipt.prompt_tokens.map(|prompt_tokens| Usage {
            prompt_tokens,
            cached_tokens: receipt.cached_tokens,
            output_tokens: None,
        });
        (legs.receipt, legs.now, legs.done) = (receipt, Part::Decode, Some((key, decision)));
        let labels = [legs.handoff.label(), if filling.is_some() { "passed_on" } else { "none" }];
        self.state.metrics.pd_transfers.with_label_values(&labels).inc();
        if let Some(usage) = reported.filter(|_| self.is_comparable()) {
            self.compare(position, &usage);
        }
        self.follow_rule();
        HandedOver { body: handed, cached_tokens }
    }

    pub(super) fn begin_anew(&mut self) {
        self.gate = None;
        self.pinning.begun_anew();
        if let Some(legs) = self.legs_mut() {
            (legs.now, legs.done, legs.receipt) = (Part::Prompt, None, Receipt::default());
            legs.is_release = false;
        }
    }

    pub(super) fn write_release_body(&mut self, body: &[u8]) -> Option<Vec<u8>> {
        let legs = self.legs_mut()?;
        let filling = legs.handoff.decode(&legs.transfer, &legs.receipt)?;
        let short = legs.release.apply(body, filling.as_bytes());
        legs.is_release = true;
        let rule = self.service.rule().id.0.to_string();
        self.state.metrics.pd_releases.with_label_values(&[rule.as_str()]).inc();
        Some(short)
    }

    pub(super) fn is_release(&self) -> bool {
        self.legs().is_some_and(|legs| legs.is_release)
    }

    /// A prefill endpoint did not do its leg.
    pub(super) fn prefill_failed(&mut self, position: usize, status: Option<u16>) {
        self.count_leg("prefill", "failed");
        self.pinning.passed_over(&self.service, &self.caller, position);
        match status {
            Some(429 | 501 | 503) => {}
            status => self.failed(position, Failed::Answer(status.unwrap_or(502))),
        }
    }

    pub(super) fn count_leg(&self, leg: &str, result: &str) {
        let rule = self.service.rule().id.0.to_string();
        self.state.metrics.pd_legs.with_label_values(&[rule.as_str(), leg, result]).inc();
    }

    /// Counts how the leg under way ended.
    pub(super) fn count_leg_end(&self, result: &str) {
        if self.legs().is_some() {
            self.count_leg(if self.part() == Part::Decode { "decode" } else { "prefill" }, result);
        }
    }

    /// The tier that chose the prefill endpoint of a request whose decode leg is under way.
    pub(super) fn settled_tier(&self) -> Option<router::Tier> {
        self.legs()?.done.as_ref().map(|(_, chosen)| chosen.tier)
    }
}

//! A request of a rule with admission: it goes where there is room, waits where there is none, or is refused.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::Errand;
use crate::clock;
use crate::fleet::{AdmissionMode, AdmissionRule};
use crate::proxy::{Reply, Standing, Target};
use crate::router::{Miss, Named, Part, Reason, Space};
use crate::state::{InFlight, NoWait, Permit, Service, Turn, Verdict, Waiting, Wish};

/// Choices that may find the last place taken by somebody else; one that was called takes the place that it was called for
/// then.
const TRIES: u32 = 4;
/// When a request that found no room should come again: there may be some at any moment.
const SOON: Duration = Duration::from_secs(1);
/// Where its queue was full, after a mean wait, but not longer than this.
const LATE: Duration = Duration::from_secs(30);
/// Where kvlb ends, when another may have taken over.
const AFTER_DRAIN: Duration = Duration::from_secs(5);

/// Where one request stands at the gate.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// That it went on has been counted.
    counted: bool,
    /// Nobody had room when it last chose.
    full: bool,
    /// It is not to wait: kvlb ends, or its rule is gone.
    drained: bool,
    /// Its place in its rule's line.
    ticket: Option<u64>,
    /// When it began to wait.
    since: Option<Instant>,
    waiting: Option<Waiting>,
    /// The unit that it was called with.
    called: Option<Permit>,
}

impl Errand {
    /// As [`Errand::decide`], among endpoints that have room.
    pub(super) fn choose_at_gate(&mut self, tried: &[usize]) -> Option<Target<InFlight>> {
        let rule = self.service.rule().admission?;
        let mut gate = self.gate.take().unwrap_or_default();
        let chosen = match rule.mode {
            // What asks no model to work takes no place of those that do.
            _ if !self.counts => {
                if !std::mem::replace(&mut gate.counted, true) {
                    self.service.line.count(Verdict::BypassNonInference);
                }
                let (decision, is_trial) = self.decide(tried, tried.is_empty());
                self.go(decision, is_trial, None)
            }
            _ if self.is_release() => {
                let (decision, is_trial) = self.decide(tried, tried.is_empty());
                self.go(decision, is_trial, None)
            }
            AdmissionMode::Observe => self.observe(&rule, tried, &mut gate),
            AdmissionMode::Enforce => self.find_room(&rule, tried, &mut gate),
        };
        self.gate = Some(gate);
        chosen
    }

    fn observe(&mut self, rule: &AdmissionRule, tried: &[usize], gate: &mut Gate) -> Option<Target<InFlight>> {
        if !std::mem::replace(&mut gate.counted, true) {
            let would = if rule.queue_depth > 0 { Verdict::ObserveWouldQueue } else { Verdict::ObserveWouldShed };
            let is_full = self.service.is_full(rule, self.part(), tried);
            self.service.line.count(if is_full { would } else { Verdict::Admitted });
        }
        let (decision, is_trial) = self.decide(tried, tried.is_empty());
        let permit = decision.endpoint.and_then(|position| self.state.admission.enter(&self.service, position));
        self.go(decision, is_trial, permit)
    }

    fn find_room(&mut self, rule: &AdmissionRule, tried: &[usize], gate: &mut Gate) -> Option<Target<InFlight>> {
        if gate.drained {
            return None;
        }
        let (service, part) = (Arc::clone(&self.service), self.part());
        // What it was called for may have gone, or be down, since then; the unit goes on to another then.
        let called = gate.called.take().filter(|called| {
            service.askable(part, tried).any(|position| called.is_for(&service.endpoints[position].place))
        });
        let mine =
            |position: usize| called.as_ref().is_some_and(|called| called.is_for(&service.endpoints[position].place));
        let kept = self.stay.is_some();
        let mut nobody = None;
        for round in 1..=TRIES {
            if called.is_none() && service.line.held().saturating_sub(kept.into()) >= rule.outstanding_max() {
                break;
            }
            let last = called.is_some() && round == TRIES;
            let is_full =
                |position: &usize| !mine(*position) && (last || service.endpoints[*position].is_at_bound(rule));
            let full = (0..service.endpoints.len()).filter(is_full);
            let passed_over: Vec<usize> = tried.iter().copied().chain(full).collect();
            let (decision, is_trial) =
                self.decide(&passed_over, tried.is_empty() && round == 1 && gate.since.is_none());
            let Some(position) = decision.endpoint else {
                nobody = Some(decision);
                break;
            };
            let permit = if mine(position) {
                None
            } else {
                self.state.admission.take(&service, position, called.is_some() || kept)
            };
            if permit.is_none() && !mine(position) {
                // Somebody was quicker.
                if is_trial {
                    service.endpoints[position].meters.breaker.dismiss();
                }
                continue;
            }
            // One unit is enough: that of another place goes to the next in line.
            let permit = permit.or(called);
            self.stay = None;
            if !std::mem::replace(&mut gate.counted, true) {
                service.line.count(Verdict::Admitted);
            }
            if let Some(since) = gate.since.take() {
                service.line.waited(clock::now().saturating_duration_since(since));
            }
            return self.go(decision, is_trial, permit);
        }
        // Who was called to one that may be asked, and still finds nobody, would find nobody again.
        gate.full = called.is_none() && service.askable(part, tried).next().is_some();
        match nobody {
            Some(decision) if !gate.full => self.go(decision, false, None),
            _ => None,
        }
    }

    /// Where a request stands that found no room.
    pub(super) fn stand(&mut self, tried: &[usize]) -> Standing {
        let Some(mut gate) = self.gate.take() else { return Standing::Nobody };
        let standing = self.stand_at(&mut gate, tried);
        self.gate = Some(gate);
        standing
    }

    fn stand_at(&self, gate: &mut Gate, tried: &[usize]) -> Standing {
        let (line, now) = (&self.service.line, clock::now());
        if gate.drained {
            return Standing::Refused(Self::drained());
        }
        let Some(rule) = self.service.rule().admission.filter(|_| std::mem::take(&mut gate.full)) else {
            return Standing::Nobody;
        };
        if rule.queue_depth == 0 {
            line.count(Verdict::CapacityShed);
            return Standing::Refused(self.refusal("no endpoint of the rule has room for another request", SOON));
        }
        match self.state.admission.wait(
            &self.service,
            Wish { part: self.part(), tried, keeps: self.stay.is_some() },
            gate.ticket,
            rule.queue_depth,
        ) {
            Ok(waiting) => {
                if gate.ticket.is_none() {
                    line.count(Verdict::Queued);
                }
                gate.ticket = Some(waiting.ticket());
                gate.waiting = Some(waiting);
                // It keeps its deadline when it was called in vain.
                Standing::Queued { until: *gate.since.get_or_insert(now) + rule.queue_wait }
            }
            Err(NoWait::Full) => {
                line.count(Verdict::QueueFull);
                let message = "no endpoint of the rule has room, and as many requests as may wait for it already";
                Standing::Refused(self.refusal(message, line.mean_wait()))
            }
            Err(NoWait::Draining) => {
                line.count(Verdict::Drained);
                Standing::Refused(Self::drained())
            }
        }
    }

    pub(super) fn poll_gate(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(gate) = &mut self.gate else { return Poll::Ready(()) };
        let Some(waiting) = &mut gate.waiting else { return Poll::Ready(()) };
        let Poll::Ready(turn) = waiting.poll(cx) else { return Poll::Pending };
        gate.waiting = None;
        match turn {
            Turn::Place(permit) => gate.called = Some(permit),
            Turn::Anew => {}
            Turn::Drained => {
                gate.drained = true;
                self.service.line.count(Verdict::Drained);
            }
        }
        self.follow_rule();
        let enforced = self.service.rule().admission.is_some_and(|rule| rule.mode == AdmissionMode::Enforce);
        if let Some(gate) = self.gate.as_mut().filter(|_| !enforced) {
            gate.called = None;
        }
        Poll::Ready(())
    }

    /// Goes by the rule as it is now. A request that has tried endpoints of an older one stays with that, and so does one whose
    /// blocks another kind of rule has no use for.
    pub(super) fn follow_rule(&mut self) {
        let table = self.state.table();
        let Some(service) = table.service(self.service.rule().id) else { return };
        if Arc::ptr_eq(service, &self.service) || self.decision.is_some() {
            return;
        }
        let (old, new) = (self.service.rule(), service.rule());
        if self.part() == Part::Decode && !(new.is_split() && new.split.handoff == old.split.handoff) {
            return;
        }
        if let Ok(named) = &mut self.named
            && !moved(named, &self.service, service)
        {
            self.named = Err(Miss::because(Reason::Hashes, "rule_changed"));
        }
        self.service = Arc::clone(service);
    }

    /// The answer to a request that has waited for as long as it may.
    pub(super) fn give_up(&mut self) -> Reply {
        self.service.line.count(Verdict::QueueTimeout);
        if let Some(gate) = &mut self.gate {
            gate.waiting = None;
        }
        let message = "no endpoint of the rule had room in time";
        self.with_fields(Reply::error(504, "admission_queue_timeout", message), self.service.line.mean_wait())
    }

    /// The client has left.
    pub(super) fn leave_gate(&mut self) {
        if let Some(gate) = &mut self.gate
            && gate.waiting.take().is_some()
        {
            self.service.line.count(Verdict::Cancelled);
        }
    }

    fn refusal(&self, message: &str, after: Duration) -> Reply {
        self.with_fields(Reply::error(429, "admission_capacity", message), after)
    }

    fn drained() -> Reply {
        let message = "the request waited for an endpoint when its rule went, or kvlb ended";
        Reply::error(503, "admission_drained", message).with_field("retry-after", AFTER_DRAIN.as_secs())
    }

    fn with_fields(&self, reply: Reply, after: Duration) -> Reply {
        let after = after.clamp(SOON, LATE);
        let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        let reply = reply.with_field("retry-after", seconds);
        if !self.service.rule().decision_headers {
            return reply;
        }
        numbers(&self.service).into_iter().fold(reply, |reply, (name, number)| reply.with_field(name, number))
    }
}

/// The fields that tell a client how full a rule is: LoxiLB's names.
pub(super) fn fields(service: &Service) -> String {
    let mut fields = String::new();
    for (name, number) in numbers(service) {
        fields.extend([name, ": ", &number.to_string(), "\r\n"]);
    }
    fields
}

fn numbers(service: &Service) -> [(&'static str, u32); 3] {
    let limit = service.rule().admission.and_then(|rule| rule.outstanding).unwrap_or(0);
    [
        ("x-loxilb-admission-inflight", service.line.held()),
        ("x-loxilb-admission-queued", service.line.queued()),
        ("x-loxilb-admission-limit", limit),
    ]
}

/// Makes the names of a request's blocks mean the same endpoints in another version of its rule; false where they mean
/// nothing there.
fn moved(named: &mut Named, old: &Service, new: &Service) -> bool {
    if !Arc::ptr_eq(&old.index, &new.index) {
        return false;
    }
    let place = |position: &usize| {
        let key = &old.endpoints.get(*position)?.spec.key;
        new.endpoints.iter().position(|endpoint| endpoint.spec.key == *key)
    };
    for Space { endpoints, .. } in &mut named.spaces {
        *endpoints = endpoints.iter().filter_map(place).collect();
    }
    true
}

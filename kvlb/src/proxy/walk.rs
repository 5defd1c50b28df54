//! From endpoint to endpoint until one answers.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::alarm::Limit;
use super::answer::{Heard, HeardHead};
use super::backplane::{Backplane, Body, Call, ConnectFailure, Event, Phase, Plan, Request, Standing, Target, Terms};
use super::client::{After, Client, Stop};
use super::connect::Leg;
use super::exchange::{DECODE_DIED, End};
use super::http::{AnswerError, Reply};
use super::intake::Sending;
use super::io::{Backend, Stream};
use super::meter::Retry;
use super::upload::{Parcel, Passing, Then, Upload, send_through, send_whole, sooner};
use crate::clock;

/// Times a request is sent at most, whatever the reasons.
pub(super) const SENDS_MAX: u32 = 3;
/// A reused connection that ends this soon had been closed by the endpoint before the request came; one that ends later may
/// have had its request worked on.
pub(super) const STALE_WITHIN: Duration = Duration::from_secs(1);
/// How long endpoints that cannot be reached may be tried one after the other, once some have been.
const CONNECTING_MAX: Duration = Duration::from_secs(10);
/// Endpoints that are tried however long each of them takes: the first may swallow what is sent to it for all its time.
const CONNECTS_LEAST: u32 = 3;

/// A decided request on its way to an answer.
pub(super) struct Walk<'a, 's, B: Backend, P: Backplane> {
    pub(super) client: &'a Client<'s, B, P>,
    pub(super) call: P::Call,
    pub(super) terms: Terms,
    pub(super) began: Instant,
    total: Option<Instant>,
    /// The endpoint chosen last, unless it was passed over.
    pub(super) position: Option<usize>,
    /// The call has heard its last event.
    over: bool,
    /// What happens to it is the client's request's story; a part of a joined answer is not.
    pub(super) is_story: bool,
    pub(super) part: Part,
}

/// What of a request is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it.
    Whole,
    /// Its prefill leg, whose answer must be there by then.
    Prefill {
        /// Known while an endpoint is asked.
        due: Option<Instant>,
    },
    /// Its decode leg.
    Decode(Decoding),
}

/// A decode leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decoding {
    /// How long its answer may take to begin.
    pub(super) first_byte: Option<Duration>,
    /// It must be under way by then.
    pub(super) lease: Instant,
    /// When the request had gone out whole for the first time, to its prefill endpoint.
    pub(super) asked: Instant,
    /// An endpoint has all of it, and has not said that it has not started.
    pub(super) is_sent: bool,
    /// It goes out on connections of its own.
    pub(super) fresh: bool,
    /// The prompt's tokens that the prefill endpoint had in its cache, where blocks were handed on: the decode endpoint
    /// counts those that it fetched.
    pub(super) cached: Option<u64>,
}

/// A target of this backplane's calls.
pub(super) type TargetOf<P> = Target<GuardOf<P>>;

/// What a request holds at its endpoint.
type GuardOf<P> = <<P as Backplane>::Call as Call>::Guard;

/// An endpoint and a connection to it.
type Reached<B, P> = (Leg<<B as Backend>::Stream>, TargetOf<P>);

/// An answer that has not been relayed yet.
pub(super) struct Held<B: Backend, P: Backplane> {
    pub(super) leg: Leg<B::Stream>,
    pub(super) target: Target<Option<GuardOf<P>>>,
    pub(super) answer: HeardHead,
    /// The endpoint's connection is not fit for another request.
    pub(super) spoilt: bool,
}

impl<B: Backend, P: Backplane> Held<B, P> {
    pub(super) fn new(leg: Leg<B::Stream>, target: TargetOf<P>, answer: HeardHead) -> Box<Self> {
        let Target { position, addresses, fields, request_fields, guard } = target;
        Box::new(Self {
            leg,
            target: Target { position, addresses, fields, request_fields, guard: Some(guard) },
            answer,
            spoilt: false,
        })
    }
}

/// Where a walk led.
pub(super) enum Walked<B: Backend, P: Backplane> {
    /// To an answer, and nothing else is left to do.
    Answer(Box<Held<B, P>>),
    /// To the end of the exchange.
    Done(After),
}

/// How one try ended.
enum Try<B: Backend, P: Backplane> {
    /// With the answer.
    Walked(Walked<B, P>),
    /// A reused connection ended before any byte of an answer.
    Stale(Parcel, TargetOf<P>),
    /// The endpoint said that it has not started; its answer is kept, should nobody have a better one.
    Busy(Box<Held<B, P>>, Parcel),
    /// The endpoint is gone, or makes no sense.
    Failed(Reply),
}

impl<'a, 's, B: Backend, P: Backplane> Walk<'a, 's, B, P> {
    pub(super) fn new(client: &'a Client<'s, B, P>, call: P::Call, began: Instant) -> Self {
        let terms = call.terms();
        let total = terms.limits.total.map(|limit| began + limit);
        Self { client, call, terms, began, total, position: None, over: false, is_story: true, part: Part::Whole }
    }

    /// How the request goes out.
    pub(super) fn plan(&mut self, request: &Request) -> Plan {
        match request.body() {
            Body::Whole(body) => self.call.plan(body),
            Body::Unseen(_) => self.call.plan(&[]),
        }
    }

    /// The same for a part of an answer that is joined here.
    pub(super) fn part(client: &'a Client<'s, B, P>, call: P::Call, began: Instant) -> Self {
        Self { is_story: false, ..Self::new(client, call, began) }
    }

    /// Tells the rule what happened. Nothing follows the last event.
    pub(super) fn report(&mut self, event: Event) {
        debug_assert!(!self.over, "{event:?} follows the last event");
        if !self.over {
            self.over = event.is_last();
            self.call.report(event);
            if self.over && self.is_story {
                self.client.note_last(&event, &self.call);
            }
        }
    }

    /// As [`Walk::report`], for an endpoint that is passed over.
    pub(super) fn pass_over(&mut self, event: Event) {
        self.position = None;
        self.report(event);
    }

    /// Whether the call has heard its last event.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// An endpoint to ask, none of `tried`.
    pub(super) fn choose(&mut self, tried: &[usize]) -> Option<TargetOf<P>> {
        let target = self.call.choose(tried);
        self.position = target.as_ref().map(|target| target.position).or(self.position);
        target
    }

    pub(super) async fn run(&mut self, sending: Sending) -> Result<Walked<B, P>, End> {
        match sending {
            Sending::Whole(parcel) => self.send_until_answered(parcel).await,
            // Boxed as everything that is rare: the others need not carry it.
            Sending::Through(head, passing) => Box::pin(self.send_once(head, passing)).await,
            Sending::TwoLegs(legs) => Box::pin(self.run_legs(*legs)).await,
        }
    }

    /// Sets the deadline of what comes next.
    pub(super) fn arm(&self, limit: Option<Duration>, name: Limit) {
        let due = limit.map(|limit| (self.client.lane().now() + limit, name));
        self.client.alarm.set(sooner(due, self.total));
    }

    /// The next piece must come within the rule's limit.
    pub(super) fn arm_pause(&self) {
        match self.part {
            Part::Prefill { due: Some(due) } => self.client.alarm.set(sooner(Some((due, Limit::Prefill)), self.total)),
            _ => self.arm(self.terms.limits.idle, Limit::Pause),
        }
    }

    /// When the blocks that the request is to fetch may be gone, unless it is under way by then.
    fn lease(&self) -> Option<(Instant, Limit)> {
        match self.part {
            Part::Decode(Decoding { lease, .. }) => Some((lease, Limit::Handoff)),
            _ => None,
        }
    }

    /// Nothing is sent yet.
    fn arm_unsent(&self) {
        self.client.alarm.set(sooner(self.lease(), self.total));
    }

    /// The request is being sent.
    fn arm_sending(&self) {
        match (self.lease(), self.terms.limits.idle) {
            (Some((lease, name)), idle) if idle.is_none_or(|idle| lease < self.client.lane().now() + idle) => {
                self.client.alarm.set(sooner(Some((lease, name)), self.total));
            }
            _ => self.arm_pause(),
        }
    }

    /// A decode leg is not sent when the blocks that it is to fetch may be gone.
    pub(super) fn check_lease(&self) -> Result<(), End> {
        match self.part {
            Part::Decode(Decoding { lease, .. }) if clock::now() > lease => Err(Stop::TimedOut(Limit::Handoff).into()),
            _ => Ok(()),
        }
    }

    fn note_sent(&mut self, is_sent: bool) {
        if let Part::Decode(decoding) = &mut self.part {
            decoding.is_sent = is_sent;
        }
    }

    pub(super) async fn send_until_answered(&mut self, mut parcel: Parcel) -> Result<Walked<B, P>, End> {
        let (mut tried, mut sends) = (Vec::new(), 0);
        let mut busy: Option<Box<Held<B, P>>> = None;
        let may_reuse = !matches!(self.part, Part::Decode(Decoding { fresh: true, .. }));
        let mut reached = self.reach(&mut tried, None, may_reuse).await?;
        loop {
            sends += 1;
            let may_hold = busy.is_none() && sends < SENDS_MAX;
            let (next, reuse) = match self.try_once(reached, parcel, may_hold, &mut busy).await? {
                Try::Walked(walked) => return Ok(walked),
                Try::Failed(reply) => return fall_back(busy, reply),
                Try::Stale(..) if matches!(self.part, Part::Decode(_)) => return Err(End::Stale),
                Try::Stale(back, target) => {
                    self.client.retried(Retry::StaleConnection);
                    parcel = back;
                    (target, false)
                }
                Try::Busy(mut held, back) => {
                    tried.push(held.target.position);
                    self.pass_over(Event::Busy { position: held.target.position, status: held.answer.head.status });
                    self.note_sent(false);
                    // It has not started, so nothing is in flight there.
                    held.target.guard = None;
                    let Some(other) = self.another(&tried) else { return Ok(Walked::Answer(held)) };
                    parcel = back;
                    busy = Some(held);
                    // The last try must not be spent on a connection that may be stale.
                    (other, may_reuse && sends + 1 < SENDS_MAX)
                }
            };
            reached = match self.reach(&mut tried, Some(next), reuse).await {
                Err(End::Reply(reply)) => return fall_back(busy, reply),
                reached => reached?,
            };
        }
    }

    /// Waits until one of the rule's endpoints has room for the request, where it may; else there is nobody.
    async fn stand_in_line(&mut self, tried: &[usize]) -> Result<Option<TargetOf<P>>, End> {
        loop {
            let until = match self.call.standing(tried) {
                Standing::Nobody => return Ok(None),
                Standing::Refused(reply) => return Err(reply.into()),
                Standing::Queued { until } => until,
            };
            self.client.phase.set(Phase::Queue);
            let due = self.lease().filter(|(lease, _)| *lease < until).unwrap_or((until, Limit::Queue));
            self.client.alarm.set(sooner(Some(due), self.total));
            let (client, call) = (self.client, &mut self.call);
            match client.watch(None, poll_fn(|cx| call.poll_turn(cx))).await {
                Ok(()) => {}
                Err(Stop::TimedOut(Limit::Queue)) => return Err(self.call.overdue().into()),
                Err(stop) => return Err(stop.into()),
            }
            self.client.phase.set(Phase::Connect);
            self.arm_unsent();
            if let Some(target) = self.choose(tried) {
                return Ok(Some(target));
            }
        }
    }

    /// Another endpoint for a request that one was too busy for.
    pub(super) fn another(&mut self, tried: &[usize]) -> Option<TargetOf<P>> {
        let other = self.choose(tried)?;
        if !self.call.may_retry() {
            self.pass_over(Event::Unasked { position: other.position });
            return None;
        }
        self.client.retried(Retry::Busy);
        Some(other)
    }

    /// A body that goes through as it comes cannot be sent twice.
    async fn send_once(&mut self, front: Vec<u8>, passing: Box<Passing>) -> Result<Walked<B, P>, End> {
        let (leg, target) = self.reach(&mut Vec::new(), None, false).await?;
        let send =
            pin!(send_through(self.client, Rc::clone(&leg.stream), front, target.request_fields.clone(), passing));
        let mut upload = Upload::new(send, self.then());
        self.client.phase.set(Phase::Body);
        self.arm(None, Limit::Total);
        match self.hear(&leg, &target, &mut upload).await? {
            Heard::Head(answer) => self.answered(Held::new(leg, target, answer), upload).await,
            Heard::Silence | Heard::BrokenOff => Err(self.died(target.position, None).into()),
            Heard::Nonsense(error) => Err(self.died(target.position, Some(error)).into()),
        }
    }

    /// Sends the request to one endpoint. With an answer that is relayed, the `busy` one before it is done with.
    async fn try_once(
        &mut self,
        (leg, target): Reached<B, P>,
        mut parcel: Parcel,
        may_hold: bool,
        busy: &mut Option<Box<Held<B, P>>>,
    ) -> Result<Try<B, P>, End> {
        let began = self.client.lane().now();
        parcel.direct(&target.request_fields);
        let send = pin!(send_whole(self.client, Rc::clone(&leg.stream), parcel));
        let mut upload = Upload::new(send, self.then());
        self.client.phase.set(Phase::Wait);
        // An endpoint that does not take the request makes no progress either.
        self.arm_sending();
        let heard = self.hear(&leg, &target, &mut upload).await;
        self.note_sent(upload.is_sent());
        match heard? {
            Heard::Head(answer) => {
                let held = Held::new(leg, target, answer);
                if may_hold && held.answer.head.is_busy() && upload.is_sent() {
                    return Ok(match upload.into_parcel().await {
                        Some(parcel) => Try::Busy(held, parcel),
                        None => Try::Walked(Walked::Answer(held)),
                    });
                }
                *busy = None;
                self.answered(held, upload).await.map(Try::Walked)
            }
            Heard::Silence if leg.reused && clock::now() < began + STALE_WITHIN => {
                leg.stream.abort();
                match upload.into_parcel().await {
                    Some(parcel) => Ok(Try::Stale(parcel, target)),
                    None => Ok(Try::Failed(self.failed(&target, None, busy.is_some()))),
                }
            }
            Heard::Silence | Heard::BrokenOff => Ok(Try::Failed(self.failed(&target, None, busy.is_some()))),
            Heard::Nonsense(error) => Ok(Try::Failed(self.failed(&target, Some(error), busy.is_some()))),
        }
    }

    /// An endpoint gave no answer, which ends the request unless a busy one's is there `instead`.
    fn failed(&mut self, target: &TargetOf<P>, error: Option<AnswerError>, instead: bool) -> Reply {
        if instead {
            self.pass_over(Event::Lost { position: target.position });
            return self.no_answer(error);
        }
        self.died(target.position, error)
    }

    /// The answer is there. Where the request is still on its way, both go on together, and the endpoint's connection is
    /// good for another request only if all of this one got there.
    pub(super) async fn answered(
        &mut self,
        mut held: Box<Held<B, P>>,
        mut upload: Upload<'_>,
    ) -> Result<Walked<B, P>, End> {
        upload.answered();
        if upload.is_sent() {
            self.client.received();
        }
        if upload.ended_at().is_some() {
            held.spoilt = !upload.is_sent();
            return Ok(Walked::Answer(held));
        }
        let after = Box::pin(self.relay(&mut held, Some(&mut upload))).await?;
        if upload.is_sent() {
            drop(upload);
            self.keep(*held);
        }
        Ok(Walked::Done(after))
    }

    pub(super) fn then(&self) -> Then<'a> {
        Then {
            alarm: &self.client.alarm,
            phase: &self.client.phase,
            first_byte: match self.part {
                Part::Whole => self.terms.limits.first_byte.map(|limit| (limit, Limit::FirstByte)),
                Part::Prefill { .. } => None,
                Part::Decode(Decoding { first_byte, .. }) => first_byte.map(|limit| (limit, Limit::Decode)),
            },
            due: match self.part {
                Part::Prefill { due } => due.map(|due| (due, Limit::Prefill)),
                _ => None,
            },
            waits: if matches!(self.part, Part::Prefill { .. }) { Phase::Prefill } else { Phase::Wait },
            total: self.total,
        }
    }

    /// What the client is told where an endpoint gave no answer.
    pub(super) fn no_answer(&self, error: Option<AnswerError>) -> Reply {
        let code = match (self.part, error) {
            (Part::Prefill { .. }, _) => "pd_prefill_backend_died",
            (Part::Decode(_), _) => DECODE_DIED,
            (Part::Whole, None) => "backend_died",
            (Part::Whole, Some(_)) => "backend_bad_answer",
        };
        match error {
            None => Reply::error(502, code, "the endpoint closed the connection without an answer"),
            Some(error) => Reply::error(502, code, &format!("the endpoint's answer is malformed: {error}")),
        }
    }

    pub(super) fn died(&mut self, position: usize, error: Option<AnswerError>) -> Reply {
        let reply = self.no_answer(error);
        self.report(Event::Died { position, status: reply.status() });
        reply
    }

    /// A fresh connection to an endpoint.
    async fn connect(&mut self, target: &TargetOf<P>) -> Result<Result<Leg<B::Stream>, ConnectFailure>, End> {
        let since = self.client.has_entry().then(clock::now);
        let connect = self.client.lane().fresh_leg(&target.addresses, self.terms.limits.connect);
        let connected = self.client.watch(None, Box::pin(connect)).await;
        self.note_connect(since);
        Ok(connected?.inspect(|leg| self.note_endpoint(leg, target.position)))
    }

    /// An endpoint with a connection to it: `next`, else the rule's choice, and where that cannot be reached another,
    /// until nobody is left.
    pub(super) async fn reach(
        &mut self,
        tried: &mut Vec<usize>,
        mut next: Option<TargetOf<P>>,
        reuse: bool,
    ) -> Result<Reached<B, P>, End> {
        self.client.phase.set(Phase::Connect);
        self.arm_unsent();
        let mut began = self.client.lane().now();
        let (mut failed, mut ours) = (0, false);
        loop {
            self.check_lease()?;
            let mut next = next.take().or_else(|| self.choose(tried));
            if next.is_none() && !ours {
                // Boxed: hardly any request waits, and those that do have time.
                next = Box::pin(self.stand_in_line(tried)).await?;
                began = self.client.lane().now();
            }
            let Some(target) = next else { return Err(nobody(failed, ours).into()) };
            if failed > 0 {
                self.client.retried(Retry::Connect);
            }
            if reuse && let Some(leg) = self.client.lane().waiting_leg(&target.addresses, began) {
                self.note_endpoint(&leg, target.position);
                return Ok((leg, target));
            }
            let failure = match self.connect(&target).await? {
                Ok(leg) => return Ok((leg, target)),
                Err(failure) => failure,
            };
            if failure == ConnectFailure::Ours {
                // Ports run out for one endpoint, and may be there for another.
                self.pass_over(Event::Unasked { position: target.position });
                ours = true;
            } else {
                self.pass_over(Event::ConnectFailed { position: target.position, failure });
            }
            tried.push(target.position);
            failed += 1;
            if failed >= CONNECTS_LEAST && clock::now() > began + CONNECTING_MAX {
                return Err(self.too_long(failed, ours).into());
            }
        }
    }
}

impl<B: Backend, P: Backplane> Walk<'_, '_, B, P> {
    /// Connecting has taken too long already for another endpoint.
    fn too_long(&self, failed: u32, ours: bool) -> Reply {
        match self.part {
            Part::Whole => nobody(failed, ours),
            _ if ours => nobody(failed, ours),
            Part::Prefill { .. } => {
                Reply::error(503, "pd_pool_unavailable", "no prefill endpoint could be reached in time")
            }
            Part::Decode(_) => Reply::error(503, "pd_pool_unavailable", "no decode endpoint could be reached in time"),
        }
    }
}

/// Nobody has a better answer than the endpoint that was busy, if there was one.
pub(super) fn fall_back<B: Backend, P: Backplane>(
    busy: Option<Box<Held<B, P>>>,
    reply: Reply,
) -> Result<Walked<B, P>, End> {
    busy.map(Walked::Answer).ok_or_else(|| reply.into())
}

/// After so many failures to connect, some of them perhaps by a lack of ours.
fn nobody(failed: u32, ours: bool) -> Reply {
    if ours {
        Reply::error(503, "out_of_resources", "the proxy has no file descriptor, port or memory left")
    } else if failed > 0 {
        Reply::error(502, "backend_unreachable", "no endpoint of the rule could be reached")
    } else {
        Reply::error(503, "no_healthy_backend", "the rule has no endpoint that may be asked")
    }
}

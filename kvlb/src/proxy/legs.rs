//! A request in two legs: one endpoint computes its prompt, another fetches the blocks and generates.
//!
//! What is sent twice, and when: the prefill leg goes to another prefill endpoint whenever one did not do it, since the client
//! sees nothing of that; the decode leg as any request, while the prefill endpoint surely keeps the blocks. When that time is
//! over and nobody has begun to decode, and where a used connection ended without a word, so that an endpoint may have fetched
//! the blocks, both legs begin anew, once. A client that leaves between the two leaves blocks behind
//! that a short decode leg has freed.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::alarm::Limit;
use super::answer::{Heard, HeardHead};
use super::backplane::{Addresses, Backplane, Body, Call, Event, LegTerms, Prefilled, Request};
use super::buffer::{Chunk, MEDIUM};
use super::client::Stop;
use super::connect::Leg;
use super::exchange::{End, decode_died};
use super::http::Reply;
use super::io::{Backend, Stream};
use super::lane::Lane;
use super::meter::{Direction, Retry};
use super::timer::timeout;
use super::upload::{Parcel, Upload, send_whole};
use super::walk::{Decoding, Held, Part, SENDS_MAX, STALE_WITHIN, TargetOf, Walk, Walked, fall_back};
use crate::clock;
use crate::telemetry::access;

/// Times that both legs are begun at most.
const ROUNDS_MAX: u32 = 2;
/// Bytes of a prefill leg's answer: a million tokens in blocks of one take twelve.
const ANSWER_MAX: usize = 32 << 20;
/// How long the decode leg that frees blocks may take.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);

/// A request that goes out in two legs.
#[derive(Debug)]
pub(super) struct TwoLegs {
    /// Its body is here, whole.
    pub(super) request: Arc<Request>,
    pub(super) terms: LegTerms,
}

impl TwoLegs {
    fn body(&self) -> &[u8] {
        match self.request.body() {
            Body::Whole(body) => body,
            Body::Unseen(_) => &[],
        }
    }
}

/// A prefill leg that is done: what the decode leg begins with.
struct Prefill {
    body: Vec<u8>,
    decoding: Decoding,
}

/// How one try of a prefill leg ended.
enum Try<B: Backend, P: Backplane> {
    /// It is done.
    Done(Prefill),
    /// With an answer for the client.
    Walked(Walked<B, P>),
    /// A reused connection ended before any byte of an answer.
    Stale(TargetOf<P>),
    /// The endpoint said that it failed, or that it has not started.
    Refused(Box<Held<B, P>>),
    /// The endpoint is gone, or makes no sense.
    Failed(Reply),
}

impl<B: Backend, P: Backplane> Walk<'_, '_, B, P> {
    pub(super) async fn run_legs(&mut self, legs: TwoLegs) -> Result<Walked<B, P>, End> {
        let mut fresh = false;
        for round in 1.. {
            self.part = Part::Prefill { due: None };
            let Prefill { body, decoding } = match self.prefill(&legs).await {
                Ok(Ok(prefill)) => prefill,
                Ok(Err(walked)) => return Ok(walked),
                Err(end) => return Err(instead(end, fresh)),
            };
            self.part = Part::Decode(Decoding { fresh, ..decoding });
            self.position = None;
            let parcel = self.client.parcel(&legs.request.head, &self.terms, &body, false).await;
            drop(body);
            match self.send_until_answered(parcel.with_fields(legs.terms.fields.as_bytes())).await {
                Err(End::Stopped(Stop::TimedOut(Limit::Handoff))) if round < ROUNDS_MAX && !self.is_over() => {
                    self.client.retried(Retry::Handoff);
                    self.let_go();
                    self.call.start_over();
                }
                Err(End::Stale) if round < ROUNDS_MAX => {
                    // Blocks are fetched once: whoever may have begun leaves none for another.
                    self.client.retried(Retry::StaleConnection);
                    self.let_go();
                    self.call.start_over();
                    fresh = true;
                }
                Err(end) if self.leaves_blocks(&end) => {
                    self.release(&legs).await;
                    return Err(instead(end, fresh));
                }
                Ok(Walked::Answer(held)) if held.answer.head.is_busy() && self.check_lease().is_ok() => {
                    // Nobody has begun to decode, the client gets this answer, and the blocks are still there.
                    self.release(&legs).await;
                    return Ok(Walked::Answer(held));
                }
                walked => return walked.map_err(|end| instead(end, fresh)),
            }
        }
        unreachable!("the last round returns")
    }

    /// An endpoint that was chosen has not been asked, and will not be.
    fn let_go(&mut self) {
        if let Some(position) = self.position {
            self.pass_over(Event::Unasked { position });
        }
    }

    /// Whether a decode leg that ends so was never sent, and the blocks are still there: what a decode engine fetches from
    /// freed ones it would hold for the prompt's.
    fn leaves_blocks(&self, end: &End) -> bool {
        let kept = match end {
            End::Stopped(stop) => !matches!(stop, Stop::Ordered | Stop::TimedOut(Limit::Handoff)),
            End::Reply(_) => true,
            End::Quiet | End::Stale | End::BrokenOff { .. } => false,
        };
        kept && !self.is_sent() && !self.is_over()
    }

    fn is_sent(&self) -> bool {
        matches!(self.part, Part::Decode(Decoding { is_sent: true, .. }))
    }

    /// Has one endpoint compute the prompt, or finds an answer for the client.
    async fn prefill(&mut self, legs: &TwoLegs) -> Result<Result<Prefill, Walked<B, P>>, End> {
        let (mut tried, mut sends, mut asked) = (Vec::new(), 0, None);
        let mut refused: Option<Box<Held<B, P>>> = None;
        let mut reached = self.reach(&mut tried, None, true).await?;
        loop {
            sends += 1;
            let (leg, target) = reached;
            let position = target.position;
            let (next, reuse) = match self.try_prefill(leg, target, legs, &mut asked).await? {
                Try::Done(prefill) => return Ok(Ok(prefill)),
                Try::Walked(walked) => return Ok(Err(walked)),
                Try::Stale(target) => {
                    self.client.retried(Retry::StaleConnection);
                    (target, false)
                }
                failed => {
                    tried.push(position);
                    let reply = match failed {
                        Try::Refused(mut held) => {
                            let status = held.answer.head.status;
                            self.pass_over(if held.answer.head.is_busy() {
                                Event::Busy { position, status }
                            } else {
                                Event::PrefillFailed { position, status: Some(status) }
                            });
                            held.target.guard = None;
                            refused = Some(held);
                            None
                        }
                        Try::Failed(reply) => {
                            self.pass_over(Event::PrefillFailed { position, status: None });
                            Some(reply)
                        }
                        Try::Done(_) | Try::Walked(_) | Try::Stale(_) => None,
                    };
                    let other = if sends < SENDS_MAX { self.other_prefill(&tried) } else { None };
                    let Some(other) = other else {
                        return match (refused, reply) {
                            (Some(held), _) => Ok(Err(Walked::Answer(held))),
                            (None, reply) => {
                                self.note(|record| record.ended(access::End::EndpointDied));
                                Err(reply.unwrap_or_else(|| self.no_answer(None)).into())
                            }
                        };
                    };
                    // The last try must not be spent on a connection that may be stale.
                    (other, sends + 1 < SENDS_MAX)
                }
            };
            self.part = Part::Prefill { due: None };
            reached = match self.reach(&mut tried, Some(next), reuse).await {
                Err(End::Reply(reply)) => return fall_back(refused, reply).map(Err),
                reached => reached?,
            };
        }
    }

    fn other_prefill(&mut self, tried: &[usize]) -> Option<TargetOf<P>> {
        let other = self.choose(tried)?;
        if !self.call.may_retry() {
            self.pass_over(Event::Unasked { position: other.position });
            return None;
        }
        self.client.retried(Retry::Prefill);
        Some(other)
    }

    async fn try_prefill(
        &mut self,
        leg: Leg<B::Stream>,
        target: TargetOf<P>,
        legs: &TwoLegs,
        asked: &mut Option<Instant>,
    ) -> Result<Try<B, P>, End> {
        let body = self.call.prefill_body(legs.body());
        let parcel = self.client.parcel(&legs.request.head, &self.terms, &body, true).await;
        drop(body);
        let mut parcel = parcel.with_fields(legs.terms.fields.as_bytes());
        parcel.direct(&target.request_fields);
        let began = clock::now();
        self.part = Part::Prefill { due: Some(began + legs.terms.prefill) };
        let send = pin!(send_whole(self.client, Rc::clone(&leg.stream), parcel));
        let mut upload = Upload::new(send, self.then());
        self.client.phase.set(super::backplane::Phase::Prefill);
        self.arm_pause();
        let heard = match self.hear(&leg, &target, &mut upload).await? {
            Heard::Head(heard) => heard,
            Heard::Silence if leg.reused && clock::now() < began + STALE_WITHIN => {
                leg.stream.abort();
                drop(upload.into_parcel().await);
                return Ok(Try::Stale(target));
            }
            Heard::Silence | Heard::BrokenOff => return Ok(Try::Failed(self.no_answer(None))),
            Heard::Nonsense(error) => return Ok(Try::Failed(self.no_answer(Some(error)))),
        };
        let status = heard.head.status;
        if status >= 500 || heard.head.is_busy() {
            // A connection that still takes the request is good for nothing else.
            let mut held = Held::new(leg, target, heard);
            held.spoilt = !upload.is_sent();
            return Ok(Try::Refused(held));
        }
        if !(200..300).contains(&status) {
            return self.answered(Held::new(leg, target, heard), upload).await.map(Try::Walked);
        }
        let asked = *asked.get_or_insert(upload.ended_at().unwrap_or(began));
        let is_sent = upload.is_sent();
        drop(upload);
        let done = self.collect_prefill(&leg, &target, heard, legs, (began, asked)).await?;
        if matches!(done, Try::Done(_)) && is_sent {
            self.client.lane().keep_leg(leg, self.client.lane().now());
        }
        Ok(done)
    }

    /// Takes in the answer of a prefill leg.
    async fn collect_prefill(
        &mut self,
        leg: &Leg<B::Stream>,
        target: &TargetOf<P>,
        HeardHead { head, bytes, .. }: HeardHead,
        legs: &TwoLegs,
        (began, asked): (Instant, Instant),
    ) -> Result<Try<B, P>, End> {
        let position = target.position;
        let Some(answer) = self.collect(&leg.stream, &head, bytes, position, ANSWER_MAX).await? else {
            return Ok(Try::Failed(self.no_answer(None)));
        };
        if !head.keep_alive {
            leg.stream.abort();
        }
        let now = clock::now();
        let took = now.saturating_duration_since(began);
        self.note_prefill(leg, position, took);
        let handed = self.call.hand_over(&Prefilled { position, took, answer: &answer }, legs.body());
        let decoding = Decoding {
            first_byte: legs.terms.decode,
            lease: now + legs.terms.handoff,
            asked,
            is_sent: false,
            fresh: false,
            cached: handed.cached_tokens,
        };
        Ok(Try::Done(Prefill { body: handed.body, decoding }))
    }

    /// The client has left, or is refused, and nobody will fetch what the prefill endpoint keeps: a short decode leg has it freed.
    async fn release(&mut self, legs: &TwoLegs) {
        self.let_go();
        let Some(body) = self.call.release_body(legs.body()) else { return };
        let Some(target) = self.choose(&[]) else { return };
        let position = target.position;
        let parcel = self.client.parcel(&legs.request.head, &self.terms, &body, true).await;
        let mut parcel = parcel.with_fields(legs.terms.fields.as_bytes());
        let fields = [target.request_fields.as_slice(), b"connection: close\r\n"].concat();
        parcel.direct(&fields);
        self.pass_over(Event::Unasked { position });
        let lane = self.client.lane_handle();
        tokio::task::spawn_local(async move {
            let released = timeout(RELEASE_LIMIT, lane.ask_and_forget(&target.addresses, parcel)).await;
            tracing::debug!(
                position,
                done = matches!(released, Ok(Some(()))),
                "a prefill endpoint's blocks are released"
            );
            drop(target.guard);
        });
    }
}

/// Where an endpoint may have begun before (`begun`), that there is no other is not all there is to say.
fn instead(end: End, begun: bool) -> End {
    match end {
        End::Reply(reply) if begun && reply.status() == 503 => decode_died().into(),
        end => end,
    }
}

impl<B: Backend, P: Backplane> Lane<B, P> {
    /// Sends a request for its effect.
    async fn ask_and_forget(&self, addresses: &Addresses, parcel: Parcel) -> Option<()> {
        let leg = self.fresh_leg(addresses, RELEASE_LIMIT).await.ok()?;
        let (sent, bytes) = leg.stream.write_all(parcel.into_bytes()).await;
        sent.ok()?;
        self.meter.relayed(Direction::ToEndpoint, bytes.len() as u64);
        let mut chunk = Chunk::with_room(0, MEDIUM);
        loop {
            chunk.clear(0);
            let read;
            (read, chunk) = leg.stream.read(chunk).await;
            if read.ok()? == 0 {
                return Some(());
            }
        }
    }
}

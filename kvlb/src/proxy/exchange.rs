//! One request and its answer.
//!
//! Read the head, survey it, read the body where that is wanted, decide; then ask endpoints until one answers, and relay
//! the answer. What is sent twice, and when: a request goes to another endpoint when no connection could be opened, and
//! once when the engine itself said that it has not started (503, 429); it goes to the same endpoint again only when a
//! *reused* connection ended before a single byte of an answer. Everything else that happens after sending is final.

use std::sync::Arc;

use super::alarm::Limit;
use super::backplane::{Backplane, Event, Payload, Phase, Request};
use super::client::{After, Client, Stop};
use super::http::{ChunkError, Framing, Refusal, Reply};
use super::intake::{Read, Sending};
use super::io::{Backend, Leaving};
use super::models::asks_for_models;
use super::relay::Relay;
use super::walk::{Walk, Walked};
use crate::clock;
use crate::telemetry::access;

/// Why an exchange ended before its answer was relayed whole.
pub(super) enum End {
    /// A wait ended: see there.
    Stopped(Stop),
    /// The client closed between two requests.
    Quiet,
    /// The client gets this answer of ours.
    Reply(Reply),
    /// A connection that had been used before ended without a word on a decode leg: the endpoint may have fetched the blocks,
    /// which are gone then.
    Stale,
    /// The answer broke off where the client must see it; by a reset where only the connection's end delimits it.
    BrokenOff { reset: bool },
}

impl From<Stop> for End {
    fn from(stop: Stop) -> Self {
        Self::Stopped(stop)
    }
}

impl From<Refusal> for End {
    fn from(refusal: Refusal) -> Self {
        Self::Reply(refusal.into())
    }
}

impl From<Reply> for End {
    fn from(reply: Reply) -> Self {
        Self::Reply(reply)
    }
}

impl From<ChunkError> for End {
    fn from(_malformed: ChunkError) -> Self {
        Refusal::Chunk.into()
    }
}

/// What an exchange came to.
#[expect(clippy::large_enum_variant, reason = "the others are few, and none is kept: it goes straight to its caller")]
pub(super) enum Exchanged<'a, 's, B: Backend, P: Backplane> {
    /// An answer that is to be relayed.
    Answer(Relay<'a, 's, B, P>),
    /// Its end.
    Done(After),
}

/// What taking a request came to.
#[expect(clippy::large_enum_variant, reason = "the answered are few, and none is kept: it goes straight to its caller")]
enum Taken<'a, 's, B: Backend, P: Backplane> {
    /// It is decided, and can be sent.
    Decided(Walk<'a, 's, B, P>, Sending),
    /// It has been answered.
    Answered(After),
}

impl<'s, B: Backend, P: Backplane> Client<'s, B, P> {
    /// Takes one request and sees it through to the first bytes of its answer.
    pub(super) async fn exchange(&self) -> Exchanged<'_, 's, B, P> {
        self.begin();
        let (mut walk, sending) = match self.take_request().await {
            Ok(Taken::Decided(walk, sending)) => (walk, sending),
            Ok(Taken::Answered(after)) => return Exchanged::Done(after),
            Err(end) => return Exchanged::Done(self.conclude(end).await),
        };
        match walk.run(sending).await {
            Ok(Walked::Answer(held)) => Exchanged::Answer(Relay { walk, held }),
            Ok(Walked::Done(after)) => Exchanged::Done(after),
            Err(end) => Exchanged::Done(walk.conclude(end).await),
        }
    }

    async fn take_request(&self) -> Result<Taken<'_, 's, B, P>, End> {
        let (mut head, rest) = self.read_head().await?;
        self.learn(&head);
        self.introduce(&mut head);
        let survey = match self.lane().backplane.survey(&head, &self.arrival) {
            Ok(survey) => survey,
            Err(reply) => {
                if head.framing() == Framing::None {
                    // Nothing of it is still to come, so the connection is good for what follows.
                    self.carry_over(rest.bytes());
                    self.received();
                }
                return Err(reply.into());
            }
        };
        self.phase.set(Phase::Body);
        self.note(|record| record.request_bytes = rest.len() as u64);
        let began = self.has_entry().then(clock::now);
        let (payload, passing) = match self.read_body(&head, rest, &survey).await? {
            Read::Whole(payload) => (payload, None),
            Read::Passing(passing, why) => (Payload::Unseen(why), Some(passing)),
        };
        self.note(|record| {
            record.body = began.map(|began| clock::now().saturating_duration_since(began));
            record.request_bytes = match (&payload, &passing) {
                (Payload::Whole { body, .. }, _) => body.len() as u64,
                (_, Some(passing)) => passing.payload.len() as u64,
                (Payload::Unseen(_), None) => 0,
            };
        });
        self.alarm.set(None);
        self.phase.set(Phase::Decide);
        let request = Arc::new(Request { head, arrival: self.arrival, payload });
        if survey.client_half_close {
            self.leaving.set(Leaving::Broken);
        }
        if passing.is_none() {
            self.received();
            if asks_for_models(&request.head)
                && let Some(after) = Box::pin(self.list_models(&request)).await?
            {
                self.note(|record| {
                    record.ended(if record.code.is_empty() { access::End::Complete } else { access::End::Refused });
                });
                return Ok(Taken::Answered(after));
            }
        }
        let began = clock::now();
        let decided = self.decide(&request).await;
        self.note(|record| record.decide = Some(clock::now().saturating_duration_since(began)));
        let mut walk = Walk::new(self, decided?, began);
        self.leaving.set(if walk.terms.client_half_close { Leaving::Broken } else { Leaving::HalfClose });
        let plan = walk.plan(&request);
        let sending = self.compose(request, passing, &walk.terms, plan).await;
        Ok(Taken::Decided(walk, sending))
    }

    /// Gives the client what an end leaves it.
    async fn conclude(&self, end: End) -> After {
        self.note_end(&end);
        match end {
            End::Quiet => {
                self.forget_entry();
                After::Gone
            }
            End::Stopped(Stop::Ordered) | End::BrokenOff { reset: false } => After::Close,
            End::Stopped(Stop::Left) => {
                self.lane().meter.client_left(self.phase.get());
                After::Gone
            }
            End::Stopped(Stop::TimedOut(limit)) => Box::pin(self.reply(&timed_out(limit))).await,
            End::Stopped(Stop::Malformed) => Box::pin(self.reply(&Refusal::Chunk.into())).await,
            End::Reply(reply) => Box::pin(self.reply(&reply)).await,
            End::Stale => Box::pin(self.reply(&decode_died())).await,
            End::BrokenOff { reset: true } => After::Reset,
        }
    }
}

impl<B: Backend, P: Backplane> Walk<'_, '_, B, P> {
    /// Gives the client what an end leaves it, and tells the rule.
    pub(super) async fn conclude(&mut self, end: End) -> After {
        self.client.note_end(&end);
        self.tell(&end);
        self.client.conclude(end).await
    }

    /// Tells the rule of an end that it has not heard of yet.
    pub(super) fn tell(&mut self, end: &End) {
        if self.is_over() {
            return;
        }
        let position = self.position;
        let replied = |status| Event::Replied { position, status };
        self.report(match end {
            End::Stopped(Stop::Left) => Event::ClientLeft { position, phase: self.client.phase.get() },
            End::Stopped(Stop::TimedOut(limit)) => replied(timed_out(*limit).status()),
            End::Stopped(Stop::Malformed) => replied(Refusal::Chunk.status()),
            End::Reply(reply) => replied(reply.status()),
            End::Stale => replied(decode_died().status()),
            End::Stopped(Stop::Ordered) | End::Quiet | End::BrokenOff { .. } => Event::CutOff { position },
        });
    }
}

/// What the client is told where a decode endpoint gave no answer.
pub(super) fn decode_died() -> Reply {
    Reply::error(502, DECODE_DIED, "the endpoint closed the connection without an answer")
}

/// The word for that.
pub(super) const DECODE_DIED: &str = "pd_decode_backend_died";

pub(super) fn timed_out(limit: Limit) -> Reply {
    match limit {
        Limit::Idle | Limit::Head | Limit::Reply => {
            Reply::error(408, "request_timeout", "the request's header section did not come in time")
        }
        Limit::Body => Reply::error(408, "request_body_timeout", "the request's body did not come in time"),
        Limit::Queue => Reply::error(504, "admission_queue_timeout", "no endpoint of the rule had room in time"),
        Limit::Prefill => Reply::error(504, "pd_prefill_timeout", "the prefill endpoint did not answer in time"),
        Limit::Decode => Reply::error(504, "pd_decode_timeout", "the decode endpoint did not begin to answer in time"),
        Limit::Handoff => Reply::error(504, "pd_handoff_timeout", "no decode endpoint took the request in time"),
        Limit::FirstByte => Reply::error(504, "first_byte_timeout", "the endpoint did not begin to answer in time"),
        Limit::Pause => Reply::error(504, "idle_timeout", "the endpoint did not go on in time"),
        Limit::Total => Reply::error(504, "total_timeout", "the request took longer than its rule allows"),
    }
}

//! The way of an answer to the client: every byte as it comes.
//!
//! Most of a stream's life is spent here, so this is a small future of its own: everything that led to the answer, the
//! request's memory included, is gone by then.

use super::answer::HeardHead;
use super::backplane::{Backplane, Event, Phase};
use super::buffer::{Chunk, LARGE, MEDIUM, SMALL};
use super::client::{After, Stop};
use super::correct::Correction;
use super::exchange::End;
use super::http::{AnswerBody, AnswerError, Closing, Medium};
use super::io::{Backend, Stream};
use super::meter::Direction;
use super::upload::Upload;
use super::usage::{Tail, Usage};
use super::walk::{Decoding, Held, Part, Walk};
use crate::clock;

/// An answer that is ready to be relayed.
pub(super) struct Relay<'a, 's, B: Backend, P: Backplane> {
    pub(super) walk: Walk<'a, 's, B, P>,
    pub(super) held: Box<Held<B, P>>,
}

impl<B: Backend, P: Backplane> Relay<'_, '_, B, P> {
    /// Relays it to its end.
    pub(super) async fn run(mut self) -> After {
        match self.walk.relay(&mut self.held, None).await {
            Ok(after) => {
                self.walk.keep(*self.held);
                after
            }
            Err(end) => self.walk.conclude(end).await,
        }
    }
}

impl<B: Backend, P: Backplane> Walk<'_, '_, B, P> {
    /// Relays an answer to its end, while the rest of the request may still be on its way.
    pub(super) async fn relay(
        &mut self,
        held: &mut Held<B, P>,
        mut upload: Option<&mut Upload<'_>>,
    ) -> Result<After, End> {
        let (position, status, waited) = (held.target.position, held.answer.head.status, held.answer.waited);
        self.position = Some(position);
        self.client.phase.set(Phase::Stream);
        let body = held.answer.head.body(self.client.is_http_1_0());
        let closing = if body.is_delimited() { self.client.closing() } else { Closing::Close };
        let mut flow = Flow {
            body,
            excess: false,
            head: 0,
            passed: 0,
            pending: false,
            tail: self.tail(held),
            correction: self.correction(held),
        };
        let streams =
            self.client.has_entry() && held.answer.head.medium(held.answer.bytes.bytes()) == Some(Medium::Events);
        let mut piece = self.first_piece(held, &mut flow, closing)?;
        self.note_endpoint(&held.leg, position);
        self.note(|record| (record.status, record.wait, record.streams) = (Some(status), Some(waited), streams));
        self.report(Event::Answered { position, status, waited });
        let mut notes_body = self.client.has_entry();
        let broken = loop {
            self.arm_pause();
            if !piece.is_empty() {
                flow.passed += piece.len() as u64;
                if notes_body && flow.passed > flow.head {
                    notes_body = false;
                    self.note(|record| record.first_byte = Some(clock::now().saturating_duration_since(record.began)));
                }
                match self.client.watch(upload.as_deref_mut(), self.client.stream.write_all(piece)).await {
                    Ok((Ok(()), back)) => (piece, flow.pending) = (back, flow.holds()),
                    Ok((Err(_gone), _piece)) => break Broken::Stopped(Stop::Left),
                    // It is the client that does not take it.
                    Err(Stop::TimedOut(_)) => break Broken::Reader,
                    Err(stop) => break Broken::Stopped(stop),
                }
            }
            if flow.body.is_done() {
                return Ok(self.finished(held, flow, closing));
            }
            let room = flow.room(piece);
            match self.client.watch(upload.as_deref_mut(), held.leg.stream.read(room)).await {
                Ok((Ok(count), back)) if count > 0 => match flow.take(back) {
                    Ok(next) => piece = next,
                    Err(_malformed) => break Broken::Endpoint,
                },
                Ok((read, _piece)) => {
                    // Boxed: hardly any answer ends in a number.
                    if flow.holds()
                        && let Err(broken) = Box::pin(self.pass_held(&mut flow)).await
                    {
                        break broken;
                    }
                    if read.is_ok() && flow.body.ends_with_connection() {
                        return Ok(self.finished(held, flow, closing));
                    }
                    break Broken::Endpoint;
                }
                Err(stop) => break Broken::Stopped(stop),
            }
        };
        if matches!(broken, Broken::Stopped(Stop::Left)) && flow.has_told_all() {
            held.spoilt = true;
            self.finished(held, flow, closing);
            return Ok(After::Gone);
        }
        Err(self.broke_off(broken, position, &flow))
    }

    /// Where the answer's end is to be kept, when it is wanted and can be read.
    fn tail(&self, held: &Held<B, P>) -> Option<Box<Tail>> {
        let HeardHead { head, bytes, .. } = &held.answer;
        if !self.terms.usage || head.status != 200 {
            return None;
        }
        head.medium(bytes.bytes()).map(|medium| Box::new(Tail::new(medium)))
    }

    /// What puts the answer right, where it is a decode leg's.
    fn correction(&self, held: &Held<B, P>) -> Option<Box<Correction>> {
        let Part::Decode(Decoding { cached: Some(cached), .. }) = self.part else { return None };
        let HeardHead { head, bytes, .. } = &held.answer;
        (head.status == 200 && head.medium(bytes.bytes()).is_some()).then(|| Box::new(Correction::new(cached)))
    }

    /// The head as the client gets it, with what has come of the body behind it.
    fn first_piece(&mut self, held: &mut Held<B, P>, flow: &mut Flow, closing: Closing) -> Result<Chunk, End> {
        let mut bytes = std::mem::replace(&mut held.answer.bytes, Chunk::none());
        let mut front = self.client.lane().scratch();
        held.answer.head.write_for_client(bytes.bytes(), &mut front, &flow.body, closing, &held.target.fields);
        bytes.consume(held.answer.head.length);
        flow.head = front.len() as u64;
        let first = flow.take(bytes).map(|mut piece| {
            piece.prepend(&front);
            piece
        });
        self.client.lane().keep_scratch(front);
        let first = first.map_err(|error| self.died(held.target.position, Some(error)))?;
        self.client.lane().meter.answered(held.answer.head.status, None);
        Ok(first)
    }

    /// What waited for its rest goes on without it.
    async fn pass_held(&mut self, flow: &mut Flow) -> Result<(), Broken> {
        let held = flow.correction.as_mut().map(|correction| correction.take_held()).unwrap_or_default();
        flow.passed += held.len() as u64;
        match self.client.wait(self.client.stream.write_all(Chunk::copy_of(0, &held))).await {
            Ok((Ok(()), _chunk)) => Ok(()),
            Ok((Err(_gone), _chunk)) => Err(Broken::Stopped(Stop::Left)),
            Err(Stop::TimedOut(_)) => Err(Broken::Reader),
            Err(stop) => Err(Broken::Stopped(stop)),
        }
    }

    /// The client has all of it: only now is the end looked at.
    fn finished(&mut self, held: &mut Held<B, P>, flow: Flow, closing: Closing) -> After {
        held.spoilt |= flow.excess;
        self.note_passed(&flow);
        let told = flow.correction.as_ref().map(|correction| correction.cached());
        let usage = flow.tail.and_then(|tail| tail.usage()).map(|usage| Usage {
            cached_tokens: usage.cached_tokens.map(|cached| told.map_or(cached, |told| told.min(cached))),
            ..usage
        });
        self.report(Event::Finished { position: held.target.position, bytes: flow.passed, usage });
        self.client.after(closing)
    }

    fn note_passed(&self, flow: &Flow) {
        self.client.lane().meter.relayed(Direction::ToClient, flow.passed);
        self.note(|record| record.response_bytes = flow.passed.saturating_sub(flow.head));
    }

    /// Keeps an endpoint's connection for another request, where it is fit for one.
    pub(super) fn keep(&self, held: Held<B, P>) {
        if held.answer.head.keep_alive && !held.spoilt {
            self.client.lane().keep_leg(held.leg, self.client.lane().now());
        }
    }

    /// The client has seen the answer's beginning: whatever ended it, no answer of ours can follow.
    fn broke_off(&mut self, broken: Broken, position: usize, flow: &Flow) -> End {
        self.note_passed(flow);
        match broken {
            Broken::Stopped(Stop::Left) => return Stop::Left.into(),
            Broken::Stopped(Stop::TimedOut(limit)) if limit.is_for_endpoint() => {
                self.report(Event::TimedOut { position, status: None });
            }
            Broken::Stopped(_) | Broken::Reader => self.report(Event::CutOff { position: Some(position) }),
            Broken::Endpoint => self.report(Event::BrokeOff { position }),
        }
        End::BrokenOff { reset: !flow.body.is_delimited() }
    }
}

/// Why relaying ended before the answer did.
#[derive(Clone, Copy)]
enum Broken {
    Stopped(Stop),
    /// The client has taken nothing for too long.
    Reader,
    /// The endpoint's connection ended, or its chunks are none.
    Endpoint,
}

/// An answer's body on its way.
struct Flow {
    body: AnswerBody,
    excess: bool,
    /// Bytes of the head as the client gets it.
    head: u64,
    /// Bytes passed on, the head among them.
    passed: u64,
    /// The client may lack payload that the tail has seen.
    pending: bool,
    tail: Option<Box<Tail>>,
    correction: Option<Box<Correction>>,
}

impl Flow {
    /// Follows the body through a piece, and keeps of it what goes on.
    fn take(&mut self, mut piece: Chunk) -> Result<Chunk, AnswerError> {
        let front = piece.bytes().as_ptr().addr();
        let progress = match (&mut self.tail, &mut self.correction) {
            (None, None) => self.body.take(piece.bytes_mut())?,
            (tail, correction) => self.body.take_showing(piece.bytes_mut(), |payload| {
                self.pending |= !payload.is_empty();
                if let Some(correction) = correction {
                    correction.read(payload, payload.as_ptr().addr() - front);
                }
                if let Some(tail) = tail {
                    tail.take(payload);
                }
            })?,
        };
        self.excess |= progress.excess;
        piece.truncate(progress.pass);
        if let Some(correction) = &mut self.correction {
            correction.put_right(&mut piece, progress.done);
        }
        Ok(piece)
    }

    /// Whether payload waits that the tail has seen.
    fn holds(&self) -> bool {
        self.correction.as_ref().is_some_and(|correction| correction.holds())
    }

    /// Whether the client has a stream's last event, so that nothing that is missing would tell it more: openai's leaves then.
    /// Where the tail is not wanted, nobody knows.
    fn has_told_all(&mut self) -> bool {
        !self.pending && self.tail.as_mut().is_some_and(|tail| tail.is_done())
    }

    /// Room for the next piece: small while pieces are, so that a waiting stream holds little.
    fn room(&self, last: Chunk) -> Chunk {
        let wanted = match self.body.left() {
            Some(left) => usize::try_from(left).unwrap_or(usize::MAX).min(LARGE),
            None if last.spare() == 0 && last.capacity() < MEDIUM => MEDIUM,
            None if last.spare() == 0 => LARGE,
            None => SMALL,
        };
        let mut last = last;
        last.clear(0);
        if last.capacity() >= wanted && last.capacity() < 4 * wanted { last } else { Chunk::with_room(0, wanted) }
    }
}

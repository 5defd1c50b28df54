//! The way of an answer: its head, then every byte as it comes.

use std::time::Duration;

use super::alarm::Limit;
use super::backplane::{Backplane, Call, Event, Phase};
use super::buffer::{Chunk, LARGE, MEDIUM, SMALL};
use super::client::{After, Stop};
use super::connect::Leg;
use super::exchange::End;
use super::http::{AnswerBody, AnswerError, AnswerHead, Closing, HEAD_MAX, HeadScan};
use super::io::{Backend, Stream};
use super::meter::Direction;
use super::upload::Upload;
use super::walk::{Held, TargetOf, Walk};
use crate::clock;

/// Room in front of an answer for what its head grows by on the way; more moves it to another block.
const ANSWER_FRONT: usize = 256;
/// Interim answers to one request: nobody sends more than a few.
const INTERIMS_MAX: u32 = 16;

/// An answer's head as it came.
pub(super) struct HeardHead {
    pub(super) head: AnswerHead,
    /// Its bytes, and what has come behind them.
    pub(super) bytes: Chunk,
    /// From the end of the request to here.
    pub(super) waited: Duration,
}

/// What came of waiting for an answer's head.
pub(super) enum Heard {
    /// A head that is final.
    Head(HeardHead),
    /// The connection ended before any byte.
    Silence,
    /// The connection ended in the head.
    BrokenOff,
    /// No head that could be relayed.
    Nonsense(AnswerError),
}

impl<B: Backend, P: Backplane> Walk<'_, '_, B, P> {
    /// Waits for the head of the answer, while the request is still on its way.
    pub(super) async fn hear(
        &mut self,
        leg: &Leg<B::Stream>,
        target: &TargetOf<P>,
        upload: &mut Upload<'_>,
    ) -> Result<Heard, End> {
        let mut bytes = Chunk::with_room(ANSWER_FRONT, SMALL - ANSWER_FRONT);
        let (mut scan, mut interims) = (HeadScan::default(), 0);
        loop {
            let head = if bytes.is_empty() { Ok(None) } else { scan.answer(bytes.bytes(), self.client.is_to_head()) };
            match head {
                Err(error) => return Ok(Heard::Nonsense(error)),
                Ok(Some(head)) if head.is_interim() => {
                    interims += 1;
                    if interims > INTERIMS_MAX {
                        return Ok(Heard::Nonsense(AnswerError::Syntax));
                    }
                    self.pass_interim(&head, &bytes).await?;
                    bytes.consume(head.length);
                    scan = HeadScan::default();
                    continue;
                }
                Ok(Some(head)) => {
                    let waited = clock::now().saturating_duration_since(upload.ended_at().unwrap_or(self.began));
                    return Ok(Heard::Head(HeardHead { head, bytes, waited }));
                }
                Ok(None) => {}
            }
            if bytes.spare() == 0 {
                bytes.reserve(bytes.len().min(HEAD_MAX));
            }
            let read = self.client.watch(Some(upload), leg.stream.read(bytes)).await;
            let (read, back) = read.map_err(|stop| self.stopped(stop, target.position))?;
            bytes = back;
            match read {
                Ok(count) if count > 0 => self.arm_pause(),
                _end_or_error if bytes.is_empty() && interims == 0 => return Ok(Heard::Silence),
                _end_or_error => return Ok(Heard::BrokenOff),
            }
        }
    }

    /// Tells the rule when it was the endpoint that made a wait end.
    fn stopped(&mut self, stop: Stop, position: usize) -> End {
        if matches!(stop, Stop::TimedOut(Limit::FirstByte | Limit::Pause | Limit::Total)) {
            self.call.report(Event::TimedOut { position });
        }
        stop.into()
    }

    /// Passes an interim answer on to a client that can make sense of it.
    async fn pass_interim(&self, head: &AnswerHead, bytes: &Chunk) -> Result<(), End> {
        let client = self.client;
        if client.is_http_1_0() {
            return Ok(());
        }
        if head.status == 100 {
            return if client.waits_to_send() { client.send_continue().await } else { Ok(()) };
        }
        let mut out = Vec::with_capacity(head.length);
        head.write_for_client(bytes.bytes(), &mut out, &AnswerBody::Length(0), Closing::KeepAlive, &[]);
        match client.wait(client.stream.write_all(Chunk::copy_of(0, &out))).await? {
            (Ok(()), _chunk) => Ok(()),
            (Err(_gone), _chunk) => Err(Stop::Left.into()),
        }
    }

    /// Relays an answer to its end.
    pub(super) async fn relay(&mut self, held: Held<B, P>, upload: Option<Upload<'_>>) -> Result<After, End> {
        let Held { leg, target, answer: HeardHead { head, bytes, waited } } = held;
        let (position, status) = (target.position, head.status);
        self.call.report(Event::Answered { position, status, waited });
        let mut upload = upload;
        if let Some(upload) = &mut upload {
            upload.answered();
            if upload.is_sent() {
                self.client.received();
            }
        }
        self.client.phase.set(Phase::Stream);
        let body = head.body(self.client.is_http_1_0());
        let closing = if body.is_delimited() { self.client.closing() } else { Closing::Close };
        let mut front = self.client.lane().scratch();
        head.write_for_client(bytes.bytes(), &mut front, &body, closing, &target.fields);
        let mut flow = Flow { body, excess: false, passed: 0 };
        let first = flow.first(&head, bytes, &front);
        self.client.lane().keep_scratch(front);
        let first = first.map_err(|error| self.died(position, Some(error)))?;
        self.client.lane().meter.answered(status, None);
        let relayed = self.pass(&leg, first, &mut flow, upload.as_mut()).await;
        self.client.lane().meter.relayed(Direction::ToClient, flow.passed);
        relayed.map_err(|stop| self.broke_off(stop, position, &flow))?;
        self.call.report(Event::Finished { position, bytes: flow.passed });
        let sent = upload.as_ref().is_none_or(Upload::is_sent);
        drop(upload);
        if head.keep_alive && !flow.excess && sent {
            self.client.lane().keep_leg(leg, clock::now());
        }
        Ok(self.client.after(closing))
    }

    /// Passes everything on as it comes: one piece is read when the one before it has been taken.
    async fn pass(
        &mut self,
        leg: &Leg<B::Stream>,
        first: Chunk,
        flow: &mut Flow,
        mut upload: Option<&mut Upload<'_>>,
    ) -> Result<(), Broken> {
        let mut piece = first;
        loop {
            self.arm_pause();
            if !piece.is_empty() {
                flow.passed += piece.len() as u64;
                let write = self.client.stream.write_all(piece);
                let (written, back) = self.client.watch(upload.as_deref_mut(), write).await?;
                piece = back;
                written.map_err(|_gone| Broken::Stopped(Stop::Left))?;
            }
            if flow.body.is_done() {
                return Ok(());
            }
            piece = flow.room(piece);
            let read = self.client.watch(upload.as_deref_mut(), leg.stream.read(piece)).await?;
            piece = match read {
                (Ok(count), piece) if count > 0 => flow.next(piece)?,
                (Ok(_end), _piece) if flow.body.ends_with_connection() => return Ok(()),
                (_end_or_error, _piece) => return Err(Broken::Endpoint),
            };
        }
    }

    /// The client has seen the answer's beginning: whatever ended it, no answer of ours can follow.
    fn broke_off(&mut self, broken: Broken, position: usize, flow: &Flow) -> End {
        match broken {
            Broken::Stopped(Stop::Left) => return Stop::Left.into(),
            Broken::Stopped(Stop::TimedOut(_)) => self.call.report(Event::TimedOut { position }),
            Broken::Stopped(Stop::Ordered | Stop::Malformed) => {}
            Broken::Endpoint => self.call.report(Event::BrokeOff { position }),
        }
        End::BrokenOff { reset: !flow.body.is_delimited() }
    }
}

/// Why relaying ended before the answer did.
#[derive(Clone, Copy)]
enum Broken {
    Stopped(Stop),
    /// The endpoint's connection ended, or its chunks are none.
    Endpoint,
}

impl From<Stop> for Broken {
    fn from(stop: Stop) -> Self {
        Self::Stopped(stop)
    }
}

/// An answer's body on its way.
struct Flow {
    body: AnswerBody,
    excess: bool,
    passed: u64,
}

impl Flow {
    /// The head as the client gets it, with what came of the body behind it: one piece.
    fn first(&mut self, head: &AnswerHead, mut bytes: Chunk, front: &[u8]) -> Result<Chunk, AnswerError> {
        bytes.consume(head.length);
        let mut piece = self.take(bytes)?;
        piece.prepend(front);
        Ok(piece)
    }

    fn next(&mut self, piece: Chunk) -> Result<Chunk, Broken> {
        self.take(piece).map_err(|_malformed| Broken::Endpoint)
    }

    fn take(&mut self, mut piece: Chunk) -> Result<Chunk, AnswerError> {
        let progress = self.body.take(piece.bytes_mut())?;
        self.excess |= progress.excess;
        piece.truncate(progress.pass);
        Ok(piece)
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
        if last.capacity() >= wanted && last.capacity() < 5 * wanted { last } else { Chunk::with_room(0, wanted) }
    }
}

//! Waiting for an answer: its head, and what may come before it.

use std::time::Duration;

use super::backplane::{Backplane, Event};
use super::buffer::{Chunk, LARGE, SMALL};
use super::client::Stop;
use super::connect::Leg;
use super::exchange::{End, timed_out};
use super::http::{AnswerBody, AnswerError, AnswerHead, Closing, HEAD_MAX, HeadScan};
use super::io::{Backend, Stream};
use super::upload::Upload;
use super::walk::{Decoding, Part, TargetOf, Walk};
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
                    let asked = match self.part {
                        Part::Decode(Decoding { asked, .. }) => asked,
                        _ => upload.ended_at().unwrap_or(self.began),
                    };
                    let waited = clock::now().saturating_duration_since(asked);
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

    /// The whole body of an answer; `None` where it is cut off, makes no sense or is longer than `max`.
    pub(super) async fn collect(
        &mut self,
        stream: &B::Stream,
        head: &AnswerHead,
        bytes: Chunk,
        position: usize,
        max: usize,
    ) -> Result<Option<Vec<u8>>, End> {
        let mut body = head.body(true);
        let (mut whole, mut piece) = (Vec::new(), bytes);
        piece.consume(head.length);
        loop {
            let Ok(progress) = body.take(piece.bytes_mut()) else { return Ok(None) };
            piece.truncate(progress.pass);
            whole.extend_from_slice(piece.bytes());
            if progress.done || whole.len() > max {
                return Ok((whole.len() <= max).then_some(whole));
            }
            self.arm_pause();
            let room = Chunk::with_room(0, LARGE);
            let read = self.client.watch(None, stream.read(room)).await;
            piece = match read.map_err(|stop| self.stopped(stop, position))? {
                (Ok(count), piece) if count > 0 => piece,
                (Ok(_end), _piece) if body.ends_with_connection() => return Ok(Some(whole)),
                (_end_or_error, _piece) => return Ok(None),
            };
        }
    }

    /// Tells the rule when it was the endpoint that made a wait end.
    pub(super) fn stopped(&mut self, stop: Stop, position: usize) -> End {
        if let Stop::TimedOut(limit) = stop
            && limit.is_for_endpoint()
        {
            self.report(Event::TimedOut { position, status: Some(timed_out(limit).status()) });
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
}

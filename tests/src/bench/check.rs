//! Whether an answer is, byte for byte, what it must be.

use std::fmt;

use serde_json::Value;

use super::framing::{self, Body, Chunks, Head, Malformed};
use super::statistics::Histogram;
use super::wire;

/// What a right answer looks like.
#[derive(Debug)]
pub(super) enum Expected {
    /// These bytes.
    Json(Vec<u8>),
    /// So many events, and the end of the stream.
    Events(usize),
    /// An engine's completion of one token, with most of the prompt from its cache.
    Completion,
}

/// What is wrong with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// No connection.
    Unconnected,
    /// The connection ended before the answer did.
    Closed,
    /// Another status than 200.
    Status(u16),
    /// No HTTP/1.1.
    Framing,
    /// The mock read another body than was sent.
    RequestBytes,
    /// Other bytes than the mock sends.
    AnswerBytes,
    /// Fewer or more bytes than the mock sends.
    Length,
    /// The engine computed a prompt that it should have had in its cache.
    Cold,
}

impl Fault {
    /// Whether bytes came that nobody sent; the others are answers that did not come.
    pub(super) fn is_wrong_byte(self) -> bool {
        matches!(self, Self::Framing | Self::RequestBytes | Self::AnswerBytes | Self::Length)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unconnected => "no connection",
            Self::Closed => "closed before the end of the answer",
            Self::Status(status) => return write!(f, "status {status}"),
            Self::Framing => "broken framing",
            Self::RequestBytes => "the request's bytes were changed",
            Self::AnswerBytes => "the answer's bytes were changed",
            Self::Length => "the answer has another length",
            Self::Cold => "the engine did not have the prompt",
        })
    }
}

/// How far an answer has come.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// There is more to come.
    Open,
    /// It is complete; the connection stays open unless said otherwise.
    Complete { closes: bool },
}

/// An answer on its way.
#[derive(Debug, Default)]
pub(super) struct Answer {
    head: Option<Head>,
    /// A head that is not all there.
    held: Vec<u8>,
    chunks: Chunks,
    payload: Payload,
}

/// What checks the bytes of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checks<'a> {
    pub(super) expected: &'a Expected,
    /// One event with nothing in its places.
    pub(super) event: &'a [u8],
    /// The hash that the answer must echo; None where a proxy may write the request anew.
    pub(super) hash: Option<&'a str>,
}

impl Answer {
    /// Ready for the next answer; memory is kept.
    pub(super) fn reset(&mut self) {
        self.head = None;
        self.held.clear();
        self.chunks = Chunks::default();
        self.payload.received = 0;
        self.payload.held.clear();
    }

    /// Takes what was received at `time`, and keeps how long each event took.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        checks: Checks<'_>,
        time: u64,
        latencies: &mut Histogram,
    ) -> Result<Progress, Fault> {
        let Some(head) = &self.head else { return self.take_head(bytes, checks, time, latencies) };
        let (body, closes) = (head.body, head.closes);
        let payload = &mut self.payload;
        let ended = match body {
            Body::Length(length) => {
                payload.take(bytes, checks, time, latencies)?;
                if payload.received > length {
                    return Err(Fault::Length);
                }
                payload.received == length
            }
            Body::Chunked => {
                let mut outcome = Ok(());
                let piece = |piece: &[u8]| {
                    if outcome.is_ok() {
                        outcome = payload.take(piece, checks, time, latencies);
                    }
                };
                let rest = self.chunks.feed(bytes, piece).map_err(|Malformed| Fault::Framing)?;
                outcome?;
                if rest.is_some_and(|rest| !rest.is_empty()) {
                    return Err(Fault::Length);
                }
                rest.is_some()
            }
            Body::Closed => {
                payload.take(bytes, checks, time, latencies)?;
                false
            }
        };
        if !ended {
            return Ok(Progress::Open);
        }
        self.payload.finish(checks)?;
        Ok(Progress::Complete { closes })
    }

    /// The connection has ended.
    pub(super) fn end(&self, checks: Checks<'_>) -> Result<Progress, Fault> {
        match &self.head {
            Some(head) if head.body == Body::Closed => {
                self.payload.finish(checks)?;
                Ok(Progress::Complete { closes: true })
            }
            _ => Err(Fault::Closed),
        }
    }

    fn take_head(
        &mut self,
        bytes: &[u8],
        checks: Checks<'_>,
        time: u64,
        latencies: &mut Histogram,
    ) -> Result<Progress, Fault> {
        let mut begun = std::mem::take(&mut self.held);
        let all = if begun.is_empty() {
            bytes
        } else {
            begun.extend_from_slice(bytes);
            &begun
        };
        let Some(whole) = framing::answer(all).map_err(|Malformed| Fault::Framing)? else {
            self.held = if begun.is_empty() { bytes.to_vec() } else { begun };
            return Ok(Progress::Open);
        };
        if whole.status != 200 {
            return Err(Fault::Status(whole.status));
        }
        let echo = whole.body_hash.as_ref().map(<[u8; 16]>::as_slice);
        if checks.hash.is_some_and(|hash| echo != Some(hash.as_bytes())) {
            return Err(Fault::RequestBytes);
        }
        let body = &all[whole.len..];
        self.head = Some(whole);
        // An empty rest may still be the end of an empty body.
        self.take(body, checks, time, latencies)
    }
}

/// The body so far, without its framing.
#[derive(Debug, Default)]
struct Payload {
    received: usize,
    /// An event that is not all there, or all of a completion.
    held: Vec<u8>,
}

impl Payload {
    fn take(&mut self, bytes: &[u8], checks: Checks<'_>, time: u64, latencies: &mut Histogram) -> Result<(), Fault> {
        match checks.expected {
            Expected::Json(whole) => {
                let place = whole.get(self.received..self.received + bytes.len()).ok_or(Fault::Length)?;
                self.received += bytes.len();
                if place == bytes { Ok(()) } else { Err(Fault::AnswerBytes) }
            }
            Expected::Completion => {
                self.received += bytes.len();
                self.held.extend_from_slice(bytes);
                Ok(())
            }
            Expected::Events(count) => self.take_events(*count, bytes, checks, time, latencies),
        }
    }

    fn take_events(
        &mut self,
        count: usize,
        bytes: &[u8],
        checks: Checks<'_>,
        time: u64,
        latencies: &mut Histogram,
    ) -> Result<(), Fault> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let number = self.received / checks.event.len();
            let (begin, end) = match number {
                number if number < count => (number * checks.event.len(), (number + 1) * checks.event.len()),
                _ => (count * checks.event.len(), count * checks.event.len() + wire::DONE.len()),
            };
            let (piece, behind) = rest.split_at(rest.len().min(end - self.received));
            if piece.is_empty() {
                return Err(Fault::Length);
            }
            rest = behind;
            self.received += piece.len();
            // Most events come whole, and are checked where they lie.
            if self.received < end || piece.len() < end - begin {
                self.held.extend_from_slice(piece);
                if self.received < end {
                    continue;
                }
            }
            let event = if self.held.is_empty() { piece } else { &self.held };
            let right = if number < count {
                let sent = wire::number(&event[wire::EVENT_TIME]);
                latencies.add(time.saturating_sub(sent));
                is_event(event, number, checks.event)
            } else {
                event == wire::DONE
            };
            self.held.clear();
            if !right {
                return Err(Fault::AnswerBytes);
            }
        }
        Ok(())
    }

    fn finish(&self, checks: Checks<'_>) -> Result<(), Fault> {
        let whole = match checks.expected {
            Expected::Json(whole) => whole.len(),
            Expected::Events(count) => count * checks.event.len() + wire::DONE.len(),
            Expected::Completion => return completion(&self.held),
        };
        if self.received == whole { Ok(()) } else { Err(Fault::Length) }
    }
}

fn is_event(event: &[u8], number: usize, empty: &[u8]) -> bool {
    let (seq, time) = (wire::EVENT_NUMBER, wire::EVENT_TIME);
    let same = |from: usize, to: usize| event[from..to] == empty[from..to];
    same(0, seq.start)
        && same(seq.end, time.start)
        && same(time.end, empty.len())
        && usize::try_from(wire::number(&event[seq])).is_ok_and(|found| found == number)
}

/// Every block but the last of a prompt is in the cache of an engine that has answered it before.
fn completion(bytes: &[u8]) -> Result<(), Fault> {
    let answer: Value = serde_json::from_slice(bytes).map_err(|_no_json| Fault::AnswerBytes)?;
    let usage = &answer["usage"];
    let prompt = usage["prompt_tokens"].as_u64().ok_or(Fault::AnswerBytes)?;
    if answer["object"] != "text_completion" || usage["completion_tokens"] != 1 {
        return Err(Fault::AnswerBytes);
    }
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
    if cached * 10 >= prompt * 9 { Ok(()) } else { Err(Fault::Cold) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads an answer in pieces of `step` bytes.
    fn read(bytes: &[u8], step: usize, expected: &Expected, hash: Option<&str>) -> Result<usize, Fault> {
        let (event, mut latencies) = (wire::event(), Histogram::default());
        let checks = Checks { expected, event: &event, hash };
        let mut answer = Answer::default();
        let mut complete = 0;
        for piece in bytes.chunks(step) {
            if answer.take(piece, checks, 5, &mut latencies)? == (Progress::Complete { closes: false }) {
                complete += 1;
                answer.reset();
            }
        }
        Ok(complete)
    }

    fn json(body: &[u8], hash: &str) -> Vec<u8> {
        let head = format!("HTTP/1.1 200 OK\r\nx-body-hash: {hash}\r\ncontent-length: {}\r\n\r\n", body.len());
        [head.as_bytes(), body].concat()
    }

    fn stream(count: usize) -> Vec<u8> {
        let mut bytes = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        for number in 0..u64::try_from(count).unwrap() {
            let mut event = wire::event();
            wire::put(&mut event[wire::EVENT_NUMBER], number);
            bytes.extend_from_slice(format!("{:x}\r\n", event.len()).as_bytes());
            bytes.extend_from_slice(&event);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"e\r\n");
        bytes.extend_from_slice(wire::DONE);
        bytes.extend_from_slice(b"\r\n0\r\n\r\n");
        bytes
    }

    #[test]
    fn right_answers_are_complete_however_they_are_cut() {
        let expected = Expected::Json(wire::json_answer(400));
        let whole = json(&wire::json_answer(400), "0123456789abcdef");
        let events = stream(3);
        for step in [1, 7, 100, 219, 220, 100_000] {
            assert_eq!(read(&whole, step, &expected, Some("0123456789abcdef")), Ok(1), "{step}");
            assert_eq!(read(&events, step, &Expected::Events(3), None), Ok(1), "{step}");
        }
        let two = [whole.clone(), whole].concat();
        let half = two.len() / 2;
        assert_eq!(read(&two, half, &expected, Some("0123456789abcdef")), Ok(2));
    }

    #[test]
    fn a_wrong_byte_anywhere_is_found() {
        let expected = Expected::Json(wire::json_answer(400));
        let whole = json(&wire::json_answer(400), "0123456789abcdef");
        let body = whole.len() - 400;
        for at in body..whole.len() {
            let mut wrong = whole.clone();
            wrong[at] ^= 1;
            assert_eq!(read(&wrong, 77, &expected, None), Err(Fault::AnswerBytes), "{at}");
        }
        let events = stream(3);
        let head = events.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
        // A stamp has no right value; each byte of the second event but those has.
        let second = head + 4 + wire::EVENT_BYTES + 2 + 4;
        for at in (0..wire::EVENT_BYTES).filter(|at| !wire::EVENT_TIME.contains(at)) {
            let mut wrong = events.clone();
            wrong[second + at] ^= 1;
            assert_eq!(read(&wrong, 90, &Expected::Events(3), None), Err(Fault::AnswerBytes), "{at}");
        }
    }

    #[test]
    fn lost_doubled_and_swapped_events_are_found() {
        let event = 4 + wire::EVENT_BYTES + 2;
        let events = stream(3);
        let head = events.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
        let (head, rest) = events.split_at(head);
        let piece = |number: usize| &rest[number * event..(number + 1) * event];
        let end = &rest[3 * event..];
        for wrong in [[piece(0), piece(2), end].concat(), [piece(1), piece(0), piece(2), end].concat()] {
            assert_eq!(read(&[head, &wrong].concat(), 1000, &Expected::Events(3), None), Err(Fault::AnswerBytes));
        }
        let doubled = [head, piece(0), piece(0), piece(1), piece(2), end].concat();
        read(&doubled, 1000, &Expected::Events(3), None).unwrap_err();
        assert!(read(&stream(2), 50, &Expected::Events(3), None).unwrap_err().is_wrong_byte());
    }

    #[test]
    fn a_changed_request_and_a_wrong_length_are_found() {
        let expected = Expected::Json(wire::json_answer(400));
        let whole = json(&wire::json_answer(400), "0123456789abcdef");
        assert_eq!(read(&whole, 50, &expected, Some("0123456789abcdee")), Err(Fault::RequestBytes));
        assert_eq!(read(&json(&wire::json_answer(390), "x"), 50, &expected, None), Err(Fault::AnswerBytes));
        assert_eq!(read(&json(&wire::json_answer(400)[..399], "x"), 50, &expected, None), Err(Fault::Length));
        assert_eq!(read(b"HTTP/1.1 502 Bad Gateway\r\n\r\n", 50, &expected, None), Err(Fault::Status(502)));
    }

    #[test]
    fn a_completion_comes_from_the_cache() {
        let of = |cached: u64| {
            let body = serde_json::json!({"object": "text_completion", "usage": {"prompt_tokens": 500,
                "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}});
            completion(body.to_string().as_bytes())
        };
        assert_eq!(of(496), Ok(()));
        assert_eq!(of(0), Err(Fault::Cold));
        assert_eq!(completion(b"{"), Err(Fault::AnswerBytes));
    }
}

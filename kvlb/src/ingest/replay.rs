//! One replay: the batches that an engine still keeps, asked for and read to their end.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

use super::guard::{self, Pipe};
use super::stream::Message;
use crate::contract::{EventSeq, events};

/// How long each answer may take. vLLM opens no replay socket unless told, and a publisher between long steps answers
/// within 100 ms.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a whole replay may take: an engine's 10,000 batches take a few seconds, and what is held meanwhile is bounded.
const REPLAY_TIMEOUT: Duration = Duration::from_mins(1);
/// Answers of one replay that are no batch, or none that goes on: after more, whoever answers is no engine.
const NONSENSE_MAX: u32 = 16;
/// The number that ends a replay: all ones, with an empty batch.
const END: EventSeq = EventSeq(u64::MAX);

/// What a replay brings.
#[derive(Debug)]
pub(super) enum Replay {
    /// A batch.
    Message(Message),
    /// Its end.
    Ended,
    /// It failed. Says whether anything came before.
    Failed { answered: bool },
}

/// Asks `host:port` for the batches from `from` on and passes them to `to`, in order, with how it ended.
pub(super) async fn run(host: String, port: u16, from: EventSeq, to: mpsc::Sender<Replay>) {
    let mut answered = false;
    let outcome = read(&host, port, from, &to, &mut answered).await;
    if let Err(error) = &outcome {
        tracing::debug!(%host, port, %error, "replay failed");
    }
    let last = if outcome.is_ok() { Replay::Ended } else { Replay::Failed { answered } };
    // Nobody to tell means that the replay is no longer wanted.
    to.send(last).await.ok();
}

async fn read(
    host: &str,
    port: u16,
    from: EventSeq,
    to: &mpsc::Sender<Replay>,
    answered: &mut bool,
) -> Result<(), ZmqError> {
    let engine = guard::dial(host, port).await?;
    let pipe = Pipe::new().await?;
    let mut socket = DealerSocket::with_options(pipe.options());
    let endpoint = pipe.endpoint()?;
    let reading = async {
        socket.connect(&endpoint).await?;
        socket.send(request(from)).await?;
        let (mut next, mut nonsense) = (from.0, 0);
        loop {
            let answer = timeout(ANSWER_TIMEOUT, socket.recv()).await.map_err(late)??;
            let message = parse(&answer);
            if message.as_ref().is_some_and(|message| message.seq == END && message.batch.is_empty()) {
                return Ok(());
            }
            let Some(message) = message.filter(|message| message.seq.0 >= next) else {
                nonsense += 1;
                if nonsense > NONSENSE_MAX {
                    return Err(nonsensical());
                }
                continue;
            };
            next = message.seq.0.saturating_add(1);
            *answered = true;
            if to.send(Replay::Message(message)).await.is_err() {
                return Ok(());
            }
        }
    };
    let piping = async {
        let ended = pipe.run(engine).await;
        // What the engine said before it left is still on its way.
        tokio::time::sleep(Duration::from_millis(200)).await;
        ended
    };
    tokio::select! {
        outcome = timeout(REPLAY_TIMEOUT, reading) => outcome.map_err(late)?,
        ended = piping => Err(ended.err().unwrap_or_else(|| io::ErrorKind::ConnectionReset.into()).into()),
    }
}

fn nonsensical() -> ZmqError {
    io::Error::new(io::ErrorKind::InvalidData, "answers that are no replay").into()
}

fn late(elapsed: tokio::time::error::Elapsed) -> ZmqError {
    io::Error::new(io::ErrorKind::TimedOut, elapsed).into()
}

/// A request as a ROUTER expects it: an empty delimiter and the first number wanted.
fn request(from: EventSeq) -> ZmqMessage {
    let mut request = ZmqMessage::from(Bytes::new());
    request.push_back(Bytes::copy_from_slice(&from.0.to_be_bytes()));
    request
}

/// Reads a message of either socket: number and batch are the last two frames, behind a topic or, in a replay, behind a
/// delimiter and, from vLLM 0.26, a topic.
pub(super) fn parse(message: &ZmqMessage) -> Option<Message> {
    let last = message.len().checked_sub(1)?;
    let seq = message.get(last.checked_sub(1)?)?;
    let seq = EventSeq(u64::from_be_bytes(seq[..].try_into().ok()?));
    let batch = message.get(last)?.clone();
    Some(Message { seq, time: events::time(&batch).to_bits(), batch })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(frames: &[&'static [u8]]) -> ZmqMessage {
        frames.iter().map(|frame| Bytes::from_static(frame)).collect::<Vec<_>>().try_into().unwrap()
    }

    #[test]
    fn answers_are_read_with_and_without_a_topic() {
        let message = |seq, batch| Some(Message { seq, time: 0, batch: Bytes::from_static(batch) });
        let expected = message(EventSeq(258), b"batch");
        let seq = b"\0\0\0\0\0\0\x01\x02";
        assert_eq!(parse(&answer(&[b"", seq, b"batch"])), expected);
        assert_eq!(parse(&answer(&[b"", b"topic", seq, b"batch"])), expected);
        assert_eq!(parse(&answer(&[b"", b"", &[0xff; 8], b""])), message(END, b""));
    }

    #[test]
    fn answers_that_are_none_are_passed_over() {
        for odd in [&[&b""[..]][..], &[b"", b""], &[b"", b"short", b"batch"]] {
            assert_eq!(parse(&answer(odd)), None);
        }
    }
}

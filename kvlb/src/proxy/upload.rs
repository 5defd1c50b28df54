//! The way of a request to its endpoint: whole from memory, or through as it comes.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::alarm::{Alarm, Limit};
use super::backplane::{Backplane, Phase};
use super::buffer::{Chunk, LARGE, Lease, MEDIUM};
use super::client::{Client, Stop};
use super::http::{Chunked, FINAL_CHUNK, Framing, size_line, with_fields};
use super::io::{Backend, Stream};
use super::meter::Direction;
use super::pace::Pace;
use super::timer::timeout;
use crate::clock;

/// Room in front of a piece for its size line: sixteen digits and CRLF.
const SIZE_ROOM: usize = 18;

/// A request that is whole in memory, and its part of the body budget.
#[derive(Debug)]
pub(super) struct Parcel {
    bytes: Chunk,
    /// Bytes of the head, at the front.
    head: usize,
    /// The head as it is without any endpoint's fields, where it has some now.
    plain: Option<Vec<u8>>,
    lease: Option<Lease>,
}

impl Parcel {
    pub(super) fn new(head: &[u8], body: Chunk, lease: Option<Lease>) -> Self {
        let mut bytes = body;
        bytes.prepend(head);
        Self { bytes, head: head.len(), plain: None, lease }
    }

    /// Holds a part of the body budget as well.
    pub(super) fn holding(mut self, lease: Option<Lease>) -> Self {
        self.lease = lease;
        self
    }

    /// What goes out.
    pub(super) fn into_bytes(self) -> Chunk {
        self.bytes
    }

    /// Has these field lines in its head, whichever endpoint it goes to.
    pub(super) fn with_fields(mut self, fields: &[u8]) -> Self {
        self.direct(fields);
        self.plain = None;
        self
    }

    /// Makes it one for an endpoint that wants these `fields` in the head. Those of an earlier one are gone.
    pub(super) fn direct(&mut self, fields: &[u8]) {
        if fields.is_empty() && self.plain.is_none() {
            return;
        }
        let plain = self.plain.take().unwrap_or_else(|| self.bytes.bytes()[..self.head].to_vec());
        let head = with_fields(&plain, fields);
        self.bytes.consume(self.head);
        self.bytes.prepend(&head);
        self.head = head.len();
        self.plain = (!fields.is_empty()).then_some(plain);
    }
}

/// How an upload ended.
#[derive(Debug)]
pub(super) enum Uploaded {
    /// The endpoint's side has all of it. A request that was whole in memory comes back for another try.
    Sent(Option<Parcel>),
    /// The endpoint takes no more; its answer may be there all the same.
    Stuck(Option<Parcel>),
    /// The client stopped sending.
    Stopped(Stop),
    /// The client sent chunks that are none.
    Malformed,
}

/// An upload under way, driven beside whatever waits for the answer.
pub(super) struct Upload<'a> {
    task: Option<Pin<&'a mut (dyn Future<Output = Uploaded> + 'a)>>,
    ended: Option<Uploaded>,
    ended_at: Option<Instant>,
    /// What begins when the upload ends: the wait for the answer's first byte.
    then: Option<Then<'a>>,
}

/// The wait that begins when an upload ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Then<'a> {
    pub(super) alarm: &'a Alarm,
    pub(super) phase: &'a Cell<Phase>,
    pub(super) first_byte: Option<(Duration, Limit)>,
    /// The same as a time of day that was set before.
    pub(super) due: Option<(Instant, Limit)>,
    /// What the request waits for then.
    pub(super) waits: Phase,
    pub(super) total: Option<Instant>,
}

impl<'a> Upload<'a> {
    pub(super) fn new(task: Pin<&'a mut (dyn Future<Output = Uploaded> + 'a)>, then: Then<'a>) -> Self {
        Self { task: Some(task), ended: None, ended_at: None, then: Some(then) }
    }

    /// Goes on. Ready only when the client's part of it has failed.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Stop> {
        if let Some(task) = &mut self.task
            && let Poll::Ready(ended) = task.as_mut().poll(cx)
        {
            self.end(ended);
        }
        match self.ended {
            Some(Uploaded::Stopped(stop)) => Poll::Ready(stop),
            Some(Uploaded::Malformed) => Poll::Ready(Stop::Malformed),
            _ => Poll::Pending,
        }
    }

    fn end(&mut self, ended: Uploaded) {
        let now = clock::now();
        let gone_out = matches!(ended, Uploaded::Sent(_) | Uploaded::Stuck(_));
        self.task = None;
        self.ended = Some(ended);
        self.ended_at = Some(now);
        if let Some(then) = self.then.take()
            && gone_out
        {
            let first_byte = then.first_byte.map(|(limit, name)| (now + limit, name));
            then.alarm.set(sooner(first_byte.or(then.due), then.total));
            then.phase.set(then.waits);
        }
    }

    /// The answer has begun: its deadlines are no longer the upload's business, nor is another try.
    pub(super) fn answered(&mut self) {
        self.then = None;
        if let Some(Uploaded::Sent(request) | Uploaded::Stuck(request)) = &mut self.ended {
            *request = None;
        }
    }

    /// Whether the endpoint has all of the request.
    pub(super) fn is_sent(&self) -> bool {
        matches!(self.ended, Some(Uploaded::Sent(_)))
    }

    /// When the upload ended, whatever way.
    pub(super) fn ended_at(&self) -> Option<Instant> {
        self.ended_at
    }

    /// The request, where it was whole in memory. The endpoint's connection must have been aborted, or the upload ended.
    pub(super) async fn into_parcel(mut self) -> Option<Parcel> {
        if let Some(task) = self.task.take() {
            self.ended = Some(task.await);
        }
        match self.ended {
            Some(Uploaded::Sent(parcel) | Uploaded::Stuck(parcel)) => parcel,
            _ => None,
        }
    }
}

/// The earlier of a deadline and the end of the whole request's time.
pub(super) fn sooner(due: Option<(Instant, Limit)>, total: Option<Instant>) -> Option<(Instant, Limit)> {
    match (due, total) {
        (Some((due, _)), Some(total)) if total < due => Some((total, Limit::Total)),
        (None, Some(total)) => Some((total, Limit::Total)),
        (due, _) => due,
    }
}

/// A body that goes through as it comes.
#[derive(Debug)]
pub(super) struct Passing {
    /// What has come of it already, without framing.
    pub(super) payload: Chunk,
    /// Its part of the body budget, until it has gone out.
    pub(super) lease: Lease,
    pub(super) rest: Rest,
    /// How it has come in so far.
    pub(super) pace: Pace,
}

/// What is still to come of a body.
#[derive(Debug)]
pub(super) enum Rest {
    Length(u64),
    Chunked(Chunked),
}

impl Rest {
    pub(super) fn framing(&self, announced: Framing) -> Framing {
        match self {
            Self::Length(_) => announced,
            Self::Chunked(_) => Framing::Chunked,
        }
    }
}

/// Sends a request that is whole in memory.
pub(super) async fn send_whole<B: Backend, P: Backplane>(
    client: &Client<'_, B, P>,
    endpoint: Rc<B::Stream>,
    parcel: Parcel,
) -> Uploaded {
    let mut parcel = parcel;
    let bytes = std::mem::replace(&mut parcel.bytes, Chunk::none());
    let (result, bytes) = endpoint.write_all(bytes).await;
    let sent = bytes.len() as u64;
    parcel.bytes = bytes;
    let parcel = Some(parcel);
    match result {
        Ok(()) => {
            client.lane().meter.relayed(Direction::ToEndpoint, sent);
            Uploaded::Sent(parcel)
        }
        Err(error) => stuck(parcel, &error),
    }
}

fn stuck(parcel: Option<Parcel>, error: &io::Error) -> Uploaded {
    tracing::debug!(%error, "an endpoint takes no more of a request");
    Uploaded::Stuck(parcel)
}

/// Sends `head` with the endpoint's own `fields`, what has come of the body, and the rest as it comes.
pub(super) async fn send_through<B: Backend, P: Backplane>(
    client: &Client<'_, B, P>,
    endpoint: Rc<B::Stream>,
    mut head: Vec<u8>,
    fields: Vec<u8>,
    passing: Box<Passing>,
) -> Uploaded {
    if !fields.is_empty() {
        head = with_fields(&head, &fields);
    }
    let Passing { mut payload, lease, rest, pace } = *passing;
    let mut pipe = Pipe { client, endpoint, pace };
    if matches!(rest, Rest::Chunked(_)) && !payload.is_empty() {
        frame(&mut payload);
    }
    payload.prepend(&head);
    let through = async {
        pipe.write(payload).await?;
        // What comes from here on is held piece by piece.
        drop(lease);
        match rest {
            Rest::Length(left) => pipe.length(left).await,
            Rest::Chunked(chunked) => pipe.chunked(chunked).await,
        }
    };
    match through.await {
        Ok(()) => Uploaded::Sent(None),
        Err(ended) => ended,
    }
}

/// Makes a chunk of the transfer coding out of payload.
fn frame(payload: &mut Chunk) {
    let line = size_line(payload.len());
    payload.prepend(line.as_bytes());
    payload.append(b"\r\n");
}

struct Pipe<'a, 's, B: Backend, P: Backplane> {
    client: &'a Client<'s, B, P>,
    endpoint: Rc<B::Stream>,
    pace: Pace,
}

impl<B: Backend, P: Backplane> Pipe<'_, '_, B, P> {
    async fn length(&mut self, mut left: u64) -> Result<(), Uploaded> {
        while left > 0 {
            let mut piece = self.read(0).await?;
            let count = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
            self.client.carry_over(&piece.bytes()[count..]);
            piece.truncate(count);
            self.client.note(|record| record.request_bytes += count as u64);
            left -= count as u64;
            self.write(piece).await?;
        }
        Ok(())
    }

    /// The same payload in chunks of our own: nothing of the client's framing reaches the endpoint.
    async fn chunked(&mut self, mut chunked: Chunked) -> Result<(), Uploaded> {
        while !chunked.is_done() {
            let mut raw = self.read(SIZE_ROOM).await?;
            let (payload, used) = chunked.decode(raw.bytes_mut()).map_err(|_malformed| Uploaded::Malformed)?;
            self.client.carry_over(&raw.bytes()[used..]);
            raw.truncate(payload);
            self.client.note(|record| record.request_bytes += payload as u64);
            if payload > 0 {
                frame(&mut raw);
            }
            if chunked.is_done() {
                append_end(&mut raw, chunked.trailers());
            }
            if !raw.is_empty() {
                self.write(raw).await?;
            }
        }
        Ok(())
    }

    /// The next piece of the body. No buffer is held while the client is silent.
    async fn read(&mut self, front: usize) -> Result<Chunk, Uploaded> {
        let (stream, asked) = (&self.client.stream, self.client.lane().now());
        let piece = async {
            poll_fn(|cx| stream.poll_readable(cx)).await;
            stream.read(Chunk::with_room(front, LARGE - MEDIUM)).await
        };
        match timeout(self.pace.patience(), piece).await {
            Err(_elapsed) => Err(Uploaded::Stopped(Stop::TimedOut(Limit::Body))),
            Ok((Ok(count), piece)) if count > 0 => {
                self.pace.came(count, self.client.lane().now().saturating_duration_since(asked));
                Ok(piece)
            }
            Ok(_end_or_error) => Err(Uploaded::Stopped(Stop::Left)),
        }
    }

    async fn write(&self, piece: Chunk) -> Result<(), Uploaded> {
        let bytes = piece.len() as u64;
        match timeout(self.pace.limit(), self.endpoint.write_all(piece)).await {
            Err(_elapsed) => Err(Uploaded::Stopped(Stop::TimedOut(Limit::Pause))),
            Ok((Err(error), _piece)) => Err(stuck(None, &error)),
            Ok((Ok(()), _piece)) => {
                self.client.lane().meter.relayed(Direction::ToEndpoint, bytes);
                Ok(())
            }
        }
    }
}

/// Ends a chunked body, with the trailer fields it came with.
pub(super) fn append_end(body: &mut Chunk, trailers: &[u8]) {
    if trailers.is_empty() {
        body.append(FINAL_CHUNK);
    } else {
        body.append(b"0\r\n");
        body.append(trailers);
        body.append(b"\r\n");
    }
}

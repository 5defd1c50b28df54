//! One client connection: one request after the other, until either side has had enough.

use std::cell::{Cell, OnceCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::task::yield_now;

use super::alarm::{Alarm, Limit};
use super::backplane::{Arrival, Backplane, Phase};
use super::buffer::{Chunk, MEDIUM, SMALL};
use super::exchange::Exchanged;
use super::http::{Closing, Head, Reply};
use super::io::{Backend, Leaving, Stream};
use super::lane::{Lane, Order, Seat};
use super::meter::Retry;
use super::upload::Upload;
use crate::telemetry::access::{End, Record};

/// Room in front of a request, beyond its head's own length, for what its head grows by on the way.
pub(super) const FRONT: usize = 256;
/// How long an answer of ours may take to be taken: it fits into any socket's buffer.
const REPLY_LIMIT: Duration = Duration::from_secs(10);
/// How long, and how much, we read of a client that is still sending when we close. Closing at once would reset the
/// connection, and the reset can overtake the answer that the client should see.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 8 << 20;

/// A client connection.
pub(super) struct Client<'s, B: Backend, P: Backplane> {
    seat: &'s Seat<B, P>,
    pub(super) stream: B::Stream,
    pub(super) arrival: Arrival,
    /// The client's address as text, once it has been written.
    address: OnceCell<Box<str>>,
    pub(super) alarm: Alarm,
    /// Bytes that came behind the last request: the beginning of the next.
    pub(super) carry: Cell<Option<Chunk>>,
    pub(super) phase: Cell<Phase>,
    pub(super) leaving: Cell<Leaving>,
    /// The request on its way is a HEAD.
    to_head: Cell<bool>,
    /// It came in HTTP/1.0.
    http_1_0: Cell<bool>,
    /// It asked whether to send its body.
    expects_continue: Cell<bool>,
    /// What the client wants of the connection.
    wish: Cell<Closing>,
    /// The request has come in whole: what follows on the connection is the next one. Until then it must be closed.
    whole: Cell<bool>,
    /// What the access log will say of it.
    pub(super) entry: Cell<Option<Box<Record>>>,
}

/// Why a wait ended before what it waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The client is gone.
    Left,
    /// A limit was reached.
    TimedOut(Limit),
    /// The client's chunks are none.
    Malformed,
    /// The thread ends.
    Ordered,
}

/// What becomes of a connection behind an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// The next request.
    KeepAlive,
    /// It is closed: the client is gone.
    Gone,
    /// It is closed behind an answer.
    Close,
    /// It is closed, but the client may still be sending.
    Linger,
    /// It is reset: what the client has is not the whole.
    Reset,
}

/// Serves one connection to its end.
pub(super) async fn serve<B: Backend, P: Backplane>(
    seat: &Seat<B, P>,
    stream: B::Stream,
    arrival: Arrival,
    pass: P::Pass,
) {
    let client = Client {
        seat,
        stream,
        arrival,
        address: OnceCell::new(),
        alarm: Alarm::new(),
        carry: Cell::new(None),
        phase: Cell::default(),
        leaving: Cell::new(Leaving::HalfClose),
        to_head: Cell::new(false),
        http_1_0: Cell::new(false),
        expects_continue: Cell::new(false),
        wish: Cell::new(Closing::Close),
        whole: Cell::new(false),
        entry: Cell::new(None),
    };
    // Given back before the connection is closed: who has seen its end finds the place free.
    let _pass = pass;
    while client.next_request().await {
        // Boxed, so that a connection between two requests holds none of this, and one that streams only the second part.
        let after = match Box::pin(client.exchange()).await {
            Exchanged::Answer(relay) => Box::pin(relay.run()).await,
            Exchanged::Done(after) => after,
        };
        client.close_entry();
        match after {
            After::KeepAlive => {}
            // Bytes that nobody reads would have the kernel reset the connection, and the end of the answer with it.
            After::Close if client.has_unread() => return Box::pin(client.linger()).await,
            After::Close | After::Gone => return,
            After::Linger => return Box::pin(client.linger()).await,
            After::Reset => return client.stream.reset_on_close(),
        }
    }
    if client.lane().is_taken_over() && client.seat.post.order() == Order::Finish {
        // A request may be on its way just now: its client sees an end rather than a reset.
        Box::pin(client.linger()).await;
    }
}

impl<'s, B: Backend, P: Backplane> Client<'s, B, P> {
    pub(super) fn lane(&self) -> &Lane<B, P> {
        &self.seat.lane
    }

    /// The same, for what goes on without the client.
    pub(super) fn lane_handle(&self) -> Rc<Lane<B, P>> {
        Rc::clone(&self.seat.lane)
    }

    /// The client's address as the forwarding fields name it.
    pub(super) fn address(&self) -> &str {
        self.address.get_or_init(|| self.arrival.client.ip().to_canonical().to_string().into_boxed_str())
    }

    /// Whether the client has sent something that has not been read.
    fn has_unread(&self) -> bool {
        let carry = self.carry.take();
        let carries = carry.is_some();
        self.carry.set(carry);
        carries || !self.stream.silent()
    }

    /// Waits for the beginning of another request; false when none comes.
    async fn next_request(&self) -> bool {
        if self.seat.post.order() != Order::Go {
            return false;
        }
        let carry = self.carry.take();
        if carry.is_some() {
            self.carry.set(carry);
            // A client that has sent many at once waits for nothing: others have their turn in between.
            yield_now().await;
            return true;
        }
        self.alarm.set(Some((self.lane().now() + self.lane().config.client_idle, Limit::Idle)));
        poll_fn(|cx| {
            if self.stream.poll_readable(cx).is_ready() {
                return Poll::Ready(true);
            }
            if self.alarm.poll(cx).is_ready() || self.seat.post.poll(Order::Finish, cx).is_ready() {
                return Poll::Ready(false);
            }
            Poll::Pending
        })
        .await
    }

    /// Forgets the last request.
    pub(super) fn begin(&self) {
        self.phase.set(Phase::Head);
        self.leaving.set(Leaving::HalfClose);
        self.to_head.set(false);
        self.wish.set(Closing::Close);
        self.whole.set(false);
        self.open_entry();
    }

    /// Learns how answers to this request must look.
    pub(super) fn learn(&self, head: &Head) {
        self.to_head.set(head.is_head());
        self.http_1_0.set(head.is_http_1_0());
        self.expects_continue.set(head.expects_continue());
        self.wish.set(match (head.keep_alive(), head.is_http_1_0()) {
            (false, _) => Closing::Close,
            (true, true) => Closing::KeepAliveAloud,
            (true, false) => Closing::KeepAlive,
        });
    }

    /// Learns from the front of a request that is refused as it stands.
    pub(super) fn learn_early(&self, bytes: &[u8]) {
        self.to_head.set(bytes.starts_with(b"HEAD "));
    }

    pub(super) fn is_to_head(&self) -> bool {
        self.to_head.get()
    }

    pub(super) fn is_http_1_0(&self) -> bool {
        self.http_1_0.get()
    }

    /// Whether the client may still wait to be asked for its body.
    pub(super) fn waits_to_send(&self) -> bool {
        self.expects_continue.get() && !self.whole.get()
    }

    /// The request has come in whole.
    pub(super) fn received(&self) {
        self.whole.set(true);
    }

    /// What an answer's head says of the connection.
    pub(super) fn closing(&self) -> Closing {
        if self.lane().is_draining() || !self.whole.get() { Closing::Close } else { self.wish.get() }
    }

    /// What becomes of the connection behind an answer that said so.
    pub(super) fn after(&self, closing: Closing) -> After {
        match closing {
            Closing::KeepAlive | Closing::KeepAliveAloud => After::KeepAlive,
            Closing::Close if self.whole.get() => After::Close,
            Closing::Close => After::Linger,
        }
    }

    /// Keeps bytes that belong to the next request.
    pub(super) fn carry_over(&self, bytes: &[u8]) {
        if !bytes.is_empty() {
            let mut carry = Chunk::with_room(FRONT, bytes.len().max(SMALL - FRONT));
            carry.append(bytes);
            self.carry.set(Some(carry));
        }
    }

    /// Waits for `task`, while the client stays, time remains and no order comes. An upload goes on beside it.
    pub(super) fn watch<'w, 'u, F: Future + Unpin>(
        &'w self,
        upload: Option<&'w mut Upload<'u>>,
        task: F,
    ) -> Watch<'w, 's, 'u, B, P, F> {
        Watch { client: self, upload, task, see_leaving: true }
    }

    /// As [`Client::watch`], for tasks that read from the client and so see its leaving themselves.
    pub(super) fn wait<F: Future + Unpin>(&self, task: F) -> Watch<'_, 's, '_, B, P, F> {
        Watch { client: self, upload: None, task, see_leaving: false }
    }

    /// A request goes elsewhere, or out once more.
    pub(super) fn retried(&self, cause: Retry) {
        self.lane().meter.retried(cause);
        self.note(|record| record.retries += 1);
    }

    /// Sends an answer of ours.
    pub(super) async fn reply(&self, reply: &Reply) -> After {
        let closing = self.closing();
        let chunk = Chunk::copy_of(0, &reply.write(self.to_head.get(), closing));
        self.alarm.set(Some((self.lane().now() + REPLY_LIMIT, Limit::Reply)));
        let own_code = if reply.code().is_empty() { None } else { Some(reply.code()) };
        self.lane().meter.answered(reply.status(), own_code);
        let length = if self.to_head.get() { 0 } else { reply.body_len() };
        self.note(|record| {
            (record.status, record.code) = (Some(reply.status()), reply.code());
            record.response_bytes = length as u64;
        });
        if let Ok((Ok(()), _chunk)) = self.wait(self.stream.write_all(chunk)).await {
            return self.after(closing);
        }
        self.note(|record| record.ended(End::ClientLeft));
        After::Gone
    }

    /// Ends our side, and reads for a while what the client still sends.
    async fn linger(&self) {
        self.stream.finish();
        self.alarm.set(Some((self.lane().now() + LINGER, Limit::Reply)));
        let mut chunk = Chunk::with_room(0, MEDIUM);
        let mut read = 0;
        while read < LINGER_BYTES {
            chunk.clear(0);
            let result;
            match self.wait(self.stream.read(chunk)).await {
                Ok((Ok(count), back)) if count > 0 => (result, chunk) = (count, back),
                _end_error_or_limit => return,
            }
            read += result;
        }
    }
}

/// A wait that several things can end. One flat future: it is what a connection spends its life in.
pub(super) struct Watch<'w, 's, 'u, B: Backend, P: Backplane, F> {
    client: &'w Client<'s, B, P>,
    upload: Option<&'w mut Upload<'u>>,
    task: F,
    see_leaving: bool,
}

impl<B: Backend, P: Backplane, F: Future + Unpin> Future for Watch<'_, '_, '_, B, P, F> {
    type Output = Result<F::Output, Stop>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let Some(upload) = this.upload.as_deref_mut()
            && let Poll::Ready(stop) = upload.poll(cx)
        {
            return Poll::Ready(Err(stop));
        }
        if let Poll::Ready(output) = Pin::new(&mut this.task).poll(cx) {
            return Poll::Ready(Ok(output));
        }
        let client = this.client;
        if this.see_leaving && client.stream.poll_closed(client.leaving.get(), cx).is_ready() {
            return Poll::Ready(Err(Stop::Left));
        }
        if let Poll::Ready(limit) = client.alarm.poll(cx) {
            return Poll::Ready(Err(Stop::TimedOut(limit)));
        }
        client.seat.post.poll(Order::Abort, cx).map(|()| Err(Stop::Ordered))
    }
}

#[cfg(test)]
mod tests {
    use super::super::epoll::Epoll;
    use super::super::ring::Uring;
    use super::super::suite::rig::FakePlane;
    use super::*;

    fn size<'c, B: Backend, F: Future>(_future: impl FnOnce(&'c Client<'c, B, FakePlane>) -> F) -> usize {
        size_of::<F>()
    }

    /// Besides its sockets in the kernel, an idle connection is a task with this in it; a busy one has an exchange on top.
    /// Unoptimised futures are the larger ones, so these bounds hold with room to spare in a release.
    #[test]
    fn a_connection_between_two_requests_is_small() {
        let idle = size_of::<Client<'_, Uring, FakePlane>>() + size::<Uring, _>(Client::next_request);
        assert!(idle < 512, "{idle} bytes");
        let busy = size::<Uring, _>(Client::exchange).max(size::<Epoll, _>(Client::exchange));
        assert!(busy < 6 << 10, "{busy} bytes");
    }
}

//! A request on its way in: its head, its body, the decision, and the request as an endpoint gets it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::yield_now;

use super::alarm::Limit;
use super::backplane::{Backplane, Haste, Payload, Plan, Request, Survey, Terms, Unseen};
use super::buffer::{Chunk, LARGE, Lease, MEDIUM, SLICE, SMALL};
use super::client::{Client, FRONT, Stop};
use super::exchange::End;
use super::http::{Chunked, Forward, Framing, Head, HeadScan, size_line};
use super::io::{Backend, Stream};
use super::legs::TwoLegs;
use super::pace::Pace;
use super::timer::timeout;
use super::upload::{Parcel, Passing, Rest, append_end};

/// A request's body, as far as it is read before an endpoint is chosen.
pub(super) enum Read {
    /// All of it.
    Whole(Payload),
    /// It goes through as it comes.
    Passing(Box<Passing>, Unseen),
}

/// What goes to an endpoint.
pub(super) enum Sending {
    /// Head and body, whole in memory.
    Whole(Parcel),
    /// The head, and a body that goes through as it comes.
    Through(Vec<u8>, Box<Passing>),
    /// Whole in memory, once for each leg.
    TwoLegs(Box<TwoLegs>),
}

/// How long the reading of a body may take that must be read: the largest takes a second or two of a free core.
const READING_MAX: Duration = Duration::from_secs(10);

impl<B: Backend, P: Backplane> Client<'_, B, P> {
    /// The head of the next request, and what came behind it.
    pub(super) async fn read_head(&self) -> Result<(Head, Chunk), End> {
        let mut chunk = self.carry.take().unwrap_or_else(|| Chunk::with_room(FRONT, SMALL - FRONT));
        let head_max = self.lane().config.head_max;
        let mut scan = HeadScan::within(head_max);
        self.alarm.set(Some((self.lane().now() + self.lane().config.client_head, Limit::Head)));
        loop {
            if !chunk.is_empty()
                && let Some((head, length)) =
                    scan.request(chunk.bytes()).inspect_err(|_| self.learn_early(chunk.bytes()))?
            {
                chunk.consume(length);
                return Ok((head, chunk));
            }
            if chunk.spare() == 0 {
                chunk.reserve(head_max.saturating_sub(chunk.len()).max(1));
            }
            let read;
            (read, chunk) = self.wait(self.stream.read(chunk)).await?;
            if !matches!(read, Ok(count) if count > 0) {
                return Err(if chunk.is_empty() { End::Quiet } else { Stop::Left.into() });
            }
        }
    }

    /// The body, whole, or what has come of it where it is to go through. `chunk` is what came behind the head.
    pub(super) async fn read_body(&self, head: &Head, chunk: Chunk, survey: &Survey) -> Result<Read, End> {
        match head.framing() {
            Framing::None => Ok(self.whole(chunk, 0, Vec::new())),
            Framing::Length(length) => match usize::try_from(length) {
                Ok(length) if chunk.len() >= length => Ok(self.whole(chunk, length, Vec::new())),
                _ => self.read_length(head, chunk, length, survey).await,
            },
            Framing::Chunked => self.read_chunked(head, chunk, survey).await,
        }
    }

    /// The first `length` bytes are the body, what lies behind them the next request.
    fn whole(&self, mut body: Chunk, length: usize, trailers: Vec<u8>) -> Read {
        self.carry_over(&body.bytes()[length..]);
        body.truncate(length);
        Read::Whole(Payload::Whole { body, trailers, lease: self.lane().budget.lease() })
    }

    async fn read_length(&self, head: &Head, body: Chunk, length: u64, survey: &Survey) -> Result<Read, End> {
        let mut pace = Pace::new(survey.body_limit, body.len());
        let pass = |payload: Chunk, lease, pace, why| {
            let rest = Rest::Length(length - payload.len() as u64);
            Ok(Read::Passing(Box::new(Passing { payload, lease, rest, pace }), why))
        };
        let (mut body, mut lease) = (body, self.lane().budget.lease());
        let Some(max) = survey.inspect else { return pass(body, lease, pace, Unseen::NotNeeded) };
        let Some(length) = usize::try_from(length).ok().filter(|length| *length <= max) else {
            return pass(body, lease, pace, Unseen::TooLarge);
        };
        if !lease.hold(body.len()) {
            return pass(body, lease, pace, Unseen::OverMemory);
        }
        self.say_continue(head, &body).await?;
        body.reserve_total(length);
        while body.len() < length {
            if !lease.hold(length.min(body.len() + LARGE)) {
                return pass(body, lease, pace, Unseen::OverMemory);
            }
            body = self.read_more(body, &mut pace).await?;
        }
        self.carry_over(&body.bytes()[length..]);
        body.truncate(length);
        Ok(Read::Whole(Payload::Whole { body, trailers: Vec::new(), lease }))
    }

    async fn read_chunked(&self, head: &Head, mut raw: Chunk, survey: &Survey) -> Result<Read, End> {
        let (mut chunked, mut pace) = (Chunked::default(), Pace::new(survey.body_limit, raw.len()));
        let mut lease = self.lane().budget.lease();
        let mut body =
            Chunk::with_room(FRONT + head.fields().bytes(), MEDIUM - FRONT - head.fields().bytes().min(MEDIUM / 2));
        let mut told = false;
        loop {
            let (payload, used) = chunked.decode(raw.bytes_mut())?;
            if chunked.is_done() {
                self.carry_over(&raw.bytes()[used..]);
            }
            raw.truncate(payload);
            let size = body.len() + raw.len();
            let why = match survey.inspect {
                _ if chunked.is_done() => None,
                None => Some(Unseen::NotNeeded),
                Some(max) if size > max => Some(Unseen::TooLarge),
                Some(_) => (!lease.hold(size)).then_some(Unseen::OverMemory),
            };
            if body.spare() < raw.len() {
                let larger = body.larger(raw.len());
                body = copy(body.bytes(), larger).await;
            }
            body.append(raw.bytes());
            if let Some(why) = why {
                let rest = Rest::Chunked(chunked);
                let passing = Passing { payload: body, lease, rest, pace };
                return Ok(Read::Passing(Box::new(passing), why));
            }
            if chunked.is_done() {
                let trailers = chunked.trailers().to_vec();
                return Ok(Read::Whole(Payload::Whole { body, trailers, lease }));
            }
            if !told {
                told = true;
                self.say_continue(head, &body).await?;
            }
            raw.clear(0);
            raw = self.read_more(raw, &mut pace).await?;
        }
    }

    /// Tells a client that waits for it to send the body, unless that has begun to come already.
    async fn say_continue(&self, head: &Head, body: &Chunk) -> Result<(), End> {
        if head.expects_continue() && body.is_empty() {
            self.send_continue().await?;
        }
        Ok(())
    }

    pub(super) async fn send_continue(&self) -> Result<(), End> {
        let interim = Chunk::copy_of(0, b"HTTP/1.1 100 Continue\r\n\r\n");
        match self.wait(self.stream.write_all(interim)).await? {
            (Ok(()), _chunk) => Ok(()),
            (Err(_gone), _chunk) => Err(Stop::Left.into()),
        }
    }

    async fn read_more(&self, mut body: Chunk, pace: &mut Pace) -> Result<Chunk, End> {
        if body.spare() == 0 {
            let larger = body.larger(LARGE);
            body = copy(body.bytes(), larger).await;
        }
        let asked = self.lane().now();
        self.alarm.set(Some((asked + pace.patience(), Limit::Body)));
        match self.wait(self.stream.read(body)).await? {
            (Ok(count), body) if count > 0 => {
                pace.came(count, self.lane().now().saturating_duration_since(asked));
                self.note(|record| record.request_bytes += count as u64);
                Ok(body)
            }
            (_end_or_error, _body) => Err(Stop::Left.into()),
        }
    }

    /// Decides here, or on the worker pool where that takes longer than a data thread may be held.
    pub(super) async fn decide(&self, request: &Arc<Request>) -> Result<P::Call, End> {
        let backplane = &self.lane().backplane;
        if !backplane.is_heavy(request) {
            return Ok(backplane.begin(request)?);
        }
        let (sender, decided) = oneshot::channel();
        let job = {
            let (backplane, request) = (Arc::clone(backplane), Arc::clone(request));
            move || {
                // Nobody waits any more when the client has left or the budget has run out in the queue.
                if !sender.is_closed() {
                    let call = backplane.begin(&request);
                    // The request must be ours alone again when the answer arrives, so that its body need not be copied.
                    drop(request);
                    drop(sender.send(call));
                }
            }
        };
        if self.lane().workers.submit(job).is_err() {
            return Ok(backplane.begin_hastily(request, Haste::QueueFull)?);
        }
        self.lane().meter.offloaded();
        let mut decided = decided;
        let in_time = timeout(self.lane().config.decision_budget, &mut decided);
        let mut result = self.watch(None, Box::pin(in_time)).await?;
        if result.is_err() && backplane.must_be_read(request) {
            result = self.watch(None, Box::pin(timeout(READING_MAX, decided))).await?;
        }
        match result {
            Ok(Ok(call)) => Ok(call?),
            Ok(Err(_)) | Err(_) => Ok(backplane.begin_hastily(request, Haste::Budget)?),
        }
    }

    /// How the head of a request goes on.
    pub(super) fn forward(&self, terms: &Terms, framing: Framing) -> Forward<'_> {
        Forward {
            client: terms.forwarded_headers.then(|| self.address()),
            vip: self.arrival.vip,
            framing,
            expect_continue: false,
            read_here: false,
        }
    }

    /// The request as endpoints get it.
    pub(super) async fn compose(
        &self,
        request: Arc<Request>,
        passing: Option<Box<Passing>>,
        terms: &Terms,
        plan: Plan,
    ) -> Sending {
        let write = |head: &Head, framing, expect_continue| {
            let forward = Forward { expect_continue, ..self.forward(terms, framing) };
            let mut bytes = self.lane().scratch();
            head.write_for_endpoint(&mut bytes, &forward);
            bytes
        };
        if let Some(passing) = passing {
            let expect = request.head.expects_continue() && passing.payload.is_empty();
            return Sending::Through(
                write(&request.head, passing.rest.framing(request.head.framing()), expect),
                passing,
            );
        }
        let plan = match plan {
            Plan::TwoLegs(terms) => return Sending::TwoLegs(Box::new(TwoLegs { request, terms })),
            plan => plan,
        };
        let head = &request.head;
        if let Plan::Edited(edited) = &plan {
            let parcel = self.parcel(head, terms, edited, false).await;
            let lease = Arc::into_inner(request).and_then(|request| take_body(request).2);
            return Sending::Whole(parcel.holding(lease));
        }
        let framing = match head.framing() {
            Framing::Length(_) => Framing::Length(request.body_len() as u64),
            other => other,
        };
        let mut bytes = write(head, framing, false);
        let chunked = framing == Framing::Chunked;
        let (mut body, trailers, lease) = match Arc::try_unwrap(request) {
            Ok(request) => take_body(request),
            // A worker that ran out of time still reads it.
            Err(shared) => Box::pin(copy_body(&shared)).await,
        };
        if chunked {
            if !body.is_empty() {
                bytes.extend_from_slice(size_line(body.len()).as_bytes());
                body.append(b"\r\n");
            }
            append_end(&mut body, &trailers);
        }
        let parcel = Parcel::new(&bytes, body, lease);
        self.lane().keep_scratch(bytes);
        Sending::Whole(parcel)
    }
}

impl<B: Backend, P: Backplane> Client<'_, B, P> {
    /// A request with a body of ours. Its answer may be `read_here`.
    pub(super) async fn parcel(&self, head: &Head, terms: &Terms, body: &[u8], read_here: bool) -> Parcel {
        let mut bytes = self.lane().scratch();
        let forward = Forward { read_here, ..self.forward(terms, Framing::Length(body.len() as u64)) };
        head.write_for_endpoint(&mut bytes, &forward);
        let body = copy(body, Chunk::with_room(FRONT + bytes.len(), body.len())).await;
        let parcel = Parcel::new(&bytes, body, None);
        self.lane().keep_scratch(bytes);
        parcel
    }
}

/// The body out of a request.
fn take_body(request: Request) -> (Chunk, Vec<u8>, Option<Lease>) {
    match request.payload {
        Payload::Whole { body, trailers, lease } => (body, trailers, Some(lease)),
        Payload::Unseen(_) => (Chunk::none(), Vec::new(), None),
    }
}

async fn copy_body(request: &Request) -> (Chunk, Vec<u8>, Option<Lease>) {
    match &request.payload {
        Payload::Whole { body, trailers, .. } => {
            let front = FRONT + request.head.fields().bytes();
            (copy(body.bytes(), Chunk::with_room(front, body.len())).await, trailers.clone(), None)
        }
        Payload::Unseen(_) => (Chunk::none(), Vec::new(), None),
    }
}

/// `into` with `bytes` behind what it holds, which must have room for them. Others have their turn in between.
async fn copy(bytes: &[u8], mut into: Chunk) -> Chunk {
    let mut slices = bytes.chunks(SLICE);
    slices.next().into_iter().for_each(|slice| into.append(slice));
    for slice in slices {
        yield_now().await;
        into.append(slice);
    }
    into
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_copy_is_whole_and_lets_others_have_their_turn() {
        let bytes: Vec<u8> = (0..3 * SLICE + 5).map(|at| (at % 251).to_le_bytes()[0]).collect();
        let mut front = Chunk::with_room(300, bytes.len() + 1);
        front.append(b"x");
        let turns = std::cell::Cell::new(0);
        let others = async {
            loop {
                turns.set(turns.get() + 1);
                yield_now().await;
            }
        };
        let copied = tokio::select! {
            biased;
            copied = copy(&bytes, front) => copied,
            () = others => unreachable!("it never ends"),
        };
        assert!(copied.bytes()[0] == b'x' && copied.bytes()[1..] == bytes);
        assert_eq!(turns.get(), 3);
        assert_eq!(copy(b"", Chunk::none()).await.bytes(), b"");
    }
}

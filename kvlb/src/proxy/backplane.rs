//! What the proxy asks of the rest of kvlb, and what it tells it.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::buffer::{Chunk, Lease};
use super::http::{Head, Reply};
use super::meter::Refused;
use super::usage::Usage;
use crate::fleet::Limits;
use crate::telemetry::access::Facts;

/// The rest of kvlb, as the proxy sees it. Every method may be called by all data threads at once, and but for
/// [`Backplane::begin`] of a heavy request none may take longer than microseconds.
pub trait Backplane: Send + Sync + 'static {
    /// One request on its way.
    type Call: Call;

    /// What a client connection holds while it is open.
    type Pass: 'static;

    /// Lets a client talk to a VIP, or says why not.
    ///
    /// # Errors
    /// Why it is turned away.
    fn admit(&self, arrival: &Arrival) -> Result<Self::Pass, Refused>;

    /// What is wanted of a request's body, by its head alone.
    ///
    /// # Errors
    /// The answer to a request that no rule could ever serve.
    fn survey(&self, head: &Head, arrival: &Arrival) -> Result<Survey, Reply>;

    /// Whether [`Backplane::begin`] would hold a data thread for too long, so that it belongs on the worker pool.
    fn is_heavy(&self, request: &Request) -> bool;

    /// Whether a request can be served only when its body has been read, however long that takes.
    fn must_be_read(&self, _request: &Request) -> bool {
        false
    }

    /// Finds the request's rule and learns from the body what the choice needs.
    ///
    /// # Errors
    /// The answer to a request that no rule serves.
    fn begin(&self, request: &Request) -> Result<Self::Call, Reply>;

    /// As [`Backplane::begin`], without looking at the prompt: there is no time for it.
    ///
    /// # Errors
    /// The answer to a request that no rule serves.
    fn begin_hastily(&self, request: &Request, haste: Haste) -> Result<Self::Call, Reply>;

    /// The calls whose answers make up the list of models: one for each rule of the VIP, where there are several. Empty:
    /// the request is an ordinary one. Asked for `GET /v1/models` only.
    fn models(&self, _request: &Request) -> Vec<Self::Call> {
        Vec::new()
    }
}

/// One request on its way, from its decision to its end.
pub trait Call: Send + 'static {
    /// Counts the request as in flight at its endpoint while it lives.
    type Guard: 'static;

    /// What the rule says about relaying.
    fn terms(&self) -> Terms;

    /// How the request with this body goes out. Asked once, before the first choice.
    fn plan(&mut self, _body: &[u8]) -> Plan {
        Plan::AsItIs
    }

    /// Of a request in two legs: the body of the prefill leg for the endpoint chosen last. `body` is the client's.
    fn prefill_body(&mut self, body: &[u8]) -> Vec<u8> {
        body.to_vec()
    }

    /// Of a request in two legs: the prefill leg is done, and choices are for the decode leg from here on.
    fn hand_over(&mut self, _prefilled: &Prefilled<'_>, body: &[u8]) -> HandedOver {
        HandedOver { body: body.to_vec(), cached_tokens: None }
    }

    /// Of a request in two legs: the decode leg has not been started and will not be, and choices are for a prefill leg again.
    fn start_over(&mut self) {}

    /// Of a request in two legs whose client has left between them: the body of a short decode leg, which has the prefill
    /// endpoint's blocks freed; `None` where nothing is held there.
    fn release_body(&mut self, _body: &[u8]) -> Option<Vec<u8>> {
        None
    }

    /// The endpoint to ask, none of `tried` (positions in the rule). `None`: nobody is left, or nobody now, as
    /// [`Call::standing`] says.
    fn choose(&mut self, tried: &[usize]) -> Option<Target<Self::Guard>>;

    /// Where a request stands that [`Call::choose`] gave nobody just now.
    fn standing(&mut self, _tried: &[usize]) -> Standing {
        Standing::Nobody
    }

    /// Ready when it is the turn of a request that waits: then it may choose once more.
    fn poll_turn(&mut self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Ready(())
    }

    /// The answer to a request that has waited for as long as it may.
    fn overdue(&mut self) -> Reply {
        Reply::error(504, "admission_queue_timeout", "no endpoint of the rule had room in time")
    }

    /// Whether the rule's retry budget has room for one more; counts it where it has.
    fn may_retry(&mut self) -> bool;

    /// Hears what happened: see [`Event`] for what is told when, and what is promised.
    fn report(&mut self, event: Event);

    /// What the access log shall say of the request. Asked where there is one, behind the last event.
    fn facts(&self) -> Option<Facts> {
        None
    }
}

/// How a request goes out.
#[derive(Debug)]
pub enum Plan {
    /// As it came.
    AsItIs,
    /// With this body in place of its own.
    Edited(Vec<u8>),
    /// To one endpoint that computes its prompt, then to one that generates.
    TwoLegs(LegTerms),
}

/// What a rule says of the two legs of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegTerms {
    /// From the prefill request's end to its answer's.
    pub prefill: Duration,
    /// From the decode request's end to its answer's first byte; none: as long as it takes.
    pub decode: Option<Duration>,
    /// From the prefill answer to the decode request's end: for so long the blocks are surely there.
    pub handoff: Duration,
    /// Field lines, each ending in CRLF, for both legs; empty for none. A field of the client's by the same name gives way.
    pub fields: String,
}

/// A prefill leg that is done.
#[derive(Debug)]
pub struct Prefilled<'a> {
    /// Which endpoint.
    pub position: usize,
    /// From the end of the request to the end of the answer.
    pub took: Duration,
    /// The answer's body.
    pub answer: &'a [u8],
}

/// What a decode leg gets of its prefill leg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedOver {
    /// Its body.
    pub body: Vec<u8>,
    /// The prompt's tokens that the prefill endpoint had in its cache, where blocks are handed on: the decode endpoint's answer
    /// counts those that it fetches, and the client is told these instead.
    pub cached_tokens: Option<u64>,
}

/// Where a request stands for which there is no endpoint just now.
#[derive(Debug)]
pub enum Standing {
    /// There is none, and none will be.
    Nobody,
    /// It is refused.
    Refused(Reply),
    /// It waits for its turn.
    Queued {
        /// Not longer than this.
        until: Instant,
    },
}

/// Where a connection came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The address and port that the client connected to.
    pub vip: SocketAddr,
    /// The client.
    pub client: SocketAddr,
}

/// A request, as far as it is known before an endpoint is chosen.
#[derive(Debug)]
pub struct Request {
    /// Its head.
    pub head: Head,
    /// Where it came in.
    pub arrival: Arrival,
    pub(super) payload: Payload,
}

impl Request {
    /// Its body, in whole or not at all. The payload alone where the client sent chunks.
    pub fn body(&self) -> Body<'_> {
        match &self.payload {
            Payload::Whole { body, .. } => Body::Whole(body.bytes()),
            Payload::Unseen(why) => Body::Unseen(*why),
        }
    }

    /// Bytes of the body that are in memory.
    pub(super) fn body_len(&self) -> usize {
        match &self.payload {
            Payload::Whole { body, .. } => body.len(),
            Payload::Unseen(_) => 0,
        }
    }
}

#[derive(Debug)]
pub(super) enum Payload {
    Whole {
        /// The payload, with room for a head in front of it.
        body: Chunk,
        /// Trailer fields of a chunked body.
        trailers: Vec<u8>,
        lease: Lease,
    },
    Unseen(Unseen),
}

/// The body of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// All of it.
    Whole(&'a [u8]),
    /// It goes by unread.
    Unseen(Unseen),
}

/// Why a body goes by unread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unseen {
    /// Nobody asked for it.
    NotNeeded,
    /// It is larger than the rule wants to read.
    TooLarge,
    /// The memory that all bodies may hold is used up.
    OverMemory,
}

impl Unseen {
    /// The word in `kvlb_miss_details_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NotNeeded => "not_needed",
            Self::TooLarge => "too_large",
            Self::OverMemory => "over_memory",
        }
    }
}

/// Why a decision cannot wait for the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Haste {
    /// The decision's time is over.
    Budget,
    /// The worker pool's queue is full.
    QueueFull,
}

/// What is wanted of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Bodies of up to this many bytes are read before choosing; `None`: the body does not matter.
    pub inspect: Option<usize>,
    /// The longest wait for the next piece of the body, and for a slow one in all.
    pub body_limit: Duration,
    /// A client's FIN behind a complete request may not count as its leaving: what it is decided by will tell.
    pub client_half_close: bool,
}

/// What a rule says about relaying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Time limits.
    pub limits: Limits,
    /// The endpoint is told of the client in `X-Forwarded-For` and `X-Forwarded-Proto`.
    pub forwarded_headers: bool,
    /// A client's FIN behind a complete request does not count as its leaving.
    pub client_half_close: bool,
    /// What the answer says of the prompt is wanted in [`Event::Finished`].
    pub usage: bool,
}

/// An endpoint to ask.
#[derive(Debug)]
pub struct Target<G> {
    /// Its position in the rule (`ep_idx`).
    pub position: usize,
    /// Where it listens; tried in this order.
    pub addresses: Addresses,
    /// Field lines to add to the answer, each ending in CRLF (`decisionHeaders`); empty for none.
    pub fields: Vec<u8>,
    /// Field lines (`name: value`, each ending in CRLF) to add to the request as this endpoint gets it; empty for none. A
    /// field of the client's by the same name gives way. None of them may concern the framing or the connection.
    pub request_fields: Vec<u8>,
    /// Held until the request has ended there.
    pub guard: G,
}

/// The addresses of an endpoint, shared with whoever resolves them.
#[derive(Clone, Debug)]
pub struct Addresses(pub Arc<Vec<SocketAddr>>);

impl Deref for Addresses {
    type Target = [SocketAddr];

    fn deref(&self) -> &[SocketAddr] {
        &self.0
    }
}

/// What happened to a request.
///
/// A call that was asked for an endpoint hears any number of events about endpoints that were passed over, at most one
/// [`Event::Answered`], and then exactly one last one ([`Event::is_last`]), whatever ended the request. So every endpoint
/// that [`Call::choose`] named is accounted for: it was passed over, or it is the one whose position the last event has.
/// (That event names one that was passed over only where a busy one's answer was relayed after all.) Only a request whose
/// task is lost as it stands, by a panic of ours or because its thread ends, gets no last event: its call is just dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Passed over: no connection to an endpoint could be opened. It has seen nothing of the request.
    ConnectFailed {
        /// Which endpoint.
        position: usize,
        /// How.
        failure: ConnectFailure,
    },
    /// Passed over: an endpoint was chosen and never asked: the retry budget has no room, or we have no file descriptor.
    Unasked {
        /// Which endpoint.
        position: usize,
    },
    /// Passed over: an endpoint said that it has not started. Where nobody has a better answer its own is relayed after
    /// all, and [`Event::Answered`] names it.
    Busy {
        /// Which endpoint.
        position: usize,
        /// Its status.
        status: u16,
    },
    /// Passed over: an endpoint's connection ended, or its answer made no sense, and the answer of a busy one is relayed
    /// instead.
    Lost {
        /// Which endpoint.
        position: usize,
    },
    /// Passed over: an endpoint did not do its prefill leg, and the client sees nothing of that.
    PrefillFailed {
        /// Which endpoint.
        position: usize,
        /// Its status; `None`: its connection ended, or its answer made no sense.
        status: Option<u16>,
    },
    /// The head of an endpoint's answer came in, and the client gets it: once at most for a request.
    Answered {
        /// Which endpoint.
        position: usize,
        /// Its status.
        status: u16,
        /// From the end of the request to here.
        waited: Duration,
    },
    /// Last: the answer has been relayed to its end.
    Finished {
        /// Which endpoint.
        position: usize,
        /// Bytes of the answer.
        bytes: u64,
        /// What the answer said of the prompt, where [`Terms::usage`] asked for it.
        usage: Option<Usage>,
    },
    /// Last: an endpoint's connection ended, or its answer made no sense, before anything was relayed.
    Died {
        /// Which endpoint.
        position: usize,
        /// The status of our answer to the client.
        status: u16,
    },
    /// Last: an endpoint's connection ended, or its answer made no sense, while it was being relayed.
    BrokeOff {
        /// Which endpoint.
        position: usize,
    },
    /// Last: an endpoint did not answer, or did not go on, within the rule's limits.
    TimedOut {
        /// Which endpoint.
        position: usize,
        /// The status of our answer to the client, where the endpoint's had not begun.
        status: Option<u16>,
    },
    /// Last: the client left before its answer was complete.
    ClientLeft {
        /// Which endpoint had the request.
        position: Option<usize>,
        /// What the request was waiting for.
        phase: Phase,
    },
    /// Last: the client got an answer of ours, for no fault of an endpoint that was told of already.
    Replied {
        /// Which endpoint had been chosen.
        position: Option<usize>,
        /// The status of the answer.
        status: u16,
    },
    /// Last: we cut the request off: the time to drain was over, or what the client still sent made no sense.
    CutOff {
        /// Which endpoint had the request.
        position: Option<usize>,
    },
}

impl Event {
    /// Whether it is the request's last.
    pub const fn is_last(&self) -> bool {
        match self {
            Self::ConnectFailed { .. }
            | Self::Unasked { .. }
            | Self::Busy { .. }
            | Self::Lost { .. }
            | Self::PrefillFailed { .. }
            | Self::Answered { .. } => false,
            Self::Finished { .. }
            | Self::Died { .. }
            | Self::BrokeOff { .. }
            | Self::TimedOut { .. }
            | Self::ClientLeft { .. }
            | Self::Replied { .. }
            | Self::CutOff { .. } => true,
        }
    }
}

/// How a connect failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    /// Nobody listens there.
    Refused,
    /// No answer within the limit.
    TimedOut,
    /// The network said something else.
    Unreachable,
    /// We have no file descriptor or memory for it: no fault of the endpoint's.
    Ours,
}

impl ConnectFailure {
    /// The word in `kvlb_endpoint_connects_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::TimedOut => "timed_out",
            Self::Unreachable => "unreachable",
            Self::Ours => "out_of_resources",
        }
    }
}

/// What a request is waiting for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The rest of its head.
    #[default]
    Head,
    /// The rest of its body.
    Body,
    /// A decision.
    Decide,
    /// A place at an endpoint.
    Queue,
    /// A connection to an endpoint.
    Connect,
    /// The answer of its prefill leg.
    Prefill,
    /// The endpoint's answer.
    Wait,
    /// The rest of the answer.
    Stream,
}

impl Phase {
    /// Every phase, in order.
    pub const ALL: [Self; 8] =
        [Self::Head, Self::Body, Self::Decide, Self::Queue, Self::Connect, Self::Prefill, Self::Wait, Self::Stream];

    /// The word in `kvlb_client_aborts_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Head => "head",
            Self::Body => "body",
            Self::Decide => "decide",
            Self::Queue => "queue",
            Self::Connect => "connect",
            Self::Prefill => "prefill",
            Self::Wait => "wait",
            Self::Stream => "stream",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

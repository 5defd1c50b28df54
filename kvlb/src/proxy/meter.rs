//! What the proxy counts.

use std::time::Duration;

use super::backplane::{ConnectFailure, Phase};

/// Hears of everything the proxy counts; called from all data threads.
///
/// What belongs to one request of one rule goes to its [`Call`](super::Call) instead.
pub trait Meter: Send + Sync + 'static {
    /// A client's connection was accepted and is open.
    fn client_opened(&self);
    /// A client's connection is gone.
    fn client_closed(&self);
    /// A client's connection was not served.
    fn client_refused(&self, cause: Refused);
    /// A connection could not be accepted; the loop goes on after a pause.
    fn accept_failed(&self);
    /// A client left before its answer was complete.
    fn client_left(&self, phase: Phase);
    /// An answer's head was sent: an endpoint's, or our own with its code.
    fn answered(&self, status: u16, own_code: Option<&'static str>);
    /// Bytes passed on.
    fn relayed(&self, direction: Direction, bytes: u64);
    /// A request was sent once more.
    fn retried(&self, cause: Retry);
    /// A connection to an endpoint was tried; `None`: it is open.
    fn connected(&self, failure: Option<ConnectFailure>);
    /// A request went out on a connection that had carried another before.
    fn reused(&self);
    /// Decisions handed to the worker pool.
    fn offloaded(&self);
    /// A task of one connection panicked; the connection is gone, the thread goes on.
    fn panicked(&self);
    /// A data thread's state, twenty times a second.
    fn tick(&self, pulse: &Pulse);
}

/// Why a client's connection was not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// No rule admits it.
    NotAdmitted,
    /// As many as allowed are open, or as many as the process has descriptors for.
    TooMany,
    /// As many as its rules allow are open.
    RuleFull,
    /// No endpoint may be asked, and its rules would rather have it reset than answered.
    NoEndpoint,
}

impl Refused {
    /// The word in `kvlb_client_connections_refused_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NotAdmitted => "not_admitted",
            Self::TooMany => "too_many",
            Self::RuleFull => "rule_full",
            Self::NoEndpoint => "no_endpoint",
        }
    }
}

/// Which way bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From clients to endpoints.
    ToEndpoint,
    /// From endpoints to clients.
    ToClient,
}

impl Direction {
    /// The word in `kvlb_bytes_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::ToEndpoint => "to_endpoint",
            Self::ToClient => "to_client",
        }
    }
}

/// Why a request was sent once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The endpoint could not be reached: another was asked.
    Connect,
    /// A reused connection ended before any answer: the same endpoint was asked on a fresh one.
    StaleConnection,
    /// The engine said 503 or 429: another endpoint was asked.
    Busy,
    /// A prefill endpoint failed: another was asked.
    Prefill,
    /// No decode endpoint took the request in time: both legs were begun anew.
    Handoff,
}

impl Retry {
    /// The word in `kvlb_retries_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::StaleConnection => "stale_connection",
            Self::Busy => "busy",
            Self::Prefill => "prefill",
            Self::Handoff => "handoff",
        }
    }
}

/// A data thread's state at one of its ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulse {
    /// Which thread.
    pub thread: usize,
    /// How much later than asked the thread's timer fired; up to a millisecond of that is the timer's own.
    pub late: Duration,
    /// The longest time since the last tick that one task held the thread, while all others waited; `None` where nothing
    /// was to be done.
    pub held: Option<Duration>,
    /// Client connections open on this thread.
    pub clients: usize,
    /// Connections to endpoints that wait for a request.
    pub idle_endpoint_connections: usize,
    /// Bytes of the thread's buffers that are in use.
    pub buffer_bytes: usize,
    /// Bytes of free buffers that the thread keeps.
    pub free_buffer_bytes: usize,
    /// Bytes of request bodies held by the process.
    pub body_bytes_held: usize,
}

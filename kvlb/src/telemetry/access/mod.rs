//! The access log: one JSON object a line for each request, written by a thread of its own.
//!
//! Data threads hand over a [`Record`] through a bounded queue and never wait: what does not fit, and what cannot be
//! written, is dropped and counted. A record has places for what is told and no others, all of bounded length; prompts,
//! header fields and the query of a target have none.

mod line;
mod writer;

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::time::{Duration, Instant, SystemTime};

pub use writer::{AccessLog, Destination, OpenError, Writer};

/// Letters kept of a path, a model's name and a request id.
const TEXT_MAX: usize = 256;

/// Which requests get a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sampling {
    /// None.
    #[default]
    Off,
    /// One in so many, told by the trace id, and every one that failed or was sent more than once.
    OneIn(NonZeroU64),
    /// All.
    Full,
}

impl Sampling {
    /// Whether the request of this trace gets a line, whatever becomes of it. Instances that sample alike choose the same
    /// traces.
    pub fn picks(self, trace_id: u128) -> bool {
        match self {
            Self::Off => false,
            // The last bits are the random ones.
            Self::OneIn(count) => trace_id.is_multiple_of(count.get().into()),
            Self::Full => true,
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The client has the whole answer: an endpoint's, or the list of models.
    Complete,
    /// The client got an error of ours, for no fault of an endpoint that had the request.
    Refused,
    /// The client left first.
    ClientLeft,
    /// The endpoint's connection ended before its answer did, or the answer made no sense.
    EndpointDied,
    /// A time limit was reached.
    TimedOut,
    /// We cut it off: the time to drain was over, the client took nothing for too long, or what it still sent made no sense.
    CutOff,
    /// By a fault of ours.
    Lost,
}

impl End {
    /// The word in the line.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Refused => "refused",
            Self::ClientLeft => "client_left",
            Self::EndpointDied => "endpoint_died",
            Self::TimedOut => "timed_out",
            Self::CutOff => "cut_off",
            Self::Lost => "lost",
        }
    }
}

/// The place of a request in its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceIds {
    /// The trace.
    pub trace_id: u128,
    /// Our own span, where the endpoint was told of it.
    pub span_id: Option<u64>,
    /// The client's span, where it told one.
    pub parent_id: Option<u64>,
}

/// What a rule knows of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The rule's number.
    pub rule: u32,
    /// The model, where it is known.
    pub model: Option<Box<str>>,
    /// The step that chose the endpoint; empty where none was chosen.
    pub tier: &'static str,
    /// Why it did not go where its conversation or session was, or empty.
    pub repin: &'static str,
    /// Blocks of the prompts that the endpoint held.
    pub depth: u32,
    /// Full blocks of the prompts that were named.
    pub blocks: u64,
    /// The guard of the KV tier that failed, else empty.
    pub reason: &'static str,
    /// What exactly failed there, or empty.
    pub detail: &'static str,
    /// Tokens of the prompts, where they were counted here.
    pub prompt_tokens: Option<u64>,
    /// Tokens that the endpoint was said to have in its cache, where the KV tier had a word.
    pub predicted_cached_tokens: Option<u64>,
}

/// The prefill leg of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillLeg {
    /// Position of the endpoint.
    pub ep_idx: usize,
    /// Its address.
    pub endpoint: SocketAddr,
    /// From the leg's beginning to the end of its answer.
    pub took: Duration,
}

/// One request, as its line tells it.
#[derive(Debug)]
pub struct Record {
    /// When its first byte could be read.
    pub began: Instant,
    /// The same by the clock on the wall.
    pub time: SystemTime,
    /// The client.
    pub client: SocketAddr,
    /// The address that it connected to.
    pub vip: SocketAddr,
    /// Its method; this and the next are `None` where no head could be read.
    pub method: Option<Box<str>>,
    /// Its path, without the query.
    pub path: Option<Box<str>>,
    /// The client speaks HTTP/1.0.
    pub http_1_0: bool,
    /// What the client calls the request: `X-Request-Id`.
    pub request_id: Option<Box<str>>,
    /// Its place in its trace.
    pub trace: Option<TraceIds>,
    /// The status that the client got.
    pub status: Option<u16>,
    /// The code of an error of ours, else empty.
    pub code: &'static str,
    /// How it ended.
    pub end: Option<End>,
    /// What it was waiting for when it ended.
    pub phase: &'static str,
    /// What its rule knows of it.
    pub facts: Option<Facts>,
    /// Position of the last endpoint that a connection was there for.
    pub ep_idx: Option<usize>,
    /// Its address.
    pub endpoint: Option<SocketAddr>,
    /// The leg before, on a rule that splits requests: then the position and address above are the decode endpoint's.
    pub prefill: Option<Box<PrefillLeg>>,
    /// The connection had carried another request before.
    pub reused: bool,
    /// Times the request went elsewhere or out once more.
    pub retries: u32,
    /// The answer is a stream of events.
    pub streams: bool,
    /// Bytes of the request's body, as far as they were read.
    pub request_bytes: u64,
    /// Bytes of the answer's body, as they were passed on.
    pub response_bytes: u64,
    /// Tokens of the prompt, as the engine reports them.
    pub reported_prompt_tokens: Option<u64>,
    /// How many of them came from its cache, as it reports.
    pub reported_cached_tokens: Option<u64>,
    /// Reading the head took so long.
    pub head: Option<Duration>,
    /// Reading the body, as far as the decision waits for it.
    pub body: Option<Duration>,
    /// Deciding, the wait for a thread included.
    pub decide: Option<Duration>,
    /// Getting connections, failed ones included.
    pub connect: Option<Duration>,
    /// From the end of the request to the head of the answer.
    pub wait: Option<Duration>,
    /// From the request's first byte to the first byte of the answer's body.
    pub first_byte: Option<Duration>,
    /// All of it.
    pub total: Duration,
}

impl Record {
    /// A request that begins.
    pub fn new(began: Instant, time: SystemTime, client: SocketAddr, vip: SocketAddr) -> Self {
        Self {
            began,
            time,
            client,
            vip,
            method: None,
            path: None,
            http_1_0: false,
            request_id: None,
            trace: None,
            status: None,
            code: "",
            end: None,
            phase: "",
            facts: None,
            ep_idx: None,
            endpoint: None,
            prefill: None,
            reused: false,
            retries: 0,
            streams: false,
            request_bytes: 0,
            response_bytes: 0,
            reported_prompt_tokens: None,
            reported_cached_tokens: None,
            head: None,
            body: None,
            decide: None,
            connect: None,
            wait: None,
            first_byte: None,
            total: Duration::ZERO,
        }
    }

    /// Says how the request ended, unless that has been said.
    pub fn ended(&mut self, end: End) {
        self.end.get_or_insert(end);
    }

    /// Whether it failed, or was sent more than once.
    pub fn is_remarkable(&self) -> bool {
        self.end != Some(End::Complete) || self.retries > 0 || self.status.is_some_and(|status| status >= 400)
    }
}

/// Text of a client's, with an end.
pub fn bounded(text: &str) -> Box<str> {
    match text.char_indices().nth(TEXT_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_one_in_so_many_and_the_same_everywhere() {
        let every = |count| Sampling::OneIn(NonZeroU64::new(count).unwrap());
        assert!((1..100).all(|id| every(1).picks(id) && Sampling::Full.picks(id) && !Sampling::Off.picks(id)));
        assert_eq!((1..=1000).filter(|id| every(10).picks(u128::MAX - id)).count(), 100);
    }

    #[test]
    fn a_record_is_small() {
        assert!(size_of::<Record>() <= 640, "{} bytes", size_of::<Record>());
    }

    #[test]
    fn text_has_an_end_between_two_letters() {
        assert_eq!(&*bounded("/v1"), "/v1");
        assert_eq!(*bounded(&"é".repeat(10_000)), format!("{}…", "é".repeat(TEXT_MAX)));
    }
}

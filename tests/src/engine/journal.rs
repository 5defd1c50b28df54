//! What the engine was asked, for tests that must know it: every request, and how it ended.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::HeaderMap;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::handoff::legs::Legs;

/// Requests remembered; older ones are forgotten, so that a long run stays flat.
const REQUESTS_MAX: usize = 20_000;

/// One request as it arrived.
#[derive(Debug, Clone, Serialize)]
pub struct Seen {
    /// Its place in the order of arrival, from 0.
    pub id: u64,
    /// Method.
    pub method: String,
    /// Path with query.
    pub path: String,
    /// Header names in lower case, with their values, in order.
    pub headers: Vec<(String, String)>,
    /// Body bytes received.
    pub body_bytes: usize,
    /// SHA-256 of the body, in hex; empty until the body is complete.
    pub body_sha256: String,
    /// The data-parallel rank that computes it; none for what is not computed.
    pub rank: Option<usize>,
    /// Status answered; none while it has none.
    pub status: Option<u16>,
    /// The client went away before the end.
    pub aborted: bool,
    /// The whole answer was handed over.
    pub finished: bool,
}

impl Seen {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// How many requests there are in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Arrived.
    pub seen: u64,
    /// Being served.
    pub running: u64,
    /// POSTs being served.
    pub posts: u64,
    /// As many of them at a time at most.
    pub posts_peak: u64,
    /// Answered to the end.
    pub finished: u64,
    /// Left by their client, or cut off.
    pub aborted: u64,
    /// Connections accepted.
    pub connections: u64,
}

/// All requests of one engine over its lives; requests to `/debug/…` are not in it.
#[derive(Debug, Default)]
pub(super) struct Journal {
    /// What became of the legs of handoffs.
    pub(super) legs: Legs,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    requests: VecDeque<Seen>,
    counters: Counters,
}

impl Journal {
    pub(super) fn connected(&self) {
        self.inner().counters.connections += 1;
    }

    /// Notes a request and follows it.
    pub(super) fn open(self: &Arc<Self>, method: &str, path: &str, headers: &HeaderMap) -> Tracked {
        let mut inner = self.inner();
        let id = inner.counters.seen;
        inner.counters.seen += 1;
        inner.counters.running += 1;
        let is_post = method == "POST";
        inner.counters.posts += u64::from(is_post);
        inner.counters.posts_peak = inner.counters.posts_peak.max(inner.counters.posts);
        if inner.requests.len() == REQUESTS_MAX {
            inner.requests.pop_front();
        }
        let headers = headers.iter();
        let headers =
            headers.map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
        inner.requests.push_back(Seen {
            id,
            method: method.to_owned(),
            path: path.to_owned(),
            headers: headers.collect(),
            body_bytes: 0,
            body_sha256: String::new(),
            rank: None,
            status: None,
            aborted: false,
            finished: false,
        });
        drop(inner);
        Tracked { journal: Arc::clone(self), id, is_post, finished: false }
    }

    pub(super) fn counters(&self) -> Counters {
        self.inner().counters
    }

    pub(super) fn requests(&self) -> Vec<Seen> {
        self.inner().requests.iter().cloned().collect()
    }

    /// Takes those that have ended.
    pub(super) fn take_ended(&self) -> Vec<Seen> {
        let mut inner = self.inner();
        let (ended, running) =
            std::mem::take(&mut inner.requests).into_iter().partition(|seen| seen.finished || seen.aborted);
        inner.requests = running;
        VecDeque::into(ended)
    }

    fn change(&self, id: u64, change: impl FnOnce(&mut Seen)) {
        if let Some(seen) = self.inner().requests.iter_mut().rev().find(|seen| seen.id == id) {
            change(seen);
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request being served; dropped before [`Tracked::finish`], it counts as aborted.
#[derive(Debug)]
pub(super) struct Tracked {
    journal: Arc<Journal>,
    id: u64,
    is_post: bool,
    finished: bool,
}

impl Tracked {
    pub(super) fn body(&self, bytes: &[u8]) {
        let hex = format!("{:?}", super::names::Digest::from_slice(&Sha256::digest(bytes)));
        self.journal.change(self.id, |seen| (seen.body_bytes, seen.body_sha256) = (bytes.len(), hex));
    }

    pub(super) fn status(&self, status: u16) {
        self.journal.change(self.id, |seen| seen.status = Some(status));
    }

    pub(super) fn rank(&self, rank: usize) {
        self.journal.change(self.id, |seen| seen.rank = Some(rank));
    }

    /// [`Seen::id`].
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// The whole answer was handed over.
    pub(super) fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        let finished = self.finished;
        self.journal.change(self.id, |seen| (seen.finished, seen.aborted) = (finished, !finished));
        let mut inner = self.journal.inner();
        inner.counters.running -= 1;
        inner.counters.posts -= u64::from(self.is_post);
        *(if finished { &mut inner.counters.finished } else { &mut inner.counters.aborted }) += 1;
    }
}

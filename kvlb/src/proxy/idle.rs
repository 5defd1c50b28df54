//! Connections to endpoints that wait for another request.
//!
//! Engines close an idle connection after 5 s, so one is used again only while it is younger than that by a margin. Last
//! in, first out: the fewest stay warm, the others age and go.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Bounds of one data thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) per_endpoint: usize,
    pub(super) total: usize,
    pub(super) age: Duration,
}

/// One data thread's waiting connections.
#[derive(Debug)]
pub(super) struct Idle<S> {
    bounds: Bounds,
    waiting: BTreeMap<SocketAddr, Vec<(S, Instant)>>,
    total: usize,
}

impl<S> Idle<S> {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { bounds, waiting: BTreeMap::new(), total: 0 }
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.total
    }

    /// The connection to `address` that waits for the shortest time, where it is young enough.
    pub(super) fn take(&mut self, address: SocketAddr, now: Instant) -> Option<S> {
        let waiting = self.waiting.get_mut(&address)?;
        let (stream, since) = waiting.pop()?;
        self.total -= 1;
        if now.saturating_duration_since(since) < self.bounds.age {
            return Some(stream);
        }
        // The others are older still.
        self.total -= waiting.len();
        waiting.clear();
        None
    }

    /// Keeps a connection; the oldest of its endpoint goes where there are too many.
    pub(super) fn put(&mut self, address: SocketAddr, stream: S, now: Instant) {
        if self.total >= self.bounds.total || self.bounds.per_endpoint == 0 {
            return;
        }
        let waiting = self.waiting.entry(address).or_default();
        if waiting.len() >= self.bounds.per_endpoint {
            waiting.remove(0);
            self.total -= 1;
        }
        waiting.push((stream, now));
        self.total += 1;
    }

    /// Closes what has waited too long.
    pub(super) fn sweep(&mut self, now: Instant) {
        let age = self.bounds.age;
        self.waiting.retain(|_, waiting| {
            waiting.retain(|(_, since)| now.saturating_duration_since(*since) < age);
            !waiting.is_empty()
        });
        self.total = self.waiting.values().map(Vec::len).sum();
    }

    /// Closes all.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.total = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    const BOUNDS: Bounds = Bounds { per_endpoint: 2, total: 3, age: Duration::from_secs(4) };

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn the_last_one_in_is_the_first_one_out() {
        let now = clock::now();
        let mut idle = Idle::new(BOUNDS);
        idle.put(address(1), "old", now);
        idle.put(address(1), "new", now);
        idle.put(address(1), "newest", now);
        assert_eq!(idle.len(), 2);
        assert_eq!(idle.take(address(2), now), None);
        assert_eq!(idle.take(address(1), now), Some("newest"));
        assert_eq!(idle.take(address(1), now), Some("new"));
        assert_eq!((idle.take(address(1), now), idle.len()), (None, 0));
    }

    #[test]
    fn nothing_is_used_again_after_four_seconds() {
        let now = clock::now();
        let mut idle = Idle::new(BOUNDS);
        idle.put(address(1), "a", now);
        idle.put(address(1), "b", now + Duration::from_secs(1));
        assert_eq!(idle.take(address(1), now + Duration::from_secs(5)), None);
        assert_eq!(idle.len(), 0);
        idle.put(address(1), "c", now);
        idle.put(address(2), "d", now + Duration::from_secs(3));
        idle.sweep(now + Duration::from_secs(4));
        assert_eq!(idle.len(), 1);
        assert_eq!(idle.take(address(2), now + Duration::from_secs(4)), Some("d"));
    }

    #[test]
    fn the_total_is_bounded_over_all_endpoints() {
        let now = clock::now();
        let mut idle = Idle::new(BOUNDS);
        for port in 1..=5 {
            idle.put(address(port), port, now);
        }
        assert_eq!(idle.len(), 3);
        idle.clear();
        assert_eq!((idle.len(), idle.take(address(1), now)), (0, None));
    }
}

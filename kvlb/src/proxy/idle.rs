//! Connections to endpoints that wait for another request.
//!
//! Engines close an idle connection after 5 s, so one is used again only while it is younger than that by a margin. Last
//! in, first out: the fewest stay warm, the others age and go.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Connections closed in one sweep: closing one takes 5 to 10 µs, and a thread is not to be held for a millisecond. At
/// twenty sweeps a second the full total is gone within seven seconds.
const SWEPT_MAX: usize = 32;

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
        // The others are older still: they are left to the sweep.
        (now.saturating_duration_since(since) < self.bounds.age).then_some(stream)
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

    /// Closes what has waited too long, some of it now and some the next time. Says whether there was anything.
    pub(super) fn sweep(&mut self, now: Instant) -> bool {
        let (age, mut left) = (self.bounds.age, SWEPT_MAX);
        self.waiting.retain(|_, waiting| {
            let old = |(_, since): &&(S, Instant)| now.saturating_duration_since(*since) >= age;
            let count = waiting.iter().take_while(old).take(left).count();
            waiting.drain(..count);
            left -= count;
            !waiting.is_empty()
        });
        self.total -= SWEPT_MAX - left;
        left < SWEPT_MAX
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
        assert_eq!(idle.take(address(1), now + Duration::from_secs(5)), None);
        assert_eq!(idle.len(), 0);
        idle.put(address(1), "c", now);
        idle.put(address(2), "d", now + Duration::from_secs(3));
        assert!(idle.sweep(now + Duration::from_secs(4)) && !idle.sweep(now + Duration::from_secs(4)));
        assert_eq!(idle.len(), 1);
        assert_eq!(idle.take(address(2), now + Duration::from_secs(4)), Some("d"));
    }

    #[test]
    fn many_are_closed_bit_by_bit() {
        let now = clock::now();
        let mut idle = Idle::new(Bounds { per_endpoint: SWEPT_MAX, total: 1000, age: Duration::from_secs(4) });
        for port in 0..3 {
            (0..SWEPT_MAX - 2).for_each(|number| idle.put(address(port), number, now));
            idle.put(address(port), 999, now + Duration::from_secs(9));
        }
        let counts: Vec<usize> = (0..4)
            .map(|_| {
                idle.sweep(now + Duration::from_secs(10));
                idle.len()
            })
            .collect();
        assert_eq!(counts, [93 - 32, 93 - 64, 3, 3]);
        assert_eq!(idle.take(address(2), now + Duration::from_secs(10)), Some(999));
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

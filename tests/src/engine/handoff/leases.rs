//! Blocks kept for a decode elsewhere, until it has read them or the lease ends.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::legs::LegId;
use crate::engine::pool::BlockId;

/// Ended leases remembered; a decode this late is none of a test.
const ENDED_MAX: usize = 100_000;

/// One request's blocks.
#[derive(Debug)]
pub(in crate::engine) struct Lease {
    /// The prefill's place in the journal.
    pub(in crate::engine) leg: LegId,
    /// Blocks of the full-attention group, in prompt order.
    pub(in crate::engine) blocks: Vec<BlockId>,
    /// Blocks of the window group.
    pub(in crate::engine) window: Vec<BlockId>,
    expires: Instant,
}

impl Lease {
    /// All its blocks.
    fn pinned(&self) -> usize {
        self.blocks.len() + self.window.len()
    }
}

/// What is known of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Known {
    /// Its blocks are kept.
    Open,
    /// They were kept: read, or expired.
    Ended,
    /// The request was aborted before it had anything to keep.
    Aborted,
    /// No such request has ended here.
    Never,
}

/// All leases of one rank in one life.
#[derive(Debug)]
pub(in crate::engine) struct Leases {
    lasts: Duration,
    open: BTreeMap<String, Lease>,
    ended: HashMap<String, Known>,
    order: VecDeque<String>,
}

impl Leases {
    /// None; each one lasts as long as this.
    pub(in crate::engine) fn new(lasts: Duration) -> Self {
        Self { lasts, open: BTreeMap::new(), ended: HashMap::new(), order: VecDeque::new() }
    }

    /// Keeps blocks. One of the same key is replaced; its blocks come back.
    #[must_use]
    pub(in crate::engine) fn grant(
        &mut self,
        key: &str,
        leg: LegId,
        blocks: Vec<BlockId>,
        window: Vec<BlockId>,
        now: Instant,
    ) -> Option<Lease> {
        let lease = Lease { leg, blocks, window, expires: now + self.lasts };
        self.open.insert(key.to_owned(), lease)
    }

    /// What is known of a key.
    pub(in crate::engine) fn known(&self, key: &str) -> Known {
        if self.open.contains_key(key) {
            return Known::Open;
        }
        self.ended.get(key).copied().unwrap_or(Known::Never)
    }

    /// The blocks kept under a key.
    pub(in crate::engine) fn blocks(&self, key: &str) -> Option<&[BlockId]> {
        self.open.get(key).map(|lease| lease.blocks.as_slice())
    }

    /// The decode side is still there: the lease lasts two thirds of its length from now on, never less than before.
    ///
    /// Source: vLLM 0.32.0, heartbeats of the NIXL connector.
    pub(in crate::engine) fn renew(&mut self, key: &str, now: Instant) {
        if let Some(lease) = self.open.get_mut(key) {
            lease.expires = lease.expires.max(now + self.lasts * 2 / 3);
        }
    }

    /// The decode side has read, or will not.
    pub(in crate::engine) fn end(&mut self, key: &str) -> Option<Lease> {
        let lease = self.open.remove(key)?;
        self.remember(key.to_owned(), Known::Ended);
        Some(lease)
    }

    /// A request ended without anything to keep.
    pub(in crate::engine) fn aborted(&mut self, key: &str) {
        self.remember(key.to_owned(), Known::Aborted);
    }

    /// Those whose time is over.
    pub(in crate::engine) fn expire(&mut self, now: Instant) -> Vec<Lease> {
        let over: Vec<String> =
            self.open.iter().filter(|(_, lease)| lease.expires <= now).map(|(key, _)| key.clone()).collect();
        over.iter().filter_map(|key| self.end(key)).collect()
    }

    /// When the next one ends by itself.
    pub(in crate::engine) fn next_expiry(&self) -> Option<Instant> {
        self.open.values().map(|lease| lease.expires).min()
    }

    /// How many there are, and how many blocks they pin.
    pub(in crate::engine) fn pinned(&self) -> (usize, usize) {
        (self.open.len(), self.open.values().map(Lease::pinned).sum())
    }

    fn remember(&mut self, key: String, known: Known) {
        if self.order.len() == ENDED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.ended.remove(&oldest);
        }
        if self.ended.insert(key.clone(), known).is_none() {
            self.order.push_back(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::{Known, Leases};

    #[test]
    fn a_lease_ends_when_it_is_read_or_its_time_is_over_and_is_renewed_by_two_thirds() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut leases = Leases::new(3 * second);
        for key in ["a", "b", "c"] {
            assert!(leases.grant(key, 0, vec![1, 2], vec![3], start).is_none());
        }
        assert_eq!(leases.pinned(), (3, 9));
        assert_eq!(leases.end("a").map(|lease| lease.blocks), Some(vec![1, 2]));
        assert!(leases.end("a").is_none());
        leases.renew("b", start);
        assert_eq!(leases.next_expiry(), Some(start + 3 * second), "a renewal never shortens");
        leases.renew("b", start + 2 * second);
        assert_eq!(leases.expire(start + 3 * second).len(), 1);
        assert_eq!(
            ["a", "b", "c", "d"].map(|key| leases.known(key)),
            [Known::Ended, Known::Open, Known::Ended, Known::Never]
        );
        assert_eq!(leases.expire(start + 4 * second).len(), 1);
        assert_eq!((leases.pinned(), leases.next_expiry()), ((0, 0), None));
        leases.aborted("d");
        assert_eq!(leases.known("d"), Known::Aborted);
    }
}

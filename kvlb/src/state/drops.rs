//! Connections and frames that the kernel dropped of late: some of them, as its programs tell.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use parking_lot::Mutex;

/// Drops that are kept for each reason: half a minute of a flood on one CPU, which must not push out those for others.
const KEPT: usize = 256;

/// One drop that was told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DropSeen {
    /// When, in milliseconds since 1970.
    pub at: u64,
    /// Why, in one word.
    pub reason: &'static str,
    /// Who sent it, and the VIP, where the frame was read that far.
    pub between: Option<(SocketAddr, SocketAddr)>,
    /// The oldest rule at that VIP.
    pub rule: Option<u32>,
    /// How many it stands for.
    pub count: u32,
}

/// The last ones of each reason.
#[derive(Debug, Default)]
pub struct Drops(Mutex<BTreeMap<&'static str, VecDeque<DropSeen>>>);

impl Drops {
    /// One more.
    pub fn add(&self, seen: DropSeen) {
        let mut drops = self.0.lock();
        let of_reason = drops.entry(seen.reason).or_default();
        if of_reason.len() == KEPT {
            of_reason.pop_front();
        }
        of_reason.push_back(seen);
    }

    /// All that are kept, the latest first.
    pub fn latest(&self) -> Vec<DropSeen> {
        let mut all: Vec<_> = self.0.lock().values().flatten().cloned().collect();
        all.sort_by_key(|seen| std::cmp::Reverse(seen.at));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_for_one_reason_pushes_out_no_other() {
        let drops = Drops::default();
        let seen = |at, reason| DropSeen { at, reason, between: None, rule: None, count: 1 };
        drops.add(seen(1, "denied"));
        for at in 2..2000 {
            drops.add(seen(at, "rate"));
        }
        let kept = drops.latest();
        assert_eq!((kept.len(), kept[0].at, kept[KEPT].reason), (KEPT + 1, 1999, "denied"));
    }
}

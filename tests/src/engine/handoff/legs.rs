//! What became of each leg of each handoff, for a test that must know it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

/// Place of a leg in the journal.
pub(in crate::engine) type LegId = u64;

/// Legs remembered; older ones are forgotten, so that a long run stays flat.
const LEGS_MAX: usize = 20_000;

/// Which leg of a handoff a request was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LegKind {
    /// `do_remote_decode`: computes for a decode elsewhere.
    Prefill,
    /// `do_remote_prefill`: goes on with what was computed elsewhere.
    Decode,
}

/// What became of a leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LegFate {
    /// Prefill: computing. Decode: waiting, or reading.
    Open,
    /// Prefill: its blocks are kept for a decode.
    Granted,
    /// Prefill: the decode has read its blocks, or said that it will not.
    Read,
    /// Prefill: nobody read them in time; they are free.
    Expired,
    /// Prefill: the engine (or the rank) ended with the lease open. Decode: it ended before the read did.
    Lost,
    /// Prefill: left by its client, or failed on purpose, before it had anything to keep.
    Dropped,
    /// Decode: what it read was the KV of its own prompt.
    PulledOwn,
    /// Decode: what it read was somebody else's. The answer is wrong, and looks right.
    PulledForeign,
    /// Decode: the read failed; the prompt was computed here.
    Recomputed,
    /// Decode: the read failed, and so did the request ([`super::super::FaultPlan::fail_on_pull_failure`]).
    Failed,
    /// Decode: its parameters name no source; the prompt was computed here.
    Ignored,
    /// Decode: left by its client, or refused, before its read began; the prefill side was told.
    Abandoned,
}

/// One leg of a handoff: a request with `kv_transfer_params` that a connector acts on, one for each of its prompts and copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Leg {
    /// Its place in the order of the legs, from 0.
    pub id: u64,
    /// Which one.
    pub kind: LegKind,
    /// [`super::super::Seen::id`] of its request.
    pub seen: u64,
    /// `X-Request-Id` of its request.
    pub request_id: Option<String>,
    /// The rank that computed it.
    pub rank: Option<usize>,
    /// Prefill: the request's identity in this engine, or the transfer's; none until there is one. Decode: the one it read from.
    pub key: Option<String>,
    /// Decode: the engine it read from.
    pub from_engine: Option<String>,
    /// Prefill: blocks kept. Decode: blocks read.
    pub blocks: usize,
    /// Decode: tokens taken from elsewhere.
    pub tokens: usize,
    /// What became of it.
    pub fate: LegFate,
    /// Why a read failed.
    pub why: Option<String>,
}

/// What one engine's handoffs add up to, over its lives; the first two are of this moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Handoffs {
    /// Leases open now: blocks kept for a decode that has not come.
    pub leases_open: usize,
    /// Blocks they pin.
    pub blocks_pinned: usize,
    /// Leases granted. Each is open, read, expired or lost.
    pub granted: u64,
    /// Leases that ended because the decode side said so.
    pub read: u64,
    /// Leases that ended by themselves.
    pub expired: u64,
    /// Leases that ended with the engine or the rank.
    pub lost: u64,
    /// Prefills that had nothing to keep.
    pub dropped: u64,
    /// Decodes that read their own prompt's KV.
    pub pulled_own: u64,
    /// Decodes that read somebody else's.
    pub pulled_foreign: u64,
    /// Decodes whose read failed, computed here.
    pub recomputed: u64,
    /// Decodes whose read failed, and they with it.
    pub failed: u64,
    /// Decodes that named no source.
    pub ignored: u64,
    /// Decodes that ended before they read.
    pub abandoned: u64,
}

impl Handoffs {
    fn count(&mut self, fate: LegFate, kind: LegKind) {
        let counter = match (fate, kind) {
            (LegFate::Open, _) | (LegFate::Lost, LegKind::Decode) => return,
            (LegFate::Granted, _) => &mut self.granted,
            (LegFate::Read, _) => &mut self.read,
            (LegFate::Expired, _) => &mut self.expired,
            (LegFate::Lost, _) => &mut self.lost,
            (LegFate::Dropped, _) => &mut self.dropped,
            (LegFate::PulledOwn, _) => &mut self.pulled_own,
            (LegFate::PulledForeign, _) => &mut self.pulled_foreign,
            (LegFate::Recomputed, _) => &mut self.recomputed,
            (LegFate::Failed, _) => &mut self.failed,
            (LegFate::Ignored, _) => &mut self.ignored,
            (LegFate::Abandoned, _) => &mut self.abandoned,
        };
        *counter += 1;
    }
}

/// All legs of one engine over its lives.
#[derive(Debug, Default)]
pub(in crate::engine) struct Legs(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    legs: VecDeque<Leg>,
    next: LegId,
    sums: Handoffs,
}

impl Legs {
    /// Notes a leg.
    pub(in crate::engine) fn open(&self, kind: LegKind, seen: u64, request_id: Option<String>) -> LegId {
        let mut inner = self.inner();
        let id = inner.next;
        inner.next += 1;
        if inner.legs.len() == LEGS_MAX {
            inner.legs.pop_front();
        }
        inner.legs.push_back(Leg {
            id,
            kind,
            seen,
            request_id,
            rank: None,
            key: None,
            from_engine: None,
            blocks: 0,
            tokens: 0,
            fate: LegFate::Open,
            why: None,
        });
        id
    }

    /// Adds what has become known of a leg, its fate left out.
    pub(in crate::engine) fn note(&self, id: LegId, change: impl FnOnce(&mut Leg)) {
        let mut inner = self.inner();
        if let Some(leg) = inner.leg(id) {
            change(leg);
        }
    }

    /// A leg's fate, counted.
    pub(in crate::engine) fn fate(&self, id: LegId, fate: LegFate, change: impl FnOnce(&mut Leg)) {
        let mut inner = self.inner();
        let Some(leg) = inner.leg(id) else { return };
        leg.fate = fate;
        change(leg);
        let kind = leg.kind;
        inner.sums.count(fate, kind);
    }

    /// The engine has ended, or one of its ranks: what was open is lost.
    pub(in crate::engine) fn lost(&self, rank: Option<usize>) {
        let mut inner = self.inner();
        let Inner { legs, sums, .. } = &mut *inner;
        let open = |leg: &&mut Leg| matches!(leg.fate, LegFate::Open | LegFate::Granted);
        for leg in legs.iter_mut().filter(open).filter(|leg| rank.is_none() || leg.rank == rank) {
            let lost = if leg.fate == LegFate::Open && leg.kind == LegKind::Prefill {
                LegFate::Dropped
            } else {
                LegFate::Lost
            };
            leg.fate = lost;
            sums.count(lost, leg.kind);
        }
    }

    /// All remembered.
    pub(in crate::engine) fn all(&self) -> Vec<Leg> {
        self.inner().legs.iter().cloned().collect()
    }

    /// Takes those whose fate is sealed.
    pub(in crate::engine) fn take_ended(&self) -> Vec<Leg> {
        let mut inner = self.inner();
        let (open, ended) = std::mem::take(&mut inner.legs)
            .into_iter()
            .partition(|leg| matches!(leg.fate, LegFate::Open | LegFate::Granted));
        inner.legs = open;
        VecDeque::into(ended)
    }

    /// What they add up to; what is open now, the ranks know.
    pub(in crate::engine) fn sums(&self) -> Handoffs {
        self.inner().sums
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn leg(&mut self, id: LegId) -> Option<&mut Leg> {
        self.legs.iter_mut().rev().find(|leg| leg.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::{LegFate, LegKind, Legs};

    #[test]
    fn each_lease_granted_is_open_or_has_one_end() {
        let legs = Legs::default();
        let [read, expired, open, computing] =
            [0, 1, 2, 3].map(|seen| legs.open(LegKind::Prefill, seen, Some(format!("r{seen}"))));
        for leg in [read, expired, open] {
            legs.fate(leg, LegFate::Granted, |leg| leg.blocks = 2);
        }
        legs.fate(read, LegFate::Read, |_| {});
        legs.fate(expired, LegFate::Expired, |_| {});
        assert_eq!(legs.take_ended().iter().map(|leg| leg.fate).collect::<Vec<_>>(), [LegFate::Read, LegFate::Expired]);
        legs.lost(None);
        let fates: Vec<_> = legs.all().iter().map(|leg| (leg.id, leg.fate)).collect();
        assert_eq!(fates, [(open, LegFate::Lost), (computing, LegFate::Dropped)]);
        let sums = legs.sums();
        assert_eq!((sums.granted, sums.read, sums.expired, sums.lost, sums.dropped), (3, 1, 1, 1, 1));
    }
}

//! Handoffs in the step loop: what a prefill keeps when it ends, and how a decode waits for what it reads.
//!
//! As vLLM's: a decode whose turn has come takes the blocks of its whole prompt and waits aside while they are read; when they are there
//! they are cached and told of, and its last prompt token is computed here, from which the first token of the answer comes.

use std::time::Duration;

use tokio::time::Instant;

use super::{Finish, Output, Scheduler, SeqId};
use crate::engine::cache::{Cache, Sequence};
use crate::engine::handoff::contents::Content;
use crate::engine::handoff::leases::{Known, Lease, Leases};
use crate::engine::handoff::legs::LegId;
use crate::engine::handoff::pull::{Errand, Pull};
use crate::engine::handoff::{Held, Part, Source};
use crate::engine::pool::BlockId;

/// What happened to a leg, for the journal.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::engine) enum Fact {
    /// A prefill's blocks are kept under a key.
    Granted { leg: LegId, key: String, blocks: usize },
    /// A prefill ended with nothing to keep.
    Dropped(LegId),
    /// A prefill's blocks were read.
    Read(LegId),
    /// A prefill's blocks were not read in time.
    Expired(LegId),
    /// A decode ended before its read began.
    Abandoned(LegId),
}

/// Leases given, and requests that wait for a read.
#[derive(Debug)]
pub(super) struct Handoffs {
    leases: Leases,
    pulling: Vec<Sequence>,
    /// Aborted while their read is under way; their blocks go when it ends.
    cancelled: Vec<SeqId>,
    facts: Vec<Fact>,
    errands: Vec<Errand>,
}

impl Handoffs {
    /// None; a lease lasts as long as this.
    pub(super) fn new(lease: Duration) -> Self {
        Self {
            leases: Leases::new(lease),
            pulling: Vec::new(),
            cancelled: Vec::new(),
            facts: Vec::new(),
            errands: Vec::new(),
        }
    }
}

impl Scheduler {
    /// What happened since the last call.
    pub(in crate::engine) fn take_facts(&mut self) -> Vec<Fact> {
        std::mem::take(&mut self.handoffs.facts)
    }

    /// What is to be done on the wire since the last call.
    pub(in crate::engine) fn take_errands(&mut self) -> Vec<Errand> {
        std::mem::take(&mut self.handoffs.errands)
    }

    /// Events that no step will bring before something else happens.
    pub(in crate::engine) fn take_events(&mut self) -> Vec<crate::engine::wire::Event> {
        self.cache.take_events()
    }

    /// Requests that wait for a read, those just aborted not counted.
    pub(in crate::engine) fn pulling(&self) -> usize {
        self.handoffs.pulling.len() - self.handoffs.cancelled.len()
    }

    /// Whether a request still waits for its read to begin.
    pub(in crate::engine) fn awaits_its_pull(&self, id: SeqId) -> bool {
        self.inbox.iter().chain(&self.waiting).any(|seq| seq.id == id && seq.unpulled)
    }

    /// A request has come; one that reads from elsewhere asks to keep its blocks while it waits.
    pub(super) fn arrived(&mut self, seq: &Sequence) {
        if let Some(Part::Decode { source: source @ Source::Blocks { .. }, .. }) = &seq.request.part {
            self.handoffs.errands.push(Errand::Renew(seq.id, source.clone()));
        }
    }

    /// Sets a request aside for its read; it stays in the queue when the pool has too few free blocks.
    pub(super) fn begin_pull(&mut self, mut seq: Sequence, now: Instant) -> bool {
        let Some(Part::Decode { source, leg }) = seq.request.part.clone() else { return true };
        let hits = self.cache.hits(&seq);
        let hit_tokens = hits.blocks() * self.cache.block_size();
        let prompt = seq.request.prompt.len();
        seq.computed = hit_tokens;
        if !self.cache.reserve(&mut seq, prompt - hit_tokens, &hits) {
            seq.computed = 0;
            self.waiting.push_front(seq);
            return false;
        }
        seq.unpulled = false;
        self.admitted(&mut seq, hit_tokens, now);
        let until = prompt.div_ceil(self.cache.block_size());
        let group = usize::from(self.cache.full_group());
        let pull = Pull { id: seq.id, source, from: hits.blocks(), until, group, leg };
        self.handoffs.errands.push(Errand::Pull(pull));
        self.handoffs.pulling.push(seq);
        true
    }

    /// What a request waited for is there: whether it is its own prompt's, and how many tokens. None when its client has left meanwhile.
    /// `reports` is what the answer says of cached tokens instead.
    pub(in crate::engine) fn pulled(
        &mut self,
        pull: &Pull,
        read: Vec<Content>,
        reports: Option<usize>,
    ) -> Option<(bool, usize)> {
        let mut seq = self.end_pull(pull.id)?;
        let prompt = seq.request.prompt.len();
        seq.pulled_tokens = prompt - seq.computed;
        seq.reported_cached = reports;
        self.stats.pulled(seq.pulled_tokens, seq.pulled_tokens);
        let own = self.cache.take_in(&mut seq, pull.from, read);
        let tokens = seq.pulled_tokens;
        // The last token is computed here, or there would be nothing to sample from.
        seq.computed = prompt - 1;
        self.waiting.push_front(seq);
        Some((own, tokens))
    }

    /// A read failed: its request is computed here, or fails with it. False when its client has left meanwhile.
    pub(in crate::engine) fn pull_failed(&mut self, id: SeqId, fail: bool) -> bool {
        let Some(mut seq) = self.end_pull(id) else { return false };
        self.stats.pulled(seq.request.prompt.len() - seq.computed, 0);
        if !fail {
            self.waiting.push_front(seq);
            return true;
        }
        self.cache.release(&mut seq);
        let output = Output { choice: seq.request.choice, token: 0, cached_tokens: 0, finish: Some(Finish::Error) };
        if seq.request.sink.send(output).is_err() {
            tracing::trace!("whoever asked is gone");
        }
        true
    }

    /// Takes a request back from where it waited; one that was aborted gives its blocks back.
    fn end_pull(&mut self, id: SeqId) -> Option<Sequence> {
        let index = self.handoffs.pulling.iter().position(|seq| seq.id == id)?;
        let mut seq = self.handoffs.pulling.swap_remove(index);
        if let Some(at) = self.handoffs.cancelled.iter().position(|cancelled| *cancelled == id) {
            self.handoffs.cancelled.swap_remove(at);
            self.cache.release(&mut seq);
            return None;
        }
        Some(seq)
    }

    /// Drops a request that does not run; whether it was one. vLLM tells the prefill side when the read has not begun.
    pub(super) fn abort_waiting(&mut self, id: SeqId) -> bool {
        if self.handoffs.pulling.iter().any(|seq| seq.id == id) {
            if !self.handoffs.cancelled.contains(&id) {
                self.handoffs.cancelled.push(id);
            }
            return true;
        }
        let queue = if self.inbox.iter().any(|seq| seq.id == id) { &mut self.inbox } else { &mut self.waiting };
        let Some(index) = queue.iter().position(|seq| seq.id == id) else { return false };
        let Some(mut seq) = queue.remove(index) else { return false };
        self.cache.release(&mut seq);
        self.dropped(&seq);
        true
    }

    /// A request has ended without an answer: a prefill has nothing to keep, and a decode that has not read needs nothing.
    pub(super) fn dropped(&mut self, seq: &Sequence) {
        match &seq.request.part {
            Some(Part::Prefill { leg, key, .. }) => {
                self.handoffs.leases.aborted(key);
                self.handoffs.facts.push(Fact::Dropped(*leg));
            }
            Some(Part::Decode { source, leg }) if seq.unpulled => {
                self.handoffs.facts.push(Fact::Abandoned(*leg));
                self.handoffs.errands.push(Errand::Tell(source.clone()));
            }
            _ => {}
        }
    }

    /// Keeps the blocks of a prefill that has ended; whether it is one.
    pub(super) fn keep(&mut self, seq: &mut Sequence, now: Instant) -> bool {
        let Some(Part::Prefill { key, leg, handed }) = seq.request.part.clone() else { return false };
        let (blocks, window) = Cache::keep(seq);
        let groups =
            if self.cache.full_group() == 0 { vec![blocks.clone()] } else { vec![window.clone(), blocks.clone()] };
        let cached = seq.hit_tokens.unwrap_or(0);
        handed.leave(Held { key: key.clone(), groups, tokens: seq.computed, cached });
        let count = blocks.len() + window.len();
        if let Some(replaced) = self.handoffs.leases.grant(&key, leg, blocks, window, now) {
            self.handoffs.facts.push(Fact::Expired(replaced.leg));
            self.let_go(replaced);
        }
        self.handoffs.facts.push(Fact::Granted { leg, key, blocks: count });
        true
    }

    /// What these blocks hold now, for a decode that was told of them; none where no such request has ended here.
    pub(in crate::engine) fn read(&self, key: &str, blocks: &[BlockId]) -> Option<Vec<Content>> {
        match self.handoffs.leases.known(key) {
            Known::Open | Known::Ended => Some(self.cache.contents(blocks)),
            Known::Aborted | Known::Never => None,
        }
    }

    /// What a transfer's blocks hold; none until they are computed.
    ///
    /// # Errors
    /// When they never will be, or are free again.
    pub(in crate::engine) fn transfer(
        &self,
        key: &str,
        from: usize,
        until: usize,
    ) -> Result<Option<Vec<Content>>, String> {
        match self.handoffs.leases.known(key) {
            Known::Never => Ok(None),
            Known::Open => {
                let blocks = self.handoffs.leases.blocks(key).unwrap_or_default();
                let wanted = blocks.get(from..until);
                let wanted = wanted.ok_or_else(|| format!("{} blocks for a prompt of {until}", blocks.len()))?;
                Ok(Some(self.cache.contents(wanted)))
            }
            Known::Ended => Err("the transfer is over".to_owned()),
            Known::Aborted => Err("the prefill was aborted".to_owned()),
        }
    }

    /// The decode side needs a request's blocks no longer.
    pub(in crate::engine) fn end_lease(&mut self, key: &str) {
        if let Some(lease) = self.handoffs.leases.end(key) {
            self.handoffs.facts.push(Fact::Read(lease.leg));
            self.let_go(lease);
        }
    }

    /// The decode side will still need them.
    pub(in crate::engine) fn renew_lease(&mut self, key: &str, now: Instant) {
        self.handoffs.leases.renew(key, now);
    }

    /// Ends the leases whose time is over.
    pub(in crate::engine) fn expire_leases(&mut self, now: Instant) {
        for lease in self.handoffs.leases.expire(now) {
            self.stats.expired_leases += 1;
            self.handoffs.facts.push(Fact::Expired(lease.leg));
            self.let_go(lease);
        }
    }

    /// When the next lease ends by itself.
    pub(in crate::engine) fn next_expiry(&self) -> Option<Instant> {
        self.handoffs.leases.next_expiry()
    }

    /// Leases open, and blocks they pin.
    pub(in crate::engine) fn pinned(&self) -> (usize, usize) {
        self.handoffs.leases.pinned()
    }

    fn let_go(&mut self, lease: Lease) {
        self.cache.let_go(lease.blocks, lease.window);
    }
}

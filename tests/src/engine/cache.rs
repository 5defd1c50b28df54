//! The prefix cache over the pool: finds a request's leading cached run, gives it blocks, and notes the events this makes.

use tokio::time::Instant;

use super::names::{Digest, Extra, Naming};
use super::pool::{BlockId, Change, Pool};
use super::scheduler::{Request, SeqId};
use super::wire::{Event, Stored};

/// A request on its way through the engine.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Its identity.
    pub(super) id: SeqId,
    /// What was asked.
    pub(super) request: Request,
    /// Prompt, then the tokens generated so far.
    pub(super) tokens: Vec<u32>,
    /// Tokens whose KV is there.
    pub(super) computed: usize,
    /// Prompt tokens found in the cache at the first admission.
    pub(super) hit_tokens: Option<usize>,
    /// How often it lost its blocks.
    pub(super) preemptions: usize,
    /// When it arrived.
    pub(super) queued: Instant,
    /// When it first ran.
    pub(super) started: Option<Instant>,
    /// When its first token came.
    pub(super) first_token: Option<Instant>,
    /// When its latest token came.
    pub(super) last_token: Option<Instant>,
    /// Digests of the full blocks of `tokens`.
    digests: Vec<Digest>,
    blocks: Vec<BlockId>,
    /// Leading blocks that are in the cache.
    cached_blocks: usize,
}

impl Sequence {
    /// A request that has just arrived.
    pub(super) fn new(id: SeqId, request: Request, now: Instant) -> Self {
        Self {
            id,
            tokens: request.prompt.clone(),
            request,
            computed: 0,
            hit_tokens: None,
            preemptions: 0,
            queued: now,
            started: None,
            first_token: None,
            last_token: None,
            digests: Vec::new(),
            blocks: Vec::new(),
            cached_blocks: 0,
        }
    }

    /// Tokens generated so far.
    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// The extra keys of block number `index`: the adapter in every block, the salt in the first.
    fn extras(&self, index: usize) -> Vec<Extra> {
        let lora = self.request.lora.iter();
        let lora = lora.map(|(_, name, path)| Extra::Lora { name: name.clone(), path: path.clone() });
        let salt = self.request.salt.iter().filter(|salt| index == 0 && !salt.is_empty());
        lora.chain(salt.map(|salt| Extra::Salt(salt.clone()))).collect()
    }
}

/// The pool, how its blocks are named, and the events not yet told.
#[derive(Debug)]
pub(super) struct Cache {
    naming: Naming,
    pool: Pool,
    enabled: bool,
    events: Vec<Event>,
}

impl Cache {
    /// An empty cache over `blocks` blocks, the null block included; nothing is ever cached unless `enabled`.
    pub(super) fn new(naming: Naming, blocks: usize, enabled: bool) -> Self {
        Self { naming, pool: Pool::new(blocks), enabled, events: Vec::new() }
    }

    /// The blocks and what they hold.
    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Tokens per block.
    pub(super) fn block_size(&self) -> usize {
        self.naming.block_size()
    }

    /// Events since the last call, in the order they happened.
    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Names the blocks of `seq` that have become full.
    pub(super) fn name_blocks(&self, seq: &mut Sequence) {
        let size = self.naming.block_size();
        while self.enabled && (seq.digests.len() + 1) * size <= seq.tokens.len() {
            let index = seq.digests.len();
            let tokens = &seq.tokens[index * size..(index + 1) * size];
            let digest = self.naming.block(seq.digests.last(), tokens, &seq.extras(index));
            seq.digests.push(digest);
        }
    }

    /// The leading cached run. The last token is always computed, or there would be nothing to sample from.
    pub(super) fn hits(&self, seq: &Sequence) -> Vec<BlockId> {
        self.pool.hits(seq.digests.iter().take((seq.tokens.len() - 1) / self.naming.block_size()))
    }

    /// Gives `seq` the blocks for `tokens` more tokens after `hits`, and caches what becomes full; nothing changes when the pool has
    /// too few free blocks.
    pub(super) fn allocate(&mut self, seq: &mut Sequence, tokens: usize, hits: &[BlockId]) -> bool {
        let until = seq.computed + tokens;
        let needed = until.div_ceil(self.naming.block_size()).saturating_sub(seq.blocks.len() + hits.len());
        if needed + self.pool.idle(hits) > self.pool.free_blocks() {
            return false;
        }
        self.pool.touch(hits);
        seq.blocks.extend_from_slice(hits);
        seq.cached_blocks = seq.cached_blocks.max(hits.len());
        let mut changes = Vec::new();
        seq.blocks.extend(self.pool.take(needed, &mut changes).unwrap_or_default());
        self.note(changes);
        if self.enabled {
            self.store(seq, until / self.naming.block_size(), hits.len());
        }
        true
    }

    /// Takes the blocks of `seq` back, tail first, so that a prompt's head stays longest; it would start over from nothing.
    pub(super) fn release(&mut self, seq: &mut Sequence) {
        self.pool.release(seq.blocks.drain(..).rev());
        seq.computed = 0;
        seq.cached_blocks = 0;
    }

    /// Forgets everything cached, unless a block is in use.
    pub(super) fn clear(&mut self) -> bool {
        let mut changes = Vec::new();
        let done = self.pool.clear(&mut changes);
        self.note(changes);
        done
    }

    /// Caches the blocks up to number `full`. A request that reports hits tells of them again, in the same event.
    fn store(&mut self, seq: &mut Sequence, full: usize, hits: usize) {
        let from = seq.cached_blocks;
        for index in from..full {
            self.pool.cache(seq.blocks[index], seq.digests[index]);
        }
        seq.cached_blocks = full.max(from);
        let again = seq.request.report_hits && hits > 0 && seq.hit_tokens.is_none();
        let start = if again { 0 } else { from };
        if start < seq.cached_blocks {
            self.events.push(self.stored(seq, start, seq.cached_blocks));
        }
    }

    fn stored(&self, seq: &Sequence, from: usize, to: usize) -> Event {
        let size = self.naming.block_size();
        Event::Stored(Stored {
            hashes: seq.digests[from..to].to_vec(),
            parent: from.checked_sub(1).map(|index| seq.digests[index]),
            tokens: seq.tokens[from * size..to * size].to_vec(),
            block_size: size,
            lora: seq.request.lora.as_ref().map(|(id, name, _)| (*id, name.clone())),
            medium: "GPU".into(),
            extra_keys: Some((from..to).map(|index| seq.extras(index)).collect()),
            group_idx: Some(0),
            spec_kind: Some("full_attention".into()),
            sliding_window: None,
            session_id: seq.request.session.clone(),
        })
    }

    fn note(&mut self, changes: Vec<Change>) {
        self.events.extend(changes.into_iter().map(|change| match change {
            Change::Removed(hash) => Event::Removed { hashes: vec![hash], medium: "GPU".into(), group_idx: Some(0) },
            Change::Cleared => Event::Cleared,
        }));
    }
}

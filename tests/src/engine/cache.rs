//! The prefix cache over the pool: finds a request's leading cached run, gives it blocks, and notes the events this makes.
//!
//! A model may have a second group of layers with a sliding window; that group then is number 0 and the full-attention group number 1,
//! as recorded with Gemma 3. The window group holds, and tells of, the blocks in the window at the prompt's end only.

use tokio::time::Instant;

use super::handoff::Part;
use super::handoff::contents::{Content, Contents, Lineage};
use super::host::Host;
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
    /// The window group's blocks; none where the window has passed.
    window_blocks: Vec<Option<BlockId>>,
    /// Leading blocks that are in the cache.
    cached_blocks: usize,
    /// Its blocks are to be read from elsewhere, which has not begun.
    pub(super) unpulled: bool,
    /// Prompt tokens read from elsewhere.
    pub(super) pulled_tokens: usize,
    /// What the answer says of its cached tokens, where that is not what was cached.
    pub(super) reported_cached: Option<usize>,
    lineage: Lineage,
}

impl Sequence {
    /// A request that has just arrived.
    pub(super) fn new(id: SeqId, request: Request, now: Instant) -> Self {
        Self {
            id,
            tokens: request.prompt.clone(),
            unpulled: matches!(request.part, Some(Part::Decode { .. })),
            pulled_tokens: 0,
            reported_cached: None,
            lineage: Lineage::default(),
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
            window_blocks: Vec::new(),
            cached_blocks: 0,
        }
    }

    /// Tokens generated so far.
    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Whether its blocks are to be read from elsewhere before it can run.
    pub(super) fn pull_is_due(&self) -> bool {
        self.unpulled
    }

    /// Whether it has blocks already.
    pub(super) fn has_blocks(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// What it would compute into its block number `index`, as far as token number `until`.
    fn content(&mut self, size: usize, index: usize, until: usize) -> Content {
        let adapter = self.request.lora.as_ref().map_or("", |(_, name, _)| name);
        self.lineage.content(adapter, &self.tokens, size, index, until)
    }

    /// The extra keys of block number `index`: the adapter in every block, the salt in the first.
    fn extras(&self, index: usize) -> Vec<Extra> {
        let lora = self.request.lora.iter();
        let lora = lora.map(|(id, name, path)| Extra::Lora { id: *id, name: name.clone(), path: path.clone() });
        let salt = self.request.salt.iter().filter(|salt| index == 0 && !salt.is_empty());
        lora.chain(salt.map(|salt| Extra::Salt(salt.clone()))).collect()
    }
}

/// What a request finds: its leading run.
#[derive(Debug, Default)]
pub(super) struct Hits {
    /// Blocks of the full-attention group.
    full: Vec<BlockId>,
    /// Blocks of the window group for the same run.
    window: Vec<Option<BlockId>>,
    /// Blocks after these that host memory has; they are loaded instead of computed.
    host: usize,
}

impl Hits {
    /// The run's length.
    pub(super) fn blocks(&self) -> usize {
        self.full.len() + self.host
    }

    fn held(&self) -> Vec<BlockId> {
        self.window.iter().flatten().chain(&self.full).copied().collect()
    }
}

/// How a cache is built.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Shape {
    /// Nothing is cached between requests.
    pub(super) disabled: bool,
    /// Window of the second group, in tokens.
    pub(super) window: Option<usize>,
    /// Blocks in host memory.
    pub(super) host_blocks: usize,
    /// Whether events of host memory say tokens and parents.
    pub(super) host_describes: bool,
    /// Whether what is in each block is kept, for others to read.
    pub(super) contents: bool,
}

/// The pool, how its blocks are named, and the events not yet told.
#[derive(Debug)]
pub(super) struct Cache {
    naming: Naming,
    pool: Pool,
    host: Option<Host>,
    shape: Shape,
    contents: Option<Contents>,
    events: Vec<Event>,
}

impl Cache {
    /// An empty cache over `blocks` blocks, the null block included.
    pub(super) fn new(naming: Naming, blocks: usize, shape: Shape) -> Self {
        let host = (shape.host_blocks > 0).then(|| Host::new(shape.host_blocks, shape.host_describes));
        let contents = shape.contents.then(|| Contents::new(blocks));
        Self { naming, pool: Pool::new(blocks), host, shape, contents, events: Vec::new() }
    }

    /// The blocks and what they hold.
    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// What host memory holds.
    pub(super) fn host(&self) -> impl Iterator<Item = &Digest> {
        self.host.iter().flat_map(Host::digests)
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
        while !self.shape.disabled && (seq.digests.len() + 1) * size <= seq.tokens.len() {
            let index = seq.digests.len();
            let tokens = &seq.tokens[index * size..(index + 1) * size];
            let digest = self.naming.block(seq.digests.last(), tokens, &seq.extras(index));
            seq.digests.push(digest);
        }
    }

    /// The leading cached run. The last token is always computed, or there would be nothing to sample from.
    pub(super) fn hits(&self, seq: &Sequence) -> Hits {
        if seq.request.skips_cache {
            return Hits::default();
        }
        let usable = &seq.digests[..seq.digests.len().min((seq.tokens.len() - 1) / self.naming.block_size())];
        let mut full = self.pool.hits(usable.iter(), self.full_group());
        let window = self.window_hits(usable, full.len());
        full.truncate(window.as_ref().map_or(full.len(), Vec::len));
        let host = self.host.as_ref().map_or(0, |host| host.run(&usable[full.len()..]));
        Hits { full, window: window.unwrap_or_default(), host }
    }

    /// The longest run of at most `longest` blocks whose end is in the window group too.
    fn window_hits(&self, digests: &[Digest], longest: usize) -> Option<Vec<Option<BlockId>>> {
        let reach = (self.shape.window? - 1).div_ceil(self.naming.block_size());
        let at = |end: usize| -> Option<Vec<Option<BlockId>>> {
            let passed = end.saturating_sub(reach);
            let held: Option<Vec<_>> = digests[passed..end].iter().map(|digest| self.pool.holder(digest, 0)).collect();
            Some(vec![None; passed].into_iter().chain(held?.into_iter().map(Some)).collect())
        };
        (0..=longest).rev().find_map(at)
    }

    /// Number of the full-attention group.
    pub(super) fn full_group(&self) -> u8 {
        u8::from(self.shape.window.is_some())
    }

    /// Gives `seq` the blocks for `tokens` more tokens after `hits`, and caches what becomes full; nothing changes when the pool has
    /// too few free blocks.
    pub(super) fn allocate(&mut self, seq: &mut Sequence, tokens: usize, hits: &Hits) -> bool {
        let until = seq.computed + tokens;
        if !self.reserve(seq, tokens, hits) {
            return false;
        }
        if !self.shape.disabled {
            self.store(seq, until / self.naming.block_size(), hits.blocks());
        }
        self.leave_window(seq, until);
        true
    }

    /// Gives `seq` the blocks for `tokens` more tokens after `hits`, and caches nothing yet.
    pub(super) fn reserve(&mut self, seq: &mut Sequence, tokens: usize, hits: &Hits) -> bool {
        let until = seq.computed + tokens;
        let blocks = until.div_ceil(self.naming.block_size());
        let needed = blocks.saturating_sub(seq.blocks.len() + hits.full.len());
        let window = self.window_needed(seq, until, hits);
        let in_window = window.iter().filter(|wanted| **wanted).count();
        let held = hits.held();
        if needed + in_window + self.pool.idle(&held) > self.pool.free_blocks() {
            return false;
        }
        self.pool.touch(&held);
        seq.blocks.extend_from_slice(&hits.full);
        seq.window_blocks.extend_from_slice(&hits.window);
        seq.cached_blocks = seq.cached_blocks.max(hits.full.len());
        let mut changes = Vec::new();
        let mut windowed = self.pool.take(in_window, &mut changes).unwrap_or_default().into_iter();
        seq.window_blocks.extend(window.into_iter().map(|wanted| wanted.then(|| windowed.next()).flatten()));
        seq.blocks.extend(self.pool.take(needed, &mut changes).unwrap_or_default());
        self.note(changes);
        // What host memory has is loaded as it was computed.
        let size = self.naming.block_size();
        self.fill(seq, hits.full.len() * size, hits.blocks() * size);
        true
    }

    /// `tokens` more tokens of `seq` are computed.
    pub(super) fn compute(&mut self, seq: &mut Sequence, tokens: usize) {
        let from = seq.computed;
        seq.computed += tokens;
        self.fill(seq, from, seq.computed);
    }

    fn fill(&mut self, seq: &mut Sequence, from: usize, until: usize) {
        let Some(contents) = &mut self.contents else { return };
        let size = self.naming.block_size();
        for index in from / size..until.div_ceil(size) {
            let own = seq.content(size, index, until);
            contents.compute(seq.blocks[index], from.saturating_sub(index * size), &own);
        }
    }

    /// Takes in what was read for the prompt's blocks from number `from` on, and caches them; whether it is what `seq` would have
    /// computed.
    pub(super) fn take_in(&mut self, seq: &mut Sequence, from: usize, read: Vec<Content>) -> bool {
        let (size, prompt) = (self.naming.block_size(), seq.request.prompt.len());
        let mut own = true;
        for (index, content) in (from..).zip(read) {
            own &= content.begins_as(&seq.content(size, index, prompt));
            if let Some(contents) = &mut self.contents {
                contents.put(seq.blocks[index], content);
            }
        }
        if !self.shape.disabled {
            self.store(seq, prompt / size, 0);
        }
        own
    }

    /// What these blocks hold.
    pub(super) fn contents(&self, blocks: &[BlockId]) -> Vec<Content> {
        blocks.iter().filter_map(|block| self.contents.as_ref().map(|contents| contents.of(*block))).collect()
    }

    /// The model looks at the KV under the prompt of `seq`: what is not the prompt's own makes it say something else.
    pub(super) fn hear(&self, seq: &mut Sequence) {
        let (Some(contents), Some(voice)) = (&self.contents, seq.request.voice.clone()) else { return };
        let (size, prompt) = (self.naming.block_size(), seq.request.prompt.len());
        let own: Vec<_> =
            (0..prompt.div_ceil(size)).map(|index| (seq.blocks[index], seq.content(size, index, prompt))).collect();
        let mark = contents.foreign(own.into_iter());
        if mark != 0 {
            seq.request.outputs =
                voice.tokens.outputs(&seq.request.prompt, voice.seed ^ mark, seq.request.outputs.len());
        }
    }

    /// Takes the blocks of `seq` from it, still in use: those of the full-attention group, and of the window group.
    pub(super) fn keep(seq: &mut Sequence) -> (Vec<BlockId>, Vec<BlockId>) {
        let window = seq.window_blocks.drain(..).flatten().collect();
        (std::mem::take(&mut seq.blocks), window)
    }

    /// Takes back blocks that were kept.
    pub(super) fn let_go(&mut self, blocks: Vec<BlockId>, window: Vec<BlockId>) {
        self.pool.release(window.into_iter().rev());
        self.pool.release(blocks.into_iter().rev());
    }

    /// For each block that the window group comes to know now: whether it is still in the window at `until`.
    fn window_needed(&self, seq: &Sequence, until: usize, hits: &Hits) -> Vec<bool> {
        let Some(passed) = self.passed(until) else { return Vec::new() };
        let known = seq.window_blocks.len() + hits.window.len();
        (known..until.div_ceil(self.naming.block_size())).map(|index| index >= passed).collect()
    }

    /// Leading blocks that no token from `until` on looks back to.
    fn passed(&self, until: usize) -> Option<usize> {
        Some((until + 1).saturating_sub(self.shape.window?) / self.naming.block_size())
    }

    fn leave_window(&mut self, seq: &mut Sequence, until: usize) {
        let passed = self.passed(until).unwrap_or(0).min(seq.window_blocks.len());
        let left: Vec<BlockId> = seq.window_blocks[..passed].iter_mut().filter_map(Option::take).collect();
        self.pool.release(left.into_iter());
    }

    /// Takes the blocks of `seq` back, tail first, so that a prompt's head stays longest; it would start over from nothing.
    pub(super) fn release(&mut self, seq: &mut Sequence) {
        self.pool.release(seq.window_blocks.drain(..).rev().flatten());
        self.pool.release(seq.blocks.drain(..).rev());
        seq.computed = 0;
        seq.cached_blocks = 0;
    }

    /// Forgets everything cached, unless a block is in use.
    pub(super) fn clear(&mut self) -> bool {
        let mut changes = Vec::new();
        let done = self.pool.clear(&mut changes);
        self.note(changes);
        if let (true, Some(host)) = (done, &mut self.host) {
            host.clear();
        }
        done
    }

    /// Loses idle blocks without telling; how many.
    pub(super) fn forget(&mut self, chosen: impl FnMut() -> bool) -> usize {
        self.pool.forget(chosen)
    }

    /// Caches a prompt as if a request had computed it, one event for every `per_event` blocks; only the full-attention group.
    pub(super) fn preload(&mut self, prompt: Sequence, per_event: usize) -> Vec<Event> {
        let mut seq = prompt;
        self.name_blocks(&mut seq);
        let mut changes = Vec::new();
        let Some(blocks) = self.pool.take(seq.digests.len(), &mut changes) else { return Vec::new() };
        self.note(changes);
        let group = self.full_group();
        for (block, digest) in blocks.iter().zip(&seq.digests) {
            self.pool.cache(*block, *digest, group);
        }
        seq.blocks.clone_from(&blocks);
        self.fill(&mut seq, 0, blocks.len() * self.naming.block_size());
        self.pool.release(blocks.into_iter().rev());
        let starts = (0..seq.digests.len()).step_by(per_event.max(1));
        let stored = starts.map(|from| self.stored(&seq, from, (from + per_event.max(1)).min(seq.digests.len())));
        let stored: Vec<Event> = stored.collect();
        self.take_events().into_iter().chain(stored).collect()
    }

    /// Caches the blocks up to number `full`. A request that reports hits tells of them again, in the same event.
    fn store(&mut self, seq: &mut Sequence, full: usize, hits: usize) {
        let from = seq.cached_blocks;
        let group = self.full_group();
        for index in from..full {
            self.pool.cache(seq.blocks[index], seq.digests[index], group);
        }
        seq.cached_blocks = full.max(from);
        let again = seq.request.report_hits && hits > 0 && seq.hit_tokens.is_none();
        let start = if again { 0 } else { from };
        if start < seq.cached_blocks {
            if self.shape.window.is_some() {
                let event = self.window_stored(seq, start, from);
                self.events.push(event);
            }
            self.events.push(self.stored(seq, start, seq.cached_blocks));
        }
        self.copy_to_host(seq, from);
    }

    fn copy_to_host(&mut self, seq: &Sequence, from: usize) {
        let Some(mut host) = self.host.take() else { return };
        let describe = |from: usize, to: usize| self.described(seq, from, to);
        let events = host.take_in(&seq.digests[..seq.cached_blocks], from, describe);
        self.events.extend(events);
        self.host = Some(host);
    }

    /// Caches for the window group what is in the window at the prompt's end (recorded: blocks of the answer are told of without a
    /// name), and tells of it beside all the tokens.
    fn window_stored(&mut self, seq: &Sequence, start: usize, from: usize) -> Event {
        let prompt = seq.request.prompt.len();
        let passed = self.passed(prompt).unwrap_or(0);
        let ends = seq.cached_blocks.min(prompt / self.naming.block_size());
        let block = |index: usize| seq.window_blocks.get(index).copied().flatten();
        let named: Vec<usize> = (start.max(passed)..ends).filter(|index| block(*index).is_some()).collect();
        for index in named.iter().filter(|index| **index >= from) {
            if let Some(block) = block(*index) {
                self.pool.cache(block, seq.digests[*index], 0);
            }
        }
        let keys = named.iter().map(|index| seq.extras(*index)).collect::<Vec<_>>();
        Event::Stored(Stored {
            hashes: named.iter().map(|index| seq.digests[*index]).collect(),
            extra_keys: (!keys.is_empty()).then_some(keys),
            group_idx: Some(0),
            spec_kind: Some("sliding_window".into()),
            sliding_window: self.shape.window.and_then(|window| u64::try_from(window).ok()),
            ..self.described(seq, start, seq.cached_blocks)
        })
    }

    fn stored(&self, seq: &Sequence, from: usize, to: usize) -> Event {
        Event::Stored(self.described(seq, from, to))
    }

    fn described(&self, seq: &Sequence, from: usize, to: usize) -> Stored {
        let size = self.naming.block_size();
        Stored {
            hashes: seq.digests[from..to].to_vec(),
            parent: from.checked_sub(1).map(|index| seq.digests[index]),
            tokens: seq.tokens[from * size..to * size].to_vec(),
            block_size: size,
            lora: seq.request.lora.as_ref().map(|(id, name, _)| (u64::from(*id), name.clone())),
            medium: "GPU".into(),
            extra_keys: Some((from..to).map(|index| seq.extras(index)).collect()),
            group_idx: Some(u64::from(self.full_group())),
            spec_kind: Some("full_attention".into()),
            sliding_window: None,
            session_id: seq.request.session.clone(),
        }
    }

    fn note(&mut self, changes: Vec<Change>) {
        self.events.extend(changes.into_iter().map(|change| match change {
            Change::Removed(key) => {
                Event::Removed { hashes: vec![key.digest], medium: "GPU".into(), group_idx: Some(u64::from(key.group)) }
            }
            Change::Cleared => Event::Cleared,
        }));
    }
}

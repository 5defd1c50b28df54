//! The block pool: which physical block holds which cached block, who uses it, and which one goes next.
//!
//! As in vLLM: a fixed number of blocks with reference counts; a queue of free ones, whose cached content stays usable until the block
//! is taken again; a hash may be held by several blocks at once. Cached blocks join the queue at its end, so that the least recently
//! used goes first; a block that caches nothing joins at its head (recorded: a partial last block is reused before anything is
//! evicted). Block 0 is the null block, never used.
//!
//! Invariant: a block is in the free queue exactly when nobody uses it.

use std::collections::HashMap;

use super::names::Digest;

/// Number of a physical block.
pub(super) type BlockId = usize;

/// What a physical block caches: a block of a prompt, for one group of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// The block's digest.
    pub(super) digest: Digest,
    /// The group; 0 in a model with one.
    pub(super) group: u8,
}

/// What happened to cached blocks; the scheduler adds what only it knows and makes events of it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change {
    /// The cached content of a block went, because the block was taken for something else.
    Removed(Key),
    /// Everything cached went.
    Cleared,
}

#[derive(Debug, Clone, Default)]
struct Block {
    users: usize,
    cached: Option<Key>,
}

/// All blocks of one engine.
#[derive(Debug)]
pub(super) struct Pool {
    blocks: Vec<Block>,
    free: FreeQueue,
    /// Holders of a key, oldest first; the first one serves hits.
    holders: HashMap<Key, Vec<BlockId>>,
}

impl Pool {
    /// `blocks` counts the null block.
    pub(super) fn new(blocks: usize) -> Self {
        let mut pool =
            Self { blocks: vec![Block::default(); blocks], free: FreeQueue::full(blocks), holders: HashMap::new() };
        pool.free.remove(0);
        pool.blocks[0].users = 1;
        pool
    }

    /// Blocks nobody uses.
    pub(super) fn free_blocks(&self) -> usize {
        self.free.len
    }

    /// Used share of the pool, 0 to 1.
    pub(super) fn usage(&self) -> f64 {
        let count = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
        let total = self.blocks.len() - 1;
        count(total - self.free.len) / count(total)
    }

    /// What is cached and how many copies of each, in no order.
    pub(super) fn cached(&self) -> impl Iterator<Item = (&Key, usize)> {
        self.holders.iter().map(|(key, blocks)| (key, blocks.len()))
    }

    /// The block that holds `digest` for `group`.
    pub(super) fn holder(&self, digest: &Digest, group: u8) -> Option<BlockId> {
        self.holders.get(&Key { digest: *digest, group }).and_then(|blocks| blocks.first().copied())
    }

    /// The blocks that hold the longest cached leading run of `digests` for `group`.
    pub(super) fn hits<'d>(&self, digests: impl Iterator<Item = &'d Digest>, group: u8) -> Vec<BlockId> {
        digests.map_while(|digest| self.holder(digest, group)).collect()
    }

    /// Loses what idle blocks cache where `chosen` says so, without a word; how many lost it.
    pub(super) fn forget(&mut self, mut chosen: impl FnMut() -> bool) -> usize {
        let mut untold = Vec::new();
        for block in 1..self.blocks.len() {
            if self.blocks[block].users == 0 && self.blocks[block].cached.is_some() && chosen() {
                self.evict(block, &mut untold);
            }
        }
        untold.len()
    }

    /// How many of `blocks` are free now and would leave the free queue when used.
    pub(super) fn idle(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.blocks[**block].users == 0).count()
    }

    /// One more user for each of `blocks`.
    pub(super) fn touch(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            if self.blocks[*block].users == 0 {
                self.free.remove(*block);
            }
            self.blocks[*block].users += 1;
        }
    }

    /// Takes `count` blocks from the head of the free queue, evicting what they hold; `None` when there are too few.
    pub(super) fn take(&mut self, count: usize, changes: &mut Vec<Change>) -> Option<Vec<BlockId>> {
        if count > self.free.len {
            return None;
        }
        let mut taken = Vec::with_capacity(count);
        for _ in 0..count {
            let block = self.free.pop()?;
            self.evict(block, changes);
            self.blocks[block].users = 1;
            taken.push(block);
        }
        Some(taken)
    }

    /// One user less for each of `blocks`, in this order: the first goes out of the cache first.
    pub(super) fn release(&mut self, blocks: impl Iterator<Item = BlockId>) {
        for block in blocks {
            debug_assert!(self.blocks[block].users > 0, "a block is released more often than used");
            self.blocks[block].users -= 1;
            match (self.blocks[block].users, self.blocks[block].cached) {
                (0, Some(_)) => self.free.push_last(block),
                (0, None) => self.free.push_first(block),
                _ => {}
            }
        }
    }

    /// From now on `block` holds `digest` for `group`, also when another block does.
    pub(super) fn cache(&mut self, block: BlockId, digest: Digest, group: u8) {
        debug_assert!(self.blocks[block].cached.is_none(), "a block is cached twice");
        let key = Key { digest, group };
        self.blocks[block].cached = Some(key);
        self.holders.entry(key).or_default().push(block);
    }

    /// Forgets everything cached; refused while any block is in use, as in vLLM.
    pub(super) fn clear(&mut self, changes: &mut Vec<Change>) -> bool {
        if self.free.len + 1 != self.blocks.len() {
            return false;
        }
        self.holders.clear();
        self.blocks.iter_mut().for_each(|block| block.cached = None);
        changes.push(Change::Cleared);
        true
    }

    fn evict(&mut self, block: BlockId, changes: &mut Vec<Change>) {
        let Some(key) = self.blocks[block].cached.take() else { return };
        if let Some(holders) = self.holders.get_mut(&key) {
            holders.retain(|holder| *holder != block);
            if holders.is_empty() {
                self.holders.remove(&key);
            }
        }
        changes.push(Change::Removed(key));
    }
}

/// A doubly linked list over block numbers: taken at the head, given back at either end, and left from the middle on a hit.
#[derive(Debug)]
struct FreeQueue {
    /// `(previous, next)`; the last entry is the ring's anchor.
    links: Vec<(usize, usize)>,
    queued: Vec<bool>,
    len: usize,
}

impl FreeQueue {
    /// All of `0..blocks`, in order.
    fn full(blocks: usize) -> Self {
        let links = (0..=blocks).map(|i| (if i == 0 { blocks } else { i - 1 }, if i == blocks { 0 } else { i + 1 }));
        Self { links: links.collect(), queued: vec![true; blocks], len: blocks }
    }

    fn anchor(&self) -> usize {
        self.queued.len()
    }

    fn pop(&mut self) -> Option<BlockId> {
        let (_, head) = self.links[self.anchor()];
        (head != self.anchor()).then(|| {
            self.remove(head);
            head
        })
    }

    fn push_last(&mut self, block: BlockId) {
        let (tail, _) = self.links[self.anchor()];
        self.insert(block, tail, self.anchor());
    }

    fn push_first(&mut self, block: BlockId) {
        let (_, head) = self.links[self.anchor()];
        self.insert(block, self.anchor(), head);
    }

    fn insert(&mut self, block: BlockId, previous: usize, next: usize) {
        debug_assert!(!self.queued[block], "a free block is freed again");
        self.links[previous].1 = block;
        self.links[next].0 = block;
        self.links[block] = (previous, next);
        self.queued[block] = true;
        self.len += 1;
    }

    fn remove(&mut self, block: BlockId) {
        debug_assert!(self.queued[block], "a block in use leaves the free queue");
        let (previous, next) = self.links[block];
        self.links[previous].1 = next;
        self.links[next].0 = previous;
        self.queued[block] = false;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::{Change, Digest, Key, Pool};

    fn digest(n: u8) -> Digest {
        Digest::from_slice(&[n; 32])
    }

    fn removed(n: u8) -> Change {
        Change::Removed(Key { digest: digest(n), group: 0 })
    }

    /// Takes, caches and releases one block per digest, as a prompt does.
    fn prompt(pool: &mut Pool, digests: &[u8]) -> Vec<Change> {
        let mut changes = Vec::new();
        let blocks = pool.take(digests.len(), &mut changes).unwrap();
        for (block, n) in blocks.iter().zip(digests) {
            pool.cache(*block, digest(*n), 0);
        }
        pool.release(blocks.into_iter().rev());
        changes
    }

    #[test]
    fn eviction_goes_from_the_tail_of_the_oldest_prompt() {
        let mut pool = Pool::new(5);
        assert_eq!(prompt(&mut pool, &[1, 2]), []);
        assert_eq!(prompt(&mut pool, &[3, 4]), []);
        assert_eq!(prompt(&mut pool, &[5, 6]), [removed(2), removed(1)]);
        assert_eq!(pool.hits([digest(3), digest(4), digest(9)].iter(), 0).len(), 2);
        assert!(pool.hits([digest(1)].iter(), 0).is_empty());
    }

    #[test]
    fn a_hit_protects_a_block_and_a_second_copy_is_removed_by_itself() {
        let mut pool = Pool::new(4);
        prompt(&mut pool, &[1]);
        prompt(&mut pool, &[1]);
        assert_eq!(pool.cached().map(|(_, copies)| copies).collect::<Vec<_>>(), [2]);
        let hit = pool.hits([digest(1)].iter(), 0);
        assert_eq!(pool.idle(&hit), 1);
        pool.touch(&hit);
        assert_eq!(pool.free_blocks(), 2);
        let mut changes = Vec::new();
        assert!(pool.take(3, &mut changes).is_none());
        assert_eq!(pool.take(2, &mut changes).map(|blocks| blocks.len()), Some(2));
        assert_eq!(changes, [removed(1)]);
        assert_eq!(pool.cached().map(|(_, copies)| copies).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_block_that_caches_nothing_is_reused_before_anything_is_evicted() {
        let mut pool = Pool::new(3);
        prompt(&mut pool, &[1]);
        let mut changes = Vec::new();
        let partial = pool.take(1, &mut changes).unwrap();
        pool.release(partial.into_iter());
        assert_eq!(pool.take(1, &mut changes).unwrap().len(), 1);
        assert_eq!(changes, []);
    }

    #[test]
    fn what_is_forgotten_is_not_told_and_blocks_in_use_keep_theirs() {
        let mut pool = Pool::new(5);
        prompt(&mut pool, &[1, 2]);
        pool.touch(&pool.hits([digest(1)].iter(), 0));
        assert_eq!(pool.forget(|| true), 1);
        assert_eq!(pool.cached().map(|(key, _)| key.digest).collect::<Vec<_>>(), [digest(1)]);
        assert_eq!(pool.free_blocks(), 3);
        assert_eq!(prompt(&mut pool, &[3, 4, 5]), []);
    }

    #[test]
    fn a_digest_is_held_for_each_group_by_itself() {
        let mut pool = Pool::new(4);
        let mut changes = Vec::new();
        let blocks = pool.take(2, &mut changes).unwrap();
        pool.cache(blocks[0], digest(1), 0);
        pool.cache(blocks[1], digest(1), 1);
        assert_eq!(pool.hits([digest(1)].iter(), 1), [blocks[1]]);
        pool.release(blocks.into_iter());
        pool.take(2, &mut changes).unwrap();
        assert_eq!(changes, [removed(1)]);
        assert!(pool.holder(&digest(1), 0).is_none() && pool.holder(&digest(1), 1).is_some());
    }

    #[test]
    fn clearing_waits_until_nothing_is_in_use() {
        let mut pool = Pool::new(4);
        prompt(&mut pool, &[1, 2]);
        let mut changes = Vec::new();
        let blocks = pool.take(1, &mut changes).unwrap();
        assert!(!pool.clear(&mut changes));
        pool.release(blocks.into_iter());
        changes.clear();
        assert!(pool.clear(&mut changes));
        assert_eq!(changes, [Change::Cleared]);
        assert_eq!(pool.cached().count(), 0);
        assert!((pool.usage() - 0.0).abs() < f64::EPSILON);
    }
}

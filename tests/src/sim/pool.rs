//! The blocks of one engine's cache: which hold what, which are in use, and which goes next.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use kvlb::contract::BlockHash;

/// No slot: the end of the list.
const NONE: u32 = u32::MAX;

/// Names are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Same(u64);

impl Hasher for Same {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 ^= number;
    }
}

/// What is known by block names.
pub(super) type ByName<T> = HashMap<BlockHash, T, BuildHasherDefault<Same>>;

/// One block's place.
#[derive(Clone, Copy, Debug)]
struct Slot {
    name: Option<BlockHash>,
    users: u32,
    before: u32,
    after: u32,
}

/// A fixed number of blocks. Those that nobody uses keep what they hold until they are taken, the longest unused first.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    slots: Vec<Slot>,
    by_name: ByName<u32>,
    /// The next to be taken, and the last.
    first: u32,
    last: u32,
    idle: usize,
}

impl Pool {
    /// Empty blocks.
    pub(super) fn new(blocks: u32) -> Self {
        let slot = |at: u32| Slot {
            name: None,
            users: 0,
            before: at.checked_sub(1).unwrap_or(NONE),
            after: if at + 1 < blocks { at + 1 } else { NONE },
        };
        let slots: Vec<Slot> = (0..blocks).map(slot).collect();
        let (first, last) = if blocks == 0 { (NONE, NONE) } else { (0, blocks - 1) };
        Self { idle: slots.len(), slots, by_name: ByName::default(), first, last }
    }

    /// All blocks.
    pub(super) fn blocks(&self) -> usize {
        self.slots.len()
    }

    /// Blocks that nobody uses.
    pub(super) fn idle(&self) -> usize {
        self.idle
    }

    /// Names of blocks that can be found.
    pub(super) fn named(&self) -> usize {
        self.by_name.len()
    }

    /// How many of the first `names` are here, up to the first that is not.
    pub(super) fn run(&self, names: &[BlockHash]) -> usize {
        names.iter().take_while(|name| self.by_name.contains_key(*name)).count()
    }

    /// How many of these blocks, which are here, nobody uses.
    pub(super) fn idle_among(&self, names: &[BlockHash]) -> usize {
        let idle = |name: &&BlockHash| self.by_name.get(*name).is_some_and(|at| self.at(*at).users == 0);
        names.iter().filter(idle).count()
    }

    /// Uses blocks that are here.
    pub(super) fn share(&mut self, names: &[BlockHash], into: &mut Vec<u32>) {
        for name in names {
            let Some(&at) = self.by_name.get(name) else { return };
            self.enter(at);
            into.push(at);
        }
    }

    /// Takes an unused block, and says whose name is lost with it.
    pub(super) fn take(&mut self) -> Option<(u32, Option<BlockHash>)> {
        let at = self.first;
        if at == NONE {
            return None;
        }
        self.enter(at);
        let lost = self.slot(at).name.take();
        if let Some(name) = lost {
            self.by_name.remove(&name);
        }
        Some((at, lost))
    }

    /// Gives a used block its name, unless another one has it; says whether it did.
    pub(super) fn name(&mut self, at: u32, name: BlockHash) -> bool {
        if self.by_name.contains_key(&name) || self.at(at).name.is_some() {
            return false;
        }
        self.by_name.insert(name, at);
        self.slot(at).name = Some(name);
        true
    }

    /// Gives blocks of one request back, in its order; its end is taken before its beginning.
    pub(super) fn release(&mut self, blocks: &[u32]) {
        for &at in blocks.iter().rev() {
            let slot = self.slot(at);
            debug_assert!(slot.users > 0, "only used blocks are given back");
            slot.users = slot.users.saturating_sub(1);
            if slot.users == 0 {
                self.append(at);
            }
        }
    }

    fn at(&self, at: u32) -> &Slot {
        &self.slots[at as usize]
    }

    fn slot(&mut self, at: u32) -> &mut Slot {
        &mut self.slots[at as usize]
    }

    /// One more user; an unused block leaves the list.
    fn enter(&mut self, at: u32) {
        let slot = *self.at(at);
        if slot.users == 0 {
            match slot.before {
                NONE => self.first = slot.after,
                before => self.slot(before).after = slot.after,
            }
            match slot.after {
                NONE => self.last = slot.before,
                after => self.slot(after).before = slot.before,
            }
            self.idle -= 1;
        }
        self.slot(at).users += 1;
    }

    fn append(&mut self, at: u32) {
        let last = self.last;
        (self.slot(at).before, self.slot(at).after) = (last, NONE);
        match last {
            NONE => self.first = at,
            last => self.slot(last).after = at,
        }
        self.last = at;
        self.idle += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[u64]) -> Vec<BlockHash> {
        names.iter().copied().map(BlockHash).collect()
    }

    fn fill(pool: &mut Pool, of: &[u64]) -> Vec<u32> {
        let blocks: Vec<u32> = of.iter().filter_map(|_| pool.take()).map(|(at, _)| at).collect();
        for (at, name) in blocks.iter().zip(names(of)) {
            assert!(pool.name(*at, name));
        }
        blocks
    }

    #[test]
    fn of_what_nobody_uses_the_oldest_goes_first_and_of_one_request_its_end() {
        let mut pool = Pool::new(4);
        let (one, other) = (fill(&mut pool, &[1, 2]), fill(&mut pool, &[3, 4]));
        pool.release(&other);
        pool.release(&one);
        let lost: Vec<_> = (0..4).filter_map(|_| pool.take()).filter_map(|(_, lost)| lost).collect();
        assert_eq!(lost, names(&[4, 3, 2, 1]));
        assert_eq!((pool.named(), pool.take()), (0, None));
    }

    #[test]
    fn used_blocks_are_pinned_and_what_is_shared_becomes_young() {
        let mut pool = Pool::new(3);
        let blocks = fill(&mut pool, &[1, 2]);
        pool.release(&blocks);
        let mut shared = Vec::new();
        pool.share(&names(&[1]), &mut shared);
        assert_eq!((pool.idle(), pool.idle_among(&names(&[1, 2]))), (2, 1));
        assert_eq!(
            [pool.take(), pool.take(), pool.take()].map(|taken| taken.and_then(|(_, lost)| lost)),
            [None, Some(BlockHash(2)), None]
        );
        assert_eq!(pool.run(&names(&[1, 2])), 1, "the used one is there still");
        pool.release(&shared);
        assert_eq!(pool.idle(), 1);
    }

    #[test]
    fn a_run_ends_at_the_first_block_that_is_not_there_and_a_name_is_had_once() {
        let mut pool = Pool::new(4);
        fill(&mut pool, &[1, 3]);
        assert_eq!(pool.run(&names(&[1, 2, 3])), 1);
        let (at, _) = pool.take().unwrap();
        assert!(!pool.name(at, BlockHash(3)) && pool.name(at, BlockHash(2)));
        assert_eq!(pool.run(&names(&[1, 2, 3])), 3);
    }
}

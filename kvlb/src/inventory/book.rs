//! What one cache has announced, beyond the one bit per block that readers see.
//!
//! # Hits that are announced again
//!
//! An engine stores a duplicate twice and removes it twice, so copies are counted. But a request may ask vLLM (from 0.26,
//! `kv_cache_report_mode: "full"`) to announce the blocks that it *hit*, and nothing on the wire tells such an announcement
//! from that of a duplicate: both name a prompt's blocks from the first on, without a parent. Counting it would leave a
//! copy that no removal ever takes back; not counting it would lose duplicates whose first copy is removed, and with them
//! the beginning that all prompts share (a burst of requests computes it several times).
//!
//! So copies from announcements without a parent of blocks that were held already are *doubted*. They count like any other
//! until the slot has more copies than its engine has blocks: that proves that some are none, and then the youngest
//! doubted copies go. As engines evict only when all their blocks are taken, a doubted copy that is none can show as a
//! block held wrongly only for as long as the engine has that many blocks that it has not filled. From the first proof on,
//! a block all of whose copies are doubted is not counted up by a further announcement but confirmed by it: a request that
//! was sent to it in vain makes it true. Where the number of an engine's blocks is not known, doubted copies are bounded
//! by [`DOUBTED_MAX`] only.
//!
//! Source: `KVCacheManager.get_computed_blocks` and `BlockPool.emit_cached_block_events` of vLLM 0.32.

use hashbrown::HashMap;

use super::Queue;
use super::copies::{Copies, Counted, Kind};
use crate::contract::BlockHash;
use crate::contract::events::{Attention, Medium, Removed, Stored};

/// Below this many names their order is kept from the first on: half a megabyte.
const ORDERED_ALWAYS: usize = 1 << 16;
/// Doubted copies of one cache: 16 times the blocks that a thousand requests of one beginning of a thousand tokens compute
/// at once; 16 MB.
const DOUBTED_MAX: usize = 1 << 20;
/// Doubts that are not worth a sweep.
const DOUBTS_MIN: usize = 64;

/// The bounds of one cache's book.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Names held; the oldest goes when there are more.
    pub names: usize,
    /// Names remembered as removed that no cache holds any more.
    pub forgotten: usize,
    /// Blocks that the engine has, where known: more copies than that cannot be.
    pub gpu_blocks: Option<usize>,
}

/// What a stored copy changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storing {
    /// The block is held from now on.
    Held,
    /// It was held; this is another copy.
    Again,
    /// A copy that does not count: another medium, or a window's.
    Aside,
    /// The book is full of copies that do not count.
    Refused,
}

/// What a removed copy changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The block is no longer held.
    Gone,
    /// A copy is gone; whether the block is held is as before.
    Fewer,
    /// No such copy was known.
    Unknown,
}

/// What is to be done about copies that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disproof {
    /// Nothing more.
    Enough,
    /// The copy in question was removed before.
    Stale,
    /// A copy was taken back; whether its block is held is as before.
    Hidden,
    /// The block is no longer held.
    Gone(BlockHash),
}

/// Where an announcement belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Its blocks count.
    Counts,
    /// Its blocks do not.
    Aside,
    /// Its group, whose blocks counted so far, proves to be a window's: [`Book::demote`] first.
    Demote,
}

/// One cache's book: which KV group counts, copies other than the first, the order of names, and the removed ones.
///
/// The first copy that counts (accelerator memory, the group with full attention) is a bit in the shared table; callers
/// say whether it is set. Everything else is here, since almost every block has that one copy only.
#[derive(Debug)]
pub struct Book {
    limits: Limits,
    /// Whether anything was applied since it was new.
    used: bool,
    /// Names whose bit is set.
    names: usize,
    /// The group that counts, once one is known.
    scored: Option<u32>,
    /// Groups below 64 that are known to serve a window.
    partial: u64,
    /// Copies other than the first that counts.
    ///
    /// All of them are counted: an engine computes the last block of a prompt that ends with it anew each time and keeps
    /// every copy, so that a prompt sent often has its last block a hundred times, and loses it with the hundredth removal.
    copies: Copies,
    /// Copies in the accelerator's memory, of all groups.
    on_gpu: usize,
    /// Doubted copies, and whose they are, the youngest last; some are no longer doubted.
    doubted: usize,
    doubts: Vec<(BlockHash, Kind)>,
    /// Whether more copies were announced than can be: some announcements are of hits.
    reports_hits: bool,
    /// Names by age, once there are enough for a bound to come near.
    age: Option<Queue>,
    /// Removed names that no cache holds.
    forgotten: Queue,
}

impl Book {
    /// An empty book.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            used: false,
            names: 0,
            scored: None,
            partial: 0,
            copies: Copies::default(),
            on_gpu: 0,
            doubted: 0,
            doubts: Vec::new(),
            reports_hits: false,
            age: (limits.names <= ORDERED_ALWAYS).then(Queue::default),
            forgotten: Queue::default(),
        }
    }

    /// Whether nothing was applied since it was new or emptied.
    pub const fn is_blank(&self) -> bool {
        !self.used
    }

    /// Names held.
    pub const fn names(&self) -> usize {
        self.names
    }

    /// Changes the most names held; [`Book::evict`] then says what has to go.
    pub fn set_names_max(&mut self, names: usize) {
        self.limits.names = names.max(1);
    }

    /// Notes how many blocks the engine has; [`Book::disprove`] then says what has to go.
    pub const fn set_gpu_blocks(&mut self, gpu_blocks: usize) {
        self.limits.gpu_blocks = Some(gpu_blocks);
    }

    /// The group that counts, once one is known.
    pub const fn scored(&self) -> Option<u32> {
        self.scored
    }

    /// Decides whether an announcement's blocks count, and learns from it which group does.
    ///
    /// Where engines do not say what attention a group serves, group 0 counts until an announcement with more tokens than
    /// blocks proves that it is a window's.
    pub fn place(&mut self, stored: &Stored) -> Place {
        self.used = true;
        if stored.medium != Medium::Gpu {
            return Place::Aside;
        }
        let group = stored.group.unwrap_or(0);
        let windowed = match stored.attention {
            Attention::Full => false,
            Attention::Partial => true,
            Attention::Unstated => !stored.is_complete() && !stored.tokens.is_empty(),
        };
        if windowed {
            self.partial |= mask(group);
            return if self.scored == Some(group) { Place::Demote } else { Place::Aside };
        }
        if self.scored.is_none() && self.may_count(group, stored.attention) {
            self.scored = Some(group);
        }
        if self.scored == Some(group) { Place::Counts } else { Place::Aside }
    }

    fn may_count(&self, group: u32, attention: Attention) -> bool {
        let first_unknown = group == 0 || self.partial & mask(0) != 0;
        attention == Attention::Full || (first_unknown && self.partial & mask(group) == 0)
    }

    /// Moves the counted copies of `held`, all names whose bit is set, aside: their group does not count any more.
    pub fn demote(&mut self, held: impl IntoIterator<Item = BlockHash>) {
        if let Some(kind) = self.scored_kind() {
            for name in held {
                let copies = self.copies.get(name, kind);
                self.copies.set(Counted { count: copies.count.saturating_add(1), ..copies });
            }
        }
        self.scored = None;
        self.names = 0;
        self.age = self.age.as_ref().map(|_| Queue::default());
    }

    /// Names that were stored aside in the group that counts now: the bit of each is to be set.
    pub fn promote(&mut self) -> Vec<BlockHash> {
        let Some(kind) = self.scored_kind().filter(|_| self.names == 0) else { return Vec::new() };
        let stored = self.copies.iter().filter(|copies| copies.kind == kind && copies.count > 0);
        let mut names: Vec<_> = stored.map(|copies| copies.name).collect();
        names.sort_unstable();
        for &name in &names {
            let copies = self.copies.get(name, kind);
            self.copies.set(Counted { count: copies.count - 1, ..copies });
            self.hold(name);
        }
        names
    }

    fn scored_kind(&self) -> Option<Kind> {
        self.scored.map(|group| Kind::new(group, Medium::Gpu))
    }

    fn hold(&mut self, name: BlockHash) {
        self.names += 1;
        if let Some(age) = &mut self.age {
            age.push(name);
        }
    }

    /// Stores one copy of a block that counts; `held` says whether its bit is set.
    pub fn store(&mut self, name: BlockHash, stored: &Stored, held: bool) -> Storing {
        if !held {
            self.hold(name);
            self.on_gpu += 1;
            return Storing::Held;
        }
        if let Some(copies) = self.scored_kind().map(|kind| self.copies.get(name, kind))
            && !self.is_full_for(copies)
        {
            self.add(copies, 1, stored.parent.is_none());
        }
        Storing::Again
    }

    /// Stores one copy that does not count.
    pub fn store_aside(&mut self, name: BlockHash, stored: &Stored) -> Storing {
        let kind = Kind::new(stored.group.unwrap_or(0), stored.medium);
        let copies = self.copies.get(name, kind);
        if self.is_full_for(copies) {
            return Storing::Refused;
        }
        // Hits are announced for every group, whether it has their blocks or not.
        self.add(copies, 0, stored.parent.is_none() && kind.is_gpu());
        Storing::Aside
    }

    fn is_full_for(&self, copies: Counted) -> bool {
        copies.count == 0 && self.copies.len() >= self.limits.names
    }

    /// Adds a copy to `first` and those of `copies`.
    fn add(&mut self, copies: Counted, first: u32, doubted: bool) {
        if self.reports_hits && copies.doubted > 0 && copies.doubted == copies.count + first {
            self.doubted -= 1;
            self.copies.set(Counted { doubted: copies.doubted - 1, ..copies });
            return;
        }
        if doubted && self.doubted >= DOUBTED_MAX {
            return;
        }
        self.on_gpu += usize::from(copies.kind.is_gpu());
        self.doubted += usize::from(doubted);
        let more = Counted {
            count: copies.count.saturating_add(1),
            doubted: copies.doubted.saturating_add(doubted.into()),
            ..copies
        };
        self.copies.set(more);
        if doubted {
            self.doubt(copies.name, copies.kind);
        }
    }

    fn doubt(&mut self, name: BlockHash, kind: Kind) {
        self.doubts.push((name, kind));
        if self.doubts.len() > 2 * self.doubted + DOUBTS_MIN {
            self.sweep_doubts();
        }
    }

    /// Leaves as many doubts of each block as it has doubted copies, the oldest.
    fn sweep_doubts(&mut self) {
        let mut left = HashMap::new();
        let Self { doubts, copies, .. } = self;
        doubts.retain(|&(name, kind)| {
            let left = left.entry((name, kind)).or_insert_with(|| copies.get(name, kind).doubted);
            *left > 0 && {
                *left -= 1;
                true
            }
        });
    }

    /// Removes one copy; `held` says whether the block's bit is set.
    pub fn remove(&mut self, name: BlockHash, removed: &Removed, held: bool) -> Removal {
        let counted = self
            .scored_kind()
            .filter(|_| removed.medium == Medium::Gpu && removed.group.is_none_or(|group| self.scored == Some(group)));
        let kind = counted.unwrap_or_else(|| Kind::new(removed.group.unwrap_or(0), removed.medium));
        let first = u32::from(counted.is_some() && held);
        let copies = self.copies.get(name, kind);
        if copies.count + first == 0 {
            return Removal::Unknown;
        }
        self.drop_one(copies, first, 0);
        if copies.count > 0 {
            return Removal::Fewer;
        }
        self.release(name);
        Removal::Gone
    }

    /// Takes one copy away, and `doubted` doubts with it; those of which nothing is doubted go first.
    fn drop_one(&mut self, copies: Counted, first: u32, doubted: u32) {
        let left = copies.count + first - 1;
        let doubted = (copies.doubted - doubted).min(left);
        self.on_gpu -= usize::from(copies.kind.is_gpu());
        self.doubted -= (copies.doubted - doubted) as usize;
        self.copies.set(Counted { count: copies.count.saturating_sub(1), doubted, ..copies });
    }

    /// A name's bit is no longer set.
    fn release(&mut self, name: BlockHash) {
        self.names -= 1;
        if let Some(age) = &mut self.age {
            age.take(name);
        }
        if self.names < self.ordered_from() / 2 {
            self.age = None;
        }
    }

    /// Takes back a doubted copy where there are more copies than can be; gives its name where that was the last of a
    /// block that counts, whose bit is to be taken back. To be asked until it gives [`Disproof::Enough`].
    pub fn disprove(&mut self) -> Disproof {
        if self.limits.gpu_blocks.is_none_or(|blocks| self.on_gpu <= blocks) || self.doubted == 0 {
            return Disproof::Enough;
        }
        let Some((name, kind)) = self.doubts.pop() else { return Disproof::Enough };
        let copies = self.copies.get(name, kind);
        if copies.doubted == 0 {
            return Disproof::Stale;
        }
        self.reports_hits = true;
        // A block that counts has its first copy beside those in the table.
        let first = u32::from(self.scored_kind() == Some(kind));
        self.drop_one(copies, first, 1);
        if copies.count > 0 || first == 0 {
            return Disproof::Hidden;
        }
        self.release(name);
        Disproof::Gone(name)
    }

    /// Whether copies of a name are known beyond the first that counts.
    pub fn has_other_copies(&self, name: BlockHash) -> bool {
        self.copies.has(name)
    }

    /// Whether a medium other than the accelerator's memory has a copy of a block in the group that counts, which is
    /// group 0 until one is known.
    pub fn has_in(&self, medium: Medium, name: BlockHash) -> bool {
        self.copies.get(name, self.kind_in(medium)).count > 0
    }

    /// The blocks of which a medium has a copy in the group that counts.
    pub fn names_in(&self, medium: Medium) -> Vec<BlockHash> {
        let kind = self.kind_in(medium);
        self.copies.iter().filter(|copies| copies.kind == kind).map(|copies| copies.name).collect()
    }

    fn kind_in(&self, medium: Medium) -> Kind {
        Kind::new(self.scored.unwrap_or(0), medium)
    }

    /// Whether the order of names is wanted from now on: give it to [`Book::start_order`].
    pub const fn wants_order(&self) -> bool {
        self.age.is_none() && self.names > self.ordered_from()
    }

    /// Keeps the order of names from now on. Those already held count as the oldest, in the order given.
    ///
    /// Order costs 8 bytes a name and a healthy engine, whose bound is four times what it can hold, never needs it: so it
    /// is kept only once half of the bound is reached.
    pub fn start_order(&mut self, held: impl IntoIterator<Item = BlockHash>) {
        let mut age = Queue::default();
        held.into_iter().for_each(|name| age.push(name));
        debug_assert_eq!(age.len(), self.names, "every held name has its place in line");
        self.age = Some(age);
    }

    const fn ordered_from(&self) -> usize {
        if self.limits.names <= ORDERED_ALWAYS { 0 } else { self.limits.names / 2 }
    }

    /// The oldest name where there are more than the bound allows; its bit is to be taken back.
    pub fn evict(&mut self) -> Option<BlockHash> {
        if self.names <= self.limits.names {
            return None;
        }
        let oldest = self.age.as_mut()?.pop()?;
        self.names -= 1;
        if let Some(kind) = self.scored_kind() {
            let copies = self.copies.get(oldest, kind);
            self.on_gpu -= copies.count as usize + 1;
            self.doubted -= copies.doubted as usize;
            self.copies.set(Counted { count: 0, doubted: 0, ..copies });
        }
        Some(oldest)
    }

    /// Remembers a removed name that no cache holds; gives one back that is to be forgotten instead.
    pub fn remember(&mut self, name: BlockHash) -> Option<BlockHash> {
        self.forgotten.push(name);
        if self.forgotten.len() > self.limits.forgotten { self.forgotten.pop() } else { None }
    }

    /// Takes a name out of those that no cache holds.
    pub fn recall(&mut self, name: BlockHash) {
        self.forgotten.take(name);
    }

    /// Empties the book: an engine has cleared its cache, or begun a new life.
    pub fn clear(&mut self) {
        *self = Self::new(self.limits);
    }

    /// Copies other than the first that counts, in order.
    pub fn copies(&self) -> Vec<(BlockHash, u32, u32)> {
        let copies = self.copies.iter().filter(|copies| copies.count > 0);
        let mut copies: Vec<_> = copies.map(|copies| (copies.name, copies.kind.number(), copies.count)).collect();
        copies.sort_unstable();
        copies
    }
}

const fn mask(group: u32) -> u64 {
    if group < 64 { 1 << group } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::TokenId;

    const NAME: BlockHash = BlockHash(7);

    fn book(names: usize) -> Book {
        Book::new(Limits { names, forgotten: 2, gpu_blocks: None })
    }

    fn stored(group: u32, attention: Attention, tokens: usize) -> Stored {
        Stored {
            hashes: vec![NAME.into()],
            tokens: vec![TokenId(0); tokens],
            block_size: 16,
            group: Some(group),
            attention,
            ..Stored::default()
        }
    }

    /// Stores a copy that nobody doubts.
    fn store(book: &mut Book, name: BlockHash, held: bool) -> Storing {
        let parent = Some(BlockHash(1 << 60).into());
        book.store(name, &Stored { parent, ..Stored::default() }, held)
    }

    fn removed(group: Option<u32>, medium: Medium) -> Removed {
        Removed { hashes: vec![NAME.into()], medium, group }
    }

    #[test]
    fn a_duplicate_is_stored_twice_and_removed_twice() {
        let mut book = book(10);
        book.place(&stored(0, Attention::Full, 16));
        assert_eq!(store(&mut book, NAME, false), Storing::Held);
        assert_eq!(store(&mut book, NAME, true), Storing::Again);
        assert!(book.has_other_copies(NAME));
        let removed = removed(Some(0), Medium::Gpu);
        assert_eq!(book.remove(NAME, &removed, true), Removal::Fewer);
        assert!(!book.has_other_copies(NAME));
        assert_eq!(book.remove(NAME, &removed, true), Removal::Gone);
        assert_eq!(book.remove(NAME, &removed, false), Removal::Unknown);
        assert_eq!(book.names(), 0);
    }

    #[test]
    fn a_block_stored_a_hundred_times_is_gone_with_the_hundredth_removal() {
        let mut book = book(10);
        book.place(&stored(0, Attention::Full, 16));
        store(&mut book, NAME, false);
        for _ in 1..100 {
            assert_eq!(store(&mut book, NAME, true), Storing::Again);
        }
        let removed = removed(None, Medium::Gpu);
        for _ in 1..100 {
            assert_eq!(book.remove(NAME, &removed, true), Removal::Fewer);
        }
        assert_eq!(book.remove(NAME, &removed, true), Removal::Gone);
    }

    #[test]
    fn the_group_with_full_attention_counts_whatever_its_number() {
        let mut book = book(10);
        assert_eq!(book.place(&stored(0, Attention::Partial, 64)), Place::Aside);
        assert_eq!(book.place(&stored(1, Attention::Full, 16)), Place::Counts);
        assert_eq!(book.place(&stored(2, Attention::Full, 16)), Place::Aside, "one group counts");
    }

    #[test]
    fn without_a_kind_group_0_counts_until_it_shows_a_window() {
        let mut book = book(10);
        assert_eq!(book.place(&stored(1, Attention::Unstated, 16)), Place::Aside);
        assert_eq!(book.place(&stored(0, Attention::Unstated, 16)), Place::Counts);
        store(&mut book, NAME, false);
        assert_eq!(book.place(&stored(0, Attention::Unstated, 64)), Place::Demote);
        book.demote([NAME]);
        assert_eq!(book.names(), 0);
        assert_eq!(book.place(&stored(0, Attention::Unstated, 16)), Place::Aside);
        book.store_aside(NAME, &stored(1, Attention::Unstated, 16));
        assert_eq!(book.place(&stored(1, Attention::Unstated, 16)), Place::Counts);
        assert_eq!((book.promote(), book.names()), (vec![NAME], 1));
        assert_eq!(book.remove(NAME, &removed(Some(0), Medium::Gpu), false), Removal::Fewer, "the window's copy");
    }

    #[test]
    fn other_media_do_not_count_and_do_not_disturb() {
        let mut book = book(10);
        let cpu = Stored { medium: Medium::Cpu, ..stored(0, Attention::Full, 16) };
        assert_eq!(book.place(&cpu), Place::Aside);
        assert_eq!(book.store_aside(NAME, &cpu), Storing::Aside);
        book.place(&stored(0, Attention::Full, 16));
        store(&mut book, NAME, false);
        assert_eq!(book.remove(NAME, &removed(Some(0), Medium::Cpu), true), Removal::Fewer);
        assert_eq!(book.remove(NAME, &removed(Some(0), Medium::Cpu), true), Removal::Unknown);
        assert_eq!(book.names(), 1);
    }

    #[test]
    fn the_oldest_name_goes_over_the_bound() {
        let mut book = book(2);
        book.place(&stored(0, Attention::Full, 16));
        store(&mut book, BlockHash(1), false);
        store(&mut book, BlockHash(2), false);
        assert_eq!(book.evict(), None);
        store(&mut book, BlockHash(3), false);
        assert_eq!((book.evict(), book.evict()), (Some(BlockHash(1)), None));
        assert_eq!(book.names(), 2);
    }

    #[test]
    fn the_order_of_many_names_is_kept_once_half_of_the_bound_is_reached() {
        let mut book = book(200_000);
        for name in 0..=100_000 {
            store(&mut book, BlockHash(name), false);
        }
        assert!(book.wants_order() && book.evict().is_none());
        book.start_order((0..=100_000).map(BlockHash));
        for name in 100_001..=200_000 {
            store(&mut book, BlockHash(name), false);
        }
        assert!(!book.wants_order());
        assert_eq!((book.evict(), book.evict()), (Some(BlockHash(0)), None));
    }

    #[test]
    fn copies_that_do_not_count_are_bounded_too() {
        let mut book = book(2);
        let cpu = Stored { medium: Medium::Cpu, ..stored(0, Attention::Full, 16) };
        let storings = [1, 2, 3, 2].map(|name| book.store_aside(BlockHash(name), &cpu));
        assert_eq!(storings, [Storing::Aside, Storing::Aside, Storing::Refused, Storing::Aside]);
    }

    #[test]
    fn removed_names_are_remembered_in_bounds() {
        let mut book = book(10);
        let forgotten = [1, 2, 3].map(|name| book.remember(BlockHash(name)));
        assert_eq!(forgotten, [None, None, Some(BlockHash(1))]);
        book.recall(BlockHash(2));
        assert_eq!(book.remember(BlockHash(4)), None);
    }

    #[test]
    fn a_block_announced_again_without_parent_is_a_copy_until_there_cannot_be_so_many() {
        let mut book = book(10);
        book.place(&stored(0, Attention::Full, 16));
        book.store(NAME, &Stored::default(), false);
        for _ in 0..3 {
            assert_eq!(book.store(NAME, &Stored::default(), true), Storing::Again);
        }
        assert_eq!(book.disprove(), Disproof::Enough, "nobody knows how many there can be");
        book.set_gpu_blocks(4);
        assert_eq!(book.disprove(), Disproof::Enough);
        store(&mut book, BlockHash(8), false);
        assert_eq!([(); 2].map(|()| book.disprove()), [Disproof::Hidden, Disproof::Enough]);
        assert_eq!(book.copies(), [(NAME, 0, 2)], "three of four are left");
    }

    #[test]
    fn a_block_of_which_only_doubted_copies_are_left_goes_with_the_proof_and_comes_with_the_next_announcement() {
        let mut book = book(10);
        book.set_gpu_blocks(2);
        book.place(&stored(0, Attention::Full, 16));
        book.store(NAME, &Stored::default(), false);
        book.store(NAME, &Stored::default(), true);
        assert_eq!(book.remove(NAME, &removed(None, Medium::Gpu), true), Removal::Fewer, "one is certain, or was");
        store(&mut book, BlockHash(8), false);
        assert_eq!(book.disprove(), Disproof::Enough);
        store(&mut book, BlockHash(9), false);
        assert_eq!([(); 2].map(|()| book.disprove()), [Disproof::Gone(NAME), Disproof::Enough]);
        assert_eq!((book.names(), book.has_other_copies(NAME)), (2, false));
        // Hits are announced here, that is known now: a doubted block is confirmed instead of counted up.
        book.remove(BlockHash(8), &removed(None, Medium::Gpu), true);
        book.store(NAME, &Stored::default(), false);
        book.remove(BlockHash(9), &removed(None, Medium::Gpu), true);
        book.store(NAME, &Stored::default(), true);
        book.remove(NAME, &removed(None, Medium::Gpu), true);
        book.store(NAME, &Stored::default(), true);
        assert_eq!(book.remove(NAME, &removed(None, Medium::Gpu), true), Removal::Gone);
    }

    #[test]
    fn a_medium_has_the_copies_of_the_group_that_counts() {
        let mut book = book(10);
        let cpu = |group| Stored { medium: Medium::Cpu, ..stored(group, Attention::Full, 16) };
        book.store_aside(NAME, &cpu(0));
        assert!(book.has_in(Medium::Cpu, NAME) && !book.has_in(Medium::Storage, NAME));
        assert_eq!(book.names_in(Medium::Cpu), [NAME]);
        book.place(&stored(1, Attention::Full, 16));
        assert!(!book.has_in(Medium::Cpu, NAME), "group 1 counts");
        book.store_aside(NAME, &cpu(1));
        assert!(book.has_in(Medium::Cpu, NAME));
    }

    #[test]
    fn doubts_of_what_was_removed_take_no_room() {
        let mut book = book(10);
        book.place(&stored(0, Attention::Full, 16));
        for _ in 0..10_000 {
            book.store(NAME, &Stored::default(), false);
            book.store(NAME, &Stored::default(), true);
            book.remove(NAME, &removed(None, Medium::Gpu), true);
            book.remove(NAME, &removed(None, Medium::Gpu), true);
        }
        assert!(book.doubts.len() <= DOUBTS_MIN && book.doubted == 0 && book.on_gpu == 0);
    }
}

//! What one cache has announced, beyond the one bit per block that readers see.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::Queue;
use crate::contract::BlockHash;
use crate::contract::events::{Attention, Medium, Removed, Stored};

/// Below this many names their order is kept from the first on: half a megabyte.
const ORDERED_ALWAYS: usize = 1 << 16;

/// The bounds of one cache's book.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Names held; the oldest goes when there are more.
    pub names: usize,
    /// Names remembered as removed that no cache holds any more.
    pub forgotten: usize,
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
    /// Names by age, once there are enough for a bound to come near.
    age: Option<Queue>,
    /// Removed names that no cache holds.
    forgotten: Queue,
}

/// A group and a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Kind(u32);

impl Kind {
    const fn new(group: u32, medium: Medium) -> Self {
        Self(group << 2 | medium as u32)
    }
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
        if let Some(group) = self.scored.take() {
            for name in held {
                self.add(name, Kind::new(group, Medium::Gpu));
            }
        }
        self.names = 0;
        self.age = self.age.as_ref().map(|_| Queue::default());
    }

    /// Names that were stored aside in the group that counts now; each is one [`Book::store`] to be made good.
    pub fn promote(&mut self) -> Vec<BlockHash> {
        let Some(kind) = self.scored_kind().filter(|_| self.names == 0) else { return Vec::new() };
        let mut names: Vec<_> =
            self.copies.iter().filter(|copies| copies.kind == kind).map(|copies| copies.name).collect();
        names.sort_unstable();
        names.retain(|&name| self.drop_one(name, kind));
        names
    }

    fn scored_kind(&self) -> Option<Kind> {
        self.scored.map(|group| Kind::new(group, Medium::Gpu))
    }

    /// Stores one copy of a block that counts; `held` says whether its bit is set.
    pub fn store(&mut self, name: BlockHash, held: bool) -> Storing {
        if !held {
            self.names += 1;
            if let Some(age) = &mut self.age {
                age.push(name);
            }
            return Storing::Held;
        }
        if let Some(kind) = self.scored_kind() {
            self.add(name, kind);
        }
        Storing::Again
    }

    /// Stores one copy that does not count.
    pub fn store_aside(&mut self, name: BlockHash, stored: &Stored) -> Storing {
        let kind = Kind::new(stored.group.unwrap_or(0), stored.medium);
        if self.add(name, kind) { Storing::Aside } else { Storing::Refused }
    }

    /// Removes one copy; `held` says whether the block's bit is set.
    pub fn remove(&mut self, name: BlockHash, removed: &Removed, held: bool) -> Removal {
        let counted = self
            .scored_kind()
            .filter(|_| removed.medium == Medium::Gpu && removed.group.is_none_or(|group| self.scored == Some(group)));
        let kind = counted.unwrap_or_else(|| Kind::new(removed.group.unwrap_or(0), removed.medium));
        if self.drop_one(name, kind) {
            return Removal::Fewer;
        }
        if counted.is_none() || !held {
            return Removal::Unknown;
        }
        self.names -= 1;
        if let Some(age) = &mut self.age {
            age.take(name);
        }
        if self.names < self.ordered_from() / 2 {
            self.age = None;
        }
        Removal::Gone
    }

    fn add(&mut self, name: BlockHash, kind: Kind) -> bool {
        self.copies.add(name, kind, self.limits.names)
    }

    fn drop_one(&mut self, name: BlockHash, kind: Kind) -> bool {
        self.copies.drop_one(name, kind)
    }

    /// Whether copies of a name are known beyond the first that counts.
    pub fn has_other_copies(&self, name: BlockHash) -> bool {
        self.copies.has(name)
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
            while self.drop_one(oldest, kind) {}
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
        let mut copies: Vec<_> = self.copies.iter().map(|copies| (copies.name, copies.kind.0, copies.count)).collect();
        copies.sort_unstable();
        copies
    }
}

/// Counts of copies by name, group and medium.
///
/// Kinds of one name lie together, so that it takes one search to learn whether there is any.
#[derive(Debug, Default)]
struct Copies {
    table: HashTable<Counted>,
    hasher: DefaultHashBuilder,
}

#[derive(Clone, Copy, Debug)]
struct Counted {
    name: BlockHash,
    kind: Kind,
    count: u32,
}

impl Copies {
    /// Counts one copy more, unless it would be the first of its kind and there are `max` already.
    fn add(&mut self, name: BlockHash, kind: Kind, max: usize) -> bool {
        let hash = self.hasher.hash_one(name.0);
        if let Some(found) = self.table.find_mut(hash, |copies| copies.name == name && copies.kind == kind) {
            found.count = found.count.saturating_add(1);
            return true;
        }
        if self.table.len() >= max {
            return false;
        }
        let hasher = &self.hasher;
        self.table.insert_unique(hash, Counted { name, kind, count: 1 }, |copies| hasher.hash_one(copies.name.0));
        true
    }

    fn drop_one(&mut self, name: BlockHash, kind: Kind) -> bool {
        let hash = self.hasher.hash_one(name.0);
        let of_kind = |copies: &Counted| copies.name == name && copies.kind == kind;
        let Ok(mut found) = self.table.find_entry(hash, of_kind) else { return false };
        found.get_mut().count -= 1;
        if found.get().count == 0 {
            found.remove();
            if self.table.len() < self.table.capacity() / 8 {
                let hasher = &self.hasher;
                self.table.shrink_to(self.table.len() * 2, |copies| hasher.hash_one(copies.name.0));
            }
        }
        true
    }

    fn has(&self, name: BlockHash) -> bool {
        self.table.find(self.hasher.hash_one(name.0), |copies| copies.name == name).is_some()
    }

    fn iter(&self) -> impl Iterator<Item = &Counted> {
        self.table.iter()
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
        Book::new(Limits { names, forgotten: 2 })
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

    fn removed(group: Option<u32>, medium: Medium) -> Removed {
        Removed { hashes: vec![NAME.into()], medium, group }
    }

    #[test]
    fn a_duplicate_is_stored_twice_and_removed_twice() {
        let mut book = book(10);
        book.place(&stored(0, Attention::Full, 16));
        assert_eq!(book.store(NAME, false), Storing::Held);
        assert_eq!(book.store(NAME, true), Storing::Again);
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
        book.store(NAME, false);
        for _ in 1..100 {
            assert_eq!(book.store(NAME, true), Storing::Again);
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
        book.store(NAME, false);
        assert_eq!(book.place(&stored(0, Attention::Unstated, 64)), Place::Demote);
        book.demote([NAME]);
        assert_eq!(book.names(), 0);
        assert_eq!(book.place(&stored(0, Attention::Unstated, 16)), Place::Aside);
        book.store_aside(NAME, &stored(1, Attention::Unstated, 16));
        assert_eq!(book.place(&stored(1, Attention::Unstated, 16)), Place::Counts);
        assert_eq!(book.promote(), [NAME]);
        assert_eq!(book.remove(NAME, &removed(Some(0), Medium::Gpu), false), Removal::Fewer, "the window's copy");
    }

    #[test]
    fn other_media_do_not_count_and_do_not_disturb() {
        let mut book = book(10);
        let cpu = Stored { medium: Medium::Cpu, ..stored(0, Attention::Full, 16) };
        assert_eq!(book.place(&cpu), Place::Aside);
        assert_eq!(book.store_aside(NAME, &cpu), Storing::Aside);
        book.place(&stored(0, Attention::Full, 16));
        book.store(NAME, false);
        assert_eq!(book.remove(NAME, &removed(Some(0), Medium::Cpu), true), Removal::Fewer);
        assert_eq!(book.remove(NAME, &removed(Some(0), Medium::Cpu), true), Removal::Unknown);
        assert_eq!(book.names(), 1);
    }

    #[test]
    fn the_oldest_name_goes_over_the_bound() {
        let mut book = book(2);
        book.place(&stored(0, Attention::Full, 16));
        book.store(BlockHash(1), false);
        book.store(BlockHash(2), false);
        assert_eq!(book.evict(), None);
        book.store(BlockHash(3), false);
        assert_eq!((book.evict(), book.evict()), (Some(BlockHash(1)), None));
        assert_eq!(book.names(), 2);
    }

    #[test]
    fn the_order_of_many_names_is_kept_once_half_of_the_bound_is_reached() {
        let mut book = book(200_000);
        for name in 0..=100_000 {
            book.store(BlockHash(name), false);
        }
        assert!(book.wants_order() && book.evict().is_none());
        book.start_order((0..=100_000).map(BlockHash));
        for name in 100_001..=200_000 {
            book.store(BlockHash(name), false);
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
}

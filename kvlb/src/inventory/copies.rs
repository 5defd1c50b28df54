//! Copies of blocks beyond the first that counts, by name, KV group and medium.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::contract::BlockHash;
use crate::contract::events::Medium;

/// A group and a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Kind(u32);

impl Kind {
    pub(super) const fn new(group: u32, medium: Medium) -> Self {
        Self(group << 2 | medium as u32)
    }

    pub(super) const fn number(self) -> u32 {
        self.0
    }

    pub(super) const fn is_gpu(self) -> bool {
        self.0 & 3 == Medium::Gpu as u32
    }
}

/// How many copies of one kind there are of a block, and how many of them are doubted.
///
/// The first copy that counts is not among `count`, being a bit elsewhere, but may be among `doubted`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted {
    pub(super) name: BlockHash,
    pub(super) kind: Kind,
    pub(super) count: u32,
    pub(super) doubted: u32,
}

/// Counts of copies.
///
/// Kinds of one name lie together, so that it takes one search to learn whether there is any.
#[derive(Debug, Default)]
pub(super) struct Copies {
    table: HashTable<Counted>,
    /// Entries with copies beyond the first that counts.
    counted: usize,
    hasher: DefaultHashBuilder,
}

impl Copies {
    /// Names and kinds of which there is a copy.
    pub(super) const fn len(&self) -> usize {
        self.counted
    }

    fn hash(&self, name: BlockHash) -> u64 {
        self.hasher.hash_one(name.0)
    }

    /// What is known of one kind of a name's copies.
    pub(super) fn get(&self, name: BlockHash, kind: Kind) -> Counted {
        let found = self.table.find(self.hash(name), |copies| copies.name == name && copies.kind == kind);
        found.copied().unwrap_or(Counted { name, kind, count: 0, doubted: 0 })
    }

    /// Notes what is known of one kind of a name's copies.
    pub(super) fn set(&mut self, copies: Counted) {
        let hash = self.hash(copies.name);
        let is = |other: &Counted| other.name == copies.name && other.kind == copies.kind;
        let is_none = copies.count == 0 && copies.doubted == 0;
        let before = match self.table.find_entry(hash, is) {
            Ok(mut found) if !is_none => std::mem::replace(found.get_mut(), copies).count,
            Ok(found) => {
                let (before, _) = found.remove();
                self.shrink();
                before.count
            }
            Err(_) if is_none => 0,
            Err(_) => {
                let hasher = &self.hasher;
                self.table.insert_unique(hash, copies, |copies| hasher.hash_one(copies.name.0));
                0
            }
        };
        self.counted = self.counted + usize::from(copies.count > 0) - usize::from(before > 0);
    }

    fn shrink(&mut self) {
        if self.table.len() < self.table.capacity() / 8 {
            let hasher = &self.hasher;
            self.table.shrink_to(self.table.len() * 2, |copies| hasher.hash_one(copies.name.0));
        }
    }

    /// Whether there is a copy of a name, of whatever kind.
    pub(super) fn has(&self, name: BlockHash) -> bool {
        self.table.find(self.hash(name), |copies| copies.name == name && copies.count > 0).is_some()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Counted> {
        self.table.iter()
    }
}

//! From an engine's names to ours: what an announcement means in the rehash key space.

use std::collections::HashMap;

use crate::contract::events::{Removed, Stored, WireHash};
use crate::contract::{BlockHash, BlockSize, ExtraKey, Rehash};

/// An alias map gives memory back when less than this part of it is in use.
const SPARSE: usize = 8;

/// One cache's engine names and what they are called here.
///
/// A name of ours follows from what was announced of a block and of those before it. A block whose parent was never
/// announced has none: an orphan.
#[derive(Debug)]
pub struct Aliases {
    rehash: Rehash,
    block_size: BlockSize,
    names: HashMap<BlockHash, BlockHash>,
    /// Names that a bound took away since the last sweep.
    dropped: usize,
}

impl Aliases {
    /// No aliases, for names in the key space of `rehash` and `block_size`.
    pub fn new(rehash: Rehash, block_size: BlockSize) -> Self {
        Self { rehash, block_size, names: HashMap::new(), dropped: 0 }
    }

    /// The announcement in our names, without blocks that cannot be named; and how many those are.
    pub fn stored(&mut self, stored: &Stored) -> (Stored, u32) {
        let ours = self.chain(stored);
        let mut hashes = Vec::with_capacity(stored.hashes.len());
        let unnamed = stored.hashes.len() - ours.len().min(stored.hashes.len());
        // A window's group announces its last blocks only, with the tokens of all: names and blocks end together.
        let skipped = ours.len().saturating_sub(stored.hashes.len());
        for (position, theirs) in stored.hashes.iter().enumerate() {
            let name = match ours.get(skipped + position) {
                Some(name) => {
                    self.names.insert(theirs.name, *name);
                    Some(*name)
                }
                // An offload tier may announce a block by its name alone.
                None => self.names.get(&theirs.name).copied(),
            };
            hashes.extend(name.map(WireHash::from));
        }
        let orphans = unnamed.min(stored.hashes.len() - hashes.len());
        let parent = stored.parent.and_then(|parent| self.names.get(&parent.name)).map(|name| WireHash::from(*name));
        let named = Stored {
            hashes,
            parent,
            tokens: stored.tokens.clone(),
            block_size: stored.block_size,
            medium: stored.medium,
            group: stored.group,
            attention: stored.attention,
            ..Stored::default()
        };
        (named, u32::try_from(orphans).unwrap_or(u32::MAX))
    }

    /// The names of the blocks that the announcement's tokens make, at the announced size; empty where they have none.
    fn chain(&self, stored: &Stored) -> Vec<BlockHash> {
        let size = stored.block_size as usize;
        let ours = self.block_size.tokens();
        // A coarser group announces every n-th name of the chain.
        if size == 0 || !size.is_multiple_of(ours) {
            return Vec::new();
        }
        let mut parent = match &stored.parent {
            None => self.rehash.root(self.block_size),
            Some(parent) => match self.names.get(&parent.name) {
                Some(name) => *name,
                None => return Vec::new(),
            },
        };
        let (every, mut input, mut names) = (size / ours, Vec::new(), Vec::with_capacity(stored.hashes.len()));
        for (announced, tokens) in stored.tokens.chunks_exact(size).enumerate() {
            let keys = stored.extra_keys.as_ref().and_then(|blocks| blocks.get(announced));
            let adapter = stored.adapter_key();
            let keys = keys.map_or(adapter.as_slice(), Vec::as_slice);
            for (fine, tokens) in tokens.chunks_exact(ours).enumerate() {
                // A salt stands in the first of the finer blocks, an adapter in all of them.
                let inherited: Vec<ExtraKey>;
                let keys = if fine == 0 || every == 1 {
                    keys
                } else {
                    inherited = keys.iter().filter(|key| is_adapter(key)).cloned().collect();
                    &inherited
                };
                parent = self.rehash.step(parent, tokens, keys, &mut input);
            }
            names.push(parent);
        }
        names
    }

    /// The removal in our names, and how many of its blocks have none.
    pub fn removed(&self, removed: &Removed) -> (Removed, u32) {
        let hashes: Vec<_> =
            removed.hashes.iter().filter_map(|hash| self.names.get(&hash.name).copied().map(WireHash::from)).collect();
        let unknown = u32::try_from(removed.hashes.len() - hashes.len()).unwrap_or(u32::MAX);
        (Removed { hashes, ..removed.clone() }, unknown)
    }

    /// Forgets those of a removal's blocks of which no copy is left.
    pub fn forget(&mut self, removed: &Removed, holds_copy: impl Fn(BlockHash) -> bool) {
        for hash in &removed.hashes {
            if self.names.get(&hash.name).is_some_and(|name| !holds_copy(*name)) {
                self.names.remove(&hash.name);
            }
        }
        if self.names.len() < self.names.capacity() / SPARSE {
            self.names.shrink_to(self.names.len() * 2);
        }
    }

    /// Notes that a bound took `names` away; sweeps once they may be a quarter of all.
    pub fn dropped(&mut self, names: usize, holds_copy: impl Fn(BlockHash) -> bool) {
        self.dropped += names;
        if self.dropped > self.names.len() / 4 {
            self.dropped = 0;
            self.names.retain(|_, name| holds_copy(*name));
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.names = HashMap::new();
        self.dropped = 0;
    }

    /// The engine's names with ours, in no order.
    pub fn all(&self) -> Vec<(BlockHash, BlockHash)> {
        self.names.iter().map(|(theirs, ours)| (*theirs, *ours)).collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}

fn is_adapter(key: &ExtraKey) -> bool {
    matches!(key, ExtraKey::Lora { .. } | ExtraKey::LoraId(_))
}

impl Stored {
    /// The adapter as an extra key, for engines that name it but show no keys (vLLM before 0.17).
    fn adapter_key(&self) -> Vec<ExtraKey> {
        let named = self.lora_name.as_ref().map(|name| ExtraKey::Lora { name: name.clone(), path: None });
        named.or_else(|| self.lora_id.filter(|id| *id > 0).map(ExtraKey::LoraId)).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::events::Medium;
    use crate::contract::{Extra, KeySpace, Lora, TokenId};

    const SIZE: usize = 4;

    fn size() -> BlockSize {
        BlockSize::new(4).unwrap()
    }

    fn aliases() -> Aliases {
        Aliases::new(Rehash::new(9), size())
    }

    fn ids(range: std::ops::Range<u32>) -> Vec<TokenId> {
        range.map(TokenId).collect()
    }

    fn request(tokens: &[TokenId], extra: &Extra) -> Vec<BlockHash> {
        let mut names = Vec::new();
        KeySpace::rehash(Rehash::new(9), size()).begin(extra).unwrap().extend(tokens, &mut names);
        names
    }

    fn stored(hashes: &[u64], parent: Option<u64>, tokens: Vec<TokenId>) -> Stored {
        Stored {
            hashes: hashes.iter().map(|&hash| BlockHash(hash).into()).collect(),
            parent: parent.map(|parent| BlockHash(parent).into()),
            tokens,
            block_size: 4,
            ..Stored::default()
        }
    }

    fn names(stored: &Stored) -> Vec<BlockHash> {
        stored.hashes.iter().map(|hash| hash.name).collect()
    }

    #[test]
    fn announced_blocks_get_the_names_that_a_request_computes() {
        let mut aliases = aliases();
        let (first, orphans) = aliases.stored(&stored(&[71, 72], None, ids(0..8)));
        let (next, _) = aliases.stored(&stored(&[73], Some(72), ids(8..12)));
        assert_eq!([names(&first), names(&next)].concat(), request(&ids(0..12), &Extra::default()));
        assert_eq!(orphans, 0);
    }

    #[test]
    fn a_block_of_an_unknown_parent_is_an_orphan_and_so_are_its_children() {
        let mut aliases = aliases();
        let (lost, orphans) = aliases.stored(&stored(&[8, 9], Some(7), ids(0..8)));
        assert_eq!((lost.hashes.len(), orphans), (0, 2));
        assert_eq!(aliases.stored(&stored(&[10], Some(9), ids(8..12))).1, 1);
        let (removal, unknown) = aliases.removed(&Removed { hashes: vec![BlockHash(9).into()], ..Removed::default() });
        assert_eq!((removal.hashes.len(), unknown), (0, 1));
    }

    #[test]
    fn salts_and_adapters_have_names_of_their_own_that_requests_share() {
        let mut aliases = aliases();
        let lora = || ExtraKey::Lora { name: "a".into(), path: None };
        let keys = vec![vec![lora(), ExtraKey::CacheSalt("s".into())], vec![lora()]];
        let mut announced = stored(&[1, 2], None, ids(0..8));
        announced.extra_keys = Some(keys);
        let lora = Some(Lora { name: "a".into(), path: Some("/srv/a".into()), number: None });
        let both = Extra { cache_salt: Some("s".into()), lora: lora.clone() };
        assert_eq!(names(&aliases.stored(&announced).0), request(&ids(0..8), &both));
        let bare = Stored { lora_name: Some("a".into()), ..stored(&[3, 4], None, ids(0..8)) };
        assert_eq!(names(&aliases.stored(&bare).0), request(&ids(0..8), &Extra { cache_salt: None, lora }));
    }

    #[test]
    fn a_window_announces_the_end_and_a_coarser_group_every_second_name() {
        let mut aliases = aliases();
        let all = request(&ids(0..16), &Extra::default());
        let (window, orphans) = aliases.stored(&stored(&[3, 4], None, ids(0..16)));
        assert_eq!((names(&window), orphans), (all[2..].to_vec(), 0));
        assert_eq!(aliases.stored(&stored(&[], None, ids(0..16))).1, 0);
        let coarse = Stored { block_size: 8, ..stored(&[5, 6], None, ids(0..16)) };
        assert_eq!(names(&aliases.stored(&coarse).0), [all[1], all[3]]);
        let odd = Stored { block_size: 6, ..stored(&[7, 8], None, ids(0..12)) };
        assert_eq!(aliases.stored(&odd).1, 2);
    }

    #[test]
    fn an_offload_tier_names_what_is_known() {
        let mut aliases = aliases();
        let (known, _) = aliases.stored(&stored(&[1], None, ids(0..4)));
        let bare = Stored { block_size: 0, medium: Medium::Cpu, ..stored(&[1, 2], None, Vec::new()) };
        let (named, orphans) = aliases.stored(&bare);
        assert_eq!((names(&named), orphans, named.medium), (names(&known), 1, Medium::Cpu));
    }

    #[test]
    fn an_alias_goes_with_the_last_copy_of_its_block() {
        let mut aliases = aliases();
        aliases.stored(&stored(&[1, 2], None, ids(0..8)));
        let removal = Removed { hashes: vec![BlockHash(1).into()], ..Removed::default() };
        aliases.forget(&removal, |_| true);
        assert_eq!(aliases.len(), 2);
        aliases.forget(&removal, |_| false);
        assert_eq!(aliases.all().len(), 1);
        aliases.dropped(1, |_| false);
        assert!(aliases.is_empty());
        assert_eq!(SIZE, size().tokens());
    }
}

//! What the KV in each physical block was computed from, so that a block read too late shows whose it is.

use serde::{Deserialize, Serialize};

use crate::engine::chance::{Chance, mix};
use crate::engine::pool::BlockId;

/// Stands for a position that nobody computed.
const NEVER: u32 = u32::MAX;

/// One block's content: its tokens, and a mark of everything before them, which KV depends on as well.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(in crate::engine) struct Content {
    before: u64,
    tokens: Vec<u32>,
}

impl Content {
    /// Whether this is, as far as `own` goes, the same.
    pub(in crate::engine) fn begins_as(&self, own: &Self) -> bool {
        self.before == own.before && self.tokens.starts_with(&own.tokens)
    }
}

/// The marks of one sequence: one for the tokens before each of its blocks.
#[derive(Debug, Default)]
pub(in crate::engine) struct Lineage(Vec<u64>);

impl Lineage {
    /// The content of block `index` of `tokens`, cut at `until`; an adapter makes other KV of the same tokens.
    pub(in crate::engine) fn content(
        &mut self,
        adapter: &str,
        tokens: &[u32],
        size: usize,
        index: usize,
        until: usize,
    ) -> Content {
        if self.0.is_empty() {
            self.0.push(Chance::seed_of(adapter, &[]));
        }
        while self.0.len() <= index {
            let at = self.0.len() - 1;
            let block: Vec<u64> = tokens[at * size..(at + 1) * size].iter().map(|token| u64::from(*token)).collect();
            self.0.push(mix(self.0[at] ^ Chance::seed_of("block", &block)));
        }
        Content { before: self.0[index], tokens: tokens[index * size..until.min((index + 1) * size)].to_vec() }
    }
}

/// The contents of all blocks of a pool.
#[derive(Debug)]
pub(in crate::engine) struct Contents(Vec<Content>);

impl Contents {
    /// Nothing in any of `blocks` blocks.
    pub(in crate::engine) fn new(blocks: usize) -> Self {
        Self(vec![Content::default(); blocks])
    }

    /// Computes into `block`, from its `offset`-th token on, what `own` has there; what is before stays, whosever it is.
    pub(in crate::engine) fn compute(&mut self, block: BlockId, offset: usize, own: &Content) {
        let held = &mut self.0[block];
        if offset == 0 {
            held.before = own.before;
        }
        held.tokens.resize(offset, NEVER);
        held.tokens.extend(own.tokens.iter().skip(offset));
    }

    /// Copies a content into `block`.
    pub(in crate::engine) fn put(&mut self, block: BlockId, content: Content) {
        self.0[block] = content;
    }

    /// What is in `block`; a number beyond the pool holds nothing.
    pub(in crate::engine) fn of(&self, block: BlockId) -> Content {
        self.0.get(block).cloned().unwrap_or_default()
    }

    /// 0 when each of these blocks holds what the sequence computed itself; else a mark of what they hold.
    pub(in crate::engine) fn foreign(&self, blocks: impl Iterator<Item = (BlockId, Content)>) -> u64 {
        let (mut foreign, mut mark) = (false, 1);
        for (block, own) in blocks {
            let held = &self.0[block];
            foreign |= !held.begins_as(&own);
            let tokens: Vec<u64> = held.tokens.iter().map(|token| u64::from(*token)).collect();
            mark = mix(mark ^ held.before ^ Chance::seed_of("content", &tokens));
        }
        if foreign { mark | 1 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::{Content, Contents, Lineage, NEVER};

    #[test]
    fn a_block_is_one_s_own_when_its_tokens_and_all_before_them_are() {
        let (mine, other): (Vec<u32>, Vec<u32>) = ((0..10).collect(), (100..104).chain(4..10).collect());
        let of = |tokens: &[u32], index| Lineage::default().content("", tokens, 4, index, 10);
        let mut contents = Contents::new(3);
        for index in 0..3 {
            contents.compute(index, 0, &of(&mine, index));
        }
        let all = |tokens: &[u32]| (0..3).map(|index| (index, of(tokens, index))).collect::<Vec<_>>();
        assert_eq!(contents.foreign(all(&mine).into_iter()), 0);
        // The second block's tokens are equal, what is before them is not.
        assert_ne!(contents.foreign(all(&other).into_iter().skip(1).take(1)), 0);
        assert_ne!(of(&mine, 1), Lineage::default().content("lora", &mine, 4, 1, 10));
        assert!(contents.of(2).begins_as(&Lineage::default().content("", &mine, 4, 2, 9)), "as far as it goes");
    }

    #[test]
    fn computing_the_last_token_leaves_what_is_before_it() {
        let own = Lineage::default().content("", &[1, 2, 3], 4, 0, 3);
        let mut contents = Contents::new(1);
        contents.put(0, Content { before: 9, tokens: vec![7, 8, 9, 10] });
        contents.compute(0, 2, &own);
        assert_eq!(contents.of(0), Content { before: 9, tokens: vec![7, 8, 3] });
        let mut empty = Contents::new(1);
        empty.compute(0, 2, &own);
        assert_eq!(empty.of(0).tokens, [NEVER, NEVER, 3]);
    }
}

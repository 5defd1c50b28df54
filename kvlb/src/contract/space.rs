//! One way of naming blocks, and a prompt's chain in it.

use std::sync::Arc;

use ciborium::Value;

use super::rehash::Rehash;
use super::{
    BlockExtra, BlockHash, BlockSize, Digest, Extra, ExtraKey, HashAlgo, HashError, KeyEra, TokenId, cbor, pickle,
};

/// One way of naming blocks: names of two key spaces have nothing to do with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeySpace {
    scheme: Scheme,
    block_size: BlockSize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Scheme {
    /// As the engine does.
    Parity { algo: HashAlgo, none_hash: Digest, era: KeyEra },
    /// In our own way, over what the engine announces of its blocks.
    Rehash(Rehash),
}

impl KeySpace {
    /// The names that an engine gives.
    pub const fn parity(algo: HashAlgo, none_hash: Digest, block_size: BlockSize, era: KeyEra) -> Self {
        Self { scheme: Scheme::Parity { algo, none_hash, era }, block_size }
    }

    /// Our own names.
    pub const fn rehash(rehash: Rehash, block_size: BlockSize) -> Self {
        Self { scheme: Scheme::Rehash(rehash), block_size }
    }

    /// Tokens per block.
    pub const fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Whether the names are our own.
    pub const fn is_rehash(&self) -> bool {
        matches!(self.scheme, Scheme::Rehash(_))
    }

    /// Whether an adapter's path is part of its blocks' names.
    pub const fn hashes_paths(&self) -> bool {
        matches!(self.scheme, Scheme::Parity { era: KeyEra::Tagged, .. })
    }

    /// Begins the chain of one prompt, with what else enters its names.
    ///
    /// # Errors
    /// [`HashError::Extra`] when an extra key has no encoding in this key space.
    pub fn begin(&self, extra: &Extra) -> Result<Chain, HashError> {
        let (first, every) = (extra.first_block(), extra.every_block());
        let (parent, keys) = match self.scheme {
            Scheme::Parity { none_hash, era, .. } => {
                let value = |keys| BlockExtra { keys, lookahead: &[] }.value(era);
                (Parent::Digest(none_hash), Keys::Values { first: value(&first)?, every: value(&every)? })
            }
            Scheme::Rehash(rehash) => (Parent::Name(rehash.root(self.block_size)), Keys::Plain { first, every }),
        };
        let start = Start { space: *self, keys };
        Ok(Chain { start: Arc::new(start), parent, unfinished: Vec::new(), blocks: 0 })
    }
}

/// What a chain was begun with.
#[derive(Debug)]
struct Start {
    space: KeySpace,
    keys: Keys,
}

/// The extra keys of the first block and of every other one.
#[derive(Debug)]
enum Keys {
    Values { first: Option<Value>, every: Option<Value> },
    Plain { first: Vec<ExtraKey>, every: Vec<ExtraKey> },
}

/// What the next block's name is made from, besides its tokens.
#[derive(Clone, Copy, Debug)]
enum Parent {
    Digest(Digest),
    Name(BlockHash),
}

/// The chain of one prompt as far as its tokens are known. A copy can go on with other tokens.
#[derive(Clone, Debug)]
pub struct Chain {
    start: Arc<Start>,
    parent: Parent,
    /// Tokens of the block that is not full yet.
    unfinished: Vec<TokenId>,
    blocks: usize,
}

impl Chain {
    /// Tokens taken so far.
    pub fn tokens(&self) -> usize {
        self.blocks * self.start.space.block_size.tokens() + self.unfinished.len()
    }

    /// The key space that it names in.
    pub fn key_space(&self) -> &KeySpace {
        &self.start.space
    }

    /// Bytes of memory that this copy has for itself.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.unfinished.capacity() * size_of::<TokenId>()
    }

    /// Gives back memory that its next tokens do not need.
    pub fn shrink(&mut self) {
        self.unfinished.shrink_to_fit();
    }

    /// Takes the tokens that follow and appends the names of the blocks that became full to `names`.
    pub fn extend(&mut self, tokens: &[TokenId], names: &mut Vec<BlockHash>) {
        match self.start.space.scheme {
            Scheme::Parity { .. } => self.extend_showing(tokens, |digest, _| names.push(digest.name())),
            Scheme::Rehash(rehash) => {
                let start = Arc::clone(&self.start);
                let Keys::Plain { first, every } = &start.keys else { return };
                let Parent::Name(mut parent) = self.parent else { return };
                let mut block = self.blocks;
                let mut input = Vec::new();
                self.each_block(tokens, |tokens| {
                    let keys = if block == 0 { first } else { every };
                    parent = rehash.step(parent, tokens, keys, &mut input);
                    block += 1;
                    names.push(parent);
                });
                self.parent = Parent::Name(parent);
            }
        }
    }

    /// As [`Chain::extend`], for an engine's names: passes on each block's digest and the bytes that were hashed. Our own
    /// names have none.
    pub fn extend_showing(&mut self, tokens: &[TokenId], mut named: impl FnMut(&Digest, &[u8])) {
        let start = Arc::clone(&self.start);
        let Scheme::Parity { algo, .. } = start.space.scheme else { return };
        let (Keys::Values { first, every }, Parent::Digest(mut parent)) = (&start.keys, self.parent) else { return };
        let mut block = self.blocks;
        let mut writer = Writer::new(algo, &parent, start.space.block_size);
        self.each_block(tokens, |tokens| {
            let extra = if block == 0 { first } else { every };
            let input = writer.write(parent.as_bytes(), tokens, extra.as_ref());
            parent = algo.digest(input);
            block += 1;
            named(&parent, input);
        });
        self.parent = Parent::Digest(parent);
    }

    /// Passes on each block that `tokens` complete, and keeps the rest.
    fn each_block(&mut self, tokens: &[TokenId], mut full: impl FnMut(&[TokenId])) {
        let size = self.start.space.block_size.tokens();
        let missing = (size - self.unfinished.len()).min(tokens.len());
        let mut tokens = tokens;
        if !self.unfinished.is_empty() {
            self.unfinished.extend_from_slice(&tokens[..missing]);
            tokens = &tokens[missing..];
            if self.unfinished.len() < size {
                return;
            }
            full(&self.unfinished);
            self.unfinished.clear();
            self.blocks += 1;
        }
        let blocks = tokens.chunks_exact(size);
        let rest = blocks.remainder();
        for block in blocks {
            full(block);
            self.blocks += 1;
        }
        self.unfinished.extend_from_slice(rest);
    }
}

/// Writes the hash inputs of blocks of one size.
enum Writer {
    Cbor(cbor::Block),
    Pickle(Vec<u8>),
}

impl Writer {
    fn new(algo: HashAlgo, parent: &Digest, size: BlockSize) -> Self {
        match algo {
            HashAlgo::Sha256Cbor | HashAlgo::XxhashCbor => {
                Self::Cbor(cbor::Block::new(parent.as_bytes().len(), size.tokens()))
            }
            HashAlgo::Sha256 | HashAlgo::Xxhash => Self::Pickle(Vec::new()),
        }
    }

    fn write(&mut self, parent: &[u8], tokens: &[TokenId], extra: Option<&Value>) -> &[u8] {
        match self {
            Self::Cbor(block) => block.write(parent, tokens, extra),
            Self::Pickle(input) => {
                pickle::block(input, parent, tokens.iter().map(|&token| token.into()), extra);
                input
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::contract::{Hasher, Lora, NoneSeed};

    fn spaces(size: u32) -> Vec<KeySpace> {
        let size = BlockSize::new(size).unwrap();
        let parity = |algo| Hasher::new(algo, &NoneSeed::Text("0".into()), size).key_space(KeyEra::Tagged);
        HashAlgo::ALL.map(parity).into_iter().chain([KeySpace::rehash(Rehash::new(7), size)]).collect()
    }

    fn extra() -> Extra {
        let lora = Lora { name: "sql".into(), path: Some("/srv/sql".into()), number: None };
        Extra { cache_salt: Some("tenant".into()), lora: Some(lora) }
    }

    fn names(space: &KeySpace, extra: &Extra, tokens: &[TokenId]) -> Vec<BlockHash> {
        let mut names = Vec::new();
        space.begin(extra).unwrap().extend(tokens, &mut names);
        names
    }

    #[test]
    fn an_adapter_is_in_every_name_and_a_salt_is_inherited() {
        let tokens: Vec<_> = (0..64).map(TokenId).collect();
        for space in spaces(16) {
            let plain = names(&space, &Extra::default(), &tokens);
            let salted = names(&space, &Extra { lora: None, ..extra() }, &tokens);
            let adapted = names(&space, &Extra { cache_salt: None, ..extra() }, &tokens);
            for other in [&salted, &adapted, &names(&space, &extra(), &tokens)] {
                assert!(plain.iter().zip(other).all(|(one, other)| one != other), "{space:?}");
            }
            assert_eq!(plain.len(), 4);
        }
    }

    #[test]
    fn an_adapter_without_its_path_has_no_name_where_engines_hash_the_path() {
        let pathless = Extra { cache_salt: None, lora: Some(Lora { name: "sql".into(), path: None, number: None }) };
        let hasher = Hasher::new(HashAlgo::Sha256, &NoneSeed::Unset, BlockSize::new(16).unwrap());
        assert!(hasher.key_space(KeyEra::Tagged).begin(&pathless).is_err());
        assert!(hasher.key_space(KeyEra::Untagged).begin(&pathless).is_ok());
        assert!(KeySpace::rehash(Rehash::new(1), BlockSize::new(16).unwrap()).begin(&pathless).is_ok());
    }

    proptest! {
        #[test]
        fn a_chain_that_is_cut_anywhere_names_the_same_blocks(
            tokens in prop::collection::vec(any::<u32>().prop_map(TokenId), 0..300),
            cuts in prop::collection::vec(0..300usize, 0..6),
            size in 1..40u32,
        ) {
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(tokens.len())).chain([0, tokens.len()]).collect();
            cuts.sort_unstable();
            for space in spaces(size) {
                let mut chain = space.begin(&extra()).unwrap();
                let mut pieces = Vec::new();
                for cut in cuts.windows(2) {
                    chain = chain.clone();
                    chain.extend(&tokens[cut[0]..cut[1]], &mut pieces);
                }
                prop_assert_eq!(&pieces, &names(&space, &extra(), &tokens));
                prop_assert_eq!(chain.tokens(), tokens.len());
                prop_assert_eq!(pieces.len(), tokens.len() / size as usize);
            }
        }
    }
}

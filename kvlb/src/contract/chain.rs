//! The chain that names a prompt's blocks.

use std::fmt;

use ciborium::Value;
use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use super::{
    BlockExtra, BlockHash, BlockSize, Digest, Extra, HashAlgo, KeyEra, KeySpace, NoneSeed, TokenId, cbor, pickle,
};

/// The text that vLLM 0.29 and later hash into `NONE_HASH` when `PYTHONHASHSEED` is not set, for the sha256 variants.
///
/// Source: vLLM 0.32.0; held by `tests/golden/vllm-0.32.0/none_hash.json.gz`.
const UNSET_SEED: &str = "vllm-none-hash";

/// Why a block has no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HashError {
    /// An extra key lacks what its era's encoding needs.
    #[error("no encoding for {0}")]
    Extra(&'static str),
}

impl HashAlgo {
    /// `NONE_HASH` under this algorithm, or nothing where it is random bytes.
    pub fn none_hash(self, seed: &NoneSeed) -> Option<Digest> {
        match (seed, self) {
            (NoneSeed::Text(seed), _) => Some(self.text_digest(seed)),
            (NoneSeed::Unset, Self::Sha256Cbor | Self::Sha256) => Some(self.text_digest(UNSET_SEED)),
            (NoneSeed::Unset, Self::XxhashCbor | Self::Xxhash) => None,
        }
    }

    /// Names one block: the digest over its parent's digest, its tokens and its extra keys.
    ///
    /// # Errors
    /// [`HashError::Extra`] when an extra key has no encoding in `era`.
    pub fn step<T: Copy + Into<u64>>(
        self,
        parent: &Digest,
        tokens: &[T],
        extra: BlockExtra<'_>,
        era: KeyEra,
    ) -> Result<Digest, HashError> {
        let (parent, extra) = (parent.as_bytes(), extra.value(era)?);
        Ok(match self {
            Self::Sha256Cbor | Self::XxhashCbor => {
                let mut block = cbor::Block::new(parent.len(), tokens.len());
                self.digest(block.write(parent, tokens, extra.as_ref()))
            }
            Self::Sha256 | Self::Xxhash => {
                let mut input = Vec::new();
                pickle::block(&mut input, parent, tokens.iter().map(|&token| token.into()), extra.as_ref());
                self.digest(&input)
            }
        })
    }

    fn text_digest(self, text: &str) -> Digest {
        let mut input = Vec::new();
        match self {
            Self::Sha256Cbor | Self::XxhashCbor => cbor::value(&mut input, &Value::Text(text.to_owned())),
            Self::Sha256 | Self::Xxhash => pickle::text(&mut input, text),
        }
        self.digest(&input)
    }

    pub(super) fn digest(self, input: &[u8]) -> Digest {
        match self {
            Self::Sha256Cbor | Self::Sha256 => Digest::Sha256(Sha256::digest(input).into()),
            Self::XxhashCbor | Self::Xxhash => Digest::Xxh3(xxh3_128(input).to_be_bytes()),
        }
    }
}

/// Names the blocks of a prompt as one engine does.
///
/// digest = H(CBOR `[parent digest, [token, …], extra keys or null]`), the first parent is `NONE_HASH`, and a block's
/// name is the last 8 bytes of its digest.
///
/// Source: vLLM 0.32.0, `hash_block_tokens`; held by `tests/golden/vllm-0.32.0/`.
#[derive(Clone, Debug)]
pub struct Hasher {
    algo: HashAlgo,
    block_size: BlockSize,
    none_hash: Digest,
    provable: bool,
}

/// A block with the bytes its name was made of, for byte-level comparison with an engine (`LLB_KV_HASH_DEBUG`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedBlock {
    /// The block's name.
    pub hash: BlockHash,
    /// Its full digest.
    pub digest: Digest,
    /// The CBOR that was hashed.
    pub input: Vec<u8>,
}

impl fmt::Display for NamedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hash={} cbor=", self.hash)?;
        self.input.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Hasher {
    /// A hasher for one engine's algorithm, `PYTHONHASHSEED` and block size.
    pub fn new(algo: HashAlgo, seed: &NoneSeed, block_size: BlockSize) -> Self {
        let known = algo.none_hash(seed);
        // Where the engine's own is random any value is as wrong as another; an all-zero one would look deliberate.
        let none_hash = known.unwrap_or_else(|| algo.text_digest(UNSET_SEED));
        Self { algo, block_size, none_hash, provable: known.is_some() }
    }

    /// The way of naming of an engine that writes extra keys as `era` says.
    pub const fn key_space(&self, era: KeyEra) -> KeySpace {
        KeySpace::parity(self.algo, self.none_hash, self.block_size, era)
    }

    /// The algorithm.
    pub const fn algo(&self) -> HashAlgo {
        self.algo
    }

    /// Tokens per block.
    pub const fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// The parent of every first block.
    pub const fn none_hash(&self) -> &Digest {
        &self.none_hash
    }

    /// Whether an engine can agree with these names: false where its `NONE_HASH` is random bytes.
    pub const fn provable(&self) -> bool {
        self.provable
    }

    /// Names every full block of `tokens`, in prompt order: `tokens.len() / block_size` hashes.
    ///
    /// A trailing partial block has no name, since the engine caches full blocks only. Each hash covers its parent's
    /// full digest, so equal prefixes get equal hashes.
    ///
    /// # Errors
    /// [`HashError::Extra`] when an extra key has no encoding in `era`.
    pub fn block_hashes(&self, tokens: &[TokenId], extra: &Extra, era: KeyEra) -> Result<Vec<BlockHash>, HashError> {
        let mut names = Vec::with_capacity(tokens.len() / self.block_size.tokens());
        self.key_space(era).begin(extra)?.extend(tokens, &mut names);
        Ok(names)
    }

    /// As [`Hasher::block_hashes`], with each block's digest and hash input.
    ///
    /// # Errors
    /// As [`Hasher::block_hashes`].
    pub fn explain(&self, tokens: &[TokenId], extra: &Extra, era: KeyEra) -> Result<Vec<NamedBlock>, HashError> {
        let mut blocks = Vec::new();
        self.key_space(era).begin(extra)?.extend_showing(tokens, |digest, input| {
            blocks.push(NamedBlock { hash: digest.name(), digest: *digest, input: input.to_vec() });
        });
        Ok(blocks)
    }

    /// Names one block; see [`HashAlgo::step`].
    ///
    /// # Errors
    /// As [`Hasher::block_hashes`].
    pub fn step<T: Copy + Into<u64>>(
        &self,
        parent: &Digest,
        tokens: &[T],
        extra: BlockExtra<'_>,
        era: KeyEra,
    ) -> Result<Digest, HashError> {
        self.algo.step(parent, tokens, extra, era)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::contract::ExtraKey;

    fn hasher(seed: &str) -> Hasher {
        Hasher::new(HashAlgo::Sha256Cbor, &NoneSeed::Text(seed.to_owned()), BlockSize::new(16).unwrap())
    }

    fn tokens(count: u32) -> Vec<TokenId> {
        (0..count).map(|token| TokenId(token * 7919)).collect()
    }

    #[test]
    fn the_seed_is_text() {
        let none_hashes = ["0", "00", ""].map(|seed| *hasher(seed).none_hash());
        assert_ne!(none_hashes[0], none_hashes[1]);
        assert_ne!(none_hashes[0], none_hashes[2]);
        assert_eq!(none_hashes[0].name(), BlockHash(0xf8b5_5adf_f2e6_1c3e));
    }

    #[test]
    fn an_unset_seed_is_known_for_sha256_and_unprovable_for_xxhash() {
        let unset = |algo| Hasher::new(algo, &NoneSeed::Unset, BlockSize::new(16).unwrap());
        assert!(unset(HashAlgo::Sha256Cbor).provable());
        assert!(!unset(HashAlgo::XxhashCbor).provable());
        for algo in [HashAlgo::Sha256Cbor, HashAlgo::XxhashCbor] {
            assert!(unset(algo).none_hash().as_bytes().iter().any(|&byte| byte != 0), "never all zero");
        }
    }

    #[test]
    fn a_partial_block_has_no_name() {
        let names = |count| hasher("0").block_hashes(&tokens(count), &Extra::default(), KeyEra::Tagged).unwrap();
        assert_eq!(names(15), []);
        assert_eq!(names(47).len(), 2);
        assert_eq!(names(47), names(32));
    }

    #[test]
    fn a_salt_changes_every_name_and_an_empty_one_none() {
        let salted = |salt: Option<&str>| {
            let extra = Extra { cache_salt: salt.map(str::to_owned), lora: None };
            hasher("0").block_hashes(&tokens(48), &extra, KeyEra::Tagged).unwrap()
        };
        assert_eq!(salted(Some("")), salted(None));
        assert!(salted(Some("a")).iter().zip(salted(None)).all(|(one, other)| *one != other));
    }

    #[test]
    fn a_block_shows_the_bytes_it_was_made_of() {
        let hasher = Hasher::new(HashAlgo::Sha256Cbor, &NoneSeed::Text("0".into()), BlockSize::new(2).unwrap());
        let blocks = hasher.explain(&[TokenId(1), TokenId(300)], &Extra::default(), KeyEra::Tagged).unwrap();
        let shown = blocks[0].to_string();
        assert!(shown.starts_with(&format!("hash={} cbor=8358204e1195df", blocks[0].hash)), "{shown}");
        assert!(shown.ends_with("820119012cf6"), "{shown}");
    }

    #[test]
    fn a_key_without_what_its_era_needs_has_no_encoding() {
        let key = [ExtraKey::Lora { name: "a".into(), path: None }];
        let step = |era| {
            let extra = BlockExtra { keys: &key, lookahead: &[] };
            hasher("0").step(hasher("0").none_hash(), &tokens(16), extra, era)
        };
        assert!(step(KeyEra::Untagged).is_ok());
        assert_eq!(step(KeyEra::Tagged), Err(HashError::Extra("a LoRA adapter without its path")));
    }

    proptest! {
        #[test]
        fn equal_prefixes_get_equal_names(head in prop::collection::vec(any::<u32>(), 0..200), tail in prop::collection::vec(any::<u32>(), 0..80)) {
            let names = |tokens: &[u32]| {
                let tokens: Vec<_> = tokens.iter().map(|&token| TokenId(token)).collect();
                hasher("0").block_hashes(&tokens, &Extra::default(), KeyEra::Tagged).unwrap()
            };
            let whole = names(&[head.clone(), tail].concat());
            let part = names(&head);
            prop_assert_eq!(&whole[..part.len()], &part[..]);
        }
    }
}

//! Names of our own: a chain over what an engine announces of its blocks, whatever it calls them itself.
//!
//! An engine with an unknown seed or algorithm still says which tokens and extra keys a block has and which block comes
//! before it. From these a name follows that a request's own tokens lead to as well, and the engine's hash is needed only to
//! know the block again.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{BlockHash, BlockSize, ExtraKey, TokenId};

/// The way of naming, with a secret that makes names unforeseeable.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rehash {
    secret: u64,
}

impl fmt::Debug for Rehash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rehash")
    }
}

impl Rehash {
    /// A way of naming under `secret`, any number that clients do not know.
    pub const fn new(secret: u64) -> Self {
        Self { secret }
    }

    /// The parent of every first block. Blocks of another size have other names.
    pub fn root(self, block_size: BlockSize) -> BlockHash {
        BlockHash(xxh3_64_with_seed(&block_size.get().to_le_bytes(), self.secret))
    }

    /// The name of the block with these tokens and extra keys that follows `parent`. `input` is room to work in.
    ///
    /// A key that the engine does not show (an adapter's path) does not enter, so that events and requests agree.
    pub fn step(self, parent: BlockHash, tokens: &[TokenId], keys: &[ExtraKey], input: &mut Vec<u8>) -> BlockHash {
        input.clear();
        input.reserve(8 + 4 * tokens.len());
        input.extend_from_slice(&parent.0.to_le_bytes());
        for token in tokens {
            input.extend_from_slice(&token.0.to_le_bytes());
        }
        for key in keys {
            write_key(input, key);
        }
        BlockHash(xxh3_64_with_seed(input, self.secret))
    }
}

fn write_key(input: &mut Vec<u8>, key: &ExtraKey) {
    let mut text = |kind: u8, bytes: &[u8]| {
        input.push(kind);
        input.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        input.extend_from_slice(bytes);
    };
    match key {
        ExtraKey::Lora { name, .. } => text(b'l', name.as_bytes()),
        ExtraKey::LoraId(id) => text(b'i', &id.to_le_bytes()),
        ExtraKey::CacheSalt(salt) => text(b's', salt.as_bytes()),
        ExtraKey::PromptEmbeds(digest) => text(b'e', digest),
        ExtraKey::Mm { id, offset } => {
            text(b'm', id.as_bytes());
            text(b'o', &offset.map(i64::to_le_bytes).unwrap_or_default());
        }
        // Nothing that a request brings is equal to it.
        ExtraKey::Unknown => text(b'?', &[]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_depend_on_everything_that_an_engine_shows() {
        let rehash = Rehash::new(1);
        let (tokens, mut input) = ([TokenId(1), TokenId(2)], Vec::new());
        let root = rehash.root(BlockSize::new(2).unwrap());
        let mut name = |parent, tokens: &[TokenId], keys: &[ExtraKey]| rehash.step(parent, tokens, keys, &mut input);
        let plain = name(root, &tokens, &[]);
        let lora = |path: Option<&str>| ExtraKey::Lora { name: "a".into(), path: path.map(str::to_owned) };
        assert_ne!(plain, name(BlockHash(5), &tokens, &[]));
        assert_ne!(plain, name(root, &[TokenId(2), TokenId(1)], &[]));
        assert_ne!(plain, name(root, &tokens, &[lora(None)]));
        assert_ne!(name(root, &tokens, &[lora(None)]), name(root, &tokens, &[ExtraKey::CacheSalt("a".into())]));
        assert_eq!(name(root, &tokens, &[lora(None)]), name(root, &tokens, &[lora(Some("/srv/a"))]));
        assert_ne!(root, rehash.root(BlockSize::new(4).unwrap()));
        assert_ne!(root, Rehash::new(2).root(BlockSize::new(2).unwrap()));
    }
}

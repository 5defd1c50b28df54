//! The words in which an engine and kvlb talk of blocks.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

/// One token of a model's vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct TokenId(pub u32);

impl From<TokenId> for u64 {
    fn from(token: TokenId) -> Self {
        Self::from(token.0)
    }
}

/// A block's name on the wire: the last 8 bytes of its digest, big-endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockHash(pub u64);

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A block's full digest, which is the parent in the next block's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Digest {
    /// SHA-256.
    Sha256([u8; 32]),
    /// XXH3-128 in canonical (big-endian) order.
    Xxh3([u8; 16]),
}

impl Digest {
    /// The digest's bytes: 32 for SHA-256, 16 for XXH3.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Sha256(bytes) => bytes,
            Self::Xxh3(bytes) => bytes,
        }
    }

    /// The name of the block with this digest: its last 8 bytes, big-endian.
    pub fn name(&self) -> BlockHash {
        let mut last = [0; 8];
        let bytes = self.as_bytes();
        last.copy_from_slice(&bytes[bytes.len() - 8..]);
        BlockHash(u64::from_be_bytes(last))
    }
}

/// Tokens per block, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// A block size of `tokens`, unless that is zero.
    pub const fn new(tokens: u32) -> Option<Self> {
        match NonZeroU32::new(tokens) {
            Some(tokens) => Some(Self(tokens)),
            None => None,
        }
    }

    /// Tokens per block.
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// Tokens per block, as a length.
    pub const fn tokens(self) -> usize {
        self.0.get() as usize
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The position of one event batch in its publisher's stream; starts at 0 with every engine life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct EventSeq(pub u64);

impl fmt::Display for EventSeq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How an engine hashes a block: vLLM's `--prefix-caching-hash-algo`, the rule's `kvHashAlgo`.
///
/// All four can be computed outside the engine. The pickled ones only for what a prompt of text consists of: an object that
/// Python meets twice in one block is pickled by its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HashAlgo {
    /// SHA-256 over canonical CBOR.
    Sha256Cbor,
    /// XXH3-128 over canonical CBOR.
    XxhashCbor,
    /// SHA-256 over a Python pickle: vLLM's default.
    Sha256,
    /// XXH3-128 over a Python pickle.
    Xxhash,
}

impl HashAlgo {
    /// All of them, those that other languages can compute by a standard first.
    pub const ALL: [Self; 4] = [Self::Sha256Cbor, Self::XxhashCbor, Self::Sha256, Self::Xxhash];

    /// The name that the engine's flag, its `vllm:cache_config_info`, the rule's field and the metrics use.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Sha256Cbor => "sha256_cbor",
            Self::XxhashCbor => "xxhash_cbor",
            Self::Sha256 => "sha256",
            Self::Xxhash => "xxhash",
        }
    }
}

impl fmt::Display for HashAlgo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

impl FromStr for HashAlgo {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|algo| algo.label() == text).ok_or(())
    }
}

/// What the engine's `PYTHONHASHSEED` is: the text that `NONE_HASH`, the first block's parent, is made of.
///
/// It is text: `"0"`, `"00"` and `""` give different parents.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NoneSeed {
    /// Set to this text.
    Text(String),
    /// Not set. vLLM 0.29 and later then use the fixed text `vllm-none-hash` for the sha256 variants; older ones, and
    /// the xxhash variants always, use random bytes that nobody outside the engine can know.
    Unset,
}

/// How extra keys look inside a block's hash input.
///
/// Source: vLLM 0.31.0 began to tag them (`["cache_salt", salt]`); events show the untagged form in every version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum KeyEra {
    /// Before vLLM 0.31: the bare value.
    Untagged,
    /// From vLLM 0.31: each key is an array that begins with its kind.
    #[default]
    Tagged,
}

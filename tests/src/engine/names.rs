//! How the engine names its blocks: written out by hand here, so that a mistake in kvlb's naming cannot hide behind its twin.
//!
//! `digest = H(ENC((parent digest, tokens, extra keys)))` for every full block, the first parent being `NONE_HASH`; the name on the
//! wire is the last 8 bytes of the digest. Held by the vectors of the real engine in `tests/golden/vllm-0.32.0/`.

use std::fmt;

use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use super::chance::Chance;

/// vLLM's `--prefix-caching-hash-algo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Algorithm {
    /// SHA-256 over canonical CBOR.
    #[value(name = "sha256_cbor")]
    Sha256Cbor,
    /// XXH3-128 over canonical CBOR.
    #[value(name = "xxhash_cbor")]
    XxhashCbor,
    /// SHA-256 over Python's pickle (protocol 5): vLLM's default.
    #[value(name = "sha256")]
    Sha256,
    /// XXH3-128 over Python's pickle (protocol 5).
    #[value(name = "xxhash")]
    Xxhash,
}

impl Algorithm {
    /// The word vLLM uses, as in the label of `vllm:cache_config_info`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Sha256Cbor => "sha256_cbor",
            Self::XxhashCbor => "xxhash_cbor",
            Self::Sha256 => "sha256",
            Self::Xxhash => "xxhash",
        }
    }

    fn is_cbor(self) -> bool {
        matches!(self, Self::Sha256Cbor | Self::XxhashCbor)
    }

    fn is_sha256(self) -> bool {
        matches!(self, Self::Sha256Cbor | Self::Sha256)
    }

    fn digest(self, input: &[u8]) -> Digest {
        if self.is_sha256() {
            Digest::from_slice(&Sha256::digest(input))
        } else {
            Digest::from_slice(&xxh3_128(input).to_be_bytes())
        }
    }
}

/// A block's full digest: 32 bytes for SHA-256, 16 for XXH3-128.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest {
    bytes: [u8; 32],
    len: u8,
}

impl Digest {
    /// At most 32 bytes; anything longer is cut.
    pub fn from_slice(bytes: &[u8]) -> Self {
        let len = bytes.len().min(32);
        let mut digest = Self { bytes: [0; 32], len: u8::try_from(len).unwrap_or(32) };
        digest.bytes[..len].copy_from_slice(&bytes[..len]);
        digest
    }

    /// The digest's own bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The name on the wire: the last 8 bytes, big-endian.
    pub fn name(&self) -> u64 {
        self.as_slice().iter().rev().take(8).rev().fold(0, |name, byte| (name << 8) | u64::from(*byte))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// One extra key of a block, in the order vLLM hashes them: adapter, then salt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Extra {
    /// A `LoRA` adapter; which of these is hashed depends on the era, see [`KeyForm`].
    Lora {
        /// Its number in the engine, from 1.
        id: u32,
        /// The adapter's served name.
        name: String,
        /// Where the server has it; `root` in `/v1/models`.
        path: String,
    },
    /// The request's `cache_salt`; in block 0 only.
    Salt(String),
}

/// What an extra key looks like inside the hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyForm {
    /// An adapter is its number; everything else bare (vLLM before 0.11.1).
    Numbered,
    /// An adapter is its name; everything bare (0.11.1 to 0.30).
    Named,
    /// `["lora", name, path]`, `["cache_salt", salt]` (since 0.31).
    Tagged,
}

impl From<bool> for KeyForm {
    /// Tagged or, of the older forms, the later one.
    fn from(tagged: bool) -> Self {
        if tagged { Self::Tagged } else { Self::Named }
    }
}

/// One way of naming: what an engine's command line and environment fix for its life.
#[derive(Debug, Clone)]
pub struct Naming {
    algorithm: Algorithm,
    block_size: usize,
    form: KeyForm,
    none_hash: Digest,
}

impl Naming {
    /// `seed` is the text of `PYTHONHASHSEED`; `fixed_default` says that an unset seed means the text `vllm-none-hash` for SHA-256
    /// (vLLM ≥ 0.29); otherwise an unset seed means bytes from `chance`. `form` is the form of extra keys; `true` is tagged (vLLM ≥ 0.31).
    pub fn new(
        algorithm: Algorithm,
        block_size: usize,
        seed: Option<&str>,
        form: impl Into<KeyForm>,
        fixed_default: bool,
        chance_seed: u64,
    ) -> Self {
        let default = (fixed_default && algorithm.is_sha256()).then_some("vllm-none-hash");
        let none_hash = match seed.or(default) {
            Some(text) => none_hash(algorithm, text),
            None => random_none_hash(algorithm, fixed_default, chance_seed),
        };
        Self { algorithm, block_size, form: form.into(), none_hash }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The first block's parent.
    pub fn none_hash(&self) -> Digest {
        self.none_hash
    }

    /// The digest of one full block after `parent`.
    pub fn block(&self, parent: Option<&Digest>, tokens: &[u32], extras: &[Extra]) -> Digest {
        let parent = parent.unwrap_or(&self.none_hash);
        self.algorithm.digest(&self.input(parent, tokens, extras))
    }

    /// The bytes that are hashed for one block.
    fn input(&self, parent: &Digest, tokens: &[u32], extras: &[Extra]) -> Vec<u8> {
        if self.algorithm.is_cbor() {
            cbor_input(parent, tokens, extras, self.form)
        } else {
            pickle_input(parent, tokens, extras, self.form)
        }
    }
}

/// `NONE_HASH` of a seed text.
fn none_hash(algorithm: Algorithm, seed: &str) -> Digest {
    let mut input = Vec::new();
    if algorithm.is_cbor() {
        cbor_text(&mut input, seed);
    } else {
        let mut body = Vec::new();
        pickle_text(&mut body, seed);
        pickle_frame(&mut input, &body);
    }
    algorithm.digest(&input)
}

/// 32 random bytes; 16 for xxhash since the fixed default came (vLLM 0.29; before, xxhash had 32 as well).
fn random_none_hash(algorithm: Algorithm, fixed_default: bool, chance_seed: u64) -> Digest {
    let mut chance = Chance::new(chance_seed);
    let bytes: Vec<u8> = (0..4).flat_map(|_| chance.next().to_be_bytes()).collect();
    let len = if fixed_default && !algorithm.is_sha256() { 16 } else { 32 };
    Digest::from_slice(&bytes[..len])
}

// --- canonical CBOR: heads in their shortest form, definite lengths ---

fn cbor_head(out: &mut Vec<u8>, major: u8, value: u32) {
    let major = major << 5;
    let [_, _, high, low] = value.to_be_bytes();
    match value {
        0..=23 => out.push(major | low),
        24..=0xff => out.extend([major | 0x18, low]),
        0x100..=0xffff => out.extend([major | 0x19, high, low]),
        _ => {
            out.push(major | 0x1a);
            out.extend(value.to_be_bytes());
        }
    }
}

fn cbor_len(out: &mut Vec<u8>, major: u8, len: usize) {
    cbor_head(out, major, u32::try_from(len).unwrap_or(u32::MAX));
}

fn cbor_text(out: &mut Vec<u8>, text: &str) {
    cbor_len(out, 3, text.len());
    out.extend_from_slice(text.as_bytes());
}

fn cbor_input(parent: &Digest, tokens: &[u32], extras: &[Extra], form: KeyForm) -> Vec<u8> {
    let mut out = Vec::with_capacity(48 + tokens.len() * 5);
    cbor_len(&mut out, 4, 3);
    cbor_len(&mut out, 2, parent.as_slice().len());
    out.extend_from_slice(parent.as_slice());
    cbor_len(&mut out, 4, tokens.len());
    for token in tokens {
        cbor_head(&mut out, 0, *token);
    }
    if extras.is_empty() {
        out.push(0xf6);
        return out;
    }
    cbor_len(&mut out, 4, extras.len());
    for extra in extras {
        let words = extra_words(extra, form);
        if form == KeyForm::Tagged {
            cbor_len(&mut out, 4, words.len());
        }
        for word in words {
            match word {
                Word::Number(number) => cbor_head(&mut out, 0, number),
                Word::Text(text) => cbor_text(&mut out, text),
            }
        }
    }
    out
}

/// A part of an extra key.
enum Word<'e> {
    Number(u32),
    Text(&'e str),
}

fn extra_words(extra: &Extra, form: KeyForm) -> Vec<Word<'_>> {
    match (extra, form) {
        (Extra::Lora { name, path, .. }, KeyForm::Tagged) => {
            vec![Word::Text("lora"), Word::Text(name), Word::Text(path)]
        }
        (Extra::Lora { name, .. }, KeyForm::Named) => vec![Word::Text(name)],
        (Extra::Lora { id, .. }, KeyForm::Numbered) => vec![Word::Number(*id)],
        (Extra::Salt(salt), KeyForm::Tagged) => vec![Word::Text("cache_salt"), Word::Text(salt)],
        (Extra::Salt(salt), _) => vec![Word::Text(salt)],
    }
}

// --- pickle protocol 5, as CPython's C pickler writes tuples of bytes, ints and text ---

const MEMOIZE: u8 = 0x94;

fn pickle_frame(out: &mut Vec<u8>, body: &[u8]) {
    out.extend([0x80, 5, 0x95]);
    let len = u64::try_from(body.len() + 1).unwrap_or(u64::MAX);
    out.extend(len.to_le_bytes());
    out.extend_from_slice(body);
    out.push(b'.');
}

fn pickle_text(out: &mut Vec<u8>, text: &str) {
    if let Ok(len) = u8::try_from(text.len()) {
        out.extend([0x8c, len]);
    } else {
        out.push(b'X');
        out.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
    }
    out.extend_from_slice(text.as_bytes());
    out.push(MEMOIZE);
}

fn pickle_int(out: &mut Vec<u8>, value: u32) {
    let [a, b, c, d] = value.to_le_bytes();
    match value {
        0..=0xff => out.extend([b'K', a]),
        0x100..=0xffff => out.extend([b'M', a, b]),
        0x1_0000..=0x7fff_ffff => out.extend([b'J', a, b, c, d]),
        // Above the signed 32-bit range CPython writes LONG1 with a sign byte.
        _ => out.extend([0x8a, 5, a, b, c, d, 0]),
    }
}

/// A tuple: short ones have their own opcodes and no mark.
fn pickle_tuple(out: &mut Vec<u8>, len: usize, items: impl FnOnce(&mut Vec<u8>)) {
    let short = match len {
        0 => return out.push(b')'),
        1 => Some(0x85),
        2 => Some(0x86),
        3 => Some(0x87),
        _ => None,
    };
    if short.is_none() {
        out.push(b'(');
    }
    items(out);
    out.push(short.unwrap_or(b't'));
    out.push(MEMOIZE);
}

fn pickle_input(parent: &Digest, tokens: &[u32], extras: &[Extra], form: KeyForm) -> Vec<u8> {
    let mut body = Vec::with_capacity(64 + tokens.len() * 5);
    pickle_tuple(&mut body, 3, |out| {
        out.extend([b'C', parent.len]);
        out.extend_from_slice(parent.as_slice());
        out.push(MEMOIZE);
        pickle_tuple(out, tokens.len(), |out| tokens.iter().for_each(|token| pickle_int(out, *token)));
        if extras.is_empty() {
            out.push(b'N');
        } else {
            pickle_tuple(out, extras.len(), |out| extras.iter().for_each(|extra| pickle_extra(out, extra, form)));
        }
    });
    let mut out = Vec::with_capacity(body.len() + 16);
    pickle_frame(&mut out, &body);
    out
}

fn pickle_extra(out: &mut Vec<u8>, extra: &Extra, form: KeyForm) {
    let words = extra_words(extra, form);
    if form == KeyForm::Tagged {
        pickle_tuple(out, words.len(), |out| words.iter().for_each(|word| pickle_word(out, word)));
    } else {
        for word in &words {
            pickle_word(out, word);
        }
    }
}

fn pickle_word(out: &mut Vec<u8>, word: &Word<'_>) {
    match word {
        Word::Number(number) => pickle_int(out, *number),
        Word::Text(text) => pickle_text(out, text),
    }
}

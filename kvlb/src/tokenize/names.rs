//! From a prompt straight to the names of its blocks, with a memory of what earlier prompts began with.
//!
//! A text is cut where that is known to change no token. What comes of each part is kept under a key over everything
//! before its end: the tokenizer, the key spaces, the extra keys and all parts up to it. A conversation's next turn then
//! costs its new text only. The names are those of the whole prompt, tokenised and hashed without any memory.

use std::hash::Hash as _;
use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

use super::outline::Shape;
use super::{Limits, Miss, Tokenizer};
use crate::contract::{BlockHash, Chain, Extra, HashError, KeySpace, TokenId};
use crate::openai::{Input, TokenOptions};

/// Bytes of extra keys with which nothing is kept: salts come from clients, and every one has a memory of its own.
const EXTRA_BYTES_MAX: usize = 1 << 10;

/// Where the names of earlier prompts are kept, and the outlines of chats. Shared by threads, bounded, and free to forget.
pub trait Memory: Sync {
    /// A number that nobody outside knows, the same for ever: keys must not be made to collide.
    fn seed(&self) -> u64;
    /// What was kept under `key`.
    fn recall(&self, key: u128) -> Option<Arc<Link>>;
    /// Keeps `link` under `key`.
    fn keep(&self, key: u128, link: Arc<Link>);
    /// What was kept of chats of one shape.
    fn shape(&self, key: u128) -> Option<Arc<Shape>>;
    /// Keeps what is known of a shape, in the place of what was known.
    fn keep_shape(&self, key: u128, shape: Arc<Shape>);
}

/// How the names of a prompt are made.
#[derive(Clone, Copy)]
pub struct Naming<'a> {
    /// The key spaces to name in, each with what else enters the names there.
    pub spaces: &'a [(KeySpace, Extra)],
    /// What earlier prompts have left.
    pub memory: &'a dyn Memory,
}

impl std::fmt::Debug for Naming<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Naming").field("spaces", &self.spaces).finish_non_exhaustive()
    }
}

/// The names of one prompt's blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// The prompt's tokens, at most [`Limits::max_tokens`].
    pub tokens: usize,
    /// The names of its full blocks in each key space, in prompt order.
    pub names: Vec<Vec<BlockHash>>,
    /// Bytes of text that had to be tokenised: what the memory did not know.
    pub new_bytes: usize,
}

/// Why a prompt has no names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It has no tokens.
    #[error("no tokens: {}", .0.detail())]
    Tokens(Miss),
    /// Its extra keys have no encoding.
    #[error(transparent)]
    Hash(#[from] HashError),
}

impl From<Miss> for NameError {
    fn from(miss: Miss) -> Self {
        Self::Tokens(miss)
    }
}

/// What comes of one part of a prompt: the names that it completes, and the chain after it.
#[derive(Debug)]
pub struct Link {
    tokens: usize,
    spaces: Box<[InSpace]>,
}

/// A part in one key space.
#[derive(Debug)]
struct InSpace {
    names: Box<[BlockHash]>,
    chain: Chain,
}

impl Link {
    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> usize {
        let space = |space: &InSpace| {
            let inside = space.chain.bytes() - size_of::<Chain>() + size_of_val(&*space.names);
            inside + size_of::<InSpace>()
        };
        size_of::<Self>() + self.spaces.iter().map(space).sum::<usize>()
    }

    /// The start of every prompt in `spaces`, whose first tokens are `tokens`.
    fn first(spaces: &[(KeySpace, Extra)], tokens: &[TokenId]) -> Result<Self, HashError> {
        let chains = spaces.iter().map(|(space, extra)| space.begin(extra)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self::extended(chains.into_iter(), tokens))
    }

    /// What comes after this link with `tokens`.
    fn next(&self, tokens: &[TokenId]) -> Self {
        Self::extended(self.spaces.iter().map(|space| space.chain.clone()), tokens)
    }

    fn extended(chains: impl Iterator<Item = Chain>, tokens: &[TokenId]) -> Self {
        let space = |mut chain: Chain| {
            let size = chain.key_space().block_size().tokens();
            let mut names = Vec::with_capacity((chain.tokens() % size + tokens.len()) / size);
            chain.extend(tokens, &mut names);
            chain.shrink();
            InSpace { names: names.into_boxed_slice(), chain }
        };
        Self { tokens: tokens.len(), spaces: chains.map(space).collect() }
    }
}

impl Names {
    /// The names of the blocks of `tokens`.
    ///
    /// # Errors
    /// [`HashError`] where extra keys have no encoding.
    pub fn of_tokens(tokens: &[TokenId], spaces: &[(KeySpace, Extra)]) -> Result<Self, HashError> {
        let mut names = Self::default();
        for (space, extra) in spaces {
            let mut of_space = Vec::with_capacity(tokens.len() / space.block_size().tokens());
            space.begin(extra)?.extend(tokens, &mut of_space);
            names.names.push(of_space);
        }
        names.tokens = tokens.len();
        Ok(names)
    }

    fn add(&mut self, link: &Link) {
        self.tokens += link.tokens;
        for (names, space) in self.names.iter_mut().zip(&link.spaces) {
            names.extend_from_slice(&space.names);
        }
    }

    /// Keeps the names of the first `max_tokens` tokens.
    fn truncated(mut self, max_tokens: usize, spaces: &[(KeySpace, Extra)]) -> Self {
        self.tokens = self.tokens.min(max_tokens);
        for (names, (space, _)) in self.names.iter_mut().zip(spaces) {
            names.truncate(self.tokens / space.block_size().tokens());
        }
        self
    }
}

impl Tokenizer {
    /// The names of the blocks of `input` in each key space: those of its [`tokens`](Self::tokens).
    ///
    /// # Errors
    /// [`NameError`] where it has no tokens or no names, or where making them is more work than allowed.
    pub fn names(
        &self,
        input: &Input,
        options: &TokenOptions,
        limits: &Limits,
        naming: Naming<'_>,
    ) -> Result<Names, NameError> {
        match self.whole_text(input, options, limits, naming.memory)? {
            Some((text, special)) => self.names_of_text(&text, special, limits.max_tokens, naming),
            None => Ok(Names::of_tokens(&self.tokens(input, options, limits)?, naming.spaces)?),
        }
    }

    /// The names of the blocks of `text`, all of whose tokens count, with special tokens around it if `special`.
    fn names_of_text(
        &self,
        text: &str,
        special: bool,
        max_tokens: usize,
        naming: Naming<'_>,
    ) -> Result<Names, NameError> {
        let none = super::encoder::Around::default();
        let extra_bytes: usize = naming.spaces.iter().map(|(_, extra)| bytes_of(extra)).sum();
        let around = match self.encoder.around() {
            _ if extra_bytes > EXTRA_BYTES_MAX => None,
            around if special => around,
            _ => Some(&none),
        };
        let Some(around) = around else {
            let mut tokens = self.encoder.ids(text, special)?;
            tokens.truncate(max_tokens);
            return Ok(Names { new_bytes: text.len(), ..Names::of_tokens(&tokens, naming.spaces)? });
        };
        let memory = naming.memory;
        let mut key = self.first_key(special, naming);
        let mut link = if let Some(link) = memory.recall(key) {
            link
        } else {
            let link = Arc::new(Link::first(naming.spaces, &around.before)?);
            memory.keep(key, Arc::clone(&link));
            link
        };
        let mut names = Names { names: vec![Vec::new(); naming.spaces.len()], ..Names::default() };
        names.add(&link);
        for part in self.encoder.cuts().parts(text) {
            if names.tokens >= max_tokens {
                break;
            }
            key = next_key(key, part, memory.seed());
            link = if let Some(known) = memory.recall(key) {
                known
            } else {
                let new = Arc::new(link.next(&self.encoder.ids(part, false)?));
                names.new_bytes += part.len();
                memory.keep(key, Arc::clone(&new));
                new
            };
            names.add(&link);
        }
        if !around.after.is_empty() {
            names.add(&link.next(&around.after));
        }
        if names.tokens == 0 {
            return Err(Miss::NoTokens.into());
        }
        Ok(names.truncated(max_tokens, naming.spaces))
    }

    /// The key of every prompt's start in these key spaces.
    fn first_key(&self, special: bool, naming: Naming<'_>) -> u128 {
        let mut key = Xxh3::with_seed(naming.memory.seed());
        key.update(&self.encoder.fingerprint().to_le_bytes());
        key.update(&[u8::from(special)]);
        naming.spaces.hash(&mut key);
        key.digest128()
    }
}

/// The key after `part`, which comes after `key`.
fn next_key(key: u128, part: &str, seed: u64) -> u128 {
    let mut both = [0; 32];
    both[..16].copy_from_slice(&key.to_le_bytes());
    both[16..].copy_from_slice(&xxh3_128_with_seed(part.as_bytes(), seed).to_le_bytes());
    xxh3_128_with_seed(&both, seed)
}

fn bytes_of(extra: &Extra) -> usize {
    let lora = extra.lora.as_ref().map_or(0, |lora| lora.name.len() + lora.path.as_ref().map_or(0, String::len));
    extra.cache_salt.as_ref().map_or(0, String::len) + lora
}

//! What else than tokens enters a block's name: the extra keys.

use ciborium::Value;

use super::chain::HashError;
use super::{KeyEra, TokenId};

/// What a request adds to the names of its blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Extra {
    /// The request's `cache_salt`. Enters the first block only; an empty one counts as absent.
    pub cache_salt: Option<String>,
    /// The adapter that the request asks for. Enters every block.
    pub lora: Option<Lora>,
}

/// A LoRA adapter as it enters block names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lora {
    /// Its name: the model that the request asks for.
    pub name: String,
    /// Where the engine has it (`root` in `/v1/models`); from 0.31 part of the name.
    pub path: Option<String>,
    /// Its number in an engine that hashes that instead of its name: vLLM before 0.11.1.
    pub number: Option<i64>,
}

impl Extra {
    /// The extra keys of every block but the first.
    pub(super) fn every_block(&self) -> Vec<ExtraKey> {
        let key = |lora: &Lora| match lora.number {
            Some(number) => ExtraKey::LoraId(number),
            None => ExtraKey::Lora { name: lora.name.clone(), path: lora.path.clone() },
        };
        self.lora.as_ref().map(key).into_iter().collect()
    }

    /// The extra keys of a prompt's first block.
    pub(super) fn first_block(&self) -> Vec<ExtraKey> {
        let salt = self.cache_salt.as_deref().filter(|salt| !salt.is_empty());
        let mut keys = self.every_block();
        keys.extend(salt.map(|salt| ExtraKey::CacheSalt(salt.to_owned())));
        keys
    }
}

/// One extra key of one block.
///
/// Source: vLLM's `generate_block_hash_extra_keys`; held by `tests/golden/vllm-*/extra.json.gz`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExtraKey {
    /// A LoRA adapter: its name and, from 0.31, the path it was loaded from on the engine's machine.
    Lora {
        /// The adapter's name, as in `/v1/models`.
        name: String,
        /// Its `root` in `/v1/models`. Events do not show it.
        path: Option<String>,
    },
    /// A LoRA adapter by number: vLLM before 0.11.1.
    LoraId(i64),
    /// A multimodal item that covers part of the block.
    Mm {
        /// The item's content hash.
        id: String,
        /// Where the item begins, in tokens from the block's start, negative when before it. Absent before 0.19.
        offset: Option<i64>,
    },
    /// The request's `cache_salt`. Also stands for any bare text of an event: before 0.31 all of them look alike.
    CacheSalt(String),
    /// A digest of the prompt embeddings of the block.
    PromptEmbeds(Vec<u8>),
    /// Something that this version does not know; a block with it cannot be named.
    Unknown,
}

impl ExtraKey {
    /// The key as the engine hashes it.
    ///
    /// # Errors
    /// [`HashError::Extra`] when the key lacks what its era needs.
    fn value(&self, era: KeyEra) -> Result<Value, HashError> {
        let text = |text: &str| Value::Text(text.to_owned());
        let tagged = |tag: &str, rest: Vec<Value>| Value::Array(std::iter::once(text(tag)).chain(rest).collect());
        let value = match (self, era) {
            (Self::Lora { name, .. }, KeyEra::Untagged) => text(name),
            (Self::Lora { name, path: Some(path) }, KeyEra::Tagged) => tagged("lora", vec![text(name), text(path)]),
            (Self::LoraId(id), KeyEra::Untagged) => Value::Integer((*id).into()),
            (Self::Mm { id, offset: None }, KeyEra::Untagged) => text(id),
            (Self::Mm { id, offset: Some(offset) }, KeyEra::Untagged) => {
                Value::Array(vec![text(id), Value::Integer((*offset).into())])
            }
            (Self::Mm { id, offset: Some(offset) }, KeyEra::Tagged) => {
                tagged("mm", vec![text(id), Value::Integer((*offset).into())])
            }
            (Self::CacheSalt(salt), KeyEra::Untagged) => text(salt),
            (Self::CacheSalt(salt), KeyEra::Tagged) => tagged("cache_salt", vec![text(salt)]),
            (Self::PromptEmbeds(digest), KeyEra::Untagged) => Value::Bytes(digest.clone()),
            (Self::PromptEmbeds(digest), KeyEra::Tagged) => tagged("prompt_embeds", vec![Value::Bytes(digest.clone())]),
            (Self::Lora { .. }, KeyEra::Tagged) => return Err(HashError::Extra("a LoRA adapter without its path")),
            (Self::LoraId(_), KeyEra::Tagged) => return Err(HashError::Extra("a LoRA adapter by number")),
            (Self::Mm { .. }, KeyEra::Tagged) => return Err(HashError::Extra("a multimodal item without its offset")),
            (Self::Unknown, _) => return Err(HashError::Extra("a key of an unknown kind")),
        };
        Ok(value)
    }
}

/// Everything but parent and tokens that enters one block's name.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockExtra<'a> {
    /// The block's extra keys, in the engine's order.
    pub keys: &'a [ExtraKey],
    /// The tokens after the block that a speculative drafter makes part of its name (vLLM 0.33, opt-in).
    pub lookahead: &'a [TokenId],
}

impl BlockExtra<'_> {
    /// The third element of the block's hash input, or nothing where the engine writes null.
    ///
    /// # Errors
    /// [`HashError::Extra`] as for [`ExtraKey::value`].
    pub(super) fn value(&self, era: KeyEra) -> Result<Option<Value>, HashError> {
        let keys = self.keys.iter().map(|key| key.value(era)).collect::<Result<Vec<_>, _>>()?;
        let keys = (!keys.is_empty()).then_some(Value::Array(keys));
        if self.lookahead.is_empty() {
            return Ok(keys);
        }
        let tokens = self.lookahead.iter().map(|token| Value::Integer(token.0.into()));
        Ok(Some(Value::Array(std::iter::once(keys.unwrap_or(Value::Null)).chain(tokens).collect())))
    }
}

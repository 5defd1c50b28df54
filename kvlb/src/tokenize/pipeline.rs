//! From a model's files to a tokenizer that makes the engine's ids.

use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::class::{self, Class};
use super::config::{ModelConfig, TokenizerConfig};
use super::miss::Miss;
use super::template::SpecialTokens;
use super::{LoadError, Rebuild};

/// A tokenizer, and why it cannot be trusted, if so.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) tokenizer: Tokenizer,
    pub(super) special: SpecialTokens,
    pub(super) doubt: Option<Miss>,
}

/// Builds the tokenizer as the engine does.
///
/// # Errors
/// [`LoadError`] when `tokenizer.json` is none.
pub(super) fn build(
    file: &[u8],
    config: Option<&TokenizerConfig>,
    model: &ModelConfig,
    rebuild: Rebuild,
) -> Result<Pipeline, LoadError> {
    let class = if rebuild == Rebuild::Never { Class::File } else { class::resolve(config, model) };
    let empty = TokenizerConfig::default();
    let config = config.unwrap_or(&empty);
    let (tokenizer, special, doubt) = match class {
        Class::File => (as_file(file, config)?, config.special_tokens(&[]), None),
        Class::Unknown => (as_file(file, config)?, config.special_tokens(&[]), Some(Miss::TokenizerClass)),
        Class::Rebuilt(class) => as_class(file, config, class, false)?,
        Class::PerhapsRebuilt(class) => as_class(file, config, class, true)?,
    };
    Ok(Pipeline { tokenizer, special, doubt })
}

type Built = (Tokenizer, SpecialTokens, Option<Miss>);

fn as_file(file: &[u8], config: &TokenizerConfig) -> Result<Tokenizer, LoadError> {
    let mut tokenizer = Tokenizer::from_bytes(file).map_err(LoadError::Tokenizer)?;
    add_tokens(&mut tokenizer, config_tokens(config), config, &config.special_tokens(&[]))?;
    settle(tokenizer, config)
}

fn as_class(file: &[u8], config: &TokenizerConfig, rebuilt: class::Rebuilt, perhaps: bool) -> Result<Built, LoadError> {
    let mut parsed: Value = serde_json::from_slice(file).map_err(|error| LoadError::Tokenizer(error.into()))?;
    let special = config.special_tokens(rebuilt.default_tokens());
    let tokens = if config.added_tokens_decoder.is_some() { config_tokens(config) } else { file_tokens(&parsed) };
    let Some(same) = rebuilt.rebuild(&mut parsed, config) else {
        return Ok((as_file(file, config)?, special, Some(Miss::TokenizerClass)));
    };
    let doubt = (perhaps && !same).then_some(Miss::TokenizerClass);
    let mut tokenizer: Tokenizer =
        serde_json::from_value(parsed).map_err(|error| LoadError::Tokenizer(error.into()))?;
    add_tokens(&mut tokenizer, tokens, config, &special)?;
    Ok((settle(tokenizer, config)?, special, doubt))
}

fn settle(mut tokenizer: Tokenizer, config: &TokenizerConfig) -> Result<Tokenizer, LoadError> {
    tokenizer.with_truncation(None).map_err(LoadError::Tokenizer)?;
    tokenizer.with_padding(None);
    tokenizer.set_encode_special_tokens(config.split_special_tokens.unwrap_or(false));
    Ok(tokenizer)
}

/// The added tokens of `tokenizer_config.json`, by id.
fn config_tokens(config: &TokenizerConfig) -> Vec<AddedToken> {
    let listed = config.added_tokens_decoder.iter().flatten();
    by_id(listed.filter_map(|(id, token)| Some((id.parse().ok()?, added_token(token)?))).collect())
}

/// The added tokens of `tokenizer.json`, by id.
fn file_tokens(file: &Value) -> Vec<AddedToken> {
    let listed = file.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    by_id(listed.filter_map(|token| Some((token.get("id")?.as_u64()?, added_token(token)?))).collect())
}

fn by_id(mut tokens: Vec<(u64, AddedToken)>) -> Vec<AddedToken> {
    tokens.sort_by_key(|(id, _)| *id);
    tokens.into_iter().map(|(_, token)| token).collect()
}

fn added_token(value: &Value) -> Option<AddedToken> {
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let special = flag("special").unwrap_or(false);
    Some(AddedToken {
        content: value.get("content")?.as_str()?.to_owned(),
        single_word: flag("single_word").unwrap_or(false),
        lstrip: flag("lstrip").unwrap_or(false),
        rstrip: flag("rstrip").unwrap_or(false),
        normalized: flag("normalized").unwrap_or(!special),
        special,
    })
}

/// Adds what the tokenizer does not have yet: the listed tokens, then the special ones with and without a name.
///
/// Source: transformers 5.19, the end of `TokenizersBackend.__init__`.
fn add_tokens(
    tokenizer: &mut Tokenizer,
    listed: Vec<AddedToken>,
    config: &TokenizerConfig,
    special: &SpecialTokens,
) -> Result<(), LoadError> {
    let present: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
    let mut adding: Vec<AddedToken> = listed.into_iter().filter(|token| !present.contains(token)).collect();
    let named: Vec<&str> = special.named.iter().map(|(_, token)| token.as_str()).collect();
    let nameless = config.nameless_special_tokens();
    for token in named.iter().copied().chain(nameless.iter().map(String::as_str)) {
        if !present.iter().chain(&adding).any(|known| known.content == token) {
            adding.push(AddedToken::from(token, true));
        }
    }
    for token in &mut adding {
        token.special |= named.contains(&token.content.as_str());
    }
    tokenizer.add_tokens(adding).map_err(LoadError::Tokenizer)?;
    Ok(())
}

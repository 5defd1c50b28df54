//! A prompt becomes token ids, exactly as the engine makes them: the chat template, then the model's tokenizer.
//!
//! Owns what a model's staged files mean, from `tokenizer.json` to the chat template, in the way of vLLM 0.32 with
//! transformers 5. It never reads a file, a clock or the environment: files come as bytes, the time as a value. Where
//! the engine's ids are not known for certain the answer is a [`Miss`], never other ids.

mod class;
mod config;
mod conversation;
mod cuts;
mod date;
mod encoder;
mod fast;
mod habits;
mod harmony;
mod miss;
mod names;
mod outline;
mod pipeline;
mod python;
mod slug;
mod syntax;
mod template;
mod trial;
mod value;

pub use date::WallTime;
pub use miss::Miss;
pub use names::{Link, Memory, NameError, Names, Naming};
pub use outline::Shape;
pub use slug::ModelSlug;

use std::borrow::Cow;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use config::{ModelConfig, TokenizerConfig};
use encoder::Encoder;
use habits::{Habits, Shown};
use harmony::Harmony;
use template::{SpecialTokens, Template};

use crate::contract::TokenId;
use crate::openai::{Api, Chat, Input, Side, TokenOptions, Truncate};

/// Tokens of one prompt that are named when the model's length is not known.
///
/// Source: the longest context that models of 2026 commonly serve.
pub const DEFAULT_MAX_TOKENS: usize = 262_144;

/// Text of more bytes than this per token that would be named is not tokenized at all. Prose takes 4 to 5 bytes a
/// token, so such a text is many times longer than the model, which refuses it.
const MAX_BYTES_PER_TOKEN: usize = 16;

/// The staged files of one model, read by whoever holds the staging directory.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// `tokenizer.json`.
    pub tokenizer_json: Vec<u8>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Vec<u8>>,
    /// `chat_template.jinja`, which wins over the template in `tokenizer_config.json`.
    pub chat_template: Option<String>,
    /// `config.json` of the model.
    pub config: Option<Vec<u8>>,
}

impl Files {
    /// A number that differs where the ids of some text do.
    fn fingerprint(&self, rebuild: Rebuild) -> u128 {
        let mut all = Xxh3::new();
        for file in [Some(&self.tokenizer_json), self.tokenizer_config.as_ref(), self.config.as_ref()] {
            let file = file.map_or(&[][..], Vec::as_slice);
            all.update(&(file.len() as u64).to_le_bytes());
            all.update(file);
        }
        all.update(&[u8::from(rebuild == Rebuild::Never)]);
        all.digest128()
    }
}

/// What is to be known of the engine besides its model's files.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineOptions {
    /// Whether some tokenizer classes replace the pipeline of `tokenizer.json`.
    pub rebuild: Rebuild,
    /// Whether the engine renders templates that requests bring along (`--trust-request-chat-template`).
    pub trust_request_template: bool,
}

/// Whether some tokenizer classes replace the pipeline of `tokenizer.json` by their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rebuild {
    /// As transformers 5 does, with which vLLM 0.32 runs.
    #[default]
    Transformers5,
    /// Never: engines on transformers 4, and those that only take `tokenizer.json`.
    Never,
}

/// Bounds and circumstances of one conversion.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// At most this many ids are made, from the prompt's start. At least one.
    pub max_tokens: usize,
    /// The engine's `max_model_len`, where known.
    pub max_model_len: Option<usize>,
    /// The time at the engine, for templates that write it.
    pub now: Option<WallTime>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_tokens: DEFAULT_MAX_TOKENS, max_model_len: None, now: None }
    }
}

/// Why a model's files make no tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// `tokenizer.json` is not a tokenizer.
    #[error("tokenizer.json is not a tokenizer")]
    Tokenizer(#[source] tokenizers::Error),
    /// `tokenizer_config.json` cannot be read.
    #[error("tokenizer_config.json is not understood")]
    TokenizerConfig(#[source] serde_json::Error),
    /// `config.json` cannot be read.
    #[error("config.json is not understood")]
    Config(#[source] serde_json::Error),
}

/// A model's tokenizer and chat templates. Cheap to copy.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    special: SpecialTokens,
    templates: Arc<Vec<(String, Result<Template, Broken>)>>,
    harmony: Option<Harmony>,
    habits: Habits,
    text_doubt: Option<Miss>,
    chat_doubt: Option<Miss>,
    options: EngineOptions,
}

/// A template that does not compile, with the reason.
#[derive(Debug)]
struct Broken(String);

/// How far a tokenizer can be trusted, for the rule's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Why every text prompt is a miss, if so.
    pub text: Option<Miss>,
    /// Why every chat is a miss, if so.
    pub chat: Option<Miss>,
    /// What is wrong with the chat template, in words.
    pub template: Option<String>,
    /// What makes the tokens.
    pub backend: Backend,
    /// Whether there are places where texts may be cut: without them the start of a known prompt is tokenised again with
    /// every new end.
    pub cuts: bool,
    /// Whether the chat template cannot tell the texts of most chats apart: if it can, it runs for every chat.
    pub outlines: bool,
}

/// What makes the tokens of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The fast tokenizer, which made the same of every text of its trial as the reference.
    Fast,
    /// The reference, for this reason.
    Reference(String),
}

impl Tokenizer {
    /// Loads a model's files, with the reference to make tokens: [`quick`](Self::quick) makes it fast.
    ///
    /// Takes up to a second for the largest vocabularies. A chat template that does not compile is no error: it shows in
    /// the [`status`](Self::status), and chats are misses.
    ///
    /// # Errors
    /// [`LoadError`] when a file cannot be understood.
    pub fn load(files: &Files, options: EngineOptions) -> Result<Self, LoadError> {
        let config: Option<TokenizerConfig> = files
            .tokenizer_config
            .as_deref()
            .map(serde_json::from_slice)
            .transpose()
            .map_err(LoadError::TokenizerConfig)?;
        let model: ModelConfig = files
            .config
            .as_deref()
            .map(serde_json::from_slice)
            .transpose()
            .map_err(LoadError::Config)?
            .unwrap_or_default();
        let pipeline = pipeline::build(&files.tokenizer_json, config.as_ref(), &model, options.rebuild)?;
        let harmony = if model.is_harmony() { Harmony::new(&pipeline.tokenizer) } else { None };
        let chat_doubt = if model.is_harmony() && harmony.is_none() {
            Some(Miss::Harmony)
        } else if model.has_own_renderer() {
            Some(Miss::Renderer)
        } else {
            pipeline.doubt
        };
        let templates = templates(files, config.as_ref());
        let habits = if harmony.is_some() { Habits::HARMONY } else { habits(&templates, &pipeline.special) };
        Ok(Self {
            encoder: Encoder::new(pipeline.tokenizer, files.fingerprint(options.rebuild)),
            special: pipeline.special,
            templates: Arc::new(templates),
            harmony,
            habits,
            text_doubt: pipeline.doubt,
            chat_doubt,
            options,
        })
    }

    /// The same tokenizer with all that makes it fast: makes the same tokens of every text.
    ///
    /// Takes up to some seconds for the largest vocabularies, most of them to build the fast tokenizer and to try it
    /// against the reference. Where it is not the same the reference goes on to serve, and the [`status`](Self::status)
    /// says so.
    #[must_use]
    pub fn quick(&self) -> Self {
        Self { encoder: self.encoder.quick(), ..self.clone() }
    }

    /// How far this tokenizer can be trusted.
    pub fn status(&self) -> Status {
        let template = self.template_named("default").filter(|_| self.harmony.is_none());
        let template_doubt = if self.harmony.is_some() { None } else { self.usable_template(template).err() };
        Status {
            text: self.text_doubt,
            chat: self.chat_doubt.or(template_doubt),
            template: match template {
                Some(Err(Broken(reason))) => Some(reason.clone()),
                Some(Ok(template)) => template.doubt(&self.special).map(str::to_owned),
                None => None,
            },
            backend: self.encoder.backend().clone(),
            cuts: self.encoder.cuts().any(),
            outlines: matches!(template, Some(Ok(template)) if template.has_outlines()),
        }
    }

    /// Whether its tokens are made by the fast tokenizer.
    pub fn is_quick(&self) -> bool {
        *self.encoder.backend() == Backend::Fast
    }

    /// Whether chats cannot be rendered because no chat template was handed in.
    pub fn template_missing(&self) -> bool {
        self.harmony.is_none() && self.templates.is_empty()
    }

    /// The token ids of `input`, at most [`Limits::max_tokens`] of them from the start.
    ///
    /// # Errors
    /// [`Miss`] where the engine's ids are not known for certain, or where it would refuse the prompt.
    pub fn tokens(&self, input: &Input, options: &TokenOptions, limits: &Limits) -> Result<Vec<TokenId>, Miss> {
        let mut ids = match input {
            Input::Tokens(ids) => truncated_ids(ids.clone(), options, limits)?,
            Input::Text(text) => self.encode(text, true, options, limits)?,
            Input::Chat(chat) => self.chat(chat, options, limits)?,
        };
        if ids.is_empty() {
            return Err(Miss::NoTokens);
        }
        ids.truncate(limits.max_tokens);
        Ok(ids)
    }

    /// Whether the chat template does so much work that even small chats had better be rendered aside.
    pub fn is_heavy(&self) -> bool {
        self.templates.iter().any(|(_, template)| template.as_ref().is_ok_and(Template::is_heavy))
    }

    fn chat(&self, chat: &Chat, options: &TokenOptions, limits: &Limits) -> Result<Vec<TokenId>, Miss> {
        let Some(harmony) = &self.harmony else {
            return self.encode(&self.render(chat, limits)?, false, options, limits);
        };
        let prompt = harmony.render(&self.habits.show(chat)?, limits.now)?;
        let mut ids = Vec::new();
        for piece in prompt.pieces() {
            ids.extend(self.encode(piece, false, &TokenOptions::default(), limits)?);
        }
        let options = self.options_for(chat, options);
        Ok(cut(ids, keep(&options, limits)?, options.truncation_side))
    }

    /// The options that count for a chat. Where the engine makes the tokens without a template it heeds none, or, in the
    /// Responses API, only how many are kept.
    pub fn options_for(&self, chat: &Chat, options: &TokenOptions) -> TokenOptions {
        match (&self.harmony, chat.api) {
            (None, _) => *options,
            (Some(_), Api::Responses) => TokenOptions {
                add_special_tokens: Some(false),
                truncation_side: options.truncate.map(|_| Side::Left),
                ..*options
            },
            (Some(_), _) => TokenOptions::default(),
        }
    }

    /// The text of the prompt for `chat`, whose special tokens stand in it as text.
    ///
    /// Its tokens with [`options_for`](Self::options_for) the chat are those of [`tokens`](Self::tokens).
    ///
    /// # Errors
    /// [`Miss`] as for [`tokens`](Self::tokens), and [`Miss::Parts`] where only [`tokens`](Self::tokens) can answer.
    pub fn render(&self, chat: &Chat, limits: &Limits) -> Result<String, Miss> {
        self.render_with(chat, limits, None)
    }

    /// The same text as [`render`](Self::render) makes, sooner where `memory` knows chats of the same shape.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn render_with(&self, chat: &Chat, limits: &Limits, memory: Option<&dyn Memory>) -> Result<String, Miss> {
        if let Some(doubt) = self.chat_doubt {
            return Err(doubt);
        }
        if let Some(harmony) = &self.harmony {
            let prompt = harmony.render(&self.habits.show(chat)?, limits.now)?;
            return if prompt.cuts.is_empty() { Ok(prompt.text) } else { Err(Miss::Parts) };
        }
        if let Some(given) = &chat.template {
            return self.render_given(given, chat, limits);
        }
        let named = if chat.tools.is_some() { self.template_named("tool_use") } else { None };
        let template = self.usable_template(named.or_else(|| self.template_named("default")))?;
        template.render(&self.habits.show(chat)?, &self.special, limits.now, memory)
    }

    /// Renders with a template that the request brings along, or names.
    fn render_given(&self, given: &str, chat: &Chat, limits: &Limits) -> Result<String, Miss> {
        if !self.options.trust_request_template {
            return Err(Miss::RequestTemplate);
        }
        // Names count only where a model has several templates.
        if self.templates.len() > 1
            && let Some(named) = self.template_named(given)
        {
            let template = self.usable_template(Some(named))?;
            return template.render(&Shown::plainly(chat), &self.special, limits.now, None);
        }
        let template = Template::new(given).map_err(|_not_a_template| Miss::Template)?;
        match template.doubt(&self.special) {
            Some(_) => Err(Miss::Template),
            None => template.render(&Shown::plainly(chat), &self.special, limits.now, None),
        }
    }

    fn template_named(&self, name: &str) -> Option<&Result<Template, Broken>> {
        self.templates.iter().find(|(known, _)| known == name).map(|(_, template)| template)
    }

    fn usable_template<'t>(&self, template: Option<&'t Result<Template, Broken>>) -> Result<&'t Template, Miss> {
        match template {
            None => Err(Miss::NoTemplate),
            Some(Ok(template)) if template.doubt(&self.special).is_none() => Ok(template),
            Some(_) => Err(Miss::Template),
        }
    }

    /// The text all of whose tokens are the prompt's, and whether special tokens go around it. `None` where the prompt is
    /// no text, or some of its tokens are cut off.
    fn whole_text<'i>(
        &self,
        input: &'i Input,
        options: &TokenOptions,
        limits: &Limits,
        memory: &dyn Memory,
    ) -> Result<Option<(Cow<'i, str>, bool)>, Miss> {
        let options = match input {
            Input::Chat(chat) => self.options_for(chat, options),
            Input::Tokens(_) | Input::Text(_) => *options,
        };
        if keep(&options, limits)?.is_some() {
            return Ok(None);
        }
        let (text, special) = match input {
            Input::Tokens(_) => return Ok(None),
            Input::Text(text) => (Cow::Borrowed(text.as_str()), true),
            Input::Chat(chat) => match self.render_with(chat, limits, Some(memory)) {
                Err(Miss::Parts) => return Ok(None),
                text => (Cow::Owned(text?), false),
            },
        };
        self.check(&text, limits)?;
        Ok(Some((text, options.add_special_tokens.unwrap_or(special))))
    }

    fn encode(
        &self,
        text: &str,
        special_by_default: bool,
        options: &TokenOptions,
        limits: &Limits,
    ) -> Result<Vec<TokenId>, Miss> {
        self.check(text, limits)?;
        let special = options.add_special_tokens.unwrap_or(special_by_default);
        match keep(options, limits)? {
            // A side that is not named leaves the cutting to the tokenizer, which keeps the special tokens.
            Some(keep) if options.truncation_side.is_none() => self.encode_tail(text, special, keep),
            keep => Ok(cut(self.ids(text, special)?, keep, options.truncation_side)),
        }
    }

    /// Whether the tokens of `text` are known, and worth making.
    fn check(&self, text: &str, limits: &Limits) -> Result<(), Miss> {
        match self.text_doubt {
            Some(doubt) => Err(doubt),
            None if text.len() / MAX_BYTES_PER_TOKEN > limits.max_tokens.max(limits.max_model_len.unwrap_or(0)) => {
                Err(Miss::TooLong)
            }
            None => Ok(()),
        }
    }

    fn ids(&self, text: &str, special: bool) -> Result<Vec<TokenId>, Miss> {
        self.encoder.ids(text, special)
    }

    /// The last tokens of `text`, `keep` together with the special ones around them.
    fn encode_tail(&self, text: &str, special: bool, keep: usize) -> Result<Vec<TokenId>, Miss> {
        let (before, after) = if special { self.special_around()? } else { (Vec::new(), Vec::new()) };
        let bare = self.ids(text, false)?;
        let added = before.len() + after.len();
        let room = if bare.len() + added <= keep {
            bare.len()
        } else {
            keep.checked_sub(added).filter(|room| *room > 0).ok_or(Miss::Truncate)?
        };
        Ok([before.as_slice(), &bare[bare.len() - room..], &after].concat())
    }

    /// The special tokens that the post-processor puts before and after text, read off a short one.
    fn special_around(&self) -> Result<(Vec<TokenId>, Vec<TokenId>), Miss> {
        const PROBE: &str = "a";
        let (with, bare) = (self.ids(PROBE, true)?, self.ids(PROBE, false)?);
        let start = with.windows(bare.len().max(1)).position(|window| window == bare).ok_or(Miss::Truncate)?;
        Ok((with[..start].to_vec(), with[start + bare.len()..].to_vec()))
    }
}

/// The templates that the files hold.
fn templates(files: &Files, config: Option<&TokenizerConfig>) -> Vec<(String, Result<Template, Broken>)> {
    let listed = match &files.chat_template {
        Some(template) => vec![("default".to_owned(), template.clone())],
        None => config.map(TokenizerConfig::templates).unwrap_or_default(),
    };
    let compile = |source: &str| Template::new(source).map_err(|error| Broken(error.to_string()));
    listed.into_iter().map(|(name, source)| (name, compile(&source))).collect()
}

/// What the engine makes of a model with these templates. It asks the one for chats without tools and the one for tools.
fn habits(templates: &[(String, Result<Template, Broken>)], special: &SpecialTokens) -> Habits {
    let named =
        |wanted: &str| templates.iter().find(|(name, _)| name == wanted).and_then(|(_, found)| found.as_ref().ok());
    let asked: Vec<&Template> = ["default", "tool_use"].into_iter().filter_map(named).collect();
    Habits::with(&asked, special)
}

/// How many tokens the request wants kept.
fn keep(options: &TokenOptions, limits: &Limits) -> Result<Option<usize>, Miss> {
    match options.truncate {
        None => Ok(None),
        Some(Truncate::To(0)) => Err(Miss::NoTokens),
        Some(Truncate::To(keep)) => Ok(Some(keep)),
        Some(Truncate::ToModel { reserve }) => {
            let length = limits.max_model_len.ok_or(Miss::Truncate)?;
            Ok(Some(length.saturating_sub(reserve)))
        }
    }
}

fn truncated_ids(ids: Vec<TokenId>, options: &TokenOptions, limits: &Limits) -> Result<Vec<TokenId>, Miss> {
    Ok(cut(ids, keep(options, limits)?, options.truncation_side))
}

/// Keeps `keep` tokens of the side that is not cut; by default the left side goes.
fn cut(mut ids: Vec<TokenId>, keep: Option<usize>, side: Option<Side>) -> Vec<TokenId> {
    let Some(keep) = keep.filter(|keep| *keep < ids.len()) else { return ids };
    match side {
        Some(Side::Right) => {
            ids.truncate(keep);
            ids
        }
        Some(Side::Left) | None => ids.split_off(ids.len() - keep),
    }
}

#[cfg(test)]
mod tests;

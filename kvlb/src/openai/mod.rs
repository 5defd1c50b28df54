//! A request body becomes a [`Prompt`]: model, text or messages, and whatever else enters the hash.
//!
//! Owns the shapes of the requests that carry a prompt. It reads only what the choice depends on and never judges a
//! request: what an engine may accept and this room cannot read exactly is a [`Miss`], and the request is forwarded
//! unchanged. It never touches sockets, files, the clock or the environment, and no body can make it panic.

mod backwards;
mod body;
mod chat;
mod edit;
mod json;
mod messages;
mod miss;
mod prompt;
mod responses;
mod split;
mod whole;

use std::borrow::Cow;

use serde_json::value::RawValue;

pub(crate) use backwards::{Backwards, Token};
pub use edit::{Edit, Members, Patch};
pub use json::Json;
pub(crate) use json::{plain_float, write_all};
pub use miss::{BadBody, Miss, NoText, Unsupported};
pub use prompt::{Api, Chat, Input, Message, Part, PartKind, Prompt, Side, TokenOptions, ToolCall, Truncate};
pub use split::{Whole, may_generate, whole};

use crate::contract::TokenId;
use body::Fields;

/// At most this many prompts of a batch are scored: a batch shares its fate, so more would add time and no sense.
pub const MAX_PROMPTS: usize = 8;

/// What the choice may depend on of an HTTP request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The method, as written.
    pub method: &'a str,
    /// The path without its query.
    pub path: &'a str,
    /// The header `X-Model`, which wins over the body's `model`.
    pub model_header: Option<&'a str>,
    /// The whole body.
    pub body: &'a [u8],
}

/// Which API a path belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/chat/completions/batch`: a list of conversations.
    ChatBatch,
    /// `/inference/v1/generate`: token ids only.
    Generate,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
    /// Anything else.
    Other,
}

/// The API that `path` belongs to, with or without slashes around it.
///
/// Source: the routes of vLLM 0.32.0.
pub fn kind(path: &str) -> Kind {
    match decoded(path).trim_matches('/') {
        "v1/completions" => Kind::Completions,
        "v1/chat/completions" => Kind::Chat,
        "v1/chat/completions/batch" => Kind::ChatBatch,
        "inference/v1/generate" => Kind::Generate,
        "v1/responses" => Kind::Responses,
        "v1/messages" => Kind::Messages,
        _ => Kind::Other,
    }
}

/// A path as engines look at it.
fn decoded(path: &str) -> Cow<'_, str> {
    if !path.contains('%') {
        return path.into();
    }
    let mut decoded = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        let digits = behind.get(..2).filter(|digits| byte == b'%' && digits.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        decoded.push(escaped.unwrap_or(byte));
        rest = if escaped.is_some() { &behind[2..] } else { behind };
    }
    String::from_utf8(decoded).map_or_else(|_| path.into(), Cow::Owned)
}

/// The model that a request names: the header, else the body's `model`, whatever the path is.
pub fn model(request: &Request<'_>) -> Option<String> {
    header_model(request).or_else(|| body::model(request.body).filter(|model| !model.is_empty()))
}

/// What is known of a request's model by a look at its body's two ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Glimpse {
    /// What [`model`] says.
    Model(Option<String>),
    /// The model's name goes on beyond what was looked at: it is nobody's.
    Endless,
    /// It is not named at either end.
    OutOfReach,
}

/// The model that a request names, as far as the first and the last `reach` bytes of its body tell: for whoever has no time to
/// read all of it. Where a key is written twice and `model` is found at the end, the last one counts, as in [`model`]; one at
/// the beginning may be overruled by one in the middle.
pub fn glimpse_model(request: &Request<'_>, reach: usize) -> Glimpse {
    if request.body.len() <= reach.saturating_mul(2) || header_model(request).is_some() {
        return Glimpse::Model(model(request));
    }
    match body::glimpse_model(request.body, reach) {
        Glimpse::Model(model) => Glimpse::Model(model.filter(|model| !model.is_empty())),
        other => other,
    }
}

/// The `user` that a request names, of one that [`parse`] makes nothing of.
pub fn user(request: &Request<'_>) -> Option<String> {
    body::text(Fields::read(request.body).ok()?.user)
}

/// What the choice reads of a request.
///
/// # Errors
/// [`Miss`] when there is no prompt, or none that can be reproduced exactly.
pub fn parse(request: &Request<'_>) -> Result<Prompt, Miss> {
    if request.method != "POST" {
        return Err(NoText::Method.into());
    }
    let kind = kind(request.path);
    if kind == Kind::Other {
        return Err(NoText::Path.into());
    }
    let mut fields = Fields::read(request.body)?;
    let (inputs, prompts) = inputs(kind, &mut fields)?;
    let served = body::text(fields.model).filter(|model| !model.is_empty());
    Ok(Prompt {
        model: header_model(request).or_else(|| served.clone()),
        served,
        inputs,
        prompts,
        samples: samples(kind, fields.n),
        cache_salt: body::text(fields.cache_salt).filter(|salt| !salt.is_empty()),
        options: token_options(kind, &fields)?,
        reads_cache: reads_cache(kind, &fields),
        stream: fields.stream.is_some_and(|stream| stream.get() == "true"),
        user: body::text(fields.user),
    })
}

fn header_model(request: &Request<'_>) -> Option<String> {
    request.model_header.map(str::trim).filter(|model| !model.is_empty()).map(str::to_owned)
}

/// The prompts within the bound, and how many there are in all.
fn inputs(kind: Kind, fields: &mut Fields<'_>) -> Result<(Vec<Input>, usize), Miss> {
    refuse_replaced_prompts(kind, fields)?;
    match kind {
        Kind::Completions => prompts(body::long(fields.prompt.take().ok_or(NoText::Absent)?)?),
        Kind::Generate => prompts(token_ids_only(body::value(fields.token_ids.ok_or(NoText::Absent)?)?)?),
        Kind::Chat => {
            let messages = body::long(fields.messages.take().ok_or(NoText::Absent)?)?;
            Ok((vec![chat_input(messages, fields)?], 1))
        }
        // vLLM 0.32.0 takes tools here and shows them to nobody.
        Kind::ChatBatch if fields.tools.is_some() => Err(Unsupported::Tools.into()),
        Kind::ChatBatch => match body::long(fields.messages.take().ok_or(NoText::Absent)?)? {
            Json::List(list) => bounded(list, |messages| chat_input(messages, fields)),
            _ => Err(Unsupported::Shape.into()),
        },
        Kind::Responses => Ok((vec![Input::Chat(Box::new(responses::chat(fields)?))], 1)),
        Kind::Messages => Ok((vec![Input::Chat(Box::new(messages::chat(fields)?))], 1)),
        Kind::Other => Err(NoText::Path.into()),
    }
}

/// Refuses what makes the engine take something else than `prompt` or `messages`.
fn refuse_replaced_prompts(kind: Kind, fields: &Fields<'_>) -> Result<(), Miss> {
    if kind == Kind::Completions && fields.prompt_embeds.is_some() {
        return Err(Unsupported::Embeds.into());
    }
    if kind == Kind::Completions && fields.suffix.is_some() {
        return Err(Unsupported::Suffix.into());
    }
    if kind == Kind::Generate && fields.features.is_some() {
        return Err(Unsupported::Images.into());
    }
    if let Some(params) = fields.kv_transfer_params
        && kind != Kind::Completions
        && body::value(params)?.get("prompt_token_ids").is_some_and(|ids| !ids.is_null())
    {
        return Err(Unsupported::TokenReuse.into());
    }
    Ok(())
}

/// `prompt` in its four forms: a text, a list of texts, token ids, a list of lists of token ids.
fn prompts(value: Json) -> Result<(Vec<Input>, usize), Miss> {
    match value {
        Json::Text(text) => Ok((vec![text_input(text)?], 1)),
        Json::List(list) => match list.first() {
            None => Err(NoText::Empty.into()),
            Some(Json::Text(_) | Json::List(_)) => bounded(list, one_of_many),
            Some(_) => Ok((vec![token_input(&list)?], 1)),
        },
        _ => Err(Unsupported::Shape.into()),
    }
}

fn bounded(list: Vec<Json>, input: impl Fn(Json) -> Result<Input, Miss>) -> Result<(Vec<Input>, usize), Miss> {
    let prompts = list.len();
    if prompts == 0 {
        return Err(NoText::Empty.into());
    }
    let inputs = list.into_iter().take(MAX_PROMPTS).map(input).collect::<Result<_, _>>()?;
    Ok((inputs, prompts))
}

fn one_of_many(value: Json) -> Result<Input, Miss> {
    match value {
        Json::Text(text) => text_input(text),
        Json::List(ids) => token_input(&ids),
        _ => Err(Unsupported::Shape.into()),
    }
}

fn text_input(text: String) -> Result<Input, Miss> {
    if text.is_empty() { Err(NoText::Empty.into()) } else { Ok(Input::Text(text)) }
}

fn token_input(ids: &[Json]) -> Result<Input, Miss> {
    if ids.is_empty() {
        return Err(NoText::Empty.into());
    }
    ids.iter().map(token_id).collect::<Result<_, _>>().map(Input::Tokens)
}

fn token_id(value: &Json) -> Result<TokenId, Miss> {
    match value {
        Json::Int(id) => u32::try_from(*id).map(TokenId).map_err(|_out_of_range| Unsupported::TokenId.into()),
        _ => Err(Unsupported::TokenId.into()),
    }
}

fn token_ids_only(value: Json) -> Result<Json, Miss> {
    match &value {
        Json::List(list) if list.iter().all(|id| matches!(id, Json::Int(_))) => Ok(value),
        _ => Err(Unsupported::TokenId.into()),
    }
}

fn chat_input(messages: Json, fields: &Fields<'_>) -> Result<Input, Miss> {
    let messages = chat::messages(messages)?;
    if messages.is_empty() {
        return Err(NoText::Empty.into());
    }
    let optional = |field: Option<&RawValue>| field.map(body::value).transpose();
    Ok(Input::Chat(Box::new(Chat {
        api: Api::Chat,
        messages,
        tools: optional(fields.tools)?.map(chat::tools).transpose()?.flatten(),
        documents: optional(fields.documents)?.map(documents).transpose()?,
        template_kwargs: chat::template_kwargs(fields)?,
        template: optional(fields.chat_template)?.map(option_text).transpose()?,
        add_generation_prompt: optional(fields.add_generation_prompt)?.as_ref().map_or(Ok(true), option_bool)?,
        continue_final_message: optional(fields.continue_final_message)?.as_ref().map_or(Ok(false), option_bool)?,
        reasoning_effort: optional(fields.reasoning_effort)?.map(option_text).transpose()?,
        thinking_off: false,
    })))
}

/// `documents` is a list of objects of texts.
fn documents(value: Json) -> Result<Json, Miss> {
    let texts = |document: &Json| match document {
        Json::Map(entries) => entries.iter().all(|(_, value)| matches!(value, Json::Text(_))),
        _ => false,
    };
    match &value {
        Json::List(list) if list.iter().all(texts) => Ok(value),
        _ => Err(Unsupported::Shape.into()),
    }
}

fn token_options(kind: Kind, fields: &Fields<'_>) -> Result<TokenOptions, Miss> {
    match kind {
        Kind::Generate | Kind::Messages => return Ok(TokenOptions::default()),
        Kind::Responses => return responses::token_options(fields),
        _ => {}
    }
    let optional = |field: Option<&RawValue>| field.map(body::value).transpose();
    let truncate = match optional(fields.truncate_prompt_tokens)? {
        None => None,
        Some(Json::Int(-1)) => Some(Truncate::ToModel { reserve: reserve(kind, fields) }),
        Some(Json::Int(keep)) => Some(Truncate::To(usize::try_from(keep).map_err(|_negative| Unsupported::Options)?)),
        Some(_) => return Err(Unsupported::Options.into()),
    };
    let truncation_side = match optional(fields.truncation_side)?.as_ref().map(Json::as_text) {
        None => None,
        Some(Some("left")) => Some(Side::Left),
        Some(Some("right")) => Some(Side::Right),
        Some(_) => return Err(Unsupported::Options.into()),
    };
    let add_special_tokens = optional(fields.add_special_tokens)?.as_ref().map(option_bool).transpose()?;
    Ok(TokenOptions { add_special_tokens, truncate, truncation_side })
}

/// The engine holds one token back from `truncate_prompt_tokens: -1` where the request may generate any.
///
/// A completion's `max_tokens` is 16 unless it says otherwise; a chat's is none, which counts as zero here.
fn reserve(kind: Kind, fields: &Fields<'_>) -> usize {
    let explicit = match kind {
        Kind::Completions => fields.max_tokens,
        _ => fields.max_completion_tokens.or(fields.max_tokens),
    };
    match explicit {
        Some(limit) => usize::from(!matches!(limit.get(), "0" | "null")),
        None => usize::from(kind == Kind::Completions),
    }
}

/// Whether the engine looks into its cache for a request.
///
/// Source: vLLM 0.32.0, `SamplingParams.skip_reading_prefix_cache`, and `CompletionRequest.to_sampling_params`, where `echo`
/// with `logprobs` asks for those of the prompt.
fn reads_cache(kind: Kind, fields: &Fields<'_>) -> bool {
    let of_prompt = match kind {
        Kind::Generate => fields.sampling_params.and_then(|params| body::value(params).ok()).is_some_and(|params| {
            let set = |key: &str| params.get(key).is_some_and(|value| !value.is_null());
            set("prompt_logprobs") || set("skip_reading_prefix_cache")
        }),
        _ => fields.prompt_logprobs.is_some(),
    };
    let echoed = fields.echo.is_some_and(|echo| echo.get() != "false") && fields.logprobs.is_some();
    !(of_prompt || echoed)
}

/// How many answers are asked for; the Messages and the Responses API know one only.
fn samples(kind: Kind, n: Option<&RawValue>) -> u32 {
    let n = n.filter(|_| !matches!(kind, Kind::Messages | Kind::Responses));
    n.and_then(|n| serde_json::from_str::<u32>(n.get()).ok()).map_or(1, |n| n.max(1))
}

fn option_bool(value: &Json) -> Result<bool, Miss> {
    match value {
        Json::Bool(flag) => Ok(*flag),
        _ => Err(Unsupported::Options.into()),
    }
}

fn option_text(value: Json) -> Result<String, Miss> {
    match value {
        Json::Text(text) => Ok(text),
        _ => Err(Unsupported::Options.into()),
    }
}

#[cfg(test)]
mod tests;

//! One pass over a request body: where each field that matters lies, and what the longest of them say.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::Glimpse;
use super::backwards::{Backwards, Token};
use super::json::Json;
use super::miss::{BadBody, Miss, Unsupported};

/// A field's JSON text, or nothing where it is absent or null.
type Field<'a> = Option<&'a RawValue>;

/// One of the fields that bodies consist of: read already, or as JSON text where something in the body is too odd for that.
#[derive(Debug)]
pub(super) enum Long<'a> {
    Read(Json),
    Text(&'a RawValue),
}

/// The fields of a body that routing reads, each as the JSON text the client wrote but for the longest ones.
///
/// Where a key is written twice the last one counts, as for the engine. Fields that routing does not read are skipped
/// without a look at their meaning, so odd numbers, lone surrogates and any nesting in them are harmless.
#[derive(Debug, Default)]
pub(super) struct Fields<'a> {
    pub(super) model: Field<'a>,
    pub(super) prompt: Option<Long<'a>>,
    pub(super) messages: Option<Long<'a>>,
    pub(super) token_ids: Field<'a>,
    pub(super) features: Field<'a>,
    pub(super) prompt_embeds: Field<'a>,
    pub(super) suffix: Field<'a>,
    pub(super) tools: Field<'a>,
    pub(super) documents: Field<'a>,
    pub(super) chat_template: Field<'a>,
    pub(super) chat_template_kwargs: Field<'a>,
    pub(super) add_generation_prompt: Field<'a>,
    pub(super) continue_final_message: Field<'a>,
    pub(super) reasoning_effort: Field<'a>,
    pub(super) add_special_tokens: Field<'a>,
    pub(super) truncate_prompt_tokens: Field<'a>,
    pub(super) truncation_side: Field<'a>,
    pub(super) max_tokens: Field<'a>,
    pub(super) max_completion_tokens: Field<'a>,
    pub(super) system: Field<'a>,
    pub(super) thinking: Field<'a>,
    pub(super) output_config: Field<'a>,
    pub(super) input: Option<Long<'a>>,
    pub(super) instructions: Field<'a>,
    pub(super) reasoning: Field<'a>,
    pub(super) previous_response_id: Field<'a>,
    pub(super) previous_input_messages: Field<'a>,
    pub(super) truncation: Field<'a>,
    pub(super) max_output_tokens: Field<'a>,
    pub(super) kv_transfer_params: Field<'a>,
    pub(super) cache_salt: Field<'a>,
    pub(super) n: Field<'a>,
    pub(super) prompt_logprobs: Field<'a>,
    pub(super) echo: Field<'a>,
    pub(super) logprobs: Field<'a>,
    pub(super) sampling_params: Field<'a>,
    pub(super) stream: Field<'a>,
    pub(super) user: Field<'a>,
}

impl<'a> Fields<'a> {
    /// The fields of `body`.
    ///
    /// # Errors
    /// [`BadBody`] when the body is not a JSON object.
    pub(super) fn read(body: &'a [u8]) -> Result<Self, BadBody> {
        let mut fields = Self::default();
        if fields.fill(body, true).is_ok() {
            return Ok(fields);
        }
        // What routing does not read may be whatever the engine takes.
        let mut fields = Self::default();
        fields.fill(body, false)?;
        Ok(fields)
    }

    /// Takes the fields of `body`, the long ones read if `read`; what was taken before an error stays.
    fn fill(&mut self, body: &'a [u8], read: bool) -> Result<(), BadBody> {
        let mut reader = serde_json::Deserializer::from_slice(without_mark(body));
        match reader.deserialize_map(Filling { fields: self, read }).and_then(|()| reader.end()) {
            Ok(()) => Ok(()),
            Err(error) if error.is_data() => Err(BadBody::NotObject),
            Err(_error) => Err(BadBody::NotJson),
        }
    }

    fn long_slot(&mut self, key: &str) -> Option<&mut Option<Long<'a>>> {
        Some(match key {
            "prompt" => &mut self.prompt,
            "messages" => &mut self.messages,
            "input" => &mut self.input,
            _ => return None,
        })
    }

    fn slot(&mut self, key: &str) -> Option<&mut Field<'a>> {
        Some(match key {
            "model" => &mut self.model,
            "token_ids" => &mut self.token_ids,
            "features" => &mut self.features,
            "prompt_embeds" => &mut self.prompt_embeds,
            "suffix" => &mut self.suffix,
            "tools" => &mut self.tools,
            "documents" => &mut self.documents,
            "chat_template" => &mut self.chat_template,
            "chat_template_kwargs" => &mut self.chat_template_kwargs,
            "add_generation_prompt" => &mut self.add_generation_prompt,
            "continue_final_message" => &mut self.continue_final_message,
            "reasoning_effort" => &mut self.reasoning_effort,
            "add_special_tokens" => &mut self.add_special_tokens,
            "truncate_prompt_tokens" => &mut self.truncate_prompt_tokens,
            "truncation_side" => &mut self.truncation_side,
            "max_tokens" => &mut self.max_tokens,
            "max_completion_tokens" => &mut self.max_completion_tokens,
            "system" => &mut self.system,
            "thinking" => &mut self.thinking,
            "output_config" => &mut self.output_config,
            "instructions" => &mut self.instructions,
            "reasoning" => &mut self.reasoning,
            "previous_response_id" => &mut self.previous_response_id,
            "previous_input_messages" => &mut self.previous_input_messages,
            "truncation" => &mut self.truncation,
            "max_output_tokens" => &mut self.max_output_tokens,
            "kv_transfer_params" => &mut self.kv_transfer_params,
            "cache_salt" => &mut self.cache_salt,
            "n" => &mut self.n,
            "prompt_logprobs" => &mut self.prompt_logprobs,
            "echo" => &mut self.echo,
            "logprobs" => &mut self.logprobs,
            "sampling_params" => &mut self.sampling_params,
            "stream" => &mut self.stream,
            "user" => &mut self.user,
            _ => return None,
        })
    }
}

struct Filling<'f, 'a> {
    fields: &'f mut Fields<'a>,
    read: bool,
}

impl<'a> Visitor<'a> for Filling<'_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(key) = entries.next_key::<Key<'a>>()? {
            if let Some(slot) = self.fields.long_slot(&key.0) {
                *slot = if self.read {
                    Some(entries.next_value()?).filter(|value: &Json| !value.is_null()).map(Long::Read)
                } else {
                    Some(entries.next_value::<&'a RawValue>()?).filter(|value| value.get() != "null").map(Long::Text)
                };
                continue;
            }
            match self.fields.slot(&key.0) {
                Some(slot) => *slot = Some(entries.next_value::<&'a RawValue>()?).filter(|value| counts(&key.0, value)),
                None => drop(entries.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// Whether a value is more than an absent one. A null `max_tokens` or `truncation` is: it takes the place of the default.
fn counts(key: &str, value: &RawValue) -> bool {
    matches!(key, "max_tokens" | "truncation") || value.get() != "null"
}

/// A key, borrowed unless it is written with escapes.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct Key<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// The `model` of a JSON object; also of one that breaks off after it.
pub(super) fn model(body: &[u8]) -> Option<String> {
    text(Seeking::read(body).model)
}

/// The `model` of a JSON object, by its first and last `reach` bytes.
pub(super) fn glimpse_model(body: &[u8], reach: usize) -> Glimpse {
    if let Some(value) = last_member(&body[body.len() - reach..], "model") {
        return Glimpse::Model(serde_json::from_slice(value).ok());
    }
    match Seeking::read(&body[..reach]) {
        Seeking { model: Some(model), .. } => Glimpse::Model(text(Some(model))),
        Seeking { is_within: true, .. } => Glimpse::Endless,
        Seeking { .. } => Glimpse::OutOfReach,
    }
}

/// The value of the last member with this key, of the JSON object that `text` ends with; its beginning may be missing.
fn last_member<'a>(text: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let text = text.trim_ascii_end();
    let mut tokens = Backwards::new(text);
    let (mut depth, mut end) = (0_usize, text.len().checked_sub(1)?);
    if text[end] != b'}' {
        return None;
    }
    while let Some(token) = tokens.next() {
        match token {
            Token::Close => depth += 1,
            Token::Open if depth == 1 => return None,
            Token::Open => depth -= 1,
            Token::Comma if depth == 1 => end = tokens.at(),
            Token::Colon if depth == 1 => {
                let (value, quote) = (&text[tokens.at() + 1..end], tokens.at());
                let Some(Token::Text(_)) = tokens.next() else { return None };
                let name = serde_json::from_slice::<Key<'_>>(&text[tokens.at()..quote]);
                if name.is_ok_and(|name| name.0 == key) {
                    return Some(value);
                }
            }
            Token::Comma | Token::Colon | Token::Text(_) | Token::Plain => {}
        }
    }
    None
}

/// A look for the model alone.
#[derive(Debug, Default)]
struct Seeking<'a> {
    model: Field<'a>,
    /// The body broke off within the model's value.
    is_within: bool,
}

impl<'a> Seeking<'a> {
    fn read(body: &'a [u8]) -> Self {
        let mut seeking = Self::default();
        let read = serde_json::Deserializer::from_slice(without_mark(body)).deserialize_map(&mut seeking);
        seeking.is_within &= read.is_err_and(|error| error.is_eof());
        seeking
    }
}

impl<'a> Visitor<'a> for &mut Seeking<'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(key) = entries.next_key::<Key<'a>>()? {
            self.is_within = key.0 == "model";
            if self.is_within {
                self.model = Some(entries.next_value::<&'a RawValue>()?).filter(|value| value.get() != "null");
                self.is_within = false;
            } else {
                let IgnoredAny = entries.next_value()?;
            }
        }
        Ok(())
    }
}

/// Python's `json.loads` of bytes accepts a byte order mark.
pub(super) fn without_mark(body: &[u8]) -> &[u8] {
    body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body)
}

/// The value of a long field.
///
/// # Errors
/// As for [`value`].
pub(super) fn long(field: Long<'_>) -> Result<Json, Miss> {
    match field {
        Long::Read(json) => Ok(json),
        Long::Text(text) => value(text),
    }
}

/// The value of a field.
///
/// # Errors
/// [`Unsupported::Unreadable`] where Python may read what this parser does not.
pub(super) fn value(field: &RawValue) -> Result<Json, Miss> {
    serde_json::from_str(field.get()).map_err(|_unreadable| Unsupported::Unreadable.into())
}

/// A field's text; nothing when it is not text.
pub(super) fn text(field: Field<'_>) -> Option<String> {
    serde_json::from_str(field?.get()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_two_equal_keys_counts_however_it_is_spelt() {
        let fields = Fields::read(br#"{"model": "a", "mod\u0065l": "b", "prompt": null}"#).unwrap();
        assert_eq!(text(fields.model), Some("b".into()));
        assert!(fields.prompt.is_none());
    }

    #[test]
    fn what_routing_does_not_read_may_be_as_odd_as_it_likes() {
        let deep =
            format!(r#"{{"x": {}{}, "y": 1e400, "z": "\ud800", "model": "m"}}"#, "[".repeat(9000), "]".repeat(9000));
        assert_eq!(text(Fields::read(deep.as_bytes()).unwrap().model), Some("m".into()));
    }

    #[test]
    fn a_long_field_is_what_it_is_also_beside_oddities() {
        let list = "[{\"role\": \"user\", \"content\": \"\u{e9}\\n\\ud83d\\ude00\"}]";
        let bodies = [
            format!(r#"{{"messages": {list}}}"#),
            format!(r#"{{"messages": null, "seed": 1e400, "messages": {list}}}"#),
            format!(r#"{{"messages": "\ud800", "x": {}{}, "messages": {list}}}"#, "[".repeat(500), "]".repeat(500)),
        ];
        for body in bodies {
            let messages = Fields::read(body.as_bytes()).unwrap().messages.map(|list| long(list).unwrap());
            assert_eq!(messages, Some(serde_json::from_str(list).unwrap()), "{body}");
        }
        let unreadable = Fields::read(br#"{"messages": ["\ud800"], "model": "m"}"#).unwrap();
        assert!(long(unreadable.messages.unwrap()).is_err() && text(unreadable.model) == Some("m".into()));
        assert!(Fields::read(br#"{"messages": [], "messages": null}"#).unwrap().messages.is_none());
    }

    #[test]
    fn a_model_is_glimpsed_at_either_end_of_a_long_body() {
        let long = format!("\"{}\"", r#"\\\"model\": 7, {["#.repeat(40));
        let named = |model: &str| Glimpse::Model(Some(model.to_owned()));
        let far = Glimpse::OutOfReach;
        for (body, expected) in [
            (format!(r#"{{"model": "m", "prompt": {long}}}"#), named("m")),
            (format!(r#"{{"prompt": {long}, "model": "m"}} "#), named("m")),
            (
                format!(r#"{{"prompt": {long}, "mod\u0065l" : "m\u00e9" , "x": {{"model": [1, {{"a": "]"}}]}}}}"#),
                named("m\u{e9}"),
            ),
            (format!(r#"{{"model": "first", "prompt": {long}, "model": "last"}}"#), named("last")),
            (format!(r#"{{"model": "first", "prompt": {long}, "x": {{"model": "within"}}}}"#), named("first")),
            (format!(r#"{{"prompt": {long}, "model": "m", "x": {long}}}"#), far.clone()),
            (format!(r#"{{"prompt": [{{"model": "m"}}], "x": {long}}}"#), far.clone()),
            (format!(r#"{{"prompt": {long}, "model": 7}}"#), Glimpse::Model(None)),
            (format!(r#"{{"prompt": {long}, "model": null}}"#), Glimpse::Model(None)),
            (format!(r#"{{"model": "m", "prompt": {long}"#), named("m")),
            (format!(r#"{{"model": {long}, "prompt": "a"}}"#), Glimpse::Endless),
            (format!(r#"{{"prompt": "a", "model": {long}}}"#), Glimpse::Endless),
            (format!(r#"["model", {long}]"#), far.clone()),
            (format!(r#"{{"prompt": {}1{}}}"#, "[".repeat(500), "]".repeat(500)), far.clone()),
        ] {
            assert_eq!(glimpse_model(body.as_bytes(), 100), expected, "{body}");
        }
    }

    #[test]
    fn a_body_that_is_no_object_says_which_way() {
        for body in [&b"[1]"[..], b"\"text\"", b"7", b"null"] {
            assert_eq!(Fields::read(body).unwrap_err(), BadBody::NotObject, "{body:?}");
        }
        for body in
            [&b""[..], b"plain text", b"{\"a\": 1", b"{} {}", b"{\"a\": NaN}", b"{'a': 1}", b"\xff\xfe{\x00}\x00"]
        {
            assert_eq!(Fields::read(body).unwrap_err(), BadBody::NotJson, "{body:?}");
        }
    }

    #[test]
    fn the_model_is_found_behind_a_byte_order_mark_and_in_a_body_that_breaks_off() {
        assert_eq!(model(b"\xef\xbb\xbf {\"model\": \"m\"}"), Some("m".into()));
        assert_eq!(model(br#"{"model": "m", "temperature": NaN"#), Some("m".into()));
        assert_eq!(model(br#"{"model": 7}"#), None);
        assert_eq!(model(br#"["model"]"#), None);
    }
}

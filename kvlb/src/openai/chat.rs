//! Messages and tools as the engine's own request models leave them.
//!
//! Source: vLLM 0.32.0, `ChatCompletionRequest` and `parse_chat_messages`, run with pydantic 2 and the `openai`
//! package. What the engine would refuse with a 400 is a miss here, as is what it reads only by guessing.

use super::body::{self, Fields};
use super::json::Json;
use super::miss::{Miss, Unsupported};
use super::prompt::{Message, Part, PartKind, ToolCall};

/// Keys of a content part that belong to some API; the engine hands on all others.
///
/// Source: vLLM 0.32.0, `_KNOWN_CONTENT_PART_FIELDS`.
const KNOWN_PART_KEYS: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// The messages of one conversation.
pub(super) fn messages(list: Json) -> Result<Vec<Message>, Miss> {
    let Json::List(list) = list else { return Err(Unsupported::Shape.into()) };
    list.into_iter().map(message).collect()
}

fn message(value: Json) -> Result<Message, Miss> {
    let mut fields = object(value)?;
    let Some(Json::Text(role)) = fields.take("role") else { return Err(Unsupported::Shape.into()) };
    let mut message = Message {
        content: content(fields.take("content"))?,
        name: fields.take("name").and_then(into_text),
        task: fields.take("task").and_then(into_text),
        ..Message::default()
    };
    match role.as_str() {
        "assistant" => {
            message.reasoning = reasoning(&mut fields)?;
            message.tool_calls = tool_calls(fields.take("tool_calls"))?;
        }
        "tool" => message.tool_call_id = tool_call_id(fields.take("tool_call_id"))?,
        "developer" => no_tools(fields.take("tools").as_ref())?,
        _ => {}
    }
    message.role = role;
    Ok(message)
}

/// The parts of a message's content. Parts whose text is null are left out, as the engine does.
pub(super) fn content(value: Option<Json>) -> Result<Vec<Part>, Miss> {
    match value {
        None | Some(Json::Null) => Ok(Vec::new()),
        Some(Json::Text(text)) => Ok(vec![Part { text, ..Part::default() }]),
        Some(Json::List(list)) => {
            let mut parts = Vec::with_capacity(list.len());
            for item in list {
                parts.extend(part(item)?);
            }
            Ok(parts)
        }
        Some(_) => Err(Unsupported::Shape.into()),
    }
}

fn part(value: Json) -> Result<Option<Part>, Miss> {
    if let Json::Text(text) = value {
        return Ok(Some(Part { text, ..Part::default() }));
    }
    let mut fields = object(value)?;
    let kind = fields.take("type").unwrap_or(Json::Null);
    let (text, called) = match kind.as_text() {
        Some("text") => (fields.take("text"), PartKind::Text),
        Some("input_text" | "output_text") => (fields.take("text"), PartKind::Directed),
        Some("thinking") => (fields.take("thinking"), PartKind::Aside),
        Some("refusal") => (fields.take("refusal"), PartKind::Aside),
        other => return Err(medium(other, &fields).into()),
    };
    // A part with a `uuid` is read as media whatever its type says.
    if fields.has("uuid") {
        return Err(Unsupported::Shape.into());
    }
    match text {
        Some(Json::Text(text)) => Ok(Some(Part { text, kind: called, extra: fields.unknown_part_keys() })),
        None | Some(Json::Null) if matches!(kind.as_text(), Some("text" | "refusal")) => Ok(None),
        _ => Err(Unsupported::Shape.into()),
    }
}

/// Which medium a part carries that is not text.
fn medium(kind: Option<&str>, fields: &Object) -> Unsupported {
    let any = |words: &[&str]| words.iter().any(|word| kind == Some(word) || (kind.is_none() && fields.has(word)));
    if any(&["image_url", "input_image", "image_embeds", "image_pil", "file", "input_file"]) {
        Unsupported::Images
    } else if any(&["input_audio", "audio_url", "audio_embeds"]) {
        Unsupported::Audio
    } else if any(&["video_url", "video_embeds"]) {
        Unsupported::Video
    } else if any(&["prompt_embeds"]) {
        Unsupported::Embeds
    } else if any(&["tool_reference"]) {
        Unsupported::Tools
    } else {
        Unsupported::Shape
    }
}

/// `reasoning`, else its older name `reasoning_content`.
fn reasoning(fields: &mut Object) -> Result<Option<String>, Unsupported> {
    let older = fields.take("reasoning_content");
    match fields.take("reasoning").filter(|value| !value.is_null()).or(older) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::Text(text)) => Ok(Some(text)),
        Some(_) => Err(Unsupported::Shape),
    }
}

fn tool_call_id(value: Option<Json>) -> Result<Option<Json>, Miss> {
    match value {
        None | Some(Json::Null | Json::Text(_)) => Ok(value),
        Some(_) => Err(Unsupported::Shape.into()),
    }
}

fn no_tools(tools: Option<&Json>) -> Result<(), Miss> {
    if tools.is_none_or(Json::is_null) { Ok(()) } else { Err(Unsupported::Tools.into()) }
}

fn tool_calls(value: Option<Json>) -> Result<Option<Vec<ToolCall>>, Unsupported> {
    match value {
        None | Some(Json::Null) => Ok(None),
        Some(Json::List(calls)) if calls.is_empty() => Ok(None),
        Some(Json::List(calls)) => {
            let calls: Option<Vec<ToolCall>> = calls.into_iter().map(tool_call).collect();
            calls.map(Some).ok_or(Unsupported::Tools)
        }
        Some(_) => Err(Unsupported::Tools),
    }
}

/// A tool call with its keys in the engine's order and its arguments parsed, as templates get them.
fn tool_call(value: Json) -> Option<ToolCall> {
    let mut call = object(value).ok()?;
    let id = call.take("id").filter(is_text)?;
    let kind = call.take("type").filter(|kind| kind.as_text() == Some("function"))?;
    let mut function = object(call.take("function")?).ok()?;
    let arguments = into_text(function.take("arguments")?)?;
    let name = function.take("name").filter(is_text)?;
    let function = function.after([("arguments", parsed(&arguments)?), ("name", name)]);
    Some(ToolCall { shown: call.after([("id", id), ("function", function), ("type", kind)]), arguments })
}

/// A tool call as templates get it, with the entries of its function in the order given.
pub(super) fn shown_call(id: String, function: [(&str, Json); 2]) -> Json {
    let function = Object(Vec::new()).after(function);
    Object(Vec::new()).after([
        ("id", Json::Text(id)),
        ("function", function),
        ("type", Json::Text("function".to_owned())),
    ])
}

/// The arguments of a tool call, which come as JSON text and have to be an object.
pub(super) fn parsed(text: &str) -> Option<Json> {
    if text.is_empty() {
        return Some(Json::Map(Vec::new()));
    }
    serde_json::from_str(text).ok().filter(|value| matches!(value, Json::Map(_)))
}

/// The tools as the engine's request model writes them again: its own keys in its own order, others dropped.
pub(super) fn tools(value: Json) -> Result<Option<Vec<Json>>, Miss> {
    let list = match value {
        Json::Null => return Ok(None),
        Json::List(list) if !list.is_empty() => list,
        _ => return Err(Unsupported::Tools.into()),
    };
    let tools: Option<Vec<Json>> = list.into_iter().map(tool).collect();
    tools.map(Some).ok_or_else(|| Unsupported::Tools.into())
}

/// A tool as the engine's request model writes it.
pub(super) fn tool(value: Json) -> Option<Json> {
    let mut tool = object(value).ok()?;
    let kind = tool.take("type").unwrap_or_else(|| Json::Text("function".to_owned()));
    if kind.as_text() != Some("function") {
        return None;
    }
    let defer_loading = tool.take("defer_loading").filter(|flag| !flag.is_null());
    if !matches!(defer_loading, None | Some(Json::Bool(_))) {
        return None;
    }
    let function = function(tool.take("function")?, defer_loading.as_ref())?;
    Some(written([("type", Some(kind)), ("function", Some(function)), ("defer_loading", defer_loading)]))
}

fn function(value: Json, defer_loading: Option<&Json>) -> Option<Json> {
    let mut function = object(value).ok()?;
    let mut flag = |name: &str| function.take(name).filter(|flag| !flag.is_null());
    let strict = flag("strict");
    let defer_loading = flag("defer_loading").or_else(|| defer_loading.cloned());
    let name = function.take("name").filter(is_text)?;
    let description = function.take("description").unwrap_or(Json::Null);
    let parameters = function.take("parameters").unwrap_or(Json::Null);
    let fits = matches!(description, Json::Null | Json::Text(_))
        && matches!(parameters, Json::Null | Json::Map(_))
        && [&strict, &defer_loading].into_iter().all(|flag| matches!(flag, None | Some(Json::Bool(_))));
    fits.then(|| {
        written([
            ("name", Some(name)),
            ("description", Some(description)),
            ("parameters", Some(parameters)),
            ("strict", strict),
            ("defer_loading", defer_loading),
        ])
    })
}

/// What the engine passes to `apply_chat_template` by itself, so that a request which passes it too either fails or
/// changes more than the template's variables.
///
/// Source: transformers 5.19, the parameters of `apply_chat_template`, and vLLM 0.32.0, `build_chat_params`.
const RESERVED_KWARGS: [&str; 12] = [
    "conversation",
    "messages",
    "tools",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// The `chat_template_kwargs` of a request.
pub(super) fn template_kwargs(fields: &Fields<'_>) -> Result<Vec<(String, Json)>, Miss> {
    let Some(given) = fields.chat_template_kwargs else { return Ok(Vec::new()) };
    match body::value(given)? {
        Json::Map(entries) if entries.iter().any(|(key, _)| RESERVED_KWARGS.contains(&key.as_str())) => {
            Err(Unsupported::TemplateKwargs.into())
        }
        Json::Map(entries) => Ok(entries),
        _ => Err(Unsupported::Shape.into()),
    }
}

/// An object of the entries that are there.
fn written<const N: usize>(entries: [(&str, Option<Json>); N]) -> Json {
    Json::Map(entries.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect())
}

fn is_text(value: &Json) -> bool {
    matches!(value, Json::Text(_))
}

pub(super) fn into_text(value: Json) -> Option<String> {
    match value {
        Json::Text(text) => Some(text),
        _ => None,
    }
}

/// An object whose entries are taken out one by one.
pub(super) struct Object(Vec<(String, Json)>);

pub(super) fn object(value: Json) -> Result<Object, Miss> {
    match value {
        Json::Map(entries) => Ok(Object(entries)),
        _ => Err(Unsupported::Shape.into()),
    }
}

impl Object {
    pub(super) fn take(&mut self, key: &str) -> Option<Json> {
        let place = self.0.iter().position(|(name, _)| name == key)?;
        Some(self.0.remove(place).1)
    }

    /// What the object calls its own `type`.
    pub(super) fn kind(&mut self) -> Result<String, Miss> {
        self.take("type").and_then(into_text).ok_or_else(|| Unsupported::Shape.into())
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(name, value)| name == key && !value.is_null())
    }

    /// The rest of the entries, behind `first`.
    fn after<const N: usize>(self, first: [(&str, Json); N]) -> Json {
        Json::Map(first.into_iter().map(|(key, value)| (key.to_owned(), value)).chain(self.0).collect())
    }

    fn unknown_part_keys(self) -> Vec<(String, Json)> {
        self.0.into_iter().filter(|(key, _)| !KNOWN_PART_KEYS.contains(&key.as_str())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Json {
        serde_json::from_str(text).unwrap()
    }

    fn only(text: &str) -> Result<Message, Miss> {
        Ok(messages(json(&format!("[{text}]")))?.remove(0))
    }

    fn texts(message: &Message) -> Vec<&str> {
        message.content.iter().map(|part| part.text.as_str()).collect()
    }

    #[test]
    fn content_is_text_or_parts_of_text() {
        assert_eq!(texts(&only(r#"{"role": "user", "content": "a"}"#).unwrap()), ["a"]);
        assert_eq!(texts(&only(r#"{"role": "user", "content": null}"#).unwrap()), [""; 0]);
        let parts = r#"{"role": "user", "content": ["a", {"type": "text", "text": "b", "cache_control": {}},
            {"type": "text", "text": null}, {"type": "thinking", "thinking": "c"}]}"#;
        let message = only(parts).unwrap();
        assert_eq!(texts(&message), ["a", "b", "c"]);
        assert_eq!(message.content[1].extra, [("cache_control".to_owned(), Json::Map(Vec::new()))]);
    }

    #[test]
    fn other_media_are_named() {
        let cases = [
            (r#"{"type": "image_url", "image_url": {"url": "x"}}"#, "images"),
            (r#"{"image_url": "x"}"#, "images"),
            (r#"{"type": "input_audio", "input_audio": {}}"#, "audio"),
            (r#"{"type": "video_url", "video_url": {}}"#, "video"),
            (r#"{"type": "prompt_embeds", "data": ""}"#, "embeds"),
            (r#"{"type": "tool_reference", "name": "x"}"#, "tools"),
            (r#"{"type": "text", "text": "a", "uuid": "u"}"#, "shape"),
            (r#"{"type": "text", "text": 1}"#, "shape"),
            (r#"{"text": "a"}"#, "shape"),
            ("7", "shape"),
        ];
        for (part, detail) in cases {
            let miss = only(&format!(r#"{{"role": "user", "content": [{part}]}}"#)).unwrap_err();
            assert_eq!((miss.reason(), miss.detail()), ("tokenize", detail), "{part}");
        }
    }

    #[test]
    fn reasoning_has_two_names_and_only_the_assistant_has_it() {
        let both = r#"{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "q"}"#;
        assert_eq!(only(both).unwrap().reasoning.as_deref(), Some("r"));
        let older = r#"{"role": "assistant", "content": "a", "reasoning": null, "reasoning_content": "q"}"#;
        assert_eq!(only(older).unwrap().reasoning.as_deref(), Some("q"));
        let user = r#"{"role": "user", "content": "a", "reasoning": "r"}"#;
        assert_eq!(only(user).unwrap().reasoning, None);
    }

    #[test]
    fn a_tool_call_is_reordered_and_its_arguments_are_parsed() {
        let call =
            r#"{"type": "function", "x": 1, "function": {"name": "f", "arguments": "{\"a\": 1}", "y": 2}, "id": "c"}"#;
        let message = only(&format!(r#"{{"role": "assistant", "tool_calls": [{call}]}}"#)).unwrap();
        let expected =
            r#"{"id": "c", "function": {"arguments": {"a": 1}, "name": "f", "y": 2}, "type": "function", "x": 1}"#;
        let call = message.tool_calls.unwrap().remove(0);
        assert_eq!((call.shown, call.arguments.as_str()), (json(expected), r#"{"a": 1}"#));
        let none = only(r#"{"role": "assistant", "content": "a", "tool_calls": []}"#).unwrap();
        assert_eq!(none.tool_calls, None);
        for arguments in ["nonsense", "[1]", r#"{\"a\": NaN}"#] {
            let call = format!(
                r#"{{"type": "function", "function": {{"name": "f", "arguments": "{arguments}"}}, "id": "c"}}"#
            );
            let miss = only(&format!(r#"{{"role": "assistant", "tool_calls": [{call}]}}"#)).unwrap_err();
            assert_eq!(miss.detail(), "tools", "{arguments}");
        }
    }

    #[test]
    fn tools_are_written_again_as_the_engine_does() {
        let given = json(
            r#"[{"function": {"parameters": {"z": 1, "a": 2.0}, "x": 1, "strict": true, "name": "f"}, "y": 2, "type": "function"},
                {"function": {"name": "g", "description": "d"}, "defer_loading": true}]"#,
        );
        let written = json(
            r#"[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"z": 1, "a": 2.0}, "strict": true}},
                {"type": "function", "function": {"name": "g", "description": "d", "parameters": null, "defer_loading": true}, "defer_loading": true}]"#,
        );
        assert_eq!(tools(given).unwrap().map(Json::List), Some(written));
        assert_eq!(tools(Json::Null), Ok(None));
        for refused in [
            "[]",
            "{}",
            r#"[{"type": "web"}]"#,
            r#"[{"function": {"name": 1}}]"#,
            r#"[{"function": {"name": "f", "strict": "yes"}}]"#,
        ] {
            assert_eq!(tools(json(refused)).unwrap_err().detail(), "tools", "{refused}");
        }
    }
}

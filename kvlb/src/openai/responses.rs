//! The Responses API: its requests as the chats that the engine turns them into.
//!
//! Source: vLLM 0.32.0, `ResponsesRequest` with the `openai` package's types, and `construct_input_messages`. Answers that
//! the engine keeps are its own, so a request that goes on from one is a miss.

use serde_json::value::RawValue;

use super::body::{self, Fields};
use super::chat::{self, Object, object};
use super::json::Json;
use super::miss::{Miss, NoText, Unsupported};
use super::prompt::{Api, Chat, Message, Part, PartKind, TokenOptions, ToolCall, Truncate};

/// The chat of a request to `/v1/responses`.
pub(super) fn chat(fields: &mut Fields<'_>) -> Result<Chat, Miss> {
    if fields.previous_response_id.is_some() || fields.previous_input_messages.is_some() {
        return Err(Unsupported::PreviousResponse.into());
    }
    let mut messages = Vec::new();
    messages.extend(instructions(fields)?);
    let open = match body::long(fields.input.take().ok_or(NoText::Absent)?)? {
        Json::Text(text) => {
            messages.push(said("user", text));
            false
        }
        Json::List(items) => {
            let open = items.last().is_some_and(is_unfinished);
            for item in items {
                messages.push(convert(item)?);
            }
            open
        }
        _ => return Err(Unsupported::Shape.into()),
    };
    if messages.is_empty() {
        return Err(NoText::Empty.into());
    }
    Ok(Chat {
        api: Api::Responses,
        messages,
        tools: fields.tools.map(body::value).transpose()?.map(tools).transpose()?.flatten(),
        template_kwargs: chat::template_kwargs(fields)?,
        add_generation_prompt: !open,
        continue_final_message: open,
        reasoning_effort: effort(fields)?,
        ..Chat::default()
    })
}

/// Unlike a chat's, the tokens of this API get the special ones that the tokenizer adds, also where the template has
/// written them already.
pub(super) fn token_options(fields: &Fields<'_>) -> Result<TokenOptions, Miss> {
    let reserve = usize::from(!matches!(fields.max_output_tokens.map(RawValue::get), None | Some("0")));
    let truncate = match fields.truncation.map(RawValue::get) {
        None | Some("\"disabled\"") => None,
        Some("\"auto\"" | "null") => Some(Truncate::ToModel { reserve }),
        Some(_) => return Err(Unsupported::Options.into()),
    };
    Ok(TokenOptions { add_special_tokens: Some(true), truncate, truncation_side: None })
}

/// The instructions, which become the first message. Models differ in what they make of empty ones.
fn instructions(fields: &Fields<'_>) -> Result<Option<Message>, Miss> {
    match fields.instructions.map(body::value).transpose()? {
        None => Ok(None),
        Some(Json::Text(text)) if !text.is_empty() => Ok(Some(said("system", text))),
        Some(_) => Err(Unsupported::Options.into()),
    }
}

/// Whether the last item is one of the assistant's that the model goes on with.
fn is_unfinished(item: &Json) -> bool {
    let is_open = matches!(item.get("status").and_then(Json::as_text), Some("in_progress" | "incomplete"));
    is_open && matches!(item.get("type").and_then(Json::as_text), None | Some("message" | "reasoning"))
}

fn convert(item: Json) -> Result<Message, Miss> {
    let mut item = object(item)?;
    match item.take("type") {
        None => message(item),
        Some(Json::Text(kind)) => match kind.as_str() {
            "message" => message(item),
            "function_call" => function_call(item),
            "function_call_output" => output(item),
            "reasoning" => reasoning(item),
            _ => Err(Unsupported::Item.into()),
        },
        Some(_) => Err(Unsupported::Item.into()),
    }
}

fn message(mut item: Object) -> Result<Message, Miss> {
    let Some(Json::Text(role)) = item.take("role") else { return Err(Unsupported::Item.into()) };
    let is_assistant = match role.as_str() {
        "assistant" => true,
        "user" | "system" | "developer" => false,
        _ => return Err(Unsupported::Item.into()),
    };
    let mut content = match item.take("content") {
        Some(Json::Text(text)) => vec![part(text)],
        Some(list @ Json::List(_)) => parts(list)?,
        _ => return Err(Unsupported::Shape.into()),
    };
    // What the assistant is to have said without a part is something else for each kind of model.
    if is_assistant && content.is_empty() {
        return Err(Unsupported::Shape.into());
    }
    if is_assistant {
        // Nothing but its text is kept.
        for part in &mut content {
            part.extra.clear();
        }
        return Ok(Message { role, content, ..Message::default() });
    }
    if role == "developer" && item.has("tools") {
        return Err(Unsupported::Tools.into());
    }
    let (name, task) = (item.take("name").and_then(chat::into_text), item.take("task").and_then(chat::into_text));
    Ok(Message { role, content, name, task, ..Message::default() })
}

/// Parts of text.
fn parts(value: Json) -> Result<Vec<Part>, Miss> {
    let parts = chat::content(Some(value))?;
    let directed = parts.iter().all(|part| part.kind == PartKind::Directed);
    if directed { Ok(parts) } else { Err(Unsupported::Shape.into()) }
}

fn function_call(mut item: Object) -> Result<Message, Miss> {
    let mut text = |key: &str| item.take(key).and_then(chat::into_text).ok_or(Unsupported::Tools);
    let (id, name, arguments) = (text("call_id")?, text("name")?, text("arguments")?);
    if item.has("namespace") {
        return Err(Unsupported::Tools.into());
    }
    let parsed = chat::parsed(&arguments).ok_or(Unsupported::Tools)?;
    let shown = chat::shown_call(id, [("name", Json::Text(name)), ("arguments", parsed)]);
    let calls = Some(vec![ToolCall { shown, arguments }]);
    Ok(Message { role: "assistant".to_owned(), tool_calls: calls, ..Message::default() })
}

fn output(mut item: Object) -> Result<Message, Miss> {
    let id = item.take("call_id").and_then(chat::into_text).ok_or(Unsupported::Tools)?;
    let content = match item.take("output") {
        Some(Json::Text(text)) => vec![part(text)],
        Some(list @ Json::List(_)) => parts(list)?,
        _ => return Err(Unsupported::Tools.into()),
    };
    Ok(Message { role: "tool".to_owned(), content, tool_call_id: Some(Json::Text(id)), ..Message::default() })
}

/// Reasoning with one text. Of several texts, or of a summary alone, models are shown different things.
fn reasoning(mut item: Object) -> Result<Message, Miss> {
    if item.has("encrypted_content") {
        return Err(Unsupported::Item.into());
    }
    let mut list = |key: &str| match item.take(key) {
        None | Some(Json::Null) => Ok(Vec::new()),
        Some(Json::List(list)) => Ok(list),
        Some(_) => Err(Unsupported::Item),
    };
    let (mut content, summary) = (list("content")?, list("summary")?);
    let text = match content.pop() {
        None if summary.is_empty() => String::new(),
        Some(only) if content.is_empty() => {
            let mut only = object(only)?;
            let kind = only.kind()?;
            let text =
                only.take("text").and_then(chat::into_text).filter(|text| kind == "reasoning_text" && !text.is_empty());
            text.ok_or(Unsupported::Item)?
        }
        _ => return Err(Unsupported::Item.into()),
    };
    Ok(Message { role: "assistant".to_owned(), reasoning: Some(text), ..Message::default() })
}

/// The function tools; none where the list is empty.
fn tools(value: Json) -> Result<Option<Vec<Json>>, Miss> {
    let Json::List(list) = value else { return Err(Unsupported::Tools.into()) };
    if list.is_empty() {
        return Ok(None);
    }
    let tools: Option<Vec<Json>> = list.into_iter().map(tool).collect();
    tools.map(Some).ok_or_else(|| Unsupported::Tools.into())
}

fn tool(value: Json) -> Option<Json> {
    let mut tool = object(value).ok()?;
    let kind = tool.kind().ok()?;
    let keys = ["name", "description", "parameters", "strict", "defer_loading"];
    let given = keys.into_iter().filter_map(|key| Some((key.to_owned(), tool.take(key)?)));
    let function = Json::Map(given.collect());
    chat::tool(Json::Map(vec![("type".to_owned(), Json::Text(kind)), ("function".to_owned(), function)]))
}

fn effort(fields: &Fields<'_>) -> Result<Option<String>, Miss> {
    let reasoning = fields.reasoning.map(body::value).transpose()?;
    match reasoning.as_ref().and_then(|reasoning| reasoning.get("effort")) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::Text(effort)) => Ok(Some(effort.clone())),
        Some(_) => Err(Unsupported::Options.into()),
    }
}

fn said(role: &str, text: String) -> Message {
    Message { role: role.to_owned(), content: vec![part(text)], ..Message::default() }
}

fn part(text: String) -> Part {
    Part { text, ..Part::default() }
}

//! The Messages API: its requests as the chats that the engine turns them into.
//!
//! Source: vLLM 0.32.0, `AnthropicServingMessages.to_chat_completion_request`.

use super::body::{self, Fields};
use super::chat::{self, Object, object};
use super::json::Json;
use super::miss::{Miss, NoText, Unsupported};
use super::prompt::{Api, Chat, Message, Part, ToolCall};

/// What begins a block of the system prompt that differs in each request and that the engine leaves out.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// The chat of a request to `/v1/messages`.
pub(super) fn chat(fields: &mut Fields<'_>) -> Result<Chat, Miss> {
    let Json::List(list) = body::long(fields.messages.take().ok_or(NoText::Absent)?)? else {
        return Err(Unsupported::Shape.into());
    };
    let mut messages = Vec::with_capacity(list.len() + 1);
    if let Some(system) = fields.system.map(body::value).transpose()? {
        messages.extend(system_prompt(system)?);
    }
    for message in list {
        convert(message, &mut messages)?;
    }
    if messages.is_empty() {
        return Err(NoText::Empty.into());
    }
    Ok(Chat {
        api: Api::Messages,
        messages,
        tools: fields.tools.map(body::value).transpose()?.map(tools).transpose()?,
        template_kwargs: chat::template_kwargs(fields)?,
        add_generation_prompt: true,
        reasoning_effort: effort(fields)?,
        thinking_off: thinking_off(fields)?,
        ..Chat::default()
    })
}

fn system_prompt(value: Json) -> Result<Option<Message>, Miss> {
    match value {
        Json::Text(text) => Ok(system(text)),
        blocks => Ok(system(system_text(blocks)?)),
    }
}

/// The texts of a system prompt in blocks, without the one that is different each time.
fn system_text(blocks: Json) -> Result<String, Miss> {
    let mut text = String::new();
    for mut block in self::blocks(blocks)? {
        match block.kind()?.as_str() {
            "text" => text.extend(optional_text(&mut block, "text")?.filter(|text| !text.starts_with(BILLING_HEADER))),
            "image" => {}
            // Tools that come and go with the conversation.
            _ => return Err(Unsupported::Shape.into()),
        }
    }
    Ok(text)
}

fn system(text: String) -> Option<Message> {
    (!text.is_empty()).then(|| Message { role: "system".to_owned(), content: vec![part(text)], ..Message::default() })
}

fn convert(value: Json, messages: &mut Vec<Message>) -> Result<(), Miss> {
    let mut fields = object(value)?;
    let Some(Json::Text(role)) = fields.take("role") else { return Err(Unsupported::Shape.into()) };
    let content = fields.take("content").unwrap_or(Json::Null);
    match (role.as_str(), content) {
        ("system", Json::Text(text)) => {
            messages.extend(system(text).filter(|message| !message.content[0].text.starts_with(BILLING_HEADER)));
        }
        ("system", blocks) => messages.extend(system(system_text(blocks)?)),
        ("user" | "assistant", Json::Text(text)) => {
            messages.push(Message { role, content: vec![part(text)], ..Message::default() });
        }
        ("user", blocks) => user(blocks, messages)?,
        ("assistant", blocks) => messages.push(assistant(blocks)?),
        _ => return Err(Unsupported::Shape.into()),
    }
    Ok(())
}

/// A user's blocks: the results of tools become messages of their own, before what the user says.
fn user(blocks: Json, messages: &mut Vec<Message>) -> Result<(), Miss> {
    let mut content = Vec::new();
    for mut block in self::blocks(blocks)? {
        match block.kind()?.as_str() {
            "text" => content.extend(spoken(&mut block)?),
            "tool_result" => messages.push(tool_result(block)?),
            other => return Err(unsupported(other).into()),
        }
    }
    if !content.is_empty() {
        messages.push(Message { role: "user".to_owned(), content, ..Message::default() });
    }
    Ok(())
}

fn assistant(blocks: Json) -> Result<Message, Miss> {
    let mut message = Message { role: "assistant".to_owned(), ..Message::default() };
    for mut block in self::blocks(blocks)? {
        match block.kind()?.as_str() {
            "text" => message.content.extend(spoken(&mut block)?),
            "thinking" => {
                if let Some(thinking) = optional_text(&mut block, "thinking")? {
                    message.reasoning.get_or_insert_default().push_str(&thinking);
                }
            }
            "redacted_thinking" => {}
            "tool_use" => message.tool_calls.get_or_insert_default().push(tool_use(block)?),
            other => return Err(unsupported(other).into()),
        }
    }
    Ok(message)
}

fn unsupported(kind: &str) -> Unsupported {
    match kind {
        "image" => Unsupported::Images,
        "tool_reference" | "tool_use" | "tool_result" => Unsupported::Tools,
        _ => Unsupported::Shape,
    }
}

/// A text block, unless it is empty.
fn spoken(block: &mut Object) -> Result<Option<Part>, Miss> {
    Ok(optional_text(block, "text")?.filter(|text| !text.is_empty()).map(part))
}

fn tool_result(mut block: Object) -> Result<Message, Miss> {
    let text = match block.take("content") {
        None | Some(Json::Null) => String::new(),
        Some(Json::Text(text)) => text,
        Some(items) => {
            let mut texts = Vec::new();
            for mut item in blocks(items)? {
                match item.kind()?.as_str() {
                    "text" => texts.push(required_text(&mut item, "text")?),
                    other => return Err(unsupported(other).into()),
                }
            }
            texts.join("\n")
        }
    };
    let id = optional_text(&mut block, "tool_use_id")?.unwrap_or_default();
    Ok(Message {
        role: "tool".to_owned(),
        content: vec![part(text)],
        tool_call_id: Some(Json::Text(id)),
        ..Message::default()
    })
}

fn tool_use(mut block: Object) -> Result<ToolCall, Miss> {
    // Without an id the engine makes one of the time.
    let id = optional_text(&mut block, "id")?.filter(|id| !id.is_empty()).ok_or(Unsupported::Tools)?;
    let name = optional_text(&mut block, "name")?.unwrap_or_default();
    let input = match block.take("input") {
        None | Some(Json::Null) => Json::Map(Vec::new()),
        Some(input @ Json::Map(_)) => input,
        Some(_) => return Err(Unsupported::Tools.into()),
    };
    let arguments = input.dumps().ok_or(Unsupported::Unreadable)?;
    Ok(ToolCall { shown: chat::shown_call(id, [("arguments", input), ("name", Json::Text(name))]), arguments })
}

fn tools(value: Json) -> Result<Vec<Json>, Miss> {
    let Json::List(list) = value else { return Err(Unsupported::Tools.into()) };
    let tools: Option<Vec<Json>> = list.into_iter().map(tool).collect();
    tools.ok_or_else(|| Unsupported::Tools.into())
}

fn tool(value: Json) -> Option<Json> {
    let mut tool = object(value).ok()?;
    let Some(Json::Map(mut schema)) = tool.take("input_schema") else { return None };
    if schema.iter().all(|(key, _)| key != "type") {
        schema.push(("type".to_owned(), Json::Text("object".to_owned())));
    }
    let keys = ["name", "description", "strict", "defer_loading"];
    let given = keys.into_iter().filter_map(|key| Some((key.to_owned(), tool.take(key)?)));
    let function = given.chain([("parameters".to_owned(), Json::Map(schema))]).collect();
    chat::tool(Json::Map(vec![("function".to_owned(), Json::Map(function))]))
}

fn effort(fields: &Fields<'_>) -> Result<Option<String>, Miss> {
    let config = fields.output_config.map(body::value).transpose()?;
    match config.as_ref().and_then(|config| config.get("effort")) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::Text(effort)) => Ok(Some(effort.clone())),
        Some(_) => Err(Unsupported::Options.into()),
    }
}

fn thinking_off(fields: &Fields<'_>) -> Result<bool, Miss> {
    let thinking = fields.thinking.map(body::value).transpose()?;
    match thinking.as_ref().map(|thinking| thinking.get("type").and_then(Json::as_text)) {
        None | Some(Some("enabled" | "adaptive")) => Ok(false),
        Some(Some("disabled")) => Ok(true),
        Some(_) => Err(Unsupported::Options.into()),
    }
}

fn blocks(value: Json) -> Result<Vec<Object>, Miss> {
    match value {
        Json::List(list) => list.into_iter().map(object).collect(),
        _ => Err(Unsupported::Shape.into()),
    }
}

fn optional_text(block: &mut Object, key: &str) -> Result<Option<String>, Miss> {
    match block.take(key) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::Text(text)) => Ok(Some(text)),
        Some(_) => Err(Unsupported::Shape.into()),
    }
}

fn required_text(block: &mut Object, key: &str) -> Result<String, Miss> {
    match block.take(key) {
        None => Ok(String::new()),
        Some(Json::Text(text)) => Ok(text),
        Some(_) => Err(Unsupported::Shape.into()),
    }
}

fn part(text: String) -> Part {
    Part { text, ..Part::default() }
}

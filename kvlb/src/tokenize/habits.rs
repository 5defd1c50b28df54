//! What an engine finds out about its model's template when it starts, and shows chats accordingly.
//!
//! Source: vLLM 0.32.0, `AnthropicServingMessages` (`_detect_merge_inline_system`, `_probe_disabled_thinking_effort`) and
//! `construct_chat_messages_with_tool_call`.

use std::borrow::Cow;

use super::date::WallTime;
use super::miss::Miss;
use super::template::{SpecialTokens, Template};
use crate::openai::{Api, Chat, Message, Part};

/// The efforts of the Messages API.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// How an engine shows the chats of those APIs that leave it to the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    /// Whether system messages from within a conversation go to its front; `None` where that is not known.
    system_first: Option<bool>,
    /// The effort that stands for no thinking; `None` where that is not known.
    least_effort: Option<&'static str>,
    /// Whether what the assistant did in several items is one message.
    one_message_a_turn: bool,
}

/// A chat as it is shown to one model.
#[derive(Debug)]
pub(super) struct Shown<'c> {
    pub(super) chat: &'c Chat,
    pub(super) messages: Cow<'c, [Message]>,
    pub(super) effort: Option<&'c str>,
}

impl Habits {
    /// With a model that speaks Harmony.
    pub(super) const HARMONY: Self =
        Self { system_first: Some(true), least_effort: Some("low"), one_message_a_turn: false };

    /// With a model that has these templates, the first of them for chats without tools.
    pub(super) fn with(templates: &[&Template], special: &SpecialTokens) -> Self {
        let needs: Option<Vec<bool>> = templates.iter().map(|template| template.needs_system_first()).collect();
        Self {
            system_first: needs.map(|needs| needs.contains(&true)),
            least_effort: templates.first().and_then(|template| least_effort(template, special)),
            one_message_a_turn: true,
        }
    }

    /// `chat` as the engine shows it.
    ///
    /// # Errors
    /// [`Miss`] where that depends on what is not known.
    pub(super) fn show<'c>(&self, chat: &'c Chat) -> Result<Shown<'c>, Miss> {
        let messages = match chat.api {
            Api::Messages if chat.messages.iter().skip(1).any(is_system) => {
                if self.system_first.ok_or(Miss::InlineSystem)? {
                    Cow::Owned(system_first(&chat.messages))
                } else {
                    Cow::Borrowed(chat.messages.as_slice())
                }
            }
            Api::Responses if self.one_message_a_turn => Cow::Owned(one_message_a_turn(&chat.messages)),
            _ => Cow::Borrowed(chat.messages.as_slice()),
        };
        let effort = if chat.thinking_off {
            Some(self.least_effort.ok_or(Miss::Thinking)?)
        } else {
            chat.reasoning_effort.as_deref()
        };
        Ok(Shown { chat, messages, effort })
    }
}

impl<'c> Shown<'c> {
    /// `chat` as it is.
    pub(super) fn plainly(chat: &'c Chat) -> Self {
        Self { chat, messages: Cow::Borrowed(&chat.messages), effort: chat.reasoning_effort.as_deref() }
    }
}

/// `none`, unless the model refuses it or makes the same of it as of an effort that thinks.
fn least_effort(template: &Template, special: &SpecialTokens) -> Option<&'static str> {
    let user = Message {
        role: "user".to_owned(),
        content: vec![Part { text: "Hi".to_owned(), ..Part::default() }],
        ..Message::default()
    };
    let chat = Chat { messages: vec![user], add_generation_prompt: true, ..Chat::default() };
    // The text, if the model does not refuse; `None` where it is not known. Any time will do, as long as it is the same.
    let render = |effort| {
        let shown = Shown { effort: Some(effort), ..Shown::plainly(&chat) };
        match template.render(&shown, special, Some(WallTime::from_seconds(0)), None) {
            Ok(text) => Some(Some(text)),
            Err(Miss::Rejected) => Some(None),
            Err(_unknown) => None,
        }
    };
    let Some(none) = render("none")? else { return Some("low") };
    for effort in EFFORTS {
        if render(effort)?.as_ref() == Some(&none) {
            return Some("low");
        }
    }
    Some("none")
}

fn is_system(message: &Message) -> bool {
    message.role == "system"
}

/// The texts of all system messages as one message at the front, with nothing between them.
fn system_first(messages: &[Message]) -> Vec<Message> {
    let texts = messages.iter().filter(|message| is_system(message)).flat_map(|message| &message.content);
    let text = texts.map(|part| part.text.as_str()).collect();
    let system =
        Message { role: "system".to_owned(), content: vec![Part { text, ..Part::default() }], ..Message::default() };
    std::iter::once(system).chain(messages.iter().filter(|message| !is_system(message)).cloned()).collect()
}

/// Reasoning, words and calls of the assistant that follow each other as one message, while each is its first.
fn one_message_a_turn(messages: &[Message]) -> Vec<Message> {
    let mut turns: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        if message.role != "assistant" {
            turns.push(message.clone());
            continue;
        }
        let last = turns.last_mut().filter(|last| last.role == "assistant");
        if let Some(last) = last
            && joins(last, message)
        {
            continue;
        }
        let mut turn = message.clone();
        // Of several parts the engine takes the first.
        turn.content.truncate(1);
        turns.push(turn);
    }
    turns
}

/// Adds `item` to the message before it, where there is room for it.
fn joins(last: &mut Message, item: &Message) -> bool {
    if let Some(calls) = &item.tool_calls {
        last.tool_calls.get_or_insert_default().extend_from_slice(calls);
        return true;
    }
    if item.reasoning.is_some() {
        let free = last.reasoning.is_none();
        if free {
            last.reasoning.clone_from(&item.reasoning);
        }
        return free;
    }
    let free = last.content.is_empty();
    if free {
        last.content.extend(item.content.first().cloned());
    }
    free
}

//! The messages of a chat as the engine shows them to a template.
//!
//! Source: vLLM 0.32.0, `_parse_chat_message_content`, `_convert_developer_to_system`, `_consolidate_system_messages`.

use std::borrow::Cow;

use minijinja::Value;

use super::syntax::ContentFormat;
use super::value::{self, Dict};
use crate::openai::{Json, Message, Part, PartKind};

/// One message on its way into a template.
#[derive(Debug)]
pub(super) struct Turn<'m> {
    role: &'m str,
    content: Content<'m>,
    /// The message this turn is made of; none for a merged one.
    message: Option<&'m Message>,
}

#[derive(Debug)]
enum Content<'m> {
    Text(Cow<'m, str>),
    Parts(Vec<ShownPart<'m>>),
}

/// A part's text, and its keys that no API knows.
type ShownPart<'m> = (Cow<'m, str>, &'m [(String, Json)]);

/// The turns of `messages` in the form that the template takes.
///
/// A template that does not know developers gets their messages as the system's, and all of those as one at the front.
pub(super) fn turns(messages: &[Message], format: ContentFormat, knows_developers: bool) -> Vec<Turn<'_>> {
    let mut turns: Vec<Turn<'_>> = messages.iter().map(|message| Turn::new(message, format)).collect();
    if !knows_developers && turns.iter().any(|turn| turn.role == "developer") {
        for turn in turns.iter_mut().filter(|turn| turn.role == "developer") {
            turn.role = "system";
        }
        return one_system_turn(turns);
    }
    turns
}

/// Merges the system's turns into one at the front, unless the only one is there already.
fn one_system_turn(turns: Vec<Turn<'_>>) -> Vec<Turn<'_>> {
    if turns.iter().skip(1).all(|turn| turn.role != "system") {
        return turns;
    }
    let (system, mut rest): (Vec<_>, Vec<_>) = turns.into_iter().partition(|turn| turn.role == "system");
    let texts: Vec<_> = system.iter().map(Turn::text).filter(|text| !text.is_empty()).collect();
    rest.insert(0, Turn { role: "system", content: Content::Text(texts.join("\n\n").into()), message: None });
    rest
}

impl<'m> Turn<'m> {
    fn new(message: &'m Message, format: ContentFormat) -> Self {
        let parts: Vec<ShownPart<'m>> = message.content.iter().filter_map(|part| shown(&message.role, part)).collect();
        let texts = || parts.iter().map(|(text, _)| &**text);
        let content = match format {
            // Parts without text do not count here.
            ContentFormat::Text => Content::Text(joined(&parts, texts().filter(|text| !text.is_empty()))),
            // Most templates that take parts still want plain text from a tool.
            ContentFormat::Parts if message.role == "tool" => Content::Text(joined(&parts, texts())),
            ContentFormat::Parts => Content::Parts(parts),
        };
        Self { role: &message.role, content, message: Some(message) }
    }

    /// The content as one text.
    fn text(&self) -> Cow<'_, str> {
        match &self.content {
            Content::Text(text) => Cow::Borrowed(text),
            Content::Parts(parts) => parts.iter().map(|(text, _)| &**text).collect::<Vec<_>>().join("\n").into(),
        }
    }

    /// Appends `mark` to the last text of the turn and gives that text back as it was; `None` where there is none.
    pub(super) fn mark_end(&mut self, mark: &str) -> Option<String> {
        let text = match &mut self.content {
            Content::Text(text) => text,
            Content::Parts(parts) => &mut parts.last_mut()?.0,
        };
        let before = text.to_string();
        text.to_mut().push_str(mark);
        Some(before)
    }

    /// The texts of the content, where it is in the form that a template takes.
    pub(super) fn texts(&mut self, format: ContentFormat) -> impl Iterator<Item = &mut Cow<'m, str>> {
        let (text, parts) = match (&mut self.content, format) {
            (Content::Text(text), ContentFormat::Text) => (Some(text), None),
            (Content::Parts(parts), ContentFormat::Parts) => (None, Some(parts)),
            _ => (None, None),
        };
        text.into_iter().chain(parts.into_iter().flatten().map(|(text, _)| text))
    }

    /// The turn as a template sees it; `None` where a number in it has no exact form.
    pub(super) fn value(&self) -> Option<Value> {
        let mut dict = Dict::default();
        dict.push("role", self.role);
        dict.push("content", self.content.value()?);
        if let Some(message) = self.message {
            push_rest(&mut dict, self.role, message)?;
        }
        Some(dict.into())
    }
}

fn push_rest(dict: &mut Dict, role: &str, message: &Message) -> Option<()> {
    if let Some(calls) = &message.tool_calls {
        dict.push(
            "tool_calls",
            value::list(calls.iter().map(|call| value::value(&call.shown)).collect::<Option<_>>()?),
        );
    }
    if let Some(reasoning) = &message.reasoning {
        dict.push("reasoning", reasoning.as_str());
        dict.push("reasoning_content", reasoning.as_str());
    }
    if let Some(id) = &message.tool_call_id {
        dict.push("tool_call_id", value::value(id)?);
    }
    if let Some(name) = &message.name {
        dict.push("name", name.as_str());
    }
    if let Some(task) = &message.task {
        dict.push("task", task.as_str());
    }
    if role == "developer" {
        dict.push("tools", ());
    }
    Some(())
}

impl Content<'_> {
    fn value(&self) -> Option<Value> {
        match self {
            Self::Text(text) => Some(Value::from(&**text)),
            Self::Parts(parts) => parts.iter().map(part_value).collect::<Option<_>>().map(value::list),
        }
    }
}

fn part_value((text, extra): &ShownPart<'_>) -> Option<Value> {
    let mut dict = Dict::default();
    dict.push("type", "text");
    dict.push("text", &**text);
    for (key, item) in *extra {
        dict.push(key, value::value(item)?);
    }
    Some(dict.into())
}

/// A line that some clients put first into their system prompt, different in each request. The engine drops it.
///
/// Source: vLLM 0.32.0, `_parse_chat_message_content`.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// A part as it is shown; nothing where the billing line was all there is.
fn shown<'m>(role: &str, part: &'m Part) -> Option<ShownPart<'m>> {
    if role != "system" || part.kind != PartKind::Text || !part.text.starts_with(BILLING_HEADER) {
        return Some((Cow::from(&part.text), &part.extra));
    }
    let (_header, rest) = part.text.split_once('\n')?;
    (!rest.is_empty()).then(|| (Cow::from(rest), part.extra.as_slice()))
}

/// The texts with a newline between them; a single part is not copied.
fn joined<'m, 't>(parts: &[ShownPart<'m>], texts: impl Iterator<Item = &'t str>) -> Cow<'m, str> {
    match parts {
        [(only, _)] => only.clone(),
        _ => texts.collect::<Vec<_>>().join("\n").into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, parts: &[&str]) -> Message {
        let content = parts.iter().map(|text| Part { text: (*text).into(), ..Part::default() }).collect();
        Message { role: role.into(), content, ..Message::default() }
    }

    fn texts(turns: &[Turn<'_>]) -> Vec<(String, String)> {
        turns.iter().map(|turn| (turn.role.to_owned(), turn.text().into_owned())).collect()
    }

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(role, text)| ((*role).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn parts_are_joined_by_one_newline_and_empty_ones_do_not_count() {
        let messages = [message("user", &["a", "", "b"]), message("user", &[])];
        assert_eq!(texts(&turns(&messages, ContentFormat::Text, false)), pairs(&[("user", "a\nb"), ("user", "")]));
    }

    #[test]
    fn a_tool_s_parts_are_text_even_where_parts_are_taken() {
        let messages = [message("tool", &["a", "b"])];
        let turns = turns(&messages, ContentFormat::Parts, false);
        assert_eq!(turns[0].value().unwrap().get_attr("content").unwrap().as_str(), Some("a\nb"));
    }

    #[test]
    fn developers_become_the_system_at_the_front_of_a_template_that_does_not_know_them() {
        let messages = [message("system", &["a"]), message("user", &["b"]), message("developer", &["c"])];
        let merged = turns(&messages, ContentFormat::Text, false);
        assert_eq!(texts(&merged), pairs(&[("system", "a\n\nc"), ("user", "b")]));
        let kept = turns(&messages, ContentFormat::Text, true);
        assert_eq!(texts(&kept), pairs(&[("system", "a"), ("user", "b"), ("developer", "c")]));
        let first = [message("developer", &["c"]), message("user", &["b"])];
        assert_eq!(texts(&turns(&first, ContentFormat::Text, false)), pairs(&[("system", "c"), ("user", "b")]));
    }

    #[test]
    fn system_turns_alone_stay_where_they_are() {
        let messages = [message("system", &["a"]), message("system", &["b"])];
        assert_eq!(turns(&messages, ContentFormat::Text, false).len(), 2);
    }

    #[test]
    fn the_billing_line_of_a_system_prompt_is_dropped() {
        let header = "x-anthropic-billing-header: cch=1";
        let (alone, before) = (header.to_owned(), format!("{header}\nrest"));
        let messages = [message("system", &[&before]), message("system", &[&alone]), message("user", &[&alone])];
        let shown = texts(&turns(&messages, ContentFormat::Text, false));
        assert_eq!(shown, pairs(&[("system", "rest"), ("system", ""), ("user", header)]));
        assert!(
            matches!(&turns(&messages, ContentFormat::Parts, false)[1].content, Content::Parts(parts) if parts.is_empty())
        );
    }
}

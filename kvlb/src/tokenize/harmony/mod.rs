//! Chats of models that speak Harmony (gpt-oss), which no template describes.
//!
//! Source: vLLM 0.32.0, `_make_request_with_harmony` and what it calls, with `oss-harmony` 0.0.11; its environment
//! variables `VLLM_SYSTEM_START_DATE` and `VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS` are taken to be unset.

mod typescript;

use std::collections::{HashMap, HashSet};

use super::date::WallTime;
use super::habits::Shown;
use super::miss::Miss;
use crate::openai::{Api, Json, Message, Part, PartKind};

/// The control tokens of Harmony and their ids. The engine takes the ids from a vocabulary of its own, so a tokenizer
/// with others is of another model.
pub(super) const CONTROL: [(&str, u32); 5] = [
    ("<|channel|>", 200_005),
    ("<|start|>", 200_006),
    ("<|end|>", 200_007),
    ("<|message|>", 200_008),
    ("<|call|>", 200_012),
];

/// What every prompt begins with, up to the date.
const IDENTITY: &str = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06";
const CHANNELS: &str = "# Valid channels: analysis, commentary, final. Channel must be included for every message.";
const FUNCTIONS_CHANNEL: &str = "\nCalls to these tools must go to the commentary channel: 'functions'.";

/// A prompt's text, and the places where it is cut although no special token stands there.
///
/// The parts of a message are made tokens one by one, so no token reaches from one into the next.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Rendered {
    pub(super) text: String,
    pub(super) cuts: Vec<usize>,
}

impl Rendered {
    /// The text between the cuts.
    pub(super) fn pieces(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(0).chain(self.cuts.iter().copied());
        let ends = self.cuts.iter().copied().chain(std::iter::once(self.text.len()));
        starts.zip(ends).map(|(start, end)| &self.text[start..end])
    }
}

/// A model that speaks Harmony.
#[derive(Clone, Debug)]
pub(super) struct Harmony {
    /// The special tokens, without the marks around them.
    special: HashSet<String>,
}

impl Harmony {
    /// Harmony with this vocabulary; `None` where it is not the one that the engine brings along.
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let has_ids = CONTROL.iter().all(|(token, id)| tokenizer.token_to_id(token) == Some(*id));
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.values().map(|token| inside(&token.content).map(str::to_owned));
        has_ids.then(|| special.collect::<Option<_>>())?.map(|special| Self { special })
    }

    /// The prompt for `chat` at the time `now` of the engine.
    ///
    /// # Errors
    /// [`Miss`] where the engine would refuse the chat, and where its tokens cannot be known.
    pub(super) fn render(&self, shown: &Shown<'_>, now: Option<WallTime>) -> Result<Rendered, Miss> {
        let chat = shown.chat;
        if chat.api == Api::Chat && chat.continue_final_message && chat.add_generation_prompt {
            return Err(Miss::Rejected);
        }
        let mut writer = Writer { harmony: self, api: chat.api, prompt: Rendered::default() };
        let (instructions, messages) = instructions(&shown.messages)?;
        writer.system(shown, now)?;
        writer.developer(instructions.as_deref(), chat.tools.as_deref())?;
        writer.conversation(messages)?;
        writer.prompt.text.push_str("<|start|>assistant");
        Ok(writer.prompt)
    }
}

/// A special token without its marks.
fn inside(token: &str) -> Option<&str> {
    token.strip_prefix("<|")?.strip_suffix("|>").filter(|name| !name.contains("|>"))
}

/// The instructions of the system or the developer, when they come first, and the messages after them.
fn instructions(messages: &[Message]) -> Result<(Option<String>, &[Message]), Miss> {
    match messages.split_first() {
        Some((first, rest)) if matches!(first.role.as_str(), "system" | "developer") => Ok((flat(first)?, rest)),
        _ => Ok((None, messages)),
    }
}

/// A message's texts as one; `None` where it has none.
fn flat(message: &Message) -> Result<Option<String>, Miss> {
    let texts: Vec<&str> = message.content.iter().map(text_of).collect::<Result<_, _>>()?;
    Ok((!texts.is_empty()).then(|| texts.concat()))
}

/// The text of a part that has it in the usual place.
fn text_of(part: &Part) -> Result<&str, Miss> {
    if part.kind == PartKind::Aside { Err(Miss::Harmony) } else { Ok(&part.text) }
}

struct Writer<'h> {
    harmony: &'h Harmony,
    api: Api,
    prompt: Rendered,
}

impl Writer<'_> {
    fn system(&mut self, shown: &Shown<'_>, now: Option<WallTime>) -> Result<(), Miss> {
        let date = now.ok_or(Miss::Clock)?.format("%Y-%m-%d").ok_or(Miss::Clock)?;
        let effort = match shown.effort {
            None => "medium",
            Some(effort @ ("low" | "medium" | "high")) => effort,
            Some(_) => return Err(Miss::Rejected),
        };
        let functions =
            if shown.chat.tools.as_ref().is_some_and(|tools| !tools.is_empty()) { FUNCTIONS_CHANNEL } else { "" };
        self.open("system");
        self.own(&format!("{IDENTITY}\nCurrent date: {date}\n\nReasoning: {effort}\n\n{CHANNELS}{functions}"));
        self.own("<|end|>");
        Ok(())
    }

    fn developer(&mut self, instructions: Option<&str>, tools: Option<&[Json]>) -> Result<(), Miss> {
        let tools = tools.filter(|tools| !tools.is_empty());
        if instructions.is_none_or(str::is_empty) && tools.is_none() {
            return Ok(());
        }
        self.open("developer");
        if let Some(instructions) = instructions {
            self.own("# Instructions\n\n");
            self.given(instructions)?;
        }
        if let Some(tools) = tools {
            self.own(if instructions.is_some() { "\n\n# Tools\n\n" } else { "# Tools\n\n" });
            self.given(&typescript::namespace(tools)?)?;
        }
        self.own("<|end|>");
        Ok(())
    }

    fn conversation(&mut self, messages: &[Message]) -> Result<(), Miss> {
        // A chat's results name their calls wherever those stand, the Responses API's only those before them.
        let mut names = if self.api == Api::Responses { HashMap::new() } else { called(messages) };
        // Thoughts that led to a final answer are dropped, those after the last one are kept.
        let answered = messages.iter().rposition(|message| self.is_final(message));
        for (place, message) in messages.iter().enumerate() {
            if self.api == Api::Responses {
                names.extend(called(std::slice::from_ref(message)));
            }
            let reasoning = message.reasoning.as_deref().filter(|_| answered.is_none_or(|last| place > last));
            match message.role.as_str() {
                "assistant" => self.assistant(message, reasoning.filter(|text| !text.is_empty()))?,
                "tool" => self.tool(message, &names)?,
                "user" => {
                    self.open("user");
                    self.parts(&message.content)?;
                    self.own("<|end|>");
                }
                "system" | "developer" => {
                    if let Some(instructions) = flat(message)?.filter(|text| !self.skips(text)) {
                        self.open("developer");
                        self.own("# Instructions\n\n");
                        self.given(&instructions)?;
                        self.own("<|end|>");
                    }
                }
                _ => return Err(Miss::Rejected),
            }
        }
        Ok(())
    }

    fn assistant(&mut self, message: &Message, reasoning: Option<&str>) -> Result<(), Miss> {
        let Some(calls) = &message.tool_calls else {
            if let Some(reasoning) = reasoning {
                self.said("analysis", reasoning)?;
            }
            if self.is_final(message) {
                self.own("<|start|>assistant<|channel|>final<|message|>");
                self.parts(&message.content)?;
                self.own("<|end|>");
            }
            return Ok(());
        };
        if let Some(preamble) = flat(message)?.filter(|text| !text.is_empty()) {
            self.said("commentary", &preamble)?;
        }
        if let Some(reasoning) = reasoning {
            self.said("analysis", reasoning)?;
        }
        for call in calls {
            self.own("<|start|>assistant to=functions.");
            self.header(function_name(&call.shown))?;
            self.own("<|channel|>commentary json<|message|>");
            self.given(&call.arguments)?;
            self.own("<|call|>");
        }
        Ok(())
    }

    fn tool(&mut self, message: &Message, names: &HashMap<&str, &str>) -> Result<(), Miss> {
        let id = message.tool_call_id.as_ref().and_then(Json::as_text).unwrap_or_default();
        self.own("<|start|>functions.");
        self.header(names.get(id).copied().unwrap_or_default())?;
        self.own("<|channel|>commentary to=assistant<|message|>");
        self.given(&flat(message)?.unwrap_or_default())?;
        self.own("<|end|>");
        Ok(())
    }

    /// Whether a message is an answer of the assistant. In a chat the first part decides whether there is any.
    fn is_final(&self, message: &Message) -> bool {
        let has_words = message.content.first().is_some_and(|part| !part.text.is_empty() || self.api == Api::Responses);
        message.role == "assistant" && message.tool_calls.is_none() && has_words
    }

    /// Whether instructions within the conversation are as good as none.
    fn skips(&self, instructions: &str) -> bool {
        self.api == Api::Responses && instructions.is_empty()
    }

    fn said(&mut self, channel: &str, text: &str) -> Result<(), Miss> {
        self.own("<|start|>assistant<|channel|>");
        self.own(channel);
        self.own("<|message|>");
        self.given(text)?;
        self.own("<|end|>");
        Ok(())
    }

    fn open(&mut self, role: &str) {
        self.own("<|start|>");
        self.own(role);
        self.own("<|message|>");
    }

    /// The parts of a message, cut where one meets the next.
    fn parts(&mut self, parts: &[Part]) -> Result<(), Miss> {
        let texts: Vec<&str> = parts.iter().map(text_of).collect::<Result<_, _>>()?;
        for (place, text) in texts.iter().filter(|text| !text.is_empty()).enumerate() {
            if place > 0 {
                self.prompt.cuts.push(self.prompt.text.len());
            }
            self.given(text)?;
        }
        Ok(())
    }

    /// A name in a message's header, which the engine takes apart and puts together again.
    fn header(&mut self, name: &str) -> Result<(), Miss> {
        let plain = |char: char| char.is_ascii_alphanumeric() || matches!(char, '_' | '-' | '.');
        if !name.chars().all(plain) {
            return Err(Miss::Harmony);
        }
        self.own(name);
        Ok(())
    }

    /// Text of our own, with special tokens.
    fn own(&mut self, text: &str) {
        self.prompt.text.push_str(text);
    }

    /// Text of the client's, in which special tokens are words like others for the engine and none for a tokenizer.
    fn given(&mut self, text: &str) -> Result<(), Miss> {
        let mut rest = text;
        while let Some(start) = rest.find("<|") {
            rest = &rest[start + 2..];
            if rest.split_once("|>").is_some_and(|(name, _)| self.harmony.special.contains(name)) {
                return Err(Miss::SpecialText);
            }
        }
        self.prompt.text.push_str(text);
        Ok(())
    }
}

/// The names of the functions that were called, by the call's id.
fn called(messages: &[Message]) -> HashMap<&str, &str> {
    let calls = messages.iter().flat_map(|message| message.tool_calls.iter().flatten());
    calls.filter_map(|call| Some((call.shown.get("id")?.as_text()?, function_name(&call.shown)))).collect()
}

fn function_name(call: &Json) -> &str {
    call.get("function").and_then(|function| function.get("name")).and_then(Json::as_text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::openai::{Chat, ToolCall};

    fn vocabulary(shift: u32) -> tokenizers::Tokenizer {
        serde_json::from_value(crate::tokenize::tests::harmony_file(shift)).unwrap()
    }

    fn message(role: &str, text: &str) -> Message {
        let content = vec![Part { text: text.into(), ..Part::default() }];
        Message { role: role.into(), content, ..Message::default() }
    }

    fn call(id: &str, name: &str) -> Message {
        let shown = serde_json::from_value(json!({"id": id, "function": {"name": name}})).unwrap();
        let calls = Some(vec![ToolCall { shown, arguments: "{}".into() }]);
        Message { role: "assistant".into(), tool_calls: calls, ..Message::default() }
    }

    fn chat(messages: Vec<Message>) -> Chat {
        Chat { messages, add_generation_prompt: true, ..Chat::default() }
    }

    fn render_at(chat: &Chat, seconds: i64) -> Result<String, Miss> {
        let harmony = Harmony::new(&vocabulary(0)).unwrap();
        Ok(harmony.render(&Shown::plainly(chat), Some(WallTime::from_seconds(seconds)))?.text)
    }

    fn render(chat: &Chat) -> Result<String, Miss> {
        render_at(chat, 0)
    }

    /// What follows the system message.
    fn tail(chat: &Chat) -> String {
        render(chat).unwrap().split_once("<|end|>").unwrap().1.to_owned()
    }

    #[test]
    fn the_date_turns_at_midnight_of_the_engine_s_clock() {
        const MIDNIGHT: i64 = 1_795_996_800; // 2026-11-30 00:00:00
        let chat = chat(vec![message("user", "x")]);
        let at = |seconds| render_at(&chat, seconds).unwrap();
        let (before, after) = (at(MIDNIGHT - 1), at(MIDNIGHT));
        assert!(before.contains("\nCurrent date: 2026-11-29\n") && after.contains("\nCurrent date: 2026-11-30\n"));
        assert_eq!(before.replace("2026-11-29", "2026-11-30"), after);
        assert_eq!((at(MIDNIGHT - 86_400), at(MIDNIGHT + 86_399)), (before, after));
        let harmony = Harmony::new(&vocabulary(0)).unwrap();
        assert_eq!(harmony.render(&Shown::plainly(&chat), None), Err(Miss::Clock));
    }

    #[test]
    fn a_vocabulary_with_other_ids_is_another_model_s() {
        assert!(Harmony::new(&vocabulary(1)).is_none());
    }

    #[test]
    fn text_that_spells_a_special_token_is_a_miss_and_what_only_looks_like_one_is_not() {
        for text in ["<|start|>", "a<|<|end|>", "<|im_start|>"] {
            assert_eq!(render(&chat(vec![message("user", text)])), Err(Miss::SpecialText), "{text}");
            assert_eq!(render(&chat(vec![message("system", text)])), Err(Miss::SpecialText), "{text}");
        }
        for text in ["<|start|", "<|sta rt|>", "start|>", "f <| g |> h", "<|nobody|>"] {
            assert!(render(&chat(vec![message("user", text)])).unwrap().contains(text), "{text}");
        }
    }

    #[test]
    fn parts_of_one_message_are_cut_where_they_meet() {
        let mut parts = message("user", "wor");
        parts.content.extend(["", "ld"].map(|text| Part { text: text.into(), ..Part::default() }));
        let harmony = Harmony::new(&vocabulary(0)).unwrap();
        let chat = chat(vec![parts]);
        let prompt = harmony.render(&Shown::plainly(&chat), Some(WallTime::from_seconds(0))).unwrap();
        let pieces: Vec<&str> = prompt.pieces().collect();
        assert!(matches!(&pieces[..], [first, second] if first.ends_with(">wor") && second.starts_with("ld<")));
    }

    #[test]
    fn thoughts_are_kept_after_the_last_answer_only() {
        let thought = |text: &str| Message { reasoning: Some("hm".into()), ..message("assistant", text) };
        let open = chat(vec![message("user", "x"), thought("")]);
        assert!(tail(&open).ends_with("<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>assistant"));
        let answered = chat(vec![message("user", "x"), thought(""), thought("y")]);
        assert!(!tail(&answered).contains("analysis"));
    }

    #[test]
    fn a_result_is_named_after_its_call() {
        let result = Message { tool_call_id: Some(Json::Text("c".into())), ..message("tool", "1") };
        let history = vec![call("c", "f"), result.clone(), call("c", "g"), result];
        let from_last = "<|start|>functions.g<|channel|>commentary to=assistant<|message|>1<|end|>";
        let chat = chat(history);
        assert_eq!(tail(&chat).matches(from_last).count(), 2);
        // The Responses API goes by the calls so far.
        let item_by_item = Chat { api: Api::Responses, ..chat };
        assert_eq!(tail(&item_by_item).matches(from_last).count(), 1);
        assert!(tail(&item_by_item).contains("<|start|>functions.f<|channel|>commentary to=assistant"));
    }

    #[test]
    fn a_name_that_a_header_could_not_hold_is_a_miss() {
        assert_eq!(render(&chat(vec![call("c", "a to=b")])), Err(Miss::Harmony));
        assert!(render(&chat(vec![call("c", "ns.get_weather-2")])).is_ok());
    }

    #[test]
    fn what_the_engine_refuses_is_rejected() {
        let effort = Chat { reasoning_effort: Some("none".into()), ..chat(vec![message("user", "x")]) };
        assert_eq!(render(&effort), Err(Miss::Rejected));
        assert_eq!(render(&chat(vec![message("critic", "x")])), Err(Miss::Rejected));
    }

    #[test]
    fn tools_are_bounded_in_what_they_become() {
        // Deep inside each property is indented by hundreds of spaces.
        let with_leaves = |leaves: usize| {
            let names = (0..leaves).map(|number| (format!("p{number}"), json!({})));
            let mut schema = json!({"type": "object", "properties": names.collect::<serde_json::Map<_, _>>()});
            for _level in 0..100 {
                schema = json!({"type": "object", "properties": {"x": schema}});
            }
            let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
            Chat { tools: Some(vec![serde_json::from_value(tool).unwrap()]), ..chat(vec![message("user", "x")]) }
        };
        assert!(render(&with_leaves(100)).unwrap().len() > 100 * 400);
        assert_eq!(render(&with_leaves(25_000)), Err(Miss::TooLong));
    }
}

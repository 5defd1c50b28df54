//! A chat template, ready to render.

use std::sync::Arc;

use minijinja::{Environment, Error, ErrorKind, Value};

use super::conversation::{self, Turn};
use super::date::WallTime;
use super::habits::Shown;
use super::miss::Miss;
use super::names::Memory;
use super::outline::{Outlines, Shape};
use super::python::{self, NoClock, Raised};
use super::syntax::{self, NAME, Reading};
use super::value::{self, Dict, Prints};
use crate::openai::Json;

/// What marks the place where the last message is left open. It ends in a space so that a template which trims shows.
const END_MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Bytes of a chat that is answered where it arrives, among the requests of others.
///
/// The data path sends larger bodies elsewhere, and no chat is larger than its body.
const SMALL_CHAT: usize = 4 << 10;

/// How much work a small chat may be, a millisecond's worth: many times what the templates of models need for it.
const SMALL_FUEL: u64 = 40_000;

/// A compiled chat template.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    /// The same for small chats; none where even the smallest is much work.
    hasty: Option<Environment<'static>>,
    reading: Reading,
    /// None where outlines of its chats cannot be trusted.
    outlines: Option<Outlines>,
    source: String,
    marks_generation: bool,
    /// Whether it names the role `developer`.
    knows_developers: bool,
}

/// The named special tokens of a tokenizer, as a template sees them: `bos_token` and its like.
#[derive(Clone, Debug, Default)]
pub(super) struct SpecialTokens {
    /// Names and texts, in the order of transformers.
    pub(super) named: Vec<(String, String)>,
    /// Some of them may be in a file that was not handed in.
    pub(super) incomplete: bool,
}

impl Template {
    /// Compiles `source`.
    ///
    /// # Errors
    /// The template engine's own, when it is not a template.
    pub(super) fn new(source: &str) -> Result<Self, Error> {
        let given = source.replace("\r\n", "\n").replace('\r', "\n");
        let source = without_generation_tags(&given);
        let marks_generation = source != given;
        let (reading, outlines) = syntax::read(&source)?;
        let environment = |fuel| {
            let mut environment = python::environment(fuel);
            environment.add_template_owned(NAME, reading.source.clone())?;
            Ok::<_, Error>(environment)
        };
        let (environment, hasty) = (environment(python::FUEL)?, Some(environment(SMALL_FUEL)?));
        let knows_developers = source.contains("\"developer\"") || source.contains("'developer'");
        let mut template = Self { environment, hasty, reading, outlines, source, marks_generation, knows_developers };
        if template.fill(smallest_chat(), None, true) == Err(Miss::Work) {
            template.hasty = None;
        }
        Ok(template)
    }

    /// Whether even the smallest chat is so much work that it had better be done aside.
    pub(super) fn is_heavy(&self) -> bool {
        self.hasty.is_none()
    }

    /// Why this template's renderings cannot be trusted to be the engine's, if so.
    pub(super) fn doubt(&self, special: &SpecialTokens) -> Option<&'static str> {
        let names_special = || ["bos_token", "eos_token"].iter().any(|name| self.source.contains(name));
        self.reading.doubt.or_else(|| (special.incomplete && names_special()).then_some("special tokens are not known"))
    }

    /// Whether chats of one shape have their outline in common.
    pub(super) fn has_outlines(&self) -> bool {
        self.outlines.is_some()
    }

    /// The prompt's text for `chat`, with the help of what `memory` has of others.
    ///
    /// # Errors
    /// [`Miss`] where the engine would refuse the chat, and where its text cannot be known.
    pub(super) fn render(
        &self,
        shown: &Shown<'_>,
        special: &SpecialTokens,
        now: Option<WallTime>,
        memory: Option<&dyn Memory>,
    ) -> Result<String, Miss> {
        let chat = shown.chat;
        if chat.continue_final_message && chat.add_generation_prompt {
            return Err(Miss::Rejected);
        }
        let mut turns = conversation::turns(&shown.messages, self.reading.format, self.knows_developers);
        if let (Some(outlines), Some(memory), false) = (&self.outlines, memory, chat.continue_final_message) {
            return self.render_by_outline(outlines, memory, &mut turns, shown, special, now);
        }
        let open = if chat.continue_final_message { Some(open_end(&mut turns)?) } else { None };
        let text = self.fill(variables(shown, &turns, special)?, now, is_small(shown))?;
        match open {
            Some(last) if self.source.contains("content") => cut(text, &last),
            Some(_) => Err(Miss::Rejected),
            None => Ok(text),
        }
    }

    /// Puts the texts into an outline, or makes one where the shape of the chat comes again.
    fn render_by_outline(
        &self,
        outlines: &Outlines,
        memory: &dyn Memory,
        turns: &mut [Turn<'_>],
        shown: &Shown<'_>,
        special: &SpecialTokens,
        now: Option<WallTime>,
    ) -> Result<String, Miss> {
        let hidden = outlines.hide(turns);
        let marked = variables(shown, turns, special)?;
        let key = if hidden.is_empty() { None } else { outlines.key(&marked, now, memory.seed()) };
        let shape = key.and_then(|key| memory.shape(key));
        if let Some(text) = shape.as_ref().and_then(|shape| shape.filled(&hidden)) {
            return Ok(text);
        }
        outlines.show(turns, &hidden);
        let small = is_small(shown);
        let text = self.fill(variables(shown, turns, special)?, now, small)?;
        let shape = match shape {
            None => Shape::met(),
            Some(shape) if shape.is_to_be_outlined() => {
                let (marked, prints) = self.watched(marked, now, small);
                let marked = marked.ok().filter(|_| prints == Prints::default());
                Shape::outlined(marked.as_deref(), &hidden, &text)
            }
            Some(_) => return Ok(text),
        };
        if let Some(key) = key {
            memory.keep_shape(key, Arc::new(shape));
        }
        Ok(text)
    }

    /// Whether the template refuses a system message that does not come first; `None` where that is not known.
    ///
    /// The engine asks that of Jinja2 without any of the functions and variables that templates get from it, so a template
    /// that uses one of them refuses as well.
    pub(super) fn needs_system_first(&self) -> Option<bool> {
        if self.marks_generation {
            return Some(true);
        }
        match self.outcome(smallest_chat(), false) {
            Ok(_text) => Some(false),
            Err(error) if is_of_undefined(&error) => Some(true),
            Err(error) => matches!(why(&error), Miss::Rejected | Miss::Clock).then_some(true),
        }
    }

    fn fill(&self, variables: Dict, now: Option<WallTime>, small: bool) -> Result<String, Miss> {
        match self.watched(variables, now, small) {
            (Ok(_), Prints { unknown: true, .. }) => Err(Miss::Template),
            (outcome, _) => outcome.map_err(|error| why(&error)),
        }
    }

    fn watched(&self, mut variables: Dict, now: Option<WallTime>, small: bool) -> (Result<String, Error>, Prints) {
        if let Some(now) = now {
            variables.set(python::NOW, Value::from(now.seconds()));
        }
        value::watching_prints(|| self.outcome(variables, small))
    }

    fn outcome(&self, variables: Dict, small: bool) -> Result<String, Error> {
        let environment = self.hasty.as_ref().filter(|_| small).unwrap_or(&self.environment);
        environment.get_template(NAME)?.render(Value::from(variables))
    }
}

/// What a template is tried with: a system message at the front, and another within the conversation.
fn smallest_chat() -> Dict {
    let turns = ["system", "user", "system", "user"].map(|role| {
        let mut turn = Dict::default();
        turn.push("role", role);
        turn.push("content", "t");
        turn.into()
    });
    let mut variables = Dict::default();
    variables.push("messages", value::list(turns.to_vec()));
    variables.push("add_generation_prompt", false);
    variables
}

/// Whether a chat has at most [`SMALL_CHAT`] bytes.
fn is_small(shown: &Shown<'_>) -> bool {
    let mut left = SMALL_CHAT;
    let mut fits = |bytes: usize| left.checked_sub(bytes).inspect(|rest| left = *rest).is_some();
    let chat = shown.chat;
    let kwargs = chat.template_kwargs.iter().map(|(_, value)| value);
    shown.messages.iter().flat_map(|message| &message.content).all(|part| fits(part.text.len()))
        && shown
            .messages
            .iter()
            .flat_map(|message| message.tool_calls.iter().flatten())
            .all(|call| has_room(&call.shown, &mut fits))
        && chat.tools.iter().flatten().chain(&chat.documents).chain(kwargs).all(|value| has_room(value, &mut fits))
}

/// Whether `fits` takes all of a value.
fn has_room(value: &Json, fits: &mut impl FnMut(usize) -> bool) -> bool {
    match value {
        Json::Text(text) => fits(text.len()),
        Json::List(items) => fits(1) && items.iter().all(|item| has_room(item, fits)),
        Json::Map(entries) => entries.iter().all(|(key, value)| fits(key.len()) && has_room(value, fits)),
        _ => fits(1),
    }
}

/// `{% generation %} … {% endgeneration %}` as a `with` block, which scopes in the same way and prints the same.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        let Some(end) = tag.find("%}") else { break };
        let (inside, after) = tag.split_at(end);
        match inside.trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&inside.replace("generation", "with")),
            "endgeneration" => out.push_str(&inside.replace("endgeneration", "endwith")),
            _ => out.push_str(inside),
        }
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    out.push_str(rest);
    out
}

/// Marks the end of the last turn and gives its text.
fn open_end(turns: &mut [Turn<'_>]) -> Result<String, Miss> {
    turns.last_mut().and_then(|turn| turn.mark_end(END_MARK)).ok_or(Miss::Rejected)
}

/// Cuts `text` off where the last message, whose own text is `last`, ends.
///
/// Source: transformers 5.19, `render_jinja_template`.
fn cut(mut text: String, last: &str) -> Result<String, Miss> {
    let mark = END_MARK.trim_end();
    let place =
        text.rfind(mark).filter(|_| text.contains(last.trim_matches(python::is_space))).ok_or(Miss::Rejected)?;
    if text[place..].starts_with(END_MARK) {
        text.truncate(place);
    } else {
        // The template trims the message, so the space before the mark goes as well.
        text.truncate(text[..place].trim_end_matches(python::is_space).len());
    }
    Ok(text)
}

/// All variables that the engine passes, but for the time.
///
/// # Errors
/// [`Miss::Number`] where a number among them has no exact form.
///
/// Source: vLLM 0.32.0, `build_chat_params` and `safe_apply_chat_template`; transformers 5.19, `apply_chat_template`.
fn variables(shown: &Shown<'_>, turns: &[Turn<'_>], special: &SpecialTokens) -> Result<Dict, Miss> {
    let exact = |value: Option<Value>| value.ok_or(Miss::Number);
    let chat = shown.chat;
    let mut variables = Dict::default();
    for (name, token) in &special.named {
        variables.push(name, token.as_str());
    }
    // The first is a parameter of the engine's and no variable; the second is no name that a template can read.
    for (name, json) in
        chat.template_kwargs.iter().filter(|(name, _)| name != "continue_final_message" && name != python::NOW)
    {
        variables.set(name, exact(value::value(json))?);
    }
    if let Some(effort) = shown.effort {
        variables.set("reasoning_effort", Value::from(effort));
        if !chat.template_kwargs.iter().any(|(name, _)| name == "enable_thinking") {
            variables.set("enable_thinking", Value::from(effort != "none"));
        }
    }
    let given_documents = chat.template_kwargs.iter().any(|(name, _)| name == "documents");
    if chat.documents.is_some() || !given_documents {
        variables.set("documents", exact(optional(chat.documents.as_ref()))?);
    }
    variables.set("messages", exact(turns.iter().map(Turn::value).collect::<Option<_>>().map(value::list))?);
    variables.set("tools", exact(tools(chat.tools.as_deref()))?);
    variables.set("add_generation_prompt", Value::from(chat.add_generation_prompt));
    Ok(variables)
}

fn optional(json: Option<&Json>) -> Option<Value> {
    json.map_or(Some(Value::from(())), value::value)
}

fn tools(tools: Option<&[Json]>) -> Option<Value> {
    match tools {
        None => Some(Value::from(())),
        Some(tools) => tools.iter().map(value::value).collect::<Option<_>>().map(value::list),
    }
}

/// Whether a rendering failed because something undefined was used as if it were there (`bos_token + content`), which
/// Jinja2 refuses as well.
fn is_of_undefined(error: &Error) -> bool {
    let detail = error.detail().unwrap_or_default();
    match error.kind() {
        ErrorKind::UndefinedError => true,
        ErrorKind::InvalidOperation => detail.contains("operator on unsupported types") && detail.contains("undefined"),
        _ => false,
    }
}

/// What a failed rendering means.
fn why(error: &Error) -> Miss {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.is::<Raised>() {
            return Miss::Rejected;
        }
        if error.is::<NoClock>() {
            return Miss::Clock;
        }
        if error.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return Miss::Work;
        }
        cause = error.source();
    }
    Miss::Template
}

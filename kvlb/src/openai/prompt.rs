//! What the choice reads of a request, as values.

use super::json::Json;
use super::whole;
use crate::contract::TokenId;

/// What the choice reads of a request's body.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// The model that tells which rule serves it: the `X-Model` header, else the body's `model`. `None` where neither names one.
    pub model: Option<String>,
    /// The body's `model`: what the engine goes by, adapters included, whatever the header says.
    pub served: Option<String>,
    /// The prompts, each with blocks of its own, at most [`MAX_PROMPTS`](super::MAX_PROMPTS) of them.
    pub inputs: Vec<Input>,
    /// Prompts in the request, also those beyond the bound.
    pub prompts: usize,
    /// Completions asked for per prompt (`n`), at least one.
    pub samples: u32,
    /// `cache_salt`, an extra key of each prompt's first block.
    pub cache_salt: Option<String>,
    /// How text becomes tokens.
    pub options: TokenOptions,
    /// Whether the engine looks into its cache for it: not where it is to tell the probabilities of the prompt itself.
    pub reads_cache: bool,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// `user`, by which a conversation can be known.
    pub user: Option<String>,
}

impl Prompt {
    /// How many sequences the engine will run for it: every prompt, as often as completions are asked for.
    pub fn weight(&self) -> u32 {
        u32::try_from(self.prompts).unwrap_or(u32::MAX).saturating_mul(self.samples).max(1)
    }

    /// Its prompts as one run of bytes, of which the next turn of a conversation has more: at most 256 KiB.
    pub fn bytes(&self) -> Vec<u8> {
        whole::bytes(self)
    }
}

/// One prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// Text as it is.
    Text(String),
    /// Token ids as they are.
    Tokens(Vec<TokenId>),
    /// Messages for the model's chat template.
    Chat(Box<Chat>),
}

/// The options of a request that decide which tokens its text becomes.
///
/// Source: vLLM 0.32.0, `TokenizeParams` of the completion and chat requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenOptions {
    /// Whether special tokens are added; by default they are for text and are not for chats.
    pub add_special_tokens: Option<bool>,
    /// How many tokens are kept.
    pub truncate: Option<Truncate>,
    /// Which side goes when tokens are cut off; by default the left one.
    pub truncation_side: Option<Side>,
}

/// How many tokens of a prompt are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncate {
    /// At most this many tokens.
    To(usize),
    /// As many as fit the model's length (`-1`), less this reserve for the output.
    ToModel {
        /// Tokens held back: one where the request may generate any, else none.
        reserve: usize,
    },
}

/// A side of a token sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first tokens.
    Left,
    /// The last tokens.
    Right,
}

/// The API that a chat came by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`.
    #[default]
    Chat,
    /// `/v1/messages`.
    Messages,
    /// `/v1/responses`. Each of its items is a message here, also where the engine makes one of several.
    Responses,
}

/// A chat, as far as templates can see it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// Where it came by, since what the engine makes of it depends on that.
    pub api: Api,
    /// The messages, in order.
    pub messages: Vec<Message>,
    /// The tools as the engine shows them to a template: parsed and written again in its own order of keys.
    pub tools: Option<Vec<Json>>,
    /// `documents` for templates that know retrieval.
    pub documents: Option<Json>,
    /// `chat_template_kwargs`, in their order.
    pub template_kwargs: Vec<(String, Json)>,
    /// A template that the request brings along.
    pub template: Option<String>,
    /// Whether the template opens the assistant's turn.
    pub add_generation_prompt: bool,
    /// Whether the last message is left open for the model to go on.
    pub continue_final_message: bool,
    /// `reasoning_effort`.
    pub reasoning_effort: Option<String>,
    /// Whether thinking is switched off in the way of the Messages API: as the effort `none`, and as `low` where the
    /// model makes nothing of `none`.
    pub thinking_off: bool,
}

/// One message of a chat.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: String,
    /// What is said, in parts. A plain string is one part; an absent or null content is none.
    pub content: Vec<Part>,
    /// `name`, when it is text.
    pub name: Option<String>,
    /// The assistant's reasoning, under either of its names.
    pub reasoning: Option<String>,
    /// The assistant's tool calls.
    pub tool_calls: Option<Vec<ToolCall>>,
    /// The call that a tool's message answers: absent, null or text.
    pub tool_call_id: Option<Json>,
    /// `task`, a mark of some models.
    pub task: Option<String>,
}

/// One call of a tool, in both forms in which models see it.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The whole call with its arguments parsed, the keys in the order in which the engine passes them on.
    pub shown: Json,
    /// The arguments as the client wrote them.
    pub arguments: String,
}

/// What a part calls itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PartKind {
    /// `text`, as almost every part does, or a plain string.
    #[default]
    Text,
    /// `input_text` or `output_text`, with its text in `text` all the same.
    Directed,
    /// `thinking` or `refusal`, with its text in a key of that name.
    Aside,
}

/// One text part of a message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Part {
    /// The text.
    pub text: String,
    /// What the part calls itself.
    pub kind: PartKind,
    /// Keys of the part that no API knows, which the engine hands on to templates that take parts.
    pub extra: Vec<(String, Json)>,
}

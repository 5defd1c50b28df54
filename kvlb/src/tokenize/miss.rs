//! Why a prompt does not become tokens.

/// Why a prompt does not become tokens. All of them are the guard `tokenize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Miss {
    /// No chat template was handed in.
    NoTemplate,
    /// The chat template uses something whose result is not known to be the engine's.
    Template,
    /// The template, or the engine before it, refuses this chat.
    Rejected,
    /// The template writes the time into the prompt, and none was given.
    Clock,
    /// The template does more work than is allowed.
    Work,
    /// A number that a template would print in another way than Python does.
    Number,
    /// The request brings its own template, and the engine is not known to trust it.
    RequestTemplate,
    /// The model speaks Harmony, with a vocabulary or a message that is not the one known here.
    Harmony,
    /// The text of a chat for a model without a template spells a special token, which the engine takes as a word.
    SpecialText,
    /// A message has parts that become tokens one by one, so no one text becomes all the prompt's tokens.
    Parts,
    /// A system message stands within the conversation, and whether the engine moves it to the front is not known.
    InlineSystem,
    /// The client wants no thinking, and what the engine does about that is not known.
    Thinking,
    /// The engine renders this model's chats with code of its own.
    Renderer,
    /// The engine builds this tokenizer from its class, and that class is not known here.
    TokenizerClass,
    /// The truncation asked for leaves no room for the special tokens, or depends on a model length that is not known.
    Truncate,
    /// Far more text than any model takes.
    TooLong,
    /// The tokenizer fails on the text.
    Encode,
    /// No token is left.
    NoTokens,
}

impl Miss {
    /// The label of the guard, as the metric `loxilb_pd_kv_tier15_miss_reason_total` spells it.
    pub const fn reason(self) -> &'static str {
        "tokenize"
    }

    /// What exactly was in the way: one lower-case word.
    pub const fn detail(self) -> &'static str {
        match self {
            Self::NoTemplate => "no_template",
            Self::Template => "template",
            Self::Rejected => "rejected",
            Self::Clock => "clock",
            Self::Work => "template_work",
            Self::Number => "number",
            Self::RequestTemplate => "request_template",
            Self::Harmony => "harmony",
            Self::SpecialText => "special_text",
            Self::Parts => "parts",
            Self::InlineSystem => "inline_system",
            Self::Thinking => "thinking",
            Self::Renderer => "renderer",
            Self::TokenizerClass => "tokenizer_class",
            Self::Truncate => "truncate",
            Self::TooLong => "too_long",
            Self::Encode => "encode",
            Self::NoTokens => "no_tokens",
        }
    }
}

//! Why a request's prompt cannot be named.

/// Why a request has no prompt that could be named. The request itself is forwarded all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Miss {
    /// The request carries no prompt text.
    TextEmpty(NoText),
    /// The body is nothing that could name a model.
    ModelEmpty(BadBody),
    /// There is a prompt, and what the engine makes of it is not known exactly.
    Unsupported(Unsupported),
}

/// What is there instead of prompt text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoText {
    /// The method is not `POST`.
    Method,
    /// The path is not one that takes a prompt.
    Path,
    /// `prompt` or `messages` is absent or null.
    Absent,
    /// `prompt` or `messages` is there and empty.
    Empty,
}

/// What the body is instead of a JSON object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BadBody {
    /// Not JSON, or JSON of a kind that only Python reads (`NaN`, UTF-16).
    NotJson,
    /// JSON, and not an object.
    NotObject,
}

/// What of a prompt cannot be reproduced exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unsupported {
    /// A shape that no engine accepts, or that it accepts only by guessing the type.
    Shape,
    /// A value that Python reads and this parser does not: a lone surrogate, more than 64 bits, nesting beyond 128.
    Unreadable,
    /// A token id that is negative, not an integer, or beyond 32 bits.
    TokenId,
    /// An option that decides the tokens has an unexpected type.
    Options,
    /// Images or files.
    Images,
    /// Audio.
    Audio,
    /// Video.
    Video,
    /// Embeddings instead of text or tokens.
    Embeds,
    /// A `suffix` (fill in the middle).
    Suffix,
    /// Tools of a kind whose re-serialisation is not known.
    Tools,
    /// Token ids that an earlier stage forwards inside `kv_transfer_params`.
    TokenReuse,
    /// `chat_template_kwargs` that replace what the engine passes itself.
    TemplateKwargs,
    /// An earlier answer that the engine has kept (`previous_response_id`), or messages in a form of the engine's own.
    PreviousResponse,
    /// An item of the Responses API other than messages, function calls, their outputs, and reasoning in plain text.
    Item,
}

impl Miss {
    /// The label of the guard that fired, as the metric `loxilb_pd_kv_tier15_miss_reason_total` spells it.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::TextEmpty(_) => "text_empty",
            Self::ModelEmpty(_) => "model_empty",
            Self::Unsupported(_) => "tokenize",
        }
    }

    /// What exactly was in the way: one lower-case word.
    pub const fn detail(self) -> &'static str {
        match self {
            Self::TextEmpty(no_text) => no_text.label(),
            Self::ModelEmpty(bad_body) => bad_body.label(),
            Self::Unsupported(unsupported) => unsupported.label(),
        }
    }
}

impl NoText {
    const fn label(self) -> &'static str {
        match self {
            Self::Method => "method",
            Self::Path => "path",
            Self::Absent => "absent",
            Self::Empty => "empty",
        }
    }
}

impl BadBody {
    const fn label(self) -> &'static str {
        match self {
            Self::NotJson => "not_json",
            Self::NotObject => "not_object",
        }
    }
}

impl Unsupported {
    const fn label(self) -> &'static str {
        match self {
            Self::Shape => "shape",
            Self::Unreadable => "unreadable",
            Self::TokenId => "token_id",
            Self::Options => "options",
            Self::Images => "images",
            Self::Audio => "audio",
            Self::Video => "video",
            Self::Embeds => "embeds",
            Self::Suffix => "suffix",
            Self::Tools => "tools",
            Self::TokenReuse => "token_reuse",
            Self::TemplateKwargs => "template_kwargs",
            Self::PreviousResponse => "previous_response",
            Self::Item => "item",
        }
    }
}

impl From<NoText> for Miss {
    fn from(no_text: NoText) -> Self {
        Self::TextEmpty(no_text)
    }
}

impl From<BadBody> for Miss {
    fn from(bad_body: BadBody) -> Self {
        Self::ModelEmpty(bad_body)
    }
}

impl From<Unsupported> for Miss {
    fn from(unsupported: Unsupported) -> Self {
        Self::Unsupported(unsupported)
    }
}

//! A few texts that engine and kvlb must turn into the same tokens.

use serde_json::{Value, json};

use crate::contract::TokenId;
use crate::openai::{Chat, Input, Message, Part, TokenOptions};
use crate::tokenize::{Limits, Tokenizer};

/// One of the texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// A completion's prompt.
    Text(&'static str),
    /// A chat: role and content of each message.
    Chat(&'static [(&'static str, &'static str)]),
}

/// The texts. Among them are what tokenizers of different making disagree about: digits, spaces, accents, scripts
/// without spaces, symbols of several code points.
pub const SAMPLES: [Sample; 6] = [
    Sample::Text("The quick brown fox jumps over 13 lazy dogs, twice."),
    Sample::Text("  fn main() {\n\tprintln!(\"{:>8.3}\", 1234567.5);\n}\n\n"),
    Sample::Text("Grüße aus Köln: naïve café, ½ €."),
    Sample::Text("你好，世界。こんにちは 👩‍🚀🇩🇪 \u{a0}مرحبا"),
    Sample::Chat(&[("user", "What is the capital of France?")]),
    Sample::Chat(&[("user", "Say hello."), ("assistant", "Hello!"), ("user", "  And now in French,\nplease.")]),
];

impl Sample {
    /// Whether it needs the chat template.
    pub const fn is_chat(self) -> bool {
        matches!(self, Self::Chat(_))
    }

    /// The body of `POST /tokenize`.
    pub(super) fn body(self, model: &str) -> Value {
        match self {
            Self::Text(text) => json!({"model": model, "prompt": text}),
            Self::Chat(messages) => {
                let message = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
                json!({"model": model, "messages": messages.iter().map(message).collect::<Vec<_>>()})
            }
        }
    }

    fn input(self) -> Input {
        match self {
            Self::Text(text) => Input::Text(text.to_owned()),
            Self::Chat(messages) => Input::Chat(Box::new(Chat {
                messages: messages.iter().map(message).collect(),
                add_generation_prompt: true,
                ..Chat::default()
            })),
        }
    }
}

fn message((role, content): &(&str, &str)) -> Message {
    let part = Part { text: (*content).to_owned(), ..Part::default() };
    Message { role: (*role).to_owned(), content: vec![part], ..Message::default() }
}

/// What the staged tokenizer makes of each sample, or why it makes nothing.
pub fn our_tokens(tokenizer: &Tokenizer, limits: &Limits) -> Vec<Result<Vec<TokenId>, String>> {
    let tokens = |sample: Sample| tokenizer.tokens(&sample.input(), &TokenOptions::default(), limits);
    SAMPLES.into_iter().map(|sample| tokens(sample).map_err(|miss| miss.detail().to_owned())).collect()
}

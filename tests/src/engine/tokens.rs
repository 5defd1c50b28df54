//! Text to tokens and back: a staged tokenizer with its chat template, or one token per byte without.

use std::path::Path;

use anyhow::Context as _;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use super::chance::Chance;

/// How one engine reads prompts and writes answers.
#[derive(Debug)]
pub(super) enum Tokens {
    /// Token = byte; chats are framed with `<|role|>` and `<|end|>`.
    Bytes,
    /// `tokenizer.json` and a chat template.
    Staged(Box<Staged>),
}

/// A tokenizer folder, read.
#[derive(Debug)]
pub(super) struct Staged {
    tokenizer: Tokenizer,
    /// Absent when the folder has none: chats are refused.
    template: Option<Environment<'static>>,
    /// `bos_token`, `eos_token` … as the template sees them.
    specials: Map<String, Value>,
    /// Whole words with a space before them, so that an answer read back gives the same tokens; sorted by id.
    words: Vec<(u32, String)>,
}

/// Names of special tokens that templates use.
const SPECIALS: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

impl Tokens {
    /// Reads a tokenizer folder; without one, bytes.
    ///
    /// # Errors
    /// When a file is unreadable or malformed; each error names the file.
    pub(super) fn load(dir: Option<&Path>) -> anyhow::Result<Self> {
        let Some(dir) = dir else { return Ok(Self::Bytes) };
        let path = dir.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path)
            .map_err(|cause| anyhow::anyhow!("{cause}"))
            .with_context(|| format!("read {}", path.display()))?;
        let config = read_config(dir)?;
        let template = read_template(dir, &config)?;
        let text = |name: &&str| match &config[*name] {
            Value::Object(token) => token.get("content").cloned(),
            Value::String(token) => Some(Value::String(token.clone())),
            _ => None,
        };
        let specials = SPECIALS.iter().filter_map(|name| text(name).map(|value| ((*name).to_owned(), value))).collect();
        let words = words(&tokenizer);
        Ok(Self::Staged(Box::new(Staged { tokenizer, template, specials, words })))
    }

    /// The tokens of `text`; special tokens are added as the tokenizer's post-processor says when `add_special`.
    ///
    /// # Errors
    /// When the tokenizer refuses.
    pub(super) fn encode(&self, text: &str, add_special: bool) -> anyhow::Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::Staged(staged) => {
                let encoding = staged.tokenizer.encode_fast(text, add_special);
                Ok(encoding.map_err(|cause| anyhow::anyhow!("{cause}"))?.get_ids().to_vec())
            }
        }
    }

    /// The prompt text of a chat.
    ///
    /// # Errors
    /// When there is no template, or it raises.
    pub(super) fn chat(&self, body: &Value) -> anyhow::Result<String> {
        let messages = body["messages"].as_array().context("messages is not a list")?;
        let messages: Vec<Value> = messages.iter().map(flatten).collect::<anyhow::Result<_>>()?;
        let generation = body["add_generation_prompt"].as_bool().unwrap_or(true);
        match self {
            Self::Bytes => Ok(plain_chat(&messages, generation)),
            Self::Staged(staged) => staged.render(messages, generation, body),
        }
    }

    /// The text of one token on its own.
    pub(super) fn text(&self, token: u32) -> String {
        match self {
            Self::Bytes => match u8::try_from(token) {
                Ok(byte) => char::from(byte).to_string(),
                Err(_) => format!("<{token}>"),
            },
            Self::Staged(staged) => match staged.words.binary_search_by_key(&token, |(id, _)| *id) {
                Ok(index) => staged.words[index].1.clone(),
                Err(_) => staged.tokenizer.decode(&[token], false).unwrap_or_default(),
            },
        }
    }

    /// What the model says after `prompt`: the same for the same prompt and `seed`.
    pub(super) fn outputs(&self, prompt: &[u32], seed: u64, count: usize) -> Vec<u32> {
        let prompt: Vec<u64> = prompt.iter().map(|token| u64::from(*token)).collect();
        let mut chance = Chance::new(Chance::seed_of("outputs", &prompt) ^ seed);
        (0..count).map(|_| self.any_token(&mut chance)).collect()
    }

    fn any_token(&self, chance: &mut Chance) -> u32 {
        match self {
            Self::Bytes => u32::from(b"etaoinshrdlu "[chance.below(13)]),
            Self::Staged(staged) if staged.words.is_empty() => {
                u32::try_from(chance.below(staged.tokenizer.get_vocab_size(false))).unwrap_or(0)
            }
            Self::Staged(staged) => staged.words[chance.below(staged.words.len())].0,
        }
    }
}

impl Staged {
    fn render(&self, messages: Vec<Value>, generation: bool, body: &Value) -> anyhow::Result<String> {
        let environment = self.template.as_ref().context("the model has no chat template")?;
        let mut context = self.specials.clone();
        context.insert("messages".into(), Value::Array(messages));
        context.insert("add_generation_prompt".into(), Value::Bool(generation));
        if body["tools"].is_array() {
            context.insert("tools".into(), body["tools"].clone());
        }
        if let Some(kwargs) = body["chat_template_kwargs"].as_object() {
            context.extend(kwargs.clone());
        }
        environment.get_template("chat")?.render(plain(&Value::Object(context))).context("render the chat template")
    }
}

fn read_config(dir: &Path) -> anyhow::Result<Value> {
    let path = dir.join("tokenizer_config.json");
    if !path.exists() {
        return Ok(Value::Null);
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))
}

/// `chat_template.jinja`, else the one inside `tokenizer_config.json`.
fn read_template(dir: &Path, config: &Value) -> anyhow::Result<Option<Environment<'static>>> {
    let path = dir.join("chat_template.jinja");
    let source = if path.exists() {
        std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?
    } else if let Some(text) = config["chat_template"].as_str() {
        text.to_owned()
    } else {
        return Ok(None);
    };
    let mut environment = Environment::new();
    // As transformers sets Jinja up.
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.context("set the template syntax")?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |text: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, text))
    });
    // A fixed day, so that a template with a date in it gives the same blocks tomorrow.
    environment.add_function("strftime_now", |_: String| "01 Jan 2026".to_owned());
    environment.add_template_owned("chat", source).context("parse the chat template")?;
    Ok(Some(environment))
}

/// The same value in minijinja's own type, keys in the client's order.
fn plain(value: &Value) -> minijinja::Value {
    match value {
        Value::Null => minijinja::Value::from(()),
        Value::Bool(flag) => minijinja::Value::from(*flag),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(integer), _) => minijinja::Value::from(integer),
            (None, float) => minijinja::Value::from(float),
        },
        Value::String(text) => minijinja::Value::from(text),
        Value::Array(items) => items.iter().map(plain).collect(),
        Value::Object(fields) => {
            minijinja::Value::from_pairs(fields.iter().map(|(key, field)| (key.clone(), plain(field))))
        }
    }
}

/// Content parts joined by one newline, as vLLM does for templates that want text.
fn flatten(message: &Value) -> anyhow::Result<Value> {
    let mut message = message.clone();
    if let Some(parts) = message["content"].as_array() {
        let texts = parts.iter().map(|part| part["text"].as_str().context("only text parts are supported"));
        message["content"] = Value::String(texts.collect::<anyhow::Result<Vec<_>>>()?.join("\n"));
    }
    Ok(message)
}

fn plain_chat(messages: &[Value], generation: bool) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut prompt = String::new();
    for message in messages {
        prompt.extend(["<|", &text(&message["role"]), "|>", &text(&message["content"]), "<|end|>"]);
    }
    if generation {
        prompt.push_str("<|assistant|>");
    }
    prompt
}

fn words(tokenizer: &Tokenizer) -> Vec<(u32, String)> {
    let word = |piece: &str| {
        let rest = piece.strip_prefix(['Ġ', '▁'])?;
        (rest.len() > 2 && rest.bytes().all(|byte| byte.is_ascii_lowercase())).then(|| format!(" {rest}"))
    };
    let vocabulary = tokenizer.get_vocab(false);
    let mut words: Vec<(u32, String)> =
        vocabulary.into_iter().filter_map(|(piece, id)| word(&piece).map(|text| (id, text))).collect();
    words.sort_unstable();
    words
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Tokens;

    /// A word-level tokenizer that adds `<s>`, and a template of its own.
    fn staged() -> (tempfile::TempDir, Tokens) {
        let dir = tempfile::tempdir().unwrap();
        let vocab = json!({"<s>": 0, "▁hello": 1, "▁world": 2, "[user]": 3, "[bot]": 4, "?": 5});
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true},
            "post_processor": {
                "type": "TemplateProcessing", "pair": [],
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
            "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}});
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let template = "{% for m in messages %}\n{% if m.content.strip() == '' %}{{ raise_exception('empty') }}{% endif %}\n\
                        [{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %} [bot]{{ bos_token }}{% endif %}";
        let config = json!({"chat_template": template, "bos_token": {"content": "<s>"}});
        std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokens = Tokens::load(Some(dir.path())).unwrap();
        (dir, tokens)
    }

    #[test]
    fn a_staged_tokenizer_encodes_and_its_template_renders_text_and_parts_alike() {
        let (_dir, tokens) = staged();
        assert_eq!(tokens.encode(" hello world", true).unwrap(), [0, 1, 2]);
        assert_eq!(tokens.encode(" hello world", false).unwrap(), [1, 2]);
        let text = tokens.chat(&json!({"messages": [{"role": "user", "content": "hello\nworld"}]})).unwrap();
        assert_eq!(text, "[user] hello\nworld [bot]<s>");
        let parts = json!([{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]);
        assert_eq!(tokens.chat(&json!({"messages": [{"role": "user", "content": parts}]})).unwrap(), text);
        let refused = tokens.chat(&json!({"messages": [{"role": "user", "content": " "}]})).unwrap_err();
        assert!(format!("{refused:#}").contains("empty"), "{refused:#}");
    }

    #[test]
    fn an_answer_read_back_gives_the_tokens_it_was_made_of() {
        for tokens in [staged().1, Tokens::Bytes] {
            let outputs = tokens.outputs(&[7, 8], 1, 20);
            assert_eq!(outputs, tokens.outputs(&[7, 8], 1, 20));
            assert_ne!(outputs, tokens.outputs(&[7, 9], 1, 20));
            let text: String = outputs.iter().map(|token| tokens.text(*token)).collect();
            assert_eq!(tokens.encode(&text, false).unwrap(), outputs);
        }
    }

    #[test]
    fn without_a_tokenizer_a_token_is_a_byte_and_a_missing_file_is_named() {
        assert_eq!(Tokens::Bytes.encode("aé", true).unwrap(), [97, 0xc3, 0xa9]);
        let chat = json!({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": false});
        assert_eq!(Tokens::Bytes.chat(&chat).unwrap(), "<|user|>hi<|end|>");
        let dir = tempfile::tempdir().unwrap();
        assert!(format!("{:#}", Tokens::load(Some(dir.path())).unwrap_err()).contains("tokenizer.json"));
    }
}

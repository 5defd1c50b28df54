//! What `tokenizer_config.json` and `config.json` say.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::template::SpecialTokens;

/// The parts of `tokenizer_config.json` that decide tokens.
#[derive(Debug, Default, Deserialize)]
pub(super) struct TokenizerConfig {
    #[serde(default)]
    pub(super) tokenizer_class: Option<String>,
    #[serde(default)]
    chat_template: Option<Templates>,
    #[serde(default)]
    pub(super) added_tokens_decoder: Option<Map<String, Value>>,
    #[serde(default)]
    additional_special_tokens: Option<Value>,
    #[serde(default)]
    extra_special_tokens: Option<Value>,
    #[serde(default)]
    pub(super) add_prefix_space: Option<bool>,
    #[serde(default)]
    pub(super) legacy: Option<bool>,
    #[serde(default)]
    pub(super) split_special_tokens: Option<bool>,
    /// Everything else; the special tokens are here.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// One template, or several with names.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Clone, Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// The special tokens that have a name.
///
/// Source: transformers 5.19, `SPECIAL_TOKENS_ATTRIBUTES`.
pub(super) const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl TokenizerConfig {
    /// The templates by name; a single one is called `default`.
    pub(super) fn templates(&self) -> Vec<(String, String)> {
        match &self.chat_template {
            None => Vec::new(),
            Some(Templates::One(template)) => vec![("default".to_owned(), template.clone())],
            Some(Templates::Named(list)) => {
                list.iter().map(|each| (each.name.clone(), each.template.clone())).collect()
            }
        }
    }

    /// The special tokens with a name, those of the class `defaults` where the file does not mention them.
    ///
    /// Besides the names that every tokenizer has, a model may have names of its own (`image_token`).
    pub(super) fn special_tokens(&self, defaults: &[(&str, &str)]) -> SpecialTokens {
        let token = |name: &str| match self.rest.get(name) {
            Some(value) => content(value),
            None => defaults.iter().find(|(key, _)| *key == name).map(|(_, token)| (*token).to_owned()),
        };
        let mut named: Vec<(String, String)> =
            NAMED_TOKENS.iter().filter_map(|name| Some(((*name).to_owned(), token(name)?))).collect();
        let own = self.rest.iter().filter(|(name, _)| name.ends_with("_token"));
        let listed = self.extra_special_tokens.as_ref().and_then(Value::as_object).into_iter().flatten();
        for (name, value) in own.chain(listed) {
            if let (false, Some(token)) = (named.iter().any(|(known, _)| known == name), content(value))
                && !NAMED_TOKENS.contains(&name.as_str())
            {
                named.push((name.clone(), token));
            }
        }
        // Older models keep their special tokens in `special_tokens_map.json`.
        let mentioned = NAMED_TOKENS.iter().any(|name| self.rest.contains_key(*name));
        SpecialTokens { named, incomplete: !mentioned && self.added_tokens_decoder.is_none() }
    }

    /// The special tokens that have no name.
    pub(super) fn nameless_special_tokens(&self) -> Vec<String> {
        let extra = self.extra_special_tokens.as_ref().filter(|value| !is_empty(value));
        match extra.or(self.additional_special_tokens.as_ref()) {
            Some(Value::Array(list)) => list.iter().filter_map(content).collect(),
            _ => Vec::new(),
        }
    }

    /// Whether the tokenizer is made by code that the model's folder brings along.
    pub(super) fn has_own_code(&self) -> bool {
        self.rest.contains_key("auto_map")
    }
}

/// A token's text: written as such, or inside an object.
fn content(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(map) => map.get("content")?.as_str().map(str::to_owned),
        _ => None,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => true,
    }
}

/// The parts of `config.json` that decide how the engine makes tokens.
#[derive(Debug, Default, Deserialize)]
pub(super) struct ModelConfig {
    #[serde(default)]
    pub(super) model_type: Option<String>,
    #[serde(default)]
    architectures: Option<Vec<String>>,
    #[serde(default)]
    pub(super) tokenizer_class: Option<String>,
}

/// Architectures whose chats the engine renders with code of its own.
///
/// Source: vLLM 0.32.0, `ModelConfig.__post_init__` and the renderer registry.
const OWN_RENDERERS: [&str; 8] = [
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "MoonshotKimiaForCausalLM",
];

impl ModelConfig {
    /// Whether the model speaks Harmony.
    pub(super) fn is_harmony(&self) -> bool {
        self.model_type.as_deref() == Some("gpt_oss")
    }

    /// Whether the engine renders this model's chats without a template.
    pub(super) fn has_own_renderer(&self) -> bool {
        self.architectures.iter().flatten().any(|name| OWN_RENDERERS.contains(&name.as_str()))
    }
}

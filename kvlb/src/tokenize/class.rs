//! Which tokenizer the engine builds from a model's files.
//!
//! Since transformers 5 a tokenizer is not always what `tokenizer.json` says: some classes keep only its vocabulary and
//! its special tokens, and bring their own normaliser and pre-tokeniser. Which class it is depends on
//! `tokenizer_config.json` and on the model's type.
//!
//! Source: transformers 5.19, `AutoTokenizer.from_pretrained`, `TokenizersBackend` and the classes named below.

use serde_json::{Value, json};

use super::config::{ModelConfig, TokenizerConfig};

/// How the engine gets from the files to a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// `tokenizer.json` as it is.
    File,
    /// Its vocabulary, and the rest from a class.
    Rebuilt(Rebuilt),
    /// The named class, unless the model's type, which is not known, overrules it.
    PerhapsRebuilt(Rebuilt),
    /// By a class that is not known here.
    Unknown,
}

/// A class that brings its own pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rebuilt {
    Gemma,
    Gpt2,
    Llama,
    Qwen2,
    Qwen35,
}

/// Model types whose registered tokenizer is the plain file, whatever class their files name.
const FILE_TYPES: &str = "\
    EvollaModel arctic aria bigbird_pegasus camembertv2-base canary chameleon chatlm cohere_asr deepseek_ocr \
    deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid deepseek_vl_v2 \
    ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 \
    gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm \
    internlm2 jamba janus kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpmv \
    minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mixtral modernbert modernbert-decoder \
    molmo molmo2 nemotron nvfp4 nystromformer olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl pegasus_x \
    persimmon phi3 phi3_v phimoe pix2struct pixtral smolvlm stablelm step3_vl step3p5 umt5 vipllava voxtral \
    voxtral_realtime xlm-roberta-xl";

/// Model types for which the registered class wins over the one that the files name.
const OVERRULING_TYPES: [(&str, Rebuilt); 6] = [
    ("hyperclovax_vision_v2", Rebuilt::Gpt2),
    ("qwen2", Rebuilt::Qwen2),
    ("qwen3_5", Rebuilt::Qwen35),
    ("qwen3_5_moe", Rebuilt::Qwen35),
    ("qwen3_5_moe_text", Rebuilt::Qwen35),
    ("qwen4_exp", Rebuilt::Qwen35),
];

/// The class that the engine uses.
///
/// Without a `tokenizer_config.json` the file is all there is to go by.
pub(super) fn resolve(tokenizer: Option<&TokenizerConfig>, model: &ModelConfig) -> Class {
    let Some(tokenizer) = tokenizer else { return Class::File };
    let model_type = model.model_type.as_deref();
    if tokenizer.has_own_code() {
        return Class::Unknown;
    }
    if model_type.is_some_and(|model_type| FILE_TYPES.split_whitespace().any(|name| name == model_type)) {
        return Class::File;
    }
    if let Some((_, class)) = OVERRULING_TYPES.iter().find(|(name, _)| model_type == Some(name)) {
        return Class::Rebuilt(*class);
    }
    match tokenizer.tokenizer_class.as_deref().or(model.tokenizer_class.as_deref()) {
        Some(name) => named(name, model_type.is_some()),
        None => Class::Unknown,
    }
}

fn named(name: &str, type_is_known: bool) -> Class {
    let rebuilt = match name.strip_suffix("Fast").unwrap_or(name) {
        "PreTrainedTokenizer" | "TokenizersBackend" | "BloomTokenizer" => return Class::File,
        "GemmaTokenizer" => Rebuilt::Gemma,
        "GPT2Tokenizer" => Rebuilt::Gpt2,
        "LlamaTokenizer" => Rebuilt::Llama,
        "Qwen2Tokenizer" => Rebuilt::Qwen2,
        "Qwen3_5Tokenizer" => Rebuilt::Qwen35,
        _ => return Class::Unknown,
    };
    if type_is_known { Class::Rebuilt(rebuilt) } else { Class::PerhapsRebuilt(rebuilt) }
}

/// Where Qwen's tokenizers cut text before they look for tokens.
const QWEN2_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Rebuilt {
    /// The special tokens that the class has where the files say nothing.
    pub(super) const fn default_tokens(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Gemma => &[
                ("bos_token", "<bos>"),
                ("eos_token", "<eos>"),
                ("unk_token", "<unk>"),
                ("pad_token", "<pad>"),
                ("mask_token", "<mask>"),
            ],
            Self::Gpt2 => {
                &[("bos_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>"), ("unk_token", "<|endoftext|>")]
            }
            Self::Llama => &[("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")],
            Self::Qwen2 | Self::Qwen35 => {
                &[("eos_token", "<|endoftext|>"), ("unk_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")]
            }
        }
    }

    /// Gives `file`, a parsed `tokenizer.json`, the pipeline of the class, and takes its added tokens away.
    ///
    /// Says whether the pipeline was the same before. `None`, and no change, when the model is none that the class can take.
    pub(super) fn rebuild(self, file: &mut Value, config: &TokenizerConfig) -> Option<bool> {
        let is_bpe = file.pointer("/model/type").is_none_or(|kind| kind == "BPE");
        let has_parts =
            file.pointer("/model/vocab").is_some_and(Value::is_object) && file.pointer("/model/merges").is_some();
        if !is_bpe || !has_parts {
            return None;
        }
        let before = essence(file);
        file["normalizer"] = self.normalizer();
        file["pre_tokenizer"] = self.pre_tokenizer(config);
        file["added_tokens"] = json!([]);
        // What is baked in as truncation and padding is off unless a request asks for it.
        file["truncation"] = Value::Null;
        file["padding"] = Value::Null;
        for (name, flag) in self.flags(config) {
            file["model"][name] = flag;
        }
        Some(before == essence(file))
    }

    fn flags(self, config: &TokenizerConfig) -> [(&'static str, Value); 8] {
        let byte_fallback = matches!(self, Self::Gemma | Self::Llama);
        [
            ("type", "BPE".into()),
            ("dropout", Value::Null),
            ("unk_token", self.unk_token(config)),
            ("continuing_subword_prefix", Value::Null),
            ("end_of_word_suffix", Value::Null),
            ("fuse_unk", byte_fallback.into()),
            ("byte_fallback", byte_fallback.into()),
            ("ignore_merges", false.into()),
        ]
    }

    fn normalizer(self) -> Value {
        match self {
            Self::Gemma => json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            Self::Gpt2 | Self::Llama => Value::Null,
            Self::Qwen2 | Self::Qwen35 => json!({"type": "NFC"}),
        }
    }

    fn pre_tokenizer(self, config: &TokenizerConfig) -> Value {
        let bytes = |use_regex: bool| {
            let add_prefix_space = config.add_prefix_space.unwrap_or(false);
            json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex})
        };
        let words = |regex: &str| {
            let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
            json!({"type": "Sequence", "pretokenizers": [split, bytes(false)]})
        };
        match self {
            Self::Gemma => {
                json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false})
            }
            Self::Gpt2 => bytes(true),
            Self::Llama => json!({
                "type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme(config), "split": false
            }),
            Self::Qwen2 => words(QWEN2_WORDS),
            Self::Qwen35 => words(QWEN35_WORDS),
        }
    }

    fn unk_token(self, config: &TokenizerConfig) -> Value {
        if self != Self::Gemma {
            return Value::Null;
        }
        let special = config.special_tokens(self.default_tokens());
        special.named.into_iter().find(|(name, _)| name == "unk_token").map_or(Value::Null, |(_, token)| token.into())
    }
}

/// Where `LlamaTokenizer` puts a space before text.
fn prepend_scheme(config: &TokenizerConfig) -> &'static str {
    match (config.add_prefix_space.unwrap_or(true), config.legacy.unwrap_or(false)) {
        (false, _) => "never",
        (true, true) => "always",
        (true, false) => "first",
    }
}

/// What of a tokenizer file decides ids besides its vocabulary: its pipeline, and the flags of its model that are on.
fn essence(file: &Value) -> (Value, Value, Vec<(&'static str, Value)>) {
    const FLAGS: [&str; 7] = [
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
        "ignore_merges",
    ];
    let part = |key: &str| without_offsets(file.get(key).cloned().unwrap_or(Value::Null));
    // An absent flag is off, and an empty prefix is none.
    let is_on = |flag: &Value| !matches!(flag, Value::Null | Value::Bool(false)) && flag != "";
    let flags =
        FLAGS.iter().filter_map(|name| Some((*name, file["model"].get(name).filter(|flag| is_on(flag))?.clone())));
    (part("normalizer"), part("pre_tokenizer"), flags.collect())
}

/// Offsets say where in the text a token was; they change no id.
fn without_offsets(mut value: Value) -> Value {
    match &mut value {
        Value::Object(map) => {
            map.remove("trim_offsets");
            map.values_mut().for_each(|item| *item = without_offsets(item.take()));
        }
        Value::Array(list) => list.iter_mut().for_each(|item| *item = without_offsets(item.take())),
        _ => {}
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(tokenizer_class: &str, model_type: Option<&str>) -> Class {
        let tokenizer = serde_json::from_value(json!({"tokenizer_class": tokenizer_class})).unwrap();
        let model = serde_json::from_value(json!({"model_type": model_type})).unwrap();
        resolve(Some(&tokenizer), &model)
    }

    #[test]
    fn the_model_s_type_decides_whether_a_class_counts() {
        assert_eq!(class("LlamaTokenizerFast", Some("llama")), Class::Rebuilt(Rebuilt::Llama));
        assert_eq!(class("LlamaTokenizerFast", Some("deepseek_v3")), Class::File);
        assert_eq!(class("LlamaTokenizerFast", None), Class::PerhapsRebuilt(Rebuilt::Llama));
        assert_eq!(class("PreTrainedTokenizerFast", Some("llama")), Class::File);
        assert_eq!(class("Qwen2Tokenizer", Some("qwen3")), Class::Rebuilt(Rebuilt::Qwen2));
        assert_eq!(class("GPT2TokenizerFast", Some("qwen2")), Class::Rebuilt(Rebuilt::Qwen2));
        assert_eq!(class("LlamaTokenizer", Some("mistral")), Class::File);
        assert_eq!(class("CohereTokenizerFast", Some("cohere2")), Class::Unknown);
    }

    #[test]
    fn a_lone_tokenizer_file_is_taken_at_its_word() {
        assert_eq!(resolve(None, &ModelConfig::default()), Class::File);
    }

    #[test]
    fn code_of_the_model_s_own_is_unknown() {
        let tokenizer = serde_json::from_value(json!({"tokenizer_class": "X", "auto_map": {}})).unwrap();
        assert_eq!(resolve(Some(&tokenizer), &ModelConfig::default()), Class::Unknown);
    }

    #[test]
    fn a_rebuilt_file_keeps_its_vocabulary_and_loses_its_pipeline() {
        let mut file = json!({"normalizer": {"type": "NFKC"}, "pre_tokenizer": null, "added_tokens": [{"id": 0}],
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "ignore_merges": true}});
        assert_eq!(Rebuilt::Qwen2.rebuild(&mut file, &TokenizerConfig::default()), Some(false));
        assert_eq!(file["model"]["vocab"], json!({"a": 0}));
        assert_eq!(file["normalizer"], json!({"type": "NFC"}));
        assert_eq!(Rebuilt::Qwen2.rebuild(&mut file, &TokenizerConfig::default()), Some(true));
        assert_eq!(
            Rebuilt::Llama.rebuild(&mut json!({"model": {"type": "Unigram"}}), &TokenizerConfig::default()),
            None
        );
    }
}

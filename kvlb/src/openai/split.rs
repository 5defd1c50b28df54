//! Whether a request can be split into a prefill leg and a decode leg.

use serde_json::value::RawValue;

use super::edit::Members;
use super::{Kind, decoded, kind};

/// Why one endpoint serves a request alone on a rule that splits; a closed set of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Whole {
    /// It generates nothing.
    NotInference,
    /// Nobody has shown that engines take transfers in this API.
    Api,
    /// It asks for several answers, and blocks are fetched once.
    Samples,
    /// It has several prompts, and an answer names the blocks of one.
    Batch,
    /// It generates no token.
    NothingGenerated,
    /// It asks for what is computed with the prompt, which fetched blocks have not.
    PromptLogprobs,
    /// Its prompt is cut by the length of the answer that it asks for, so that both legs would see another.
    Truncated,
    /// Its prompt is made of what only the engine that is asked can read.
    Embeds,
}

impl Whole {
    /// Every reason.
    pub const ALL: [Self; 8] = [
        Self::NotInference,
        Self::Api,
        Self::Samples,
        Self::Batch,
        Self::NothingGenerated,
        Self::PromptLogprobs,
        Self::Truncated,
        Self::Embeds,
    ];

    /// The word in `kvlb_pd_whole_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NotInference => "not_inference",
            Self::Api => "api",
            Self::Samples => "samples",
            Self::Batch => "batch",
            Self::NothingGenerated => "nothing_generated",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::Truncated => "truncated",
            Self::Embeds => "embeds",
        }
    }
}

/// Why a request cannot be split; `None` where it can. What an engine would refuse can be: its refusal goes to the client.
///
/// Source: vLLM 0.32.0, where each sample of a request fetches the same blocks and the first one has them freed, and a prompt
/// whose blocks were fetched has no log probabilities.
pub fn whole(kind: Kind, members: &Members<'_>) -> Option<Whole> {
    let told = |key: &str| members.get(key).filter(|value| *value != b"null");
    let more_than_one = |key: &str| told(key).is_some_and(|value| value != b"1");
    let is_off = |value: &[u8]| matches!(value, b"false" | b"0");
    match kind {
        Kind::Other => return Some(Whole::NotInference),
        Kind::Completions | Kind::Chat => {}
        Kind::ChatBatch | Kind::Generate | Kind::Responses | Kind::Messages => return Some(Whole::Api),
    }
    if ["n", "best_of"].into_iter().any(more_than_one) || told("use_beam_search").is_some_and(|value| !is_off(value)) {
        return Some(Whole::Samples);
    }
    if kind == Kind::Completions && told("prompt").is_some_and(is_batch) {
        return Some(Whole::Batch);
    }
    if told("prompt_embeds").is_some() {
        return Some(Whole::Embeds);
    }
    let limit = match kind {
        Kind::Chat => told("max_completion_tokens").or_else(|| told("max_tokens")),
        _ => told("max_tokens"),
    };
    if limit.is_some_and(|limit| limit == b"0") {
        return Some(Whole::NothingGenerated);
    }
    let echoes = told("echo").is_some_and(|value| !is_off(value)) && told("logprobs").is_some();
    if told("prompt_logprobs").is_some() || echoes {
        return Some(Whole::PromptLogprobs);
    }
    told("truncate_prompt_tokens").is_some_and(|value| value.starts_with(b"-")).then_some(Whole::Truncated)
}

/// Whether an engine may generate for requests to this path, be it by what their bodies say.
///
/// Source: vLLM 0.32.0, whose `/invocations` takes the bodies of all its APIs.
pub fn may_generate(path: &str) -> bool {
    kind(path) != Kind::Other || decoded(path).trim_matches('/') == "invocations"
}

/// Whether a completion's `prompt` holds more than one: a list of texts, or of lists of token ids.
fn is_batch(prompt: &[u8]) -> bool {
    let inner = prompt.strip_prefix(b"[").unwrap_or_default().trim_ascii_start();
    if !matches!(inner.first(), Some(b'"' | b'[')) {
        return false;
    }
    serde_json::from_slice::<Vec<&RawValue>>(prompt).map_or(true, |prompts| prompts.len() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: Kind, body: &str) -> Option<Whole> {
        whole(kind, &Members::read(body.as_bytes()).unwrap())
    }

    #[test]
    fn a_path_that_takes_all_bodies_is_known_however_it_is_written() {
        for path in ["/invocations", "/%69nvocations/", "/v1/completions", "/v1/messages"] {
            assert!(may_generate(path), "{path}");
        }
        assert!(!may_generate("/v1/embeddings") && !may_generate("/tokenize"));
    }

    #[test]
    fn ordinary_requests_are_split() {
        for body in [
            r#"{"prompt":"a"}"#,
            r#"{"prompt":["a"],"n":1,"best_of":null,"stream":true,"max_tokens":9}"#,
            r#"{"prompt":[1,2,3],"logprobs":2}"#,
            r#"{"prompt": [ [1,2,3] ] ,"echo":true,"truncate_prompt_tokens":3}"#,
            r#"{"prompt":7,"temperature":"hot"}"#,
        ] {
            assert_eq!(of(Kind::Completions, body), None, "{body}");
        }
        let chat =
            r#"{"messages":[],"tools":[{}],"logprobs":true,"top_logprobs":2,"max_completion_tokens":1,"max_tokens":0}"#;
        assert_eq!(of(Kind::Chat, chat), None);
    }

    #[test]
    fn what_two_legs_would_get_wrong_is_served_by_one() {
        let cases = [
            (Kind::Completions, r#"{"prompt":"a","n":2}"#, Whole::Samples),
            (Kind::Chat, r#"{"messages":[],"best_of":3}"#, Whole::Samples),
            (Kind::Chat, r#"{"messages":[],"use_beam_search":true}"#, Whole::Samples),
            (Kind::Completions, r#"{"prompt":["a","b"]}"#, Whole::Batch),
            (Kind::Completions, r#"{"prompt":[ [1],[2]]}"#, Whole::Batch),
            (Kind::Completions, r#"{"prompt":"a","max_tokens":0}"#, Whole::NothingGenerated),
            (Kind::Completions, r#"{"prompt":"a","echo":true,"logprobs":1}"#, Whole::PromptLogprobs),
            (Kind::Chat, r#"{"messages":[],"prompt_logprobs":0}"#, Whole::PromptLogprobs),
            (Kind::Chat, r#"{"messages":[],"truncate_prompt_tokens":-1}"#, Whole::Truncated),
            (Kind::Completions, r#"{"prompt_embeds":"AA=="}"#, Whole::Embeds),
            (Kind::Responses, r#"{"input":"a"}"#, Whole::Api),
            (Kind::Other, r#"{"input":"a"}"#, Whole::NotInference),
        ];
        for (kind, body, why) in cases {
            assert_eq!(of(kind, body), Some(why), "{body}");
        }
    }
}

//! What an engine reports of its work, as values, and what each kind of engine calls it.

use super::EngineType;

/// A kind of engine, told by the names of its metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// vLLM, both generations.
    Vllm,
    /// `SGLang`, started with `--enable-metrics`.
    Sglang,
    /// TensorRT-LLM's own server.
    TrtLlm,
    /// llama.cpp's server, started with `--metrics`.
    LlamaCpp,
}

impl Dialect {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Vllm, Self::Sglang, Self::TrtLlm, Self::LlamaCpp];

    /// The kind that a rule says its engines are.
    pub const fn of(engine: EngineType) -> Self {
        match engine {
            EngineType::Vllm => Self::Vllm,
            EngineType::LlamaCpp => Self::LlamaCpp,
        }
    }

    /// The word of `kvEngineType`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::TrtLlm => "trtllm",
            Self::LlamaCpp => "llamacpp",
        }
    }

    /// Where it shows its metrics.
    pub const fn path(self) -> &'static str {
        match self {
            // Its `/metrics` is JSON.
            Self::TrtLlm => "/prometheus/metrics",
            Self::Vllm | Self::Sglang | Self::LlamaCpp => "/metrics",
        }
    }

    /// The families in which it says so, the current name first; none where it does not say it at all.
    ///
    /// Source: section 6.4 of the source document for vLLM, whose first generation called the cache's usage
    /// `gpu_cache_usage_perc`; recorded pages of `SGLang` 0.5.23 and llama.cpp; TensorRT-LLM's sources.
    pub const fn families(self, reading: Reading) -> &'static [&'static str] {
        use Reading::{Blocks, FirstToken, GeneratedTokens, KvUsage, PromptTokens, Running, Waiting};
        match (self, reading) {
            (Self::Vllm, Waiting) => &["vllm:num_requests_waiting"],
            (Self::Vllm, Running) => &["vllm:num_requests_running"],
            (Self::Vllm, KvUsage) => &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
            (Self::Vllm, Blocks) => &["vllm:cache_config_info"],
            (Self::Vllm, PromptTokens) => &["vllm:prompt_tokens_total"],
            (Self::Vllm, GeneratedTokens) => &["vllm:generation_tokens_total"],
            (Self::Vllm, FirstToken) => &["vllm:time_to_first_token_seconds"],
            (Self::Sglang, Waiting) => &["sglang:num_queue_reqs"],
            (Self::Sglang, Running) => &["sglang:num_running_reqs"],
            (Self::Sglang, KvUsage) => &["sglang:token_usage"],
            (Self::Sglang, Blocks) => &["sglang:num_pages"],
            (Self::Sglang, PromptTokens) => &["sglang:prompt_tokens_total"],
            (Self::Sglang, GeneratedTokens) => &["sglang:generation_tokens_total"],
            (Self::Sglang, FirstToken) => &["sglang:time_to_first_token_seconds"],
            (Self::TrtLlm, Waiting) => &["trtllm_num_requests_waiting"],
            (Self::TrtLlm, Running) => &["trtllm_num_requests_running"],
            (Self::TrtLlm, KvUsage) => &["trtllm_kv_cache_utilization"],
            (Self::TrtLlm, Blocks) => &["trtllm_kv_cache_max_blocks"],
            (Self::TrtLlm, PromptTokens) => &["trtllm_prompt_tokens_total"],
            (Self::TrtLlm, GeneratedTokens) => &["trtllm_generation_tokens_total"],
            (Self::TrtLlm, FirstToken) => &["trtllm_time_to_first_token_seconds"],
            (Self::LlamaCpp, Waiting) => &["llamacpp:requests_deferred"],
            (Self::LlamaCpp, Running) => &["llamacpp:requests_processing"],
            (Self::LlamaCpp, PromptTokens) => &["llamacpp:prompt_tokens_total"],
            (Self::LlamaCpp, GeneratedTokens) => &["llamacpp:tokens_predicted_total"],
            (Self::LlamaCpp, KvUsage | Blocks | FirstToken) => &[],
        }
    }
}

/// One thing that an engine reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reading {
    /// Requests in its queue.
    Waiting,
    /// Requests that it works on.
    Running,
    /// The share of its KV cache in use.
    KvUsage,
    /// KV blocks of its cache.
    Blocks,
    /// Tokens of prompts so far.
    PromptTokens,
    /// Tokens that it made so far.
    GeneratedTokens,
    /// How long first tokens took so far.
    FirstToken,
}

impl Reading {
    /// Every one.
    pub const ALL: [Self; 7] = [
        Self::Waiting,
        Self::Running,
        Self::KvUsage,
        Self::Blocks,
        Self::PromptTokens,
        Self::GeneratedTokens,
        Self::FirstToken,
    ];
}

/// What one look at an engine's metrics showed. `None` is unknown, which is never the same as zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Readings {
    /// Whose names they were found by.
    pub dialect: Dialect,
    /// Requests in its queue, over all ranks.
    pub waiting: Option<u32>,
    /// Requests that it works on, over all ranks.
    pub running: Option<u32>,
    /// The share of its KV cache in use, 0 to 1, of the fullest rank.
    pub kv_usage: Option<f64>,
    /// KV blocks of its caches, over all ranks.
    pub blocks: Option<u64>,
    /// Tokens of prompts since it started.
    pub prompt_tokens: Option<u64>,
    /// Tokens made since it started.
    pub generated_tokens: Option<u64>,
    /// First tokens since it started.
    pub first_token: Option<FirstTokens>,
}

/// The sum and number of a histogram of times to the first token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FirstTokens {
    /// Seconds in all.
    pub seconds: f64,
    /// How many there were.
    pub count: u64,
}

impl Readings {
    /// Nothing is known of an engine that speaks so.
    pub const fn unknown(dialect: Dialect) -> Self {
        Self {
            dialect,
            waiting: None,
            running: None,
            kv_usage: None,
            blocks: None,
            prompt_tokens: None,
            generated_tokens: None,
            first_token: None,
        }
    }

    /// Whether this is known.
    pub const fn has(&self, reading: Reading) -> bool {
        match reading {
            Reading::Waiting => self.waiting.is_some(),
            Reading::Running => self.running.is_some(),
            Reading::KvUsage => self.kv_usage.is_some(),
            Reading::Blocks => self.blocks.is_some(),
            Reading::PromptTokens => self.prompt_tokens.is_some(),
            Reading::GeneratedTokens => self.generated_tokens.is_some(),
            Reading::FirstToken => self.first_token.is_some(),
        }
    }

    /// Whether nothing at all is known.
    pub fn is_unknown(&self) -> bool {
        Reading::ALL.into_iter().all(|reading| !self.has(reading))
    }

    /// The families that such an engine should have shown and did not, or not with a value that makes sense.
    pub fn missing(&self) -> impl Iterator<Item = &'static str> {
        let unknown = Reading::ALL.into_iter().filter(|reading| !self.has(*reading));
        unknown.filter_map(|reading| self.dialect.families(reading).first().copied())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_name_means_two_things() {
        let names: Vec<_> = Dialect::ALL
            .into_iter()
            .flat_map(|dialect| Reading::ALL.map(|reading| dialect.families(reading)))
            .flatten()
            .collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
    }

    #[test]
    fn what_an_engine_never_says_is_not_missing() {
        let missing = |dialect| Readings::unknown(dialect).missing().count();
        assert_eq!((missing(Dialect::Vllm), missing(Dialect::LlamaCpp)), (7, 4));
        let known = Readings { waiting: Some(0), ..Readings::unknown(Dialect::LlamaCpp) };
        assert!(!known.missing().any(|name| name == "llamacpp:requests_deferred"), "zero is known");
    }
}

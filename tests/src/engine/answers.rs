//! Answers in the recorded shapes: same fields, same order, streamed or not. Those of completions and chats are here, the others in
//! `dialect`.

use serde_json::{Map, Value, json};

use super::call::{Call, Kind};
use super::dialect;
use super::scheduler::{Finish, Output};

/// One of the answers of a call, as far as it has come.
#[derive(Debug, Clone, Default)]
pub(super) struct Choice {
    /// The text so far.
    pub(super) text: String,
    /// Its tokens.
    pub(super) tokens: Vec<u32>,
    /// Set when it is complete.
    pub(super) finish: Option<Finish>,
}

/// What all answers to one call share.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    /// `cmpl-…`, `chatcmpl-…` or `resp_…`.
    pub(super) id: String,
    /// When it was begun, seconds since the Unix epoch.
    pub(super) created: u64,
    fingerprint: String,
    /// What the engine says of its cache.
    pub(super) reporting: Reporting,
    /// The answers, prompt by prompt.
    pub(super) choices: Vec<Choice>,
    /// Prompt tokens found in the cache, per choice.
    cached: Vec<usize>,
}

/// What an engine says about its cache in answers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reporting {
    /// `--enable-prompt-tokens-details`.
    pub(super) details: bool,
    /// Tokens per block.
    pub(super) block_size: usize,
    /// The share of the truth that it admits, where it lies.
    pub(super) share: Option<f64>,
}

impl Answer {
    /// An empty answer to `call`; `request_id` is the client's or a new one.
    pub(super) fn new(call: &Call, request_id: &str, created: u64, version: &str, reporting: Reporting) -> Self {
        let prefix = match call.kind {
            Kind::Completion => "cmpl-",
            Kind::Chat | Kind::Messages => "chatcmpl-",
            Kind::Responses => "resp_",
        };
        let count = call.prompts.len() * call.n;
        Self {
            id: format!("{prefix}{request_id}"),
            created,
            fingerprint: format!("vllm-{version}-simulated"),
            reporting,
            choices: vec![Choice::default(); count],
            cached: vec![0; count],
        }
    }

    /// Takes one token in.
    pub(super) fn take(&mut self, output: Output, text: &str) {
        let choice = &mut self.choices[output.choice];
        choice.text.push_str(text);
        choice.tokens.push(output.token);
        choice.finish = output.finish;
        self.cached[output.choice] = output.cached_tokens;
    }

    /// Whether every choice is complete.
    pub(super) fn complete(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    /// The body of an answer that is not streamed.
    pub(super) fn body(&self, call: &Call) -> Value {
        match call.kind {
            Kind::Completion => self.completion(call),
            Kind::Chat => self.chat(call),
            Kind::Messages | Kind::Responses => dialect::body(self, call),
        }
    }

    /// The server-sent events before the first token.
    pub(super) fn first_frames(&self, call: &Call) -> Vec<String> {
        if call.kind.has_named_events() {
            return dialect::opening(self, call);
        }
        self.opening(call).iter().map(data).collect()
    }

    /// The server-sent event of the token just taken in.
    pub(super) fn frame_of(&self, call: &Call, output: Output, text: &str) -> String {
        if call.kind.has_named_events() {
            return dialect::token(self, call, text);
        }
        data(self.event_of(call, output, text))
    }

    /// The server-sent events after the last token.
    pub(super) fn last_frames(&self, call: &Call) -> Vec<String> {
        if call.kind.has_named_events() {
            return dialect::closing(self, call);
        }
        self.closing(call).iter().map(data).chain([data("[DONE]")]).collect()
    }

    fn completion(&self, call: &Call) -> Value {
        let choices: Vec<Value> =
            (0..).zip(&self.choices).map(|(index, choice)| completion_choice(call, index, choice)).collect();
        json!({
            "id": self.id, "object": "text_completion", "created": self.created, "model": call.model, "choices": choices,
            "service_tier": null, "system_fingerprint": self.fingerprint, "usage": self.usage(call),
            "kv_transfer_params": null, "ec_transfer_params": null, "metrics": null,
        })
    }

    fn chat(&self, call: &Call) -> Value {
        let choices: Vec<Value> =
            (0..).zip(&self.choices).map(|(index, choice)| chat_choice(call, index, choice)).collect();
        let prompt_ids = call.return_token_ids.then(|| call.prompts[0].clone());
        json!({
            "id": self.id, "object": "chat.completion", "created": self.created, "model": call.model, "choices": choices,
            "service_tier": null, "system_fingerprint": self.fingerprint, "usage": self.usage(call),
            "prompt_logprobs": null, "prompt_token_ids": prompt_ids, "prompt_text": null,
            "kv_transfer_params": null, "ec_transfer_params": null, "metrics": null,
        })
    }

    fn usage(&self, call: &Call) -> Value {
        let mut usage = self.counts(call);
        let created = (call.kind == Kind::Chat).then(|| self.created_cache_tokens(call));
        usage["prompt_tokens_details"] = if self.reporting.details {
            json!({"cached_tokens": self.cached_tokens(call), "created_cache_tokens": created, "multimodal_tokens": null})
        } else {
            Value::Null
        };
        usage["completion_tokens_details"] = Value::Null;
        usage
    }

    fn counts(&self, call: &Call) -> Value {
        let prompt: usize = call.prompts.iter().map(Vec::len).sum();
        let output: usize = self.choices.iter().map(|choice| choice.tokens.len()).sum();
        json!({"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output})
    }

    /// Prompt tokens found in the cache, as the engine says. The first choice of each prompt counts: the others find its blocks.
    pub(super) fn cached_tokens(&self, call: &Call) -> usize {
        let cached = self.cached.iter().step_by(call.n).sum();
        self.reporting.share.map_or(cached, |share| share_of(cached, share))
    }

    /// Prompt tokens that are in the cache now and were not.
    pub(super) fn created_cache_tokens(&self, call: &Call) -> usize {
        let size = self.reporting.block_size;
        let full: usize = call.prompts.iter().map(|prompt| prompt.len() / size * size).sum();
        full.saturating_sub(self.cached_tokens(call))
    }

    /// The events before the first token: a chat announces its speaker.
    fn opening(&self, call: &Call) -> Vec<Value> {
        if call.kind == Kind::Completion {
            return Vec::new();
        }
        let prompt_ids = call.return_token_ids.then(|| call.prompts[0].clone());
        let opening = |index| {
            let delta = json!({"role": "assistant", "content": ""});
            let mut event =
                self.event(call, json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]));
            event.insert("prompt_token_ids".into(), json!(prompt_ids));
            event.insert("prompt_text".into(), Value::Null);
            self.with_running_usage(call, event)
        };
        (0..self.choices.len()).map(opening).collect()
    }

    /// The event of one token.
    fn event_of(&self, call: &Call, output: Output, text: &str) -> Value {
        let choice = &self.choices[output.choice];
        let ids = call.return_token_ids.then(|| vec![output.token]);
        let finish = output.finish.map(Finish::label);
        let choice = match call.kind {
            Kind::Completion => {
                let first = call.return_token_ids && choice.tokens.len() == 1;
                let prompt_ids = first.then(|| call.prompts[output.choice / call.n].clone());
                json!({"index": output.choice, "text": text, "logprobs": null, "finish_reason": finish, "stop_reason": null,
                       "prompt_token_ids": prompt_ids, "token_ids": ids})
            }
            _ if finish.is_some() => {
                json!({"index": output.choice, "delta": {"content": text}, "logprobs": null, "finish_reason": finish,
                       "stop_reason": null, "token_ids": ids})
            }
            _ => {
                json!({"index": output.choice, "delta": {"content": text}, "logprobs": null, "finish_reason": null,
                                 "token_ids": ids})
            }
        };
        let mut event = self.event(call, json!([choice]));
        if finish.is_some() && !call.include_usage {
            event.insert("system_fingerprint".into(), json!(self.fingerprint));
        }
        self.with_running_usage(call, event)
    }

    /// The last event, when the client asked for the usage.
    fn closing(&self, call: &Call) -> Option<Value> {
        call.include_usage.then(|| {
            let mut usage = self.counts(call);
            if self.reporting.details {
                usage["prompt_tokens_details"] = match call.kind {
                    Kind::Completion => json!({"cached_tokens": self.cached_tokens(call)}),
                    _ => json!({"cached_tokens": self.cached_tokens(call),
                                         "created_cache_tokens": self.created_cache_tokens(call)}),
                };
            }
            let mut event = self.event(call, json!([]));
            event.insert("usage".into(), usage);
            event.insert("system_fingerprint".into(), json!(self.fingerprint));
            Value::Object(event)
        })
    }

    fn event(&self, call: &Call, choices: Value) -> Map<String, Value> {
        let object = match call.kind {
            Kind::Completion => "text_completion",
            _ => "chat.completion.chunk",
        };
        let mut event = Map::new();
        event.insert("id".into(), json!(self.id));
        event.insert("object".into(), json!(object));
        event.insert("created".into(), json!(self.created));
        event.insert("model".into(), json!(call.model));
        event.insert("choices".into(), choices);
        event
    }

    fn with_running_usage(&self, call: &Call, mut event: Map<String, Value>) -> Value {
        if call.include_usage && call.continuous_usage {
            event.insert("usage".into(), self.counts(call));
        }
        Value::Object(event)
    }
}

fn completion_choice(call: &Call, index: usize, choice: &Choice) -> Value {
    let ids = call.return_token_ids.then(|| choice.tokens.clone());
    let prompt_ids = call.return_token_ids.then(|| call.prompts[index / call.n].clone());
    json!({
        "index": index, "text": choice.text, "logprobs": null, "finish_reason": choice.finish.map(Finish::label), "stop_reason": null,
        "token_ids": ids, "prompt_logprobs": null, "prompt_token_ids": prompt_ids, "routed_experts": null,
    })
}

fn chat_choice(call: &Call, index: usize, choice: &Choice) -> Value {
    let ids = call.return_token_ids.then(|| choice.tokens.clone());
    let message = json!({
        "role": "assistant", "content": choice.text, "refusal": null, "annotations": null, "audio": null, "function_call": null,
        "reasoning": null,
    });
    json!({
        "index": index, "message": message, "logprobs": null, "finish_reason": choice.finish.map(Finish::label), "stop_reason": null,
        "token_ids": ids, "routed_experts": null,
    })
}

/// A server-sent event without a name.
fn data(data: impl std::fmt::Display) -> String {
    format!("data: {data}\n\n")
}

fn share_of(tokens: usize, share: f64) -> usize {
    let admitted = f64::from(u32::try_from(tokens).unwrap_or(u32::MAX)) * share;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "`as` saturates, and a lie need not be exact"
    )]
    let admitted = admitted as usize;
    admitted
}

/// `GET /v1/models`.
pub(super) fn models(config: &super::config::EngineConfig, created: u64) -> Value {
    let permission = json!([{
        "id": "modelperm-simulated", "object": "model_permission", "created": created, "allow_create_engine": false,
        "allow_sampling": true, "allow_logprobs": true, "allow_search_indices": false, "allow_view": true,
        "allow_fine_tuning": false, "organization": "*", "group": null, "is_blocking": false,
    }]);
    let model = |id: &str, root: Option<&str>, parent: Option<&str>, len: Option<usize>| {
        json!({"id": id, "object": "model", "created": created, "owned_by": "vllm", "root": root, "parent": parent,
               "max_model_len": len, "permission": permission})
    };
    let base = model(&config.model, Some(&config.model_root), None, Some(config.max_model_len));
    let place = |adapter: &super::config::Adapter| Some(adapter.path.clone()).filter(|path| !path.is_empty());
    let adapters = config
        .adapters
        .iter()
        .map(|adapter| model(&adapter.name, place(adapter).as_deref(), Some(&config.model), None));
    json!({"object": "list", "data": std::iter::once(base).chain(adapters).collect::<Vec<_>>()})
}

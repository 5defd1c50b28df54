//! A completions or chat body, checked and understood: what the engine is asked to run, or the error vLLM answers.

use hyper::HeaderMap;
use serde_json::{Value, json};

use super::config::EngineConfig;
use super::handoff::Wish;
use super::scheduler::Finish;
use super::tokens::Tokens;

/// Prompts in one call; vLLM has no limit, a test never needs more.
const PROMPTS_MAX: usize = 1024;

/// Choices per prompt.
const N_MAX: u64 = 64;

/// Which of the generating routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `/v1/completions`
    Completion,
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/messages`
    Messages,
    /// `/v1/responses`
    Responses,
}

impl Kind {
    /// Whether the events of its streams have names, and no `[DONE]` after them.
    pub(super) fn has_named_events(self) -> bool {
        matches!(self, Self::Messages | Self::Responses)
    }
}

/// An adapter as a request uses it: number (from 1), name, path.
pub(super) type Lora = (u32, String, String);

/// What the engine is asked to run.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own in the body")]
pub(super) struct Call {
    /// Which route.
    pub(super) kind: Kind,
    /// The model as the client named it; the served one where it named none.
    pub(super) model: String,
    /// The adapter, where `model` is one.
    pub(super) lora: Option<Lora>,
    /// Token ids of each prompt.
    pub(super) prompts: Vec<Vec<u32>>,
    /// Answers per prompt.
    pub(super) n: usize,
    /// Longest answer in tokens, as the client asked.
    pub(super) max_tokens: Option<usize>,
    /// Server-sent events instead of one body.
    pub(super) stream: bool,
    /// A last event with the usage.
    pub(super) include_usage: bool,
    /// The usage so far in every event.
    pub(super) continuous_usage: bool,
    /// Token ids beside the text.
    pub(super) return_token_ids: bool,
    /// `cache_salt`.
    pub(super) salt: Option<String>,
    /// `session_id` of the body, or `X-Session-ID`.
    pub(super) session: Option<String>,
    /// `vllm_xargs.kv_cache_report_mode` is `full`.
    pub(super) report_hits: bool,
    /// The probabilities of the prompt's own tokens are asked for, so that all of it has to be computed.
    ///
    /// Source: vLLM 0.32.0, `SamplingParams.skip_reading_prefix_cache`.
    pub(super) skips_cache: bool,
    /// `seed`; 0 without.
    pub(super) seed: u64,
    /// `instructions` of `/v1/responses`, which its answer repeats.
    pub(super) instructions: Option<String>,
    /// The data-parallel rank that the client wants.
    pub(super) rank: Option<usize>,
    /// What its `kv_transfer_params` ask for.
    pub(super) wish: Wish,
}

/// An error as vLLM's API server answers it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ApiError {
    /// Status and `code`.
    pub(super) status: u16,
    message: String,
    kind: &'static str,
    param: Value,
}

impl ApiError {
    /// 400 for a value that makes no sense.
    pub(super) fn bad(message: impl Into<String>, param: Option<&str>) -> Self {
        Self { status: 400, message: message.into(), kind: "BadRequestError", param: json!(param) }
    }

    /// 400 for a body that does not fit the schema.
    fn invalid(detail: &str, param: Option<&str>) -> Self {
        let message = format!("1 validation error:\n  {detail}");
        Self { status: 400, message, kind: "Bad Request", param: json!(param) }
    }

    /// 500 for a request whose KV did not come.
    pub(super) fn pull_failed() -> Self {
        let message = "KV load failed".to_owned();
        Self { status: 500, message, kind: "InternalServerError", param: Value::Null }
    }

    /// A status on purpose.
    pub(super) fn injected(status: u16) -> Self {
        let kind = match status {
            429 => "RateLimitError",
            503 => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        Self { status, message: format!("injected fault: {status}"), kind, param: Value::Null }
    }

    /// The body.
    pub(super) fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}})
    }
}

/// Parses a JSON body under a content type as `FastAPI` does.
pub(super) fn parse(headers: &HeaderMap, body: &[u8]) -> Result<Value, ApiError> {
    let media = headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or("application/json");
    if !media.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
        return Err(ApiError::invalid("Unsupported Media Type: Only 'application/json' is allowed", None));
    }
    if body.is_empty() {
        return Err(ApiError::invalid(
            "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}",
            Some("body"),
        ));
    }
    let value: Value = serde_json::from_slice(body).map_err(|cause| {
        let at = format!("body.{}", cause.column());
        let detail = format!(
            "{{'type': 'json_invalid', 'loc': '{at}', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {{'error': '{cause}'}}}}"
        );
        ApiError::invalid(&detail, Some(&at))
    })?;
    if value.is_object() {
        return Ok(value);
    }
    let detail = "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid dictionary'}";
    Err(ApiError::invalid(detail, Some("body")))
}

/// The adapter a body asks for, if any; 404 for a model nobody serves.
pub(super) fn model(config: &EngineConfig, body: &Value) -> Result<(String, Option<Lora>), ApiError> {
    let Some(name) = body["model"].as_str() else { return Ok((config.model.clone(), None)) };
    if name == config.model {
        return Ok((name.to_owned(), None));
    }
    let known = (1..).zip(&config.adapters).find(|(_, adapter)| adapter.name == name);
    if let Some((id, adapter)) = known {
        return Ok((name.to_owned(), Some((id, adapter.name.clone(), adapter.path.clone()))));
    }
    let aliases: Vec<&str> = std::iter::once(config.model.as_str())
        .chain(config.adapters.iter().map(|adapter| adapter.name.as_str()))
        .collect();
    Err(ApiError {
        status: 404,
        message: format!("The model `{name}` does not exist. Valid aliases: {}.", aliases.join(", ")),
        kind: "NotFoundError",
        param: json!("model"),
    })
}

impl Call {
    /// Reads a body.
    pub(super) fn read(
        kind: Kind,
        config: &EngineConfig,
        tokens: &Tokens,
        headers: &HeaderMap,
        body: &Value,
    ) -> Result<Self, ApiError> {
        let (model, lora) = model(config, body)?;
        let rank = wanted_rank(config, headers)?;
        let prompts = match kind {
            Kind::Completion => completion_prompts(tokens, body)?,
            Kind::Chat => vec![chat_prompt(tokens, body)?],
            Kind::Messages => vec![chat_prompt(tokens, &as_chat(&body["system"], &body["messages"]))?],
            Kind::Responses => vec![chat_prompt(tokens, &as_chat(&body["instructions"], &body["input"]))?],
        };
        let asked = ["max_completion_tokens", "max_tokens", "max_output_tokens"];
        let asked = asked.iter().find_map(|key| number(body, key).transpose()).transpose()?;
        let max_tokens = asked.map(|asked| usize::try_from(asked).unwrap_or(usize::MAX));
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let n = number(body, "n")?.unwrap_or(1);
        if n == 0 || n > N_MAX {
            return Err(ApiError::bad(format!("n must be between 1 and {N_MAX}, got {n}."), Some("n")));
        }
        let call = Self {
            kind,
            model,
            lora,
            prompts,
            n: usize::try_from(n).unwrap_or(1),
            max_tokens,
            stream: body["stream"] == true,
            include_usage: body["stream_options"]["include_usage"] == true,
            continuous_usage: body["stream_options"]["continuous_usage_stats"] == true,
            return_token_ids: body["return_token_ids"] == true,
            salt: text(&body["cache_salt"]),
            session: text(&body["session_id"]).or_else(|| header("x-session-id")),
            report_hits: config.version.reports_hits() && body["vllm_xargs"]["kv_cache_report_mode"] == "full",
            skips_cache: !body["prompt_logprobs"].is_null() || (body["echo"] == true && !body["logprobs"].is_null()),
            seed: number(body, "seed")?.unwrap_or(0),
            instructions: text(&body["instructions"]),
            rank,
            wish: wish(config, body)?,
        };
        call.check_length(config.token_limit())?;
        Ok(call)
    }

    /// How many tokens the answer to `prompt` has, and how it ends. Without a wish of the client's, a completion has 16 (the API's
    /// default) and a chat stops by itself after `natural`.
    pub(super) fn output_len(&self, prompt: &[u32], natural: usize, limit: usize) -> (usize, Finish) {
        let room = limit.saturating_sub(prompt.len()).max(1);
        let (wanted, finish) = match (self.max_tokens, self.kind) {
            (Some(max), _) => (max, Finish::Length),
            (None, Kind::Completion) => (16, Finish::Length),
            (None, _) => (natural.max(1), Finish::Stop),
        };
        if wanted > room { (room, Finish::Length) } else { (wanted, finish) }
    }

    fn check_length(&self, limit: usize) -> Result<(), ApiError> {
        let asked = self.max_tokens.unwrap_or(1);
        if asked == 0 {
            return Err(ApiError::bad("max_tokens must be at least 1, got 0.", Some("max_tokens")));
        }
        for prompt in &self.prompts {
            let len = prompt.len();
            let (rest, param, value) = if len >= limit {
                let rest = format!(
                    "However, your prompt contains {len} input tokens, which exceeds this limit even without any output tokens. \
                     Please reduce the length of the input prompt."
                );
                (rest, "input_tokens", len)
            } else if len.saturating_add(asked) > limit {
                let rest = format!(
                    "However, you requested {asked} output tokens and your prompt contains {len} input tokens, for a total of {} tokens.",
                    len.saturating_add(asked)
                );
                (rest, "max_tokens", asked)
            } else {
                continue;
            };
            let message = format!(
                "This model's maximum context length is {limit} tokens. {rest} (parameter={param}, value={value})"
            );
            return Err(ApiError::bad(message, Some(param)));
        }
        Ok(())
    }
}

/// What `kv_transfer_params` ask for; 400 where they are no object.
pub(super) fn wish(config: &EngineConfig, body: &Value) -> Result<Wish, ApiError> {
    let params = &body["kv_transfer_params"];
    if !(params.is_null() || params.is_object()) {
        let detail =
            "{'type': 'dict_type', 'loc': 'body.kv_transfer_params', 'msg': 'Input should be a valid dictionary'}";
        return Err(ApiError::invalid(detail, Some("kv_transfer_params")));
    }
    Ok(Wish::read(config, params))
}

/// The rank that `X-data-parallel-rank` pins; what is no number is ignored, as vLLM does.
fn wanted_rank(config: &EngineConfig, headers: &HeaderMap) -> Result<Option<usize>, ApiError> {
    let rank = headers.get("x-data-parallel-rank").and_then(|value| value.to_str().ok());
    let Some(rank) = rank.and_then(|rank| rank.trim().parse::<i64>().ok()) else { return Ok(None) };
    let ranks = config.data_parallel_size;
    match usize::try_from(rank) {
        Ok(known) if known < usize::from(ranks) => Ok(Some(known)),
        _ => Err(ApiError::bad(format!("data_parallel_rank {rank} is out of range [0, {ranks})."), None)),
    }
}

fn number(body: &Value, key: &str) -> Result<Option<u64>, ApiError> {
    match &body[key] {
        Value::Null => Ok(None),
        value => value.as_u64().map(Some).ok_or_else(|| {
            let detail =
                format!("{{'type': 'int_type', 'loc': 'body.{key}', 'msg': 'Input should be a valid integer'}}");
            ApiError::invalid(&detail, Some(key))
        }),
    }
}

fn completion_prompts(tokens: &Tokens, body: &Value) -> Result<Vec<Vec<u32>>, ApiError> {
    let add_special = body["add_special_tokens"].as_bool().unwrap_or(true);
    let prompts = match &body["prompt"] {
        Value::String(text) => vec![encode(tokens, text, add_special)?],
        Value::Array(items) if items.iter().all(Value::is_number) && !items.is_empty() => vec![ids(items)?],
        Value::Array(items) => items.iter().map(|item| prompt(tokens, item, add_special)).collect::<Result<_, _>>()?,
        _ => Vec::new(),
    };
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) || prompts.len() > PROMPTS_MAX {
        return Err(ApiError::bad("Either prompt or prompt_embeds must be provided and non-empty.", Some("prompt")));
    }
    Ok(prompts)
}

fn prompt(tokens: &Tokens, item: &Value, add_special: bool) -> Result<Vec<u32>, ApiError> {
    match item {
        Value::String(text) => encode(tokens, text, add_special),
        Value::Array(items) => ids(items),
        _ => Err(prompt_type()),
    }
}

fn ids(items: &[Value]) -> Result<Vec<u32>, ApiError> {
    let id = |item: &Value| item.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(prompt_type);
    items.iter().map(id).collect()
}

fn prompt_type() -> ApiError {
    ApiError::invalid(
        "{'type': 'string_type', 'loc': 'body.prompt', 'msg': 'Input should be a valid string'}",
        Some("prompt"),
    )
}

fn chat_prompt(tokens: &Tokens, body: &Value) -> Result<Vec<u32>, ApiError> {
    if !body["messages"].is_array() {
        let detail = "{'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}";
        return Err(ApiError::invalid(detail, Some("messages")));
    }
    let text = tokens.chat(body).map_err(|cause| ApiError::bad(format!("{cause:#}"), None))?;
    let prompt = encode(tokens, &text, body["add_special_tokens"] == true)?;
    if prompt.is_empty() { Err(ApiError::bad("The prompt is empty.", Some("messages"))) } else { Ok(prompt) }
}

/// The chat that another route's body means: what the system says first, then a text of the user's or a list of messages.
fn as_chat(system: &Value, messages: &Value) -> Value {
    let system = (!system.is_null()).then(|| json!({"role": "system", "content": system}));
    let user = messages.is_string().then(|| json!({"role": "user", "content": messages}));
    if !(messages.is_string() || messages.is_array()) {
        return Value::Null;
    }
    let listed = messages.as_array().into_iter().flatten().cloned();
    json!({"messages": system.into_iter().chain(user).chain(listed).collect::<Vec<_>>()})
}

fn encode(tokens: &Tokens, text: &str, add_special: bool) -> Result<Vec<u32>, ApiError> {
    tokens.encode(text, add_special).map_err(|cause| ApiError::bad(format!("{cause:#}"), None))
}

/// The tokens of a `/tokenize` body.
pub(super) fn tokenize(tokens: &Tokens, body: &Value) -> Result<Vec<u32>, ApiError> {
    match &body["prompt"] {
        Value::String(text) => encode(tokens, text, body["add_special_tokens"].as_bool().unwrap_or(true)),
        _ => chat_prompt(tokens, body),
    }
}

//! The demo as a client of the VIP.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::api::agent;

/// What came back from the VIP.
pub(super) struct Answer {
    /// The engine, by its own word.
    pub(super) engine: String,
    /// Tokens that the engine took from its cache, by its own word.
    pub(super) cached_tokens: u64,
    /// The endpoint that computed the prompt, where another answered.
    pub(super) prefill: String,
    /// Why kvlb chose: tier, depth and blocks.
    pub(super) tier: String,
    pub(super) depth: String,
    pub(super) blocks: String,
}

/// Sends one request to the VIP.
pub(super) fn ask(url: &str, body: &Value) -> Result<Answer> {
    let mut answer = agent()
        .post(url)
        .header("Content-Type", "application/json")
        .send(body.to_string())
        .with_context(|| format!("POST {url}"))?;
    let header =
        |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("-").to_owned();
    let (engine, tier) = (header("x-sim-engine"), header("x-kvlb-tier"));
    let (depth, blocks) = (header("x-kvlb-depth"), header("x-kvlb-blocks"));
    let prefill = header("x-kvlb-prefill-endpoint");
    let text = answer.body_mut().read_to_string()?;
    let usage =
        if body["stream"] == Value::Bool(true) { usage_of_stream(&text)? } else { serde_json::from_str(&text)? };
    let cached_tokens = usage["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
    Ok(Answer { engine, cached_tokens, prefill, tier, depth, blocks })
}

/// The chunk of a stream that carries the usage; the stream must have ended properly.
fn usage_of_stream(text: &str) -> Result<Value> {
    ensure!(text.trim_end().ends_with("data: [DONE]"), "the stream did not end with [DONE]");
    text.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .rfind(|chunk| chunk["usage"].is_object())
        .context("no usage in the stream")
}

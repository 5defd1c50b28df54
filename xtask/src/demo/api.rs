//! The demo as a client: of kvlb's API, and of the VIP.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// kvlb's REST API and metrics.
pub(super) struct Api {
    base: String,
    agent: ureq::Agent,
}

impl Api {
    pub(super) fn new(address: &str) -> Self {
        Self { base: format!("http://{address}"), agent: agent() }
    }

    pub(super) fn get(&self, path: &str) -> Result<String> {
        let url = format!("{}{path}", self.base);
        let mut answer = self.agent.get(&url).call().with_context(|| format!("GET {url}"))?;
        Ok(answer.body_mut().read_to_string()?)
    }

    pub(super) fn json(&self, path: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.get(path)?)?)
    }

    /// Every series of the metrics page.
    pub(super) fn metrics(&self) -> Result<Metrics> {
        let page = self.get("/netlox/v1/metrics")?;
        let series = page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series.to_owned(), value.parse().ok()?))
        });
        Ok(Metrics(series.collect()))
    }
}

/// One reading of the metrics page.
pub(super) struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    pub(super) fn value(&self, series: &str) -> f64 {
        self.0.get(series).copied().unwrap_or_default()
    }

    /// The sum over all series of a family.
    pub(super) fn sum(&self, family: &str) -> f64 {
        let of_family = |series: &str| series.split('{').next() == Some(family);
        self.0.iter().filter(|(series, _)| of_family(series)).map(|(_, value)| value).sum()
    }

    /// How many series of a family have this value.
    pub(super) fn count(&self, family: &str, wanted: f64) -> usize {
        let of_family = |series: &str| series.split('{').next() == Some(family);
        self.0.iter().filter(|(series, value)| of_family(series) && (**value - wanted).abs() < f64::EPSILON).count()
    }

    /// What moved since `before`, of the families whose name begins with `prefix`.
    pub(super) fn moved(&self, before: &Self, prefix: &str) -> Vec<(String, f64)> {
        let delta = |(series, value): (&String, &f64)| (series.clone(), value - before.value(series));
        self.0.iter().filter(|(series, _)| series.starts_with(prefix)).map(delta).filter(|(_, by)| *by != 0.0).collect()
    }
}

/// What came back from the VIP.
pub(super) struct Answer {
    /// The engine, by its own word.
    pub(super) engine: String,
    /// Tokens that the engine took from its cache, by its own word.
    pub(super) cached_tokens: u64,
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
    let text = answer.body_mut().read_to_string()?;
    let usage =
        if body["stream"] == Value::Bool(true) { usage_of_stream(&text)? } else { serde_json::from_str(&text)? };
    let cached_tokens = usage["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
    Ok(Answer { engine, cached_tokens, tier, depth, blocks })
}

/// The chunk of a stream that carries the usage; the stream must have ended properly.
fn usage_of_stream(text: &str) -> Result<Value> {
    ensure!(text.trim_end().ends_with("data: [DONE]"), "the stream did not end with [DONE]");
    text.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .rfind(|chunk| chunk["usage"].is_object())
        .context("no usage in the stream")
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(20)))
        .http_status_as_error(true)
        .build()
        .into()
}

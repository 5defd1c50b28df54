//! `kvlb verify`: the document's go/no-go gate, with real requests.
//!
//! Source: the source document, section 9.

use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::api::{Api, bounded_text};
use super::{Answer, CliError, Output, error, find_rule};
use crate::clock;

/// How often something that is waited for is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Blocks of the prompt that both requests share.
const SHARED_BLOCKS: usize = 6;
/// Warm requests tried: one may be sent elsewhere by the load bound, or by cold-start seeding.
const WARM_TRIES: usize = 3;
/// Words that are one token each or more in every vocabulary.
const WORDS: [&str; 8] = ["river", "stone", "seven", "garden", "window", "paper", "yellow", "harbour"];

#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  kvlb verify 1
  kvlb verify chat --address 127.0.0.1:8080 -o json

It sends real requests: one, and up to three that share its prompt, of a few blocks each, with max_tokens 1. It ends with 0
where every step passes; with 6 where one fails, which it names; with 5 where the API or the VIP does not answer.")]
pub(super) struct Verify {
    /// The rule's number or name
    #[arg(value_name = "RULE")]
    rule: String,
    /// Where the requests are sent, instead of the rule's VIP
    #[arg(long, value_name = "ADDR:PORT")]
    address: Option<SocketAddr>,
    /// The model that is asked for [default: the rule's, else the first that is listed]
    #[arg(long, value_name = "MODEL")]
    model_name: Option<String>,
    /// Seconds that each step may wait
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=600))]
    wait: u64,
}

/// One step and how it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Step {
    #[serde(rename = "step")]
    name: &'static str,
    ok: bool,
    detail: String,
}

/// Why the gate is shut.
enum Shut {
    /// A step failed.
    Step(String),
    /// Nobody answers at the VIP.
    Gone(String),
    /// The API did not answer, or refused.
    Api(CliError),
}

impl From<CliError> for Shut {
    fn from(error: CliError) -> Self {
        Self::Api(error)
    }
}

type Passed = Result<String, Shut>;

const STEPS: [&str; 8] =
    ["rule", "endpoints", "events", "contract", "cold request", "inventory", "warm request", "cached tokens"];

impl Verify {
    pub(super) async fn run(&self, api: &Api, output: Option<Output>) -> Result<Answer, CliError> {
        let http = crate::tls::plain_client().no_proxy().timeout(self.patience()).build();
        let http = http.map_err(|error| CliError::Failed(format!("make an HTTP client: {error}")))?;
        let mut gate =
            Gate { api, http, verify: self, rule: Value::Null, prompt: prompt(1), owner: None, cached: None };
        let mut steps = Vec::new();
        let mut code = 0;
        for (number, name) in STEPS.into_iter().enumerate() {
            let (ok, detail) = match gate.step(number).await {
                Ok(detail) => (true, detail),
                Err(Shut::Step(why)) => {
                    code = error::MISMATCH;
                    (false, why)
                }
                Err(Shut::Gone(why)) => {
                    code = error::UNAVAILABLE;
                    (false, why)
                }
                Err(Shut::Api(error)) => {
                    code = error.exit_code();
                    (false, error.to_string())
                }
            };
            progress(number, name, ok, &detail);
            steps.push(Step { name, ok, detail });
            if !ok {
                break;
            }
        }
        let passed = code == 0;
        let text = match output {
            Some(Output::Json) => {
                let verdict = if passed { "ok" } else { "failed" };
                format!("{:#}\n", json!({"verdict": verdict, "steps": steps, "ep_idx": gate.owner}))
            }
            _ if passed => "verified: requests are routed by the blocks that engines hold\n".to_owned(),
            _ => {
                let last = steps.last().map(|step| format!("{}: {}", step.name, step.detail)).unwrap_or_default();
                format!("not verified: {last}\n")
            }
        };
        Ok(Answer { text, code })
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.wait)
    }
}

/// One line per step, beside the result on standard output.
fn progress(number: usize, step: &str, ok: bool, detail: &str) {
    let word = if ok { "ok" } else { "FAILED" };
    // Nobody is there to be told where standard error is closed.
    drop(writeln!(io::stderr(), "{}/{} {step}: {word}: {detail}", number + 1, STEPS.len()));
}

/// What the steps learn.
struct Gate<'a> {
    api: &'a Api,
    http: reqwest::Client,
    verify: &'a Verify,
    rule: Value,
    prompt: String,
    /// The endpoint that holds the prompt.
    owner: Option<u64>,
    cached: Option<u64>,
}

impl Gate<'_> {
    async fn step(&mut self, number: usize) -> Passed {
        match number {
            0 => self.rule().await,
            1 => self.endpoints().await,
            2 => self.events().await,
            3 => self.contract().await,
            4 => self.cold().await,
            5 => self.inventory().await,
            6 => self.warm().await,
            _ => self.cached(),
        }
    }

    async fn rule(&mut self) -> Passed {
        self.rule = find_rule(self.api, &self.verify.rule).await?;
        if let Some(why) = self.rule["refused"].as_str() {
            return shut(format!("the rule is kept but not in force: {why}"));
        }
        let mode = self.rule["serviceArguments"]["kvExactMode"].as_u64().unwrap_or(0);
        if mode == 0 {
            return shut("kvExactMode is 0: the KV tier is off for this rule; create it with kvExactMode 1 or 3");
        }
        let size = self.status().await?["kvBlockSize"].as_u64().unwrap_or(16);
        self.prompt = prompt(usize::try_from(size).unwrap_or(16));
        Ok(format!("rule {}, kvExactMode {mode}, block size {size}", self.rule["id"]))
    }

    async fn endpoints(&mut self) -> Passed {
        let wanted =
            |endpoint: &Value| matches!(endpoint["state"].as_str(), Some("active" | "draining" | "admin-down"));
        let up = self
            .wait(async |gate| {
                gate.refresh().await?;
                Ok(gate.endpoints_of().iter().all(wanted).then(|| gate.endpoints_of().len().to_string()))
            })
            .await?;
        if let Some(count) = up {
            return Ok(format!("{count} up"));
        }
        let down = self.endpoints_of().iter().filter(|endpoint| !wanted(endpoint)).map(name).collect::<Vec<_>>();
        shut(format!("{} not up; `kvlb get ep` shows the probes", down.join(", ")))
    }

    async fn events(&mut self) -> Passed {
        let deaf = |gate: &Self| -> Vec<String> {
            gate.subscribed().filter(|endpoint| endpoint["kvStatus"]["connected"] != true).map(name).collect()
        };
        let heard = self
            .wait(async |gate| {
                gate.refresh().await?;
                Ok((deaf(gate).is_empty() && gate.subscribed().next().is_some()).then(String::new))
            })
            .await?;
        if heard.is_some() {
            return Ok(format!("{} event sockets connected", self.subscribed().count()));
        }
        if self.subscribed().next().is_none() {
            return shut("no endpoint is subscribed: with kvExactMode 1 tag prefill endpoints with ep_role 1");
        }
        shut(format!(
            "no events from {}: compare kvZmqPort with the engine's --kv-events-config; `kvlb preflight {}` says more",
            deaf(self).join(", "),
            self.rule["id"]
        ))
    }

    async fn contract(&mut self) -> Passed {
        self.refresh().await?;
        let mut shown = Vec::new();
        for endpoint in self.subscribed() {
            let status = &endpoint["kvStatus"];
            let contract = status["contract"].as_str().unwrap_or("unverified");
            // What is named in our own way needs no agreement.
            if contract == "mismatch" && status["keying"] != "rehash" {
                let part = |name: &str| status[name].as_str().unwrap_or_default().to_owned();
                return shut(format!("{}: mismatch: {}: {}", name(endpoint), part("leg"), part("detail")));
            }
            let keying = if status["keying"] == "rehash" { " (rehash)" } else { "" };
            shown.push(format!("{contract}{keying}"));
        }
        Ok(shown.join(", "))
    }

    /// A prompt that nobody has sent before, and where its blocks turn up.
    async fn cold(&mut self) -> Passed {
        let answer = self.complete("Begin.").await?;
        let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap_or(0);
        let owner = self
            .wait(async |gate| {
                let explained = gate.explain("Go on.").await?;
                let held = |candidate: &&Value| candidate["depth"].as_u64().is_some_and(|depth| depth > 0);
                let holder = explained["candidates"].as_array().into_iter().flatten().find(held);
                Ok(holder.map(|holder| (holder["ep_idx"].as_u64(), holder["depth"].clone())))
            })
            .await?;
        if let Some((owner, depth)) = owner {
            self.owner = owner;
            return Ok(format!("{tokens} tokens; endpoint {} announced {depth} blocks of it", owner.unwrap_or(0)));
        }
        let explained = self.explain("Go on.").await?;
        let why = explained["reason"].as_str().unwrap_or("no endpoint announced its blocks").to_owned();
        let detail = explained["detail"].as_str().map(|detail| format!(" ({detail})")).unwrap_or_default();
        self.contract().await?;
        shut(format!(
            "the request was answered, and its blocks were not found: {why}{detail}; see docs/troubleshooting.md"
        ))
    }

    async fn inventory(&mut self) -> Passed {
        self.refresh().await?;
        let owner = self.owner_endpoint();
        match owner["kvStatus"]["blocks"].as_u64() {
            Some(blocks) if blocks > 0 => Ok(format!("{} holds {blocks} blocks", name(&owner))),
            _ => shut(format!("{} holds no blocks", name(&owner))),
        }
    }

    async fn warm(&mut self) -> Passed {
        let owner = self.owner.unwrap_or(0);
        for attempt in 0..WARM_TRIES {
            let before = self.hits(owner).await?;
            let answer = self.complete(&format!("Go on, part {attempt}.")).await?;
            self.cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            if self.hits(owner).await? > before {
                return Ok(format!("loxilb_pd_kv_tier15_hits_total{{ep_idx=\"{owner}\"}} moved"));
            }
        }
        let explained = self.explain("And now.").await?;
        shut(format!(
            "hits of endpoint {owner} did not move in {WARM_TRIES} requests: tier {}, reason {}",
            explained["tier"], explained["reason"]
        ))
    }

    /// The engine's own word, where it gives one.
    fn cached(&mut self) -> Passed {
        match self.cached {
            Some(0) => shut("the engine that was chosen reports 0 cached tokens: it does not hold what it announced"),
            Some(cached) => Ok(format!("the engine took {cached} tokens from its cache")),
            None => Ok("not reported: the engine runs without --enable-prompt-tokens-details".to_owned()),
        }
    }

    async fn refresh(&mut self) -> Result<(), CliError> {
        let id = self.rule["id"].to_string();
        self.rule = find_rule(self.api, &id).await?;
        Ok(())
    }

    async fn status(&self) -> Result<Value, CliError> {
        let id = self.rule["id"].to_string();
        self.api.get(&["config", "ai", "kv", "status"], &[("service_id", id)]).await
    }

    fn endpoints_of(&self) -> &[Value] {
        self.rule["endpoints"].as_array().map_or(&[], Vec::as_slice)
    }

    fn subscribed(&self) -> impl Iterator<Item = &Value> {
        let in_service = |endpoint: &&Value| !matches!(endpoint["state"].as_str(), Some("admin-down"));
        self.endpoints_of().iter().filter(|endpoint| endpoint["kvStatus"].is_object()).filter(in_service)
    }

    fn owner_endpoint(&self) -> Value {
        let owner = usize::try_from(self.owner.unwrap_or(0)).unwrap_or(0);
        self.endpoints_of().get(owner).cloned().unwrap_or_default()
    }

    async fn hits(&self, owner: u64) -> Result<f64, CliError> {
        let series = format!("loxilb_pd_kv_tier15_hits_total{{ep_idx=\"{owner}\"}} ");
        let page = self.api.text(&["metrics"]).await?;
        let value = page.lines().find_map(|line| line.strip_prefix(series.as_str())?.trim().parse().ok());
        Ok(value.unwrap_or(0.0))
    }

    /// Looks until there is something, or time is up.
    async fn wait<T>(
        &mut self,
        mut look: impl AsyncFnMut(&mut Self) -> Result<Option<T>, Shut>,
    ) -> Result<Option<T>, Shut> {
        let deadline = clock::now() + self.verify.patience();
        loop {
            if let Some(found) = look(self).await? {
                return Ok(Some(found));
            }
            if clock::now() >= deadline {
                return Ok(None);
            }
            sleep(LOOK_EVERY).await;
        }
    }

    async fn body(&self, end: &str) -> Result<Value, Shut> {
        let model = match (&self.verify.model_name, self.rule["serviceArguments"]["model_name"].as_str()) {
            (Some(model), _) => model.clone(),
            (None, Some(model)) if !model.is_empty() => model.to_owned(),
            _ => self.listed().await?,
        };
        Ok(json!({"model": model, "prompt": format!("{} {end}", self.prompt), "max_tokens": 1, "temperature": 0}))
    }

    /// The first base model that the VIP lists.
    async fn listed(&self) -> Result<String, Shut> {
        let page = self.send(self.http.get(self.url("/v1/models"))).await?;
        let base = |card: &&Value| card["parent"].is_null() && card["id"].is_string();
        let model = page["data"].as_array().into_iter().flatten().find(base).and_then(|card| card["id"].as_str());
        model
            .map(str::to_owned)
            .ok_or_else(|| Shut::Step("the VIP lists no model; name one with --model-name".to_owned()))
    }

    async fn complete(&self, end: &str) -> Result<Value, Shut> {
        let body = self.body(end).await?;
        self.send(self.http.post(self.url("/v1/completions")).json(&body)).await
    }

    async fn explain(&self, end: &str) -> Result<Value, Shut> {
        let query = [("service_id", self.rule["id"].to_string()), ("path", "/v1/completions".to_owned())];
        let body = self.body(end).await?;
        Ok(self.api.post(&["config", "ai", "kv", "explain"], &query, &body).await?)
    }

    fn url(&self, path: &str) -> String {
        let service = &self.rule["serviceArguments"];
        let vip = match service["externalIP"].as_str().unwrap_or_default().trim_matches(['[', ']']) {
            "0.0.0.0" => "127.0.0.1",
            "::" => "[::1]",
            vip => vip,
        };
        let vip = if vip.contains(':') && !vip.starts_with('[') { format!("[{vip}]") } else { vip.to_owned() };
        let place =
            self.verify.address.map_or_else(|| format!("{vip}:{}", service["port"]), |address| address.to_string());
        format!("http://{place}{path}")
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Value, Shut> {
        let host = self.rule["serviceArguments"]["host"].as_str().filter(|host| !host.is_empty() && *host != "any");
        let request = match host {
            Some(host) => request.header("host", host),
            None => request,
        };
        let place = self.url("");
        let gone = |error: &reqwest::Error| {
            let mut cause: &dyn std::error::Error = error;
            while let Some(inner) = cause.source() {
                cause = inner;
            }
            Shut::Gone(format!("no answer from {place}: {cause}; --address says where else the rule can be reached"))
        };
        let answer = request.send().await.map_err(|error| gone(&error))?;
        let status = answer.status();
        let Some(text) = bounded_text(answer).await.map_err(|error| gone(&error))? else {
            return Err(Shut::Step(format!("{place} answered without an end")));
        };
        if !status.is_success() {
            let shown: String = text.chars().filter(|c| !c.is_control()).take(300).collect();
            return Err(Shut::Step(format!("{place} answered {status}: {shown}")));
        }
        Ok(serde_json::from_str(&text).unwrap_or_default())
    }
}

fn shut(why: impl Into<String>) -> Passed {
    Err(Shut::Step(why.into()))
}

fn name(endpoint: &Value) -> String {
    format!(
        "endpoint {} ({}:{})",
        endpoint["ep_idx"],
        endpoint["endpointIP"].as_str().unwrap_or_default(),
        endpoint["targetPort"]
    )
}

/// A text of more than [`SHARED_BLOCKS`] blocks that nobody has sent before.
fn prompt(block_size: usize) -> String {
    let chance = RandomState::new();
    let mut text = format!("Verification {:016x}.", chance.hash_one(clock::unix_seconds()));
    for number in 0..SHARED_BLOCKS * block_size {
        let at = usize::try_from(chance.hash_one(number) % WORDS.len() as u64).unwrap_or(0);
        text.push(' ');
        text.push_str(WORDS[at]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_prompts_are_alike_and_each_has_its_blocks() {
        let (one, other) = (prompt(16), prompt(16));
        assert!(one != other && one.split_whitespace().count() > SHARED_BLOCKS * 16);
        assert_ne!(one.split_whitespace().nth(1), other.split_whitespace().nth(1), "they differ in their first block");
    }
}

//! `kvlb preflight`: the document's read-only check, of a rule or of engines that have none yet.

#![expect(clippy::doc_markdown, reason = "these comments are help texts")]

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::api::Api;
use super::grid::{Grid, keep};
use super::table::Screen;
use super::{Answer, CliError, Output, error, find_rule};
use crate::clock;
use crate::config::{ConfigError, Engines, Env};
use crate::contract::{BlockSize, HashAlgo};
use crate::discover::{self, Asker, Look, OurTokens, Ours};
use crate::fleet::{EndpointKey, Keying};
use crate::staging;
use crate::tokenize::{Limits, WallTime};

/// How long each answer of an engine may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// vLLM's default block size on GPUs, and the document's.
const BLOCK_SIZE: u32 = 16;
/// vLLM's default event port.
const ZMQ_PORT: u16 = 5557;
/// LoxiLB's distance from the event port to the replay port.
const REPLAY_OFFSET: u16 = 1000;

#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  kvlb preflight 1
  kvlb preflight chat -o json
  kvlb preflight http://192.0.2.1:8000 http://192.0.2.2:8000 --kv-block-size=32
  LLB_KV_NONE_HASH_SEED=0 kvlb preflight http://192.0.2.1:8000 --allow-unknown

It changes nothing: no rule, no state, and no request that a model works on (/tokenize is none). With a rule, the daemon
looks, with its own seed, tokenizers and inventories. With URLs no daemon is needed: LLB_KV_NONE_HASH_SEED and the flags are
our side, and the engines' events are listened to for --wait seconds.

Ends with 0 only where every leg holds; with 6 where one is broken, or cannot be told (unless --allow-unknown); with 5 where
an engine does not answer.")]
pub(super) struct Preflight {
    /// A rule's number or name, or engines as http://HOST:PORT
    #[arg(value_name = "RULE|URL", required = true)]
    targets: Vec<String>,
    /// With URLs: tokens per block [default: 16]
    #[arg(long, value_name = "TOKENS")]
    kv_block_size: Option<u32>,
    /// With URLs: how blocks are named [default: sha256_cbor]
    #[arg(long, value_name = "ALGO")]
    kv_hash_algo: Option<String>,
    /// With URLs: the event port [default: 5557]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    kv_zmq_port: Option<u16>,
    /// With URLs: the replay port [default: the event port + 1000]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    kv_replay_port: Option<u16>,
    /// With URLs: data-parallel ranks [default: as many as there are]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    kv_dp_ranks: Option<u8>,
    /// With URLs: the model [default: the first that an engine lists]
    #[arg(long, value_name = "MODEL")]
    model_name: Option<String>,
    /// With URLs: staged tokenizers [env: KVLB_TOKENIZER_DIR] [default: /etc/loxilb/tokenizers]
    #[arg(long, value_name = "DIR")]
    tokenizer_dir: Option<PathBuf>,
    /// With URLs: the engines' --api-key [env: KVLB_ENGINE_KEY]
    #[arg(long, value_name = "KEY")]
    engine_key: Option<String>,
    /// With URLs: seconds to listen to an engine's events
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    wait: u64,
    /// A leg that cannot be told does not count
    #[arg(long)]
    allow_unknown: bool,
}

impl Preflight {
    /// What flags and variables say of our side.
    pub(super) fn engines(&self, env: &Env) -> Result<Engines, ConfigError> {
        Engines::new(self.tokenizer_dir.as_ref(), self.engine_key.as_ref(), env)
    }

    pub(super) async fn run(
        &self,
        api: &Api,
        engines: Option<&Engines>,
        output: Option<Output>,
    ) -> Result<Answer, CliError> {
        let report = match (self.places()?, engines) {
            (Some(places), Some(engines)) => json!(self.look(&places, engines).await?),
            _ => self.ask(api).await?,
        };
        let text = match output {
            Some(Output::Json) => format!("{report:#}\n"),
            _ => table(&report, Screen::of_process()),
        };
        Ok(Answer { text, code: self.code(&report) })
    }

    /// The engines, where they are what was named.
    fn places(&self) -> Result<Option<Vec<EndpointKey>>, CliError> {
        let is_place = |target: &&String| target.contains(':');
        let named = self.targets.iter().filter(is_place).count();
        if named == 0 {
            return Ok(None);
        }
        if named < self.targets.len() {
            return Err(CliError::Argument("name a rule or engines, not both".to_owned()));
        }
        let mut places = Vec::with_capacity(named);
        for target in &self.targets {
            let place = discover::place(target).map_err(|error| CliError::Argument(error.to_string()))?;
            if !places.contains(&place) {
                places.push(place);
            }
        }
        Ok(Some(places))
    }

    async fn ask(&self, api: &Api) -> Result<Value, CliError> {
        let [rule] = &self.targets[..] else {
            return Err(CliError::Argument("one rule at a time".to_owned()));
        };
        if let Some(flag) = self.flag_for_urls() {
            return Err(CliError::Argument(format!("{flag} goes with URLs: a rule says that itself")));
        }
        let id = find_rule(api, rule).await?["id"].to_string();
        api.get(&["config", "ai", "kv", "preflight"], &[("service_id", id)]).await
    }

    fn flag_for_urls(&self) -> Option<&'static str> {
        let given = [
            ("--kv-block-size", self.kv_block_size.is_some()),
            ("--kv-hash-algo", self.kv_hash_algo.is_some()),
            ("--kv-zmq-port", self.kv_zmq_port.is_some()),
            ("--kv-replay-port", self.kv_replay_port.is_some()),
            ("--kv-dp-ranks", self.kv_dp_ranks.is_some()),
            ("--model-name", self.model_name.is_some()),
            ("--tokenizer-dir", self.tokenizer_dir.is_some()),
            ("--engine-key", self.engine_key.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }

    /// Looks at engines by itself, all at the same time.
    async fn look(&self, places: &[EndpointKey], engines: &Engines) -> Result<discover::Report, CliError> {
        let ours = self.ours(engines)?;
        let asker = Asker::new(ANSWER_TIMEOUT, engines.key.clone())
            .map_err(|error| CliError::Failed(format!("make an HTTP client: {error}")))?;
        let mut tasks = tokio::task::JoinSet::new();
        for (ep_idx, place) in places.iter().cloned().enumerate() {
            let (ours, asker, wait) = (ours.clone(), asker.clone(), Duration::from_secs(self.wait));
            tasks.spawn(async move {
                let facts = discover::read(&asker, &place, true, ours.model.as_deref());
                let (facts, heard) = tokio::join!(facts, discover::hear(&place, &ours, wait));
                let endpoint = place.to_string();
                Look { ep_idx, endpoint, ours, facts, heard: Some(heard), tokens: Err(String::new()) }
            });
        }
        let mut looks = tasks.join_all().await;
        looks.sort_unstable_by_key(|look| look.ep_idx);
        for look in &mut looks {
            let listed = look.facts.base_models().next().map(|model| model.id.clone());
            look.tokens = our_tokens(engines, ours.model.clone().or(listed));
        }
        Ok(discover::preflight(&looks))
    }

    fn ours(&self, engines: &Engines) -> Result<Ours, CliError> {
        let bad = |flag: &str, allowed: &str| CliError::Argument(format!("{flag}: {allowed}"));
        let block_size = BlockSize::new(self.kv_block_size.unwrap_or(BLOCK_SIZE));
        let algo = self.kv_hash_algo.as_deref().map_or(Ok(HashAlgo::Sha256Cbor), str::parse);
        let algos = || HashAlgo::ALL.map(HashAlgo::label).join(", ");
        let zmq_port = self.kv_zmq_port.unwrap_or(ZMQ_PORT);
        Ok(Ours {
            block_size: block_size.ok_or_else(|| bad("--kv-block-size", "1 and more"))?,
            algo: algo.map_err(|()| bad("--kv-hash-algo", &algos()))?,
            seed: engines.none_seed.clone(),
            keying: Keying::Auto,
            zmq_port,
            replay_port: self.kv_replay_port.or_else(|| zmq_port.checked_add(REPLAY_OFFSET)),
            ranks: self.kv_dp_ranks,
            model: self.model_name.clone(),
        })
    }

    fn code(&self, report: &Value) -> u8 {
        match report["verdict"].as_str() {
            Some("ok" | "warn") => 0,
            Some("unreachable") => error::UNAVAILABLE,
            Some("unknown") if self.allow_unknown => 0,
            _ => error::MISMATCH,
        }
    }
}

fn our_tokens(engines: &Engines, model: Option<String>) -> OurTokens {
    let Some(model) = model else { return Err("no model is known whose tokenizer could be staged".to_owned()) };
    let tokenizer = staging::load_now(&engines.tokenizer_dir, &model)?;
    let now = Some(WallTime::from_seconds(clock::unix_seconds()));
    Ok(discover::our_tokens(&tokenizer, &Limits { now, ..Limits::default() }))
}

/// A table per endpoint, one of the pool, and what to do.
fn table(report: &Value, screen: Screen) -> String {
    let mut text = String::new();
    let mut advice = Vec::new();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut sections: Vec<(String, Vec<Value>)> = list(&report["endpoints"])
        .iter()
        .map(|endpoint| {
            (format!("endpoint {} {}", endpoint["ep_idx"], plain(&endpoint["endpoint"])), list(&endpoint["legs"]))
        })
        .collect();
    sections.push(("pool".to_owned(), list(&report["pool"])));
    for (title, legs) in sections.iter().filter(|(_, legs)| !legs.is_empty()) {
        let mut grid = Grid::new(&[keep("Leg"), keep("Engine"), keep("Ours"), keep("Verdict")]);
        for leg in legs {
            grid.add(["leg", "engine", "ours", "verdict"].map(|name| plain(&leg[name]).to_owned()));
            if let Some(what) = leg["advice"].as_str() {
                advice.push(format!("{title}: {} {}: {what}\n", plain(&leg["leg"]), plain(&leg["verdict"])));
            }
        }
        text.extend([format!("{title}\n"), grid.render(screen), "\n".to_owned()]);
    }
    text.extend(advice);
    text.extend([format!("verdict: {}\n", plain(&report["verdict"]))]);
    text
}

fn plain(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

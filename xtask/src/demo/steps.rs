//! What happens on the stage.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use super::Leg;
use super::ask::{Answer, ask};
use super::children::{ENGINES, MODEL, Stage, VIP};
use crate::run::now;

const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
/// Events leave an engine after the prefill and take well under a millisecond; the rest is patience.
pub(super) const EVENT_LIMIT: Duration = Duration::from_secs(5);

/// One kind of request, sent cold and then warm.
struct Scene {
    name: &'static str,
    path: &'static str,
    stream: bool,
    /// The conversation's common beginning; the number keeps scenes apart.
    body: fn(scene: usize, question: &str) -> Value,
}

const SCENES: [Scene; 4] = [
    Scene { name: "completions", path: "/v1/completions", stream: false, body: completion },
    Scene { name: "completions, streamed", path: "/v1/completions", stream: true, body: completion },
    Scene { name: "chat", path: "/v1/chat/completions", stream: false, body: chat },
    Scene { name: "chat, streamed", path: "/v1/chat/completions", stream: true, body: chat },
];

pub(super) fn play(stage: &Stage, broken: Option<Leg>) -> Result<()> {
    create_rule(stage)?;
    wait_for(EVENT_LIMIT, || subscribed(stage, broken))?;
    println!();
    println!(
        "{:<24} {:<5} {:<10} {:>6} {:>6} {:>14}  counters that moved",
        "request", "", "answered", "depth", "blocks", "cached tokens"
    );
    let mut unproved = Vec::new();
    for (number, scene) in SCENES.iter().enumerate() {
        if let Err(missing) = act(stage, number, scene, broken) {
            unproved.push(format!("{}: {missing}", scene.name));
        }
    }
    println!();
    stage.cli(&["get", "lb", "-o", "wide"])?;
    stage.cli(&["get", "kvstatus"])?;
    println!();
    if unproved.is_empty() {
        println!(
            "Both proofs hold for every warm request: the endpoint that holds the blocks answered, and its counter moved."
        );
    }
    for line in &unproved {
        println!("no proof for {line}");
    }
    match broken_leg(stage)? {
        Some(leg) => bail!("the contract does not hold: {leg}"),
        None if unproved.is_empty() => Ok(()),
        None => bail!("no endpoint reports a broken leg; see the logs"),
    }
}

fn create_rule(stage: &Stage) -> Result<()> {
    let endpoints = format!("--endpoints={}", ENGINES.map(|address| format!("{address}:1")).join(","));
    stage.cli(&[
        "create",
        "lb",
        VIP,
        "--tcp=8080:8000",
        &endpoints,
        "--mode=fullproxy",
        "--select=rr",
        "--kv-exact-mode=3",
        "--kv-zmq-port=5557",
        "--kv-hash-algo=sha256_cbor",
        "--kv-block-size=16",
        "--decision-headers",
    ])
}

/// Whether every endpoint's events are listened to; where they are broken on purpose, whether the attempt was made.
fn subscribed(stage: &Stage, broken: Option<Leg>) -> Result<bool> {
    if broken == Some(Leg::Events) {
        return Ok(true);
    }
    Ok(stage.api.metrics()?.count("loxilb_kv_subscriber_connected", 1.0) == ENGINES.len())
}

/// One cold and one warm request with the same beginning, and the proofs for the warm one.
fn act(stage: &Stage, number: usize, scene: &Scene, broken: Option<Leg>) -> Result<()> {
    let url = format!("http://{VIP}:8080{}", scene.path);
    let request = |question: &str| {
        let mut body = (scene.body)(number, question);
        if scene.stream {
            body["stream"] = json!(true);
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    };
    let before = stage.api.metrics()?;
    let cold = ask(&url, &request("What is the capital of France?"))?;
    let after_cold = stage.api.metrics()?;
    show(scene.name, "cold", &cold, &after_cold.moved(&before, "loxilb_pd_kv_tier15"));
    let blocks_before = before.sum("loxilb_pd_kv_blocks");
    let announced = wait_for(EVENT_LIMIT, || Ok(stage.api.metrics()?.sum("loxilb_pd_kv_blocks") > blocks_before));
    let owner = (0..ENGINES.len()).find(|n| cold.engine == format!("engine-{n}"));
    if let (Some(owner), Some(Leg::Seed | Leg::BlockSize | Leg::Algo)) = (owner, broken) {
        // Too late to matter for the proofs is told by the proofs.
        let _late = wait_for(EVENT_LIMIT, || healed(stage, owner));
    }
    let before = stage.api.metrics()?;
    let warm = ask(&url, &request("And who wrote Faust?"))?;
    let after = stage.api.metrics()?;
    show(scene.name, "warm", &warm, &after.moved(&before, "loxilb_pd_kv_tier15"));
    announced?;
    let Some(owner) = owner else {
        bail!("the answer does not name its engine: {:?}", cold.engine);
    };
    ensure!(warm.engine == cold.engine, "{} answered although {} holds the blocks", warm.engine, cold.engine);
    ensure!(warm.cached_tokens > 0, "{} found nothing in its cache", warm.engine);
    let series = format!("{HITS}{{ep_idx=\"{owner}\"}}");
    ensure!(after.value(&series) > before.value(&series), "{series} did not move");
    Ok(())
}

fn show(name: &str, warmth: &str, answer: &Answer, moved: &[(String, f64)]) {
    let moved: Vec<_> = moved
        .iter()
        .map(|(series, by)| format!("{} +{by}", series.trim_start_matches("loxilb_pd_kv_tier15_")))
        .collect();
    println!(
        "{name:<24} {warmth:<5} {:<10} {:>6} {:>6} {:>14}  tier {}: {}",
        answer.engine,
        answer.depth,
        answer.blocks,
        answer.cached_tokens,
        answer.tier,
        moved.join(", ")
    );
}

/// What kvlb says of each endpoint's contract, and of each endpoint.
fn statuses(stage: &Stage) -> Result<Vec<Value>> {
    let all = stage.api.json("/netlox/v1/config/loadbalancer/all")?;
    let rules = all["lbAttr"].as_array().into_iter().flatten();
    Ok(rules.filter_map(|rule| rule["endpoints"].as_array()).flatten().cloned().collect())
}

/// Whether kvlb names an endpoint's blocks by itself, and knows some again.
fn healed(stage: &Stage, owner: usize) -> Result<bool> {
    let status = statuses(stage)?.get(owner).map(|endpoint| endpoint["kvStatus"].clone()).unwrap_or_default();
    Ok(status["keying"] == json!("rehash") && status["blocks"].as_u64() > Some(0))
}

/// The leg that does not hold, in kvlb's own words, and what became of it.
fn broken_leg(stage: &Stage) -> Result<Option<String>> {
    for endpoint in statuses(stage)? {
        let status = &endpoint["kvStatus"];
        if status["connected"] == json!(false) {
            return Ok(Some(format!("events: {} publishes none that kvlb could subscribe to", endpoint["endpointIP"])));
        }
        if status["contract"] == json!("mismatch") {
            let words = |field: &str| status[field].as_str().unwrap_or("-").to_owned();
            let healed = "kvlb names the blocks by itself until it holds (keying: rehash)";
            let now = if words("keying") == "rehash" { healed } else { "its blocks are not found" };
            return Ok(Some(format!("{}: {}; {now}", words("leg"), words("detail"))));
        }
    }
    Ok(None)
}

pub(super) fn wait_for(limit: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = now() + limit;
    while !condition()? {
        ensure!(now() < deadline, "no event came within {} s", limit.as_secs());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A preamble of some hundred tokens, as an application's system prompt would be.
fn preamble(scene: usize) -> String {
    format!(
        "Scene {scene}. You are a careful librarian. Answer every question in one short sentence, name the source that \
         you rely on, and say so when you do not know. The library holds novels, plays, atlases and letters in many \
         languages; its oldest book is a psalter from the ninth century, and its youngest came this morning. "
    )
}

pub(super) fn completion(scene: usize, question: &str) -> Value {
    json!({"model": MODEL, "prompt": format!("{}{question}", preamble(scene)), "max_tokens": 8})
}

fn chat(scene: usize, question: &str) -> Value {
    json!({"model": MODEL, "max_tokens": 8, "messages": [
        {"role": "system", "content": preamble(scene)},
        {"role": "user", "content": question},
    ]})
}

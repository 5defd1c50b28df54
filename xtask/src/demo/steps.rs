//! What happens on the stage.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use super::Leg;
use super::api::{Answer, ask};
use super::children::{ENGINES, MODEL, Stage, VIP};
use crate::run::now;

const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
/// Events leave an engine after the prefill and take well under a millisecond; the rest is patience.
const EVENT_LIMIT: Duration = Duration::from_secs(5);

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
        if let Err(missing) = act(stage, number, scene) {
            unproved.push(format!("{}: {missing}", scene.name));
        }
    }
    println!();
    stage.cli(&["get", "lb", "-o", "wide"])?;
    stage.cli(&["get", "kvstatus"])?;
    if unproved.is_empty() {
        println!(
            "\nBoth proofs hold for every warm request: the endpoint that holds the blocks answered, and its counter moved."
        );
        return Ok(());
    }
    println!();
    for line in &unproved {
        println!("no proof for {line}");
    }
    bail!("the contract does not hold: {}", broken_leg(stage)?)
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
fn act(stage: &Stage, number: usize, scene: &Scene) -> Result<()> {
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
    let before = stage.api.metrics()?;
    let warm = ask(&url, &request("And who wrote Faust?"))?;
    let after = stage.api.metrics()?;
    show(scene.name, "warm", &warm, &after.moved(&before, "loxilb_pd_kv_tier15"));
    announced?;
    let Some(owner) = (0..ENGINES.len()).find(|n| cold.engine == format!("engine-{n}")) else {
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

/// The leg that does not hold, in kvlb's own words.
fn broken_leg(stage: &Stage) -> Result<String> {
    let all = stage.api.json("/netlox/v1/config/loadbalancer/all")?;
    let statuses =
        all["lbAttr"].as_array().into_iter().flatten().filter_map(|rule| rule["endpoints"].as_array()).flatten();
    for endpoint in statuses {
        let status = &endpoint["kvStatus"];
        if status["connected"] == json!(false) {
            return Ok(format!("events: {} publishes none that kvlb could subscribe to", endpoint["endpointIP"]));
        }
        if status["contract"] == json!("mismatch") {
            let words = |field: &str| status[field].as_str().unwrap_or("-").to_owned();
            return Ok(format!("{}: {}", words("leg"), words("detail")));
        }
    }
    Ok("no endpoint reports a broken leg; see the logs".to_owned())
}

fn wait_for(limit: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
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

fn completion(scene: usize, question: &str) -> Value {
    json!({"model": MODEL, "prompt": format!("{}{question}", preamble(scene)), "max_tokens": 8})
}

fn chat(scene: usize, question: &str) -> Value {
    json!({"model": MODEL, "max_tokens": 8, "messages": [
        {"role": "system", "content": preamble(scene)},
        {"role": "user", "content": question},
    ]})
}

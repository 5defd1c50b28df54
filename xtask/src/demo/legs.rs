//! The second act: prefill and decode, each at engines of its own, and a prefill engine that is killed.

use anyhow::{Context, Result, ensure};

use super::ask::{Answer, ask};
use super::children::{ENGINES, Stage, VIP};
use super::steps::{EVENT_LIMIT, completion, wait_for};

/// Where clients of the second rule go.
const PORT: u16 = 8081;
/// What each of the engines does.
const ROLES: &str = "--ep-role=prefill,decode,prefill";
/// Positions of the prefill engines, and of the one that decodes.
const PREFILL: [usize; 2] = [0, 2];
const DECODE: usize = 1;
/// Beginnings of prompts that the first act has not used.
const SCENE: usize = 9;
const HITS: &str = "loxilb_pd_kv_tier15_hits_total";

/// Cold, warm, and once more when the engine that holds the blocks is dead.
pub(super) fn play(stage: &mut Stage) -> Result<()> {
    println!("\n== the same engines, split: {ROLES}");
    let endpoints = format!("--endpoints={}", ENGINES.map(|address| format!("{address}:1")).join(","));
    stage.cli(&[
        "create",
        "lb",
        VIP,
        &format!("--tcp={PORT}:8000"),
        &endpoints,
        "--mode=fullproxy",
        "--kv-exact-mode=1",
        ROLES,
        "--kv-zmq-port=5557",
        "--kv-hash-algo=sha256_cbor",
        "--kv-block-size=16",
        "--decision-headers",
    ])?;
    // The second rule has subscriptions of its own, to the prefill engines alone.
    let subscriptions = ENGINES.len() + PREFILL.len();
    wait_for(EVENT_LIMIT, || Ok(stage.api.metrics()?.count("loxilb_kv_subscriber_connected", 1.0) == subscriptions))?;
    println!(
        "\n{:<6} {:<16} {:<10} {:>6} {:>6} {:>14}  tier",
        "", "prefill", "decode", "depth", "blocks", "cached tokens"
    );
    let cold = request(stage, "cold", "What is the capital of France?")?;
    let owner = PREFILL.into_iter().find(|number| cold.prefill.starts_with(ENGINES[*number]));
    let owner = owner.with_context(|| format!("{:?} is no prefill endpoint", cold.prefill))?;
    let blocks = cold.blocks.parse::<u32>().context("read x-kvlb-blocks")?;
    wait_for(EVENT_LIMIT, || Ok(known(stage, owner)? >= blocks))?;
    let before = stage.api.metrics()?;
    let warm = request(stage, "warm", "And who wrote Faust?")?;
    let hits = format!("{HITS}{{ep_idx=\"{owner}\"}}");
    ensure!(warm.prefill == cold.prefill, "{} computed the prompt although {} has it", warm.prefill, cold.prefill);
    ensure!(warm.cached_tokens > 0, "{} found nothing in its cache", warm.prefill);
    ensure!(stage.api.metrics()?.value(&hits) > before.value(&hits), "{hits} did not move");

    stage.kill(owner)?;
    println!("       engine-{owner} is killed");
    let other = request(stage, "then", "And when was it printed?")?;
    ensure!(other.prefill != cold.prefill, "a dead engine computed the prompt");
    let next_best = PREFILL.into_iter().any(|number| number != owner && other.prefill.starts_with(ENGINES[number]));
    ensure!(next_best, "{} is no prefill endpoint", other.prefill);
    println!();
    stage.cli(&["get", "lb", "-o", "wide"])?;
    println!(
        "\nPrefill and decode hold, too: the prefill engine that has the blocks is chosen, and another one when it is gone."
    );
    Ok(())
}

fn request(stage: &Stage, warmth: &str, question: &str) -> Result<Answer> {
    let answer = ask(&format!("http://{VIP}:{PORT}/v1/completions"), &completion(SCENE, question))?;
    let Answer { engine, cached_tokens, prefill, tier, depth, blocks } = &answer;
    println!("{warmth:<6} {prefill:<16} {engine:<10} {depth:>6} {blocks:>6} {cached_tokens:>14}  {tier}");
    ensure!(*engine == format!("engine-{DECODE}"), "{engine} answered, which does not decode");
    ensure!(stage.api.get("/netlox/v1/status").is_ok(), "kvlb does not answer");
    Ok(answer)
}

/// Blocks that kvlb knows at an endpoint of the second rule.
fn known(stage: &Stage, position: usize) -> Result<u32> {
    let all = stage.api.json("/netlox/v1/config/loadbalancer/all")?;
    let rules = all["lbAttr"].as_array().into_iter().flatten();
    let rule =
        rules.into_iter().find(|rule| rule["serviceArguments"]["port"] == PORT).context("find the second rule")?;
    let blocks = rule["endpoints"][position]["kvStatus"]["blocks"].as_u64().unwrap_or_default();
    Ok(u32::try_from(blocks).unwrap_or(u32::MAX))
}

//! `/debug/…`: what tests look at and change; not part of vLLM.

use std::collections::BTreeMap;

use http_body_util::{BodyExt as _, Limited};
use hyper::Method;
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::http::{BODY_MAX, Reply, empty, reply};
use super::life::Life;
use super::rank::Rank;

/// Answers one such request.
pub(super) async fn reply_to(life: &Life, path: &str, method: &Method, body: Incoming) -> Reply {
    match (method.as_str(), path) {
        ("GET", "/debug/blocks") => {
            let ranks: Vec<Value> = life.ranks().iter().map(|rank| held(rank)).collect();
            let first = life.ranks().first().map(|rank| (rank.none_hash, rank.publisher.published()));
            let (none_hash, published) = first.unzip();
            reply(
                200,
                &json!({
                    "engine": life.config.name, "life": life.number, "block_size": life.config.block_size,
                    "none_hash": none_hash.map(|none_hash| format!("{none_hash:?}")), "published": published,
                    "blocks": by_name(life.blocks()), "ranks": ranks,
                }),
            )
        }
        ("GET", "/debug/requests") => reply(200, &json!(life.journal.requests())),
        ("GET", "/debug/counters") => {
            let (running, waiting) = (life.running(), life.waiting());
            let mut counters = json!(life.journal.counters());
            counters["scheduler_running"] = json!(running);
            counters["scheduler_waiting"] = json!(waiting);
            reply(200, &counters)
        }
        ("GET", "/debug/legs") => reply(200, &json!(life.journal.legs.all())),
        ("GET", "/debug/handoffs") => reply(200, &json!(life.handoffs())),
        ("POST", "/debug/forget") => {
            let Ok(body) = Limited::new(body, BODY_MAX).collect().await else { return empty(400) };
            let asked: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
            let Some(share) = asked["share"].as_f64() else { return empty(400) };
            reply(200, &json!({"forgotten": life.forget(share)}))
        }
        ("GET", "/debug/fault") => reply(200, &json!(life.faults.plan())),
        ("POST", "/debug/fault") => {
            let Ok(body) = Limited::new(body, BODY_MAX).collect().await else { return empty(400) };
            let applied = serde_json::from_slice(&body.to_bytes()).map_err(anyhow::Error::from);
            match applied.and_then(|fault: Value| life.faults.apply(&fault)) {
                Ok(plan) => reply(200, &json!(plan)),
                Err(cause) => reply(400, &json!({"error": format!("{cause:#}")})),
            }
        }
        _ => reply(404, &json!({"detail": "Not Found"})),
    }
}

fn held(rank: &Rank) -> Value {
    json!({
        "none_hash": format!("{:?}", rank.none_hash), "published": rank.publisher.published(), "blocks": by_name(rank.blocks()),
        "host_blocks": rank.host_blocks(),
    })
}

fn by_name(blocks: BTreeMap<u64, usize>) -> Value {
    Value::Object(blocks.into_iter().map(|(name, copies)| (name.to_string(), json!(copies))).collect())
}

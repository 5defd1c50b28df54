//! `/config/ai/kv`: inventories, contracts, and what would become of a request.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::{Api, EXPLAIN_BODY_MAX, Shared, json_body, member, number, off_thread, query, view};
use crate::contract::BlockHash;
use crate::control::Problem;
use crate::control::live::{Inventory, Request};
use crate::control::store::Select;
use crate::fleet::{Rule, RuleId};

type Pairs = Result<Query<Vec<(String, String)>>, QueryRejection>;

/// Names shown in one answer unless the query says otherwise: 60 MB of JSON.
const INVENTORY_SHOWN: usize = 1_000_000;

/// The blocks that one endpoint holds.
pub(super) async fn inventory(State(api): Shared, pairs: Pairs) -> Result<Response, Problem> {
    let pairs = query(pairs, &["service_id", "ep_idx", "limit", "offset"])?;
    let rule = rule(&api, member(&pairs, "service_id"))?;
    let position: usize = number("ep_idx", member(&pairs, "ep_idx").ok_or_else(|| missing("ep_idx"))?)?;
    let number_or = |name, default| member(&pairs, name).map_or(Ok(default), |text| number(name, text));
    let (limit, offset) = (number_or("limit", INVENTORY_SHOWN)?, number_or("offset", 0)?);
    if position >= rule.endpoints.len() {
        return Err(Problem::NoEndpoint(format!("{position} in rule {}", rule.id)));
    }
    let live = Arc::clone(&api.live);
    off_thread(move || {
        // An endpoint that is not subscribed holds nothing that is known.
        let inventory = live.inventory(rule.id, position).unwrap_or_default();
        Json(listing(&rule, position, &inventory, offset, limit)).into_response()
    })
    .await
}

/// An inventory in the document's shape, with `hash_hex` and `keying` added.
#[derive(Serialize)]
struct Listing<'a> {
    service_id: u32,
    ep_idx: usize,
    hash_algo: &'static str,
    keying: &'a str,
    blocks: Vec<Block>,
    total: usize,
}

#[derive(Serialize)]
struct Block {
    #[serde(rename = "block_idx")]
    position: usize,
    hash_uint64: u64,
    /// The same as text: a number above 2^53 loses its last bits in JavaScript and jq.
    hash_hex: String,
    /// Our own name of it, in rehash.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

fn listing<'a>(rule: &Rule, ep_idx: usize, inventory: &'a Inventory, offset: usize, limit: usize) -> Listing<'a> {
    let block = |(position, (theirs, ours)): (usize, &(BlockHash, Option<BlockHash>))| Block {
        position,
        hash_uint64: theirs.0,
        hash_hex: theirs.to_string(),
        name: ours.map(|name| name.to_string()),
    };
    Listing {
        service_id: rule.id.0,
        ep_idx,
        hash_algo: rule.kv.algo.label(),
        keying: if inventory.keying.is_empty() { "parity" } else { inventory.keying },
        blocks: inventory.blocks.iter().enumerate().skip(offset).take(limit).map(block).collect(),
        total: inventory.blocks.len(),
    }
}

/// The contract and inventory state of every endpoint of one rule, or of all.
pub(super) async fn status(State(api): Shared, pairs: Pairs) -> Result<Json<Value>, Problem> {
    let pairs = query(pairs, &["service_id"])?;
    let live = Arc::clone(&api.live);
    if member(&pairs, "service_id").is_some() {
        let rule = rule(&api, member(&pairs, "service_id"))?;
        return off_thread(move || Json(view::kv_status(&rule, &*live))).await;
    }
    let entries = api.store()?.entries();
    off_thread(move || {
        let rules = entries.iter().filter_map(|entry| entry.rule.as_ref().ok());
        let services: Vec<_> = rules.map(|rule| view::kv_status(rule, &*live)).collect();
        Json(json!({"services": services}))
    })
    .await
}

/// What the endpoints' caches spared, of one rule or of all.
pub(super) async fn savings(State(api): Shared, pairs: Pairs) -> Result<Json<Value>, Problem> {
    let pairs = query(pairs, &["service_id"])?;
    let live = Arc::clone(&api.live);
    let rules: Vec<Arc<Rule>> = match member(&pairs, "service_id") {
        Some(id) => vec![rule(&api, Some(id))?],
        None => api.store()?.entries().iter().filter_map(|entry| entry.rule.as_ref().ok().cloned()).collect(),
    };
    off_thread(move || {
        let services: Vec<_> = rules.iter().map(|rule| view::savings(rule, &*live)).collect();
        Json(json!({"services": services}))
    })
    .await
}

/// Every leg of a rule's contract. Asks the engines, and changes nothing.
pub(super) async fn preflight(State(api): Shared, pairs: Pairs) -> Result<Json<Value>, Problem> {
    let pairs = query(pairs, &["service_id"])?;
    let rule = rule(&api, member(&pairs, "service_id"))?;
    let live = Arc::clone(&api.live);
    let id = rule.id;
    let report = off_thread(move || live.preflight(id)).await?;
    report
        .map(|report| {
            let mut shown = json!(report);
            shown["service_id"] = id.0.into();
            Json(shown)
        })
        .ok_or_else(|| Problem::Unavailable("the rule is not in force".to_owned()))
}

/// What would become of the request in the body.
pub(super) async fn explain(
    State(api): Shared,
    pairs: Pairs,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, Problem> {
    let pairs = query(pairs, &["service_id", "path"])?;
    let rule = rule(&api, member(&pairs, "service_id"))?;
    let body = json_body(&headers, body, EXPLAIN_BODY_MAX)?;
    let path = member(&pairs, "path").map(str::to_owned);
    let model = headers.get("x-model").and_then(|model| model.to_str().ok()).map(str::to_owned);
    let live = Arc::clone(&api.live);
    let explained = off_thread(move || {
        let path = path.as_deref().unwrap_or_else(|| usual_path(&body));
        let fields: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        let request = Request { path, model: model.as_deref(), fields: &fields, body: &body };
        live.explain(rule.id, &request)
    })
    .await?;
    explained
        .map(|explained| Json(json!(explained)))
        .ok_or_else(|| Problem::Unavailable("the rule is not in force".to_owned()))
}

/// The path that a body of this shape is usually sent to.
fn usual_path(body: &[u8]) -> &'static str {
    let has_messages =
        serde_json::from_slice::<Value>(body).is_ok_and(|body| body.get("messages").is_some_and(Value::is_array));
    if has_messages { "/v1/chat/completions" } else { "/v1/completions" }
}

fn rule(api: &Api, service_id: Option<&str>) -> Result<Arc<Rule>, Problem> {
    let entries = api.store()?.entries();
    let id: u32 = number("service_id", service_id.ok_or_else(|| missing("service_id"))?)?;
    let found = Select::Id(RuleId(id)).of(&entries)?;
    let entry = found.first().ok_or_else(|| Problem::NoRule(format!("with id {id}")))?;
    entry.rule.clone().map_err(Problem::Unavailable)
}

fn missing(name: &str) -> Problem {
    Problem::MissingField(format!("{name} in the query"))
}

//! `/config/loadbalancer`.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use bytes::Bytes;
use serde_json::{Value, json};

use super::{Api, BODY_MAX, Named, Shared, json_body, member, number, off_thread, query, view};
use crate::control::Problem;
use crate::control::store::{Change, Done, Select};
use crate::control::wire::{self, Body};
use crate::fleet::RuleId;

type Pairs = Result<Query<Vec<(String, String)>>, QueryRejection>;

/// Creates a rule, replaces it in place, or moves endpoints in or out.
pub(super) async fn post(
    State(api): Shared,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, Problem> {
    api.store()?;
    let body = Body::read(&json_body(&headers, body, BODY_MAX)?)?;
    let done = change(&api, Change::Post(Box::new(body))).await?;
    let id = done.ids.first().copied();
    let mut answer = json!({"result": "Success", "id": id.map(|id| id.0), "change": done.what});
    if let Some(id) = id.filter(|_| done.what != "unchanged") {
        let live = Arc::clone(&api.live);
        let notes = off_thread(move || live.contradictions(id)).await?;
        if !notes.is_empty() {
            answer["notes"] = json!(notes);
        }
    }
    Ok(Json(answer))
}

/// Shows the rules that the path names.
pub(super) async fn get(State(api): Shared, Named(path): Named, pairs: Pairs) -> Result<Json<Value>, Problem> {
    let entries = api.store()?.entries();
    let found = select(&path, pairs)?.of(&entries)?;
    let live = Arc::clone(&api.live);
    let shown = off_thread(move || view::rules(&found, &*live)).await?;
    Ok(Json(json!({"lbAttr": shown})))
}

/// Deletes the rules that the path names.
pub(super) async fn delete(State(api): Shared, Named(path): Named, pairs: Pairs) -> Result<Json<Value>, Problem> {
    api.store()?;
    let done = change(&api, Change::Delete(select(&path, pairs)?)).await?;
    let ids: Vec<_> = done.ids.iter().map(|id| id.0).collect();
    Ok(Json(json!({"result": "Success", "ids": ids})))
}

/// Makes a change and waits until it is durable.
pub(super) async fn change(api: &Api, change: Change) -> Result<Done, Problem> {
    let store = Arc::clone(api.store()?);
    off_thread(move || store.change(&change)).await?
}

/// The rules that a path and its query name.
fn select(path: &HashMap<String, String>, pairs: Pairs) -> Result<Select, Problem> {
    if let Some(id) = path.get("id") {
        query(pairs, &[])?;
        return Ok(Select::Id(RuleId(number("id", id)?)));
    }
    if let Some(name) = path.get("name") {
        query(pairs, &[])?;
        return Ok(Select::Name(name.clone()));
    }
    let (Some(ip), Some(port)) = (path.get("ip"), path.get("port")) else {
        query(pairs, &[])?;
        return Ok(Select::All);
    };
    // bgp and block come from LoxiLB's client; they name no other rules here.
    let pairs = query(pairs, &["model_name", "bgp", "block"])?;
    if let Some(protocol) = path.get("protocol").filter(|protocol| !protocol.eq_ignore_ascii_case("tcp")) {
        return Err(wire::protocol_refused("protocol", protocol));
    }
    let port = number("port", port)?;
    let port_max = path.get("portmax").map(|last| number("portmax", last)).transpose()?;
    Ok(Select::Address {
        vip: wire::vip(ip)?,
        port,
        port_max,
        host: path.get("host").map(|host| wire::host(host)).transpose()?,
        model: member(&pairs, "model_name").map(wire::model).transpose()?.flatten(),
    })
}

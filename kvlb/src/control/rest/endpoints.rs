//! `/config/endpoint` and `/config/endpointhoststate`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use bytes::Bytes;
use serde_json::{Value, json};

use super::rules::change;
use super::{BODY_MAX, Named, Shared, json_body, off_thread, query, view};
use crate::control::Problem;
use crate::control::store::Change;
use crate::control::wire::{HostProbe, HostState, host_key};

/// Shows every endpoint of every rule, with its probe.
pub(super) async fn all(State(api): Shared) -> Result<Json<Value>, Problem> {
    let entries = api.store()?.entries();
    let live = Arc::clone(&api.live);
    let shown = off_thread(move || view::hosts(&entries, &*live)).await?;
    Ok(Json(json!({"Attr": shown})))
}

/// Gives the endpoints of a host a probe of their own.
pub(super) async fn post(
    State(api): Shared,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, Problem> {
    api.store()?;
    let HostProbe { host, probe } = HostProbe::read(&json_body(&headers, body, BODY_MAX)?)?;
    let done = change(&api, Change::Endpoints { host, port: None, field: "probe", value: Some(probe) }).await?;
    Ok(Json(json!({"result": "Success", "change": done.what})))
}

/// Takes a host's own probe away: its endpoints are probed as their rules say.
pub(super) async fn delete(
    State(api): Shared,
    Named(path): Named,
    pairs: Result<Query<Vec<(String, String)>>, QueryRejection>,
) -> Result<Json<Value>, Problem> {
    api.store()?;
    // LoxiLB tells probe objects of one host apart by these; here a host has one.
    query(pairs, &["name", "probe_type", "probe_port"])?;
    let ip = path.get("ip").ok_or_else(|| Problem::MissingField("ip".to_owned()))?;
    let host = host_key(ip)?;
    let done = change(&api, Change::Endpoints { host, port: None, field: "probe", value: None }).await?;
    Ok(Json(json!({"result": "Success", "change": done.what})))
}

/// Takes an endpoint into service, lets it drain, or takes it out.
pub(super) async fn host_state(
    State(api): Shared,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, Problem> {
    api.store()?;
    let HostState { host, port, state } = HostState::read(&json_body(&headers, body, BODY_MAX)?)?;
    let done =
        change(&api, Change::Endpoints { host, port, field: "adminState", value: state.map(Value::from) }).await?;
    let ids: Vec<_> = done.ids.iter().map(|id| id.0).collect();
    Ok(Json(json!({"result": "Success", "change": done.what, "ids": ids})))
}

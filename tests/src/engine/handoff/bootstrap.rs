//! Mooncake's bootstrap: where a decode side, or a router, learns which engines are behind an address.
//!
//! `GET /query` answers `{"RANK": {"engine_id": "…", "worker_addr": {"0": {"0": "HOST:PORT"}}}}`, the ranks of data parallelism
//! outside, those of tensor and pipeline parallelism inside.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use anyhow::Context as _;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::engine::gate::Gate;
use crate::engine::life::Life;
use crate::harness::http;

/// One rank as the bootstrap tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    engine_id: String,
    worker_addr: BTreeMap<String, BTreeMap<String, String>>,
}

/// Answers for ever.
pub(in crate::engine) async fn serve(life: Arc<Life>, mut gate: Gate) {
    let mut connections = JoinSet::new();
    loop {
        let stream = gate.accept().await;
        while connections.try_join_next().is_some() {}
        let life = Arc::clone(&life);
        let service = service_fn(move |request| {
            let life = Arc::clone(&life);
            async move { Ok::<_, Infallible>(answer(&life, &request)) }
        });
        connections.spawn(async move {
            let serving = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            if let Err(cause) = serving.await {
                tracing::debug!(%cause, "bootstrap connection ended");
            }
        });
    }
}

fn answer(life: &Life, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let known = (request.method() == Method::GET && request.uri().path() == "/query").then(|| entries(life));
    let body = known.as_ref().map_or_else(
        || r#"{"detail":"Not Found"}"#.to_owned(),
        |known| serde_json::to_string(known).unwrap_or_default(),
    );
    let mut response = Response::new(Full::from(body));
    if known.is_none() {
        *response.status_mut() = StatusCode::NOT_FOUND;
    }
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn entries(life: &Life) -> BTreeMap<String, Entry> {
    let ranks = life.ranks();
    let entry = |rank: &Arc<crate::engine::rank::Rank>| {
        let identity = rank.identity()?;
        let workers = BTreeMap::from([("0".to_owned(), identity.address.to_string())]);
        let entry =
            Entry { engine_id: identity.engine_id.clone(), worker_addr: BTreeMap::from([("0".to_owned(), workers)]) };
        Some((rank.number.to_string(), entry))
    };
    ranks.iter().filter_map(entry).collect()
}

/// Where the engine of this identity listens, as the bootstrap at `http://HOST:PORT` says.
///
/// # Errors
/// When nobody answers there, or it knows no such engine.
pub(in crate::engine) async fn find(bootstrap: &str, engine_id: &str) -> anyhow::Result<String> {
    let authority =
        bootstrap.strip_prefix("http://").with_context(|| format!("`{bootstrap}` is no http:// address"))?;
    let mut addresses = tokio::net::lookup_host(authority.trim_end_matches('/'))
        .await
        .with_context(|| format!("look up {authority}"))?;
    let address = addresses.next().with_context(|| format!("{authority} has no address"))?;
    let answer = http::get(address, "/query").await?;
    let entries: BTreeMap<String, Entry> =
        serde_json::from_slice(&answer.body.bytes()).context("read the bootstrap's answer")?;
    let entry = entries.into_values().find(|entry| entry.engine_id == engine_id);
    let entry = entry.with_context(|| format!("unknown engine {engine_id}"))?;
    entry.worker_addr.into_values().flat_map(BTreeMap::into_values).next().context("the engine has no worker")
}

//! The API's paths.
//!
//! Handlers read a request, ask the store or the live side off the API's threads, and shape the answer. Every answer that
//! is not a success is a [`Problem`].

mod door;
mod endpoints;
mod kv;
mod rules;
mod view;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRequestParts, OriginalUri, Path, Query, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::{Live, Problem, Store};

/// A rule with as many endpoints and sources as it may have is far below.
const BODY_MAX: usize = 1 << 20;
/// A request to be explained may be as large as one that the proxy reads unless a rule says otherwise.
const EXPLAIN_BODY_MAX: usize = 32 << 20;

/// What of the process is shown by `GET /status`.
#[derive(Clone, Debug)]
pub struct About {
    /// How VIP traffic reaches the proxy, in one word: `sk_lookup`, `none`.
    pub datapath: String,
    /// Why it is so; empty: as asked.
    pub datapath_detail: String,
    /// The I/O back end: `uring`, `epoll`.
    pub io: String,
    /// Data threads.
    pub threads: usize,
    /// Where the API listens.
    pub api: SocketAddr,
    /// Where rules are kept; `None`: in memory only.
    pub state_dir: Option<PathBuf>,
    /// What it took over from; `None`: it started alone.
    pub takeover: Option<TakenOver>,
}

/// How this process came to serve in place of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenOver {
    /// The other's version.
    pub version: String,
    /// The other's process.
    pub pid: u32,
    /// When, in seconds since 1970.
    pub at: u64,
    /// Whether all that the other knew of its engines was known here, too.
    pub warm: bool,
}

/// What the handlers share.
pub struct Api {
    live: Arc<dyn Live>,
    about: About,
    store: OnceLock<Arc<Store>>,
    /// Whether another process serves the API from now on.
    left: watch::Sender<bool>,
}

impl Api {
    /// An API whose rules are not loaded yet: it answers 503 to everything that concerns them.
    pub fn new(live: Arc<dyn Live>, about: About) -> Arc<Self> {
        Arc::new(Self { live, about, store: OnceLock::new(), left: watch::Sender::new(false) })
    }

    /// Says that the rules are loaded and in force. Only the first call counts.
    pub fn ready(&self, store: Arc<Store>) {
        if self.store.set(store).is_err() {
            tracing::warn!("the rules were loaded twice; the first ones stay");
        }
    }

    /// Accepts no more: another process does, from the same socket. Who is connected is answered, and told to close.
    pub fn leave(&self) {
        self.left.send_replace(true);
    }

    fn store(&self) -> Result<&Arc<Store>, Problem> {
        self.store.get().ok_or(Problem::Starting)
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("about", &self.about).field("store", &self.store).finish_non_exhaustive()
    }
}

type Shared = State<Arc<Api>>;

/// Serves the API until `stop` completes; answers under way are finished.
///
/// # Errors
/// Where the listener fails for good.
pub async fn serve(
    listener: TcpListener,
    api: Arc<Api>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "the API has no authentication and is reachable from other hosts");
    }
    axum::serve(door::Door::new(listener, api.left.subscribe()), router(api)).with_graceful_shutdown(stop).await
}

/// The API's paths.
pub fn router(api: Arc<Api>) -> Router {
    let v1 = Router::new()
        .route("/config/loadbalancer", post(rules::post))
        .merge(selected("/config/loadbalancer/all"))
        .merge(selected("/config/loadbalancer/id/{id}"))
        .merge(selected("/config/loadbalancer/name/{name}"))
        .merge(selected("/config/loadbalancer/externalipaddress/{ip}/port/{port}/protocol/{protocol}"))
        .merge(selected("/config/loadbalancer/externalipaddress/{ip}/port/{port}/portmax/{portmax}/protocol/{protocol}"))
        .merge(selected("/config/loadbalancer/hosturl/{host}/externalipaddress/{ip}/port/{port}/protocol/{protocol}"))
        .merge(selected(
            "/config/loadbalancer/hosturl/{host}/externalipaddress/{ip}/port/{port}/portmax/{portmax}/protocol/{protocol}",
        ))
        .route("/config/endpoint", post(endpoints::post))
        .route("/config/endpoint/all", get(endpoints::all))
        .route("/config/endpoint/epipaddress/{ip}", delete(endpoints::delete))
        .route("/config/endpointhoststate", post(endpoints::host_state))
        .route("/config/ai/kv/inventory", get(kv::inventory))
        .route("/config/ai/kv/status", get(kv::status))
        .route("/config/ai/kv/savings", get(kv::savings))
        .route("/config/ai/kv/preflight", get(kv::preflight))
        .route("/config/metrics", get(|| async { Json(json!({"prometheus": true})) }))
        .route("/version", get(version))
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .route("/config/ai/kv/explain", post(kv::explain).layer(DefaultBodyLimit::max(EXPLAIN_BODY_MAX)));
    Router::new()
        .nest("/netlox/v1", v1)
        .route("/metrics", get(metrics))
        .fallback(no_path)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&api), tell_to_close))
        .with_state(api)
}

/// A path that names rules: they can be read and deleted.
fn selected(path: &str) -> Router<Arc<Api>> {
    Router::new().route(path, get(rules::get).delete(rules::delete))
}

/// Whoever stays connected to a process that is about to end is told to come to the next.
async fn tell_to_close(State(api): Shared, request: axum::extract::Request, next: middleware::Next) -> Response {
    let mut response = next.run(request).await;
    if *api.left.borrow() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

async fn no_path(OriginalUri(uri): OriginalUri) -> Problem {
    Problem::NoPath(super::wire::shown(uri.path()))
}

async fn no_method(method: Method) -> Problem {
    Problem::MethodNotAllowed(method.to_string())
}

async fn version() -> Json<Value> {
    let version = env!("CARGO_PKG_VERSION");
    Json(json!({"version": version, "buildInfo": format!("kvlb {version}")}))
}

async fn metrics(State(api): Shared) -> Result<Response, Problem> {
    let text = off_thread({
        let live = Arc::clone(&api.live);
        move || live.metrics()
    })
    .await?;
    // The type of Prometheus' text format 0.0.4.
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

async fn status(State(api): Shared) -> Json<Value> {
    let store = api.store.get();
    let entries = store.map(|store| store.entries()).unwrap_or_default();
    let endpoints: usize = entries.iter().filter_map(|e| e.rule.as_ref().ok()).map(|rule| rule.endpoints.len()).sum();
    let degraded: Vec<_> =
        api.live.degraded().into_iter().map(|(what, why)| json!({"what": what, "why": why})).collect();
    let about = &api.about;
    let takeover = about.takeover.as_ref();
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ready": store.is_some(),
        "datapath": {"mode": about.datapath, "detail": about.datapath_detail},
        "io": about.io,
        "threads": about.threads,
        "api": about.api.to_string(),
        "stateDir": about.state_dir,
        "pid": std::process::id(),
        "takeover": takeover.map(|from| json!({
            "fromVersion": from.version, "fromPid": from.pid, "at": from.at, "warm": from.warm,
        })),
        "rules": entries.len(),
        "endpoints": endpoints,
        "degraded": degraded,
    }))
}

/// Runs what may compute or wait for the disk away from the threads that answer.
async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        tracing::error!(%error, "an answer of the API failed");
        Problem::Unavailable("the answer could not be computed; the log says why".to_owned())
    })
}

/// A JSON body within its limit.
fn json_body(headers: &HeaderMap, body: Result<Bytes, BytesRejection>, limit: usize) -> Result<Bytes, Problem> {
    if let Some(given) = headers.get(header::CONTENT_TYPE) {
        let given = given.to_str().unwrap_or("not a text");
        let media = given.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if media != "application/json" && !media.ends_with("+json") {
            return Err(Problem::MediaType(super::wire::shown(given)));
        }
    }
    body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Problem::TooLarge(limit),
        _ => Problem::BrokenBody(rejection.body_text()),
    })
}

/// The named parts of a path, decoded; a path that cannot be is a [`Problem`] like any other.
struct Named(HashMap<String, String>);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(named)) => Ok(Self(named)),
            Err(rejection) => Err(Problem::BadValue {
                field: "path".to_owned(),
                value: format!("{:?}", super::wire::shown(parts.uri.path())),
                expected: rejection.body_text(),
            }),
        }
    }
}

/// The members of a query string, of which only `known` may be there.
fn query(
    given: Result<Query<Vec<(String, String)>>, QueryRejection>,
    known: &[&str],
) -> Result<Vec<(String, String)>, Problem> {
    let Query(given) = given.map_err(|rejection| Problem::BadValue {
        field: "query".to_owned(),
        value: String::new(),
        expected: rejection.body_text(),
    })?;
    match given.iter().find(|(name, _)| !known.contains(&name.as_str())) {
        Some((name, _)) => Err(Problem::UnknownField {
            field: super::wire::shown(name),
            place: " in the query".to_owned(),
            hint: format!("; known are {}", known.join(", ")),
        }),
        None => Ok(given),
    }
}

fn member<'a>(query: &'a [(String, String)], name: &str) -> Option<&'a str> {
    query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

/// A whole number of a path or query.
fn number<T: std::str::FromStr>(field: &str, text: &str) -> Result<T, Problem> {
    text.parse().map_err(|_error| Problem::BadValue {
        field: field.to_owned(),
        value: format!("{:?}", super::wire::shown(text)),
        expected: "use a whole number".to_owned(),
    })
}

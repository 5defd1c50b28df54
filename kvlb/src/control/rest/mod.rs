//! The API's paths.
//!
//! Handlers read a request, ask the store or the live side off the API's threads, and shape the answer. Every answer that
//! is not a success is a [`Problem`]. No handler runs for a request that the [`Guard`] has not let in.

mod door;
mod endpoints;
mod guard;
mod kv;
mod rules;
mod view;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRequestParts, OriginalUri, Path, Query, State};
use axum::handler::Handler;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Json, Router};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

pub use guard::{Guard, Role, Tokens};

use super::{Live, Problem, Store, live};
use crate::tls;

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
    /// Whether it speaks TLS.
    pub tls: bool,
    /// Which tokens it knows, in one word: `none`, `admin`, `admin+read`.
    pub tokens: &'static str,
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
pub async fn serve(
    listener: TcpListener,
    api: Arc<Api>,
    guard: Arc<Guard>,
    tls: Option<Arc<tls::Server>>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let left = api.left.subscribe();
    let router = router(api, Arc::clone(&guard));
    door::Door::new(listener, left, guard, tls).serve(&router, stop).await;
}

/// Where all other paths are.
const V1: &str = "/netlox/v1";
/// The pages that Prometheus reads.
const METRICS: [&str; 2] = ["/metrics", "/netlox/v1/metrics"];

/// One row of the table of paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The method.
    pub method: Method,
    /// The path, with its variable parts as `{name}`.
    pub path: String,
    /// Who may ask.
    pub needs: Role,
}

/// All that the API answers, and who may ask for it.
pub fn table() -> Vec<Row> {
    paths().rows
}

/// The API's paths, behind their guard.
pub fn router(api: Arc<Api>, guard: Arc<Guard>) -> Router {
    paths()
        .router
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .fallback(no_path)
        .method_not_allowed_fallback(no_method)
        // Around the answers to what is not there too: whoever is not let in learns nothing.
        .layer(from_fn_with_state(guard, guard::admit))
        .layer(from_fn_with_state(Arc::clone(&api), tell_to_close))
        .with_state(api)
}

fn paths() -> Paths {
    const LB: &str = "/config/loadbalancer";
    const AT: &str = "externalipaddress/{ip}/port/{port}";
    Paths::default()
        .change(Method::POST, LB, post(rules::post))
        .selected(&format!("{LB}/all"))
        .selected(&format!("{LB}/id/{{id}}"))
        .selected(&format!("{LB}/name/{{name}}"))
        .selected(&format!("{LB}/{AT}/protocol/{{protocol}}"))
        .selected(&format!("{LB}/{AT}/portmax/{{portmax}}/protocol/{{protocol}}"))
        .selected(&format!("{LB}/hosturl/{{host}}/{AT}/protocol/{{protocol}}"))
        .selected(&format!("{LB}/hosturl/{{host}}/{AT}/portmax/{{portmax}}/protocol/{{protocol}}"))
        .change(Method::POST, "/config/endpoint", post(endpoints::post))
        .read("/config/endpoint/all", endpoints::all)
        .change(Method::DELETE, "/config/endpoint/epipaddress/{ip}", delete(endpoints::delete))
        .change(Method::POST, "/config/endpointhoststate", post(endpoints::host_state))
        .read("/config/ai/kv/inventory", kv::inventory)
        .read("/config/ai/kv/status", kv::status)
        .read("/config/ai/kv/savings", kv::savings)
        // Asks the rule's engines, and changes nothing.
        .read("/config/ai/kv/preflight", kv::preflight)
        .explain("/config/ai/kv/explain")
        .read("/config/drops", drops)
        .read("/config/metrics", || async { Json(json!({"prometheus": true})) })
        .read("/version", version)
        .read("/status", status)
        .read("/metrics", metrics)
        .row(Method::GET, METRICS[0], Role::Read, get(metrics))
}

/// The paths as they are laid out: a handler comes with who may ask for it, or not at all.
#[derive(Default)]
struct Paths {
    router: Router<Arc<Api>>,
    rows: Vec<Row>,
}

impl Paths {
    /// What only reads.
    fn read<T: 'static>(self, path: &str, handler: impl Handler<T, Arc<Api>>) -> Self {
        self.row(Method::GET, &format!("{V1}{path}"), Role::Read, get(handler))
    }

    /// What changes something.
    fn change(self, method: Method, path: &str, handler: MethodRouter<Arc<Api>>) -> Self {
        self.row(method, &format!("{V1}{path}"), Role::Admin, handler)
    }

    /// A path that names rules: they can be read and deleted.
    fn selected(self, path: &str) -> Self {
        self.read(path, rules::get).change(Method::DELETE, path, delete(rules::delete))
    }

    /// A request that is read and not sent, though it comes in a body.
    fn explain(self, path: &str) -> Self {
        let handler = post(kv::explain).layer(DefaultBodyLimit::max(EXPLAIN_BODY_MAX));
        self.row(Method::POST, &format!("{V1}{path}"), Role::Read, handler)
    }

    fn row(mut self, method: Method, path: &str, needs: Role, handler: MethodRouter<Arc<Api>>) -> Self {
        self.router = self.router.route(path, handler.route_layer(from_fn_with_state(needs, guard::may)));
        self.rows.push(Row { method, path: path.to_owned(), needs });
        self
    }
}

/// Whoever stays connected to a process that is about to end is told to come to the next.
async fn tell_to_close(State(api): Shared, request: axum::extract::Request, next: Next) -> Response {
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

/// What the kernel drops.
async fn drops(State(api): Shared) -> Result<Json<live::DropsView>, Problem> {
    let live = Arc::clone(&api.live);
    off_thread(move || Json(live.drops())).await
}

async fn status(State(api): Shared) -> Json<Value> {
    let store = api.store.get();
    let entries = store.map(|store| store.entries()).unwrap_or_default();
    let endpoints: usize = entries.iter().filter_map(|e| e.rule.as_ref().ok()).map(|rule| rule.endpoints.len()).sum();
    let degraded: Vec<_> =
        api.live.degraded().into_iter().map(|(what, why)| json!({"what": what, "why": why})).collect();
    let devices: Vec<_> = api
        .live
        .admission_devices()
        .into_iter()
        .map(|(device, mode)| json!({"device": device, "mode": mode}))
        .collect();
    let about = &api.about;
    let takeover = about.takeover.as_ref();
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ready": store.is_some(),
        "datapath": {"mode": about.datapath, "detail": about.datapath_detail},
        "xdp": devices,
        "io": about.io,
        "threads": about.threads,
        "api": about.api.to_string(),
        "apiTls": about.tls,
        "apiTokens": about.tokens,
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

//! Active health checks; their verdicts go to `state`.
//!
//! One task per endpoint and rule. A verdict turns after as many equal results in a row as the rule says: by default two
//! to down and one to up, so that a lost packet does not empty a fleet and a recovered engine is used at once. Intervals
//! vary a little, so that the probes of many endpoints and of many hosts do not come together. The same task resolves the
//! endpoint's name and asks what models the engine lists.

mod streak;

use std::hash::{BuildHasher as _, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::clock;
use crate::fleet::{EndpointKey, Monitor, Probe, ProbeKind};
use crate::ingest;
use crate::state::{ListedModel, Meters, State};
use crate::tokenize::ModelSlug;
use streak::Streak;

/// After a first failure the next probe comes this soon, so that an outage is known within `retries` seconds.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(1);
/// How long an engine may take to list its models.
const MODELS_TIMEOUT: Duration = Duration::from_secs(5);
/// How often an engine is asked for its models, and a name for its addresses.
const FACTS_INTERVAL: Duration = Duration::from_secs(30);
/// An engine's list of models is small; what is larger is not one.
const MODELS_BYTES_MAX: usize = 1 << 20;

/// What one task watches.
#[derive(Clone, Debug)]
pub struct Target {
    /// The rule and endpoint, for log lines.
    pub label: String,
    /// Where the endpoint is.
    pub key: EndpointKey,
    /// How it is probed.
    pub monitor: Monitor,
    /// Where the verdict goes.
    pub meters: Arc<Meters>,
    /// The rule turns prompts into tokens, so the models that the engine lists need their tokenizers.
    pub tokenizes: bool,
}

/// How engines are asked.
#[derive(Clone, Debug)]
pub struct Asker {
    http: reqwest::Client,
    /// The key that engines want for what they say under `/v1`.
    key: Option<Arc<str>>,
}

impl Asker {
    /// One that asks the engines themselves: no proxy of the environment comes between, no redirect leads elsewhere, and
    /// every probe has a connection of its own, since it is to show that the engine still takes one.
    ///
    /// # Errors
    /// Where no HTTP client can be made.
    pub fn new(key: Option<&str>) -> Result<Self, reqwest::Error> {
        Ok(Self { http: ingest::plain_client()?, key: key.map(Arc::from) })
    }
}

/// Probes one endpoint for ever.
pub async fn watch(target: Target, state: Arc<State>, asker: Asker) {
    let facts = learn_facts(&target, &state, &asker);
    if target.monitor.enabled {
        tokio::join!(facts, judge(&target, &state, &asker.http));
    } else {
        if target.meters.set_probe(Probe::Unknown) {
            state.conditions_changed();
        }
        facts.await;
    }
}

async fn judge(target: &Target, state: &State, http: &reqwest::Client) {
    let mut streak = Streak::new(target.monitor.retries, target.monitor.rise);
    loop {
        let result = probe(target, http).await;
        if result.as_ref().is_err_and(Failure::is_ours) {
            tracing::debug!(endpoint = %target.label, "no descriptor or memory for a probe");
            sleep(varied(target.monitor.interval)).await;
            continue;
        }
        if result.is_ok() && target.meters.breaker.reached(clock::now()) {
            state.conditions_changed();
        }
        let cause = result.as_ref().err().map_or_else(String::new, ToString::to_string);
        if let Some(verdict) = streak.add(result.is_ok(), target.meters.probe())
            && target.meters.set_probe(verdict)
        {
            if verdict == Probe::Down {
                tracing::warn!(endpoint = %target.label, cause, "endpoint is down");
            } else {
                tracing::info!(endpoint = %target.label, "endpoint is up");
            }
            state.conditions_changed();
        }
        // Until it is clear whether the endpoint has turned.
        let soon = result.is_ok() == (target.meters.probe() == Probe::Down);
        sleep(varied(if soon { CONFIRM_INTERVAL.min(target.monitor.interval) } else { target.monitor.interval })).await;
    }
}

/// An interval, a tenth shorter or longer at most.
fn varied(interval: Duration) -> Duration {
    let chance = RandomState::new().hash_one(0);
    let percent = 90 + u32::try_from(chance % 21).unwrap_or_default();
    interval * percent / 100
}

/// Why a probe failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("no address for {0}")]
    Unresolved(String),
    #[error("no answer within {} s", .0.as_secs())]
    Timeout(Duration),
    #[error("connect: {0}")]
    Connect(std::io::Error),
    #[error("http: {0}")]
    Http(reqwest::Error),
    #[error("status {0}")]
    Status(u16),
    #[error("the answer does not contain {0:?}")]
    Content(String),
}

impl Failure {
    /// Whether this process or machine has no descriptor, port or memory left, which says nothing of the endpoint.
    fn is_ours(&self) -> bool {
        const OURS: [Errno; 5] = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::ENOBUFS, Errno::EADDRNOTAVAIL];
        let mut cause: Option<&(dyn std::error::Error + 'static)> = match self {
            Self::Connect(error) => Some(error),
            Self::Http(error) => Some(error),
            _ => None,
        };
        while let Some(error) = cause {
            let code = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
            if code.is_some_and(|code| OURS.contains(&Errno::from_raw(code))) {
                return true;
            }
            cause = error.source();
        }
        false
    }
}

async fn probe(target: &Target, http: &reqwest::Client) -> Result<(), Failure> {
    match target.monitor.kind {
        ProbeKind::Tcp => {
            let limit = target.monitor.answer_timeout;
            timeout(limit, probe_tcp(target)).await.map_err(|_elapsed| Failure::Timeout(limit))?
        }
        ProbeKind::Http => probe_http(target, http).await,
    }
}

async fn probe_tcp(target: &Target) -> Result<(), Failure> {
    let mut last = Failure::Unresolved(target.key.host.clone());
    for address in target.meters.addresses().iter() {
        let port = target.monitor.port.unwrap_or_else(|| address.port());
        let address = SocketAddr::new(address.ip(), port);
        match TcpStream::connect(address).await {
            Ok(_stream) => return Ok(()),
            Err(error) => last = Failure::Connect(error),
        }
    }
    Err(last)
}

async fn probe_http(target: &Target, http: &reqwest::Client) -> Result<(), Failure> {
    let place = EndpointKey { port: target.monitor.port.unwrap_or(target.key.port), ..target.key.clone() };
    let path = target.monitor.request.trim_start_matches('/');
    let limit = target.monitor.answer_timeout;
    let failed =
        |error: reqwest::Error| if error.is_timeout() { Failure::Timeout(limit) } else { Failure::Http(error) };
    let answer = http.get(format!("http://{place}/{path}")).timeout(limit).send().await.map_err(failed)?;
    let status = answer.status().as_u16();
    if !target.monitor.codes.contains(status) {
        return Err(Failure::Status(status));
    }
    if target.monitor.response.is_empty() {
        return Ok(());
    }
    let body = bounded_body(answer).await.map_err(failed)?;
    if String::from_utf8_lossy(&body).contains(&target.monitor.response) {
        Ok(())
    } else {
        Err(Failure::Content(target.monitor.response.clone()))
    }
}

/// Keeps an endpoint's addresses and models fresh.
async fn learn_facts(target: &Target, state: &State, asker: &Asker) {
    loop {
        let known = resolve(target).await;
        if known {
            state.conditions_changed();
        }
        if let Some(models) = ask_models(target, asker).await {
            if target.tokenizes {
                want_tokenizers(state, &models);
            }
            target.meters.set_models(models);
        }
        let unknown = target.meters.addresses().is_empty() || target.meters.models().is_empty();
        sleep(if unknown { CONFIRM_INTERVAL * 2 } else { FACTS_INTERVAL }).await;
    }
}

/// Has the tokenizers of an engine's models loaded before the first request asks for them. Adapters share their base
/// model's.
fn want_tokenizers(state: &State, models: &[ListedModel]) {
    for model in models.iter().filter(|model| model.parent.is_none()) {
        if state.tokenizers.status(&model.id).is_none() {
            state.tokenizers.want(ModelSlug::from(model.id.as_str()));
        }
    }
}

/// Looks the name up; true when an endpoint without addresses has some now.
async fn resolve(target: &Target) -> bool {
    let before = target.meters.addresses();
    match tokio::net::lookup_host((target.key.host.as_str(), target.key.port)).await {
        Ok(found) => {
            let mut addresses: Vec<_> = found.collect();
            addresses.sort_unstable();
            addresses.dedup();
            let first = before.is_empty() && !addresses.is_empty();
            target.meters.set_addresses(addresses);
            first
        }
        Err(error) => {
            // What a name meant a moment ago is better than nothing.
            tracing::debug!(endpoint = %target.label, %error, "name did not resolve");
            false
        }
    }
}

/// The models that an engine lists; `None` when it does not say.
async fn ask_models(target: &Target, asker: &Asker) -> Option<Vec<ListedModel>> {
    let mut request = asker.http.get(format!("http://{}/v1/models", target.key)).timeout(MODELS_TIMEOUT);
    if let Some(key) = &asker.key {
        request = request.bearer_auth(key);
    }
    let answer = request.send().await.ok()?;
    let page: Models = serde_json::from_slice(&bounded_body(answer).await.ok()?).ok()?;
    Some(page.data.into_iter().filter_map(listed).collect())
}

/// One entry of the list; `None` for what has no name.
fn listed(card: Value) -> Option<ListedModel> {
    let text = |name: &str| card[name].as_str().map(str::to_owned);
    Some(ListedModel { id: text("id")?, parent: text("parent"), card })
}

#[derive(serde::Deserialize)]
struct Models {
    data: Vec<Value>,
}

async fn bounded_body(mut answer: reqwest::Response) -> Result<Vec<u8>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(piece) = answer.chunk().await? {
        if body.len() + piece.len() > MODELS_BYTES_MAX {
            break;
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_our_own_is_no_verdict_on_an_endpoint() {
        let connect = |code: Errno| Failure::Connect(std::io::Error::from_raw_os_error(code as i32));
        assert!([Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS].map(connect).iter().all(Failure::is_ours));
        assert!(![Errno::ECONNREFUSED, Errno::EHOSTUNREACH].map(connect).iter().any(Failure::is_ours));
        assert!(!Failure::Timeout(MODELS_TIMEOUT).is_ours() && !Failure::Status(503).is_ours());
    }

    #[test]
    fn intervals_vary_by_a_tenth() {
        let varied: Vec<_> = (0..200).map(|_| varied(Duration::from_secs(10))).collect();
        assert!(varied.iter().all(|time| (9_000..=11_000).contains(&time.as_millis())));
        assert!(
            varied.iter().any(|time| time.as_millis() < 9_500) && varied.iter().any(|time| time.as_millis() > 10_500)
        );
    }
}

//! The questions that an engine is asked over HTTP.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::Value;

use super::sample::SAMPLES;
use crate::contract::TokenId;
use crate::fleet::{CacheConfig, EndpointKey, EngineFacts, EventSource, Fact, Missing, Model, Version};
use crate::ingest::next_label;

/// Bytes of a JSON answer that are read: a list of models with a hundred adapters has 60 KB.
const JSON_MAX: usize = 1 << 20;
/// Bytes of `/metrics` that are read: engines answer with some 100 KB.
const METRICS_MAX: usize = 4 << 20;
/// Letters of a text that is kept: names of models are the longest.
const TEXT_MAX: usize = 256;
/// Publishers that are kept: more than any engine has ranks.
const SOURCES_MAX: usize = 64;
/// Names of series that are kept: an engine has some 150.
const SERIES_MAX: usize = 4_096;

/// Who asks, and how patiently.
#[derive(Clone, Debug)]
pub struct Asker {
    http: reqwest::Client,
    key: Option<String>,
    timeout: Duration,
}

impl Asker {
    /// Somebody who waits so long for each answer. `key` is the engine's `--api-key`, where it has one.
    ///
    /// # Errors
    /// Where no HTTP client can be made.
    pub fn new(timeout: Duration, key: Option<String>) -> Result<Self, reqwest::Error> {
        Ok(Self { http: crate::ingest::plain_client()?, key, timeout })
    }

    pub(super) async fn get(&self, place: &EndpointKey, path: &str, limit: usize) -> Result<Vec<u8>, Missing> {
        self.answer(self.http.get(format!("http://{place}{path}")), path, limit).await
    }

    async fn json(&self, place: &EndpointKey, path: &str) -> Result<Value, Missing> {
        parse(&self.get(place, path, JSON_MAX).await?)
    }

    async fn answer(&self, request: reqwest::RequestBuilder, path: &str, limit: usize) -> Result<Vec<u8>, Missing> {
        // The key guards these paths alone, and goes nowhere else.
        let request = match self.key.as_ref().filter(|_| path.starts_with("/v1")) {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        let answer = request.timeout(self.timeout).send().await.map_err(|error| self.unreachable(&error))?;
        if !answer.status().is_success() {
            return Err(Missing::Status(answer.status().as_u16()));
        }
        let body = body_within(answer, limit).await.map_err(|error| self.unreachable(&error))?;
        body.ok_or_else(|| Missing::Unreadable(format!("more than {limit} bytes")))
    }

    fn unreachable(&self, error: &reqwest::Error) -> Missing {
        if error.is_timeout() {
            return Missing::Unreachable(format!("nothing within {} ms", self.timeout.as_millis()));
        }
        // The innermost cause is the one that an operator knows: connection refused, no such host.
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        Missing::Unreachable(word(&cause.to_string()))
    }
}

/// Asks an engine what it says of itself. With `model`, or where `tokenize` is set the first that it lists, also what
/// tokens it makes of the samples.
pub async fn read(asker: &Asker, place: &EndpointKey, tokenize: bool, model: Option<&str>) -> EngineFacts {
    let (version, models, metrics, sources) = tokio::join!(
        asker.json(place, "/version"),
        asker.json(place, "/v1/models"),
        asker.get(place, "/metrics", METRICS_MAX),
        asker.json(place, "/kv_event_sources"),
    );
    let mut facts = EngineFacts {
        version: fact(version.and_then(|answer| read_version(&answer))),
        models: fact(models.and_then(|answer| read_models(&answer))),
        sources: fact(sources.and_then(|answer| read_sources(&answer))),
        ..EngineFacts::default()
    };
    match metrics {
        Ok(text) => read_metrics(&String::from_utf8_lossy(&text), &mut facts),
        Err(why) => {
            facts.cache = Fact::Missing(why.clone());
            facts.series = Fact::Missing(why.clone());
            facts.engines = Fact::Missing(why.clone());
            facts.process_start = Fact::Missing(why);
        }
    }
    let model = model.map(str::to_owned).or_else(|| facts.base_models().next().map(|model| model.id.clone()));
    if let Some(model) = model.filter(|_| tokenize && facts.unreachable().is_none()) {
        facts.tokens = tokens(asker, place, &model).await;
    }
    facts
}

async fn tokens(asker: &Asker, place: &EndpointKey, model: &str) -> Vec<Fact<Vec<TokenId>>> {
    let mut all: Vec<Fact<Vec<TokenId>>> = Vec::with_capacity(SAMPLES.len());
    for sample in SAMPLES {
        // One that does not answer is not waited for again and again.
        if let Some(Fact::Missing(gone @ Missing::Unreachable(_))) = all.last() {
            all.push(Fact::Missing(gone.clone()));
            continue;
        }
        let request = asker.http.post(format!("http://{place}/tokenize")).json(&sample.body(model));
        let answer = asker.answer(request, "/tokenize", JSON_MAX).await;
        all.push(fact(answer.and_then(|body| parse(&body)).and_then(|answer| read_tokens(&answer))));
    }
    all
}

/// The body of an answer, unless it has more than `limit` bytes.
///
/// # Errors
/// `reqwest`'s, where the answer breaks off.
pub async fn body_within(mut answer: reqwest::Response, limit: usize) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(piece) = answer.chunk().await? {
        if body.len() + piece.len() > limit {
            return Ok(None);
        }
        body.extend_from_slice(&piece);
    }
    Ok(Some(body))
}

fn fact<T>(answer: Result<T, Missing>) -> Fact<T> {
    match answer {
        Ok(value) => Fact::Known(value),
        Err(why) => Fact::Missing(why),
    }
}

fn parse(body: &[u8]) -> Result<Value, Missing> {
    serde_json::from_slice(body).map_err(|_error| Missing::Unreadable("no JSON".to_owned()))
}

fn unreadable<T>(what: &str) -> Result<T, Missing> {
    Err(Missing::Unreadable(what.to_owned()))
}

fn read_version(answer: &Value) -> Result<Version, Missing> {
    match answer["version"].as_str() {
        Some(text) => Ok(Version::from(word(text))),
        None => unreadable("no version"),
    }
}

fn read_models(answer: &Value) -> Result<Vec<Model>, Missing> {
    let Some(list) = answer["data"].as_array() else { return unreadable("no list of models") };
    let model = |card: &Value| {
        let text = |name: &str| card[name].as_str().map(word);
        let max_model_len = card["max_model_len"].as_u64();
        Some(Model { id: text("id")?, parent: text("parent"), root: text("root"), max_model_len })
    };
    Ok(list.iter().filter_map(model).collect())
}

fn read_sources(answer: &Value) -> Result<BTreeMap<u32, EventSource>, Missing> {
    let Some(ranks) = answer.as_object() else { return unreadable("no list of ranks") };
    let source = |(rank, source): (&String, &Value)| {
        let text = |name: &str| source[name].as_str().map(word);
        let publisher = EventSource {
            enabled: source["enable_kv_cache_events"].as_bool().unwrap_or(false),
            publisher: text("publisher").unwrap_or_default(),
            endpoint: text("endpoint"),
            replay_endpoint: text("replay_endpoint"),
        };
        Some((rank.parse().ok()?, publisher))
    };
    Ok(ranks.iter().filter_map(source).take(SOURCES_MAX).collect())
}

fn read_tokens(answer: &Value) -> Result<Vec<TokenId>, Missing> {
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok()).map(TokenId);
    let ids: Option<Vec<_>> = answer["tokens"].as_array().and_then(|ids| ids.iter().map(id).collect());
    ids.map_or_else(|| unreadable("no tokens"), Ok)
}

/// Reads a Prometheus text. An engine with several ranks has several cache configurations; the first speaks for all.
fn read_metrics(text: &str, facts: &mut EngineFacts) {
    let (mut series, mut engines, mut cache, mut start) = (BTreeSet::new(), BTreeSet::new(), None, None);
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let end = line.find(['{', ' ']).unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        if series.len() < SERIES_MAX && !name.is_empty() {
            series.insert(word(name));
        }
        if name == "process_start_time_seconds" {
            start = rest.trim().parse::<f64>().ok().map(f64::to_bits);
        }
        let labels = rest.strip_prefix('{').filter(|_| name == "vllm:cache_config_info");
        if let Some(labels) = labels {
            let (config, engine) = cache_config(labels);
            engines.extend(engine);
            cache.get_or_insert(config);
        }
    }
    let absent = |what: &str| Missing::Unreadable(format!("{what} is not among its metrics"));
    facts.cache = fact(cache.ok_or_else(|| absent("vllm:cache_config_info")));
    facts.engines = fact(u32::try_from(engines.len()).ok().filter(|n| *n > 0).ok_or_else(|| absent("a rank")));
    facts.process_start = fact(start.ok_or_else(|| absent("process_start_time_seconds")));
    facts.series = Fact::Known(series);
}

fn cache_config(mut labels: &str) -> (CacheConfig, Option<String>) {
    let (mut config, mut engine) = (CacheConfig::default(), None);
    while let Some((name, value, rest)) = next_label(labels) {
        match name {
            "block_size" => config.block_size = value.parse().ok(),
            "num_gpu_blocks" => config.num_gpu_blocks = value.parse().ok(),
            "prefix_caching_hash_algo" => config.hash_algo = Some(word(&value)),
            "enable_prefix_caching" => {
                config.prefix_caching = match value.as_str() {
                    "True" => Some(true),
                    "False" => Some(false),
                    _ => None,
                }
            }
            "engine" => engine = Some(word(&value)),
            _ => {}
        }
        labels = rest;
    }
    (config, engine)
}

/// A text as it may be shown.
fn word(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(TEXT_MAX).collect()
}

#[cfg(test)]
mod tests {
    use axum::extract::Request;
    use axum::http::StatusCode;
    use axum::response::IntoResponse as _;
    use axum::{Router, response::Response};
    use tokio::net::TcpListener;

    use super::*;

    /// A server that answers by `answer`, and where it is.
    async fn serve(answer: impl Fn(&str, &str, bool) -> Response + Clone + Send + Sync + 'static) -> EndpointKey {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let app = Router::new().fallback(move |request: Request| {
            let with_key = request.headers().get("authorization").is_some_and(|key| key == "Bearer k");
            let answer = answer(request.method().as_str(), request.uri().path(), with_key);
            async move { answer }
        });
        tokio::spawn(async move { axum::serve(listener, app).await });
        EndpointKey { host: "127.0.0.1".to_owned(), port }
    }

    fn asker(key: Option<&str>) -> Asker {
        Asker::new(Duration::from_millis(500), key.map(str::to_owned)).unwrap()
    }

    fn not_found() -> Response {
        StatusCode::NOT_FOUND.into_response()
    }

    /// As vLLM 0.32 answers.
    fn engine(method: &str, path: &str, with_key: bool) -> Response {
        match (method, path) {
            ("GET", "/version") => r#"{"version":"0.32.0"}"#.into_response(),
            ("GET", "/v1/models") if !with_key => StatusCode::UNAUTHORIZED.into_response(),
            ("GET", "/v1/models") => r#"{"object":"list","data":[
                {"id":"tiny","root":"models/tiny","parent":null,"max_model_len":4096},
                {"id":"lora-a","root":"models/lora-a","parent":"tiny","max_model_len":null},{"no":"name"}]}"#
                .into_response(),
            ("GET", "/kv_event_sources") => r#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq",
                "endpoint":"tcp://*:17557","replay_endpoint":"tcp://*:17657","buffer_steps":10000},
                "1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:17558"},"x":{}}"#
                .into_response(),
            ("GET", "/metrics") => "# HELP vllm:cache_config_info x\nprocess_start_time_seconds 1.5e+09\n\
                vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",engine=\"0\",\
                num_gpu_blocks=\"131072\",prefix_caching_hash_algo=\"sha256_cbor\"} 1.0\n\
                vllm:cache_config_info{block_size=\"9\",engine=\"1\"} 1.0\nvllm:num_requests_running{a=\"b\"} 0\n"
                .into_response(),
            ("POST", "/tokenize") => r#"{"count":2,"tokens":[9707,0]}"#.into_response(),
            _ => not_found(),
        }
    }

    #[tokio::test]
    async fn an_engine_is_read_as_it_answers() {
        let place = serve(engine).await;
        let facts = read(&asker(Some("k")), &place, true, None).await;
        assert_eq!(facts.version.known().map(|version| version.release), Some(Some((0, 32))));
        let models = facts.models.known().unwrap();
        assert_eq!(
            models.iter().map(|m| (&*m.id, m.max_model_len)).collect::<Vec<_>>(),
            [("tiny", Some(4096)), ("lora-a", None)]
        );
        assert_eq!(facts.adapters().map(|a| a.root.as_deref()).collect::<Vec<_>>(), [Some("models/lora-a")]);
        let cache = CacheConfig {
            block_size: Some(16),
            num_gpu_blocks: Some(131_072),
            hash_algo: Some("sha256_cbor".to_owned()),
            prefix_caching: Some(true),
        };
        assert_eq!(facts.cache, Fact::Known(cache), "the first rank's");
        assert_eq!((facts.ranks(), facts.engines.known()), (Some(2), Some(&2)));
        let first = facts.first_source().unwrap();
        assert_eq!((first.port(), first.replay_port(), first.is_open()), (Some(17_557), Some(17_657), true));
        assert_eq!(facts.process_start, Fact::Known(1.5e9_f64.to_bits()));
        assert!(facts.series.known().unwrap().contains("vllm:num_requests_running"));
        assert_eq!(facts.tokens, vec![Fact::Known(vec![TokenId(9707), TokenId(0)]); SAMPLES.len()]);
    }

    #[tokio::test]
    async fn each_fact_is_missing_for_itself() {
        let facts = read(&asker(None), &serve(engine).await, true, None).await;
        assert_eq!(facts.models, Fact::Missing(Missing::Status(401)));
        assert!(facts.version.known().is_some() && facts.tokens.is_empty(), "no model is known to ask for");
        let named = read(&asker(None), &serve(engine).await, true, Some("tiny")).await;
        assert_eq!(named.tokens.len(), SAMPLES.len());
        let bare = read(&asker(None), &serve(|_, _, _| not_found()).await, true, Some("m")).await;
        assert_eq!(bare.sources, Fact::Missing(Missing::Status(404)));
        assert_eq!((bare.unreachable(), bare.era(), bare.ranks()), (None, None, None));
    }

    #[tokio::test]
    async fn the_key_is_sent_to_the_paths_that_it_guards_alone() {
        let place = serve(|_, path, with_key| {
            let right = path.starts_with("/v1") == with_key;
            if right { "{}".into_response() } else { StatusCode::BAD_REQUEST.into_response() }
        });
        let facts = read(&asker(Some("k")), &place.await, true, Some("m")).await;
        let refused = Missing::Status(400);
        assert!(facts.version.missing() != Some(&refused) && facts.models.missing() != Some(&refused));
        assert!(facts.tokens.iter().all(|tokens| tokens.missing() != Some(&refused)));
    }

    #[tokio::test]
    async fn whatever_is_answered_is_bounded_and_never_fails_as_a_whole() {
        let long = "9".repeat(JSON_MAX + 1);
        let facts =
            read(&asker(None), &serve(move |_, _, _| long.clone().into_response()).await, true, Some("m")).await;
        assert!(matches!(facts.version, Fact::Missing(Missing::Unreadable(_))));
        for odd in
            ["", "{", "[]", "null", "3", r#"{"version":3,"data":{},"tokens":[-1]}"#, r#"{"tokens":[99999999999]}"#]
        {
            let facts = read(&asker(None), &serve(move |_, _, _| odd.into_response()).await, true, Some("m")).await;
            assert!(facts.version.known().is_none() && facts.cache.known().is_none(), "{odd}");
            assert!(facts.tokens.iter().all(|tokens| tokens.known().is_none()), "{odd}");
        }
        let word = "x".repeat(10 * TEXT_MAX);
        let body = format!("{{\"version\":\"0.1\\u0007{word}\"}}");
        let facts = read(&asker(None), &serve(move |_, _, _| body.clone().into_response()).await, false, None).await;
        assert_eq!(facts.version.known().map(|version| version.text.len()), Some(TEXT_MAX));
    }

    #[tokio::test]
    async fn one_that_is_gone_or_says_nothing_is_unreachable() {
        let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let place = |listener: &TcpListener| EndpointKey {
            host: "127.0.0.1".to_owned(),
            port: listener.local_addr().unwrap().port(),
        };
        let nobody = place(&gone);
        drop(gone);
        let facts = read(&asker(None), &nobody, true, Some("m")).await;
        assert!(facts.unreachable().is_some_and(|why| why.contains("refused")), "{:?}", facts.unreachable());
        let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let facts = read(&asker(None), &place(&mute), true, Some("m")).await;
        assert_eq!(facts.unreachable(), Some("nothing within 500 ms"));
    }
}

//! `--listen` and `--endpoint`: a rule without a body, made of what the engines say of themselves.
//!
//! The rule is there before anybody listens, without the KV tier: requests are answered in turn by whoever is up. Once
//! an engine has answered, the rule is made again with what it says. A part that is not told gets its default, and a log
//! line says so. The rule is kvlb's own: it is not kept, gives way to an operator's, and is let go where one takes it over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;

use crate::config::ZeroTouch;
use crate::contract::HashAlgo;
use crate::control::Store;
use crate::control::store::{Change, Entry};
use crate::control::wire::Body;
use crate::discover::{self, Asker};
use crate::fleet::{EndpointKey, EngineFacts, EventSource, Fact, RuleId};
use crate::state::{Staged, State};
use crate::tokenize::ModelSlug;

/// The rule's free name.
const NAME: &str = "zero-touch";
/// How often an engine is asked while one of them has not answered: they take minutes to load a model.
const ASK_SOON: Duration = Duration::from_secs(1);
/// How often they are asked afterwards: one that comes back may have other flags.
const ASK_EVERY: Duration = Duration::from_secs(10);
/// How long a model's tokenizer may take to load until it is called missing.
const TOKENIZER_LIMIT: Duration = Duration::from_secs(10);
/// Defaults of what an engine does not tell: those of vLLM on GPUs.
const BLOCK_SIZE: u32 = 16;
const ZMQ_PORT: u16 = 5557;
/// vLLM's algorithm where no flag says otherwise.
const ALGO: HashAlgo = HashAlgo::Sha256;

/// What the rule is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Plan {
    block_size: u32,
    algo: HashAlgo,
    zmq_port: u16,
    replay_port: Option<u16>,
    /// What was taken for granted, for the log.
    defaults: Vec<String>,
}

/// The pool and its rule.
#[derive(Debug)]
pub(super) struct Zero {
    pool: ZeroTouch,
    store: Arc<Store>,
    rule: RuleId,
    /// What each engine said when it last answered.
    known: BTreeMap<EndpointKey, EngineFacts>,
    /// The engine whose word counts: the first that answered.
    leader: Option<EndpointKey>,
    /// What was logged of each engine.
    told: BTreeMap<EndpointKey, String>,
}

impl Zero {
    /// Makes the rule, without the KV tier. `None`, with a log line, where an operator's own rule is in the way.
    pub(super) fn begin(pool: ZeroTouch, store: Arc<Store>) -> Option<Self> {
        let listen = pool.listen;
        match put(&store, &body(&pool, None, &BTreeMap::new(), None)) {
            Ok(Some(rule)) => {
                tracing::info!(%rule, %listen, engines = pool.endpoints.len(), "zero-touch: serving in turn until an engine says what it is");
                let (known, told) = (BTreeMap::new(), BTreeMap::new());
                Some(Self { pool, store, rule, known, leader: None, told })
            }
            Ok(None) => {
                tracing::warn!(%listen, "zero-touch: an operator's rule is there and stays as it is; --endpoint has no effect");
                None
            }
            Err(why) => {
                tracing::error!(%listen, why, "zero-touch: no rule could be made");
                None
            }
        }
    }

    /// Follows the engines for ever, or until an operator has taken the rule over.
    pub(super) async fn follow(mut self, state: Arc<State>, asker: Asker) {
        let mut before = None;
        loop {
            self.ask(&asker).await;
            if !self.is_ours() {
                tracing::info!(rule = %self.rule, "zero-touch: the rule is an operator's now, or gone; it is let go");
                return;
            }
            if let Some(plan) = self.plan() {
                let new = Some(plan.clone()) != before;
                if new {
                    plan.defaults.iter().for_each(|line| tracing::warn!("zero-touch: {line}"));
                }
                if self.put(&plan).await && new {
                    self.announce(&plan);
                    tokio::spawn(tell_tokenizers(Arc::clone(&state), self.models()));
                    before = Some(plan);
                }
            }
            let all = self.pool.endpoints.iter().all(|place| self.known.contains_key(place));
            sleep(if all { ASK_EVERY } else { ASK_SOON }).await;
        }
    }

    /// Asks every engine at the same time, and says what is new.
    async fn ask(&mut self, asker: &Asker) {
        let mut asking = JoinSet::new();
        for place in self.pool.endpoints.clone() {
            let asker = asker.clone();
            asking.spawn(async move {
                let facts = discover::read(&asker, &place, false, None).await;
                (place, facts)
            });
        }
        let mut answers = asking.join_all().await;
        answers.sort_unstable_by_key(|(place, _)| self.pool.endpoints.iter().position(|other| other == place));
        for (place, facts) in answers {
            let line = match facts.unreachable() {
                Some(why) => format!("waiting for it: {why}"),
                None if !is_vllm(&facts) => {
                    "it answers and is no vLLM: its requests are not routed by their blocks".to_owned()
                }
                None => shown(&facts),
            };
            if self.told.get(&place) != Some(&line) {
                tracing::info!(engine = %place, "zero-touch: {line}");
                if let Some(trouble) = trouble(&facts) {
                    tracing::warn!(engine = %place, "zero-touch: {trouble}");
                }
                self.told.insert(place.clone(), line);
            }
            if facts.unreachable().is_none() && is_vllm(&facts) {
                self.leader.get_or_insert_with(|| place.clone());
                self.known.insert(place, facts);
            }
        }
    }

    /// What the leader's word makes of the rule.
    fn plan(&self) -> Option<Plan> {
        let leader = self.leader.as_ref()?;
        Some(plan(self.known.get(leader)?))
    }

    fn is_ours(&self) -> bool {
        self.entry().is_some_and(|entry| entry.volatile)
    }

    fn entry(&self) -> Option<Arc<Entry>> {
        self.store.entries().iter().find(|entry| entry.id == self.rule).cloned()
    }

    /// Puts the rule in force; says whether it is.
    async fn put(&self, plan: &Plan) -> bool {
        let (store, body) =
            (Arc::clone(&self.store), body(&self.pool, Some(plan), &self.known, self.entry().as_deref()));
        let done = spawn_blocking(move || put(&store, &body)).await;
        match done.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(rule) => rule.is_some(),
            Err(why) => {
                tracing::error!(why, "zero-touch: the rule could not be changed");
                false
            }
        }
    }

    fn announce(&self, plan: &Plan) {
        let Plan { block_size, algo, zmq_port, .. } = plan;
        let replay = plan.replay_port.map_or_else(|| "as usual".to_owned(), |port| port.to_string());
        tracing::info!(rule = %self.rule, block_size, %algo, zmq_port, replay, models = ?self.models(), "zero-touch: routing by blocks");
    }

    fn models(&self) -> Vec<String> {
        let mut models: Vec<_> =
            self.known.values().flat_map(EngineFacts::base_models).map(|model| model.id.clone()).collect();
        models.sort_unstable();
        models.dedup();
        models
    }
}

/// Makes the change; the rule's number, or `None` where an operator's is there.
fn put(store: &Store, body: &Value) -> Result<Option<RuleId>, String> {
    let body = Body::from_json(body).map_err(|problem| problem.to_string())?;
    let done = store.change(&Change::Volatile(Box::new(body))).map_err(|problem| problem.to_string())?;
    Ok(done.ids.first().copied().filter(|_| done.what != "left"))
}

fn is_vllm(facts: &EngineFacts) -> bool {
    facts.cache.known().is_some() || facts.sources.known().is_some()
}

/// What an engine says, in a line.
fn shown(facts: &EngineFacts) -> String {
    let version = facts.version.known().map_or("of unknown version", |version| version.text.as_str());
    let models: Vec<_> = facts.base_models().map(|model| model.id.as_str()).collect();
    let cache = facts.cache.known();
    let or = |value: Option<String>| value.unwrap_or_else(|| "?".to_owned());
    let size = or(cache.and_then(|cache| cache.block_size).map(|size| size.to_string()));
    let algo = or(cache.and_then(|cache| cache.hash_algo.clone()));
    let events = match &facts.sources {
        Fact::Known(sources) => match sources.values().next().filter(|source| source.is_open()) {
            Some(source) => {
                let replay = source.replay_port().map_or_else(|| "none".to_owned(), |port| port.to_string());
                format!("events at {}, replay at {replay}", or(source.port().map(|port| port.to_string())))
            }
            None => "no events".to_owned(),
        },
        Fact::Missing(_) => "events not told".to_owned(),
    };
    let ranks = facts.ranks().unwrap_or(1);
    format!("vLLM {version}, {}, blocks of {size} by {algo}, {events}, {ranks} rank(s)", models.join(" and "))
}

/// What keeps an engine's requests from being routed by their blocks.
fn trouble(facts: &EngineFacts) -> Option<String> {
    let sources = facts.sources.known()?;
    let open = !sources.is_empty() && sources.values().all(EventSource::is_open);
    let advice = "it publishes no events that anybody can hear, so its requests are routed by the selector; start it with \
                  --kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \"tcp://*:5557\"}'";
    (!open && is_vllm(facts)).then(|| advice.to_owned())
}

fn plan(facts: &EngineFacts) -> Plan {
    let mut defaults = Vec::new();
    let cache = facts.cache.known();
    let block_size = cache.and_then(|cache| cache.block_size).filter(|size| *size > 0).unwrap_or_else(|| {
        defaults.push(format!("the engine does not tell its block size; {BLOCK_SIZE} is assumed"));
        BLOCK_SIZE
    });
    let told = cache.and_then(|cache| cache.hash_algo.as_deref());
    let algo = told.and_then(|algo| algo.parse().ok()).unwrap_or_else(|| {
        let what =
            told.map_or_else(|| "does not tell its algorithm".to_owned(), |algo| format!("names blocks by {algo}"));
        defaults.push(format!("the engine {what}; {ALGO} is assumed until its events say otherwise"));
        ALGO
    });
    let source = facts.first_source();
    let zmq_port = source.and_then(EventSource::port).unwrap_or_else(|| {
        defaults.push(format!("the engine does not tell its event port; {ZMQ_PORT} is assumed"));
        ZMQ_PORT
    });
    let replay_port = source.and_then(EventSource::replay_port).filter(|port| *port != zmq_port);
    Plan { block_size, algo, zmq_port, replay_port, defaults }
}

/// The rule's body. Of `before`, what an operator has set of an endpoint stays.
fn body(
    pool: &ZeroTouch,
    plan: Option<&Plan>,
    known: &BTreeMap<EndpointKey, EngineFacts>,
    before: Option<&Entry>,
) -> Value {
    let mut service = json!({
        "externalIP": pool.listen.ip(), "port": pool.listen.port(), "protocol": "tcp", "mode": 4, "sel": 0, "name": NAME,
        "kvExactMode": 0,
    });
    if let Some(plan) = plan {
        service["kvExactMode"] = 3.into();
        service["kvKeying"] = "auto".into();
        service["kvBlockSize"] = plan.block_size.into();
        service["kvHashAlgo"] = plan.algo.label().into();
        service["kvZmqPort"] = plan.zmq_port.into();
        if let Some(port) = plan.replay_port {
            service["kvReplayPort"] = port.into();
        }
    }
    let endpoint = |place: &EndpointKey| {
        let mut row = kept(before, place);
        row.insert("endpointIP".to_owned(), place.host.as_str().into());
        row.insert("targetPort".to_owned(), place.port.into());
        // One that has never answered is listened to at the leader's port. On the leader's host that is the leader's own
        // publisher, until the engine answers: that is sooner than its probe lets requests come.
        let source = known.get(place).and_then(EngineFacts::first_source);
        if let (Some(plan), Some(source)) = (plan, source) {
            // Engines of one host cannot share a port.
            let own = source.port().filter(|port| *port != plan.zmq_port);
            let replay = source.replay_port().filter(|port| own.is_some() || Some(*port) != plan.replay_port);
            row.extend(own.map(|port| ("kvZmqPort".to_owned(), port.into())));
            row.extend(replay.map(|port| ("kvReplayPort".to_owned(), port.into())));
        }
        Value::Object(row)
    };
    json!({"serviceArguments": service, "endpoints": pool.endpoints.iter().map(endpoint).collect::<Vec<_>>()})
}

/// What an operator has set of an endpoint, which no engine can know.
fn kept(before: Option<&Entry>, place: &EndpointKey) -> Map<String, Value> {
    let rows = before.and_then(|entry| entry.json.get("endpoints")).and_then(Value::as_array);
    let is_it = |row: &&Value| row["endpointIP"] == place.host.as_str() && row["targetPort"] == place.port;
    let row = rows.into_iter().flatten().find(is_it).and_then(Value::as_object);
    let ours = |name: &str| matches!(name, "adminState" | "probe" | "weight");
    row.into_iter()
        .flatten()
        .filter(|(name, _)| ours(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// Says of each model whether its prompts can be named.
async fn tell_tokenizers(state: Arc<State>, models: Vec<String>) {
    for model in models {
        state.tokenizers.want(ModelSlug::from(model.as_str()));
        let staged = async {
            loop {
                if let Some(staged) = state.tokenizers.status(&model) {
                    return staged;
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        match tokio::time::timeout(TOKENIZER_LIMIT, staged).await {
            Ok(Staged::Ready(_)) => tracing::info!(model, "zero-touch: its tokenizer is staged"),
            Ok(Staged::Unusable(why)) => tracing::warn!(
                model,
                why,
                "zero-touch: no staged tokenizer; its requests are answered in turn until there is one"
            ),
            Err(_late) => tracing::warn!(model, "zero-touch: its tokenizer still loads"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::store::Select;
    use crate::fleet::{CacheConfig, ExactMode, Rule, Version};

    fn pool() -> ZeroTouch {
        let endpoints = ["a:8000", "b:8000"].map(|text| discover::place(text).unwrap()).to_vec();
        ZeroTouch { listen: "10.0.0.1:80".parse().unwrap(), endpoints }
    }

    fn source(port: u16, replay: Option<u16>) -> EventSource {
        EventSource {
            enabled: true,
            publisher: "zmq".to_owned(),
            endpoint: Some(format!("tcp://*:{port}")),
            replay_endpoint: replay.map(|port| format!("tcp://*:{port}")),
        }
    }

    fn facts(size: u32, algo: &str, source: EventSource) -> EngineFacts {
        let cache = CacheConfig {
            block_size: Some(size),
            hash_algo: Some(algo.to_owned()),
            prefix_caching: Some(true),
            num_gpu_blocks: None,
        };
        EngineFacts {
            version: Fact::Known(Version::from("0.32.0".to_owned())),
            cache: Fact::Known(cache),
            sources: Fact::Known(BTreeMap::from([(0, source)])),
            ..EngineFacts::default()
        }
    }

    fn store() -> Arc<Store> {
        Arc::new(Store::open(None, |_: Vec<Arc<Rule>>| {}).unwrap())
    }

    fn rule(zero: &Zero) -> Arc<Rule> {
        zero.entry().unwrap().rule.clone().unwrap()
    }

    fn learn(zero: &mut Zero, place: usize, facts: EngineFacts) {
        let place = zero.pool.endpoints[place].clone();
        zero.leader.get_or_insert_with(|| place.clone());
        zero.known.insert(place, facts);
    }

    #[tokio::test]
    async fn the_rule_serves_in_turn_until_an_engine_says_what_it_is() {
        let mut zero = Zero::begin(pool(), store()).unwrap();
        let first = rule(&zero);
        assert_eq!((first.kv.mode, first.endpoints.len(), first.name.as_str()), (ExactMode::Off, 2, NAME));
        assert_eq!(zero.plan(), None);
        learn(&mut zero, 1, facts(32, "sha256", source(5558, Some(7000))));
        let plan = zero.plan().unwrap();
        assert!(plan.defaults.is_empty() && zero.put(&plan).await);
        let made = rule(&zero);
        assert_eq!((made.id, made.kv.mode, made.kv.block_size.get()), (first.id, ExactMode::SinglePool, 32));
        assert_eq!((made.kv.algo, made.kv.zmq_port, made.kv.replay_port), (HashAlgo::Sha256, 5558, Some(7000)));
        // An engine of the same host publishes elsewhere; the first word still counts for the rest.
        learn(&mut zero, 0, facts(16, "sha256_cbor", source(5557, Some(6557))));
        assert_eq!(zero.plan(), Some(plan.clone()));
        assert!(zero.put(&plan).await);
        let made = rule(&zero);
        let ports: Vec<_> = made.endpoints.iter().map(|e| (made.event_port(e), made.replay_port(e))).collect();
        assert_eq!(ports, [(5557, Some(6557)), (5558, Some(7000))]);
    }

    #[test]
    fn what_is_not_told_gets_its_default_and_a_line() {
        let plan = plan(&EngineFacts::default());
        assert_eq!((plan.block_size, plan.algo, plan.zmq_port, plan.replay_port), (16, HashAlgo::Sha256, 5557, None));
        assert_eq!(plan.defaults.len(), 3);
        let odd = super::plan(&facts(16, "blake3", source(5557, None)));
        assert!(odd.algo == ALGO && odd.defaults[0].contains("blake3"));
    }

    #[test]
    fn events_that_nobody_can_hear_are_told() {
        let off = EventSource { enabled: false, ..source(5557, None) };
        assert!(trouble(&facts(16, "sha256", off)).is_some_and(|text| text.contains("--kv-events-config")));
        assert_eq!(trouble(&facts(16, "sha256", source(5557, None))), None);
        assert_eq!(trouble(&EngineFacts::default()), None, "an old version does not tell");
    }

    #[tokio::test]
    async fn an_operator_wins_and_what_he_set_of_an_endpoint_stays() {
        let store = store();
        let zero = Zero::begin(pool(), Arc::clone(&store)).unwrap();
        let down =
            Change::Endpoints { host: "b".to_owned(), port: None, field: "adminState", value: Some(json!("down")) };
        store.change(&down).unwrap();
        let plan = plan(&facts(16, "sha256", source(5557, None)));
        assert!(zero.is_ours() && zero.put(&plan).await);
        assert!(rule(&zero).endpoints[1].admin_down);
        let own = Body::from_json(&body(&pool(), None, &BTreeMap::new(), None)).unwrap();
        store.change(&Change::Post(Box::new(own))).unwrap();
        assert!(!zero.is_ours() && !zero.put(&plan).await);
        assert!(Zero::begin(pool(), Arc::clone(&store)).is_none(), "an operator's rule is there");
        store.change(&Change::Delete(Select::All)).unwrap();
        assert!(!zero.is_ours());
    }
}

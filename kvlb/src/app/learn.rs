//! What engines say of themselves, asked for in the background and compared with their rules.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::crew::Crew;
use crate::contract::NoneSeed;
use crate::discover::{self, Asker, Look, OurTokens, Ours, Report, Row};
use crate::fleet::{self, EndpointKey, EngineType, ExactMode, Rule, RuleId};
use crate::state::kv::EndpointKv;
use crate::state::{Endpoint, EndpointId, Meters, Service, Staged, State};
use crate::{clock, tokenize};

/// How long an answer of an engine may take: one that loads its model answers late, and is asked again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How often an engine is asked what it is: its flags do not change while it runs.
const ASK_EVERY: Duration = Duration::from_secs(30);
/// How soon one is asked again that did not answer, and how often its event socket is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often somebody who waits for an engine's first answer looks.
const WAIT_STEP: Duration = Duration::from_millis(5);
/// How long an endpoint may be without its task.
const MISSING_AFTER: Duration = Duration::from_secs(5);

type Key = (RuleId, EndpointId);

/// One engine to ask.
#[derive(Clone, Debug)]
struct Asking {
    place: EndpointKey,
    meters: Arc<Meters>,
    kv: Option<Arc<EndpointKv>>,
}

impl PartialEq for Asking {
    fn eq(&self, other: &Self) -> bool {
        let kv = |asking: &Self| asking.kv.as_ref().map(Arc::as_ptr);
        self.place == other.place && Arc::ptr_eq(&self.meters, &other.meters) && kv(self) == kv(other)
    }
}

/// An asker for the daemon's use.
///
/// # Errors
/// Where no HTTP client can be made.
pub(super) fn asker(key: Option<&String>) -> Result<Asker, reqwest::Error> {
    Asker::new(ANSWER_TIMEOUT, key.cloned())
}

/// Follows the rules for ever.
pub(super) async fn keep_learning(state: Arc<State>, asker: Asker) {
    let mut crew: Crew<Key, Asking> = Crew::default();
    let mut rules = state.watch_rules();
    loop {
        rules.mark_unchanged();
        let table = state.table();
        crew.update(table.services().iter().flat_map(|service| asking(service)), |_, asking| {
            tokio::spawn(learn(asking.clone(), asker.clone(), Arc::clone(&state)))
        });
        drop(table);
        if let Ok(Err(_closed)) = timeout(MISSING_AFTER, rules.changed()).await {
            return;
        }
    }
}

/// The engines whose words matter to a rule: those of the KV tier.
fn asking(service: &Service) -> impl Iterator<Item = (Key, Asking)> {
    let rule = service.rule();
    let matters = rule.kv.mode != ExactMode::Off && rule.kv.engine == EngineType::Vllm;
    service.endpoints.iter().filter(move |_| matters).map(move |endpoint| {
        let asking =
            Asking { place: endpoint.spec.key.clone(), meters: Arc::clone(&endpoint.meters), kv: endpoint.kv.clone() };
        ((rule.id, endpoint.meters.id), asking)
    })
}

/// Asks one engine now and then, and at once where its events are there again: it may be another one.
async fn learn(asking: Asking, asker: Asker, state: Arc<State>) {
    let connected = || asking.kv.as_ref().is_some_and(|kv| kv.status(clock::now()).connected);
    loop {
        let mut before = connected();
        let facts = discover::read(&asker, &asking.place, false, None).await;
        let silent = facts.unreachable().is_some();
        if let (Some(kv), Some(era)) = (&asking.kv, facts.era()) {
            kv.set_era(era);
        }
        // One that does not answer now still publishes where it did.
        if !silent || asking.meters.facts().is_none() {
            let facts = match asking.meters.facts() {
                Some(before) => facts.or_of(&before),
                None => facts,
            };
            asking.meters.set_facts(facts);
            state.facts_changed();
        }
        let since = clock::now();
        loop {
            sleep(LOOK_EVERY).await;
            let now = connected();
            let reconnected = now && !before;
            before = now;
            if silent || reconnected || clock::now().duration_since(since) >= ASK_EVERY {
                break;
            }
        }
    }
}

/// A rule's side of the contract with one of its endpoints.
pub(super) fn ours(rule: &Rule, endpoint: &fleet::Endpoint, seed: &NoneSeed, replay_offset: Option<u16>) -> Ours {
    let (kv, zmq_port) = (&rule.kv, rule.event_port(endpoint));
    Ours {
        block_size: kv.block_size,
        algo: kv.algo,
        seed: seed.clone(),
        keying: kv.keying,
        zmq_port,
        replay_port: rule.replay_port(endpoint).or_else(|| zmq_port.checked_add(replay_offset?)),
        ranks: kv.dp_ranks,
        model: rule.key.model.clone(),
    }
}

/// What an endpoint's engine says that its rule contradicts, one sentence for each; empty before it was asked.
pub(super) fn contradictions(ours: &Ours, endpoint: &Endpoint) -> Vec<String> {
    let Some(facts) = endpoint.meters.facts().filter(|_| endpoint.kv.is_some()) else { return Vec::new() };
    discover::agree(ours, &facts).iter().map(sentence).collect()
}

/// Waits until every engine of a rule was asked once, for `limit` at most. Blocks.
pub(super) fn wait_for_first_answers(service: &Service, limit: Duration) {
    let deadline = clock::now() + limit;
    let asked = || asking(service).all(|(_, asking)| asking.meters.facts().is_some());
    while !asked() && clock::now() < deadline {
        std::thread::sleep(WAIT_STEP);
    }
}

fn sentence(row: &Row) -> String {
    let advice = row.advice.as_deref().map(|advice| format!("; {advice}")).unwrap_or_default();
    format!("{}: engine {}, rule {}{advice}", row.leg, row.engine, row.ours)
}

/// The preflight of a rule in force, by what its subscriptions have seen so far; all endpoints at the same time.
pub(super) async fn preflight(
    state: &Arc<State>,
    service: &Service,
    ours: impl Fn(&Endpoint) -> Ours,
    asker: &Asker,
) -> Report {
    let mut tasks = JoinSet::new();
    for (ep_idx, endpoint) in service.endpoints.iter().enumerate() {
        tasks.spawn(look(ep_idx, endpoint.clone(), Arc::clone(state), ours(endpoint), asker.clone()));
    }
    let mut looks = tasks.join_all().await;
    looks.sort_unstable_by_key(|look| look.ep_idx);
    discover::preflight(&looks)
}

async fn look(ep_idx: usize, endpoint: Endpoint, state: Arc<State>, ours: Ours, asker: Asker) -> Look {
    let place = &endpoint.spec.key;
    let heard = async {
        match &endpoint.kv {
            Some(kv) => Some(discover::heard(kv, place, ours.zmq_port).await),
            None => None,
        }
    };
    let (facts, heard) = tokio::join!(discover::read(&asker, place, true, ours.model.as_deref()), heard);
    let model = ours.model.clone().or_else(|| facts.base_models().next().map(|model| model.id.clone()));
    let tokens = our_tokens(&state, model.as_deref());
    Look { ep_idx, endpoint: place.to_string(), ours, facts, heard, tokens }
}

fn our_tokens(state: &State, model: Option<&str>) -> OurTokens {
    let Some(model) = model else { return Err("no model is known whose tokenizer could be staged".to_owned()) };
    match state.tokenizers.status(model) {
        Some(Staged::Ready(tokenizer)) => {
            let now = Some(tokenize::WallTime::from_seconds(clock::unix_seconds()));
            Ok(discover::our_tokens(&tokenizer, &tokenize::Limits { now, ..tokenize::Limits::default() }))
        }
        Some(Staged::Unusable(why)) => Err(why),
        None => Err(format!("the tokenizer of {model} is not loaded yet")),
    }
}

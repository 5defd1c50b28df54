//! One probe and one event subscription per endpoint, kept in step with the rules.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::crew::Crew;
use crate::fleet::{self, EndpointKey, ExactMode, Monitor, Rule, RuleId};
use crate::ingest::{self, ReplayPort, Subscription};
use crate::probe;
use crate::state::kv::EndpointKv;
use crate::state::{EndpointId, Meters, Service, State};
use crate::tokenize::ModelSlug;

/// How long an endpoint may be without its tasks.
const MISSING_AFTER: Duration = Duration::from_secs(5);

/// Which endpoint of which rule a task is for.
type Key = (RuleId, EndpointId);

/// What a probe depends on: when it changes, another one is started.
#[derive(Clone, Debug)]
struct Probing {
    place: EndpointKey,
    monitor: Monitor,
    meters: Arc<Meters>,
    tokenizes: bool,
}

impl PartialEq for Probing {
    fn eq(&self, other: &Self) -> bool {
        self.tokenizes == other.tokenizes
            && self.place == other.place
            && self.monitor == other.monitor
            && Arc::ptr_eq(&self.meters, &other.meters)
    }
}

/// What an event subscription depends on, likewise.
#[derive(Clone, Debug)]
struct Listening {
    place: EndpointKey,
    port: u16,
    replay: ReplayPort,
    kv: Arc<EndpointKv>,
}

impl PartialEq for Listening {
    fn eq(&self, other: &Self) -> bool {
        let plain = |l: &Self| (l.place.clone(), l.port, l.replay);
        plain(self) == plain(other) && Arc::ptr_eq(&self.kv, &other.kv)
    }
}

/// Follows the rules for ever.
pub(super) async fn keep_watching(state: Arc<State>, replay_offset: Option<u16>) {
    let http = reqwest::Client::new();
    let mut probes: Crew<Key, Probing> = Crew::default();
    let mut subscriptions: Crew<Key, Listening> = Crew::default();
    let mut rules = state.watch_rules();
    loop {
        rules.mark_unchanged();
        let table = state.table();
        table.services().iter().for_each(|service| want_tokenizer(&state, service.rule()));
        probes.update(table.services().iter().flat_map(|service| probing(service)), |key, probing| {
            let target = probe::Target {
                label: format!("{}/{}", key.0, probing.place),
                key: probing.place.clone(),
                monitor: probing.monitor.clone(),
                meters: Arc::clone(&probing.meters),
                tokenizes: probing.tokenizes,
            };
            tokio::spawn(probe::watch(target, Arc::clone(&state), http.clone()))
        });
        let wanted = table.services().iter().flat_map(|service| listening(service, replay_offset));
        subscriptions.update(wanted, |key, listening| tokio::spawn(listen(*key, listening.clone())));
        drop(table);
        // Looked at now and then also without a change: a task that a panic of ours ended is missing, and starts again.
        if let Ok(Err(_closed)) = timeout(MISSING_AFTER, rules.changed()).await {
            return;
        }
    }
}

fn probing(service: &Service) -> impl Iterator<Item = (Key, Probing)> {
    let rule = service.rule();
    service.endpoints.iter().map(move |endpoint| {
        let probing = Probing {
            place: endpoint.spec.key.clone(),
            monitor: rule.monitor_of(&endpoint.spec).clone(),
            meters: Arc::clone(&endpoint.meters),
            tokenizes: rule.kv.mode != ExactMode::Off,
        };
        ((rule.id, endpoint.meters.id), probing)
    })
}

fn listening(service: &Service, replay_offset: Option<u16>) -> impl Iterator<Item = (Key, Listening)> {
    let rule = service.rule();
    let replay = move |endpoint: &fleet::Endpoint| match (rule.replay_port(endpoint), replay_offset) {
        (Some(port), _) => ReplayPort::Port(port),
        (None, Some(offset)) => ReplayPort::Offset(offset),
        (None, None) => ReplayPort::Off,
    };
    service.endpoints.iter().filter_map(move |endpoint| {
        let spec = &endpoint.spec;
        let listening = Listening {
            place: spec.key.clone(),
            port: rule.event_port(spec),
            replay: replay(spec),
            kv: endpoint.kv.clone()?,
        };
        Some(((rule.id, endpoint.meters.id), listening))
    })
}

async fn listen(key: Key, listening: Listening) {
    let Listening { place, port, replay, kv } = listening;
    let subscription = Subscription {
        label: format!("{}/{place}", key.0),
        http: Some(place.to_string()),
        host: place.host,
        port,
        replay,
    };
    // The crew ends the task; nobody else tells it to stop.
    let (_never, stop) = watch::channel(false);
    ingest::follow(subscription, kv, stop).await;
}

/// A rule for one model needs its tokenizer before the first request comes.
fn want_tokenizer(state: &State, rule: &Rule) {
    if let Some(model) = &rule.key.model
        && state.tokenizers.status(model).is_none()
    {
        state.tokenizers.want(ModelSlug::from(model.as_str()));
    }
}

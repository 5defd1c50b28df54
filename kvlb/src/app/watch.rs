//! One probe and one event subscription per endpoint, kept in step with the rules.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::crew::Crew;
use crate::fleet::{EndpointKey, ExactMode, Monitor, Rule, RuleId};
use crate::ingest::{self, ReplayPort, Subscription};
use crate::probe;
use crate::state::kv::{EndpointKv, RANKS_MAX};
use crate::state::{Endpoint, EndpointId, Meters, Service, State};
use crate::tokenize::ModelSlug;

/// How long an endpoint may be without its tasks.
const MISSING_AFTER: Duration = Duration::from_secs(5);

/// Which rank of which endpoint of which rule a task is for.
type Key = (RuleId, EndpointId, u16);

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

/// What an event subscription depends on, likewise, and where the replay socket is: it learns that while it runs.
#[derive(Clone, Debug)]
struct Listening {
    place: EndpointKey,
    feed: usize,
    port: u16,
    replay: ReplayPort,
    kv: Arc<EndpointKv>,
}

impl PartialEq for Listening {
    fn eq(&self, other: &Self) -> bool {
        let plain = |l: &Self| (l.place.clone(), l.feed, l.port);
        plain(self) == plain(other) && Arc::ptr_eq(&self.kv, &other.kv)
    }
}

/// Follows the rules for ever.
pub(super) async fn keep_watching(state: Arc<State>, asker: probe::Asker, replay_offset: Option<u16>) {
    let mut probes: Crew<Key, Probing> = Crew::default();
    let mut subscriptions: Crew<Key, Listening> = Crew::default();
    let mut replays: BTreeMap<Key, watch::Sender<ReplayPort>> = BTreeMap::new();
    let (mut rules, mut facts) = (state.watch_rules(), state.watch_facts());
    loop {
        rules.mark_unchanged();
        facts.mark_unchanged();
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
            tokio::spawn(probe::watch(target, Arc::clone(&state), asker.clone()))
        });
        let wanted = || table.services().iter().flat_map(|service| listening(service, replay_offset));
        replays = wanted().map(|(key, listening)| (key, moved(replays.remove(&key), listening.replay))).collect();
        subscriptions
            .update(wanted(), |key, listening| tokio::spawn(listen(*key, listening.clone(), replays[key].subscribe())));
        drop(table);
        // Looked at now and then also without a change: a task that a panic of ours ended is missing, and starts again.
        let changed = async {
            tokio::select! {
                changed = rules.changed() => changed,
                changed = facts.changed() => changed,
            }
        };
        if let Ok(Err(_closed)) = timeout(MISSING_AFTER, changed).await {
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
        ((rule.id, endpoint.meters.id, 0), probing)
    })
}

/// The event streams of a rule's endpoints: one for each data-parallel rank.
fn listening(service: &Service, replay_offset: Option<u16>) -> impl Iterator<Item = (Key, Listening)> {
    service.endpoints.iter().flat_map(move |endpoint| of_endpoint(service.rule(), endpoint, replay_offset))
}

/// Rank n publishes where the engine says, else at the rule's port plus n.
///
/// Source: vLLM's `ZmqEventPublisher` adds the rank to both of its ports.
fn of_endpoint(rule: &Rule, endpoint: &Endpoint, replay_offset: Option<u16>) -> Vec<(Key, Listening)> {
    let Some(kv) = &endpoint.kv else { return Vec::new() };
    let (event_port, replay_port) = (rule.event_port(&endpoint.spec), rule.replay_port(&endpoint.spec));
    let facts = endpoint.meters.facts();
    let said = facts.as_ref().and_then(|facts| facts.sources.known());
    // An engine that publishes elsewhere than the rule says is another one, or seen through another address.
    let source = |rank: u16| {
        let source = said?.get(&rank.into())?;
        (source.port() == event_port.checked_add(rank)).then_some(source)
    };
    let ranks =
        rule.kv.dp_ranks.map_or_else(|| facts.as_ref().and_then(|facts| facts.ranks()).unwrap_or(1), usize::from);
    let ranks = ranks.clamp(1, RANKS_MAX);
    kv.keep_feeds(ranks);
    let stream = |rank: u16| {
        let port = event_port.checked_add(rank)?;
        let replay = match (replay_port, source(rank), replay_offset) {
            (Some(port), _, _) => port.checked_add(rank).map_or(ReplayPort::Off, ReplayPort::Port),
            (None, _, None | Some(0)) => ReplayPort::Off,
            (None, Some(source), Some(_)) => source.replay_port().map_or(ReplayPort::Absent, ReplayPort::Port),
            (None, None, Some(offset)) => port.checked_add(offset).map_or(ReplayPort::Off, ReplayPort::Port),
        };
        let place = endpoint.spec.key.clone();
        let listening = Listening { place, feed: usize::from(rank), port, replay, kv: Arc::clone(kv) };
        Some(((rule.id, endpoint.meters.id, rank), listening))
    };
    (0..u16::try_from(ranks).unwrap_or(1)).filter_map(stream).collect()
}

/// Tells a subscription where the replay socket is, if it is elsewhere now.
fn moved(known: Option<watch::Sender<ReplayPort>>, replay: ReplayPort) -> watch::Sender<ReplayPort> {
    let known = known.unwrap_or_else(|| watch::Sender::new(replay));
    known.send_if_modified(|known| std::mem::replace(known, replay) != replay);
    known
}

async fn listen(key: Key, listening: Listening, replay: watch::Receiver<ReplayPort>) {
    let Listening { place, feed, port, replay: _, kv } = listening;
    let rank = if feed > 0 { format!(" rank {feed}") } else { String::new() };
    let subscription = Subscription {
        label: format!("{}/{place}{rank}", key.0),
        feed,
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

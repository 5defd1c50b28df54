//! One subscription and one probe per endpoint, kept in step with the rules.

use std::sync::Arc;

use crate::fleet::{Endpoint as Spec, Monitor, Rule, RuleId};
use crate::state::{Endpoint, Service, State};
use crate::{ingest, probe};

use super::crew::Crew;

/// Which endpoint of which rule a task is for.
type Key = (RuleId, crate::state::EndpointId);

/// What an event subscription depends on: when it changes, another one is made.
#[derive(Clone, Debug, PartialEq)]
struct Listening {
    host: String,
    http_port: u16,
    events_port: u16,
    replay: ingest::ReplayPort,
    kv: usize,
}

/// Follows the rules for ever.
pub(super) async fn keep_watching(state: Arc<State>, replay_offset: Option<u16>) {
    let http = reqwest::Client::new();
    let mut probes: Crew<Key, (Spec, Monitor)> = Crew::default();
    let mut subscriptions: Crew<Key, Listening> = Crew::default();
    let mut rules = state.watch_rules();
    loop {
        rules.mark_unchanged();
        let table = state.table();
        for service in table.services() {
            want_tokenizer(&state, service.rule());
        }
        let all: Vec<_> = table.services().iter().flat_map(endpoints).collect();
        probes.update(all.iter().map(|(key, service, endpoint)| (*key, probing(service.rule(), endpoint))), |key, what| {
            let endpoint = find(&all, *key);
            let target = probe::Target {
                label: format!("{}/{}", key.0, what.0.key),
                key: what.0.key.clone(),
                monitor: what.1.clone(),
                meters: Arc::clone(&endpoint.meters),
            };
            tokio::spawn(probe::watch(target, Arc::clone(&state), http.clone()))
        });
        let listening = all.iter().filter_map(|(key, service, endpoint)| {
            Some((*key, listening(service.rule(), endpoint, replay_offset)?))
        });
        subscriptions.update(listening, |key, what| {
            let endpoint = find(&all, *key);
            let subscription = ingest::Subscription {
                label: format!("{}/{}", key.0, endpoint.spec.key),
                host: what.host.clone(),
                port: what.events_port,
                replay: what.replay,
                http_port: what.http_port,
            };
            tokio::spawn(ingest::follow(subscription, endpoint.kv.clone(), Arc::clone(&endpoint.meters), http.clone()))
        });
        if rules.changed().await.is_err() {
            return;
        }
    }
}

fn endpoints(service: &Arc<Service>) -> Vec<(Key, Arc<Service>, Endpoint)> {
    let one = |endpoint: &Endpoint| ((service.rule().id, endpoint.meters.id), Arc::clone(service), endpoint.clone());
    service.endpoints.iter().map(one).collect()
}

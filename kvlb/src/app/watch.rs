//! One probe and one event subscription per endpoint, kept in step with the rules.

use std::sync::Arc;

use super::crew::Crew;
use crate::fleet::{EndpointKey, Monitor, Rule, RuleId};
use crate::probe;
use crate::state::{Endpoint, EndpointId, Service, State};
use crate::tokenize::ModelSlug;

/// Which endpoint of which rule a task is for.
type Key = (RuleId, EndpointId);

/// What a probe depends on: when it changes, another one is started.
type Probing = (EndpointKey, Monitor);

/// Follows the rules for ever.
pub(super) async fn keep_watching(state: Arc<State>, replay_offset: Option<u16>) {
    let http = reqwest::Client::new();
    let mut probes: Crew<Key, Probing> = Crew::default();
    let mut rules = state.watch_rules();
    loop {
        rules.mark_unchanged();
        let table = state.table();
        let watched: Vec<_> = table.services().iter().flat_map(|service| watched(service)).collect();
        table.services().iter().for_each(|service| want_tokenizer(&state, service.rule()));
        for (key, endpoint, probing) in &watched {
            let _ = (key, endpoint, probing);
        }
        probes.update(watched.iter().map(|(key, _, probing)| (*key, probing.clone())), |key, (place, monitor)| {
            let meters = Arc::clone(&endpoint_of(&watched, key).meters);
            let target = probe::Target {
                label: format!("{}/{place}", key.0),
                key: place.clone(),
                monitor: monitor.clone(),
                meters,
            };
            tokio::spawn(probe::watch(target, Arc::clone(&state), http.clone()))
        });
        if rules.changed().await.is_err() {
            return;
        }
    }
}

fn watched(service: &Arc<Service>) -> Vec<(Key, Endpoint, Probing)> {
    let rule = service.rule();
    let one = |endpoint: &Endpoint| {
        let probing = (endpoint.spec.key.clone(), rule.monitor_of(&endpoint.spec).clone());
        ((rule.id, endpoint.meters.id), endpoint.clone(), probing)
    };
    service.endpoints.iter().map(one).collect()
}

/// The endpoint of a task that is being started; tasks are only started for those in the list.
fn endpoint_of<'a>(watched: &'a [(Key, Endpoint, Probing)], key: &Key) -> &'a Endpoint {
    let found = watched.iter().find(|(known, _, _)| known == key);
    found.map(|(_, endpoint, _)| endpoint).unwrap_or(&watched[0].1)
}

/// A rule for one model needs its tokenizer before the first request comes.
fn want_tokenizer(state: &State, rule: &Rule) {
    if let Some(model) = &rule.key.model
        && state.tokenizers.status(model).is_none()
    {
        state.tokenizers.want(ModelSlug::from(model.as_str()));
    }
}

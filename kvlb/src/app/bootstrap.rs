//! What prefill endpoints tell of themselves for handoffs that need it: asked for in the background, for no request to wait.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::crew::Crew;
use crate::discover::{self, Asker};
use crate::fleet::{EndpointKey, Role, RuleId};
use crate::state::{EndpointId, Meters, Service, State};

/// How often an engine is asked: one that has started anew has another id, and every transfer fails until we know it.
const ASK_EVERY: Duration = Duration::from_secs(2);
/// Times in a row that one does not answer before what it told is forgotten.
const MISSES_MAX: u32 = 3;
/// How long an endpoint may be without its task.
const MISSING_AFTER: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
struct Asking {
    place: EndpointKey,
    meters: Arc<Meters>,
}

impl PartialEq for Asking {
    fn eq(&self, other: &Self) -> bool {
        self.place == other.place && Arc::ptr_eq(&self.meters, &other.meters)
    }
}

/// Follows the rules for ever.
pub(super) async fn keep_asking(state: Arc<State>, asker: Asker) {
    let mut crew: Crew<(RuleId, EndpointId), Asking> = Crew::default();
    let mut rules = state.watch_rules();
    loop {
        rules.mark_unchanged();
        let table = state.table();
        crew.update(table.services().iter().flat_map(|service| asking(service)), |_, asking| {
            tokio::spawn(ask(asking.clone(), asker.clone()))
        });
        drop(table);
        if let Ok(Err(_closed)) = timeout(MISSING_AFTER, rules.changed()).await {
            return;
        }
    }
}

/// The prefill endpoints of rules whose handoff needs to know them.
fn asking(service: &Service) -> impl Iterator<Item = ((RuleId, EndpointId), Asking)> {
    let rule = service.rule();
    let needed = rule.is_split() && rule.split.handoff.handoff().needs_bootstrap();
    let prefill = service.endpoints.iter().filter(move |endpoint| needed && endpoint.spec.role == Role::Prefill);
    prefill.map(move |endpoint| {
        let place = EndpointKey { host: endpoint.spec.key.host.clone(), port: rule.split.bootstrap_port };
        ((rule.id, endpoint.meters.id), Asking { place, meters: Arc::clone(&endpoint.meters) })
    })
}

async fn ask(Asking { place, meters }: Asking, asker: Asker) {
    let mut misses = 0;
    loop {
        match discover::bootstrap(&asker, &place).await {
            Ok(told) => {
                misses = 0;
                meters.set_bootstrap(Some(told));
            }
            Err(why) => {
                misses += 1;
                tracing::debug!(endpoint = %place, %why, "the prefill endpoint's bootstrap server does not answer");
                if misses == MISSES_MAX {
                    tracing::warn!(endpoint = %place, %why, "the prefill endpoint's bootstrap server is gone");
                    meters.set_bootstrap(None);
                }
            }
        }
        sleep(ASK_EVERY).await;
    }
}

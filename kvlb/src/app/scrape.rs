//! Every engine's metrics, looked at now and then: how long its queue is, and how full its cache.
//!
//! One look at a time for each engine, however many rules it is in. No request waits for one.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

use super::crew::Crew;
use crate::clock;
use crate::discover::{self, Asker};
use crate::fleet::{Dialect, EndpointKey, EngineType, ExactMode, Missing, Rule};
use crate::state::{Meters, STALE_AFTER, ScrapeFailure, State, Table};

/// How long an engine may be without its task.
const MISSING_AFTER: Duration = Duration::from_secs(5);
/// First looks are spread over this time, so that a rule with many engines does not ask all of them at once.
const SPREAD: Duration = Duration::from_millis(300);

/// One engine to look at, and whoever wants to know.
#[derive(Clone, Debug)]
struct Looking {
    place: EndpointKey,
    usual: Dialect,
    for_whom: Vec<Arc<Meters>>,
}

impl PartialEq for Looking {
    fn eq(&self, other: &Self) -> bool {
        let same = |(a, b): (&Arc<Meters>, &Arc<Meters>)| Arc::ptr_eq(a, b);
        self.usual == other.usual
            && self.for_whom.len() == other.for_whom.len()
            && self.for_whom.iter().zip(&other.for_whom).all(same)
    }
}

/// Follows the rules for ever.
pub(super) async fn keep_scraping(state: Arc<State>, asker: Asker, every: Duration) {
    let mut crew: Crew<EndpointKey, Looking> = Crew::default();
    let mut rules = state.watch_rules();
    loop {
        rules.mark_unchanged();
        crew.update(engines(&state.table()), |_, looking| tokio::spawn(look(looking.clone(), asker.clone(), every)));
        if let Ok(Err(_closed)) = timeout(MISSING_AFTER, rules.changed()).await {
            return;
        }
    }
}

/// The engines of all rules for which it matters, each once.
fn engines(table: &Table) -> BTreeMap<EndpointKey, Looking> {
    let mut engines: BTreeMap<EndpointKey, Looking> = BTreeMap::new();
    for service in table.services().iter().filter(|service| matters(service.rule())) {
        let usual = Dialect::of(service.rule().kv.engine);
        for endpoint in &service.endpoints {
            let place = endpoint.spec.key.clone();
            let looking =
                engines.entry(place.clone()).or_insert_with(|| Looking { place, usual, for_whom: Vec::new() });
            looking.for_whom.push(Arc::clone(&endpoint.meters));
        }
    }
    engines
}

/// Rules that say that their endpoints are engines: what stands behind another may have no metrics at all.
fn matters(rule: &Rule) -> bool {
    rule.kv.mode != ExactMode::Off || rule.kv.engine == EngineType::LlamaCpp
}

/// Looks at one engine for ever.
async fn look(looking: Looking, asker: Asker, every: Duration) {
    sleep(SPREAD * chance(100) / 100).await;
    // A task that follows another one knows when that heard of the engine last.
    let mut heard = looking.for_whom.iter().filter_map(|meters| meters.vitals.last()).map(|last| last.0).max();
    loop {
        let began = clock::now();
        let seen = before(heard, &looking, discover::scrape(&asker, &looking.place, looking.usual)).await;
        heard = tell(&looking, seen).or(heard);
        // A tenth sooner or later, so that many of us do not ask together.
        let pause = (every * (90 + chance(21)) / 100).saturating_sub(clock::now().saturating_duration_since(began));
        before(heard, &looking, sleep(pause)).await;
    }
}

/// Waits for `task`, and takes back what was said at `heard` when that is too long ago.
async fn before<F: Future>(heard: Option<Instant>, looking: &Looking, task: F) -> F::Output {
    let mut task = std::pin::pin!(task);
    if let Some(heard) = heard {
        let left = (heard + STALE_AFTER).saturating_duration_since(clock::now());
        tokio::select! {
            biased;
            output = &mut task => return output,
            () = sleep(left) => looking.for_whom.iter().for_each(|meters| meters.vitals.expire()),
        }
    }
    task.await
}

/// Tells everybody of a look, and gives the time of one that came to something.
fn tell(looking: &Looking, seen: Result<crate::fleet::Readings, Missing>) -> Option<Instant> {
    let now = clock::now();
    match seen {
        Ok(readings) => {
            let nothing = readings.is_unknown();
            for meters in &looking.for_whom {
                if nothing {
                    meters.vitals.failed(ScrapeFailure::Unknown);
                }
                meters.vitals.learn(readings.clone(), now);
            }
            Some(now)
        }
        Err(why) => {
            tracing::debug!(endpoint = %looking.place, %why, "no metrics of the engine");
            looking.for_whom.iter().for_each(|meters| meters.vitals.failed(failure(&why)));
            None
        }
    }
}

fn failure(why: &Missing) -> ScrapeFailure {
    match why {
        Missing::NotAsked | Missing::Unreachable(_) => ScrapeFailure::Unreachable,
        Missing::Status(_) => ScrapeFailure::Status,
        Missing::Unreadable(_) => ScrapeFailure::Unreadable,
    }
}

/// A number below `bound`.
fn chance(bound: u32) -> u32 {
    u32::try_from(RandomState::new().hash_one(0) % u64::from(bound)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Readings;
    use crate::state::EndpointId;

    fn looking() -> Looking {
        let place = EndpointKey { host: "192.0.2.1".to_owned(), port: 8000 };
        let meters = || Arc::new(Meters::new(EndpointId(1)));
        Looking { place, usual: Dialect::Vllm, for_whom: vec![meters(), meters()] }
    }

    fn said(waiting: u32) -> Readings {
        Readings { waiting: Some(waiting), ..Readings::unknown(Dialect::Vllm) }
    }

    #[test]
    fn an_engine_in_two_rules_is_looked_at_once_and_both_are_told() {
        let looking = looking();
        assert!(tell(&looking, Ok(said(3))).is_some());
        assert!(looking.for_whom.iter().all(|meters| meters.vitals.queued() == Some(3)));
        assert!(tell(&looking, Err(Missing::Status(404))).is_none());
        assert!(looking.for_whom.iter().all(|meters| meters.vitals.queued() == Some(3)), "it is known for a while");
    }

    #[tokio::test]
    async fn what_was_said_is_taken_back_while_a_look_still_waits() {
        let looking = looking();
        let heard = tell(&looking, Ok(said(3)));
        before(heard, &looking, sleep(Duration::from_millis(30))).await;
        assert_eq!(looking.for_whom[0].vitals.queued(), Some(3));
        let long_ago = heard.and_then(|heard| heard.checked_sub(STALE_AFTER));
        before(long_ago, &looking, sleep(Duration::from_millis(30))).await;
        assert_eq!(looking.for_whom[0].vitals.queued(), None);
    }
}

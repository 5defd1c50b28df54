//! What goes wrong, and when.

use std::time::Duration;

use super::figures::{float, small};
use super::workload::Workload;
use crate::engine::chance::Chance;

/// How long a batch is on its way.
const ON_ITS_WAY: Duration = Duration::from_millis(1);

/// Something that befalls an endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Change {
    /// Its engine dies: what it holds and what runs there is gone, and connects are refused.
    Dies,
    /// The probe has noticed.
    ProbedDown,
    /// A new life of its engine begins, with an empty cache and new numbers.
    Lives,
    /// Its steps take so many times as long.
    Slows(f64),
    /// It takes no new request.
    Drains,
    /// It takes requests again, or for the first time.
    Serves,
}

/// What goes wrong in a run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    /// The share of batches that are lost.
    pub(super) lost: f64,
    /// The share of removals that are lost without a gap.
    pub(super) lost_removals: f64,
    /// Whether what was lost can be had again.
    pub(super) replays: bool,
    /// Until when nobody listens to events.
    pub(super) joins: Duration,
    /// How long a batch is on its way.
    pub(super) delay: Duration,
    /// What happens, to which endpoint, when.
    pub(super) changes: Vec<(Duration, usize, Change)>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            lost: 0.0,
            lost_removals: 0.0,
            replays: false,
            joins: Duration::ZERO,
            delay: ON_ITS_WAY,
            changes: Vec::new(),
        }
    }
}

/// A plan by its name.
pub(super) struct Entry {
    /// Its name.
    pub(super) name: &'static str,
    /// What it is.
    pub(super) about: &'static str,
    make: fn(&Workload) -> Plan,
}

impl Entry {
    /// The plan for a workload.
    pub(super) fn plan(&self, workload: &Workload) -> Plan {
        let mut plan = (self.make)(workload);
        if workload.restarts {
            plan.changes.extend(
                (0..workload.engines).flat_map(|at| death(at, workload.length() / 2, Duration::from_millis(100))),
            );
        }
        plan
    }
}

/// Every plan.
pub(super) const ALL: &[Entry] = &[
    Entry { name: "none", about: "nothing goes wrong", make: |_| Plan::default() },
    Entry {
        name: "lost-events",
        about: "a tenth of all batches of events is lost and cannot be replayed",
        make: |_| Plan { lost: 0.1, ..Plan::default() },
    },
    Entry {
        name: "replayed-events",
        about: "a tenth is lost and replayed",
        make: |_| Plan { lost: 0.1, replays: true, ..Plan::default() },
    },
    Entry {
        name: "lost-removals",
        about: "half of all removals are never told",
        make: |_| Plan { lost_removals: 0.5, ..Plan::default() },
    },
    Entry {
        name: "late-events",
        about: "events are under way for two seconds",
        make: |_| Plan { delay: Duration::from_secs(2), ..Plan::default() },
    },
    Entry {
        name: "late-join",
        about: "kvlb hears events from the middle on, without a replay",
        make: |workload| Plan { joins: workload.length() / 2, ..Plan::default() },
    },
    Entry {
        name: "restart",
        about: "endpoint 0 dies in the middle and is back, empty, after five seconds",
        make: |workload| Plan {
            changes: death(0, workload.length() / 2, Duration::from_secs(5)).to_vec(),
            ..Plan::default()
        },
    },
    Entry {
        name: "slow",
        about: "endpoint 0 takes four times as long from a quarter on",
        make: |workload| Plan { changes: vec![(workload.length() / 4, 0, Change::Slows(4.0))], ..Plan::default() },
    },
    Entry {
        name: "added",
        about: "one more endpoint from the middle on",
        make: |workload| Plan {
            changes: vec![(workload.length() / 2, workload.engines, Change::Serves)],
            ..Plan::default()
        },
    },
    Entry {
        name: "drained",
        about: "endpoint 0 takes no new requests from the middle on",
        make: |workload| Plan { changes: vec![(workload.length() / 2, 0, Change::Drains)], ..Plan::default() },
    },
];

/// An engine dies, its probe notices after a second, and it lives again.
fn death(endpoint: usize, at: Duration, dead: Duration) -> [(Duration, usize, Change); 3] {
    let noticed = at + Duration::from_secs(1).min(dead / 2);
    [(at, endpoint, Change::Dies), (noticed, endpoint, Change::ProbedDown), (at + dead, endpoint, Change::Lives)]
}

/// Anything that may go wrong, by chance.
pub(super) fn random(seed: u64, workload: &Workload) -> Plan {
    let mut chance = Chance::new(Chance::seed_of("fault", &[seed]));
    let within = |chance: &mut Chance| workload.length().mul_f64(chance.unit());
    let mut plan = Plan::default();
    if chance.happens(0.4) {
        plan.lost = chance.unit() / 2.0;
    }
    if chance.happens(0.3) {
        plan.lost_removals = chance.unit();
    }
    if chance.happens(0.3) {
        plan.joins = within(&mut chance);
    }
    if chance.happens(0.3) {
        plan.delay = Duration::from_millis(500).mul_f64(chance.unit());
    }
    plan.replays = chance.happens(0.5);
    for _ in 0..chance.below(4) {
        let (endpoint, at) = (chance.below(workload.engines), within(&mut chance));
        match chance.below(4) {
            0 => plan.changes.extend(death(
                endpoint,
                at,
                Duration::from_millis(200 + 1000 * u64::from(small(chance.below(3)))),
            )),
            1 => plan.changes.push((at, endpoint, Change::Slows(1.0 + float(chance.below(8))))),
            2 => {
                plan.changes.push((at, endpoint, Change::Drains));
                plan.changes.push((at + within(&mut chance), endpoint, Change::Serves));
            }
            _ => plan.changes.push((at, workload.engines, Change::Serves)),
        }
    }
    plan.changes.sort_by_key(|change| change.0);
    plan
}

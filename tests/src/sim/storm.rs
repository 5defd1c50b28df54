//! One small run in which anything may go wrong, for many seeds.

use anyhow::{Result, ensure};

use super::planted::Planted;
use super::policy::{self, Policy};
use super::{fault, workload, world};

/// Runs one seed: its own requests, faults and policy. Gives the number of requests that were answered.
///
/// # Errors
/// What must not be: an excluded endpoint was chosen, a load did not return to zero, a request starved, or what kvlb believes
/// of a cache is not so although it was told everything.
pub fn storm(seed: u64) -> Result<usize> {
    storm_with(seed, None)
}

/// The same with a mistake in it.
///
/// # Errors
/// As [`storm`]: what the mistake led to.
pub fn storm_with(seed: u64, planted: Option<Planted>) -> Result<usize> {
    let ours: Vec<&Policy> = policy::ALL.iter().filter(|policy| policy.is_ours() && policy.is_there()).collect();
    let all = ours.len() + policy::ALL.iter().filter(|policy| !policy.is_ours()).count();
    let turn = usize::try_from(seed).unwrap_or_default();
    // Three of four seeds are kvlb's own.
    let policy = if turn % 4 < 3 {
        ours[turn % ours.len()]
    } else {
        &policy::ALL[policy::ALL.len() - 1 - turn / 4 % (all - ours.len())]
    };
    let workload = workload::scrap(seed);
    let plan = fault::random(seed, &workload);
    let run = world::run(&workload, policy, &plan, seed, planted)?;
    ensure!(run.breaches.is_empty(), "seed {seed}, policy {}, {plan:?}: {}", policy.name, run.breaches.join("; "));
    Ok(run.records.iter().filter(|record| record.done.is_some()).count())
}

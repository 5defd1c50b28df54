//! Many small runs in virtual time in which anything may go wrong: an excluded endpoint is never chosen, loads return to zero, and
//! nobody starves. `cargo xtask sim --storm 1 --seed N` runs one of them again.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvlb_tests::sim::{Planted, storm, storm_with};

#[test]
fn nothing_that_must_not_be_is_in_256_seeds() {
    let outcomes: Vec<_> = (0..256).map(|seed| storm(seed).map_err(|error| format!("{error:#}"))).collect();
    let bad: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert!(bad.is_empty(), "{} seeds went wrong, the first: {}", bad.len(), bad[0]);
    let answered: usize = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).sum();
    assert!(answered > 25_000, "too little to prove anything: {answered} requests were answered");
}

#[test]
fn a_seed_is_the_same_run_again() {
    assert_eq!(storm(7).unwrap(), storm(7).unwrap());
}

#[test]
fn every_planted_mistake_is_found_and_called_by_its_name() {
    for planted in Planted::ALL {
        let word = match planted {
            Planted::AsksAnybody => "which is excluded",
            Planted::Forgets => "starved",
            Planted::KeepsLoads => "loads are not back at zero",
            Planted::BelievesForEver => "is believed to hold",
        };
        let outcomes: Vec<_> = (0..64).map(|seed| storm_with(seed, Some(planted))).collect();
        let found = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).map(|error| format!("{error:#}"));
        let named = found.filter(|breach| breach.contains(word)).count();
        assert!(named > 16, "{planted:?} is found by {named} of 64 seeds");
    }
}

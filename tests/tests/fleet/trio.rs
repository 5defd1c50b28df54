//! Three engines behind one rule: who owns which prompt, what they were asked, and when all is over.

use std::collections::BTreeMap;

use kvlb_tests::engine::Seen;
use kvlb_tests::harness::eventually;
use serde_json::{Value, json};

use super::{BLOCK, Fleet, PATH, SOON, Setup, quick};

/// Three engines; neither load nor a cold cache moves a request away from an overlap, nor does a breaker unless the rule asks for one.
pub(crate) async fn three(rule: Value) -> Fleet {
    three_told(rule, Vec::new()).await
}

/// The same with flags of `kvlb up`.
pub(crate) async fn three_told(rule: Value, args: Vec<&'static str>) -> Fleet {
    let mut rule = rule;
    rule["kvLoadFloor"] = json!(100_000);
    rule["kvColdStartSeedN"] = json!(0);
    if rule["cb_enable"].is_null() {
        rule["cb_enable"] = json!(false);
    }
    let engines = ["a", "b", "c"].map(quick).to_vec();
    Fleet::start(Setup { engines, rule, args, ..Setup::default() }).await.unwrap()
}

/// Eight blocks that no other number shares.
pub(crate) fn prompt(number: u32) -> Vec<u32> {
    (0..8 * 16).map(|at| number * 1000 + at).collect()
}

/// Makes engine 0 the owner of a prompt, engine 1 the second best, and engine 2 the third.
pub(crate) async fn own(fleet: &Fleet, number: u32) {
    let prompt = prompt(number);
    for (engine, blocks) in [(0, 8), (1, 5), (2, 2)] {
        fleet.warm(engine, &prompt[..blocks * BLOCK]).await.unwrap();
    }
}

/// Every request that any engine saw under an id, in the order of engines.
pub(crate) fn journal(fleet: &Fleet) -> BTreeMap<String, Vec<(usize, Seen)>> {
    let mut journal: BTreeMap<String, Vec<(usize, Seen)>> = BTreeMap::new();
    for (number, engine) in fleet.engines.iter().enumerate() {
        for seen in engine.requests() {
            if let Some(id) = seen.header("x-request-id") {
                journal.entry(id.to_owned()).or_default().push((number, seen.clone()));
            }
        }
    }
    journal
}

/// The completions that an engine saw; kvlb asks it for its models and metrics too.
pub(crate) fn completions(fleet: &Fleet, number: usize) -> Vec<Seen> {
    fleet.engines[number].requests().into_iter().filter(|seen| seen.path == PATH).collect()
}

/// Waits until nothing is in flight anywhere: not in kvlb's count, not in any engine's.
pub(crate) async fn all_quiet(fleet: &Fleet) {
    eventually(SOON, "load returns to zero", async || {
        let in_kvlb = fleet.sum("kvlb_endpoint_load").await.unwrap_or(1);
        let busy = fleet.engines.iter().any(|engine| engine.counters().running > 0 || engine.running() > 0);
        in_kvlb == 0 && !busy
    })
    .await
    .unwrap();
    assert_eq!(fleet.sum("kvlb_panics_total").await.unwrap(), 0);
}

//! What has to be equal among the endpoints of one rule.

use std::collections::{BTreeMap, BTreeSet};

use super::preflight::Look;
use super::report::{Row, Verdict};
use crate::contract::KeyEra;
use crate::fleet::Fact;

/// The pool's rows, over the endpoints that answered.
pub(super) fn rows(looks: &[Look]) -> Vec<Row> {
    let reached: Vec<&Look> = looks.iter().filter(|look| look.facts.unreachable().is_none()).collect();
    if reached.is_empty() {
        return Vec::new();
    }
    let version = |look: &Look| look.facts.version.known().map(|version| version.text.clone());
    vec![
        equal("pool_version", &reached, version, "run one version in a pool: how blocks are named changes with it"),
        equal("pool_max_model_len", &reached, model_len, "start all engines with the same --max-model-len"),
        adapters(&reached),
    ]
}

/// The length of the first base model, by which an engine refuses prompts.
fn model_len(look: &Look) -> Option<String> {
    look.facts.base_models().next()?.max_model_len.map(|len| len.to_string())
}

fn equal(leg: &'static str, looks: &[&Look], value: impl Fn(&Look) -> Option<String>, advice: &str) -> Row {
    let mut by_value: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut silent = Vec::new();
    for look in looks {
        match value(look) {
            Some(value) => by_value.entry(value).or_default().push(&look.endpoint),
            None => silent.push(look.endpoint.as_str()),
        }
    }
    let shown: Vec<_> = match by_value.len() {
        1 => by_value.keys().cloned().collect(),
        _ => by_value.iter().map(|(value, who)| format!("{value}: {}", who.join(", "))).collect(),
    };
    let shown = shown.join("; ");
    if by_value.len() > 1 {
        return Row::new(leg, Verdict::Broken, shown, "equal").advise(advice);
    }
    if silent.is_empty() {
        return Row::new(leg, Verdict::Ok, shown, "equal");
    }
    Row::new(leg, Verdict::Unknown, format!("{} does not say", silent.join(", ")), "equal").advise(advice)
}

/// An adapter's name is hashed, and from vLLM 0.31 on its path at the engine too.
fn adapters(looks: &[&Look]) -> Row {
    let mut paths: BTreeMap<&str, BTreeMap<Option<&str>, Vec<&str>>> = BTreeMap::new();
    for look in looks {
        for adapter in look.facts.adapters() {
            let path = paths.entry(&adapter.id).or_default();
            path.entry(adapter.root.as_deref()).or_default().push(&look.endpoint);
        }
    }
    let told: Vec<_> = looks.iter().filter(|look| matches!(look.facts.models, Fact::Known(_))).collect();
    if told.len() < looks.len() {
        return Row::new("pool_lora", Verdict::Unknown, "an endpoint does not list its models", "equal")
            .advise("give the engines' --api-key with --engine-key");
    }
    let names = paths.keys().copied().collect::<Vec<_>>().join(", ");
    let absent = paths.iter().find(|(_, at)| at.values().flatten().collect::<BTreeSet<_>>().len() < looks.len());
    if let Some((name, at)) = absent {
        let who = at.values().flatten().copied().collect::<Vec<_>>().join(", ");
        return Row::new("pool_lora", Verdict::Broken, format!("{name}: only {who}"), "equal")
            .advise("load the adapter in every engine of the pool: any of them may be chosen for it");
    }
    let Some((name, at)) = paths.iter().find(|(_, at)| at.len() > 1) else {
        let shown = if names.is_empty() { "none".to_owned() } else { names };
        return Row::new("pool_lora", Verdict::Ok, shown, "equal");
    };
    let places = at.iter().map(|(path, who)| format!("{}: {}", path.unwrap_or("no path"), who.join(", ")));
    let shown = format!("{name} at {}", places.collect::<Vec<_>>().join("; "));
    // Before, only the name is hashed.
    let hashed = looks.iter().any(|look| look.facts.era() != Some(KeyEra::Untagged));
    let verdict = if hashed { Verdict::Broken } else { Verdict::Warn };
    Row::new("pool_lora", verdict, shown, "equal")
        .advise("give --lora-modules the same path at every engine: it is part of a block's name from vLLM 0.31 on")
}

//! kvlb's API and metrics, as a chore reads them.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

/// kvlb's REST API and metrics.
pub(crate) struct Api {
    base: String,
    agent: ureq::Agent,
}

impl Api {
    pub(crate) fn new(address: &str) -> Self {
        Self { base: format!("http://{address}"), agent: agent() }
    }

    pub(crate) fn get(&self, path: &str) -> Result<String> {
        let url = format!("{}{path}", self.base);
        let mut answer = self.agent.get(&url).call().with_context(|| format!("GET {url}"))?;
        Ok(answer.body_mut().read_to_string()?)
    }

    pub(crate) fn json(&self, path: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.get(path)?)?)
    }

    /// Every series of the metrics page.
    pub(crate) fn metrics(&self) -> Result<Metrics> {
        let page = self.get("/netlox/v1/metrics")?;
        let series = page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series.to_owned(), value.parse().ok()?))
        });
        Ok(Metrics(series.collect()))
    }
}

/// One reading of the metrics page.
pub(crate) struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    pub(crate) fn value(&self, series: &str) -> f64 {
        self.0.get(series).copied().unwrap_or_default()
    }

    /// The sum over all series of a family.
    pub(crate) fn sum(&self, family: &str) -> f64 {
        let of_family = |series: &str| series.split('{').next() == Some(family);
        self.0.iter().filter(|(series, _)| of_family(series)).map(|(_, value)| value).sum()
    }

    /// How many series of a family have this value.
    pub(crate) fn count(&self, family: &str, wanted: f64) -> usize {
        let of_family = |series: &str| series.split('{').next() == Some(family);
        self.0.iter().filter(|(series, value)| of_family(series) && (**value - wanted).abs() < f64::EPSILON).count()
    }

    /// What moved since `before`, of the families whose name begins with `prefix`.
    pub(crate) fn moved(&self, before: &Self, prefix: &str) -> Vec<(String, f64)> {
        let delta = |(series, value): (&String, &f64)| (series.clone(), value - before.value(series));
        self.0.iter().filter(|(series, _)| series.starts_with(prefix)).map(delta).filter(|(_, by)| *by != 0.0).collect()
    }
}

/// A client that gives up, and takes only what is well.
pub(crate) fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(20)))
        .http_status_as_error(true)
        .build()
        .into()
}

//! What a comparison found.

use serde::Serialize;

/// How one leg stands, from good to bad.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Both sides agree.
    #[default]
    Ok,
    /// They agree; the operator should know something.
    Warn,
    /// It cannot be told.
    Unknown,
    /// The engine does not answer.
    Unreachable,
    /// They disagree.
    Broken,
}

impl Verdict {
    /// The word that REST and CLI use.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Unknown => "unknown",
            Self::Unreachable => "unreachable",
            Self::Broken => "broken",
        }
    }
}

/// One leg of one endpoint, or of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Its name, a word that never changes.
    pub leg: &'static str,
    /// The engine's side.
    pub engine: String,
    /// Our side.
    pub ours: String,
    /// How it stands.
    pub verdict: Verdict,
    /// What to change, or how to find out; null where nothing is to be done.
    pub advice: Option<String>,
}

impl Row {
    pub(super) fn new(leg: &'static str, verdict: Verdict, engine: impl Into<String>, ours: impl Into<String>) -> Self {
        Self { leg, engine: engine.into(), ours: ours.into(), verdict, advice: None }
    }

    pub(super) fn advise(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}

/// The legs of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EndpointReport {
    /// Its position in the rule.
    pub ep_idx: usize,
    /// `HOST:PORT`.
    pub endpoint: String,
    /// Its legs, in a fixed order.
    pub legs: Vec<Row>,
}

/// A whole comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The worst of all legs.
    pub verdict: Verdict,
    /// Endpoint by endpoint.
    pub endpoints: Vec<EndpointReport>,
    /// What has to be equal among them.
    pub pool: Vec<Row>,
}

impl Report {
    pub(super) fn new(endpoints: Vec<EndpointReport>, pool: Vec<Row>) -> Self {
        let legs = endpoints.iter().flat_map(|endpoint| &endpoint.legs).chain(&pool);
        let verdict = legs.map(|leg| leg.verdict).max().unwrap_or_default();
        Self { verdict, endpoints, pool }
    }
}

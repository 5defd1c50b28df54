//! Handles of the series that every request touches: looking one up by its labels takes ten times as long as counting.

use std::sync::{Arc, OnceLock};

use prometheus::Histogram;
use prometheus::core::{AtomicU64, GenericCounter};

use crate::router::{Miss, Reason, Step, Tier};
use crate::telemetry::Metrics;

type Counter = GenericCounter<AtomicU64>;

/// The handles, made when first needed: a series is not shown before it has something to say.
#[derive(Debug)]
pub(super) struct Handles {
    metrics: Arc<Metrics>,
    steps: [Histogram; Step::ALL.len()],
    first_byte: [OnceLock<Histogram>; Tier::ALL.len()],
    misses: [OnceLock<Counter>; Reason::ALL.len()],
    /// The first detail of each reason; nearly all requests of a kind miss for the same one.
    details: [OnceLock<(&'static str, Counter)>; Reason::ALL.len()],
}

impl Handles {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        let steps = Step::ALL.map(|step| metrics.decision_seconds.with_label_values(&[step.label()]));
        Self {
            metrics,
            steps,
            first_byte: [const { OnceLock::new() }; Tier::ALL.len()],
            misses: [const { OnceLock::new() }; Reason::ALL.len()],
            details: [const { OnceLock::new() }; Reason::ALL.len()],
        }
    }

    /// How long a step of a decision takes.
    pub(super) fn step(&self, step: Step) -> &Histogram {
        &self.steps[step as usize]
    }

    /// How long endpoints of a tier's choice take to begin their answer.
    pub(super) fn first_byte(&self, tier: Tier) -> &Histogram {
        self.first_byte[tier as usize]
            .get_or_init(|| self.metrics.first_byte_seconds.with_label_values(&[tier.label()]))
    }

    /// Counts why a request was not placed by its blocks.
    pub(super) fn missed(&self, miss: Miss) {
        let (reason, place) = (miss.reason.label(), miss.reason as usize);
        self.misses[place].get_or_init(|| self.metrics.miss_reasons.with_label_values(&[reason])).inc();
        let of_detail = || self.metrics.miss_details.with_label_values(&[reason, miss.detail]);
        let (detail, counter) = self.details[place].get_or_init(|| (miss.detail, of_detail()));
        if *detail == miss.detail { counter.inc() } else { of_detail().inc() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_miss_is_counted_under_its_own_reason_and_detail() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let handles = Handles::new(Arc::clone(&metrics));
        for detail in ["budget", "queue_full", "budget"] {
            handles.missed(Miss::because(Reason::Tokenize, detail));
        }
        handles.missed(Miss::new(Reason::ModeOff));
        let detail = |reason: Reason, detail| metrics.miss_details.with_label_values(&[reason.label(), detail]).get();
        assert_eq!((detail(Reason::Tokenize, "budget"), detail(Reason::Tokenize, "queue_full")), (2, 1));
        let reason = |reason: Reason| metrics.miss_reasons.with_label_values(&[reason.label()]).get();
        assert_eq!((reason(Reason::Tokenize), reason(Reason::ModeOff), reason(Reason::Shallow)), (3, 1, 0));
    }
}

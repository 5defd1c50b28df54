//! How busy an engine says that it is, where everybody can read it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use crate::fleet::Readings;

/// What an engine said longer ago is not known any more.
///
/// Source: LoxiLB's, as in its `fc_telemetry_stale_ms`.
pub const STALE_AFTER: Duration = Duration::from_secs(30);

/// Nobody knows.
const UNKNOWN: u64 = u64::MAX;

/// Why a look at an engine's metrics came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrapeFailure {
    /// No connection, or no answer in time.
    Unreachable,
    /// Another status than 200.
    Status,
    /// An answer that is no page of metrics, or too long a one.
    Unreadable,
    /// A page without a family that is known.
    Unknown,
}

impl ScrapeFailure {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::Unreachable, Self::Status, Self::Unreadable, Self::Unknown];

    /// The word in `kvlb_engine_scrape_failures_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Status => "status",
            Self::Unreadable => "unreadable",
            Self::Unknown => "unknown_families",
        }
    }
}

/// An engine's own words on its work, of one endpoint. Whoever chooses reads the queue alone, and without a lock.
#[derive(Debug)]
pub struct Vitals {
    /// Requests in its queue; [`UNKNOWN`].
    queued: AtomicU64,
    last: ArcSwapOption<(Instant, Readings)>,
    failures: [AtomicU64; ScrapeFailure::ALL.len()],
}

impl Default for Vitals {
    fn default() -> Self {
        Self { queued: AtomicU64::new(UNKNOWN), last: ArcSwapOption::empty(), failures: Default::default() }
    }
}

impl Vitals {
    /// Requests in the engine's queue, unless that is unknown or was said too long ago.
    pub fn queued(&self) -> Option<u32> {
        u32::try_from(self.queued.load(Ordering::Relaxed)).ok()
    }

    /// What the engine said last, and when; `None` before the first time. See [`Vitals::fresh`].
    pub fn last(&self) -> Option<Arc<(Instant, Readings)>> {
        self.last.load_full()
    }

    /// What the engine said last, unless it is too long ago at `now`.
    pub fn fresh(&self, now: Instant) -> Option<Arc<(Instant, Readings)>> {
        self.last().filter(|last| now.saturating_duration_since(last.0) < STALE_AFTER)
    }

    /// Learns what the engine says.
    pub fn learn(&self, readings: Readings, now: Instant) {
        self.queued.store(readings.waiting.map_or(UNKNOWN, u64::from), Ordering::Relaxed);
        self.last.store(Some(Arc::new((now, readings))));
    }

    /// Counts a look that came to nothing.
    pub fn failed(&self, why: ScrapeFailure) {
        self.failures[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Choices no longer go by what the engine said: it is too long ago. Whoever looks at its metrics says so.
    pub fn expire(&self) {
        self.queued.store(UNKNOWN, Ordering::Relaxed);
    }

    /// Looks that came to nothing, by cause.
    pub fn failures(&self) -> impl Iterator<Item = (ScrapeFailure, u64)> {
        ScrapeFailure::ALL.into_iter().zip(&self.failures).map(|(why, count)| (why, count.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::fleet::Dialect;

    #[test]
    fn unknown_is_never_zero_and_what_is_old_is_unknown() {
        let (vitals, now) = (Vitals::default(), clock::now());
        assert_eq!((vitals.queued(), vitals.fresh(now)), (None, None));
        let said = |waiting| Readings { waiting, ..Readings::unknown(Dialect::Vllm) };
        vitals.learn(said(Some(0)), now);
        assert_eq!(vitals.queued(), Some(0));
        assert!(vitals.fresh(now + STALE_AFTER / 2).is_some() && vitals.fresh(now + STALE_AFTER).is_none());
        vitals.learn(said(None), now);
        assert_eq!(vitals.queued(), None, "the family is missing");
        vitals.learn(said(Some(u32::MAX)), now);
        assert_eq!(vitals.queued(), Some(u32::MAX));
        vitals.expire();
        assert_eq!(vitals.queued(), None);
        vitals.failed(ScrapeFailure::Status);
        assert_eq!(vitals.failures().map(|(_, count)| count).collect::<Vec<_>>(), [0, 1, 0, 0]);
    }
}

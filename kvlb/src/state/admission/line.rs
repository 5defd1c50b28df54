//! One rule's requests at the gate, counted.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// What became of a request at the gate: LoxiLB's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It went to an endpoint.
    Admitted,
    /// It had to wait.
    Queued,
    /// It was refused: everything was full, and the rule has no queue.
    CapacityShed,
    /// It was refused: the queue was full, too.
    QueueFull,
    /// It waited as long as it may.
    QueueTimeout,
    /// Its client left while it waited.
    Cancelled,
    /// kvlb ended, or its rule went, while it waited.
    Drained,
    /// A rule that only observes would have let it wait.
    ObserveWouldQueue,
    /// A rule that only observes would have refused it.
    ObserveWouldShed,
    /// It asks no model to work.
    BypassNonInference,
}

impl Verdict {
    /// Every one.
    pub const ALL: [Self; 10] = [
        Self::Admitted,
        Self::Queued,
        Self::CapacityShed,
        Self::QueueFull,
        Self::QueueTimeout,
        Self::Cancelled,
        Self::Drained,
        Self::ObserveWouldQueue,
        Self::ObserveWouldShed,
        Self::BypassNonInference,
    ];

    /// The word in `kvlb_admission_decisions_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Queued => "queued",
            Self::CapacityShed => "capacity_shed",
            Self::QueueFull => "queue_full",
            Self::QueueTimeout => "queue_timeout",
            Self::Cancelled => "cancelled",
            Self::Drained => "drained",
            Self::ObserveWouldQueue => "observe_would_queue",
            Self::ObserveWouldShed => "observe_would_shed",
            Self::BypassNonInference => "bypass_non_inference",
        }
    }
}

/// One rule at the gate, through all its versions.
#[derive(Debug, Default)]
pub struct Line {
    pub(super) held: AtomicU32,
    pub(super) queued: AtomicU32,
    verdicts: [AtomicU64; Verdict::ALL.len()],
    waits: AtomicU64,
    waited_micros: AtomicU64,
}

impl Line {
    /// Its requests at endpoints. Changes under the gate's lock only.
    pub fn held(&self) -> u32 {
        self.held.load(Ordering::Relaxed)
    }

    /// Its requests that wait.
    pub fn queued(&self) -> u32 {
        self.queued.load(Ordering::Relaxed)
    }

    /// Counts what became of a request.
    pub fn count(&self, verdict: Verdict) {
        self.verdicts[verdict as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a wait that ended at an endpoint.
    pub fn waited(&self, time: Duration) {
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.waited_micros.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// What became of its requests so far.
    pub fn verdicts(&self) -> impl Iterator<Item = (Verdict, u64)> {
        Verdict::ALL.into_iter().zip(&self.verdicts).map(|(verdict, count)| (verdict, count.load(Ordering::Relaxed)))
    }

    /// Waits that ended at an endpoint, and how long they took in all.
    pub fn waits(&self) -> (u64, Duration) {
        let micros = self.waited_micros.load(Ordering::Relaxed);
        (self.waits.load(Ordering::Relaxed), Duration::from_micros(micros))
    }

    /// How long a wait takes, on the average; nothing before the first.
    pub fn mean_wait(&self) -> Duration {
        let (waits, time) = self.waits();
        u32::try_from(waits).ok().and_then(|waits| time.checked_div(waits)).unwrap_or_default()
    }
}

//! The wall clock of the simulated engine; the only place that reads it.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since the Unix epoch, with fraction: what vLLM puts in a batch's `ts` and in `process_start_time_seconds`.
#[expect(
    clippy::disallowed_methods,
    reason = "the simulated engine is an edge of its own: it stands for another process"
)]
pub(super) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

//! The one reader of the clock. Everything else is told the time, which is what makes it replayable.

use std::time::{Instant, SystemTime};

/// The time for measuring how long something takes.
pub fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "this is where time enters")]
    Instant::now()
}

/// The time of day.
pub fn wall() -> SystemTime {
    #[expect(clippy::disallowed_methods, reason = "this is where time enters")]
    SystemTime::now()
}

/// The time of day as whole milliseconds since 1970 in UTC.
pub fn unix_millis() -> u64 {
    let since = wall().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The time of day as whole seconds since 1970 in UTC.
pub fn unix_seconds() -> i64 {
    let since = wall().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

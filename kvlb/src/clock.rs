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

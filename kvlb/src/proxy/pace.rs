//! The least pace at which a request's body must come in.
//!
//! A limit for each silence alone lets a client that sends a byte now and then keep its connection, and all that is held for
//! its body, for ever. So that limit is for all the waiting for a body together, and each 512 bytes add a second to it: a
//! client that is slower than that for longer than the limit is let go. Only time in which we wait for the client counts,
//! not what the endpoint takes to read a body that goes through.
//!
//! Source of the idea and the number: Apache's `mod_reqtimeout`, `body=20,MinRate=500`. A modem of 1995 brought 3,600 bytes a
//! second.

use std::time::Duration;

/// Bytes that add a second to the time a body may take.
const BYTES_A_SECOND: u64 = 512;

/// How a body comes in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    limit: Duration,
    /// All the time in which we waited for the client.
    waited: Duration,
    /// Bytes that have come.
    bytes: u64,
}

impl Pace {
    /// One with `limit` for its silences, of which `bytes` are here already.
    pub(super) fn new(limit: Duration, bytes: usize) -> Self {
        Self { limit, waited: Duration::ZERO, bytes: bytes as u64 }
    }

    /// The longest silence.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// The longest wait for the next piece.
    pub(super) fn patience(&self) -> Duration {
        let earned = Duration::from_millis(self.bytes.saturating_mul(1000) / BYTES_A_SECOND);
        self.limit.saturating_add(earned).saturating_sub(self.waited).min(self.limit)
    }

    /// A piece came after so long a wait.
    pub(super) fn came(&mut self, bytes: usize, waited: Duration) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
        self.waited = self.waited.saturating_add(waited);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_mins(1);
    const ALMOST: Duration = Duration::from_secs(59);

    /// How long a body of many equal pieces, each after the same wait, is put up with; `None`: for an hour and more.
    fn lasts(bytes: usize, wait: Duration) -> Option<Duration> {
        let (mut pace, mut time) = (Pace::new(LIMIT, 0), Duration::ZERO);
        while pace.patience() > wait {
            pace.came(bytes, wait);
            time += wait;
            if time > Duration::from_hours(1) {
                return None;
            }
        }
        Some(time + pace.patience())
    }

    #[test]
    fn a_byte_now_and_then_is_too_slow_and_a_slow_line_is_not() {
        let second = Duration::from_secs(1);
        assert!(lasts(1, second).is_some_and(|time| time < LIMIT + second));
        assert!(lasts(1, ALMOST).is_some_and(|time| time <= LIMIT + second));
        assert!(lasts(256, second).is_some_and(|time| (115..=120).contains(&time.as_secs())));
        assert_eq!((lasts(512, second), lasts(1, second / 600)), (None, None));
        assert_eq!(lasts(64 << 10, ALMOST), None, "a client may think for a while, if it sends much then");
    }

    #[test]
    fn no_silence_is_longer_than_the_limit_whatever_has_come() {
        let mut pace = Pace::new(LIMIT, 100 << 20);
        assert_eq!(pace.patience(), LIMIT);
        pace.came(usize::MAX, Duration::MAX);
        pace.came(usize::MAX, Duration::MAX);
        assert!(pace.patience() <= LIMIT);
    }
}

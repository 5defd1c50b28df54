//! How many of a rule's requests may be sent once more.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// Seconds that are looked back on.
const WINDOW: usize = 10;
/// Retries allowed in that time whatever the traffic, so that a quiet rule can retry at all.
const ALWAYS: u64 = 10;
/// Beyond that, one retry for this many requests: 20 %. A fleet in trouble must not get its load multiplied.
const REQUESTS_PER_RETRY: u64 = 5;

/// Counts a rule's requests and retries of the last ten seconds.
///
/// Counts of different threads may miss each other at the turn of a second: a bound that is off by a few is as good.
#[derive(Debug)]
pub struct RetryBudget {
    start: Instant,
    seconds: [Second; WINDOW],
}

#[derive(Debug, Default)]
struct Second {
    number: AtomicU64,
    requests: AtomicU32,
    retries: AtomicU32,
}

impl RetryBudget {
    /// A budget that has counted nothing.
    pub fn new(now: Instant) -> Self {
        Self { start: now, seconds: Default::default() }
    }

    /// Counts a request.
    pub fn request(&self, now: Instant) {
        self.second(now).requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether one more retry is allowed; counts it where it is.
    pub fn retry(&self, now: Instant) -> bool {
        let current = self.second(now);
        let number = current.number.load(Ordering::Relaxed);
        let (mut requests, mut retries) = (0, 0);
        for second in &self.seconds {
            if number - second.number.load(Ordering::Relaxed).min(number) < WINDOW as u64 {
                requests += u64::from(second.requests.load(Ordering::Relaxed));
                retries += u64::from(second.retries.load(Ordering::Relaxed));
            }
        }
        let allowed = retries < ALWAYS.max(requests / REQUESTS_PER_RETRY);
        if allowed {
            current.retries.fetch_add(1, Ordering::Relaxed);
        }
        allowed
    }

    /// The counter of this second, emptied where it last counted another.
    fn second(&self, now: Instant) -> &Second {
        let number = now.saturating_duration_since(self.start).as_secs();
        #[expect(clippy::cast_possible_truncation, reason = "the remainder is below WINDOW")]
        let second = &self.seconds[(number % WINDOW as u64) as usize];
        if second.number.swap(number, Ordering::Relaxed) != number {
            second.requests.store(0, Ordering::Relaxed);
            second.retries.store(0, Ordering::Relaxed);
        }
        second
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock;

    #[test]
    fn a_quiet_rule_may_retry_a_few_times() {
        let now = clock::now();
        let budget = RetryBudget::new(now);
        assert_eq!((0..30).filter(|_| budget.retry(now)).count(), 10);
    }

    #[test]
    fn a_busy_rule_may_retry_one_in_five_and_the_past_is_forgotten() {
        let start = clock::now();
        let budget = RetryBudget::new(start);
        (0..200).for_each(|_| budget.request(start));
        let later = start + Duration::from_secs(9);
        assert_eq!((0..300).filter(|_| budget.retry(later)).count(), 40);
        let much_later = start + Duration::from_secs(19);
        assert_eq!((0..300).filter(|_| budget.retry(much_later)).count(), 10);
    }
}

//! What was predicted of an endpoint's cache, beside what its engine reports of it.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Requests over which a prediction is held against the reports: fewer may all have met an eviction.
const WINDOW: u32 = 20;

/// One finished request whose engine reported what it found in its cache, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The prompt's length.
    pub prompt: u64,
    /// Of these, what the mirror of the cache said.
    pub predicted: u64,
    /// Of these, what the engine says.
    pub reported: u64,
}

/// All such requests of one endpoint.
#[derive(Debug, Default)]
pub struct Ledger {
    requests: AtomicU64,
    prompt: AtomicU64,
    predicted: AtomicU64,
    reported: AtomicU64,
    window: Mutex<(u32, Entry)>,
}

/// Sums since the endpoint was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Requests whose engine reported.
    pub requests: u64,
    /// Tokens.
    pub tokens: Entry,
}

impl Ledger {
    /// Enters a request. Says whether the engine has reported less than half of what was predicted over the last requests for
    /// which something was: then the mirror is not to be believed.
    pub fn enter(&self, entry: Entry) -> bool {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.prompt.fetch_add(entry.prompt, Ordering::Relaxed);
        self.predicted.fetch_add(entry.predicted, Ordering::Relaxed);
        self.reported.fetch_add(entry.reported, Ordering::Relaxed);
        if entry.predicted == 0 {
            return false;
        }
        let mut window = self.window.lock();
        window.0 += 1;
        window.1.predicted += entry.predicted;
        // What it holds beyond the prediction makes up for nothing.
        window.1.reported += entry.reported.min(entry.predicted);
        if window.0 < WINDOW {
            return false;
        }
        let (_, sums) = std::mem::take(&mut *window);
        sums.reported * 2 < sums.predicted
    }

    /// Forgets the requests that are not judged yet: what they were predicted by is gone.
    pub fn start_over(&self) {
        *self.window.lock() = Default::default();
    }

    /// The sums.
    pub fn totals(&self) -> Totals {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let tokens =
            Entry { prompt: read(&self.prompt), predicted: read(&self.predicted), reported: read(&self.reported) };
        Totals { requests: read(&self.requests), tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(predicted: u64, reported: u64) -> Entry {
        Entry { prompt: 100, predicted, reported }
    }

    #[test]
    fn twenty_requests_with_less_than_half_of_the_prediction_are_a_doubt() {
        let ledger = Ledger::default();
        assert!((1..WINDOW).all(|_| !ledger.enter(entry(64, 31))));
        assert!(!ledger.enter(entry(0, 64)), "nothing was predicted");
        assert!(ledger.enter(entry(64, 31)));
        assert!((1..=WINDOW).all(|_| !ledger.enter(entry(64, 32))), "half is enough");
        assert_eq!(ledger.totals().requests, 41);
    }

    #[test]
    fn one_lucky_request_does_not_hide_the_others() {
        let ledger = Ledger::default();
        ledger.enter(entry(64, 100_000));
        assert!((1..WINDOW).any(|_| ledger.enter(entry(64, 0))));
        ledger.enter(entry(64, 0));
        ledger.start_over();
        assert!((1..WINDOW).all(|_| !ledger.enter(entry(64, 0))));
    }
}

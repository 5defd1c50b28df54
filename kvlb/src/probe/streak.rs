//! When a row of results becomes a verdict.

use crate::fleet::Probe;

/// Results in a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streak {
    last: Option<bool>,
    length: u32,
    failures_to_down: u32,
    successes_to_up: u32,
}

impl Streak {
    pub(super) fn new(failures_to_down: u32, successes_to_up: u32) -> Self {
        let (failures_to_down, successes_to_up) = (failures_to_down.max(1), successes_to_up.max(1));
        Self { last: None, length: 0, failures_to_down, successes_to_up }
    }

    /// Adds one result; the verdict, where the row is long enough for one. An endpoint that was never down, as far as
    /// `before` knows, is up with its first success.
    pub(super) fn add(&mut self, good: bool, before: Probe) -> Option<Probe> {
        self.length = if self.last == Some(good) { self.length.saturating_add(1) } else { 1 };
        self.last = Some(good);
        if good {
            return (before != Probe::Down || self.length >= self.successes_to_up).then_some(Probe::Up);
        }
        (self.length >= self.failures_to_down).then_some(Probe::Down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_results_in_a_row_turn_an_endpoint() {
        for rise in [1, 3] {
            let mut streak = Streak::new(2, rise);
            assert_eq!(streak.add(false, Probe::Unknown), None);
            assert_eq!(streak.add(true, Probe::Unknown), Some(Probe::Up), "it was never down");
            assert_eq!(streak.add(false, Probe::Up), None);
            assert_eq!(streak.add(true, Probe::Up), Some(Probe::Up));
            assert_eq!(streak.add(false, Probe::Up), None);
            assert_eq!(streak.add(false, Probe::Up), Some(Probe::Down));
            assert_eq!(streak.add(true, Probe::Down), (rise == 1).then_some(Probe::Up));
            assert_eq!(streak.add(false, Probe::Down), None, "a new row");
            assert_eq!(streak.add(false, Probe::Down), Some(Probe::Down));
            for success in 1..=rise {
                assert_eq!(streak.add(true, Probe::Down), (success == rise).then_some(Probe::Up));
            }
        }
    }
}

//! When a row of results becomes a verdict.

use crate::fleet::Probe;

/// Results in a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streak {
    failures: u32,
    failures_to_down: u32,
}

impl Streak {
    pub(super) fn new(failures_to_down: u32) -> Self {
        Self { failures: 0, failures_to_down: failures_to_down.max(1) }
    }

    /// Adds one result; the verdict, where the row is long enough for one.
    pub(super) fn add(&mut self, good: bool) -> Option<Probe> {
        if good {
            self.failures = 0;
            return Some(Probe::Up);
        }
        self.failures = self.failures.saturating_add(1);
        (self.failures >= self.failures_to_down).then_some(Probe::Down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_in_a_row_turn_an_endpoint_down_and_one_success_turns_it_up() {
        let mut streak = Streak::new(2);
        assert_eq!(streak.add(false), None);
        assert_eq!(streak.add(true), Some(Probe::Up));
        assert_eq!(streak.add(false), None);
        assert_eq!(streak.add(false), Some(Probe::Down));
        assert_eq!(streak.add(false), Some(Probe::Down));
        assert_eq!(streak.add(true), Some(Probe::Up));
    }
}

//! How far the datapath has come with the rules in force.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// The version of the rules that the datapath serves.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// `None` while no datapath runs: nobody waits for one then.
    served: Mutex<Option<u64>>,
    changed: Condvar,
}

impl Reach {
    /// The datapath serves this version now; `None`: it has ended.
    pub(super) fn serves(&self, version: Option<u64>) {
        *self.served.lock() = version;
        self.changed.notify_all();
    }

    /// Blocks until the datapath serves `version` or a later one, for `limit` at most. Says whether it does.
    pub(super) fn wait_for(&self, version: u64, limit: Duration) -> bool {
        let mut served = self.served.lock();
        let behind = |served: &mut Option<u64>| served.is_some_and(|served| served < version);
        !self.changed.wait_while_for(&mut served, behind, limit).timed_out()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn whoever_waits_goes_on_when_the_version_is_served_and_when_the_datapath_ends() {
        let reach = Arc::new(Reach::default());
        let short = Duration::from_millis(1);
        assert!(reach.wait_for(7, short), "nothing to wait for");
        reach.serves(Some(7));
        assert!(reach.wait_for(7, short) && !reach.wait_for(8, short));
        for next in [Some(9), None] {
            let waiting = Arc::clone(&reach);
            let waiting = std::thread::spawn(move || waiting.wait_for(9, Duration::from_mins(1)));
            reach.serves(next);
            assert!(waiting.join().expect("no panic"));
            reach.serves(Some(7));
        }
    }
}

//! What the kernel's programs tell of those that they drop, passed on to the state.

use std::sync::Arc;

use crate::clock;
use crate::kernel::{Dropped, Drops};
use crate::state::{DropSeen, State};

/// Passes them on for ever.
pub(super) async fn keep_telling(drops: Drops, state: Arc<State>) {
    let tell = |dropped: Dropped| {
        let Dropped { reason, between, rule, count } = dropped;
        let reason = reason.label();
        state.metrics.drop_samples.with_label_values(&[reason]).inc();
        state.drops.add(DropSeen { at: clock::unix_millis(), reason, between, rule, count });
    };
    drops.follow(tell).await;
}

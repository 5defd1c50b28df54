//! Faults on demand: what goes wrong is one plain value, changed at run time through the library or `POST /debug/fault`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::watch;

use super::chance::Chance;

/// What goes wrong now. The default is that nothing does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own in the JSON")]
pub struct FaultPlan {
    /// Batches to lose, counted from the moment this is set: 1 is the next. They keep their sequence number and their place in the
    /// replay buffer.
    pub lose_batches: Vec<u64>,
    /// Share of batches to lose, 0 to 1.
    pub lose_fraction: f64,
    /// Nobody listens on the event port.
    pub refuse_events: bool,
    /// Nobody listens on the replay port.
    pub refuse_replay: bool,
    /// Replay requests get no answer.
    pub stall_replay: bool,
    /// Nobody listens on the HTTP port.
    pub refuse_http: bool,
    /// Share of time, in random slots, in which nobody listens on the HTTP port. No accepted connection is lost by it.
    pub refuse_http_fraction: f64,
    /// Length of such a slot, in milliseconds.
    pub refuse_http_slot_ms: u64,
    /// Share of HTTP connections that are reset right after they were accepted.
    pub reset_http_fraction: f64,
    /// Inference answers break off after this many chunks, or after half a body that is not streamed (0: before the head).
    pub die_after_chunks: Option<usize>,
    /// Share of answers that do.
    pub die_fraction: f64,
    /// They end in a reset instead of a plain close.
    pub die_with_reset: bool,
    /// Inference requests are read and never answered.
    pub stall_before_head: bool,
    /// Streams stop after this many chunks and stay open.
    pub stall_after_chunks: Option<usize>,
    /// Status of inference answers instead of a real one.
    pub status: Option<u16>,
    /// Share of answers that have it.
    pub status_fraction: f64,
    /// Status of `/health` instead of 200.
    pub health_status: Option<u16>,
    /// Time `/health` takes, in milliseconds, instead of the configured one.
    pub health_delay_ms: Option<u64>,
    /// Time `/metrics` takes, in milliseconds.
    pub metrics_delay_ms: u64,
    /// Families that `/metrics` does not show.
    pub metrics_without: Vec<String>,
    /// Idle time after which a connection is closed, in milliseconds, instead of the configured one.
    pub keep_alive_ms: Option<u64>,
    /// The model computes nothing; requests wait.
    pub pause: bool,
    /// The share of the tokens found in the cache that answers admit to, instead of all of them.
    pub reported_cached_share: Option<f64>,
    /// Nobody listens on the side channel, nor on Mooncake's bootstrap.
    pub refuse_side_channel: bool,
    /// Share of handoff legs that have the faults below, from `prefill_without_params` to `decode_die_after_chunks`.
    pub handoff_fraction: f64,
    /// Answers of prefills have no `kv_transfer_params`, and nothing is kept for a decode.
    pub prefill_without_params: bool,
    /// Answers of prefills end for this reason (`stop`, `abort`) with null parameters, and nothing is kept.
    pub prefill_finish: Option<String>,
    /// `kv_transfer_params` of prefills have a field `padding` of this many bytes.
    pub prefill_padding: Option<usize>,
    /// Status of prefills instead of a real answer; nothing is computed.
    pub prefill_status: Option<u16>,
    /// Prefills break off: before the head of the answer, or after half of its body. They are computed, and their blocks are kept.
    pub prefill_dies: Option<Death>,
    /// Decodes are read and never answered; nothing is read from the prefill side.
    pub decode_stall: bool,
    /// Decodes break off after this many chunks, or after half a body that is not streamed (0: before the head).
    pub decode_die_after_chunks: Option<usize>,
    /// Time between a decode's turn and its read, in milliseconds, in which it does not ask to keep the blocks.
    pub pull_delay_ms: u64,
    /// A decode whose read fails is answered 500, not computed here.
    pub fail_on_pull_failure: bool,
}

/// Where an answer breaks off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Death {
    /// Before its head.
    Before,
    /// After half of its body.
    Middle,
}

impl Default for FaultPlan {
    fn default() -> Self {
        Self {
            lose_batches: Vec::new(),
            lose_fraction: 0.0,
            refuse_events: false,
            refuse_replay: false,
            stall_replay: false,
            refuse_http: false,
            refuse_http_fraction: 0.0,
            refuse_http_slot_ms: 20,
            reset_http_fraction: 0.0,
            die_after_chunks: None,
            die_fraction: 1.0,
            die_with_reset: false,
            stall_before_head: false,
            stall_after_chunks: None,
            status: None,
            status_fraction: 1.0,
            health_status: None,
            health_delay_ms: None,
            metrics_delay_ms: 0,
            metrics_without: Vec::new(),
            keep_alive_ms: None,
            pause: false,
            reported_cached_share: None,
            refuse_side_channel: false,
            handoff_fraction: 1.0,
            prefill_without_params: false,
            prefill_finish: None,
            prefill_padding: None,
            prefill_status: None,
            prefill_dies: None,
            decode_stall: false,
            decode_die_after_chunks: None,
            pull_delay_ms: 0,
            fail_on_pull_failure: false,
        }
    }
}

/// The plan in force, its dice, and the switches that follow from it. It outlives restarts of its engine.
#[derive(Debug)]
pub struct Faults {
    plan: watch::Sender<FaultPlan>,
    chance: Mutex<Chance>,
    http_open: watch::Sender<bool>,
    events_open: watch::Sender<bool>,
    replay_open: watch::Sender<bool>,
    side_channel_open: watch::Sender<bool>,
    /// Counts how often all subscribers were cut off.
    cuts: watch::Sender<u64>,
}

impl Faults {
    pub(super) fn new(chance_seed: u64) -> Self {
        Self {
            plan: watch::Sender::new(FaultPlan::default()),
            chance: Mutex::new(Chance::new(chance_seed)),
            http_open: watch::Sender::new(true),
            events_open: watch::Sender::new(true),
            replay_open: watch::Sender::new(true),
            side_channel_open: watch::Sender::new(true),
            cuts: watch::Sender::new(0),
        }
    }

    /// What goes wrong now.
    pub fn plan(&self) -> FaultPlan {
        self.plan.borrow().clone()
    }

    /// Changes what goes wrong.
    pub fn set(&self, change: impl FnOnce(&mut FaultPlan)) {
        self.plan.send_modify(change);
        let plan = self.plan();
        self.http_open.send_replace(!plan.refuse_http);
        self.events_open.send_replace(!plan.refuse_events);
        self.replay_open.send_replace(!plan.refuse_replay);
        self.side_channel_open.send_replace(!plan.refuse_side_channel);
    }

    /// Nothing goes wrong any more.
    pub fn clear(&self) {
        self.set(|plan| *plan = FaultPlan::default());
    }

    /// Closes every event and replay connection.
    pub fn disconnect_events(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Applies a JSON object: fields of [`FaultPlan`], changed one by one, and the actions `clear` (first) and `disconnect_events`.
    ///
    /// # Errors
    /// When a field is unknown or has the wrong type; then nothing changes.
    pub fn apply(&self, request: &Value) -> anyhow::Result<FaultPlan> {
        let mut request = request.as_object().context("a fault is a JSON object")?.clone();
        let mut action = |name: &str| request.remove(name).is_some_and(|value| value == true);
        let (clear, disconnect) = (action("clear"), action("disconnect_events"));
        let start = if clear { FaultPlan::default() } else { self.plan() };
        let mut merged = serde_json::to_value(start).context("read the plan in force")?;
        for (key, value) in request {
            merged[key] = value;
        }
        let plan: FaultPlan = serde_json::from_value(merged).context("read the fault")?;
        self.set(|current| *current = plan.clone());
        if disconnect {
            self.disconnect_events();
        }
        Ok(plan)
    }

    pub(super) fn watch(&self) -> watch::Receiver<FaultPlan> {
        self.plan.subscribe()
    }

    pub(super) fn http_gate(&self) -> watch::Receiver<bool> {
        self.http_open.subscribe()
    }

    pub(super) fn events_gate(&self) -> watch::Receiver<bool> {
        self.events_open.subscribe()
    }

    pub(super) fn replay_gate(&self) -> watch::Receiver<bool> {
        self.replay_open.subscribe()
    }

    pub(super) fn side_channel_gate(&self) -> watch::Receiver<bool> {
        self.side_channel_open.subscribe()
    }

    pub(super) fn cuts(&self) -> watch::Receiver<u64> {
        self.cuts.subscribe()
    }

    /// True with probability `p`.
    pub(super) fn happens(&self, p: f64) -> bool {
        p > 0.0 && self.chance().happens(p)
    }

    /// Whether the batch that is due now gets lost.
    pub(super) fn loses_batch(&self) -> bool {
        let mut lost = false;
        // The count changes with every batch; nobody waits for that, so nobody is woken.
        self.plan.send_if_modified(|plan| {
            plan.lose_batches.iter_mut().for_each(|left| *left = left.saturating_sub(1));
            lost = plan.lose_batches.contains(&0);
            plan.lose_batches.retain(|left| *left > 0);
            false
        });
        let fraction = self.plan.borrow().lose_fraction;
        lost || self.happens(fraction)
    }

    /// Waits until `over` holds for the plan.
    pub(super) async fn until(&self, over: impl FnMut(&FaultPlan) -> bool) {
        // The sender lives as long as `self`, so the wait cannot fail.
        drop(self.watch().wait_for(over).await);
    }

    /// Opens and shuts the HTTP port at random while the plan says so; never ends.
    pub(super) async fn flap(&self) {
        loop {
            self.until(|plan| plan.refuse_http_fraction > 0.0).await;
            let plan = self.plan();
            let shut = self.happens(plan.refuse_http_fraction);
            self.http_open.send_replace(!shut && !plan.refuse_http);
            tokio::time::sleep(Duration::from_millis(plan.refuse_http_slot_ms.max(1))).await;
            let plan = self.plan();
            if plan.refuse_http_fraction <= 0.0 {
                self.http_open.send_replace(!plan.refuse_http);
            }
        }
    }

    fn chance(&self) -> MutexGuard<'_, Chance> {
        self.chance.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{FaultPlan, Faults};

    #[test]
    fn the_k_th_next_batch_is_lost_once() {
        let faults = Faults::new(1);
        faults.set(|plan| plan.lose_batches = vec![2, 4]);
        let lost: Vec<bool> = (0..6).map(|_| faults.loses_batch()).collect();
        assert_eq!(lost, [false, true, false, true, false, false]);
        faults.set(|plan| plan.lose_fraction = 1.0);
        assert!(faults.loses_batch());
    }

    #[test]
    fn a_fault_in_json_changes_one_field_and_leaves_the_others() {
        let faults = Faults::new(1);
        faults.apply(&json!({"refuse_http": true})).unwrap();
        let plan = faults.apply(&json!({"status": 503, "status_fraction": 0.5})).unwrap();
        assert!(plan.refuse_http && !*faults.http_gate().borrow());
        assert_eq!((plan.status, faults.plan()), (Some(503), plan.clone()));
        assert!(faults.apply(&json!({"no_such_fault": 1})).is_err());
        assert!(faults.apply(&json!({"status": "x"})).is_err());
        assert_eq!(faults.plan(), plan);
        let cuts = faults.cuts();
        assert_eq!(faults.apply(&json!({"clear": true, "disconnect_events": true})).unwrap(), FaultPlan::default());
        assert!(cuts.has_changed().unwrap() && *faults.http_gate().borrow());
    }
}

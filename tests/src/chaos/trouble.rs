//! What befalls an engine.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex as Counts, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use crate::engine::{Engine, FaultPlan};
use crate::harness::dice::Dice;

/// Kinds of trouble.
const KINDS: [&str; 13] = [
    "killed",
    "stopped",
    "paused",
    "slowed",
    "refuses",
    "dies",
    "dies by reset",
    "resets",
    "says nothing",
    "falls silent",
    "says error",
    "closes early",
    "loses events",
];

/// Troubles an engine again and again, with pauses in which it is well; it is well when this returns.
pub(super) async fn go_on(
    engine: Arc<Mutex<Engine>>,
    seed: u64,
    until: Instant,
    counts: Arc<Counts<BTreeMap<&'static str, usize>>>,
) -> anyhow::Result<()> {
    let mut dice = Dice::new(seed);
    loop {
        sleep(millis(300 + dice.below(3000))).await;
        if Instant::now() >= until {
            return Ok(());
        }
        let kind = KINDS[usize::try_from(dice.below(13)).unwrap_or_default()];
        *counts.lock().unwrap_or_else(PoisonError::into_inner).entry(kind).or_default() += 1;
        let length = millis(50 + dice.below(2000));
        match kind {
            "killed" => {
                engine.lock().await.kill().await;
                sleep(length).await;
                engine.lock().await.restart().await?;
            }
            "stopped" => {
                engine.lock().await.stop().await;
                sleep(length).await;
                engine.lock().await.restart().await?;
            }
            "slowed" => slow(&engine, length).await,
            _ => {
                let plan = plan(kind, &mut dice);
                let cut = kind == "loses events" && dice.once_in(2);
                let troubled = engine.lock().await;
                troubled.faults().set(|now| *now = plan);
                if cut {
                    troubled.faults().disconnect_events();
                }
                drop(troubled);
                sleep(length).await;
                engine.lock().await.faults().clear();
            }
        }
    }
}

/// Stands still and goes on, many times.
async fn slow(engine: &Mutex<Engine>, length: Duration) {
    let end = Instant::now() + length;
    while Instant::now() < end {
        for pause in [true, false] {
            engine.lock().await.faults().set(|plan| plan.pause = pause);
            sleep(millis(if pause { 40 } else { 10 })).await;
        }
    }
}

fn plan(kind: &str, dice: &mut Dice) -> FaultPlan {
    let mut plan = FaultPlan::default();
    let chunks = usize::try_from(dice.below(5)).unwrap_or_default();
    match kind {
        "paused" => plan.pause = true,
        "refuses" => (plan.refuse_http_fraction, plan.refuse_http_slot_ms) = (0.5, 20),
        "dies" | "dies by reset" => {
            (plan.die_after_chunks, plan.die_fraction) = (Some(chunks), 0.5);
            plan.die_with_reset = kind == "dies by reset";
        }
        "resets" => plan.reset_http_fraction = 0.3,
        "says nothing" => plan.stall_before_head = true,
        "falls silent" => plan.stall_after_chunks = Some(chunks + 1),
        "says error" => {
            let status = [500, 503, 429][usize::try_from(dice.below(3)).unwrap_or_default()];
            (plan.status, plan.status_fraction) = (Some(status), 0.5);
        }
        "closes early" => plan.keep_alive_ms = Some(u64::from(1 + dice.below(50))),
        _ => plan.lose_fraction = 0.3,
    }
    plan
}

fn millis(count: u32) -> Duration {
    Duration::from_millis(count.into())
}

//! One HTTP request as a leg of a handoff: its place in the journal, the faults that it has, and what its answer says.

use std::sync::Arc;

use serde_json::{Value, json};

use super::legs::{LegFate, LegId, LegKind};
use super::{Handed, Identity, Wish, pull};
use crate::engine::faults::{Death, FaultPlan};
use crate::engine::journal::Tracked;
use crate::engine::life::Life;

/// A request on its way. One that ends before it was given to the model tells the prefill side, as vLLM does for what it aborts or
/// refuses, so that no blocks are kept for it.
#[derive(Debug)]
pub(in crate::engine) struct Turn {
    life: Arc<Life>,
    wish: Wish,
    /// One for each prompt and copy.
    pub(in crate::engine) legs: Vec<LegId>,
    /// What a prefill keeps, once it has ended.
    pub(in crate::engine) handed: Handed,
    plan: FaultPlan,
    begun: bool,
}

impl Turn {
    /// Notes the legs of a request with this wish; a plain one has none.
    pub(in crate::engine) fn open(
        life: &Arc<Life>,
        wish: Wish,
        prompts: usize,
        request_id: Option<&str>,
        seen: &Tracked,
    ) -> Self {
        let kind = match wish {
            Wish::None => None,
            Wish::Prefill { .. } => Some(LegKind::Prefill),
            Wish::Decode(_) | Wish::Unusable => Some(LegKind::Decode),
        };
        let leg = |kind| life.journal.legs.open(kind, seen.id(), request_id.map(str::to_owned));
        let legs = kind.map_or_else(Vec::new, |kind| (0..prompts).map(|_| leg(kind)).collect());
        let plan = life.faults.plan();
        let plan =
            if kind.is_some() && life.faults.happens(plan.handoff_fraction) { plan } else { FaultPlan::default() };
        Self { life: Arc::clone(life), wish, legs, handed: Handed::default(), plan, begun: false }
    }

    /// A status on purpose.
    pub(in crate::engine) fn status(&self) -> Option<u16> {
        self.plan.prefill_status.filter(|_| self.is_prefill())
    }

    /// Waits for ever, where a decode is never answered; until the fault is over.
    pub(in crate::engine) async fn stall(&self) {
        if self.is_decode() && self.plan.decode_stall {
            self.life.faults.until(|plan| !plan.decode_stall).await;
        }
    }

    /// Where the answer to a decode breaks off, in chunks.
    pub(in crate::engine) fn dies_after_chunks(&self) -> Option<usize> {
        self.plan.decode_die_after_chunks.filter(|_| self.is_decode())
    }

    /// Where the answer to a prefill breaks off.
    pub(in crate::engine) fn death(&self) -> Option<Death> {
        self.plan.prefill_dies.filter(|_| self.is_prefill())
    }

    /// What the model is to do of the wish. From here on the model says what becomes of the legs.
    pub(in crate::engine) fn begin(&mut self) -> Wish {
        if self.keeps_nothing() {
            return Wish::None;
        }
        self.begun = true;
        for leg in &self.legs {
            self.life.journal.legs.note(*leg, |leg| {
                if let Wish::Decode(source) = &self.wish {
                    leg.key = Some(source.key().to_owned());
                    leg.from_engine = Some(source.engine_id().to_owned());
                }
            });
            if self.wish == Wish::Unusable {
                self.life.journal.legs.fate(*leg, LegFate::Ignored, |_| {});
            }
        }
        self.wish.clone()
    }

    /// It is this rank's.
    pub(in crate::engine) fn runs_on(&self, rank: usize) {
        self.legs.iter().for_each(|leg| self.life.journal.legs.note(*leg, |leg| leg.rank = Some(rank)));
    }

    /// Writes what the handoff adds to an answer that is not streamed. Streams say nothing of it, and neither does `/v1/messages`.
    pub(in crate::engine) fn dress(&self, body: &mut Value, identity: Option<&Identity>) {
        let Some(fields) = body.as_object_mut().filter(|fields| fields.contains_key("kv_transfer_params")) else {
            return;
        };
        let params = self.handed.take().and_then(|held| identity.and_then(|identity| identity.params(&held)));
        if let Some(mut params) = params {
            if let Some(padding) = self.plan.prefill_padding {
                params["padding"] = json!("x".repeat(padding));
            }
            fields.insert("kv_transfer_params".into(), params);
        }
        if !self.is_prefill() {
            return;
        }
        if self.plan.prefill_without_params {
            fields.shift_remove("kv_transfer_params");
        }
        if let (Some(finish), Some(choices)) = (&self.plan.prefill_finish, fields["choices"].as_array_mut()) {
            for choice in choices {
                choice["finish_reason"] = json!(finish);
            }
        }
    }

    fn keeps_nothing(&self) -> bool {
        self.is_prefill() && (self.plan.prefill_without_params || self.plan.prefill_finish.is_some())
    }

    fn is_prefill(&self) -> bool {
        matches!(self.wish, Wish::Prefill { .. })
    }

    fn is_decode(&self) -> bool {
        matches!(self.wish, Wish::Decode(_) | Wish::Unusable)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.begun {
            return;
        }
        let fate = if self.is_prefill() { LegFate::Dropped } else { LegFate::Abandoned };
        for leg in &self.legs {
            self.life.journal.legs.fate(*leg, fate, |_| {});
        }
        if let (Wish::Decode(source), Ok(runtime)) = (self.wish.clone(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { pull::tell(&source).await });
        }
    }
}

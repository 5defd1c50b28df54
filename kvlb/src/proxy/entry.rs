//! A request's entry in the access log: begun with its first byte, noted down on its way, handed over at its end.
//!
//! Where the log is off there is no record, and a note costs a look at one word. Each request that has begun gets exactly
//! one line: what is still open when its connection goes, by a panic of ours, is closed then.

use std::time::{Duration, Instant};

use super::backplane::{Backplane, Call, Event};
use super::client::{Client, Stop};
use super::connect::Leg;
use super::exchange::End;
use super::http::Head;
use super::io::Backend;
use super::trace::Trace;
use super::walk::Walk;
use crate::clock;
use crate::telemetry::access::{self, PrefillLeg, Record, Sampling, TraceIds, bounded};

impl<B: Backend, P: Backplane> Client<'_, B, P> {
    /// Begins an entry, where there is a log.
    pub(super) fn open_entry(&self) {
        if self.lane().config.access_log.is_some() {
            let record = Record::new(clock::now(), clock::wall(), self.arrival.client, self.arrival.vip);
            self.entry.set(Some(Box::new(record)));
        }
    }

    /// Notes something down, where there is a log.
    pub(super) fn note(&self, note: impl FnOnce(&mut Record)) {
        if let Some(mut record) = self.entry.take() {
            note(&mut record);
            self.entry.set(Some(record));
        }
    }

    /// Whether there is an entry to note things in.
    pub(super) fn has_entry(&self) -> bool {
        self.lane().config.access_log.is_some()
    }

    /// No request has come.
    pub(super) fn forget_entry(&self) {
        self.entry.set(None);
    }

    /// Notes what the head says, and gives the request its place in its trace.
    pub(super) fn introduce(&self, head: &mut Head) {
        let lane = self.lane();
        let parent = head.parent();
        if lane.config.trace_context {
            let trace = Trace::new(parent, &lane.ids);
            head.set_trace(trace.marked(lane.records(trace.trace_id)));
        }
        let head = &*head;
        self.note(|record| {
            record.head = Some(clock::now().saturating_duration_since(record.began));
            record.method = Some(head.method().into());
            record.path = Some(bounded(head.path()));
            record.http_1_0 = head.is_http_1_0();
            record.request_id = head.fields().text("x-request-id").map(bounded);
            record.trace = head.trace().map(Trace::ids).or_else(|| {
                let (trace_id, parent_id) = parent?.ids();
                Some(TraceIds { trace_id, span_id: None, parent_id: Some(parent_id) })
            });
        });
    }

    /// Notes what became of it when `end` ended it, unless that is known.
    pub(super) fn note_end(&self, end: &End) {
        self.note(|record| match end {
            End::Stopped(Stop::Left) => record.ended(access::End::ClientLeft),
            End::Stopped(Stop::TimedOut(_)) => record.ended(access::End::TimedOut),
            End::Stopped(Stop::Malformed) | End::Reply(_) => record.ended(access::End::Refused),
            End::Stale => record.ended(access::End::EndpointDied),
            End::Stopped(Stop::Ordered) | End::BrokenOff { .. } => record.ended(access::End::CutOff),
            End::Quiet => {}
        });
    }

    /// Notes what a call was told last, and what it knows.
    pub(super) fn note_last(&self, event: &Event, call: &P::Call) {
        self.note(|record| {
            record.ended(match *event {
                Event::Finished { .. } => access::End::Complete,
                Event::Died { .. } | Event::BrokeOff { .. } => access::End::EndpointDied,
                Event::TimedOut { .. } => access::End::TimedOut,
                Event::ClientLeft { .. } => access::End::ClientLeft,
                Event::Replied { .. } => access::End::Refused,
                _ => access::End::CutOff,
            });
            if let Event::Finished { usage: Some(usage), .. } = *event {
                record.reported_prompt_tokens = Some(usage.prompt_tokens);
                record.reported_cached_tokens = usage.cached_tokens;
            }
            record.facts = call.facts();
        });
    }

    /// Hands the entry over: its request is done with.
    pub(super) fn close_entry(&self) {
        let Some(mut record) = self.entry.take() else { return };
        let Some(log) = &self.lane().config.access_log else { return };
        record.ended(access::End::Lost);
        record.total = clock::now().saturating_duration_since(record.began);
        record.phase = self.phase.get().label();
        if record.trace.is_none() && self.lane().config.trace_context {
            // Its head made no sense, or never came.
            record.trace = Some(Trace::new(None, &self.lane().ids).ids());
        }
        let picks = match (log.sampling(), record.trace) {
            (Sampling::OneIn(_), None) => log.sampling().picks(self.lane().ids.next().into()),
            (sampling, trace) => sampling.picks(trace.map_or(0, |trace| trace.trace_id)),
        };
        if picks || record.is_remarkable() {
            log.put(record);
        }
    }
}

impl<B: Backend, P: Backplane> Walk<'_, '_, B, P> {
    /// Notes something down, where this is what the client asked for.
    pub(super) fn note(&self, note: impl FnOnce(&mut Record)) {
        if self.is_story {
            self.client.note(note);
        }
    }

    /// Notes how long a connection to an endpoint was tried for, once more.
    pub(super) fn note_connect(&self, since: Option<Instant>) {
        self.note(|record| {
            let took = since.map(|since| clock::now().saturating_duration_since(since)).unwrap_or_default();
            record.connect = Some(record.connect.unwrap_or_default() + took);
        });
    }

    /// Notes the prefill leg that is done.
    pub(super) fn note_prefill(&self, leg: &Leg<B::Stream>, position: usize, took: Duration) {
        self.note(|record| {
            record.prefill = Some(Box::new(PrefillLeg { ep_idx: position, endpoint: leg.address(), took }));
        });
    }

    /// Notes which endpoint has the request, or whose answer the client gets.
    pub(super) fn note_endpoint(&self, leg: &Leg<B::Stream>, position: usize) {
        self.note(|record| {
            (record.endpoint, record.ep_idx, record.reused) = (Some(leg.address()), Some(position), leg.reused);
        });
    }
}

impl<B: Backend, P: Backplane> Drop for Client<'_, B, P> {
    fn drop(&mut self) {
        self.close_entry();
    }
}

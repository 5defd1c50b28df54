//! Gauges of live state, set when a metrics page is made: a series goes when its rule goes.

use std::sync::atomic::{AtomicU64, Ordering};

use super::kv::EndpointKv;
use super::{Endpoint, Service, State};
use crate::clock;
use crate::contract::attest::Contract;
use crate::telemetry::Metrics;

/// Sets every gauge that shows what `state` holds now.
pub fn scrape(state: &State) {
    let metrics = &state.metrics;
    forget(metrics);
    for service in state.table().services() {
        for (position, endpoint) in service.endpoints.iter().enumerate() {
            show(metrics, service, position, endpoint);
        }
    }
    for (what, _why) in state.degraded() {
        metrics.degraded.with_label_values(&[what]).set(1);
    }
}

fn forget(metrics: &Metrics) {
    for family in [&metrics.blocks, &metrics.subscriber_connected, &metrics.endpoint_load, &metrics.endpoint_eligible] {
        family.reset();
    }
    metrics.contract.reset();
    metrics.degraded.reset();
    metrics.event_age_seconds.reset();
    metrics.event_lag_seconds.reset();
    for family in
        [&metrics.subscriber_reconnects, &metrics.subscriber_recv_errors, &metrics.cap_evictions, &metrics.event_stream]
    {
        family.reset();
    }
}

fn show(metrics: &Metrics, service: &Service, position: usize, endpoint: &Endpoint) {
    let (rule, ep_idx) = (service.rule().id.to_string(), position.to_string());
    let labels = [rule.as_str(), ep_idx.as_str()];
    metrics.endpoint_load.with_label_values(&labels).set(endpoint.meters.load().into());
    metrics.endpoint_eligible.with_label_values(&labels).set(endpoint.condition().eligible().into());
    if let Some(kv) = &endpoint.kv {
        show_kv(metrics, labels, &endpoint.spec.key.to_string(), kv);
    }
}

fn show_kv(metrics: &Metrics, labels: [&str; 2], place: &str, kv: &EndpointKv) {
    let status = kv.status(clock::now());
    metrics.blocks.with_label_values(&labels).set(i64::try_from(status.blocks).unwrap_or(i64::MAX));
    if let Some(age) = status.last_event_age {
        metrics.event_age_seconds.with_label_values(&labels).set(age.as_secs_f64());
        metrics.event_lag_seconds.with_label_values(&labels).set(kv.lag().as_secs_f64());
    }
    show_contract(metrics, labels, &status.contract);
    let of_socket = [labels[0], place];
    metrics.subscriber_connected.with_label_values(&of_socket).set(status.connected.into());
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let counters = &kv.counters;
    metrics.subscriber_reconnects.with_label_values(&of_socket).inc_by(read(&counters.reconnects));
    metrics.subscriber_recv_errors.with_label_values(&of_socket).inc_by(read(&counters.recv_errors));
    metrics.cap_evictions.with_label_values(&of_socket).inc_by(read(&counters.evicted));
    for (what, counter) in [
        ("batches", &counters.batches),
        ("stored", &counters.stored),
        ("removed", &counters.removed),
        ("unknown_removals", &counters.unknown_removals),
        ("gaps", &counters.gaps),
        ("missed", &counters.missed),
        ("restarts", &counters.restarts),
        ("replays", &counters.replays),
        ("duplicates", &counters.duplicates),
        ("dropped", &counters.dropped),
        ("undecodable", &counters.undecodable),
        ("unknown", &counters.unknown),
        ("ranks_refused", &counters.ranks_refused),
    ] {
        metrics.event_stream.with_label_values(&[labels[0], labels[1], what]).inc_by(read(counter));
    }
}

fn show_contract(metrics: &Metrics, labels: [&str; 2], contract: &Contract) {
    let leg = contract.leg().map_or("", |leg| leg.label());
    metrics.contract.with_label_values(&[labels[0], labels[1], contract.label(), leg]).set(1);
}

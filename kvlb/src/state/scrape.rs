//! Gauges of live state, set when a metrics page is made: a series goes when its rule goes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::core::Collector as _;
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGaugeVec};

use super::kv::EndpointKv;
use super::vitals::Vitals;
use super::{Endpoint, Service, State, Table};
use crate::clock;
use crate::contract::attest::Contract;
use crate::router::Reason;
use crate::telemetry::Metrics;

/// The metrics page, with every gauge set to what `state` holds now; `more` sets those that show something else. One page
/// is made at a time: what is read from live state is set anew for each, and two at once would count it twice.
///
/// # Errors
/// When a family cannot be encoded.
pub fn page(state: &State, more: impl FnOnce(&Metrics)) -> Result<String, prometheus::Error> {
    let _one_at_a_time = state.scraping.lock();
    set(state);
    more(&state.metrics);
    state.metrics.render()
}

fn set(state: &State) {
    let metrics = &state.metrics;
    forget(metrics);
    // A counter that is not there until it moves hides its first step from `increase()`.
    for reason in Reason::ALL {
        metrics.miss_reasons.with_label_values(&[reason.label()]);
    }
    let texts = state.texts.usage();
    metrics.text_parts.reset();
    metrics.text_parts.with_label_values(&["known"]).inc_by(texts.recalled);
    metrics.text_parts.with_label_values(&["new"]).inc_by(texts.unknown);
    metrics.text_bytes.set(i64::try_from(texts.bytes).unwrap_or(i64::MAX));
    let table = state.table();
    forget_requests(metrics, &table);
    for service in table.services() {
        metrics.breaker_panic.with_label_values(&[service.rule().id.to_string().as_str()]);
        show_pins(metrics, service);
        if service.rule().admission.is_some() {
            show_admission(metrics, service);
        }
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
    for family in [&metrics.sessions, &metrics.trie_nodes, &metrics.trie_bytes] {
        family.reset();
    }
    metrics.session_evictions.reset();
    metrics.trie_evictions.reset();
    forget_engines(metrics);
    forget_admission(metrics);
    metrics.contract.reset();
    metrics.keying.reset();
    metrics.orphans.reset();
    metrics.predicted_tokens.reset();
    metrics.reported_tokens.reset();
    metrics.degraded.reset();
    metrics.event_age_seconds.reset();
    metrics.event_lag_seconds.reset();
    for family in
        [&metrics.subscriber_reconnects, &metrics.subscriber_recv_errors, &metrics.cap_evictions, &metrics.event_stream]
    {
        family.reset();
    }
}

fn forget_engines(metrics: &Metrics) {
    for family in [&metrics.engine_waiting, &metrics.engine_running, &metrics.engine_blocks, &metrics.engine_missing] {
        family.reset();
    }
    metrics.engine_kv_usage.reset();
    metrics.engine_age_seconds.reset();
    metrics.engine_first_token_seconds.reset();
    for family in [
        &metrics.engine_prompt_tokens,
        &metrics.engine_generated_tokens,
        &metrics.engine_first_tokens,
        &metrics.engine_scrape_failures,
    ] {
        family.reset();
    }
}

fn forget_admission(metrics: &Metrics) {
    for family in [&metrics.admission_inflight, &metrics.admission_queued, &metrics.admission_endpoint_inflight] {
        family.reset();
    }
    metrics.admission_decisions.reset();
    metrics.admission_waits.reset();
    metrics.admission_wait_seconds.reset();
}

/// Requests are counted as they end, which may be after their rule went: its series go here.
fn forget_requests(metrics: &Metrics, table: &Table) {
    let in_force: BTreeSet<String> = table.services().iter().map(|service| service.rule().id.to_string()).collect();
    let families: [(&IntCounterVec, &[&str]); 7] = [
        (&metrics.tier_choices, &["service", "tier"]),
        (&metrics.session_repins, &["service", "kind", "reason"]),
        (&metrics.requests, &["service", "class"]),
        (&metrics.observed_choices, &["service", "result"]),
        (&metrics.observed_tokens, &["service"]),
        (&metrics.breaker_panic, &["service"]),
        (&metrics.breaker_opened, &["service", "ep_idx", "cause"]),
    ];
    for (counters, names) in families {
        for series in counters.collect().iter().flat_map(MetricFamily::get_metric) {
            let label = |name: &str| {
                series.get_label().iter().find(|label| label.name() == name).map_or("", |label| label.value())
            };
            let labels: Vec<_> = names.iter().map(|name| label(name)).collect();
            // Gone already is as good.
            if !in_force.contains(labels[0]) && counters.remove_label_values(&labels).is_err() {
                tracing::debug!(?labels, "no such series");
            }
        }
    }
}

fn show_pins(metrics: &Metrics, service: &Service) {
    let (rule, now) = (service.rule(), clock::now());
    let id = rule.id.to_string();
    let gauge = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let sessions = rule.keeps_sessions().then_some(("session", &service.pins.sessions));
    for (kind, table) in std::iter::once(("conversation", &service.pins.conversations)).chain(sessions) {
        let (usage, labels) = (table.usage(now), [id.as_str(), kind]);
        metrics.sessions.with_label_values(&labels).set(gauge(usage.entries));
        metrics.session_evictions.with_label_values(&labels).inc_by(usage.evicted);
    }
    if rule.pinning.trie.is_some() {
        let (usage, labels) = (service.pins.texts.usage(), [id.as_str()]);
        metrics.trie_nodes.with_label_values(&labels).set(gauge(usage.nodes));
        metrics.trie_bytes.with_label_values(&labels).set(gauge(usage.bytes));
        metrics.trie_evictions.with_label_values(&labels).inc_by(usage.evicted);
    }
}

fn show(metrics: &Metrics, service: &Service, position: usize, endpoint: &Endpoint) {
    let (rule, ep_idx) = (service.rule().id.to_string(), position.to_string());
    let labels = [rule.as_str(), ep_idx.as_str()];
    metrics.endpoint_load.with_label_values(&labels).set(endpoint.meters.load().into());
    metrics.endpoint_eligible.with_label_values(&labels).set(endpoint.condition().eligible().into());
    show_engine(metrics, labels, &endpoint.meters.vitals);
    if let Some(kv) = &endpoint.kv {
        metrics.hits.with_label_values(&[ep_idx.as_str()]);
        show_kv(metrics, labels, &endpoint.spec.key.to_string(), kv);
    }
}

fn show_admission(metrics: &Metrics, service: &Service) {
    let (rule, line) = (service.rule().id.to_string(), &service.line);
    for (verdict, count) in line.verdicts() {
        metrics.admission_decisions.with_label_values(&[rule.as_str(), verdict.label()]).inc_by(count);
    }
    let of_rule = [rule.as_str()];
    metrics.admission_inflight.with_label_values(&of_rule).set(line.held().into());
    metrics.admission_queued.with_label_values(&of_rule).set(line.queued().into());
    let (waits, time) = line.waits();
    metrics.admission_waits.with_label_values(&of_rule).inc_by(waits);
    metrics.admission_wait_seconds.with_label_values(&of_rule).inc_by(time.as_secs_f64());
    for (position, endpoint) in service.endpoints.iter().enumerate() {
        let labels = [rule.as_str(), &position.to_string()];
        metrics.admission_endpoint_inflight.with_label_values(&labels).set(endpoint.place.held().into());
    }
}

/// What is not known has no series, which is not the same as zero.
fn show_engine(metrics: &Metrics, labels: [&str; 2], vitals: &Vitals) {
    for (why, count) in vitals.failures().filter(|(_, count)| *count > 0) {
        metrics.engine_scrape_failures.with_label_values(&[labels[0], labels[1], why.label()]).inc_by(count);
    }
    let now = clock::now();
    let Some(last) = vitals.last() else { return };
    let age = now.saturating_duration_since(last.0);
    metrics.engine_age_seconds.with_label_values(&labels).set(age.as_secs_f64());
    let Some(fresh) = vitals.fresh(now) else { return };
    let said = &fresh.1;
    let missing = i64::try_from(said.missing().count()).unwrap_or(i64::MAX);
    metrics.engine_missing.with_label_values(&labels).set(missing);
    let gauge = |family: &IntGaugeVec, value: Option<i64>| {
        if let Some(value) = value {
            family.with_label_values(&labels).set(value);
        }
    };
    gauge(&metrics.engine_waiting, said.waiting.map(i64::from));
    gauge(&metrics.engine_running, said.running.map(i64::from));
    gauge(&metrics.engine_blocks, said.blocks.map(|blocks| i64::try_from(blocks).unwrap_or(i64::MAX)));
    if let Some(usage) = said.kv_usage {
        metrics.engine_kv_usage.with_label_values(&labels).set(usage);
    }
    let counter = |family: &IntCounterVec, value: Option<u64>| {
        if let Some(value) = value {
            family.with_label_values(&labels).inc_by(value);
        }
    };
    counter(&metrics.engine_prompt_tokens, said.prompt_tokens);
    counter(&metrics.engine_generated_tokens, said.generated_tokens);
    counter(&metrics.engine_first_tokens, said.first_token.map(|first| first.count));
    if let Some(first) = said.first_token {
        metrics.engine_first_token_seconds.with_label_values(&labels).inc_by(first.seconds);
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
    for (keying, holds) in [("parity", !status.rehashed), ("rehash", status.rehashed)] {
        metrics.keying.with_label_values(&[labels[0], labels[1], keying]).set(holds.into());
    }
    let sums = kv.ledger.totals().tokens;
    metrics.predicted_tokens.with_label_values(&labels).inc_by(sums.predicted);
    metrics.reported_tokens.with_label_values(&labels).inc_by(sums.reported);
    metrics.orphans.with_label_values(&labels).inc_by(kv.counters.orphans.load(Ordering::Relaxed));
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
        ("distrusted", &counters.distrusted),
        ("disproved", &counters.disproved),
    ] {
        metrics.event_stream.with_label_values(&[labels[0], labels[1], what]).inc_by(read(counter));
    }
}

fn show_contract(metrics: &Metrics, labels: [&str; 2], contract: &Contract) {
    let leg = contract.leg().map_or("", |leg| leg.label());
    metrics.contract.with_label_values(&[labels[0], labels[1], contract.label(), leg]).set(1);
}

//! What the proxy counts becomes metrics.

use std::sync::Arc;
use std::time::Duration;

use prometheus::core::{AtomicU64, GenericCounter};

use crate::proxy::{ConnectFailure, Direction, Meter, Phase, Pulse, Refused, Retry};
use crate::telemetry::Metrics;

/// A data thread that is later than this for its own tick has been held up.
const STALL: Duration = Duration::from_millis(50);

type Counter = GenericCounter<AtomicU64>;

/// Handles of the series that the data path touches for every request.
#[derive(Debug)]
pub(super) struct ProxyMeter {
    metrics: Arc<Metrics>,
    to_endpoint: Counter,
    to_client: Counter,
    connected: Counter,
}

impl ProxyMeter {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        let to_endpoint = metrics.bytes.with_label_values(&[Direction::ToEndpoint.label()]);
        let to_client = metrics.bytes.with_label_values(&[Direction::ToClient.label()]);
        let connected = metrics.endpoint_connects.with_label_values(&["ok"]);
        Self { metrics, to_endpoint, to_client, connected }
    }
}

impl Meter for ProxyMeter {
    fn client_opened(&self) {
        self.metrics.connections.inc();
        self.metrics.connections_open.inc();
    }

    fn client_closed(&self) {
        self.metrics.connections_open.dec();
    }

    fn client_refused(&self, cause: Refused) {
        self.metrics.connections_refused.with_label_values(&[cause.label()]).inc();
    }

    fn accept_failed(&self) {
        self.metrics.connections_refused.with_label_values(&["accept_failed"]).inc();
    }

    fn client_left(&self, phase: Phase) {
        self.metrics.client_aborts.with_label_values(&[phase.label()]).inc();
    }

    fn answered(&self, _status: u16, own_code: Option<&'static str>) {
        if let Some(code) = own_code {
            self.metrics.own_errors.with_label_values(&[code]).inc();
        }
    }

    fn relayed(&self, direction: Direction, bytes: u64) {
        match direction {
            Direction::ToEndpoint => self.to_endpoint.inc_by(bytes),
            Direction::ToClient => self.to_client.inc_by(bytes),
        }
    }

    fn retried(&self, cause: Retry) {
        self.metrics.retries.with_label_values(&[cause.label()]).inc();
    }

    fn connected(&self, failure: Option<ConnectFailure>) {
        match failure {
            None => self.connected.inc(),
            Some(failure) => self.metrics.endpoint_connects.with_label_values(&[failure.label()]).inc(),
        }
    }

    fn reused(&self) {
        self.metrics.endpoint_reuses.inc();
    }

    fn offloaded(&self) {
        self.metrics.decisions_offloaded.inc();
    }

    fn panicked(&self) {
        self.metrics.panics.inc();
    }

    fn tick(&self, pulse: &Pulse) {
        let thread = pulse.thread.to_string();
        let thread = [thread.as_str()];
        let gauge = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.metrics.tick_lag_seconds.with_label_values(&thread).set(pulse.late.as_secs_f64());
        self.metrics.endpoint_idle.with_label_values(&thread).set(gauge(pulse.idle_endpoint_connections));
        self.metrics.thread_connections.with_label_values(&thread).set(gauge(pulse.clients));
        self.metrics.buffer_bytes.with_label_values(&thread).set(gauge(pulse.buffer_bytes));
        self.metrics.body_bytes_held.set(gauge(pulse.body_bytes_held));
        if let Some(held) = pulse.held {
            self.metrics.loop_stall_seconds.with_label_values(&thread).observe(held.as_secs_f64());
        }
        if pulse.late > STALL {
            self.metrics.stalls.with_label_values(&thread).inc();
        }
    }
}

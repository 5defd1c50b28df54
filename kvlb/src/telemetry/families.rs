//! The families, as a table.

use prometheus::{
    CounterVec, Encoder, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

/// Seconds: decisions take microseconds when warm and milliseconds when cold.
const DECISION_BUCKETS: [f64; 14] = [1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2, 0.1];

/// Seconds: an answer's first byte comes after a prefill, which takes milliseconds to minutes.
const FIRST_BYTE_BUCKETS: [f64; 14] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];

/// Seconds: one task's turn takes microseconds; what takes a millisecond is worth knowing.
const LOOP_STALL_BUCKETS: [f64; 12] = [1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.2, 1.0];

macro_rules! families {
    ($( $(#[doc = $doc:literal])+ $field:ident: $kind:tt($name:literal $(, [$($label:literal),*])? $(, buckets $buckets:expr)?); )*) => {
        /// Every family that kvlb serves. The help text of each is its line here.
        #[derive(Debug)]
        pub struct Metrics {
            registry: Registry,
            $( $(#[doc = $doc])+ pub $field: families!(@type $kind), )*
        }

        impl Metrics {
            /// Registers every family.
            ///
            /// # Errors
            /// When two families of this table share a name.
            pub fn new() -> Result<Self, prometheus::Error> {
                let registry = Registry::new();
                $(
                    let help = concat!($($doc),+).trim();
                    let $field = families!(@new $kind, $name, help, [$($($label),*)?] $(, $buckets)?)?;
                    registry.register(Box::new($field.clone()))?;
                )*
                Ok(Self { registry, $( $field, )* })
            }
        }
    };
    (@type counter) => { IntCounter };
    (@type counters) => { IntCounterVec };
    (@type gauge) => { IntGauge };
    (@type gauges) => { IntGaugeVec };
    (@type floats) => { GaugeVec };
    (@type seconds) => { CounterVec };
    (@type histograms) => { HistogramVec };
    (@new counter, $name:expr, $help:expr, []) => { IntCounter::with_opts(Opts::new($name, $help)) };
    (@new counters, $name:expr, $help:expr, [$($label:literal),*]) => { IntCounterVec::new(Opts::new($name, $help), &[$($label),*]) };
    (@new gauge, $name:expr, $help:expr, []) => { IntGauge::with_opts(Opts::new($name, $help)) };
    (@new gauges, $name:expr, $help:expr, [$($label:literal),*]) => { IntGaugeVec::new(Opts::new($name, $help), &[$($label),*]) };
    (@new floats, $name:expr, $help:expr, [$($label:literal),*]) => { GaugeVec::new(Opts::new($name, $help), &[$($label),*]) };
    (@new seconds, $name:expr, $help:expr, [$($label:literal),*]) => { CounterVec::new(Opts::new($name, $help), &[$($label),*]) };
    (@new histograms, $name:expr, $help:expr, [$($label:literal),*], $buckets:expr) => {
        HistogramVec::new(HistogramOpts::new($name, $help).buckets($buckets.to_vec()), &[$($label),*])
    };
}

families! {
    // The source document's.
    /// Requests for which the KV tier selected this endpoint.
    hits: counters("loxilb_pd_kv_tier15_hits_total", ["ep_idx"]);
    /// Requests that the KV tier had no word for, by the guard that failed.
    miss_reasons: counters("loxilb_pd_kv_tier15_miss_reason_total", ["reason"]);
    /// Requests that left the KV tier for the fallback.
    fallthrough: counter("loxilb_pd_kv_tier15_fallthrough_total");
    /// Requests that the load bound moved away from the largest overlap, by the endpoint that got them.
    spills: counters("loxilb_pd_kv_tier15_spills_total", ["ep_idx"]);
    /// Requests that went to an endpoint with next to no blocks, so that it gets some, instead of to the one chosen for its
    /// overlap; by the endpoint that got them.
    cold_seeds: counters("loxilb_pd_kv_tier15_cold_seeds_total", ["ep_idx"]);
    /// Blocks in the mirror of one endpoint's cache.
    blocks: gauges("loxilb_pd_kv_blocks", ["service", "ep_idx"]);
    /// The event socket of one endpoint is up (1) or down (0).
    subscriber_connected: gauges("loxilb_kv_subscriber_connected", ["service", "ep"]);
    /// Event sockets rebuilt after the first connection.
    subscriber_reconnects: counters("loxilb_kv_subscriber_reconnect_total", ["service", "ep"]);
    /// Errors while receiving events.
    subscriber_recv_errors: counters("loxilb_kv_subscriber_recv_error_total", ["service", "ep"]);
    /// Names dropped from a mirror because it was at its bound.
    cap_evictions: counters("loxilb_kv_inv_cap_evictions_total", ["service", "ep"]);

    // Our own: decisions.
    /// Misses by guard and exact cause.
    miss_details: counters("kvlb_miss_details_total", ["reason", "detail"]);
    /// Time a decision took, by step.
    decision_seconds: histograms("kvlb_decision_seconds", ["step"], buckets DECISION_BUCKETS);
    /// Decisions handed to the worker pool because they would hold a data thread for too long.
    decisions_offloaded: counter("kvlb_decisions_offloaded_total");
    /// Parts of prompts that were looked up in the memory of what prompts began with: known, or new.
    text_parts: counters("kvlb_text_parts_total", ["result"]);
    /// Bytes of that memory in use.
    text_bytes: gauge("kvlb_text_cache_bytes");
    /// Blocks of prompts that the chosen endpoint held, as announced.
    matched_blocks: counter("kvlb_matched_blocks_total");
    /// Blocks of prompts that were named.
    prompt_blocks: counter("kvlb_prompt_blocks_total");

    /// Requests by the tier that chose their endpoint: `1` conversation, `1-trie` text, `1.5` KV overlap, `2` selector.
    tier_choices: counters("kvlb_tier_choices_total", ["service", "tier"]);
    /// Conversations and sessions that are remembered.
    sessions: gauges("kvlb_sessions", ["service", "kind"]);
    /// Conversations and sessions that were forgotten for want of room.
    session_evictions: counters("kvlb_session_evictions_total", ["service", "kind"]);
    /// Requests that did not go where their conversation or session was, by cause.
    session_repins: counters("kvlb_session_repins_total", ["service", "kind", "reason"]);
    /// Nodes in the memory of prompts' texts.
    trie_nodes: gauges("kvlb_trie_nodes", ["service"]);
    /// Bytes of that memory in use.
    trie_bytes: gauges("kvlb_trie_bytes", ["service"]);
    /// Nodes of that memory that went for want of room.
    trie_evictions: counters("kvlb_trie_evictions_total", ["service"]);

    /// Legs of split requests by how they ended.
    pd_legs: counters("kvlb_pd_legs_total", ["service", "leg", "result"]);
    /// Prefill legs that are done, from their beginning to the end of their answer.
    pd_prefill_seconds: histograms("kvlb_pd_prefill_seconds", ["service"], buckets FIRST_BYTE_BUCKETS);
    /// What prefill legs returned: `passed_on` to the decode leg, or `none`, which then computes the prompt itself.
    pd_transfers: counters("kvlb_pd_transfers_total", ["handoff", "result"]);
    /// Requests of splitting rules that one endpoint served alone, by reason.
    pd_whole: counters("kvlb_pd_whole_total", ["service", "reason"]);
    /// Short decode legs sent to free the blocks of clients that left between the legs.
    pd_releases: counters("kvlb_pd_releases_total", ["service"]);

    /// Requests sent after others under way that bring the same blocks, by endpoint; none of them is a hit.
    expected_choices: counters("kvlb_expected_choices_total", ["ep_idx"]);
    /// Cached prompt tokens that were predicted, of requests whose engine reports its own number.
    predicted_tokens: counters("kvlb_predicted_cached_tokens_total", ["service", "ep_idx"]);
    /// Cached prompt tokens as engines report them.
    reported_tokens: counters("kvlb_reported_cached_tokens_total", ["service", "ep_idx"]);
    /// Requests of rules that only observe, by what the KV tier would have chosen: the same endpoint, another, or none.
    observed_choices: counters("kvlb_observed_choices_total", ["service", "result"]);
    /// Prompt tokens that the KV tier's choices would have spared beyond the selector's, on rules that only observe.
    observed_tokens: counters("kvlb_observed_spared_tokens_total", ["service"]);

    // The proxy.
    /// Client connections accepted.
    connections: counter("kvlb_client_connections_total");
    /// Client connections open now.
    connections_open: gauge("kvlb_client_connections_open");
    /// Client connections refused, by cause.
    connections_refused: counters("kvlb_client_connections_refused_total", ["reason"]);
    /// Requests answered, by rule and status class.
    requests: counters("kvlb_requests_total", ["service", "class"]);
    /// Answers made by kvlb itself, by error code.
    own_errors: counters("kvlb_errors_total", ["code"]);
    /// Requests sent to another endpoint or once more, by cause.
    retries: counters("kvlb_retries_total", ["reason"]);
    /// Clients that left, by the phase they left in.
    client_aborts: counters("kvlb_client_aborts_total", ["phase"]);
    /// Connections opened to endpoints.
    endpoint_connects: counters("kvlb_endpoint_connects_total", ["result"]);
    /// Requests that went out on a connection that was open already.
    endpoint_reuses: counter("kvlb_endpoint_reuses_total");
    /// Connections to endpoints that wait for a request.
    endpoint_idle: gauges("kvlb_endpoint_idle_connections", ["thread"]);
    /// Client connections open on a data thread.
    thread_connections: gauges("kvlb_data_thread_connections", ["thread"]);
    /// Bytes of all buffers of the data path, in use or kept for use.
    buffer_bytes: gauges("kvlb_buffer_bytes", ["thread"]);
    /// Connections lost to a panic of ours; any is a bug.
    panics: counter("kvlb_panics_total");
    /// Time from the end of a request to the first byte of its answer.
    first_byte_seconds: histograms("kvlb_first_byte_seconds", ["tier"], buckets FIRST_BYTE_BUCKETS);
    /// Bytes relayed, by direction.
    bytes: counters("kvlb_bytes_total", ["direction"]);
    /// Bytes of request bodies held in memory now.
    body_bytes_held: gauge("kvlb_body_bytes_held");
    /// Times a data thread was late for its own clock tick by more than 50 ms.
    stalls: counters("kvlb_data_thread_stalls_total", ["thread"]);
    /// The longest time that one task held a data thread while all others waited, for each 50 ms in which it had work.
    loop_stall_seconds: histograms("kvlb_loop_stall_seconds", ["thread"], buckets LOOP_STALL_BUCKETS);
    /// How late a data thread's last clock tick was.
    tick_lag_seconds: floats("kvlb_data_thread_tick_lag_seconds", ["thread"]);

    /// Breakers that opened, by rule, endpoint and what failed.
    breaker_opened: counters("kvlb_breaker_opened_total", ["service", "ep_idx", "cause"]);
    /// Choices for which open breakers were passed over: they would have taken out more than half of a rule's endpoints.
    breaker_panic: counters("kvlb_breaker_panic_total", ["service"]);

    // Endpoints.
    /// Requests in flight at an endpoint.
    endpoint_load: gauges("kvlb_endpoint_load", ["service", "ep_idx"]);
    /// Whether an endpoint may be asked (1) or not (0).
    endpoint_eligible: gauges("kvlb_endpoint_eligible", ["service", "ep_idx"]);
    /// The contract with an endpoint, as the events prove it: 1 for the state and leg that hold now.
    contract: gauges("kvlb_contract_state", ["service", "ep_idx", "state", "leg"]);
    /// Seconds from the making of an endpoint's last event batch to its arrival here, by both clocks.
    event_lag_seconds: floats("kvlb_event_lag_seconds", ["service", "ep_idx"]);
    /// Seconds since the last event batch of an endpoint was applied.
    event_age_seconds: floats("kvlb_event_age_seconds", ["service", "ep_idx"]);
    /// How an endpoint's blocks are named: 1 for the way that holds now.
    keying: gauges("kvlb_keying", ["service", "ep_idx", "keying"]);
    /// Announced blocks that have no name of ours because their parent was never announced.
    orphans: counters("kvlb_rehash_orphans_total", ["service", "ep_idx"]);
    /// What happened on an endpoint's event stream.
    event_stream: counters("kvlb_event_stream_total", ["service", "ep_idx", "what"]);

    // Admission, of rules that have it.
    /// What became of requests at the gate, by rule: admitted, made to wait, refused, given up.
    admission_decisions: counters("kvlb_admission_decisions_total", ["service", "reason"]);
    /// Requests of a rule that are at endpoints.
    admission_inflight: gauges("kvlb_admission_inflight", ["service"]);
    /// Requests of a rule that wait for a place.
    admission_queued: gauges("kvlb_admission_queued", ["service"]);
    /// Requests at an endpoint, of all rules with admission.
    admission_endpoint_inflight: gauges("kvlb_admission_endpoint_inflight", ["service", "ep_idx"]);
    /// Waits that ended at an endpoint.
    admission_waits: counters("kvlb_admission_waits_total", ["service"]);
    /// Seconds that they took, in all.
    admission_wait_seconds: seconds("kvlb_admission_wait_seconds_total", ["service"]);

    // What engines say of their work; a series is absent while it is not known.
    /// Requests in an engine's own queue.
    engine_waiting: gauges("kvlb_engine_requests_waiting", ["service", "ep_idx"]);
    /// Requests that an engine works on.
    engine_running: gauges("kvlb_engine_requests_running", ["service", "ep_idx"]);
    /// The share of an engine's KV cache in use, of its fullest rank.
    engine_kv_usage: floats("kvlb_engine_kv_cache_usage_ratio", ["service", "ep_idx"]);
    /// KV blocks of an engine's cache, over all its ranks.
    engine_blocks: gauges("kvlb_engine_kv_cache_blocks", ["service", "ep_idx"]);
    /// Tokens of prompts that an engine took.
    engine_prompt_tokens: counters("kvlb_engine_prompt_tokens_total", ["service", "ep_idx"]);
    /// Tokens that an engine made.
    engine_generated_tokens: counters("kvlb_engine_generation_tokens_total", ["service", "ep_idx"]);
    /// Answers of an engine that began.
    engine_first_tokens: counters("kvlb_engine_first_tokens_total", ["service", "ep_idx"]);
    /// Seconds until they did, in all.
    engine_first_token_seconds: seconds("kvlb_engine_first_token_seconds_total", ["service", "ep_idx"]);
    /// Seconds since an engine's metrics were read.
    engine_age_seconds: floats("kvlb_engine_scrape_age_seconds", ["service", "ep_idx"]);
    /// Families that an engine should show and does not.
    engine_missing: gauges("kvlb_engine_missing_families", ["service", "ep_idx"]);
    /// Looks at an engine's metrics that came to nothing, by cause.
    engine_scrape_failures: counters("kvlb_engine_scrape_failures_total", ["service", "ep_idx", "reason"]);

    // Kernel side.
    /// Connections that the kernel steered to a data thread, by VIP.
    steered: counters("kvlb_kernel_steered_total", ["vip"]);
    /// Connections that the kernel did not steer although the VIP is ours, by VIP.
    not_steered: counters("kvlb_kernel_not_steered_total", ["vip"]);
    /// Connections and frames for a VIP that the kernel dropped, by cause: `denied`, `no_endpoint` and `no_listener` by
    /// steering, `acl`, `rate` and `cut` at the devices of `--xdp-dev`; `chain` there too, for no VIP in particular.
    drops: counters("kvlb_kernel_drops_total", ["vip", "reason"]);
    /// Those of them that the kernel told of one by one: some ten a second of each cause and CPU.
    drop_samples: counters("kvlb_kernel_drop_samples_total", ["reason"]);

    /// Frames for a VIP at the devices of `--xdp-dev`, by what became of them: `syn` and `other` passed; `rate` (more than
    /// `synRate`), `acl` (not in `allowedSources`) and `cut` (a fragment that hides TCP's flags) were dropped.
    xdp_packets: counters("kvlb_xdp_packets_total", ["vip", "verdict"]);
    /// Frames for no VIP there: `foreign`, `fragment` and `malformed` passed, `chain` (too many IPv6 headers) were dropped.
    xdp_frames: counters("kvlb_xdp_frames_total", ["kind"]);
    /// 1 for each device at which frames are judged, by its driver (`native`) or behind it (`generic`).
    xdp_attached: gauges("kvlb_xdp_attached", ["device", "mode"]);

    // The access log.
    /// Lines of the access log that were written.
    access_log_lines: counter("kvlb_access_log_lines_total");
    /// Lines of the access log that were not, by cause.
    access_log_dropped: counters("kvlb_access_log_dropped_total", ["reason"]);

    // The decision log.
    /// Lines of the decision log that were written.
    decision_log_lines: counter("kvlb_decision_log_lines_total");
    /// Lines of the decision log that were not, by cause.
    decision_log_dropped: counters("kvlb_decision_log_dropped_total", ["reason"]);

    // The API.
    /// Requests and connections that the API turned away, by cause.
    api_denied: counters("kvlb_api_denied_total", ["reason"]);
    /// Changed files of the API's tokens or TLS that were of no use, so that what they held before stays in force.
    api_reload_failures: counters("kvlb_api_reload_failures_total", ["what", "reason"]);

    // The process.
    /// 1 for each degraded state that holds now.
    degraded: gauges("kvlb_degraded", ["what"]);
    /// Takeovers by their end: `taken`, `taken_cold` (before all inventories were here), `handed_over`, `failed`, `refused`.
    takeovers: counters("kvlb_takeovers_total", ["outcome"]);
    /// 1; the labels say what runs.
    build_info: gauges("kvlb_build_info", ["version", "datapath", "io"]);
}

impl Metrics {
    /// The page, in Prometheus text format.
    ///
    /// # Errors
    /// When a family cannot be encoded.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        let mut page = Vec::with_capacity(16 << 10);
        TextEncoder::new().encode(&self.registry.gather(), &mut page)?;
        String::from_utf8(page).map_err(|error| prometheus::Error::Msg(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_its_own_name_and_the_page_renders() {
        let metrics = Metrics::new().expect("names are unique");
        metrics.hits.with_label_values(&["0"]).inc();
        metrics.miss_reasons.with_label_values(&["no_worker"]).inc();
        let page = metrics.render().expect("page renders");
        assert!(page.contains("loxilb_pd_kv_tier15_hits_total{ep_idx=\"0\"} 1"), "{page}");
        assert!(page.contains("loxilb_pd_kv_tier15_fallthrough_total 0"), "{page}");
    }
}

//! What the engine counts about itself, for `/metrics`.

use std::collections::BTreeMap;
use std::time::Duration;

/// Counters and observations since the engine's start.
#[derive(Debug, Default)]
pub(super) struct Stats {
    /// Prompt tokens looked up in the cache.
    pub(super) prefix_queries: u64,
    /// Prompt tokens found there.
    pub(super) prefix_hits: u64,
    /// Requests that lost their blocks and started over.
    pub(super) preemptions: u64,
    /// Prompt tokens of requests that reached their first token.
    pub(super) prompt_tokens: u64,
    /// Those of them that came from the cache.
    pub(super) cached_tokens: u64,
    /// Those of them that came from another engine.
    pub(super) pulled_tokens: u64,
    /// Prompt tokens asked of other engines.
    pub(super) external_queries: u64,
    /// Those of them that came.
    pub(super) external_hits: u64,
    /// Reads from another engine that failed.
    pub(super) failed_pulls: u64,
    /// Leases that nobody read in time.
    pub(super) expired_leases: u64,
    /// Tokens generated.
    pub(super) generation_tokens: u64,
    /// Ended requests by `finished_reason`; aborted ones do not count (recorded).
    pub(super) finished: BTreeMap<&'static str, u64>,
    /// Histograms by metric family.
    pub(super) histograms: BTreeMap<&'static str, Histogram>,
}

/// One request that ended by itself.
#[derive(Debug)]
pub(super) struct Finished {
    /// `finished_reason`.
    pub(super) reason: &'static str,
    /// Prompt tokens.
    pub(super) prompt: usize,
    /// Those not found in the cache.
    pub(super) computed: usize,
    /// Tokens generated.
    pub(super) generated: usize,
    /// Choices asked for.
    pub(super) n: usize,
    /// How often it started over.
    pub(super) preemptions: usize,
    /// Time before it first ran.
    pub(super) queued: Duration,
    /// Time until its first token.
    pub(super) prefill: Duration,
    /// Time from the first token to the last.
    pub(super) decode: Duration,
}

impl Stats {
    /// A request was admitted for the first time.
    pub(super) fn admitted(&mut self, queried: usize, hits: usize) {
        self.prefix_queries += wide(queried);
        self.prefix_hits += wide(hits);
    }

    /// Tokens were asked of another engine; how many came.
    pub(super) fn pulled(&mut self, asked: usize, came: usize) {
        self.external_queries += wide(asked);
        self.external_hits += wide(came);
        self.failed_pulls += u64::from(came < asked);
    }

    /// A step ran.
    pub(super) fn step(&mut self, prefill: usize, decodes: usize) {
        self.observe("vllm:iteration_tokens_total", real(prefill + decodes));
    }

    /// A prompt is computed.
    pub(super) fn first_token(&mut self, prompt: usize, cached: usize, pulled: usize, after: Duration) {
        self.prompt_tokens += wide(prompt);
        self.cached_tokens += wide(cached);
        self.pulled_tokens += wide(pulled);
        self.generation_tokens += 1;
        self.observe("vllm:time_to_first_token_seconds", after.as_secs_f64());
    }

    /// One more token of a running request.
    pub(super) fn next_token(&mut self, after: Duration) {
        self.generation_tokens += 1;
        self.observe("vllm:inter_token_latency_seconds", after.as_secs_f64());
    }

    /// A request ended by itself.
    pub(super) fn finished(&mut self, request: &Finished) {
        *self.finished.entry(request.reason).or_default() += 1;
        let inference = request.prefill + request.decode;
        self.observe("vllm:request_prompt_tokens", real(request.prompt));
        self.observe("vllm:request_generation_tokens", real(request.generated));
        self.observe("vllm:request_max_num_generation_tokens", real(request.generated));
        self.observe("vllm:request_params_n", real(request.n));
        self.observe("vllm:request_params_max_tokens", real(request.generated));
        self.observe("vllm:e2e_request_latency_seconds", (request.queued + inference).as_secs_f64());
        self.observe("vllm:request_queue_time_seconds", request.queued.as_secs_f64());
        self.observe("vllm:request_inference_time_seconds", inference.as_secs_f64());
        self.observe("vllm:request_prefill_time_seconds", request.prefill.as_secs_f64());
        self.observe("vllm:request_decode_time_seconds", request.decode.as_secs_f64());
        self.observe("vllm:request_num_preemptions", real(request.preemptions));
        self.observe("vllm:request_prefill_kv_computed_tokens", real(request.computed));
        if request.generated > 1 {
            let each = request.decode.as_secs_f64() / real(request.generated - 1);
            self.observe("vllm:request_time_per_output_token_seconds", each);
        }
    }

    fn observe(&mut self, family: &'static str, value: f64) {
        self.histograms.entry(family).or_default().observe(value);
    }
}

/// Observations kept coarsely: exact count and sum, and counts by bound up to the largest used in the recorded metrics.
#[derive(Debug, Default)]
pub(super) struct Histogram {
    /// Observations.
    pub(super) count: u64,
    /// Their sum.
    pub(super) sum: f64,
    /// Count per quarter of a power of two, by exponent; the bounds of the metrics are read from it.
    grains: BTreeMap<i32, u64>,
}

impl Histogram {
    fn observe(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
        *self.grains.entry(grain(value)).or_default() += 1;
    }

    /// Observations at most `bound`, within the width of a grain (1/64 of a power of two).
    pub(super) fn at_most(&self, bound: f64) -> u64 {
        self.grains.range(..=grain(bound)).map(|(_, count)| count).sum()
    }
}

fn grain(value: f64) -> i32 {
    if value <= 0.0 {
        return i32::MIN;
    }
    #[expect(clippy::cast_possible_truncation, reason = "64 × log2 of an f64 is far inside i32; `as` saturates beyond")]
    let grain = (value.log2() * 64.0).ceil() as i32;
    grain
}

fn wide(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

fn real(n: usize) -> f64 {
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::Stats;

    #[test]
    fn a_histogram_counts_by_bound() {
        let mut stats = Stats::default();
        for tokens in [0, 1, 2, 10, 100] {
            stats.step(tokens, 0);
        }
        let histogram = &stats.histograms["vllm:iteration_tokens_total"];
        let counts = [0.0, 1.0, 8.0, 16.0, 128.0, f64::INFINITY].map(|bound| histogram.at_most(bound));
        assert_eq!((counts, histogram.count), ([1, 2, 3, 4, 5, 5], 5));
    }
}

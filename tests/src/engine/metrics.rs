//! `/metrics` in the shape of the recorded engine: its families, labels and buckets, with this engine's values.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use super::config::EngineConfig;
use super::handoff::KvConnector;
use super::rank::Rank;
use super::scheduler::Scheduler;

/// The recorded text without its values (see `tests/golden/vllm-0.32.0/metrics.txt.gz`). A value that stays is fixed; the series of
/// the `http_*` families come from the journal or are left out.
const TEMPLATE: &str = include_str!("metrics.template");

/// Answers counted by handler, method and status class.
pub(super) type HttpCounts = BTreeMap<(String, String, String), u64>;

/// The whole text.
pub(super) fn render(config: &EngineConfig, ranks: &[Arc<Rank>], started: f64, http: &HttpCounts) -> String {
    let template = fill(config);
    let mut out = String::with_capacity(template.len() * 2);
    for line in template.lines() {
        // Each rank has its own series, as a label says.
        let of_ranks = if line.contains("engine=\"0\"") { ranks } else { &ranks[..ranks.len().min(1)] };
        for rank in of_ranks {
            series(&mut out, line, &Values { scheduler: &rank.scheduler(), started }, rank.number);
        }
        if line.starts_with("# TYPE http_requests_total ") {
            for ((handler, method, status), count) in http {
                let _infallible = writeln!(
                    out,
                    "http_requests_total{{handler=\"{handler}\",method=\"{method}\",status=\"{status}\"}} {count}.0"
                );
            }
        }
    }
    out
}

fn series(out: &mut String, line: &str, values: &Values<'_>, rank: usize) {
    out.push_str(&line.replace("engine=\"0\"", &format!("engine=\"{rank}\"")));
    if !line.starts_with('#') && line.ends_with(|c: char| c == '}' || c.is_ascii_lowercase()) {
        let (name, labels) = line.split_once('{').unwrap_or((line, ""));
        let _infallible = write!(out, " {:?}", values.of(name, labels));
    }
    out.push('\n');
}

/// Families that an engine with a NIXL connector has besides; read in vLLM's source, the recorded engine had none.
const NIXL: &str = "\
# HELP vllm:nixl_num_failed_transfers_total Number of failed NIXL KV Cache transfers.
# TYPE vllm:nixl_num_failed_transfers_total counter
vllm:nixl_num_failed_transfers_total{engine=\"0\",model_name=\"@MODEL@\"}
# HELP vllm:nixl_num_kv_expired_reqs_total Number of requests that had their KV expire.
# TYPE vllm:nixl_num_kv_expired_reqs_total counter
vllm:nixl_num_kv_expired_reqs_total{engine=\"0\",model_name=\"@MODEL@\"}
";

fn fill(config: &EngineConfig) -> String {
    let tokens = config.num_gpu_blocks * config.block_size;
    let hundredths = tokens * 100 / config.max_model_len.max(1);
    let caching = if config.no_prefix_caching { "False" } else { "True" };
    let template =
        if config.kv_connector == KvConnector::Nixl { [TEMPLATE, NIXL].concat() } else { TEMPLATE.to_owned() };
    template
        .replace("@MODEL@", &config.model)
        .replace("@BLOCK_SIZE@", &config.block_size.to_string())
        .replace("@POOL_TOKENS@", &tokens.to_string())
        .replace("@BLOCKS@", &config.num_gpu_blocks.to_string())
        .replace("@ALGO@", config.prefix_caching_hash_algo.label())
        .replace("@CACHING@", caching)
        .replace("@CONCURRENCY@", &format!("{}.{:02}", hundredths / 100, hundredths % 100))
}

struct Values<'s> {
    scheduler: &'s Scheduler,
    started: f64,
}

impl Values<'_> {
    /// The value of one series; 0 for what this engine does not have.
    fn of(&self, name: &str, labels: &str) -> f64 {
        let stats = &self.scheduler.stats;
        let has = |label: &str| labels.contains(label);
        let only = |label: &str, value: u64| if has(label) { real(value) } else { 0.0 };
        match name {
            "process_start_time_seconds" => self.started,
            "vllm:num_requests_running" => real(wide(self.scheduler.running())),
            "vllm:num_requests_waiting" => real(wide(self.scheduler.waiting())),
            "vllm:num_requests_waiting_by_reason" if has("\"deferred\"") => real(wide(self.scheduler.pulling())),
            "vllm:num_requests_waiting_by_reason" => real(wide(self.scheduler.waiting() - self.scheduler.pulling())),
            "vllm:kv_cache_usage_perc" => self.scheduler.pool().usage(),
            "vllm:prefix_cache_queries_total" => real(stats.prefix_queries),
            "vllm:prefix_cache_hits_total" => real(stats.prefix_hits),
            "vllm:num_preemptions_total" => real(stats.preemptions),
            "vllm:prompt_tokens_total" => real(stats.prompt_tokens),
            "vllm:prompt_tokens_by_source_total" if has("\"local_compute\"") => {
                real(stats.prompt_tokens - stats.cached_tokens - stats.pulled_tokens)
            }
            "vllm:prompt_tokens_by_source_total" if has("\"external_kv_transfer\"") => real(stats.pulled_tokens),
            "vllm:prompt_tokens_by_source_total" => only("\"local_cache_hit\"", stats.cached_tokens),
            "vllm:prompt_tokens_cached_total" => real(stats.cached_tokens + stats.pulled_tokens),
            "vllm:prompt_tokens_cached_by_source_total" if has("\"p2p\"") => real(stats.pulled_tokens),
            "vllm:prompt_tokens_cached_by_source_total" => only("\"device\"", stats.cached_tokens),
            "vllm:external_prefix_cache_queries_total" => real(stats.external_queries),
            "vllm:external_prefix_cache_hits_total" => real(stats.external_hits),
            "vllm:nixl_num_failed_transfers_total" => real(stats.failed_pulls),
            "vllm:nixl_num_kv_expired_reqs_total" => real(stats.expired_leases),
            "vllm:generation_tokens_total" => real(stats.generation_tokens),
            "vllm:request_success_total" => stats
                .finished
                .iter()
                .find(|(reason, _)| has(&format!("finished_reason=\"{reason}\"")))
                .map_or(0.0, |(_, n)| real(*n)),
            _ if name.ends_with("_created") => self.started,
            _ => self.histogram(name, labels),
        }
    }

    fn histogram(&self, name: &str, labels: &str) -> f64 {
        let family =
            |suffix: &str| name.strip_suffix(suffix).and_then(|family| self.scheduler.stats.histograms.get(family));
        if let Some(histogram) = family("_bucket") {
            return real(histogram.at_most(bound(labels)));
        }
        family("_sum")
            .map(|histogram| histogram.sum)
            .or_else(|| family("_count").map(|histogram| real(histogram.count)))
            .unwrap_or(0.0)
    }
}

fn bound(labels: &str) -> f64 {
    let text = labels.split_once("le=\"").and_then(|(_, rest)| rest.split('"').next()).unwrap_or("+Inf");
    text.parse().unwrap_or(f64::INFINITY)
}

fn wide(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "counters of a test stay far below 2^53")]
fn real(n: u64) -> f64 {
    n as f64
}

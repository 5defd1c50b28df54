//! How busy an engine says that it is.

use super::read::Asker;
use crate::fleet::{Dialect, EndpointKey, FirstTokens, Missing, Reading, Readings};
use crate::ingest::next_label;

/// Bytes of a page that are read: engines answer with some 100 KB.
const PAGE_MAX: usize = 4 << 20;

/// Asks an engine for its metrics once, and reads what is of use. A page on which nothing is known is read as `usual`'s.
///
/// # Errors
/// Why there is no page.
pub async fn scrape(asker: &Asker, place: &EndpointKey, usual: Dialect) -> Result<Readings, Missing> {
    let page = asker.get(place, usual.path(), PAGE_MAX).await?;
    Ok(readings(&String::from_utf8_lossy(&page), usual))
}

/// Reads a Prometheus text by the names of the kind of engine that most of it is of, in doubt `usual`'s.
pub fn readings(text: &str, usual: Dialect) -> Readings {
    let mut found = Dialect::ALL.map(|dialect| (dialect, [Sums::default(); Reading::ALL.len()]));
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some(sample) = Sample::of(line) else { continue };
        for (dialect, sums) in &mut found {
            for (reading, sums) in Reading::ALL.into_iter().zip(sums) {
                for family in dialect.families(reading) {
                    if let Some(suffix) = sample.name.strip_prefix(family) {
                        sums.add(reading, suffix, &sample);
                    }
                }
            }
        }
    }
    let known = |sums: &[Sums]| sums.iter().filter(|sums| sums.samples > 0).count();
    let best = found.iter().max_by_key(|(dialect, sums)| (known(sums), *dialect == usual));
    best.filter(|(_, sums)| known(sums) > 0)
        .map_or_else(|| Readings::unknown(usual), |(dialect, sums)| told(*dialect, sums))
}

/// One line of a page.
struct Sample<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

impl<'a> Sample<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let end = line.find(['{', ' '])?;
        let (name, rest) = line.split_at(end);
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => rest.split_at(labels_end(rest)?),
            None => ("", rest),
        };
        // Behind the value there may be a time.
        let value = rest.trim_start_matches('}').split_ascii_whitespace().next()?.parse().ok()?;
        Some(Self { name, labels, value })
    }
}

/// Where labels end: at a brace that is not part of a value.
fn labels_end(text: &str) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    text.bytes().position(|byte| {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            b'}' => return !quoted,
            _ => {}
        }
        false
    })
}

/// What the series of one family come to: an engine with several ranks has one for each.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    samples: u32,
    sum: f64,
    largest: f64,
    /// Of a histogram.
    count: f64,
    buckets: u32,
    /// A value that makes no sense leaves the whole unknown.
    odd: bool,
}

impl Sums {
    fn add(&mut self, reading: Reading, suffix: &str, sample: &Sample<'_>) {
        let value = match (reading, suffix) {
            (Reading::FirstToken, "_bucket") => return self.buckets += 1,
            (Reading::FirstToken, "_count") => return self.count += sample.value,
            (Reading::FirstToken, "_sum") => Some(sample.value),
            (Reading::FirstToken, _) => return,
            // vLLM writes it into a label; the others have a gauge.
            (Reading::Blocks, "") if sample.name.ends_with("_info") => {
                label(sample.labels, "num_gpu_blocks").and_then(|blocks| blocks.parse().ok())
            }
            (_, "") => Some(sample.value),
            _ => return,
        };
        self.samples += 1;
        match value.filter(|value| value.is_finite() && *value >= 0.0) {
            Some(value) => {
                self.sum += value;
                self.largest = self.largest.max(value);
            }
            None => self.odd = true,
        }
    }

    fn known(&self) -> Option<&Self> {
        (self.samples > 0 && !self.odd).then_some(self)
    }

    fn whole(&self) -> Option<u64> {
        Some(whole(self.known()?.sum))
    }

    fn small(&self) -> Option<u32> {
        Some(u32::try_from(self.whole()?).unwrap_or(u32::MAX))
    }
}

fn told(dialect: Dialect, sums: &[Sums; Reading::ALL.len()]) -> Readings {
    let of = |reading: Reading| &sums[reading as usize];
    let first = of(Reading::FirstToken);
    Readings {
        dialect,
        waiting: of(Reading::Waiting).small(),
        running: of(Reading::Running).small(),
        kv_usage: of(Reading::KvUsage).known().map(|usage| usage.largest),
        blocks: of(Reading::Blocks).whole().filter(|blocks| *blocks > 0),
        prompt_tokens: of(Reading::PromptTokens).whole(),
        generated_tokens: of(Reading::GeneratedTokens).whole(),
        first_token: first
            .known()
            .filter(|first| first.buckets > 0 && first.count.is_finite())
            .map(|first| FirstTokens { seconds: first.sum, count: whole(first.count) }),
    }
}

/// One label's value.
fn label(mut labels: &str, wanted: &str) -> Option<String> {
    while let Some((name, value, rest)) = next_label(labels) {
        if name == wanted {
            return Some(value);
        }
        labels = rest;
    }
    None
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "such a cast ends at the type's bounds")]
fn whole(value: f64) -> u64 {
    value as u64
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn page(name: &str) -> String {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
        let mut text = String::new();
        let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
        text
    }

    fn missing(readings: &Readings) -> Vec<&'static str> {
        readings.missing().collect()
    }

    #[test]
    fn a_recorded_vllm_is_known_in_all_its_families() {
        let read = readings(&page("vllm-0.32.0/metrics.txt.gz"), Dialect::LlamaCpp);
        assert_eq!(read.dialect, Dialect::Vllm, "whatever the rule says");
        assert_eq!((read.waiting, read.running, read.kv_usage), (Some(0), Some(0), Some(0.0)));
        assert_eq!((read.prompt_tokens, read.blocks), (Some(760), Some(131_072)));
        assert!(read.generated_tokens.is_some() && read.first_token.is_some_and(|first| first.count > 0));
        assert_eq!(missing(&read), Vec::<&str>::new());
    }

    #[test]
    fn the_first_generation_s_name_of_the_usage_is_known() {
        let old = page("vllm-0.32.0/metrics.txt.gz").replace("kv_cache_usage_perc", "gpu_cache_usage_perc");
        assert_eq!(missing(&readings(&old, Dialect::Vllm)), Vec::<&str>::new());
    }

    #[test]
    fn each_missing_family_is_unknown_and_named() {
        let whole = page("vllm-0.32.0/metrics.txt.gz");
        for reading in Reading::ALL {
            let family = Dialect::Vllm.families(reading)[0];
            let without: String =
                whole.lines().filter(|line| !line.starts_with(family)).flat_map(|line| [line, "\n"]).collect();
            let read = readings(&without, Dialect::Vllm);
            assert!(!read.has(reading), "{family}");
            assert_eq!(missing(&read), [family]);
        }
        let no_buckets = whole.replace("time_to_first_token_seconds_bucket", "x");
        assert_eq!(missing(&readings(&no_buckets, Dialect::Vllm)), ["vllm:time_to_first_token_seconds"]);
        assert_eq!(missing(&readings("", Dialect::Vllm)).len(), Reading::ALL.len());
    }

    #[test]
    fn a_recorded_sglang_is_known_warm_and_unknown_cold() {
        let warm = readings(&page("sglang-0.5.23/live_server_metrics.txt.gz"), Dialect::Vllm);
        assert_eq!((warm.dialect, warm.waiting, warm.blocks), (Dialect::Sglang, Some(0), Some(256)));
        assert_eq!((warm.prompt_tokens, warm.generated_tokens), (Some(447), Some(48)));
        assert_eq!(warm.first_token.map(|first| first.count), Some(9));
        assert_eq!(missing(&warm), Vec::<&str>::new());
        assert_eq!(readings(&page("sglang-0.5.23/metrics_warm.txt.gz"), Dialect::Vllm).kv_usage, Some(0.25));
        let cold = readings(&page("sglang-0.5.23/metrics_cold.txt.gz"), Dialect::Sglang);
        assert!(cold.waiting.is_none() && missing(&cold).contains(&"sglang:num_queue_reqs"), "{cold:?}");
    }

    #[test]
    fn a_recorded_llama_cpp_is_known_as_far_as_it_says() {
        let busy = readings(&page("llamacpp/metrics_busy.txt.gz"), Dialect::Vllm);
        assert_eq!((busy.dialect, busy.waiting, busy.running), (Dialect::LlamaCpp, Some(2), Some(2)));
        assert_eq!((busy.prompt_tokens, busy.generated_tokens), (Some(1634), Some(15)));
        assert_eq!((busy.kv_usage, busy.blocks, missing(&busy)), (None, None, vec![]));
        assert_eq!(readings(&page("llamacpp/metrics_cold.txt.gz"), Dialect::Vllm).waiting, Some(0));
    }

    #[test]
    fn tensorrt_s_names_are_known() {
        let page = "trtllm_num_requests_waiting 3.0\ntrtllm_num_requests_running{model=\"m\"} 2\n\
                    trtllm_kv_cache_utilization 0.5\ntrtllm_kv_cache_max_blocks{a=\"b\"} 101\n";
        let read = readings(page, Dialect::TrtLlm);
        assert_eq!((read.waiting, read.running, read.kv_usage, read.blocks), (Some(3), Some(2), Some(0.5), Some(101)));
        assert_eq!(missing(&read).len(), 3);
    }

    #[test]
    fn ranks_are_added_up_and_the_fullest_cache_speaks() {
        let page = "vllm:num_requests_waiting{engine=\"0\"} 3.0 1700000000\nvllm:num_requests_waiting{engine=\"1\"} 4.0\n\
                    vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.75\n\
                    vllm:cache_config_info{engine=\"0\",num_gpu_blocks=\"10\"} 1\n\
                    vllm:cache_config_info{engine=\"1\",num_gpu_blocks=\"20\"} 1\n";
        let read = readings(page, Dialect::Vllm);
        assert_eq!((read.waiting, read.kv_usage, read.blocks), (Some(7), Some(0.75), Some(30)));
    }

    #[test]
    fn what_makes_no_sense_is_unknown_and_never_zero() {
        for odd in ["NaN", "-1", "+Inf", "x", ""] {
            let read = readings(&format!("vllm:num_requests_waiting{{a=\"b\"}} {odd}\n"), Dialect::Vllm);
            assert_eq!(read.waiting, None, "{odd}");
        }
        let page = "vllm:num_requests_waiting{m=\"a } b\\\"}\"} 5\nvllm:cache_config_info{num_gpu_blocks=\"None\"} 1\n\
                    vllm:num_requests_waiting_by_reason{reason=\"x\"} 9\n";
        let read = readings(page, Dialect::Vllm);
        assert_eq!((read.waiting, read.blocks), (Some(5), None));
        assert_eq!(readings("vllm:num_requests_running 99999999999", Dialect::Vllm).running, Some(u32::MAX));
    }
}

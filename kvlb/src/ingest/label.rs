//! What an engine's `/metrics` says of its cache and its process.

use std::time::Duration;

use crate::contract::attest::EngineLabel;

/// How long a scrape may take.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(2);
/// How much of the answer is read: engines answer with some 100 KB, and what is wanted stands in the first half.
const SCRAPE_MAX: usize = 4 << 20;

/// Letters of a word that is kept.
const WORD_MAX: usize = 64;

/// What a scrape found.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Scrape {
    /// `vllm:cache_config_info`.
    pub(crate) label: EngineLabel,
    /// `process_start_time_seconds`, bit by bit.
    pub(crate) process_start: Option<u64>,
}

/// A client for an engine's small answers: no proxy, no redirects, and no connection kept, since engines close them sooner than the next.
///
/// # Errors
/// As the client says.
pub(crate) fn client() -> Result<reqwest::Client, reqwest::Error> {
    crate::tls::plain_client().no_proxy().redirect(reqwest::redirect::Policy::none()).pool_max_idle_per_host(0).build()
}

/// Reads `http://authority/metrics`.
///
/// # Errors
/// As the client says: refused, late, or another status than 200.
pub(crate) async fn scrape(client: &reqwest::Client, authority: &str) -> Result<Scrape, reqwest::Error> {
    let request = client.get(format!("http://{authority}/metrics")).timeout(SCRAPE_TIMEOUT);
    let mut response = request.send().await?.error_for_status()?;
    let mut text = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        text.extend_from_slice(&chunk);
        if text.len() >= SCRAPE_MAX {
            break;
        }
    }
    Ok(parse(&String::from_utf8_lossy(&text)))
}

/// Finds the two families in a Prometheus text. An engine with several ranks has several; the first speaks for all.
pub(crate) fn parse(text: &str) -> Scrape {
    let mut scrape = Scrape::default();
    for line in text.lines() {
        if let Some(value) = line.strip_prefix("process_start_time_seconds ") {
            scrape.process_start = value.trim().parse().ok().map(f64::to_bits);
        }
        if let Some(labels) = line.strip_prefix("vllm:cache_config_info{")
            && scrape.label == EngineLabel::default()
        {
            scrape.label = engine_label(labels);
        }
    }
    scrape
}

fn engine_label(mut rest: &str) -> EngineLabel {
    let mut label = EngineLabel::default();
    while let Some((name, value, after)) = next_label(rest) {
        match name {
            "prefix_caching_hash_algo" => label.hash_algo = Some(word(&value)),
            "block_size" => label.block_size = value.parse().ok(),
            "num_gpu_blocks" => label.num_gpu_blocks = value.parse().ok(),
            _ => {}
        }
        rest = after;
    }
    label
}

/// A value as it may be shown: the names of algorithms are short words, and a status is no place for a page.
fn word(value: &str) -> String {
    value.chars().filter(|letter| !letter.is_control()).take(WORD_MAX).collect()
}

/// Splits `name="value",…` after its first label.
pub(crate) fn next_label(text: &str) -> Option<(&str, String, &str)> {
    let (name, rest) = text.split_once("=\"")?;
    let mut value = String::new();
    let mut letters = rest.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((name.trim_start_matches(','), value, &rest[at + 1..])),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            _ => value.push(letter),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"vllm:cache_config_info{a="x\"y,block_size=\"9",block_size="16",num_gpu_blocks="131072",prefix_caching_hash_algo="sha256_cbor",z=""} 1.0"#;

    fn expected() -> EngineLabel {
        EngineLabel { hash_algo: Some("sha256_cbor".into()), block_size: Some(16), num_gpu_blocks: Some(131_072) }
    }

    #[test]
    fn labels_are_found_among_others_whatever_they_hold() {
        assert_eq!(parse(LINE).label, expected());
    }

    #[test]
    fn the_first_of_several_ranks_speaks_for_all() {
        let text = format!("{LINE}\n{}", LINE.replace("131072", "7"));
        assert_eq!(parse(&text).label, expected());
    }

    #[test]
    fn what_is_missing_or_odd_is_unknown() {
        let odd = r#"vllm:cache_config_info{block_size="None",num_gpu_blocks="-1"} 1.0"#;
        assert_eq!(parse(odd), Scrape::default());
        for cut in 0..LINE.len() {
            parse(&LINE[..cut]);
        }
        assert_eq!(parse("process_start_time_seconds x\n"), Scrape::default());
    }

    #[test]
    fn a_word_is_kept_short_and_without_control_characters() {
        let line =
            format!("vllm:cache_config_info{{prefix_caching_hash_algo=\"a\\n\u{1b}{}\"}} 1.0", "b".repeat(100_000));
        assert_eq!(parse(&line).label.hash_algo, Some(format!("a{}", "b".repeat(WORD_MAX - 1))));
    }

    #[test]
    fn a_process_is_known_by_its_start() {
        let text = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.79598242847e+09\n";
        assert_eq!(parse(text).process_start, Some(1_795_982_428.47_f64.to_bits()));
    }
}

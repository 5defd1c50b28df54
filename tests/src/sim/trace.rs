//! Requests from somebody's record: Mooncake's traces, Azure's, and kvlb's own decision log.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use super::figures::float;
use super::model::Build;
use super::workload::{Ask, Workload, large, numbered, recorded};

/// How a record is replayed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replay {
    /// Engines.
    pub(super) engines: usize,
    /// Times as fast as recorded.
    pub(super) speed: f64,
    /// Requests at most.
    pub(super) limit: usize,
    /// Blocks of each engine's cache, where they are not to be those of the models.
    pub(super) blocks: Option<u32>,
}

/// One line of a Mooncake trace.
#[derive(Debug, Deserialize)]
struct Mooncake {
    /// Milliseconds from the beginning.
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    /// Each stands for 512 tokens and everything before them; the last may stand for fewer.
    hash_ids: Vec<u64>,
}

/// Tokens that one number of a Mooncake trace stands for.
const MOONCAKE_BLOCK: u32 = 512;
/// Blocks of such a size that each engine holds: about two million tokens, as where these traces are usually replayed.
const MOONCAKE_BLOCKS: u32 = 4000;

/// Reads a record, of whichever kind it is.
///
/// # Errors
/// When it cannot be read, or is of no kind that is known.
pub(super) fn read(path: &Path, replay: &Replay) -> Result<Workload> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let name = path.file_stem().map_or_else(|| "record".to_owned(), |stem| stem.to_string_lossy().into_owned());
    let first = text.lines().next().unwrap_or_default();
    let workload = if first.contains("\"block_size\"") {
        decisions(&name, &text, replay)
    } else if first.contains("hash_ids") {
        mooncake(&name, &text, replay)
    } else if first.contains("ContextTokens") {
        azure(&name, &text, replay)
    } else {
        bail!("{}: neither lines with hash_ids nor a table with ContextTokens", path.display())
    }?;
    ensure!(workload.requests() > 0, "{}: no request", path.display());
    Ok(workload)
}

/// One line of kvlb's decision log.
#[derive(Debug, Deserialize)]
struct Decided {
    /// Milliseconds.
    timestamp: u64,
    block_size: u32,
    input_length: u32,
    output_length: Option<u32>,
    hash_ids: Vec<u64>,
}

/// Tokens of an answer whose length nobody said: a short chat's.
const OUTPUT_TOKENS: u32 = 200;

/// A request is in the log when it has ended, so lines are not in order.
fn decisions(name: &str, text: &str, replay: &Replay) -> Result<Workload> {
    let read = |(number, line): (usize, &str)| {
        serde_json::from_str::<Decided>(line).with_context(|| format!("line {}", number + 1))
    };
    let mut lines = text.lines().enumerate().map(read).collect::<Result<Vec<_>>>()?;
    lines.sort_by_key(|line| line.timestamp);
    lines.truncate(replay.limit);
    let first = lines.first().context("no request")?;
    let (begin, block_size) = (first.timestamp, first.block_size.max(1));
    let tokens = u64::from(large().blocks) * u64::from(large().block_size);
    let blocks = u32::try_from(tokens / u64::from(block_size))?;
    let build = Build { block_size, blocks: replay.blocks.unwrap_or(blocks), ..large() };
    let ask = |(number, line): (usize, Decided)| {
        let output = line.output_length.unwrap_or(OUTPUT_TOKENS).max(1);
        let all = ((line.input_length + output) / block_size) as usize;
        Ok(Ask {
            at: Duration::from_secs_f64(float(usize::try_from(line.timestamp - begin)?) / 1e3 / replay.speed),
            tokens: line.input_length.max(1),
            output,
            names: numbered(&line.hash_ids, all.saturating_sub(line.hash_ids.len()), u64::MAX - number as u64),
            counts: true,
        })
    };
    let asks = lines.into_iter().enumerate().map(ask).collect::<Result<Vec<_>>>()?;
    Ok(recorded(name, build, replay.engines, asks))
}

fn mooncake(name: &str, text: &str, replay: &Replay) -> Result<Workload> {
    let build = Build { block_size: MOONCAKE_BLOCK, blocks: replay.blocks.unwrap_or(MOONCAKE_BLOCKS), ..large() };
    let mut asks = Vec::new();
    for (number, line) in text.lines().enumerate().take(replay.limit) {
        let line: Mooncake = serde_json::from_str(line).with_context(|| format!("line {}", number + 1))?;
        let full = (line.input_length / MOONCAKE_BLOCK) as usize;
        let full = &line.hash_ids[..full.min(line.hash_ids.len())];
        let all = ((line.input_length + line.output_length) / MOONCAKE_BLOCK) as usize;
        asks.push(Ask {
            at: Duration::from_secs_f64(float(usize::try_from(line.timestamp)?) / 1e3 / replay.speed),
            tokens: line.input_length.max(1),
            output: line.output_length.max(1),
            names: numbered(full, all - full.len(), u64::MAX - number as u64),
            counts: true,
        });
    }
    Ok(recorded(name, build, replay.engines, asks))
}

/// Lengths and times only: nothing is shared.
fn azure(name: &str, text: &str, replay: &Replay) -> Result<Workload> {
    let build = Build { blocks: replay.blocks.unwrap_or_else(|| large().blocks), ..large() };
    let mut asks = Vec::new();
    let mut begin = None;
    for (number, line) in text.lines().enumerate().skip(1).take(replay.limit) {
        let row = || -> Option<(f64, u32, u32)> {
            let mut cells = line.split(',');
            let (_, time) = cells.next()?.split_once(' ')?;
            let mut parts = time.split(':').map(str::parse::<f64>);
            let [hours, minutes, seconds] = [parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?];
            let mut count = || cells.next()?.trim().parse().ok();
            Some((hours * 3600.0 + minutes * 60.0 + seconds, count()?, count()?))
        };
        let (time, tokens, output) = row().with_context(|| format!("line {}: no time and two counts", number + 1))?;
        let since = (time - *begin.get_or_insert(time)).max(0.0);
        let (tokens, output) = (tokens.max(1), output.max(1));
        let blocks = ((tokens + output) / build.block_size) as usize;
        let names = numbered(&[], blocks, number as u64);
        asks.push(Ask { at: Duration::from_secs_f64(since / replay.speed), tokens, output, names, counts: true });
    }
    asks.sort_by_key(|ask| ask.at);
    Ok(recorded(name, build, replay.engines, asks))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const REPLAY: Replay = Replay { engines: 2, speed: 2.0, limit: 10, blocks: None };

    fn written(text: &str) -> Result<Workload> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(text.as_bytes())?;
        read(file.path(), &REPLAY)
    }

    #[test]
    fn a_decision_log_is_replayed_in_the_order_in_which_requests_came() {
        let line = |at: u64, names: &str| {
            format!(
                r#"{{"timestamp":{at},"rule":1,"block_size":16,"input_length":40,"output_length":null,"hash_ids":[{names}],"endpoint":0,"tier":"2","depth":0,"spill":false,"first_byte_ms":1.5}}"#
            )
        };
        let max = u64::MAX;
        let text = format!("{}\n{}\n", line(5_000, &format!("7,{max}")), line(1_000, "7,8"));
        let workload = written(&text).unwrap();
        let asks = &workload.stages[0].asks;
        assert_eq!((workload.build.block_size, asks.len()), (16, 2));
        assert_eq!((asks[0].at, asks[1].at), (Duration::ZERO, Duration::from_secs(2)), "twice as fast");
        assert_eq!(asks[0].names[0], asks[1].names[0]);
        assert_ne!(asks[0].names[1], asks[1].names[1]);
        assert_eq!((asks[0].tokens, asks[0].output), (40, OUTPUT_TOKENS));
    }

    #[test]
    fn a_mooncake_line_is_a_request_whose_equal_numbers_are_equal_blocks() {
        let workload = written(concat!(
            "{\"timestamp\": 0, \"input_length\": 1100, \"output_length\": 3, \"hash_ids\": [0, 1, 2]}\n",
            "{\"timestamp\": 4000, \"input_length\": 1536, \"output_length\": 600, \"hash_ids\": [0, 1, 5]}\n",
        ))
        .unwrap();
        let asks = &workload.stages[0].asks;
        assert_eq!(asks.iter().map(|ask| (ask.at.as_secs(), ask.names.len())).collect::<Vec<_>>(), [(0, 2), (2, 4)]);
        assert_eq!(asks[0].names[..2], asks[1].names[..2]);
        assert!((workload.ceiling() - 100.0 * 1024.0 / 2636.0).abs() < 0.1);
    }

    #[test]
    fn an_azure_row_is_a_request_that_shares_nothing() {
        let workload = written(concat!(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n",
            "2023-11-16 18:17:03.9799600,4808,10\n",
            "2023-11-16 18:17:04.0319600,3180,8\n",
        ))
        .unwrap();
        let asks = &workload.stages[0].asks;
        assert_eq!((asks[0].tokens, asks[1].output, asks[1].at.as_millis()), (4808, 8, 26));
        assert!(workload.ceiling().abs() < f64::EPSILON);
    }

    #[test]
    fn what_is_no_record_is_refused() {
        assert!(written("hello\n").is_err());
        assert!(written("{\"hash_ids\": 7}\n").unwrap_err().to_string().contains("line 1"));
        assert!(written("TIMESTAMP,ContextTokens,GeneratedTokens\n").is_err());
    }
}

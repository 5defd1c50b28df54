//! What runs brought, as figures and tables.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::figures::{float, mean, median, millis, percent, quantile};
use super::workload::Workload;
use super::world::{Record, Run};

/// Figures of one policy under one workload. Times are in milliseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Figures {
    /// Workload, fault and policy.
    pub(super) workload: String,
    pub(super) fault: String,
    pub(super) policy: String,
    /// The seeds whose medians these are.
    pub(super) seeds: Vec<u64>,
    /// Requests that count, and those of them that failed.
    pub(super) requests: f64,
    pub(super) failed: f64,
    /// Percent of prompt tokens that engines found, and that one endless cache would find.
    pub(super) hit: f64,
    pub(super) ceiling: f64,
    /// Time to the first token.
    pub(super) ttft_mean: f64,
    pub(super) ttft_p50: f64,
    pub(super) ttft_p90: f64,
    pub(super) ttft_p99: f64,
    /// From the request to its last token.
    pub(super) latency_mean: f64,
    /// Percent of the requests that the busiest endpoint got, and the least busy one.
    pub(super) busiest: f64,
    pub(super) idlest: f64,
    /// Percent of the requests that went to an endpoint although another one held more.
    pub(super) spills: f64,
    /// Requests that wait at an endpoint for their first step, on average over time and endpoints.
    pub(super) queue: f64,
    /// Times that a request started over for want of blocks.
    pub(super) preempted: f64,
    /// Tokens of answers a second, over all endpoints.
    pub(super) tokens_per_second: f64,
    /// How far what was believed to be found is from what was, in percent of prompt tokens.
    pub(super) off_by: f64,
    /// Stage by stage, where there are several.
    pub(super) stages: Vec<StageFigures>,
}

/// Figures of one stage.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct StageFigures {
    pub(super) label: String,
    pub(super) hit: f64,
    pub(super) ttft_mean: f64,
    pub(super) ttft_p90: f64,
    pub(super) tokens_per_second: f64,
}

/// One run's figures.
pub(super) fn figures(workload: &Workload, run: &Run) -> Figures {
    let counted: Vec<&Record> = run.records.iter().filter(|record| record.counts).collect();
    let ttft = ttfts(&counted);
    let latencies: Vec<f64> =
        counted.iter().filter_map(|record| Some(millis(record.done?.saturating_sub(record.arrived)))).collect();
    let share = |of: &dyn Fn(&Record) -> bool| {
        percent(float(counted.iter().filter(|record| of(record)).count()), float(counted.len()))
    };
    let used = counted.iter().filter_map(|record| record.endpoint).max().map_or(0, |most| most + 1);
    let endpoints = workload.engines.max(used);
    let shares: Vec<f64> = (0..endpoints).map(|at| share(&|record| record.endpoint == Some(at))).collect();
    let waits = counted.iter().filter_map(|record| Some(millis(record.started?.saturating_sub(record.arrived))));
    let off: f64 = counted
        .iter()
        .filter(|record| record.started.is_some())
        .map(|record| f64::from(record.believed.abs_diff(record.hit)))
        .sum();
    let stages = workload.stages.iter().enumerate().filter_map(|(number, stage)| {
        let of_stage: Vec<&Record> = counted.iter().copied().filter(|record| record.stage == number).collect();
        let ttft = ttfts(&of_stage);
        (workload.stages.len() > 1 && !of_stage.is_empty()).then(|| StageFigures {
            label: stage.label.clone(),
            hit: hit(&of_stage),
            ttft_mean: mean(&ttft),
            ttft_p90: quantile(&ttft, 0.9),
            tokens_per_second: rate(&of_stage),
        })
    });
    Figures {
        workload: workload.name.clone(),
        requests: float(counted.len()),
        failed: float(counted.iter().filter(|record| record.failed).count()),
        hit: hit(&counted),
        ceiling: workload.ceiling(),
        ttft_mean: mean(&ttft),
        ttft_p50: quantile(&ttft, 0.5),
        ttft_p90: quantile(&ttft, 0.9),
        ttft_p99: quantile(&ttft, 0.99),
        latency_mean: mean(&latencies),
        busiest: shares.iter().copied().fold(0.0, f64::max),
        idlest: shares.iter().copied().fold(100.0, f64::min),
        spills: share(&|record| record.spilled),
        queue: waits.sum::<f64>() / span(&counted).max(1.0) / float(endpoints.max(1)),
        preempted: float(run.preempted),
        tokens_per_second: rate(&counted),
        off_by: percent(off, counted.iter().map(|record| f64::from(record.tokens)).sum()),
        stages: stages.collect(),
        ..Figures::default()
    }
}

fn ttfts(records: &[&Record]) -> Vec<f64> {
    let ttft = |record: &&Record| Some(millis(record.first?.saturating_sub(record.arrived)));
    let mut all: Vec<f64> = records.iter().filter_map(ttft).collect();
    all.sort_by(f64::total_cmp);
    all
}

fn hit(records: &[&Record]) -> f64 {
    let ran = || records.iter().filter(|record| record.started.is_some());
    percent(ran().map(|r| f64::from(r.hit)).sum(), ran().map(|r| f64::from(r.tokens)).sum())
}

/// From the first request to the last token, in milliseconds.
fn span(records: &[&Record]) -> f64 {
    let begin = records.iter().map(|record| record.arrived).min().unwrap_or_default();
    let end = records.iter().filter_map(|record| record.done).max().unwrap_or_default();
    millis(end.saturating_sub(begin))
}

fn rate(records: &[&Record]) -> f64 {
    let tokens: f64 = records.iter().filter(|r| r.done.is_some()).map(|r| f64::from(r.output)).sum();
    tokens / span(records).max(1.0) * 1e3
}

/// The medians of several seeds.
pub(super) fn medians(runs: &[Figures]) -> Figures {
    let Some(first) = runs.first() else { return Figures::default() };
    let of = |figure: fn(&Figures) -> f64| median(runs.iter().map(figure));
    let stage = |at: usize, figure: fn(&StageFigures) -> f64| {
        median(runs.iter().filter_map(|run| run.stages.get(at)).map(figure))
    };
    let stages = first.stages.iter().enumerate().map(|(at, of_first)| StageFigures {
        label: of_first.label.clone(),
        hit: stage(at, |s| s.hit),
        ttft_mean: stage(at, |s| s.ttft_mean),
        ttft_p90: stage(at, |s| s.ttft_p90),
        tokens_per_second: stage(at, |s| s.tokens_per_second),
    });
    Figures {
        seeds: runs.iter().flat_map(|run| run.seeds.clone()).collect(),
        requests: of(|f| f.requests),
        failed: of(|f| f.failed),
        hit: of(|f| f.hit),
        ceiling: of(|f| f.ceiling),
        ttft_mean: of(|f| f.ttft_mean),
        ttft_p50: of(|f| f.ttft_p50),
        ttft_p90: of(|f| f.ttft_p90),
        ttft_p99: of(|f| f.ttft_p99),
        latency_mean: of(|f| f.latency_mean),
        busiest: of(|f| f.busiest),
        idlest: of(|f| f.idlest),
        spills: of(|f| f.spills),
        queue: of(|f| f.queue),
        preempted: of(|f| f.preempted),
        tokens_per_second: of(|f| f.tokens_per_second),
        off_by: of(|f| f.off_by),
        stages: stages.collect(),
        ..first.clone()
    }
}

/// The table of one workload.
pub(super) fn table(rows: &[Figures], about: &str) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let mut text = format!("\n== {}", first.workload);
    if first.fault != "none" {
        let _written = write!(text, " / {}", first.fault);
    }
    let seeds = first.seeds.len();
    let _written = writeln!(text, ": {about}");
    let _written = writeln!(
        text,
        "   {:.0} requests, ceiling {:.1} %, medians of {seeds} seed{}",
        first.requests,
        first.ceiling,
        if seeds == 1 { "" } else { "s" }
    );
    let _written = writeln!(
        text,
        "{:<17} {:>6} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7} {:>8} {:>7} {:>8} {:>7} {:>7}",
        "",
        "hit %",
        "ttft p50",
        "p90",
        "p99 ms",
        "mean",
        "busiest",
        "idlest",
        "spills",
        "queue",
        "tokens/s",
        "off by",
        "failed"
    );
    for row in rows {
        let _written = writeln!(
            text,
            "{:<17} {:>6.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>6.1} % {:>5.1} % {:>6.1} % {:>7.2} {:>8.0} {:>5.1} % {:>7.0}",
            row.policy,
            row.hit,
            row.ttft_p50,
            row.ttft_p90,
            row.ttft_p99,
            row.ttft_mean,
            row.busiest,
            row.idlest,
            row.spills,
            row.queue,
            row.tokens_per_second,
            row.off_by,
            row.failed
        );
    }
    text
}

/// How the calibration stands: what llm-d published beside what came of its workload here.
pub(super) fn calibration(rows: &[Figures]) -> Option<String> {
    /// Source: llm-d's blog of September 2025: mean and p90 of random and precise scheduling, in milliseconds.
    const RANDOM: [f64; 2] = [45_300.0, 92_600.0];
    const PRECISE: [f64; 2] = [298.0, 542.0];
    let of =
        |policy: &str| rows.iter().find(|row| row.workload == "b2b" && row.fault == "none" && row.policy == policy);
    let (random, precise) = (of("random")?, of("llmd-precise")?);
    let ratios = [random.ttft_mean / precise.ttft_mean, random.ttft_p90 / precise.ttft_p90];
    let theirs = [RANDOM[0] / PRECISE[0], RANDOM[1] / PRECISE[1]];
    let verdict = |at: usize| {
        let apart = (ratios[at] / theirs[at]).max(theirs[at] / ratios[at]);
        format!(
            "{:.0} here, {:.0} published: {}",
            ratios[at],
            theirs[at],
            if apart <= 2.0 { "within 2" } else { "APART" }
        )
    };
    Some(format!("calibration, TTFT random / precise: mean {}; p90 {}", verdict(0), verdict(1)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::sim::workload::scrap;

    #[test]
    fn figures_are_of_the_requests_that_count() {
        let record = |counts, millis, endpoint| Record {
            counts,
            tokens: 100,
            hit: 50,
            believed: 60,
            output: 2,
            endpoint: Some(endpoint),
            started: Some(Duration::from_millis(1)),
            first: Some(Duration::from_millis(millis)),
            done: Some(Duration::from_millis(200)),
            ..Record::default()
        };
        let records = vec![record(false, 9999, 0), record(true, 10, 1), record(true, 30, 1), record(true, 20, 0)];
        let figures = figures(&scrap(1), &Run { records, ..Run::default() });
        let rounded =
            [figures.hit, figures.ttft_p50, figures.ttft_p99, figures.busiest, figures.off_by].map(f64::round);
        assert_eq!(rounded.map(|figure| format!("{figure}")), ["50", "20", "30", "67", "10"]);
        assert_eq!(format!("{:.0}", figures.tokens_per_second), "30");
    }
}

//! What kvlb promises beside other proxies, and whether one run keeps it.

use std::fmt;

use super::cases::Case;
use super::proxies::Proxy;
use super::report::{Record, figures};
use super::statistics::{Spread, ratios};

/// Bytes that are shared with other processes, or of the unit's place in tables, count as the kernel counts them.
const KB: f64 = 1000.0;

/// One promise.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    what: &'static str,
    case: Case,
    figure: Figure,
    limit: f64,
}

#[derive(Clone, Copy, Debug)]
enum Figure {
    /// CPU time a unit, beside that of another.
    Cpu(Proxy),
    /// Median latency, beside that of another.
    Median(Proxy),
    /// Kilobytes a unit.
    Memory,
}

/// Design §11, as far as it is about the proxy.
pub(super) const TARGETS: [Target; 9] = [
    Target { what: "CPU, POST 2 KB, KV off", case: Case::Post2k, figure: Figure::Cpu(Proxy::Haproxy), limit: 0.90 },
    Target { what: "CPU, POST 2 KB, KV off", case: Case::Post2k, figure: Figure::Cpu(Proxy::VllmRouter), limit: 0.30 },
    Target { what: "CPU, POST 2 KB, KV warm", case: Case::Kvwarm, figure: Figure::Cpu(Proxy::Haproxy), limit: 1.3 },
    Target { what: "CPU, POST 64 KB", case: Case::Post64k, figure: Figure::Cpu(Proxy::Haproxy), limit: 0.60 },
    Target { what: "CPU, SSE event", case: Case::Sse, figure: Figure::Cpu(Proxy::Haproxy), limit: 0.90 },
    Target { what: "p50, SSE event", case: Case::Sse, figure: Figure::Median(Proxy::Haproxy), limit: 1.0 },
    Target { what: "CPU, new connection", case: Case::New, figure: Figure::Cpu(Proxy::Haproxy), limit: 1.05 },
    Target { what: "memory, idle connection", case: Case::Idle, figure: Figure::Memory, limit: 6.0 },
    Target { what: "memory, stream", case: Case::Streams, figure: Figure::Memory, limit: 12.0 },
];

/// What one run says of a promise.
#[derive(Clone, Debug)]
pub(super) struct Verdict {
    target: Target,
    /// Round by round; empty where it was not measured.
    figures: Vec<f64>,
}

impl Verdict {
    pub(super) fn of(target: Target, records: &[Record]) -> Self {
        let of = |proxy: Proxy, figure: fn(&Record) -> f64| figures(records, target.case, proxy, figure);
        let beside = |other: Proxy, figure: fn(&Record) -> f64| ratios(&of(Proxy::Kvlb, figure), &of(other, figure));
        let figures = match target.figure {
            Figure::Cpu(other) => beside(other, Record::cpu_us),
            Figure::Median(other) => beside(other, Record::p50_us),
            Figure::Memory => of(Proxy::Kvlb, Record::memory).into_iter().map(|(_round, bytes)| bytes / KB).collect(),
        };
        Self { target, figures }
    }

    /// Whether the median keeps the promise; None where nothing was measured.
    pub(super) fn is_met(&self) -> Option<bool> {
        Some(Spread::of(&self.figures)?.median <= self.target.limit)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Target { what, limit, figure, .. } = self.target;
        let unit = match figure {
            Figure::Cpu(other) | Figure::Median(other) => format!("× {other}"),
            Figure::Memory => "kB".to_owned(),
        };
        write!(f, "{what:<24} ≤ {limit:>5.2} {unit:<14} ")?;
        let Some(Spread { median, least, greatest }) = Spread::of(&self.figures) else {
            return f.write_str("not measured");
        };
        let kept = self.figures.iter().filter(|figure| **figure <= limit).count();
        let word = if self.is_met() == Some(true) { "met" } else { "MISSED" };
        write!(f, "{median:>6.2} ({least:.2}..{greatest:.2})  {word}, in {kept} of {} rounds", self.figures.len())
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::Measured;
    use super::*;

    fn record(round: usize, proxy: Proxy, case: Case, cpu_us: f64) -> Record {
        Record { round, proxy, case, measured: Measured { cpu_us, units: 1, ..Measured::default() } }
    }

    #[test]
    fn a_promise_is_kept_by_the_median_of_the_rounds() {
        let target = TARGETS[0];
        let mut records = Vec::new();
        for (round, ours) in [(1, 8.0), (2, 9.5), (3, 8.5)] {
            records.push(record(round, Proxy::Kvlb, Case::Post2k, ours));
            records.push(record(round, Proxy::Haproxy, Case::Post2k, 10.0));
        }
        let verdict = Verdict::of(target, &records);
        assert_eq!(verdict.is_met(), Some(true));
        assert!(verdict.to_string().ends_with("0.85 (0.80..0.95)  met, in 2 of 3 rounds"), "{verdict}");
        assert_eq!(Verdict::of(TARGETS[1], &records).is_met(), None);
        records[0].measured.cpu_us = 9.6;
        assert_eq!(Verdict::of(target, &records).is_met(), Some(false));
    }

    #[test]
    fn memory_is_what_came_a_unit() {
        let measured = Measured { memory_before: 1_000_000, memory_after: 25_000_000, ..Measured::default() };
        let record = Record { round: 1, proxy: Proxy::Kvlb, case: Case::Idle, measured };
        let verdict = Verdict::of(TARGETS[7], &[record]);
        assert_eq!(verdict.is_met(), Some(true));
        assert!(verdict.to_string().contains("6.00"), "{verdict}");
    }
}

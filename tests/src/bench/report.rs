//! What was measured, as tables.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::cases::Case;
use super::load::Measured;
use super::proxies::Proxy;
use super::statistics::{Spread, float, ratios};

/// One case of one proxy in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// From 1.
    pub round: usize,
    /// The proxy.
    pub proxy: Proxy,
    /// The case.
    pub case: Case,
    /// What the load generator says.
    #[serde(flatten)]
    pub measured: Measured,
}

impl Record {
    pub(super) fn cpu_us(&self) -> f64 {
        self.measured.cpu_us
    }

    pub(super) fn p50_us(&self) -> f64 {
        self.measured.p50_us
    }

    fn p99_us(&self) -> f64 {
        self.measured.p99_us
    }

    /// Units a second.
    pub(super) fn rate(&self) -> f64 {
        if self.measured.seconds > 0.0 { float(self.measured.units) / self.measured.seconds } else { 0.0 }
    }

    /// Bytes that came with each connection.
    pub(super) fn memory(&self) -> f64 {
        let grown = self.measured.memory_after.saturating_sub(self.measured.memory_before);
        float(grown) / float(u64::try_from(self.case.connections()).unwrap_or(u64::MAX))
    }

    /// One line, as soon as it is measured.
    pub(super) fn line(&self) -> String {
        let Measured { cpu_us, p50_us, p99_us, errors, wrong, .. } = self.measured;
        let Self { round, proxy, case, .. } = self;
        let what = if case.is_about_memory() {
            format!("{:.1} kB per {}", self.memory() / 1000.0, case.unit())
        } else {
            format!("{cpu_us:.2} µs per {}, {:.0}/s, p50 {p50_us:.0} p99 {p99_us:.0} µs", case.unit(), self.rate())
        };
        let mut line = format!("round {round}  {proxy:<12} {:<8} {what}", case.name());
        if let Some(fault) = self.measured.first_fault.as_ref() {
            let _written = write!(line, "; {errors} errors, {wrong} wrong answers, the first: {fault}");
        }
        line
    }

    /// What must not be: a wrong byte through anything, and an error through kvlb.
    pub(super) fn breach(&self) -> Option<String> {
        let Measured { errors, wrong, ref first_fault, .. } = self.measured;
        let ours = self.proxy.is_kvlb();
        let fault = first_fault.as_deref().unwrap_or_default();
        (wrong > 0 || (ours && errors > 0)).then(|| {
            let place = format!("round {}, {} {}", self.round, self.proxy, self.case.name());
            format!("{place}: {wrong} wrong answers and {errors} errors, the first: {fault}")
        })
    }
}

/// A figure of each round.
pub(super) fn figures(
    records: &[Record],
    case: Case,
    proxy: Proxy,
    figure: impl Fn(&Record) -> f64,
) -> Vec<(usize, f64)> {
    let of_both = records.iter().filter(|record| record.case == case && record.proxy == proxy);
    of_both.map(|record| (record.round, figure(record))).collect()
}

/// The table of a case, cheapest first; empty where it was not measured.
pub(super) fn table(records: &[Record], case: Case) -> String {
    let mut proxies: Vec<Proxy> =
        records.iter().filter(|record| record.case == case).map(|record| record.proxy).collect();
    proxies.sort_unstable();
    proxies.dedup();
    let cost = |proxy: Proxy, record: fn(&Record) -> f64| {
        let figures: Vec<f64> = figures(records, case, proxy, record).into_iter().map(|(_round, it)| it).collect();
        Spread::of(&figures)
    };
    let what: fn(&Record) -> f64 = if case.is_about_memory() { Record::memory } else { Record::cpu_us };
    let median = |proxy: &Proxy| cost(*proxy, what).map_or(f64::INFINITY, |spread| spread.median);
    proxies.sort_by(|one, other| median(one).total_cmp(&median(other)));
    if proxies.is_empty() {
        return String::new();
    }
    let mut text = format!("\n== {}: {}\n", case.name(), case.title());
    let head = if case.is_about_memory() {
        format!("{:<12} {:>22} {:>20} {:>7}", "", format!("kB per {}", case.unit()), "× haproxy", "errors")
    } else {
        format!(
            "{:<12} {:>22} {:>20} {:>8} {:>8} {:>8} {:>7}",
            "",
            format!("CPU µs per {}", case.unit()),
            "× haproxy",
            "p50 µs",
            "p99 µs",
            "rate/s",
            "errors"
        )
    };
    let _written = writeln!(text, "{head}");
    let base = figures(records, case, Proxy::Haproxy, what);
    for proxy in proxies {
        let scale = if case.is_about_memory() { 1000.0 } else { 1.0 };
        let cell = cost(proxy, what).map(|spread| spread.scaled(1.0 / scale).cell()).unwrap_or_default();
        let ratio = Spread::of(&ratios(&figures(records, case, proxy, what), &base));
        let ratio = ratio.map(Spread::cell).unwrap_or_default();
        let mine = records.iter().filter(|record| record.case == case && record.proxy == proxy);
        let errors: u64 = mine.map(|record| record.measured.errors + record.measured.wrong).sum();
        let _written = write!(text, "{proxy:<12} {cell:>22} {ratio:>20} ");
        if !case.is_about_memory() {
            let of = |figure: fn(&Record) -> f64| cost(proxy, figure).map_or(0.0, |spread| spread.median);
            let (p50, p99, rate) = (of(Record::p50_us), of(Record::p99_us), of(Record::rate));
            let _written = write!(text, "{p50:>8.0} {p99:>8.0} {rate:>8.0} ");
        }
        let _written = writeln!(text, "{errors:>7}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_line_for_each_proxy_cheapest_first() {
        let record = |round, proxy, cpu_us| Record {
            round,
            proxy,
            case: Case::Post2k,
            measured: Measured { cpu_us, units: 20_000, seconds: 2.0, p50_us: 90.0, ..Measured::default() },
        };
        let records = [
            record(1, Proxy::Haproxy, 16.0),
            record(1, Proxy::Kvlb, 12.0),
            record(2, Proxy::Kvlb, 15.0),
            record(2, Proxy::Haproxy, 20.0),
        ];
        let text = table(&records, Case::Post2k);
        let lines: Vec<_> = text.lines().skip(3).collect();
        assert!(lines[0].starts_with("kvlb ") && lines[0].contains("13.5 (12.0..15.0)"), "{text}");
        assert!(lines[0].contains("0.75 (0.75..0.75)") && lines[0].contains("10000"), "{text}");
        assert!(lines[1].starts_with("haproxy") && lines[1].contains("1.00 (1.00..1.00)"), "{text}");
        assert!(table(&records, Case::Sse).is_empty());
    }

    #[test]
    fn wrong_bytes_are_a_breach_for_all_and_errors_for_kvlb() {
        let of = |proxy, errors, wrong| {
            let measured = Measured { errors, wrong, ..Measured::default() };
            Record { round: 1, proxy, case: Case::Sse, measured }.breach().is_some()
        };
        assert!(of(Proxy::Haproxy, 0, 1) && of(Proxy::Kvlb, 0, 1) && of(Proxy::Kvlb, 1, 0));
        assert!(!of(Proxy::Haproxy, 1, 0) && !of(Proxy::Kvlb, 0, 0));
    }
}

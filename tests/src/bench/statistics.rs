//! Histograms, medians and ratios.

/// How many parts a power of two is cut into: values are kept to 1.6 %.
const PARTS: usize = 64;

/// Durations in nanoseconds, by size.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; PARTS * 60], total: 0 }
    }
}

impl Histogram {
    pub(super) fn add(&mut self, nanoseconds: u64) {
        self.counts[place(nanoseconds)] += 1;
        self.total += 1;
    }

    pub(super) fn clear(&mut self) {
        self.counts.fill(0);
        self.total = 0;
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The least duration that this many of a hundred do not exceed, in microseconds; 0 where nothing was measured.
    pub(super) fn percentile(&self, of_hundred: u64) -> f64 {
        let wanted = (self.total * of_hundred).div_ceil(100);
        let mut seen = 0;
        let at = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted && *count > 0
        });
        at.map_or(0.0, |at| float(value(at)) / 1000.0)
    }
}

fn place(value: u64) -> usize {
    let small = |value: u64| usize::try_from(value).unwrap_or_default();
    let Some(power) = value.checked_ilog2().filter(|power| *power >= 6) else { return small(value) };
    small(u64::from(power - 5)) * PARTS + (small(value >> (power - 6)) & (PARTS - 1))
}

fn value(place: usize) -> u64 {
    let (power, part) = (place / PARTS, u64::try_from(place % PARTS).unwrap_or_default());
    match power {
        0 => part,
        _ => (64 + part) << (power - 1),
    }
}

/// A count, to be divided.
#[expect(clippy::cast_precision_loss, reason = "counts of a run stay far below 2^53")]
pub(super) fn float(count: u64) -> f64 {
    count as f64
}

/// Median, least and greatest of the figures of several rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) greatest: f64,
}

impl Spread {
    /// In another unit.
    pub(super) fn scaled(self, by: f64) -> Self {
        Self { median: self.median * by, least: self.least * by, greatest: self.greatest * by }
    }

    /// As a table shows it.
    pub(super) fn cell(self) -> String {
        let [median, least, greatest] = [self.median, self.least, self.greatest].map(short);
        format!("{median} ({least}..{greatest})")
    }

    /// None of nothing.
    pub(super) fn of(figures: &[f64]) -> Option<Self> {
        let mut sorted = figures.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            1 => *sorted.get(middle)?,
            _ => f64::midpoint(*sorted.get(middle.checked_sub(1)?)?, *sorted.get(middle)?),
        };
        Some(Self { median, least: *sorted.first()?, greatest: *sorted.last()? })
    }
}

/// With three digits or more.
fn short(figure: f64) -> String {
    let decimals = if figure < 10.0 { 2 } else { usize::from(figure < 100.0) };
    format!("{figure:.decimals$}")
}

/// Each round's figure divided by another's of the same round; rounds that lack one are left out.
pub(super) fn ratios(of: &[(usize, f64)], to: &[(usize, f64)]) -> Vec<f64> {
    let base = |round: usize| to.iter().find(|(other, base)| *other == round && *base > 0.0);
    of.iter().filter_map(|(round, figure)| Some(figure / base(*round)?.1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_exact_to_a_part_of_a_power_of_two() {
        let mut histogram = Histogram::default();
        for microseconds in 1..=1000_u64 {
            histogram.add(microseconds * 1000);
        }
        for (of_hundred, wanted) in [(50, 500.0), (99, 990.0), (100, 1000.0)] {
            let found = histogram.percentile(of_hundred);
            assert!((found / wanted - 1.0).abs() < 0.016, "{of_hundred}: {found}");
        }
        assert!(Histogram::default().percentile(50).abs() < f64::EPSILON);
        histogram.add(u64::MAX);
    }

    #[test]
    fn every_value_lies_in_its_place() {
        for exact in [0, 1, 63, 64, 65, 127, 128, 1_000_000, u64::MAX] {
            let kept = value(place(exact));
            assert!(kept <= exact && exact - kept <= exact / 64, "{exact} {kept}");
        }
    }

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert_eq!(Spread::of(&[3.0, 1.0]), Some(Spread { median: 2.0, least: 1.0, greatest: 3.0 }));
        assert_eq!(Spread::of(&[3.0, 1.0, 9.0]), Some(Spread { median: 3.0, least: 1.0, greatest: 9.0 }));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn ratios_are_made_within_a_round() {
        assert_eq!(ratios(&[(1, 2.0), (2, 9.0), (3, 1.0)], &[(3, 2.0), (1, 4.0)]), [0.5, 0.5]);
    }
}

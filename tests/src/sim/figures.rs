//! Numbers of one kind as numbers of another, and what many of them have in common.

use std::time::Duration;

/// A count as a float; exact below 2^53.
#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
pub(super) fn float(count: usize) -> f64 {
    count as f64
}

/// A duration in milliseconds.
pub(super) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Milliseconds as a duration; nothing where they are none.
pub(super) fn from_millis(millis: f64) -> Duration {
    Duration::try_from_secs_f64(millis / 1e3).unwrap_or_default()
}

/// A count as `u32`, at most the largest.
pub(super) fn small(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// A share as percent.
pub(super) fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { 100.0 * part / whole } else { 0.0 }
}

/// The value that `share` of the sorted values do not exceed (nearest rank); 0 where there are none.
pub(super) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let count = sorted.len();
    let rank = (1..=count).find(|rank| float(*rank) >= share * float(count)).unwrap_or(count);
    rank.checked_sub(1).and_then(|at| sorted.get(at)).copied().unwrap_or_default()
}

/// The mean; 0 where there are none.
pub(super) fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / float(values.len()) }
}

/// The value in the middle.
pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    quantile(&sorted, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_there() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        let of = [0.0, 0.5, 0.9, 0.99, 1.0].map(|share| format!("{}", quantile(&values, share)));
        assert_eq!(of, ["1", "50", "90", "99", "100"]);
        assert!(quantile(&[], 0.5).abs() < f64::EPSILON);
        assert!((median([3.0, 1.0, 2.0].into_iter()) - 2.0).abs() < f64::EPSILON);
    }
}

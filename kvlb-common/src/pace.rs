//! How often a source may open a connection.

/// CPUs may read the clock in another order than they look at a bucket.
const CLOCKS_APART: u64 = 1_000_000;

/// What one source may do at a VIP: so many SYNs at once, and so many more each second.
///
/// A bucket of `burst` tokens that `per_sec` tokens a second fall into, kept as one number: when the bucket will be full
/// again. One number can be replaced at one stroke, so that CPUs that see SYNs of the same source never give a token twice.
/// (This is the generic cell rate algorithm, ITU-T I.371, in its virtual scheduling form.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Nanoseconds until a token falls, rounded up: a source may be slowed down by less than a nanosecond for each SYN, and
    /// never gets one too many.
    interval: u64,
    /// How far ahead of now the bucket may be full again for one more token to be in it.
    tolerance: u64,
}

impl Pace {
    /// At most `burst` SYNs at once and `per_sec` a second; nothing when that is no limit (`per_sec` 0). A burst of 0 is one
    /// of 1: with less nothing would ever pass.
    #[inline(always)]
    pub const fn new(per_sec: u32, burst: u32) -> Option<Self> {
        if per_sec == 0 {
            return None;
        }
        let interval = 1_000_000_000_u64.div_ceil(per_sec as u64);
        let tolerance = interval * (burst as u64).saturating_sub(1);
        Some(Self { interval, tolerance })
    }

    /// When the bucket will be full again (`full_at`, in nanoseconds of any clock; 0 for a new source) if a SYN at `now` takes
    /// a token; nothing when there is none for it.
    #[inline(always)]
    pub const fn admit(&self, full_at: u64, now: u64) -> Option<u64> {
        // Filled at another pace, before the rule was changed: it would take longer than an empty one.
        let of_another = now + 2 * (self.tolerance + self.interval) + CLOCKS_APART;
        let full_at = if full_at > now && full_at <= of_another { full_at } else { now };
        if full_at - now > self.tolerance {
            return None;
        }
        Some(full_at + self.interval)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// How many of the SYNs at these times pass.
    fn passed(pace: Pace, times: impl IntoIterator<Item = u64>) -> u64 {
        let mut full_at = 0;
        let mut passed = 0;
        for now in times {
            if let Some(then) = pace.admit(full_at, now) {
                full_at = then;
                passed += 1;
            }
        }
        passed
    }

    #[test]
    fn no_rate_is_no_limit() {
        assert_eq!(Pace::new(0, 10), None);
    }

    #[test]
    fn a_burst_passes_at_once_and_then_so_many_a_second() {
        let pace = Pace::new(10, 5).unwrap();
        assert_eq!(passed(pace, [SECOND; 100]), 5);
        // The same, then one every millisecond for two seconds.
        let times = [SECOND; 100].into_iter().chain((0..2000).map(|ms| SECOND + ms * 1_000_000));
        assert_eq!(passed(pace, times), 5 + 19);
    }

    #[test]
    fn a_source_that_was_quiet_has_its_burst_again_and_no_more() {
        let pace = Pace::new(10, 5).unwrap();
        let times = [SECOND; 10].into_iter().chain([100 * SECOND; 10]);
        assert_eq!(passed(pace, times), 10);
    }

    #[test]
    fn a_burst_of_none_is_one_of_one() {
        assert_eq!(passed(Pace::new(1, 0).unwrap(), [SECOND; 10]), 1);
        assert_eq!(Pace::new(1, 0), Pace::new(1, 1));
    }

    #[test]
    fn the_largest_numbers_do_not_wrap() {
        let pace = Pace::new(1, u32::MAX).unwrap();
        assert_eq!(passed(pace, [u64::MAX >> 2; 100]), 100);
    }

    #[test]
    fn who_waits_by_another_pace_begins_anew() {
        let (slow, fast) = (Pace::new(1, 1000).unwrap(), Pace::new(1000, 10).unwrap());
        let full_at = slow.admit(0, SECOND).and_then(|at| slow.admit(at + 998 * SECOND, SECOND)).unwrap();
        assert_eq!(fast.admit(full_at, 2 * SECOND), fast.admit(0, 2 * SECOND));
        // But a CPU whose clock was read a moment too early gives nothing away.
        assert_eq!(passed(fast, [SECOND; 100].into_iter().chain([SECOND - 900_000; 100])), 10);
    }

    proptest! {
        #[test]
        fn never_more_than_the_burst_and_the_rate(
            per_sec in 1..1_000_000_u32,
            burst in 1..1000_u32,
            gaps in proptest::collection::vec(0..10_000_000_u64, 1..2000),
        ) {
            let mut now = SECOND;
            let times: Vec<_> = gaps.iter().map(|gap| { now += gap; now }).collect();
            let (first, last) = (times[0], *times.last().unwrap());
            let bound = u128::from(burst) + u128::from(last - first) * u128::from(per_sec) / u128::from(SECOND);
            let pace = Pace::new(per_sec, burst).unwrap();
            prop_assert!(u128::from(passed(pace, times)) <= bound);
        }

        #[test]
        fn who_keeps_to_the_rate_always_passes(per_sec in 1..1_000_000_u32, burst in 1..1000_u32, count in 1..1000_u64) {
            let interval = SECOND.div_ceil(u64::from(per_sec));
            let pace = Pace::new(per_sec, burst).unwrap();
            prop_assert_eq!(passed(pace, (0..count).map(|at| SECOND + at * interval)), count);
        }
    }
}

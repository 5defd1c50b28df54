//! How much of the load an endpoint may carry.

use super::Candidate;

/// How many requests each endpoint may carry: its share, by capacity, of all requests in flight and the one being
/// placed, times a factor. It is taken over every eligible endpoint, whether it holds blocks or not: a bound over the
/// holders alone would never move anything off a single one.
///
/// Source of the shape: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016).
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    requests: u128,
    capacity: u128,
    factor: u128,
    floor: u32,
}

impl Bound {
    /// The bound of a fleet, with `factor` percent of a fair share for each, and never less than `floor` requests.
    pub fn new(candidates: &[Candidate], factor: u32, floor: u32) -> Self {
        let (mut requests, mut capacity) = (1, 0);
        for candidate in candidates.iter().filter(|candidate| candidate.eligible) {
            requests += u128::from(candidate.load);
            capacity += u128::from(candidate.capacity);
        }
        Self { requests, capacity, factor: u128::from(factor), floor }
    }

    /// Whether `candidate` may take one more.
    pub fn admits(&self, candidate: &Candidate) -> bool {
        u128::from(candidate.load) < self.limit(candidate)
    }

    fn limit(&self, candidate: &Candidate) -> u128 {
        let share =
            (self.factor * self.requests * u128::from(candidate.capacity)).div_ceil((100 * self.capacity).max(1));
        share.max(u128::from(self.floor)).max(1)
    }
}

//! Affinity under a load bound.

use std::cmp::Reverse;
use std::str::FromStr;

use super::Candidate;

/// How affinity and load are blended: `LOXILB_KV_LB_MODE`, the rule's `kvLbMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Blend {
    /// The largest overlap wins, ties go to the first endpoint.
    Off,
    /// The largest overlap among those under their share of the load wins.
    #[default]
    Hard,
}

impl Blend {
    /// The word in the environment and in the rule.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Hard => "hard",
        }
    }
}

/// A blend that no mode of kvlb knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlendError {
    /// A mode that LoxiLB documents and this version does not serve.
    #[error("load blend {0:?} is not supported yet; use off or hard")]
    NotYet(String),
    /// Nothing anyone documents.
    #[error("unknown load blend {0:?}; use off or hard")]
    Unknown(String),
}

impl FromStr for Blend {
    type Err = BlendError;

    fn from_str(text: &str) -> Result<Self, BlendError> {
        match text {
            "off" => Ok(Self::Off),
            "hard" => Ok(Self::Hard),
            "soft" | "adaptive" | "adaptive-soft" | "cost" => Err(BlendError::NotYet(text.to_owned())),
            _ => Err(BlendError::Unknown(text.to_owned())),
        }
    }
}

/// The numbers that a choice obeys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How affinity and load are blended.
    pub blend: Blend,
    /// Percent of its fair share that an endpoint may carry (`LOXILB_KV_MEAN_LOAD_FACTOR`, 100 to 1000, default 175).
    pub mean_load_factor: u32,
    /// No bound is below this many requests: an idle fleet would else spill the second concurrent request of every
    /// prefix (`kvLoadFloor`, default 4).
    pub load_floor: u32,
    /// An owner over its bound may hand over to an endpoint that holds nothing (`LOXILB_KV_SPILL_RELIEF`).
    pub spill_relief: bool,
    /// Blocks that must overlap before the overlap is used.
    pub min_overlap: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { blend: Blend::Hard, mean_load_factor: 175, load_floor: 4, spill_relief: true, min_overlap: 1 }
    }
}

/// Who was chosen for its overlap, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Position of the endpoint in the rule.
    pub endpoint: usize,
    /// Blocks that it holds.
    pub overlap: u32,
    /// The load bound moved the request away from the largest overlap.
    pub spill: bool,
}

/// Why overlap chose nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No endpoint holds any block of the prompt.
    NoWorker,
    /// Only endpoints that may not be asked hold blocks.
    Excluded,
    /// The best overlap is below `min_overlap`.
    Shallow,
}

/// The endpoint that overlap and load choose among `candidates`.
///
/// # Errors
/// A [`Refusal`] where overlap says nothing: the rule's own selector answers then.
pub fn choose(candidates: &[Candidate], settings: &Settings) -> Result<Choice, Refusal> {
    let best = best_overlap(candidates)?;
    if best.overlap < settings.min_overlap {
        return Err(Refusal::Shallow);
    }
    let chosen = match settings.blend {
        Blend::Off => best,
        Blend::Hard => under_bound(candidates, settings),
    };
    Ok(Choice { endpoint: chosen.endpoint, overlap: chosen.overlap, spill: chosen.overlap < best.overlap })
}

/// The eligible candidate with the largest overlap, the first of equals.
fn best_overlap(candidates: &[Candidate]) -> Result<Candidate, Refusal> {
    let holders = || candidates.iter().filter(|c| c.overlap > 0);
    holders()
        .filter(|c| c.eligible)
        .min_by_key(|c| (Reverse(c.overlap), c.endpoint))
        .copied()
        .ok_or_else(|| if holders().next().is_some() { Refusal::Excluded } else { Refusal::NoWorker })
}

/// The largest overlap among holders under their bound; where all holders are over it, the least loaded endpoint of
/// those allowed to take over.
fn under_bound(candidates: &[Candidate], settings: &Settings) -> Candidate {
    let eligible = || candidates.iter().filter(|c| c.eligible);
    let bound = Bound::new(eligible(), settings);
    let owner = eligible()
        .filter(|c| c.overlap >= settings.min_overlap.max(1) && bound.admits(c))
        .min_by_key(|c| (Reverse(c.overlap), c.load, c.last_chosen, c.endpoint));
    let relief = || {
        eligible()
            .filter(|c| settings.spill_relief && bound.admits(c))
            .min_by_key(|c| (c.load, Reverse(c.overlap), c.last_chosen, c.endpoint))
    };
    let least_loaded_owner =
        || eligible().filter(|c| c.overlap > 0).min_by_key(|c| (c.load, Reverse(c.overlap), c.last_chosen, c.endpoint));
    owner.or_else(relief).or_else(least_loaded_owner).copied().unwrap_or_default()
}

/// How many requests each endpoint may carry: its share, by capacity, of all requests in flight and the one being
/// placed, times a factor. It is taken over every eligible endpoint, whether it holds blocks or not: a bound over the
/// holders alone would never move anything off a single one.
struct Bound {
    requests: u128,
    capacity: u128,
    factor: u128,
    floor: u32,
}

impl Bound {
    fn new<'a>(eligible: impl Iterator<Item = &'a Candidate>, settings: &Settings) -> Self {
        let (mut requests, mut capacity) = (1, 0);
        for candidate in eligible {
            requests += u128::from(candidate.load);
            capacity += u128::from(candidate.capacity);
        }
        Self { requests, capacity, factor: u128::from(settings.mean_load_factor), floor: settings.load_floor }
    }

    /// Whether `candidate` may take one more.
    fn admits(&self, candidate: &Candidate) -> bool {
        u128::from(candidate.load) < self.limit(candidate)
    }

    fn limit(&self, candidate: &Candidate) -> u128 {
        let share =
            (self.factor * self.requests * u128::from(candidate.capacity)).div_ceil((100 * self.capacity).max(1));
        share.max(u128::from(self.floor)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(endpoint: usize, overlap: u32, load: u32) -> Candidate {
        Candidate { endpoint, eligible: true, overlap, load, capacity: 1, ..Candidate::default() }
    }

    #[test]
    fn the_documents_worked_example_goes_to_the_holder_of_two() {
        let candidates = [candidate(0, 2, 0), candidate(2, 0, 0)];
        for blend in [Blend::Off, Blend::Hard] {
            let choice = choose(&candidates, &Settings { blend, ..Settings::default() });
            assert_eq!(choice, Ok(Choice { endpoint: 0, overlap: 2, spill: false }));
        }
    }

    #[test]
    fn with_the_blend_off_ties_go_to_the_first_endpoint_whatever_its_load() {
        let settings = Settings { blend: Blend::Off, ..Settings::default() };
        let choice = choose(&[candidate(0, 3, 90), candidate(1, 3, 0)], &settings);
        assert_eq!(choice.map(|c| c.endpoint), Ok(0));
    }

    #[test]
    fn ties_under_the_bound_go_to_less_load_then_to_the_least_recently_chosen() {
        let settings = Settings::default();
        let mut candidates = [candidate(0, 3, 2), candidate(1, 3, 1), candidate(2, 3, 1)];
        candidates[1].last_chosen = 9;
        candidates[2].last_chosen = 4;
        assert_eq!(choose(&candidates, &settings).map(|c| c.endpoint), Ok(2));
    }

    #[test]
    fn an_owner_over_its_share_of_the_whole_fleet_spills() {
        // 40 in flight and the new one: share of each of four is ceil(1.75 * 41 / 4) = 18.
        let candidates = [candidate(0, 9, 40), candidate(1, 0, 0), candidate(2, 0, 0), candidate(3, 0, 0)];
        let choice = choose(&candidates, &Settings::default());
        assert_eq!(choice, Ok(Choice { endpoint: 1, overlap: 0, spill: true }));
        let without_relief = Settings { spill_relief: false, ..Settings::default() };
        assert_eq!(choose(&candidates, &without_relief).map(|c| c.endpoint), Ok(0));
        let mut at_the_bound = candidates;
        at_the_bound[0].load = 17; // ceil(1.75 * 18 / 4) = 8, so it is over
        at_the_bound[1].load = 30; // and now ceil(1.75 * 48 / 4) = 21: under
        assert_eq!(choose(&at_the_bound, &Settings::default()).map(|c| c.endpoint), Ok(0));
    }

    #[test]
    fn an_idle_fleet_keeps_a_burst_of_one_prefix_together_up_to_the_floor() {
        for load in 0..4 {
            assert_eq!(
                choose(&[candidate(0, 5, load), candidate(1, 0, 0)], &Settings::default()).map(|c| c.endpoint),
                Ok(0)
            );
        }
        // ceil(1.75 * 5 / 2) = 5 admits the fifth, ceil(1.75 * 8 / 2) = 7 does not admit the eighth.
        assert_eq!(choose(&[candidate(0, 5, 7), candidate(1, 0, 0)], &Settings::default()).map(|c| c.endpoint), Ok(1));
    }

    #[test]
    fn the_second_best_overlap_serves_when_the_best_is_excluded() {
        let mut candidates = [candidate(0, 9, 0), candidate(1, 4, 3), candidate(2, 0, 0)];
        candidates[0].eligible = false;
        assert_eq!(choose(&candidates, &Settings::default()).map(|c| c.endpoint), Ok(1));
    }

    #[test]
    fn each_refusal_has_its_own_reason() {
        let settings = Settings { min_overlap: 2, ..Settings::default() };
        assert_eq!(choose(&[candidate(0, 0, 0)], &settings), Err(Refusal::NoWorker));
        assert_eq!(choose(&[], &settings), Err(Refusal::NoWorker));
        assert_eq!(choose(&[candidate(0, 1, 0)], &settings), Err(Refusal::Shallow));
        let mut out = candidate(0, 5, 0);
        out.eligible = false;
        assert_eq!(choose(&[out, candidate(1, 0, 0)], &settings), Err(Refusal::Excluded));
    }

    proptest! {
        #[test]
        fn an_ineligible_endpoint_is_never_chosen(
            rows in prop::collection::vec((any::<bool>(), 0u32..6, 0u32..40, 1u64..5000, any::<u64>()), 0..12),
            off in any::<bool>(), relief in any::<bool>(), min_overlap in 0u32..4,
        ) {
            let candidates: Vec<_> = rows.iter().enumerate().map(|(endpoint, row)| Candidate {
                endpoint, eligible: row.0, overlap: row.1, load: row.2, capacity: row.3, last_chosen: row.4,
                queued: None,
            }).collect();
            let blend = if off { Blend::Off } else { Blend::Hard };
            let settings = Settings { blend, spill_relief: relief, min_overlap, ..Settings::default() };
            if let Ok(choice) = choose(&candidates, &settings) {
                prop_assert!(candidates[choice.endpoint].eligible);
                prop_assert_eq!(candidates[choice.endpoint].overlap, choice.overlap);
            }
        }
    }
}

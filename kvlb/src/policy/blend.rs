//! Affinity under a load bound.

use std::cmp::Reverse;
use std::str::FromStr;

use super::{Bound, Candidate};

/// How affinity and load are blended: `LOXILB_KV_LB_MODE`, the rule's `kvLbMode`.
///
/// Source of all but `cost`: LoxiLB's inference gateway, whose formulas are kept except where design says otherwise: bounds
/// and penalties are taken over every eligible endpoint, and capacities count relative to their mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Blend {
    /// The largest overlap wins, ties go to the first endpoint.
    Off,
    /// The largest overlap among those under their share of the load wins.
    #[default]
    Hard,
    /// The smallest penalty for missing overlap and for load wins.
    Soft,
    /// As hard, with a bound that widens as the fleet fills.
    Adaptive,
    /// As soft, with a price of load that rises as the fleet fills.
    AdaptiveSoft,
    /// The fewest tokens to compute before the request's first one wins: its own and those that wait there.
    Cost,
}

impl Blend {
    /// Every blend.
    pub const ALL: [Self; 6] = [Self::Off, Self::Hard, Self::Soft, Self::Adaptive, Self::AdaptiveSoft, Self::Cost];

    /// The word in the environment and in the rule.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Hard => "hard",
            Self::Soft => "soft",
            Self::Adaptive => "adaptive",
            Self::AdaptiveSoft => "adaptive-soft",
            Self::Cost => "cost",
        }
    }
}

/// The words of [`Blend`], for errors and helps.
pub const BLENDS: &str = "off, hard, soft, adaptive, adaptive-soft or cost";

/// A blend that nothing knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown load blend {0:?}; use {BLENDS}")]
pub struct UnknownBlend(pub String);

impl FromStr for Blend {
    type Err = UnknownBlend;

    fn from_str(text: &str) -> Result<Self, UnknownBlend> {
        Self::ALL.into_iter().find(|blend| blend.label() == text).ok_or_else(|| UnknownBlend(text.to_owned()))
    }
}

/// The numbers that a choice obeys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How affinity and load are blended.
    pub blend: Blend,
    /// Percent of its fair share that an endpoint may carry (`LOXILB_KV_MEAN_LOAD_FACTOR`, 100 to 1000, default 175).
    pub mean_load_factor: u32,
    /// What a request in flight weighs in the soft blend, in thousandths of a block (`LOXILB_KV_LOAD_PENALTY`, 1 to 100000,
    /// default 32).
    pub load_penalty: u32,
    /// The fleet's capacity as the adaptive blends are to take it, in thousandths (`LOXILB_KV_CAP_SUM_MILLI`); `None`: the
    /// one that their numbers were made for.
    pub cap_sum_milli: Option<u64>,
    /// No bound is below this many requests: an idle fleet would else spill the second concurrent request of every
    /// prefix (`kvLoadFloor`, default 4).
    pub load_floor: u32,
    /// An owner over its bound may hand over to an endpoint that holds nothing (`LOXILB_KV_SPILL_RELIEF`).
    pub spill_relief: bool,
    /// Blocks that must overlap before the overlap is used.
    pub min_overlap: u32,
    /// Every so many hits one goes to a cold endpoint; 0: never (`LOXILB_KV_COLDSTART_SEED_N`, default 16).
    pub seed_every: u32,
    /// An endpoint that holds fewer blocks is cold (`LOXILB_KV_COLDSTART_MIN_BLOCKS`, default 16).
    pub seed_min_blocks: u32,
}

/// The capacity for which the adaptive blends' numbers were made, in thousandths. Source: LoxiLB.
pub const CAP_SUM_MILLI: u64 = 15_284_310;

impl Default for Settings {
    fn default() -> Self {
        Self {
            blend: Blend::Hard,
            mean_load_factor: 175,
            load_penalty: 32,
            cap_sum_milli: None,
            load_floor: 4,
            spill_relief: true,
            min_overlap: 1,
            seed_every: 16,
            seed_min_blocks: 16,
        }
    }
}

/// Who was chosen for its overlap, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Position of the endpoint in the rule.
    pub endpoint: usize,
    /// Blocks that it holds.
    pub overlap: u32,
    /// Load moved the request away from the largest overlap.
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
    let load = || settings.scaled_load(candidates);
    let chosen = match settings.blend {
        Blend::Off => Some(best),
        Blend::Hard => under_bound(candidates, settings, settings.mean_load_factor),
        Blend::Adaptive => under_bound(candidates, settings, adaptive_factor(load())),
        Blend::Soft => least_penalty(candidates, settings, settings.load_penalty),
        Blend::AdaptiveSoft => least_penalty(candidates, settings, adaptive_penalty(load())),
        Blend::Cost => cheapest(candidates),
    };
    let chosen = chosen.unwrap_or(best);
    Ok(Choice { endpoint: chosen.endpoint, overlap: chosen.overlap, spill: chosen.overlap < best.overlap })
}

/// The cold endpoint that the `hit`th hit of a rule goes to instead of `chosen`, where it is one's turn: the first that
/// may be asked, is known to hold next to nothing, and is under its bound. So an endpoint that joins warm ones gets blocks of
/// its own, a few requests at a time.
pub fn cold_seed(candidates: &[Candidate], settings: &Settings, chosen: usize, hit: u64) -> Option<usize> {
    if settings.seed_every == 0 || settings.blend == Blend::Off || !hit.is_multiple_of(settings.seed_every.into()) {
        return None;
    }
    let bound = Bound::new(candidates, settings.mean_load_factor, settings.load_floor);
    let cold = |c: &&Candidate| {
        c.eligible
            && c.inventory.is_some_and(|blocks| blocks < settings.seed_min_blocks.max(1).into())
            && bound.admits(c)
    };
    candidates.iter().find(cold).map(|c| c.endpoint).filter(|endpoint| *endpoint != chosen)
}

/// The endpoint at which the fewest tokens stand before the request's first one; `None` where nobody is eligible.
///
/// They are those of its own prompt that the endpoint would have to compute, those of others' that it has yet to, and a
/// few for each sequence that it runs beside; all relative to its capacity. Its own count for more than one each: what is
/// computed where another holds it keeps others waiting too, and takes the room of blocks that somebody may want.
///
/// A prompt that nobody holds any of goes where the fewest tokens wait, in turn where as many do: sequences that generate would
/// send two prompts in a row to the endpoint that runs the fewest, one behind the other.
pub fn cheapest(candidates: &[Candidate]) -> Option<Candidate> {
    let capacity = mean_capacity(candidates);
    let cost = |c: &Candidate| {
        let tokens = u128::from(c.uncached_tokens) * COMPUTED_PERCENT / 100 + u128::from(c.waiting_tokens);
        (tokens + u128::from(SEQUENCE_TOKENS) * u128::from(c.load)) * capacity.0
            / (capacity.1 * u128::from(c.capacity)).max(1)
    };
    let eligible = || candidates.iter().filter(|c| c.eligible);
    if eligible().all(|c| c.overlap == 0) {
        let waiting =
            |c: &Candidate| u128::from(c.waiting_tokens) * capacity.0 / (capacity.1 * u128::from(c.capacity)).max(1);
        return eligible().min_by_key(|c| (waiting(c), c.last_chosen, c.load, c.endpoint)).copied();
    }
    eligible().min_by_key(|c| (cost(c), c.load, Reverse(c.overlap), c.last_chosen, c.endpoint)).copied()
}

/// What a sequence that generates costs the prompts beside it, in tokens of theirs. It spreads requests for which nothing is
/// left to compute, and long answers: with 64 endpoints that got more of llm-d's prefixes than others have a queue of 23 s,
/// with 512 groups of prompts are torn apart (`cargo xtask sim`).
const SEQUENCE_TOKENS: u32 = 256;
/// What a token to compute weighs, in percent of one that waits. At 100 groups of prompts lose a tenth of their hits in caches
/// that hold all only once; from 150 on conversations under one system prompt leave endpoints idle (`cargo xtask sim`,
/// docs/policy.md).
const COMPUTED_PERCENT: u128 = 140;

/// Sum and number of the capacities of the eligible.
fn mean_capacity(candidates: &[Candidate]) -> (u128, u128) {
    let eligible = candidates.iter().filter(|c| c.eligible);
    eligible.fold((0, 0), |(sum, number), c| (sum + u128::from(c.capacity), number + 1))
}

impl Settings {
    /// Requests in flight over the fleet, as the adaptive blends take them: relative to its capacity where that is set.
    fn scaled_load(&self, candidates: &[Candidate]) -> u64 {
        let load: u64 = candidates.iter().filter(|c| c.eligible).map(|c| u64::from(c.load)).sum();
        let scaled = |sum: u64| u128::from(load) * u128::from(CAP_SUM_MILLI) / u128::from(sum.max(1));
        self.cap_sum_milli.map_or(load, |sum| u64::try_from(scaled(sum)).unwrap_or(u64::MAX))
    }
}

/// Load at which the adaptive blends begin to change. Source: LoxiLB.
const ADAPTIVE_FROM: u64 = 16;

/// Percent of a fair share under so many requests in flight: 175 up to 16, 300 from 26 on.
fn adaptive_factor(load: u64) -> u32 {
    let more = load.saturating_sub(ADAPTIVE_FROM).min(10);
    175 + u32::try_from(125 * more / 10).unwrap_or(125)
}

/// Thousandths of a block that a request weighs under so many in flight: 50 blocks up to 16, 100 from 26 on.
fn adaptive_penalty(load: u64) -> u32 {
    let more = load.saturating_sub(ADAPTIVE_FROM).min(10);
    50_000 + u32::try_from(5_000 * more).unwrap_or(50_000)
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
fn under_bound(candidates: &[Candidate], settings: &Settings, factor: u32) -> Option<Candidate> {
    let eligible = || candidates.iter().filter(|c| c.eligible);
    let bound = Bound::new(candidates, factor, settings.load_floor);
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
    owner.or_else(relief).or_else(least_loaded_owner).copied()
}

/// The smallest sum of a thousand for each block that another holds more, and `price` for each request in flight, by
/// capacity. Endpoints that hold nothing take part where they may take over.
fn least_penalty(candidates: &[Candidate], settings: &Settings, price: u32) -> Option<Candidate> {
    let eligible = || candidates.iter().filter(|c| c.eligible);
    let most = eligible().map(|c| c.overlap).max()?;
    let capacity = mean_capacity(candidates);
    let penalty = |c: &Candidate| {
        let load = u128::from(price) * u128::from(c.load) * capacity.0 / (capacity.1 * u128::from(c.capacity)).max(1);
        u128::from(most - c.overlap) * 1_000 + load
    };
    eligible()
        .filter(|c| settings.spill_relief || c.overlap >= settings.min_overlap.max(1))
        .min_by_key(|c| (penalty(c), Reverse(c.overlap), c.load, c.last_chosen, c.endpoint))
        .copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(endpoint: usize, overlap: u32, load: u32) -> Candidate {
        Candidate { endpoint, eligible: true, overlap, load, capacity: 1, weight: 1, ..Candidate::default() }
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

    fn mode(blend: Blend) -> Settings {
        Settings { blend, ..Settings::default() }
    }

    fn chosen(candidates: &[Candidate], settings: &Settings) -> usize {
        choose(candidates, settings).unwrap().endpoint
    }

    #[test]
    fn every_word_names_its_blend_and_no_other_word_does() {
        for blend in Blend::ALL {
            assert_eq!(blend.label().parse(), Ok(blend));
        }
        assert_eq!(
            "Hard".parse::<Blend>().unwrap_err().to_string(),
            format!("unknown load blend \"Hard\"; use {BLENDS}")
        );
    }

    #[test]
    fn soft_weighs_a_block_against_the_price_of_a_request() {
        // 3 blocks more are worth 3000: at 32 a request that is 93 requests, the 94th costs 3008.
        let settings = mode(Blend::Soft);
        assert_eq!(chosen(&[candidate(0, 5, 93), candidate(1, 2, 0)], &settings), 0);
        assert_eq!(chosen(&[candidate(0, 5, 94), candidate(1, 2, 0)], &settings), 1);
        // At 1000 a request it is three; at a tie the larger overlap wins.
        let dear = Settings { load_penalty: 1_000, ..settings };
        assert_eq!(chosen(&[candidate(0, 5, 3), candidate(1, 2, 0)], &dear), 0);
        assert_eq!(chosen(&[candidate(0, 5, 4), candidate(1, 2, 0)], &dear), 1);
        // One that holds nothing takes part where it may take over.
        assert_eq!(chosen(&[candidate(0, 5, 6), candidate(1, 0, 0)], &dear), 1);
        let kept = Settings { spill_relief: false, ..dear };
        assert_eq!(chosen(&[candidate(0, 5, 6), candidate(1, 0, 0)], &kept), 0);
    }

    #[test]
    fn soft_sees_load_whatever_the_unit_of_capacity_is() {
        let dear = Settings { load_penalty: 1_000, ..mode(Blend::Soft) };
        for unit in [1, 5_000, 8_000_000] {
            let mut candidates = [candidate(0, 5, 4), candidate(1, 2, 0)];
            for candidate in &mut candidates {
                candidate.capacity = unit;
            }
            assert_eq!(chosen(&candidates, &dear), 1);
            // Three quarters of the capacity are here: 6 requests cost 1000 * 6 * (4 / 2) / 3 = 4000.
            candidates[0].capacity = 3 * unit;
            candidates[0].load = 4;
            assert_eq!(chosen(&candidates, &dear), 0, "1000 * 4 * 2 / 3 = 2666");
            candidates[0].load = 6;
            assert_eq!(chosen(&candidates, &dear), 1);
        }
    }

    #[test]
    fn adaptive_widens_the_bound_as_the_fleet_fills() {
        let factors: Vec<_> = [0, 16, 17, 20, 26, 400].map(adaptive_factor).to_vec();
        assert_eq!(factors, [175, 175, 187, 225, 300, 300]);
        // 26 in flight on two: hard admits ceil(1.75 * 27 / 2) = 24, adaptive ceil(3 * 27 / 2) = 41.
        let candidates = [candidate(0, 5, 26), candidate(1, 0, 0)];
        assert_eq!(chosen(&candidates, &mode(Blend::Hard)), 1);
        assert_eq!(chosen(&candidates, &mode(Blend::Adaptive)), 0);
        // A fleet of twice the size that the numbers were made for is half as full: 13.
        let large = Settings { cap_sum_milli: Some(2 * CAP_SUM_MILLI), ..mode(Blend::Adaptive) };
        assert_eq!(chosen(&candidates, &large), 1);
    }

    #[test]
    fn adaptive_soft_raises_the_price_as_the_fleet_fills() {
        let prices: Vec<_> = [0, 16, 17, 20, 26, 400].map(adaptive_penalty).to_vec();
        assert_eq!(prices, [50_000, 50_000, 55_000, 70_000, 100_000, 100_000]);
        // A request weighs 50 blocks: 100 blocks more are worth two.
        let settings = mode(Blend::AdaptiveSoft);
        assert_eq!(chosen(&[candidate(0, 128, 2), candidate(1, 28, 0)], &settings), 0);
        assert_eq!(chosen(&[candidate(0, 128, 3), candidate(1, 28, 0)], &settings), 1);
        // From 26 on it weighs 100: 13 against 14 is one request, and 99 blocks are less.
        assert_eq!(chosen(&[candidate(0, 127, 14), candidate(1, 28, 13)], &settings), 1);
        assert_eq!(chosen(&[candidate(0, 128, 14), candidate(1, 28, 13)], &settings), 0);
    }

    #[test]
    fn cost_counts_the_tokens_that_stand_before_the_first_one() {
        let with = |endpoint, overlap, load, uncached, waiting| Candidate {
            uncached_tokens: uncached,
            waiting_tokens: waiting,
            ..candidate(endpoint, overlap, load)
        };
        let settings = mode(Blend::Cost);
        // Here 1.4 * 200 tokens, 1550 that wait and 256 for each of 7 are 3622, there 1.4 * 2600 are 3640.
        assert_eq!(chosen(&[with(0, 150, 7, 200, 1_550), with(1, 0, 0, 2_600, 0)], &settings), 0);
        let choice = choose(&[with(0, 150, 8, 200, 1_550), with(1, 0, 0, 2_600, 0)], &settings).unwrap();
        assert_eq!((choice.endpoint, choice.spill), (1, true));
        // Of twice the capacity it is half as far away.
        let mut large = [with(0, 150, 16, 200, 2_800), with(1, 0, 0, 2_600, 0)];
        large[0].capacity = 2;
        assert_eq!(chosen(&large, &settings), 0);
        // A prompt that nobody knows goes where least waits.
        let cold = [with(0, 0, 1, 900, 4_000), with(1, 0, 2, 900, 100), with(2, 0, 3, 900, 100)];
        assert_eq!(cheapest(&cold).map(|c| c.endpoint), Some(1));
        assert_eq!(choose(&cold, &settings), Err(Refusal::NoWorker));
        // Whatever runs beside it, in turn.
        let last = |last_chosen, c: Candidate| Candidate { last_chosen, ..c };
        let turns =
            [last(2, with(0, 0, 0, 900, 100)), last(1, with(1, 0, 9, 900, 100)), last(0, with(2, 0, 0, 900, 101))];
        assert_eq!(cheapest(&turns).map(|c| c.endpoint), Some(1));
    }

    #[test]
    fn every_sixteenth_hit_seeds_the_first_cold_endpoint() {
        let settings = Settings::default();
        let known = |endpoint, blocks| Candidate { inventory: Some(blocks), ..candidate(endpoint, 0, 0) };
        let mut fleet = [known(0, 900), known(1, 3), known(2, 0)];
        assert_eq!(cold_seed(&fleet, &settings, 0, 15), None);
        assert_eq!(cold_seed(&fleet, &settings, 0, 16), Some(1));
        assert_eq!(cold_seed(&fleet, &settings, 1, 32), None, "it goes there already");
        fleet[1].eligible = false;
        assert_eq!(cold_seed(&fleet, &settings, 0, 16), Some(2));
        fleet[2].load = 100;
        assert_eq!(cold_seed(&fleet, &settings, 0, 16), None, "over its bound");
        fleet[2].load = 0;
        fleet[2].inventory = None;
        assert_eq!(cold_seed(&fleet, &settings, 0, 16), None, "nothing tells that it is cold");
        fleet[2].inventory = Some(16);
        assert_eq!(cold_seed(&fleet, &settings, 0, 16), None, "warm");
        let never = Settings { seed_every: 0, ..settings };
        fleet[2].inventory = Some(0);
        assert_eq!(cold_seed(&fleet, &never, 0, 16), None);
        let some = Settings { seed_min_blocks: 0, ..settings };
        assert_eq!(cold_seed(&fleet, &some, 0, 16), Some(2), "none is fewer than one");
    }

    proptest! {
        #[test]
        fn an_ineligible_endpoint_is_never_chosen(
            rows in prop::collection::vec((any::<bool>(), 0u32..6, 0u32..40, 1u64..5000, any::<u64>()), 0..12),
            waiting in prop::collection::vec(0u64..100_000, 12),
            blend in prop::sample::select(Blend::ALL.to_vec()), relief in any::<bool>(), min_overlap in 0u32..4,
        ) {
            let candidates: Vec<_> = rows.iter().enumerate().map(|(endpoint, row)| Candidate {
                endpoint, eligible: row.0, overlap: row.1, load: row.2, capacity: row.3, last_chosen: row.4,
                waiting_tokens: waiting[endpoint], inventory: Some(u64::from(row.2)), ..Candidate::default()
            }).collect();
            let settings = Settings { blend, spill_relief: relief, min_overlap, ..Settings::default() };
            if let Ok(choice) = choose(&candidates, &settings) {
                prop_assert!(candidates[choice.endpoint].eligible);
                prop_assert_eq!(candidates[choice.endpoint].overlap, choice.overlap);
                let holds = choice.overlap >= min_overlap.max(1);
                prop_assert!(holds || relief || blend == Blend::Cost || blend == Blend::Hard || blend == Blend::Adaptive);
            }
            for endpoint in [cheapest(&candidates).map(|c| c.endpoint), cold_seed(&candidates, &settings, 99, 16)] {
                prop_assert!(endpoint.is_none_or(|endpoint| candidates[endpoint].eligible));
            }
        }
    }
}

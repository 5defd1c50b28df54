//! The rule's own selector, for requests that affinity says nothing of.

use std::net::IpAddr;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Bound, Candidate};
use crate::fleet::Selector;

/// What a selector needs to know of the moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turn {
    /// A number that grows by one with every choice of the rule.
    pub number: u64,
    /// The client's address.
    pub client: Option<IpAddr>,
    /// A number that requests with the same model and the same beginning of their prompt share.
    pub prefix: Option<u64>,
    /// Percent of its fair share that an endpoint may carry of requests that are placed by `prefix`.
    pub load_factor: u32,
}

/// No bound of the hashing selectors is below this many requests.
const HASH_FLOOR: u32 = 2;

/// The endpoint that `selector` gives to this turn; `None` where nobody is eligible.
///
/// `lc`, `chwbl`, `gpuaware`, `wrr-hash` and all tie-breaks look at load; `hash` and `persist` keep a client where it is
/// while that endpoint is eligible, and move only the clients of an endpoint that went away.
pub fn select(selector: Selector, candidates: &[Candidate], turn: Turn) -> Option<usize> {
    let eligible: Vec<&Candidate> = candidates.iter().filter(|c| c.eligible).collect();
    if eligible.is_empty() {
        return None;
    }
    let chosen = match (selector, turn.client, turn.prefix) {
        (Selector::Hash | Selector::Persist, Some(client), _) => by_client(&eligible, client),
        (Selector::LeastConnections, _, _) => least_loaded(&eligible),
        (Selector::Priority, _, _) | (Selector::WrrHash, _, None) => by_weight(&eligible, turn.number),
        (Selector::Chwbl, _, Some(prefix)) => by_prefix(candidates, prefix, turn.load_factor, |_| 1),
        (Selector::WrrHash, _, Some(prefix)) => by_prefix(candidates, prefix, turn.load_factor, |c| c.weight),
        (Selector::GpuAware, _, _) => most_room(&eligible),
        _ => Some(eligible[usize::try_from(turn.number).unwrap_or(usize::MAX) % eligible.len()]),
    };
    chosen.map(|candidate| candidate.endpoint)
}

/// The least loaded for its weight, of equals the least recently chosen.
fn least_loaded<'a>(eligible: &[&'a Candidate]) -> Option<&'a Candidate> {
    // Loads are below 2^32 and weights below 2^8: a common multiple of all weights would be larger than needed.
    let load = |c: &Candidate| (u64::from(c.load) << 20) / u64::from(c.weight.max(1));
    eligible.iter().min_by_key(|c| (load(c), c.last_chosen, c.endpoint)).copied()
}

/// The one with the least in flight and in its engine's queue for its capacity, of equals the least recently chosen. A
/// request that waits at the engine weighs more than one that runs.
///
/// Source of the weights: LoxiLB's score of GPU endpoints, 20 for a request in flight and 50 for one that waits.
fn most_room<'a>(eligible: &[&'a Candidate]) -> Option<&'a Candidate> {
    let waiting = |c: &Candidate| u128::from(c.queued.unwrap_or_default());
    let busy = |c: &Candidate| (u128::from(c.load) * 20 + waiting(c) * 50) << 32;
    eligible.iter().min_by_key(|c| (busy(c) / u128::from(c.capacity.max(1)), c.last_chosen, c.endpoint)).copied()
}

/// Rendezvous hashing: the endpoint that scores highest with this client.
fn by_client<'a>(eligible: &[&'a Candidate], client: IpAddr) -> Option<&'a Candidate> {
    let score = |c: &Candidate| match client {
        IpAddr::V4(address) => xxh3_64_with_seed(&address.octets(), c.endpoint as u64),
        IpAddr::V6(address) => xxh3_64_with_seed(&address.octets(), c.endpoint as u64),
    };
    eligible.iter().max_by_key(|c| score(c)).copied()
}

/// Rendezvous hashing by weight, under a bound of load: the endpoint that scores highest with this prefix among those that
/// may carry one more. The order of all endpoints is the prefix's own, so what one is too busy for goes to the same next one.
fn by_prefix(
    candidates: &[Candidate],
    prefix: u64,
    load_factor: u32,
    weight: impl Fn(&Candidate) -> u32,
) -> Option<&Candidate> {
    // The hash as a fraction u of 1: -ln(u) / weight is the smallest at each endpoint with a chance in proportion to its weight.
    #[expect(clippy::cast_precision_loss, reason = "53 bits of a hash are enough")]
    let rank = |c: &&Candidate| {
        let hash = xxh3_64_with_seed(&prefix.to_le_bytes(), c.endpoint as u64) >> 11;
        let fraction = (hash as f64 + 0.5) / (1u64 << 53) as f64;
        -fraction.ln() / f64::from(weight(c).max(1))
    };
    let sized: Vec<Candidate> =
        candidates.iter().map(|c| Candidate { capacity: weight(c).max(1).into(), ..*c }).collect();
    let bound = Bound::new(&sized, load_factor, HASH_FLOOR);
    let under = candidates.iter().zip(&sized).filter(|(c, sized)| c.eligible && bound.admits(sized)).map(|(c, _)| c);
    under.min_by(|a, b| rank(a).total_cmp(&rank(b)))
}

/// Spreads turns over the endpoints by their weights: in as many turns in a row as the weights add up to, each gets exactly
/// its weight, spaced evenly.
///
/// The `k`th of an endpoint's `w` turns is due at `(2k + 1) / 2w` of the cycle; the turns are taken in the order in which
/// they are due.
fn by_weight<'a>(eligible: &[&'a Candidate], number: u64) -> Option<&'a Candidate> {
    const CYCLE: u64 = 1 << 40;
    let weight = |c: &Candidate| u64::from(c.weight.max(1));
    let turn = number % eligible.iter().map(|c| weight(c)).sum::<u64>();
    // Turns of an endpoint that are due up to a moment of the cycle.
    let due = |c: &Candidate, at: u64| {
        let halves = u128::from(2 * weight(c)) * u128::from(at) / u128::from(CYCLE);
        u64::try_from(halves.div_ceil(2)).unwrap_or(u64::MAX)
    };
    let all_due = |at: u64| eligible.iter().map(|c| due(c, at)).sum::<u64>();
    let (mut before, mut at) = (0, CYCLE);
    while before + 1 < at {
        let middle = u64::midpoint(before, at);
        if all_due(middle) > turn { at = middle } else { before = middle }
    }
    // Of those due at the same moment the first comes first.
    let mut left = turn - all_due(before);
    eligible
        .iter()
        .find(|c| {
            let here = due(c, at) - due(c, before);
            let found = left < here;
            left = left.saturating_sub(here);
            found
        })
        .copied()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn pool(n: usize) -> Vec<Candidate> {
        let candidate =
            |endpoint| Candidate { endpoint, eligible: true, capacity: 1, weight: 1, ..Candidate::default() };
        (0..n).map(candidate).collect()
    }

    fn turn(number: u64) -> Turn {
        Turn { number, ..Turn::default() }
    }

    #[test]
    fn round_robin_gives_each_eligible_endpoint_its_turn() {
        let mut pool = pool(4);
        pool[1].eligible = false;
        let got: Vec<_> = (0..6).filter_map(|n| select(Selector::RoundRobin, &pool, turn(n))).collect();
        assert_eq!(got, [0, 2, 3, 0, 2, 3]);
    }

    #[test]
    fn nobody_eligible_is_nobody() {
        let mut pool = pool(1);
        pool[0].eligible = false;
        assert_eq!(select(Selector::RoundRobin, &pool, turn(0)), None);
    }

    #[test]
    fn a_client_stays_and_only_the_clients_of_a_lost_endpoint_move() {
        let mut pool = pool(5);
        let client = |n: u8| Turn {
            number: u64::from(n),
            client: Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, n))),
            ..Turn::default()
        };
        let before: Vec<_> = (0..200).map(|n| select(Selector::Persist, &pool, client(n))).collect();
        pool[3].eligible = false;
        for (n, was) in (0..200).zip(&before) {
            let now = select(Selector::Persist, &pool, client(n));
            assert!(if *was == Some(3) { now != Some(3) } else { now == *was });
        }
        assert!(before.contains(&Some(3)));
    }

    #[test]
    fn least_connections_takes_the_least_loaded() {
        let mut pool = pool(3);
        pool[0].load = 2;
        pool[1].load = 1;
        pool[2].load = 5;
        assert_eq!(select(Selector::LeastConnections, &pool, turn(7)), Some(1));
    }

    #[test]
    fn least_connections_counts_by_weight() {
        let mut pool = pool(2);
        (pool[0].load, pool[0].weight) = (5, 3);
        (pool[1].load, pool[1].weight) = (2, 1);
        assert_eq!(select(Selector::LeastConnections, &pool, turn(0)), Some(0), "5 of 3 is less than 2 of 1");
        pool[0].load = 7;
        assert_eq!(select(Selector::LeastConnections, &pool, turn(0)), Some(1));
    }

    #[test]
    fn priority_gives_each_endpoint_its_weight_in_every_cycle_evenly_spaced() {
        let mut pool = pool(3);
        for (candidate, weight) in pool.iter_mut().zip([5, 1, 1]) {
            candidate.weight = weight;
        }
        let got: Vec<_> = (0..14).filter_map(|n| select(Selector::Priority, &pool, turn(n))).collect();
        assert_eq!(got, [0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 1, 2, 0, 0]);
        for (candidate, weight) in pool.iter_mut().zip([1, 2, 5]) {
            candidate.weight = weight;
        }
        let got: Vec<_> = (0..800).filter_map(|n| select(Selector::Priority, &pool, turn(n))).collect();
        for window in got.windows(8) {
            for (endpoint, share) in [(0, 1), (1, 2), (2, 5)] {
                let n = window.iter().filter(|e| **e == endpoint).count();
                assert!(n.abs_diff(share) <= 1, "endpoint {endpoint} had {n} of 8 turns");
            }
        }
        assert_eq!(got.iter().filter(|e| **e == 2).count(), 500);
    }

    #[test]
    fn priority_counts_the_eligible_only_and_takes_any_weight() {
        let mut pool = pool(32);
        for (n, candidate) in pool.iter_mut().enumerate() {
            candidate.weight = if n % 2 == 0 { 255 } else { 7 };
            candidate.eligible = n < 4;
        }
        let mut counts = [0; 32];
        (0..524).filter_map(|n| select(Selector::Priority, &pool, turn(n))).for_each(|endpoint| counts[endpoint] += 1);
        assert_eq!(counts[..5], [255, 7, 255, 7, 0]);
    }

    fn prefixed(prefix: u64, factor: u32) -> Turn {
        Turn { number: prefix, prefix: Some(prefix), load_factor: factor, ..Turn::default() }
    }

    #[test]
    fn a_prefix_stays_until_its_endpoint_carries_its_share_and_then_goes_on_to_the_same_next_one() {
        let mut pool = pool(4);
        let first = select(Selector::Chwbl, &pool, prefixed(7, 125)).unwrap();
        for load in 0..2 {
            pool[first].load = load;
            assert_eq!(select(Selector::Chwbl, &pool, prefixed(7, 125)), Some(first));
        }
        // ceil(1.25 * 9 / 4) = 3: over it with eight.
        pool[first].load = 8;
        let second = select(Selector::Chwbl, &pool, prefixed(7, 125)).unwrap();
        assert_ne!(second, first);
        pool[first].load = 0;
        pool[first].eligible = false;
        assert_eq!(select(Selector::Chwbl, &pool, prefixed(7, 125)), Some(second));
    }

    #[test]
    fn one_hot_prefix_is_spread_and_no_endpoint_carries_more_than_its_bound() {
        for selector in [Selector::Chwbl, Selector::WrrHash] {
            let mut pool = pool(4);
            for _ in 0..400 {
                let chosen = select(selector, &pool, prefixed(42, 125)).unwrap();
                pool[chosen].load += 1;
            }
            assert!(pool.iter().all(|c| c.load <= 126), "{selector:?}: {pool:?}");
        }
    }

    #[test]
    fn prefixes_spread_by_weight_where_the_selector_knows_weights() {
        let mut pool = pool(3);
        for (candidate, weight) in pool.iter_mut().zip([1, 2, 5]) {
            candidate.weight = weight;
        }
        let share = |selector: Selector| {
            let mut counts = [0; 3];
            (0..8000).filter_map(|n| select(selector, &pool, prefixed(n, 125))).for_each(|e| counts[e] += 1);
            counts
        };
        let weighted = share(Selector::WrrHash);
        assert!(
            weighted.iter().zip([1000, 2000, 5000]).all(|(n, due): (&i32, _)| n.abs_diff(due) < 200),
            "{weighted:?}"
        );
        let even = share(Selector::Chwbl);
        assert!(even.iter().all(|n: &i32| n.abs_diff(2667) < 200), "{even:?}");
    }

    #[test]
    fn a_client_without_a_prompt_gets_its_turn_from_the_hashing_selectors() {
        let pool = pool(3);
        for selector in [Selector::Chwbl, Selector::WrrHash] {
            let mut got: Vec<_> = (0..3).filter_map(|n| select(selector, &pool, turn(n))).collect();
            got.sort_unstable();
            assert_eq!(got, [0, 1, 2]);
        }
    }

    #[test]
    fn room_is_load_for_capacity() {
        let mut pool = pool(2);
        (pool[0].load, pool[0].capacity) = (3, 8000);
        (pool[1].load, pool[1].capacity) = (2, 4000);
        assert_eq!(select(Selector::GpuAware, &pool, turn(0)), Some(0));
        // Three wait at the engine: (3 * 20 + 3 * 50) / 8000 is more than 2 * 20 / 4000.
        pool[0].queued = Some(3);
        assert_eq!(select(Selector::GpuAware, &pool, turn(0)), Some(1));
    }
}

//! The rule's own selector, for requests that affinity says nothing of.

use std::net::IpAddr;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Candidate;
use crate::fleet::Selector;

/// What a selector needs to know of the moment.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// A number that grows by one with every choice of the rule.
    pub number: u64,
    /// The client's address.
    pub client: Option<IpAddr>,
}

/// The endpoint that `selector` gives to this turn; `None` where nobody is eligible.
///
/// `lc` and the tie-breaks look at load; `hash` and `persist` keep a client where it is while that endpoint is eligible,
/// and move only the clients of an endpoint that went away.
pub fn select(selector: Selector, candidates: &[Candidate], turn: Turn) -> Option<usize> {
    let eligible: Vec<&Candidate> = candidates.iter().filter(|c| c.eligible).collect();
    if eligible.is_empty() {
        return None;
    }
    let chosen = match (selector, turn.client) {
        (Selector::Hash | Selector::Persist, Some(client)) => by_client(&eligible, client),
        (Selector::LeastConnections, _) => least_loaded(&eligible),
        (Selector::Priority, _) => by_weight(&eligible, turn.number),
        _ => Some(eligible[usize::try_from(turn.number).unwrap_or(usize::MAX) % eligible.len()]),
    };
    chosen.map(|candidate| candidate.endpoint)
}

/// The least loaded, of equals the least recently chosen.
fn least_loaded<'a>(eligible: &[&'a Candidate]) -> Option<&'a Candidate> {
    eligible.iter().min_by_key(|c| (c.load, c.last_chosen, c.endpoint)).copied()
}

/// Rendezvous hashing: the endpoint that scores highest with this client.
fn by_client<'a>(eligible: &[&'a Candidate], client: IpAddr) -> Option<&'a Candidate> {
    let score = |c: &Candidate| match client {
        IpAddr::V4(address) => xxh3_64_with_seed(&address.octets(), c.endpoint as u64),
        IpAddr::V6(address) => xxh3_64_with_seed(&address.octets(), c.endpoint as u64),
    };
    eligible.iter().max_by_key(|c| score(c)).copied()
}

/// Spreads turns over the endpoints in proportion to their capacity, without long runs on one: the turn's number times
/// the golden ratio falls evenly into the cumulated shares.
fn by_weight<'a>(eligible: &[&'a Candidate], number: u64) -> Option<&'a Candidate> {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15; // 2^64 / golden ratio, the step of an evenly spread sequence
    let total: u128 = eligible.iter().map(|c| u128::from(c.capacity)).sum();
    let point = (u128::from(number.wrapping_mul(GOLDEN)) * total) >> 64;
    let mut seen = 0;
    eligible
        .iter()
        .find(|c| {
            seen += u128::from(c.capacity);
            point < seen
        })
        .copied()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn pool(n: usize) -> Vec<Candidate> {
        (0..n).map(|endpoint| Candidate { endpoint, eligible: true, capacity: 1, ..Candidate::default() }).collect()
    }

    fn turn(number: u64) -> Turn {
        Turn { number, client: None }
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
        let client = |n: u8| Turn { number: u64::from(n), client: Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, n))) };
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
    fn priority_follows_the_weights_without_long_runs() {
        let mut pool = pool(3);
        pool[0].capacity = 1;
        pool[1].capacity = 2;
        pool[2].capacity = 5;
        let got: Vec<_> = (0..800).filter_map(|n| select(Selector::Priority, &pool, turn(n))).collect();
        for (endpoint, share) in [(0, 100), (1, 200), (2, 500)] {
            let n = got.iter().filter(|e| **e == endpoint).count();
            assert!(n.abs_diff(share) <= 4, "endpoint {endpoint} had {n} of 800 turns");
        }
        assert!(got.windows(4).all(|w| w.iter().any(|e| *e != w[0]) || w[0] == 2));
    }
}

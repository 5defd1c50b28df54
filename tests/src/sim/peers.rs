//! Other people's choices, modelled from what they publish: formulas and default numbers, not their code.
//!
//! What they know of caches is what kvlb's own index knows; loads are those of kvlb's guards. Each model keeps for itself what the
//! formula needs besides: prompts that are being computed, blocks in use, what it sent where.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvlb::contract::BlockHash;
use kvlb::policy::Candidate;

use super::figures::{float, small};
use super::model::Gauges;
use super::pool::ByName;
use super::workload::Ask;
use crate::engine::chance::Chance;

/// Whose choice is modelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// In turn, whatever is asked.
    RoundRobin,
    /// By chance.
    Random,
    /// llm-d: prefix match by events, queue and cache use, with weights 3, 2, 2.
    LlmdPrecise,
    /// llm-d: the same by what was sent where: per endpoint the last 31,250 blocks of 64 tokens.
    LlmdApproximate,
    /// llm-d: queue and cache use alone.
    LlmdLoad,
    /// Dynamo: prompt blocks to compute, waiting ones included, plus blocks in use.
    Dynamo,
    /// vllm-router `kv_aware`: tokens to compute, waiting ones included, times requests.
    VllmKvAware,
    /// vllm-router `cache_aware`: the tree that matches most while loads are alike, else the least loaded.
    VllmCacheAware,
}

/// What a choice is made by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sight<'a> {
    /// Who may be asked, and how busy each is.
    pub(super) candidates: &'a [Candidate],
    /// Leading blocks of the prompt that each announced.
    pub(super) depths: &'a [u32],
    /// What each last said of itself.
    pub(super) gauges: &'a [Gauges],
}

/// What is known of one endpoint.
#[derive(Debug, Default)]
struct Known {
    /// Tokens of prompts that are being computed or wait for it.
    prefill_tokens: u32,
    /// Blocks of requests in flight, and how many use each.
    active: ByName<u32>,
    /// What was sent there.
    sent: Remembered,
}

/// Names, the longest unused forgotten first.
#[derive(Debug, Default)]
struct Remembered {
    ages: ByName<u64>,
    by_age: BTreeMap<u64, BlockHash>,
    age: u64,
}

impl Remembered {
    fn keep(&mut self, names: impl Iterator<Item = BlockHash>, most: usize) {
        for name in names {
            self.age += 1;
            if let Some(before) = self.ages.insert(name, self.age) {
                self.by_age.remove(&before);
            }
            self.by_age.insert(self.age, name);
        }
        while self.by_age.len() > most {
            let Some((_, name)) = self.by_age.pop_first() else { return };
            self.ages.remove(&name);
        }
    }

    fn run(&self, names: impl Iterator<Item = BlockHash>) -> u32 {
        small(names.take_while(|name| self.ages.contains_key(name)).count())
    }
}

/// A request that a model sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    endpoint: usize,
    /// Prompt tokens that it was expected to compute.
    prefill_tokens: u32,
    is_answered: bool,
}

/// A model of somebody else's choice.
#[derive(Debug)]
pub(super) struct Peer {
    kind: Kind,
    block_size: u32,
    chance: Chance,
    turn: usize,
    known: Vec<Known>,
}

impl Peer {
    /// One that knows nothing yet.
    pub(super) fn new(kind: Kind, block_size: u32, seed: u64) -> Self {
        Self { kind, block_size, chance: Chance::new(Chance::seed_of("peer", &[seed])), turn: 0, known: Vec::new() }
    }

    /// The endpoint for a request; none where nobody may be asked.
    pub(super) fn choose(&mut self, ask: &Ask, sight: &Sight<'_>) -> Option<usize> {
        self.known.resize_with(sight.candidates.len().max(self.known.len()), Known::default);
        let eligible: Vec<&Candidate> = sight.candidates.iter().filter(|candidate| candidate.eligible).collect();
        if eligible.is_empty() {
            return None;
        }
        self.turn += 1;
        match self.kind {
            Kind::RoundRobin => Some(eligible[self.turn % eligible.len()].endpoint),
            Kind::Random => Some(eligible[self.chance.below(eligible.len())].endpoint),
            Kind::VllmCacheAware => self.cache_aware(ask, &eligible),
            Kind::LlmdPrecise | Kind::LlmdApproximate | Kind::LlmdLoad => {
                let scores = self.llmd(ask, sight, &eligible);
                self.best(&eligible, |at| -scores[at])
            }
            Kind::Dynamo => {
                let costs: Vec<f64> = eligible.iter().map(|c| self.dynamo(ask, sight, c.endpoint)).collect();
                self.best(&eligible, |at| costs[at])
            }
            Kind::VllmKvAware => {
                let cost = |c: &&Candidate| {
                    let uncached = ask.tokens - self.credited(ask, sight.depths[c.endpoint]);
                    f64::from(uncached + self.known[c.endpoint].prefill_tokens) * f64::from(c.load + 1)
                };
                let costs: Vec<f64> = eligible.iter().map(cost).collect();
                let fewest = |at: usize| (costs[at], eligible[at].load);
                let least = (0..eligible.len()).map(fewest).min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
                let ties: Vec<usize> = (0..eligible.len()).filter(|at| fewest(*at) == least).collect();
                Some(eligible[ties[self.turn % ties.len()]].endpoint)
            }
        }
    }

    /// The one with the least cost; of equals one by chance.
    fn best(&mut self, eligible: &[&Candidate], cost: impl Fn(usize) -> f64) -> Option<usize> {
        let least = (0..eligible.len()).map(&cost).min_by(f64::total_cmp)?;
        let ties: Vec<usize> = (0..eligible.len()).filter(|at| cost(*at) - least <= 1e-9).collect();
        Some(eligible[ties[self.chance.below(ties.len())]].endpoint)
    }

    /// Tokens of so many blocks; the last token of a prompt is never one of them.
    fn credited(&self, ask: &Ask, depth: u32) -> u32 {
        (depth * self.block_size).min(ask.tokens - 1)
    }

    /// Scores between 0 and 1, weighted as in the guides for precise and for default scheduling.
    fn llmd(&self, ask: &Ask, sight: &Sight<'_>, eligible: &[&Candidate]) -> Vec<f64> {
        const PREFIX: f64 = 3.0;
        const QUEUE: f64 = 2.0;
        const KV_USE: f64 = 2.0;
        let queue = |c: &&Candidate| float(sight.gauges[c.endpoint].waiting);
        let longest = eligible.iter().map(queue).fold(0.0, f64::max);
        let shortest = eligible.iter().map(queue).fold(f64::INFINITY, f64::min);
        let blocks = f64::from((ask.tokens / self.block_size).max(1));
        let score = |c: &&Candidate| {
            let waits = if longest > shortest { (longest - queue(c)) / (longest - shortest) } else { 1.0 };
            let matched = match self.kind {
                Kind::LlmdPrecise => f64::from(sight.depths[c.endpoint]) / blocks,
                Kind::LlmdApproximate => {
                    let all = self.coarse(ask).count();
                    f64::from(self.known[c.endpoint].sent.run(self.coarse(ask))) / float(all.max(1))
                }
                _ => 0.0,
            };
            PREFIX * matched.min(1.0) + QUEUE * waits + KV_USE * (1.0 - sight.gauges[c.endpoint].kv_use)
        };
        eligible.iter().map(score).collect()
    }

    /// The names of the prompt's blocks of 64 tokens, or of the engine's where those are larger.
    fn coarse(&self, ask: &Ask) -> impl Iterator<Item = BlockHash> + use<'_> {
        const TOKENS: u32 = 64;
        let step = (TOKENS / self.block_size).max(1) as usize;
        let full = ((ask.tokens / self.block_size) as usize).min(ask.names.len());
        let names = Arc::clone(&ask.names);
        (step..=full).step_by(step).map(move |end| names[end - 1])
    }

    fn dynamo(&self, ask: &Ask, sight: &Sight<'_>, endpoint: usize) -> f64 {
        let (known, size) = (&self.known[endpoint], f64::from(self.block_size));
        let waiting = f64::from(known.prefill_tokens + ask.tokens) / size;
        let new = ask.names.iter().take((ask.tokens / self.block_size) as usize);
        let new = new.filter(|name| !known.active.contains_key(*name)).count();
        (waiting - f64::from(sight.depths[endpoint])).max(0.0) + float(known.active.len() + new)
    }

    fn cache_aware(&self, ask: &Ask, eligible: &[&Candidate]) -> Option<usize> {
        const APART: f64 = 64.0;
        const TIMES: f64 = 1.5;
        const MATCH: f64 = 0.3;
        let load = |c: &&&Candidate| c.load;
        let (least, most) = (eligible.iter().min_by_key(load)?, eligible.iter().max_by_key(load)?);
        let (low, high) = (f64::from(least.load), f64::from(most.load));
        if high - low > APART && high > TIMES * low {
            return Some(least.endpoint);
        }
        let names = || ask.names.iter().take((ask.tokens / self.block_size) as usize).copied();
        let run = |endpoint: usize| self.known[endpoint].sent.run(names());
        let best = eligible.iter().max_by_key(|c| (run(c.endpoint), std::cmp::Reverse(c.endpoint)))?;
        if f64::from(run(best.endpoint)) > MATCH * float(names().count()) {
            return Some(best.endpoint);
        }
        eligible.iter().min_by_key(|c| self.known[c.endpoint].sent.ages.len()).map(|c| c.endpoint)
    }

    /// A request goes to an endpoint that announced so many of its blocks.
    pub(super) fn sent(&mut self, ask: &Ask, endpoint: usize, depth: u32) -> Sent {
        const COARSE: usize = 31_250; // Source: llm-d's default for each pod
        const TREE_TOKENS: u32 = 8 << 20; // Source: vllm-router's 32 Mi characters, four to a token
        self.known.resize_with(self.known.len().max(endpoint + 1), Known::default);
        let prefill_tokens = ask.tokens - self.credited(ask, depth);
        match self.kind {
            Kind::LlmdApproximate => {
                let names: Vec<_> = self.coarse(ask).collect();
                self.known[endpoint].sent.keep(names.into_iter(), COARSE);
            }
            Kind::VllmCacheAware => {
                let names = ask.names.iter().take((ask.tokens / self.block_size) as usize).copied();
                self.known[endpoint].sent.keep(names, (TREE_TOKENS / self.block_size) as usize);
            }
            Kind::Dynamo => {
                for name in ask.names.iter().take((ask.tokens / self.block_size) as usize) {
                    *self.known[endpoint].active.entry(*name).or_default() += 1;
                }
            }
            _ => {}
        }
        self.known[endpoint].prefill_tokens += prefill_tokens;
        Sent { endpoint, prefill_tokens, is_answered: false }
    }

    /// Its answer begins.
    pub(super) fn answered(&mut self, sent: &mut Sent) {
        if !std::mem::replace(&mut sent.is_answered, true) {
            self.known[sent.endpoint].prefill_tokens -= sent.prefill_tokens;
        }
    }

    /// It has ended, one way or the other.
    pub(super) fn ended(&mut self, mut sent: Sent, ask: &Ask) {
        self.answered(&mut sent);
        if self.kind != Kind::Dynamo {
            return;
        }
        let active = &mut self.known[sent.endpoint].active;
        for name in ask.names.iter().take((ask.tokens / self.block_size) as usize) {
            if let Some(users) = active.get_mut(name) {
                *users -= 1;
                if *users == 0 {
                    active.remove(name);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(tokens: u32) -> Ask {
        let names: Arc<[BlockHash]> = (0..u64::from(tokens / 16)).map(BlockHash).collect();
        Ask { tokens, output: 1, names, ..Ask::default() }
    }

    fn candidates(loads: &[u32]) -> Vec<Candidate> {
        let of = |(endpoint, load): (usize, &u32)| Candidate {
            endpoint,
            eligible: true,
            load: *load,
            ..Candidate::default()
        };
        loads.iter().enumerate().map(of).collect()
    }

    fn choice(kind: Kind, loads: &[u32], depths: &[u32], gauges: &[Gauges]) -> Option<usize> {
        Peer::new(kind, 16, 1).choose(&ask(320), &Sight { candidates: &candidates(loads), depths, gauges })
    }

    #[test]
    fn llmd_trades_a_match_for_a_queue() {
        let idle = Gauges::default();
        let busy = Gauges { waiting: 9, running: 9, kv_use: 0.2 };
        assert_eq!(choice(Kind::LlmdPrecise, &[0, 0], &[0, 10], &[idle, idle]), Some(1));
        assert_eq!(choice(Kind::LlmdPrecise, &[0, 0], &[0, 10], &[idle, busy]), Some(0), "1.5 is less than 2 + 0.4");
        assert_eq!(choice(Kind::LlmdPrecise, &[0, 0], &[0, 20], &[idle, busy]), Some(1), "3 is more");
        assert_eq!(choice(Kind::LlmdLoad, &[0, 0], &[0, 20], &[idle, busy]), Some(0));
    }

    #[test]
    fn kv_aware_multiplies_by_requests() {
        let idle = [Gauges::default(); 2];
        assert_eq!(choice(Kind::VllmKvAware, &[0, 1], &[0, 9], &idle), Some(0), "320 is less than 2 * 176");
        assert_eq!(choice(Kind::VllmKvAware, &[0, 1], &[0, 11], &idle), Some(1), "2 * 144 is less than 320");
    }

    #[test]
    fn dynamo_counts_what_waits_and_what_is_in_use() {
        let (candidates, gauges) = (candidates(&[0, 0]), [Gauges::default(); 2]);
        let mut peer = Peer::new(Kind::Dynamo, 16, 1);
        let sent = peer.sent(&ask(320), 1, 0);
        let choose = |peer: &mut Peer, depth| {
            peer.choose(&ask(320), &Sight { candidates: &candidates, depths: &[0, depth], gauges: &gauges })
        };
        assert_eq!(choose(&mut peer, 10), Some(0), "20 wait there already");
        peer.ended(sent, &ask(320));
        assert_eq!((choose(&mut peer, 10), peer.known[1].active.len()), (Some(1), 0));
    }

    #[test]
    fn a_tree_is_followed_until_loads_are_far_apart() {
        let gauges = [Gauges::default(); 2];
        let mut peer = Peer::new(Kind::VllmCacheAware, 16, 1);
        peer.sent(&ask(320), 1, 0);
        let mut at = |loads: &[u32]| {
            peer.choose(&ask(320), &Sight { candidates: &candidates(loads), depths: &[0, 0], gauges: &gauges })
        };
        assert_eq!((at(&[0, 64]), at(&[0, 65])), (Some(1), Some(0)));
    }
}

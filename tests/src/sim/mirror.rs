//! kvlb's own state in virtual time: a rule with its endpoints, what each announced, what is on its way, and who is busy.
//!
//! Everything that decides is the shipped code: the rule is read from a REST body, events are applied to the real index, load is counted
//! by the real guards. Only the sockets are missing: [`Follower`] is told of batches instead of reading them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kvlb::contract::attest::EngineLabel;
use kvlb::contract::events::{Batch, Event};
use kvlb::contract::{BlockHash, EventSeq, NoneSeed};
use kvlb::control::wire::Body;
use kvlb::fleet::{Probe, Rule, RuleId};
use kvlb::inventory::{Arrival, Cursor};
use kvlb::policy::Candidate;
use kvlb::router::{self, Caller, Decision, Named, NamedPrompt, Overlap, View};
use kvlb::state::{Backlog, Config, Expectation, InFlight, Onlooker, Service, State};
use kvlb::telemetry::Metrics;
use serde_json::{Value, json};

use super::workload::Ask;

/// The widest gap that keeps an inventory where nothing can be replayed. Source: ingest's own, from LoxiLB's document.
const GAP_MAX: u64 = 64;

/// One numbered batch of an engine's life.
#[derive(Clone, Debug)]
pub(super) struct Told {
    /// The endpoint.
    pub(super) endpoint: usize,
    /// Its number.
    pub(super) seq: u64,
    /// What happened.
    pub(super) events: Arc<Vec<Event>>,
}

/// A request's traces in the state, until it has ended.
#[derive(Debug)]
pub(super) struct Errand {
    _guard: InFlight,
    backlog: Arc<Backlog>,
    expectation: Option<Expectation>,
}

/// The state, and where it stands in virtual time.
#[derive(Debug)]
pub(super) struct Mirror {
    state: State,
    service: Arc<Service>,
    followers: Vec<Cursor>,
    begin: Instant,
    block_size: u32,
    engine_blocks: u32,
    /// Fields of the rule that a policy sets.
    fields: Value,
    weights: Vec<u8>,
}

impl Mirror {
    /// The state of a rule with so many endpoints; `fields` are those of its REST body that differ from the usual.
    ///
    /// # Errors
    /// When the API would refuse such a rule.
    pub(super) fn new(endpoints: usize, block_size: u32, engine_blocks: u32, fields: &Value) -> Result<Self> {
        let config = Config { none_seed: NoneSeed::Text("0".to_owned()), text_bytes: 0, ..Config::default() };
        let state = State::new(config, Arc::new(Metrics::new().context("make metrics")?));
        let weights = vec![1; endpoints];
        let rule = rule(&weights, block_size, fields)?;
        state.publish(&[Arc::new(rule)]);
        let service = of(&state)?;
        let begin = kvlb::clock::now();
        let followers = vec![Cursor::default(); endpoints];
        let fields = fields.clone();
        let mirror = Self { state, service, followers, begin, block_size, engine_blocks, fields, weights };
        mirror.say_sizes();
        Ok(mirror)
    }

    /// Gives an endpoint another weight, or adds one; 0 drains it.
    ///
    /// # Errors
    /// When the API would refuse the rule.
    pub(super) fn set_weight(&mut self, endpoint: usize, weight: u8) -> Result<()> {
        if endpoint >= self.weights.len() {
            self.weights.resize(endpoint + 1, 1);
            self.followers.resize(endpoint + 1, Cursor::default());
        }
        self.weights[endpoint] = weight;
        let rule = rule(&self.weights, self.block_size, &self.fields)?;
        self.state.publish(&[Arc::new(rule)]);
        self.service = of(&self.state)?;
        self.say_sizes();
        Ok(())
    }

    /// The probe's verdict on an endpoint.
    pub(super) fn set_probe(&self, endpoint: usize, up: bool) {
        if let Some(endpoint) = self.service.endpoints.get(endpoint) {
            endpoint.meters.set_probe(if up { Probe::Up } else { Probe::Down });
        }
    }

    /// Engines say how large their caches are.
    fn say_sizes(&self) {
        let label = EngineLabel { num_gpu_blocks: Some(self.engine_blocks.into()), ..EngineLabel::default() };
        for kv in self.service.endpoints.iter().filter_map(|endpoint| endpoint.kv.as_ref()) {
            kv.set_label(label.clone());
        }
    }

    fn at(&self, now: Duration) -> Instant {
        self.begin + now
    }

    /// A batch arrives, after a replay of `missed` where batches before it were lost and can be had again.
    pub(super) fn told(&mut self, told: &Told, missed: &[Told], now: Duration) {
        let Some(kv) = self.service.endpoints.get(told.endpoint).and_then(|endpoint| endpoint.kv.as_ref()) else {
            return;
        };
        let (feed, at) = (kv.feed(0), self.at(now));
        feed.set_connected(true);
        let cursor = &mut self.followers[told.endpoint];
        match cursor.peek(EventSeq(told.seq)) {
            Arrival::Duplicate | Arrival::Rewind => {
                kv.clear(&feed, true);
            }
            Arrival::Gap { missed: lost } if missed.is_empty() && lost > GAP_MAX => {
                kv.clear(&feed, false);
            }
            Arrival::First | Arrival::Next | Arrival::Gap { .. } => {}
        }
        for told in missed.iter().chain([told]) {
            let (events, ts) = (told.events.to_vec(), now.as_secs_f64());
            let batch = Batch { ts, dp_rank: None, events, undecodable: 0, unknown: 0, skipped: 0 };
            kv.apply(&feed, EventSeq(told.seq), &batch, at);
            cursor.advance(EventSeq(told.seq));
        }
    }

    /// The number of the last batch that was heard of an endpoint.
    pub(super) fn heard(&self, endpoint: usize) -> Option<u64> {
        self.followers.get(endpoint).and_then(Cursor::last).map(|seq| seq.0)
    }

    /// A request's block names, as the router gets them.
    pub(super) fn named(&self, ask: &Ask) -> Named {
        let spaces = self.service.spaces(None);
        let full = ((ask.tokens / self.block_size) as usize).min(ask.names.len());
        let names = vec![ask.names[..full].to_vec(); spaces.len()];
        Named { spaces, prompts: vec![NamedPrompt { tokens: ask.tokens as usize, names }] }
    }

    /// kvlb's choice. The first try of a request takes a turn, later ones do not.
    pub(super) fn route(&self, named: &Named, tried: &[usize], now: Duration) -> Decision {
        let at = At { service: &self.service, now: self.at(now), looks_only: !tried.is_empty() };
        router::route(&self.service.ready, &Ok(named.clone()), &at, &Caller::default(), tried)
    }

    /// What endpoints are now, for others than kvlb to choose by.
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        self.service.candidates()
    }

    /// How many leading blocks of a prompt each endpoint announced.
    pub(super) fn depths(&self, named: &Named) -> Vec<u32> {
        self.service.held(named).iter().map(|held| held.depth).collect()
    }

    /// Requests in flight at each endpoint.
    pub(super) fn loads(&self) -> Vec<u32> {
        self.service.endpoints.iter().map(|endpoint| endpoint.meters.load()).collect()
    }

    /// A request goes to an endpoint that holds `depth` blocks of its prompt and has so many tokens of it to compute.
    pub(super) fn send(
        &self,
        ask: &Ask,
        endpoint: usize,
        (depth, uncached): (u32, u64),
        now: Duration,
    ) -> Option<Errand> {
        let meters = &self.service.endpoints.get(endpoint)?.meters;
        let guard = meters.enter(1, self.service.next_choice());
        let full = ((ask.tokens / self.block_size) as usize).min(ask.names.len());
        let names: &[BlockHash] = &ask.names[..full];
        let is_there = depth as usize >= names.len();
        let backlog = meters.await_tokens(uncached);
        let expect = || self.service.expectations.add(meters.id, names, Some(Arc::clone(&backlog)), self.at(now));
        let expectation = (!is_there).then(expect).flatten();
        Some(Errand { _guard: guard, backlog, expectation })
    }

    /// The answer begins.
    pub(super) fn answered(&self, errand: &mut Errand, now: Duration) {
        errand.backlog.release();
        if let Some(expectation) = errand.expectation.take() {
            expectation.answered(self.at(now));
        }
    }

    /// Blocks that an endpoint is believed to hold.
    pub(super) fn blocks(&self, endpoint: usize) -> usize {
        self.service.endpoints.get(endpoint).and_then(|endpoint| endpoint.kv.as_ref()).map_or(0, |kv| kv.blocks())
    }
}

fn of(state: &State) -> Result<Arc<Service>> {
    state.table().services().first().cloned().context("the rule is not there")
}

/// A single pool with so many endpoints, as an operator would write it.
fn rule(weights: &[u8], block_size: u32, fields: &Value) -> Result<Rule> {
    let endpoint = |(at, weight): (usize, &u8)| {
        let address = format!("10.0.{}.{}", at / 250, at % 250 + 1);
        json!({"endpointIP": address, "targetPort": 8000, "weight": weight})
    };
    let endpoints: Vec<_> = weights.iter().enumerate().map(endpoint).collect();
    let mut arguments = json!({
        "externalIP": "192.0.2.1", "port": 80, "protocol": "tcp", "sel": 0, "mode": 4, "kvExactMode": 3,
        "kvHashAlgo": "sha256_cbor", "kvKeying": "parity", "kvBlockSize": block_size, "cb_enable": false,
    });
    for (name, value) in fields.as_object().into_iter().flatten() {
        arguments[name] = value.clone();
    }
    let body = Body::from_json(&json!({"serviceArguments": arguments, "endpoints": endpoints}));
    body.and_then(|body| body.rule(RuleId(1))).context("make the rule")
}

/// The service at a moment of virtual time.
struct At<'a> {
    service: &'a Service,
    now: Instant,
    looks_only: bool,
}

impl View for At<'_> {
    fn candidates(&self) -> Vec<Candidate> {
        self.service.candidates()
    }

    fn held(&self, named: &Named) -> Vec<Overlap> {
        self.service.held(named)
    }

    fn expected(&self, named: &Named) -> Vec<u32> {
        self.service.expected_at(named, self.now)
    }

    fn turn(&self) -> u64 {
        if self.looks_only { Onlooker(self.service).turn() } else { self.service.turn() }
    }

    fn hit(&self) -> Option<u64> {
        if self.looks_only { None } else { self.service.hit() }
    }

    fn inventory(&self, endpoint: usize) -> Option<u64> {
        self.service.inventory(endpoint)
    }
}

#[cfg(test)]
mod tests {
    use kvlb::contract::events::Stored;
    use kvlb::router::Tier;

    use super::*;

    fn ask(names: &[u64]) -> Ask {
        let names: Arc<[BlockHash]> = names.iter().copied().map(BlockHash).collect();
        Ask { tokens: 16 * u32::try_from(names.len()).unwrap() + 1, output: 1, names, ..Ask::default() }
    }

    fn told(endpoint: usize, seq: u64, names: &[u64]) -> Told {
        let hashes = names.iter().map(|name| BlockHash(*name).into()).collect();
        Told { endpoint, seq, events: Arc::new(vec![Event::Stored(Stored { hashes, ..Stored::default() })]) }
    }

    #[test]
    fn the_holder_is_chosen_by_kvlbs_own_router() {
        let mut mirror = Mirror::new(3, 16, 100, &json!({})).unwrap();
        let now = Duration::from_secs(7);
        mirror.told(&told(2, 0, &[1, 2, 3]), &[], now);
        let (one, named) = (ask(&[1, 2, 9]), mirror.named(&ask(&[1, 2, 9])));
        let decision = mirror.route(&named, &[], now);
        assert_eq!((decision.endpoint, decision.tier, decision.depth), (Some(2), Tier::Overlap, 2));
        assert_ne!(mirror.route(&named, &[2], now).endpoint, Some(2));
        let errand = mirror.send(&one, 2, (2, 16), now).unwrap();
        assert_eq!(mirror.loads(), [0, 0, 1]);
        drop(errand);
        assert_eq!(mirror.loads(), [0, 0, 0]);
        mirror.set_weight(2, 0).unwrap();
        assert_ne!(mirror.route(&named, &[], now).endpoint, Some(2), "it drains");
    }

    #[test]
    fn a_burst_is_expected_where_its_first_went_in_virtual_time_too() {
        let mirror = Mirror::new(4, 16, 100, &json!({})).unwrap();
        let one = ask(&[1, 2, 3]);
        let named = mirror.named(&one);
        let mut errand = mirror.send(&one, 3, (0, 48), Duration::from_secs(100)).unwrap();
        assert_eq!(mirror.route(&named, &[], Duration::from_secs(101)).endpoint, Some(3));
        mirror.answered(&mut errand, Duration::from_secs(110));
        assert!(mirror.route(&named, &[], Duration::from_secs(111)).expected);
        assert_eq!(mirror.route(&named, &[], Duration::from_secs(113)).tier, Tier::Selector, "two seconds are over");
    }

    #[test]
    fn a_lower_number_is_a_new_life_and_a_wide_gap_empties_unless_it_is_replayed() {
        let mut mirror = Mirror::new(1, 16, 1000, &json!({})).unwrap();
        let now = Duration::ZERO;
        mirror.told(&told(0, 5, &[1, 2]), &[], now);
        mirror.told(&told(0, 8, &[3]), &[], now);
        assert_eq!((mirror.blocks(0), mirror.heard(0)), (3, Some(8)));
        mirror.told(&told(0, 80, &[4]), &[], now);
        assert_eq!(mirror.blocks(0), 1);
        mirror.told(&told(0, 200, &[5]), &[told(0, 199, &[6])], now);
        assert_eq!(mirror.blocks(0), 3);
        mirror.told(&told(0, 0, &[7]), &[], now);
        assert_eq!(mirror.blocks(0), 1);
    }
}

//! The rules in force, made ready, with the moving parts of their endpoints.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hashbrown::HashMap;
use prometheus::core::{AtomicU64 as CounterCell, GenericCounter};

use super::admission::{Line, Place};
use super::breaker::Failures;
use super::expect::Expectations;
use super::index::Index;
use super::kv::EndpointKv;
use super::live::{EndpointId, ListedModel, Meters};
use super::pins::Pins;
use super::retry::RetryBudget;
use crate::clock;
use crate::contract::{KeySpace, Lora};
use crate::fleet::{self, Admin, AdmissionRule, Condition, ExactMode, Role, Rule, RuleId};
use crate::policy::Candidate;
use crate::router::{self, Key, Lookup, Named, Overlap, Part, Space, Tier, View};

/// Classes of statuses that are counted apart: 1xx to 5xx, and what is none of them.
pub const STATUS_CLASSES: usize = 6;

/// One version of all rules. Readers hold a snapshot; a change makes a new one.
#[derive(Debug, Default)]
pub struct Table {
    /// Services by rule number, oldest first.
    services: Vec<Arc<Service>>,
    /// The same by VIP address: a request looks only at rules of its own.
    by_address: HashMap<IpAddr, Vec<Arc<Service>>>,
}

/// A rule made ready, and what changes while its traffic flows.
#[derive(Debug)]
pub struct Service {
    /// The rule and how it names blocks.
    pub ready: router::Service,
    /// Endpoints in the rule's order.
    pub endpoints: Vec<Endpoint>,
    /// Which blocks each endpoint holds.
    pub index: Arc<Index>,
    /// How many of the rule's requests may be sent once more.
    pub retries: Arc<RetryBudget>,
    /// Its requests at the gate, where it has admission.
    pub line: Arc<Line>,
    /// Requests that failed of late.
    pub failures: Failures,
    /// Blocks that requests under way bring to their endpoints.
    pub expectations: Arc<Expectations>,
    /// Where clients' conversations and sessions were, and prompts like theirs.
    pub pins: Arc<Pins>,
    /// What counts the rule's requests, by the tier that chose; each made when it has something to count.
    pub tiers: [OnceLock<GenericCounter<CounterCell>>; Tier::ALL.len()],
    /// What counts the rule's requests, by the class of their status; each made when it has something to count.
    pub classes: [OnceLock<GenericCounter<CounterCell>>; STATUS_CLASSES],
    pub(super) turns: Arc<AtomicU64>,
    /// Client connections that may bring requests for the rule.
    pub(super) visits: Arc<AtomicU32>,
    pub(super) choices: Arc<AtomicU64>,
    /// Requests placed by what endpoints announced.
    pub(super) hits: Arc<AtomicU64>,
}

/// One client connection of a rule, until it is dropped.
#[derive(Debug)]
pub struct Visit(Arc<AtomicU32>);

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One endpoint of a service.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// What the operator wrote.
    pub spec: fleet::Endpoint,
    /// What changes while traffic flows.
    pub meters: Arc<Meters>,
    /// The mirror of its cache; `None` where the rule does not subscribe it.
    pub kv: Option<Arc<EndpointKv>>,
    /// How many requests it has at a time, of all rules with admission.
    pub place: Arc<Place>,
}

/// Why no rule serves a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unserved {
    /// No rule is on this address and port at all.
    NoVip,
    /// Rules are there, none for this host and path.
    NoRoute,
    /// Rules are there, none for this model.
    Model {
        /// The models that are served there.
        served: Vec<String>,
    },
}

impl Table {
    pub(super) fn new(mut services: Vec<Arc<Service>>) -> Self {
        services.sort_by_key(|service| service.rule().id);
        let mut by_address: HashMap<IpAddr, Vec<Arc<Service>>> = HashMap::new();
        for service in &services {
            by_address.entry(service.rule().key.vip.to_canonical()).or_default().push(Arc::clone(service));
        }
        Self { services, by_address }
    }

    /// Every service, oldest rule first.
    pub fn services(&self) -> &[Arc<Service>] {
        &self.services
    }

    /// The service of one rule.
    pub fn service(&self, id: RuleId) -> Option<&Arc<Service>> {
        self.services.iter().find(|service| service.rule().id == id)
    }

    /// The services on one VIP address and port, oldest first; those on every address come last.
    pub fn at(&self, vip: SocketAddr) -> impl Iterator<Item = &Arc<Service>> {
        let address = vip.ip().to_canonical();
        let everywhere = match address {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let on = |address: IpAddr| self.by_address.get(&address).into_iter().flatten();
        on(address).chain(on(everywhere)).filter(move |service| service.rule().key.ports.contains(vip.port()))
    }

    /// The services that requests for no model in particular are meant for, by host and path.
    pub fn meant(&self, vip: SocketAddr, lookup: &Lookup<'_>) -> Vec<Arc<Service>> {
        let any_model = Lookup { model: None, ..*lookup };
        let meant = |service: &&Arc<Service>| router::rank(service.rule(), &any_model, |_| false).is_some();
        self.at(vip).filter(meant).cloned().collect()
    }

    /// The service for a request that came to `vip`; of equals the oldest rule.
    ///
    /// # Errors
    /// Why nobody serves it.
    pub fn find(&self, vip: SocketAddr, lookup: &Lookup<'_>) -> Result<&Arc<Service>, Unserved> {
        let fit = |service: &Arc<Service>, lookup: &Lookup<'_>| {
            router::rank(service.rule(), lookup, |model| service.lists_adapter(model))
        };
        let mut best: Option<(router::Match, &Arc<Service>)> = None;
        for service in self.at(vip) {
            if let Some(rank) = fit(service, lookup)
                && best.as_ref().is_none_or(|(so_far, _)| rank > *so_far)
            {
                best = Some((rank, service));
            }
        }
        best.map(|(_, service)| service).ok_or_else(|| {
            let any_model = Lookup { model: None, ..*lookup };
            if self.at(vip).next().is_none() {
                return Unserved::NoVip;
            }
            let mut served: Vec<String> = self
                .at(vip)
                .filter(|service| fit(service, &any_model).is_some())
                .filter_map(|service| service.rule().key.model.clone())
                .collect();
            served.dedup();
            if served.is_empty() { Unserved::NoRoute } else { Unserved::Model { served } }
        })
    }
}

impl Service {
    /// What the operator wrote.
    pub fn rule(&self) -> &Arc<Rule> {
        &self.ready.rule
    }

    /// Takes a client connection in, and says how many there are with it.
    pub fn visit(&self) -> (Visit, u32) {
        let open = self.visits.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        (Visit(Arc::clone(&self.visits)), open)
    }

    /// The next turn of the rule's choices.
    pub fn next_turn(&self) -> u64 {
        self.turns.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether breakers would take out more than half of the endpoints that their probes find well: then they tell of
    /// something that all have in common, and what is left must not bear it alone.
    ///
    /// Of a rule that splits requests, those of one role are a pool of their own.
    pub fn breakers_are_ignored(&self, role: Role) -> bool {
        if self.rule().breaker.is_none() {
            return false;
        }
        let (mut well, mut open, is_split) = (0, 0, self.rule().is_split());
        let pool = self.endpoints.iter().filter(|endpoint| !is_split || endpoint.spec.role == role);
        for condition in pool.map(Endpoint::condition).filter(|condition| condition.in_service()) {
            well += 1;
            open += usize::from(condition.breaker == fleet::Breaker::Open);
        }
        open * 2 > well
    }

    /// The position of an endpoint that this version of the rule has.
    pub fn position(&self, id: EndpointId) -> Option<usize> {
        self.endpoints.iter().position(|endpoint| endpoint.meters.id == id)
    }

    /// Which endpoints may be asked, by their condition and the rule's.
    pub fn may_be_asked(&self) -> impl Fn(&Endpoint) -> bool {
        // Switched off, what opened before no longer counts either.
        let none = self.rule().breaker.is_none();
        let ignored = [Role::Any, Role::Prefill, Role::Decode].map(|role| none || self.breakers_are_ignored(role));
        let up = !self.rule().admin_down;
        move |endpoint: &Endpoint| {
            let condition = endpoint.condition();
            let ignored = ignored[endpoint.spec.role as usize];
            up && (condition.eligible() || ignored && condition.in_service()) && !endpoint.meters.addresses().is_empty()
        }
    }

    /// Whether any endpoint may be asked.
    pub fn has_endpoint(&self) -> bool {
        self.endpoints.iter().any(self.may_be_asked())
    }

    /// Positions of the endpoints that this part of a request may be sent to, but for those `tried`.
    pub fn askable(&self, part: Part, tried: &[usize]) -> impl Iterator<Item = usize> {
        let (may_be_asked, serves) = (self.may_be_asked(), router::serving_role(self.rule(), part));
        let askable = move |(position, endpoint): &(usize, &Endpoint)| {
            serves(endpoint.spec.role) && !tried.contains(position) && may_be_asked(endpoint)
        };
        self.endpoints.iter().enumerate().filter(askable).map(|(position, _)| position)
    }

    /// What [`View::expected`] says at `now`.
    pub fn expected_at(&self, named: &Named, now: Instant) -> Vec<u32> {
        let ours = self.rule().kv.block_size.get();
        let mut coming = vec![0; self.endpoints.len()];
        for (position, space) in named.spaces.iter().enumerate() {
            for prompt in &named.prompts {
                let of_prompt = self.expectations.depths(&prompt.names[position], now);
                for &endpoint in &space.endpoints {
                    let id = self.endpoints[endpoint].meters.id;
                    let depth = of_prompt.iter().find(|(known, _)| *known == id).map_or(0, |(_, depth)| *depth);
                    coming[endpoint] += depth.saturating_mul(space.key_space.block_size().get()) / ours;
                }
            }
        }
        coming
    }

    /// The next number of a choice, hit or miss.
    pub fn next_choice(&self) -> u64 {
        self.choices.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Whether an engine of this rule lists `model` as an adapter of the rule's model.
    pub fn lists_adapter(&self, model: &str) -> bool {
        let is_it = |listed: &ListedModel| listed.parent.is_some() && listed.id == model && self.serves(listed);
        self.endpoints.iter().any(|endpoint| endpoint.meters.models().iter().any(is_it))
    }

    /// The longest prompt that every endpoint takes, in tokens, where one has said.
    pub fn max_model_len(&self) -> Option<usize> {
        let told = |listed: &ListedModel| usize::try_from(listed.card["max_model_len"].as_u64()?).ok();
        self.endpoints.iter().filter_map(|endpoint| endpoint.meters.models().iter().filter_map(told).min()).min()
    }

    /// Whether requests for a model that an engine lists come to this rule: its own, and adapters of it.
    fn serves(&self, listed: &ListedModel) -> bool {
        let own = self.rule().key.model.as_ref();
        own.is_none_or(|own| listed.id == *own || listed.parent.as_ref() == Some(own))
    }

    /// The base model of an adapter that an engine of this rule lists.
    pub fn base_of(&self, adapter: &str) -> Option<String> {
        let of_endpoint = |endpoint: &Endpoint| {
            endpoint.meters.models().iter().find(|listed| listed.id == adapter).and_then(|listed| listed.parent.clone())
        };
        self.endpoints.iter().find_map(of_endpoint)
    }

    /// The ways in which the endpoints' blocks are named for requests for `adapter`, or for the base model. Endpoints whose
    /// names cannot be computed, or that do not serve the adapter, are in none.
    pub fn spaces(&self, adapter: Option<&str>) -> Vec<Space> {
        let mut spaces: Vec<Space> = Vec::with_capacity(1);
        for (position, endpoint) in self.endpoints.iter().enumerate() {
            let Some(key_space) = endpoint.kv.as_ref().and_then(|kv| kv.key_space()) else { continue };
            let lora = match adapter {
                None => None,
                Some(adapter) => match endpoint.adapter(adapter, &key_space) {
                    Some(lora) => Some(lora),
                    None => continue,
                },
            };
            match spaces.iter_mut().find(|space| space.key_space == key_space && space.lora == lora) {
                Some(space) => space.endpoints.push(position),
                None => spaces.push(Space { key_space, lora, endpoints: vec![position] }),
            }
        }
        spaces
    }
}

impl Endpoint {
    /// Whether it may be asked, and why not.
    pub fn condition(&self) -> Condition {
        let admin = match &self.spec {
            fleet::Endpoint { admin_down: true, .. } => Admin::Down,
            fleet::Endpoint { weight: 0, .. } => Admin::Draining,
            _ => Admin::Up,
        };
        self.meters.condition(admin)
    }

    /// An adapter as its engine has it, so far as it enters names of this key space.
    fn adapter(&self, name: &str, key_space: &KeySpace) -> Option<Lora> {
        let models = self.meters.models();
        let listed = models.iter().find(|listed| listed.parent.is_some() && listed.id == name)?;
        // Source: vLLM lists the adapter's path as its `root`.
        let path = listed.card["root"].as_str().filter(|_| key_space.hashes_paths()).map(str::to_owned);
        let number = self.numbers_adapters().then(|| {
            // Source: such versions number adapters from 1 in the order in which they list them.
            let adapters = models.iter().filter(|listed| listed.parent.is_some());
            let before = adapters.take_while(|listed| listed.id != name).count();
            i64::try_from(before + 1).unwrap_or(i64::MAX)
        });
        Some(Lora { name: name.to_owned(), path, number })
    }

    /// Whether its engine hashes an adapter's number instead of its name.
    ///
    /// Source: vLLM before 0.11.1.
    fn numbers_adapters(&self) -> bool {
        let facts = self.meters.facts();
        facts.as_ref().and_then(|facts| facts.version.known()?.at_least(0, 11)) == Some(false)
    }

    /// KV blocks of its engine's cache, where the engine has said.
    fn gpu_blocks(&self) -> Option<u64> {
        self.kv.as_ref()?.label().num_gpu_blocks.filter(|blocks| *blocks > 0)
    }

    /// Whether it has as many requests as a rule allows.
    pub fn is_at_bound(&self, rule: &AdmissionRule) -> bool {
        self.place.held() >= rule.endpoint_max(self.spec.role)
    }

    /// Where to connect; empty while its name has not been resolved.
    pub fn addresses(&self) -> Arc<Vec<SocketAddr>> {
        self.meters.addresses()
    }

    /// An endpoint that is an address needs no resolver.
    pub fn literal_address(&self) -> Option<SocketAddr> {
        let host: IpAddr = self.spec.key.host.parse().ok()?;
        Some(SocketAddr::new(host, self.spec.key.port))
    }
}

impl View for Service {
    fn candidates(&self) -> Vec<Candidate> {
        // Sizes are comparable only where every engine has told its own.
        let sizes: Option<Vec<u64>> = self.endpoints.iter().map(Endpoint::gpu_blocks).collect();
        let weight = |endpoint: &Endpoint| u64::from(endpoint.spec.weight.max(1));
        let may_be_asked = self.may_be_asked();
        let candidate = |(position, endpoint): (usize, &Endpoint)| Candidate {
            endpoint: position,
            eligible: may_be_asked(endpoint),
            load: endpoint.meters.load(),
            capacity: sizes.as_ref().map_or(1, |sizes| sizes[position]).saturating_mul(weight(endpoint)),
            weight: endpoint.spec.weight.max(1).into(),
            waiting_tokens: endpoint.meters.waiting_tokens(),
            last_chosen: endpoint.meters.last_chosen(),
            queued: endpoint.meters.vitals.queued(),
            ..Candidate::default()
        };
        self.endpoints.iter().enumerate().map(candidate).collect()
    }

    fn held(&self, named: &Named) -> Vec<Overlap> {
        let mut held = vec![Overlap::default(); self.endpoints.len()];
        let ours = self.rule().kv.block_size.get();
        for (position, space) in named.spaces.iter().enumerate() {
            let mut by_prompt = Vec::with_capacity(named.prompts.len());
            for prompt in &named.prompts {
                let mut by_slot = Vec::new();
                self.index.overlaps(&prompt.names[position], &mut by_slot);
                by_prompt.push(by_slot);
            }
            // An engine whose blocks have another size than the rule says counts in the rule's.
            let scaled = |blocks: u32| blocks.saturating_mul(space.key_space.block_size().get()) / ours;
            for &endpoint in &space.endpoints {
                if let Some(kv) = self.endpoints.get(endpoint).and_then(|endpoint| endpoint.kv.as_ref()) {
                    let holding = kv.holding(&by_prompt);
                    held[endpoint] = Overlap { depth: scaled(holding.depth), count: scaled(holding.count), ..holding };
                }
            }
        }
        held
    }

    fn expected(&self, named: &Named) -> Vec<u32> {
        self.expected_at(named, clock::now())
    }

    fn turn(&self) -> u64 {
        self.next_turn()
    }

    fn hit(&self) -> Option<u64> {
        Some(self.hits.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn inventory(&self, endpoint: usize) -> Option<u64> {
        let kv = self.endpoints.get(endpoint)?.kv.as_ref()?;
        // What is not heard tells nothing.
        kv.is_connected().then(|| kv.blocks() as u64)
    }

    fn conversation(&self, key: Key) -> Option<usize> {
        self.position(self.pins.conversations.find(key, clock::now()).endpoint?)
    }

    fn partner(&self, key: Key) -> Option<usize> {
        self.position(self.pins.conversations.find(key, clock::now()).decode?)
    }

    fn session(&self, key: Key) -> Option<usize> {
        self.position(self.pins.sessions.find(key, clock::now()).endpoint?)
    }

    fn known(&self, text: &[u8], least: usize) -> Vec<Vec<usize>> {
        let positions = |holders: Vec<EndpointId>| holders.into_iter().filter_map(|id| self.position(id)).collect();
        self.pins.texts.find(text, least).into_iter().map(|step| positions(step.holders)).collect()
    }
}

/// A service as seen by somebody who takes no turn: who only looks, and a request that has had its turn.
#[derive(Clone, Copy, Debug)]
pub struct Onlooker<'a>(pub &'a Service);

impl View for Onlooker<'_> {
    fn candidates(&self) -> Vec<Candidate> {
        self.0.candidates()
    }

    fn held(&self, named: &Named) -> Vec<Overlap> {
        self.0.held(named)
    }

    fn expected(&self, named: &Named) -> Vec<u32> {
        self.0.expected(named)
    }

    fn turn(&self) -> u64 {
        self.0.turns.load(Ordering::Relaxed)
    }

    fn conversation(&self, key: Key) -> Option<usize> {
        self.0.conversation(key)
    }

    fn partner(&self, key: Key) -> Option<usize> {
        self.0.partner(key)
    }

    fn session(&self, key: Key) -> Option<usize> {
        self.0.session(key)
    }

    fn known(&self, text: &[u8], least: usize) -> Vec<Vec<usize>> {
        self.0.known(text, least)
    }
}

/// Whether a rule listens to the events of an endpoint with this role.
pub(super) fn subscribes(rule: &Rule, part: Role) -> bool {
    match rule.kv.mode {
        ExactMode::Off => false,
        // What decode endpoints hold matters where they may be asked alone.
        ExactMode::PrefillDecode => part == Role::Prefill || rule.split.bypass.is_some(),
        ExactMode::SinglePool => true,
    }
}

//! The table of services, fleets and inventories that edges write and read.
//!
//! Every lock and atomic of kvlb lives here. Readers take a snapshot of the [`Table`] and keep it for one request;
//! writers publish a new one. Locks are held for a look-up or an update in memory, never across I/O.

mod admission;
pub mod breaker;
mod drops;
mod expect;
pub mod index;
pub mod kv;
pub mod ledger;
mod live;
mod pins;
mod reach;
mod recency;
mod retry;
mod scrape;
mod sessions;
mod table;
mod texts;
mod tokenizers;
mod trie;
mod vitals;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::watch;

pub use admission::{Admission, Line, NoWait, Permit, Place, Stay, Turn, Verdict, Waiting, Wish};
pub use drops::{DropSeen, Drops};
pub use expect::{Expectation, Expectations};
pub use live::{Backlog, EndpointId, InFlight, ListedModel, Meters};
pub use pins::Pins;
pub use retry::RetryBudget;
pub use scrape::page;
pub use sessions::{Claim, Claimed, Pin, Sessions, SessionsUse};
pub use table::{Endpoint, Onlooker, STATUS_CLASSES, Service, Table, Unserved, Visit};
pub use texts::{Texts, TextsUse};
pub use tokenizers::{Staged, Tokenizers, Wanted};
pub use trie::{Trie, TrieUse};
pub use vitals::{STALE_AFTER, ScrapeFailure, Vitals};

use crate::clock;
use crate::contract::{NoneSeed, Rehash};
use crate::fleet::{ExactMode, Relief, Rule};
use crate::policy::Settings;
use crate::router;
use crate::telemetry::Metrics;
use breaker::Failures;
use reach::Reach;

/// What of the process's configuration the services are made with.
#[derive(Clone, Debug)]
pub struct Config {
    /// The engines' `PYTHONHASHSEED` (`LLB_KV_NONE_HASH_SEED`).
    pub none_seed: NoneSeed,
    /// The load blend and its numbers; a rule's own fields win.
    pub settings: Settings,
    /// `LOXILB_KV_SPILL_RELIEF`.
    pub spill_relief: Relief,
    /// `LLB_KV_MIN_MATCH_TOKENS`.
    pub min_match_tokens: u32,
    /// `LLB_PD_PREFILL_TIMEOUT_SEC`: a prefill leg may take so long. Default 30 s, as LoxiLB's.
    pub prefill_timeout: Duration,
    /// `LOXILB_KV_MAX_BLOCKS`: names kept per endpoint and rank. `None`: four times what the engine has, at most 10
    /// million.
    pub max_blocks: Option<usize>,
    /// At most this many tokens of a prompt are named: few models take more.
    pub max_tokens: usize,
    /// At most this many bytes remember what prompts began with.
    pub text_bytes: usize,
    /// Where block names fall in the index is nobody's business: a random number.
    pub index_seed: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            none_seed: NoneSeed::Unset,
            settings: Settings::default(),
            spill_relief: Relief::Auto,
            min_match_tokens: 16,
            prefill_timeout: Duration::from_secs(30),
            max_blocks: None,
            max_tokens: 262_144,
            text_bytes: 256 << 20,
            index_seed: 0,
        }
    }
}

/// What all edges share.
#[derive(Debug)]
pub struct State {
    /// Every metric.
    pub metrics: Arc<Metrics>,
    /// Staged tokenizers.
    pub tokenizers: Tokenizers,
    /// What prompts of late began with.
    pub texts: Texts,
    /// How many requests endpoints may have, and who waits.
    pub admission: Arc<Admission>,
    /// What the kernel dropped of late.
    pub drops: Drops,
    config: Config,
    table: ArcSwap<Table>,
    publishing: Mutex<()>,
    rules_changed: watch::Sender<u64>,
    conditions_changed: watch::Sender<u64>,
    facts_changed: watch::Sender<u64>,
    reach: Reach,
    next_endpoint: AtomicU32,
    degraded: Mutex<HashMap<&'static str, String>>,
    scraping: Mutex<()>,
}

impl State {
    /// Empty state: no rules yet.
    pub fn new(config: Config, metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            tokenizers: Tokenizers::default(),
            texts: Texts::new(config.text_bytes, config.index_seed),
            admission: Arc::default(),
            drops: Drops::default(),
            config,
            table: ArcSwap::default(),
            publishing: Mutex::new(()),
            rules_changed: watch::Sender::new(0),
            conditions_changed: watch::Sender::new(0),
            facts_changed: watch::Sender::new(0),
            reach: Reach::default(),
            next_endpoint: AtomicU32::new(0),
            degraded: Mutex::default(),
            scraping: Mutex::new(()),
        }
    }

    /// The rules in force now.
    pub fn table(&self) -> Arc<Table> {
        self.table.load_full()
    }

    /// What services are made with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Puts `rules` in force in place of all that were. Endpoints that stay keep their load, condition and inventory;
    /// what is gone leaves nothing behind. Requests under way finish by the rules that they began with.
    pub fn publish(&self, rules: &[Arc<Rule>]) {
        let publishing = self.publishing.lock();
        let before = self.table.load_full();
        let services = rules.iter().map(|rule| Arc::new(self.ready(rule, &before))).collect();
        let table = Arc::new(Table::new(services));
        self.table.store(Arc::clone(&table));
        self.admission.follow(&table);
        drop(publishing);
        self.rules_changed.send_modify(|version| *version += 1);
        self.conditions_changed();
    }

    /// Says that the datapath takes requests by this version of the rules, as [`State::watch_rules`] numbers them; `None`
    /// when it has ended.
    pub fn datapath_serves(&self, version: Option<u64>) {
        self.reach.serves(version);
    }

    /// Blocks until the datapath takes requests by the rules in force, for `limit` at most; not at all while there is no
    /// datapath. Says whether it does.
    pub fn wait_for_datapath(&self, limit: Duration) -> bool {
        let version = *self.rules_changed.borrow();
        self.reach.wait_for(version, limit)
    }

    /// Tells of every change of the rules.
    pub fn watch_rules(&self) -> watch::Receiver<u64> {
        self.rules_changed.subscribe()
    }

    /// Tells of every change of an endpoint's condition.
    pub fn watch_conditions(&self) -> watch::Receiver<u64> {
        self.conditions_changed.subscribe()
    }

    /// Says that an endpoint's condition changed.
    pub fn conditions_changed(&self) {
        self.admission.look_again();
        self.conditions_changed.send_modify(|version| *version += 1);
    }

    /// Tells when an engine has said what it is.
    pub fn watch_facts(&self) -> watch::Receiver<u64> {
        self.facts_changed.subscribe()
    }

    /// Says that an engine has said what it is.
    pub fn facts_changed(&self) {
        self.facts_changed.send_modify(|version| *version += 1);
    }

    /// Says that something does not work as it should, until [`State::recovered`]; shown in the status and as a metric.
    pub fn degrade(&self, what: &'static str, why: String) {
        self.degraded.lock().insert(what, why);
    }

    /// Takes back what [`State::degrade`] said.
    pub fn recovered(&self, what: &'static str) {
        self.degraded.lock().remove(what);
    }

    /// What does not work as it should now, and why, in alphabetical order.
    pub fn degraded(&self) -> Vec<(&'static str, String)> {
        let mut all: Vec<_> = self.degraded.lock().iter().map(|(what, why)| (*what, why.clone())).collect();
        all.sort_unstable();
        all
    }

    fn ready(&self, rule: &Arc<Rule>, before: &Table) -> Service {
        let old = before.service(rule.id);
        // Names of another contract mean nothing: a change of it starts an empty index.
        let kept = old.filter(|old| same_contract(old.rule(), rule));
        let index =
            kept.map_or_else(|| Arc::new(index::Index::new(self.index_config(rule))), |old| Arc::clone(&old.index));
        let endpoints: Vec<_> =
            rule.endpoints.iter().map(|spec| self.endpoint(rule, spec, old, kept, &index)).collect();
        let expectations = old.map_or_else(Arc::default, |old| Arc::clone(&old.expectations));
        for endpoint in &endpoints {
            if let Some(kv) = &endpoint.kv {
                kv.set_expectations(&expectations, endpoint.meters.id);
            }
        }
        let pins = old.map_or_else(Arc::default, |old| Arc::clone(&old.pins));
        pins.retain(rule, &endpoints);
        Service {
            ready: router::Service {
                rule: Arc::clone(rule),
                settings: self.settings(rule),
                min_match_tokens: rule.kv.blend.min_match_tokens.unwrap_or(self.config.min_match_tokens),
            },
            endpoints,
            index,
            expectations,
            pins,
            visits: old.map_or_else(Arc::default, |old| Arc::clone(&old.visits)),
            turns: old.map_or_else(|| Arc::new(AtomicU64::new(0)), |old| Arc::clone(&old.turns)),
            hits: old.map_or_else(Arc::default, |old| Arc::clone(&old.hits)),
            choices: old.map_or_else(|| Arc::new(AtomicU64::new(0)), |old| Arc::clone(&old.choices)),
            classes: Default::default(),
            tiers: Default::default(),
            failures: Failures::default(),
            line: old.map_or_else(Arc::default, |old| Arc::clone(&old.line)),
            retries: old.map_or_else(|| Arc::new(RetryBudget::new(clock::now())), |old| Arc::clone(&old.retries)),
        }
    }

    fn endpoint(
        &self,
        rule: &Rule,
        spec: &crate::fleet::Endpoint,
        old: Option<&Arc<Service>>,
        kept: Option<&Arc<Service>>,
        index: &Arc<index::Index>,
    ) -> Endpoint {
        let find = |service: &Arc<Service>| service.endpoints.iter().find(|e| e.spec.key == spec.key).cloned();
        let meters = old.and_then(find).map_or_else(
            || Arc::new(Meters::new(EndpointId(self.next_endpoint.fetch_add(1, Ordering::Relaxed)))),
            |old| old.meters,
        );
        let kv = table::subscribes(rule, spec.role).then(|| {
            // What listens elsewhere may hear another engine.
            let same_ports =
                |old: &Endpoint| (old.spec.zmq_port, old.spec.replay_port) == (spec.zmq_port, spec.replay_port);
            let kept = kept.and_then(find).filter(same_ports).and_then(|old| old.kv);
            kept.unwrap_or_else(|| Arc::new(kv::EndpointKv::new(Arc::clone(index), &self.naming(rule))))
        });
        let place = self.admission.place(&spec.key);
        let endpoint = Endpoint { spec: spec.clone(), meters, kv, place };
        if let Some(address) = endpoint.literal_address() {
            endpoint.meters.set_addresses(vec![address]);
        }
        endpoint
    }

    fn naming(&self, rule: &Rule) -> kv::Naming {
        kv::Naming {
            algo: rule.kv.algo,
            seed: self.config.none_seed.clone(),
            block_size: rule.kv.block_size,
            keying: rule.kv.keying,
            // Where names of ours fall is nobody's business either.
            rehash: Rehash::new(self.config.index_seed),
        }
    }

    fn settings(&self, rule: &Rule) -> Settings {
        let (own, ours) = (&rule.kv.blend, self.config.settings);
        Settings {
            blend: own.mode.unwrap_or(ours.blend),
            mean_load_factor: own.mean_load_factor.unwrap_or(ours.mean_load_factor),
            load_penalty: own.load_penalty.unwrap_or(ours.load_penalty),
            cap_sum_milli: own.cap_sum_milli.or(ours.cap_sum_milli),
            load_floor: own.load_floor.unwrap_or(ours.load_floor),
            spill_relief: own.spill_relief.unwrap_or(self.config.spill_relief).applies(rule.kv.mode),
            min_overlap: ours.min_overlap,
            seed_every: own.seed_every.unwrap_or(ours.seed_every),
            seed_min_blocks: own.seed_min_blocks.unwrap_or(ours.seed_min_blocks),
        }
    }

    fn index_config(&self, rule: &Rule) -> index::IndexConfig {
        index::IndexConfig {
            max_blocks: self.config.max_blocks,
            seed: self.config.index_seed,
            tier_weights: rule.kv.tier_weights,
            ..index::IndexConfig::default()
        }
    }
}

/// Whether what endpoints hold under `old` still means the same under `new`.
fn same_contract(old: &Rule, new: &Rule) -> bool {
    let contract = |rule: &Rule| {
        let kv = &rule.kv;
        (kv.mode == ExactMode::Off, kv.algo, kv.block_size, kv.engine, kv.keying, kv.tier_weights)
    };
    contract(old) == contract(new) && old.kv.zmq_port == new.kv.zmq_port && old.kv.replay_port == new.kv.replay_port
}

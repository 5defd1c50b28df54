//! The authoritative list of rules.
//!
//! Owns the rules as operators wrote them, their numbers, and their copy on disk. Every change goes through one writer:
//! checked, written durably, put in force, answered, in this order. A change that cannot be written is not in force.
//! Readers take a snapshot and never wait for the disk. Numbers are never given out twice in one state directory.

mod change;
mod file;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde_json::{Map, Value};

pub use change::{Change, Done, Select};
pub use file::StoreError;

use file::{Document, Kept, Loaded, RulesFile};

use super::Problem;
use super::wire::Body;
use crate::fleet::{Rule, RuleId, RuleKey};

/// Rules of one kvlb: each may have several of the ports below.
pub(crate) const RULES_MAX: usize = 1_024;
/// Addresses and ports of all rules: the kernel's table holds 4096, and without the kernel each takes a socket per data
/// thread.
const VIP_PORTS_MAX: usize = 4_096;

/// Where rules in force go.
pub trait Publish: Send + Sync {
    /// Puts `rules` in force in place of all that were.
    fn publish(&self, rules: Vec<Arc<Rule>>);
}

impl<F: Fn(Vec<Arc<Rule>>) + Send + Sync> Publish for F {
    fn publish(&self, rules: Vec<Arc<Rule>>) {
        self(rules);
    }
}

/// One rule, as it is kept.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its number.
    pub id: RuleId,
    /// The fields as they were sent.
    pub json: Map<String, Value>,
    /// The rule in force, or why there is none: a rule that an older version accepted may make no sense to this one. It
    /// is kept, shown with its reason, and can be replaced or deleted.
    pub rule: Result<Arc<Rule>, String>,
    /// Made by kvlb itself, of what engines say: it is not kept over restarts, and gives way to an operator's.
    pub volatile: bool,
    key: Option<RuleKey>,
}

impl Entry {
    fn new(id: RuleId, body: &Body) -> Result<Self, Problem> {
        let rule = Arc::new(body.rule(id)?);
        Ok(Self { id, json: body.json().clone(), key: Some(rule.key.clone()), rule: Ok(rule), volatile: false })
    }

    /// A rule from disk, in force or not.
    fn kept(kept: Kept) -> Self {
        let id = RuleId(kept.id);
        let body = Body::from_json(&Value::Object(kept.body.clone()));
        let key = body.as_ref().ok().and_then(|body| body.key().ok());
        match body.and_then(|body| Self::new(id, &body)) {
            Ok(entry) => entry,
            Err(problem) => Self { id, json: kept.body, rule: Err(problem.to_string()), volatile: false, key },
        }
    }

    /// What tells the rule from others; `None` for one that cannot even be read so far.
    pub fn key(&self) -> Option<&RuleKey> {
        self.key.as_ref()
    }

    /// Its free name.
    pub fn name(&self) -> Option<&str> {
        self.json.get("serviceArguments")?.get("name")?.as_str()
    }

    fn body(&self) -> Result<Body, Problem> {
        Body::from_json(&Value::Object(self.json.clone()))
    }
}

/// All rules at one moment, oldest first.
pub type Entries = Arc<Vec<Arc<Entry>>>;

/// The rules, in memory and on disk.
pub struct Store {
    entries: ArcSwap<Vec<Arc<Entry>>>,
    writer: Mutex<Writer>,
    publish: Box<dyn Publish>,
    trouble: Vec<String>,
}

struct Writer {
    /// `None`: rules live in memory only.
    file: Option<RulesFile>,
    next_id: u32,
    held: Held,
}

/// Whose changes are put off while a takeover is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Held {
    /// Nobody's.
    #[default]
    No,
    /// Operators', in a process that is about to serve: kvlb's own rule grows while it gets ready.
    Operators,
    /// All, in one whose rules are being copied.
    All,
}

/// What a store goes on from where another process kept the rules before.
#[derive(Debug)]
pub enum Before {
    /// The state directory, and its lock.
    Kept(PathBuf, File),
    /// The rules themselves, as [`Store::copy`] has given them.
    Told(Value),
}

impl Store {
    /// Takes the state directory, and puts the rules that it holds in force. `None` keeps rules in memory only.
    ///
    /// # Errors
    /// [`StoreError`] where the directory cannot be used, or holds rules that cannot be read.
    pub fn open(dir: Option<&Path>, publish: impl Publish + 'static) -> Result<Self, StoreError> {
        let file = dir.map(RulesFile::open).transpose()?;
        let loaded = file.as_ref().map(RulesFile::load).transpose()?;
        Ok(Self::with(file, loaded, Held::No, publish))
    }

    /// Goes on with the rules of a process that hands over. Operators' changes are put off until [`Store::go_on`].
    ///
    /// # Errors
    /// [`StoreError`] where the rules cannot be read.
    pub fn take_over(before: Before, publish: impl Publish + 'static) -> Result<Self, StoreError> {
        let (file, loaded) = match before {
            Before::Kept(dir, lock) => {
                let file = RulesFile::locked(&dir, lock);
                let loaded = file.load()?;
                (Some(file), loaded)
            }
            Before::Told(rules) => {
                let document = serde_json::from_value(rules).map_err(|error| StoreError::Told(error.to_string()))?;
                (None, Loaded { document, recovered: None })
            }
        };
        Ok(Self::with(file, Some(loaded), Held::Operators, publish))
    }

    fn with(file: Option<RulesFile>, loaded: Option<Loaded>, held: Held, publish: impl Publish + 'static) -> Self {
        let mut trouble = Vec::new();
        let (next_id, kept) = loaded.map_or((1, Vec::new()), |loaded| {
            trouble.extend(loaded.recovered);
            (loaded.document.next_id, loaded.document.rules)
        });
        let entries = refuse_misfits(kept.into_iter().map(Entry::kept).collect());
        // A file edited by hand may name a number that is not given out yet.
        let next_id = entries.iter().map(|e| e.id.0.saturating_add(1)).fold(next_id.max(1), u32::max);
        trouble.extend(refusals(&entries));
        for why in &trouble {
            tracing::error!(why, "the state directory is not as it should be");
        }
        let store = Self {
            entries: ArcSwap::from_pointee(entries),
            writer: Mutex::new(Writer { file, next_id, held }),
            publish: Box::new(publish),
            trouble,
        };
        store.publish();
        store
    }

    /// Puts off every change from now on: the rules are being handed over.
    pub fn hold(&self) {
        self.writer.lock().held = Held::All;
    }

    /// Takes changes again.
    pub fn go_on(&self) {
        self.writer.lock().held = Held::No;
    }

    /// A descriptor of the state directory's lock, where there is one.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn lend_lock(&self) -> std::io::Result<Option<File>> {
        self.writer.lock().file.as_ref().map(RulesFile::lend_lock).transpose()
    }

    /// The rules, where no directory keeps them.
    pub fn copy(&self) -> Option<Value> {
        let writer = self.writer.lock();
        if writer.file.is_some() {
            return None;
        }
        serde_json::to_value(document(&self.entries(), writer.next_id)).ok()
    }

    /// All rules now.
    pub fn entries(&self) -> Entries {
        self.entries.load_full()
    }

    /// What was wrong with the state directory at the start, for the status; empty: nothing.
    pub fn trouble(&self) -> &[String] {
        &self.trouble
    }

    /// Makes one change. Blocks until the disk has it.
    ///
    /// # Errors
    /// A [`Problem`] where the change makes no sense, or cannot be written; then nothing changed.
    pub fn change(&self, change: &Change) -> Result<Done, Problem> {
        let mut writer = self.writer.lock();
        let own = matches!(change, Change::Volatile(_));
        if writer.held == Held::All || (writer.held == Held::Operators && !own) {
            return Err(Problem::HandingOver);
        }
        let before = self.entries();
        let (after, done) = change::apply(&before, change, writer.next_id)?;
        if let Some(after) = after {
            writer.commit(&after, done.next_id)?;
            self.entries.store(Arc::new(after));
            self.publish();
        }
        Ok(done.done)
    }

    fn publish(&self) {
        let rules = self.entries().iter().filter_map(|entry| entry.rule.as_ref().ok().cloned()).collect();
        self.publish.publish(rules);
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("entries", &self.entries).field("trouble", &self.trouble).finish_non_exhaustive()
    }
}

impl Writer {
    fn commit(&mut self, entries: &[Arc<Entry>], next_id: u32) -> Result<(), Problem> {
        if let Some(file) = &self.file {
            file.save(&document(entries, next_id)).map_err(|error| {
                tracing::error!(%error, "a change of the rules could not be written");
                Problem::NotDurable(error.to_string())
            })?;
        }
        self.next_id = next_id;
        Ok(())
    }
}

/// What is kept of the rules.
fn document(entries: &[Arc<Entry>], next_id: u32) -> Document {
    let kept = entries.iter().filter(|entry| !entry.volatile);
    Document::new(next_id, kept.map(|e| Kept { id: e.id.0, body: e.json.clone() }).collect())
}

/// A file edited by hand may hold two rules for the same requests, one number twice, or more ports than there may be: the
/// first are in force.
fn refuse_misfits(entries: Vec<Entry>) -> Vec<Arc<Entry>> {
    let mut checked: Vec<Arc<Entry>> = Vec::with_capacity(entries.len());
    for mut entry in entries {
        let clash = checked.iter().find(|other| {
            let keys = other.key.as_ref().zip(entry.key.as_ref());
            other.id == entry.id || keys.is_some_and(|(a, b)| change::same_but_ports(a, b))
        });
        if let Some(other) = clash {
            entry.rule = Err(format!("rule {} has its number or serves the same requests", other.id));
        }
        let in_force = checked.iter().map(AsRef::as_ref).chain([&entry]).filter(|entry| entry.rule.is_ok());
        if change::vip_ports(in_force.filter_map(Entry::key)) > VIP_PORTS_MAX {
            entry.rule = Err(format!("it and the rules before have more than {VIP_PORTS_MAX} VIP ports"));
        }
        checked.push(Arc::new(entry));
    }
    checked
}

fn refusals(entries: &[Arc<Entry>]) -> impl Iterator<Item = String> {
    entries.iter().filter_map(|entry| {
        let why = entry.rule.as_ref().err()?;
        Some(format!("rule {} is kept but not in force: {why}", entry.id))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(port: u16, changes: Value) -> Body {
        let mut service = json!({"externalIP": "127.0.0.9", "port": port, "mode": 4});
        if let (Value::Object(service), Value::Object(changes)) = (&mut service, changes) {
            service.extend(changes);
        }
        Body::from_json(&json!({
            "serviceArguments": service,
            "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": 8000}],
        }))
        .unwrap()
    }

    fn put(store: &Store, port: u16) -> RuleId {
        store.change(&Change::Post(Box::new(body(port, json!({}))))).unwrap().ids[0]
    }

    type Published = Arc<Mutex<Vec<Vec<u32>>>>;

    fn open(dir: Option<&Path>) -> (Store, Published) {
        let published = Published::default();
        let seen = Arc::clone(&published);
        let publish = move |rules: Vec<Arc<Rule>>| seen.lock().push(rules.iter().map(|rule| rule.id.0).collect());
        (Store::open(dir, publish).unwrap(), published)
    }

    #[test]
    fn rules_and_numbers_come_back_after_a_restart_and_no_number_comes_twice() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = open(Some(dir.path()));
        assert_eq!((put(&store, 80), put(&store, 81)), (RuleId(1), RuleId(2)));
        store.change(&Change::Delete(Select::Id(RuleId(2)))).unwrap();
        drop(store);
        let (store, published) = open(Some(dir.path()));
        assert_eq!(*published.lock(), [[1]], "in force before anyone asks");
        assert!(store.trouble().is_empty());
        assert_eq!(put(&store, 82), RuleId(3));
    }

    #[test]
    fn without_a_directory_rules_live_in_memory() {
        let (store, published) = open(None);
        put(&store, 80);
        put(&store, 81);
        assert_eq!(*published.lock(), [vec![], vec![1], vec![1, 2]]);
    }

    #[test]
    fn while_rules_are_handed_over_nothing_changes_and_afterwards_all_are_there() {
        let dir = tempfile::tempdir().unwrap();
        for dir in [Some(dir.path()), None] {
            let (old, _) = open(dir);
            put(&old, 80);
            old.hold();
            let change = |port| Change::Post(Box::new(body(port, json!({}))));
            let code = |done: Result<Done, Problem>| done.map_err(|problem| problem.code());
            assert_eq!(code(old.change(&change(81))).unwrap_err(), "handing_over");
            let before = match (dir, old.lend_lock().unwrap()) {
                (Some(dir), Some(lock)) => Before::Kept(dir.to_owned(), lock),
                _ => Before::Told(old.copy().unwrap()),
            };
            let new = Store::take_over(before, |_| ()).unwrap();
            assert_eq!(new.entries().len(), 1);
            assert_eq!(code(new.change(&change(81))).unwrap_err(), "handing_over");
            new.change(&Change::Volatile(Box::new(body(90, json!({}))))).unwrap();
            drop(old);
            if let Some(dir) = dir {
                assert!(matches!(RulesFile::open(dir), Err(StoreError::InUse(_))), "the lock is the new one's too");
            }
            new.go_on();
            assert_eq!(put(&new, 81), RuleId(3));
        }
    }

    #[test]
    fn a_change_that_cannot_be_written_is_not_in_force() {
        let dir = tempfile::tempdir().unwrap();
        let (store, published) = open(Some(&dir.path().join("state")));
        put(&store, 80);
        std::fs::remove_dir_all(dir.path()).unwrap();
        let refused = store.change(&Change::Post(Box::new(body(81, json!({})))));
        assert_eq!(refused.map_err(|problem| (problem.code(), problem.status().as_u16())), Err(("not_durable", 503)));
        assert_eq!(store.entries().len(), 1);
        assert_eq!(*published.lock(), [vec![], vec![1]]);
    }

    #[test]
    fn a_rule_of_kvlbs_own_making_gives_way_to_an_operators_and_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (store, published) = open(Some(dir.path()));
        let own = |port, changes| Change::Volatile(Box::new(body(port, changes)));
        let done = |change: &Change| store.change(change).map(|done| (done.what, done.ids[0].0)).unwrap();
        assert_eq!(done(&own(80, json!({}))), ("created", 1));
        assert_eq!(done(&own(80, json!({"sel": 3}))), ("replaced", 1));
        assert!(store.entries()[0].volatile);
        let down = Change::Endpoints {
            host: "127.0.0.1".to_owned(),
            port: None,
            field: "adminState",
            value: Some(json!("down")),
        };
        assert_eq!(done(&down), ("changed", 1));
        assert!(store.entries()[0].volatile, "still of kvlb's making");
        assert_eq!(put(&store, 81), RuleId(2));
        assert_eq!(done(&own(81, json!({"sel": 3}))), ("left", 2), "an operator's rule stays as it is");
        let again = body(80, json!({"sel": 3}));
        assert_eq!(done(&Change::Post(Box::new(again.clone()))), ("replaced", 1), "taken over by the operator");
        assert!(!store.entries()[0].volatile);
        assert_eq!(done(&Change::Post(Box::new(again))), ("unchanged", 1));
        assert_eq!(done(&own(82, json!({}))), ("created", 3));
        assert_eq!(published.lock().last().unwrap(), &[1, 2, 3]);
        drop(store);
        let (store, published) = open(Some(dir.path()));
        assert_eq!(*published.lock(), [[1, 2]]);
        assert_eq!(put(&store, 83), RuleId(4), "its number is not given to another");
    }

    #[test]
    fn damage_is_told_and_the_version_before_serves() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = open(Some(dir.path()));
        put(&store, 80);
        put(&store, 81);
        drop(store);
        std::fs::write(dir.path().join("rules.json"), "{\"format\":1,").unwrap();
        let (store, published) = open(Some(dir.path()));
        assert!(store.trouble()[0].contains("the version before it is in force"));
        assert_eq!(*published.lock(), [[1]]);
        assert!(put(&store, 82) > RuleId(2), "number 2 was given out by the lost version");
    }

    #[test]
    fn of_two_rules_for_the_same_requests_the_first_is_in_force() {
        let dir = tempfile::tempdir().unwrap();
        let file = RulesFile::open(dir.path()).unwrap();
        let kept = |id, port| Kept { id, body: body(port, json!({})).json().clone() };
        file.save(&Document::new(9, vec![kept(1, 80), kept(2, 80), kept(1, 81), kept(3, 82)])).unwrap();
        drop(file);
        let (store, published) = open(Some(dir.path()));
        assert_eq!(*published.lock(), [[1, 3]]);
        assert_eq!(store.trouble().len(), 2);
    }

    #[test]
    fn a_kept_rule_that_this_version_refuses_is_not_lost() {
        let dir = tempfile::tempdir().unwrap();
        let file = RulesFile::open(dir.path()).unwrap();
        let good = body(80, json!({})).json().clone();
        let bad = body(81, json!({"kvEngineType": "sglang"})).json().clone();
        let rules = vec![Kept { id: 4, body: good }, Kept { id: 9, body: bad }];
        file.save(&Document::new(2, rules)).unwrap();
        drop(file);
        let (store, published) = open(Some(dir.path()));
        assert_eq!(*published.lock(), [[4]]);
        assert!(store.trouble()[0].contains("rule 9 is kept but not in force"));
        assert_eq!(put(&store, 82), RuleId(10), "behind every number that the file names");
        drop(store);
        let (store, _) = open(Some(dir.path()));
        assert_eq!(store.entries().len(), 3);
        // A new body for the same key heals it, under the same number.
        assert_eq!(put(&store, 81), RuleId(9));
        assert!(store.entries().iter().all(|entry| entry.rule.is_ok()));
    }
}

//! What a change makes of the rules, as values.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use serde_json::Value;

use super::{Entry, RULES_MAX, VIP_PORTS_MAX};
use crate::control::Problem;
use crate::control::wire::{Body, Oper};
use crate::fleet::{EndpointKey, EngineType, PortRange, RuleId, RuleKey};

/// A change of the rules.
#[derive(Clone, Debug)]
pub enum Change {
    /// `POST`: a rule, or endpoints that join or leave one.
    Post(Box<Body>),
    /// A rule of kvlb's own making: as a `POST`, but it leaves an operator's rule as it is and is not kept on disk.
    Volatile(Box<Body>),
    /// `DELETE`.
    Delete(Select),
    /// A member of endpoints in all rules that list them: set, or removed where the value is `None`.
    Endpoints {
        /// The endpoints' host, in its comparable spelling.
        host: String,
        /// Their port; `None`: all.
        port: Option<u16>,
        /// The member's name.
        field: &'static str,
        /// Its value.
        value: Option<Value>,
    },
}

/// Which rules are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Select {
    /// All.
    All,
    /// The one with this number.
    Id(RuleId),
    /// All with this name.
    Name(String),
    /// The one at this address.
    Address {
        /// `externalIP`.
        vip: IpAddr,
        /// `port`.
        port: u16,
        /// `portMax`, where it was named.
        port_max: Option<u16>,
        /// `host`, where it was named; empty is the rule without one.
        host: Option<String>,
        /// `model_name`, where it was named.
        model: Option<String>,
    },
}

/// What a change did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// In one word: `created`, `replaced`, `unchanged`, `attached`, `detached`, `deleted`, `changed`; `left`: an operator's
    /// rule is there.
    pub what: &'static str,
    /// The rules that it concerned.
    pub ids: Vec<RuleId>,
}

pub(super) struct Applied {
    pub(super) done: Done,
    pub(super) next_id: u32,
}

type After = Option<Vec<Arc<Entry>>>;

/// The rules after `change`, or `None` where it changes nothing.
pub(super) fn apply(before: &[Arc<Entry>], change: &Change, next_id: u32) -> Result<(After, Applied), Problem> {
    let (after, what, ids) = match change {
        Change::Post(body) if body.oper() == Oper::Put => return put(before, body, next_id, false),
        Change::Volatile(body) => return put(before, body, next_id, true),
        Change::Post(body) => move_endpoints(before, body)?,
        Change::Delete(select) => delete(before, select)?,
        Change::Endpoints { host, port, field, value } => {
            let chosen = |key: &EndpointKey| key.host == *host && port.is_none_or(|port| key.port == port);
            let none = || Problem::NoEndpoint(place(host, *port));
            set_endpoints(before, chosen, field, value.as_ref(), none)?
        }
    };
    Ok((after, Applied { done: Done { what, ids }, next_id }))
}

impl Select {
    /// The rules that are meant, oldest first.
    ///
    /// # Errors
    /// [`Problem::NoRule`] where a rule was named that is not there.
    pub fn of(&self, entries: &[Arc<Entry>]) -> Result<Vec<Arc<Entry>>, Problem> {
        let found: Vec<_> = entries.iter().filter(|entry| self.means(entry)).cloned().collect();
        if found.is_empty() && *self != Self::All { Err(Problem::NoRule(self.to_string())) } else { Ok(found) }
    }

    fn means(&self, entry: &Entry) -> bool {
        match self {
            Self::All => true,
            Self::Id(id) => entry.id == *id,
            Self::Name(name) => !name.is_empty() && entry.name() == Some(name),
            Self::Address { vip, port, port_max, host, model } => entry.key().is_some_and(|key| {
                key.vip == *vip
                    && key.ports.first == *port
                    && port_max.is_none_or(|last| key.ports.last == last.max(*port))
                    && host.as_ref().is_none_or(|host| key.host == *host)
                    && model.as_ref().is_none_or(|model| key.model.as_ref() == Some(model))
            }),
        }
    }
}

impl std::fmt::Display for Select {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All => f.write_str("at all"),
            Self::Id(id) => write!(f, "with id {id}"),
            Self::Name(name) => write!(f, "named {name:?}"),
            Self::Address { vip, port, port_max, host, model } => {
                write!(f, "at {}", place(&vip.to_string(), Some(*port)))?;
                port_max.map_or(Ok(()), |last| write!(f, "-{last}"))?;
                host.as_ref().map_or(Ok(()), |host| write!(f, " for host {host:?}"))?;
                model.as_ref().map_or(Ok(()), |model| write!(f, " for model {model:?}"))
            }
        }
    }
}

fn place(host: &str, port: Option<u16>) -> String {
    match port {
        Some(port) => EndpointKey { host: host.to_owned(), port }.to_string(),
        None => host.to_owned(),
    }
}

/// How an operator tells a rule from the others on its address.
pub(crate) fn described(entry: &Entry) -> String {
    let Some(key) = entry.key() else { return entry.id.to_string() };
    let parts = [("host", Some(&key.host)), ("path", Some(&key.path_prefix)), ("model", key.model.as_ref())];
    let parts: Vec<_> = parts
        .into_iter()
        .filter_map(|(word, value)| value.filter(|v| !v.is_empty()).map(|value| format!("{word} {value}")))
        .collect();
    let parts = if parts.is_empty() { "any model".to_owned() } else { parts.join(", ") };
    format!("{} ({parts})", entry.id)
}

fn put(before: &[Arc<Entry>], body: &Body, next_id: u32, volatile: bool) -> Result<(After, Applied), Problem> {
    let key = body.key()?;
    let body = body.clone().without_oper();
    let position = before.iter().position(|entry| entry.key() == Some(&key));
    let Some(position) = position else {
        let entry = Entry { volatile, ..create(before, &body, &key, next_id)? };
        let done = Done { what: "created", ids: vec![entry.id] };
        let after = before.iter().cloned().chain([Arc::new(entry)]).collect();
        return Ok((Some(after), Applied { done, next_id: next_id.saturating_add(1) }));
    };
    let old = &before[position];
    if volatile && !old.volatile {
        return Ok((None, Applied { done: Done { what: "left", ids: vec![old.id] }, next_id }));
    }
    keeps_what_it_must(old, &body)?;
    let entry = Entry { volatile, ..Entry::new(old.id, &body)? };
    check_vip_ports(before, &key)?;
    let ids = vec![entry.id];
    if old.rule.is_ok() && old.json == entry.json && old.volatile == volatile {
        return Ok((None, Applied { done: Done { what: "unchanged", ids }, next_id }));
    }
    Ok((Some(with(before, position, entry)), Applied { done: Done { what: "replaced", ids }, next_id }))
}

fn create(before: &[Arc<Entry>], body: &Body, key: &RuleKey, next_id: u32) -> Result<Entry, Problem> {
    let entry = Entry::new(RuleId(next_id), body)?;
    if before.len() >= RULES_MAX || next_id == u32::MAX {
        return Err(Problem::TooMany { what: "rules", count: before.len() + 1, limit: RULES_MAX, of: "kvlb" });
    }
    check_vip_ports(before, key)?;
    let overlaps = |other: &&Arc<Entry>| other.key().is_some_and(|other| same_but_ports(other, key));
    match before.iter().find(overlaps) {
        Some(other) => Err(Problem::Overlap { ports: ports(key.ports), other: other.id }),
        None => Ok(entry),
    }
}

/// Refuses a rule whose ports, together with those of the rules in force, are too many. Rules on one address and port share
/// it.
fn check_vip_ports(before: &[Arc<Entry>], key: &RuleKey) -> Result<(), Problem> {
    let in_force = before.iter().filter(|entry| entry.rule.is_ok()).filter_map(|entry| entry.key());
    let count = vip_ports(in_force.chain([key]));
    if count <= VIP_PORTS_MAX {
        return Ok(());
    }
    Err(Problem::TooMany { what: "VIP ports", count, limit: VIP_PORTS_MAX, of: "kvlb" })
}

/// How many different addresses and ports some rules have.
pub(super) fn vip_ports<'a>(keys: impl Iterator<Item = &'a RuleKey>) -> usize {
    let places = keys.flat_map(|key| key.ports.iter().map(|port| SocketAddr::new(key.vip, port)));
    places.collect::<BTreeSet<_>>().len()
}

/// Two rules for the same requests on ports that overlap: which of them would serve is a guess.
pub(super) fn same_but_ports(a: &RuleKey, b: &RuleKey) -> bool {
    let overlap = a.ports.first <= b.ports.last && b.ports.first <= a.ports.last;
    overlap && RuleKey { ports: b.ports, ..a.clone() } == *b
}

fn ports(range: PortRange) -> String {
    if range.first == range.last { range.first.to_string() } else { format!("{}-{}", range.first, range.last) }
}

/// The engine decides how blocks are named, the mode how bytes flow: neither changes under a rule's traffic.
fn keeps_what_it_must(old: &Entry, body: &Body) -> Result<(), Problem> {
    let Ok(rule) = &old.rule else { return Ok(()) };
    let args = body.args();
    if let Some(mode) = args.mode.filter(|mode| *mode != crate::control::wire::FULLPROXY) {
        let is = crate::control::wire::FULLPROXY.to_string();
        return Err(Problem::Immutable {
            field: "mode",
            is,
            asked: mode.to_string(),
            hint: "kvlb serves mode 4 (fullproxy) alone",
        });
    }
    let is = match rule.kv.engine {
        EngineType::Vllm => "vllm",
        EngineType::LlamaCpp => "llamacpp",
    };
    let asked = args.kv.engine_type.as_deref().filter(|engine| !engine.is_empty()).unwrap_or("vllm");
    if asked == is {
        return Ok(());
    }
    let hint = "delete the rule and create it again";
    Err(Problem::Immutable { field: "kvEngineType", is: is.to_owned(), asked: asked.to_owned(), hint })
}

fn move_endpoints(before: &[Arc<Entry>], body: &Body) -> Result<(After, &'static str, Vec<RuleId>), Problem> {
    let key = body.key()?;
    let position = before.iter().position(|entry| entry.key() == Some(&key));
    let position = position.ok_or_else(|| {
        let model = key.model.clone();
        let select = Select::Address {
            vip: key.vip,
            port: key.ports.first,
            port_max: None,
            host: Some(key.host.clone()),
            model,
        };
        Problem::NoRule(select.to_string())
    })?;
    let old = &before[position];
    let attach = body.oper() == Oper::Attach;
    let new = if attach { old.body()?.attached(body)? } else { old.body()?.detached(body)? };
    let entry = Entry::new(old.id, &new)?;
    let ids = vec![entry.id];
    if entry.json == old.json && !old.volatile {
        return Ok((None, "unchanged", ids));
    }
    Ok((Some(with(before, position, entry)), if attach { "attached" } else { "detached" }, ids))
}

fn delete(before: &[Arc<Entry>], select: &Select) -> Result<(After, &'static str, Vec<RuleId>), Problem> {
    let gone = select.of(before)?;
    if gone.len() > 1 && matches!(select, Select::Address { .. }) {
        let rules = gone.iter().map(|entry| described(entry)).collect();
        return Err(Problem::SeveralRules { what: select.to_string(), rules });
    }
    let ids: Vec<_> = gone.iter().map(|entry| entry.id).collect();
    let after = before.iter().filter(|entry| !ids.contains(&entry.id)).cloned().collect();
    Ok(((!ids.is_empty()).then_some(after), "deleted", ids))
}

fn set_endpoints(
    before: &[Arc<Entry>],
    chosen: impl Fn(&EndpointKey) -> bool,
    field: &str,
    value: Option<&Value>,
    none: impl FnOnce() -> Problem,
) -> Result<(After, &'static str, Vec<RuleId>), Problem> {
    let mut after = before.to_vec();
    let (mut ids, mut changed) = (Vec::new(), false);
    for slot in after.iter_mut().filter(|entry| entry.rule.is_ok()) {
        let Some(body) = slot.body()?.with_endpoint_field(&chosen, field, value)? else { continue };
        let entry = Entry { volatile: slot.volatile, ..Entry::new(slot.id, &body)? };
        ids.push(entry.id);
        changed |= entry.json != slot.json;
        *slot = Arc::new(entry);
    }
    if ids.is_empty() {
        return Err(none());
    }
    Ok((changed.then_some(after), if changed { "changed" } else { "unchanged" }, ids))
}

fn with(before: &[Arc<Entry>], position: usize, entry: Entry) -> Vec<Arc<Entry>> {
    let mut after = before.to_vec();
    after[position] = Arc::new(entry);
    after
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Rules that changes are tried on, without a disk.
    #[derive(Default)]
    struct Rules {
        entries: Vec<Arc<Entry>>,
        next_id: u32,
    }

    impl Rules {
        fn change(&mut self, change: &Change) -> Result<Done, Problem> {
            let (after, applied) = apply(&self.entries, change, self.next_id.max(1))?;
            self.next_id = applied.next_id;
            self.entries = after.unwrap_or_else(|| self.entries.clone());
            Ok(applied.done)
        }

        fn post(&mut self, service: Value) -> Result<(&'static str, u32), &'static str> {
            self.post_with(service, &json!([{"endpointIP": "127.0.0.1", "targetPort": 8000}]))
        }

        fn post_with(&mut self, changes: Value, endpoints: &Value) -> Result<(&'static str, u32), &'static str> {
            let mut service = json!({"externalIP": "127.0.0.9", "port": 80, "mode": 4});
            if let (Value::Object(service), Value::Object(changes)) = (&mut service, changes) {
                service.extend(changes);
            }
            let body = Body::from_json(&json!({"serviceArguments": service, "endpoints": endpoints}));
            let done = body.and_then(|body| self.change(&Change::Post(Box::new(body))));
            done.map(|done| (done.what, done.ids[0].0)).map_err(|problem| problem.code())
        }

        fn delete(&mut self, select: Select) -> Result<Vec<RuleId>, Problem> {
            self.change(&Change::Delete(select)).map(|done| done.ids)
        }
    }

    fn at(port: u16, model: Option<&str>) -> Select {
        let model = model.map(str::to_owned);
        Select::Address { vip: [127, 0, 0, 9].into(), port, port_max: None, host: None, model }
    }

    #[test]
    fn the_same_key_replaces_and_the_same_content_changes_nothing() {
        let mut rules = Rules::default();
        assert_eq!(rules.post(json!({})), Ok(("created", 1)));
        assert_eq!(rules.post(json!({})), Ok(("unchanged", 1)));
        assert_eq!(rules.post(json!({"monitor": false})), Ok(("replaced", 1)));
        assert!(rules.entries[0].rule.as_ref().is_ok_and(|rule| !rule.monitor.enabled));
        assert_eq!(rules.post(json!({"sel": 3, "monitor": false})), Ok(("replaced", 1)));
        assert_eq!(rules.post(json!({"model_name": "a"})), Ok(("created", 2)));
        assert_eq!(rules.post(json!({"host": "h"})), Ok(("created", 3)));
        assert_eq!(rules.post(json!({"path_prefix": "/p"})), Ok(("created", 4)));
        assert_eq!(rules.post(json!({"port": 81})), Ok(("created", 5)));
    }

    #[test]
    fn engine_and_mode_stay_for_a_rules_life() {
        let mut rules = Rules::default();
        rules.post(json!({"kvExactMode": 3})).unwrap();
        for change in [json!({"kvEngineType": "llamacpp"}), json!({"kvEngineType": "sglang"}), json!({"mode": 2})] {
            assert_eq!(rules.post(change), Err("immutable"));
        }
        assert_eq!(rules.post(json!({"kvExactMode": 0, "kvEngineType": "vllm"})), Ok(("replaced", 1)));
        rules.post(json!({"port": 81, "kvEngineType": "llamacpp"})).unwrap();
        assert_eq!(rules.post(json!({"port": 81})), Err("immutable"));
    }

    #[test]
    fn ports_of_rules_for_the_same_requests_do_not_overlap() {
        let mut rules = Rules::default();
        rules.post(json!({"port": 80, "portMax": 90})).unwrap();
        assert_eq!(rules.post(json!({"port": 85})), Err("overlap"));
        assert_eq!(rules.post(json!({"port": 90, "portMax": 95})), Err("overlap"));
        assert_eq!(rules.post(json!({"port": 70, "portMax": 99})), Err("overlap"));
        assert_eq!(rules.post(json!({"port": 91})), Ok(("created", 2)));
        assert_eq!(rules.post(json!({"port": 85, "model_name": "a"})), Ok(("created", 3)));
        assert_eq!(rules.post(json!({"port": 85, "externalIP": "127.0.0.8"})), Ok(("created", 4)));
    }

    #[test]
    fn delete_by_address_takes_one_rule_and_asks_back_where_there_are_several() {
        let mut rules = Rules::default();
        rules.post(json!({})).unwrap();
        rules.post(json!({"model_name": "a"})).unwrap();
        rules.post(json!({"model_name": "b", "port": 81})).unwrap();
        let several = rules.delete(at(80, None)).map_err(|problem| (problem.code(), problem.to_string()));
        assert!(matches!(several, Err(("several_rules", text)) if text.contains("1 (any model), 2 (model a)")));
        assert_eq!(rules.delete(at(80, Some("a"))), Ok(vec![RuleId(2)]));
        assert_eq!(rules.delete(at(80, None)), Ok(vec![RuleId(1)]));
        assert_eq!(rules.delete(at(81, None)), Ok(vec![RuleId(3)]));
        assert_eq!(rules.delete(at(80, None)).map_err(|problem| problem.code()), Err("rule_not_found"));
        assert_eq!(rules.delete(Select::All), Ok(vec![]), "nothing to do is no mistake");
    }

    #[test]
    fn delete_by_name_takes_all_of_that_name() {
        let mut rules = Rules::default();
        for port in [80, 81] {
            rules.post(json!({"name": "chat", "port": port})).unwrap();
        }
        rules.post(json!({"name": "other", "port": 82})).unwrap();
        assert_eq!(rules.delete(Select::Name("chat".to_owned())), Ok(vec![RuleId(1), RuleId(2)]));
        assert_eq!(rules.delete(Select::Id(RuleId(1))).map_err(|problem| problem.code()), Err("rule_not_found"));
    }

    #[test]
    fn endpoints_join_and_leave_without_a_new_rule() {
        let mut rules = Rules::default();
        let row = |port: u16| json!([{"endpointIP": "127.0.0.1", "targetPort": port}]);
        assert_eq!(rules.post_with(json!({"oper": 1}), &row(8001)), Err("rule_not_found"));
        rules.post(json!({})).unwrap();
        assert_eq!(rules.post_with(json!({"oper": 1}), &row(8001)), Ok(("attached", 1)));
        assert_eq!(rules.post_with(json!({"oper": 1}), &row(8001)), Ok(("unchanged", 1)));
        assert_eq!(rules.post_with(json!({"oper": 2}), &row(8000)), Ok(("detached", 1)));
        assert_eq!(rules.post_with(json!({"oper": 2}), &row(8000)), Err("endpoint_not_found"));
        assert_eq!(rules.post_with(json!({"oper": 2}), &row(8001)), Err("endpoints_missing"), "the last one stays");
        let kept = rules.entries[0].json.get("serviceArguments").and_then(|service| service.get("oper"));
        assert_eq!(kept, None, "an order is not part of the rule");
    }

    #[test]
    fn an_operators_word_reaches_an_endpoint_in_all_its_rules() {
        let mut rules = Rules::default();
        rules.post(json!({})).unwrap();
        rules.post(json!({"port": 81})).unwrap();
        let word = |host: &str, port, value: Option<&str>| Change::Endpoints {
            host: host.to_owned(),
            port,
            field: "adminState",
            value: value.map(Value::from),
        };
        let done = rules.change(&word("127.0.0.1", Some(8000), Some("down")));
        assert_eq!(done, Ok(Done { what: "changed", ids: vec![RuleId(1), RuleId(2)] }));
        let down =
            |rules: &Rules| rules.entries.iter().all(|e| e.rule.as_ref().is_ok_and(|r| r.endpoints[0].admin_down));
        assert!(down(&rules));
        assert_eq!(rules.change(&word("127.0.0.1", None, None)).map(|done| done.what), Ok("changed"));
        assert!(!down(&rules));
        assert_eq!(rules.change(&word("127.0.0.1", None, None)).map(|done| done.what), Ok("unchanged"));
        let nobody = rules.change(&word("127.0.0.2", None, None)).map_err(|problem| problem.code());
        assert_eq!(nobody, Err("endpoint_not_found"));
    }

    #[test]
    fn ports_of_all_rules_together_are_bounded_and_shared_ones_count_once() {
        let mut rules = Rules::default();
        assert_eq!(rules.post(json!({"port": 1, "portMax": 65_535})), Err("too_many"));
        assert_eq!(rules.post(json!({"port": 1, "portMax": VIP_PORTS_MAX})), Ok(("created", 1)));
        assert_eq!(rules.post(json!({"port": 5000})), Err("too_many"));
        assert_eq!(rules.post(json!({"port": 80, "externalIP": "127.0.0.8"})), Err("too_many"));
        assert_eq!(rules.post(json!({"port": 80, "model_name": "a"})), Ok(("created", 2)));
        assert_eq!(rules.post(json!({"port": 1, "portMax": VIP_PORTS_MAX, "sel": 3})), Ok(("replaced", 1)));
        rules.delete(at(1, None)).unwrap();
        assert_eq!(rules.post(json!({"port": 5000})), Ok(("created", 3)));
    }

    #[test]
    fn a_bound_keeps_rules_countable() {
        let mut rules = Rules::default();
        for port in 1..=u16::try_from(RULES_MAX).unwrap() {
            rules.post(json!({"port": port})).unwrap();
        }
        assert_eq!(rules.post(json!({"port": 2000})), Err("too_many"));
        assert_eq!(rules.post(json!({"port": 5, "sel": 1})), Ok(("replaced", 5)));
    }
}

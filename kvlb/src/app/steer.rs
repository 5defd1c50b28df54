//! Keeps the kernel's maps in step with the rules and with who is up.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::NO_ADMISSION;
use crate::clock;
use crate::fleet::{Admin, Breaker, Condition, NoEndpoint, Probe, Rule};
use crate::kernel::{EndpointState, Kernel, Phase, SynLimit, Vip, VipEndpoint};
use crate::state::{Endpoint, Service, State, Table};

/// The name of the degraded state in which the kernel does not know what it should.
const DEGRADED: &str = "kernel_sync";
/// Failed writes are tried again after this, also when nothing changed. A breaker that has all its trials under way counts
/// as open, and nobody says when one of them ends.
const AGAIN: Duration = Duration::from_secs(1);

/// Writes every change of rules and conditions to the kernel, for ever. A VIP whose last rule is gone keeps its route for
/// `linger`, so that connections that are still open can end.
pub(super) async fn keep_steering(
    mut leaving: Leaving,
    kernel: Arc<Mutex<Kernel>>,
    state: Arc<State>,
    linger: Duration,
) {
    let (mut rules, mut conditions) = (state.watch_rules(), state.watch_conditions());
    loop {
        let version = *rules.borrow_and_update();
        conditions.mark_unchanged();
        sync(&kernel, &state, &mut leaving, linger);
        state.datapath_serves(Some(version));
        guard_devices(&kernel, &state);
        let changed = async {
            tokio::select! {
                changed = rules.changed() => changed,
                changed = conditions.changed() => changed,
            }
        };
        let wait = AGAIN.min(until_trials(&state.table(), clock::now()));
        if let Ok(Err(_closed)) = tokio::time::timeout(wait, changed).await {
            return;
        }
    }
}

/// How long it is until the first open breaker lets trials through, of which nobody tells.
fn until_trials(table: &Table, now: Instant) -> Duration {
    let endpoints = table.services().iter().flat_map(|service| &service.endpoints);
    let next = endpoints.filter_map(|endpoint| endpoint.meters.breaker.trials_at(now)).min();
    next.map_or(Duration::MAX, |at| at - now)
}

/// Looks whether all devices that are to have admission have it.
fn guard_devices(kernel: &Mutex<Kernel>, state: &State) {
    let lost = kernel.lock().renew_admission();
    if lost.is_empty() {
        return state.recovered(NO_ADMISSION);
    }
    let why: Vec<_> = lost.iter().map(|(device, error)| format!("{device}: {error}")).collect();
    state.degrade(NO_ADMISSION, format!("SYNs are not judged at {}", why.join("; ")));
}

/// Writes what holds now.
pub(super) fn sync(kernel: &Mutex<Kernel>, state: &State, leaving: &mut Leaving, linger: Duration) {
    let wanted = leaving.with(vips(&state.table()), clock::now(), linger);
    let done = kernel.lock().sync(&wanted);
    match done {
        Ok(()) => state.recovered(DEGRADED),
        Err(error) => {
            let why = error.to_string();
            if state.degraded().iter().all(|known| *known != (DEGRADED, why.clone())) {
                tracing::error!(error = &error as &dyn std::error::Error, "not every VIP is as its rules say");
            }
            state.degrade(DEGRADED, why);
        }
    }
}

/// VIPs whose rules are gone, until their connections have had time to end.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    served: BTreeSet<SocketAddr>,
    until: BTreeMap<SocketAddr, Instant>,
}

impl Leaving {
    /// After another process that had these VIPs: those that no rule serves are leaving.
    pub(super) fn after(served: impl IntoIterator<Item = SocketAddr>) -> Self {
        Self { served: served.into_iter().collect(), until: BTreeMap::new() }
    }

    /// `serving` and those that are leaving.
    fn with(&mut self, mut serving: Vec<Vip>, now: Instant, linger: Duration) -> Vec<Vip> {
        let here: BTreeSet<_> = serving.iter().map(|vip| SocketAddr::new(vip.addr, vip.port)).collect();
        for gone in self.served.difference(&here) {
            self.until.insert(*gone, now + linger);
        }
        self.until.retain(|at, until| *until > now && !here.contains(at));
        serving.extend(self.until.keys().map(|at| Vip {
            addr: at.ip(),
            port: at.port(),
            rules: Vec::new(),
            endpoints: Vec::new(),
            no_endpoint: NoEndpoint::Proxy,
            phase: Phase::Draining,
            allowed: Vec::new(),
            syn: None,
        }));
        self.served = here;
        serving
    }
}

/// Every address and port that rules serve, with the endpoints of all its rules.
fn vips(table: &Table) -> Vec<Vip> {
    let mut all: BTreeMap<SocketAddr, Vip> = BTreeMap::new();
    for service in table.services() {
        let key = &service.rule().key;
        let endpoints = seen_by_kernel(service);
        for port in key.ports.iter() {
            let vip = all.entry(SocketAddr::new(key.vip, port)).or_insert_with(|| Vip {
                addr: key.vip,
                port,
                rules: Vec::new(),
                endpoints: Vec::new(),
                no_endpoint: NoEndpoint::Reset,
                phase: Phase::Serving,
                allowed: Vec::new(),
                syn: None,
            });
            // Which rule a connection is for is not known when it is opened: it is answered where one of them would.
            if service.rule().no_endpoint == NoEndpoint::Proxy {
                vip.no_endpoint = NoEndpoint::Proxy;
            }
            vip.rules.push(service.rule().id.0);
            vip.endpoints.extend_from_slice(&endpoints);
        }
    }
    for (at, vip) in &mut all {
        (vip.allowed, vip.syn) = (allowed(table, *at), syn_limit(table, *at));
    }
    all.into_values().collect()
}

/// The networks whose clients some rule at `at` serves; none where it is every client's. Which rule a connection is for is not
/// known when it is opened, so it may be opened where one of them would have it.
fn allowed(table: &Table, at: SocketAddr) -> Vec<(IpAddr, u8)> {
    let mut networks = Vec::new();
    for service in table.at(at) {
        if service.rule().allowed_sources.is_empty() {
            return Vec::new();
        }
        networks.extend_from_slice(&service.rule().allowed_sources);
    }
    networks.sort_unstable();
    networks.dedup();
    networks
}

/// The most generous limit of the rules at `at`, for the same reason; none where one of them has none.
fn syn_limit(table: &Table, at: SocketAddr) -> Option<SynLimit> {
    let of = |rule: &Rule| rule.syn.map(|syn| SynLimit { rule: rule.id.0, per_sec: syn.per_sec, burst: syn.burst });
    let limits: Option<Vec<_>> = table.at(at).map(|service| of(service.rule())).collect();
    limits?.into_iter().max_by_key(|limit| (limit.per_sec, limit.burst, Reverse(limit.rule)))
}

/// A rule's endpoints as the kernel's map shows them, without those whose name is not resolved yet.
fn seen_by_kernel(service: &Service) -> Vec<VipEndpoint> {
    let may_be_asked = service.may_be_asked();
    let seen = |endpoint: &Endpoint| {
        let address = *endpoint.addresses().first()?;
        Some(VipEndpoint {
            addr: address.ip(),
            port: address.port(),
            state: state_of(endpoint.condition()),
            weight: u32::from(endpoint.spec.weight),
            may_be_asked: may_be_asked(endpoint),
        })
    };
    service.endpoints.iter().filter_map(seen).collect()
}

fn state_of(condition: Condition) -> EndpointState {
    match condition {
        Condition { admin: Admin::Down, .. } => EndpointState::AdminDown,
        Condition { admin: Admin::Draining, .. } => EndpointState::Draining,
        Condition { probe: Probe::Down, .. } => EndpointState::ProbeDown,
        Condition { breaker: Breaker::Open, .. } => EndpointState::BreakerOpen,
        Condition { breaker: Breaker::HalfOpen, .. } => EndpointState::HalfOpen,
        Condition { probe: Probe::Unknown, .. } => EndpointState::Unknown,
        Condition { probe: Probe::Up, .. } => EndpointState::Up,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vip(port: u16) -> Vip {
        Vip {
            addr: [127, 0, 0, 1].into(),
            port,
            rules: vec![1],
            endpoints: Vec::new(),
            no_endpoint: NoEndpoint::Proxy,
            phase: Phase::Serving,
            allowed: Vec::new(),
            syn: None,
        }
    }

    fn state() -> State {
        let metrics = Arc::new(crate::telemetry::Metrics::new().expect("names are unique"));
        State::new(crate::state::Config::default(), metrics)
    }

    /// A rule's networks and its limit.
    type Admits = (&'static [(&'static str, u8)], Option<(u32, u32)>);

    /// What the kernel is told of a VIP.
    type Told = (Vec<(IpAddr, u8)>, Option<SynLimit>);

    /// What the kernel is told of rules at 10.10.10.254, from port 80 up to the one given, in the order of ports.
    fn told(rules: &[(u16, Admits)]) -> Vec<Told> {
        let state = state();
        let rule = |(id, (last, (networks, syn))): (u32, &(u16, Admits))| {
            let mut rule = crate::fleet::fixtures::rule();
            rule.id = crate::fleet::RuleId(id);
            (rule.key.ports.first, rule.key.ports.last) = (80, *last);
            rule.key.host = format!("host-{id}");
            let network = |(addr, bits): &(&str, u8)| (addr.parse().expect("an address"), *bits);
            rule.allowed_sources = networks.iter().map(network).collect();
            rule.syn = syn.map(|(per_sec, burst)| crate::fleet::SynRule { per_sec, burst });
            Arc::new(rule)
        };
        state.publish(&(1..).zip(rules).map(rule).collect::<Vec<_>>());
        vips(&state.table()).into_iter().map(|vip| (vip.allowed, vip.syn)).collect()
    }

    #[test]
    fn a_vip_is_reset_without_endpoints_where_all_of_its_rules_would_have_it() {
        use NoEndpoint::{Proxy, Reset};
        let of = |words: &[NoEndpoint]| {
            let state = state();
            let rule = |(id, word): (u32, &NoEndpoint)| {
                let mut rule = crate::fleet::fixtures::rule();
                (rule.id, rule.no_endpoint) = (crate::fleet::RuleId(id), *word);
                rule.key.host = format!("host-{id}");
                Arc::new(rule)
            };
            state.publish(&(1..).zip(words).map(rule).collect::<Vec<_>>());
            vips(&state.table()).remove(0).no_endpoint
        };
        assert_eq!([of(&[Reset]), of(&[Reset, Reset])], [Reset; 2]);
        assert_eq!([of(&[Proxy]), of(&[Reset, Proxy]), of(&[Proxy, Reset])], [Proxy; 3]);
    }

    /// What the kernel is told of the endpoints of the only rule.
    fn seen(state: &State) -> Vec<(EndpointState, bool)> {
        let of = |endpoint: &VipEndpoint| (endpoint.state, endpoint.may_be_asked);
        seen_by_kernel(&state.table().services()[0]).iter().map(of).collect()
    }

    #[test]
    fn every_word_against_an_endpoint_is_told_and_what_most_breakers_say_counts_for_nothing() {
        use EndpointState::{AdminDown, BreakerOpen, Draining, ProbeDown, Unknown, Up};
        let state = state();
        let mut rule = crate::fleet::fixtures::rule();
        rule.endpoints = (1..=5).map(|last| crate::fleet::fixtures::endpoint(last, crate::fleet::Role::Any)).collect();
        state.publish(&[Arc::new(rule.clone())]);
        assert_eq!(seen(&state), [(Unknown, true); 5]);
        let table = state.table();
        let endpoints = &table.services()[0].endpoints;
        for endpoint in endpoints {
            endpoint.meters.set_probe(Probe::Up);
        }
        assert_eq!(seen(&state), [(Up, true); 5]);
        assert_eq!(until_trials(&table, clock::now()), Duration::MAX);
        endpoints[0].meters.set_probe(Probe::Down);
        let breaks = |position: usize| {
            let (breaker, limits) = (&endpoints[position].meters.breaker, rule.breaker.expect("it has one"));
            let fails = || breaker.failed(crate::state::breaker::Cause::Answer, &limits, clock::now());
            assert!((0..limits.answers).any(|_| fails().is_some()));
        };
        breaks(1);
        assert_eq!(seen(&state)[..3], [(ProbeDown, false), (BreakerOpen, false), (Up, true)]);
        let wait = until_trials(&table, clock::now());
        assert!(wait > Duration::from_secs(20) && wait <= Duration::from_secs(30), "{wait:?}");
        breaks(2);
        breaks(3);
        assert_eq!(seen(&state)[1..], [(BreakerOpen, true), (BreakerOpen, true), (BreakerOpen, true), (Up, true)]);
        (rule.endpoints[1].admin_down, rule.endpoints[4].weight) = (true, 0);
        rule.endpoints.remove(2);
        state.publish(&[Arc::new(rule.clone())]);
        assert_eq!(
            seen(&state),
            [(ProbeDown, false), (AdminDown, false), (BreakerOpen, true), (Draining, false)],
            "one of one"
        );
        rule.admin_down = true;
        state.publish(&[Arc::new(rule)]);
        assert!(seen(&state).iter().all(|(_, may_be_asked)| !may_be_asked));
    }

    #[test]
    fn rules_that_share_a_vip_admit_whom_any_of_them_admits() {
        let net = |text: &str, bits| (text.parse::<IpAddr>().expect("an address"), bits);
        let (ten, eleven): (Admits, Admits) = ((&[("11.0.0.0", 8), ("10.0.0.0", 8)], None), (&[("11.0.0.0", 8)], None));
        let ten_and_eleven = vec![net("10.0.0.0", 8), net("11.0.0.0", 8)];
        assert_eq!(told(&[(81, ten)]), [(ten_and_eleven.clone(), None), (ten_and_eleven.clone(), None)]);
        // The second rule has the first port only.
        assert_eq!(told(&[(81, eleven), (80, ten)]), [(ten_and_eleven, None), (vec![net("11.0.0.0", 8)], None)]);
        assert_eq!(told(&[(80, eleven), (80, (&[], None))]), [(Vec::new(), None)]);
    }

    #[test]
    fn rules_that_share_a_vip_limit_as_the_most_generous_of_them() {
        let limit = |rule, per_sec, burst| Some(SynLimit { rule, per_sec, burst });
        let rule = |per_sec, burst| (80, (&[][..], Some((per_sec, burst))));
        let of = |rules: &[(u16, Admits)]| told(rules).into_iter().next().and_then(|(_, syn)| syn);
        assert_eq!(of(&[rule(5, 9)]), limit(1, 5, 9));
        assert_eq!(of(&[rule(5, 9), rule(6, 1), rule(4, 99)]), limit(2, 6, 1));
        assert_eq!(of(&[rule(5, 9), rule(5, 9)]), limit(1, 5, 9));
        assert_eq!(of(&[rule(5, 9), (80, (&[], None))]), None);
    }

    #[test]
    fn a_vip_whose_rules_are_gone_drains_for_a_while_and_comes_back_when_it_is_served_again() {
        let (mut leaving, start, linger) = (Leaving::default(), clock::now(), Duration::from_secs(30));
        assert_eq!(leaving.with(vec![vip(1), vip(2)], start, linger).len(), 2);
        let after = leaving.with(vec![vip(1)], start, linger);
        assert_eq!(
            after.iter().map(|v| (v.port, v.phase)).collect::<Vec<_>>(),
            [(1, Phase::Serving), (2, Phase::Draining)]
        );
        let back = leaving.with(vec![vip(1), vip(2)], start, linger);
        assert!(back.iter().all(|v| v.phase == Phase::Serving) && back.len() == 2);
        leaving.with(vec![vip(1)], start, linger);
        assert_eq!(leaving.with(vec![vip(1)], start + linger, linger).len(), 1);
    }
}

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::kernel::{EndpointState, SynLimit};

/// Maps in memory that refuse what would show a reader something half done.
#[derive(Debug, Default)]
struct Fake {
    vips: BTreeMap<([u8; 16], u16), VipInfo>,
    endpoints: BTreeMap<u32, Endpoint>,
    cleared: Vec<u32>,
    /// By list; so that a list that is named must be there whole.
    networks: BTreeMap<u32, std::collections::BTreeSet<Network>>,
    writes: usize,
    /// Fails every write from this one on.
    fails_from: Option<usize>,
}

impl Fake {
    fn write(&mut self) -> Result<(), Error> {
        self.writes += 1;
        match self.fails_from {
            Some(from) if self.writes >= from => {
                Err(Error::Map { what: "write", map: "test", source: aya::maps::MapError::ElementNotFound })
            }
            _ => Ok(()),
        }
    }

    fn vip(&self, at: &str) -> VipInfo {
        let key = key(at.parse().unwrap());
        self.vips[&(key.addr, key.port)]
    }

    /// What a reader finds who follows the VIP to its endpoints.
    fn read(&self, info: &VipInfo) -> Vec<Endpoint> {
        (info.ep_base..info.ep_base + info.ep_count).map(|slot| self.endpoints[&slot]).collect()
    }

    fn assert_whole(&self) {
        for info in self.vips.values() {
            assert!(
                self.read(info).iter().all(|endpoint| endpoint.port != 0),
                "{info:?} names a cleared entry: {self:?}"
            );
            assert!(info.flags & VIP_ALLOWED == 0 || self.networks.contains_key(&info.allowed), "{info:?}: {self:?}");
        }
    }
}

impl Sink for Fake {
    fn set_endpoint(&mut self, slot: u32, endpoint: &Endpoint) -> Result<(), Error> {
        self.write()?;
        self.endpoints.insert(slot, *endpoint);
        self.assert_whole();
        Ok(())
    }

    fn set_vip(&mut self, key: &VipKey, info: &VipInfo) -> Result<(), Error> {
        self.write()?;
        self.vips.insert((key.addr, key.port), *info);
        self.assert_whole();
        Ok(())
    }

    fn remove_vip(&mut self, key: &VipKey) -> Result<(), Error> {
        self.write()?;
        self.vips.remove(&(key.addr, key.port)).expect("only what is there is removed");
        Ok(())
    }

    fn set_network(&mut self, list: u32, network: Network, _rule: u32) -> Result<(), Error> {
        self.write()?;
        let named = self.vips.values().any(|info| info.flags & VIP_ALLOWED != 0 && info.allowed == list);
        assert!(!named, "a list changes under a VIP: {self:?}");
        self.networks.entry(list).or_default().insert(network);
        Ok(())
    }

    fn remove_network(&mut self, list: u32, network: Network) -> Result<(), Error> {
        self.write()?;
        if let Some(networks) = self.networks.get_mut(&list) {
            networks.remove(&network);
            if networks.is_empty() {
                self.networks.remove(&list);
            }
        }
        self.assert_whole();
        Ok(())
    }

    fn clear_stats(&mut self, id: u32) -> Result<(), Error> {
        self.write()?;
        self.cleared.push(id);
        Ok(())
    }
}

fn endpoint(last: u8, state: EndpointState) -> VipEndpoint {
    VipEndpoint {
        addr: [10, 0, 0, last].into(),
        port: 8000,
        state,
        weight: 1,
        may_be_asked: state == EndpointState::Up,
    }
}

fn vip(at: &str, rule: u32, endpoints: &[VipEndpoint]) -> Vip {
    let at: SocketAddr = at.parse().unwrap();
    Vip {
        addr: at.ip(),
        port: at.port(),
        rules: vec![rule],
        endpoints: endpoints.to_vec(),
        no_endpoint: NoEndpoint::Proxy,
        phase: Phase::Serving,
        allowed: Vec::new(),
        syn: None,
    }
}

fn sync(table: &mut Table, vips: &[Vip], fake: &mut Fake) -> Result<(), Error> {
    table.sync(&Wanted::checked(vips)?, |_| false, fake)
}

#[test]
fn a_vip_names_its_endpoints_and_how_many_are_up() {
    let (mut table, mut fake) = (Table::default(), Fake::default());
    let endpoints = [endpoint(1, EndpointState::Up), endpoint(2, EndpointState::ProbeDown)];
    table.set_workers(2, &mut fake).unwrap();
    sync(&mut table, &[vip("10.98.0.1:80", 7, &endpoints)], &mut fake).unwrap();
    let info = fake.vip("10.98.0.1:80");
    assert_eq!((info.rule, info.ep_count, info.healthy, info.workers), (7, 2, 1, 2));
    assert_eq!(fake.read(&info), endpoints.map(|endpoint| entry(&endpoint)));
}

/// Networks as `10.0.0.0/8`.
fn networks(texts: &[&str]) -> Vec<Network> {
    let network = |text: &&str| {
        let (addr, bits) = text.split_once('/').unwrap();
        (addr.parse().unwrap(), bits.parse().unwrap())
    };
    texts.iter().map(network).collect()
}

#[test]
fn vips_with_the_same_networks_share_a_list_and_a_change_makes_another() {
    let (mut table, mut fake) = (Table::default(), Fake::default());
    let with =
        |port: u16, allowed: &[&str]| Vip { allowed: networks(allowed), ..vip(&format!("10.98.0.1:{port}"), 7, &[]) };
    let both = ["10.0.0.0/8", "fd77::/16"];
    sync(&mut table, &[with(80, &both), with(81, &both), with(82, &[])], &mut fake).unwrap();
    let [first, second, open] = ["10.98.0.1:80", "10.98.0.1:81", "10.98.0.1:82"].map(|at| fake.vip(at));
    assert_eq!((first.flags & VIP_ALLOWED, first.allowed), (VIP_ALLOWED, second.allowed));
    assert_eq!(open.flags & VIP_ALLOWED, 0);
    assert_eq!(fake.networks[&first.allowed], networks(&both).into_iter().collect());
    sync(&mut table, &[with(80, &both), with(81, &["10.0.0.0/9"]), with(82, &[])], &mut fake).unwrap();
    let changed = fake.vip("10.98.0.1:81");
    assert_ne!(changed.allowed, first.allowed);
    assert_eq!(fake.networks.len(), 2);
    sync(&mut table, &[with(82, &[])], &mut fake).unwrap();
    assert_eq!(fake.networks.len(), 0);
}

#[test]
fn a_list_that_cannot_be_written_leaves_nothing_and_the_next_time_tries_again() {
    let vips = [Vip { allowed: networks(&["10.0.0.0/8", "11.0.0.0/8"]), ..vip("10.98.0.1:80", 7, &[]) }];
    for fails_from in 1..5 {
        let (mut table, mut fake) = (Table::default(), Fake { fails_from: Some(fails_from), ..Fake::default() });
        assert!(sync(&mut table, &vips, &mut fake).is_err(), "write {fails_from}");
        assert!(table.vips.is_empty() && table.lists.is_empty());
        fake.fails_from = None;
        sync(&mut table, &vips, &mut fake).unwrap();
        let info = fake.vip("10.98.0.1:80");
        assert_eq!(fake.networks[&info.allowed].len(), 2);
    }
}

#[test]
fn a_vip_names_its_limit() {
    let (mut table, mut fake) = (Table::default(), Fake::default());
    let limited = Vip { syn: Some(SynLimit { rule: 7, per_sec: 5, burst: 9 }), ..vip("10.98.0.1:80", 7, &[]) };
    sync(&mut table, &[limited], &mut fake).unwrap();
    let info = fake.vip("10.98.0.1:80");
    assert_eq!((info.syn_rule, info.syn_per_sec, info.syn_burst), (7, 5, 9));
}

#[test]
fn the_same_list_again_writes_nothing() {
    let (mut table, mut fake) = (Table::default(), Fake::default());
    let vips = [vip("10.98.0.1:80", 1, &[endpoint(1, EndpointState::Up)]), vip("[fd77::1]:80", 2, &[])];
    sync(&mut table, &vips, &mut fake).unwrap();
    let writes = fake.writes;
    sync(&mut table, &vips, &mut fake).unwrap();
    assert_eq!(fake.writes, writes);
}

#[test]
fn a_change_of_health_writes_one_entry_and_the_vip() {
    let (mut table, mut fake) = (Table::default(), Fake::default());
    let up = [endpoint(1, EndpointState::Up), endpoint(2, EndpointState::Up)];
    sync(&mut table, &[vip("10.98.0.1:80", 1, &up)], &mut fake).unwrap();
    let (writes, base) = (fake.writes, fake.vip("10.98.0.1:80").ep_base);
    let down = [endpoint(1, EndpointState::Up), endpoint(2, EndpointState::BreakerOpen)];
    sync(&mut table, &[vip("10.98.0.1:80", 1, &down)], &mut fake).unwrap();
    assert_eq!(fake.writes, writes + 2);
    let info = fake.vip("10.98.0.1:80");
    assert_eq!((info.healthy, info.ep_base), (1, base));
    assert_eq!(fake.endpoints[&(base + 1)].state, EndpointState::BreakerOpen);
}

#[test]
fn the_ports_of_a_range_share_their_endpoints_entries() {
    let (mut table, mut fake) = (Table::default(), Fake::default());
    let endpoints = [endpoint(1, EndpointState::Up), endpoint(2, EndpointState::Up)];
    let range: Vec<_> = (8000..9000).map(|port| vip(&format!("10.98.0.1:{port}"), 1, &endpoints)).collect();
    sync(&mut table, &range, &mut fake).unwrap();
    assert_eq!(fake.endpoints.len(), 2);
    sync(&mut table, &range[..1], &mut fake).unwrap();
    assert_eq!(fake.read(&fake.vip("10.98.0.1:8000")).len(), 2);
    sync(&mut table, &[], &mut fake).unwrap();
    assert!(fake.endpoints.values().all(|endpoint| *endpoint == Endpoint::default()));
}

#[test]
fn flags_say_who_answers_without_endpoints_and_that_a_vip_drains_and_whose_the_route_is() {
    let (mut table, mut fake) = (Table::default(), Fake::default());
    let mut draining = vip("10.98.0.1:80", 1, &[]);
    draining.phase = Phase::Draining;
    let mut reset = vip("10.98.0.2:80", 2, &[]);
    reset.no_endpoint = NoEndpoint::Reset;
    let vips = [draining, reset];
    let routed = |addr: IpAddr| addr == IpAddr::from([10, 98, 0, 2]);
    table.sync(&Wanted::checked(&vips).unwrap(), routed, &mut fake).unwrap();
    assert_eq!(fake.vip("10.98.0.1:80").flags, VIP_DRAINING);
    assert_eq!(fake.vip("10.98.0.2:80").flags, VIP_RESET | VIP_ROUTE);
}

#[test]
fn a_vip_that_comes_after_another_went_starts_with_fresh_counters() {
    let (mut table, mut fake) = (Table::default(), Fake::default());
    sync(&mut table, &[vip("10.98.0.1:80", 1, &[])], &mut fake).unwrap();
    sync(&mut table, &[vip("10.98.0.2:80", 1, &[])], &mut fake).unwrap();
    assert_eq!(fake.cleared, [0, 0]);
    assert_eq!(table.ids().collect::<Vec<_>>(), [("10.98.0.2:80".parse().unwrap(), 0)]);
}

#[test]
fn an_address_of_many_hosts_or_none_is_no_vip() {
    for addr in ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255"] {
        let vips = [Vip { addr: addr.parse().unwrap(), ..vip("10.98.0.1:80", 1, &[]) }];
        assert!(matches!(Wanted::checked(&vips), Err(Error::Address { .. })), "{addr}");
    }
}

#[test]
fn one_address_in_two_spellings_is_one_vip() {
    let vips = [vip("10.98.0.1:80", 1, &[]), vip("[::ffff:10.98.0.1]:80", 2, &[])];
    assert!(matches!(Wanted::checked(&vips), Err(Error::Twice { .. })));
}

#[test]
fn more_endpoints_than_the_map_holds_are_refused_and_the_others_written() {
    let (mut table, mut fake) = (Table::default(), Fake::default());
    let many = vec![endpoint(1, EndpointState::Up); ENDPOINTS_MAX as usize];
    let vips = [vip("10.98.0.1:80", 1, &many), vip("10.98.0.2:80", 2, &[endpoint(2, EndpointState::Up)])];
    let error = sync(&mut table, &vips, &mut fake).unwrap_err();
    assert!(matches!(error, Error::Full { what: "endpoints", .. }), "{error:?}");
    assert_eq!(fake.vips.len(), 1);
    sync(&mut table, &vips[1..], &mut fake).unwrap();
    assert_eq!(fake.vips.len(), 1);
}

fn any_state() -> impl Strategy<Value = EndpointState> {
    use EndpointState::{AdminDown, BreakerOpen, Draining, ProbeDown, Unknown, Up};
    prop::sample::select(vec![Unknown, Up, ProbeDown, AdminDown, BreakerOpen, Draining])
}

/// Lists of VIPs on few addresses, so that one list and the next have much in common. One rule is one list of endpoints.
fn any_vips() -> impl Strategy<Value = Vec<Vip>> {
    let endpoints = prop::collection::vec((1..6u8, any_state()), 0..5);
    let rules = prop::collection::vec(endpoints, 4);
    let ports = prop::collection::btree_map(80..88u16, 0..4usize, 0..8);
    (rules, ports).prop_map(|(rules, ports)| {
        let of = |rule: usize| rules[rule].iter().map(|(last, state)| endpoint(*last, *state)).collect::<Vec<_>>();
        let rule = |rule: usize| u32::try_from(rule).unwrap();
        ports.into_iter().map(|(port, at)| vip(&format!("10.98.0.1:{port}"), rule(at), &of(at))).collect()
    })
}

proptest! {
    #[test]
    fn after_each_list_the_maps_hold_exactly_it_and_were_whole_all_along(lists in prop::collection::vec(any_vips(), 1..8)) {
        let (mut table, mut fake) = (Table::default(), Fake::default());
        for vips in lists {
            sync(&mut table, &vips, &mut fake).unwrap();
            prop_assert_eq!(fake.vips.len(), vips.len());
            for vip in &vips {
                let info = fake.vip(&SocketAddr::new(vip.addr, vip.port).to_string());
                prop_assert_eq!(fake.read(&info), vip.endpoints.iter().map(entry).collect::<Vec<_>>());
                prop_assert_eq!((info.rule, info.healthy), (vip.rules[0], healthy(&vip.endpoints)));
            }
        }
        sync(&mut table, &[], &mut fake).unwrap();
        prop_assert!(fake.endpoints.values().all(|endpoint| *endpoint == Endpoint::default()));
        prop_assert_eq!(&table.slots, &Slots::new(ENDPOINTS_MAX));
        prop_assert_eq!(&table.ids, &Slots::new(VIPS_MAX));
    }

    #[test]
    fn whatever_failed_is_done_by_the_next_call(lists in prop::collection::vec(any_vips(), 2..5), from in 1..20usize) {
        let (mut table, mut fake) = (Table::default(), Fake::default());
        for vips in lists {
            fake.fails_from = Some(fake.writes + from);
            // Fails or not: short lists need few writes.
            drop(sync(&mut table, &vips, &mut fake));
            fake.fails_from = None;
            sync(&mut table, &vips, &mut fake).unwrap();
            prop_assert_eq!(fake.vips.len(), vips.len());
            for vip in &vips {
                let info = fake.vip(&SocketAddr::new(vip.addr, vip.port).to_string());
                prop_assert_eq!(fake.read(&info), vip.endpoints.iter().map(entry).collect::<Vec<_>>());
            }
        }
    }
}

//! What the maps hold, as a value, and the order in which it changes.
//!
//! A reader of the maps finds a VIP by its key, then its endpoints by the run that its value names. So a new run is
//! written before the VIP that names it, an old one is cleared after the last VIP that named it, and a run in use
//! changes in states and weights only, each a word that the kernel writes at once. A list of networks is found and written
//! in the same way, and never changes: other networks are another list.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use kvlb_common::{
    ENDPOINTS_MAX, Endpoint, VIP_ALLOWED, VIP_DRAINING, VIP_RESET, VIP_ROUTE, VIPS_MAX, VipInfo, VipKey, addr_bytes,
};

use super::error::Outcome;
use super::slots::Slots;
use super::{Error, NoEndpoint, Phase, Vip, VipEndpoint};

/// Where a table writes: the maps, or a test.
pub(super) trait Sink {
    /// Writes one entry of `EPS`.
    fn set_endpoint(&mut self, slot: u32, endpoint: &Endpoint) -> Result<(), Error>;
    /// Adds or replaces one VIP.
    fn set_vip(&mut self, key: &VipKey, info: &VipInfo) -> Result<(), Error>;
    /// Removes one VIP.
    fn remove_vip(&mut self, key: &VipKey) -> Result<(), Error>;
    /// Adds a network to a list in `ACL4` or `ACL6`, for `rule`.
    fn set_network(&mut self, list: u32, network: Network, rule: u32) -> Result<(), Error>;
    /// Removes a network from a list.
    fn remove_network(&mut self, list: u32, network: Network) -> Result<(), Error>;
    /// Sets one entry of `STATS` to zero.
    fn clear_stats(&mut self, id: u32) -> Result<(), Error>;
}

/// A network: its first address, and how many bits of it count.
pub(super) type Network = (IpAddr, u8);

/// Lists that there may be: one for each VIP, and one more for each whose list is just being replaced.
const LISTS_MAX: u32 = 2 * VIPS_MAX;

/// A list of VIPs that is fit to be written.
#[derive(Debug)]
pub(super) struct Wanted<'a>(BTreeMap<SocketAddr, &'a Vip>);

impl<'a> Wanted<'a> {
    /// `vips` by address and port.
    ///
    /// # Errors
    /// [`Error::Address`], [`Error::Twice`].
    pub(super) fn checked(vips: &'a [Vip]) -> Result<Self, Error> {
        let mut wanted = BTreeMap::new();
        for vip in vips {
            let addr = vip.addr.to_canonical();
            let broadcast = matches!(addr, IpAddr::V4(v4) if v4.is_broadcast());
            if addr.is_unspecified() || addr.is_multicast() || broadcast {
                return Err(Error::Address { addr });
            }
            let at = SocketAddr::new(addr, vip.port);
            if wanted.insert(at, vip).is_some() {
                return Err(Error::Twice { at });
            }
        }
        Ok(Self(wanted))
    }

    /// Those that the table does not hold.
    pub(super) fn new_to(&self, table: &Table) -> Vec<SocketAddr> {
        self.0.keys().filter(|at| !table.vips.contains_key(at)).copied().collect()
    }

    /// Leaves one out.
    pub(super) fn leave_out(&mut self, at: SocketAddr) {
        self.0.remove(&at);
    }

    /// The addresses of all VIPs, some more than once.
    pub(super) fn addrs(&self) -> impl Iterator<Item = IpAddr> {
        self.0.keys().map(SocketAddr::ip)
    }
}

/// The rules of a VIP and where its endpoints are: VIPs that agree on both share one run of entries.
type RunKey = (Vec<u32>, Vec<SocketAddr>);

#[derive(Debug)]
struct Run {
    base: u32,
    /// As written.
    endpoints: Vec<Endpoint>,
    /// How many VIPs name it.
    users: usize,
}

#[derive(Debug)]
struct List {
    id: u32,
    /// How many VIPs name it.
    users: usize,
}

#[derive(Debug)]
struct Row {
    info: VipInfo,
    run: RunKey,
    /// Empty: anyone may connect.
    allowed: Vec<Network>,
}

/// What the maps hold.
#[derive(Debug)]
pub(super) struct Table {
    vips: BTreeMap<SocketAddr, Row>,
    runs: BTreeMap<RunKey, Run>,
    lists: BTreeMap<Vec<Network>, List>,
    /// Free entries of `EPS`.
    slots: Slots,
    /// Free numbers of lists.
    list_ids: Slots,
    /// Free entries of `STATS`.
    ids: Slots,
    workers: u32,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            vips: BTreeMap::new(),
            runs: BTreeMap::new(),
            lists: BTreeMap::new(),
            slots: Slots::new(ENDPOINTS_MAX),
            list_ids: Slots::new(LISTS_MAX),
            ids: Slots::new(VIPS_MAX),
            workers: 0,
        }
    }
}

impl Table {
    /// Makes the maps hold `wanted`. `routed` says of which addresses kvlb adds the route.
    ///
    /// # Errors
    /// The first failure; what does not depend on it is done all the same.
    pub(super) fn sync(
        &mut self,
        wanted: &Wanted<'_>,
        routed: impl Fn(IpAddr) -> bool,
        sink: &mut impl Sink,
    ) -> Result<(), Error> {
        let gone: Vec<_> = self.vips.keys().filter(|at| !wanted.0.contains_key(at)).copied().collect();
        // What goes makes room for what comes.
        let mut outcome = Outcome::default();
        for at in gone {
            outcome.note(self.remove(at, sink));
        }
        for (at, vip) in &wanted.0 {
            outcome.note(self.write(*at, vip, routed(at.ip()), sink));
        }
        self.check_invariants();
        outcome.finish()
    }

    /// How many listeners VIPs are spread over.
    pub(super) fn workers(&self) -> u32 {
        self.workers
    }

    /// Spreads all VIPs over `workers` listeners.
    ///
    /// # Errors
    /// When a VIP cannot be written; it then keeps the old number, and the others have the new one.
    pub(super) fn set_workers(&mut self, workers: u32, sink: &mut impl Sink) -> Result<(), Error> {
        self.workers = workers;
        let mut outcome = Outcome::default();
        for (at, row) in self.vips.iter_mut().filter(|(_, row)| row.info.workers != workers) {
            let info = VipInfo { workers, ..row.info };
            let written = sink.set_vip(&key(*at), &info);
            if written.is_ok() {
                row.info = info;
            }
            outcome.note(written);
        }
        outcome.finish()
    }

    /// The index of each VIP's counters.
    pub(super) fn ids(&self) -> impl Iterator<Item = (SocketAddr, u32)> {
        self.vips.iter().map(|(at, row)| (*at, row.info.id))
    }

    /// The same of some VIPs.
    pub(super) fn ids_at(&self, at: RangeInclusive<SocketAddr>) -> impl Iterator<Item = (SocketAddr, u32)> {
        self.vips.range(at).map(|(at, row)| (*at, row.info.id))
    }

    /// Adds the VIP or brings it up to date.
    fn write(&mut self, at: SocketAddr, vip: &Vip, routed: bool, sink: &mut impl Sink) -> Result<(), Error> {
        let run = run_key(vip);
        let (ep_base, ep_count) = self.place(&run, &vip.endpoints, sink)?;
        let rule = vip.rules.first().copied().unwrap_or_default();
        let named = self.enlist(&vip.allowed, rule, sink).and_then(|list| Ok((list, self.id(at, sink)?)));
        let (list, id) = match named {
            Ok(named) => named,
            Err(error) => return self.release_all(&run, &vip.allowed, sink).and(Err(error)),
        };
        let syn = vip.syn.unwrap_or_default();
        let info = VipInfo {
            id,
            rule,
            flags: flags(vip, routed),
            ep_base,
            ep_count,
            healthy: healthy(&vip.endpoints),
            listener: 0,
            workers: self.workers,
            syn_per_sec: syn.per_sec,
            syn_burst: syn.burst,
            syn_rule: syn.rule,
            allowed: list,
        };
        self.put(at, Row { info, run, allowed: vip.allowed.clone() }, sink)
    }

    /// Puts the row into the map if it is not there, and counts the users of its run and list.
    fn put(&mut self, at: SocketAddr, row: Row, sink: &mut impl Sink) -> Result<(), Error> {
        let same = |there: &Row| there.info == row.info && there.run == row.run && there.allowed == row.allowed;
        if self.vips.get(&at).is_some_and(same) {
            return Ok(());
        }
        if let Err(error) = sink.set_vip(&key(at), &row.info) {
            if !self.vips.contains_key(&at) {
                self.ids.give(row.info.id, 1);
            }
            return self.release_all(&row.run, &row.allowed, sink).and(Err(error));
        }
        if let Some(run) = self.runs.get_mut(&row.run) {
            run.users += 1;
        }
        if let Some(list) = self.lists.get_mut(&row.allowed) {
            list.users += 1;
        }
        match self.vips.insert(at, row) {
            Some(before) => self.leave(&before, sink),
            None => Ok(()),
        }
    }

    fn remove(&mut self, at: SocketAddr, sink: &mut impl Sink) -> Result<(), Error> {
        sink.remove_vip(&key(at))?;
        match self.vips.remove(&at) {
            Some(row) => {
                self.ids.give(row.info.id, 1);
                self.leave(&row, sink)
            }
            None => Ok(()),
        }
    }

    /// The number of the list of these networks, which is written if it is not there; 0 for none.
    fn enlist(&mut self, networks: &[Network], rule: u32, sink: &mut impl Sink) -> Result<u32, Error> {
        if networks.is_empty() {
            return Ok(0);
        }
        if let Some(list) = self.lists.get(networks) {
            return Ok(list.id);
        }
        let full = || Error::Full { what: "lists of sources", wanted: 1, max: LISTS_MAX };
        let id = self.list_ids.take(1).ok_or_else(full)?;
        for network in networks {
            if let Err(error) = sink.set_network(id, *network, rule) {
                return self.unlist(id, networks, sink).and(Err(error));
            }
        }
        self.lists.insert(networks.to_vec(), List { id, users: 0 });
        Ok(id)
    }

    /// Removes the list's networks, and frees its number once none of them is left.
    fn unlist(&mut self, id: u32, networks: &[Network], sink: &mut impl Sink) -> Result<(), Error> {
        let mut outcome = Outcome::default();
        for network in networks {
            outcome.note(sink.remove_network(id, *network));
        }
        let removed = outcome.finish();
        // What may still be on the list must not be on another's: the number is lost rather than used again.
        if removed.is_ok() {
            self.list_ids.give(id, 1);
        }
        removed
    }

    /// Brings the run's entries up to date, or writes a new one. Returns its first entry and their number.
    fn place(&mut self, key: &RunKey, endpoints: &[VipEndpoint], sink: &mut impl Sink) -> Result<(u32, u32), Error> {
        let len = u32::try_from(endpoints.len()).unwrap_or(u32::MAX);
        if let Some(run) = self.runs.get_mut(key) {
            for ((slot, written), endpoint) in (run.base..).zip(&mut run.endpoints).zip(endpoints.iter().map(entry)) {
                if *written != endpoint {
                    sink.set_endpoint(slot, &endpoint)?;
                    *written = endpoint;
                }
            }
            return Ok((run.base, len));
        }
        let full = || Error::Full { what: "endpoints", wanted: endpoints.len(), max: ENDPOINTS_MAX };
        let base = self.slots.take(len).ok_or_else(full)?;
        let entries: Vec<_> = endpoints.iter().map(entry).collect();
        for (slot, endpoint) in (base..).zip(&entries) {
            if let Err(error) = sink.set_endpoint(slot, endpoint) {
                self.slots.give(base, len);
                return Err(error);
            }
        }
        self.runs.insert(key.clone(), Run { base, endpoints: entries, users: 0 });
        Ok((base, len))
    }

    /// One VIP less names this row's run and list.
    fn leave(&mut self, row: &Row, sink: &mut impl Sink) -> Result<(), Error> {
        if let Some(run) = self.runs.get_mut(&row.run) {
            run.users -= 1;
        }
        if let Some(list) = self.lists.get_mut(&row.allowed) {
            list.users -= 1;
        }
        self.release_all(&row.run, &row.allowed, sink)
    }

    /// Frees the run and the list, each if no VIP names it.
    fn release_all(&mut self, run: &RunKey, networks: &[Network], sink: &mut impl Sink) -> Result<(), Error> {
        let mut outcome = Outcome::default();
        outcome.note(self.release(run, sink));
        let unused = self.lists.get(networks).is_some_and(|list| list.users == 0);
        if let Some(list) = unused.then(|| self.lists.remove(networks)).flatten() {
            outcome.note(self.unlist(list.id, networks, sink));
        }
        outcome.finish()
    }

    /// Clears the run's entries and frees them if no VIP names them.
    fn release(&mut self, key: &RunKey, sink: &mut impl Sink) -> Result<(), Error> {
        let unused = self.runs.get(key).is_some_and(|run| run.users == 0);
        let Some(run) = unused.then(|| self.runs.remove(key)).flatten() else { return Ok(()) };
        let len = u32::try_from(run.endpoints.len()).unwrap_or(u32::MAX);
        self.slots.give(run.base, len);
        let mut outcome = Outcome::default();
        for slot in run.base..run.base + len {
            outcome.note(sink.set_endpoint(slot, &Endpoint::default()));
        }
        outcome.finish()
    }

    /// The index of the VIP's counters; of fresh ones, all zero, for a VIP that is not there yet.
    fn id(&mut self, at: SocketAddr, sink: &mut impl Sink) -> Result<u32, Error> {
        if let Some(row) = self.vips.get(&at) {
            return Ok(row.info.id);
        }
        let full = || Error::Full { what: "VIPs", wanted: 1, max: VIPS_MAX };
        let id = self.ids.take(1).ok_or_else(full)?;
        if let Err(error) = sink.clear_stats(id) {
            self.ids.give(id, 1);
            return Err(error);
        }
        Ok(id)
    }

    /// A run or list is there exactly as long as VIPs name it.
    fn check_invariants(&self) {
        if cfg!(debug_assertions) {
            let mut users = BTreeMap::new();
            for row in self.vips.values() {
                *users.entry(&row.run).or_insert(0) += 1;
            }
            assert!(self.runs.iter().map(|(key, run)| (key, run.users)).eq(users), "{self:?}");
            let mut users = BTreeMap::new();
            for row in self.vips.values().filter(|row| !row.allowed.is_empty()) {
                *users.entry(&row.allowed).or_insert(0) += 1;
            }
            assert!(self.lists.iter().map(|(key, list)| (key, list.users)).eq(users), "{self:?}");
        }
    }
}

fn key(at: SocketAddr) -> VipKey {
    VipKey::tcp(addr_bytes(at.ip()), at.port())
}

fn run_key(vip: &Vip) -> RunKey {
    (vip.rules.clone(), vip.endpoints.iter().map(|endpoint| SocketAddr::new(endpoint.addr, endpoint.port)).collect())
}

fn entry(endpoint: &VipEndpoint) -> Endpoint {
    let VipEndpoint { addr, port, state, weight, may_be_asked: _ } = *endpoint;
    Endpoint { addr: addr_bytes(addr), port, pad: 0, state, weight }
}

fn healthy(endpoints: &[VipEndpoint]) -> u32 {
    let count = endpoints.iter().filter(|endpoint| endpoint.may_be_asked).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn flags(vip: &Vip, routed: bool) -> u32 {
    let reset = if vip.no_endpoint == NoEndpoint::Reset { VIP_RESET } else { 0 };
    let draining = if vip.phase == Phase::Draining { VIP_DRAINING } else { 0 };
    let route = if routed { VIP_ROUTE } else { 0 };
    let allowed = if vip.allowed.is_empty() { 0 } else { VIP_ALLOWED };
    reset | draining | route | allowed
}

#[cfg(test)]
mod tests;

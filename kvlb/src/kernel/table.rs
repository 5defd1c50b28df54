//! What the maps hold, as a value, and the order in which it changes.
//!
//! A reader of the maps finds a VIP by its key, then its endpoints by the run that its value names. So a new run is
//! written before the VIP that names it, an old one is cleared after the last VIP that named it, and a run in use
//! changes in states and weights only, each a word that the kernel writes at once.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use kvlb_common::{
    ENDPOINTS_MAX, Endpoint, EndpointState, VIP_DRAINING, VIP_RESET, VIP_ROUTE, VIPS_MAX, VipInfo, VipKey, addr_bytes,
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
    /// Sets one entry of `STATS` to zero.
    fn clear_stats(&mut self, id: u32) -> Result<(), Error>;
}

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
struct Row {
    info: VipInfo,
    run: RunKey,
}

/// What the maps hold.
#[derive(Debug)]
pub(super) struct Table {
    vips: BTreeMap<SocketAddr, Row>,
    runs: BTreeMap<RunKey, Run>,
    /// Free entries of `EPS`.
    slots: Slots,
    /// Free entries of `STATS`.
    ids: Slots,
    workers: u32,
}

impl Default for Table {
    fn default() -> Self {
        let (slots, ids) = (Slots::new(ENDPOINTS_MAX), Slots::new(VIPS_MAX));
        Self { vips: BTreeMap::new(), runs: BTreeMap::new(), slots, ids, workers: 0 }
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

    /// Adds the VIP or brings it up to date.
    fn write(&mut self, at: SocketAddr, vip: &Vip, routed: bool, sink: &mut impl Sink) -> Result<(), Error> {
        let run = run_key(vip);
        let (ep_base, ep_count) = self.place(&run, &vip.endpoints, sink)?;
        let id = match self.id(at, sink) {
            Ok(id) => id,
            Err(error) => return self.release(&run, sink).and(Err(error)),
        };
        let info = VipInfo {
            id,
            rule: vip.rules.first().copied().unwrap_or_default(),
            flags: flags(vip, routed),
            ep_base,
            ep_count,
            healthy: healthy(&vip.endpoints),
            listener: 0,
            workers: self.workers,
            ..VipInfo::default()
        };
        self.put(at, info, run, sink)
    }

    /// Puts `info` into the map if it is not there, and counts the run's users.
    fn put(&mut self, at: SocketAddr, info: VipInfo, run: RunKey, sink: &mut impl Sink) -> Result<(), Error> {
        if self.vips.get(&at).is_some_and(|row| row.info == info && row.run == run) {
            return Ok(());
        }
        if let Err(error) = sink.set_vip(&key(at), &info) {
            if !self.vips.contains_key(&at) {
                self.ids.give(info.id, 1);
            }
            return self.release(&run, sink).and(Err(error));
        }
        if let Some(run) = self.runs.get_mut(&run) {
            run.users += 1;
        }
        match self.vips.insert(at, Row { info, run }) {
            Some(before) => self.leave(&before.run, sink),
            None => Ok(()),
        }
    }

    fn remove(&mut self, at: SocketAddr, sink: &mut impl Sink) -> Result<(), Error> {
        sink.remove_vip(&key(at))?;
        match self.vips.remove(&at) {
            Some(row) => {
                self.ids.give(row.info.id, 1);
                self.leave(&row.run, sink)
            }
            None => Ok(()),
        }
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

    /// One VIP less names this run.
    fn leave(&mut self, key: &RunKey, sink: &mut impl Sink) -> Result<(), Error> {
        if let Some(run) = self.runs.get_mut(key) {
            run.users -= 1;
        }
        self.release(key, sink)
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

    /// A run is there exactly as long as VIPs name it.
    fn check_invariants(&self) {
        if cfg!(debug_assertions) {
            let mut users = BTreeMap::new();
            for row in self.vips.values() {
                *users.entry(&row.run).or_insert(0) += 1;
            }
            assert!(self.runs.iter().map(|(key, run)| (key, run.users)).eq(users), "{self:?}");
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
    let VipEndpoint { addr, port, state, weight } = *endpoint;
    Endpoint { addr: addr_bytes(addr), port, pad: 0, state, weight }
}

fn healthy(endpoints: &[VipEndpoint]) -> u32 {
    let up = endpoints.iter().filter(|endpoint| endpoint.state == EndpointState::Up).count();
    u32::try_from(up).unwrap_or(u32::MAX)
}

fn flags(vip: &Vip, routed: bool) -> u32 {
    let reset = if vip.no_endpoint == NoEndpoint::Reset { VIP_RESET } else { 0 };
    let draining = if vip.phase == Phase::Draining { VIP_DRAINING } else { 0 };
    let route = if routed { VIP_ROUTE } else { 0 };
    reset | draining | route
}

#[cfg(test)]
mod tests;

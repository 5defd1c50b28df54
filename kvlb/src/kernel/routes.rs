//! Local routes: what makes this host answer for an address that no device of it has.
//!
//! For IPv4, such a route on `lo` also answers ARP. For IPv6 it answers no neighbour: where the address lies within the
//! network of a device, that device gets it too, as one that nothing is sent from. Elsewhere packets have to be routed here.
//!
//! An address that is local already is left alone. What kvlb adds bears its own route protocol number and is removed
//! exactly so, so that a route of the same address by someone else stays.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nix::libc::{EADDRNOTAVAIL, ENODEV, ENXIO};
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressProtocol, CacheInfo};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::Socket;
use rtnetlink::sys::protocols::NETLINK_ROUTE;

use super::Error;
use super::error::Outcome;

/// `proto` of the routes that kvlb adds, as `ip route show table local` prints it: the letter K. Below 128 and in no
/// one's use (linux/rtnetlink.h, iproute2's `rt_protos`).
const PROTOCOL: RouteProtocol = RouteProtocol::Other(75);

/// `RT_TABLE_LOCAL` (linux/rtnetlink.h).
const TABLE_LOCAL: u8 = 255;

/// `lo` is device 1 of every network namespace (`LOOPBACK_IFINDEX`, net/flow.h).
const LOOPBACK: u32 = 1;

/// How an address comes to be local.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// Without us.
    Foreign,
    /// By a route of ours that is yet to be added.
    Claimed,
    /// By a route that we added.
    Ours,
}

/// The local routes of VIPs, in the network namespace in which this value was made.
#[derive(Debug)]
pub(super) struct Routes {
    netlink: Netlink,
    held: BTreeMap<IpAddr, Hold>,
    /// IPv6 addresses that a kvlb has given to devices, by the devices' numbers.
    announced: BTreeMap<Ipv6Addr, u32>,
    /// What a dead predecessor has added: ours to remove, or to take over.
    stale: BTreeSet<IpAddr>,
}

impl Routes {
    /// No routes yet, in the network namespace of this thread.
    pub(super) fn open(stale: Vec<IpAddr>) -> Result<Self, Error> {
        let netlink = Netlink::open().map_err(Error::Netlink)?;
        let mut routes = Self { netlink, held: BTreeMap::new(), announced: BTreeMap::new(), stale: BTreeSet::new() };
        routes.inherit(stale);
        Ok(routes)
    }

    /// These routes are ours too: a predecessor has added them.
    pub(super) fn inherit(&mut self, stale: Vec<IpAddr>) {
        let given = self.netlink.addresses().unwrap_or_default().into_iter().filter(|given| given.kvlbs);
        self.announced.extend(given.filter(|given| stale.contains(&given.addr.into())).map(|at| (at.addr, at.device)));
        self.stale.extend(stale);
        // What was foreign while the predecessor had it is looked at again.
        self.held.retain(|_, hold| *hold == Hold::Ours);
    }

    /// The addresses of all routes in this namespace that are marked as kvlb's, whoever added them.
    pub(super) fn marked(&mut self) -> Result<Vec<IpAddr>, Error> {
        self.netlink.marked().map_err(Error::Netlink)
    }

    /// None is ours any more.
    pub(super) fn forget(&mut self) {
        self.held.clear();
        self.announced.clear();
        self.stale.clear();
    }

    /// Whether kvlb adds, or has added, the route of `addr`.
    pub(super) fn is_ours(&self, addr: IpAddr) -> bool {
        matches!(self.held.get(&addr), Some(Hold::Claimed | Hold::Ours))
    }

    /// Whether `addr` is local without kvlb, as far as it has been looked at.
    pub(super) fn is_others(&self, addr: IpAddr) -> bool {
        self.held.get(&addr) == Some(&Hold::Foreign)
    }

    /// Forgets all addresses but `addrs`, and removes what was added for the others, also by a dead predecessor.
    pub(super) fn retain(&mut self, addrs: &BTreeSet<IpAddr>) -> Result<(), Error> {
        let ours = self.held.iter().filter(|(_, hold)| **hold == Hold::Ours).map(|(addr, _)| *addr);
        let gone: Vec<_> = ours.chain(self.stale.iter().copied()).filter(|addr| !addrs.contains(addr)).collect();
        let mut outcome = Outcome::default();
        for addr in gone {
            let silent = self.withdraw(addr);
            match silent.and_then(|()| self.netlink.remove(addr)) {
                Ok(()) => {
                    self.held.remove(&addr);
                    self.stale.remove(&addr);
                }
                Err(source) => outcome.note(Err(failed("remove", addr, source))),
            }
        }
        self.held.retain(|addr, hold| *hold == Hold::Ours || addrs.contains(addr));
        outcome.finish()
    }

    /// Finds out which of `addrs` need a route of ours; also those that were local without one the last time.
    pub(super) fn claim(&mut self, addrs: &BTreeSet<IpAddr>) -> Result<(), Error> {
        let mut outcome = Outcome::default();
        for addr in addrs {
            if self.is_ours(*addr) {
                continue;
            }
            let hold = match self.netlink.local(*addr) {
                Ok(None) => Hold::Claimed,
                Ok(Some(Owner::Kvlb)) if self.stale.remove(addr) => Hold::Ours,
                Ok(Some(Owner::Other)) if self.is_announced(*addr) && self.stale.remove(addr) => Hold::Ours,
                Ok(Some(Owner::Kvlb | Owner::Other)) => Hold::Foreign,
                Err(source) => {
                    outcome.note(Err(failed("look up", *addr, source)));
                    continue;
                }
            };
            self.held.insert(*addr, hold);
        }
        outcome.finish()
    }

    /// Adds the routes that were claimed.
    pub(super) fn add_claimed(&mut self) -> Result<(), Error> {
        let mut outcome = Outcome::default();
        for (addr, hold) in self.held.iter_mut().filter(|(_, hold)| **hold == Hold::Claimed) {
            match self.netlink.add(*addr) {
                Ok(()) => {
                    *hold = Hold::Ours;
                    tracing::info!(%addr, "added a local route");
                }
                // Someone was faster: it is local, and not by us.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => *hold = Hold::Foreign,
                Err(source) => outcome.note(Err(failed("add", *addr, source))),
            }
        }
        outcome.note(self.announce());
        outcome.finish()
    }

    fn is_announced(&self, addr: IpAddr) -> bool {
        matches!(addr, IpAddr::V6(v6) if self.announced.contains_key(&v6))
    }

    /// Gives IPv6 addresses to the devices whose neighbours ask for them.
    fn announce(&mut self) -> Result<(), Error> {
        let silent: Vec<_> = self
            .held
            .iter()
            .filter_map(|(addr, hold)| match addr {
                IpAddr::V6(v6) if *hold == Hold::Ours && !self.announced.contains_key(v6) => Some(*v6),
                _ => None,
            })
            .collect();
        if silent.is_empty() {
            return Ok(());
        }
        let given = self.netlink.addresses().map_err(Error::Netlink)?;
        let mut outcome = Outcome::default();
        for addr in silent {
            let Some(near) = given.iter().find(|given| given.is_near(addr)) else { continue };
            match self.netlink.change_address(addr, near.device, true) {
                Ok(()) => {
                    self.announced.insert(addr, near.device);
                    tracing::info!(%addr, device = near.device, "the device answers its neighbours for the VIP");
                }
                // It has come by the address itself in this moment.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => outcome.note(Err(failed("announce", addr.into(), source))),
            }
        }
        outcome.finish()
    }

    /// Takes an address from the device that has it by a kvlb.
    fn withdraw(&mut self, addr: IpAddr) -> io::Result<()> {
        let IpAddr::V6(v6) = addr else { return Ok(()) };
        let Some(device) = self.announced.get(&v6) else { return Ok(()) };
        match self.netlink.change_address(v6, *device, false) {
            // The device may be gone, and the address with it.
            Err(error) if !matches!(error.raw_os_error(), Some(EADDRNOTAVAIL | ENODEV | ENXIO)) => Err(error),
            _ => {
                self.announced.remove(&v6);
                Ok(())
            }
        }
    }
}

/// An IPv6 address that a device has.
#[derive(Clone, Copy, Debug)]
struct Given {
    addr: Ipv6Addr,
    bits: u8,
    device: u32,
    /// A kvlb has given it.
    kvlbs: bool,
}

impl Given {
    /// Whether the device's neighbours take `addr` for one of them.
    fn is_near(&self, addr: Ipv6Addr) -> bool {
        let ignored = 128_u32.saturating_sub(self.bits.into());
        let same = (self.addr.to_bits() ^ addr.to_bits()).checked_shr(ignored).unwrap_or_default() == 0;
        same && self.bits > 0 && self.bits < 128 && self.device != LOOPBACK && !self.addr.is_unicast_link_local()
    }
}

impl Drop for Routes {
    fn drop(&mut self) {
        if let Err(error) = self.retain(&BTreeSet::new()) {
            tracing::warn!(error = &error as &dyn std::error::Error, "could not remove local routes");
        }
    }
}

fn failed(what: &'static str, addr: IpAddr, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::PermissionDenied => Error::Privileges { what: "change routes", source },
        _ => Error::Route { what, addr, source },
    }
}

/// Who made an address local.
enum Owner {
    /// A kvlb, by a route of its own.
    Kvlb,
    /// Anyone else.
    Other,
}

/// One question to the kernel's routing tables at a time. It answers before the question has been sent to its end, so
/// nothing here waits.
#[derive(Debug)]
struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&rtnetlink::sys::SocketAddr::new(0, 0))?;
        // Should an answer ever be missing, that is an error rather than a hang.
        socket.set_non_blocking(true)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Whether `addr` is local to this namespace, and through whom.
    fn local(&mut self, addr: IpAddr) -> io::Result<Option<Owner>> {
        let mut question = host_route(addr);
        // The route that matches, rather than what a packet would be told.
        question.header.flags = RouteFlags::FibMatch;
        let answer = match self.ask(RouteNetlinkMessage::GetRoute(question), NLM_F_REQUEST) {
            Ok(answer) => answer,
            Err(error) if is_no_route(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(route) = answer.filter(|route| route.header.kind == RouteType::Local) else { return Ok(None) };
        let whole = route.header.destination_prefix_length == prefix(addr);
        let kvlb = whole && route.header.protocol == PROTOCOL;
        Ok(Some(if kvlb { Owner::Kvlb } else { Owner::Other }))
    }

    fn add(&mut self, addr: IpAddr) -> io::Result<()> {
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
        self.ask(RouteNetlinkMessage::NewRoute(local_route(addr)), flags).map(drop)
    }

    /// The addresses of all local routes that bear our number.
    fn marked(&mut self) -> io::Result<Vec<IpAddr>> {
        let mut marked = Vec::new();
        for any in [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)] {
            let mut question = host_route(any);
            question.header.destination_prefix_length = 0;
            question.attributes.clear();
            self.list(RouteNetlinkMessage::GetRoute(question), |message| {
                if let RouteNetlinkMessage::NewRoute(route) = message {
                    marked.extend(ours(&route));
                }
            })?;
        }
        let given = self.addresses()?.into_iter().filter(|given| given.kvlbs);
        marked.extend(given.map(|given| IpAddr::V6(given.addr)));
        Ok(marked)
    }

    /// The IPv6 addresses of all devices.
    fn addresses(&mut self) -> io::Result<Vec<Given>> {
        let mut question = AddressMessage::default();
        question.header.family = AddressFamily::Inet6;
        let mut all = Vec::new();
        self.list(RouteNetlinkMessage::GetAddress(question), |message| {
            if let RouteNetlinkMessage::NewAddress(address) = message {
                all.extend(given(&address));
            }
        })?;
        Ok(all)
    }

    /// Gives an address to a device, or takes it away: of one host, without asking whether others have it, and never one
    /// that packets are sent from unasked (its time to be preferred is over).
    fn change_address(&mut self, addr: Ipv6Addr, device: u32, give: bool) -> io::Result<()> {
        let mut address = AddressMessage::default();
        (address.header.family, address.header.prefix_len, address.header.index) = (AddressFamily::Inet6, 128, device);
        let mut times = CacheInfo::default();
        (times.ifa_preferred, times.ifa_valid) = (0, u32::MAX);
        address.attributes = vec![
            AddressAttribute::Address(addr.into()),
            AddressAttribute::Flags(AddressFlags::Nodad | AddressFlags::Noprefixroute),
            AddressAttribute::CacheInfo(times),
            AddressAttribute::Protocol(AddressProtocol::Other(u8::from(PROTOCOL))),
        ];
        if give {
            let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
            return self.ask(RouteNetlinkMessage::NewAddress(address), flags).map(drop);
        }
        self.ask(RouteNetlinkMessage::DelAddress(address), NLM_F_REQUEST | NLM_F_ACK).map(drop)
    }

    /// Asks for a list, of which each member is told.
    fn list(&mut self, question: RouteNetlinkMessage, mut each: impl FnMut(RouteNetlinkMessage)) -> io::Result<()> {
        self.tell(question, NLM_F_REQUEST | NLM_F_DUMP)?;
        while self.next_part(&mut each)? {}
        Ok(())
    }

    /// Reads one part of a list; false where it was the last one. The kernel makes the next while it gives one.
    fn next_part(&mut self, each: &mut impl FnMut(RouteNetlinkMessage)) -> io::Result<bool> {
        let (bytes, _) = self.socket.recv_from_full()?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).map_err(io::Error::other)?;
            match message.payload {
                NetlinkPayload::Done(_) => return Ok(false),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::InnerMessage(member) => each(member),
                _ => {}
            }
            let length = usize::try_from(message.header.length).unwrap_or(rest.len()).next_multiple_of(4);
            rest = rest.get(length..).unwrap_or_default();
        }
        Ok(true)
    }

    /// Removes our route of `addr`; that it is gone already is fine.
    fn remove(&mut self, addr: IpAddr) -> io::Result<()> {
        match self.ask(RouteNetlinkMessage::DelRoute(local_route(addr)), NLM_F_REQUEST | NLM_F_ACK) {
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Sends one message.
    fn tell(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        (header.flags, header.sequence_number) = (flags, self.sequence);
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0).map(drop)
    }

    /// Sends one message; returns the route that comes back, or nothing when the kernel just agrees.
    fn ask(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Option<RouteMessage>> {
        self.tell(message, flags)?;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&bytes).map_err(io::Error::other)?;
            // The rest of an exchange that was given up.
            if answer.header.sequence_number != self.sequence {
                continue;
            }
            return match answer.payload {
                NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
                NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route)) => Ok(Some(route)),
                _ => Ok(None),
            };
        }
    }
}

/// The address of a route that kvlb has added.
fn ours(route: &RouteMessage) -> Option<IpAddr> {
    let header = &route.header;
    if header.kind != RouteType::Local || header.table != TABLE_LOCAL || header.protocol != PROTOCOL {
        return None;
    }
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
        RouteAttribute::Destination(RouteAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    })
}

/// An address of a device, from a list of them.
fn given(address: &AddressMessage) -> Option<Given> {
    let mut given = Given {
        addr: Ipv6Addr::UNSPECIFIED,
        bits: address.header.prefix_len,
        device: address.header.index,
        kvlbs: false,
    };
    for attribute in &address.attributes {
        match attribute {
            AddressAttribute::Address(IpAddr::V6(v6)) => given.addr = *v6,
            AddressAttribute::Protocol(protocol) => given.kvlbs = u8::from(*protocol) == u8::from(PROTOCOL),
            _ => {}
        }
    }
    (!given.addr.is_unspecified()).then_some(given)
}

/// `local ADDR dev lo proto K table local scope host`.
fn local_route(addr: IpAddr) -> RouteMessage {
    let mut route = host_route(addr);
    route.header.kind = RouteType::Local;
    route.header.scope = RouteScope::Host;
    route.header.protocol = PROTOCOL;
    route.header.table = TABLE_LOCAL;
    route.attributes.push(RouteAttribute::Oif(LOOPBACK));
    route
}

/// The route to exactly `addr`.
fn host_route(addr: IpAddr) -> RouteMessage {
    match addr {
        IpAddr::V4(v4) => RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(v4, prefix(addr)).build(),
        IpAddr::V6(v6) => RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(v6, prefix(addr)).build(),
    }
}

/// Bits of an address.
fn prefix(addr: IpAddr) -> u8 {
    if addr.is_ipv4() { 32 } else { 128 }
}

/// The kernel's answers for an address that leads nowhere, or that it is told to refuse.
fn is_no_route(error: &io::Error) -> bool {
    use nix::libc::{EACCES, EHOSTUNREACH, EINVAL, ENETUNREACH};
    matches!(error.raw_os_error(), Some(ENETUNREACH | EHOSTUNREACH | EACCES | EINVAL))
}

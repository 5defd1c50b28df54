//! Sockets for the VIPs: one set behind the kernel's steering, or one per VIP where kvlb binds them itself.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::resource::{Resource, getrlimit};
use parking_lot::Mutex;
use socket2::{Domain, Protocol, Socket, Type};

use crate::kernel::Kernel;
use crate::proxy::{Link, Proxy, bind};
use crate::state::{State, Table};

/// Connections that may wait to be accepted, the kernel's own bound permitting.
const BACKLOG: i32 = 4096;
/// The listeners that the kernel steers to.
const STEERED: Link = Link(0);
/// Addresses that could not be bound and are named in the status.
const FAILURES_SHOWN: usize = 8;
/// The name of the degraded state in which a VIP could not be bound.
const DEGRADED: &str = "vip_bind";

/// The listeners behind the kernel's steering.
#[derive(Debug)]
pub(super) struct Steered {
    /// Those that are steered to, one per data thread at most.
    sockets: Vec<TcpListener>,
}

impl Steered {
    /// Hands listeners to the kernel side: those of a process before, as many as there are data threads, or one per data
    /// thread on the loopback device. More than that are accepted from, and not steered to: connections wait in them.
    pub(super) fn begin(kernel: &Mutex<Kernel>, proxy: &Proxy, mut before: Vec<TcpListener>) -> anyhow::Result<Self> {
        if before.is_empty() {
            before = (0..proxy.threads()).map(|_| loopback_listener()).collect::<io::Result<_>>()?;
        }
        let steered = before.iter().take(proxy.threads()).map(TcpListener::try_clone).collect::<io::Result<_>>()?;
        let steered = Self { sockets: steered };
        steered.tell(kernel)?;
        proxy.listen(STEERED, before);
        Ok(steered)
    }

    /// Adds listeners until each data thread has one.
    pub(super) fn top_up(&mut self, kernel: &Mutex<Kernel>, proxy: &Proxy) -> anyhow::Result<()> {
        let first = self.sockets.len();
        let more = (first..proxy.threads()).map(|_| loopback_listener()).collect::<io::Result<Vec<_>>>()?;
        if more.is_empty() {
            return Ok(());
        }
        self.sockets.extend(more.iter().map(TcpListener::try_clone).collect::<io::Result<Vec<_>>>()?);
        proxy.listen_more(STEERED, first, more);
        self.tell(kernel)
    }

    fn tell(&self, kernel: &Mutex<Kernel>) -> anyhow::Result<()> {
        let borrowed: Vec<_> = self.sockets.iter().map(|listener| listener.as_fd()).collect();
        Ok(kernel.lock().set_listeners(&borrowed)?)
    }
}

/// Whether sockets of this name are steered to by the kernel.
pub(super) fn is_steered(link: Link) -> bool {
    link == STEERED
}

/// A listener that takes both families; of IPv4 alone where the machine has no IPv6.
fn loopback_listener() -> io::Result<TcpListener> {
    let both = || {
        let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
        socket.set_only_v6(false)?;
        // A socket bound to ::1 would be for IPv6 alone, whatever its option says.
        listening(socket, SocketAddr::from((Ipv4Addr::LOCALHOST.to_ipv6_mapped(), 0)))
    };
    both().or_else(|_no_ipv6| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        listening(socket, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    })
}

fn listening(socket: Socket, address: SocketAddr) -> io::Result<TcpListener> {
    socket.set_tcp_nodelay(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(TcpListener::from(socket))
}

/// Binds every VIP, and lets go of those whose rules are gone.
#[derive(Debug, Default)]
pub(super) struct OwnVips {
    bound: BTreeMap<SocketAddr, Link>,
    next: u64,
    /// Those with fewer sockets than there are data threads, and how many they have.
    short: Vec<(SocketAddr, usize)>,
}

impl OwnVips {
    /// Accepts from the sockets of a process before, for the addresses that rules serve.
    pub(super) fn adopt(&mut self, before: Vec<TcpListener>, table: &Table, proxy: &Proxy) {
        let mut by_address: BTreeMap<SocketAddr, Vec<TcpListener>> = BTreeMap::new();
        for socket in before {
            match socket.local_addr() {
                Ok(address) => by_address.entry(address).or_default().push(socket),
                Err(error) => tracing::warn!(%error, "a listening socket of the kvlb before has no address"),
            }
        }
        for address in addresses(table) {
            let Some(sockets) = by_address.remove(&address) else { continue };
            if sockets.len() < proxy.threads() {
                self.short.push((address, sockets.len()));
            }
            let link = self.link();
            proxy.listen(link, sockets);
            self.bound.insert(address, link);
        }
    }

    /// Binds sockets until each data thread has one for each address.
    pub(super) fn top_up(&mut self, proxy: &Proxy) {
        for (address, first) in std::mem::take(&mut self.short) {
            let Some(link) = self.bound.get(&address) else { continue };
            match bind(address, proxy.threads() - first) {
                Ok(sockets) => proxy.listen_more(*link, first, sockets),
                // The address is served all the same.
                Err(error) => tracing::warn!(%error, %address, "not every data thread has a listening socket"),
            }
        }
    }

    fn link(&mut self) -> Link {
        self.next += 1;
        Link(self.next)
    }

    /// Makes the bound addresses those that rules serve.
    pub(super) fn sync(&mut self, table: &Table, proxy: &Proxy, state: &State) {
        let wanted = addresses(table);
        self.bound.retain(|address, link| {
            let stays = wanted.contains(address);
            if !stays {
                proxy.unlisten(*link, false);
            }
            stays
        });
        let mut failures = Vec::new();
        let room = sockets_max() / proxy.threads().max(1);
        for address in wanted {
            if self.bound.contains_key(&address) {
                continue;
            }
            if self.bound.len() >= room {
                failures
                    .push(format!("{address} and what follows: {room} VIP ports take half of the open files allowed"));
                break;
            }
            match bind(address, proxy.threads()) {
                Ok(sockets) => {
                    let link = self.link();
                    proxy.listen(link, sockets);
                    self.bound.insert(address, link);
                }
                Err(error) => failures.push(format!("{address}: {error}")),
            }
        }
        if failures.is_empty() {
            state.recovered(DEGRADED);
        } else {
            let why = told(&failures);
            if state.degraded().iter().all(|(_, known)| *known != why) {
                tracing::error!(why, "a VIP is not served");
            }
            state.degrade(DEGRADED, why);
        }
    }
}

/// What went wrong and what to do, for the status.
fn told(failures: &[String]) -> String {
    let shown = failures.iter().take(FAILURES_SHOWN).map(String::as_str).collect::<Vec<_>>().join("; ");
    let more = failures.len().saturating_sub(FAILURES_SHOWN);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!("cannot bind {shown}{more} (is the address on this host, and the limit of open files high enough?)")
}

/// Sockets that listeners may take: traffic, the API and event streams need the other half of what the process may open.
fn sockets_max() -> usize {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(usize::MAX, |(soft, _)| usize::try_from(soft / 2).unwrap_or(usize::MAX))
}

/// Follows the rules for ever; addresses that could not be bound are tried again. Nothing is bound while `handing_over`:
/// the other process would not know of it.
pub(super) async fn keep_bound(mut vips: OwnVips, proxy: Arc<Proxy>, state: Arc<State>, handing_over: Arc<AtomicBool>) {
    let mut rules = state.watch_rules();
    loop {
        let version = *rules.borrow_and_update();
        if !handing_over.load(Ordering::Acquire) {
            vips.sync(&state.table(), &proxy, &state);
        }
        state.datapath_serves(Some(version));
        let again = tokio::time::Duration::from_secs(2);
        if let Ok(Err(_closed)) = tokio::time::timeout(again, rules.changed()).await {
            return;
        }
    }
}

fn addresses(table: &Table) -> BTreeSet<SocketAddr> {
    table
        .services()
        .iter()
        .flat_map(|service| {
            let key = &service.rule().key;
            key.ports.iter().map(|port| SocketAddr::new(key.vip, port))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_names_some_addresses_and_counts_the_others() {
        let failures: Vec<_> = (0..4096).map(|port| format!("192.0.2.1:{port}: in use")).collect();
        let told = told(&failures);
        assert!(told.contains("192.0.2.1:7: in use; and 4088 more") && told.len() < 500, "{told}");
    }
}

//! The kernel's share: new connections to a VIP reach the data threads' listeners, the kernel's maps mirror what the fleet
//! knows of its endpoints, and devices with admission drop SYNs that no rule wants.
//!
//! Owns the eBPF object (built from `kvlb-ebpf`, committed), its maps and their pins, the link to the network namespace,
//! and the local routes of VIPs. Never decides who is healthy, never touches an address or a route that it did not add.
//!
//! What holds at any moment:
//! - a VIP in the map is whole: its endpoints were written before it, and change under it in single words only;
//! - links are not pinned: when the process ends, however it ends, steering ends with it;
//! - pins and routes are removed by [`Kernel::shutdown`] or drop, or by the next start after a crash.
//!
//! All calls block for microseconds per changed VIP, so that an asynchronous caller may make them in place.
//! Linux before 5.9 has no `SK_LOOKUP`; without it, or without privileges, the proxy binds the VIPs itself.

mod admission;
mod doctor;
mod driver;
mod drops;
mod error;
mod leftovers;
mod log;
mod maps;
mod owners;
mod pins;
mod routes;
mod slots;
mod table;

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use aya::programs::SkLookup;
use aya::{Ebpf, EbpfError, EbpfLoader};
pub use kvlb_common::{DropReason, ENDPOINTS_MAX, EndpointState, FrameStats, LISTENERS_MAX, VIPS_MAX, VipStats};

pub use crate::fleet::NoEndpoint;
pub use admission::AdmissionMode;
pub use doctor::{Finding, Verdict, examine};
pub use drops::{Dropped, Drops};
pub use error::Error;
pub use leftovers::{Cleared, clear, holders};
pub use log::{DRAIN_INTERVAL, ProgramLog};

use admission::Admitting;
use error::Outcome;
use kvlb_common::Stamp;
use maps::Maps;
use pins::PinDir;
use routes::Routes;
use table::{Table, Wanted};
use xxhash_rust::xxh3::xxh3_64;

/// The object that `cargo xtask build-ebpf` makes of `kvlb-ebpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("CARGO_MANIFEST_DIR"), "/bpf/kvlb.bpf.o"));

/// The steering program's name in the object, and in `bpftool prog show`.
const PROGRAM: &str = "kvlb_lookup";

/// How this room is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the maps are pinned, below a BPF file system. One kvlb at a time holds a directory; several side by side
    /// each need their own.
    pub pin_dir: PathBuf,
    /// The devices that have admission, by their names in the network namespace.
    pub xdp_devices: Vec<String>,
}

impl Default for Config {
    /// `/sys/fs/bpf/kvlb`: the BPF file system's usual place. No device.
    fn default() -> Self {
        Self { pin_dir: PathBuf::from("/sys/fs/bpf/kvlb"), xdp_devices: Vec::new() }
    }
}

/// An address and port at which rules are served, as the kernel is to see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vip {
    /// The address.
    pub addr: IpAddr,
    /// The port; 0 takes every port of the address that has no VIP of its own.
    pub port: u16,
    /// The rules served here, oldest first. VIPs with the same rules (the ports of a range) share their endpoints'
    /// entries, so their endpoints are the same.
    pub rules: Vec<u32>,
    /// The endpoints of all these rules.
    pub endpoints: Vec<VipEndpoint>,
    /// Who answers while no endpoint may be chosen.
    pub no_endpoint: NoEndpoint,
    /// Whether it takes new connections.
    pub phase: Phase,
    /// Networks whose clients may connect, each as its first address and how many bits of that count; empty: anyone may.
    pub allowed: Vec<(IpAddr, u8)>,
    /// How often one source may open a connection, where SYNs arrive at a device with admission.
    pub syn: Option<SynLimit>,
}

/// How often one source may open a connection: a rule's `synRate` and `synBurst`. A source has one bucket at all VIPs
/// that are limited by the same rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SynLimit {
    /// The rule.
    pub rule: u32,
    /// SYNs each second; 0: no limit.
    pub per_sec: u32,
    /// SYNs at once.
    pub burst: u32,
}

/// Whether a VIP takes new connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// It does.
    #[default]
    Serving,
    /// Its rules are gone. New connections are refused, and its route stays, since without it the open ones could not
    /// even end: keep the VIP in the list until they have.
    Draining,
}

/// One endpoint of a VIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VipEndpoint {
    /// Its address.
    pub addr: IpAddr,
    /// Its port.
    pub port: u16,
    /// What is known of it, for whoever reads the map.
    pub state: EndpointState,
    /// Whether it may be chosen: also one that no probe has judged yet, and one that a breaker takes out together with most
    /// others.
    pub may_be_asked: bool,
    /// Its share beside the others.
    pub weight: u32,
}

/// kvlb's programs and maps in the kernel.
pub struct Kernel {
    table: Table,
    maps: Maps,
    // Dropped before the pins, which tell a next start what routes there are.
    routes: Routes,
    pins: PinDir,
    /// Another process has the pins and routes: nothing of them is touched.
    joined: bool,
    log: Option<ProgramLog>,
    drops: Option<Drops>,
    /// New VIPs that the last list had, and that others have.
    owned: Vec<(SocketAddr, String)>,
    /// The devices that are to have admission, and those that have it.
    xdp_devices: Vec<String>,
    admitting: Vec<Admitting>,
    /// Owns the program and its link: steering ends when it is dropped.
    ebpf: Ebpf,
}

impl Kernel {
    /// Loads the program, pins the maps and attaches to the network namespace of the calling thread, to which all routes
    /// of this value belong, too.
    ///
    /// Mounts the BPF file system at its usual place if the pin directory is to be there and it is missing. Replaces what
    /// a crashed predecessor has left in the directory, and takes over the routes it had added.
    ///
    /// # Errors
    /// [`Error::Privileges`], [`Error::NoBpffs`], [`Error::InUse`], [`Error::Program`], [`Error::NoDevice`],
    /// [`Error::DeviceHeld`] and others, each saying what is missing. Nothing is left behind.
    pub fn load(config: &Config) -> Result<Self, Error> {
        admission::check(&config.xdp_devices)?;
        let pins = PinDir::open(&config.pin_dir)?;
        let routes = Routes::open(pins.stale().1)?;
        let Loaded { mut ebpf, log, drops, maps } = programs(config, Some(&pins))?;
        pins.clear()?;
        maps.pin(&pins)?;
        attach(&mut ebpf)?;
        let xdp_devices = config.xdp_devices.clone();
        let admitting = if xdp_devices.is_empty() { Vec::new() } else { admission::attach(&mut ebpf, &xdp_devices)? };
        let (table, drops) = (Table::default(), Some(drops));
        Ok(Self {
            table,
            maps,
            routes,
            pins,
            joined: false,
            log,
            drops,
            owned: Vec::new(),
            xdp_devices,
            admitting,
            ebpf,
        })
    }

    /// Loads the program and its maps beside those of a process that hands over, whose lock of the pin directory this is.
    ///
    /// Nothing is steered until [`Kernel::attach`], and pins, routes and devices stay the other's until [`Kernel::own`].
    ///
    /// # Errors
    /// As [`Kernel::load`].
    pub fn join(config: &Config, lock: File) -> Result<Self, Error> {
        let mut pins = PinDir::given(&config.pin_dir, lock);
        let made = admission::check(&config.xdp_devices)
            .and_then(|()| Ok((Routes::open(Vec::new())?, programs(config, Some(&pins))?)));
        let (routes, Loaded { ebpf, log, drops, maps }) = match made {
            Ok(made) => made,
            Err(error) => {
                // They are the other's still.
                pins.forget();
                return Err(error);
            }
        };
        let xdp_devices = config.xdp_devices.clone();
        let (table, admitting, drops) = (Table::default(), Vec::new(), Some(drops));
        Ok(Self {
            table,
            maps,
            routes,
            pins,
            joined: true,
            log,
            drops,
            owned: Vec::new(),
            xdp_devices,
            admitting,
            ebpf,
        })
    }

    /// Steers from now on, beside the program of a process that hands over. A namespace runs all its programs in the order in
    /// which they were attached, and ours replace an earlier one's choice (`Documentation/bpf/prog_sk_lookup.rst`). Both choose
    /// among the same sockets, so that there is no moment in which nobody steers.
    ///
    /// # Errors
    /// As [`Kernel::load`].
    pub fn attach(&mut self) -> Result<(), Error> {
        attach(&mut self.ebpf)
    }

    /// Takes over pins and routes of a process that has let go of them, or has died. Gives the VIPs that it had: those
    /// that the next [`Kernel::sync`] does not name lose their routes with it.
    ///
    /// # Errors
    /// [`Error::Pin`]. What could be taken over is.
    pub fn own(&mut self) -> Result<Vec<SocketAddr>, Error> {
        let (vips, routed) = self.pins.stale();
        self.routes.inherit(routed);
        self.joined = false;
        self.maps.pin_instead(&self.pins)?;
        Ok(vips)
    }

    /// Judges frames at the devices that are to have admission, once the process that hands over has let go of them: for a
    /// moment between the two nobody does.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::DeviceHeld`], [`Error::Device`]; then none of them has admission.
    pub fn admit(&mut self) -> Result<(), Error> {
        if self.admitting.is_empty() && !self.xdp_devices.is_empty() {
            self.admitting = admission::attach(&mut self.ebpf, &self.xdp_devices)?;
        }
        Ok(())
    }

    /// Lets go of devices that are gone, and judges frames again at those that are back. Gives the devices that are to have
    /// admission and have none, each with why; none where another process has them.
    pub fn renew_admission(&mut self) -> Vec<(String, Error)> {
        if self.joined || self.xdp_devices.is_empty() {
            return Vec::new();
        }
        admission::renew(&mut self.ebpf, &self.xdp_devices, &mut self.admitting)
    }

    /// Ends steering and admission, and leaves pins and routes to another process, which steers already.
    ///
    /// # Errors
    /// [`Error::Program`] where the program stays until the process ends.
    pub fn let_go(&mut self) -> Result<(), Error> {
        self.joined = true;
        self.admitting.clear();
        self.routes.forget();
        self.pins.forget();
        let mut run = || -> Result<(), EbpfError> {
            let program = self.ebpf.program_mut(PROGRAM).ok_or(aya::programs::ProgramError::NotLoaded)?;
            let program: &mut SkLookup = program.try_into()?;
            program.unload()?;
            Ok(())
        };
        run().map_err(error::from_program)
    }

    /// A descriptor of the pin directory's lock.
    ///
    /// # Errors
    /// [`Error::Pin`] when there is no descriptor left.
    pub fn lend_lock(&self) -> Result<Option<File>, Error> {
        self.pins.lend_lock()
    }

    /// Makes these the listeners that VIPs are spread over: one per data thread, each already listening.
    ///
    /// Any address will do, so that of loopback: `127.0.0.1:0` takes connections to IPv4 VIPs, `[::ffff:127.0.0.1]:0`
    /// those of both families (a socket bound to `[::1]` is one of IPv6 only, whatever its options say).
    ///
    /// May be called again: connections find a listener at every moment of the change.
    ///
    /// # Errors
    /// [`Error::Full`] for more than [`LISTENERS_MAX`], [`Error::Listener`] for a socket that the kernel does not take.
    pub fn set_listeners(&mut self, listeners: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let workers = u32::try_from(listeners.len()).ok().filter(|count| *count <= LISTENERS_MAX);
        let full = Error::Full { what: "listeners", wanted: listeners.len(), max: LISTENERS_MAX };
        let Some(workers) = workers else { return Err(full) };
        for (index, listener) in (0..).zip(listeners) {
            self.maps.set_listener(index, *listener)?;
        }
        let before = self.table.workers();
        self.table.set_workers(workers, &mut self.maps)?;
        for index in workers..before {
            self.maps.clear_listener(index)?;
        }
        Ok(())
    }

    /// Makes the kernel's VIPs, endpoints and routes what `vips` says. Writes only what differs, each VIP at one stroke
    /// after its endpoints; doing so again does nothing.
    ///
    /// A new VIP at which another program listens is left to it, until it does not any more.
    ///
    /// # Errors
    /// [`Error::Address`] and [`Error::Twice`] before anything is written. Otherwise the first failure, after everything
    /// else has been done; the next call tries again what failed. [`Error::Owned`] where nothing else has.
    pub fn sync(&mut self, vips: &[Vip]) -> Result<(), Error> {
        let mut wanted = Wanted::checked(vips)?;
        // A route comes after its entries and goes before them, so that whatever a crash leaves is in the map.
        let mut outcome = Outcome::default();
        let mut owned = Ok(());
        if !self.joined {
            owned = self.leave_to_others(&mut wanted, &mut outcome);
            let addrs: BTreeSet<IpAddr> = wanted.addrs().collect();
            outcome.note(self.routes.retain(&addrs));
            outcome.note(self.routes.claim(&addrs));
        }
        outcome.note(self.table.sync(&wanted, |addr| self.routes.is_ours(addr), &mut self.maps));
        if !self.joined {
            outcome.note(self.routes.add_claimed());
        }
        outcome.note(owned);
        outcome.finish()
    }

    /// Leaves out new VIPs at which others listen, and says which.
    fn leave_to_others(&mut self, wanted: &mut Wanted<'_>, outcome: &mut Outcome) -> Result<(), Error> {
        let new = wanted.new_to(&self.table);
        self.owned.clear();
        if new.is_empty() {
            return Ok(());
        }
        // Where the kernel does not say, VIPs are taken as before it did.
        let listening = owners::listening().unwrap_or_else(|error| {
            tracing::debug!(%error, "who listens where is not known");
            Vec::new()
        });
        outcome.note(self.routes.claim(&new.iter().map(SocketAddr::ip).collect()));
        for at in new {
            if let Some(owner) = owners::owner(&listening, at, self.routes.is_others(at.ip())) {
                wanted.leave_out(at);
                self.owned.push((at, owners::whose(owner)));
            }
        }
        match self.owned.first() {
            Some((at, who)) => Err(Error::Owned { at: *at, who: who.clone(), others: self.owned.len() - 1 }),
            None => Ok(()),
        }
    }

    /// VIPs with this address and these ports that other programs have, and who.
    pub fn owned(&self, addr: IpAddr, ports: RangeInclusive<u16>) -> Vec<(SocketAddr, String)> {
        let of_rule = |(at, _): &&(SocketAddr, String)| at.ip() == addr.to_canonical() && ports.contains(&at.port());
        self.owned.iter().filter(of_rule).cloned().collect()
    }

    /// The counters of each VIP since it was added, all CPUs together, in the order of addresses and ports.
    ///
    /// # Errors
    /// [`Error::Map`] when the kernel does not give them.
    pub fn stats(&self) -> Result<Vec<(SocketAddr, VipStats)>, Error> {
        self.table.ids().map(|(at, id)| Ok((at, self.maps.stats(id)?))).collect()
    }

    /// The same of the VIPs with this address and these ports.
    ///
    /// # Errors
    /// [`Error::Map`] when the kernel does not give them.
    pub fn stats_of(&self, addr: IpAddr, ports: RangeInclusive<u16>) -> Result<Vec<(SocketAddr, VipStats)>, Error> {
        let addr = addr.to_canonical();
        let range = SocketAddr::new(addr, *ports.start())..=SocketAddr::new(addr, *ports.end());
        self.table.ids_at(range).map(|(at, id)| Ok((at, self.maps.stats(id)?))).collect()
    }

    /// What the programs tell of those that they drop, once: whoever takes it reads it.
    pub fn take_drops(&mut self) -> Option<Drops> {
        self.drops.take()
    }

    /// The program's log, once: whoever takes it drains it into ours.
    pub fn take_log(&mut self) -> Option<ProgramLog> {
        self.log.take()
    }

    /// The kernel's id of the steering program, as in `bpftool prog show id ID`.
    pub fn program_id(&self) -> Option<u32> {
        let program: &SkLookup = self.ebpf.program(PROGRAM)?.try_into().ok()?;
        program.info().ok().map(|info| info.id())
    }

    /// The counters of frames that arrived at devices with admission and are for no VIP, all CPUs together.
    ///
    /// # Errors
    /// [`Error::Map`] when the kernel does not give them.
    pub fn frames(&self) -> Result<FrameStats, Error> {
        self.maps.frames()
    }

    /// The devices that have admission, and where their frames are judged.
    pub fn admission(&self) -> Vec<(String, AdmissionMode)> {
        self.admitting.iter().map(|at| (at.device.clone(), at.mode)).collect()
    }

    /// The kernel's id of the admission program, where a device is to have admission.
    pub fn admission_id(&self) -> Option<u32> {
        admission::id(&self.ebpf)
    }

    /// Where the maps are pinned.
    pub fn pin_dir(&self) -> &std::path::Path {
        self.pins.path()
    }

    /// Removes routes, pins and programs; programs only where the others belong to another process. Dropping does the
    /// same, and logs what cannot be removed.
    ///
    /// # Errors
    /// The first thing that could not be removed; the others are.
    pub fn shutdown(mut self) -> Result<(), Error> {
        let mut outcome = Outcome::default();
        if self.joined {
            self.pins.forget();
            return Ok(());
        }
        self.admitting.clear();
        outcome.note(self.routes.retain(&BTreeSet::new()));
        outcome.note(self.pins.remove());
        outcome.finish()
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if self.joined {
            self.pins.forget();
        }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("pin_dir", &self.pin_dir()).field("table", &self.table).finish_non_exhaustive()
    }
}

/// The object in the kernel.
struct Loaded {
    ebpf: Ebpf,
    log: Option<ProgramLog>,
    drops: Drops,
    maps: Maps,
}

/// Loads the object: its programs' log, its maps, and the admission program where a device needs it. Buckets of a process
/// before, which has left its pins or is about to, are used on.
fn programs(config: &Config, before: Option<&PinDir>) -> Result<Loaded, Error> {
    let admits = !config.xdp_devices.is_empty();
    let sources = if admits { kvlb_common::SOURCES_MAX } else { 1 };
    let stamp = Stamp { object: xxh3_64(OBJECT) };
    let buckets = before.and_then(|pins| pins.buckets(stamp, sources));
    let mut loader = EbpfLoader::new();
    loader.map_max_entries(maps::SOURCES, sources);
    if let Some(path) = &buckets {
        loader.map_pin_path(maps::SOURCES, path);
    }
    let mut ebpf = loader.load(OBJECT).map_err(error::from_program)?;
    let log = ProgramLog::open(&mut ebpf);
    let (drops, mut maps) = (Drops::open(&mut ebpf)?, Maps::take(&mut ebpf)?);
    maps.stamp(stamp)?;
    if admits {
        admission::load(&mut ebpf)?;
    }
    Ok(Loaded { ebpf, log, drops, maps })
}

/// Attaches the program to the network namespace of this thread.
fn attach(ebpf: &mut Ebpf) -> Result<(), Error> {
    let namespace = File::open("/proc/thread-self/ns/net").map_err(Error::Namespace)?;
    let mut run = || -> Result<(), EbpfError> {
        let program = ebpf.program_mut(PROGRAM).ok_or(aya::programs::ProgramError::NotLoaded)?;
        let program: &mut SkLookup = program.try_into()?;
        program.load()?;
        program.attach(&namespace)?;
        Ok(())
    };
    run().map_err(error::from_program)
}

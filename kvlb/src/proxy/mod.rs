//! The L7 data path: read a request, ask the rest of kvlb, connect, relay, try again with the loser excluded.
//!
//! One data thread per core, each with its own runtime, listeners and connections ([`lane`]); nothing is shared but the
//! [`Backplane`], which is the rest of kvlb as the proxy sees it. A connection is one task: [`client`] takes one request
//! after the other, [`exchange`] sees one of them through, [`entry`] notes down what the access log says of it. Sockets are
//! behind [`io`], with io_uring ([`ring`]) and epoll ([`epoll`]) behind that.
//!
//! Held here, whatever comes from outside: the client's bytes reach the engine unchanged and the engine's bytes the client
//! at once; a request that an engine may have started is never sent again; a broken answer never ends cleanly; a client that
//! leaves takes its request along; a slow client holds up nobody but itself.

mod alarm;
mod answer;
mod backplane;
mod buffer;
mod client;
mod connect;
mod correct;
mod entry;
mod epoll;
mod exchange;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod hold;
mod http;
mod idle;
mod intake;
mod io;
mod lane;
mod legs;
mod meter;
mod models;
mod pace;
mod relay;
mod ring;
#[cfg(test)]
mod suite;
mod timer;
mod trace;
mod upload;
mod usage;
mod walk;
mod workers;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::sync::mpsc;

pub use self::backplane::{
    Addresses, Arrival, Backplane, Body, Call, ConnectFailure, Event, HandedOver, Haste, LegTerms, Phase, Plan,
    Prefilled, Request, Standing, Survey, Target, Terms, Unseen,
};
pub use self::buffer::Chunk;
pub use self::http::{Fields, Framing, Head, Refusal, Reply};
pub use self::io::{Engine, Io};
pub use self::meter::{Direction, Meter, Pulse, Refused, Retry};
pub use self::usage::Usage;

use self::buffer::Budget;
use self::epoll::Epoll;
use self::io::Backend;
use self::lane::{Command, Shared};
use self::ring::Uring;
use self::workers::Workers;
use crate::courtesy::Cores;
use crate::telemetry::access::AccessLog;

/// Connections that may wait to be accepted, the kernel's own bound permitting (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;

/// How the proxy works.
#[derive(Clone, Debug)]
pub struct Config {
    /// Data threads.
    pub threads: usize,
    /// The back end.
    pub io: Io,
    /// Data threads stay on one core each.
    pub pin: bool,
    /// A client connection may be silent between requests for so long. Default 120 s: longer than clients keep theirs, so
    /// that it is they who close.
    pub client_idle: Duration,
    /// A request's head must come in within this time. Default 30 s.
    pub client_head: Duration,
    /// Client connections at a time (`--connections-max`). Default, and at most: as many as there are descriptors for beside
    /// those that listen, two each.
    pub connections_max: usize,
    /// Descriptors to count on. Default, and at most: as many as the process may have.
    pub descriptors: usize,
    /// Bytes of a request's largest header section (`--head-max-kib`). Default 64 KiB.
    pub head_max: usize,
    /// Idle connections kept per data thread and endpoint. Default 64: answers that arrive together leave their
    /// connections idle together, and fewer would be opened anew for the requests that follow.
    pub idle_per_endpoint: usize,
    /// Idle connections kept per data thread. Default 4,096.
    pub idle_total: usize,
    /// An idle connection is used again only while it is younger than this. Default 4 s: engines close at 5 s.
    pub idle_age: Duration,
    /// Bytes that all request bodies together may hold. Default a quarter of the machine's memory.
    pub body_budget: usize,
    /// Threads of the worker pool for heavy decisions. Default 2.
    pub decision_threads: usize,
    /// Decisions that may wait for it. Default 256: at 20 ms each no more could be done in time.
    pub decision_queue: usize,
    /// A decision may take this long (`KVLB_DECISION_BUDGET_MS`). Default 20 ms.
    pub decision_budget: Duration,
    /// Endpoints are told of each request's W3C trace context; else what clients say of it goes on as it is. Default on.
    pub trace_context: bool,
    /// The access log, where there is one.
    pub access_log: Option<AccessLog>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            threads: default_threads(),
            io: Io::Auto,
            pin: true,
            client_idle: Duration::from_mins(2),
            client_head: Duration::from_secs(30),
            connections_max: usize::MAX,
            descriptors: usize::MAX,
            head_max: http::HEAD_MAX,
            idle_per_endpoint: 64,
            idle_total: 4096,
            idle_age: Duration::from_secs(4),
            body_budget: quarter_of_memory(),
            decision_threads: 2,
            decision_queue: 256,
            decision_budget: Duration::from_millis(20),
            trace_context: true,
            access_log: None,
        }
    }
}

/// One core is left to the rest of kvlb where there are four or more.
fn default_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if cores >= 4 { cores - 1 } else { cores }
}

/// A quarter of the memory that this process may have, or 1 GiB where that cannot be told.
fn quarter_of_memory() -> usize {
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE);
    let pages = nix::unistd::sysconf(nix::unistd::SysconfVar::_PHYS_PAGES);
    let machine = match (page, pages) {
        (Ok(Some(page)), Ok(Some(pages))) => usize::try_from(page.saturating_mul(pages)).unwrap_or(usize::MAX),
        _ => 4 << 30,
    };
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let ours = cgroup_limit(&cgroups, |file| std::fs::read_to_string(file).ok());
    ours.map_or(machine, |ours| ours.min(machine)) / 4
}

/// The least memory limit of the control groups that a process is in, by its `/proc/self/cgroup`. In a container the path
/// that stands there may be one of the host's; what the container may have stands at the root then.
fn cgroup_limit(cgroups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<usize> {
    let limits = cgroups.lines().flat_map(|line| {
        // The number of a hierarchy, its controllers, and the path in it; version 2 has one, without controllers.
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let place = match controllers {
            "" => Some(("/sys/fs/cgroup", "memory.max")),
            _ if controllers.split(',').any(|name| name == "memory") => {
                Some(("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))
            }
            // Other hierarchies have paths of their own.
            _ => None,
        };
        let groups = Path::new(path.trim_start_matches('/')).ancestors();
        let files = groups.filter_map(|group| place.map(|(root, file)| Path::new(root).join(group).join(file)));
        files.filter_map(|file| read(&file)?.trim().parse().ok()).collect::<Vec<usize>>()
    });
    limits.min()
}

/// Names a listening socket, or a group of them with one on each data thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link(pub u64);

/// Why the proxy did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// io_uring was asked for by name.
    #[error("io_uring is not available")]
    Uring(#[source] std::io::Error),
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
}

/// The data threads.
#[derive(Debug)]
pub struct Proxy {
    engine: Engine,
    lanes: Vec<LaneHandle>,
}

#[derive(Debug)]
struct LaneHandle {
    commands: mpsc::UnboundedSender<Command>,
    thread: JoinHandle<()>,
}

impl Proxy {
    /// Starts the data threads. They accept nothing until [`Proxy::listen`].
    ///
    /// # Errors
    /// When io_uring was asked for and is not there, or no thread can be started.
    pub fn start<P: Backplane>(config: Config, backplane: &Arc<P>, meter: &Arc<dyn Meter>) -> Result<Self, StartError> {
        let (engine, refused) = config.io.resolve().map_err(StartError::Uring)?;
        if let Some(error) = refused {
            tracing::warn!(%error, "io_uring is not available: serving with epoll");
        }
        tracing::info!(io = engine.label(), threads = config.threads, "data threads start");
        let cores = Cores::new(CpuSet::count());
        let workers =
            Workers::start(config.decision_threads, config.decision_queue, &cores).map_err(StartError::Thread)?;
        let workers = Arc::new(workers);
        let budget = Budget::new(config.body_budget);
        let (clients, listening) = (Arc::default(), Arc::default());
        let mut config = config;
        config.descriptors = config.descriptors.min(descriptors());
        let config = Arc::new(config);
        let shared = || Shared {
            backplane: Arc::clone(backplane),
            meter: Arc::clone(meter),
            config: Arc::clone(&config),
            workers: Arc::clone(&workers),
            budget: Arc::clone(&budget),
            clients: Arc::clone(&clients),
            listening: Arc::clone(&listening),
        };
        let spawn = |number| match engine {
            Engine::Uring => spawn_lane::<Uring, P>(number, shared(), &cores),
            Engine::Epoll => spawn_lane::<Epoll, P>(number, shared(), &cores),
        };
        let lanes = (0..config.threads.max(1)).map(spawn).collect::<Result<_, _>>().map_err(StartError::Thread)?;
        Ok(Self { engine, lanes })
    }

    /// The back end that serves.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// How many data threads there are.
    pub fn threads(&self) -> usize {
        self.lanes.len()
    }

    /// Accepts from `sockets`, which all listen: the first on the first data thread, the second on the second. What is left
    /// when each thread has one is accepted from by all threads, so that none has twice the work of another.
    pub fn listen(&self, link: Link, mut sockets: Vec<TcpListener>) {
        let shared = sockets.split_off(sockets.len().min(self.lanes.len()));
        for (socket, lane) in sockets.into_iter().zip(&self.lanes) {
            lane.tell(Command::Listen(link, socket));
        }
        for socket in shared {
            for lane in &self.lanes {
                match socket.try_clone() {
                    Ok(socket) => lane.tell(Command::Listen(link, socket)),
                    Err(error) => tracing::error!(%error, "a data thread does not share a listening socket"),
                }
            }
        }
    }

    /// Accepts from `sockets` too, each on the data thread of its number counted from `first`.
    pub fn listen_more(&self, link: Link, first: usize, sockets: Vec<TcpListener>) {
        for (socket, lane) in sockets.into_iter().zip(self.lanes.iter().skip(first)) {
            lane.tell(Command::Listen(link, socket));
        }
    }

    /// A descriptor of each listening socket, those that threads share once for each of them; in the order of threads.
    /// Blocks until the threads have answered.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn lend(&self) -> std::io::Result<Vec<(Link, OwnedFd)>> {
        let mut lent = Vec::new();
        for lane in &self.lanes {
            let (to, from) = std::sync::mpsc::channel();
            lane.tell(Command::Lend(to));
            for (link, socket) in from {
                lent.push((link, socket?));
            }
        }
        Ok(lent)
    }

    /// Accepts no more from the sockets of `link`. With `release` they stay open for another process that holds them.
    pub fn unlisten(&self, link: Link, release: bool) {
        for lane in &self.lanes {
            lane.tell(Command::Unlisten { link, release });
        }
    }

    /// Accepts nothing more, lets requests on their way finish until `deadline`, and ends. Blocks until that is done.
    /// With `release` the listening sockets stay open for another process that holds them, and connections between two
    /// requests are kept for a while: the answer to the next one tells its client to close.
    pub fn drain(self, deadline: Instant, release: bool) {
        for lane in &self.lanes {
            lane.tell(Command::Drain { deadline, release });
        }
        for lane in self.lanes {
            if lane.thread.join().is_err() {
                tracing::error!("a data thread ended in a panic");
            }
        }
    }
}

impl LaneHandle {
    fn tell(&self, command: Command) {
        if self.commands.send(command).is_err() {
            tracing::error!("a data thread has ended");
        }
    }
}

fn spawn_lane<B: Backend, P: Backplane>(
    number: usize,
    shared: Shared<P>,
    cores: &Arc<Cores>,
) -> std::io::Result<LaneHandle> {
    let cores = Arc::clone(cores);
    let (commands, orders) = mpsc::unbounded_channel();
    let thread = std::thread::Builder::new().name(format!("kvlb-data-{number}")).spawn(move || {
        let core = if shared.config.pin { pin_to_core(number) } else { None };
        let place = core.and_then(|cpu| cores.place(cpu));
        if let Err(error) = B::block_on(lane::run::<B, P>(number, place, shared, orders)) {
            tracing::error!(%error, thread = number, "a data thread cannot run");
        }
    })?;
    Ok(LaneHandle { commands, thread })
}

/// Binds the calling thread to the `number`-th of the cores that it may use, and says which. Where that is forbidden, it
/// roams.
fn pin_to_core(number: usize) -> Option<usize> {
    let this = Pid::from_raw(0);
    let pinned = sched_getaffinity(this).and_then(|allowed| {
        let cores: Vec<usize> = (0..CpuSet::count()).filter(|core| allowed.is_set(*core).unwrap_or(false)).collect();
        let mut own = CpuSet::new();
        let core = *cores.get(number % cores.len().max(1)).ok_or(nix::errno::Errno::EINVAL)?;
        own.set(core)?;
        sched_setaffinity(this, &own).map(|()| core)
    });
    pinned.inspect_err(|error| tracing::debug!(%error, thread = number, "a data thread stays unpinned")).ok()
}

/// Allows this process as many file descriptors as the system lets it have, and says how many that are: each client takes
/// one, and each request on its way another.
///
/// # Errors
/// When the limit cannot be read or set.
pub fn raise_descriptor_limit() -> std::io::Result<u64> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(hard)
}

/// Descriptors that the process may have.
fn descriptors() -> usize {
    use nix::sys::resource::{Resource, getrlimit};
    let (limit, _hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    usize::try_from(limit).unwrap_or(usize::MAX)
}

/// One socket per data thread that listens on `address`, among which the kernel spreads new connections.
///
/// # Errors
/// When the address cannot be bound.
pub fn bind(address: SocketAddr, threads: usize) -> std::io::Result<Vec<TcpListener>> {
    let mut address = address;
    let mut sockets = Vec::with_capacity(threads);
    for _ in 0..threads.max(1) {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(true)?;
        socket.set_tcp_nodelay(true)?;
        // What is accepted from it inherits this.
        socket.set_tcp_keepalive(&io::keepalive())?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let socket = TcpListener::from(socket);
        // Port 0 is the same free port for all of them.
        address = socket.local_addr()?;
        sockets.push(socket);
    }
    Ok(sockets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_a_process_s_groups_counts() {
        let files = [
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/memory.max", "3000\n"),
            ("/sys/fs/cgroup/memory.max", "5000\n"),
            ("/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "700\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        let read =
            |file: &Path| files.iter().find(|(name, _)| Path::new(name) == file).map(|(_, text)| (*text).to_owned());
        assert_eq!(cgroup_limit("0::/a/b\n", read), Some(3000));
        assert_eq!(cgroup_limit("0::/of-the-host/c\n", read), Some(5000));
        assert_eq!(cgroup_limit("12:cpu:/\n4:memory:/docker/x\n0::/none\n", read), Some(700));
        assert_eq!(cgroup_limit("12:cpu,cpuacct:/docker/x\n", read), None, "a path of another hierarchy");
        assert_eq!(cgroup_limit("0::/a/b\n", |_| None), None);
        assert_eq!(cgroup_limit("", read), None);
    }
}

//! Network namespaces that cannot be left behind: each lives as long as a file handle of the test, so that the kernel removes it when
//! the test ends, however it ends. Making one needs root.

use std::fs::File;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, anyhow};
use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, setns, unshare};
use rtnetlink::{Handle, LinkUnspec, LinkVeth};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};

/// Numbers namespaces and links within this process.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// The loopback device is the first of every namespace.
const LOOPBACK: u32 = 1;

/// A network namespace with its loopback device up.
#[derive(Debug)]
pub struct Netns {
    name: String,
    handle: File,
}

impl Netns {
    /// Makes one. `label` is for reading; the name is unique in this machine.
    ///
    /// # Errors
    /// When the kernel refuses, as it does without root.
    pub fn new(label: &str) -> anyhow::Result<Self> {
        let name = format!("{label}-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let handle = on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace (as root?)")?;
            File::open("/proc/thread-self/ns/net").context("keep the network namespace")
        })??;
        let netns = Self { name, handle };
        netns.netlink(async |netlink| {
            let up = LinkUnspec::new_with_index(LOOPBACK).up().build();
            netlink.link().set(up).execute().await.context("bring the loopback device up")
        })?;
        Ok(netns)
    }

    /// Its name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A path by which `nsenter --net=PATH` finds it while the test runs.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.handle.as_raw_fd()))
    }

    /// Runs `work` on a thread of its own inside.
    ///
    /// # Errors
    /// When the namespace cannot be entered, or `work` panics.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        on_own_thread(|| {
            self.enter()?;
            Ok(work())
        })?
    }

    /// Runs a future to its end inside, on a runtime of its own.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn block_on<T: Send>(&self, work: impl AsyncFnOnce() -> T + Send) -> anyhow::Result<T> {
        self.run(|| {
            let runtime = Builder::new_current_thread().enable_all().build().context("build a runtime")?;
            Ok(runtime.block_on(work()))
        })?
    }

    /// A runtime whose threads are inside, for what lives longer than one call: spawn an engine on it and talk to it from anywhere.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn runtime(&self) -> anyhow::Result<NetnsRuntime> {
        // The worker is started by `build`, from a thread that is inside; threads inherit the namespace of their parent.
        let build = || Builder::new_multi_thread().worker_threads(1).enable_all().build().context("build a runtime");
        self.run(build)?.map(|runtime| NetnsRuntime(Some(runtime)))
    }

    /// Starts a process inside.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, command: &mut Command) -> anyhow::Result<Child> {
        self.run(|| command.spawn())?.with_context(|| format!("start a process in {}", self.name))
    }

    /// A connection from inside, to be used from anywhere: a socket stays in the namespace it was made in.
    ///
    /// # Errors
    /// The inner one when the connection fails.
    pub fn connect(&self, address: SocketAddr) -> anyhow::Result<io::Result<TcpStream>> {
        let connected = self.run(|| std::net::TcpStream::connect(address))?;
        Ok(connected.and_then(|stream| {
            stream.set_nonblocking(true)?;
            TcpStream::from_std(stream)
        }))
    }

    /// Joins this namespace and `other` by a pair of devices with these addresses; returns the devices' names, ours first.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn link(&self, ours: (IpAddr, u8), other: &Self, theirs: (IpAddr, u8)) -> anyhow::Result<(String, String)> {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (near, far) = (format!("kv{number}a"), format!("kv{number}b"));
        let other_handle = other.handle.as_raw_fd();
        self.netlink(async |netlink| {
            let pair = LinkVeth::new(&near, &far).build();
            netlink.link().add(pair).execute().await.context("add a pair of devices")?;
            let away = LinkUnspec::new_with_name(&far).setns_by_fd(other_handle).build();
            netlink.link().set(away).execute().await.context("move a device to the other namespace")
        })?;
        self.address(&near, ours)?;
        other.address(&far, theirs)?;
        Ok((near, far))
    }

    /// Gives a device an address and brings it up.
    ///
    /// # Errors
    /// When there is no such device, or the kernel refuses.
    pub fn address(&self, device: &str, (address, prefix): (IpAddr, u8)) -> anyhow::Result<()> {
        self.netlink(async |netlink| {
            let index = if_nametoindex(device).with_context(|| format!("look for the device {device}"))?;
            netlink.address().add(index, address, prefix).execute().await.context("add an address")?;
            let up = LinkUnspec::new_with_index(index).up().build();
            netlink.link().set(up).execute().await.context("bring a device up")
        })
    }

    fn netlink(&self, work: impl AsyncFnOnce(Handle) -> anyhow::Result<()> + Send) -> anyhow::Result<()> {
        self.block_on(async || {
            let (connection, handle, _) = rtnetlink::new_connection().context("open netlink")?;
            let serving = tokio::spawn(connection);
            let done = work(handle).await;
            serving.abort();
            done
        })?
    }

    fn enter(&self) -> anyhow::Result<()> {
        setns(self.handle.as_fd(), CloneFlags::CLONE_NEWNET).with_context(|| format!("enter {}", self.name))
    }
}

/// Runs `work` on a new thread: a thread's namespace is its own affair, and must not leak into the caller's.
fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
    std::thread::scope(|scope| scope.spawn(work).join()).map_err(|panic| {
        let text =
            panic.downcast_ref::<&str>().map(ToString::to_string).or_else(|| panic.downcast_ref::<String>().cloned());
        anyhow!("a thread of a namespace panicked: {}", text.unwrap_or_default())
    })
}

/// A runtime inside a namespace; what runs on it ends when this is dropped.
#[derive(Debug)]
pub struct NetnsRuntime(Option<Runtime>);

impl NetnsRuntime {
    /// Runs a future on it and waits for its end, from any other runtime.
    ///
    /// # Errors
    /// When the future panics.
    pub async fn run<F>(&self, work: F) -> anyhow::Result<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.spawn(work).await.context("run in a namespace")
    }
}

impl Deref for NetnsRuntime {
    type Target = Runtime;

    #[expect(clippy::expect_used, reason = "taken in drop only")]
    fn deref(&self) -> &Runtime {
        self.0.as_ref().expect("a runtime until it is dropped")
    }
}

impl Drop for NetnsRuntime {
    fn drop(&mut self) {
        // A plain drop would wait, which is forbidden on another runtime's thread.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};
    use std::process::Command;

    use super::Netns;

    /// Without root there is nothing to test here; said once per test.
    fn namespace(label: &str) -> Option<Netns> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: network namespaces need root");
            return None;
        }
        Some(Netns::new(label).unwrap())
    }

    #[test]
    fn a_port_taken_inside_is_free_outside_and_reached_only_from_inside() {
        let Some(netns) = namespace("alone") else { return };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let listener = netns.run(|| TcpListener::bind(address)).unwrap().unwrap();
        let accepting = std::thread::spawn(move || listener.accept().map(|_| ()));
        netns.run(|| std::net::TcpStream::connect(address)).unwrap().unwrap();
        accepting.join().unwrap().unwrap();
        assert!(std::net::TcpStream::connect(address).is_err());
    }

    #[tokio::test]
    async fn two_namespaces_talk_over_a_link_and_a_process_sees_its_own() {
        let (Some(a), Some(b)) = (namespace("a"), namespace("b")) else { return };
        let (at_a, at_b) = (Ipv4Addr::new(10, 99, 0, 1), Ipv4Addr::new(10, 99, 0, 2));
        let (device, _) = a.link((at_a.into(), 24), &b, (at_b.into(), 24)).unwrap();
        let listener = b.run(|| TcpListener::bind((at_b, 80))).unwrap().unwrap();
        let accepting = std::thread::spawn(move || listener.accept().map(|(_, peer)| peer.ip()));
        let stream = a.connect(SocketAddr::from((at_b, 80))).unwrap().unwrap();
        assert_eq!(accepting.join().unwrap().unwrap(), at_a);
        assert_eq!(stream.peer_addr().unwrap().ip(), at_b);
        let mut child = Command::new("cat");
        let child = a.spawn(child.arg("/proc/net/dev").stdout(std::process::Stdio::piped())).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains(&device));
    }

    #[tokio::test]
    async fn what_runs_on_its_runtime_is_inside_and_a_panic_inside_is_an_error() {
        let Some(netns) = namespace("runtime") else { return };
        let runtime = netns.runtime().unwrap();
        let bound = runtime.run(tokio::net::TcpListener::bind("127.0.0.1:1")).await.unwrap().unwrap();
        assert!(std::net::TcpStream::connect("127.0.0.1:1").is_err());
        netns.connect("127.0.0.1:1".parse().unwrap()).unwrap().unwrap();
        drop(bound);
        let panicked = netns.run(|| assert!(netns.name().is_empty(), "on purpose")).unwrap_err();
        assert!(panicked.to_string().contains("on purpose"), "{panicked}");
    }
}

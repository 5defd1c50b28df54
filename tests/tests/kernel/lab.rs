//! Where these tests run: network namespaces, child processes, and what `ip` and `bpftool` say.
//!
//! A namespace lives as long as a thread of the test, so that none is left over, whatever happens.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use kvlb::kernel::{Config, Error, Kernel};
use kvlb_tests::harness::skips;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Pid, geteuid, gettid};
use serde_json::Value;

/// A network namespace and a pin directory of a test's own.
pub(crate) struct Lab {
    namespace: Namespace,
    pins: PathBuf,
}

impl Lab {
    /// Nothing, with the reason printed, where this machine does not let the test make one.
    pub(crate) fn new() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !geteuid().is_root() {
            return skip("needs root");
        }
        let namespace = match Namespace::new() {
            Ok(namespace) => namespace,
            Err(error) => return skip(&format!("no network namespace: {error}")),
        };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let pins = PathBuf::from(format!("/sys/fs/bpf/kvlb-test-{}-{number}", std::process::id()));
        let probe = Config { pin_dir: pins.clone(), ..Config::default() };
        match namespace.run(move || Kernel::load(&probe).and_then(Kernel::shutdown)) {
            Err(error @ Error::Privileges { .. }) => skip(&error.to_string()),
            other => {
                other.unwrap();
                skips::ran();
                Some(Self { namespace, pins })
            }
        }
    }

    /// Runs `test` in the namespace.
    pub(crate) fn run(self, test: impl FnOnce(&Inside) + Send + 'static) {
        let inside = Inside { pins: self.pins };
        self.namespace.run(move || test(&inside));
    }

    /// What a shell command prints inside.
    pub(crate) fn sh(&self, command: &str) -> String {
        let command = command.to_owned();
        self.namespace.run(move || sh(&command))
    }

    /// Another namespace, joined to this one by a cable: `lan` here, `wan` there.
    pub(crate) fn neighbour(&self, here: &str, there: &str) -> Namespace {
        let neighbour = Namespace::new().unwrap();
        let id = neighbour.thread_id;
        let add = format!("ip link add lan type veth peer name wan netns {id}");
        let here = format!("ip addr add {here} dev lan && ip link set lan up");
        let there = format!("ip addr add {there} dev wan && ip link set wan up");
        self.namespace.run(move || sh(&add) + &sh(&here));
        neighbour.run(move || sh(&there));
        neighbour
    }
}

/// What a test sees from inside its namespace.
pub(crate) struct Inside {
    pub(crate) pins: PathBuf,
}

impl Inside {
    pub(crate) fn load(&self) -> Kernel {
        Kernel::load(&Config { pin_dir: self.pins.clone(), ..Config::default() }).unwrap()
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        // What a failed test has left; mostly nothing is there.
        drop(fs::remove_dir_all(&self.pins));
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace: that of one thread, which ends with this value.
pub(crate) struct Namespace {
    jobs: mpsc::Sender<Job>,
    thread_id: Pid,
}

impl Namespace {
    fn new() -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<Job>();
        let (ready, is_ready) = mpsc::channel();
        thread::spawn(move || {
            let entered = unshare(CloneFlags::CLONE_NEWNET).map(|()| gettid());
            ready.send(entered).unwrap();
            for job in inbox {
                job();
            }
        });
        let thread_id = is_ready.recv().unwrap()?;
        let namespace = Self { jobs, thread_id };
        namespace.run(|| sh("ip link set lo up"));
        Ok(namespace)
    }

    /// Runs `job` inside; its panic is ours.
    pub(crate) fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, is_done) = mpsc::channel();
        let job = move || done.send(catch_unwind(AssertUnwindSafe(job))).unwrap();
        self.jobs.send(Box::new(job)).unwrap();
        is_done.recv().unwrap().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Tells a child process of these tests where its pins are; tests that only a child is to run do nothing without it.
const PINS: &str = "KERNEL_TEST_PINS";

/// A child process that runs one test of this file.
pub(crate) struct Child {
    process: std::process::Child,
    output: BufReader<ChildStdout>,
}

impl Child {
    /// Starts this test program by `command`, which may end in arguments of another one (`setpriv ...`).
    pub(crate) fn start(mut command: Command, test: &str, pins: &Path) -> Self {
        command.args(["--exact", test, "--nocapture"]).env(PINS, pins);
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, output }
    }

    /// The rest of the first line that has `mark`.
    pub(crate) fn wait_for(&mut self, mark: &str) -> String {
        for line in (&mut self.output).lines() {
            if let Some((_, rest)) = line.unwrap().split_once(mark) {
                return rest.trim().to_owned();
            }
        }
        panic!("the child ended without {mark:?}");
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Kills it.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// All that it says until it ends.
    pub(crate) fn finish(mut self) -> String {
        let output = io::read_to_string(&mut self.output).unwrap();
        self.process.wait().unwrap();
        output
    }
}

/// This test program.
pub(crate) fn this_program() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// Lets a child hold the kernel, kills it, and returns the id of its program.
pub(crate) fn kill_holder(pins: &Path) -> u32 {
    let mut child = Child::start(Command::new(this_program()), "child_that_holds", pins);
    let program = child.wait_for("holding ").parse().unwrap();
    assert!(is_loaded(program));
    child.kill();
    program
}

/// What [`Child::start`] said; nothing in a run of all tests.
#[expect(clippy::disallowed_methods, reason = "a test talks to its own child, not to the daemon")]
pub(crate) fn pin_dir_from_parent() -> Option<PathBuf> {
    std::env::var_os(PINS).map(PathBuf::from)
}

/// Writes a line for the parent, past the test harness.
pub(crate) fn tell(line: &str) {
    let mut out = io::stdout();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

/// Says why a test does not run.
fn skip<T>(reason: &str) -> Option<T> {
    skips::skipped(thread::current().name().unwrap_or("a test"), reason);
    None
}

/// What a shell command prints.
pub(crate) fn sh(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command}: {err} (`cargo xtask setup network` installs what is missing)");
    out.into_owned()
}

/// All that is local in this namespace.
pub(crate) fn local_table() -> String {
    sh("ip route show table local; ip -6 route show table local")
}

/// The local routes that a kvlb added.
pub(crate) fn vip_routes() -> String {
    sh("ip route show table local proto 75")
}

/// Whether a program is still in the kernel, which frees it a moment after its last user has gone.
pub(crate) fn is_loaded(program: u32) -> bool {
    let id = program.to_string();
    let there = || Command::new("bpftool").args(["prog", "show", "id", &id]).output().unwrap().status.success();
    for _ in 0..50 {
        if !there() {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// The entries of a map as bpftool prints them, by field names.
pub(crate) fn dump(pin: &Path) -> Vec<Value> {
    let text = sh(&format!("bpftool --json map dump pinned {}", pin.display()));
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    entries.into_iter().map(|mut entry| entry["formatted"].take()).collect()
}

pub(crate) const TCP: u32 = 6;
pub(crate) const UDP: u32 = 17;

/// The program's answer to a new connection, without one: `BPF_PROG_TEST_RUN`.
pub(crate) fn test_run(program: u32, protocol: u32, to: SocketAddr) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("context");
    fs::write(&file, context(protocol, to)).unwrap();
    let text = sh(&format!("bpftool --json prog run id {program} ctx_in {}", file.display()));
    let answer: Value = serde_json::from_str(&text).unwrap();
    answer["retval"].as_u64().unwrap_or_else(|| panic!("{text}"))
}

/// The admission program's answer to a frame that arrives so often, and the frame as it leaves it: `BPF_PROG_TEST_RUN`.
pub(crate) fn xdp_run(program: u32, frame: &[u8], times: u64) -> (u64, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let (before, after) = (dir.path().join("before"), dir.path().join("after"));
    fs::write(&before, frame).unwrap();
    let files = format!("data_in {} data_out {}", before.display(), after.display());
    let text = sh(&format!("bpftool --json prog run id {program} {files} repeat {times}"));
    let answer: Value = serde_json::from_str(&text).unwrap();
    (answer["retval"].as_u64().unwrap_or_else(|| panic!("{text}")), fs::read(&after).unwrap())
}

/// Nanoseconds that the admission program takes for a frame, on average over a million.
pub(crate) fn xdp_cost(program: u32, frame: &[u8]) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("frame");
    fs::write(&file, frame).unwrap();
    let text = sh(&format!("bpftool --json prog run id {program} data_in {} repeat 1000000", file.display()));
    let answer: Value = serde_json::from_str(&text).unwrap();
    answer["duration"].as_u64().unwrap_or_else(|| panic!("{text}"))
}

/// Whether a program judges frames at a device.
pub(crate) fn has_xdp(device: &str) -> bool {
    sh(&format!("ip link show dev {device}")).contains("prog/xdp")
}

/// A device's hardware address.
pub(crate) fn mac(device: &str) -> [u8; 6] {
    let shown: Value = serde_json::from_str(&sh(&format!("ip -j link show dev {device}"))).unwrap();
    let text = shown[0]["address"].as_str().unwrap();
    let bytes: Vec<_> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// Frames that a device could not send.
pub(crate) fn tx_dropped(device: &str) -> u64 {
    let shown: Value = serde_json::from_str(&sh(&format!("ip -j -s link show dev {device}"))).unwrap();
    shown[0]["stats64"]["tx"]["dropped"].as_u64().unwrap()
}

/// `struct bpf_sk_lookup` (linux/bpf.h) of a connection from 10.77.0.2 or `fd77::2`, port 40000.
fn context(protocol: u32, to: SocketAddr) -> [u8; 72] {
    let mut context = [0; 72];
    let mut put = |offset: usize, bytes: &[u8]| context[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(12, &protocol.to_le_bytes());
    put(36, &40_000u16.to_be_bytes());
    match to.ip() {
        IpAddr::V4(local) => {
            put(8, &2u32.to_le_bytes());
            put(16, &[10, 77, 0, 2]);
            put(40, &local.octets());
        }
        IpAddr::V6(local) => {
            put(8, &10u32.to_le_bytes());
            put(20, &[0xfd, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
            put(44, &local.octets());
        }
    }
    put(60, &u32::from(to.port()).to_le_bytes());
    context
}

/// What `run` logs.
pub(crate) fn captured(run: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);
    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let buffer = Buffer::default();
    let writer = buffer.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    tracing::subscriber::with_default(subscriber, run);
    let bytes = buffer.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

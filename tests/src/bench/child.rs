//! Processes on a core of their own, and the least of HTTP to ask them whether they are there.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::wire::now;

/// How long a proxy may take until it answers: routers in Python take seconds.
const START_LIMIT: Duration = Duration::from_secs(40);
/// How long one may take to end once it is asked to.
const STOP_LIMIT: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Two cores: one for the proxy alone, and one for all else.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cores {
    pub(super) others: usize,
    pub(super) proxy: usize,
}

impl Cores {
    /// The first and the last that this process may use.
    pub(super) fn find() -> anyhow::Result<Self> {
        let set = sched_getaffinity(Pid::from_raw(0)).context("ask for the cores")?;
        let mut cores = (0..CpuSet::count()).filter(|core| set.is_set(*core).unwrap_or_default());
        match (cores.next(), cores.next_back()) {
            (Some(others), Some(proxy)) => Ok(Self { others, proxy }),
            _ => bail!("the bench needs two cores, one for the proxy alone, and this process has one"),
        }
    }
}

/// One process, ended by its id when dropped, and by the kernel should we be killed.
#[derive(Debug)]
pub(super) struct Running {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Starts it on `core`, with its output in `log`.
    pub(super) fn start(mut command: Command, core: usize, log: &Path) -> anyhow::Result<Self> {
        let name = log.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let file = File::create(log).with_context(|| format!("open {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        pin(&mut command, core)?;
        let child = command.spawn().with_context(|| format!("start {name}"))?;
        Ok(Self { name, child, log: log.to_owned() })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `check` holds.
    pub(super) fn wait_until(&mut self, mut check: impl FnMut() -> bool) -> anyhow::Result<()> {
        let deadline = now() + u64::try_from(START_LIMIT.as_nanos())?;
        while !check() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended while starting, with {status}: {}", self.name, self.last_words());
            }
            ensure!(now() < deadline, "{} did not answer within {START_LIMIT:?}: {}", self.name, self.last_words());
            sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// That it still runs.
    pub(super) fn must_run(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("{} ended, with {status}: {}", self.name, self.last_words()),
            None => Ok(()),
        }
    }

    fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(8)..].join(" | ")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Ok(pid) = i32::try_from(self.child.id()) else { return };
        let asked = kill(Pid::from_raw(pid), Signal::SIGTERM).is_ok();
        let mut left = STOP_LIMIT;
        while asked && !left.is_zero() {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            sleep(LOOK_EVERY);
            left = left.saturating_sub(LOOK_EVERY);
        }
        if self.child.kill().is_ok() {
            let _reaped = self.child.wait();
        }
    }
}

/// Has a command run on one core, and end with us.
pub(super) fn pin(command: &mut Command, core: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(core).context("name the core")?;
    beforehand(command, move || {
        sched_setaffinity(Pid::from_raw(0), &set)?;
        set_pdeathsig(Signal::SIGKILL)
    });
    Ok(())
}

/// Has the kernel end a command when we end.
pub(super) fn end_with_us(command: &mut Command) {
    beforehand(command, || set_pdeathsig(Signal::SIGKILL));
}

fn beforehand(command: &mut Command, calls: impl Fn() -> nix::Result<()> + Send + Sync + 'static) {
    #[expect(unsafe_code, reason = "a child asks for its core and its end before it becomes another program")]
    // SAFETY: both callers make system calls only, which are async-signal-safe and touch no memory of the parent.
    unsafe {
        command.pre_exec(move || Ok(calls()?));
    }
}

/// One request on a connection of its own: status and body.
pub(super) fn ask(to: SocketAddr, method: &str, path: &str, body: &str) -> anyhow::Result<(u16, String)> {
    let limit = Duration::from_secs(5);
    let mut socket = TcpStream::connect_timeout(&to, limit)?;
    socket.set_read_timeout(Some(limit))?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(format!("{head}{body}").as_bytes())?;
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").context("read a head")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("read a status")?;
    Ok((status, body.to_owned()))
}

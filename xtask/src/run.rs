//! Where the workspace is, and how a chore runs another program.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    // This crate is a folder of the workspace.
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or_else(|| Path::new(".")).to_path_buf()
}

/// The environment variable `name`, if it is set and not empty.
#[expect(clippy::disallowed_methods, reason = "a chore is no part of the daemon, whose environment only config reads")]
pub(crate) fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The cargo that runs this chore.
pub(crate) fn cargo() -> Command {
    Command::new(variable("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// The first file of that name on `PATH`.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    let path = variable("PATH").unwrap_or_default();
    // A login shell of root has these, `su` and some services do not.
    let sbin = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(sbin).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// Runs `command` to its end, with its output on ours.
///
/// # Errors
/// When it cannot be started or does not exit with 0.
pub(crate) fn done(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("start {name}"))?;
    ensure!(status.success(), "{name}: {status}");
    Ok(())
}

/// What `command` prints, without the last line's end; nothing when it cannot be started or fails.
pub(crate) fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The time, for deadlines.
#[expect(clippy::disallowed_methods, reason = "a chore is no part of the daemon, whose clock is one module's")]
pub(crate) fn now() -> std::time::Instant {
    std::time::Instant::now()
}

/// Runs this chore again in a network namespace without a name, which ends with the last process in it; `inside` is the
/// variable that tells it where it is. Ends this process with the chore's exit code unless that is 0.
///
/// # Errors
/// When there can be no namespace, or a signal ended the chore.
pub(crate) fn in_namespace(inside: &str) -> Result<()> {
    let again = std::env::current_exe().context("find this program")?;
    let status = Command::new("unshare")
        .args(["--net", "--mount", "--propagation", "private", "--"])
        .arg(again)
        .args(std::env::args_os().skip(1))
        .env(inside, "1")
        .status()
        .context("enter a new network namespace (unshare)")?;
    match status.code() {
        Some(0) => Ok(()),
        Some(code) => std::process::exit(code),
        None => bail!("this chore was ended by a signal: {status}"),
    }
}

/// One process that a chore started, ended by its id when dropped.
pub(crate) struct Running {
    pub(crate) child: Child,
    log: PathBuf,
}

impl Running {
    pub(crate) fn start(mut command: Command, log: &Path) -> Result<Self> {
        let file = File::create(log).context("open a log")?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let name = command.get_program().to_string_lossy().into_owned();
        #[expect(unsafe_code, reason = "the child asks to be ended with its parent before it becomes another program")]
        // SAFETY: prctl is async-signal-safe and touches no memory of the parent.
        unsafe {
            command.pre_exec(|| set_pdeathsig(Signal::SIGKILL).map_err(std::io::Error::from));
        }
        let child = command.spawn().with_context(|| format!("start {name}"))?;
        Ok(Self { child, log: log.to_owned() })
    }

    /// Waits for the line that says that the process is ready.
    pub(crate) fn first_line(&mut self) -> Result<String> {
        let stdout = self.child.stdout.take().context("take the output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).context("read the output")?;
        ensure!(!line.is_empty(), "it ended: {}", fs::read_to_string(&self.log).unwrap_or_default().trim());
        Ok(line)
    }

    /// All that it prints until it ends, which it must do by itself.
    pub(crate) fn output(&mut self) -> Result<String> {
        let mut text = String::new();
        let mut stdout = self.child.stdout.take().context("take the output")?;
        stdout.read_to_string(&mut text).context("read the output")?;
        self.child.wait().context("wait for its end")?;
        Ok(text)
    }

    /// Shows the end of its log.
    pub(crate) fn show_log(&self) {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        println!("-- {}", self.log.file_name().unwrap_or_default().to_string_lossy());
        for line in &lines[lines.len().saturating_sub(30)..] {
            println!("   {line}");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Ok(pid) = i32::try_from(self.child.id()) else { return };
        let asked = kill(Pid::from_raw(pid), Signal::SIGTERM).is_ok();
        let deadline = now() + Duration::from_secs(5);
        while asked && now() < deadline {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if self.child.kill().is_ok() {
            let _reaped = self.child.wait();
        }
    }
}

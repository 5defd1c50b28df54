//! Where the workspace is, and how a chore runs another program.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

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

//! Whether this machine gives the kernel's share what it needs, asked before a start.
//!
//! Changes nothing: programs are loaded and verified, and gone again; nothing is attached, pinned or mounted.

use std::fs;
use std::io;
use std::path::Path;

use aya::EbpfError;
use aya::programs::{ProgramError, SkLookup};
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::{InterfaceFlags, if_nametoindex};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::utsname::uname;
use nix::unistd::AccessFlags;

use super::pins::{BPFFS, PINS, is_bpffs};
use super::{Config, Error, PROGRAM, admission, driver, error, holders, programs};

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It is as it should be.
    Ok,
    /// It will do, and could be better.
    Warn,
    /// Something does not work for this.
    Fail,
}

impl Verdict {
    /// The word for it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        }
    }
}

/// What one check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at, in a word or two.
    pub check: &'static str,
    /// How it came out.
    pub verdict: Verdict,
    /// What there is.
    pub found: String,
    /// What to do; empty where nothing is to be done.
    pub advice: String,
}

impl Finding {
    /// All is well.
    pub fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Ok, found: found.into(), advice: String::new() }
    }

    /// It will do.
    pub fn warn(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Warn, found: found.into(), advice: advice.into() }
    }

    /// It does not work.
    pub fn fail(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Fail, found: found.into(), advice: advice.into() }
    }
}

/// `CAP_NET_ADMIN`, `CAP_SYS_ADMIN` and `CAP_BPF` (linux/capability.h).
const NET_ADMIN: (u32, &str) = (12, "CAP_NET_ADMIN");
const SYS_ADMIN: u32 = 21;
const BPF: (u32, &str) = (39, "CAP_BPF");

/// The first Linux that gives what steering needs, its log included; and what admission needs.
const STEERS: (u32, u32) = (5, 9);
const ADMITS: (u32, u32) = (5, 18);
/// From this one on maps count as memory of the process's cgroup rather than as locked memory.
const COUNTS_MEMORY: (u32, u32) = (5, 11);

/// All checks of the kernel's share.
pub fn examine(config: &Config) -> Vec<Finding> {
    let mut findings = vec![version(config), privileges(), bpffs(&config.pin_dir), pin_dir(&config.pin_dir), memlock()];
    findings.push(loads(config));
    findings.push(loopback());
    findings.extend(config.xdp_devices.iter().map(|device| at_device(device)));
    findings
}

/// Linux's version, as far as it is compared.
fn release() -> Option<(u32, u32)> {
    let name = uname().ok()?;
    let mut parts = name.release().to_str()?.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

fn version(config: &Config) -> Finding {
    const CHECK: &str = "kernel";
    let Some(release) = release() else {
        return Finding::warn(CHECK, "its version cannot be read", "nothing: what counts is whether the programs load");
    };
    let (major, minor) = release;
    let found = format!("Linux {major}.{minor}");
    if release < STEERS {
        return Finding::fail(CHECK, found, "Linux 5.9 steers; `--datapath none` binds the VIPs instead");
    }
    if release < ADMITS && !config.xdp_devices.is_empty() {
        return Finding::fail(CHECK, found, "--xdp-dev needs Linux 5.18: leave it out, or take a later kernel");
    }
    Finding::ok(CHECK, found)
}

/// The effective capabilities of this process.
fn capabilities() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

fn privileges() -> Finding {
    const CHECK: &str = "privileges";
    let Some(held) = capabilities() else {
        return Finding::warn(CHECK, "they cannot be read", "nothing: what counts is whether the programs load");
    };
    let has = |number: u32| held & (1 << number) != 0;
    let missing: Vec<_> = [BPF, NET_ADMIN]
        .into_iter()
        .filter(|(number, _)| !(has(*number) || *number == BPF.0 && has(SYS_ADMIN)))
        .collect();
    if missing.is_empty() {
        return Finding::ok(CHECK, "CAP_BPF and CAP_NET_ADMIN");
    }
    let names: Vec<_> = missing.iter().map(|(_, name)| *name).collect();
    let advice = "run as root, or by a unit with AmbientCapabilities=CAP_BPF CAP_NET_ADMIN (docs/kernel.md); \
                  `--datapath none` needs neither";
    Finding::fail(CHECK, format!("without {}", names.join(" and ")), advice)
}

fn bpffs(pin_dir: &Path) -> Finding {
    const CHECK: &str = "bpf file system";
    let shown = pin_dir.display();
    if is_bpffs(pin_dir) {
        let there = pin_dir.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(pin_dir);
        let writable = nix::unistd::access(there, AccessFlags::W_OK).is_ok();
        return if writable {
            Finding::ok(CHECK, format!("{shown} can be made and written"))
        } else {
            let advice = format!(
                "`chown` {} to the user of kvlb, or choose a --pin-dir below one that is its own",
                there.display()
            );
            Finding::fail(CHECK, format!("{} may not be written", there.display()), advice)
        };
    }
    let mount = "`mount -t bpf bpf /sys/fs/bpf` (by systemd: sys-fs-bpf.mount)";
    if !pin_dir.starts_with(BPFFS) {
        return Finding::fail(
            CHECK,
            format!("{shown} is not on one"),
            format!("a --pin-dir below {BPFFS}, or {mount}"),
        );
    }
    if capabilities().is_some_and(|held| held & (1 << SYS_ADMIN) != 0) {
        return Finding::ok(CHECK, format!("{BPFFS} is not mounted: kvlb does that"));
    }
    Finding::fail(CHECK, format!("{BPFFS} is not mounted, which takes CAP_SYS_ADMIN"), mount)
}

fn pin_dir(pin_dir: &Path) -> Finding {
    const CHECK: &str = "pin directory";
    let holders: Vec<_> = holders(pin_dir).iter().map(ToString::to_string).collect();
    if !holders.is_empty() {
        let found = format!("{} is held by process {}", pin_dir.display(), holders.join(", "));
        return Finding::fail(CHECK, found, "`kvlb up --takeover` takes over from it, `kvlb down` stops it");
    }
    let left = PINS.iter().filter(|name| pin_dir.join(name).exists()).count();
    if left > 0 {
        let found = format!("{} has {left} pins of a kvlb that is gone", pin_dir.display());
        return Finding::warn(CHECK, found, "nothing: the next start replaces them; `kvlb down` removes them");
    }
    Finding::ok(CHECK, format!("{} is free", pin_dir.display()))
}

fn memlock() -> Finding {
    const CHECK: &str = "locked memory";
    let (soft, _) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap_or((RLIM_INFINITY, RLIM_INFINITY));
    let shown = if soft == RLIM_INFINITY { "unlimited".to_owned() } else { format!("{} KiB", soft >> 10) };
    if soft == RLIM_INFINITY || release().is_some_and(|release| release >= COUNTS_MEMORY) {
        let counts = if soft == RLIM_INFINITY { "" } else { ", which this kernel does not count maps against" };
        return Finding::ok(CHECK, format!("{shown}{counts}"));
    }
    Finding::fail(
        CHECK,
        format!("{shown}, and maps need 16 MiB"),
        "`ulimit -l unlimited`, or LimitMEMLOCK=infinity in the unit",
    )
}

/// Hands the programs to the kernel, which verifies them, and lets them go again.
fn loads(config: &Config) -> Finding {
    const CHECK: &str = "programs";
    let run = || -> Result<(), Error> {
        // The maps have to be there until the program is.
        let mut loaded = programs(config, None)?;
        let program = loaded.ebpf.program_mut(PROGRAM).ok_or(ProgramError::NotLoaded);
        let load = |program: &mut aya::programs::Program| -> Result<(), EbpfError> {
            let program: &mut SkLookup = program.try_into()?;
            Ok(program.load()?)
        };
        program.map_err(EbpfError::from).and_then(load).map_err(error::from_program)
    };
    let which = if config.xdp_devices.is_empty() { "steering" } else { "steering and admission" };
    match run() {
        Ok(()) => Finding::ok(CHECK, format!("the kernel takes {which}")),
        Err(error @ Error::Privileges { .. }) => Finding::fail(CHECK, "not tried", error.to_string()),
        Err(error) => {
            let mut found = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                found = format!("{found}: {error}");
                cause = error.source();
            }
            Finding::fail(CHECK, found, "`--datapath none` goes without; please report what the verifier says")
        }
    }
}

fn loopback() -> Finding {
    const CHECK: &str = "lo";
    let flags = getifaddrs().ok().and_then(|mut all| all.find(|at| at.interface_name == "lo")).map(|lo| lo.flags);
    match flags {
        Some(flags) if flags.contains(InterfaceFlags::IFF_UP) => Finding::ok(CHECK, "up"),
        _ => Finding::fail(CHECK, "down in this network namespace, and local routes lead there", "`ip link set lo up`"),
    }
}

fn at_device(device: &str) -> Finding {
    const CHECK: &str = "device";
    if let Err(error) = admission::check(std::slice::from_ref(&device.to_owned())) {
        return Finding::fail(CHECK, error.to_string(), "another --xdp-dev, or none");
    }
    match if_nametoindex(device).map_err(io::Error::from).and_then(driver::takes_programs) {
        Ok(true) => Finding::ok(CHECK, format!("{device}: its driver takes XDP programs (native)")),
        Ok(false) => {
            let advice = "nothing, where that is enough: a flood costs some memory per frame before it is dropped";
            Finding::warn(CHECK, format!("{device}: its driver does not take XDP programs (generic)"), advice)
        }
        Err(error) if error.raw_os_error() == Some(Errno::EPERM as i32) => {
            Finding::warn(CHECK, format!("{device}: {error}"), "run as kvlb will")
        }
        Err(error) => {
            let advice = "nothing: kvlb tries its driver first, and `get status` shows the mode";
            Finding::warn(
                CHECK,
                format!("{device}: the kernel does not say whether its driver takes programs ({error})"),
                advice,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_version_and_capabilities() {
        assert!(release().is_some_and(|release| release >= STEERS));
        assert!(capabilities().is_some());
    }

    #[test]
    fn a_pin_directory_elsewhere_comes_with_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let finding = bpffs(&dir.path().join("pins"));
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.advice.contains("mount -t bpf"), "{finding:?}");
        assert_eq!(pin_dir(&dir.path().join("pins")).verdict, Verdict::Ok);
        assert_eq!(at_device("kvlb-no-such").verdict, Verdict::Fail);
    }
}

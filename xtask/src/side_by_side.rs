//! `cargo xtask side-by-side`: kvlb and other routers in front of the same simulated engines, under the same load.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::run::{cargo, done, in_namespace, root, variable};
use crate::setup;

/// Set for the child that runs inside the namespace.
const INSIDE: &str = "SIDE_BY_SIDE_INSIDE";

/// The releases that docs/policy.md compares with. The last comes without what it asks for: its select service needs none.
const PACKAGES: [&str; 2] = ["vllm-router==0.1.17", "ai-dynamo-runtime==1.6.1"];
const BARE_PACKAGES: [&str; 1] = ["ai-dynamo==1.6.1"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Install vllm-router and Dynamo's select service from PyPI into target/peers/venv
    #[arg(long)]
    install: bool,
    /// What to run, such as --rounds 5 --workloads groups,chats --only kvlb,dynamo --modes hard,cost --json FILE; `-- --help` tells
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let rest: Vec<_> = args.rest.iter().filter(|word| *word != "--install").collect();
    if variable(INSIDE).is_some() {
        done(Command::new("ip").args(["link", "set", "lo", "up"])).context("bring up the loopback device")?;
        let mut script = Command::new("python3");
        return done(script.arg(root().join("scripts/side-by-side.py")).args(rest)).context("compare");
    }
    ensure!(nix::unistd::geteuid().is_root(), "this chore makes a network namespace: run it as root");
    setup::build().context("set up what the build needs")?;
    setup::network().context("set up what the network namespace needs")?;
    if args.install || rest.len() < args.rest.len() {
        setup::python_packages("target/peers/venv", &PACKAGES, &BARE_PACKAGES)
            .context("install vllm-router and Dynamo")?;
    }
    let mut build = cargo();
    // The whole workspace, so that kvlb is built as it is shipped.
    build.args(["build", "--workspace", "--exclude", "kvlb-ebpf", "--bins", "--release"]);
    done(build.current_dir(root())).context("build kvlb and the simulated engine")?;
    in_namespace(INSIDE)
}

//! `cargo xtask chaos`: engines killed, stopped, slowed and broken at random under many clients, with the engines' own logs
//! as the judge.

use anyhow::{Context, Result};

use crate::run::{cargo, done, root};
use crate::setup;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build and trouble an optimised kvlb
    #[arg(long)]
    release: bool,
    /// How long, in seconds
    #[arg(long, default_value_t = 300)]
    seconds: u32,
    /// Clients at a time
    #[arg(long, default_value_t = 500)]
    clients: u32,
    /// Simulated engines
    #[arg(long, default_value_t = 6)]
    engines: u32,
    /// Half of the engines compute prompts, the others fetch the blocks and generate
    #[arg(long)]
    pd: bool,
    /// Where all chance comes from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Passed on to `kvlb up`, such as --io epoll
    #[arg(last = true)]
    rest: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    setup::build().context("set up what the build needs")?;
    let mut build = cargo();
    // The whole workspace, so that nothing is built in another way than for the tests.
    build.args(["build", "--workspace", "--exclude", "kvlb-ebpf", "--bins"]);
    if args.release {
        build.arg("--release");
    }
    done(build.current_dir(root())).context("build kvlb and the storm")?;
    let profile = if args.release { "release" } else { "debug" };
    let mut storm = std::process::Command::new(root().join("target").join(profile).join("chaos"));
    for (flag, value) in [("--seconds", args.seconds), ("--clients", args.clients), ("--engines", args.engines)] {
        storm.arg(flag).arg(value.to_string());
    }
    if args.pd {
        storm.arg("--pd");
    }
    storm.args(["--seed", &args.seed.to_string(), "--"]).args(&args.rest);
    done(&mut storm).context("the storm found something wrong")
}

//! `cargo xtask sim`: kvlb's own router and policy, and models of others, against modelled engines in virtual time.

use std::process::Command;

use anyhow::{Context, Result};

use crate::run::{cargo, done, root};
use crate::setup;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run what is built without optimising: it is built sooner, and runs some ten times as long
    #[arg(long)]
    debug: bool,
    /// What to run, such as --workload groups,chats --policy hard,dynamo --fault slow --seeds 5 --json FILE --svg DIRECTORY, or --storm 256; `-- --help` tells
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    // Behind the first flag of the simulator it is one of the rest.
    let (debug, rest): (Vec<_>, Vec<_>) = args.rest.iter().partition(|word| *word == "--debug");
    setup::build().context("set up what the build needs")?;
    let mut build = cargo();
    // The whole workspace, so that nothing is built in another way than for the bench and the tests.
    build.args(["build", "--workspace", "--exclude", "kvlb-ebpf", "--bins"]);
    let optimised = !args.debug && debug.is_empty();
    if optimised {
        build.arg("--release");
    }
    done(build.current_dir(root())).context("build the simulator")?;
    let profile = if optimised { "release" } else { "debug" };
    let mut sim = Command::new(root().join("target").join(profile).join("sim"));
    done(sim.args(rest))
        .context("something happened that must not, or the simulator was asked for what it does not know")
}

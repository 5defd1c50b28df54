//! `cargo xtask demo`: the main job in front of your eyes.
//!
//! Brings up kvlb in a network namespace of its own with three simulated engines behind a VIP, sends cold and warm
//! requests, and shows who answered, what overlapped and which counters moved. It exits with 0 only if both proofs hold
//! for every warm request (the answer names the endpoint that holds the blocks, and that endpoint's counter moved) and no endpoint's
//! contract is broken. Then the same engines are split into prefill and decode, and the prefill engine that holds the blocks is killed.
//!
//! The namespace has no name: it ends with the last process in it, and so does everything else that the demo makes.

mod ask;
mod children;
mod legs;
mod steps;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::run::{cargo, done, in_namespace, root, variable};
use crate::setup;

/// Set for the child that runs inside the namespace.
const INSIDE: &str = "DEMO_INSIDE";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Break one leg of the contract on the engines' side; the demo then fails and names it. All but `events` are healed on the way:
    /// warm requests hit all the same
    #[arg(long = "break", value_enum)]
    broken: Option<Leg>,
    /// How VIP traffic reaches kvlb: through the kernel (auto) or sockets bound to the VIP (none)
    #[arg(long, default_value = "auto")]
    datapath: String,
    /// Build and run optimised binaries
    #[arg(long)]
    release: bool,
}

/// A leg of the contract between kvlb and an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Leg {
    /// The engines' PYTHONHASHSEED is another than kvlb's
    Seed,
    /// The engines' --block-size is another than the rule's
    BlockSize,
    /// The engines' --prefix-caching-hash-algo is another than the rule's
    Algo,
    /// The engines publish no events
    Events,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if variable(INSIDE).is_some() {
        return inside(args);
    }
    ensure!(
        nix::unistd::geteuid().is_root(),
        "the demo makes a network namespace and loads kernel programs: run it as root (sudo cargo xtask demo)"
    );
    setup::build().context("set up what the build needs")?;
    setup::network().context("set up what the demo needs")?;
    println!("== building kvlb and the simulated engine");
    let mut build = cargo();
    build.current_dir(root()).args(["build", "-p", "kvlb", "-p", "kvlb-tests", "--bins"]);
    if args.release {
        build.arg("--release");
    }
    done(&mut build).context("build kvlb and the simulated engine")?;
    in_namespace(INSIDE)
}

fn inside(args: &Args) -> Result<()> {
    done(Command::new("ip").args(["link", "set", "lo", "up"])).context("bring up the loopback device")?;
    let profile = if args.release { "release" } else { "debug" };
    let mut stage = children::Stage::set(&root().join("target").join(profile), &args.datapath, args.broken)?;
    let mut verdict = steps::play(&stage, args.broken);
    if verdict.is_ok() && args.broken.is_none() {
        verdict = legs::play(&mut stage);
    }
    if verdict.is_err() {
        stage.show_logs();
    }
    verdict
}

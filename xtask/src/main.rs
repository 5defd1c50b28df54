//! Every chore of kvlb, as `cargo xtask NAME`: one file per chore.

#![expect(clippy::print_stdout, reason = "a chore speaks to the person who runs it")]

mod api;
mod bench;
mod chaos;
mod clients;
mod coverage;
mod demo;
mod ebpf;
mod fuzz;
mod run;
mod setup;
mod side_by_side;
mod sim;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The chores of kvlb's workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Compare what kvlb and other proxies cost for the same work
    Bench(bench::Args),
    /// Rebuild the kernel programs, or check that the committed object is theirs
    BuildEbpf(ebpf::Args),
    /// Break simulated engines at random under many clients, and judge what each client was told
    Chaos(chaos::Args),
    /// Send what other people's clients send through kvlb to real llama.cpp servers, and compare what comes back
    Clients(clients::Args),
    /// Show the main job: kvlb in a network namespace of its own with three simulated engines
    Demo(demo::Args),
    /// Look for bytes that kvlb's parsers cannot stand
    Fuzz(fuzz::Args),
    /// Install what building the kernel programs or running the network tests needs and this machine lacks
    Setup(setup::Args),
    /// Compare where kvlb and other routers send the same prompts, in front of the same simulated engines
    SideBySide(side_by_side::Args),
    /// Run kvlb's router and policy, and models of others, against modelled engines in virtual time
    Sim(sim::Args),
    /// Set up and run every check and test
    Test(test::Args),
}

fn main() -> ExitCode {
    let outcome = match Args::parse().chore {
        Chore::Bench(args) => bench::run(&args),
        Chore::BuildEbpf(args) => ebpf::run(&args),
        Chore::Chaos(args) => chaos::run(&args),
        Chore::Clients(args) => clients::run(&args),
        Chore::Demo(args) => demo::run(&args),
        Chore::Fuzz(args) => fuzz::run(&args),
        Chore::Setup(args) => setup::run(&args),
        Chore::SideBySide(args) => side_by_side::run(&args),
        Chore::Sim(args) => sim::run(&args),
        Chore::Test(args) => test::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // The chain of causes says where a chore failed; a backtrace only hides it.
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

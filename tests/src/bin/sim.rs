//! kvlb's router and policy, and models of others, against modelled engines in virtual time.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser;
use kvlb_tests::sim::{SimFlags, run};

/// kvlb's router and policy, and models of others, against modelled engines in virtual time.
#[derive(Debug, Parser)]
#[command(about)]
struct Flags {
    #[command(flatten)]
    sim: SimFlags,
}

fn main() -> ExitCode {
    // A closed terminal is no reason to leave files unwritten.
    let say = |line: &str| drop(writeln!(std::io::stdout(), "{line}"));
    match run(&Flags::parse().sim, say) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // The chain of causes says where it failed; a backtrace only hides it.
        Err(error) => {
            let _unsaid = writeln!(std::io::stderr(), "sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

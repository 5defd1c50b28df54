//! What kvlb and other proxies cost for the same work, side by side.

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kvlb_tests::bench::{self, LoadFlags, MockFlags, RunFlags};

/// What kvlb and other proxies cost for the same work, side by side.
#[derive(Debug, Parser)]
#[command(about)]
struct Flags {
    #[command(subcommand)]
    part: Part,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// All proxies in turn, and the comparison
    Run(RunFlags),
    /// An OpenAI-like upstream
    Mock(MockFlags),
    /// A load generator that checks every byte; prints one line of JSON
    Load(LoadFlags),
}

fn main() -> ExitCode {
    match serve() {
        Ok(code) => code,
        // The chain of causes says where it failed; a backtrace only hides it.
        Err(error) => {
            let _unsaid = writeln!(std::io::stderr(), "bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> anyhow::Result<ExitCode> {
    // A closed terminal is no reason to leave the comparison unfinished.
    let say = |line: &str| drop(writeln!(std::io::stdout(), "{line}"));
    match Flags::parse().part {
        Part::Run(flags) => {
            let fine = bench::run(&flags, say)?;
            return Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Part::Mock(flags) => bench::mock(&flags)?,
        Part::Load(flags) => {
            let measured = bench::load(&flags)?;
            say(&serde_json::to_string(&measured)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

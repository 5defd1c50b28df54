//! Troubles engines under many clients, and says what each client got of it.
//!
//! Ends with 0 when nothing was wrong.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use kvlb_tests::chaos::{Plan, run};

/// Engines killed, stopped, slowed and broken at random under many clients; their own logs of each request are the judge.
#[derive(Debug, Parser)]
#[command(about)]
struct Flags {
    /// How long, in seconds
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// Clients at a time
    #[arg(long, default_value_t = 500)]
    clients: usize,
    /// Engines
    #[arg(long, default_value_t = 6)]
    engines: usize,
    /// Half of the engines compute prompts, the others fetch the blocks and generate
    #[arg(long)]
    pd: bool,
    /// Where all chance comes from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Passed on to `kvlb up`
    #[arg(last = true)]
    args: Vec<String>,
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let Flags { seconds, clients, engines, pd, seed, args } = Flags::parse();
    let plan = Plan { length: Duration::from_secs(seconds), clients, engines, pd, seed, args };
    // A closed terminal is no reason to leave processes behind.
    let say = |line: &str| drop(writeln!(std::io::stdout(), "{line}"));
    let report = run(&plan, say).await?;
    say(&report.to_string());
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

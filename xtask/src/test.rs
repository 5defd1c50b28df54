//! `cargo xtask test`: sets up what is missing and runs every check: format, lints, documentation, the kernel object, and
//! all tests, those in network namespaces too.

use anyhow::{Context, Result};

use crate::run::{cargo, done, root};
use crate::{ebpf, setup};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only the tests: no format, lints, documentation or kernel object
    #[arg(long)]
    quick: bool,
    /// Passed on to the test programs, such as part of a test's name
    #[arg(last = true)]
    rest: Vec<String>,
}

/// The members that the host's compiler builds; kvlb-ebpf is for the kernel's machine only.
const HOST: [&str; 3] = ["--workspace", "--exclude", "kvlb-ebpf"];

pub(crate) fn run(args: &Args) -> Result<()> {
    setup::build().context("set up what the build needs")?;
    setup::network().context("set up what the tests need")?;
    if !args.quick {
        checks()?;
    }
    // Tests start the programs themselves, which `cargo test` would not build.
    step("build", cargo().arg("build").args(HOST).arg("--bins"))?;
    step("test", cargo().arg("test").args(HOST).arg("--no-fail-fast").arg("--").args(&args.rest))
}

fn checks() -> Result<()> {
    step("format", cargo().args(["fmt", "--all", "--check"]))?;
    step("lints", cargo().arg("clippy").args(HOST).args(["--all-targets", "--", "-D", "warnings"]))?;
    step("documentation", cargo().arg("doc").args(HOST).arg("--no-deps").env("RUSTDOCFLAGS", "-D warnings"))?;
    setup::ebpf().context("set up what rebuilding the kernel programs needs")?;
    println!("== kernel object");
    ebpf::run(&ebpf::Args::CHECK).context("compare the kernel object with its sources")
}

fn step(name: &str, command: &mut std::process::Command) -> Result<()> {
    println!("== {name}");
    done(command.current_dir(root())).with_context(|| format!("{name} does not pass"))
}

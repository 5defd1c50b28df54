//! `cargo xtask test`: sets up what is missing and runs every check: format, lints, documentation, the kernel object, and
//! all tests, those in network namespaces too.

use std::fs;

use anyhow::{Context, Result, ensure};

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
    let notes = root().join("target/tests-skipped.txt");
    fs::write(&notes, "").context("make a file for the tests that are skipped")?;
    let mut test = cargo();
    test.arg("test").args(HOST).arg("--no-fail-fast").arg("--").args(&args.rest).env(SKIPS, &notes);
    let tested = step("test", &mut test);
    let some_ran = some_ran(&fs::read_to_string(&notes).context("read which tests were skipped")?);
    tested.and(some_ran)
}

/// Tells the tests where to say which of those that need privileges ran, and which did not (`harness::skips`).
const SKIPS: &str = "KVLB_TEST_SKIPS";

/// Shows the tests that were skipped.
///
/// # Errors
/// When none that needs privileges ran: then this run says nothing of what they promise.
fn some_ran(notes: &str) -> Result<()> {
    let skipped: Vec<_> = notes.lines().filter(|line| line.starts_with("skipped")).collect();
    for line in &skipped {
        println!("{line}");
    }
    let ran = notes.lines().count() - skipped.len();
    println!("{ran} tests in namespaces, {} skipped", skipped.len());
    ensure!(skipped.is_empty() || ran > 0, "all tests that need namespaces were skipped: run them as root");
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::some_ran;

    #[test]
    fn a_run_in_which_all_are_skipped_fails_and_one_in_which_there_are_none_does_not() {
        assert!(some_ran("").is_ok() && some_ran("ran\n").is_ok());
        assert!(some_ran("skipped a: needs root\nran\n").is_ok());
        assert!(some_ran("skipped a: needs root\nskipped b: needs root\n").is_err());
    }
}

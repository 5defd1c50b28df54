//! `cargo xtask fuzz`: libFuzzer looks for bytes that kvlb's parsers cannot stand.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::coverage;
use crate::run::{cargo, done, root};
use crate::setup;

const TARGETS: [&str; 5] = ["head", "chunked", "body", "events", "frame"];

/// What tells libFuzzer where execution has come: the instrumentation of LLVM, for which no nightly compiler is needed.
/// Source: LLVM's documentation of its `SanitizerCoverage`.
const INSTRUMENTATION: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1";

/// A mistake to be found: the target that must find it, the file, what stands there, and the mistake.
const PLANTED: [(&str, &str, &str, &str); 5] = [
    (
        "head",
        "kvlb/src/proxy/http/request.rs",
        "let from = self.seen.saturating_sub(3);",
        "let from = self.seen.saturating_sub(0);",
    ),
    ("chunked", "kvlb/src/proxy/http/chunked.rs", "payload += count;", "payload += count.min(300);"),
    ("body", "kvlb/src/openai/body.rs", ".and_then(|()| reader.end())", ""),
    (
        "events",
        "kvlb/src/contract/events.rs",
        "reader.array()?.checked_sub(1).ok_or(ReadError::Type)?",
        "reader.array()? - 1",
    ),
    ("frame", "kvlb-common/src/packet.rs", "self.get(at..)?", "self[at..]"),
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Only this one
    #[arg(long, value_parser = TARGETS)]
    target: Option<String>,
    /// Add what reaches new code to the corpus
    #[arg(long)]
    keep: bool,
    /// Put a mistake into each parser, in a copy of the sources, and see that it is found
    #[arg(long, conflicts_with = "keep")]
    planted: bool,
    /// Only say which lines of the parsers the corpus reaches, with what was found since, and fail where it is 90 % or less
    #[arg(long, conflicts_with_all = ["keep", "planted", "target"])]
    coverage: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    setup::build().context("set up what the build needs")?;
    if args.coverage {
        return coverage::report(&root().join("target/fuzz/work"));
    }
    let chosen = TARGETS.iter().filter(|target| args.target.as_deref().is_none_or(|only| only == **target));
    if args.planted {
        return chosen.copied().try_for_each(|target| find_planted(target, args.seconds));
    }
    let sources = root();
    build(&sources)?;
    for target in chosen {
        println!("== {target}");
        let (work, ended) = fuzz(&sources, target, args.seconds)?;
        ensure!(ended, "{target}: bytes were found, see {}", work.display());
        if args.keep {
            let mut merge = Command::new(program(target));
            merge.arg("-merge=1").arg(sources.join("fuzz/corpus").join(target)).arg(&work);
            done(&mut merge).context("keep what reaches new code")?;
        }
    }
    Ok(())
}

fn program(target: &str) -> std::path::PathBuf {
    root().join("target/fuzz").join(HOST).join("release").join(target)
}

/// Named, so that build scripts and macros are built without instrumentation.
const HOST: &str = "x86_64-unknown-linux-gnu";

fn build(sources: &Path) -> Result<()> {
    println!("== build");
    let mut build = cargo();
    build
        .args(["build", "--release", "--target", HOST])
        .current_dir(sources.join("fuzz"))
        .env("CARGO_TARGET_DIR", root().join("target/fuzz"))
        .env("RUSTFLAGS", INSTRUMENTATION);
    done(&mut build).context("build the fuzz targets")
}

/// Runs a target on a copy of its corpus; says where that is, and whether nothing was found.
fn fuzz(sources: &Path, target: &str, seconds: u32) -> Result<(std::path::PathBuf, bool)> {
    let work = root().join("target/fuzz/work").join(target);
    fs::create_dir_all(&work).context("make a folder for what is found")?;
    let status = Command::new(program(target))
        .args([format!("-max_total_time={seconds}"), "-timeout=10".to_owned(), "-rss_limit_mb=2048".to_owned()])
        .args(["-max_len=8192", "-print_final_stats=1", "-verbosity=0"])
        .arg(format!("-artifact_prefix={}/", work.display()))
        .arg(&work)
        .arg(sources.join("fuzz/corpus").join(target))
        .status()
        .with_context(|| format!("start {target}"))?;
    Ok((work, status.success()))
}

fn find_planted(target: &str, seconds: u32) -> Result<()> {
    let Some((_, file, right, wrong)) = PLANTED.iter().find(|planted| planted.0 == target) else {
        bail!("no mistake is known for {target}")
    };
    println!("== {target}, with a mistake in {file}");
    let copy = root().join("target/fuzz/planted");
    let mut list = Command::new("git");
    list.args(["ls-files", "-z", "--cached"]).current_dir(root());
    let files = list.output().context("list the sources")?.stdout;
    for name in files.split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok()) {
        let wanted = ["kvlb/", "kvlb-common/", "fuzz/", "Cargo."].iter().any(|part| name.starts_with(part));
        if name.is_empty() || !wanted {
            continue;
        }
        let to = copy.join(name);
        fs::create_dir_all(to.parent().unwrap_or(&copy)).context("make a folder of the copy")?;
        let mut bytes = fs::read(root().join(name)).with_context(|| format!("read {name}"))?;
        if name == "Cargo.toml" {
            let text = String::from_utf8(bytes).context("read the workspace")?;
            let line = |line: &str| {
                let members = line.starts_with("members") || line.starts_with("default-members");
                let key = line.split('=').next().unwrap_or_default();
                if members { format!("{key}= [\"kvlb\", \"kvlb-common\"]\n") } else { format!("{line}\n") }
            };
            bytes = text.lines().map(line).collect::<String>().into_bytes();
        }
        if name == *file {
            let text = String::from_utf8(bytes).with_context(|| format!("read {name}"))?;
            ensure!(text.matches(right).count() == 1, "{file} has not one `{right}`");
            bytes = text.replace(right, wrong).into_bytes();
        }
        // What has not changed is not built again.
        if fs::read(&to).ok().as_ref() != Some(&bytes) {
            fs::write(&to, bytes).context("write the copy")?;
        }
    }
    build(&copy)?;
    let (_, ended) = fuzz(&copy, target, seconds)?;
    ensure!(!ended, "{target} did not find the mistake in {seconds} s");
    println!("found");
    Ok(())
}

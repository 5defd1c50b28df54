//! Which lines of a parser its fuzz corpus reaches.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::ebpf::LLVM;
use crate::run::{cargo, done, on_path, root};

/// The parsers, and where they are written.
const PARSERS: [(&str, &[&str]); 5] = [
    ("head", &["kvlb/src/proxy/http/request.rs", "kvlb/src/proxy/http/fields.rs"]),
    ("chunked", &["kvlb/src/proxy/http/chunked.rs"]),
    (
        "body",
        &[
            "kvlb/src/openai/body.rs",
            "kvlb/src/openai/chat.rs",
            "kvlb/src/openai/json.rs",
            "kvlb/src/openai/messages.rs",
            "kvlb/src/openai/mod.rs",
            "kvlb/src/openai/prompt.rs",
            "kvlb/src/openai/responses.rs",
        ],
    ),
    ("events", &["kvlb/src/contract/events.rs", "kvlb/src/contract/msgpack.rs"]),
    ("frame", &["kvlb-common/src/packet.rs"]),
];

/// The unit test that runs the corpus, with what `more` holds besides: one folder a target.
const TEST: &str = "fuzzing::tests::what_was_found_holds";
/// Where that test finds more than the corpus.
const MORE: &str = "KVLB_FUZZ_MORE";
/// The share of a parser's lines that must be reached.
const ENOUGH: f64 = 0.9;

/// Measures, and says which lines are not reached.
///
/// # Errors
/// When too few are, or LLVM's tools are missing.
pub(crate) fn report(more: &Path) -> Result<()> {
    let work = root().join("target/fuzz/coverage");
    fs::create_dir_all(&work).context("make a folder for the counts")?;
    let test = instrumented()?;
    let raw = work.join("corpus.profraw");
    let mut run = Command::new(&test);
    run.args(["--exact", TEST]).current_dir(root().join("kvlb")).env("LLVM_PROFILE_FILE", &raw).env(MORE, more);
    done(&mut run).context("run the corpus")?;
    let merged = work.join("corpus.profdata");
    done(Command::new(tool("llvm-profdata")?).args(["merge", "-sparse"]).arg(&raw).arg("-o").arg(&merged))?;
    let mut export = Command::new(tool("llvm-cov")?);
    export.args(["export", "-format=lcov"]).arg(&test).arg(format!("-instr-profile={}", merged.display()));
    let lcov = export.output().context("start llvm-cov")?;
    ensure!(lcov.status.success(), "llvm-cov: {}", String::from_utf8_lossy(&lcov.stderr));
    let lcov = String::from_utf8_lossy(&lcov.stdout);
    let mut short = Vec::new();
    for (parser, files) in PARSERS {
        let (mut lines, mut reached) = (0, 0);
        for file in files {
            let path = root().join(file);
            let source = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            let (all, missed) = counts(&lcov, &path, end_of_code(&source));
            println!("{file}: {} of {all} lines; not {missed:?}", all - missed.len());
            lines += all;
            reached += all - missed.len();
        }
        #[expect(clippy::cast_precision_loss, reason = "files are short")]
        let share = reached as f64 / lines as f64;
        println!("== {parser}: {:.1} % of {lines} lines", share * 100.0);
        if share <= ENOUGH {
            short.push(parser);
        }
    }
    ensure!(short.is_empty(), "the corpus reaches too little of {}", short.join(", "));
    Ok(())
}

/// The test program of kvlb's library, with the instrumentation in it: the wrapper is for the crates of the workspace only, so that
/// nothing else is built anew.
fn instrumented() -> Result<PathBuf> {
    let mut build = cargo();
    build
        .args(["test", "--workspace", "--exclude", "kvlb-ebpf", "--lib", "--no-run", "--message-format=json"])
        .current_dir(root())
        .env("RUSTC_WORKSPACE_WRAPPER", root().join("scripts/with-coverage.sh"))
        .stderr(std::process::Stdio::inherit());
    let output = build.output().context("build the tests")?;
    ensure!(output.status.success(), "the tests do not build");
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let of_kvlb =
        lines.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()).find_map(|line| {
            let is_kvlb = line["target"]["name"] == "kvlb" && line["target"]["kind"][0] == "lib";
            line["executable"].as_str().filter(|_| is_kvlb).map(PathBuf::from)
        });
    of_kvlb.context("find the test program")
}

/// A tool of the LLVM that the compiler is made with.
fn tool(name: &str) -> Result<PathBuf> {
    let own = Path::new("/usr/lib").join(format!("llvm-{LLVM}")).join("bin").join(name);
    if own.is_file() {
        return Ok(own);
    }
    on_path(&format!("{name}-{LLVM}"))
        .or_else(|| on_path(name))
        .with_context(|| format!("no {name}: install llvm-{LLVM}"))
}

/// The line behind which only tests stand.
fn end_of_code(source: &str) -> usize {
    source.lines().position(|line| line == "#[cfg(test)]").map_or(usize::MAX, |tests| tests + 1)
}

/// Lines of a file's code that can be reached, and those of them that were not.
fn counts(lcov: &str, file: &Path, end: usize) -> (usize, Vec<usize>) {
    let start = format!("SF:{}", file.display());
    let records = lcov.lines().skip_while(|line| *line != start).take_while(|line| *line != "end_of_record");
    let mut all = BTreeSet::new();
    let mut missed = BTreeSet::new();
    for (line, count) in records.filter_map(|line| line.strip_prefix("DA:")?.split_once(',')) {
        let Ok(line) = line.parse() else { continue };
        if line < end {
            all.insert(line);
            if count == "0" {
                missed.insert(line);
            }
        }
    }
    (all.len(), missed.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_lines_of_code_count_and_those_that_no_input_reached_are_named() {
        let lcov = "SF:/a.rs\nDA:1,5\nend_of_record\nSF:/b.rs\nFN:1,f\nDA:1,5\nDA:3,0\nDA:4,1\nDA:9,0\nend_of_record\n";
        assert_eq!(counts(lcov, Path::new("/b.rs"), 9), (3, vec![3]));
        assert_eq!(counts(lcov, Path::new("/c.rs"), 9), (0, vec![]));
        assert_eq!(end_of_code("a\nb\n#[cfg(test)]\nmod tests {\n"), 3);
    }
}

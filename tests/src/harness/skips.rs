//! Tests that this machine does not let run say why, and whoever runs them all sees that some have.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::PathBuf;

/// Names the file that is told which tests ran that need privileges, and which did not: a line each.
pub const FILE: &str = "KVLB_TEST_SKIPS";

/// A test that needs privileges has them.
pub fn ran() {
    note("ran");
}

/// A test does not run; says so past the test harness, which hides what passing tests print.
pub fn skipped(test: &str, reason: &str) {
    // Without standard error there is nobody to tell.
    drop(writeln!(io::stderr(), "skipped {test}: {reason}"));
    note(&format!("skipped {test}: {reason}"));
}

fn note(line: &str) {
    let Some(path) = file() else { return };
    let file = OpenOptions::new().create(true).append(true).open(path);
    // Whoever reads it fails where no line is there.
    drop(file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())));
}

#[expect(clippy::disallowed_methods, reason = "the harness is told where to write, like a build tool")]
fn file() -> Option<PathBuf> {
    std::env::var_os(FILE).map(PathBuf::from)
}

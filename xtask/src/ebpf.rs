//! `cargo xtask build-ebpf`: the kernel programs become `kvlb/bpf/kvlb.bpf.o`, which is committed, so that a user needs
//! only a stable Rust. Beside it, `kvlb.bpf.txt` says what it was built from and with.
//!
//! The object is the same byte for byte wherever it is built. Three things see to that: kernel programs and
//! `kvlb-common` are in one workspace (else mangled names depend on its place), paths are remapped, and DWARF is
//! stripped once the linker has made BTF of it.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::run::{cargo, done, on_path, output, root, variable};

const OBJECT: &str = "kvlb/bpf/kvlb.bpf.o";
const RECORD: &str = "kvlb/bpf/kvlb.bpf.txt";
const TARGET: &str = "bpfel-unknown-none";

/// The crates whose sources the object is made of.
const SOURCES: [&str; 2] = ["kvlb-ebpf", "kvlb-common"];

/// LLVM of the compiler that `setup` installs; bpf-linker is built for the same.
pub(crate) const LLVM: u32 = 22;

/// How to get the tools; ends every error about a missing one.
const HOW: &str = "run `cargo xtask setup ebpf`, or see docs/building-ebpf.md";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rebuild and compare with the committed object instead of replacing it
    #[arg(long, conflicts_with = "check_sources")]
    check: bool,
    /// Only compare the sources with those that the committed object was built from; needs no tools
    #[arg(long)]
    check_sources: bool,
}

impl Args {
    /// As `cargo xtask build-ebpf --check`.
    pub(crate) const CHECK: Self = Self { check: true, check_sources: false };
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let root = root();
    if args.check_sources {
        check_sources(&root)?;
        println!("{OBJECT} was built from these sources");
        return Ok(());
    }
    let (object, record) = build(&root)?;
    if args.check {
        return check(&root, &object, &record);
    }
    fs::create_dir_all(root.join("kvlb/bpf")).context("create kvlb/bpf")?;
    fs::write(root.join(OBJECT), &object).with_context(|| format!("write {OBJECT}"))?;
    fs::write(root.join(RECORD), record.to_string()).with_context(|| format!("write {RECORD}"))?;
    print!("{OBJECT}: {} bytes\n{record}", object.len());
    Ok(())
}

/// What an object was built from and with.
#[derive(Debug, PartialEq, Eq)]
struct Record {
    /// SHA-256 of the sources.
    sources: String,
    /// SHA-256 of the object.
    object: String,
    /// What the tools say of their versions.
    tools: String,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sources {}\nobject {}\n{}", self.sources, self.object, self.tools)
    }
}

impl Record {
    fn read(root: &Path) -> Result<Self> {
        let text = fs::read_to_string(root.join(RECORD)).with_context(|| format!("read {RECORD}"))?;
        let mut lines = text.split_inclusive('\n');
        let mut field = |name: &str| {
            let line = lines.next().and_then(|line| line.strip_prefix(name));
            line.map(|value| value.trim().to_owned()).with_context(|| format!("find {name:?} in {RECORD}"))
        };
        let (sources, object) = (field("sources ")?, field("object ")?);
        Ok(Self { sources, object, tools: lines.collect() })
    }
}

/// Checks that the committed object is whole and was built from the sources as they are now.
fn check_sources(root: &Path) -> Result<()> {
    let record = Record::read(root)?;
    let object = fs::read(root.join(OBJECT)).with_context(|| format!("read {OBJECT}"))?;
    ensure!(sha256(&object) == record.object, "{OBJECT} is not the one that {RECORD} describes");
    ensure!(
        source_hash(root)? == record.sources,
        "{OBJECT} is older than {SOURCES:?}: run `cargo xtask build-ebpf` and commit it"
    );
    Ok(())
}

/// Compares a fresh build with the committed one: byte for byte when the tools are the same, else the sources only.
fn check(root: &Path, object: &[u8], record: &Record) -> Result<()> {
    check_sources(root)?;
    let committed = Record::read(root)?;
    if record.tools != committed.tools {
        println!(
            "{OBJECT} was built from these sources, but with other tools, so its bytes were not compared\n\
             committed:\n{}here:\n{}",
            committed.tools, record.tools
        );
        return Ok(());
    }
    if record.object != committed.object {
        let fresh = root.join("target/ebpf/kvlb.bpf.o");
        bail!("{OBJECT} is not what its sources give with the same tools; compare it with {}", fresh.display());
    }
    println!("{OBJECT} is reproduced byte for byte ({} bytes)", object.len());
    Ok(())
}

/// Builds the object; returns its bytes and its record.
fn build(root: &Path) -> Result<(Vec<u8>, Record)> {
    let tools = Tools::find(root)?;
    let target = root.join("target/ebpf");
    compile(root, &target, &tools)?;
    let stripped = target.join("kvlb.bpf.o");
    let linked = target.join(TARGET).join("release/kvlb-ebpf");
    done(Command::new(&tools.objcopy).arg("--strip-debug").arg(linked).arg(&stripped)).context("strip DWARF")?;
    let object = fs::read(&stripped).context("read the object")?;
    let record = Record { sources: source_hash(root)?, object: sha256(&object), tools: tools.versions() };
    Ok((object, record))
}

fn compile(root: &Path, target: &Path, tools: &Tools) -> Result<()> {
    let home = variable("HOME").map(PathBuf::from).unwrap_or_default();
    let cargo_home = variable("CARGO_HOME").map_or_else(|| home.join(".cargo"), PathBuf::from);
    let flags = [
        "--cfg=bpf_target_arch=\"x86_64\"".to_owned(),
        "-Cdebuginfo=2".to_owned(),
        format!("-Clinker={}", tools.linker.display()),
        "-Clink-arg=--btf".to_owned(),
        format!("--remap-path-prefix={}=/kvlb", root.display()),
        format!("--remap-path-prefix={}=/cargo", cargo_home.display()),
        format!("--remap-path-prefix={}=/rust", tools.library.display()),
    ];
    let mut command = cargo();
    command
        .current_dir(root)
        .env("RUSTC", &tools.rustc)
        // `-Z build-std` is for nightly compilers only; this lets a stable one do it, too.
        .env("RUSTC_BOOTSTRAP", "1")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("RUSTFLAGS")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .env("CARGO_PROFILE_RELEASE_LTO", "true")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_TARGET_DIR", target)
        .args(["build", "--locked", "--release", "--package", "kvlb-ebpf", "--target", TARGET, "-Zbuild-std=core"]);
    done(&mut command).context("compile the kernel programs")
}

/// The tools of one build.
struct Tools {
    rustc: PathBuf,
    /// The sources of `core` beside that compiler.
    library: PathBuf,
    linker: PathBuf,
    objcopy: PathBuf,
}

impl Tools {
    fn find(root: &Path) -> Result<Self> {
        let Some((rustc, library)) = compiler() else {
            bail!("no Rust compiler with the sources of its library beside it: {HOW}")
        };
        let Some(linker) = linker(root) else { bail!("no bpf-linker: {HOW}") };
        let Some(objcopy) = objcopy() else { bail!("no llvm-objcopy: {HOW}") };
        Ok(Self { rustc, library, linker, objcopy })
    }

    fn versions(&self) -> String {
        let version = |tool: &Path| output(Command::new(tool).arg("--version")).unwrap_or_default();
        let objcopy = version(&self.objcopy);
        let objcopy = objcopy.lines().find(|line| line.contains("version")).unwrap_or_default().trim();
        format!("rustc {}\nlinker {}\nobjcopy {objcopy}\n", version(&self.rustc), version(&self.linker))
    }
}

/// A compiler and its library's sources, which building `core` for the kernel needs: `$KVLB_BPF_RUSTC`, else rustup's
/// nightly if it has `rust-src`, else the distribution's (Debian: `rustc-web` and `rust-web-src`).
pub(crate) fn compiler() -> Option<(PathBuf, PathBuf)> {
    let chosen = variable("KVLB_BPF_RUSTC").map(PathBuf::from);
    let nightly = output(Command::new("rustup").args(["which", "--toolchain", "nightly", "rustc"])).map(PathBuf::from);
    let distribution = Some(PathBuf::from("/usr/bin/rustc"));
    [chosen, nightly, distribution].into_iter().flatten().find_map(|rustc| {
        let sysroot = output(Command::new(&rustc).args(["--print", "sysroot"]))?;
        let library = Path::new(&sysroot).join("lib/rustlib/src/rust");
        library.join("library/core/src/lib.rs").is_file().then_some((rustc, library))
    })
}

/// bpf-linker as `setup` installs it, else the one on `PATH`.
pub(crate) fn linker(root: &Path) -> Option<PathBuf> {
    let ours = root.join("target/tools/bin/bpf-linker");
    Some(ours).filter(|file| file.is_file()).or_else(|| on_path("bpf-linker"))
}

/// llvm-objcopy under any of the names that distributions give it; any version can strip.
fn objcopy() -> Option<PathBuf> {
    let of_version = |version: u32| format!("llvm-objcopy-{version}");
    let names = [of_version(LLVM), "llvm-objcopy".to_owned()];
    names.into_iter().chain((14..40).rev().map(of_version)).find_map(|name| on_path(&name))
}

/// SHA-256 over names and contents of all sources, in the order of their names.
fn source_hash(root: &Path) -> Result<String> {
    let mut files = Vec::new();
    for source in SOURCES {
        collect(&root.join(source), &mut files).with_context(|| format!("list {source}"))?;
    }
    files.sort();
    let mut hash = Sha256::new();
    for file in files {
        let name = file.strip_prefix(root).context("name a source")?.to_string_lossy().into_owned();
        let content = fs::read(&file).with_context(|| format!("read {name}"))?;
        hash.update(name.as_bytes());
        hash.update((content.len() as u64).to_le_bytes());
        hash.update(content);
    }
    Ok(hex(&hash.finalize()))
}

/// Adds the Rust sources and manifests under `dir` to `files`.
fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "toml") {
            files.push(path);
        }
    }
    Ok(())
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_object_is_whole_and_built_from_these_sources() {
        if let Err(error) = check_sources(&root()) {
            panic!("{error:#}");
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let dir = std::env::temp_dir().join(format!("kvlb-xtask-{}", std::process::id()));
        fs::create_dir_all(dir.join("kvlb/bpf")).unwrap();
        let record = Record { sources: "12".into(), object: "34".into(), tools: "rustc 1\nlinker 2\n".into() };
        fs::write(dir.join(RECORD), record.to_string()).unwrap();
        let read = Record::read(&dir);
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(read.unwrap(), record);
    }

    #[test]
    fn a_changed_source_changes_the_hash_and_so_does_a_moved_border_between_two() {
        let dir = std::env::temp_dir().join(format!("kvlb-xtask-sources-{}", std::process::id()));
        for source in SOURCES {
            fs::create_dir_all(dir.join(source)).unwrap();
        }
        let (first, second) = (dir.join(SOURCES[0]).join("a.rs"), dir.join(SOURCES[1]).join("b.rs"));
        let hash = |one: &str, two: &str| {
            fs::write(&first, one).unwrap();
            fs::write(&second, two).unwrap();
            source_hash(&dir).unwrap()
        };
        let hashes = [hash("ab", "c"), hash("a", "bc"), hash("ab", "d"), hash("ab", "c")];
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(hashes[0], hashes[3]);
        assert_ne!(hashes[0], hashes[1]);
        assert_ne!(hashes[0], hashes[2]);
    }
}

//! The processes of the demo, and where they stand.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::Leg;
use crate::api::Api;
use crate::run::{Running, now, root};

/// Each engine has an address of its own, as on a real network, and the ports of the source document.
pub(super) const ENGINES: [&str; 3] = ["127.0.0.11", "127.0.0.12", "127.0.0.13"];
/// Where clients go.
pub(super) const VIP: &str = "10.10.10.254";
/// The model that the demo's small tokenizer belongs to.
pub(super) const MODEL: &str = "kvlb/demo";

const API: &str = "127.0.0.1:11111";
const SEED: &str = "0";
/// The CLI's exit code for a contract that does not hold: an answer, not a failure.
const CONTRACT_MISMATCH: i32 = 6;
const START_LIMIT: Duration = Duration::from_secs(20);

/// Everything that runs, ended when dropped.
pub(super) struct Stage {
    engines: Vec<Running>,
    kvlb: Running,
    binary: PathBuf,
    #[expect(dead_code, reason = "the directory is removed when the stage is dropped")]
    dir: tempfile::TempDir,
    pub(super) api: Api,
}

impl Stage {
    /// Starts the engines and kvlb.
    pub(super) fn set(bin: &Path, datapath: &str, broken: Option<Leg>) -> Result<Self> {
        let dir = tempfile::tempdir().context("make a directory for the demo")?;
        let tokenizers = stage_tokenizer(dir.path())?;
        let mut engines = Vec::new();
        for (number, address) in ENGINES.iter().enumerate() {
            let command = engine(&bin.join("sim-engine"), number, address, &tokenizers, broken);
            let mut running = Running::start(command, &dir.path().join(format!("engine-{number}.log")))?;
            running.first_line().with_context(|| format!("start the simulated engine at {address}"))?;
            engines.push(running);
        }
        println!("== three simulated engines at {}", ENGINES.join(", "));
        let binary = bin.join("kvlb");
        let mut command = Command::new(&binary);
        command
            .args(["up", "--api", API, "--datapath", datapath, "--no-state"])
            .arg("--tokenizer-dir")
            .arg(&tokenizers)
            .env("LLB_KV_NONE_HASH_SEED", SEED);
        let kvlb = Running::start(command, &dir.path().join("kvlb.log"))?;
        let api = Api::new(API);
        let mut stage = Self { engines, kvlb, binary, dir, api };
        stage.wait_for_api()?;
        println!("== kvlb is up: {}", stage.api.get("/netlox/v1/status")?);
        Ok(stage)
    }

    fn wait_for_api(&mut self) -> Result<()> {
        let deadline = now() + START_LIMIT;
        while self.api.get("/netlox/v1/config/loadbalancer/all").is_err() {
            if let Some(status) = self.kvlb.child.try_wait()? {
                self.show_logs();
                bail!("kvlb ended while starting: {status}");
            }
            ensure!(now() < deadline, "kvlb's API did not answer within {} s", START_LIMIT.as_secs());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Kills an engine.
    pub(super) fn kill(&mut self, number: usize) -> Result<()> {
        let engine = &mut self.engines[number].child;
        engine.kill().and_then(|()| engine.wait()).with_context(|| format!("kill engine-{number}"))?;
        Ok(())
    }

    /// Runs the CLI as an operator would, and shows the call and its answer.
    pub(super) fn cli(&self, args: &[&str]) -> Result<()> {
        println!("$ kvlb {}", args.join(" "));
        let output = Command::new(&self.binary).args(args).output().context("run the kvlb CLI")?;
        print!("{}", String::from_utf8_lossy(&output.stdout));
        let told = [Some(0), Some(CONTRACT_MISMATCH)].contains(&output.status.code());
        ensure!(told, "kvlb {} failed: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// Shows the ends of all logs.
    pub(super) fn show_logs(&self) {
        for running in std::iter::once(&self.kvlb).chain(&self.engines) {
            running.show_log();
        }
    }
}

/// The demo's tokenizer, laid out as an operator would lay out a model's.
fn stage_tokenizer(dir: &Path) -> Result<PathBuf> {
    let staged = dir.join("tokenizers");
    let folder = staged.join(MODEL.replace('/', "__"));
    fs::create_dir_all(&folder).context("make the tokenizer directory")?;
    let from = root().join("tests/golden/tiny-tokenizer");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(from.join(file), folder.join(file)).with_context(|| format!("stage {file}"))?;
    }
    Ok(staged)
}

fn engine(binary: &Path, number: usize, address: &str, tokenizers: &Path, broken: Option<Leg>) -> Command {
    let seed = if broken == Some(Leg::Seed) { "42" } else { SEED };
    let block_size = if broken == Some(Leg::BlockSize) { "32" } else { "16" };
    let algo = if broken == Some(Leg::Algo) { "xxhash_cbor" } else { "sha256_cbor" };
    let mut command = Command::new(binary);
    command
        .args(["--name", &format!("engine-{number}"), "--host", address, "--port", "8000", "--kv-connector", "nixl"])
        .args(["--model", MODEL, "--block-size", block_size, "--hash-algo", algo, "--seed", seed])
        .arg("--tokenizer")
        .arg(tokenizers.join(MODEL.replace('/', "__")));
    if broken == Some(Leg::Events) {
        command.arg("--no-events");
    }
    command
}

//! The real `kvlb` as a process: started with given arguments, asked over its REST API, ended by its id.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::http::{Answer, Client};
use super::netns::Netns;
use super::{free_port, temp_dir, until_some};

/// How long `kvlb up` may take until its API answers, in a debug build on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How long it may take to end after SIGTERM without requests under way.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// How the daemon is started.
#[derive(Debug, Clone, Default)]
pub struct KvlbConfig {
    /// Arguments after `kvlb up`; `--api` and `--state-dir` are added where they are missing.
    pub args: Vec<String>,
    /// Environment on top of the test's own.
    pub env: Vec<(String, String)>,
    /// Where it runs; the test's own namespace without.
    pub netns: Option<Arc<Netns>>,
}

impl KvlbConfig {
    /// `kvlb up` with these arguments.
    pub fn with(args: &[&str]) -> Self {
        Self { args: args.iter().map(ToString::to_string).collect(), ..Self::default() }
    }

    /// The same with one more variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The same in a namespace.
    #[must_use]
    pub fn inside(mut self, netns: &Arc<Netns>) -> Self {
        self.netns = Some(Arc::clone(netns));
        self
    }

    fn value_of(&self, flag: &str) -> Option<&str> {
        let at = self.args.iter().position(|arg| arg == flag)?;
        self.args.get(at + 1).map(String::as_str)
    }
}

/// A running daemon. Dropping it kills it.
#[derive(Debug)]
pub struct Kvlb {
    child: Child,
    api: SocketAddr,
    netns: Option<Arc<Netns>>,
    dir: tempfile::TempDir,
}

impl Kvlb {
    /// Starts it and waits until its API answers.
    ///
    /// # Errors
    /// When the program is missing, ends while starting, or does not answer in time; the error carries the end of its log.
    pub async fn start(config: KvlbConfig) -> anyhow::Result<Self> {
        Self::start_program(&binary("kvlb")?, config).await
    }

    /// Starts one that takes over from another, and waits until it answers in the place of that one. Its arguments are those
    /// of the other, API and state directory included, and `--takeover`.
    ///
    /// # Errors
    /// As [`Kvlb::start`].
    pub async fn take_over(config: KvlbConfig) -> anyhow::Result<Self> {
        let mut kvlb = Self::spawn(&binary("kvlb")?, config)?;
        kvlb.wait_for_api(true).await?;
        Ok(kvlb)
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn begin_takeover(config: KvlbConfig) -> anyhow::Result<Self> {
        Self::spawn(&binary("kvlb")?, config)
    }

    /// The same with the program at a given place.
    ///
    /// # Errors
    /// As [`Kvlb::start`].
    pub async fn start_program(program: &Path, config: KvlbConfig) -> anyhow::Result<Self> {
        let mut kvlb = Self::spawn(program, config)?;
        kvlb.wait_for_api(false).await?;
        Ok(kvlb)
    }

    fn spawn(program: &Path, config: KvlbConfig) -> anyhow::Result<Self> {
        let dir = temp_dir()?;
        let api = match config.value_of("--api") {
            Some(api) => api.parse().with_context(|| format!("read --api {api}"))?,
            None => SocketAddr::from(([127, 0, 0, 1], free_port()?)),
        };
        let mut command = Command::new(program);
        command.arg("up").args(&config.args).envs(config.env.iter().cloned());
        if config.value_of("--api").is_none() {
            command.args(["--api", &api.to_string()]);
        }
        if config.value_of("--state-dir").is_none() && !config.args.iter().any(|arg| arg == "--no-state") {
            command.arg("--state-dir").arg(dir.path().join("state"));
        }
        let log = File::create(dir.path().join("log")).context("make a log file")?;
        command.stdin(Stdio::null()).stdout(log.try_clone().context("share the log file")?).stderr(log);
        let child = match &config.netns {
            Some(netns) => netns.spawn(&mut command)?,
            None => command.spawn().with_context(|| format!("start {}", program.display()))?,
        };
        Ok(Self { child, api, netns: config.netns, dir })
    }

    /// Where its API listens.
    pub fn api_address(&self) -> SocketAddr {
        self.api
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// A request to its API; status and JSON body (null where there is none).
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn api(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<(u16, Value)> {
        let answer = self.ask(method, path, body).await?;
        Ok((answer.head.status, answer.body.json()))
    }

    /// A request to its API, the answer as it came; for `/metrics` and for heads.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Answer> {
        let mut client = self.connect(self.api).await?;
        let text = body.map(Value::to_string).unwrap_or_default();
        client.request(method, path, &[("Content-Type", "application/json")], text.as_bytes()).await?;
        client.answer().await.with_context(|| format!("{method} {path}"))
    }

    /// A connection from where kvlb runs, such as to a VIP.
    ///
    /// # Errors
    /// When it is refused.
    pub async fn connect(&self, address: SocketAddr) -> anyhow::Result<Client> {
        let context = || format!("connect to {address}");
        match &self.netns {
            Some(netns) => Ok(Client::over(netns.connect(address)?.with_context(context)?)),
            None => Client::connect(address).await.with_context(context),
        }
    }

    /// The value of a series of its metrics, written as `name{label="value"}`; 0 where it is absent.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn metric(&self, series: &str) -> anyhow::Result<f64> {
        let text = self.ask("GET", "/netlox/v1/metrics", None).await?.body.text();
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(Ok(0.0), |value| value.trim().parse().with_context(|| format!("read the value of {series}")))
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let id = i32::try_from(self.child.id()).context("read the process id")?;
        kill(Pid::from_raw(id), signal).with_context(|| format!("send {signal} to kvlb"))
    }

    /// SIGTERM, and a clean end: exit code 0.
    ///
    /// # Errors
    /// When it does not end in time, or badly.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.signal(Signal::SIGTERM)?;
        let status = self.ended(STOP_LIMIT).await?;
        ensure!(status.success(), "kvlb ended with {status}; its log ends:\n{}", self.log_end());
        Ok(())
    }

    /// Waits until it has ended by itself.
    ///
    /// # Errors
    /// When it has not in time.
    pub async fn ended(&mut self, within: Duration) -> anyhow::Result<ExitStatus> {
        let child = &mut self.child;
        until_some(within, "kvlb ends", async || child.try_wait().ok().flatten()).await
    }

    /// Waits until an API answers there; with `itself`, until it is this process's.
    async fn wait_for_api(&mut self, itself: bool) -> anyhow::Result<()> {
        let started = until_some(START_LIMIT, "kvlb's API answers", async || {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(Err(status));
            }
            let (_, status) = self.api("GET", "/netlox/v1/status", None).await.ok()?;
            (!itself || status["pid"] == self.id()).then_some(Ok(()))
        });
        match started.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(status)) => bail!("kvlb ended while starting with {status}; its log ends:\n{}", self.log_end()),
            Err(late) => Err(late.context(format!("kvlb's log ends:\n{}", self.log_end()))),
        }
    }

    fn log_end(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

impl Drop for Kvlb {
    fn drop(&mut self) {
        // An error means that it has ended already.
        if self.child.kill().is_ok() {
            drop(self.child.wait());
        }
    }
}

/// A program of this workspace: `KVLB_BIN` for `kvlb` where it is set, else beside the running test.
///
/// # Errors
/// When it has not been built.
pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
    if let Some(path) = override_of(name) {
        return Ok(path);
    }
    let test = std::env::current_exe().context("find the running test")?;
    // target/PROFILE/deps/TEST, or target/PROFILE/NAME for a program.
    let profile = test.ancestors().skip(1).find(|dir| !dir.ends_with("deps")).unwrap_or_else(|| Path::new("."));
    let path = profile.join(name);
    ensure!(
        path.exists(),
        "{} is missing: run `cargo build --workspace --exclude kvlb-ebpf --bins` first",
        path.display()
    );
    Ok(path)
}

#[expect(clippy::disallowed_methods, reason = "the harness is told where the program is, like a build tool")]
fn override_of(name: &str) -> Option<PathBuf> {
    (name == "kvlb").then(|| std::env::var_os("KVLB_BIN")).flatten().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::binary;

    #[test]
    fn a_program_not_built_is_named_with_the_command_that_builds_it() {
        let missing = binary("no-such-program").unwrap_err().to_string();
        assert!(missing.contains("no-such-program") && missing.contains("cargo build"), "{missing}");
    }
}

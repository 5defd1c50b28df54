//! `cargo xtask clients`: other people's clients, each through kvlb to real engines.
//!
//! Two llama.cpp servers with a tiny random model stand behind two rules, one that keeps a client address at one engine and
//! one that takes the engines in turn. Each client of `scripts/clients/` sends what it can send and compares what comes back
//! with what the engines say when they are asked without kvlb; a prompt's cached tokens tell which engine had it before.
//! Afterwards kvlb's counters, its access log and the engines' own have to tell the same story as the client.
//!
//! llama.cpp announces no blocks, so that affinity here is the rules' selector's and not the KV tier's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::api::{Api, Metrics, agent};
use crate::run::{Running, cargo, done, in_namespace, now, root, variable};
use crate::setup;

/// Set for the child that runs inside the namespace.
const INSIDE: &str = "CLIENTS_INSIDE";

const CLIENTS: [&str; 6] = ["aiohttp", "curl", "fetch", "httpx", "openai", "wrk"];
const ENGINES: [&str; 2] = ["127.0.0.21", "127.0.0.22"];
const VIP: &str = "10.10.10.254";
/// The port and the selector of each rule, with the word that the scripts know it by.
const RULES: [(&str, u16, &str); 2] = [("--persist", 8080, "persist"), ("--turns", 8081, "rr")];
const API: &str = "127.0.0.1:11111";
/// A model of 0.4 MB is there within a second; the rest is for a machine with other work.
const START_LIMIT: Duration = Duration::from_mins(1);
/// Until everything is quiet after a client's last answer: milliseconds, but for a busy machine.
const QUIET_LIMIT: Duration = Duration::from_secs(5);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this one; may be repeated
    #[arg(long, value_parser = CLIENTS)]
    client: Vec<String>,
    /// How VIP traffic reaches kvlb: through the kernel (auto) or sockets bound to the VIP (none)
    #[arg(long, default_value = "none")]
    datapath: String,
    /// Build and run an optimised kvlb
    #[arg(long)]
    release: bool,
    /// Passed on to `kvlb up`, such as --io epoll
    #[arg(last = true)]
    rest: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if variable(INSIDE).is_some() {
        return inside(args);
    }
    ensure!(nix::unistd::geteuid().is_root(), "this chore makes a network namespace: run it as root");
    setup::build().context("set up what the build needs")?;
    setup::network().context("set up what namespaces need")?;
    setup::clients().context("set up the clients")?;
    install_python().context("install what the scripts need")?;
    println!("== building kvlb");
    let mut build = cargo();
    // As for the demo, so that nothing is built twice; not this program, which goes on after it.
    build.current_dir(root()).args(["build", "-q", "-p", "kvlb", "-p", "kvlb-tests", "--bins"]);
    if args.release {
        build.arg("--release");
    }
    done(&mut build).context("build kvlb")?;
    in_namespace(INSIDE)
}

fn scripts() -> PathBuf {
    root().join("scripts/clients")
}

fn venv() -> PathBuf {
    root().join("target/clients/venv")
}

/// Installs the pinned packages in an environment of their own, anew where the pins have changed.
fn install_python() -> Result<()> {
    let (pins, installed) = (scripts().join("requirements.txt"), venv().join("requirements.txt"));
    if fs::read(&installed).ok() == Some(fs::read(&pins).context("read the pins")?) {
        return Ok(());
    }
    println!("== installing the Python packages of scripts/clients/requirements.txt into target/clients/venv");
    if venv().exists() {
        fs::remove_dir_all(venv()).context("remove the old environment")?;
    }
    done(Command::new("python3").args(["-m", "venv"]).arg(venv())).context("make an environment")?;
    done(python().args(["-m", "pip", "install", "--quiet", "--requirement"]).arg(&pins)).context("install packages")?;
    // Last, so that what was interrupted is begun anew.
    fs::copy(&pins, installed).context("note what is installed")?;
    Ok(())
}

fn python() -> Command {
    Command::new(venv().join("bin/python"))
}

fn inside(args: &Args) -> Result<()> {
    done(Command::new("ip").args(["link", "set", "lo", "up"])).context("bring up the loopback device")?;
    done(Command::new("ip").args(["address", "add", &format!("{VIP}/32"), "dev", "lo"])).context("add the VIP")?;
    let stage = Stage::set(args)?;
    let chosen = |client: &&&str| args.client.is_empty() || args.client.iter().any(|only| only == **client);
    let mut disagree = Vec::new();
    for client in CLIENTS.iter().filter(chosen) {
        if let Err(error) = stage.play(client).with_context(|| format!("{client} does not agree")) {
            println!("{error:#}");
            disagree.push(*client);
        }
    }
    if disagree.is_empty() {
        return Ok(());
    }
    stage.show_logs();
    bail!("not all agree: {}", disagree.join(", "))
}

/// Everything that runs, ended when dropped.
struct Stage {
    engines: Vec<Running>,
    kvlb: Running,
    api: Api,
    /// Logs and the model.
    dir: tempfile::TempDir,
}

impl Stage {
    fn set(args: &Args) -> Result<Self> {
        let dir = tempfile::tempdir().context("make a directory for logs and the model")?;
        let model = dir.path().join("tiny.gguf");
        done(python().arg(scripts().join("make_model.py")).arg(&model)).context("make the model")?;
        let mut engines = Vec::new();
        for (number, address) in ENGINES.iter().enumerate() {
            let mut serve = python();
            serve.arg(scripts().join("serve.py")).arg(&model).args([*address, "8000"]);
            engines.push(Running::start(serve, &dir.path().join(format!("engine-{number}.log")))?);
        }
        for (engine, address) in engines.iter_mut().zip(ENGINES) {
            engine.first_line().with_context(|| format!("start llama.cpp at {address}"))?;
            wait_for(START_LIMIT, || of_engine(address, "/health").map(drop))?;
        }
        let binary = root().join("target").join(if args.release { "release" } else { "debug" }).join("kvlb");
        let mut up = Command::new(&binary);
        up.args(["up", "--api", API, "--datapath", &args.datapath, "--no-state", "--access-log", "full"])
            .arg("--access-log-file")
            .arg(dir.path().join("access.jsonl"))
            .args(&args.rest);
        let kvlb = Running::start(up, &dir.path().join("kvlb.log"))?;
        let stage = Self { engines, kvlb, api: Api::new(API), dir };
        if let Err(error) = stage.make_rules(&binary) {
            stage.show_logs();
            return Err(error);
        }
        println!("== two llama.cpp servers; kvlb is up: {}", stage.api.get("/netlox/v1/status")?);
        Ok(stage)
    }

    fn make_rules(&self, binary: &Path) -> Result<()> {
        wait_for(START_LIMIT, || self.api.get("/netlox/v1/config/loadbalancer/all").map(drop))?;
        let endpoints = format!("--endpoints={}", ENGINES.map(|address| format!("{address}:1")).join(","));
        for (_, port, selector) in RULES {
            let mut create = Command::new(binary);
            create.args(["create", "lb", VIP, &format!("--tcp={port}:8000"), &endpoints, "--mode=fullproxy"]).args([
                &format!("--select={selector}"),
                "--kv-engine-type=llamacpp",
                "--decision-headers",
            ]);
            done(&mut create).context("create a rule")?;
        }
        // The first probes are over.
        wait_for(START_LIMIT, || {
            let up = self.api.metrics()?.count("kvlb_endpoint_eligible", 1.0);
            ensure!(up == ENGINES.len() * RULES.len(), "only {up} endpoints may be asked");
            let rules = self.api.json("/netlox/v1/config/loadbalancer/all")?.to_string();
            ensure!(rules.matches(r#""state":"active""#).count() == up, "no probe says that they are up: {rules}");
            Ok(())
        })
    }

    /// Has one client say its piece, and holds what kvlb and the engines counted against it.
    fn play(&self, client: &str) -> Result<()> {
        let lines_before = self.access_lines().len();
        let before = self.api.metrics()?;
        let mut script = Running::start(command(client), &self.dir.path().join(format!("{client}.log")))?;
        let output = script.output()?;
        let Some(report) = output.lines().next_back().and_then(|line| serde_json::from_str::<Value>(line).ok()) else {
            script.show_log();
            bail!("its script ended without a report: {output}");
        };
        let wrong: Vec<_> = texts(&report["wrong"]);
        if !wrong.is_empty() {
            script.show_log();
            bail!("{}", wrong.join("\n   "));
        }
        let mut after = self.api.metrics()?;
        wait_for(QUIET_LIMIT, || {
            after = self.api.metrics()?;
            quiet(&after)?;
            counted(&report, &before, &after)?;
            logged(&report, &self.access_lines()[lines_before..])
        })?;
        let moved = |family| after.sum(family) - before.sum(family);
        println!(
            "{}: {} requests on {} connections, {} sent once more, {} left; agreed: {}",
            report["client"].as_str().unwrap_or(client),
            moved("kvlb_requests_total"),
            moved("kvlb_client_connections_total"),
            moved("kvlb_retries_total"),
            moved("kvlb_client_aborts_total"),
            texts(&report["checked"]).join("; "),
        );
        for told in output.lines().filter(|line| line.starts_with("told: ")) {
            println!("   {}", told.trim_start_matches("told: "));
        }
        Ok(())
    }

    fn access_lines(&self) -> Vec<Value> {
        let log = fs::read_to_string(self.dir.path().join("access.jsonl")).unwrap_or_default();
        // A line that is being written comes the next time.
        log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    fn show_logs(&self) {
        for running in std::iter::once(&self.kvlb).chain(&self.engines) {
            running.show_log();
        }
    }
}

/// A client's script, with the places that it is to know.
fn command(client: &str) -> Command {
    let mut command = if client == "fetch" { Command::new("node") } else { python() };
    command.arg(scripts().join(format!("with_{client}.{}", if client == "fetch" { "mjs" } else { "py" })));
    for (place, port, _) in RULES {
        command.args([place, &format!("http://{VIP}:{port}")]);
    }
    for address in ENGINES {
        command.args(["--engine", &format!("http://{address}:8000")]);
    }
    // No proxy but ours, and no trace of the run beside the scripts.
    for name in ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
        command.env_remove(name);
    }
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Nobody is connected, nothing is under way, and nothing is held.
fn quiet(metrics: &Metrics) -> Result<()> {
    for family in ["kvlb_client_connections_open", "kvlb_endpoint_load", "kvlb_body_bytes_held"] {
        ensure!(metrics.sum(family) == 0.0, "{family} is {}", metrics.sum(family));
    }
    for address in ENGINES {
        let page = of_engine(address, "/metrics")?;
        for family in ["llamacpp:requests_processing", "llamacpp:requests_deferred"] {
            ensure!(page.contains(&format!("\n{family} 0\n")), "the engine at {address} is busy: {family}");
        }
    }
    Ok(())
}

/// kvlb's counters against the client's.
fn counted(report: &Value, before: &Metrics, after: &Metrics) -> Result<()> {
    let moved = |family| after.sum(family) - before.sum(family);
    for family in ["kvlb_errors_total", "kvlb_panics_total", "kvlb_client_connections_refused_total"] {
        ensure!(moved(family) == 0.0, "{family} moved by {}", moved(family));
    }
    for (family, field) in [("kvlb_requests_total", "requests"), ("kvlb_client_aborts_total", "left")] {
        let [least, most] = expected(report, field);
        ensure!((least..=most).contains(&moved(family)), "{family} moved by {}, not by {least}", moved(family));
    }
    Ok(())
}

/// kvlb's access log against the client's word.
fn logged(report: &Value, lines: &[Value]) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "a client sends some ten thousand requests")]
    let count = |count: usize| count as f64;
    let [least, most] = expected(report, "requests");
    ensure!((least..=most).contains(&count(lines.len())), "the access log has {} lines, not {least}", lines.len());
    let ends = |end: &str| count(lines.iter().filter(|line| line["end"] == end).count());
    let [least, most] = expected(report, "left");
    ensure!((least..=most).contains(&ends("client_left")), "{} left in the access log", ends("client_left"));
    let other = lines.iter().find(|line| line["end"] != "client_left" && line["end"] != "complete");
    ensure!(other.is_none(), "a request ended in another way: {}", other.unwrap_or(&Value::Null));
    let cached: u64 = lines.iter().filter_map(|line| line["reported_cached_tokens"].as_u64()).sum();
    let seen = report["cached_tokens"].as_u64().unwrap_or(cached);
    ensure!(cached == seen, "the access log tells of {cached} cached tokens, the client saw {seen}");
    Ok(())
}

/// The least and the most that kvlb can have counted: a client may not know what became of its last requests.
fn expected(report: &Value, field: &str) -> [f64; 2] {
    let number = |field: &str| report[field].as_f64().unwrap_or(f64::NAN);
    [number(field), number(field) + number("unsure")]
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

fn of_engine(address: &str, path: &str) -> Result<String> {
    let url = format!("http://{address}:8000{path}");
    let mut answer = agent().get(&url).call().with_context(|| format!("GET {url}"))?;
    Ok(answer.body_mut().read_to_string()?)
}

/// Tries until it is well, and gives up with what was wrong last.
fn wait_for(limit: Duration, mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    let deadline = now() + limit;
    while let Err(error) = attempt() {
        if now() >= deadline {
            return Err(error.context(format!("waited for {} s", limit.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

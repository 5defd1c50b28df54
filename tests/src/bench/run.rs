//! Starts everything in turn: round by round, all proxies in random order, each afresh and alone on its core.
//!
//! All of it runs in a network namespace without a name, where no port is taken, and which ends with the last process in it.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use nix::unistd::{Pid, geteuid, setsid};
use serde_json::json;

use super::cases::{Case, Upstream};
use super::child::{Cores, Running, ask, pin};
use super::load::{Measured, Shape};
use super::proxies::{MODEL, Places, Proxy, SEED, Started, hits, tokenizer};
use super::report::{Record, table};
use super::targets::{TARGETS, Verdict};
use super::wire::Request;
use crate::harness::dice::Dice;

const MOCK_PORTS: [u16; 2] = [9101, 9102];
/// Each engine has an address of its own, and the usual ports.
const ENGINES: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(127, 0, 0, 11)), IpAddr::V4(Ipv4Addr::new(127, 0, 0, 12))];
const ENGINE_PORT: u16 = 8000;
/// The first port of a proxy; each one that is started has the next.
const FIRST_PORT: u16 = 9400;
/// Descriptors that one process must be allowed: HAProxy asks for two for each of the 8000 connections of its configuration.
const DESCRIPTORS: u64 = 16_500;
/// The weight of our session beside others, as of `nice`.
const AUTOGROUP: &str = "-10";
/// What a rule needs at least of the requests it got for the KV tier to have been what was measured.
const HIT_SHARE: f64 = 0.98;
/// The different prompts that engines are given beforehand, as many as the load generator has.
const PROMPTS: usize = super::load::PROMPTS;

/// Runs proxies in alternation and compares them.
#[derive(Clone, Debug, clap::Args)]
pub struct RunFlags {
    /// Rounds, in each of which every proxy has its turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// How long each case is measured, in seconds
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Proxies; all that are installed if none is named
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Proxy>,
    /// Cases; all if none is named
    #[arg(long, value_enum, value_delimiter = ',')]
    cases: Vec<Case>,
    /// Where the order of proxies comes from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write all results here
    #[arg(long)]
    json: Option<PathBuf>,
    /// Exit with 1 when a target is missed
    #[arg(long)]
    strict: bool,
    /// Where vllm-router and Envoy were installed from PyPI
    #[arg(long)]
    venv: Option<PathBuf>,
    /// Where the programs of the workspace are; beside this one unless said
    #[arg(long)]
    bin: Option<PathBuf>,
    /// Already in a namespace of its own
    #[arg(long, hide = true)]
    inside: bool,
}

/// Runs everything; `tell` gets each line. False where something broke, or a target is missed and that counts.
///
/// # Errors
/// When the machine has one core, this is not root, or the mock cannot be started.
pub fn run(flags: &RunFlags, tell: impl Fn(&str)) -> anyhow::Result<bool> {
    let cores = Cores::find()?;
    if !flags.inside {
        return enter();
    }
    let mut bench = Bench::new(flags, cores, tell)?;
    bench.rounds()?;
    bench.conclude()
}

/// Runs this program again in a network namespace.
fn enter() -> anyhow::Result<bool> {
    ensure!(geteuid().is_root(), "the bench makes a network namespace: run it as root");
    let again = std::env::current_exe().context("find this program")?;
    let mut command = Command::new("unshare");
    command.args(["--net", "--"]).arg(again).args(std::env::args_os().skip(1)).arg("--inside");
    super::child::end_with_us(&mut command);
    let status = command.status().context("enter a new network namespace (unshare)")?;
    match status.code() {
        Some(code @ (0 | 1)) => Ok(code == 0),
        Some(code) => bail!("the bench ended with {code}"),
        None => bail!("the bench was ended by a signal: {status}"),
    }
}

struct Bench<'a, T> {
    flags: &'a RunFlags,
    cores: Cores,
    places: Places,
    proxies: Vec<Proxy>,
    cases: Vec<Case>,
    mock: Running,
    port: u16,
    records: Vec<Record>,
    broken: Vec<String>,
    tell: T,
}

impl<'a, T: Fn(&str)> Bench<'a, T> {
    fn new(flags: &'a RunFlags, cores: Cores, tell: T) -> anyhow::Result<Self> {
        // The process that started us may be killed without being asked.
        set_pdeathsig(Signal::SIGKILL)?;
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().context("call ip")?;
        ensure!(up.success(), "the loopback device does not come up");
        weigh(&tell);
        raise_descriptors()?;
        let mut set = CpuSet::new();
        set.set(cores.others)?;
        sched_setaffinity(Pid::from_raw(0), &set).context("move to a core")?;

        let program = std::env::current_exe().context("find this program")?;
        let beside = program.parent().unwrap_or_else(|| Path::new("."));
        let bin = flags.bin.clone().unwrap_or_else(|| beside.to_owned());
        // Programs lie in target/PROFILE.
        let target = beside.parent().unwrap_or_else(|| Path::new(".")).join("bench");
        let venv = flags.venv.clone().unwrap_or_else(|| target.join("venv"));
        let places = Places { bin, venv, dir: target.join("run") };
        fs::create_dir_all(&places.dir).context("make a directory for logs")?;

        let (proxies, skipped): (Vec<_>, Vec<_>) =
            chosen(&flags.only).into_iter().partition(|proxy| places.program(*proxy).is_some());
        for proxy in &proxies {
            tell(&format!("{proxy:<12} {}", places.version(*proxy).unwrap_or_default()));
        }
        for proxy in skipped {
            tell(&format!("{proxy:<12} skipped: not installed"));
        }
        let mut command = Command::new(&program);
        command.args(["mock", "--ports", &MOCK_PORTS.map(|port| port.to_string()).join(",")]);
        let mut mock = Running::start(command, cores.others, &places.dir.join("mock.log"))?;
        let [first, _] = mock_ends();
        mock.wait_until(|| ask(first, "GET", "/v1/models", "").is_ok())?;
        let (records, broken) = (Vec::new(), Vec::new());
        let cases = chosen(&flags.cases);
        Ok(Self { flags, cores, places, proxies, cases, mock, port: FIRST_PORT, records, broken, tell })
    }

    fn rounds(&mut self) -> anyhow::Result<()> {
        let mut dice = Dice::new(self.flags.seed);
        for round in 1..=self.flags.rounds {
            let mut order = self.proxies.clone();
            for last in (1..order.len()).rev() {
                order.swap(last, usize::try_from(dice.below(u32::try_from(last + 1)?))?);
            }
            for proxy in order {
                for cases in groups(&self.cases, proxy) {
                    self.mock.must_run()?;
                    if let Err(error) = self.measure(round, proxy, &cases) {
                        let cases: Vec<_> = cases.iter().map(|case| case.name()).collect();
                        let line = format!("round {round}, {proxy} {}: {error:#}", cases.join(","));
                        (self.tell)(&line);
                        self.broken.push(line);
                    }
                }
            }
        }
        Ok(())
    }

    /// Starts a proxy, and has it do what is to be measured with the same process.
    fn measure(&mut self, round: usize, proxy: Proxy, cases: &[Case]) -> anyhow::Result<()> {
        let upstream = cases.first().map_or(Upstream::Mock, |case| case.upstream());
        let _engines = if upstream == Upstream::Mock { Vec::new() } else { self.start_engines()? };
        let ends = match upstream {
            Upstream::Mock => mock_ends(),
            // At the engines' addresses, which is where kvlb listens to their events.
            Upstream::Announced => std::array::from_fn(|number| SocketAddr::new(ENGINES[number], MOCK_PORTS[number])),
            Upstream::Engines => engine_ends(),
        };
        self.port += 1;
        let mut started = Started::start(proxy, upstream, ends, self.port, &self.places, self.cores)?;
        if upstream != Upstream::Mock {
            give_prompts()?;
        }
        // Routers look at their upstreams first.
        std::thread::sleep(Duration::from_millis(300));
        for case in cases {
            if case.is_about_memory() {
                // What a proxy makes once, with its first requests, is no connection's.
                self.load(&started, Case::C1, 0.2)?;
            }
            let is_warm = proxy.is_kvlb() && upstream != Upstream::Mock;
            let hits_before = if is_warm { hits()? } else { 0.0 };
            let measured = self.load(&started, *case, self.flags.seconds)?;
            started.must_run()?;
            if is_warm {
                let hits = hits()? - hits_before;
                let answered = super::statistics::float(measured.answered);
                ensure!(hits >= answered * HIT_SHARE, "the KV tier chose for {hits} of {answered} requests only");
            }
            let record = Record { round, proxy, case: *case, measured };
            (self.tell)(&record.line());
            self.broken.extend(record.breach());
            self.records.push(record);
        }
        Ok(())
    }

    fn load(&self, started: &Started, case: Case, seconds: f64) -> anyhow::Result<Measured> {
        let mut command = Command::new(std::env::current_exe()?);
        let shape = match case.shape() {
            Shape::Post => "post",
            Shape::New => "new",
            Shape::Sse => "sse",
            Shape::Hold => "hold",
            Shape::Prompts => "prompts",
            Shape::Warm => "warm",
        };
        let pid = started.pid().unwrap_or_else(|| self.mock.pid());
        command.args(["load", "--shape", shape, "--model", MODEL]);
        let numbers = [
            ("--port", usize::from(started.port)),
            ("--connections", case.connections()),
            ("--body", case.body()),
            ("--every", case.every()),
            ("--pid", usize::try_from(pid)?),
        ];
        for (flag, number) in numbers {
            command.args([flag, &number.to_string()]);
        }
        command.args(["--seconds", &seconds.to_string(), "--warm", &case.warm().to_string()]);
        if started.proxy == Proxy::VllmRouter {
            command.arg("--loose");
        }
        pin(&mut command, self.cores.others)?;
        let output = command.output().context("start the load generator")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the load generator: {}", said.trim());
        serde_json::from_slice(&output.stdout).context("read what the load generator says")
    }

    fn start_engines(&self) -> anyhow::Result<Vec<Running>> {
        let mut engines = Vec::new();
        for (number, end) in engine_ends().into_iter().enumerate() {
            let mut command = Command::new(self.places.bin.join("sim-engine"));
            command.args(["--name", &format!("engine-{number}"), "--host", &end.ip().to_string()]);
            command.args(["--model", MODEL, "--seed", SEED, "--hash-algo", "sha256_cbor", "--block-size", "16"]);
            command.args(["--prefill-us-per-token", "0", "--decode-ms-per-token", "0", "--tokenizer"]);
            command.arg(tokenizer());
            let log = self.places.dir.join(format!("engine-{number}.log"));
            let mut engine = Running::start(command, self.cores.others, &log)?;
            engine.wait_until(|| ask(end, "GET", "/health", "").is_ok())?;
            engines.push(engine);
        }
        Ok(engines)
    }

    /// Tables, targets and what broke.
    fn conclude(self) -> anyhow::Result<bool> {
        let tell = &self.tell;
        for case in chosen(&self.flags.cases) {
            let table = table(&self.records, case);
            if !table.is_empty() {
                tell(table.trim_end());
            }
        }
        tell("\n== design §11: kvlb, median (least..greatest) of the rounds");
        let verdicts: Vec<_> = TARGETS.into_iter().map(|target| Verdict::of(target, &self.records)).collect();
        for verdict in &verdicts {
            tell(&verdict.to_string());
        }
        let machine = machine();
        tell(&format!("\n{machine}"));
        for line in &self.broken {
            tell(&format!("BROKEN: {line}"));
        }
        if let Some(path) = &self.flags.json {
            let results = json!({"machine": machine, "seed": self.flags.seed, "seconds": self.flags.seconds,
                "broken": self.broken, "runs": self.records});
            fs::write(path, format!("{results:#}\n")).with_context(|| format!("write {}", path.display()))?;
        }
        let missed = verdicts.iter().any(|verdict| verdict.is_met() == Some(false));
        Ok(self.broken.is_empty() && !(self.flags.strict && missed))
    }
}

/// Those named, or all.
fn chosen<T: clap::ValueEnum>(named: &[T]) -> Vec<T> {
    let named = if named.is_empty() { T::value_variants() } else { named };
    named.to_vec()
}

/// Cases that one process of the proxy can do one after the other.
fn groups(cases: &[Case], proxy: Proxy) -> Vec<Vec<Case>> {
    let of = |wanted: fn(Case) -> bool| -> Vec<Case> {
        cases.iter().copied().filter(|case| case.suits(proxy) && wanted(*case)).collect()
    };
    let mut groups = vec![
        of(|case| case.upstream() == Upstream::Mock && !case.is_about_memory()),
        of(|case| case.upstream() == Upstream::Announced),
        of(|case| case.upstream() == Upstream::Engines),
    ];
    groups.extend(of(Case::is_about_memory).into_iter().map(|case| vec![case]));
    groups.retain(|group| !group.is_empty());
    groups
}

fn mock_ends() -> [SocketAddr; 2] {
    MOCK_PORTS.map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
}

fn engine_ends() -> [SocketAddr; 2] {
    ENGINES.map(|address| SocketAddr::new(address, ENGINE_PORT))
}

/// Both engines compute each prompt once.
fn give_prompts() -> anyhow::Result<()> {
    for end in engine_ends() {
        for number in 0..PROMPTS {
            let request = Request::completion(end.port(), Case::Kvwarm.body(), MODEL, number);
            let (status, said) = ask(end, "POST", request.path(), request.body())?;
            ensure!(status == 200, "an engine answers {status}: {said}");
        }
    }
    Ok(())
}

/// Puts everything into a session of its own, with more weight than others: within one session nothing else counts.
fn weigh(tell: &impl Fn(&str)) {
    let outcome = setsid().map_err(std::io::Error::from).and_then(|_session| {
        let autogroup = Path::new("/proc/self/autogroup");
        if autogroup.exists() { fs::write(autogroup, AUTOGROUP) } else { Ok(()) }
    });
    if let Err(error) = outcome {
        tell(&format!("neighbours may disturb: no session with a weight of its own ({error})"));
    }
}

fn raise_descriptors() -> anyhow::Result<()> {
    let (_soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    ensure!(hard >= DESCRIPTORS, "the limit of descriptors is {hard}, and the bench needs {DESCRIPTORS}");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raise the limit of descriptors")
}

/// When and where, for whoever keeps the results.
fn machine() -> String {
    let of = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpus = of("/proc/cpuinfo");
    let name = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let cores = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let output = |command: &mut Command| {
        let output = command.output().map(|output| output.stdout).unwrap_or_default();
        String::from_utf8_lossy(&output).trim().to_owned()
    };
    let date = output(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"]));
    let (kernel, load) = (of("/proc/sys/kernel/osrelease"), of("/proc/loadavg"));
    let load = load.split(' ').next().unwrap_or_default();
    format!("{date}: {} with {cores} cores, Linux {}, load {load}", name.unwrap_or("a CPU"), kernel.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_measured_with_processes_of_their_own() {
        let cases = [Case::Post2k, Case::Idle, Case::Sse, Case::Kvwarm, Case::Streams];
        let grouped = [vec![Case::Post2k, Case::Sse], vec![Case::Kvwarm], vec![Case::Idle], vec![Case::Streams]];
        assert_eq!(groups(&cases, Proxy::Kvlb), grouped);
        assert_eq!(groups(&cases[3..4], Proxy::Nginx), Vec::<Vec<Case>>::new());
    }
}

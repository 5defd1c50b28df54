//! What the command does: runs, tables, JSON and pictures.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;

use super::policy::{self, Policy};
use super::report::{self, Figures};
use super::trace::Replay;
use super::workload::Workload;
use super::{fault, figures, plot, trace, workload, world};

/// What is run.
#[derive(Clone, Debug, Args)]
pub struct SimFlags {
    /// Name the workloads, policies and faults, and run nothing
    #[arg(long)]
    list: bool,
    /// Workloads, separated by commas; without it all but the large one, b2b
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    workload: Vec<String>,
    /// A recorded workload: a Mooncake trace (lines with `hash_ids`) or an Azure one (CSV with `ContextTokens`)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Replay a record so many times as fast
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Requests of a record at most
    #[arg(long, value_name = "REQUESTS")]
    limit: Option<usize>,
    /// Policies, separated by commas; without it all
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    policy: Vec<String>,
    /// What goes wrong, separated by commas; each makes a table of its own
    #[arg(long, value_delimiter = ',', default_value = "none", value_name = "NAMES")]
    fault: Vec<String>,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seeds; figures are medians over them
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Engines, in place of the workload's number
    #[arg(long)]
    engines: Option<usize>,
    /// Blocks of each engine's cache, in place of the workload's number
    #[arg(long)]
    blocks: Option<u32>,
    /// Instead: so many small runs with random faults, from --seed on, that say what must not be
    #[arg(long, value_name = "RUNS")]
    storm: Option<u64>,
    /// Write every figure
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw every table into this directory
    #[arg(long, value_name = "DIRECTORY")]
    svg: Option<PathBuf>,
}

/// Runs and says what came of it, progress on stderr; false where something happened that must not.
///
/// # Errors
/// When a name is not known, a file cannot be read or written, or kvlb refuses the rule.
pub fn run(flags: &SimFlags, say: impl Fn(&str)) -> Result<bool> {
    if flags.list {
        list(&say);
        return Ok(true);
    }
    if let Some(runs) = flags.storm {
        return Ok(storms(flags.seed, runs, say));
    }
    ensure!(flags.seeds > 0 && flags.speed > 0.0, "at least one seed, and a speed above zero");
    let policies = policies(&flags.policy)?;
    let mut all = Vec::new();
    let mut fine = true;
    for (name, about) in chosen_workloads(flags)? {
        for fault in &flags.fault {
            let fault =
                fault::ALL.iter().find(|known| known.name == fault).with_context(|| format!("no fault {fault:?}"))?;
            let mut rows = Vec::new();
            for policy in &policies {
                let (row, breaches) = medians(flags, &name, fault, policy)?;
                for breach in breaches {
                    fine = false;
                    say(&format!("{name}, {}: {breach}", policy.name));
                }
                rows.push(row);
            }
            say(&report::table(&rows, &about));
            if let Some(directory) = &flags.svg {
                draw(directory, &rows)?;
            }
            all.extend(rows);
        }
    }
    if let Some(line) = report::calibration(&all) {
        say(&line);
    }
    if let Some(file) = &flags.json {
        let text = serde_json::to_string_pretty(&all)?;
        std::fs::write(file, text).with_context(|| format!("write {}", file.display()))?;
    }
    Ok(fine)
}

fn list(say: &impl Fn(&str)) {
    say("workloads:");
    for entry in workload::ALL {
        say(&format!("  {:<17} {}", entry.name, entry.about));
    }
    say("policies:");
    for policy in policy::ALL {
        let absent = if policy.is_there() { "" } else { " (this kvlb has no such mode)" };
        say(&format!("  {:<17} {}{absent}", policy.name, policy.about));
    }
    say("faults:");
    for entry in fault::ALL {
        say(&format!("  {:<17} {}", entry.name, entry.about));
    }
}

fn storms(first: u64, runs: u64, say: impl Fn(&str)) -> bool {
    let mut answered = 0;
    let mut fine = true;
    for seed in first..first + runs {
        match super::storm(seed) {
            Ok(requests) => answered += requests,
            Err(error) => {
                fine = false;
                say(&format!("{error:#}\n  again: cargo xtask sim --storm 1 --seed {seed}"));
            }
        }
    }
    say(&format!("{runs} runs from seed {first} on, {answered} requests answered"));
    fine
}

fn policies(names: &[String]) -> Result<Vec<&'static Policy>> {
    if names.is_empty() {
        return Ok(policy::ALL.iter().filter(|policy| policy.is_there()).collect());
    }
    let find = |name: &String| {
        let policy =
            policy::ALL.iter().find(|policy| policy.name == name).with_context(|| format!("no policy {name:?}"))?;
        ensure!(policy.is_there(), "this kvlb has no mode {name}");
        Ok(policy)
    };
    names.iter().map(find).collect()
}

/// Names and what they are.
fn chosen_workloads(flags: &SimFlags) -> Result<Vec<(String, String)>> {
    if let Some(file) = &flags.trace {
        let name = file.display().to_string();
        return Ok(vec![(name.clone(), format!("{name}, {} times as fast", flags.speed))]);
    }
    let named = |name: &String| {
        let entry = workload::ALL.iter().find(|entry| entry.name == name);
        entry.with_context(|| format!("no workload {name:?}; --list names them"))
    };
    let entries: Vec<&workload::Entry> = if flags.workload.is_empty() {
        workload::ALL.iter().filter(|entry| entry.name != "b2b").collect()
    } else {
        flags.workload.iter().map(named).collect::<Result<_>>()?
    };
    Ok(entries.into_iter().map(|entry| (entry.name.to_owned(), entry.about.to_owned())).collect())
}

fn made(flags: &SimFlags, name: &str, seed: u64) -> Result<Workload> {
    let mut workload = if let Some(file) = &flags.trace {
        let limit = flags.limit.unwrap_or(usize::MAX);
        let replay = Replay { engines: flags.engines.unwrap_or(8), speed: flags.speed, limit, blocks: flags.blocks };
        trace::read(file, &replay)?
    } else {
        let Some(entry) = workload::ALL.iter().find(|entry| entry.name == name) else { bail!("no workload {name:?}") };
        entry.make(seed)
    };
    workload.engines = flags.engines.unwrap_or(workload.engines);
    workload.build.blocks = flags.blocks.unwrap_or(workload.build.blocks);
    ensure!(workload.engines > 0 && workload.build.blocks > 0, "at least one engine with one block");
    Ok(workload)
}

/// One policy over all seeds, and what happened that must not.
fn medians(flags: &SimFlags, name: &str, fault: &fault::Entry, policy: &Policy) -> Result<(Figures, Vec<String>)> {
    let (mut runs, mut breaches) = (Vec::new(), Vec::new());
    for seed in flags.seed..flags.seed + flags.seeds {
        let workload = made(flags, name, seed)?;
        let plan = fault.plan(&workload);
        let begin = kvlb::clock::now();
        let run = world::run(&workload, policy, &plan, seed, None)
            .with_context(|| format!("{} under {}, seed {seed}", policy.name, workload.name))?;
        let took = kvlb::clock::now().saturating_duration_since(begin);
        let figures = report::figures(&workload, &run);
        // Nobody may be listening.
        let _unsaid = writeln!(
            std::io::stderr(),
            "{:<16} {:<14} seed {seed:<4} {:<17} hit {:5.1} %  ttft p90 {:9.1} ms  ({:.1} s)",
            workload.name,
            fault.name,
            policy.name,
            figures.hit,
            figures.ttft_p90,
            figures::millis(took) / 1e3
        );
        breaches.extend(run.breaches.into_iter().take(5).map(|breach| format!("seed {seed}: {breach}")));
        runs.push(Figures {
            policy: policy.name.to_owned(),
            fault: fault.name.to_owned(),
            seeds: vec![seed],
            ..figures
        });
    }
    Ok((report::medians(&runs), breaches))
}

fn draw(directory: &Path, rows: &[Figures]) -> Result<()> {
    let Some(first) = rows.first() else { return Ok(()) };
    std::fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    let is_ours = |name: &str| policy::ALL.iter().any(|policy| policy.name == name && policy.is_ours());
    let fault = if first.fault == "none" { String::new() } else { format!("-{}", first.fault) };
    let name = |kind: &str| directory.join(format!("{}{fault}{kind}.svg", first.workload));
    std::fs::write(name(""), plot::bars(rows, is_ours)).context("draw bars")?;
    if let Some(lines) = plot::lines(rows) {
        std::fs::write(name("-stages"), lines).context("draw lines")?;
    }
    Ok(())
}

//! What the kernel says of a process: its CPU time and its memory.

use std::fs;
use std::path::PathBuf;

/// A process and all below it.
#[derive(Clone, Debug)]
pub(super) struct Family(Vec<u32>);

impl Family {
    /// The family as it is now.
    pub(super) fn of(pid: u32) -> Self {
        let mut members = vec![pid];
        let mut at = 0;
        while let Some(member) = members.get(at) {
            let children = tasks(*member).filter_map(|task| fs::read_to_string(task.join("children")).ok());
            let children: Vec<u32> = children
                .flat_map(|line| line.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
                .collect();
            members.extend(children);
            at += 1;
        }
        Self(members)
    }

    /// Nanoseconds that all their threads have been on a CPU, those of io_uring in the kernel with them.
    pub(super) fn cpu(&self) -> u64 {
        let of_task =
            |task: PathBuf| fs::read_to_string(task.join("schedstat")).ok()?.split(' ').next()?.parse::<u64>().ok();
        self.0.iter().flat_map(|pid| tasks(*pid)).filter_map(of_task).sum()
    }

    /// Their proportional set size in bytes: shared pages count in part.
    pub(super) fn memory(&self) -> u64 {
        let of_process = |pid: &u32| proportional(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?);
        self.0.iter().filter_map(of_process).sum()
    }
}

fn tasks(pid: u32) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    entries.flatten().map(|entry| entry.path())
}

fn proportional(rollup: &str) -> Option<u64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_memory_and_cpu_time() {
        let family = Family::of(std::process::id());
        assert!(family.cpu() > 0);
        assert!(family.memory() > 0);
        assert_eq!(proportional("Rss:  9 kB\nPss:                1234 kB\n"), Some(1234 * 1024));
    }
}

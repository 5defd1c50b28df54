//! `kvlb down`: nothing of kvlb is left in the kernel, whether it runs or has crashed.

use std::fs;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::complain;
use crate::clock;
use crate::config::Down;
use crate::kernel::{self, Cleared};

/// Between two looks at whether a process has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Stops the kvlb that holds the pin directory, if any, and removes what is left; says what that was.
#[expect(clippy::print_stdout, reason = "it speaks to the person who asks")]
pub fn down(settings: &Down) -> ExitCode {
    let run = || -> Result<Cleared> {
        for process in kernel::holders(&settings.pin_dir) {
            println!("process {process} is told to stop; its streams may end first");
            stop(process)?;
        }
        wait_until_free(settings)?;
        Ok(kernel::clear(&settings.pin_dir, settings.all_routes)?)
    };
    match run() {
        Ok(cleared) => {
            print!("{}", told(&cleared, settings));
            ExitCode::SUCCESS
        }
        Err(error) => complain(&error),
    }
}

/// Tells a kvlb to stop, and no other program.
fn stop(process: u32) -> Result<()> {
    let Ok(name) = fs::read_to_string(format!("/proc/{process}/comm")) else { return Ok(()) };
    ensure!(
        name.trim() == "kvlb",
        "process {process} ({}) holds the pins and is no kvlb: end it yourself",
        name.trim()
    );
    let id = Pid::from_raw(i32::try_from(process).context("read the process's number")?);
    match kill(id, Signal::SIGTERM) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("tell process {process} to stop")),
    }
}

fn wait_until_free(settings: &Down) -> Result<()> {
    let until = clock::now() + settings.wait;
    loop {
        let holders = kernel::holders(&settings.pin_dir);
        if holders.is_empty() {
            return Ok(());
        }
        if clock::now() >= until {
            let who: Vec<_> = holders.iter().map(ToString::to_string).collect();
            bail!(
                "process {} has not ended after {} s: --wait gives it longer, a second `kvlb down` cuts its streams",
                who.join(", "),
                settings.wait.as_secs()
            );
        }
        sleep(LOOK_AGAIN);
    }
}

/// What was removed, for the person who asked.
fn told(cleared: &Cleared, settings: &Down) -> String {
    let list = |addrs: &[std::net::IpAddr]| addrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut text = String::new();
    if !cleared.routes.is_empty() {
        text.extend([format!("removed the routes of {}\n", list(&cleared.routes))]);
    }
    if !cleared.pins.is_empty() {
        text.extend([format!("removed {} pins from {}\n", cleared.pins.len(), settings.pin_dir.display())]);
    }
    if !cleared.others.is_empty() {
        text.extend([format!(
            "left the routes of {}: they are kvlb's, and no pin in {} tells of them; --all-routes removes them\n",
            list(&cleared.others),
            settings.pin_dir.display()
        )]);
        return text;
    }
    text + "nothing of kvlb is left here\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_removed_and_what_was_left_is_told() {
        let settings = Down { pin_dir: "/sys/fs/bpf/kvlb".into(), all_routes: false, wait: Duration::from_secs(1) };
        let addrs = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let all = Cleared {
            pins: vec!["VIPS".to_owned()],
            routes: addrs(&["10.98.0.1", "fd98::1"]),
            others: addrs(&["10.98.0.9"]),
        };
        let text = told(&all, &settings);
        assert!(text.starts_with("removed the routes of 10.98.0.1, fd98::1\nremoved 1 pins"), "{text}");
        assert!(text.contains("left the routes of 10.98.0.9") && text.contains("--all-routes"), "{text}");
        assert_eq!(told(&Cleared::default(), &settings), "nothing of kvlb is left here\n");
    }

    #[test]
    fn a_program_that_is_no_kvlb_is_not_told_to_stop() {
        let error = stop(std::process::id()).unwrap_err();
        assert!(error.to_string().contains("no kvlb"), "{error}");
    }
}

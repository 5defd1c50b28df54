//! `kvlb doctor`: whether this machine gives `kvlb up` what it needs, and what to do where it does not.

use std::process::ExitCode;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use serde_json::json;

use super::FAILED;
use crate::config::{Config, Datapath};
use crate::kernel::{self, Finding, Verdict};
use crate::proxy::Io;

/// A client and its endpoint take a descriptor each; with fewer than these, some thousand clients at a time are all.
const DESCRIPTORS: u64 = 65_536;

/// Looks at everything, and says it; ends with 7 where something is amiss.
#[expect(clippy::print_stdout, reason = "it speaks to the person who asks")]
pub fn doctor(config: &Config, as_json: bool) -> ExitCode {
    let findings = examine(config);
    let worst = findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok);
    if as_json {
        let shown = |finding: &Finding| {
            json!({"check": finding.check, "verdict": finding.verdict.label().to_ascii_lowercase(),
                "found": finding.found, "advice": finding.advice})
        };
        println!("{:#}", json!(findings.iter().map(shown).collect::<Vec<_>>()));
    } else {
        print!("{}", page(&findings, config));
    }
    if worst == Verdict::Fail { ExitCode::from(FAILED) } else { ExitCode::SUCCESS }
}

fn examine(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    if config.datapath == Datapath::Auto {
        findings = kernel::examine(&super::kernel_config(config));
    }
    findings.extend([descriptors(), io(config.io)]);
    findings
}

fn page(findings: &[Finding], config: &Config) -> String {
    let mut text = String::new();
    for Finding { check, verdict, found, advice } in findings {
        text.extend([format!("{:<5} {check:<16} {found}\n", verdict.label())]);
        if !advice.is_empty() {
            text.extend([format!("{:<5} {:<16} -> {advice}\n", "", "")]);
        }
    }
    let fails = |of_kernel: bool| {
        findings.iter().any(|finding| finding.verdict == Verdict::Fail && (finding.check != IO) == of_kernel)
    };
    let outlook = match (config.datapath, fails(true), config.xdp_devices.is_empty()) {
        (Datapath::None, ..) => "kvlb binds the VIPs itself, as asked",
        (Datapath::Auto, false, _) => "the kernel steers",
        (Datapath::Auto, true, true) => "kvlb would bind the VIPs itself, or not start where another one runs",
        (Datapath::Auto, true, false) => "kvlb would not start: --xdp-dev needs the kernel's share",
    };
    let outlook = if fails(false) { "kvlb would not start with this --io" } else { outlook };
    text + outlook + "\n"
}

fn descriptors() -> Finding {
    const CHECK: &str = "open files";
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((0, 0));
    if hard == RLIM_INFINITY {
        return Finding::ok(CHECK, "unlimited");
    }
    let found = format!("at most {hard}: {} clients with an endpoint each", hard / 2);
    if hard < DESCRIPTORS {
        return Finding::warn(CHECK, found, "LimitNOFILE=1048576 in the unit, or `ulimit -Hn 1048576`");
    }
    Finding::ok(CHECK, found)
}

const IO: &str = "io_uring";

fn io(io: Io) -> Finding {
    let advice = "sysctl kernel.io_uring_disabled=0, and a seccomp profile that allows io_uring; epoll serves as well";
    match io.resolve() {
        Ok((engine, None)) => Finding::ok(IO, format!("data threads use {}", engine.label())),
        Ok((engine, Some(error))) => Finding::warn(IO, format!("{error}: data threads use {}", engine.label()), advice),
        Err(error) => Finding::fail(IO, error.to_string(), advice),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Env, UpFlags};

    #[test]
    fn a_page_says_what_there_is_what_to_do_and_what_would_come_of_it() {
        let with = |args: &UpFlags| Config::new(args, &Env::of([("KVLB_NO_STATE", "true")]), 1).unwrap();
        let flags = UpFlags { xdp_dev: vec!["eth0".to_owned()], ..UpFlags::default() };
        let none = UpFlags { datapath: Some("none".to_owned()), ..UpFlags::default() };
        let findings = [
            Finding::ok("kernel", "Linux 6.18"),
            Finding::fail("lo", "down", "`ip link set lo up`"),
            Finding::warn("open files", "at most 1024", "more"),
        ];
        let text = page(&findings, &with(&UpFlags::default()));
        assert_eq!(
            text,
            "ok    kernel           Linux 6.18\n\
             FAIL  lo               down\n                       -> `ip link set lo up`\n\
             warn  open files       at most 1024\n                       -> more\n\
             kvlb would bind the VIPs itself, or not start where another one runs\n"
        );
        assert!(page(&findings, &with(&flags)).ends_with("kvlb would not start: --xdp-dev needs the kernel's share\n"));
        assert!(page(&findings[..1], &with(&flags)).ends_with("the kernel steers\n"));
        assert!(page(&findings[2..], &with(&none)).ends_with("as asked\n"));
    }
}

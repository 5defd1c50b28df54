//! What an operator does before, after and instead of a stop: `kvlb doctor`, `kvlb down`, and a start with no more than the
//! privileges that the systemd unit grants.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::fs;

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::kvlb::{Kvlb, binary};
use kvlb_tests::harness::netns::Netns;
use kvlb_tests::harness::skips;
use kvlb_tests::harness::stage::{MODEL, PATIENCE, Stage, engine, rule};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// Runs a client of the stage's kvlb that needs its pin directory.
fn about(stage: &Stage, command: &str, more: &[&str]) -> (Option<i32>, String) {
    let pins = stage.pins().display().to_string();
    let args = [&[command, "--pin-dir", &pins][..], more].concat();
    let output = stage.cli(&args).unwrap();
    (output.code, output.out + &output.err)
}

fn routes(stage: &Stage) -> String {
    stage.program(Path::new("ip"), &["route", "show", "table", "local", "proto", "75"]).unwrap().ok().unwrap()
}

#[tokio::test]
async fn down_stops_a_kvlb_that_runs_and_removes_what_one_that_was_killed_has_left() {
    let Some(stage) = Stage::new("down").unwrap() else { return };
    let engines = stage.engines(11, 1, &engine()).await.unwrap();
    let mut kvlb = stage.kvlb(&[]).await.unwrap();
    kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    assert!(routes(&stage).contains("10.10.10.254"));
    let (code, text) = about(&stage, "down", &[]);
    assert!(text.contains(&format!("process {} is told to stop", kvlb.id())), "{text}");
    assert!(code == Some(0) && text.ends_with("nothing of kvlb is left here\n"), "{text}");
    assert!(kvlb.ended(PATIENCE).await.unwrap().success(), "{}", kvlb.log());
    assert!(routes(&stage).is_empty() && !stage.pins().exists());

    // Its rules are kept: the next one serves them, and is killed.
    let mut kvlb = stage.kvlb(&[]).await.unwrap();
    assert!(routes(&stage).contains("10.10.10.254"));
    kvlb.signal(Signal::SIGKILL).unwrap();
    kvlb.ended(PATIENCE).await.unwrap();
    assert!(routes(&stage).contains("10.10.10.254") && stage.pins().join("VIPS").exists());
    let (_, text) = about(&stage, "doctor", &[]);
    assert!(text.contains("8 pins of a kvlb that is gone"), "{text}");
    let (code, text) = about(&stage, "down", &[]);
    assert!(code == Some(0) && text.contains("removed the routes of 10.10.10.254\nremoved 8 pins from"), "{text}");
    assert!(routes(&stage).is_empty() && !stage.pins().exists());
    assert_eq!(about(&stage, "down", &[]), (Some(0), "nothing of kvlb is left here\n".to_owned()));
}

#[tokio::test]
async fn doctor_says_what_there_is_what_is_missing_and_what_to_do() {
    let Some(stage) = Stage::new("doctor").unwrap() else { return };
    let far = Netns::new("doctor-far").unwrap();
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let (device, _far) = stage.netns().link((ip("10.77.0.1"), 24), &far, (ip("10.77.0.2"), 24)).unwrap();
    let (code, text) = about(&stage, "doctor", &["--xdp-dev", &device, "--no-state"]);
    assert_eq!(code, Some(0), "{text}");
    for line in ["ok    kernel", "ok    privileges", "ok    bpf file system", "ok    lo               up"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(text.contains("the kernel takes steering and admission") && text.contains("open files"), "{text}");
    assert!(text.contains(&format!("{device}: its driver takes XDP programs (native)")), "{text}");
    assert!(text.ends_with("the kernel steers\n"), "{text}");
    assert!(!stage.pins().exists(), "it changes nothing");
    let shown = stage.program(Path::new("ip"), &["link", "show", &device]).unwrap().ok().unwrap();
    assert!(!shown.contains("xdp"), "{shown}");

    let kvlb = stage.kvlb(&[]).await.unwrap();
    let (code, text) = about(&stage, "doctor", &["-o", "json"]);
    let findings: Vec<Value> = serde_json::from_str(&text).unwrap();
    let held = findings.iter().find(|finding| finding["check"] == "pin directory").unwrap();
    assert_eq!((code, held["verdict"].as_str()), (Some(7), Some("fail")), "{text}");
    assert!(held["found"].as_str().unwrap().contains(&kvlb.id().to_string()), "{held}");
    assert!(held["advice"].as_str().unwrap().contains("--takeover"), "{held}");
    kvlb.stop().await.unwrap();

    let kvlb = binary("kvlb").unwrap().display().to_string();
    let bare = ["--bounding-set", "-all", "--inh-caps", "-all", &kvlb, "doctor", "--pin-dir", "/tmp/kvlb-none"];
    let output = stage.program(Path::new("setpriv"), &bare).unwrap();
    assert_eq!(output.code, Some(7), "{}", output.out);
    for part in
        ["FAIL  privileges       without CAP_BPF and CAP_NET_ADMIN", "-> run as root", "mount -t bpf", "FAIL  programs"]
    {
        assert!(output.out.contains(part), "{part}: {}", output.out);
    }
    let (code, text) = about(&stage, "doctor", &["--datapath", "none"]);
    assert!(code == Some(0) && text.ends_with("as asked\n") && !text.contains("programs"), "{text}");
    stage.program(Path::new("ip"), &["link", "set", "lo", "down"]).unwrap().ok().unwrap();
    let (code, text) = about(&stage, "doctor", &[]);
    assert!(code == Some(7) && text.contains("`ip link set lo up`"), "{text}");
}

/// The capabilities that a line of the unit lists, as `setpriv` writes them.
fn capabilities(line: &str) -> Vec<String> {
    let unit = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/kvlb.service")).unwrap();
    let listed = unit.lines().find_map(|at| at.strip_prefix(line)).unwrap();
    listed.split_whitespace().map(|name| name.strip_prefix("CAP_").unwrap().to_ascii_lowercase()).collect()
}

/// A program that starts kvlb as the unit does: as a user who is nobody, with these capabilities, and a BPF file system that
/// this user may write to.
fn unit(stage: &Stage, capabilities: &[String]) -> PathBuf {
    let dir = stage.dir();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    let kvlb = dir.join("kvlb");
    if !kvlb.exists() {
        fs::copy(binary("kvlb").unwrap(), &kvlb).unwrap();
    }
    let added = [&["-all".to_owned()], capabilities].concat().join(",+");
    let script = format!(
        "#!/bin/sh\nset -e\ncd {dir}\nmkdir -p bpf own\nmount -t bpf bpf bpf\nchown 65534:65534 bpf own\n\
         exec setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs --bounding-set {added} \
         --inh-caps {added} --ambient-caps {added} {dir}/kvlb \"$@\"\n",
        dir = dir.display()
    );
    let (inner, outer) = (dir.join("inner"), dir.join("outer"));
    fs::write(&inner, script).unwrap();
    // The mount is this start's own, and goes with it.
    fs::write(&outer, format!("#!/bin/sh\nexec unshare --mount {} \"$@\"\n", inner.display())).unwrap();
    for file in [&inner, &outer] {
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    outer
}

#[tokio::test]
async fn the_unit_grants_just_what_kvlb_needs_to_steer_and_to_judge_frames() {
    let Some(stage) = Stage::new("unit").unwrap() else { return };
    let far = Netns::new("unit-far").unwrap();
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let (device, _far) = stage.netns().link((ip("10.77.0.1"), 24), &far, (ip("10.77.0.2"), 24)).unwrap();
    let engines = stage.engines(11, 1, &engine()).await.unwrap();
    let granted = capabilities("AmbientCapabilities=");
    assert_eq!(granted, capabilities("CapabilityBoundingSet="));
    let (pins, own) = (stage.dir().join("bpf/maps"), stage.dir().join("own/state"));
    let (pins, own) = (pins.display().to_string(), own.display().to_string());
    let args = ["--pin-dir", &pins, "--state-dir", &own, "--xdp-dev", &device];
    let kvlb = Kvlb::start_program(&unit(&stage, &granted), stage.config(&args)).await.unwrap();
    let (_, status) = kvlb.api("GET", "/netlox/v1/status", None).await.unwrap();
    assert_eq!((&status["datapath"]["mode"], &status["xdp"][0]["mode"]), (&json!("sk_lookup"), &json!("native")));
    assert_eq!((&status["io"], &status["degraded"]), (&json!("io_uring"), &json!([])), "{status}");
    // A port that only root may bind.
    kvlb.create(&rule(80, &engines, &json!({}))).await.unwrap();
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 1});
    assert_eq!(stage.ask(80, "/v1/completions", &body).await.unwrap().head.status, 200);
    kvlb.stop().await.unwrap();
    eventually(PATIENCE, "nothing is left", async || routes(&stage).is_empty()).await.unwrap();
    // With one less it says what is missing.
    for left_out in &granted {
        let fewer: Vec<_> = granted.iter().filter(|name| *name != left_out).cloned().collect();
        let error = Kvlb::start_program(&unit(&stage, &fewer), stage.config(&args)).await.unwrap_err();
        assert!(format!("{error:#}").contains("no privilege to"), "without {left_out}: {error:#}");
    }
}

#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/kvlb.service");
    let Ok(output) = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output() else {
        skips::skipped("the unit's check", "no systemd-analyze");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // That neither the program nor the user is installed here is no mistake of the unit's.
    let wrong: Vec<_> =
        said.lines().filter(|line| line.contains("kvlb.service") && !line.contains("not executable")).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

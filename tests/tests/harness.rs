//! The harness's handle on a daemon, tried on a stand-in: it must be as good at failing as at starting.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig, binary};
use kvlb_tests::harness::netns::Netns;
use tokio::net::TcpStream;

/// Starts a program that takes kvlb's arguments and is a simulated engine at the API's address. It lies in the repository, since a
/// program just written can be busy while another test forks.
async fn start(config: KvlbConfig) -> anyhow::Result<Kvlb> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in/kvlb");
    let engine = binary("sim-engine")?.display().to_string();
    Kvlb::start_program(&program, config.env("STAND_IN_ENGINE", &engine)).await
}

#[tokio::test]
async fn a_daemon_is_started_asked_and_stopped_cleanly() {
    let config = KvlbConfig::with(&["--threads", "1"]).env("STAND_IN", "hello");
    let kvlb = start(config).await.unwrap();
    let log = kvlb.log();
    assert!(
        log.starts_with("up --threads 1 --api 127.0.0.1:") && log.contains("--state-dir") && log.contains("hello"),
        "{log}"
    );
    assert_eq!(kvlb.api("GET", "/version", None).await.unwrap().0, 200);
    let (status, answer) = kvlb.api("POST", "/debug/fault", Some(&serde_json::json!({"x": 1}))).await.unwrap();
    assert!(status == 400 && answer["error"].is_string());
    let api = kvlb.api_address();
    kvlb.stop().await.unwrap();
    assert!(TcpStream::connect(api).await.is_err());
}

#[tokio::test]
async fn a_daemon_that_fails_is_reported_with_its_log_and_a_dropped_one_is_gone() {
    let failed = start(KvlbConfig::default().env("STAND_IN_FAILS", "1")).await.unwrap_err();
    let text = format!("{failed:#}");
    assert!(text.contains("exit status: 3") && text.contains("up --api"), "{text}");
    let kvlb = start(KvlbConfig::default()).await.unwrap();
    let (id, api) = (kvlb.id(), kvlb.api_address());
    drop(kvlb);
    assert!(!PathBuf::from(format!("/proc/{id}/exe")).exists());
    assert!(TcpStream::connect(api).await.is_err());
}

#[tokio::test]
async fn a_daemon_in_a_namespace_is_asked_from_outside_and_seen_by_nobody_else() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: network namespaces need root");
        return;
    }
    let netns = Arc::new(Netns::new("daemon").unwrap());
    let config = KvlbConfig::with(&["--api", "127.0.0.1:11111"]).inside(&netns);
    let kvlb = start(config).await.unwrap();
    assert_eq!(kvlb.api("GET", "/version", None).await.unwrap().0, 200);
    let link = std::fs::read_link(format!("/proc/{}/ns/net", kvlb.id())).unwrap();
    assert_ne!(link, std::fs::read_link("/proc/self/ns/net").unwrap());
    assert_eq!(kvlb.ask("GET", "/metrics", None).await.unwrap().head.status, 200);
    kvlb.stop().await.unwrap();
}

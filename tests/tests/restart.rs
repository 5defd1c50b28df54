//! Coming and going: rules outlive kvlb, streams outlive its SIGTERM, and nothing of it outlives itself.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvlb_tests::engine::EngineConfig;
use kvlb_tests::harness::http::{Client, End};
use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig};
use kvlb_tests::harness::stage::{MODEL, Metrics, PATIENCE, Stage, VIP, at, engine, rule, vip};
use kvlb_tests::harness::until_some;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::time::Instant;

const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn rules_are_back_after_a_kill_before_the_first_connection_is_accepted() {
    for datapath in ["auto", "none"] {
        let Some(stage) = Stage::new("killed").unwrap() else { return };
        if datapath == "none" {
            stage.own(VIP).unwrap();
        }
        let engines = stage.engines(11, 2, &engine()).await.unwrap();
        let up = ["--datapath", datapath];
        let kvlb = stage.kvlb(&up).await.unwrap();
        let id = kvlb.create(&rule(8080, &engines, &json!({"name": "kept", "sel": 3}))).await.unwrap();
        let other = kvlb.create(&rule(8081, &engines[..1], &json!({"kvExactMode": 0}))).await.unwrap();
        stage.ask(8080, COMPLETIONS, &short()).await.unwrap();
        let before = kvlb.rules().await.unwrap();
        kvlb.signal(Signal::SIGKILL).unwrap();
        drop(kvlb);
        // On io_uring the kernel closes the sockets of a process that was killed a moment after it.
        until_some(PATIENCE, "its sockets are gone", async || stage.connect(vip(8080)).err()).await.unwrap();
        // A client that never stops asking: whatever is accepted is served by the rules.
        let asking = Asking::start(&stage);
        let kvlb = stage.kvlb(&up).await.unwrap();
        let answered = asking.until_answered(20).await;
        // Its thread ends before kvlb does: a SYN whose route goes away is sent again for two minutes.
        drop(asking);
        assert!(answered.iter().all(|status| *status == 200), "{datapath}: {answered:?}");
        let after = kvlb.rules().await.unwrap();
        assert_eq!(words(&after), words(&before));
        assert_eq!((&after[0]["id"], &after[1]["id"]), (&json!(id), &json!(other)));
        // A number is never given twice, not even that of a rule that is gone.
        kvlb.api("DELETE", "/netlox/v1/config/loadbalancer/all", None).await.unwrap();
        kvlb.stop().await.unwrap();
        let kvlb = stage.kvlb(&up).await.unwrap();
        assert!(kvlb.rules().await.unwrap().is_empty());
        assert!(kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap() > other);
        kvlb.stop().await.unwrap();
    }
}

#[tokio::test]
async fn a_stream_in_flight_ends_properly_after_sigterm_and_then_nothing_is_left() {
    for (datapath, io) in [("auto", "uring"), ("auto", "epoll"), ("none", "uring")] {
        let Some(stage) = Stage::new("drained").unwrap() else { return };
        if datapath == "none" {
            stage.own(VIP).unwrap();
        }
        let slow = EngineConfig { decode_ms_per_token: 40.0, ..engine() };
        let engines = stage.engines(11, 1, &slow).await.unwrap();
        let mut kvlb = stage.kvlb(&["--datapath", datapath, "--io", io]).await.unwrap();
        let id = kvlb.id();
        kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
        let mut client = streaming(&stage, 30).await;
        kvlb.signal(Signal::SIGTERM).unwrap();
        // Nothing new is taken while the stream goes on.
        let refused = async || stage.connect(vip(8080)).err();
        until_some(PATIENCE, "new connections are refused", refused).await.unwrap();
        assert!(kvlb.ended(Duration::ZERO).await.is_err(), "it went before its stream");
        let mut text = String::new();
        while let Some(chunk) = client.chunk().await.unwrap() {
            text.push_str(&String::from_utf8_lossy(&chunk));
        }
        assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
        let status = kvlb.ended(PATIENCE).await.unwrap();
        assert_eq!(status.code(), Some(0), "{}", kvlb.log());
        assert_nothing_left(&stage, id);
    }
}

#[tokio::test]
async fn the_drain_timeout_bounds_how_long_a_stream_may_go_on() {
    let Some(stage) = Stage::new("cut").unwrap() else { return };
    let slow = EngineConfig { decode_ms_per_token: 100.0, ..engine() };
    let engines = stage.engines(11, 1, &slow).await.unwrap();
    let mut kvlb = stage.kvlb(&["--drain-timeout", "500ms"]).await.unwrap();
    let id = kvlb.id();
    kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    let mut client = streaming(&stage, 600).await;
    kvlb.signal(Signal::SIGTERM).unwrap();
    let start = Instant::now();
    while let Ok(Some(_)) = client.chunk().await {}
    assert_ne!(client.closed().await, End::Complete);
    let status = kvlb.ended(Duration::from_secs(10)).await.unwrap();
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(500) && took < Duration::from_secs(5), "{took:?}");
    assert_eq!(status.code(), Some(0), "{}", kvlb.log());
    assert_nothing_left(&stage, id);
}

#[tokio::test]
async fn warm_idle_engines_are_known_by_replay_within_a_second() {
    let Some(stage) = Stage::new("warm").unwrap() else { return };
    let mut engines = stage.engines(11, 2, &engine()).await.unwrap();
    engines.push(stage.engine(at(13, EngineConfig { no_replay: true, ..engine() })).await.unwrap());
    for (number, warm) in engines.iter().enumerate() {
        let body = json!({"model": MODEL, "prompt": prompt(number), "max_tokens": 1});
        stage.post(warm.addresses().http, COMPLETIONS, &body).await.unwrap();
    }
    // Once to keep the rule, and once in front of engines that publish nothing any more.
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let id = kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    kvlb.stop().await.unwrap();
    let kvlb = stage.kvlb(&[]).await.unwrap();
    for (position, warm) in engines[..2].iter().enumerate() {
        let held = warm.blocks().len();
        let known = |status: &Value| status["blocks"] == held && status["replay"] == "applied";
        let status = kvlb.status_when(Duration::from_secs(1), (id, position), known).await.unwrap();
        assert!(held > 0 && status["contract"] == "verified", "{status}");
    }
    // The first request after the start is a hit.
    kvlb.tokenizes(id, MODEL).await.unwrap();
    let body = json!({"model": MODEL, "prompt": prompt(1), "max_tokens": 1});
    assert_eq!(stage.ask(8080, COMPLETIONS, &body).await.unwrap().engine(), "engine-12");
    let silent = kvlb.status_when(PATIENCE, (id, 2), |status| status["replay"] == "unavailable").await.unwrap();
    assert_eq!((&silent["blocks"], &silent["connected"]), (&json!(0), &json!(true)), "{silent}");
    let shown = stage.cli(&["get", "kvstatus"]).unwrap().ok().unwrap();
    assert!(shown.contains("unavailable") && shown.contains("applied"), "{shown}");
    // Without replay kvlb learns what is published from now on.
    let body = json!({"model": MODEL, "prompt": prompt(3), "max_tokens": 1});
    stage.post(engines[2].addresses().http, COMPLETIONS, &body).await.unwrap();
    kvlb.status_when(PATIENCE, (id, 2), |status| status["blocks"].as_u64() > Some(0)).await.unwrap();
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn two_kvlbs_share_engines_and_never_a_directory() {
    let Some(stage) = Stage::new("two").unwrap() else { return };
    let engines = stage.engines(11, 2, &engine()).await.unwrap();
    let one = stage.kvlb(&[]).await.unwrap();
    let first = one.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    let refused = |config: KvlbConfig| async move { format!("{:#}", Kvlb::start(config).await.unwrap_err()) };
    // The second one names what is in use: the rules' directory, then the pins.
    let same_state = ["--api", "127.0.0.1:11112", "--pin-dir", "/sys/fs/bpf/kvlb-nobody"];
    let why = refused(stage.config(&same_state)).await;
    let directory = stage.dir().join("state").display().to_string();
    assert!(why.contains("exit status: 7") && why.contains(&directory), "{why}");
    let other_state = stage.dir().join("other").display().to_string();
    let why = refused(stage.config(&["--api", "127.0.0.1:11112", "--state-dir", &other_state])).await;
    assert!(why.contains("exit status: 7") && why.contains(&stage.pins().display().to_string()), "{why}");
    // With directories of its own it works beside the first, and both know the same blocks.
    let other_pins = stage.pins().with_extension("two");
    let own = ["--api", "127.0.0.1:11112", "--state-dir", &other_state, "--pin-dir", &other_pins.display().to_string()];
    let two = stage.kvlb(&own).await.unwrap();
    let second = two.create(&rule(8082, &engines, &json!({}))).await.unwrap();
    for (kvlb, id) in [(&one, first), (&two, second)] {
        kvlb.subscribed(id).await.unwrap();
        kvlb.tokenizes(id, MODEL).await.unwrap();
    }
    let body = json!({"model": MODEL, "prompt": prompt(0), "max_tokens": 1});
    let owner = stage.ask(8080, COMPLETIONS, &body).await.unwrap();
    one.settled(first, &engines).await.unwrap();
    two.settled(second, &engines).await.unwrap();
    let warm = stage.ask(8082, COMPLETIONS, &body).await.unwrap();
    assert_eq!(warm.engine(), owner.engine());
    let moved = two.metrics().await.unwrap().moved(&Metrics::default(), "loxilb_pd_kv_tier15_hits_total");
    assert_eq!(moved.len(), 1, "{moved:?}");
    let id = two.id();
    two.stop().await.unwrap();
    assert!(!other_pins.exists() && !std::path::Path::new(&format!("/proc/{id}")).exists());
    // The first one's VIP, at the same address, is served on.
    assert_eq!(stage.ask(8080, COMPLETIONS, &body).await.unwrap().head.status, 200);
    let id = one.id();
    one.stop().await.unwrap();
    assert_nothing_left(&stage, id);
}

#[tokio::test]
async fn a_bad_value_in_the_environment_stops_the_start_by_name() {
    let Some(stage) = Stage::new("values").unwrap() else { return };
    for (name, value) in [
        ("LOXILB_KV_LB_MODE", "sofft"),
        ("LLB_KV_MIN_MATCH_TOKENS", "5000"),
        ("LOXILB_KV_MEAN_LOAD_FACTOR", "99"),
        ("LOXILB_KV_SPILL_RELIEF", "maybe"),
        ("LLB_KV_REPLAY_PORT_OFFSET", "-1"),
        ("LLB_PD_PREFILL_TIMEOUT_SEC", "soon"),
        ("LLB_KV_HASH_DEBUG", "2"),
        ("KVLB_IO", "iocp"),
        ("KVLB_DATAPATH", "xdp"),
        ("KVLB_THREADS", "0"),
        ("KVLB_DRAIN_TIMEOUT", "5 parsecs"),
        ("KVLB_LOG_FORMAT", "xml"),
    ] {
        let failure = Kvlb::start(stage.config(&[]).env(name, value)).await.unwrap_err();
        let why = format!("{failure:#}");
        assert!(why.contains("exit status: ") && !why.contains("exit status: 0"), "{why}");
        assert!(why.contains(name) && why.contains(value), "{name}={value}: {why}");
    }
    assert!(!stage.dir().join("state").exists() && !stage.pins().exists(), "a refused start left something");
}

#[tokio::test]
async fn an_api_that_others_can_reach_is_warned_of() {
    let Some(stage) = Stage::new("open").unwrap() else { return };
    let warns = |log: &str| log.lines().any(|line| line.contains("WARN") && line.contains("API"));
    let kvlb = stage.kvlb(&["--api", "0.0.0.0:11111", "--api-without-token"]).await.unwrap();
    assert!(warns(&kvlb.log()), "{}", kvlb.log());
    kvlb.stop().await.unwrap();
    let kvlb = stage.kvlb(&[]).await.unwrap();
    assert!(!warns(&kvlb.log()), "{}", kvlb.log());
    kvlb.stop().await.unwrap();
}

/// Neither pins, nor routes, nor the process.
fn assert_nothing_left(stage: &Stage, id: u32) {
    assert!(!stage.pins().exists(), "pins are left at {}", stage.pins().display());
    let ip = |args: &[&str]| stage.program(std::path::Path::new("ip"), args).unwrap().ok().unwrap();
    for family in ["-4", "-6"] {
        assert_eq!(ip(&[family, "route", "show", "table", "local", "proto", "75"]), "");
    }
    assert!(!std::path::Path::new(&format!("/proc/{id}/exe")).exists(), "the process is left");
}

/// A client that asks the VIP over and over on a thread of its own.
struct Asking {
    statuses: Arc<std::sync::Mutex<Vec<u16>>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Asking {
    fn start(stage: &Stage) -> Self {
        let (statuses, stop) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let (netns, seen, stopped) = (Arc::clone(stage.netns()), Arc::clone(&statuses), Arc::clone(&stop));
        let ask = async move || {
            while !stopped.load(Ordering::Relaxed) {
                if let Ok(status) = ask_once().await {
                    let seen: &std::sync::Mutex<Vec<u16>> = &seen;
                    seen.lock().unwrap().push(status);
                }
            }
        };
        let thread = std::thread::spawn(move || netns.block_on(ask).unwrap());
        Self { statuses, stop, thread: Some(thread) }
    }

    /// The statuses, once there are so many.
    async fn until_answered(&self, enough: usize) -> Vec<u16> {
        let look = async || {
            let seen = self.statuses.lock().unwrap().clone();
            (seen.len() >= enough).then_some(seen)
        };
        until_some(PATIENCE, "enough answers", look).await.unwrap()
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(self.thread.take().map(std::thread::JoinHandle::join));
    }
}

/// The status of one answer; 0 for a connection that was accepted and then closed without one. Not connecting is an error.
async fn ask_once() -> std::io::Result<u16> {
    let mut client = Client::connect(vip(8080)).await?;
    client.request("POST", COMPLETIONS, &[], short().to_string().as_bytes()).await?;
    Ok(client.answer().await.map_or(0, |answer| answer.head.status))
}

/// A stream that has begun.
async fn streaming(stage: &Stage, tokens: u32) -> Client {
    let mut body = short();
    body["stream"] = json!(true);
    body["max_tokens"] = json!(tokens);
    body["ignore_eos"] = json!(true);
    let mut client = stage.connect(vip(8080)).unwrap();
    client
        .request("POST", COMPLETIONS, &[("Content-Type", "application/json")], body.to_string().as_bytes())
        .await
        .unwrap();
    assert_eq!(client.head().await.unwrap().status, 200);
    client.chunk().await.unwrap().unwrap();
    client
}

fn short() -> Value {
    json!({"model": MODEL, "prompt": "Who wrote Faust?", "max_tokens": 1})
}

fn prompt(number: usize) -> String {
    format!(
        "Prompt {number}. You are a careful librarian. Answer every question in one short sentence and name your source."
    )
}

/// What operators wrote, without what changes by itself.
fn words(rules: &[Value]) -> Vec<Value> {
    let written = |rule: &Value| json!([rule["id"], rule["serviceArguments"], rule["endpoints"][0]["endpointIP"]]);
    rules.iter().map(written).collect()
}

//! The access log of the real program: every request has its line, whatever becomes of it and of the file.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kvlb_tests::harness::http::{Client, Head};
use kvlb_tests::harness::kvlb::binary;
use kvlb_tests::harness::{eventually, free_ports, temp_dir};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use fleet::trio::{all_quiet, completions, prompt};
use fleet::{BLOCK, Fleet, PATH, SOON, Setup, completion, quick};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";

/// Engines behind a kvlb with these flags; nothing but an overlap or a turn chooses.
async fn logging(engines: &[&str], args: &[&str]) -> Fleet {
    let engines = engines.iter().map(|name| quick(name)).collect();
    // A flag lives as long as the test's process.
    let args = args.iter().map(|arg| &*String::leak((*arg).to_owned())).collect();
    let rule = json!({"kvLoadFloor": 100_000, "cb_enable": false});
    Fleet::start(Setup { engines, rule, args, ..Setup::default() }).await.unwrap()
}

/// The lines of a file; none where it is not there.
fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // The last may be half written.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The line of the request with this id, once it is there.
async fn line_of(path: &Path, id: &str) -> Value {
    let find = || lines(path).into_iter().find(|line| line["request_id"] == id);
    eventually(SOON, &format!("the line of {id}"), async || find().is_some()).await.unwrap();
    find().unwrap()
}

fn path_in(dir: &tempfile::TempDir) -> std::path::PathBuf {
    dir.path().join("access.jsonl")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_tells_the_decision_and_what_the_engine_reports_and_no_secret() {
    let dir = temp_dir().unwrap();
    let path = path_in(&dir);
    let fleet = logging(&["a", "b"], &["--access-log", "full", "--access-log-file", path.to_str().unwrap()]).await;
    let tokens = prompt(1);
    fleet.ask_with(&[("X-Request-Id", "cold")], &completion(&tokens, 1)).await.unwrap();
    fleet.agree().await.unwrap();
    let parent = format!("00-{TRACE}-{SPAN}-01");
    let warm = fleet
        .ask_with(&[("X-Request-Id", "warm"), ("traceparent", &parent), ("tracestate", "v=1")], &completion(&tokens, 1))
        .await
        .unwrap();
    let mut streamed = completion(&tokens, 2);
    streamed["stream"] = json!(true);
    streamed["user"] = json!("SECRET");
    fleet.ask_with(&[("X-Request-Id", "stream"), ("Authorization", "Bearer SECRET")], &streamed).await.unwrap();

    let cold = line_of(&path, "cold").await;
    assert_eq!((&cold["tier"], &cold["reason"], &cold["depth"]), (&json!("2"), &json!("no_worker"), &json!(0)));
    assert_eq!((&cold["blocks"], &cold["prompt_tokens"]), (&json!(8), &json!(tokens.len())));
    assert_eq!((&cold["predicted_cached_tokens"], &cold["reported_cached_tokens"]), (&json!(0), &json!(0)));
    let line = line_of(&path, "warm").await;
    let cached = (8 - 1) * BLOCK as u64;
    let owner = fleet.who(&warm).unwrap();
    for (field, value) in [
        ("rule", json!(fleet.id())),
        ("vip", json!(fleet.vip.to_string())),
        ("method", json!("POST")),
        ("path", json!(PATH)),
        ("protocol", json!("HTTP/1.1")),
        ("status", json!(200)),
        ("end", json!("complete")),
        ("model", json!("tiny")),
        ("endpoint", json!(fleet.engine_at(owner).to_string())),
        ("ep_idx", json!(owner)),
        ("retries", json!(0)),
        ("tier", json!("1.5")),
        ("depth", json!(8)),
        ("blocks", json!(8)),
        ("prompt_tokens", json!(tokens.len())),
        ("predicted_cached_tokens", json!(cached)),
        ("reported_cached_tokens", json!(warm.cached_tokens().unwrap())),
        ("stream", json!(false)),
        ("trace_id", json!(TRACE)),
        ("parent_id", json!(SPAN)),
    ] {
        assert_eq!(line[field], value, "{field} of {line}");
    }
    assert_eq!(line["reported_cached_tokens"], cached, "the engine found what was predicted");
    let seen = completions(&fleet, owner).into_iter().find(|seen| seen.header("x-request-id") == Some("warm")).unwrap();
    let ours = format!("00-{TRACE}-{}-01", line["span_id"].as_str().unwrap());
    assert_eq!((seen.header("traceparent"), seen.header("tracestate")), (Some(ours.as_str()), Some("v=1")));

    let line = line_of(&path, "stream").await;
    assert_eq!((&line["stream"], &line["end"]), (&json!(true), &json!("complete")));
    let seen =
        completions(&fleet, owner).into_iter().find(|seen| seen.header("x-request-id") == Some("stream")).unwrap();
    let (trace, span) = (line["trace_id"].as_str().unwrap(), line["span_id"].as_str().unwrap());
    assert_eq!(seen.header("traceparent"), Some(format!("00-{trace}-{span}-01").as_str()));
    assert!(line["parent_id"].is_null());
    assert!(!std::fs::read_to_string(&path).unwrap().contains("SECRET"));
    all_quiet(&fleet).await;
}

/// One request over a connection of its own, as it stands; the head of its answer.
async fn raw(fleet: &Fleet, request: &str) -> Head {
    let mut client = Client::connect(fleet.vip).await.unwrap();
    client.send(request.as_bytes()).await.unwrap();
    client.head().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_has_one_line_with_or_without_a_rule() {
    let dir = temp_dir().unwrap();
    let path = path_in(&dir);
    let fleet = logging(&["a"], &["--access-log", "full", "--access-log-file", path.to_str().unwrap()]).await;
    let mut sent = 0;
    let mut ask = async |id: &str, head: &str, body: &str| {
        sent += 1;
        let length = body.len();
        let request =
            format!("{head} HTTP/1.1\r\nHost: a\r\nX-Request-Id: {id}\r\nContent-Length: {length}\r\n\r\n{body}");
        raw(&fleet, &request).await.status
    };
    let body = completion(&prompt(1), 1).to_string();
    assert_eq!(ask("sound", "POST /v1/completions", &body).await, 200);
    fleet.put_rule(|rule| rule["serviceArguments"]["kvExactMode"] = json!(0)).await.unwrap();
    assert_eq!(ask("plain", "POST /v1/completions?key=SECRET", &body).await, 200);
    fleet.engines[0].faults().set(|plan| plan.status = Some(503));
    assert_eq!(ask("busy", "POST /v1/completions", &body).await, 503);
    fleet.engines[0].faults().set(|plan| plan.status = Some(500));
    assert_eq!(ask("fails", "POST /v1/completions", &body).await, 500);
    fleet.engines[0].faults().clear();
    for (request, status) in [
        ("nonsense\r\n\r\n".to_owned(), 400),
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), 400),
        ("GET / HTTP/3.0\r\nHost: a\r\n\r\n".to_owned(), 505),
        (format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(20_000)), 414),
        (format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(70_000)), 431),
    ] {
        assert_eq!(raw(&fleet, &request).await.status, status);
        sent += 1;
    }
    // One that leaves in its body.
    let mut leaving = Client::connect(fleet.vip).await.unwrap();
    leaving
        .send(b"POST / HTTP/1.1\r\nHost: a\r\nX-Request-Id: leaves\r\nContent-Length: 10\r\n\r\nhalf")
        .await
        .unwrap();
    sent += 1;
    drop(leaving);

    eventually(SOON, "all lines", async || lines(&path).len() >= sent).await.unwrap();
    let all = lines(&path);
    assert_eq!(all.len(), sent, "{all:?}");
    let of = |id: &str| all.iter().find(|line| line["request_id"] == id).unwrap();
    assert_eq!((&of("sound")["tier"], &of("sound")["reason"]), (&json!("2"), &json!("no_worker")));
    let plain = of("plain");
    assert_eq!(
        (&plain["reason"], &plain["path"], &plain["end"]),
        (&json!("mode_off"), &json!(PATH), &json!("complete"))
    );
    assert_eq!((&of("busy")["status"], &of("busy")["code"]), (&json!(503), &Value::Null));
    assert_eq!((&of("leaves")["end"], &of("leaves")["phase"]), (&json!("client_left"), &json!("body")));
    assert_eq!((&of("leaves")["request_bytes"], &of("leaves")["status"]), (&json!(4), &Value::Null));
    let codes: BTreeSet<&str> = all.iter().filter_map(|line| line["code"].as_str()).collect();
    for code in ["bad_request", "http_version_not_supported", "uri_too_long", "header_too_large"] {
        assert!(codes.contains(code), "{codes:?}");
    }
    // What kvlb counts is what it has lines for.
    let own = fleet.sum("kvlb_errors_total").await.unwrap();
    assert_eq!(all.iter().filter(|line| line["code"].is_string()).count() as u64, own);
    let left = fleet.sum("kvlb_client_aborts_total").await.unwrap();
    assert_eq!(all.iter().filter(|line| line["end"] == "client_left").count() as u64, left);
    let answered = fleet.sum("kvlb_requests_total").await.unwrap();
    assert_eq!(all.iter().filter(|line| line["rule"].is_u64() && line["status"].is_u64()).count() as u64, answered);
    assert_eq!(fleet.count("kvlb_access_log_lines_total").await.unwrap(), sent as u64);
    assert_eq!(fleet.sum("kvlb_access_log_dropped_total").await.unwrap(), 0);
    assert!(!std::fs::read_to_string(&path).unwrap().contains("SECRET"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_rotated_loses_no_line() {
    let dir = temp_dir().unwrap();
    let path = path_in(&dir);
    let fleet = logging(&["a"], &["--access-log", "full", "--access-log-file", path.to_str().unwrap()]).await;
    let body = completion(&prompt(1), 1);
    let ask = async |id: &str| drop(fleet.ask_with(&[("X-Request-Id", id)], &body).await.unwrap());
    ask("before").await;
    line_of(&path, "before").await;
    // By a signal, as a script of logrotate's would.
    std::fs::rename(&path, dir.path().join("1")).unwrap();
    fleet.kvlb.signal(Signal::SIGHUP).unwrap();
    eventually(SOON, "a new file", async || path.exists()).await.unwrap();
    ask("told").await;
    line_of(&path, "told").await;
    // And by itself.
    std::fs::rename(&path, dir.path().join("2")).unwrap();
    eventually(SOON, "another new file", async || path.exists()).await.unwrap();
    ask("untold").await;
    line_of(&path, "untold").await;
    let ids = |name: &str| {
        let all = lines(&dir.path().join(name));
        all.iter().filter_map(|line| line["request_id"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(
        (ids("1"), ids("2"), ids("access.jsonl")),
        (vec!["before".into()], vec!["told".into()], vec!["untold".into()])
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_costs_lines_and_nothing_else() {
    let fleet = logging(&["a"], &["--access-log", "full", "--access-log-file", "/dev/full"]).await;
    let body = completion(&prompt(1), 1);
    for round in 1..=3 {
        for _ in 0..20 {
            fleet.ask(&body).await.unwrap();
        }
        eventually(SOON, "the loss is counted", async || {
            let lost = fleet.count("kvlb_access_log_dropped_total{reason=\"write_failed\"}").await;
            lost.is_ok_and(|lost| lost == round * 20)
        })
        .await
        .unwrap();
    }
    assert_eq!(fleet.count("kvlb_access_log_lines_total").await.unwrap(), 0);
    assert_eq!(fleet.kvlb.log().matches("the access log cannot be written").count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sample_holds_failures_and_engines_are_told_of_it() {
    let dir = temp_dir().unwrap();
    let path = path_in(&dir);
    let args =
        ["--access-log", "sampled", "--access-log-sample", "1000000", "--access-log-file", path.to_str().unwrap()];
    let fleet = logging(&["a", "b"], &args).await;
    let body = completion(&prompt(1), 1);
    for _ in 0..20 {
        fleet.ask(&body).await.unwrap();
    }
    let unsampled = (0..2)
        .flat_map(|number| completions(&fleet, number))
        .filter_map(|seen| seen.header("traceparent").map(|value| value.ends_with("-00")));
    // By chance one of a million is in the sample.
    assert!(unsampled.filter(|told| *told).count() >= 19);
    fleet.engines[0].faults().set(|plan| plan.status = Some(503));
    fleet.engines[1].faults().set(|plan| plan.status = Some(503));
    let mut client = fleet::Talker::new(fleet.vip);
    let answer = client.ask(&[("X-Request-Id", "fails")], &body).await.unwrap();
    assert_eq!(answer.head.status, 503);
    let line = line_of(&path, "fails").await;
    assert_eq!((&line["status"], &line["retries"]), (&json!(503), &json!(1)));
    assert!(lines(&path).len() <= 2, "{:?}", lines(&path));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_where_it_is_off() {
    let fleet = logging(&["a"], &[]).await;
    fleet.ask(&completion(&prompt(1), 1)).await.unwrap();
    all_quiet(&fleet).await;
    assert!(!fleet.kvlb.log().contains("{\"time\":"));
    assert_eq!(fleet.count("kvlb_access_log_lines_total").await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standard_output_holds_lines_alone_the_last_ones_too() {
    let dir = temp_dir().unwrap();
    let (out, err) = (dir.path().join("out"), dir.path().join("err"));
    let [api, vip, nobody] = free_ports().unwrap().map(|port| format!("127.0.0.1:{port}"));
    let mut kvlb = Ended(
        Command::new(binary("kvlb").unwrap())
            .args(["up", "--datapath", "none", "--no-state", "--access-log", "full", "--api", &api])
            .args(["--listen", &vip, "--endpoint", &format!("http://{nobody}")])
            .stdin(Stdio::null())
            .stdout(File::create(&out).unwrap())
            .stderr(File::create(&err).unwrap())
            .spawn()
            .unwrap(),
    );
    let vip = vip.parse().unwrap();
    eventually(SOON, "the VIP is served", async || Client::connect(vip).await.is_ok()).await.unwrap();
    let count = 50;
    for _ in 0..count {
        let mut client = Client::connect(vip).await.unwrap();
        client.request("GET", "/?key=SECRET", &[], b"").await.unwrap();
        // Nobody listens there; where that is known already, nobody is asked.
        assert!([502, 503].contains(&client.answer().await.unwrap().head.status));
    }
    kill(Pid::from_raw(kvlb.0.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    eventually(SOON, "kvlb ends", async || kvlb.0.try_wait().unwrap().is_some()).await.unwrap();
    let written = lines(&out);
    assert_eq!(written.len(), count, "{written:?}");
    assert!(written.iter().all(|line| line["code"].is_string() && line["path"] == "/"), "{written:?}");
    assert!(std::fs::read_to_string(&err).unwrap().contains("data thread"), "what was started is told aside");
}

/// A process that does not outlive its test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // An error means that it has ended already.
        if self.0.kill().is_ok() {
            drop(self.0.wait());
        }
    }
}

/// The example of docs/access-log.md comes from here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_example_has_the_fields_of_a_real_line() {
    let dir = temp_dir().unwrap();
    let path = path_in(&dir);
    let fleet = logging(&["a", "b"], &["--access-log", "full", "--access-log-file", path.to_str().unwrap()]).await;
    let body = completion(&prompt(1), 1);
    fleet.ask(&body).await.unwrap();
    fleet.agree().await.unwrap();
    let parent = format!("00-{TRACE}-{SPAN}-01");
    fleet.ask_with(&[("X-Request-Id", "example"), ("traceparent", &parent)], &body).await.unwrap();
    let line = line_of(&path, "example").await;
    let page = include_str!("../../docs/access-log.md");
    let example = page.lines().find_map(|line| line.strip_prefix("    {")).unwrap();
    let example: Value = serde_json::from_str(&format!("{{{example}")).unwrap();
    let names = |line: &Value| line.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    // Whether a connection had to be opened for it is a matter of time.
    let fixed = |line: &Value| names(line).into_iter().filter(|name| name != "connect_us").collect::<Vec<_>>();
    assert_eq!(fixed(&example), fixed(&line));
}

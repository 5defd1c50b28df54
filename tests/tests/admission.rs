//! No engine has more requests than its rule allows: the others wait, first come first served, or are refused.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]
#![expect(clippy::float_cmp, reason = "counts and gauges here are whole numbers")]

use std::time::Duration;

use kvlb_tests::engine::{Engine, EngineConfig};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::Answer;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::stage::{MODEL, PATIENCE, Stage, engine, rule, vip};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::Instant;

const COMPLETIONS: &str = "/v1/completions";
const RULES: &str = "/netlox/v1/config/loadbalancer";

/// Engines that take some 50 ms for a request.
fn slow() -> EngineConfig {
    EngineConfig { decode_ms_per_token: 5.0, ..engine() }
}

fn body(prompt: &str) -> Value {
    json!({"model": MODEL, "prompt": prompt, "max_tokens": 10})
}

/// Sends a request, with a mark that the engine sees, and does not wait for its answer.
fn send(stage: &Stage, port: u16, mark: &str, prompt: &str) -> JoinHandle<anyhow::Result<Answer>> {
    let mut client = stage.connect(vip(port)).unwrap();
    let (mark, body) = (mark.to_owned(), body(prompt).to_string());
    tokio::spawn(async move {
        let headers = [("Content-Type", "application/json"), ("X-Mark", &*mark)];
        client.request("POST", COMPLETIONS, &headers, body.as_bytes()).await?;
        client.answer().await
    })
}

/// The marks of the requests that an engine got, in order.
fn marks(engine: &Engine) -> Vec<String> {
    engine.requests().iter().filter_map(|seen| seen.header("x-mark").map(str::to_owned)).collect()
}

fn pause(engine: &Engine, paused: bool) {
    engine.faults().set(|plan| plan.pause = paused);
}

fn pause_all(engines: &[Engine], paused: bool) {
    for engine in engines {
        pause(engine, paused);
    }
}

/// Waits until so many requests are at an engine.
async fn busy(engine: &Engine, posts: u64) {
    eventually(PATIENCE, "the engine has its requests", async || engine.counters().posts == posts).await.unwrap();
}

async fn queued(kvlb: &Kvlb, id: u64, many: f64) {
    let series = format!("kvlb_admission_queued{{service=\"{id}\"}}");
    eventually(PATIENCE, "so many wait", async || kvlb.metric(&series).await.unwrap() == many).await.unwrap();
}

async fn decisions(kvlb: &Kvlb, id: u64, reason: &str) -> f64 {
    kvlb.metric(&format!("kvlb_admission_decisions_total{{reason=\"{reason}\",service=\"{id}\"}}")).await.unwrap()
}

fn field<'a>(answer: &'a Answer, name: &str) -> &'a str {
    answer.head.header(name).unwrap_or_default()
}

async fn status(task: JoinHandle<anyhow::Result<Answer>>) -> u16 {
    task.await.unwrap().unwrap().head.status
}

#[tokio::test]
async fn engines_have_no_more_than_their_bound_and_who_finds_the_queue_full_is_refused() {
    let Some(stage) = Stage::new("bounds").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let engines = stage.engines(11, 2, &slow()).await.unwrap();
    let bounds = json!({"kvExactMode": 0, "fc_mode": "enforce", "fc_ep_max_inflight": 2, "fc_max_queue_depth": 20,
        "fc_max_queue_wait_ms": 20_000, "decisionHeaders": true});
    let id = kvlb.create(&rule(8080, &engines, &bounds)).await.unwrap();
    let tasks: Vec<_> = (0..20).map(|n| send(&stage, 8080, &n.to_string(), &format!("prompt {n}"))).collect();
    for task in tasks {
        let answer = task.await.unwrap().unwrap();
        assert_eq!(answer.head.status, 200);
        assert!(field(&answer, "x-loxilb-admission-inflight").parse::<u32>().unwrap() <= 4);
    }
    let peaks: Vec<_> = engines.iter().map(|engine| engine.counters().posts_peak).collect();
    assert_eq!(peaks, [2, 2]);
    assert_eq!((decisions(&kvlb, id, "admitted").await, decisions(&kvlb, id, "queue_full").await), (20.0, 0.0));
    assert!(decisions(&kvlb, id, "queued").await >= 10.0);
    // A queue of two, both engines busy for good.
    let mut short = bounds.clone();
    short["fc_max_queue_depth"] = json!(2);
    assert_eq!(kvlb.create(&rule(8080, &engines, &short)).await.unwrap(), id);
    pause_all(&engines, true);
    let running: Vec<_> = (0..4).map(|n| send(&stage, 8080, "r", &format!("run {n}"))).collect();
    for engine in &engines {
        busy(engine, 2).await;
    }
    let waiting: Vec<_> = (0..2).map(|n| send(&stage, 8080, "w", &format!("wait {n}"))).collect();
    queued(&kvlb, id, 2.0).await;
    let refused = stage.ask(8080, COMPLETIONS, &body("one too many")).await.unwrap();
    assert_eq!((refused.head.status, field(&refused, "x-kvlb-error")), (429, "admission_capacity"));
    assert!((1..=30).contains(&field(&refused, "retry-after").parse::<u32>().unwrap()));
    assert_eq!(field(&refused, "x-loxilb-admission-queued"), "2");
    let models = stage.exchange(vip(8080), ("GET", "/v1/models"), &[], &[]).await.unwrap();
    assert_eq!(models.head.status, 200, "what asks no model to work does not wait");
    let wide = stage.cli(&["get", "lb", "-o", "wide"]).unwrap().ok().unwrap();
    assert!(wide.contains("enforce: 4, 2 each, queue 2 of 2"), "{wide}");
    let shown = kvlb.rule(id).await.unwrap();
    assert_eq!(shown["serviceArguments"]["fc_effective"]["queued"], json!(2));
    pause_all(&engines, false);
    for task in running.into_iter().chain(waiting) {
        assert_eq!(status(task).await, 200);
    }
    queued(&kvlb, id, 0.0).await;
    assert_eq!(decisions(&kvlb, id, "queue_full").await, 1.0);
    let page = kvlb.metrics().await.unwrap();
    assert_eq!((page.sum("kvlb_admission_inflight"), page.sum("kvlb_admission_endpoint_inflight")), (0.0, 0.0));
    assert!(page.sum("kvlb_admission_waits_total") >= 12.0 && page.sum("kvlb_admission_wait_seconds_total") > 0.0);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn who_waits_is_served_in_order_and_leaves_at_his_deadline_or_with_his_client() {
    let Some(stage) = Stage::new("order").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let engines = stage.engines(11, 1, &slow()).await.unwrap();
    let bounds = |wait_ms: u32| {
        json!({"kvExactMode": 0, "fc_mode": "enforce", "fc_ep_max_inflight": 1, "fc_max_queue_depth": 10,
            "fc_max_queue_wait_ms": wait_ms})
    };
    let id = kvlb.create(&rule(8080, &engines, &bounds(20_000))).await.unwrap();
    pause(&engines[0], true);
    let mut tasks = vec![send(&stage, 8080, "0", "first")];
    busy(&engines[0], 1).await;
    for n in 1..5_u32 {
        tasks.push(send(&stage, 8080, &n.to_string(), "later"));
        queued(&kvlb, id, f64::from(n)).await;
    }
    // The client of the second leaves: it is out of the line at once, and the engine never hears of it.
    tasks.remove(2).abort();
    queued(&kvlb, id, 3.0).await;
    assert_eq!(decisions(&kvlb, id, "cancelled").await, 1.0);
    assert_eq!(kvlb.metric("kvlb_client_aborts_total{phase=\"queue\"}").await.unwrap(), 1.0);
    pause(&engines[0], false);
    for task in tasks {
        assert_eq!(status(task).await, 200);
    }
    assert_eq!(marks(&engines[0]), ["0", "1", "3", "4"]);
    // A deadline.
    assert_eq!(kvlb.create(&rule(8080, &engines, &bounds(300))).await.unwrap(), id);
    pause(&engines[0], true);
    let running = send(&stage, 8080, "running", "first");
    busy(&engines[0], 1).await;
    let began = Instant::now();
    let late = stage.ask(8080, COMPLETIONS, &body("late")).await.unwrap();
    assert_eq!((late.head.status, field(&late, "x-kvlb-error")), (504, "admission_queue_timeout"));
    assert!(!field(&late, "retry-after").is_empty());
    assert!((Duration::from_millis(300)..Duration::from_secs(3)).contains(&began.elapsed()), "{:?}", began.elapsed());
    assert_eq!(decisions(&kvlb, id, "queue_timeout").await, 1.0);
    pause(&engines[0], false);
    assert_eq!(status(running).await, 200);
    assert_eq!(engines[0].counters().posts_peak, 1);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn who_waits_goes_to_the_endpoint_that_becomes_free_though_another_has_his_prefix() {
    let Some(stage) = Stage::new("free-one").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let engines = stage.engines(11, 2, &slow()).await.unwrap();
    let bounds = json!({"fc_mode": "enforce", "fc_ep_max_inflight": 1, "fc_max_queue_depth": 10,
        "fc_max_queue_wait_ms": 20_000});
    let id = kvlb.create(&rule(8080, &engines, &bounds)).await.unwrap();
    kvlb.subscribed(id).await.unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();
    let prompt =
        "Sing, goddess, of the wrath of Achilles, son of Peleus, that brought countless ills upon the Achaeans. "
            .repeat(4);
    let owner = stage.ask(8080, COMPLETIONS, &body(&prompt)).await.unwrap().engine().to_owned();
    kvlb.settled(id, &engines).await.unwrap();
    assert_eq!(stage.ask(8080, COMPLETIONS, &body(&prompt)).await.unwrap().engine(), owner, "there is affinity");
    pause_all(&engines, true);
    let (holder, other): (Vec<_>, Vec<_>) = engines.iter().partition(|engine| engine.name() == owner);
    let first = send(&stage, 8080, "a", &prompt);
    busy(holder[0], 1).await;
    let second = send(&stage, 8080, "b", &prompt);
    busy(other[0], 1).await;
    let third = send(&stage, 8080, "c", &prompt);
    queued(&kvlb, id, 1.0).await;
    pause(other[0], false);
    let answer = third.await.unwrap().unwrap();
    assert_eq!((answer.head.status, answer.engine()), (200, other[0].name()));
    assert_eq!(status(second).await, 200);
    pause(holder[0], false);
    assert_eq!(status(first).await, 200);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn rules_that_share_an_engine_take_turns_and_one_that_observes_only_counts() {
    let Some(stage) = Stage::new("turns").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let engines = stage.engines(11, 1, &slow()).await.unwrap();
    let bounds = json!({"kvExactMode": 0, "fc_mode": "enforce", "fc_ep_max_inflight": 1, "fc_max_queue_depth": 10,
        "fc_max_queue_wait_ms": 20_000});
    let one = kvlb.create(&rule(8080, &engines, &bounds)).await.unwrap();
    let two = kvlb.create(&rule(8081, &engines, &bounds)).await.unwrap();
    pause(&engines[0], true);
    let mut tasks = vec![send(&stage, 8080, "hold", "hold")];
    busy(&engines[0], 1).await;
    tasks.extend((0..6).map(|_| send(&stage, 8080, "one", "x")));
    queued(&kvlb, one, 6.0).await;
    tasks.extend((0..3).map(|_| send(&stage, 8081, "two", "x")));
    queued(&kvlb, two, 3.0).await;
    pause(&engines[0], false);
    for task in tasks {
        assert_eq!(status(task).await, 200);
    }
    let order = marks(&engines[0]);
    assert_eq!(order[1..7].iter().filter(|mark| *mark == "two").count(), 3, "{order:?}");
    assert_eq!(engines[0].counters().posts_peak, 1);
    // A third rule over the same engine observes: it counts what would have been, and changes nothing.
    let observing = json!({"kvExactMode": 0, "fc_mode": "observe", "fc_ep_max_inflight": 1});
    let id = kvlb.create(&rule(8082, &engines, &observing)).await.unwrap();
    pause(&engines[0], true);
    let mut tasks = vec![send(&stage, 8082, "seen", "x")];
    busy(&engines[0], 1).await;
    tasks.extend((0..2).map(|_| send(&stage, 8082, "seen", "x")));
    busy(&engines[0], 3).await;
    assert_eq!(decisions(&kvlb, id, "observe_would_shed").await, 2.0);
    pause(&engines[0], false);
    for task in tasks {
        assert_eq!(status(task).await, 200);
    }
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_changed_rule_lets_those_go_that_wait_and_nobody_is_left_behind_at_an_end() {
    let Some(stage) = Stage::new("changed").unwrap() else { return };
    let mut kvlb = stage.kvlb(&["--drain-timeout", "20s"]).await.unwrap();
    let engines = stage.engines(11, 1, &slow()).await.unwrap();
    let bounds = |each: u32| {
        json!({"kvExactMode": 0, "fc_mode": "enforce", "fc_ep_max_inflight": each, "fc_max_queue_depth": 10,
            "fc_max_queue_wait_ms": 20_000})
    };
    let id = kvlb.create(&rule(8080, &engines, &bounds(1))).await.unwrap();
    pause(&engines[0], true);
    let mut tasks: Vec<_> = (0..4).map(|n| send(&stage, 8080, "x", &n.to_string())).collect();
    queued(&kvlb, id, 3.0).await;
    assert_eq!(kvlb.create(&rule(8080, &engines, &bounds(3))).await.unwrap(), id);
    busy(&engines[0], 3).await;
    queued(&kvlb, id, 1.0).await;
    // Switched off, it holds nobody.
    assert_eq!(kvlb.create(&rule(8080, &engines, &json!({"kvExactMode": 0}))).await.unwrap(), id);
    busy(&engines[0], 4).await;
    pause(&engines[0], false);
    for task in tasks.drain(..) {
        assert_eq!(status(task).await, 200);
    }
    // A rule that goes, and a process that ends, answer who waits.
    for end in ["rule", "process"] {
        let id = kvlb.create(&rule(8080, &engines, &bounds(1))).await.unwrap();
        pause(&engines[0], true);
        let running = send(&stage, 8080, "running", "x");
        busy(&engines[0], 1).await;
        let waiting = send(&stage, 8080, "waiting", "x");
        queued(&kvlb, id, 1.0).await;
        if end == "rule" {
            assert_eq!(kvlb.api("DELETE", &format!("{RULES}/all"), None).await.unwrap().0, 200);
        } else {
            kvlb.signal(Signal::SIGTERM).unwrap();
        }
        let answer = waiting.await.unwrap().unwrap();
        assert_eq!((answer.head.status, field(&answer, "x-kvlb-error")), (503, "admission_drained"), "{end}");
        assert_eq!(field(&answer, "retry-after"), "5");
        pause(&engines[0], false);
        assert_eq!(status(running).await, 200, "what is under way goes on");
    }
    assert!(kvlb.ended(PATIENCE).await.unwrap().success());
}

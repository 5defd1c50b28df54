//! One kvlb takes over from another: nothing is refused, nothing breaks, and what fails on the way leaves the old one serving.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test says by a panic what went wrong")]

use std::future::Future;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kvlb::handover::{FromNext, FromThis, Gift, Hello, Line, Offer, PROTOCOL};
use kvlb_tests::engine::{Engine, EngineConfig};
use kvlb_tests::harness::http::{Client, End};
use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig};
use kvlb_tests::harness::stage::{API, MODEL, PATIENCE, Stage, VIP, engine, rule, vip};
use kvlb_tests::harness::{eventually, until_some};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;

const COMPLETIONS: &str = "/v1/completions";
/// A takeover on a busy machine, and the end of the one before with all that it still serves.
const LONG: Duration = Duration::from_mins(2);
const TIMES: usize = 10;
/// Events of one stream: some take longer than a takeover.
const STREAM_TOKENS: usize = 40;

/// Clients of all kinds that ask without a pause, and what became of their requests.
struct Load {
    over: Arc<AtomicBool>,
    clients: JoinSet<anyhow::Result<()>>,
    done: Arc<[AtomicU32; 5]>,
}

impl Load {
    fn start(stage: &Arc<Stage>) -> Self {
        let (over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(Default::default()));
        let mut load = Self { over, clients: JoinSet::new(), done };
        for number in 0..2 {
            load.run(0, keeps_its_connection(Arc::clone(stage), number));
            load.run(1, connects_each_time(Arc::clone(stage), number));
            load.run(2, streams(Arc::clone(stage)));
        }
        load.run(3, sends_much(Arc::clone(stage)));
        load.run(4, asks_the_api(Arc::clone(stage)));
        load
    }

    fn run<C: AsyncClient>(&mut self, kind: usize, mut client: C) {
        let (over, done) = (Arc::clone(&self.over), Arc::clone(&self.done));
        self.clients.spawn(async move {
            while !over.load(Ordering::Relaxed) {
                client.once().await.with_context(|| format!("client of kind {kind}"))?;
                done[kind].fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
    }

    fn counts(&self) -> [u32; 5] {
        std::array::from_fn(|kind| self.done[kind].load(Ordering::Relaxed))
    }

    /// Waits until each kind of client has had answers since `before`.
    async fn moved_on(&mut self, before: [u32; 5]) {
        let waited = eventually(LONG, "clients of each kind have answers", async || {
            self.still_goes();
            self.counts().iter().zip(before).all(|(now, before)| *now > before + 1)
        });
        waited.await.unwrap_or_else(|late| panic!("{late}: {before:?}, then {:?}", self.counts()));
    }

    /// No client has met with an error.
    fn still_goes(&mut self) {
        if let Some(ended) = self.clients.try_join_next() {
            panic!("a client has ended: {ended:?} after {:?}", self.counts());
        }
    }

    async fn end(mut self) {
        self.over.store(true, Ordering::Relaxed);
        while let Some(client) = self.clients.join_next().await {
            client.unwrap().unwrap();
        }
    }
}

/// A client that can be told to ask once more.
trait AsyncClient: Send + 'static {
    fn once(&mut self) -> impl Future<Output = anyhow::Result<()>> + Send;
}

struct Asking<F>(F);

impl<F, R> AsyncClient for Asking<F>
where
    F: FnMut() -> R + Send + 'static,
    R: Future<Output = anyhow::Result<()>> + Send,
{
    fn once(&mut self) -> impl Future<Output = anyhow::Result<()>> + Send {
        (self.0)()
    }
}

fn short(number: u32) -> Value {
    json!({"model": MODEL, "prompt": format!("client {number} asks again and again"), "max_tokens": 2})
}

struct Keeper {
    stage: Arc<Stage>,
    client: Option<Client>,
    number: u32,
}

fn keeps_its_connection(stage: Arc<Stage>, number: u32) -> Keeper {
    Keeper { stage, client: None, number }
}

impl AsyncClient for Keeper {
    async fn once(&mut self) -> anyhow::Result<()> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => self.stage.connect(vip(8080))?,
        };
        client.request("POST", COMPLETIONS, &[], short(self.number).to_string().as_bytes()).await?;
        let answer = client.answer().await?;
        ensure!(
            answer.head.status == 200 && answer.body.end == End::Complete,
            "{:?} {}",
            answer.head,
            answer.body.text()
        );
        let closes = answer.head.header("connection").is_some_and(|word| word.eq_ignore_ascii_case("close"));
        self.client = (!closes).then_some(client);
        Ok(())
    }
}

fn connects_each_time(stage: Arc<Stage>, number: u32) -> impl AsyncClient {
    Asking(move || {
        let stage = Arc::clone(&stage);
        async move {
            let answer = stage.ask(8080, COMPLETIONS, &short(number)).await?;
            ensure!(answer.head.status == 200, "{:?} {}", answer.head, answer.body.text());
            Ok(())
        }
    })
}

fn streams(stage: Arc<Stage>) -> impl AsyncClient {
    Asking(move || {
        let stage = Arc::clone(&stage);
        async move {
            let body = json!({"model": MODEL, "prompt": "a long story", "max_tokens": STREAM_TOKENS, "stream": true});
            let answer = stage.ask(8080, COMPLETIONS, &body).await?;
            whole_stream(answer.head.status, &answer.body.text(), answer.body.end)
        }
    })
}

fn whole_stream(status: u16, text: &str, end: End) -> anyhow::Result<()> {
    let events = text.matches("data: {").count();
    let done = text.trim_end().ends_with("data: [DONE]");
    ensure!(
        status == 200 && end == End::Complete && done && events >= STREAM_TOKENS,
        "{status} {end:?}: {events} events: {text}"
    );
    Ok(())
}

fn sends_much(stage: Arc<Stage>) -> impl AsyncClient {
    Asking(move || {
        let stage = Arc::clone(&stage);
        async move {
            let mut body = short(9);
            body["metadata"] = json!({"padding": "x".repeat(1 << 20)});
            let answer = stage.ask(8080, COMPLETIONS, &body).await?;
            ensure!(answer.head.status == 200, "{:?} {}", answer.head, answer.body.text());
            Ok(())
        }
    })
}

fn asks_the_api(stage: Arc<Stage>) -> impl AsyncClient {
    Asking(move || {
        let stage = Arc::clone(&stage);
        async move {
            let path = "/netlox/v1/config/loadbalancer/all";
            let answer = stage.exchange(API.parse()?, ("GET", path), &[("Connection", "close")], b"").await?;
            ensure!(answer.head.status == 200, "{:?} {}", answer.head, answer.body.text());
            tokio::time::sleep(Duration::from_millis(5)).await;
            Ok(())
        }
    })
}

/// A stage with two warm engines and one rule.
struct Scene {
    stage: Arc<Stage>,
    engines: Vec<Engine>,
    datapath: &'static str,
    rule: u64,
    kvlb: Kvlb,
}

impl Scene {
    async fn set(label: &str, datapath: &'static str, more: &[&str]) -> Option<Self> {
        let stage = Arc::new(Stage::new(label).unwrap()?);
        if datapath == "none" {
            stage.own(VIP).unwrap();
        }
        let slow = EngineConfig { decode_ms_per_token: 15.0, ..engine() };
        let engines = stage.engines(11, 2, &slow).await.unwrap();
        let kvlb = stage.kvlb(&args(datapath, more)).await.unwrap();
        let rule = kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
        kvlb.subscribed(rule).await.unwrap();
        kvlb.tokenizes(rule, MODEL).await.unwrap();
        let scene = Self { stage, engines, datapath, rule, kvlb };
        scene.stage.ask(8080, COMPLETIONS, &warm()).await.unwrap();
        scene.kvlb.settled(rule, &scene.engines).await.unwrap();
        Some(scene)
    }

    fn config(&self, more: &[&str]) -> KvlbConfig {
        self.stage.config(&args(self.datapath, more))
    }

    /// Takes over, and waits until the one before has ended.
    async fn take_over(&mut self, more: &[&str]) {
        let mut all = vec!["--takeover"];
        all.extend(more);
        let next = Kvlb::take_over(self.config(&all)).await.unwrap();
        let mut old = std::mem::replace(&mut self.kvlb, next);
        let (left, log) = (old.ended(LONG).await, old.log());
        let status = left.unwrap_or_else(|late| panic!("{late}; its log:\n{log}"));
        assert!(status.success(), "{status}; its log:\n{log}");
    }

    /// Whether the engine that has the warm prompt is known to have it.
    async fn is_warm(&self) -> bool {
        let path = format!("/netlox/v1/config/ai/kv/explain?service_id={}", self.rule);
        let (_, explained) = self.kvlb.api("POST", &path, Some(&warm())).await.unwrap();
        let depth = |candidate: &Value| candidate["depth"].as_u64() > Some(0);
        explained["tier"] == "kv" || explained["candidates"].as_array().unwrap().iter().any(depth)
    }

    async fn serves(&self) {
        let answer = self.stage.ask(8080, COMPLETIONS, &short(1)).await.unwrap();
        assert_eq!(answer.head.status, 200, "{}", answer.body.text());
    }

    /// The same once probes have found the engines again.
    async fn serves_again(&self) {
        let answered = async || self.stage.ask(8080, COMPLETIONS, &short(1)).await.unwrap().head.status == 200;
        eventually(LONG, "engines are up again", answered).await.unwrap();
    }

    /// Changes are taken, and are in force.
    async fn takes_changes(&self) {
        let path = "/netlox/v1/config/loadbalancer";
        let more = rule(8081, &self.engines, &json!({"kvExactMode": 0}));
        let taken = async || self.kvlb.api("POST", path, Some(&more)).await.unwrap().0 == 200;
        eventually(PATIENCE, "a change is taken", taken).await.unwrap();
        assert_eq!(self.stage.ask(8081, COMPLETIONS, &short(2)).await.unwrap().head.status, 200);
        let gone = format!("{path}/externalipaddress/{VIP}/port/8081/protocol/tcp");
        assert_eq!(self.kvlb.api("DELETE", &gone, None).await.unwrap().0, 200);
    }

    fn door(&self) -> PathBuf {
        self.stage.dir().join("state/takeover.sock")
    }

    async fn end(self) {
        let id = self.kvlb.id();
        self.kvlb.stop().await.unwrap();
        assert!(!self.stage.dir().join("state/takeover.sock").exists(), "{id} has left its socket");
        assert!(!self.stage.pins().exists(), "{id} has left its pins");
        let routes = self.stage.program(Path::new("/bin/sh"), &["-c", "ip route show table local proto 75"]);
        assert_eq!(routes.unwrap().out, "", "{id} has left routes");
    }
}

fn args<'a>(datapath: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["--datapath", datapath, "--drain-timeout", "100s"];
    args.extend(more);
    args
}

fn warm() -> Value {
    json!({"model": MODEL, "prompt": "the quick brown fox jumps over the lazy dog ".repeat(40), "max_tokens": 1})
}

async fn ten_takeovers_under_load(datapath: &'static str, io: &'static str) {
    let Some(mut scene) = Scene::set("takeover", datapath, &["--threads", "2", "--io", io]).await else { return };
    let mut load = Load::start(&scene.stage);
    load.moved_on([0; 5]).await;
    for (time, threads) in ["1", "3", "1", "2", "4"].into_iter().cycle().take(TIMES).enumerate() {
        let (before, was) = (load.counts(), scene.kvlb.id());
        scene.take_over(&["--threads", threads, "--io", io]).await;
        assert!(scene.is_warm().await, "takeover {time}: the warm prompt is not known");
        let (_, status) = scene.kvlb.api("GET", "/netlox/v1/status", None).await.unwrap();
        let from = &status["takeover"];
        assert!(
            from["fromPid"] == was && from["warm"] == true && threads.parse().ok() == status["threads"].as_u64(),
            "{status}"
        );
        assert!(scene.kvlb.metric("kvlb_takeovers_total{outcome=\"taken\"}").await.unwrap() >= 1.0);
        load.moved_on(before).await;
    }
    let counts = load.counts();
    load.end().await;
    scene.takes_changes().await;
    let shown = scene.stage.cli(&["get", "status"]).unwrap().ok().unwrap();
    assert!(shown.contains("taken over"), "{shown}");
    eprintln!("{datapath} {io}: {TIMES} takeovers, {counts:?} answers");
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_takeovers_under_load_where_kvlb_binds_the_vips() {
    ten_takeovers_under_load("none", "uring").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_takeovers_under_load_where_kvlb_binds_the_vips_on_epoll() {
    ten_takeovers_under_load("none", "epoll").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_takeovers_under_load_through_the_kernel() {
    ten_takeovers_under_load("auto", "uring").await;
}

/// The next kvlb as far as the test plays it.
struct Actor {
    line: Line,
    offer: Offer,
    gifts: Vec<(Gift, std::os::fd::OwnedFd)>,
}

impl Actor {
    fn connect(door: &Path) -> Line {
        Line::new(UnixStream::connect(door).unwrap()).unwrap()
    }

    fn hello(protocol: u32) -> FromNext {
        FromNext::Hello(Hello { protocol, version: "test".to_owned(), pid: 1 })
    }
}

async fn what_fails_before_it_is_ready_leaves_the_old_one_serving(datapath: &'static str) {
    let Some(scene) = Scene::set("failing", datapath, &["--threads", "2"]).await else { return };
    let (door, path) = (scene.door(), "/netlox/v1/config/loadbalancer");
    let load = Load::start(&scene.stage);
    // Gone at each step.
    drop(Actor::connect(&door));
    let mut greeted = Actor::connect(&door);
    greeted.send(&Actor::hello(PROTOCOL)).unwrap();
    drop(greeted);
    scene.takes_changes().await;
    let actor = until_begun(&door).await;
    let kinds: Vec<_> = actor.gifts.iter().map(|(gift, _)| *gift).collect();
    let listening = if datapath == "none" { Gift::Vip } else { Gift::Steered };
    assert_eq!(kinds.iter().filter(|gift| **gift == listening).count(), 2, "{kinds:?}");
    assert!(actor.gifts.iter().all(|(_, gift)| gift.as_fd().try_clone_to_owned().is_ok()));
    assert_eq!(actor.offer.pid, scene.kvlb.id());
    // While it lasts nothing changes, and nobody else takes over.
    let more = rule(8082, &scene.engines, &json!({"kvExactMode": 0}));
    let (status, answer) = scene.kvlb.api("POST", path, Some(&more)).await.unwrap();
    assert_eq!((status, &answer["error"]), (503, &json!("handing_over")), "{answer}");
    let mut second = Kvlb::begin_takeover(scene.config(&["--takeover"])).unwrap();
    assert_eq!(second.ended(LONG).await.unwrap().code(), Some(7));
    assert!(second.log().contains("busy"), "{}", second.log());
    drop(actor);
    scene.takes_changes().await;
    let mut actor = until_begun(&door).await;
    actor.line.send(&FromNext::Progress("half of it".to_owned())).unwrap();
    eventually(PATIENCE, "progress is in the log", async || scene.kvlb.log().contains("half of it")).await.unwrap();
    drop(actor);
    scene.takes_changes().await;
    // Another version, and none at all.
    let mut line = Actor::connect(&door);
    line.send(&Actor::hello(PROTOCOL + 1)).unwrap();
    let refused: FromThis = line.receive(PATIENCE).unwrap();
    assert!(matches!(&refused, FromThis::Refused { code, .. } if code == "protocol"), "{refused:?}");
    let mut line = Actor::connect(&door);
    line.send(&"who are you?").unwrap();
    let refused: FromThis = line.receive(PATIENCE).unwrap();
    assert!(matches!(&refused, FromThis::Refused { code, .. } if code == "protocol"), "{refused:?}");
    // The real one, killed while it waits for an engine that says nothing any more.
    scene.engines.iter().for_each(|engine| engine.faults().set(|plan| plan.stall_replay = true));
    for pause in [0, 20, 100, 300] {
        let next = Kvlb::begin_takeover(scene.config(&["--takeover"])).unwrap();
        tokio::time::sleep(Duration::from_millis(pause)).await;
        drop(next);
        scene.serves().await;
    }
    scene.engines.iter().for_each(|engine| engine.faults().clear());
    scene.takes_changes().await;
    let (_, status) = scene.kvlb.api("GET", "/netlox/v1/status", None).await.unwrap();
    assert_eq!(status["pid"], scene.kvlb.id(), "the old one serves");
    assert!(scene.kvlb.metric("kvlb_takeovers_total{outcome=\"failed\"}").await.unwrap() >= 3.0);
    assert!(scene.kvlb.metric("kvlb_takeovers_total{outcome=\"refused\"}").await.unwrap() >= 3.0);
    load.end().await;
    scene.end().await;
}

/// A conversation, once the one before is over.
async fn until_begun(door: &Path) -> Actor {
    let begun = async || {
        let mut line = Actor::connect(door);
        line.send(&Actor::hello(PROTOCOL)).unwrap();
        match line.receive(PATIENCE).unwrap() {
            FromThis::Offer(offer) => {
                let gifts = line.take(offer.gifts.len()).unwrap();
                let gifts = offer.gifts.iter().copied().zip(gifts).collect();
                Some(Actor { line, offer: *offer, gifts })
            }
            _busy => None,
        }
    };
    until_some(PATIENCE, "a conversation begins", begun).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fails_before_it_is_ready_leaves_the_old_one_serving_where_kvlb_binds_the_vips() {
    what_fails_before_it_is_ready_leaves_the_old_one_serving("none").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fails_before_it_is_ready_leaves_the_old_one_serving_through_the_kernel() {
    what_fails_before_it_is_ready_leaves_the_old_one_serving("auto").await;
}

async fn the_next_one_serves_when_the_old_one_dies_on_the_way(datapath: &'static str) {
    let Some(mut scene) = Scene::set("orphan", datapath, &[]).await else { return };
    // Nothing is answered over HTTP any more, so that what the old one was told the next one is not.
    scene.engines.iter().for_each(|engine| engine.faults().set(|plan| plan.refuse_http = true));
    let mut next = Kvlb::begin_takeover(scene.config(&["--takeover", "--takeover-wait", "10m"])).unwrap();
    let waits = async || next.log().contains("getting ready");
    eventually(LONG, "the next one gets ready", waits).await.unwrap();
    let (_, status) = scene.kvlb.api("GET", "/netlox/v1/status", None).await.unwrap();
    assert_eq!(status["pid"], scene.kvlb.id(), "the old one serves until then");
    scene.kvlb.signal(Signal::SIGKILL).unwrap();
    scene.kvlb.ended(LONG).await.unwrap();
    scene.engines.iter().for_each(|engine| engine.faults().clear());
    eventually(LONG, "the next one serves", async || {
        let status = next.api("GET", "/netlox/v1/status", None).await;
        status.is_ok_and(|(_, status)| status["pid"] == next.id() && status["takeover"]["warm"] == false)
    })
    .await
    .unwrap();
    assert!(next.ended(Duration::ZERO).await.is_err());
    scene.kvlb = next;
    scene.serves_again().await;
    scene.takes_changes().await;
    // A limit ends the waiting too, and the old one leaves as ever.
    scene.engines.iter().for_each(|engine| engine.faults().set(|plan| plan.refuse_http = true));
    scene.take_over(&["--takeover-wait", "1s"]).await;
    scene.engines.iter().for_each(|engine| engine.faults().clear());
    scene.serves_again().await;
    scene.end().await;
}

#[tokio::test]
async fn the_next_one_serves_when_the_old_one_dies_on_the_way_where_kvlb_binds_the_vips() {
    the_next_one_serves_when_the_old_one_dies_on_the_way("none").await;
}

#[tokio::test]
async fn the_next_one_serves_when_the_old_one_dies_on_the_way_through_the_kernel() {
    the_next_one_serves_when_the_old_one_dies_on_the_way("auto").await;
}

#[tokio::test]
async fn a_takeover_without_a_running_one_says_so_and_may_start_alone() {
    let Some(stage) = Stage::new("alone").unwrap() else { return };
    let mut none = Kvlb::begin_takeover(stage.config(&["--datapath", "none", "--takeover"])).unwrap();
    assert_eq!(none.ended(LONG).await.unwrap().code(), Some(7));
    assert!(none.log().contains("start without --takeover"), "{}", none.log());
    let first = stage.kvlb(&["--datapath", "none", "--takeover=if-running"]).await.unwrap();
    // A crash leaves the socket's file, which is in nobody's way.
    let door = stage.dir().join("state/takeover.sock");
    first.signal(Signal::SIGKILL).unwrap();
    drop(first);
    assert!(door.exists());
    let mut none = Kvlb::begin_takeover(stage.config(&["--datapath", "none", "--takeover"])).unwrap();
    assert_eq!(none.ended(LONG).await.unwrap().code(), Some(7));
    let second = stage.kvlb(&["--datapath", "none", "--takeover=if-running"]).await.unwrap();
    let next = Kvlb::take_over(stage.config(&["--datapath", "none", "--takeover=if-running"])).await.unwrap();
    // Another datapath is for a restart.
    let pins =
        stage.config(&["--takeover", "--state-dir", "/nonexistent", "--takeover-socket", door.to_str().unwrap()]);
    let mut misled = Kvlb::begin_takeover(pins).unwrap();
    assert_eq!(misled.ended(LONG).await.unwrap().code(), Some(7));
    assert!(misled.log().contains("keeps its rules in"), "{}", misled.log());
    drop(second);
    next.stop().await.unwrap();
    assert!(!door.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn being_told_to_stop_once_behind_a_takeover_cuts_no_stream() {
    let Some(mut scene) = Scene::set("told", "none", &[]).await else { return };
    let stream = async |tokens: usize| {
        let body = json!({"model": MODEL, "prompt": "on and on", "max_tokens": tokens, "stream": true});
        let mut client = scene.stage.connect(vip(8080)).unwrap();
        client.request("POST", COMPLETIONS, &[], body.to_string().as_bytes()).await.unwrap();
        let head = client.head().await.unwrap();
        (client, head)
    };
    let (mut finite, head) = stream(300).await;
    let (mut long, long_head) = stream(2_000).await;
    let next = Kvlb::take_over(scene.config(&["--takeover"])).await.unwrap();
    let mut old = std::mem::replace(&mut scene.kvlb, next);
    old.signal(Signal::SIGTERM).unwrap();
    let told = async || old.log().contains("told to stop: streams are ending already");
    eventually(PATIENCE, "it says that it is ending already", told).await.unwrap();
    let body = finite.body(&head).await.unwrap();
    whole_stream(head.status, &body.text(), body.end).unwrap();
    old.signal(Signal::SIGTERM).unwrap();
    assert!(old.ended(LONG).await.unwrap().success());
    assert_ne!(long.body(&long_head).await.unwrap().end, End::Complete, "told twice it cuts what still goes on");
    scene.serves().await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_rules_touch_no_stream_that_runs() {
    for datapath in ["none", "auto"] {
        let Some(scene) = Scene::set("changes", datapath, &[]).await else { return };
        let path = "/netlox/v1/config/loadbalancer";
        let mut running = JoinSet::new();
        let (started, go_on) = (Arc::new(AtomicU32::new(0)), 30);
        for _ in 0..go_on {
            let (stage, started) = (Arc::clone(&scene.stage), Arc::clone(&started));
            running.spawn(async move {
                let body = json!({"model": MODEL, "prompt": "on and on", "max_tokens": STREAM_TOKENS, "stream": true});
                let mut client = stage.connect(vip(8080))?;
                client.request("POST", COMPLETIONS, &[], body.to_string().as_bytes()).await?;
                let head = client.head().await?;
                started.fetch_add(1, Ordering::Relaxed);
                let body = client.body(&head).await?;
                whole_stream(head.status, &body.text(), body.end)
            });
        }
        let all = async || started.load(Ordering::Relaxed) == go_on;
        eventually(LONG, "all streams run", all).await.unwrap();
        // Replaced, joined by others, an endpoint taken out, and gone altogether.
        for change in [
            rule(8080, &scene.engines, &json!({"sel": 3})),
            rule(8081, &scene.engines, &json!({})),
            rule(8080, &scene.engines[1..], &json!({"inactiveTimeOut": 60})),
        ] {
            let (status, answer) = scene.kvlb.api("POST", path, Some(&change)).await.unwrap();
            assert_eq!(status, 200, "{answer}");
        }
        let (status, answer) = scene.kvlb.api("DELETE", &format!("{path}/all"), None).await.unwrap();
        assert_eq!(status, 200, "{answer}");
        let refused = async || scene.stage.connect(vip(8080)).is_err();
        eventually(PATIENCE, "the rule is gone", refused).await.unwrap();
        let still = running.len();
        while let Some(stream) = running.join_next().await {
            stream.unwrap().unwrap();
        }
        eprintln!("{datapath}: {still} streams ran through the changes");
        scene.end().await;
    }
}

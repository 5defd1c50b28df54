//! Who may connect to a VIP, and how often: dropped at a device, refused by the kernel or closed by the proxy, and shown.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::netns::Netns;
use kvlb_tests::harness::stage::{PATIENCE, Stage, VIP, engine, rule, vip};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};

const FRIEND: &str = "10.77.0.2";
const STRANGER: &str = "10.77.0.3";

/// What a client meets at the VIP.
#[derive(Debug, PartialEq, Eq)]
enum Met {
    Answer,
    /// The connection was made, and ended without a byte.
    Closed,
    Refusal,
    Silence,
}

/// A stage, and clients on the other end of a cable, whose end here is `device`.
struct Scene {
    stage: Stage,
    clients: Netns,
    device: String,
}

impl Scene {
    fn new(label: &str) -> Option<Self> {
        let stage = Stage::new(label).unwrap()?;
        let clients = Netns::new(label).unwrap();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let (device, far) = stage.netns().link((ip("10.77.0.1"), 24), &clients, (ip(FRIEND), 24)).unwrap();
        clients.address(&far, (ip(STRANGER), 24)).unwrap();
        let route = ["route", "add", "10.10.10.0/24", "via", "10.77.0.1"];
        assert!(clients.run(|| Command::new("ip").args(route).status()).unwrap().unwrap().success());
        Some(Self { stage, clients, device })
    }

    /// Asks for the models from an address of a client.
    fn ask(&self, from: &str) -> Met {
        let from = SocketAddr::new(from.parse().unwrap(), 0);
        self.clients.run(|| ask(from, vip(8080))).unwrap()
    }

    fn has_xdp(&self) -> bool {
        let shown = self.stage.netns().run(|| Command::new("ip").args(["link", "show", &self.device]).output());
        String::from_utf8(shown.unwrap().unwrap().stdout).unwrap().contains("prog/xdp")
    }

    /// A series of the VIP's in the metric of frames.
    async fn frames(&self, kvlb: &Kvlb, verdict: &str) -> f64 {
        let page = kvlb.metrics().await.unwrap();
        page.value(&format!("kvlb_xdp_packets_total{{verdict=\"{verdict}\",vip=\"10.10.10.254:8080\"}}"))
    }
}

fn ask(from: SocketAddr, to: SocketAddr) -> Met {
    let patience = Duration::from_millis(1500);
    let run = || -> std::io::Result<usize> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&from.into())?;
        socket.connect_timeout(&to.into(), patience)?;
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(patience))?;
        stream.write_all(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(answer.len())
    };
    match run().map_err(|error| error.kind()) {
        Ok(0) | Err(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => Met::Closed,
        Ok(_) => Met::Answer,
        Err(ErrorKind::ConnectionRefused) => Met::Refusal,
        Err(_) => Met::Silence,
    }
}

/// The rule that lets one client in.
fn friends_only(engines: &[kvlb_tests::engine::Engine], more: &Value) -> Value {
    let mut body = rule(8080, engines, more);
    body["allowedSources"] = json!([{"prefix": format!("{FRIEND}/32")}]);
    body
}

#[tokio::test]
async fn who_may_not_connect_is_dropped_refused_or_closed_wherever_that_is_found_first() {
    let Some(scene) = Scene::new("sources") else { return };
    let engines = scene.stage.engines(11, 1, &engine()).await.unwrap();
    let body = friends_only(&engines, &json!({}));
    let flag = ["--xdp-dev", scene.device.as_str()];
    scene.stage.own(VIP).unwrap();
    // The proxy binds the VIP first: it could not while connections that were steered there are in TIME_WAIT.
    for (args, stranger) in [(&["--datapath", "none"][..], Met::Closed), (&[], Met::Refusal), (&flag, Met::Silence)] {
        let kvlb = scene.stage.kvlb(args).await.unwrap();
        kvlb.create(&body).await.unwrap();
        assert_eq!(scene.ask(FRIEND), Met::Answer, "{args:?}: {}", kvlb.log());
        assert_eq!(scene.ask(STRANGER), stranger, "{args:?}: {}", kvlb.log());
        let page = kvlb.metrics().await.unwrap();
        let refused = page.value("kvlb_client_connections_refused_total{reason=\"not_admitted\"}");
        let not_steered = page.value("kvlb_kernel_not_steered_total{vip=\"10.10.10.254:8080\"}");
        match stranger {
            Met::Silence => assert!(scene.frames(&kvlb, "acl").await >= 1.0 && refused + not_steered < 0.5),
            Met::Refusal => assert!(not_steered >= 1.0 && refused < 0.5, "{not_steered} {refused}"),
            _ => assert!(refused >= 1.0, "{refused}"),
        }
        let drops = || scene.stage.cli(&["get", "drops"]).unwrap().ok().unwrap();
        let wide = scene.stage.cli(&["get", "lb", "-o", "wide"]).unwrap().ok().unwrap();
        let reason = match stranger {
            Met::Silence => Some(("acl", "frames syn 1, other")),
            Met::Refusal => Some(("denied", "10.10.10.254:8080: steered 1, denied 1\n")),
            _ => None,
        };
        let Some((reason, verdicts)) = reason else {
            assert_eq!(drops(), "The kernel has dropped nothing.\n");
            assert!(!wide.contains("steered"), "{wide}");
            kvlb.stop().await.unwrap();
            continue;
        };
        let told = async || drops().contains(STRANGER);
        eventually(PATIENCE, "the kernel's word has come", told).await.unwrap();
        let shown = drops();
        let line = shown.lines().find(|line| line.contains(&format!("{STRANGER}:"))).unwrap();
        assert!(line.contains(&format!(" {reason} ")) && line.contains("10.10.10.254:8080"), "{line}");
        assert!(shown.contains(&format!("In all: {reason} ")), "{shown}");
        assert!(wide.contains(verdicts), "{wide}");
        let page = kvlb.metrics().await.unwrap();
        let total = page.value(&format!("kvlb_kernel_drops_total{{reason=\"{reason}\",vip=\"10.10.10.254:8080\"}}"));
        let samples = page.value(&format!("kvlb_kernel_drop_samples_total{{reason=\"{reason}\"}}"));
        assert!(total >= 1.0 && samples >= 1.0 && samples <= total, "{samples} of {total}");
        kvlb.stop().await.unwrap();
        assert!(!scene.has_xdp());
    }
}

#[tokio::test]
async fn a_device_with_admission_is_shown_limits_a_source_and_is_free_when_kvlb_is_gone() {
    let Some(scene) = Scene::new("admits") else { return };
    let engines = scene.stage.engines(11, 1, &engine()).await.unwrap();
    let flag = ["--xdp-dev", scene.device.as_str()];
    let kvlb = scene.stage.kvlb(&flag).await.unwrap();
    let id = kvlb.create(&friends_only(&engines, &json!({"synRate": 1, "synBurst": 3}))).await.unwrap();
    let status = scene.stage.cli(&["get", "status"]).unwrap().ok().unwrap();
    assert!(status.contains(&format!("{} (native)", scene.device)), "{status}");
    assert!(kvlb.log().contains("SYNs are judged"), "{}", kvlb.log());
    let attached = format!("kvlb_xdp_attached{{device=\"{}\",mode=\"native\"}}", scene.device);
    assert!(kvlb.metric(&attached).await.unwrap() > 0.5);
    assert!(
        kvlb.rule(id).await.unwrap()["notes"]
            .as_array()
            .is_none_or(|notes| { !notes.iter().any(|note| note.as_str().unwrap().contains("synRate")) })
    );
    // Three connections at once; the fourth waits for its client to try again.
    let mut met = Vec::new();
    for _ in 0..4 {
        met.push(scene.ask(FRIEND));
    }
    assert_eq!(met[..3], [Met::Answer, Met::Answer, Met::Answer]);
    assert!(scene.frames(&kvlb, "rate").await >= 1.0);
    assert!(scene.frames(&kvlb, "syn").await >= 3.0 && scene.frames(&kvlb, "other").await > 3.0);

    // The limit goes with its field, at once.
    kvlb.create(&friends_only(&engines, &json!({}))).await.unwrap();
    for _ in 0..10 {
        assert_eq!(scene.ask(FRIEND), Met::Answer);
    }

    let next = Kvlb::take_over(scene.stage.config(&[flag[0], flag[1], "--takeover"])).await.unwrap();
    eventually(PATIENCE, "the device is judged by the next kvlb", async || {
        // Until the one before has left, it may be the one that answers.
        next.log().contains("SYNs are judged") && next.metric(&attached).await.is_ok_and(|on| on > 0.5)
    })
    .await
    .unwrap();
    drop(kvlb);
    assert_eq!((scene.ask(FRIEND), scene.ask(STRANGER)), (Met::Answer, Met::Silence));
    next.signal(Signal::SIGKILL).unwrap();
    eventually(PATIENCE, "the device is free", async || !scene.has_xdp()).await.unwrap();
}

#[tokio::test]
async fn a_device_that_vanishes_is_named_and_judged_again_when_it_is_back() {
    let Some(scene) = Scene::new("vanish") else { return };
    let device = scene.device.as_str();
    let kvlb = scene.stage.kvlb(&["--xdp-dev", device]).await.unwrap();
    let ip = |args: &[&str]| drop(scene.stage.program("ip".as_ref(), args).unwrap().ok().unwrap());
    let attached = format!("kvlb_xdp_attached{{device=\"{device}\",mode=\"native\"}}");
    let degraded = async || kvlb.api("GET", "/netlox/v1/status", None).await.unwrap().1["degraded"].to_string();
    assert!(kvlb.metric(&attached).await.unwrap() > 0.5);
    ip(&["link", "del", device]);
    eventually(PATIENCE, "the loss is told", async || {
        degraded().await.contains(&format!("there is no device {device}"))
    })
    .await
    .unwrap();
    assert!(kvlb.metric(&attached).await.unwrap() < 0.5);
    assert!(kvlb.log().contains("the device is gone"), "{}", kvlb.log());
    // Another device with its name.
    ip(&["link", "add", device, "type", "veth", "peer", "name", "other"]);
    eventually(PATIENCE, "the new one is judged", async || scene.has_xdp() && degraded().await == "[]").await.unwrap();
    assert!(kvlb.metric(&attached).await.unwrap() > 0.5);
    kvlb.stop().await.unwrap();
    assert!(!scene.has_xdp());
}

#[tokio::test]
async fn without_its_devices_kvlb_does_not_start_and_a_limit_says_that_it_has_no_effect() {
    let Some(scene) = Scene::new("nodevice") else { return };
    let error = scene.stage.kvlb(&["--xdp-dev", "kvlb-none"]).await.unwrap_err();
    assert!(format!("{error:#}").contains("no device kvlb-none"), "{error:#}");
    assert!(!scene.stage.pins().exists());
    let engines = scene.stage.engines(11, 1, &engine()).await.unwrap();
    let kvlb = scene.stage.kvlb(&[]).await.unwrap();
    let id = kvlb.create(&rule(8080, &engines, &json!({"synRate": 1}))).await.unwrap();
    let notes = kvlb.rule(id).await.unwrap()["notes"].to_string();
    assert!(notes.contains("--xdp-dev"), "{notes}");
    kvlb.stop().await.unwrap();
}

//! Health is shared: what kvlb knows of its endpoints stands in the kernel's maps, readable with field names, and in `get lb`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test says by a panic what went wrong")]

use std::io::ErrorKind;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, SystemTime};

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::stage::{MODEL, PATIENCE, Stage, endpoint, engine, rule, vip};
use serde_json::{Value, json};

#[tokio::test]
async fn an_endpoint_that_is_killed_is_down_in_the_maps_and_in_get_lb() {
    let Some(stage) = Stage::new("health").unwrap() else { return };
    let mut engines = stage.engines(11, 2, &engine()).await.unwrap();
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let fast = json!({"probeTimeout": 1, "probeRetries": 1});
    let id = kvlb.create(&rule(8080, &engines, &fast)).await.unwrap();
    becomes(&stage, &kvlb, id, ["Up", "Up"], 2).await;
    let vips = dump(&stage, "VIPS");
    assert_eq!(vips.len(), 1, "{vips:?}");
    let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 10, 10, 254];
    assert_eq!((&vips[0]["key"]["addr"], &vips[0]["key"]["port"]), (&json!(mapped), &json!(8080)));
    assert_eq!((&vips[0]["value"]["rule"], &vips[0]["value"]["ep_count"]), (&json!(id), &json!(2)));
    let endpoints = endpoints(&stage);
    assert_eq!(endpoints[0]["addr"].as_array().unwrap()[12..], [127, 0, 0, 11].map(Value::from));
    assert_eq!((&endpoints[0]["port"], &endpoints[0]["weight"]), (&json!(8000), &json!(1)));
    // Every connection to the VIP is counted, over all CPUs and in the metric.
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 1});
    for _ in 0..5 {
        stage.ask(8080, "/v1/completions", &body).await.unwrap();
    }
    let of_cpus = dump(&stage, "STATS")[0]["values"].as_array().unwrap().clone();
    assert_eq!(of_cpus.iter().map(|cpu| cpu["value"]["steered"].as_u64().unwrap()).sum::<u64>(), 5, "{of_cpus:?}");
    let page = kvlb.metrics().await.unwrap();
    let steered: Vec<_> = page.family("kvlb_kernel_steered_total").collect();
    assert_eq!(steered, [("kvlb_kernel_steered_total{vip=\"10.10.10.254:8080\"}", 5.0)]);

    engines[0].kill().await;
    becomes(&stage, &kvlb, id, ["ProbeDown", "Up"], 1).await;
    let shown = stage.cli(&["get", "lb", "-o", "wide"]).unwrap().ok().unwrap();
    assert!(shown.contains("inactive") && shown.contains("active"), "{shown}");
    // A request goes to the one that is left, and an operator's word is in the maps as well.
    assert_eq!(stage.ask(8080, "/v1/completions", &body).await.unwrap().engine(), "engine-12");
    stage.cli(&["set", "ep", "127.0.0.12:8000", "drain"]).unwrap().ok().unwrap();
    becomes(&stage, &kvlb, id, ["ProbeDown", "Draining"], 0).await;
    stage.cli(&["set", "ep", "127.0.0.12:8000", "up"]).unwrap().ok().unwrap();
    let dead = engines.remove(0);
    let _back = stage.restart(dead).await.unwrap();
    becomes(&stage, &kvlb, id, ["Up", "Up"], 2).await;
    kvlb.stop().await.unwrap();
}

/// What the map says of the VIP's endpoints: of each its state, and how many may be chosen.
fn seen(stage: &Stage) -> (Vec<String>, u64) {
    let vips = dump(stage, "VIPS");
    let info = &vips[0]["value"];
    let number = |name: &str| info[name].as_u64().unwrap();
    let of = |from: u64, count: u64| usize::try_from(from).unwrap()..usize::try_from(from + count).unwrap();
    let entries = &dump(stage, "EPS")[of(number("ep_base"), number("ep_count"))];
    (entries.iter().map(|entry| entry["value"]["state"].as_str().unwrap().to_owned()).collect(), number("healthy"))
}

async fn sees(stage: &Stage, states: &[&str], healthy: u64) {
    eventually(PATIENCE, &format!("the map says {states:?}"), async || {
        let (seen, count) = seen(stage);
        seen == states && count == healthy
    })
    .await
    .unwrap_or_else(|error| panic!("{error:#}: {:?}", seen(stage)));
}

/// How a new connection to the VIP is met.
fn met(stage: &Stage) -> Result<TcpStream, ErrorKind> {
    stage.netns().run(|| TcpStream::connect(vip(8080))).unwrap().map_err(|error| error.kind())
}

#[tokio::test]
async fn every_cause_that_takes_an_endpoint_out_is_in_the_map_and_without_any_the_kernel_resets() {
    let Some(stage) = Stage::new("causes").unwrap() else { return };
    let mut engines = stage.engines(11, 5, &engine()).await.unwrap();
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let more =
        json!({"probeTimeout": 1, "probeRetries": 1, "noEndpoint": "reset", "cb_answer_failures": 1, "cb_open_sec": 2});
    let id = kvlb.create(&rule(8080, &engines, &more)).await.unwrap();
    sees(&stage, &["Up"; 5], 5).await;
    // The probe.
    engines[0].kill().await;
    sees(&stage, &["ProbeDown", "Up", "Up", "Up", "Up"], 4).await;
    // The breaker: what it says is told when it opens, when trials begin, and when it closes.
    engines[1].faults().set(|plan| plan.status = Some(500));
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 1});
    let opened = format!("kvlb_breaker_opened_total{{cause=\"answer\",ep_idx=\"1\",service=\"{id}\"}}");
    while kvlb.metric(&opened).await.unwrap() < 0.5 {
        stage.ask(8080, "/v1/completions", &body).await.unwrap();
    }
    sees(&stage, &["ProbeDown", "BreakerOpen", "Up", "Up", "Up"], 3).await;
    engines[1].faults().clear();
    sees(&stage, &["ProbeDown", "HalfOpen", "Up", "Up", "Up"], 4).await;
    eventually(PATIENCE, "trials close it", async || {
        stage.ask(8080, "/v1/completions", &body).await.unwrap();
        seen(&stage).0[1] == "Up"
    })
    .await
    .unwrap();
    // The operator: what is answered is in the map already.
    let says = |endpoint: &str, word: &str| drop(stage.cli(&["set", "ep", endpoint, word]).unwrap().ok().unwrap());
    let now = |states: &[&str], healthy: u64| {
        let (shown, count) = seen(&stage);
        assert_eq!((shown.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), count), (states, healthy));
    };
    says("127.0.0.13:8000", "down");
    now(&["ProbeDown", "Up", "AdminDown", "Up", "Up"], 3);
    says("127.0.0.14:8000", "drain");
    now(&["ProbeDown", "Up", "AdminDown", "Draining", "Up"], 2);
    let key = json!({"externalIP": "10.10.10.254", "port": 8080, "protocol": "tcp", "oper": 2});
    kvlb.create(&json!({"serviceArguments": key, "endpoints": [endpoint(&engines[4])]})).await.unwrap();
    now(&["ProbeDown", "Up", "AdminDown", "Draining"], 1);
    assert!(met(&stage).is_ok());
    says("127.0.0.12:8000", "down");
    now(&["ProbeDown", "AdminDown", "AdminDown", "Draining"], 0);
    assert_eq!(met(&stage).unwrap_err(), ErrorKind::ConnectionRefused);
    let refused = "kvlb_kernel_not_steered_total{vip=\"10.10.10.254:8080\"}";
    assert!((kvlb.metric(refused).await.unwrap() - 1.0).abs() < 0.5);
    // The other answer is the proxy's.
    let mut other = kvlb.rule(id).await.unwrap();
    other["serviceArguments"]["noEndpoint"] = json!("503");
    kvlb.create(&other).await.unwrap();
    let answer = stage.ask(8080, "/v1/completions", &body).await.unwrap();
    assert_eq!((answer.head.status, answer.body.json()["error"]["code"].as_str()), (503, Some("no_healthy_backend")));
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn where_kvlb_binds_the_vip_a_connection_is_reset_when_it_is_accepted() {
    let Some(stage) = Stage::new("resets").unwrap() else { return };
    let engines = stage.engines(11, 1, &engine()).await.unwrap();
    stage.own(kvlb_tests::harness::stage::VIP).unwrap();
    let kvlb = stage.kvlb(&["--datapath", "none"]).await.unwrap();
    kvlb.create(&rule(8080, &engines, &json!({"noEndpoint": "reset"}))).await.unwrap();
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 1});
    assert_eq!(stage.ask(8080, "/v1/completions", &body).await.unwrap().head.status, 200);
    stage.cli(&["set", "ep", "127.0.0.11:8000", "down"]).unwrap().ok().unwrap();
    assert!(stage.ask(8080, "/v1/completions", &body).await.is_err());
    assert!(kvlb.metric("kvlb_client_connections_refused_total{reason=\"no_endpoint\"}").await.unwrap() > 0.5);
    kvlb.stop().await.unwrap();
}

/// Not a test of its own: how long after kvlb knows the kernel does, for `docs/kernel.md` (`--ignored --nocapture`).
#[tokio::test]
#[ignore = "it measures, and promises nothing"]
#[expect(clippy::disallowed_methods, clippy::print_stdout, reason = "it measures")]
async fn what_a_change_takes() {
    let Some(stage) = Stage::new("takes").unwrap() else { return };
    let mut engines = stage.engines(11, 1, &engine()).await.unwrap();
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let more = json!({"probeTimeout": 1, "probeRetries": 1, "noEndpoint": "reset", "cb_enable": false});
    kvlb.create(&rule(8080, &engines, &more)).await.unwrap();
    sees(&stage, &["Up"], 1).await;
    let (mut lags, mut refusals) = (Vec::new(), Vec::new());
    for turn in 0..10 {
        let died = kvlb.log().lines().filter(|line| line.contains("endpoint is down")).count();
        assert_eq!(died, turn);
        let killed = engines.remove(0);
        let mut killed = killed;
        killed.kill().await;
        let first = loop {
            let asked = SystemTime::now();
            if met(&stage).is_err() {
                break (asked, asked.elapsed().unwrap());
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        };
        refusals.push(first.1);
        let log = kvlb.log();
        let line = log.lines().rfind(|line| line.contains("endpoint is down")).unwrap();
        let stamp = line.split_whitespace().next().unwrap().to_owned();
        lags.push(format!("{stamp} {}", humantime(first.0)));
        engines.push(stage.restart(killed).await.unwrap());
        sees(&stage, &["Up"], 1).await;
    }
    println!("log line, first refusal: {lags:#?}\nconnect until it is refused: {refusals:?}");
    kvlb.stop().await.unwrap();
}

/// Seconds of the minute, as the log's time stamps end.
fn humantime(at: SystemTime) -> String {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    format!("{:02}.{:06}", since.as_secs() % 60, since.subsec_micros())
}

/// Waits until the maps and the API say the same of both endpoints.
async fn becomes(stage: &Stage, kvlb: &Kvlb, id: u64, states: [&str; 2], healthy: u64) {
    let word = |state: &str| match state {
        "Up" => "active",
        "ProbeDown" => "inactive",
        _ => "draining",
    };
    eventually(PATIENCE, &format!("the endpoints are {states:?} everywhere"), async || {
        let in_map = endpoints(stage).iter().zip(states).all(|(endpoint, state)| endpoint["state"] == state);
        let rule = kvlb.rule(id).await.unwrap();
        let shown =
            rule["endpoints"].as_array().unwrap().iter().zip(states).all(|(e, state)| e["state"] == word(state));
        in_map && shown && dump(stage, "VIPS")[0]["value"]["healthy"] == healthy
    })
    .await
    .unwrap();
}

/// The entries of the VIP's endpoints.
fn endpoints(stage: &Stage) -> Vec<Value> {
    dump(stage, "EPS")[..2].iter().map(|entry| entry["value"].clone()).collect()
}

/// The entries of a map as bpftool prints them, by field names.
fn dump(stage: &Stage, map: &str) -> Vec<Value> {
    let pin = stage.pins().join(map).display().to_string();
    let text = stage.program(Path::new("bpftool"), &["--json", "map", "dump", "pinned", &pin]).unwrap().ok().unwrap();
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    entries.into_iter().map(|mut entry| entry["formatted"].take()).collect()
}

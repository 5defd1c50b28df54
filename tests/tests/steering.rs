//! Steering as a whole: many VIPs and ranges of ports, connections spread over the data threads, rules that change under load,
//! and VIPs that another program has.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::netns::Netns;
use kvlb_tests::harness::stage::{MODEL, PATIENCE, Stage, VIP, endpoint, engine, rule, vip};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};

/// A rule without a KV tier, at any address and ports.
fn plain(addr: &str, ports: (u16, u16), endpoints: &[Value], more: &Value) -> Value {
    let mut arguments = json!({
        "externalIP": addr, "port": ports.0, "portMax": ports.1, "protocol": "tcp", "mode": 4, "monitor": false,
    });
    for (name, value) in more.as_object().into_iter().flatten() {
        arguments[name] = value.clone();
    }
    json!({"serviceArguments": arguments, "endpoints": endpoints})
}

async fn delete(kvlb: &Kvlb, id: u64) {
    let (status, answer) = kvlb.api("DELETE", &format!("/netlox/v1/config/loadbalancer/id/{id}"), None).await.unwrap();
    assert_eq!(status, 200, "{answer}");
}

/// Pearson's statistic against an even spread.
fn chi_square(counts: &[f64]) -> f64 {
    let expected = counts.iter().sum::<f64>() / f64::from(u32::try_from(counts.len()).unwrap());
    counts.iter().map(|count| (count - expected).powi(2) / expected).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_connections_over_eight_vips_spread_evenly_over_the_data_threads() {
    /// What chi-square with three degrees of freedom exceeds with probability 0.001.
    const CRITICAL: f64 = 16.27;
    let Some(stage) = Stage::new("spread").unwrap() else { return };
    let engines = stage.engines(11, 1, &engine()).await.unwrap();
    let kvlb = stage.kvlb(&["--threads", "4"]).await.unwrap();
    let vips: Vec<SocketAddr> = (1..=4)
        .flat_map(|last| [format!("10.10.20.{last}:8080"), format!("[fd98::{last}]:8080")])
        .map(|text| text.parse().unwrap())
        .collect();
    for at in &vips {
        kvlb.create(&plain(&at.ip().to_string(), (8080, 0), &[endpoint(&engines[0])], &json!({}))).await.unwrap();
    }
    // Always the same 1250 source ports, so that the outcome is the same in every run.
    let open = |at: &SocketAddr, port: u16| {
        let source: IpAddr = if at.is_ipv4() { "127.0.0.1".parse().unwrap() } else { "::1".parse().unwrap() };
        let socket = Socket::new(Domain::for_address(*at), Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&SocketAddr::new(source, port).into()).unwrap();
        socket.connect(&(*at).into()).unwrap();
        TcpStream::from(socket)
    };
    // In two waves, since kvlb takes half as many at a time as it may have files open.
    let mut counts = vec![0.0; 4];
    for wave in 0..2 {
        let ports = || (0..625).map(move |nth| 20_000 + 2 * (wave * 625 + nth));
        let all = || vips.iter().flat_map(|at| ports().map(move |port| open(at, port))).collect::<Vec<_>>();
        let streams = stage.netns().run(all).unwrap();
        assert_eq!(streams.len(), 5000);
        let mut now = Vec::new();
        let mut become_so_many = async |wanted: f64| {
            let look = eventually(PATIENCE, "all are accepted, or gone", async || {
                let page = kvlb.metrics().await.unwrap();
                now = page.family("kvlb_data_thread_connections").map(|(_, count)| count).collect();
                (now.iter().sum::<f64>() - wanted).abs() < 0.5
            });
            look.await.unwrap();
            now.clone()
        };
        let open = become_so_many(5000.0).await;
        assert_eq!(open.len(), 4);
        counts.iter_mut().zip(&open).for_each(|(count, more)| *count += more);
        drop(streams);
        become_so_many(0.0).await;
    }
    let chi = chi_square(&counts);
    writeln!(std::io::stderr(), "connections of each data thread: {counts:?}, chi-square {chi:.2}").unwrap();
    assert!(chi < CRITICAL, "{counts:?}: {chi}");
    kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_vips_and_ranges_of_ports_of_both_families_are_served_at_every_end() {
    let Some(stage) = Stage::new("many").unwrap() else { return };
    let engines = stage.engines(11, 1, &engine()).await.unwrap();
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let here = [endpoint(&engines[0])];
    let mut ids = Vec::new();
    for last in 1..=40 {
        ids.push(kvlb.create(&plain(&format!("10.10.30.{last}"), (80, 0), &here, &json!({}))).await.unwrap());
        ids.push(kvlb.create(&plain(&format!("fd98:30::{last}"), (80, 0), &here, &json!({}))).await.unwrap());
    }
    for addr in ["10.10.31.1", "fd98:31::1"] {
        ids.push(kvlb.create(&plain(addr, (8000, 8999), &here, &json!({}))).await.unwrap());
    }
    // A port within a range may have rules of its own beside it.
    ids.push(kvlb.create(&plain("10.10.31.1", (8500, 0), &here, &json!({"host": "other"}))).await.unwrap());
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 1});
    for at in [
        "10.10.30.1:80",
        "10.10.30.40:80",
        "[fd98:30::1]:80",
        "[fd98:30::40]:80",
        "10.10.31.1:8000",
        "10.10.31.1:8500",
        "10.10.31.1:8999",
        "[fd98:31::1]:8000",
        "[fd98:31::1]:8999",
    ] {
        let answer = stage.post(at.parse().unwrap(), "/v1/completions", &body).await.unwrap();
        assert_eq!(answer.head.status, 200, "{at}");
    }
    let refused = |at: &str| {
        let at: SocketAddr = at.parse().unwrap();
        stage.netns().connect(at).unwrap().err().map(|error| error.kind())
    };
    for at in ["10.10.31.1:7999", "10.10.31.1:9000", "[fd98:31::1]:9000", "10.10.30.1:81"] {
        assert_eq!(refused(at), Some(ErrorKind::ConnectionRefused), "{at}");
    }
    // No listener of its own for any of them.
    let listens = stage.program("ss".as_ref(), &["-Hltn"]).unwrap().ok().unwrap();
    assert!(listens.lines().count() < 20, "{listens}");
    for id in ids {
        delete(&kvlb, id).await;
    }
    assert_eq!(refused("10.10.30.1:80"), Some(ErrorKind::ConnectionRefused));
    kvlb.stop().await.unwrap();
}

/// What clients met who asked all the time.
#[derive(Debug, Default)]
struct Met {
    served: AtomicU64,
    lost: AtomicU64,
}

impl Met {
    /// Asks on connections of its own, and now and then on one that stays open.
    fn ask(&self, at: SocketAddr, stop: &AtomicBool) {
        let mut kept = None;
        while !stop.load(Ordering::Relaxed) {
            let fresh = once(at, None).is_some();
            kept = once(at, kept);
            let lost = u64::from(!fresh) + u64::from(kept.is_none());
            self.served.fetch_add(2 - lost, Ordering::Relaxed);
            self.lost.fetch_add(lost, Ordering::Relaxed);
        }
    }
}

/// One small request; the connection, where it was answered with 200.
fn once(at: SocketAddr, kept: Option<TcpStream>) -> Option<TcpStream> {
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 1}).to_string();
    let run = || -> std::io::Result<(TcpStream, bool)> {
        let mut stream = kept.map_or_else(|| TcpStream::connect(at), Ok)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        write!(stream, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
        let mut answer = Vec::new();
        while !whole(&answer) {
            let mut piece = [0; 4096];
            match stream.read(&mut piece)? {
                0 => return Ok((stream, false)),
                count => answer.extend_from_slice(&piece[..count]),
            }
        }
        let good = answer.starts_with(b"HTTP/1.1 200");
        Ok((stream, good))
    };
    run().ok().filter(|(_, good)| *good).map(|(stream, _)| stream)
}

/// Whether an answer with a length is here to its end.
fn whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    length.is_some_and(|length: usize| body.len() >= length)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_changes_of_rules_under_load_lose_nothing() {
    let Some(stage) = Stage::new("changes").unwrap() else { return };
    let engines = stage.engines(11, 2, &engine()).await.unwrap();
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let both: Vec<_> = engines.iter().map(endpoint).collect();
    let busy = rule(8080, &engines, &json!({"monitor": false}));
    kvlb.create(&busy).await.unwrap();
    let (met, stop) = (Met::default(), AtomicBool::new(false));
    let refused = AtomicU64::new(0);
    let changes = async || {
        for turn in 0..250_u16 {
            // The rule under load changes itself: weights, then an endpoint less and one more.
            let mut changed = busy.clone();
            changed["endpoints"][usize::from(turn % 2)]["weight"] = json!(1 + turn % 7);
            kvlb.create(&changed).await.unwrap();
            let port = 10_000 + turn;
            let id = kvlb.create(&plain("10.10.40.1", (port, 0), &both[..1], &json!({}))).await.unwrap();
            // Whoever is told that the VIP is there can connect at once.
            let there = stage.netns().connect(SocketAddr::from(([10, 10, 40, 1], port))).unwrap();
            refused.fetch_add(u64::from(there.is_err()), Ordering::Relaxed);
            kvlb.create(&plain("10.10.40.1", (port, 0), &both, &json!({"name": "renamed"}))).await.unwrap();
            delete(&kvlb, id).await;
        }
    };
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| stage.netns().run(|| met.ask(vip(8080), &stop)).unwrap());
        }
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(changes()));
        stop.store(true, Ordering::Relaxed);
    });
    writeln!(std::io::stderr(), "under 1000 changes: {met:?}, {refused:?} refused at new VIPs").unwrap();
    assert!(met.served.load(Ordering::Relaxed) > 100, "{met:?}");
    assert_eq!((met.lost.load(Ordering::Relaxed), refused.load(Ordering::Relaxed)), (0, 0));
    let page = kvlb.metrics().await.unwrap();
    assert!(page.value("kvlb_kernel_not_steered_total{vip=\"10.10.10.254:8080\"}") < 0.5);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_vip_that_another_program_has_is_left_to_it_named_and_served_when_it_is_free() {
    let Some(stage) = Stage::new("owned").unwrap() else { return };
    let engines = stage.engines(11, 1, &engine()).await.unwrap();
    stage.own(VIP).unwrap();
    // One program has the address's port 8080, another one port 8081 of all addresses.
    let bind = |at: &str| stage.netns().run(|| TcpListener::bind(at)).unwrap().unwrap();
    let (exact, everywhere) = (bind("10.10.10.254:8080"), bind("0.0.0.0:8081"));
    let kvlb = stage.kvlb(&[]).await.unwrap();
    for port in [8080, 8081, 8082] {
        let (status, answer) =
            kvlb.api("POST", "/netlox/v1/config/loadbalancer", Some(&rule(port, &engines, &json!({})))).await.unwrap();
        assert_eq!(status, 200, "{answer}");
        let note = format!("10.10.10.254:{port} is not served: process {} (", std::process::id());
        assert_eq!(answer["notes"].to_string().contains(&note), port != 8082, "{answer}");
    }
    for (port, listener) in [(8080, &exact), (8081, &everywhere)] {
        let _client = stage.netns().connect(vip(port)).unwrap().unwrap();
        listener.accept().unwrap();
    }
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 1});
    assert_eq!(stage.ask(8082, "/v1/completions", &body).await.unwrap().head.status, 200);
    let status = stage.cli(&["get", "status"]).unwrap().ok().unwrap();
    assert!(status.contains("10.10.10.254:8080 is not served: process") && status.contains("1 more"), "{status}");
    // No address on this host: who listens everywhere does not have it.
    kvlb.create(&plain("10.10.10.253", (8081, 0), &[endpoint(&engines[0])], &json!({}))).await.unwrap();
    let elsewhere: SocketAddr = "10.10.10.253:8081".parse().unwrap();
    assert_eq!(stage.post(elsewhere, "/v1/completions", &body).await.unwrap().head.status, 200);
    drop((exact, everywhere));
    for port in [8080, 8081] {
        eventually(PATIENCE, "the VIP is served", async || {
            stage.ask(port, "/v1/completions", &body).await.is_ok_and(|answer| answer.head.status == 200)
        })
        .await
        .unwrap();
    }
    let (_, status) = kvlb.api("GET", "/netlox/v1/status", None).await.unwrap();
    assert_eq!(status["degraded"], json!([]), "{status}");
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn an_ipv6_vip_of_a_devices_network_is_handed_on_in_a_takeover_and_goes_with_the_last_kvlb() {
    let Some(stage) = Stage::new("near").unwrap() else { return };
    let far = Netns::new("near-far").unwrap();
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let (device, _far) = stage.netns().link((ip("fd98::ff"), 64), &far, (ip("fd98::2"), 64)).unwrap();
    let engines = stage.engines(11, 1, &engine()).await.unwrap();
    let kvlb = stage.kvlb(&[]).await.unwrap();
    kvlb.create(&plain("fd98::1", (80, 0), &[endpoint(&engines[0])], &json!({}))).await.unwrap();
    let shown = || stage.program("ip".as_ref(), &["-6", "addr", "show", "dev", &device]).unwrap().ok().unwrap();
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&"[fd98::1]:80".parse().unwrap(), Duration::from_secs(3))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        write!(stream, "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    // The devices of the pair take a moment to be sure of their own addresses.
    let answers = || far.run(ask).unwrap().is_ok_and(|text| text.starts_with("HTTP/1.1 200"));
    eventually(PATIENCE, "a neighbour is answered", async || answers()).await.unwrap();
    assert!(shown().contains("fd98::1/128"), "{}", shown());
    let next = Kvlb::take_over(stage.config(&["--takeover"])).await.unwrap();
    assert!(answers() && shown().contains("fd98::1/128"), "{}", shown());
    drop(kvlb);
    assert!(answers() && shown().contains("fd98::1/128"), "{}", shown());
    next.stop().await.unwrap();
    assert!(!shown().contains("fd98::1/128"), "{}", shown());
}

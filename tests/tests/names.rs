//! An endpoint that the rule gives by name goes where the name leads, also when that changes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvlb_tests::harness::http::Client;
use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig, binary};
use kvlb_tests::harness::{eventually, free_port, temp_dir};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// Names are asked anew every 2 s while the endpoint lists no models, as these here do not.
const SOON: Duration = Duration::from_secs(30);
const NAME: &str = "engine.kvlb.test";

/// A program that runs kvlb with its own `/etc/hosts`, in a mount namespace that ends with it.
fn with_hosts(dir: &Path, hosts: &Path) -> PathBuf {
    let script = dir.join("kvlb-with-hosts");
    let (hosts, kvlb) = (hosts.display(), binary("kvlb").unwrap());
    let inside = format!("mount --bind {hosts} /etc/hosts && exec {} \"$@\"", kvlb.display());
    let text = format!("#!/bin/sh\nexec unshare --mount --propagation private sh -c '{inside}' kvlb \"$@\"\n");
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    script
}

/// Answers everything with its own address, one request a connection.
async fn telling(address: SocketAddr) {
    let listener = TcpListener::bind(address).await.unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut bytes = vec![0; 8192];
                let Ok(1..) = stream.read(&mut bytes).await else { return };
                let body = address.ip().to_string();
                let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
                stream.write_all(format!("{head}{body}").as_bytes()).await.ok();
            });
        }
    });
}

#[tokio::test]
async fn a_name_that_leads_elsewhere_now_takes_its_requests_there() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a mount namespace needs root");
        return;
    }
    let (dir, port) = (temp_dir().unwrap(), free_port().unwrap());
    let [first, second] = ["127.77.0.1", "127.77.0.2"].map(|host| SocketAddr::new(host.parse().unwrap(), port));
    telling(first).await;
    telling(second).await;
    let hosts = dir.path().join("hosts");
    let lead_to = |address: Option<SocketAddr>| {
        let line = address.map(|address| format!("{} {NAME}\n", address.ip())).unwrap_or_default();
        // In place: the mount shows this very file.
        std::fs::write(&hosts, format!("127.0.0.1 localhost\n{line}")).unwrap();
    };
    lead_to(None);
    let config = KvlbConfig::with(&["--datapath", "none", "--threads", "1"]);
    let kvlb = Kvlb::start_program(&with_hosts(dir.path(), &hosts), config).await.unwrap();
    let vip = SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
    let rule = json!({
        "serviceArguments": {"externalIP": vip.ip(), "port": vip.port(), "protocol": "tcp", "mode": 4, "monitor": false},
        "endpoints": [{"endpointIP": NAME, "targetPort": port}],
    });
    let (status, answer) = kvlb.api("POST", "/netlox/v1/config/loadbalancer", Some(&rule)).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    let ask = async || {
        let mut client = Client::connect(vip).await.ok()?;
        client.request("GET", "/", &[], b"").await.ok()?;
        let answer = client.answer().await.ok()?;
        Some((answer.head.status, answer.body.text()))
    };
    let says = async |what: &str, status: u16, text: &str| {
        let mut last = None;
        let said = eventually(SOON, what, async || {
            last = ask().await;
            last.as_ref().is_some_and(|(own, body)| *own == status && body.contains(text))
        });
        let said = said.await;
        said.unwrap_or_else(|error| panic!("{error:#}: {last:?}\n{}", kvlb.log()));
    };
    says("a name without an address leads nowhere, and that is said", 503, "no_healthy_backend").await;
    for address in [first, second, first] {
        lead_to(Some(address));
        says("the request goes where the name leads", 200, &address.ip().to_string()).await;
    }
    // What the name meant a moment ago is better than nothing.
    lead_to(None);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(ask().await, Some((200, first.ip().to_string())));
    kvlb.stop().await.unwrap();
}

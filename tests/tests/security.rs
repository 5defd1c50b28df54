//! Who may use the API: tokens and roles on every path, TLS and whom it trusts, and what is refused at start.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvlb::control::rest::{Role, Row, table};
use kvlb::tls::Trust;
use kvlb_tests::harness::http::{Answer, Client, End, exchange};
use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig, binary};
use kvlb_tests::harness::netns::Netns;
use kvlb_tests::harness::{eventually, free_port};
use nix::sys::signal::Signal;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

const ADMIN: &str = "admin-0123456789abcdef";
const READ: &str = "read-0123456789abcdef0";
const WRONG: &str = "wrong-0123456789abcdef";
const LB: &str = "/netlox/v1/config/loadbalancer";
/// Far more than anything here takes.
const SOON: Duration = Duration::from_mins(1);

/// Files for one test: tokens, an authority, and what it signed.
struct Desk {
    dir: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Desk {
    fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let desk = Self { dir: tempfile::tempdir().unwrap(), authority };
        desk.put("admin", ADMIN);
        desk.put("read", READ);
        desk.put("ca", &desk.authority.pem());
        desk.sign("server", |_| {});
        desk
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn put(&self, name: &str, text: &str) -> String {
        self.put_with_mode(name, text, 0o600)
    }

    /// Replaced as a whole, as a careful operator does.
    fn put_with_mode(&self, name: &str, text: &str, mode: u32) -> String {
        let new = self.dir.path().join("new");
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(mode)).unwrap();
        fs::rename(new, self.dir.path().join(name)).unwrap();
        self.path(name)
    }

    /// `NAME.cert` and `NAME.key`, signed by the authority, for 127.0.0.1 and `::1`.
    fn sign(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["127.0.0.1".to_owned(), "::1".to_owned()]).unwrap();
        change(&mut params);
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        self.put(&format!("{name}.cert"), &certificate.pem());
        self.put(&format!("{name}.key"), &key.serialize_pem());
    }

    fn trust(&self) -> Trust {
        Trust { ca: Some(self.path("ca").into()), ..Trust::default() }
    }

    fn tokens(&self) -> Vec<String> {
        words(&["--api-token-file", &self.path("admin"), "--api-read-token-file", &self.path("read")])
    }

    fn tls(&self) -> Vec<String> {
        words(&["--api-tls-cert", &self.path("server.cert"), "--api-tls-key", &self.path("server.key")])
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

fn config(parts: &[Vec<String>]) -> KvlbConfig {
    let mut args = words(&["--datapath", "none", "--threads", "1", "--no-state"]);
    args.extend(parts.iter().flatten().cloned());
    KvlbConfig { args, ..KvlbConfig::default() }
}

async fn start(parts: &[Vec<String>]) -> Kvlb {
    Kvlb::start(config(parts)).await.unwrap()
}

/// Why it does not start.
async fn refused(config: KvlbConfig) -> String {
    format!("{:#}", Kvlb::start(config).await.unwrap_err())
}

async fn ask(kvlb: &Kvlb, token: Option<&str>, method: &str, path: &str) -> Answer {
    let bearer = token.map(|token| format!("Bearer {token}"));
    let mut headers = vec![("Content-Type", "application/json")];
    headers.extend(bearer.as_deref().map(|bearer| ("Authorization", bearer)));
    let body: &[u8] = if method == "POST" { b"{}" } else { b"" };
    exchange(kvlb.api_address(), method, path, &headers, body).await.unwrap()
}

async fn status_of(kvlb: &Kvlb, token: Option<&str>, method: &str, path: &str) -> u16 {
    ask(kvlb, token, method, path).await.head.status
}

/// The value of a series, as an administrator reads it.
async fn count(kvlb: &Kvlb, series: &str) -> u64 {
    let page = ask(kvlb, Some(ADMIN), "GET", "/metrics").await.body.text();
    let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().unwrap())
}

fn degraded(status: &Value) -> HashSet<String> {
    status["degraded"].as_array().unwrap().iter().map(|entry| entry["what"].as_str().unwrap().to_owned()).collect()
}

/// How a client command ends, and all that it says.
struct Said {
    code: i32,
    out: String,
    err: String,
}

async fn run(args: &[&str], env: &[(&str, &str)]) -> Said {
    let mut command = Command::new(binary("kvlb").unwrap());
    command.args(args).envs(env.iter().copied());
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
}

/// A path of the table with something in its variable parts.
fn filled(row: &Row) -> String {
    let mut path = row.path.clone();
    for (part, value) in [
        ("{ip}", "127.0.0.1"),
        ("{port}", "80"),
        ("{portmax}", "81"),
        ("{protocol}", "tcp"),
        ("{host}", "h"),
        ("{id}", "1"),
        ("{name}", "n"),
    ] {
        path = path.replace(part, value);
    }
    assert!(!path.contains('{'), "say what stands in {path}");
    path
}

#[tokio::test]
async fn every_path_asks_for_the_role_that_its_row_says() {
    let desk = Desk::new();
    let kvlb = start(&[desk.tokens()]).await;
    let rows = table();
    assert!(rows.len() >= 28, "{rows:?}");
    let code = |answer: &Answer| answer.body.json()["error"].as_str().unwrap_or_default().to_owned();
    for row in &rows {
        let (method, path) = (row.method.as_str(), filled(row));
        for (token, expected) in [(None, "token_missing"), (Some(WRONG), "token_wrong"), (Some(""), "token_wrong")] {
            let answer = ask(&kvlb, token, method, &path).await;
            assert_eq!((answer.head.status, code(&answer).as_str()), (401, expected), "{method} {path} {token:?}");
            assert!(answer.head.header("www-authenticate").unwrap().starts_with("Bearer"), "{method} {path}");
            assert_eq!(answer.body.json()["result"], "Error");
        }
        let answer = ask(&kvlb, Some(READ), method, &path).await;
        if row.needs == Role::Admin {
            assert_eq!((answer.head.status, code(&answer).as_str()), (403, "token_read_only"), "{method} {path}");
        } else {
            assert!(![401, 403, 405].contains(&answer.head.status), "{method} {path}: {}", answer.head.status);
        }
        let status = status_of(&kvlb, Some(ADMIN), method, &path).await;
        assert!(![401, 403, 405].contains(&status), "{method} {path}: {status}");
        // What only reads is what a method says that only reads, but for requests to be explained.
        let reads = row.method == "GET" || row.path.ends_with("/explain");
        assert_eq!(row.needs == Role::Read, reads, "{method} {path}");
    }
    // Nor does anybody learn what is not there, or by which methods.
    let paths: HashSet<_> = rows.iter().map(filled).collect();
    for path in paths.iter().map(String::as_str).chain(["/", "/netlox/v1", "/netlox/v1/none", "/metrics/", "//metrics"])
    {
        for method in ["PUT", "PATCH", "OPTIONS", "DELETE", "NONE"] {
            assert_eq!(status_of(&kvlb, None, method, path).await, 401, "{method} {path}");
            assert_eq!(status_of(&kvlb, Some(WRONG), method, path).await, 401, "{method} {path}");
            let status = status_of(&kvlb, Some(READ), method, path).await;
            assert!([403, 404, 405].contains(&status), "{method} {path}: {status}");
        }
    }
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_token_that_reads_changes_nothing_and_no_token_is_written_anywhere() {
    let desk = Desk::new();
    let mut config = config(&[desk.tokens()]);
    config.args.extend(words(&["--log-level", "trace"]));
    let kvlb = Kvlb::start(config).await.unwrap();
    let rule = json!({"serviceArguments": {"externalIP": "127.0.0.1", "port": free_port().unwrap(), "protocol": "tcp",
        "sel": 0, "mode": 4}, "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": 9, "weight": 1}]})
    .to_string();
    let post = async |token: &str| {
        let bearer = format!("Bearer {token}");
        let headers = [("Content-Type", "application/json"), ("Authorization", bearer.as_str())];
        exchange(kvlb.api_address(), "POST", LB, &headers, rule.as_bytes()).await.unwrap().head.status
    };
    assert_eq!(post(READ).await, 403);
    assert_eq!(post(WRONG).await, 401);
    let all = format!("{LB}/all");
    assert_eq!(ask(&kvlb, Some(READ), "GET", &all).await.body.json(), json!({"lbAttr": []}));
    assert_eq!(post(ADMIN).await, 200);
    assert_eq!(status_of(&kvlb, Some(READ), "DELETE", &all).await, 403);
    let rules = ask(&kvlb, Some(READ), "GET", &all).await.body.json();
    assert_eq!(rules["lbAttr"].as_array().unwrap().len(), 1);
    for _ in 0..20 {
        assert_eq!(status_of(&kvlb, Some(WRONG), "GET", &all).await, 401);
    }
    // LoxiLB's own client sends the token alone.
    let alone = [("Authorization", ADMIN)];
    assert_eq!(exchange(kvlb.api_address(), "GET", &all, &alone, b"").await.unwrap().head.status, 200);
    assert_eq!(count(&kvlb, "kvlb_api_denied_total{reason=\"token_wrong\"}").await, 21);
    assert_eq!(count(&kvlb, "kvlb_api_denied_total{reason=\"token_read_only\"}").await, 2);
    let log = kvlb.log();
    let told = log.lines().filter(|line| line.contains("turned somebody away")).count();
    assert!((1..10).contains(&told), "{told} lines for 23 tries");
    let arguments = fs::read(format!("/proc/{}/cmdline", kvlb.id())).unwrap();
    let environment = fs::read(format!("/proc/{}/environ", kvlb.id())).unwrap();
    let seen = [log.into_bytes(), arguments, environment, rules.to_string().into_bytes()].concat();
    let seen = String::from_utf8_lossy(&seen);
    for token in [ADMIN, READ, WRONG] {
        assert!(!seen.contains(token), "{token} is written somewhere");
    }
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn metrics_can_be_opened_and_nothing_else_is() {
    let desk = Desk::new();
    let kvlb = start(&[desk.tokens(), words(&["--api-open-metrics"])]).await;
    for path in ["/metrics", "/netlox/v1/metrics"] {
        assert_eq!(status_of(&kvlb, None, "GET", path).await, 200, "{path}");
        assert_eq!(status_of(&kvlb, None, "DELETE", path).await, 405, "{path}");
    }
    for row in table().iter().filter(|row| !row.path.ends_with("/metrics") || row.path.ends_with("config/metrics")) {
        let path = filled(row);
        assert_eq!(status_of(&kvlb, None, row.method.as_str(), &path).await, 401, "{} {path}", row.method);
    }
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn files_that_do_not_guard_anything_are_refused_at_start() {
    let desk = Desk::new();
    desk.put("short", "0123456789abcde\n");
    desk.put("lines", &format!("{ADMIN}\n{READ}\n"));
    desk.put("empty", "\n");
    desk.put("space", &format!(" \t{ADMIN}\r\n\n"));
    desk.put_with_mode("open", ADMIN, 0o644);
    desk.put_with_mode("group", ADMIN, 0o660);
    desk.put_with_mode("open.key", &fs::read_to_string(desk.path("server.key")).unwrap(), 0o640);
    desk.sign("other", |_| {});
    let (admin, cert, key) = (desk.path("admin"), desk.path("server.cert"), desk.path("server.key"));
    let directory = desk.dir.path().display().to_string();
    let file = |name: &str| desk.path(name);
    for (args, parts) in [
        (vec!["--api-token-file", &file("short")], ["[token_short]", "has 15 characters", "at least 16"]),
        (vec!["--api-token-file", &file("lines")], ["[token_lines]", "several lines", ""]),
        (vec!["--api-token-file", &file("empty")], ["[token_empty]", "openssl rand -hex 32", ""]),
        (vec!["--api-token-file", &file("none")], ["[token_unreadable]", "No such file", ""]),
        (vec!["--api-token-file", &directory], ["[token_not_a_file]", "no regular file", ""]),
        (vec!["--api-token-file", &file("open")], ["[token_open_to_others]", "0644", "chmod 600"]),
        (vec!["--api-token-file", &file("group")], ["[token_open_to_others]", "0660", "chmod 600"]),
        (
            vec!["--api-token-file", &admin, "--api-read-token-file", &file("open")],
            ["[token_open_to_others]", "chmod 600", ""],
        ),
        (
            vec!["--api-token-file", &admin, "--api-read-token-file", &file("space")],
            ["[token_same_token]", "must be another", ""],
        ),
        (vec!["--api-read-token-file", &admin], ["--api-read-token-file needs --api-token-file", "status: 2", ""]),
        (
            vec!["--api-tls-cert", &cert, "--api-tls-key", &file("open.key")],
            ["[tls_open_to_others]", "chmod 600", "open.key"],
        ),
        (
            vec!["--api-tls-cert", &cert, "--api-tls-key", &file("other.key")],
            ["[tls_key_mismatch]", "other.key does not belong", "server.cert"],
        ),
        (vec!["--api-tls-cert", &key, "--api-tls-key", &key], ["[tls_no_certificate]", "server.key", ""]),
        (vec!["--api-tls-cert", &cert, "--api-tls-key", &cert], ["[tls_", "server.cert", ""]),
        (vec!["--api-tls-cert", &cert], ["--api-tls-cert needs --api-tls-key", "status: 2", ""]),
    ] {
        let why = refused(config(&[words(&args.iter().map(|arg| &**arg).collect::<Vec<_>>())])).await;
        for part in parts {
            assert!(why.contains(part), "{args:?} does not say {part:?}: {why}");
        }
        assert!(!why.contains(ADMIN) && !why.contains("0123456789abcde"), "a token is shown: {why}");
    }
    // Space around a token is no part of it.
    let kvlb = start(&[words(&["--api-token-file", &desk.path("space")])]).await;
    assert_eq!(status_of(&kvlb, Some(ADMIN), "GET", "/netlox/v1/status").await, 200);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn an_api_that_others_reach_does_not_start_unguarded() {
    let desk = Desk::new();
    for api in ["0.0.0.0:11111", "[::]:11111", "192.0.2.1:11111", "[2001:db8::1]:11111", "[::ffff:192.0.2.1]:11111"] {
        for config in [
            config(&[words(&["--api", api])]),
            // The harness looks for the flag, and the variable is what counts without.
            config(&[]).env("KVLB_API_WITHOUT_TOKEN", "0").env("KVLB_API", api),
        ] {
            if !config.args.contains(&"--api".to_owned()) {
                let said = run(&["up", "--no-state"], &[("KVLB_API", api)]).await;
                assert_eq!(said.code, 2, "{}", said.err);
                assert!(said.err.contains("KVLB_API ") && said.err.contains("[api_unguarded]"), "{}", said.err);
                continue;
            }
            let why = refused(config).await;
            for part in
                ["exit status: 2", "[api_unguarded]", "--api-token-file", "--api-without-token", "127.0.0.1:11111"]
            {
                assert!(why.contains(part), "{api} does not say {part}: {why}");
            }
        }
    }
    let netns = match Netns::new("security") {
        Ok(netns) => Arc::new(netns),
        Err(error) => {
            eprintln!("skipped: {error:#}");
            return;
        }
    };
    for api in ["0.0.0.0:11111", "[::]:11111"] {
        let at = words(&["--api", api]);
        let open = config(&[at.clone(), words(&["--api-without-token"])]).inside(&netns);
        let open = Kvlb::start(open).await.unwrap();
        let (status, shown) = open.api("GET", "/netlox/v1/status", None).await.unwrap();
        assert!(status == 200 && degraded(&shown).contains("api_without_token"), "{shown}");
        assert_eq!((&shown["apiTokens"], &shown["apiTls"]), (&json!("none"), &json!(false)));
        assert!(open.log().contains("may change rules"), "{}", open.log());
        open.stop().await.unwrap();

        let plain = Kvlb::start(config(&[at.clone(), desk.tokens()]).inside(&netns)).await.unwrap();
        assert_eq!(plain.api("GET", "/netlox/v1/status", None).await.unwrap().0, 401);
        let shown = in_netns(&plain, "/netlox/v1/status", READ).await;
        assert_eq!(
            (&degraded(&shown), &shown["apiTokens"]),
            (&HashSet::from(["api_plain_text".to_owned()]), &json!("admin+read"))
        );
        assert!(plain.log().contains("plain text"), "{}", plain.log());
        plain.stop().await.unwrap();

        let guarded = Kvlb::start(config(&[at, desk.tokens(), desk.tls()]).inside(&netns)).await.unwrap();
        assert_eq!(guarded.api("GET", "/netlox/v1/status", None).await.unwrap().1["error"], "https_needed");
        assert!(!guarded.log().contains("WARN API"), "{}", guarded.log());
        guarded.stop().await.unwrap();
    }
}

async fn in_netns(kvlb: &Kvlb, path: &str, token: &str) -> Value {
    let mut client = kvlb.connect(kvlb.api_address()).await.unwrap();
    let bearer = format!("Bearer {token}");
    client.request("GET", path, &[("Authorization", &bearer)], b"").await.unwrap();
    client.answer().await.unwrap().body.json()
}

#[tokio::test]
async fn tokens_and_certificates_change_while_it_runs_and_bad_ones_change_nothing() {
    let desk = Desk::new();
    let kvlb = start(&[desk.tokens(), desk.tls()]).await;
    let https = kvlb::tls::client(&desk.trust()).unwrap().pool_max_idle_per_host(0).build().unwrap();
    let url = format!("https://{}", kvlb.api_address());
    let status = async |token: &str| {
        let answer = https.get(format!("{url}/netlox/v1/status")).bearer_auth(token).send().await;
        answer.unwrap().status().as_u16()
    };
    let shown = async |token: &str| -> Value {
        let answer = https.get(format!("{url}/netlox/v1/status")).bearer_auth(token).send().await.unwrap();
        answer.json().await.unwrap()
    };
    let metrics = async |token: &str| {
        https.get(format!("{url}/metrics")).bearer_auth(token).send().await.unwrap().text().await.unwrap()
    };
    assert_eq!((status(ADMIN).await, status(READ).await, status(WRONG).await), (200, 200, 401));

    // Broken in one of the ways: the old one stays, and that is told.
    desk.put_with_mode("admin", "another-0123456789", 0o644);
    let told = async || degraded(&shown(READ).await).contains("api_tokens");
    eventually(SOON, "the bad file is told of", told).await.unwrap();
    assert_eq!((status(ADMIN).await, status("another-0123456789").await), (200, 401));
    let failures = "kvlb_api_reload_failures_total{reason=\"open_to_others\",what=\"api_tokens\"} 1";
    assert!(metrics(READ).await.contains(failures), "{}", metrics(READ).await);

    // In order: the new one counts, the old one no more, and the degradation is over.
    desk.put("admin", "another-0123456789\n");
    eventually(SOON, "the new token counts", async || status("another-0123456789").await == 200).await.unwrap();
    assert_eq!((status(ADMIN).await, status(READ).await), (401, 200));
    let over = async || degraded(&shown(READ).await).is_empty();
    eventually(SOON, "the trouble is over", over).await.unwrap();

    // SIGHUP is a wish to read at once, not an end.
    desk.put("admin", ADMIN);
    kvlb.signal(Signal::SIGHUP).unwrap();
    eventually(SOON, "the first token is back", async || status(ADMIN).await == 200).await.unwrap();

    // A file that is gone leaves its token in force.
    fs::remove_file(desk.path("read")).unwrap();
    eventually(SOON, "the missing file is told of", async || degraded(&shown(ADMIN).await).contains("api_tokens"))
        .await
        .unwrap();
    assert_eq!(status(READ).await, 200);
    desk.put("read", READ);

    // A certificate whose key is not there yet, then the key.
    let serial = async || -> Vec<u8> { peer_certificate(kvlb.api_address()).await };
    let before = serial().await;
    let key = fs::read_to_string(desk.path("server.key")).unwrap();
    desk.sign("server", |_| {});
    let new_key = fs::read_to_string(desk.path("server.key")).unwrap();
    desk.put("server.key", &key);
    kvlb.signal(Signal::SIGHUP).unwrap();
    eventually(SOON, "the mismatch is told of", async || degraded(&shown(ADMIN).await).contains("api_tls"))
        .await
        .unwrap();
    assert_eq!(serial().await, before);
    desk.put("server.key", &new_key);
    eventually(SOON, "the new certificate is shown", async || serial().await != before).await.unwrap();
    eventually(SOON, "all is well", async || degraded(&shown(ADMIN).await).is_empty()).await.unwrap();
    kvlb.stop().await.unwrap();
}

/// A TLS client that trusts everybody, for looks at what is shown.
fn connector(versions: &[&'static rustls::SupportedProtocolVersion]) -> tokio_rustls::TlsConnector {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(versions);
    let trusting = Arc::new(Trusting(provider));
    let config = config.unwrap().dangerous().with_custom_certificate_verifier(trusting).with_no_client_auth();
    Arc::new(config).into()
}

async fn tls(address: SocketAddr) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let name = rustls::pki_types::ServerName::from(address.ip());
    connector(rustls::ALL_VERSIONS).connect(name, TcpStream::connect(address).await?).await
}

async fn peer_certificate(address: SocketAddr) -> Vec<u8> {
    tls(address).await.unwrap().get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

#[derive(Debug)]
struct Trusting(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &rustls::pki_types::CertificateDer<'_>,
        signed: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &rustls::pki_types::CertificateDer<'_>,
        signed: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[tokio::test]
async fn both_versions_of_tls_are_spoken() {
    let desk = Desk::new();
    let kvlb = start(&[desk.tokens(), desk.tls()]).await;
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let name = rustls::pki_types::ServerName::from(kvlb.api_address().ip());
        let stream = TcpStream::connect(kvlb.api_address()).await.unwrap();
        let mut stream = connector(&[version]).connect(name, stream).await.unwrap();
        assert_eq!(stream.get_ref().1.protocol_version(), Some(version.version));
        let head =
            format!("GET /metrics HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {READ}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        timeout(SOON, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("kvlb_build_info"), "{answer}");
    }
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn plain_http_at_a_port_that_speaks_tls_is_told_so() {
    let desk = Desk::new();
    let kvlb = start(&[desk.tokens(), desk.tls()]).await;
    for token in [None, Some(WRONG), Some(ADMIN)] {
        for (method, path) in [("GET", "/metrics"), ("POST", LB), ("GET", "/none")] {
            let answer = ask(&kvlb, token, method, path).await;
            let body = answer.body.json();
            assert_eq!(
                (answer.head.status, &body["error"]),
                (400, &json!("https_needed")),
                "{method} {path} {token:?}"
            );
            assert_eq!(answer.head.header("connection"), Some("close"));
        }
    }
    // Something that is neither is let go.
    let mut client = Client::connect(kvlb.api_address()).await.unwrap();
    client.send(b"\x00\x01\x02\x03\r\n\r\n").await.unwrap();
    timeout(SOON, client.closed()).await.unwrap();
    kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_and_silent_handshakes_hold_up_nobody_and_end() {
    let desk = Desk::new();
    let kvlb = start(&[desk.tokens(), desk.tls()]).await;
    let api = kvlb.api_address();
    let mut waiting = Vec::new();
    // More than there are places: a third says nothing, a third stops within its first record, a third says what is no TLS.
    for number in 0..150 {
        let mut client = Client::connect(api).await.unwrap();
        match number % 3 {
            0 => {}
            1 => client.send(&[0x16, 3, 1, 2, 0, 1, 0]).await.unwrap(),
            // Where it was turned away at once, the rest of it finds nobody.
            _ => drop(client.send(&[0x16, 3, 1, 0, 4, 9, 9, 9, 9]).await),
        }
        waiting.push(client);
    }
    let https = kvlb::tls::client(&desk.trust()).unwrap().build().unwrap();
    let asked = https.get(format!("https://{api}/metrics")).bearer_auth(READ).send();
    assert_eq!(timeout(SOON, asked).await.unwrap().unwrap().status(), 200);
    // One that sends a byte now and then may not do so for ever.
    let mut drip = TcpStream::connect(api).await.unwrap();
    let dripping = async {
        let hello = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
        for byte in hello.into_iter().chain(std::iter::repeat(7)) {
            if drip.write_all(&[byte]).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    };
    timeout(SOON, dripping).await.unwrap();
    for mut client in waiting {
        assert!(matches!(timeout(SOON, client.closed()).await.unwrap(), End::Closed | End::Reset));
    }
    let answer = https.get(format!("https://{api}/metrics")).bearer_auth(READ).send().await.unwrap();
    let page = answer.text().await.unwrap();
    for reason in ["tls_failed", "tls_late"] {
        assert!(page.contains(&format!("kvlb_api_denied_total{{reason=\"{reason}\"}}")), "{reason} is not counted");
    }
    assert!(page.contains("kvlb_panics_total 0"));
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_client_certificate_is_asked_for_where_that_is_said() {
    let desk = Desk::new();
    desk.sign("client", |_| {});
    let stranger = Desk::new();
    stranger.sign("client", |_| {});
    let kvlb = start(&[desk.tokens(), desk.tls(), words(&["--api-client-ca", &desk.path("ca")])]).await;
    let (api, port) = (kvlb.api_address(), kvlb.api_address().port().to_string());
    let own = |desk: &Desk| Some((PathBuf::from(desk.path("client.cert")), PathBuf::from(desk.path("client.key"))));
    let ask = async |own, token: &str| {
        let client = kvlb::tls::client(&Trust { own, ..desk.trust() }).unwrap().build().unwrap();
        client.get(format!("https://{api}/netlox/v1/status")).bearer_auth(token).send().await
    };
    assert_eq!(ask(own(&desk), READ).await.unwrap().status(), 200);
    assert_eq!(ask(own(&desk), WRONG).await.unwrap().status(), 401, "a certificate is no token");
    assert!(ask(None, ADMIN).await.is_err(), "a token is no certificate");
    assert!(ask(own(&stranger), ADMIN).await.is_err());

    let (ca, token) = (desk.path("ca"), desk.path("read"));
    let line = ["get", "lb", "-p", &port, "--protocol", "https", "--cacert", &ca, "--token-file", &token];
    let said = run(&line, &[]).await;
    assert!(said.code == 3 && said.err.contains("--cert FILE --key FILE"), "{}", said.err);
    let (cert, key) = (desk.path("client.cert"), desk.path("client.key"));
    let said = run(&[&line[..], &["--cert", &cert, "--key", &key]].concat(), &[]).await;
    assert_eq!(said.code, 0, "{}", said.err);
    let said = run(&line, &[("KVLB_CERT", &cert), ("KVLB_KEY", &key)]).await;
    assert_eq!(said.code, 0, "{}", said.err);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn the_command_line_says_what_to_do_about_every_refusal() {
    let desk = Desk::new();
    let other = Desk::new();
    desk.put_with_mode("open", ADMIN, 0o644);
    desk.put("wrong", WRONG);
    let kvlb = start(&[desk.tokens(), desk.tls()]).await;
    let plain = start(&[desk.tokens()]).await;
    let port = kvlb.api_address().port().to_string();
    let plain_port = plain.api_address().port().to_string();
    let (ca, admin, read) = (desk.path("ca"), desk.path("admin"), desk.path("read"));
    let (wrong, open, other_ca) = (desk.path("wrong"), desk.path("open"), other.path("ca"));
    let https = ["-p", &port, "--protocol", "https"];
    let trusted = ["-p", &port, "--protocol", "https", "--cacert", &ca];
    let at_plain = ["-p", &plain_port];
    let delete = ["delete", "lb", "--all"];
    let get = ["get", "lb"];
    for (line, code, part) in [
        ([&get[..], &trusted, &["--token-file", &read]].concat(), 0, ""),
        ([&delete[..], &trusted, &["--token-file", &admin]].concat(), 0, ""),
        ([&get[..], &trusted, &["--token", READ, "--bearer"]].concat(), 0, ""),
        ([&get[..], &https, &["-k", "--token-file", &read]].concat(), 0, ""),
        ([&get[..], &at_plain, &["--token-file", &read]].concat(), 0, ""),
        ([&["preflight", "1"], &trusted[..], &["--token-file", &read]].concat(), 4, "no rule"),
        ([&get[..], &trusted].concat(), 3, "--token-file FILE (KVLB_TOKEN_FILE)"),
        ([&get[..], &trusted, &["--token-file", &wrong]].concat(), 3, "that `kvlb up` was given"),
        ([&delete[..], &trusted, &["--token-file", &read]].concat(), 3, "needs the administrator's"),
        ([&get[..], &trusted, &["--token-file", &open]].concat(), 2, "chmod 600"),
        ([&get[..], &trusted, &["--token-file", "/none"]].concat(), 2, "/none cannot be read"),
        ([&get[..], &trusted, &["--token-file", &read, "--token", READ]].concat(), 2, "contradict each other"),
        ([&get[..], &https, &["--token-file", &read]].concat(), 3, "--cacert FILE names who signed"),
        ([&get[..], &https, &["--cacert", &other_ca, "--token-file", &read]].concat(), 3, "--cacert FILE names"),
        ([&get[..], &https, &["--cacert", "/none"]].concat(), 2, "/none cannot be read"),
        ([&get[..], &trusted, &["-s", "localhost", "--token-file", &read]].concat(), 3, "a name or address that"),
        ([&get[..], &["-p", &port, "--token-file", &read]].concat(), 2, "--protocol https (KVLB_PROTOCOL)"),
        ([&get[..], &["-p", &plain_port, "--protocol", "https", "-k"]].concat(), 3, "leave out --protocol https"),
        ([&get[..], &at_plain, &["--cacert", &ca]].concat(), 2, "--cacert needs --protocol https"),
        (vec!["up", "--token-file", &read], 2, "belong to client commands"),
        (vec!["up", "-k"], 2, "belong to client commands"),
    ] {
        let said = run(&line, &[]).await;
        assert!(said.code == code && said.err.contains(part), "{line:?}: {} {} {}", said.code, said.out, said.err);
        for token in [ADMIN, READ, WRONG] {
            assert!(!said.err.contains(token) && !said.out.contains(token), "{line:?} shows a token");
        }
    }
    let env =
        [("KVLB_APIPORT", &*port), ("KVLB_PROTOCOL", "https"), ("KVLB_CACERT", &*ca), ("KVLB_TOKEN_FILE", &*read)];
    assert_eq!(run(&get, &env).await.code, 0);
    let by_value = [("KVLB_APIPORT", &*plain_port), ("KVLB_TOKEN", READ)];
    assert_eq!(run(&["get", "metrics"], &by_value).await.code, 0);
    // As from a password store.
    let through_a_pipe =
        format!("{} get lb -p {plain_port} --token-file <(cat {read})", binary("kvlb").unwrap().display());
    let bash = Command::new("bash").args(["-c", &through_a_pipe]).output().unwrap();
    assert!(bash.status.success(), "{}", String::from_utf8_lossy(&bash.stderr));
    kvlb.stop().await.unwrap();
    plain.stop().await.unwrap();
}

#[tokio::test]
async fn a_certificate_that_is_not_valid_now_is_not_trusted() {
    for (year, part) in [(2020, "has expired"), (2150, "not valid yet")] {
        let desk = Desk::new();
        desk.sign("server", |params| {
            params.not_before = date_time_ymd(year, 1, 1);
            params.not_after = date_time_ymd(year + 1, 1, 1);
        });
        let kvlb = start(&[desk.tokens(), desk.tls()]).await;
        let port = kvlb.api_address().port().to_string();
        let (ca, read) = (desk.path("ca"), desk.path("read"));
        let line = ["get", "lb", "-p", &port, "--protocol", "https", "--token-file", &read];
        let said = run(&[&line[..], &["--cacert", &ca]].concat(), &[]).await;
        assert!(said.code == 3 && said.err.contains(part), "{}: {}", said.code, said.err);
        assert_eq!(run(&[&line[..], &["-k"]].concat(), &[]).await.code, 0);
        kvlb.stop().await.unwrap();
    }
}

#[tokio::test]
async fn a_certificate_that_signs_itself_is_its_own_authority_unless_it_is_marked_as_one() {
    for (is_ca, code) in [(IsCa::ExplicitNoCa, 0), (IsCa::Ca(BasicConstraints::Unconstrained), 3)] {
        let desk = Desk::new();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        params.is_ca = is_ca;
        let cert = desk.put("server.cert", &params.self_signed(&key).unwrap().pem());
        desk.put("server.key", &key.serialize_pem());
        let kvlb = start(&[desk.tokens(), desk.tls()]).await;
        let port = kvlb.api_address().port().to_string();
        let line = ["get", "lb", "-p", &port, "--protocol", "https", "--cacert", &cert, "--token", READ];
        let said = run(&line, &[]).await;
        assert_eq!(said.code, code, "{}", said.err);
        assert!(code == 0 || said.err.contains("basicConstraints=critical,CA:FALSE"), "{}", said.err);
        kvlb.stop().await.unwrap();
    }
}

#[tokio::test]
async fn rules_of_the_command_line_need_no_token() {
    let desk = Desk::new();
    let (vip, engine) = (free_port().unwrap(), free_port().unwrap());
    let listen = format!("127.0.0.1:{vip}");
    let endpoint = format!("http://127.0.0.1:{engine}");
    let kvlb = start(&[desk.tokens(), words(&["--listen", &listen, "--endpoint", &endpoint])]).await;
    let rules = ask(&kvlb, Some(READ), "GET", &format!("{LB}/all")).await.body.json();
    assert_eq!(rules["lbAttr"][0]["serviceArguments"]["port"], json!(vip), "{rules}");
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn without_any_of_it_the_api_on_loopback_is_as_it_was() {
    let kvlb = start(&[]).await;
    for row in table() {
        let status = status_of(&kvlb, None, row.method.as_str(), &filled(&row)).await;
        assert!(![401, 403].contains(&status), "{} {}", row.method, row.path);
    }
    // A token that nobody asks for hurts nobody.
    assert_eq!(status_of(&kvlb, Some(WRONG), "GET", "/metrics").await, 200);
    assert!(Path::new(&format!("/proc/{}", kvlb.id())).exists());
    kvlb.stop().await.unwrap();
}

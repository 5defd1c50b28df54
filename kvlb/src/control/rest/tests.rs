//! The API over a real socket.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use reqwest::{Client, Method};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::*;
use crate::contract::BlockHash;
use crate::control::live::{CandidateView, EndpointView, Explanation, Inventory, KvView, PromptView, Request};
use crate::control::wire::DOCUMENT_BODY;
use crate::fleet::{Rule, RuleId};
use crate::telemetry::Metrics;

/// Live data that is always the same.
struct Fixed;

impl Live for Fixed {
    fn endpoint(&self, rule: RuleId, position: usize) -> Option<EndpointView> {
        let kv = (position == 0).then(|| KvView {
            contract: "mismatch".to_owned(),
            leg: Some("block_size".to_owned()),
            keying: "parity".to_owned(),
            blocks: 3,
            ..KvView::default()
        });
        (rule.0 < 100).then_some(EndpointView { state: "active", requests: 7, bytes: 9, load: 1, kv, telemetry: None })
    }

    fn inventory(&self, _: RuleId, position: usize) -> Option<Inventory> {
        let names = vec![BlockHash(u64::MAX), BlockHash(2)];
        (position == 0)
            .then_some(Inventory { blocks: names.into_iter().map(|name| (name, None)).collect(), keying: "parity" })
    }

    fn explain(&self, _: RuleId, request: &Request<'_>) -> Option<Explanation> {
        Some(Explanation {
            tier: format!("{} {:?} {}", request.path, request.model, request.body.len()),
            endpoint: Some(1),
            prompts: vec![PromptView { tokens: 33, blocks: 2, ..PromptView::default() }],
            candidates: vec![CandidateView {
                ep_idx: 1,
                depth: 2,
                count: 2,
                eligible: true,
                ..CandidateView::default()
            }],
            ..Explanation::default()
        })
    }

    fn notes(&self, rule: RuleId) -> Vec<String> {
        if rule.0 == 2 { vec!["stage a tokenizer".to_owned()] } else { Vec::new() }
    }

    fn contradictions(&self, rule: RuleId) -> Vec<String> {
        if rule.0 == 2 { vec!["block_size".to_owned()] } else { Vec::new() }
    }

    fn preflight(&self, _: RuleId) -> Option<crate::discover::Report> {
        Some(crate::discover::Report { verdict: crate::discover::Verdict::Ok, endpoints: vec![], pool: vec![] })
    }

    fn metrics(&self) -> String {
        "kvlb_up 1\n".to_owned()
    }

    fn degraded(&self) -> Vec<(String, String)> {
        vec![("kernel".to_owned(), "no permission".to_owned())]
    }
}

struct Server {
    http: Client,
    address: SocketAddr,
    api: Arc<Api>,
}

impl Server {
    async fn starting() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let about = About {
            datapath: "none".to_owned(),
            datapath_detail: String::new(),
            io: "epoll".to_owned(),
            threads: 2,
            api: address,
            tls: false,
            tokens: "none",
            state_dir: None,
            takeover: None,
        };
        let api = Api::new(Arc::new(Fixed), about);
        let guard = Arc::new(Guard::new(None, false, Arc::new(Metrics::new().unwrap())));
        tokio::spawn(serve(listener, Arc::clone(&api), guard, None, std::future::pending()));
        Self { http: tls::plain_client().build().unwrap(), address, api }
    }

    async fn ready(dir: Option<&Path>) -> Self {
        let server = Self::starting().await;
        server.api.ready(Arc::new(Store::open(dir, |_: Vec<Arc<Rule>>| {}).unwrap()));
        server
    }

    async fn ask(&self, method: Method, path: &str, body: Option<String>) -> (u16, Value) {
        let request = self.http.request(method, format!("http://{}{path}", self.address));
        let request = match body {
            Some(body) => request.header("content-type", "application/json").body(body),
            None => request,
        };
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        let text = answer.text().await.unwrap();
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.ask(Method::GET, &format!("/netlox/v1{path}"), None).await
    }

    async fn delete(&self, path: &str) -> (u16, Value) {
        self.ask(Method::DELETE, &format!("/netlox/v1{path}"), None).await
    }

    async fn post(&self, path: &str, body: impl ToString) -> (u16, Value) {
        self.ask(Method::POST, &format!("/netlox/v1{path}"), Some(body.to_string())).await
    }

    async fn create(&self, service: Value) -> (u16, Value) {
        let mut all = json!({"externalIP": "127.0.0.9", "port": 8080, "mode": 4});
        if let (Value::Object(all), Value::Object(service)) = (&mut all, service) {
            all.extend(service);
        }
        let endpoints = json!([{"endpointIP": "192.0.2.1", "targetPort": 8000}]);
        self.post("/config/loadbalancer", json!({"serviceArguments": all, "endpoints": endpoints})).await
    }
}

fn code(answer: &(u16, Value)) -> (u16, &str) {
    (answer.0, answer.1["error"].as_str().unwrap_or("none"))
}

#[tokio::test]
async fn the_documents_rule_is_created_shown_and_deleted() {
    let server = Server::ready(None).await;
    let created = server.post("/config/loadbalancer", DOCUMENT_BODY).await;
    assert_eq!(created, (200, json!({"result": "Success", "id": 1, "change": "created"})));
    assert_eq!(server.post("/config/loadbalancer", DOCUMENT_BODY).await.1["change"], "unchanged");

    let (status, all) = server.get("/config/loadbalancer/all").await;
    let sent: Value = serde_json::from_str(DOCUMENT_BODY).unwrap();
    let rule = &all["lbAttr"][0];
    assert_eq!((status, &rule["id"], &rule["serviceArguments"]), (200, &json!(1), &sent["serviceArguments"]));
    assert_eq!(rule["notes"], Value::Null);
    let endpoint = &rule["endpoints"][0];
    for (name, value) in sent["endpoints"][0].as_object().unwrap() {
        assert_eq!(&endpoint[name], value);
    }
    assert_eq!(
        (&endpoint["state"], &endpoint["counter"], &endpoint["ep_idx"]),
        (&json!("active"), &json!("7:9"), &json!(0))
    );
    let kv = json!({"contract": "mismatch", "leg": "block_size", "detail": null, "keying": "parity", "blocks": 3,
        "connected": false, "replay": "", "sequence": null, "lastEventAgeMs": null, "ranks": 0, "orphans": 0, "gaps": 0,
        "restarts": 0});
    assert_eq!(endpoint["kvStatus"], kv);
    assert_eq!(rule["endpoints"][1].get("kvStatus"), None);

    // What was shown can be sent back as it is.
    let (status, answer) = server.post("/config/loadbalancer", rule).await;
    assert_eq!((status, &answer["change"]), (200, &json!("unchanged")));

    let path = "/config/loadbalancer/externalipaddress/10.10.10.254/port/8080/protocol/tcp";
    assert_eq!(server.get(path).await.1, all);
    assert_eq!(server.delete(path).await, (200, json!({"result": "Success", "ids": [1]})));
    assert_eq!(code(&server.delete(path).await), (404, "rule_not_found"));
    assert_eq!(code(&server.get(path).await), (404, "rule_not_found"));
    assert_eq!(server.get("/config/loadbalancer/all").await, (200, json!({"lbAttr": []})));
}

#[tokio::test]
async fn rules_are_found_by_every_form_of_their_address() {
    let server = Server::ready(None).await;
    server.create(json!({"externalIP": "2001:db8::1", "name": "six"})).await;
    server.create(json!({"model_name": "a/b", "name": "m"})).await;
    assert_eq!(server.get("/config/loadbalancer/id/2").await.1["lbAttr"][0]["notes"], json!(["stage a tokenizer"]));
    server.create(json!({"host": "h.example", "portMax": 8090, "port": 8081})).await;
    let lb = "/config/loadbalancer";
    for (path, id) in [
        (format!("{lb}/externalipaddress/2001:db8::1/port/8080/protocol/tcp"), 1),
        (format!("{lb}/externalipaddress/[2001:DB8::1]/port/8080/protocol/TCP"), 1),
        (format!("{lb}/externalipaddress/%5B2001:db8::1%5D/port/8080/protocol/tcp"), 1),
        (format!("{lb}/name/six"), 1),
        (format!("{lb}/id/1"), 1),
        (format!("{lb}/externalipaddress/127.0.0.9/port/8080/protocol/tcp?model_name=a%2Fb"), 2),
        (format!("{lb}/hosturl/any/externalipaddress/127.0.0.9/port/8080/protocol/tcp?bgp=false&block=0"), 2),
        (format!("{lb}/hosturl/any/externalipaddress/127.0.0.9/port/8080/portmax/8080/protocol/tcp"), 2),
        (format!("{lb}/hosturl/any/externalipaddress/127.0.0.9/port/8080/portmax/0/protocol/tcp"), 2),
        (format!("{lb}/hosturl/H.example/externalipaddress/127.0.0.9/port/8081/portmax/8090/protocol/tcp"), 3),
        (format!("{lb}/externalipaddress/127.0.0.9/port/8081/portmax/8090/protocol/tcp"), 3),
        (format!("{lb}/externalipaddress/127.0.0.9/port/8081/protocol/tcp"), 3),
    ] {
        let (status, answer) = server.get(&path).await;
        assert_eq!((status, &answer["lbAttr"][0]["id"]), (200, &json!(id)), "{path}: {answer}");
        assert_eq!(answer["lbAttr"].as_array().map(Vec::len), Some(1));
    }
    for (path, expected) in [
        (
            format!("{lb}/hosturl/any/externalipaddress/127.0.0.9/port/8081/portmax/8090/protocol/tcp"),
            (404, "rule_not_found"),
        ),
        (format!("{lb}/externalipaddress/127.0.0.9/port/8081/portmax/8089/protocol/tcp"), (404, "rule_not_found")),
        (format!("{lb}/externalipaddress/nowhere/port/8081/protocol/tcp"), (400, "bad_value")),
        (format!("{lb}/externalipaddress/127.0.0.9/port/x/protocol/tcp"), (400, "bad_value")),
        (format!("{lb}/externalipaddress/127.0.0.9/port/70000/protocol/tcp"), (400, "bad_value")),
        (format!("{lb}/externalipaddress/127.0.0.9/port/8081/protocol/udp"), (400, "not_supported")),
        (format!("{lb}/externalipaddress/127.0.0.9/port/8080/protocol/tcp?model=a"), (400, "unknown_field")),
        (format!("{lb}/id/x"), (400, "bad_value")),
        (format!("{lb}/id/99"), (404, "rule_not_found")),
        (format!("{lb}/name/nobody"), (404, "rule_not_found")),
        (format!("{lb}/name/%ff"), (400, "bad_value")),
        ("/config/endpoint/epipaddress/%ff".to_owned(), (400, "bad_value")),
    ] {
        assert_eq!(code(&server.delete(&path).await), expected, "{path}");
    }
    assert_eq!(server.get("/config/loadbalancer/all").await.1["lbAttr"].as_array().map(Vec::len), Some(3));
    assert_eq!(server.delete("/config/loadbalancer/all").await.1["ids"], json!([1, 2, 3]));
}

#[tokio::test]
async fn mistakes_have_honest_statuses_and_json_bodies() {
    let server = Server::ready(None).await;
    let bad = server.post("/config/loadbalancer", "{\"serviceArguments\":").await;
    assert_eq!(code(&bad), (400, "not_json"));
    assert_eq!((&bad.1["code"], &bad.1["result"]), (&json!(400), &json!("Error")));
    assert_eq!(code(&server.post("/config/loadbalancer", "").await), (400, "not_json"));
    let typo = server.create(json!({"kvexactmode": 3})).await;
    assert_eq!(typo.1["message"], "unknown field \"kvexactmode\"; did you mean \"kvExactMode\"?");
    assert_eq!(code(&server.create(json!({"mode": 0})).await), (400, "mode_not_served"));
    server.create(json!({})).await;
    server.create(json!({"model_name": "a"})).await;
    assert_eq!(code(&server.create(json!({"kvEngineType": "llamacpp"})).await), (409, "immutable"));
    let path = "/config/loadbalancer/externalipaddress/127.0.0.9/port/8080/protocol/tcp";
    assert_eq!(code(&server.delete(path).await), (409, "several_rules"));

    assert_eq!(code(&server.get("/config/nothing").await), (404, "path_not_found"));
    assert_eq!(code(&server.ask(Method::GET, "/", None).await), (404, "path_not_found"));
    for (method, path) in [
        (Method::GET, "/netlox/v1/config/loadbalancer"),
        (Method::PUT, "/netlox/v1/config/loadbalancer/all"),
        (Method::POST, "/netlox/v1/config/ai/kv/inventory"),
        (Method::DELETE, "/netlox/v1/version"),
    ] {
        let answer = server.ask(method.clone(), path, None).await;
        assert_eq!(code(&answer), (405, "method_not_allowed"), "{method} {path}");
    }
    let url = format!("http://{}/netlox/v1/config/loadbalancer/all", server.address);
    let answer = server.http.put(&url).send().await.unwrap();
    let allowed = answer.headers().get("allow").and_then(|allow| allow.to_str().ok()).unwrap_or_default();
    assert!(allowed.contains("GET") && allowed.contains("DELETE"), "{allowed:?}");
    assert_eq!(server.http.head(&url).send().await.unwrap().status(), 200);
    let too_large = format!("{{\"serviceArguments\":{{\"name\":\"{}\"}}}}", "n".repeat(BODY_MAX));
    assert_eq!(code(&server.post("/config/loadbalancer", too_large).await), (413, "too_large"));
    let url = format!("http://{}/netlox/v1/config/loadbalancer", server.address);
    for (media, status) in
        [("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("Application/JSON; charset=utf-8", 200)]
    {
        let answer = server.http.post(&url).header("content-type", media).body(DOCUMENT_BODY).send().await.unwrap();
        assert_eq!(answer.status(), status, "{media}");
    }
}

#[tokio::test]
async fn until_the_rules_are_loaded_nothing_that_concerns_them_is_answered() {
    let server = Server::starting().await;
    let url = format!("http://{}/netlox/v1/config/loadbalancer", server.address);
    let answer = server.http.post(&url).body(DOCUMENT_BODY).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.headers()["retry-after"].to_str().unwrap()), (503, "5"));
    for path in [
        "/config/loadbalancer/all",
        "/config/endpoint/all",
        "/config/ai/kv/status",
        "/config/ai/kv/inventory?service_id=1&ep_idx=0",
    ] {
        assert_eq!(code(&server.get(path).await), (503, "starting"), "{path}");
    }
    assert_eq!(server.get("/status").await.1["ready"], false);
    assert_eq!(server.get("/metrics").await, (200, json!("kvlb_up 1\n")));
    server.api.ready(Arc::new(Store::open(None, |_: Vec<Arc<Rule>>| {}).unwrap()));
    assert_eq!(server.post("/config/loadbalancer", DOCUMENT_BODY).await.0, 200);
}

#[tokio::test]
async fn what_engines_contradict_is_in_the_answer_to_a_change_alone() {
    let server = Server::ready(None).await;
    let created = json!({"result": "Success", "id": 1, "change": "created"});
    assert_eq!(server.create(json!({})).await, (200, created));
    let noted = |change: &str| json!({"result": "Success", "id": 2, "change": change, "notes": ["block_size"]});
    assert_eq!(server.create(json!({"port": 81})).await, (200, noted("created")));
    let unchanged = json!({"result": "Success", "id": 2, "change": "unchanged"});
    assert_eq!(server.create(json!({"port": 81})).await, (200, unchanged));
    assert_eq!(server.create(json!({"port": 81, "sel": 3})).await, (200, noted("replaced")));
}

#[tokio::test]
async fn an_endpoint_is_taken_out_and_put_back_by_its_lights() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::ready(Some(dir.path())).await;
    server.create(json!({})).await;
    let light = |state: &str| json!({"hostName": "192.0.2.1", "epPort": 8000, "epProto": "tcp", "state": state});
    let admin =
        || async { server.get("/config/loadbalancer/all").await.1["lbAttr"][0]["endpoints"][0]["adminState"].clone() };
    let answer = server.post("/config/endpointhoststate", light("red")).await;
    assert_eq!(answer, (200, json!({"result": "Success", "change": "changed", "ids": [1]})));
    assert_eq!(admin().await, "down");
    server.post("/config/endpointhoststate", light("yellow")).await;
    assert_eq!(admin().await, "drain");
    server.post("/config/endpointhoststate", light("green")).await;
    assert_eq!(admin().await, Value::Null);
    let nobody = json!({"hostName": "192.0.2.9", "state": "red"});
    assert_eq!(code(&server.post("/config/endpointhoststate", nobody).await), (404, "endpoint_not_found"));
    assert_eq!(code(&server.post("/config/endpointhoststate", light("pink")).await), (400, "bad_value"));
}

#[tokio::test]
async fn an_endpoint_may_have_a_probe_of_its_own() {
    let server = Server::ready(None).await;
    server.create(json!({})).await;
    let probe = || async { server.get("/config/endpoint/all").await.1["Attr"][0].clone() };
    let before = probe().await;
    assert_eq!((&before["name"], &before["currState"]), (&json!("192.0.2.1_tcp_8000"), &json!("ok")));
    assert_eq!((&before["probeDuration"], &before["inactiveReTries"]), (&json!(10), &json!(2)));
    assert_eq!(before["role"], "normal");
    let body = json!({"hostName": "192.0.2.1", "probeType": "http", "probeReq": "health", "probePort": 9000});
    assert_eq!(server.post("/config/endpoint", body).await.0, 200);
    let own = probe().await;
    assert_eq!((&own["name"], &own["probeReq"]), (&json!("192.0.2.1_http_9000"), &json!("/health")));
    assert_eq!(own["probeDuration"], 60);
    let bad = json!({"hostName": "192.0.2.1", "probeType": "ping"});
    assert_eq!(code(&server.post("/config/endpoint", bad).await), (400, "not_supported"));
    let nobody = json!({"hostName": "192.0.2.9"});
    assert_eq!(code(&server.post("/config/endpoint", nobody).await), (404, "endpoint_not_found"));
    assert_eq!(server.delete("/config/endpoint/epipaddress/192.0.2.1?probe_type=http").await.0, 200);
    assert_eq!(probe().await, before);
}

#[tokio::test]
async fn the_kv_paths_answer_in_the_documents_shape() {
    let server = Server::ready(None).await;
    server.create(json!({"kvExactMode": 3})).await;
    let (status, inventory) = server.get("/config/ai/kv/inventory?service_id=1&ep_idx=0").await;
    assert_eq!(status, 200);
    assert_eq!(
        inventory,
        json!({"service_id": 1, "ep_idx": 0, "hash_algo": "sha256_cbor", "keying": "parity", "total": 2, "blocks": [
            {"block_idx": 0, "hash_uint64": u64::MAX, "hash_hex": "ffffffffffffffff"},
            {"block_idx": 1, "hash_uint64": 2, "hash_hex": "0000000000000002"}]})
    );
    let (_, page) = server.get("/config/ai/kv/inventory?service_id=1&ep_idx=0&offset=1&limit=1").await;
    assert_eq!((&page["total"], &page["blocks"][0]["block_idx"]), (&json!(2), &json!(1)));
    for (query, expected) in [
        ("", (400, "missing_field")),
        ("service_id=1", (400, "missing_field")),
        ("service_id=x&ep_idx=0", (400, "bad_value")),
        ("service_id=1&ep_idx=-1", (400, "bad_value")),
        ("service_id=9&ep_idx=0", (404, "rule_not_found")),
        ("service_id=1&ep_idx=1", (404, "endpoint_not_found")),
        ("service=1&ep_idx=1", (400, "unknown_field")),
    ] {
        let answer = server.get(&format!("/config/ai/kv/inventory?{query}")).await;
        assert_eq!(code(&answer), expected, "{query}");
    }
    let (_, one) = server.get("/config/ai/kv/status?service_id=1").await;
    assert_eq!((&one["service_id"], &one["kvExactMode"]), (&json!(1), &json!(3)));
    assert_eq!(one["endpoints"][0]["kvStatus"]["leg"], "block_size");
    assert_eq!(server.get("/config/ai/kv/status").await.1, json!({"services": [one]}));

    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let (status, explained) = server.post("/config/ai/kv/explain?service_id=1", &chat).await;
    let tier = format!("/v1/chat/completions None {}", chat.to_string().len());
    assert_eq!((status, &explained["tier"], &explained["endpoint"]), (200, &json!(tier), &json!(1)));
    assert_eq!(
        explained["candidates"],
        json!([{"ep_idx": 1, "depth": 2, "count": 2, "load": 0, "role": "", "eligible": true, "keying": null, "rank": null}])
    );
    assert_eq!(code(&server.post("/config/ai/kv/explain?service_id=2", &chat).await), (404, "rule_not_found"));
    assert_eq!(code(&server.get("/config/ai/kv/preflight?service_id=99").await), (404, "rule_not_found"));
    assert_eq!(code(&server.get("/config/ai/kv/preflight").await), (400, "missing_field"));
    let (status, report) = server.get("/config/ai/kv/preflight?service_id=1").await;
    assert_eq!((status, report), (200, json!({"verdict": "ok", "endpoints": [], "pool": [], "service_id": 1})));
}

#[tokio::test]
async fn version_status_and_metrics_are_served() {
    let server = Server::ready(None).await;
    assert_eq!(server.get("/version").await.1["version"], env!("CARGO_PKG_VERSION"));
    let (_, status) = server.get("/status").await;
    assert_eq!((&status["ready"], &status["io"], &status["threads"]), (&json!(true), &json!("epoll"), &json!(2)));
    assert_eq!((&status["datapath"]["mode"], &status["api"]), (&json!("none"), &json!(server.address.to_string())));
    assert_eq!(status["degraded"], json!([{"what": "kernel", "why": "no permission"}]));
    for path in ["/metrics", "/netlox/v1/metrics"] {
        let answer = server.http.get(format!("http://{}{path}", server.address)).send().await.unwrap();
        assert!(answer.headers()["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
        assert_eq!(answer.text().await.unwrap(), "kvlb_up 1\n");
    }
    assert_eq!(server.get("/config/metrics").await, (200, json!({"prometheus": true})));
}

#[tokio::test]
async fn many_changes_at_once_each_get_a_number_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let server = Arc::new(Server::ready(Some(dir.path())).await);
    let mut tasks = tokio::task::JoinSet::new();
    for port in 1..=40 {
        let server = Arc::clone(&server);
        tasks.spawn(async move { server.create(json!({"port": port})).await.1["id"].as_u64() });
    }
    let mut ids: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    ids.sort_unstable();
    assert_eq!(ids, (1..=40).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_handler_that_nobody_guards_does_not_run() {
    let server = Server::ready(None).await;
    let router = paths().router.with_state(Arc::clone(&server.api));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    for path in ["/metrics", "/netlox/v1/status"] {
        let answer = server.http.get(format!("http://{address}{path}")).send().await.unwrap();
        assert_eq!(answer.status(), 401, "{path}");
    }
}

#[tokio::test]
async fn an_unread_body_of_somebody_turned_away_does_not_hold_up_the_answer() {
    let tokens = Tokens { admin: crate::secret::Digest::of(b"t"), read: None };
    let guard = Arc::new(Guard::new(Some(tokens), false, Arc::new(Metrics::new().unwrap())));
    let server = Server::starting().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, Arc::clone(&server.api), guard, None, std::future::pending()));
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = "POST /netlox/v1/config/loadbalancer HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n{";
    tokio::io::AsyncWriteExt::write_all(&mut client, head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    let read = tokio::io::AsyncReadExt::read_exact(&mut client, &mut answer);
    tokio::time::timeout(std::time::Duration::from_secs(30), read).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 401");
}

//! Bad rules over REST and CLI: a clear error with a stable code, and nothing of them in force.

use std::process::Command;

use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::{Answer, Client, request};
use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig, binary};
use serde_json::{Value, json};

use super::stage::{Place, SOON, Stage, completion};

const LB: &str = "/netlox/v1/config/loadbalancer";
const JSON: &str = "application/json";

/// A daemon without engines: a rule needs none to be refused.
async fn daemon(place: &Place) -> Kvlb {
    let api = place.at(1, 11_111).to_string();
    Kvlb::start(KvlbConfig::with(&["--api", &api, "--datapath", "none", "--threads", "1"])).await.unwrap()
}

async fn send(kvlb: &Kvlb, method: &str, path: &str, media: &str, body: &[u8]) -> Answer {
    let mut client = Client::connect(kvlb.api_address()).await.unwrap();
    let fields: &[_] = if media.is_empty() { &[] } else { &[("Content-Type", media)] };
    // A body that is too large may be refused before all is sent.
    client.send(&request(method, path, "api", fields, body)).await.ok();
    client.answer().await.unwrap_or_else(|error| panic!("{method} {path:.200}: {error:#}"))
}

/// What operators wrote; how endpoints fare is left out.
async fn rules(kvlb: &Kvlb) -> Value {
    let (status, rules) = kvlb.api("GET", &format!("{LB}/all"), None).await.unwrap();
    assert_eq!(status, 200);
    let place = |endpoint: &Value| json!([endpoint["endpointIP"], endpoint["targetPort"], endpoint["adminState"]]);
    let places = |rule: &Value| rule["endpoints"].as_array().unwrap().iter().map(place).collect::<Vec<_>>();
    let written = |rule: &Value| json!({"id": rule["id"], "rule": rule["serviceArguments"], "endpoints": places(rule)});
    rules["lbAttr"].as_array().unwrap().iter().map(written).collect()
}

/// The answer is an error in the API's shape with this code, and the rules are as they were.
async fn assert_refused(kvlb: &Kvlb, name: &str, answer: &Answer, expected: (u16, &str), before: &Value) {
    let (status, body) = (answer.head.status, answer.body.json());
    let told = (status, body["error"].as_str().unwrap_or("no code"));
    assert_eq!(told, expected, "{name}: {:.300}", answer.body.text());
    assert_eq!((&body["code"], &body["result"]), (&json!(status), &json!("Error")), "{name}");
    let message = body["message"].as_str().unwrap();
    assert!(!message.is_empty() && message.len() < 2000, "{name}: {} bytes: {message:.300}", message.len());
    assert!(!message.chars().any(char::is_control), "{name}: {message:?}");
    assert_eq!(&rules(kvlb).await, before, "{name}: nothing is half applied");
}

/// Changes of a good rule that make it a bad one.
fn bad_fields() -> Vec<(Value, (u16, &'static str))> {
    let bad = |code| (400, code);
    vec![
        (json!({"kvexactmode": 3}), bad("unknown_field")),
        (json!({"KVBLOCKSIZE": 16}), bad("unknown_field")),
        (json!({"": 1}), bad("unknown_field")),
        (json!({"\u{1b}[31m\u{0}": 1}), bad("unknown_field")),
        (json!({"x".repeat(100_000): 1}), bad("unknown_field")),
        (json!({"kvBlockSize": 0}), bad("out_of_range")),
        (json!({"kvBlockSize": -1}), bad("out_of_range")),
        (json!({"kvBlockSize": 4_294_967_296_u64}), bad("out_of_range")),
        (json!({"kvBlockSize": 16.5}), bad("wrong_type")),
        (json!({"kvBlockSize": "16"}), bad("wrong_type")),
        (json!({"kvBlockSize": [16]}), bad("wrong_type")),
        (json!({"kvExactMode": 2}), bad("kv_mode_reserved")),
        (json!({"kvExactMode": 4}), bad("out_of_range")),
        (json!({"kvExactMode": 18_446_744_073_709_551_615_u64}), bad("out_of_range")),
        (json!({"kvExactMode": 1}), bad("roles_missing")),
        (json!({"kvHashAlgo": "md5"}), bad("bad_value")),
        (json!({"kvHashAlgo": "Sha256_CBOR\u{7}"}), bad("bad_value")),
        (json!({"kvHashAlgo": true}), bad("wrong_type")),
        (json!({"kvEngineType": "sglang"}), bad("engine_not_supported_yet")),
        (json!({"kvEngineType": "llamacpp"}), bad("llamacpp_kv")),
        (json!({"kvZmqPort": 0}), bad("out_of_range")),
        (json!({"kvZmqPort": 65_536}), bad("out_of_range")),
        (json!({"port": 0}), bad("out_of_range")),
        (json!({"port": 65_536}), bad("out_of_range")),
        (json!({"port": -80}), bad("out_of_range")),
        (json!({"port": 1e300}), bad("wrong_type")),
        (json!({"port": null}), bad("missing_field")),
        (json!({"port": 1, "portMax": 65_535}), (409, "too_many")),
        (json!({"port": 1, "portMax": 4_097}), (409, "too_many")),
        (json!({"port": 90, "portMax": 80}), bad("out_of_range")),
        (json!({"externalIP": ""}), bad("bad_value")),
        (json!({"externalIP": null}), bad("missing_field")),
        (json!({"externalIP": "300.1.1.1"}), bad("bad_value")),
        (json!({"externalIP": "127.1"}), bad("bad_value")),
        (json!({"externalIP": "0x7f.0.0.1"}), bad("bad_value")),
        (json!({"externalIP": "fe80::1%lo"}), bad("bad_value")),
        (json!({"externalIP": "::1::2"}), bad("bad_value")),
        (json!({"externalIP": "127.0.0.1\u{0}"}), bad("bad_value")),
        (json!({"externalIP": "224.0.0.1"}), bad("bad_value")),
        (json!({"externalIP": 2_130_706_433}), bad("wrong_type")),
        (json!({"protocol": "udp"}), bad("not_supported")),
        (json!({"protocol": "tpc"}), bad("bad_value")),
        (json!({"mode": 0}), bad("kv_needs_fullproxy")),
        (json!({"mode": 0, "kvExactMode": 0}), bad("mode_not_served")),
        (json!({"mode": 99, "kvExactMode": 0}), bad("out_of_range")),
        (json!({"sel": 5}), bad("not_supported")),
        (json!({"sel": 99}), bad("out_of_range")),
        (json!({"oper": 3}), bad("out_of_range")),
        (json!({"oper": 1, "port": 9999}), (404, "rule_not_found")),
        (json!({"model_name": "a\u{0}b"}), bad("bad_value")),
        (json!({"model_name": "m".repeat(100_000)}), bad("bad_value")),
        (json!({"host": "a b"}), bad("bad_value")),
        (json!({"host": "h".repeat(100_000)}), bad("bad_value")),
        (json!({"path_prefix": "v1"}), bad("bad_value")),
        (json!({"path_prefix": "/é"}), bad("bad_value")),
        (json!({"path_match_mode": "exact", "path_prefix": "/v1"}), bad("not_supported_yet")),
        (json!({"name": "n".repeat(100_000)}), bad("bad_value")),
        (json!({"monitor": "true"}), bad("wrong_type")),
        (json!({"probetype": "ping"}), bad("not_supported")),
        (json!({"probereq": "/\r\nX: 1", "probetype": "http"}), bad("bad_value")),
        (json!({"maxInspectBytes": 1_u64 << 40}), bad("out_of_range")),
        (json!({"security": 1}), bad("not_supported_yet")),
        (json!({"inactiveTimeOut": 1, "timeoutMemberData": 5}), bad("contradiction")),
        (json!({"clientHalfClose": "maybe"}), bad("bad_value")),
    ]
}

fn bad_endpoints() -> Vec<(Value, &'static str)> {
    let one = |changes: Value| {
        let mut row = json!({"endpointIP": "192.0.2.1", "targetPort": 8000});
        changes.as_object().unwrap().iter().for_each(|(name, value)| row[name] = value.clone());
        json!([row])
    };
    vec![
        (json!([]), "endpoints_missing"),
        (json!({}), "wrong_type"),
        (json!([7]), "not_object"),
        (json!([null]), "not_object"),
        (one(json!({"endpointIP": ""})), "bad_value"),
        (one(json!({"endpointIP": "a b"})), "bad_value"),
        (one(json!({"endpointIP": "[::1"})), "bad_value"),
        (one(json!({"endpointIP": "x".repeat(300)})), "bad_value"),
        (one(json!({"endpointIP": "host/../../etc"})), "bad_value"),
        (one(json!({"endpointIP": "me@host"})), "bad_value"),
        (one(json!({"targetPort": 0})), "out_of_range"),
        (one(json!({"targetPort": "http"})), "wrong_type"),
        (one(json!({"weight": 256})), "out_of_range"),
        (one(json!({"weight": -1})), "out_of_range"),
        (one(json!({"ep_role": 3})), "out_of_range"),
        (one(json!({"ep_role": 1})), "roles_refused"),
        (one(json!({"adminState": "asleep"})), "bad_value"),
        (one(json!({"Weight": 1})), "unknown_field"),
        (one(json!({"probe": {"probeRetries": 1000}})), "out_of_range"),
        (
            json!([{"endpointIP": "192.0.2.1", "targetPort": 8000}, {"endpointIP": "192.0.2.1", "targetPort": 8000}]),
            "duplicate_endpoint",
        ),
        (
            json!([{"endpointIP": "2001:db8::1", "targetPort": 1}, {"endpointIP": "2001:DB8:0::1", "targetPort": 1}]),
            "duplicate_endpoint",
        ),
        (
            json!((0..129).map(|n| json!({"endpointIP": format!("192.0.2.{n}"), "targetPort": 1})).collect::<Vec<_>>()),
            "too_many",
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_rules_are_refused_by_field_and_nothing_is_half_applied() {
    let place = Place::new();
    let kvlb = daemon(&place).await;
    let (status, answer) = kvlb.api("POST", LB, Some(&place.rule(2, &json!({"port": 8079})))).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    let before = rules(&kvlb).await;
    for (changes, expected) in bad_fields() {
        let rule = place.rule(1, &changes).to_string();
        let answer = send(&kvlb, "POST", LB, JSON, rule.as_bytes()).await;
        assert_refused(&kvlb, &format!("{changes:.100}"), &answer, expected, &before).await;
    }
    for (endpoints, code) in bad_endpoints() {
        let mut rule = place.rule(1, &json!({"port": 8081}));
        rule["endpoints"] = endpoints.clone();
        let answer = send(&kvlb, "POST", LB, JSON, rule.to_string().as_bytes()).await;
        assert_refused(&kvlb, &format!("{endpoints:.100}"), &answer, (400, code), &before).await;
    }
    kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_to_the_api_get_its_own_errors() {
    let place = Place::new();
    let kvlb = daemon(&place).await;
    let good = place.rule(1, &json!({})).to_string();
    let before = rules(&kvlb).await;
    let deep = "[".repeat(100_000);
    let twice = good.replacen("\"port\"", "\"port\": 1, \"port\"", 1);
    let bodies: [(_, _, Vec<u8>, _); 15] = [
        ("no body", JSON, Vec::new(), (400, "not_json")),
        ("half a body", JSON, good.as_bytes()[..40].to_vec(), (400, "not_json")),
        ("two bodies", JSON, [good.as_bytes(), good.as_bytes()].concat(), (400, "not_json")),
        ("a list", JSON, b"[1]".to_vec(), (400, "not_object")),
        ("null", JSON, b"null".to_vec(), (400, "not_object")),
        ("a field twice", JSON, twice.into_bytes(), (400, "not_json")),
        ("no UTF-8", JSON, b"{\"\xff\": 1}".to_vec(), (400, "not_json")),
        ("1e999", JSON, b"{\"serviceArguments\": 1e999}".to_vec(), (400, "not_json")),
        ("NaN", JSON, b"{\"serviceArguments\": NaN}".to_vec(), (400, "not_json")),
        ("100,000 deep", JSON, deep.into_bytes(), (400, "not_json")),
        ("1 MB", JSON, [good.as_bytes(), &vec![b' '; 1 << 20]].concat(), (413, "too_large")),
        ("YAML", "application/yaml", b"a: 1".to_vec(), (415, "media_type")),
        ("a form", "application/x-www-form-urlencoded", good.clone().into_bytes(), (415, "media_type")),
        ("plain text", "text/plain", good.clone().into_bytes(), (415, "media_type")),
        ("an odd media type", "\u{e9};;,json", good.into_bytes(), (415, "media_type")),
    ];
    for (name, media, body, expected) in bodies {
        let answer = send(&kvlb, "POST", LB, media, &body).await;
        assert_refused(&kvlb, name, &answer, expected, &before).await;
    }
    let at = format!("{LB}/externalipaddress");
    let paths = [
        ("PUT", LB.to_owned(), (405, "method_not_allowed")),
        ("PATCH", format!("{LB}/all"), (405, "method_not_allowed")),
        ("BREW", LB.to_owned(), (405, "method_not_allowed")),
        ("GET", LB.to_uppercase(), (404, "path_not_found")),
        ("GET", format!("{LB}/"), (404, "path_not_found")),
        ("GET", format!("/{}", "x".repeat(8000)), (404, "path_not_found")),
        ("GET", format!("{LB}/../../../etc/passwd"), (404, "path_not_found")),
        ("GET", "/netlox/v1/%00%ff%0d%0a".to_owned(), (404, "path_not_found")),
        ("GET", format!("{LB}/id/1"), (404, "rule_not_found")),
        ("GET", format!("{LB}/id/-1"), (400, "bad_value")),
        ("GET", format!("{LB}/id/4294967296"), (400, "bad_value")),
        ("GET", format!("{LB}/id/%31x"), (400, "bad_value")),
        ("GET", format!("{LB}/name/%ff%fe"), (400, "bad_value")),
        ("GET", format!("{LB}/name/%00"), (404, "rule_not_found")),
        ("DELETE", format!("{LB}/name/%ff"), (400, "bad_value")),
        ("GET", format!("{at}/10.0.0.1/port/8080/protocol/udp"), (400, "not_supported")),
        ("DELETE", format!("{at}/[::1/port/8080/protocol/tcp"), (400, "bad_value")),
        ("DELETE", format!("{at}/%5B%3A%3A1%5D/port/8080/protocol/tcp"), (404, "rule_not_found")),
        ("DELETE", format!("{at}/10.0.0.1/port/8080/protocol/tcp?model=a"), (400, "unknown_field")),
        ("DELETE", format!("{at}/10.0.0.1/port/8080/protocol/tcp?model_name=%ff"), (404, "rule_not_found")),
        ("DELETE", format!("{at}/10.0.0.1/port/99999/protocol/tcp"), (400, "bad_value")),
        ("DELETE", format!("{at}/%ff/port/1/protocol/tcp"), (400, "bad_value")),
        ("DELETE", "/netlox/v1/config/endpoint/epipaddress/%ff".to_owned(), (400, "bad_value")),
        ("DELETE", "/netlox/v1/config/endpoint/epipaddress/a%20b".to_owned(), (400, "bad_value")),
        (
            "GET",
            "/netlox/v1/config/ai/kv/inventory?service_id=1&ep_idx=99999999999999999999".to_owned(),
            (404, "rule_not_found"),
        ),
        ("GET", "/netlox/v1/config/ai/kv/inventory?service_id=%ff&ep_idx=0".to_owned(), (400, "bad_value")),
        ("GET", "/netlox/v1/config/ai/kv/inventory?&&&=&".to_owned(), (400, "unknown_field")),
        ("GET", "/netlox/v1/config/ai/kv/status?service_id=0x1".to_owned(), (400, "bad_value")),
    ];
    for (method, path, expected) in paths {
        let answer = send(&kvlb, method, &path, "", b"").await;
        assert_refused(&kvlb, &format!("{method} {path:.100}"), &answer, expected, &before).await;
    }
    assert!(!kvlb.log().contains("panicked"), "{}", kvlb.log());
    kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_ports_are_bound_up_to_a_bound_that_leaves_room_for_traffic() {
    let stage = Stage::set(1, json!({"portMax": 8080 + 99})).await;
    let wide = |port: u64, last: u64| {
        let mut rule = stage.place.rule(1, &json!({"port": port, "portMax": last}));
        rule["serviceArguments"]["externalIP"] = json!(stage.place.ip(101).to_string());
        rule
    };
    // 100 ports are taken; 3996 are left.
    let (status, answer) = stage.kvlb.api("POST", LB, Some(&wide(10_001, 13_997))).await.unwrap();
    assert_eq!((status, &answer["error"]), (409, &json!("too_many")), "{answer}");
    stage.create(&wide(10_001, 10_400)).await;
    let last = stage.place.at(101, 10_400);
    let bound = async || Client::connect(last).await.is_ok();
    eventually(SOON, "the last port is bound", bound).await.unwrap();
    let before = stage.descriptors();
    let (status, _) = stage.kvlb.api("DELETE", &format!("{LB}/id/2"), None).await.unwrap();
    assert_eq!(status, 200);
    let freed = async || stage.descriptors() + 800 <= before;
    eventually(SOON, "the ports of a rule that is gone are let go", freed).await.unwrap();
    assert!(Client::connect(last).await.is_err());
    stage.close().await;
}

/// The command line's own mistakes, and those that the API finds, each with the exit code that the documentation names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_refuses_nonsense_with_its_exit_code() {
    let place = Place::new();
    let kvlb = daemon(&place).await;
    let vip = place.ip(100).to_string();
    let endpoints = format!("--endpoints={}:1", place.endpoint(0));
    let create = |more: &[&str]| {
        [&["create", "lb", &vip, "--tcp=8080:8000", &endpoints, "--mode=fullproxy"], more]
            .concat()
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
    let cases = [
        (words(&["create"]), 2),
        (words(&["create", "lb"]), 2),
        (words(&["create", "lb", "not an address", "--tcp=1:1", &endpoints]), 2),
        (words(&["create", "lb", &vip, "--tcp=0:0", &endpoints]), 2),
        (words(&["create", "lb", &vip, "--tcp=1-65535:8000", &endpoints, "--mode=fullproxy"]), 4),
        (words(&["create", "lb", &vip, "--tcp=99999:1", &endpoints]), 2),
        (words(&["create", "lb", &vip, "--tcp=8080:", &endpoints]), 2),
        (words(&["create", "lb", &vip, "--tcp=8080:8000", "--endpoints=", "--mode=fullproxy"]), 2),
        (words(&["create", "lb", &vip, "--tcp=8080:8000", "--endpoints=,,,", "--mode=fullproxy"]), 2),
        (words(&["create", "lb", &vip, "--tcp=8080:8000", "--endpoints=[::1:1", "--mode=fullproxy"]), 2),
        (words(&["create", "lb", &vip, "--tcp=8080:8000", "--endpoints=192.0.2.1:999", "--mode=fullproxy"]), 2),
        (create(&["--select=best"]), 2),
        (create(&["--mode=fast"]), 2),
        (create(&["--kv-exact-mode=2"]), 2),
        (create(&["--kv-exact-mode=x"]), 2),
        (create(&["--kv-block-size=0"]), 2),
        (create(&["--kv-hash-algo=md5", "--kv-exact-mode=3"]), 2),
        (create(&["--no-such-flag"]), 2),
        (create(&["--ep-role=prefill,decode,both"]), 2),
        (words(&["delete", "lb"]), 2),
        (words(&["delete", "lb", &vip, "--tcp=8080"]), 4),
        (words(&["delete", "lb", "--id=77"]), 4),
        (words(&["get", "nothing"]), 2),
        (words(&["get", "kvinventory", "--service-id=77", "--ep-idx=0"]), 4),
        (words(&["explain", "--service-id=77", "/dev/null"]), 4),
        (words(&["explain", "--service-id=1", "/no/such/file"]), 2),
        (words(&["apply", "-f", "/dev/null"]), 2),
        (words(&["set", "ep", "192.0.2.99", "down"]), 4),
        (words(&["set", "ep", "192.0.2.99", "sideways"]), 2),
        (words(&["up", "--threads", "0", "--no-state"]), 2),
        (words(&["up", "--api", "nowhere", "--no-state"]), 2),
        (words(&["up", "--drain-timeout", "-1s", "--no-state"]), 2),
    ];
    let api = kvlb.api_address();
    for (args, code) in cases {
        let output = Command::new(binary("kvlb").unwrap())
            .args(&args)
            .env("KVLB_APISERVER", api.ip().to_string())
            .env("KVLB_APIPORT", api.port().to_string())
            .output()
            .unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
        assert!(!message.trim().is_empty() && !message.contains("panicked"), "{args:?}: {message}");
    }
    assert_eq!(rules(&kvlb).await, json!([]));
    kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_that_come_and_go_all_the_time_leave_nothing_and_disturb_no_traffic() {
    let stage = Stage::set(1, json!({})).await;
    let churn = async |rounds: u64| {
        for round in 0..rounds {
            let rule = stage.place.rule(1, &json!({"port": 9000 + round % 5, "model_name": format!("model-{round}")}));
            let id = stage.create(&rule).await;
            stage.ask(&completion("meanwhile")).await;
            let (status, answer) = stage.kvlb.api("DELETE", &format!("{LB}/id/{id}"), None).await.unwrap();
            assert_eq!(status, 200, "{answer}");
        }
    };
    churn(20).await;
    let (memory, descriptors) = (stage.memory(), stage.descriptors());
    churn(100).await;
    let back = async || stage.descriptors() <= descriptors + 8;
    eventually(SOON, "descriptors are back", back).await.unwrap();
    let grown = stage.memory().saturating_sub(memory);
    assert!(grown < 24 << 20, "{grown} bytes more after 100 rules");
    let page = stage.kvlb.ask("GET", "/metrics", None).await.unwrap().body.text();
    let left_over: Vec<_> =
        page.lines().filter(|line| line.contains("service=\"") && !line.contains("service=\"1\"")).collect();
    assert_eq!(left_over, Vec::<&str>::new(), "series go when their rule goes");
    stage.close().await;
}

//! Bodies that must be accepted, and bodies that must be refused with a certain word.

use std::net::IpAddr;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::Body;
use super::fields::{ENDPOINT, SERVICE};
use crate::contract::HashAlgo;
use crate::control::Problem;
use crate::fleet::{
    BlendRule, EngineType, ExactMode, Keying, Pinning, ProbeKind, Relief, Role, Rule, RuleId, Score, Selector,
    SessionSource, TierWeights, TrieRule,
};
use crate::policy::Blend;

/// Section 8.1 of the source document, as printed.
pub(crate) const DOCUMENT_BODY: &str = r#"{
  "serviceArguments": {
    "externalIP": "10.10.10.254",
    "port": 8080,
    "protocol": "tcp",
    "sel": 3,
    "mode": 4,
    "kvExactMode": 1,
    "kvZmqPort": 5557,
    "kvHashAlgo": "sha256_cbor",
    "kvBlockSize": 16,
    "kvWarmupSec": 30
  },
  "endpoints": [
    { "endpointIP": "192.0.2.1", "targetPort": 8000, "weight": 1, "ep_role": 1 },
    { "endpointIP": "192.0.2.2", "targetPort": 8000, "weight": 1, "ep_role": 2 }
  ]
}"#;

fn read(text: &str) -> Result<Rule, Problem> {
    Body::read(text.as_bytes())?.rule(RuleId(7))
}

/// A single pool of two, with some fields of `serviceArguments` and of the body replaced; null removes one.
fn pool(service: Value, body: Value) -> Value {
    let mut base = json!({
        "serviceArguments": {"externalIP": "127.0.0.9", "port": 8080, "protocol": "tcp", "sel": 0, "mode": 4,
            "kvExactMode": 3},
        "endpoints": [{"endpointIP": "127.0.0.1", "targetPort": 8000}, {"endpointIP": "127.0.0.1", "targetPort": 8001}],
    });
    for (target, changes) in [("/serviceArguments", service), ("", body)] {
        let Some(Value::Object(target)) = base.pointer_mut(target) else { continue };
        let Value::Object(changes) = changes else { continue };
        for (name, value) in changes {
            if value.is_null() {
                target.shift_remove(&name)
            } else {
                target.insert(name, value)
            };
        }
    }
    base
}

fn service(changes: Value) -> Value {
    pool(changes, json!({}))
}

fn endpoints(rows: Value) -> Value {
    let mut changes = serde_json::Map::new();
    changes.insert("endpoints".to_owned(), rows);
    pool(json!({}), Value::Object(changes))
}

fn rule(body: &Value) -> Result<Rule, Problem> {
    read(&body.to_string())
}

#[test]
fn the_documents_body_is_accepted_as_printed() {
    let rule = read(DOCUMENT_BODY).unwrap();
    assert_eq!(rule.id, RuleId(7));
    assert_eq!(rule.key.vip, IpAddr::from([10, 10, 10, 254]));
    assert_eq!((rule.key.ports.first, rule.key.ports.last), (8080, 8080));
    assert_eq!(rule.key.model, None);
    assert_eq!(rule.selector, Selector::Persist);
    assert_eq!(rule.kv.mode, ExactMode::PrefillDecode);
    assert_eq!(rule.kv.engine, EngineType::Vllm);
    assert_eq!(rule.kv.algo, HashAlgo::Sha256Cbor);
    assert_eq!((rule.kv.zmq_port, rule.kv.replay_port, rule.kv.dp_ranks), (5557, None, None));
    assert_eq!((rule.kv.block_size.get(), rule.kv.warmup), (16, Duration::from_secs(30)));
    assert!(rule.monitor.enabled && rule.monitor.kind == ProbeKind::Tcp);
    let roles: Vec<_> = rule.endpoints.iter().map(|e| (e.key.to_string(), e.weight, e.role)).collect();
    assert_eq!(
        roles,
        [("192.0.2.1:8000".to_owned(), 1, Role::Prefill), ("192.0.2.2:8000".to_owned(), 1, Role::Decode)]
    );
}

#[test]
fn defaults_are_the_documents_and_our_own() {
    let rule = rule(&service(json!({"sel": null, "protocol": null, "kvExactMode": null}))).unwrap();
    assert_eq!((rule.selector, rule.kv.mode), (Selector::RoundRobin, ExactMode::Off));
    assert_eq!((rule.kv.score, rule.kv.blend, rule.hash_load_factor), (Score::Prefix, BlendRule::default(), 125));
    assert_eq!((rule.max_inspect_bytes, rule.forwarded_headers), (32 << 20, true));
    assert!(!rule.decision_headers && !rule.client_half_close && !rule.admin_down);
    assert_eq!(rule.limits, crate::fleet::Limits::default());
    assert_eq!(rule.endpoints[0].weight, 1);
    assert!(rule.allowed_sources.is_empty());
}

#[test]
fn every_number_of_the_blend_has_its_effect() {
    let rule = rule(&service(
        json!({"kvLbMode": "adaptive-soft", "kvLoadFloor": 1, "kvMeanLoadFactor": 200, "kvLoadPenalty": 40,
            "kvCapSumMilli": 15_284_310, "kvSpillRelief": "off", "kvColdStartSeedN": 0, "kvColdStartMinBlocks": 8,
            "kvMinMatchTokens": 64, "sel": 8, "chwbl_mean_load_factor": 150}),
    ))
    .unwrap();
    assert_eq!((rule.selector, rule.hash_load_factor), (Selector::Chwbl, 150));
    let blend = BlendRule {
        mode: Some(Blend::AdaptiveSoft),
        load_floor: Some(1),
        mean_load_factor: Some(200),
        load_penalty: Some(40),
        cap_sum_milli: Some(15_284_310),
        spill_relief: Some(Relief::Off),
        seed_every: Some(0),
        seed_min_blocks: Some(8),
        min_match_tokens: Some(64),
    };
    assert_eq!(rule.kv.blend, blend);
}

#[test]
fn every_served_field_has_its_effect() {
    let rule = rule(&pool(
        json!({"portMax": 8090, "host": "API.example.com", "path_prefix": "/v1", "path_match_mode": "prefix",
            "model_name": "Qwen/Qwen3-0.6B", "name": "chat", "sel": 4, "adminStateUp": false,
            "probetype": "http", "probeport": 9000, "probereq": "health", "proberesp": "ok", "probeTimeout": 5,
            "probeRetries": 3, "probeRise": 4, "probeAnswerTimeout": 6, "expectedCodes": "200-204, 301",
            "inactiveTimeOut": 120, "timeoutMemberConnect": 250, "timeoutTcpInspect": 5000,
            "timeoutFirstByte": 1500, "max_stream_duration_sec": 900, "kvBlockSize": 32, "kvHashAlgo": "xxhash_cbor",
            "kvZmqPort": 6000, "kvWarmupSec": 0, "kvEngineType": "vllm", "kvDpRankCount": 2, "kvReplayPort": 6100,
            "kvScore": "count", "kvKeying": "rehash", "decisionHeaders": true,
            "kvTierWeights": {"cpu": 0.5}, "kvObserve": true,
            "synRate": 20, "synBurst": 30, "noEndpoint": "reset",
            "maxInspectBytes": 1024, "forwardedHeaders": false, "clientHalfClose": "allow"}),
        json!({"allowedSources": [{"prefix": "10.0.0.1/8"}, {"prefix": "::1"}],
            "endpoints": [{"endpointIP": "engine-0.local", "targetPort": 1, "weight": 200},
                {"endpointIP": "[::1]", "targetPort": 65535, "weight": 0},
                {"endpointIP": "::1", "targetPort": 2, "adminState": "drain", "weight": 9},
                {"endpointIP": "::1", "targetPort": 3, "adminState": "down", "probe": {"probetype": "none"}}]}),
    ))
    .unwrap();
    assert!(rule.key.ports.contains(8090) && !rule.key.ports.contains(8091));
    assert_eq!((rule.key.host.as_str(), rule.key.path_prefix.as_str()), ("api.example.com", "/v1"));
    assert_eq!((rule.key.model.as_deref(), rule.name.as_str()), (Some("Qwen/Qwen3-0.6B"), "chat"));
    assert_eq!((rule.selector, rule.admin_down), (Selector::LeastConnections, true));
    let m = &rule.monitor;
    assert_eq!(
        (m.kind, m.port, m.request.as_str(), m.response.as_str()),
        (ProbeKind::Http, Some(9000), "/health", "ok")
    );
    assert_eq!((m.interval, m.retries, m.rise), (Duration::from_secs(5), 3, 4));
    assert_eq!(m.answer_timeout, Duration::from_secs(6));
    let good = [199, 200, 204, 205, 301, 302].map(|status| m.codes.contains(status));
    assert_eq!(good, [false, true, true, false, true, false]);
    assert_eq!(rule.limits.idle, Some(Duration::from_mins(2)));
    assert_eq!((rule.limits.connect, rule.limits.request_body), (Duration::from_millis(250), Duration::from_secs(5)));
    assert_eq!(rule.limits.first_byte, Some(Duration::from_millis(1500)));
    assert_eq!(rule.limits.total, Some(Duration::from_mins(15)));
    assert_eq!((rule.kv.block_size.get(), rule.kv.algo), (32, HashAlgo::XxhashCbor));
    assert_eq!((rule.kv.zmq_port, rule.kv.replay_port, rule.kv.dp_ranks), (6000, Some(6100), Some(2)));
    assert_eq!(rule.kv.score, Score::Count);
    assert_eq!((rule.max_inspect_bytes, rule.forwarded_headers), (1024, false));
    assert_eq!((rule.kv.keying, rule.kv.observe), (Keying::Rehash, true));
    assert_eq!(rule.kv.tier_weights, TierWeights { cpu: 500, storage: 0 });
    assert!(rule.decision_headers && rule.client_half_close);
    assert_eq!(rule.allowed_sources.len(), 2);
    assert_eq!(rule.syn, Some(crate::fleet::SynRule { per_sec: 20, burst: 30 }));
    assert_eq!(rule.no_endpoint, crate::fleet::NoEndpoint::Reset);
    let weights: Vec<_> = rule.endpoints.iter().map(|e| (e.key.to_string(), e.weight, e.admin_down)).collect();
    assert_eq!(
        weights,
        [
            ("engine-0.local:1".to_owned(), 200, false),
            ("[::1]:65535".to_owned(), 0, false),
            ("[::1]:2".to_owned(), 0, false),
            ("[::1]:3".to_owned(), 1, true)
        ]
    );
    assert!(!rule.monitor_of(&rule.endpoints[3]).enabled && rule.monitor_of(&rule.endpoints[0]).enabled);
}

#[test]
fn what_is_remembered_of_clients_is_as_loxilb_says_unless_the_rule_says_otherwise() {
    let of = |args: Value| rule(&service(args)).unwrap().pinning;
    let usual = of(json!({"pd_session_ttl_sec": 0, "pd_cache_threshold": 9, "session_header_name": ""}));
    assert_eq!((&usual, usual.conversation_ttl()), (&Pinning::default(), Duration::from_mins(5)));
    assert_eq!(usual.session_ttl(), Duration::from_hours(3));
    let texts = of(json!({"pd_cache_aware_mode": true, "pd_cache_threshold": 0, "pd_balance_abs_threshold": 0}));
    assert_eq!(texts.trie, Some(TrieRule { threshold: 20, balance: 3 }));
    let all = of(json!({"pd_cache_aware_mode": true, "pd_cache_threshold": 50, "pd_balance_abs_threshold": 8,
        "pd_session_ttl_sec": 60, "session_from_user": true, "session_header_name": "query:s"}));
    let expected = Pinning {
        ttl: Some(Duration::from_mins(1)),
        from_user: true,
        session: Some(SessionSource::Query("s".to_owned())),
        trie: Some(TrieRule { threshold: 50, balance: 8 }),
    };
    assert_eq!((all.conversation_ttl(), all.session_ttl()), (Duration::from_mins(1), Duration::from_mins(1)));
    assert_eq!(all, expected);
    all_refused(&[
        (service(json!({"session_header_name": "cookie:"})), "bad_value", "cookie:NAME"),
        (service(json!({"session_header_name": "X Y"})), "bad_value", "X Y"),
        (service(json!({"session_header_name": "X-S", "sel": 4})), "contradiction", "sel 0 and 3"),
        (service(json!({"pd_cache_threshold": 101})), "out_of_range", "0 to 100"),
    ]);
}

#[test]
fn good_bodies_are_accepted() {
    let roles = |a: u8, b: u8| {
        json!([{"endpointIP": "192.0.2.1", "targetPort": 8000, "ep_role": a},
            {"endpointIP": "192.0.2.2", "targetPort": 8000, "ep_role": b}])
    };
    for body in [
        service(json!({})),
        service(json!({"externalIP": "2001:db8::1"})),
        service(json!({"externalIP": "[2001:db8::1]"})),
        service(json!({"externalIP": "0.0.0.0"})),
        service(json!({"protocol": "TCP"})),
        service(json!({"portMax": 0})),
        service(json!({"portMax": 8080})),
        service(json!({"port": 65535})),
        service(json!({"host": "any"})),
        service(json!({"monitor": false, "proberesp": ""})),
        service(json!({"monitor": true})),
        service(json!({"kvBlockSize": 1})),
        service(json!({"kvZmqPort": 65535})),
        service(json!({"kvZmqPort": 65528, "kvDpRankCount": 8})),
        service(json!({"kvHashAlgo": ""})),
        service(json!({"kvExactMode": 0, "kvEngineType": "llamacpp"})),
        service(json!({"kvExactMode": null, "kvEngineType": "llamacpp"})),
        service(json!({"pd_disagg_mode": false})),
        service(json!({"pd_cache_aware_mode": true, "pd_session_ttl_sec": 300, "pd_cache_threshold": 20})),
        service(json!({"session_header_name": "cookie:sid", "session_from_user": true})),
        service(json!({"session_header_name": "basic-auth", "sel": 3})),
        service(json!({"session_header_name": "", "sel": 4})),
        service(json!({"chwbl_mean_load_factor": 125, "sse_mode": true, "cb_enable": true, "managed": true})),
        service(json!({"id": "5d1c", "projectId": "p", "annotations": {"a": 1}, "connectionLimit": -1})),
        service(json!({"bgp": false, "block": 0, "snat": false, "security": 0, "proxyprotocolv2": false})),
        service(json!({"inactiveTimeOut": 60, "timeoutMemberData": 60000})),
        pool(json!({"kvExactMode": 1, "pd_disagg_mode": true}), json!({"endpoints": roles(1, 2)})),
        pool(json!({"kvExactMode": 0}), json!({"endpoints": roles(1, 2)})),
        pool(json!({"kvExactMode": 0, "pd_disagg_mode": true}), json!({"endpoints": roles(2, 1)})),
        pool(json!({}), json!({"secondaryIPs": [], "allowedSources": []})),
        pool(json!({}), json!({"id": 3, "notes": ["x"]})),
        endpoints(
            json!([{"endpointIP": "h", "targetPort": 1, "state": "active", "counter": "0:0", "nixl_port": 9001}]),
        ),
    ] {
        assert!(rule(&body).is_ok(), "{body}: {:?}", rule(&body));
    }
}

/// Checks that each body is refused with the code, in a message that has the part.
fn all_refused(rows: &[(Value, &str, &str)]) {
    for (body, code, part) in rows {
        match rule(body) {
            Ok(_) => panic!("accepted: {body}"),
            Err(problem) => {
                assert_eq!(problem.code(), *code, "{body}: {problem}");
                assert!(problem.to_string().contains(part), "{problem} has no {part:?}");
                assert_eq!(problem.status(), 400, "{body}");
            }
        }
    }
}

/// The pool with one endpoint, some of its members replaced; null removes one.
fn row(changes: Value) -> Value {
    let mut row = json!({"endpointIP": "192.0.2.1", "targetPort": 8000});
    if let (Value::Object(row), Value::Object(changes)) = (&mut row, changes) {
        for (name, value) in changes {
            if value.is_null() {
                row.shift_remove(&name)
            } else {
                row.insert(name, value)
            };
        }
    }
    endpoints(json!([row]))
}

/// The pool with one endpoint of this role.
fn role(mode: u8, role: impl Into<Value>) -> Value {
    let endpoint = json!({"endpointIP": "192.0.2.1", "targetPort": 1, "ep_role": role.into()});
    pool(json!({"kvExactMode": mode}), json!({"endpoints": [endpoint]}))
}

#[test]
fn bad_keys_are_refused_by_name() {
    all_refused(&[
        (service(json!({"externalIP": null})), "missing_field", "externalIP"),
        (service(json!({"externalIP": "10.0.0.256"})), "bad_value", "externalIP \"10.0.0.256\""),
        (service(json!({"externalIP": "vip.example.com"})), "bad_value", "IPv4 or IPv6"),
        (service(json!({"externalIP": "ff02::1"})), "bad_value", "a group"),
        (service(json!({"externalIP": 10})), "wrong_type", "externalIP must be a text, not a number"),
        (service(json!({"port": null})), "missing_field", "port is missing"),
        (service(json!({"port": 0})), "out_of_range", "1 to 65535"),
        (service(json!({"port": 65536})), "out_of_range", "port 65536"),
        (service(json!({"port": -1})), "out_of_range", "port -1"),
        (service(json!({"port": "8080"})), "wrong_type", "port must be a whole number, not a text"),
        (service(json!({"port": 8080.5})), "wrong_type", "not a fraction"),
        (service(json!({"port": 8080.0})), "wrong_type", "not a fraction"),
        (service(json!({"port": 18_446_744_073_709_551_615_u64})), "out_of_range", "port 18446744073709551615"),
        (service(json!({"portMax": 8079})), "out_of_range", "8080 to 65535"),
        (service(json!({"protocol": "udp"})), "not_supported", "HTTP over tcp"),
        (service(json!({"protocol": "icmp"})), "not_supported", "HTTP over tcp"),
        (service(json!({"protocol": "tpc"})), "bad_value", "use tcp"),
        (service(json!({"host": "a b"})), "bad_value", "host"),
        (service(json!({"path_prefix": "v1"})), "bad_value", "begins with /"),
        (service(json!({"path_prefix": "/v1", "path_match_mode": "disabled"})), "contradiction", "path_prefix"),
        (service(json!({"path_match_mode": "exact"})), "not_supported_yet", "use prefix"),
        (service(json!({"path_match_mode": "regex"})), "bad_value", "use prefix or disabled"),
        (service(json!({"model_name": "a\nb"})), "bad_value", "control characters"),
        (service(json!({"name": "n".repeat(257)})), "bad_value", "at most 256 bytes"),
    ]);
}

#[test]
fn modes_and_selectors_that_are_not_served_are_refused_by_name() {
    all_refused(&[
        (service(json!({"mode": null, "kvExactMode": null})), "mode_not_served", "mode 0 is not served"),
        (service(json!({"mode": 3, "kvExactMode": 0})), "mode_not_served", "set \"mode\": 4"),
        (service(json!({"mode": 2})), "kv_needs_fullproxy", "kvExactMode needs mode 4"),
        (service(json!({"mode": 9, "kvExactMode": 0})), "out_of_range", "mode 9"),
        (service(json!({"mode": "fullproxy"})), "wrong_type", "mode must be a whole number"),
        (service(json!({"sel": 5})), "not_supported", "sel 5 (n2)"),
        (service(json!({"sel": 6})), "not_supported", "sel 6 (n3)"),
        (service(json!({"sel": 7})), "not_supported", "reserved"),
        (service(json!({"sel": 11})), "out_of_range", "0 to 4, and 8 to 10"),
        (service(json!({"chwbl_mean_load_factor": 99})), "out_of_range", "100 to 1000"),
        (service(json!({"sel": -1})), "out_of_range", "sel -1"),
        (service(json!({"security": 1})), "not_supported_yet", "TLS"),
        (service(json!({"oper": 3})), "out_of_range", "0 to 2"),
    ]);
}

#[test]
fn bad_kv_fields_are_refused_by_name() {
    all_refused(&[
        (service(json!({"kvExactMode": 2})), "kv_mode_reserved", "reserved"),
        (service(json!({"kvExactMode": 4})), "out_of_range", "kvExactMode 4"),
        (service(json!({"kvExactMode": -1})), "out_of_range", "0 to 3"),
        (service(json!({"kvExactMode": true})), "wrong_type", "not true or false"),
        (service(json!({"kvBlockSize": 0})), "out_of_range", "kvBlockSize 0"),
        (service(json!({"kvBlockSize": -16})), "out_of_range", "kvBlockSize -16"),
        (service(json!({"kvBlockSize": 4_294_967_296_i64})), "out_of_range", "kvBlockSize"),
        (service(json!({"kvZmqPort": 0})), "out_of_range", "1 to 65535"),
        (service(json!({"kvZmqPort": 65536})), "out_of_range", "kvZmqPort"),
        (service(json!({"kvZmqPort": 65529, "kvDpRankCount": 8})), "out_of_range", "1 to 65528"),
        (service(json!({"kvReplayPort": 0})), "out_of_range", "kvReplayPort"),
        (service(json!({"kvReplayPort": 5557})), "contradiction", "both 5557"),
        (service(json!({"kvWarmupSec": -1})), "out_of_range", "kvWarmupSec"),
        (service(json!({"kvDpRankCount": 0})), "out_of_range", "1 to 8"),
        (service(json!({"kvDpRankCount": 9})), "out_of_range", "1 to 8"),
        (service(json!({"kvHashAlgo": "sha256_sglang"})), "algorithm_engine", "sha256_cbor or xxhash_cbor"),
        (service(json!({"kvHashAlgo": "blockhash_trtllm"})), "algorithm_engine", "vllm"),
        (service(json!({"kvHashAlgo": "md5"})), "bad_value", "md5"),
        (service(json!({"kvEngineType": "sglang"})), "engine_not_supported_yet", "sglang"),
        (service(json!({"kvEngineType": "trtllm"})), "engine_not_supported_yet", "trtllm"),
        (service(json!({"kvEngineType": "VLLM"})), "bad_value", "use vllm or llamacpp"),
        (service(json!({"kvEngineType": "llamacpp"})), "llamacpp_kv", "kvExactMode"),
        (
            service(json!({"kvExactMode": 0, "kvEngineType": "llamacpp", "kvBlockSize": 16})),
            "llamacpp_kv",
            "kvBlockSize",
        ),
        (service(json!({"kvScore": "length"})), "bad_value", "prefix or count"),
        (service(json!({"kvLbMode": "hardest"})), "bad_value", "off, hard, soft, adaptive, adaptive-soft or cost"),
        (service(json!({"kvSpillRelief": "yes"})), "bad_value", "auto, on or off"),
        (service(json!({"kvMeanLoadFactor": 99})), "out_of_range", "100 to 1000"),
        (service(json!({"kvLoadPenalty": 0})), "out_of_range", "1 to 100000"),
        (service(json!({"kvCapSumMilli": 1})), "out_of_range", "1910539 to 122274480"),
        (service(json!({"kvMinMatchTokens": 4097})), "out_of_range", "0 to 4096"),
        (service(json!({"kvLoadFloor": -1})), "out_of_range", "kvLoadFloor"),
        (service(json!({"kvKeying": "engine"})), "bad_value", "auto, parity or rehash"),
        (service(json!({"kvTierWeights": {"CPU": 1}})), "bad_value", "cpu and storage"),
        (service(json!({"kvTierWeights": {"cpu": 1.5}})), "out_of_range", "0 to 1"),
        (service(json!({"kvTierWeights": {"cpu": "1"}})), "out_of_range", "0 to 1"),
        (service(json!({"kvObserve": 1})), "wrong_type", "kvObserve"),
        (service(json!({"kvexactmode": 3})), "unknown_field", "did you mean \"kvExactMode\"?"),
        (service(json!({"kvZmqport": 5557})), "unknown_field", "did you mean \"kvZmqPort\"?"),
        (service(json!({"kvFoo": 1})), "unknown_field", "unknown field \"kvFoo\""),
    ]);
}

#[test]
fn roles_that_do_not_go_with_the_mode_are_refused_by_name() {
    all_refused(&[
        (service(json!({"kvExactMode": 1})), "roles_missing", "ep_role 1"),
        (role(1, 1), "roles_missing", "ep_role 2"),
        (role(0, 1), "roles_missing", "ep_role"),
        (role(3, 1), "roles_refused", "192.0.2.1:1"),
        (service(json!({"kvExactMode": 0, "pd_disagg_mode": true})), "roles_missing", "pd_disagg_mode"),
        (service(json!({"pd_disagg_mode": true})), "contradiction", "pd_disagg_mode"),
        (service(json!({"kvExactMode": 1, "pd_disagg_mode": false})), "contradiction", "pd_disagg_mode false"),
        (role(0, 3), "out_of_range", "endpoints[0].ep_role 3"),
        (role(0, "prefill"), "wrong_type", "endpoints[0].ep_role"),
    ]);
}

#[test]
fn bad_endpoints_are_refused_by_name() {
    all_refused(&[
        (pool(json!({}), json!({"endpoints": null})), "endpoints_missing", "at least one"),
        (endpoints(json!([])), "endpoints_missing", "at least one"),
        (endpoints(json!({})), "wrong_type", "endpoints must be a list"),
        (endpoints(json!(["192.0.2.1"])), "not_object", "endpoints[0]"),
        (row(json!({"endpointIP": null})), "missing_field", "endpoints[0].endpointIP"),
        (row(json!({"endpointIP": "300.1.1.1"})), "bad_value", "endpoints[0].endpointIP"),
        (row(json!({"targetPort": null})), "missing_field", "targetPort"),
        (row(json!({"targetPort": 0})), "out_of_range", "1 to 65535"),
        (row(json!({"weight": 256})), "out_of_range", "0 to 255"),
        (row(json!({"weight": -1})), "out_of_range", "weight -1"),
        (row(json!({"adminState": "off"})), "bad_value", "up, drain or down"),
        (row(json!({"ep_rol": 1})), "unknown_field", "in endpoints[0]; did you mean \"ep_role\"?"),
        (row(json!({"epRole": 1})), "unknown_field", "did you mean \"ep_role\"?"),
        (row(json!({"backup": true})), "not_supported_yet", "weight"),
        (row(json!({"probe": {"probetype": "icmp"}})), "bad_value", "endpoints[0].probe.probetype"),
        (row(json!({"probe": {"type": "tcp"}})), "unknown_field", "in endpoints[0].probe"),
        (
            endpoints(json!([{"endpointIP": "::1", "targetPort": 1}, {"endpointIP": "[0::1]", "targetPort": 1}])),
            "duplicate_endpoint",
            "[::1]:1",
        ),
        (
            endpoints(json!((0..129).map(|i| json!({"endpointIP": "h", "targetPort": 1 + i})).collect::<Vec<_>>())),
            "too_many",
            "129 endpoints",
        ),
    ]);
}

#[test]
fn bad_probes_and_limits_are_refused_by_name() {
    all_refused(&[
        (service(json!({"probetype": "ping"})), "not_supported", "tcp or http"),
        (service(json!({"probetype": "https"})), "not_supported_yet", "TLS"),
        (service(json!({"monitor": true, "probetype": "none"})), "contradiction", "probetype none"),
        (service(json!({"probereq": "/health"})), "contradiction", "probetype http"),
        (service(json!({"probetype": "http", "probereq": "/a b"})), "bad_value", "no spaces"),
        (service(json!({"probetype": "http", "probereq": "/\r\nX: y"})), "bad_value", "no spaces"),
        (service(json!({"probeTimeout": 3601})), "out_of_range", "0 to 3600"),
        (service(json!({"probeRetries": 101})), "out_of_range", "0 to 100"),
        (service(json!({"probeRise": 101})), "out_of_range", "0 to 100"),
        (service(json!({"probeAnswerTimeout": 3601})), "out_of_range", "0 to 3600"),
        (service(json!({"expectedCodes": "200"})), "contradiction", "probetype http"),
        (service(json!({"probetype": "http", "expectedCodes": "2xx"})), "bad_value", "200-204"),
        (service(json!({"probetype": "http", "expectedCodes": "204-200"})), "bad_value", "200-204"),
        (service(json!({"probetype": "http", "expectedCodes": "200,"})), "bad_value", "200-204"),
        (service(json!({"probetype": "http", "expectedCodes": "+20"})), "bad_value", "100 to 599"),
        (service(json!({"probeport": 65536})), "out_of_range", "probeport"),
        (service(json!({"inactiveTimeOut": 86401})), "out_of_range", "0 to 86400"),
        (service(json!({"inactiveTimeOut": 60, "timeoutMemberData": 60})), "contradiction", "different times"),
        (service(json!({"clientHalfClose": "yes"})), "bad_value", "leave or allow"),
        (service(json!({"noEndpoint": "drop"})), "bad_value", "503 or reset"),
        (service(json!({"noEndpoint": 503})), "wrong_type", "noEndpoint"),
        (service(json!({"maxInspectBytes": 2_000_000_000})), "out_of_range", "maxInspectBytes"),
    ]);
}

#[test]
fn a_burst_is_a_seconds_worth_unless_said_and_needs_a_rate() {
    let of = |args: Value| rule(&service(args)).map(|rule| rule.syn.map(|syn| (syn.per_sec, syn.burst)));
    assert_eq!(of(json!({"synRate": 20})).unwrap(), Some((20, 20)));
    assert_eq!(of(json!({"synRate": 20, "synBurst": 0})).unwrap(), Some((20, 20)));
    assert_eq!(of(json!({"synRate": 0, "synBurst": 0})).unwrap(), None);
    all_refused(&[
        (service(json!({"synBurst": 5})), "contradiction", "synRate"),
        (service(json!({"synRate": 1_000_001})), "out_of_range", "synRate"),
        (service(json!({"synRate": -1})), "out_of_range", "synRate"),
    ]);
}

#[test]
fn what_loxilb_has_and_kvlb_has_not_are_refused_by_name() {
    all_refused(&[
        (service(json!({"bgp": true})), "not_supported", "routes"),
        (service(json!({"proxyprotocolv2": true})), "not_supported_yet", "forwardedHeaders"),
        (service(json!({"backend_protocol": "http2"})), "not_supported", "HTTP/1.1"),
        (service(json!({"connectionLimit": 5})), "not_supported_yet", "connectionLimit 5"),
        (service(json!({"mtls_frontend": {"client_cert_mode": "required"}})), "not_supported_yet", "TLS"),
        (service(json!({"fc_adaptive": "on"})), "not_supported_yet", "admission"),
        (service(json!({"fc_mode": "strict"})), "bad_value", "fc_mode"),
        (service(json!({"fc_mode": "enforce", "fc_max_queue_depth": 4})), "contradiction", "fc_max_queue_wait_ms"),
        (pool(json!({}), json!({"secondaryIPs": [{"secondaryIP": "1.1.1.1"}]})), "not_supported", "SCTP"),
        (
            pool(json!({}), json!({"allowedSources": [{"prefix": "10.0.0.0/33"}]})),
            "bad_value",
            "allowedSources[0].prefix",
        ),
        (pool(json!({}), json!({"allowedSources": [{}]})), "missing_field", "allowedSources[0].prefix"),
    ]);
}

#[test]
fn bodies_of_another_shape_are_refused_by_name() {
    all_refused(&[
        (json!([]), "not_object", "the body must be a JSON object, not a list"),
        (json!(null), "not_object", "not null"),
        (json!({}), "missing_field", "serviceArguments is missing"),
        (json!({"serviceArguments": 1}), "wrong_type", "serviceArguments must be an object"),
        (json!({"serviceArguments": null}), "missing_field", "serviceArguments"),
        (json!({"externalIP": "1.1.1.1", "port": 1}), "unknown_field", "it belongs in serviceArguments"),
        (json!({"serviceargs": {}}), "unknown_field", "serviceargs"),
    ]);
}

/// A value that a field may be sent with, right or wrong.
fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-2i64..20).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9./:_\\[\\]-]{0,12}".prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        Just(json!([])),
        Just(json!({})),
        Just(json!([{"prefix": "10.0.0.0/8"}])),
    ]
}

proptest! {
    #[test]
    fn bytes_from_outside_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Body::read(&bytes).is_err());
    }

    #[test]
    fn a_rule_that_is_accepted_is_the_same_when_it_is_read_again(
        changes in prop::collection::vec((0..SERVICE.len(), any_value()), 0..6),
        of_endpoint in prop::collection::vec((0..ENDPOINT.len(), any_value()), 0..3),
    ) {
        let mut service_fields = json!({});
        for (field, value) in changes {
            service_fields[SERVICE[field].name] = value;
        }
        let mut endpoint = json!({"endpointIP": "192.0.2.1", "targetPort": 8000});
        for (field, value) in of_endpoint {
            endpoint[ENDPOINT[field].name] = value;
        }
        let whole = pool(service_fields, json!({"endpoints": [endpoint]}));
        let Ok(body) = Body::read(whole.to_string().as_bytes()) else { return Ok(()) };
        let again = Body::read(Value::Object(body.json().clone()).to_string().as_bytes());
        prop_assert_eq!(again.as_ref(), Ok(&body));
        prop_assert_eq!(again.and_then(|again| again.rule(RuleId(1))), body.rule(RuleId(1)));
    }
}

//! Command lines, exit codes and tables.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use tokio::net::TcpListener;

use super::*;
use crate::control::wire::{Body, DOCUMENT_BODY};
use crate::fleet::{Role, RuleId};

/// The printed line of the source document, section 8.1.
const DOCUMENT_LINE: &str = "loxicmd create lb 10.10.10.254 --tcp=8080:8000 --endpoints=192.0.2.1:1,192.0.2.2:1 \
     --mode=fullproxy --select=persist --kv-exact-mode=1 --kv-zmq-port=5557 --kv-hash-algo=sha256_cbor \
     --kv-block-size=16 --kv-warmup=30 --ep-role=prefill,decode";

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

/// The command of a line, or the exit code that reading it ends with.
fn read(line: &str) -> Result<Command, String> {
    let matches = command().try_get_matches_from(words(line)).map_err(|error| error.to_string())?;
    Cli::from_arg_matches(&matches).map(|cli| cli.command).map_err(|error| error.to_string())
}

fn bodies(line: &str) -> Result<Vec<Value>, String> {
    match read(line)? {
        Command::Create(create) => match *create {
            Create::Lb(lb) => lb.bodies().map_err(|error| error.to_string()),
            Create::Ep(probe) => Ok(vec![probe.body()]),
        },
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn the_documents_line_makes_the_documents_body() {
    let made = bodies(DOCUMENT_LINE).unwrap();
    let document: Value = serde_json::from_str(DOCUMENT_BODY).unwrap();
    assert_eq!(made, [document]);
    assert_eq!(bodies(&DOCUMENT_LINE.replace("loxicmd", "kvlb")).unwrap(), made);
}

#[test]
fn every_flag_of_create_lb_reaches_the_rule() {
    let line = "kvlb create lb 127.0.0.9 --tcp=80-90:8000 --endpoints=192.0.2.1:8001:3,[::1]:0 --select=lc --name=n \
        --host=h --model-name=m --path-prefix=/v1 --path-match-mode=prefix --sources=10.0.0.0/8,::1 --admin-down \
        --security=plain --monitor --probetype=http --probeport=9 --probereq=/h --proberesp=ok --probetimeout=5 \
        --proberetries=3 --proberise=4 --probe-answer-timeout=6 --expected-codes=200-204 --kv-exact-mode=3 --kv-block-size=32 --kv-hash-algo=xxhash_cbor --kv-zmq-port=1 \
        --kv-replay-port=2 --kv-engine-type=vllm --kv-dp-ranks=1 --kv-score=count --kv-lb-mode=off --kv-load-floor=1 \
        --kv-keying=auto --kv-tier-weights=cpu=0.5,storage=0 --kv-observe --ep-role=normal,any --pd-disagg=false --decision-headers --forwarded-headers=false \
        --max-inspect-bytes=5 --connections-max=4 --syn-rate=20 --syn-burst=30 --no-endpoint=reset --client-half-close=allow --inatimeout=9 --connect-timeout=8 --first-byte-timeout=7 \
        --max-stream-duration=6 --backend-protocol=http1 --kv-warmup=1 --nixl-port=1,2 --pd-cache-aware \
        --pd-session-ttl=1 --session-from-user --pd-cache-threshold=1 --pd-balance-abs-threshold=1 --pd-bootstrap-port=1 --sse-mode \
        --cb-enable --cb-connect-failures=4 --cb-answer-failures=0 --cb-open=5 --backend-keepalive-interval=1 \
        --fc-mode=enforce --fc-max-outstanding=16 --fc-ep-max-inflight=8 --fc-prefill-max-inflight=4 --fc-decode-max-inflight=2 --fc-max-queue-depth=32 \
        --fc-max-queue-wait-ms=5000";
    let body = bodies(line).unwrap().remove(0);
    let service: Value = serde_json::from_str(
        r#"{"externalIP": "127.0.0.9", "port": 80, "portMax": 90, "protocol": "tcp", "sel": 4, "mode": 4,
        "security": 0, "name": "n", "host": "h", "model_name": "m", "path_prefix": "/v1", "path_match_mode": "prefix",
        "adminStateUp": false, "monitor": true, "probetype": "http", "probeport": 9, "probereq": "/h",
        "proberesp": "ok", "probeTimeout": 5, "probeRetries": 3, "probeRise": 4,
        "probeAnswerTimeout": 6, "expectedCodes": "200-204", "kvExactMode": 3, "kvBlockSize": 32,
        "kvHashAlgo": "xxhash_cbor", "kvZmqPort": 1, "kvReplayPort": 2, "kvEngineType": "vllm", "kvDpRankCount": 1,
        "kvScore": "count", "kvLbMode": "off", "kvLoadFloor": 1, "kvKeying": "auto", "kvTierWeights": {"cpu": 0.5, "storage": 0}, "kvObserve": true, "pd_disagg_mode": false,
        "decisionHeaders": true, "forwardedHeaders": false, "maxInspectBytes": 5, "connectionsMax": 4, "synRate": 20, "synBurst": 30, "noEndpoint": "reset", "clientHalfClose": "allow",
        "inactiveTimeOut": 9, "timeoutMemberConnect": 8, "timeoutFirstByte": 7, "max_stream_duration_sec": 6,
        "backend_protocol": "http1", "kvWarmupSec": 1, "pd_cache_aware_mode": true, "pd_session_ttl_sec": 1, "session_from_user": true,
        "pd_cache_threshold": 1, "pd_balance_abs_threshold": 1, "pdBootstrapPort": 1, "sse_mode": true,
        "cb_enable": true, "cb_connect_failures": 4, "cb_answer_failures": 0, "cb_open_sec": 5, "backend_keepalive_interval_sec": 1,
        "fc_mode": "enforce", "fc_max_outstanding": 16, "fc_ep_max_inflight": 8, "fc_prefill_max_inflight": 4, "fc_decode_max_inflight": 2,
        "fc_max_queue_depth": 32, "fc_max_queue_wait_ms": 5000}"#,
    )
    .unwrap();
    assert_eq!(body["serviceArguments"], service);
    let endpoints = json!([
        {"endpointIP": "192.0.2.1", "targetPort": 8001, "weight": 3, "ep_role": 0, "nixl_port": 1},
        {"endpointIP": "::1", "targetPort": 8000, "weight": 0, "ep_role": 0, "nixl_port": 2}]);
    assert_eq!(body["endpoints"], endpoints);
    assert_eq!(body["allowedSources"], json!([{"prefix": "10.0.0.0/8"}, {"prefix": "::1"}]));
    assert!(Body::from_json(&body).and_then(|body| body.rule(RuleId(1))).is_ok());
}

#[test]
fn several_ports_make_several_rules() {
    let made = bodies("kvlb create lb ::1 --tcp=80:8000,81:8001 --endpoints=192.0.2.1:1").unwrap();
    let ports: Vec<_> =
        made.iter().map(|b| (&b["serviceArguments"]["port"], &b["endpoints"][0]["targetPort"])).collect();
    assert_eq!(ports, [(&json!(80), &json!(8000)), (&json!(81), &json!(8001))]);
    let rule = Body::from_json(&made[0]).and_then(|body| body.rule(RuleId(1))).unwrap();
    assert_eq!(rule.endpoints[0].role, Role::Any);
}

#[test]
fn an_order_to_move_endpoints_says_nothing_else() {
    let made = bodies("kvlb create lb ::1 --tcp=80:8000 --endpoints=192.0.2.1:1 --attachEP").unwrap();
    assert_eq!(made[0]["serviceArguments"], json!({"externalIP": "::1", "port": 80, "protocol": "tcp", "oper": 1}));
    assert!(bodies("kvlb create lb ::1 --tcp=80:8000 --endpoints=192.0.2.1:1 --attachEP --detachEP").is_err());
}

#[test]
fn mistakes_are_refused_with_what_would_be_right() {
    let base = "kvlb create lb 10.0.0.1 --tcp=80:8000 --endpoints=192.0.2.1:1";
    for (line, part) in [
        (format!("{base} --select=random"), "rr, hash, priority, persist, lc"),
        (format!("{base} --mode=l7"), "possible values: fullproxy"),
        (format!("{base} --security=ssl"), "possible values: plain"),
        (format!("{base} --ep-role=prefiller"), "prefill, decode"),
        (format!("{base} --ep-role=prefill,decode"), "--ep-role names 2 endpoints, --endpoints 1"),
        (format!("{base} --kv-block-size=large"), "invalid value 'large' for '--kv-block-size"),
        (format!("{base} --kv-exact-mod=1"), "--kv-exact-mode"),
        (format!("{base} --bgp"), "--bgp is not supported: kvlb announces no routes"),
        (format!("{base} --bgp=true"), "--bgp is not supported"),
        (format!("{base} --mark 5"), "--mark is not supported"),
        (format!("{base} --ppv2en"), "PROXY protocol is not served yet"),
        (format!("{base} --fc-adaptive"), "admission goes by fixed bounds"),
        (format!("{base} --hsts-preload"), "TLS is not served yet"),
        (format!("{base} --udp=53:53"), "HTTP over TCP"),
        ("kvlb create lb 10.0.0.1 --tcp=80:8000".to_owned(), "--endpoints"),
        ("kvlb create lb --tcp=80:8000 --endpoints=a:1".to_owned(), "<IP>"),
        ("kvlb create lb 10.0.0.1 --tcp=80 --endpoints=a:1".to_owned(), "VIPPORT:TARGETPORT"),
        ("kvlb create lb 10.0.0.1 --tcp=80:1 --endpoints=a:256".to_owned(), "not 0 to 255"),
        ("kvlb create route x".to_owned(), "unrecognized subcommand 'route'"),
        ("kvlb get lbs -o yaml".to_owned(), "possible values: json, wide"),
        ("kvlb get kvinventory --service-id=1".to_owned(), "--ep-idx"),
        ("kvlb delete lb".to_owned(), "required"),
        ("kvlb delete lb 10.0.0.1".to_owned(), "--tcp"),
        ("kvlb delete lb --name=".to_owned(), "--name"),
        ("kvlb delete lb --name=a --id=1".to_owned(), "cannot be used with"),
        ("kvlb set ep 10.0.0.1 sideways".to_owned(), "possible values: up, drain, down"),
        ("kvlb apply".to_owned(), "required"),
        ("kvlb completion tcsh".to_owned(), "possible values: bash, zsh, fish"),
        ("kvlb".to_owned(), "Usage"),
    ] {
        let error = bodies(&line);
        assert!(error.as_ref().is_err_and(|text| text.contains(part)), "{line}: {error:?}");
    }
}

#[test]
fn the_grammar_is_whole() {
    command().debug_assert();
    for line in [
        "kvlb get lb",
        "kvlb get loadbalancer -o wide",
        "kvlb -p 1 get lbs",
        "kvlb get ep -s ::1 -p 2 --timeout 3",
        "kvlb get endpoints",
        "kvlb get kvstatus",
        "kvlb get metrics",
        "kvlb get status -o json",
        "kvlb get lbversion",
        "kvlb delete lb ::1 --tcp=80-90 --host=any --model-name=m",
        "kvlb delete lb --all",
        "kvlb delete ep h",
        "kvlb create ep h --probetype=http --probereq=/health --period=5 --retries=1",
        "kvlb save -a -c /tmp",
        "kvlb save --lb",
        "kvlb apply -l f",
        "kvlb apply -f f",
        "kvlb completion fish",
        "kvlb version",
        "kvlb get drops",
        "kvlb doctor --xdp-dev eth0 -o json",
        "kvlb down --pin-dir /sys/fs/bpf/x --all-routes --wait 5s",
        "kvlb up",
    ] {
        assert!(read(line).is_ok(), "{line}: {:?}", read(line).err());
    }
}

#[test]
fn up_refuses_the_flags_of_a_client() {
    let up = |line: &str| match parse(words(line), &Env::default()) {
        Parsed::Up(config) => Some(config.api.port()),
        _ => None,
    };
    assert_eq!(up("kvlb up --api 127.0.0.1:9"), Some(9));
    for line in ["kvlb up --port 9", "kvlb -p 9 up", "kvlb up -o json", "kvlb up --apiserver h", "kvlb up --threads 0"]
    {
        assert_eq!(up(line), None, "{line}");
    }
    let help = read("kvlb up --help").unwrap_err();
    assert!(help.contains("KVLB_DRAIN_TIMEOUT") && !help.contains("apiserver"), "{help}");
}

#[test]
fn a_link_named_loxicmd_answers_to_its_name() {
    for (first, name) in
        [("/usr/bin/loxicmd", "loxicmd"), ("kvlb", "kvlb"), ("./target/debug/kvlb", "kvlb"), ("x", "kvlb")]
    {
        assert_eq!(program_name(Some(&first.into())), name);
    }
    assert!(completion(Shell::Bash, "loxicmd").contains("_loxicmd()"));
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        assert!(completion(shell, "kvlb").contains("kv-exact-mode"));
    }
}

#[test]
fn endpoints_are_named_with_or_without_a_port() {
    for (text, expected) in [
        ("192.0.2.1", Some(("192.0.2.1", None))),
        ("192.0.2.1:8000", Some(("192.0.2.1", Some(8000)))),
        ("engine:8000", Some(("engine", Some(8000)))),
        ("[::1]:8000", Some(("[::1]", Some(8000)))),
        ("[::1]", Some(("[::1]", None))),
        ("::1", Some(("::1", None))),
        ("2001:db8::1", Some(("2001:db8::1", None))),
        ("engine:0", None),
        ("engine:", None),
        (":8000", None),
        ("", None),
    ] {
        assert_eq!(host_and_port(text), expected, "{text}");
    }
}

/// An API that gives one answer to everything, and remembers what it was asked.
struct Fake {
    flags: Vec<String>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Fake {
    async fn answering(status: u16, body: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let router = Router::new().fallback(move |request: Request| {
            let seen = Arc::clone(&seen);
            async move {
                let line = format!("{} {}", request.method(), request.uri());
                let body_sent = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
                seen.lock().unwrap().push(format!("{line} {}", String::from_utf8_lossy(&body_sent)).trim().to_owned());
                (StatusCode::from_u16(status).unwrap(), body).into_response()
            }
        });
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { flags: vec!["--port".to_owned(), port.to_string(), "--timeout".to_owned(), "5".to_owned()], asked }
    }

    async fn run(&self, line: &str) -> Result<Answer, CliError> {
        execute_line(line, &self.flags).await
    }

    fn last(&self) -> String {
        self.asked.lock().unwrap().last().cloned().unwrap_or_default()
    }
}

async fn execute_line(line: &str, flags: &[String]) -> Result<Answer, CliError> {
    let mut all = words(line);
    all.extend(flags.iter().map(OsString::from));
    match parse(all, &Env::default()) {
        Parsed::Client(invocation) => execute(&invocation).await,
        _ => panic!("{line} is no client command"),
    }
}

#[tokio::test]
async fn commands_ask_for_the_paths_of_the_api() {
    let api = Fake::answering(200, "{\"result\":\"Success\",\"id\":4,\"change\":\"created\"}").await;
    let created = api.run("kvlb create lb 127.0.0.9 --tcp=80:8000 --endpoints=192.0.2.1:1").await.unwrap();
    assert_eq!(created, Answer { text: "Success: rule 4 created\n".to_owned(), code: 0 });
    assert!(api.last().starts_with("POST /netlox/v1/config/loadbalancer {\"serviceArguments\":{\"externalIP\""));
    for (line, request) in [
        ("kvlb get lb", "GET /netlox/v1/config/loadbalancer/all"),
        ("kvlb get lb --id=7", "GET /netlox/v1/config/loadbalancer/id/7"),
        ("kvlb get lb --name=a/b", "GET /netlox/v1/config/loadbalancer/name/a%2Fb"),
        ("kvlb get ep", "GET /netlox/v1/config/endpoint/all"),
        (
            "kvlb get kvinventory --service-id=3 --ep-idx=0",
            "GET /netlox/v1/config/ai/kv/inventory?service_id=3&ep_idx=0",
        ),
        ("kvlb get kvstatus --service-id=3", "GET /netlox/v1/config/ai/kv/status?service_id=3"),
        ("kvlb get kvstatus", "GET /netlox/v1/config/ai/kv/status"),
        ("kvlb get metrics", "GET /netlox/v1/metrics"),
        ("kvlb get status", "GET /netlox/v1/status"),
        ("kvlb version", "GET /netlox/v1/version"),
        (
            "kvlb delete lb 10.0.0.1 --tcp=80",
            "DELETE /netlox/v1/config/loadbalancer/externalipaddress/10.0.0.1/port/80/protocol/tcp",
        ),
        (
            "kvlb delete lb ::1 --tcp=80-90 --host=h --model-name=Qwen/Q",
            "DELETE /netlox/v1/config/loadbalancer/hosturl/h/externalipaddress/::1/port/80/portmax/90/protocol/tcp?model_name=Qwen%2FQ",
        ),
        ("kvlb delete lb --id=2", "DELETE /netlox/v1/config/loadbalancer/id/2"),
        ("kvlb delete lb --name=n", "DELETE /netlox/v1/config/loadbalancer/name/n"),
        ("kvlb delete lb --all", "DELETE /netlox/v1/config/loadbalancer/all"),
        ("kvlb delete ep 192.0.2.1", "DELETE /netlox/v1/config/endpoint/epipaddress/192.0.2.1"),
        (
            "kvlb set ep [::1]:8000 drain",
            "POST /netlox/v1/config/endpointhoststate {\"hostName\":\"[::1]\",\"epPort\":8000,\"epProto\":\"tcp\",\"state\":\"yellow\"}",
        ),
    ] {
        assert!(api.run(line).await.is_ok(), "{line}");
        assert_eq!(api.last(), request, "{line}");
    }
}

#[tokio::test]
async fn every_kind_of_failure_has_its_exit_code_and_says_what_to_do() {
    for (status, body, code, part) in [
        (400, "{\"message\":\"kvBlockSize 0 is out of range\",\"error\":\"out_of_range\"}", 2, "kvBlockSize 0"),
        (413, "{\"message\":\"too large\"}", 2, "too large"),
        (401, "{\"message\":\"no token\"}", 3, "no token"),
        (403, "<html>", 3, "403"),
        (404, "{\"message\":\"no rule with id 7\",\"error\":\"rule_not_found\"}", 4, "`kvlb get lb` lists"),
        (409, "{\"message\":\"2 rules\",\"error\":\"several_rules\"}", 4, "--id"),
        (503, "{\"message\":\"starting\",\"error\":\"starting\"}", 5, "try again"),
        (502, "<html>", 5, "502"),
        (500, "{\"message\":\"broken\"}", 7, "broken"),
        (404, "<html>not here</html>", 7, "not kvlb's API"),
        (200, "hello", 7, "not kvlb's API"),
    ] {
        let error = Fake::answering(status, body).await.run("kvlb get lb").await;
        let text = error.as_ref().map_err(ToString::to_string).err().unwrap_or_default();
        assert_eq!(error.map_err(|error| error.exit_code()), Err(code), "{status} {body}");
        assert!(text.contains(part), "{text}");
    }
}

#[tokio::test]
async fn nobody_there_is_unavailable() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let flags = ["-p".to_owned(), free.to_string()];
    let error = execute_line("kvlb get lb", &flags).await.unwrap_err();
    assert_eq!(error.exit_code(), 5);
    let text = error.to_string();
    assert!(text.contains("kvlb up") && text.to_lowercase().contains("refused"), "{text}");
    // This program's own version is told all the same.
    let version = execute_line("kvlb version", &flags).await.unwrap();
    assert!(version.text.starts_with(concat!("kvlb ", env!("CARGO_PKG_VERSION"), "\n")) && version.code == 5);
}

#[tokio::test]
async fn an_api_that_does_not_answer_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port().to_string();
    let flags = ["-p".to_owned(), port, "-t".to_owned(), "1".to_owned()];
    let error = execute_line("kvlb get lb", &flags).await.unwrap_err();
    assert!(matches!(error, CliError::Timeout { seconds: 1, .. }) && error.exit_code() == 5);
}

#[tokio::test]
async fn a_mismatch_in_kvstatus_is_an_exit_code_of_its_own() {
    let answer = |contract: &str| {
        let body = json!({"service_id": 1, "endpoints": [{"kvStatus": {"contract": contract, "leg": "seed"}}]});
        &*Box::leak(body.to_string().into_boxed_str())
    };
    for (contract, code) in [("mismatch", 6), ("verified", 0)] {
        let api = Fake::answering(200, answer(contract)).await;
        assert_eq!(api.run("kvlb get kvstatus").await.map_err(|e| e.to_string()).map(|a| a.code), Ok(code));
        assert_eq!(api.run("kvlb get kvstatus -o json").await.map_err(|e| e.to_string()).map(|a| a.code), Ok(code));
    }
}

/// An API whose rule 3 has this preflight.
async fn preflighted(report: &Value) -> Fake {
    let mut body = report.clone();
    body["lbAttr"] = json!([{"id": 3}]);
    Fake::answering(200, Box::leak(body.to_string().into_boxed_str())).await
}

#[tokio::test]
async fn preflight_passes_only_where_every_leg_holds() {
    let report = |verdict: &str| {
        let leg = json!({"leg": "seed", "engine": "e", "ours": "o", "verdict": verdict, "advice": "do this"});
        json!({"verdict": verdict, "endpoints": [{"ep_idx": 0, "endpoint": "a:1", "legs": [leg]}], "pool": []})
    };
    for (verdict, code) in [("ok", 0), ("warn", 0), ("unknown", 6), ("broken", 6), ("unreachable", 5)] {
        let api = preflighted(&report(verdict)).await;
        let answer = api.run("kvlb preflight chat").await.unwrap();
        assert_eq!(answer.code, code, "{verdict}");
        assert!(answer.text.contains(&format!("endpoint 0 a:1: seed {verdict}: do this\n")), "{}", answer.text);
        assert!(answer.text.ends_with(&format!("verdict: {verdict}\n")));
        assert_eq!(api.last(), "GET /netlox/v1/config/ai/kv/preflight?service_id=3");
        assert!(api.asked.lock().unwrap()[0].ends_with("/config/loadbalancer/name/chat"));
        assert_eq!(api.run("kvlb preflight 3 -o json").await.map(|answer| answer.code).unwrap(), code);
        assert!(api.asked.lock().unwrap().iter().any(|line| line.ends_with("/config/loadbalancer/id/3")));
    }
    let unknown = preflighted(&report("unknown")).await;
    assert_eq!(unknown.run("kvlb preflight 3 --allow-unknown").await.map(|answer| answer.code).unwrap(), 0);
    let broken = preflighted(&report("broken")).await;
    assert_eq!(broken.run("kvlb preflight 3 --allow-unknown").await.map(|answer| answer.code).unwrap(), 6);
}

#[tokio::test]
async fn what_preflight_cannot_mean_is_a_bad_argument() {
    let api = preflighted(&json!({"verdict": "ok"})).await;
    for (line, words) in [
        ("kvlb preflight chat http://a:1", "not both"),
        ("kvlb preflight 1 2", "one rule at a time"),
        ("kvlb preflight 1 --kv-block-size=32", "--kv-block-size goes with URLs"),
        ("kvlb preflight https://a:1", "plain http only"),
        ("kvlb preflight http://a:1 --kv-block-size=0", "--kv-block-size"),
        ("kvlb preflight http://a:1 --kv-hash-algo=md5", "sha256_cbor"),
    ] {
        let error = api.run(line).await.unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains(words), "{line}: {error}");
    }
    let several = Fake::answering(200, r#"{"lbAttr":[{"id":1},{"id":2}]}"#).await;
    let error = several.run("kvlb preflight chat").await.unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("by number: 1, 2"), "{error}");
}

#[tokio::test]
async fn what_engines_contradict_is_told_where_a_rule_is_made() {
    let answer =
        r#"{"result":"Success","id":4,"change":"created","notes":["endpoint 0 (a:1): block_size: engine 32"]}"#;
    let api = Fake::answering(200, answer).await;
    let created = api.run("kvlb create lb 127.0.0.9 --tcp=80:8000 --endpoints=192.0.2.1:1").await.unwrap();
    let text = "Success: rule 4 created\nnote: endpoint 0 (a:1): block_size: engine 32\n";
    assert_eq!(created, Answer { text: text.to_owned(), code: 0 });
}

#[tokio::test]
async fn what_is_saved_can_be_applied() {
    let all = "{\"lbAttr\":[{\"id\":3,\"serviceArguments\":{\"externalIP\":\"10.0.0.1\",\"port\":80,\"mode\":4},\
        \"endpoints\":[{\"endpointIP\":\"a\",\"targetPort\":1,\"ep_idx\":0,\"state\":\"active\",\"counter\":\"0:0\",\
        \"kvStatus\":{}}],\"notes\":[\"n\"]}]}";
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("new").display().to_string();
    let saved = Fake::answering(200, all).await.run(&format!("kvlb save --lb -c {at}")).await.unwrap();
    assert!(saved.text.starts_with("Success: 1 rules saved to"));
    let file = format!("{at}/lbconfig.txt");
    let kept: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let body = json!({"serviceArguments": {"externalIP": "10.0.0.1", "port": 80, "mode": 4},
        "endpoints": [{"endpointIP": "a", "targetPort": 1}]});
    assert_eq!(kept, json!({"lbAttr": [body]}));
    Fake::answering(200, all).await.run(&format!("kvlb save -a -c {at}")).await.unwrap();
    assert!(std::fs::exists(format!("{at}/lbconfig.txt.bk")).unwrap());

    let api = Fake::answering(200, "{\"result\":\"Success\",\"id\":1,\"change\":\"created\"}").await;
    let applied = api.run(&format!("kvlb apply -l {file}")).await.unwrap();
    assert_eq!(applied, Answer { text: "Success: rule 1 created\n".to_owned(), code: 0 });
    assert_eq!(api.last(), format!("POST /netlox/v1/config/loadbalancer {body}"));

    let refusing = Fake::answering(409, "{\"message\":\"immutable\",\"error\":\"immutable\"}").await;
    let refused = refusing.run(&format!("kvlb apply --file {file}")).await.unwrap();
    assert_eq!(refused.code, 4);
    assert!(refused.text.contains("[\"10.0.0.1\",80,null]: immutable\n1 of 1 rules were refused"), "{}", refused.text);
    std::fs::write(&file, "{").unwrap();
    assert_eq!(api.run(&format!("kvlb apply -f {file}")).await.unwrap_err().exit_code(), 2);
    assert_eq!(api.run("kvlb apply -f /nowhere/at/all").await.unwrap_err().exit_code(), 2);
}

/// Nothing is known of any endpoint.
struct Quiet;

impl crate::control::Live for Quiet {
    fn notes(&self, _: RuleId) -> Vec<String> {
        Vec::new()
    }

    fn endpoint(&self, _: RuleId, _: usize) -> Option<crate::control::live::EndpointView> {
        None
    }

    fn inventory(&self, _: RuleId, _: usize) -> Option<crate::control::live::Inventory> {
        None
    }

    fn explain(&self, _: RuleId, _: &crate::control::live::Request<'_>) -> Option<crate::control::live::Explanation> {
        None
    }

    fn metrics(&self) -> String {
        "# nothing\n".to_owned()
    }

    fn degraded(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

#[tokio::test]
async fn a_rules_whole_life_goes_through_the_real_api() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let about = crate::control::About {
        datapath: "none".to_owned(),
        datapath_detail: String::new(),
        io: "epoll".to_owned(),
        threads: 1,
        api: address,
        tls: false,
        tokens: "none",
        state_dir: None,
        takeover: None,
    };
    let api = crate::control::Api::new(Arc::new(Quiet), about);
    let publish = |_: Vec<Arc<crate::fleet::Rule>>| {};
    api.ready(Arc::new(crate::control::Store::open(None, publish).unwrap()));
    let metrics = Arc::new(crate::telemetry::Metrics::new().unwrap());
    let guard = Arc::new(crate::control::Guard::new(None, false, metrics));
    tokio::spawn(crate::control::serve(listener, api, guard, None, std::future::pending()));
    let flags = ["--port".to_owned(), address.port().to_string()];
    let run =
        async |line: &str| execute_line(line, &flags).await.map_err(|error| (error.exit_code(), error.to_string()));
    let text = async |line: &str| run(line).await.map(|answer| answer.text);

    assert_eq!(text(DOCUMENT_LINE).await, Ok("Success: rule 1 created\n".to_owned()));
    assert_eq!(text(DOCUMENT_LINE).await, Ok("Success: rule 1 unchanged\n".to_owned()));
    let shown = text("kvlb get lb").await.unwrap();
    assert!(shown.contains("| 1  | 10.10.10.254 | 8080 | tcp   |") && !shown.contains("rule 1:"), "{shown}");
    assert!(text("kvlb get lb -o wide").await.unwrap().contains("| 192.0.2.2 | 8000  | 1      | decode"));
    assert_eq!(text("kvlb set ep 192.0.2.1:8000 down").await, Ok("Success: rule 1 changed\n".to_owned()));
    assert_eq!(text("kvlb set ep 192.0.2.9 down").await.map_err(|(code, _)| code), Err(4));
    let join = "kvlb create lb 10.10.10.254 --tcp=8080:8000 --endpoints=192.0.2.3:1 --ep-role=prefill --attachEP";
    assert_eq!(text(join).await, Ok("Success: rule 1 attached\n".to_owned()));
    assert_eq!(text(&join.replace("attach", "detach")).await, Ok("Success: rule 1 detached\n".to_owned()));
    let mismatch = format!("{DOCUMENT_LINE} --kv-engine-type=llamacpp");
    assert_eq!(text(&mismatch).await.map_err(|(code, _)| code), Err(4), "immutable");
    let zero = DOCUMENT_LINE.replace("--kv-block-size=16", "--kv-block-size=0");
    let refused = text(&zero).await;
    assert!(refused.as_ref().is_err_and(|(code, text)| *code == 2 && text.contains("kvBlockSize 0")), "{refused:?}");
    let second = DOCUMENT_LINE.to_owned() + " --model-name=m";
    assert_eq!(text(&second).await, Ok("Success: rule 2 created\n".to_owned()));
    let several = text("kvlb delete lb 10.10.10.254 --tcp=8080").await;
    assert!(several.as_ref().is_err_and(|(code, text)| *code == 4 && text.contains("--model-name")), "{several:?}");
    let one = text("kvlb delete lb 10.10.10.254 --tcp=8080 --model-name=m").await;
    assert_eq!(one, Ok("Success: rule 2 deleted\n".to_owned()));
    assert_eq!(text("kvlb get kvinventory --service-id=1 --ep-idx=0").await.map(|t| t.lines().count()), Ok(3));
    assert_eq!(text("kvlb get kvinventory --service-id=9 --ep-idx=0").await.map_err(|(code, _)| code), Err(4));
    assert!(text("kvlb get kvstatus").await.unwrap().contains("not subscribed"));
    assert!(text("kvlb get ep").await.unwrap().contains("192.0.2.1_tcp_8000"));
    assert_eq!(text("kvlb get metrics").await, Ok("# nothing\n".to_owned()));
    assert!(text("kvlb get status").await.unwrap().contains("in memory only"));
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display().to_string();
    assert!(text(&format!("kvlb save --lb -c {at}")).await.is_ok());
    assert_eq!(text("kvlb delete lb 10.10.10.254 --tcp=8080").await, Ok("Success: rule 1 deleted\n".to_owned()));
    assert_eq!(text(&format!("kvlb apply -l {at}/lbconfig.txt")).await, Ok("Success: rule 3 created\n".to_owned()));
    let restored = text("kvlb get lb -o json").await.unwrap();
    assert!(restored.contains("\"adminState\": \"down\""), "what was set is saved too: {restored}");
}

#[test]
fn what_was_done_before_a_refusal_is_told_with_it() {
    let refused =
        || CliError::Refused { status: 409, code: "conflict".to_owned(), message: "port 81 is taken".to_owned() };
    let body = json!({"serviceArguments": {"port": 81}});
    let told = partly(refused(), &["7".to_owned()], &body);
    assert_eq!((told.to_string().as_str(), told.exit_code()), ("rule 7 is there; of port 81: port 81 is taken", 4));
    assert_eq!(partly(refused(), &[], &body).to_string(), "port 81 is taken");
}

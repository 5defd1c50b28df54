//! Engines are read before they are believed: preflight names each leg that is broken, a rule that engines contradict says so at
//! once, verify shows that the tier works, and a pool needs no rule body at all.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::process::Command;
use std::time::Duration;

use kvlb_tests::engine::{Adapter, Algorithm, Engine, EngineConfig, Version};
use kvlb_tests::harness::kvlb::{Kvlb, binary};
use kvlb_tests::harness::stage::{MODEL, Output, PATIENCE, Stage, at, cached_tokens, engine, rule};
use kvlb_tests::harness::{eventually, until_some};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
/// From a rule's creation to the note that its engines disagree.
const AT_ONCE: Duration = Duration::from_secs(2);

fn prompt(end: &str) -> Value {
    let text = "You are a careful librarian. Answer every question in one short sentence, name the source that you rely on, and \
                say so when you do not know. The library holds novels, plays, atlases and letters.";
    json!({"model": MODEL, "prompt": format!("{text} {end}"), "max_tokens": 1})
}

/// What `kvlb preflight` found.
#[derive(Debug)]
struct Found {
    code: Option<i32>,
    report: Value,
    err: String,
}

impl Found {
    fn read(output: &Output) -> Self {
        let report = serde_json::from_str(&output.out).unwrap_or_default();
        Self { code: output.code, report, err: output.err.clone() }
    }

    /// Legs that are not `ok`, as `endpoint.leg verdict`; those of the pool without a number.
    fn off(&self) -> Vec<String> {
        let line = |who: &str, leg: &Value| {
            let word = |name: &str| leg[name].as_str().unwrap_or_default().to_owned();
            (word("verdict") != "ok").then(|| format!("{who}{} {}", word("leg"), word("verdict")))
        };
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let mut all = Vec::new();
        for endpoint in list(&self.report["endpoints"]) {
            let who = format!("{}.", endpoint["ep_idx"]);
            all.extend(list(&endpoint["legs"]).iter().filter_map(|leg| line(&who, leg)));
        }
        all.extend(list(&self.report["pool"]).iter().filter_map(|leg| line("", leg)));
        all
    }

    fn leg(&self, endpoint: usize, leg: &str) -> Value {
        let legs = self.report["endpoints"][endpoint]["legs"].as_array().cloned().unwrap_or_default();
        legs.into_iter().find(|row| row["leg"] == leg).unwrap_or_default()
    }
}

fn preflight(stage: &Stage, args: &[&str]) -> Found {
    let tokenizers = stage.dir().join("tokenizers").display().to_string();
    let by_url = args.first().is_some_and(|first| first.contains("://"));
    let mut all = vec!["preflight"];
    all.extend(args);
    all.extend(["-o", "json"]);
    if by_url {
        all.extend(["--tokenizer-dir", &tokenizers]);
    }
    Found::read(&cli(stage, &all, Some("0")))
}

/// The CLI with `LLB_KV_NONE_HASH_SEED`, or without it.
fn cli(stage: &Stage, args: &[&str], seed: Option<&str>) -> Output {
    let program = binary("kvlb").unwrap();
    let seed = seed.map(|seed| ("LLB_KV_NONE_HASH_SEED", seed));
    let output = stage.netns().run(|| Command::new(program).args(args).envs(seed).output()).unwrap().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Output { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

fn url(engine: &Engine) -> String {
    format!("http://{}", engine.addresses().http)
}

/// Lets an engine announce blocks, past kvlb.
async fn warm(stage: &Stage, engine: &Engine) {
    let answer = stage.post(engine.addresses().http, COMPLETIONS, &prompt("Begin.")).await.unwrap();
    assert_eq!(answer.head.status, 200);
}

#[tokio::test]
async fn preflight_passes_only_where_every_leg_holds_and_sends_no_completion() {
    let Some(stage) = Stage::new("holds").unwrap() else { return };
    let engines = stage.engines(11, 2, &engine()).await.unwrap();
    let urls: Vec<_> = engines.iter().map(url).collect();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    let cold = preflight(&stage, &urls);
    assert_eq!(cold.off(), ["0.seed unknown", "1.seed unknown"], "{cold:?}");
    assert_eq!(cold.code, Some(6), "what cannot be told does not pass in silence");
    assert!(cold.leg(0, "seed")["advice"].as_str().unwrap().contains("printenv PYTHONHASHSEED"));
    let allowed = preflight(&stage, &[&urls[..], &["--allow-unknown"]].concat());
    assert_eq!(allowed.code, Some(0));
    let asked = |engine: &Engine| engine.requests().iter().filter(|seen| seen.path.starts_with("/v1/c")).count();
    assert_eq!(engines.iter().map(asked).sum::<usize>(), 0, "no model has worked");

    for engine in &engines {
        warm(&stage, engine).await;
    }
    let warm = preflight(&stage, &urls);
    assert_eq!((warm.code, warm.off(), &warm.report["verdict"]), (Some(0), vec![], &json!("ok")), "{warm:?}");
    let text = cli(&stage, &["preflight", urls[0], "--tokenizer-dir", "/nowhere"], None);
    assert_eq!(text.code, Some(6));
    assert!(text.out.contains("| tokenizer") && text.out.ends_with("verdict: broken\n"), "{}", text.out);

    // The same by rule, with the daemon's own eyes; and nothing of it changes the rule.
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let id = kvlb.create(&rule(8080, &engines, &json!({"name": "chat"}))).await.unwrap();
    kvlb.subscribed(id).await.unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();
    kvlb.settled(id, &engines).await.unwrap();
    let before = kvlb.rules().await.unwrap()[0]["serviceArguments"].clone();
    for which in [id.to_string().as_str(), "chat"] {
        let found = preflight(&stage, &[which]);
        assert_eq!((found.code, found.off()), (Some(0), vec![]), "{found:?}");
    }
    assert_eq!(kvlb.rules().await.unwrap()[0]["serviceArguments"], before);
    assert_eq!(preflight(&stage, &["nobody"]).code, Some(4));
    assert_eq!(preflight(&stage, &["1", "--kv-block-size=32"]).code, Some(2));
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn each_broken_leg_is_named_with_both_sides() {
    let Some(stage) = Stage::new("broken").unwrap() else { return };
    let lora = |path: &str| EngineConfig {
        adapters: vec![Adapter { name: "a".to_owned(), path: path.to_owned() }],
        ..engine()
    };
    let cases: Vec<(EngineConfig, &[&str])> = vec![
        (EngineConfig { python_hash_seed: Some("42".to_owned()), ..engine() }, &["0.seed broken"]),
        (
            EngineConfig { prefix_caching_hash_algo: Algorithm::Sha256, ..engine() },
            &["0.algorithm broken", "0.seed unknown"],
        ),
        (EngineConfig { block_size: 32, ..engine() }, &["0.block_size broken", "0.seed unknown"]),
        (EngineConfig { no_prefix_caching: true, ..engine() }, &["0.seed unknown", "0.prefix_caching broken"]),
        (
            EngineConfig { no_events: true, ..engine() },
            &["0.seed unknown", "0.events broken", "0.event_port broken", "0.replay warn"],
        ),
        (EngineConfig { events_port: 5600, ..engine() }, &["0.seed unknown", "0.event_port broken", "0.replay warn"]),
        (EngineConfig { no_replay: true, ..engine() }, &["0.seed unknown", "0.replay warn"]),
        (EngineConfig { tokenizer: None, ..engine() }, &["0.tokenizer broken", "0.chat_template broken"]),
        (EngineConfig { model: "other".to_owned(), ..engine() }, &["0.tokenizer broken", "0.chat_template broken"]),
        (lora("/a"), &[]),
    ];
    for (number, (config, expected)) in (11..).zip(cases) {
        let engine = stage.engine(at(number, config)).await.unwrap();
        if engine.name() != "engine-19" {
            warm(&stage, &engine).await;
        }
        let found = preflight(&stage, &[&url(&engine), "--wait=2"]);
        let off: Vec<_> = found.off().into_iter().filter(|leg| number != 19 || !leg.contains("seed")).collect();
        assert_eq!(off, expected, "{}: {found:#?}", engine.name());
        let passes = expected.is_empty();
        assert_eq!(found.code == Some(0), passes, "{found:?}");
    }
}

#[tokio::test]
async fn a_pool_that_is_not_alike_is_told() {
    let Some(stage) = Stage::new("pool").unwrap() else { return };
    let adapters = |path: &str| vec![Adapter { name: "a".to_owned(), path: path.to_owned() }];
    let one = stage.engine(at(11, EngineConfig { adapters: adapters("/a"), ..engine() })).await.unwrap();
    let other =
        EngineConfig { adapters: adapters("/b"), max_model_len: 1024, version: Version::new(33, 0), ..engine() };
    let other = stage.engine(at(12, other)).await.unwrap();
    warm(&stage, &one).await;
    warm(&stage, &other).await;
    let found = preflight(&stage, &[&url(&one), &url(&other)]);
    assert_eq!(found.off(), ["pool_version broken", "pool_max_model_len broken", "pool_lora broken"], "{found:?}");
    assert_eq!(found.code, Some(6));
}

#[tokio::test]
async fn an_old_engine_and_one_that_is_gone_are_told_apart() {
    let Some(stage) = Stage::new("old").unwrap() else { return };
    let old = EngineConfig { version: Version::new(18, 0), ..engine() };
    let old = stage.engine(at(11, old)).await.unwrap();
    warm(&stage, &old).await;
    let found = preflight(&stage, &[&url(&old)]);
    assert_eq!((found.code, found.off()), (Some(0), vec![]), "{found:?}");
    assert_eq!(found.leg(0, "events")["engine"], "on (heard)");
    assert_eq!(found.leg(0, "version")["ours"], "extra keys untagged");
    let gone = preflight(&stage, &["http://127.0.0.99:8000", "--wait=1"]);
    assert_eq!((gone.code, gone.off()), (Some(5), vec!["0.http unreachable".to_owned()]), "{gone:?}");
    assert_eq!(preflight(&stage, &["https://127.0.0.11:8000"]).code, Some(2));
    let both = preflight(&stage, &[&url(&old), "http://127.0.0.99:8000", "--wait=1", "--kv-block-size=32"]);
    assert_eq!(both.code, Some(6), "a broken leg counts more than one that is gone: {both:?}");
    drop(both.err);
}

#[tokio::test]
async fn a_rule_that_engines_contradict_is_accepted_and_says_so_at_once() {
    let Some(stage) = Stage::new("says").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let wrong = EngineConfig { block_size: 32, prefix_caching_hash_algo: Algorithm::XxhashCbor, ..engine() };
    let engines = [stage.engine(at(11, wrong)).await.unwrap()];
    let body = rule(8080, &engines, &json!({}));
    let (status, answer) = kvlb.api("POST", "/netlox/v1/config/loadbalancer", Some(&body)).await.unwrap();
    assert_eq!((status, &answer["change"]), (200, &json!("created")));
    let said = answer["notes"].to_string();
    assert!(
        said.contains("block_size: engine 32, rule 16") && said.contains("algorithm: engine xxhash_cbor"),
        "{answer}"
    );
    let id = answer["id"].as_u64().unwrap();
    let noted = |status: &Value| status["notes"].to_string().contains("block_size");
    let status = kvlb.status_when(AT_ONCE, (id, 0), noted).await.unwrap();
    assert_eq!(status["contract"], "unverified", "before any event");
    let wide = stage.cli(&["get", "lb", "-o", "wide"]).unwrap().ok().unwrap();
    assert!(wide.contains("rule 1: endpoint 0 (127.0.0.11:8000): block_size: engine 32, rule 16"), "{wide}");

    // One that comes up later is noted when it does, and one that agrees has no notes.
    let later = at(12, EngineConfig { block_size: 8, ..engine() });
    let body = json!({"serviceArguments": {"externalIP": "10.10.10.254", "port": 8081, "mode": 4, "kvExactMode": 3},
                      "endpoints": [{"endpointIP": "127.0.0.12", "targetPort": 8000}]});
    let (_, answer) = kvlb.api("POST", "/netlox/v1/config/loadbalancer", Some(&body)).await.unwrap();
    assert!(answer["notes"].is_null(), "{answer}");
    let _later = stage.engine(later).await.unwrap();
    let id = answer["id"].as_u64().unwrap();
    kvlb.status_when(PATIENCE, (id, 0), noted).await.unwrap();
    let good = [stage.engine(at(13, engine())).await.unwrap()];
    let (_, answer) =
        kvlb.api("POST", "/netlox/v1/config/loadbalancer", Some(&rule(8082, &good, &json!({})))).await.unwrap();
    assert!(answer["notes"].is_null(), "{answer}");
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn verify_passes_where_the_tier_works_and_names_the_step_that_fails() {
    let Some(stage) = Stage::new("verify").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let engines = stage.engines(11, 2, &engine()).await.unwrap();
    let id = kvlb.create(&rule(8080, &engines, &json!({"name": "chat"}))).await.unwrap();
    kvlb.subscribed(id).await.unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();
    for _ in 0..2 {
        let verified = stage.cli(&["verify", "chat", "-o", "json"]).unwrap();
        let report: Value = serde_json::from_str(&verified.out).unwrap();
        assert_eq!((verified.code, &report["verdict"]), (Some(0), &json!("ok")), "{verified:?}");
        assert_eq!(report["steps"].as_array().unwrap().len(), 8);
        assert!(report["steps"][7]["detail"].as_str().unwrap().contains("from its cache"), "{report}");
        assert!(verified.err.contains("7/8 warm request: ok"), "{}", verified.err);
    }
    let at_other_place = stage.cli(&["verify", "1", "--address", "127.0.0.1:9"]).unwrap();
    assert_eq!(at_other_place.code, Some(5), "{at_other_place:?}");
    assert_eq!(stage.cli(&["verify", "nobody"]).unwrap().code, Some(4));

    let failing = |rule: u64, step: &str, words: &str| {
        let output = stage.cli(&["verify", &rule.to_string(), "--wait=2"]).unwrap();
        assert_eq!(output.code, Some(6), "{output:?}");
        let failed = format!(" {step}: FAILED: ");
        let line = output.err.lines().last().unwrap().to_owned();
        assert!(line.contains(&failed) && line.contains(words), "{output:?}");
    };
    let off = kvlb.create(&rule(8081, &engines, &json!({"kvExactMode": 0}))).await.unwrap();
    failing(off, "rule", "kvExactMode is 0");
    let deaf = kvlb.create(&rule(8082, &engines, &json!({"kvZmqPort": 5999}))).await.unwrap();
    failing(deaf, "events", "preflight");
    let gone = json!({"serviceArguments": {"externalIP": "10.10.10.254", "port": 8083, "mode": 4, "kvExactMode": 3},
                      "endpoints": [{"endpointIP": "127.0.0.99", "targetPort": 8000}]});
    let gone = kvlb.create(&gone).await.unwrap();
    kvlb.api("GET", "/netlox/v1/status", None).await.unwrap();
    eventually(PATIENCE, "the probe says down", async || {
        kvlb.rule(gone).await.is_ok_and(|rule| rule["endpoints"][0]["state"] == "inactive")
    })
    .await
    .unwrap();
    failing(gone, "endpoints", "127.0.0.99:8000");
    let parity = json!({"kvKeying": "parity", "kvBlockSize": 32});
    let wrong = kvlb.create(&rule(8084, &engines, &parity)).await.unwrap();
    kvlb.status_when(PATIENCE, (wrong, 0), |status| status["contract"] == "mismatch").await.ok();
    failing(wrong, "contract", "block_size");
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_pool_without_a_rule_body_is_served_at_once_and_by_blocks_as_soon_as_its_engines_answer() {
    let Some(stage) = Stage::new("zero").unwrap() else { return };
    let unflagged = EngineConfig {
        prefix_caching_hash_algo: Algorithm::Sha256,
        python_hash_seed: None,
        block_size: 32,
        ..engine()
    };
    let first = stage.engine(at(11, EngineConfig { events_port: 5600, ..unflagged.clone() })).await.unwrap();
    let args = [
        "--listen",
        "10.10.10.254:8080",
        "--endpoint",
        "http://127.0.0.11:8000",
        "--endpoint",
        "http://127.0.0.12:8000",
    ];
    let mut config = stage.config(&args);
    config.env.clear();
    let kvlb = Kvlb::start(config).await.unwrap();
    let answer = stage.ask(8080, COMPLETIONS, &prompt("Begin.")).await.unwrap();
    assert_eq!(answer.head.status, 200, "served at once");
    let made = async || {
        let rule = kvlb.rules().await.ok()?.into_iter().next()?;
        (rule["serviceArguments"]["kvExactMode"] == 3).then_some(rule)
    };
    let rule = until_some(PATIENCE, "the engine has said what it is", made).await.unwrap();
    let service = &rule["serviceArguments"];
    assert_eq!((&service["name"], &service["kvBlockSize"]), (&json!("zero-touch"), &json!(32)));
    assert_eq!((&service["kvHashAlgo"], &service["kvZmqPort"]), (&json!("sha256"), &json!(5600)));
    assert_eq!(service["kvReplayPort"], 6600);
    let id = rule["id"].as_u64().unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();

    // The second comes up later, on ports of its own.
    let second = stage.engine(at(12, unflagged)).await.unwrap();
    kvlb.subscribed(id).await.unwrap();
    eventually(PATIENCE, "the second is there", async || {
        kvlb.rule(id).await.is_ok_and(|rule| rule["endpoints"][1]["kvZmqPort"] == 5557)
    })
    .await
    .unwrap();
    let verified = stage.cli(&["verify", "zero-touch"]).unwrap();
    assert_eq!(verified.code, Some(0), "{verified:?}\n{}", kvlb.log());
    let cold = stage.ask(8080, COMPLETIONS, &prompt("One.")).await.unwrap();
    let warm = stage.ask(8080, COMPLETIONS, &prompt("Two.")).await.unwrap();
    assert_eq!((warm.head.status, cold.head.status), (200, 200));
    assert!(cached_tokens(&warm).is_some_and(|cached| cached >= 32), "{:?}", cached_tokens(&warm));
    assert!(kvlb.log().contains("zero-touch: routing by blocks"), "{}", kvlb.log());
    assert!(rule["notes"].to_string().contains("not kept over restarts"), "{rule}");
    let path = stage.dir().join("state/rules.json");
    let kept: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(kept["rules"], json!([]), "not kept");
    drop((first, second));
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn an_operators_rule_is_not_replaced_and_an_engine_without_events_is_served_in_turn() {
    let Some(stage) = Stage::new("yields").unwrap() else { return };
    let engines = [stage.engine(at(11, EngineConfig { no_events: true, ..engine() })).await.unwrap()];
    let args = ["--listen", "10.10.10.254:8080", "--endpoint", "127.0.0.11:8000"];
    let kvlb = stage.kvlb(&args).await.unwrap();
    eventually(PATIENCE, "the missing events are told", async || kvlb.log().contains("publishes no events"))
        .await
        .unwrap();
    assert_eq!(stage.ask(8080, COMPLETIONS, &prompt("Begin.")).await.unwrap().head.status, 200);
    let own = rule(8080, &engines, &json!({"name": "mine"}));
    let (_, answer) = kvlb.api("POST", "/netlox/v1/config/loadbalancer", Some(&own)).await.unwrap();
    assert_eq!(answer["change"], "replaced");
    eventually(PATIENCE, "the rule is let go", async || kvlb.log().contains("it is let go")).await.unwrap();
    kvlb.stop().await.unwrap();
    let kvlb = stage.kvlb(&args).await.unwrap();
    assert!(kvlb.log().contains("an operator's rule is there"), "{}", kvlb.log());
    let rules = kvlb.rules().await.unwrap();
    assert_eq!((rules.len(), &rules[0]["serviceArguments"]["name"]), (1, &json!("mine")));
    kvlb.stop().await.unwrap();
}

//! A contract that does not hold is named by its leg within five seconds of the first event that shows it, everywhere an operator
//! looks; and one that is mended is good again.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::time::Duration;

use kvlb_tests::engine::{Algorithm, Engine, EngineConfig};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::stage::{MODEL, Stage, at, engine, rule};
use serde_json::{Value, json};

/// From the first event without a parent to the verdict.
const PROMISED: Duration = Duration::from_secs(5);
const COMPLETIONS: &str = "/v1/completions";

/// An engine that differs from the rule, and what is said of it.
struct Case {
    number: u8,
    config: EngineConfig,
    leg: &'static str,
    /// Words that the detail must have: the engine's own value, and what to change.
    detail: &'static [&'static str],
}

fn cases() -> Vec<Case> {
    let with = |algorithm: Algorithm, seed: Option<&str>| EngineConfig {
        prefix_caching_hash_algo: algorithm,
        python_hash_seed: seed.map(str::to_owned),
        ..engine()
    };
    let case = |number, config, leg, detail| Case { number, config, leg, detail };
    vec![
        case(
            11,
            EngineConfig { block_size: 32, ..engine() },
            "block_size",
            &["engine block size 32", "kvBlockSize 16"],
        ),
        case(12, EngineConfig { block_size: 8, byte_hashes: true, ..engine() }, "block_size", &["engine block size 8"]),
        case(13, with(Algorithm::XxhashCbor, Some("0")), "algorithm", &["engine algorithm xxhash_cbor", "kvHashAlgo"]),
        case(14, with(Algorithm::Sha256, Some("0")), "algorithm", &["engine algorithm sha256,", "sha256_cbor"]),
        // vLLM without any flag: pickle, and no seed.
        case(15, with(Algorithm::Sha256, None), "algorithm", &["engine algorithm sha256,", "sha256_cbor"]),
        case(16, with(Algorithm::Xxhash, Some("0")), "algorithm", &["engine algorithm xxhash,"]),
        case(17, with(Algorithm::Sha256Cbor, Some("42")), "seed", &["PYTHONHASHSEED \"42\"", "\"0\""]),
        case(18, with(Algorithm::Sha256Cbor, None), "seed", &["PYTHONHASHSEED unset", "\"0\""]),
        // A seed that nobody can guess; the engine's own label confirms the algorithm.
        case(19, with(Algorithm::Sha256Cbor, Some("6502")), "seed", &["PYTHONHASHSEED", "LLB_KV_NONE_HASH_SEED"]),
    ]
}

#[tokio::test]
async fn a_broken_leg_is_named_wherever_an_operator_looks() {
    let Some(stage) = Stage::new("legs").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let healthy = Served::new(&stage, &kvlb, at(31, engine())).await;
    let mut broken = Vec::new();
    for case in cases() {
        broken.push((Served::new(&stage, &kvlb, at(case.number, case.config)).await, case.leg, case.detail));
    }
    for (served, leg, detail) in &broken {
        served.ask(&stage).await;
        let status = kvlb.status_when(PROMISED, (served.id, 0), |status| status["leg"] == *leg).await.unwrap();
        assert_eq!(status["contract"], "mismatch");
        let told = status["detail"].as_str().unwrap();
        assert!(detail.iter().all(|words| told.contains(words)), "{told}");
    }
    healthy.ask(&stage).await;
    kvlb.status_when(PROMISED, (healthy.id, 0), |status| status["contract"] == "verified").await.unwrap();
    healthy.ask(&stage).await;
    kvlb.status_when(PROMISED, (healthy.id, 0), |status| status["contract"] == "proved_by_request").await.unwrap();

    let metrics = kvlb.metrics().await.unwrap();
    let rules = stage.cli(&["get", "lb"]).unwrap().ok().unwrap();
    let wide = stage.cli(&["get", "lb", "-o", "wide"]).unwrap().ok().unwrap();
    let statuses = stage.cli(&["get", "kvstatus"]).unwrap();
    assert_eq!(statuses.code, Some(6), "{statuses:?}");
    for (served, leg, detail) in &broken {
        let series =
            format!("kvlb_contract_state{{ep_idx=\"0\",leg=\"{leg}\",service=\"{}\",state=\"mismatch\"}}", served.id);
        assert!(metrics.value(&series) > 0.0, "{series}: {:?}", metrics.0);
        for table in [&rules, &wide, &statuses.out] {
            assert!(line_of(table, served.id).contains(&format!("mismatch: {leg}")), "{table}");
        }
        let sentence = format!("rule {} endpoint 0: ", served.id);
        let line = statuses.out.lines().find(|line| line.starts_with(&sentence)).unwrap();
        assert!(detail.iter().all(|words| line.contains(words)), "{line}");
        let one = stage.cli(&["get", "kvstatus", &format!("--service-id={}", served.id)]).unwrap();
        assert_eq!(one.code, Some(6), "{one:?}");
    }
    let good =
        format!("kvlb_contract_state{{ep_idx=\"0\",leg=\"\",service=\"{}\",state=\"proved_by_request\"}}", healthy.id);
    assert!(metrics.value(&good) > 0.0, "{:?}", metrics.0);
    assert!(line_of(&rules, healthy.id).contains("proved_by_request"), "{rules}");
    assert_eq!(stage.cli(&["get", "kvstatus", &format!("--service-id={}", healthy.id)]).unwrap().code, Some(0));
    // A mirror whose names mean nothing answers no request.
    let hits: Vec<_> = metrics.family("loxilb_pd_kv_tier15_hits_total").collect();
    assert_eq!(hits, [("loxilb_pd_kv_tier15_hits_total{ep_idx=\"0\"}", 1.0)]);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_seed_that_nobody_can_guess_is_unknown_until_the_engine_says_its_algorithm() {
    let Some(stage) = Stage::new("unknown").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let config = at(11, EngineConfig { python_hash_seed: Some("6502".to_owned()), ..engine() });
    let engine = stage.engine(config).await.unwrap();
    // Its HTTP side is away when kvlb comes, as that of an engine that still loads its model. Its events are there by replay.
    stage.post(engine.addresses().http, COMPLETIONS, &prompt()).await.unwrap();
    engine.faults().set(|plan| plan.refuse_http = true);
    let id = kvlb.create(&rule(8080, std::slice::from_ref(&engine), &json!({"monitor": false}))).await.unwrap();
    let status = kvlb.status_when(PROMISED, (id, 0), |status| status["leg"] == "unknown").await.unwrap();
    assert!(status["detail"].as_str().unwrap().contains("6502") || status["detail"].as_str().unwrap().contains("seed"));
    engine.faults().clear();
    kvlb.status_when(PROMISED, (id, 0), |status| status["leg"] == "seed").await.unwrap();
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn an_engine_that_comes_back_with_the_right_flags_is_verified_again() {
    let Some(stage) = Stage::new("mended").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let wrong = EngineConfig { python_hash_seed: Some("42".to_owned()), ..engine() };
    let mut served = Served::new(&stage, &kvlb, at(11, wrong)).await;
    served.ask(&stage).await;
    kvlb.status_when(PROMISED, (served.id, 0), |status| status["leg"] == "seed").await.unwrap();
    served.engine.kill().await;
    let Served { id, port, engine: gone } = served;
    drop(gone);
    let served = Served { id, port, engine: stage.engine(at(11, engine())).await.unwrap() };
    kvlb.subscribed(id).await.unwrap();
    // A publisher learns of a subscription a moment after the connection, and does not say so.
    let heard = async || served.engine.published().subscribers > 0;
    eventually(PROMISED, "the engine has a subscriber", heard).await.unwrap();
    served.ask(&stage).await;
    // A request that came before the announcement was counted proves it by itself.
    let holds = |status: &Value| status["contract"] == "verified" || status["contract"] == "proved_by_request";
    let status = kvlb.status_when(PROMISED, (id, 0), holds).await.unwrap();
    assert!(status["leg"].is_null() && status["detail"].is_null() && status["restarts"] == 1, "{status}");
    served.ask(&stage).await;
    kvlb.status_when(PROMISED, (id, 0), |status| status["contract"] == "proved_by_request").await.unwrap();
    assert_eq!(stage.cli(&["get", "kvstatus"]).unwrap().code, Some(0));
    kvlb.stop().await.unwrap();
}

/// An engine behind a rule of its own.
struct Served {
    id: u64,
    port: u16,
    engine: Engine,
}

impl Served {
    async fn new(stage: &Stage, kvlb: &Kvlb, config: EngineConfig) -> Self {
        let engine = stage.engine(config).await.unwrap();
        let number = engine.name().trim_start_matches("engine-").parse::<u16>().unwrap();
        let port = 8000 + number;
        let id = kvlb.create(&rule(port, std::slice::from_ref(&engine), &json!({}))).await.unwrap();
        kvlb.subscribed(id).await.unwrap();
        kvlb.tokenizes(id, MODEL).await.unwrap();
        Self { id, port, engine }
    }

    async fn ask(&self, stage: &Stage) {
        let answer = stage.ask(self.port, COMPLETIONS, &prompt()).await.unwrap();
        assert_eq!((answer.head.status, answer.engine()), (200, self.engine.name()));
    }
}

fn prompt() -> Value {
    let text = "You are a careful librarian. Answer every question in one short sentence, name the source that you rely on, and \
                say so when you do not know. The library holds novels, plays, atlases and letters.";
    json!({"model": MODEL, "prompt": text, "max_tokens": 2})
}

/// The line of a table that begins with a rule's number.
fn line_of(table: &str, id: u64) -> &str {
    let first =
        |line: &&str| line.split(|c: char| !c.is_ascii_digit()).find(|word| !word.is_empty()) == Some(&id.to_string());
    let begins =
        |line: &&str| line.trim_start_matches(|c: char| !c.is_ascii_alphanumeric()).starts_with(&id.to_string());
    table.lines().filter(begins).find(first).unwrap_or_default()
}

//! The document's metric families (section 10.2): their labels, what moves them, and when their series go; and the form of the page.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test says by a panic what went wrong")]
#![expect(clippy::float_cmp, reason = "counts and gauges here are whole numbers")]

use std::collections::{BTreeMap, BTreeSet};

use kvlb_tests::engine::EngineConfig;
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::kvlb::Kvlb;
use kvlb_tests::harness::stage::{MODEL, Metrics, PATIENCE, Stage, at, engine, rule, vip};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
const MISSES: &str = "loxilb_pd_kv_tier15_miss_reason_total";
const FALLTHROUGH: &str = "loxilb_pd_kv_tier15_fallthrough_total";

#[tokio::test]
async fn each_family_of_the_document_has_its_labels_and_moves() {
    let Some(stage) = Stage::new("families").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let engines = stage.engines(11, 2, &engine()).await.unwrap();
    let id = kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    kvlb.subscribed(id).await.unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();
    let service = id.to_string();
    let before = kvlb.metrics().await.unwrap();
    assert_eq!(labels(&before, "loxilb_pd_kv_blocks"), pairs("ep_idx", &["0", "1"], &service));
    let sockets = pairs("ep", &["127.0.0.11:8000", "127.0.0.12:8000"], &service);
    for family in ["connected", "reconnect_total", "recv_error_total"] {
        assert_eq!(labels(&before, &format!("loxilb_kv_subscriber_{family}")), sockets);
    }
    assert_eq!(before.sum("loxilb_kv_subscriber_connected"), 2.0);
    assert_eq!(before.sum("loxilb_pd_kv_blocks"), 0.0);
    // Cold, then warm.
    let owner = stage.ask(8080, COMPLETIONS, &body(0)).await.unwrap().engine().to_owned();
    kvlb.settled(id, &engines).await.unwrap();
    stage.ask(8080, COMPLETIONS, &body(0)).await.unwrap();
    let owner = engines.iter().position(|engine| engine.name() == owner).unwrap();
    let after = kvlb.metrics().await.unwrap();
    let hits = format!("{HITS}{{ep_idx=\"{owner}\"}}");
    assert_eq!(after.moved(&before, HITS), [(hits.clone(), 1.0)]);
    assert_eq!(after.moved(&before, MISSES), [(format!("{MISSES}{{reason=\"no_worker\"}}"), 1.0)]);
    assert_eq!(after.value(FALLTHROUGH) - before.value(FALLTHROUGH), 1.0);
    let held = f64::from(u32::try_from(engines[owner].blocks().len()).unwrap());
    assert_eq!(after.value(&format!("loxilb_pd_kv_blocks{{ep_idx=\"{owner}\",service=\"{service}\"}}")), held);
    // A cut connection is an error and then a reconnect; the blocks stay.
    let of_owner = |family: &str| format!("{family}{{ep=\"127.0.0.{}:8000\",service=\"{service}\"}}", 11 + owner);
    engines[owner].faults().disconnect_events();
    let reconnect = of_owner("loxilb_kv_subscriber_reconnect_total");
    eventually(PATIENCE, "a reconnect is counted", async || kvlb.metric(&reconnect).await.unwrap() == 1.0)
        .await
        .unwrap();
    assert!(kvlb.metric(&of_owner("loxilb_kv_subscriber_recv_error_total")).await.unwrap() >= 1.0);
    kvlb.subscribed(id).await.unwrap();
    engines[owner].faults().set(|plan| plan.refuse_events = true);
    engines[owner].faults().disconnect_events();
    let connected = of_owner("loxilb_kv_subscriber_connected");
    eventually(PATIENCE, "the socket is down", async || kvlb.metric(&connected).await.unwrap() == 0.0).await.unwrap();
    engines[owner].faults().clear();
    eventually(PATIENCE, "the socket is up", async || kvlb.metric(&connected).await.unwrap() == 1.0).await.unwrap();
    // Series of a rule go with it; what was counted over all rules stays.
    assert_eq!(kvlb.api("DELETE", "/netlox/v1/config/loadbalancer/all", None).await.unwrap().0, 200);
    let last = kvlb.metrics().await.unwrap();
    let of_rule: Vec<_> = last.0.keys().filter(|series| series.contains("service=\"")).collect();
    assert!(of_rule.is_empty(), "{of_rule:?}");
    assert_eq!((last.value(&hits), last.value(FALLTHROUGH)), (after.value(&hits), after.value(FALLTHROUGH)));
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn each_guard_counts_its_own_reason() {
    let Some(stage) = Stage::new("guards").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let engines = stage.engines(11, 2, &engine()).await.unwrap();
    let id = kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    kvlb.create(&rule(8081, &engines, &json!({"kvExactMode": 0}))).await.unwrap();
    kvlb.subscribed(id).await.unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();
    let guard = async |port: u16, text: &str, reason: &str, falls_through: bool| {
        let before = kvlb.metrics().await.unwrap();
        let headers = [("Content-Type", "application/json")];
        stage.exchange(vip(port), ("POST", COMPLETIONS), &headers, text.as_bytes()).await.unwrap();
        let after = kvlb.metrics().await.unwrap();
        assert_eq!(after.moved(&before, MISSES), [(format!("{MISSES}{{reason=\"{reason}\"}}"), 1.0)], "{text}");
        assert_eq!(after.value(FALLTHROUGH) - before.value(FALLTHROUGH), f64::from(u8::from(falls_through)), "{text}");
        assert_eq!(after.moved(&before, HITS), [], "{text}");
    };
    let named = |rest: &str| format!("{{\"model\":\"{MODEL}\"{rest}}}");
    guard(8081, &named(",\"prompt\":\"x\""), "mode_off", false).await;
    guard(8080, &named(",\"max_tokens\":1"), "text_empty", true).await;
    guard(8080, "not json", "model_empty", true).await;
    guard(8080, "{\"prompt\":\"x\"}", "model_empty", true).await;
    guard(8080, "{\"model\":\"nobody/staged\",\"prompt\":\"x\"}", "tokenize", true).await;
    guard(8080, &body(0).to_string(), "no_worker", true).await;
    guard(8080, &named(",\"prompt\":\"x\""), "shallow", true).await;
    // The owner of a prompt's blocks is taken out of service.
    kvlb.settled(id, &engines).await.unwrap();
    let owner = stage.ask(8080, COMPLETIONS, &body(0)).await.unwrap().engine().replace("engine-", "127.0.0.");
    let down = json!({"hostName": owner, "epPort": 8000, "epProto": "tcp", "state": "red"});
    assert_eq!(kvlb.api("POST", "/netlox/v1/config/endpointhoststate", Some(&down)).await.unwrap().0, 200);
    guard(8080, &body(0).to_string(), "excluded", true).await;
    // A contract that cannot be computed: xxhash without a seed.
    drop(kvlb);
    let config = stage.config(&[]);
    let env = config.env.into_iter().filter(|(name, _)| name != "LLB_KV_NONE_HASH_SEED").collect();
    let kvlb = Kvlb::start(kvlb_tests::harness::kvlb::KvlbConfig { env, ..config }).await.unwrap();
    kvlb.create(&rule(8082, &engines, &json!({"kvHashAlgo": "xxhash_cbor", "kvKeying": "parity"}))).await.unwrap();
    eventually(PATIENCE, "the contract is asked", async || {
        stage.ask(8082, COMPLETIONS, &body(1)).await.unwrap();
        kvlb.metrics().await.unwrap().value(&format!("{MISSES}{{reason=\"hashes\"}}")) > 0.0
    })
    .await
    .unwrap();
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn the_page_is_well_formed_and_scrapes_at_once_agree() {
    let Some(stage) = Stage::new("page").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let engines = stage.engines(11, 2, &engine()).await.unwrap();
    let broken = [stage.engine(at(13, EngineConfig { block_size: 32, ..engine() })).await.unwrap()];
    let id = kvlb.create(&rule(8080, &engines, &json!({}))).await.unwrap();
    let other = kvlb.create(&rule(8081, &broken, &json!({"model_name": MODEL}))).await.unwrap();
    kvlb.subscribed(id).await.unwrap();
    kvlb.subscribed(other).await.unwrap();
    kvlb.tokenizes(id, MODEL).await.unwrap();
    for number in 0..4 {
        stage.ask(8080, COMPLETIONS, &body(number)).await.unwrap();
        stage.ask(8081, COMPLETIONS, &body(number)).await.unwrap();
    }
    kvlb.settled(id, &engines).await.unwrap();
    kvlb.settled(other, &broken).await.unwrap();
    for path in ["/metrics", "/netlox/v1/metrics"] {
        let answer = kvlb.ask("GET", path, None).await.unwrap();
        assert!(
            answer.head.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"),
            "{:?}",
            answer.head
        );
        check_form(&answer.body.text());
    }
    // Counters that are read from live state at a scrape are not counted twice by two at once.
    let stored = |page: &Metrics| page.sum("kvlb_event_stream_total") + page.sum("kvlb_kernel_steered_total");
    let quiet = stored(&kvlb.metrics().await.unwrap());
    let mut scrapes = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let mut client = kvlb.connect(kvlb.api_address()).await.unwrap();
        scrapes.spawn(async move {
            let mut pages = Vec::new();
            for _ in 0..25 {
                client.request("GET", "/metrics", &[], b"").await.unwrap();
                pages.push(client.answer().await.unwrap().body.text());
            }
            pages
        });
    }
    for pages in scrapes.join_all().await {
        for page in pages {
            assert_eq!(stored(&Metrics::read(&page)), quiet);
        }
    }
    kvlb.stop().await.unwrap();
}

/// What `promtool check metrics` wants of a page, and that no series comes twice.
fn check_form(page: &str) {
    let (mut help, mut types) = (BTreeSet::new(), BTreeMap::new());
    let (mut series, mut family) = (BTreeSet::new(), String::new());
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, text) = rest.split_once(' ').unwrap();
            assert!(!text.trim().is_empty() && help.insert(name.to_owned()), "{line}");
            name.clone_into(&mut family);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(name == family && types.insert(name.to_owned(), kind.to_owned()).is_none(), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'), "{line}");
        } else {
            let (labelled, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}"));
            let value: f64 = value.parse().unwrap();
            let name = labelled.split('{').next().unwrap();
            let kind = &types[&family];
            let suffixes: &[&str] = if kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            assert!(suffixes.iter().any(|suffix| name == format!("{family}{suffix}")), "{line} in {family}");
            assert!(kind != "counter" || value >= 0.0, "{line}");
            assert!(series.insert(labelled.to_owned()), "twice: {line}");
        }
    }
    assert_eq!(help.len(), types.len());
    for family in [HITS, MISSES, FALLTHROUGH, "loxilb_pd_kv_blocks", "loxilb_kv_subscriber_connected"] {
        assert!(types.contains_key(family), "{family} is missing");
    }
}

/// The labels of a family's series, as they are written.
fn labels(page: &Metrics, family: &str) -> Vec<String> {
    page.family(family).map(|(series, _)| series[family.len()..].to_owned()).collect()
}

fn pairs(name: &str, values: &[&str], service: &str) -> Vec<String> {
    values.iter().map(|value| format!("{{{name}=\"{value}\",service=\"{service}\"}}")).collect()
}

fn body(number: usize) -> Value {
    let prompt =
        format!("Prompt {number}. You are a careful librarian. Answer in one short sentence and name your source.");
    json!({"model": MODEL, "prompt": prompt, "max_tokens": 1})
}

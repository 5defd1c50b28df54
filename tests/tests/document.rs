//! What the source document prints works as printed: its REST body and its command line.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::net::Ipv4Addr;
use std::path::Path;

use kvlb_tests::engine::{Engine, EngineConfig, KvConnector};
use kvlb_tests::harness::kvlb::{Kvlb, binary};
use kvlb_tests::harness::stage::{MODEL, Stage, engine, vip};
use serde_json::{Value, json};

/// The document's section 8.1, as printed.
const CURL: &str = r#"curl -s -X POST http://10.10.10.254:11111/netlox/v1/config/loadbalancer \
  -H 'Content-Type: application/json' -d '{
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
}'"#;

/// The same as a command, as printed.
const LOXICMD: &str = "loxicmd create lb 10.10.10.254 --tcp=8080:8000 --endpoints=192.0.2.1:1,192.0.2.2:1 --mode=fullproxy \
                       --select=persist --kv-exact-mode=1 --kv-zmq-port=5557 --kv-hash-algo=sha256_cbor --kv-block-size=16 \
                       --kv-warmup=30 --ep-role=prefill,decode";

const PREFILL: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const DECODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// The document's deployment: the API and the VIP at one address of the host, a prefill and a decode engine.
struct Document {
    stage: Stage,
    engines: [Engine; 2],
    kvlb: Kvlb,
}

impl Document {
    async fn new(label: &str) -> Option<Self> {
        let stage = Stage::new(label).unwrap()?;
        for address in [vip(0).ip(), PREFILL.into(), DECODE.into()] {
            stage.netns().address("lo", (address, 32)).unwrap();
        }
        let at = |name: &str, host: Ipv4Addr| {
            let kv_connector = KvConnector::Nixl;
            EngineConfig { name: name.to_owned(), host: host.into(), kv_connector, ..engine() }
        };
        let engines =
            [stage.engine(at("prefill", PREFILL)).await.unwrap(), stage.engine(at("decode", DECODE)).await.unwrap()];
        let kvlb = stage.kvlb(&["--api", "0.0.0.0:11111", "--api-without-token"]).await.unwrap();
        Some(Self { stage, engines, kvlb })
    }

    /// A shell inside, with `loxicmd` and `kvlb` on its path.
    fn shell(&self, line: &str) -> String {
        let programs = self.stage.dir().join("bin");
        std::fs::create_dir_all(&programs).unwrap();
        for name in ["loxicmd", "kvlb"] {
            let program = programs.join(name);
            if !program.exists() {
                std::os::unix::fs::symlink(binary("kvlb").unwrap(), &program).unwrap();
            }
        }
        let script = format!("PATH={}:$PATH\n{line}", programs.display());
        self.stage.program(Path::new("/bin/sh"), &["-c", &script]).unwrap().ok().unwrap()
    }

    /// The one rule there is.
    async fn rule(&self) -> Value {
        let rules = self.kvlb.rules().await.unwrap();
        assert_eq!(rules.len(), 1, "{rules:?}");
        rules[0].clone()
    }

    /// What mode 1 promises: one engine computes the prompt, the other fetches it and answers.
    async fn serves(&self) {
        let id = self.rule().await["id"].as_u64().unwrap();
        self.kvlb.subscribed(id).await.unwrap();
        self.kvlb.tokenizes(id, MODEL).await.unwrap();
        let statuses = self.kvlb.statuses(id).await.unwrap();
        assert!(statuses[0]["connected"] == true && statuses[1].is_null(), "{statuses:?}");
        let before = self.kvlb.metrics().await.unwrap();
        for (turn, question) in ["What is the capital?", "Who wrote Faust?"].into_iter().enumerate() {
            let prompt = format!("You are a careful librarian who answers in one short sentence. {question}");
            let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 2});
            let answer = self.stage.ask(8080, "/v1/completions", &body).await.unwrap();
            assert_eq!((answer.head.status, answer.engine()), (200, "decode"));
            assert_eq!(answer.cached_tokens().unwrap() > 0, turn == 1);
            self.kvlb.settled(id, &self.engines[..1]).await.unwrap();
        }
        let moved = self.kvlb.metrics().await.unwrap().moved(&before, "loxilb_pd_kv_tier15_");
        let moved: Vec<_> = moved.iter().map(|(series, _)| series.trim_start_matches("loxilb_pd_kv_tier15_")).collect();
        assert_eq!(moved, ["fallthrough_total", "hits_total{ep_idx=\"0\"}", "miss_reason_total{reason=\"no_worker\"}"]);
        let asked = |engine: &Engine| engine.requests().iter().any(|seen| seen.path.starts_with("/v1/completions"));
        assert!(asked(&self.engines[0]) && asked(&self.engines[1]));
        let fetched = self.engines[1].handoffs();
        assert_eq!((fetched.pulled_own, fetched.pulled_foreign, fetched.recomputed), (2, 0, 0));
        let events = |ep: &str| format!("loxilb_kv_subscriber_connected{{ep=\"{ep}:8000\",service=\"{id}\"}}");
        let metrics = self.kvlb.metrics().await.unwrap();
        assert!(metrics.0.contains_key(&events("192.0.2.1")) && !metrics.0.contains_key(&events("192.0.2.2")));

        let shown = self.shell("loxicmd get lb");
        assert!(!shown.contains(&format!("rule {id}:")), "there is nothing to note:\n{shown}");
        let wide = self.shell("kvlb get lb -o wide");
        assert!(wide.contains("prefill") && wide.contains("decode") && wide.contains("proved_by_request"), "{wide}");
        let inventory = self.shell(&format!("loxicmd get kvinventory --service-id={id} --ep-idx=0"));
        let total = self.engines[0].blocks().len();
        assert!(inventory.contains(&format!("total={total}")), "{inventory}");
    }
}

/// What the document asks for, as it must be stored.
fn is_stored(rule: &Value) {
    let arguments = &rule["serviceArguments"];
    let wanted = json!({"externalIP": "10.10.10.254", "port": 8080, "protocol": "tcp", "sel": 3, "mode": 4, "kvExactMode": 1,
        "kvZmqPort": 5557, "kvHashAlgo": "sha256_cbor", "kvBlockSize": 16, "kvWarmupSec": 30});
    for (name, value) in wanted.as_object().unwrap() {
        assert_eq!(arguments[name], *value, "{name}: {rule}");
    }
    let endpoints: Vec<_> = rule["endpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| (e["endpointIP"].as_str().unwrap(), &e["targetPort"], &e["weight"], &e["ep_role"]))
        .collect();
    let (port, one, two) = (json!(8000), json!(1), json!(2));
    assert_eq!(endpoints, [("192.0.2.1", &port, &one, &one), ("192.0.2.2", &port, &one, &two)]);
}

#[tokio::test]
async fn its_curl_line_makes_a_rule_that_serves() {
    let Some(document) = Document::new("curl").await else { return };
    let answer: Value = serde_json::from_str(&document.shell(CURL)).unwrap();
    assert_eq!((&answer["result"], &answer["change"]), (&json!("Success"), &json!("created")), "{answer}");
    is_stored(&document.rule().await);
    document.serves().await;
    // The same once more changes nothing.
    let again: Value = serde_json::from_str(&document.shell(CURL)).unwrap();
    assert_eq!((&again["id"], &again["change"]), (&answer["id"], &json!("unchanged")), "{again}");
    document.kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn its_loxicmd_line_makes_the_same_rule_under_either_name_of_the_program() {
    let Some(document) = Document::new("loxicmd").await else { return };
    document.shell(LOXICMD);
    let by_loxicmd = document.rule().await;
    is_stored(&by_loxicmd);
    document.serves().await;
    document.shell(&LOXICMD.replacen("loxicmd", "kvlb", 1));
    assert_eq!(document.rule().await["id"], by_loxicmd["id"]);
    document.shell("loxicmd delete lb 10.10.10.254 --tcp=8080");
    assert!(document.kvlb.rules().await.unwrap().is_empty());
    document.shell(&LOXICMD.replacen("loxicmd", "kvlb", 1));
    let by_kvlb = document.rule().await;
    is_stored(&by_kvlb);
    assert_eq!(by_kvlb["serviceArguments"], by_loxicmd["serviceArguments"]);
    // Both of the document's ways say the same.
    let same: Value = serde_json::from_str(&document.shell(CURL)).unwrap();
    assert_eq!((&same["id"], &same["change"]), (&by_kvlb["id"], &json!("unchanged")), "{same}");
    document.kvlb.stop().await.unwrap();
}

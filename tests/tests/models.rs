//! Which rule serves a request, where several models share one VIP and port; and how rules change while they serve.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test says by a panic what went wrong")]

use kvlb_tests::engine::{Adapter, Engine, EngineConfig};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::Answer;
use kvlb_tests::harness::stage::{PATIENCE, Stage, at, endpoint, engine, rule, vip};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const LB: &str = "/netlox/v1/config/loadbalancer";
const AT_VIP: &str = "/netlox/v1/config/loadbalancer/externalipaddress/10.10.10.254/port/8080/protocol/tcp";

#[tokio::test]
async fn a_request_goes_to_the_rule_of_its_model() {
    let Some(stage) = Stage::new("models").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let adapters = vec![Adapter { name: "tuned".into(), path: "/srv/tuned".into() }];
    let alpha = serving(&stage, 11, "org/alpha", adapters).await;
    let beta = serving(&stage, 12, "beta", Vec::new()).await;
    // The oldest rule has the same engine under another model's name: the adapter is not its business.
    let mut other = of_model(&[], "other");
    other["endpoints"] = json!([endpoint(&beta[0]), endpoint(&alpha[0])]);
    kvlb.create(&other).await.unwrap();
    let ids = [
        kvlb.create(&of_model(&alpha, "org/alpha")).await.unwrap(),
        kvlb.create(&of_model(&beta, "beta")).await.unwrap(),
    ];
    for (id, model) in ids.into_iter().zip(["org/alpha", "beta"]) {
        kvlb.subscribed(id).await.unwrap();
        kvlb.tokenizes(id, model).await.unwrap();
    }
    let vip_asked = Asking { stage: &stage };
    // By the body, cold and warm, each with a mirror of its own.
    for (model, engine) in [("org/alpha", "engine-11"), ("beta", "engine-12"), ("org/alpha", "engine-11")] {
        assert_eq!(vip_asked.body(model).await.engine(), engine);
    }
    kvlb.settled(ids[0], &alpha).await.unwrap();
    assert!(vip_asked.body("org/alpha").await.cached_tokens() > Some(0));
    // X-Model wins over the body, and serves a body without a model, which the engine then takes as its own.
    let by_header = vip_asked.with(&[("X-Model", "beta")], &json!({"model": "org/alpha", "prompt": "x"})).await;
    assert_eq!(by_header.engine(), "engine-12");
    let without = vip_asked.with(&[("X-Model", "beta")], &json!({"prompt": "x", "max_tokens": 1})).await;
    assert_eq!((without.head.status, without.engine()), (200, "engine-12"));
    // Nobody's model is named with those that are served.
    let nobody = vip_asked.body("gamma").await;
    let error = &nobody.body.json()["error"];
    assert_eq!((nobody.head.status, &error["code"]), (404, &json!("model_not_found")), "{}", nobody.body.text());
    let message = error["message"].as_str().unwrap();
    assert!(["gamma", "org/alpha", "beta"].iter().all(|model| message.contains(model)), "{message}");
    assert_eq!(nobody.head.header("x-kvlb-error"), Some("model_not_found"));
    // A body without a model goes to the oldest rule while there is none for any model.
    assert_eq!(vip_asked.with(&[], &json!({"prompt": "x", "max_tokens": 1})).await.engine(), "engine-12");
    // An adapter goes to the rule of its base, whose engine lists it.
    eventually(PATIENCE, "the adapter's rule is known", async || vip_asked.body("tuned").await.head.status == 200)
        .await
        .unwrap();
    assert_eq!(vip_asked.body("tuned").await.engine(), "engine-11");
    // The models of all rules are listed as one, adapters included.
    let listed = stage.exchange(vip(8080), ("GET", "/v1/models"), &[], b"").await.unwrap();
    assert_eq!(model_ids(&listed), ["beta", "org/alpha", "tuned"], "{}", listed.body.text());

    // A rule without a model takes what the others leave.
    let any = serving(&stage, 13, "gamma", Vec::new()).await;
    let wildcard = kvlb.create(&rule(8080, &any, &json!({}))).await.unwrap();
    kvlb.subscribed(wildcard).await.unwrap();
    assert_eq!(vip_asked.body("gamma").await.engine(), "engine-13");
    assert_eq!(vip_asked.body("beta").await.engine(), "engine-12");
    assert_eq!(vip_asked.body("tuned").await.engine(), "engine-11");
    let unnamed = vip_asked.with(&[], &json!({"prompt": "x", "max_tokens": 1})).await;
    assert_eq!(unnamed.engine(), "engine-13");
    let listed = stage.exchange(vip(8080), ("GET", "/v1/models"), &[], b"").await.unwrap();
    assert_eq!(model_ids(&listed), ["beta", "gamma", "org/alpha", "tuned"], "{}", listed.body.text());
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_body_without_a_model_uses_the_rules_model_or_misses_for_want_of_one() {
    let Some(stage) = Stage::new("no-model").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let alpha = serving(&stage, 11, "org/alpha", Vec::new()).await;
    let beta = serving(&stage, 12, "beta", Vec::new()).await;
    let named = of_model(&alpha, "org/alpha");
    let id = kvlb.create(&named).await.unwrap();
    let unnamed = kvlb.create(&rule(8081, &beta, &json!({}))).await.unwrap();
    for (id, model) in [(id, "org/alpha"), (unnamed, "beta")] {
        kvlb.subscribed(id).await.unwrap();
        kvlb.tokenizes(id, model).await.unwrap();
    }
    let body = json!({"prompt": preamble(), "max_tokens": 1});
    let before = kvlb.metrics().await.unwrap();
    stage.ask(8080, COMPLETIONS, &body).await.unwrap();
    kvlb.settled(id, &alpha).await.unwrap();
    stage.ask(8080, COMPLETIONS, &body).await.unwrap();
    stage.ask(8081, COMPLETIONS, &body).await.unwrap();
    let moved = kvlb.metrics().await.unwrap().moved(&before, "loxilb_pd_kv_tier15_");
    let moved: Vec<_> =
        moved.iter().map(|(series, by)| (series.trim_start_matches("loxilb_pd_kv_tier15_"), *by)).collect();
    let expected = [
        ("fallthrough_total", 2.0),
        ("hits_total{ep_idx=\"0\"}", 1.0),
        ("miss_reason_total{reason=\"model_empty\"}", 1.0),
        ("miss_reason_total{reason=\"no_worker\"}", 1.0),
    ];
    assert_eq!(moved, expected);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_rule_is_replaced_in_place_and_what_may_not_change_is_refused() {
    let Some(stage) = Stage::new("replace").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let alpha = serving(&stage, 11, "org/alpha", Vec::new()).await;
    let post = async |body: &Value| kvlb.api("POST", LB, Some(body)).await.unwrap();
    let first = of_model(&alpha, "org/alpha");
    let id = kvlb.create(&first).await.unwrap();
    assert_eq!(post(&first).await, (200, json!({"result": "Success", "id": id, "change": "unchanged"})));
    kvlb.subscribed(id).await.unwrap();
    kvlb.tokenizes(id, "org/alpha").await.unwrap();
    let vip_asked = Asking { stage: &stage };
    vip_asked.body("org/alpha").await;
    kvlb.settled(id, &alpha).await.unwrap();
    // Another selector: the same rule, and its mirror stays.
    let mut other = first.clone();
    other["serviceArguments"]["sel"] = json!(4);
    assert_eq!(post(&other).await, (200, json!({"result": "Success", "id": id, "change": "replaced"})));
    let shown = kvlb.rule(id).await.unwrap();
    assert_eq!(shown["serviceArguments"]["sel"], 4);
    assert_eq!(shown["endpoints"][0]["kvStatus"]["blocks"], alpha[0].blocks().len());
    assert!(vip_asked.body("org/alpha").await.cached_tokens() > Some(0));
    for (field, value) in [("kvEngineType", json!("llamacpp")), ("mode", json!(1))] {
        let mut forbidden = first.clone();
        forbidden["serviceArguments"][field] = value;
        if field == "kvEngineType" {
            for kv in ["kvExactMode", "kvZmqPort", "kvHashAlgo", "kvBlockSize"] {
                forbidden["serviceArguments"].as_object_mut().unwrap().remove(kv);
            }
        }
        let (status, refusal) = post(&forbidden).await;
        assert_eq!((status, &refusal["error"]), (409, &json!("immutable")), "{refusal}");
        assert!(refusal["message"].as_str().unwrap().contains(field), "{refusal}");
        assert_eq!((&refusal["code"], &refusal["result"]), (&json!(status), &json!("Error")));
    }
    assert_eq!(kvlb.rule(id).await.unwrap()["serviceArguments"], shown["serviceArguments"]);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn a_delete_that_could_mean_several_rules_lists_them_and_deletes_none() {
    let Some(stage) = Stage::new("delete").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let alpha = serving(&stage, 11, "org/alpha", Vec::new()).await;
    let beta = serving(&stage, 12, "beta", Vec::new()).await;
    kvlb.create(&of_model(&alpha, "org/alpha")).await.unwrap();
    kvlb.create(&of_model(&beta, "beta")).await.unwrap();
    let (status, refusal) = kvlb.api("DELETE", AT_VIP, None).await.unwrap();
    assert_eq!((status, &refusal["error"]), (409, &json!("several_rules")), "{refusal}");
    let message = refusal["message"].as_str().unwrap();
    assert!(message.contains("org/alpha") && message.contains("beta"), "{message}");
    assert_eq!(kvlb.rules().await.unwrap().len(), 2);
    let by_cli = stage.cli(&["delete", "lb", "10.10.10.254", "--tcp=8080"]).unwrap();
    assert!(by_cli.code == Some(4) && by_cli.err.contains("org/alpha"), "{by_cli:?}");
    // With the model named, and then alone, it goes.
    let of_alpha = format!("{AT_VIP}?model_name=org%2Falpha");
    assert_eq!(kvlb.api("DELETE", &of_alpha, None).await.unwrap().0, 200);
    let vip_asked = Asking { stage: &stage };
    eventually(PATIENCE, "the rule is gone", async || vip_asked.body("org/alpha").await.head.status == 404)
        .await
        .unwrap();
    assert_eq!(vip_asked.body("beta").await.engine(), "engine-12");
    assert_eq!(kvlb.api("DELETE", AT_VIP, None).await.unwrap().0, 200);
    assert!(kvlb.rules().await.unwrap().is_empty());
    assert_eq!(kvlb.api("DELETE", AT_VIP, None).await.unwrap().0, 404);
    kvlb.stop().await.unwrap();
}

#[tokio::test]
async fn endpoints_join_and_leave_a_rule_that_serves() {
    let Some(stage) = Stage::new("attach").unwrap() else { return };
    let kvlb = stage.kvlb(&[]).await.unwrap();
    let mut engines = serving(&stage, 11, "org/alpha", Vec::new()).await;
    engines.extend(serving(&stage, 12, "org/alpha", Vec::new()).await);
    let id = kvlb.create(&of_model(&engines[..1], "org/alpha")).await.unwrap();
    kvlb.subscribed(id).await.unwrap();
    kvlb.tokenizes(id, "org/alpha").await.unwrap();
    let vip_asked = Asking { stage: &stage };
    vip_asked.body("org/alpha").await;
    kvlb.settled(id, &engines[..1]).await.unwrap();
    let moving = |oper: u8, engine: &Engine| {
        let mut body = of_model(&[], "org/alpha");
        body["serviceArguments"]["oper"] = json!(oper);
        body["endpoints"] = json!([endpoint(engine)]);
        body
    };
    let (status, answer) = kvlb.api("POST", LB, Some(&moving(1, &engines[1]))).await.unwrap();
    assert_eq!((status, &answer["change"], &answer["id"]), (200, &json!("attached"), &json!(id)), "{answer}");
    kvlb.subscribed(id).await.unwrap();
    // The mirror of the first is what it was, so the warm prompt stays there; a cold one reaches the second.
    kvlb.settled(id, &engines).await.unwrap();
    assert_eq!(vip_asked.body("org/alpha").await.engine(), "engine-11");
    eventually(PATIENCE, "the second engine is asked", async || {
        let cold = json!({"model": "org/alpha", "prompt": [1, 2, 3], "max_tokens": 1});
        vip_asked.with(&[], &cold).await.engine() == "engine-12"
    })
    .await
    .unwrap();
    let (status, answer) = kvlb.api("POST", LB, Some(&moving(2, &engines[0]))).await.unwrap();
    assert_eq!((status, &answer["change"]), (200, &json!("detached")), "{answer}");
    assert_eq!(kvlb.rule(id).await.unwrap()["endpoints"].as_array().unwrap().len(), 1);
    for _ in 0..4 {
        assert_eq!(vip_asked.body("org/alpha").await.engine(), "engine-12");
    }
    let page = kvlb.metrics().await.unwrap();
    assert!(page.0.keys().all(|series| !series.contains("127.0.0.11")), "{:?}", page.0);
    // The last one may not go.
    let (status, answer) = kvlb.api("POST", LB, Some(&moving(2, &engines[1]))).await.unwrap();
    assert_eq!((status, &answer["error"]), (400, &json!("endpoints_missing")), "{answer}");
    // By the name of a host as well as by its address, and with the CLI.
    let named = ["create", "lb", "10.10.10.254", "--tcp=8080:8000", "--endpoints=localhost:1", "--mode=fullproxy"];
    let more = ["--model-name=org/alpha", "--kv-exact-mode=3", "--attachEP"];
    stage.cli(&[&named[..], &more[..]].concat()).unwrap().ok().unwrap();
    assert_eq!(kvlb.rule(id).await.unwrap()["endpoints"][1]["endpointIP"], "localhost");
    kvlb.stop().await.unwrap();
}

/// One engine that serves a model, with the model's tokenizer staged.
async fn serving(stage: &Stage, number: u8, model: &str, adapters: Vec<Adapter>) -> Vec<Engine> {
    stage.stage_tokenizer(model).unwrap();
    let config = EngineConfig { model: model.to_owned(), adapters, ..engine() };
    vec![stage.engine(at(number, config)).await.unwrap()]
}

fn of_model(engines: &[Engine], model: &str) -> Value {
    rule(8080, engines, &json!({"model_name": model}))
}

/// Requests to the VIP.
struct Asking<'a> {
    stage: &'a Stage,
}

impl Asking<'_> {
    async fn body(&self, model: &str) -> Answer {
        self.with(&[], &json!({"model": model, "prompt": preamble(), "max_tokens": 1})).await
    }

    async fn with(&self, headers: &[(&str, &str)], body: &Value) -> Answer {
        let mut all = vec![("Content-Type", "application/json")];
        all.extend(headers);
        self.stage.exchange(vip(8080), ("POST", COMPLETIONS), &all, body.to_string().as_bytes()).await.unwrap()
    }
}

fn preamble() -> String {
    "You are a careful librarian. Answer every question in one short sentence and name your source. Who wrote Faust?"
        .to_owned()
}

fn model_ids(answer: &Answer) -> Vec<String> {
    let page = answer.body.json();
    let models = page["data"].as_array().unwrap_or_else(|| panic!("no models in {}", answer.body.text()));
    let mut ids: Vec<_> = models.iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect();
    ids.sort();
    ids
}

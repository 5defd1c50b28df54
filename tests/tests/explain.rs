//! `kvlb explain RULE < body.json`: what would become of a request, without sending anything.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use kvlb_tests::harness::eventually;
use serde_json::{Value, json};

use fleet::{Fleet, PATH, SOON, Setup, completion, names, naming, quick};

fn asked(fleet: &Fleet) -> usize {
    let completions = |number: usize| fleet.engines[number].requests().iter().filter(|seen| seen.path == PATH).count();
    (0..fleet.engines.len()).map(completions).sum()
}

fn explained(fleet: &Fleet, body: &str) -> (Option<i32>, Value) {
    let (code, text) = fleet.cli(&["explain", &fleet.id().to_string(), "-o", "json"], body).unwrap();
    (code, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

#[tokio::test]
async fn it_tells_tokens_names_depths_loads_and_the_choice() {
    let fleet = Fleet::start(Setup { engines: ["a", "b"].map(quick).to_vec(), ..Setup::default() }).await.unwrap();
    let tokens: Vec<u32> = (5..105).collect();
    let all_names = names(&naming(), &tokens);
    fleet.warm(0, &tokens[..3 * 16]).await.unwrap();
    fleet.warm(1, &tokens[..5 * 16]).await.unwrap();
    let body = completion(&tokens, 1);
    eventually(SOON, "both are known", async || {
        fleet.depth(0, &body).await.is_ok_and(|depth| depth == 3)
            && fleet.depth(1, &body).await.is_ok_and(|depth| depth == 5)
    })
    .await
    .unwrap();
    let before = asked(&fleet);
    let (code, told) = explained(&fleet, &body.to_string());
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(asked(&fleet), before, "nothing is sent");
    let prompt = &told["prompts"][0];
    assert_eq!((&prompt["tokens"], &prompt["blocks"]), (&json!(100), &json!(6)), "{told}");
    assert_eq!(prompt["token_ids"], json!(tokens));
    let hex: Vec<String> = all_names.iter().map(|name| format!("{name:016x}")).collect();
    assert_eq!(prompt["names"], json!(hex));
    let candidates = told["candidates"].as_array().unwrap();
    let field = |name: &str| candidates.iter().map(|candidate| candidate[name].clone()).collect::<Vec<_>>();
    assert_eq!(field("ep_idx"), [0, 1]);
    assert_eq!((field("depth"), field("count")), (vec![json!(3), json!(5)], vec![json!(3), json!(5)]));
    assert_eq!((field("load"), field("eligible")), (vec![json!(0), json!(0)], vec![json!(true), json!(true)]));
    assert_eq!(field("keying"), ["parity", "parity"]);
    assert_eq!(told["endpoint"].as_u64().or_else(|| told["endpoint"]["ep_idx"].as_u64()), Some(1), "{told}");
    assert_eq!(fleet.sum("loxilb_pd_kv_tier15_hits_total").await.unwrap(), 0, "an explanation is no request");
    // What it says is what happens.
    assert_eq!(fleet.who(&fleet.ask(&body).await.unwrap()), Some(1));
}

#[tokio::test]
async fn a_miss_has_its_reason_and_a_batch_all_its_prompts() {
    let fleet = Fleet::start(Setup { engines: ["a", "b"].map(quick).to_vec(), ..Setup::default() }).await.unwrap();
    let tokens: Vec<u32> = (0..40).collect();
    let (code, told) = explained(&fleet, &completion(&tokens, 1).to_string());
    assert_eq!((code, &told["reason"]), (Some(0), &json!("no_worker")), "{told}");
    let (code, told) = explained(&fleet, r#"{"model":"tiny","max_tokens":1}"#);
    assert_eq!((code, &told["reason"]), (Some(0), &json!("text_empty")), "{told}");
    let (code, told) = explained(&fleet, "no JSON");
    assert_eq!((code, &told["reason"]), (Some(0), &json!("model_empty")), "{told}");
    let batch = json!({"model": "tiny", "prompt": [tokens, vec![7; 17]], "max_tokens": 1});
    let (code, told) = explained(&fleet, &batch.to_string());
    let prompts = told["prompts"].as_array().unwrap();
    let sizes: Vec<_> = prompts.iter().map(|prompt| (prompt["tokens"].clone(), prompt["blocks"].clone())).collect();
    assert_eq!((code, sizes), (Some(0), vec![(json!(40), json!(2)), (json!(17), json!(1))]), "{told}");
    assert_eq!(asked(&fleet), 0);
    assert_eq!(fleet.cli(&["explain", "4711"], "{}").unwrap().0, Some(4), "there is no such rule");
}

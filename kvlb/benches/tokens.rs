//! What a chat of 32 KB costs until it is tokens: reading the body, rendering the template, tokenizing.
//!
//! The tokenizer is the small one of the tests, so the last number says what the `tokenizers` crate takes, not what a large
//! vocabulary adds.

#![allow(missing_docs, reason = "criterion's macros write functions without documentation")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use kvlb::openai::{self, Input, Request};
use kvlb::tokenize::{EngineOptions, Files, Limits, Tokenizer};
use tikv_jemallocator::Jemalloc;

/// As in the program itself.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

const TOKENIZER: &[u8] = include_bytes!("../../tests/golden/tiny-tokenizer/tokenizer.json");
const CONFIG: &[u8] = include_bytes!("../../tests/golden/tiny-tokenizer/tokenizer_config.json");

/// A chat of twenty messages, 32 KB in all.
fn body() -> Vec<u8> {
    let sentence = "A block has a name that is made from its tokens and from the name of the block before it.\n";
    let message = |turn: usize| {
        let role = if turn.is_multiple_of(2) { "user" } else { "assistant" };
        serde_json::json!({ "role": role, "content": sentence.repeat(17) })
    };
    let messages: Vec<_> = (0..20).map(message).collect();
    serde_json::json!({ "model": "m", "messages": messages, "stream": true }).to_string().into_bytes()
}

fn tokens(criterion: &mut Criterion) {
    let body = body();
    let request = Request { method: "POST", path: "/v1/chat/completions", model_header: None, body: &body };
    let files =
        Files { tokenizer_json: TOKENIZER.to_vec(), tokenizer_config: Some(CONFIG.to_vec()), ..Files::default() };
    let tokenizer = Tokenizer::load(&files, EngineOptions::default()).expect("the tests' tokenizer loads");
    let prompt = openai::parse(&request).expect("the body is a chat");
    let Input::Chat(chat) = &prompt.inputs[0] else { unreachable!("the body is a chat") };
    let text = Input::Text(tokenizer.render(chat, &Limits::default()).expect("the chat renders"));

    let mut group = criterion.benchmark_group("chat of 32 KB");
    group.bench_function("model", |bencher| bencher.iter(|| openai::model(black_box(&request))));
    group.bench_function("parse", |bencher| bencher.iter(|| openai::parse(black_box(&request))));
    group.bench_function("render", |bencher| bencher.iter(|| tokenizer.render(black_box(chat), &Limits::default())));
    group.bench_function("tokenize", |bencher| {
        bencher.iter(|| tokenizer.tokens(black_box(&text), &prompt.options, &Limits::default()));
    });
    group.finish();
}

criterion_group!(benches, tokens);
criterion_main!(benches);

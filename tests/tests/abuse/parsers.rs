//! What comes from outside, made at random close to the real thing: no parser panics, and what they accept can be used.

use std::sync::{Arc, LazyLock};

use kvlb::clock;
use kvlb::contract::{BlockSize, EventSeq, HashAlgo, NoneSeed, Rehash, events};
use kvlb::fleet::Keying;
use kvlb::openai::{self, Request};
use kvlb::state::index::{Index, IndexConfig};
use kvlb::state::kv::{EndpointKv, Naming};
use kvlb::tokenize::{EngineOptions, Files, Limits, Tokenizer};
use proptest::prelude::*;
use proptest::sample::Index as Place;
use rmpv::Value as Packed;

use super::publisher::packed;
use super::stage::tiny;

/// Cuts, repeats, flips and swaps bytes.
fn mutate(mut bytes: Vec<u8>, changes: &[(Place, u8, u8)]) -> Vec<u8> {
    for (place, kind, byte) in changes {
        let at = place.index(bytes.len() + 1);
        match kind % 5 {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, *byte),
            2 => bytes.extend_from_within(at..),
            3 if at < bytes.len() => bytes[at] = *byte,
            4 if at < bytes.len() => drop(bytes.remove(at)),
            _ => {}
        }
        // Doubled again and again it would only be long.
        bytes.truncate(4000);
    }
    bytes
}

fn changes() -> impl Strategy<Value = Vec<(Place, u8, u8)>> {
    prop::collection::vec(
        (any::<Place>(), any::<u8>(), prop_oneof![any::<u8>(), Just(b'"'), Just(b'['), Just(b'}'), Just(b'\\')]),
        0..6,
    )
}

const PATHS: [&str; 4] =
    ["/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/inference/v1/generate"];

const BODIES: [&str; 6] = [
    r#"{"model": "tiny", "prompt": "Hello \u00e9\ud83d\ude80 world", "max_tokens": 5, "n": 2, "cache_salt": "s", "user": "u"}"#,
    r#"{"model": "tiny", "prompt": [[1, 2, 3], [4294967295]], "truncate_prompt_tokens": 2, "truncation_side": "left"}"#,
    r#"{"model": "tiny", "prompt": ["a", "b"], "add_special_tokens": false, "truncate_prompt_tokens": -1}"#,
    r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1.5, null, true]}}}], "tool_choice": "auto"}"#,
    r#"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}], "continue_final_message": true, "add_generation_prompt": false, "chat_template_kwargs": {"k": [1, {"z": "\n"}]}}"#,
    r#"{"token_ids": [1, 2, 3], "model": "a/b", "documents": [{"t": "x"}], "reasoning_effort": "high"}"#,
];

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let read = |name: &str| std::fs::read(tiny().join(name)).unwrap();
    let files = Files {
        tokenizer_json: read("tokenizer.json"),
        tokenizer_config: Some(read("tokenizer_config.json")),
        ..Files::default()
    };
    Tokenizer::load(&files, EngineOptions { trust_request_template: true, ..EngineOptions::default() }).unwrap()
});

fn tokens(path: &str, body: &[u8]) {
    let request = Request { method: "POST", path, model_header: None, body };
    openai::model(&request);
    let Ok(prompt) = openai::parse(&request) else { return };
    let limits = Limits { max_tokens: 100, ..Limits::default() };
    for input in &prompt.inputs {
        if let Ok(ids) = TOKENIZER.tokens(input, &prompt.options, &limits) {
            assert!(!ids.is_empty() && ids.len() <= 100);
        }
    }
}

/// Anything that msgpack can say, with the words that events are made of.
fn value() -> impl Strategy<Value = Packed> {
    let word = prop::sample::select(vec![
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "lora_name",
        "medium",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "GPU",
        "CPU",
        "full_attention",
        "sliding_window",
        "lookahead_token_ids",
        "",
    ]);
    let leaf = prop_oneof![
        4 => word.prop_map(Packed::from),
        4 => (0..40_u64).prop_map(Packed::from),
        1 => any::<u64>().prop_map(Packed::from),
        1 => any::<i64>().prop_map(Packed::from),
        1 => any::<f64>().prop_map(Packed::from),
        1 => prop::collection::vec(any::<u8>(), 0..40).prop_map(Packed::Binary),
        1 => Just(Packed::Nil),
        1 => any::<bool>().prop_map(Packed::from),
    ];
    leaf.prop_recursive(4, 64, 12, |inner| {
        prop_oneof![
            3 => prop::collection::vec(inner.clone(), 0..12).prop_map(Packed::Array),
            1 => prop::collection::vec((inner.clone(), inner), 0..8).prop_map(Packed::Map),
        ]
    })
}

/// An event whose fields have their places and mostly their types.
fn event() -> impl Strategy<Value = Packed> {
    let hash = prop_oneof![
        4 => (0..40_u64).prop_map(Packed::from),
        1 => any::<i64>().prop_map(Packed::from),
        1 => prop::collection::vec(any::<u8>(), 32).prop_map(Packed::Binary),
    ];
    let hashes = prop::collection::vec(hash.clone(), 0..6).prop_map(Packed::Array);
    let tokens = prop::collection::vec((0..9_u32).prop_map(Packed::from), 0..40).prop_map(Packed::Array);
    let size = prop_oneof![Just(4_u32), Just(8), Just(0), any::<u32>()].prop_map(Packed::from);
    let or_odd = |usual: BoxedStrategy<Packed>| prop_oneof![9 => usual, 1 => value()].boxed();
    let medium = prop::sample::select(vec!["GPU", "CPU", "STORAGE"]).prop_map(Packed::from);
    let group = (0..80_u32).prop_map(Packed::from);
    let attention = prop::sample::select(vec!["full_attention", "sliding_window", "unknown"]).prop_map(Packed::from);
    let fields = vec![
        or_odd(Just("BlockStored".into()).boxed()),
        or_odd(hashes.clone().boxed()),
        or_odd(prop_oneof![Just(Packed::Nil), hash].boxed()),
        or_odd(tokens.boxed()),
        or_odd(size.boxed()),
        or_odd(Just(Packed::Nil).boxed()),
        or_odd(medium.clone().boxed()),
        or_odd(Just(Packed::Nil).boxed()),
        or_odd(Just(Packed::Nil).boxed()),
        or_odd(group.clone().boxed()),
        or_odd(attention.boxed()),
    ];
    let stored = (fields, 1..12_usize).prop_map(|(mut fields, length)| {
        fields.truncate(length);
        Packed::Array(fields)
    });
    let removed = (hashes, medium, group)
        .prop_map(|(hashes, medium, group)| Packed::Array(vec!["BlockRemoved".into(), hashes, medium, group]));
    prop_oneof![
        6 => stored,
        3 => removed,
        1 => Just(Packed::Array(vec!["AllBlocksCleared".into()])),
        2 => value(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_body_that_is_nearly_right_is_read_or_missed(
        body in prop::sample::select(BODIES.to_vec()),
        path in prop::sample::select(PATHS.to_vec()),
        changes in changes(),
    ) {
        tokens(path, &mutate(body.as_bytes().to_vec(), &changes));
    }

    #[test]
    fn any_text_becomes_tokens_or_a_miss(text in any::<String>(), role in "\\PC{0,12}") {
        tokens(PATHS[0], serde_json::json!({"prompt": text}).to_string().as_bytes());
        let chat = serde_json::json!({"messages": [{"role": role, "content": text}, {"role": "user", "content": role}]});
        tokens(PATHS[1], chat.to_string().as_bytes());
    }

    #[test]
    fn any_template_of_a_request_is_rendered_or_missed(
        template in r"(\{[{%]-? ?(messages|for|in|if|endfor|endif|set|x|loop|\.|\[|\]|0|-1|'a'|~|\||length|trim|tojson|range\(9\)|\(|\)|=|\+|\*| ){0,9} ?-?[}%]\}|[a-z ]{0,5}){0,6}",
    ) {
        let body = serde_json::json!({"messages": [{"role": "user", "content": "é"}], "chat_template": template});
        tokens(PATHS[1], body.to_string().as_bytes());
    }

    #[test]
    fn any_batches_are_applied_as_far_as_they_can_be_read(
        batches in prop::collection::vec((prop::collection::vec(event(), 0..8), value(), changes(), any::<bool>()), 1..5),
    ) {
        let broken_first = batches[0].3;
        let index = Arc::new(Index::new(IndexConfig { max_blocks: Some(1000), ..IndexConfig::default() }));
        let naming = Naming {
            algo: HashAlgo::Sha256Cbor,
            seed: NoneSeed::Text("0".into()),
            block_size: BlockSize::new(4).unwrap(),
            keying: if broken_first { Keying::Rehash } else { Keying::Auto },
            rehash: Rehash::new(1),
        };
        let kv = EndpointKv::new(Arc::clone(&index), &naming);
        for (number, (events, rank, changes, broken)) in (0..).zip(batches) {
            let mut message = packed(&Packed::Array(vec![1.0.into(), Packed::Array(events), rank]));
            if broken {
                message = mutate(message, &changes);
            }
            events::time(&message);
            if let Ok(batch) = events::decode(&message) {
                kv.apply(&kv.feed(0), EventSeq(number), &batch, clock::now());
            }
            let status = kv.status(clock::now());
            prop_assert!(status.ranks <= 8 && kv.names().len() <= status.blocks);
        }
        kv.clear(&kv.feed(0), true);
        prop_assert_eq!(kv.blocks(), 0);
    }
}

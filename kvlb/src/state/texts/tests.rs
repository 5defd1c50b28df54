//! What the memory keeps, and that names made with it are those made without it.

use proptest::prelude::*;

use super::*;
use crate::contract::{BlockHash, BlockSize, Extra, HashAlgo, Hasher, KeyEra, KeySpace, NoneSeed, Rehash};
use crate::openai::{Input, TokenOptions};
use crate::tokenize::{EngineOptions, Files, Limits, NameError, Names, Naming, Tokenizer};

const TOKENIZER: &[u8] = include_bytes!("../../../../tests/golden/tiny-tokenizer/tokenizer.json");

fn files() -> Files {
    Files { tokenizer_json: TOKENIZER.to_vec(), ..Files::default() }
}

fn tiny() -> Tokenizer {
    Tokenizer::load(&files(), EngineOptions::default()).unwrap().quick()
}

fn spaces() -> Vec<(KeySpace, Extra)> {
    let size = |size| BlockSize::new(size).unwrap();
    let parity = Hasher::new(HashAlgo::Sha256Cbor, &NoneSeed::Text("0".into()), size(16)).key_space(KeyEra::Tagged);
    let salted = Extra { cache_salt: Some("s".into()), ..Extra::default() };
    vec![(parity, Extra::default()), (KeySpace::rehash(Rehash::new(7), size(5)), salted)]
}

fn naming<'a>(spaces: &'a [(KeySpace, Extra)], memory: &'a Texts) -> Naming<'a> {
    Naming { spaces, memory }
}

fn named(tokenizer: &Tokenizer, text: &str, naming: Naming<'_>, limits: &Limits) -> Result<Names, NameError> {
    tokenizer.names(&Input::Text(text.to_owned()), &TokenOptions::default(), limits, naming)
}

/// The names without any memory, by the reference.
fn plain(
    reference: &Tokenizer,
    text: &str,
    limits: &Limits,
    spaces: &[(KeySpace, Extra)],
) -> Result<(usize, Vec<Vec<BlockHash>>), NameError> {
    let tokens = reference.tokens(&Input::Text(text.to_owned()), &TokenOptions::default(), limits)?;
    let in_space = |(space, extra): &(KeySpace, Extra)| {
        let mut names = Vec::new();
        space.begin(extra).unwrap().extend(&tokens, &mut names);
        names
    };
    Ok((tokens.len(), spaces.iter().map(in_space).collect()))
}

fn prose(bytes: usize, number: usize) -> String {
    let line = |line: usize| format!("Line {line} of text {number}, which is about nothing much.\n");
    (0..)
        .map(line)
        .scan(0, |length, line| {
            *length += line.len();
            (*length < bytes).then_some(line)
        })
        .collect()
}

#[test]
fn a_known_start_is_not_tokenised_again() {
    let (tokenizer, memory, spaces) = (tiny(), Texts::new(1 << 20, 1), spaces());
    let naming = naming(&spaces, &memory);
    let limits = Limits::default();
    let first = prose(19_000, 0);
    let cold = named(&tokenizer, &first, naming, &limits).unwrap();
    assert_eq!(cold.new_bytes, first.len());
    let warm = named(&tokenizer, &first, naming, &limits).unwrap();
    assert_eq!(warm, Names { new_bytes: 0, ..cold });
    let longer = named(&tokenizer, &format!("{first}And then?"), naming, &limits).unwrap();
    assert!((9..700).contains(&longer.new_bytes), "{}", longer.new_bytes);
    assert_eq!(memory.usage().recalled, memory.usage().parts as u64 * 2 - 3);
}

#[test]
fn names_of_other_key_spaces_salts_and_tokenizers_stay_apart() {
    let (tokenizer, memory, spaces) = (tiny(), Texts::new(1 << 20, 1), spaces());
    let text = prose(5_000, 0);
    let names = |tokenizer: &Tokenizer, spaces: &[(KeySpace, Extra)]| {
        let names = named(tokenizer, &text, naming(spaces, &memory), &Limits::default()).unwrap();
        assert_eq!(Ok((names.tokens, names.names)), plain(tokenizer, &text, &Limits::default(), spaces));
        names.new_bytes
    };
    assert_eq!(names(&tokenizer, &spaces), text.len());
    assert_eq!(names(&tokenizer, &spaces), 0);
    let salted = |salt: &str| vec![(spaces[0].0, Extra { cache_salt: Some(salt.to_owned()), ..Extra::default() })];
    assert_eq!(names(&tokenizer, &salted("a")), text.len());
    assert_eq!(names(&tokenizer, &salted("b")), text.len());
    assert_eq!(names(&tokenizer, &salted("a")), 0);
    assert_eq!(names(&tokenizer, &[spaces[1].clone(), spaces[0].clone()]), text.len());
    let long = salted(&"x".repeat(2000));
    assert_eq!(
        (names(&tokenizer, &long), names(&tokenizer, &long)),
        (text.len(), text.len()),
        "long salts are not kept"
    );
    let mut other: serde_json::Value = serde_json::from_slice(TOKENIZER).unwrap();
    other["model"]["merges"].as_array_mut().unwrap().truncate(100);
    let other = Files { tokenizer_json: other.to_string().into_bytes(), ..files() };
    let other = Tokenizer::load(&other, EngineOptions::default()).unwrap().quick();
    assert_eq!(names(&other, &spaces), text.len());
}

#[test]
fn what_was_not_asked_for_is_forgotten_and_the_bound_holds() {
    let (tokenizer, spaces) = (tiny(), spaces());
    let bound = 2 << 20;
    let memory = Texts::new(bound, 1);
    let name = |text: &str| named(&tokenizer, text, naming(&spaces, &memory), &Limits::default()).unwrap().new_bytes;
    let hot = prose(4_000, usize::MAX);
    name(&hot);
    for number in 0..400 {
        assert_eq!(name(&prose(20_000, number)), prose(20_000, number).len());
        assert!(name(&hot) < hot.len() / 2, "what is asked for stays");
        assert!(memory.usage().bytes <= bound, "{:?}", memory.usage());
    }
    assert!(memory.usage().bytes > bound / 3, "{:?}", memory.usage());
    assert_eq!(name(&prose(20_000, 0)), prose(20_000, 0).len(), "what nobody asks for goes");
    memory.clear();
    assert_eq!((memory.usage().parts, memory.usage().bytes), (0, 0));
}

#[test]
fn threads_share_it() {
    let (tokenizer, memory, spaces) = (tiny(), Texts::new(256 << 10, 1), spaces());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (tokenizer, memory, spaces) = (&tokenizer, &memory, &spaces);
            scope.spawn(move || {
                for round in 0..60 {
                    let text = prose(3_000 + 100 * thread, round % 17);
                    let names = named(tokenizer, &text, naming(spaces, memory), &Limits::default()).unwrap();
                    let expected = plain(tokenizer, &text, &Limits::default(), spaces);
                    assert_eq!(Ok((names.tokens, names.names)), expected);
                }
            });
        }
    });
    assert!(memory.usage().bytes <= 256 << 10);
}

/// Texts of what goes wrong at cuts.
fn texts() -> impl Strategy<Value = String> {
    let bit = prop_oneof![
        8 => "[a-z]{1,9} ",
        2 => "[A-Z][a-z]{1,6}[.,;:!?'/]{1,2}",
        2 => "[ \t\n\r]{1,5}",
        1 => "[0-9]{1,8}",
        1 => prop::sample::select(vec![
            "<|im_start|>", "<|im_end|>\n", "<|endoftext|>", "<|im_", "世界，你好。", "中文字", "e\u{301}", "\u{301}",
            "👩‍👩‍👧", "🇩🇪", "\n\n", "\r\n", "\n/x", "'s ", "한국어 ", "か\u{3099}", "Привет ", "\u{a0}", "\n中", "\n。",
        ]).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
    ];
    let line = prop::collection::vec(bit, 0..60).prop_map(|bits| bits.concat());
    let long = (prop::sample::select(vec!["x", "漢", "=", " ", "🙂", "\n"]), 1..1500_usize)
        .prop_map(|(run, times)| run.repeat(times));
    prop::collection::vec(prop_oneof![9 => line, 1 => long], 1..14).prop_map(|lines| lines.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn names_with_a_memory_are_the_names_without(
        texts in prop::collection::vec(texts(), 1..4),
        cuts in prop::collection::vec((0..3_usize, 0..3_usize, 0.0..1.0), 1..8),
        max_tokens in prop_oneof![Just(usize::MAX), 1..900_usize],
        bytes in prop::sample::select(vec![0_usize, 200 << 10, 8 << 20]),
    ) {
        thread_local!(static TINY: (Tokenizer, Tokenizer) = (Tokenizer::load(&files(), EngineOptions::default()).unwrap(), tiny()));
        TINY.with(|(reference, quick)| {
            let (memory, spaces) = (Texts::new(bytes, 3), spaces());
            let limits = Limits { max_tokens, ..Limits::default() };
            let pieces = |(one, other, at): &(usize, usize, f64)| {
                let (one, other) = (&texts[one % texts.len()], &texts[other % texts.len()]);
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "any place will do")]
                let mut at = (one.len() as f64 * at) as usize;
                while !one.is_char_boundary(at) { at -= 1; }
                [one[..at].to_owned(), format!("{}{other}", &one[..at]), one.clone()]
            };
            for text in cuts.iter().flat_map(pieces).filter(|text| !text.is_empty()) {
                let expected = plain(reference, &text, &limits, &spaces);
                for _ in 0..2 {
                    let names = named(quick, &text, naming(&spaces, &memory), &limits);
                    prop_assert_eq!(&names.map(|names| (names.tokens, names.names)), &expected, "{:?}", text);
                }
            }
            Ok(())
        })?;
    }
}

//! The memory of texts takes what it says. A process of its own: nothing else is to take memory meanwhile.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvlb::contract::{BlockSize, Extra, HashAlgo, Hasher, KeyEra, NoneSeed};
use kvlb::openai::{Input, TokenOptions};
use kvlb::state::Texts;
use kvlb::tokenize::{EngineOptions, Files, Limits, Naming, Tokenizer};
use kvlb_tests::harness::stage::tiny_tokenizer;

const ROOM: usize = 48 << 20;
const FILLED: usize = 32 << 20;

fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn what_it_says_to_take_is_what_it_takes() {
    let tokenizer_json = std::fs::read(tiny_tokenizer().join("tokenizer.json")).unwrap();
    let files = Files { tokenizer_json, ..Files::default() };
    let tokenizer = Tokenizer::load(&files, EngineOptions::default()).unwrap().quick();
    let seed = NoneSeed::Text("0".to_owned());
    let hasher = Hasher::new(HashAlgo::Sha256Cbor, &seed, BlockSize::new(16).unwrap());
    let spaces = [(hasher.key_space(KeyEra::Tagged), Extra::default())];
    let memory = Texts::new(ROOM, 1);
    let before = resident();
    for number in 0.. {
        if memory.usage().bytes >= FILLED {
            break;
        }
        assert!(number < 10_000, "{:?}", memory.usage());
        let lines: Vec<_> =
            (0..1000).map(|line| format!("Line {line} of text {number}, about nothing much.")).collect();
        let text = lines.join("\n");
        let naming = Naming { spaces: &spaces, memory: &memory };
        tokenizer.names(&Input::Text(text), &TokenOptions::default(), &Limits::default(), naming).unwrap();
    }
    let (said, taken) = (memory.usage().bytes, resident().saturating_sub(before));
    // The allocator keeps some, and the tokenizer remembers words.
    assert!(taken < said * 2 && taken > said / 2, "said {said}, took {taken}");
}

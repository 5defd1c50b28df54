//! Which places of the small tokenizer, and of changed ones, are cuts.

use serde_json::json;

use super::*;

const TINY: &[u8] = include_bytes!("../../../../tests/golden/tiny-tokenizer/tokenizer.json");

/// The small tokenizer with some of its parts replaced.
fn changed(change: impl FnOnce(&mut Value)) -> Cuts {
    let mut file: Value = serde_json::from_slice(TINY).unwrap();
    change(&mut file);
    Cuts::of(&Tokenizer::from_bytes(file.to_string()).unwrap())
}

fn cut(cuts: &Cuts, pair: &str) -> bool {
    let signs: Vec<_> = pair.chars().map(|char| Sign::of(char).unwrap()).collect();
    cuts.pairs.contains(signs[0], signs[1])
}

#[test]
fn parts_are_the_text_and_long_enough() {
    let cuts = changed(|_| ());
    let text = "One line.\nAnother, which is longer.\n\nAnd some more 中文。\n".repeat(250);
    let parts: Vec<_> = cuts.parts(&text).collect();
    assert_eq!(parts.concat(), text);
    assert!(parts.len() > 5);
    assert!(parts[..parts.len() - 1].iter().all(|part| (PART_MIN..PART_MIN + 88).contains(&part.len())));
    let longer = format!("{text}And more of it.\n");
    assert!(cuts.parts(&longer).zip(&parts[..parts.len() - 1]).all(|(longer, part)| longer == *part));
}

#[test]
fn a_text_without_cuts_is_one_part() {
    let text = "漢字🙂".repeat(1000);
    assert_eq!(changed(|_| ()).parts(&text).collect::<Vec<_>>(), [&text]);
    assert_eq!(Cuts::none().parts(&text).count(), 1);
    assert_eq!(changed(|_| ()).parts("").count(), 0);
}

#[test]
fn what_is_around_a_line_break_decides_whether_it_is_a_cut() {
    let cuts = changed(|_| ());
    for pair in ["\nx", "\n7", "\n<", "\n中", "x ", ", ", "7 ", "中。", "がか"] {
        assert_eq!(cut(&cuts, pair), pair != "がか", "{pair:?}");
    }
    for pair in ["xy", " x", "\n\n", "\n ", "  ", "\tx", "\rx", ">\n", "'s", "!?"] {
        assert!(!cut(&cuts, pair), "{pair:?}");
    }
}

#[test]
fn added_tokens_are_never_cut_and_the_space_that_they_take_along_neither() {
    let with = |content: &str, change: fn(&mut Value)| {
        changed(|file| {
            let mut token = json!({"id": 5000, "content": content, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false});
            change(&mut token);
            file["added_tokens"].as_array_mut().unwrap().push(token);
        })
    };
    let joined = with("a\nb c", |_| ());
    assert!(!cut(&joined, "\nb") && !cut(&joined, "b ") && cut(&joined, "\nc") && cut(&joined, "c "));
    let left = with("<l>", |token| token["lstrip"] = true.into());
    assert!(!cut(&left, "\n<") && !cut(&left, "\nx") && cut(&left, "x "));
    let right = with("<r>", |token| token["rstrip"] = true.into());
    assert!(!cut(&right, "x ") && cut(&right, "\nx"));
    assert!(!with("word", |token| token["single_word"] = true.into()).any());
}

#[test]
fn a_normaliser_that_may_join_or_move_characters_leaves_no_cuts() {
    let normalised = |normaliser: Value| changed(|file| file["normalizer"] = normaliser);
    assert!(cut(&normalised(Value::Null), "\nx"));
    assert!(cut(&normalised(json!({"type": "NFC"})), "\n中"));
    let compatible = normalised(json!({"type": "NFKC"}));
    assert!(cut(&compatible, "\nx") && !cut(&compatible, "\n中"));
    for other in [
        json!({"type": "Prepend", "prepend": "▁"}),
        json!({"type": "Lowercase"}),
        json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        json!({"type": "Replace", "pattern": {"Regex": "\\n+"}, "content": "x"}),
        json!({"type": "Replace", "pattern": {"String": "\n"}, "content": "x"}),
        json!({"type": "Replace", "pattern": {"String": "\nx"}, "content": "▁"}),
        json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}]}),
    ] {
        assert!(!normalised(other.clone()).any(), "{other}");
    }
}

#[test]
fn a_step_that_may_look_at_neighbours_leaves_no_cuts() {
    let stepped = |step: Value| changed(|file| file["pre_tokenizer"] = step);
    let bytes = |space: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": true, "use_regex": regex});
    let split = |pattern: &str, behaviour: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": behaviour, "invert": false});
    let gpt2 = stepped(bytes(false, true));
    assert!(cut(&gpt2, "x ") && !cut(&gpt2, "\nx"));
    for other in [
        bytes(true, true),
        bytes(false, false),
        json!({"type": "BertPreTokenizer"}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}),
        split(r"\p{N}{1,3}", "MergedWithPrevious"),
        split(r"(?<=a)b|\s*[\r\n]+|\s+", "Isolated"),
        json!({"type": "Sequence", "pretokenizers": [bytes(false, false), split(r"\s", "Isolated")]}),
    ] {
        assert!(!stepped(other.clone()).any(), "{other}");
    }
}

#[test]
fn without_words_the_merges_decide() {
    // As Gemma's: one word is as long as the text.
    let merging = |change: fn(&mut Value)| {
        changed(|file| {
            file["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
            file["pre_tokenizer"] =
                json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
            file["added_tokens"] = json!([]);
            file["model"] = json!({"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": false,
                "vocab": {"<unk>": 0, "a": 1, "b": 2, "▁": 3, "\n": 4, "ab": 5, "▁a": 6, "a\n": 7},
                "merges": [["a", "b"], ["▁", "a"], ["a", "\n"]]});
            change(file);
        })
    };
    let cuts = merging(|_| ());
    assert!(cut(&cuts, "ba") && cut(&cuts, "\na") && cut(&cuts, "b ") && cut(&cuts, "a "));
    assert!(!cut(&cuts, "ab") && !cut(&cuts, " a") && !cut(&cuts, "a\n"));
    assert!(!cut(&cuts, "\nx") && !cut(&cuts, "xb"), "unknown characters next to each other are one token");
    assert!(!merging(|file| file["model"]["dropout"] = 0.1.into()).any());
    assert!(!merging(|file| file["model"]["end_of_word_suffix"] = "</w>".into()).any());
}

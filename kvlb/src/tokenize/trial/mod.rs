//! The texts on which a tokenizer is tried against the reference.

use tokenizers::Tokenizer;

/// Written by hand: prose in many scripts, code, markup, numbers, white space, what has gone wrong in tokenizers before.
const WRITTEN: &str = include_str!("texts.txt");
const SEPARATOR: &str = "\n=====\n";

/// How many texts are mixed by chance, always the same ones.
const MIXES: usize = 320;
/// Bits of a mix, at most.
const MIX_BITS: u64 = 60;
/// Added tokens that one text has.
const TOKENS_PER_TEXT: usize = 64;

/// What mixes are made of.
const BITS: [&str; 70] = [
    "a",
    "I",
    " the",
    "hello",
    "World",
    " tokens",
    "ing",
    "'s",
    "'LL",
    "'re",
    "’t",
    "é",
    "e\u{301}",
    "\u{301}",
    "ß",
    "İ",
    "Ω",
    "ж",
    "Привет",
    "你好",
    "世界",
    "的",
    "漢字",
    "。",
    "，",
    "、",
    "ひらがな",
    "カタカナ",
    "か\u{3099}",
    "한국어",
    "\u{1100}\u{1161}\u{11a8}",
    "العربية",
    "עברית",
    "हिन्दी",
    "ไทย",
    "🙂",
    "👩‍👩‍👧",
    "🇩🇪",
    "1",
    "42",
    "1234567",
    "½",
    "²",
    "٣",
    ".",
    ",",
    "!?",
    "...",
    "--",
    "/",
    "//",
    "\\",
    "(",
    ")",
    "<",
    ">",
    "|",
    "\"",
    "_",
    " ",
    "  ",
    "     ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\u{a0}",
    "\u{3000}",
    "\u{200b}",
    "\u{feff}",
];

/// Ranges from which mixes take characters.
const RANGES: [(u32, u32); 12] = [
    (0x20, 0x7e),
    (0, 0x1f),
    (0x80, 0x24f),
    (0x300, 0x36f),
    (0x370, 0x5ff),
    (0x900, 0xdff),
    (0x1e00, 0x206f),
    (0x3040, 0x30ff),
    (0x4e00, 0x9fff),
    (0xac00, 0xd7a3),
    (0xf900, 0xffef),
    (0x1_f300, 0x1_f9ff),
];

/// The texts for `tokenizer`: the same for all, and its own added tokens between them.
pub(super) fn texts(tokenizer: &Tokenizer) -> Vec<String> {
    let mut added: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
    added.sort_unstable_by_key(|(id, _)| *id);
    let added: Vec<String> = added.into_iter().map(|(_, token)| token.content).collect();
    let written = WRITTEN.split(SEPARATOR).map(str::to_owned);
    let runs = ["a", "ab", " ", "\n", "\t", "0", "=", "é", "e\u{301}", "漢", "🙂", "\u{1161}"];
    let runs = runs.iter().flat_map(|run| [2, 3, 7, 16, 65, 700].map(|times| run.repeat(times)));
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let tokens = added.chunks(TOKENS_PER_TEXT).map(|tokens| {
        let bits = tokens.iter().flat_map(|token| [chance.of(&BITS), token.as_str()]);
        bits.collect::<String>()
    });
    let mut texts: Vec<String> = written.chain(runs).chain(tokens).collect();
    texts.extend((0..MIXES).map(|_| chance.mix(&added)));
    texts
}

/// Numbers that look random and are always the same (xorshift).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    fn of<'t>(&mut self, all: &[&'t str]) -> &'t str {
        usize::try_from(self.below(all.len() as u64)).ok().and_then(|at| all.get(at).copied()).unwrap_or_default()
    }

    fn char(&mut self) -> Option<char> {
        let range = usize::try_from(self.below(RANGES.len() as u64)).ok()?;
        let (first, last) = *RANGES.get(range)?;
        char::from_u32(first + u32::try_from(self.below(u64::from(last - first + 1))).ok()?)
    }

    fn mix(&mut self, added: &[String]) -> String {
        let mut text = String::new();
        for _ in 0..=self.below(MIX_BITS) {
            match self.below(8) {
                0 => text.extend(self.char()),
                1 => {
                    let at = usize::try_from(self.below(added.len() as u64)).unwrap_or_default();
                    text.push_str(added.get(at).map_or("", String::as_str));
                }
                _ => text.push_str(self.of(&BITS)),
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_some_hundred_texts_with_every_added_token_and_they_stay_the_same() {
        let tokenizer = include_bytes!("../../../../tests/golden/tiny-tokenizer/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(tokenizer).unwrap();
        let texts = texts(&tokenizer);
        assert!(texts.len() > 400, "{}", texts.len());
        assert_eq!(texts, super::texts(&tokenizer));
        for token in tokenizer.get_added_tokens_decoder().into_values() {
            assert!(texts.iter().any(|text| text.contains(&token.content)), "{}", token.content);
        }
        assert!(texts.iter().all(|text| text.len() < 16 << 10), "a trial takes no longer than loading");
    }
}

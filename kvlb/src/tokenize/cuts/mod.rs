//! Where a text may be cut so that its parts have the tokens of the whole.
//!
//! Read off each loaded tokenizer: from the rules by which it normalises text, takes out added tokens, and cuts the rest
//! into words, it follows for every pair of neighbouring characters whether a token can ever span the two, or depend on
//! their being neighbours. Where that is not known there are no cuts. Held by a trial at load ([`Cuts::hold_for`]), and
//! by tests against whole texts.

mod sign;
mod words;

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::{AddedToken, NormalizedString, Normalizer as _, Tokenizer};

use sign::{Pairs, Sign, Signs};

/// Bytes between two cuts, at least. Each part costs a look-up when it is known, and all of it is read again when its
/// last character changes: at this length the two cost about the same.
const PART_MIN: usize = 2048;

/// How GPT-2 cuts text into words.
///
/// Source: `tokenizers` 0.23, `ByteLevel` with `use_regex`.
const GPT2_WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The places where texts may be cut.
#[derive(Clone, Debug)]
pub(super) struct Cuts {
    /// Neighbours between which a text may be cut.
    pairs: Pairs,
}

impl Cuts {
    /// No places at all.
    pub(super) fn none() -> Self {
        Self { pairs: Pairs::none() }
    }

    /// Those of `tokenizer`; none where they cannot be told.
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        Self { pairs: pairs(tokenizer).unwrap_or_else(Pairs::none) }
    }

    /// Whether there are any.
    pub(super) fn any(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// The parts of `text`, each as short as may be but of 2048 bytes at least, except the last one.
    ///
    /// Where a part ends depends on nothing that comes after it but one character, so texts that begin alike have their
    /// first parts in common.
    pub(super) fn parts<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        self.parts_of(text, PART_MIN)
    }

    /// Whether `ids` of a text are those of its parts, for each of `texts`.
    pub(super) fn hold_for<'t, I: PartialEq, E>(
        &self,
        texts: impl IntoIterator<Item = &'t str>,
        ids: impl Fn(&str) -> Result<Vec<I>, E>,
    ) -> Result<bool, E> {
        for text in texts {
            let mut together = Vec::new();
            for part in self.parts_of(text, 1) {
                together.extend(ids(part)?);
            }
            if ids(text)? != together {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn parts_of<'t>(&self, text: &'t str, least: usize) -> impl Iterator<Item = &'t str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            let (part, after) = rest.split_at(self.first_cut(rest, least));
            rest = after;
            (!part.is_empty()).then_some(part)
        })
    }

    /// The first place from `least` bytes on where `text` may be cut, or its end.
    fn first_cut(&self, text: &str, least: usize) -> usize {
        let Some(from) = (least..text.len()).find(|at| text.is_char_boundary(*at)) else { return text.len() };
        let mut before = text[..from].chars().next_back().and_then(Sign::of);
        for (at, char) in text[from..].char_indices() {
            let after = Sign::of(char);
            if let (Some(before), Some(after)) = (before, after)
                && self.pairs.contains(before, after)
            {
                return from + at;
            }
            before = after;
        }
        text.len()
    }
}

/// The neighbours between which texts may be cut, or `None` where that is not known.
fn pairs(tokenizer: &Tokenizer) -> Option<Pairs> {
    let part = |part: serde_json::Result<Value>| part.ok();
    let mut characters = Characters::default();
    characters.read(&part(serde_json::to_value(tokenizer.get_normalizer()))?)?;
    let mut steps = Steps::new();
    steps.read(&part(serde_json::to_value(tokenizer.get_pre_tokenizer()))?, &mut characters)?;
    let added = Added::read(tokenizer, &characters)?;
    let model = match tokenizer.get_model() {
        ModelWrapper::BPE(model) if !steps.writes_bytes => Merges::read(model, &characters),
        _ => None,
    };
    let apart = |a, b| steps.certain.contains(a, b) || model.as_ref().is_some_and(|model| model.apart(a, b));
    Some(Pairs::which(|a, b| {
        characters.known(a) && characters.known(b) && steps.apart.contains(a, b) && added.apart(a, b) && apart(a, b)
    }))
}

/// What the normaliser, and the steps after it, make of single characters.
#[derive(Default)]
struct Characters {
    /// Characters that become others: spaces often do.
    renamed: Vec<(char, char)>,
    ascii_only: bool,
}

impl Characters {
    /// Reads a normaliser; `None` where it may do anything with neighbours.
    fn read(&mut self, normaliser: &Value) -> Option<()> {
        if normaliser.is_null() {
            return Some(());
        }
        match normaliser["type"].as_str()? {
            "NFC" => {}
            // What they make of other characters is of another kind than the character itself.
            "NFD" | "NFKC" | "NFKD" => self.ascii_only = true,
            "Sequence" => normaliser["normalizers"].as_array()?.iter().try_for_each(|one| self.read(one))?,
            "Replace" => {
                let from = single_char(normaliser["pattern"]["String"].as_str()?)?;
                self.rename(from, single_char(normaliser["content"].as_str()?)?)?;
            }
            _ => return None,
        }
        Some(())
    }

    /// Notes that `from` becomes `to`, which no sign may be: what it does is asked for by the sign of `from`.
    fn rename(&mut self, from: char, to: char) -> Option<()> {
        let chained = self.renamed.iter().any(|(before, after)| *before == from || *after == from || *after == to);
        (Sign::of(to).is_none() && !chained).then(|| self.renamed.push((from, to)))
    }

    /// The sign of a character as it is after the normaliser.
    fn sign(&self, char: char) -> Option<Sign> {
        let before = self.renamed.iter().find(|(_, after)| *after == char).map(|(before, _)| *before);
        Sign::of(before.unwrap_or(char))
    }

    /// What a character is after the normaliser.
    fn renamed(&self, char: char) -> char {
        self.renamed.iter().find(|(before, _)| *before == char).map_or(char, |(_, after)| *after)
    }

    fn is_renamed(&self, sign: Sign) -> bool {
        self.renamed.iter().any(|(before, _)| Sign::of(*before) == Some(sign))
    }

    /// Whether it is known what comes of a sign. What control characters count as depends on the library.
    fn known(&self, sign: Sign) -> bool {
        match sign.char() {
            Some(char) => !char.is_control() || char == '\n',
            None => !self.ascii_only,
        }
    }
}

fn single_char(text: &str) -> Option<char> {
    let mut chars = text.chars();
    chars.next().filter(|_| chars.next().is_none())
}

/// What the steps that cut text into words do with neighbours.
struct Steps {
    /// Pairs that no step looks at together.
    apart: Pairs,
    /// Pairs that some step is certain to cut apart.
    certain: Pairs,
    /// Whether characters have become letters that stand for their bytes.
    writes_bytes: bool,
}

impl Steps {
    fn new() -> Self {
        Self { apart: Pairs::which(|_, _| true), certain: Pairs::none(), writes_bytes: false }
    }

    /// Reads a pre-tokeniser; `None` where it may do anything with neighbours.
    fn read(&mut self, step: &Value, characters: &mut Characters) -> Option<()> {
        if step.is_null() {
            return Some(());
        }
        let kind = step["type"].as_str()?;
        if kind == "Sequence" {
            return step["pretokenizers"].as_array()?.iter().try_for_each(|one| self.read(one, characters));
        }
        if self.writes_bytes {
            return None;
        }
        match kind {
            "Split" => self.read_split(step, characters),
            "ByteLevel" => {
                let plain = step["add_prefix_space"] == Value::Bool(false);
                if step["use_regex"] != Value::Bool(false) {
                    self.cut_words(GPT2_WORDS, false, characters)?;
                }
                self.writes_bytes = true;
                plain.then_some(())
            }
            "Digits" => {
                let each = step["individual_digits"] == Value::Bool(true);
                self.restrict(|a, b| each || !(a.is_digit() && b.is_digit()));
                self.add_certain(|a, b| if each { a.is_digit() || b.is_digit() } else { a.is_digit() != b.is_digit() });
                Some(())
            }
            "Metaspace" => {
                let starts_alike = step["prepend_scheme"] == "never";
                characters.rename(' ', single_char(step["replacement"].as_str()?)?)?;
                starts_alike.then_some(())
            }
            _ => None,
        }
    }

    fn read_split(&mut self, step: &Value, characters: &Characters) -> Option<()> {
        if let Some(at) = step["pattern"]["String"].as_str() {
            let at = single_char(at)?;
            // One that the normaliser has taken away is never met.
            if characters.renamed(at) == at {
                self.restrict(|a, b| a.char() != Some(at) && b.char() != Some(at));
            }
            return Some(());
        }
        let words = step["pattern"]["Regex"].as_str()?;
        match (step["behavior"].as_str()?, step["invert"].as_bool()?) {
            ("Isolated", false) => self.cut_words(words, false, characters),
            ("Removed", true) => self.cut_words(words, true, characters),
            _ => None,
        }
    }

    /// A step that cuts text into words, and drops what is none of them, if `only_words`.
    fn cut_words(&mut self, pattern: &str, only_words: bool, characters: &Characters) -> Option<()> {
        let words = words::analyse(pattern)?;
        let known = |sign| !characters.is_renamed(sign);
        self.restrict(|a, b| words.apart.contains(a, b) && known(a) && known(b));
        self.add_certain(|a, b| only_words || words.matched.contains(a) || words.matched.contains(b));
        Some(())
    }

    fn restrict(&mut self, keep: impl Fn(Sign, Sign) -> bool) {
        self.apart = Pairs::which(|a, b| self.apart.contains(a, b) && keep(a, b));
    }

    fn add_certain(&mut self, add: impl Fn(Sign, Sign) -> bool) {
        self.certain = Pairs::which(|a, b| self.certain.contains(a, b) || add(a, b));
    }
}

/// What added tokens do with neighbours.
struct Added {
    inside: Pairs,
    strips_before: bool,
    strips_after: bool,
}

impl Added {
    /// `None` where a token's being one depends on the characters around it.
    fn read(tokenizer: &Tokenizer, characters: &Characters) -> Option<Self> {
        let mut all = Self { inside: Pairs::none(), strips_before: false, strips_after: false };
        let mut tokens: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
        tokens.sort_unstable_by(|a, b| a.content.cmp(&b.content));
        for token in tokens {
            if token.single_word {
                return None;
            }
            all.strips_before |= token.lstrip;
            all.strips_after |= token.rstrip;
            let mut normal = NormalizedString::from(token.content.as_str());
            if let Some(normaliser) = tokenizer.get_normalizer() {
                normaliser.normalize(&mut normal).ok()?;
            }
            for content in [token.content.as_str(), normal.get()] {
                all.inside.insert_neighbours(content, |char| characters.sign(char));
            }
        }
        Some(all)
    }

    fn apart(&self, a: Sign, b: Sign) -> bool {
        !(self.inside.contains(a, b) || self.strips_before && a.is_space() || self.strips_after && b.is_space())
    }
}

/// What merging does with neighbours where words may be as long as the text: a merge that joins two characters makes a
/// token that has them as neighbours.
struct Merges {
    inside: Pairs,
    /// Signs that are tokens, or become tokens that nothing is merged with.
    alone: Signs,
}

impl Merges {
    fn read(model: &BPE, characters: &Characters) -> Option<Self> {
        let affix = |affix: &Option<String>| affix.as_ref().is_some_and(|affix| !affix.is_empty());
        let random = model.dropout.is_some_and(|dropout| dropout > 0.0);
        if random || affix(&model.continuing_subword_prefix) || affix(&model.end_of_word_suffix) {
            return None;
        }
        let vocabulary = model.get_vocab();
        let byte = |byte: u8| format!("<0x{byte:02X}>");
        let bytes_known = (0..=u8::MAX).all(|number| vocabulary.contains_key(&byte(number)));
        let (mut inside, mut bytes_merge) = (Pairs::none(), false);
        #[expect(clippy::iter_over_hash_type, reason = "sets of pairs are united, in whatever order")]
        for token in vocabulary.keys() {
            inside.insert_neighbours(token, |char| characters.sign(char));
            bytes_merge |= token.contains("<0x") && token.len() > byte(0).len();
        }
        let by_bytes = model.byte_fallback && bytes_known && !bytes_merge;
        let is_token = |char: char| vocabulary.contains_key(characters.renamed(char).encode_utf8(&mut [0; 4]) as &str);
        let alone = Signs::which(|sign| by_bytes || sign.char().is_some_and(is_token));
        Some(Self { inside, alone })
    }

    fn apart(&self, a: Sign, b: Sign) -> bool {
        !self.inside.contains(a, b) && self.alone.contains(a) && self.alone.contains(b)
    }
}

#[cfg(test)]
mod tests;

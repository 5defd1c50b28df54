//! The characters that cuts are decided by.

use std::ops::RangeInclusive;

/// Characters that count one by one: ASCII.
const SINGLE: usize = 128;

/// Ranges of characters that count as one each. All of them are letters of a script or punctuation, none is white space
/// or a number, each is its own NFC form, and none composes with the character before it.
const RANGES: [RangeInclusive<char>; 9] = [
    '\u{c0}'..='\u{d6}',
    '\u{d8}'..='\u{f6}',
    'А'..='я',
    '\u{3001}'..='\u{3002}',
    'ぁ'..='ゖ',
    'ァ'..='ヺ',
    '一'..='\u{9fa5}',
    '가'..='힣',
    '\u{ff0c}'..='\u{ff0c}',
];

/// How many signs there are.
pub(super) const SIGNS: usize = SINGLE + RANGES.len();

/// One ASCII character, or one range of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sign(u8);

impl Sign {
    /// Every sign.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).take(SIGNS).map(Self)
    }

    /// The sign that `char` is or belongs to.
    pub(super) fn of(char: char) -> Option<Self> {
        if char.is_ascii() {
            return u8::try_from(char).ok().map(Self);
        }
        let range = RANGES.iter().position(|range| range.contains(&char))?;
        u8::try_from(SINGLE + range).ok().map(Self)
    }

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }

    /// The one character that it is, if it is one.
    pub(super) fn char(self) -> Option<char> {
        self.0.is_ascii().then(|| char::from(self.0))
    }

    /// Its first and last character.
    pub(super) fn bounds(self) -> (char, char) {
        match self.index().checked_sub(SINGLE).and_then(|range| RANGES.get(range)) {
            Some(range) => (*range.start(), *range.end()),
            None => (char::from(self.0), char::from(self.0)),
        }
    }

    pub(super) fn is_space(self) -> bool {
        self.char().is_some_and(char::is_whitespace)
    }

    pub(super) fn is_digit(self) -> bool {
        self.0.is_ascii_digit()
    }

    pub(super) fn is_newline(self) -> bool {
        matches!(self.char(), Some('\n' | '\r'))
    }
}

/// A set of signs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Signs([u64; SIGNS.div_ceil(64)]);

impl Signs {
    /// Those for which `holds`.
    pub(super) fn which(holds: impl Fn(Sign) -> bool) -> Self {
        let mut signs = Self::default();
        Sign::all().filter(|sign| holds(*sign)).for_each(|sign| signs.insert(sign));
        signs
    }

    pub(super) const fn contains(&self, sign: Sign) -> bool {
        self.0[sign.index() / 64] & (1 << (sign.index() % 64)) != 0
    }

    pub(super) const fn insert(&mut self, sign: Sign) {
        self.0[sign.index() / 64] |= 1 << (sign.index() % 64);
    }

    pub(super) fn unite(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(mine, other)| *mine |= other);
    }
}

/// A set of pairs of signs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pairs(Vec<Signs>);

impl Pairs {
    pub(super) fn none() -> Self {
        Self(vec![Signs::default(); SIGNS])
    }

    /// Those for which `holds`.
    pub(super) fn which(holds: impl Fn(Sign, Sign) -> bool) -> Self {
        Self(Sign::all().map(|first| Signs::which(|second| holds(first, second))).collect())
    }

    pub(super) fn contains(&self, first: Sign, second: Sign) -> bool {
        self.0[first.index()].contains(second)
    }

    pub(super) fn insert(&mut self, first: Sign, second: Sign) {
        self.0[first.index()].insert(second);
    }

    /// Adds every pair of one of `first` and one of `second`.
    pub(super) fn insert_all(&mut self, first: &Signs, second: &Signs) {
        Sign::all().filter(|sign| first.contains(*sign)).for_each(|sign| self.0[sign.index()].unite(second));
    }

    /// Adds the pairs that stand next to each other in `text`, as `seen` sees its characters.
    pub(super) fn insert_neighbours(&mut self, text: &str, seen: impl Fn(char) -> Option<Sign>) {
        let mut before = None;
        for sign in text.chars().map(seen) {
            if let (Some(first), Some(second)) = (before, sign) {
                self.insert(first, second);
            }
            before = sign;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|signs| *signs == Signs::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sign_is_that_of_its_characters() {
        for sign in Sign::all() {
            let (first, last) = sign.bounds();
            assert_eq!((Sign::of(first), Sign::of(last)), (Some(sign), Some(sign)));
        }
        for other in ['\u{301}', '\u{3099}', '\u{1161}', '\u{d7}', '🙂', '\u{2581}', '\u{85}'] {
            assert_eq!(Sign::of(other), None, "{other:?}");
        }
    }

    #[test]
    fn no_range_has_a_number_a_space_or_a_character_that_nfc_changes() {
        use tokenizers::normalizers::NFC;
        use tokenizers::{NormalizedString, Normalizer as _};
        for char in RANGES.into_iter().flatten() {
            assert!(!char.is_whitespace() && !char.is_numeric(), "{char:?}");
            for before in ["e", "\n", "か", "ᄀ", "가"] {
                let text = format!("{before}{char}");
                let mut normal = NormalizedString::from(text.as_str());
                NFC.normalize(&mut normal).unwrap();
                assert_eq!(normal.get(), text);
            }
        }
    }

    #[test]
    fn neighbours_with_something_else_between_them_are_none() {
        let mut pairs = Pairs::none();
        pairs.insert_neighbours("a🙂bc", Sign::of);
        let of = |char| Sign::of(char).unwrap();
        assert!(pairs.contains(of('b'), of('c')));
        assert!(!pairs.contains(of('a'), of('b')) && !pairs.contains(of('c'), of('b')));
    }
}

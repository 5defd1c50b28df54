//! What a decode endpoint says of its cache, put right while it goes by.
//!
//! An engine counts the blocks that it fetched from another as cached. To a client, and to whoever watches hit rates, cached is
//! what nobody had to compute: what the prefill endpoint had. So the number is overwritten where it stands, with blanks behind
//! it: not a byte more or less. A number that a piece ends in waits for its rest, and nothing else does. It only ever becomes
//! smaller; where ours has no room (`1e9`), or it is no number at all, it stays.

use serde_json::value::RawValue;

use super::buffer::Chunk;

/// The member that tells it.
const KEY: &[u8] = b"cached_tokens";
/// Bytes of a number that is put right: those of a u64 take 20, and a longer one is no count of tokens.
const NUMBER_MAX: usize = 64;

/// Follows an answer's payload and overwrites the number of each [`KEY`].
#[derive(Debug)]
pub(super) struct Correction {
    cached: u64,
    digits: String,
    state: State,
    /// Bytes of [`KEY`] that the text under way begins with; none where it is another.
    matched: Option<usize>,
    /// The number under way, and where its bytes are: counted from the front of what has not gone on.
    number: Vec<u8>,
    places: Vec<usize>,
    /// What is to be written where.
    fixes: Vec<(usize, u8)>,
    /// What waits for the rest of the number that it begins with.
    held: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Between texts.
    Outside,
    Text,
    /// Behind a backslash.
    Escape,
    /// So many hex digits of an escaped letter, and their value.
    Letter(u8, u32),
    /// The key, and blanks behind it.
    Colon,
    /// A colon, and blanks behind it.
    Value,
    Number,
}

impl Correction {
    /// `cached` is what is to be told.
    pub(super) fn new(cached: u64) -> Self {
        Self {
            cached,
            digits: cached.to_string(),
            state: State::Outside,
            matched: None,
            number: Vec::new(),
            places: Vec::new(),
            fixes: Vec::new(),
            held: Vec::new(),
        }
    }

    /// What is to be told.
    pub(super) fn cached(&self) -> u64 {
        self.cached
    }

    /// Reads the next bytes of the payload, which are `at` bytes behind the front of their piece.
    pub(super) fn read(&mut self, payload: &[u8], at: usize) {
        let front = self.held.len() + at;
        for (offset, byte) in payload.iter().enumerate() {
            self.step(*byte, front + offset);
        }
    }

    /// Puts a piece right that has been read, with what waited for it in front. What is to wait is cut off, but of the last one
    /// nothing.
    pub(super) fn put_right(&mut self, piece: &mut Chunk, is_last: bool) {
        if !self.held.is_empty() {
            piece.prepend(&self.held);
            self.held.clear();
        }
        for (place, byte) in self.fixes.drain(..) {
            piece.bytes_mut()[place] = byte;
        }
        if let Some(&first) = self.places.first()
            && !is_last
        {
            self.held.extend_from_slice(&piece.bytes()[first..]);
            piece.truncate(first);
            self.places.iter_mut().for_each(|place| *place -= first);
        }
    }

    /// What waits for something that will not come.
    pub(super) fn take_held(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }

    /// Whether anything waits.
    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    fn step(&mut self, byte: u8, place: usize) {
        self.state = match (self.state, byte) {
            (State::Text, b'"') if self.matched == Some(KEY.len()) => State::Colon,
            (State::Text, b'\\') => State::Escape,
            (State::Escape, b'u') => State::Letter(0, 0),
            (State::Letter(count, value), b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                let value = value * 16 + char::from(byte).to_digit(16).unwrap_or_default();
                if count == 3 { self.letter(value) } else { State::Letter(count + 1, value) }
            }
            (State::Escape | State::Letter(..), _) => self.letter(u32::MAX),
            (State::Colon, b':') => State::Value,
            (State::Colon | State::Value, b' ' | b'\t' | b'\n' | b'\r') => self.state,
            (State::Value, b'-' | b'0'..=b'9') | (State::Number, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9') => {
                self.number.push(byte);
                self.places.push(place);
                if self.number.len() > NUMBER_MAX { self.leave() } else { State::Number }
            }
            (State::Number, _) => {
                self.overwrite();
                self.leave();
                if byte == b'"' { self.open() } else { State::Outside }
            }
            (State::Outside | State::Colon | State::Value, b'"') => self.open(),
            // A text has no line's end in it: where one is read as if it had, its quotes were none of JSON.
            (State::Outside | State::Colon | State::Value, _) | (State::Text, b'"' | b'\n' | b'\r') => State::Outside,
            (State::Text, _) => self.letter(u32::from(byte)),
        };
    }

    fn open(&mut self) -> State {
        self.matched = Some(0);
        State::Text
    }

    /// One more letter of a text.
    fn letter(&mut self, letter: u32) -> State {
        let next = |matched: &usize| KEY.get(*matched).is_some_and(|wanted| u32::from(*wanted) == letter);
        self.matched = self.matched.filter(next).map(|matched| matched + 1);
        State::Text
    }

    /// The number under way is over, or goes on without us.
    fn leave(&mut self) -> State {
        self.number.clear();
        self.places.clear();
        State::Outside
    }

    /// Writes ours over the number under way.
    fn overwrite(&mut self) {
        let text = std::str::from_utf8(&self.number).unwrap_or_default();
        let is_number = serde_json::from_str::<&RawValue>(text).is_ok();
        if !is_number || self.digits.len() > text.len() || !is_more(text, self.cached) {
            return;
        }
        let bytes = self.digits.bytes().chain(std::iter::repeat(b' '));
        self.fixes.extend(self.places.iter().copied().zip(bytes));
    }
}

/// Whether a number says more than `cached`.
fn is_more(number: &str, cached: u64) -> bool {
    match number.parse::<u64>() {
        Ok(number) => number > cached,
        #[expect(clippy::cast_precision_loss, reason = "nobody caches so many tokens that it matters")]
        Err(_other_form) => number.parse::<f64>().is_ok_and(|number| number > cached as f64),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// What goes on of a text in these pieces, piece by piece.
    fn pieces(text: &str, cached: u64, sizes: &[usize]) -> Vec<String> {
        let mut correction = Correction::new(cached);
        let (mut rest, mut out) = (text.as_bytes(), Vec::new());
        for size in sizes.iter().copied().chain([usize::MAX]) {
            let (piece, behind) = rest.split_at(size.min(rest.len()));
            let mut piece = Chunk::copy_of(0, piece);
            correction.read(piece.bytes(), 0);
            correction.put_right(&mut piece, size == usize::MAX);
            out.push(String::from_utf8(piece.bytes().to_vec()).unwrap());
            rest = behind;
        }
        assert!(!correction.holds(), "the end never waits");
        out
    }

    fn corrected(text: &str, cached: u64, sizes: &[usize]) -> String {
        pieces(text, cached, sizes).concat()
    }

    #[test]
    fn the_number_becomes_the_prefill_endpoint_s_and_nothing_moves() {
        let text = r#"{"usage":{"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":69,"x":1}}}"#;
        assert_eq!(corrected(text, 32, &[]), text.replace("69", "32"));
        assert_eq!(corrected(text, 0, &[]), text.replace("69", "0 "));
        assert_eq!(corrected(&text.replace(":69", " : 69"), 7, &[]), text.replace(":69", " : 7 "));
    }

    #[test]
    fn a_number_of_any_form_is_overwritten_as_a_whole_wherever_it_is_cut() {
        for told in ["69.0", "6.9e1", "69.0E+0", "690e-1", "1e400", "99999999999999999999999", "69"] {
            let text = format!(r#"{{"cached_tokens":{told},"x":69.5}}"#);
            for cached in [0, 5, 16] {
                let wanted = text.replace(&format!("{told},"), &format!("{cached:<0$},", told.len()));
                for cut in 0..text.len() {
                    assert_eq!(corrected(&text, cached, &[cut]), wanted, "cut at {cut}");
                }
                assert_eq!(corrected(&text, cached, &vec![1; text.len()]), wanted, "in bytes");
            }
        }
        assert_eq!(corrected(r#"{"cached_tokens":1e9}"#, 12345, &[]), r#"{"cached_tokens":1e9}"#, "there is no room");
        let long = format!(r#"{{"cached_tokens":{}}}"#, "7".repeat(100));
        assert_eq!(corrected(&long, 0, &[50]), long);
    }

    #[test]
    fn a_key_counts_however_it_is_written() {
        for key in [r"cached_token\u0073", r"\u0063ached_tokens", r"cached\u005Ftokens"] {
            let text = format!(r#"{{"{key}" : 69}}"#);
            assert_eq!(corrected(&text, 3, &[]), text.replace("69", "3 "));
            assert_eq!(corrected(&text, 3, &vec![1; text.len()]), text.replace("69", "3 "));
        }
        for key in [r"cached_token\u0074", r"cached_tokens\u0020", r"\u0163ached_tokens", r"cached_token\s"] {
            let text = format!(r#"{{"{key}":69}}"#);
            assert_eq!(corrected(&text, 3, &[]), text);
        }
    }

    #[test]
    fn only_a_number_s_own_bytes_wait_and_the_end_never_does() {
        let text = r#"{"cached_tokens":6944} "#;
        let cut = text.find("44").unwrap();
        assert_eq!(pieces(text, 16, &[cut]), [r#"{"cached_tokens":"#, "16  } "]);
        assert_eq!(pieces(text, 16, &[cut - 2]), [r#"{"cached_tokens":"#, "16  } "]);
        assert_eq!(corrected(&text[..cut], 1, &[]), text[..cut], "it may not be all of the number");
    }

    #[test]
    fn a_number_that_is_no_larger_is_left_alone() {
        for (told, cached) in [
            ("32", 32),
            ("16", 32),
            ("5", 32),
            ("-5", 0),
            ("31.9", 32),
            ("069", 1),
            ("6-9", 1),
            ("null", 0),
            ("\"9\"", 0),
        ] {
            let text = format!(r#"{{"cached_tokens":{told}}}"#);
            assert_eq!(corrected(&text, cached, &[]), text);
        }
    }

    #[test]
    fn what_a_model_writes_about_it_is_left_alone() {
        let content = r#"{"cached_tokens":69} and "cached_tokens" : 69"#;
        let text =
            json!({"choices": [{"text": content, "a\"cached_tokens": 69}], "k": "cached_tokens", "n": 69}).to_string();
        assert_eq!(corrected(&text, 0, &[]), text);
    }

    #[test]
    fn a_quote_outside_of_json_counts_to_the_end_of_its_line() {
        let text = ": it's 5\"\n\ndata: {\"cached_tokens\":69}\n\n";
        assert_eq!(corrected(text, 0, &[]), text.replace("69", "0 "));
    }

    proptest! {
        #[test]
        fn however_it_is_cut_the_value_is_the_smaller_one(told in 0..2_000_000_u64, cached in 0..100_000_u64, sizes in prop::collection::vec(1..30_usize, 0..20)) {
            let text = json!({"usage": {"prompt_tokens_details": {"cached_tokens": told}}, "z": "cached_tokens"}).to_string();
            let after = corrected(&text, cached, &sizes);
            prop_assert_eq!(after.len(), text.len());
            let value: Value = serde_json::from_str(&after).unwrap();
            prop_assert_eq!(value["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64(), Some(told.min(cached)));
            prop_assert_eq!(&value["z"], "cached_tokens");
        }
    }
}

//! What a decode endpoint says of its cache, put right while it goes by.
//!
//! An engine counts the blocks that it fetched from another as cached. To a client, and to whoever watches hit rates, cached is
//! what nobody had to compute: what the prefill endpoint had. So the number is overwritten where it stands, with blanks behind
//! it: not a byte more or less, nothing held back. It only ever becomes smaller, and where that cannot be told it stays.

/// The member that tells it.
const KEY: &[u8] = b"\"cached_tokens\"";

/// Follows an answer's payload and overwrites the number behind each [`KEY`].
#[derive(Debug)]
pub(super) struct Correction {
    cached: u64,
    digits: String,
    state: State,
    /// The last byte escaped this one.
    escaped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// So many bytes of the key have been seen.
    Key(usize),
    /// The key, and blanks behind it.
    Colon,
    /// A colon, and blanks behind it.
    Value,
    /// So many digits of a number that began in an earlier piece and is being overwritten.
    Overwriting(usize),
}

impl Correction {
    /// `cached` is what is to be told.
    pub(super) fn new(cached: u64) -> Self {
        Self { cached, digits: cached.to_string(), state: State::Key(0), escaped: false }
    }

    /// Goes over the next bytes of the payload.
    pub(super) fn take(&mut self, payload: &mut [u8]) {
        let mut at = 0;
        while let Some(&byte) = payload.get(at) {
            let is_escaped = self.escaped;
            self.escaped = byte == b'\\' && !is_escaped;
            self.state = match self.state {
                State::Key(seen) if byte == KEY[seen] && !(seen == 0 && is_escaped) => {
                    if seen + 1 == KEY.len() {
                        State::Colon
                    } else {
                        State::Key(seen + 1)
                    }
                }
                State::Colon if byte == b':' => State::Value,
                State::Colon | State::Value if byte.is_ascii_whitespace() => self.state,
                State::Value if byte.is_ascii_digit() => {
                    let length = payload[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                    let is_whole = at + length < payload.len();
                    let state = self.overwrite(&mut payload[at..at + length], is_whole);
                    at += length;
                    self.state = state;
                    continue;
                }
                State::Overwriting(done) if byte.is_ascii_digit() => {
                    payload[at] = self.digit(done);
                    State::Overwriting(done + 1)
                }
                _ if byte == KEY[0] && !is_escaped => State::Key(1),
                _ => State::Key(0),
            };
            at += 1;
        }
    }

    /// Overwrites a number, or what there is of it.
    fn overwrite(&self, number: &mut [u8], is_whole: bool) -> State {
        let told = std::str::from_utf8(number).ok().and_then(|digits| digits.parse::<u64>().ok());
        let may_be =
            if is_whole { told.is_some_and(|told| told > self.cached) } else { number.len() >= self.digits.len() };
        if !may_be {
            return State::Key(0);
        }
        number.iter_mut().enumerate().for_each(|(at, byte)| *byte = self.digit(at));
        if is_whole { State::Key(0) } else { State::Overwriting(number.len()) }
    }

    fn digit(&self, at: usize) -> u8 {
        self.digits.as_bytes().get(at).copied().unwrap_or(b' ')
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn corrected(text: &str, cached: u64, pieces: &[usize]) -> String {
        let mut bytes = text.as_bytes().to_vec();
        let mut correction = Correction::new(cached);
        let mut rest = bytes.as_mut_slice();
        for size in pieces {
            let (piece, behind) = rest.split_at_mut((*size).min(rest.len()));
            correction.take(piece);
            rest = behind;
        }
        correction.take(rest);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn the_number_becomes_the_prefill_endpoint_s_and_nothing_moves() {
        let text = r#"{"usage":{"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":69,"x":1}}}"#;
        assert_eq!(corrected(text, 32, &[]), text.replace("69", "32"));
        assert_eq!(corrected(text, 0, &[]), text.replace("69", "0 "));
        assert_eq!(corrected(&text.replace(":69", " : 69"), 7, &[]), text.replace(":69", " : 7 "));
    }

    #[test]
    fn a_number_that_is_no_larger_is_left_alone() {
        for (told, cached) in
            [("32", 32), ("16", 32), ("5", 32), ("null", 0), ("\"9\"", 0), ("99999999999999999999999", 5)]
        {
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

    proptest! {
        #[test]
        fn however_it_is_cut_the_value_is_one_or_the_other(told in 0..2_000_000_u64, cached in 0..100_000_u64, pieces in prop::collection::vec(1..30_usize, 0..20)) {
            let text = json!({"usage": {"prompt_tokens_details": {"cached_tokens": told}}, "z": "cached_tokens"}).to_string();
            let after = corrected(&text, cached, &pieces);
            prop_assert_eq!(after.len(), text.len());
            let value: Value = serde_json::from_str(&after).unwrap();
            let now = value["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            // Cut within the number it is overwritten without a look at the rest, as long as it has room for all of ours.
            prop_assert!([told, cached].contains(&now), "{} of {} and {}", now, told, cached);
            prop_assert_eq!(&value["z"], "cached_tokens");
        }
    }
}

//! JSON that may be none in places: what an engine's answer says beside what it says wrong.

/// The values of these members of the object that `text` begins with, as they are written: each that can be got at, of several
/// with one key the last.
///
/// A value is as long as its brackets and texts say; whether it makes sense is not looked at. The walk ends where it goes no
/// further.
pub(super) fn members<'a, const N: usize>(text: &'a [u8], keys: [&str; N]) -> [Option<&'a [u8]>; N] {
    let mut found = [None; N];
    let mut walk = Walk { text, at: if text.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 } };
    if walk.next() != Some(b'{') {
        return found;
    }
    while let Some((key, value)) = walk.member() {
        let key = serde_json::from_slice::<String>(key).unwrap_or_default();
        if let Some(place) = keys.iter().position(|wanted| *wanted == key) {
            found[place] = Some(value);
        }
        if walk.next() != Some(b',') {
            break;
        }
    }
    found
}

/// A count of something, also one that is written as a fraction.
pub(super) fn count(value: &[u8]) -> Option<u64> {
    /// Above it a fraction is no count: not every whole number can be written as one.
    const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;
    let text = std::str::from_utf8(value).ok()?;
    let of_fraction = || {
        let number = serde_json::from_str::<f64>(text).ok()?;
        let is_count = number.fract() == 0.0 && (0.0..WHOLE_MAX).contains(&number);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is a whole number and fits")]
        is_count.then_some(number as u64)
    };
    text.parse().ok().or_else(of_fraction)
}

struct Walk<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Walk<'a> {
    /// The next byte that is no blank, behind which it goes on.
    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn peek(&mut self) -> Option<u8> {
        let rest = self.text.get(self.at..)?;
        self.at += rest.iter().position(|byte| !byte.is_ascii_whitespace())?;
        self.text.get(self.at).copied()
    }

    /// A key with its quotes, and its value.
    fn member(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        if self.peek()? != b'"' {
            return None;
        }
        let key = self.value()?;
        if self.next()? != b':' {
            return None;
        }
        Some((key, self.value()?))
    }

    /// A value, which is whole.
    fn value(&mut self) -> Option<&'a [u8]> {
        let first = self.peek()?;
        let from = self.at;
        match first {
            b'"' => self.pass_text()?,
            b'{' | b'[' => self.pass_brackets()?,
            _ => {
                let ends = |byte: &u8| matches!(byte, b',' | b'}' | b']') || byte.is_ascii_whitespace();
                self.at += self.text[from..].iter().position(ends)?;
            }
        }
        Some(&self.text[from..self.at])
    }

    fn pass_text(&mut self) -> Option<()> {
        let mut is_escaped = false;
        let ends = |byte: &u8| {
            let ends = *byte == b'"' && !is_escaped;
            is_escaped = *byte == b'\\' && !is_escaped;
            ends
        };
        self.at += 1;
        self.at += self.text[self.at..].iter().position(ends)? + 1;
        Some(())
    }

    fn pass_brackets(&mut self) -> Option<()> {
        let mut open = Vec::new();
        loop {
            match *self.text.get(self.at)? {
                b'"' => {
                    self.pass_text()?;
                    continue;
                }
                b'{' => open.push(b'}'),
                b'[' => open.push(b']'),
                byte @ (b'}' | b']') if open.pop() != Some(byte) => return None,
                _ => {}
            }
            self.at += 1;
            if open.is_empty() {
                return Some(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    use super::*;

    #[test]
    fn a_count_is_whole_and_none_is_made_up() {
        for (text, wanted) in [
            ("70", Some(70)),
            ("70.0", Some(70)),
            ("7e1", Some(70)),
            ("0", Some(0)),
            ("18446744073709551615", Some(u64::MAX)),
            ("70.5", None),
            ("-1", None),
            ("1e300", None),
            ("NaN", None),
            ("null", None),
            ("\"7\"", None),
            ("", None),
        ] {
            assert_eq!(count(text.as_bytes()), wanted, "{text}");
        }
    }

    #[test]
    fn the_last_of_several_counts_and_what_is_behind_a_fault_does_not() {
        let found =
            |text: &'static str| members(text.as_bytes(), ["a"])[0].map(|value| std::str::from_utf8(value).unwrap());
        assert_eq!(found(r#"{"a":1,"a":2}"#), Some("2"));
        assert_eq!(found(r#"{"a":1 "a":2}"#), Some("1"));
        for nothing in
            ["", "{", r#"{"a"#, r#"{"a""#, r#"{"a":"#, r#"{"a":1"#, r#"{"a":"1"#, r#"{"a":[1}"#, r#"["a",1]"#]
        {
            assert_eq!(found(nothing), None, "{nothing}");
        }
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::from),
            "[a-z\\\\\"{}\\[\\],:\n]{0,6}".prop_map(Value::from)
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(("[a-c\"\\\\]{0,2}", inner), 0..4)
                    .prop_map(|entries| Value::Object(entries.into_iter().collect()))
            ]
        })
    }

    proptest! {
        #[test]
        fn of_json_it_finds_what_a_parser_finds(entries in prop::collection::vec(("[a-d]", value()), 0..6), pretty in any::<bool>()) {
            let object: Map<String, Value> = entries.into_iter().collect();
            let text = if pretty { serde_json::to_string_pretty(&object) } else { serde_json::to_string(&object) }.unwrap();
            let keys = ["a", "b", "c", "d"];
            for (key, value) in keys.into_iter().zip(members(text.as_bytes(), keys)) {
                let value = value.map(|value| serde_json::from_slice::<Value>(value).unwrap());
                prop_assert_eq!(value.as_ref(), object.get(key));
            }
        }

        #[test]
        fn any_bytes_are_walked(bytes in prop::collection::vec(prop_oneof![any::<u8>(), Just(b'"'), Just(b'{'), Just(b'}'), Just(b':'), Just(b'a')], 0..40)) {
            members(&bytes, ["a"]);
        }
    }
}

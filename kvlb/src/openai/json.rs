//! A JSON value as Python's `json` module would hand it to the engine.

use std::collections::HashMap;
use std::fmt::{self, Write as _};

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// A JSON value that keeps what a chat template can see: the order of keys, and whether a number was written as an
/// integer or not.
///
/// A key written twice keeps its first place and takes its last value, as a Python dict does.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`, Python's `None`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer that fits 64 bits with or without sign.
    Int(i128),
    /// Any other finite number.
    Float(f64),
    /// Text.
    Text(String),
    /// An array.
    List(Vec<Json>),
    /// An object.
    Map(Vec<(String, Json)>),
}

/// From this size on, a number may have been written as an integer of more than 64 bits. Python keeps all its digits,
/// the parser here would not, so such a number is refused instead of being shown rounded.
const WIDE: f64 = 18_446_744_073_709_551_616.0; // 2^64

/// An object with more keys than this looks for repeated keys through a hash table.
const MANY_KEYS: usize = 16;

impl Json {
    /// The value of `key`, when this is an object that has it.
    pub fn get(&self, key: &str) -> Option<&Json> {
        let Self::Map(entries) = self else { return None };
        entries.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The text, when this is text.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Whether this is `null`.
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    /// The value as Python's `json.dumps` writes it; `None` where it writes a number with an exponent.
    pub(super) fn dumps(&self) -> Option<String> {
        let mut out = String::new();
        self.write(&mut out).then_some(out)
    }

    /// Appends the value; false where its notation is not known.
    fn write(&self, out: &mut String) -> bool {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
            Self::Int(int) => out.push_str(&int.to_string()),
            Self::Float(float) => return plain_float(*float).is_some_and(|float| write!(out, "{float:?}").is_ok()),
            Self::Text(text) => write_text(text, out),
            Self::List(items) => return write_all(['[', ']'], items, Self::write, out),
            Self::Map(entries) => {
                let entry = |(key, value): &(String, Self), out: &mut String| {
                    write_text(key, out);
                    out.push_str(": ");
                    value.write(out)
                };
                return write_all(['{', '}'], entries, entry, out);
            }
        }
        true
    }
}

/// A number that Python and Rust write with the same digits and without an exponent.
///
/// Source: Python writes an exponent below 1e-4 and from 1e16 on.
pub(crate) fn plain_float(float: f64) -> Option<f64> {
    let size = float.abs();
    (size == 0.0 || (1e-4..1e16).contains(&size)).then_some(float)
}

/// Appends `items` between two brackets and with commas, as Python does; false as soon as the notation of one is not known.
pub(crate) fn write_all<T>(
    [open, close]: [char; 2],
    items: &[T],
    write: impl Fn(&T, &mut String) -> bool,
    out: &mut String,
) -> bool {
    out.push(open);
    let exact = items.iter().enumerate().all(|(place, item)| {
        out.push_str(if place > 0 { ", " } else { "" });
        write(item, out)
    });
    out.push(close);
    exact
}

/// Text in quotes, all of it in ASCII.
fn write_text(text: &str, out: &mut String) {
    out.push('"');
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(char),
            _ => out.extend(char.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}"))),
        }
    }
    out.push('"');
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Int(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Int(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Json, E> {
        if value == 0.0 && value.is_sign_negative() {
            // Python reads `-0` as an integer and `-0.0` as none; the parser here does not tell them apart.
            return Err(E::custom("a negative zero"));
        }
        if value.abs() < WIDE { Ok(Json::Float(value)) } else { Err(E::custom("a number of more than 64 bits")) }
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Json, E> {
        Ok(Json::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut map = Entries::default();
        while let Some((key, value)) = entries.next_entry()? {
            map.insert(key, value);
        }
        Ok(Json::Map(map.list))
    }
}

/// An object being read: its entries, and where each key is once there are many.
#[derive(Default)]
struct Entries {
    list: Vec<(String, Json)>,
    places: HashMap<String, usize>,
}

impl Entries {
    fn insert(&mut self, key: String, value: Json) {
        match self.place(&key) {
            Some(place) => self.list[place].1 = value,
            None => self.push(key, value),
        }
    }

    fn place(&self, key: &str) -> Option<usize> {
        if self.places.is_empty() {
            self.list.iter().position(|(name, _)| name == key)
        } else {
            self.places.get(key).copied()
        }
    }

    fn push(&mut self, key: String, value: Json) {
        if self.list.len() == MANY_KEYS {
            self.places = self.list.iter().enumerate().map(|(place, (name, _))| (name.clone(), place)).collect();
        }
        if self.list.len() >= MANY_KEYS {
            self.places.insert(key.clone(), self.list.len());
        }
        self.list.push((key, value));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Json {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_repeated_key_keeps_its_place_and_takes_the_last_value() {
        let value = read(r#"{"a": 1, "b": 2, "a": 3}"#);
        assert_eq!(value, Json::Map(vec![("a".into(), Json::Int(3)), ("b".into(), Json::Int(2))]));
    }

    #[test]
    fn integers_stay_integers_and_wider_ones_are_refused() {
        assert_eq!(read("18446744073709551615"), Json::Int(18_446_744_073_709_551_615));
        assert_eq!(read("-9223372036854775808"), Json::Int(-9_223_372_036_854_775_808));
        assert_eq!(read("1.0"), Json::Float(1.0));
        for refused in ["18446744073709551616", "1e30", "-99999999999999999999", "1e400", "-0", "-0.0", "-1e-400"] {
            assert!(serde_json::from_str::<Json>(refused).is_err(), "{refused}");
        }
    }

    /// The right-hand sides are what Python 3.11 prints.
    #[test]
    fn numbers_are_read_to_the_last_digit() {
        for (given, read_as) in [
            ("-122.41941550000001", "-122.41941550000001"),
            ("1.7976931348623157", "1.7976931348623157"),
            ("123456789.12345679", "123456789.12345679"),
            ("9007199254740993.0", "9007199254740992.0"),
        ] {
            assert_eq!(read(given).dumps().unwrap(), read_as);
        }
    }

    /// The right-hand side is what Python 3.11's `json.dumps` printed.
    #[test]
    fn a_value_is_written_as_python_writes_it() {
        let given = r#"{"b": [1, -2.0, 0.1, 1e5, true, null, "é\u0001\u007f\n\"\\/😀"], "a": {}, "c": []}"#;
        let expected =
            r#"{"b": [1, -2.0, 0.1, 100000.0, true, null, "\u00e9\u0001\u007f\n\"\\/\ud83d\ude00"], "a": {}, "c": []}"#;
        assert_eq!(read(given).dumps().unwrap(), expected);
        assert_eq!(read("[1e16]").dumps(), None);
    }

    #[test]
    fn nesting_beyond_the_parser_s_limit_is_an_error_and_no_overflow() {
        let deep = "[".repeat(100_000);
        assert!(serde_json::from_str::<Json>(&deep).is_err());
    }

    proptest! {
        /// Many keys take another path than few; the answer is the same.
        #[test]
        fn keys_are_unique_and_the_last_value_wins(keys in prop::collection::vec("[a-h]{1,2}", 0..80)) {
            let mut entries = Entries::default();
            for (value, key) in keys.iter().enumerate() {
                entries.insert(key.clone(), Json::Int(value as i128));
            }
            let mut expected: Vec<(String, Json)> = Vec::new();
            for (value, key) in keys.iter().enumerate() {
                match expected.iter_mut().find(|(name, _)| name == key) {
                    Some(entry) => entry.1 = Json::Int(value as i128),
                    None => expected.push((key.clone(), Json::Int(value as i128))),
                }
            }
            prop_assert_eq!(entries.list, expected);
        }
    }
}

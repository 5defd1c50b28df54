//! JSON as a rule is written in: strict where leniency would hide a mistake.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::control::Problem;

/// Reads one JSON document. A key that appears twice in one object is an error: which of the two was meant is a guess.
///
/// # Errors
/// [`Problem::NotJson`] with the place, also for text that is not UTF-8 and for nesting deeper than 128.
pub(super) fn parse(bytes: &[u8]) -> Result<Value, Problem> {
    let strict: Strict = serde_json::from_slice(bytes).map_err(|error| Problem::NotJson(error.to_string()))?;
    Ok(strict.0)
}

/// A value whose objects have no key twice.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Strict(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("field {key:?} appears twice")));
            }
            let Strict(value) = access.next_value()?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_arrive_as_they_were_written() {
        let text = r#"{"a":[1,-2,2.5,"é",null,true],"b":{"c":18446744073709551615}}"#;
        assert_eq!(parse(text.as_bytes()).map(|v| v.to_string()), Ok(text.to_owned()));
    }

    #[test]
    fn a_key_twice_in_one_object_is_refused_by_name() {
        let error = parse(br#"{"port":1,"x":{"port":2},"port":3}"#);
        assert!(matches!(error, Err(Problem::NotJson(text)) if text.contains(r#""port" appears twice"#)));
    }

    #[test]
    fn broken_text_is_an_error_with_its_place_and_never_a_panic() {
        let deep = "[".repeat(100_000);
        for bad in [&b""[..], b"{", b"{}x", b"\xff\xfe", b"{\"a\":1e999}", b"[1,]", b"{'a':1}", deep.as_bytes()] {
            let error = parse(bad);
            assert!(matches!(&error, Err(Problem::NotJson(text)) if text.contains("line 1")), "{error:?}");
        }
    }
}

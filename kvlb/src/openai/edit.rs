//! Changes of a body's own members that leave every other byte where it was.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::body::{Key, without_mark};
use super::miss::BadBody;

/// Where the members of a JSON object lie in its text.
#[derive(Debug)]
pub struct Members<'a> {
    text: &'a [u8],
    /// Where the brace opens, behind a mark of the byte order.
    open: usize,
    all: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    key: String,
    value: Range<usize>,
}

/// A change of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit<'e> {
    /// The member has this JSON text as its value: where it is written, however often, else at the end.
    Set(&'e str, &'e [u8]),
    /// The same only where the member is there.
    Replace(&'e str, &'e [u8]),
    /// The member is not there.
    Remove(&'e str),
}

impl Edit<'_> {
    const fn key(&self) -> &str {
        match self {
            Self::Set(key, _) | Self::Replace(key, _) | Self::Remove(key) => key,
        }
    }
}

impl<'a> Members<'a> {
    /// The members of the JSON object that is all of `text`.
    ///
    /// # Errors
    /// [`BadBody`] when it is none.
    pub fn read(text: &'a [u8]) -> Result<Self, BadBody> {
        let behind_mark = without_mark(text);
        let mut reader = serde_json::Deserializer::from_slice(behind_mark);
        let mut finding = Finding { text, members: Vec::new() };
        match reader.deserialize_map(&mut finding).and_then(|()| reader.end()) {
            Ok(()) => {}
            Err(error) if error.is_data() => return Err(BadBody::NotObject),
            Err(_error) => return Err(BadBody::NotJson),
        }
        let mark = text.len() - behind_mark.len();
        let open = mark + behind_mark.iter().position(|byte| *byte == b'{').unwrap_or_default();
        Ok(Self { text, open, all: finding.members })
    }

    /// The JSON text of a member; where it is written twice the last one counts.
    pub fn get(&self, key: &str) -> Option<&'a [u8]> {
        let found = self.all.iter().rev().find(|member| member.key == key)?;
        Some(&self.text[found.value.clone()])
    }

    /// The text with these changes; of two for one member the first counts.
    pub fn edited(&self, edits: &[Edit<'_>]) -> Vec<u8> {
        let of_key = |key: &str| edits.iter().find(|edit| edit.key() == key);
        let mut out = Vec::with_capacity(self.text.len() + 256);
        out.extend_from_slice(&self.text[..=self.open]);
        let (mut from, mut any) = (self.open + 1, false);
        for member in &self.all {
            let before = &self.text[from..member.value.start];
            from = member.value.end;
            let value = match of_key(&member.key) {
                Some(Edit::Remove(_)) => continue,
                Some(Edit::Set(_, value) | Edit::Replace(_, value)) => *value,
                None => &self.text[member.value.clone()],
            };
            // Between two values there is a comma, before the first there is none.
            let comma =
                before.iter().position(|byte| *byte == b',').filter(|comma| before[..*comma].trim_ascii().is_empty());
            match (comma, any) {
                (Some(comma), false) => out.extend_from_slice(&before[comma + 1..]),
                _ => out.extend_from_slice(before),
            }
            out.extend_from_slice(value);
            any = true;
        }
        let present = |key: &str| self.all.iter().any(|member| member.key == key);
        for (number, edit) in edits.iter().enumerate() {
            let is_first = !edits[..number].iter().any(|other| other.key() == edit.key());
            if let Edit::Set(key, value) = edit
                && is_first
                && !present(key)
            {
                out.extend_from_slice(if any { b",\"" } else { b"\"" });
                out.extend_from_slice(key.as_bytes());
                out.extend_from_slice(b"\":");
                out.extend_from_slice(value);
                any = true;
            }
        }
        out.extend_from_slice(&self.text[from..]);
        out
    }
}

struct Finding<'a> {
    text: &'a [u8],
    members: Vec<Member>,
}

impl<'a> Visitor<'a> for &mut Finding<'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(key) = entries.next_key::<Key<'a>>()? {
            let value = entries.next_value::<&'a RawValue>()?.get().as_bytes();
            let start = value.as_ptr().addr() - self.text.as_ptr().addr();
            self.members.push(Member { key: key.0.into_owned(), value: start..start + value.len() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    use super::*;

    fn edited(text: &str, edits: &[Edit<'_>]) -> String {
        String::from_utf8(Members::read(text.as_bytes()).unwrap().edited(edits)).unwrap()
    }

    #[test]
    fn nothing_but_the_member_changes() {
        let text = " {\n \"model\" : \"m\", \"max_tokens\":\t8 ,\"x\":1e400, \"d\":{\"max_tokens\":9}}\r\n";
        assert_eq!(
            edited(text, &[Edit::Set("max_tokens", b"1")]),
            " {\n \"model\" : \"m\", \"max_tokens\":\t1 ,\"x\":1e400, \"d\":{\"max_tokens\":9}}\r\n"
        );
        assert_eq!(edited(text, &[]), text);
        assert_eq!(edited(text, &[Edit::Replace("stream", b"false"), Edit::Remove("y")]), text);
    }

    #[test]
    fn a_member_goes_from_every_place() {
        for (text, left) in [
            (r#"{"a":1,"b":2,"c":3}"#, [r#"{"b":2,"c":3}"#, r#"{"a":1,"c":3}"#, r#"{"a":1,"b":2}"#]),
            (
                r#"{ "a" : 1 , "b" : 2 , "c" : 3 }"#,
                [r#"{ "b" : 2 , "c" : 3 }"#, r#"{ "a" : 1 , "c" : 3 }"#, r#"{ "a" : 1 , "b" : 2 }"#],
            ),
        ] {
            for (key, left) in ["a", "b", "c"].into_iter().zip(left) {
                assert_eq!(edited(text, &[Edit::Remove(key)]), left);
            }
        }
        assert_eq!(edited(r#"{"a":1}"#, &[Edit::Remove("a")]), "{}");
        assert_eq!(edited(r#"{"a":1,"a":2}"#, &[Edit::Remove("a"), Edit::Set("b", b"[]")]), r#"{"b":[]}"#);
        assert_eq!(edited("{}", &[Edit::Set("b", b"{}"), Edit::Set("c", b"0")]), r#"{"b":{},"c":0}"#);
    }

    #[test]
    fn a_key_counts_however_it_is_written_and_every_time() {
        let text = r#"{"max_token\u0073":8,"max_tokens":9,"stream":true}"#;
        assert_eq!(Members::read(text.as_bytes()).unwrap().get("max_tokens"), Some(b"9".as_slice()));
        assert_eq!(
            edited(text, &[Edit::Set("max_tokens", b"1")]),
            r#"{"max_token\u0073":1,"max_tokens":1,"stream":true}"#
        );
    }

    #[test]
    fn what_is_no_object_is_refused() {
        let refused = |text: &[u8]| Members::read(text).unwrap_err();
        assert_eq!(refused(b"[1]"), BadBody::NotObject);
        for text in [b"{\"a\":1".as_slice(), b"{\"a\":1}x", b"", b"{\"a\":\"\xff\"}"] {
            assert_eq!(refused(text), BadBody::NotJson, "{text:?}");
        }
        assert_eq!(edited("\u{feff}{\"a\":1}", &[Edit::Set("b", b"2")]), "\u{feff}{\"a\":1,\"b\":2}");
    }

    proptest! {
        #[test]
        fn an_edited_object_is_the_object_with_the_edits(
            entries in prop::collection::vec(("[a-e]", any::<i32>(), "[ \n]{0,2}"), 0..8),
            edits in prop::collection::vec(("[a-g]", 0..3u8, any::<u8>()), 0..4),
        ) {
            let members = entries.iter().map(|(key, value, space)| format!("{space}\"{key}\"{space}:{space}{value}{space}"));
            let text = format!("{{{}}}", members.collect::<Vec<_>>().join(","));
            let values: Vec<_> = edits.iter().map(|(_, _, value)| value.to_string()).collect();
            let made: Vec<_> = edits.iter().zip(&values).map(|((key, kind, _), value)| match kind {
                0 => Edit::Set(key, value.as_bytes()),
                1 => Edit::Replace(key, value.as_bytes()),
                _ => Edit::Remove(key),
            }).collect();
            let mut expected: Map<String, Value> = serde_json::from_str(&text).unwrap();
            for (number, (key, kind, value)) in edits.iter().enumerate() {
                if edits[..number].iter().any(|other| other.0 == *key) {
                    continue;
                }
                match kind {
                    0 => _ = expected.insert(key.clone(), (*value).into()),
                    1 if expected.contains_key(key) => _ = expected.insert(key.clone(), (*value).into()),
                    2 => _ = expected.shift_remove(key),
                    _ => {}
                }
            }
            let got: Map<String, Value> = serde_json::from_str(&edited(&text, &made)).unwrap();
            prop_assert_eq!(&got, &expected);
        }
    }
}

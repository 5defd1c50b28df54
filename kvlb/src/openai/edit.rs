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
    /// As [`Edit::Set`], with a value that is told when the change is made: see [`Patch::apply`].
    Fill(&'e str),
    /// The same only where the member is there.
    Replace(&'e str, &'e [u8]),
    /// The member is not there.
    Remove(&'e str),
    /// Where the member is an object, its own members change so.
    Within(&'e str, &'e [Edit<'e>]),
}

impl Edit<'_> {
    const fn key(&self) -> &str {
        match self {
            Self::Set(key, _) | Self::Fill(key) | Self::Replace(key, _) | Self::Remove(key) | Self::Within(key, _) => {
                key
            }
        }
    }
}

/// Changes of one text, ready to be made without reading it again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patch {
    /// What stands in place of these bytes, in their order.
    cuts: Vec<(Range<usize>, Vec<Piece>)>,
}

/// What stands in place of something.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(Vec<u8>),
    Filling,
}

impl Patch {
    /// The text that the patch was made for, changed; `filling` is the value of [`Edit::Fill`].
    pub fn apply(&self, text: &[u8], filling: &[u8]) -> Vec<u8> {
        let of_piece = |piece: &Piece| match piece {
            Piece::Text(text) => text.len(),
            Piece::Filling => filling.len(),
        };
        let more: usize = self.cuts.iter().flat_map(|(_, pieces)| pieces).map(of_piece).sum();
        let mut out = Vec::with_capacity(text.len() + more);
        let mut from = 0;
        for (cut, pieces) in &self.cuts {
            out.extend_from_slice(&text[from..cut.start]);
            for piece in pieces {
                out.extend_from_slice(match piece {
                    Piece::Text(text) => text,
                    Piece::Filling => filling,
                });
            }
            from = cut.end;
        }
        out.extend_from_slice(&text[from..]);
        out
    }

    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.cuts.is_empty()
    }

    /// The same changes in an object that lies here in `text`.
    fn cut_within(&mut self, text: &[u8], object: &Range<usize>, edits: &[Edit<'_>]) {
        let Ok(members) = Members::read(&text[object.clone()]) else { return };
        for (range, pieces) in members.patch(edits).cuts {
            self.cut(object.start + range.start..object.start + range.end, pieces);
        }
    }

    fn cut(&mut self, range: Range<usize>, pieces: Vec<Piece>) {
        if !range.is_empty() || !pieces.is_empty() {
            self.cuts.push((range, pieces));
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

    /// The text with these changes; of two for one member the first counts. [`Edit::Fill`] makes it null.
    pub fn edited(&self, edits: &[Edit<'_>]) -> Vec<u8> {
        self.patch(edits).apply(self.text, b"null")
    }

    /// These changes, for later; of two for one member the first counts.
    pub fn patch(&self, edits: &[Edit<'_>]) -> Patch {
        let of_key = |key: &str| edits.iter().find(|edit| edit.key() == key);
        let mut patch = Patch::default();
        // Where what stays of the text goes on, and whether any member stays.
        let (mut from, mut any) = (self.open + 1, false);
        let mut removed_from = None;
        for member in &self.all {
            let before = from..member.value.start;
            from = member.value.end;
            let edit = of_key(&member.key);
            if matches!(edit, Some(Edit::Remove(_))) {
                removed_from.get_or_insert(before.start);
                continue;
            }
            let text = &self.text[before.clone()];
            // Between two values there is a comma, before the first there is none.
            let comma =
                text.iter().position(|byte| *byte == b',').filter(|comma| text[..*comma].trim_ascii().is_empty());
            let stays = match comma {
                Some(comma) if !any => before.start + comma + 1,
                _ => before.start,
            };
            patch.cut(removed_from.take().unwrap_or(before.start)..stays, Vec::new());
            match edit {
                Some(Edit::Set(_, value) | Edit::Replace(_, value)) => {
                    patch.cut(member.value.clone(), vec![Piece::Text(value.to_vec())]);
                }
                Some(Edit::Fill(_)) => patch.cut(member.value.clone(), vec![Piece::Filling]),
                Some(Edit::Within(_, edits)) => patch.cut_within(self.text, &member.value, edits),
                Some(Edit::Remove(_)) | None => {}
            }
            any = true;
        }
        let present = |key: &str| self.all.iter().any(|member| member.key == key);
        let mut added = Vec::new();
        for (number, edit) in edits.iter().enumerate() {
            let is_first = !edits[..number].iter().any(|other| other.key() == edit.key());
            let (Edit::Set(key, _) | Edit::Fill(key)) = edit else { continue };
            if is_first && !present(key) {
                added.push(Piece::Text([if any { b",\"".as_slice() } else { b"\"" }, key.as_bytes(), b"\":"].concat()));
                added.push(match edit {
                    Edit::Set(_, value) => Piece::Text(value.to_vec()),
                    _ => Piece::Filling,
                });
                any = true;
            }
        }
        patch.cut(removed_from.unwrap_or(from)..from, added);
        patch
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
    fn a_patch_is_filled_where_the_member_is_or_at_the_end() {
        let filled = |text: &str, edits: &[Edit<'_>], filling: &str| {
            let patch = Members::read(text.as_bytes()).unwrap().patch(edits);
            String::from_utf8(patch.apply(text.as_bytes(), filling.as_bytes())).unwrap()
        };
        let edits = [Edit::Fill("p"), Edit::Remove("a")];
        assert_eq!(filled(r#"{"a":1, "p" : {"x":[1]} ,"b":2}"#, &edits, r#"{"y":2}"#), r#"{ "p" : {"y":2} ,"b":2}"#);
        assert_eq!(filled(r#"{"b":2,"a":1}"#, &edits, "[]"), r#"{"b":2,"p":[]}"#);
        assert_eq!(filled(r#"{"a":1}"#, &edits, "[]"), r#"{"p":[]}"#);
        assert!(Members::read(b"{\"b\":1}").unwrap().patch(&[Edit::Remove("a"), Edit::Replace("c", b"0")]).is_empty());
    }

    #[test]
    fn members_of_a_member_change_too() {
        let inner = [Edit::Remove("a"), Edit::Set("b", b"1")];
        let edits = [Edit::Within("o", &inner), Edit::Remove("a")];
        assert_eq!(
            edited(r#"{"a":0,"o" : { "a" :1, "c":{"a":2} } ,"o":{},"x":{"a":3}}"#, &edits),
            r#"{"o" : { "c":{"a":2},"b":1 } ,"o":{"b":1},"x":{"a":3}}"#
        );
        for kept in [r#"{"o":[{"a":1}]}"#, r#"{"o":"a"}"#, r#"{"o":null}"#, r#"{"x":{"a":1}}"#] {
            assert_eq!(edited(kept, &edits), kept);
        }
        let deep = [Edit::Within("o", &edits)];
        assert_eq!(edited(r#"{"o":{"o":{"b":2,"a":1}}}"#, &deep), r#"{"o":{"o":{"b":1}}}"#);
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

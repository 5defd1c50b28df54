//! JSON as the values that a chat template sees, and back to JSON as Python writes it.

use std::cell::Cell;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use crate::openai::Json;

thread_local! {
    /// Whether a list or an object has printed itself during the rendering that runs on this thread.
    ///
    /// Python prints its own notation where a template glues a container to text. Nothing here imitates it, and the place
    /// where it happens cannot report an error; so it is noted, and the rendering is refused.
    static PRINTED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `render`, and says whether a container printed itself meanwhile.
pub(super) fn watching_containers<T>(render: impl FnOnce() -> T) -> (T, bool) {
    PRINTED.set(false);
    let rendered = render();
    (rendered, PRINTED.get())
}

/// The value of `json`; `None` where Python and the template engine print a number differently.
pub(super) fn value(json: &Json) -> Option<Value> {
    Some(match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Int(int) => i64::try_from(*int).map_or_else(|_wide| Value::from(*int), Value::from),
        Json::Float(float) => Value::from(plain_float(*float)?),
        Json::Text(text) => Value::from(text.as_str()),
        Json::List(items) => list(items.iter().map(value).collect::<Option<_>>()?),
        Json::Map(entries) => {
            let mut dict = Dict::default();
            for (key, item) in entries {
                dict.push(key, value(item)?);
            }
            dict.into()
        }
    })
}

/// A number that Python and Rust write with the same digits and without an exponent.
///
/// Source: Python writes an exponent below 1e-4 and from 1e16 on.
fn plain_float(float: f64) -> Option<f64> {
    let size = float.abs();
    (size == 0.0 || (1e-4..1e16).contains(&size)).then_some(float)
}

/// A list of values.
pub(super) fn list(items: Vec<Value>) -> Value {
    Value::from_object(List(items))
}

#[derive(Debug)]
struct List(Vec<Value>);

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        PRINTED.set(true);
        f.write_str("container")
    }
}

/// An object whose keys are text, in their order. Keys are few, so they are searched one after the other.
#[derive(Clone, Debug, Default)]
pub(super) struct Dict(Vec<(Arc<str>, Value)>);

impl Dict {
    /// Adds an entry whose key is new.
    pub(super) fn push(&mut self, key: &str, value: impl Into<Value>) {
        debug_assert!(self.find(key).is_none(), "a key twice: {key}");
        self.0.push((Arc::from(key), value.into()));
    }

    /// Adds an entry, or replaces the value of one that is there.
    pub(super) fn set(&mut self, key: &str, value: Value) {
        match self.0.iter_mut().find(|(name, _)| &**name == key) {
            Some(entry) => entry.1 = value,
            None => self.push(key, value),
        }
    }

    fn find(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|(name, _)| &**name == key).map(|(_, value)| value)
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.find(key.as_str()?).cloned()
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.find(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(key, _)| Value::from(Arc::clone(key))).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        PRINTED.set(true);
        f.write_str("container")
    }
}

impl From<Dict> for Value {
    fn from(dict: Dict) -> Self {
        Self::from_object(dict)
    }
}

/// How Python's `json.dumps` is told to write.
#[derive(Clone, Debug, Default)]
pub(super) struct Style {
    /// Escape all that is not ASCII.
    pub(super) ensure_ascii: bool,
    /// Spaces per level; everything on one line without it.
    pub(super) indent: Option<usize>,
    /// What stands between items and between key and value.
    pub(super) separators: Option<(String, String)>,
    /// Write keys in the order of their characters.
    pub(super) sort_keys: bool,
}

/// `value` as Python's `json.dumps` writes it.
///
/// # Errors
/// Where Python fails too (undefined values), and where its way is not known here (keys that are not text).
pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let mut writer = Writer { out: String::new(), style, level: 0 };
    writer.value(value)?;
    Ok(writer.out)
}

struct Writer<'s> {
    out: String,
    style: &'s Style,
    level: usize,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)?),
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?;
                self.items(['[', ']'], items, Self::value)?;
            }
            ValueKind::Map => self.map(value)?,
            kind => return Err(not_json(&format!("a value of kind {kind}"))),
        }
        Ok(())
    }

    fn map(&mut self, value: &Value) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if keys.iter().any(|key| key.as_str().is_none()) {
            return Err(not_json("a key that is not text"));
        }
        if self.style.sort_keys {
            // Python compares code points, which is the order of UTF-8 bytes.
            keys.sort_by(|left, right| left.as_str().cmp(&right.as_str()));
        }
        self.items(['{', '}'], keys.into_iter(), |writer, key| {
            writer.text(key.as_str().unwrap_or_default());
            writer.out.push_str(writer.style.separators.as_ref().map_or(": ", |(_, colon)| colon));
            writer.value(&value.get_item(key)?)
        })
    }

    fn items<T>(
        &mut self,
        [open, close]: [char; 2],
        items: impl Iterator<Item = T>,
        mut write: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        self.level += 1;
        let mut empty = true;
        for item in items {
            if !empty {
                self.comma();
            }
            empty = false;
            self.new_line();
            write(self, &item)?;
        }
        self.level -= 1;
        if !empty {
            self.new_line();
        }
        self.out.push(close);
        Ok(())
    }

    fn comma(&mut self) {
        let default = if self.style.indent.is_some() { "," } else { ", " };
        self.out.push_str(self.style.separators.as_ref().map_or(default, |(comma, _)| comma));
    }

    fn new_line(&mut self) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * self.level));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for char in text.chars() {
            match char {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                _ if char < ' ' || (self.style.ensure_ascii && char > '~') => self.escape(char),
                _ => self.out.push(char),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, char: char) {
        for unit in char.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            write!(self.out, "\\u{unit:04x}").unwrap_or_default();
        }
    }
}

/// A number as Python writes it.
///
/// # Errors
/// Where Python would write an exponent or something that is not a number.
pub(super) fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let float = f64::try_from(value.clone())?;
    match plain_float(float) {
        Some(float) => Ok(format!("{float:?}")),
        None => Err(not_json("a number with an exponent")),
    }
}

fn not_json(what: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, format!("cannot write {what} as Python does"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Value {
        value(&serde_json::from_str::<Json>(text).unwrap()).unwrap()
    }

    fn write(text: &str, style: &Style) -> String {
        dumps(&read(text), style).unwrap()
    }

    /// The right-hand sides are what Python 3.11's `json.dumps` printed.
    #[test]
    fn json_is_written_as_python_writes_it() {
        let given = r#"{"b": [1, -2.0, 0.1, 1e5, true, null, "é\u0001\u007f\n\"\\/"], "a": {}, "c": [], "😀": 18446744073709551615}"#;
        assert_eq!(
            write(given, &Style::default()),
            "{\"b\": [1, -2.0, 0.1, 100000.0, true, null, \"é\\u0001\u{7f}\\n\\\"\\\\/\"], \"a\": {}, \"c\": [], \"😀\": 18446744073709551615}"
        );
        let ascii = Style { ensure_ascii: true, sort_keys: true, ..Style::default() };
        assert_eq!(
            write(given, &ascii),
            r#"{"a": {}, "b": [1, -2.0, 0.1, 100000.0, true, null, "\u00e9\u0001\u007f\n\"\\/"], "c": [], "\ud83d\ude00": 18446744073709551615}"#
        );
        let tight = Style { separators: Some((",".into(), ":".into())), ..Style::default() };
        assert_eq!(write(r#"{"a": [1, 2]}"#, &tight), r#"{"a":[1,2]}"#);
        let tall = Style { indent: Some(2), ..Style::default() };
        assert_eq!(write(r#"{"a": [1, {}], "b": []}"#, &tall), "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}");
    }

    #[test]
    fn a_number_that_python_writes_with_an_exponent_has_no_value() {
        for wide in ["1e16", "0.00001", "-2e17"] {
            assert!(value(&serde_json::from_str(wide).unwrap()).is_none(), "{wide}");
        }
        assert_eq!(write("-0.0", &Style::default()), "-0.0");
    }

    #[test]
    fn a_container_that_prints_itself_is_noticed() {
        assert!(watching_containers(|| format!("{}", read("[1]"))).1);
        assert!(watching_containers(|| format!("{}", read("{}"))).1);
        assert!(!watching_containers(|| dumps(&read("[{}]"), &Style::default())).1);
    }
}

//! JSON as the values that a chat template sees, and back to JSON as Python writes it.

use std::cell::Cell;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::outline::MARK;
use crate::openai::{Json, plain_float, write_all};

/// What was printed during a rendering.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Prints {
    /// A value whose Python notation is not known.
    pub(super) unknown: bool,
    /// A list or an object, or a hidden text, in a notation that depends on the texts in it.
    pub(super) notation: bool,
}

thread_local! {
    /// What was printed during the rendering on this thread.
    ///
    /// The place where a template glues a value to text cannot report an error; so it is noted, and the rendering is
    /// refused.
    static PRINTS: Cell<Prints> = const { Cell::new(Prints { unknown: false, notation: false }) };
}

/// Runs `render`, and says what was printed meanwhile.
pub(super) fn watching_prints<T>(render: impl FnOnce() -> T) -> (T, Prints) {
    PRINTS.take();
    let rendered = render();
    (rendered, PRINTS.get())
}

fn note_unknown() {
    PRINTS.set(Prints { unknown: true, ..PRINTS.get() });
}

fn note_notation() {
    PRINTS.set(Prints { notation: true, ..PRINTS.get() });
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
        print(&Value::from_dyn_object(Arc::clone(self)), f)
    }
}

/// Values that can be looped over, and that print as something else than a list.
pub(super) fn view(items: Vec<Value>) -> Value {
    Value::from_object(View(items))
}

#[derive(Debug)]
struct View(Vec<Value>);

impl Object for View {
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
        note_unknown();
        f.write_str("view")
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

    /// What `x.key` is. Jinja2 asks for an attribute first, and the methods of a dict are attributes.
    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        match key.strip_prefix(ITEM_PREFIX) {
            None if method_name(key).is_some() => Some(Value::from_object(Method)),
            None => self.find(key).cloned(),
            // `x['key']` asks for an item first.
            Some(key) => self.find(key).cloned().or_else(|| Some(Value::from_object(Method))),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(key, _)| Value::from(Arc::clone(key))).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(&Value::from_dyn_object(Arc::clone(self)), f)
    }
}

impl From<Dict> for Value {
    fn from(dict: Dict) -> Self {
        Self::from_object(dict)
    }
}

/// A method that is looked at instead of being called: it is something, and prints as nothing that could be known.
#[derive(Debug)]
struct Method;

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        note_unknown();
        f.write_str("method")
    }
}

/// What stands before a key in an attribute that means `x['key']`, where the key is the name of a method.
pub(super) const ITEM_PREFIX: &str = "kvlb_item_";

const DICT_METHODS: [&str; 11] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// `key` as the name of a method of Python's dict, if it is one.
pub(super) fn method_name(key: &str) -> Option<&'static str> {
    DICT_METHODS.into_iter().find(|name| *name == key)
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
        if text.contains(MARK) {
            note_notation();
        }
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

fn print(value: &Value, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let text = repr(value);
    if text.is_none() {
        note_unknown();
    }
    f.write_str(text.as_deref().unwrap_or("unknown"))
}

/// A list, an object or what is in it as Python's `repr` writes it; `None` where that is not known.
pub(super) fn repr(value: &Value) -> Option<String> {
    note_notation();
    let mut out = String::new();
    write_repr(value, &mut out).then_some(out)
}

/// Appends the notation of `value`; false where it is not known.
fn write_repr(value: &Value, out: &mut String) -> bool {
    if let Some(text) = value.as_str() {
        return write_text_repr(text, out);
    }
    if let Some(Dict(entries)) = value.downcast_object_ref() {
        let entry = |(key, item): &(Arc<str>, Value), out: &mut String| {
            write_text_repr(key, out) && {
                out.push_str(": ");
                write_repr(item, out)
            }
        };
        return write_all(['{', '}'], entries, entry, out);
    }
    let items = value.downcast_object_ref::<List>().map(|List(items)| items).or_else(|| value.downcast_object_ref());
    match (items, value.kind()) {
        (Some(items), _) => write_all(['[', ']'], items, write_repr, out),
        (None, ValueKind::None | ValueKind::Bool) => write!(out, "{value}").is_ok(),
        (None, ValueKind::Number) => number(value).map(|text| out.push_str(&text)).is_ok(),
        _ => false,
    }
}

/// Text in quotes: single ones, unless only double ones do without escapes.
///
/// Which characters Python escapes as not printable is known here for ASCII, letters and digits only.
fn write_text_repr(text: &str, out: &mut String) -> bool {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for char in text.chars() {
        match char {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if char == quote => out.extend(['\\', char]),
            ' '..='~' => out.push(char),
            // Writing to a string cannot fail.
            _ if char.is_ascii() => write!(out, "\\x{:02x}", u32::from(char)).unwrap_or_default(),
            _ if is_old_letter(char) => out.push(char),
            _ => return false,
        }
    }
    out.push(quote);
    true
}

/// Whether a character is a letter that every Python that engines run with knows: in later ones there are more, and what a
/// Python does not know it escapes.
///
/// Source: Unicode's `DerivedAge`; Python 3.8 has version 12.1. Only blocks without later additions are here.
fn is_old_letter(char: char) -> bool {
    let known = matches!(char,
        '\u{c0}'..='\u{24f}' // Latin
        | '\u{370}'..='\u{52f}' // Greek, Cyrillic
        | '\u{531}'..='\u{556}' | '\u{561}'..='\u{586}' // Armenian
        | '\u{5d0}'..='\u{5ea}' // Hebrew
        | '\u{620}'..='\u{64a}' | '\u{671}'..='\u{6d3}' // Arabic
        | '\u{904}'..='\u{939}' // Devanagari
        | '\u{e01}'..='\u{e30}' // Thai
        | '\u{1e00}'..='\u{1eff}' // Latin
        | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' // Kana
        | '\u{4e00}'..='\u{9fef}' // Han
        | '\u{ac00}'..='\u{d7a3}' // Hangul
    );
    known && char.is_alphanumeric()
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

/// Appends a value in a form of its own, for each one another; false where it has parts that are not JSON's.
fn write_value(value: &Value, out: &mut Vec<u8>) -> bool {
    let mut sized = |kind: u8, size: usize| {
        out.push(kind);
        out.extend(size.to_le_bytes());
    };
    if let Some(text) = value.as_str() {
        sized(b's', text.len());
        out.extend(text.as_bytes());
        return true;
    }
    if let Some(dict) = value.downcast_object_ref::<Dict>() {
        return write_exactly(dict, out);
    }
    if let Some(List(items)) = value.downcast_object_ref() {
        sized(b'l', items.len());
        return items.iter().all(|item| write_value(item, out));
    }
    match value.kind() {
        ValueKind::None => out.push(b'n'),
        ValueKind::Bool => out.push(if value.is_true() { b't' } else { b'f' }),
        ValueKind::Number if value.is_integer() => {
            let Ok(int) = i128::try_from(value.clone()) else { return false };
            out.push(b'i');
            out.extend(int.to_le_bytes());
        }
        ValueKind::Number => {
            let Ok(float) = f64::try_from(value.clone()) else { return false };
            out.push(b'd');
            out.extend(float.to_bits().to_le_bytes());
        }
        _ => return false,
    }
    true
}

/// Appends an object in a form of its own, for each one another; false where it has parts that are not JSON's.
pub(super) fn write_exactly(Dict(entries): &Dict, out: &mut Vec<u8>) -> bool {
    out.push(b'm');
    out.extend(entries.len().to_le_bytes());
    entries.iter().all(|(key, value)| {
        out.extend(key.len().to_le_bytes());
        out.extend(key.as_bytes());
        write_value(value, out)
    })
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
    }

    #[test]
    fn a_letter_that_not_every_python_knows_has_no_notation() {
        for letter in ["\u{a7cd}", "\u{1e4d0}", "\u{10d4a}", "\u{31350}", "\u{9ffd}"] {
            assert_eq!(repr(&list(vec![Value::from(letter)])), None, "{letter}");
        }
        assert_eq!(repr(&list(vec![Value::from("éЖא世한")])).as_deref(), Some("['éЖא世한']"));
    }

    /// The right-hand side is what Python 3.11's `repr` printed.
    #[test]
    fn lists_and_objects_print_as_python_prints_them() {
        let given = r#"[1, -2.5, true, null, "a'b", "a\"b", "a'\"b", "é\n\u0001\\", {"k": [], "q'": {}}]"#;
        let expected = r#"[1, -2.5, True, None, "a'b", 'a"b', 'a\'"b', 'é\n\x01\\', {'k': [], "q'": {}}]"#;
        assert_eq!(read(given).to_string(), expected);
    }

    #[test]
    fn what_prints_in_a_way_that_is_not_known_is_noticed() {
        assert!(watching_prints(|| format!("{}", read(r#"["😀"]"#))).1.unknown);
        assert!(watching_prints(|| format!("{}", Value::from_object(Method))).1.unknown);
        assert!(!watching_prints(|| dumps(&read("[{}]"), &Style::default())).1.unknown);
        assert!(!watching_prints(|| format!("{}", read(r#"["a"]"#))).1.unknown);
    }
}

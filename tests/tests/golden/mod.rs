//! Reading golden vectors.

#![allow(dead_code, reason = "each test uses what it needs")]

use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The folder of golden vectors.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// A compressed text.
pub(crate) fn text(path: &str) -> String {
    let path = root().join(path);
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("open {}: {error}", path.display()));
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    text
}

/// A compressed JSON document.
pub(crate) fn json(path: &str) -> Value {
    serde_json::from_str(&text(path)).unwrap()
}

/// Compressed JSON lines.
pub(crate) fn lines(path: &str) -> Vec<Value> {
    text(path).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The versions that have a file of this name.
pub(crate) fn versions_with(file: &str) -> Vec<String> {
    let folders = std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut versions: Vec<_> = folders.filter(|folder| root().join(folder).join(file).exists()).collect();
    versions.sort();
    versions
}

/// Bytes written as hex.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "{text}");
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// The bytes of `{"$hex": "…"}`.
pub(crate) fn hex_value(value: &Value) -> Option<Vec<u8>> {
    Some(hex(value.get("$hex")?.as_str()?))
}

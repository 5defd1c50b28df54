//! The bytes that Python's `pickle.dumps(value, protocol=5)` makes of a block, for engines started without
//! `--prefix-caching-hash-algo`: their hash input is this, and an engine is only diagnosed well when it can be named.
//!
//! One frame, every container and string memoised once. An object that Python meets twice in one block would be a
//! back-reference instead; text prompts have none.
//!
//! Source: the opcodes of Python's `pickletools`; held by `tests/golden/vllm-*/core.json.gz`.

use ciborium::Value;

const PROTO: u8 = 0x80;
const FRAME: u8 = 0x95;
const STOP: u8 = b'.';
const MARK: u8 = b'(';
const MEMOIZE: u8 = 0x94;
const NONE: u8 = b'N';
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const BININT: u8 = b'J';
const LONG1: u8 = 0x8a;
const SHORT_BINBYTES: u8 = b'C';
const BINBYTES: u8 = b'B';
const SHORT_BINUNICODE: u8 = 0x8c;
const BINUNICODE: u8 = b'X';
const EMPTY_TUPLE: u8 = b')';
const TUPLE1: u8 = 0x85;
const TUPLE2: u8 = 0x86;
const TUPLE3: u8 = 0x87;
const TUPLE: u8 = b't';

/// Bytes before the frame's content: protocol, opcode and length.
const HEADER: usize = 11;

/// Writes the pickle of one text.
pub(super) fn text(out: &mut Vec<u8>, text: &str) {
    pickle(out, |out| value(out, &Value::Text(text.to_owned())));
}

/// Writes the pickle of `(parent, (token, …), extra)`.
pub(super) fn block(
    out: &mut Vec<u8>,
    parent: &[u8],
    tokens: impl ExactSizeIterator<Item = u64>,
    extra: Option<&Value>,
) {
    pickle(out, |out| {
        bytes(out, parent);
        tuple(out, tokens.len(), |out| tokens.for_each(|token| uint(out, token)));
        value(out, extra.unwrap_or(&Value::Null));
        out.extend([TUPLE3, MEMOIZE]);
    });
}

fn pickle(out: &mut Vec<u8>, content: impl FnOnce(&mut Vec<u8>)) {
    out.clear();
    out.extend([PROTO, 5, FRAME]);
    out.extend([0; 8]);
    content(out);
    out.push(STOP);
    let length = (out.len() - HEADER) as u64;
    out[3..HEADER].copy_from_slice(&length.to_le_bytes());
}

fn value(out: &mut Vec<u8>, tree: &Value) {
    match tree {
        Value::Text(text) => sized(out, SHORT_BINUNICODE, BINUNICODE, text.as_bytes()),
        Value::Bytes(content) => bytes(out, content),
        Value::Integer(integer) => match i64::try_from(*integer) {
            Ok(integer) => int(out, integer),
            Err(_) => out.push(NONE),
        },
        Value::Array(items) => tuple(out, items.len(), |out| items.iter().for_each(|item| value(out, item))),
        _ => out.push(NONE),
    }
}

fn bytes(out: &mut Vec<u8>, content: &[u8]) {
    sized(out, SHORT_BINBYTES, BINBYTES, content);
}

fn sized(out: &mut Vec<u8>, short: u8, long: u8, content: &[u8]) {
    if let Ok(length) = u8::try_from(content.len()) {
        out.extend([short, length]);
    } else {
        out.push(long);
        out.extend(u32::try_from(content.len()).unwrap_or(u32::MAX).to_le_bytes());
    }
    out.extend(content);
    out.push(MEMOIZE);
}

fn tuple(out: &mut Vec<u8>, items: usize, content: impl FnOnce(&mut Vec<u8>)) {
    if items > 3 {
        out.push(MARK);
    }
    content(out);
    match items {
        0 => return out.push(EMPTY_TUPLE),
        1 => out.push(TUPLE1),
        2 => out.push(TUPLE2),
        3 => out.push(TUPLE3),
        _ => out.push(TUPLE),
    }
    out.push(MEMOIZE);
}

fn uint(out: &mut Vec<u8>, value: u64) {
    match i64::try_from(value) {
        Ok(value) => int(out, value),
        Err(_) => long(out, value.to_le_bytes().iter().chain(&[0]).copied()),
    }
}

fn int(out: &mut Vec<u8>, value: i64) {
    if let Ok(value) = u8::try_from(value) {
        out.extend([BININT1, value]);
    } else if let Ok(value) = u16::try_from(value) {
        out.push(BININT2);
        out.extend(value.to_le_bytes());
    } else if let Ok(value) = i32::try_from(value) {
        out.push(BININT);
        out.extend(value.to_le_bytes());
    } else {
        long(out, value.to_le_bytes().into_iter());
    }
}

/// A long integer: little-endian two's complement in as few bytes as keep the sign.
fn long(out: &mut Vec<u8>, little_endian: impl Iterator<Item = u8>) {
    let mut digits: Vec<u8> = little_endian.collect();
    let fill = if digits.last().is_some_and(|top| top & 0x80 != 0) { 0xff } else { 0 };
    while let [.., below, top] = digits[..] {
        if top == fill && (below ^ fill) & 0x80 == 0 {
            digits.pop();
        } else {
            break;
        }
    }
    // At most nine bytes: a 64-bit number and its sign.
    out.extend([LONG1, u8::try_from(digits.len()).unwrap_or(u8::MAX)]);
    out.extend(digits);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_framed_and_memoised() {
        let mut out = Vec::new();
        text(&mut out, "0");
        assert_eq!(out, b"\x80\x05\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x010\x94.");
    }

    #[test]
    fn long_integers_keep_their_sign_in_as_few_bytes_as_possible() {
        let encode = |value| {
            let mut out = Vec::new();
            uint(&mut out, value);
            out
        };
        assert_eq!(encode(0x7fff_ffff), [BININT, 0xff, 0xff, 0xff, 0x7f]);
        assert_eq!(encode(0x8000_0000), [LONG1, 5, 0, 0, 0, 0x80, 0]);
        assert_eq!(encode(0x1_0000_0000), [LONG1, 5, 0, 0, 0, 0, 1]);
        assert_eq!(encode(u64::MAX), [LONG1, 9, 255, 255, 255, 255, 255, 255, 255, 255, 0]);
    }
}

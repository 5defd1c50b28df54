//! The canonical CBOR of a block's hash input.
//!
//! Blocks are most of what kvlb hashes, so they have a writer of their own: it writes each block over the one before.
//! Everything else is ciborium's.

use ciborium::Value;

// Major types, in the top three bits of an item's first byte. Source: RFC 8949, section 3.
const UNSIGNED: u8 = 0;
const BYTES: u8 = 2;
const ARRAY: u8 = 4;
const NULL: u8 = 0xf6;
/// The longest head of an item: one byte and a 64-bit number.
const HEAD_MAX: usize = 9;

/// `[parent, [token, …], extra or null]` for parents and blocks of one length, every head in its shortest form.
#[derive(Debug)]
pub(super) struct Block {
    bytes: Vec<u8>,
    parent_at: usize,
    tokens_at: usize,
    /// Where the longest tokens end.
    tokens_max: usize,
}

impl Block {
    pub(super) fn new(parent: usize, tokens: usize) -> Self {
        let mut bytes = vec![0; 3 * HEAD_MAX + parent + HEAD_MAX * tokens + 1];
        let at = put_head(&mut bytes, 0, ARRAY, 3);
        let parent_at = put_head(&mut bytes, at, BYTES, parent as u64);
        let tokens_at = put_head(&mut bytes, parent_at + parent, ARRAY, tokens as u64);
        let tokens_max = tokens_at + HEAD_MAX * tokens;
        Self { bytes, parent_at, tokens_at, tokens_max }
    }

    /// Writes one block over the last.
    pub(super) fn write<T: Copy + Into<u64>>(&mut self, parent: &[u8], tokens: &[T], extra: Option<&Value>) -> &[u8] {
        debug_assert!(self.tokens_at + HEAD_MAX * tokens.len() <= self.tokens_max, "blocks are of one length");
        self.bytes[self.parent_at..self.parent_at + parent.len()].copy_from_slice(parent);
        let mut end = self.tokens_at;
        for &token in tokens {
            end = put_token(&mut self.bytes, end, token.into());
        }
        let Some(extra) = extra else {
            self.bytes[end] = NULL;
            return &self.bytes[..=end];
        };
        self.bytes.truncate(end);
        value(&mut self.bytes, extra);
        end = self.bytes.len();
        self.bytes.resize(end.max(self.tokens_max + 1), 0);
        &self.bytes[..end]
    }
}

/// Writes any value; ciborium writes the shortest heads and definite lengths, which is canonical without maps.
pub(super) fn value(out: &mut Vec<u8>, value: &Value) {
    debug_assert!(!matches!(value, Value::Map(_) | Value::Tag(..)), "extra keys hold neither maps nor tags");
    // Writing into memory cannot fail, and no value here is one that ciborium refuses.
    if ciborium::into_writer(value, &mut *out).is_err() {
        debug_assert!(false, "writing CBOR into memory failed");
    }
}

/// Writes a token, without a branch on its size: sizes are as random as text, and a wrong guess costs more than the rest.
#[inline]
fn put_token(out: &mut [u8], at: usize, token: u64) -> usize {
    /// Length, first byte and shift of the number within eight bytes, for numbers below 24, 2^8, 2^16 and 2^32.
    const FORMS: [(u8, u8, u8); 4] = [(1, 0, 56), (2, 24, 48), (3, 25, 40), (5, 26, 24)];
    if token > u32::MAX.into() {
        return put_head(out, at, UNSIGNED, token);
    }
    let form = usize::from(token >= 24) + usize::from(token >= 1 << 8) + usize::from(token >= 1 << 16);
    let (length, first, shift) = FORMS[form];
    let word = u64::from(first) << 56 | token << shift;
    // Eight bytes are free, and those not meant are overwritten by the next token.
    out[at..at + 8].copy_from_slice(&word.to_be_bytes());
    at + usize::from(length)
}

/// Writes an item's head at `at`, where [`HEAD_MAX`] bytes are free, and says where it ends.
fn put_head(out: &mut [u8], at: usize, major: u8, number: u64) -> usize {
    let bytes = number.to_be_bytes();
    let (info, digits) = match number {
        0..=23 => (bytes[7], &bytes[8..]),
        24..=0xff => (24, &bytes[7..]),
        0x100..=0xffff => (25, &bytes[6..]),
        0x1_0000..=0xffff_ffff => (26, &bytes[4..]),
        _ => (27, &bytes[..]),
    };
    out[at] = major << 5 | info;
    out[at + 1..=at + digits.len()].copy_from_slice(digits);
    at + 1 + digits.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn blocks_written_over_each_other_agree_with_ciborium(
            blocks in (0..300usize).prop_flat_map(|size| {
                let token = prop_oneof![0..30u64, 0..300u64, 0..70_000u64, any::<u32>().prop_map(u64::from), any::<u64>()];
                let salt = prop::option::of("[a-z]{0,300}");
                prop::collection::vec((any::<[u8; 32]>(), prop::collection::vec(token, size), salt), 1..4)
            })
        ) {
            let mut writer = Block::new(32, blocks[0].1.len());
            for (parent, tokens, salt) in blocks {
                let extra = salt.map(|salt| Value::Array(vec![Value::Text(salt)]));
                let ids = tokens.iter().map(|&token| Value::Integer(token.into())).collect();
                let fields =
                    vec![Value::Bytes(parent.to_vec()), Value::Array(ids), extra.clone().unwrap_or(Value::Null)];
                let mut expected = Vec::new();
                ciborium::into_writer(&Value::Array(fields), &mut expected).unwrap();
                prop_assert_eq!(writer.write(&parent, &tokens, extra.as_ref()), expected);
            }
        }
    }
}

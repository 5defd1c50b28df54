//! Events as vLLM puts them on the wire: msgpack written by hand, in the form of the engine's version.
//!
//! A batch is the array `[ts, events, data_parallel_rank]` in every version; an event is an array up to 0.23 and a map from 0.24.
//! Held byte for byte by the recorded encoders in `tests/golden/vllm-0.32.0/wire-*.json`.

use super::config::Version;
use super::names::{Digest, Extra};

/// One change of the engine's cache.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Full blocks became cached, in prompt order.
    Stored(Stored),
    /// One cached copy went.
    Removed {
        /// The block that went. vLLM sends one hash per event; the vectors hold longer lists too.
        hashes: Vec<Digest>,
        /// Where it was.
        medium: String,
        /// KV group, absent before 0.20.
        group_idx: Option<u64>,
    },
    /// The whole cache went.
    Cleared,
}

/// What a `BlockStored` says.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Stored {
    /// Digests, in prompt order.
    pub hashes: Vec<Digest>,
    /// The block before the first one; none at the start of a prompt.
    pub parent: Option<Digest>,
    /// The tokens of all these blocks.
    pub tokens: Vec<u32>,
    /// Tokens per block.
    pub block_size: usize,
    /// Adapter number and name.
    pub lora: Option<(u64, String)>,
    /// Where the blocks are.
    pub medium: String,
    /// Per block, the keys beside its tokens; events show the untagged form in every version.
    pub extra_keys: Option<Vec<Vec<Extra>>>,
    /// KV group.
    pub group_idx: Option<u64>,
    /// `full_attention` for a plain model.
    pub spec_kind: Option<String>,
    /// Window of a sliding-window group.
    pub sliding_window: Option<u64>,
    /// The request's session, from 0.30.
    pub session_id: Option<String>,
}

/// How one engine version writes events.
#[derive(Debug, Clone)]
pub struct Encoder {
    version: Version,
    integers: bool,
}

impl Encoder {
    /// `integers` is `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`: 64-bit names instead of whole digests.
    pub fn new(version: Version, integers: bool) -> Self {
        Self { version, integers }
    }

    /// The payload frame of one batch.
    pub fn batch(&self, ts: f64, events: &[Event], rank: Option<u64>) -> Vec<u8> {
        let mut out = vec![0x93, 0xcb];
        out.extend(ts.to_be_bytes());
        array(&mut out, events.len());
        for event in events {
            let fields = self.fields(event);
            if self.version.sends_maps() { map(&mut out, &fields) } else { list(&mut out, &fields) }
        }
        Value::number(rank).write(&mut out);
        out
    }

    fn fields(&self, event: &Event) -> Fields {
        match event {
            Event::Stored(stored) => self.stored(stored),
            Event::Removed { hashes, medium, group_idx } => self.removed(hashes, medium, *group_idx),
            Event::Cleared => Fields { tag: "AllBlocksCleared", rows: Vec::new() },
        }
    }

    fn stored(&self, stored: &Stored) -> Fields {
        let (lora_id, lora_name) = match &stored.lora {
            Some((id, name)) => (Value::Number(*id), Value::Text(name.clone())),
            None => (Value::Nil, Value::Nil),
        };
        let extra_keys = stored
            .extra_keys
            .as_ref()
            .map_or(Value::Nil, |blocks| Value::List(blocks.iter().map(|keys| extra_keys(keys)).collect()));
        let tokens = stored.tokens.iter().map(|token| Value::Number(u64::from(*token))).collect();
        let since = |minor, patch| self.version.at_least(minor, patch);
        let rows = vec![
            Row::always(true, "block_hashes", self.hashes(&stored.hashes)),
            Row::always(true, "parent_block_hash", stored.parent.map_or(Value::Nil, |parent| self.hash(&parent))),
            Row::always(true, "token_ids", Value::List(tokens)),
            Row::always(true, "block_size", Value::Number(u64::try_from(stored.block_size).unwrap_or(u64::MAX))),
            Row::always(true, "lora_id", lora_id),
            Row::always(since(10, 2), "medium", Value::Text(stored.medium.clone())),
            Row::always(since(14, 0), "lora_name", lora_name),
            Row::maybe(since(17, 0), "extra_keys", extra_keys),
            Row::maybe(since(20, 0), "group_idx", Value::number(stored.group_idx)),
            Row::maybe(since(22, 0), "kv_cache_spec_kind", Value::text(stored.spec_kind.as_ref())),
            Row::maybe(since(22, 0), "kv_cache_spec_sliding_window", Value::number(stored.sliding_window)),
            Row::maybe(since(26, 0), "locality", Value::Nil),
            Row::maybe(since(29, 0), "ownership", Value::Nil),
            Row::maybe(since(30, 0), "session_id", Value::text(stored.session_id.as_ref())),
            Row::maybe(since(33, 0), "lookahead_token_ids", Value::Nil),
        ];
        Fields { tag: "BlockStored", rows: rows.into_iter().flatten().collect() }
    }

    fn removed(&self, hashes: &[Digest], medium: &str, group_idx: Option<u64>) -> Fields {
        let since = |minor, patch| self.version.at_least(minor, patch);
        let rows = vec![
            Row::always(true, "block_hashes", self.hashes(hashes)),
            Row::always(since(10, 2), "medium", Value::Text(medium.to_owned())),
            Row::maybe(since(20, 0), "group_idx", Value::number(group_idx)),
            Row::maybe(since(26, 0), "locality", Value::Nil),
            Row::maybe(since(29, 0), "ownership", Value::Nil),
        ];
        Fields { tag: "BlockRemoved", rows: rows.into_iter().flatten().collect() }
    }

    fn hashes(&self, hashes: &[Digest]) -> Value {
        Value::List(hashes.iter().map(|hash| self.hash(hash)).collect())
    }

    fn hash(&self, hash: &Digest) -> Value {
        if self.integers { Value::Number(hash.name()) } else { Value::Bytes(hash.as_slice().to_vec()) }
    }
}

struct Fields {
    tag: &'static str,
    rows: Vec<Row>,
}

struct Row {
    key: &'static str,
    value: Value,
    /// Sent even when nil: the field has no default in vLLM's struct.
    always: bool,
}

impl Row {
    fn always(known: bool, key: &'static str, value: Value) -> Option<Self> {
        known.then_some(Self { key, value, always: true })
    }

    fn maybe(known: bool, key: &'static str, value: Value) -> Option<Self> {
        known.then_some(Self { key, value, always: false })
    }
}

/// One block's keys, untagged: the adapter's name, the salt.
fn extra_keys(keys: &[Extra]) -> Value {
    if keys.is_empty() {
        return Value::Nil;
    }
    let words = keys.iter().map(|key| match key {
        Extra::Lora { name, .. } => Value::Text(name.clone()),
        Extra::Salt(salt) => Value::Text(salt.clone()),
    });
    Value::List(words.collect())
}

/// A struct that may have more than 15 keys gets the long map head even when few are set (msgspec reserves its size first).
fn map(out: &mut Vec<u8>, fields: &Fields) {
    let sent: Vec<_> = fields.rows.iter().filter(|row| row.always || row.value != Value::Nil).collect();
    if fields.rows.len() + 1 > 15 {
        out.push(0xde);
        out.extend(u16::try_from(sent.len() + 1).unwrap_or(u16::MAX).to_be_bytes());
    } else {
        map_head(out, sent.len() + 1);
    }
    text(out, "type");
    text(out, fields.tag);
    for row in sent {
        text(out, row.key);
        row.value.write(out);
    }
}

/// An event as an array: the tag, then every field this version knows.
fn list(out: &mut Vec<u8>, fields: &Fields) {
    array(out, fields.rows.len() + 1);
    text(out, fields.tag);
    for row in &fields.rows {
        row.value.write(out);
    }
}

// --- msgpack ---

#[derive(Debug, Clone, PartialEq)]
enum Value {
    Nil,
    Number(u64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Value>),
}

impl Value {
    fn number(number: Option<u64>) -> Self {
        number.map_or(Self::Nil, Self::Number)
    }

    fn text(text: Option<&String>) -> Self {
        text.map_or(Self::Nil, |text| Self::Text(text.clone()))
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Nil => out.push(0xc0),
            Self::Number(value) => number(out, *value),
            Self::Text(value) => text(out, value),
            Self::Bytes(value) => bytes(out, value),
            Self::List(items) => {
                array(out, items.len());
                for item in items {
                    item.write(out);
                }
            }
        }
    }
}

fn number(out: &mut Vec<u8>, value: u64) {
    let [_, _, _, _, a, b, c, d] = value.to_be_bytes();
    match value {
        0..=0x7f => out.push(d),
        0x80..=0xff => out.extend([0xcc, d]),
        0x100..=0xffff => out.extend([0xcd, c, d]),
        0x1_0000..=0xffff_ffff => out.extend([0xce, a, b, c, d]),
        _ => {
            out.push(0xcf);
            out.extend(value.to_be_bytes());
        }
    }
}

fn text(out: &mut Vec<u8>, value: &str) {
    let [_, _, high, low] = len32(value.len());
    match value.len() {
        0..=31 => out.push(0xa0 | low),
        32..=0xff => out.extend([0xd9, low]),
        0x100..=0xffff => out.extend([0xda, high, low]),
        len => {
            out.push(0xdb);
            out.extend(len32(len));
        }
    }
    out.extend_from_slice(value.as_bytes());
}

fn bytes(out: &mut Vec<u8>, value: &[u8]) {
    let [_, _, high, low] = len32(value.len());
    if value.len() <= 0xff {
        out.extend([0xc4, low]);
    } else {
        out.extend([0xc5, high, low]);
    }
    out.extend_from_slice(value);
}

fn array(out: &mut Vec<u8>, len: usize) {
    let [_, _, high, low] = len32(len);
    match len {
        0..=15 => out.push(0x90 | low),
        16..=0xffff => out.extend([0xdc, high, low]),
        _ => {
            out.push(0xdd);
            out.extend(len32(len));
        }
    }
}

fn map_head(out: &mut Vec<u8>, len: usize) {
    let [_, _, high, low] = len32(len);
    if len <= 15 { out.push(0x80 | low) } else { out.extend([0xde, high, low]) }
}

fn len32(len: usize) -> [u8; 4] {
    u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes()
}

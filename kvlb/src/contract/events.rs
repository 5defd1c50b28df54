//! What an engine says about its cache: one message of its event stream, decoded.
//!
//! A batch is an array `[time, events, data-parallel rank]` in every version. An event is an array that begins with its
//! kind (vLLM to 0.23) or a map with the key `type` (from 0.24); both may be mixed in one batch. Fields that are missing
//! have their default, fields and kinds that are not known are stepped over. An event that cannot be read costs that
//! event only.
//!
//! Source: vLLM's `kv_events.py`; held by `tests/golden/vllm-*/wire.json.gz`.

use super::msgpack::{ReadError, Reader};
use super::{BlockHash, Digest, ExtraKey, TokenId};

/// Most events in one batch: the largest engines remove 65,536 blocks in a step, each by an event of its own, and this is
/// four times that. The shortest event takes a byte on the wire and some 300 in memory.
const EVENTS_MAX: usize = 1 << 18;
/// Most hashes in one event: a step of the largest engines stores 65,536 blocks, and this is 16 times that.
const HASHES_MAX: usize = 1 << 20;
/// Most tokens in one event, for the same reason at 16 tokens a block.
const TOKENS_MAX: usize = 1 << 24;

/// Why a message is not an event batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message does not begin with an array of a time and a list of events.
    #[error("not an event batch")]
    NotABatch,
}

/// One message of an engine's event stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// When the engine made it, in seconds since the Unix epoch.
    pub ts: f64,
    /// The data-parallel rank it is about, where stated.
    pub dp_rank: Option<i64>,
    /// Its events, to be applied in this order.
    pub events: Vec<Event>,
    /// Events that could not be read, or were more than one batch may have.
    pub undecodable: u32,
    /// Events of kinds that are not known.
    pub unknown: u32,
    /// Events whose tokens are pairs (SGLang's EAGLE): their blocks cannot be named by a prompt.
    pub skipped: u32,
}

/// One change of an engine's cache.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Blocks were stored.
    Stored(Stored),
    /// Blocks were removed.
    Removed(Removed),
    /// Everything was removed.
    Cleared,
}

/// Blocks that became available.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    /// The blocks, each the child of the one before.
    pub hashes: Vec<WireHash>,
    /// The parent of the first block; absent when it has none.
    pub parent: Option<WireHash>,
    /// The tokens of all blocks; empty in the bare form of an offload tier.
    pub tokens: Vec<TokenId>,
    /// Tokens per block; 0 in the bare form of an offload tier.
    pub block_size: u32,
    /// Where the blocks are.
    pub medium: Medium,
    /// The LoRA adapter's number, before 0.14 the only sign of one.
    pub lora_id: Option<i64>,
    /// The LoRA adapter's name.
    pub lora_name: Option<String>,
    /// The extra keys of each block, in their untagged form; absent where the engine does not say (before 0.17).
    pub extra_keys: Option<Vec<Vec<ExtraKey>>>,
    /// The KV cache group; absent where there is one only.
    pub group: Option<u32>,
    /// What attention the group serves.
    pub attention: Attention,
    /// The tokens after each block that are part of its name (vLLM 0.33, opt-in).
    pub lookahead: Option<Vec<Vec<TokenId>>>,
}

impl Stored {
    /// Whether the tokens are exactly those of the blocks. A sliding-window group announces its last blocks only.
    pub fn is_complete(&self) -> bool {
        self.hashes.len() as u64 * u64::from(self.block_size) == self.tokens.len() as u64
    }
}

/// Blocks that are gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// The blocks.
    pub hashes: Vec<WireHash>,
    /// Where they were.
    pub medium: Medium,
    /// The KV cache group; absent where there is one only.
    pub group: Option<u32>,
}

/// A block's name as an engine sends it: an integer, or the digest's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WireHash {
    /// The name.
    pub name: BlockHash,
    /// The full digest, where the engine sends bytes.
    pub digest: Option<Digest>,
}

impl From<BlockHash> for WireHash {
    fn from(name: BlockHash) -> Self {
        Self { name, digest: None }
    }
}

/// Where a block is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Medium {
    /// The accelerator's own memory, also where nothing is said.
    #[default]
    Gpu,
    /// The host's memory.
    Cpu,
    /// Disks and remote stores.
    Storage,
    /// Anything else.
    Other,
}

impl Medium {
    fn from_wire(text: &str) -> Self {
        match text {
            "GPU" => Self::Gpu,
            "CPU" => Self::Cpu,
            // vLLM 0.26 called them by the kind of store.
            "STORAGE" | "FS" | "OBJ" => Self::Storage,
            _ => Self::Other,
        }
    }
}

/// What attention a KV cache group serves, as far as a prefix is concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Attention {
    /// The event does not say.
    #[default]
    Unstated,
    /// Every earlier token is attended: a hit needs every block of the prefix.
    Full,
    /// A window, a state or another sequence: these blocks alone never make a prefix usable.
    Partial,
}

impl Attention {
    /// Source: `KVCacheSpecKind` of vLLM 0.33.
    fn from_wire(kind: &str) -> Self {
        match kind {
            "full_attention" | "mla_attention" | "sink_full_attention" => Self::Full,
            "unknown" => Self::Unstated,
            _ => Self::Partial,
        }
    }
}

/// Decodes one message.
///
/// # Errors
/// [`DecodeError::NotABatch`] when the message has no list of events.
pub fn decode(message: &[u8]) -> Result<Batch, DecodeError> {
    let mut reader = Reader::new(message);
    let mut batch = Batch { ts: 0.0, dp_rank: None, events: Vec::new(), undecodable: 0, unknown: 0, skipped: 0 };
    let (fields, events) = batch_head(&mut reader, &mut batch).map_err(|_malformed| DecodeError::NotABatch)?;
    for number in 0..events {
        if number == EVENTS_MAX {
            let rest = u32::try_from(events - number).unwrap_or(u32::MAX);
            batch.undecodable = batch.undecodable.saturating_add(rest);
            return Ok(batch);
        }
        let start = reader;
        match event(&mut reader) {
            Ok(Parsed::Event(event)) => batch.events.push(event),
            Ok(Parsed::Unknown) => batch.unknown += 1,
            Ok(Parsed::Pairs) => batch.skipped += 1,
            Err(_unreadable) => {
                batch.undecodable += 1;
                reader = start;
                if reader.skip().is_err() {
                    return Ok(batch);
                }
            }
        }
    }
    if fields > 2 && !reader.nil() {
        batch.dp_rank = reader.i64().ok();
    }
    Ok(batch)
}

/// The time of a message without decoding it; 0 where it has none.
pub fn time(message: &[u8]) -> f64 {
    let mut reader = Reader::new(message);
    reader.array().and_then(|_| reader.f64()).unwrap_or(0.0)
}

/// Reads `[time, [` and leaves the reader at the first event.
fn batch_head(reader: &mut Reader<'_>, batch: &mut Batch) -> Result<(usize, usize), ReadError> {
    let fields = reader.array()?;
    if fields < 2 {
        return Err(ReadError::Type);
    }
    batch.ts = reader.f64()?;
    Ok((fields, reader.array()?))
}

enum Parsed {
    Event(Event),
    Unknown,
    Pairs,
}

/// The kinds of events that are known.
#[derive(Clone, Copy)]
enum Kind {
    Stored,
    Removed,
    Cleared,
}

impl Kind {
    fn from_wire(text: &str) -> Option<Self> {
        match text {
            "BlockStored" => Some(Self::Stored),
            "BlockRemoved" => Some(Self::Removed),
            "AllBlocksCleared" => Some(Self::Cleared),
            _ => None,
        }
    }

    /// The fields of the array form after the kind, in their order.
    const fn positions(self) -> &'static [Field] {
        match self {
            Self::Stored => &[
                Field::Hashes,
                Field::Parent,
                Field::Tokens,
                Field::BlockSize,
                Field::LoraId,
                Field::Medium,
                Field::LoraName,
                Field::ExtraKeys,
                Field::Group,
                Field::Attention,
            ],
            Self::Removed => &[Field::Hashes, Field::Medium, Field::Group],
            Self::Cleared => &[],
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    Group,
    Attention,
    Lookahead,
}

impl Field {
    fn from_wire(key: &str) -> Option<Self> {
        Some(match key {
            "block_hashes" => Self::Hashes,
            "parent_block_hash" => Self::Parent,
            "token_ids" => Self::Tokens,
            "block_size" => Self::BlockSize,
            "lora_id" => Self::LoraId,
            "medium" => Self::Medium,
            "lora_name" => Self::LoraName,
            "extra_keys" => Self::ExtraKeys,
            "group_idx" => Self::Group,
            "kv_cache_spec_kind" => Self::Attention,
            "lookahead_token_ids" => Self::Lookahead,
            _ => return None,
        })
    }
}

fn event(reader: &mut Reader<'_>) -> Result<Parsed, ReadError> {
    let mut draft = Draft::default();
    let kind = if reader.is_map() { map_event(reader, &mut draft)? } else { array_event(reader, &mut draft)? };
    Ok(match kind {
        None => Parsed::Unknown,
        Some(_) if draft.pairs => Parsed::Pairs,
        Some(kind) => Parsed::Event(draft.finish(kind)?),
    })
}

fn array_event(reader: &mut Reader<'_>, draft: &mut Draft) -> Result<Option<Kind>, ReadError> {
    let mut values = reader.array()?.checked_sub(1).ok_or(ReadError::Type)?;
    let kind = Kind::from_wire(reader.text()?);
    for &field in kind.map_or(&[][..], Kind::positions).iter().take(values) {
        draft.read(field, reader)?;
        values -= 1;
    }
    for _ in 0..values {
        reader.skip()?;
    }
    Ok(kind)
}

fn map_event(reader: &mut Reader<'_>, draft: &mut Draft) -> Result<Option<Kind>, ReadError> {
    let kind = kind_of_map(*reader)?;
    let pairs = reader.map()?;
    for _ in 0..pairs {
        let field = key(reader)?.and_then(Field::from_wire);
        match (kind, field) {
            (Some(_), Some(field)) => draft.read(field, reader)?,
            _ => reader.skip()?,
        }
    }
    Ok(kind)
}

/// Finds the value of `type`; engines write it first.
fn kind_of_map(mut reader: Reader<'_>) -> Result<Option<Kind>, ReadError> {
    for _ in 0..reader.map()? {
        if key(&mut reader)? == Some("type") {
            return Ok(Kind::from_wire(reader.text()?));
        }
        reader.skip()?;
    }
    Err(ReadError::Type)
}

/// A map's key, or nothing where it is no text.
fn key<'a>(reader: &mut Reader<'a>) -> Result<Option<&'a str>, ReadError> {
    if reader.is_text() {
        return reader.text().map(Some);
    }
    reader.skip().map(|()| None)
}

/// The fields of an event as they are read.
#[derive(Default)]
struct Draft {
    stored: Stored,
    has_hashes: bool,
    pairs: bool,
}

impl Draft {
    fn read(&mut self, field: Field, reader: &mut Reader<'_>) -> Result<(), ReadError> {
        if reader.nil() {
            return Ok(());
        }
        let stored = &mut self.stored;
        match field {
            Field::Hashes => {
                stored.hashes = list(reader, HASHES_MAX, hash)?;
                self.has_hashes = true;
            }
            Field::Parent => stored.parent = Some(hash(reader)?),
            Field::Tokens => self.read_tokens(reader)?,
            Field::BlockSize => stored.block_size = reader.u32()?,
            // An adapter's number is of no use where it is no number.
            Field::LoraId => stored.lora_id = or_skip(reader, Reader::i64)?,
            Field::Medium => stored.medium = or_skip(reader, Reader::text)?.map_or(Medium::Other, Medium::from_wire),
            Field::LoraName => stored.lora_name = or_skip(reader, Reader::text)?.map(str::to_owned),
            Field::ExtraKeys => stored.extra_keys = Some(list(reader, HASHES_MAX, block_keys)?),
            Field::Group => stored.group = Some(reader.u32()?),
            Field::Attention => {
                stored.attention = or_skip(reader, Reader::text)?.map_or(Attention::Unstated, Attention::from_wire);
            }
            Field::Lookahead => {
                stored.lookahead =
                    Some(list(
                        reader,
                        HASHES_MAX,
                        |reader| if reader.nil() { Ok(Vec::new()) } else { tokens(reader) },
                    )?);
            }
        }
        Ok(())
    }

    fn read_tokens(&mut self, reader: &mut Reader<'_>) -> Result<(), ReadError> {
        let mut ahead = *reader;
        let length = ahead.array()?;
        if length > 0 && ahead.is_array() {
            self.pairs = true;
            return reader.skip();
        }
        self.stored.tokens = tokens(reader)?;
        Ok(())
    }

    fn finish(self, kind: Kind) -> Result<Event, ReadError> {
        let Self { mut stored, has_hashes, .. } = self;
        if !has_hashes && !matches!(kind, Kind::Cleared) {
            return Err(ReadError::Type);
        }
        mark_adapter(&mut stored);
        Ok(match kind {
            Kind::Stored => Event::Stored(stored),
            Kind::Removed => {
                Event::Removed(Removed { hashes: stored.hashes, medium: stored.medium, group: stored.group })
            }
            Kind::Cleared => Event::Cleared,
        })
    }
}

/// Tells an adapter's name from a salt: both are bare texts, and the event names its adapter.
fn mark_adapter(stored: &mut Stored) {
    let (Some(adapter), Some(blocks)) = (&stored.lora_name, &mut stored.extra_keys) else { return };
    for first in blocks.iter_mut().filter_map(|keys| keys.first_mut()) {
        if matches!(first, ExtraKey::CacheSalt(text) if text == adapter) {
            *first = ExtraKey::Lora { name: adapter.clone(), path: None };
        }
    }
}

fn list<'a, T>(
    reader: &mut Reader<'a>,
    max: usize,
    mut item: impl FnMut(&mut Reader<'a>) -> Result<T, ReadError>,
) -> Result<Vec<T>, ReadError> {
    let length = reader.array()?;
    if length > max {
        return Err(ReadError::Type);
    }
    // A length is at most the bytes left, yet an item may be larger than its bytes: reserve for honest events only.
    let mut items = Vec::with_capacity(length.min(4096));
    for _ in 0..length {
        items.push(item(reader)?);
    }
    Ok(items)
}

fn tokens(reader: &mut Reader<'_>) -> Result<Vec<TokenId>, ReadError> {
    list(reader, TOKENS_MAX, |reader| reader.u32().map(TokenId))
}

/// A hash: an integer of either sign, or the last 8 bytes of a byte string. A float has lost bits and is refused.
fn hash(reader: &mut Reader<'_>) -> Result<WireHash, ReadError> {
    if !reader.is_bin() {
        return reader.bits().map(|(bits, _)| BlockHash(bits).into());
    }
    let bytes = reader.bin()?;
    let last = bytes.last_chunk().ok_or(ReadError::Type)?;
    let digest = match bytes.len() {
        8 => None,
        16 => bytes.first_chunk().map(|bytes| Digest::Xxh3(*bytes)),
        32 => bytes.first_chunk().map(|bytes| Digest::Sha256(*bytes)),
        _ => return Err(ReadError::Type),
    };
    Ok(WireHash { name: BlockHash(u64::from_be_bytes(*last)), digest })
}

fn block_keys(reader: &mut Reader<'_>) -> Result<Vec<ExtraKey>, ReadError> {
    if reader.nil() { Ok(Vec::new()) } else { list(reader, HASHES_MAX, extra_key) }
}

/// An extra key in its untagged form. One of another form makes its block unnameable, not its event unreadable.
fn extra_key(reader: &mut Reader<'_>) -> Result<ExtraKey, ReadError> {
    if reader.is_text() {
        return reader.text().map(|text| ExtraKey::CacheSalt(text.to_owned()));
    }
    if reader.is_bin() {
        return reader.bin().map(|digest| ExtraKey::PromptEmbeds(digest.to_vec()));
    }
    if !reader.is_array() {
        return Ok(or_skip(reader, Reader::i64)?.map_or(ExtraKey::Unknown, ExtraKey::LoraId));
    }
    Ok(or_skip(reader, item_and_offset)?
        .map_or(ExtraKey::Unknown, |(id, offset)| ExtraKey::Mm { id: id.to_owned(), offset: Some(offset) }))
}

fn item_and_offset<'a>(reader: &mut Reader<'a>) -> Result<(&'a str, i64), ReadError> {
    if reader.array()? != 2 {
        return Err(ReadError::Type);
    }
    Ok((reader.text()?, reader.i64()?))
}

/// Reads a value, or steps over it when it is not of the type wanted.
fn or_skip<'a, T>(
    reader: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, ReadError>,
) -> Result<Option<T>, ReadError> {
    let start = *reader;
    if let Ok(value) = read(reader) {
        return Ok(Some(value));
    }
    *reader = start;
    reader.skip().map(|()| None)
}

#[cfg(test)]
mod tests;

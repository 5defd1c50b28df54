//! HTTP/1.1 as the proxy needs it: heads in and out, the framing of bodies, and our own answers. Bytes in, values out.
//!
//! Heads are parsed by httparse and checked here for what decides where a message ends; whatever could be read in two
//! ways is refused ([`Refusal`]), because an engine might read it in the other. Source of the rules: RFC 9110, RFC 9112.

mod answer;
mod chunked;
mod fields;
mod reply;
mod request;

pub(super) use answer::{AnswerBody, AnswerError, AnswerHead, Closing, Medium};
pub(super) use chunked::{ChunkError, Chunked, FINAL_CHUNK, size_line};
pub use fields::Fields;
pub use reply::Reply;
pub(super) use request::{Forward, HeadScan, with_fields};
pub use request::{Framing, Head, Refusal};

/// Bytes of a head in all (`431`), as the larger of the public proxies' defaults: long prompts in cookies and tokens in
/// headers were seen at 20 and 60 KB.
pub(super) const HEAD_MAX: usize = 64 << 10;
/// Fields of a head (`431`).
pub(super) const FIELDS_MAX: usize = 128;
/// Bytes of a request's target (`414`).
pub(super) const TARGET_MAX: usize = 16 << 10;
/// Bytes of a method; the longest registered one (`UPDATEREDIRECTREF`) has 17.
pub(super) const METHOD_MAX: usize = 32;

//! What we must agree on with one engine: how it names blocks, how it speaks events, how it hands prefill to decode.
//!
//! Owns the vocabulary of block names ([`TokenId`], [`BlockHash`], [`Digest`], [`BlockSize`]), the chain that names a
//! prompt's blocks ([`KeySpace`], [`Hasher`]), the decoder of an engine's event batches ([`events`]), the check of an engine's
//! names against our own ([`attest`]) and the two legs of a prefill/decode request ([`handoff`]). Never touches sockets, files, the clock or the environment.

pub mod attest;
mod cbor;
mod chain;
pub mod events;
mod extra;
pub mod handoff;
mod loose;
mod msgpack;
mod names;
mod pickle;
mod rehash;
mod space;

pub use chain::{HashError, Hasher, NamedBlock};
pub use extra::{BlockExtra, Extra, ExtraKey, Lora};
pub use names::{BlockHash, BlockSize, Digest, EventSeq, HashAlgo, KeyEra, NoneSeed, TokenId};
pub use rehash::Rehash;
pub use space::{Chain, KeySpace};

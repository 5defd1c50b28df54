//! What we must agree on with one engine: how it names blocks and how it speaks events.
//!
//! Owns the vocabulary of block names ([`TokenId`], [`BlockHash`], [`Digest`], [`BlockSize`]), the chain that names a
//! prompt's blocks ([`Hasher`]), the decoder of an engine's event batches ([`events`]) and the check of an engine's
//! names against our own ([`attest`]). Never touches sockets, files, the clock or the environment.

pub mod attest;
mod cbor;
mod chain;
pub mod events;
mod extra;
mod msgpack;
mod names;
mod pickle;

pub use chain::{EngineAlgo, HashError, Hasher, NamedBlock};
pub use extra::{BlockExtra, Extra, ExtraKey};
pub use names::{BlockHash, BlockSize, Digest, EventSeq, HashAlgo, KeyEra, NoneSeed, TokenId};

//! Which blocks each endpoint holds, kept true by its events: stored, removed, cleared, gaps.
//!
//! The rules, as values: how a stream's sequence numbers follow each other ([`Cursor`]), how many copies of a block one
//! cache holds and which of them count ([`Book`]), and how deep a prompt's leading run goes in each cache ([`Scorer`]).
//! The tables that these rules act on are shared with readers and live in [`crate::state::index`].
//!
//! Invariant: a block counts as held exactly while its cache has announced more copies of it than it has removed, in the
//! accelerator's memory and in the KV group whose attention needs every block of a prefix.

mod alias;
mod book;
mod copies;
mod cursor;
mod queue;
mod score;

pub use alias::Aliases;
pub use book::{Book, Disproof, Limits, Place, Removal, Storing};
pub use cursor::{Arrival, Cursor};
pub use queue::Queue;
pub(crate) use score::bits;
pub use score::{Credit, Scorer};

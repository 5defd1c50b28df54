//! A rule made ready ([`Service`]) and the order of the steps: a request and a [`View`] become a [`Decision`].
//!
//! [`name`] turns a prompt into block names, which is the heavy half and depends on the request alone; [`route`] weighs
//! them against what endpoints hold now, and is asked again with the loser excluded when a connect fails. Neither does
//! I/O, takes a lock or reads a clock.

mod caller;
mod decision;
mod ladder;
mod pick;
mod remembered;

pub use caller::{Caller, Key, Text, Whose, prefix, told};
pub use decision::{Decision, Miss, Observed, PromptShape, Reason, Tier};
pub use ladder::{
    Named, NamedPrompt, Overlap, Part, Service, Space, Step, View, name, route, route_anywhere, route_decode,
    serving_role, shapes, tokens, uncached,
};
pub use pick::{Lookup, Match, rank};

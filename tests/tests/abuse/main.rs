//! kvlb is abused from outside, over real sockets: whatever comes is passed on as it is or gets a clear error, and kvlb goes on.
//!
//! Each test has a stage of its own: addresses of the loopback network that no other test uses, simulated engines, and the real
//! daemon. At its end the daemon must be well: it answers, no connection was lost to a panic, and it stops cleanly.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod bodies;
mod events;
mod files;
mod floods;
mod heads;
mod outages;
mod parsers;
mod publisher;
mod rules;
mod stage;

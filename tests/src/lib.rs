//! kvlb's test harness and its simulated engine.
//!
//! [`engine`] behaves like a recorded vLLM, over HTTP and over its event sockets, with faults on demand. It names blocks with code of
//! its own, never with kvlb's, so that one cannot hide the other's mistake.

pub mod bench;
pub mod chaos;
pub mod engine;
pub mod harness;
pub mod packages;

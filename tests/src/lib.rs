//! kvlb's test harness and its simulated engine.
//!
//! [`engine`] behaves like a recorded vLLM, over HTTP and over its event sockets, with faults on demand. It names blocks with code of
//! its own, never with kvlb's, so that one cannot hide the other's mistake.
//! [`sim`] runs kvlb's own router and policy against modelled engines in virtual time.

pub mod bench;
pub mod chaos;
pub mod engine;
pub mod harness;
pub mod packages;
pub mod sim;

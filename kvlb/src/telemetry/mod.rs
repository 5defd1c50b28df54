//! Every metric family, the log set-up, the access log and the decision log.
//!
//! Families of the source document keep its names and labels exactly; everything of our own is `kvlb_*`, with base
//! units and bounded labels. Counters are incremented where things happen; gauges of live state are set when a page is
//! rendered, from what `state` holds, so that a series goes when its rule goes.

pub mod access;
pub mod decisions;
mod families;
mod logs;

pub use families::Metrics;
pub use logs::{LogFormat, init_logs};

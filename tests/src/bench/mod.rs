//! Side by side: what kvlb and other proxies cost for the same work, on one core, in one run.
//!
//! [`mock`](mock()) is the upstream, [`load`](load()) the client that checks every byte, and [`run`](run()) starts both with each
//! proxy in turn and prints the comparison. docs/benchmarks.md says what the figures mean.
//!
//! | part | one sentence |
//! |---|---|
//! | `cases`, `proxies` | The work, and who does it. |
//! | `run`, `child` | Rounds in random order, each process on its core and ended by its id. |
//! | `mock`, `load` | Both ends: one event loop each, without a runtime above it. |
//! | `wire`, `framing`, `check` | What travels, and whether each byte of it is right. |
//! | `process`, `statistics` | CPU time and memory of a process; histograms, medians and ratios. |
//! | `report`, `targets` | Tables, and what design §11 promises. |

mod cases;
mod check;
mod child;
mod framing;
mod load;
mod mock;
mod process;
mod proxies;
mod report;
mod run;
mod statistics;
mod targets;
mod wire;

pub use cases::Case;
pub use load::{LoadFlags, Measured, Shape, load};
pub use mock::{MockFlags, mock};
pub use proxies::Proxy;
pub use report::Record;
pub use run::{RunFlags, run};

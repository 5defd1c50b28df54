//! The policy simulator: kvlb's own router and policy against modelled engines, in virtual time, from a seed.
//!
//! `cargo xtask sim` runs it; docs/policy.md says what came of it. One seed gives one run, so what went wrong can be had again.
//!
//! | part | one sentence |
//! |---|---|
//! | `world` | Virtual time: requests come, a policy chooses, engines take steps, events travel, and things go wrong. |
//! | `mirror` | kvlb's own state: the rule, the index, the guards, the router. |
//! | `policy`, `peers` | Who chooses: kvlb in each of its modes, and models of others by what they publish. |
//! | `model`, `pool`, `timing` | An engine: steps, blocks, and how long they take. |
//! | `workload`, `trace` | What clients ask: made from a seed, or somebody's record. |
//! | `fault` | What goes wrong, and when. |
//! | `planted` | Mistakes of kvlb's own that the storm must find. |
//! | `report`, `plot`, `figures` | Tables, JSON and pictures. |

mod fault;
mod figures;
mod mirror;
mod model;
mod peers;
mod planted;
mod plot;
mod policy;
mod pool;
mod report;
mod run;
mod storm;
mod timing;
mod trace;
mod workload;
mod world;

pub use planted::Planted;
pub use run::{SimFlags, run};
pub use storm::{storm, storm_with};

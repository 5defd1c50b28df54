//! The REST API: LoxiLB's load-balancer bodies become rules, and what kvlb knows is shown.
//!
//! Owns the wire types ([`wire`]) and every answer of the API ([`Problem`] for those that refuse). Thin: what a rule
//! means is decided in the core rooms.

mod problem;
pub mod store;
pub mod wire;

pub use problem::Problem;

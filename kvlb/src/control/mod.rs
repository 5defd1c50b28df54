//! The REST API: LoxiLB's load-balancer bodies become rules, and what kvlb knows is shown.
//!
//! Owns the wire types ([`wire`]), the list of rules in memory and on disk ([`store`]), the API's paths ([`rest`]) and
//! every refusal ([`Problem`]). Thin: what a rule means is decided in the core rooms, and what changes while traffic
//! flows comes through [`Live`].

pub mod live;
mod problem;
pub mod rest;
pub mod store;
pub mod wire;

pub use live::Live;
pub use problem::Problem;
pub use rest::{About, Api, Guard, TakenOver, Tokens, serve};
pub use store::{Publish, Store};

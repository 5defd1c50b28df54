//! kvlb: a load balancer for LLM inference that sends each request to the engine that already holds most of its
//! prompt's KV blocks.

pub mod cli;
pub mod config;
pub mod contract;
pub mod control;
pub mod fleet;
pub mod policy;

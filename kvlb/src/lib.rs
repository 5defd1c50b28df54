//! kvlb: a load balancer for LLM inference that sends each request to the engine that already holds most of its
//! prompt's KV blocks.

pub mod clock;
pub mod contract;
pub mod ingest;
pub mod inventory;
pub mod state;

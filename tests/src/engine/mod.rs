//! A simulated vLLM: OpenAI HTTP, a real block pool, and its event stream.

mod cache;
mod chance;
mod clock;
mod config;
#[cfg(test)]
mod fidelity;
mod names;
mod pool;
mod scheduler;
mod stats;
mod wire;

pub use config::{Adapter, EngineConfig, OutputHook, Outputs, Version};
pub use names::{Algorithm, Digest, Extra, Naming};

//! Reads the engines themselves: what they say over HTTP, what they announce, and whether it agrees with our side.
//!
//! Owns the questions that an engine is asked ([`read()`]), the comparison of its answers with a rule ([`preflight()`]) and
//! the report of it ([`Report`]). Changes nothing anywhere: it sends no request that a model works on, and writes no
//! rule and no state. Every answer is bounded in bytes and time; one that is missing costs nothing but itself.
//!
//! Engines are spoken to in plain HTTP only.

mod bootstrap;
mod hear;
mod legs;
mod place;
mod pool;
mod preflight;
mod read;
mod report;
mod sample;
mod scrape;
#[cfg(test)]
mod tests;

pub use bootstrap::bootstrap;
pub use hear::{hear, heard};
pub use place::{PlaceError, place};
pub use preflight::{Heard, Look, OurTokens, Ours, Socket, agree, preflight};
pub use read::{Asker, body_within, read};
pub use report::{EndpointReport, Report, Row, Verdict};
pub use sample::{SAMPLES, Sample, our_tokens};
pub use scrape::{readings, scrape};

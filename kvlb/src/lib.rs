//! kvlb: a load balancer for LLM inference that sends each request to the engine that already holds most of its
//! prompt's KV blocks.
//!
//! # The rooms
//!
//! Core: values in, values out. No sockets, files, clock, environment, async or randomness.
//!
//! | room | one sentence |
//! |---|---|
//! | [`contract`] | What we must agree on with one engine: how it names blocks, how it speaks events. |
//! | [`openai`] | A request body becomes a `Prompt`: model, text or messages, and whatever else enters the hash. |
//! | [`tokenize`] | A `Prompt` becomes `TokenId`s: the chat template, then the model's tokenizer. |
//! | [`inventory`] | Which blocks each endpoint holds, kept true by its events: stored, removed, cleared, gaps. |
//! | [`fleet`] | The rule and its endpoints as values: role, weight, condition; who is eligible now. |
//! | [`policy`] | Given candidates with overlap and load, which endpoint. |
//! | [`router`] | A rule made ready and the order of the steps: a request and a view become a decision. |
//!
//! Between: what edges share, and all they share.
//!
//! | room | one sentence |
//! |---|---|
//! | [`state`] | The table of services, fleets and inventories that edges write and read; every lock and atomic lives here. |
//! | [`telemetry`] | Every metric family, the log set-up and the access log. |
//! | [`clock`] | The one reader of clocks. |
//! | [`courtesy`] | Long work makes way for data threads. |
//! | [`secret`] | Tokens and keys in files that only their owner may read. |
//! | [`tls`] | One TLS library and provider: what PEM files become, and the program's HTTP clients. |
//!
//! Edges: each one talks to one outside thing, turns it into core values, and stays thin.
//!
//! | room | one sentence |
//! |---|---|
//! | [`ingest`] | One subscription per endpoint over ZeroMQ; reconnects for ever; applies events to `state`. |
//! | [`proxy`] | The L7 data path on io_uring: read a request, ask `router`, connect, relay, retry with the loser excluded. |
//! | [`kernel`] | Loads and attaches the eBPF programs through aya, mirrors the fleet into their maps, reads their counters. |
//! | [`handover`] | One kvlb gives sockets, locks and knowledge to the next over a Unix socket. |
//! | [`probe`] | Active health checks; their verdicts go to `state`. |
//! | [`discover`] | Reads the engines: what they say over HTTP and announce, and whether it agrees with a rule. |
//! | [`staging`] | Reads staged tokenizers from disk and loads them off the data path. |
//! | [`control`] | The REST API; explains decisions; serves metrics; keeps the rules on disk. |
//! | [`cli`] | The client of that API, in loxicmd's grammar. |
//! | [`config`] | Flags, environment and file fill each room's own settings; the only reader of all three. |
//! | [`app`] | The list of parts, in the order in which they start and stop. |

pub mod app;
pub mod cli;
pub mod clock;
pub mod config;
pub mod contract;
pub mod control;
pub mod courtesy;
pub mod discover;
pub mod fleet;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod handover;
pub mod ingest;
pub mod inventory;
pub mod kernel;
pub mod openai;
pub mod policy;
pub mod probe;
pub mod proxy;
pub mod router;
pub mod secret;
pub mod staging;
pub mod state;
pub mod telemetry;
pub mod tls;
pub mod tokenize;

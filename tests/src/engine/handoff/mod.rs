//! Prefill/decode handoffs as vLLM's connectors make them: what a request says of them, and what a prefill answers.
//!
//! With NIXL the prefill side keeps a request's blocks and says in its answer where they are; the decode side reads them over the side
//! channel ([`side`]) and says when it has. With Mooncake both sides know a `transfer_id` beforehand, and the decode side finds the
//! other through its [`bootstrap`]. Reading goes by block number: who comes after the lease has ended reads what is there by then, as
//! with the real connector.
//!
//! Source: vLLM 0.32.0 `NixlConnector` (pull), `MooncakeConnector`; recorded exchanges in `tests/golden/vllm-0.32.0/http/`.

pub(super) mod bootstrap;
pub(super) mod contents;
pub(super) mod leases;
pub(super) mod legs;
pub(super) mod pull;
pub(super) mod side;
pub(super) mod turn;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::chance::Chance;
use super::config::EngineConfig;
use super::pool::BlockId;
use legs::LegId;

/// Which of vLLM's KV connectors an engine has (`--kv-transfer-config`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum KvConnector {
    /// None: `kv_transfer_params` are read, checked, and change nothing.
    #[default]
    None,
    /// `NixlConnector`, pulling.
    Nixl,
    /// `MooncakeConnector`.
    Mooncake,
}

/// The engine's part as configured. NIXL does not look at it, as the real one; with Mooncake a consumer keeps nothing for others and has
/// no bootstrap, and a producer pulls nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum KvRole {
    /// Prefills for others and decodes what others prefilled.
    #[default]
    #[value(name = "kv_both")]
    Both,
    /// Prefills for others.
    #[value(name = "kv_producer")]
    Producer,
    /// Decodes what others prefilled.
    #[value(name = "kv_consumer")]
    Consumer,
}

/// What a body's `kv_transfer_params` ask for.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) enum Wish {
    /// Nothing, or nothing this engine does.
    #[default]
    None,
    /// Compute, and keep the blocks for a decode elsewhere; Mooncake names the transfer.
    Prefill { transfer_id: Option<String> },
    /// Take the blocks from where they were computed.
    Decode(Source),
    /// A decode that names no source it could read: vLLM warns and computes.
    Unusable,
}

/// Where a decode reads.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Source {
    /// From these blocks of an engine (NIXL).
    Blocks {
        /// The engine's identity.
        engine_id: String,
        /// The prefilled request's identity there.
        request_id: String,
        /// Its side channel.
        host: String,
        /// Port of that.
        port: u16,
        /// Block numbers by KV group.
        blocks: Vec<Vec<BlockId>>,
        /// Prompt tokens that the prefill found in its cache.
        cached: Option<usize>,
    },
    /// By a name that both legs know (Mooncake).
    Transfer {
        /// The engine's identity.
        engine_id: String,
        /// The name.
        transfer_id: String,
        /// `http://HOST:PORT` of the prefill side's bootstrap.
        bootstrap: String,
    },
}

impl Source {
    /// The prefilled request as its engine knows it.
    pub(super) fn key(&self) -> &str {
        match self {
            Self::Blocks { request_id, .. } => request_id,
            Self::Transfer { transfer_id, .. } => transfer_id,
        }
    }

    /// The engine it names.
    pub(super) fn engine_id(&self) -> &str {
        match self {
            Self::Blocks { engine_id, .. } | Self::Transfer { engine_id, .. } => engine_id,
        }
    }
}

impl Wish {
    /// Reads `kv_transfer_params` that are an object or null. As in Python, a flag counts when it is truthy.
    pub(super) fn read(config: &EngineConfig, params: &Value) -> Self {
        let (prefill, decode) = (truthy(&params["do_remote_decode"]), truthy(&params["do_remote_prefill"]));
        match config.kv_connector {
            KvConnector::Nixl if decode => nixl_source(params).map_or(Self::Unusable, Self::Decode),
            KvConnector::Nixl if prefill => Self::Prefill { transfer_id: None },
            KvConnector::Mooncake if decode && config.kv_role == KvRole::Producer => Self::Unusable,
            KvConnector::Mooncake if decode => mooncake_source(params).map_or(Self::Unusable, Self::Decode),
            KvConnector::Mooncake if prefill && config.kv_role != KvRole::Consumer => {
                match text(&params["transfer_id"]) {
                    Some(transfer_id) => Self::Prefill { transfer_id: Some(transfer_id) },
                    None => Self::None,
                }
            }
            _ => Self::None,
        }
    }
}

/// The keys without which vLLM computes locally.
fn nixl_source(params: &Value) -> Option<Source> {
    let groups = params["remote_block_ids"].as_array().filter(|groups| !groups.is_empty())?;
    let numbers = |group: &Value| -> Option<Vec<BlockId>> { group.as_array()?.iter().map(number).collect() };
    Some(Source::Blocks {
        engine_id: text(&params["remote_engine_id"])?,
        request_id: text(&params["remote_request_id"])?,
        host: text(&params["remote_host"])?,
        port: u16::try_from(number(&params["remote_port"])?).ok()?,
        blocks: groups.iter().map(numbers).collect::<Option<_>>()?,
        cached: number(&params["remote_prefill_cached_tokens"]),
    })
}

fn mooncake_source(params: &Value) -> Option<Source> {
    Some(Source::Transfer {
        engine_id: text(&params["remote_engine_id"])?,
        transfer_id: text(&params["transfer_id"])?,
        bootstrap: text(&params["remote_bootstrap_addr"])?,
    })
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn number(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|number| usize::try_from(number).ok())
}

fn truthy(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(flag) => *flag,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

/// A request's part in a handoff.
#[derive(Debug, Clone)]
pub(super) enum Part {
    /// Its blocks stay when it ends, under this key.
    Prefill { key: String, leg: LegId, handed: Handed },
    /// Its blocks are read from elsewhere, once.
    Decode { source: Source, leg: LegId },
}

/// What a prefill keeps for its decode, said before its last token is.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Held {
    /// The request's identity in this engine.
    pub(super) key: String,
    /// Block numbers by KV group.
    pub(super) groups: Vec<Vec<BlockId>>,
    /// Tokens whose KV is in them.
    pub(super) tokens: usize,
    /// Prompt tokens that were found in the cache.
    pub(super) cached: usize,
}

/// Where a prefill leaves what it keeps, for the answer.
#[derive(Debug, Clone, Default)]
pub(super) struct Handed(Arc<Mutex<Option<Held>>>);

impl Handed {
    /// Leaves it; what was left before is forgotten.
    pub(super) fn leave(&self, held: Held) {
        *self.inner() = Some(held);
    }

    /// What was left.
    pub(super) fn take(&self) -> Option<Held> {
        self.inner().take()
    }

    fn inner(&self) -> MutexGuard<'_, Option<Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How other engines find one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    /// Which connector it speaks.
    pub(super) connector: KvConnector,
    /// `engine_id`: another one in every life, and for every rank.
    pub(super) engine_id: String,
    /// Its side channel as others reach it.
    pub(super) address: SocketAddr,
}

impl Identity {
    /// That of rank `number` in its `life`-th life.
    pub(super) fn new(config: &EngineConfig, life: u64, number: usize, address: SocketAddr) -> Self {
        let parts = [config.chance_seed, life, u64::from(address.port()), u64::try_from(number).unwrap_or(u64::MAX)];
        let (high, low) = (Chance::seed_of(&config.name, &parts), Chance::seed_of("engine_id", &parts));
        let rank = if config.data_parallel_size > 1 { format!("_dp{number}") } else { String::new() };
        let engine_id = format!(
            "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}{rank}",
            high >> 32,
            (high >> 16) & 0xffff,
            high & 0xfff,
            0x8000 | ((low >> 48) & 0x3fff),
            low & 0xffff_ffff_ffff
        );
        Self { connector: config.kv_connector, engine_id, address }
    }

    /// `kv_transfer_params` of a NIXL prefill's answer: keys, order and types of the recorded 0.32.
    ///
    /// `remote_num_tokens` is what was computed (the prompt, and all but the last of the answer's tokens); the expiry is said for blocks
    /// kept by a decode only, so here it is null; `remote_prefill_cached_tokens` is the prefill's own share from its cache.
    pub(super) fn params(&self, held: &Held) -> Option<Value> {
        (self.connector == KvConnector::Nixl).then(|| {
            json!({
                "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": held.groups,
                "remote_engine_id": self.engine_id, "remote_request_id": held.key,
                "remote_host": self.address.ip().to_string(), "remote_port": self.address.port(),
                "tp_size": 1, "dcp_size": 1, "pp_size": 1,
                "remote_num_tokens": held.tokens, "remote_blocks_expiry_time": null, "transfer_mode": "pull",
                "remote_prefill_cached_tokens": held.cached,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{KvConnector, KvRole, Source, Wish};
    use crate::engine::EngineConfig;

    fn config(kv_connector: KvConnector, kv_role: KvRole) -> EngineConfig {
        EngineConfig { kv_connector, kv_role, ..EngineConfig::default() }
    }

    #[test]
    fn a_decode_without_one_of_its_keys_is_unusable_and_a_connector_of_the_other_kind_asks_for_nothing() {
        let nixl = config(KvConnector::Nixl, KvRole::Both);
        let whole = json!({"do_remote_prefill": true, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
            "remote_request_id": "r", "remote_host": "h", "remote_port": 5600});
        assert!(matches!(Wish::read(&nixl, &whole), Wish::Decode(Source::Blocks { port: 5600, cached: None, .. })));
        for key in ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"] {
            let mut part = whole.clone();
            part.as_object_mut().unwrap().remove(key);
            assert_eq!(Wish::read(&nixl, &part), Wish::Unusable, "{key}");
        }
        assert_eq!(Wish::read(&config(KvConnector::None, KvRole::Both), &whole), Wish::None);
        assert_eq!(Wish::read(&nixl, &json!(null)), Wish::None);
        assert_eq!(Wish::read(&nixl, &json!({"do_remote_decode": 1})), Wish::Prefill { transfer_id: None });
    }

    #[test]
    fn mooncake_looks_at_the_role() {
        let prefill = json!({"do_remote_decode": true, "transfer_id": "t"});
        let decode = json!({"do_remote_prefill": true, "do_remote_decode": false, "transfer_id": "t",
            "remote_bootstrap_addr": "http://h:1", "remote_engine_id": "e"});
        let of = |role, params| Wish::read(&config(KvConnector::Mooncake, role), params);
        assert_eq!(of(KvRole::Producer, &prefill), Wish::Prefill { transfer_id: Some("t".into()) });
        assert_eq!(of(KvRole::Consumer, &prefill), Wish::None);
        assert!(matches!(of(KvRole::Both, &decode), Wish::Decode(Source::Transfer { .. })));
        assert_eq!(of(KvRole::Producer, &decode), Wish::Unusable);
    }
}

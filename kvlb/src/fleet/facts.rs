//! What an engine says of itself, as values.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::contract::{KeyEra, TokenId};

/// Something that an engine was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact<T> {
    /// Its answer.
    Known(T),
    /// Why there is none.
    Missing(Missing),
}

impl<T> Fact<T> {
    /// The answer.
    pub const fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Missing(_) => None,
        }
    }

    /// Why there is no answer.
    pub const fn missing(&self) -> Option<&Missing> {
        match self {
            Self::Known(_) => None,
            Self::Missing(why) => Some(why),
        }
    }

    /// Another value made of the answer.
    pub fn map<U>(self, make: impl FnOnce(T) -> U) -> Fact<U> {
        match self {
            Self::Known(value) => Fact::Known(make(value)),
            Self::Missing(why) => Fact::Missing(why),
        }
    }
}

impl<T> Default for Fact<T> {
    fn default() -> Self {
        Self::Missing(Missing::NotAsked)
    }
}

/// Why a fact is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Nobody asked.
    NotAsked,
    /// The engine's HTTP server did not answer.
    Unreachable(String),
    /// It answered with this status.
    Status(u16),
    /// It answered something else than was expected.
    Unreadable(String),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAsked => f.write_str("not asked"),
            Self::Unreachable(why) => write!(f, "no answer: {why}"),
            Self::Status(status @ (401 | 403)) => write!(f, "refused with {status}: it wants its API key"),
            Self::Status(404) => f.write_str("not served (404)"),
            Self::Status(status) => write!(f, "answered {status}"),
            Self::Unreadable(what) => write!(f, "not understood: {what}"),
        }
    }
}

/// What one engine says of itself. Each fact stands alone: an old version, or one that wants a key, still tells the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineFacts {
    /// `GET /version`.
    pub version: Fact<Version>,
    /// `GET /v1/models`, adapters included.
    pub models: Fact<Vec<Model>>,
    /// `vllm:cache_config_info` of `GET /metrics`.
    pub cache: Fact<CacheConfig>,
    /// Event publishers by data-parallel rank: `GET /kv_event_sources`, from vLLM 0.31.
    pub sources: Fact<BTreeMap<u32, EventSource>>,
    /// The names of all series of `GET /metrics`.
    pub series: Fact<BTreeSet<String>>,
    /// Data-parallel ranks that report metrics.
    pub engines: Fact<u32>,
    /// `process_start_time_seconds`, bit by bit.
    pub process_start: Fact<u64>,
    /// `POST /tokenize` of each sample, in their order; empty unless it was asked for.
    pub tokens: Vec<Fact<Vec<TokenId>>>,
}

impl EngineFacts {
    /// Why nothing at all is known, where the engine's HTTP server answered nothing.
    pub fn unreachable(&self) -> Option<&str> {
        let missing = [self.version.missing(), self.models.missing(), self.cache.missing(), self.sources.missing()];
        let mut why = missing.into_iter().map(|missing| match missing {
            Some(Missing::Unreachable(why)) => Some(why.as_str()),
            _ => None,
        });
        let first = why.next().flatten()?;
        why.all(|why| why.is_some()).then_some(first)
    }

    /// These facts, with those of `before` where an answer did not come this time: a busy engine answers late, and is the same
    /// one. Nothing is kept of another process.
    #[must_use]
    pub fn or_of(self, before: &Self) -> Self {
        fn kept<T: Clone>(now: Fact<T>, before: &Fact<T>) -> Fact<T> {
            match now {
                Fact::Missing(Missing::Unreachable(_)) if before.known().is_some() => before.clone(),
                now => now,
            }
        }
        let same = |now: &Fact<u64>| {
            now.known().is_none() || before.process_start.known().is_none() || *now == before.process_start
        };
        if !same(&self.process_start) {
            return self;
        }
        Self {
            version: kept(self.version, &before.version),
            models: kept(self.models, &before.models),
            cache: kept(self.cache, &before.cache),
            sources: kept(self.sources, &before.sources),
            series: kept(self.series, &before.series),
            engines: kept(self.engines, &before.engines),
            process_start: kept(self.process_start, &before.process_start),
            tokens: self.tokens,
        }
    }

    /// How its version writes extra keys.
    ///
    /// Source: vLLM tags them from 0.31.0 on.
    pub fn era(&self) -> Option<KeyEra> {
        let tagged = self.version.known()?.at_least(0, 31)?;
        Some(if tagged { KeyEra::Tagged } else { KeyEra::Untagged })
    }

    /// Whether an unset `PYTHONHASHSEED` means a fixed text to its version, for the sha256 algorithms.
    ///
    /// Source: vLLM takes `vllm-none-hash` from 0.29.0 on, and random bytes before.
    pub fn fixes_unset_seed(&self) -> Option<bool> {
        self.version.known()?.at_least(0, 29)
    }

    /// The models that are no adapters.
    pub fn base_models(&self) -> impl Iterator<Item = &Model> {
        self.models.known().into_iter().flatten().filter(|model| model.parent.is_none())
    }

    /// Its adapters.
    pub fn adapters(&self) -> impl Iterator<Item = &Model> {
        self.models.known().into_iter().flatten().filter(|model| model.parent.is_some())
    }

    /// Its data-parallel ranks, as far as it says: by its event publishers, else by its metrics.
    pub fn ranks(&self) -> Option<usize> {
        let publishers = self.sources.known().map(BTreeMap::len).filter(|ranks| *ranks > 0);
        publishers.or_else(|| self.engines.known().and_then(|engines| usize::try_from(*engines).ok()))
    }

    /// The event publisher of its first rank.
    pub fn first_source(&self) -> Option<&EventSource> {
        self.sources.known()?.values().next()
    }
}

/// A version of vLLM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// As the engine writes it.
    pub text: String,
    /// Its first two numbers; `None` where there are none.
    pub release: Option<(u32, u32)>,
}

impl Version {
    /// Whether it is `major.minor` or later; `None` for a version without numbers.
    pub fn at_least(&self, major: u32, minor: u32) -> Option<bool> {
        Some(self.release? >= (major, minor))
    }
}

impl From<String> for Version {
    fn from(text: String) -> Self {
        let mut parts = text.trim_start_matches('v').split('.');
        let mut number = || {
            let part = parts.next()?;
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part[..digits].parse().ok()
        };
        let release = number().zip(number());
        Self { text, release }
    }
}

/// A model that an engine lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// The name that clients send.
    pub id: String,
    /// The base model, where this one is an adapter.
    pub parent: Option<String>,
    /// Where the engine has it; of an adapter, the path that is hashed from vLLM 0.31 on.
    pub root: Option<String>,
    /// The longest prompt and output together, in tokens.
    pub max_model_len: Option<u64>,
}

/// What the labels of `vllm:cache_config_info` say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheConfig {
    /// `block_size`, tokens.
    pub block_size: Option<u32>,
    /// `num_gpu_blocks`.
    pub num_gpu_blocks: Option<u64>,
    /// `prefix_caching_hash_algo`.
    pub hash_algo: Option<String>,
    /// `enable_prefix_caching`.
    pub prefix_caching: Option<bool>,
}

/// Where one rank publishes its events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventSource {
    /// `enable_kv_cache_events`.
    pub enabled: bool,
    /// `publisher`: `zmq`, or one that nobody can listen to.
    pub publisher: String,
    /// `endpoint`, as the engine writes it: `tcp://*:5557`.
    pub endpoint: Option<String>,
    /// `replay_endpoint`, likewise; `None`: it opens no replay socket.
    pub replay_endpoint: Option<String>,
}

impl EventSource {
    /// The port of its publisher.
    pub fn port(&self) -> Option<u16> {
        port_of(self.endpoint.as_deref()?)
    }

    /// The port of its replay socket.
    pub fn replay_port(&self) -> Option<u16> {
        port_of(self.replay_endpoint.as_deref()?)
    }

    /// Whether anybody can listen to it.
    pub fn is_open(&self) -> bool {
        self.enabled && self.publisher == "zmq" && self.port().is_some()
    }
}

fn port_of(endpoint: &str) -> Option<u16> {
    endpoint.strip_prefix("tcp://")?.rsplit_once(':')?.1.parse().ok().filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_first_two_numbers() {
        let release = |text: &str| Version::from(text.to_owned()).release;
        for (text, expected) in [
            ("0.32.0", Some((0, 32))),
            ("v0.9.2", Some((0, 9))),
            ("0.11.1rc2.dev3+g0123456", Some((0, 11))),
            ("1.0", Some((1, 0))),
            ("0.31rc1", Some((0, 31))),
            ("dev", None),
            ("", None),
            ("0", None),
            ("99999999999.1", None),
        ] {
            assert_eq!(release(text), expected, "{text}");
        }
        let at_least = |text: &str| Version::from(text.to_owned()).at_least(0, 31);
        assert_eq!(
            [at_least("0.31.0"), at_least("1.2.0"), at_least("0.30.9"), at_least("main")],
            [Some(true), Some(true), Some(false), None]
        );
    }

    #[test]
    fn a_version_tells_the_era_and_what_an_unset_seed_means() {
        let told = |text: &str| {
            let version = Fact::Known(Version::from(text.to_owned()));
            let facts = EngineFacts { version, ..EngineFacts::default() };
            (facts.era(), facts.fixes_unset_seed())
        };
        assert_eq!(told("0.32.0"), (Some(KeyEra::Tagged), Some(true)));
        assert_eq!(told("0.29.1"), (Some(KeyEra::Untagged), Some(true)));
        assert_eq!(told("0.18.0"), (Some(KeyEra::Untagged), Some(false)));
        assert_eq!(told("nightly"), (None, None));
        assert_eq!(EngineFacts::default().era(), None);
    }

    #[test]
    fn an_answer_that_came_late_is_not_forgotten_unless_the_process_is_another() {
        fn late<T>() -> Fact<T> {
            Fact::Missing(Missing::Unreachable("timed out".to_owned()))
        }
        let known = |ranks: u32, start: u64| EngineFacts {
            engines: Fact::Known(ranks),
            process_start: Fact::Known(start),
            ..EngineFacts::default()
        };
        let silent = EngineFacts { engines: late(), process_start: late(), ..EngineFacts::default() };
        assert_eq!(silent.or_of(&known(2, 7)).engines, Fact::Known(2));
        let another = EngineFacts { engines: late(), ..known(0, 8) };
        assert_eq!(another.or_of(&known(2, 7)).engines, late());
        let says_no = EngineFacts { engines: Fact::Missing(Missing::Status(404)), ..known(0, 7) };
        assert_eq!(says_no.or_of(&known(2, 7)).engines, Fact::Missing(Missing::Status(404)));
    }

    #[test]
    fn ports_are_read_from_endpoints_that_have_one() {
        let source = |endpoint: &str| EventSource { endpoint: Some(endpoint.to_owned()), ..EventSource::default() };
        assert_eq!(source("tcp://*:5557").port(), Some(5557));
        assert_eq!(source("tcp://[::]:17557").port(), Some(17_557));
        for odd in ["ipc:///tmp/x", "inproc://x", "tcp://*", "tcp://*:0", "tcp://*:70000", ""] {
            assert_eq!(source(odd).port(), None, "{odd}");
        }
    }

    #[test]
    fn an_engine_is_unreachable_only_where_nothing_answered() {
        fn gone<T>() -> Fact<T> {
            Fact::Missing(Missing::Unreachable("connection refused".to_owned()))
        }
        let facts =
            EngineFacts { version: gone(), models: gone(), cache: gone(), sources: gone(), ..EngineFacts::default() };
        assert_eq!(facts.unreachable(), Some("connection refused"));
        let refused = EngineFacts { models: Fact::Missing(Missing::Status(401)), ..facts };
        assert_eq!(refused.unreachable(), None);
        assert_eq!(EngineFacts::default().unreachable(), None);
    }
}

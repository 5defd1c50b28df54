//! Everything that can be set before an engine starts: the library's `EngineConfig` and the flags of `sim-engine` are one thing.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::handoff::{KvConnector, KvRole};
use super::names::{Algorithm, KeyForm, Naming};

/// A vLLM release, `0.MINOR.PATCH`; it fixes the wire form, the replay form, the form of extra keys and the meaning of an unset seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    minor: u16,
    patch: u16,
}

impl Version {
    /// `0.minor.patch`.
    pub const fn new(minor: u16, patch: u16) -> Self {
        Self { minor, patch }
    }

    /// Whether this release is `0.minor.patch` or later.
    pub fn at_least(self, minor: u16, patch: u16) -> bool {
        self >= Self { minor, patch }
    }

    /// Events are maps with a `type` key (0.24), not arrays with the tag first.
    pub fn sends_maps(self) -> bool {
        self.at_least(24, 0)
    }

    /// Replay answers carry a topic frame (0.26).
    pub fn replays_topic(self) -> bool {
        self.at_least(26, 0)
    }

    /// How extra keys are hashed: an adapter by its number, by its name (0.11.1), or everything with its tag (0.31).
    pub fn key_form(self) -> KeyForm {
        match self {
            _ if self.at_least(31, 0) => KeyForm::Tagged,
            _ if self.at_least(11, 1) => KeyForm::Named,
            _ => KeyForm::Numbered,
        }
    }

    /// `vllm_xargs.kv_cache_report_mode: full` announces hits again (0.26).
    pub fn reports_hits(self) -> bool {
        self.at_least(26, 0)
    }

    /// An unset seed means the text `vllm-none-hash` for the SHA-256 variants (0.29); before, random bytes.
    pub fn fixes_default_seed(self) -> bool {
        self.at_least(29, 0)
    }

    /// `GET /kv_event_sources` exists (0.31).
    pub fn lists_event_sources(self) -> bool {
        self.at_least(31, 0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0.{}.{}", self.minor, self.patch)
    }
}

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("`{text}` is not a vLLM version like 0.32.0");
        let mut parts = text.split('.');
        let (Some("0"), Some(minor), patch, None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
            return Err(wrong());
        };
        let number = |part: &str| part.parse::<u16>().map_err(|cause| format!("{}: {cause}", wrong()));
        Ok(Self { minor: number(minor)?, patch: patch.map_or(Ok(0), number)? })
    }
}

/// A `LoRA` adapter the engine serves, `name=path` as in `--lora-modules`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// The model name clients send.
    pub name: String,
    /// Where the server has it: `root` in `/v1/models`, hashed since 0.31. An empty one is listed as null, as no vLLM does.
    pub path: String,
}

impl FromStr for Adapter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, path) = text.split_once('=').ok_or_else(|| format!("`{text}` is not name=path"))?;
        Ok(Self { name: name.to_owned(), path: path.to_owned() })
    }
}

/// Decides the tokens of a request from its prompt and its choice number; `None` leaves them to the engine.
pub type OutputHook = dyn Fn(&[u32], usize) -> Option<Vec<u32>> + Send + Sync;

/// A hook that forces outputs, so that a recorded session can be played again.
#[derive(Clone, Default)]
pub struct Outputs(Option<Arc<OutputHook>>);

impl Outputs {
    /// Outputs as `hook` says.
    pub fn forced(hook: impl Fn(&[u32], usize) -> Option<Vec<u32>> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(hook)))
    }

    /// The forced tokens of choice number `choice` of a request with this prompt.
    pub fn of(&self, prompt: &[u32], choice: usize) -> Option<Vec<u32>> {
        self.0.as_ref().and_then(|hook| hook(prompt, choice))
    }
}

impl fmt::Debug for Outputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Outputs(forced)" } else { "Outputs" })
    }
}

/// Longer than any test: a limit for options in seconds.
const LONGEST_WAIT: Duration = Duration::from_hours(24);

/// How one simulated engine is built and how fast it is. The defaults are the recorded engine's, with a faster model.
#[derive(Debug, Clone, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own on a command line")]
pub struct EngineConfig {
    /// What the engine calls itself in the header `x-sim-engine`.
    #[arg(long, default_value = "sim")]
    pub name: String,
    /// Address to listen on, for HTTP and events.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// HTTP port; 0 takes a free one (the library's default).
    #[arg(long = "port", default_value_t = 8000)]
    pub http_port: u16,
    /// Port of the event publisher; 0 takes a free one (the library's default).
    #[arg(long, default_value_t = 5557)]
    pub events_port: u16,
    /// Port of the replay socket; by default the event port + 1000.
    #[arg(long)]
    pub replay_port: Option<u16>,
    /// Publish no events at all.
    #[arg(long)]
    pub no_events: bool,
    /// Open no replay socket, as vLLM does unless told.
    #[arg(long)]
    pub no_replay: bool,
    /// The vLLM release to behave like.
    #[arg(long = "vllm-version", default_value = "0.32.0")]
    pub version: Version,
    /// Data-parallel ranks, each with a cache and an event stream of its own on the next ports (`--data-parallel-size`).
    #[arg(long, default_value_t = 1)]
    pub data_parallel_size: u16,
    /// The model name served.
    #[arg(long, default_value = "tiny")]
    pub model: String,
    /// Where the model lies; `root` in `/v1/models`.
    #[arg(long, default_value = "models/tiny")]
    pub model_root: String,
    /// Adapters, `name=path`.
    #[arg(long = "lora-module")]
    pub adapters: Vec<Adapter>,
    /// Folder with `tokenizer.json` and a chat template; without it, one token per UTF-8 byte.
    #[arg(long)]
    pub tokenizer: Option<PathBuf>,
    /// Longest prompt plus output, in tokens.
    #[arg(long, default_value_t = 32_768)]
    pub max_model_len: usize,
    /// Tokens per block.
    #[arg(long, default_value_t = 16)]
    pub block_size: usize,
    /// Blocks in the pool, one of them the null block that holds nothing.
    #[arg(long, default_value_t = 4096)]
    pub num_gpu_blocks: usize,
    /// Blocks kept in host memory when they are computed, as vLLM's offloading connector does; 0 keeps none.
    #[arg(long, default_value_t = 0)]
    pub cpu_blocks: usize,
    /// Events of host memory say tokens and parents too (`self_describing_kv_events`).
    #[arg(long)]
    pub self_describing_kv_events: bool,
    /// Window of a second group of layers, in tokens: events and blocks of two groups, as of Gemma 3.
    #[arg(long)]
    pub sliding_window: Option<usize>,
    /// How blocks are named.
    #[arg(long = "hash-algo", value_enum, default_value = "sha256_cbor")]
    pub prefix_caching_hash_algo: Algorithm,
    /// The text of `PYTHONHASHSEED`; absent is unset, which is not the same as empty.
    #[arg(long = "seed")]
    pub python_hash_seed: Option<String>,
    /// Send whole digests (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`).
    #[arg(long)]
    pub byte_hashes: bool,
    /// Overrides the version's form of extra keys in the hash.
    #[arg(long)]
    pub tag_extra_keys: Option<bool>,
    /// Cache nothing between requests.
    #[arg(long)]
    pub no_prefix_caching: bool,
    /// Time to prefill one token that was not cached, in microseconds.
    #[arg(long, default_value_t = 20.0)]
    pub prefill_us_per_token: f64,
    /// Time of one decode step, in milliseconds.
    #[arg(long, default_value_t = 2.0)]
    pub decode_ms_per_token: f64,
    /// Requests running at once; more wait (`--max-num-seqs`).
    #[arg(long, default_value_t = 256)]
    pub max_num_seqs: usize,
    /// Tokens computed in one step; a longer prompt is prefilled in chunks.
    #[arg(long, default_value_t = 2048)]
    pub max_num_batched_tokens: usize,
    /// Output length of a request that names none and would stop by itself.
    #[arg(long, default_value_t = 32)]
    pub natural_output_tokens: usize,
    /// Time `/health` takes, in milliseconds.
    #[arg(long, default_value_t = 0)]
    pub health_delay_ms: u64,
    /// Idle connections are closed after this many milliseconds (uvicorn: 5000).
    #[arg(long, default_value_t = 5000)]
    pub keep_alive_ms: u64,
    /// Batches the replay socket remembers.
    #[arg(long, default_value_t = 10_000)]
    pub buffer_steps: usize,
    /// Batches waiting for one slow subscriber before its newest are dropped.
    #[arg(long, default_value_t = 100_000)]
    pub event_hwm: usize,
    /// First frame of every event message.
    #[arg(long, default_value = "")]
    pub topic: String,
    /// Leave `usage.prompt_tokens_details` null (no `--enable-prompt-tokens-details`).
    #[arg(long)]
    pub no_prompt_tokens_details: bool,
    /// The KV connector, with which prefill and decode can be apart.
    #[arg(long, value_enum, default_value = "none")]
    pub kv_connector: KvConnector,
    /// The part in that.
    #[arg(long, value_enum, default_value = "kv_both")]
    pub kv_role: KvRole,
    /// Address of the side channel, as other engines reach it; by default that of HTTP.
    #[arg(long)]
    pub kv_side_channel_host: Option<IpAddr>,
    /// Port of the side channel, for each rank the next one; 0 takes a free one (the library's default).
    #[arg(long, default_value_t = 5600)]
    pub kv_side_channel_port: u16,
    /// Port of Mooncake's bootstrap; 0 takes a free one (the library's default).
    #[arg(long, default_value_t = 8998)]
    pub kv_bootstrap_port: u16,
    /// How long a prefill's blocks are kept for a decode that does not come, in seconds; a NIXL decode that waits for its turn renews it.
    #[arg(long, default_value_t = 30.0)]
    pub kv_lease_s: f64,
    /// How long a Mooncake decode waits for the prefill of its transfer, in seconds (`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`).
    #[arg(long, default_value_t = 480.0)]
    pub kv_transfer_wait_s: f64,
    /// A decode reports the tokens that its prefill found cached (`remote_prefill_cached_tokens`, as vLLM does from 0.31 on), not those
    /// that it took from there.
    #[arg(long)]
    pub report_remote_cached_tokens: bool,
    /// Seed of everything random: outputs, random `NONE_HASH`, faults.
    #[arg(long, default_value_t = 1)]
    pub chance_seed: u64,
    /// Forced outputs; only from the library.
    #[arg(skip)]
    pub outputs: Outputs,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            name: "sim".into(),
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            http_port: 0,
            events_port: 0,
            replay_port: None,
            no_events: false,
            no_replay: false,
            version: Version::new(32, 0),
            data_parallel_size: 1,
            model: "tiny".into(),
            model_root: "models/tiny".into(),
            adapters: Vec::new(),
            tokenizer: None,
            max_model_len: 32_768,
            block_size: 16,
            num_gpu_blocks: 4096,
            cpu_blocks: 0,
            self_describing_kv_events: false,
            sliding_window: None,
            prefix_caching_hash_algo: Algorithm::Sha256Cbor,
            python_hash_seed: None,
            byte_hashes: false,
            tag_extra_keys: None,
            no_prefix_caching: false,
            prefill_us_per_token: 20.0,
            decode_ms_per_token: 2.0,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            natural_output_tokens: 32,
            health_delay_ms: 0,
            keep_alive_ms: 5000,
            buffer_steps: 10_000,
            event_hwm: 100_000,
            topic: String::new(),
            no_prompt_tokens_details: false,
            kv_connector: KvConnector::None,
            kv_role: KvRole::Both,
            kv_side_channel_host: None,
            kv_side_channel_port: 0,
            kv_bootstrap_port: 0,
            kv_lease_s: 30.0,
            kv_transfer_wait_s: 480.0,
            report_remote_cached_tokens: false,
            chance_seed: 1,
            outputs: Outputs::default(),
        }
    }
}

impl EngineConfig {
    /// The defaults, under a name.
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// What cannot be served, said before anything starts.
    ///
    /// # Errors
    /// A sentence naming the option.
    pub fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.block_size > 0, "block_size must be at least 1");
        anyhow::ensure!(self.num_gpu_blocks > 1, "num_gpu_blocks must be at least 2: one is the null block");
        anyhow::ensure!(self.data_parallel_size > 0, "data_parallel_size must be at least 1");
        anyhow::ensure!(self.sliding_window != Some(0), "sliding_window must be at least 1");
        anyhow::ensure!(self.max_num_seqs > 0, "max_num_seqs must be at least 1");
        anyhow::ensure!(self.max_num_batched_tokens > 0, "max_num_batched_tokens must be at least 1");
        anyhow::ensure!(self.prefill_us_per_token >= 0.0, "prefill_us_per_token must not be negative");
        anyhow::ensure!(self.decode_ms_per_token >= 0.0, "decode_ms_per_token must not be negative");
        let duration = |seconds| Duration::try_from_secs_f64(seconds).is_ok_and(|time| time <= LONGEST_WAIT);
        anyhow::ensure!(
            self.kv_lease_s > 0.0 && duration(self.kv_lease_s),
            "kv_lease_s must be above 0, and a day at most"
        );
        anyhow::ensure!(duration(self.kv_transfer_wait_s), "kv_transfer_wait_s must be from 0 to a day");
        Ok(())
    }

    /// How long a prefill's blocks are kept.
    pub(super) fn lease(&self) -> Duration {
        Duration::try_from_secs_f64(self.kv_lease_s).unwrap_or(LONGEST_WAIT)
    }

    /// How long a decode waits for a transfer's prefill.
    pub(super) fn transfer_wait(&self) -> Duration {
        Duration::try_from_secs_f64(self.kv_transfer_wait_s).unwrap_or(LONGEST_WAIT)
    }

    /// Where the side channel listens.
    pub(super) fn side_channel_host(&self) -> IpAddr {
        self.kv_side_channel_host.unwrap_or(self.host)
    }

    /// Whether decodes elsewhere find this engine through a bootstrap.
    pub(super) fn has_bootstrap(&self) -> bool {
        self.kv_connector == KvConnector::Mooncake && self.kv_role != KvRole::Consumer
    }

    /// The longest prompt plus output that both the model and the pool can hold, in tokens. Two groups need two blocks for a block.
    ///
    /// The recorded engine accepts longer requests than its pool and then waits for ever; refusing them keeps tests honest.
    pub(super) fn token_limit(&self) -> usize {
        let groups = if self.sliding_window.is_some() { 2 } else { 1 };
        self.max_model_len.min((self.num_gpu_blocks - 1) / groups * self.block_size)
    }

    /// How blocks are named in the `life`-th life of this engine; a random `NONE_HASH` differs between lives.
    pub(super) fn naming(&self, chance_seed: u64) -> Naming {
        Naming::new(
            self.prefix_caching_hash_algo,
            self.block_size,
            self.python_hash_seed.as_deref(),
            self.tag_extra_keys.map_or_else(|| self.version.key_form(), KeyForm::from),
            self.version.fixes_default_seed(),
            chance_seed,
        )
    }

    /// How long a step takes that computes `prefill` prompt tokens and decodes when `decodes`.
    pub(super) fn step_time(&self, prefill: usize, decodes: bool) -> Duration {
        let prefill = f64::from(u32::try_from(prefill).unwrap_or(u32::MAX)) * self.prefill_us_per_token / 1e6;
        let decode = if decodes { self.decode_ms_per_token / 1e3 } else { 0.0 };
        Duration::from_secs_f64(prefill + decode)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{Adapter, EngineConfig, KeyForm, Version};

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        engine: EngineConfig,
    }

    #[test]
    fn the_flags_defaults_are_the_library_s_defaults_with_vllm_s_ports() {
        let flags = Flags::parse_from(["sim-engine"]).engine;
        let library = EngineConfig {
            http_port: 8000,
            events_port: 5557,
            kv_side_channel_port: 5600,
            kv_bootstrap_port: 8998,
            ..EngineConfig::default()
        };
        assert_eq!(format!("{flags:?}"), format!("{library:?}"));
    }

    #[test]
    fn a_version_says_what_it_speaks() {
        let of = |text: &str| text.parse::<Version>().unwrap();
        assert!(!of("0.23.0").sends_maps() && of("0.24.0").sends_maps());
        assert!(!of("0.25.9").replays_topic() && of("0.26").replays_topic());
        assert!(!of("0.28.0").fixes_default_seed() && of("0.29.0").fixes_default_seed());
        assert_eq!(
            ["0.10.2", "0.11.1", "0.30.1", "0.31.0"].map(|version| of(version).key_form()),
            [KeyForm::Numbered, KeyForm::Named, KeyForm::Named, KeyForm::Tagged]
        );
        assert!(!of("0.25.0").reports_hits() && of("0.26.0").reports_hits());
        assert_eq!(of("0.10.2").to_string(), "0.10.2");
        for wrong in ["", "1.0.0", "0.x.1", "0.1.2.3", "0.70000.0"] {
            assert!(wrong.parse::<Version>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_adapter_is_name_and_path() {
        let adapter = "a=/srv/a=1".parse::<Adapter>().unwrap();
        assert_eq!((adapter.name.as_str(), adapter.path.as_str()), ("a", "/srv/a=1"));
        assert!("a".parse::<Adapter>().is_err());
    }
}

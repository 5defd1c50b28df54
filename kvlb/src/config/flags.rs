//! The flags of `kvlb up` and of the client commands.

#![expect(clippy::doc_markdown, reason = "these comments are help texts")]

use std::path::PathBuf;

use clap::Args;

/// The flags of `kvlb up`. Each has a `KVLB_*` twin in the environment; the flag wins.
#[derive(Args, Clone, Debug, Default)]
pub struct UpFlags {
    /// Serve the engines of --endpoint here, by a rule made of what they say of themselves [env: KVLB_LISTEN]
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<String>,

    /// An engine, as http://HOST:PORT; may be repeated [env: KVLB_ENDPOINT, separated by commas]
    #[arg(long, value_name = "URL")]
    pub endpoint: Vec<String>,

    /// Where the REST API listens; it has no authentication [env: KVLB_API] [default: 127.0.0.1:11111]
    #[arg(long, value_name = "ADDR:PORT")]
    pub api: Option<String>,

    /// Staged tokenizers, one folder per model slug [env: KVLB_TOKENIZER_DIR] [default: /etc/loxilb/tokenizers]
    #[arg(long, value_name = "DIR")]
    pub tokenizer_dir: Option<PathBuf>,

    /// Where rules are kept over restarts [env: KVLB_STATE_DIR] [default: /var/lib/kvlb]
    #[arg(long, value_name = "DIR", conflicts_with = "no_state")]
    pub state_dir: Option<PathBuf>,

    /// Keep rules in memory only [env: KVLB_NO_STATE]
    #[arg(long)]
    pub no_state: bool,

    /// How VIP traffic arrives: through the kernel (SK_LOOKUP) where allowed, or by binding VIPs
    /// [env: KVLB_DATAPATH] [default: auto]
    #[arg(long, value_name = "MODE", value_parser = ["auto", "none"])]
    pub datapath: Option<String>,

    /// Where the kernel maps are pinned, below a BPF file system [env: KVLB_PIN_DIR] [default: /sys/fs/bpf/kvlb]
    #[arg(long, value_name = "DIR")]
    pub pin_dir: Option<PathBuf>,

    /// The I/O back end of data threads: io_uring where allowed, else epoll [env: KVLB_IO] [default: auto]
    #[arg(long, value_name = "BACKEND", value_parser = ["auto", "uring", "epoll"])]
    pub io: Option<String>,

    /// Data threads [env: KVLB_THREADS] [default: all cores, less one from four cores up]
    #[arg(long, value_name = "N")]
    pub threads: Option<String>,

    /// How long streams may go on after SIGTERM, in seconds, or as 500ms, 30s, 2m
    /// [env: KVLB_DRAIN_TIMEOUT] [default: 30s]
    #[arg(long, value_name = "TIME")]
    pub drain_timeout: Option<String>,

    /// Take over from the running kvlb without an interruption, with the same state directory (and pin directory);
    /// `if-running`: start alone where none runs [env: KVLB_TAKEOVER]
    #[arg(long, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "required",
          value_parser = ["required", "if-running", "no"])]
    pub takeover: Option<String>,

    /// Where takeovers are offered and asked for, a Unix socket [env: KVLB_TAKEOVER_SOCKET]
    /// [default: takeover.sock in the state directory; none without one]
    #[arg(long, value_name = "PATH")]
    pub takeover_socket: Option<PathBuf>,

    /// How long a takeover waits for inventories, tokenizers and probes to be as the running kvlb has them
    /// [env: KVLB_TAKEOVER_WAIT] [default: 60s]
    #[arg(long, value_name = "TIME")]
    pub takeover_wait: Option<String>,

    /// How long one choice may take before the rule's selector answers, in milliseconds
    /// [env: KVLB_DECISION_BUDGET_MS] [default: 20]
    #[arg(long, value_name = "MS")]
    pub decision_budget_ms: Option<String>,

    /// Memory for what prompts of late began with, in MiB; a conversation's next turn costs its new text only
    /// [env: KVLB_TEXT_CACHE_MIB] [default: 256]
    #[arg(long, value_name = "MIB")]
    pub text_cache_mib: Option<String>,

    /// The engines' --api-key, where they have one; sent to their /v1 paths alone [env: KVLB_ENGINE_KEY]
    #[arg(long, value_name = "KEY")]
    pub engine_key: Option<String>,

    /// How log lines look [env: KVLB_LOG_FORMAT] [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    pub log_format: Option<String>,

    /// error, warn, info, debug, trace, or a list as info,kvlb::ingest=debug [env: KVLB_LOG_LEVEL] [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
}

/// How a client command reaches the API. Loxicmd's flags.
#[derive(Args, Clone, Debug, Default)]
pub struct ClientFlags {
    /// Host of the API [env: KVLB_APISERVER] [default: 127.0.0.1]
    #[arg(short = 's', long, global = true, value_name = "HOST", help_heading = "API")]
    pub apiserver: Option<String>,

    /// Port of the API [env: KVLB_APIPORT] [default: 11111]
    #[arg(short = 'p', long, global = true, value_name = "PORT", help_heading = "API")]
    pub port: Option<String>,

    /// Protocol of the API [default: http]
    #[arg(long, global = true, value_name = "PROTOCOL", value_parser = ["http", "https"], help_heading = "API")]
    pub protocol: Option<String>,

    /// Seconds to wait for an answer [default: 10]
    #[arg(short = 't', long, global = true, value_name = "SECONDS", help_heading = "API")]
    pub timeout: Option<String>,

    /// Sent as a bearer token, for a gateway in front of the API
    #[arg(long, global = true, value_name = "TOKEN", help_heading = "API")]
    pub token: Option<String>,
}

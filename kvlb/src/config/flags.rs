//! The flags of `kvlb up` and of the client commands.

#![expect(clippy::doc_markdown, reason = "these comments are help texts")]

use std::path::PathBuf;

use clap::Args;

use crate::secret::Hidden;

/// The flags of `kvlb up`. Each has a `KVLB_*` twin in the environment; the flag wins.
#[derive(Args, Clone, Debug, Default)]
pub struct UpFlags {
    /// Serve the engines of --endpoint here, by a rule made of what they say of themselves [env: KVLB_LISTEN]
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<String>,

    /// An engine, as http://HOST:PORT; may be repeated [env: KVLB_ENDPOINT, separated by commas]
    #[arg(long, value_name = "URL")]
    pub endpoint: Vec<String>,

    /// Where the REST API listens; where other hosts reach it, --api-token-file is needed too
    /// [env: KVLB_API] [default: 127.0.0.1:11111]
    #[arg(long, value_name = "ADDR:PORT")]
    pub api: Option<String>,

    /// A file of mode 600 with the token that opens the whole API; read again when it changes
    /// [env: KVLB_API_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    pub api_token_file: Option<PathBuf>,

    /// The same for a token that may only read [env: KVLB_API_READ_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    pub api_read_token_file: Option<PathBuf>,

    /// Serve the API without a token although other hosts reach it: whoever does may change rules
    /// [env: KVLB_API_WITHOUT_TOKEN]
    #[arg(long)]
    pub api_without_token: bool,

    /// Let everybody read the metrics, whom the API's tokens otherwise keep out [env: KVLB_API_OPEN_METRICS]
    #[arg(long)]
    pub api_open_metrics: bool,

    /// The API's certificate and those up to the root (PEM); it speaks HTTPS then, and nothing else
    /// [env: KVLB_API_TLS_CERT]
    #[arg(long, value_name = "FILE")]
    pub api_tls_cert: Option<PathBuf>,

    /// The key of that certificate (PEM), a file of mode 600 [env: KVLB_API_TLS_KEY]
    #[arg(long, value_name = "FILE")]
    pub api_tls_key: Option<PathBuf>,

    /// Who signs the certificates that the API's clients must show (PEM), besides their token
    /// [env: KVLB_API_CLIENT_CA]
    #[arg(long, value_name = "FILE")]
    pub api_client_ca: Option<PathBuf>,

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

    /// A device through which clients come, where SYNs that no rule wants are dropped as they arrive (XDP); may be repeated
    /// [env: KVLB_XDP_DEV, separated by commas]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub xdp_dev: Vec<String>,

    /// The I/O back end of data threads: io_uring where allowed, else epoll [env: KVLB_IO] [default: auto]
    #[arg(long, value_name = "BACKEND", value_parser = ["auto", "uring", "epoll"])]
    pub io: Option<String>,

    /// Data threads [env: KVLB_THREADS] [default: all cores, less one from four cores up]
    #[arg(long, value_name = "N")]
    pub threads: Option<String>,

    /// Client connections at a time; more are reset [env: KVLB_CONNECTIONS_MAX]
    /// [default: as many as there are file descriptors for, two each]
    #[arg(long, value_name = "N")]
    pub connections_max: Option<String>,

    /// Largest header section of a request, in KiB; a larger one is answered with 431 [env: KVLB_HEAD_MAX_KIB]
    /// [default: 64]
    #[arg(long, value_name = "KIB")]
    pub head_max_kib: Option<String>,

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

    /// How often an engine is asked for its metrics: its queue, its cache's usage; 1s to 12s, 0: never
    /// [env: KVLB_SCRAPE_INTERVAL] [default: 5s]
    #[arg(long, value_name = "TIME")]
    pub scrape_interval: Option<String>,

    /// The engines' --api-key, where they have one; sent to their /v1 paths alone [env: KVLB_ENGINE_KEY]
    #[arg(long, value_name = "KEY")]
    pub engine_key: Option<String>,

    /// A line of JSON for each request: for none, for one in N and all that failed or were sent twice, or for all
    /// [env: KVLB_ACCESS_LOG] [default: off]
    #[arg(long, value_name = "WHICH", value_parser = ["off", "sampled", "full"])]
    pub access_log: Option<String>,

    /// Where these lines go: a file, which is opened anew on SIGHUP and when it was renamed, or - for standard output
    /// [env: KVLB_ACCESS_LOG_FILE] [default: -]
    #[arg(long, value_name = "FILE")]
    pub access_log_file: Option<PathBuf>,

    /// A file for the decision log: when each request came, how long it was, the names of its blocks and what was chosen, for
    /// `cargo xtask sim --trace` [env: KVLB_DECISION_LOG] [default: none]
    #[arg(long, value_name = "FILE")]
    pub decision_log: Option<PathBuf>,

    /// The N of --access-log sampled; instances with the same N choose the same traces
    /// [env: KVLB_ACCESS_LOG_SAMPLE] [default: 100]
    #[arg(long, value_name = "N")]
    pub access_log_sample: Option<String>,

    /// Pass W3C trace context on to engines, and begin a trace where a client has none; off: leave clients' fields alone
    /// [env: KVLB_TRACE_CONTEXT] [default: on]
    #[arg(long, value_name = "WHETHER", value_parser = ["on", "off"])]
    pub trace_context: Option<String>,

    /// How log lines look [env: KVLB_LOG_FORMAT] [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    pub log_format: Option<String>,

    /// off, error, warn, info, debug, trace, or a list as info,kvlb::ingest=debug [env: KVLB_LOG_LEVEL] [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
}

/// The flags of `kvlb down`.
#[derive(Args, Clone, Debug, Default)]
pub struct DownFlags {
    /// Where the kernel maps are pinned [env: KVLB_PIN_DIR] [default: /sys/fs/bpf/kvlb]
    #[arg(long, value_name = "DIR")]
    pub pin_dir: Option<PathBuf>,

    /// Also routes that are marked as kvlb's and of which no pin tells: another kvlb's in this network namespace, too
    #[arg(long)]
    pub all_routes: bool,

    /// How long a running kvlb may take to end its streams, in seconds, or as 500ms, 30s, 2m [default: 40s]
    #[arg(long, value_name = "TIME")]
    pub wait: Option<String>,
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

    /// Protocol of the API [env: KVLB_PROTOCOL] [default: http]
    #[arg(long, global = true, value_name = "PROTOCOL", value_parser = ["http", "https"], help_heading = "API")]
    pub protocol: Option<String>,

    /// Seconds to wait for an answer [env: KVLB_TIMEOUT] [default: 10]
    #[arg(short = 't', long, global = true, value_name = "SECONDS", help_heading = "API")]
    pub timeout: Option<String>,

    /// A file with the API's token, of mode 600, or a pipe [env: KVLB_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE", help_heading = "API")]
    pub token_file: Option<PathBuf>,

    /// The token itself; every user of this machine sees it in ps, so --token-file is better [env: KVLB_TOKEN]
    #[arg(long, global = true, value_name = "TOKEN", help_heading = "API")]
    pub token: Option<Hidden>,

    /// Who signs the API's certificate (PEM), instead of those whom this machine trusts [env: KVLB_CACERT]
    #[arg(long, global = true, value_name = "FILE", help_heading = "API")]
    pub cacert: Option<PathBuf>,

    /// Take any certificate for the API's: whoever is on the way can read the token [env: KVLB_INSECURE]
    #[arg(short = 'k', long, global = true, help_heading = "API")]
    pub insecure: bool,

    /// A certificate to show, where the API asks for one (PEM) [env: KVLB_CERT]
    #[arg(long, global = true, value_name = "FILE", help_heading = "API")]
    pub cert: Option<PathBuf>,

    /// The key of that certificate (PEM), a file of mode 600 [env: KVLB_KEY]
    #[arg(long, global = true, value_name = "FILE", help_heading = "API")]
    pub key: Option<PathBuf>,

    /// Tokens are bearer tokens in any case
    #[arg(long, global = true, hide = true)]
    pub bearer: bool,
}

impl ClientFlags {
    /// Whether any of them was given.
    pub fn any(&self) -> bool {
        let Self { apiserver, port, protocol, timeout, token_file, token, cacert, insecure, cert, key, bearer } = self;
        let texts = [apiserver, port, protocol, timeout].into_iter().any(Option::is_some);
        let files = [token_file, cacert, cert, key].into_iter().any(Option::is_some);
        texts || files || token.is_some() || *insecure || *bearer
    }
}

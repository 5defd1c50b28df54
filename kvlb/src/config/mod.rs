//! Flags and environment become settings.
//!
//! Owns the flags of `kvlb up` ([`UpFlags`]) and of the client commands ([`ClientFlags`]), and what they mean together
//! with the environment ([`Config`], [`Client`]). The only reader of either. Invariant: a [`Config`] that exists is
//! valid; a value that is not is refused by the name of its flag or variable, with what is allowed.

mod access;
mod access_log;
mod engines;
mod env;
mod flags;
mod kv;
mod xdp;

#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use access::{Access, Credential, TokenFiles, is_local};
pub use access_log::AccessLog;
pub use engines::{Engines, ZeroTouch};
pub use env::{ConfigError, Env};
pub use flags::{ClientFlags, DownFlags, UpFlags};
pub use kv::Kv;

use env::Setting;

use crate::proxy::Io;
use crate::telemetry::LogFormat;
use crate::tls::Trust;

/// LoxiLB's API port.
const API_PORT: u16 = 11_111;
/// LoxiLB's place for tokenizers.
const TOKENIZER_DIR: &str = "/etc/loxilb/tokenizers";
/// More data threads than this are a slip of the finger: kvlb runs one per core.
const THREADS_MAX: u64 = 1_024;
/// Kubernetes kills a pod after 30 s unless told otherwise.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// A stream may take as long as LoxiLB's longest idle time.
const DRAIN_TIMEOUT_MAX: Duration = Duration::from_hours(24);
/// A takeover takes a second or two; an engine that is slow to tell its blocks may hold it up for so long.
const TAKEOVER_WAIT: Duration = Duration::from_mins(1);
/// The takeover's socket in the state directory.
const TAKEOVER_SOCKET: &str = "takeover.sock";
/// The BPF file system's usual place.
const PIN_DIR: &str = "/sys/fs/bpf/kvlb";
/// What streams have by default, and some more.
const DOWN_WAIT: Duration = Duration::from_secs(40);
/// A client command gives up after this, as loxicmd.
const CLIENT_TIMEOUT_SECONDS: u64 = 10;

/// The settings of the daemon, room by room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where the REST API listens.
    pub api: SocketAddr,
    /// Who may use it.
    pub access: Access,
    /// Where rules are kept; `None`: in memory only.
    pub state_dir: Option<PathBuf>,
    /// Where tokenizers are staged.
    pub tokenizer_dir: PathBuf,
    /// How VIP traffic arrives.
    pub datapath: Datapath,
    /// Where the kernel maps are pinned.
    pub pin_dir: PathBuf,
    /// The devices at which SYNs are judged, in their order.
    pub xdp_devices: Vec<String>,
    /// The I/O back end of data threads.
    pub io: Io,
    /// Data threads, at least one.
    pub threads: usize,
    /// Client connections at a time; `None`: as many as there are descriptors for.
    pub connections_max: Option<usize>,
    /// Bytes of a request's largest header section.
    pub head_max: usize,
    /// How long streams may go on after SIGTERM.
    pub drain_timeout: Duration,
    /// Whether it takes over from a running one.
    pub takeover: Takeover,
    /// Where takeovers come through; `None`: nowhere.
    pub takeover_socket: Option<PathBuf>,
    /// How long a takeover waits to know what the running one knows.
    pub takeover_wait: Duration,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Which log lines are written: a level, or a list of `target=level`.
    pub log_level: String,
    /// The access log.
    pub access_log: AccessLog,
    /// Where the decision log goes; `None`: there is none.
    pub decision_log: Option<PathBuf>,
    /// Engines are told of each request's W3C trace context.
    pub trace_context: bool,
    /// Bytes that remember what prompts of late began with (`--text-cache-mib`).
    pub text_cache: usize,
    /// How often an engine's metrics are looked at (`--scrape-interval`); `None`: never.
    pub scrape_interval: Option<Duration>,
    /// The engines' `--api-key`.
    pub engine_key: Option<String>,
    /// A rule that is made of what the engines say.
    pub zero_touch: Option<ZeroTouch>,
    /// The KV tier.
    pub kv: Kv,
    /// `LLB_PD_PREFILL_TIMEOUT_SEC`, 30 s unless set.
    pub prefill_timeout: Duration,
    /// What an operator should know, for the log.
    pub warnings: Vec<String>,
}

/// What `kvlb down` is to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Down {
    /// Where the maps are pinned.
    pub pin_dir: PathBuf,
    /// Also routes of which no pin tells.
    pub all_routes: bool,
    /// How long a running kvlb may take to end.
    pub wait: Duration,
}

impl Down {
    /// The settings of `kvlb down`.
    ///
    /// # Errors
    /// [`ConfigError`] for the first value that is not allowed.
    pub fn new(flags: &DownFlags, env: &Env) -> Result<Self, ConfigError> {
        let wait = flags.wait.as_ref().map(|value| duration(&Setting { name: "--wait", value }));
        Ok(Self {
            pin_dir: Both { env }.path(flags.pin_dir.as_deref(), "KVLB_PIN_DIR", PIN_DIR)?,
            all_routes: flags.all_routes,
            wait: wait.transpose()?.unwrap_or(DOWN_WAIT),
        })
    }
}

/// `--datapath`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Datapath {
    /// Through the kernel where allowed, else as `None`.
    #[default]
    Auto,
    /// kvlb binds the VIPs itself.
    None,
}

/// `--takeover`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Takeover {
    /// kvlb starts alone.
    #[default]
    No,
    /// It takes over, or does not start.
    Required,
    /// It takes over where there is one to take over from.
    IfRunning,
}

impl Config {
    /// The settings of the daemon. `cores` are those that it may run on.
    ///
    /// # Errors
    /// [`ConfigError`] for the first value that is not allowed.
    pub fn new(flags: &UpFlags, env: &Env, cores: usize) -> Result<Self, ConfigError> {
        let both = Both { env };
        let path = |flag: Option<&Path>, variable, default: &str| both.path(flag, variable, default);
        let (access_log, of_access_log) = AccessLog::read(flags, &both)?;
        let listen = both.text("--api", flags.api.as_ref(), "KVLB_API")?;
        let (name, api) = match &listen {
            Some(setting) => (setting.name, api(setting)?),
            None => ("--api", api_default()),
        };
        let state_dir = state_dir(flags, &both)?;
        let takeover = both.word("--takeover", flags.takeover.as_ref(), "KVLB_TAKEOVER", &TAKEOVERS)?;
        let takeover_socket = takeover_socket(flags, &both, state_dir.as_deref())?;
        if takeover != Takeover::No && takeover_socket.is_none() {
            return Err(ConfigError::Needs("--takeover without a state directory", "--takeover-socket"));
        }
        let datapath = both.word("--datapath", flags.datapath.as_ref(), "KVLB_DATAPATH", &DATAPATHS)?;
        Ok(Self {
            api,
            access: Access::read(flags, &both, (name, api))?,
            state_dir,
            tokenizer_dir: path(flags.tokenizer_dir.as_deref(), "KVLB_TOKENIZER_DIR", TOKENIZER_DIR)?,
            datapath,
            pin_dir: path(flags.pin_dir.as_deref(), "KVLB_PIN_DIR", PIN_DIR)?,
            xdp_devices: xdp::devices(flags, &both, datapath)?,
            io: both.word("--io", flags.io.as_ref(), "KVLB_IO", &IOS)?,
            threads: threads(both.text("--threads", flags.threads.as_ref(), "KVLB_THREADS")?, cores)?,
            connections_max: both
                .text("--connections-max", flags.connections_max.as_ref(), "KVLB_CONNECTIONS_MAX")?
                .map(|setting| setting.number(1, u64::from(u32::MAX)).map(to_usize))
                .transpose()?,
            head_max: both
                .text("--head-max-kib", flags.head_max_kib.as_ref(), "KVLB_HEAD_MAX_KIB")?
                .map_or(Ok(HEAD_MAX_KIB), |setting| setting.number(4, 1024))
                .map(|kib| to_usize(kib) << 10)?,
            drain_timeout: both
                .text("--drain-timeout", flags.drain_timeout.as_ref(), "KVLB_DRAIN_TIMEOUT")?
                .map_or(Ok(DRAIN_TIMEOUT), |setting| duration(&setting))?,
            takeover,
            takeover_socket,
            takeover_wait: both
                .text("--takeover-wait", flags.takeover_wait.as_ref(), "KVLB_TAKEOVER_WAIT")?
                .map_or(Ok(TAKEOVER_WAIT), |setting| duration(&setting))?,
            log_format: both.word("--log-format", flags.log_format.as_ref(), "KVLB_LOG_FORMAT", &LOG_FORMATS)?,
            log_level: both
                .text("--log-level", flags.log_level.as_ref(), "KVLB_LOG_LEVEL")?
                .map_or_else(|| Ok("info".to_owned()), |setting| log_level(&setting))?,
            access_log,
            decision_log: Some(path(flags.decision_log.as_deref(), "KVLB_DECISION_LOG", "")?)
                .filter(|path| !path.as_os_str().is_empty()),
            trace_context: both
                .text("--trace-context", flags.trace_context.as_ref(), "KVLB_TRACE_CONTEXT")?
                .map_or(Ok(true), |setting| setting.switch())?,
            text_cache: both
                .text("--text-cache-mib", flags.text_cache_mib.as_ref(), "KVLB_TEXT_CACHE_MIB")?
                .map_or(Ok(TEXT_CACHE_MIB), |setting| setting.number(1, 1 << 20))
                .map(|mib| usize::try_from(mib << 20).unwrap_or(usize::MAX))?,
            scrape_interval: scrape_interval(both.text(
                "--scrape-interval",
                flags.scrape_interval.as_ref(),
                "KVLB_SCRAPE_INTERVAL",
            )?)?,
            engine_key: engines::engine_key(flags.engine_key.as_ref(), &both)?,
            zero_touch: ZeroTouch::read(flags, &both)?,
            kv: Kv::read(
                env,
                both.text("--decision-budget-ms", flags.decision_budget_ms.as_ref(), "KVLB_DECISION_BUDGET_MS")?,
            )?,
            prefill_timeout: Duration::from_secs(
                env.setting("LLB_PD_PREFILL_TIMEOUT_SEC")?.map_or(Ok(30), |setting| setting.number(1, 86_400))?,
            ),
            warnings: warnings(env).into_iter().chain(of_access_log).collect(),
        })
    }
}

/// Some 60,000 turns of 4 KB.
const TEXT_CACHE_MIB: u64 = 256;
const HEAD_MAX_KIB: u64 = 64;
/// A queue of seconds shows in time, six looks may fail before what was seen is too old, and an engine spends a thousandth of
/// its server's time on a page of 100 KB.
const SCRAPE_INTERVAL: Duration = Duration::from_secs(5);
/// One look may fail before what was seen is too old.
const SCRAPE_INTERVAL_MAX: Duration = Duration::from_secs(12);
const DATAPATHS: [(&str, Datapath); 2] = [("auto", Datapath::Auto), ("none", Datapath::None)];
const TAKEOVERS: [(&str, Takeover); 3] =
    [("no", Takeover::No), ("required", Takeover::Required), ("if-running", Takeover::IfRunning)];
const IOS: [(&str, Io); 3] = [("auto", Io::Auto), ("uring", Io::Uring), ("epoll", Io::Epoll)];
const LOG_FORMATS: [(&str, LogFormat); 2] = [("text", LogFormat::Text), ("json", LogFormat::Json)];

/// The twins of the flags.
const TWINS: [&str; 45] = [
    "KVLB_API",
    "KVLB_API_TOKEN_FILE",
    "KVLB_API_READ_TOKEN_FILE",
    "KVLB_API_WITHOUT_TOKEN",
    "KVLB_API_OPEN_METRICS",
    "KVLB_API_TLS_CERT",
    "KVLB_API_TLS_KEY",
    "KVLB_API_CLIENT_CA",
    "KVLB_TOKENIZER_DIR",
    "KVLB_STATE_DIR",
    "KVLB_NO_STATE",
    "KVLB_DATAPATH",
    "KVLB_PIN_DIR",
    "KVLB_XDP_DEV",
    "KVLB_IO",
    "KVLB_THREADS",
    "KVLB_CONNECTIONS_MAX",
    "KVLB_HEAD_MAX_KIB",
    "KVLB_DRAIN_TIMEOUT",
    "KVLB_TAKEOVER",
    "KVLB_TAKEOVER_SOCKET",
    "KVLB_TAKEOVER_WAIT",
    "KVLB_DECISION_BUDGET_MS",
    "KVLB_TEXT_CACHE_MIB",
    "KVLB_SCRAPE_INTERVAL",
    "KVLB_ACCESS_LOG",
    "KVLB_ACCESS_LOG_FILE",
    "KVLB_ACCESS_LOG_SAMPLE",
    "KVLB_DECISION_LOG",
    "KVLB_TRACE_CONTEXT",
    "KVLB_LOG_FORMAT",
    "KVLB_LOG_LEVEL",
    "KVLB_ENGINE_KEY",
    "KVLB_LISTEN",
    "KVLB_ENDPOINT",
    "KVLB_APISERVER",
    "KVLB_APIPORT",
    "KVLB_PROTOCOL",
    "KVLB_TIMEOUT",
    "KVLB_TOKEN",
    "KVLB_TOKEN_FILE",
    "KVLB_CACERT",
    "KVLB_INSECURE",
    "KVLB_CERT",
    "KVLB_KEY",
];

/// A flag, else its twin.
struct Both<'e> {
    env: &'e Env,
}

impl<'e> Both<'e> {
    fn text<'a>(
        &self,
        flag: &'static str,
        given: Option<&'a String>,
        variable: &'static str,
    ) -> Result<Option<Setting<'a>>, ConfigError>
    where
        'e: 'a,
    {
        match given {
            Some(value) => Ok(Some(Setting { name: flag, value })),
            None => self.env.setting(variable),
        }
    }

    fn word<T: Copy + Default>(
        &self,
        flag: &'static str,
        given: Option<&String>,
        variable: &'static str,
        words: &[(&str, T)],
    ) -> Result<T, ConfigError> {
        self.text(flag, given, variable)?.map_or_else(|| Ok(T::default()), |setting| setting.word(words))
    }

    fn path(&self, given: Option<&Path>, variable: &'static str, default: &str) -> Result<PathBuf, ConfigError> {
        if let Some(path) = given {
            return Ok(path.to_owned());
        }
        Ok(PathBuf::from(self.env.setting(variable)?.map_or(default, |setting| setting.value)))
    }
}

fn api_default() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), API_PORT)
}

fn api(setting: &Setting<'_>) -> Result<SocketAddr, ConfigError> {
    setting
        .value
        .trim()
        .parse()
        .map_err(|_error| setting.bad("an address and a port, as 127.0.0.1:11111 or [::1]:11111"))
}

fn state_dir(flags: &UpFlags, both: &Both<'_>) -> Result<Option<PathBuf>, ConfigError> {
    if flags.no_state && flags.state_dir.is_some() {
        return Err(ConfigError::Both("--no-state", "--state-dir"));
    }
    let none = || both.env.setting("KVLB_NO_STATE")?.map_or(Ok(false), |setting| setting.switch());
    if flags.no_state || (flags.state_dir.is_none() && none()?) {
        return Ok(None);
    }
    both.path(flags.state_dir.as_deref(), "KVLB_STATE_DIR", "/var/lib/kvlb").map(Some)
}

fn takeover_socket(flags: &UpFlags, both: &Both<'_>, state_dir: Option<&Path>) -> Result<Option<PathBuf>, ConfigError> {
    if let Some(path) = &flags.takeover_socket {
        return Ok(Some(path.clone()));
    }
    let named = both.env.setting("KVLB_TAKEOVER_SOCKET")?;
    Ok(named.map(|setting| PathBuf::from(setting.value)).or_else(|| Some(state_dir?.join(TAKEOVER_SOCKET))))
}

/// One data thread per core, with one core left to events and control where there are enough.
fn threads(setting: Option<Setting<'_>>, cores: usize) -> Result<usize, ConfigError> {
    let default = if cores >= 4 { cores - 1 } else { cores.max(1) };
    let Some(setting) = setting else { return Ok(default) };
    Ok(usize::try_from(setting.number(1, THREADS_MAX)?).unwrap_or(default))
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn scrape_interval(setting: Option<Setting<'_>>) -> Result<Option<Duration>, ConfigError> {
    let Some(setting) = setting else { return Ok(Some(SCRAPE_INTERVAL)) };
    match duration(&setting)? {
        Duration::ZERO => Ok(None),
        every if (Duration::from_secs(1)..=SCRAPE_INTERVAL_MAX).contains(&every) => Ok(Some(every)),
        _ => Err(setting.bad("0 for never, or 1s to 12s")),
    }
}

fn duration(setting: &Setting<'_>) -> Result<Duration, ConfigError> {
    let text = setting.value.trim();
    let (digits, unit_ms) = match text.find(|c: char| !c.is_ascii_digit()).map(|at| text.split_at(at)) {
        None => (text, Some(1_000)),
        Some((digits, "ms")) => (digits, Some(1)),
        Some((digits, "s")) => (digits, Some(1_000)),
        Some((digits, "m")) => (digits, Some(60_000)),
        Some((digits, "h")) => (digits, Some(3_600_000)),
        Some((digits, _)) => (digits, None),
    };
    let millis = digits.parse().ok().zip(unit_ms).and_then(|(n, unit): (u64, u64)| n.checked_mul(unit));
    millis
        .map(Duration::from_millis)
        .filter(|time| *time <= DRAIN_TIMEOUT_MAX)
        .ok_or_else(|| setting.bad("0 to 24h, in seconds or as 500ms, 30s, 2m, 1h"))
}

fn log_level(setting: &Setting<'_>) -> Result<String, ConfigError> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let text = setting.value.trim();
    let level = |text: &str| LEVELS.contains(&text.to_ascii_lowercase().as_str());
    let directive = |part: &str| match part.split_once('=') {
        Some((target, part)) => !target.is_empty() && level(part),
        None => level(part),
    };
    let readable = text.split(',').all(|part| directive(part.trim()));
    if readable && tracing_subscriber::EnvFilter::try_new(text).is_ok() {
        return Ok(text.to_owned());
    }
    Err(setting.bad(format!("{}, or a list as info,kvlb::ingest=debug", LEVELS.join(", "))))
}

fn warnings(env: &Env) -> Vec<String> {
    let mut warnings = Kv::warnings(env);
    let known: Vec<&str> = TWINS.into_iter().chain(kv::SERVED).chain(kv::NOT_SERVED.map(|(name, _)| name)).collect();
    for name in env.names().filter(|name| is_ours(name) && !known.contains(name)) {
        let hint = nearest(name, &known).map_or_else(String::new, |near| format!("; did you mean {near}?"));
        warnings.push(format!("{name} is no variable of kvlb{hint}"));
    }
    warnings
}

/// Kubernetes puts `KVLB_SERVICE_HOST`, `KVLB_PORT` and their like into every pod beside a service named `kvlb`.
fn is_ours(name: &str) -> bool {
    let ours = ["KVLB_", "LLB_KV_", "LLB_PD_", "LOXILB_KV_"].iter().any(|prefix| name.starts_with(prefix));
    ours && !name.contains("_SERVICE_") && !name.contains("_PORT_") && !name.ends_with("_PORT")
}

fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    const SLIPS_MAX: usize = 3;
    let distances = known.iter().map(|known| (strsim::damerau_levenshtein(name, known), *known));
    distances.min().filter(|(slips, _)| *slips <= SLIPS_MAX).map(|(_, known)| known)
}

/// How a client command reaches the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// The API, as `http://127.0.0.1:11111`.
    pub url: String,
    /// How long to wait for an answer.
    pub timeout: Duration,
    /// Sent as a bearer token.
    pub credential: Option<Credential>,
    /// Whom to trust; `None` over plain HTTP.
    pub trust: Option<Trust>,
}

impl Client {
    /// The settings of a client command.
    ///
    /// # Errors
    /// [`ConfigError`] for the first value that is not allowed.
    pub fn new(flags: &ClientFlags, env: &Env) -> Result<Self, ConfigError> {
        let both = Both { env };
        let host = both.text("--apiserver", flags.apiserver.as_ref(), "KVLB_APISERVER")?;
        let port = both.text("--port", flags.port.as_ref(), "KVLB_APIPORT")?;
        let port = port.map_or_else(|| Ok(API_PORT.into()), |setting| setting.number(1, 65_535))?;
        let host = host.map_or_else(|| Ok("127.0.0.1".to_owned()), |setting| api_host(&setting))?;
        let protocol = both.text("--protocol", flags.protocol.as_ref(), "KVLB_PROTOCOL")?;
        let https = protocol.map_or(Ok(false), |setting| setting.word(&[("http", false), ("https", true)]))?;
        let timeout = both.text("--timeout", flags.timeout.as_ref(), "KVLB_TIMEOUT")?;
        Ok(Self {
            url: format!("{}://{host}:{port}", if https { "https" } else { "http" }),
            timeout: Duration::from_secs(
                timeout.map_or(Ok(CLIENT_TIMEOUT_SECONDS), |setting| setting.number(1, 3_600))?,
            ),
            credential: Credential::read(flags, &both)?,
            trust: access::trust(flags, &both, https)?,
        })
    }
}

fn api_host(setting: &Setting<'_>) -> Result<String, ConfigError> {
    let text = setting.value.trim();
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, 0).to_string().trim_end_matches(":0").to_owned());
    }
    let name = !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'));
    if name { Ok(text.to_owned()) } else { Err(setting.bad("an address or a name, without port (see --port)")) }
}

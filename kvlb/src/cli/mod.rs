//! The client of the REST API, in loxicmd's grammar, and the door to `kvlb up`.
//!
//! Owns the command line ([`parse`]), the requests it becomes and the tables of their answers ([`run`]). Checks only what
//! the API cannot see (the spelling of flags); whether a rule makes sense is the API's word. Invariant: anything but
//! success ends with an exit code of its own ([`CliError::exit_code`]) and a line on standard error that says what to do.

mod api;
mod create;
mod error;
mod grid;
mod preflight;
mod save;
mod table;
mod unserved;
mod verify;

#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use serde_json::{Value, json};

pub use error::CliError;

use api::Api;
use table::Screen;

use crate::config::{Client, ClientFlags, Config, Down, DownFlags, Engines, Env, UpFlags};
use crate::secret::Hidden;

/// What a command line asks for.
#[derive(Debug)]
pub enum Parsed {
    /// `kvlb up`.
    Up(Box<Config>),
    /// `kvlb doctor`; as JSON or not.
    Doctor(Box<Config>, bool),
    /// `kvlb down`.
    Down(Down),
    /// A client command.
    Client(Box<Invocation>),
    /// Nothing more: help or an error was written.
    Done(ExitCode),
}

/// A client command, ready to [`run`].
#[derive(Debug)]
pub struct Invocation {
    client: Client,
    output: Option<Output>,
    command: Command,
    /// What `preflight` judges engines by that have no rule.
    engines: Option<Engines>,
    program: &'static str,
}

/// Reads a command line. Called through a link named `loxicmd`, kvlb answers to that name.
///
/// What clap writes (help, the version, usage errors) is written here.
pub fn parse(arguments: impl IntoIterator<Item = OsString>, env: &Env) -> Parsed {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let program = program_name(arguments.first());
    let command = command().name(program).bin_name(program);
    let cli = command.try_get_matches_from(arguments).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match cli {
        Ok(cli) => cli,
        Err(error) => {
            // clap's own codes: 0 for help and version, 2 for a mistake.
            let code = if error.use_stderr() { 2 } else { 0 };
            return Parsed::Done(if error.print().is_ok() { ExitCode::from(code) } else { ExitCode::FAILURE });
        }
    };
    ready(cli, env, program).unwrap_or_else(|error| Parsed::Done(error.report(&mut io::stderr())))
}

fn ready(cli: Cli, env: &Env, program: &'static str) -> Result<Parsed, CliError> {
    let bad = |error: crate::config::ConfigError| CliError::Argument(error.to_string());
    let config = |flags: &UpFlags| {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Config::new(flags, env, cores).map(Box::new).map_err(bad)
    };
    if let Command::Doctor(flags) = &cli.command {
        return Ok(Parsed::Doctor(config(flags)?, cli.output == Some(Output::Json)));
    }
    if let Command::Down(flags) = &cli.command {
        return Ok(Parsed::Down(Down::new(flags, env).map_err(bad)?));
    }
    if let Command::Up(flags) = cli.command {
        if cli.client.any() || cli.output.is_some() {
            let message = "-s, -p, -t, -o, -k, --protocol, --token, --token-file, --cacert, --cert and --key belong to \
                           client commands; up listens at --api (--api-token-file, --api-tls-cert)";
            return Err(CliError::Argument(message.to_owned()));
        }
        return Ok(Parsed::Up(config(&flags)?));
    }
    let client = Client::new(&cli.client, env).map_err(bad)?;
    let engines = match &cli.command {
        Command::Preflight(preflight) => Some(preflight.engines(env).map_err(bad)?),
        _ => None,
    };
    Ok(Parsed::Client(Box::new(Invocation { client, output: cli.output, command: cli.command, engines, program })))
}

/// The grammar. `up` knows the flags of client commands, so that it can refuse them, but does not show them.
fn command() -> clap::Command {
    let hide = |with_output: bool| {
        move |up: clap::Command| {
            let hidden = |id: &'static str| clap::Arg::new(id).long(id).hide(true);
            let shorts =
                [("apiserver", 's'), ("port", 'p'), ("timeout", 't')].map(|(id, short)| hidden(id).short(short));
            let files = [hidden("token_file").long("token-file"), hidden("cacert"), hidden("cert"), hidden("key")]
                .map(|arg| arg.value_parser(clap::value_parser!(PathBuf)));
            let switches =
                [hidden("insecure").short('k'), hidden("bearer")].map(|arg| arg.action(clap::ArgAction::SetTrue));
            let token = hidden("token").value_parser(clap::value_parser!(Hidden));
            let output = hidden("output").short('o').value_parser(clap::value_parser!(Output));
            let up = up.arg(hidden("protocol")).args(shorts).args(files).args(switches).arg(token);
            if with_output { up.arg(output) } else { up }
        }
    };
    Cli::command()
        .mut_subcommand("up", hide(true))
        .mut_subcommand("doctor", hide(false))
        .mut_subcommand("down", hide(true))
}

/// `loxicmd` where kvlb is called by that name.
fn program_name(first: Option<&OsString>) -> &'static str {
    let name = first.and_then(|path| Path::new(path).file_name()).and_then(|name| name.to_str());
    if name == Some("loxicmd") { "loxicmd" } else { "kvlb" }
}

/// Runs a client command: its answer goes to standard output, an error to standard error.
pub fn run(invocation: &Invocation) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return CliError::Failed(format!("start: {error}")).report(&mut io::stderr()),
    };
    let result = runtime.block_on(execute(invocation));
    let written = result.and_then(|answer| {
        // A reader that has seen enough (head, less) is no failure.
        match io::stdout().write_all(answer.text.as_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(CliError::Failed(error.to_string())),
            _ => Ok(answer.code),
        }
    });
    written.map_or_else(|error| error.report(&mut io::stderr()), ExitCode::from)
}

/// What a command writes, and how it ends.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    text: String,
    code: u8,
}

impl From<String> for Answer {
    fn from(text: String) -> Self {
        Self { text, code: 0 }
    }
}

#[derive(Parser, Debug)]
#[command(
    name = "kvlb",
    version,
    about = "A load balancer for LLM inference that routes each request to the engine that already holds its KV blocks",
    after_help = "Exit codes: 0 ok, 2 bad argument, 3 not allowed, 4 not there or in conflict, 5 API unavailable, \
                  6 contract mismatch, 7 failed"
)]
struct Cli {
    #[command(flatten)]
    client: ClientFlags,

    /// How answers look: a table unless said
    #[arg(short = 'o', long, global = true, value_name = "FORMAT", help_heading = "API")]
    output: Option<Output>,

    #[command(subcommand)]
    command: Command,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    /// The API's own answer
    Json,
    /// More columns
    Wide,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// Run the load balancer
    #[command(after_help = UP_HELP)]
    Up(Box<UpFlags>),
    /// Look whether `kvlb up`, with the same flags, has what it needs here, and say what to do; changes nothing
    Doctor(Box<UpFlags>),
    /// Stop the kvlb that runs here and remove what it, or one that crashed, has left in the kernel: pins and routes
    Down(DownFlags),
    /// Create a rule, or give an endpoint a probe of its own
    #[command(subcommand)]
    Create(Box<Create>),
    /// Show rules, endpoints, inventories, contracts, metrics, status
    #[command(subcommand)]
    Get(Get),
    /// Delete rules, or an endpoint's own probe
    #[command(subcommand)]
    Delete(Delete),
    /// Take an endpoint into or out of service
    #[command(subcommand)]
    Set(Set),
    /// Show what would become of a request
    Explain(Explain),
    /// Compare engines with a rule, or with flags, leg by leg; changes nothing
    Preflight(Box<preflight::Preflight>),
    /// Send two small requests through a rule and see whether its KV tier serves them
    Verify(verify::Verify),
    /// Write all rules to a file
    Save(Save),
    /// Create the rules of a file
    Apply(Apply),
    /// Write a completion script for a shell
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Show the versions of this program and of the API
    Version,
}

const UP_HELP: &str = "Examples:
  kvlb up
  kvlb up --api 127.0.0.1:11111 --datapath none --no-state
  LLB_KV_NONE_HASH_SEED=0 LOXILB_KV_LB_MODE=hard kvlb up --log-format json

LLB_KV_NONE_HASH_SEED must be the engines' PYTHONHASHSEED; leave both unset, or set both to the same text.";

#[derive(Subcommand, Clone, Debug)]
enum Create {
    /// A rule
    #[command(name = "lb", aliases = ["loadbalancer", "loadbalancers", "lbs"])]
    Lb(Box<create::LoadBalancer>),
    /// A probe of its own for an endpoint
    #[command(name = "ep", aliases = ["endpoint", "endpoints"])]
    Ep(create::EndpointProbe),
}

#[derive(Subcommand, Clone, Debug)]
enum Get {
    /// Rules; -o wide: with endpoints
    #[command(name = "lb", aliases = ["loadbalancer", "loadbalancers", "lbs"])]
    Lb {
        /// Only the rule with this number
        #[arg(long)]
        id: Option<u32>,
        /// Only rules with this name
        #[arg(long, conflicts_with = "id")]
        name: Option<String>,
    },
    /// Endpoints and their probes; -o wide: with what their engines say of their work
    #[command(name = "ep", aliases = ["endpoint", "endpoints"])]
    Ep,
    /// The blocks that an endpoint holds
    #[command(name = "kvinventory")]
    KvInventory {
        /// The rule's number, as get lb shows it
        #[arg(long)]
        service_id: u32,
        /// The endpoint's position in the rule
        #[arg(long)]
        ep_idx: u32,
        /// Show at most this many
        #[arg(long)]
        limit: Option<u64>,
    },
    /// The contract and inventory of every subscribed endpoint; ends with 6 where a contract is a mismatch
    #[command(name = "kvstatus")]
    KvStatus {
        /// Only of this rule
        #[arg(long)]
        service_id: Option<u32>,
    },
    /// Prompt tokens that engines did not compute again, beside what kvlb predicted
    Savings {
        /// Only of this rule
        #[arg(long)]
        service_id: Option<u32>,
    },
    /// What the kernel drops: how much of it, and some of it with source and VIP
    Drops,
    /// All metrics, as Prometheus text
    Metrics,
    /// How kvlb runs, and what does not work as it should
    Status,
    /// The versions of this program and of the API
    #[command(alias = "lbversion")]
    Version,
}

#[derive(Subcommand, Clone, Debug)]
enum Delete {
    /// A rule
    #[command(name = "lb", aliases = ["loadbalancer", "loadbalancers", "lbs"])]
    Lb(DeleteLb),
    /// An endpoint's own probe; the endpoint itself leaves a rule with create lb --detachEP
    #[command(name = "ep", aliases = ["endpoint", "endpoints"])]
    Ep {
        /// The endpoint's address or name
        host: String,
    },
}

#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  kvlb delete lb 10.10.10.254 --tcp=8080
  kvlb delete lb 10.10.10.254 --tcp=8080 --model-name=Qwen/Qwen3-0.6B
  kvlb delete lb --name=chat
  kvlb delete lb --id=3")]
#[group(id = "which", required = true, multiple = true)]
struct DeleteLb {
    /// The VIP
    #[arg(value_name = "IP", requires = "tcp")]
    ip: Option<String>,
    /// Its port, or its port range, of which the first port is enough
    #[arg(long, value_name = "PORT", requires = "ip")]
    tcp: Option<String>,
    /// The rule's host, where several rules share the port
    #[arg(long, requires = "ip")]
    host: Option<String>,
    /// The rule's model, where several rules share the port
    #[arg(long, value_name = "MODEL", requires = "ip")]
    model_name: Option<String>,
    /// All rules with this name
    #[arg(long, conflicts_with_all = ["ip", "id", "all"], value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// The rule with this number
    #[arg(long, conflicts_with_all = ["ip", "all"])]
    id: Option<u32>,
    /// All rules
    #[arg(long, conflicts_with = "ip")]
    all: bool,
}

#[derive(Subcommand, Clone, Debug)]
enum Set {
    /// An endpoint, in every rule that lists it
    #[command(name = "ep", aliases = ["endpoint", "endpoints"], after_help = "Examples:
  kvlb set ep 192.0.2.1:8000 drain
  kvlb set ep [::1]:8000 up
  kvlb set ep 192.0.2.1 down       # every port of that host")]
    Ep {
        /// Address or name, with or without its port
        #[arg(value_name = "HOST[:PORT]")]
        endpoint: String,
        /// up: in service; drain: no new request; down: out of service
        state: Light,
    },
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum Light {
    /// In service
    Up,
    /// No new request; those under way finish
    Drain,
    /// Out of service
    Down,
}

#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  kvlb explain 1 < request.json
  kvlb explain chat request.json
  kvlb explain --service-id=1 request.json")]
struct Explain {
    /// The rule's number, instead of RULE
    #[arg(long)]
    service_id: Option<u32>,
    /// The request's path, where its body does not tell
    #[arg(long)]
    path: Option<String>,
    /// The rule's number or name, and the file with the request's body; without a file, or with -, standard input
    #[arg(value_name = "RULE] [FILE", num_args = 0..=2)]
    rule_and_file: Vec<String>,
}

impl Explain {
    /// The rule, unless the flag says it, and the file.
    fn operands(&self) -> Result<(Option<&str>, PathBuf), CliError> {
        let mut operands = self.rule_and_file.iter().map(String::as_str);
        let rule = if self.service_id.is_some() { None } else { operands.next() };
        let file = PathBuf::from(operands.next().unwrap_or("-"));
        match (self.service_id, rule, operands.next()) {
            (None, None, _) => Err(CliError::Argument("say which rule: kvlb explain RULE < request.json".to_owned())),
            (Some(_), _, Some(_)) => Err(CliError::Argument("--service-id and RULE both name a rule".to_owned())),
            _ => Ok((rule, file)),
        }
    }
}

#[derive(Args, Clone, Debug)]
struct Save {
    /// All that kvlb keeps
    #[arg(short, long, conflicts_with = "lb")]
    all: bool,
    /// The rules
    #[arg(short, long)]
    lb: bool,
    /// Where lbconfig.txt is written; the file that was there is kept as lbconfig.txt.bk
    #[arg(short, long, value_name = "DIR", default_value = "/etc/loxilb/")]
    config_path: PathBuf,
}

#[derive(Args, Clone, Debug)]
#[group(id = "source", required = true, multiple = false)]
struct Apply {
    /// A file that save wrote
    #[arg(short, long, value_name = "FILE")]
    lb: Option<PathBuf>,
    /// A file with the JSON body of a rule, or a list of them
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

async fn execute(invocation: &Invocation) -> Result<Answer, CliError> {
    if let Command::Completion { shell } = &invocation.command {
        return Ok(completion(*shell, invocation.program).into());
    }
    let api = Api::new(&invocation.client)?;
    let output = invocation.output;
    match &invocation.command {
        Command::Create(create) => created(&api, create, output).await,
        Command::Get(get) => got(&api, get, output).await,
        Command::Delete(delete) => deleted(&api, delete, output).await,
        Command::Set(Set::Ep { endpoint, state }) => set(&api, endpoint, *state, output).await,
        Command::Explain(explain) => explained(&api, explain, output).await,
        Command::Preflight(preflight) => preflight.run(&api, invocation.engines.as_ref(), output).await,
        Command::Verify(verify) => verify.run(&api, output).await,
        Command::Save(save) => save::save(&api, &save.config_path).await,
        Command::Apply(Apply { lb, file }) => {
            let file = lb.as_ref().or(file.as_ref()).ok_or_else(|| CliError::Argument("no file".to_owned()))?;
            save::apply(&api, file).await
        }
        Command::Version => versions(&api, output).await,
        Command::Up(_) | Command::Doctor(_) | Command::Down(_) | Command::Completion { .. } => Ok(String::new().into()),
    }
}

async fn created(api: &Api, create: &Create, output: Option<Output>) -> Result<Answer, CliError> {
    match create {
        Create::Lb(lb) => {
            let (mut text, mut made) = (String::new(), Vec::new());
            for body in lb.bodies()? {
                let answer = api.post(&["config", "loadbalancer"], &[], &body).await;
                let answer = answer.map_err(|error| partly(error, &made, &body))?;
                made.push(answer["id"].to_string());
                text.push_str(&success(&answer, output));
            }
            Ok(text.into())
        }
        Create::Ep(probe) => {
            let answer = api.post(&["config", "endpoint"], &[], &probe.body()).await?;
            Ok(success(&answer, output).into())
        }
    }
}

/// An error at a rule behind others that are there by now.
fn partly(error: CliError, made: &[String], body: &Value) -> CliError {
    if made.is_empty() {
        return error;
    }
    let (port, made) = (&body["serviceArguments"]["port"], made.join(", "));
    CliError::Partly { done: format!("rule {made} is there; of port {port}"), cause: Box::new(error) }
}

/// Loxicmd's word, and what was done to which rule.
fn success(answer: &Value, output: Option<Output>) -> String {
    if output == Some(Output::Json) {
        return format!("{answer}\n");
    }
    let numbers: Vec<String> = match (&answer["id"], &answer["ids"]) {
        (Value::Number(id), _) => vec![id.to_string()],
        (_, Value::Array(ids)) => ids.iter().map(Value::to_string).collect(),
        _ => Vec::new(),
    };
    let rules = if numbers.len() == 1 { "rule" } else { "rules" };
    let change = answer["change"].as_str().unwrap_or("deleted");
    let mut text = if numbers.is_empty() {
        format!("Success: {change}\n")
    } else {
        format!("Success: {rules} {} {change}\n", numbers.join(", "))
    };
    for note in answer["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        text.extend([format!("note: {note}\n")]);
    }
    text
}

/// The rule that an operator means by its number or its name, as the API shows it.
async fn find_rule(api: &Api, which: &str) -> Result<Value, CliError> {
    let by = if which.parse::<u32>().is_ok() { "id" } else { "name" };
    let mut answer = api.get(&["config", "loadbalancer", by, which], &[]).await?;
    match answer["lbAttr"].as_array_mut().map(std::mem::take).unwrap_or_default() {
        rules if rules.len() > 1 => {
            let ids: Vec<_> = rules.iter().map(|rule| rule["id"].to_string()).collect();
            Err(CliError::Argument(format!(
                "{} rules are named {which:?}: say which by number: {}",
                ids.len(),
                ids.join(", ")
            )))
        }
        rules => {
            rules.into_iter().next().ok_or_else(|| CliError::Failed(format!("no rule {which} in the API's answer")))
        }
    }
}

async fn got(api: &Api, get: &Get, output: Option<Output>) -> Result<Answer, CliError> {
    let id = if let Get::Lb { id: Some(id), .. } = get { id.to_string() } else { String::new() };
    let (path, query): (Vec<&str>, Vec<(&str, String)>) = match get {
        Get::Lb { id: Some(_), .. } => (vec!["config", "loadbalancer", "id", &id], vec![]),
        Get::Lb { name: Some(name), .. } => (vec!["config", "loadbalancer", "name", name], vec![]),
        Get::Lb { .. } => (vec!["config", "loadbalancer", "all"], vec![]),
        Get::Ep => (vec!["config", "endpoint", "all"], vec![]),
        Get::KvInventory { service_id, ep_idx, limit } => {
            let mut query = vec![("service_id", service_id.to_string()), ("ep_idx", ep_idx.to_string())];
            query.extend(limit.map(|limit| ("limit", limit.to_string())));
            (vec!["config", "ai", "kv", "inventory"], query)
        }
        Get::KvStatus { service_id } => {
            let query = service_id.map(|id| ("service_id", id.to_string()));
            (vec!["config", "ai", "kv", "status"], query.into_iter().collect())
        }
        Get::Savings { service_id } => {
            let query = service_id.map(|id| ("service_id", id.to_string()));
            (vec!["config", "ai", "kv", "savings"], query.into_iter().collect())
        }
        Get::Drops => (vec!["config", "drops"], vec![]),
        Get::Metrics => return api.text(&["metrics"]).await.map(Answer::from),
        Get::Status => (vec!["status"], vec![]),
        Get::Version => return versions(api, output).await,
    };
    let answer = api.get(&path, &query).await?;
    let text = shown(&answer, output, |answer, screen| match get {
        Get::Lb { .. } => table::rules(answer, output == Some(Output::Wide), screen),
        Get::Ep => table::endpoints(answer, output == Some(Output::Wide), screen),
        Get::KvInventory { .. } => table::inventory(answer, screen),
        Get::KvStatus { .. } => table::kv_status(answer, screen),
        Get::Savings { .. } => table::savings(answer, screen),
        Get::Drops => table::drops(answer, screen),
        Get::Status | Get::Metrics | Get::Version => table::status(answer, screen),
    });
    let broken = matches!(get, Get::KvStatus { .. }) && table::any_mismatch(&answer);
    Ok(Answer { text, code: if broken { error::MISMATCH } else { 0 } })
}

/// An answer as JSON, or as a table.
fn shown(answer: &Value, output: Option<Output>, table: impl FnOnce(&Value, Screen) -> String) -> String {
    match output {
        Some(Output::Json) => format!("{answer:#}\n"),
        _ => table(answer, Screen::of_process()),
    }
}

async fn deleted(api: &Api, delete: &Delete, output: Option<Output>) -> Result<Answer, CliError> {
    let answer = match delete {
        Delete::Ep { host } => api.delete(&["config", "endpoint", "epipaddress", host], &[]).await?,
        Delete::Lb(lb) => delete_rule(api, lb).await?,
    };
    Ok(success(&answer, output).into())
}

async fn delete_rule(api: &Api, lb: &DeleteLb) -> Result<Value, CliError> {
    let base = ["config", "loadbalancer"];
    if let Some(id) = lb.id {
        return api.delete(&[&base[..], &["id", &id.to_string()]].concat(), &[]).await;
    }
    if let Some(name) = &lb.name {
        return api.delete(&[&base[..], &["name", name]].concat(), &[]).await;
    }
    let (Some(ip), Some(tcp)) = (&lb.ip, &lb.tcp) else {
        return api.delete(&[&base[..], &["all"]].concat(), &[]).await;
    };
    let (first, last) = create::port_range(tcp)
        .ok_or_else(|| CliError::Argument(format!("--tcp {tcp:?}: write a port or a range, as 8080 or 8080-8090")))?;
    let (first, last) = (first.to_string(), last.map(|last| last.to_string()));
    let mut path = base.to_vec();
    if let Some(host) = &lb.host {
        path.extend(["hosturl", host]);
    }
    path.extend(["externalipaddress", ip, "port", &first]);
    if let Some(last) = &last {
        path.extend(["portmax", last]);
    }
    path.extend(["protocol", "tcp"]);
    let query: Vec<_> = lb.model_name.iter().map(|model| ("model_name", model.clone())).collect();
    api.delete(&path, &query).await
}

async fn set(api: &Api, endpoint: &str, light: Light, output: Option<Output>) -> Result<Answer, CliError> {
    let (host, port) = host_and_port(endpoint)
        .ok_or_else(|| CliError::Argument(format!("{endpoint:?} is no HOST or HOST:PORT; IPv6 as [::1]:8000")))?;
    let state = match light {
        Light::Up => "green",
        Light::Drain => "yellow",
        Light::Down => "red",
    };
    let body = json!({"hostName": host, "epPort": port.unwrap_or(0), "epProto": "tcp", "state": state});
    let answer = api.post(&["config", "endpointhoststate"], &[], &body).await?;
    Ok(success(&answer, output).into())
}

/// `HOST`, `HOST:PORT`, `[IPV6]:PORT`, `[IPV6]` or a bare IPv6 address.
fn host_and_port(text: &str) -> Option<(&str, Option<u16>)> {
    if text.parse::<std::net::Ipv6Addr>().is_ok() {
        return Some((text, None));
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(create::port(port)?)),
        _ => (text, None),
    };
    (!host.is_empty()).then_some((host, port))
}

async fn explained(api: &Api, explain: &Explain, output: Option<Output>) -> Result<Answer, CliError> {
    let (rule, file) = explain.operands()?;
    let id = match rule {
        None => explain.service_id.unwrap_or_default().to_string(),
        Some(which) if which.parse::<u32>().is_ok() => which.to_owned(),
        Some(name) => find_rule(api, name).await?["id"].to_string(),
    };
    let bytes = save::read_input(&file)?;
    let mut query = vec![("service_id", id)];
    query.extend(explain.path.clone().map(|path| ("path", path)));
    let answer = api.post_bytes(&["config", "ai", "kv", "explain"], &query, bytes).await?;
    Ok(shown(&answer, output, table::explanation).into())
}

async fn versions(api: &Api, output: Option<Output>) -> Result<Answer, CliError> {
    let ours = env!("CARGO_PKG_VERSION");
    let theirs = api.get(&["version"], &[]).await;
    match (output, theirs) {
        (Some(Output::Json), Ok(theirs)) => Ok(format!("{:#}\n", json!({"version": ours, "api": theirs})).into()),
        (Some(Output::Json), Err(error)) => {
            let text = json!({"version": ours, "api": null, "error": error.to_string()});
            Ok(Answer { text: format!("{text:#}\n"), code: error.exit_code() })
        }
        (_, Ok(theirs)) => Ok(format!("kvlb {ours}\nAPI  {}\n", theirs["version"].as_str().unwrap_or("?")).into()),
        // This program's own version is known all the same.
        (_, Err(error)) => Ok(Answer { text: format!("kvlb {ours}\nAPI  {error}\n"), code: error.exit_code() }),
    }
}

fn completion(shell: Shell, program: &str) -> String {
    let shell = match shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), program, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

//! Flags of loxicmd that kvlb does not serve: accepted by the parser so that they can be refused with a reason.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::CliError;

const SWITCH: bool = false;
const VALUE: bool = true;
const TCP_ONLY: &str = "kvlb proxies HTTP over TCP";
const TLS: &str = "TLS is not served yet";
const ADMISSION: &str = "admission goes by fixed bounds yet: --fc-mode, --fc-ep-max-inflight";
const RING: &str = "selectors 8 and 10 hash the first 512 bytes of the prompt, and need no ring";

/// Name, whether it takes a value, and why it is refused.
const FLAGS: [(&str, bool, &str); 37] = [
    ("udp", VALUE, TCP_ONLY),
    ("sctp", VALUE, TCP_ONLY),
    ("icmp", SWITCH, TCP_ONLY),
    ("secips", VALUE, "secondary addresses belong to SCTP"),
    ("mark", VALUE, "a proxy does not mark packets"),
    ("bgp", SWITCH, "kvlb announces no routes"),
    ("egress", SWITCH, "kvlb is no egress gateway"),
    ("ppv2en", SWITCH, "PROXY protocol is not served yet; see --forwarded-headers"),
    ("trace-type", VALUE, "see --decision-headers"),
    ("sockmap-mode", VALUE, "splicing is not served yet"),
    ("api-key-auth", SWITCH, "API keys belong to a gateway in front"),
    ("connection-limit", VALUE, "see --connections-max"),
    ("chwbl-hash-level", VALUE, RING),
    ("chwbl-hash-flags", VALUE, RING),
    ("chwbl-replication", VALUE, RING),
    ("chwbl-cache-salt", SWITCH, RING),
    ("fc-adaptive", SWITCH, ADMISSION),
    ("fc-warmup-ms", VALUE, ADMISSION),
    ("fc-ttft-target-ms", VALUE, ADMISSION),
    ("fc-tenant-max-share-pct", VALUE, "kvlb knows no tenants"),
    ("fc-telemetry-stale-ms", VALUE, "what engines say is known for 30 s"),
    ("fc-expose-headers", SWITCH, "see --decision-headers"),
    ("hsts-max-age", VALUE, TLS),
    ("hsts-include-subdomains", SWITCH, TLS),
    ("hsts-preload", SWITCH, TLS),
    ("mtls-client-cert-mode", VALUE, TLS),
    ("mtls-client-ca-path", VALUE, TLS),
    ("mtls-require-client-cn", SWITCH, TLS),
    ("mtls-client-cn-pattern", VALUE, TLS),
    ("mtls-client-crl-path", VALUE, TLS),
    ("mtls-backend-verify-server", SWITCH, TLS),
    ("mtls-backend-ca-path", VALUE, TLS),
    ("mtls-backend-cert-path", VALUE, TLS),
    ("mtls-backend-key-path", VALUE, TLS),
    ("kv-model-profile", VALUE, "stage the tokenizer by the model's slug"),
    ("kv-exact-api-mode", VALUE, "completions and chat are both read"),
    ("kv-warmup-enforce", SWITCH, "the KV tier answers as soon as it knows blocks"),
];

/// Those of the flags that were given.
#[derive(Clone, Debug, Default)]
pub(super) struct Unserved(Vec<&'static str>);

impl Unserved {
    /// An error that names the first of them and why.
    pub(super) fn refuse(&self) -> Result<(), CliError> {
        let Some(given) = self.0.first() else { return Ok(()) };
        let why = FLAGS.iter().find(|(name, ..)| name == given).map_or("", |(_, _, why)| why);
        Err(CliError::Argument(format!("--{given} is not supported: {why}")))
    }
}

impl FromArgMatches for Unserved {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |name: &&'static str| matches.value_source(name).is_some();
        Ok(Self(FLAGS.iter().map(|(name, ..)| *name).filter(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Unserved {
    fn augment_args(command: Command) -> Command {
        command.args(FLAGS.map(|(name, takes_value, _)| {
            let arg = Arg::new(name).long(name).hide(true).action(ArgAction::Append);
            // Loxicmd's switches may be written --bgp or --bgp=true.
            if takes_value { arg.num_args(1) } else { arg.num_args(0..=1).require_equals(true) }
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

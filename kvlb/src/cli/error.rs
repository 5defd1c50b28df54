//! How a client command fails.

use std::io::Write;
use std::process::ExitCode;

/// The exit code where a contract is a mismatch, or may be one.
pub(super) const MISMATCH: u8 = 6;
/// The exit code where nobody answers.
pub(super) const UNAVAILABLE: u8 = 5;

/// Why a client command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command line makes no sense.
    #[error("{0}")]
    Argument(String),
    /// The API refused.
    #[error("{message}{}", next_step(code))]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The API's stable word for the mistake; empty where it gave none.
        code: String,
        /// What it said.
        message: String,
    },
    /// Nobody answered.
    #[error("cannot reach the API at {url}: {cause}; is `kvlb up` running, and are --apiserver and --port right?")]
    Unreachable {
        /// Where it was looked for.
        url: String,
        /// Why.
        cause: String,
    },
    /// The two sides do not agree on whom to trust.
    #[error("no trusted connection to the API at {url}: {cause}; {hint}")]
    Tls {
        /// Where it was looked for.
        url: String,
        /// Why.
        cause: String,
        /// What to do.
        hint: &'static str,
    },
    /// No answer within the time limit.
    #[error("the API at {url} did not answer within {seconds} s; a larger --timeout waits longer")]
    Timeout {
        /// Where it was looked for.
        url: String,
        /// The limit.
        seconds: u64,
    },
    /// Something answered that is not kvlb.
    #[error("what answers at {url} is not kvlb's API (status {status}); are --apiserver and --port right?")]
    NotOurs {
        /// Where it was looked for.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// The last of several changes was refused.
    #[error("{done}: {cause}")]
    Partly {
        /// What is done.
        done: String,
        /// Why the rest is not.
        cause: Box<CliError>,
    },
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl CliError {
    /// 2 bad argument, 3 not allowed, 4 not there or in conflict, 5 unavailable, 7 failed, as the inference gateway's
    /// loxicmd.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Partly { cause, .. } => cause.exit_code(),
            Self::Argument(_) | Self::Refused { status: 400 | 405 | 413 | 415 | 422, .. } => 2,
            Self::Refused { status: 401 | 403, .. } | Self::Tls { .. } => 3,
            Self::Refused { status: 404 | 409 | 412, .. } => 4,
            Self::Refused { status: 429 | 502..=504, .. } | Self::Unreachable { .. } | Self::Timeout { .. } => 5,
            Self::Refused { .. } | Self::NotOurs { .. } | Self::Failed(_) => 7,
        }
    }

    /// Writes the error for a person, and returns the exit code.
    pub(super) fn report(&self, to: &mut dyn Write) -> ExitCode {
        // Nothing is left to tell where standard error is closed too.
        drop(writeln!(to, "error: {self}"));
        ExitCode::from(self.exit_code())
    }
}

/// What to do about a refusal that does not say so itself.
fn next_step(code: &str) -> &'static str {
    match code {
        "rule_not_found" => "; `kvlb get lb` lists the rules",
        "endpoint_not_found" => "; `kvlb get ep` lists the endpoints",
        "several_rules" => " (--model-name or --id)",
        "token_missing" => "; --token-file FILE (KVLB_TOKEN_FILE) names the file with the token",
        "token_wrong" => "; is --token-file the file, or a copy of it, that `kvlb up` was given?",
        "token_read_only" => "; --token-file FILE names the file with it",
        "https_needed" => "; --protocol https (KVLB_PROTOCOL) speaks it",
        "starting" => "; try again in a few seconds",
        "path_not_found" | "method_not_allowed" => "; is the API older than this program? `kvlb version` shows both",
        _ => "",
    }
}

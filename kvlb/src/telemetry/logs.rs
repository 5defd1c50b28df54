//! Where log lines go and how they look.

use std::io::IsTerminal as _;
use std::str::FromStr;

use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// How a log line is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("unknown log format {other:?}; use text or json")),
        }
    }
}

/// Sends log lines to standard error. `filter` is a level (`info`) or a list of `target=level`.
///
/// # Errors
/// When `filter` cannot be read, or a subscriber is installed already.
pub fn init_logs(format: LogFormat, filter: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let registry = tracing_subscriber::registry().with(EnvFilter::try_new(filter)?);
    match format {
        LogFormat::Text => {
            // Colours are for terminals; in a file they are noise.
            let colours = std::io::stderr().is_terminal();
            let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colours);
            registry.with(lines.with_target(false)).try_init()?;
        }
        LogFormat::Json => {
            registry.with(tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr)).try_init()?;
        }
    }
    Ok(())
}

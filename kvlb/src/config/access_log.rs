//! The access log's settings.

use std::num::NonZeroU64;

use super::{Both, ConfigError, UpFlags};
use crate::telemetry::access::{Destination, Sampling};

/// One request in so many has a line where a sample is asked for and not how large.
const SAMPLE: u64 = 100;
/// With fewer than one in so many nobody would see a line.
const SAMPLE_MAX: u64 = 1_000_000;

/// The access log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessLog {
    /// Which requests have a line.
    pub sampling: Sampling,
    /// Where lines go.
    pub destination: Destination,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Mode {
    #[default]
    Off,
    Sampled,
    Full,
}

const MODES: [(&str, Mode); 3] = [("off", Mode::Off), ("sampled", Mode::Sampled), ("full", Mode::Full)];

impl AccessLog {
    /// The settings, and what an operator should know of them.
    pub(super) fn read(flags: &UpFlags, both: &Both<'_>) -> Result<(Self, Vec<String>), ConfigError> {
        let mode = both.word("--access-log", flags.access_log.as_ref(), "KVLB_ACCESS_LOG", &MODES)?;
        let sample = both.text("--access-log-sample", flags.access_log_sample.as_ref(), "KVLB_ACCESS_LOG_SAMPLE")?;
        let count = sample.map_or(Ok(SAMPLE), |setting| setting.number(1, SAMPLE_MAX))?;
        let sampling = match mode {
            Mode::Off => Sampling::Off,
            Mode::Sampled => NonZeroU64::new(count).map_or(Sampling::Full, Sampling::OneIn),
            Mode::Full => Sampling::Full,
        };
        let path = both.path(flags.access_log_file.as_deref(), "KVLB_ACCESS_LOG_FILE", "-")?;
        let destination = if path.as_os_str() == "-" { Destination::Stdout } else { Destination::File(path) };
        let mut warnings = Vec::new();
        if sample.is_some() && mode != Mode::Sampled {
            warnings.push("--access-log-sample has no effect without --access-log sampled".to_owned());
        }
        if destination != Destination::Stdout && mode == Mode::Off {
            warnings.push("--access-log-file has no effect without --access-log sampled or full".to_owned());
        }
        Ok((Self { sampling, destination }, warnings))
    }
}

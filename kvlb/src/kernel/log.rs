//! The program's own log lines, of rare events only, become ours.

use std::fmt;
use std::time::Duration;

use ::log::{Level, Log, Metadata, Record};
use aya::Ebpf;
use aya_log::EbpfLogger;

/// How long a line may lie in the kernel: soon enough for a person, and the program writes far fewer than fit there.
pub const DRAIN_INTERVAL: Duration = Duration::from_secs(1);

/// The steering program's log. While nobody drains it the kernel keeps the first 128 KiB of lines.
pub struct ProgramLog(EbpfLogger<ToTracing>);

impl ProgramLog {
    /// The log of the object, which has to live until its programs are loaded.
    pub(super) fn open(ebpf: &mut Ebpf) -> Option<Self> {
        match EbpfLogger::init_with_logger(ebpf, ToTracing) {
            Ok(logger) => Some(Self(logger)),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the kernel program's log is not read");
                None
            }
        }
    }

    /// Passes the lines on as they come, within [`DRAIN_INTERVAL`], until the future is dropped.
    pub async fn drain(mut self) {
        let mut ticks = tokio::time::interval(DRAIN_INTERVAL);
        loop {
            ticks.tick().await;
            self.flush();
        }
    }

    /// Passes on the lines that are there.
    pub fn flush(&mut self) {
        self.0.flush();
    }
}

impl fmt::Debug for ProgramLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProgramLog").finish_non_exhaustive()
    }
}

/// Hands a line of aya's logger to tracing, at its own level.
struct ToTracing;

impl Log for ToTracing {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = record.args();
        match record.level() {
            Level::Error => tracing::error!(target: "kvlb::kernel::program", "{line}"),
            Level::Warn => tracing::warn!(target: "kvlb::kernel::program", "{line}"),
            Level::Info => tracing::info!(target: "kvlb::kernel::program", "{line}"),
            Level::Debug => tracing::debug!(target: "kvlb::kernel::program", "{line}"),
            Level::Trace => tracing::trace!(target: "kvlb::kernel::program", "{line}"),
        }
    }

    fn flush(&self) {}
}

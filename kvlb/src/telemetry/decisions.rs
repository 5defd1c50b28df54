//! The decision log: one JSON object a line for each request whose prompt was named, for `cargo xtask sim --trace`.
//!
//! It tells when a request came, how long its prompt and its answer were, the names of the prompt's blocks, and what was
//! chosen. Names are hashes: no text can be read from them, but equal beginnings of prompts have equal names. Data threads
//! hand entries over through a bounded queue and never wait; what does not fit, or cannot be written, is dropped and counted.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use prometheus::core::{AtomicU64, GenericCounter};
use serde::Serialize;

use super::Metrics;
use crate::clock;

/// Entries that may wait. One for a prompt of 100,000 tokens has 50 KB of names.
const QUEUE: usize = 256;
/// How often what was written is pushed out, and the file looked for at its path.
const LOOK: Duration = Duration::from_secs(1);

/// One request.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Entry {
    /// When it came, in milliseconds since 1970.
    pub timestamp: u64,
    /// The rule's number.
    pub rule: u32,
    /// Tokens of each block.
    pub block_size: u32,
    /// Tokens of its prompt.
    pub input_length: u64,
    /// Tokens of its answer, where the engine said so.
    pub output_length: Option<u64>,
    /// The names of its prompt's full blocks, in order.
    pub hash_ids: Vec<u64>,
    /// The endpoint that had it.
    pub endpoint: usize,
    /// The step that chose.
    pub tier: &'static str,
    /// Blocks that the endpoint held.
    pub depth: u32,
    /// Load moved it away from a larger overlap.
    pub spill: bool,
    /// Milliseconds from its end to the first byte of the answer.
    pub first_byte_ms: Option<f64>,
}

/// The log, as data threads see it.
#[derive(Clone, Debug)]
pub struct DecisionLog {
    queue: SyncSender<Box<Entry>>,
    dropped: GenericCounter<AtomicU64>,
}

impl DecisionLog {
    /// Opens the log and starts its thread, which ends when the last copy of the log is gone.
    ///
    /// # Errors
    /// When the file cannot be opened, or the thread not be started.
    pub fn open(path: &Path, metrics: &Metrics) -> io::Result<Self> {
        let (queue, entries) = sync_channel(QUEUE);
        let dropped = |reason| metrics.decision_log_dropped.with_label_values(&[reason]);
        let pen = Pen {
            file: BufWriter::new(open(path)?),
            path: path.to_owned(),
            written: metrics.decision_log_lines.clone(),
            failed: dropped("write_failed"),
        };
        std::thread::Builder::new().name("kvlb-decisions".to_owned()).spawn(move || pen.write_until_end(&entries))?;
        Ok(Self { queue, dropped: dropped("queue_full") })
    }

    /// Hands an entry over. Never waits.
    pub fn put(&self, entry: Entry) {
        if self.queue.try_send(Box::new(entry)).is_err() {
            self.dropped.inc();
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    // Names tell who asks alike: not everybody's business.
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

struct Pen {
    file: BufWriter<File>,
    path: PathBuf,
    written: GenericCounter<AtomicU64>,
    failed: GenericCounter<AtomicU64>,
}

impl Pen {
    fn write_until_end(mut self, entries: &Receiver<Box<Entry>>) {
        let mut look = clock::now() + LOOK;
        loop {
            match entries.recv_timeout(LOOK) {
                Ok(entry) => self.write(&entry),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.look(),
            }
            // However busy it is.
            let now = clock::now();
            if now >= look {
                self.look();
                look = now + LOOK;
            }
        }
    }

    fn write(&mut self, entry: &Entry) {
        let line = serde_json::to_vec(entry).map_err(io::Error::other);
        let written = line.and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)
        });
        match written {
            Ok(()) => self.written.inc(),
            Err(_counted) => self.failed.inc(),
        }
    }

    /// Pushes out what is written, and goes on in a new file where the old one was renamed.
    fn look(&mut self) {
        if self.file.flush().is_err() {
            self.failed.inc();
        }
        let place = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
        let there = std::fs::metadata(&self.path).map(place).ok();
        let ours = self.file.get_ref().metadata().map(place).ok();
        if there != ours
            && let Ok(file) = open(&self.path)
        {
            self.file = BufWriter::new(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &Path, count: usize) -> Vec<serde_json::Value> {
        for _ in 0..100 {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            if text.lines().count() >= count {
                return text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("no {count} lines in {}", path.display());
    }

    #[test]
    fn entries_are_lines_and_a_renamed_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let (path, moved) = (dir.path().join("log"), dir.path().join("log.1"));
        let metrics = Metrics::new().unwrap();
        let log = DecisionLog::open(&path, &metrics).unwrap();
        let entry =
            Entry { timestamp: 7, input_length: 33, hash_ids: vec![1, u64::MAX], tier: "1.5", ..Entry::default() };
        log.put(entry.clone());
        let first = &lines(&path, 1)[0];
        assert_eq!(first["hash_ids"], serde_json::json!([1, u64::MAX]));
        assert_eq!((&first["input_length"], &first["output_length"]), (&33.into(), &serde_json::Value::Null));
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        std::fs::rename(&path, &moved).unwrap();
        // Entries that come all the time keep it from neither.
        for _ in 0..25 {
            log.put(entry.clone());
            std::thread::sleep(LOOK / 10);
        }
        assert!(path.exists(), "the renamed file is still written to");
        std::thread::sleep(2 * LOOK);
        assert_eq!(lines(&path, 1).len() + lines(&moved, 1).len(), 26);
        assert_eq!(metrics.decision_log_lines.get(), 26);
    }

    #[test]
    fn what_does_not_fit_is_counted_and_nobody_waits() {
        let (queue, entries) = sync_channel(1);
        let metrics = Metrics::new().unwrap();
        let dropped = metrics.decision_log_dropped.with_label_values(&["queue_full"]);
        let log = DecisionLog { queue, dropped };
        for _ in 0..3 {
            log.put(Entry::default());
        }
        assert_eq!(metrics.decision_log_dropped.with_label_values(&["queue_full"]).get(), 2);
        drop(entries);
    }
}

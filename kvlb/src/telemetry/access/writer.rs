//! The thread that writes.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use prometheus::core::{AtomicU64, GenericCounter};

use super::{Record, Sampling, line};
use crate::clock;
use crate::telemetry::Metrics;

type Counter = GenericCounter<AtomicU64>;

/// Records that may wait: what 100,000 requests a second bring in 80 ms. A record takes some 600 bytes, and less than 4 KiB whatever a client sends.
const QUEUE: usize = 8192;
/// The writer rests for so long behind each batch, so that a data thread seldom has to wake it.
const REST: Duration = Duration::from_millis(10);
/// How often the writer looks whether its file is still the one at its path.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes that are written at once.
const BATCH: usize = 64 << 10;

/// Where lines go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Destination {
    /// Standard output.
    #[default]
    Stdout,
    /// A file, which lines are added to.
    File(PathBuf),
}

/// Why the log could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file cannot be opened.
    #[error("cannot open the access log {}", .0.display())]
    File(PathBuf, #[source] io::Error),
    /// Standard output is not there.
    #[error("cannot write the access log to standard output")]
    Stdout(#[source] io::Error),
    /// The thread cannot be started.
    #[error("cannot start the access log's thread")]
    Thread(#[source] io::Error),
}

/// What the queue carries.
#[derive(Debug)]
enum Item {
    Record(Box<Record>),
    /// Look at what is wanted.
    Nudge,
}

/// What the writer is asked for beside records.
#[derive(Debug, Default)]
struct Wanted {
    reopen: AtomicBool,
    end: AtomicBool,
}

/// The log, as data threads see it.
#[derive(Clone, Debug)]
pub struct AccessLog {
    sampling: Sampling,
    queue: SyncSender<Item>,
    wanted: Arc<Wanted>,
    dropped: Counter,
}

impl AccessLog {
    /// Opens the log and starts its thread; `None` where it is off.
    ///
    /// # Errors
    /// When the file cannot be opened, or the thread not be started.
    pub fn open(
        sampling: Sampling,
        destination: &Destination,
        metrics: &Metrics,
    ) -> Result<Option<(Self, Writer)>, OpenError> {
        if sampling == Sampling::Off {
            return Ok(None);
        }
        let out = Out::open(destination)?;
        Self::start(sampling, out, metrics).map(Some).map_err(OpenError::Thread)
    }

    fn start(sampling: Sampling, out: Out, metrics: &Metrics) -> io::Result<(Self, Writer)> {
        let (queue, records) = sync_channel(QUEUE);
        let wanted = Arc::new(Wanted::default());
        let drops = |reason| metrics.access_log_dropped.with_label_values(&[reason]);
        let log = Self { sampling, queue, wanted: Arc::clone(&wanted), dropped: drops("queue_full") };
        let mut pen = Pen {
            out,
            written: metrics.access_log_lines.clone(),
            failed: drops("write_failed"),
            is_torn: false,
            is_failing: false,
            is_stuck: false,
        };
        let thread = std::thread::Builder::new()
            .name("kvlb-access-log".to_owned())
            .spawn(move || write_until_end(&records, &wanted, &mut pen))?;
        let writer = Writer { log: log.clone(), thread };
        Ok((log, writer))
    }

    /// Which requests get a line.
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// Hands a record over. Never waits; drops and counts what does not fit.
    pub fn put(&self, record: Box<Record>) {
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.queue.try_send(Item::Record(record)) {
            self.dropped.inc();
        }
    }

    /// Has the file opened again: it was renamed.
    pub fn reopen(&self) {
        self.ask_for(&self.wanted.reopen);
    }

    fn ask_for(&self, what: &AtomicBool) {
        what.store(true, Ordering::Release);
        // Where the queue is full the writer is awake, and looks by itself.
        drop(self.queue.try_send(Item::Nudge));
    }
}

/// The thread of the log.
#[derive(Debug)]
pub struct Writer {
    log: AccessLog,
    thread: JoinHandle<()>,
}

impl Writer {
    /// Writes what waits and ends, within `limit`: a pipe that nobody reads must not keep the process.
    pub fn finish(self, limit: Duration) {
        self.log.ask_for(&self.log.wanted.end);
        let until = clock::now() + limit;
        while !self.thread.is_finished() && clock::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !self.thread.is_finished() {
            tracing::warn!("the access log could not be written to its end");
        } else if self.thread.join().is_err() {
            tracing::error!("the access log's thread ended in a panic");
        }
    }
}

fn write_until_end(records: &Receiver<Item>, wanted: &Wanted, pen: &mut Pen) {
    let mut batch = Batch::default();
    let mut look = clock::now() + LOOK;
    loop {
        let first = match records.recv_timeout(LOOK) {
            Ok(item) => Some(item),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let now = clock::now();
        if wanted.reopen.swap(false, Ordering::AcqRel) || (now >= look && pen.out.is_moved()) {
            pen.reopen();
        }
        if now >= look {
            look = now + LOOK;
        }
        let ends = wanted.end.load(Ordering::Acquire);
        let mut next = first;
        while let Some(item) = next {
            if let Item::Record(record) = item {
                batch.add(&record);
            }
            if batch.bytes.len() >= BATCH {
                pen.write(&mut batch);
            }
            next = records.try_recv().ok();
        }
        pen.write(&mut batch);
        if ends {
            return;
        }
        std::thread::sleep(REST);
    }
}

/// Lines that are written together.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    lines: u64,
}

impl Batch {
    fn add(&mut self, record: &Record) {
        match line::write(&mut self.bytes, record) {
            Ok(()) => self.lines += 1,
            Err(error) => tracing::error!(%error, "a request has no line in JSON"),
        }
    }
}

/// Writes, and knows how that went.
struct Pen {
    out: Out,
    written: Counter,
    failed: Counter,
    /// The last line was cut off by an error.
    is_torn: bool,
    /// The last write failed, and that was told.
    is_failing: bool,
    /// The file could not be opened again, and that was told.
    is_stuck: bool,
}

impl Pen {
    /// Writes a batch, and empties it. Lines that cannot be written are lost.
    fn write(&mut self, batch: &mut Batch) {
        if batch.lines == 0 {
            return;
        }
        // The rest of a line that was cut off must not swallow the next.
        let healed = if self.is_torn { self.out.write_all(b"\n").1 } else { Ok(()) };
        let (done, result) = match healed {
            Ok(()) => {
                self.is_torn = false;
                self.out.write_all(&batch.bytes)
            }
            Err(error) => (0, Err(error)),
        };
        let done = &batch.bytes[..done];
        let lines = if result.is_ok() {
            batch.lines
        } else {
            u64::try_from(done.split(|byte| *byte == b'\n').skip(1).count()).unwrap_or(batch.lines)
        };
        self.is_torn |= done.last().is_some_and(|last| *last != b'\n');
        self.written.inc_by(lines);
        self.failed.inc_by(batch.lines - lines);
        self.tell(&result);
        batch.bytes.clear();
        batch.lines = 0;
    }

    /// Says once that writing fails, and once that it works again.
    fn tell(&mut self, result: &io::Result<()>) {
        match result {
            Err(error) if !self.is_failing => {
                tracing::warn!(%error, "the access log cannot be written: lines are dropped and counted");
            }
            Ok(()) if self.is_failing => tracing::info!("the access log is written again"),
            _ => {}
        }
        self.is_failing = result.is_err();
    }

    fn reopen(&mut self) {
        match self.out.reopened() {
            Ok(None) => {}
            Ok(Some(out)) => {
                self.out = out;
                (self.is_torn, self.is_stuck) = (false, false);
                tracing::info!("the access log is opened again");
            }
            // What is open goes on: better a line in a renamed file than none.
            Err(error) => {
                if !self.is_stuck {
                    tracing::warn!(%error, "the access log cannot be opened again: the file that is open goes on");
                }
                self.is_stuck = true;
            }
        }
    }
}

/// An open destination.
enum Out {
    /// With the path that it was opened by, where it was.
    File(Option<PathBuf>, File),
    #[cfg(test)]
    Other(Box<dyn Write + Send>),
}

impl Out {
    fn open(destination: &Destination) -> Result<Self, OpenError> {
        match destination {
            // A descriptor of its own: nothing is held back in the library's buffer, so that each error is seen at once.
            Destination::Stdout => match io::stdout().as_fd().try_clone_to_owned() {
                Ok(stdout) => Ok(Self::File(None, stdout.into())),
                Err(error) => Err(OpenError::Stdout(error)),
            },
            Destination::File(path) => {
                let file = open(path).map_err(|error| OpenError::File(path.clone(), error))?;
                Ok(Self::File(Some(path.clone()), file))
            }
        }
    }

    /// Writes as much as it can; says how much that was.
    fn write_all(&mut self, bytes: &[u8]) -> (usize, io::Result<()>) {
        let out: &mut dyn Write = match self {
            Self::File(_, file) => file,
            #[cfg(test)]
            Self::Other(out) => out,
        };
        let mut done = 0;
        while done < bytes.len() {
            match out.write(&bytes[done..]) {
                Ok(0) => return (done, Err(io::ErrorKind::WriteZero.into())),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (done, Err(error)),
            }
        }
        (done, Ok(()))
    }

    fn path(&self) -> Option<(&Path, &File)> {
        match self {
            Self::File(path, file) => Some((path.as_deref()?, file)),
            #[cfg(test)]
            Self::Other(_) => None,
        }
    }

    /// Whether the file is no longer the one at its path: somebody renamed or removed it.
    fn is_moved(&self) -> bool {
        let Some((path, file)) = self.path() else { return false };
        let same = |open: &Metadata, there: &Metadata| (open.dev(), open.ino()) == (there.dev(), there.ino());
        match (file.metadata(), std::fs::metadata(path)) {
            (Ok(open), Ok(there)) => !same(&open, &there),
            (Ok(_), Err(error)) => error.kind() == io::ErrorKind::NotFound,
            (Err(_), _) => false,
        }
    }

    /// The same path opened anew, where it is one.
    fn reopened(&self) -> io::Result<Option<Self>> {
        let Some((path, _)) = self.path() else { return Ok(None) };
        open(path).map(|file| Some(Self::File(Some(path.to_owned()), file)))
    }
}

/// Opens a file to add lines to it; a new one is for its owner and group only, since it says who asked for what. A pipe
/// that nobody reads is refused instead of waited for.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o640).custom_flags(libc::O_NONBLOCK).open(path)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::telemetry::access::End;

    /// For a thread that is waited for.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn record(id: usize) -> Box<Record> {
        let address = "127.0.0.1:1".parse().unwrap();
        let mut record = Record::new(clock::now(), clock::wall(), address, address);
        record.request_id = Some(id.to_string().into());
        record.ended(End::Complete);
        Box::new(record)
    }

    fn ids(text: &str) -> Vec<String> {
        let read = |line| serde_json::from_str::<serde_json::Value>(line).ok();
        text.lines().filter_map(read).map(|line| line["request_id"].as_str().unwrap().to_owned()).collect()
    }

    fn eventually(what: &str, condition: impl Fn() -> bool) {
        let give_up = clock::now() + PATIENCE;
        while !condition() {
            assert!(clock::now() < give_up, "waited in vain for: {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn dropped(metrics: &Metrics, reason: &str) -> u64 {
        metrics.access_log_dropped.with_label_values(&[reason]).get()
    }

    fn to_file(path: &Path, metrics: &Metrics) -> (AccessLog, Writer) {
        AccessLog::open(Sampling::Full, &Destination::File(path.into()), metrics).unwrap().unwrap()
    }

    #[test]
    fn what_is_put_is_written_before_the_end() {
        let (dir, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let path = dir.path().join("log");
        std::fs::write(&path, "{\"request_id\": \"old\"}\n").unwrap();
        let (log, writer) = to_file(&path, &metrics);
        (0..1000).for_each(|id| log.put(record(id)));
        writer.finish(PATIENCE);
        let expected: Vec<String> =
            std::iter::once("old".to_owned()).chain((0..1000).map(|id| id.to_string())).collect();
        assert_eq!(ids(&std::fs::read_to_string(&path).unwrap()), expected);
        assert_eq!(metrics.access_log_lines.get(), 1000);
        log.put(record(0));
        assert_eq!(dropped(&metrics, "queue_full"), 1, "nobody writes any more");
    }

    #[test]
    fn a_renamed_file_is_left_to_itself() {
        let (dir, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let (path, old) = (dir.path().join("log"), dir.path().join("log.1"));
        let (log, writer) = to_file(&path, &metrics);
        log.put(record(1));
        eventually("the first line", || metrics.access_log_lines.get() == 1);
        std::fs::rename(&path, &old).unwrap();
        eventually("a new file, without being told", || path.exists());
        log.put(record(2));
        eventually("the second line", || metrics.access_log_lines.get() == 2);
        std::fs::remove_file(&path).unwrap();
        log.reopen();
        eventually("a new file, when told", || path.exists());
        log.put(record(3));
        writer.finish(PATIENCE);
        let read = |path: &Path| ids(&std::fs::read_to_string(path).unwrap());
        assert_eq!((read(&old), read(&path)), (vec!["1".to_owned()], vec!["3".to_owned()]));
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_named() {
        let (dir, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let path = dir.path().join("none").join("log");
        let error = AccessLog::open(Sampling::Full, &Destination::File(path.clone()), &metrics).unwrap_err();
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        assert!(AccessLog::open(Sampling::Off, &Destination::File(path), &metrics).unwrap().is_none());
    }

    #[test]
    fn a_full_disk_is_counted_and_the_lines_behind_it_are_whole() {
        /// Takes so many bytes, then none until it is emptied.
        struct Disk(Arc<parking_lot::Mutex<(Vec<u8>, usize)>>);
        impl Write for Disk {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                let mut disk = self.0.lock();
                let count = bytes.len().min(disk.1);
                if count == 0 {
                    return Err(io::Error::from_raw_os_error(libc::ENOSPC));
                }
                disk.1 -= count;
                disk.0.extend_from_slice(&bytes[..count]);
                Ok(count)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let disk = Arc::new(parking_lot::Mutex::new((Vec::new(), 1000)));
        let metrics = Metrics::new().unwrap();
        let out = Out::Other(Box::new(Disk(Arc::clone(&disk))));
        let (log, writer) = AccessLog::start(Sampling::Full, out, &metrics).unwrap();
        (0..100).for_each(|id| log.put(record(id)));
        eventually("all is written or lost", || {
            metrics.access_log_lines.get() + dropped(&metrics, "write_failed") == 100
        });
        let whole = metrics.access_log_lines.get();
        assert!(whole > 0 && whole < 10, "{whole} lines in 1000 bytes");
        disk.lock().1 = 1 << 20;
        (100..110).for_each(|id| log.put(record(id)));
        writer.finish(PATIENCE);
        let expected: Vec<String> = (0..whole).chain(100..110).map(|id| id.to_string()).collect();
        assert_eq!(ids(std::str::from_utf8(&disk.lock().0).unwrap()), expected);
        assert_eq!(metrics.access_log_lines.get(), whole + 10);
    }

    #[test]
    fn a_pipe_that_nobody_reads_drops_lines_and_holds_up_nobody() {
        /// Takes nothing until told.
        struct Stuck(mpsc::Receiver<()>);
        impl Write for Stuck {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                assert!(self.0.recv().is_err());
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (release, held) = mpsc::channel::<()>();
        let metrics = Metrics::new().unwrap();
        let (log, writer) = AccessLog::start(Sampling::Full, Out::Other(Box::new(Stuck(held))), &metrics).unwrap();
        // More than the queue, a batch and what is being written can hold.
        let sent = 2 * QUEUE + BATCH;
        (0..sent).for_each(|id| log.put(record(id)));
        let lost = dropped(&metrics, "queue_full");
        assert!(lost > 0);
        drop(release);
        writer.finish(PATIENCE);
        assert_eq!(metrics.access_log_lines.get() + lost, sent as u64, "each is written or counted");
    }
}

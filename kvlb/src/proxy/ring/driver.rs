//! One thread's ring: what is asked of the kernel, and what it has answered.
//!
//! An operation owns all that the kernel touches for it: the socket, so that its number is not given to another connection
//! meanwhile, and the buffer or address. Its owner lives in the [`Driver`], so a future that is dropped takes nothing away
//! from under the kernel; the last completion lets go of it.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use nix::errno::Errno;
use slab::Slab;
use socket2::SockAddr;

use super::batch::{Batch, Length};
use super::bell::Bell;
use crate::clock;
use crate::proxy::buffer::Chunk;

/// Submission queue entries of one thread's ring. A full queue is flushed early; the completion queue has twice as many
/// and the kernel keeps what does not fit.
const ENTRIES: u32 = 4096;

/// Completions whose operation nobody is interested in: those of cancellations.
const NOBODY: u64 = u64::MAX;

/// How long operations that were called off may take to end when a thread ends.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Waits for something to read before the first try, which would find nothing. From Linux 5.19. Source: `IORING_RECVSEND_POLL_FIRST` of
/// `linux/io_uring.h`.
const POLL_FIRST: u16 = 1;

/// Whether this kernel lets us use io_uring with all that this back end asks of it.
pub(in crate::proxy) fn available() -> io::Result<()> {
    let ring: IoUring = IoUring::builder().build(8)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::AsyncCancel::CODE,
        opcode::Connect::CODE,
        opcode::PollAdd::CODE,
        opcode::Read::CODE,
        opcode::Recv::CODE,
        opcode::Send::CODE,
    ];
    let parameters = ring.params();
    let waits = parameters.is_feature_ext_arg() && parameters.is_feature_nodrop();
    if waits && needed.into_iter().all(|code| probe.is_supported(code)) {
        Ok(())
    } else {
        Err(io::Error::new(ErrorKind::Unsupported, "the kernel's io_uring lacks socket operations or timed waits"))
    }
}

/// A socket, and when it was last heard of.
#[derive(Debug)]
pub(super) struct Socket<S> {
    pub(super) inner: S,
    /// The window of [`Batch`] in which something of it came.
    heard: Cell<u32>,
}

impl<S> Socket<S> {
    pub(super) fn new(inner: S) -> Rc<Self> {
        Rc::new(Self { inner, heard: Cell::new(0) })
    }
}

/// A connection's socket, and a listening one.
pub(super) type Connected = Socket<std::net::TcpStream>;
pub(super) type Listening = Socket<std::net::TcpListener>;

/// An operation, with all that the kernel works on.
#[derive(Debug)]
pub(super) enum Work {
    /// Waits for events of a connection.
    Watch { socket: Rc<Connected>, events: i16 },
    /// Waits for a client.
    Expect(Rc<Listening>),
    /// Reads behind what the chunk holds. `later`: there is nothing to read yet, as far as is known.
    Receive { socket: Rc<Connected>, chunk: Chunk, later: bool },
    /// Writes what the chunk holds behind its first `sent` bytes.
    Send { socket: Rc<Connected>, chunk: Chunk, sent: usize },
    /// Connects. The address is boxed: its place in memory must not change.
    Connect { socket: Rc<Connected>, target: Box<SockAddr> },
    /// Waits for other threads.
    Listen { bell: Arc<Bell>, strokes: Box<[u8; 8]> },
}

fn fd(socket: &impl AsRawFd) -> types::Fd {
    types::Fd(socket.as_raw_fd())
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

impl Work {
    /// What the kernel is told. Whatever it points to is on the heap and belongs to this.
    fn entry(&mut self) -> squeue::Entry {
        match self {
            Self::Watch { socket, events } => {
                opcode::PollAdd::new(fd(&socket.inner), u32::from(events.cast_unsigned())).build()
            }
            Self::Expect(socket) => {
                opcode::PollAdd::new(fd(&socket.inner), u32::from(libc::POLLIN.cast_unsigned())).build()
            }
            Self::Receive { socket, chunk, later } => {
                let room = chunk.slice_mut();
                let length = length(room);
                let how = if *later { POLL_FIRST } else { 0 };
                opcode::Recv::new(fd(&socket.inner), room.as_mut_ptr(), length).ioprio(how).build()
            }
            Self::Send { socket, chunk, sent } => {
                let rest = &chunk.bytes()[*sent..];
                // MSG_WAITALL: a short send goes on in the kernel instead of coming back here.
                let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
                opcode::Send::new(fd(&socket.inner), rest.as_ptr(), length(rest)).flags(flags).build()
            }
            Self::Connect { socket, target } => {
                opcode::Connect::new(fd(&socket.inner), target.as_ptr().cast(), target.len()).build()
            }
            Self::Listen { bell, strokes } => {
                opcode::Read::new(types::Fd(bell.as_raw_fd()), strokes.as_mut_ptr(), length(&strokes[..])).build()
            }
        }
    }

    /// Notes that its socket was heard of in `window`, and says whether it was for the first time.
    fn heard(&self, window: u32) -> bool {
        let heard = match self {
            Self::Watch { socket, .. }
            | Self::Receive { socket, .. }
            | Self::Send { socket, .. }
            | Self::Connect { socket, .. } => &socket.heard,
            Self::Expect(socket) => &socket.heard,
            Self::Listen { .. } => return false,
        };
        heard.replace(window) != window
    }

    /// The bytes of a transfer.
    pub(super) fn into_chunk(self) -> Chunk {
        match self {
            Self::Receive { chunk, .. } | Self::Send { chunk, .. } => chunk,
            _no_transfer => Chunk::none(),
        }
    }
}

/// An operation's place.
#[derive(Debug)]
struct Slot {
    /// Tells it from others that had the place before.
    serial: u32,
    work: Work,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The kernel is at it, and this task wants to know.
    Flying(Option<Waker>),
    /// It has ended so.
    Landed(Landing),
    /// The kernel is at it, and nobody wants to know.
    Forgotten,
}

/// How an operation ended: its result and its flags, in the kernel's words.
type Landing = (i32, u32);

/// A thread's ring.
pub(super) struct Driver {
    ring: RefCell<IoUring>,
    /// Whether operations may be told to wait before they try.
    may_wait_first: bool,
    slots: RefCell<Slab<Slot>>,
    serials: Cell<u32>,
    batch: RefCell<Batch>,
    bell: Arc<Bell>,
    /// Completions on their way from the ring to their operations. Kept for its memory.
    landing: RefCell<Vec<(u64, Landing)>>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("operations", &self.slots.borrow().len()).finish_non_exhaustive()
    }
}

/// The ring with the best manners that the kernel knows: completions are picked up when the thread enters the kernel anyway
/// (from Linux 6.1), at least without interrupting it (5.19), or as it was before. The last two know no [`POLL_FIRST`] for sure.
fn build() -> io::Result<(IoUring, bool)> {
    let deferred = IoUring::builder().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().build(ENTRIES);
    if let Ok(ring) = deferred {
        return Ok((ring, true));
    }
    let polite = IoUring::builder().setup_coop_taskrun().setup_taskrun_flag().build(ENTRIES);
    polite.or_else(|_older_kernel| IoUring::builder().build(ENTRIES)).map(|ring| (ring, false))
}

impl Driver {
    /// A ring for the calling thread, which `bell` wakes.
    pub(super) fn new(bell: &Arc<Bell>) -> io::Result<Rc<Self>> {
        let (ring, may_wait_first) = build()?;
        let batch = Batch::new(clock::now());
        let driver = Rc::new(Self {
            ring: RefCell::new(ring),
            may_wait_first,
            slots: RefCell::default(),
            serials: Cell::default(),
            batch: RefCell::new(batch),
            bell: Arc::clone(bell),
            landing: RefCell::default(),
        });
        drop(driver.start(Work::Listen { bell: Arc::clone(bell), strokes: Box::default() }));
        Ok(driver)
    }

    /// Starts an operation. The kernel hears of it at the end of the thread's turn, together with others.
    pub(super) fn start(self: &Rc<Self>, mut work: Work) -> Operation {
        let serial = self.serials.get();
        self.serials.set(serial.wrapping_add(1));
        let entry = work.entry();
        let key = self.slots.borrow_mut().insert(Slot { serial, work, state: State::Flying(None) });
        if let Err(error) = self.push(&entry.user_data(ticket(key, serial))) {
            self.land(ticket(key, serial), (-error.raw_os_error().unwrap_or(libc::EBUSY), 0));
        }
        Operation { driver: Rc::clone(self), key: Some(key) }
    }

    /// Whether a read may wait for something to come before it tries.
    pub(super) fn may_wait_first(&self) -> bool {
        self.may_wait_first
    }

    /// Puts an entry into the queue, which is flushed where it is full.
    fn push(&self, entry: &squeue::Entry) -> io::Result<()> {
        // A kernel that has too many completions to tell wants them to be heard first.
        for _attempt in 0..3 {
            {
                let mut ring = self.ring.borrow_mut();
                // SAFETY: all that an operation's entry points to belongs to its work, is on the heap, and stays in its slot until
                // the kernel has answered. A cancellation's entry points to nothing.
                #[expect(unsafe_code, reason = "the kernel works on memory that the type system cannot see it borrow")]
                let pushed = unsafe { ring.submission().push(entry) };
                if pushed.is_ok() {
                    return Ok(());
                }
            }
            self.flush()?;
            self.hear();
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Tells the kernel all that is in the queue, and has it finish what it put off.
    fn flush(&self) -> io::Result<()> {
        passable(self.ring.borrow().submitter().submit())
    }

    /// Ends a turn of the thread's tasks: tells the kernel what they ask, waits until `until` for something to do where the
    /// thread `may_rest`, and hands out what has ended.
    pub(super) fn turn(&self, may_rest: bool, until: Option<Instant>) -> io::Result<()> {
        let batch = if may_rest { self.batch.borrow().length() } else { None };
        if !may_rest || batch.is_some() {
            if self.has_news() {
                self.flush()?;
            }
            if self.hear() > 0 || !may_rest {
                return Ok(());
            }
        }
        if let Some(Length { events, time }) = batch {
            let gathered = clock::now() + time;
            self.rest(events, Some(until.map_or(gathered, |until| until.min(gathered))))?;
            if self.hear() > 0 || self.bell.is_rung() || until.is_some_and(|until| until <= gathered) {
                return Ok(());
            }
        }
        self.rest(1, until)?;
        self.hear();
        Ok(())
    }

    /// Whether there is anything to tell the kernel, or to have it finish.
    fn has_news(&self) -> bool {
        let mut ring = self.ring.borrow_mut();
        let queue = ring.submission();
        !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
    }

    /// Waits for so many events until then, unless another thread has rung.
    ///
    /// For several there is a minimal time in the kernel, too (from Linux 6.12), which does not do: what has ended when such a wait
    /// begins does not count, and would wait for the next that ends behind it.
    fn rest(&self, events: usize, until: Option<Instant>) -> io::Result<()> {
        if !self.bell.lie_down() {
            return self.flush();
        }
        let time = until.map(|until| types::Timespec::from(until.saturating_duration_since(clock::now())));
        let args = types::SubmitArgs::new();
        let args = time.as_ref().map_or(args, |time| args.timespec(time));
        let rested = passable(self.ring.borrow().submitter().submit_with_args(events, &args));
        self.bell.get_up();
        rested
    }

    /// Hands out what has ended, and says how much it was.
    fn hear(&self) -> usize {
        let mut landing = self.landing.take();
        let ended = |entry: cqueue::Entry| (entry.user_data(), (entry.result(), entry.flags()));
        landing.extend(self.ring.borrow_mut().completion().map(ended));
        let (count, window) = (landing.len(), self.batch.borrow().window());
        let mut first_heard = 0;
        for (ticket, result) in landing.drain(..) {
            first_heard += usize::from(self.note(ticket, window));
            self.land(ticket, result);
        }
        self.landing.replace(landing);
        if count > 0 {
            self.batch.borrow_mut().heard(count, first_heard);
        }
        count
    }

    fn note(&self, ticket: u64, window: u32) -> bool {
        place(ticket).is_some_and(|key| self.slots.borrow().get(key).is_some_and(|slot| slot.work.heard(window)))
    }

    /// An operation has ended. Nothing is borrowed while its task is woken or its work let go of.
    fn land(&self, ticket: u64, result: Landing) {
        let Some(key) = place(ticket) else { return };
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(key).filter(|slot| ticket == self::ticket(key, slot.serial)) else { return };
        match std::mem::replace(&mut slot.state, State::Landed(result)) {
            State::Flying(waker) => {
                drop(slots);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            State::Forgotten if matches!(slot.work, Work::Listen { .. }) && result.0 >= 0 => {
                slot.state = State::Forgotten;
                let entry = slot.work.entry().user_data(ticket);
                drop(slots);
                if let Err(error) = self.push(&entry) {
                    tracing::error!(%error, "a data thread no longer hears others while it waits");
                }
            }
            State::Forgotten | State::Landed(_) => {
                let slot = slots.remove(key);
                drop(slots);
                drop(slot);
            }
        }
    }

    /// Has the kernel give an operation up. Its end comes as any other.
    fn call_off(&self, key: usize) {
        let Some(serial) = self.slots.borrow().get(key).map(|slot| slot.serial) else { return };
        // One that cannot be called off ends when its socket has something to tell.
        let entry = opcode::AsyncCancel::new(ticket(key, serial)).build().user_data(NOBODY);
        if let Err(error) = self.push(&entry) {
            tracing::debug!(%error, "an operation is not called off");
        }
    }

    /// Ends every operation. Those that the kernel does not let go of within a second keep their memory for good.
    pub(super) fn end(&self) {
        let until = clock::now() + LAST_WORDS;
        let under_way: Vec<_> = self.slots.borrow().iter().map(|(key, _slot)| key).collect();
        for key in under_way {
            self.call_off(key);
        }
        while !self.slots.borrow().is_empty() && clock::now() < until {
            let waited = self.flush().and_then(|()| self.rest(1, Some(clock::now() + LAST_WORDS / 20)));
            if let Err(error) = waited {
                tracing::warn!(%error, "a data thread's ring ends early");
                break;
            }
            self.hear();
        }
        let left = self.slots.take();
        if !left.is_empty() {
            tracing::warn!(operations = left.len(), "the kernel keeps operations of a thread that has ended");
            std::mem::forget(left);
        }
    }
}

/// Errors of an entry that mean no more than that there is something else to do first.
fn passable(entered: io::Result<usize>) -> io::Result<()> {
    match entered {
        Ok(_count) => Ok(()),
        Err(error) => match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ETIME | Errno::EINTR | Errno::EBUSY | Errno::EAGAIN) => Ok(()),
            _other => Err(error),
        },
    }
}

/// What a completion carries of its operation: its place, and which of those that had the place it is.
fn ticket(key: usize, serial: u32) -> u64 {
    u64::from(serial) << 32 | (key as u64 & u64::from(u32::MAX))
}

/// The place.
fn place(ticket: u64) -> Option<usize> {
    (ticket != NOBODY).then(|| usize::try_from(ticket & u64::from(u32::MAX)).ok()).flatten()
}

/// An operation that succeeded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    /// Bytes, or events.
    pub(super) moved: u32,
    /// A read left nothing behind.
    pub(super) is_dry: bool,
}

/// An operation under way. Dropped before its end, it goes on, and what it owns lives as long.
#[derive(Debug)]
pub(super) struct Operation {
    driver: Rc<Driver>,
    key: Option<usize>,
}

impl Operation {
    /// Has the kernel give it up.
    pub(super) fn call_off(self) {
        if let Some(key) = self.key {
            self.driver.call_off(key);
        }
    }
}

impl Future for Operation {
    /// How it ended, with its work. `ECANCELED` where it has been asked before.
    type Output = (io::Result<Ended>, Option<Work>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let unknown = || (Err(io::Error::from_raw_os_error(libc::ECANCELED)), None);
        let Some(key) = self.key else { return Poll::Ready(unknown()) };
        let ended = {
            let mut slots = self.driver.slots.borrow_mut();
            match slots.get_mut(key).map(|slot| &mut slot.state) {
                Some(State::Flying(Some(waker))) if waker.will_wake(cx.waker()) => return Poll::Pending,
                Some(State::Flying(waker)) => {
                    let before = waker.replace(cx.waker().clone());
                    drop(slots);
                    drop(before);
                    return Poll::Pending;
                }
                Some(State::Landed(_)) => Some(slots.remove(key)),
                Some(State::Forgotten) | None => None,
            }
        };
        self.key = None;
        Poll::Ready(match ended {
            Some(Slot { work, state: State::Landed((result, flags)), .. }) => {
                let ended = |moved| Ended { moved, is_dry: !cqueue::sock_nonempty(flags) };
                let result = u32::try_from(result).map_err(|_negative| io::Error::from_raw_os_error(-result));
                (result.map(ended), Some(work))
            }
            _gone => unknown(),
        })
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut slots = self.driver.slots.borrow_mut();
        let Some(slot) = slots.get_mut(key) else { return };
        if matches!(slot.state, State::Landed(_)) {
            let slot = slots.remove(key);
            drop(slots);
            drop(slot);
        } else {
            let before = std::mem::replace(&mut slot.state, State::Forgotten);
            drop(slots);
            drop(before);
        }
    }
}

//! The io_uring back end: the one file that knows tokio-uring.
//!
//! tokio-uring 0.5 gives the runtime and carries single-completion operations (`UnsubmittedOneshot`). Its own stream type
//! has no poll, no connect that can be abandoned and no way to end a read, so this file builds the five operations it
//! needs itself. Every operation owns what the kernel touches: the socket, so that its number is not given to another
//! connection while the kernel still works on it, and the buffer or address. tokio-uring keeps that owner alive until the
//! completion comes even when the future is dropped. Dropping a stream therefore shuts the socket down, which makes
//! whatever is in flight complete at once, and the last completion closes it.
//!
//! Sockets are in blocking mode, because io_uring answers `EAGAIN` instead of waiting on a non-blocking one. The listener
//! is non-blocking: it is polled and then emptied with `accept4`, so that no connection is ever taken by an operation that
//! nobody waits for any more.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use io_uring::{cqueue, opcode, squeue, types};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};
use tokio_uring::{InFlightOneshot, OneshotOutputTransform, UnsubmittedOneshot};

use super::buffer::{Chunk, SMALL};
use super::io::{Backend, Leaving, Listener, Stream, keepalive, shut, silent};

/// Submission queue entries of one thread's ring. A full queue is flushed early; the completion queue has twice as many
/// and the kernel keeps what does not fit.
const ENTRIES: u32 = 4096;

/// Events that tell of a peer's leaving while its data may lie unread. `POLLHUP` and `POLLERR` are always told.
const LEFT: i16 = libc::POLLRDHUP;
/// Events that end the wait for something to read.
const READABLE: i16 = libc::POLLIN | libc::POLLRDHUP;

/// Whether this kernel lets us use io_uring with every operation that this file submits.
pub(super) fn available() -> io::Result<()> {
    let ring: io_uring::IoUring = io_uring::IoUring::builder().build(8)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [opcode::Recv::CODE, opcode::Send::CODE, opcode::PollAdd::CODE, opcode::Connect::CODE];
    if needed.into_iter().all(|code| probe.is_supported(code)) {
        Ok(())
    } else {
        Err(io::Error::new(ErrorKind::Unsupported, "the kernel's io_uring lacks socket operations"))
    }
}

/// The back end.
#[derive(Debug)]
pub(super) struct Uring;

impl Backend for Uring {
    type Stream = UringStream;
    type Listener = UringListener;

    fn block_on<F: Future>(main: F) -> io::Result<F::Output> {
        // Completions are picked up when the thread enters the kernel anyway, without interrupting it (from Linux 5.19).
        let mut polite = tokio_uring::uring_builder();
        polite.setup_coop_taskrun().setup_taskrun_flag();
        let plain = tokio_uring::uring_builder();
        let start = |ring| tokio_uring::Runtime::new(tokio_uring::builder().entries(ENTRIES).uring_builder(ring));
        let runtime = start(&polite).or_else(|_older_kernel| start(&plain))?;
        Ok(runtime.block_on(main))
    }

    fn listen(listener: TcpListener) -> io::Result<UringListener> {
        listener.set_nonblocking(true)?;
        SockRef::from(&listener).set_tcp_nodelay(true)?;
        Ok(UringListener { socket: Rc::new(listener), wait: RefCell::default() })
    }

    async fn connect(address: SocketAddr) -> io::Result<UringStream> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_tcp_nodelay(true)?;
        socket.set_tcp_keepalive(&keepalive())?;
        let stream = UringStream::new(socket.into());
        let target = Box::new(SockAddr::from(address));
        let entry = opcode::Connect::new(fd(&*stream.socket), target.as_ptr().cast(), target.len()).build();
        let owned = Connecting { _socket: Rc::clone(&stream.socket), _target: target };
        UnsubmittedOneshot::new(owned, Connected, entry).submit().await?;
        Ok(stream)
    }
}

fn fd(socket: &impl AsRawFd) -> types::Fd {
    types::Fd(socket.as_raw_fd())
}

/// The bytes that a completion moved, or its error.
fn moved(completion: &cqueue::Entry) -> io::Result<usize> {
    usize::try_from(completion.result()).map_err(|_negative| io::Error::from_raw_os_error(-completion.result()))
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct UringListener {
    socket: Rc<TcpListener>,
    wait: RefCell<Option<Wait<TcpListener>>>,
}

impl Listener for UringListener {
    type Stream = UringStream;

    async fn accept(&self) -> io::Result<(UringStream, SocketAddr)> {
        loop {
            match self.socket.accept() {
                Ok((socket, client)) => return Ok((UringStream::new(socket), client)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    poll_fn(|cx| poll_wait(&self.wait, &self.socket, libc::POLLIN, cx)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn stop(&self) {
        shut(&*self.socket, Shutdown::Read);
    }

    fn lend(&self) -> io::Result<OwnedFd> {
        self.socket.as_fd().try_clone_to_owned()
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct UringStream {
    socket: Rc<TcpStream>,
    /// The wait for something to read; kept when its future is dropped, and picked up by the next.
    readable: RefCell<Option<Wait<TcpStream>>>,
    /// The wait for the peer's leaving. One operation lasts for the connection's life, whatever it carries.
    left: RefCell<Option<Wait<TcpStream>>>,
    half_closed: Cell<bool>,
    broken: Cell<bool>,
    reset: Cell<bool>,
    /// The last wait said that there is something to read.
    ripe: Cell<bool>,
}

impl UringStream {
    fn new(socket: TcpStream) -> Self {
        Self {
            socket: Rc::new(socket),
            readable: RefCell::default(),
            left: RefCell::default(),
            half_closed: Cell::new(false),
            broken: Cell::new(false),
            reset: Cell::new(false),
            ripe: Cell::new(false),
        }
    }

    fn transfer(&self, chunk: Chunk, entry: squeue::Entry) -> InFlightOneshot<Transfer, Transferred> {
        let owned = Transfer { _socket: Rc::clone(&self.socket), chunk };
        UnsubmittedOneshot::new(owned, Transferred, entry).submit()
    }

    /// Sends what lies behind the first `sent` bytes.
    fn send(&self, chunk: Chunk, sent: usize) -> InFlightOneshot<Transfer, Transferred> {
        let rest = &chunk.bytes()[sent..];
        let length = u32::try_from(rest.len()).unwrap_or(u32::MAX);
        // MSG_WAITALL: a short send goes on in the kernel instead of coming back here.
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let entry = opcode::Send::new(fd(&*self.socket), rest.as_ptr(), length).flags(flags).build();
        self.transfer(chunk, entry)
    }
}

impl Stream for UringStream {
    type Read<'a> = Reading;
    type Write<'a> = Writing<'a>;

    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        poll_wait(&self.readable, &self.socket, READABLE, cx).map(|_events| self.ripe.set(true))
    }

    fn poll_closed(&self, leaving: Leaving, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.broken.get() || (leaving == Leaving::HalfClose && self.half_closed.get()) {
                return Poll::Ready(());
            }
            let events = if self.half_closed.get() { 0 } else { LEFT };
            match poll_wait(&self.left, &self.socket, events, cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(events) if events & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 => {
                    self.broken.set(true);
                }
                Poll::Ready(_) => self.half_closed.set(true),
            }
        }
    }

    /// What a wait has found is taken at once: an operation for it would cost a turn of its own. Sends are always operations, which
    /// leave together at the end of a turn of the loop: engines and clients on other cores then sleep and wake less often.
    fn read(&self, mut into: Chunk) -> Reading {
        let room = into.slice_mut();
        if self.ripe.take() {
            match recv(self.socket.as_raw_fd(), room, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                done => {
                    // A small room that is full says that there is more, such as a body behind its head. A large one waits for its
                    // turn: others have theirs in between.
                    self.ripe.set(room.len() <= SMALL && done == Ok(room.len()));
                    return Reading(Progress::Done(Some((done.map_err(io::Error::from), into))));
                }
            }
        }
        let room = into.slice_mut();
        let length = u32::try_from(room.len()).unwrap_or(u32::MAX);
        let entry = opcode::Recv::new(fd(&*self.socket), room.as_mut_ptr(), length).build();
        Reading(Progress::Flying(self.transfer(into, entry)))
    }

    fn write_all(&self, from: Chunk) -> Writing<'_> {
        Writing { stream: self, sent: 0, transfer: self.send(from, 0) }
    }

    fn silent(&self) -> bool {
        silent(&*self.socket)
    }

    fn finish(&self) {
        shut(&*self.socket, Shutdown::Write);
    }

    fn abort(&self) {
        shut(&*self.socket, Shutdown::Both);
    }

    fn reset_on_close(&self) {
        // A connection that refuses the option is closed the ordinary way.
        self.reset.set(SockRef::from(&*self.socket).set_linger(Some(Duration::ZERO)).is_ok());
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

impl Drop for UringStream {
    fn drop(&mut self) {
        if Rc::strong_count(&self.socket) == 1 {
            return;
        }
        // The end of the receiving side alone sends nothing, so the close that follows can still be a reset. It wakes every
        // wait but the one for a break behind a half-close.
        let gently = self.reset.get() && !self.half_closed.get();
        shut(&*self.socket, if gently { Shutdown::Read } else { Shutdown::Both });
    }
}

/// A read: what was there was taken at once, and only what has to be waited for is an operation.
pub(super) struct Reading(Progress);

/// What is known already, or is known when an operation ends.
enum Progress {
    Done(Option<(io::Result<usize>, Chunk)>),
    Flying(InFlightOneshot<Transfer, Transferred>),
}

impl Future for Reading {
    type Output = (io::Result<usize>, Chunk);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (result, mut chunk) = match &mut self.0 {
            Progress::Done(done) => done.take().unwrap_or_else(|| (Err(ErrorKind::Other.into()), Chunk::none())),
            Progress::Flying(transfer) => ready!(Pin::new(transfer).poll(cx)),
        };
        if let Ok(count) = result {
            chunk.advance(count);
        }
        Poll::Ready((result, chunk))
    }
}

/// A write under way.
pub(super) struct Writing<'a> {
    stream: &'a UringStream,
    sent: usize,
    transfer: InFlightOneshot<Transfer, Transferred>,
}

impl Future for Writing<'_> {
    type Output = (io::Result<()>, Chunk);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let (result, chunk) = ready!(Pin::new(&mut self.transfer).poll(cx));
            match result {
                Ok(count) if self.sent + count >= chunk.len() => return Poll::Ready((Ok(()), chunk)),
                Ok(0) => return Poll::Ready((Err(ErrorKind::WriteZero.into()), chunk)),
                Ok(count) => {
                    self.sent += count;
                    self.transfer = self.stream.send(chunk, self.sent);
                }
                Err(error) => return Poll::Ready((Err(error), chunk)),
            }
        }
    }
}

/// What a transfer owns while the kernel works on it.
struct Transfer {
    _socket: Rc<TcpStream>,
    chunk: Chunk,
}

struct Transferred;

impl OneshotOutputTransform for Transferred {
    type Output = (io::Result<usize>, Chunk);
    type StoredData = Transfer;

    fn transform_oneshot_output(self, data: Transfer, completion: cqueue::Entry) -> Self::Output {
        (moved(&completion), data.chunk)
    }
}

/// What a connect owns while the kernel works on it. The address is boxed: its place in memory must not change.
struct Connecting {
    _socket: Rc<TcpStream>,
    _target: Box<SockAddr>,
}

struct Connected;

impl OneshotOutputTransform for Connected {
    type Output = io::Result<()>;
    type StoredData = Connecting;

    fn transform_oneshot_output(self, _data: Connecting, completion: cqueue::Entry) -> Self::Output {
        moved(&completion).map(|_zero| ())
    }
}

/// A poll of a socket that is under way.
struct Wait<S: 'static>(InFlightOneshot<Rc<S>, Polled<S>>);

impl<S> std::fmt::Debug for Wait<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wait")
    }
}

struct Polled<S>(std::marker::PhantomData<S>);

impl<S> OneshotOutputTransform for Polled<S> {
    type Output = i16;
    type StoredData = Rc<S>;

    /// The events that ended the wait. A poll that failed ends it too: the read or accept that follows tells the error.
    fn transform_oneshot_output(self, _socket: Rc<S>, completion: cqueue::Entry) -> i16 {
        i16::try_from(completion.result()).ok().filter(|events| *events >= 0).unwrap_or(libc::POLLERR)
    }
}

/// Waits for `events` on `socket` with the operation in `slot`, which stays there until it is done.
fn poll_wait<S: AsRawFd + Unpin>(
    slot: &RefCell<Option<Wait<S>>>,
    socket: &Rc<S>,
    events: i16,
    cx: &mut Context<'_>,
) -> Poll<i16> {
    let mut slot = slot.borrow_mut();
    let wait = slot.get_or_insert_with(|| {
        let entry = opcode::PollAdd::new(fd(&**socket), u32::from(events.cast_unsigned())).build();
        Wait(UnsubmittedOneshot::new(Rc::clone(socket), Polled(std::marker::PhantomData), entry).submit())
    });
    let events = ready!(Pin::new(&mut wait.0).poll(cx));
    *slot = None;
    Poll::Ready(events)
}

//! The io_uring back end.
//!
//! A thread's tasks run in turns; at the end of each the thread enters the kernel once, which takes what they ask and tells
//! what has ended, and waits there where there is nothing to do ([`driver`]). tokio gives the tasks and their queue
//! ([`LocalSet`]), and no reactor: what wakes the thread is the ring, the first of its deadlines
//! ([`timer`](super::timer)), or another thread's stroke of its [`bell`]. A runtime of tokio's around the ring would cost a
//! second system call a turn, and could wait neither for several events ([`batch`]) nor on a ring that puts completions off.
//!
//! Dropping a stream shuts its socket down, which makes whatever is in flight complete at once, and the last completion
//! closes it.
//!
//! Sockets are in blocking mode, because io_uring answers `EAGAIN` instead of waiting on a non-blocking one. The listener
//! is non-blocking: it is polled and then emptied with `accept4`, so that no connection is ever taken by an operation that
//! nobody waits for any more.

mod batch;
mod bell;
mod driver;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};
use tokio::task::LocalSet;

use self::bell::Bell;
pub(super) use self::driver::available;
use self::driver::{Connected, Driver, Ended, Listening, Operation, Work};
use super::buffer::{Chunk, SMALL};
use super::io::{Backend, Leaving, Listener, Stream, keepalive, shut, silent};
use super::timer::Timers;

/// Events that tell of a peer's leaving while its data may lie unread. `POLLHUP` and `POLLERR` are always told.
const LEFT: i16 = libc::POLLRDHUP;
/// Events that end the wait for something to read.
const READABLE: i16 = libc::POLLIN | libc::POLLRDHUP;

thread_local! {
    /// The ring of a data thread.
    static DRIVER: RefCell<Option<Rc<Driver>>> = const { RefCell::new(None) };
}

/// The back end.
#[derive(Debug)]
pub(super) struct Uring;

/// The calling thread's ring.
fn driver() -> io::Result<Rc<Driver>> {
    DRIVER
        .with_borrow(|driver| driver.as_ref().map(Rc::clone))
        .ok_or_else(|| io::Error::other("a thread without a ring"))
}

impl Backend for Uring {
    type Stream = UringStream;
    type Listener = UringListener;

    fn block_on<F: Future>(main: F) -> io::Result<F::Output> {
        let bell = Bell::new()?;
        let driver = Driver::new(&bell)?;
        DRIVER.set(Some(Rc::clone(&driver)));
        let timers = Timers::keep();
        let done = {
            let tasks = LocalSet::new();
            let waker = Waker::from(Arc::clone(&bell));
            let mut main = pin!(tasks.run_until(main));
            loop {
                bell.hush();
                if let Poll::Ready(done) = main.as_mut().poll(&mut Context::from_waker(&waker)) {
                    break Ok(done);
                }
                timers.fire();
                if let Err(error) = driver.turn(!bell.is_rung(), timers.next()) {
                    break Err(error);
                }
            }
        };
        DRIVER.set(None);
        driver.end();
        done
    }

    fn listen(listener: TcpListener) -> io::Result<UringListener> {
        listener.set_nonblocking(true)?;
        SockRef::from(&listener).set_tcp_nodelay(true)?;
        Ok(UringListener { socket: Listening::new(listener), wait: RefCell::default(), driver: driver()? })
    }

    async fn connect(address: SocketAddr) -> io::Result<UringStream> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_tcp_nodelay(true)?;
        socket.set_tcp_keepalive(&keepalive())?;
        let stream = UringStream::new(socket.into(), driver()?);
        let target = Box::new(SockAddr::from(address));
        let connect = Work::Connect { socket: Rc::clone(&stream.socket), target };
        stream.driver.start(connect).await.0?;
        stream.dry.set(true);
        Ok(stream)
    }
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct UringListener {
    socket: Rc<Listening>,
    wait: RefCell<Option<Operation>>,
    driver: Rc<Driver>,
}

impl Listener for UringListener {
    type Stream = UringStream;

    async fn accept(&self) -> io::Result<(UringStream, SocketAddr)> {
        loop {
            match self.socket.inner.accept() {
                Ok((socket, client)) => return Ok((UringStream::new(socket, Rc::clone(&self.driver)), client)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let expect = || self.driver.start(Work::Expect(Rc::clone(&self.socket)));
                    poll_fn(|cx| poll_wait(&self.wait, expect, cx)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn stop(&self) {
        shut(&self.socket.inner, Shutdown::Read);
    }

    fn lend(&self) -> io::Result<OwnedFd> {
        self.socket.inner.as_fd().try_clone_to_owned()
    }
}

impl Drop for UringListener {
    /// The socket may be another process's too, so it is not shut down; a wait for it would last until the next client.
    fn drop(&mut self) {
        if let Some(wait) = self.wait.take() {
            wait.call_off();
        }
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct UringStream {
    socket: Rc<Connected>,
    driver: Rc<Driver>,
    /// The wait for something to read; kept when its future is dropped, and picked up by the next.
    readable: RefCell<Option<Operation>>,
    /// The wait for the peer's leaving. One operation lasts for the connection's life, whatever it carries.
    left: RefCell<Option<Operation>>,
    half_closed: Cell<bool>,
    broken: Cell<bool>,
    reset: Cell<bool>,
    /// The last wait said that there is something to read.
    ripe: Cell<bool>,
    /// There was nothing left to read, and no word of anything new.
    dry: Cell<bool>,
}

impl UringStream {
    fn new(socket: TcpStream, driver: Rc<Driver>) -> Self {
        Self {
            socket: Connected::new(socket),
            driver,
            readable: RefCell::default(),
            left: RefCell::default(),
            half_closed: Cell::new(false),
            broken: Cell::new(false),
            reset: Cell::new(false),
            ripe: Cell::new(false),
            dry: Cell::new(false),
        }
    }

    fn tcp(&self) -> &TcpStream {
        &self.socket.inner
    }

    /// Sends what lies behind the first `sent` bytes.
    fn send(&self, chunk: Chunk, sent: usize) -> Operation {
        self.driver.start(Work::Send { socket: Rc::clone(&self.socket), chunk, sent })
    }

    /// Waits for events with the operation in `slot`.
    fn watch(&self, slot: &RefCell<Option<Operation>>, events: i16, cx: &mut Context<'_>) -> Poll<i16> {
        poll_wait(slot, || self.driver.start(Work::Watch { socket: Rc::clone(&self.socket), events }), cx)
    }
}

impl Stream for UringStream {
    type Read<'a> = Reading<'a>;
    type Write<'a> = Writing<'a>;

    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.watch(&self.readable, READABLE, cx).map(|_events| {
            self.ripe.set(true);
            self.dry.set(false);
        })
    }

    fn poll_closed(&self, leaving: Leaving, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.broken.get() || (leaving == Leaving::HalfClose && self.half_closed.get()) {
                return Poll::Ready(());
            }
            let events = if self.half_closed.get() { 0 } else { LEFT };
            match self.watch(&self.left, events, cx) {
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
    fn read(&self, mut into: Chunk) -> Reading<'_> {
        let room = into.slice_mut();
        if self.ripe.take() {
            match recv(self.tcp().as_raw_fd(), room, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                done => {
                    // A small room that is full says that there is more, such as a body behind its head. A large one waits for its
                    // turn: others have theirs in between.
                    let is_full = done == Ok(room.len());
                    self.ripe.set(room.len() <= SMALL && is_full);
                    self.dry.set(done.is_ok() && !is_full);
                    return Reading(Progress::Done(Some((done.map_err(io::Error::from), into))));
                }
            }
        }
        let later = self.dry.get() && self.driver.may_wait_first();
        let receive = Work::Receive { socket: Rc::clone(&self.socket), chunk: into, later };
        Reading(Progress::Flying(self, self.driver.start(receive)))
    }

    fn write_all(&self, from: Chunk) -> Writing<'_> {
        Writing { stream: self, sent: 0, transfer: self.send(from, 0) }
    }

    fn silent(&self) -> bool {
        silent(self.tcp())
    }

    fn finish(&self) {
        shut(self.tcp(), Shutdown::Write);
    }

    fn abort(&self) {
        shut(self.tcp(), Shutdown::Both);
    }

    fn reset_on_close(&self) {
        // A connection that refuses the option is closed the ordinary way.
        self.reset.set(SockRef::from(self.tcp()).set_linger(Some(Duration::ZERO)).is_ok());
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp().local_addr()
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
        shut(self.tcp(), if gently { Shutdown::Read } else { Shutdown::Both });
    }
}

/// A read: what was there was taken at once, and only what has to be waited for is an operation.
pub(super) struct Reading<'a>(Progress<'a>);

/// What is known already, or is known when an operation ends.
enum Progress<'a> {
    Done(Option<(io::Result<usize>, Chunk)>),
    Flying(&'a UringStream, Operation),
}

/// How a transfer ended, and its bytes.
fn transferred(result: io::Result<Ended>, work: Option<Work>) -> (io::Result<usize>, Chunk) {
    let moved = result.and_then(|ended| usize::try_from(ended.moved).map_err(io::Error::other));
    (moved, work.map_or_else(Chunk::none, Work::into_chunk))
}

impl Future for Reading<'_> {
    type Output = (io::Result<usize>, Chunk);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (result, mut chunk) = match &mut self.0 {
            Progress::Done(done) => done.take().unwrap_or_else(|| (Err(ErrorKind::Other.into()), Chunk::none())),
            Progress::Flying(stream, transfer) => {
                let (result, work) = ready!(Pin::new(transfer).poll(cx));
                stream.dry.set(result.as_ref().is_ok_and(|ended| ended.is_dry));
                transferred(result, work)
            }
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
    transfer: Operation,
}

impl Future for Writing<'_> {
    type Output = (io::Result<()>, Chunk);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let (result, work) = ready!(Pin::new(&mut self.transfer).poll(cx));
            let (result, chunk) = transferred(result, work);
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

/// Waits with the operation in `slot`, which stays there until it is done, and says which events ended it. A wait that failed ends
/// too: the read or accept that follows tells the error.
fn poll_wait(slot: &RefCell<Option<Operation>>, start: impl FnOnce() -> Operation, cx: &mut Context<'_>) -> Poll<i16> {
    let mut slot = slot.borrow_mut();
    let (result, _work) = ready!(Pin::new(slot.get_or_insert_with(start)).poll(cx));
    *slot = None;
    Poll::Ready(result.ok().and_then(|ended| i16::try_from(ended.moved).ok()).unwrap_or(libc::POLLERR))
}

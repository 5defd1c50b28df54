//! The little that the proxy asks of sockets, in a form that both back ends can give.
//!
//! Buffers travel by value: io_uring owns a buffer while the kernel fills it, so a read takes a [`Chunk`] and hands it
//! back. A read or write that is dropped before it is done leaves the connection good for nothing but closing; the two
//! waits ([`Stream::poll_readable`], [`Stream::poll_closed`]) hold no buffer and may be given up at any time. All of them are
//! for one task at a time. Dropping a stream
//! closes it, whatever is still under way.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::str::FromStr;
use std::task::{Context, Poll};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{SockRef, TcpKeepalive};

use super::buffer::Chunk;
use super::ring;

/// When a silent connection is asked whether its other end is still there, and how often until it counts as gone: a host
/// that has lost its power ends nothing, and an answer may be minutes away.
const KEEPALIVE: Duration = Duration::from_mins(1);
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(15);
const KEEPALIVE_PROBES: u32 = 4;

/// How all connections are kept alive.
pub(super) fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_AGAIN).with_retries(KEEPALIVE_PROBES)
}

/// Which back end was asked for (`--io`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// `io_uring` where the kernel lets us, else epoll.
    #[default]
    Auto,
    /// `io_uring`, or refuse to start.
    Uring,
    /// epoll.
    Epoll,
}

/// The back end that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// `io_uring`.
    Uring,
    /// epoll.
    Epoll,
}

impl Engine {
    /// The word that the log, `get status` and `kvlb_build_info` show.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Uring => "io_uring",
            Self::Epoll => "epoll",
        }
    }
}

impl Io {
    /// Chooses the back end, and says why `io_uring` was passed over where it was.
    ///
    /// # Errors
    /// When `io_uring` was asked for by name and the kernel does not give it.
    pub fn resolve(self) -> io::Result<(Engine, Option<io::Error>)> {
        match self {
            Self::Epoll => Ok((Engine::Epoll, None)),
            Self::Uring => ring::available().map(|()| (Engine::Uring, None)),
            Self::Auto => Ok(match ring::available() {
                Ok(()) => (Engine::Uring, None),
                Err(refused) => (Engine::Epoll, Some(refused)),
            }),
        }
    }
}

impl FromStr for Io {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "epoll" => Ok(Self::Epoll),
            other => Err(format!("`{other}` is none of auto, uring, epoll")),
        }
    }
}

impl fmt::Display for Io {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Uring => "uring",
            Self::Epoll => "epoll",
        })
    }
}

/// One way of doing socket I/O on a thread that does nothing else.
pub(super) trait Backend: Sized + 'static {
    /// A connection.
    type Stream: Stream;
    /// A listening socket.
    type Listener: Listener<Stream = Self::Stream>;

    /// Runs `main`, and the tasks it spawns locally, on the calling thread until `main` returns.
    fn block_on<F: Future>(main: F) -> io::Result<F::Output>;

    /// Adopts a listening socket.
    fn listen(listener: std::net::TcpListener) -> io::Result<Self::Listener>;

    /// Opens a connection. May be dropped at any time: the attempt ends.
    fn connect(address: SocketAddr) -> impl Future<Output = io::Result<Self::Stream>>;
}

/// A listening socket.
pub(super) trait Listener: 'static {
    /// What it yields.
    type Stream: Stream;

    /// The next connection and its client's address. May be dropped at any time without losing a connection.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Stream, SocketAddr)>>;

    /// Ends the listening, for everybody who holds the socket.
    fn stop(&self);

    /// Another descriptor of the very socket.
    fn lend(&self) -> io::Result<OwnedFd>;
}

/// How a peer's leaving is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// The end of its sending side counts.
    HalfClose,
    /// Only a broken connection counts.
    Broken,
}

/// A connection.
pub(super) trait Stream: 'static {
    /// A read under way.
    type Read<'a>: Future<Output = (io::Result<usize>, Chunk)> + Unpin;
    /// A write under way.
    type Write<'a>: Future<Output = (io::Result<()>, Chunk)> + Unpin;

    /// Ready when a read would not wait: there is data, the peer's end, or an error.
    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()>;

    /// Ready when the peer is gone, also while its data lies unread.
    fn poll_closed(&self, leaving: Leaving, cx: &mut Context<'_>) -> Poll<()>;

    /// Reads some bytes behind those that `into` holds. `Ok(0)` is the peer's end. `into` must have spare room.
    fn read(&self, into: Chunk) -> Self::Read<'_>;

    /// Writes all that `from` holds; it comes back unchanged.
    fn write_all(&self, from: Chunk) -> Self::Write<'_>;

    /// Whether the connection is open and has nothing to read: fit to carry another request.
    fn silent(&self) -> bool;

    /// Ends the sending side.
    fn finish(&self);

    /// Ends both sides: whatever is under way returns soon.
    fn abort(&self);

    /// Makes the coming close a reset, so that the peer cannot take what it has for a whole.
    fn reset_on_close(&self);

    /// The address that the peer connected to, or that we connected from.
    fn local_addr(&self) -> io::Result<SocketAddr>;
}

/// Whether a connection is open and has nothing to read, without waiting. The peer's end counts as something to read, and a
/// poll costs half of what a peek does.
pub(super) fn silent(socket: &impl AsFd) -> bool {
    poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) == Ok(0)
}

/// Ends one side or both. A connection that has none left is as wanted.
pub(super) fn shut(socket: &impl AsFd, how: Shutdown) {
    if let Err(error) = SockRef::from(socket).shutdown(how) {
        tracing::trace!(%error, "shutdown of a connection that is gone");
    }
}

//! The API's connections: so many at a time, and none that only waits.
//!
//! The API shares the process's descriptors with the traffic, so that clients of it that open connections and say
//! nothing must not take them all, nor for ever.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep};

use crate::clock;

/// Connections at a time: consoles, scrapers and scripts are a handful. More wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 128;
/// How long a connection may neither bring nor take a byte: scrapers that come every half minute keep theirs.
const QUIET_MAX: Duration = Duration::from_mins(1);
/// The same while all places are taken; also how often it is looked at. No answer but the largest takes so long.
const QUIET_MAX_CROWDED: Duration = Duration::from_secs(1);

/// The API's listener.
#[derive(Debug)]
pub(super) struct Door {
    listener: TcpListener,
    /// Whether another process accepts from the listener's socket instead.
    left: watch::Receiver<bool>,
    places: Arc<Semaphore>,
    quiet: Quiet,
}

/// How long connections may be quiet.
#[derive(Clone, Copy, Debug)]
struct Quiet {
    max: Duration,
    max_crowded: Duration,
}

impl Door {
    pub(super) fn new(listener: TcpListener, left: watch::Receiver<bool>) -> Self {
        Self {
            listener,
            left,
            places: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            quiet: Quiet { max: QUIET_MAX, max_crowded: QUIET_MAX_CROWDED },
        }
    }
}

impl axum::serve::Listener for Door {
    type Io = Visitor;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Visitor, SocketAddr) {
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        debug_assert!(place.is_some(), "nobody closes the semaphore");
        let (stream, address) = tokio::select! {
            biased;
            true = async { self.left.wait_for(|left| *left).await.is_ok() } => std::future::pending().await,
            accepted = axum::serve::Listener::accept(&mut self.listener) => accepted,
        };
        let visitor = Visitor {
            stream,
            quiet: self.quiet,
            since: clock::now(),
            look: Box::pin(sleep(self.quiet.max_crowded)),
            places: Arc::clone(&self.places),
            _place: place,
        };
        (visitor, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// One connection, in its place.
#[derive(Debug)]
pub(super) struct Visitor {
    stream: TcpStream,
    quiet: Quiet,
    /// When it was last not quiet.
    since: Instant,
    look: Pin<Box<Sleep>>,
    places: Arc<Semaphore>,
    _place: Option<OwnedSemaphorePermit>,
}

impl Visitor {
    /// Passes on what came of an operation, or the end of patience where nothing did.
    fn heed<T>(&mut self, done: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.since = clock::now();
            return done;
        }
        loop {
            ready!(self.look.as_mut().poll(cx));
            let now = clock::now();
            let crowded = self.places.available_permits() == 0;
            let max = if crowded { self.quiet.max_crowded } else { self.quiet.max };
            if now.saturating_duration_since(self.since) >= max {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.look.as_mut().reset((now + self.quiet.max_crowded).into());
        }
    }
}

impl AsyncRead for Visitor {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.stream).poll_read(cx, room);
        self.heed(done, cx)
    }
}

impl AsyncWrite for Visitor {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.heed(done, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.heed(done, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use axum::serve::Listener as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::time::timeout;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    async fn door(max: Duration, places: usize) -> Door {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let quiet = Quiet { max, max_crowded: Duration::from_millis(20) };
        Door { quiet, places: Arc::new(Semaphore::new(places)), ..Door::new(listener, watch::channel(false).1) }
    }

    #[tokio::test]
    async fn a_visitor_that_says_nothing_and_one_that_takes_nothing_are_let_go() {
        let mut door = door(Duration::from_millis(100), 2).await;
        let mut client = TcpStream::connect(door.local_addr().unwrap()).await.unwrap();
        let (mut visitor, _) = door.accept().await;
        client.write_all(b"x").await.unwrap();
        let mut byte = [0];
        visitor.read_exact(&mut byte).await.unwrap();
        let silent = timeout(PATIENCE, visitor.read_exact(&mut byte)).await.unwrap();
        assert_eq!(silent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let full = timeout(PATIENCE, visitor.write_all(&vec![0; 64 << 20])).await.unwrap();
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn who_waits_outside_is_let_in_before_who_says_nothing_inside() {
        let mut door = door(PATIENCE, 1).await;
        let address = door.local_addr().unwrap();
        let _clients = (TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap());
        let (mut first, _) = door.accept().await;
        assert!(timeout(Duration::from_millis(50), door.accept()).await.is_err(), "all places are taken");
        let silent = timeout(PATIENCE / 2, first.read_u8()).await.unwrap();
        assert_eq!(silent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(first);
        timeout(PATIENCE, door.accept()).await.unwrap();
    }
}

//! The epoll back end: plain tokio, for kernels and containers that forbid io_uring.
//!
//! Readiness in tokio is edge-triggered and cached. [`EpollStream::poll_closed`] looks past unread data, for which it has to
//! clear the cached readiness; `unread` remembers that, and the next read tries the socket before it waits.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{Interest, Ready};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::buffer::Chunk;
use super::io::{Backend, Leaving, Listener, Stream, keepalive, shut, silent};

/// The back end.
#[derive(Debug)]
pub(super) struct Epoll;

impl Backend for Epoll {
    type Stream = EpollStream;
    type Listener = EpollListener;

    fn block_on<F: Future>(main: F) -> io::Result<F::Output> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let tasks = tokio::task::LocalSet::new();
        Ok(tasks.block_on(&runtime, main))
    }

    fn listen(listener: std::net::TcpListener) -> io::Result<EpollListener> {
        listener.set_nonblocking(true)?;
        SockRef::from(&listener).set_tcp_nodelay(true)?;
        Ok(EpollListener { socket: TcpListener::from_std(listener)? })
    }

    async fn connect(address: SocketAddr) -> io::Result<EpollStream> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_nodelay(true)?;
        SockRef::from(&socket).set_tcp_keepalive(&keepalive())?;
        socket.connect(address).await.map(EpollStream::adopt)
    }
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct EpollListener {
    socket: TcpListener,
}

impl Listener for EpollListener {
    type Stream = EpollStream;

    async fn accept(&self) -> io::Result<(EpollStream, SocketAddr)> {
        let (socket, client) = self.socket.accept().await?;
        let stream = EpollStream::adopt(socket);
        // tokio takes an accepted socket for readable before it is known to be.
        stream.clear_readable();
        stream.unread.set(true);
        Ok((stream, client))
    }

    fn stop(&self) {
        shut(&self.socket, Shutdown::Read);
    }

    fn lend(&self) -> io::Result<OwnedFd> {
        self.socket.as_fd().try_clone_to_owned()
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct EpollStream {
    socket: TcpStream,
    unread: Cell<bool>,
}

impl EpollStream {
    fn adopt(socket: TcpStream) -> Self {
        Self { socket, unread: Cell::new(false) }
    }

    /// Forgets that the socket was readable: the next edge, or `unread`, says so again.
    fn clear_readable(&self) {
        let wait: io::Result<()> = self.socket.try_io(Interest::READABLE, || Err(ErrorKind::WouldBlock.into()));
        debug_assert!(wait.is_err());
    }

    /// Forgets that the socket was writable: a write tries it anyhow.
    fn clear_writable(&self) {
        let wait: io::Result<()> = self.socket.try_io(Interest::WRITABLE, || Err(ErrorKind::WouldBlock.into()));
        debug_assert!(wait.is_err());
    }

    /// Tries to read at once where no edge will tell that there is something.
    fn read_unread(&self, room: &mut [u8]) -> Option<io::Result<usize>> {
        if !self.unread.take() {
            return None;
        }
        match (&*SockRef::from(&self.socket)).read(room) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            done => {
                // More may be left.
                self.unread.set(matches!(done, Ok(count) if count == room.len()));
                Some(done)
            }
        }
    }

    fn poll_read(&self, room: &mut [u8], cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if let Some(done) = self.read_unread(room) {
            return Poll::Ready(done);
        }
        loop {
            ready!(self.socket.poll_read_ready(cx))?;
            match self.socket.try_read(room) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => {
                    if matches!(done, Ok(count) if count > 0 && count < room.len()) {
                        // The socket is empty now: this spares the read that would only say so. What comes is a new edge.
                        self.clear_readable();
                    }
                    return Poll::Ready(done);
                }
            }
        }
    }

    fn poll_write(&self, bytes: &[u8], cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        match (&*SockRef::from(&self.socket)).write(bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            done => return Poll::Ready(done),
        }
        loop {
            ready!(self.socket.poll_write_ready(cx))?;
            match self.socket.try_write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }

    /// What is known of the socket's readiness just now.
    fn readiness(&self, interest: Interest, cx: &mut Context<'_>) -> Ready {
        match pin!(self.socket.ready(interest)).poll(cx) {
            Poll::Ready(Ok(ready)) => ready,
            Poll::Ready(Err(_)) => Ready::ALL,
            Poll::Pending => Ready::EMPTY,
        }
    }
}

impl Stream for EpollStream {
    type Read<'a> = Reading<'a>;
    type Write<'a> = Writing<'a>;

    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.unread.get() {
            if !silent(&self.socket) {
                return Poll::Ready(());
            }
            self.unread.set(false);
        }
        // An error of the readiness itself ends the wait too; the read that follows tells it.
        self.socket.poll_read_ready(cx).map(|_ready| ())
    }

    fn poll_closed(&self, leaving: Leaving, cx: &mut Context<'_>) -> Poll<()> {
        match leaving {
            Leaving::HalfClose => loop {
                if ready!(self.socket.poll_read_ready(cx)).is_err() {
                    return Poll::Ready(());
                }
                if self.readiness(Interest::READABLE, cx).is_read_closed() {
                    return Poll::Ready(());
                }
                self.unread.set(true);
                self.clear_readable();
            },
            // An error is told to those who wait for room to write.
            Leaving::Broken => loop {
                if ready!(self.socket.poll_write_ready(cx)).is_err() {
                    return Poll::Ready(());
                }
                if self.readiness(Interest::ERROR, cx).is_error() {
                    return Poll::Ready(());
                }
                self.clear_writable();
            },
        }
    }

    fn read(&self, into: Chunk) -> Reading<'_> {
        Reading { stream: self, chunk: into }
    }

    fn write_all(&self, from: Chunk) -> Writing<'_> {
        Writing { stream: self, chunk: from, sent: 0 }
    }

    fn silent(&self) -> bool {
        silent(&self.socket)
    }

    fn finish(&self) {
        shut(&self.socket, Shutdown::Write);
    }

    fn abort(&self) {
        shut(&self.socket, Shutdown::Both);
    }

    fn reset_on_close(&self) {
        if let Err(error) = SockRef::from(&self.socket).set_linger(Some(Duration::ZERO)) {
            tracing::trace!(%error, "linger on a connection that is gone");
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

/// A read under way.
pub(super) struct Reading<'a> {
    stream: &'a EpollStream,
    chunk: Chunk,
}

impl Future for Reading<'_> {
    type Output = (io::Result<usize>, Chunk);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let result = ready!(this.stream.poll_read(this.chunk.slice_mut(), cx));
        if let Ok(count) = result {
            this.chunk.advance(count);
        }
        Poll::Ready((result, std::mem::replace(&mut this.chunk, Chunk::none())))
    }
}

/// A write under way.
pub(super) struct Writing<'a> {
    stream: &'a EpollStream,
    chunk: Chunk,
    sent: usize,
}

impl Future for Writing<'_> {
    type Output = (io::Result<()>, Chunk);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let result = loop {
            let rest = &this.chunk.bytes()[this.sent..];
            if rest.is_empty() {
                break Ok(());
            }
            match ready!(this.stream.poll_write(rest, cx)) {
                Ok(0) => break Err(ErrorKind::WriteZero.into()),
                Ok(count) => this.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        Poll::Ready((result, std::mem::replace(&mut this.chunk, Chunk::none())))
    }
}

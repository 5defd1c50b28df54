//! The epoll back end: plain tokio, for kernels and containers that forbid io_uring.
//!
//! Readiness in tokio is edge-triggered and cached. [`EpollStream::closed`] looks past unread data, for which it has to
//! clear the cached readiness; `unread` remembers that, and the next read tries the socket before it waits.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::buffer::Chunk;
use super::io::{Backend, Leaving, Listener, Stream, shut, silent};

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
        self.socket.accept().await.map(|(socket, client)| (EpollStream::adopt(socket), client))
    }

    fn stop(&self) {
        shut(&self.socket, Shutdown::Read);
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

    async fn read_some(&self, room: &mut [u8]) -> io::Result<usize> {
        if self.unread.take() {
            match (&*SockRef::from(&self.socket)).read(room) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => {
                    // More may be left, and no edge will tell.
                    self.unread.set(matches!(done, Ok(count) if count == room.len()));
                    return done;
                }
            }
        }
        loop {
            self.socket.readable().await?;
            match self.socket.try_read(room) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => {
                    if matches!(done, Ok(count) if count > 0 && count < room.len()) {
                        // The socket is empty now: this spares the read that would only say so. What comes is a new edge.
                        self.clear_readable();
                    }
                    return done;
                }
            }
        }
    }

    async fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        match (&*SockRef::from(&self.socket)).write(bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            done => return done,
        }
        loop {
            self.socket.writable().await?;
            match self.socket.try_write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }
}

impl Stream for EpollStream {
    async fn readable(&self) {
        if self.unread.get() && !silent(&self.socket) {
            return;
        }
        self.unread.set(false);
        if let Err(error) = self.socket.readable().await {
            tracing::debug!(%error, "readiness of a connection");
        }
    }

    async fn closed(&self, leaving: Leaving) {
        let interest = match leaving {
            Leaving::HalfClose => Interest::READABLE,
            Leaving::Broken => Interest::ERROR,
        };
        loop {
            let Ok(ready) = self.socket.ready(interest).await else { return };
            if ready.is_error() || (leaving == Leaving::HalfClose && ready.is_read_closed()) {
                return;
            }
            self.unread.set(true);
            self.clear_readable();
        }
    }

    async fn read(&self, mut into: Chunk) -> (io::Result<usize>, Chunk) {
        let result = self.read_some(into.spare_mut()).await;
        if let Ok(count) = result {
            into.advance(count);
        }
        (result, into)
    }

    async fn write_all(&self, from: Chunk) -> (io::Result<()>, Chunk) {
        let mut sent = 0;
        while sent < from.len() {
            match self.write_some(&from.bytes()[sent..]).await {
                Ok(0) => return (Err(ErrorKind::WriteZero.into()), from),
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return (Err(error), from),
            }
        }
        (Ok(()), from)
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

//! The API's connections: so many at a time, none that only waits, and each in TLS where that is asked for.
//!
//! The API shares the process's descriptors with the traffic, so that clients of it that open connections and say
//! nothing must not take them all, nor for ever. Handshakes happen on the connection's own task: a slow one holds up nobody.

use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::guard::{Denied, Guard, Peer};
use crate::{clock, tls};

/// Connections at a time: consoles, scrapers and scripts are a handful. More wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 128;
/// How long a connection may neither bring nor take a byte: scrapers that come every half minute keep theirs.
const QUIET_MAX: Duration = Duration::from_mins(1);
/// The same while all places are taken; also how often it is looked at. No answer but the largest takes so long.
const QUIET_MAX_CROWDED: Duration = Duration::from_secs(1);
/// How long a TLS handshake may take, byte by byte: two round trips and a signature.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// How long a request's head may take, from the end of the one before.
const HEAD_MAX_TIME: Duration = QUIET_MAX;
/// Bytes of a head: the longest path and token, several times over.
const HEAD_MAX: usize = 64 << 10;
/// What the first byte of a TLS connection is: a handshake record.
const TLS_HANDSHAKE: u8 = 0x16;

/// The API's listener.
#[derive(Debug)]
pub(super) struct Door {
    listener: TcpListener,
    /// Whether another process accepts from the listener's socket instead.
    left: watch::Receiver<bool>,
    places: Arc<Semaphore>,
    patience: Patience,
    guard: Arc<Guard>,
    tls: Option<Arc<tls::Server>>,
}

/// How long connections may take.
#[derive(Clone, Copy, Debug)]
struct Patience {
    quiet: Duration,
    quiet_crowded: Duration,
    handshake: Duration,
}

impl Door {
    pub(super) fn new(
        listener: TcpListener,
        left: watch::Receiver<bool>,
        guard: Arc<Guard>,
        tls: Option<Arc<tls::Server>>,
    ) -> Self {
        Self {
            listener,
            left,
            places: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            patience: Patience { quiet: QUIET_MAX, quiet_crowded: QUIET_MAX_CROWDED, handshake: HANDSHAKE_MAX },
            guard,
            tls,
        }
    }

    /// Serves until `stop` completes; answers under way are finished.
    pub(super) async fn serve(mut self, router: &Router, stop: impl Future<Output = ()>) {
        let visits = GracefulShutdown::new();
        let mut stop = pin!(stop);
        loop {
            let (visitor, address) = tokio::select! {
                visit = self.accept() => visit,
                () = &mut stop => break,
            };
            let visit = Visit {
                address,
                patience: self.patience,
                guard: Arc::clone(&self.guard),
                tls: self.tls.clone(),
                router: router.clone(),
                watcher: visits.watcher(),
            };
            drop(tokio::spawn(visit.receive(visitor)));
        }
        drop(self);
        visits.shutdown().await;
    }

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
            patience: self.patience,
            since: clock::now(),
            look: Box::pin(sleep(self.patience.quiet_crowded)),
            places: Arc::clone(&self.places),
            _place: place,
        };
        (visitor, address)
    }
}

/// What happens on one connection.
struct Visit {
    address: SocketAddr,
    patience: Patience,
    guard: Arc<Guard>,
    tls: Option<Arc<tls::Server>>,
    router: Router,
    watcher: Watcher,
}

impl Visit {
    async fn receive(self, mut visitor: Visitor) {
        let Some(tls) = &self.tls else { return self.converse(visitor, false).await };
        let acceptor = TlsAcceptor::from(tls.config());
        let shaken = timeout(self.patience.handshake, async {
            let first = visitor.first_byte().await?;
            match first {
                None => Ok(None),
                Some(TLS_HANDSHAKE) => match acceptor.accept(visitor).into_fallible().await {
                    Ok(stream) => Ok(Some(Shaken::Tls(Box::new(stream)))),
                    Err((error, visitor)) => {
                        visitor.part().await;
                        Err(error)
                    }
                },
                Some(_) => Ok(Some(Shaken::Plain(visitor))),
            }
        });
        match shaken.await {
            Ok(Ok(Some(Shaken::Tls(stream)))) => self.converse(stream, false).await,
            Ok(Ok(Some(Shaken::Plain(visitor)))) => self.converse(visitor, true).await,
            // Who comes and goes without a word, as a port probe does, was not turned away.
            Ok(Ok(None)) => {}
            Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut => self.late(),
            Ok(Err(error)) => self.guard.turn_away(Denied::Handshake, self.address, &error.to_string()),
            Err(_elapsed) => self.late(),
        }
    }

    fn late(&self) {
        self.guard.turn_away(Denied::HandshakeLate, self.address, "TLS handshake");
    }

    /// Answers requests until either side has enough.
    async fn converse(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, plain_at_tls: bool) {
        let peer = Peer { address: self.address, plain_at_tls };
        let router = TowerToHyperService::new(self.router);
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            router.call(request)
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_MAX_TIME).max_buf_size(HEAD_MAX);
        let connection = http.serve_connection(TokioIo::new(stream), service);
        if let Err(error) = self.watcher.watch(connection).await {
            // Clients leave as they like.
            tracing::debug!(%error, "a connection of the API ended");
        }
    }
}

/// What a connection turned out to be.
enum Shaken {
    Tls(Box<tokio_rustls::server::TlsStream<Visitor>>),
    /// Something else than TLS, of which nothing has been read.
    Plain(Visitor),
}

/// One connection, in its place.
#[derive(Debug)]
pub(super) struct Visitor {
    stream: TcpStream,
    patience: Patience,
    /// When it was last not quiet.
    since: Instant,
    look: Pin<Box<Sleep>>,
    places: Arc<Semaphore>,
    _place: Option<OwnedSemaphorePermit>,
}

impl Visitor {
    /// The first byte that it brings, which stays to be read; `None` where it leaves without one.
    async fn first_byte(&mut self) -> io::Result<Option<u8>> {
        std::future::poll_fn(|cx| {
            let mut byte = [0];
            let mut room = ReadBuf::new(&mut byte);
            let done = self.stream.poll_peek(cx, &mut room);
            let bytes = ready!(self.heed(done, cx))?;
            Poll::Ready(Ok((bytes > 0).then(|| byte[0])))
        })
        .await
    }

    /// Ends the connection so that what was said last arrives: closed with bytes unread, it would be lost.
    async fn part(mut self) {
        const UNREAD_MAX: usize = 64 << 10;
        if self.shutdown().await.is_err() {
            return;
        }
        let (mut scrap, mut left) = ([0; 1024], UNREAD_MAX);
        while let Ok(bytes @ 1..) = self.read(&mut scrap).await {
            left = left.saturating_sub(bytes);
            if left == 0 {
                return;
            }
        }
    }

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
            let max = if crowded { self.patience.quiet_crowded } else { self.patience.quiet };
            if now.saturating_duration_since(self.since) >= max {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.look.as_mut().reset((now + self.patience.quiet_crowded).into());
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
    use tokio::time::timeout;

    use super::*;
    use crate::telemetry::Metrics;

    const PATIENCE: Duration = Duration::from_secs(10);

    async fn door(max: Duration, places: usize) -> Door {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let patience = Patience { quiet: max, quiet_crowded: Duration::from_millis(20), handshake: max };
        let guard = Arc::new(Guard::new(None, false, Arc::new(Metrics::new().unwrap())));
        Door {
            patience,
            places: Arc::new(Semaphore::new(places)),
            ..Door::new(listener, watch::channel(false).1, guard, None)
        }
    }

    #[tokio::test]
    async fn a_visitor_that_says_nothing_and_one_that_takes_nothing_are_let_go() {
        let mut door = door(Duration::from_millis(100), 2).await;
        let mut client = TcpStream::connect(door.listener.local_addr().unwrap()).await.unwrap();
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
        let address = door.listener.local_addr().unwrap();
        let _clients = (TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap());
        let (mut first, _) = door.accept().await;
        assert!(timeout(Duration::from_millis(50), door.accept()).await.is_err(), "all places are taken");
        let silent = timeout(PATIENCE / 2, first.read_u8()).await.unwrap();
        assert_eq!(silent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(first);
        timeout(PATIENCE, door.accept()).await.unwrap();
    }
}

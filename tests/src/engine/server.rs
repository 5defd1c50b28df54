//! HTTP connections: accepted, reset at random, closed when idle, cut on demand.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::gate::{self, Gate};
use super::http;
use super::life::Life;

/// Accepts for ever, or until `stopping`; then waits until every connection has ended its request.
pub(super) async fn serve(life: Arc<Life>, mut gate: Gate, mut stopping: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            stream = gate.accept() => stream,
            _ = stopping.wait_for(|stop| *stop) => break,
        };
        while connections.try_join_next().is_some() {}
        life.journal.connected();
        if life.faults.happens(life.faults.plan().reset_http_fraction) {
            gate::reset_on_close(&stream);
            continue;
        }
        connections.spawn(connection(Arc::clone(&life), stream, stopping.clone()));
    }
    drop(gate);
    while connections.join_next().await.is_some() {}
}

async fn connection(life: Arc<Life>, stream: TcpStream, mut stopping: watch::Receiver<bool>) {
    if let Err(cause) = stream.set_nodelay(true) {
        tracing::debug!(%cause, "no TCP_NODELAY");
    }
    let conn = Arc::new(Conn::new(&stream));
    let service = {
        let (life, conn) = (Arc::clone(&life), Arc::clone(&conn));
        service_fn(move |request| http::serve(Arc::clone(&life), Arc::clone(&conn), request))
    };
    let serving = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::pin!(serving);
    let mut asked_to_close = false;
    loop {
        tokio::select! {
            ended = serving.as_mut() => {
                if let Err(cause) = ended {
                    tracing::debug!(%cause, "connection ended");
                }
                return;
            }
            () = conn.idle(&life), if !asked_to_close => {}
            _ = stopping.wait_for(|stop| *stop), if !asked_to_close => {}
        }
        asked_to_close = true;
        serving.as_mut().graceful_shutdown();
    }
}

/// What the requests of one connection tell its task.
#[derive(Debug)]
pub(super) struct Conn {
    /// A second handle on the socket, to make its close a reset.
    socket: Mutex<Option<OwnedFd>>,
    state: watch::Sender<ConnState>,
}

#[derive(Debug, Clone, Copy)]
struct ConnState {
    /// Requests under way, streams included.
    busy: usize,
    /// End of the last request; none before the first, which may take its time as with uvicorn.
    idle_since: Option<Instant>,
}

impl Conn {
    fn new(stream: &TcpStream) -> Self {
        let socket = stream.as_fd().try_clone_to_owned().ok();
        Self { socket: Mutex::new(socket), state: watch::Sender::new(ConnState { busy: 0, idle_since: None }) }
    }

    /// Marks the connection as busy until the returned value is dropped.
    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        self.state.send_modify(|state| state.busy += 1);
        Busy(Arc::clone(self))
    }

    /// Makes the coming close a reset when `reset`.
    pub(super) fn prepare_cut(&self, reset: bool) {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner).take();
        if reset
            && let Some(socket) = socket
            && let Err(cause) = SockRef::from(&socket).set_linger(Some(Duration::ZERO))
        {
            tracing::warn!(%cause, "no reset on close");
        }
    }

    /// Waits until the connection has been idle for the keep-alive time.
    async fn idle(&self, life: &Life) {
        let mut state = self.state.subscribe();
        let mut plan = life.faults.watch();
        loop {
            let now = *state.borrow_and_update();
            let keep_alive = plan.borrow_and_update().keep_alive_ms.unwrap_or(life.config.keep_alive_ms);
            let end = now.idle_since.filter(|_| now.busy == 0).map(|since| since + Duration::from_millis(keep_alive));
            tokio::select! {
                _ = state.changed() => {}
                _ = plan.changed() => {}
                () = sleep_until(end.unwrap_or_else(Instant::now)), if end.is_some() => return,
            }
        }
    }
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Busy(Arc<Conn>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.state.send_modify(|state| {
            state.busy -= 1;
            state.idle_since = Some(Instant::now());
        });
    }
}

//! A listener that can be shut and opened again on the same port, without losing a connection it has not accepted.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{SockFilter, SockRef};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

/// How long to wait before trying again to take a port back, or to accept after an error.
const RETRY: Duration = Duration::from_millis(10);

/// Connections that the kernel may hold for us; more than any test opens at once.
const BACKLOG: u32 = 4096;

/// How long the rest of a handshake over loopback may take when the port is about to go. Whoever begins one meanwhile gets no answer,
/// and tries again a second later.
const COMPLETION: Duration = Duration::from_micros(50);

/// A port that listens while `open` holds.
#[derive(Debug)]
pub(super) struct Gate {
    address: SocketAddr,
    open: watch::Receiver<bool>,
    listener: Option<TcpListener>,
    /// Accepted while shutting; they were promised a listener.
    leftover: Vec<TcpStream>,
}

impl Gate {
    /// Takes the port at once, so that a taken port is an error here.
    ///
    /// # Errors
    /// When the port cannot be bound.
    pub(super) fn bind(address: SocketAddr, open: watch::Receiver<bool>) -> io::Result<Self> {
        let listener = listen(address)?;
        let address = listener.local_addr()?;
        Ok(Self { address, open, listener: Some(listener), leftover: Vec::new() })
    }

    /// The bound address.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection; waits while shut.
    pub(super) async fn accept(&mut self) -> TcpStream {
        loop {
            if let Some(stream) = self.leftover.pop() {
                return stream;
            }
            let open = *self.open.borrow_and_update();
            if !open {
                self.shut();
                if self.leftover.is_empty() && self.open.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                continue;
            }
            let Some(listener) = &self.listener else {
                self.listener = listen(self.address).ok();
                if self.listener.is_none() {
                    tokio::time::sleep(RETRY).await;
                }
                continue;
            };
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => return stream,
                    Err(_) => tokio::time::sleep(RETRY).await,
                },
                // Without its controller the gate stays as it is.
                Ok(()) = self.open.changed() => {}
            }
        }
    }

    /// Stops listening so that no connection is lost: from the filter on no new one is begun, those begun are completed and accepted, then
    /// the port goes. Without this, one made between the last accept and the close would be reset, and so would one whose maker has its
    /// answer and whose own last packet is still on its way: to its maker it is made.
    fn shut(&mut self) {
        let Some(listener) = self.listener.take() else { return };
        // Classic BPF over the TCP header: drop what has SYN among its flags, keep the rest.
        let filter = [
            SockFilter::new(0x30, 0, 0, 13),
            SockFilter::new(0x45, 0, 1, 0x02),
            SockFilter::new(0x06, 0, 0, 0),
            SockFilter::new(0x06, 0, 0, u32::MAX),
        ];
        let filtered = SockRef::from(&listener).attach_filter(&filter);
        debug_assert!(filtered.is_ok(), "a filter on a listener: {filtered:?}");
        let Ok(listener) = listener.into_std() else { return };
        std::thread::sleep(COMPLETION);
        while let Ok((stream, _)) = listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                self.leftover.extend(TcpStream::from_std(stream));
            }
        }
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Makes the next close of this connection a reset.
pub(crate) fn reset_on_close(stream: &TcpStream) {
    if let Err(cause) = SockRef::from(stream).set_linger(Some(Duration::ZERO)) {
        tracing::warn!(%cause, "no reset on close");
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::watch;
    use tokio::time::timeout;

    use super::Gate;

    #[tokio::test]
    async fn a_shut_gate_refuses_and_an_opened_one_listens_on_the_same_port() {
        let (switch, open) = watch::channel(true);
        let mut gate = Gate::bind(SocketAddr::from(([127, 0, 0, 1], 0)), open).unwrap();
        let address = gate.address();
        let early = TcpStream::connect(address).await.unwrap();
        switch.send_replace(false);
        let accepted = gate.accept().await;
        assert_eq!(accepted.peer_addr().unwrap(), early.local_addr().unwrap(), "a connection already made is served");
        assert!(timeout(Duration::from_millis(50), gate.accept()).await.is_err());
        assert!(TcpStream::connect(address).await.is_err());
        switch.send_replace(true);
        let accepting = tokio::spawn(async move { gate.accept().await });
        let mut late = loop {
            if let Ok(stream) = TcpStream::connect(address).await {
                break stream;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        accepting.await.unwrap().write_all(b"hi").await.unwrap();
        let mut text = [0; 2];
        late.read_exact(&mut text).await.unwrap();
        assert_eq!(&text, b"hi");
    }
}

//! A scripted server: reads whole requests and answers each with exactly the bytes it was told, for what a simulated engine never does.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use bytes::BytesMut;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// What to do with a connection next.
#[derive(Debug, Clone)]
pub enum Act {
    /// Read one whole request (head, and a body by its length or chunks).
    Read,
    /// Send these bytes.
    Send(Vec<u8>),
    /// Wait.
    Wait(Duration),
    /// Reset the connection.
    Reset,
}

/// A server that plays the same acts on every connection and then closes it.
#[derive(Debug)]
pub struct Upstream {
    address: SocketAddr,
    received: Arc<Mutex<Vec<Vec<u8>>>>,
    accepting: JoinHandle<()>,
}

impl Upstream {
    /// Listens on a free port of this host.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn start(acts: Vec<Act>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("listen for a scripted server")?;
        let address = listener.local_addr().context("read its address")?;
        let received = Arc::new(Mutex::default());
        let seen = Arc::clone(&received);
        let accepting = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(play(stream, acts.clone(), Arc::clone(&seen)));
            }
        });
        Ok(Self { address, received, accepting })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Listens no more; connects are refused from then on.
    pub async fn stop(&mut self) {
        self.accepting.abort();
        // Aborted or ended: either way its socket is gone.
        drop((&mut self.accepting).await);
    }

    /// The exact bytes of each request read, in the order they were complete.
    pub fn received(&self) -> Vec<Vec<u8>> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn play(mut stream: TcpStream, acts: Vec<Act>, received: Arc<Mutex<Vec<Vec<u8>>>>) {
    let mut buffer = BytesMut::new();
    for act in acts {
        match act {
            Act::Read => match request(&mut stream, &mut buffer).await {
                Some(request) => received.lock().unwrap_or_else(PoisonError::into_inner).push(request),
                None => return,
            },
            Act::Send(bytes) => {
                if stream.write_all(&bytes).await.is_err() {
                    return;
                }
            }
            Act::Wait(time) => tokio::time::sleep(time).await,
            Act::Reset => return crate::engine::reset_on_close(&stream),
        }
    }
}

/// The bytes of the next request; none when the connection ends first.
async fn request(stream: &mut TcpStream, buffer: &mut BytesMut) -> Option<Vec<u8>> {
    loop {
        if let Some(length) = length(buffer) {
            return Some(buffer.split_to(length).to_vec());
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

/// The length of the first request in `bytes`, once it is all there.
fn length(bytes: &[u8]) -> Option<usize> {
    let body = find(bytes, b"\r\n\r\n")? + 4;
    let head = String::from_utf8_lossy(&bytes[..body]).to_ascii_lowercase();
    let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let end = if field("transfer-encoding") == Some("chunked") {
        body + chunked(&bytes[body..])?
    } else {
        body + field("content-length").and_then(|length| length.parse::<usize>().ok()).unwrap_or(0)
    };
    (end <= bytes.len()).then_some(end)
}

/// The length of a chunked body without trailers.
fn chunked(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let line = find(&bytes[at..], b"\r\n")?;
        let size = usize::from_str_radix(String::from_utf8_lossy(&bytes[at..at + line]).trim(), 16).ok()?;
        at += line + 2 + size + 2;
        if at > bytes.len() {
            return None;
        }
        if size == 0 {
            return Some(at);
        }
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use super::{Act, Upstream, length};
    use crate::harness::http::{Client, End, request};

    #[test]
    fn a_request_is_whole_with_its_last_body_byte() {
        let sized = request("POST", "/", "h", &[], b"abc");
        let chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n".to_vec();
        for whole in [sized, chunked, request("GET", "/", "h", &[], b"")] {
            assert_eq!(length(&whole), Some(whole.len()));
            assert_eq!(length(&whole[..whole.len() - 1]), None);
            let two = [whole.clone(), b"GET".to_vec()].concat();
            assert_eq!(length(&two), Some(whole.len()));
        }
    }

    #[tokio::test]
    async fn it_answers_with_the_bytes_it_was_told_and_keeps_those_it_got() {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab".to_vec();
        let upstream = Upstream::start(vec![Act::Read, Act::Send(answer)]).await.unwrap();
        let mut client = Client::connect(upstream.address()).await.unwrap();
        let sent = request("POST", "/x", "h", &[("X-Odd", " 1")], b"body");
        client.send(&sent).await.unwrap();
        let answer = client.answer().await.unwrap();
        assert_eq!((answer.head.status, answer.body.text().as_str(), answer.body.end), (200, "ab", End::Closed));
        assert_eq!(upstream.received(), [sent]);
    }
}

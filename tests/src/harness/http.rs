//! An HTTP/1.1 client that sends exactly the bytes it is given and keeps exactly those it gets, with the time of each piece.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::{Buf as _, Bytes, BytesMut};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

/// The longest head read: as much as any server here sends.
const HEAD_MAX: usize = 256 * 1024;

/// How long one answer may take in the helpers that read a whole one.
const ANSWER_LIMIT: Duration = Duration::from_mins(1);

/// One connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    buffer: BytesMut,
}

/// Status line and header fields.
#[derive(Debug, Clone)]
pub struct Head {
    /// Status code.
    pub status: u16,
    /// `HTTP/1.1` or so.
    pub version: String,
    /// Fields in the order they came, names as they came.
    pub headers: Vec<(String, String)>,
    /// All of it, the empty line included.
    pub raw: Bytes,
}

impl Head {
    /// The first value of a field, by name in any case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    fn parse(raw: &Bytes) -> anyhow::Result<Self> {
        let text = std::str::from_utf8(raw).context("read the head as text")?;
        let mut lines = text.split("\r\n");
        let status_line = lines.next().unwrap_or_default();
        let mut words = status_line.splitn(3, ' ');
        let version = words.next().unwrap_or_default().to_owned();
        let status =
            words.next().unwrap_or_default().parse().with_context(|| format!("read the status of `{status_line}`"))?;
        let field = |line: &str| {
            let (name, value) = line.split_once(':').with_context(|| format!("read the field `{line}`"))?;
            Ok((name.to_owned(), value.trim().to_owned()))
        };
        let headers = lines.filter(|line| !line.is_empty()).map(field).collect::<anyhow::Result<_>>()?;
        Ok(Self { status, version, headers, raw: raw.clone() })
    }
}

/// A piece of a body, and when it was there.
#[derive(Debug, Clone)]
pub struct Piece {
    /// One chunk of a chunked body; else what one read gave.
    pub bytes: Bytes,
    /// When it was complete.
    pub at: Instant,
}

/// How a body ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// As its framing promised.
    Complete,
    /// The connection was closed before.
    Closed,
    /// The connection was reset.
    Reset,
}

/// A body as far as it came.
#[derive(Debug, Clone)]
pub struct Body {
    /// Its pieces in order.
    pub pieces: Vec<Piece>,
    /// How it ended.
    pub end: End,
}

impl Body {
    /// The whole body.
    pub fn bytes(&self) -> Vec<u8> {
        self.pieces.iter().flat_map(|piece| piece.bytes.iter().copied()).collect()
    }

    /// The whole body as text; what is no UTF-8 is replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }

    /// The body as JSON; null when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes()).unwrap_or(Value::Null)
    }

    /// The `data:` of each server-sent event.
    pub fn events(&self) -> Vec<String> {
        self.text().split("\n\n").filter_map(|event| event.strip_prefix("data: ").map(str::to_owned)).collect()
    }
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Its head.
    pub head: Head,
    /// Its body.
    pub body: Body,
}

impl Answer {
    /// The engine that answered, as the simulated ones say.
    pub fn engine(&self) -> &str {
        self.head.header("x-sim-engine").unwrap_or_default()
    }

    /// `usage.prompt_tokens_details.cached_tokens` of an answer that is not streamed.
    pub fn cached_tokens(&self) -> Option<u64> {
        self.body.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    }
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// When the connection is refused or the host unreachable.
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        Ok(Self::over(TcpStream::connect(address).await?))
    }

    /// Speaks over a connection made elsewhere, such as in a network namespace.
    pub fn over(stream: TcpStream) -> Self {
        if let Err(cause) = stream.set_nodelay(true) {
            tracing::debug!(%cause, "no TCP_NODELAY");
        }
        Self { stream, buffer: BytesMut::new() }
    }

    /// The socket itself, for options and addresses.
    pub fn socket(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends exactly these bytes.
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Sends a request with `Host`, the fields given and, where there is a body, `Content-Length`.
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<()> {
        let peer = self.stream.peer_addr()?;
        self.send(&request(method, path, &peer.to_string(), headers, body)).await
    }

    /// Ends our side of the connection; the answer can still be read.
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn finish_sending(&mut self) -> io::Result<()> {
        self.stream.shutdown().await
    }

    /// The next head.
    ///
    /// # Errors
    /// When the connection ends before it, or it is no HTTP.
    pub async fn head(&mut self) -> anyhow::Result<Head> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                return Head::parse(&self.buffer.split_to(end + 4).freeze());
            }
            ensure!(self.buffer.len() < HEAD_MAX, "a head of more than {HEAD_MAX} bytes");
            if self.fill().await.context("read a head")? == 0 {
                bail!("the connection ended before a head; it sent {:?}", String::from_utf8_lossy(&self.buffer));
            }
        }
    }

    /// The body after `head`, which answers a request with a method other than HEAD.
    ///
    /// # Errors
    /// When its framing makes no sense. A body that is cut off is no error, see [`Body::end`].
    pub async fn body(&mut self, head: &Head) -> anyhow::Result<Body> {
        let mut pieces = Vec::new();
        let end = match Framing::of(head)? {
            Framing::None => End::Complete,
            Framing::Length(length) => self.sized(length, &mut pieces).await,
            Framing::Chunked => self.chunked(&mut pieces).await?,
            Framing::UntilClose => match self.sized(usize::MAX, &mut pieces).await {
                End::Closed => End::Complete,
                end => end,
            },
        };
        Ok(Body { pieces, end })
    }

    /// The next chunk of a chunked body, none after the last; for tests that act between chunks.
    ///
    /// # Errors
    /// When the connection ends inside the body.
    pub async fn chunk(&mut self) -> anyhow::Result<Option<Bytes>> {
        match self.next_chunk().await? {
            Ok(bytes) => Ok(bytes),
            Err(end) => bail!("the body was cut off: {end:?}"),
        }
    }

    /// A whole answer.
    ///
    /// # Errors
    /// As [`Client::head`] and [`Client::body`], and after a minute.
    pub async fn answer(&mut self) -> anyhow::Result<Answer> {
        let reading = async {
            let head = self.head().await?;
            let body = self.body(&head).await?;
            Ok(Answer { head, body })
        };
        timeout(ANSWER_LIMIT, reading).await.context("wait for an answer")?
    }

    /// Waits until the other side has closed, and says how; bytes that come before are dropped.
    pub async fn closed(&mut self) -> End {
        loop {
            self.buffer.clear();
            match self.fill().await {
                Ok(0) => return End::Closed,
                Ok(_) => {}
                Err(_) => return End::Reset,
            }
        }
    }

    async fn sized(&mut self, mut left: usize, pieces: &mut Vec<Piece>) -> End {
        while left > 0 {
            if self.buffer.is_empty() {
                match self.fill().await {
                    Ok(0) => return End::Closed,
                    Ok(_) => {}
                    Err(_) => return End::Reset,
                }
            }
            let bytes = self.buffer.split_to(left.min(self.buffer.len())).freeze();
            left -= bytes.len();
            pieces.push(Piece { bytes, at: Instant::now() });
        }
        End::Complete
    }

    async fn chunked(&mut self, pieces: &mut Vec<Piece>) -> anyhow::Result<End> {
        loop {
            match self.next_chunk().await? {
                Ok(Some(bytes)) => pieces.push(Piece { bytes, at: Instant::now() }),
                Ok(None) => return Ok(End::Complete),
                Err(end) => return Ok(end),
            }
        }
    }

    async fn next_chunk(&mut self) -> anyhow::Result<Result<Option<Bytes>, End>> {
        let line = match self.line().await {
            Ok(line) => line,
            Err(end) => return Ok(Err(end)),
        };
        let size = line.split(';').next().unwrap_or_default().trim();
        let size = usize::from_str_radix(size, 16).with_context(|| format!("read the chunk size `{line}`"))?;
        if size == 0 {
            return Ok(self.trailers().await.map(|()| None));
        }
        while self.buffer.len() < size + 2 {
            match self.fill().await {
                Ok(0) => return Ok(Err(End::Closed)),
                Ok(_) => {}
                Err(_) => return Ok(Err(End::Reset)),
            }
        }
        let bytes = self.buffer.split_to(size).freeze();
        ensure!(self.buffer.starts_with(b"\r\n"), "a chunk does not end where it says");
        self.buffer.advance(2);
        Ok(Ok(Some(bytes)))
    }

    async fn trailers(&mut self) -> Result<(), End> {
        while !self.line().await?.is_empty() {}
        Ok(())
    }

    async fn line(&mut self) -> Result<String, End> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n") {
                let line = self.buffer.split_to(end + 2);
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            match self.fill().await {
                Ok(0) => return Err(End::Closed),
                Ok(_) => {}
                Err(_) => return Err(End::Reset),
            }
        }
    }

    async fn fill(&mut self) -> io::Result<usize> {
        self.stream.read_buf(&mut self.buffer).await
    }
}

enum Framing {
    None,
    Length(usize),
    Chunked,
    UntilClose,
}

impl Framing {
    fn of(head: &Head) -> anyhow::Result<Self> {
        if head.status < 200 || head.status == 204 || head.status == 304 {
            return Ok(Self::None);
        }
        if head.header("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
            return Ok(Self::Chunked);
        }
        match head.header("content-length") {
            Some(length) => Ok(Self::Length(length.parse().with_context(|| format!("read the length `{length}`"))?)),
            None => Ok(Self::UntilClose),
        }
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// The bytes of a request.
pub fn request(method: &str, path: &str, host: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut out = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n").into_bytes();
    for (name, value) in headers {
        out.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    if !body.is_empty() {
        out.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
    out
}

/// GET over a connection of its own.
///
/// # Errors
/// When there is no whole answer.
pub async fn get(address: SocketAddr, path: &str) -> anyhow::Result<Answer> {
    exchange(address, "GET", path, &[], b"").await
}

/// POST of JSON over a connection of its own.
///
/// # Errors
/// When there is no whole answer.
pub async fn post(address: SocketAddr, path: &str, body: &Value) -> anyhow::Result<Answer> {
    exchange(address, "POST", path, &[("Content-Type", "application/json")], body.to_string().as_bytes()).await
}

/// One request and its answer over a connection of its own.
///
/// # Errors
/// When there is no whole answer.
pub async fn exchange(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> anyhow::Result<Answer> {
    let mut client = Client::connect(address).await.with_context(|| format!("connect to {address}"))?;
    client.request(method, path, headers, body).await.with_context(|| format!("send {method} {path}"))?;
    client.answer().await.with_context(|| format!("{method} {path} at {address}"))
}

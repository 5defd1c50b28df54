//! A checked pipe between an engine and the zeromq crate.
//!
//! The crate dials for ever by itself, does not say when a peer has gone, and reserves whatever length a frame claims: one
//! bad frame would end the whole process. So this dials, and hands the crate the engine's bytes through a loopback
//! connection, frame heads checked. The pipe's end is the sign that the engine is gone.
//!
//! The pipe opens to this process only: the crate presents a secret as its ZMTP identity, and nothing an engine says
//! after its greeting is passed on before that was seen.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use zeromq::SocketOptions;
use zeromq::util::PeerIdentity;

/// How long a connection attempt may take: a second is a lost SYN and its repetition.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long the handshake through the pipe may take.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Idle connections are probed every second, since a publisher may be silent for hours and a dead one is.
const KEEPALIVE: Duration = Duration::from_secs(1);
/// Unanswered probes until a connection counts as dead.
const KEEPALIVE_PROBES: u32 = 3;
/// The greeting that begins each ZMTP connection. Source: ZeroMQ RFC 23.
const GREETING: usize = 64;
/// The largest message: a batch with the blocks of a million tokens has some 8 MB.
const MESSAGE_MAX: u64 = 64 << 20;
/// Frames of a message: a replay answer has four.
const FRAMES_MAX: u32 = 16;
/// The largest command: a handshake has some hundred bytes.
const COMMAND_MAX: u64 = 1 << 12;
/// Bytes passed on at a time.
const CHUNK: usize = 64 << 10;

/// Dials an endpoint: each address of `host` in turn.
///
/// # Errors
/// The last address's error; `TimedOut` when it did not answer.
pub(super) async fn dial(host: &str, port: u16) -> io::Result<TcpStream> {
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let addresses = timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((host, port))).await.map_err(late)??;
    for address in addresses {
        match timeout(CONNECT_TIMEOUT, connect(address)).await.map_err(late).and_then(|connected| connected) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn late(elapsed: tokio::time::error::Elapsed) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, elapsed)
}

async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE).with_retries(KEEPALIVE_PROBES);
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    Ok(stream)
}

/// The crate's side of a pipe.
#[derive(Debug)]
pub(super) struct Pipe {
    listener: TcpListener,
    secret: [u8; 16],
}

impl Pipe {
    /// A pipe that waits for the crate to connect.
    ///
    /// # Errors
    /// Where the loopback interface is down, or no port is left.
    pub(super) async fn new() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        Ok(Self { listener, secret: secret() })
    }

    /// Where the crate is to connect.
    ///
    /// # Errors
    /// As the operating system says.
    pub(super) fn endpoint(&self) -> io::Result<String> {
        Ok(format!("tcp://{}", self.listener.local_addr()?))
    }

    /// The options with which it is to connect.
    pub(super) fn options(&self) -> SocketOptions {
        let mut options = SocketOptions::default();
        options.connect_timeout(HANDSHAKE_TIMEOUT);
        if let Ok(identity) = PeerIdentity::try_from(&self.secret[..]) {
            options.peer_identity(identity);
        }
        options
    }

    /// Joins the crate and the engine until one of them ends.
    ///
    /// # Errors
    /// What ended the pipe: a broken connection, or `InvalidData` for bytes that are no ZMTP or too large.
    pub(super) async fn run(self, mut engine: TcpStream) -> io::Result<()> {
        let mut ours = self.accept().await?;
        let (mut from_engine, mut to_engine) = engine.split();
        let (mut from_us, mut to_us) = ours.split();
        let mut scanner = Scanner::default();
        timeout(HANDSHAKE_TIMEOUT, async {
            // Our greeting first: an engine says no more than a signature before it.
            let mut greeting = [0; GREETING];
            from_us.read_exact(&mut greeting).await?;
            to_engine.write_all(&greeting).await?;
            from_engine.read_exact(&mut greeting).await?;
            scanner.scan(&greeting)?;
            to_us.write_all(&greeting).await?;
            let handshake = self.handshake(&mut from_us).await?;
            to_engine.write_all(&handshake).await
        })
        .await
        .map_err(late)??;
        let up = async {
            tokio::io::copy(&mut from_us, &mut to_engine).await?;
            io::Result::Ok(())
        };
        let down = async {
            let mut chunk = vec![0; CHUNK];
            loop {
                let length = from_engine.read(&mut chunk).await?;
                if length == 0 {
                    return to_us.shutdown().await;
                }
                scanner.scan(&chunk[..length])?;
                to_us.write_all(&chunk[..length]).await?;
            }
        };
        tokio::select! {
            ended = down => ended,
            ended = up => ended,
        }
    }

    async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = timeout(HANDSHAKE_TIMEOUT, self.listener.accept()).await.map_err(late)??;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Reads our side's handshake, a short command, and checks that it is ours.
    async fn handshake(&self, from_us: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Vec<u8>> {
        let mut command = vec![0; 2];
        from_us.read_exact(&mut command).await?;
        command.resize(2 + usize::from(command[1]), 0);
        from_us.read_exact(&mut command[2..]).await?;
        if command[0] == COMMAND && command.windows(self.secret.len()).any(|window| window == self.secret) {
            return Ok(command);
        }
        Err(io::Error::new(io::ErrorKind::PermissionDenied, "another process connected to the pipe"))
    }
}

/// Sixteen bytes that nobody can guess: the standard library seeds its hashers from the system's randomness.
fn secret() -> [u8; 16] {
    use std::hash::{BuildHasher, RandomState};
    let random = || RandomState::new().hash_one(0).to_be_bytes();
    let mut secret = [0; 16];
    secret[..8].copy_from_slice(&random());
    secret[8..].copy_from_slice(&random());
    // A ZMTP identity must not begin with zero.
    secret[0] |= 1;
    secret
}

/// Follows ZMTP framing and stops at what must not reach the crate.
#[derive(Debug)]
struct Scanner {
    state: Part,
    /// Bytes and frames of the message so far.
    message: u64,
    frames: u32,
    greeting: [u8; GREETING],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Greeting { read: usize },
    Flags,
    Length { flags: u8, left: u8, length: u64 },
    Body { left: u64 },
}

impl Default for Scanner {
    fn default() -> Self {
        Self { state: Part::Greeting { read: 0 }, message: 0, frames: 0, greeting: [0; GREETING] }
    }
}

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

impl Scanner {
    fn scan(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while let [first, rest @ ..] = bytes {
            bytes = rest;
            self.state = match self.state {
                Part::Greeting { read } => self.greet(read, *first)?,
                Part::Flags => Self::flags(*first)?,
                Part::Length { flags, left, length } => {
                    let length = length << 8 | u64::from(*first);
                    if left > 1 { Part::Length { flags, left: left - 1, length } } else { self.body(flags, length)? }
                }
                Part::Body { left } => {
                    // The byte just taken, and as many of the rest as belong to it.
                    let more = usize::try_from(left - 1).unwrap_or(usize::MAX).min(bytes.len());
                    bytes = &bytes[more..];
                    body_or_next(left - 1 - more as u64)
                }
            };
        }
        Ok(())
    }

    fn greet(&mut self, read: usize, byte: u8) -> io::Result<Part> {
        self.greeting[read] = byte;
        if read + 1 < GREETING {
            return Ok(Part::Greeting { read: read + 1 });
        }
        // Signature, major version 3, no security mechanism.
        let fits = self.greeting[0] == 0xff && self.greeting[9] == 0x7f && self.greeting[10] >= 3;
        if fits && self.greeting[12..32].starts_with(b"NULL\0") {
            return Ok(Part::Flags);
        }
        Err(invalid("no ZMTP 3 greeting without security"))
    }

    fn flags(flags: u8) -> io::Result<Part> {
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
            return Err(invalid("reserved frame flags"));
        }
        Ok(Part::Length { flags, left: if flags & LONG == 0 { 1 } else { 8 }, length: 0 })
    }

    fn body(&mut self, flags: u8, length: u64) -> io::Result<Part> {
        if flags & COMMAND != 0 {
            if length > COMMAND_MAX {
                return Err(invalid("a command that is too large"));
            }
            return Ok(body_or_next(length));
        }
        self.frames += 1;
        self.message = self.message.saturating_add(length);
        if self.message > MESSAGE_MAX || self.frames > FRAMES_MAX {
            return Err(invalid("a message that is too large"));
        }
        if flags & MORE == 0 {
            (self.message, self.frames) = (0, 0);
        }
        Ok(body_or_next(length))
    }
}

fn body_or_next(left: u64) -> Part {
    if left == 0 { Part::Flags } else { Part::Body { left } }
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn greeting() -> Vec<u8> {
        let mut greeting = vec![0; GREETING];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        greeting
    }

    fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
        let length = body.len() as u64;
        let head = if flags & LONG == 0 {
            vec![flags, body.len().try_into().unwrap()]
        } else {
            [&[flags][..], &length.to_be_bytes()].concat()
        };
        [head, body.to_vec()].concat()
    }

    fn scan(bytes: &[u8]) -> io::Result<()> {
        Scanner::default().scan(bytes)
    }

    fn after_greeting(bytes: &[u8]) -> io::Result<()> {
        scan(&[&greeting()[..], bytes].concat())
    }

    #[test]
    fn an_honest_conversation_passes() {
        let message = [frame(MORE, b""), frame(MORE | LONG, &[7; 300]), frame(LONG, &vec![8; 70_000])].concat();
        let conversation = [frame(COMMAND, b"\x05READY"), message.clone(), message].concat();
        assert!(after_greeting(&conversation).is_ok());
    }

    #[test]
    fn a_length_that_would_exhaust_memory_is_stopped_at_its_head() {
        for length in [MESSAGE_MAX + 1, 1 << 40, 1 << 62, u64::MAX] {
            let head = [&[LONG][..], &length.to_be_bytes()].concat();
            assert!(after_greeting(&head).is_err(), "{length}");
        }
    }

    #[test]
    fn a_message_without_an_end_is_stopped() {
        let frames = frame(MORE, b"x").repeat(FRAMES_MAX as usize + 1);
        assert!(after_greeting(&frames).is_err());
        let half = [&[MORE | LONG][..], &(MESSAGE_MAX / 2 + 1).to_be_bytes()].concat();
        let body = vec![0; usize::try_from(MESSAGE_MAX / 2 + 1).unwrap()];
        assert!(after_greeting(&[&half[..], &body, &half].concat()).is_err(), "the parts of a message add up");
    }

    #[test]
    fn other_protocols_and_secured_ones_are_refused() {
        assert!(scan(&[b"HTTP/1.1 400 Bad Request\r\n\r\n", &[b' '; 64][..]].concat()).is_err());
        let mut plain = greeting();
        plain[12..17].copy_from_slice(b"PLAIN");
        assert!(scan(&plain).is_err());
        let mut old = greeting();
        old[10] = 1;
        assert!(scan(&old).is_err());
        assert!(after_greeting(&[0x80, 0]).is_err(), "reserved flags");
    }

    proptest! {
        #[test]
        fn how_bytes_are_cut_makes_no_difference(
            frames in prop::collection::vec((0..3u8, prop::collection::vec(any::<u8>(), 0..200)), 0..12),
            garbage in prop::collection::vec(any::<u8>(), 0..20),
            cuts in prop::collection::vec(1..50usize, 1..400),
        ) {
            let frames: Vec<_> = frames.into_iter().flat_map(|(flags, body)| frame(flags, &body)).collect();
            let bytes = [greeting(), frames, garbage].concat();
            let mut cut = Scanner::default();
            let mut rest = &bytes[..];
            let mut cuts = cuts.into_iter().cycle();
            let mut outcome = Ok(());
            while !rest.is_empty() && outcome.is_ok() {
                let (part, others) = rest.split_at(cuts.next().unwrap().min(rest.len()));
                outcome = cut.scan(part);
                rest = others;
            }
            prop_assert_eq!(outcome.is_ok(), scan(&bytes).is_ok());
        }
    }
}

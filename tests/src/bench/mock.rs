//! The mock upstream: answers as an OpenAI server does, from one thread, as cheaply as may be.
//!
//! A request says in its field `user` which answer it wants ([`Wish`]). Answers name the hash of the request's body. Streams share
//! a beat of 20 ms; a tenth of them is served every 2 ms, as those of engines whose steps fall as they fall.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context as _;
use mio::event::Event;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Registry, Token};
use socket2::{Domain, Socket, Type};
use xxhash_rust::xxh3::xxh3_64;

use super::framing::{self, Body};
use super::wire::{self, Wish};

/// Nanoseconds between two events of a stream.
const BEAT: u64 = 20_000_000;
/// Parts of a beat, each with its share of the streams.
const PHASES: usize = 10;
/// Bytes read at a time.
const READ: usize = 256 << 10;
/// The most that a request may have.
const REQUEST_MAX: usize = 16 << 20;
const BACKLOG: i32 = 4096;
const LAST: &[u8] = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
/// What routers ask before they send anything.
const MODELS: &str = r#"{"object":"list","data":[{"id":"kvlb/bench","object":"model","created":1,"owned_by":"x","root":"kvlb/bench","max_model_len":32768}]}"#;

/// An OpenAI-like upstream.
#[derive(Clone, Debug, clap::Args)]
pub struct MockFlags {
    /// Ports to listen on, at every address
    #[arg(long, value_delimiter = ',', default_values_t = [9101, 9102])]
    ports: Vec<u16>,
}

/// Serves until it is ended.
///
/// # Errors
/// When a port cannot be had.
pub fn mock(flags: &MockFlags) -> anyhow::Result<()> {
    Mock::new(&flags.ports)?.serve()
}

struct Mock {
    poll: Poll,
    listeners: Vec<TcpListener>,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    streams: Streams,
    buffer: Vec<u8>,
    /// The last JSON answer, which is most often the next one.
    answer: (usize, Vec<u8>),
}

struct Connection {
    socket: TcpStream,
    /// What has been received of the next request.
    received: Vec<u8>,
    /// The bytes of this request, once its head is there, and those of its head.
    needed: Option<(usize, usize)>,
    closes: bool,
    unsent: Vec<u8>,
    stream: Option<Stream>,
}

struct Stream {
    sent: u64,
    left: usize,
    every: usize,
    /// Beats until the next event.
    wait: usize,
}

/// All streams, by the phase that serves them.
struct Streams {
    phases: [Vec<usize>; PHASES],
    phase: usize,
    next: u64,
    begun: usize,
    /// One event in its chunk.
    chunk: Vec<u8>,
    /// Where the event begins in it.
    at: usize,
}

/// The connection is of no use any more.
struct Broken;

impl Mock {
    fn new(ports: &[u16]) -> anyhow::Result<Self> {
        let poll = Poll::new()?;
        let mut listeners = Vec::new();
        for (number, port) in ports.iter().enumerate() {
            let mut listener = listen(*port).with_context(|| format!("listen on port {port}"))?;
            poll.registry().register(&mut listener, Token(number), Interest::READABLE)?;
            listeners.push(listener);
        }
        let event = wire::event();
        let size = format!("{:x}\r\n", event.len());
        let chunk = [size.as_bytes(), &event, b"\r\n"].concat();
        let phases = std::array::from_fn(|_| Vec::new());
        let streams = Streams { phases, phase: 0, next: wire::now(), begun: 0, chunk, at: size.len() };
        let (connections, free) = (Vec::new(), Vec::new());
        Ok(Self { poll, listeners, connections, free, streams, buffer: vec![0; READ], answer: (0, Vec::new()) })
    }

    fn serve(&mut self) -> anyhow::Result<()> {
        let mut events = Events::with_capacity(1024);
        loop {
            let wait = self.streams.wait();
            match self.poll.poll(&mut events, wait) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error.into()),
                _ => {}
            }
            for event in &events {
                self.react(event)?;
            }
            if self.streams.wait().is_some_and(|wait| wait.is_zero()) {
                self.beat();
            }
        }
    }

    fn react(&mut self, event: &Event) -> anyhow::Result<()> {
        let Token(token) = event.token();
        let Some(at) = token.checked_sub(self.listeners.len()) else { return self.accept(token) };
        let Some(connection) = self.connections.get_mut(at).and_then(Option::as_mut) else { return Ok(()) };
        let mut outcome = Ok(());
        if event.is_writable() {
            outcome = connection.flush();
        }
        if outcome.is_ok() && (event.is_readable() || event.is_read_closed() || event.is_error()) {
            outcome = connection.receive(&mut self.buffer, event.is_read_closed()).and_then(|()| self.answer(at));
        }
        if outcome.is_err() {
            self.close(at);
        }
        Ok(())
    }

    fn accept(&mut self, listener: usize) -> anyhow::Result<()> {
        // Where descriptors run out, the error comes again and again: better to end at once.
        loop {
            let mut socket = match self.listeners[listener].accept() {
                Ok((socket, _from)) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error).context("accept a connection"),
            };
            let at = self.free.pop().unwrap_or_else(|| {
                self.connections.push(None);
                self.connections.len() - 1
            });
            register(self.poll.registry(), &mut socket, at + self.listeners.len())?;
            let (received, unsent) = (Vec::with_capacity(4096), Vec::new());
            self.connections[at] =
                Some(Connection { socket, received, needed: None, closes: false, unsent, stream: None });
        }
    }

    /// Answers the request that is there in full, if one is.
    fn answer(&mut self, at: usize) -> Result<(), Broken> {
        let Some(connection) = self.connections[at].as_mut() else { return Ok(()) };
        if connection.needed.is_none() {
            let Some(head) = framing::request(&connection.received).map_err(|_malformed| Broken)? else {
                return Ok(());
            };
            let Body::Length(length) = head.body else { return connection.refuse() };
            connection.needed = Some((head.len + length.min(REQUEST_MAX), head.len));
            connection.closes = head.closes;
        }
        let Some((needed, head)) = connection.needed.filter(|(needed, _)| connection.received.len() >= *needed) else {
            return Ok(());
        };
        if connection.received.starts_with(b"GET ") {
            connection.received.drain(..needed);
            connection.needed = None;
            connection.send(plain(MODELS.as_bytes(), 0).as_slice())?;
            return connection.done();
        }
        let body = &connection.received[head..needed];
        let (wish, hash) = (Wish::of(body), xxh3_64(body));
        connection.received.drain(..needed);
        connection.needed = None;
        match wish {
            Wish::Json(size) => {
                if self.answer.0 != size {
                    self.answer = (size, wire::json_answer(size));
                }
                connection.send(&plain(&self.answer.1, hash))?;
                connection.done()
            }
            Wish::Events { count, every } => {
                let head = format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-body-hash: {hash:016x}\r\n\
                     transfer-encoding: chunked\r\n\r\n"
                );
                connection.send(head.as_bytes())?;
                connection.stream = Some(Stream { sent: 0, left: count, every, wait: 1 });
                self.streams.begin(at);
                Ok(())
            }
        }
    }

    /// Serves the streams whose time has come.
    fn beat(&mut self) {
        let mut serving = self.streams.turn();
        let mut broken = Vec::new();
        serving.retain(|at| {
            let Some(connection) = self.connections[*at].as_mut() else { return false };
            connection.step(&mut self.streams).unwrap_or_else(|Broken| {
                broken.push(*at);
                false
            })
        });
        let phase = (self.streams.phase + PHASES - 1) % PHASES;
        self.streams.phases[phase] = serving;
        for at in broken {
            self.close(at);
        }
    }

    fn close(&mut self, at: usize) {
        if let Some(mut connection) = self.connections[at].take() {
            // A descriptor that is closed is not watched any more.
            drop(self.poll.registry().deregister(&mut connection.socket));
            if connection.stream.is_some() {
                self.streams.end(at);
            }
            self.free.push(at);
        }
    }
}

impl Streams {
    /// Until the next phase; None while there are no streams.
    fn wait(&self) -> Option<Duration> {
        let any = self.phases.iter().any(|phase| !phase.is_empty());
        any.then(|| Duration::from_nanos(self.next.saturating_sub(wire::now())))
    }

    fn begin(&mut self, at: usize) {
        if self.wait().is_none() {
            self.next = wire::now();
        }
        self.phases[self.begun % PHASES].push(at);
        self.begun += 1;
    }

    fn end(&mut self, at: usize) {
        for phase in &mut self.phases {
            phase.retain(|other| *other != at);
        }
    }

    /// The streams of this phase; the next one is due a tenth of a beat later.
    fn turn(&mut self) -> Vec<usize> {
        self.next = (self.next + BEAT / PHASES as u64).max(wire::now());
        let serving = std::mem::take(&mut self.phases[self.phase]);
        self.phase = (self.phase + 1) % PHASES;
        serving
    }
}

impl Connection {
    fn receive(&mut self, buffer: &mut [u8], to_the_end: bool) -> Result<(), Broken> {
        loop {
            match self.socket.read(buffer) {
                Ok(0) => return Err(Broken),
                Ok(count) => {
                    self.received.extend_from_slice(&buffer[..count]);
                    // No edge is lost: what comes after a short read is told anew.
                    if count < buffer.len() && !to_the_end {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_error) => return Err(Broken),
            }
        }
    }

    /// One beat of its stream; false once it has ended.
    fn step(&mut self, streams: &mut Streams) -> Result<bool, Broken> {
        let Some(stream) = self.stream.as_mut() else { return Ok(false) };
        stream.wait -= 1;
        if stream.wait > 0 {
            return Ok(true);
        }
        stream.wait = stream.every;
        if stream.left == 0 {
            self.stream = None;
            self.send(LAST)?;
            return self.done().map(|()| false);
        }
        let event = &mut streams.chunk[streams.at..];
        wire::put(&mut event[wire::EVENT_NUMBER], stream.sent);
        wire::put(&mut event[wire::EVENT_TIME], wire::now());
        stream.sent += 1;
        stream.left -= 1;
        self.send(&streams.chunk)?;
        Ok(true)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let sent = if self.unsent.is_empty() { write(&mut self.socket, bytes)? } else { 0 };
        self.unsent.extend_from_slice(&bytes[sent..]);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Broken> {
        if !self.unsent.is_empty() {
            let sent = write(&mut self.socket, &self.unsent)?;
            self.unsent.drain(..sent);
        }
        Ok(())
    }

    /// An answer is complete.
    fn done(&self) -> Result<(), Broken> {
        if self.closes { Err(Broken) } else { Ok(()) }
    }

    fn refuse(&mut self) -> Result<(), Broken> {
        self.send(b"HTTP/1.1 411 Length Required\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")?;
        Err(Broken)
    }
}

/// As much as the socket takes.
fn write(socket: &mut TcpStream, bytes: &[u8]) -> Result<usize, Broken> {
    let mut sent = 0;
    while sent < bytes.len() {
        match socket.write(&bytes[sent..]) {
            Ok(count) => sent += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_error) => return Err(Broken),
        }
    }
    Ok(sent)
}

fn plain(body: &[u8], hash: u64) -> Vec<u8> {
    let mut bytes = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-body-hash: {hash:016x}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None)?;
    socket.set_reuse_address(true)?;
    // Accepted sockets have it from their listener.
    socket.set_tcp_nodelay(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
    socket.listen(BACKLOG)?;
    Ok(TcpListener::from_std(socket.into()))
}

/// Watches a socket in both directions, once and for all.
pub(super) fn register(registry: &Registry, socket: &mut TcpStream, token: usize) -> io::Result<()> {
    registry.register(socket, Token(token), Interest::READABLE | Interest::WRITABLE)
}

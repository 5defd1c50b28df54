//! The load generator: sends the next request of a connection when the answer to the last one is complete and right.
//!
//! One thread and one event loop. Latency, CPU time and counts are those of the measured window only; faults count from the start.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use mio::net::TcpStream;
use mio::{Events, Poll};
use nix::sys::socket::{setsockopt, sockopt};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::check::{Answer, Checks, Expected, Fault, Progress};
use super::mock::register;
use super::process::Family;
use super::statistics::{Histogram, float};
use super::wire::{self, Request, Wish};

/// Connections opened at a time, so that no listener's queue overflows.
const OPENED_AT_ONCE: usize = 32;
/// Bytes read at a time.
const READ: usize = 256 << 10;
/// Bytes of a JSON answer.
const ANSWER: usize = 200;
/// Different prompts.
pub(super) const PROMPTS: usize = 8;
/// The longest that all connections may take to be there.
const OPENING_LIMIT: Duration = Duration::from_mins(1);
/// Source addresses 127.1.x.y: each has ports of its own.
const SOURCES: usize = 200;

/// How requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Shape {
    /// One after the other on each connection.
    Post,
    /// Each on a connection of its own.
    New,
    /// Streams, one after the other on each connection.
    Sse,
    /// One on each connection, which then stays open.
    Hold,
    /// Completions of a few prompts, one after the other on each connection.
    Prompts,
    /// The same to engines, which must have the prompts in their caches.
    Warm,
}

/// Requests over HTTP, every byte of whose answers is checked.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadFlags {
    /// Where to send them, on 127.0.0.1
    #[arg(long)]
    pub(super) port: u16,
    /// How they are sent
    #[arg(long, value_enum)]
    pub(super) shape: Shape,
    /// Connections at a time
    #[arg(long, default_value_t = 64)]
    pub(super) connections: usize,
    /// Bytes of a request's body
    #[arg(long, default_value_t = 2048)]
    pub(super) body: usize,
    /// How long to measure, in seconds
    #[arg(long, default_value_t = 2.0)]
    pub(super) seconds: f64,
    /// How long to run before that, in seconds
    #[arg(long, default_value_t = 0.5)]
    pub(super) warm: f64,
    /// Events of a stream
    #[arg(long, default_value_t = 100)]
    pub(super) events: usize,
    /// Beats of 20 ms from one event to the next
    #[arg(long, default_value_t = 1)]
    pub(super) every: usize,
    /// The model of completions
    #[arg(long, default_value = "m")]
    pub(super) model: String,
    /// The process whose CPU time and memory are measured
    #[arg(long)]
    pub(super) pid: u32,
    /// The proxy writes requests anew: do not compare their bytes
    #[arg(long)]
    pub(super) loose: bool,
}

/// What was measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measured {
    /// Requests or events.
    pub units: u64,
    /// The length of the window.
    pub seconds: f64,
    /// CPU time of the process a unit.
    pub cpu_us: f64,
    /// Latency of requests, or of events from the mock's hand.
    pub p50_us: f64,
    /// Latency that 99 of 100 do not exceed.
    pub p99_us: f64,
    /// Proportional set size before the first connection.
    pub memory_before: u64,
    /// Proportional set size at the end, with all connections open.
    pub memory_after: u64,
    /// Requests that were answered in full, from the start.
    pub answered: u64,
    /// Answers that did not come, or not in full.
    pub errors: u64,
    /// Answers with other bytes than were sent.
    pub wrong: u64,
    /// What the first of both was.
    pub first_fault: Option<String>,
}

/// Runs it.
///
/// # Errors
/// When sockets cannot be had, or connections cannot be opened.
pub fn load(flags: &LoadFlags) -> anyhow::Result<Measured> {
    Load::new(flags)?.run()
}

struct Load<'a> {
    flags: &'a LoadFlags,
    poll: Poll,
    requests: Vec<Request>,
    expected: Expected,
    event: Vec<u8>,
    family: Family,
    connections: Vec<Connection>,
    buffer: Vec<u8>,
    sources: usize,
    latencies: Histogram,
    /// Of events, from the mock's hand.
    event_latencies: Histogram,
    tally: Measured,
    /// Requests answered in the window.
    requests_measured: u64,
    /// Connections of [`Shape::Hold`] that have their answer.
    held: usize,
}

struct Connection {
    /// None where none could be opened.
    socket: Option<TcpStream>,
    sent: usize,
    begun: u64,
    answer: Answer,
}

impl<'a> Load<'a> {
    fn new(flags: &'a LoadFlags) -> anyhow::Result<Self> {
        let &LoadFlags { port, body, events: count, every, .. } = flags;
        let json = || Expected::Json(wire::json_answer(ANSWER));
        let prompts = || (0..PROMPTS).map(|number| Request::completion(port, body, &flags.model, number)).collect();
        let (requests, expected) = match flags.shape {
            Shape::Sse => (vec![Request::chat(port, body, Wish::Events { count, every })], Expected::Events(count)),
            Shape::Prompts => (prompts(), json()),
            Shape::Warm => (prompts(), Expected::Completion),
            Shape::Post | Shape::New | Shape::Hold => (vec![Request::chat(port, body, Wish::Json(ANSWER))], json()),
        };
        let family = Family::of(flags.pid);
        ensure!(family.cpu() > 0, "there is no process {}", flags.pid);
        let tally = Measured { memory_before: family.memory(), ..Measured::default() };
        Ok(Self {
            flags,
            poll: Poll::new()?,
            requests,
            expected,
            event: wire::event(),
            family,
            connections: Vec::new(),
            buffer: vec![0; READ],
            sources: 0,
            latencies: Histogram::default(),
            event_latencies: Histogram::default(),
            tally,
            requests_measured: 0,
            held: 0,
        })
    }

    fn run(mut self) -> anyhow::Result<Measured> {
        let mut events = Events::with_capacity(1024);
        let limit = wire::now() + nanoseconds(OPENING_LIMIT);
        while self.connections.len() < self.flags.connections {
            for _ in 0..OPENED_AT_ONCE.min(self.flags.connections - self.connections.len()) {
                let at = self.connections.len();
                self.connections.push(Connection { socket: None, sent: 0, begun: 0, answer: Answer::default() });
                self.open(at);
            }
            self.turn(&mut events, Duration::from_millis(2))?;
        }
        if self.flags.shape == Shape::Hold {
            while self.held < self.flags.connections {
                ensure!(wire::now() < limit, "only {} connections were answered", self.held);
                self.turn(&mut events, Duration::from_millis(20))?;
            }
        }
        self.until(seconds(self.flags.warm)?, &mut events)?;

        self.latencies.clear();
        self.event_latencies.clear();
        self.requests_measured = 0;
        let events_before = self.tally.units;
        let (cpu, began) = (self.family.cpu(), wire::now());
        self.until(seconds(self.flags.seconds)?, &mut events)?;
        let (cpu, length) = (self.family.cpu() - cpu, wire::now() - began);

        let events_seen = self.tally.units - events_before;
        let (units, latencies) = match self.flags.shape {
            Shape::Sse => (events_seen, &self.event_latencies),
            _ => (self.requests_measured, &self.latencies),
        };
        let mut tally = self.tally;
        tally.units = units;
        tally.seconds = float(length) / 1e9;
        tally.cpu_us = if units == 0 { 0.0 } else { float(cpu) / float(units) / 1e3 };
        tally.p50_us = latencies.percentile(50);
        tally.p99_us = latencies.percentile(99);
        tally.memory_after = self.family.memory();
        Ok(tally)
    }

    fn until(&mut self, length: Duration, events: &mut Events) -> anyhow::Result<()> {
        let end = wire::now() + nanoseconds(length);
        loop {
            let left = end.saturating_sub(wire::now());
            if left == 0 {
                return Ok(());
            }
            self.turn(events, Duration::from_nanos(left))?;
        }
    }

    fn turn(&mut self, events: &mut Events, wait: Duration) -> anyhow::Result<()> {
        match self.poll.poll(events, Some(wait)) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error).context("wait for answers"),
            _ => {}
        }
        for event in events.iter() {
            self.serve(event.token().0);
        }
        Ok(())
    }

    /// Sends and receives what can be on one connection.
    fn serve(&mut self, at: usize) {
        let request = &self.requests[at % self.requests.len()];
        let hash = (!self.flags.loose && self.flags.shape != Shape::Warm).then_some(request.hash.as_str());
        let checks = Checks { expected: &self.expected, event: &self.event, hash };
        let Connection { socket: Some(socket), sent, begun, answer } = &mut self.connections[at] else { return };
        let before = self.event_latencies.total();
        let outcome = send(socket, &request.bytes, sent)
            .and_then(|()| receive(socket, &mut self.buffer, answer, checks, &mut self.event_latencies));
        self.tally.units += self.event_latencies.total() - before;
        match outcome {
            Ok(Progress::Open) => {}
            Ok(Progress::Complete { closes }) => {
                self.latencies.add(wire::now() - *begun);
                self.requests_measured += 1;
                self.tally.answered += 1;
                match self.flags.shape {
                    Shape::Hold => {
                        self.held += 1;
                        answer.reset();
                    }
                    Shape::New => self.open(at),
                    _ if closes => self.open(at),
                    _ => self.next(at),
                }
            }
            Err(fault) => {
                self.fault(fault);
                self.open(at);
            }
        }
    }

    /// The next request on the same connection.
    fn next(&mut self, at: usize) {
        let bytes = &self.requests[at % self.requests.len()].bytes;
        let connection = &mut self.connections[at];
        connection.answer.reset();
        (connection.sent, connection.begun) = (0, wire::now());
        // What does not go now goes when the socket says so; if it is broken, the receiving side says so.
        if let Some(socket) = &mut connection.socket {
            let _told_later = send(socket, bytes, &mut connection.sent);
        }
    }

    /// A new connection in place of the one there.
    fn open(&mut self, at: usize) {
        self.sources += 1;
        let source = Ipv4Addr::from_bits(0x7f01_0002 + u32::try_from(self.sources % SOURCES).unwrap_or_default());
        let opened = connect(source, self.flags.port).and_then(|mut socket| {
            register(self.poll.registry(), &mut socket, at)?;
            Ok(socket)
        });
        if opened.is_err() {
            self.fault(Fault::Unconnected);
        }
        let connection = &mut self.connections[at];
        // Dropped with its watch.
        connection.socket = opened.ok();
        (connection.sent, connection.begun) = (0, wire::now());
        connection.answer.reset();
    }

    fn fault(&mut self, fault: Fault) {
        let tally = &mut self.tally;
        *(if fault.is_wrong_byte() { &mut tally.wrong } else { &mut tally.errors }) += 1;
        tally.first_fault.get_or_insert_with(|| fault.to_string());
    }
}

fn send(socket: &mut TcpStream, bytes: &[u8], sent: &mut usize) -> Result<(), Fault> {
    while *sent < bytes.len() {
        match socket.write(&bytes[*sent..]) {
            Ok(count) => *sent += count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_error) => return Err(Fault::Closed),
        }
    }
    Ok(())
}

/// Takes what has come; ends with the answer.
fn receive(
    socket: &mut TcpStream,
    buffer: &mut [u8],
    answer: &mut Answer,
    checks: Checks<'_>,
    latencies: &mut Histogram,
) -> Result<Progress, Fault> {
    loop {
        match socket.read(buffer) {
            Ok(0) => return answer.end(checks),
            Ok(count) => {
                let progress = answer.take(&buffer[..count], checks, wire::now(), latencies)?;
                if progress != Progress::Open {
                    return Ok(progress);
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) => {
                return Ok(Progress::Open);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_error) => return Err(Fault::Closed),
        }
    }
}

fn connect(source: Ipv4Addr, port: u16) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None)?;
    socket.set_tcp_nodelay(true)?;
    // The port is chosen with both ends known, so that all of them serve for each source address.
    setsockopt(&socket, sockopt::IpBindAddressNoPort, &true)?;
    socket.bind(&SocketAddr::from((source, 0)).into())?;
    match socket.connect(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into()) {
        Err(error) if error.raw_os_error() != Some(nix::errno::Errno::EINPROGRESS as i32) => Err(error),
        _ => Ok(TcpStream::from_std(socket.into())),
    }
}

fn seconds(number: f64) -> anyhow::Result<Duration> {
    Duration::try_from_secs_f64(number).context("read a time in seconds")
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

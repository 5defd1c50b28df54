//! The proxy under test, endpoints and clients made of plain sockets, and what the rest of kvlb would say.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use crate::clock;
use crate::fleet::Limits;
use crate::proxy::{
    Addresses, Arrival, Backplane, Body, Call, Config, ConnectFailure, Direction, Event, HandedOver, Haste, Head, Io,
    LegTerms, Link, Meter, Phase, Plan, Prefilled, Proxy, Pulse, Refused, Reply, Request, Retry, Standing, Survey,
    Target, Terms, bind, raise_descriptor_limit, ring,
};

/// How long a test waits for something that must happen.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// How soon an endpoint must see that its client has left.
pub(super) const LEAVING: Duration = Duration::from_millis(100);

/// Whether the io_uring half of the suite can run; says so where it cannot.
pub(super) fn uring_is_here() -> bool {
    match ring::available() {
        Ok(()) => true,
        Err(error) => {
            eprintln!("skipped: io_uring is not available ({error})");
            false
        }
    }
}

/// What the rest of kvlb says in a test.
#[derive(Debug)]
pub(in crate::proxy) struct Fake {
    pub(super) endpoints: Mutex<Vec<SocketAddr>>,
    pub(super) inspect: Mutex<Option<usize>>,
    pub(super) limits: Mutex<Limits>,
    pub(super) half_close: AtomicBool,
    pub(super) usage: AtomicBool,
    pub(super) heavy: AtomicBool,
    /// Bodies from this size on are heavy.
    pub(super) heavy_from: AtomicUsize,
    /// Heavy decisions begun; they do not end while the gate is shut.
    pub(super) begun: AtomicUsize,
    pub(super) gate: RwLock<()>,
    pub(super) decision_takes: Mutex<Duration>,
    pub(super) panics: AtomicBool,
    pub(super) retries_left: AtomicI64,
    /// Requests in flight, by endpoint.
    pub(super) load: [Arc<AtomicUsize>; 4],
    pub(super) events: Arc<Mutex<Vec<Event>>>,
    /// What each call that is over was asked and told.
    pub(super) told: Mutex<Vec<Told>>,
    /// Bodies as the decision saw them; `Err` is the word for an unseen one.
    pub(super) bodies: Mutex<Vec<Result<Vec<u8>, &'static str>>>,
    pub(super) hasty: Mutex<Vec<Haste>>,
    pub(super) fields: Mutex<Vec<u8>>,
    /// Fields of the request, by endpoint.
    pub(super) request_fields: Mutex<[&'static str; 4]>,
    pub(super) rules_with_models: Mutex<Vec<usize>>,
    /// Requests go out in two legs, the first to one of the first two endpoints.
    pub(super) legs: Mutex<Option<LegTerms>>,
    /// So many choices of a decode endpoint find no room.
    pub(super) full: AtomicUsize,
}

impl Fake {
    fn new(endpoints: Vec<SocketAddr>) -> Self {
        Self {
            endpoints: Mutex::new(endpoints),
            inspect: Mutex::new(Some(32 << 20)),
            limits: Mutex::default(),
            half_close: AtomicBool::new(false),
            usage: AtomicBool::new(true),
            heavy: AtomicBool::new(false),
            heavy_from: AtomicUsize::new(usize::MAX),
            begun: AtomicUsize::new(0),
            gate: RwLock::default(),
            decision_takes: Mutex::default(),
            panics: AtomicBool::new(false),
            retries_left: AtomicI64::new(i64::MAX),
            load: std::array::from_fn(|_| Arc::default()),
            events: Arc::default(),
            told: Mutex::default(),
            bodies: Mutex::default(),
            hasty: Mutex::default(),
            fields: Mutex::default(),
            request_fields: Mutex::default(),
            rules_with_models: Mutex::default(),
            legs: Mutex::default(),
            full: AtomicUsize::new(0),
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.load.iter().map(|load| load.load(Ordering::SeqCst)).sum()
    }

    fn call(self: &Arc<Self>, only: Option<usize>) -> FakeCall {
        FakeCall { fake: Arc::clone(self), only, told: Told::default(), decodes: false }
    }
}

/// What one call was asked and told.
#[derive(Clone, Debug, Default)]
pub(in crate::proxy) struct Told {
    /// The endpoints that it named.
    pub(super) chosen: Vec<usize>,
    pub(super) events: Vec<Event>,
}

impl Told {
    /// Whether the promise of [`Event`] was kept.
    fn is_sound(&self) -> bool {
        let Some((last, before)) = self.events.split_last() else { return self.chosen.is_empty() };
        let (mut passed_over, mut busy, mut answered) = (Vec::new(), Vec::new(), Vec::new());
        for event in before {
            match *event {
                Event::ConnectFailed { position, .. }
                | Event::Unasked { position }
                | Event::PrefillFailed { position, status: None }
                | Event::Lost { position } => {
                    passed_over.push(position);
                }
                Event::Busy { position, .. } | Event::PrefillFailed { position, status: Some(_) } => {
                    busy.push(position);
                    passed_over.push(position);
                }
                Event::Answered { position, .. } => answered.push(position),
                _ => return false,
            }
        }
        let position = match *last {
            Event::Finished { position, .. }
            | Event::Died { position, .. }
            | Event::BrokeOff { position }
            | Event::TimedOut { position, .. } => Some(position),
            Event::ClientLeft { position, .. } | Event::Replied { position, .. } | Event::CutOff { position } => {
                position
            }
            _ => return false,
        };
        // Every endpoint that was named is accounted for: passed over, or the one that the last event names.
        let at_last = self.chosen.strip_prefix(&passed_over[..]);
        let is_accounted_for = match (at_last, position) {
            (Some([only]), Some(position)) => *only == position,
            (Some([]), Some(position)) => busy.contains(&position),
            (Some([]), None) => true,
            _ => false,
        };
        let from_answer = matches!(last, Event::Finished { .. } | Event::BrokeOff { .. });
        is_accounted_for
            && answered.len() <= 1
            && answered.iter().all(|answered| Some(*answered) == position)
            && (!from_answer || answered.len() == 1)
    }
}

/// Shared behind a newtype so that calls can hold on to it.
#[derive(Debug)]
pub(in crate::proxy) struct FakePlane(pub(super) Arc<Fake>);

impl Backplane for FakePlane {
    type Call = FakeCall;
    type Pass = ();

    fn admit(&self, _arrival: &Arrival) -> Result<(), Refused> {
        Ok(())
    }

    fn survey(&self, head: &Head, _arrival: &Arrival) -> Result<Survey, Reply> {
        if head.path() == "/nobody" {
            return Err(Reply::error(404, "model_not_found", "nobody serves this"));
        }
        Ok(Survey {
            inspect: *self.0.inspect.lock(),
            body_limit: self.0.limits.lock().request_body,
            client_half_close: self.0.half_close.load(Ordering::SeqCst),
        })
    }

    fn is_heavy(&self, request: &Request) -> bool {
        let from = self.0.heavy_from.load(Ordering::SeqCst);
        self.0.heavy.load(Ordering::SeqCst) || matches!(request.body(), Body::Whole(body) if body.len() >= from)
    }

    fn begin(&self, request: &Request) -> Result<FakeCall, Reply> {
        assert!(!self.0.panics.load(Ordering::SeqCst), "on purpose");
        if self.is_heavy(request) {
            self.0.begun.fetch_add(1, Ordering::SeqCst);
            drop(self.0.gate.read());
        }
        let takes = *self.0.decision_takes.lock();
        if !takes.is_zero() {
            std::thread::sleep(takes);
        }
        self.0.bodies.lock().push(match request.body() {
            Body::Whole(body) => Ok(body.to_vec()),
            Body::Unseen(why) => Err(why.label()),
        });
        Ok(self.0.call(None))
    }

    fn begin_hastily(&self, _request: &Request, haste: Haste) -> Result<FakeCall, Reply> {
        self.0.hasty.lock().push(haste);
        Ok(self.0.call(None))
    }

    fn models(&self, _request: &Request) -> Vec<FakeCall> {
        self.0.rules_with_models.lock().iter().map(|endpoint| self.0.call(Some(*endpoint))).collect()
    }
}

#[derive(Debug)]
pub(in crate::proxy) struct FakeCall {
    fake: Arc<Fake>,
    only: Option<usize>,
    told: Told,
    decodes: bool,
}

impl Drop for FakeCall {
    fn drop(&mut self) {
        self.fake.told.lock().push(std::mem::take(&mut self.told));
    }
}

/// Counts a request as in flight while it lives.
#[derive(Debug)]
pub(in crate::proxy) struct Guard(Arc<AtomicUsize>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Call for FakeCall {
    type Guard = Guard;

    fn terms(&self) -> Terms {
        Terms {
            limits: *self.fake.limits.lock(),
            forwarded_headers: true,
            client_half_close: self.fake.half_close.load(Ordering::SeqCst),
            usage: self.fake.usage.load(Ordering::SeqCst),
        }
    }

    fn plan(&mut self, _body: &[u8]) -> Plan {
        self.fake.legs.lock().clone().map_or(Plan::AsItIs, Plan::TwoLegs)
    }

    fn prefill_body(&mut self, body: &[u8]) -> Vec<u8> {
        [b"prefill ", body].concat()
    }

    fn hand_over(&mut self, prefilled: &Prefilled<'_>, body: &[u8]) -> HandedOver {
        // Accounted for, as one that is passed over is.
        self.told.events.push(Event::Unasked { position: prefilled.position });
        self.decodes = true;
        let body = [b"decode ", body, b" with ", prefilled.answer].concat();
        HandedOver { body, cached_tokens: Some(32) }
    }

    fn start_over(&mut self) {
        self.decodes = false;
    }

    fn release_body(&mut self, body: &[u8]) -> Option<Vec<u8>> {
        Some([b"release ", body].concat())
    }

    fn standing(&mut self, _tried: &[usize]) -> Standing {
        let until = clock::now() + PATIENCE;
        if self.decodes && self.fake.full.load(Ordering::SeqCst) > 0 {
            Standing::Queued { until }
        } else {
            Standing::Nobody
        }
    }

    fn poll_turn(&mut self, _cx: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }

    fn choose(&mut self, tried: &[usize]) -> Option<Target<Guard>> {
        let endpoints = self.fake.endpoints.lock();
        let split = self.fake.legs.lock().is_some();
        if self.decodes && self.fake.full.load(Ordering::SeqCst) > 0 {
            return None;
        }
        let allowed = |position: &usize| {
            !tried.contains(position)
                && self.only.is_none_or(|only| only == *position)
                && (!split || self.decodes == (*position >= 2))
        };
        let position = (0..endpoints.len()).find(allowed)?;
        self.told.chosen.push(position);
        let load = &self.fake.load[position];
        load.fetch_add(1, Ordering::SeqCst);
        Some(Target {
            position,
            addresses: Addresses(Arc::new(vec![endpoints[position]])),
            fields: self.fake.fields.lock().clone(),
            request_fields: self.fake.request_fields.lock()[position].as_bytes().to_vec(),
            guard: Guard(Arc::clone(load)),
        })
    }

    fn may_retry(&mut self) -> bool {
        self.fake.retries_left.fetch_sub(1, Ordering::SeqCst) > 0
    }

    fn report(&mut self, event: Event) {
        self.told.events.push(event);
        self.fake.events.lock().push(event);
    }
}

/// What was counted.
#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<BTreeMap<String, u64>>);

impl Counts {
    fn add(&self, what: impl Into<String>, count: u64) {
        *self.0.lock().entry(what.into()).or_default() += count;
    }

    /// All counts of what is called as asked for.
    pub(super) fn sum(&self, called: impl Fn(&str) -> bool) -> u64 {
        self.0.lock().iter().filter(|(what, _)| called(what)).map(|(_, count)| count).sum()
    }

    pub(super) fn get(&self, what: &str) -> u64 {
        self.0.lock().get(what).copied().unwrap_or_default()
    }
}

impl Meter for Counts {
    fn client_opened(&self) {
        self.add("opened", 1);
    }
    fn client_closed(&self) {
        self.add("closed", 1);
    }
    fn client_refused(&self, cause: Refused) {
        self.add(format!("refused {}", cause.label()), 1);
    }
    fn accept_failed(&self) {
        self.add("accept failed", 1);
    }
    fn client_left(&self, phase: Phase) {
        self.add(format!("left {phase}"), 1);
    }
    fn answered(&self, status: u16, own_code: Option<&'static str>) {
        self.add(format!("{status} {}", own_code.unwrap_or_default()).trim(), 1);
    }
    fn relayed(&self, direction: Direction, bytes: u64) {
        self.add(format!("bytes {}", direction.label()), bytes);
    }
    fn retried(&self, cause: Retry) {
        self.add(format!("retried {}", cause.label()), 1);
    }
    fn connected(&self, failure: Option<ConnectFailure>) {
        self.add(format!("connect {}", failure.map_or("ok", ConnectFailure::label)), 1);
    }
    fn reused(&self) {
        self.add("reused", 1);
    }
    fn offloaded(&self) {
        self.add("offloaded", 1);
    }
    fn panicked(&self) {
        self.add("panicked", 1);
    }
    fn tick(&self, pulse: &Pulse) {
        let mut counts = self.0.lock();
        counts.insert("clients".to_owned(), pulse.clients as u64);
        counts.insert("body bytes held".to_owned(), pulse.body_bytes_held as u64);
        counts.insert("buffers".to_owned(), pulse.buffer_bytes as u64);
        *counts.entry("ticks".to_owned()).or_default() += 1;
        *counts.entry("busy ticks".to_owned()).or_default() += u64::from(pulse.held.is_some());
        let held = u64::try_from(pulse.held.unwrap_or_default().as_millis()).unwrap();
        let longest = counts.entry("longest hold".to_owned()).or_default();
        *longest = held.max(*longest);
    }
}

/// The proxy under test.
pub(super) struct Rig {
    proxy: Option<Proxy>,
    pub(super) address: SocketAddr,
    pub(super) fake: Arc<Fake>,
    pub(super) counts: Arc<Counts>,
}

impl Rig {
    /// One data thread before these endpoints, tried in this order.
    pub(super) fn start(io: Io, endpoints: &[SocketAddr]) -> Self {
        Self::with(io, endpoints, |_config| ())
    }

    pub(super) fn with(io: Io, endpoints: &[SocketAddr], adjust: impl FnOnce(&mut Config)) -> Self {
        raise_descriptor_limit().unwrap();
        let mut config = Config { threads: 1, io, pin: false, ..Config::default() };
        adjust(&mut config);
        let fake = Arc::new(Fake::new(endpoints.to_vec()));
        let counts = Arc::new(Counts::default());
        let threads = config.threads;
        let meter: Arc<dyn Meter> = Arc::clone(&counts) as Arc<dyn Meter>;
        let proxy = Proxy::start(config, &Arc::new(FakePlane(Arc::clone(&fake))), &meter);
        let proxy = proxy.unwrap();
        let sockets = bind(SocketAddr::from(([127, 0, 0, 1], 0)), threads).unwrap();
        let address = sockets[0].local_addr().unwrap();
        proxy.listen(Link(1), sockets);
        Self { proxy: Some(proxy), address, fake, counts }
    }

    pub(super) fn client(&self) -> Wire {
        Wire::connect(self.address)
    }

    pub(super) fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().unwrap()
    }

    /// Begins to drain, on a thread of its own.
    pub(super) fn drain(&mut self, within: Duration) -> JoinHandle<Duration> {
        self.end(within, false)
    }

    /// As [`Rig::drain`], leaving the listening sockets to others.
    pub(super) fn drain_released(&mut self, within: Duration) -> JoinHandle<Duration> {
        self.end(within, true)
    }

    fn end(&mut self, within: Duration, release: bool) -> JoinHandle<Duration> {
        let proxy = self.proxy.take().unwrap();
        std::thread::spawn(move || {
            let start = clock::now();
            proxy.drain(start + within, release);
            start.elapsed()
        })
    }

    /// Waits until no request is in flight and no client connection is open.
    pub(super) fn settled(&self) {
        eventually("no request in flight", || self.fake.in_flight() == 0);
        eventually("no client connection", || self.counts.get("opened") == self.counts.get("closed"));
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(proxy) = self.proxy.take() {
            proxy.drain(clock::now(), false);
        }
        if !std::thread::panicking() {
            assert_eq!(self.fake.in_flight(), 0, "requests still count as in flight");
            let told = self.fake.told.lock();
            let unsound = told.iter().find(|told| !told.is_sound());
            assert!(unsound.is_none(), "a call was not told how its request ended: {unsound:?}");
        }
    }
}

/// Waits for a condition.
pub(super) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let give_up = clock::now() + PATIENCE;
    while !condition() {
        assert!(clock::now() < give_up, "waited in vain for: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// An endpoint made of a script: it is run once for each connection, with the connection's number.
pub(super) struct Endpoint {
    pub(super) address: SocketAddr,
    pub(super) connections: Arc<AtomicUsize>,
    /// What went wrong in scripts.
    failures: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
}

impl Endpoint {
    pub(super) fn start(script: impl Fn(&mut Wire, usize) + Send + Sync + 'static) -> Self {
        Self::on(TcpListener::bind(("127.0.0.1", 0)).unwrap(), script)
    }

    pub(super) fn on(listener: TcpListener, script: impl Fn(&mut Wire, usize) + Send + Sync + 'static) -> Self {
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let failures = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (count, failed, ended) = (Arc::clone(&connections), Arc::clone(&failures), Arc::clone(&stop));
        let script = Arc::new(script);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(stream) = stream else {
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                };
                let number = count.fetch_add(1, Ordering::SeqCst);
                let (script, failed) = (Arc::clone(&script), Arc::clone(&failed));
                std::thread::spawn(move || {
                    let mut wire = Wire::new(stream);
                    let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| script(&mut wire, number)));
                    if let Err(panic) = run {
                        let text = panic.downcast_ref::<String>().cloned();
                        failed.lock().push(text.unwrap_or_else(|| "a script panicked".to_owned()));
                    }
                });
            }
        });
        Self { address, connections, failures, stop }
    }

    /// Answers every request with 200 and these bytes.
    pub(super) fn answering(body: &'static [u8]) -> Self {
        Self::start(move |wire, _| {
            while let Some(_request) = wire.request() {
                wire.send(&ok(body));
            }
        })
    }

    /// An address where nobody listens, and nobody will: another test's proxy there would get this one's requests.
    pub(super) fn refusing() -> SocketAddr {
        static HELD: Mutex<Vec<socket2::Socket>> = Mutex::new(Vec::new());
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        HELD.lock().push(socket);
        address
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
        if !std::thread::panicking() {
            assert_eq!(*self.failures.lock(), Vec::<String>::new());
        }
    }
}

/// A 200 with a length.
pub(super) fn ok(body: &[u8]) -> Vec<u8> {
    [format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(), body].concat()
}

/// A POST with a length.
pub(super) fn post(body: &[u8]) -> Vec<u8> {
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// Bytes that tell where in a body they belong.
pub(super) fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at % 251).to_le_bytes()[0]).collect()
}

/// A letter for a number.
pub(super) fn letter(number: usize) -> u8 {
    b'a' + number.to_le_bytes()[0] % 26
}

/// A GET.
pub(super) fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").into_bytes()
}

/// A message as it came over the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) head: String,
    /// The payload.
    pub(super) body: Vec<u8>,
    /// The bytes of the body as they came.
    pub(super) raw: Vec<u8>,
}

impl Message {
    pub(super) fn status(&self) -> u16 {
        self.head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub(super) fn field(&self, name: &str) -> Option<&str> {
        field(&self.head, name)
    }

    /// The code of an error of ours, with the answer's form checked.
    pub(super) fn own_code(&self) -> String {
        let json: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        let code = json["error"]["code"].as_str().unwrap().to_owned();
        assert_eq!(self.field("x-kvlb-error"), Some(code.as_str()));
        assert_eq!(json["error"]["type"], "kvlb_error");
        assert_eq!(self.field("content-length"), Some(self.body.len().to_string().as_str()));
        code
    }
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().skip(1).find_map(|line| {
        let (own, value) = line.split_once(':')?;
        own.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// One end of a connection, with just enough HTTP to read what comes.
pub(super) struct Wire {
    pub(super) stream: TcpStream,
    buffer: Vec<u8>,
}

impl Wire {
    pub(super) fn connect(address: SocketAddr) -> Self {
        Self::new(TcpStream::connect(address).unwrap())
    }

    pub(super) fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { stream, buffer: Vec::new() }
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends a request and reads its answer.
    pub(super) fn ask(&mut self, request: &[u8]) -> Message {
        self.send(request);
        self.answer()
    }

    /// More bytes into the buffer; false at the end of the connection.
    fn fill(&mut self) -> bool {
        let mut bytes = vec![0; 65_536];
        match self.stream.read(&mut bytes) {
            Ok(0) => false,
            Ok(count) => {
                self.buffer.extend_from_slice(&bytes[..count]);
                true
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => true,
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => false,
            Err(error) => panic!("read: {error}"),
        }
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        self.buffer.drain(..count).collect()
    }

    /// Exactly so many bytes.
    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            assert!(self.fill(), "the connection ended after {} of {count} bytes", self.buffer.len());
        }
        self.take(count)
    }

    /// Drops so many bytes; false where the connection ends before.
    pub(super) fn skip(&mut self, count: usize) -> bool {
        while self.buffer.len() < count {
            if !self.fill() {
                return false;
            }
        }
        self.take(count);
        true
    }

    /// Everything up to and with `end`; `None` where the connection ends before its first byte.
    fn until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|window| window == end) {
                return Some(self.take(at + end.len()));
            }
            if !self.fill() {
                assert!(self.buffer.is_empty(), "cut off: {}", self.buffer.escape_ascii());
                return None;
            }
        }
    }

    /// The next head.
    pub(super) fn head(&mut self) -> Option<String> {
        self.until(b"\r\n\r\n").map(|head| String::from_utf8(head).unwrap())
    }

    /// The next request; `None` at the end of the connection.
    pub(super) fn request(&mut self) -> Option<Message> {
        let head = self.head()?;
        Some(self.body_of(head, false))
    }

    /// The next answer.
    pub(super) fn answer(&mut self) -> Message {
        let head = self.head().expect("an answer");
        self.body_of(head, true)
    }

    fn body_of(&mut self, head: String, is_answer: bool) -> Message {
        if field(&head, "transfer-encoding") == Some("chunked") {
            let (body, raw) = self.chunks();
            return Message { head, body, raw };
        }
        let status: u16 = if is_answer { head.split(' ').nth(1).unwrap().parse().unwrap() } else { 0 };
        let body = match field(&head, "content-length") {
            _ if status == 204 || status == 304 || (is_answer && status < 200) => Vec::new(),
            Some(length) => self.bytes(length.parse().unwrap()),
            None if is_answer => self.rest(),
            None => Vec::new(),
        };
        Message { head, raw: body.clone(), body }
    }

    /// A chunked body: its payload, and its bytes.
    fn chunks(&mut self) -> (Vec<u8>, Vec<u8>) {
        let (mut payload, mut raw) = (Vec::new(), Vec::new());
        loop {
            let line = self.until(b"\r\n").expect("a chunk");
            let text = std::str::from_utf8(&line).unwrap().trim_end();
            let size = usize::from_str_radix(text.split(';').next().unwrap().trim(), 16).unwrap();
            raw.extend_from_slice(&line);
            if size == 0 {
                loop {
                    let line = self.until(b"\r\n").expect("the end of the trailers");
                    raw.extend_from_slice(&line);
                    if line == b"\r\n" {
                        return (payload, raw);
                    }
                }
            }
            let data = self.bytes(size + 2);
            payload.extend_from_slice(&data[..size]);
            raw.extend_from_slice(&data);
        }
    }

    /// Whether something has come that nobody has read.
    pub(super) fn has_answer(&self) -> bool {
        self.stream.set_nonblocking(true).unwrap();
        let peeked = self.stream.peek(&mut [0]);
        self.stream.set_nonblocking(false).unwrap();
        peeked.is_ok()
    }

    /// Everything up to the end of the connection.
    pub(super) fn rest(&mut self) -> Vec<u8> {
        while self.fill() {}
        std::mem::take(&mut self.buffer)
    }

    /// Whether the other side ends the connection within `limit`; what comes until then is dropped. Says how it ended.
    pub(super) fn ends_within(&mut self, limit: Duration) -> Option<Ended> {
        let give_up = clock::now() + limit;
        let mut bytes = vec![0; 65_536];
        loop {
            let left = give_up.saturating_duration_since(clock::now());
            if left.is_zero() {
                return None;
            }
            self.stream.set_read_timeout(Some(left)).unwrap();
            match self.stream.read(&mut bytes) {
                Ok(0) => return Some(Ended::Cleanly),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return None,
                Err(_) => return Some(Ended::ByReset),
            }
        }
    }

    pub(super) fn finish(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    /// Whether a connection is gone: measured by the other end.
    pub(super) fn leave(self) -> Instant {
        drop(self);
        clock::now()
    }
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Cleanly,
    ByReset,
}

//! One subscription per endpoint over ZeroMQ; reconnects for ever; applies events to `state`.
//!
//! [`follow`] is one endpoint's whole life: it dials, drains the event socket in a task that does nothing else, asks for
//! replays, reads the engine's `/metrics`, and applies what `stream` puts in order. Nothing an engine sends ends it.

mod guard;
mod label;
mod replay;
mod stream;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use tokio::net::TcpStream;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, sleep_until, timeout};
use zeromq::{Socket, SocketRecv, SubSocket, ZmqError, ZmqMessage};

pub(crate) use label::{client as plain_client, next_label};

use crate::clock;
use crate::contract::attest::Contract;
use crate::contract::{EventSeq, events};
use crate::state::kv::{EndpointKv, Feed, ReplayState};
use guard::Pipe;
use label::Scrape;
use replay::Replay;
use stream::{Action, Message, Stream, Tally, Why};

/// The first pause between attempts to connect; it doubles.
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(200);
/// The longest pause: within a second of an engine's return it is heard and its replay applied.
const DIAL_PAUSE_MAX: Duration = Duration::from_millis(500);
/// A connection that lasted this long was a good one, after which dialling starts afresh.
const GOOD_CONNECTION: Duration = Duration::from_secs(2);
/// Messages between the socket and the apply side: some seconds of a busy engine.
const QUEUE_MAX: usize = 8192;
/// Bytes of messages there.
const QUEUE_BYTES_MAX: usize = 128 << 20;
/// From this many bytes on, a batch may take longer to apply than others should wait: some ten milliseconds.
const LONG_BATCH: usize = 256 << 10;
/// Replayed batches read ahead.
const REPLAY_QUEUE: usize = 64;
/// How often an engine's `/metrics` is read.
const SCRAPE_INTERVAL: Duration = Duration::from_secs(30);
/// How soon it is tried again: an engine publishes events before its HTTP server is up, and the first event must be explained
/// within five seconds.
const SCRAPE_AGAIN: Duration = Duration::from_secs(1);
/// How long the last messages of a connection that has ended may take to come out of the socket.
const LEFTOVERS: Duration = Duration::from_millis(50);

/// Where an engine's replay socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayPort {
    /// At this port.
    Port(u16),
    /// The engine says that it has none.
    Absent,
    /// Not wanted.
    Off,
}

impl ReplayPort {
    const fn number(self) -> Option<u16> {
        match self {
            Self::Port(port) => Some(port),
            Self::Absent | Self::Off => None,
        }
    }
}

/// Whose events to follow.
#[derive(Clone, Debug)]
pub struct Subscription {
    /// How logs name the endpoint.
    pub label: String,
    /// Which of the endpoint's event streams: the data-parallel rank that publishes there.
    pub feed: usize,
    /// Its address or name.
    pub host: String,
    /// The port of its event socket.
    pub port: u16,
    /// Where its replay socket is, as far as is known by now: an engine may say so after it was heard for long.
    pub replay: watch::Receiver<ReplayPort>,
    /// The authority of its HTTP server (`10.0.0.1:8000`), whose `/metrics` is read.
    pub http: Option<String>,
}

/// Follows one endpoint's events until `stop` says so or its sender is gone.
pub async fn follow(subscription: Subscription, kv: Arc<EndpointKv>, mut stop: watch::Receiver<bool>) {
    let feed = kv.feed(subscription.feed);
    // What an earlier subscription learned is told again from the beginning, and must not count twice.
    kv.clear(&feed, false);
    let mut follower = Follower::new(subscription, kv, Arc::clone(&feed));
    tokio::select! {
        () = follower.run() => {}
        // An error is the sender's end, which says the same.
        _ = stop.wait_for(|stop| *stop) => {}
    }
    feed.set_connected(false);
}

/// How long ago a batch was made, by the engine's clock and ours; zero where the two disagree about the order.
fn lag(made: f64) -> Duration {
    let now = clock::wall().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Duration::try_from_secs_f64(now.as_secs_f64() - made).unwrap_or_default()
}

/// A task that ends with its owner.
struct Task(JoinHandle<()>);

impl Task {
    fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(future))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One endpoint's subscription.
struct Follower {
    subscription: Subscription,
    kv: Arc<EndpointKv>,
    feed: Arc<Feed>,
    /// Changes where the endpoint's blocks get other names.
    renamed: watch::Receiver<u64>,
    stream: Stream,
    /// What of the stream's fate is in the counters already.
    counted: Tally,
    replay_port: ReplayPort,
    replay: Option<(Task, mpsc::Receiver<Replay>)>,
    /// Whether the endpoint refused a connection since the last was made.
    refused: bool,
    /// When the process started whose blocks are known, as far as it said so.
    process_start: Option<u64>,
    /// When the process started that answered last, on this connection.
    answered_start: Option<u64>,
    connections: watch::Sender<u64>,
    scrapes: mpsc::Receiver<(u64, Scrape)>,
    _metrics_reader: Option<Task>,
}

impl Follower {
    fn new(mut subscription: Subscription, kv: Arc<EndpointKv>, feed: Arc<Feed>) -> Self {
        let replay_port = *subscription.replay.borrow_and_update();
        let (connections, connection) = watch::channel(0);
        let (to, scrapes) = mpsc::channel(1);
        let reader = subscription.http.clone().map(|authority| Task::spawn(scrape(authority, connection, to)));
        let stream = Stream::new(replay_port.number().is_some(), reader.is_some(), clock::now());
        Self {
            subscription,
            renamed: kv.watch_names(),
            kv,
            feed,
            stream,
            counted: Tally::default(),
            replay_port,
            replay: None,
            refused: false,
            process_start: None,
            answered_start: None,
            connections,
            scrapes,
            _metrics_reader: reader,
        }
    }

    async fn run(&mut self) {
        let mut pause = DIAL_PAUSE_MIN;
        self.note();
        loop {
            let engine = self.dial(&mut pause).await;
            let start = clock::now();
            let end = self.converse(engine).await;
            // The document's meaning: whatever makes the socket be rebuilt, the engine's own close as well.
            count(&self.kv.counters.recv_errors);
            let cause = end.err().map_or_else(|| "closed by the engine".to_owned(), |error| error.to_string());
            tracing::info!(endpoint = %self.subscription.label, cause, "event connection ended");
            self.feed.set_connected(false);
            self.stream.disconnected();
            self.replay = None;
            self.note();
            if clock::now().duration_since(start) >= GOOD_CONNECTION {
                pause = DIAL_PAUSE_MIN;
            }
            wait(&mut pause).await;
        }
    }

    /// Dials until there is a connection.
    async fn dial(&mut self, pause: &mut Duration) -> TcpStream {
        loop {
            // Requests go on while nothing is heard, and may tell.
            self.forget_doubted();
            match guard::dial(&self.subscription.host, self.subscription.port).await {
                Ok(engine) => return engine,
                Err(error) => {
                    self.refused |= error.kind() == io::ErrorKind::ConnectionRefused;
                    tracing::debug!(endpoint = %self.subscription.label, %error, "event socket not reached");
                    wait(pause).await;
                }
            }
        }
    }

    /// One connection, from its handshake to its end.
    async fn converse(&mut self, engine: TcpStream) -> Result<(), ZmqError> {
        let pipe = Pipe::new().await?;
        let (endpoint, options) = (pipe.endpoint()?, pipe.options());
        let (end, ended) = oneshot::channel();
        let _piping = Task::spawn(async move {
            // Whoever waited for the end may have gone first.
            end.send(pipe.run(engine).await).ok();
        });
        let mut socket = SubSocket::with_options(options);
        socket.subscribe("").await?;
        timeout(guard::HANDSHAKE_TIMEOUT, socket.connect(&endpoint)).await.map_err(late)??;
        let queue = Arc::new(Queue::default());
        let (to, messages) = mpsc::channel(QUEUE_MAX);
        let (error, outcome) = oneshot::channel();
        let draining = drain(socket, ended, Arc::clone(&queue), to, Arc::clone(&self.kv));
        let _draining = Task::spawn(async move {
            error.send(draining.await).ok();
        });
        self.connected();
        self.listen(messages, &queue).await;
        outcome.await.unwrap_or(Ok(()))
    }

    fn connected(&mut self) {
        let mut number = 0;
        self.connections.send_modify(|connections| {
            *connections += 1;
            number = *connections;
        });
        if number > 1 {
            count(&self.kv.counters.reconnects);
        }
        tracing::info!(endpoint = %self.subscription.label, "event socket connected");
        self.answered_start = None;
        self.feed.set_connected(true);
        let refused = std::mem::take(&mut self.refused);
        self.with_stream(|stream, now, out| stream.connected(refused, now, out));
    }

    /// Applies what arrives until the connection ends.
    async fn listen(&mut self, mut messages: mpsc::Receiver<Message>, queue: &Queue) {
        loop {
            let deadline = self.stream.deadline();
            let next = async {
                match &mut self.replay {
                    Some((_, replay)) => replay.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                message = messages.recv() => {
                    let Some(message) = message else { return };
                    queue.leave(&message);
                    self.with_stream(|stream, now, out| stream.live(message, now, out));
                }
                replay = next => self.replayed(replay),
                Some((connection, scrape)) = self.scrapes.recv() => self.scraped(connection, scrape),
                // The endpoint's cache is as old as this task: its end is no case.
                Ok(()) = self.renamed.changed() => self.relearn(),
                Ok(()) = self.subscription.replay.changed() => self.replay_moved(),
                () = until(deadline) => self.with_stream(Stream::tick),
            }
        }
    }

    fn replayed(&mut self, replay: Option<Replay>) {
        match replay {
            Some(Replay::Message(message)) => {
                self.with_stream(|stream, _, out| stream.replayed(message, out));
            }
            Some(Replay::Ended) => {
                self.replay = None;
                self.with_stream(Stream::replay_ended);
            }
            Some(Replay::Failed { answered }) => {
                self.replay = None;
                self.with_stream(|stream, now, out| stream.replay_failed(answered, now, out));
            }
            // Its task always says how it ended, unless it was cut off.
            None => {
                self.replay = None;
                self.with_stream(|stream, now, out| stream.replay_failed(true, now, out));
            }
        }
    }

    /// The replay socket is not where it was taken to be. What the event socket told stays true.
    fn replay_moved(&mut self) {
        self.replay_port = *self.subscription.replay.borrow_and_update();
        self.replay = None;
        let there_is_one = self.replay_port.number().is_some();
        self.with_stream(|stream, now, out| stream.replay_moved(there_is_one, now, out));
    }

    fn scraped(&mut self, connection: u64, scrape: Scrape) {
        let changed = self.kv.set_label(scrape.label);
        self.report(changed);
        let Some(start) = scrape.process_start.filter(|_| connection == *self.connections.borrow()) else { return };
        self.answered_start = Some(start);
        // What is known stays with the process that it was heard of until that life is over: the web server of the next
        // one may well answer while the events of this one are still waited for.
        let other_process = *self.process_start.get_or_insert(start) != start;
        self.with_stream(|stream, now, out| stream.identified(other_process, now, out));
    }

    /// Tells the stream something and does what it answers.
    fn with_stream(&mut self, tell: impl FnOnce(&mut Stream, Instant, &mut Vec<Action>)) {
        let now = clock::now();
        let mut actions = Vec::new();
        tell(&mut self.stream, now, &mut actions);
        for action in actions {
            match action {
                Action::Apply(message) => self.apply(&message, now),
                Action::Clear(why) => self.clear(why),
                Action::Replay(from) => self.ask(from),
            }
        }
        self.note();
        // At once, so that nothing more is applied that the replay brings again.
        if self.renamed.has_changed().unwrap_or(false) {
            self.renamed.mark_unchanged();
            self.relearn();
        }
    }

    /// Everything is told again, where it can be had.
    fn relearn(&mut self) {
        self.forget_doubted();
        self.with_stream(Stream::relearn);
    }

    /// Forgets what is not believed any more, also where nobody can tell it again.
    fn forget_doubted(&self) {
        if self.feed.is_doubted() {
            self.kv.clear(&self.feed, false);
        }
    }

    fn apply(&self, message: &Message, now: Instant) {
        let apply = || {
            let batch = events::decode(&message.batch)?;
            self.feed.set_lag(lag(batch.ts));
            Ok::<_, events::DecodeError>(self.kv.apply(&self.feed, message.seq, &batch, now))
        };
        match with_room_for_others(message.batch.len(), apply) {
            Ok(changed) => self.report(changed),
            Err(error) => {
                count(&self.kv.counters.undecodable);
                tracing::debug!(endpoint = %self.subscription.label, seq = %message.seq, %error, "batch not read");
            }
        }
    }

    fn clear(&mut self, why: Why) {
        match why {
            Why::NewLife => {
                self.process_start = self.answered_start;
                tracing::info!(endpoint = %self.subscription.label, "engine restarted, inventory cleared");
            }
            Why::Gap => tracing::warn!(endpoint = %self.subscription.label, "event gap too wide, inventory cleared"),
            Why::Renamed => tracing::debug!(endpoint = %self.subscription.label, "inventory is learned anew"),
        }
        self.report(self.kv.clear(&self.feed, why == Why::NewLife));
        if why == Why::NewLife {
            // The new life's own replay is on its way already.
            self.renamed.mark_unchanged();
        }
    }

    fn ask(&mut self, from: EventSeq) {
        let Some(port) = self.replay_port.number() else { return };
        let (to, answers) = mpsc::channel(REPLAY_QUEUE);
        let host = self.subscription.host.clone();
        tracing::debug!(endpoint = %self.subscription.label, %from, "replay asked for");
        // The task of an earlier replay ends here.
        self.replay = Some((Task::spawn(replay::run(host, port, from, to)), answers));
    }

    /// One log line per change of the verdict.
    fn report(&self, changed: Option<Arc<Contract>>) {
        let Some(contract) = changed else { return };
        let endpoint = &self.subscription.label;
        match &*contract {
            Contract::Mismatch { leg, detail } => {
                let keying = if self.kv.is_rehashed() { "rehash" } else { "parity" };
                tracing::warn!(%endpoint, %leg, %detail, keying, "the engine's block names do not agree with the rule");
            }
            agreed => tracing::info!(%endpoint, contract = agreed.label(), "contract"),
        }
    }

    /// Shows the stream's state to everybody.
    fn note(&mut self) {
        let (tally, counters) = (self.stream.tally(), &self.kv.counters);
        let before = std::mem::replace(&mut self.counted, tally);
        for (counter, now, before) in [
            (&counters.gaps, tally.gaps, before.gaps),
            (&counters.missed, tally.missed, before.missed),
            (&counters.restarts, tally.restarts, before.restarts),
            (&counters.replays, tally.replays, before.replays),
            (&counters.duplicates, tally.duplicates, before.duplicates),
        ] {
            counter.fetch_add(now.saturating_sub(before), Ordering::Relaxed);
        }
        self.feed.set_replay(match self.replay_port {
            ReplayPort::Absent => ReplayState::Unavailable,
            ReplayPort::Off => ReplayState::Off,
            ReplayPort::Port(_) if self.stream.is_unavailable() => ReplayState::Unavailable,
            ReplayPort::Port(_) if self.stream.is_replaying() || !self.stream.has_asked() => ReplayState::Pending,
            ReplayPort::Port(_) => ReplayState::Applied,
        });
    }
}

/// What waits between the socket and the apply side.
#[derive(Debug, Default)]
struct Queue {
    bytes: AtomicUsize,
}

impl Queue {
    /// Takes room for a message, unless there is none.
    fn enter(&self, message: &Message) -> bool {
        let before = self.bytes.fetch_add(message.batch.len(), Ordering::Relaxed);
        let fits = before + message.batch.len() <= QUEUE_BYTES_MAX;
        if !fits {
            self.leave(message);
        }
        fits
    }

    fn leave(&self, message: &Message) {
        self.bytes.fetch_sub(message.batch.len(), Ordering::Relaxed);
    }
}

/// Reads the event socket and does nothing else. What the apply side has no room for is dropped, which is a gap.
async fn drain(
    mut socket: SubSocket,
    ended: oneshot::Receiver<io::Result<()>>,
    queue: Arc<Queue>,
    to: mpsc::Sender<Message>,
    kv: Arc<EndpointKv>,
) -> Result<(), ZmqError> {
    let mut ended = pin!(ended);
    let pass_on = |received: ZmqMessage| match replay::parse(&received) {
        Some(message) if queue.enter(&message) => {
            if let Err(mpsc::error::TrySendError::Full(message)) = to.try_send(message) {
                queue.leave(&message);
                count(&kv.counters.dropped);
            }
        }
        Some(_) => count(&kv.counters.dropped),
        None => count(&kv.counters.recv_errors),
    };
    let outcome = loop {
        tokio::select! {
            biased;
            received = socket.recv() => pass_on(received?),
            outcome = &mut ended => break outcome,
        }
    };
    while let Ok(Ok(received)) = timeout(LEFTOVERS, socket.recv()).await {
        pass_on(received);
    }
    outcome.unwrap_or(Ok(())).map_err(ZmqError::from)
}

/// Reads the engine's `/metrics` at once after each connection, soon again where that fails, and now and then.
async fn scrape(authority: String, mut connection: watch::Receiver<u64>, to: mpsc::Sender<(u64, Scrape)>) {
    let client = match label::client() {
        Ok(client) => client,
        Err(error) => return tracing::warn!(%authority, %error, "engine metrics cannot be read"),
    };
    loop {
        let number = *connection.borrow_and_update();
        let mut next = SCRAPE_INTERVAL;
        if number > 0 {
            match label::scrape(&client, &authority).await {
                Ok(scrape) => {
                    if to.send((number, scrape)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::debug!(%authority, %error, "engine metrics not read");
                    next = SCRAPE_AGAIN;
                }
            }
        }
        tokio::select! {
            changed = connection.changed() => if changed.is_err() { return },
            () = sleep(next), if number > 0 => {}
        }
    }
}

/// Does what a batch of `bytes` wants. The tasks that share this thread need not wait for a long one, where the runtime has
/// other threads to give them to.
fn with_room_for_others<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes > LONG_BATCH && Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread {
        return tokio::task::block_in_place(work);
    }
    work()
}

/// Pauses, and doubles the next pause.
async fn wait(pause: &mut Duration) {
    sleep(*pause).await;
    *pause = (*pause * 2).min(DIAL_PAUSE_MAX);
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

fn late(elapsed: tokio::time::error::Elapsed) -> ZmqError {
    io::Error::new(io::ErrorKind::TimedOut, elapsed).into()
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

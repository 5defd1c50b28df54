//! The event stream: a PUB socket that never waits for a subscriber, and a ROUTER socket that replays.
//!
//! A message is `topic | sequence (8 bytes, big-endian) | payload`. A replay request is `"" | first sequence`; each answer is
//! `"" | topic | sequence | payload` (no topic frame before vLLM 0.26), and the end is sequence −1 with an empty payload.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::clock;
use super::config::EngineConfig;
use super::faults::Faults;
use super::gate::Gate;
use super::rank::Rank;
use super::wire::{Encoder, Event};
use super::zmtp::{self, Incoming};

/// Sequence number of the end of a replay.
const REPLAY_END: [u8; 8] = [0xff; 8];

/// Numbers batches, keeps them for replay, and hands them to the subscribers.
#[derive(Debug)]
pub(super) struct Publisher {
    topic: Vec<u8>,
    encoder: Encoder,
    replays_topic: bool,
    /// The data-parallel rank that publishes; the third element of every batch.
    rank: u64,
    buffer_steps: usize,
    hwm: usize,
    faults: Arc<Faults>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next_sequence: u64,
    next_subscriber: u64,
    buffer: VecDeque<(u64, Bytes)>,
    subscribers: Vec<Subscriber>,
    lost: u64,
    dropped: u64,
    replays: u64,
}

#[derive(Debug)]
struct Subscriber {
    id: u64,
    prefixes: Vec<Vec<u8>>,
    queue: mpsc::Sender<Bytes>,
}

/// What the publisher has done in this life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Published {
    /// Batches numbered so far; the next one has this sequence number.
    pub batches: u64,
    /// Batches not sent on purpose (see [`super::FaultPlan::lose_batches`]).
    pub lost: u64,
    /// Messages dropped because a subscriber was slow.
    pub dropped: u64,
    /// Replay requests answered.
    pub replays: u64,
    /// Subscribers connected now that want the topic.
    pub subscribers: u64,
}

impl Publisher {
    pub(super) fn new(config: &EngineConfig, faults: Arc<Faults>, rank: usize) -> Self {
        Self {
            topic: config.topic.clone().into_bytes(),
            encoder: Encoder::new(config.version, !config.byte_hashes),
            replays_topic: config.version.replays_topic(),
            rank: u64::try_from(rank).unwrap_or(u64::MAX),
            buffer_steps: config.buffer_steps,
            hwm: config.event_hwm.max(1),
            faults,
            state: Mutex::default(),
        }
    }

    /// Publishes one batch.
    pub(super) fn publish(&self, events: &[Event]) {
        let payload = Bytes::from(self.encoder.batch(clock::unix_seconds(), events, Some(self.rank)));
        let lost = self.faults.loses_batch();
        let mut state = self.state();
        let sequence = state.next_sequence;
        state.next_sequence += 1;
        state.buffer.push_back((sequence, payload.clone()));
        while state.buffer.len() > self.buffer_steps {
            state.buffer.pop_front();
        }
        if lost {
            state.lost += 1;
            return;
        }
        let message = zmtp::message(&[&self.topic, &sequence.to_be_bytes(), &payload]);
        state.send(&self.topic, &message);
    }

    /// What was done so far.
    pub(super) fn published(&self) -> Published {
        let state = self.state();
        Published {
            batches: state.next_sequence,
            lost: state.lost,
            dropped: state.dropped,
            replays: state.replays,
            subscribers: state.wanting(&self.topic),
        }
    }

    /// Serves subscribers for ever; they go when this is dropped.
    pub(super) async fn serve_events(rank: Arc<Rank>, gate: Gate) {
        Self::serve(rank, gate, Socket::Events).await;
    }

    /// Serves replay requests for ever; their connections go when this is dropped.
    pub(super) async fn serve_replay(rank: Arc<Rank>, gate: Gate) {
        Self::serve(rank, gate, Socket::Replay).await;
    }

    async fn serve(rank: Arc<Rank>, mut gate: Gate, socket: Socket) {
        let mut connections = JoinSet::new();
        loop {
            let stream = gate.accept().await;
            while connections.try_join_next().is_some() {}
            let rank = Arc::clone(&rank);
            connections.spawn(async move { rank.publisher.until_cut(stream, socket).await });
        }
    }

    async fn until_cut(&self, stream: TcpStream, socket: Socket) {
        let mut cuts = self.faults.cuts();
        let serving = async {
            match socket {
                Socket::Events => self.subscriber(stream).await,
                Socket::Replay => self.replayer(stream).await,
            }
        };
        tokio::select! {
            ended = serving => if let Err(cause) = ended { tracing::debug!(%cause, "event connection ended") },
            _ = cuts.changed() => {}
        }
    }

    async fn subscriber(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        zmtp::shake_hands(&mut stream, "PUB").await?;
        let (reader, writer) = stream.into_split();
        let (queue, messages) = mpsc::channel(self.hwm);
        let subscribed = Subscribed { publisher: self, id: self.state().subscribe(queue.clone()), queue };
        tokio::select! {
            ended = subscribed.follow(reader) => ended,
            ended = forward(messages, writer) => ended,
        }
    }

    async fn replayer(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        zmtp::shake_hands(&mut stream, "ROUTER").await?;
        loop {
            let request = match zmtp::read(&mut stream).await? {
                Incoming::Message(request) => request,
                Incoming::Ping(pong) => {
                    stream.write_all(&pong).await?;
                    continue;
                }
            };
            // Anything else makes the real engine log an error and go on.
            let [empty, start] = request.as_slice() else { continue };
            let (true, Ok(start)) = (empty.is_empty(), <[u8; 8]>::try_from(start.as_slice())) else { continue };
            self.faults.until(|plan| !plan.stall_replay).await;
            self.replay(&mut stream, u64::from_be_bytes(start)).await?;
        }
    }

    async fn replay(&self, stream: &mut TcpStream, start: u64) -> io::Result<()> {
        let batches: Vec<(u64, Bytes)> = {
            let mut state = self.state();
            state.replays += 1;
            state.buffer.iter().filter(|(sequence, _)| *sequence >= start).cloned().collect()
        };
        for (sequence, payload) in batches {
            stream.write_all(&self.answer(&self.topic, &sequence.to_be_bytes(), &payload)).await?;
        }
        stream.write_all(&self.answer(b"", &REPLAY_END, b"")).await
    }

    fn answer(&self, topic: &[u8], sequence: &[u8], payload: &[u8]) -> Bytes {
        if self.replays_topic {
            zmtp::message(&[b"", topic, sequence, payload])
        } else {
            zmtp::message(&[b"", sequence, payload])
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone, Copy)]
enum Socket {
    Events,
    Replay,
}

impl State {
    fn subscribe(&mut self, queue: mpsc::Sender<Bytes>) -> u64 {
        let id = self.next_subscriber;
        self.next_subscriber += 1;
        self.subscribers.push(Subscriber { id, prefixes: Vec::new(), queue });
        id
    }

    fn send(&mut self, topic: &[u8], message: &Bytes) {
        for subscriber in self.subscribers.iter().filter(|subscriber| subscriber.wants(topic)) {
            if subscriber.queue.try_send(message.clone()).is_err() {
                self.dropped += 1;
            }
        }
    }

    fn wanting(&self, topic: &[u8]) -> u64 {
        self.subscribers.iter().map(|subscriber| u64::from(subscriber.wants(topic))).sum()
    }
}

impl Subscriber {
    fn wants(&self, topic: &[u8]) -> bool {
        self.prefixes.iter().any(|prefix| topic.starts_with(prefix))
    }

    fn change(&mut self, message: &[u8]) {
        match message.split_first() {
            Some((1, prefix)) => self.prefixes.push(prefix.to_vec()),
            Some((0, prefix)) => {
                if let Some(index) = self.prefixes.iter().position(|known| known == prefix) {
                    self.prefixes.remove(index);
                }
            }
            _ => {}
        }
    }
}

/// A subscriber's place in the list; leaves with it.
struct Subscribed<'p> {
    publisher: &'p Publisher,
    id: u64,
    queue: mpsc::Sender<Bytes>,
}

impl Subscribed<'_> {
    /// Takes subscriptions until the peer goes away.
    async fn follow(&self, mut reader: OwnedReadHalf) -> io::Result<()> {
        loop {
            let message = match zmtp::read(&mut reader).await? {
                Incoming::Message(message) => message,
                Incoming::Ping(pong) => {
                    // A full queue shows that we are alive as well as a pong does.
                    drop(self.queue.try_send(pong));
                    continue;
                }
            };
            let mut state = self.publisher.state();
            if let Some(subscriber) = state.subscribers.iter_mut().find(|subscriber| subscriber.id == self.id) {
                for frame in &message {
                    subscriber.change(frame);
                }
            }
        }
    }
}

impl Drop for Subscribed<'_> {
    fn drop(&mut self) {
        self.publisher.state().subscribers.retain(|subscriber| subscriber.id != self.id);
    }
}

async fn forward(mut messages: mpsc::Receiver<Bytes>, mut writer: OwnedWriteHalf) -> io::Result<()> {
    while let Some(message) = messages.recv().await {
        writer.write_all(&message).await?;
    }
    Ok(())
}

//! An engine's event side that says whatever a test wants: ZMTP by hand, down to the byte.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rmpv::Value as Packed;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::OwnedWriteHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::stage::SOON;

/// What a listener does with each connection.
#[derive(Debug, Clone)]
pub(crate) enum Manner {
    /// Shakes hands as a publisher and waits for what the test sends.
    Publisher,
    /// Says these bytes and keeps the connection open.
    Says(Vec<u8>),
    /// Closes at once.
    Closes,
    /// Shakes hands as a router and answers every request with these messages over and over, this far apart, at most so many.
    Answers { messages: Vec<Vec<Vec<u8>>>, pause: Duration, times: usize },
}

/// Those who have shaken hands, and how many that were in all.
type Subscribers = Arc<Mutex<(Vec<OwnedWriteHalf>, usize)>>;

/// A listener that ends when dropped.
#[derive(Debug)]
pub(crate) struct Publisher {
    subscribers: Subscribers,
    accepted: Arc<Mutex<usize>>,
    task: JoinHandle<()>,
    next: u64,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Publisher {
    pub(crate) async fn listen(address: SocketAddr, manner: Manner) -> Self {
        let listener = listen(address).await;
        let (subscribers, accepted) = (Subscribers::default(), Arc::new(Mutex::new(0)));
        let (to, counter) = (Arc::clone(&subscribers), Arc::clone(&accepted));
        let task = tokio::spawn(async move {
            // Connections end with the listener.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                *locked(&counter) += 1;
                connections.spawn(serve(stream, manner.clone(), Arc::clone(&to)));
            }
        });
        Self { subscribers, accepted, task, next: 0 }
    }

    /// Connections accepted so far.
    pub(crate) fn accepted(&self) -> usize {
        *locked(&self.accepted)
    }

    /// Waits for a subscriber that has shaken hands.
    pub(crate) async fn until_heard(&self) {
        let heard = async || !locked(&self.subscribers).0.is_empty();
        kvlb_tests::harness::eventually(SOON, "somebody subscribes", heard).await.unwrap();
    }

    /// Waits until every connection has shaken hands: the other side may think that it has before this one does.
    pub(crate) async fn until_all_heard(&self) {
        let heard = async || locked(&self.subscribers).1 == self.accepted();
        kvlb_tests::harness::eventually(SOON, "everybody subscribes", heard).await.unwrap();
    }

    /// Sends bytes as they are to every subscriber; those that are gone are forgotten.
    pub(crate) async fn send_raw(&self, bytes: &[u8]) {
        let all = std::mem::take(&mut locked(&self.subscribers).0);
        for mut subscriber in all {
            if subscriber.write_all(bytes).await.is_ok() {
                locked(&self.subscribers).0.push(subscriber);
            }
        }
    }

    pub(crate) async fn send(&self, frames: &[Vec<u8>]) {
        self.send_raw(&message(frames)).await;
    }

    /// Publishes a batch under the next number.
    pub(crate) async fn publish(&mut self, batch: &[u8]) {
        let seq = self.next;
        self.next += 1;
        self.publish_as(seq, batch).await;
    }

    /// Publishes a batch under a number; the next one follows it.
    pub(crate) async fn publish_as(&mut self, seq: u64, batch: &[u8]) {
        self.next = seq.wrapping_add(1);
        self.send(&[Vec::new(), seq.to_be_bytes().to_vec(), batch.to_vec()]).await;
    }
}

/// A port that was just closed may need a moment.
async fn listen(address: SocketAddr) -> TcpListener {
    let bind = async || TcpListener::bind(address).await.ok();
    kvlb_tests::harness::until_some(SOON, "the port is free again", bind).await.unwrap()
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(mut stream: TcpStream, manner: Manner, subscribers: Subscribers) {
    stream.set_nodelay(true).ok();
    match manner {
        Manner::Closes => {}
        Manner::Says(bytes) => {
            stream.write_all(&bytes).await.ok();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.ok();
        }
        Manner::Publisher => {
            if shake_hands(&mut stream, "PUB").await.is_some() {
                let (mut from, to) = stream.into_split();
                {
                    let mut all = locked(&subscribers);
                    all.0.push(to);
                    all.1 += 1;
                }
                let mut rest = Vec::new();
                from.read_to_end(&mut rest).await.ok();
            }
        }
        Manner::Answers { messages, pause, times } => {
            if shake_hands(&mut stream, "ROUTER").await.is_none() || frame(&mut stream).await.is_none() {
                return;
            }
            for messages in std::iter::repeat_n(messages, times) {
                for frames in &messages {
                    if stream.write_all(&message(frames)).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(pause).await;
                }
            }
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.ok();
        }
    }
}

pub(crate) fn greeting() -> Vec<u8> {
    let mut greeting = vec![0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

pub(crate) fn ready(socket_type: &str) -> Vec<u8> {
    let length = u8::try_from(socket_type.len()).unwrap();
    let body = [b"\x05READY\x0bSocket-Type\0\0\0", &[length][..], socket_type.as_bytes()].concat();
    [&[4, u8::try_from(body.len()).unwrap()][..], &body].concat()
}

async fn shake_hands(stream: &mut TcpStream, socket_type: &str) -> Option<()> {
    stream.write_all(&greeting()).await.ok()?;
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).await.ok()?;
    stream.write_all(&ready(socket_type)).await.ok()?;
    // Their READY, and for a publisher their subscription.
    frame(stream).await?;
    if socket_type == "PUB" {
        frame(stream).await?;
    }
    Some(())
}

/// Reads a whole message, or a command.
async fn frame(stream: &mut TcpStream) -> Option<()> {
    loop {
        let flags = stream.read_u8().await.ok()?;
        let length = if flags & 2 == 0 { stream.read_u8().await.ok()?.into() } else { stream.read_u64().await.ok()? };
        let mut body = vec![0; usize::try_from(length).ok()?];
        stream.read_exact(&mut body).await.ok()?;
        if flags & 1 == 0 {
            return Some(());
        }
    }
}

/// A message of frames as ZMTP writes it.
pub(crate) fn message(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, frame) in frames.iter().enumerate() {
        let more = u8::from(number + 1 < frames.len());
        if let Ok(length) = u8::try_from(frame.len()) {
            out.extend([more, length]);
        } else {
            out.push(more | 2);
            out.extend((frame.len() as u64).to_be_bytes());
        }
        out.extend(frame);
    }
    out
}

pub(crate) fn packed(value: &Packed) -> Vec<u8> {
    let mut out = Vec::new();
    rmpv::encode::write_value(&mut out, value).unwrap();
    out
}

/// A batch of events, at rank 0.
pub(crate) fn batch(events: Vec<Packed>) -> Vec<u8> {
    packed(&Packed::Array(vec![1.0.into(), Packed::Array(events), 0.into()]))
}

/// A block stored without its tokens, so that it says nothing of the contract.
pub(crate) fn stored(name: u64) -> Packed {
    let names = Packed::Array(vec![name.into()]);
    Packed::Array(vec!["BlockStored".into(), names, Packed::Nil, Packed::Array(Vec::new()), 0.into()])
}

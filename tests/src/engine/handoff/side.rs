//! The side channel: a TCP port of the prefill side, where a decode side reads blocks and says when it has.
//!
//! One JSON value a line, a question and its answer. The real connectors shake hands over such a port and then read by RDMA; here the
//! contents go over it too. A reader is given what the block numbers hold at that moment, whosever it is.

use std::io;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::task::JoinSet;

use super::contents::Content;
use crate::engine::gate::Gate;
use crate::engine::pool::BlockId;
use crate::engine::rank::Rank;

/// The longest line read: more than the longest prompt of a test.
const LINE_MAX: u64 = 256 * 1024 * 1024;

/// What a decode side says, and to which engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::engine) struct Ask {
    /// `remote_engine_id`.
    pub(in crate::engine) engine_id: String,
    /// `remote_request_id`, or the transfer's.
    pub(in crate::engine) key: String,
    /// What.
    pub(in crate::engine) what: What,
}

/// What is wanted for that request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::engine) enum What {
    /// What these blocks hold (NIXL).
    Read(Vec<BlockId>),
    /// What the blocks of the prompt from the first to the second number hold, once they are computed (Mooncake).
    Transfer(usize, usize),
    /// The blocks are no longer needed.
    Done,
    /// The decode still waits for its turn.
    Renew,
}

/// What the prefill side answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::engine) enum Told {
    /// The contents asked for, and tokens per block.
    Contents { block_size: usize, contents: Vec<Content> },
    /// Noted.
    Noted,
    /// Why not.
    Refused(String),
}

/// Answers on one rank's port for ever.
pub(in crate::engine) async fn serve(rank: Arc<Rank>, mut gate: Gate) {
    let mut connections = JoinSet::new();
    loop {
        let stream = gate.accept().await;
        while connections.try_join_next().is_some() {}
        let rank = Arc::clone(&rank);
        connections.spawn(async move {
            if let Err(cause) = answer_all(&rank, stream).await {
                tracing::debug!(%cause, "side channel connection ended");
            }
        });
    }
}

async fn answer_all(rank: &Rank, stream: TcpStream) -> io::Result<()> {
    let mut channel = Channel::over(stream)?;
    while let Some(ask) = channel.read().await? {
        let told = rank.told(ask).await;
        channel.write(&told).await?;
    }
    Ok(())
}

/// A connection, from either end.
#[derive(Debug)]
pub(in crate::engine) struct Channel(BufReader<TcpStream>);

impl Channel {
    /// Connects to a prefill side.
    ///
    /// # Errors
    /// When it is refused or unreachable.
    pub(in crate::engine) async fn connect(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::over(TcpStream::connect(address).await?)
    }

    fn over(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// When the connection ends before it.
    pub(in crate::engine) async fn ask(&mut self, ask: &Ask) -> io::Result<Told> {
        self.write(ask).await?;
        self.read().await?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
    }

    async fn read<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut line = Vec::new();
        if (&mut self.0).take(LINE_MAX).read_until(b'\n', &mut line).await? == 0 {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&line)?))
    }

    async fn write(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.0.get_mut().write_all(&line).await
    }
}

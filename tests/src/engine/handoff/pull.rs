//! The decode side's errands: reading blocks, saying that they are no longer needed, and asking to keep them a while longer.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::{sleep, timeout};

use super::contents::Content;
use super::legs::LegId;
use super::side::{Ask, Channel, Told, What};
use super::{Source, bootstrap};
use crate::engine::rank::Rank;
use crate::engine::scheduler::SeqId;

/// How long a read or a word may take where nothing has to be waited for. A prefill side on the same machine needs milliseconds.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(30);

/// The first renewal comes this soon: the real one comes with the next step, and most requests have begun by then.
const FIRST_RENEWAL: Duration = Duration::from_millis(50);

/// A read that is due.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::engine) struct Pull {
    /// The request that waits for it.
    pub(in crate::engine) id: SeqId,
    /// Where to read.
    pub(in crate::engine) source: Source,
    /// Number of the first block of the prompt that is needed.
    pub(in crate::engine) from: usize,
    /// Number after the last.
    pub(in crate::engine) until: usize,
    /// KV group to read: the full-attention one.
    pub(in crate::engine) group: usize,
    /// The leg's place in the journal.
    pub(in crate::engine) leg: LegId,
}

/// Something to do on the wire, for the loop that steps the model.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::engine) enum Errand {
    /// Read now.
    Pull(Pull),
    /// The request ended before it read: the prefill side need not keep its blocks.
    Tell(Source),
    /// The request waits for its turn.
    Renew(SeqId, Source),
}

/// Does it.
pub(in crate::engine) async fn run(rank: Arc<Rank>, errand: Errand) {
    match errand {
        Errand::Pull(pull) => {
            sleep(Duration::from_millis(rank.faults.plan().pull_delay_ms)).await;
            let read = read(&pull, rank.config.block_size, rank.config.transfer_wait()).await;
            rank.pulled(&pull, read);
        }
        Errand::Tell(source) => tell(&source).await,
        Errand::Renew(id, source) => renew(&rank, id, &source).await,
    }
}

/// Tells the prefill side that its blocks are not needed.
pub(in crate::engine) async fn tell(source: &Source) {
    if let Err(cause) = word(source, What::Done).await {
        tracing::debug!("the prefill side was not told: {cause:#}");
    }
}

async fn read(pull: &Pull, block_size: usize, wait: Duration) -> anyhow::Result<Vec<Content>> {
    let (what, limit) = match &pull.source {
        Source::Blocks { blocks, .. } => {
            let group = blocks.get(pull.group).or_else(|| blocks.last()).map_or(&[][..], Vec::as_slice);
            let wanted = group.get(pull.from..pull.until);
            let wanted = wanted.with_context(|| format!("{} blocks for a prompt of {}", group.len(), pull.until))?;
            (What::Read(wanted.to_vec()), EXCHANGE_LIMIT)
        }
        Source::Transfer { .. } => (What::Transfer(pull.from, pull.until), wait),
    };
    let exchange = async {
        let mut channel = connect(&pull.source).await?;
        let contents = match channel.ask(&ask(&pull.source, what)).await? {
            Told::Contents { block_size: theirs, .. } if theirs != block_size => {
                bail!("blocks of {theirs} tokens, not {block_size}")
            }
            Told::Contents { contents, .. } if contents.len() == pull.until - pull.from => contents,
            Told::Contents { contents, .. } => bail!("{} blocks came", contents.len()),
            Told::Refused(why) => bail!("refused: {why}"),
            Told::Noted => bail!("no contents came"),
        };
        // What was read is good, whether the other side hears of it or not.
        if let Err(cause) = channel.ask(&ask(&pull.source, What::Done)).await {
            tracing::debug!(%cause, "the prefill side was not told");
        }
        Ok(contents)
    };
    timeout(limit, exchange).await.with_context(|| format!("nothing came within {limit:?}"))?
}

/// Keeps the lease alive while the request waits; who is reading does not, so that a slow read can come too late.
async fn renew(rank: &Rank, id: SeqId, source: &Source) {
    let interval = rank.config.lease() / 6;
    let mut next = interval.min(FIRST_RENEWAL);
    loop {
        sleep(next).await;
        if !rank.scheduler().awaits_its_pull(id) {
            return;
        }
        if let Err(cause) = word(source, What::Renew).await {
            tracing::debug!("no renewal: {cause:#}");
        }
        next = interval;
    }
}

async fn word(source: &Source, what: What) -> anyhow::Result<()> {
    let exchange = async {
        connect(source).await?.ask(&ask(source, what)).await?;
        Ok(())
    };
    timeout(EXCHANGE_LIMIT, exchange).await.with_context(|| format!("no answer within {EXCHANGE_LIMIT:?}"))?
}

fn ask(source: &Source, what: What) -> Ask {
    Ask { engine_id: source.engine_id().to_owned(), key: source.key().to_owned(), what }
}

async fn connect(source: &Source) -> anyhow::Result<Channel> {
    match source {
        Source::Blocks { host, port, .. } => {
            Channel::connect((host.as_str(), *port)).await.with_context(|| format!("connect to {host}:{port}"))
        }
        Source::Transfer { bootstrap, engine_id, .. } => {
            let worker = bootstrap::find(bootstrap, engine_id).await?;
            Channel::connect(worker.as_str()).await.with_context(|| format!("connect to {worker}"))
        }
    }
}

//! How one kvlb hands everything over to the next: messages and descriptors over a Unix socket.
//!
//! Owns the socket's place, the wire, and who may speak. Never decides when anything is handed over: `app` does.
//!
//! One conversation, of messages that are JSON behind their length:
//!
//! ```text
//! next                     this
//! Hello      ───────────►          who it is
//!            ◄───────────  Offer   and a descriptor for each of its gifts; or Refused
//! Progress   ───────────►          every second while it gets ready; silence ends the conversation
//! Ready      ───────────►          it accepts from every socket
//!            ◄───────────  Released: this one does no longer
//! ```
//!
//! Up to `Ready`, the end of the conversation leaves this one as it was. Gifts are descriptors of the very files and
//! sockets, so whatever waits in the queue of a listening socket waits for whoever accepts.

mod line;
mod place;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use line::Line;
pub use place::{Door, connect, peer};

/// The version of messages and gifts. Another one is refused, by either side.
pub const PROTOCOL: u32 = 1;
/// How long one message may take.
pub const ANSWER: Duration = Duration::from_secs(20);
/// How often the next one says how far it has come.
pub const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// How long it may say nothing: a process that is stopped or thrashes is not one to hand over to.
pub const SILENCE: Duration = Duration::from_secs(30);

/// What the next one says.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FromNext {
    /// The first word.
    Hello(Hello),
    /// How far it has come, in words for a log.
    Progress(String),
    /// It accepts from every socket that it was given.
    Ready,
}

/// Who asks to take over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Its [`PROTOCOL`].
    pub protocol: u32,
    /// kvlb's version.
    pub version: String,
    /// Its process, as it sees itself.
    pub pid: u32,
}

/// What this one says.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FromThis {
    /// What it has; the gifts' descriptors follow.
    Offer(Box<Offer>),
    /// It accepts no more, and changes nothing more that is shared.
    Released,
    /// Nothing is handed over, or nothing any more.
    Refused {
        /// Which refusal it is: a stable word.
        code: String,
        /// The same for people.
        why: String,
    },
}

/// Everything that is handed over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Offer {
    /// Its [`PROTOCOL`].
    pub protocol: u32,
    /// kvlb's version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// `sk_lookup` or `none`.
    pub datapath: String,
    /// Where maps are pinned, with `sk_lookup`.
    pub pin_dir: Option<PathBuf>,
    /// Device and inode of its network namespace.
    pub netns: (u64, u64),
    /// Where the API listens.
    pub api: SocketAddr,
    /// Where rules are kept.
    pub state_dir: Option<PathBuf>,
    /// The rules, where they are kept nowhere.
    pub rules: Option<Value>,
    /// What the next one ought to know of the engines before it is ready.
    pub known: Known,
    /// What each descriptor is, in their order.
    pub gifts: Vec<Gift>,
}

/// What a running kvlb has learned that takes a moment to learn again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Known {
    /// Of each endpoint.
    pub endpoints: Vec<KnownEndpoint>,
    /// Models whose tokenizers are in use.
    pub tokenizers: Vec<String>,
}

/// What is known of one endpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KnownEndpoint {
    /// What tells its rule from others.
    pub rule: String,
    /// Its host and port.
    pub endpoint: String,
    /// Its probe has a verdict.
    pub probed: bool,
    /// It has said what it is.
    pub told: bool,
    /// Its events are heard.
    pub heard: bool,
}

/// What a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Gift {
    /// The API's listening socket.
    Api,
    /// The socket that the next takeover comes through.
    Door,
    /// The lock of the state directory.
    StateLock,
    /// The lock of the pin directory.
    PinLock,
    /// A listening socket of a VIP.
    Vip,
    /// A listening socket that the kernel steers to.
    Steered,
}

/// Gifts with their descriptors.
pub type Gifts = Vec<(Gift, OwnedFd)>;

/// Why nothing is handed over.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody is there.
    #[error("no kvlb to take over from answers at {}: start without --takeover, or with --takeover=if-running", .0.display())]
    NobodyThere(PathBuf),
    /// The socket's place is of no use.
    #[error("{what} {}", path.display())]
    Place {
        /// What was tried.
        what: &'static str,
        /// The socket.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Another kvlb listens there.
    #[error("another kvlb listens for takeovers at {}: take over from it with --takeover, or name another --takeover-socket", .0.display())]
    InUse(PathBuf),
    /// The other side ended the conversation without a word.
    #[error("the other kvlb ended the conversation")]
    Gone,
    /// It says nothing.
    #[error("the other kvlb says nothing for {0:?}")]
    Silent(Duration),
    /// It refuses.
    #[error("the running kvlb refuses ({code}): {why}")]
    Refused {
        /// Its word.
        code: String,
        /// Its words.
        why: String,
    },
    /// What it says is not what has its place there.
    #[error("the other kvlb says what cannot be understood: {0}")]
    Garbled(String),
    /// It offers what this one cannot take.
    #[error("cannot take over: {0}")]
    Unfit(String),
    /// Fewer descriptors came than were offered.
    #[error("{came} of {offered} descriptors came: raise the limit of open files")]
    Descriptors {
        /// How many came.
        came: usize,
        /// How many were to come.
        offered: usize,
    },
    /// The socket failed.
    #[error("talk to the other kvlb")]
    Io(#[source] io::Error),
}

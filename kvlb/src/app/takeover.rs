//! One kvlb takes over from another, and hands over to the next: what [`crate::handover`] carries, tied to the parts.
//!
//! This side of a conversation gives everything away and goes on as if nothing had happened until the next one says that it
//! is ready. Only then it lets go: first of what it shares (rules, pins, routes), then of its listeners, last of its streams.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::listen::is_steered;
use crate::clock;
use crate::config::{Config, Datapath, Takeover};
use crate::control::Store;
use crate::control::store::Before;
use crate::fleet::Probe;
use crate::handover::{
    ANSWER, Door, Error, FromNext, FromThis, Gift, Gifts, Hello, Known, KnownEndpoint, Line, Offer, PROGRESS_EVERY,
    PROTOCOL, SILENCE, connect, peer,
};
use crate::kernel::Kernel;
use crate::proxy::Proxy;
use crate::state::kv::ReplayState;
use crate::state::{Endpoint, Service, State};
use crate::telemetry::Metrics;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// How often the one that gets ready looks whether it knows what the running one knows.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The metric's words for how takeovers end: this process took over, knowing what the other knew or not yet all; handed
/// over; was left alone with a conversation that ended; refused one.
const TAKEN: &str = "taken";
const TAKEN_COLD: &str = "taken_cold";
const HANDED_OVER: &str = "handed_over";
const FAILED: &str = "failed";
const REFUSED: &str = "refused";

/// What this process got of the one before.
#[derive(Debug)]
pub(super) struct Inheritance {
    line: Line,
    offer: Offer,
    gifts: Gifts,
}

impl Inheritance {
    /// Asks the running kvlb for everything. `None` where none runs and none has to.
    ///
    /// # Errors
    /// Why nothing is handed over.
    pub(super) fn ask(config: &Config) -> Result<Option<Self>, Error> {
        let (Some(path), true) = (&config.takeover_socket, config.takeover != Takeover::No) else { return Ok(None) };
        let Some(stream) = connect(path)? else {
            if config.takeover == Takeover::Required {
                return Err(Error::NobodyThere(path.clone()));
            }
            tracing::info!(path = %path.display(), "no kvlb to take over from: starting alone");
            return Ok(None);
        };
        peer(&stream)
            .map_err(|uid| Error::Unfit(format!("user {uid} listens there, which is neither ours nor root")))?;
        let mut line = Line::new(stream)?;
        line.send(&FromNext::Hello(Hello {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            pid: std::process::id(),
        }))?;
        let offer = match line.receive(ANSWER)? {
            FromThis::Offer(offer) => *offer,
            FromThis::Refused { code, why } => return Err(Error::Refused { code, why }),
            FromThis::Released => return Err(Error::Garbled("a release before an offer".to_owned())),
        };
        let gifts = offer.gifts.iter().copied().zip(line.take(offer.gifts.len())?).collect();
        if let Some(why) = misfit(config, &offer) {
            return Err(Error::Unfit(why));
        }
        tracing::info!(from = offer.pid, version = offer.version, descriptors = offer.gifts.len(), "taking over");
        Ok(Some(Self { line, offer, gifts }))
    }

    /// What the running one has.
    pub(super) fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Its descriptors of one kind.
    pub(super) fn take(&mut self, wanted: Gift) -> Vec<OwnedFd> {
        let (taken, left) = std::mem::take(&mut self.gifts).into_iter().partition(|(gift, _)| *gift == wanted);
        self.gifts = left;
        let taken: Vec<(Gift, OwnedFd)> = taken;
        taken.into_iter().map(|(_, descriptor)| descriptor).collect()
    }

    /// The same as listening sockets.
    pub(super) fn sockets(&mut self, wanted: Gift) -> Vec<TcpListener> {
        self.take(wanted).into_iter().map(TcpListener::from).collect()
    }

    /// The rules to go on with.
    ///
    /// # Errors
    /// [`Error::Garbled`] where neither rules nor a lock came.
    pub(super) fn rules(&mut self) -> Result<Before, Error> {
        let lock = self.take(Gift::StateLock).pop();
        match (self.offer.state_dir.clone(), lock, self.offer.rules.take()) {
            (Some(dir), Some(lock), _) => Ok(Before::Kept(dir, File::from(lock))),
            (None, _, Some(rules)) => Ok(Before::Told(rules)),
            _ => Err(Error::Garbled("an offer without rules".to_owned())),
        }
    }

    /// Waits until `state` knows what the running one knows, for `limit` at most. Says whether it does.
    ///
    /// # Errors
    /// Where the running one takes its offer back. That it dies only ends the waiting: somebody has to serve.
    pub(super) async fn warm_up(&mut self, state: &State, limit: Duration) -> Result<bool, Error> {
        let (start, mut told) = (clock::now(), None::<Instant>);
        loop {
            let missing = missing(&self.offer.known, state);
            if missing.is_empty() {
                return Ok(true);
            }
            let now = clock::now();
            let late = now.saturating_duration_since(start) >= limit;
            if late || told.is_none_or(|told| now.saturating_duration_since(told) >= PROGRESS_EVERY) {
                told = Some(now);
                let text = missing.text();
                if late {
                    tracing::warn!(missing = text, ?limit, "taking over without all that the running kvlb knows");
                    return Ok(false);
                }
                tracing::info!(missing = text, "getting ready to take over");
                if self.line.send(&FromNext::Progress(text)).is_err() && !self.line.has_word() {
                    return Ok(false);
                }
            }
            if self.line.has_word() {
                match self.line.receive(ANSWER) {
                    Ok(FromThis::Refused { code, why }) => return Err(Error::Refused { code, why }),
                    Err(Error::Gone) => {
                        tracing::warn!("the running kvlb has died: serving at once");
                        return Ok(false);
                    }
                    Ok(other) => return Err(Error::Garbled(format!("{other:?} while getting ready"))),
                    Err(error) => return Err(error),
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// What ends the conversation while it is waited for.
    pub(super) fn hang_up(&self) -> Result<impl FnOnce() + Send + use<>, Error> {
        self.line.hang_up()
    }

    /// Says that this process accepts from all sockets, and waits until the other does no longer. From here on there is no
    /// way back, unless the other had given up before it heard of it.
    ///
    /// # Errors
    /// Where it had.
    pub(super) fn ready(mut self) -> Result<(), Error> {
        if let Err(error) = self.line.send(&FromNext::Ready) {
            tracing::warn!(%error, "the kvlb before does not hear that this one serves");
        }
        loop {
            match self.line.receive(ANSWER) {
                Ok(FromThis::Released) => return Ok(()),
                Ok(FromThis::Refused { code, why }) => return Err(Error::Refused { code, why }),
                Err(Error::Silent(_)) => tracing::warn!("the kvlb before has not let go yet"),
                Ok(FromThis::Offer(_)) | Err(_) => {
                    tracing::warn!("the kvlb before ended without letting go");
                    return Ok(());
                }
            }
        }
    }
}

/// Counts a takeover by this process.
pub(super) fn count_taken(metrics: &Metrics, warm: bool) {
    metrics.takeovers.with_label_values(&[if warm { TAKEN } else { TAKEN_COLD }]).inc();
}

/// What keeps this process from going on where the other stops.
fn misfit(config: &Config, offer: &Offer) -> Option<String> {
    if offer.protocol != PROTOCOL {
        return Some(format!("kvlb {} speaks version {} of it, this one {PROTOCOL}", offer.version, offer.protocol));
    }
    if netns().ok() != Some(offer.netns) {
        return Some("the running kvlb is in another network namespace".to_owned());
    }
    if real(config.state_dir.as_deref()) != real(offer.state_dir.as_deref()) {
        let shown = |dir: Option<&Path>| dir.map_or_else(|| "none".to_owned(), |dir| dir.display().to_string());
        let (theirs, ours) = (shown(offer.state_dir.as_deref()), shown(config.state_dir.as_deref()));
        return Some(format!("the running kvlb keeps its rules in {theirs}, this one is told {ours}"));
    }
    if offer.datapath == "none" {
        return None;
    }
    if config.datapath == Datapath::None {
        return Some("the running kvlb serves through the kernel; --datapath none needs a restart".to_owned());
    }
    let same = real(Some(&config.pin_dir)) == real(offer.pin_dir.as_deref());
    (!same).then(|| format!("the running kvlb pins its maps elsewhere than in {}", config.pin_dir.display()))
}

/// A path without links, where it is there.
fn real(path: Option<&Path>) -> Option<PathBuf> {
    path.map(|path| path.canonicalize().unwrap_or_else(|_not_there| path.to_owned()))
}

/// Device and inode of this thread's network namespace.
fn netns() -> io::Result<(u64, u64)> {
    let file = std::fs::metadata("/proc/thread-self/ns/net")?;
    Ok((file.dev(), file.ino()))
}

/// What the running one knows and this one does not.
#[derive(Debug, Default, PartialEq, Eq)]
struct Missing {
    inventories: usize,
    answers: usize,
    probes: usize,
    tokenizers: usize,
}

impl Missing {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn text(&self) -> String {
        let Self { inventories, answers, probes, tokenizers } = self;
        let parts = [
            (inventories, "inventories"),
            (answers, "engines' answers"),
            (probes, "probes"),
            (tokenizers, "tokenizers"),
        ];
        let parts = parts.into_iter().filter(|(count, _)| **count > 0);
        parts.map(|(count, what)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
    }
}

fn missing(known: &Known, state: &State) -> Missing {
    let ours = self::known(state);
    let mut missing = Missing::default();
    for theirs in &known.endpoints {
        let same = |ours: &&KnownEndpoint| ours.rule == theirs.rule && ours.endpoint == theirs.endpoint;
        // Of a rule that is gone nothing can be known.
        let Some(ours) = ours.endpoints.iter().find(same) else { continue };
        missing.inventories += usize::from(theirs.heard && !ours.heard);
        missing.answers += usize::from(theirs.told && !ours.told);
        missing.probes += usize::from(theirs.probed && !ours.probed);
    }
    for slug in known.tokenizers.iter().filter(|slug| !ours.tokenizers.contains(slug)) {
        // Asking is what has it loaded; one that turns out to be of no use is known well enough.
        missing.tokenizers += usize::from(state.tokenizers.find(slug).is_err_and(|why| why == "loading"));
    }
    missing
}

/// What this process has learned of its engines.
fn known(state: &State) -> Known {
    let table = state.table();
    let of_service = |service: &Arc<Service>| {
        let key = &service.rule().key;
        let model = key.model.as_deref().unwrap_or_default();
        let rule = format!("{} {} {} {} {model}", key.vip, key.ports.first, key.host, key.path_prefix);
        service.endpoints.iter().map(|endpoint| known_endpoint(&rule, endpoint)).collect::<Vec<_>>()
    };
    Known { endpoints: table.services().iter().flat_map(of_service).collect(), tokenizers: state.tokenizers.ready() }
}

fn known_endpoint(rule: &str, endpoint: &Endpoint) -> KnownEndpoint {
    let heard = endpoint.kv.as_ref().is_some_and(|kv| {
        let status = kv.status(clock::now());
        status.connected && status.replay != ReplayState::Pending
    });
    KnownEndpoint {
        rule: rule.to_owned(),
        endpoint: endpoint.spec.key.to_string(),
        probed: endpoint.condition().probe != Probe::Unknown,
        // What an engine said that is down now is not heard again before it is back.
        told: heard && endpoint.meters.facts().is_some(),
        heard,
    }
}

/// What this process hands over when it is asked to.
#[derive(Debug)]
pub(super) struct Giver {
    pub(super) state: Arc<State>,
    pub(super) store: Arc<Store>,
    pub(super) door: Arc<Mutex<Door>>,
    /// Weak, so that it can be drained.
    pub(super) proxy: Weak<Proxy>,
    pub(super) kernel: Option<Weak<Mutex<Kernel>>>,
    pub(super) api: std::net::TcpListener,
    pub(super) state_dir: Option<PathBuf>,
    /// Whether nothing may be bound that the next one would not know of.
    pub(super) handing_over: Arc<AtomicBool>,
    /// The conversation under way.
    pub(super) talking: Mutex<Option<UnixStream>>,
    /// No conversation begins any more.
    pub(super) closed: AtomicBool,
}

/// Takes conversations, one at a time, for ever; gives the one whose other side is ready.
pub(super) async fn keep_offering(giver: Arc<Giver>, ready: mpsc::Sender<Line>) {
    let listener = giver.door.lock().listener();
    let listener = match listener.and_then(tokio::net::UnixListener::from_std) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "no takeover can be asked for"),
    };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (giver, ready) = (Arc::clone(&giver), ready.clone());
                tokio::task::spawn_blocking(move || {
                    let line = stream.into_std().map_err(Error::Io).and_then(|stream| giver.converse(stream));
                    match line {
                        Ok(line) => {
                            if ready.blocking_send(line).is_err() {
                                tracing::error!("a takeover came too late");
                            }
                        }
                        Err(error) => tracing::warn!(%error, "a takeover has failed; this process goes on"),
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a takeover could not be accepted");
                tokio::time::sleep(PROGRESS_EVERY).await;
            }
        }
    }
}

impl Giver {
    /// One conversation up to the other side's being ready. Until then, whatever fails leaves everything as it was.
    fn converse(&self, stream: UnixStream) -> Result<Line, Error> {
        let count = |outcome| self.state.metrics.takeovers.with_label_values(&[outcome]).inc();
        let who = peer(&stream);
        let copy = stream.try_clone().map_err(Error::Io)?;
        let mut line = Line::new(stream)?;
        let begun = self.begin(copy, who, &mut line);
        if let Err((code, why)) = begun {
            count(REFUSED);
            let refusal = Error::Refused { code: code.to_owned(), why: why.clone() };
            line.send(&FromThis::Refused { code: code.to_owned(), why })?;
            return Err(refusal);
        }
        let ready = self.until_ready(&mut line);
        match ready {
            Ok(()) => {
                count(HANDED_OVER);
                Ok(line)
            }
            Err(error) => {
                count(FAILED);
                self.handing_over.store(false, Ordering::Release);
                self.store.go_on();
                // Mostly it is gone; where it is not, it must not believe that we are.
                let refusal = FromThis::Refused { code: "given_up".to_owned(), why: error.to_string() };
                drop(line.send(&refusal));
                *self.talking.lock() = None;
                Err(error)
            }
        }
    }

    /// Whether a conversation may begin; then it is the only one, and nothing changes.
    fn begin(
        &self,
        copy: UnixStream,
        who: Result<(i32, u32), u32>,
        line: &mut Line,
    ) -> Result<(), (&'static str, String)> {
        let (pid, uid) = who.map_err(|uid| ("peer", format!("user {uid} is neither this process's nor root")))?;
        let hello = match line.receive(ANSWER) {
            Ok(FromNext::Hello(hello)) => hello,
            Ok(other) => return Err(("protocol", format!("{other:?} is no greeting"))),
            Err(error) => return Err(("protocol", error.to_string())),
        };
        if hello.protocol != PROTOCOL {
            let why = format!("version {} of the takeover is asked for, this is {PROTOCOL}", hello.protocol);
            return Err(("protocol", why));
        }
        let mut talking = self.talking.lock();
        if self.closed.load(Ordering::Acquire) {
            return Err(("stopping", "this process is about to end".to_owned()));
        }
        if talking.is_some() {
            return Err(("busy", "another takeover is under way".to_owned()));
        }
        *talking = Some(copy);
        drop(talking);
        tracing::info!(pid, uid, version = hello.version, "a takeover is asked for: rules are held as they are");
        Ok(())
    }

    fn until_ready(&self, line: &mut Line) -> Result<(), Error> {
        // In this order: a change on its way is served before sockets are counted.
        self.store.hold();
        self.handing_over.store(true, Ordering::Release);
        let (offer, gifts) = self.offer().map_err(|error| Error::Unfit(format!("{error:#}")))?;
        line.send(&FromThis::Offer(Box::new(offer)))?;
        line.give(&gifts.iter().map(|(_, gift)| gift.as_fd()).collect::<Vec<_>>())?;
        loop {
            match line.receive(SILENCE)? {
                FromNext::Progress(text) => tracing::info!(missing = text, "the next kvlb gets ready"),
                // Who was told to stop in the meantime does not go on for us.
                FromNext::Ready if line.is_over() => return Err(Error::Gone),
                FromNext::Ready => return Ok(()),
                hello @ FromNext::Hello(_) => return Err(Error::Garbled(format!("{hello:?} twice"))),
            }
        }
    }

    fn offer(&self) -> Result<(Offer, Gifts)> {
        let proxy = self.proxy.upgrade().context("the data side has ended")?;
        let kernel = self.kernel.as_ref().map(|kernel| kernel.upgrade().context("the kernel side has ended"));
        let kernel = kernel.transpose()?;
        let mut gifts: Gifts =
            vec![(Gift::Api, self.api.as_fd().try_clone_to_owned().context("share the API's socket")?)];
        gifts.push((Gift::Door, self.door.lock().as_fd().try_clone_to_owned().context("share the takeover's socket")?));
        if let Some(lock) = self.store.lend_lock().context("share the state directory's lock")? {
            gifts.push((Gift::StateLock, lock.into()));
        }
        let mut pin_dir = None;
        if let Some(kernel) = &kernel {
            let kernel = kernel.lock();
            pin_dir = Some(kernel.pin_dir().to_owned());
            gifts.extend(
                kernel.lend_lock().context("share the pin directory's lock")?.map(|lock| (Gift::PinLock, lock.into())),
            );
        }
        gifts.extend(listeners(&proxy).context("share the listening sockets")?);
        let offer = Offer {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            pid: std::process::id(),
            datapath: if kernel.is_some() { "sk_lookup" } else { "none" }.to_owned(),
            pin_dir,
            netns: netns().context("look at the network namespace")?,
            api: self.api.local_addr().context("read the API's address")?,
            state_dir: self.state_dir.clone(),
            rules: self.store.copy(),
            known: known(&self.state),
            gifts: gifts.iter().map(|(gift, _)| *gift).collect(),
        };
        Ok((offer, gifts))
    }

    /// Begins no conversation any more, and ends the one under way: this process stops, and with it its sockets.
    pub(super) fn close(&self) {
        let talking = self.talking.lock();
        self.closed.store(true, Ordering::Release);
        let Some(stream) = talking.as_ref() else { return };
        let refusal =
            FromThis::Refused { code: "stopping".to_owned(), why: "the running kvlb was told to stop".to_owned() };
        let told = stream.try_clone().map_err(Error::Io).and_then(Line::new).and_then(|mut line| line.send(&refusal));
        if let Err(error) = told.and_then(|()| stream.shutdown(std::net::Shutdown::Both).map_err(Error::Io)) {
            tracing::debug!(%error, "the one that wanted to take over is gone");
        }
    }
}

/// A descriptor of each listening socket.
fn listeners(proxy: &Proxy) -> io::Result<Gifts> {
    let mut seen = std::collections::BTreeSet::new();
    let mut gifts = Vec::new();
    for (link, socket) in proxy.lend()? {
        let socket = File::from(socket);
        let inode = socket.metadata()?.ino();
        if seen.insert(inode) {
            let gift = if is_steered(link) { Gift::Steered } else { Gift::Vip };
            gifts.push((gift, OwnedFd::from(socket)));
        }
    }
    Ok(gifts)
}

/// Where the API listens: on the socket of the kvlb before, where that has the address.
///
/// # Errors
/// When another address cannot be bound.
pub(super) fn api_listener(wanted: SocketAddr, inheritance: Option<&mut Inheritance>) -> io::Result<TcpListener> {
    let given = inheritance.and_then(|given| given.sockets(Gift::Api).pop());
    let fits = |listener: &TcpListener| listener.local_addr().is_ok_and(|has| has == wanted || wanted.port() == 0);
    let listener = match given.filter(fits) {
        Some(listener) => listener,
        None => TcpListener::bind(wanted)?,
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

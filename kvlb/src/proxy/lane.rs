//! One data thread: its listeners, its connections, and what they share.
//!
//! Nothing here leaves the thread. Orders from outside come through a channel; the backplane, the meter, the worker pool
//! and the body budget are the only things that data threads have in common.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinHandle, spawn_local, yield_now};

use super::backplane::{Arrival, Backplane};
use super::buffer::{self, Budget};
use super::client;
use super::hold::Holds;
use super::idle::{Bounds, Idle};
use super::io::{Backend, Listener, Stream};
use super::meter::{Meter, Pulse, Refused};
use super::timer::{sleep, sleep_until, timeout, timeout_at};
use super::trace::Ids;
use super::workers::Workers;
use super::{Config, Link};
use crate::clock;
use crate::courtesy::Place;

/// How often a thread takes its own pulse, and sweeps its idle connections. Rare enough to cost nothing.
const TICK: Duration = Duration::from_millis(50);
/// Connections taken in a row before the thread looks after those it has.
const ACCEPT_BURST: u32 = 16;
/// First pause after a failed accept, doubled up to the longest: with all descriptors in use, trying is no help.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
const ACCEPT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long connections that were told to end at once may take for it.
const ABORT_GRACE: Duration = Duration::from_secs(1);
/// How long connections between two requests are kept once another process has taken over. Whoever asks again on one is
/// told to close it, which no request is lost by; an end that nobody was told of can cross a request on its way. Pools of
/// clients mostly let go of theirs sooner.
const IDLE_GRACE: Duration = Duration::from_secs(10);
/// How long the polite end of those takes: longer than [`client`] lingers.
const IDLE_END: Duration = Duration::from_secs(4);

/// What a data thread is told.
#[derive(Debug)]
pub(super) enum Command {
    /// Serve this listening socket.
    Listen(Link, std::net::TcpListener),
    /// Serve it no more; `release` leaves the socket listening, for whoever else holds it.
    Unlisten { link: Link, release: bool },
    /// Give a descriptor of each listening socket.
    Lend(std::sync::mpsc::Sender<(Link, io::Result<OwnedFd>)>),
    /// Accept nothing more, end when the last connection has ended or at the deadline. `release`: another process goes on
    /// accepting from the sockets, so that clients need not be told at once.
    Drain { deadline: Instant, release: bool },
}

/// What a connection is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Order {
    /// Go on.
    Go,
    /// End when the answer on its way is complete.
    Finish,
    /// End now.
    Abort,
}

/// Where a connection gets its orders.
#[derive(Debug)]
pub(super) struct Post {
    order: Cell<Order>,
    waker: RefCell<Option<Waker>>,
}

impl Post {
    /// Ready when the order is at least `order`.
    pub(super) fn poll(&self, order: Order, cx: &mut Context<'_>) -> Poll<()> {
        if self.order.get() >= order {
            return Poll::Ready(());
        }
        let mut waker = self.waker.borrow_mut();
        match &mut *waker {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *waker = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    pub(super) fn order(&self) -> Order {
        self.order.get()
    }

    fn give(&self, order: Order) {
        self.order.set(order.max(self.order.get()));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// What the connections of one data thread share.
pub(super) struct Lane<B: Backend, P: Backplane> {
    pub(super) backplane: Arc<P>,
    pub(super) meter: Arc<dyn Meter>,
    pub(super) config: Arc<Config>,
    pub(super) workers: Arc<Workers>,
    pub(super) budget: Arc<Budget>,
    /// Client connections of all threads, and their listening sockets.
    clients: Arc<AtomicUsize>,
    listening: Arc<AtomicUsize>,
    pub(super) idle: RefCell<Idle<B::Stream>>,
    holds: Rc<Holds>,
    scratch: Cell<Vec<u8>>,
    pub(super) ids: Ids,
    number: usize,
    posts: RefCell<Posts>,
    draining: Cell<Draining>,
    emptied: Notify,
}

/// How a thread ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Draining {
    /// It does not.
    #[default]
    No,
    /// Connections between two requests are closed at once.
    Briskly,
    /// Another process has taken over.
    Politely,
}

/// The connections of a thread, by their place.
#[derive(Default)]
struct Posts {
    places: Vec<Option<Rc<Post>>>,
    free: Vec<usize>,
}

/// What data threads have in common.
pub(super) struct Shared<P> {
    pub(super) backplane: Arc<P>,
    pub(super) meter: Arc<dyn Meter>,
    pub(super) config: Arc<Config>,
    pub(super) workers: Arc<Workers>,
    pub(super) budget: Arc<Budget>,
    pub(super) clients: Arc<AtomicUsize>,
    pub(super) listening: Arc<AtomicUsize>,
}

/// A data thread's whole life.
pub(super) async fn run<B: Backend, P: Backplane>(
    number: usize,
    place: Option<Place>,
    shared: Shared<P>,
    mut commands: mpsc::UnboundedReceiver<Command>,
) {
    buffer::open_shelf();
    let lane = Rc::new(Lane::<B, P>::new(number, place, shared));
    let pulse = spawn_local(take_pulse(Rc::clone(&lane)));
    let mut doors: BTreeMap<Link, Vec<Door<B::Listener>>> = BTreeMap::new();
    let (deadline, release, how) = loop {
        match commands.recv().await {
            Some(Command::Listen(link, socket)) => open_door(&lane, &mut doors, link, socket),
            Some(Command::Unlisten { link, release }) => {
                doors.remove(&link).into_iter().flatten().for_each(|door| door.shut(release));
            }
            Some(Command::Lend(to)) => lend(&doors, &to),
            Some(Command::Drain { deadline, release }) => {
                break (deadline, release, if release { Draining::Politely } else { Draining::Briskly });
            }
            // The proxy was dropped: its sockets may be another process's, too.
            None => break (clock::now(), true, Draining::Briskly),
        }
    };
    doors.into_values().flatten().for_each(|door| door.shut(release));
    lane.drain(deadline, how).await;
    pulse.abort();
    lane.idle.borrow_mut().clear();
    buffer::close_shelf();
}

/// A listening socket and the task that accepts from it.
struct Door<L> {
    listener: Rc<L>,
    task: JoinHandle<()>,
    _counted: Counted,
}

/// One listening socket among those of all threads.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(all: &Arc<AtomicUsize>) -> Self {
        all.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(all))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<L: Listener> Door<L> {
    fn shut(self, release: bool) {
        self.task.abort();
        if !release {
            self.listener.stop();
        }
    }
}

/// Gives a descriptor of each listening socket to whoever asked.
fn lend<L: Listener>(doors: &BTreeMap<Link, Vec<Door<L>>>, to: &std::sync::mpsc::Sender<(Link, io::Result<OwnedFd>)>) {
    for (link, door) in doors.iter().flat_map(|(link, doors)| doors.iter().map(move |door| (*link, door))) {
        if to.send((link, door.listener.lend())).is_err() {
            return;
        }
    }
}

fn open_door<B: Backend, P: Backplane>(
    lane: &Rc<Lane<B, P>>,
    doors: &mut BTreeMap<Link, Vec<Door<B::Listener>>>,
    link: Link,
    socket: std::net::TcpListener,
) {
    match B::listen(socket) {
        Ok(listener) => {
            let listener = Rc::new(listener);
            let counted = Counted::new(&lane.listening);
            let (lane, door) = (Rc::clone(lane), Rc::clone(&listener));
            let task = spawn_local(async move { Rc::clone(&lane.holds).measure(accept(lane, door)).await });
            doors.entry(link).or_default().push(Door { listener, task, _counted: counted });
        }
        Err(error) => tracing::error!(%error, "a listening socket cannot be served"),
    }
}

/// Accepts until it is aborted; no error ends it.
async fn accept<B: Backend, P: Backplane>(lane: Rc<Lane<B, P>>, listener: Rc<B::Listener>) {
    let (mut pause, mut burst) = (ACCEPT_PAUSE, 0);
    loop {
        match listener.accept().await {
            Ok((stream, client)) => {
                pause = ACCEPT_PAUSE;
                lane.receive(stream, client);
                burst += 1;
                if burst == ACCEPT_BURST {
                    burst = 0;
                    yield_now().await;
                }
            }
            Err(error) => {
                lane.meter.accept_failed();
                if is_out_of_resources(&error) {
                    lane.idle.borrow_mut().clear();
                }
                tracing::debug!(%error, ?pause, "accept failed");
                sleep(pause).await;
                pause = ACCEPT_PAUSE_MAX.min(pause * 2);
            }
        }
    }
}

/// Descriptors that are left to everything but the data side's sockets.
const DESCRIPTORS_ELSEWHERE: usize = 200;
/// Clients that are taken however few descriptors there are.
const CLIENTS_LEAST: usize = 16;

/// Client connections that can be served with so many descriptors, of which some listen: two each.
fn affordable(descriptors: usize, listening: usize) -> usize {
    (descriptors.saturating_sub(DESCRIPTORS_ELSEWHERE.saturating_add(listening)) / 2).max(CLIENTS_LEAST)
}

/// Whether an error means that the process or the machine has no file descriptor, port or memory left.
pub(super) fn is_out_of_resources(error: &std::io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS | libc::EADDRNOTAVAIL)
    )
}

/// Says twenty times a second how the thread fares. A pulse that comes late tells of something that held the thread.
async fn take_pulse<B: Backend, P: Backplane>(lane: Rc<Lane<B, P>>) {
    let mut due = clock::now() + TICK;
    loop {
        sleep_until(due).await;
        let now = clock::now();
        let held = lane.holds.take();
        if lane.idle.borrow_mut().sweep(now) {
            lane.holds.note(clock::now().saturating_duration_since(now));
        }
        lane.meter.tick(&Pulse {
            thread: lane.number,
            late: now.saturating_duration_since(due),
            held,
            clients: lane.posts.borrow().open(),
            idle_endpoint_connections: lane.idle.borrow().len(),
            buffer_bytes: buffer::bytes_in_use(),
            free_buffer_bytes: buffer::bytes_free(),
            body_bytes_held: lane.budget.used(),
        });
        due = now + TICK;
    }
}

impl<B: Backend, P: Backplane> Lane<B, P> {
    fn new(number: usize, place: Option<Place>, shared: Shared<P>) -> Self {
        let Shared { backplane, meter, config, workers, budget, clients, listening } = shared;
        let bounds = Bounds { per_endpoint: config.idle_per_endpoint, total: config.idle_total, age: config.idle_age };
        Self {
            backplane,
            meter,
            config,
            workers,
            budget,
            clients,
            listening,
            idle: RefCell::new(Idle::new(bounds)),
            holds: Rc::new(Holds::on(place)),
            scratch: Cell::default(),
            ids: Ids::new(),
            number,
            posts: RefCell::default(),
            draining: Cell::default(),
            emptied: Notify::new(),
        }
    }

    /// The time, to the length of a task's turn.
    pub(super) fn now(&self) -> Instant {
        self.holds.now()
    }

    /// Memory to write a head into, before it is put in front of its body.
    pub(super) fn scratch(&self) -> Vec<u8> {
        let mut scratch = self.scratch.take();
        scratch.clear();
        scratch
    }

    /// Takes that memory back.
    pub(super) fn keep_scratch(&self, scratch: Vec<u8>) {
        self.scratch.set(scratch);
    }

    /// Whether endpoints are told to record a trace that begins here. Where all requests or none have a line they are: whoever
    /// heeds it would else record nothing.
    pub(super) fn records(&self, trace_id: u128) -> bool {
        self.config.access_log.as_ref().is_none_or(|log| log.sampling().picks(trace_id))
    }

    /// Whether the thread is about to end: no connection is kept for another request.
    pub(super) fn is_draining(&self) -> bool {
        self.draining.get() != Draining::No
    }

    /// Whether another process has taken over.
    pub(super) fn is_taken_over(&self) -> bool {
        self.draining.get() == Draining::Politely
    }

    /// Serves a new connection in a task of its own, or turns it away.
    fn receive(self: &Rc<Self>, stream: B::Stream, client: std::net::SocketAddr) {
        // A connection that has no local address any more is gone already.
        let Ok(vip) = stream.local_addr() else { return };
        let arrival = Arrival { vip, client };
        let admitted = self.backplane.admit(&arrival).and_then(|pass| Ok((pass, Seat::take(self)?)));
        let (pass, seat) = match admitted {
            Ok(admitted) => admitted,
            Err(cause) => {
                self.meter.client_refused(cause);
                return stream.reset_on_close();
            }
        };
        let holds = Rc::clone(&self.holds);
        spawn_local(async move { holds.measure(client::serve(&seat, stream, arrival, pass)).await });
    }

    async fn drain(&self, deadline: Instant, how: Draining) {
        self.draining.set(how);
        let mut deadline = deadline;
        if how == Draining::Politely {
            let grace = deadline.min(clock::now() + IDLE_GRACE);
            if timeout_at(grace, self.empty()).await.is_ok() {
                return;
            }
            deadline = deadline.max(clock::now() + IDLE_END);
        }
        self.posts.borrow().give(Order::Finish);
        if timeout_at(deadline, self.empty()).await.is_ok() {
            return;
        }
        tracing::info!(thread = self.number, connections = self.posts.borrow().open(), "drain timeout: cutting off");
        self.posts.borrow().give(Order::Abort);
        if timeout(ABORT_GRACE, self.empty()).await.is_err() {
            tracing::warn!(
                thread = self.number,
                connections = self.posts.borrow().open(),
                "connections outlive their end"
            );
        }
    }

    async fn empty(&self) {
        while self.posts.borrow().open() > 0 {
            self.emptied.notified().await;
        }
    }
}

impl Posts {
    fn open(&self) -> usize {
        self.places.len() - self.free.len()
    }

    fn give(&self, order: Order) {
        for post in self.places.iter().flatten() {
            post.give(order);
        }
    }

    fn add(&mut self, post: Rc<Post>) -> usize {
        if let Some(place) = self.free.pop() {
            self.places[place] = Some(post);
            return place;
        }
        self.places.push(Some(post));
        self.places.len() - 1
    }

    fn remove(&mut self, place: usize) {
        self.places[place] = None;
        self.free.push(place);
    }
}

/// A connection's place in its thread, given up when dropped, also by a panic.
pub(super) struct Seat<B: Backend, P: Backplane> {
    pub(super) lane: Rc<Lane<B, P>>,
    pub(super) post: Rc<Post>,
    place: usize,
}

impl<B: Backend, P: Backplane> Seat<B, P> {
    fn take(lane: &Rc<Lane<B, P>>) -> Result<Self, Refused> {
        let affordable = affordable(lane.config.descriptors, lane.listening.load(Ordering::Relaxed));
        let max = lane.config.connections_max.min(affordable);
        if lane.clients.fetch_add(1, Ordering::Relaxed) >= max {
            lane.clients.fetch_sub(1, Ordering::Relaxed);
            return Err(Refused::TooMany);
        }
        let post = Rc::new(Post { order: Cell::new(Order::Go), waker: RefCell::new(None) });
        let place = lane.posts.borrow_mut().add(Rc::clone(&post));
        lane.meter.client_opened();
        Ok(Self { lane: Rc::clone(lane), post, place })
    }
}

impl<B: Backend, P: Backplane> Drop for Seat<B, P> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.lane.meter.panicked();
        }
        self.lane.posts.borrow_mut().remove(self.place);
        self.lane.clients.fetch_sub(1, Ordering::Relaxed);
        self.lane.meter.client_closed();
        self.lane.emptied.notify_one();
    }
}

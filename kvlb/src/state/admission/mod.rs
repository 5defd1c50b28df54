//! How many requests each endpoint may have at a time, and who is next.
//!
//! One [`Place`] for each endpoint address, shared by all rules that list it; one [`Line`] for each rule, first come first
//! served. A unit that becomes free is given, there and then and under one lock, to one request: that of the next rule in
//! turn whose first request can use it. It is woken with the unit in its hand, decides by all that is known at that moment,
//! and may go elsewhere; the unit goes on to the next one then. So nobody is woken in vain, nobody is passed, and no wake-up
//! is lost: a unit in the hand of somebody who has left is given back where it is dropped.
//!
//! Invariant, held by every change: no request waits for a place that it could have.
//!
//! Rules without admission never come here.

mod line;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::table::{Service, Table};
use crate::fleet::{AdmissionMode, AdmissionRule, EndpointKey, RuleId};
use crate::router::Part;

pub use line::{Line, Verdict};

/// Where an endpoint listens, whatever rules list it. An engine that goes by two names counts as two.
#[derive(Debug, Default)]
pub struct Place {
    held: AtomicU32,
}

impl Place {
    /// Requests there now, of all rules with admission. Changes under the gate's lock only.
    pub fn held(&self) -> u32 {
        self.held.load(Ordering::Relaxed)
    }
}

/// The gate of all rules.
#[derive(Debug, Default)]
pub struct Admission {
    book: Mutex<Book>,
    places: Mutex<HashMap<EndpointKey, Weak<Place>>>,
}

/// Who waits.
#[derive(Debug, Default)]
struct Book {
    /// Rules for which somebody does.
    queues: BTreeMap<RuleId, Queue>,
    /// The rule that got something last.
    last: Option<RuleId>,
    next_ticket: u64,
    /// Nobody waits any more.
    draining: bool,
}

#[derive(Debug)]
struct Queue {
    line: Arc<Line>,
    waiters: BTreeMap<u64, Waiter>,
}

#[derive(Debug)]
struct Waiter {
    service: Arc<Service>,
    /// What it waits to send.
    part: Part,
    /// Positions that it has tried.
    tried: Vec<usize>,
    /// It has a unit of its rule's bound already.
    keeps: bool,
    tell: oneshot::Sender<Turn>,
}

/// What a waiting request is woken with.
#[derive(Debug)]
pub enum Turn {
    /// A unit at a place where it may go.
    Place(Permit),
    /// Its rule is another one, or has nobody left to ask: it is to decide anew.
    Anew,
    /// kvlb ends, or its rule is gone.
    Drained,
}

/// Why a request does not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoWait {
    /// As many wait as may.
    Full,
    /// kvlb ends.
    Draining,
}

/// One unit at a place, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    admission: Arc<Admission>,
    line: Arc<Line>,
    place: Arc<Place>,
}

impl Permit {
    /// Whether it is for this place.
    pub fn is_for(&self, place: &Arc<Place>) -> bool {
        Arc::ptr_eq(&self.place, place)
    }
}

/// A unit of a rule's bound without a place: a request between its two legs is one of those that the rule has outstanding.
#[derive(Debug)]
pub struct Stay {
    admission: Arc<Admission>,
    line: Arc<Line>,
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.admission.change(|book| {
            less(&self.line.held);
            book.calls()
        });
    }
}

/// What a request waits for.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// What it waits to send.
    pub part: Part,
    /// Positions where it will not go.
    pub tried: &'a [usize],
    /// It has a unit of its rule's bound already, and waits for a place only.
    pub keeps: bool,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.change(|book| {
            less(&self.place.held);
            less(&self.line.held);
            book.calls()
        });
    }
}

/// One more, or one less, under the gate's lock.
fn more(count: &AtomicU32) {
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

fn less(count: &AtomicU32) {
    let before = count.load(Ordering::Relaxed);
    debug_assert!(before > 0, "a unit was given back twice");
    count.store(before.saturating_sub(1), Ordering::Relaxed);
}

/// A request in a line; it leaves the line where this is dropped.
#[derive(Debug)]
pub struct Waiting {
    admission: Arc<Admission>,
    rule: RuleId,
    ticket: u64,
    turn: oneshot::Receiver<Turn>,
}

impl Waiting {
    /// Its place in the order of arrival, to come back with.
    pub fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Ready when it is its turn.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Turn> {
        // Nobody drops the other end without a word; if it were so, looking anew is the answer.
        Pin::new(&mut self.turn).poll(cx).map(|turn| turn.unwrap_or(Turn::Anew))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // A unit that was given and not taken goes back with the receiver, behind this.
        self.admission.change(|book| {
            book.remove(self.rule, self.ticket);
            Vec::new()
        });
    }
}

/// Somebody to wake.
type Call = (oneshot::Sender<Turn>, Wake);

/// What with: permits are made outside the lock, since dropping one takes it.
#[derive(Debug)]
enum Wake {
    Place(Arc<Line>, Arc<Place>),
    Anew,
    Drained,
}

impl Admission {
    /// The place of an address.
    pub(super) fn place(&self, key: &EndpointKey) -> Arc<Place> {
        let mut places = self.places.lock();
        if let Some(place) = places.get(key).and_then(Weak::upgrade) {
            return place;
        }
        places.retain(|_, place| place.strong_count() > 0);
        let place = Arc::default();
        places.insert(key.clone(), Arc::downgrade(&place));
        place
    }

    /// Counts a request in without asking whether there is room: the rule only observes.
    pub fn enter(self: &Arc<Self>, service: &Service, position: usize) -> Option<Permit> {
        let (line, place) = (&service.line, &service.endpoints.get(position)?.place);
        self.change(|_book| {
            more(&place.held);
            more(&line.held);
            Vec::new()
        });
        Some(self.permit(Arc::clone(line), Arc::clone(place)))
    }

    /// Keeps a unit of its rule's bound for a request whose unit at a place is about to be given back; none where nothing is
    /// bounded.
    pub fn stay(self: &Arc<Self>, service: &Service) -> Option<Stay> {
        service.rule().admission.as_ref().filter(|rule| rule.mode == AdmissionMode::Enforce)?;
        let line = &service.line;
        self.change(|_book| {
            more(&line.held);
            Vec::new()
        });
        Some(Stay { admission: Arc::clone(self), line: Arc::clone(line) })
    }

    /// A unit at an endpoint, where there is room and nobody waits for it. `held`: the request has a unit elsewhere, which
    /// it will give back.
    pub fn take(self: &Arc<Self>, service: &Service, position: usize, held: bool) -> Option<Permit> {
        let rule = service.rule().admission.as_ref()?;
        let endpoint = service.endpoints.get(position)?;
        let (line, place) = (&service.line, &endpoint.place);
        let mut taken = false;
        self.change(|book| {
            // Of what has become free without anybody's doing, those who wait have the first choice.
            let calls = book.calls();
            let outstanding = line.held().saturating_sub(held.into());
            taken = place.held() < rule.endpoint_max(endpoint.spec.role) && outstanding < rule.outstanding_max();
            if taken {
                more(&place.held);
                more(&line.held);
            }
            calls
        });
        taken.then(|| self.permit(Arc::clone(line), Arc::clone(place)))
    }

    /// Puts a request into its rule's line: at its end, or where it stood before.
    ///
    /// # Errors
    /// Why it does not wait.
    pub fn wait(
        self: &Arc<Self>,
        service: &Arc<Service>,
        wish: Wish<'_>,
        ticket: Option<u64>,
        depth: u32,
    ) -> Result<Waiting, NoWait> {
        let (tell, turn) = oneshot::channel();
        let Wish { part, tried, keeps } = wish;
        let waiter = Waiter { service: Arc::clone(service), part, tried: tried.to_vec(), keeps, tell };
        let mut joined = Err(NoWait::Draining);
        self.change(|book| {
            joined = book.join(waiter, ticket, depth);
            book.calls()
        });
        Ok(Waiting { admission: Arc::clone(self), rule: service.rule().id, ticket: joined?, turn })
    }

    /// Conditions of endpoints changed: whoever can go on now does.
    pub(super) fn look_again(self: &Arc<Self>) {
        self.change(Book::calls);
    }

    /// The rules changed: whoever waits does so by the new ones, and those whose rule is gone no more.
    pub(super) fn follow(self: &Arc<Self>, table: &Table) {
        self.change(|book| {
            let mut calls = Vec::new();
            book.queues.retain(|rule, queue| {
                let Some(service) = table.service(*rule) else {
                    queue.line.queued.store(0, Ordering::Relaxed);
                    let waiters = std::mem::take(&mut queue.waiters);
                    calls.extend(waiters.into_values().map(|waiter| (waiter.tell, Wake::Drained)));
                    return false;
                };
                // Positions of the old rule mean nothing in the new one.
                for waiter in queue.waiters.values_mut().filter(|waiter| waiter.tried.is_empty()) {
                    waiter.service = Arc::clone(service);
                }
                true
            });
            calls.extend(book.calls());
            calls
        });
    }

    /// Ends all waiting: whoever waits gets an answer of ours, and nobody waits from now on.
    pub fn drain(self: &Arc<Self>) {
        self.change(|book| {
            book.draining = true;
            let queues = std::mem::take(&mut book.queues).into_values();
            let end = |queue: Queue| {
                queue.line.queued.store(0, Ordering::Relaxed);
                queue.waiters.into_values().map(|waiter| (waiter.tell, Wake::Drained))
            };
            queues.flat_map(end).collect()
        });
    }

    fn permit(self: &Arc<Self>, line: Arc<Line>, place: Arc<Place>) -> Permit {
        Permit { admission: Arc::clone(self), line, place }
    }

    /// Changes the book, and wakes those who are to be, once it is free again.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut Book) -> Vec<Call>) {
        let mut book = self.book.lock();
        let calls = change(&mut book);
        book.check();
        drop(book);
        for (tell, wake) in calls {
            let turn = match wake {
                Wake::Place(line, place) => Turn::Place(self.permit(line, place)),
                Wake::Anew => Turn::Anew,
                Wake::Drained => Turn::Drained,
            };
            // Who left in this moment has a unit sent back, which is dropped here and goes to the next.
            drop(tell.send(turn));
        }
    }
}

impl Book {
    fn join(&mut self, waiter: Waiter, ticket: Option<u64>, depth: u32) -> Result<u64, NoWait> {
        if self.draining {
            return Err(NoWait::Draining);
        }
        let (rule, line) = (waiter.service.rule().id, &waiter.service.line);
        // Who was woken and found nothing has its place in any case.
        if ticket.is_none() && self.queues.get(&rule).map_or(0, |queue| queue.waiters.len()) >= depth as usize {
            return Err(NoWait::Full);
        }
        let ticket = ticket.unwrap_or_else(|| {
            self.next_ticket += 1;
            self.next_ticket
        });
        let queue =
            self.queues.entry(rule).or_insert_with(|| Queue { line: Arc::clone(line), waiters: BTreeMap::new() });
        queue.waiters.insert(ticket, waiter);
        queue.count();
        Ok(ticket)
    }

    fn remove(&mut self, rule: RuleId, ticket: u64) -> Option<Waiter> {
        let queue = self.queues.get_mut(&rule)?;
        let waiter = queue.waiters.remove(&ticket);
        queue.count();
        if queue.waiters.is_empty() {
            self.queues.remove(&rule);
        }
        waiter
    }

    /// Gives what is free to those who wait for it, a rule at a time in turn, and says whom to wake.
    fn calls(&mut self) -> Vec<Call> {
        let mut calls = Vec::new();
        // Every round but the last gives something.
        while !self.queues.is_empty() {
            let after = self.last.map_or(0, |RuleId(last)| last.saturating_add(1));
            let (before, behind): (Vec<RuleId>, _) = self.queues.keys().partition(|rule| rule.0 < after);
            let found = behind.into_iter().chain(before).find_map(|rule| {
                let (ticket, wake) = self.queues.get(&rule)?.next()?;
                Some((rule, ticket, wake))
            });
            let Some((rule, ticket, wake)) = found else { break };
            if let Wake::Place(line, place) = &wake {
                more(&place.held);
                more(&line.held);
                self.last = Some(rule);
            }
            if let Some(waiter) = self.remove(rule, ticket) {
                calls.push((waiter.tell, wake));
            }
        }
        calls
    }

    fn check(&self) {
        debug_assert!(self.queues.values().all(|queue| !queue.waiters.is_empty()), "an empty line is no line");
        debug_assert!(
            self.queues.values().all(|queue| queue.waiters.len() == queue.line.queued() as usize),
            "a line's length is told wrong"
        );
    }
}

impl Queue {
    fn count(&self) {
        self.line.queued.store(u32::try_from(self.waiters.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// The first who need not wait, and what for.
    fn next(&self) -> Option<(u64, Wake)> {
        let mut stuck = Vec::new();
        for (ticket, waiter) in &self.waiters {
            if stuck.contains(&waiter.part) {
                continue;
            }
            match waiter.room(&self.line) {
                Some(wake) => return Some((*ticket, wake)),
                // Those behind it can go nowhere either, unless it is only its own tries that keep it, or they have other
                // places to go to.
                None if waiter.tried.is_empty() && !waiter.service.rule().is_split() => return None,
                None if waiter.tried.is_empty() => stuck.push(waiter.part),
                None => {}
            }
        }
        None
    }
}

impl Waiter {
    /// What it can be woken with; `None`: it has to wait.
    fn room(&self, line: &Arc<Line>) -> Option<Wake> {
        let Some(rule) = self.service.rule().admission.as_ref().filter(|rule| rule.mode == AdmissionMode::Enforce)
        else {
            return Some(Wake::Anew);
        };
        if line.held().saturating_sub(self.keeps.into()) >= rule.outstanding_max() {
            return None;
        }
        let mut nobody = true;
        let mut best: Option<(u32, &Arc<Place>)> = None;
        for position in self.service.askable(self.part, &self.tried) {
            nobody = false;
            let endpoint = &self.service.endpoints[position];
            let held = endpoint.place.held();
            if held < rule.endpoint_max(endpoint.spec.role) && best.is_none_or(|(least, _)| held < least) {
                best = Some((held, &endpoint.place));
            }
        }
        match best {
            Some((_, place)) => Some(Wake::Place(Arc::clone(line), Arc::clone(place))),
            None => nobody.then_some(Wake::Anew),
        }
    }
}

impl Service {
    /// Whether every endpoint that may be asked, but for those `tried`, is at its bound, or the rule is at its own. False
    /// where none may be asked at all.
    pub fn is_full(&self, rule: &AdmissionRule, part: Part, tried: &[usize]) -> bool {
        let mut askable = self.askable(part, tried).peekable();
        if askable.peek().is_none() {
            return false;
        }
        self.line.held() >= rule.outstanding_max() || askable.all(|position| self.endpoints[position].is_at_bound(rule))
    }
}

//! From numbered messages to an order in which to apply them: gaps, replays and engine lives, without a socket.
//!
//! A [`Stream`] is told what arrives and when, and answers with [`Action`]s. It applies each batch once and in order:
//! live batches wait while a replay that comes before them is wanted or running. Only where no replay can be had does it
//! skip a gap, and then a wide one empties the inventory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::contract::EventSeq;
use crate::inventory::{Arrival, Cursor};

/// The widest gap that keeps the inventory where nothing can be replayed. Source: the document's event window.
pub(crate) const EVENT_GAP_WINDOW: u64 = 64;
/// Replays that may follow each other at once; more come one per [`REPLAY_INTERVAL`]. A connection, a gap and a restart
/// may fall together and each is repaired at once; an engine that loses batches all the time is not asked all the time.
const REPLAYS_AT_ONCE: u32 = 3;
/// How soon another replay is allowed. An engine serves them between its steps, and each may be 10,000 batches.
const REPLAY_INTERVAL: Duration = Duration::from_secs(5);
/// How long after its first replay a silent connection is asked once more. A publisher does not say when it has noticed a
/// subscriber, and what it sends between the replay's answer and that moment is lost without a trace.
const SECOND_LOOK: Duration = Duration::from_millis(500);
/// How long a replay socket that did not answer, or not to the end, is left alone.
const UNAVAILABLE_FOR: Duration = Duration::from_secs(30);
/// How long batches wait for the engine to say when its process started, where nothing else tells its lives apart.
const IDENTITY_WAIT: Duration = Duration::from_secs(2);
/// Messages that wait for a replay. vLLM keeps 10,000 batches to replay, so waiting for more would not be repaired.
const HELD_MAX: usize = 8192;
/// Bytes of messages that wait for a replay.
const HELD_BYTES_MAX: usize = 64 << 20;

/// One message of the event stream, not yet decoded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Message {
    /// Its number.
    pub(crate) seq: EventSeq,
    /// When the engine made it, bit by bit: two lives never agree in number and time.
    pub(crate) time: u64,
    /// The batch.
    pub(crate) batch: Bytes,
}

impl Message {
    /// Whether this comes no later in one engine life than a position.
    fn is_old(&self, last: &Position) -> bool {
        self.seq <= last.seq && f64::from_bits(self.time) <= f64::from_bits(last.time)
    }
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    /// Apply a batch.
    Apply(Message),
    /// Empty the inventory.
    Clear(Why),
    /// Ask for a replay from this number on; a running one is void.
    Replay(EventSeq),
}

/// Why an inventory is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The engine began a new life.
    NewLife,
    /// So many batches were lost that blocks it no longer holds may be left.
    Gap,
    /// Its blocks get other names, for which everything is told again.
    Renamed,
}

/// What befell a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Times that numbers were missing.
    pub(crate) gaps: u64,
    /// Batches that were lost for good.
    pub(crate) missed: u64,
    /// New engine lives.
    pub(crate) restarts: u64,
    /// Replays asked for.
    pub(crate) replays: u64,
    /// Messages that were seen before.
    pub(crate) duplicates: u64,
}

/// The last batch applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    seq: EventSeq,
    time: u64,
}

/// What a stream waits for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Nothing: batches are applied as they come.
    Live,
    /// Its turn to ask for a replay.
    Queued { until: Instant },
    /// A replay. It is verified once it is known to continue the life that came before.
    Replaying { verified: bool },
    /// The engine's word on when it started.
    Identifying { until: Instant },
}

/// What became of replays so far.
#[derive(Clone, Copy, Debug, Default)]
struct Replays {
    /// Whether they are wanted, and there is a socket to ask.
    there: bool,
    /// Whether one was asked for where the socket is now.
    asked: bool,
    /// Whether one was ever had to its end.
    had: bool,
}

/// What is known of the present connection.
#[derive(Clone, Copy, Debug, Default)]
struct Connection {
    /// Whether its first replay is yet to end.
    opening: bool,
    /// Whether its first replay was empty: number 0 is still to come.
    unborn: bool,
    /// Whether the endpoint refused a connection before it: the sign of a dead engine.
    refused: bool,
    process: Process,
    second_look: SecondLook,
    /// Until when a replay that broke off is not asked for again: what is missing now counts as lost.
    broken_until: Option<Instant>,
}

/// What is known of the engine's process behind a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Process {
    /// It has not said when it started.
    #[default]
    Unsaid,
    /// It has not said so in time, and was taken for the one before.
    Assumed,
    /// It is the one before.
    Same,
    /// It is another one.
    Other,
}

/// Whether a connection's replay is to be asked for once more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SecondLook {
    /// Nothing came on the live socket so far.
    #[default]
    Undecided,
    /// Nothing has come, so then.
    At(Instant),
    /// No: something came, which shows that the publisher knows of us, or it was done.
    No,
}

/// The state of one endpoint's event stream.
#[derive(Debug)]
pub(crate) struct Stream {
    replays: Replays,
    /// Whether the engine can be asked when its process started.
    identities: bool,
    cursor: Cursor,
    last_time: u64,
    phase: Phase,
    held: VecDeque<Message>,
    held_bytes: usize,
    connection: Connection,
    allowance: Allowance,
    unavailable_until: Option<Instant>,
    /// How far it had come before the story that is being told again: what tells this life from the next until then.
    retelling: Option<Position>,
    /// The retelling broke off, and is wanted once the engine is known to be the same.
    retell: bool,
    tally: Tally,
}

impl Stream {
    /// A stream that asks for replays, or never does, of an engine that can be asked when it started, or cannot.
    pub(crate) fn new(replays: bool, identities: bool, now: Instant) -> Self {
        Self {
            replays: Replays { there: replays, ..Replays::default() },
            identities,
            cursor: Cursor::default(),
            last_time: 0,
            phase: Phase::Live,
            held: VecDeque::new(),
            held_bytes: 0,
            connection: Connection::default(),
            allowance: Allowance { left: REPLAYS_AT_ONCE, since: now },
            unavailable_until: None,
            retelling: None,
            retell: false,
            tally: Tally::default(),
        }
    }

    /// What befell it so far.
    pub(crate) const fn tally(&self) -> Tally {
        self.tally
    }

    /// Whether a replay is wanted or running.
    pub(crate) const fn is_replaying(&self) -> bool {
        matches!(self.phase, Phase::Queued { .. } | Phase::Replaying { .. })
    }

    /// Whether the replay socket did not answer when last asked, or not to the end.
    pub(crate) const fn is_unavailable(&self) -> bool {
        self.unavailable_until.is_some() || self.connection.broken_until.is_some()
    }

    /// Whether a replay was asked for where the replay socket is now.
    pub(crate) const fn has_asked(&self) -> bool {
        self.replays.asked
    }

    /// When [`Stream::tick`] is to be called.
    pub(crate) const fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Queued { until } | Phase::Identifying { until } => Some(until),
            Phase::Live => match self.connection.second_look {
                SecondLook::At(then) => Some(then),
                SecondLook::Undecided | SecondLook::No => None,
            },
            Phase::Replaying { .. } => None,
        }
    }

    /// A connection was made; `refused` says whether the endpoint refused one since the last.
    pub(crate) fn connected(&mut self, refused: bool, now: Instant, out: &mut Vec<Action>) {
        self.connection = Connection { opening: true, refused, ..Connection::default() };
        if self.can_replay(now) {
            self.queue(now, out);
        } else {
            self.without_replay(now, out);
        }
    }

    /// The connection is gone. What waited for a replay will come with the next one.
    pub(crate) fn disconnected(&mut self) {
        self.retell |= self.retelling.is_some();
        self.resume_life();
        self.held.clear();
        self.held_bytes = 0;
        self.phase = Phase::Live;
    }

    /// The engine said whether its process is another than before this connection.
    pub(crate) fn identified(&mut self, other_process: bool, now: Instant, out: &mut Vec<Action>) {
        let said = if other_process { Process::Other } else { Process::Same };
        let before = std::mem::replace(&mut self.connection.process, said);
        match self.phase {
            Phase::Identifying { .. } => self.without_replay(now, out),
            // What came since is lost with what came before: nobody knows any more which is which.
            Phase::Live if before == Process::Assumed && other_process => self.new_life(out),
            _ => {}
        }
    }

    /// The engine's whole story is wanted again, where it can be had: its blocks get other names. This is asked for at once,
    /// since it happens once in an engine's life.
    pub(crate) fn relearn(&mut self, now: Instant, out: &mut Vec<Action>) {
        if !self.can_replay(now) || matches!(self.phase, Phase::Identifying { .. }) {
            return;
        }
        self.retelling = self.retelling.or_else(|| self.position());
        self.retell = false;
        self.cursor.reset();
        out.push(Action::Clear(Why::Renamed));
        self.ask(out);
    }

    /// The replay socket was found elsewhere, or there is none. What was heard stays; where no replay was had so far, the
    /// whole story is asked for.
    pub(crate) fn replay_moved(&mut self, there_is_one: bool, now: Instant, out: &mut Vec<Action>) {
        (self.replays.there, self.replays.asked) = (there_is_one, false);
        (self.unavailable_until, self.connection.broken_until) = (None, None);
        match self.phase {
            Phase::Queued { .. } | Phase::Replaying { .. } if !there_is_one => {
                self.resume_life();
                self.without_replay(now, out);
            }
            Phase::Replaying { .. } => self.ask(out),
            Phase::Identifying { .. } if there_is_one => self.queue(now, out),
            Phase::Live if there_is_one && !self.replays.had => self.relearn(now, out),
            Phase::Live | Phase::Queued { .. } | Phase::Identifying { .. } => {}
        }
    }

    /// Where a retelling has brought nothing, the position from before it counts again.
    fn resume_life(&mut self) {
        if let (Some(before), None) = (self.retelling.take(), self.cursor.last()) {
            self.cursor.advance(before.seq);
            self.last_time = before.time;
        }
    }

    /// A message arrived on the live socket.
    pub(crate) fn live(&mut self, message: Message, now: Instant, out: &mut Vec<Action>) {
        self.connection.second_look = SecondLook::No;
        if self.phase == Phase::Live {
            self.accept(message, now, out);
        } else {
            self.hold(message);
        }
    }

    /// A message arrived on the replay socket.
    pub(crate) fn replayed(&mut self, message: Message, out: &mut Vec<Action>) {
        let Phase::Replaying { verified } = self.phase else { return };
        if !verified && !self.verify(&message, out) {
            return;
        }
        match self.cursor.peek(message.seq) {
            Arrival::First | Arrival::Next => {}
            Arrival::Duplicate | Arrival::Rewind => return,
            // The engine's buffer begins later: these are lost for good.
            Arrival::Gap { missed } => self.lose(missed, out),
        }
        self.apply(message, out);
    }

    /// Checks that a replay continues the life that came before. Says whether its message is still to be looked at.
    fn verify(&mut self, message: &Message, out: &mut Vec<Action>) -> bool {
        match self.position() {
            Some(last) if message.seq < last.seq => false,
            Some(last) if message.seq == last.seq && message.time != last.time => {
                self.replay_new_life(out);
                false
            }
            _ => {
                self.phase = Phase::Replaying { verified: true };
                true
            }
        }
    }

    /// The replay is complete.
    pub(crate) fn replay_ended(&mut self, now: Instant, out: &mut Vec<Action>) {
        let Phase::Replaying { verified } = self.phase else { return };
        self.unavailable_until = None;
        self.connection.broken_until = None;
        self.replays.had = true;
        if let Some(before) = self.retelling.take()
            && self.cursor.last().is_none_or(|last| last < before.seq)
        {
            // The engine has not come as far as it had: it is another one.
            return self.replay_new_life(out);
        }
        if !verified && self.position().is_some() {
            // The engine has not come as far as it had: it is another one.
            return self.replay_new_life(out);
        }
        if self.connection.opening {
            self.connection.unborn = self.cursor.last().is_none();
            if self.connection.second_look == SecondLook::Undecided {
                self.connection.second_look = SecondLook::At(now + SECOND_LOOK);
            }
        }
        if self.retell {
            return self.relearn(now, out);
        }
        self.go_on(now, out);
    }

    /// The replay failed; `answered` says whether anything came at all.
    pub(crate) fn replay_failed(&mut self, answered: bool, now: Instant, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Replaying { .. }) {
            return;
        }
        self.resume_life();
        if answered {
            // The same question would bring the same answer, and live batches would wait for it for ever.
            self.connection.broken_until = Some(now + UNAVAILABLE_FOR);
            return self.go_on(now, out);
        }
        self.unavailable_until = Some(now + UNAVAILABLE_FOR);
        self.without_replay(now, out);
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self, now: Instant, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Queued { until } if until <= now => self.queue(now, out),
            Phase::Identifying { until } if until <= now => {
                self.connection.process = Process::Assumed;
                self.go_on(now, out);
            }
            Phase::Live => self.look_again(now, out),
            _ => {}
        }
    }

    /// Asks once more where it is time, unless that would take the last replay allowed from a gap.
    fn look_again(&mut self, now: Instant, out: &mut Vec<Action>) {
        if !matches!(self.connection.second_look, SecondLook::At(then) if then <= now) {
            return;
        }
        if let Err(until) = self.allowance.spare(now) {
            self.connection.second_look = SecondLook::At(until);
            return;
        }
        self.connection.second_look = SecondLook::No;
        if self.can_replay(now) {
            self.queue(now, out);
        }
    }

    fn position(&self) -> Option<Position> {
        self.cursor.last().map(|seq| Position { seq, time: self.last_time })
    }

    fn can_replay(&self, now: Instant) -> bool {
        let over = |until: Option<Instant>| until.is_none_or(|until| until <= now);
        self.replays.there && over(self.unavailable_until) && over(self.connection.broken_until)
    }

    /// Asks for a replay from the last batch applied, inclusive, as soon as one is allowed.
    fn queue(&mut self, now: Instant, out: &mut Vec<Action>) {
        if let Err(until) = self.allowance.take(now) {
            self.phase = Phase::Queued { until };
            return;
        }
        self.ask(out);
    }

    fn ask(&mut self, out: &mut Vec<Action>) {
        self.tally.replays += 1;
        self.replays.asked = true;
        self.phase = Phase::Replaying { verified: false };
        out.push(Action::Replay(self.cursor.last().unwrap_or_default()));
    }

    /// The replay showed another life: its own story is wanted, from the beginning and at once.
    fn replay_new_life(&mut self, out: &mut Vec<Action>) {
        self.new_life(out);
        self.ask(out);
    }

    fn new_life(&mut self, out: &mut Vec<Action>) {
        self.tally.restarts += 1;
        (self.retelling, self.retell) = (None, false);
        self.cursor.reset();
        out.push(Action::Clear(Why::NewLife));
    }

    /// Goes on where no replay can be had: after a connection, other signs tell whether the engine is the same.
    fn without_replay(&mut self, now: Instant, out: &mut Vec<Action>) {
        if self.connection.opening && self.cursor.last().is_some() {
            match self.connection.process {
                Process::Other => self.new_life(out),
                _ if self.connection.refused => self.new_life(out),
                Process::Unsaid if self.identities => {
                    self.phase = Phase::Identifying { until: now + IDENTITY_WAIT };
                    return;
                }
                _ => {}
            }
        }
        self.go_on(now, out);
    }

    /// Goes live and takes up what waited.
    fn go_on(&mut self, now: Instant, out: &mut Vec<Action>) {
        self.phase = Phase::Live;
        self.connection.opening = false;
        while self.phase == Phase::Live
            && let Some(message) = self.held.pop_front()
        {
            self.held_bytes -= message.batch.len();
            match self.position() {
                Some(last) if message.is_old(&last) => self.tally.duplicates += 1,
                _ => self.accept(message, now, out),
            }
        }
    }

    fn accept(&mut self, message: Message, now: Instant, out: &mut Vec<Action>) {
        let unborn = std::mem::take(&mut self.connection.unborn);
        match self.cursor.peek(message.seq) {
            Arrival::First if unborn && message.seq.0 > 0 => {
                self.tally.gaps += 1;
                self.accept_after(message.seq.0, message, now, out);
            }
            Arrival::First | Arrival::Next => self.apply(message, out),
            Arrival::Duplicate if message.time == self.last_time => self.tally.duplicates += 1,
            Arrival::Duplicate | Arrival::Rewind => {
                self.new_life(out);
                self.accept_after(message.seq.0, message, now, out);
            }
            Arrival::Gap { missed } => {
                self.tally.gaps += 1;
                self.accept_after(missed, message, now, out);
            }
        }
    }

    /// Takes a message before which batches are missing: after a replay where there can be one.
    fn accept_after(&mut self, missed: u64, message: Message, now: Instant, out: &mut Vec<Action>) {
        if missed > 0 && self.can_replay(now) {
            self.held_bytes += message.batch.len();
            self.held.push_front(message);
            return self.queue(now, out);
        }
        if self.cursor.last().is_some() {
            self.lose(missed, out);
        }
        self.apply(message, out);
    }

    fn lose(&mut self, missed: u64, out: &mut Vec<Action>) {
        // Numbers come from outside: two jumps over the whole range are more than a counter holds.
        self.tally.missed = self.tally.missed.saturating_add(missed);
        if missed > EVENT_GAP_WINDOW {
            out.push(Action::Clear(Why::Gap));
        }
    }

    fn apply(&mut self, message: Message, out: &mut Vec<Action>) {
        self.cursor.advance(message.seq);
        self.last_time = message.time;
        out.push(Action::Apply(message));
    }

    fn hold(&mut self, message: Message) {
        self.held_bytes += message.batch.len();
        self.held.push_back(message);
        while self.held.len() > HELD_MAX || self.held_bytes > HELD_BYTES_MAX {
            let Some(oldest) = self.held.pop_front() else { return };
            // Its number will be missing, which is then a gap like any other.
            self.held_bytes -= oldest.batch.len();
        }
    }
}

/// Replays that are allowed now.
#[derive(Clone, Copy, Debug)]
struct Allowance {
    left: u32,
    /// Since when the next one grows.
    since: Instant,
}

impl Allowance {
    /// Takes one, or says when there will be one.
    fn take(&mut self, now: Instant) -> Result<(), Instant> {
        self.grow(now);
        if self.left == 0 {
            return Err(self.since + REPLAY_INTERVAL);
        }
        self.left -= 1;
        Ok(())
    }

    /// Whether more than one is left, else when to ask again.
    fn spare(&mut self, now: Instant) -> Result<(), Instant> {
        self.grow(now);
        if self.left > 1 { Ok(()) } else { Err(self.since + REPLAY_INTERVAL) }
    }

    fn grow(&mut self, now: Instant) {
        while self.left < REPLAYS_AT_ONCE && now >= self.since + REPLAY_INTERVAL {
            self.left += 1;
            self.since += REPLAY_INTERVAL;
        }
        if self.left == REPLAYS_AT_ONCE {
            self.since = now;
        }
    }
}

#[cfg(test)]
mod tests;

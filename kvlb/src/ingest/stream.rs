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
/// How long a replay socket that did not answer, or not to the end, is left alone.
const UNAVAILABLE_FOR: Duration = Duration::from_secs(30);
/// How long batches wait for the engine to say when its process started, where nothing else tells its lives apart.
const IDENTITY_WAIT: Duration = Duration::from_secs(2);
/// Messages that wait for a replay: as many as vLLM's replay buffer holds are no use, and half a million blocks.
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

/// What is known of the present connection.
#[derive(Clone, Copy, Debug, Default)]
struct Connection {
    /// Whether its first replay is yet to end.
    opening: bool,
    /// Whether its first replay was empty: number 0 is still to come.
    unborn: bool,
    /// Whether the endpoint refused a connection before it: the sign of a dead engine.
    refused: bool,
    /// Whether the engine's process is another than before it, once it said so.
    other_process: Option<bool>,
    /// Until when a replay that broke off is not asked for again: what is missing now counts as lost.
    broken_until: Option<Instant>,
}

/// The state of one endpoint's event stream.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Whether replays are wanted at all.
    replays: bool,
    cursor: Cursor,
    last_time: u64,
    phase: Phase,
    held: VecDeque<Message>,
    held_bytes: usize,
    connection: Connection,
    allowance: Allowance,
    unavailable_until: Option<Instant>,
    tally: Tally,
}

impl Stream {
    /// A stream that asks for replays, or never does.
    pub(crate) fn new(replays: bool, now: Instant) -> Self {
        Self {
            replays,
            cursor: Cursor::default(),
            last_time: 0,
            phase: Phase::Live,
            held: VecDeque::new(),
            held_bytes: 0,
            connection: Connection::default(),
            allowance: Allowance { left: REPLAYS_AT_ONCE, since: now },
            unavailable_until: None,
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

    /// When [`Stream::tick`] is to be called.
    pub(crate) const fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Queued { until } | Phase::Identifying { until } => Some(until),
            Phase::Live | Phase::Replaying { .. } => None,
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
        self.held.clear();
        self.held_bytes = 0;
        self.phase = Phase::Live;
    }

    /// The engine said whether its process is another than before this connection.
    pub(crate) fn identified(&mut self, other_process: bool, now: Instant, out: &mut Vec<Action>) {
        self.connection.other_process = Some(other_process);
        if matches!(self.phase, Phase::Identifying { .. }) {
            self.without_replay(now, out);
        }
    }

    /// A message arrived on the live socket.
    pub(crate) fn live(&mut self, message: Message, now: Instant, out: &mut Vec<Action>) {
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
        if !verified && self.position().is_some() {
            // The engine has not come as far as it had: it is another one.
            return self.replay_new_life(out);
        }
        self.connection.unborn = self.connection.opening && self.cursor.last().is_none();
        self.go_on(now, out);
    }

    /// The replay failed; `answered` says whether anything came at all.
    pub(crate) fn replay_failed(&mut self, answered: bool, now: Instant, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Replaying { .. }) {
            return;
        }
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
            Phase::Identifying { until } if until <= now => self.go_on(now, out),
            _ => {}
        }
    }

    fn position(&self) -> Option<Position> {
        self.cursor.last().map(|seq| Position { seq, time: self.last_time })
    }

    fn can_replay(&self, now: Instant) -> bool {
        let over = |until: Option<Instant>| until.is_none_or(|until| until <= now);
        self.replays && over(self.unavailable_until) && over(self.connection.broken_until)
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
        self.cursor.reset();
        out.push(Action::Clear(Why::NewLife));
    }

    /// Goes on where no replay can be had: after a connection, other signs tell whether the engine is the same.
    fn without_replay(&mut self, now: Instant, out: &mut Vec<Action>) {
        if self.connection.opening && self.cursor.last().is_some() {
            match self.connection.other_process {
                Some(true) => self.new_life(out),
                _ if self.connection.refused => self.new_life(out),
                Some(false) => {}
                None => {
                    self.phase = Phase::Identifying { until: now + IDENTITY_WAIT };
                    return;
                }
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
        while self.left < REPLAYS_AT_ONCE && now >= self.since + REPLAY_INTERVAL {
            self.left += 1;
            self.since += REPLAY_INTERVAL;
        }
        if self.left == REPLAYS_AT_ONCE {
            self.since = now;
        }
        if self.left == 0 {
            return Err(self.since + REPLAY_INTERVAL);
        }
        self.left -= 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock;

    /// A stream under test: what it applied since it was last emptied, and what it asked for.
    struct Run {
        stream: Stream,
        now: Instant,
        applied: Vec<(u8, u64)>,
        clears: Vec<Why>,
        asked: Vec<u64>,
    }

    fn message(life: u8, seq: u64) -> Message {
        // A later life has later times.
        let time = f64::from(life) * 1e6 + f64::from(u32::try_from(seq).unwrap());
        Message { seq: EventSeq(seq), time: time.to_bits(), batch: Bytes::from(vec![life; 10]) }
    }

    impl Run {
        fn new(replays: bool) -> Self {
            let now = clock::now();
            let stream = Stream::new(replays, now);
            Self { stream, now, applied: Vec::new(), clears: Vec::new(), asked: Vec::new() }
        }

        fn tell(&mut self, tell: impl FnOnce(&mut Stream, Instant, &mut Vec<Action>)) -> &mut Self {
            let mut actions = Vec::new();
            tell(&mut self.stream, self.now, &mut actions);
            for action in actions {
                match action {
                    Action::Apply(message) => {
                        self.applied.push((message.batch[0], message.seq.0));
                    }
                    Action::Clear(why) => {
                        self.applied.clear();
                        self.clears.push(why);
                    }
                    Action::Replay(from) => self.asked.push(from.0),
                }
            }
            self
        }

        fn connect(&mut self, refused: bool) -> &mut Self {
            self.tell(|stream, now, out| stream.connected(refused, now, out))
        }

        fn live(&mut self, life: u8, seqs: impl IntoIterator<Item = u64>) -> &mut Self {
            for seq in seqs {
                self.tell(|stream, now, out| stream.live(message(life, seq), now, out));
            }
            self
        }

        fn replay(&mut self, life: u8, seqs: impl IntoIterator<Item = u64>) -> &mut Self {
            let asked = self.asked.len();
            for seq in seqs {
                self.tell(|stream, _, out| stream.replayed(message(life, seq), out));
                if self.asked.len() > asked {
                    // Another replay is wanted, and the rest of this one is not read.
                    return self;
                }
            }
            self.tell(Stream::replay_ended)
        }

        fn fail(&mut self, answered: bool) -> &mut Self {
            self.tell(|stream, now, out| stream.replay_failed(answered, now, out))
        }

        fn later(&mut self, by: Duration) -> &mut Self {
            self.now += by;
            self.tell(Stream::tick)
        }

        fn seqs(&self) -> Vec<u64> {
            self.applied.iter().map(|&(_, seq)| seq).collect()
        }
    }

    #[test]
    fn a_replay_comes_first_and_live_batches_follow_once_each() {
        let mut run = Run::new(true);
        run.connect(false).live(0, [3, 4, 5]);
        assert_eq!((run.asked.as_slice(), run.seqs()), (&[0][..], vec![]), "held while the replay runs");
        run.replay(0, 0..=4).live(0, [6]);
        assert_eq!(run.seqs(), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(run.stream.tally(), Tally { replays: 1, duplicates: 2, ..Tally::default() });
    }

    #[test]
    fn a_warm_idle_engine_is_known_without_any_live_batch() {
        let mut run = Run::new(true);
        run.connect(false).replay(0, 500..=510);
        assert_eq!(run.seqs(), (500..=510).collect::<Vec<_>>());
        assert_eq!(run.stream.tally().missed, 0, "what came before was never promised");
    }

    #[test]
    fn a_gap_is_replayed_and_nothing_is_lost() {
        let mut run = Run::new(true);
        run.connect(false).replay(0, 0..=2).live(0, [3, 6, 7]);
        assert_eq!((run.asked.as_slice(), run.seqs().len()), (&[0, 3][..], 4));
        run.replay(0, 3..=7).live(0, [8]);
        assert_eq!(run.seqs(), (0..=8).collect::<Vec<_>>());
        assert_eq!((run.stream.tally().gaps, run.stream.tally().missed), (1, 0));
    }

    #[test]
    fn a_buffer_that_begins_later_follows_the_window() {
        for (first, cleared) in [(EVENT_GAP_WINDOW + 3, false), (EVENT_GAP_WINDOW + 4, true)] {
            let mut run = Run::new(true);
            run.connect(false).replay(0, 0..=2).live(0, [200]).replay(0, first..=200);
            assert_eq!(run.clears == [Why::Gap], cleared, "missed {}", first - 3);
            assert_eq!(run.seqs().last(), Some(&200));
            assert_eq!(run.stream.tally().missed, first - 3);
        }
    }

    #[test]
    fn without_replay_a_gap_wider_than_the_window_clears_the_inventory() {
        for (missed, cleared) in [(1, false), (EVENT_GAP_WINDOW, false), (EVENT_GAP_WINDOW + 1, true)] {
            let mut run = Run::new(false);
            run.connect(false).live(0, [10, 11, 12 + missed]);
            assert_eq!(run.clears == [Why::Gap], cleared, "{missed}");
            assert!(run.asked.is_empty());
            assert_eq!(run.stream.tally(), Tally { gaps: 1, missed, ..Tally::default() });
        }
    }

    #[test]
    fn a_lower_number_is_a_new_life_and_its_batch_counts_at_once() {
        for replays in [false, true] {
            let mut run = Run::new(replays);
            run.connect(false).replay(0, []).live(0, [0, 1, 2]).live(1, [0]);
            assert_eq!((run.clears.as_slice(), run.applied.as_slice()), (&[Why::NewLife][..], &[(1, 0)][..]));
        }
    }

    #[test]
    fn a_new_life_that_is_seen_late_is_replayed_from_its_beginning() {
        let mut run = Run::new(true);
        run.connect(false).replay(0, 0..=9).live(1, [4]);
        assert_eq!((run.clears.len(), run.asked.last()), (1, Some(&0)));
        run.replay(1, 0..=4);
        assert_eq!(run.applied, (0..=4).map(|seq| (1, seq)).collect::<Vec<_>>());
    }

    #[test]
    fn a_restart_behind_a_reconnect_is_seen_by_the_time_of_the_last_batch() {
        let mut run = Run::new(true);
        run.connect(false).replay(0, 0..=5);
        run.stream.disconnected();
        run.connect(false).live(1, [9]);
        assert_eq!(run.asked, [0, 5]);
        run.tell(|stream, _, out| stream.replayed(message(1, 5), out));
        assert_eq!((run.clears.as_slice(), run.asked.as_slice()), (&[Why::NewLife][..], &[0, 5, 0][..]));
        run.replay(1, 0..=9);
        assert_eq!(run.applied, (0..=9).map(|seq| (1, seq)).collect::<Vec<_>>());
    }

    #[test]
    fn a_restart_behind_a_reconnect_is_seen_by_its_lower_end() {
        let mut run = Run::new(true);
        run.connect(false).replay(0, 0..=5);
        run.stream.disconnected();
        run.connect(false).replay(1, []);
        assert_eq!((run.clears.as_slice(), run.asked.as_slice()), (&[Why::NewLife][..], &[0, 5, 0][..]));
        run.replay(1, 0..=1);
        assert_eq!(run.applied, [(1, 0), (1, 1)]);
    }

    #[test]
    fn the_same_life_goes_on_after_a_reconnect() {
        let mut run = Run::new(true);
        run.connect(false).replay(0, 0..=5);
        run.stream.disconnected();
        run.connect(true).live(0, [8]).replay(0, 5..=8);
        assert_eq!((run.clears.len(), run.seqs()), (0, (0..=8).collect()), "the replay knows better than a refusal");
    }

    #[test]
    fn without_an_answer_a_refused_connection_is_a_new_life() {
        let mut run = Run::new(true);
        run.connect(false).replay(0, 0..=5);
        run.stream.disconnected();
        run.connect(true).live(1, [2, 3]).fail(false);
        assert_eq!((run.clears.as_slice(), run.applied.as_slice()), (&[Why::NewLife][..], &[(1, 2), (1, 3)][..]));
        assert!(run.stream.is_unavailable());
    }

    #[test]
    fn without_replay_the_process_tells_lives_apart() {
        for (word, cleared) in [(Some(true), true), (Some(false), false), (None, false)] {
            let mut run = Run::new(false);
            run.connect(false).live(0, [0, 1]);
            run.stream.disconnected();
            run.connect(false).live(1, [2]);
            assert_eq!(run.seqs(), [0, 1], "held until the engine says who it is, or for a while");
            match word {
                Some(other) => run.tell(|stream, now, out| stream.identified(other, now, out)),
                None => run.later(IDENTITY_WAIT),
            };
            assert_eq!(run.clears == [Why::NewLife], cleared, "{word:?}");
            assert_eq!(run.seqs().last(), Some(&2));
        }
    }

    #[test]
    fn replays_are_rationed_and_a_needed_one_is_delayed_not_lost() {
        let mut run = Run::new(true);
        run.connect(false).replay(0, [0]);
        let mut next = 1;
        for _ in 1..REPLAYS_AT_ONCE {
            run.live(0, [next + 1]).replay(0, next - 1..=next + 1);
            next += 2;
        }
        run.live(0, [next + 1, next + 2]);
        assert_eq!(run.asked.len(), REPLAYS_AT_ONCE as usize, "the next has to wait");
        run.later(REPLAY_INTERVAL / 2);
        assert_eq!(run.asked.len(), REPLAYS_AT_ONCE as usize);
        let deadline = run.stream.deadline().unwrap();
        run.later(deadline - run.now);
        assert_eq!(run.asked.len(), REPLAYS_AT_ONCE as usize + 1);
        run.replay(0, next - 1..=next + 2);
        assert_eq!(run.seqs(), (0..=next + 2).collect::<Vec<_>>());
    }

    #[test]
    fn a_replay_socket_that_does_not_answer_is_left_alone_for_a_while() {
        let mut run = Run::new(true);
        run.connect(false).fail(false).live(0, [0, 2, 4]);
        assert_eq!((run.asked.len(), run.seqs()), (1, vec![0, 2, 4]));
        run.later(UNAVAILABLE_FOR).live(0, [6]);
        assert_eq!(run.asked.last(), Some(&4), "asked again");
        run.replay(0, [4, 5, 6]);
        assert!(!run.stream.is_unavailable());
        assert_eq!(run.seqs(), [0, 2, 4, 5, 6]);
    }

    #[test]
    fn a_replay_that_breaks_off_is_not_waited_for_twice() {
        let mut run = Run::new(true);
        run.connect(false).replay(0, 0..=2).live(0, [6, 7]);
        run.tell(|stream, _, out| stream.replayed(message(0, 2), out)).fail(true);
        assert_eq!((run.asked.as_slice(), run.seqs()), (&[0, 2][..], vec![0, 1, 2, 6, 7]));
        assert!(run.stream.is_unavailable());
        assert_eq!(run.stream.tally().missed, 3);
        // The next connection is another chance, and so is the time.
        run.later(UNAVAILABLE_FOR).live(0, [9]);
        assert_eq!(run.asked.last(), Some(&7));
        run.replay(0, 7..=9);
        assert!(!run.stream.is_unavailable());
        run.tell(|stream, now, out| stream.live(message(0, 12), now, out)).fail(true);
        run.stream.disconnected();
        run.connect(false);
        assert!(run.stream.is_replaying());
    }

    #[test]
    fn numbers_over_their_whole_range_overflow_nothing() {
        for replays in [false, true] {
            let mut run = Run::new(replays);
            run.connect(false).fail(false);
            for _ in 0..3 {
                for seq in [0, u64::MAX, u64::MAX - 1, 1 << 63, u64::MAX] {
                    let message = Message { seq: EventSeq(seq), time: 0, batch: Bytes::from_static(b"x") };
                    run.tell(|stream, now, out| stream.live(message, now, out));
                }
            }
            assert_eq!(run.stream.tally().missed, u64::MAX);
        }
    }

    #[test]
    fn what_waits_is_bounded_and_its_loss_is_a_gap() {
        let mut run = Run::new(true);
        run.connect(false).live(0, 0..HELD_MAX as u64 + 10);
        assert_eq!(run.stream.held.len(), HELD_MAX);
        run.replay(0, []);
        assert_eq!((run.asked.len(), run.seqs().len()), (2, 0), "number 0 is missing");
        run.replay(0, []);
        assert_eq!(run.seqs()[0], 10, "and is not waited for twice");
        let mut run = Run::new(true);
        run.connect(false);
        let large = |seq| Message { batch: Bytes::from(vec![0; HELD_BYTES_MAX / 4]), ..message(0, seq) };
        for seq in 0..10 {
            run.tell(|stream, now, out| stream.live(large(seq), now, out));
        }
        assert_eq!(run.stream.held.len(), 4);
    }

    #[derive(Clone, Debug)]
    enum Happening {
        Publish { lost: bool },
        Restart { reconnect: bool },
        Reconnect,
        Serve,
        Wait,
    }

    proptest! {
        /// An engine that keeps all batches: once all is quiet, exactly its present life is applied, in order.
        #[test]
        fn with_replay_every_batch_of_the_present_life_is_applied_once_and_in_order(
            happenings in prop::collection::vec(prop_oneof![
                10 => any::<bool>().prop_map(|lost| Happening::Publish { lost }),
                1 => any::<bool>().prop_map(|reconnect| Happening::Restart { reconnect }),
                1 => Just(Happening::Reconnect),
                6 => Just(Happening::Serve),
                2 => Just(Happening::Wait),
            ], 0..120)
        ) {
            let mut run = Run::new(true);
            let (mut life, mut next, mut served) = (0, 0, 0);
            run.connect(false);
            let serve = |run: &mut Run, life, next, served: &mut usize| {
                if *served < run.asked.len() {
                    let from = run.asked[run.asked.len() - 1];
                    *served = run.asked.len();
                    run.replay(life, from..next);
                }
            };
            for happening in happenings {
                match happening {
                    Happening::Publish { lost } => {
                        if !lost {
                            run.live(life, [next]);
                        }
                        next += 1;
                    }
                    Happening::Restart { reconnect } => {
                        (life, next) = (life + 1, 0);
                        if reconnect {
                            run.stream.disconnected();
                            served = run.asked.len();
                            run.connect(true);
                        } else {
                            // Numbers on one connection tell lives apart only when they go down.
                            run.live(life, [0]);
                            next = 1;
                        }
                    }
                    Happening::Reconnect => {
                        run.stream.disconnected();
                        served = run.asked.len();
                        run.connect(false);
                    }
                    Happening::Serve => serve(&mut run, life, next, &mut served),
                    Happening::Wait => {
                        run.later(REPLAY_INTERVAL);
                    }
                }
            }
            // Two more batches, so that every loss shows, and all replays that follow.
            run.live(life, [next, next + 1]);
            next += 2;
            for _ in 0..6 {
                run.later(REPLAY_INTERVAL);
                serve(&mut run, life, next, &mut served);
            }
            prop_assert_eq!(run.applied, (0..next).map(|seq| (life, seq)).collect::<Vec<_>>());
        }
    }
}

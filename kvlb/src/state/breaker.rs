//! The circuit breaker of one endpoint: after failures in a row it gets no traffic for a while, then a few trials.
//!
//! What it counts is what the proxy sees: connects that fail, answers that say that the server failed, and answers that break
//! off midway. A sound answer's head forgets the first two, and only its end the last, which begin soundly too. It is read for
//! every choice and written for every answer, so a breaker that is closed and has nothing to forget costs three loads.
//!
//! Source of the defaults: LoxiLB (five connects in a row, or three answers, open it for 30 s; two of three trials close
//! it).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::fleet::{self, BreakerRule};

/// Requests that an endpoint gets at a time once its breaker has been open for long enough.
const TRIALS: u32 = 3;
/// Sound answers that close it.
const SUCCESSES: u32 = 2;

/// Why a breaker opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Connects failed.
    Connect,
    /// Answers said that the server failed, or there was none.
    Answer,
    /// Answers broke off midway.
    BrokeOff,
}

impl Cause {
    /// The word in `kvlb_breaker_opened_total`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Answer => "answer",
            Self::BrokeOff => "broken_off",
        }
    }
}

/// What an outcome did to a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It opened, for the first time or after a trial.
    Opened(Cause),
    /// It closed.
    Closed,
}

/// The breaker of one endpoint.
#[derive(Debug)]
pub struct Breaker {
    start: Instant,
    /// Failures in a row.
    connects: AtomicU32,
    answers: AtomicU32,
    broken_off: AtomicU32,
    /// When an answer broke off that counted last, in milliseconds from `start`; 0: none did.
    broke_off_at: AtomicU64,
    /// Until when it is open, in milliseconds from `start`; 0: it is closed.
    until: AtomicU64,
    by_connects: AtomicBool,
    trials: AtomicU32,
    successes: AtomicU32,
}

impl Breaker {
    /// One that is closed.
    pub fn new(now: Instant) -> Self {
        Self {
            start: now,
            connects: AtomicU32::new(0),
            answers: AtomicU32::new(0),
            broken_off: AtomicU32::new(0),
            broke_off_at: AtomicU64::new(0),
            until: AtomicU64::new(0),
            by_connects: AtomicBool::new(false),
            trials: AtomicU32::new(0),
            successes: AtomicU32::new(0),
        }
    }

    /// Whether traffic flows. `now` is asked for only where that depends on it.
    pub fn word(&self, now: impl FnOnce() -> Instant) -> fleet::Breaker {
        match self.until.load(Ordering::Acquire) {
            0 => fleet::Breaker::Closed,
            until if self.millis(now()) < until => fleet::Breaker::Open,
            _ if self.trials.load(Ordering::Relaxed) < TRIALS => fleet::Breaker::HalfOpen,
            _ => fleet::Breaker::Open,
        }
    }

    /// When trials begin; `None` where they have, or there are none to begin.
    pub fn trials_at(&self, now: Instant) -> Option<Instant> {
        let until = self.until.load(Ordering::Acquire);
        (self.millis(now) < until).then(|| self.start + Duration::from_millis(until))
    }

    /// Takes one of the places for trials: `None` where all are taken, `Some(false)` where this is not the time for any.
    pub fn admit(&self, now: impl FnOnce() -> Instant) -> Option<bool> {
        let until = self.until.load(Ordering::Acquire);
        if until == 0 || self.millis(now()) < until {
            return Some(false);
        }
        let more = |trials| (trials < TRIALS).then_some(trials + 1);
        self.trials.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_before| true)
    }

    /// Gives a trial's place back.
    pub fn dismiss(&self) {
        self.trials.fetch_sub(1, Ordering::Relaxed);
    }

    /// A connect failed, or an answer did.
    pub fn failed(&self, cause: Cause, rule: &BreakerRule, now: Instant) -> Option<Change> {
        let (count, most) = match cause {
            Cause::Connect => (&self.connects, rule.connects),
            Cause::Answer => (&self.answers, rule.answers),
            Cause::BrokeOff => (&self.broken_off, rule.answers),
        };
        let until = self.until.load(Ordering::Acquire);
        let tried = until != 0 && self.millis(now) >= until;
        let in_a_row = count.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let enough = most > 0 && (tried || (until == 0 && in_a_row >= most));
        // Of those who see it at once, one opens it.
        let opens = enough
            && self
                .until
                .compare_exchange(until, self.millis(now + rule.open).max(1), Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        if !opens {
            return None;
        }
        self.by_connects.store(cause == Cause::Connect, Ordering::Relaxed);
        self.successes.store(0, Ordering::Relaxed);
        Some(Change::Opened(cause))
    }

    /// An answer to a request of `asked` broke off midway. Those that were under way when another one did count with it: an
    /// engine that is killed in full flight has failed once, one that dies under each answer again and again.
    pub fn broke_off(&self, asked: Instant, rule: &BreakerRule, now: Instant) -> Option<Change> {
        let last = self.broke_off_at.load(Ordering::Relaxed);
        if self.millis(asked) < last {
            return None;
        }
        let at = self.millis(now).max(1);
        // Of those who see it at once, one counts.
        self.broke_off_at.compare_exchange(last, at, Ordering::Relaxed, Ordering::Relaxed).ok()?;
        self.failed(Cause::BrokeOff, rule, now)
    }

    /// An answer came to its end.
    pub fn completed(&self) {
        if self.broken_off.load(Ordering::Relaxed) != 0 {
            self.broken_off.store(0, Ordering::Relaxed);
        }
    }

    /// The head of an answer was sound.
    pub fn succeeded(&self, now: impl FnOnce() -> Instant) -> Option<Change> {
        for count in [&self.connects, &self.answers] {
            if count.load(Ordering::Relaxed) != 0 {
                count.store(0, Ordering::Relaxed);
            }
        }
        let until = self.until.load(Ordering::Acquire);
        if until == 0 || self.millis(now()) < until {
            // Of a request that was sent before it opened.
            return None;
        }
        let closes = self.successes.fetch_add(1, Ordering::Relaxed) + 1 >= SUCCESSES;
        (closes && self.until.compare_exchange(until, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok())
            .then_some(Change::Closed)
    }

    /// The probe found the endpoint well: connects that failed need no longer be waited out, trials may begin. True where
    /// they begin by this.
    pub fn reached(&self, now: Instant) -> bool {
        let until = self.until.load(Ordering::Acquire);
        let waits = until != 0 && self.by_connects.load(Ordering::Relaxed) && self.millis(now) < until;
        let now = self.millis(now).max(1);
        // Where another opening comes in between, that one counts.
        waits && self.until.compare_exchange(until, now, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn millis(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.start).as_millis()).unwrap_or(u64::MAX)
    }
}

/// Requests that failed of late: one that fails at several endpoints in the same way says nothing against them.
#[derive(Debug, Default)]
pub struct Failures(parking_lot::Mutex<Vec<Failure>>);

#[derive(Clone, Copy, Debug)]
struct Failure {
    request: u64,
    status: u16,
    endpoint: usize,
    at: Instant,
}

/// Failures that are remembered, and for how long.
const FAILURES_MAX: usize = 64;
const FAILURE_AGE: Duration = Duration::from_mins(5);

impl Failures {
    /// Notes that a request, known by a number made of its prompts, failed; false where it has failed elsewhere alike.
    pub fn is_the_endpoint_s(&self, request: u64, status: u16, endpoint: usize, now: Instant) -> bool {
        let mut failures = self.0.lock();
        failures.retain(|failure| now.saturating_duration_since(failure.at) < FAILURE_AGE);
        let alike = |failure: &Failure| failure.request == request && failure.status == status;
        let elsewhere = failures.iter().any(|failure| alike(failure) && failure.endpoint != endpoint);
        if !failures.iter().any(|failure| alike(failure) && failure.endpoint == endpoint) {
            if failures.len() == FAILURES_MAX {
                failures.remove(0);
            }
            failures.push(Failure { request, status, endpoint, at: now });
        }
        !elsewhere
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::fleet::Breaker as Word;

    const RULE: BreakerRule = BreakerRule { connects: 5, answers: 3, open: Duration::from_secs(30) };

    fn opened(cause: Cause) -> (Breaker, Instant) {
        let now = clock::now();
        let breaker = Breaker::new(now);
        let most = if cause == Cause::Connect { RULE.connects } else { RULE.answers };
        for _ in 1..most {
            assert_eq!(breaker.failed(cause, &RULE, now), None);
        }
        assert_eq!(breaker.word(|| now), Word::Closed);
        assert_eq!(breaker.failed(cause, &RULE, now), Some(Change::Opened(cause)));
        (breaker, now)
    }

    #[test]
    fn it_opens_after_failures_in_a_row_and_a_sound_answer_forgets_them() {
        for cause in [Cause::Connect, Cause::Answer] {
            let (breaker, now) = opened(cause);
            assert_eq!(breaker.word(|| now), Word::Open);
            assert_eq!(breaker.word(|| now + Duration::from_millis(29_900)), Word::Open);
            assert_eq!(breaker.failed(cause, &RULE, now), None, "it is open already");
        }
        let now = clock::now();
        let breaker = Breaker::new(now);
        for _ in 0..20 {
            assert_eq!(breaker.failed(Cause::Answer, &RULE, now), None);
            assert_eq!(breaker.failed(Cause::Answer, &RULE, now), None);
            assert_eq!(breaker.succeeded(|| now), None);
        }
        assert_eq!(breaker.word(|| now), Word::Closed);
        let off = BreakerRule { answers: 0, ..RULE };
        assert!((0..20).all(|_| breaker.failed(Cause::Answer, &off, now).is_none()));
    }

    #[test]
    fn answers_that_break_off_one_after_the_other_open_it_and_those_that_do_together_count_once() {
        let start = clock::now();
        let at = |millis| start + Duration::from_millis(millis);
        let breaker = Breaker::new(start);
        // Killed in full flight, twice.
        for life in [1000, 2000] {
            for stream in 0..50 {
                assert_eq!(breaker.broke_off(at(life - 900 + stream), &RULE, at(life + stream % 7)), None);
            }
        }
        assert_eq!(breaker.succeeded(|| at(2500)), None, "a sound head says nothing of the end");
        assert_eq!(breaker.broke_off(at(2500), &RULE, at(3000)), Some(Change::Opened(Cause::BrokeOff)));
        assert_eq!(breaker.word(|| at(3000)), Word::Open);
        // Sound heads close it, and the next answer that breaks off opens it again, until one is whole.
        let tried = 3000 + 30_000;
        assert_eq!(breaker.succeeded(|| at(tried)), None);
        assert_eq!(breaker.succeeded(|| at(tried)), Some(Change::Closed));
        assert_eq!(breaker.broke_off(at(tried), &RULE, at(tried + 5)), Some(Change::Opened(Cause::BrokeOff)));
        breaker.completed();
        let tried = tried + 5 + 30_000;
        assert!(breaker.succeeded(|| at(tried)).is_none() && breaker.succeeded(|| at(tried)).is_some());
        for number in [1, 2] {
            assert_eq!(breaker.broke_off(at(tried + 10 * number), &RULE, at(tried + 10 * number + 5)), None);
            breaker.completed();
        }
        let off = BreakerRule { answers: 0, ..RULE };
        assert!((100..200).all(|n| breaker.broke_off(at(tried + 10 * n), &off, at(tried + 10 * n + 5)).is_none()));
    }

    #[test]
    fn some_trials_at_a_time_close_it_or_open_it_again() {
        let (breaker, now) = opened(Cause::Answer);
        assert_eq!(breaker.admit(|| now), Some(false), "nothing is tried while it is open");
        let later = breaker.trials_at(now).unwrap();
        // Milliseconds are what it counts in.
        assert!(later + Duration::from_millis(2) > now + RULE.open && later <= now + RULE.open);
        assert_eq!((breaker.trials_at(later), Breaker::new(now).trials_at(now)), (None, None));
        assert_eq!(breaker.word(|| later), Word::HalfOpen);
        assert!((0..3).all(|_| breaker.admit(|| later) == Some(true)));
        assert_eq!((breaker.admit(|| later), breaker.word(|| later)), (None, Word::Open));
        breaker.dismiss();
        assert_eq!(breaker.admit(|| later), Some(true));
        assert_eq!(breaker.failed(Cause::Answer, &RULE, later), Some(Change::Opened(Cause::Answer)));
        assert_eq!(breaker.succeeded(|| later), None, "an answer to an earlier trial");
        let later = later + RULE.open;
        assert_eq!(breaker.succeeded(|| later), None);
        assert_eq!(breaker.succeeded(|| later), Some(Change::Closed));
        assert_eq!(breaker.word(|| later), Word::Closed);
    }

    #[test]
    fn a_good_probe_ends_the_wait_for_connects_but_not_for_answers() {
        let (breaker, now) = opened(Cause::Connect);
        let soon = now + Duration::from_secs(1);
        assert!(breaker.reached(soon) && !breaker.reached(soon));
        assert_eq!(breaker.word(|| soon), Word::HalfOpen);
        let (breaker, now) = opened(Cause::Answer);
        assert!(!breaker.reached(now + Duration::from_secs(1)));
        assert_eq!(breaker.word(|| now + Duration::from_secs(1)), Word::Open);
    }

    #[test]
    fn a_request_that_fails_everywhere_says_nothing_against_an_endpoint() {
        let (failures, now) = (Failures::default(), clock::now());
        assert!(failures.is_the_endpoint_s(1, 500, 0, now) && failures.is_the_endpoint_s(1, 500, 0, now));
        assert!(!failures.is_the_endpoint_s(1, 500, 1, now));
        assert!(failures.is_the_endpoint_s(1, 502, 1, now) && failures.is_the_endpoint_s(2, 500, 1, now));
        assert!(failures.is_the_endpoint_s(1, 500, 1, now + FAILURE_AGE), "long ago");
        for request in 0..500 {
            failures.is_the_endpoint_s(request, 500, 0, now);
        }
        assert_eq!(failures.0.lock().len(), FAILURES_MAX);
    }
}

//! How long a thread that has nothing to do waits for more than one event.
//!
//! With hundreds of streams whose events come one by one, most of a proxy's work is falling asleep and waking up. A wait for
//! several events at once spares it, and delays them. So there is only one where it gathers several events, and never by more than a small part of the time that one connection lets pass
//! between two of its events: a client that asks again as soon as it has its answer is not slowed down.

use std::time::{Duration, Instant};

use crate::clock;

/// How long events are counted before they are judged.
const WINDOW: Duration = Duration::from_millis(10);
/// The longest wait.
const LONGEST: Duration = Duration::from_micros(200);
/// A wait is at most this part of the mean time between two events of one connection.
const PART: u32 = 16;
/// Fewer events than this are not worth waiting for.
const WORTH: f64 = 4.0;
/// Events that end a wait early.
const ENOUGH: usize = 64;

/// How long to wait for how many events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Length {
    pub(super) events: usize,
    pub(super) time: Duration,
}

/// The events of a thread.
#[derive(Debug)]
pub(super) struct Batch {
    since: Instant,
    window: u32,
    events: usize,
    sources: usize,
    length: Option<Length>,
}

impl Batch {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, window: 1, events: 0, sources: 0, length: None }
    }

    /// The number of the window under way.
    pub(super) fn window(&self) -> u32 {
        self.window
    }

    /// How long to wait now.
    pub(super) fn length(&self) -> Option<Length> {
        self.length
    }

    /// So many events came, of them some from connections that had none in this window before.
    pub(super) fn heard(&mut self, events: usize, sources: usize) {
        self.events += events;
        self.sources += sources;
        self.close(clock::now());
    }

    /// Ends the window if it has lasted long enough.
    fn close(&mut self, now: Instant) {
        let lasted = now.saturating_duration_since(self.since);
        if lasted < WINDOW {
            return;
        }
        self.length = judge(lasted, self.events, self.sources);
        self.window = self.window.wrapping_add(1);
        (self.since, self.events, self.sources) = (now, 0, 0);
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of some milliseconds")]
fn judge(lasted: Duration, events: usize, sources: usize) -> Option<Length> {
    let (events, sources) = (events as f64, sources as f64);
    if events < 1.0 {
        return None;
    }
    let between = lasted.mul_f64((sources / events).min(1.0));
    let wait = (between / PART).min(LONGEST);
    let gathered = events * wait.as_secs_f64() / lasted.as_secs_f64();
    (gathered >= WORTH).then_some(Length { events: ENOUGH, time: wait })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: Duration = Duration::from_millis(10);

    #[test]
    fn many_streams_are_gathered_and_few_are_not() {
        // 500 streams of 50 events a second, each heard and sent: 50 events of 25,000 a second in each millisecond.
        assert_eq!(judge(TEN, 500, 500), Some(Length { events: ENOUGH, time: LONGEST }));
        assert_eq!(judge(TEN, 20, 20), None, "a wait would gather none");
        assert_eq!(judge(TEN, 0, 0), None);
    }

    #[test]
    fn whoever_asks_again_at_once_is_not_slowed_down() {
        assert_eq!(judge(TEN, 450, 2), None, "one client");
        assert_eq!(judge(TEN, 1200, 32), None, "sixteen");
        // 1000 clients at 40,000 events a second have 25 ms between two of theirs, of which the window sees its own length.
        assert_eq!(judge(TEN, 400, 400), Some(Length { events: ENOUGH, time: LONGEST }));
        // Eighty that are answered every two milliseconds: 125 us, within which 5 events come.
        let some = judge(TEN, 400, 80).unwrap();
        assert!(some.time <= Duration::from_micros(125) && some.time >= Duration::from_micros(120), "{some:?}");
    }

    #[test]
    fn the_wait_follows_the_traffic() {
        let start = clock::now();
        let mut batch = Batch::new(start);
        (batch.events, batch.sources) = (2000, 2000);
        batch.close(start + TEN / 2);
        assert_eq!((batch.length(), batch.window()), (None, 1), "too early to tell");
        batch.close(start + TEN);
        assert!(batch.length().is_some());
        assert_eq!(batch.window(), 2);
        batch.heard(1, 1);
        batch.close(start + TEN * 3);
        assert_eq!(batch.length(), None);
    }
}

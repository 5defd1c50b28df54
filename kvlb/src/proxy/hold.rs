//! How long single tasks hold a data thread.
//!
//! A thread serves its connections in turns: what one of them takes for its turn, all others wait. So the clock is read at
//! both ends of every turn, which costs some 50 ns and nothing at all while the thread sleeps. A timer would see the same
//! only by chance, and not below the millisecond that timers are rounded to. What this does not see is the kernel's work
//! between the turns (with `io_uring`, the sending itself): of that, [`Pulse::late`](super::Pulse::late) tells.
//!
//! It is the time that passed, so a thread that another process kept from its core has held its connections up as well.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::time::Duration;

use crate::clock;
use crate::courtesy::Place;

/// The longest turn since it was last asked for.
#[derive(Debug, Default)]
pub(super) struct Holds {
    longest: Cell<Option<Duration>>,
    place: Option<Place>,
}

impl Holds {
    /// Those of a thread that stays on the core of `place`, if it does, where others give way to its turns.
    pub(super) fn on(place: Option<Place>) -> Self {
        Self { longest: Cell::default(), place }
    }

    /// Runs `task`, and measures each of its turns.
    pub(super) async fn measure<F: Future>(&self, task: F) -> F::Output {
        let mut task = pin!(task);
        poll_fn(|cx| {
            let start = clock::now();
            let turn = self.place.as_ref().map(Place::turn);
            let ready = task.as_mut().poll(cx);
            drop(turn);
            self.note(clock::now().saturating_duration_since(start));
            ready
        })
        .await
    }

    /// A turn took so long.
    pub(super) fn note(&self, held: Duration) {
        self.longest.set(self.longest.get().max(Some(held)));
    }

    /// The longest turn since the last call; `None` where there was none.
    pub(super) fn take(&self) -> Option<Duration> {
        self.longest.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_is_turns_that_count_and_not_what_lies_between() {
        let holds = Holds::default();
        assert_eq!(holds.take(), None);
        holds
            .measure(async {
                std::thread::sleep(Duration::from_millis(20));
                tokio::time::sleep(Duration::from_millis(200)).await;
                std::thread::sleep(Duration::from_millis(10));
            })
            .await;
        let longest = holds.take();
        assert!(
            longest >= Some(Duration::from_millis(20)) && longest < Some(Duration::from_millis(200)),
            "{longest:?}"
        );
        assert_eq!(holds.take(), None);
    }
}

//! How long single tasks hold a data thread.
//!
//! A thread serves its connections in turns: what one of them takes for its turn, all others wait. So the clock is read at
//! both ends of every turn, which costs some 50 ns and nothing at all while the thread sleeps. A timer would see the same
//! only by chance, and not below the millisecond that timers are rounded to. What this does not see is the kernel's work
//! between the turns (with `io_uring`, the sending itself): of that, [`Pulse::late`](super::Pulse::late) tells.
//!
//! It is the time that passed, so a thread that another process kept from its core has held its connections up as well.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use pin_project_lite::pin_project;

use crate::clock;
use crate::courtesy::Place;

/// The longest turn since it was last asked for.
#[derive(Debug, Default)]
pub(super) struct Holds {
    longest: Cell<Option<Duration>>,
    turn: Cell<Option<Instant>>,
    place: Option<Place>,
}

impl Holds {
    /// Those of a thread that stays on the core of `place`, if it does, where others give way to its turns.
    pub(super) fn on(place: Option<Place>) -> Self {
        Self { longest: Cell::default(), turn: Cell::default(), place }
    }

    /// Runs `task`, and measures each of its turns.
    pub(super) fn measure<F: Future>(&self, task: F) -> Measured<'_, F> {
        Measured { holds: self, task }
    }

    /// When the turn under way began, which is now for all that need not tell microseconds apart, and spares a reading of
    /// the clock.
    pub(super) fn now(&self) -> Instant {
        self.turn.get().unwrap_or_else(clock::now)
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

pin_project! {
    /// A task whose turns are measured. A function with the task in it would hold it twice, before and after its first turn,
    /// which is half of what an idle connection needs.
    pub(super) struct Measured<'h, F> {
        holds: &'h Holds,
        #[pin]
        task: F,
    }
}

impl<F: Future> Future for Measured<'_, F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let start = clock::now();
        this.holds.turn.set(Some(start));
        let turn = this.holds.place.as_ref().map(Place::turn);
        let ready = this.task.poll(cx);
        drop(turn);
        this.holds.note(clock::now().saturating_duration_since(start));
        ready
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

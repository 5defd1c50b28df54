//! One deadline of one connection, cheap to move.
//!
//! A connection's deadline moves with every piece of every answer. The timer behind it is left alone while it would fire
//! too early: when it does, it is set anew. Most connections never arm it twice in a minute.

use std::cell::{Cell, RefCell};
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::timer::{Sleep, sleep_until};

/// Which limit a deadline stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// For the next request of a connection.
    Idle,
    /// For the rest of a head.
    Head,
    /// For the next piece of a body.
    Body,
    /// For a place at an endpoint.
    Queue,
    /// For an answer's first byte.
    FirstByte,
    /// For the answer of a prefill leg.
    Prefill,
    /// For the first byte of a decode leg's answer.
    Decode,
    /// From a prefill leg's answer until its decode leg is under way.
    Handoff,
    /// Between two pieces of an answer.
    Pause,
    /// For the whole request.
    Total,
    /// For an answer of ours to be taken.
    Reply,
}

impl Limit {
    /// Whether it was the endpoint that did not keep it.
    pub(super) fn is_for_endpoint(self) -> bool {
        matches!(self, Self::FirstByte | Self::Prefill | Self::Decode | Self::Pause | Self::Total)
    }
}

/// A deadline.
#[derive(Debug)]
pub(super) struct Alarm {
    due: Cell<Option<(Instant, Limit)>>,
    timer: RefCell<Option<Sleep>>,
}

impl Alarm {
    pub(super) fn new() -> Self {
        Self { due: Cell::new(None), timer: RefCell::new(None) }
    }

    /// Moves the deadline; `None` takes it away.
    pub(super) fn set(&self, due: Option<(Instant, Limit)>) {
        self.due.set(due);
    }

    /// Ready when the deadline has come.
    pub(super) fn poll(&self, cx: &mut Context<'_>) -> Poll<Limit> {
        loop {
            let Some((due, limit)) = self.due.get() else { return Poll::Pending };
            let mut timer = self.timer.borrow_mut();
            let timer = timer.get_or_insert_with(|| sleep_until(due));
            if timer.deadline() > due {
                timer.reset(due);
            }
            ready!(Pin::new(&mut *timer).poll(cx));
            if timer.deadline() >= due {
                return Poll::Ready(limit);
            }
            timer.reset(due);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;
    use crate::clock;

    fn in_time(millis: u64) -> (Instant, Limit) {
        (clock::now() + Duration::from_millis(millis), Limit::Head)
    }

    async fn waited(alarm: &Alarm) -> Duration {
        let start = clock::now();
        poll_fn(|cx| alarm.poll(cx)).await;
        start.elapsed()
    }

    #[tokio::test]
    async fn a_deadline_can_be_moved_both_ways_and_taken_away() {
        let alarm = Alarm::new();
        alarm.set(Some(in_time(10)));
        poll_fn(|cx| {
            assert!(alarm.poll(cx).is_pending());
            Poll::Ready(())
        })
        .await;
        alarm.set(Some(in_time(60)));
        assert!(waited(&alarm).await >= Duration::from_millis(59));
        alarm.set(Some(in_time(60_000)));
        poll_fn(|cx| {
            assert!(alarm.poll(cx).is_pending());
            Poll::Ready(())
        })
        .await;
        alarm.set(Some(in_time(5)));
        assert!(waited(&alarm).await < Duration::from_secs(5));
        alarm.set(None);
        let nothing = tokio::time::timeout(Duration::from_millis(20), waited(&alarm)).await;
        assert!(nothing.is_err());
    }
}

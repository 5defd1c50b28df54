//! Time limits on a data thread.
//!
//! The `io_uring` back end waits in the ring, where no runtime of tokio's is: its threads keep their deadlines themselves,
//! in order, and the wait lasts until the first ([`Timers`]). On every other thread tokio's own timers serve. Either way a
//! deadline that is moved or dropped costs no system call.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pin_project_lite::pin_project;

use crate::clock;

thread_local! {
    static OWN: RefCell<Option<Rc<Timers>>> = const { RefCell::new(None) };
}

/// The deadlines of one thread.
#[derive(Debug, Default)]
pub(super) struct Timers {
    /// In the order of their times; the number tells those of the same time apart.
    waiting: RefCell<BTreeMap<(Instant, u64), Rc<Entry>>>,
    numbers: Cell<u64>,
}

/// One that is waited for.
#[derive(Debug)]
struct Entry {
    waker: RefCell<Waker>,
    fired: Cell<bool>,
}

/// While it lives, the deadlines of its thread are kept in its [`Timers`].
#[derive(Debug)]
pub(super) struct Kept(Rc<Timers>);

impl Timers {
    /// Keeps the calling thread's deadlines.
    pub(super) fn keep() -> Kept {
        let timers = Rc::<Self>::default();
        OWN.set(Some(Rc::clone(&timers)));
        Kept(timers)
    }

    /// When the first deadline is.
    pub(super) fn next(&self) -> Option<Instant> {
        self.waiting.borrow().first_key_value().map(|((due, _number), _entry)| *due)
    }

    /// Wakes those whose time has come. Reads the clock only where there are any to come.
    pub(super) fn fire(&self) {
        let Some(first) = self.next() else { return };
        let now = clock::now();
        if first > now {
            return;
        }
        while let Some(entry) = self.take_due(now) {
            entry.fired.set(true);
            entry.waker.borrow().wake_by_ref();
        }
    }

    fn take_due(&self, now: Instant) -> Option<Rc<Entry>> {
        let mut waiting = self.waiting.borrow_mut();
        let first = waiting.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }

    fn add(&self, due: Instant, waker: &Waker) -> (u64, Rc<Entry>) {
        let number = self.numbers.get();
        self.numbers.set(number + 1);
        let entry = Rc::new(Entry { waker: RefCell::new(waker.clone()), fired: Cell::new(false) });
        self.waiting.borrow_mut().insert((due, number), Rc::clone(&entry));
        (number, entry)
    }
}

impl std::ops::Deref for Kept {
    type Target = Timers;

    fn deref(&self) -> &Timers {
        &self.0
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        OWN.set(None);
    }
}

/// Ready from a moment on.
#[derive(Debug)]
pub(super) struct Sleep {
    due: Instant,
    kept: Keeper,
}

#[derive(Debug)]
enum Keeper {
    Own { timers: Rc<Timers>, set: Option<(u64, Rc<Entry>)> },
    Tokio(Pin<Box<tokio::time::Sleep>>),
}

/// Sleeps until `due`.
pub(super) fn sleep_until(due: Instant) -> Sleep {
    let own = OWN.with_borrow(|own| own.as_ref().map(Rc::clone));
    let kept = match own {
        Some(timers) => Keeper::Own { timers, set: None },
        None => Keeper::Tokio(Box::pin(tokio::time::sleep_until(due.into()))),
    };
    Sleep { due, kept }
}

/// Sleeps for `length`.
pub(super) fn sleep(length: Duration) -> Sleep {
    sleep_until(clock::now() + length)
}

impl Sleep {
    /// The moment.
    pub(super) fn deadline(&self) -> Instant {
        self.due
    }

    /// Moves the moment.
    pub(super) fn reset(&mut self, due: Instant) {
        self.forget();
        self.due = due;
        if let Keeper::Tokio(sleep) = &mut self.kept {
            sleep.as_mut().reset(due.into());
        }
    }

    fn forget(&mut self) {
        if let Keeper::Own { timers, set } = &mut self.kept
            && let Some((number, entry)) = set.take()
            && !entry.fired.get()
        {
            timers.waiting.borrow_mut().remove(&(self.due, number));
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        match &mut this.kept {
            Keeper::Tokio(sleep) => sleep.as_mut().poll(cx),
            Keeper::Own { set: Some((_number, entry)), .. } => {
                if entry.fired.get() {
                    return Poll::Ready(());
                }
                let mut waker = entry.waker.borrow_mut();
                if !waker.will_wake(cx.waker()) {
                    waker.clone_from(cx.waker());
                }
                Poll::Pending
            }
            Keeper::Own { timers, set } => {
                if this.due <= clock::now() {
                    return Poll::Ready(());
                }
                *set = Some(timers.add(this.due, cx.waker()));
                Poll::Pending
            }
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.forget();
    }
}

/// The time was up first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Elapsed;

pin_project! {
    /// A future that may take so long.
    #[derive(Debug)]
    pub(super) struct Timeout<F> {
        #[pin]
        work: F,
        limit: Sleep,
    }
}

/// Gives `work` up at `due`.
pub(super) fn timeout_at<F: Future>(due: Instant, work: F) -> Timeout<F> {
    Timeout { work, limit: sleep_until(due) }
}

/// Gives `work` up after `limit`.
pub(super) fn timeout<F: Future>(limit: Duration, work: F) -> Timeout<F> {
    // A limit that no clock can show is none.
    let now = clock::now();
    timeout_at(now.checked_add(limit).unwrap_or_else(|| now + FOREVER), work)
}

/// As far away as any deadline needs to be.
const FOREVER: Duration = Duration::from_hours(24 * 365);

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(done) = this.work.poll(cx) {
            return Poll::Ready(Ok(done));
        }
        Pin::new(this.limit).poll(cx).map(|()| Err(Elapsed))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn after(millis: u64) -> Instant {
        clock::now() + Duration::from_millis(millis)
    }

    #[test]
    fn deadlines_fire_in_order_and_each_once() {
        let timers = Timers::keep();
        let woken = Arc::<Count>::default();
        let waker = Waker::from(Arc::clone(&woken));
        let mut cx = Context::from_waker(&waker);
        let (early, late) = (after(5), after(60_000));
        let mut first = sleep_until(early);
        let mut second = sleep_until(late);
        assert!(Pin::new(&mut second).poll(&mut cx).is_pending());
        assert!(Pin::new(&mut first).poll(&mut cx).is_pending());
        assert_eq!(timers.next(), Some(early));
        timers.fire();
        assert_eq!(woken.0.load(Ordering::Relaxed), 0);
        std::thread::sleep(Duration::from_millis(6));
        timers.fire();
        timers.fire();
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert!(Pin::new(&mut first).poll(&mut cx).is_ready());
        assert_eq!(timers.next(), Some(late));
    }

    #[test]
    fn a_deadline_that_is_moved_or_dropped_leaves_nothing_behind() {
        let timers = Timers::keep();
        let mut cx = Context::from_waker(Waker::noop());
        let (mut moved, mut same) = (sleep_until(after(60_000)), sleep_until(after(60_000)));
        assert!(Pin::new(&mut moved).poll(&mut cx).is_pending());
        assert!(Pin::new(&mut same).poll(&mut cx).is_pending());
        let due = after(30_000);
        moved.reset(due);
        assert!(Pin::new(&mut moved).poll(&mut cx).is_pending());
        assert_eq!((timers.next(), timers.waiting.borrow().len()), (Some(due), 2));
        drop((moved, same));
        assert_eq!(timers.next(), None);
        let mut past = sleep_until(clock::now());
        assert!(Pin::new(&mut past).poll(&mut cx).is_ready());
    }

    #[test]
    fn what_is_done_in_time_is_not_given_up() {
        let _timers = Timers::keep();
        let mut cx = Context::from_waker(Waker::noop());
        let mut done = Box::pin(timeout(Duration::MAX, std::future::ready(7)));
        assert_eq!(done.as_mut().poll(&mut cx), Poll::Ready(Ok(7)));
        let mut late = Box::pin(timeout(Duration::ZERO, std::future::pending::<()>()));
        assert_eq!(late.as_mut().poll(&mut cx), Poll::Ready(Err(Elapsed)));
    }

    #[tokio::test]
    async fn elsewhere_tokio_keeps_them() {
        assert_eq!(timeout(Duration::from_millis(5), std::future::pending::<()>()).await, Err(Elapsed));
        sleep(Duration::from_millis(1)).await;
    }
}

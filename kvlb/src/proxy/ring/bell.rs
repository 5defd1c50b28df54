//! How other threads wake one that waits in its ring.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Rung when a thread has something to do. Costs a system call only where the thread waits in its ring.
#[derive(Debug)]
pub(super) struct Bell {
    rung: AtomicBool,
    resting: AtomicBool,
    event: EventFd,
}

// Whoever rings says so first and looks then whether the thread rests; the thread says first that it rests and looks then
// whether somebody rang. In one order of all (`SeqCst`) at least one of the two sees the other.
impl Bell {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        // In blocking mode: io_uring answers `EAGAIN` instead of waiting on a non-blocking file.
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?;
        Ok(Arc::new(Self { rung: AtomicBool::new(true), resting: AtomicBool::new(false), event }))
    }

    /// Whether it was rung since it was last hushed.
    pub(super) fn is_rung(&self) -> bool {
        self.rung.load(Ordering::SeqCst)
    }

    /// What rings from now on is news.
    pub(super) fn hush(&self) {
        self.rung.store(false, Ordering::SeqCst);
    }

    /// The thread is about to wait; `false` when it must not.
    pub(super) fn lie_down(&self) -> bool {
        self.resting.store(true, Ordering::SeqCst);
        let quiet = !self.is_rung();
        if !quiet {
            self.get_up();
        }
        quiet
    }

    /// The thread does not wait any more.
    pub(super) fn get_up(&self) {
        self.resting.store(false, Ordering::SeqCst);
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_fd().as_raw_fd()
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.rung.swap(true, Ordering::SeqCst) || !self.resting.load(Ordering::SeqCst) {
            return;
        }
        if let Err(error) = self.event.write(1) {
            tracing::error!(%error, "a data thread cannot be woken");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_rings_is_heard_before_and_during_a_rest() {
        let bell = Bell::new().unwrap();
        bell.hush();
        bell.wake_by_ref();
        assert!(!bell.lie_down(), "rung before");
        bell.hush();
        assert!(bell.lie_down());
        Arc::clone(&bell).wake();
        bell.wake_by_ref();
        bell.get_up();
        assert_eq!(bell.event.read().unwrap(), 1, "one stroke is enough");
        assert!(bell.is_rung());
    }
}

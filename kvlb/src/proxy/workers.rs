//! A small pool of threads for decisions that would hold a data thread for too long.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use crate::courtesy::{self, Cores};

type Job = Box<dyn FnOnce() + Send>;

/// How much the pool steps back behind the data threads where there are too few cores for both. At 5 it still gets a
/// quarter of a core that a data thread uses up (the kernel's weights are 335 and 1024), which is enough for a decision to
/// come in time.
const NICENESS: i32 = 5;

/// The pool. Dropping it finishes the running jobs and forgets the waiting ones.
pub(super) struct Workers {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

struct Queue {
    waiting: Mutex<Waiting>,
    ready: Condvar,
    /// Jobs that may wait.
    limit: usize,
}

struct Waiting {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// No place in the queue: the decision must be made without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueFull;

impl Workers {
    /// The threads give way to the data threads of `cores`.
    pub(super) fn start(threads: usize, limit: usize, cores: &Arc<Cores>) -> io::Result<Self> {
        let waiting = Mutex::new(Waiting { jobs: VecDeque::with_capacity(limit), closed: false });
        let queue = Arc::new(Queue { waiting, ready: Condvar::new(), limit });
        let spawn = |number| {
            let (queue, cores) = (Arc::clone(&queue), Arc::clone(cores));
            std::thread::Builder::new().name(format!("kvlb-decide-{number}")).spawn(move || {
                step_back();
                courtesy::give_way_to(cores);
                queue.work();
            })
        };
        let threads = (0..threads.max(1)).map(spawn).collect::<io::Result<_>>()?;
        Ok(Self { queue, threads })
    }

    /// Has `job` done by the next free thread.
    pub(super) fn submit(&self, job: impl FnOnce() + Send + 'static) -> Result<(), QueueFull> {
        let mut waiting = self.queue.waiting.lock();
        if waiting.jobs.len() >= self.queue.limit {
            return Err(QueueFull);
        }
        waiting.jobs.push_back(Box::new(job));
        drop(waiting);
        self.queue.ready.notify_one();
        Ok(())
    }
}

/// Lets every data thread of the same core go first. On Linux this is a thread's own affair.
fn step_back() {
    if let Err(error) = rustix::process::nice(NICENESS) {
        tracing::debug!(%error, "a decision thread keeps its priority");
    }
}

impl Queue {
    fn work(&self) {
        while let Some(job) = self.next() {
            // Who asked for it is in a turn now.
            courtesy::give_way();
            // The panic has been told by its hook; whoever waits for the job's result sees that none comes.
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!("a decision panicked");
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut waiting = self.waiting.lock();
        loop {
            if waiting.closed {
                return None;
            }
            if let Some(job) = waiting.jobs.pop_front() {
                return Some(job);
            }
            self.ready.wait(&mut waiting);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let forgotten = {
            let mut waiting = self.queue.waiting.lock();
            waiting.closed = true;
            std::mem::take(&mut waiting.jobs)
        };
        self.queue.ready.notify_all();
        drop(forgotten);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a decision thread ended in a panic");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn jobs_are_done_and_a_panic_costs_only_its_own() {
        let workers = Workers::start(1, 4, &Cores::new(0)).unwrap();
        workers.submit(|| panic!("on purpose")).unwrap();
        let (done, wait) = mpsc::channel();
        workers.submit(move || done.send(7).unwrap()).unwrap();
        assert_eq!(wait.recv().unwrap(), 7);
    }

    #[test]
    fn the_pool_steps_back_and_nobody_else_does() {
        let before = rustix::process::getpriority_process(None).unwrap();
        let workers = Workers::start(1, 1, &Cores::new(0)).unwrap();
        let (tell, told) = mpsc::channel();
        workers.submit(move || tell.send(rustix::process::getpriority_process(None).unwrap()).unwrap()).unwrap();
        assert_eq!(told.recv().unwrap(), (before + NICENESS).min(19));
        assert_eq!(rustix::process::getpriority_process(None).unwrap(), before);
    }

    #[test]
    fn a_full_queue_refuses_at_once() {
        let workers = Workers::start(1, 2, &Cores::new(0)).unwrap();
        let (release, held) = mpsc::channel::<()>();
        let (started, running) = mpsc::channel();
        workers
            .submit(move || {
                started.send(()).unwrap();
                held.recv().unwrap();
            })
            .unwrap();
        running.recv().unwrap();
        assert_eq!(workers.submit(|| ()), Ok(()));
        assert_eq!(workers.submit(|| ()), Ok(()));
        assert_eq!(workers.submit(|| ()), Err(QueueFull));
        release.send(()).unwrap();
    }
}

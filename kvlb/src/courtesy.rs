//! Long work makes way for data threads.
//!
//! A data thread keeps to one core, and its turns take microseconds. A thread with long work that wakes on that core may
//! push it off in the middle of a turn, whatever their priorities: the kernel looks again at its next tick only, up to 4 ms
//! later (`CONFIG_HZ=250`), and all the thread's connections wait. So data threads mark their turns, and a thread that
//! [gives way](give_way_to) asks between two steps of its work whether it runs on the core of one that is in a turn. It can
//! only be there in that thread's stead, and sleeps for a moment.
//!
//! Priorities do not do this: with data threads at nice -19 as many turns were interrupted (6.18, two cores). Nor should it
//! be the scheduler's idle class, which never interrupts: its threads may be stopped for seconds while they hold a lock that
//! a data thread needs.

use std::cell::OnceCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sched::sched_getcpu;

/// How long a thread with long work steps aside: several turns of a data thread.
const MOMENT: Duration = Duration::from_micros(100);

thread_local! {
    static BEFORE: OnceCell<Arc<Cores>> = const { OnceCell::new() };
}

/// Which cores have a data thread in a turn.
#[derive(Debug)]
pub struct Cores(Box<[Core]>);

/// One core. Each has a cache line of its own: it is written twice a turn.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Core {
    in_turn: AtomicBool,
}

/// The core of one data thread.
#[derive(Clone, Debug)]
pub struct Place {
    cores: Arc<Cores>,
    cpu: usize,
}

/// A turn; it ends when this is dropped.
#[derive(Debug)]
pub struct Turn<'a>(&'a Core);

impl Cores {
    /// All of a machine with `count` cores, none of them in a turn.
    pub fn new(count: usize) -> Arc<Self> {
        Arc::new(Self((0..count).map(|_| Core::default()).collect()))
    }

    /// The place of a data thread that stays on core `cpu`; `None` where there is no such core.
    pub fn place(self: &Arc<Self>, cpu: usize) -> Option<Place> {
        (cpu < self.0.len()).then(|| Place { cores: Arc::clone(self), cpu })
    }
}

impl Place {
    /// Marks a turn.
    pub fn turn(&self) -> Turn<'_> {
        let core = &self.cores.0[self.cpu];
        core.in_turn.store(true, Ordering::Relaxed);
        Turn(core)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.in_turn.store(false, Ordering::Relaxed);
    }
}

/// The calling thread gives way to the data threads of `cores` from now on, for all its life.
pub fn give_way_to(cores: Arc<Cores>) {
    // A thread works for one proxy.
    BEFORE.with(|before| drop(before.set(cores)));
}

/// To be called between two steps of long work, with no lock held: steps aside for a moment where a data thread waits for
/// this core, and says whether it did. Costs some 20 ns on a thread that gives way, and next to nothing on any other.
pub fn give_way() -> bool {
    let waited_for = BEFORE.with(|before| {
        let core =
            |cores: &Arc<Cores>| cores.0.get(sched_getcpu().ok()?).map(|core| core.in_turn.load(Ordering::Relaxed));
        before.get().and_then(core) == Some(true)
    });
    if waited_for {
        std::thread::sleep(MOMENT);
    }
    waited_for
}

#[cfg(test)]
mod tests {
    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;

    use super::*;

    /// Keeps this thread on the core where it is.
    fn stay() -> usize {
        let this = Pid::from_raw(0);
        let allowed = sched_getaffinity(this).unwrap();
        let cpu = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu).unwrap()).unwrap();
        let mut own = CpuSet::new();
        own.set(cpu).unwrap();
        sched_setaffinity(this, &own).unwrap();
        cpu
    }

    #[test]
    fn only_who_gives_way_does_and_only_on_the_core_of_a_turn() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (cpu, cores) = (stay(), Cores::new(CpuSet::count()));
                let (here, elsewhere) = (cores.place(cpu).unwrap(), cores.place((cpu + 1) % CpuSet::count()).unwrap());
                let turn = here.turn();
                assert!(!give_way(), "this thread has not said that it gives way");
                give_way_to(Arc::clone(&cores));
                assert!(give_way());
                drop(turn);
                assert!(!give_way(), "the turn has ended");
                let _turn = elsewhere.turn();
                assert!(!give_way(), "the turn is on another core");
            });
        });
        assert!(Cores::new(2).place(2).is_none());
    }
}

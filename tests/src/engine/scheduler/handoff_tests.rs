//! Handoffs under random acts: whatever is kept, read, left or expires, every block comes back and every token comes.

use std::time::Duration;

use proptest::prelude::*;
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::Instant;

use super::{Limits, Output, Request, Scheduler, SeqId};
use crate::engine::cache::Shape;
use crate::engine::handoff::pull::{Errand, Pull};
use crate::engine::handoff::{Handed, Part, Source};
use crate::engine::{Algorithm, Naming};

const USABLE: usize = 16;

/// What a client, the other side or time does, or some steps of the engine.
#[derive(Debug, Clone, Copy)]
enum Act {
    Plain { family: u32, len: usize },
    Prefill { family: u32, len: usize },
    Decode { family: u32, len: usize },
    Arrives { fails: bool, refused: bool },
    Read(usize),
    Abort(usize),
    Expire,
    Steps(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let prompt = || (0..3_u32, 1..20_usize);
    prop_oneof![
        1 => prompt().prop_map(|(family, len)| Act::Plain { family, len }),
        2 => prompt().prop_map(|(family, len)| Act::Prefill { family, len }),
        2 => prompt().prop_map(|(family, len)| Act::Decode { family, len }),
        3 => (any::<bool>(), any::<bool>()).prop_map(|(fails, refused)| Act::Arrives { fails, refused }),
        1 => (0..20_usize).prop_map(Act::Read),
        1 => (0..30_usize).prop_map(Act::Abort),
        1 => Just(Act::Expire),
        4 => (1..8_usize).prop_map(Act::Steps),
    ]
}

struct World {
    scheduler: Scheduler,
    asked: Vec<(SeqId, UnboundedReceiver<Output>, bool)>,
    pulls: Vec<Pull>,
}

impl World {
    fn new() -> Self {
        let naming = Naming::new(Algorithm::XxhashCbor, 4, Some("0"), true, true, 1);
        let shape = Shape { contents: true, ..Shape::default() };
        let lease = Duration::from_secs(30);
        let limits = Limits { max_num_seqs: 3, max_num_batched_tokens: 16, shape, lease };
        Self { scheduler: Scheduler::new(naming, USABLE + 1, limits), asked: Vec::new(), pulls: Vec::new() }
    }

    fn ask(&mut self, family: u32, len: usize, part: impl FnOnce(String) -> Option<Part>) {
        let (sink, receiver) = mpsc::unbounded_channel();
        let prompt = (0..len).map(|i| family * 100 + u32::try_from(i).unwrap()).collect();
        let part = part(self.asked.len().to_string());
        let request = Request { part, ..Request::plain(prompt, vec![1, 2], sink) };
        let id = self.scheduler.submit(request, Instant::now());
        self.asked.push((id, receiver, false));
    }

    fn step(&mut self) {
        let step = self.scheduler.schedule(Instant::now());
        let outcome = self.scheduler.complete(&step, Instant::now());
        for (sink, output) in outcome.outputs {
            assert!(sink.send(output).is_ok());
        }
        for errand in self.scheduler.take_errands() {
            if let Errand::Pull(pull) = errand {
                self.pulls.push(pull);
            }
        }
    }

    fn arrives(&mut self, pull: &Pull, fails: bool, refused: bool) {
        if fails {
            self.scheduler.pull_failed(pull.id, refused);
        } else {
            // Blocks of the same engine: its own, somebody's, or nobody's.
            let contents = self.scheduler.cache.contents(&(pull.from..pull.until).collect::<Vec<_>>());
            self.scheduler.pulled(pull, contents, None);
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Plain { family, len } => self.ask(family, len, |_| None),
            Act::Prefill { family, len } => {
                self.ask(family, len, |key| Some(Part::Prefill { key, leg: 0, handed: Handed::default() }));
            }
            Act::Decode { family, len } => self.ask(family, len, |key| {
                let [engine_id, bootstrap] = ["e", "b"].map(str::to_owned);
                Some(Part::Decode { source: Source::Transfer { engine_id, transfer_id: key, bootstrap }, leg: 0 })
            }),
            Act::Arrives { fails, refused } => {
                if let Some(pull) = self.pulls.pop() {
                    self.arrives(&pull, fails, refused);
                }
            }
            Act::Read(key) => self.scheduler.end_lease(&key.to_string()),
            Act::Abort(index) => {
                if let Some((id, _, aborted)) = self.asked.get_mut(index) {
                    *aborted = true;
                    self.scheduler.abort(*id);
                }
            }
            Act::Expire => self.scheduler.expire_leases(Instant::now() + Duration::from_mins(1)),
            Act::Steps(count) => (0..count).for_each(|_| self.step()),
        }
    }

    /// Everything under way comes to its end; false when it never does.
    fn settle(&mut self) -> bool {
        for _ in 0..10_000 {
            while let Some(pull) = self.pulls.pop() {
                self.arrives(&pull, false, false);
            }
            if !self.scheduler.has_work() && self.scheduler.pulling() == 0 {
                return true;
            }
            self.scheduler.expire_leases(Instant::now() + Duration::from_mins(1));
            self.step();
        }
        false
    }
}

proptest! {
    #[test]
    fn every_block_comes_back_and_every_answer_ends(acts in prop::collection::vec(act(), 1..60)) {
        let mut world = World::new();
        for act in acts {
            world.act(act);
        }
        prop_assert!(world.settle(), "the engine stands still");
        world.scheduler.expire_leases(Instant::now() + Duration::from_mins(1));
        prop_assert_eq!(world.scheduler.pinned(), (0, 0));
        prop_assert_eq!(world.scheduler.pool().free_blocks(), USABLE);
        prop_assert_eq!((world.scheduler.running(), world.scheduler.waiting()), (0, 0));
        for (_, mut sink, aborted) in world.asked {
            let ended = std::iter::from_fn(|| sink.try_recv().ok()).any(|output| output.finish.is_some());
            prop_assert!(ended || aborted);
        }
    }
}

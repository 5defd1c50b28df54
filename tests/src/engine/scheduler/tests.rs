//! The step loop by itself, one step at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::Instant;

use super::{Event, Limits, Output, Request, Scheduler, SeqId, Shape};
use crate::engine::{Algorithm, Naming};

const BLOCK_SIZE: usize = 4;

/// Copies by name and group; host memory has no group.
type Mirror = BTreeMap<(u64, Option<u64>), i64>;

fn engine(blocks: usize, max_num_seqs: usize, caching: bool) -> Scheduler {
    shaped(blocks, max_num_seqs, Shape { disabled: !caching, ..Shape::default() })
}

fn shaped(blocks: usize, max_num_seqs: usize, shape: Shape) -> Scheduler {
    let naming = Naming::new(Algorithm::XxhashCbor, BLOCK_SIZE, Some("0"), true, true, 1);
    Scheduler::new(
        naming,
        blocks,
        Limits { max_num_seqs, max_num_batched_tokens: 16, shape, lease: Duration::from_secs(30) },
    )
}

fn submit(scheduler: &mut Scheduler, prompt: Vec<u32>, outputs: Vec<u32>) -> (SeqId, UnboundedReceiver<Output>) {
    let (sink, receiver) = mpsc::unbounded_channel();
    (scheduler.submit(Request::plain(prompt, outputs, sink), Instant::now()), receiver)
}

/// One step; what it tells is added to `mirror`, its tokens are sent.
fn step(scheduler: &mut Scheduler, mirror: &mut Mirror) -> usize {
    let step = scheduler.schedule(Instant::now());
    let outcome = scheduler.complete(&step, Instant::now());
    for event in outcome.events {
        let (hashes, group, copies) = match event {
            Event::Stored(stored) => (stored.hashes, stored.group_idx.filter(|_| stored.medium == "GPU"), 1),
            Event::Removed { hashes, group_idx, .. } => (hashes, group_idx, -1),
            Event::Cleared => {
                mirror.clear();
                continue;
            }
        };
        for hash in hashes {
            *mirror.entry((hash.name(), group)).or_default() += copies;
        }
    }
    for (sink, output) in outcome.outputs {
        assert!(sink.send(output).is_ok());
    }
    step.prefill_tokens + step.decodes
}

fn tokens(receiver: &mut UnboundedReceiver<Output>) -> Vec<u32> {
    std::iter::from_fn(|| receiver.try_recv().ok()).map(|output| output.token).collect()
}

#[test]
fn more_requests_than_fit_wait_for_their_turn() {
    let mut scheduler = engine(100, 2, true);
    let mut sinks: Vec<_> = (0..4_u32).map(|n| submit(&mut scheduler, vec![n; 3], vec![1, 2])).collect();
    let mut mirror = BTreeMap::new();
    step(&mut scheduler, &mut mirror);
    assert_eq!((scheduler.running(), scheduler.waiting()), (1, 3), "an idle engine starts with the first arrival");
    step(&mut scheduler, &mut mirror);
    assert_eq!((scheduler.running(), scheduler.waiting()), (1, 2), "the first is done, the second has started");
    while scheduler.has_work() {
        step(&mut scheduler, &mut mirror);
    }
    assert!(sinks.iter_mut().all(|(_, sink)| tokens(sink) == [1, 2]));
}

#[test]
fn without_prefix_caching_nothing_is_cached_or_told() {
    let mut scheduler = engine(100, 8, false);
    let mut mirror = BTreeMap::new();
    for _ in 0..2 {
        let (_, _sink) = submit(&mut scheduler, (0..40).collect(), vec![1, 2]);
        let computed: usize =
            std::iter::from_fn(|| scheduler.has_work().then(|| step(&mut scheduler, &mut mirror))).sum();
        assert_eq!(computed, 41);
    }
    assert_eq!((mirror.len(), scheduler.pool().cached().count(), scheduler.pool().free_blocks()), (0, 0, 99));
}

#[test]
fn an_abort_in_the_middle_of_a_step_frees_the_blocks_when_it_ends() {
    let mut scheduler = engine(100, 8, true);
    let (id, mut sink) = submit(&mut scheduler, (0..12).collect(), vec![1; 5]);
    let under_way = scheduler.schedule(Instant::now());
    scheduler.abort(id);
    scheduler.abort(id);
    assert_eq!((scheduler.running(), scheduler.pool().free_blocks()), (0, 96));
    let outcome = scheduler.complete(&under_way, Instant::now());
    assert!(outcome.outputs.is_empty() && outcome.events.len() == 1, "its blocks were computed all the same");
    assert_eq!((scheduler.has_work(), scheduler.pool().free_blocks()), (false, 99));
    assert!(tokens(&mut sink).is_empty());
}

/// One thing a client or operator does, or some steps of the engine.
#[derive(Debug, Clone)]
enum Act {
    Ask { family: u32, len: usize, outputs: usize },
    Abort(usize),
    Reset,
    Steps(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0..3_u32, 1..30_usize, 1..12_usize).prop_map(|(family, len, outputs)| Act::Ask { family, len, outputs }),
        1 => (0..20_usize).prop_map(Act::Abort),
        1 => Just(Act::Reset),
        4 => (1..8_usize).prop_map(Act::Steps),
    ]
}

proptest! {
    #[test]
    fn what_is_told_is_what_is_held_every_token_comes_and_every_block_returns(
        acts in prop::collection::vec(act(), 1..60),
        window in prop::option::of(1..12_usize),
        host_blocks in 0..9_usize,
    ) {
        // 12 usable blocks: the longest request (41 tokens) fits, two of them preempt each other. A second group needs as many.
        let usable = if window.is_some() { 24 } else { 12 };
        let mut scheduler = shaped(usable + 1, 3, Shape { window, host_blocks, ..Shape::default() });
        let mut mirror = BTreeMap::new();
        let mut asked = Vec::new();
        let mut aborted = Vec::new();
        for act in acts {
            match act {
                Act::Ask { family, len, outputs } => {
                    let prompt = (0..len).map(|i| family * 100 + u32::try_from(i).unwrap()).collect();
                    let outputs: Vec<u32> = (0..outputs).map(|i| 1000 + u32::try_from(i).unwrap()).collect();
                    let (id, sink) = submit(&mut scheduler, prompt, outputs.clone());
                    asked.push((id, sink, outputs));
                }
                Act::Abort(index) => {
                    if let Some((id, ..)) = asked.get(index) {
                        scheduler.abort(*id);
                        aborted.push(*id);
                    }
                }
                Act::Reset => {
                    scheduler.reset_cache();
                }
                Act::Steps(count) => {
                    for _ in 0..count {
                        step(&mut scheduler, &mut mirror);
                    }
                }
            }
        }
        let mut left = 10_000;
        while scheduler.has_work() && left > 0 {
            step(&mut scheduler, &mut mirror);
            left -= 1;
        }
        prop_assert!(left > 0, "the engine stands still");
        step(&mut scheduler, &mut mirror);
        prop_assert!(mirror.values().all(|copies| *copies >= 0));
        mirror.retain(|_, copies| *copies > 0);
        let in_pool = scheduler.pool().cached().map(|(key, copies)| {
            ((key.digest.name(), Some(u64::from(key.group))), i64::try_from(copies).unwrap())
        });
        let held: Mirror = in_pool.chain(scheduler.host().map(|digest| ((digest.name(), None), 1))).collect();
        prop_assert!(scheduler.host().count() <= host_blocks);
        prop_assert_eq!(mirror, held);
        prop_assert_eq!(scheduler.pool().free_blocks(), usable);
        for (id, mut sink, outputs) in asked {
            let got = tokens(&mut sink);
            if aborted.contains(&id) {
                prop_assert!(outputs.starts_with(&got));
            } else {
                prop_assert_eq!(got, outputs);
            }
        }
    }
}

//! Memory under churn at a constant size: eight endpoints of 100,000 blocks each, half of them named as their engines do and
//! half in our own way, of which five in a hundred are replaced every second.
//!
//! `cargo bench -p kvlb --bench soak` runs for a minute; `-- 600` for ten.

#![allow(missing_docs, clippy::print_stdout, reason = "a bench prints what it has measured")]
#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use kvlb::clock;
use kvlb::contract::events::{Attention, Batch, Event, Removed, Stored};
use kvlb::contract::{BlockHash, BlockSize, EventSeq, HashAlgo, NoneSeed, Rehash, TokenId};
use kvlb::fleet::Keying;
use kvlb::state::index::{Index, IndexConfig};
use kvlb::state::kv::{EndpointKv, Feed, Naming};
use tikv_jemallocator::Jemalloc;

/// As in the program itself.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

const ENDPOINTS: usize = 8;
const BLOCKS: usize = 100_000;
const BLOCK: u32 = 16;
/// Blocks of one prompt, stored by one event.
const PROMPT: usize = 50;
const CHURN_PER_SECOND: usize = BLOCKS * 5 / 100;
/// Turns in a second: churn comes in a stream, not at once.
const TURNS: usize = 10;
const SAY_EVERY: Duration = Duration::from_secs(30);
/// The first figures still grow: tables double, and the allocator takes its stock.
const WARM_UP: Duration = Duration::from_secs(30);

struct Engine {
    kv: EndpointKv,
    feed: Arc<Feed>,
    prompts: VecDeque<Vec<BlockHash>>,
    next: u64,
    sequence: u64,
}

impl Engine {
    fn new(index: &Arc<Index>, number: usize) -> Self {
        let keying = if number.is_multiple_of(2) { Keying::Parity } else { Keying::Rehash };
        let naming = Naming {
            algo: HashAlgo::Sha256Cbor,
            seed: NoneSeed::Text("0".to_owned()),
            block_size: BlockSize::new(BLOCK).unwrap(),
            keying,
            rehash: Rehash::new(5),
        };
        let kv = EndpointKv::new(Arc::clone(index), &naming);
        let feed = kv.feed(0);
        Self { kv, feed, prompts: VecDeque::new(), next: (number as u64) << 40, sequence: 0 }
    }

    fn apply(&mut self, events: Vec<Event>) {
        let batch = Batch { ts: 0.0, dp_rank: Some(0), events, undecodable: 0, unknown: 0, skipped: 0 };
        self.kv.apply(&self.feed, EventSeq(self.sequence), &batch, clock::now());
        self.sequence += 1;
    }

    /// A prompt that nobody has seen before, under names that a hash might give.
    fn store(&mut self) {
        let first = self.next;
        self.next += PROMPT as u64;
        let names: Vec<_> = (first..self.next)
            .map(|number| BlockHash(number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)))
            .collect();
        let token = |at: u64| TokenId(u32::try_from((first ^ at.wrapping_mul(2_654_435_761)) & 0xffff_ffff).unwrap());
        let stored = Stored {
            hashes: names.iter().map(|&name| name.into()).collect(),
            tokens: (0..PROMPT as u64 * u64::from(BLOCK)).map(token).collect(),
            block_size: BLOCK,
            attention: Attention::Full,
            extra_keys: Some(Vec::new()),
            ..Stored::default()
        };
        self.apply(vec![Event::Stored(stored)]);
        self.prompts.push_back(names);
    }

    /// The oldest prompt goes, block by block as engines say it.
    fn evict(&mut self) {
        let Some(names) = self.prompts.pop_front() else { return };
        let removed = |name: BlockHash| Event::Removed(Removed { hashes: vec![name.into()], ..Removed::default() });
        self.apply(names.into_iter().rev().map(removed).collect());
    }
}

fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn main() {
    let mut arguments = std::env::args();
    // `cargo test` runs benches too, without this flag: then there is nothing to do.
    if !arguments.any(|argument| argument == "--bench") {
        return;
    }
    let seconds = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(60);
    let index = Arc::new(Index::new(IndexConfig::default()));
    let before = resident();
    let mut engines: Vec<_> = (0..ENDPOINTS).map(|number| Engine::new(&index, number)).collect();
    for engine in &mut engines {
        (0..BLOCKS / PROMPT).for_each(|_| engine.store());
    }
    let held = |engines: &[Engine]| engines.iter().map(|engine| engine.kv.blocks()).sum::<usize>();
    println!(
        "{} blocks held by {ENDPOINTS} endpoints, {} MB more than without",
        held(&engines),
        (resident() - before) >> 20
    );
    let (start, mut said, mut after_warm_up) = (clock::now(), clock::now(), Vec::new());
    let mut turns = 0;
    while start.elapsed() < Duration::from_secs(seconds) {
        for engine in &mut engines {
            for _ in 0..CHURN_PER_SECOND / PROMPT / TURNS {
                engine.evict();
                engine.store();
            }
        }
        turns += 1;
        if start.elapsed() > WARM_UP {
            after_warm_up.push(resident());
        }
        if said.elapsed() > SAY_EVERY {
            said = clock::now();
            println!("{:>4} s: {} blocks, {} MB resident", start.elapsed().as_secs(), held(&engines), resident() >> 20);
        }
        let due = Duration::from_secs(1) / u32::try_from(TURNS).unwrap() * turns;
        sleep(due.saturating_sub(start.elapsed()));
    }
    let (least, most) = (after_warm_up.iter().min().unwrap_or(&0), after_warm_up.iter().max().unwrap_or(&0));
    println!("{turns} turns: {} to {} KB resident after the first {WARM_UP:?}", least >> 10, most >> 10);
    drop(engines);
    println!("{} MB more than before the first block, once all are gone", resident().saturating_sub(before) >> 20);
}

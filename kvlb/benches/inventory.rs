//! How fast the index stores and answers, how fast names are made, and what an index costs in memory.
//!
//! Two shapes. `chains`: 200 prefix groups on 16 slots, each chain 64 shared and 64 own blocks, the shared prefix on every
//! slot, own blocks on one; a query is one chain of 128. `fleet`: a million distinct blocks on 32 slots, six or seven
//! holders each; a query is 512 blocks.

#![allow(clippy::unwrap_used, missing_docs, reason = "a bench fails by panicking, and criterion's macro has no docs")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvlb::contract::events::{Attention, Event, Stored};
use kvlb::contract::{BlockHash, BlockSize, Extra, HashAlgo, Hasher, KeyEra, NoneSeed, TokenId};
use kvlb::state::index::{Index, IndexConfig, SlotId};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

/// Counts the bytes in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

#[expect(unsafe_code, reason = "an allocator that counts is the only way to see what an index costs")]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise about the layout is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the block came from `System` with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A stream of numbers that look like digests.
fn digest(number: u64) -> BlockHash {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    BlockHash(bits ^ bits >> 31)
}

fn stored(names: &[BlockHash]) -> Event {
    let hashes = names.iter().map(|&name| name.into()).collect();
    Event::Stored(Stored { hashes, attention: Attention::Full, group: Some(0), ..Stored::default() })
}

/// An event per prompt, and the prompts.
struct Load {
    events: Vec<(usize, Event)>,
    queries: Vec<Vec<BlockHash>>,
    slots: usize,
}

impl Load {
    fn memberships(&self) -> usize {
        let blocks = |event: &Event| if let Event::Stored(stored) = event { stored.hashes.len() } else { 0 };
        self.events.iter().map(|(_, event)| blocks(event)).sum()
    }

    fn chains(chains_per_group: u64) -> Self {
        let (mut events, mut queries) = (Vec::new(), Vec::new());
        for group in 0..200 {
            let shared: Vec<_> = (0..64).map(|block| digest(group << 32 | block)).collect();
            events.extend((0..16).map(|slot| (slot, stored(&shared))));
            for chain in 0..chains_per_group {
                let own: Vec<_> = (0..64).map(|block| digest(group << 32 | (chain + 1) << 8 | block)).collect();
                let slot = usize::try_from((group + chain) % 16).unwrap();
                events.push((slot, stored(&own)));
                queries.push([shared.clone(), own].concat());
            }
        }
        Self { events, queries, slots: 16 }
    }

    fn fleet() -> Self {
        let (mut events, mut queries) = (Vec::new(), Vec::new());
        for chain in 0..1954_u64 {
            let names: Vec<_> = (0..512).map(|block| digest(chain << 16 | block)).collect();
            // Holders have different lengths of the chain, so that their answers change on the way.
            for holder in 0..13 {
                let slot = usize::try_from((chain * 7 + holder * 5) % 32).unwrap();
                let length = 512 * usize::try_from(holder + 1).unwrap() / 13;
                events.push((slot, stored(&names[..length])));
            }
            queries.push(names);
        }
        Self { events, queries, slots: 32 }
    }

    fn fill(&self, index: &Index) {
        let slots: Vec<SlotId> = (0..self.slots).map(|_| index.add_slot().unwrap()).collect();
        for (slot, event) in &self.events {
            index.apply(slots[*slot], event);
        }
    }
}

fn inventory(criterion: &mut Criterion) {
    for (name, load) in [("chains", Load::chains(150)), ("fleet", Load::fleet())] {
        let (before, start) = (IN_USE.load(Ordering::Relaxed), cpu_time());
        let index = Index::new(IndexConfig::default());
        load.fill(&index);
        let (bytes, stored_in) = (IN_USE.load(Ordering::Relaxed) - before, cpu_time().saturating_sub(start));
        let mut distinct: Vec<_> = load.queries.concat();
        distinct.sort_unstable();
        distinct.dedup();
        let memberships = load.memberships();
        eprintln!(
            "{name}: {memberships} memberships of {} blocks stored in {stored_in:?} of CPU time, {} B a block, {} B a membership",
            distinct.len(),
            bytes / distinct.len(),
            bytes / memberships
        );

        let mut group = criterion.benchmark_group("store");
        group.sample_size(10).throughput(Throughput::Elements(memberships as u64));
        group.bench_function(name, |bencher| {
            bencher.iter_with_large_drop(|| {
                let index = Index::new(IndexConfig::default());
                load.fill(&index);
                index
            });
        });
        group.finish();

        let mut group = criterion.benchmark_group("query");
        let mut overlaps = Vec::new();
        let mut next = 0;
        group.bench_function(BenchmarkId::new("anywhere", name), |bencher| {
            bencher.iter(|| {
                next = (next + 7919) % load.queries.len();
                index.overlaps(black_box(&load.queries[next]), &mut overlaps);
                overlaps.len()
            });
        });
        group.bench_function(BenchmarkId::new("again", name), |bencher| {
            bencher.iter(|| {
                index.overlaps(black_box(&load.queries[7]), &mut overlaps);
                overlaps.len()
            });
        });
        let cold: Vec<_> = (0..128).map(|block| digest(1 << 60 | block)).collect();
        group.bench_function(BenchmarkId::new("held by nobody", name), |bencher| {
            bencher.iter(|| {
                index.overlaps(black_box(&cold), &mut overlaps);
                overlaps.len()
            });
        });
        group.finish();
        // A prompt's names were just made: they are at hand, the index is not.
        let query = |round: usize| black_box(load.queries[round * 7919 % load.queries.len()].clone());
        percentiles(name, 200_000, query, |query| index.overlaps(query, &mut overlaps));
    }
}

/// What this thread has cost so far: on a busy machine the clock says little.
fn cpu_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
    let times = [usage.user_time(), usage.system_time()];
    times.map(|time| Duration::from_micros(u64::try_from(time.num_microseconds()).unwrap())).into_iter().sum()
}

/// Criterion gives means; the targets are percentiles, and the fifth is nearest to an undisturbed machine.
fn percentiles<T>(name: &str, rounds: usize, prepare: impl Fn(usize) -> T, mut run: impl FnMut(&T)) {
    let mut times = Vec::new();
    for round in 0..rounds {
        let input = prepare(round);
        #[expect(clippy::disallowed_methods, reason = "a bench reads the clock")]
        let start = std::time::Instant::now();
        run(&input);
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let percentile = |percent| times[times.len() * percent / 100];
    eprintln!("{name}: p5 {:?}, p50 {:?}, p99 {:?}", percentile(5), percentile(50), percentile(99));
}

fn names(criterion: &mut Criterion) {
    let tokens: Vec<_> = (0..8192).map(|token| TokenId((token * 7919) % 151_643)).collect();
    let mut group = criterion.benchmark_group("name 8192 tokens");
    group.throughput(Throughput::Elements(tokens.len() as u64));
    for algo in [HashAlgo::Sha256Cbor, HashAlgo::XxhashCbor] {
        let hasher = Hasher::new(algo, &NoneSeed::Text("0".into()), BlockSize::new(16).unwrap());
        percentiles(algo.label(), 20_000, drop, |()| {
            black_box(hasher.block_hashes(black_box(&tokens), &Extra::default(), KeyEra::Tagged).unwrap());
        });
        group.bench_function(algo.label(), |bencher| {
            bencher.iter(|| hasher.block_hashes(black_box(&tokens), &Extra::default(), KeyEra::Tagged).unwrap());
        });
    }
    group.finish();
}

criterion_group!(benches, names, inventory);
criterion_main!(benches);

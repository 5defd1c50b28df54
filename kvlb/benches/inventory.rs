//! How fast the index stores and answers, and what it costs in memory, each beside its target.
//!
//! Two shapes. `chains`: 200 prefix groups on 16 slots, each chain 64 shared and 64 own blocks, the shared prefix on every
//! slot, own blocks on one; a query is one chain of 128. `fleet`: a million distinct blocks on 32 slots, six or seven
//! holders each; a query is 512 blocks. Beside both stands a hash map from names to slots that is asked for every block:
//! figures of one run can be compared with each other, those of two runs on a busy machine can not.
//!
//! Then what a replay brings after a start, 2.3 million blocks of seven engines, with queries meanwhile; and the blocks of
//! `chains` from engines whose names are of no use.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a bench fails by panicking, and prints")]

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use kvlb::contract::events::{Attention, Batch, Event, Removed, Stored, WireHash};
use kvlb::contract::{BlockHash, BlockSize, EventSeq, HashAlgo, NoneSeed, Rehash, TokenId};
use kvlb::fleet::Keying;
use kvlb::state::index::{Index, IndexConfig, SlotId};
use kvlb::state::kv::{EndpointKv, Naming};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use tikv_jemallocator::Jemalloc;

/// Counts the bytes in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

#[expect(unsafe_code, reason = "an allocator that counts is the only way to see what an index costs")]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise about the layout is passed on.
        unsafe { Jemalloc.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the block came from `Jemalloc` with this layout.
        unsafe { Jemalloc.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() {
    // `cargo test` runs benches too, without this flag: then there is nothing to do.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    machine();
    chains();
    fleet();
    seven_engines();
    names_of_ours();
}

/// Prints a figure, beside what it is to be.
fn figure(what: &str, value: f64, unit: &str, target: Option<Target>) {
    let judged = target.map(|target| {
        let (word, bound, met) = match target {
            Target::AtMost(bound) => ("at most", bound, value <= bound),
            Target::AtLeast(bound) => ("at least", bound, value >= bound),
        };
        format!("target {word} {bound}: {}", if met { "met" } else { "MISSED" })
    });
    println!("  {what:<54} {value:>9.2} {unit:<17} {}", judged.unwrap_or_default());
}

#[derive(Clone, Copy)]
enum Target {
    AtMost(f64),
    AtLeast(f64),
}

use Target::{AtLeast, AtMost};

#[expect(clippy::cast_precision_loss, reason = "counts are below 2^52")]
fn float(count: usize) -> f64 {
    count as f64
}

fn megabytes_since(before: usize) -> f64 {
    (float(in_use()) - float(before)) / 1e6
}

/// What the allocator gave, and what is resident in huge pages, which an index has from the system itself.
fn in_use() -> usize {
    IN_USE.load(Ordering::Relaxed) + in_huge_pages()
}

/// Resident memory of the mappings that huge pages were asked for.
fn in_huge_pages() -> usize {
    let (mut resident, mut sum) = (0, 0);
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Rss:") => resident = words.next().unwrap().parse().unwrap(),
            Some("VmFlags:") if words.any(|flag| flag == "hg") => sum += resident,
            _ => {}
        }
    }
    sum << 10
}

fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "a bench reads the clock")]
    Instant::now()
}

/// What this thread has cost so far: on a busy machine the clock says little.
fn cpu_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).unwrap();
    let times = [usage.user_time(), usage.system_time()];
    times.map(|time| Duration::from_micros(u64::try_from(time.num_microseconds()).unwrap())).into_iter().sum()
}

/// How often the machine stops a thread that does nothing but read the clock, and for how long. Where one query in a
/// hundred is stopped, its 99th percentile is the machine's.
fn machine() {
    let (start, mut last, mut gaps) = (now(), now(), Vec::new());
    while last - start < Duration::from_secs(1) {
        let time = now();
        if time - last > Duration::from_nanos(700) {
            gaps.push(time - last);
        }
        last = time;
    }
    gaps.sort_unstable();
    println!("this machine, in a second in which a thread reads the clock");
    figure("interruptions of more than 0.7 us", float(gaps.len()), "", None);
    let median = gaps.get(gaps.len() / 2).copied().unwrap_or_default();
    figure("  their median", median.as_secs_f64() * 1e6, "us", None);
}

/// Does something and says what it cost this thread, in seconds.
fn cpu_seconds<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = cpu_time();
    let done = work();
    (done, cpu_time().saturating_sub(start).as_secs_f64())
}

/// A stream of numbers that look like digests.
fn digest(number: u64) -> BlockHash {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    BlockHash(bits ^ bits >> 31)
}

fn stored(names: &[BlockHash], parent: Option<BlockHash>) -> Stored {
    let hashes = names.iter().map(|&name| name.into()).collect();
    let parent = parent.map(WireHash::from);
    Stored { hashes, parent, attention: Attention::Full, group: Some(0), ..Stored::default() }
}

fn removed(hash: WireHash) -> Event {
    Event::Removed(Removed { hashes: vec![hash], group: Some(0), ..Removed::default() })
}

/// What each slot announces, in order, and the prompts that are asked for.
struct Load {
    stored: Vec<(usize, Stored)>,
    queries: Vec<Vec<BlockHash>>,
    slots: usize,
}

impl Load {
    fn chains() -> Self {
        let (mut all, mut queries) = (Vec::new(), Vec::new());
        for group in 0..200_u64 {
            let shared: Vec<_> = (0..64).map(|block| digest(group << 40 | block)).collect();
            all.extend((0..16).map(|slot| (slot, stored(&shared, None))));
            for chain in 1..=150 {
                let own: Vec<_> = (0..64).map(|block| digest(group << 40 | chain << 8 | block)).collect();
                let slot = usize::try_from((group + chain) % 16).unwrap();
                all.push((slot, stored(&own, shared.last().copied())));
                queries.push([shared.clone(), own].concat());
            }
        }
        Self { stored: all, queries, slots: 16 }
    }

    fn fleet() -> Self {
        let (mut all, mut queries) = (Vec::new(), Vec::new());
        for chain in 0..1954_u64 {
            let names: Vec<_> = (0..512).map(|block| digest(chain << 16 | block)).collect();
            // Holders have different lengths of the chain, so that their answers change on the way.
            for holder in 0..13 {
                let slot = usize::try_from((chain * 7 + holder * 5) % 32).unwrap();
                let length = 512 * usize::try_from(holder + 1).unwrap() / 13;
                all.push((slot, stored(&names[..length], None)));
            }
            queries.push(names);
        }
        Self { stored: all, queries, slots: 32 }
    }

    fn memberships(&self) -> usize {
        self.stored.iter().map(|(_, stored)| stored.hashes.len()).sum()
    }

    fn distinct(&self) -> usize {
        let mut distinct: Vec<_> = self.queries.concat();
        distinct.sort_unstable();
        distinct.dedup();
        distinct.len()
    }

    fn events(&self) -> Vec<(usize, Event)> {
        self.stored.iter().map(|(slot, stored)| (*slot, Event::Stored(stored.clone()))).collect()
    }

    fn fill(&self, events: &[(usize, Event)]) -> (Index, Vec<SlotId>) {
        let index = Index::new(IndexConfig::default());
        let slots: Vec<_> = (0..self.slots).map(|_| index.add_slot().unwrap()).collect();
        for (slot, event) in events {
            index.apply(slots[*slot], event);
        }
        (index, slots)
    }

    /// The fastest of a few fillings, in millions of memberships a second of CPU time.
    fn ingest_rate(&self, events: &[(usize, Event)]) -> f64 {
        let fastest = (0..5).map(|_| cpu_seconds(|| self.fill(events)).1).fold(f64::INFINITY, f64::min);
        float(self.memberships()) / fastest / 1e6
    }

    /// A prompt whose names were just made: they are at hand, the index is not.
    fn query(&self, round: usize) -> Vec<BlockHash> {
        black_box(self.queries[round * 7919 % self.queries.len()].clone())
    }
}

/// How long queries take, in microseconds.
struct Times {
    median: f64,
    most: f64,
    /// The 99th percentile of the fastest of each query's few turns: what a machine at rest shows.
    most_at_rest: f64,
}

/// Turns of each query.
const TURNS: usize = 6;

/// Asks many different queries, each several times, with all others in between.
fn query_times(queries: usize, query: impl Fn(usize) -> Vec<BlockHash>, mut ask: impl FnMut(&[BlockHash])) -> Times {
    let (mut times, mut fastest) = (Vec::new(), vec![Duration::MAX; queries]);
    for _ in 0..TURNS {
        for (number, fastest) in fastest.iter_mut().enumerate() {
            let names = query(number);
            let start = now();
            ask(&names);
            let time = start.elapsed();
            times.push(time);
            *fastest = time.min(*fastest);
        }
    }
    let percentile = |times: &mut Vec<Duration>, percent: usize| {
        times.sort_unstable();
        times[times.len() * percent / 100].as_secs_f64() * 1e6
    };
    Times {
        median: percentile(&mut times, 50),
        most: percentile(&mut times, 99),
        most_at_rest: percentile(&mut fastest, 99),
    }
}

/// Names to slots, asked for every block: what the index is compared with.
struct PlainMap(HashMap<BlockHash, u64>);

impl PlainMap {
    fn fill(load: &Load) -> Self {
        let mut map = HashMap::new();
        for (slot, stored) in &load.stored {
            stored.hashes.iter().for_each(|hash| *map.entry(hash.name).or_insert(0) |= 1 << slot);
        }
        Self(map)
    }

    fn counts(&self, names: &[BlockHash]) -> [u32; 64] {
        let mut counts = [0; 64];
        for mut slots in names.iter().filter_map(|name| self.0.get(name)).copied() {
            while slots != 0 {
                counts[slots.trailing_zeros() as usize] += 1;
                slots &= slots - 1;
            }
        }
        counts
    }
}

fn queries(load: &Load, index: &Index, targets: [Option<Target>; 2]) {
    let mut overlaps = Vec::new();
    let mut ask = |names: &[BlockHash]| index.overlaps(names, &mut overlaps);
    let times = query_times(20_000, |number| load.query(number), &mut ask);
    figure(&format!("query of {} blocks: median", load.queries[0].len()), times.median, "us", targets[0]);
    figure("  99th percentile", times.most, "us", targets[1]);
    figure("  99th percentile of the fastest of 6 turns", times.most_at_rest, "us", targets[1]);
    figure(
        "  the same one again and again: median",
        query_times(20_000, |_| load.query(7), &mut ask).median,
        "us",
        None,
    );
    let unheld = |number: usize| (0..128).map(|block| digest(1 << 60 | (number as u64) << 8 | block)).collect();
    figure("query of 128 blocks that nobody holds: median", query_times(5000, unheld, &mut ask).median, "us", None);
    let map = PlainMap::fill(load);
    let count = |names: &[BlockHash]| {
        black_box(map.counts(names));
    };
    let plain = query_times(5000, |number| load.query(number), count);
    figure("a hash map asked for every block: median", plain.median, "us", None);
    figure("  as many times that of the index", plain.median / times.median, "", None);
}

fn chains() {
    let load = Load::chains();
    let (events, memberships) = (load.events(), load.memberships());
    println!("chains: {memberships} memberships of {} blocks on {} slots", load.distinct(), load.slots);
    figure("ingest into one writer", load.ingest_rate(&events), "M memberships/s", Some(AtLeast(5.0)));
    let before = in_use();
    let (index, slots) = load.fill(&events);
    figure("memory", 1e6 * megabytes_since(before) / float(memberships), "B/membership", Some(AtMost(80.0)));
    queries(&load, &index, [Some(AtMost(1.5)), Some(AtMost(2.5))]);
    let ((), seconds) = cpu_seconds(|| {
        for (slot, stored) in &load.stored {
            for &hash in stored.hashes.iter().rev() {
                index.apply(slots[*slot], &removed(hash));
            }
        }
    });
    figure("removals, one an event", float(memberships) / seconds / 1e6, "M memberships/s", None);
    figure("memory with what was removed remembered", megabytes_since(before), "MB", None);
    for slot in slots {
        index.remove_slot(slot);
    }
    figure("memory after all is removed", megabytes_since(before), "MB", Some(AtMost(1.0)));
}

fn fleet() {
    let load = Load::fleet();
    let (events, distinct) = (load.events(), load.distinct());
    println!("fleet: {} memberships of {distinct} blocks on {} slots", load.memberships(), load.slots);
    figure("ingest into one writer", load.ingest_rate(&events), "M memberships/s", Some(AtLeast(5.0)));
    let before = in_use();
    let (index, _) = load.fill(&events);
    figure("memory", 1e6 * megabytes_since(before) / float(distinct), "B/distinct block", Some(AtMost(45.0)));
    queries(&load, &index, [Some(AtMost(10.0)), None]);
}

fn seven_engines() {
    println!("seven engines: 2.3 M blocks, and queries meanwhile");
    let index = Index::new(IndexConfig::default());
    let slots: Vec<_> = (0..7).map(|_| index.add_slot().unwrap()).collect();
    let names =
        |slot: u64, chain: u64| (0..128).map(|block| digest(slot << 50 | chain << 10 | block)).collect::<Vec<_>>();
    let done = AtomicBool::new(false);
    let ask = || {
        let (mut slowest, mut asked, mut overlaps) = (Duration::ZERO, 0, Vec::new());
        while !done.load(Ordering::Relaxed) {
            let query = names(asked % 7, asked / 7 % 100);
            let start = now();
            index.overlaps(&query, &mut overlaps);
            slowest = slowest.max(start.elapsed());
            asked += 1;
            std::thread::sleep(Duration::from_micros(200));
        }
        (slowest, asked)
    };
    let (seconds, (slowest, asked)) = std::thread::scope(|scope| {
        let asking = scope.spawn(ask);
        let ((), seconds) = cpu_seconds(|| {
            for chain in 0..2_300_000 / 7 / 128 {
                for (number, &slot) in (0..).zip(&slots) {
                    index.apply(slot, &Event::Stored(stored(&names(number, chain), None)));
                }
            }
        });
        done.store(true, Ordering::Relaxed);
        (seconds, asking.join().unwrap())
    });
    figure("stored in, of CPU time", seconds, "s", Some(AtMost(2.0)));
    figure("queries answered meanwhile", float(usize::try_from(asked).unwrap()), "", None);
    figure("  the slowest, by the clock", slowest.as_secs_f64() * 1e6, "us", None);
}

/// Where an engine's names are of no use, each of its blocks has a name of ours and an alias.
fn names_of_ours() {
    let load = Load::chains();
    println!("chains, in names of ours");
    let naming = Naming {
        algo: HashAlgo::Sha256Cbor,
        seed: NoneSeed::Unset,
        block_size: BlockSize::new(16).unwrap(),
        keying: Keying::Rehash,
        rehash: Rehash::new(7),
    };
    let before = in_use();
    let index = Arc::new(Index::new(IndexConfig::default()));
    let endpoints: Vec<_> = (0..load.slots).map(|_| EndpointKv::new(Arc::clone(&index), &naming)).collect();
    let tokens = |hash: &WireHash| {
        (0..16).map(|at| TokenId(u32::try_from(hash.name.0 >> at & 0xffff).unwrap())).collect::<Vec<_>>()
    };
    let ((), seconds) = cpu_seconds(|| {
        for (seq, (slot, stored)) in (0..).zip(&load.stored) {
            let tokens = stored.hashes.iter().flat_map(tokens).collect();
            let event = Event::Stored(Stored { tokens, block_size: 16, ..stored.clone() });
            let batch =
                Batch { ts: 0.0, dp_rank: Some(0), events: vec![event], undecodable: 0, unknown: 0, skipped: 0 };
            endpoints[*slot].apply(&endpoints[*slot].feed(0), EventSeq(seq), &batch, now());
        }
    });
    let memberships = load.memberships();
    assert_eq!(endpoints.iter().map(EndpointKv::blocks).sum::<usize>(), memberships, "every block has a name");
    figure("ingest, with the making of its events", float(memberships) / seconds / 1e6, "M memberships/s", None);
    figure("memory", 1e6 * megabytes_since(before) / float(memberships), "B/membership", Some(AtMost(130.0)));
    drop(endpoints);
    figure("memory after all is removed", megabytes_since(before), "MB", Some(AtMost(1.0)));
}

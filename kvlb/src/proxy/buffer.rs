//! Memory for bytes on their way through.
//!
//! A [`Chunk`] is a block of memory with a filled range. Blocks come in a few sizes and, on a data thread, go back to
//! that thread's shelf instead of the heap: fresh heap memory for large bodies costs a page fault every 4 KiB, which was
//! measured at more than half of a 64 KB request's whole cost. Nothing is held for an idle connection.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

/// Sizes of pooled blocks. The larger ones leave 4 KiB beside a round body for its head and framing.
const CLASSES: [usize; 5] = [4 << 10, 16 << 10, 68 << 10, 260 << 10, 1028 << 10];

/// How many free blocks of each size a shelf keeps: about 4 MiB a size, 8 MiB of the largest, 25 MiB a thread.
const KEPT: [usize; CLASSES.len()] = [1024, 256, 64, 16, 8];

/// A small block: heads, events, ordinary answers.
pub(super) const SMALL: usize = CLASSES[0];
/// A medium block: what a client's first read may take.
pub(super) const MEDIUM: usize = CLASSES[1];
/// A large block: bodies on their way through; also what one slow reader can make us hold.
pub(super) const LARGE: usize = CLASSES[2];

/// Bytes that are moved at a time. Memory that is touched for the first time costs a page fault every 4 KiB, which makes
/// it about 1 ms for 1 MiB on a small virtual machine: a data thread is to look after others more often than that.
pub(super) const SLICE: usize = CLASSES[3];

thread_local! {
    static SHELF: RefCell<Option<Shelf>> = const { RefCell::new(None) };
}

/// Shelves that are counted apart; more share their counts.
const ACCOUNTS: u16 = 1024;
/// The account of threads without a shelf.
const NO_ACCOUNT: u16 = ACCOUNTS;

/// Bytes in use that were taken from one shelf's thread. On a cache line of its own: each has one busy writer.
#[derive(Debug)]
#[repr(align(64))]
struct Account(AtomicUsize);

static IN_USE: [Account; ACCOUNTS as usize + 1] = [const { Account(AtomicUsize::new(0)) }; ACCOUNTS as usize + 1];

/// A thread's free blocks.
struct Shelf {
    account: u16,
    free: [Vec<Box<[u8]>>; CLASSES.len()],
}

/// Gives the calling thread a shelf.
pub(super) fn open_shelf() {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    SHELF.with_borrow_mut(|shelf| {
        shelf.get_or_insert_with(|| {
            let account = NEXT.fetch_add(1, Ordering::Relaxed) % ACCOUNTS;
            Shelf { account, free: [const { Vec::new() }; CLASSES.len()] }
        });
    });
}

/// Empties the calling thread's shelf and takes it away.
pub(super) fn close_shelf() {
    SHELF.with_borrow_mut(|shelf| *shelf = None);
}

/// Bytes of free blocks on the calling thread's shelf.
pub(super) fn bytes_free() -> usize {
    SHELF.with_borrow(|shelf| {
        shelf.iter().flat_map(|shelf| &shelf.free).flat_map(|blocks| blocks.iter().map(|block| block.len())).sum()
    })
}

/// Bytes of blocks that were taken on the calling thread and are still in use, wherever they are now.
pub(super) fn bytes_in_use() -> usize {
    let account = SHELF.with_borrow(|shelf| shelf.as_ref().map_or(NO_ACCOUNT, |shelf| shelf.account));
    IN_USE[usize::from(account)].0.load(Ordering::Relaxed)
}

/// A block of at least `size` bytes, from the shelf where it has one, and the account it is on.
///
/// Always zeroed when new: large blocks come as untouched pages from the kernel, and no byte is ever uninitialised.
fn take(size: usize) -> (Box<[u8]>, u16) {
    let class = CLASSES.iter().position(|class| size <= *class);
    let (shelved, account) = SHELF.with_borrow_mut(|shelf| match (shelf, class) {
        (Some(shelf), Some(class)) => (shelf.free[class].pop(), shelf.account),
        (Some(shelf), None) => (None, shelf.account),
        (None, _) => (None, NO_ACCOUNT),
    });
    let block = shelved.unwrap_or_else(|| vec![0; class.map_or(size, |class| CLASSES[class])].into_boxed_slice());
    IN_USE[usize::from(account)].0.fetch_add(block.len(), Ordering::Relaxed);
    (block, account)
}

/// Puts a block on the shelf of the calling thread, where there is one and it has room.
fn give_back(block: Box<[u8]>, account: u16) {
    IN_USE[usize::from(account)].0.fetch_sub(block.len(), Ordering::Relaxed);
    let Some(class) = CLASSES.iter().position(|class| block.len() == *class) else { return };
    // A thread that is ending has no shelf any more.
    let _kept = SHELF.try_with(|shelf| {
        if let Some(shelf) = shelf.borrow_mut().as_mut()
            && shelf.free[class].len() < KEPT[class]
        {
            shelf.free[class].push(block);
        }
    });
}

/// A block of memory, and the range of it that is filled.
pub struct Chunk {
    block: Box<[u8]>,
    account: u16,
    start: usize,
    end: usize,
}

impl Chunk {
    /// No memory at all.
    pub fn none() -> Self {
        Self { block: Box::default(), account: NO_ACCOUNT, start: 0, end: 0 }
    }

    /// An empty chunk with room for `capacity` bytes, and for `front` more before them.
    pub fn with_room(front: usize, capacity: usize) -> Self {
        let (block, account) = take(front + capacity);
        Self { block, account, start: front, end: front }
    }

    /// A chunk that holds a copy of `bytes`, with room for `front` more before them.
    pub fn copy_of(front: usize, bytes: &[u8]) -> Self {
        let mut chunk = Self::with_room(front, bytes.len());
        chunk.append(bytes);
        chunk
    }

    /// What is filled.
    pub fn bytes(&self) -> &[u8] {
        &self.block[self.start..self.end]
    }

    /// What is filled, to be changed in place.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.block[self.start..self.end]
    }

    /// Number of filled bytes.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether nothing is filled.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Bytes of the whole block.
    pub(super) fn capacity(&self) -> usize {
        self.block.len()
    }

    /// Bytes that still fit behind the filled ones.
    pub fn spare(&self) -> usize {
        self.block.len() - self.end
    }

    /// As much of the room behind what is filled as one read may take: see [`SLICE`].
    pub(super) fn slice_mut(&mut self) -> &mut [u8] {
        let room = self.spare().min(SLICE);
        &mut self.block[self.end..self.end + room]
    }

    /// Takes `filled` bytes of the room as filled.
    pub(super) fn advance(&mut self, filled: usize) {
        debug_assert!(filled <= self.spare());
        self.end = (self.end + filled).min(self.block.len());
    }

    /// Drops `count` bytes at the front.
    pub(super) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.len());
        self.start = (self.start + count).min(self.end);
    }

    /// Keeps the first `len` bytes.
    pub(super) fn truncate(&mut self, len: usize) {
        self.end = self.end.min(self.start + len);
    }

    /// Forgets the filled bytes and leaves room for `front` bytes before what comes next.
    pub(super) fn clear(&mut self, front: usize) {
        self.start = front.min(self.block.len());
        self.end = self.start;
    }

    /// Adds `bytes` behind the filled ones, in a larger block where they do not fit.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.reserve(bytes.len());
        self.block[self.end..self.end + bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
    }

    /// Puts `bytes` before the filled ones; everything moves to another block where the front has no room.
    pub(super) fn prepend(&mut self, bytes: &[u8]) {
        if self.start < bytes.len() {
            let mut moved = Self::with_room(bytes.len(), self.len());
            moved.append(self.bytes());
            *self = moved;
        }
        self.start -= bytes.len();
        self.block[self.start..self.start + bytes.len()].copy_from_slice(bytes);
    }

    /// Makes room for `more` bytes behind the filled ones; the front room is kept.
    pub(super) fn reserve(&mut self, more: usize) {
        if self.spare() >= more {
            return;
        }
        let mut larger = self.larger(more);
        larger.append(self.bytes());
        *self = larger;
    }

    /// An empty chunk with the same room in front, and with room for what this one holds and `more`.
    pub(super) fn larger(&self, more: usize) -> Self {
        let mut wanted = self.len() + more;
        if wanted > CLASSES[CLASSES.len() - 1] {
            // Beyond the classes growth must double, or a body that comes in pieces would be copied for each of them.
            wanted = wanted.max(2 * self.block.len());
        }
        Self::with_room(self.start, wanted)
    }

    /// Makes the capacity for `total` filled bytes in all.
    pub(super) fn reserve_total(&mut self, total: usize) {
        self.reserve(total.saturating_sub(self.len()));
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !self.block.is_empty() {
            give_back(std::mem::take(&mut self.block), self.account);
        }
    }
}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunk").field("len", &self.len()).field("block", &self.block.len()).finish_non_exhaustive()
    }
}

/// What all request bodies together may hold of memory.
#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    used: AtomicUsize,
}

impl Budget {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0) })
    }

    /// Bytes held now.
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// An empty lease.
    pub(super) fn lease(self: &Arc<Self>) -> Lease {
        Lease { budget: Arc::clone(self), held: 0 }
    }
}

/// One request's part of the budget, given back when dropped.
#[derive(Debug)]
pub(super) struct Lease {
    budget: Arc<Budget>,
    held: usize,
}

impl Lease {
    /// Holds at least `total` bytes, or says that the budget has no room for that and keeps what it has.
    pub(super) fn hold(&mut self, total: usize) -> bool {
        let more = total.saturating_sub(self.held);
        if more == 0 {
            return true;
        }
        let before = self.budget.used.fetch_add(more, Ordering::Relaxed);
        if before.saturating_add(more) > self.budget.limit {
            self.budget.used.fetch_sub(more, Ordering::Relaxed);
            return false;
        }
        self.held += more;
        true
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.held, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_keeps_its_bytes_when_it_grows_either_way() {
        let mut chunk = Chunk::with_room(10, 20);
        chunk.append(b"body");
        chunk.prepend(b"head ");
        assert_eq!(chunk.bytes(), b"head body");
        chunk.prepend(&[b'x'; 3000]);
        chunk.append(&[b'y'; 9000]);
        assert_eq!(chunk.len(), 3000 + 9 + 9000);
        assert_eq!(&chunk.bytes()[2999..3010], b"xhead bodyy");
    }

    #[test]
    fn growing_keeps_the_room_in_front() {
        let mut chunk = Chunk::with_room(512, 3000);
        chunk.append(&[b'a'; 3000]);
        chunk.reserve_total(60_000);
        assert!(chunk.spare() >= 57_000);
        let block = chunk.block.len();
        chunk.prepend(&[b'h'; 512]);
        assert_eq!(chunk.block.len(), block, "the head fits in front without another block");
    }

    #[test]
    fn blocks_return_to_the_shelf_of_their_thread() {
        open_shelf();
        let chunk = Chunk::with_room(0, 100);
        let address = chunk.block.as_ptr();
        drop(chunk);
        assert_eq!(bytes_free(), SMALL);
        let again = Chunk::with_room(0, SMALL);
        assert_eq!(again.block.as_ptr(), address);
        assert_eq!(bytes_free(), 0);
        drop(again);
        close_shelf();
        assert_eq!(bytes_free(), 0);
    }

    #[test]
    fn a_shelf_is_bounded_and_odd_sizes_are_not_kept() {
        open_shelf();
        let many: Vec<_> = (0..KEPT[4] + 3).map(|_| Chunk::with_room(0, CLASSES[4])).collect();
        drop(many);
        assert_eq!(bytes_free(), KEPT[4] * CLASSES[4]);
        drop(Chunk::with_room(0, 5 << 20));
        assert_eq!(bytes_free(), KEPT[4] * CLASSES[4]);
        close_shelf();
    }

    #[test]
    fn a_block_is_counted_where_it_was_taken_wherever_it_goes() {
        open_shelf();
        let (here, there) = (Chunk::with_room(0, LARGE), Chunk::with_room(0, 2 << 20));
        assert_eq!(bytes_in_use(), LARGE + (2 << 20));
        std::thread::spawn(move || drop(there)).join().unwrap();
        assert_eq!(bytes_in_use(), LARGE);
        drop(here);
        assert_eq!((bytes_in_use(), bytes_free()), (0, LARGE));
        close_shelf();
    }

    #[test]
    fn a_budget_is_never_exceeded_and_returns_to_zero() {
        let budget = Budget::new(100);
        let mut first = budget.lease();
        assert!(first.hold(60) && first.hold(60));
        let mut second = budget.lease();
        assert!(!second.hold(41));
        assert!(second.hold(40));
        assert_eq!(budget.used(), 100);
        drop(first);
        assert!(second.hold(100));
        drop(second);
        assert_eq!(budget.used(), 0);
    }
}

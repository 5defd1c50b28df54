//! Memory for bytes on their way through.
//!
//! A [`Chunk`] is a block of memory with a filled range. Blocks come in a few sizes and, on a data thread, go back to
//! that thread's shelf instead of the heap: fresh heap memory for large bodies costs a page fault every 4 KiB, which was
//! measured at more than half of a 64 KB request's whole cost. Nothing is held for an idle connection.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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

thread_local! {
    static SHELF: RefCell<Option<Shelf>> = const { RefCell::new(None) };
}

/// Bytes of all blocks that exist in the process, on shelves or in use.
static BLOCK_BYTES: AtomicUsize = AtomicUsize::new(0);

/// A thread's free blocks.
struct Shelf {
    free: [Vec<Box<[u8]>>; CLASSES.len()],
}

/// Gives the calling thread a shelf.
pub(super) fn open_shelf() {
    SHELF.with_borrow_mut(|shelf| {
        shelf.get_or_insert_with(|| Shelf { free: [const { Vec::new() }; CLASSES.len()] });
    });
}

/// Empties the calling thread's shelf and takes it away.
pub(super) fn close_shelf() {
    let shelf = SHELF.with_borrow_mut(Option::take);
    for block in shelf.into_iter().flat_map(|shelf| shelf.free.into_iter().flatten()) {
        discard(block);
    }
}

/// Bytes of free blocks on the calling thread's shelf.
pub(super) fn shelved_bytes() -> usize {
    SHELF.with_borrow(|shelf| {
        shelf.iter().flat_map(|shelf| &shelf.free).flat_map(|blocks| blocks.iter().map(|block| block.len())).sum()
    })
}

/// Bytes of all blocks of the process, in use or on shelves.
pub(super) fn block_bytes() -> usize {
    BLOCK_BYTES.load(Ordering::Relaxed)
}

/// A block of at least `size` bytes, from the shelf where it has one.
fn take(size: usize) -> Box<[u8]> {
    let Some(class) = CLASSES.iter().position(|class| size <= *class) else { return allocate(size) };
    let shelved = SHELF.with_borrow_mut(|shelf| shelf.as_mut().and_then(|shelf| shelf.free[class].pop()));
    shelved.unwrap_or_else(|| allocate(CLASSES[class]))
}

/// Zeroed memory: large blocks come as untouched pages from the kernel, and no byte is ever uninitialised.
fn allocate(size: usize) -> Box<[u8]> {
    BLOCK_BYTES.fetch_add(size, Ordering::Relaxed);
    vec![0; size].into_boxed_slice()
}

fn discard(block: Box<[u8]>) {
    BLOCK_BYTES.fetch_sub(block.len(), Ordering::Relaxed);
    drop(block);
}

fn give_back(block: Box<[u8]>) {
    let Some(class) = CLASSES.iter().position(|class| block.len() == *class) else { return discard(block) };
    // A thread that is ending has no shelf any more.
    let refused = SHELF.try_with(|shelf| match shelf.borrow_mut().as_mut() {
        Some(shelf) if shelf.free[class].len() < KEPT[class] => {
            shelf.free[class].push(block);
            None
        }
        _ => Some(block),
    });
    if let Ok(Some(block)) = refused {
        discard(block);
    }
}

/// A block of memory, and the range of it that is filled.
pub struct Chunk {
    block: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Chunk {
    /// No memory at all.
    pub fn none() -> Self {
        Self { block: Box::default(), start: 0, end: 0 }
    }

    /// An empty chunk with room for `capacity` bytes, and for `front` more before them.
    pub fn with_room(front: usize, capacity: usize) -> Self {
        Self { block: take(front + capacity), start: front, end: front }
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

    /// The room behind the filled bytes.
    pub(super) fn spare_mut(&mut self) -> &mut [u8] {
        &mut self.block[self.end..]
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
        let filled = self.start..self.end;
        let mut larger = Self::with_room(self.start, filled.len() + more);
        larger.block[filled.clone()].copy_from_slice(&self.block[filled.clone()]);
        larger.end = filled.end;
        *self = larger;
    }

    /// Makes the capacity for `total` filled bytes in all.
    pub(super) fn reserve_total(&mut self, total: usize) {
        self.reserve(total.saturating_sub(self.len()));
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !self.block.is_empty() {
            give_back(std::mem::take(&mut self.block));
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
        assert_eq!(shelved_bytes(), SMALL);
        let again = Chunk::with_room(0, SMALL);
        assert_eq!(again.block.as_ptr(), address);
        assert_eq!(shelved_bytes(), 0);
        drop(again);
        close_shelf();
        assert_eq!(shelved_bytes(), 0);
    }

    #[test]
    fn a_shelf_is_bounded_and_odd_sizes_are_not_kept() {
        open_shelf();
        let many: Vec<_> = (0..KEPT[4] + 3).map(|_| Chunk::with_room(0, CLASSES[4])).collect();
        drop(many);
        assert_eq!(shelved_bytes(), KEPT[4] * CLASSES[4]);
        drop(Chunk::with_room(0, 5 << 20));
        assert_eq!(shelved_bytes(), KEPT[4] * CLASSES[4]);
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

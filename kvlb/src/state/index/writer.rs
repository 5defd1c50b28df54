//! The index as its one writer sees it: what each event changes.

use super::arena::{Arena, HELD, Moved, Place, REMOVED, TOGETHER, View};
use super::names::Mixer;
use super::{Applied, IndexConfig, NAMES_PER_GPU_BLOCK, SLOTS_MAX, SlotId, Tiers};
use crate::contract::BlockHash;
use crate::contract::events::{Event, Removed, Stored};
use crate::inventory::{Book, Disproof, Limits, Place as Standing, Removal, Storing, bits};

/// Ways in which a writer can be wrong. The tests are to notice each.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Defect {
    #[default]
    None,
    /// A block with two copies is gone with the first removal.
    ForgetsDuplicates,
    /// Copies in any medium count.
    IgnoresMedium,
    /// Copies of any group count.
    IgnoresGroup,
    /// A cleared slot keeps what it held.
    MissesClear,
    /// A new slot holds what its predecessor held.
    KeepsOldSlot,
    /// Names are lost when their cells move.
    LosesMoved,
    /// Removed blocks are as if they had never been announced.
    ForgetsRemovals,
}

#[cfg(test)]
impl Defect {
    pub(super) const ALL: [Self; 7] = [
        Self::ForgetsDuplicates,
        Self::IgnoresMedium,
        Self::IgnoresGroup,
        Self::MissesClear,
        Self::KeepsOldSlot,
        Self::LosesMoved,
        Self::ForgetsRemovals,
    ];
}

#[derive(Debug)]
pub(super) struct Writer {
    pub(super) config: IndexConfig,
    pub(super) arena: Arena,
    /// Slots in use, 64 a word.
    pub(super) slots: Vec<u64>,
    tiers: Tiers,
    books: Vec<Option<Box<Book>>>,
    #[cfg(test)]
    pub(super) defect: Defect,
}

impl Writer {
    pub(super) fn new(config: IndexConfig, mixer: Mixer, tiers: Tiers) -> Self {
        Self {
            config,
            arena: Arena::new(mixer, tiers.layers()),
            slots: vec![0],
            tiers,
            books: Vec::new(),
            #[cfg(test)]
            defect: Defect::None,
        }
    }

    #[cfg(test)]
    fn has(&self, defect: Defect) -> bool {
        self.defect == defect
    }

    pub(super) fn add_slot(&mut self) -> Option<SlotId> {
        let free = (0..SLOTS_MAX).find(|&index| self.books.get(index).is_none_or(Option::is_none))?;
        let slot = SlotId::new(free);
        if slot.word() >= self.slots.len() {
            self.slots.resize(slot.word() + 1, 0);
            self.arena.widen(self.slots.len());
        }
        let names = self.config.max_blocks.unwrap_or(self.config.names_max).max(1);
        let book = Book::new(Limits { names, forgotten: self.config.removed_max, gpu_blocks: None });
        if self.books.len() <= free {
            self.books.resize_with(free + 1, || None);
        }
        self.books[free] = Some(Box::new(book));
        self.slots[slot.word()] |= slot.bit();
        Some(slot)
    }

    pub(super) fn remove_slot(&mut self, slot: SlotId) {
        #[cfg(test)]
        if self.has(Defect::KeepsOldSlot) {
            self.books[slot.index()] = None;
            return;
        }
        self.clear(slot);
        self.slots[slot.word()] &= !slot.bit();
        self.books[slot.index()] = None;
    }

    pub(super) fn set_gpu_blocks(&mut self, slot: SlotId, gpu_blocks: u64) {
        let of_engine = usize::try_from(gpu_blocks.saturating_mul(NAMES_PER_GPU_BLOCK)).unwrap_or(usize::MAX);
        let names = self.config.max_blocks.unwrap_or_else(|| of_engine.min(self.config.names_max));
        if let Some(book) = self.book(slot) {
            book.set_names_max(names);
            book.set_gpu_blocks(usize::try_from(gpu_blocks).unwrap_or(usize::MAX));
            self.evict(slot, &mut Vec::new());
            self.disprove(slot, &mut Vec::new());
        }
    }

    fn book(&mut self, slot: SlotId) -> Option<&mut Book> {
        self.books.get_mut(slot.index())?.as_deref_mut()
    }

    /// Blocks that a slot holds.
    pub(super) fn names(&self, slot: SlotId) -> usize {
        self.books[slot.index()].as_ref().map_or(0, |book| book.names())
    }

    pub(super) fn copies(&self, slot: SlotId) -> Vec<(BlockHash, u32, u32)> {
        self.books[slot.index()].as_ref().map_or_else(Vec::new, |book| book.copies())
    }

    pub(super) fn holds_copy(&mut self, slot: SlotId, name: BlockHash) -> bool {
        let place = self.arena.find(self.arena.key(name));
        place.is_some_and(|place| self.holds(place, slot))
            || self.books[slot.index()].as_ref().is_some_and(|book| book.has_other_copies(name))
    }

    fn holds(&self, place: Place, slot: SlotId) -> bool {
        self.arena.slots(place, slot.word(), HELD) & slot.bit() != 0
    }

    /// A view for readers, where the one they have misses something.
    pub(super) fn new_view(&mut self) -> Option<View> {
        self.arena.new_view()
    }

    /// Copies a page's live cells where too many cells are dead; [`Writer::move_over`] is to follow.
    pub(super) fn copy_out(&mut self) -> Option<Moved> {
        self.arena.copy_out()
    }

    pub(super) fn move_over(&mut self, moved: Moved) {
        #[cfg(test)]
        {
            self.arena.loses_moved = self.has(Defect::LosesMoved);
        }
        self.arena.move_over(moved);
    }

    /// Sees to it that memory is where it should be; readers are to be given the new view.
    pub(super) fn rehouse(&mut self) {
        self.arena.rehouse();
    }

    pub(super) fn apply(&mut self, slot: SlotId, event: &Event, dropped: &mut Vec<BlockHash>) -> Applied {
        #[cfg(test)]
        if self.has(Defect::MissesClear) && *event == Event::Cleared {
            return Applied::default();
        }
        match event {
            Event::Stored(stored) => self.store(slot, stored, dropped),
            Event::Removed(removed) => self.remove(slot, removed),
            Event::Cleared => Applied { removed: self.clear(slot), ..Applied::default() },
        }
    }

    fn store(&mut self, slot: SlotId, stored: &Stored, dropped: &mut Vec<BlockHash>) -> Applied {
        let mut applied = Applied::default();
        let Some(mut book) = self.books[slot.index()].take() else { return applied };
        let group = book.scored();
        let mut standing = book.place(stored);
        #[cfg(test)]
        if self.has(Defect::IgnoresMedium)
            || (self.has(Defect::IgnoresGroup) && stored.medium == crate::contract::events::Medium::Gpu)
        {
            standing = Standing::Counts;
        }
        if standing == Standing::Demote {
            self.demote(slot, &mut book);
            standing = Standing::Aside;
        }
        if standing == Standing::Counts && book.names() == 0 {
            for name in book.promote() {
                if let Some(place) = self.arena.take(self.arena.key(name)) {
                    self.hold(slot, place, name, &mut book);
                    applied.stored += 1;
                }
            }
        }
        if book.scored() != group {
            self.retier(slot, &book);
        }
        if standing == Standing::Counts {
            self.store_counted(slot, &mut book, stored, &mut applied);
        } else {
            self.store_aside(slot, &mut book, stored, dropped, &mut applied);
        }
        self.books[slot.index()] = Some(book);
        applied.evicted += self.evict(slot, dropped);
        applied.disproved += self.disprove(slot, dropped);
        applied
    }

    /// The group that counted proves to be a window's.
    fn demote(&mut self, slot: SlotId, book: &mut Book) {
        let held = self.arena.with_bits(slot.word(), HELD, slot.bit());
        book.demote(held.iter().map(|&place| self.arena.name(place)));
        for place in held {
            self.drop_bit(slot, place, book);
        }
    }

    fn store_aside(
        &mut self,
        slot: SlotId,
        book: &mut Book,
        stored: &Stored,
        dropped: &mut Vec<BlockHash>,
        applied: &mut Applied,
    ) {
        let tier = self.tiers.layer(stored.medium);
        for name in stored.hashes.iter().map(|hash| hash.name) {
            if book.store_aside(name, stored) == Storing::Refused {
                applied.evicted += 1;
                dropped.push(name);
            } else if let Some(layer) = tier {
                self.set_tier(slot, name, layer, book.has_in(stored.medium, name));
            }
        }
    }

    /// Notes whether a medium has a block in the group that counts.
    fn set_tier(&mut self, slot: SlotId, name: BlockHash, layer: usize, has: bool) {
        let key = self.arena.key(name);
        let place = if has { self.arena.take(key) } else { self.arena.find(key) };
        if let Some(place) = place {
            self.arena.change(place, slot.word(), layer, slot.bit(), has);
            self.arena.settle(place);
        }
    }

    /// Another group counts: what other media have is that group's.
    fn retier(&mut self, slot: SlotId, book: &Book) {
        for (medium, layer) in self.tiers.media() {
            self.clear_layer(slot, layer);
            for name in book.names_in(medium) {
                self.set_tier(slot, name, layer, true);
            }
        }
    }

    fn clear_layer(&mut self, slot: SlotId, layer: usize) {
        for place in self.arena.with_bits(slot.word(), layer, slot.bit()) {
            self.arena.change(place, slot.word(), layer, slot.bit(), false);
            self.arena.settle(place);
        }
    }

    fn store_counted(&mut self, slot: SlotId, book: &mut Book, stored: &Stored, applied: &mut Applied) {
        for hashes in stored.hashes.chunks(TOGETHER) {
            let mut fetched = false;
            for (number, hash) in hashes.iter().enumerate() {
                if !fetched && self.arena.find_near(self.arena.key(hash.name)).is_none() {
                    self.arena.fetch(hashes[number..].iter().map(|hash| hash.name));
                    fetched = true;
                }
                self.store_one(slot, book, stored, hash.name, applied);
            }
        }
    }

    fn store_one(&mut self, slot: SlotId, book: &mut Book, stored: &Stored, name: BlockHash, applied: &mut Applied) {
        let Some(place) = self.arena.take(self.arena.key(name)) else {
            applied.evicted += 1;
            return;
        };
        if book.store(name, stored, self.holds(place, slot)) == Storing::Held {
            self.hold(slot, place, name, book);
            applied.stored += 1;
        }
    }

    /// Sets a slot's bit.
    fn hold(&mut self, slot: SlotId, place: Place, name: BlockHash, book: &mut Book) {
        if self.arena.is_empty(place, HELD) {
            // Somebody holds it again: its removals are remembered for as long.
            self.recall(place, name, slot, book);
        }
        self.arena.change(place, slot.word(), HELD, slot.bit(), true);
        self.set_removed(place, slot, false);
    }

    /// Takes a name that nobody held out of the queues of those that remember it as removed.
    fn recall(&mut self, place: Place, name: BlockHash, own: SlotId, own_book: &mut Book) {
        for (word, slots) in self.arena.layer(place, REMOVED) {
            for slot in bits(slots).map(|bit| SlotId::new(64 * word + bit)) {
                match &mut self.books[slot.index()] {
                    _ if slot == own => own_book.recall(name),
                    Some(book) => book.recall(name),
                    None => {}
                }
            }
        }
    }

    fn remove(&mut self, slot: SlotId, removed: &Removed) -> Applied {
        let mut applied = Applied::default();
        let Some(mut book) = self.books[slot.index()].take() else { return applied };
        for hash in &removed.hashes {
            let place = self.arena.find(self.arena.key(hash.name));
            let held = place.is_some_and(|place| self.holds(place, slot));
            #[cfg_attr(not(test), expect(unused_mut, reason = "only a defect changes it"))]
            let mut removal = book.remove(hash.name, removed, held);
            #[cfg(test)]
            if self.has(Defect::ForgetsDuplicates) && held && removal == Removal::Fewer {
                removal = Removal::Gone;
            }
            match (removal, place) {
                (Removal::Gone, Some(place)) => {
                    applied.removed += 1;
                    self.set_removed(place, slot, true);
                    self.drop_bit(slot, place, &mut book);
                }
                (Removal::Unknown, _) => applied.unknown += 1,
                _ => {}
            }
            if let Some(layer) = self.tiers.layer(removed.medium) {
                self.set_tier(slot, hash.name, layer, book.has_in(removed.medium, hash.name));
            }
        }
        self.books[slot.index()] = Some(book);
        applied
    }

    /// Takes a slot's bit back.
    fn drop_bit(&mut self, slot: SlotId, place: Place, book: &mut Book) {
        self.arena.change(place, slot.word(), HELD, slot.bit(), false);
        if self.arena.is_empty(place, HELD) {
            self.abandoned(place, slot, book);
        }
        self.arena.settle(place);
    }

    /// Nobody holds a name any more: the slots that removed it remember it for a while.
    fn abandoned(&mut self, place: Place, own: SlotId, own_book: &mut Book) {
        let name = self.arena.name(place);
        // Most often it is one slot, and then the own one.
        let removed: Vec<_> = self.arena.layer(place, REMOVED).collect();
        for (word, slots) in removed {
            for slot in bits(slots).map(|bit| SlotId::new(64 * word + bit)) {
                let forgotten = match &mut self.books[slot.index()] {
                    _ if slot == own => own_book.remember(name),
                    Some(book) => book.remember(name),
                    None => None,
                };
                let place = forgotten.and_then(|forgotten| self.arena.find(self.arena.key(forgotten)));
                if let Some(place) = place {
                    let was = self.arena.change(place, slot.word(), REMOVED, slot.bit(), false);
                    debug_assert!(was & slot.bit() != 0, "what is forgotten was remembered");
                    self.arena.settle(place);
                }
            }
        }
    }

    fn set_removed(&mut self, place: Place, slot: SlotId, removed: bool) {
        #[cfg(test)]
        if self.has(Defect::ForgetsRemovals) {
            return;
        }
        self.arena.change(place, slot.word(), REMOVED, slot.bit(), removed);
    }

    fn evict(&mut self, slot: SlotId, dropped: &mut Vec<BlockHash>) -> u32 {
        let Some(mut book) = self.books[slot.index()].take() else { return 0 };
        if book.wants_order() {
            let mut held: Vec<_> = self.arena.with_bits(slot.word(), HELD, slot.bit());
            // Names stand in the order in which they came, as far as it is known.
            held.sort_unstable();
            book.start_order(held.into_iter().map(|place| self.arena.name(place)));
        }
        let mut evicted = 0;
        while let Some(oldest) = book.evict() {
            if let Some(place) = self.arena.find(self.arena.key(oldest)) {
                self.drop_bit(slot, place, &mut book);
            }
            dropped.push(oldest);
            evicted += 1;
        }
        self.books[slot.index()] = Some(book);
        evicted
    }

    /// Takes back copies where more were announced than the slot's engine can have.
    fn disprove(&mut self, slot: SlotId, dropped: &mut Vec<BlockHash>) -> u32 {
        let Some(mut book) = self.books[slot.index()].take() else { return 0 };
        let mut disproved = 0;
        loop {
            match book.disprove() {
                Disproof::Enough => break,
                Disproof::Stale => continue,
                Disproof::Hidden => {}
                Disproof::Gone(name) => {
                    if let Some(place) = self.arena.find(self.arena.key(name)) {
                        self.set_removed(place, slot, true);
                        self.drop_bit(slot, place, &mut book);
                    }
                    dropped.push(name);
                }
            }
            disproved += 1;
        }
        self.books[slot.index()] = Some(book);
        disproved
    }

    /// Empties a slot; says how many blocks it held.
    fn clear(&mut self, slot: SlotId) -> u32 {
        // A walk through the whole index, which many clearings in a row are not worth.
        if self.book(slot).is_none_or(|book| book.is_blank()) {
            return 0;
        }
        let Some(mut book) = self.books[slot.index()].take() else { return 0 };
        let held = book.names();
        book.clear();
        self.clear_layer(slot, REMOVED);
        for (_, layer) in self.tiers.media() {
            self.clear_layer(slot, layer);
        }
        for place in self.arena.with_bits(slot.word(), HELD, slot.bit()) {
            self.drop_bit(slot, place, &mut book);
        }
        self.books[slot.index()] = Some(book);
        u32::try_from(held).unwrap_or(u32::MAX)
    }
}

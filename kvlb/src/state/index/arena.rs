//! What is known of every name: cells in pages, in the order in which names first came.
//!
//! Engines announce the blocks of a prompt together and in order, so the cells of a prompt lie together and in order too.
//! Whoever looks up a prompt finds the first name by a search, and then reads on from cell to cell for as long as the
//! names agree: one search for each stretch of a prompt that was announced at once, not one for each block.
//!
//! A cell is a key and, for each 64 slots, one word in each *layer*: the slots that hold the block, those that removed it,
//! and one layer more for every other medium that has a weight. A cell given to a name stays that name's until the name is
//! dead, and is never given to another: dead cells go when what is alive in their page is moved on and the page is dropped.
//! So a reader that finds its key reads its name's words, whatever the writer does meanwhile.
//!
//! Readers work on a [`View`]. They see cells change, and learn of pages and tables that came or went with their next
//! view. Cells are moved by copying them to a page that readers have been given, then pointing their entries there; a
//! reader whose view lacks that page finds a cell that is not its name's, and asks for a newer view.

use std::sync::atomic::{AtomicU64, Ordering};

use super::memory::{Home, Words};
use super::names::{Begun, Key, Mixer, SHARDS, Shard, Table};
use crate::contract::BlockHash;

/// Cells in a page: 96 KiB where there are two layers and up to 64 slots. Tests have small ones, which come and go often.
const PAGE_BITS: u32 = if cfg!(test) { 3 } else { 12 };
pub(super) const PAGE: usize = 1 << PAGE_BITS;
/// Words of cells from which on an index lies in huge pages, and goes back at half of it: 8 MiB, beyond which a core that
/// knows where 2048 small pages are has to look up the others.
const LARGE: usize = 256 * PAGE / if cfg!(test) { 16 } else { 1 };
/// Names whose searches wait for memory together: enough to cover its latency, few enough for the stack.
pub(super) const TOGETHER: usize = 64;

/// The layer of the slots that hold a block.
pub(super) const HELD: usize = 0;
/// The layer of the slots that held a block and removed it.
pub(super) const REMOVED: usize = 1;

/// A cell's place: its page and its number there.
pub(super) type Place = u32;

/// A cell, or none where a name is not known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell<'a> {
    words: &'a [AtomicU64],
    layers: usize,
}

impl Cell<'_> {
    const NONE: Self = Self { words: &[], layers: 0 };

    /// Which of the 64 slots of `word` a layer has.
    #[inline]
    pub(super) fn slots(&self, word: usize, layer: usize) -> u64 {
        self.words.get(1 + word * self.layers + layer).map_or(0, |word| word.load(Ordering::Acquire))
    }
}

/// All cells, as readers see them.
#[derive(Clone, Debug)]
pub(super) struct View {
    tables: [Table; SHARDS],
    pages: Vec<Words>,
    mixer: Mixer,
    layers: usize,
    /// Words in a cell.
    stride: usize,
}

impl View {
    #[inline]
    fn words(&self, place: Place) -> Option<&[AtomicU64]> {
        let (page, at) = self.split(place);
        self.pages.get(page)?.get(at..at + self.stride)
    }

    #[inline]
    const fn split(&self, place: Place) -> (usize, usize) {
        ((place >> PAGE_BITS) as usize, (place as usize % PAGE) * self.stride)
    }

    #[inline]
    fn is_at(&self, key: Key, place: Place) -> bool {
        self.words(place).is_some_and(|words| words[0].load(Ordering::Acquire) == key.0)
    }

    /// Passes on the cells of names one by one. Says how many it passed on: fewer than all where a cell may have been
    /// moved to a page that this view lacks, unless nothing newer is to be had (`latest`).
    #[inline]
    pub(super) fn walk(&self, names: &[BlockHash], latest: bool, mut pass: impl FnMut(Cell<'_>)) -> usize {
        let probes = self.probe(names);
        let mut at = 0;
        let mut together = if probes.are_blank() { TOGETHER } else { 1 };
        while at < names.len() {
            let followed = probes.place(at).map_or(0, |place| self.follow(place, &names[at..], &mut pass));
            at += followed;
            if followed > 0 {
                continue;
            }
            let searched = &names[at..names.len().min(at + together)];
            let (passed, last) = self.search(searched, latest, &mut pass);
            at += passed;
            if passed < searched.len() {
                return at;
            }
            let followed = last.map_or(0, |last| self.follow(last + 1, &names[at..], &mut pass));
            at += followed;
            // Where names do not lie together, many are searched for at once.
            together = if followed > 0 { 1 } else { TOGETHER.min(together * 8) };
        }
        at
    }

    /// Looks up a few names spread over a prompt, so that the walk seldom has to wait for a search of its own.
    #[inline]
    fn probe(&self, names: &[BlockHash]) -> Probes {
        let mut probes = Probes { spacing: PROBE_EVERY.max(names.len().div_ceil(PROBES_MAX)), places: [NOWHERE; _] };
        let mut begun = [Begun::default(); PROBES_MAX];
        let keys = || names.iter().step_by(probes.spacing).map(|&name| self.mixer.key(name));
        for (begun, key) in begun.iter_mut().zip(keys()) {
            *begun = self.tables[key.shard()].begin(key);
        }
        let guess = |(&begun, key): (&Begun, Key)| self.tables[key.shard()].guess(key, begun).unwrap_or(NOWHERE);
        let places = begun.iter().zip(keys()).map(guess);
        let places = places.inspect(|&place| {
            // The cells up to the next probe are likely its neighbours: a word of each cache line.
            let (page, at) = self.split(place);
            let Some(words) = self.pages.get(page).and_then(|page| page.get(at..)) else { return };
            for word in words.iter().step_by(8).take(PROBE_EVERY * 3 / 8) {
                std::hint::black_box(word.load(Ordering::Relaxed));
            }
        });
        let mut guessed = [NOWHERE; PROBES_MAX];
        guessed.iter_mut().zip(places).for_each(|(guessed, place)| *guessed = place);
        probes.places = guessed;
        probes
    }

    /// Passes on the cells from `place` on for as long as they are those of `names`, to the end of the page at most.
    #[inline]
    fn follow(&self, place: Place, names: &[BlockHash], pass: &mut impl FnMut(Cell<'_>)) -> usize {
        let (page, at) = self.split(place);
        let Some(words) = self.pages.get(page).and_then(|page| page.get(at..)) else { return 0 };
        let mut followed = 0;
        for (words, &name) in words.chunks_exact(self.stride).zip(names) {
            let key = self.mixer.key(name);
            // A key of zero is also that of a cell without a name.
            if words[0].load(Ordering::Acquire) != key.0 || key.0 == 0 {
                break;
            }
            pass(Cell { words, layers: self.layers });
            followed += 1;
        }
        followed
    }

    /// Looks up at most [`TOGETHER`] names. Says how many it passed on, and where the last one is.
    #[inline]
    fn search(&self, names: &[BlockHash], latest: bool, pass: &mut impl FnMut(Cell<'_>)) -> (usize, Option<Place>) {
        // All first reads are started before any is needed, so that their cache misses overlap; the same for the cells.
        let mut begun = [Begun::default(); TOGETHER];
        for (begun, &name) in begun.iter_mut().zip(names) {
            let key = self.mixer.key(name);
            *begun = self.tables[key.shard()].begin(key);
        }
        if names.len() > 1 {
            for (&begun, &name) in begun.iter().zip(names) {
                let key = self.mixer.key(name);
                if let Some(place) = self.tables[key.shard()].guess(key, begun) {
                    std::hint::black_box(self.words(place).map(|words| words[0].load(Ordering::Relaxed)));
                }
            }
        }
        let mut last = None;
        for (number, (&begun, &name)) in begun.iter().zip(names).enumerate() {
            let key = self.mixer.key(name);
            last = match self.tables[key.shard()].end(key, begun, |place| self.is_at(key, place)) {
                Ok((_, place)) => Some(place),
                Err(absent) if absent.tagged && !latest => return (number, None),
                Err(_) => None,
            };
            let words = last.and_then(|place| self.words(place));
            pass(words.map_or(Cell::NONE, |words| Cell { words, layers: self.layers }));
        }
        (names.len(), last)
    }

    /// Every name with one of these bits in a layer, in no order and perhaps twice.
    pub(super) fn with_bits(&self, word: usize, layer: usize, bits: u64) -> Vec<BlockHash> {
        let cells = self.pages.iter().flat_map(|page| page.chunks_exact(self.stride));
        let cells = cells.filter(|words| words[1 + word * self.layers + layer].load(Ordering::Acquire) & bits != 0);
        let keys = cells.map(|words| Key(words[0].load(Ordering::Acquire)));
        // A name may have died since its words were read.
        keys.filter(|&key| key.0 != 0 || self.knows(key)).map(|key| self.mixer.name(key)).collect()
    }

    fn knows(&self, key: Key) -> bool {
        self.tables[key.shard()].find(key, |place| self.is_at(key, place)).is_ok()
    }
}

/// A name in so many is probed before the walk.
const PROBE_EVERY: usize = 16;
/// Names probed at most.
const PROBES_MAX: usize = 8;
/// No cell's place.
const NOWHERE: Place = Place::MAX;

/// Where some names of a prompt, `spacing` apart, probably are.
struct Probes {
    spacing: usize,
    places: [Place; PROBES_MAX],
}

impl Probes {
    fn are_blank(&self) -> bool {
        self.places.iter().all(|&place| place == NOWHERE)
    }

    /// Where a name is if it lies together with the next name that was probed.
    #[inline]
    fn place(&self, number: usize) -> Option<Place> {
        let probe = number.div_ceil(self.spacing);
        let place = self.places.get(probe).copied().filter(|&place| place != NOWHERE)?;
        place.checked_sub(u32::try_from(probe * self.spacing - number).ok()?)
    }
}

/// How full a page is.
#[derive(Clone, Copy, Debug, Default)]
struct Fill {
    /// Cells that were given to a name.
    used: usize,
    /// Cells whose name is alive.
    alive: usize,
}

/// All cells, as their one writer sees them.
#[derive(Debug)]
pub(super) struct Arena {
    view: View,
    shards: [Shard; SHARDS],
    /// Where pages are taken from, and tables.
    page_home: Home,
    table_home: Home,
    /// Whether pages came or went since it was last seen to it that memory is where it should be.
    unsettled: bool,
    fill: Vec<Fill>,
    /// Numbers of pages that are none at present.
    unused: Vec<usize>,
    /// The page that new names go to, and the one that moved names go to.
    open: Option<usize>,
    spare: Option<usize>,
    /// Cells in use over all pages, and those whose name is alive.
    used: usize,
    alive: usize,
    /// Where the last name was found: the next one is likely its neighbour.
    near: Place,
    /// Whether readers are to be given a new view.
    changed: bool,
    /// Forgets to point entries at moved cells, to see that the tests notice.
    #[cfg(test)]
    pub(super) loses_moved: bool,
}

fn copy(from: &[AtomicU64], to: &[AtomicU64]) {
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(Ordering::Relaxed), Ordering::Release);
    }
}

/// Cells that were copied, and are to be pointed at.
#[derive(Debug)]
pub(super) struct Moved {
    page: usize,
    cells: Vec<(Key, Place, Place)>,
}

impl Arena {
    /// No cells; a cell will have `layers` layers.
    pub(super) fn new(mixer: Mixer, layers: usize) -> Self {
        let shards: [Shard; SHARDS] = std::array::from_fn(|_| Shard::new());
        let tables = std::array::from_fn(|shard: usize| shards[shard].table.clone());
        Self {
            view: View { tables, pages: Vec::new(), mixer, layers, stride: 1 + layers },
            shards,
            page_home: Home::default(),
            table_home: Home::default(),
            unsettled: false,
            fill: Vec::new(),
            unused: Vec::new(),
            open: None,
            spare: None,
            used: 0,
            alive: 0,
            near: 0,
            changed: false,
            #[cfg(test)]
            loses_moved: false,
        }
    }

    /// A view for readers, where the one they have misses something.
    pub(super) fn new_view(&mut self) -> Option<View> {
        let mut changed = std::mem::take(&mut self.changed);
        for (table, shard) in self.view.tables.iter_mut().zip(&mut self.shards) {
            if std::mem::take(&mut shard.rebuilt) {
                table.clone_from(&shard.table);
                changed = true;
            }
        }
        changed.then(|| self.view.clone())
    }

    /// The view as it is.
    pub(super) fn view(&mut self) -> View {
        self.new_view().unwrap_or_else(|| self.view.clone())
    }

    /// Gives every cell room for 64 times `words` slots.
    pub(super) fn widen(&mut self, words: usize) {
        let stride = 1 + words * self.view.layers;
        // A region has pages of one size only.
        self.page_home.leave_all();
        for page in self.view.pages.iter_mut().filter(|page| !page.is_empty()) {
            let wide = self.page_home.take(PAGE * stride);
            for (old, new) in page.chunks_exact(self.view.stride).zip(wide.chunks_exact(stride)) {
                copy(old, new);
            }
            *page = wide;
        }
        self.view.stride = stride;
        self.changed = true;
        self.unsettled = true;
    }

    /// Sees to it that memory is where it should be: in huge pages, which are well filled, or on the heap. Readers go on
    /// with the cells as they were, until they have a new view.
    pub(super) fn rehouse(&mut self) {
        if !std::mem::take(&mut self.unsettled) {
            return;
        }
        let words = (self.fill.len() - self.unused.len()) * PAGE * self.view.stride;
        let large = words >= if self.page_home.large { LARGE / 2 } else { LARGE };
        if large != self.page_home.large {
            (self.page_home.large, self.table_home.large) = (large, large);
            self.page_home.leave_all();
            self.move_pages(|_| true);
            // Tables go to huge pages as they grow, which they soon do.
            for shard in self.shards.iter_mut().filter(|shard| !large && shard.table.is_in_region()) {
                shard.rebuild(&mut self.table_home);
            }
        }
        while let Some(left) = self.page_home.leave(PAGE * self.view.stride) {
            self.move_pages(|page| page.is_in(&left));
        }
    }

    fn move_pages(&mut self, moves: impl Fn(&Words) -> bool) {
        for page in self.view.pages.iter_mut().filter(|page| !page.is_empty() && moves(page)) {
            let new = self.page_home.take(page.len());
            copy(page, &new);
            *page = new;
            self.changed = true;
        }
    }

    pub(super) const fn key(&self, name: BlockHash) -> Key {
        self.view.mixer.key(name)
    }

    /// Has the entries of many names brought near before they are needed one by one.
    pub(super) fn fetch(&self, names: impl Iterator<Item = BlockHash>) {
        for name in names {
            let key = self.key(name);
            std::hint::black_box(self.shards[key.shard()].table.begin(key));
        }
    }

    /// A name's place where it is next to the last one found: blocks are stored from the first to the last of a prompt
    /// and removed from the last to the first.
    pub(super) fn find_near(&mut self, key: Key) -> Option<Place> {
        let neighbours = [self.near.wrapping_add(1), self.near.wrapping_sub(1)];
        let found = neighbours.into_iter().find(|&place| key.0 != 0 && self.view.is_at(key, place))?;
        self.near = found;
        Some(found)
    }

    /// A name's place.
    pub(super) fn find(&mut self, key: Key) -> Option<Place> {
        if let Some(near) = self.find_near(key) {
            return Some(near);
        }
        let (_, found) = self.shards[key.shard()].table.find(key, |place| self.view.is_at(key, place)).ok()?;
        self.near = found;
        Some(found)
    }

    /// A name's place, which it is given where it has none; nothing where the last of four billion places is taken.
    pub(super) fn take(&mut self, key: Key) -> Option<Place> {
        if let Some(near) = self.find_near(key) {
            return Some(near);
        }
        let shard = key.shard();
        let place = match self.shards[shard].table.find(key, |place| self.view.is_at(key, place)) {
            Ok((_, place)) => place,
            Err(absent) => {
                let place = self.take_cell(|arena| &mut arena.open)?;
                self.cell(place)[0].store(key.0, Ordering::Release);
                self.shards[shard].enter(key, place, absent, &mut self.table_home);
                place
            }
        };
        self.near = place;
        Some(place)
    }

    fn take_cell(&mut self, page: impl Fn(&mut Self) -> &mut Option<usize>) -> Option<Place> {
        let current = *page(self);
        let number = match current {
            Some(number) if self.fill[number].used < PAGE => number,
            full => {
                let number = self.take_page()?;
                *page(self) = Some(number);
                if let Some(full) = full {
                    self.drop_if_dead(full);
                }
                number
            }
        };
        let fill = &mut self.fill[number];
        let place = (number << PAGE_BITS) + fill.used;
        fill.used += 1;
        fill.alive += 1;
        self.used += 1;
        self.alive += 1;
        u32::try_from(place).ok()
    }

    fn take_page(&mut self) -> Option<usize> {
        // The last page of all stays unused, so that no place is that of a blank.
        let number = self.unused.pop().or_else(|| {
            let next = self.view.pages.len();
            (next < (1 << (u32::BITS - PAGE_BITS)) - 1).then_some(next)
        })?;
        if number == self.view.pages.len() {
            self.view.pages.push(Words::default());
            self.fill.push(Fill::default());
        }
        self.view.pages[number] = self.page_home.take(PAGE * self.view.stride);
        self.changed = true;
        self.unsettled = true;
        Some(number)
    }

    fn cell(&self, place: Place) -> &[AtomicU64] {
        // Places come from entries, and entries are only of pages that are there.
        self.view.words(place).unwrap_or_default()
    }

    /// The slots of a word in a layer.
    pub(super) fn slots(&self, place: Place, word: usize, layer: usize) -> u64 {
        Cell { words: self.cell(place), layers: self.view.layers }.slots(word, layer)
    }

    /// Whether no slot is in a layer.
    pub(super) fn is_empty(&self, place: Place, layer: usize) -> bool {
        self.cell(place)[1..].iter().skip(layer).step_by(self.view.layers).all(|word| word.load(Ordering::Relaxed) == 0)
    }

    /// The words of a layer that are not zero.
    pub(super) fn layer(&self, place: Place, layer: usize) -> impl Iterator<Item = (usize, u64)> {
        let words = self.cell(place)[1..].iter().skip(layer).step_by(self.view.layers);
        words.map(|word| word.load(Ordering::Relaxed)).enumerate().filter(|&(_, slots)| slots != 0)
    }

    /// Sets or clears bits; says what the word was. Where bits are cleared, [`Arena::settle`] is to follow.
    pub(super) fn change(&mut self, place: Place, word: usize, layer: usize, bits: u64, set: bool) -> u64 {
        let word = &self.cell(place)[1 + word * self.view.layers + layer];
        let old = word.load(Ordering::Relaxed);
        let new = if set { old | bits } else { old & !bits };
        if new != old {
            word.store(new, Ordering::Release);
        }
        old
    }

    /// Gives up a name that no layer knows any more.
    pub(super) fn settle(&mut self, place: Place) {
        // Its page is gone where it was given up already.
        let Some((key, words)) = self.cell(place).split_first() else { return };
        let key = Key(key.load(Ordering::Relaxed));
        if words.iter().any(|word| word.load(Ordering::Relaxed) != 0) || !self.is_entered(key, place) {
            return;
        }
        self.shards[key.shard()].blank(key, place, &mut self.table_home);
        self.cell(place)[0].store(0, Ordering::Release);
        let page = (place >> PAGE_BITS) as usize;
        self.fill[page].alive -= 1;
        self.alive -= 1;
        self.drop_if_dead(page);
    }

    /// Whether a place is a name's: a key of zero is one name's and that of every cell without a name.
    fn is_entered(&self, key: Key, place: Place) -> bool {
        key.0 != 0 || self.shards[key.shard()].table.find(key, |other| other == place).is_ok()
    }

    fn drop_if_dead(&mut self, page: usize) {
        if self.fill[page].alive == 0 && self.open != Some(page) && self.spare != Some(page) {
            self.drop_page(page);
        }
    }

    fn drop_page(&mut self, page: usize) {
        let fill = std::mem::take(&mut self.fill[page]);
        self.used -= fill.used;
        self.view.pages[page] = Words::default();
        self.unused.push(page);
        self.changed = true;
        self.unsettled = true;
    }

    /// Copies what is alive in the page with the most dead cells, where too many cells are dead. Once readers have the
    /// new view, [`Arena::move_over`] is to follow.
    pub(super) fn copy_out(&mut self) -> Option<Moved> {
        if self.used - self.alive <= self.alive / 2 + PAGE {
            return None;
        }
        let pages = (0..self.fill.len()).filter(|&page| self.spare != Some(page) || self.fill[page].used == PAGE);
        let page = pages.max_by_key(|&page| self.fill[page].used - self.fill[page].alive)?;
        self.open = self.open.filter(|&open| open != page);
        self.spare = self.spare.filter(|&spare| spare != page);
        let mut cells = Vec::with_capacity(self.fill[page].alive);
        for at in 0..self.fill[page].used {
            let from = u32::try_from((page << PAGE_BITS) + at).ok()?;
            let key = Key(self.cell(from)[0].load(Ordering::Relaxed));
            if self.is_entered(key, from) {
                let to = self.take_cell(|arena| &mut arena.spare)?;
                // It is alive in one place as far as counts go.
                self.fill[page].alive -= 1;
                self.alive -= 1;
                copy(self.cell(from), self.cell(to));
                cells.push((key, from, to));
            }
        }
        Some(Moved { page, cells })
    }

    /// Points the entries of copied cells at the copies, and drops their page.
    pub(super) fn move_over(&mut self, moved: Moved) {
        for (key, from, to) in moved.cells {
            #[cfg(test)]
            if self.loses_moved {
                continue;
            }
            self.shards[key.shard()].repoint(key, from, to);
        }
        self.drop_page(moved.page);
    }

    /// Every cell with one of these bits in a layer.
    pub(super) fn with_bits(&self, word: usize, layer: usize, bits: u64) -> Vec<Place> {
        let mut places = Vec::new();
        for (number, page) in self.view.pages.iter().enumerate() {
            for (at, words) in page.chunks_exact(self.view.stride).enumerate() {
                if words[1 + word * self.view.layers + layer].load(Ordering::Relaxed) & bits != 0 {
                    places.extend(u32::try_from((number << PAGE_BITS) + at));
                }
            }
        }
        places
    }

    /// The name of a cell.
    pub(super) fn name(&self, place: Place) -> BlockHash {
        self.view.mixer.name(Key(self.cell(place)[0].load(Ordering::Relaxed)))
    }

    /// Pages and tables that lie in huge pages.
    #[cfg(test)]
    pub(super) fn in_regions(&self) -> (usize, usize) {
        let pages = self.view.pages.iter().filter(|page| page.is_in_region()).count();
        (pages, self.shards.iter().filter(|shard| shard.table.is_in_region()).count())
    }

    /// Cells that memory is kept for, and entries.
    #[cfg(test)]
    pub(super) fn room(&self) -> (usize, usize) {
        let cells = self.view.pages.iter().map(|page| page.len() / self.view.stride).sum();
        (cells, self.shards.iter().map(|shard| shard.table.capacity()).sum())
    }
}

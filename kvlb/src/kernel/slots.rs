//! Which entries of an array map are free.

use std::collections::BTreeMap;

/// The free entries of an array, as runs: the lowest that fits is taken first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slots {
    /// Length by start. No two runs touch.
    free: BTreeMap<u32, u32>,
}

impl Slots {
    /// An array of `len` entries, all free.
    pub(super) fn new(len: u32) -> Self {
        Self { free: if len == 0 { BTreeMap::new() } else { BTreeMap::from([(0, len)]) } }
    }

    /// Takes `len` entries in a row and returns the first one's index, unless there is no such run.
    pub(super) fn take(&mut self, len: u32) -> Option<u32> {
        if len == 0 {
            return Some(0);
        }
        let (&start, &room) = self.free.iter().find(|(_, room)| **room >= len)?;
        self.free.remove(&start);
        if room > len {
            self.free.insert(start + len, room - len);
        }
        Some(start)
    }

    /// Gives `len` entries from `start` on back.
    pub(super) fn give(&mut self, start: u32, len: u32) {
        if len == 0 {
            return;
        }
        let (mut start, mut end) = (start, start + len);
        debug_assert!(self.free.range(..end).next_back().is_none_or(|(at, room)| at + room <= start), "given twice");
        if let Some((&before, &room)) = self.free.range(..start).next_back()
            && before + room == start
        {
            start = before;
        }
        if let Some(room) = self.free.remove(&end) {
            end += room;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_lowest_run_that_fits_is_taken() {
        let mut slots = Slots::new(10);
        assert_eq!([slots.take(3), slots.take(3), slots.take(3)], [Some(0), Some(3), Some(6)]);
        slots.give(0, 3);
        assert_eq!([slots.take(4), slots.take(2), slots.take(2)], [None, Some(0), None]);
    }

    #[test]
    fn nothing_can_be_had_from_anywhere() {
        let mut slots = Slots::new(0);
        assert_eq!([slots.take(0), slots.take(1)], [Some(0), None]);
    }

    proptest! {
        #[test]
        fn runs_never_overlap_and_all_given_back_is_one_run_again(lens in proptest::collection::vec(0..20u32, 1..60)) {
            let mut slots = Slots::new(100);
            let mut held: Vec<(u32, u32)> = Vec::new();
            for (turn, len) in lens.into_iter().enumerate() {
                if let Some(start) = slots.take(len) {
                    held.push((start, len));
                } else {
                    let (start, len) = held.swap_remove(turn % held.len());
                    slots.give(start, len);
                }
                let mut used = [false; 100];
                for index in held.iter().flat_map(|(start, len)| *start..start + len) {
                    prop_assert!(!std::mem::replace(&mut used[index as usize], true), "{index} was taken twice");
                }
            }
            for (start, len) in held {
                slots.give(start, len);
            }
            prop_assert_eq!(slots, Slots::new(100));
        }
    }
}

//! Names in the order of their arrival, any of which may leave early.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::contract::BlockHash;

/// A first-in-first-out queue of distinct names from which any name can be taken.
///
/// A name that leaves early stays in line as a blank, so that leaving costs a note instead of a search; blanks are swept
/// out once they are the larger part.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    line: VecDeque<u64>,
    /// Blanks in line by name; the blanks of a name stand before it.
    blanks: HashMap<u64, u32>,
    blank: usize,
}

/// Blanks that are not worth a sweep.
const BLANKS_MIN: usize = 64;

impl Queue {
    /// Names in the queue.
    pub fn len(&self) -> usize {
        self.line.len() - self.blank
    }

    /// Whether no name is in the queue.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts a name, which is not in the queue, at its end.
    pub fn push(&mut self, name: BlockHash) {
        self.line.push_back(name.0);
    }

    /// Takes out a name that is in the queue.
    pub fn take(&mut self, name: BlockHash) {
        *self.blanks.entry(name.0).or_insert(0) += 1;
        self.blank += 1;
        debug_assert!(self.blank <= self.line.len(), "only names in the queue are taken out");
        if self.blank > self.len() + BLANKS_MIN {
            self.sweep();
        }
    }

    /// Takes out the name that has been in the queue for longest.
    pub fn pop(&mut self) -> Option<BlockHash> {
        loop {
            let name = self.line.pop_front()?;
            if !self.is_blank(name) {
                return Some(BlockHash(name));
            }
        }
    }

    /// Whether the front name stands for a blank, which is then gone.
    fn is_blank(&mut self, name: u64) -> bool {
        let Some(blanks) = self.blanks.get_mut(&name) else { return false };
        *blanks -= 1;
        if *blanks == 0 {
            self.blanks.remove(&name);
        }
        self.blank -= 1;
        true
    }

    fn sweep(&mut self) {
        let mut line = std::mem::take(&mut self.line);
        line.retain(|&name| !self.is_blank(name));
        line.shrink_to(line.len() * 2);
        self.blanks.shrink_to(0);
        self.line = line;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_that_left_and_came_back_is_the_youngest() {
        let mut queue = Queue::default();
        for name in [1, 2, 3] {
            queue.push(BlockHash(name));
        }
        queue.take(BlockHash(1));
        queue.push(BlockHash(1));
        assert_eq!([(); 4].map(|()| queue.pop()), [Some(BlockHash(2)), Some(BlockHash(3)), Some(BlockHash(1)), None]);
    }

    #[test]
    fn coming_and_going_for_ever_takes_no_room() {
        let mut queue = Queue::default();
        for round in 0..100_000 {
            queue.push(BlockHash(round % 10));
            queue.take(BlockHash(round % 10));
        }
        assert!(queue.is_empty());
        assert!(queue.line.capacity() < 1000, "{}", queue.line.capacity());
    }

    proptest! {
        #[test]
        fn it_behaves_as_a_plain_list(steps in prop::collection::vec((0..3u8, 0..40u64), 0..2000)) {
            let (mut queue, mut list) = (Queue::default(), Vec::new());
            for (step, name) in steps {
                let name = BlockHash(name);
                match (step, list.iter().position(|&other| other == name)) {
                    (0, None) => {
                        queue.push(name);
                        list.push(name);
                    }
                    (1, Some(at)) => {
                        queue.take(name);
                        list.remove(at);
                    }
                    (2, _) => {
                        let oldest = (!list.is_empty()).then(|| list.remove(0));
                        prop_assert_eq!(queue.pop(), oldest);
                    }
                    _ => {}
                }
                prop_assert_eq!(queue.len(), list.len());
            }
        }
    }
}

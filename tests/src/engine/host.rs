//! Host memory behind the pool, as vLLM's offloading connector uses it: what is computed is copied, the least recently used goes.
//!
//! By default its events carry names only: no tokens, no parent, block size 0 (read in vLLM's source; no such engine was recorded).

use std::collections::{BTreeMap, HashMap};

use super::names::Digest;
use super::wire::{Event, Stored};

/// vLLM's word for this medium in events.
const MEDIUM: &str = "CPU";

/// Which blocks are in host memory, and which one goes next.
#[derive(Debug)]
pub(super) struct Host {
    capacity: usize,
    describes: bool,
    /// When each block was last used.
    used: HashMap<Digest, u64>,
    by_use: BTreeMap<u64, Digest>,
    clock: u64,
}

impl Host {
    /// Room for `capacity` blocks.
    pub(super) fn new(capacity: usize, describes: bool) -> Self {
        Self { capacity, describes, used: HashMap::new(), by_use: BTreeMap::new(), clock: 0 }
    }

    /// What it holds, in no order.
    pub(super) fn digests(&self) -> impl Iterator<Item = &Digest> {
        self.used.keys()
    }

    /// Length of the leading run of `digests` that it holds.
    pub(super) fn run(&self, digests: &[Digest]) -> usize {
        digests.iter().take_while(|digest| self.used.contains_key(*digest)).count()
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.used.clear();
        self.by_use.clear();
    }

    /// Copies the blocks of a prompt from number `from` on, marks all of them as used, and says what this changed; `describe` gives the
    /// event of a range of them as the pool would tell it.
    pub(super) fn take_in(
        &mut self,
        prompt: &[Digest],
        from: usize,
        describe: impl Fn(usize, usize) -> Stored,
    ) -> Vec<Event> {
        let new: Vec<usize> = (from..prompt.len()).filter(|index| !self.used.contains_key(&prompt[*index])).collect();
        for (index, digest) in prompt.iter().enumerate() {
            if index >= from || self.used.contains_key(digest) {
                self.touch(*digest);
            }
        }
        let mut events = self.stored(prompt, &new, describe);
        let gone = self.evict();
        if !gone.is_empty() {
            events.push(Event::Removed { hashes: gone, medium: MEDIUM.into(), group_idx: None });
        }
        events
    }

    /// Marks a block as used now; it joins where it is new.
    fn touch(&mut self, digest: Digest) {
        self.clock += 1;
        if let Some(before) = self.used.insert(digest, self.clock) {
            self.by_use.remove(&before);
        }
        self.by_use.insert(self.clock, digest);
    }

    fn evict(&mut self) -> Vec<Digest> {
        let mut gone = Vec::new();
        while self.used.len() > self.capacity {
            let Some((_, digest)) = self.by_use.pop_first() else { break };
            self.used.remove(&digest);
            gone.push(digest);
        }
        gone
    }

    fn stored(&self, prompt: &[Digest], new: &[usize], describe: impl Fn(usize, usize) -> Stored) -> Vec<Event> {
        if new.is_empty() {
            return Vec::new();
        }
        if !self.describes {
            let hashes = new.iter().map(|index| prompt[*index]).collect();
            return vec![Event::Stored(Stored { hashes, medium: MEDIUM.into(), ..Stored::default() })];
        }
        let runs = new.chunk_by(|left, right| left + 1 == *right);
        let told = runs.map(|run| Stored { medium: MEDIUM.into(), ..describe(run[0], run[0] + run.len()) });
        told.map(Event::Stored).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Digest, Event, Host, Stored};

    fn digests(numbers: &[u8]) -> Vec<Digest> {
        numbers.iter().map(|n| Digest::from_slice(&[*n; 32])).collect()
    }

    fn told(events: Vec<Event>) -> (Vec<Digest>, Vec<Digest>) {
        let (mut stored, mut removed) = (Vec::new(), Vec::new());
        for event in events {
            match event {
                Event::Stored(Stored { hashes, medium, block_size: 0, parent: None, .. }) if medium == "CPU" => {
                    stored.extend(hashes);
                }
                Event::Removed { hashes, medium, group_idx: None } if medium == "CPU" => removed.extend(hashes),
                other => panic!("{other:?}"),
            }
        }
        (stored, removed)
    }

    #[test]
    fn what_is_computed_is_copied_once_and_the_least_recently_used_goes() {
        let mut host = Host::new(3, false);
        let none = |_, _| Stored::default();
        assert_eq!(told(host.take_in(&digests(&[1, 2]), 0, none)), (digests(&[1, 2]), vec![]));
        assert_eq!(told(host.take_in(&digests(&[3]), 0, none)), (digests(&[3]), vec![]));
        // A hit on 1 and 2 makes 3 the oldest.
        assert_eq!(told(host.take_in(&digests(&[1, 2, 4]), 2, none)), (digests(&[4]), digests(&[3])));
        assert_eq!(host.run(&digests(&[1, 2, 3])), 2);
        host.clear();
        assert_eq!((host.run(&digests(&[1])), host.digests().count()), (0, 0));
    }

    #[test]
    fn a_describing_one_tells_each_new_run_as_the_pool_would() {
        let mut host = Host::new(9, true);
        let describe =
            |from: usize, to: usize| Stored { tokens: vec![7; to - from], block_size: 1, ..Stored::default() };
        host.take_in(&digests(&[1, 2]), 1, describe);
        let events = host.take_in(&digests(&[1, 2, 3, 4]), 2, describe);
        let [Event::Stored(stored)] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!((stored.tokens.len(), stored.medium.as_str()), (2, "CPU"));
    }
}

//! Places in the order in which they were last used.

/// No place.
const NONE: u32 = u32::MAX;

/// A list of places, numbers from 0 on, from the one used last to the one used longest ago. Every step takes the same time
/// however long the list is.
#[derive(Clone, Debug)]
pub(super) struct Recency {
    links: Vec<Link>,
    newest: u32,
    oldest: u32,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
}

impl Default for Recency {
    fn default() -> Self {
        Self { links: Vec::new(), newest: NONE, oldest: NONE }
    }
}

impl Recency {
    /// The place used longest ago.
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Takes in a place that is not in the list, as the one used last.
    pub(super) fn add(&mut self, place: u32) {
        let at = place as usize;
        if self.links.len() <= at {
            self.links.resize(at + 1, Link { newer: NONE, older: NONE });
        }
        self.links[at] = Link { newer: NONE, older: self.newest };
        match self.links.get_mut(self.newest as usize) {
            Some(before) => before.newer = place,
            None => self.oldest = place,
        }
        self.newest = place;
    }

    /// Takes a place out that is in the list.
    pub(super) fn remove(&mut self, place: u32) {
        let Link { newer, older } = self.links[place as usize];
        match self.links.get_mut(newer as usize) {
            Some(link) => link.older = older,
            None => self.newest = older,
        }
        match self.links.get_mut(older as usize) {
            Some(link) => link.newer = newer,
            None => self.oldest = newer,
        }
    }

    /// A place in the list is used.
    pub(super) fn touch(&mut self, place: u32) {
        if place != self.newest {
            self.remove(place);
            self.add(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_order_is_that_of_a_plain_list(steps in prop::collection::vec((0u32..12, any::<bool>()), 0..200)) {
            let (mut list, mut plain) = (Recency::default(), Vec::new());
            for (place, removes) in steps {
                let known = plain.contains(&place);
                plain.retain(|other| *other != place);
                match (known, removes) {
                    (true, true) => list.remove(place),
                    (false, true) => {}
                    (known, false) => {
                        if known { list.touch(place) } else { list.add(place) }
                        plain.push(place);
                    }
                }
                prop_assert_eq!(list.oldest(), plain.first().copied());
            }
            for place in plain {
                prop_assert_eq!(list.oldest(), Some(place));
                list.remove(place);
            }
            prop_assert_eq!(list.oldest(), None);
        }
    }
}

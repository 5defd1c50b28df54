//! How one sequence number follows another.

use crate::contract::EventSeq;

/// What one sequence number says about the stream it came on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Nothing came before.
    First,
    /// The one expected.
    Next,
    /// The last one again.
    Duplicate,
    /// Some were lost on the way.
    Gap {
        /// How many.
        missed: u64,
    },
    /// Lower than the last: the engine began a new life.
    Rewind,
}

/// The position in a stream of numbered batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    last: Option<EventSeq>,
}

impl Cursor {
    /// The last number seen.
    pub const fn last(&self) -> Option<EventSeq> {
        self.last
    }

    /// Says how `seq` follows what came before, without moving.
    pub fn peek(&self, seq: EventSeq) -> Arrival {
        let Some(last) = self.last else { return Arrival::First };
        match seq.0.checked_sub(last.0) {
            None => Arrival::Rewind,
            Some(0) => Arrival::Duplicate,
            Some(1) => Arrival::Next,
            Some(ahead) => Arrival::Gap { missed: ahead - 1 },
        }
    }

    /// Moves to `seq` and says how it follows what came before.
    pub fn advance(&mut self, seq: EventSeq) -> Arrival {
        let arrival = self.peek(seq);
        self.last = Some(seq);
        arrival
    }

    /// Forgets the position: the next number is the first.
    pub fn reset(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_says_how_it_follows_the_last() {
        let mut cursor = Cursor::default();
        let arrivals = [7, 8, 11, 11, 0, 1].map(|seq| cursor.advance(EventSeq(seq)));
        let expected = [
            Arrival::First,
            Arrival::Next,
            Arrival::Gap { missed: 2 },
            Arrival::Duplicate,
            Arrival::Rewind,
            Arrival::Next,
        ];
        assert_eq!(arrivals, expected);
    }

    #[test]
    fn the_ends_of_the_number_range_do_not_overflow() {
        let mut cursor = Cursor::default();
        cursor.advance(EventSeq(0));
        assert_eq!(cursor.advance(EventSeq(u64::MAX)), Arrival::Gap { missed: u64::MAX - 1 });
        assert_eq!(cursor.advance(EventSeq(0)), Arrival::Rewind);
    }

    #[test]
    fn after_a_reset_any_number_is_the_first() {
        let mut cursor = Cursor::default();
        cursor.advance(EventSeq(9));
        cursor.reset();
        assert_eq!(cursor.peek(EventSeq(3)), Arrival::First);
        assert_eq!(cursor.last(), None);
    }
}

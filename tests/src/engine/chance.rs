//! Repeatable chance: one seed gives one sequence, so a failing test can be run again.

/// A small generator (`SplitMix64`, public domain algorithm by Sebastiano Vigna): enough for faults and token choice.
#[derive(Debug, Clone)]
pub(crate) struct Chance(u64);

impl Chance {
    /// A sequence that depends on nothing but `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed from text and numbers, so that engines of different names differ.
    pub(crate) fn seed_of(text: &str, parts: &[u64]) -> u64 {
        let mut state = 0x9e37_79b9_7f4a_7c15;
        for byte in text.bytes() {
            state = mix(state ^ u64::from(byte));
        }
        for part in parts {
            state = mix(state ^ part);
        }
        state
    }

    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `0..bound`; 0 when `bound` is 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).unwrap_or(u64::MAX);
        self.next().checked_rem(bound).and_then(|rest| usize::try_from(rest).ok()).unwrap_or(0)
    }

    /// True with probability `p`; never for 0, always for 1.
    pub(crate) fn happens(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    /// A number from 0 up to, but not including, 1.
    pub(crate) fn unit(&mut self) -> f64 {
        // 53 bits: as many as an f64 holds exactly.
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact in f64")]
        let unit = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        unit
    }
}

/// Bits that look like chance, the same for the same bits.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::Chance;

    #[test]
    fn one_seed_gives_one_sequence_and_probabilities_hold() {
        let mut a = Chance::new(7);
        let mut b = Chance::new(7);
        assert_eq!((a.next(), a.next()), (b.next(), b.next()));
        let hits = (0..10_000).filter(|_| a.happens(0.3)).count();
        assert!((2_700..3_300).contains(&hits), "{hits}");
        assert!(!(0..100).any(|_| a.happens(0.0)));
        assert!((0..100).all(|_| a.happens(1.0)));
        assert!((0..100).all(|_| a.below(3) < 3));
    }
}

//! Chance that can be had again.

/// Numbers that depend on nothing but the seed (xorshift, George Marsaglia 2003).
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    /// Dice of their own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from((self.0 >> 32) % u64::from(bound)).unwrap_or(0)
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }
}

//! Mistakes that a policy or its bookkeeping could make. A storm that does not find them proves nothing.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// Now and then a request goes to whoever is next, excluded or not.
    AsksAnybody,
    /// Some requests are never sent.
    Forgets,
    /// The loads of some requests that have ended stay.
    KeepsLoads,
    /// Blocks that an engine gave up are still believed to be there.
    BelievesForEver,
}

impl Planted {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::AsksAnybody, Self::Forgets, Self::KeepsLoads, Self::BelievesForEver];

    /// Every such request is treated wrongly.
    pub(super) const EACH: usize = 7;
}

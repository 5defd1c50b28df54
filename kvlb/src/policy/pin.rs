//! Whether a request goes where its conversation was, or where prompts like it were: guesses, which yield to load and to what
//! is known better.

use super::{Bound, Candidate, Settings};

/// A guess yields where another endpoint has announced more blocks than this beyond the guessed one's: computing 128 tokens
/// of 16-token blocks anew takes about as long as the noise of a batch, and a pin that moved for less would move all the time.
pub const YIELD_BLOCKS: u32 = 8;

/// Why a request does not go where it was guessed to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leave {
    /// The endpoint may not be asked.
    Out,
    /// This request failed there.
    Tried,
    /// It carries as much as it may.
    Overload,
    /// Another endpoint has announced many more blocks of the prompt.
    Deeper,
}

impl Leave {
    /// Every reason.
    pub const ALL: [Self; 4] = [Self::Out, Self::Tried, Self::Overload, Self::Deeper];

    /// The word in metrics, logs and `explain`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::Tried => "tried",
            Self::Overload => "overload",
            Self::Deeper => "deeper",
        }
    }
}

/// What a guess is held against.
#[derive(Clone, Copy, Debug)]
pub struct Grounds<'a> {
    /// The rule's endpoints.
    pub candidates: &'a [Candidate],
    /// Blocks of the prompt that each has announced, by the rule's measure; empty where the KV tier may not choose.
    pub announced: &'a [u32],
    /// Blocks that an endpoint must have announced for the KV tier to go by them.
    pub min_overlap: u32,
    /// The endpoints that this request failed on.
    pub tried: &'a [usize],
    /// Whose load bound counts.
    pub settings: &'a Settings,
}

impl Grounds<'_> {
    /// Whether a request may go where it is guessed to belong.
    ///
    /// The bound is the one of the KV tier, over every eligible endpoint. What is known better must be of use: an endpoint that
    /// may not be asked, is over its own bound, or has too little for the KV tier to choose it, is not worth leaving for.
    ///
    /// # Errors
    /// Why it may not.
    pub fn allow(&self, endpoint: usize) -> Result<(), Leave> {
        let Some(guessed) = self.candidates.iter().find(|c| c.endpoint == endpoint && c.eligible) else {
            return Err(if self.tried.contains(&endpoint) { Leave::Tried } else { Leave::Out });
        };
        let bound = Bound::new(self.candidates, self.settings.mean_load_factor, self.settings.load_floor);
        if !bound.admits(guessed) {
            return Err(Leave::Overload);
        }
        let depth = |endpoint: usize| self.announced.get(endpoint).copied().unwrap_or_default();
        let enough = depth(endpoint).saturating_add(YIELD_BLOCKS).max(self.min_overlap.saturating_sub(1));
        if self.eligible().any(|c| depth(c.endpoint) > enough && bound.admits(c)) {
            return Err(Leave::Deeper);
        }
        Ok(())
    }

    /// Whether loads lie no further apart than this.
    pub fn is_balanced(&self, apart: u32) -> bool {
        let loads = || self.eligible().map(|c| c.load);
        loads().max().unwrap_or_default() - loads().min().unwrap_or_default() <= apart
    }

    /// The endpoint of a group that is allowed and has the least load; of equals the one that stands first.
    pub fn least_loaded(&self, group: &[usize]) -> Option<usize> {
        let load = |endpoint: usize| self.eligible().find(|c| c.endpoint == endpoint).map(|c| c.load);
        let allowed = group.iter().copied().filter(|endpoint| self.allow(*endpoint).is_ok());
        allowed.min_by_key(|endpoint| load(*endpoint))
    }

    fn eligible(&self) -> impl Iterator<Item = &Candidate> {
        self.candidates.iter().filter(|c| c.eligible)
    }
}

/// The bytes of a text that must be known before what is known of it has a word.
pub fn bytes_wanted(length: usize, percent: u8) -> usize {
    (length.saturating_mul(percent.into())).div_ceil(100).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fleet(loads: &[u32]) -> Vec<Candidate> {
        let candidate = |(endpoint, load): (usize, &u32)| Candidate {
            endpoint,
            eligible: true,
            load: *load,
            capacity: 1,
            ..Candidate::default()
        };
        loads.iter().enumerate().map(candidate).collect()
    }

    fn grounds<'a>(candidates: &'a [Candidate], announced: &'a [u32], settings: &'a Settings) -> Grounds<'a> {
        Grounds { candidates, announced, min_overlap: 1, tried: &[], settings }
    }

    #[test]
    fn a_conversation_stays_up_to_the_bound_of_its_endpoint() {
        let settings = Settings::default();
        // Up to the floor of four it stays, however idle the others are.
        assert_eq!(grounds(&fleet(&[3, 0, 0, 0]), &[], &settings).allow(0), Ok(()));
        // ceil(1.75 * (4 + 1) / 4) = 3 is below the floor: four are enough.
        assert_eq!(grounds(&fleet(&[4, 0, 0, 0]), &[], &settings).allow(0), Err(Leave::Overload));
        // ceil(1.75 * (17 + 30 + 1) / 4) = 21.
        assert_eq!(grounds(&fleet(&[17, 30, 0, 0]), &[], &settings).allow(0), Ok(()));
        assert_eq!(grounds(&fleet(&[17, 30, 0, 0]), &[], &settings).allow(1), Err(Leave::Overload));
    }

    #[test]
    fn it_yields_to_more_than_eight_announced_blocks_that_are_of_use() {
        let settings = Settings::default();
        let idle = fleet(&[0, 0, 0]);
        assert_eq!(grounds(&idle, &[2, 10, 0], &settings).allow(0), Ok(()));
        assert_eq!(grounds(&idle, &[2, 11, 0], &settings).allow(0), Err(Leave::Deeper));
        assert_eq!(grounds(&idle, &[2, 11, 0], &settings).allow(1), Ok(()));
        let of_use = |min_overlap| Grounds { min_overlap, ..grounds(&idle, &[2, 11, 0], &settings) }.allow(0);
        assert_eq!((of_use(11), of_use(12)), (Err(Leave::Deeper), Ok(())), "too little for the KV tier");
        let mut out = idle.clone();
        out[1].eligible = false;
        assert_eq!(grounds(&out, &[2, 11, 0], &settings).allow(0), Ok(()), "nobody may ask the other");
        assert_eq!(
            grounds(&fleet(&[0, 90, 0]), &[2, 11, 0], &settings).allow(0),
            Ok(()),
            "the other is over its bound"
        );
    }

    #[test]
    fn an_endpoint_that_may_not_be_asked_is_left_for_its_own_reason() {
        let settings = Settings::default();
        let mut candidates = fleet(&[0, 0]);
        candidates[0].eligible = false;
        let grounds = grounds(&candidates, &[], &settings);
        assert_eq!((grounds.allow(0), grounds.allow(7)), (Err(Leave::Out), Err(Leave::Out)));
        assert_eq!(Grounds { tried: &[0], ..grounds }.allow(0), Err(Leave::Tried));
    }

    #[test]
    fn of_several_who_know_a_text_the_least_loaded_gets_it_and_of_equals_the_first() {
        let settings = Settings::default();
        let candidates = fleet(&[2, 1, 1, 0]);
        let grounds = grounds(&candidates, &[], &settings);
        assert_eq!(grounds.least_loaded(&[0, 2, 1]), Some(2));
        assert_eq!((grounds.least_loaded(&[0]), grounds.least_loaded(&[])), (Some(0), None));
        assert!(grounds.is_balanced(2) && !grounds.is_balanced(1));
    }

    #[test]
    fn a_fifth_of_a_text_is_a_fifth() {
        assert_eq!([1, 5, 6, 511, 100_000].map(|length| bytes_wanted(length, 20)), [1, 1, 2, 103, 20_000]);
        assert_eq!((bytes_wanted(50, 100), bytes_wanted(0, 20)), (50, 1));
    }

    proptest! {
        #[test]
        fn a_guess_is_never_allowed_where_nobody_may_ask(
            rows in prop::collection::vec((any::<bool>(), 0u32..40, 1u64..5000, 0u32..40), 1..12),
            guess in 0usize..12, floor in 0u32..8,
        ) {
            let candidates: Vec<_> = rows.iter().enumerate().map(|(endpoint, row)| Candidate {
                endpoint, eligible: row.0, load: row.1, capacity: row.2, ..Candidate::default()
            }).collect();
            let announced: Vec<u32> = rows.iter().map(|row| row.3).collect();
            let settings = Settings { load_floor: floor, ..Settings::default() };
            let grounds = grounds(&candidates, &announced, &settings);
            let eligible = |endpoint: usize| candidates.get(endpoint).is_some_and(|c| c.eligible);
            prop_assert!(grounds.allow(guess).is_err() || eligible(guess));
            let all: Vec<usize> = (0..12).collect();
            prop_assert!(grounds.least_loaded(&all).is_none_or(eligible));
            // Whoever yields has somebody to yield to.
            if grounds.allow(guess) == Err(Leave::Deeper) {
                prop_assert!((0..rows.len()).any(|other| eligible(other) && announced[other] > announced[guess] + YIELD_BLOCKS));
            }
        }
    }
}

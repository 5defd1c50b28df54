//! How long an engine's step takes.

use std::time::Duration;

use super::figures::from_millis;

/// What one step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// Prompt tokens that are new.
    pub(super) prefill_tokens: u32,
    /// Requests that get one more token.
    pub(super) decodes: u32,
    /// Requests in the step, of those that it may have.
    pub(super) crowd: f64,
    /// Tokens of all contexts together, as a share of the cache; may be above one, since requests share blocks.
    pub(super) contexts: f64,
}

/// A model of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Timing {
    /// Measured polynomials, that of prompts slowed down by a factor. Prompts and answers of one step add up.
    ///
    /// Source: the default performance model of Dynamo's mock engine 1.6.1.
    Polynomial {
        /// Times the time that prompts of the measured model take.
        slower: f64,
    },
    /// So much for each token.
    ///
    /// Source: `per-token` of llm-d-inference-sim: overhead and time for each token of a prompt, time for each token of an answer, and a
    /// factor that grows with the requests that run.
    PerToken {
        /// Of a step that computes prompt tokens, in milliseconds.
        overhead_ms: f64,
        /// For each prompt token, in milliseconds.
        token_ms: f64,
        /// Of a step that continues answers, in milliseconds.
        decode_ms: f64,
        /// Times as slow when as many requests run as may.
        crowded: f64,
    },
}

impl Timing {
    /// Dynamo's polynomials for a model whose engine computes so many prompt tokens a second in full steps. Answers take the time that
    /// Dynamo says: it depends on the memory that is read, which a larger engine reads faster.
    pub(super) fn paced_at(tokens_per_second: f64) -> Self {
        const FULL: f64 = 8192.0; // both publish their figures for steps of this size
        Self::Polynomial { slower: FULL / tokens_per_second * 1e3 / prefill_ms(FULL) }
    }

    /// How long a step takes.
    pub(super) fn step(&self, work: &Work) -> Duration {
        let prompts = work.prefill_tokens > 0;
        let tokens = f64::from(work.prefill_tokens);
        let when = |is: bool, millis: f64| if is { millis } else { 0.0 };
        from_millis(match *self {
            Self::Polynomial { slower } => {
                when(prompts, slower * prefill_ms(tokens)) + when(work.decodes > 0, decode_ms(work.contexts))
            }
            Self::PerToken { overhead_ms, token_ms, decode_ms, crowded } => {
                let alone = when(prompts, overhead_ms + tokens * token_ms) + when(work.decodes > 0, decode_ms);
                alone * (1.0 + (crowded - 1.0) * work.crowd.min(1.0))
            }
        })
    }
}

/// Source: as [`Timing::Polynomial`].
fn prefill_ms(tokens: f64) -> f64 {
    4.209_989e-7 * tokens * tokens + 1.518_344e-2 * tokens + 16.501_42
}

/// Source: as [`Timing::Polynomial`].
fn decode_ms(contexts: f64) -> f64 {
    let share = contexts.clamp(0.0, 1.0);
    (-25.74 * share * share + 54.01 * share + 5.74).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::figures::millis;

    #[test]
    fn a_step_takes_what_was_published() {
        let one = Timing::Polynomial { slower: 1.0 };
        let prompt = |prefill_tokens| Work { prefill_tokens, ..Work::default() };
        let about = |step: Duration, wanted: f64| (millis(step) - wanted).abs() < 1.0;
        assert!(about(one.step(&prompt(10_000)), 210.4) && about(one.step(&prompt(32_000)), 933.5));
        assert!(about(one.step(&Work { decodes: 9, contexts: 3.0, ..Work::default() }), 34.0));
        assert_eq!(one.step(&Work::default()), Duration::ZERO);
        assert!(about(Timing::paced_at(15_928.0).step(&prompt(8192)), 514.3));
    }

    #[test]
    fn a_full_engine_is_slower_by_its_factor() {
        let engine = Timing::PerToken { overhead_ms: 30.0, token_ms: 0.25, decode_ms: 12.0, crowded: 2.0 };
        let full = Work { prefill_tokens: 100, decodes: 3, crowd: 1.0, contexts: 0.0 };
        assert_eq!(engine.step(&full), Duration::from_millis(134));
        assert_eq!(engine.step(&Work { crowd: 0.0, ..full }), Duration::from_millis(67));
    }
}

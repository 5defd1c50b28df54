//! The fast tokenizer: `fastokens`, built from the reference's own pipeline.
//!
//! It serves only after [`Encoder`](super::encoder::Encoder) has compared it with the reference. It runs on the calling
//! thread alone: a data thread that waits for threads of a tokenizer keeps thousands of streams waiting.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use fastokens::AddedTokenPolicy;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Why there is no fast tokenizer for a model.
#[derive(Debug, thiserror::Error)]
pub(super) enum FastError {
    /// `fastokens` cannot be kept from using threads of its own.
    #[error("it would use threads of its own")]
    Threads,
    /// The reference cannot be written down.
    #[error("the reference cannot be written down")]
    Write(#[source] serde_json::Error),
    /// `fastokens` has no such pipeline.
    #[error("{0}")]
    Unknown(String),
    /// Building it ended in a panic.
    #[error("it panics")]
    Panic,
}

/// A fast tokenizer.
pub(super) struct Fast {
    tokenizer: fastokens::Tokenizer,
    added: AddedTokenPolicy,
}

impl fmt::Debug for Fast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fast").field("added", &self.added).finish_non_exhaustive()
    }
}

impl Fast {
    /// Builds one that does what `reference` does, as it is now. Takes up to some seconds for the largest vocabularies.
    ///
    /// # Errors
    /// [`FastError`] when it cannot be built.
    pub(super) fn new(reference: &tokenizers::Tokenizer) -> Result<Self, FastError> {
        if !stays_on_one_thread() {
            return Err(FastError::Threads);
        }
        let pipeline = serde_json::to_value(reference).map_err(FastError::Write)?;
        let tokenizer = catch_unwind(|| fastokens::Tokenizer::from_json(pipeline))
            .map_err(|_panic| FastError::Panic)?
            .map_err(|error| FastError::Unknown(error.to_string()))?;
        let added =
            if reference.get_encode_special_tokens() { AddedTokenPolicy::SkipSpecial } else { AddedTokenPolicy::All };
        Ok(Self { tokenizer, added })
    }

    /// The ids of `text`, or `None` where it fails, or may not be right: then the reference has to say.
    pub(super) fn ids(&self, text: &str, special: bool) -> Option<Vec<u32>> {
        // Expressions that take `'S` for `'s` take these for it and for `'k` as well, and `fastokens` not always.
        if !text.is_ascii() && text.contains(['\u{17f}', '\u{212a}']) {
            return None;
        }
        // Young code with much of it unsafe: what it panics on must not take a data thread along.
        catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode_with_policy(text, special, self.added))).ok()?.ok()
    }
}

/// Makes sure that `fastokens` has no threads, now and later.
///
/// It asks once how many processors there are, when it is first used, and never starts a thread where there is one. A
/// thread that may run on one processor only gets that answer. The other way, `FASTOKENS_BPE_THREADS` in the
/// environment, is not safe to take in a process that has threads already.
fn stays_on_one_thread() -> bool {
    let asked = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let this = Pid::from_raw(0);
            let allowed = sched_getaffinity(this).ok()?;
            let first = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu) == Ok(true))?;
            let mut one = CpuSet::new();
            one.set(first).ok()?;
            sched_setaffinity(this, &one).ok()?;
            // Its words are cut by another pool, whose size it asks for when the first expression is compiled.
            fastokens::Tokenizer::from_json(serde_json::from_str(SMALLEST).ok()?).ok()?;
            Some(fastokens::fanout::threads())
        });
        thread.join().ok().flatten()
    });
    asked == Some(1)
}

/// A pipeline with an expression in it.
const SMALLEST: &str = r#"{"added_tokens": [], "pre_tokenizer":
    {"type": "Split", "pattern": {"Regex": "a|b"}, "behavior": "Isolated", "invert": false},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_read_on_the_calling_thread() {
        let reference = include_bytes!("../../../tests/golden/tiny-tokenizer/tokenizer.json");
        let reference = tokenizers::Tokenizer::from_bytes(reference).unwrap();
        let fast = Fast::new(&reference).unwrap();
        let text = "A block has a name.\nNames are made of tokens, 16 of them.\n".repeat(20_000);
        let expected = reference.encode_fast(text.as_str(), false).unwrap();
        assert_eq!(fast.ids(&text, false).unwrap(), expected.get_ids());
        assert_eq!(fastokens::fanout::threads(), 1);
        let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names: Vec<_> =
            threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok()).collect();
        assert!(!names.iter().any(|name| name.starts_with("fastokens")), "{names:?}");
    }
}

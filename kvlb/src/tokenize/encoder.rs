//! From text to token ids: the reference tokenizer, and what stands in for it once it has proved the same.

use std::sync::Arc;

use super::cuts::Cuts;
use super::fast::Fast;
use super::{Backend, Miss, trial};
use crate::contract::TokenId;

/// Text becomes token ids. Cheap to copy.
#[derive(Clone, Debug)]
pub(super) struct Encoder {
    reference: Arc<tokenizers::Tokenizer>,
    fast: Option<Arc<Fast>>,
    /// What serves.
    backend: Backend,
    cuts: Arc<Cuts>,
    /// Special tokens around a text, where they are the same for every text.
    around: Option<Arc<Around>>,
    fingerprint: u128,
}

/// The special tokens that the post-processor puts around text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Around {
    pub(super) before: Vec<TokenId>,
    pub(super) after: Vec<TokenId>,
}

impl Encoder {
    /// The reference alone. `fingerprint` tells tokenizers with other ids apart.
    pub(super) fn new(reference: tokenizers::Tokenizer, fingerprint: u128) -> Self {
        Self {
            reference: Arc::new(reference),
            fast: None,
            backend: Backend::Reference("the fast tokenizer is not built yet".to_owned()),
            cuts: Arc::new(Cuts::none()),
            around: None,
            fingerprint,
        }
    }

    /// The same with everything that makes it fast and has proved right in a trial against the reference.
    pub(super) fn quick(&self) -> Self {
        let mut quick = Self::new(tokenizers::Tokenizer::clone(&self.reference), self.fingerprint);
        quick.reference = Arc::clone(&self.reference);
        let texts = trial::texts(&self.reference);
        let Ok(answers) = texts.iter().map(|text| self.answer(text)).collect::<Result<Vec<_>, _>>() else {
            quick.backend = Backend::Reference("the reference fails on a text of the trial".to_owned());
            return quick;
        };
        match Fast::new(&self.reference) {
            Ok(fast) => {
                let differs = texts.iter().zip(&answers).find(|(text, answer)| !answer.is_of(&fast, text));
                if let Some((text, _)) = differs {
                    quick.backend = Backend::Reference(format!("the fast tokenizer differs on {text:?}"));
                } else {
                    (quick.fast, quick.backend) = (Some(Arc::new(fast)), Backend::Fast);
                }
            }
            Err(error) => quick.backend = Backend::Reference(format!("no fast tokenizer: {error}")),
        }
        quick.around = answers
            .first()
            .and_then(Answer::around)
            .filter(|around| {
                answers
                    .iter()
                    .all(|answer| [&around.before[..], &answer.bare, &around.after].concat() == answer.special)
            })
            .map(Arc::new);
        let cuts = Cuts::of(&self.reference);
        if cuts.hold_for(texts.iter().map(String::as_str), |text| quick.ids(text, false)) == Ok(true) {
            quick.cuts = Arc::new(cuts);
        }
        quick
    }

    pub(super) const fn backend(&self) -> &Backend {
        &self.backend
    }

    pub(super) fn cuts(&self) -> &Cuts {
        &self.cuts
    }

    /// The special tokens around every text, where they are known.
    pub(super) fn around(&self) -> Option<&Around> {
        self.around.as_deref()
    }

    pub(super) const fn fingerprint(&self) -> u128 {
        self.fingerprint
    }

    /// The ids of `text`, with the special tokens around it where asked for.
    pub(super) fn ids(&self, text: &str, special: bool) -> Result<Vec<TokenId>, Miss> {
        match self.fast.as_ref().and_then(|fast| fast.ids(text, special)) {
            Some(ids) => Ok(ids.into_iter().map(TokenId).collect()),
            None => self.reference_ids(text, special),
        }
    }

    fn reference_ids(&self, text: &str, special: bool) -> Result<Vec<TokenId>, Miss> {
        let encoding = self.reference.encode_fast(text, special).map_err(|_failed| Miss::Encode)?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    fn answer(&self, text: &str) -> Result<Answer, Miss> {
        Ok(Answer { bare: self.reference_ids(text, false)?, special: self.reference_ids(text, true)? })
    }
}

/// What the reference makes of a text, without and with special tokens around it.
struct Answer {
    bare: Vec<TokenId>,
    special: Vec<TokenId>,
}

impl Answer {
    fn is_of(&self, fast: &Fast, text: &str) -> bool {
        let same = |special, ids: &[TokenId]| {
            fast.ids(text, special).is_some_and(|fast| fast.iter().eq(ids.iter().map(|TokenId(id)| id)))
        };
        same(false, &self.bare) && same(true, &self.special)
    }

    fn around(&self) -> Option<Around> {
        let start = self.special.windows(self.bare.len().max(1)).position(|window| window == self.bare)?;
        let after = self.special[start + self.bare.len()..].to_vec();
        Some(Around { before: self.special[..start].to_vec(), after })
    }
}

//! Tokenizers that are staged and loaded, by model.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::tokenize::{ModelSlug, Tokenizer};

/// Models that a client may make us look for at a time: names come from outside.
const WANTED_MAX: usize = 64;
/// Models that are known to be unusable: more are forgotten, and looked for again when they are asked for.
const UNUSABLE_MAX: usize = 256;
/// Bytes of a name that is looked for: no file system has longer names.
const NAME_MAX: usize = 255;

/// What is known of one model's tokenizer.
#[derive(Clone, Debug)]
pub enum Staged {
    /// Loaded.
    Ready(Arc<Tokenizer>),
    /// Not usable; the text says which file is missing or what is wrong with it.
    Unusable(String),
}

/// A model to look for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its folder's name.
    pub slug: ModelSlug,
    /// Whether only a client has named it: any word may be one, so that it is not there is no news.
    pub by_client: bool,
}

/// The tokenizers in memory, and the models that requests asked for and nobody has looked for yet.
#[derive(Debug, Default)]
pub struct Tokenizers {
    staged: ArcSwap<HashMap<ModelSlug, Staged>>,
    any_heavy: AtomicBool,
    any_slow: AtomicBool,
    wanted: Mutex<Vec<Wanted>>,
    asked: Notify,
}

impl Tokenizers {
    /// The tokenizer for `model`.
    ///
    /// # Errors
    /// The detail of the miss: `loading` when it is being looked for, `not_staged` when it is missing or unusable.
    pub fn find(&self, model: &str) -> Result<Arc<Tokenizer>, &'static str> {
        let slug = ModelSlug::from(model);
        match self.staged.load().get(&slug) {
            Some(Staged::Ready(tokenizer)) => Ok(Arc::clone(tokenizer)),
            Some(Staged::Unusable(_)) => Err("not_staged"),
            None if slug.as_str().len() > NAME_MAX => Err("not_staged"),
            None => {
                self.add(Wanted { slug, by_client: true });
                Err("loading")
            }
        }
    }

    /// Whether a tokenizer in memory has a chat template that had better be filled aside, however small the chat.
    pub fn any_heavy(&self) -> bool {
        self.any_heavy.load(Ordering::Relaxed)
    }

    /// Whether a model's prompts are tokenised by the reference, which is many times slower.
    pub fn any_slow(&self) -> bool {
        self.any_slow.load(Ordering::Relaxed)
    }

    /// Whether something is known of a model.
    pub fn knows(&self, slug: &ModelSlug) -> bool {
        self.staged.load().contains_key(slug)
    }

    /// The folders' names of all that can be used.
    pub fn ready(&self) -> Vec<String> {
        let staged = self.staged.load();
        let ready = staged.iter().filter(|(_, staged)| matches!(staged, Staged::Ready(_)));
        let mut ready: Vec<_> = ready.map(|(slug, _)| slug.as_str().to_owned()).collect();
        ready.sort_unstable();
        ready
    }

    /// What is known of `model`, for a status; `None` before anybody looked.
    pub fn status(&self, model: &str) -> Option<Staged> {
        self.staged.load().get(&ModelSlug::from(model)).cloned()
    }

    /// Asks the staging edge to look for a model that a rule or an engine names.
    pub fn want(&self, slug: ModelSlug) {
        self.add(Wanted { slug, by_client: false });
    }

    fn add(&self, new: Wanted) {
        let mut wanted = self.wanted.lock();
        if let Some(known) = wanted.iter_mut().find(|known| known.slug == new.slug) {
            known.by_client &= new.by_client;
        } else if wanted.len() < WANTED_MAX {
            wanted.push(new);
            self.asked.notify_one();
        }
    }

    /// Waits until a model is wanted; takes all that are.
    pub async fn next_wanted(&self) -> Vec<Wanted> {
        loop {
            let asked = self.asked.notified();
            let wanted = std::mem::take(&mut *self.wanted.lock());
            if !wanted.is_empty() {
                return wanted;
            }
            asked.await;
        }
    }

    /// Puts what was found in force.
    pub fn put(&self, slug: &ModelSlug, staged: &Staged) {
        self.staged.rcu(|before| {
            let mut next = HashMap::clone(before);
            next.insert(slug.clone(), staged.clone());
            let unusable = |staged: &Staged| matches!(staged, Staged::Unusable(_));
            if next.values().filter(|staged| unusable(staged)).count() > UNUSABLE_MAX {
                next.retain(|known, staged| known == slug || !unusable(staged));
            }
            next
        });
        self.judge();
    }

    /// Puts a quicker twin in the place of a tokenizer that is still in force.
    pub fn quicken(&self, slug: &ModelSlug, before: &Arc<Tokenizer>, quick: &Arc<Tokenizer>) {
        self.staged.rcu(|staged| {
            let mut next = HashMap::clone(staged);
            if let Some(Staged::Ready(now)) = next.get_mut(slug)
                && Arc::ptr_eq(now, before)
            {
                *now = Arc::clone(quick);
            }
            next
        });
        self.judge();
    }

    fn judge(&self) {
        let staged = self.staged.load();
        let any = |which: fn(&Tokenizer) -> bool| {
            staged.values().any(|staged| matches!(staged, Staged::Ready(tokenizer) if which(tokenizer)))
        };
        self.any_heavy.store(any(Tokenizer::is_heavy), Ordering::Relaxed);
        self.any_slow.store(any(|tokenizer| !tokenizer.is_quick()), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn names_that_clients_make_up_are_forgotten_again() {
        let tokenizers = Tokenizers::default();
        for number in 0..10 * UNUSABLE_MAX {
            let name = format!("made/up-{number}");
            assert_eq!(tokenizers.find(&name).err(), Some("loading"));
            for wanted in tokenizers.next_wanted().await {
                tokenizers.put(&wanted.slug, &Staged::Unusable("no folder".to_owned()));
            }
            assert_eq!(tokenizers.find(&name).err(), Some("not_staged"));
            assert!(tokenizers.staged.load().len() <= UNUSABLE_MAX);
        }
        assert_eq!(tokenizers.find(&"x".repeat(NAME_MAX + 1)).err(), Some("not_staged"), "not even looked for");
        assert!(tokenizers.wanted.lock().is_empty());
    }

    #[tokio::test]
    async fn what_is_wanted_at_a_time_is_bounded_and_a_rules_word_counts_more_than_a_clients() {
        let tokenizers = Tokenizers::default();
        assert!(tokenizers.find("m").is_err());
        tokenizers.want(ModelSlug::from("m"));
        assert!(tokenizers.find("m").is_err());
        (0..1000).for_each(|number| tokenizers.want(ModelSlug::new(&number.to_string())));
        let wanted = tokenizers.next_wanted().await;
        assert_eq!(wanted[0], Wanted { slug: ModelSlug::from("m"), by_client: false });
        assert_eq!(wanted.len(), WANTED_MAX);
    }
}

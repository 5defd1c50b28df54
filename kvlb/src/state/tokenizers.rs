//! Tokenizers that are staged and loaded, by model.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::tokenize::{ModelSlug, Tokenizer};

/// Models that a client may make us look for at a time: names come from outside.
const WANTED_MAX: usize = 64;

/// What is known of one model's tokenizer.
#[derive(Clone, Debug)]
pub enum Staged {
    /// Loaded.
    Ready(Arc<Tokenizer>),
    /// Not usable; the text says which file is missing or what is wrong with it.
    Unusable(String),
}

/// The tokenizers in memory, and the models that requests asked for and nobody has looked for yet.
#[derive(Debug, Default)]
pub struct Tokenizers {
    staged: ArcSwap<HashMap<ModelSlug, Staged>>,
    wanted: Mutex<Vec<ModelSlug>>,
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
            None => {
                self.want(slug);
                Err("loading")
            }
        }
    }

    /// What is known of `model`, for a status; `None` before anybody looked.
    pub fn status(&self, model: &str) -> Option<Staged> {
        self.staged.load().get(&ModelSlug::from(model)).cloned()
    }

    /// Asks the staging edge to look for a model.
    pub fn want(&self, slug: ModelSlug) {
        let mut wanted = self.wanted.lock();
        if wanted.len() < WANTED_MAX && !wanted.contains(&slug) {
            wanted.push(slug);
            self.asked.notify_one();
        }
    }

    /// Waits until a model is wanted; takes all that are.
    pub async fn next_wanted(&self) -> Vec<ModelSlug> {
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
            next
        });
    }

    /// Forgets all models for which `keep` is false, so that they are looked for again.
    pub fn retain(&self, keep: impl Fn(&ModelSlug, &Staged) -> bool) {
        self.staged.rcu(|before| {
            let mut next = HashMap::clone(before);
            next.retain(|slug, staged| keep(slug, staged));
            next
        });
    }
}

//! One task per thing that has to be watched, kept in step with the things that there are.

use std::collections::BTreeMap;

use tokio::task::{AbortHandle, JoinHandle};

/// The tasks of one kind. Dropping the crew ends them all.
#[derive(Debug)]
pub(super) struct Crew<K, V> {
    tasks: BTreeMap<K, (V, AbortHandle)>,
}

impl<K, V> Default for Crew<K, V> {
    fn default() -> Self {
        Self { tasks: BTreeMap::new() }
    }
}

impl<K: Ord, V: PartialEq> Crew<K, V> {
    /// Ends the tasks of things that are gone or changed, and starts those that are missing.
    pub(super) fn update(
        &mut self,
        wanted: impl IntoIterator<Item = (K, V)>,
        mut start: impl FnMut(&K, &V) -> JoinHandle<()>,
    ) {
        let mut before = std::mem::take(&mut self.tasks);
        for (key, value) in wanted {
            let (kept, outdated) = match before.remove(&key) {
                Some((old, task)) if old == value && !task.is_finished() => (Some(task), None),
                other => (None, other),
            };
            if let Some((_, task)) = outdated {
                task.abort();
            }
            let task = kept.unwrap_or_else(|| start(&key, &value).abort_handle());
            if let Some((_, doubled)) = self.tasks.insert(key, (value, task)) {
                doubled.abort();
            }
        }
        for (_, gone) in before.into_values() {
            gone.abort();
        }
    }
}

impl<K, V> Drop for Crew<K, V> {
    fn drop(&mut self) {
        for (_, task) in self.tasks.values() {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn what_stays_keeps_its_task_and_what_changed_gets_a_new_one() {
        let started = Arc::new(AtomicUsize::new(0));
        let mut crew = Crew::default();
        let start = |_: &&str, _: &i32| {
            started.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(std::future::pending())
        };
        crew.update([("a", 1), ("b", 1)], start);
        assert_eq!(started.load(Ordering::Relaxed), 2);
        let first = crew.tasks["a"].1.clone();
        let second = crew.tasks["b"].1.clone();
        crew.update([("a", 1), ("b", 2)], start);
        assert_eq!(started.load(Ordering::Relaxed), 3);
        ended(&second).await;
        assert!(!first.is_finished());
        drop(crew);
        ended(&first).await;
    }

    /// Gives an aborted task the turns that it needs to end.
    async fn ended(task: &AbortHandle) {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(task.is_finished());
    }
}

//! The name of a model's folder in the staging directory.

use std::fmt;

/// A model's name as the name of its staged folder: every `/` becomes `__`.
///
/// The name may come from a client, so it is never made part of a path: it is compared with the names that the staging
/// directory lists. A name that could mean another place (`..`, a separator, a control character) equals none of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelSlug(String);

impl ModelSlug {
    /// The slug of `model`.
    pub fn new(model: &str) -> Self {
        Self(model.replace('/', "__"))
    }

    /// The slug's text. For messages and comparisons only: joining it to a path is what this type is there to prevent.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a staged folder called `name` is this model's.
    pub fn matches_dir(&self, name: &str) -> bool {
        self.0 == name && is_plain(name)
    }
}

/// Whether a name is one folder's, whatever the system makes of paths.
fn is_plain(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(|char: char| matches!(char, '/' | '\\') || char.is_control())
}

impl From<&str> for ModelSlug {
    fn from(model: &str) -> Self {
        Self::new(model)
    }
}

impl fmt::Display for ModelSlug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_becomes_two_underscores() {
        assert!(ModelSlug::new("Qwen/Qwen3-0.6B").matches_dir("Qwen__Qwen3-0.6B"));
        assert!(ModelSlug::new("a/b/c").matches_dir("a__b__c"));
        assert!(!ModelSlug::new("Qwen/Qwen3-0.6B").matches_dir("Qwen__Qwen3"));
    }

    #[test]
    fn a_name_that_means_another_place_matches_nothing() {
        for name in ["..", ".", "", "a\\b", "a\0b", "../../etc"] {
            assert!(!ModelSlug::new(name).matches_dir(name), "{name:?}");
        }
        assert_eq!(ModelSlug::new("../../etc/passwd").as_str(), "..__..__etc__passwd");
    }
}

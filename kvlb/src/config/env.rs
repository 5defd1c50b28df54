//! The environment, read once.

use std::collections::BTreeMap;
use std::net::SocketAddr;

/// All variables of a process, as they were when it was made.
#[derive(Clone, Debug, Default)]
pub struct Env {
    /// `None` for a value that is not UTF-8.
    variables: BTreeMap<String, Option<String>>,
}

impl Env {
    /// The environment of this process.
    pub fn of_process() -> Self {
        let variable = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()))
        };
        Self { variables: std::env::vars_os().filter_map(variable).collect() }
    }

    /// An environment of these variables alone.
    pub fn of<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let variables = variables.into_iter().map(|(name, value)| (name.to_owned(), Some(value.to_owned())));
        Self { variables: variables.collect() }
    }

    /// The value of a variable, also an empty one.
    ///
    /// # Errors
    /// [`ConfigError::NotText`] for a value that is not UTF-8.
    pub(super) fn text(&self, name: &'static str) -> Result<Option<&str>, ConfigError> {
        match self.variables.get(name) {
            None => Ok(None),
            Some(Some(value)) => Ok(Some(value)),
            Some(None) => Err(ConfigError::NotText(name)),
        }
    }

    /// The value of a variable, where it is set to something.
    pub(super) fn setting(&self, name: &'static str) -> Result<Option<Setting<'_>>, ConfigError> {
        Ok(self.text(name)?.filter(|value| !value.is_empty()).map(|value| Setting { name, value }))
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.variables.keys().map(String::as_str)
    }
}

/// A value, and where it was set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting<'a> {
    /// The flag or the variable.
    pub(super) name: &'static str,
    pub(super) value: &'a str,
}

impl Setting<'_> {
    /// A whole number within a range.
    pub(super) fn number(&self, first: u64, last: u64) -> Result<u64, ConfigError> {
        let number = self.value.trim().parse().ok().filter(|n| (first..=last).contains(n));
        number.ok_or_else(|| self.bad(format!("{first} to {last}")))
    }

    /// On or off, in LoxiLB's words.
    pub(super) fn switch(&self) -> Result<bool, ConfigError> {
        match self.value.trim().to_ascii_lowercase().as_str() {
            "1" | "true" | "on" | "yes" => Ok(true),
            "0" | "false" | "off" | "no" => Ok(false),
            _ => Err(self.bad("1, true, on, yes, or 0, false, off, no")),
        }
    }

    /// One of some words.
    pub(super) fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<T, ConfigError> {
        let found = words.iter().find(|(word, _)| *word == self.value.trim());
        found.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
            self.bad(words.join(", "))
        })
    }

    pub(super) fn bad(&self, allowed: impl Into<String>) -> ConfigError {
        ConfigError::Bad { name: self.name, value: self.value.to_owned(), allowed: allowed.into() }
    }
}

/// Why kvlb does not start with these flags and variables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A value that means nothing, or lies outside its range.
    #[error("{name} is {value:?}; allowed: {allowed}")]
    Bad {
        /// The flag or the variable.
        name: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// A value that is not UTF-8.
    #[error("{0} is not UTF-8 text")]
    NotText(&'static str),
    /// A flag that means nothing without another.
    #[error("{0} needs {1} too")]
    Needs(&'static str, &'static str),
    /// Two flags that contradict each other.
    #[error("{0} and {1} contradict each other")]
    Both(&'static str, &'static str),
    /// An API that everybody would reach and nobody guard.
    #[error(
        "{name} {address} can be reached from other hosts, and no token guards it. Three ways out: --api-token-file \
         FILE (make one: `(umask 077; openssl rand -hex 32 > FILE)`), a loopback address as 127.0.0.1:{}, or \
         --api-without-token where whoever reaches it may change rules [api_unguarded]",
        address.port()
    )]
    Unguarded {
        /// The flag or the variable.
        name: &'static str,
        /// Where the API would listen.
        address: SocketAddr,
    },
}

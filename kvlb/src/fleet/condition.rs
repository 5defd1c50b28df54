//! Who may be asked now.

use std::fmt;

/// What the active probe last said of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Probe {
    /// Nothing yet, or probing is off: counts as up.
    #[default]
    Unknown,
    /// The last verdict was good.
    Up,
    /// The last verdict was bad.
    Down,
}

/// What the operator said of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admin {
    /// In service.
    #[default]
    Up,
    /// Weight 0: running requests finish, no new one is sent.
    Draining,
    /// Out of service.
    Down,
}

/// The circuit breaker of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Breaker {
    /// Traffic flows.
    #[default]
    Closed,
    /// It has been open for long enough: a few requests are let through to see.
    HalfOpen,
    /// Too many failures in a row: no traffic for a while.
    Open,
}

/// Everything that decides whether an endpoint may be asked, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// The active probe's verdict.
    pub probe: Probe,
    /// The operator's word.
    pub admin: Admin,
    /// The circuit breaker.
    pub breaker: Breaker,
}

impl Condition {
    /// Whether a new request may be sent there.
    pub fn eligible(self) -> bool {
        self.in_service() && self.breaker != Breaker::Open
    }

    /// Whether a new request may be sent there as far as probe and operator are concerned.
    pub fn in_service(self) -> bool {
        self.probe != Probe::Down && self.admin == Admin::Up
    }

    /// The word that `get lb` and `get ep` show.
    pub fn label(self) -> &'static str {
        match self {
            Self { admin: Admin::Down, .. } => "admin-down",
            Self { admin: Admin::Draining, .. } => "draining",
            Self { probe: Probe::Down, .. } => "inactive",
            Self { breaker: Breaker::Open, .. } => "breaker-open",
            Self { breaker: Breaker::HalfOpen, .. } => "half-open",
            Self { probe: Probe::Unknown, .. } => "-",
            Self { probe: Probe::Up, .. } => "active",
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_eligible_until_one_word_is_against_it() {
        assert!(Condition::default().eligible());
        assert!(Condition { probe: Probe::Up, ..Condition::default() }.eligible());
        assert!(!Condition { probe: Probe::Down, ..Condition::default() }.eligible());
        assert!(!Condition { admin: Admin::Draining, ..Condition::default() }.eligible());
        let open = Condition { probe: Probe::Up, breaker: Breaker::Open, ..Condition::default() };
        assert!(!open.eligible());
        assert_eq!(open.label(), "breaker-open");
        let trying = Condition { breaker: Breaker::HalfOpen, ..open };
        assert!(trying.eligible() && open.in_service());
        assert_eq!(trying.label(), "half-open");
    }
}

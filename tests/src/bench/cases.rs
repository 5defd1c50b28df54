//! The work that proxies are compared at.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::load::Shape;
use super::proxies::Proxy;

/// One kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Case {
    /// POST of 2 KB, one at a time
    C1,
    /// POST of 2 KB on 64 connections
    Post2k,
    /// POST of 64 KB on 64 connections
    Post64k,
    /// POST of 1 MB on 16 connections
    Post1m,
    /// POST of 2 KB, each on a connection of its own, 64 at a time
    New,
    /// 500 streams, an event each 20 ms
    Sse,
    /// POST of 2 KB on 64 connections, KV on, of prompts that two engines announced; the mock answers
    Kvwarm,
    /// The same, and the simulated engines answer
    Kvengines,
    /// Memory of 4000 connections, idle after one request
    Idle,
    /// Memory of 2000 streams, an event each 200 ms
    Streams,
}

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Upstream {
    /// The mock, at two ports.
    Mock,
    /// The mock in the place of two simulated engines, which announce what they hold. It answers far more than they could: a
    /// proxy that waits for engines most of the time pays for waking up, and what KV costs is lost in that.
    Announced,
    /// Two simulated engines.
    Engines,
}

impl Case {
    /// As it is written on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// What it is, in a line.
    pub(super) fn title(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|value| value.get_help().map(ToString::to_string)).unwrap_or_default()
    }

    pub(super) fn upstream(self) -> Upstream {
        match self {
            Self::Kvwarm => Upstream::Announced,
            Self::Kvengines => Upstream::Engines,
            _ => Upstream::Mock,
        }
    }

    /// Whether this proxy can be compared here: engines are for kvlb's KV tier and the yardstick, and the mock is not started
    /// afresh, so that what it holds says nothing.
    pub(super) fn suits(self, proxy: Proxy) -> bool {
        match self.upstream() {
            Upstream::Mock => proxy != Proxy::Direct || !self.is_about_memory(),
            Upstream::Announced | Upstream::Engines => proxy.is_kvlb() || proxy == Proxy::Haproxy,
        }
    }

    /// Whether memory is what it is about; such a case has a proxy of its own, so that no other case has left memory behind.
    pub(super) fn is_about_memory(self) -> bool {
        matches!(self, Self::Idle | Self::Streams)
    }

    pub(super) fn connections(self) -> usize {
        match self {
            Self::C1 => 1,
            Self::Post2k | Self::Post64k | Self::New | Self::Kvwarm => 64,
            // Enough that the engines are busy.
            Self::Kvengines => 32,
            Self::Post1m => 16,
            Self::Sse => 500,
            Self::Idle => 4000,
            Self::Streams => 2000,
        }
    }

    pub(super) fn body(self) -> usize {
        match self {
            Self::Post64k => 64 << 10,
            Self::Post1m => 1 << 20,
            _ => 2 << 10,
        }
    }

    pub(super) fn shape(self) -> Shape {
        match self {
            Self::New => Shape::New,
            Self::Sse | Self::Streams => Shape::Sse,
            Self::Idle => Shape::Hold,
            Self::Kvwarm => Shape::Prompts,
            Self::Kvengines => Shape::Warm,
            Self::C1 | Self::Post2k | Self::Post64k | Self::Post1m => Shape::Post,
        }
    }

    /// Beats from one event to the next.
    pub(super) fn every(self) -> usize {
        if self == Self::Streams { 10 } else { 1 }
    }

    /// Seconds until everything has found its pace.
    pub(super) fn warm(self) -> f64 {
        match self {
            Self::Sse | Self::Streams | Self::Kvwarm | Self::Kvengines => 1.0,
            _ => 0.5,
        }
    }

    /// What is counted.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Sse => "event",
            Self::Idle => "connection",
            Self::Streams => "stream",
            _ => "request",
        }
    }
}

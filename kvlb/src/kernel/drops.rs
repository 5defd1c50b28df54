//! Drops that the programs tell of, as they come.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use aya::Ebpf;
use aya::maps::{MapData, RingBuf};
use kvlb_common::{DROPPED_BYTES, DropReason, Dropped as Event, SAMPLE_INTERVAL_NS, addr_from_bytes};

use super::Error;
use super::maps::typed;

/// A drop that a program told of: one of some ten a second for each reason and CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Why.
    pub reason: DropReason,
    /// Who sent it, and whom it was for; nothing where the frame was not read that far.
    pub between: Option<(SocketAddr, SocketAddr)>,
    /// The oldest rule at that VIP.
    pub rule: Option<u32>,
    /// Drops for this reason since the last one that was told of, this one included.
    pub count: u32,
}

impl Dropped {
    /// What a program wrote; nothing when that is no drop.
    fn read(bytes: &[u8]) -> Option<Self> {
        let event = Event::from_bytes(bytes.first_chunk::<DROPPED_BYTES>()?);
        let at = |addr, port| SocketAddr::new(addr_from_bytes(addr), port);
        let (source, target) = (at(event.source, event.source_port), at(event.target, event.target_port));
        Some(Self {
            reason: DropReason::of(event.reason)?,
            between: (!target.ip().is_unspecified()).then_some((source, target)),
            rule: Some(event.rule).filter(|rule| *rule != 0),
            count: event.count,
        })
    }
}

/// The ring in which the programs tell of drops. While nobody reads it they go on counting, and tell of no one.
pub struct Drops(RingBuf<MapData>);

impl Drops {
    /// The ring of the object.
    pub(super) fn open(ebpf: &mut Ebpf) -> Result<Self, Error> {
        typed(ebpf, "KVLB_EVENTS").map(Self)
    }

    /// The next one that is there already.
    pub fn take(&mut self) -> Option<Dropped> {
        loop {
            let bytes = self.0.next()?;
            if let Some(dropped) = Dropped::read(&bytes) {
                return Some(dropped);
            }
        }
    }

    /// Passes them on as they come, until the future is dropped.
    pub async fn follow(mut self, mut tell: impl FnMut(Dropped)) {
        let mut ticks = tokio::time::interval(Duration::from_nanos(SAMPLE_INTERVAL_NS));
        loop {
            ticks.tick().await;
            while let Some(dropped) = self.take() {
                tell(dropped);
            }
        }
    }
}

impl fmt::Debug for Drops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drops").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::host_endian_bytes, reason = "so the programs write it")]
    fn a_drop_is_read_as_the_programs_write_it_and_nothing_else_is_one() {
        let mut bytes = [0; DROPPED_BYTES];
        bytes[10..16].copy_from_slice(&[255, 255, 10, 77, 0, 2]);
        bytes[26..32].copy_from_slice(&[255, 255, 10, 98, 0, 1]);
        bytes[32..34].copy_from_slice(&40_000_u16.to_ne_bytes());
        bytes[34..36].copy_from_slice(&80_u16.to_ne_bytes());
        bytes[36..40].copy_from_slice(&1_u32.to_ne_bytes());
        bytes[40..44].copy_from_slice(&7_u32.to_ne_bytes());
        bytes[44..48].copy_from_slice(&99_u32.to_ne_bytes());
        let between = ("10.77.0.2:40000".parse().unwrap(), "10.98.0.1:80".parse().unwrap());
        let rate = Dropped { reason: DropReason::Rate, between: Some(between), rule: Some(7), count: 99 };
        assert_eq!(Dropped::read(&bytes), Some(rate));
        assert_eq!(Dropped::read(&bytes[..47]), None);
        bytes[36..40].copy_from_slice(&kvlb_common::DROP_REASONS.to_ne_bytes());
        assert_eq!(Dropped::read(&bytes), None);
        let mut chain = [0; DROPPED_BYTES];
        chain[36..40].copy_from_slice(&3_u32.to_ne_bytes());
        assert_eq!(
            Dropped::read(&chain),
            Some(Dropped { reason: DropReason::Chain, between: None, rule: None, count: 0 })
        );
    }
}

//! What the programs tell of those that they drop: now and then one of them, and how many there were.

/// Bytes of the ring in which the programs tell of drops: some thousand of them, while nobody reads.
pub const EVENTS_BYTES: u32 = 65_536;

/// Each CPU tells of one drop in this time for each reason: enough to see who it is, and no load in a flood.
pub const SAMPLE_INTERVAL_NS: u64 = 100_000_000;

/// How many reasons there are.
pub const DROP_REASONS: u32 = 7;

/// Why a connection or a frame was dropped.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DropReason {
    /// At a device: its source is not among those that may connect.
    Acl = 0,
    /// At a device: its source sent too many SYNs.
    Rate = 1,
    /// At a device: a fragment that hides whether it is of a SYN.
    Cut = 2,
    /// At a device: too many IPv6 extension headers, for whomever.
    Chain = 3,
    /// By steering: its source is not among those that may connect.
    Denied = 4,
    /// By steering: no endpoint may be chosen.
    NoEndpoint = 5,
    /// By steering: no listener was there to take it.
    NoListener = 6,
}

impl DropReason {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 7] =
        [Self::Acl, Self::Rate, Self::Cut, Self::Chain, Self::Denied, Self::NoEndpoint, Self::NoListener];

    /// The word for it in metrics and in `get drops`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Acl => "acl",
            Self::Rate => "rate",
            Self::Cut => "cut",
            Self::Chain => "chain",
            Self::Denied => "denied",
            Self::NoEndpoint => "no_endpoint",
            Self::NoListener => "no_listener",
        }
    }

    /// The reason of this number.
    pub fn of(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| *reason as u32 == number)
    }
}

/// One drop that a program tells of: an element of the ring `EVENTS`. Addresses are 16 bytes, IPv4 as `::ffff:a.b.c.d`; all
/// zero where the frame was not read that far.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Who sent it.
    pub source: [u8; 16],
    /// The VIP.
    pub target: [u8; 16],
    /// The sender's port, in host order.
    pub source_port: u16,
    /// The VIP's port, in host order.
    pub target_port: u16,
    /// [`DropReason`].
    pub reason: u32,
    /// The oldest rule that is served at the VIP; 0 for no VIP.
    pub rule: u32,
    /// Drops for this reason on its CPU since the one before that was told of, this one included.
    pub count: u32,
}

/// Bytes of a [`Dropped`].
pub const DROPPED_BYTES: usize = size_of::<Dropped>();

impl Dropped {
    /// The element of the ring, in the byte order of this machine.
    #[expect(clippy::host_endian_bytes, reason = "programs on this machine wrote it")]
    pub fn from_bytes(bytes: &[u8; DROPPED_BYTES]) -> Self {
        let (addresses, rest) = bytes.split_at(32);
        let (source, target) = addresses.split_at(16);
        let of = |bytes: &[u8]| bytes.first_chunk().copied().unwrap_or([0; 16]);
        let word = |at: usize| u32::from_ne_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]]);
        Self {
            source: of(source),
            target: of(target),
            source_port: u16::from_ne_bytes([rest[0], rest[1]]),
            target_port: u16::from_ne_bytes([rest[2], rest[3]]),
            reason: word(4),
            rule: word(8),
            count: word(12),
        }
    }
}

/// What a CPU has to tell of one reason: value of the map `SAMPLED`, by the reason's number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// From when on the next drop is told of, in nanoseconds of the kernel's monotonic clock.
    pub next_ns: u64,
    /// Drops that nobody has been told of yet.
    pub untold: u32,
    /// Always 0.
    pub pad: u32,
}

impl Sample {
    /// Counts a drop at `now`. How many it stands for where it is to be told of.
    #[inline(always)]
    pub const fn count(&mut self, now: u64) -> Option<u32> {
        self.untold = self.untold.saturating_add(1);
        if now < self.next_ns { None } else { Some(self.untold) }
    }

    /// They have been told of at `now`.
    #[inline(always)]
    pub const fn told(&mut self, now: u64) {
        self.untold = 0;
        self.next_ns = now.saturating_add(SAMPLE_INTERVAL_NS);
    }
}

const _: () = assert!(DropReason::ALL.len() == DROP_REASONS as usize);
const _: () = assert!(size_of::<Dropped>() == 48 && align_of::<Dropped>() == 4);
const _: () = assert!(size_of::<Sample>() == 16 && align_of::<Sample>() == 8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_found_by_its_number_and_no_other_is() {
        for (number, reason) in (0..).zip(DropReason::ALL) {
            assert_eq!((reason as u32, DropReason::of(number)), (number, Some(reason)));
        }
        assert_eq!(DropReason::of(DROP_REASONS), None);
    }

    #[test]
    fn of_a_flood_some_are_told_of_and_none_is_left_out_of_the_count() {
        let (mut sample, mut told, mut events) = (Sample::default(), 0, 0);
        let second = 1_000_000_000;
        for at in (second..2 * second).step_by(5000) {
            if let Some(count) = sample.count(at) {
                (told, events) = (told + u64::from(count), events + 1);
                sample.told(at);
            }
        }
        assert_eq!((events, told + u64::from(sample.untold)), (10, 200_000));
        // What could not be told, since the ring is full, is told with the next.
        let at = 3 * second;
        let rest = sample.untold;
        assert_eq!((sample.count(at), sample.count(at)), (Some(rest + 1), Some(rest + 2)));
    }
}

//! What kvlb's kernel programs and its user side both speak: the keys and values of the maps, and the arithmetic that
//! needs neither a map nor a packet.
//!
//! Every struct is `repr(C)`, spells its padding out and has its size asserted, since one side is compiled for the
//! kernel's machine and the other for the host. Addresses are 16 bytes, IPv4 as `::ffff:a.b.c.d`, so that one key type
//! serves both families. Ports are in host order, so that `bpftool` prints the number that an operator typed.

#![no_std]
#![expect(
    clippy::inline_always,
    reason = "a call in a kernel program costs verifier work and stack, and takes five words"
)]

use core::net::IpAddr;

mod drops;
mod flow;
mod pace;
pub mod packet;

pub use drops::{DROP_REASONS, DROPPED_BYTES, DropReason, Dropped, EVENTS_BYTES, SAMPLE_INTERVAL_NS, Sample};
pub use flow::Flow;
pub use pace::Pace;

/// VIPs (address and port) that the kernel can steer at a time. One rule with a range of ports takes one per port.
pub const VIPS_MAX: u32 = 4096;

/// Endpoint entries of all VIPs together.
pub const ENDPOINTS_MAX: u32 = 4096;

/// Listeners that VIPs can be spread over: one per data thread, and more cores than any machine of this trade has.
pub const LISTENERS_MAX: u32 = 1024;

/// Networks of all `allowedSources` lists together, for each family.
pub const NETWORKS_MAX: u32 = 16_384;

/// Sources whose SYNs are counted at a time, of all rules together. Beyond it the kernel forgets those that were quiet for
/// longest; one that comes back then has its whole burst.
pub const SOURCES_MAX: u32 = 65_536;

/// IP protocol number of TCP, the only protocol that is steered.
pub const TCP: u8 = 6;

/// [`VipInfo::flags`]: refuse connections (RST) while no endpoint is healthy, rather than let the proxy answer 503.
pub const VIP_RESET: u32 = 1;

/// [`VipInfo::flags`]: take no new connections, but keep the address while open ones end.
pub const VIP_DRAINING: u32 = 2;

/// [`VipInfo::flags`]: kvlb added the local route of this address, so kvlb removes it; also after a crash, which is why
/// it is written here. The programs do not look at it.
pub const VIP_ROUTE: u32 = 4;

/// [`VipInfo::flags`]: only sources on the list [`VipInfo::allowed`] may connect.
pub const VIP_ALLOWED: u32 = 8;

/// What a VIP is found by: key of the map `VIPS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VipKey {
    /// IPv6 address, or IPv4 as `::ffff:a.b.c.d`.
    pub addr: [u8; 16],
    /// Host order; 0 stands for every port that has no entry of its own.
    pub port: u16,
    /// [`TCP`].
    pub proto: u8,
    /// Always 0: the kernel compares keys byte by byte.
    pub pad: u8,
}

impl VipKey {
    /// The key of `addr` and `port` for TCP.
    #[inline(always)]
    pub const fn tcp(addr: [u8; 16], port: u16) -> Self {
        Self { addr, port, proto: TCP, pad: 0 }
    }

    /// The key that stands for every port of the same address.
    #[inline(always)]
    #[must_use]
    pub const fn any_port(self) -> Self {
        Self { port: 0, ..self }
    }
}

/// What the kernel knows of a VIP: value of the map `VIPS`, replaced as a whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VipInfo {
    /// Its counters' index in `STATS`.
    pub id: u32,
    /// The oldest rule that is served here, as the operator knows it.
    pub rule: u32,
    /// [`VIP_RESET`], [`VIP_DRAINING`], [`VIP_ROUTE`], [`VIP_ALLOWED`].
    pub flags: u32,
    /// Its endpoints are `EPS[ep_base .. ep_base + ep_count]`.
    pub ep_base: u32,
    /// Number of its endpoints.
    pub ep_count: u32,
    /// How many of them may be chosen; written after their entries.
    pub healthy: u32,
    /// Its listeners are `LISTEN[listener .. listener + workers]`.
    pub listener: u32,
    /// Number of its listeners; 0 while the proxy does not listen yet.
    pub workers: u32,
    /// SYNs per second that one source may send, 0 for no limit; where frames arrive at devices with admission.
    pub syn_per_sec: u32,
    /// SYNs that one source may send at once under that limit.
    pub syn_burst: u32,
    /// The rule that this limit is of: a source has one bucket at all VIPs of a rule.
    pub syn_rule: u32,
    /// The list in `ACL4` and `ACL6` that sources must be on, with [`VIP_ALLOWED`].
    pub allowed: u32,
}

/// What becomes of a new connection to a VIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Hand it to one of the VIP's listeners.
    Steer,
    /// Refuse it at once.
    Refuse,
    /// Leave it to the kernel's own look-up.
    Pass,
}

impl VipInfo {
    /// How often one source may open a connection; nothing for as often as it likes.
    #[inline(always)]
    pub const fn pace(&self) -> Option<Pace> {
        Pace::new(self.syn_per_sec, self.syn_burst)
    }

    /// What becomes of a new connection to this VIP, from a source that may connect.
    #[inline(always)]
    pub const fn verdict(&self) -> Verdict {
        if self.flags & VIP_DRAINING != 0 {
            Verdict::Pass
        } else if self.flags & VIP_RESET != 0 && self.healthy == 0 {
            Verdict::Refuse
        } else {
            Verdict::Steer
        }
    }
}

/// Whether an endpoint may be chosen, and if not, why. The numbers are the kernel's; `bpftool` prints the names.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EndpointState {
    /// No probe has judged it yet. An unused entry of `EPS` reads so, too.
    #[default]
    Unknown = 0,
    /// May be chosen.
    Up = 1,
    /// The probe fails.
    ProbeDown = 2,
    /// The operator took it out.
    AdminDown = 3,
    /// The breaker is open.
    BreakerOpen = 4,
    /// Finishes what it has, takes nothing new.
    Draining = 5,
    /// The breaker was open for long enough: a few requests try.
    HalfOpen = 6,
}

/// One endpoint of a VIP: value of the map `EPS`.
///
/// The user side only ever writes it (as [`Endpoint::to_bytes`]): bytes that another program put into the map need not
/// be an [`EndpointState`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Endpoint {
    /// IPv6 address, or IPv4 as `::ffff:a.b.c.d`.
    pub addr: [u8; 16],
    /// Host order.
    pub port: u16,
    /// Always 0.
    pub pad: u16,
    /// Whether it may be chosen.
    pub state: EndpointState,
    /// Its share beside the VIP's other endpoints.
    pub weight: u32,
}

/// Bytes of an [`Endpoint`].
pub const ENDPOINT_BYTES: usize = size_of::<Endpoint>();

impl Endpoint {
    /// The entry as it lies in the map, in the byte order of this machine.
    #[expect(clippy::host_endian_bytes, reason = "the map is read by programs on this machine")]
    pub fn to_bytes(&self) -> [u8; ENDPOINT_BYTES] {
        let mut bytes = [0; ENDPOINT_BYTES];
        bytes[..16].copy_from_slice(&self.addr);
        bytes[16..18].copy_from_slice(&self.port.to_ne_bytes());
        bytes[20..24].copy_from_slice(&(self.state as u32).to_ne_bytes());
        bytes[24..28].copy_from_slice(&self.weight.to_ne_bytes());
        bytes
    }
}

/// What became of look-ups and frames for a VIP, per CPU: value of the map `STATS`, written by the programs.
///
/// The kernel looks for a listener once per SYN, so the first four count connections, and also what looks like a new one: a
/// SYN that is sent again, a late packet of a connection that is gone. The others count frames at devices with admission.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VipStats {
    /// Handed to a listener.
    pub steered: u64,
    /// Refused since no endpoint was healthy.
    pub refused: u64,
    /// Left to the kernel's own look-up since no listener was there to take it.
    pub no_listener: u64,
    /// Refused since the source is not among those that may connect.
    pub denied: u64,
    /// SYNs that passed.
    pub syn_passed: u64,
    /// SYNs that were dropped: their source sent too many.
    pub syn_over_rate: u64,
    /// SYNs that were dropped: their source is not among those that may connect.
    pub syn_denied: u64,
    /// First fragments that were dropped: they do not say whether they are of a SYN.
    pub cut: u64,
    /// Anything else, which passes.
    pub other: u64,
}

impl VipStats {
    /// Look-ups for the VIP that did not end at a listener.
    #[must_use]
    pub const fn not_steered(&self) -> u64 {
        self.refused.wrapping_add(self.no_listener).wrapping_add(self.denied)
    }

    /// The sum with another CPU's counters.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            steered: self.steered.wrapping_add(other.steered),
            refused: self.refused.wrapping_add(other.refused),
            no_listener: self.no_listener.wrapping_add(other.no_listener),
            denied: self.denied.wrapping_add(other.denied),
            syn_passed: self.syn_passed.wrapping_add(other.syn_passed),
            syn_over_rate: self.syn_over_rate.wrapping_add(other.syn_over_rate),
            syn_denied: self.syn_denied.wrapping_add(other.syn_denied),
            cut: self.cut.wrapping_add(other.cut),
            other: self.other.wrapping_add(other.other),
        }
    }
}

/// An IPv4 network of a list: what follows the length in a key of the map `ACL4`.
///
/// Of the length the first 32 bits are the list's ([`LIST_BITS`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network4 {
    /// [`VipInfo::allowed`] of the VIPs that the list is for.
    pub list: u32,
    /// Its first address.
    pub addr: [u8; 4],
}

/// An IPv6 network of a list, as [`Network4`]; in `ACL6`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network6 {
    /// [`VipInfo::allowed`] of the VIPs that the list is for.
    pub list: u32,
    /// Its first address.
    pub addr: [u8; 16],
}

/// Bits of a key in `ACL4` and `ACL6` that name the list, before those of the address.
pub const LIST_BITS: u32 = 32;

/// Which object the maps are of: value of the map `STAMP`. What maps of the same object hold can be used on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// A hash of the object; 0 before the maps are pinned.
    pub object: u64,
}

/// Who has a bucket: key of the map `SYN`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// [`VipInfo::syn_rule`] of the VIP that it sends SYNs to.
    pub rule: u32,
    /// IPv6 address, or IPv4 as `::ffff:a.b.c.d`.
    pub addr: [u8; 16],
}

/// A source's bucket: value of the map `SYN`, replaced at one stroke.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    /// When it will be full again, in nanoseconds of the kernel's monotonic clock (see [`Pace`]).
    pub full_at: u64,
}

/// Frames for no VIP at devices with admission, per CPU: the value of the map `FRAMES`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameStats {
    /// Not TCP, or for no VIP; they pass.
    pub foreign: u64,
    /// Fragments but the first ones; they pass.
    pub fragments: u64,
    /// Cut off or contradicting themselves; they pass, and Linux drops them.
    pub malformed: u64,
    /// With more IPv6 extension headers than are read; dropped.
    pub chains: u64,
}

impl FrameStats {
    /// The sum with another CPU's counters.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            foreign: self.foreign.wrapping_add(other.foreign),
            fragments: self.fragments.wrapping_add(other.fragments),
            malformed: self.malformed.wrapping_add(other.malformed),
            chains: self.chains.wrapping_add(other.chains),
        }
    }
}

// No padding but what is spelled out, on either side.
const _: () = assert!(size_of::<VipKey>() == 20 && align_of::<VipKey>() == 2);
const _: () = assert!(size_of::<VipInfo>() == 48 && align_of::<VipInfo>() == 4);
const _: () = assert!(size_of::<Endpoint>() == 28 && align_of::<Endpoint>() == 4);
const _: () = assert!(size_of::<EndpointState>() == 4);
const _: () = assert!(size_of::<VipStats>() == 72 && align_of::<VipStats>() == 8);
const _: () = assert!(size_of::<Network4>() == 8 && size_of::<Network6>() == 20 && align_of::<Network6>() == 4);
const _: () = assert!(size_of::<Stamp>() == 8 && align_of::<Stamp>() == 8);
const _: () = assert!(size_of::<Source>() == 20 && align_of::<Source>() == 4);
const _: () = assert!(size_of::<Bucket>() == 8 && align_of::<Bucket>() == 8);
const _: () = assert!(size_of::<FrameStats>() == 32 && align_of::<FrameStats>() == 8);

/// An address as the maps hold it: IPv6 as it is, IPv4 as `::ffff:a.b.c.d`.
pub const fn addr_bytes(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The IPv4 address that the maps hold as `bytes`; nothing for one of IPv6.
#[inline(always)]
pub const fn v4_octets(bytes: &[u8; 16]) -> Option<[u8; 4]> {
    match *bytes {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d] => Some([a, b, c, d]),
        _ => None,
    }
}

/// The address that the maps hold as `bytes`.
pub const fn addr_from_bytes(bytes: [u8; 16]) -> IpAddr {
    core::net::Ipv6Addr::from_octets(bytes).to_canonical()
}

#[cfg(feature = "user")]
mod user {
    #![expect(unsafe_code, reason = "aya marks plain data with an unsafe trait")]

    use super::{Bucket, FrameStats, Network4, Network6, Source, Stamp, VipInfo, VipKey, VipStats};

    // SAFETY: `repr(C)`, integers and arrays of them only, no padding (asserted above): every byte pattern is a value.
    unsafe impl aya::Pod for VipKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for VipInfo {}
    // SAFETY: as above.
    unsafe impl aya::Pod for VipStats {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Network4 {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Network6 {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Source {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Bucket {}
    // SAFETY: as above.
    unsafe impl aya::Pod for FrameStats {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Stamp {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vip(flags: u32, healthy: u32) -> VipInfo {
        VipInfo { flags, healthy, ..VipInfo::default() }
    }

    #[test]
    fn an_ipv4_address_is_held_as_mapped_and_comes_back_as_ipv4() {
        let addr: IpAddr = "10.98.0.1".parse().unwrap();
        assert_eq!(addr_bytes(addr), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 98, 0, 1]);
        assert_eq!(addr_from_bytes(addr_bytes(addr)), addr);
    }

    #[test]
    fn an_ipv6_address_is_held_as_it_is() {
        let addr: IpAddr = "fd77::1".parse().unwrap();
        assert_eq!(addr_from_bytes(addr_bytes(addr)), addr);
    }

    #[test]
    fn without_healthy_endpoints_only_a_rule_that_says_reset_refuses() {
        assert_eq!(vip(0, 0).verdict(), Verdict::Steer);
        assert_eq!(vip(VIP_RESET, 0).verdict(), Verdict::Refuse);
        assert_eq!(vip(VIP_RESET, 1).verdict(), Verdict::Steer);
    }

    #[test]
    fn a_draining_vip_takes_nothing_new() {
        assert_eq!(vip(VIP_DRAINING, 1).verdict(), Verdict::Pass);
        assert_eq!(vip(VIP_DRAINING | VIP_RESET, 0).verdict(), Verdict::Pass);
    }

    #[test]
    #[expect(clippy::host_endian_bytes, reason = "the map is read by programs on this machine")]
    fn an_endpoint_is_written_field_by_field_where_the_struct_has_them() {
        let endpoint = Endpoint {
            addr: addr_bytes("10.0.0.7".parse().unwrap()),
            port: 8000,
            pad: 0,
            state: EndpointState::BreakerOpen,
            weight: 3,
        };
        let bytes = endpoint.to_bytes();
        assert_eq!(bytes[core::mem::offset_of!(Endpoint, addr)..][12..16], [10, 0, 0, 7]);
        assert_eq!(bytes[core::mem::offset_of!(Endpoint, port)..][..2], 8000u16.to_ne_bytes());
        assert_eq!(bytes[core::mem::offset_of!(Endpoint, state)..][..4], 4u32.to_ne_bytes());
        assert_eq!(bytes[core::mem::offset_of!(Endpoint, weight)..][..4], 3u32.to_ne_bytes());
    }

    #[test]
    fn counters_of_two_cpus_add_up_field_by_field() {
        let of = |steered: u64| VipStats {
            steered,
            refused: 2 * steered,
            no_listener: 3 * steered,
            denied: 4 * steered,
            syn_passed: 5 * steered,
            syn_over_rate: 6 * steered,
            syn_denied: 7 * steered,
            cut: 8 * steered,
            other: 9 * steered,
        };
        assert_eq!(of(1).plus(of(10)), of(11));
        let of =
            |foreign: u64| FrameStats { foreign, fragments: 2 * foreign, malformed: 3 * foreign, chains: 4 * foreign };
        assert_eq!(of(1).plus(of(10)), of(11));
    }

    #[test]
    fn an_ipv4_address_is_told_from_those_of_ipv6() {
        let v4 = |text: &str| v4_octets(&addr_bytes(text.parse().unwrap()));
        assert_eq!(v4("10.98.0.1"), Some([10, 98, 0, 1]));
        assert_eq!((v4("fd98::ffff:a62:1"), v4("::a62:1"), v4("::fffe:a62:1")), (None, None, None));
    }
}

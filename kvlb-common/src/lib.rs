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

mod flow;

pub use flow::Flow;

/// VIPs (address and port) that the kernel can steer at a time. One rule with a range of ports takes one per port.
pub const VIPS_MAX: u32 = 4096;

/// Endpoint entries of all VIPs together.
pub const ENDPOINTS_MAX: u32 = 4096;

/// Listeners that VIPs can be spread over: one per data thread, and more cores than any machine of this trade has.
pub const LISTENERS_MAX: u32 = 1024;

/// IP protocol number of TCP, the only protocol that is steered.
pub const TCP: u8 = 6;

/// [`VipInfo::flags`]: refuse connections (RST) while no endpoint is healthy, rather than let the proxy answer 503.
pub const VIP_RESET: u32 = 1;

/// [`VipInfo::flags`]: take no new connections, but keep the address while open ones end.
pub const VIP_DRAINING: u32 = 2;

/// [`VipInfo::flags`]: kvlb added the local route of this address, so kvlb removes it; also after a crash, which is why
/// it is written here. The programs do not look at it.
pub const VIP_ROUTE: u32 = 4;

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
    /// [`VIP_RESET`], [`VIP_DRAINING`], [`VIP_ROUTE`].
    pub flags: u32,
    /// Its endpoints are `EPS[ep_base .. ep_base + ep_count]`.
    pub ep_base: u32,
    /// Number of its endpoints.
    pub ep_count: u32,
    /// How many of them are [`EndpointState::Up`]; written after their entries.
    pub healthy: u32,
    /// Its listeners are `LISTEN[listener .. listener + workers]`.
    pub listener: u32,
    /// Number of its listeners; 0 while the proxy does not listen yet.
    pub workers: u32,
    /// SYNs per second that one source may send, 0 for no limit. For admission where frames arrive; steering does not
    /// look at it.
    pub syn_per_sec: u32,
    /// SYNs that one source may send at once under that limit.
    pub syn_burst: u32,
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
    /// What becomes of a new connection to this VIP.
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

/// What became of the look-ups for a VIP, per CPU: value of the map `STATS`, written by the programs.
///
/// The kernel looks for a listener once per SYN, so these count connections, and also what looks like a new one: a SYN
/// that is sent again, a late packet of a connection that is gone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VipStats {
    /// Handed to a listener.
    pub steered: u64,
    /// Refused since no endpoint was healthy.
    pub refused: u64,
    /// Left to the kernel's own look-up since no listener was there to take it.
    pub no_listener: u64,
}

impl VipStats {
    /// The sum with another CPU's counters.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            steered: self.steered.wrapping_add(other.steered),
            refused: self.refused.wrapping_add(other.refused),
            no_listener: self.no_listener.wrapping_add(other.no_listener),
        }
    }
}

// No padding but what is spelled out, on either side.
const _: () = assert!(size_of::<VipKey>() == 20 && align_of::<VipKey>() == 2);
const _: () = assert!(size_of::<VipInfo>() == 40 && align_of::<VipInfo>() == 4);
const _: () = assert!(size_of::<Endpoint>() == 28 && align_of::<Endpoint>() == 4);
const _: () = assert!(size_of::<EndpointState>() == 4);
const _: () = assert!(size_of::<VipStats>() == 24 && align_of::<VipStats>() == 8);

/// An address as the maps hold it: IPv6 as it is, IPv4 as `::ffff:a.b.c.d`.
pub const fn addr_bytes(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address that the maps hold as `bytes`.
pub const fn addr_from_bytes(bytes: [u8; 16]) -> IpAddr {
    core::net::Ipv6Addr::from_octets(bytes).to_canonical()
}

#[cfg(feature = "user")]
mod user {
    #![expect(unsafe_code, reason = "aya marks plain data with an unsafe trait")]

    use super::{VipInfo, VipKey, VipStats};

    // SAFETY: `repr(C)`, integers and arrays of them only, no padding (asserted above): every byte pattern is a value.
    unsafe impl aya::Pod for VipKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for VipInfo {}
    // SAFETY: as above.
    unsafe impl aya::Pod for VipStats {}
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
        let one = VipStats { steered: 1, refused: 20, no_listener: 300 };
        let two = VipStats { steered: 4, refused: 50, no_listener: 600 };
        assert_eq!(one.plus(two), VipStats { steered: 5, refused: 70, no_listener: 900 });
    }
}

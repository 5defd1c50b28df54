//! What a frame says of the connection that it belongs to: as much as a verdict needs, or why it does not say.
//!
//! Reads Ethernet with up to [`VLAN_TAGS_MAX`] tags, IPv4 with options and fragments, IPv6 with up to [`HEADERS_MAX`]
//! extension headers, and TCP. It reads headers only, at most [`READS_MAX`] pieces of them, so that the kernel's verifier
//! sees an end; and what lies behind an IP packet's own length is padding, which nobody is told of.
//!
//! Never judges: what becomes of a frame is `kvlb-ebpf`'s to say, and `docs/kernel.md` says it to operators.

use crate::TCP;

/// Tags that a frame may carry: an outer one of the carrier and the customer's own (IEEE 802.1Q-2018, clause 9).
pub const VLAN_TAGS_MAX: usize = 2;

/// Extension headers of one packet. All that Linux makes of its own are there once (RFC 8200, section 4.1, names seven,
/// destination options twice); hosts and routers drop longer chains as well (RFC 8883, section 3).
pub const HEADERS_MAX: usize = 8;

/// Pieces of a frame that [`parse`] reads at most: one type per tag and the one behind, IP's head, its extension headers, and
/// TCP's head, which is tried whole and then in part.
pub const READS_MAX: usize = VLAN_TAGS_MAX + 1 + 1 + HEADERS_MAX + 2;

/// No piece begins behind this byte: Ethernet with its tags, IPv6, and each extension header as long as it can be (255 times
/// 8 bytes and 8 more).
pub const OFFSET_MAX: usize = 14 + 4 * VLAN_TAGS_MAX + 40 + HEADERS_MAX * 2048;

/// IEEE 802 numbers: the types of what follows.
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
/// 802.1Q, 802.1ad, and what carriers used before it.
const VLANS: [u16; 3] = [0x8100, 0x88a8, 0x9100];

/// Where Ethernet says what follows, and how long a tag with what follows it is.
const TYPE_AT: usize = 12;
const TAG_BYTES: usize = 4;

/// Shortest heads. TCP's options are not looked at.
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const TCP_BYTES: usize = 20;

/// `MF` and the offset, in units of 8 bytes (RFC 791, section 3.1).
const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// IPv6 extension headers that lead on (RFC 8200, section 4); behind any other there is no TCP that could be read.
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// TCP's flags (RFC 9293, section 3.1).
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// The bytes of a frame.
pub trait Bytes {
    /// `N` bytes from `at` on; nothing when the frame ends before. `at` is never above [`OFFSET_MAX`].
    fn read<const N: usize>(&self, at: usize) -> Option<[u8; N]>;
}

impl Bytes for [u8] {
    #[inline(always)]
    fn read<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.get(at..)?.first_chunk().copied()
    }
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// A segment of TCP, or its beginning.
    Tcp(Segment),
    /// Neither IPv4 nor IPv6, or not TCP, or no TCP that can be seen: encrypted, in a tunnel, or on its way to another host
    /// (an IPv6 routing header with segments left).
    Foreign,
    /// A fragment that is not the first. It has no ports; without the first one it comes to nothing.
    Fragment,
    /// Cut off, or its lengths contradict each other. Linux drops it wherever it arrives.
    Malformed,
    /// More than [`HEADERS_MAX`] extension headers.
    Chain,
}

/// A segment of TCP. Addresses are 16 bytes, IPv4 as `::ffff:a.b.c.d`; ports are in host order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Who sends it.
    pub source: [u8; 16],
    /// Whom it is for.
    pub target: [u8; 16],
    /// The sender's port.
    pub source_port: u16,
    /// The port that it is for.
    pub target_port: u16,
    /// TCP's flags; nothing when this is the first of several fragments, and TCP's head goes on in the next one.
    pub flags: Option<u8>,
}

/// What a segment is to the connection that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// It opens one: SYN and no ACK.
    Syn,
    /// It belongs to one that is open, or was, or never will be.
    No,
    /// It does not say: TCP's head is spread over fragments, which no sender does who wants to be understood (RFC 1858,
    /// section 2; RFC 7112, section 5).
    Cut,
}

impl Segment {
    /// What it is to its connection.
    #[inline(always)]
    pub const fn opening(&self) -> Opening {
        match self.flags {
            None => Opening::Cut,
            Some(flags) if flags & (SYN | ACK) == SYN => Opening::Syn,
            Some(_) => Opening::No,
        }
    }
}

/// Reads an Ethernet frame.
#[inline(always)]
pub fn parse<B: Bytes + ?Sized>(frame: &B) -> Parsed {
    ethernet(frame).unwrap_or(Parsed::Malformed)
}

/// Nothing where the frame ends too early; so below.
#[inline(always)]
fn ethernet<B: Bytes + ?Sized>(frame: &B) -> Option<Parsed> {
    let mut at = TYPE_AT;
    let mut follows = u16::from_be_bytes(frame.read(at)?);
    for _ in 0..VLAN_TAGS_MAX {
        if VLANS.contains(&follows) {
            at += TAG_BYTES;
            follows = u16::from_be_bytes(frame.read(at)?);
        }
    }
    match follows {
        IPV4 => ipv4(frame, at + 2),
        IPV6 => ipv6(frame, at + 2),
        _ => Some(Parsed::Foreign),
    }
}

#[inline(always)]
fn ipv4<B: Bytes + ?Sized>(frame: &B, at: usize) -> Option<Parsed> {
    let head: [u8; IPV4_BYTES] = frame.read(at)?;
    let own = usize::from(head[0] & 0x0f) * 4;
    let total = usize::from(u16::from_be_bytes([head[2], head[3]]));
    if head[0] >> 4 != 4 || own < IPV4_BYTES || total < own {
        return Some(Parsed::Malformed);
    }
    let fragment = u16::from_be_bytes([head[6], head[7]]);
    if fragment & FRAGMENT_OFFSET != 0 {
        return Some(Parsed::Fragment);
    }
    if head[9] != TCP {
        return Some(Parsed::Foreign);
    }
    let ends = Ends {
        source: mapped([head[12], head[13], head[14], head[15]]),
        target: mapped([head[16], head[17], head[18], head[19]]),
    };
    tcp(frame, at + own, at + total, fragment & MORE_FRAGMENTS != 0, &ends)
}

#[inline(always)]
fn ipv6<B: Bytes + ?Sized>(frame: &B, at: usize) -> Option<Parsed> {
    let head: [u8; IPV6_BYTES] = frame.read(at)?;
    if head[0] >> 4 != 6 {
        return Some(Parsed::Malformed);
    }
    let mut next = head[6];
    let mut at = at + IPV6_BYTES;
    // A length of 0 would be a jumbogram's (RFC 2675), longer than any frame.
    let end = at + usize::from(u16::from_be_bytes([head[4], head[5]]));
    let (mut source, mut target) = ([0; 16], [0; 16]);
    source.copy_from_slice(&head[8..24]);
    target.copy_from_slice(&head[24..]);
    let mut parted = false;
    for _ in 0..=HEADERS_MAX {
        match next {
            TCP => return tcp(frame, at, end, parted, &Ends { source, target }),
            HOP_BY_HOP | DESTINATION | ROUTING | FRAGMENT => {}
            _ => return Some(Parsed::Foreign),
        }
        let header: [u8; 4] = frame.read(at)?;
        if next == FRAGMENT {
            let fragment = u16::from_be_bytes([header[2], header[3]]);
            // RFC 8200, section 4.5: 13 bits of offset, two of nothing, one that says that more follow.
            if fragment >> 3 != 0 {
                return Some(Parsed::Fragment);
            }
            parted |= fragment & 1 != 0;
            at += 8;
        } else {
            // RFC 8200, section 4.4: how many more addresses this packet is to visit.
            if next == ROUTING && header[3] != 0 {
                return Some(Parsed::Foreign);
            }
            at += 8 + 8 * usize::from(header[1]);
        }
        next = header[0];
    }
    Some(Parsed::Chain)
}

/// Who speaks to whom.
struct Ends {
    source: [u8; 16],
    target: [u8; 16],
}

/// The head of TCP at `at`, in an IP packet that ends before `end`; `parted`: of which this is the first fragment.
#[inline(always)]
fn tcp<B: Bytes + ?Sized>(frame: &B, at: usize, end: usize, parted: bool, ends: &Ends) -> Option<Parsed> {
    let segment = |ports: [u8; 4], flags| {
        Parsed::Tcp(Segment {
            source: ends.source,
            target: ends.target,
            source_port: u16::from_be_bytes([ports[0], ports[1]]),
            target_port: u16::from_be_bytes([ports[2], ports[3]]),
            flags,
        })
    };
    // Whole, by one check of the frame's end: the verifier forgets it when the pieces are checked apart.
    if at + TCP_BYTES <= end {
        let head: Option<[u8; TCP_BYTES]> = frame.read(at);
        if let Some(head) = head {
            return Some(segment([head[0], head[1], head[2], head[3]], Some(head[13])));
        }
    }
    if !parted || at + 4 > end {
        return None;
    }
    Some(segment(frame.read(at)?, None))
}

/// An IPv4 address as `::ffff:a.b.c.d`.
#[inline(always)]
const fn mapped([a, b, c, d]: [u8; 4]) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::cell::Cell;
    use std::vec;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    const V4: ([u8; 4], [u8; 4]) = ([10, 77, 0, 2], [10, 98, 0, 1]);
    const FIN: u8 = 0x01;
    const RST: u8 = 0x04;

    /// Ethernet with these tags, each with a type of its own.
    fn ethernet(tags: &[u16], follows: u16, rest: &[u8]) -> Vec<u8> {
        let mut frame = [[2; 6], [4; 6]].concat();
        for tag in tags {
            frame.extend(tag.to_be_bytes());
            frame.extend([0, 7]);
        }
        frame.extend(follows.to_be_bytes());
        frame.extend(rest);
        frame
    }

    /// TCP's head, and a byte of payload.
    fn tcp(flags: u8) -> Vec<u8> {
        let mut head = Vec::from([0x9c, 0x40, 0x1f, 0x90, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags]);
        head.extend([0x20, 0, 0, 0, 0, 0, b'x']);
        head
    }

    fn v4(options: usize, fragment: u16, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let own = 20 + 4 * options;
        let total = u16::try_from(own + payload.len()).unwrap();
        let mut packet = Vec::from([0x40 | u8::try_from(own / 4).unwrap(), 0]);
        packet.extend(total.to_be_bytes());
        packet.extend([0, 1]);
        packet.extend(fragment.to_be_bytes());
        packet.extend([64, protocol, 0, 0]);
        packet.extend(V4.0);
        packet.extend(V4.1);
        packet.resize(own, 1);
        packet.extend(payload);
        packet
    }

    /// Extension headers as (number, bytes behind the first two).
    fn v6(headers: &[(u8, Vec<u8>)], last: u8, payload: &[u8]) -> Vec<u8> {
        let mut rest = Vec::new();
        for (at, (number, body)) in headers.iter().enumerate() {
            let next = headers.get(at + 1).map_or(last, |(number, _)| *number);
            let length = if *number == FRAGMENT { 0 } else { u8::try_from((body.len() + 2) / 8 - 1).unwrap() };
            rest.extend([next, length]);
            rest.extend(body);
        }
        rest.extend(payload);
        let first = headers.first().map_or(last, |(number, _)| *number);
        let mut packet = Vec::from([0x60, 0, 0, 0]);
        packet.extend(u16::try_from(rest.len()).unwrap().to_be_bytes());
        packet.extend([first, 64]);
        packet.extend([0xfd, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        packet.extend([0xfd, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        packet.extend(rest);
        packet
    }

    fn fragment(offset: u16, more: bool) -> (u8, Vec<u8>) {
        let word = (offset << 3 | u16::from(more)).to_be_bytes();
        (FRAGMENT, Vec::from([word[0], word[1], 0, 0, 0, 9]))
    }

    fn options(units: usize) -> (u8, Vec<u8>) {
        (DESTINATION, [0].repeat(8 * units + 6))
    }

    fn parse(frame: &[u8]) -> Parsed {
        super::parse(frame)
    }

    fn opening(frame: &[u8]) -> Opening {
        match parse(frame) {
            Parsed::Tcp(segment) => {
                assert_eq!((segment.source_port, segment.target_port), (40_000, 8080));
                segment.opening()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_syn_over_ipv4_is_read_whole() {
        let frame = ethernet(&[], IPV4, &v4(0, 0x4000, TCP, &tcp(SYN)));
        let expected = Segment {
            source: mapped(V4.0),
            target: mapped(V4.1),
            source_port: 40_000,
            target_port: 8080,
            flags: Some(SYN),
        };
        assert_eq!(parse(&frame), Parsed::Tcp(expected));
        assert_eq!(expected.opening(), Opening::Syn);
    }

    #[test]
    fn a_syn_over_ipv6_is_read_whole() {
        let Parsed::Tcp(segment) = parse(&ethernet(&[], IPV6, &v6(&[], TCP, &tcp(SYN)))) else { panic!("not TCP") };
        assert_eq!((segment.source[..2].to_vec(), segment.source[15]), ([0xfd, 0x77].to_vec(), 2));
        assert_eq!((segment.target[..2].to_vec(), segment.target[15]), ([0xfd, 0x98].to_vec(), 1));
    }

    #[test]
    fn only_a_syn_without_an_ack_opens() {
        let of = |flags| opening(&ethernet(&[], IPV4, &v4(0, 0, TCP, &tcp(flags))));
        // RFC 3168: a client that wants ECN sets two more flags; SYN with FIN or RST is nonsense that wants to get in.
        for flags in [SYN, SYN | 0xc0, SYN | FIN, SYN | RST, SYN | 0x28] {
            assert_eq!(of(flags), Opening::Syn, "{flags:#x}");
        }
        for flags in [0, ACK, SYN | ACK, FIN | ACK, RST, RST | ACK, 0xff] {
            assert_eq!(of(flags), Opening::No, "{flags:#x}");
        }
    }

    #[test]
    fn tags_are_skipped_up_to_two() {
        let packet = v4(0, 0, TCP, &tcp(SYN));
        for tags in [&[0x8100][..], &[0x88a8, 0x8100], &[0x9100, 0x8100], &[0x8100, 0x8100]] {
            assert_eq!(opening(&ethernet(tags, IPV4, &packet)), Opening::Syn, "{tags:x?}");
        }
        assert_eq!(parse(&ethernet(&[0x88a8, 0x8100, 0x8100], IPV4, &packet)), Parsed::Foreign);
    }

    #[test]
    fn options_of_ipv4_are_skipped() {
        for options in 0..=10 {
            assert_eq!(opening(&ethernet(&[], IPV4, &v4(options, 0, TCP, &tcp(SYN)))), Opening::Syn, "{options}");
        }
    }

    #[test]
    fn what_is_not_tcp_is_foreign() {
        const UDP: u8 = 17;
        const ESP: u8 = 50;
        const NONE: u8 = 59;
        let arp = ethernet(&[], 0x0806, &[0; 28]);
        assert_eq!(parse(&arp), Parsed::Foreign);
        assert_eq!(parse(&ethernet(&[], IPV4, &v4(0, 0, UDP, &[0; 8]))), Parsed::Foreign);
        for last in [UDP, ESP, NONE] {
            assert_eq!(parse(&ethernet(&[], IPV6, &v6(&[options(0)], last, &[0; 20]))), Parsed::Foreign);
        }
    }

    #[test]
    fn a_later_fragment_is_one_whatever_it_carries() {
        for protocol in [TCP, 17] {
            assert_eq!(parse(&ethernet(&[], IPV4, &v4(0, 1, protocol, &tcp(SYN)))), Parsed::Fragment);
            assert_eq!(parse(&ethernet(&[], IPV4, &v4(0, 0x2001, protocol, &tcp(SYN)))), Parsed::Fragment);
            assert_eq!(parse(&ethernet(&[], IPV6, &v6(&[fragment(1, false)], protocol, &tcp(SYN)))), Parsed::Fragment);
        }
    }

    #[test]
    fn a_first_fragment_tells_as_much_as_it_holds() {
        let whole = ethernet(&[], IPV4, &v4(0, MORE_FRAGMENTS, TCP, &tcp(SYN)));
        assert_eq!(opening(&whole), Opening::Syn);
        assert_eq!(opening(&ethernet(&[], IPV4, &v4(0, MORE_FRAGMENTS, TCP, &tcp(SYN)[..8]))), Opening::Cut);
        assert_eq!(parse(&ethernet(&[], IPV4, &v4(0, MORE_FRAGMENTS, TCP, &tcp(SYN)[..3]))), Parsed::Malformed);
        let v6_first = |payload: &[u8]| ethernet(&[], IPV6, &v6(&[fragment(0, true)], TCP, payload));
        assert_eq!(opening(&v6_first(&tcp(SYN))), Opening::Syn);
        assert_eq!(opening(&v6_first(&tcp(SYN)[..16])), Opening::Cut);
        // An only fragment is a whole packet (RFC 6946).
        let only = ethernet(&[], IPV6, &v6(&[fragment(0, false)], TCP, &tcp(SYN)[..16]));
        assert_eq!(parse(&only), Parsed::Malformed);
    }

    #[test]
    fn padding_is_no_part_of_a_packet() {
        let mut frame = ethernet(&[], IPV4, &v4(0, 0, TCP, &[]));
        frame.extend(tcp(SYN));
        assert_eq!(parse(&frame), Parsed::Malformed);
        let mut frame = ethernet(&[], IPV6, &v6(&[], TCP, &[]));
        frame.extend(tcp(SYN));
        assert_eq!(parse(&frame), Parsed::Malformed);
    }

    #[test]
    fn lengths_that_contradict_each_other_are_malformed() {
        let good = v4(0, 0, TCP, &tcp(SYN));
        for (at, byte) in [(0, 0x44), (0, 0x65), (0, 0x4f), (3, 19)] {
            let mut packet = good.clone();
            packet[at] = byte;
            assert_eq!(parse(&ethernet(&[], IPV4, &packet)), Parsed::Malformed, "byte {at} is {byte:#x}");
        }
        let mut packet = v6(&[], TCP, &tcp(SYN));
        packet[0] = 0x45;
        assert_eq!(parse(&ethernet(&[], IPV6, &packet)), Parsed::Malformed);
    }

    #[test]
    fn extension_headers_are_skipped_up_to_their_bound() {
        let chain = |count: usize| ethernet(&[], IPV6, &v6(&vec![options(1); count], TCP, &tcp(SYN)));
        assert_eq!(opening(&chain(HEADERS_MAX)), Opening::Syn);
        assert_eq!(parse(&chain(HEADERS_MAX + 1)), Parsed::Chain);
        let longest = ethernet(&[0x88a8, 0x8100], IPV6, &v6(&vec![options(255); HEADERS_MAX], TCP, &tcp(SYN)));
        assert_eq!(opening(&longest), Opening::Syn);
    }

    #[test]
    fn a_packet_that_is_to_go_on_elsewhere_is_foreign() {
        let routed = |left: u8| {
            let header = (ROUTING, Vec::from([0, left, 0, 0, 0, 0]));
            parse(&ethernet(&[], IPV6, &v6(&[header], TCP, &tcp(SYN))))
        };
        assert!(matches!(routed(0), Parsed::Tcp(_)));
        assert_eq!(routed(1), Parsed::Foreign);
    }

    /// Counts what is read, and that it begins within its bound.
    struct Counted<'a> {
        frame: &'a [u8],
        reads: Cell<usize>,
    }

    impl Bytes for Counted<'_> {
        fn read<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
            assert!(at <= OFFSET_MAX, "{at}");
            self.reads.set(self.reads.get() + 1);
            self.frame.read(at)
        }
    }

    /// Frames of every shape that is read, most of them whole.
    fn frames() -> impl Strategy<Value = (Vec<u8>, u8)> {
        let tags = proptest::collection::vec(proptest::sample::select(&VLANS[..]), 0..=VLAN_TAGS_MAX);
        let headers = proptest::collection::vec(
            prop_oneof![
                (0..40_usize).prop_map(options),
                (0..40_usize).prop_map(|units| (HOP_BY_HOP, [1].repeat(8 * units + 6))),
                Just((ROUTING, Vec::from([0; 6]))),
                Just(fragment(0, false)),
            ],
            0..=HEADERS_MAX,
        );
        (tags, any::<bool>(), 0..=10_usize, headers, any::<u8>()).prop_map(|(tags, six, words, headers, flags)| {
            let (follows, packet) =
                if six { (IPV6, v6(&headers, TCP, &tcp(flags))) } else { (IPV4, v4(words, 0, TCP, &tcp(flags))) };
            (ethernet(&tags, follows, &packet), flags)
        })
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_within_bounds(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let counted = Counted { frame: &bytes, reads: Cell::new(0) };
            super::parse(&counted);
            prop_assert!(counted.reads.get() <= READS_MAX);
        }

        #[test]
        fn a_frame_with_some_bytes_wrong_is_read_within_bounds(
            frame in frames(),
            wrong in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let mut bytes = frame.0;
            for (at, byte) in wrong {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let counted = Counted { frame: &bytes, reads: Cell::new(0) };
            super::parse(&counted);
            prop_assert!(counted.reads.get() <= READS_MAX);
        }

        #[test]
        fn whatever_stands_before_it_a_segment_is_found(frame in frames()) {
            let (bytes, flags) = frame;
            let found = matches!(parse(&bytes), Parsed::Tcp(segment)
                if (segment.source_port, segment.target_port, segment.flags) == (40_000, 8080, Some(flags)));
            prop_assert!(found, "{:?}", parse(&bytes));
        }

        #[test]
        fn a_frame_that_is_cut_off_is_no_segment(frame in frames(), at in any::<proptest::sample::Index>()) {
            // One byte of payload is not looked for.
            let length = frame.0.len() - 1;
            prop_assert_eq!(parse(&frame.0[..at.index(length)]), Parsed::Malformed);
        }
    }
}

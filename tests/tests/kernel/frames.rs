//! Ethernet frames, byte by byte, and a sender of them.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{AddressFamily, LinkAddr, MsgFlags, MultiHeaders, SockFlag, SockType, bind, sendmmsg, socket};

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const ACK: u8 = 0x10;

pub(crate) const IPV4: u16 = 0x0800;
pub(crate) const IPV6: u16 = 0x86dd;
pub(crate) const TCP: u8 = 6;
const FRAGMENT: u8 = 44;

/// An Ethernet frame to nobody in particular, with VLAN tags of these types.
pub(crate) fn ethernet(tags: &[u16], follows: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = [[0xff; 6], [2, 0, 0, 0, 0, 2]].concat();
    for tag in tags {
        frame.extend(tag.to_be_bytes());
        frame.extend([0, 7]);
    }
    frame.extend(follows.to_be_bytes());
    frame.extend(packet);
    frame
}

/// TCP's head.
pub(crate) fn tcp(from: u16, to: u16, flags: u8) -> Vec<u8> {
    let [[a, b], [c, d]] = [from.to_be_bytes(), to.to_be_bytes()];
    vec![a, b, c, d, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 0x20, 0, 0, 0, 0, 0]
}

/// An IPv4 packet with so many words of options; `fragment` is flags and offset as the head has them.
pub(crate) fn v4(from: IpAddr, to: IpAddr, options: usize, fragment: u16, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let own = 20 + 4 * options;
    let total = u16::try_from(own + payload.len()).unwrap();
    let mut packet = vec![0x40 | u8::try_from(own / 4).unwrap(), 0];
    packet.extend(total.to_be_bytes());
    packet.extend([0, 1]);
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, protocol, 0, 0]);
    packet.extend(octets(from));
    packet.extend(octets(to));
    packet.resize(own, 1);
    let sum = !checksum(0, &packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(payload);
    packet
}

/// An IPv6 packet with extension headers, each as its number and the bytes behind the first two.
pub(crate) fn v6(from: IpAddr, to: IpAddr, headers: &[(u8, Vec<u8>)], last: u8, payload: &[u8]) -> Vec<u8> {
    let mut rest = Vec::new();
    for (at, (number, body)) in headers.iter().enumerate() {
        let next = headers.get(at + 1).map_or(last, |(number, _)| *number);
        let length = if *number == FRAGMENT { 0 } else { u8::try_from((body.len() + 2) / 8 - 1).unwrap() };
        rest.extend([next, length]);
        rest.extend(body);
    }
    rest.extend(payload);
    let first = headers.first().map_or(last, |(number, _)| *number);
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(u16::try_from(rest.len()).unwrap().to_be_bytes());
    packet.extend([first, 64]);
    packet.extend(octets(from));
    packet.extend(octets(to));
    packet.extend(rest);
    packet
}

/// A fragment header: offset in units of 8 bytes, and whether more follow.
pub(crate) fn fragment(offset: u16, more: bool) -> (u8, Vec<u8>) {
    let [a, b] = (offset << 3 | u16::from(more)).to_be_bytes();
    (FRAGMENT, vec![a, b, 0, 0, 0, 9])
}

/// Destination options of 8 bytes that say nothing (`PadN`).
pub(crate) fn padding() -> (u8, Vec<u8>) {
    (60, vec![1, 4, 0, 0, 0, 0])
}

/// A whole segment without options, of either family.
pub(crate) fn segment(from: SocketAddr, to: SocketAddr, flags: u8) -> Vec<u8> {
    let head = tcp(from.port(), to.port(), flags);
    match to.ip() {
        IpAddr::V4(_) => ethernet(&[], IPV4, &v4(from.ip(), to.ip(), 0, 0x4000, TCP, &head)),
        IpAddr::V6(_) => ethernet(&[], IPV6, &v6(from.ip(), to.ip(), &[], TCP, &head)),
    }
}

/// A SYN over IPv4 that Linux accepts: its checksum is right.
pub(crate) fn true_syn(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let mut head = tcp(from.port(), to.port(), SYN);
    let pseudo = [octets(from.ip()), octets(to.ip()), vec![0, TCP, 0, 20]].concat();
    let sum = !checksum(checksum(0, &pseudo), &head);
    head[16..18].copy_from_slice(&sum.to_be_bytes());
    ethernet(&[], IPV4, &v4(from.ip(), to.ip(), 0, 0x4000, TCP, &head))
}

fn octets(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// The Internet's one's complement sum (RFC 1071) of an even number of bytes.
fn checksum(from: u16, bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let mut sum = u32::from(from) + words.sum::<u32>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap()
}

/// A flood of three seconds may take so long on a machine that does other things.
const PATIENCE: Duration = Duration::from_mins(1);

/// Frames sent at once: as many as fit the queue behind a cable (256, drivers/net/veth.c) twice.
const AT_ONCE: usize = 128;

/// Sends frames out of a device of this thread's network namespace.
pub(crate) struct Sender(OwnedFd);

impl Sender {
    pub(crate) fn new(device: &str) -> Self {
        let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let link = getifaddrs().unwrap().find_map(|at| {
            let address = at.address.filter(|_| at.interface_name == device)?;
            address.as_link_addr().copied()
        });
        bind(socket.as_raw_fd(), &link.unwrap()).unwrap();
        Self(socket)
    }

    /// Sends so many frames, `frames` in turn, as evenly as this machine can and not faster than it is told. Gives the number
    /// of those that went out before patience ended.
    #[expect(clippy::disallowed_methods, reason = "it keeps a pace")]
    pub(crate) fn flood(&self, frames: &[Vec<u8>], per_second: u64, total: u64) -> u64 {
        let start = Instant::now();
        let slices: Vec<_> = frames.iter().map(|frame| [IoSlice::new(frame)]).collect();
        let mut headers = MultiHeaders::<LinkAddr>::preallocate(AT_ONCE, None);
        let (mut sent, mut next) = (0, 0);
        loop {
            let elapsed = start.elapsed();
            if sent >= total || elapsed >= PATIENCE {
                return sent;
            }
            let due = u64::try_from(elapsed.as_nanos() * u128::from(per_second) / 1_000_000_000).unwrap().min(total);
            let some = usize::try_from(due.saturating_sub(sent)).unwrap().min(AT_ONCE);
            if some == 0 {
                thread::yield_now();
                continue;
            }
            next = if next + some > slices.len() { 0 } else { next };
            let (fd, flags) = (self.0.as_raw_fd(), MsgFlags::empty());
            match sendmmsg(fd, &mut headers, &slices[next..next + some], [None; AT_ONCE], [], flags) {
                Ok(done) => {
                    let done = done.count();
                    sent += u64::try_from(done).unwrap();
                    next += done;
                }
                Err(Errno::ENOBUFS | Errno::EAGAIN) => {}
                Err(error) => panic!("a frame cannot be sent: {error}"),
            }
        }
    }
}

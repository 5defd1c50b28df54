//! Who listens where: a VIP that another program has is not taken from it.
//!
//! Source: the kernel's socket diagnosis (`linux/sock_diag.h`, `linux/inet_diag.h`), asked for TCP sockets that listen.

#![expect(clippy::host_endian_bytes, reason = "so netlink has them, which is of this machine")]

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rtnetlink::sys::Socket;

/// `NETLINK_SOCK_DIAG` and `SOCK_DIAG_BY_FAMILY`.
const DIAGNOSIS: isize = 4;
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST | NLM_F_DUMP`, and the types of a list's end and of a refusal (linux/netlink.h).
const LIST: u16 = 0x301;
const DONE: u16 = 3;
const REFUSAL: u16 = 2;
/// A bit for each state: `TCP_LISTEN` is 10.
const LISTENS: u32 = 1 << 10;
/// `AF_INET` and `AF_INET6`.
const FAMILIES: [u8; 2] = [2, 10];
/// Bytes of netlink's head, of a question (`inet_diag_req_v2`) and of an answer (`inet_diag_msg`).
const HEAD: usize = 16;
const QUESTION: usize = 56;
const ANSWER: usize = 72;

/// A socket that listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listening {
    at: SocketAddr,
    inode: u32,
}

/// All sockets that listen in this thread's network namespace.
///
/// # Errors
/// Where the kernel does not say (`CONFIG_INET_DIAG`).
pub(super) fn listening() -> io::Result<Vec<Listening>> {
    let mut socket = Socket::new(DIAGNOSIS)?;
    socket.bind_auto()?;
    socket.connect(&rtnetlink::sys::SocketAddr::new(0, 0))?;
    // Each part of the answer is made while the one before is read.
    socket.set_non_blocking(true)?;
    let mut all = Vec::new();
    for family in FAMILIES {
        let mut question = vec![0; HEAD + QUESTION];
        let length = u32::try_from(question.len()).unwrap_or(u32::MAX);
        question[..4].copy_from_slice(&length.to_ne_bytes());
        question[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        question[6..8].copy_from_slice(&LIST.to_ne_bytes());
        (question[16], question[17]) = (family, kvlb_common::TCP);
        question[20..24].copy_from_slice(&LISTENS.to_ne_bytes());
        socket.send(&question, 0)?;
        while read(&socket.recv_from_full()?.0, &mut all)? {}
    }
    Ok(all)
}

/// Reads one part of a list; false where it was the last.
fn read(mut rest: &[u8], all: &mut Vec<Listening>) -> io::Result<bool> {
    while rest.len() >= HEAD {
        let word = |at: usize| rest[at..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
        let kind = rest[4..].first_chunk().map_or(0, |bytes| u16::from_ne_bytes(*bytes));
        let length = usize::try_from(word(0)).unwrap_or(usize::MAX).clamp(HEAD, rest.len());
        match kind {
            DONE => return Ok(false),
            REFUSAL => {
                let code = rest[HEAD..].first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
                return Err(io::Error::from_raw_os_error(-code));
            }
            _ => all.extend(rest[HEAD..length].first_chunk::<ANSWER>().map(one)),
        }
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    Ok(true)
}

fn one(answer: &[u8; ANSWER]) -> Listening {
    let [family, _, _, _, high, low, ..] = *answer;
    let mut octets = [0; 16];
    octets.copy_from_slice(&answer[8..24]);
    let [a, b, c, d, ..] = octets;
    let ip = if family == FAMILIES[0] { IpAddr::V4(Ipv4Addr::new(a, b, c, d)) } else { Ipv6Addr::from(octets).into() };
    let inode = answer[68..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    Listening { at: SocketAddr::new(ip.to_canonical(), u16::from_be_bytes([high, low])), inode }
}

/// Who has the VIP: a socket at exactly this place, or one at this port of all addresses, where the address is one of this
/// host's without kvlb (`was_local`). A VIP of all ports is nobody's in particular.
pub(super) fn owner(all: &[Listening], vip: SocketAddr, was_local: bool) -> Option<&Listening> {
    let everywhere = |ip: IpAddr| ip.is_unspecified() && (ip.is_ipv6() || vip.is_ipv4());
    let has = |listening: &&Listening| {
        let ip = listening.at.ip();
        listening.at.port() == vip.port() && (ip == vip.ip() || was_local && everywhere(ip))
    };
    all.iter().find(has).filter(|_| vip.port() != 0)
}

/// Whose socket it is, as far as this process may know.
pub(super) fn whose(listening: &Listening) -> String {
    let link = format!("socket:[{}]", listening.inode);
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let has = |id: &u32| {
        let mut open = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
        open.any(|fd| fs::read_link(fd.path()).is_ok_and(|path| path.as_os_str() == link.as_str()))
    };
    let found = ids.into_iter().find(has);
    found.map_or_else(
        || "another program".to_owned(),
        |id| {
            let name = fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
            format!("process {id} ({})", name.trim())
        },
    )
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_socket_that_listens_is_found_with_its_process() {
        for place in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(place) else { continue };
            let at = listener.local_addr().unwrap();
            let all = listening().unwrap();
            let found = all.iter().find(|listening| listening.at == at).unwrap_or_else(|| panic!("{at}: {all:?}"));
            assert!(whose(found).starts_with(&format!("process {} (", std::process::id())), "{}", whose(found));
        }
    }

    #[test]
    fn a_vip_is_whose_socket_is_there_or_everywhere_if_the_address_was_there() {
        let at = |text: &str| Listening { at: text.parse().unwrap(), inode: 1 };
        let all = [at("10.98.0.1:80"), at("0.0.0.0:81"), at("[::]:82"), at("[fd98::1]:83")];
        let owned = |vip: &str, was_local| owner(&all, vip.parse().unwrap(), was_local).is_some();
        assert!(owned("10.98.0.1:80", false) && owned("[fd98::1]:83", false) && !owned("10.98.0.2:80", true));
        assert!(!owned("10.98.0.1:81", false) && owned("10.98.0.1:81", true) && !owned("[fd98::1]:81", true));
        assert!(owned("10.98.0.1:82", true) && owned("[fd98::1]:82", true) && !owned("[fd98::1]:82", false));
    }

    #[test]
    fn answers_that_are_cut_off_are_no_sockets() {
        let mut all = Vec::new();
        for length in 0..HEAD + ANSWER {
            let mut bytes = vec![0; length];
            if length >= 4 {
                bytes[..4].copy_from_slice(&200_u32.to_ne_bytes());
            }
            assert!(read(&bytes, &mut all).unwrap(), "{length}");
        }
        assert_eq!(all, []);
    }
}

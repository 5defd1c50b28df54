//! Whether a device's driver takes XDP programs, asked without giving it one: some reset their link for that.
//!
//! Source: the kernel's `netdev` family of generic netlink (Documentation/netlink/specs/netdev.yaml, Linux 6.3).

#![expect(clippy::host_endian_bytes, reason = "so netlink has them, which is of this machine")]

use std::io;

use rtnetlink::sys::{Socket, SocketAddr};

/// `NETLINK_GENERIC` (linux/netlink.h).
const GENERIC: isize = 16;
/// `GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY` and its attributes (linux/genetlink.h).
const CONTROL: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// `NETDEV_CMD_DEV_GET` and its attributes (linux/netdev.h).
const GET_DEVICE: u8 = 1;
const INDEX: u16 = 1;
const FEATURES: u16 = 3;
/// `NETDEV_XDP_ACT_BASIC`: the driver runs programs.
const BASIC: u64 = 1;
/// `NLM_F_REQUEST`, and the type of a refusal (linux/netlink.h).
const REQUEST: u16 = 1;
const REFUSAL: u16 = 2;
/// Bytes of a message's two heads, and of an attribute's.
const HEADS: usize = 20;
const HEAD: usize = 4;

/// Whether the driver of the device with this number runs XDP programs.
///
/// # Errors
/// Where the kernel does not say (before Linux 6.3), or there is no such device.
pub(super) fn takes_programs(device: u32) -> io::Result<bool> {
    let mut socket = Socket::new(GENERIC)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    // The answer is there when the question has been sent.
    socket.set_non_blocking(true)?;
    let family = ask(&socket, CONTROL, GET_FAMILY, FAMILY_NAME, b"netdev\0", FAMILY_ID)?;
    let family = family.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes)).ok_or(io::ErrorKind::InvalidData)?;
    let features = ask(&socket, family, GET_DEVICE, INDEX, &device.to_ne_bytes(), FEATURES)?;
    let features = features.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes)).ok_or(io::ErrorKind::InvalidData)?;
    Ok(features & BASIC != 0)
}

/// Asks a family about one attribute for another.
fn ask(socket: &Socket, family: u16, command: u8, attribute: u16, value: &[u8], wanted: u16) -> io::Result<Vec<u8>> {
    let short = |length: usize| u16::try_from(length).unwrap_or(u16::MAX).to_ne_bytes();
    let mut message = vec![0; HEADS];
    message.extend([short(HEAD + value.len()), attribute.to_ne_bytes()].concat());
    message.extend(value);
    message.resize(message.len().next_multiple_of(4), 0);
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    message[..4].copy_from_slice(&length.to_ne_bytes());
    message[4..6].copy_from_slice(&family.to_ne_bytes());
    message[6..8].copy_from_slice(&REQUEST.to_ne_bytes());
    (message[16], message[17]) = (command, 1);
    socket.send(&message, 0)?;
    let (answer, _) = socket.recv_from_full()?;
    read(&answer, wanted)
}

/// The value of an attribute in an answer.
fn read(answer: &[u8], wanted: u16) -> io::Result<Vec<u8>> {
    let missing = || io::Error::from(io::ErrorKind::InvalidData);
    let word = |at: usize| Some(u16::from_ne_bytes(*answer.get(at..)?.first_chunk()?));
    if word(4) == Some(REFUSAL) {
        let code = answer.get(16..).and_then(|rest| rest.first_chunk()).map(|bytes| i32::from_ne_bytes(*bytes));
        return Err(io::Error::from_raw_os_error(-code.ok_or_else(missing)?));
    }
    let mut at = HEADS;
    while let (Some(length), Some(kind)) = (word(at).map(usize::from), word(at + 2)) {
        if kind == wanted {
            return answer.get(at + HEAD..at + length).map(<[u8]>::to_vec).ok_or_else(missing);
        }
        at += length.max(HEAD).next_multiple_of(4);
    }
    Err(missing())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_to_their_end_and_no_further() {
        let mut answer = vec![0; HEADS];
        answer.extend([5, 0, 9, 0, 1, 0, 0, 0].iter().chain(&[6, 0, 1, 0, 0x2a, 0, 0, 0]));
        assert_eq!(read(&answer, FAMILY_ID).unwrap(), [0x2a, 0]);
        for cut in 0..answer.len() - 3 {
            assert!(read(&answer[..cut], FAMILY_ID).is_err(), "{cut}");
        }
        answer[4..6].copy_from_slice(&REFUSAL.to_ne_bytes());
        answer[16..20].copy_from_slice(&(-19_i32).to_ne_bytes());
        assert_eq!(read(&answer, FAMILY_ID).unwrap_err().raw_os_error(), Some(19));
    }
}

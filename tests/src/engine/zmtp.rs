//! ZMTP 3.0 by hand, the two halves a vLLM engine needs: a greeting, and messages of frames.
//!
//! Written out because the `zeromq` crate's sockets cannot refuse or cut single connections, and because kvlb uses that crate: the
//! same code at both ends would agree with itself.
//!
//! Source: RFC 23/ZMTP (rfc.zeromq.org/spec/23), mechanism NULL.

use std::io;

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The longest frame taken from a peer: a subscription or a replay request is tiny, so anything longer is a stranger.
const PEER_FRAME_MAX: u64 = 64 * 1024;

/// The most frames in one message from a peer.
const PEER_FRAMES_MAX: usize = 16;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Exchanges greetings and READY commands as a socket of type `socket_type`.
///
/// # Errors
/// When the peer goes away or speaks something else.
pub(super) async fn shake_hands<S>(stream: &mut S, socket_type: &str) -> io::Result<()>
where
    S: AsyncReadExt + AsyncWriteExt + Unpin,
{
    let mut greeting = [0_u8; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await?;
    stream.read_exact(&mut greeting).await?;
    if greeting[0] != 0xff || greeting[9] & 1 != 1 || greeting[10] < 3 || &greeting[12..17] != b"NULL\0" {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a ZMTP 3 peer without security"));
    }
    stream.write_all(&ready(socket_type)).await?;
    let (flags, _) = read_frame(stream).await?;
    if flags & COMMAND == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer did not say READY"));
    }
    Ok(())
}

fn ready(socket_type: &str) -> BytesMut {
    let mut body = BytesMut::new();
    body.put_slice(b"\x05READY");
    for (name, value) in [("Socket-Type", socket_type), ("Identity", "")] {
        body.put_u8(u8::try_from(name.len()).unwrap_or(0));
        body.put_slice(name.as_bytes());
        body.put_u32(u32::try_from(value.len()).unwrap_or(0));
        body.put_slice(value.as_bytes());
    }
    let mut out = BytesMut::new();
    put_frame(&mut out, COMMAND, &body);
    out
}

/// One message, ready to be written to any number of peers.
pub(super) fn message(frames: &[&[u8]]) -> Bytes {
    let mut out = BytesMut::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (index, frame) in frames.iter().enumerate() {
        let more = if index + 1 < frames.len() { MORE } else { 0 };
        put_frame(&mut out, more, frame);
    }
    out.freeze()
}

fn put_frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    if let Ok(len) = u8::try_from(body.len()) {
        out.put_slice(&[flags, len]);
    } else {
        out.put_u8(flags | LONG);
        out.put_u64(u64::try_from(body.len()).unwrap_or(u64::MAX));
    }
    out.put_slice(body);
}

/// What a peer sends after the handshake.
#[derive(Debug)]
pub(super) enum Incoming {
    /// A message of one or more frames.
    Message(Vec<Vec<u8>>),
    /// A heartbeat, and the answer it wants.
    Ping(Bytes),
}

/// The next message or heartbeat of the peer, other commands skipped.
///
/// # Errors
/// When the peer goes away or sends more than the bounds above.
pub(super) async fn read<S: AsyncReadExt + Unpin>(stream: &mut S) -> io::Result<Incoming> {
    let mut frames = Vec::new();
    loop {
        let (flags, body) = read_frame(stream).await?;
        if flags & COMMAND != 0 {
            match pong(&body) {
                Some(pong) => return Ok(Incoming::Ping(pong)),
                None => continue,
            }
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(Incoming::Message(frames));
        }
        if frames.len() == PEER_FRAMES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many frames in one message"));
        }
    }
}

/// The answer to `PING time context`: `PONG context`. libzmq sends it when heartbeats are on, also to a peer of version 3.0.
fn pong(command: &[u8]) -> Option<Bytes> {
    let context = command.strip_prefix(b"\x04PING")?.get(2..)?;
    let mut out = BytesMut::new();
    put_frame(&mut out, COMMAND, &[b"\x04PONG", context].concat());
    Some(out.freeze())
}

async fn read_frame<S: AsyncReadExt + Unpin>(stream: &mut S) -> io::Result<(u8, Vec<u8>)> {
    let flags = stream.read_u8().await?;
    let len = if flags & LONG != 0 { stream.read_u64().await? } else { u64::from(stream.read_u8().await?) };
    if len > PEER_FRAME_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "frame too long"));
    }
    let mut body = vec![0; usize::try_from(len).unwrap_or(0)];
    stream.read_exact(&mut body).await?;
    Ok((flags, body))
}

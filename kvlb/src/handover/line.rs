//! One conversation: messages and descriptors.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{ANSWER, Error};

/// A message of all rules that there may be is smaller.
const MESSAGE_MAX: usize = 256 << 20;
/// Descriptors that travel at a time: the kernel takes up to 253 (`SCM_MAX_FD`, net/scm.h).
const BATCH: usize = 128;
/// The byte that carries a batch.
const CARRIER: u8 = b'F';

/// A conversation with another kvlb. All calls block, for a bounded time.
#[derive(Debug)]
pub struct Line {
    stream: UnixStream,
}

impl Line {
    /// A conversation over `stream`.
    ///
    /// # Errors
    /// When the socket takes no time limits.
    pub fn new(stream: UnixStream) -> Result<Self, Error> {
        stream.set_nonblocking(false).map_err(Error::Io)?;
        stream.set_write_timeout(Some(ANSWER)).map_err(Error::Io)?;
        Ok(Self { stream })
    }

    /// Says something.
    ///
    /// # Errors
    /// When the other side is gone or takes nothing.
    pub fn send(&mut self, message: &impl Serialize) -> Result<(), Error> {
        let text = serde_json::to_vec(message).map_err(|error| Error::Garbled(error.to_string()))?;
        let length = u32::try_from(text.len()).map_err(|error| Error::Garbled(error.to_string()))?;
        let frame = [&length.to_le_bytes()[..], &text].concat();
        self.stream.write_all(&frame).map_err(|error| failed(error, ANSWER))
    }

    /// Waits for what the other side says, for `within` at most.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Silent`], [`Error::Garbled`].
    pub fn receive<T: DeserializeOwned>(&mut self, within: Duration) -> Result<T, Error> {
        self.stream.set_read_timeout(Some(within)).map_err(Error::Io)?;
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).map_err(|error| failed(error, within))?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MESSAGE_MAX {
            return Err(Error::Garbled(format!("a message of {length} bytes")));
        }
        let mut text = vec![0; length];
        self.stream.read_exact(&mut text).map_err(|error| failed(error, within))?;
        serde_json::from_slice(&text).map_err(|error| Error::Garbled(error.to_string()))
    }

    /// Whether the other side has said something, or is gone: then a receive does not wait.
    pub fn has_word(&self) -> bool {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        poll(&mut [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) != Ok(0)
    }

    /// Whether the other side has ended the conversation, and all that it said is heard.
    pub fn is_over(&self) -> bool {
        let mut byte = [0];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        // Anything else than an end is for the next receive to find.
        matches!(rustix::net::recv(&self.stream, &mut byte, flags), Ok((_, 0)))
    }

    /// What ends the conversation from another thread: whoever waits in it hears that the other side is gone, and so does
    /// that.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn hang_up(&self) -> Result<impl FnOnce() + Send + use<>, Error> {
        let stream = self.stream.try_clone().map_err(Error::Io)?;
        // One that is gone already needs no end.
        Ok(move || drop(stream.shutdown(std::net::Shutdown::Both)))
    }

    /// Gives descriptors away; ours stay open.
    ///
    /// # Errors
    /// As [`Line::send`].
    pub fn give(&mut self, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        for batch in descriptors.chunks(BATCH) {
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
            let mut control = SendAncillaryBuffer::new(&mut room);
            let fits = control.push(SendAncillaryMessage::ScmRights(batch));
            debug_assert!(fits, "the room is made for a batch");
            loop {
                match sendmsg(&self.stream, &[IoSlice::new(&[CARRIER])], &mut control, SendFlags::NOSIGNAL) {
                    Ok(_one) => break,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(failed(error.into(), ANSWER)),
                }
            }
        }
        Ok(())
    }

    /// Takes `offered` descriptors.
    ///
    /// # Errors
    /// As [`Line::receive`], and [`Error::Descriptors`] where this process may not have as many.
    pub fn take(&mut self, offered: usize) -> Result<Vec<OwnedFd>, Error> {
        self.stream.set_read_timeout(Some(ANSWER)).map_err(Error::Io)?;
        let mut taken = Vec::with_capacity(offered);
        while taken.len() < offered {
            let batch = self.take_batch()?;
            if batch.len() < BATCH.min(offered - taken.len()) {
                return Err(Error::Descriptors { came: taken.len() + batch.len(), offered });
            }
            taken.extend(batch);
        }
        Ok(taken)
    }

    fn take_batch(&mut self) -> Result<Vec<OwnedFd>, Error> {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let mut byte = [0];
        let received = loop {
            match recvmsg(&self.stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other.map_err(|error| failed(error.into(), ANSWER))?,
            }
        };
        match (received.bytes, byte) {
            (0, _) => return Err(Error::Gone),
            (_, [CARRIER]) => {}
            (_, [other]) => return Err(Error::Garbled(format!("byte {other} where descriptors should be"))),
        }
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        Ok(rights.flatten().collect())
    }
}

fn failed(error: io::Error, within: Duration) -> Error {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Error::Gone,
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Silent(within),
        _ => Error::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt as _;

    use super::super::FromNext;
    use super::*;

    fn pair() -> (Line, Line) {
        let (a, b) = UnixStream::pair().unwrap();
        (Line::new(a).unwrap(), Line::new(b).unwrap())
    }

    #[test]
    fn an_end_is_seen_behind_the_last_word_and_wakes_who_waits() {
        let (mut here, mut there) = pair();
        assert!(!there.is_over());
        here.send(&FromNext::Ready).unwrap();
        let hang_up = here.hang_up().unwrap();
        let waiting = std::thread::spawn(move || here.receive::<FromNext>(ANSWER).unwrap_err().to_string());
        assert_eq!(there.receive::<FromNext>(ANSWER).unwrap(), FromNext::Ready);
        assert!(!there.is_over(), "it may still say something");
        hang_up();
        assert_eq!(waiting.join().unwrap(), Error::Gone.to_string());
        assert!(there.is_over());
    }

    #[test]
    fn words_and_many_descriptors_come_through_in_order() {
        let (mut here, mut there) = pair();
        let files: Vec<_> = (0..300).map(|_| tempfile::tempfile().unwrap()).collect();
        let expected: Vec<_> = files.iter().map(|file| file.metadata().unwrap().ino()).collect();
        let sender = std::thread::spawn(move || {
            here.send(&FromNext::Progress("x".repeat(1 << 20))).unwrap();
            here.give(&files.iter().map(|file| file.as_fd()).collect::<Vec<_>>()).unwrap();
            here.send(&FromNext::Ready).unwrap();
        });
        let first: FromNext = there.receive(ANSWER).unwrap();
        assert_eq!(first, FromNext::Progress("x".repeat(1 << 20)));
        let taken = there.take(300).unwrap();
        assert_eq!(there.receive::<FromNext>(ANSWER).unwrap(), FromNext::Ready);
        let inodes: Vec<_> = taken.into_iter().map(|fd| File::from(fd).metadata().unwrap().ino()).collect();
        assert_eq!(inodes, expected);
        sender.join().unwrap();
        assert!(there.has_word(), "the end counts as a word");
        assert!(matches!(there.receive::<FromNext>(ANSWER), Err(Error::Gone)));
    }

    #[test]
    fn silence_garbage_and_missing_descriptors_have_their_own_names() {
        let (mut here, mut there) = pair();
        let short = Duration::from_millis(20);
        assert!(!there.has_word());
        assert!(matches!(there.receive::<FromNext>(short), Err(Error::Silent(_))));
        here.send(&"no message").unwrap();
        assert!(matches!(there.receive::<FromNext>(short), Err(Error::Garbled(_))));
        here.stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(there.receive::<FromNext>(short), Err(Error::Garbled(_))));
        here.give(&[here.stream.try_clone().unwrap().as_fd()]).unwrap();
        assert!(matches!(there.take(2), Err(Error::Descriptors { came: 1, offered: 2 })));
        here.stream.write_all(b"x").unwrap();
        assert!(matches!(there.take(1), Err(Error::Garbled(_))));
    }
}

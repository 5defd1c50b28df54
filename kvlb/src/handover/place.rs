//! Where takeovers come through: a socket file that only its owner and root may use.
//!
//! The listening socket itself is handed over too, so that the file stays where it is over any number of takeovers.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;

use super::Error;

/// The listening socket and its file, which goes with it unless it was handed over.
#[derive(Debug)]
pub struct Door {
    listener: UnixListener,
    path: PathBuf,
    ours: bool,
}

impl Door {
    /// Listens at `path`, with mode 0600. What a dead process has left there is removed.
    ///
    /// # Errors
    /// [`Error::InUse`] where somebody answers there, [`Error::Place`] where nothing can be made.
    pub fn open(path: &Path) -> Result<Self, Error> {
        match UnixStream::connect(path) {
            Ok(_somebody) => return Err(Error::InUse(path.to_owned())),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) if is_dead(&error) && is_socket(path) => {
                tracing::debug!(path = %path.display(), "a dead kvlb's takeover socket is removed");
                fs::remove_file(path).map_err(at("remove", path))?;
            }
            Err(error) => return Err(at("look for a takeover socket at", path)(error)),
        }
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(at("make the directory of", path))?;
        }
        let listener = UnixListener::bind(path).map_err(at("listen at", path))?;
        let door = Self { listener, path: path.to_owned(), ours: true };
        // Who connects in the moment before is still asked who it is.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(at("set the mode of", path))?;
        Ok(door)
    }

    /// The door that another process gave us.
    pub fn given(listener: OwnedFd, path: &Path) -> Self {
        Self { listener: UnixListener::from(listener), path: path.to_owned(), ours: true }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A listener of its own, of the same socket.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn listener(&self) -> io::Result<UnixListener> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// The file belongs to somebody else now.
    pub fn leave(&mut self) {
        self.ours = false;
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(%error, path = %self.path.display(), "could not remove the takeover socket");
            }
            _ => {}
        }
    }
}

/// Connects to a running kvlb; `None` where none is there.
///
/// # Errors
/// [`Error::Place`] for anything else.
pub fn connect(path: &Path) -> Result<Option<UnixStream>, Error> {
    match UnixStream::connect(path) {
        Ok(stream) => Ok(Some(stream)),
        Err(error) if error.kind() == ErrorKind::NotFound || is_dead(&error) => Ok(None),
        Err(error) => Err(at("connect to", path)(error)),
    }
}

/// Who is at the other end: its process and its user, where that user may take over.
///
/// # Errors
/// The user's number where it may not: it is neither ours nor root's.
pub fn peer(stream: &impl AsFd) -> Result<(i32, u32), u32> {
    let Ok(peer) = getsockopt(stream, PeerCredentials) else { return Err(u32::MAX) };
    let uid = peer.uid();
    if uid == geteuid().as_raw() || uid == 0 { Ok((peer.pid(), uid)) } else { Err(uid) }
}

/// Nobody listens on a socket that is there.
fn is_dead(error: &io::Error) -> bool {
    error.kind() == ErrorKind::ConnectionRefused
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Place { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_is_for_its_owner_and_goes_with_it_unless_it_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/takeover.sock");
        let door = Door::open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(Door::open(&path), Err(Error::InUse(_))));
        let stream = connect(&path).unwrap().unwrap();
        assert_eq!(peer(&stream).unwrap().1, geteuid().as_raw());
        drop(door);
        assert!(!path.exists() && connect(&path).unwrap().is_none());
        let mut door = Door::open(&path).unwrap();
        door.leave();
        drop(door);
        // As after a crash: the file is there, and nobody behind it.
        assert!(path.exists() && connect(&path).unwrap().is_none());
        let _door = Door::open(&path).unwrap();
    }

    #[test]
    fn a_file_that_is_no_socket_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("takeover.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(Door::open(&path), Err(Error::Place { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}

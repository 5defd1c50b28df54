//! What only its owner may read: tokens and private keys in files.
//!
//! Owns the rules for such files: who may read them, and what a token looks like. A secret that was read can be used or
//! compared, and never be shown: neither [`Hidden`] nor [`Digest`] prints it, and no error quotes what a file holds.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq};

/// Who guesses a thousand times a second needs longer than the machine will last from 16 characters up.
pub const TOKEN_MIN: usize = 16;
/// A signed token of an identity provider has some 1,500 characters; heads have room for more.
pub const TOKEN_MAX: usize = 4_096;
/// A key and its chain have some 10 KB.
const FILE_MAX: u64 = 1 << 20;

/// A text that is used and never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Hidden(String);

impl Hidden {
    /// The text itself, for the wire.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Hidden {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl FromStr for Hidden {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self::from(text))
    }
}

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// What is kept of a token to know it again: its SHA-256.
#[derive(Clone, Copy)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of a token.
    pub fn of(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// The digest of digests, in their order.
    pub fn of_all<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Sha256::new();
        for part in parts {
            all.update(part.0);
        }
        Self(all.finalize().into())
    }

    /// Whether both are of the same token, in a time that does not depend on how much of them agrees.
    pub fn same(&self, other: &Self) -> Choice {
        self.0.ct_eq(&other.0)
    }
}

impl PartialEq for Digest {
    fn eq(&self, other: &Self) -> bool {
        self.same(other).into()
    }
}

impl Eq for Digest {}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digest(hidden)")
    }
}

/// Why a file is not used as a secret.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be read.
    #[error("{path} cannot be read: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A directory, a device, or for the daemon a pipe.
    #[error("{0} is no regular file")]
    NotAFile(PathBuf),
    /// It belongs to somebody who is neither root nor this user, and who may read and change it.
    #[error("{path} belongs to user {owner}: run `chown {us} {path}`")]
    Owner {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who we are.
        us: u32,
    },
    /// Others may read or change it.
    #[error("{path} is open to others (mode {mode:04o}): run `chmod 600 {path}`")]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// More than any key has.
    #[error("{0} has more than {FILE_MAX} bytes")]
    TooLarge(PathBuf),
    /// No token is in it.
    #[error("{0} is empty: write a token into it, as `openssl rand -hex 32` makes one")]
    Empty(PathBuf),
    /// A token that can be guessed.
    #[error(
        "the token in {path} has {length} characters, and at least {TOKEN_MIN} are needed: `openssl rand -hex 32` makes a good one"
    )]
    Short {
        /// The file.
        path: PathBuf,
        /// Its characters.
        length: usize,
    },
    /// A token that no head has room for.
    #[error("the token in {path} has {length} characters, and at most {TOKEN_MAX} are allowed")]
    Long {
        /// The file.
        path: PathBuf,
        /// Its characters.
        length: usize,
    },
    /// More than one token.
    #[error("{0} has several lines, and one token is one line")]
    Lines(PathBuf),
    /// A token that cannot be sent in a header.
    #[error("the token in {0} has a space or a character that is not visible ASCII")]
    Characters(PathBuf),
}

impl Error {
    /// A word that programs can match on.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "unreadable",
            Self::NotAFile(_) => "not_a_file",
            Self::Owner { .. } => "owner",
            Self::Open { .. } => "open_to_others",
            Self::TooLarge(_) => "too_large",
            Self::Empty(_) => "empty",
            Self::Short { .. } => "short",
            Self::Long { .. } => "long",
            Self::Lines(_) => "lines",
            Self::Characters(_) => "characters",
        }
    }
}

/// Reads a regular file that only its owner, who is root or this user, may read or change.
///
/// # Errors
/// Who else may, or why it cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>, Error> {
    read_from(path, false)
}

/// Reads a token of such a file; the space around it is not part of it.
///
/// # Errors
/// As [`read`], and where what is there is no token.
pub fn token(path: &Path) -> Result<Hidden, Error> {
    token_in(path, &read(path)?)
}

/// The same for a person at a terminal, who may hand a token over through a pipe.
///
/// # Errors
/// As [`token`].
pub fn token_of_client(path: &Path) -> Result<Hidden, Error> {
    token_in(path, &read_from(path, true)?)
}

fn read_from(path: &Path, pipes: bool) -> Result<Vec<u8>, Error> {
    let unreadable = |source| Error::Unreadable { path: path.to_owned(), source };
    // A pipe that nobody writes to does not hold up the daemon.
    let flags = if pipes { 0 } else { libc::O_NONBLOCK };
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(unreadable)?;
    // What was opened is judged, and not what lies at the path by then.
    check(path, &file, pipes)?;
    let mut bytes = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > FILE_MAX { Err(Error::TooLarge(path.to_owned())) } else { Ok(bytes) }
}

fn check(path: &Path, file: &File, pipes: bool) -> Result<(), Error> {
    let found = file.metadata().map_err(|source| Error::Unreadable { path: path.to_owned(), source })?;
    if pipes && found.file_type().is_fifo() {
        return Ok(());
    }
    if !found.is_file() {
        return Err(Error::NotAFile(path.to_owned()));
    }
    let us = rustix::process::geteuid().as_raw();
    if found.uid() != 0 && found.uid() != us {
        return Err(Error::Owner { path: path.to_owned(), owner: found.uid(), us });
    }
    let mode = found.mode() & 0o7777;
    let others = mode & 0o077;
    if others == 0 { Ok(()) } else { Err(Error::Open { path: path.to_owned(), mode }) }
}

fn token_in(path: &Path, bytes: &[u8]) -> Result<Hidden, Error> {
    let path = || path.to_owned();
    let text = bytes.trim_ascii();
    let length = text.len();
    if text.is_empty() {
        return Err(Error::Empty(path()));
    }
    if text.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
        return Err(Error::Lines(path()));
    }
    let text = std::str::from_utf8(text).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic()));
    let text = text.ok_or_else(|| Error::Characters(path()))?;
    match length {
        0..TOKEN_MIN => Err(Error::Short { path: path(), length }),
        TOKEN_MIN..=TOKEN_MAX => Ok(Hidden::from(text)),
        _ => Err(Error::Long { path: path(), length }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    fn file(text: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    #[test]
    fn a_token_is_one_line_and_the_space_around_it_is_not_part_of_it() {
        for text in ["0123456789abcdef", "0123456789abcdef\n", " \t0123456789abcdef\r\n\n"] {
            let (_dir, path) = file(text.as_bytes(), 0o600);
            assert_eq!(token(&path).unwrap().reveal(), TOKEN, "{text:?}");
        }
        let long = "x".repeat(TOKEN_MAX + 1);
        for (text, code) in [
            ("", "empty"),
            (" \n\n", "empty"),
            ("0123456789abcde", "short"),
            ("0123456789abcdef\n0123456789abcdef", "lines"),
            ("0123456789 abcdef", "characters"),
            ("0123456789\u{e9}abcdef", "characters"),
            ("0123456789\0abcdef", "characters"),
            (&long, "long"),
        ] {
            let (_dir, path) = file(text.as_bytes(), 0o400);
            let error = token(&path).unwrap_err();
            assert_eq!(error.code(), code, "{text:?}");
            let shown = format!("{error} {error:?}");
            assert!(shown.contains("token") && !shown.contains("0123456789"), "{shown}");
        }
    }

    #[test]
    fn a_file_that_others_may_read_or_change_is_refused_with_the_command_that_helps() {
        for mode in [0o644, 0o640, 0o604, 0o620, 0o602, 0o601, 0o610, 0o777] {
            let (_dir, path) = file(TOKEN.as_bytes(), mode);
            let error = token(&path).unwrap_err();
            assert_eq!(error.code(), "open_to_others", "{mode:o}");
            assert!(error.to_string().contains(&format!("`chmod 600 {}`", path.display())), "{error}");
            assert!(error.to_string().contains(&format!("{mode:04o}")), "{error}");
        }
        for mode in [0o600, 0o400, 0o700] {
            let (_dir, path) = file(TOKEN.as_bytes(), mode);
            assert!(token(&path).is_ok(), "{mode:o}");
        }
    }

    #[test]
    fn a_file_of_somebody_else_is_refused_and_one_behind_a_link_is_judged_itself() {
        let (dir, path) = file(TOKEN.as_bytes(), 0o600);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(token(&link).is_ok());
        if std::os::unix::fs::chown(&path, Some(12_345), None).is_err() {
            eprintln!("skipped: only root gives files away");
            return;
        }
        for path in [&path, &link] {
            let error = token(path).unwrap_err();
            assert!(error.code() == "owner" && error.to_string().contains("12345"), "{error}");
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once_and_a_client_may_use_a_pipe() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(token(dir.path()).unwrap_err().code(), "not_a_file");
        assert_eq!(token(&dir.path().join("none")).unwrap_err().code(), "unreadable");
        assert_eq!(token(Path::new("/dev/zero")).unwrap_err().code(), "not_a_file");
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o644)).unwrap();
        assert_eq!(token(&pipe).unwrap_err().code(), "not_a_file");
        let writer = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::write(pipe, TOKEN)
        });
        assert_eq!(token_of_client(&pipe).unwrap().reveal(), TOKEN);
        writer.join().unwrap().unwrap();
    }

    #[test]
    fn what_is_hidden_is_not_printed() {
        let hidden = Hidden::from(TOKEN);
        assert_eq!(format!("{hidden:?} {:?}", Digest::of(TOKEN.as_bytes())), "(hidden) Digest(hidden)");
    }

    #[test]
    fn digests_of_the_same_token_are_the_same() {
        assert_eq!(Digest::of(b"a"), Digest::of(b"a"));
        assert_ne!(Digest::of(b"a"), Digest::of(b"b"));
    }
}

//! The directory that the maps are pinned in: one kvlb holds it at a time, and leaves it empty and gone.
//!
//! The directory's lock is the kernel's own (`flock`), so it ends with its holder, however that one ends. What lies in a
//! directory that can be locked is therefore a dead predecessor's.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use aya::maps::{Array, HashMap, Map, MapData, MapError, MapInfo};
use aya::pin::PinError;
use kvlb_common::{Stamp, VIP_ROUTE, VipInfo, VipKey, addr_from_bytes};
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use super::Error;
use super::error::Outcome;

/// Where Linux has its BPF file system by convention; the kernel makes the directory, systemd or we mount it.
pub(super) const BPFFS: &str = "/sys/fs/bpf";

/// The names of our pins.
pub(super) const VIPS: &str = "VIPS";
pub(super) const ENDPOINTS: &str = "EPS";
pub(super) const STATS: &str = "STATS";
pub(super) const NETWORKS4: &str = "ACL4";
pub(super) const NETWORKS6: &str = "ACL6";
pub(super) const SOURCES: &str = "SYN";
pub(super) const FRAMES: &str = "FRAMES";
pub(super) const STAMP: &str = "STAMP";
pub(super) const PINS: [&str; 8] = [VIPS, ENDPOINTS, STATS, NETWORKS4, NETWORKS6, SOURCES, FRAMES, STAMP];

/// Behind a name while the pin waits to take its place.
const NEXT: &str = "_NEXT";

/// Attempts to lock the directory while a predecessor that is just ending removes it under us.
const LOCK_ATTEMPTS: u32 = 10;

/// The pin directory, locked.
#[derive(Debug)]
pub(super) struct PinDir {
    path: PathBuf,
    /// Nothing, once it is removed. The lock ends when the file is closed.
    lock: Option<File>,
}

impl PinDir {
    /// Makes the directory if it is not there, and locks it.
    ///
    /// # Errors
    /// [`Error::NoBpffs`], [`Error::InUse`], [`Error::Pin`].
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        mount_bpffs(path)?;
        for _ in 0..LOCK_ATTEMPTS {
            DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed("make", path))?;
            // It may go again before it is opened.
            let lock = match File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(failed("open", path))?,
            };
            match lock.try_lock() {
                Ok(()) if is_at(&lock, path) => return Ok(Self { path: path.to_owned(), lock: Some(lock) }),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(Error::InUse { path: path.to_owned() }),
                Err(TryLockError::Error(error)) => return Err(failed("lock", path)(error)),
            }
        }
        Err(Error::InUse { path: path.to_owned() })
    }

    /// The directory, held by a lock that another process has given us.
    pub(super) fn given(path: &Path, lock: File) -> Self {
        Self { path: path.to_owned(), lock: Some(lock) }
    }

    /// The lock, for a process that is to hold it too.
    pub(super) fn lend_lock(&self) -> Result<Option<File>, Error> {
        self.lock.as_ref().map(|lock| lock.try_clone().map_err(failed("share the lock of", &self.path))).transpose()
    }

    /// Leaves everything to another process.
    pub(super) fn forget(&mut self) {
        self.lock = None;
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The VIPs of a predecessor, and those addresses of them whose routes it had added and not removed.
    pub(super) fn stale(&self) -> (Vec<SocketAddr>, Vec<IpAddr>) {
        let read = || -> Result<(Vec<SocketAddr>, Vec<IpAddr>), MapError> {
            let map = Map::from_map_data(MapData::from_pin(self.path.join(VIPS))?)?;
            let vips = HashMap::<_, VipKey, VipInfo>::try_from(map)?;
            let vips = vips.iter().collect::<Result<Vec<_>, _>>()?;
            let routed = vips.iter().filter(|(_, info)| info.flags & VIP_ROUTE != 0);
            let routed = routed.map(|(key, _)| addr_from_bytes(key.addr)).collect();
            let at = |(key, _): &(VipKey, VipInfo)| SocketAddr::new(addr_from_bytes(key.addr), key.port);
            Ok((vips.iter().map(at).collect(), routed))
        };
        // Mostly there is none; one of another layout is another version's, and its routes are for the operator.
        read().unwrap_or_else(|error| {
            tracing::debug!(%error, "no predecessor's VIPs to read");
            (Vec::new(), Vec::new())
        })
    }

    /// The pin of the predecessor's buckets, where its maps are of the same object and there is room for as many sources as
    /// there is to be: whoever sent too much before goes on being counted.
    pub(super) fn buckets(&self, stamp: Stamp, sources: u32) -> Option<PathBuf> {
        let path = self.path.join(SOURCES);
        let run = || -> Result<bool, MapError> {
            let map = Map::from_map_data(MapData::from_pin(self.path.join(STAMP))?)?;
            let there = Array::<_, Stamp>::try_from(map)?.get(&0, 0)?;
            Ok(there == stamp && MapInfo::from_pin(&path)?.max_entries() == sources)
        };
        run().unwrap_or(false).then_some(path)
    }

    /// The names of our pins that are there.
    pub(super) fn there(&self) -> Vec<String> {
        names().filter(|name| self.path.join(name).exists()).collect()
    }

    /// Pins `map` as `name`.
    pub(super) fn pin(&self, name: &'static str, map: &MapData) -> Result<(), Error> {
        self.pin_as(name, map)
    }

    /// Pins `map` as `name` in place of another.
    pub(super) fn pin_instead(&self, name: &'static str, map: &MapData) -> Result<(), Error> {
        let next = format!("{name}{NEXT}");
        let (from, to) = (self.path.join(&next), self.path.join(name));
        match fs::remove_file(&from) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("remove", &from)(error)),
            _ => self.pin_as(&next, map)?,
        }
        fs::rename(&from, &to).map_err(failed("move a pin to", &to))
    }

    fn pin_as(&self, name: &str, map: &MapData) -> Result<(), Error> {
        let path = self.path.join(name);
        map.pin(&path).map_err(|error| match error {
            PinError::SyscallError(error) => failed("pin a map at", &path)(error.io_error),
            other => failed("pin a map at", &path)(io::Error::other(other)),
        })
    }

    /// Removes our pins from the directory, whoever made them.
    pub(super) fn clear(&self) -> Result<(), Error> {
        let mut outcome = Outcome::default();
        for path in names().map(|name| self.path.join(name)) {
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => outcome.note(removed.map_err(failed("remove", &path))),
            }
        }
        outcome.finish()
    }

    /// Removes the pins, and the directory unless it has other things in it. A second call does nothing.
    pub(super) fn remove(&mut self) -> Result<(), Error> {
        let Some(lock) = self.lock.take() else { return Ok(()) };
        let removed = self.clear().and_then(|()| match fs::remove_dir(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => Err(failed("remove", &self.path)(error)),
            _ => Ok(()),
        });
        drop(lock);
        removed
    }
}

impl Drop for PinDir {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            tracing::warn!(error = &error as &dyn std::error::Error, "could not remove the pins");
        }
    }
}

/// The names of all pins that may be ours.
fn names() -> impl Iterator<Item = String> {
    PINS.iter().flat_map(|name| [(*name).to_owned(), format!("{name}{NEXT}")])
}

/// Whether `path` still leads to what was opened.
fn is_at(file: &File, path: &Path) -> bool {
    let same = || -> io::Result<bool> {
        let (ours, there) = (file.metadata()?, fs::metadata(path)?);
        Ok((ours.dev(), ours.ino()) == (there.dev(), there.ino()))
    };
    same().unwrap_or(false)
}

/// Mounts the BPF file system at its usual place if `path` is there and not on one yet.
fn mount_bpffs(path: &Path) -> Result<(), Error> {
    if is_bpffs(path) {
        return Ok(());
    }
    let missing = |source| Error::NoBpffs { path: path.to_owned(), source };
    if !path.starts_with(BPFFS) {
        return Err(missing(None));
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("bpf"), BPFFS, Some("bpf"), flags, Some("mode=700")).map_err(|errno| missing(Some(errno.into())))?;
    tracing::info!(path = BPFFS, "mounted the BPF file system");
    Ok(())
}

/// Whether `path`, or as much of it as there is, is on a BPF file system.
pub(super) fn is_bpffs(path: &Path) -> bool {
    let there = path.ancestors().find(|ancestor| ancestor.exists());
    there.and_then(|path| statfs(path).ok()).is_some_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC)
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Pin { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_elsewhere_is_refused_with_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pins");
        let error = PinDir::open(&path).unwrap_err();
        assert!(matches!(error, Error::NoBpffs { source: None, .. }), "{error:?}");
        assert!(error.to_string().contains("mount -t bpf"), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_made_anew_is_not_the_one_that_was_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pins");
        fs::create_dir(&path).unwrap();
        let file = File::open(&path).unwrap();
        assert!(is_at(&file, &path));
        fs::remove_dir(&path).unwrap();
        assert!(!is_at(&file, &path));
        fs::create_dir(&path).unwrap();
        assert!(!is_at(&file, &path));
    }
}

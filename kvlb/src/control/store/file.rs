//! The rules on disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The file that holds the rules.
const CURRENT: &str = "rules.json";
/// The version before the last change.
const PREVIOUS: &str = "rules.json.prev";
/// Where a file that cannot be read is kept for a person to look at.
const CORRUPT: &str = "rules.json.corrupt";
/// Where the next version is written before it takes the place of the last.
const NEXT: &str = "rules.json.tmp";
/// Where the last version is linked before it takes the place of the previous.
const NEXT_PREVIOUS: &str = "rules.json.prev.tmp";
/// Held by the process that uses the directory.
const LOCK: &str = "lock";
/// What this version writes, and the only one that it reads.
const FORMAT: u32 = 1;
/// After a recovery, numbers jump by this much: the lost version is one change newer, and a number that it may have given
/// out must not be given again.
const RECOVERY_ID_GAP: u32 = 1_000;

/// All rules, as they are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Document {
    pub(super) format: u32,
    /// The number of the next new rule.
    pub(super) next_id: u32,
    pub(super) rules: Vec<Kept>,
}

/// One rule, as it is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kept {
    pub(super) id: u32,
    /// The fields as they were sent.
    pub(super) body: Map<String, Value>,
}

impl Document {
    pub(super) fn new(next_id: u32, rules: Vec<Kept>) -> Self {
        Self { format: FORMAT, next_id, rules }
    }
}

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A step of the file system failed.
    #[error("{what} {}", path.display())]
    Io {
        /// The step.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process uses the directory.
    #[error("another kvlb uses the state directory {}: stop it, or name another with --state-dir, or none with --no-state", .0.display())]
    InUse(PathBuf),
    /// The rules that another process told are not as they should be.
    #[error("the rules of the running kvlb cannot be read: {0}")]
    Told(String),
    /// Neither the last version nor the one before can be read.
    #[error(
        "the rules in {} cannot be read ({current}), nor the version before ({previous}): repair or remove the files",
        dir.display()
    )]
    Unreadable {
        /// The state directory.
        dir: PathBuf,
        /// What is wrong with the last version.
        current: String,
        /// What is wrong with the version before.
        previous: String,
    },
}

/// What was found on disk.
#[derive(Debug, PartialEq)]
pub(super) struct Loaded {
    pub(super) document: Document,
    /// Why it is not the last version; `None` where it is.
    pub(super) recovered: Option<String>,
}

/// The state directory, held by this process.
#[derive(Debug)]
pub(super) struct RulesFile {
    dir: PathBuf,
    lock: File,
}

impl RulesFile {
    /// Makes `dir` where it is missing, and takes it.
    pub(super) fn open(dir: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(dir).map_err(at("create the state directory", dir))?;
        let path = dir.join(LOCK);
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(at("open", &path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self::locked(dir, lock)),
            Err(fs::TryLockError::WouldBlock) => Err(StoreError::InUse(dir.to_owned())),
            Err(fs::TryLockError::Error(source)) => Err(StoreError::Io { what: "lock", path, source }),
        }
    }

    /// The directory, held by a lock that another process has given us: it is the very one that this process holds.
    pub(super) fn locked(dir: &Path, lock: File) -> Self {
        Self { dir: dir.to_owned(), lock }
    }

    /// The lock, for a process that is to hold it too.
    pub(super) fn lend_lock(&self) -> io::Result<File> {
        self.lock.try_clone()
    }

    /// Reads the last version, or the one before where the last is damaged. An empty directory holds no rules; one with
    /// files that cannot be read is an error, because starting without the rules would look like success.
    pub(super) fn load(&self) -> Result<Loaded, StoreError> {
        let current = match self.read(CURRENT) {
            Ok(Some(document)) => return Ok(Loaded { document, recovered: None }),
            Ok(None) => "it is missing".to_owned(),
            Err(why) => why,
        };
        match self.read(PREVIOUS) {
            Ok(Some(mut document)) => {
                self.set_aside()?;
                document.next_id = document.next_id.saturating_add(RECOVERY_ID_GAP);
                let recovered = format!("{CURRENT} cannot be read ({current}); the version before it is in force");
                Ok(Loaded { document, recovered: Some(recovered) })
            }
            Ok(None) if !self.dir.join(CURRENT).exists() => {
                Ok(Loaded { document: Document::new(1, Vec::new()), recovered: None })
            }
            Ok(None) => Err(self.unreadable(current, "it is missing".to_owned())),
            Err(previous) => Err(self.unreadable(current, previous)),
        }
    }

    /// Puts `document` in the place of the last version, durably: after an answer, a power cut keeps it; before, the
    /// last version stays whole.
    pub(super) fn save(&self, document: &Document) -> io::Result<()> {
        let next = self.dir.join(NEXT);
        let mut file = File::create(&next)?;
        file.write_all(&serde_json::to_vec_pretty(document)?)?;
        file.sync_all()?;
        self.keep_previous()?;
        fs::rename(next, self.dir.join(CURRENT))?;
        File::open(&self.dir)?.sync_all()
    }

    /// Makes the last version the one before. It is linked, not moved: at no moment is there none.
    fn keep_previous(&self) -> io::Result<()> {
        let (current, next) = (self.dir.join(CURRENT), self.dir.join(NEXT_PREVIOUS));
        if !current.exists() {
            return Ok(());
        }
        match fs::remove_file(&next) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if fs::hard_link(&current, &next).is_err() {
            // Some file systems have no hard links.
            fs::copy(&current, &next)?;
            File::open(&next)?.sync_all()?;
        }
        fs::rename(next, self.dir.join(PREVIOUS))
    }

    /// Moves a damaged last version out of the way, so that the next change does not make it the one before.
    fn set_aside(&self) -> Result<(), StoreError> {
        let (current, corrupt) = (self.dir.join(CURRENT), self.dir.join(CORRUPT));
        match fs::rename(&current, &corrupt) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at("set aside", &current)(error)),
            _ => Ok(()),
        }
    }

    fn read(&self, name: &str) -> Result<Option<Document>, String> {
        let bytes = match fs::read(self.dir.join(name)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let document: Document = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
        if document.format == FORMAT {
            Ok(Some(document))
        } else {
            Err(format!("it has format {}, this version of kvlb reads {FORMAT}", document.format))
        }
    }

    fn unreadable(&self, current: String, previous: String) -> StoreError {
        StoreError::Unreadable { dir: self.dir.clone(), current, previous }
    }
}

fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { what, path, source }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn document(next_id: u32) -> Document {
        let body = json!({"serviceArguments": {"port": next_id}});
        let body = body.as_object().cloned().unwrap_or_default();
        Document::new(next_id, vec![Kept { id: next_id - 1, body }])
    }

    fn dir_with_two_versions() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let file = RulesFile::open(dir.path()).unwrap();
        file.save(&document(2)).unwrap();
        file.save(&document(3)).unwrap();
        dir
    }

    fn load(dir: &tempfile::TempDir) -> Result<Loaded, StoreError> {
        RulesFile::open(dir.path())?.load()
    }

    #[test]
    fn an_empty_directory_holds_no_rules() {
        let dir = tempfile::tempdir().unwrap();
        let loaded = RulesFile::open(&dir.path().join("a/b")).unwrap().load().unwrap();
        assert_eq!(loaded, Loaded { document: Document::new(1, vec![]), recovered: None });
    }

    #[test]
    fn the_last_version_comes_back_and_the_one_before_is_kept() {
        let dir = dir_with_two_versions();
        assert_eq!(load(&dir).unwrap(), Loaded { document: document(3), recovered: None });
        let previous = RulesFile::open(dir.path()).unwrap().read(PREVIOUS);
        assert_eq!(previous, Ok(Some(document(2))));
    }

    #[test]
    fn a_crash_at_any_step_leaves_a_whole_version() {
        // Before the rename: a torn next version, with and without the link to the one before.
        let dir = dir_with_two_versions();
        fs::write(dir.path().join(NEXT), b"{\"format\":1,\"nex").unwrap();
        assert_eq!(load(&dir).unwrap().document, document(3));
        fs::hard_link(dir.path().join(CURRENT), dir.path().join(NEXT_PREVIOUS)).unwrap();
        assert_eq!(load(&dir).unwrap().document, document(3));
        // Between the two renames: both names are the same version.
        fs::rename(dir.path().join(NEXT_PREVIOUS), dir.path().join(PREVIOUS)).unwrap();
        assert_eq!(load(&dir).unwrap().document, document(3));
        // What a crash left does not hinder the next change.
        fs::write(dir.path().join(NEXT_PREVIOUS), b"x").unwrap();
        RulesFile::open(dir.path()).unwrap().save(&document(4)).unwrap();
        assert_eq!(load(&dir).unwrap(), Loaded { document: document(4), recovered: None });
    }

    #[test]
    fn every_truncation_of_the_last_version_falls_back_to_the_one_before_and_says_so() {
        let whole = fs::read(dir_with_two_versions().path().join(CURRENT)).unwrap();
        for length in 0..whole.len() {
            let dir = dir_with_two_versions();
            fs::write(dir.path().join(CURRENT), &whole[..length]).unwrap();
            let loaded = load(&dir).unwrap();
            assert_eq!(loaded.document.rules, document(2).rules, "cut at {length}");
            assert!(loaded.recovered.is_some_and(|why| why.contains(CURRENT)));
            assert!(loaded.document.next_id > 3, "number 3 may have been given out");
            // The damaged file is kept for a person, and never becomes the version before.
            assert_eq!(fs::read(dir.path().join(CORRUPT)).unwrap(), whole[..length]);
            RulesFile::open(dir.path()).unwrap().save(&document(9)).unwrap();
            assert!(matches!(RulesFile::open(dir.path()).unwrap().read(PREVIOUS), Ok(Some(_))));
        }
    }

    #[test]
    fn damage_without_a_version_before_is_an_error_and_not_an_empty_start() {
        let dir = dir_with_two_versions();
        fs::remove_file(dir.path().join(PREVIOUS)).unwrap();
        fs::write(dir.path().join(CURRENT), b"{}").unwrap();
        assert!(matches!(load(&dir), Err(StoreError::Unreadable { .. })));
        fs::write(dir.path().join(PREVIOUS), b"").unwrap();
        assert!(matches!(load(&dir), Err(StoreError::Unreadable { .. })));
    }

    #[test]
    fn a_missing_last_version_is_a_loss_too() {
        let dir = dir_with_two_versions();
        fs::remove_file(dir.path().join(CURRENT)).unwrap();
        let loaded = load(&dir).unwrap();
        assert_eq!(loaded.document.rules, document(2).rules);
        assert!(loaded.recovered.is_some());
    }

    #[test]
    fn a_newer_format_is_not_guessed_at() {
        let dir = tempfile::tempdir().unwrap();
        RulesFile::open(dir.path()).unwrap().save(&Document { format: 2, ..document(2) }).unwrap();
        let error = load(&dir).map_err(|e| e.to_string());
        assert!(matches!(error, Err(text) if text.contains("format 2")));
    }

    #[test]
    fn two_processes_do_not_share_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let first = RulesFile::open(dir.path()).unwrap();
        assert!(matches!(RulesFile::open(dir.path()), Err(StoreError::InUse(_))));
        drop(first);
        assert!(RulesFile::open(dir.path()).is_ok());
    }
}

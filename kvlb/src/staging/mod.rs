//! Reads staged tokenizers from disk, loads them off the data path, and puts them in `state`.
//!
//! A model's files lie in `DIR/<slug>/`, where the slug is the model's name with `/` replaced by `__`. Names come from
//! clients, so a slug is looked up in the directory's own listing and never made into a path by itself.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::interval;

use crate::state::{Staged, State};
use crate::tokenize::{EngineOptions, Files, ModelSlug, Tokenizer};

/// How often the directory is looked at for changed files.
const RESCAN: Duration = Duration::from_secs(5);
/// A tokenizer.json of the largest vocabularies has about 35 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Why a model's files are of no use.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("no folder {slug} in {dir}: put the model's tokenizer.json there")]
    NoFolder { slug: String, dir: String },
    #[error("{name} is missing in {folder}")]
    Missing { name: &'static str, folder: String },
    #[error("read {path}: {source}")]
    Read { path: String, source: io::Error },
    #[error("{path} has more than {FILE_BYTES_MAX} bytes")]
    TooLarge { path: String },
    #[error(transparent)]
    Load(#[from] crate::tokenize::LoadError),
}

/// Serves wanted models for ever, and loads a model again when its files changed.
pub async fn keep_loaded(dir: PathBuf, state: Arc<State>) {
    let mut loaded: HashMap<ModelSlug, Stamp> = HashMap::new();
    let mut tick = interval(RESCAN);
    loop {
        tokio::select! {
            wanted = state.tokenizers.next_wanted() => {
                // Several askers may have wanted the same model while it was being loaded.
                for slug in wanted.iter().filter(|slug| state.tokenizers.status(slug.as_str()).is_none()) {
                    load(&dir, slug, &state, &mut loaded).await;
                }
            }
            _ = tick.tick() => {
                for slug in changed(&dir, &loaded) {
                    load(&dir, &slug, &state, &mut loaded).await;
                }
            }
        }
    }
}

/// What the files of a folder looked like when they were read.
type Stamp = Vec<(OsString, u64, Option<SystemTime>)>;

async fn load(dir: &Path, slug: &ModelSlug, state: &Arc<State>, loaded: &mut HashMap<ModelSlug, Stamp>) {
    let (folder, wanted) = (dir.to_owned(), slug.clone());
    let found = tokio::task::spawn_blocking(move || {
        let stamp = stamp(&folder, &wanted);
        let tokenizer = read(&folder, &wanted).and_then(|files| Ok(Tokenizer::load(&files, EngineOptions::default())?));
        (stamp, tokenizer)
    });
    let staged = match found.await {
        Ok((stamp, Ok(tokenizer))) => {
            tracing::info!(model = slug.as_str(), "tokenizer loaded");
            loaded.insert(slug.clone(), stamp);
            Staged::Ready(Arc::new(tokenizer))
        }
        Ok((stamp, Err(error))) => {
            tracing::warn!(model = slug.as_str(), %error, "tokenizer not usable");
            loaded.insert(slug.clone(), stamp);
            Staged::Unusable(error.to_string())
        }
        Err(error) => {
            tracing::error!(model = slug.as_str(), %error, "tokenizer could not be loaded");
            Staged::Unusable(error.to_string())
        }
    };
    state.tokenizers.put(slug, &staged);
}

/// Models whose files are not what they were when they were read.
fn changed(dir: &Path, loaded: &HashMap<ModelSlug, Stamp>) -> Vec<ModelSlug> {
    let mut all: Vec<_> =
        loaded.iter().filter(|(slug, before)| stamp(dir, slug) != **before).map(|(slug, _)| slug.clone()).collect();
    all.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
    all
}

fn stamp(dir: &Path, slug: &ModelSlug) -> Stamp {
    let Some(folder) = folder(dir, slug) else { return Vec::new() };
    let Ok(listing) = fs::read_dir(folder) else { return Vec::new() };
    let mut files: Stamp = listing
        .flatten()
        .filter_map(|entry| {
            let about = fs::metadata(entry.path()).ok()?;
            Some((entry.file_name(), about.len(), about.modified().ok()))
        })
        .collect();
    files.sort();
    files
}

/// The folder whose name is the slug, as the directory lists it.
fn folder(dir: &Path, slug: &ModelSlug) -> Option<PathBuf> {
    let listing = fs::read_dir(dir).ok()?;
    listing
        .flatten()
        .find(|entry| entry.file_name().to_str().is_some_and(|name| slug.matches_dir(name)))
        .map(|entry| entry.path())
}

fn read(dir: &Path, slug: &ModelSlug) -> Result<Files, Error> {
    let folder = folder(dir, slug)
        .ok_or_else(|| Error::NoFolder { slug: slug.as_str().to_owned(), dir: dir.display().to_string() })?;
    let tokenizer_json = read_file(&folder, "tokenizer.json")?
        .ok_or_else(|| Error::Missing { name: "tokenizer.json", folder: folder.display().to_string() })?;
    let template = read_file(&folder, "chat_template.jinja")?;
    Ok(Files {
        tokenizer_json,
        tokenizer_config: read_file(&folder, "tokenizer_config.json")?,
        chat_template: template.map(|text| String::from_utf8_lossy(&text).into_owned()),
        config: read_file(&folder, "config.json")?,
    })
}

/// A file's bytes; `None` when there is no such file.
fn read_file(folder: &Path, name: &str) -> Result<Option<Vec<u8>>, Error> {
    let path = folder.join(name);
    let shown = || path.display().to_string();
    match fs::metadata(&path) {
        Ok(about) if about.len() > FILE_BYTES_MAX => Err(Error::TooLarge { path: shown() }),
        Ok(_) => fs::read(&path).map(Some).map_err(|source| Error::Read { path: shown(), source }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path: shown(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slug_is_found_in_the_listing_and_never_followed_as_a_path() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::create_dir_all(dir.path().join("staged/Qwen__Qwen3-0.6B")).expect("a folder");
        fs::create_dir_all(dir.path().join("secret")).expect("a folder");
        let staged = dir.path().join("staged");
        assert!(folder(&staged, &ModelSlug::from("Qwen/Qwen3-0.6B")).is_some());
        for name in ["..", "../secret", ".", "", "..__secret"] {
            assert!(folder(&staged, &ModelSlug::from(name)).is_none(), "{name}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::create_dir_all(dir.path().join("m")).expect("a folder");
        let why =
            |model: &str| read(dir.path(), &ModelSlug::from(model)).map(|_files| ()).map_err(|error| error.to_string());
        assert!(why("m").is_err_and(|why| why.starts_with("tokenizer.json is missing in ")));
        assert!(why("absent").is_err_and(|why| why.starts_with("no folder absent in ")));
    }
}

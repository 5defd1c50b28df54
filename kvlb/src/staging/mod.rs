//! Reads staged tokenizers from disk, loads them off the data path, and puts them in `state`.
//!
//! A model's files lie in `DIR/<slug>/`, where the slug is the model's name with `/` replaced by `__`. Names come from
//! clients, so a slug is looked up in the directory's own listing and never made into a path by itself.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Mutex;
use tokio::time::interval;

use crate::openai::{Input, TokenOptions};
use crate::state::{Staged, State, Wanted};
use crate::tokenize::{Backend, EngineOptions, Files, Limits, ModelSlug, Tokenizer};

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
    #[error("{path} is no regular file")]
    NotAFile { path: String },
    #[error("the model's files make their reader panic: compare them with the model's own")]
    Panicked,
    #[error(transparent)]
    Load(#[from] crate::tokenize::LoadError),
}

/// Serves wanted models for ever, and loads a model again when its files changed.
pub async fn keep_loaded(dir: PathBuf, state: Arc<State>) {
    let mut loaded: HashMap<ModelSlug, Stamp> = HashMap::new();
    let quickening = Arc::new(Mutex::new(()));
    let mut tick = interval(RESCAN);
    loop {
        tokio::select! {
            wanted = state.tokenizers.next_wanted() => {
                // Asked for again while it was being loaded, a model is here already.
                for wanted in wanted.into_iter().filter(|wanted| !state.tokenizers.knows(&wanted.slug)) {
                    let tokenizer = load(&dir, &wanted, &state, &mut loaded).await;
                    quicken_aside(&quickening, &state, wanted.slug, tokenizer);
                }
            }
            _ = tick.tick() => {
                loaded.retain(|slug, _| state.tokenizers.knows(slug));
                for slug in changed(&dir, &loaded).await {
                    let wanted = Wanted { slug, by_client: false };
                    let tokenizer = load(&dir, &wanted, &state, &mut loaded).await;
                    quicken_aside(&quickening, &state, wanted.slug, tokenizer);
                }
            }
        }
    }
}

/// Loads one model's tokenizer, now and here.
///
/// # Errors
/// Which file is missing, or what is wrong with it.
pub fn load_now(dir: &Path, model: &str) -> Result<Tokenizer, String> {
    let slug = ModelSlug::from(model);
    let read = || read(dir, folder(dir, &slug).as_deref(), &slug);
    let load = || read().and_then(|files| Ok(tried(Tokenizer::load(&files, EngineOptions::default())?)));
    catch_unwind(load).unwrap_or(Err(Error::Panicked)).map_err(|error| error.to_string())
}

/// What the files of a folder looked like when they were read; `None` without a folder.
type Stamp = Option<Vec<(OsString, u64, Option<SystemTime>)>>;

/// Puts what is found of a model in force; gives its tokenizer where that is usable.
async fn load(
    dir: &Path,
    wanted: &Wanted,
    state: &State,
    loaded: &mut HashMap<ModelSlug, Stamp>,
) -> Option<Arc<Tokenizer>> {
    let slug = &wanted.slug;
    let (dir, name) = (dir.to_owned(), slug.clone());
    let found = tokio::task::spawn_blocking(move || {
        let folder = folder(&dir, &name);
        let stamp = folder.as_deref().and_then(stamp);
        // A model's file may be anything; what makes its reader panic is of no use, and looked at again when it changes.
        let read = || read(&dir, folder.as_deref(), &name);
        let load = || read().and_then(|files| Ok(tried(Tokenizer::load(&files, EngineOptions::default())?)));
        (stamp, catch_unwind(load).unwrap_or(Err(Error::Panicked)))
    });
    let (stamp, tokenizer) = found.await.unwrap_or_else(|_cancelled| (None, Err(Error::Panicked)));
    let model = slug.as_str();
    let staged = match tokenizer {
        Ok(tokenizer) => {
            tracing::info!(model, "tokenizer loaded");
            Staged::Ready(Arc::new(tokenizer))
        }
        Err(error) => {
            match error {
                Error::NoFolder { .. } if wanted.by_client => tracing::debug!(model, %error, "no such model"),
                _ => tracing::warn!(model, %error, "tokenizer not usable"),
            }
            Staged::Unusable(error.to_string())
        }
    };
    loaded.insert(slug.clone(), stamp);
    state.tokenizers.put(slug, &staged);
    match staged {
        Staged::Ready(tokenizer) => Some(tokenizer),
        Staged::Unusable(_) => None,
    }
}

/// Lets a tokenizer's quick twin be made beside everything else, one model at a time: it takes a core for seconds. Requests are
/// served by the reference until then.
fn quicken_aside(turn: &Arc<Mutex<()>>, state: &Arc<State>, slug: ModelSlug, tokenizer: Option<Arc<Tokenizer>>) {
    let Some(tokenizer) = tokenizer else { return };
    let (turn, state) = (Arc::clone(turn), Arc::clone(state));
    drop(tokio::spawn(async move {
        let _turn = turn.lock().await;
        // Cancelled only when the process ends.
        drop(tokio::task::spawn_blocking(move || quicken(&state, &slug, &tokenizer)).await);
    }));
}

/// Puts a tokenizer's quick twin in its place, once there is one that makes the same tokens.
fn quicken(state: &State, slug: &ModelSlug, tokenizer: &Arc<Tokenizer>) {
    let model = slug.as_str();
    let Ok(quick) = catch_unwind(AssertUnwindSafe(|| tokenizer.quick())) else {
        return tracing::warn!(model, "the fast tokenizer panics on the model's files: the reference serves");
    };
    match quick.status().backend {
        Backend::Reference(why) => tracing::warn!(model, %why, "the reference tokenizer serves, many times slower"),
        Backend::Fast => tracing::info!(model, "fast tokenizer tried and in force"),
    }
    state.tokenizers.quicken(slug, tokenizer, &Arc::new(quick));
}

/// A tokenizer that has read a text: one that panics on it would do so with every request.
fn tried(tokenizer: Tokenizer) -> Tokenizer {
    let text = Input::Text("The quick brown fox, 1234.\n".to_owned());
    // Whether it makes tokens of it shows in its status.
    drop(tokenizer.tokens(&text, &TokenOptions::default(), &Limits::default()));
    tokenizer
}

/// Models whose files are not what they were when they were read.
async fn changed(dir: &Path, loaded: &HashMap<ModelSlug, Stamp>) -> Vec<ModelSlug> {
    let (dir, loaded) = (dir.to_owned(), loaded.clone());
    let looking = tokio::task::spawn_blocking(move || {
        let folders = folders(&dir);
        let now = |slug: &ModelSlug| {
            let folder = folders.iter().find(|(name, _)| slug.matches_dir(name));
            folder.and_then(|(_, path)| stamp(path))
        };
        let mut changed: Vec<_> = loaded.into_iter().filter(|(slug, before)| now(slug) != *before).collect();
        changed.sort_unstable_by(|(a, _), (b, _)| a.as_str().cmp(b.as_str()));
        changed.into_iter().map(|(slug, _)| slug).collect()
    });
    // Cancelled only when the process ends.
    looking.await.unwrap_or_default()
}

fn stamp(folder: &Path) -> Stamp {
    let listing = fs::read_dir(folder).ok()?;
    let mut files: Vec<_> = listing
        .flatten()
        .filter_map(|entry| {
            let about = fs::metadata(entry.path()).ok()?;
            Some((entry.file_name(), about.len(), about.modified().ok()))
        })
        .collect();
    files.sort();
    Some(files)
}

/// The folder whose name is the slug, as the directory lists it.
fn folder(dir: &Path, slug: &ModelSlug) -> Option<PathBuf> {
    folders(dir).into_iter().find(|(name, _)| slug.matches_dir(name)).map(|(_, path)| path)
}

/// The folders in the staging directory, by name.
fn folders(dir: &Path) -> Vec<(String, PathBuf)> {
    let listing = fs::read_dir(dir).into_iter().flatten().flatten();
    listing.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect()
}

fn read(dir: &Path, folder: Option<&Path>, slug: &ModelSlug) -> Result<Files, Error> {
    let folder =
        folder.ok_or_else(|| Error::NoFolder { slug: slug.as_str().to_owned(), dir: dir.display().to_string() })?;
    let tokenizer_json = read_file(folder, "tokenizer.json")?
        .ok_or_else(|| Error::Missing { name: "tokenizer.json", folder: folder.display().to_string() })?;
    let template = read_file(folder, "chat_template.jinja")?;
    Ok(Files {
        tokenizer_json,
        tokenizer_config: read_file(folder, "tokenizer_config.json")?,
        chat_template: template.map(|text| String::from_utf8_lossy(&text).into_owned()),
        config: read_file(folder, "config.json")?,
    })
}

/// A file's bytes; `None` when there is no such file.
fn read_file(folder: &Path, name: &str) -> Result<Option<Vec<u8>>, Error> {
    let path = folder.join(name);
    let shown = || path.display().to_string();
    match fs::metadata(&path) {
        // Opening a pipe would wait for its writer, and a device may never end.
        Ok(about) if !about.is_file() => Err(Error::NotAFile { path: shown() }),
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
        let why = |model: &str| {
            let slug = ModelSlug::from(model);
            let read = read(dir.path(), folder(dir.path(), &slug).as_deref(), &slug);
            read.map(|_files| ()).map_err(|error| error.to_string())
        };
        assert!(why("m").is_err_and(|why| why.starts_with("tokenizer.json is missing in ")));
        assert!(why("absent").is_err_and(|why| why.starts_with("no folder absent in ")));
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let pipe = dir.path().join("tokenizer.json");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        std::os::unix::fs::symlink("/dev/zero", dir.path().join("config.json")).expect("a link");
        fs::create_dir(dir.path().join("chat_template.jinja")).expect("a folder");
        for name in ["tokenizer.json", "config.json", "chat_template.jinja"] {
            assert!(matches!(read_file(dir.path(), name), Err(Error::NotAFile { .. })), "{name}");
        }
        assert!(matches!(read_file(dir.path(), "absent"), Ok(None)));
    }
}

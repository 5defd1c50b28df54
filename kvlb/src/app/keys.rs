//! The API's tokens and certificate: read before anything starts, and again while it runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

use crate::config::{Access, Config, TokenFiles, is_local};
use crate::control::{Guard, Tokens};
use crate::secret::{self, Digest};
use crate::state::State;
use crate::telemetry::Metrics;
use crate::tls;

/// How often the files are looked at. They are small, and a token that leaked should not live on for long.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What guards the API, and the files that it comes from.
#[derive(Clone)]
pub(super) struct Keys {
    pub(super) guard: Arc<Guard>,
    pub(super) tls: Option<Arc<tls::Server>>,
    tokens: Option<(TokenFiles, Tokens)>,
}

/// Why tokens are not used.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Secret(#[from] secret::Error),
    #[error("{0} holds the token that opens everything: the one that only reads must be another")]
    Same(PathBuf),
}

impl Refused {
    fn code(&self) -> &'static str {
        match self {
            Self::Secret(error) => error.code(),
            Self::Same(_) => "same_token",
        }
    }
}

impl Keys {
    /// Reads the files.
    ///
    /// # Errors
    /// Which one is of no use, with what to do and a word for programs.
    pub(super) fn read(access: &Access, metrics: &Arc<Metrics>) -> Result<Self> {
        let tokens = match &access.tokens {
            None => None,
            Some(files) => match read(files) {
                Ok(tokens) => Some((files.clone(), tokens)),
                Err(error) => {
                    let code = error.code();
                    return Err(anyhow::Error::new(error).context(format!("read the API's tokens [token_{code}]")));
                }
            },
        };
        let tls = match &access.tls {
            None => None,
            Some(files) => {
                let server = tls::Server::new(files.clone());
                let server = server.map_err(|error| {
                    let code = error.code();
                    anyhow::Error::new(error).context(format!("set up TLS for the API [tls_{code}]"))
                })?;
                Some(Arc::new(server))
            }
        };
        let known = tokens.as_ref().map(|(_, tokens)| *tokens);
        Ok(Self { guard: Arc::new(Guard::new(known, access.open_metrics, Arc::clone(metrics))), tls, tokens })
    }

    /// Which tokens are known, in one word.
    pub(super) fn word(&self) -> &'static str {
        match &self.tokens {
            None => "none",
            Some((TokenFiles { read: None, .. }, _)) => "admin",
            Some((TokenFiles { read: Some(_), .. }, _)) => "admin+read",
        }
    }

    /// Says what of it an operator should know.
    pub(super) fn warn(&self, config: &Config, state: &State) {
        let address = config.api;
        if is_local(address) {
            return;
        }
        if self.tokens.is_none() {
            let why =
                format!("whoever reaches {address} may change rules: no token is asked for (--api-without-token)");
            tracing::warn!("API: {why}");
            state.degrade("api_without_token", why);
        } else if self.tls.is_none() {
            let why = format!(
                "tokens go to {address} in plain text: give --api-tls-cert and --api-tls-key, unless something else \
                 encrypts the way there"
            );
            tracing::warn!("API: {why}");
            state.degrade("api_plain_text", why);
        }
    }

    /// Reads the files again for ever, on SIGHUP at once. What a file of no use held before stays in force.
    pub(super) async fn keep_fresh(mut self, state: Arc<State>) -> Result<()> {
        if self.tokens.is_none() && self.tls.is_none() {
            return Ok(());
        }
        let mut hangup: Signal = signal(SignalKind::hangup()).context("listen for SIGHUP")?;
        let mut tick = interval(LOOK_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut token_trouble, mut tls_trouble) = (Trouble::new("api_tokens"), Trouble::new("api_tls"));
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                _ = hangup.recv() => tracing::info!("SIGHUP: the API's tokens and certificate are read again"),
            }
            if let Some((files, known)) = &mut self.tokens {
                let paths = files.clone();
                match tokio::task::spawn_blocking(move || read(&paths)).await? {
                    Ok(tokens) => {
                        if tokens != *known {
                            *known = tokens;
                            self.guard.replace(tokens);
                            tracing::info!("the API's tokens were replaced");
                        }
                        token_trouble.over(&state);
                    }
                    Err(error) => token_trouble.is(error.code(), error.to_string(), &state),
                }
            }
            if let Some(tls) = &self.tls {
                let tls = Arc::clone(tls);
                match tokio::task::spawn_blocking(move || tls.refresh()).await? {
                    Ok(changed) => {
                        if changed {
                            tracing::info!("the API's certificate was replaced");
                        }
                        tls_trouble.over(&state);
                    }
                    Err(error) => tls_trouble.is(error.code(), error.to_string(), &state),
                }
            }
        }
    }
}

fn read(files: &TokenFiles) -> Result<Tokens, Refused> {
    let digest = |path: &PathBuf| secret::token(path).map(|token| Digest::of(token.reveal().as_bytes()));
    let admin = digest(&files.admin)?;
    let read = files.read.as_ref().map(digest).transpose()?;
    match (&files.read, read) {
        (Some(path), Some(read)) if read == admin => Err(Refused::Same(path.clone())),
        _ => Ok(Tokens { admin, read }),
    }
}

/// What is wrong with files that were good once: told when it begins, and when it is another.
struct Trouble {
    what: &'static str,
    last: Option<String>,
}

impl Trouble {
    fn new(what: &'static str) -> Self {
        Self { what, last: None }
    }

    fn is(&mut self, code: &'static str, why: String, state: &State) {
        if self.last.as_ref() == Some(&why) {
            return;
        }
        tracing::warn!(reason = code, "{}: {why}; what was read before stays in force", self.what);
        state.metrics.api_reload_failures.with_label_values(&[self.what, code]).inc();
        state.degrade(self.what, format!("{why}; what was read before stays in force"));
        self.last = Some(why);
    }

    fn over(&mut self, state: &State) {
        if self.last.take().is_some() {
            tracing::info!("{}: the files are in order again", self.what);
            state.recovered(self.what);
        }
    }
}

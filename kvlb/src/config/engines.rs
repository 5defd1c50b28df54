//! Engines that are named on the command line: the zero-touch pool, and what `preflight` looks at by itself.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::env::{ConfigError, Env, Setting};
use super::{Both, UpFlags};
use crate::contract::NoneSeed;
use crate::discover::place;
use crate::fleet::EndpointKey;

/// Endpoints of the zero-touch pool: as many as a rule may have.
const ENDPOINTS_MAX: usize = 128;

/// `--listen` and `--endpoint`: a rule without a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroTouch {
    /// The VIP.
    pub listen: SocketAddr,
    /// The engines, in their order.
    pub endpoints: Vec<EndpointKey>,
}

impl ZeroTouch {
    /// The pool, where flags or variables name one.
    pub(super) fn read(flags: &UpFlags, both: &Both<'_>) -> Result<Option<Self>, ConfigError> {
        let listen = both.text("--listen", flags.listen.as_ref(), "KVLB_LISTEN")?;
        let by_variable = both.env.setting("KVLB_ENDPOINT")?;
        let mut endpoints = Vec::new();
        if flags.endpoint.is_empty() {
            for part in by_variable.iter().flat_map(|setting| setting.value.split(',')) {
                add(&mut endpoints, &Setting { name: "KVLB_ENDPOINT", value: part })?;
            }
        }
        for value in &flags.endpoint {
            add(&mut endpoints, &Setting { name: "--endpoint", value })?;
        }
        match (listen, endpoints.is_empty()) {
            (None, true) => Ok(None),
            (None, false) => Err(ConfigError::Needs("--endpoint", "--listen")),
            (Some(_), true) => Err(ConfigError::Needs("--listen", "--endpoint")),
            (Some(listen), false) => Ok(Some(Self { listen: address(&listen)?, endpoints })),
        }
    }
}

fn add(endpoints: &mut Vec<EndpointKey>, setting: &Setting<'_>) -> Result<(), ConfigError> {
    if setting.value.trim().is_empty() {
        return Ok(());
    }
    let place = place(setting.value).map_err(|error| setting.bad(error.to_string()))?;
    if endpoints.len() == ENDPOINTS_MAX {
        return Err(setting.bad(format!("at most {ENDPOINTS_MAX} engines")));
    }
    if !endpoints.contains(&place) {
        endpoints.push(place);
    }
    Ok(())
}

fn address(setting: &Setting<'_>) -> Result<SocketAddr, ConfigError> {
    let allowed = || setting.bad("an address and a port, as 10.10.10.254:8080 or 0.0.0.0:8080");
    let address: SocketAddr = setting.value.trim().parse().map_err(|_error| allowed())?;
    if address.port() == 0 { Err(allowed()) } else { Ok(address) }
}

/// What `preflight` needs of flags and variables to judge an engine without a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engines {
    /// `LLB_KV_NONE_HASH_SEED`.
    pub none_seed: NoneSeed,
    /// Where tokenizers are staged.
    pub tokenizer_dir: PathBuf,
    /// The engines' `--api-key`.
    pub key: Option<String>,
}

impl Engines {
    /// Reads them.
    ///
    /// # Errors
    /// [`ConfigError`] for the first value that is not allowed.
    pub fn new(tokenizer_dir: Option<&PathBuf>, key: Option<&String>, env: &Env) -> Result<Self, ConfigError> {
        let both = Both { env };
        Ok(Self {
            none_seed: super::kv::none_seed(env)?,
            tokenizer_dir: both.path(
                tokenizer_dir.map(PathBuf::as_path),
                "KVLB_TOKENIZER_DIR",
                super::TOKENIZER_DIR,
            )?,
            key: engine_key(key, &both)?,
        })
    }
}

pub(super) fn engine_key(flag: Option<&String>, both: &Both<'_>) -> Result<Option<String>, ConfigError> {
    Ok(both.text("--engine-key", flag, "KVLB_ENGINE_KEY")?.map(|setting| setting.value.to_owned()))
}

//! Who may use the API, and how it is reached.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::env::ConfigError;
use super::{Both, ClientFlags, UpFlags};
use crate::secret::Hidden;
use crate::tls::{Files, Trust};

/// Who may use the API.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The tokens; `None`: everybody may do everything.
    pub tokens: Option<TokenFiles>,
    /// Whether everybody may read the metrics.
    pub open_metrics: bool,
    /// Its certificate and key; `None`: plain HTTP.
    pub tls: Option<Files>,
}

/// Where the API's tokens are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFiles {
    /// Of the one that opens everything.
    pub admin: PathBuf,
    /// Of the one that opens what only reads.
    pub read: Option<PathBuf>,
}

impl Access {
    /// What guards an API that listens at `api`, which the setting `name` says.
    pub(super) fn read(
        flags: &UpFlags,
        both: &Both<'_>,
        (name, api): (&'static str, SocketAddr),
    ) -> Result<Self, ConfigError> {
        let admin = both.file(flags.api_token_file.as_deref(), "KVLB_API_TOKEN_FILE")?;
        let read = both.file(flags.api_read_token_file.as_deref(), "KVLB_API_READ_TOKEN_FILE")?;
        let without = both.switch(flags.api_without_token, "KVLB_API_WITHOUT_TOKEN")?;
        let tokens = match (admin, read) {
            (Some(_), _) if without => return Err(ConfigError::Both("--api-token-file", "--api-without-token")),
            (Some(admin), read) => Some(TokenFiles { admin, read }),
            (None, Some(_)) => return Err(ConfigError::Needs("--api-read-token-file", "--api-token-file")),
            (None, None) => None,
        };
        if tokens.is_none() && !without && !is_local(api) {
            return Err(ConfigError::Unguarded { name, address: api });
        }
        let cert = both.file(flags.api_tls_cert.as_deref(), "KVLB_API_TLS_CERT")?;
        let key = both.file(flags.api_tls_key.as_deref(), "KVLB_API_TLS_KEY")?;
        let client_ca = both.file(flags.api_client_ca.as_deref(), "KVLB_API_CLIENT_CA")?;
        let tls = match (cert, key) {
            (Some(cert), Some(key)) => Some(Files { cert, key, client_ca }),
            (Some(_), None) => return Err(ConfigError::Needs("--api-tls-cert", "--api-tls-key")),
            (None, Some(_)) => return Err(ConfigError::Needs("--api-tls-key", "--api-tls-cert")),
            (None, None) if client_ca.is_some() => return Err(ConfigError::Needs("--api-client-ca", "--api-tls-cert")),
            (None, None) => None,
        };
        Ok(Self { tokens, open_metrics: both.switch(flags.api_open_metrics, "KVLB_API_OPEN_METRICS")?, tls })
    }
}

/// Whether only this machine reaches an address. An IPv4 address written as IPv6 is what it is.
pub fn is_local(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// What a client shows to the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// The token itself.
    Token(Hidden),
    /// The file that holds it.
    File(PathBuf),
}

impl Credential {
    /// A flag wins over both variables.
    pub(super) fn read(flags: &ClientFlags, both: &Both<'_>) -> Result<Option<Self>, ConfigError> {
        let token = |token: &Hidden| Self::Token(token.clone());
        match (&flags.token, &flags.token_file) {
            (Some(_), Some(_)) => return Err(ConfigError::Both("--token", "--token-file")),
            (Some(given), None) => return Ok(Some(token(given))),
            (None, Some(file)) => return Ok(Some(Self::File(file.clone()))),
            (None, None) => {}
        }
        match (both.env.setting("KVLB_TOKEN")?, both.file(None, "KVLB_TOKEN_FILE")?) {
            (Some(_), Some(_)) => Err(ConfigError::Both("KVLB_TOKEN", "KVLB_TOKEN_FILE")),
            (Some(setting), None) => Ok(Some(Self::Token(Hidden::from(setting.value)))),
            (None, file) => Ok(file.map(Self::File)),
        }
    }
}

/// Whom a client trusts; `None` over plain HTTP, to which none of it applies.
pub(super) fn trust(flags: &ClientFlags, both: &Both<'_>, https: bool) -> Result<Option<Trust>, ConfigError> {
    let ca = both.file(flags.cacert.as_deref(), "KVLB_CACERT")?;
    let blindly = both.switch(flags.insecure, "KVLB_INSECURE")?;
    let cert = both.file(flags.cert.as_deref(), "KVLB_CERT")?;
    let key = both.file(flags.key.as_deref(), "KVLB_KEY")?;
    if !https {
        // Said by a flag, it was meant for this call; a variable may be meant for others.
        let given: [(&'static str, bool); 4] = [
            ("--cacert", flags.cacert.is_some()),
            ("--insecure", flags.insecure),
            ("--cert", flags.cert.is_some()),
            ("--key", flags.key.is_some()),
        ];
        let meant = given.into_iter().find(|(_, given)| *given);
        return meant.map_or(Ok(None), |(flag, _)| Err(ConfigError::Needs(flag, "--protocol https")));
    }
    let own = match (cert, key) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        (Some(_), None) => return Err(ConfigError::Needs("--cert", "--key")),
        (None, Some(_)) => return Err(ConfigError::Needs("--key", "--cert")),
    };
    if blindly && ca.is_some() {
        return Err(ConfigError::Both("--insecure", "--cacert"));
    }
    Ok(Some(Trust { ca, blindly, own }))
}

impl Both<'_> {
    fn file(&self, given: Option<&Path>, variable: &'static str) -> Result<Option<PathBuf>, ConfigError> {
        match given {
            Some(path) => Ok(Some(path.to_owned())),
            None => Ok(self.env.setting(variable)?.map(|setting| PathBuf::from(setting.value))),
        }
    }

    fn switch(&self, given: bool, variable: &'static str) -> Result<bool, ConfigError> {
        if given {
            return Ok(true);
        }
        self.env.setting(variable)?.map_or(Ok(false), |setting| setting.switch())
    }
}

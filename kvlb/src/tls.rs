//! TLS: one library and one crypto provider, and what both sides of the API make of certificates and keys.
//!
//! Owns how PEM files become the settings of a server ([`Server`]), and the HTTP clients of this program ([`plain_client`],
//! [`client`]). Versions and suites are rustls' own safe defaults (TLS 1.2 and 1.3).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, InconsistentKeys, RootCertStore, ServerConfig};

use crate::secret::{self, Digest};

/// The files of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The certificate, with those between it and the root behind it.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Who signs the certificates that clients must show; `None`: they need none.
    pub client_ca: Option<PathBuf>,
}

/// Why a server or client has no TLS.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of certificates that cannot be read.
    #[error("{path} cannot be read: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something else than PEM.
    #[error("{path} is not the PEM that is expected: {why}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A file without a certificate.
    #[error("{0} has no certificate (PEM, -----BEGIN CERTIFICATE-----)")]
    NoCertificate(PathBuf),
    /// A file without a key.
    #[error("{0} has no private key that can be read (PEM, PKCS #8, SEC1 or PKCS #1, not encrypted)")]
    NoKey(PathBuf),
    /// A key of another certificate.
    #[error("the key in {key} does not belong to the first certificate in {cert}")]
    Mismatch {
        /// The file of the key.
        key: PathBuf,
        /// The file of the certificate.
        cert: PathBuf,
    },
    /// A certificate that cannot be used.
    #[error("{path} is of no use: {why}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The key's file.
    #[error(transparent)]
    Secret(#[from] secret::Error),
    /// The client cannot be made.
    #[error("no HTTPS client can be made: {0}")]
    Client(#[source] reqwest::Error),
}

impl Error {
    /// A word that programs can match on.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "unreadable",
            Self::Pem { .. } => "not_pem",
            Self::NoCertificate(_) => "no_certificate",
            Self::NoKey(_) => "no_key",
            Self::Mismatch { .. } => "key_mismatch",
            Self::Unusable { .. } => "unusable",
            Self::Secret(error) => error.code(),
            Self::Client(_) => "client",
        }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// A server's TLS, as its files last were of use.
pub struct Server {
    files: Files,
    /// Of the files as they were read.
    seen: ArcSwap<Digest>,
    config: ArcSwap<ServerConfig>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Server {
    /// Reads the files.
    ///
    /// # Errors
    /// Which file is of no use, and why.
    pub fn new(files: Files) -> Result<Self, Error> {
        let read = Read::from(&files)?;
        let config = ArcSwap::from(read.config(&files)?);
        Ok(Self { files, seen: ArcSwap::from_pointee(read.digest()), config })
    }

    /// The settings of the next connection.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.config.load_full()
    }

    /// Whether clients must show a certificate.
    pub fn asks_for_certificates(&self) -> bool {
        self.files.client_ca.is_some()
    }

    /// Reads the files again, and says whether they are others by now. Files of no use change nothing.
    ///
    /// # Errors
    /// As [`Server::new`].
    pub fn refresh(&self) -> Result<bool, Error> {
        let read = Read::from(&self.files)?;
        let digest = read.digest();
        if **self.seen.load() == digest {
            return Ok(false);
        }
        self.config.store(read.config(&self.files)?);
        self.seen.store(Arc::new(digest));
        Ok(true)
    }
}

/// What is in the files.
struct Read {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Read {
    fn from(files: &Files) -> Result<Self, Error> {
        Ok(Self {
            cert: read(&files.cert)?,
            key: secret::read(&files.key)?,
            client_ca: files.client_ca.as_deref().map(read).transpose()?,
        })
    }

    fn digest(&self) -> Digest {
        // Each by itself first, so that nothing can move from one file to the next unseen.
        let parts = [Some(&self.cert), Some(&self.key), self.client_ca.as_ref()];
        let parts = parts.map(|part| part.map(|bytes| Digest::of(bytes)));
        Digest::of_all(parts.iter().flatten())
    }

    fn config(&self, files: &Files) -> Result<Arc<ServerConfig>, Error> {
        let chain = certificates(&files.cert, &self.cert)?;
        let key = key(&files.key, &self.key)?;
        let unusable = |path: &Path, why: String| Error::Unusable { path: path.to_owned(), why };
        // By itself first, so that an error names its file.
        if let Err(error) = provider().key_provider.load_private_key(key.clone_key()) {
            return Err(unusable(&files.key, error.to_string()));
        }
        let builder = ServerConfig::builder_with_provider(provider());
        let builder =
            builder.with_safe_default_protocol_versions().map_err(|error| unusable(&files.cert, error.to_string()))?;
        let builder = match (&files.client_ca, &self.client_ca) {
            (Some(path), Some(bytes)) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots(path, bytes)?), provider()).build();
                let verifier = verifier.map_err(|error: VerifierBuilderError| unusable(path, error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
            _ => builder.with_no_client_auth(),
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                Error::Mismatch { key: files.key.clone(), cert: files.cert.clone() }
            }
            error => unusable(&files.cert, error.to_string()),
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|source| Error::Unreadable { path: path.to_owned(), source })
}

fn certificates(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, Error> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    let all = all.map_err(|error| Error::Pem { path: path.to_owned(), why: error.to_string() })?;
    if all.is_empty() { Err(Error::NoCertificate(path.to_owned())) } else { Ok(all) }
}

fn key(path: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_slice(bytes).map_err(|error| match error {
        pem::Error::NoItemsFound => Error::NoKey(path.to_owned()),
        // What does not decode is not quoted: it is a key.
        _ => Error::Pem { path: path.to_owned(), why: "its key does not decode".to_owned() },
    })
}

fn roots(path: &Path, bytes: &[u8]) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, bytes)? {
        roots.add(certificate).map_err(|error| Error::Unusable { path: path.to_owned(), why: error.to_string() })?;
    }
    Ok(roots)
}

/// The beginnings of a client for plain HTTP, which trusts nobody's certificate and reads none of the system's.
#[expect(clippy::disallowed_methods, reason = "the one place that makes clients")]
pub fn plain_client() -> reqwest::ClientBuilder {
    let trusting = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    match trusting {
        Ok(builder) => {
            let config = builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
            reqwest::Client::builder().tls_backend_preconfigured(config)
        }
        Err(error) => unreachable!("the provider speaks its own default versions: {error}"),
    }
}

/// Whom a client trusts, and as whom it shows itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    /// Who signs the API's certificate, instead of those that the system trusts.
    pub ca: Option<PathBuf>,
    /// Trust whatever is shown.
    pub blindly: bool,
    /// Our own certificate and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// The beginnings of a client for HTTPS.
///
/// # Errors
/// Which file is of no use, and why.
#[expect(clippy::disallowed_methods, reason = "the one place that makes clients")]
pub fn client(trust: &Trust) -> Result<reqwest::ClientBuilder, Error> {
    // Only the first call counts, and all say the same.
    drop(ring::default_provider().install_default());
    let mut builder = reqwest::Client::builder().tls_danger_accept_invalid_certs(trust.blindly);
    if let Some(path) = &trust.ca {
        let bytes = read(path)?;
        let all = roots(path, &bytes).and_then(|_usable| certificates(path, &bytes))?;
        let all: Result<Vec<_>, _> = all.iter().map(|der| reqwest::Certificate::from_der(der)).collect();
        builder = builder.tls_certs_only(all.map_err(Error::Client)?);
    }
    if let Some((cert, key_file)) = &trust.own {
        let (chain, secret) = (read(cert)?, secret::read(key_file)?);
        certificates(cert, &chain)?;
        key(key_file, &secret)?;
        let both = [chain, vec![b'\n'], secret].concat();
        builder = builder.identity(reqwest::Identity::from_pem(&both).map_err(Error::Client)?);
    }
    Ok(builder)
}

#[cfg(test)]
pub(crate) mod tests;

//! Files of servers and clients, made on the spot.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::*;

/// A directory with an authority and what it signed.
pub(crate) struct Pki {
    dir: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let pki = Self { dir: tempfile::tempdir().unwrap(), authority };
        pki.write("ca", &pki.authority.pem());
        pki
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A file that only we may read.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    /// `NAME.cert` and `NAME.key` for a host.
    pub(crate) fn sign(&self, name: &str, host: &str) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec![host.to_owned()]).unwrap().signed_by(&key, &self.authority).unwrap();
        (
            self.write(&format!("{name}.cert"), &certificate.pem()),
            self.write(&format!("{name}.key"), &key.serialize_pem()),
        )
    }

    pub(crate) fn files(&self, name: &str, host: &str) -> Files {
        let (cert, key) = self.sign(name, host);
        Files { cert, key, client_ca: None }
    }
}

#[test]
fn files_that_are_of_no_use_are_refused_each_with_its_word() {
    let pki = Pki::new();
    let good = pki.files("a", "127.0.0.1");
    assert!(Server::new(good.clone()).is_ok());
    let chain = [fs::read_to_string(&good.cert).unwrap(), fs::read_to_string(pki.path("ca")).unwrap()].concat();
    let chain = pki.write("chain", &chain);
    assert!(Server::new(Files { cert: chain, ..good.clone() }).is_ok(), "with the authority behind it");
    assert!(Server::new(Files { client_ca: Some(pki.path("ca")), ..good.clone() }).is_ok());

    let (_, other_key) = pki.sign("b", "127.0.0.1");
    let text = pki.write("text", "hello");
    let garbled = pki.write("garbled", "-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----\n");
    let no_der = pki.write("no_der", "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n");
    let garbled_key = pki.write("garbled_key", "-----BEGIN PRIVATE KEY-----\n!!!!\n-----END PRIVATE KEY-----\n");
    let no_key = pki.write("no_key", "-----BEGIN PRIVATE KEY-----\naGVsbG8=\n-----END PRIVATE KEY-----\n");
    let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\naGVsbG8=\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let encrypted = pki.write("encrypted", encrypted);
    for (files, code) in [
        (Files { key: other_key, ..good.clone() }, "key_mismatch"),
        (Files { key: good.cert.clone(), ..good.clone() }, "no_key"),
        (Files { cert: good.key.clone(), ..good.clone() }, "no_certificate"),
        (Files { cert: text.clone(), ..good.clone() }, "no_certificate"),
        (Files { cert: pki.path("none"), ..good.clone() }, "unreadable"),
        (Files { key: pki.path("none"), ..good.clone() }, "unreadable"),
        (Files { cert: garbled, ..good.clone() }, "not_pem"),
        (Files { cert: no_der, ..good.clone() }, "unusable"),
        (Files { key: garbled_key, ..good.clone() }, "not_pem"),
        (Files { key: no_key, ..good.clone() }, "unusable"),
        (Files { key: encrypted, ..good.clone() }, "no_key"),
        (Files { client_ca: Some(text), ..good.clone() }, "no_certificate"),
        (Files { client_ca: Some(pki.path("none")), ..good.clone() }, "unreadable"),
    ] {
        let error = Server::new(files.clone()).unwrap_err();
        assert_eq!(error.code(), code, "{files:?}: {error}");
    }
    fs::set_permissions(&good.key, fs::Permissions::from_mode(0o644)).unwrap();
    let error = Server::new(good).unwrap_err();
    assert!(error.code() == "open_to_others" && error.to_string().contains("chmod 600"), "{error}");
}

#[test]
fn changed_files_count_once_and_files_of_no_use_change_nothing() {
    let pki = Pki::new();
    let files = pki.files("a", "127.0.0.1");
    let server = Server::new(files.clone()).unwrap();
    let first = server.config();
    assert!(!server.refresh().unwrap() && Arc::ptr_eq(&first, &server.config()));
    // A new certificate whose key is still the old one: on its way.
    let (cert, key) = pki.sign("b", "127.0.0.1");
    fs::copy(&cert, &files.cert).unwrap();
    assert_eq!(server.refresh().unwrap_err().code(), "key_mismatch");
    assert!(Arc::ptr_eq(&first, &server.config()));
    fs::copy(&key, &files.key).unwrap();
    assert!(server.refresh().unwrap());
    assert!(!Arc::ptr_eq(&first, &server.config()) && !server.refresh().unwrap());
}

#[test]
fn a_client_is_told_which_file_is_of_no_use() {
    let pki = Pki::new();
    let (cert, key) = pki.sign("c", "client");
    let own = Some((cert.clone(), key.clone()));
    let trust = Trust { ca: Some(pki.path("ca")), blindly: false, own };
    assert!(client(&trust).unwrap().build().is_ok());
    for (trust, code) in [
        (Trust { ca: Some(pki.path("none")), ..Trust::default() }, "unreadable"),
        (Trust { ca: Some(key.clone()), ..Trust::default() }, "no_certificate"),
        (Trust { own: Some((cert.clone(), cert.clone())), ..Trust::default() }, "no_key"),
        (Trust { own: Some((key.clone(), key)), ..Trust::default() }, "no_certificate"),
    ] {
        assert_eq!(client(&trust).unwrap_err().code(), code, "{trust:?}");
    }
}

//! Requests to the REST API.

use std::net::IpAddr;

use reqwest::{Method, RequestBuilder, StatusCode, Url};
use serde_json::Value;

use super::CliError;
use crate::config::{Client, Credential};
use crate::secret::Hidden;
use crate::{discover, secret, tls};

/// The API, as a client sees it.
#[derive(Debug)]
pub(super) struct Api {
    http: reqwest::Client,
    base: Url,
    config: Client,
    token: Option<Hidden>,
}

/// Bytes of an answer that are read: more than any of the API has, also with the names of every block of 32 MiB.
const ANSWER_MAX: usize = 256 << 20;

/// The text of an answer, unless it has more than [`ANSWER_MAX`] bytes.
pub(super) async fn bounded_text(answer: reqwest::Response) -> Result<Option<String>, reqwest::Error> {
    let body = discover::body_within(answer, ANSWER_MAX).await?;
    Ok(body.map(|body| String::from_utf8_lossy(&body).into_owned()))
}

/// Whether the address is one of this machine's own.
fn is_this_machine(url: &Url) -> bool {
    let Some(host) = url.host_str() else { return false };
    match host.trim_matches(['[', ']']).parse::<IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_name) => host == "localhost" || host.ends_with(".localhost"),
    }
}

type Query<'a> = [(&'a str, String)];

impl Api {
    pub(super) fn new(config: &Client) -> Result<Self, CliError> {
        let failed = |error: &dyn std::fmt::Display| CliError::Argument(format!("{}: {error}", config.url));
        let base = Url::parse(&config.url).map_err(|error| failed(&error))?;
        let mut http = match &config.trust {
            None => tls::plain_client(),
            Some(trust) => tls::client(trust).map_err(|error| CliError::Argument(error.to_string()))?,
        };
        http = http.timeout(config.timeout);
        if is_this_machine(&base) {
            // No proxy of the environment leads there.
            http = http.no_proxy();
        }
        if config.credential.is_some() {
            // The API never redirects, and a token is for nobody else.
            http = http.redirect(reqwest::redirect::Policy::none());
        }
        let http = http.build().map_err(|error| failed(&innermost(&error)))?;
        let token = match &config.credential {
            None => None,
            Some(Credential::Token(token)) => Some(token.clone()),
            Some(Credential::File(path)) => {
                Some(secret::token_of_client(path).map_err(|error| CliError::Argument(error.to_string()))?)
            }
        };
        Ok(Self { http, base, config: config.clone(), token })
    }

    pub(super) async fn get(&self, path: &[&str], query: &Query<'_>) -> Result<Value, CliError> {
        self.json(self.request(Method::GET, path, query)).await
    }

    pub(super) async fn delete(&self, path: &[&str], query: &Query<'_>) -> Result<Value, CliError> {
        self.json(self.request(Method::DELETE, path, query)).await
    }

    pub(super) async fn post(&self, path: &[&str], query: &Query<'_>, body: &Value) -> Result<Value, CliError> {
        self.json(self.request(Method::POST, path, query).json(body)).await
    }

    /// Sends bytes that may not even be JSON.
    pub(super) async fn post_bytes(&self, path: &[&str], query: &Query<'_>, body: Vec<u8>) -> Result<Value, CliError> {
        let request = self.request(Method::POST, path, query).header("content-type", "application/json");
        self.json(request.body(body)).await
    }

    /// An answer that is plain text.
    pub(super) async fn text(&self, path: &[&str]) -> Result<String, CliError> {
        let (_, text) = self.send(self.request(Method::GET, path, &[])).await?;
        Ok(text)
    }

    fn request(&self, method: Method, path: &[&str], query: &Query<'_>) -> RequestBuilder {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.extend(["netlox", "v1"]).extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let request = self.http.request(method, url);
        match &self.token {
            Some(token) => request.bearer_auth(token.reveal()),
            None => request,
        }
    }

    async fn json(&self, request: RequestBuilder) -> Result<Value, CliError> {
        let (status, text) = self.send(request).await?;
        serde_json::from_str(&text).map_err(|_error| self.not_ours(status))
    }

    /// The text of a successful answer.
    async fn send(&self, request: RequestBuilder) -> Result<(StatusCode, String), CliError> {
        let answer = request.send().await.map_err(|error| self.unreachable(&error))?;
        let status = answer.status();
        let text = match bounded_text(answer).await {
            Ok(Some(text)) => text,
            Ok(None) => return Err(self.not_ours(status)),
            Err(error) => return Err(self.unreachable(&error)),
        };
        if status.is_success() { Ok((status, text)) } else { Err(self.refused(status, &text)) }
    }

    fn refused(&self, status: StatusCode, text: &str) -> CliError {
        let body: Value = serde_json::from_str(text).unwrap_or_default();
        let word = |name: &str| body[name].as_str().map(str::to_owned);
        match word("message").or_else(|| word("result")) {
            Some(message) => {
                CliError::Refused { status: status.as_u16(), code: word("error").unwrap_or_default(), message }
            }
            // A gateway in front may refuse in its own words.
            None if matches!(status.as_u16(), 401 | 403 | 502..=504) => {
                CliError::Refused { status: status.as_u16(), code: String::new(), message: status.to_string() }
            }
            None => self.not_ours(status),
        }
    }

    fn not_ours(&self, status: StatusCode) -> CliError {
        CliError::NotOurs { url: self.config.url.clone(), status: status.as_u16() }
    }

    fn unreachable(&self, error: &reqwest::Error) -> CliError {
        let url = self.config.url.clone();
        if error.is_timeout() {
            return CliError::Timeout { url, seconds: self.config.timeout.as_secs() };
        }
        if let Some(error) = tls_error(error) {
            return CliError::Tls { url, cause: error.to_string(), hint: tls_hint(error) };
        }
        CliError::Unreachable { url, cause: innermost(error) }
    }
}

/// The innermost cause is the one that an operator knows: connection refused, no such host.
fn innermost(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// What TLS found wrong. It travels inside an I/O error, which does not show it as its source.
fn tls_error(error: &reqwest::Error) -> Option<&rustls::Error> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let inside = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        let found = inside.and_then(|inside| inside.downcast_ref()).or_else(|| error.downcast_ref());
        if found.is_some() {
            return found;
        }
        cause = match inside {
            Some(inside) => Some(inside),
            None => error.source(),
        };
    }
    None
}

/// What to do about it.
fn tls_hint(error: &rustls::Error) -> &'static str {
    use rustls::{AlertDescription as Alert, CertificateError as Bad, Error, InvalidMessage};
    match error {
        // The second: somebody of the same name signed it, as an authority that was made anew.
        Error::InvalidCertificate(Bad::UnknownIssuer | Bad::BadSignature) => {
            "--cacert FILE names who signed the API's certificate (it may be the certificate itself)"
        }
        Error::InvalidCertificate(Bad::Expired | Bad::ExpiredContext { .. }) => {
            "the API's certificate has expired: give `kvlb up` a new one in the same file, which it reads again by itself"
        }
        Error::InvalidCertificate(Bad::NotValidYet | Bad::NotValidYetContext { .. }) => {
            "the API's certificate is not valid yet: are the clocks of both machines right?"
        }
        Error::InvalidCertificate(Bad::NotValidForName | Bad::NotValidForNameContext { .. }) => {
            "--apiserver must be a name or address that the API's certificate lists"
        }
        // webpki's word for what `openssl req -x509` makes unless told otherwise.
        Error::InvalidCertificate(Bad::Other(other)) if other.to_string().contains("CaUsedAsEndEntity") => {
            "the API's certificate is marked as an authority: sign it by one, or make it anew with `openssl req -x509 … \
             -addext basicConstraints=critical,CA:FALSE`"
        }
        Error::InvalidCertificate(_) => "look at the API's certificate: openssl x509 -in FILE -text",
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "what listens there speaks no TLS: leave out --protocol https, or start `kvlb up` with --api-tls-cert"
        }
        Error::AlertReceived(
            Alert::CertificateRequired
            | Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::AccessDenied
            | Alert::HandshakeFailure,
        ) => "the API asks for a certificate of ours that its --api-client-ca signed: --cert FILE --key FILE",
        _ => "are --apiserver and --port right?",
    }
}

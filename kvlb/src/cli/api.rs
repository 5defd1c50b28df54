//! Requests to the REST API.

use std::net::IpAddr;

use reqwest::{Method, RequestBuilder, StatusCode, Url};
use serde_json::Value;

use super::CliError;
use crate::config::Client;
use crate::discover;

/// The API, as a client sees it.
#[derive(Debug)]
pub(super) struct Api {
    http: reqwest::Client,
    base: Url,
    config: Client,
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
        let mut http = reqwest::Client::builder().timeout(config.timeout);
        if is_this_machine(&base) {
            // No proxy of the environment leads there.
            http = http.no_proxy();
        }
        let http = http.build().map_err(|error| failed(&error))?;
        Ok(Self { http, base, config: config.clone() })
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
        match &self.config.token {
            Some(token) => request.bearer_auth(token),
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
        // The innermost cause is the one that an operator knows: connection refused, no such host.
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        CliError::Unreachable { url, cause: cause.to_string() }
    }
}

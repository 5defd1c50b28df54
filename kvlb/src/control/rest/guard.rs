//! Who may use the API: a token is compared, a role is told, and who is turned away is counted.
//!
//! Fails closed: a handler runs only for a request that this has let in, and needs an administrator unless its row in the
//! table of paths says that reading is enough.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;
use subtle::ConstantTimeEq as _;

use crate::clock;
use crate::control::Problem;
use crate::control::wire::shown;
use crate::secret::Digest;
use crate::telemetry::Metrics;

/// Between two log lines about those who are turned away.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// What somebody may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Read, and ask what changes nothing.
    Read,
    /// Everything.
    Admin,
}

/// The tokens that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Opens everything.
    pub admin: Digest,
    /// Opens what only reads.
    pub read: Option<Digest>,
}

impl Tokens {
    /// The role that a token gives. Takes as long for every token of a length.
    fn role(&self, token: &[u8]) -> Option<Role> {
        let given = Digest::of(token);
        let admin = self.admin.same(&given);
        let read = self.read.as_ref().map_or_else(|| 0_u8.ct_eq(&1), |read| read.same(&given));
        match (bool::from(admin), bool::from(read)) {
            (true, _) => Some(Role::Admin),
            (false, true) => Some(Role::Read),
            (false, false) => None,
        }
    }
}

/// Why somebody was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// No token.
    Missing,
    /// An `Authorization` that has none.
    Malformed,
    /// A token that nobody gave out.
    Wrong,
    /// A token that may only read.
    ReadOnly,
    /// Plain HTTP where TLS is spoken.
    NotTls,
    /// A handshake that failed: no common ground, or a client's certificate that is missing or not trusted.
    Handshake,
    /// A handshake that took too long.
    HandshakeLate,
}

impl Denied {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Missing => "token_missing",
            Self::Malformed => "token_malformed",
            Self::Wrong => "token_wrong",
            Self::ReadOnly => "token_read_only",
            Self::NotTls => "https_needed",
            Self::Handshake => "tls_failed",
            Self::HandshakeLate => "tls_late",
        }
    }
}

/// How a request came.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    /// In plain text, to a port that speaks TLS.
    pub(super) plain_at_tls: bool,
}

/// The guard at the API's door.
pub struct Guard {
    /// `None`: everybody is an administrator.
    tokens: ArcSwapOption<Tokens>,
    open_metrics: bool,
    metrics: Arc<Metrics>,
    log: Mutex<Quiet>,
}

/// When a line was written last, and how many were not since.
#[derive(Default)]
struct Quiet {
    last: Option<Instant>,
    left_out: u64,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("open_metrics", &self.open_metrics).finish_non_exhaustive()
    }
}

impl Guard {
    /// A guard that knows these tokens; without any, everybody may do everything. `open_metrics` lets everybody read the
    /// metrics, and nothing else.
    pub fn new(tokens: Option<Tokens>, open_metrics: bool, metrics: Arc<Metrics>) -> Self {
        let tokens = ArcSwapOption::from_pointee(tokens);
        Self { tokens, open_metrics, metrics, log: Mutex::default() }
    }

    /// Other tokens, for every request from now on. Who was let in without a token is not shut out by it.
    pub fn replace(&self, tokens: Tokens) {
        self.tokens.store(Some(Arc::new(tokens)));
    }

    fn role(&self, headers: &HeaderMap, path: &str) -> Result<Role, Denied> {
        let tokens = self.tokens.load();
        let Some(tokens) = tokens.as_deref() else { return Ok(Role::Admin) };
        let found = bearer(headers).and_then(|token| tokens.role(token).ok_or(Denied::Wrong));
        // A scraper that sends a token nevertheless may have an old one.
        if self.open_metrics && is_metrics(path) { found.or(Ok(Role::Read)) } else { found }
    }

    /// Counts one that is turned away, and tells the log now and then.
    pub(super) fn turn_away(&self, why: Denied, peer: SocketAddr, what: &str) {
        let reason = why.label();
        self.metrics.api_denied.with_label_values(&[reason]).inc();
        let now = clock::now();
        let left_out = {
            let mut log = self.log.lock();
            if log.last.is_some_and(|last| now.saturating_duration_since(last) < LOG_EVERY) {
                log.left_out += 1;
                return;
            }
            log.last = Some(now);
            std::mem::take(&mut log.left_out)
        };
        tracing::warn!(reason, peer = %peer.ip(), what, left_out, "the API turned somebody away");
    }
}

fn is_metrics(path: &str) -> bool {
    super::METRICS.contains(&path)
}

/// The token of a request. Also one without a scheme before it, as LoxiLB's own client sends it.
fn bearer(headers: &HeaderMap) -> Result<&[u8], Denied> {
    let mut all = headers.get_all(header::AUTHORIZATION).iter();
    let value = all.next().ok_or(Denied::Missing)?.as_bytes().trim_ascii();
    if all.next().is_some() {
        return Err(Denied::Malformed);
    }
    let token = match value.iter().position(|byte| matches!(byte, b' ' | b'\t')) {
        None => value,
        Some(end) if value[..end].eq_ignore_ascii_case(b"bearer") => value[end..].trim_ascii_start(),
        Some(_) => return Err(Denied::Malformed),
    };
    let empty = token.is_empty() || token.eq_ignore_ascii_case(b"bearer");
    if empty { Err(Denied::Malformed) } else { Ok(token) }
}

/// Lets a request in with its role, or turns it away.
pub(super) async fn admit(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>().copied();
    let path = request.uri().path();
    let role = match peer {
        Some(Peer { plain_at_tls: true, .. }) => Err(Denied::NotTls),
        _ => guard.role(request.headers(), path),
    };
    let denied = match role {
        Ok(role) => {
            request.extensions_mut().insert(role);
            let method_and_path = format!("{} {}", request.method(), shown(request.uri().path()));
            let response = next.run(request).await;
            if let (Some(peer), Some(denied)) = (peer, response.extensions().get::<Denied>()) {
                guard.turn_away(*denied, peer.address, &method_and_path);
            }
            return response;
        }
        Err(denied) => denied,
    };
    if let Some(peer) = peer {
        guard.turn_away(denied, peer.address, &format!("{} {}", request.method(), shown(path)));
    }
    match denied {
        Denied::NotTls => {
            // Who speaks plain text here would go on with it.
            ([(header::CONNECTION, "close")], Problem::HttpsNeeded).into_response()
        }
        Denied::Missing => Problem::TokenMissing.into_response(),
        _ => Problem::TokenWrong.into_response(),
    }
}

/// Lets a request to a path through whose role is enough for it.
pub(super) async fn may(State(needs): State<Role>, request: Request, next: Next) -> Response {
    match request.extensions().get::<Role>() {
        Some(role) if *role >= needs => next.run(request).await,
        Some(_) => {
            let mut response = Problem::TokenReadOnly.into_response();
            response.extensions_mut().insert(Denied::ReadOnly);
            response
        }
        // Nobody was at the door.
        None => Problem::TokenMissing.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADMIN: &str = "the-admin-token-0";
    const READ: &str = "the-read-token-00";

    fn guard(open_metrics: bool) -> Guard {
        let tokens = Tokens { admin: Digest::of(ADMIN.as_bytes()), read: Some(Digest::of(READ.as_bytes())) };
        Guard::new(Some(tokens), open_metrics, Arc::new(Metrics::new().unwrap()))
    }

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::AUTHORIZATION, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_token_gives_its_role_however_its_scheme_is_written() {
        let guard = guard(false);
        for (value, expected) in [
            ("Bearer the-admin-token-0", Ok(Role::Admin)),
            ("bearer  the-admin-token-0 ", Ok(Role::Admin)),
            ("BEARER\tthe-read-token-00", Ok(Role::Read)),
            ("the-read-token-00", Ok(Role::Read)),
            ("Bearer the-admin-token-", Err(Denied::Wrong)),
            ("Bearer the-admin-token-00", Err(Denied::Wrong)),
            ("Bearer THE-ADMIN-TOKEN-0", Err(Denied::Wrong)),
            ("Bearer the-admin-token-0 x", Err(Denied::Wrong)),
            ("Bearer", Err(Denied::Malformed)),
            ("Bearer ", Err(Denied::Malformed)),
            ("", Err(Denied::Malformed)),
            ("Basic dGhlLWFkbWluLXRva2VuLTA=", Err(Denied::Malformed)),
            ("Token the-admin-token-0", Err(Denied::Malformed)),
        ] {
            assert_eq!(guard.role(&headers(&[value]), "/x"), expected, "{value:?}");
        }
        assert_eq!(guard.role(&headers(&[]), "/x"), Err(Denied::Missing));
        let two = headers(&["Bearer wrong", "Bearer the-admin-token-0"]);
        assert_eq!(guard.role(&two, "/x"), Err(Denied::Malformed), "which of the two is meant?");
    }

    #[test]
    fn open_metrics_open_metrics_alone() {
        let guard = guard(true);
        for path in super::super::METRICS {
            assert_eq!(guard.role(&headers(&[]), path), Ok(Role::Read));
            assert_eq!(guard.role(&headers(&["Bearer old"]), path), Ok(Role::Read));
        }
        for path in ["/netlox/v1/status", "/metrics/", "/metrics/../netlox/v1/status", "/netlox/v1/config/metrics", "/"]
        {
            assert_eq!(guard.role(&headers(&[]), path), Err(Denied::Missing), "{path}");
        }
    }

    #[test]
    fn without_tokens_everybody_is_an_administrator_and_new_tokens_count_at_once() {
        let guard = Guard::new(None, false, Arc::new(Metrics::new().unwrap()));
        assert_eq!(guard.role(&headers(&[]), "/x"), Ok(Role::Admin));
        guard.replace(Tokens { admin: Digest::of(b"new"), read: None });
        assert_eq!(guard.role(&headers(&[]), "/x"), Err(Denied::Missing));
        assert_eq!(guard.role(&headers(&["Bearer new"]), "/x"), Ok(Role::Admin));
        assert_eq!(guard.role(&headers(&["Bearer the-read-token-00"]), "/x"), Err(Denied::Wrong));
    }

    #[test]
    fn who_is_turned_away_is_counted_each_time_and_logged_now_and_then() {
        let guard = guard(false);
        for _ in 0..5 {
            guard.turn_away(Denied::Wrong, "192.0.2.1:1".parse().unwrap(), "GET /");
        }
        assert_eq!(guard.metrics.api_denied.with_label_values(&["token_wrong"]).get(), 5);
        assert_eq!(guard.log.lock().left_out, 4);
    }
}

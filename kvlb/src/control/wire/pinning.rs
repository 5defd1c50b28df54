//! The fields of the body that say what is remembered of clients.

use std::time::Duration;

use super::PinningArguments;
use super::fields::shown;
use crate::control::Problem;
use crate::fleet::{Pinning, Selector, SessionSource, TrieRule};

/// Names of header fields, cookies and members of a query: longer ones are a mistake.
const NAME_MAX: usize = 128;

/// What the rule remembers. Zero is LoxiLB's word for "as by default".
pub(super) fn pinning(args: &PinningArguments, selector: Selector) -> Result<Pinning, Problem> {
    let session = session(args.session_header_name.as_deref().unwrap_or_default())?;
    if session.is_some() && !matches!(selector, Selector::RoundRobin | Selector::Persist) {
        return Err(Problem::Contradiction(
            "session_header_name goes with sel 0 and 3, which keep a session where it is".to_owned(),
        ));
    }
    let default = TrieRule::default();
    let trie = TrieRule {
        threshold: args.pd_cache_threshold.filter(|percent| *percent != 0).unwrap_or(default.threshold),
        balance: args.pd_balance_abs_threshold.filter(|apart| *apart != 0).unwrap_or(default.balance),
    };
    Ok(Pinning {
        ttl: args.pd_session_ttl_sec.filter(|seconds| *seconds != 0).map(|n| Duration::from_secs(n.into())),
        from_user: args.session_from_user.unwrap_or(false),
        session,
        trie: args.pd_cache_aware_mode.unwrap_or(false).then_some(trie),
    })
}

/// LoxiLB's forms of `session_header_name`.
fn session(text: &str) -> Result<Option<SessionSource>, Problem> {
    let (source, name): (fn(String) -> SessionSource, _) = match text.split_once(':') {
        _ if text.is_empty() => return Ok(None),
        _ if text == "basic-auth" => return Ok(Some(SessionSource::BasicAuth)),
        Some(("cookie", name)) => (SessionSource::Cookie, name),
        Some(("query", name)) => (SessionSource::Query, name),
        _ => (SessionSource::Header, text),
    };
    // Source: RFC 9110 §5.6.2, what a field name consists of, and RFC 6265 §4.1.1, a cookie's as well. A query's names may
    // have more in them, and then escapes, which are not undone here.
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(is_token) {
        return Err(Problem::BadValue {
            field: "session_header_name".to_owned(),
            value: format!("{:?}", shown(text)),
            expected: "use a header's name, cookie:NAME, query:NAME or basic-auth".to_owned(),
        });
    }
    Ok(Some(source(name.to_owned())))
}

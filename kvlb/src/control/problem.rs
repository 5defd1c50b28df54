//! What the API answers when it cannot do what was asked.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::fleet::RuleId;

/// Seconds after which a client should ask again while the rules are being loaded, as LoxiLB's boot gate says.
const RETRY_AFTER_SECONDS: u16 = 5;

/// Why a request to the API was refused. Every variant has one status and one stable code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The body is not JSON, or has a field twice in one object.
    #[error("the body is not JSON that can be read: {0}")]
    NotJson(String),
    /// Something that should be an object is not.
    #[error("{place} must be a JSON object, not {found}")]
    NotObject {
        /// Where it stands.
        place: String,
        /// What stands there.
        found: &'static str,
    },
    /// A field that nobody defines.
    #[error("unknown field {field:?}{place}{hint}")]
    UnknownField {
        /// The name as sent.
        field: String,
        /// Where it stands; empty for a rule's own fields.
        place: String,
        /// What may have been meant; empty where nothing is near.
        hint: String,
    },
    /// A field that must be there is not.
    #[error("{0} is missing")]
    MissingField(String),
    /// A field of another JSON type.
    #[error("{field} must be {expected}, not {found}")]
    WrongType {
        /// The field.
        field: String,
        /// Its type.
        expected: &'static str,
        /// What was sent.
        found: &'static str,
    },
    /// A number outside its range.
    #[error("{field} {value} is out of range: {range} is allowed")]
    OutOfRange {
        /// The field.
        field: String,
        /// What was sent.
        value: String,
        /// What is allowed.
        range: String,
    },
    /// A text that means nothing there.
    #[error("{field} {value} is not understood: {expected}")]
    BadValue {
        /// The field.
        field: String,
        /// What was sent.
        value: String,
        /// What would be understood.
        expected: String,
    },
    /// Documented by LoxiLB, and not what kvlb is for.
    #[error("{field} {value} is not supported: {reason}")]
    NotSupported {
        /// The field.
        field: String,
        /// What was sent.
        value: String,
        /// Why, or what to do instead.
        reason: String,
    },
    /// Meant to be served by a later version.
    #[error("{field} {value} is not supported yet: {reason}")]
    NotSupportedYet {
        /// The field.
        field: String,
        /// What was sent.
        value: String,
        /// What it would take, or what to do instead.
        reason: String,
    },
    /// An engine that a later version speaks.
    #[error("kvEngineType {0:?} is not supported yet: use vllm, or llamacpp without the KV tier")]
    EngineNotSupportedYet(String),
    /// A forwarding mode of LoxiLB's kernel path.
    #[error("mode {0} is not served: kvlb is a full proxy, set \"mode\": 4 (fullproxy)")]
    ModeNotServed(i64),
    /// The KV tier reads requests, which only a proxy does.
    #[error("kvExactMode needs mode 4 (fullproxy); the rule says mode {0}")]
    KvNeedsFullproxy(i64),
    /// `kvExactMode` 2.
    #[error("kvExactMode 2 is reserved: use 0 (off), 1 (prefill/decode) or 3 (single pool)")]
    KvModeReserved,
    /// Prefill/decode without one of the two.
    #[error("{0}, so the rule needs at least one endpoint with ep_role 1 (prefill) and one with ep_role 2 (decode)")]
    RolesMissing(&'static str),
    /// Roles in a pool without roles.
    #[error("kvExactMode 3 is one pool without roles: {0} must not have an ep_role (use 0, or kvExactMode 1)")]
    RolesRefused(String),
    /// Two fields that cannot both be meant.
    #[error("{0}")]
    Contradiction(String),
    /// A block hash that the engine does not compute.
    #[error("kvHashAlgo {algo:?} does not go with kvEngineType {engine:?}: use {expected}")]
    AlgorithmEngine {
        /// `kvHashAlgo`.
        algo: String,
        /// `kvEngineType`.
        engine: &'static str,
        /// What goes with it.
        expected: &'static str,
    },
    /// KV fields for an engine that announces no blocks.
    #[error("kvEngineType \"llamacpp\" announces no KV blocks: leave out {0}")]
    LlamaCppKv(String),
    /// A rule that nobody serves.
    #[error("a rule needs at least one endpoint; delete the rule to take it out of service")]
    NoEndpoints,
    /// An endpoint twice in one rule.
    #[error("endpoint {0} appears twice")]
    DuplicateEndpoint(String),
    /// More of something than a bound allows.
    #[error("{count} {what} are more than the {limit} that one {of} may have")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there would be.
        count: usize,
        /// How many may be.
        limit: usize,
        /// Where.
        of: &'static str,
    },
    /// A field that a rule keeps for its life.
    #[error("{field} cannot change from {is} to {asked}: {hint}")]
    Immutable {
        /// The field.
        field: &'static str,
        /// What the rule says.
        is: String,
        /// What was asked.
        asked: String,
        /// What to do.
        hint: &'static str,
    },
    /// Two rules that would answer the same requests.
    #[error("ports {ports} overlap those of rule {other} with the same address, host, path and model")]
    Overlap {
        /// The ports asked for.
        ports: String,
        /// The rule that is there.
        other: RuleId,
    },
    /// A request that names several rules where one was expected.
    #[error("{what} names {} rules: {}; add ?model_name=, or use /config/loadbalancer/id/ID", rules.len(), rules.join(", "))]
    SeveralRules {
        /// What was asked for.
        what: String,
        /// The rules, as an operator tells them apart.
        rules: Vec<String>,
    },
    /// `oper` 1 or 2 with something that it does not change.
    #[error(
        "oper {oper} changes endpoints only, but {field} differs from the rule's: send the whole rule without oper"
    )]
    EndpointsOnly {
        /// `oper`.
        oper: u8,
        /// The field that differs.
        field: String,
    },
    /// No such rule.
    #[error("no rule {0}")]
    NoRule(String),
    /// No such endpoint.
    #[error("no endpoint {0}")]
    NoEndpoint(String),
    /// No such path.
    #[error("no such path: {0}")]
    NoPath(String),
    /// The path knows other methods.
    #[error("method {0} is not allowed here")]
    MethodNotAllowed(String),
    /// A body over the limit.
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    /// A body that could not be received.
    #[error("the body could not be read: {0}")]
    BrokenBody(String),
    /// A body of another type.
    #[error("content type {0:?} is not supported: send application/json")]
    MediaType(String),
    /// A request without a token, where one is asked for.
    #[error("this API asks for a token: send Authorization: Bearer TOKEN")]
    TokenMissing,
    /// A token that nobody gave out.
    #[error("the token is not one of this API's")]
    TokenWrong,
    /// A token that may only read.
    #[error("the token may only read: this needs the administrator's")]
    TokenReadOnly,
    /// Plain HTTP where TLS is spoken.
    #[error("this port speaks HTTPS only")]
    HttpsNeeded,
    /// The rules are being loaded.
    #[error("kvlb is starting: its rules are not loaded yet")]
    Starting,
    /// The rules are on their way to another process.
    #[error("kvlb is being taken over by another process: nothing changes until that one serves; send it again then")]
    HandingOver,
    /// The state directory does not take the change.
    #[error("the change could not be written to the state directory and is not in force: {0}")]
    NotDurable(String),
    /// Something that this answer needs is not there now.
    #[error("{0}")]
    Unavailable(String),
}

impl Problem {
    /// The HTTP status, by whose fault it is.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NoRule(_) | Self::NoEndpoint(_) | Self::NoPath(_) => StatusCode::NOT_FOUND,
            Self::TokenMissing | Self::TokenWrong => StatusCode::UNAUTHORIZED,
            Self::TokenReadOnly => StatusCode::FORBIDDEN,
            Self::MethodNotAllowed(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::Immutable { .. }
            | Self::Overlap { .. }
            | Self::SeveralRules { .. }
            | Self::EndpointsOnly { .. }
            | Self::TooMany { of: "kvlb", .. } => StatusCode::CONFLICT,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::MediaType(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Starting | Self::HandingOver | Self::NotDurable(_) | Self::Unavailable(_) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            _ => StatusCode::BAD_REQUEST,
        }
    }

    /// The word that programs match on. It never changes for a given mistake.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotJson(_) => "not_json",
            Self::NotObject { .. } => "not_object",
            Self::UnknownField { .. } => "unknown_field",
            Self::MissingField(_) => "missing_field",
            Self::WrongType { .. } => "wrong_type",
            Self::OutOfRange { .. } => "out_of_range",
            Self::BadValue { .. } => "bad_value",
            Self::NotSupported { .. } => "not_supported",
            Self::NotSupportedYet { .. } => "not_supported_yet",
            Self::EngineNotSupportedYet(_) => "engine_not_supported_yet",
            Self::ModeNotServed(_) => "mode_not_served",
            Self::KvNeedsFullproxy(_) => "kv_needs_fullproxy",
            Self::KvModeReserved => "kv_mode_reserved",
            Self::RolesMissing(_) => "roles_missing",
            Self::RolesRefused(_) => "roles_refused",
            Self::Contradiction(_) => "contradiction",
            Self::AlgorithmEngine { .. } => "algorithm_engine",
            Self::LlamaCppKv(_) => "llamacpp_kv",
            Self::NoEndpoints => "endpoints_missing",
            Self::DuplicateEndpoint(_) => "duplicate_endpoint",
            Self::TooMany { .. } => "too_many",
            Self::Immutable { .. } => "immutable",
            Self::Overlap { .. } => "overlap",
            Self::SeveralRules { .. } => "several_rules",
            Self::EndpointsOnly { .. } => "endpoints_only",
            Self::NoRule(_) => "rule_not_found",
            Self::NoEndpoint(_) => "endpoint_not_found",
            Self::NoPath(_) => "path_not_found",
            Self::MethodNotAllowed(_) => "method_not_allowed",
            Self::TooLarge(_) => "too_large",
            Self::BrokenBody(_) => "broken_body",
            Self::MediaType(_) => "media_type",
            Self::TokenMissing => "token_missing",
            Self::TokenWrong => "token_wrong",
            Self::TokenReadOnly => "token_read_only",
            Self::HttpsNeeded => "https_needed",
            Self::Starting => "starting",
            Self::HandingOver => "handing_over",
            Self::NotDurable(_) => "not_durable",
            Self::Unavailable(_) => "unavailable",
        }
    }

    /// What a client is told of how to show itself (RFC 6750).
    fn challenge(&self) -> Option<&'static str> {
        match self {
            Self::TokenMissing => Some("Bearer realm=\"kvlb\""),
            Self::TokenWrong => Some("Bearer realm=\"kvlb\", error=\"invalid_token\""),
            Self::TokenReadOnly => Some("Bearer realm=\"kvlb\", error=\"insufficient_scope\""),
            _ => None,
        }
    }

    /// The body: LoxiLB's three fields, and the code.
    pub fn body(&self) -> Value {
        json!({
            "code": self.status().as_u16(),
            "message": self.to_string(),
            "result": "Error",
            "error": self.code(),
        })
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if self.status() == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECONDS));
        }
        if let Some(challenge) = self.challenge() {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_loxilbs_fields_and_a_code_of_its_own() {
        let problem = Problem::UnknownField {
            field: "kvexactmode".to_owned(),
            place: String::new(),
            hint: "; did you mean \"kvExactMode\"?".to_owned(),
        };
        assert_eq!(
            problem.body(),
            json!({"code": 400, "message": "unknown field \"kvexactmode\"; did you mean \"kvExactMode\"?",
                   "result": "Error", "error": "unknown_field"})
        );
    }

    #[test]
    fn starting_tells_when_to_ask_again() {
        let response = Problem::Starting.into_response();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers().get("retry-after").and_then(|v| v.to_str().ok()), Some("5"));
    }

    #[test]
    fn who_has_no_right_is_told_how_to_show_it() {
        for (problem, status) in
            [(Problem::TokenMissing, 401), (Problem::TokenWrong, 401), (Problem::TokenReadOnly, 403)]
        {
            let response = problem.into_response();
            assert_eq!(response.status(), status);
            let challenge = response.headers().get("www-authenticate").and_then(|v| v.to_str().ok());
            assert!(challenge.is_some_and(|text| text.starts_with("Bearer realm=")), "{challenge:?}");
        }
        assert!(Problem::HttpsNeeded.into_response().headers().get("www-authenticate").is_none());
    }

    #[test]
    fn too_many_rules_is_a_conflict_and_too_many_endpoints_a_mistake() {
        let too_many = |of| Problem::TooMany { what: "rules", count: 2, limit: 1, of };
        assert_eq!(too_many("kvlb").status(), 409);
        assert_eq!(too_many("rule").status(), 400);
    }

    #[test]
    fn the_documentation_names_every_code() {
        let (docs, source) = (include_str!("../../../docs/rest.md"), include_str!("problem.rs"));
        let codes = source.split("=> \"").skip(1).filter_map(|rest| rest.split_once("\",\n")).map(|(code, _)| code);
        let codes: Vec<_> = codes.filter(|code| code.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')).collect();
        assert!(codes.len() > 30, "{codes:?}");
        for code in codes {
            assert!(docs.contains(&format!("| `{code}` |")), "docs/rest.md does not name {code}");
        }
    }
}

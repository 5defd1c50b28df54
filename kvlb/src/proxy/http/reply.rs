//! Answers that kvlb makes itself.

use super::request::Refusal;

/// An answer of our own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    status: u16,
    code: &'static str,
    content_type: &'static str,
    extra: String,
    body: Vec<u8>,
}

impl Reply {
    /// An error in the form that OpenAI's clients read; `code` also travels as the field `x-kvlb-error`.
    pub fn error(status: u16, code: &'static str, message: &str) -> Self {
        let body = serde_json::json!({"error": {"message": message, "type": "kvlb_error", "code": code}});
        Self {
            status,
            code,
            content_type: "application/json",
            extra: format!("x-kvlb-error: {code}\r\n"),
            body: body.to_string().into_bytes(),
        }
    }

    /// The same with another field.
    #[must_use]
    pub fn with_field(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        self.extra.extend([format!("{name}: {value}\r\n")]);
        self
    }

    /// A JSON document.
    pub fn json(body: Vec<u8>) -> Self {
        Self { status: 200, code: "", content_type: "application/json", extra: String::new(), body }
    }

    /// An endpoint's JSON answer that was read here.
    pub(in crate::proxy) fn passed_on(status: u16, body: Vec<u8>) -> Self {
        Self { status, ..Self::json(body) }
    }

    /// The status.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The error's code; empty where it is no error.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Bytes of the body.
    pub(in crate::proxy) fn body_len(&self) -> usize {
        self.body.len()
    }

    /// The bytes to send. `to_head`: the request was a HEAD, so the body stays away and its length is told.
    pub(in crate::proxy) fn write(&self, to_head: bool, closing: super::Closing) -> Vec<u8> {
        let connection = match closing {
            super::Closing::KeepAlive => "",
            super::Closing::KeepAliveAloud => "connection: keep-alive\r\n",
            super::Closing::Close => "connection: close\r\n",
        };
        let (status, reason) = (self.status, reason(self.status));
        let (content_type, length, extra) = (self.content_type, self.body.len(), &self.extra);
        let mut bytes = format!(
            "HTTP/1.1 {status} {reason}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n{extra}{connection}\r\n"
        )
        .into_bytes();
        if !to_head {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}

impl From<Refusal> for Reply {
    fn from(refusal: Refusal) -> Self {
        Self::error(refusal.status(), refusal.code(), &refusal.to_string())
    }
}

/// Reason phrases of the statuses that we answer with. Source: the IANA registry of status codes.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        408 => "Request Timeout",
        414 => "URI Too Long",
        417 => "Expectation Failed",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "Error",
    }
}

#[cfg(test)]
mod tests {
    use super::super::Closing;
    use super::*;

    #[test]
    fn an_error_is_json_with_an_exact_length_and_its_code_in_a_field() {
        let reply = Reply::error(404, "model_not_found", "no rule serves \"a\nb\"");
        let text = String::from_utf8(reply.write(false, Closing::Close)).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 404 Not Found\r\n"));
        assert!(head.contains("\r\nx-kvlb-error: model_not_found\r\n"));
        assert!(head.contains(&format!("\r\ncontent-length: {}\r\n", body.len())));
        assert!(head.ends_with("connection: close"));
        let json: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(json["error"]["message"], "no rule serves \"a\nb\"");
        assert_eq!(json["error"]["type"], "kvlb_error");
        assert_eq!(json["error"]["code"], "model_not_found");
    }

    #[test]
    fn a_head_request_gets_the_length_without_the_body() {
        let reply = Reply::error(503, "no_healthy_backend", "nobody");
        let with = reply.write(false, Closing::KeepAlive);
        let without = reply.write(true, Closing::KeepAlive);
        assert!(with.starts_with(&without));
        assert!(without.ends_with(b"\r\n\r\n"));
    }
}

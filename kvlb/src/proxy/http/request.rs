//! The head of a request: read, checked, and written anew for an endpoint.

use std::mem::MaybeUninit;
use std::net::SocketAddr;

use super::super::trace::{Parent, Trace};
use super::fields::{Fields, Kind, Lines, NAMED_MAX, Span, content_length, write_field};
use super::{FIELDS_MAX, HEAD_MAX, METHOD_MAX, TARGET_MAX};

/// How a request's body is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No body, and none announced.
    None,
    /// `Content-Length`.
    Length(u64),
    /// `Transfer-Encoding: chunked`.
    Chunked,
}

/// Why a request is not taken. Everything that is refused here ends the connection: where its body would end, or what an
/// engine would make of it, is in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not HTTP.
    #[error("the request is not valid HTTP/1.1")]
    Syntax,
    /// Neither HTTP/1.1 nor HTTP/1.0.
    #[error("only HTTP/1.1 and HTTP/1.0 are served here")]
    Version,
    /// More bytes than are taken.
    #[error("the request's header section is larger than this proxy takes (--head-max-kib)")]
    HeadTooLarge,
    /// More than [`FIELDS_MAX`] fields.
    #[error("the request has more than 128 header fields")]
    TooManyFields,
    /// More than [`TARGET_MAX`] bytes.
    #[error("the request's target is longer than 16 KiB")]
    TargetTooLong,
    /// More than [`METHOD_MAX`] bytes.
    #[error("the request's method is longer than any known one")]
    MethodTooLong,
    /// HTTP/1.1 without `Host`, or with several.
    #[error("the request must have exactly one Host")]
    Host,
    /// Both `Content-Length` and `Transfer-Encoding`.
    #[error("the request has both Content-Length and Transfer-Encoding")]
    TwoFramings,
    /// A `Content-Length` that is no number, or several that differ.
    #[error("the request's Content-Length is not one number")]
    Length,
    /// `Transfer-Encoding` where `chunked` is not last, or not once, or in HTTP/1.0.
    #[error("the request's Transfer-Encoding does not end in one chunked")]
    Coding,
    /// `Transfer-Encoding` with another coding before `chunked`.
    #[error("the only transfer coding that is served here is chunked")]
    UnknownCoding,
    /// A chunk that breaks the grammar.
    #[error("the request's chunked body is malformed")]
    Chunk,
    /// `Upgrade` to something that is not HTTP.
    #[error("protocol upgrades are not served here")]
    Upgrade,
    /// `CONNECT`.
    #[error("CONNECT is not served here")]
    Connect,
    /// `Expect` with another word than `100-continue`.
    #[error("the only expectation that is served here is 100-continue")]
    Expectation,
}

impl Refusal {
    /// The status of the answer.
    pub const fn status(self) -> u16 {
        match self {
            Self::Syntax | Self::Host | Self::TwoFramings | Self::Length | Self::Coding | Self::Chunk => 400,
            Self::Version => 505,
            Self::HeadTooLarge | Self::TooManyFields => 431,
            Self::TargetTooLong => 414,
            Self::MethodTooLong | Self::UnknownCoding | Self::Upgrade | Self::Connect => 501,
            Self::Expectation => 417,
        }
    }

    /// The code of the answer.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Syntax | Self::Host => "bad_request",
            Self::TwoFramings | Self::Length | Self::Coding | Self::Chunk => "bad_framing",
            Self::Version => "http_version_not_supported",
            Self::HeadTooLarge | Self::TooManyFields => "header_too_large",
            Self::TargetTooLong => "uri_too_long",
            Self::MethodTooLong => "method_not_supported",
            Self::UnknownCoding => "transfer_coding_not_supported",
            Self::Upgrade => "upgrade_not_supported",
            Self::Connect => "connect_not_supported",
            Self::Expectation => "expectation_not_supported",
        }
    }
}

/// The head of a request.
#[derive(Clone, Debug)]
pub struct Head {
    bytes: Vec<u8>,
    method: Span,
    target: Span,
    lines: Lines,
    framing: Framing,
    http_1_0: bool,
    keep_alive: bool,
    expects_continue: bool,
    /// What the endpoint is told of the request's trace; `None`: what the client says goes on as it is.
    trace: Option<Trace>,
}

impl Head {
    /// `GET`, `POST`, or whatever the client sent.
    pub fn method(&self) -> &str {
        self.text(self.method)
    }

    /// The target as the client sent it.
    pub fn target(&self) -> &str {
        self.text(self.target)
    }

    /// The target in origin form: what of it follows the authority.
    pub fn origin_target(&self) -> &str {
        match authority_and_path(self.target()) {
            // RFC 9112 §3.2.4: a server as a whole is asked for by its authority alone.
            Some((_, "")) if self.method() == "OPTIONS" => "*",
            Some((_, "")) => "/",
            Some((_, path)) => path,
            None => self.target(),
        }
    }

    /// The path, without the query.
    pub fn path(&self) -> &str {
        let target = self.origin_target();
        let path = target.split_once('?').map_or(target, |(path, _)| path);
        if path.is_empty() { "/" } else { path }
    }

    /// The host that is asked for, with its port where the client gave one: the target's own, else the `Host` field.
    pub fn host(&self) -> Option<&str> {
        match authority_and_path(self.target()) {
            Some((authority, _)) => Some(authority),
            None => std::str::from_utf8(self.fields().of_kind(Kind::Host).next()?).ok(),
        }
    }

    /// The fields.
    pub fn fields(&self) -> Fields<'_> {
        self.lines.on(&self.bytes)
    }

    /// How the body is delimited.
    pub fn framing(&self) -> Framing {
        self.framing
    }

    pub(in crate::proxy) fn is_head(&self) -> bool {
        self.method() == "HEAD"
    }

    /// Whether the client speaks HTTP/1.0: no chunks, no interim answers.
    pub(in crate::proxy) fn is_http_1_0(&self) -> bool {
        self.http_1_0
    }

    /// Whether the client wants to send another request on this connection.
    pub(in crate::proxy) fn keep_alive(&self) -> bool {
        self.keep_alive
    }

    /// Whether the client waits for `100 Continue` before it sends the body.
    pub fn expects_continue(&self) -> bool {
        self.expects_continue
    }

    /// What the client says of the request's trace, where it makes sense.
    pub(in crate::proxy) fn parent(&self) -> Option<Parent> {
        Parent::of(self.fields().of_kind(Kind::TraceParent))
    }

    /// What the endpoint is told of the request's trace.
    pub(in crate::proxy) fn trace(&self) -> Option<&Trace> {
        self.trace.as_ref()
    }

    /// The endpoint is told this of the request's trace.
    pub(in crate::proxy) fn set_trace(&mut self, trace: Trace) {
        self.trace = Some(trace);
    }

    fn text(&self, span: Span) -> &str {
        // httparse hands out nothing else than UTF-8 here.
        std::str::from_utf8(&self.bytes[span.range()]).unwrap_or_default()
    }

    /// Writes the head as an endpoint gets it.
    ///
    /// Method, fields, their order and spelling are the client's. What concerned the client's own connection is gone, the
    /// body's framing is written anew, and the forwarding fields name the client.
    pub(in crate::proxy) fn write_for_endpoint(&self, out: &mut Vec<u8>, forward: &Forward<'_>) {
        out.extend_from_slice(self.method().as_bytes());
        out.push(b' ');
        if self.origin_target().starts_with('?') {
            out.push(b'/');
        }
        out.extend_from_slice(self.origin_target().as_bytes());
        out.extend_from_slice(b" HTTP/1.1\r\n");
        let absolute = authority_and_path(self.target());
        if let Some((authority, _)) = absolute {
            write_field(out, b"host", authority.as_bytes());
        } else if self.fields().of_kind(Kind::Host).next().is_none() {
            write_field(out, b"host", forward.vip.to_string().as_bytes());
        }
        self.fields().write_end_to_end(out, |kind| match kind {
            Kind::Host => absolute.is_some(),
            Kind::Expect => !forward.expect_continue,
            Kind::ForwardedFor => forward.client.is_some(),
            Kind::AcceptEncoding => forward.read_here,
            Kind::TraceParent => self.trace.is_some(),
            // It belongs to the client's trace.
            Kind::TraceState => self.trace.is_some_and(|trace| trace.parent_id.is_none()),
            _ => false,
        });
        if let Some(trace) = &self.trace {
            trace.write(out);
        }
        if let Some(client) = forward.client {
            self.write_forwarding(out, client);
        }
        match forward.framing {
            Framing::None => {}
            Framing::Length(length) => write_field(out, b"content-length", length.to_string().as_bytes()),
            Framing::Chunked => write_field(out, b"transfer-encoding", b"chunked"),
        }
        out.extend_from_slice(b"\r\n");
    }

    fn write_forwarding(&self, out: &mut Vec<u8>, client: &str) {
        out.extend_from_slice(b"x-forwarded-for: ");
        for earlier in self.fields().of_kind(Kind::ForwardedFor).filter(|value| !value.is_empty()) {
            out.extend_from_slice(earlier);
            out.extend_from_slice(b", ");
        }
        out.extend_from_slice(client.as_bytes());
        out.extend_from_slice(b"\r\n");
        if self.fields().of_kind(Kind::ForwardedProto).next().is_none() {
            write_field(out, b"x-forwarded-proto", b"http");
        }
    }
}

/// A head as [`Head::write_for_endpoint`] wrote it, with `fields` (lines that each end in CRLF) in place of its own by
/// their names.
pub(in crate::proxy) fn with_fields(head: &[u8], fields: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(head.len() + fields.len());
    for line in lines(head.strip_suffix(b"\r\n").unwrap_or(head)) {
        if !lines(fields).any(|field| same_name(field, line)) {
            out.extend_from_slice(line);
        }
    }
    out.extend_from_slice(fields);
    out.extend_from_slice(b"\r\n");
    out
}

/// The lines of a head, with their ends. No value holds a line's end: they are refused in requests.
fn lines(head: &[u8]) -> impl Iterator<Item = &[u8]> {
    head.split_inclusive(|byte| *byte == b'\n')
}

/// Whether two field lines have one name. A request line has none: its first colon stands behind a space.
fn same_name(field: &[u8], other: &[u8]) -> bool {
    let name = |line: &[u8]| line.iter().position(|byte| *byte == b':');
    match (name(field), name(other)) {
        (Some(end), Some(other_end)) => field[..end].eq_ignore_ascii_case(&other[..other_end]),
        _ => false,
    }
}

/// What of a head depends on more than the head.
#[derive(Clone, Debug)]
pub(in crate::proxy) struct Forward<'a> {
    /// The client to name in the forwarding fields; `None` where the rule has them off.
    pub(in crate::proxy) client: Option<&'a str>,
    /// The address that the client connected to: the `Host` of an HTTP/1.0 request that has none.
    pub(in crate::proxy) vip: SocketAddr,
    /// How the body goes on.
    pub(in crate::proxy) framing: Framing,
    /// The endpoint is to say whether it wants the body.
    pub(in crate::proxy) expect_continue: bool,
    /// The answer is read here and so must not be compressed.
    pub(in crate::proxy) read_here: bool,
}

/// Authority and the rest of a target in absolute form, of a scheme that is spoken here.
fn authority_and_path(target: &str) -> Option<(&str, &str)> {
    // Nearly all targets are in origin form.
    if target.starts_with('/') {
        return None;
    }
    let (scheme, rest) = target.split_once("://")?;
    if !(scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https")) {
        return None;
    }
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    Some((&rest[..end], &rest[end..]))
}

/// Reads a head that comes in pieces, without parsing the same bytes over and over.
#[derive(Clone, Copy, Debug)]
pub(in crate::proxy) struct HeadScan {
    seen: usize,
    max: usize,
}

impl Default for HeadScan {
    fn default() -> Self {
        Self::within(HEAD_MAX)
    }
}

impl HeadScan {
    /// Reads heads of up to `max` bytes.
    pub(in crate::proxy) fn within(max: usize) -> Self {
        Self { seen: 0, max }
    }

    /// The head at the front of `bytes` and its length, or `None` while its end has not come. `bytes` must begin with what
    /// earlier calls were given.
    ///
    /// # Errors
    /// As soon as it is clear that the request is refused.
    pub(in crate::proxy) fn request(&mut self, bytes: &[u8]) -> Result<Option<(Head, usize)>, Refusal> {
        if !self.may_be_whole(bytes) {
            return if bytes.len() >= self.max { Err(Refusal::HeadTooLarge) } else { Ok(None) };
        }
        let bytes = &bytes[..bytes.len().min(self.max)];
        let mut storage = [const { MaybeUninit::uninit() }; FIELDS_MAX];
        let mut request = httparse::Request::new(&mut []);
        match request.parse_with_uninit_headers(bytes, &mut storage) {
            Ok(httparse::Status::Complete(length)) => {
                let (method, target) = (request.method.unwrap_or_default(), request.path.unwrap_or_default());
                head(&bytes[..length], method, target, request.version == Some(0), request.headers)
                    .map(|head| Some((head, length)))
            }
            Ok(httparse::Status::Partial) => refuse_early(&request)
                .map_or(if bytes.len() >= self.max { Err(Refusal::HeadTooLarge) } else { Ok(None) }, Err),
            Err(error) => Err(refusal(error)),
        }
    }

    /// Whether `bytes` are worth parsing: the first piece always is, a later one where a line ends that holds nothing.
    pub(super) fn may_be_whole(&mut self, bytes: &[u8]) -> bool {
        let from = self.seen.saturating_sub(3);
        let first = self.seen == 0;
        self.seen = bytes.len();
        let fresh = &bytes[from.min(bytes.len())..];
        let blank_line = |tail: &[u8]| tail.starts_with(b"\n\n") || tail.starts_with(b"\n\r\n");
        first || fresh.iter().enumerate().any(|(at, byte)| *byte == b'\n' && blank_line(&fresh[at..]))
    }
}

/// What can be refused before the head has come in whole.
fn refuse_early(request: &httparse::Request<'_, '_>) -> Option<Refusal> {
    if request.method.is_some_and(|method| method.len() > METHOD_MAX) {
        return Some(Refusal::MethodTooLong);
    }
    request.path.is_some_and(|target| target.len() > TARGET_MAX).then_some(Refusal::TargetTooLong)
}

fn refusal(error: httparse::Error) -> Refusal {
    match error {
        httparse::Error::TooManyHeaders => Refusal::TooManyFields,
        httparse::Error::Version => Refusal::Version,
        _ => Refusal::Syntax,
    }
}

fn head(
    bytes: &[u8],
    method: &str,
    target: &str,
    http_1_0: bool,
    fields: &[httparse::Header<'_>],
) -> Result<Head, Refusal> {
    if method.len() > METHOD_MAX {
        return Err(Refusal::MethodTooLong);
    }
    if target.len() > TARGET_MAX {
        return Err(Refusal::TargetTooLong);
    }
    if method == "CONNECT" {
        return Err(Refusal::Connect);
    }
    if !target_is_sound(method, target) {
        return Err(Refusal::Syntax);
    }
    let lines = Lines::of(bytes, fields);
    let fields = lines.on(bytes);
    check_host(fields, http_1_0)?;
    if fields.list(Kind::Connection).count() > NAMED_MAX {
        return Err(Refusal::Syntax);
    }
    check_upgrade(fields)?;
    let framing = framing(fields, http_1_0)?;
    let connection = |word: &[u8]| fields.list(Kind::Connection).any(|member| member.eq_ignore_ascii_case(word));
    let keep_alive = !connection(b"close") && (!http_1_0 || connection(b"keep-alive"));
    let expects_continue = expects_continue(fields)? && !http_1_0;
    Ok(Head {
        method: Span::of(bytes, method.as_bytes()),
        target: Span::of(bytes, target.as_bytes()),
        bytes: bytes.to_vec(),
        lines,
        framing,
        http_1_0,
        keep_alive,
        expects_continue,
        trace: None,
    })
}

/// Origin form, absolute form with an authority, or the asterisk of `OPTIONS`.
fn target_is_sound(method: &str, target: &str) -> bool {
    match authority_and_path(target) {
        Some((authority, _)) => !authority.is_empty() && is_authority(authority.as_bytes()),
        None => target.starts_with('/') || (target == "*" && method == "OPTIONS"),
    }
}

fn check_host(fields: Fields<'_>, http_1_0: bool) -> Result<(), Refusal> {
    let mut hosts = fields.of_kind(Kind::Host);
    match (hosts.next(), hosts.next()) {
        (None, _) if http_1_0 => Ok(()),
        (Some(host), None) if is_authority(host) => Ok(()),
        _ => Err(Refusal::Host),
    }
}

/// Whether this may stand in `Host`, where nothing may stand too: a host and a port, of characters that no URL gives
/// another meaning.
fn is_authority(bytes: &[u8]) -> bool {
    let brackets = bytes.iter().filter(|byte| b"[]".contains(byte)).count();
    let bracketed = bytes.first() == Some(&b'[') && bytes.contains(&b']') && brackets == 2;
    bytes.iter().all(|byte| byte.is_ascii_graphic() && !b",/@#?\\\"<>^`{|}".contains(byte))
        && (brackets == 0 || bracketed)
}

/// An offer of HTTP/2 over clear text is passed over, as RFC 9110 §7.8 allows: clients that make it (Java's does by
/// default) go on in HTTP/1.1. Any other protocol could not be relayed, and its client would not go on without it.
fn check_upgrade(fields: Fields<'_>) -> Result<(), Refusal> {
    let asked = fields.list(Kind::Connection).any(|member| member.eq_ignore_ascii_case(b"upgrade"));
    let passable =
        |protocol: &[u8]| protocol.eq_ignore_ascii_case(b"h2c") || protocol.to_ascii_lowercase().starts_with(b"http/");
    let foreign = fields.list(Kind::Upgrade).any(|protocol| !passable(protocol));
    if asked && foreign { Err(Refusal::Upgrade) } else { Ok(()) }
}

fn framing(fields: Fields<'_>, http_1_0: bool) -> Result<Framing, Refusal> {
    let length = content_length(fields).map_err(|()| Refusal::Length)?;
    if fields.of_kind(Kind::TransferEncoding).next().is_none() {
        return Ok(length.map_or(Framing::None, Framing::Length));
    }
    // RFC 9112 §6.1: Transfer-Encoding in HTTP/1.0 means that the framing is faulty.
    if http_1_0 {
        return Err(Refusal::Coding);
    }
    if length.is_some() {
        return Err(Refusal::TwoFramings);
    }
    let chunked = |coding: &&[u8]| coding.eq_ignore_ascii_case(b"chunked");
    let codings = || fields.list(Kind::TransferEncoding);
    if !codings().last().is_some_and(|last| chunked(&last)) || codings().filter(chunked).count() != 1 {
        return Err(Refusal::Coding);
    }
    if codings().count() > 1 { Err(Refusal::UnknownCoding) } else { Ok(Framing::Chunked) }
}

fn expects_continue(fields: Fields<'_>) -> Result<bool, Refusal> {
    let mut expected = false;
    for expectation in fields.list(Kind::Expect) {
        if !expectation.eq_ignore_ascii_case(b"100-continue") {
            return Err(Refusal::Expectation);
        }
        expected = true;
    }
    Ok(expected)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Option<(Head, usize)>, Refusal> {
        HeadScan::default().request(text.as_bytes())
    }

    fn whole(text: &str) -> Head {
        parse(text).unwrap().unwrap().0
    }

    fn forwarded(text: &str, framing: Framing) -> String {
        let mut out = Vec::new();
        let forward = Forward {
            client: Some("10.0.0.9"),
            vip: SocketAddr::from(([10, 9, 9, 9], 8000)),
            framing,
            expect_continue: false,
            read_here: false,
        };
        whole(text).write_for_endpoint(&mut out, &forward);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_head_is_found_at_every_cut_and_only_once_it_is_whole() {
        let text = "POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}";
        for cut in 1..text.len() {
            let mut scan = HeadScan::default();
            let early = scan.request(&text.as_bytes()[..cut]).unwrap();
            assert_eq!(early.is_some(), cut >= text.len() - 2, "{cut}");
            if early.is_none() {
                let (head, length) = scan.request(text.as_bytes()).unwrap().unwrap();
                assert_eq!((head.path(), length), ("/v1/completions", text.len() - 2));
            }
        }
    }

    #[test]
    fn a_head_that_comes_byte_by_byte_is_found_at_its_end() {
        for ending in ["\r\n\r\n", "\n\n", "\r\n\n", "\n\r\n"] {
            let text = format!("GET / HTTP/1.1\r\nHost: a{ending}");
            let mut scan = HeadScan::default();
            for end in 1..text.len() {
                assert!(scan.request(&text.as_bytes()[..end]).unwrap().is_none(), "{end} of {ending:?}");
            }
            assert!(scan.request(text.as_bytes()).unwrap().is_some(), "{ending:?}");
        }
    }

    #[test]
    fn framing_that_can_be_read_in_two_ways_is_refused() {
        let cases = [
            ("Content-Length: 5\r\nTransfer-Encoding: chunked", Refusal::TwoFramings),
            ("Transfer-Encoding: chunked\r\nContent-Length: 5", Refusal::TwoFramings),
            ("Content-Length: 5\r\nContent-Length: 6", Refusal::Length),
            ("Content-Length: 5, 6", Refusal::Length),
            ("Content-Length: 5,", Refusal::Length),
            ("Content-Length: +5", Refusal::Length),
            ("Content-Length: -1", Refusal::Length),
            ("Content-Length: 0x5", Refusal::Length),
            ("Content-Length: 5 5", Refusal::Length),
            ("Content-Length:", Refusal::Length),
            ("Content-Length: 18446744073709551616", Refusal::Length),
            ("Content-Length: 9223372036854775808", Refusal::Length),
            ("Transfer-Encoding: identity", Refusal::Coding),
            ("Transfer-Encoding: xchunked", Refusal::Coding),
            ("Transfer-Encoding: chunked, gzip", Refusal::Coding),
            ("Transfer-Encoding: chunked, chunked", Refusal::Coding),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", Refusal::Coding),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", Refusal::Coding),
            ("Transfer-Encoding:", Refusal::Coding),
            ("Transfer-Encoding: \"chunked\"", Refusal::Coding),
            ("Transfer-Encoding: chunked;q=1", Refusal::Coding),
            ("Transfer-Encoding: gzip, chunked", Refusal::UnknownCoding),
            ("Transfer-Encoding : chunked", Refusal::Syntax),
            ("Transfer-Encoding:\r\n chunked", Refusal::Syntax),
            ("Content-Length: 5\r\n\tfolded", Refusal::Syntax),
            (" Content-Length: 5", Refusal::Syntax),
            ("Content-Length\0: 5", Refusal::Syntax),
            ("X: a\rContent-Length: 5", Refusal::Syntax),
            ("X: a\0b", Refusal::Syntax),
            ("no colon", Refusal::Syntax),
            ("Host: b", Refusal::Host),
            ("Expect: 200-ok", Refusal::Expectation),
            ("Connection: Upgrade\r\nUpgrade: websocket", Refusal::Upgrade),
        ];
        for (fields, refusal) in cases {
            let text = format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n\r\n");
            assert_eq!(parse(&text).map(|_head| ()), Err(refusal), "{fields:?}");
        }
    }

    #[test]
    fn request_lines_that_cannot_be_served_are_refused() {
        let cases = [
            ("GET / HTTP/2.0", Refusal::Version),
            ("GET / HTTP/1.2", Refusal::Version),
            ("GET /", Refusal::Syntax),
            ("GET  / HTTP/1.1", Refusal::Syntax),
            ("GET / HTTP/1.1 ", Refusal::Syntax),
            ("GET a HTTP/1.1", Refusal::Syntax),
            ("GET * HTTP/1.1", Refusal::Syntax),
            ("GET http:///x HTTP/1.1", Refusal::Syntax),
            ("GET http://user@host/ HTTP/1.1", Refusal::Syntax),
            ("GET ://other/ HTTP/1.1", Refusal::Syntax),
            ("GET ftp://other/ HTTP/1.1", Refusal::Syntax),
            ("GET http://a,b/ HTTP/1.1", Refusal::Syntax),
            ("GET http://a#b/ HTTP/1.1", Refusal::Syntax),
            ("GET http://[::1/ HTTP/1.1", Refusal::Syntax),
            ("CONNECT a:443 HTTP/1.1", Refusal::Connect),
            ("G@T / HTTP/1.1", Refusal::Syntax),
            ("\x16\x03\x01\x02\x00\x01", Refusal::Syntax),
        ];
        for (line, refusal) in cases {
            assert_eq!(parse(&format!("{line}\r\nHost: a\r\n\r\n")).map(|_head| ()), Err(refusal), "{line:?}");
        }
        let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(TARGET_MAX));
        assert_eq!(parse(&long).map(|_head| ()), Err(Refusal::TargetTooLong));
        let long = format!("{} / HTTP/1.1\r\nHost: a\r\n\r\n", "X".repeat(METHOD_MAX + 1));
        assert_eq!(parse(&long).map(|_head| ()), Err(Refusal::MethodTooLong));
        assert_eq!(parse("GET / HTTP/1.1\r\n\r\n").map(|_head| ()), Err(Refusal::Host));
        assert_eq!(
            parse("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n").map(|_head| ()),
            Err(Refusal::Coding)
        );
    }

    #[test]
    fn heads_are_bounded_in_bytes_and_in_fields() {
        let head = |filler: usize| format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(filler));
        let frame = head(0).len();
        assert!(parse(&head(HEAD_MAX - frame)).unwrap().is_some());
        assert_eq!(parse(&head(HEAD_MAX - frame + 1)).map(|_head| ()), Err(Refusal::HeadTooLarge));
        assert_eq!(parse(&head(2 * HEAD_MAX)[..HEAD_MAX + 5]).map(|_head| ()), Err(Refusal::HeadTooLarge));
        let fields = |count| format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "a: b\r\n".repeat(count));
        assert!(parse(&fields(FIELDS_MAX - 1)).unwrap().is_some());
        assert_eq!(parse(&fields(FIELDS_MAX)).map(|_head| ()), Err(Refusal::TooManyFields));
    }

    #[test]
    fn one_length_said_twice_is_one_length() {
        let head = whole("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 007\r\nContent-Length: 7, 7\r\n\r\n");
        assert_eq!(head.framing(), Framing::Length(7));
    }

    #[test]
    fn an_endpoint_sees_the_clients_fields_without_those_of_its_connection() {
        let text = "POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: api.test:8000\r\nConnection: keep-alive, X-Foo, host, Content-Length\r\nX-Foo: 1\r\nKEEP-ALIVE: 5\r\nTE: trailers\r\nProxy-Connection: x\r\nAuthorization: Bearer s\r\nAccept-Encoding: gzip\r\nX-Dup: a\r\nx-dup: b\r\nX-Forwarded-For: 1.1.1.1\r\nX-Forwarded-For: 2.2.2.2\r\nX-Forwarded-Proto: https\r\nUpgrade: h2c\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n";
        assert_eq!(
            forwarded(text, Framing::Length(5)),
            "POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: api.test:8000\r\nAuthorization: Bearer s\r\nAccept-Encoding: gzip\r\nX-Dup: a\r\nx-dup: b\r\nX-Forwarded-Proto: https\r\nx-forwarded-for: 1.1.1.1, 2.2.2.2, 10.0.0.9\r\ncontent-length: 5\r\n\r\n"
        );
    }

    #[test]
    fn an_absolute_target_becomes_origin_form_and_decides_the_host() {
        let text = "GET http://other.test:81?x HTTP/1.1\r\nHost: ignored\r\n\r\n";
        let head = whole(text);
        assert_eq!((head.host(), head.path()), (Some("other.test:81"), "/"));
        assert!(forwarded(text, Framing::None).starts_with("GET /?x HTTP/1.1\r\nhost: other.test:81\r\n"));
        let out = forwarded("GET http://other.test:81/p?x HTTP/1.1\r\nHost: ignored\r\n\r\n", Framing::None);
        assert!(out.starts_with("GET /p?x HTTP/1.1\r\nhost: other.test:81\r\n"), "{out}");
        assert!(!out.contains("ignored"));
        assert_eq!(whole("GET HTTP://[::1]:80/p HTTP/1.1\r\nHost: x\r\n\r\n").host(), Some("[::1]:80"));
        let out = forwarded("OPTIONS http://other.test:81 HTTP/1.1\r\nHost: ignored\r\n\r\n", Framing::None);
        assert!(out.starts_with("OPTIONS * HTTP/1.1\r\nhost: other.test:81\r\n"), "{out}");
    }

    #[test]
    fn an_http_1_0_request_is_raised_to_1_1_with_a_host() {
        let out = forwarded("GET /p HTTP/1.0\r\nX: 1\r\n\r\n", Framing::None);
        assert_eq!(
            out,
            "GET /p HTTP/1.1\r\nhost: 10.9.9.9:8000\r\nX: 1\r\nx-forwarded-for: 10.0.0.9\r\nx-forwarded-proto: http\r\n\r\n"
        );
        assert!(!whole("GET /p HTTP/1.0\r\n\r\n").keep_alive());
        assert!(whole("GET /p HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n").keep_alive());
        assert!(!whole("GET /p HTTP/1.1\r\nHost: a\r\nConnection: foo, CLOSE\r\n\r\n").keep_alive());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), cut in any::<prop::sample::Index>()) {
            let mut scan = HeadScan::default();
            if scan.request(&bytes[..cut.index(bytes.len() + 1)]).is_ok_and(|head| head.is_none()) {
                drop(scan.request(&bytes));
            }
        }

        #[test]
        fn what_is_forwarded_is_itself_a_sound_request(
            names in prop::collection::vec("[A-Za-z-]{1,18}", 0..12),
            values in prop::collection::vec("[ -~]{0,30}", 12),
            path in "/[!-~]{0,40}",
        ) {
            let mut text = format!("POST {path} HTTP/1.1\r\nHost: a\r\n");
            for (name, value) in names.iter().zip(&values) {
                text = format!("{text}{name}: {value}\r\n");
            }
            text.push_str("\r\n");
            if let Ok(Some((head, _))) = parse(&text) {
                let again = forwarded(&text, head.framing());
                let (second, length) = HeadScan::default().request(again.as_bytes()).unwrap().unwrap();
                prop_assert_eq!(length, again.len());
                prop_assert_eq!(second.framing(), head.framing());
                prop_assert_eq!(second.target(), head.origin_target());
            }
        }
    }
}

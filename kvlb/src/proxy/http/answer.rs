//! The head of an answer, and the end of its body.

use std::mem::MaybeUninit;

use httparse::ParserConfig;

use super::chunked::{ChunkError, Chunked};
use super::fields::{Fields, Kind, Lines, Span, content_length, write_field};
use super::request::HeadScan;
use super::{FIELDS_MAX, HEAD_MAX};

/// Why an endpoint's answer cannot be relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::proxy) enum AnswerError {
    #[error("the head is not valid HTTP/1.x")]
    Syntax,
    #[error("the head is larger than 64 KiB or has more than 128 fields")]
    TooLarge,
    #[error("the length is not one number, or the coding is not chunked")]
    Framing,
    #[error("it switches protocols though nobody asked")]
    Switching,
    #[error(transparent)]
    Chunk(#[from] ChunkError),
}

/// How an answer's body is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) enum AnswerFraming {
    None,
    Length(u64),
    Chunked,
    /// The body ends with the connection.
    Close,
}

/// The head of an answer. It refers to the bytes that it was parsed from.
#[derive(Clone, Debug)]
pub(in crate::proxy) struct AnswerHead {
    /// The status.
    pub(in crate::proxy) status: u16,
    /// Bytes of the head.
    pub(in crate::proxy) length: usize,
    /// Whether the endpoint's connection may carry another request afterwards.
    pub(in crate::proxy) keep_alive: bool,
    framing: AnswerFraming,
    /// `Content-Length` goes on to the client also where there is no body (HEAD, 304).
    announced: Option<u64>,
    reason: Span,
    lines: Lines,
}

/// What an answer's body is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) enum Medium {
    /// One JSON document.
    Json,
    /// Server-sent events.
    Events,
}

/// What becomes of the client's connection after an answer, as its head says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) enum Closing {
    /// It stays; HTTP/1.1 needs no word for that.
    KeepAlive,
    /// It stays, and an HTTP/1.0 client is told so.
    KeepAliveAloud,
    /// It ends.
    Close,
}

impl HeadScan {
    /// The head at the front of `bytes`, or `None` while its end has not come. `to_head` says that the request was a HEAD.
    ///
    /// # Errors
    /// When it is no head that can be relayed.
    pub(in crate::proxy) fn answer(&mut self, bytes: &[u8], to_head: bool) -> Result<Option<AnswerHead>, AnswerError> {
        let unfinished = || if bytes.len() >= HEAD_MAX { Err(AnswerError::TooLarge) } else { Ok(None) };
        if !self.may_be_whole(bytes) {
            return unfinished();
        }
        let mut storage = [const { MaybeUninit::uninit() }; FIELDS_MAX];
        let mut answer = httparse::Response::new(&mut []);
        let parsed = ParserConfig::default().parse_response_with_uninit_headers(&mut answer, bytes, &mut storage);
        let length = match parsed {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) => return unfinished(),
            Err(httparse::Error::TooManyHeaders) => return Err(AnswerError::TooLarge),
            Err(_) => return Err(AnswerError::Syntax),
        };
        let status = answer.code.unwrap_or(0);
        let reason = Span::of(bytes, answer.reason.unwrap_or_default().as_bytes());
        let lines = Lines::of(bytes, answer.headers);
        head(bytes, status, answer.version == Some(0), to_head, length, reason, lines).map(Some)
    }
}

fn head(
    bytes: &[u8],
    status: u16,
    http_1_0: bool,
    to_head: bool,
    length: usize,
    reason: Span,
    lines: Lines,
) -> Result<AnswerHead, AnswerError> {
    if status == 101 {
        return Err(AnswerError::Switching);
    }
    if status < 100 {
        return Err(AnswerError::Syntax);
    }
    let fields = lines.on(bytes);
    let announced = content_length(fields).map_err(|()| AnswerError::Framing)?;
    let coded = fields.of_kind(Kind::TransferEncoding).next().is_some();
    let framing = match (status, coded) {
        _ if to_head => AnswerFraming::None,
        (..200 | 204 | 304, _) => AnswerFraming::None,
        (_, true) => coding(fields, http_1_0)?,
        (_, false) => announced.map_or(AnswerFraming::Close, AnswerFraming::Length),
    };
    let connection = |word: &[u8]| fields.list(Kind::Connection).any(|member| member.eq_ignore_ascii_case(word));
    let keep_alive = framing != AnswerFraming::Close
        && !(coded && announced.is_some())
        && !connection(b"close")
        && (!http_1_0 || connection(b"keep-alive"));
    let announced = if coded || status < 200 || status == 204 { None } else { announced };
    Ok(AnswerHead { status, length, keep_alive, framing, announced, reason, lines })
}

/// Only chunked is understood. A length beside it is dropped, and the connection is not trusted with another request.
fn coding(fields: Fields<'_>, http_1_0: bool) -> Result<AnswerFraming, AnswerError> {
    let mut codings = fields.list(Kind::TransferEncoding);
    match (codings.next(), codings.next()) {
        (Some(only), None) if only.eq_ignore_ascii_case(b"chunked") && !http_1_0 => Ok(AnswerFraming::Chunked),
        _ => Err(AnswerError::Framing),
    }
}

impl AnswerHead {
    /// Whether it announces another head for the same request.
    pub(in crate::proxy) fn is_interim(&self) -> bool {
        self.status < 200
    }

    /// Whether the engine says that it has not started on the request.
    pub(in crate::proxy) fn is_busy(&self) -> bool {
        matches!(self.status, 429 | 503)
    }

    /// What the body is, where it can be read as it comes: not compressed, and of a type that engines answer in.
    /// `bytes` are those that the head was parsed from.
    pub(in crate::proxy) fn medium(&self, bytes: &[u8]) -> Option<Medium> {
        let fields = self.lines.on(bytes);
        if fields.get("content-encoding").is_some_and(|coding| !coding.eq_ignore_ascii_case(b"identity")) {
            return None;
        }
        let kind = fields.get("content-type")?.split(|byte| *byte == b';').next()?.trim_ascii();
        match kind {
            _ if kind.eq_ignore_ascii_case(b"application/json") => Some(Medium::Json),
            _ if kind.eq_ignore_ascii_case(b"text/event-stream") => Some(Medium::Events),
            _ => None,
        }
    }

    /// Follows the body to its end. `plain` says that the client cannot read chunks (HTTP/1.0).
    pub(in crate::proxy) fn body(&self, plain: bool) -> AnswerBody {
        match self.framing {
            AnswerFraming::None => AnswerBody::Length(0),
            AnswerFraming::Length(length) => AnswerBody::Length(length),
            AnswerFraming::Chunked if plain => AnswerBody::Unchunk(Chunked::default()),
            AnswerFraming::Chunked => AnswerBody::Chunked(Chunked::default()),
            AnswerFraming::Close => AnswerBody::Close,
        }
    }

    /// Writes the head as the client gets it. `bytes` are those that it was parsed from; `extra` are field lines of ours.
    pub(in crate::proxy) fn write_for_client(
        &self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        body: &AnswerBody,
        closing: Closing,
        extra: &[u8],
    ) {
        out.extend_from_slice(b"HTTP/1.1 ");
        out.extend_from_slice(self.status.to_string().as_bytes());
        out.push(b' ');
        out.extend_from_slice(&bytes[self.reason.range()]);
        out.extend_from_slice(b"\r\n");
        self.lines.on(bytes).write_end_to_end(out, |_kind| false);
        if let Some(length) = self.announced {
            write_field(out, b"content-length", length.to_string().as_bytes());
        }
        if matches!(body, AnswerBody::Chunked(_)) {
            write_field(out, b"transfer-encoding", b"chunked");
        }
        match closing {
            Closing::KeepAlive => {}
            Closing::KeepAliveAloud => write_field(out, b"connection", b"keep-alive"),
            Closing::Close => write_field(out, b"connection", b"close"),
        }
        out.extend_from_slice(extra);
        out.extend_from_slice(b"\r\n");
    }
}

/// Follows the body of an answer.
#[derive(Clone, Debug)]
pub(in crate::proxy) enum AnswerBody {
    /// So many bytes to come.
    Length(u64),
    /// Chunks, which go on as they are.
    Chunked(Chunked),
    /// Chunks, whose payload goes on alone.
    Unchunk(Chunked),
    /// Everything up to the connection's end.
    Close,
}

/// What a piece of a body holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) struct Progress {
    /// Bytes at the piece's front to pass on.
    pub(in crate::proxy) pass: usize,
    /// Bytes behind the body's end: the endpoint broke the protocol.
    pub(in crate::proxy) excess: bool,
    /// The body is complete.
    pub(in crate::proxy) done: bool,
}

impl AnswerBody {
    /// Whether nothing more is to come.
    pub(in crate::proxy) fn is_done(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(chunked) | Self::Unchunk(chunked) => chunked.is_done(),
            Self::Close => false,
        }
    }

    /// Bytes still to come, where that is known.
    pub(in crate::proxy) fn left(&self) -> Option<u64> {
        match self {
            Self::Length(left) => Some(*left),
            _ => None,
        }
    }

    /// Whether the end of the connection is the end of the body.
    pub(in crate::proxy) fn ends_with_connection(&self) -> bool {
        matches!(self, Self::Close)
    }

    /// Whether the client can tell the body's end without its connection ending.
    pub(in crate::proxy) fn is_delimited(&self) -> bool {
        matches!(self, Self::Length(_) | Self::Chunked(_))
    }

    /// Takes the next piece. Where chunks are taken apart, the payload moves to the piece's front.
    ///
    /// # Errors
    /// When the chunks are malformed.
    pub(in crate::proxy) fn take(&mut self, piece: &mut [u8]) -> Result<Progress, ChunkError> {
        self.take_showing(piece, |_payload| ())
    }

    /// As [`AnswerBody::take`], and shows the payload to `see`, which may write other bytes in its place.
    ///
    /// # Errors
    /// When the chunks are malformed.
    pub(in crate::proxy) fn take_showing(
        &mut self,
        piece: &mut [u8],
        mut see: impl FnMut(&mut [u8]),
    ) -> Result<Progress, ChunkError> {
        let (pass, used) = match self {
            Self::Chunked(chunked) => {
                let count = chunked.scan_showing(piece, see)?;
                return Ok(Progress { pass: count, excess: count < piece.len(), done: self.is_done() });
            }
            Self::Length(left) => {
                let count = usize::try_from(*left).unwrap_or(usize::MAX).min(piece.len());
                *left -= count as u64;
                (count, count)
            }
            Self::Unchunk(chunked) => chunked.decode(piece)?,
            Self::Close => (piece.len(), piece.len()),
        };
        see(&mut piece[..pass]);
        Ok(Progress { pass, excess: used < piece.len(), done: self.is_done() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(bytes: &[u8], to_head: bool) -> Result<Option<AnswerHead>, AnswerError> {
        HeadScan::default().answer(bytes, to_head)
    }

    fn framing(head: &str) -> Result<(AnswerFraming, bool), AnswerError> {
        parse(head.as_bytes(), false).map(|head| head.map(|head| (head.framing, head.keep_alive)).unwrap())
    }

    #[test]
    fn the_end_of_a_body_is_told_as_the_rfc_says() {
        use AnswerFraming::{Chunked, Close, Length, None};
        let cases = [
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", (Length(5), true)),
            ("HTTP/1.1 200\r\ncontent-length: 5\r\nConnection: Close\r\n\r\n", (Length(5), false)),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n", (Chunked, true)),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n", (Chunked, false)),
            ("HTTP/1.1 200 OK\r\n\r\n", (Close, false)),
            ("HTTP/1.1 204 No Content\r\n\r\n", (None, true)),
            ("HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", (None, true)),
            ("HTTP/1.1 100 Continue\r\n\r\n", (None, true)),
            ("HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n", (Length(5), false)),
            ("HTTP/1.0 200 OK\r\ncontent-length: 5\r\nconnection: keep-alive\r\n\r\n", (Length(5), true)),
        ];
        for (head, expected) in cases {
            assert_eq!(framing(head), Ok(expected), "{head}");
        }
        let to_head = parse(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", true).unwrap().unwrap();
        assert_eq!(to_head.framing, None);
    }

    #[test]
    fn answers_that_cannot_be_relayed_are_told_apart() {
        let cases = [
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", AnswerError::Framing),
            ("HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n", AnswerError::Framing),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n", AnswerError::Framing),
            ("HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", AnswerError::Framing),
            ("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n", AnswerError::Switching),
            ("HTTP/1.1 2000 OK\r\n\r\n", AnswerError::Syntax),
            ("HTTP/1.1 200 OK\r\na: b\r\n folded\r\n\r\n", AnswerError::Syntax),
            ("SSH-2.0-OpenSSH\r\n\r\n", AnswerError::Syntax),
        ];
        for (head, expected) in cases {
            assert_eq!(framing(head), Err(expected), "{head}");
        }
        let long = format!("HTTP/1.1 200 OK\r\na: {}", "x".repeat(HEAD_MAX));
        assert_eq!(parse(long.as_bytes(), false).unwrap_err(), AnswerError::TooLarge);
    }

    #[test]
    fn hop_by_hop_fields_stay_behind_and_the_rest_is_untouched() {
        let bytes = b"HTTP/1.1 200 Fine Day\r\nServer: uvicorn\r\nConnection: keep-alive, X-Hop\r\nx-hop: 1\r\nKeep-Alive: 5\r\nContent-Length: 3\r\nSet-Cookie: a\r\nset-cookie: b\r\n\r\nabc";
        let head = parse(bytes, false).unwrap().unwrap();
        let mut out = Vec::new();
        head.write_for_client(bytes, &mut out, &head.body(false), Closing::Close, b"x-kvlb-tier: 2\r\n");
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "HTTP/1.1 200 Fine Day\r\nServer: uvicorn\r\nSet-Cookie: a\r\nset-cookie: b\r\ncontent-length: 3\r\nconnection: close\r\nx-kvlb-tier: 2\r\n\r\n"
        );
    }

    #[test]
    fn a_head_that_comes_in_pieces_is_found_at_every_cut() {
        let bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc";
        let end = bytes.len() - 3;
        for cut in 1..bytes.len() {
            let mut scan = HeadScan::default();
            let early = scan.answer(&bytes[..cut], false).unwrap();
            assert_eq!(early.is_some(), cut >= end, "{cut}");
            if early.is_none() {
                assert_eq!(scan.answer(bytes, false).unwrap().unwrap().length, end);
            }
        }
    }

    #[test]
    fn a_length_ends_where_it_says_and_tells_of_excess() {
        let mut body = AnswerBody::Length(5);
        assert_eq!(body.take(&mut b"abc".to_vec()), Ok(Progress { pass: 3, excess: false, done: false }));
        assert_eq!(body.take(&mut b"deXX".to_vec()), Ok(Progress { pass: 2, excess: true, done: true }));
    }

    #[test]
    fn chunks_are_taken_apart_for_a_client_that_cannot_read_them() {
        let mut body = AnswerBody::Unchunk(Chunked::default());
        let mut piece = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n".to_vec();
        assert_eq!(body.take(&mut piece), Ok(Progress { pass: 5, excess: false, done: true }));
        assert_eq!(&piece[..5], b"abcde");
    }
    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            status in "HTTP/1\\.[01] [0-9]{1,4}[ -~]{0,9}",
            rest in prop::collection::vec(any::<u8>(), 0..200),
            cut in any::<prop::sample::Index>(),
            to_head: bool,
        ) {
            let whole = [status.as_bytes(), b"\r\n", &rest, b"\r\n\r\n"].concat();
            let mut scan = HeadScan::default();
            for bytes in [&whole[..cut.index(whole.len() + 1)], &whole] {
                match scan.answer(bytes, to_head) {
                    Ok(Some(head)) => prop_assert!(head.length <= bytes.len()),
                    Ok(None) => continue,
                    Err(_refused) => {}
                }
                break;
            }
        }
    }
}

//! As much of HTTP/1.1 as both ends need: heads, and where a body ends.

/// How a body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// After so many bytes.
    Length(usize),
    /// With the last chunk.
    Chunked,
    /// With the connection.
    Closed,
}

/// A head that has come in full.
#[derive(Clone, Debug)]
pub(super) struct Head {
    /// Its bytes.
    pub(super) len: usize,
    /// Of an answer; 0 in a request.
    pub(super) status: u16,
    pub(super) body: Body,
    /// The other side closes the connection after the body.
    pub(super) closes: bool,
    /// The hash of the request's body that an answer echoes.
    pub(super) body_hash: Option<[u8; 16]>,
}

/// These bytes are no HTTP/1.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// The head of a request; None while it is not all there.
pub(super) fn request(bytes: &[u8]) -> Result<Option<Head>, Malformed> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes).map_err(|_no_request| Malformed)? {
        httparse::Status::Partial => Ok(None),
        httparse::Status::Complete(len) => Ok(Some(head(len, 0, request.headers, Body::Length(0)))),
    }
}

/// The head of an answer; None while it is not all there.
pub(super) fn answer(bytes: &[u8]) -> Result<Option<Head>, Malformed> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut answer = httparse::Response::new(&mut fields);
    match answer.parse(bytes).map_err(|_no_answer| Malformed)? {
        httparse::Status::Partial => Ok(None),
        httparse::Status::Complete(len) => {
            Ok(Some(head(len, answer.code.unwrap_or_default(), answer.headers, Body::Closed)))
        }
    }
}

fn head(len: usize, status: u16, fields: &[httparse::Header<'_>], otherwise: Body) -> Head {
    let mut head = Head { len, status, body: otherwise, closes: false, body_hash: None };
    for field in fields {
        let is = |name: &str| field.name.eq_ignore_ascii_case(name);
        if is("content-length") {
            let length = std::str::from_utf8(field.value).ok().and_then(|text| text.trim().parse().ok());
            head.body = Body::Length(length.unwrap_or_default());
        } else if is("transfer-encoding") {
            head.body = Body::Chunked;
        } else if is("connection") {
            head.closes = field.value.eq_ignore_ascii_case(b"close");
        } else if is("x-body-hash") {
            head.body_hash = field.value.try_into().ok();
        }
    }
    head
}

/// Takes a chunked body apart.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Chunks {
    at: At,
    /// Bytes of the chunk that are still to come.
    left: usize,
}

#[derive(Clone, Copy, Debug, Default)]
enum At {
    #[default]
    Size,
    Extension,
    Payload,
    PayloadEnd,
    TrailerStart,
    Trailer,
}

impl Chunks {
    /// Gives the payload in `bytes` to `take`. Some once the body has ended: the bytes behind it.
    pub(super) fn feed<'a>(
        &mut self,
        bytes: &'a [u8],
        mut take: impl FnMut(&'a [u8]),
    ) -> Result<Option<&'a [u8]>, Malformed> {
        let mut rest = bytes;
        while let Some((byte, behind)) = rest.split_first() {
            if matches!(self.at, At::Payload) {
                let (payload, behind) = rest.split_at(self.left.min(rest.len()));
                take(payload);
                self.left -= payload.len();
                rest = behind;
                if self.left == 0 {
                    self.at = At::PayloadEnd;
                }
                continue;
            }
            rest = behind;
            self.at = match (self.at, byte) {
                (At::Size | At::Extension, b'\n') if self.left == 0 => At::TrailerStart,
                (At::Size | At::Extension, b'\n') => At::Payload,
                (At::Size, b';') => At::Extension,
                (At::Size, b'\r') | (At::PayloadEnd, b'\n') => At::Size,
                (At::Size, digit) => {
                    let digit = char::from(*digit).to_digit(16).ok_or(Malformed)?;
                    let left = self.left.checked_mul(16).ok_or(Malformed)?;
                    self.left = left | usize::try_from(digit).unwrap_or_default();
                    At::Size
                }
                (At::PayloadEnd, b'\r') => At::PayloadEnd,
                (At::PayloadEnd, _) => return Err(Malformed),
                (At::TrailerStart, b'\n') => {
                    *self = Self::default();
                    return Ok(Some(rest));
                }
                (At::TrailerStart, b'\r') | (At::Trailer, b'\n') => At::TrailerStart,
                (At::TrailerStart | At::Trailer, _) => At::Trailer,
                (at @ (At::Extension | At::Payload), _) => at,
            };
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunked_body_is_the_same_however_it_is_cut() {
        let bytes = b"5\r\nhello\r\nA;x=y\r\n, my world\r\n0\r\nX: y\r\n\r\nnext";
        for cut in 0..bytes.len() - 4 {
            let (mut chunks, mut payload) = (Chunks::default(), Vec::new());
            let (first, second) = bytes.split_at(cut);
            assert_eq!(chunks.feed(first, |piece| payload.extend_from_slice(piece)), Ok(None));
            let end = chunks.feed(second, |piece| payload.extend_from_slice(piece));
            assert_eq!(end, Ok(Some(&b"next"[..])));
            assert_eq!(payload, b"hello, my world");
        }
        assert_eq!(Chunks::default().feed(b"5\r\nhello!", |_| {}), Err(Malformed));
        assert_eq!(Chunks::default().feed(b"x", |_| {}), Err(Malformed));
    }

    #[test]
    fn a_head_says_how_its_body_ends() {
        let of = |text: &str| answer(format!("HTTP/1.1 200 OK\r\n{text}\r\n").as_bytes()).unwrap().unwrap();
        assert_eq!(of("Content-Length: 12\r\n").body, Body::Length(12));
        assert_eq!(of("transfer-encoding: chunked\r\n").body, Body::Chunked);
        assert!(of("Connection: close\r\n").closes);
        assert_eq!(of("").body, Body::Closed);
        assert!(answer(b"HTTP/1.1 200 OK\r\n").unwrap().is_none());
        assert_eq!(request(b"GET / HTTP/1.1\r\n\r\n").unwrap().unwrap().body, Body::Length(0));
    }
}

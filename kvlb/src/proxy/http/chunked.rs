//! The chunked transfer coding: taken apart byte by byte, wherever the pieces are cut.
//!
//! Stricter than most readers on purpose: lines end in CRLF, sizes are plain hexadecimal, extensions hold no control
//! bytes. What two readers could take apart in different ways does not pass.

/// Digits of a chunk's size: more would not fit in 63 bits.
const SIZE_DIGITS_MAX: u8 = 15;
/// Bytes of all extensions of one body: nobody uses them, so this is against their abuse.
const EXTENSIONS_MAX: u32 = 16 << 10;
/// Bytes of the trailer section.
const TRAILERS_MAX: usize = 16 << 10;

/// Ends a body without trailers.
pub(in crate::proxy) const FINAL_CHUNK: &[u8] = b"0\r\n\r\n";

/// Why a body is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::proxy) enum ChunkError {
    #[error("a chunk's size is not a hexadecimal number")]
    Size,
    #[error("a line does not end in CRLF")]
    LineEnd,
    #[error("a chunk extension is too long or holds a control byte")]
    Extension,
    #[error("the trailer section is too long or malformed")]
    Trailer,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Before a chunk's first digit.
    #[default]
    SizeStart,
    Size,
    /// Space behind a size: an extension or the line's end must follow.
    Gap,
    Extension,
    SizeLf,
    Payload,
    PayloadCr,
    PayloadLf,
    /// At the start of a trailer line, or of the empty line that ends the body.
    TrailerStart,
    Trailer,
    TrailerLf,
    LastLf,
    Done,
}

/// What a piece of a chunked body turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) enum Part {
    /// Framing: this many bytes.
    Framing(usize),
    /// Payload: this many bytes.
    Payload(usize),
}

/// Follows one chunked body.
#[derive(Clone, Debug, Default)]
pub(in crate::proxy) struct Chunked {
    state: State,
    left: u64,
    digits: u8,
    extensions: u32,
    trailers: Vec<u8>,
}

impl Chunked {
    /// Whether the whole body has gone by.
    pub(in crate::proxy) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// The trailer fields as they came, each ending in CRLF.
    pub(in crate::proxy) fn trailers(&self) -> &[u8] {
        &self.trailers
    }

    #[cfg(test)]
    fn scan(&mut self, bytes: &[u8]) -> Result<usize, ChunkError> {
        self.scan_showing(&mut bytes.to_vec(), |_payload| ())
    }

    /// Follows `bytes` to the body's end, says how many of them belong to it, and shows their payload to `see`, which may write
    /// other bytes in its place.
    ///
    /// # Errors
    /// When the body is malformed.
    pub(in crate::proxy) fn scan_showing(
        &mut self,
        bytes: &mut [u8],
        mut see: impl FnMut(&mut [u8]),
    ) -> Result<usize, ChunkError> {
        let mut at = 0;
        while at < bytes.len() && !self.is_done() {
            at += match self.step(&bytes[at..])? {
                Part::Framing(count) => count,
                Part::Payload(count) => {
                    see(&mut bytes[at..at + count]);
                    count
                }
            };
        }
        Ok(at)
    }

    /// Moves the payload in `bytes` to their front. Says how many bytes of payload that is, and how many of `bytes`
    /// belonged to the body.
    ///
    /// # Errors
    /// When the body is malformed.
    pub(in crate::proxy) fn decode(&mut self, bytes: &mut [u8]) -> Result<(usize, usize), ChunkError> {
        let (mut at, mut payload) = (0, 0);
        while at < bytes.len() && !self.is_done() {
            match self.step(&bytes[at..])? {
                Part::Framing(count) => at += count,
                Part::Payload(count) => {
                    bytes.copy_within(at..at + count, payload);
                    at += count;
                    payload += count;
                }
            }
        }
        Ok((payload, at))
    }

    /// Takes at least one byte of `bytes`, which must not be empty.
    fn step(&mut self, bytes: &[u8]) -> Result<Part, ChunkError> {
        if self.state == State::Payload {
            let count = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
            self.left -= count as u64;
            if self.left == 0 {
                self.state = State::PayloadCr;
            }
            return Ok(Part::Payload(count));
        }
        if let Some(byte) = bytes.first() {
            self.state = self.next(*byte)?;
        }
        Ok(Part::Framing(1))
    }

    fn next(&mut self, byte: u8) -> Result<State, ChunkError> {
        match (self.state, byte) {
            (State::SizeStart | State::Size, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => self.digit(byte),
            (State::Size | State::Gap | State::Extension, b'\r') => Ok(State::SizeLf),
            (State::Size | State::Gap, b';') => Ok(State::Extension),
            (State::Size | State::Gap, b' ' | b'\t') => self.extension(byte).map(|_extension| State::Gap),
            (State::Extension, _) => self.extension(byte),
            (State::SizeLf, b'\n') if self.left > 0 => Ok(State::Payload),
            (State::SizeLf, b'\n') => Ok(State::TrailerStart),
            (State::PayloadCr, b'\r') => Ok(State::PayloadLf),
            (State::PayloadLf, b'\n') => {
                self.digits = 0;
                Ok(State::SizeStart)
            }
            (State::TrailerStart, b'\r') => Ok(State::LastLf),
            (State::LastLf, b'\n') => self.last(),
            (State::TrailerStart | State::Trailer, _) => self.trailer(byte),
            (State::TrailerLf, b'\n') => {
                self.trailers.push(byte);
                Ok(State::TrailerStart)
            }
            (State::SizeStart | State::Size | State::Gap, _) => Err(ChunkError::Size),
            _ => Err(ChunkError::LineEnd),
        }
    }

    fn digit(&mut self, byte: u8) -> Result<State, ChunkError> {
        let digit = char::from(byte).to_digit(16).ok_or(ChunkError::Size)?;
        self.digits += 1;
        if self.digits > SIZE_DIGITS_MAX {
            return Err(ChunkError::Size);
        }
        self.left = self.left << 4 | u64::from(digit);
        Ok(State::Size)
    }

    fn extension(&mut self, byte: u8) -> Result<State, ChunkError> {
        self.extensions += 1;
        let control = byte < b' ' && byte != b'\t' || byte == 0x7f;
        if control || self.extensions > EXTENSIONS_MAX {
            return Err(ChunkError::Extension);
        }
        Ok(State::Extension)
    }

    fn trailer(&mut self, byte: u8) -> Result<State, ChunkError> {
        self.trailers.push(byte);
        let folded = self.state == State::TrailerStart && (byte == b' ' || byte == b'\t');
        if byte == b'\n' || folded || self.trailers.len() > TRAILERS_MAX {
            return Err(ChunkError::Trailer);
        }
        Ok(if byte == b'\r' { State::TrailerLf } else { State::Trailer })
    }

    fn last(&mut self) -> Result<State, ChunkError> {
        check_trailers(&self.trailers)?;
        Ok(State::Done)
    }
}

/// Trailer fields must be fields, and none that decides framing or routing.
///
/// Source: RFC 9110 §6.5.1.
fn check_trailers(trailers: &[u8]) -> Result<(), ChunkError> {
    const FORBIDDEN: [&str; 5] = ["content-length", "transfer-encoding", "host", "connection", "trailer"];
    if trailers.is_empty() {
        return Ok(());
    }
    let section = [trailers, b"\r\n"].concat();
    let mut storage = [httparse::EMPTY_HEADER; 32];
    match httparse::parse_headers(&section, &mut storage) {
        Ok(httparse::Status::Complete((length, fields)))
            if length == section.len()
                && !fields.iter().any(|field| FORBIDDEN.iter().any(|name| field.name.eq_ignore_ascii_case(name))) =>
        {
            Ok(())
        }
        _ => Err(ChunkError::Trailer),
    }
}

/// The line before a chunk of `length` bytes.
pub(in crate::proxy) fn size_line(length: usize) -> String {
    format!("{length:x}\r\n")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BODY: &[u8] = b"5;a=b\r\nhello\r\n00A\r\n, wonderfu\r\n1 \t; x=\"y\"\r\nl\r\n0\r\nx-sum: 1\r\nx-b:\r\n\r\n";

    #[test]
    fn every_cut_gives_the_same_payload_and_the_same_end() {
        for cut in 0..=BODY.len() {
            let mut chunked = Chunked::default();
            let mut payload = Vec::new();
            for piece in [&BODY[..cut], &BODY[cut..]] {
                let mut piece = piece.to_vec();
                let (count, used) = chunked.decode(&mut piece).unwrap();
                assert_eq!(used, piece.len());
                payload.extend_from_slice(&piece[..count]);
            }
            assert!(chunked.is_done());
            assert_eq!(payload, b"hello, wonderful");
            assert_eq!(chunked.trailers(), b"x-sum: 1\r\nx-b:\r\n");
        }
    }

    #[test]
    fn what_follows_the_body_is_left_alone() {
        let mut chunked = Chunked::default();
        assert_eq!(chunked.scan(b"0\r\n\r\nGET / HTTP/1.1"), Ok(5));
        assert!(chunked.is_done());
        assert_eq!(chunked.scan(b"more"), Ok(0));
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        let cases: [(&[u8], ChunkError); 17] = [
            (b"\r\n", ChunkError::Size),
            (b"g\r\n", ChunkError::Size),
            (b"-1\r\n", ChunkError::Size),
            (b"+1\r\n", ChunkError::Size),
            (b"0x5\r\n", ChunkError::Size),
            (b" 5\r\n", ChunkError::Size),
            (b"5 6\r\n", ChunkError::Size),
            (b"5\n", ChunkError::Size),
            (b"1000000000000000\r\n", ChunkError::Size),
            (b"5\rx", ChunkError::LineEnd),
            (b"5\r\nhelloX", ChunkError::LineEnd),
            (b"5\r\nhello\rX", ChunkError::LineEnd),
            (b"5;a\nb", ChunkError::Extension),
            (b"0\r\n folded: 1\r\n\r\n", ChunkError::Trailer),
            (b"0\r\nno colon\r\n\r\n", ChunkError::Trailer),
            (b"0\r\na: 1\n\r\n", ChunkError::Trailer),
            (b"0\r\nContent-Length: 5\r\n\r\n", ChunkError::Trailer),
        ];
        for (body, error) in cases {
            assert_eq!(Chunked::default().scan(body), Err(error), "{}", body.escape_ascii());
        }
    }

    #[test]
    fn extensions_and_trailers_are_bounded() {
        let mut chunked = Chunked::default();
        chunked.scan(b"5;").unwrap();
        assert_eq!(chunked.scan(&vec![b'x'; EXTENSIONS_MAX as usize + 1]), Err(ChunkError::Extension));
        let mut chunked = Chunked::default();
        chunked.scan(b"0\r\nx: ").unwrap();
        assert_eq!(chunked.scan(&vec![b'x'; TRAILERS_MAX]), Err(ChunkError::Trailer));
    }

    proptest! {
        #[test]
        fn payload_survives_any_chunking_and_any_cutting(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..50), 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut body = Vec::new();
            for chunk in &chunks {
                body.extend_from_slice(size_line(chunk.len()).as_bytes());
                body.extend_from_slice(chunk);
                body.extend_from_slice(b"\r\n");
            }
            body.extend_from_slice(FINAL_CHUNK);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len())).collect();
            cuts.extend([0, body.len()]);
            cuts.sort_unstable();
            let (mut decoder, mut scanner, mut payload) = (Chunked::default(), Chunked::default(), Vec::new());
            for pair in cuts.windows(2) {
                let mut piece = body[pair[0]..pair[1]].to_vec();
                prop_assert_eq!(scanner.scan(&piece).unwrap(), piece.len());
                let (count, used) = decoder.decode(&mut piece).unwrap();
                prop_assert_eq!(used, piece.len());
                payload.extend_from_slice(&piece[..count]);
            }
            prop_assert!(decoder.is_done() && scanner.is_done());
            prop_assert_eq!(payload, chunks.concat());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut piece = bytes.clone();
            let decoded = Chunked::default().decode(&mut piece).map(|(_, used)| used);
            prop_assert_eq!(decoded, Chunked::default().scan(&bytes));
        }
    }
}

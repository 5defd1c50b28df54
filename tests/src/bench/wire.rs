//! What travels: requests, the mock's JSON answer and its SSE events. Both ends make them by the same rule, so that every byte can be
//! checked.

use std::ops::Range;

use nix::time::{ClockId, clock_gettime};
use xxhash_rust::xxh3::xxh3_64;

/// Where an event has its sequence number, in decimal.
pub(super) const EVENT_NUMBER: Range<usize> = 32..40;
/// Where an event has the time at which it was sent, in nanoseconds of the monotonic clock, in decimal.
pub(super) const EVENT_TIME: Range<usize> = 48..67;
/// The bytes of an event; a chunk of vLLM's with a token of text has about as many.
pub(super) const EVENT_BYTES: usize = 220;
/// What ends a stream.
pub(super) const DONE: &[u8] = b"data: [DONE]\n\n";
/// Where a request says which answer it wants, in its field `user`.
const WISH: &[u8] = br#""user":""#;
/// How far from an end of the body.
const NEAR: usize = 1024;

/// Nanoseconds of `CLOCK_MONOTONIC`, which is the same in all processes.
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).map(std::time::Duration::from).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or_default()
}

/// The answer that a request asks the mock for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// JSON of that many bytes.
    Json(usize),
    /// That many events, one each so many beats of the mock.
    Events { count: usize, every: usize },
}

impl Wish {
    /// What a proxy that leaves `user` out gets for `"stream":true`.
    const STREAM: Self = Self::Events { count: 100, every: 1 };

    fn text(self) -> String {
        match self {
            Self::Json(bytes) => format!("n={bytes}"),
            Self::Events { count, every } => format!("k={count},e={every}"),
        }
    }

    /// Reads it from the body of a request.
    pub(super) fn of(body: &[u8]) -> Self {
        // The wish stands near the beginning, or near the end where a router wrote the body anew: a long body need not be searched.
        let ends = [&body[..body.len().min(NEAR)], &body[body.len().saturating_sub(NEAR)..]];
        let Some(wish) = ends.iter().find_map(|part| after(part, WISH)) else {
            let streams = ends.iter().any(|part| after(part, br#""stream":true"#).is_some());
            return if streams { Self::STREAM } else { Self::Json(200) };
        };
        let (mut bytes, mut count, mut every) = (200, None, 1);
        let end = wish.iter().position(|byte| *byte == b'"').unwrap_or_default();
        for word in wish[..end].split(|byte| *byte == b',') {
            let number = number(word.get(2..).unwrap_or_default());
            match word.get(..2) {
                Some(b"n=") => bytes = number,
                Some(b"k=") => count = Some(number),
                Some(b"e=") => every = number.max(1),
                _ => {}
            }
        }
        let [bytes, every] = [bytes, every].map(|number| usize::try_from(number).unwrap_or_default());
        match count {
            Some(count) => Self::Events { count: usize::try_from(count).unwrap_or_default(), every },
            None => Self::Json(bytes),
        }
    }
}

fn after<'a>(text: &'a [u8], word: &[u8]) -> Option<&'a [u8]> {
    let at = text.windows(word.len()).position(|window| window == word)?;
    text.get(at + word.len()..)
}

/// One request, ready to be sent, and what its answer must echo.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) bytes: Vec<u8>,
    /// XXH3 of the body in hexadecimal.
    pub(super) hash: String,
}

impl Request {
    /// A chat completion of `size` bytes of body.
    pub(super) fn chat(port: u16, size: usize, wish: Wish) -> Self {
        let stream = matches!(wish, Wish::Events { .. });
        let wish = wish.text();
        let head =
            format!(r#"{{"model":"m","user":"{wish}","stream":{stream},"messages":[{{"role":"user","content":""#);
        Self::with_body(port, "/v1/chat/completions", "", &padded(head, r#""}]}"#, size))
    }

    /// A completion of `size` bytes of body; prompts of different `number` share no block.
    pub(super) fn completion(port: u16, size: usize, model: &str, number: usize) -> Self {
        let head = format!(r#"{{"model":"{model}","max_tokens":1,"prompt":"{number} "#);
        let id = format!("x-request-id: bench-{number}\r\n");
        Self::with_body(port, "/v1/completions", &id, &padded(head, r#""}"#, size))
    }

    /// Its path.
    pub(super) fn path(&self) -> &str {
        self.text().split(' ').nth(1).unwrap_or("/")
    }

    /// Its body.
    pub(super) fn body(&self) -> &str {
        self.text().split_once("\r\n\r\n").map_or("", |(_head, body)| body)
    }

    fn text(&self) -> &str {
        // Both are made of text.
        std::str::from_utf8(&self.bytes).unwrap_or_default()
    }

    fn with_body(port: u16, path: &str, fields: &str, body: &[u8]) -> Self {
        let mut bytes = format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n\
             authorization: Bearer sk-test\r\nuser-agent: bench\r\naccept: */*\r\n{fields}content-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        bytes.extend_from_slice(body);
        Self { bytes, hash: format!("{:016x}", xxh3_64(body)) }
    }
}

/// `head`, words of a text, and `tail`: `size` bytes together, or a few more where these two are longer.
fn padded(head: String, tail: &str, size: usize) -> Vec<u8> {
    const WORDS: [&str; 8] = ["the ", "prefix ", "cache ", "holds ", "blocks ", "of ", "many ", r"prompts\n "];
    let mut body = head;
    let mut word = 0_usize;
    while body.len() + tail.len() + 10 < size {
        body.push_str(WORDS[word % 8]);
        word = (word * 5 + 3) % 8191;
    }
    while body.len() + tail.len() < size {
        body.push('x');
    }
    body.push_str(tail);
    body.into_bytes()
}

/// The mock's JSON answer of `size` bytes, or of its least size.
pub(super) fn json_answer(size: usize) -> Vec<u8> {
    let head = r#"{"id":"chatcmpl-0","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":""#;
    let tail = r#""},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}"#;
    padded(head.to_owned(), tail, size)
}

/// One event with nothing in its two places.
pub(super) fn event() -> Vec<u8> {
    let head = format!(
        r#"data: {{"id":"chatcmpl-0","seq":"{:08}","ts":"{:019}","object":"chat.completion.chunk","choices":[{{"index":0,"delta":{{"content":""#,
        0, 0
    );
    padded(head, "\"}}]}\n\n", EVENT_BYTES)
}

/// Writes `number` in decimal over all of `place`.
pub(super) fn put(place: &mut [u8], number: u64) {
    let mut rest = number;
    for digit in place.iter_mut().rev() {
        *digit = b"0123456789"[usize::try_from(rest % 10).unwrap_or_default()];
        rest /= 10;
    }
}

/// The number that these digits are.
pub(super) fn number(digits: &[u8]) -> u64 {
    digits
        .iter()
        .fold(0, |number: u64, digit| number.wrapping_mul(10).wrapping_add(u64::from(digit.wrapping_sub(b'0'))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(request: &Request) -> &[u8] {
        request.body().as_bytes()
    }

    #[test]
    fn the_mock_reads_the_wish_that_the_request_has() {
        for wish in [Wish::Json(65536), Wish::Events { count: 7, every: 10 }] {
            assert_eq!(Wish::of(body(&Request::chat(1, 2048, wish))), wish);
        }
        assert_eq!(Wish::of(br#"{"model":"m","stream":true}"#), Wish::STREAM);
        let rewritten = format!(r#"{{"messages":"{}","user":"n=7"}}"#, "x".repeat(3000));
        assert_eq!(Wish::of(rewritten.as_bytes()), Wish::Json(7));
    }

    #[test]
    fn bodies_have_the_size_asked_for_and_are_json() {
        for size in [400, 2048, 65536] {
            let request = Request::chat(1, size, Wish::Json(200));
            assert_eq!(body(&request).len(), size);
            serde_json::from_slice::<serde_json::Value>(body(&request)).unwrap();
            assert_eq!(json_answer(size).len(), size);
            serde_json::from_slice::<serde_json::Value>(&json_answer(size)).unwrap();
        }
        serde_json::from_slice::<serde_json::Value>(body(&Request::completion(1, 2048, "m", 3))).unwrap();
    }

    #[test]
    fn an_event_carries_its_number_and_time() {
        let mut event = event();
        assert_eq!(event.len(), EVENT_BYTES);
        put(&mut event[EVENT_NUMBER], 42);
        put(&mut event[EVENT_TIME], 1_234_567_890_123);
        let json: serde_json::Value = serde_json::from_slice(event.strip_prefix(b"data: ").unwrap()).unwrap();
        assert_eq!((&json["seq"], &json["ts"]), (&"00000042".into(), &"0000001234567890123".into()));
        assert_eq!(number(&event[EVENT_TIME]), 1_234_567_890_123);
    }
}

//! What an answer says of its prompt: how many tokens it had, and how many of them came from the engine's cache.
//!
//! A [`Tail`] keeps the last bytes of an answer while they go by; nothing is held back for it. At the end the `usage`
//! object is looked for in what was kept. Such a tail begins anywhere, also within a string that a model wrote, and a
//! model can write anything. So it is read backwards: the last byte of a JSON document, or of a line of an event stream,
//! is outside of every string, and from there each quote can be told for what it is. What is not certain is not said.

use serde::Deserialize;

use super::http::Medium;
use crate::openai::{Backwards, Token};

/// Bytes kept of an answer's end. The largest seen usage (of `/v1/responses`) begins 700 bytes before it.
const TAIL: usize = 4 << 10;
/// Bytes kept of the beginning of an event stream: `/v1/messages` says there what it need not repeat.
const FRONT: usize = 1 << 10;

/// What an engine says of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// How many of them it did not compute anew; `None` where it does not report that.
    pub cached_tokens: Option<u64>,
    /// Tokens of the answer, where it says so.
    pub output_tokens: Option<u64>,
}

/// The end of an answer's body, as it was before framing.
#[derive(Debug)]
pub(super) struct Tail {
    medium: Medium,
    /// The beginning, once it has left the ring.
    front: Vec<u8>,
    /// The last bytes; the oldest is at `oldest` once there were more than fit.
    ring: Vec<u8>,
    oldest: usize,
    /// The body is longer than the ring.
    cut: bool,
}

impl Tail {
    pub(super) fn new(medium: Medium) -> Self {
        Self { medium, front: Vec::new(), ring: Vec::new(), oldest: 0, cut: false }
    }

    /// Looks at the next bytes of the body.
    pub(super) fn take(&mut self, bytes: &[u8]) {
        let room = TAIL - self.ring.len();
        let (fits, more) = bytes.split_at(room.min(bytes.len()));
        self.ring.extend_from_slice(fits);
        if more.is_empty() {
            return;
        }
        if !self.cut {
            self.cut = true;
            if self.medium == Medium::Events {
                self.front = self.ring[..FRONT].to_vec();
            }
        }
        let last = &more[more.len().saturating_sub(TAIL)..];
        let (back, front) = last.split_at(last.len().min(TAIL - self.oldest));
        self.ring[self.oldest..self.oldest + back.len()].copy_from_slice(back);
        self.ring[..front.len()].copy_from_slice(front);
        self.oldest = (self.oldest + last.len()) % TAIL;
    }

    /// Whether it is a stream of events that has told its end, whatever its framing still brings.
    pub(super) fn is_done(&mut self) -> bool {
        self.ring.rotate_left(std::mem::take(&mut self.oldest));
        let last = || lines(&self.ring, self.cut).map(<[u8]>::trim_ascii).find(|line| !line.is_empty());
        self.medium == Medium::Events && self.ring.ends_with(b"\n") && last() == Some(b"[DONE]")
    }

    /// What the whole body says.
    pub(super) fn usage(mut self) -> Option<Usage> {
        self.ring.rotate_left(self.oldest);
        match self.medium {
            Medium::Json => find(&self.ring).filter(|found| found.of == Owner::Outermost)?.said.usage(),
            Medium::Events => self.last_event()?.usage(),
        }
    }

    /// What the last event with a word about it says. One of `/v1/messages` counts on from the stream's first event.
    fn last_event(&self) -> Option<Said> {
        let found = lines(&self.ring, self.cut).find_map(find)?;
        let beginning = if self.cut { &self.front } else { &self.ring };
        let first = || lines(beginning, false).filter_map(find).find(|found| found.of == Owner::Message);
        Some(if found.of == Owner::Outermost && found.said.may_count_on() {
            found.said.or(first().map(|first| first.said).unwrap_or_default())
        } else {
            found.said
        })
    }
}

/// The data of each line, the last one first. Where the beginning was `cut` off, the first line may lack its own.
fn lines(stream: &[u8], cut: bool) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(stream);
    std::iter::from_fn(move || {
        let stream = rest?;
        let start = stream.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
        rest = start.checked_sub(1).map(|newline| &stream[..newline]);
        let line = &stream[start..];
        let is_cut = cut && start == 0;
        Some(if is_cut { line } else { line.strip_prefix(b"data:").unwrap_or_default() })
    })
}

/// A `usage` object, in the words of all APIs. What is of the wrong type makes it none at all.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
struct Said {
    /// `/v1/completions`, `/v1/chat/completions`: all of the prompt.
    prompt_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    /// `/v1/responses`: all of the prompt. `/v1/messages`: what was neither read from the cache nor written to it.
    input_tokens: Option<u64>,
    input_tokens_details: Option<Details>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
    /// Of the answer, in the words of the older APIs.
    completion_tokens: Option<u64>,
    /// Of the answer, in those of the others.
    output_tokens: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
struct Details {
    cached_tokens: Option<u64>,
}

impl Said {
    fn usage(self) -> Option<Usage> {
        let output_tokens = self.completion_tokens.or(self.output_tokens);
        if let Some(prompt_tokens) = self.prompt_tokens {
            let cached_tokens = self.prompt_tokens_details.and_then(|details| details.cached_tokens);
            return Some(Usage { prompt_tokens, cached_tokens, output_tokens });
        }
        let input = self.input_tokens?;
        if let Some(details) = self.input_tokens_details {
            return Some(Usage { prompt_tokens: input, cached_tokens: details.cached_tokens, output_tokens });
        }
        let (read, created) = (self.cache_read_input_tokens, self.cache_creation_input_tokens.unwrap_or_default());
        let prompt_tokens = input.saturating_add(read.unwrap_or_default()).saturating_add(created);
        Some(Usage { prompt_tokens, cached_tokens: read, output_tokens })
    }

    /// Whether it can be one of `/v1/messages` that leaves something to the first event.
    fn may_count_on(&self) -> bool {
        self.prompt_tokens.is_none()
            && self.input_tokens_details.is_none()
            && (self.input_tokens.is_none() || self.cache_read_input_tokens.is_none())
    }

    fn or(self, first: Self) -> Self {
        Self {
            input_tokens: self.input_tokens.or(first.input_tokens),
            cache_read_input_tokens: self.cache_read_input_tokens.or(first.cache_read_input_tokens),
            cache_creation_input_tokens: self.cache_creation_input_tokens.or(first.cache_creation_input_tokens),
            ..self
        }
    }
}

/// Where a `usage` was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// It is a member of the outermost object.
    Outermost,
    /// Of its `message`: the first event of `/v1/messages`.
    Message,
    /// Of its `response`: the last event of `/v1/responses`.
    Response,
}

#[derive(Clone, Copy, Debug)]
struct Found {
    of: Owner,
    said: Said,
}

/// The usage of the JSON object that `text` ends with; its beginning may be missing.
fn find(text: &[u8]) -> Option<Found> {
    let text = text.trim_ascii_end();
    if text.last() != Some(&b'}') {
        return None;
    }
    let mut tokens = Backwards::new(text);
    // Where the member under way ends, for the outermost object and those within it.
    let (mut depth, mut ends) = (0, [0; 3]);
    let (mut inner, mut completes) = (None, false);
    while let Some(token) = tokens.next() {
        match token {
            Token::Close => depth += 1,
            Token::Open if depth == 1 => return None,
            Token::Open => depth -= 1,
            Token::Colon if depth < ends.len() => {
                let value = &text[tokens.at() + 1..ends[depth]];
                let Some(Token::Text(key)) = tokens.next() else { break };
                match (depth, key) {
                    (1, b"usage") if is_object(value) => return found(Owner::Outermost, value),
                    (1, b"type") => completes = completes_a_response(value),
                    (1, b"message") if inner.is_some() => return found(Owner::Message, inner?),
                    (1, b"response") if inner.is_some() => return found(Owner::Response, inner?),
                    // The one within belongs to something else.
                    (1, _) => inner = None,
                    (2, b"usage") if is_object(value) => inner = Some(value),
                    _ => {}
                }
            }
            Token::Comma | Token::Colon | Token::Text(_) | Token::Plain => {}
        }
        if let (Token::Close | Token::Comma, Some(end)) = (token, ends.get_mut(depth)) {
            *end = tokens.at();
        }
    }
    // The name of what holds it is cut off, but such an event holds nothing else that could.
    if completes { found(Owner::Response, inner?) } else { None }
}

fn found(of: Owner, value: &[u8]) -> Option<Found> {
    serde_json::from_slice(value).ok().map(|said| Found { of, said })
}

fn is_object(value: &[u8]) -> bool {
    value.trim_ascii_start().starts_with(b"{")
}

fn completes_a_response(kind: &[u8]) -> bool {
    matches!(kind.trim_ascii(), br#""response.completed""# | br#""response.incomplete""#)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Recorded from vLLM 0.32.0, but for the text.
    const COMPLETION: &str = r#"{"id":"cmpl-80a9","object":"text_completion","created":1795982478,"model":"tiny","choices":[{"index":0,"text":"TEXT","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0","usage":{"prompt_tokens":41,"total_tokens":47,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":32,"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null},"kv_transfer_params":null,"metrics":null}"#;
    const CHAT_STREAM: &str = concat!(
        r#"data: {"id":"chatcmpl-8186","object":"chat.completion.chunk","model":"tiny","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":{"prompt_tokens":19,"total_tokens":19,"completion_tokens":0}}"#,
        "\n\n",
        r#"data: {"id":"chatcmpl-8186","object":"chat.completion.chunk","model":"tiny","choices":[{"index":0,"delta":{"content":"TEXT"},"finish_reason":"length"}],"usage":{"prompt_tokens":19,"total_tokens":25,"completion_tokens":6}}"#,
        "\n\n",
        r#"data: {"id":"chatcmpl-8186","object":"chat.completion.chunk","model":"tiny","choices":[],"usage":{"prompt_tokens":19,"total_tokens":25,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":16,"created_cache_tokens":0}},"system_fingerprint":"vllm-0.32.0"}"#,
        "\n\ndata: [DONE]\n\n",
    );
    const RESPONSE: &str = r#"{"id":"resp_ac26","object":"response","output":[{"id":"msg_9b64","content":[{"annotations":[],"text":"TEXT","type":"output_text"}],"role":"assistant","type":"message"}],"metadata":{"usage":"{}"},"usage":{"input_tokens":18,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":16,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]},"output_tokens":16,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":34},"user":null,"output_messages":null}"#;
    const MESSAGE: &str = r#"{"id":"chatcmpl-b3da","type":"message","role":"assistant","content":[{"type":"text","text":"TEXT"}],"model":"tiny","stop_reason":"max_tokens","usage":{"input_tokens":3,"output_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":16}}"#;
    const MESSAGE_STREAM: &str = concat!(
        "event: message_start\n",
        r#"data: {"type":"message_start","message":{"id":"chatcmpl-8ddf","content":[],"usage":{"input_tokens":10,"cache_read_input_tokens":32,"output_tokens":0}}}"#,
        "\n\nevent: content_block_delta\n",
        r#"data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"TEXT"},"index":0}"#,
        "\n\nevent: message_delta\n",
        r#"data: {"type":"message_delta","delta":{"stop_reason":"max_tokens"},"usage":{"output_tokens":6}}"#,
        "\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    );
    /// Recorded from llama.cpp: something follows the usage.
    const LLAMACPP: &str = r#"{"choices":[{"text":"TEXT","index":0}],"object":"text_completion","usage":{"completion_tokens":2,"prompt_tokens":800,"total_tokens":802,"prompt_tokens_details":{"cached_tokens":799}},"id":"chatcmpl-X","timings":{"cache_n":799,"prompt_n":1,"prompt_per_second":1.5e-3}}"#;

    #[expect(clippy::unnecessary_wraps, reason = "it is compared with what may be absent")]
    fn usage(prompt_tokens: u64, cached_tokens: impl Into<Option<u64>>) -> Option<Usage> {
        Some(Usage { prompt_tokens, cached_tokens: cached_tokens.into(), output_tokens: None })
    }

    fn response_stream(text: &str) -> String {
        let response = RESPONSE.replace("TEXT", text);
        format!(
            "event: response.created\ndata: {{\"response\":{{\"usage\":null}},\"type\":\"response.created\"}}\n\nevent: \
             response.completed\ndata: {{\"response\":{response},\"sequence_number\":22,\"type\":\"response.completed\"}}\
             \n\n"
        )
    }

    fn answers(text: &str) -> Vec<(Medium, String, Option<Usage>)> {
        let fill = |template: &str| template.replace("TEXT", text);
        let stream = |line: &str| format!("data: {}\r\n\r\ndata: [DONE]\r\n\r\n", fill(line));
        vec![
            (Medium::Json, fill(COMPLETION), usage(41, 32)),
            (Medium::Events, fill(CHAT_STREAM), usage(19, 16)),
            (Medium::Json, fill(RESPONSE), usage(18, 0)),
            (Medium::Events, response_stream(text), usage(18, 0)),
            (Medium::Json, fill(MESSAGE) + "\n", usage(19, 16)),
            (Medium::Events, fill(MESSAGE_STREAM), usage(42, 32)),
            (Medium::Json, fill(LLAMACPP), usage(800, 799)),
            (Medium::Events, stream(LLAMACPP), usage(800, 799)),
        ]
    }

    fn read(medium: Medium, body: &[u8]) -> Option<Usage> {
        let mut tail = Tail::new(medium);
        tail.take(body);
        // What they say of the answer has a test of its own.
        tail.usage().map(|usage| Usage { output_tokens: None, ..usage })
    }

    #[test]
    fn each_api_tells_how_long_the_answer_is() {
        let expected = [6, 6, 16, 16, 6, 6, 2, 2];
        for ((medium, body, _), expected) in answers("text").into_iter().zip(expected) {
            let mut tail = Tail::new(medium);
            tail.take(body.as_bytes());
            assert_eq!(tail.usage().and_then(|usage| usage.output_tokens), Some(expected), "{body:.100}");
        }
    }

    #[test]
    fn each_api_says_it_in_its_own_words_whatever_the_length_of_the_text() {
        // What is kept begins in each place of what stands around the text.
        for length in (0..TAIL + 100).chain([100_000]) {
            for (medium, body, expected) in answers(&"y".repeat(length)) {
                assert_eq!(read(medium, body.as_bytes()), expected, "{length} letters in {medium:?} {body:.100}");
            }
        }
    }

    #[test]
    fn what_an_engine_does_not_say_is_not_known() {
        let cases = [
            (r#"{"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}"#, usage(7, None)),
            (r#"{"usage":{"prompt_tokens":7,"prompt_tokens_details":{}}}"#, usage(7, None)),
            (r#"{"usage":{"input_tokens":7,"output_tokens":1}}"#, usage(7, None)),
            (r#"{"usage":{"prompt_tokens":"7"}}"#, None),
            (r#"{"usage":{"prompt_tokens":-7}}"#, None),
            (r#"{"usage":{"total_tokens":7}}"#, None),
            (r#"{"usage":null}"#, None),
            (r#"{"usage":[{"prompt_tokens":7}]}"#, None),
            (r#"{"message":{"usage":{"prompt_tokens":7}}}"#, None),
            (r#"{"choices":[{"usage":{"prompt_tokens":7}}]}"#, None),
            (r#","usage":{"prompt_tokens":7}}"#, usage(7, None)),
            (r#""usage":{"prompt_tokens":7}}"#, None),
            (r#"\\"usage":{"prompt_tokens":7}}"#, None),
            (r#"{"usage":{"prompt_tokens":7}"#, None),
            (r#"{"usage":{"prompt_tokens":7}} ]"#, None),
            ("", None),
            ("}", None),
            ("{}", None),
        ];
        for (body, expected) in cases {
            assert_eq!(read(Medium::Json, body.as_bytes()), expected, "{body}");
        }
        assert_eq!(read(Medium::Events, b"data: [DONE]\n\n"), None);
        assert_eq!(read(Medium::Events, b": {\"usage\":{\"prompt_tokens\":7}}\n\n"), None, "a comment");
        let other = br#"data: {"item":{"usage":{"input_tokens":7}},"type":"response.completed"}"#;
        assert_eq!(read(Medium::Events, other), None, "another object within the event");
    }

    #[test]
    fn a_stream_of_messages_may_repeat_what_its_first_event_said_or_not() {
        let said = r#"{"output_tokens":6,"input_tokens":4,"cache_read_input_tokens":0}"#;
        let stream = MESSAGE_STREAM.replace(r#"{"output_tokens":6}"#, said);
        assert_eq!(read(Medium::Events, stream.as_bytes()), usage(4, 0));
        // Nothing but the first event's own end bounds it: a beginning that is longer than what is kept says nothing.
        let long = MESSAGE_STREAM.replace("chatcmpl-8ddf", &"x".repeat(FRONT)).replace("TEXT", &"x".repeat(2 * TAIL));
        assert_eq!(read(Medium::Events, long.as_bytes()), None);
    }

    #[test]
    fn a_usage_that_does_not_fit_is_not_known() {
        let body = COMPLETION.replace(r#""metrics":null"#, &format!(r#""metrics":"{}""#, "x".repeat(TAIL)));
        assert_eq!(read(Medium::Json, body.as_bytes()), None);
    }

    /// Text that would be a usage if a quote were taken for what it is not.
    fn tricks() -> impl Strategy<Value = String> {
        let parts = [
            "\"",
            "\\",
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "usage",
            "\"usage\":{\"prompt_tokens\":1}",
            "\\\"",
            "\n\ndata: ",
            "é",
            "{\"usage\":{\"prompt_tokens\":1,\"input_tokens\":1}}\n\n",
            "response.completed",
            "type",
            " ",
        ];
        prop::collection::vec(prop::sample::select(parts.to_vec()), 0..40).prop_map(|parts| parts.concat())
    }

    fn escaped(text: &str) -> String {
        serde_json::to_string(text).unwrap().trim_start_matches('"').strip_suffix('"').unwrap_or_default().to_owned()
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            which in 0..8_usize,
            length in 0..9000_usize,
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let (medium, body, expected) = answers(&"y".repeat(length)).swap_remove(which);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len())).collect();
            cuts.extend([0, body.len()]);
            cuts.sort_unstable();
            let mut tail = Tail::new(medium);
            cuts.windows(2).for_each(|pair| tail.take(&body.as_bytes()[pair[0]..pair[1]]));
            prop_assert_eq!(tail.usage().map(|usage| Usage { output_tokens: None, ..usage }), expected);
        }

        #[test]
        fn no_text_passes_for_a_usage(tricks in tricks(), front in 0..200_usize, which in 0..8_usize) {
            // The text reaches over the beginning of what is kept.
            let text = format!("{}{}", escaped(&tricks).repeat(front), escaped(&tricks));
            let (medium, body, expected) = answers(&text).swap_remove(which);
            prop_assert_eq!(read(medium, body.as_bytes()), expected);
            // Without the engine's own word there is none.
            let body = body.replace("\"usage\":", "\"other\":");
            prop_assert_eq!(read(medium, body.as_bytes()), None);
        }

        #[test]
        fn text_behind_the_usage_hides_it_or_does_not(tricks in tricks(), times in 0..400_usize) {
            let member = format!(r#""metrics":"{}""#, escaped(&tricks).repeat(times));
            let body = COMPLETION.replace(r#""metrics":null"#, &member);
            let said = read(Medium::Json, body.as_bytes());
            prop_assert!(said.is_none() || said == usage(41, 32), "{:?}", said);
            prop_assert!(said.is_some() || member.len() > TAIL - 300);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), tricks in tricks()) {
            for medium in [Medium::Json, Medium::Events] {
                read(medium, &bytes);
                read(medium, format!("{tricks}}}").as_bytes());
            }
        }
    }
}

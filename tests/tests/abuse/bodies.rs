//! Request bodies that no well-meaning client sends: they reach the engine byte for byte.

use std::fmt::Write as _;

use kvlb_tests::harness::http::{Answer, Client};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::stage::{MODEL, Stage, completion, exchange, post};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

struct Case {
    name: String,
    path: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

fn case(name: &str, path: &'static str, body: impl Into<Vec<u8>>) -> Case {
    Case { name: name.to_owned(), path, headers: Vec::new(), body: body.into() }
}

fn with(mut case: Case, name: &'static str, value: &str) -> Case {
    case.headers.push((name, value.to_owned()));
    case
}

fn prompt(text: &str) -> String {
    json!({"model": MODEL, "prompt": text, "max_tokens": 1}).to_string()
}

fn field(json: &str) -> String {
    format!(r#"{{"model": "{MODEL}", "max_tokens": 1, {json}}}"#)
}

/// A body of some size with a short prompt.
fn padded(bytes: usize) -> String {
    field(&format!(r#""prompt": "a", "x": "{}""#, "x".repeat(bytes)))
}

/// Bodies of every kind of oddness.
#[expect(clippy::too_many_lines, reason = "a table")]
fn cases() -> Vec<Case> {
    let deep = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
    let mut cases = vec![
        case("plain", COMPLETIONS, prompt("hello")),
        case("odd spacing", COMPLETIONS, format!(" \t\r\n{{ \"model\"\n:\t\"{MODEL}\" , \"prompt\" : \"a\" }} \n")),
        case("duplicate keys", COMPLETIONS, field(r#""prompt": "a", "prompt": "b", "model": "tiny""#)),
        case("escaped keys", COMPLETIONS, field(r#""pro\u006dpt": "a", "\u0000": 1"#)),
        case("unknown fields", COMPLETIONS, field(r#""prompt": "a", "x_unknown": {"a": [1, null]}"#)),
        case("lone high surrogate", COMPLETIONS, field(r#""prompt": "a\ud800b""#)),
        case("lone low surrogate", COMPLETIONS, field(r#""prompt": "\udc00""#)),
        case("surrogate in the model", COMPLETIONS, br#"{"model": "\ud800", "prompt": "a"}"#.to_vec()),
        case("swapped surrogates", CHAT, field(r#""messages": [{"role": "user", "content": "\udc00\ud800"}]"#)),
        case("invalid UTF-8", COMPLETIONS, [&b"{\"model\": \"tiny\", \"prompt\": \"\xff\xfe\xc0\x80\"}"[..]].concat()),
        case("overlong UTF-8", COMPLETIONS, [&b"{\"model\": \"tiny\", \"prompt\": \"\xe0\x80\xaf\"}"[..]].concat()),
        case(
            "UTF-16",
            COMPLETIONS,
            "{\"model\": \"tiny\"}".encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>(),
        ),
        case("byte order mark", COMPLETIONS, [&b"\xef\xbb\xbf"[..], prompt("a").as_bytes()].concat()),
        case("1e400", COMPLETIONS, field(r#""prompt": "a", "temperature": 1e400"#)),
        case("1e400 as max_tokens", COMPLETIONS, br#"{"model": "tiny", "prompt": "a", "max_tokens": 1e400}"#.to_vec()),
        case("NaN and Infinity", COMPLETIONS, field(r#""prompt": "a", "temperature": NaN, "top_p": -Infinity"#)),
        case("n of 2^63", COMPLETIONS, field(r#""prompt": "a", "n": 9223372036854775808"#)),
        case("n negative", COMPLETIONS, field(r#""prompt": "a", "n": -1"#)),
        case("n of 4 billion", COMPLETIONS, field(r#""prompt": "a", "n": 4294967295"#)),
        case(
            "a number of 100,000 digits",
            COMPLETIONS,
            field(&format!(r#""prompt": "a", "seed": {}"#, "9".repeat(100_000))),
        ),
        case(
            "100,000 deep in an unknown field",
            COMPLETIONS,
            field(&format!(r#""prompt": "a", "x": {}"#, deep(100_000))),
        ),
        case("100,000 deep as prompt", COMPLETIONS, field(&format!(r#""prompt": {}"#, deep(100_000)))),
        case("100,000 deep and unclosed", COMPLETIONS, "[".repeat(100_000)),
        case(
            "100,000 nested objects",
            CHAT,
            field(&format!(r#""messages": {}1{}"#, r#"{"a":"#.repeat(100_000), "}".repeat(100_000))),
        ),
        case(
            "deep template arguments",
            CHAT,
            field(&format!(
                r#""messages": [{{"role": "user", "content": "a"}}], "chat_template_kwargs": {{"x": {}}}"#,
                deep(50_000)
            )),
        ),
        case(
            "a loop as a request's template",
            CHAT,
            field(
                r#""messages": [{"role": "user", "content": "a"}], "chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}""#,
            ),
        ),
        case("empty object", COMPLETIONS, "{}"),
        case("list", COMPLETIONS, "[1]"),
        case("text", COMPLETIONS, "\"text\""),
        case("null", COMPLETIONS, "null"),
        case("NUL bytes", COMPLETIONS, vec![0; 1000]),
        case("two documents", COMPLETIONS, format!("{}{}", prompt("a"), prompt("b"))),
        case("cut short", COMPLETIONS, &prompt("a").as_bytes()[..20]),
        case("form", COMPLETIONS, "model=tiny&prompt=a"),
        with(case("text/plain", COMPLETIONS, prompt("a")), "Content-Type", "text/plain"),
        with(case("claims gzip", COMPLETIONS, prompt("a")), "Content-Encoding", "gzip"),
        case("prompt null", COMPLETIONS, field(r#""prompt": null"#)),
        case("prompt number", COMPLETIONS, field(r#""prompt": 7"#)),
        case("prompt empty", COMPLETIONS, field(r#""prompt": """#)),
        case("prompt empty list", COMPLETIONS, field(r#""prompt": []"#)),
        case("prompt list of an empty list", COMPLETIONS, field(r#""prompt": [[]]"#)),
        case("mixed prompt list", COMPLETIONS, field(r#""prompt": ["a", [1], 2, null]"#)),
        case(
            "token ids out of range",
            COMPLETIONS,
            field(r#""prompt": [4294967295, 4294967296, 18446744073709551616]"#),
        ),
        case("token ids of no token", COMPLETIONS, field(r#""prompt": [4000000000, 4000000000]"#)),
        case("negative token ids", COMPLETIONS, field(r#""prompt": [-1, 1]"#)),
        case("float token ids", COMPLETIONS, field(r#""prompt": [1.5, 2.0, 1e400]"#)),
        case(
            "truncation to minus a million",
            COMPLETIONS,
            field(r#""prompt": "a b c", "truncate_prompt_tokens": -1000000"#),
        ),
        case(
            "truncation to 2^63",
            COMPLETIONS,
            field(r#""prompt": "a b c", "truncate_prompt_tokens": 9223372036854775808"#),
        ),
        case(
            "truncation to 1",
            COMPLETIONS,
            field(r#""prompt": "a b c", "truncate_prompt_tokens": 1, "truncation_side": "left""#),
        ),
        case("messages of odd shapes", CHAT, field(r#""messages": [7, null, [], {"role": 1}, {"content": {}}]"#)),
        case("messages empty", CHAT, field(r#""messages": []"#)),
        case("message without content", CHAT, field(r#""messages": [{"role": "user"}]"#)),
        case(
            "tool without parameters",
            CHAT,
            field(
                r#""messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}]"#,
            ),
        ),
        case("control characters in text", COMPLETIONS, field(r#""prompt": "\u0000\u0001\u001b[2J\u202e""#)),
        case("raw control characters", COMPLETIONS, field("\"prompt\": \"\u{1}\u{1b}[2J\"")),
        case("model with dots and slashes", COMPLETIONS, br#"{"model": "../../etc/passwd", "prompt": "a"}"#.to_vec()),
        case("model with NUL", COMPLETIONS, br#"{"model": "a\u0000b", "prompt": "a"}"#.to_vec()),
        case("model of 10 KB", COMPLETIONS, json!({"model": "m".repeat(10_000), "prompt": "a"}).to_string()),
        case("model empty", COMPLETIONS, br#"{"model": "", "prompt": "a"}"#.to_vec()),
        case("model a list", COMPLETIONS, br#"{"model": ["tiny"], "prompt": "a"}"#.to_vec()),
        with(case("X-Model of dots", COMPLETIONS, prompt("a")), "X-Model", "../../../../etc"),
        with(case("X-Model of 8 KB", COMPLETIONS, prompt("a")), "X-Model", &"x".repeat(8000)),
        with(case("X-Model with marks", COMPLETIONS, prompt("a")), "X-Model", "{}\"'%00%n\\;é"),
        with(case("X-Model empty", COMPLETIONS, prompt("a")), "X-Model", "  "),
        case(
            "1000 prompts",
            COMPLETIONS,
            json!({"model": MODEL, "max_tokens": 1,
            "prompt": (0..1000).map(|n| format!("prompt {n}")).collect::<Vec<_>>()})
            .to_string(),
        ),
        case("1 million characters", COMPLETIONS, prompt(&"word ".repeat(200_000))),
        case("1 million characters of one word", COMPLETIONS, prompt(&"a".repeat(1_000_000))),
        case("1 million spaces", COMPLETIONS, prompt(&" ".repeat(1_000_000))),
        case("1 million of e with accent", COMPLETIONS, prompt(&"é".repeat(500_000))),
        case("100,000 token ids", COMPLETIONS, json!({"model": MODEL, "prompt": vec![1; 100_000]}).to_string()),
        case(
            "10,000 messages",
            CHAT,
            json!({"model": MODEL, "max_tokens": 1,
            "messages": vec![json!({"role": "user", "content": "hi"}); 10_000]})
            .to_string(),
        ),
        case("10 MB", COMPLETIONS, padded(10 << 20)),
        case("messages elsewhere", "/v1/messages", field(r#""messages": [{"role": "user", "content": "a"}]"#)),
        case(
            "chat with unknown fields",
            CHAT,
            field(
                r#""messages": [{"role": "user", "content": "a", "x": 1}], "x_unknown": [], "return_token_ids": true"#,
            ),
        ),
        case("max_tokens as text", COMPLETIONS, field(r#""prompt": "a", "max_tokens": "1""#)),
        case("two prompts, each answered twice", COMPLETIONS, field(r#""prompt": ["a", "b"], "n": 2"#)),
        case("two lists of token ids", COMPLETIONS, field(r#""prompt": [[1, 2, 3], [4, 5]]"#)),
        case("a path that ends in a slash", "/v1/completions/", field(r#""prompt": "a""#)),
        case("tokenize", "/tokenize", field(r#""prompt": "a""#)),
        case("responses", "/v1/responses", field(r#""input": "a""#)),
        case("an unknown path", "/v1/unknown/%00/../x?y=%ff&&", field(r#""prompt": "a""#)),
    ];
    // A text cut at any byte would be cut inside a letter.
    for letters in [1, 15, 16, 17, 31, 32, 33, 127, 255, 300] {
        cases.push(case(&format!("{letters} accents"), COMPLETIONS, prompt(&"é".repeat(letters))));
        cases.push(case(&format!("{letters} emoji"), COMPLETIONS, prompt(&"👩‍🚀".repeat(letters))));
    }
    cases
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").unwrap();
        hex
    })
}

/// The engine has seen exactly this body under this request id, and its answer came through.
fn assert_passed(stage: &Stage, name: &str, id: &str, body: &[u8], answer: &Answer) {
    let requests = stage.engines[0].requests();
    let seen: Vec<_> = requests.iter().filter(|seen| seen.header("x-request-id") == Some(id)).collect();
    assert_eq!(seen.len(), 1, "{name}: once, and not {} times: {}", seen.len(), answer.body.text());
    assert_eq!((seen[0].body_bytes, seen[0].body_sha256.as_str()), (body.len(), sha256(body).as_str()), "{name}");
    assert_eq!((answer.engine(), Some(answer.head.status)), ("engine-0", seen[0].status), "{name}");
    assert_eq!(answer.head.header("x-kvlb-error"), None, "{name}");
}

async fn send_all(stage: &Stage, label: &str, longest: usize) {
    let mut client = Client::connect(stage.vip()).await.unwrap();
    let cases = cases().into_iter().filter(|case| case.body.len() <= longest);
    for (number, Case { name, path, headers, body }) in cases.enumerate() {
        let id = format!("{label}-{number}");
        let mut fields = vec![("X-Request-Id", id.as_str())];
        fields.extend(headers.iter().map(|(name, value)| (*name, value.as_str())));
        let mut bytes = kvlb_tests::harness::http::request("POST", path, "kvlb.test", &fields, &body);
        if !headers.iter().any(|(name, _)| *name == "Content-Type") {
            bytes = post(path, &fields, &body);
        }
        client.send(&bytes).await.unwrap();
        let answer = client.answer().await.unwrap_or_else(|error| panic!("{name}: {error:#}"));
        assert_passed(stage, &name, &id, &body, &answer);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_bodies_reach_the_engine_byte_for_byte_on_one_connection() {
    let stage = Stage::set(1, json!({})).await;
    send_all(&stage, "uring", usize::MAX).await;
    // What was odd before must not linger: a prompt that was answered is found again.
    let text = "the same prompt twice, long enough for a block or two of sixteen tokens each, as it should be";
    let body = completion(text);
    stage.ask(&body).await;
    let warm = async || stage.ask(&body).await.head.header("x-kvlb-depth").is_some_and(|depth| depth != "0");
    kvlb_tests::harness::eventually(super::stage::SOON, "the overlap is found", warm).await.unwrap();
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_bodies_pass_with_epoll_too() {
    let epoll = |mut config: kvlb_tests::harness::kvlb::KvlbConfig| {
        config.args.extend(["--io".into(), "epoll".into()]);
        config
    };
    let stage = Stage::with(1, json!({}), epoll, |engine| engine).await;
    send_all(&stage, "epoll", 300_000).await;
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_beyond_what_is_read_streams_through_and_says_so() {
    let stage = Stage::set(1, json!({"maxInspectBytes": 1 << 20})).await;
    for (name, bytes) in [("just read", (1 << 20) - 100), ("just not", 1 << 20), ("40 MB", 40 << 20)] {
        let body = padded(bytes);
        let answer =
            exchange(stage.vip(), &post(COMPLETIONS, &[("X-Request-Id", name)], body.as_bytes())).await.unwrap();
        assert_passed(&stage, name, name, body.as_bytes(), &answer);
        let reason = answer.head.header("x-kvlb-reason").unwrap_or_default().to_owned();
        assert_eq!(reason.contains("too_large"), name != "just read", "{name}: {reason}");
    }
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_haste_the_model_is_looked_for_at_both_ends_of_a_body() {
    let hasty = |config: kvlb_tests::harness::kvlb::KvlbConfig| config.env("KVLB_DECISION_BUDGET_MS", "1");
    let stage = Stage::with(1, json!({"model_name": MODEL}), hasty, |engine| engine).await;
    let (prompt, model) = (r#""prompt": "a", "max_tokens": 1"#, format!(r#""model": "{MODEL}""#));
    let long = format!(r#""x": "{}""#, "x".repeat(15 << 20));
    let nobody = r#""model": "nobody""#;
    for (name, fields, served, reason) in [
        ("front", [model.as_str(), prompt, &long], true, "budget"),
        ("back", [long.as_str(), prompt, &model], true, "budget"),
        ("nobody's, in front", [nobody, prompt, &long], false, ""),
        ("nobody's, behind", [prompt, &long, nobody], false, ""),
        ("between", [long.as_str(), &model, &long], true, "out_of_reach"),
        ("nobody's, between", [long.as_str(), nobody, &long], true, "out_of_reach"),
    ] {
        let body = format!("{{{}}}", fields.join(", "));
        let ask = async |id: &str| {
            exchange(stage.vip(), &post(COMPLETIONS, &[("X-Request-Id", id)], body.as_bytes())).await.unwrap()
        };
        let mut answer = ask(name).await;
        if served {
            assert_passed(&stage, name, name, body.as_bytes(), &answer);
            // On a busy machine the data thread may find the decision made when it looks at the clock.
            for again in 0..20 {
                if answer.head.header("x-kvlb-reason").is_some_and(|why| why.contains(reason)) {
                    break;
                }
                answer = ask(&format!("{name} {again}")).await;
            }
            let why = answer.head.header("x-kvlb-reason").unwrap_or_default();
            assert!(why.contains(reason), "{name}: {why}");
        } else {
            assert_eq!(
                (answer.head.status, answer.head.header("x-kvlb-error")),
                (404, Some("model_not_found")),
                "{name}"
            );
        }
    }
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_models_decide_a_model_that_nobody_serves_gets_a_short_404() {
    let stage = Stage::set(1, json!({"model_name": MODEL})).await;
    let megabytes = json!({"model": "\u{1}".repeat(2_000_000), "prompt": "a"}).to_string();
    let long = json!({"model": "m".repeat(1_000_000), "prompt": "a"}).to_string();
    for body in [megabytes.as_str(), &long, r#"{"model": "../..", "prompt": "a"}"#, r#"{"model": "a\u0000\u001b[2J"}"#]
    {
        let answer = exchange(stage.vip(), &post(COMPLETIONS, &[], body.as_bytes())).await.unwrap();
        assert_eq!((answer.head.status, answer.head.header("x-kvlb-error")), (404, Some("model_not_found")));
        let text = answer.body.text();
        assert_eq!(answer.body.json()["error"]["code"], "model_not_found", "{text:.200}");
        assert!(text.len() < 1000, "an error is not as long as the mistake: {} bytes", text.len());
    }
    stage.close().await;
}

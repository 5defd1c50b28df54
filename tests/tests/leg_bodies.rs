//! What the two legs say and what comes back, byte for byte: with servers that say what no engine says.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod split;

use kvlb_tests::harness::http::{Answer, exchange};
use kvlb_tests::harness::upstream::Act;
use serde_json::{Value, json};

use split::scripted::{Scripted, chunks, ok, says};
use split::{COMPLETIONS, DECODE, PREFILL, code};

const OBJECT: &str = r#"{"do_remote_prefill":true,"remote_block_ids":[[1,2]]}"#;

/// A prefill answer with this many tokens cached.
fn prefilled(cached: &str) -> String {
    format!(
        r#"{{"id":"a","kv_transfer_params":{OBJECT},"usage":{{"prompt_tokens":9,"prompt_tokens_details":{{"cached_tokens":{cached}}}}}}}"#
    )
}

async fn pair(decode: Vec<Act>) -> Scripted {
    Scripted::new(vec![(PREFILL, ok(&prefilled("3"))), (DECODE, decode)], json!({})).await
}

fn text(body: &[u8]) -> String {
    String::from_utf8_lossy(body).into_owned()
}

/// A parser may take the first of two members of one name, or the last: neither may find what was not meant for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_stand_twice_or_are_written_oddly_are_found() {
    let fleet = pair(ok("{}")).await;
    let mut seen = Vec::new();
    for sent in [
        r#"{"prompt":"x","max_tokens":5,"max_tokens":9}"#,
        r#"{"max_tokens":5,"prompt":"x","max_\u0074okens":9}"#,
        r#"{"prompt":"x","max_tokens":5,"stream":true,"str\u0065am":true,"stream":false,"min_tokens":5,"min_toke\u006es":9}"#,
        r#"{"prompt":"x","max_tokens":9,"kv_transfer_params":{"a":"evil"},"kv_transfer_params":{"b":"evil"}}"#,
        r#"{"prompt":"x","max_tokens":9,"kv_transfer_param\u0073":{"a":"evil"}}"#,
        r#"{"kv_transfer_params":{"a":"evil"},"prompt":"x"}"#,
        r#"{"prompt":"x","kv_transfer_params":"evil","max_completion_tokens":9,"max_completion_tokens":5}"#,
        r#"{"prompt":"x","bootstrap_room":"evil","bootstrap_port":"evil","boot\u0073trap_host":"evil","disaggregated_params":"evil"}"#,
        r#"{"prompt":"x","bootstrap_pair_key":"evil","ec_transfer_param\u0073":{"a":"evil"},"disagg_prefill_dp_rank":"evil"}"#,
        r#"{"prompt":"x","vllm_xargs":{"kv_transfer_params":"evil"},"extra_args":{"ec_transfer_params":{"a":"evil"}}}"#,
        r#"{"prompt":"x","stream_options":{"include_usage":true},"stream_options":null}"#,
        r#"{"disaggregated_params":{"a":"evil"},"disaggregated_params":["evil"]}"#,
    ] {
        let answer = fleet.split.post(COMPLETIONS, &[], sent.as_bytes()).await;
        assert_eq!(answer.head.status, 200, "{sent}");
        let legs = fleet.since(&mut seen);
        let [[(_, first)], [(_, second)]] = [&legs[0][..], &legs[1][..]] else { panic!("one leg each: {sent}") };
        let (first, second) = (text(first), text(second));
        assert!(!first.contains("evil") && !second.contains("evil"), "{sent}\n{first}\n{second}");
        let plain = first.replace("\\u0074", "t").replace("\\u0065", "e").replace("\\u006e", "n");
        assert!(!plain.contains('5') && !plain.contains('9'), "{sent}\n{first}");
        assert!(!plain.contains("min_tokens") && !plain.contains("stream_options"), "{sent}\n{first}");
        assert!(!plain.contains("\"stream\":true") && plain.contains("\"stream\":false"), "{sent}\n{first}");
        for body in [&first, &second] {
            let value: Value = serde_json::from_str(body).unwrap();
            assert!(value["kv_transfer_params"].is_object(), "{sent}\n{body}");
        }
        assert!(second.contains(OBJECT), "{sent}\n{second}");
        let value: Value = serde_json::from_str(&first).unwrap();
        assert_eq!((&value["max_tokens"], &value["stream"]), (&json!(1), &json!(false)), "{sent}");
        let limit = sent.contains("max_completion_tokens").then(|| json!(1));
        assert_eq!(value.get("max_completion_tokens"), limit.as_ref(), "{sent}\n{first}");
    }
    fleet.split.kvlb.stop().await.unwrap();
}

/// What stands deeper, or in a text, is the client's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_of_the_same_names_elsewhere_are_left_alone() {
    let fleet = pair(ok("{}")).await;
    let inner = concat!(
        r#""prompt":"say \"max_tokens\":7, \"kv_transfer_params\":{} and \u007b","metadata":{"kv_transfer_params":{"max_tokens":7},"stream":true},"#,
        r#""tools":[{"min_tokens":1,"bootstrap_host":"x"}],"big":123456789012345678901234567890,"small":1E-400,"x":-0.0"#
    );
    let answer = fleet.split.post(COMPLETIONS, &[], format!("{{{inner}}}").as_bytes()).await;
    assert_eq!(answer.head.status, 200);
    for number in 0..2 {
        let (head, body) = fleet.posts(number).remove(0);
        assert!(text(&body).starts_with(&format!("{{{inner}")), "{}", text(&body));
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{head}");
    }
    fleet.split.kvlb.stop().await.unwrap();
}

/// Python takes more for JSON than there is, and looks for itself how a body is encoded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_aims_an_engine_elsewhere_whatever_the_body_looks_like() {
    let fleet = pair(ok("{}")).await;
    let evil = r#""kv_transfer_params":{"remote_host":"evil"}"#;
    let wide: Vec<u8> = format!(r#"{{"prompt":"x",{evil}}}"#).bytes().flat_map(|byte| [byte, 0]).collect();
    let mut bodies: Vec<Vec<u8>> = [
        format!(r#"{{"prompt":"x","a":NaN,{evil}}}"#),
        format!(r#"{{"prompt":"x","a":-Infinity,{evil}}}"#),
        format!(r#"{{"prompt":"\ud800",{evil}}}"#),
        format!("\u{feff}{{\"prompt\":\"x\",{evil}}}"),
        format!(" \r\n\t{{\"prompt\":\"x\",{evil}}} \n"),
        format!(r#"{{"prompt":"x",{evil}}}{{}}"#),
        format!(r#"{{"prompt":"x","a":01,{evil}}}"#),
        format!(r#"{{"prompt":"x","a":{}{},{evil}}}"#, "[".repeat(3000), "]".repeat(3000)),
        format!(r#"{{"prompt":["x"],{evil}}}"#),
        format!(r#"{{"prompt":"x","n":2,{evil}}}"#),
        r#"{"prompt":"x","n":2,"bootstrap_host":"evil","disaggregated_params":"evil"}"#.to_owned(),
    ]
    .map(String::into_bytes)
    .to_vec();
    bodies.push([br#"{"prompt":"\xff","#.as_slice(), b"\"b\":\"\xff\",", evil.as_bytes(), b"}"].concat());
    bodies.push(wide);
    for body in &bodies {
        for headers in [
            vec![("Content-Type", "application/json")],
            vec![],
            vec![("Content-Type", "application/json; charset=utf-16")],
            vec![("Content-Type", "text/plain")],
        ] {
            for path in [COMPLETIONS, "/v1/%63ompletions", "/v1/chat/completions?x", "/v1/responses", "/v1/messages"] {
                exchange(fleet.split.vip, "POST", path, &headers, body).await.unwrap();
            }
        }
    }
    for path in [
        "/v1/completions/",
        "//v1/completions",
        "/v1/./completions",
        "/inference/v1/generate",
        "/generate",
        "/v1/embeddings",
        "/pooling",
        "/tokenize",
        "/v1/completions%3f",
        "/v1/completions;a",
        "/v1/%63%6Fmpletions",
    ] {
        exchange(
            fleet.split.vip,
            "POST",
            path,
            &[("Content-Type", "application/json")],
            format!(r#"{{"prompt":"x",{evil}}}"#).as_bytes(),
        )
        .await
        .unwrap();
        // Where an engine would find it beside others of its arguments.
        for deep in [
            format!(r#"{{"token_ids":[1],"sampling_params":{{"max_tokens":3,"extra_args":{{{evil}}}}}}}"#),
            format!(r#"{{"sampling_params":{{"extra_args":{{"a":1}},"extra_arg\u0073":{{"b":[],{evil}}}}}}}"#),
            format!(r#"{{"prompt":"x","n":2,"extra_args":{{{evil}}},"vllm_xargs":{{{evil}}}}}"#),
            format!(r#"{{"sampling_params":{{{evil},"vllm_xargs":{{{evil}}}}}}}"#),
        ] {
            let json = [("Content-Type", "application/json")];
            exchange(fleet.split.vip, "POST", path, &json, deep.as_bytes()).await.unwrap();
        }
    }
    // As chunks, a member cut in two.
    let mut client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1a\r\n{\"prompt\":\"x\",\"kv_transfer\r\n").await.unwrap();
    client.send(b"1c\r\n_params\":\"evil evil evil \"}\r\n0\r\n\r\n").await.unwrap();
    client.answer().await.unwrap();
    let received = fleet.upstreams.iter().flat_map(kvlb_tests::harness::upstream::Upstream::received);
    let readable = received.map(|request| text(&request.into_iter().filter(|byte| *byte != 0).collect::<Vec<_>>()));
    let passed_on: Vec<_> = readable.filter(|request| request.contains("evil")).collect();
    assert!(passed_on.is_empty(), "{passed_on:#?}");
    assert!(fleet.posts(0).len() > 20, "{}", fleet.posts(0).len());
    fleet.split.kvlb.stop().await.unwrap();
}

/// Without the members that aim, a body that one endpoint serves is the client's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_served_alone_keeps_every_other_byte() {
    let fleet = pair(ok("{}")).await;
    let mut seen = Vec::new();
    for (path, sent, cut) in [
        (
            COMPLETIONS,
            r#"{"n": 2, "prompt":"x",  "max_tokens":9,"kv_transfer_params": {"a":1} , "y":1e400}"#,
            r#"{"n": 2, "prompt":"x",  "max_tokens":9 , "y":1e400}"#,
        ),
        (
            "/v1/%63ompletions",
            r#"{"kv_transfer_params":{"a":1},"n":2,"min_tokens":4,"stream":true}"#,
            r#"{"n":2,"min_tokens":4,"stream":true}"#,
        ),
        ("/v1/messages", r#"{"max_tokens":9, "messages":[]}"#, r#"{"max_tokens":9, "messages":[]}"#),
        ("/v1/responses", r#"{"input":"x","max_output_tokens":9}"#, r#"{"input":"x","max_output_tokens":9}"#),
        ("/tokenize", r#"{"prompt":"x" }"#, r#"{"prompt":"x" }"#),
        (
            "/inference/v1/generate",
            r#"{"sampling_params": {"n":1,"extra_args":{"kv_transfer_params":{"a":1} ,"mine":[1e400]}}, "token_ids":[1]}"#,
            r#"{"sampling_params": {"n":1,"extra_args":{"mine":[1e400]}}, "token_ids":[1]}"#,
        ),
    ] {
        let answer = fleet.split.post(path, &[("X-Request-Id", "mine")], sent.as_bytes()).await;
        assert_eq!(answer.head.status, 200, "{path}");
        let legs = fleet.since(&mut seen);
        assert!(legs[1].is_empty(), "{path}: it goes to the prefill endpoint");
        let [(head, body)] = &legs[0][..] else { panic!("asked once: {path}") };
        let value = |text: &str| text.replace(' ', "");
        assert_eq!(value(&text(body)), value(cut), "{path}");
        assert!(
            head.contains("x-request-id: mine\r\n")
                && head.starts_with(&format!("post {} ", path.to_ascii_lowercase())),
            "{head}"
        );
    }
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_too_large_and_unreadable_are_refused() {
    let script = vec![(PREFILL, ok(&prefilled("3"))), (DECODE, ok("{}"))];
    let fleet = Scripted::new(script, json!({"maxInspectBytes": 4096})).await;
    let long = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(8192));
    assert_eq!(code(&fleet.split.post(COMPLETIONS, &[], long.as_bytes()).await), (413, Some("pd_body_too_large")));
    for body in ["", "{", "[]", "\"x\"", "nothing"] {
        let answer = fleet.split.post(COMPLETIONS, &[], body.as_bytes()).await;
        assert_eq!(code(&answer), (400, Some("pd_body_unreadable")), "{body}");
    }
    let zipped = fleet.split.post(COMPLETIONS, &[("Content-Encoding", "gzip")], b"\x1f\x8b\x08\0").await;
    assert_eq!(code(&zipped), (400, Some("pd_body_unreadable")));
    assert!(fleet.posts(0).is_empty() && fleet.posts(1).is_empty());
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clients_headers_go_with_both_legs_and_framing_with_neither() {
    let fleet = pair(ok("{}")).await;
    let mut client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
    let head = "POST /v1/completions?a=b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nX-Own: 1\r\nX-Own: 2\r\n\
        Content-Type: application/json\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n";
    client.send(head.as_bytes()).await.unwrap();
    assert_eq!(client.head().await.unwrap().status, 100);
    client.send(b"6\r\n{\"prom\r\n8\r\npt\":\"x\"}\r\n0\r\n\r\n").await.unwrap();
    assert_eq!(client.answer().await.unwrap().head.status, 200);
    for number in 0..2 {
        let posts = fleet.posts(number);
        let [(head, body)] = &posts[..] else { panic!("asked once") };
        assert!(head.contains("authorization: bearer key\r\n"), "{head}");
        assert!(head.contains("x-own: 1\r\n") && head.contains("x-own: 2\r\n"), "{head}");
        assert!(head.contains("content-type: application/json\r\n") && !head.contains("expect:"), "{head}");
        assert_eq!(head.matches("x-request-id: ").count(), 1, "{head}");
        assert!(serde_json::from_slice::<Value>(body).unwrap()["kv_transfer_params"].is_object(), "{}", text(body));
    }
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_legs_have_one_id_whatever_the_client_says_of_its_own() {
    let fleet = pair(ok("{}")).await;
    let mut seen = Vec::new();
    for (headers, own) in [
        (vec![], None),
        (vec![("X-Request-Id", "mine")], Some("mine")),
        (vec![("X-Request-Id", "")], None),
        (vec![("Connection", "keep-alive, X-Request-Id"), ("X-Request-Id", "mine")], None),
        (vec![("X-Request-Id", "mine"), ("Connection", "close"), ("Connection", "x-request-id")], None),
    ] {
        assert_eq!(fleet.split.post(COMPLETIONS, &headers, br#"{"prompt":"x"}"#).await.head.status, 200, "{headers:?}");
        let ids = |posts: &Vec<(String, Vec<u8>)>| {
            let lines = posts[0].0.lines().filter_map(|line| line.strip_prefix("x-request-id:"));
            lines.map(str::trim).filter(|id| !id.is_empty()).map(str::to_owned).collect::<Vec<_>>()
        };
        let legs: Vec<_> = fleet.since(&mut seen).iter().map(ids).collect();
        assert!(legs[0].len() == 1 && legs[0] == legs[1], "{headers:?}: {legs:?}");
        assert_eq!(legs[0][0] == "mine", own.is_some(), "{headers:?}: {legs:?}");
    }
    fleet.split.kvlb.stop().await.unwrap();
}

fn usage(answer: &Answer) -> Value {
    let body = answer.body.text();
    let json = body.split("data: ").find(|part| part.contains("\"usage\":{")).unwrap_or(&body).trim().to_owned();
    let value: Value = serde_json::from_str(&json).unwrap_or_else(|cause| panic!("{cause}: {body}"));
    value["usage"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_tokens_are_the_prefill_endpoints_in_every_form_of_answer() {
    let body = |cached: &str| {
        format!(
            r#"{{"id":"b","choices":[{{"text":"\"usage\":{{\"cached_tokens\":7}}","logprobs":null}}],"usage":{{"prompt_tokens":1234,"total_tokens":9, "prompt_tokens_details": {{"cached_tokens": {cached}}}}}}}"#
        )
    };
    let mut fleet = pair(ok("{}")).await;
    for (theirs, ours) in
        [("1232", "32"), ("1232", "0"), ("69.0", "0"), ("6.9e1", "16"), ("7", "7"), ("1", "0"), ("0", "0")]
    {
        let prefill = ok(&prefilled(ours));
        let whole = body(theirs);
        // The number cut in two behind as many digits as the other one has, and each byte by itself.
        let at = whole.rfind("cached_tokens\": ").unwrap() + "cached_tokens\": ".len() + ours.len();
        let event = format!("data: {whole}\n\n");
        let middle = at + "data: ".len();
        let bytes: Vec<&[u8]> = event.as_bytes().chunks(1).collect();
        for (form, decode) in [
            ("sized", ok(&whole)),
            ("cut", chunks("application/json", &[&whole.as_bytes()[..at], &whole.as_bytes()[at..]])),
            ("events", chunks("text/event-stream", &[event.as_bytes(), b"data: [DONE]\n\n"])),
            (
                "events cut",
                chunks(
                    "text/event-stream",
                    &[&event.as_bytes()[..middle], &event.as_bytes()[middle..], b"data: [DONE]\n\n"],
                ),
            ),
            ("bytes", chunks("text/event-stream", &bytes)),
        ] {
            fleet = fleet.next(vec![(PREFILL, prefill.clone()), (DECODE, decode)], json!({})).await;
            let answer = fleet.split.post(COMPLETIONS, &[], br#"{"prompt":"x"}"#).await;
            let told = usage(&answer);
            let expected: u64 = ours.parse().unwrap();
            let now = told["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert_eq!(now, expected, "{form} {theirs} {ours}: {}", answer.body.text());
            // All else stays where it was.
            let squeezed = |text: &str| text.replace(' ', "");
            let whole = body(&now.to_string());
            let wanted = if matches!(form, "sized" | "cut") { whole } else { format!("data: {whole}") };
            assert!(squeezed(&answer.body.text()).starts_with(&squeezed(&wanted)), "{form}: {}", answer.body.text());
        }
    }
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_without_the_number_or_in_a_compressed_form_is_passed_on_as_it_is() {
    let nulls = r#"{"usage":{"prompt_tokens":40,"prompt_tokens_details":null}}"#;
    let none = r#"{"usage":{"prompt_tokens":40}}"#;
    let null = r#"{"usage":{"prompt_tokens":40,"prompt_tokens_details":{"cached_tokens":null}}}"#;
    let text = r#"{"choices":[{"text":"\"cached_tokens\": 39"}],"usage":{"prompt_tokens":40}}"#;
    let answers = [nulls, none, null, text, "", "no JSON"].map(|body| (ok(body), body.to_owned()));
    let coded = r#"{"usage":{"prompt_tokens_details":{"cached_tokens":39}}}"#;
    let coded = (
        says("200 OK", "Content-Encoding: br\r\nContent-Type: application/json\r\n", coded.as_bytes()),
        coded.to_owned(),
    );
    // A number that may not be all there is passed on when no more comes.
    let cut = r#"{"usage":{"prompt_tokens_details":{"cached_tokens":39"#;
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n";
    let cut = (vec![Act::Read, Act::Send(format!("{head}{cut}").into_bytes())], cut.to_owned());
    let mut fleet = pair(ok("{}")).await;
    for (decode, body) in answers.into_iter().chain([coded, cut]) {
        fleet = fleet.next(vec![(PREFILL, ok(&prefilled("3"))), (DECODE, decode)], json!({})).await;
        let answer = fleet.split.post(COMPLETIONS, &[], br#"{"prompt":"x"}"#).await;
        assert_eq!((answer.head.status, answer.body.text()), (200, body));
    }
    fleet.split.kvlb.stop().await.unwrap();
}

/// Forms of an answer that a server may choose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_answer_is_understood_in_every_form_of_http() {
    let body = prefilled("3");
    let cut = body.find("remote_block").unwrap() + 4;
    let (first, rest) = body.as_bytes().split_at(cut);
    let sized = format!("Content-Length: {}\r\n\r\n{body}", body.len());
    let raw = |text: String| vec![Act::Read, Act::Send(text.into_bytes())];
    let mut fleet = pair(ok("{}")).await;
    for (what, prefill) in [
        ("chunks", chunks("application/json", &[first, rest])),
        ("until close", raw(format!("HTTP/1.1 200 OK\r\n\r\n{body}"))),
        ("HTTP/1.0", raw(format!("HTTP/1.0 200 OK\r\n\r\n{body}"))),
        ("100 first", raw(format!("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n{sized}"))),
        ("spaced", ok(&format!(" \n\t{} \n", body.replace("\"kv_transfer_params\":", "\"kv_transfer_params\" :\n ")))),
        ("escaped", ok(&body.replace("kv_transfer_params", "kv_tr\\u0061nsfer_params"))),
        ("behind a mark", ok(&format!("\u{feff}{body}"))),
        ("beside what is no JSON", ok(&body.replace("\"id\":\"a\"", r#""m":NaN,"usage":[-Infinity]"#))),
        ("beside another", ok(&body.replace("\"id\":\"a\"", r#""choices":[{"kv_transfer_params":{"evil":1}}]"#))),
        ("with trailers", {
            let mut acts = chunks("application/json", &[body.as_bytes()]);
            acts.truncate(acts.len() - 2);
            acts.push(Act::Send(b"0\r\nX-Time: 1\r\n\r\n".to_vec()));
            acts
        }),
    ] {
        fleet = fleet.next(vec![(PREFILL, prefill), (DECODE, ok("{}"))], json!({})).await;
        let answer = fleet.split.post(COMPLETIONS, &[("Accept-Encoding", "gzip, br")], br#"{"prompt":"x"}"#).await;
        assert_eq!((code(&answer), answer.body.text().as_str()), ((200, None), "{}"), "{what}");
        assert_eq!(text(&fleet.posts(1)[0].1), format!(r#"{{"prompt":"x","kv_transfer_params":{OBJECT}}}"#), "{what}");
        // It is read by kvlb, which has no use for one that is compressed; the client gets the other.
        let asks = |number: usize| fleet.posts(number)[0].0.contains("accept-encoding: gzip, br");
        assert!(!asks(0) && asks(1), "{what}: {}", fleet.posts(0)[0].0);
    }
    fleet.split.kvlb.stop().await.unwrap();
}

/// The limit is for all of the answer, not for its beginning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_answer_that_trickles_is_too_late_all_the_same() {
    let body = prefilled("3");
    let mut pieces: Vec<&[u8]> = body.as_bytes().chunks(1).collect();
    pieces.truncate(100);
    let mut acts = Vec::new();
    for act in chunks("application/json", &pieces) {
        acts.push(if matches!(act, Act::Wait(_)) { Act::Wait(std::time::Duration::from_millis(100)) } else { act });
    }
    let fleet = Scripted::new(vec![(PREFILL, acts), (DECODE, ok("{}"))], json!({"timeoutPdPrefill": 1000})).await;
    let answer = fleet.split.post(COMPLETIONS, &[], br#"{"prompt":"x"}"#).await;
    assert_eq!(code(&answer), (504, Some("pd_prefill_timeout")));
    assert!(fleet.posts(1).is_empty());
    fleet.split.kvlb.stop().await.unwrap();
}

/// What a router does not look at is as large as it likes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_and_large_objects_pass_whole() {
    let padding = "p".repeat(3 << 20);
    let object = format!(r#"{{"do_remote_prefill":true,"padding":"{padding}"}}"#);
    let script = vec![(PREFILL, ok(&format!(r#"{{"kv_transfer_params":{object}}}"#))), (DECODE, ok("{}"))];
    let fleet = Scripted::new(script, json!({})).await;
    let sent = format!(r#"{{"prompt":"{}","max_tokens":9"#, "x".repeat(2 << 20));
    let answer = fleet.split.post(COMPLETIONS, &[], format!("{sent}}}").as_bytes()).await;
    assert_eq!(code(&answer), (200, None));
    let (first, second) = (text(&fleet.posts(0)[0].1), text(&fleet.posts(1)[0].1));
    assert!(first.starts_with(&sent.replace(":9", ":1,")) && first.len() < sent.len() + 500);
    assert!(second == format!("{sent},\"kv_transfer_params\":{object}}}"));
    fleet.split.kvlb.stop().await.unwrap();
}

/// The budget of a decision is for what goes on without it; a rule that splits requests does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_takes_longer_to_read_than_a_decision_may_take_is_read() {
    let script = vec![(PREFILL, ok(&prefilled("3"))), (DECODE, ok("{}"))];
    let fleet = Scripted::with(&["--decision-budget-ms", "1"], script, json!({"kvExactMode": 1})).await;
    let ids: Vec<_> = (0..400_000).map(|id| (id % 1000).to_string()).collect();
    let sent = format!(r#"{{"prompt":[{}],"max_tokens":9}}"#, ids.join(","));
    assert!(sent.len() > 1 << 20);
    for _ in 0..3 {
        assert_eq!(code(&fleet.split.post(COMPLETIONS, &[], sent.as_bytes()).await), (200, None));
    }
    assert_eq!((fleet.posts(0).len(), fleet.posts(1).len()), (3, 3));
    // Where nothing is generated as well.
    let evil = format!(r#"{{"text":"{}","kv_transfer_params":{{"remote_host":"evil"}}}}"#, "x".repeat(2 << 20));
    for path in ["/api/v1/completions", "/generate"] {
        assert_eq!(code(&fleet.split.post(path, &[], evil.as_bytes()).await), (200, None));
    }
    let posts: Vec<_> = [0, 1].iter().flat_map(|number| fleet.posts(*number)).collect();
    assert!(posts.iter().all(|(_, body)| !text(body).contains("evil")));
    fleet.split.kvlb.stop().await.unwrap();
}

/// What kvlb cannot read and an engine may is not passed on, wherever it goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_only_an_engine_can_read_is_refused_on_every_path() {
    let fleet = pair(ok("{}")).await;
    let evil = r#""kv_transfer_params":{"remote_host":"evil"}}"#;
    let wide: Vec<u8> = format!("\u{feff}{{{evil}").encode_utf16().flat_map(u16::to_le_bytes).collect();
    for body in [format!("{{\"a\":NaN,{evil}").into_bytes(), wide] {
        for path in ["/api/v1/completions", "/generate", "/tokenize", "/v1/embeddings"] {
            let answer = fleet.split.post(path, &[], &body).await;
            assert_eq!(code(&answer), (400, Some("pd_body_unreadable")), "{path}");
        }
    }
    let recording = b"RIFF\x24\x08\0\0WAVEfmt ";
    assert_eq!(code(&fleet.split.post("/v1/audio/transcriptions", &[], recording).await), (200, None));
    fleet.split.kvlb.stop().await.unwrap();
}

//! What whole bodies become.

use proptest::prelude::*;

use super::*;

fn post<'a>(path: &'a str, body: &'a [u8]) -> Request<'a> {
    Request { method: "POST", path, model_header: None, body }
}

fn completion(body: &str) -> Result<Prompt, Miss> {
    parse(&post("/v1/completions", body.as_bytes()))
}

fn chat(body: &str) -> Result<Prompt, Miss> {
    parse(&post("/v1/chat/completions", body.as_bytes()))
}

fn why(result: Result<Prompt, Miss>) -> (&'static str, &'static str) {
    let miss = result.unwrap_err();
    (miss.reason(), miss.detail())
}

fn ids(ids: &[u32]) -> Input {
    Input::Tokens(ids.iter().copied().map(TokenId).collect())
}

#[test]
fn a_path_means_the_same_with_and_without_slashes_around_it() {
    for path in ["/v1/chat/completions", "/v1/chat/completions/", "v1/chat/completions"] {
        assert_eq!(kind(path), Kind::Chat, "{path}");
    }
    assert_eq!(kind("/v1/completions"), Kind::Completions);
    assert_eq!(kind("/v1/chat/completions/batch"), Kind::ChatBatch);
    assert_eq!(kind("/chat/completions"), Kind::Other);
    assert_eq!(kind(""), Kind::Other);
}

#[test]
fn a_prompt_has_four_forms_and_text_is_not_tokens() {
    let inputs = |prompt: &str| completion(&format!(r#"{{"model": "m", "prompt": {prompt}}}"#)).unwrap().inputs;
    assert_eq!(inputs(r#""1,2""#), [Input::Text("1,2".into())]);
    assert_eq!(inputs(r#"["a", "b"]"#), [Input::Text("a".into()), Input::Text("b".into())]);
    assert_eq!(inputs("[1, 2]"), [ids(&[1, 2])]);
    assert_eq!(inputs("[[1, 2], [3]]"), [ids(&[1, 2]), ids(&[3])]);
}

#[test]
fn at_most_eight_prompts_are_kept_and_all_are_counted() {
    let list = vec![r#""x""#; 100].join(",");
    let prompt = completion(&format!(r#"{{"prompt": [{list}], "n": 3}}"#)).unwrap();
    assert_eq!((prompt.inputs.len(), prompt.prompts, prompt.samples), (MAX_PROMPTS, 100, 3));
}

#[test]
fn token_ids_outside_32_bits_are_a_miss() {
    for bad in ["[-1]", "[1, 4294967296]", "[1.0]", r#"[1, "2"]"#, "[true]", "[1, [2]]", "[[1], [2, -3]]"] {
        assert_eq!(why(completion(&format!(r#"{{"prompt": {bad}}}"#))), ("tokenize", "token_id"), "{bad}");
    }
    assert_eq!(completion(r#"{"prompt": [4294967295]}"#).unwrap().inputs, [ids(&[u32::MAX])]);
}

#[test]
fn no_prompt_is_text_empty_and_no_object_is_model_empty_even_with_a_model_header() {
    for (body, detail) in [
        ("{}", "absent"),
        (r#"{"prompt": null}"#, "absent"),
        (r#"{"prompt": ""}"#, "empty"),
        (r#"{"prompt": []}"#, "empty"),
        (r#"{"prompt": [""]}"#, "empty"),
        (r#"{"prompt": [[]]}"#, "empty"),
    ] {
        assert_eq!(why(completion(body)), ("text_empty", detail), "{body}");
    }
    assert_eq!(why(chat(r#"{"messages": []}"#)), ("text_empty", "empty"));
    let request = Request { model_header: Some("m"), ..post("/v1/completions", b"plain text") };
    assert_eq!(why(parse(&request)), ("model_empty", "not_json"));
    assert_eq!(why(completion("[1]")), ("model_empty", "not_object"));
    assert_eq!(why(parse(&post("/v1/models", b"{}"))), ("text_empty", "path"));
    let get = Request { method: "GET", ..post("/v1/completions", b"") };
    assert_eq!(why(parse(&get)), ("text_empty", "method"));
}

#[test]
fn the_model_header_wins_over_the_body() {
    let body = br#"{"model": "org/body", "prompt": "x"}"#;
    let request = Request { model_header: Some(" header "), ..post("/v1/completions", body) };
    assert_eq!(model(&request).as_deref(), Some("header"));
    assert_eq!(parse(&request).unwrap().model.as_deref(), Some("header"));
    let request = Request { model_header: Some(""), ..post("/anything", body) };
    assert_eq!(model(&request).as_deref(), Some("org/body"));
    assert_eq!(completion(r#"{"prompt": "x"}"#).unwrap().model, None);
    assert_eq!(completion(r#"{"prompt": "x", "model": ""}"#).unwrap().model, None);
}

#[test]
fn what_replaces_the_prompt_is_a_miss_of_its_own() {
    assert_eq!(why(completion(r#"{"prompt": "x", "suffix": "y"}"#)).1, "suffix");
    assert_eq!(why(completion(r#"{"prompt": "x", "prompt_embeds": "AA=="}"#)).1, "embeds");
    let reuse = r#"{"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {"prompt_token_ids": [1]}}"#;
    assert_eq!(why(chat(reuse)).1, "token_reuse");
    assert_eq!(why(parse(&post("/v1/responses", br#"{"input": "x"}"#))), ("tokenize", "responses"));
    assert_eq!(why(parse(&post("/v1/messages", br#"{"messages": []}"#))), ("tokenize", "messages_api"));
}

#[test]
fn generate_takes_token_ids_only() {
    let generate = |body: &str| parse(&post("/inference/v1/generate", body.as_bytes()));
    assert_eq!(generate(r#"{"token_ids": [5, 6]}"#).unwrap().inputs, [ids(&[5, 6])]);
    assert_eq!(why(generate(r#"{"token_ids": "x"}"#)).1, "token_id");
    assert_eq!(why(generate(r#"{"token_ids": [1], "features": {}}"#)).1, "images");
}

#[test]
fn options_that_decide_the_tokens_are_read_only_in_their_own_type() {
    let options = |rest: &str| completion(&format!(r#"{{"prompt": "x", {rest}}}"#)).map(|prompt| prompt.options);
    assert_eq!(options(r#""add_special_tokens": false"#).unwrap().add_special_tokens, Some(false));
    assert_eq!(options(r#""truncate_prompt_tokens": 5"#).unwrap().truncate, Some(Truncate::To(5)));
    assert_eq!(options(r#""truncation_side": "right""#).unwrap().truncation_side, Some(Side::Right));
    for odd in [
        r#""add_special_tokens": "no""#,
        r#""truncate_prompt_tokens": "5""#,
        r#""truncate_prompt_tokens": -2"#,
        r#""truncate_prompt_tokens": 5.0"#,
        r#""truncation_side": "middle""#,
    ] {
        assert_eq!(options(odd).unwrap_err().detail(), "options", "{odd}");
    }
}

#[test]
fn truncation_to_the_model_keeps_a_token_back_where_any_may_be_generated() {
    let reserve = |rest: &str| {
        completion(&format!(r#"{{"prompt": "x", "truncate_prompt_tokens": -1{rest}}}"#)).unwrap().options.truncate
    };
    assert_eq!(reserve(""), Some(Truncate::ToModel { reserve: 1 }));
    assert_eq!(reserve(r#", "max_tokens": 0"#), Some(Truncate::ToModel { reserve: 0 }));
    assert_eq!(reserve(r#", "max_tokens": null"#), Some(Truncate::ToModel { reserve: 0 }));
    let chat = chat(r#"{"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": -1}"#).unwrap();
    assert_eq!(chat.options.truncate, Some(Truncate::ToModel { reserve: 0 }));
}

#[test]
fn a_chat_keeps_what_its_template_can_see() {
    let body = r#"{"messages": [{"role": "user", "content": "x", "name": "bob"}], "add_generation_prompt": false,
        "chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "low", "documents": [{"text": "d"}]}"#;
    let Input::Chat(chat) = chat(body).unwrap().inputs.remove(0) else { panic!("not a chat") };
    assert_eq!(chat.messages[0].name.as_deref(), Some("bob"));
    assert_eq!(chat.template_kwargs, [("enable_thinking".to_owned(), Json::Bool(false))]);
    assert_eq!((chat.add_generation_prompt, chat.continue_final_message), (false, false));
    assert_eq!(chat.reasoning_effort.as_deref(), Some("low"));
    assert!(chat.documents.is_some());
}

#[test]
fn a_batch_of_chats_is_a_list_of_conversations() {
    let body = br#"{"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]}"#;
    let prompt = parse(&post("/v1/chat/completions/batch", body)).unwrap();
    assert_eq!((prompt.inputs.len(), prompt.prompts), (2, 2));
}

/// Bodies as clients, fuzzers and attackers write them: an answer each, no panic, no overflow of the stack.
#[test]
fn odd_bodies_are_misses() {
    let deep = |open: &str, close: &str, n: usize| format!("{}{}", open.repeat(n), close.repeat(n));
    let bodies = [
        r#"{"prompt": "\ud800"}"#.to_owned(),
        r#"{"prompt": "\udc00\ud800 x"}"#.to_owned(),
        r#"{"prompt": 5}"#.to_owned(),
        r#"{"prompt": true}"#.to_owned(),
        r#"{"prompt": {"text": "x"}}"#.to_owned(),
        r#"{"prompt": ["a", 1]}"#.to_owned(),
        r#"{"prompt": [[1], "a", {}]}"#.to_owned(),
        r#"{"prompt": [null]}"#.to_owned(),
        r#"{"prompt": [1e400]}"#.to_owned(),
        r#"{"prompt": [NaN]}"#.to_owned(),
        r#"{"prompt": "x", "temperature": NaN}"#.to_owned(),
        r#"{"prompt": "x" "model": "m"}"#.to_owned(),
        r#"{"prompt": "a"#.to_owned(),
        "{\"prompt\": \"a\u{0}b\"}".to_owned(),
        format!(r#"{{"prompt": {}}}"#, deep("[", "]", 200)),
        format!(r#"{{"prompt": {}}}"#, deep("[", "]", 500_000)),
        "[".repeat(1_000_000),
        r#"{"a":"#.repeat(300_000),
    ];
    for body in &bodies {
        assert!(completion(body).is_err(), "{}", &body[..body.len().min(60)]);
        let _model = model(&post("/v1/completions", body.as_bytes()));
    }
    let messages = [
        "5",
        "null",
        r#""x""#,
        "{}",
        "[5]",
        "[null]",
        "[[]]",
        r#"[{"content": "x"}]"#,
        r#"[{"role": 1, "content": "x"}]"#,
        r#"[{"role": "user", "content": 5}]"#,
        r#"[{"role": "user", "content": {"type": "text", "text": "x"}}]"#,
        r#"[{"role": "user", "content": [[]]}]"#,
        r#"[{"role": "user", "content": "\ud83d"}]"#,
        r#"[{"role": "assistant", "tool_calls": {}}]"#,
        r#"[{"role": "assistant", "tool_calls": [1]}]"#,
        r#"[{"role": "assistant", "content": "x", "reasoning": 5}]"#,
        r#"[{"role": "tool", "content": "x", "tool_call_id": 5}]"#,
        r#"[{"role": "developer", "content": "x", "tools": [{}]}]"#,
    ];
    for messages in messages {
        assert!(chat(&format!(r#"{{"messages": {messages}}}"#)).is_err(), "{messages}");
    }
    for rest in [
        r#""tools": []"#,
        r#""tools": "x""#,
        r#""chat_template": 5"#,
        r#""chat_template_kwargs": []"#,
        r#""chat_template_kwargs": {"tools": []}"#,
        r#""add_generation_prompt": "no""#,
        r#""continue_final_message": 1"#,
        r#""documents": {}"#,
        r#""documents": [{"a": 1}]"#,
        r#""reasoning_effort": 3"#,
        r#""chat_template_kwargs": {"x": 123456789012345678901234567890}"#,
    ] {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], {rest}}}"#);
        assert_eq!(why(chat(&body)).0, "tokenize", "{rest}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(body in prop::collection::vec(any::<u8>(), 0..200), path in "/?(v1/)?[a-z/]{0,24}") {
        let request = post(&path, &body);
        let _parsed = parse(&request);
        let _model = model(&request);
    }

    #[test]
    fn no_text_makes_it_panic(body in r#"\{("(model|prompt|messages|n|tools)": ?(null|true|-?[0-9]{1,25}|"[^"\\]{0,9}"|\[\]|\{\}|\[\{"role":"user","content":"x"\}\]),? ?){0,4}\}?"#) {
        let _completion = completion(&body);
        let _chat = chat(&body);
    }

    /// Text survives the way through JSON, whatever is in it.
    #[test]
    fn a_prompt_s_text_is_kept(text in "\\PC{1,80}") {
        let body = serde_json::json!({ "prompt": text }).to_string();
        prop_assert_eq!(completion(&body).unwrap().inputs, [Input::Text(text)]);
    }
}

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
    assert_eq!(kind("/v1/ch%61t/%63ompletions"), Kind::Chat, "an engine decodes it");
    assert_eq!(
        (kind("/v1/%zzcompletions"), kind("/v1/completions%"), kind("/v1%2")),
        (Kind::Other, Kind::Other, Kind::Other)
    );
}

proptest! {
    /// Where both ends together are the whole, or the model is near one of them, a glimpse says what all of it says.
    #[test]
    fn a_glimpse_never_says_another_model(
        front in 0..60_usize, middle in "[a-z\\\\\"{}:,]{0,400}", back in 0..60_usize, reach in 1..200_usize, order in 0..3_usize,
    ) {
        let members = [
            format!("\"a\": {}", serde_json::json!(" ".repeat(front))),
            format!("\"prompt\": {}", serde_json::json!({"model": [middle]})),
            format!("\"z\": {}", serde_json::json!("x".repeat(back))),
        ];
        let mut members = members.to_vec();
        members.insert(order, "\"model\": \"m\"".to_owned());
        let body = format!("{{{}}}", members.join(", "));
        let request = post("/v1/completions", body.as_bytes());
        prop_assert_eq!(model(&request), Some("m".to_owned()));
        let glimpse = glimpse_model(&request, reach);
        let is_right = match &glimpse {
            Glimpse::Model(model) => model.as_deref() == Some("m"),
            Glimpse::Endless | Glimpse::OutOfReach => body.len() > 2 * reach,
        };
        prop_assert!(is_right, "{:?} of {}", glimpse, body);
    }
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
    let earlier = br#"{"input": "x", "previous_response_id": "r"}"#;
    assert_eq!(why(parse(&post("/v1/responses", earlier))), ("tokenize", "previous_response"));
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

fn shown(path: &str, body: &str) -> Result<Chat, Miss> {
    match parse(&post(path, body.as_bytes()))?.inputs.remove(0) {
        Input::Chat(chat) => Ok(*chat),
        other => panic!("not a chat: {other:?}"),
    }
}

fn said(chat: &Chat) -> Vec<(&str, Vec<&str>)> {
    fn texts(message: &Message) -> Vec<&str> {
        message.content.iter().map(|part| part.text.as_str()).collect()
    }
    chat.messages.iter().map(|message| (message.role.as_str(), texts(message))).collect()
}

#[test]
fn results_of_tools_come_before_what_the_user_says_with_them() {
    let body = r#"{"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "s"}], "messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": "é"}}]},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "tool_result", "tool_use_id": "t", "content": "r"}]}]}"#;
    let chat = shown("/v1/messages", body).unwrap();
    assert_eq!(said(&chat), [("system", vec!["s"]), ("assistant", vec![]), ("tool", vec!["r"]), ("user", vec!["b"])]);
    assert_eq!(chat.messages[1].tool_calls.as_ref().unwrap()[0].arguments, r#"{"a": "\u00e9"}"#);
    assert_eq!(chat.api, Api::Messages);
}

#[test]
fn what_the_messages_api_takes_besides_text_has_its_detail() {
    let detail = |block: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": [{block}]}}]}}"#);
        why(parse(&post("/v1/messages", body.as_bytes()))).1
    };
    assert_eq!(detail(r#"{"type": "image", "source": {}}"#), "images");
    assert_eq!(detail(r#"{"type": "tool_result", "content": [{"type": "image"}]}"#), "images");
    assert_eq!(detail(r#"{"type": "tool_use", "name": "f"}"#), "tools");
    assert_eq!(detail(r#"{"type": "text", "text": 5}"#), "shape");
    assert_eq!(detail("5"), "shape");
    let no_id = r#"{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]}"#;
    assert_eq!(why(parse(&post("/v1/messages", no_id.as_bytes()))).1, "tools");
}

#[test]
fn the_efforts_of_the_messages_api_are_read() {
    let chat = |rest: &str| {
        shown("/v1/messages", &format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], {rest}}}"#)).unwrap()
    };
    assert!(chat(r#""thinking": {"type": "disabled"}"#).thinking_off);
    let thinking =
        chat(r#""thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}"#);
    assert_eq!((thinking.thinking_off, thinking.reasoning_effort.as_deref()), (false, Some("max")));
}

#[test]
fn each_item_of_the_responses_api_is_a_message() {
    let body = r#"{"instructions": "i", "n": 3, "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {"type": "message", "role": "assistant", "status": "incomplete", "content": [{"type": "output_text", "text": "y"}]}]}"#;
    let chat = shown("/v1/responses", body).unwrap();
    let roles: Vec<&str> = said(&chat).iter().map(|(role, _)| *role).collect();
    assert_eq!(roles, ["system", "user", "assistant", "assistant", "tool", "assistant"]);
    assert_eq!(chat.messages[2].reasoning.as_deref(), Some("r"));
    assert_eq!((chat.add_generation_prompt, chat.continue_final_message), (false, true));
    let prompt = parse(&post("/v1/responses", body.as_bytes())).unwrap();
    assert_eq!((prompt.samples, prompt.options.add_special_tokens), (1, Some(true)));
}

#[test]
fn what_the_responses_api_takes_besides_text_has_its_detail() {
    let detail = |rest: &str| why(parse(&post("/v1/responses", format!("{{{rest}}}").as_bytes()))).1;
    let item = |item: &str| detail(&format!(r#""input": [{item}]"#));
    assert_eq!(item(r#"{"type": "item_reference", "id": "m"}"#), "item");
    assert_eq!(item(r#"{"type": "reasoning", "summary": [], "encrypted_content": "z"}"#), "item");
    assert_eq!(item(r#"{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}"#), "item");
    assert_eq!(
        item(r#"{"type": "function_call", "call_id": "c", "namespace": "n", "name": "f", "arguments": "{}"}"#),
        "tools"
    );
    assert_eq!(item(r#"{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}"#), "images");
    assert_eq!(item(r#"{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}"#), "images");
    assert_eq!(item(r#"{"role": "user", "content": [{"type": "text", "text": "x"}]}"#), "shape");
    assert_eq!(item(r#"{"role": "assistant", "content": []}"#), "shape");
    assert_eq!(item(r#"{"role": "developer", "content": "x", "tools": [1]}"#), "tools");
    assert_eq!(detail(r#""input": "x", "previous_input_messages": []"#), "previous_response");
    assert_eq!(detail(r#""input": "x", "tools": [{"type": "web_search_preview"}]"#), "tools");
    assert_eq!(detail(r#""input": "x", "truncation": "some""#), "options");
    assert_eq!(detail(r#""instructions": "x""#), "absent");
    assert_eq!(detail(r#""input": []"#), "empty");
}

#[test]
fn a_null_truncation_is_not_an_absent_one() {
    let truncate = |rest: &str| {
        parse(&post("/v1/responses", format!(r#"{{"input": "x"{rest}}}"#).as_bytes())).unwrap().options.truncate
    };
    assert_eq!(truncate(""), None);
    assert_eq!(truncate(r#", "truncation": "disabled""#), None);
    assert_eq!(truncate(r#", "truncation": null"#), Some(Truncate::ToModel { reserve: 0 }));
    assert_eq!(truncate(r#", "truncation": "auto", "max_output_tokens": 5"#), Some(Truncate::ToModel { reserve: 1 }));
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

#[test]
fn the_header_tells_the_rule_and_the_body_what_is_served() {
    fn models(header: Option<&str>, body: &[u8]) -> (Option<String>, Option<String>) {
        let request = Request { method: "POST", path: "/v1/completions", model_header: header, body };
        let prompt = parse(&request).unwrap();
        (prompt.model, prompt.served)
    }
    let some = |model: &str| Some(model.to_owned());
    assert_eq!(models(Some("h"), br#"{"model": "b", "prompt": "x"}"#), (some("h"), some("b")));
    assert_eq!(models(Some("h"), br#"{"prompt": "x"}"#), (some("h"), None));
    assert_eq!(models(None, br#"{"model": "b", "prompt": "x"}"#), (some("b"), some("b")));
}

#[test]
fn an_engine_that_is_to_judge_the_prompt_computes_all_of_it() {
    let reads = |path, more: &str| {
        let body =
            format!(r#"{{"prompt": "x", "token_ids": [1], "messages": [{{"role": "user", "content": "x"}}], {more}}}"#);
        parse(&post(path, body.as_bytes())).unwrap().reads_cache
    };
    let (completions, generate) = ("/v1/completions", "/inference/v1/generate");
    for more in [r#""echo": true, "logprobs": 1"#, r#""prompt_logprobs": 0"#] {
        assert!(!reads(completions, more), "{more}");
    }
    assert!(!reads("/v1/chat/completions", r#""prompt_logprobs": 1"#));
    for more in ["prompt_logprobs", "skip_reading_prefix_cache"] {
        assert!(!reads(generate, &format!(r#""sampling_params": {{"{more}": 1}}"#)), "{more}");
    }
    for more in [r#""echo": true"#, r#""logprobs": 1"#, r#""echo": false, "logprobs": 1"#, r#""prompt_logprobs": null"#]
    {
        assert!(reads(completions, more), "{more}");
    }
    assert!(reads(generate, r#""sampling_params": {"max_tokens": 1}"#));
}

#[test]
fn a_batch_of_chats_has_no_tools() {
    let body = br#"{"messages": [[{"role": "user", "content": "x"}]], "tools": [{"type": "function", "function": {"name": "f"}}]}"#;
    assert_eq!(why(parse(&post("/v1/chat/completions/batch", body))), ("tokenize", "tools"));
}

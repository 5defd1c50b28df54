//! What the small tokenizer of the tests makes of prompts.

use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::openai::{self, Json, Message, Part, ToolCall};

const TOKENIZER: &[u8] = include_bytes!("../../../tests/golden/tiny-tokenizer/tokenizer.json");
const CONFIG: &[u8] = include_bytes!("../../../tests/golden/tiny-tokenizer/tokenizer_config.json");

fn files() -> Files {
    Files { tokenizer_json: TOKENIZER.to_vec(), tokenizer_config: Some(CONFIG.to_vec()), ..Files::default() }
}

fn load(files: &Files) -> Tokenizer {
    Tokenizer::load(files, EngineOptions::default()).unwrap()
}

fn tiny() -> Tokenizer {
    load(&files())
}

/// The small tokenizer's file with Harmony's control tokens, `shift` behind where Harmony has them.
pub(super) fn harmony_file(shift: u32) -> serde_json::Value {
    let mut file: serde_json::Value = serde_json::from_slice(TOKENIZER).unwrap();
    for (token, id) in harmony::CONTROL {
        file["model"]["vocab"][token] = json!(id + shift);
        let added = json!({"id": id + shift, "content": token, "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false});
        file["added_tokens"].as_array_mut().unwrap().push(added);
    }
    file
}

/// A tokenizer of a model that speaks Harmony.
fn speaking_harmony() -> Tokenizer {
    let config = Some(br#"{"model_type": "gpt_oss"}"#.to_vec());
    load(&Files { tokenizer_json: harmony_file(0).to_string().into_bytes(), config, ..files() })
}

/// The small tokenizer with a special token before and after each text.
fn with_special_tokens() -> Tokenizer {
    let mut file: serde_json::Value = serde_json::from_slice(TOKENIZER).unwrap();
    let id = |token: &str| {
        file["added_tokens"].as_array().unwrap().iter().find(|each| each["content"] == token).unwrap()["id"].clone()
    };
    let special = |token: &str| json!({"SpecialToken": {"id": token, "type_id": 0}});
    let entry = |token: &str| json!({"id": token, "ids": [id(token)], "tokens": [token]});
    file["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [special("<|im_start|>"), {"Sequence": {"id": "A", "type_id": 0}}, special("<|im_end|>")],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": entry("<|im_start|>"), "<|im_end|>": entry("<|im_end|>")}
    });
    load(&Files { tokenizer_json: file.to_string().into_bytes(), ..files() })
}

fn ids(tokenizer: &Tokenizer, text: &str, options: TokenOptions) -> Result<Vec<u32>, Miss> {
    let limits = Limits { max_model_len: Some(100), ..Limits::default() };
    let tokens = tokenizer.tokens(&Input::Text(text.into()), &options, &limits)?;
    Ok(tokens.into_iter().map(|id| id.0).collect())
}

fn message(role: &str, text: &str) -> Message {
    Message { role: role.into(), content: vec![Part { text: text.into(), ..Part::default() }], ..Message::default() }
}

fn chat(messages: Vec<Message>) -> Chat {
    Chat { messages, add_generation_prompt: true, ..Chat::default() }
}

fn hello() -> Chat {
    chat(vec![message("user", "Hello")])
}

/// `hello` rendered with the template `source`.
fn rendered(source: &str, chat: &Chat) -> Result<String, Miss> {
    load(&Files { chat_template: Some(source.into()), ..files() }).render(chat, &Limits::default())
}

const TO: fn(usize) -> Option<Truncate> = |keep| Some(Truncate::To(keep));

#[test]
fn text_gets_its_special_tokens_unless_told_otherwise() {
    let tokenizer = with_special_tokens();
    let bare = ids(&tiny(), "the engine", TokenOptions::default()).unwrap();
    let with = ids(&tokenizer, "the engine", TokenOptions::default()).unwrap();
    assert_eq!(with[1..with.len() - 1], bare);
    let without = TokenOptions { add_special_tokens: Some(false), ..TokenOptions::default() };
    assert_eq!(ids(&tokenizer, "the engine", without).unwrap(), bare);
}

#[test]
fn truncation_keeps_the_end_and_the_special_tokens() {
    let tokenizer = with_special_tokens();
    let whole = ids(&tokenizer, "one two three four", TokenOptions::default()).unwrap();
    let kept =
        ids(&tokenizer, "one two three four", TokenOptions { truncate: TO(4), ..TokenOptions::default() }).unwrap();
    assert_eq!(kept, [&whole[..1], &whole[whole.len() - 3..]].concat());
    let all = TokenOptions { truncate: TO(whole.len()), ..TokenOptions::default() };
    assert_eq!(ids(&tokenizer, "one two three four", all).unwrap(), whole);
    let none = TokenOptions { truncate: TO(2), ..TokenOptions::default() };
    assert_eq!(ids(&tokenizer, "one two three four", none), Err(Miss::Truncate));
}

#[test]
fn truncation_of_a_named_side_cuts_special_tokens_too() {
    let tokenizer = with_special_tokens();
    let whole = ids(&tokenizer, "one two three four", TokenOptions::default()).unwrap();
    let cut = |side| TokenOptions { truncate: TO(3), truncation_side: Some(side), ..TokenOptions::default() };
    assert_eq!(ids(&tokenizer, "one two three four", cut(Side::Left)).unwrap(), whole[whole.len() - 3..]);
    assert_eq!(ids(&tokenizer, "one two three four", cut(Side::Right)).unwrap(), whole[..3]);
}

#[test]
fn truncation_to_the_model_needs_its_length() {
    let options = TokenOptions { truncate: Some(Truncate::ToModel { reserve: 1 }), ..TokenOptions::default() };
    let tokens: Vec<TokenId> = (0..200).map(TokenId).collect();
    let input = Input::Tokens(tokens.clone());
    let limits = Limits { max_model_len: Some(100), ..Limits::default() };
    assert_eq!(tiny().tokens(&input, &options, &limits).unwrap(), tokens[101..]);
    assert_eq!(tiny().tokens(&input, &options, &Limits::default()), Err(Miss::Truncate));
}

#[test]
fn token_ids_pass_unchanged_up_to_the_bound() {
    let tokens: Vec<TokenId> = [7, u32::MAX, 0].map(TokenId).to_vec();
    let input = Input::Tokens(tokens.clone());
    assert_eq!(tiny().tokens(&input, &TokenOptions::default(), &Limits::default()).unwrap(), tokens);
    let short = Limits { max_tokens: 2, ..Limits::default() };
    assert_eq!(tiny().tokens(&input, &TokenOptions::default(), &short).unwrap(), tokens[..2]);
}

#[test]
fn far_too_much_text_is_not_tokenized() {
    let limits = Limits { max_tokens: 10, ..Limits::default() };
    let input = Input::Text("a".repeat(1000));
    assert_eq!(tiny().tokens(&input, &TokenOptions::default(), &limits), Err(Miss::TooLong));
}

#[test]
fn no_token_is_a_miss() {
    let none = TokenOptions { truncate: TO(0), ..TokenOptions::default() };
    assert_eq!(ids(&tiny(), "x", none), Err(Miss::NoTokens));
    let empty = Input::Tokens(Vec::new());
    assert_eq!(tiny().tokens(&empty, &TokenOptions::default(), &Limits::default()), Err(Miss::NoTokens));
}

#[test]
fn a_chat_is_rendered_with_the_model_s_own_template() {
    let chat = chat(vec![message("system", "Be short."), message("user", "Hello")]);
    let text = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(tiny().render(&chat, &Limits::default()).unwrap(), text);
    let rendered = tiny().tokens(&Input::Chat(Box::new(chat)), &TokenOptions::default(), &Limits::default()).unwrap();
    assert_eq!(
        rendered,
        tiny().tokens(&Input::Text(text.into()), &TokenOptions::default(), &Limits::default()).unwrap()
    );
}

#[test]
fn tools_and_tool_calls_are_written_as_python_writes_them() {
    let json = |text: &str| serde_json::from_str::<Json>(text).unwrap();
    let shown =
        json(r#"{"id": "c", "function": {"arguments": {"city": "Paris", "n": 2.0}, "name": "f"}, "type": "function"}"#);
    let call = ToolCall { shown, arguments: String::new() };
    let assistant = Message { tool_calls: Some(vec![call]), ..message("assistant", "") };
    let mut chat = chat(vec![message("user", "Hi"), assistant]);
    chat.tools = Some(vec![json(r#"{"type": "function", "function": {"name": "f", "description": null}}"#)]);
    let text = tiny().render(&chat, &Limits::default()).unwrap();
    assert!(text.contains(r#"{"type": "function", "function": {"name": "f", "description": null}}"#), "{text}");
    assert!(text.contains("\nf {\"city\": \"Paris\", \"n\": 2.0}<|im_end|>"), "{text}");
}

#[test]
fn the_last_message_can_be_left_open() {
    let mut chat = chat(vec![message("user", "Hi"), message("assistant", "Roses are ")]);
    chat.add_generation_prompt = false;
    chat.continue_final_message = true;
    let text = tiny().render(&chat, &Limits::default()).unwrap();
    assert!(text.ends_with("assistant\nRoses are "), "{text:?}");
    let trims = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}";
    assert_eq!(rendered(trims, &chat).unwrap(), "<Hi><Roses are");
    assert_eq!(rendered("{% for m in messages %}{{ m.content | length }}{% endfor %}", &chat), Err(Miss::Rejected));
    chat.add_generation_prompt = true;
    assert_eq!(tiny().render(&chat, &Limits::default()), Err(Miss::Rejected));
}

#[test]
fn what_the_engine_passes_wins_over_what_the_request_passes() {
    let mut chat = hello();
    chat.template_kwargs = vec![
        ("add_generation_prompt".into(), Json::Bool(false)),
        ("eos_token".into(), Json::Text("E".into())),
        ("x".into(), Json::Int(5)),
    ];
    chat.reasoning_effort = Some("none".into());
    let source = "{{ add_generation_prompt }} {{ eos_token }} {{ x }} {{ reasoning_effort }} {{ enable_thinking }} {{ tools }} {{ bos_token }}";
    assert_eq!(rendered(source, &chat).unwrap(), "True E 5 none False None ");
}

#[test]
fn a_template_s_own_refusal_is_told_from_what_is_not_known() {
    assert_eq!(rendered("{{ raise_exception('no') }}", &hello()), Err(Miss::Rejected));
    assert_eq!(rendered("{{ messages | no_such_filter }}", &hello()), Err(Miss::Template));
    assert_eq!(rendered("{{ messages.items }}", &hello()).unwrap(), "");
    assert_eq!(rendered("{{ messages[0].items }}", &hello()), Err(Miss::Template));
    assert_eq!(rendered("{{ 'x' ~ messages[0].items }}", &hello()), Err(Miss::Template));
    assert_eq!(rendered("{{ strftime_now('%Y') }}", &hello()), Err(Miss::Clock));
    let endless = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}";
    assert_eq!(rendered(endless, &hello()), Err(Miss::Work));
    assert_eq!(rendered("{{ 'x' * 10000000000 }}", &hello()), Err(Miss::Work));
    assert_eq!(rendered("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", &hello()), Err(Miss::Template));
}

#[test]
fn the_time_comes_from_outside() {
    let tokenizer = load(&Files { chat_template: Some("{{ strftime_now('%d %b %Y') }}".into()), ..files() });
    let limits = Limits { now: Some(WallTime::from_seconds(1_796_000_000)), ..Limits::default() };
    assert_eq!(tokenizer.render(&hello(), &limits).unwrap(), "30 Nov 2026");
}

#[test]
fn a_template_file_wins_over_the_one_in_the_configuration() {
    assert_eq!(rendered("file", &hello()).unwrap(), "file");
}

#[test]
fn of_several_templates_the_one_for_tools_is_taken_when_there_are_tools() {
    let config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "E", "chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]});
    let files = Files { tokenizer_config: Some(config.to_string().into_bytes()), ..files() };
    let trusting = EngineOptions { trust_request_template: true, ..EngineOptions::default() };
    let tokenizer = Tokenizer::load(&files, trusting).unwrap();
    let render = |chat: &Chat| tokenizer.render(chat, &Limits::default()).unwrap();
    let with_tools = Chat { tools: Some(vec![Json::Null]), ..hello() };
    let by_name = Chat { template: Some("tool_use".into()), ..hello() };
    assert_eq!([render(&hello()), render(&with_tools), render(&by_name)], ["plain", "tools", "tools"]);
}

#[test]
fn a_request_s_own_template_counts_only_where_the_engine_trusts_it() {
    let chat = Chat { template: Some("mine".into()), ..hello() };
    assert_eq!(tiny().render(&chat, &Limits::default()), Err(Miss::RequestTemplate));
    let trusting = EngineOptions { trust_request_template: true, ..EngineOptions::default() };
    assert_eq!(Tokenizer::load(&files(), trusting).unwrap().render(&chat, &Limits::default()).unwrap(), "mine");
}

#[test]
fn generation_tags_print_nothing() {
    let source = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}|{% generation %}x{% endgeneration %}";
    assert_eq!(rendered(source, &hello()).unwrap(), "Hello|x");
}

#[test]
fn without_a_template_text_works_and_chats_are_a_miss() {
    let tokenizer = load(&Files { tokenizer_config: None, ..files() });
    assert!(tokenizer.template_missing());
    assert!(ids(&tokenizer, "x", TokenOptions::default()).is_ok());
    assert_eq!(tokenizer.render(&hello(), &Limits::default()), Err(Miss::NoTemplate));
    let status = tokenizer.status();
    assert_eq!((status.text, status.chat, status.template), (None, Some(Miss::NoTemplate), None));
}

#[test]
fn a_broken_template_shows_in_the_status() {
    let tokenizer = load(&Files { chat_template: Some("{% if %}".into()), ..files() });
    let status = tokenizer.status();
    assert_eq!((status.text, status.chat), (None, Some(Miss::Template)));
    assert!(status.template.unwrap().contains("syntax"));
    let status = tiny().status();
    assert_eq!((status.text, status.chat, status.template), (None, None, None));
    assert!(matches!(status.backend, Backend::Reference(_)));
    assert_eq!(tiny().quick().status(), Status { backend: Backend::Fast, cuts: true, ..tiny().status() });
}

#[test]
fn special_tokens_that_may_be_elsewhere_make_a_template_that_prints_them_doubtful() {
    let config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ bos_token }}x"});
    let tokenizer = load(&Files { tokenizer_config: Some(config.to_string().into_bytes()), ..files() });
    assert_eq!(tokenizer.status().chat, Some(Miss::Template));
}

#[test]
fn models_without_a_template_of_their_own_are_misses_by_name() {
    let with_config =
        |config: serde_json::Value| load(&Files { config: Some(config.to_string().into_bytes()), ..files() });
    let harmony = with_config(json!({"model_type": "gpt_oss"}));
    assert_eq!(harmony.render(&hello(), &Limits::default()), Err(Miss::Harmony));
    assert!(ids(&harmony, "x", TokenOptions::default()).is_ok());
    let own = with_config(json!({"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}));
    assert_eq!(own.status().chat, Some(Miss::Renderer));
}

#[test]
fn a_class_that_replaces_the_pipeline_does_so_unless_the_engine_is_older() {
    let config =
        |class: &str| Some(json!({"tokenizer_class": class, "eos_token": "<|im_end|>"}).to_string().into_bytes());
    let llama = Some(br#"{"model_type": "llama"}"#.to_vec());
    let files = Files { tokenizer_config: config("LlamaTokenizerFast"), config: llama, ..files() };
    let never = EngineOptions { rebuild: Rebuild::Never, ..EngineOptions::default() };
    let (rebuilt, plain) = (load(&files), Tokenizer::load(&files, never).unwrap());
    let text = |tokenizer: &Tokenizer| ids(tokenizer, "the engine", TokenOptions::default());
    assert_eq!(text(&plain), text(&tiny()));
    assert_ne!(text(&rebuilt), text(&plain));
    // Without the model's type nobody knows which of the two it is, and of a class that is not known, never.
    let without_type = load(&Files { config: None, ..files.clone() });
    assert_eq!(
        (without_type.status().text, text(&without_type)),
        (Some(Miss::TokenizerClass), Err(Miss::TokenizerClass))
    );
    let unknown = load(&Files { tokenizer_config: config("CohereTokenizer"), ..files });
    assert_eq!(text(&unknown), Err(Miss::TokenizerClass));
}

#[test]
fn files_that_are_none_are_errors() {
    let broken = |files: Files| Tokenizer::load(&files, EngineOptions::default()).unwrap_err().to_string();
    assert_eq!(broken(Files { tokenizer_json: b"{}".to_vec(), ..files() }), "tokenizer.json is not a tokenizer");
    let config = Some(b"[".to_vec());
    assert_eq!(
        broken(Files { tokenizer_config: config.clone(), ..files() }),
        "tokenizer_config.json is not understood"
    );
    assert_eq!(broken(Files { config, ..files() }), "config.json is not understood");
}

#[test]
fn a_template_that_loops_is_known_for_it_and_a_small_chat_that_makes_one_loop_stops_soon() {
    let tokenizer = |source: &str| load(&Files { chat_template: Some(source.into()), ..files() });
    let always = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}";
    assert!(tokenizer(always).is_heavy());
    let sometimes = tokenizer(&format!("{{% if tools %}}{always}{{% endif %}}"));
    assert!(!sometimes.is_heavy() && !tiny().is_heavy());
    let chat = Chat { tools: Some(vec![Json::Map(Vec::new())]), ..hello() };
    assert_eq!(sometimes.render(&chat, &Limits::default()), Err(Miss::Work));
    // Enough for a small chat's own template, and as much as ever for a large one.
    let loops =
        |turns: usize| "{% for i in range(TURNS) %}{% set x = i %}{% endfor %}y".replace("TURNS", &turns.to_string());
    let large = Chat { messages: vec![message("user", &"x".repeat(5000))], ..hello() };
    let render = |source: &str, chat: &Chat| tokenizer(source).render(chat, &Limits::default());
    assert_eq!(render(&loops(2000), &hello()).unwrap(), "y");
    let guarded = format!("{{% if messages[0].content | length > 20 %}}{}{{% endif %}}", loops(50_000));
    assert_eq!(render(&guarded, &large).unwrap(), "y");
    let small = Chat { messages: vec![message("user", &"x".repeat(30))], ..hello() };
    assert_eq!(render(&guarded, &small), Err(Miss::Work));
}

#[test]
fn a_model_that_speaks_harmony_needs_no_template_and_heeds_no_options() {
    let tokenizer = speaking_harmony();
    let status = tokenizer.status();
    assert!(!tokenizer.template_missing());
    assert_eq!((status.text, status.chat, status.template), (None, None, None));
    let limits = Limits { now: Some(WallTime::from_seconds(0)), max_model_len: Some(20), ..Limits::default() };
    let given = TokenOptions { add_special_tokens: Some(true), truncate: TO(3), truncation_side: Some(Side::Right) };
    let tokens =
        |chat: Chat, options: TokenOptions| tokenizer.tokens(&Input::Chat(Box::new(chat)), &options, &limits).unwrap();
    let plain = tokens(hello(), TokenOptions::default());
    assert_eq!(tokens(hello(), given), plain);
    // By the Responses API a prompt is cut to what fits the model.
    let fitting = TokenOptions { truncate: Some(Truncate::ToModel { reserve: 0 }), ..TokenOptions::default() };
    assert_eq!(tokens(Chat { api: Api::Responses, ..hello() }, fitting), plain[plain.len() - 20..]);
    // Its text becomes the same tokens.
    let text = tokenizer.render(&hello(), &limits).unwrap();
    let options = TokenOptions { add_special_tokens: Some(false), ..TokenOptions::default() };
    assert_eq!(tokenizer.tokens(&Input::Text(text), &options, &limits).unwrap(), plain);
    let mut parts = hello();
    parts.messages[0].content.push(Part { text: "x".into(), ..Part::default() });
    assert_eq!(tokenizer.render(&parts, &limits), Err(Miss::Parts));
    assert_eq!(tokens(parts, TokenOptions::default()).len(), plain.len() + 1);
}

fn inline(source: &str) -> Result<String, Miss> {
    let messages = ["a", "b", "c"].map(|text| message(if text == "b" { "user" } else { "system" }, text));
    rendered(source, &Chat { api: Api::Messages, ..chat(messages.to_vec()) })
}

#[test]
fn system_messages_within_a_conversation_go_to_the_front_where_the_template_wants_them_there() {
    let all = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}";
    assert_eq!(inline(all).unwrap(), "s:a u:b s:c ");
    let first = format!(
        "{{% for m in messages %}}{{% if m.role == 'system' and not loop.first %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{% endfor %}}{all}"
    );
    assert_eq!(inline(&first).unwrap(), "s:ac u:b ");
    // The engine asks without special tokens, and takes what goes wrong then for a no.
    let special = "{% for m in messages %}{{ eos_token + m.content }}{% endfor %}";
    assert_eq!(inline(special).unwrap(), "<|im_end|>ac<|im_end|>b");
    let clock = format!("{{% if messages | length == 4 %}}{{% set day = strftime_now('%d') %}}{{% endif %}}{all}");
    assert_eq!(inline(&clock).unwrap(), "s:ac u:b ");
    let unknown = format!("{all}{{% if messages | length == 4 %}}{{{{ messages | no_such_filter }}}}{{% endif %}}");
    assert_eq!(inline(&unknown), Err(Miss::InlineSystem));
}

#[test]
fn no_thinking_is_the_effort_none_unless_the_template_makes_nothing_of_it() {
    let off = |source: &str| rendered(source, &Chat { thinking_off: true, ..hello() });
    assert_eq!(off("{{ reasoning_effort }} {{ enable_thinking }}").unwrap(), "none False");
    assert_eq!(off("{{ enable_thinking }}").unwrap(), "False");
    assert_eq!(off("plain").unwrap(), "plain");
    // As of an effort that it does not know.
    let unknown = "{% if reasoning_effort == 'low' %}little{% else %}much{% endif %}";
    assert_eq!(off(unknown).unwrap(), "little");
    let refuses = "{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}";
    assert_eq!(off(refuses).unwrap(), "low");
}

/// JSON that looks like what clients send, in any order and any place.
fn json_like() -> impl Strategy<Value = serde_json::Value> {
    const WORDS: &str = "user assistant system developer tool text input_text output_text image_url thinking tool_use tool_result function \
        message function_call function_call_output reasoning reasoning_text auto none low disabled object string array c1 {} {\"a\":1} <|start|>";
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let leaf = prop_oneof![
        4 => prop::sample::select(words).prop_map(serde_json::Value::from),
        1 => any::<bool>().prop_map(serde_json::Value::from),
        1 => any::<i64>().prop_map(serde_json::Value::from),
        1 => any::<f64>().prop_map(serde_json::Value::from),
        1 => "\\PC{0,6}".prop_map(serde_json::Value::from),
        1 => Just(serde_json::Value::Null),
    ];
    leaf.prop_recursive(6, 60, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(serde_json::Value::from),
            prop::collection::vec((prop::sample::select(keys()), inner), 0..6)
                .prop_map(|entries| entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        ]
    })
}

fn keys() -> Vec<&'static str> {
    "role content type text name tool_calls id function arguments tool_call_id tool_use_id input output call_id summary status parameters properties \
     input_schema description default enum oneOf items required nullable effort strict reasoning thinking"
        .split_whitespace()
        .collect()
}

/// A body with some of the fields that the three chat APIs have.
fn body() -> impl Strategy<Value = serde_json::Value> {
    const FIELDS: &str = "messages input instructions system tools documents chat_template_kwargs reasoning thinking output_config \
        truncation truncate_prompt_tokens add_generation_prompt continue_final_message reasoning_effort";
    let message = json_like().prop_map(|content| json!({"role": "user", "content": content, "type": "message"}));
    let list = prop::collection::vec(prop_oneof![message, json_like()], 1..4).prop_map(serde_json::Value::from);
    let value = prop_oneof![2 => list, 3 => json_like()];
    let fields: Vec<&str> = FIELDS.split_whitespace().collect();
    let rest = prop::collection::vec((prop::sample::select(fields), value.clone()), 0..4);
    (value.clone(), value, rest).prop_map(|(messages, input, rest)| {
        let given = [("messages", messages), ("input", input)];
        given.into_iter().chain(rest).map(|(key, value)| (key.to_owned(), value)).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a client says, there is an answer, and never more tokens than asked for.
    #[test]
    fn any_text_has_an_answer(text in "\\PC{0,60}", keep in 0_usize..20, special: bool) {
        let options = TokenOptions { truncate: Some(Truncate::To(keep)), add_special_tokens: Some(special), ..TokenOptions::default() };
        if let Ok(ids) = ids(&with_special_tokens(), &text, options) {
            prop_assert!(!ids.is_empty() && ids.len() <= keep);
        }
    }

    /// A prompt that goes on where another ends shares all tokens up to a word before the end.
    #[test]
    fn a_longer_prompt_begins_with_the_shorter_one(words in prop::collection::vec("[a-z]{1,8}", 2..20)) {
        let whole = words.join("\n");
        let shorter = words[..words.len() - 1].join("\n");
        let (whole, shorter) = (ids(&tiny(), &whole, TokenOptions::default()).unwrap(), ids(&tiny(), &shorter, TokenOptions::default()).unwrap());
        prop_assert!(whole.starts_with(&shorter));
    }

    /// No template and no value makes a rendering panic.
    #[test]
    fn any_template_has_an_answer(source in r"(\{\{ ?(messages|x|y)(\.[a-z]{1,6}|\[[-0-9:]{1,4}\]| ?\| ?[a-z]{3,8}|\(\))? ?\}\}|\{% ?(if x|endif|for m in messages|endfor|set y = x|else|break) ?%\}|[a-z \n]{0,4}){0,8}", x in 0_i128..9) {
        let chat = Chat { template_kwargs: vec![("x".into(), Json::Int(x))], ..hello() };
        let _answer = rendered(&source, &chat);
    }

    /// No body of any API makes parsing or rendering panic, with a template or without one.
    #[test]
    fn any_body_has_an_answer(body in body()) {
        static TOKENIZERS: OnceLock<[Tokenizer; 2]> = OnceLock::new();
        let tokenizers = TOKENIZERS.get_or_init(|| [tiny(), speaking_harmony()]);
        for path in ["/v1/chat/completions", "/v1/messages", "/v1/responses"] {
            let body = body.to_string();
            let request = openai::Request { method: "POST", path, model_header: None, body: body.as_bytes() };
            let Ok(prompt) = openai::parse(&request) else { continue };
            let limits = Limits { now: Some(WallTime::from_seconds(0)), ..Limits::default() };
            for tokenizer in tokenizers {
                let _ids = tokenizer.tokens(&prompt.inputs[0], &prompt.options, &limits);
            }
        }
    }
}

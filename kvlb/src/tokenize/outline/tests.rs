//! What a chat becomes by an outline is what it becomes without one.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;
use proptest::sample::select;

use super::super::date::WallTime;
use super::super::habits::Shown;
use super::super::names::{Link, Memory};
use super::super::template::{SpecialTokens, Template};
use super::*;
use crate::openai::{Chat, Json, Message, Part, ToolCall};

/// Keeps everything, and counts the outlines.
#[derive(Default)]
struct Kept(Mutex<HashMap<u128, Arc<Shape>>>);

impl Memory for Kept {
    fn seed(&self) -> u64 {
        7
    }
    fn recall(&self, _key: u128) -> Option<Arc<Link>> {
        None
    }
    fn keep(&self, _key: u128, _link: Arc<Link>) {}
    fn shape(&self, key: u128) -> Option<Arc<Shape>> {
        self.0.lock().get(&key).cloned()
    }
    fn keep_shape(&self, key: u128, shape: Arc<Shape>) {
        self.0.lock().insert(key, shape);
    }
}

impl Kept {
    /// Shapes, and outlines among them.
    fn counts(&self) -> (usize, usize) {
        let shapes = self.0.lock();
        (shapes.len(), shapes.values().filter(|shape| matches!(shape.0, Known::Outline(_))).count())
    }
}

fn template(source: &str) -> Template {
    Template::new(source).unwrap()
}

fn render(template: &Template, chat: &Chat, memory: Option<&dyn Memory>) -> Result<String, super::super::Miss> {
    let now = Some(WallTime::from_seconds(1_795_996_799));
    template.render(&Shown::plainly(chat), &SpecialTokens::default(), now, memory)
}

fn message(role: &str, parts: &[&str]) -> Message {
    let content = parts.iter().map(|text| Part { text: (*text).into(), ..Part::default() }).collect();
    Message { role: role.into(), content, ..Message::default() }
}

fn chat(messages: &[(&str, &str)]) -> Chat {
    let messages = messages.iter().map(|(role, text)| message(role, &[text])).collect();
    Chat { messages, add_generation_prompt: true, ..Chat::default() }
}

/// Templates that do with texts what those of models do.
const READABLE: [&str; 9] = [
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}",
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '</s>' }}{% endfor %}",
    "{% set first = messages[0].content %}{% for m in messages[::-1] %}{% if m.content.startswith('<t>') and not m.content.endswith('</t>') %}!{% endif %}{% endfor %}{{ first.strip('x') ~ '.' }}",
    "{% for m in messages %}{% if '</t>' in m.content %}{% set c = m.content.split('</t>')[-1].lstrip('\\n') %}{{ c }}{% else %}{{ m.content.replace('<t>', '[') }}{% endif %}{% endfor %}",
    "{% set ns = namespace(all='', n=0) %}{% for m in messages %}{% set ns.all = ns.all + m.content + '|' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.all | trim }}{{ ns.n }}",
    "{% macro say(text, last=false) %}{% if text is string %}{{ text }}{% else %}{% for part in text %}{{ part.text | trim }}{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ say(m.content, loop.last) }}{% for p in m.content %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m['content'] %}{{ p['text'] }}{{ p.type }}{% endfor %}{% endif %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}",
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{% if m.role == 'tool' %}{{ m.content | tojson }}{% elif m.content %}{{ m.content if loop.first or m.content != 'x' else 'no' }}{% else %}-{% endif %}{% endfor %}",
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}{% if m.role == 'none' %}{{ raise_exception('no ' + m.content) }}{% endif %}{% if loop.first and system %}{{ system + '\\n' }}{% endif %}{{ m.get('content') }}{{ m.reasoning_content }}{% endfor %}",
];

#[test]
fn what_templates_of_models_do_with_texts_is_known() {
    for source in READABLE {
        assert!(template(source).has_outlines(), "{source}");
    }
}

#[test]
fn whatever_else_is_done_with_a_text_is_not_known() {
    for inner in [
        "{{ m.content | length }}",
        "{{ m.content | upper }}",
        "{{ m.content[0] }}",
        "{{ m.content[1:] }}",
        "{{ m.content * 2 }}",
        "{{ m.content < 'x' }}",
        "{{ m.content == m.role }}",
        "{{ m.content == messages[0].content }}",
        "{{ m.content in 'abc' }}",
        "{{ m.role in m.content }}",
        "{{ m.content.split() }}",
        "{{ m.content.split(m.role)[0] }}",
        "{{ m.content.upper() }}",
        "{{ m.content.strip(m.role) }}",
        "{{ ', '.join([m.content]) }}",
        "{{ '%s' % m.content }}",
        "{{ (m.content + 'x') in 'abc' }}",
        "{{ (m.content + 'x').startswith('abc') }}",
        "{{ ('x' ~ m.content) | length }}",
        "{% set x %}{{ m.content }}{% endset %}{{ x | length }}",
        "{% set x = [m.content] %}{{ x }}",
        "{% set x = {'c': m.content} %}{{ x.c | length }}",
        "{% set x = m.content %}{{ x | upper }}",
        "{% set x = m %}{{ x.content | upper }}",
        "{% set x = messages | first %}{{ x.content | upper }}",
        "{% set ns = namespace(c='') %}{% set ns.c = m.content %}{{ ns.c | upper }}",
        "{% set ns = namespace(c=m.content) %}{{ ns['c'] | upper }}",
        "{% macro f(c) %}{{ c | upper }}{% endmacro %}{{ f(m.content) }}",
        "{% macro f(c) %}{{ c }}{% endmacro %}{{ f(m.content) | upper }}",
        "{% macro f() %}{{ m.content }}{% endmacro %}{% set g = f %}{{ g() | upper }}",
        "{% for k, v in m.items() %}{{ v | upper }}{% endfor %}",
        "{% for v in m.values() %}{{ v | upper }}{% endfor %}",
        "{{ m[m.role] }}",
        "{{ loop.previtem.content }}",
        "{{ loop.changed(m.content) }}",
        "{{ messages | map(attribute='content') | join }}",
        "{{ messages | selectattr('content', 'equalto', 'x') | list | length }}",
        "{{ strftime_now('%H') }}",
    ] {
        let source = format!("{{% for m in messages %}}{inner}{{% endfor %}}");
        assert!(!template(&source).has_outlines(), "{inner}");
    }
}

#[test]
fn the_third_chat_of_a_shape_is_made_by_its_outline() {
    let (template, memory) = (template(READABLE[1]), Kept::default());
    for (number, text) in ["one", " two\n", "three", "four"].into_iter().enumerate() {
        let text = chat(&[("user", "the same"), ("assistant", text)]);
        assert_eq!(render(&template, &text, Some(&memory)), render(&template, &text, None));
        // The second one has space around it, which is part of the shape.
        assert_eq!(memory.counts(), [(1, 0), (2, 0), (2, 1), (2, 1)][number]);
    }
    let other = chat(&[("user", "another"), ("assistant", "five")]);
    assert_eq!(render(&template, &other, Some(&memory)).unwrap(), "<user>another</s><assistant>five</s>");
    assert_eq!(memory.counts(), (2, 1), "no shape more: the outline was used");
}

#[test]
fn a_text_in_a_notation_of_its_own_has_no_outline() {
    let (template, memory) = (template(READABLE[7]), Kept::default());
    for text in ["a", "\"b\"", "c", "\u{e9}"] {
        let chat = chat(&[("user", "x"), ("tool", text)]);
        assert_eq!(render(&template, &chat, Some(&memory)), render(&template, &chat, None));
    }
    assert_eq!(memory.counts(), (1, 0));
}

#[test]
fn a_day_has_outlines_of_its_own() {
    let (template, memory) = (template("{{ strftime_now('%d') }}{{ messages[0].content }}"), Kept::default());
    let on = |day: i64, text: &str| {
        let chat = chat(&[("user", text)]);
        let now = Some(WallTime::from_seconds(day * 86_400));
        template.render(&Shown::plainly(&chat), &SpecialTokens::default(), now, Some(&memory)).unwrap()
    };
    assert_eq!([on(0, "a"), on(0, "b"), on(0, "c"), on(1, "d")], ["01a", "01b", "01c", "02d"]);
}

#[test]
fn marks_in_a_chat_are_texts_like_others() {
    let (template, memory) = (template(READABLE[0]), Kept::default());
    let mark = mark(0).unwrap();
    for text in ["a", "b", "c"] {
        let chat = chat(&[("user", &mark), ("assistant", text), ("user", &format!("{mark}x"))]);
        let expected = format!("<user>{mark}<assistant>{text}<user>{mark}x");
        assert_eq!(render(&template, &chat, Some(&memory)).unwrap(), expected);
    }
}

/// Texts with much in them that the templates look for.
fn text() -> impl Strategy<Value = String> {
    const PIECES: [&str; 16] = [
        "",
        " ",
        "\n",
        "x",
        "a",
        "b c",
        "<t>",
        "</t>",
        "<",
        "t>",
        "\u{e9}\u{3000}",
        "\u{f0000}",
        "\u{f1000}",
        "'",
        "\"",
        "{{ 1 }}",
    ];
    prop::collection::vec(select(&PIECES[..]), 0..5).prop_map(|pieces| pieces.concat())
}

fn one_message() -> impl Strategy<Value = Message> {
    let role = select(&["user", "assistant", "system", "tool"][..]);
    let calls = prop::option::weighted(0.2, text());
    (role, prop::collection::vec(text(), 0..3), calls, prop::option::weighted(0.2, text())).prop_map(
        |(role, parts, call, reasoning)| {
            let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            let call = call.map(|name| ToolCall { shown: Json::Text(name), arguments: String::new() });
            Message { tool_calls: call.map(|call| vec![call]), reasoning, ..message(role, &parts) }
        },
    )
}

/// A few shapes, each with several chats.
fn chats() -> impl Strategy<Value = Vec<Chat>> {
    let family = (prop::collection::vec(one_message(), 1..5), any::<bool>(), prop::collection::vec(text(), 12))
        .prop_map(|(messages, add_generation_prompt, texts)| {
            let first = Chat { messages, add_generation_prompt, ..Chat::default() };
            let mut chats = vec![first.clone(), first.clone()];
            for texts in texts.chunks(2) {
                let mut other = first.clone();
                let parts = other.messages.iter_mut().flat_map(|message| &mut message.content);
                for (part, text) in parts.zip(texts) {
                    part.text.clone_from(text);
                }
                chats.push(other);
            }
            chats
        });
    prop::collection::vec(family, 1..3).prop_map(|families| families.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn outlines_change_no_text(chats in chats()) {
        for source in READABLE {
            let (template, memory) = (template(source), Kept::default());
            for chat in &chats {
                prop_assert_eq!(render(&template, chat, Some(&memory)), render(&template, chat, None), "{}", source);
            }
        }
    }
}

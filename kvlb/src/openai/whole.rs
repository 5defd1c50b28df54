//! A request's prompts as one run of bytes, for whoever compares what prompts begin with.

use super::prompt::{Chat, Input, Message, Part, Prompt};

/// Bytes of a prompt that are compared: some 64 thousand tokens. Prompts that are alike for so long are alike.
const BYTES_MAX: usize = 256 << 10;
/// What ends a role, a text and a message: no text of a client's has it as a rule, and where one has, two prompts look more
/// alike than they are.
const END: u8 = 0x1e;

/// The prompts in the order in which engines read them: tools, then messages as who says what. A conversation's next turn
/// begins with the whole of the last one.
pub(super) fn bytes(prompt: &Prompt) -> Vec<u8> {
    let mut whole = Vec::new();
    for input in &prompt.inputs {
        match input {
            Input::Text(text) => add(&mut whole, text.as_bytes()),
            Input::Tokens(ids) => {
                ids.iter().take(BYTES_MAX / size_of::<u32>()).for_each(|id| add(&mut whole, &id.0.to_le_bytes()));
            }
            Input::Chat(chat) => add_chat(&mut whole, chat),
        }
        if prompt.inputs.len() > 1 {
            add(&mut whole, &[END]);
        }
    }
    whole
}

fn add_chat(whole: &mut Vec<u8>, chat: &Chat) {
    for tool in chat.tools.iter().flatten() {
        add(whole, tool.dumps().unwrap_or_default().as_bytes());
        add(whole, &[END]);
    }
    for message in &chat.messages {
        if whole.len() >= BYTES_MAX {
            return;
        }
        add_message(whole, message);
    }
}

fn add_message(whole: &mut Vec<u8>, message: &Message) {
    add(whole, message.role.as_bytes());
    add(whole, &[END]);
    let texts = message.content.iter().map(|Part { text, .. }| text.as_bytes());
    let reasoning = message.reasoning.iter().map(String::as_bytes);
    for text in texts.chain(reasoning) {
        add(whole, text);
        add(whole, &[END]);
    }
    for call in message.tool_calls.iter().flatten() {
        add(whole, call.arguments.as_bytes());
        add(whole, &[END]);
    }
}

fn add(whole: &mut Vec<u8>, bytes: &[u8]) {
    let room = BYTES_MAX.saturating_sub(whole.len());
    whole.extend_from_slice(&bytes[..bytes.len().min(room)]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::{Request, parse};

    fn whole(path: &str, body: &serde_json::Value) -> Vec<u8> {
        let body = body.to_string();
        bytes(&parse(&Request { method: "POST", path, model_header: None, body: body.as_bytes() }).unwrap())
    }

    #[test]
    fn the_next_turn_begins_with_the_whole_of_the_last() {
        let system = serde_json::json!({"role": "system", "content": "You help."});
        let turn = |messages: serde_json::Value| {
            whole("/v1/chat/completions", &serde_json::json!({"model": "m", "messages": messages}))
        };
        let first = turn(serde_json::json!([system, {"role": "user", "content": "How?"}]));
        let second = turn(serde_json::json!([system, {"role": "user", "content": "How?"},
            {"role": "assistant", "content": "So."}, {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]));
        assert!(second.starts_with(&first) && second.len() > first.len());
        let other = turn(serde_json::json!([{"role": "user", "content": "How?"}]));
        assert!(!second.starts_with(&other));
    }

    #[test]
    fn texts_and_tokens_are_taken_whole_up_to_the_bound() {
        let completion =
            |prompt: serde_json::Value| whole("/v1/completions", &serde_json::json!({"model": "m", "prompt": prompt}));
        assert_eq!(completion("é".into()), "é".as_bytes());
        assert_eq!(completion(serde_json::json!([1, 258])), [1, 0, 0, 0, 2, 1, 0, 0]);
        assert_eq!(completion("x".repeat(2 * BYTES_MAX).into()).len(), BYTES_MAX);
        assert_eq!(completion(serde_json::json!(["a", "b"])), [b'a', END, b'b', END]);
    }
}

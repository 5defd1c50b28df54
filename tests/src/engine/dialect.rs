//! Answers of `/v1/messages` and `/v1/responses` in the recorded shapes: fields in their order, and the named events of a stream.

use serde_json::{Value, json};

use super::answers::Answer;
use super::call::{Call, Kind};
use super::scheduler::Finish;

/// A server-sent event with its name.
fn frame(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

/// An event of `/v1/responses`, which repeats its name and counts.
fn numbered(name: &str, number: usize, mut data: Value) -> String {
    data["sequence_number"] = json!(number);
    data["type"] = json!(name);
    frame(name, &data)
}

/// The answer that is not streamed.
pub(super) fn body(answer: &Answer, call: &Call) -> Value {
    if call.kind == Kind::Messages {
        json!({
            "id": answer.id, "type": "message", "role": "assistant", "content": [{"type": "text", "text": text(answer)}],
            "model": call.model, "stop_reason": stop_reason(answer), "usage": messages_usage(answer, call),
        })
    } else {
        response(answer, call, true)
    }
}

/// The events before the first token.
pub(super) fn opening(answer: &Answer, call: &Call) -> Vec<String> {
    if call.kind == Kind::Messages {
        let usage = json!({"input_tokens": prompt_tokens(call), "output_tokens": 0});
        let message = json!({
            "id": answer.id, "type": "message", "role": "assistant", "content": [], "model": call.model, "stop_reason": null,
            "stop_sequence": null, "usage": usage,
        });
        let block = json!({"type": "text", "text": ""});
        return vec![
            frame("message_start", &json!({"type": "message_start", "message": message})),
            frame("content_block_start", &json!({"type": "content_block_start", "content_block": block, "index": 0})),
        ];
    }
    let begun = response(answer, call, false);
    let part = json!({"annotations": [], "text": "", "type": "output_text", "logprobs": []});
    vec![
        numbered("response.created", 0, json!({"response": begun})),
        numbered("response.in_progress", 1, json!({"response": begun})),
        numbered("response.output_item.added", 2, json!({"item": item(answer, false), "output_index": 0})),
        numbered(
            "response.content_part.added",
            3,
            json!({"content_index": 0, "item_id": item_id(answer), "output_index": 0, "part": part}),
        ),
    ]
}

/// Events before the one of the first token of `/v1/responses`.
const OPENING: usize = 4;

/// The event of the latest token.
pub(super) fn token(answer: &Answer, call: &Call, text: &str) -> String {
    if call.kind == Kind::Messages {
        let delta = json!({"type": "text_delta", "text": text});
        return frame("content_block_delta", &json!({"type": "content_block_delta", "delta": delta, "index": 0}));
    }
    let delta =
        json!({"content_index": 0, "delta": text, "item_id": item_id(answer), "logprobs": [], "output_index": 0});
    numbered("response.output_text.delta", OPENING + tokens(answer) - 1, delta)
}

/// The events after the last token.
pub(super) fn closing(answer: &Answer, call: &Call) -> Vec<String> {
    if call.kind == Kind::Messages {
        let delta = json!({"stop_reason": stop_reason(answer), "stop_sequence": null});
        let usage = messages_usage(answer, call);
        return vec![
            frame("content_block_stop", &json!({"type": "content_block_stop", "index": 0})),
            frame("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage})),
            frame("message_stop", &json!({"type": "message_stop"})),
        ];
    }
    let number = OPENING + tokens(answer);
    let (id, whole) = (item_id(answer), text(answer));
    let part = part(whole);
    vec![
        // Recorded: here the number comes before the text.
        frame(
            "response.output_text.done",
            &json!({"content_index": 0, "item_id": id, "logprobs": [], "output_index": 0, "sequence_number": number,
                    "text": whole, "type": "response.output_text.done"}),
        ),
        numbered(
            "response.content_part.done",
            number + 1,
            json!({"content_index": 0, "item_id": id, "output_index": 0, "part": part}),
        ),
        numbered("response.output_item.done", number + 2, json!({"item": item(answer, true), "output_index": 0})),
        numbered("response.completed", number + 3, json!({"response": response(answer, call, true)})),
    ]
}

fn text(answer: &Answer) -> &str {
    answer.choices.first().map_or("", |choice| &choice.text)
}

fn tokens(answer: &Answer) -> usize {
    answer.choices.first().map_or(0, |choice| choice.tokens.len())
}

fn prompt_tokens(call: &Call) -> usize {
    call.prompts.iter().map(Vec::len).sum()
}

fn finish(answer: &Answer) -> Option<Finish> {
    answer.choices.first().and_then(|choice| choice.finish)
}

fn stop_reason(answer: &Answer) -> &'static str {
    if finish(answer) == Some(Finish::Length) { "max_tokens" } else { "end_turn" }
}

/// Tokens from the cache are no input here, other than in the other routes.
fn messages_usage(answer: &Answer, call: &Call) -> Value {
    let mut usage = json!({"input_tokens": prompt_tokens(call), "output_tokens": tokens(answer)});
    if answer.reporting.details {
        let cached = answer.cached_tokens(call);
        usage["input_tokens"] = json!(prompt_tokens(call).saturating_sub(cached));
        usage["cache_creation_input_tokens"] = json!(0);
        usage["cache_read_input_tokens"] = json!(cached);
    }
    usage
}

fn response(answer: &Answer, call: &Call, done: bool) -> Value {
    let cut = finish(answer) == Some(Finish::Length);
    let status = match (done, cut) {
        (false, _) => "in_progress",
        (true, true) => "incomplete",
        (true, false) => "completed",
    };
    let output = if done { vec![item(answer, true)] } else { Vec::new() };
    let cut = (done && cut).then(|| json!({"reason": "max_output_tokens"}));
    json!({
        "id": answer.id, "created_at": answer.created, "incomplete_details": cut, "instructions": call.instructions,
        "metadata": null, "model": call.model, "object": "response", "output": output, "parallel_tool_calls": true,
        "temperature": 0.0, "tool_choice": "none", "tools": [], "top_p": 1.0, "background": false,
        "max_output_tokens": call.max_tokens, "max_tool_calls": null, "previous_response_id": null, "prompt": null,
        "reasoning": null, "service_tier": "auto", "status": status, "text": null, "top_logprobs": null,
        "truncation": "disabled", "usage": done.then(|| responses_usage(answer, call)), "user": null,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "kv_transfer_params": null, "ec_transfer_params": null,
        "input_messages": null, "output_messages": null,
    })
}

fn responses_usage(answer: &Answer, call: &Call) -> Value {
    let (prompt, output) = (prompt_tokens(call), tokens(answer));
    let cached = if answer.reporting.details { answer.cached_tokens(call) } else { 0 };
    json!({
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": cached, "cache_write_tokens": answer.created_cache_tokens(call), "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": output,
        "output_tokens_details": {
            "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + output,
    })
}

fn item_id(answer: &Answer) -> String {
    answer.id.replace("resp_", "msg_")
}

fn item(answer: &Answer, done: bool) -> Value {
    let (content, status) = if done { (vec![part(text(answer))], "completed") } else { (Vec::new(), "in_progress") };
    json!({
        "id": item_id(answer), "content": content, "role": "assistant", "status": status, "type": "message", "phase": null,
    })
}

fn part(text: &str) -> Value {
    json!({"annotations": [], "text": text, "type": "output_text", "logprobs": null})
}

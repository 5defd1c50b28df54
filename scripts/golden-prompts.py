"""Records what vLLM makes of requests: one JSON line per request, with the prompt's token ids.

    vllm launch render MODEL --port PORT --served-model-name m --trust-request-chat-template \
        --enable-auto-tool-choice --tool-call-parser PARSER --max-model-len 8192
    python golden-prompts.py http://127.0.0.1:PORT NAME KEY=VALUE... | gzip -9n > NAME.jsonl.gz

`KEY=VALUE` pairs become the fields of the first line (package, model_type, template). NAME picks the requests: those of
`harmony` are for gpt-oss, all others get those of the Messages and Responses APIs.
"""

import json
import sys
import time
import urllib.error
import urllib.request

GET_WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "City name"}, "unit": {"type": "string", "enum": ["c", "f"]}},
    "required": ["city"],
}


def user(content):
    return {"role": "user", "content": content}


def text(text, kind="text"):
    return {"type": kind, "text": text}


def function(name, description, parameters, **more):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters, **more}}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


SCHEMAS = {
    "empty": {"type": "object", "properties": {}},
    "no-properties": {"type": "object"},
    "no-type": {"properties": {"a": {"type": "string"}}},
    "null": None,
    "types": {"type": "object", "properties": {
        "s": {"type": "string"}, "n": {"type": "number"}, "i": {"type": "integer"}, "b": {"type": "boolean"},
        "z": {"type": "null"}, "a": {"type": "array"}, "as": {"type": "array", "items": {"type": "string"}},
        "aa": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, "any": {}, "true": True,
        "both": {"type": ["string", "null"]}, "many": {"type": ["integer", "number", 7]}, "none": {"type": []},
        "odd": {"type": "file"}, "ref": {"$ref": "#/$defs/x"}, "anyOf": {"anyOf": [{"type": "string"}]}}},
    "order": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "string"}, "m": {"type": "string"}},
              "required": ["m", "nope", 3]},
    "comments": {"type": "object", "description": "All of it\nin two lines", "properties": {
        "a": {"type": "string", "title": "Title", "description": "Description", "examples": ["x", 1, "y\"z"]},
        "b": {"type": "string", "examples": []}, "c": {"type": "number", "description": "", "title": ""},
        "d": {"type": "string", "description": "two\nlines"}}},
    "defaults": {"type": "object", "properties": {
        "a": {"type": "string", "default": "x"}, "b": {"type": "string", "enum": ["x", "y"], "default": "x"},
        "c": {"type": "number", "default": 1.0}, "d": {"type": "number", "default": 100000.0},
        "e": {"type": "boolean", "default": False}, "f": {"type": "array", "default": [1, "é\n\"", {"z": None, "a": {}}]},
        "g": {"type": "string", "default": None}, "h": {"type": "string", "enum": [], "default": "x"},
        "i": {"type": "integer", "default": -3}, "j": {"type": "integer", "default": 18446744073709551615},
        "k": {"type": "string", "default": "q\"uote\\"}}},
    "nullable": {"type": "object", "properties": {
        "a": {"type": "string", "nullable": True}, "b": {"type": ["string", "null"], "nullable": True},
        "c": {"type": "string", "enum": ["null", "x"], "nullable": True}, "d": {"type": "string", "nullable": "yes"}}},
    "enums": {"type": "object", "properties": {
        "a": {"type": "string", "enum": ["x", 1, "y"]}, "b": {"type": "string", "enum": [1]},
        "c": {"type": "integer", "enum": [1, 2]}, "d": {"enum": ["x"]}, "e": {"type": "string", "enum": "x"}}},
    "nested": {"type": "object", "properties": {"outer": {"type": "object", "description": "Outer", "properties": {
        "inner": {"type": "object", "properties": {"x": {"type": "string", "description": "deep", "default": "d"}},
                  "required": ["x"]}, "list": {"type": "array", "items": {"type": "object", "description": "Item",
                                               "properties": {"y": {"type": "integer"}}}}}}}, "required": ["outer"]},
    "oneOf": {"type": "object", "properties": {
        "a": {"oneOf": [{"type": "string", "description": "S"}, {"type": "integer", "default": 3, "nullable": True}],
              "description": "Either"},
        "b": {"oneOf": [{"type": "string", "description": "Same", "default": "v"}, {"type": "string", "enum": ["p"], "default": "p",
              "description": "Other"}], "description": "Same", "default": "dd"},
        "c": {"oneOf": [], "default": 1}, "d": {"oneOf": "x", "description": "D", "default": "e", "type": "string"},
        "e": {"oneOf": [{"type": "object", "properties": {"k": {"type": "string"}}}, {"type": "array", "items": {"type": "string"}}],
              "enum": ["q"], "default": "q", "title": "T", "examples": ["x"]},
        "f": {"oneOf": [{"type": "null"}, {"type": "string", "nullable": True}]}}, "required": ["a", "c"]},
    "top-oneOf": {"oneOf": [{"type": "object", "properties": {"a": {"type": "string"}}, "description": "A"},
                            {"type": "string", "nullable": True, "default": "x"}, {"type": "string", "enum": ["y"], "default": "y"},
                            {"oneOf": [{"type": "null"}, {"type": "number", "default": 2}]}]},
    "top-oneOf-empty": {"oneOf": []},
    "top-array": {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "integer"}]}},
    "property-oneOf-item": {"type": "object", "properties": {"l": {"type": "array", "items": {"oneOf": [
        {"type": "string", "description": "x"}, {"type": "object", "properties": {"n": {"type": "number"}}}]}}}},
    "properties-list": {"type": "object", "properties": [1]},
    "unicode": {"type": "object", "properties": {"größe": {"type": "string", "description": "Größe – 😀"}}},
}

TOOLS = [function("get_weather", "Get the weather for a city", GET_WEATHER), function("now", None, {"type": "object", "properties": {}})]
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("c1", "get_weather", '{"city":  "Paris"}')]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "21 C"}


def harmony():
    def chat(label, messages, **more):
        return label, "/v1/chat/completions", {"model": "m", "messages": messages, **more}

    for name, schema in SCHEMAS.items():
        yield chat(f"schema-{name}", [user("x")], tools=[function("f", "F", schema)])
    yield chat("description-lines", [user("x")], tools=[function("f", "a\nb\r\nc\n\nd\n", None), function("g", "", {})])
    yield chat("effort-low", [user("x")], reasoning_effort="low")
    yield chat("effort-medium", [user("x")], reasoning_effort="medium")
    yield chat("effort-none", [user("x")], reasoning_effort="none")
    yield chat("effort-minimal", [user("x")], reasoning_effort="minimal")
    yield chat("parts-words", [user([text("wor"), text(""), text("ld"), text(" one"), text("two")])])
    yield chat("parts-newlines", [user([text("a\n"), text("\nb"), text("   "), text("  c")])])
    yield chat("parts-assistant", [user("x"), {"role": "assistant", "content": [text("12"), text("34")]}, user("y")])
    yield chat("parts-assistant-empty-first", [user("x"), {"role": "assistant", "content": [text(""), text("34")]}, user("y")])
    yield chat("parts-empty", [user([])])
    yield chat("parts-refusal", [user("x"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, user("y")])
    yield chat("parts-system-two", [{"role": "system", "content": [text("wor"), text("ld")]}, user("x")])
    yield chat("parts-developer-later", [user("x"), {"role": "developer", "content": [text("wor"), text("ld")]}, user("y")])
    yield chat("system-later-empty", [user("x"), {"role": "system", "content": ""}, user("y")])
    yield chat("system-null-tools", [{"role": "system", "content": None}, user("x")], tools=TOOLS)
    yield chat("system-empty-tools", [{"role": "system", "content": ""}, user("x")], tools=TOOLS)
    yield chat("system-billing", [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nrest"}, user("x")])
    yield chat("special-text", [user("a <|start|> b")])
    yield chat("special-text-open", [user("a <|start b |> <|x|> <| <|end")])
    yield chat("special-text-split", [user([text("<|sta"), text("rt|>")])])
    yield chat("special-text-arguments", [user("x"), {**CALLED, "tool_calls": [call("c1", "f", '{"a": "<|call|>"}')]}, RESULT], tools=TOOLS)
    yield chat("reasoning-kept", [user("x"), {**CALLED, "reasoning": "Because."}, RESULT], tools=TOOLS)
    yield chat("reasoning-content-kept", [user("x"), {**CALLED, "content": "Looking.", "reasoning_content": "Because."}, RESULT], tools=TOOLS)
    yield chat("reasoning-dropped", [user("x"), {**CALLED, "reasoning": "Because."}, RESULT, {"role": "assistant", "content": "21",
               "reasoning": "Now."}, user("y"), {**CALLED, "reasoning": "Again."}, RESULT], tools=TOOLS)
    yield chat("reasoning-alone", [user("x"), {"role": "assistant", "content": "", "reasoning": "Hm."}, user("y")])
    yield chat("calls-two", [user("x"), {"role": "assistant", "content": [text("Wor"), text("ld")], "tool_calls": [
               call("c1", "get_weather", '{"city": "Paris"}'), call("c2", "now", "")]}, RESULT,
               {"role": "tool", "tool_call_id": "c2", "content": [text("12"), text("34")]}], tools=TOOLS)
    yield chat("calls-same-id", [user("x"), CALLED, RESULT, {**CALLED, "tool_calls": [call("c1", "now", "{}")]}, RESULT], tools=TOOLS)
    yield chat("call-unknown-id", [user("x"), CALLED, {"role": "tool", "tool_call_id": "zz", "content": "y"}], tools=TOOLS)
    yield chat("call-odd-name", [user("x"), {**CALLED, "tool_calls": [call("c1", "a to=b", "{}")]}, RESULT], tools=TOOLS)
    yield chat("call-arguments-list", [user("x"), {**CALLED, "tool_calls": [call("c1", "f", "[1]")]}, RESULT], tools=TOOLS)
    yield chat("tool-empty", [user("x"), CALLED, {"role": "tool", "tool_call_id": "c1", "content": ""}], tools=TOOLS)
    yield chat("role-custom", [user("x"), {"role": "critic", "content": "y"}])
    yield chat("both-true", [user("x")], continue_final_message=True, add_generation_prompt=True)


WEATHER = {"name": "get_weather", "description": "Get the weather for a city", "input_schema": GET_WEATHER}


def chats():
    def chat(label, messages, **more):
        return label, "/v1/chat/completions", {"model": "m", "messages": messages, **more}

    yield chat("parts-kinds", [user(["a", text("b"), text("c", "input_text"), text("d", "output_text")])])
    yield chat("parts-asides", [user("x"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "refusal",
               "refusal": "r"}, text("a")]}, user("y")])
    yield chat("parts-keys", [user([{**text("a"), "cache_control": {"type": "ephemeral"}, "x": [1, 2.0]}])])
    yield chat("parts-empty", [user([text(""), text("a"), text("")])])
    yield chat("parts-none", [user([])])
    yield chat("system-billing", [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nrest"}, user("x")])
    yield chat("system-billing-parts", [{"role": "system", "content": [text("x-anthropic-billing-header: cch=1"), text("b"),
               text("x-anthropic-billing-header: 2\nc", "input_text")]}, user("x")])
    yield chat("developer", [user("x"), {"role": "developer", "content": [text("a"), text("b")]}, user("y")])
    yield chat("names", [{**user("x"), "name": "n"}, {"role": "assistant", "content": "y", "name": "b"}, user("z")])
    yield chat("reasoning", [user("x"), {"role": "assistant", "content": "y", "reasoning": "r"}, user("z")])
    yield chat("reasoning-both", [user("x"), {"role": "assistant", "content": "y", "reasoning": None, "reasoning_content": "q"}, user("z")])
    yield chat("calls", [user("x"), CALLED, RESULT], tools=TOOLS)
    yield chat("calls-order", [user("x"), {"content": None, "tool_calls": [{"type": "function", "function": {"arguments": "", "name": "now"},
               "id": "c1"}], "role": "assistant"}, {**RESULT, "content": [text("a"), text("b")]}], tools=TOOLS, tool_choice="none")
    yield chat("tools-flags", [user("x")], tools=[function("f", "d", {"z": 1.0, "a": [True, None]}, strict=False, x=1), {"function": {"name": "g"},
               "type": "function", "defer_loading": True}])
    yield chat("kwargs", [user("x")], chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "none"})
    yield chat("effort", [user("x")], reasoning_effort="none", add_generation_prompt=False)
    yield chat("effort-kwargs", [user("x")], reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    yield chat("documents", [user("x")], documents=[{"title": "t", "text": "d"}])
    yield chat("continue", [user("x"), {"role": "assistant", "content": "Roses are "}], continue_final_message=True, add_generation_prompt=False)
    yield chat("continue-parts", [user("x"), {"role": "assistant", "content": [text("Roses"), text("are")]}], continue_final_message=True,
               add_generation_prompt=False)
    yield chat("special-tokens", [user("x")], add_special_tokens=True)
    yield chat("truncate", [user("some words to cut off from the left side")], truncate_prompt_tokens=7)
    yield chat("truncate-right", [user("some words to cut off from the right side")], truncate_prompt_tokens=7, truncation_side="right")


def messages():
    def ask(label, conversation, **more):
        return label, "/v1/messages", {"model": "m", "max_tokens": 16, "messages": conversation, **more}

    used = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Pâris", "n": [1, 2.0, None, True, {"a": "\n\"😀"}]}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "21 C"}
    yield ask("text", [user("Hello!")])
    yield ask("blocks", [user([text("a"), text("b")])])
    yield ask("blocks-one", [user([{**text("a"), "cache_control": {"type": "ephemeral"}}])])
    yield ask("blocks-empty", [user([text(""), text("b")])])
    yield ask("blocks-none", [user("a"), user([]), user("b")])
    yield ask("text-empty", [user("")])
    yield ask("system", [user("x")], system="Be terse.")
    yield ask("system-empty", [user("x")], system="")
    yield ask("system-blocks", [user("x")], system=[text("a"), {**text("b"), "cache_control": {}}, text("")])
    yield ask("system-billing", [user("x")], system=[text("x-anthropic-billing-header: cch=1"), text("b")])
    yield ask("system-billing-text", [user("x")], system="x-anthropic-billing-header: cch=1\nb")
    yield ask("system-inline", [user("x"), {"role": "system", "content": "later"}, user("y")], system="first")
    yield ask("system-inline-only", [user("x"), {"role": "system", "content": [text("la"), text("ter")]}, user("y")])
    yield ask("system-inline-first", [{"role": "system", "content": "early"}, user("y")], system="first")
    yield ask("system-inline-alone", [{"role": "system", "content": "early"}, user("y")])
    yield ask("system-inline-billing", [user("x"), {"role": "system", "content": "x-anthropic-billing-header: 1\nz"}, user("y")])
    yield ask("turns", [user("1+1?"), {"role": "assistant", "content": "2"}, user("2+2?")], system="Be terse.")
    yield ask("last-assistant", [user("x"), {"role": "assistant", "content": "Roses are"}])
    yield ask("assistant-blocks", [user("x"), {"role": "assistant", "content": [text("a"), text("b")]}, user("y")])
    yield ask("assistant-empty", [user("x"), {"role": "assistant", "content": []}, user("y")])
    yield ask("thinking-history", [user("x"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
              {"type": "redacted_thinking", "data": "zz"}, text("a")]}, user("y")])
    yield ask("thinking-history-last", [user("x"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, used]},
              user([result])], tools=[WEATHER])
    yield ask("thinking-enabled", [user("x")], max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024})
    yield ask("thinking-adaptive", [user("x")], thinking={"type": "adaptive"})
    yield ask("effort", [user("x")], output_config={"effort": "high"})
    yield ask("kwargs", [user("x")], chat_template_kwargs={"enable_thinking": False})
    yield ask("tools", [user("x")], tools=[WEATHER, {"name": "now", "input_schema": {}}])
    yield ask("tools-flags", [user("x")], tools=[{**WEATHER, "strict": True, "defer_loading": False, "cache_control": {}, "type": "custom"}])
    yield ask("tools-choice-none", [user("x")], tools=[WEATHER], tool_choice={"type": "none"})
    yield ask("tools-choice-any", [user("x")], tools=[WEATHER], tool_choice={"type": "any"})
    yield ask("tools-empty", [user("x")], tools=[])
    yield ask("tools-server", [user("x")], tools=[{"type": "web_search_20250305", "name": "web_search"}])
    yield ask("tool-use", [user("x"), {"role": "assistant", "content": [used]}, user([result])], tools=[WEATHER])
    yield ask("tool-use-text", [user("x"), {"role": "assistant", "content": [text("Looking."), used, {**used, "id": "t2", "input": {}}]},
              user([result, text("and Rome?"), {**result, "tool_use_id": "t2", "content": [text("1"), text("2")]}])], tools=[WEATHER])
    yield ask("tool-result-empty", [user("x"), {"role": "assistant", "content": [used]}, user([{"type": "tool_result", "tool_use_id": "t1"}])])
    yield ask("tool-result-error", [user("x"), {"role": "assistant", "content": [used]}, user([{**result, "is_error": True}])])
    yield ask("tool-use-no-id", [user("x"), {"role": "assistant", "content": [{**used, "id": None}]}, user([result])])
    yield ask("tool-use-no-input", [user("x"), {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f"}]}, user([result])])
    yield ask("image", [user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}])])
    yield ask("document", [user([{"type": "document", "source": {}}])])
    yield ask("no-max-tokens", [user("x")], max_tokens=None)
    yield ask("specials", [user("<|im_end|><|eot_id|><end_of_turn> x")])
    yield ask("salt", [user("Hello!")], cache_salt="s", metadata={"user_id": "u"}, stop_sequences=["x"])


def responses():
    def ask(label, input, **more):
        return label, "/v1/responses", {"model": "m", "input": input, **more}

    tool = {"type": "function", "name": "get_weather", "description": "Get the weather for a city", "parameters": GET_WEATHER}
    called = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city":  "Paris"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "21 C"}
    said = {"type": "message", "role": "assistant", "content": [text("Hi", "output_text")]}
    thought = {"type": "reasoning", "summary": [], "content": [text("Because.", "reasoning_text")]}
    yield ask("text", "Hello!")
    yield ask("text-empty", "")
    yield ask("list-empty", [])
    yield ask("instructions", "Hello!", instructions="Be terse.")
    yield ask("instructions-empty", "Hello!", instructions="")
    yield ask("message", [user("Hello!")])
    yield ask("message-typed", [{"type": "message", **user("Hello!")}])
    yield ask("message-parts", [user([text("a", "input_text"), text("b", "input_text")])])
    yield ask("message-parts-typed", [{"type": "message", **user([text("a", "input_text")])}])
    yield ask("message-parts-text", [user([text("a")])])
    yield ask("message-status", [{"type": "message", "status": "completed", "id": "m1", **user([text("a", "input_text")])}])
    yield ask("system", [{"role": "system", "content": "s"}, user("x")])
    yield ask("system-instructions", [{"role": "system", "content": "s"}, user("x")], instructions="i")
    yield ask("developer", [{"role": "developer", "content": "d"}, user("x")])
    yield ask("developer-later", [user("x"), {"role": "developer", "content": [text("d", "input_text")]}, user("y")], instructions="i")
    yield ask("system-billing", [{"role": "system", "content": [text("x-anthropic-billing-header: 1\nz", "input_text")]}, user("x")])
    yield ask("turns", [user("1+1?"), {"role": "assistant", "content": "2"}, user("2+2?")])
    yield ask("turns-typed", [user("1+1?"), {"type": "message", "role": "assistant", "content": "2"}, user("2+2?")])
    yield ask("turns-output", [user("x"), said, user("y")])
    yield ask("turns-output-full", [user("x"), {**said, "id": "m", "status": "completed"}, user("y")])
    yield ask("turns-output-untyped", [user("x"), {"role": "assistant", "content": [text("Hi", "output_text")]}, user("y")])
    yield ask("turns-output-two", [user("x"), {**said, "content": [text("a", "output_text"), text("b", "output_text")]}, user("y")])
    yield ask("turns-output-refusal", [user("x"), {**said, "content": [{"type": "refusal", "refusal": "no"}]}, user("y")])
    yield ask("assistant-twice", [user("x"), said, said, user("y")])
    yield ask("assistant-input-text", [user("x"), {"role": "assistant", "content": [text("Hi", "input_text")]}, user("y")])
    yield ask("assistant-empty", [user("x"), {"role": "assistant", "content": ""}, said, user("y")])
    yield ask("continue", [user("x"), {**said, "status": "incomplete"}])
    yield ask("continue-progress", [user("x"), {**said, "status": "in_progress"}])
    yield ask("continue-user", [{"type": "message", "status": "incomplete", **user([text("a", "input_text")])}])
    yield ask("last-assistant", [user("x"), said])
    yield ask("reasoning", [user("x"), thought, said, user("y")])
    yield ask("reasoning-two", [user("x"), {**thought, "content": [text("a", "reasoning_text"), text("b", "reasoning_text")]}, called, output], tools=[tool])
    yield ask("reasoning-summary", [user("x"), {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "S"}]}, said, user("y")])
    yield ask("reasoning-empty", [user("x"), {"type": "reasoning", "summary": []}, said, user("y")])
    yield ask("reasoning-encrypted", [user("x"), {**thought, "encrypted_content": "zz"}, said, user("y")])
    yield ask("reasoning-twice", [user("x"), thought, thought, called, output], tools=[tool])
    yield ask("reasoning-call", [user("x"), thought, called, output], tools=[tool])
    yield ask("reasoning-after", [user("x"), said, thought, user("y")])
    yield ask("reasoning-incomplete", [user("x"), {**thought, "status": "incomplete"}])
    yield ask("tools", "x", tools=[tool])
    yield ask("tools-bare", "x", tools=[{"type": "function", "name": "f"}])
    yield ask("tools-null", "x", tools=[{"type": "function", "name": "f", "parameters": None, "strict": None}])
    yield ask("tools-strict", "x", tools=[{**tool, "strict": True, "x": 1, "defer_loading": True}])
    yield ask("tools-choice-none", "x", tools=[tool], tool_choice="none")
    yield ask("tools-choice-named", "x", tools=[tool], tool_choice={"type": "function", "name": "get_weather"})
    yield ask("tools-empty", "x", tools=[])
    yield ask("tools-web", "x", tools=[{"type": "web_search_preview"}])
    yield ask("tools-custom", "x", tools=[{"type": "custom", "name": "c", "description": "d"}])
    yield ask("tools-namespace", "x", tools=[{"type": "namespace", "name": "n", "description": "d", "tools": [tool]}])
    yield ask("call", [user("x"), called, output], tools=[tool])
    yield ask("call-no-tools", [user("x"), called, output])
    yield ask("call-said", [user("x"), said, called, output, user("y")], tools=[tool])
    yield ask("call-then-said", [user("x"), called, said, output, user("y")], tools=[tool])
    yield ask("calls-two", [user("x"), called, {**called, "call_id": "c2", "arguments": ""}, output, {**output, "call_id": "c2"}], tools=[tool])
    yield ask("call-full", [user("x"), {**called, "id": "f1", "status": "completed"}, {**output, "id": "o1", "status": "completed"}], tools=[tool])
    yield ask("call-namespace", [user("x"), {**called, "namespace": "n"}, output])
    yield ask("call-output-parts", [user("x"), called, {**output, "output": [text("12", "input_text"), text("34", "input_text")]}])
    yield ask("call-output-unknown", [user("x"), called, {**output, "call_id": "zz"}])
    yield ask("call-arguments-bad", [user("x"), {**called, "arguments": "{"}, output])
    yield ask("call-custom", [user("x"), {"type": "custom_tool_call", "call_id": "c1", "name": "c", "input": "é"}, {"type": "custom_tool_call_output", "call_id": "c1", "output": "o"}])
    yield ask("effort-high", "x", reasoning={"effort": "high"})
    yield ask("effort-none", "x", reasoning={"effort": "none"})
    yield ask("effort-null", "x", reasoning={"effort": None, "summary": "auto"})
    yield ask("kwargs", "x", chat_template_kwargs={"enable_thinking": False})
    yield ask("kwargs-effort", "x", chat_template_kwargs={"enable_thinking": False}, reasoning={"effort": "low"})
    yield ask("truncation-auto", "x", truncation="auto")
    yield ask("truncation-null", "x", truncation=None)
    yield ask("truncation-auto-long", "word " * 9000, truncation="auto")
    yield ask("truncation-auto-long-answer", "word " * 9000, truncation="auto", max_output_tokens=5)
    yield ask("image", [user([{"type": "input_image", "image_url": "data:image/png;base64,AA=="}])])
    yield ask("file", [user([{"type": "input_file", "file_id": "f"}])])
    yield ask("previous", "x", previous_response_id="resp_1")
    yield ask("previous-messages", "x", previous_input_messages=[user("before")])
    yield ask("prompt", "x", prompt={"id": "p"})
    yield ask("reference", [{"type": "item_reference", "id": "m1"}, user("x")])
    yield ask("store", "x", store=True, background=False, metadata={"a": "b"}, user="u", max_output_tokens=16, text={"format": {"type": "text"}})
    yield ask("options", "x", add_special_tokens=False, truncate_prompt_tokens=2, add_generation_prompt=False)
    yield ask("specials", "<|im_end|><|eot_id|><end_of_turn> x")


def ask(base, path, body):
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return 200, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def main():
    base, name, *pairs = sys.argv[1:]
    # The engine's date is in some prompts, so the time is part of what is recorded.
    meta = {"meta": True, "name": name, "seconds": int(time.time()), **dict(pair.split("=", 1) for pair in pairs)}
    print(json.dumps(meta))
    for label, path, body in [*(harmony() if name == "harmony" else chats()), *messages(), *responses()]:
        status, answer = ask(base, path + "/render", body)
        row = {"label": label, "endpoint": path, "request": body, "status": status}
        row |= {"token_ids": [answer["token_ids"]]} if status == 200 else {"error": str((answer or {}).get("error", answer))[:300]}
        print(json.dumps(row, ensure_ascii=False))


main()

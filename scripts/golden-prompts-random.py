"""Records what vLLM makes of random requests: one JSON line per request, with the prompt's token ids.

    python golden-prompts-random.py http://127.0.0.1:PORT NAME COUNT KEY=VALUE... | gzip -9n > NAME.jsonl.gz

The engine is started as `golden-prompts.py` says. The requests are drawn with NAME as the seed; a name that begins with
`harmony` adds chats with random tools. They are odd on purpose: empty texts, parts, nulls, keys that nobody knows.
"""

import json
import random
import sys
import time
import urllib.error
import urllib.request

WORDS = [
    "", "a", "wor", "ld", " one", "two\n", "\n\nthree", "é😀", "今天", "don't", "  ", "<|", "|>", "<|x|>", "{\"a\": 1}", "// c", "a\r\nb", "3.14",
    "x_y", "null", "\t", "\u00a0", "ﬁ", "e\u0301", "🏳️‍🌈", "12345678", "!!!??", "def f():\n    return 1\n", "x-anthropic-billing-header: 1",
    "x-anthropic-billing-header: 1\nz", "<|im_end|>", "Hi",
]


class Drawing(random.Random):
    """Draws values, and objects with some keys left out."""

    def chance(self, share):
        return self.random() < share

    def word(self):
        return self.choice(WORDS) if self.chance(0.7) else "".join(self.choice(WORDS) for _ in range(self.randint(2, 4)))

    def some(self, draw, least=0, most=3):
        return [draw() for _ in range(self.randint(least, most))]

    def one_of(self, *draws):
        """One of several values or functions that draw one."""
        drawn = self.choice(draws)
        return drawn() if callable(drawn) else drawn

    def with_some(self, given, share=0.25, **more):
        """`given` with some of the entries of `more`."""
        for key, value in more.items():
            if self.chance(share):
                given[key] = value() if callable(value) else value
        return given

    def value(self, depth=0):
        kinds = [None, True, False, self.randint(-5, 10**12), self.choice([0.5, 1.0, -2.25, 1e3, 0.1]), self.word]
        if depth < 2:
            kinds += [lambda: self.some(lambda: self.value(depth + 1)),
                      lambda: {self.word(): self.value(depth + 1) for _ in range(self.randint(0, 3))}]
        return self.one_of(*kinds)

    def schema(self, depth=0):
        drawn, schema = self.random(), {}
        if drawn < 0.35 and depth < 4:
            schema["type"] = "object"
            names = ["a", "b", "c", "größe", "x-y", "k"]
            if self.chance(0.9):
                schema["properties"] = {f"{self.choice(names)}{place}": self.schema(depth + 1) for place in range(self.randint(0, 4))}
            if self.chance(0.5):
                schema["required"] = self.some(lambda: self.choice(["a0", "b1", "c2", "k0", 7]))
        elif drawn < 0.45 and depth < 4:
            schema["type"] = "array"
            if self.chance(0.8):
                schema["items"] = self.schema(depth + 1)
        elif drawn < 0.55 and depth < 4:
            schema["oneOf"] = self.some(lambda: self.schema(depth + 1))
        elif drawn < 0.9:
            schema["type"] = self.choice(["string", "string", "integer", "number", "boolean", "null", "file", ["string", "null"], ["integer", 1], []])
        return self.with_some(
            schema, 0.15, description=self.word, title=self.word, default=self.value, nullable=lambda: self.choice([True, False, "x"]),
            enum=lambda: self.some(lambda: self.choice(["x", "y", "null", 1, None])), examples=lambda: self.some(self.value),
        )


class Chats(Drawing):
    """`/v1/chat/completions` with tools."""

    path = "/v1/chat/completions"

    def content(self):
        return self.word() if self.chance(0.6) else self.some(lambda: {"type": "text", "text": self.word()})

    def call(self):
        arguments = self.choice(["{}", "", '{"a":  "é<|"}'])
        return {"id": self.choice("abc"), "type": "function", "function": {"name": self.choice(["f", "get_x", "a.b-c"]), "arguments": arguments}}

    def message(self):
        match self.choice(["user", "system", "assistant", "assistant", "tool", "calls", "calls"]):
            case "user" | "system" as role:
                return {"role": role, "content": self.content()}
            case "tool":
                return {"role": "tool", "tool_call_id": self.choice("abcz"), "content": self.content()}
            case kind:
                said = {"role": "assistant", "content": self.one_of(self.content, None)}
                if kind == "calls":
                    said["tool_calls"] = self.some(self.call, 0, 2)
                return self.with_some(said, reasoning=self.word, reasoning_content=self.word)

    def tool(self):
        parameters = self.one_of(None, self.schema, lambda: {"type": "object", "properties": {f"p{place}": self.schema(1) for place in range(3)}})
        function = {"name": self.choice(["f", "get_x"]), "description": self.one_of(None, self.word), "parameters": parameters}
        return {"type": "function", "function": function}

    def body(self):
        first = self.some(lambda: {"role": self.choice(["system", "developer"]), "content": self.content()}, 0, 1)
        body = {"model": "m", "messages": first + self.some(self.message, 1, 7)}
        return self.with_some(body, 0.5, tools=lambda: self.some(self.tool, 1), reasoning_effort=lambda: self.choice(["low", "medium", "high"]))


class Messages(Drawing):
    """`/v1/messages`."""

    path = "/v1/messages"

    def text(self):
        return self.with_some({"type": "text", "text": self.word()}, cache_control={"type": "ephemeral"}, citations=None, x=1)

    def result(self):
        content = lambda: self.one_of(self.word, None, lambda: self.some(lambda: {"type": "text", "text": self.word()}))
        return self.with_some({"type": "tool_result", "tool_use_id": self.choice("ab")}, 0.5, content=content, is_error=False, cache_control={})

    def use(self):
        given = self.one_of({}, lambda: {self.word(): self.value()}, lambda: {"k": self.value(), "z": self.value()})
        return {"type": "tool_use", "id": self.choice("ab"), "name": self.choice(["f", "g"]), "input": given}

    def thought(self):
        return self.one_of({"type": "redacted_thinking", "data": "z"}, {"type": "thinking", "thinking": None},
                           lambda: {"type": "thinking", "thinking": self.word(), "signature": "s"})

    def message(self):
        role = self.choice(["user", "user", "assistant", "assistant", "system"])
        kinds = {"user": [self.text, self.text, self.result], "assistant": [self.text, self.text, self.use, self.thought], "system": [self.text]}
        blocks = lambda: self.some(lambda: self.one_of(*kinds[role]), 0, 4)
        return self.with_some({"role": role, "content": self.word() if self.chance(0.3) else blocks()}, x=1)

    def tool(self):
        schema = self.one_of({}, {"required": []}, lambda: {"type": "object", "properties": {"a": self.value()}}, lambda: {"z": self.value(), "type": "string"})
        return self.with_some({"name": self.choice(["f", "g"]), "input_schema": schema}, description=self.word, strict=True,
                              defer_loading=lambda: self.choice([True, False, None]), type="custom", cache_control={}, x=1)

    def body(self):
        body = {"model": "m", "max_tokens": self.choice([1, 2048]), "messages": self.some(self.message, 1, 6)}
        return self.with_some(
            body, system=lambda: self.one_of(self.word, None, lambda: self.some(self.text)), tools=lambda: self.some(self.tool),
            tool_choice=lambda: {"type": self.choice(["auto", "none", "any"])}, output_config=lambda: self.choice([{"effort": "low"}, {}, {"effort": None}]),
            thinking=lambda: self.choice([{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}]),
            chat_template_kwargs=lambda: self.choice([{"enable_thinking": True}, {"x": [1, {"y": None}]}, None, {"reasoning_effort": "low"}]),
            metadata={}, stream=False, n=3, add_special_tokens=True, truncate_prompt_tokens=3, documents=[{"a": "b"}],
        )


class Responses(Drawing):
    """`/v1/responses`."""

    path = "/v1/responses"

    def given(self):
        return self.with_some({"type": "input_text", "text": self.word()}, 0.15, x=1, prompt_cache_breakpoint=None)

    def said(self):
        return self.with_some({"type": "output_text", "text": self.word()}, annotations=[], logprobs=None, x=1)

    def content(self):
        return self.one_of(self.word, lambda: self.some(self.given))

    def item(self):
        match self.choice(["user", "user", "system", "easy", "output", "dict", "call", "call", "result", "reasoning"]):
            case "user":
                status = lambda: self.choice(["completed", "incomplete"])
                return self.with_some({"role": "user", "content": self.content()}, type="message", status=status, id="i", x=1, name="n")
            case "system":
                return self.with_some({"role": self.choice(["system", "developer"]), "content": self.content()}, type="message", name="n", task="t")
            case "easy":
                return self.with_some({"role": "assistant", "content": self.word()}, type="message", status="completed", phase=None, name="n")
            case "output":
                status = lambda: self.choice(["completed", "incomplete", "in_progress"])
                return self.with_some({"type": "message", "role": "assistant", "content": self.some(self.said)}, status=status, id="m")
            case "dict":
                return {"role": "assistant", "content": self.some(lambda: self.one_of(self.given, self.said), 0, 2)}
            case "call":
                arguments = self.choice(["{}", "", '{"z":  [1, 2.0], "a": "é"}'])
                call = {"type": "function_call", "call_id": self.choice("ab"), "name": self.choice(["f", "g"]), "arguments": arguments}
                return self.with_some(call, id="f", status=lambda: self.choice(["completed", "in_progress"]), namespace=None, x=1)
            case "result":
                output = self.one_of(self.word, self.word, lambda: self.some(self.given, 0, 2))
                return self.with_some({"type": "function_call_output", "call_id": self.choice("ab"), "output": output}, id="o", name="n", x=1)
            case _:
                content = lambda: self.one_of(None, lambda: self.some(lambda: {"type": "reasoning_text", "text": self.word()}, 0, 2))
                summary = self.one_of([], [], lambda: [{"type": "summary_text", "text": self.word()}])
                return self.with_some({"type": "reasoning", "summary": summary}, 0.5, content=content, id="r", encrypted_content=None,
                                      status=lambda: self.choice(["completed", "completed", "incomplete"]))

    def tool(self):
        parameters = lambda: self.one_of(None, {}, lambda: {"type": "object", "properties": {"a": self.value()}})
        return self.with_some({"type": "function", "name": self.choice(["f", "g"])}, description=self.word, parameters=parameters,
                              strict=lambda: self.choice([True, False, None]), defer_loading=True, x=1, output_schema=None)

    def body(self):
        body = {"model": "m", "input": self.word() if self.chance(0.2) else self.some(self.item, 1, 6)}
        return self.with_some(
            body, instructions=lambda: self.one_of(self.word, None), tools=lambda: self.some(self.tool), tool_choice=lambda: self.choice(["auto", "none"]),
            reasoning=lambda: self.choice([{"effort": "low"}, {"effort": "high"}, {"effort": "none"}, {}, None]),
            chat_template_kwargs=lambda: self.choice([{"enable_thinking": True}, {"x": [1, {"y": None}]}, None, {"reasoning_effort": "low"}]),
            truncation=lambda: self.choice(["auto", "disabled", None]), max_output_tokens=lambda: self.choice([None, 5, 16]), store=False, stream=False,
            metadata={}, user="u", n=2, add_special_tokens=False, documents=[{"a": "b"}], previous_response_id=None, prompt=None, background=False,
            text={"format": {"type": "text"}}, include=[],
        )


def ask(base, path, body):
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return {"status": 200, "token_ids": [json.load(answer)["token_ids"]]}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "error": error.read().decode()[:200]}


def main():
    base, name, count, *pairs = sys.argv[1:]
    print(json.dumps({"meta": True, "name": name, "seconds": int(time.time()), **dict(pair.split("=", 1) for pair in pairs)}))
    kinds = [Messages(name), Responses(name)] + ([Chats(name), Chats(name + "2")] if name.startswith("harmony") else [])
    choice = random.Random(name)
    for number in range(int(count)):
        drawing = choice.choice(kinds)
        body = drawing.body()
        print(json.dumps({"label": f"random-{number}", "endpoint": drawing.path, "request": body, **ask(base, drawing.path + "/render", body)}, ensure_ascii=False))


main()

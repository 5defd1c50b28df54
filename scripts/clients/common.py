"""What the client scripts share: where they send, what an answer must be, and what they report.

    python with_CLIENT.py --persist URL --turns URL --engine URL --engine URL

`--persist` is a rule that keeps each client address at one engine, `--turns` one that takes the engines in turn, and the engines
are those behind both. A script's last line is JSON: what was checked, what was wrong, and how many requests kvlb must have
counted. Lines that begin with `told: ` are for people.
"""

import argparse
import dataclasses
import json
import secrets
import signal
import sys
import time
import traceback
import urllib.request

# A script that hangs is ended by this; the slowest takes some 20 s on two busy cores.
LIMIT_S = 240
# For one request.
TIMEOUT_S = 60
# At a time, where many are sent: the wish, and six times what the engines do at a time.
MANY = 50
# A stream of so many tokens takes llama.cpp many seconds with this model; a client that leaves leaves long before.
ENDLESS = 7000
# An engine whose client has left must be free again within this.
FREED_S = 2
# Unknown to the engine and as long as large bodies are: kvlb has to pass it on all the same.
PADDING = "x" * 3_000_000
# Every prompt is new, so an engine can have no more than the beginning that chats have in common, which is shorter.
COLD_TOKENS = 16


@dataclasses.dataclass
class Answer:
    """What a client made of one completion."""

    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int


class Case:
    """One client's checks."""

    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--persist", required=True)
        parser.add_argument("--turns", required=True)
        parser.add_argument("--engine", action="append", required=True)
        places = parser.parse_args()
        self.persist, self.turns, self.engines = places.persist, places.turns, places.engine
        self.checked, self.wrong = [], []
        self.requests = self.left = self.unsure = self.cached_tokens = 0
        signal.alarm(LIMIT_S)

    def run(self, client, *checks):
        """Runs every check, also after one that failed, and reports."""
        for check in checks:
            before = len(self.wrong)
            try:
                check()
            except Exception as error:
                traceback.print_exc()
                self.wrong.append(f"{check.__doc__}: {type(error).__name__}: {error}")
            if len(self.wrong) == before:
                self.checked.append(check.__doc__)
        report = {"client": client, "checked": self.checked, "wrong": self.wrong, "requests": self.requests}
        report |= {"left": self.left, "unsure": self.unsure, "cached_tokens": self.cached_tokens}
        print(json.dumps(report))
        sys.exit(bool(self.wrong))

    def equal(self, what, found, wanted):
        if found != wanted:
            self.wrong.append(f"{what}: {shortened(found)} where {shortened(wanted)} was to be")

    def holds(self, what, condition, found):
        if not condition:
            self.wrong.append(f"{what}: {shortened(found)}")

    def saw(self, answer=None):
        """Counts a request that went through kvlb, and the cached tokens that its answer names."""
        self.requests += 1
        if answer is not None:
            self.cached_tokens += answer.cached_tokens
        return answer

    # What every client is asked to show. `ask(base, path, body, stream)` sends one request and returns an Answer.

    def same_answers(self, ask):
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = question(path)
            plain = self.saw(ask(self.persist, path, body, False))
            streamed = self.saw(ask(self.persist, path, body, True))
            for engine in self.engines:
                straight = answer_of(post(engine + path, body))
                self.equal(f"{path}, text", plain.text, straight.text)
                self.equal(f"{path}, streamed text", streamed.text, straight.text)
                for answer in (plain, streamed):
                    self.equal(f"{path}, end", answer.finish, straight.finish)
                    self.equal(f"{path}, prompt tokens", answer.prompt_tokens, straight.prompt_tokens)

    def affinity(self, ask, rounds=3):
        """A second request finds the first one's prompt in the cache: always at one engine, and only then in turn."""
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = question(path)
            kept = [self.saw(ask(self.persist, path, body, stream)) for stream in (False, True) * rounds]
            self.warmth(f"{path}, kept", kept, [False] + [True] * (2 * rounds - 1))
            body = question(path)
            turns = [self.saw(ask(self.turns, path, body, False)) for _ in range(4)]
            self.warmth(f"{path}, in turn", turns, [False, False, True, True])

    def warmth(self, what, answers, wanted):
        cached = [answer.cached_tokens for answer in answers]
        warm = [tokens == answer.prompt_tokens - 1 for tokens, answer in zip(cached, answers)]
        cold = [tokens < COLD_TOKENS for tokens in cached]
        found = [True if is_warm else False if is_cold else None for is_warm, is_cold in zip(warm, cold)]
        self.holds(f"{what}, cached tokens", found == wanted, cached)

    def many_questions(self):
        """So many different requests, half of them streamed, with the answers that both engines give by themselves."""
        jobs = []
        for number in range(MANY):
            path = ("/v1/completions", "/v1/chat/completions")[number // 2 % 2]
            jobs.append((path, question(path), number % 2 == 1))
        return jobs

    def many_answers(self, jobs, answers):
        for number, ((path, body, _), answer) in enumerate(zip(jobs, answers, strict=True)):
            self.saw(answer)
            straight = answer_of(post(self.engines[number % len(self.engines)] + path, body))
            self.equal(f"{path}, text of one of {MANY}", answer.text, straight.text)

    def leaves(self, leave):
        """Has `leave()` begin an endless stream and leave it; the engine must be free soon and have made few of its tokens."""
        before = self.tokens_made()
        leave()
        began = time.monotonic()
        while any(slot["is_processing"] for engine in self.engines for slot in get_json(engine + "/slots")):
            if time.monotonic() - began > FREED_S:
                self.wrong.append(f"an engine was not free {FREED_S} s after its client had left")
                break
            time.sleep(0.01)
        else:
            print(f"told: freed {1000 * (time.monotonic() - began):.0f} ms after the client had left")
        made = self.tokens_made() - before
        self.holds("tokens made for a client that left", 0 < made < ENDLESS, made)
        self.requests += 1
        self.left += 1

    def tokens_made(self):
        lines = [line for engine in self.engines for line in get(engine + "/metrics").decode().splitlines()]
        return sum(float(line.split()[1]) for line in lines if line.startswith("llamacpp:tokens_predicted_total "))


def question(path, **more):
    """A request that no engine has seen."""
    text = f"{secrets.token_hex(16)} asks the librarian: who wrote the oldest book on the shelves, and in what language? "
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "seed": 7, **more}
    if path == "/v1/completions":
        return body | {"prompt": text}
    return body | {"messages": [{"role": "system", "content": text}, {"role": "user", "content": "Answer in short."}]}


def endless(path):
    return question(path) | {"max_tokens": ENDLESS, "stream": True}


def streaming(body):
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def answer_of(body):
    """Reads a completion's JSON."""
    body = body if isinstance(body, dict) else json.loads(body)
    choice, usage = body["choices"][0], body["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(text, choice["finish_reason"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def answer_of_events(text):
    """Reads a streamed completion, which must be events to its end, and end as it should."""
    events = [event for event in text.split("\n\n") if event]
    if not text.endswith("\n\n") or not all(event.startswith("data: ") for event in events):
        raise ValueError(f"no stream of events: {shortened(text)}")
    if events.pop() != "data: [DONE]":
        raise ValueError("the stream did not end with [DONE]")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    text, finish, usage = "", None, None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
            finish = choice["finish_reason"] or finish
    return Answer(text, finish, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def read(body, stream):
    return answer_of_events(body.decode()) if stream else answer_of(body)


def models_of(body):
    """The list of models without the time at which it was made."""
    return [{key: value for key, value in model.items() if key != "created"} for model in json.loads(body)["data"]]


# Straight to an engine, by a client that is none of those in question.
STRAIGHT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url):
    return STRAIGHT.open(url, timeout=TIMEOUT_S).read()


def get_json(url):
    return json.loads(get(url))


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return STRAIGHT.open(request, timeout=TIMEOUT_S).read()


def shortened(value, letters=200):
    text = repr(value)
    return text if len(text) <= letters else f"{text[:letters]}… ({len(text)} letters)"

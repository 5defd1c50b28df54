"""openai's client through kvlb, synchronous and asynchronous: models, completions and chats, streams, fifty at a time.

Called as common.py says.
"""

import asyncio

import openai
from common import PADDING, TIMEOUT_S, Answer, Case, endless, get, models_of, post, question, read, streaming

case = Case()
# Tried again, a fault would not be seen.
SETTINGS = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}


def sync_client(base):
    return openai.OpenAI(base_url=base + "/v1", **SETTINGS)


def async_client(base):
    return openai.AsyncOpenAI(base_url=base + "/v1", **SETTINGS)


def create(client, path):
    return client.completions.create if path == "/v1/completions" else client.chat.completions.create


def whole(answer):
    choice = answer.choices[0]
    text = choice.text if hasattr(choice, "text") else choice.message.content
    usage = answer.usage
    return Answer(text, choice.finish_reason, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)


class Parts:
    """The pieces of a stream, put together."""

    def __init__(self):
        self.text, self.finish, self.usage = "", None, None

    def add(self, chunk):
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.text += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
            self.finish = choice.finish_reason or self.finish

    def answer(self):
        cached = self.usage.prompt_tokens_details.cached_tokens
        return Answer(self.text, self.finish, self.usage.prompt_tokens, cached)


def ask_with(client, path, body, stream):
    if not stream:
        return whole(create(client, path)(**body))
    parts = Parts()
    with create(client, path)(**streaming(body)) as chunks:
        for chunk in chunks:
            parts.add(chunk)
    return parts.answer()


def ask(base, *what):
    with sync_client(base) as client:
        return ask_with(client, *what)


async def ask_with_async(client, path, body, stream):
    if not stream:
        return whole(await create(client, path)(**body))
    parts = Parts()
    async with await create(client, path)(**streaming(body)) as chunks:
        async for chunk in chunks:
            parts.add(chunk)
    return parts.answer()


def ask_async(base, path, body, stream):
    async def alone():
        async with async_client(base) as client:
            return await ask_with_async(client, path, body, stream)

    return asyncio.run(alone())


def models():
    """models and errors, as the engine tells them"""
    with sync_client(case.persist) as client:
        names = [model.id for model in client.models.list().data]
        case.equal("models", names, [model["id"] for model in models_of(get(case.engines[0] + "/v1/models"))])
        try:
            client.completions.create(model="tiny", prompt="x", max_tokens=1, temperature="no number")
        except openai.APIStatusError as error:
            case.holds("an error of the engine's", error.status_code in (400, 500) and error.body, error)
        else:
            case.wrong.append("the engine took a temperature that is no number")
    case.requests += 2


def answers():
    """answers as from the engine, streamed or not, sync and async"""
    case.same_answers(ask)
    case.same_answers(ask_async)


def affinity():
    """cached tokens prove affinity"""
    with sync_client(case.persist) as persist, sync_client(case.turns) as turns:
        clients = {case.persist: persist, case.turns: turns}
        case.affinity(lambda base, *what: ask_with(clients[base], *what))
    case.affinity(ask_async)


def many():
    """50 at a time, again on the same connections"""

    async def all_of(jobs):
        async with async_client(case.turns) as client:
            found = []
            for _ in range(2):
                found += await asyncio.gather(*(ask_with_async(client, *job) for job in jobs))
            return found

    jobs = case.many_questions()
    case.many_answers(jobs + jobs, asyncio.run(all_of(jobs)))


def large():
    """3 MB of a body, streamed or not"""
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = question(path)
        straight = read(post(case.engines[0] + path, body), False)
        for one in (ask, ask_async):
            for stream in (False, True):
                answer = one(case.turns, path, body | {"extra_body": {"padding": PADDING}}, stream)
                case.equal("text after 3 MB", case.saw(answer).text, straight.text)


def leaving():
    """a client that leaves frees its engine"""

    def leave():
        with sync_client(case.turns) as client:
            stream = client.chat.completions.create(**endless("/v1/chat/completions"))
            for _ in range(3):
                next(stream)
            stream.close()

    async def leave_async():
        async with async_client(case.turns) as client:
            stream = await client.completions.create(**endless("/v1/completions"))
            for _ in range(3):
                await anext(stream)
            await stream.close()

    case.leaves(leave)
    case.leaves(lambda: asyncio.run(leave_async()))


case.run(f"openai {openai.__version__}", models, answers, affinity, many, large, leaving)

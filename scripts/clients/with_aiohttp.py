"""aiohttp through kvlb: kept connections, streams, chunked uploads, `Expect: 100-continue`, fifty at a time.

Called as common.py says.
"""

import asyncio
import json

import aiohttp
from common import MANY, PADDING, TIMEOUT_S, Case, endless, get, models_of, post, question, read, streaming

case = Case()
JSON = {"Content-Type": "application/json"}


def session(**connector):
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(**connector), timeout=timeout, raise_for_status=True)


async def with_session(client, base, path, body, stream):
    async with client.post(base + path, json=streaming(body) if stream else body) as answer:
        wanted = "text/event-stream" if stream else "application/json"
        case.equal("content type", answer.content_type, wanted)
        return read(b"".join([part async for part in answer.content.iter_any()]), stream)


def alone(ask, **connector):
    """Runs `ask(client)` with a session of its own."""

    async def run():
        async with session(**connector) as client:
            return await ask(client)

    return asyncio.run(run())


def ask(*what):
    return alone(lambda client: with_session(client, *what))


def answers():
    """answers as from the engine, streamed or not"""

    async def models(client):
        async with client.get(case.persist + "/v1/models") as answer:
            return await answer.read()

    case.same_answers(ask)
    case.equal("models", models_of(alone(models)), models_of(get(case.engines[0] + "/v1/models")))
    case.saw()


def affinity():
    """cached tokens prove affinity"""
    case.affinity(ask)
    for number in range(1, 9):
        address, body = f"127.0.3.{number}", question("/v1/chat/completions")

        async def ask_often(client):
            return [await with_session(client, case.persist, "/v1/chat/completions", body, n > 1) for n in range(4)]

        found = [case.saw(answer) for answer in alone(ask_often, local_addr=(address, 0))]
        case.warmth(f"client {address}", found, [False, True, True, True])


def many():
    """50 at a time, again on the same connections"""

    async def all_of(client):
        found = []
        for _ in range(2):
            found += await asyncio.gather(*(with_session(client, case.turns, *job) for job in jobs))
        return found

    jobs = case.many_questions()
    case.many_answers(jobs + jobs, alone(all_of, limit=MANY))


def large():
    """3 MB with a length, in chunks, with Expect: 100-continue; a large answer"""
    body = question("/v1/completions")
    straight = read(post(case.engines[0] + "/v1/completions", body), False)
    sent = json.dumps(body | {"padding": PADDING}).encode()
    text = {"content": "a shelf of books " * 60_000}

    async def pieces():
        for start in range(0, len(sent), 70_000):
            yield sent[start : start + 70_000]

    async def ask_all(client):
        found = []
        for way in ({"data": sent}, {"data": pieces()}, {"data": sent, "expect100": True}, {"data": pieces(), "expect100": True}):
            async with client.post(case.turns + "/v1/completions", headers=JSON, **way) as answer:
                found.append(read(await answer.read(), False))
        async with client.post(case.turns + "/tokenize", json=text) as answer:
            return found, await answer.read()

    found, tokens = alone(ask_all)
    for answer in found:
        case.equal("text after 3 MB", case.saw(answer).text, straight.text)
    case.saw()
    case.equal("a large answer", tokens, post(case.engines[1] + "/tokenize", text))


def leaving():
    """a client that leaves frees its engine"""

    async def leave(client):
        answer = await client.post(case.turns + "/v1/completions", json=endless("/v1/completions"))
        await answer.content.readany()
        answer.close()

    async def cancel(client):
        begun = asyncio.Event()

        async def stream():
            path = "/v1/chat/completions"
            async with client.post(case.turns + path, json=endless(path)) as answer:
                async for _ in answer.content.iter_any():
                    begun.set()

        task = asyncio.create_task(stream())
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    case.leaves(lambda: alone(leave))
    case.leaves(lambda: alone(cancel))


case.run(f"aiohttp {aiohttp.__version__}", answers, affinity, many, large, leaving)

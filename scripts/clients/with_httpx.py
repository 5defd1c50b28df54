"""httpx through kvlb, synchronous and asynchronous: kept connections, streams, large bodies, fifty at a time.

Called as common.py says.
"""

import asyncio
import json

import httpx
from common import PADDING, TIMEOUT_S, Case, endless, get, models_of, post, question, read, streaming

case = Case()
SETTINGS = {"timeout": TIMEOUT_S, "trust_env": False}
JSON = {"Content-Type": "application/json"}


def with_client(client, base, path, body, stream):
    if not stream:
        return read(client.post(base + path, json=body).raise_for_status().content, False)
    with client.stream("POST", base + path, json=streaming(body)) as answer:
        case.holds("content type", answer.headers["content-type"].startswith("text/event-stream"), answer.headers)
        return read(b"".join(answer.raise_for_status().iter_bytes()), True)


async def with_async_client(client, base, path, body, stream):
    if not stream:
        return read((await client.post(base + path, json=body)).raise_for_status().content, False)
    async with client.stream("POST", base + path, json=streaming(body)) as answer:
        return read(b"".join([part async for part in answer.raise_for_status().aiter_bytes()]), True)


def ask(*what):
    with httpx.Client(**SETTINGS) as client:
        return with_client(client, *what)


def ask_async(*what):
    async def alone():
        async with httpx.AsyncClient(**SETTINGS) as client:
            return await with_async_client(client, *what)

    return asyncio.run(alone())


def answers():
    """answers as from the engine, streamed or not, sync and async"""
    case.same_answers(ask)
    case.same_answers(ask_async)
    models = ask_models()
    case.equal("models", models, models_of(get(case.engines[0] + "/v1/models")))


def ask_models():
    case.saw()
    return models_of(httpx.get(case.persist + "/v1/models", **SETTINGS).raise_for_status().content)


def affinity():
    """cached tokens prove affinity"""
    with httpx.Client(**SETTINGS) as client:
        case.affinity(lambda *what: with_client(client, *what))
    case.affinity(ask_async)
    for number in range(1, 9):
        with httpx.Client(transport=httpx.HTTPTransport(local_address=f"127.0.2.{number}"), **SETTINGS) as client:
            body = question("/v1/completions")
            cached = [case.saw(with_client(client, case.persist, "/v1/completions", body, n > 1)) for n in range(4)]
            case.warmth(f"client 127.0.2.{number}", cached, [False, True, True, True])


def again():
    """250 requests on one kept connection, streamed or not"""
    ports = set()
    with httpx.Client(**SETTINGS) as client:
        body = question("/v1/completions", max_tokens=2)
        for number in range(250):
            with client.stream("POST", case.turns + "/v1/completions", json=streaming(body) if number % 2 else body) as answer:
                ports.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
                case.saw(read(answer.raise_for_status().read(), number % 2 == 1))
    case.equal("connections", len(ports), 1)


def many():
    """50 at a time from a pool of connections"""

    async def all_of(jobs):
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=len(jobs)), **SETTINGS) as client:
            found = []
            for jobs_of_round in (jobs, jobs):
                found += await asyncio.gather(*(with_async_client(client, case.turns, *job) for job in jobs_of_round))
            return found

    jobs = case.many_questions()
    case.many_answers(jobs + jobs, asyncio.run(all_of(jobs)))


def large():
    """3 MB with a length and in chunks, and a large answer"""
    body = question("/v1/completions")
    straight = read(post(case.engines[0] + "/v1/completions", body), False)
    sent = json.dumps(body | {"padding": PADDING}).encode()

    def pieces():
        for start in range(0, len(sent), 70_000):
            yield sent[start : start + 70_000]

    async def async_pieces():
        for piece in pieces():
            yield piece

    async def ask_in_pieces():
        async with httpx.AsyncClient(**SETTINGS) as client:
            return await client.post(case.turns + "/v1/completions", content=async_pieces(), headers=JSON)

    with httpx.Client(**SETTINGS) as client:
        for content in (sent, pieces()):
            answer = client.post(case.turns + "/v1/completions", content=content, headers=JSON).raise_for_status()
            case.equal("text after 3 MB", case.saw(read(answer.content, False)).text, straight.text)
        answer = asyncio.run(ask_in_pieces()).raise_for_status()
        case.equal("text after 3 MB in chunks", case.saw(read(answer.content, False)).text, straight.text)
        text = {"content": "a shelf of books " * 60_000}
        answer = client.post(case.turns + "/tokenize", json=text).raise_for_status()
        case.saw()
        case.equal("a large answer", answer.content, post(case.engines[1] + "/tokenize", text))


def leaving():
    """a client that leaves frees its engine"""

    def leave():
        with httpx.stream("POST", case.turns + "/v1/completions", json=endless("/v1/completions"), **SETTINGS) as answer:
            next(answer.iter_bytes())

    async def leave_async():
        path = "/v1/chat/completions"
        async with httpx.AsyncClient(**SETTINGS) as client:
            async with client.stream("POST", case.turns + path, json=endless(path)) as answer:
                await anext(answer.aiter_bytes())

    case.leaves(leave)
    case.leaves(lambda: asyncio.run(leave_async()))


case.run(f"httpx {httpx.__version__}", answers, affinity, again, many, large, leaving)

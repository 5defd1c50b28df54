#!/usr/bin/env python3
"""Runs kvlb and other routers in front of the same simulated engines, and prints who finds how much in the caches.

Every arm gets fresh engines, the same prompts and the same moments to send them (open loop: a slow answer delays no later
request). What was in the caches is read from the engines' own counters, so that no router's word is taken. Arms take turns
within each round. Needs only Python's own library; `cargo xtask side-by-side` prepares everything.

Source of the workloads: shapes and rates that were measured for vllm-router and Dynamo before (docs/policy.md names them).
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "tests/golden/tiny-tokenizer"
MODEL = "tiny"
BLOCK = 16
OUTPUT_TOKENS = 4
HTTP, EVENTS, ROUTER, API, METRICS = 8101, 8201, 8001, 8002, 8003
HOST = "127.0.0.1"
PATIENCE = 30.0


def digits(rng, count):
    """A text of exactly as many tokens: the staged tokenizer makes each digit one."""
    return "".join(rng.choices("0123456789", k=count))


class Workload:
    """Prompts with the moments, in seconds, at which they are sent."""

    def __init__(self, name, requests, blocks=8192, prefill_us=50.0, ignore_before=0.0, restart=None):
        self.name, self.requests, self.blocks, self.prefill_us = name, requests, blocks, prefill_us
        self.ignore_before, self.restart = ignore_before, restart

    def ceiling(self):
        """Percent of the tokens that one endless cache would hold."""
        seen, hits, total = set(), 0, 0
        for at, prompt in self.requests:
            held, running = 0, True
            for end in range(BLOCK, len(prompt), BLOCK):
                name = hash(prompt[:end])
                running = running and name in seen
                held += BLOCK if running else 0
                seen.add(name)
            seen.add(hash(prompt[: len(prompt) // BLOCK * BLOCK]))
            if at >= self.ignore_before:
                hits, total = hits + held, total + len(prompt)
        return 100.0 * hits / max(total, 1)


def poisson(rng, rate, prompts):
    at, requests = 0.0, []
    for prompt in prompts:
        at += rng.expovariate(rate)
        requests.append((at, prompt))
    return requests


def groups(rng, count, groups=32, shared=2400, own=200):
    beginnings = [digits(rng, shared) for _ in range(groups)]
    return [rng.choice(beginnings) + digits(rng, own) for _ in range(count)]


def chats(rng, count, system=800, turn=180, chats=30):
    """Conversations under one system prompt; whose turn it is is drawn anew each time."""
    beginning = digits(rng, system)
    texts = [beginning for _ in range(chats)]
    prompts = []
    for _ in range(count):
        chat = rng.randrange(chats)
        texts[chat] += digits(rng, turn)
        prompts.append(texts[chat])
    return prompts


def workloads(seed):
    def make(name, rate, prompts, **more):
        rng = random.Random(f"{seed} {name}")
        return Workload(name, poisson(rng, rate, prompts(rng)), **more)

    one = dict(groups=1)
    return [
        make("groups", 25, lambda r: groups(r, 300)),
        make("hot prefix", 30, lambda r: groups(r, 300, **one)),
        # One engine computes 200 tokens in 40 ms here: 25 requests a second keep it busy.
        make("hot prefix, twice one engine", 50, lambda r: groups(r, 600, **one), prefill_us=200.0, ignore_before=5.0),
        make("hot prefix, a tenth of one", 2.5, lambda r: groups(r, 60, **one), prefill_us=200.0),
        make("chats", 25, lambda r: chats(r, 300)),
        make("unique prompts", 20, lambda r: [digits(r, 2460) for _ in range(200)]),
        make("groups, caches too small", 25, lambda r: groups(r, 400), blocks=1600),
        make("chats, caches too small", 25, lambda r: chats(r, 360), blocks=600),
        make("groups after all engines restarted", 25, lambda r: groups(r, 600), restart=300),
    ]


def run(args, env=None, log=None):
    return subprocess.Popen(
        [str(arg) for arg in args], env={**os.environ, **(env or {})}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
    )


def end(process):
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def call(method, url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.strip().startswith(("{", "[")) else text


def wait_for(what, ready):
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if ready():
                return
        except (OSError, ValueError, KeyError, IndexError):
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {PATIENCE:.0f} s: {what}")
        time.sleep(0.05)


class Engines:
    def __init__(self, options, workload, log):
        self.options, self.workload, self.log, self.all = options, workload, log, []
        for number in range(options.engines):
            self.all.append(self.start(number))
        self.ready()

    def start(self, number):
        return run(
            [
                self.options.sim, "--name", f"sim-{number}", "--host", HOST, "--port", HTTP + number,
                "--events-port", EVENTS + number, "--tokenizer", TOKENIZER, "--model", MODEL, "--seed", "0",
                "--block-size", BLOCK, "--num-gpu-blocks", self.workload.blocks,
                "--prefill-us-per-token", self.workload.prefill_us, "--decode-ms-per-token", 2,
            ],
            log=self.log,
        )

    def ready(self):
        for number in range(self.options.engines):
            wait_for(f"engine {number} is ready", lambda n=number: call("GET", self.url(n) + "/health") is not None)

    def restart(self):
        """Kills all of them and starts others at their addresses, whose sequence numbers begin at 0."""
        for process in self.all:
            process.kill()
            process.wait()
        self.all = [self.start(number) for number in range(self.options.engines)]
        self.ready()

    def url(self, number):
        return f"http://{HOST}:{HTTP + number}"

    def counters(self):
        rows = []
        for number in range(self.options.engines):
            page = call("GET", self.url(number) + "/metrics")
            read = lambda name: sum(float(v) for v in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", page, re.M))
            rows.append(
                [read("vllm:prefix_cache_queries_total"), read("vllm:prefix_cache_hits_total"),
                 read("vllm:request_success_total")]
            )
        return rows

    def end(self):
        for process in self.all:
            end(process)


class Arm:
    """Something that chooses an engine. Those without a server of their own choose in the client."""

    name = ""
    process = None

    def start(self, options, log, folder):
        pass

    async def choose(self, prompt):
        return ROUTER

    async def first_token(self, choice):
        pass

    async def done(self, choice):
        pass

    def port(self, choice):
        return choice

    def end(self):
        if self.process:
            end(self.process)
            self.process = None


class RoundRobin(Arm):
    name = "round robin"

    def __init__(self):
        self.turn = 0

    def start(self, options, log, folder):
        self.engines, self.turn = options.engines, 0

    async def choose(self, prompt):
        self.turn += 1
        return HTTP + self.turn % self.engines


class Kvlb(Arm):
    def __init__(self, mode, more=None):
        self.mode, self.more, self.name = mode, more or {}, f"kvlb {mode}"

    def start(self, options, log, folder):
        tokenizers = pathlib.Path(folder) / "tokenizers"
        tokenizers.mkdir()
        (tokenizers / MODEL).symlink_to(TOKENIZER)
        self.process = run(
            [options.kvlb, "up", "--datapath", "none", "--api", f"{HOST}:{API}", "--no-state", "--tokenizer-dir",
             tokenizers],
            env={"LLB_KV_NONE_HASH_SEED": "0"}, log=log,
        )
        url = f"http://{HOST}:{API}/netlox/v1/config/loadbalancer"
        wait_for("kvlb's API answers", lambda: call("GET", url + "/all") is not None)
        endpoints = [
            {"endpointIP": HOST, "targetPort": HTTP + n, "weight": 1, "kvZmqPort": EVENTS + n,
             "kvReplayPort": EVENTS + n + 1000}
            for n in range(options.engines)
        ]
        service = {"externalIP": HOST, "port": ROUTER, "protocol": "tcp", "sel": 0, "mode": 4, "kvExactMode": 3,
                   "kvBlockSize": BLOCK, "kvHashAlgo": "sha256_cbor", "kvLbMode": self.mode, "probetype": "none"}
        call("POST", url, {"serviceArguments": {**service, **self.more}, "endpoints": endpoints})
        heard = lambda: all(e["kvStatus"]["connected"] for e in call("GET", url + "/all")["lbAttr"][0]["endpoints"])
        wait_for("kvlb hears every engine", heard)
        wait_for("kvlb reads the prompts", lambda: not any(
            "token" in note or "staged" in note for note in call("GET", url + "/all")["lbAttr"][0].get("notes", [])))


class VllmRouter(Arm):
    def __init__(self, policy):
        self.policy, self.name = policy, f"vllm-router {policy}"

    def start(self, options, log, folder):
        urls = [f"http://{HOST}:{HTTP + n}" for n in range(options.engines)]
        args = [options.venv / "bin/vllm-router", "--host", HOST, "--port", ROUTER, "--worker-urls", *urls, "--policy",
                self.policy, "--prometheus-port", METRICS]
        if self.policy == "kv_aware":
            for n, url in enumerate(urls):
                args += ["--kv-event-source", f"{url}=tcp://{HOST}:{EVENTS + n}"]
                args += ["--kv-event-replay-source", f"{url}=tcp://{HOST}:{EVENTS + n + 1000}"]
            args += ["--kv-event-block-size", BLOCK, "--kv-event-model", MODEL]
        self.process = run(args, log=log)
        wait_for("vllm-router is ready", lambda: call("GET", f"http://{HOST}:{ROUTER}/v1/models") is not None)
        time.sleep(1.0)


class Dynamo(Arm):
    name = "dynamo select"

    def start(self, options, log, folder):
        self.process = run([options.venv / "bin/python", "-m", "dynamo.select_service", "--port", ROUTER], log=log)
        self.ids = options.token_ids
        self.number = 0
        url = f"http://{HOST}:{ROUTER}"
        wait_for("Dynamo's select service is ready", lambda: call("GET", url + "/workers") is not None)
        for n in range(options.engines):
            call("POST", url + "/workers", {
                "worker_id": n, "model_name": MODEL, "endpoint": f"http://{HOST}:{HTTP + n}", "block_size": BLOCK,
                "kv_events_endpoint": f"tcp://{HOST}:{EVENTS + n}", "replay_endpoint": f"tcp://{HOST}:{EVENTS + n + 1000}",
                "max_num_batched_tokens": 2048, "total_kv_blocks": 8192})
        time.sleep(1.0)

    async def choose(self, prompt):
        self.number += 1
        selection = f"s{self.number}"
        tokens = [self.ids[digit] for digit in prompt]
        status, text = await exchange(ROUTER, "POST", "/select_and_reserve",
                                      {"model_name": MODEL, "selection_id": selection, "token_ids": tokens})
        answer = json.loads(text)
        return (HTTP + int(answer["worker_id"]), selection)

    def port(self, choice):
        return choice[0]

    async def first_token(self, choice):
        await exchange(ROUTER, "POST", f"/reservations/{choice[1]}/prefill_complete", {})

    async def done(self, choice):
        await exchange(ROUTER, "DELETE", f"/reservations/{choice[1]}", None)


async def exchange(port, method, path, body):
    """One request over a connection of its own; status and body."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
        head = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
        return int(head.split()[1]), rest.decode()
    finally:
        writer.close()


async def ask(arm, prompt, due, begin):
    """Sends one prompt when it is due. Seconds to the first token and whether all went well."""
    await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
    sent = time.monotonic()
    choice = None
    try:
        choice = await arm.choose(prompt)
        reader, writer = await asyncio.open_connection(HOST, arm.port(choice), limit=1 << 20)
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True}).encode()
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        text, first = b"", None
        while True:
            piece = await reader.read(1 << 16)
            if not piece:
                break
            text += piece
            if first is None and b"data:" in text:
                first = time.monotonic() - sent
                await arm.first_token(choice)
        writer.close()
        good = head.split()[1] == b"200" and b"[DONE]" in text
        return first if good else None
    except (OSError, asyncio.IncompleteReadError, ValueError, KeyError):
        return None
    finally:
        if choice is not None:
            await arm.done(choice)


async def send(arm, requests, begin):
    return await asyncio.gather(*(ask(arm, prompt, at, begin) for at, prompt in requests))


def play(arm, workload, options, log):
    """One arm under one workload with fresh engines."""
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(options, workload, log)
        try:
            arm.start(options, log, folder)
            requests, before = workload.requests, engines.counters()
            if workload.restart:
                asyncio.run(send(arm, requests[: workload.restart], time.monotonic()))
                engines.restart()
                time.sleep(2.5)
                requests, before = requests[workload.restart :], engines.counters()
                start = requests[0][0]
                requests = [(at - start, prompt) for at, prompt in requests]
            times = asyncio.run(send(arm, requests, time.monotonic()))
            after = engines.counters()
        finally:
            arm.end()
            engines.end()
    queries, hits, served = ([b[i] - a[i] for a, b in zip(before, after)] for i in range(3))
    judged = sorted(t for (at, _), t in zip(requests, times) if t is not None and at >= workload.ignore_before)
    at = lambda share: 1000.0 * judged[min(len(judged) - 1, int(share * len(judged)))] if judged else float("nan")
    return {
        "hit": 100.0 * sum(hits) / max(sum(queries), 1.0), "p50": at(0.50), "p90": at(0.90), "p99": at(0.99),
        "busiest": 100.0 * max(served) / max(sum(served), 1.0), "failed": sum(t is None for t in times),
    }


def middle(rows, key):
    return statistics.median(row[key] for row in rows)


def table(workload, results):
    print(f"\n{workload.name} (one endless cache: {workload.ceiling():.1f} %)", flush=True)
    print(f"  {'':<26} {'hit %':>7} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'busiest %':>10} {'failed':>7}   p99 of each round")
    for name, rows in results.items():
        cells = [middle(rows, key) for key in ("hit", "p50", "p90", "p99", "busiest")]
        rounds = " ".join(f"{row['p99']:.0f}" for row in rows)
        print(f"  {name:<26} {cells[0]:>7.1f} {cells[1]:>8.1f} {cells[2]:>8.1f} {cells[3]:>8.1f} {cells[4]:>10.1f}"
              f" {sum(row['failed'] for row in rows):>7}   {rounds}", flush=True)


def arms(options):
    all_arms = [RoundRobin(), *(Kvlb(mode) for mode in options.modes.split(","))]
    if (options.venv / "bin/vllm-router").exists():
        all_arms += [VllmRouter("kv_aware"), VllmRouter("cache_aware"), VllmRouter("round_robin")]
    else:
        print("vllm-router is not installed: cargo xtask side-by-side --install", file=sys.stderr)
    found = subprocess.run([str(options.venv / "bin/python"), "-c", "import dynamo.select_service"],
                           capture_output=True, check=False) if (options.venv / "bin/python").exists() else None
    if found is not None and found.returncode == 0:
        all_arms.append(Dynamo())
    else:
        print("Dynamo's select service is not installed", file=sys.stderr)
    wanted = options.only.split(",") if options.only else None
    return [arm for arm in all_arms if wanted is None or any(word in arm.name for word in wanted)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvlb", default=ROOT / "target/release/kvlb", type=pathlib.Path)
    parser.add_argument("--sim", default=ROOT / "target/release/sim-engine", type=pathlib.Path)
    parser.add_argument("--venv", default=ROOT / "target/peers/venv", type=pathlib.Path, help="with the peers' packages")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", default="1", help="where prompts and moments come from; each round has its own")
    parser.add_argument("--modes", default="hard,cost", help="kvlb's blends that take part, by comma")
    parser.add_argument("--only", help="arms whose name holds one of these words, by comma")
    parser.add_argument("--workloads", help="workloads whose name holds one of these words, by comma")
    parser.add_argument("--json", type=pathlib.Path, help="where the figures of every run go")
    parser.add_argument("--log", type=pathlib.Path, help="where engines and routers write their logs")
    options = parser.parse_args()
    log = open(options.log, "ab") if options.log else subprocess.DEVNULL
    taking_part = arms(options)
    words = options.workloads.split(",") if options.workloads else None
    chosen = [w.name for w in workloads(options.seed) if words is None or any(word in w.name for word in words)]
    probe = Engines(options, workloads(options.seed)[0], log)
    ids = [call("POST", probe.url(0) + "/tokenize", {"model": MODEL, "prompt": str(d), "add_special_tokens": False})["tokens"] for d in range(10)]
    probe.end()
    assert all(len(tokens) == 1 for tokens in ids), "a digit is a token"
    options.token_ids = {str(digit): tokens[0] for digit, tokens in enumerate(ids)}
    everything = {}
    for name in chosen:
        results = {arm.name: [] for arm in taking_part}
        for number in range(options.rounds):
            workload = next(w for w in workloads(f"{options.seed}.{number}") if w.name == name)
            order = taking_part[number % len(taking_part) :] + taking_part[: number % len(taking_part)]
            for arm in order:
                print(f"  {name}: round {number + 1} of {options.rounds}, {arm.name}", file=sys.stderr, flush=True)
                results[arm.name].append(play(arm, workload, options, log))
        table(workload, results)
        everything[name] = {"ceiling": workload.ceiling(), "arms": results}
        if options.json:
            options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()

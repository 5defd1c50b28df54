#!/usr/bin/env python3
"""What `pdBypassTokens` gains and costs: conversations over two prefill and two decode engines, simulated.

    scripts/pd-bypass.py target/release 0 256

Starts sim-engine and kvlb from that folder on loopback, once for each number of tokens, lets 24 clients have conversations of
six turns (1500 tokens at first, 150 more with each turn, 60 generated), and prints the time to the first token of all turns
but the first, and the time between tokens. Everything is ended again. Python's standard library is enough.
"""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time

CLIENTS, TURNS = 24, 6
JSON = {"Content-Type": "application/json"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(port, path, body, headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {**JSON, **headers})
    return connection.getresponse()


def wait_for_api(port):
    for _ in range(200):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/netlox/v1/status")
            connection.getresponse().read()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("kvlb's API does not answer")


class Round:
    def __init__(self, folder, bypass):
        self.folder, self.bypass, self.processes = folder, bypass, []
        self.firsts, self.gaps, self.alone, self.lock = [], [], 0, threading.Lock()

    def start(self, command, **more):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **more)
        self.processes.append(process)
        return process

    def engine(self, number, role):
        port, events, replay, side = (free_port() for _ in range(4))
        engine = self.start([
            os.path.join(self.folder, "sim-engine"), "--name", f"engine-{number}", "--host", "127.0.0.1",
            "--port", str(port), "--events-port", str(events), "--replay-port", str(replay), "--seed", "0",
            "--kv-connector", "nixl", "--kv-side-channel-port", str(side), "--prefill-us-per-token", "100",
            "--decode-ms-per-token", "5", "--num-gpu-blocks", "20000",
        ])
        engine.stdout.readline()
        return {"endpointIP": "127.0.0.1", "targetPort": port, "weight": 1, "ep_role": role, "kvZmqPort": events,
                "kvReplayPort": replay}

    def play(self):
        with tempfile.TemporaryDirectory() as state:
            try:
                endpoints = [self.engine(number, role) for number, role in enumerate([1, 1, 2, 2])]
                api, self.vip = free_port(), free_port()
                self.start([os.path.join(self.folder, "kvlb"), "up", "--api", f"127.0.0.1:{api}", "--datapath", "none",
                            "--state-dir", state], env={**os.environ, "LLB_KV_NONE_HASH_SEED": "0"})
                wait_for_api(api)
                rule = {"externalIP": "127.0.0.1", "port": self.vip, "protocol": "tcp", "sel": 0, "mode": 4, "kvExactMode": 1,
                        "kvBlockSize": 16, "pdBypassTokens": self.bypass, "decisionHeaders": True}
                answer = post(api, "/netlox/v1/config/loadbalancer", {"serviceArguments": rule, "endpoints": endpoints}, {})
                if answer.status != 200:
                    raise SystemExit(answer.read().decode())
                time.sleep(2)
                clients = [threading.Thread(target=self.converse, args=(number,)) for number in range(CLIENTS)]
                for client in clients:
                    client.start()
                for client in clients:
                    client.join()
            finally:
                for process in self.processes:
                    process.kill()
                    process.wait()

    def converse(self, number):
        dice, base = random.Random(number), number * 100_000
        tokens = [base + at for at in range(1500)]
        time.sleep(number * 0.15)
        for turn in range(TURNS):
            tokens += [base + 50_000 + turn * 1000 + at for at in range(150)]
            body = {"model": "tiny", "prompt": tokens, "max_tokens": 60, "stream": True}
            began = last = time.monotonic()
            answer = post(self.vip, "/v1/completions", body, {"X-Conversation-Id": str(number)})
            is_first = True
            for line in iter(answer.readline, b""):
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                with self.lock:
                    if not is_first:
                        self.gaps.append(now - last)
                    elif turn > 0:
                        self.firsts.append(now - began)
                        self.alone += answer.getheader("x-kvlb-prefill-endpoint") is None
                last, is_first = now, False
            time.sleep(0.3 + dice.random() * 0.4)

    def report(self):
        def at(times, share):
            return sorted(times)[min(len(times) - 1, int(len(times) * share))] * 1000
        firsts, gaps = self.firsts, self.gaps
        print(f"pdBypassTokens {self.bypass}: {self.alone} of {len(firsts)} turns alone; to the first token p50 "
              f"{at(firsts, 0.5):.1f}, p90 {at(firsts, 0.9):.1f}, p99 {at(firsts, 0.99):.1f} ms; between tokens p50 "
              f"{at(gaps, 0.5):.1f}, p99 {at(gaps, 0.99):.1f} ms", flush=True)


def main():
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    for bypass in sys.argv[2:]:
        one = Round(sys.argv[1], int(bypass))
        one.play()
        one.report()


if __name__ == "__main__":
    main()

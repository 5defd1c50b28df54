"""curl through kvlb: methods, streams, `Expect: 100-continue`, chunks, connections used again, many client addresses.

Called as common.py says.
"""

import json
import subprocess

from common import PADDING, TIMEOUT_S, Case, endless, get, models_of, post, question, read, streaming

case = Case()
JSON = ["-H", "Content-Type: application/json"]
# More client addresses than any rule could keep at one of two engines by chance.
ADDRESSES = [f"127.0.1.{number}" for number in range(1, 17)]


def curl(*args, body=None):
    """Runs curl; returns what came and what it told of the exchange."""
    command = ["curl", "-sSv", "--max-time", str(TIMEOUT_S), *args]
    if body is not None:
        command += ["--data-binary", "@-"]
    ended = subprocess.run(command, input=body, capture_output=True, timeout=TIMEOUT_S + 5)
    told = ended.stderr.decode(errors="replace")
    if ended.returncode != 0:
        raise RuntimeError(f"curl {' '.join(args)} exited with {ended.returncode}: {told[-400:]}")
    return ended.stdout, told


def ask(base, path, body, stream, *args):
    body = streaming(body) if stream else body
    answer, told = curl(base + path, "-N", *JSON, *args, body=json.dumps(body).encode())
    wanted = "text/event-stream" if stream else "application/json"
    case.holds(f"{path}, content type", f"\n< Content-Type: {wanted}" in told, told)
    return read(answer, stream)


def methods():
    """GET, HEAD and OPTIONS, an unknown path, a broken body"""
    answer, _ = curl(case.persist + "/v1/models")
    case.equal("models", models_of(answer), models_of(get(case.engines[0] + "/v1/models")))
    head, _ = curl("-I", case.persist + "/v1/models")
    case.holds("HEAD", head.startswith(b"HTTP/1.1 200 ") and f"content-length: {len(answer)}".encode() in head.lower(), head)
    # What an engine says by itself is what it says behind kvlb.
    odd = [("-X", "OPTIONS"), ("--data-binary", "{"), ("--data-binary", ""), ("-X", "DELETE")]
    for args in odd:
        for path in ("/v1/completions", "/no/such/path"):
            status = ["-o", "/dev/null", "-w", "%{http_code} %{size_download}"]
            straight, _ = curl(*status, *JSON, *args, case.engines[0] + path)
            through, _ = curl(*status, *JSON, *args, case.persist + path)
            case.equal(f"{' '.join(args)} {path}", through, straight)
            case.saw()
    case.requests += 2


def answers():
    """answers as from the engine, streamed or not"""
    case.same_answers(ask)
    case.same_answers(lambda *what: ask(*what, "--http1.0"))
    case.same_answers(lambda *what: ask(*what, "--compressed"))


def affinity():
    """cached tokens prove affinity"""
    case.affinity(ask)


def addresses():
    """16 client addresses, each kept at one engine, both engines used"""
    engines = set()
    for address in ADDRESSES:
        body, places, answers = question("/v1/completions"), set(), []
        for _ in range(3):
            answer, told = curl(case.persist + "/v1/completions", "--interface", address, *JSON, body=json.dumps(body).encode())
            answers.append(case.saw(read(answer, False)))
            places |= {line for line in told.splitlines() if line.startswith("< x-kvlb-endpoint: ")}
        case.warmth(f"client {address}", answers, [False, True, True])
        case.equal(f"engines of client {address}", len(places), 1)
        engines |= places
    case.equal("engines of all clients", len(engines), len(case.engines))


def large():
    """3 MB with Expect: 100-continue, without, and in chunks; a large answer"""
    body = question("/v1/completions")
    straight = read(post(case.engines[0] + "/v1/completions", body), False)
    sent = json.dumps(body | {"padding": PADDING}).encode()
    ways = [("-H", "Expect: 100-continue"), ("-H", "Expect:"), ("-H", "Transfer-Encoding: chunked")]
    ways += [("-H", "Transfer-Encoding: chunked", "-H", "Expect:")]
    for way in ways:
        for base in (case.persist, case.turns):
            answer, told = curl(base + "/v1/completions", *JSON, *way, body=sent)
            case.equal(f"text after 3 MB, {way[-1]}", case.saw(read(answer, False)).text, straight.text)
            if "100-continue" in way[-1]:
                case.holds("100 Continue", "\n< HTTP/1.1 100 Continue" in told, told)
    content = {"content": "a shelf of books " * 60_000}
    answer, _ = curl(case.turns + "/tokenize", *JSON, body=json.dumps(content).encode())
    case.equal("a large answer", answer, post(case.engines[1] + "/tokenize", content))
    case.saw()


def again():
    """250 requests on one connection"""
    url = case.turns + "/v1/models"
    # More than twice the hundred after which llama.cpp closes a connection.
    _, told = curl(*[url] * 250, *["-o", "/dev/null"] * 250)
    case.equal("answers", told.count("< HTTP/1.1 200 OK"), 250)
    case.equal("connections", told.count("* Connected to "), 1)
    case.requests += 250


def leaving():
    """a client that leaves frees its engine"""

    def leave(path):
        body = json.dumps(endless(path))
        command = ["curl", "-sN", "--max-time", str(TIMEOUT_S), case.turns + path, *JSON, "--data-binary", body]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            case.holds("the beginning of a stream", process.stdout.readline().startswith(b"data: "), path)
            process.terminate()

    for path in ("/v1/completions", "/v1/chat/completions"):
        case.leaves(lambda: leave(path))


version = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
case.run(f"curl {version}", methods, answers, affinity, addresses, large, again, leaving)

"""wrk through kvlb: short storms on kept connections, without one error of a socket, a status or an answer.

Called as common.py says.
"""

import json
import pathlib
import subprocess

from common import Case

case = Case()
CONNECTIONS = 16
SCRIPT = pathlib.Path(__file__).parent / "wrk.lua"


def storm(seconds, path):
    command = ["wrk", f"-d{seconds}s", "-t2", f"-c{CONNECTIONS}", "--timeout", "20s", "--latency", "-s", str(SCRIPT)]
    ended = subprocess.run([*command, case.turns + path], capture_output=True, text=True, timeout=seconds + 40, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    case.equal(f"{path}, errors", found["errors"], {"connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0})
    case.equal(f"{path}, wrong answers", found["wrong"], 0)
    case.holds(f"{path}, answers", found["requests"] > 100, found["requests"])
    case.requests += found["requests"]
    # When its time is over, wrk leaves the requests that it has under way.
    case.unsure += CONNECTIONS
    return found["requests"] / seconds


def completions():
    """5 s of completions"""
    print(f"told: {storm(5, '/v1/completions'):.0f} completions a second")


def models():
    """2 s of GET"""
    print(f"told: {storm(2, '/v1/models'):.0f} lists of models a second")


version = subprocess.run(["wrk", "--version"], capture_output=True, text=True, check=False).stdout.split()[1]
case.cached_tokens = None
case.run(f"wrk {version}", completions, models)

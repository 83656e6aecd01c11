"""The harm that hostile forms do to other requests: a server, four streams, and each form of `hostile_forms.py`.

For each form: how fast the four go from when it is sent until it is answered (a second at least), against their speed
beside a fifth ordinary request; how much memory the server's processes hold more than before; and that it gets an
answer of the form, or a 400 with the limit and the place.

Run from the repository: `python tools/hostile.py`; the last line is JSON, and the exit status is 1 where something
harmed others.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema

from hostile_forms import FORMS

PROMPT = "Write a long story about a lighthouse keeper who counts the ships that pass before the fog comes in."
HEADERS = {"Content-Type": "application/json"}
ORDINARY = {"regex": "[a-z ]{400}"}
STREAMS = 4
LEAST_SPEED = 0.7
MOST_MB = 300.0
LEAST_S = 1.0
REMEDIES = ("more than", "at most", "must be", "cannot", "too ", "no text", "another")


class Streams:
    """Ordinary requests that never end, and the tokens that they have got so far."""

    def __init__(self, port: int) -> None:
        self.tokens = 0
        self.over = False
        self._port = port
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def rate(self, meanwhile: Callable[[], Any]) -> tuple[float, Any]:
        """Tokens a second while this is done, and what it returns."""
        began, before = time.perf_counter(), self.tokens
        value = meanwhile()
        time.sleep(max(0.0, began + LEAST_S - time.perf_counter()))
        return (self.tokens - before) / (time.perf_counter() - began), value

    def _run(self, seed: int) -> None:
        asked = {"max_tokens": 1500, "ignore_eos": True, "seed": seed, "stream": True, "speculation": "off"}
        while not self.over:
            with suppress(OSError, http.client.HTTPException):
                link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
                link.request(
                    "POST", "/v1/completions", json.dumps({"model": "default", "prompt": PROMPT, **asked}), HEADERS
                )
                for line in link.getresponse():
                    self.tokens += line.startswith(b"data: {")
                    if self.over:
                        break
                link.close()


def ask(port: int, **fields: Any) -> tuple[int, Any]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    link.request("POST", "/v1/completions", json.dumps({"model": "default", "prompt": PROMPT, **fields}), HEADERS)
    answer = link.getresponse()
    status, body = answer.status, json.loads(answer.read() or b"{}")
    link.close()
    return status, body


def megabytes(root: int) -> float:
    """What a process and all below it hold."""
    parents: dict[int, int] = {}
    kilobytes: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                for line in (folder / "smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):  # what forks share counts once
                        kilobytes[int(folder.name)] = int(line.split()[1])
    mine, grown = {root}, True
    while grown:
        below = {child for child, parent in parents.items() if parent in mine} - mine
        grown = bool(below)
        mine |= below
    return sum(kilobytes.get(one, 0) for one in mine) / 1024


def judge(form: dict[str, Any], status: int, body: Any) -> tuple[str, str | None]:
    """What became of a form, and what is wrong with that."""
    if status == 400:
        said = body["error"]["message"]
        return "refused", None if any(remedy in said for remedy in REMEDIES) else f"names no limit: {said}"
    if status != 200:
        return "failed", f"status {status}: {json.dumps(body)[:200]}"
    choice = body["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut", None
    if choice["finish_reason"] != "stop":
        return "failed", f"it ended with {choice['finish_reason']}"
    if "json" in form:
        try:
            jsonschema.validate(json.loads(choice["text"]), form["json"])
        except (ValueError, jsonschema.ValidationError) as error:
            return "failed", f"not of the form: {str(error)[:200]}"
    return "answered", None


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 180
    while server.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            if ask(port, max_tokens=1)[0] == 200:
                return
        time.sleep(0.3)
    raise SystemExit("the server did not start")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def unknown(form: dict[str, Any]) -> dict[str, Any]:
    """The same form in other words: what a server remembers of it does not count."""
    match form:
        case {"json": schema}:
            return {"json": {**schema, "$comment": "once more"}}
        case {"regex": pattern}:
            return {"regex": f"(?:{pattern})"}
        case {"grammar": grammar}:
            return {"grammar": f"{grammar}\n# once more"}
        case {"structural_tag": tag}:
            return {"structural_tag": json.dumps(tag, indent=1)}
        case _:
            return {"choice": list(reversed(form["choice"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="forms whose name has this")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each hostile request")
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "slipstream", "serve", "--port", str(port), "--memory", "512MiB"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, server)
        streams = Streams(port)
        for form in (ORDINARY, {"json": {"type": "object"}}):
            ask(port, max_tokens=8, structured_outputs=form)
        time.sleep(5)  # the process that tries forms out has started, and the planner has measured
        fifth = {"max_tokens": options.max_tokens, "structured_outputs": ORDINARY}
        beside = median(streams.rate(lambda: ask(port, **fifth))[0] for _ in range(5))
        held = megabytes(server.pid)
        print(f"four streams beside a fifth ordinary request: {beside:.1f} tok/s; {held:.0f} MB", flush=True)
        rows: list[dict[str, Any]] = []
        for name, form in FORMS.items():
            if options.only in name:
                rows.append(one_form(name, form, port, server.pid, streams, beside, held, options.max_tokens))
                told = "{outcome:9s} {speed:5.2f} of the speed {grown_mb:+5.0f} MB {seconds:6.2f} s  {name}"
                print(
                    told.format(**rows[-1]) + (f"  WRONG: {rows[-1]['wrong']}" if rows[-1]["wrong"] else ""), flush=True
                )
        streams.over = True
        alive = ask(port, max_tokens=4)[0] == 200
    finally:
        server.terminate()
        server.wait(60)
    faults = {row["name"]: row["wrong"] for row in rows if row["wrong"]}
    outcomes = [row["outcome"] for row in rows]
    print(
        json.dumps(
            {
                "forms": len(rows),
                **{kind: outcomes.count(kind) for kind in ("answered", "cut", "refused", "failed")},
                "beside_ordinary_tok_s": round(beside, 1),
                "least_speed": round(min(row["speed"] for row in rows), 2),
                "median_speed": round(median(row["speed"] for row in rows), 2),
                "most_grown_mb": round(max(row["grown_mb"] for row in rows)),
                "alive": alive,
                "wrong": faults,
            },
            ensure_ascii=False,
        )
    )
    sys.exit(bool(faults) or not alive)


def one_form(
    name: str, form: dict[str, Any], port: int, pid: int, streams: Streams, beside: float, held: float, tokens: int
) -> dict[str, Any]:
    """A form that seems to slow others down is sent once more: the machine may have been at something else."""
    most, over = 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.25):
            most = max(most, megabytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    speed, (status, body) = streams.rate(lambda: ask(port, max_tokens=tokens, structured_outputs=form))
    seconds = time.perf_counter() - began
    if speed < LEAST_SPEED * beside:
        time.sleep(2)
        speed, (status, body) = streams.rate(lambda: ask(port, max_tokens=tokens, structured_outputs=unknown(form)))
    over.set()
    watcher.join()
    outcome, wrong = judge(form, status, body)
    if wrong is None and speed < LEAST_SPEED * beside:
        wrong = f"others had {speed / beside:.2f} of their speed"
    if wrong is None and most - held > MOST_MB:
        wrong = f"memory grew by {most - held:.0f} MB"
    grown = max(most, held) - held
    return {
        "name": name,
        "outcome": outcome,
        "speed": speed / beside,
        "grown_mb": grown,
        "seconds": seconds,
        "wrong": wrong,
    }


if __name__ == "__main__":
    main()

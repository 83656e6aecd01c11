"""The harm that hostile forms do to other requests: a server, four streams, and each form below.

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

Form = dict[str, Any]


def _nested(levels: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _object(required: bool = True, /, **properties: Any) -> Form:
    return {"type": "object", "properties": properties, "required": list(properties) if required else []}


def _ambiguous(rules: int) -> str:
    """A grammar in which every text of letters can be read in very many ways."""
    lines = (f'r{i} ::= [a-z]+ r{(i + 1) % rules} | [0-9a-z]+ " " r{(7 * i + 3) % rules} | "x"' for i in range(rules))
    return "\n".join(["root ::= r0", *lines])


def _doubling(levels: int) -> str:
    """Text without a choice that doubles with every rule."""
    lines = (f"r{i} ::= r{i + 1} r{i + 1}" for i in range(levels))
    return "\n".join(["root ::= r0", *lines, f'r{levels} ::= "ab"'])


_REF = {"$ref": "#"}

SCHEMAS: dict[str, Any] = {
    "a required property of its own kind": _object(a=_REF),
    "… behind a free text": _object(text={"type": "string"}, a=_REF),
    "nothing but itself": _REF,
    "two that refer to each other": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        **_object(x={"$ref": "#/$defs/a"}),
    },
    "two that need each other": {
        "$defs": {"a": _object(b={"$ref": "#/$defs/b"}), "b": _object(a={"$ref": "#/$defs/a"})},
        "$ref": "#/$defs/a",
    },
    "items of its own kind": {"type": "array", "minItems": 1, "items": _REF},
    "trees of its own kind": {"type": "array", "minItems": 2, "items": {"anyOf": [_REF, _object(a=_REF)]}},
    "100,000 items that are known": {"type": "array", "minItems": 100_000, "items": {"const": 1}},
    "10^18 items": {"type": "array", "minItems": 10**18, "maxItems": 10**18, "items": {"const": "x"}},
    "2,000 items of 2,000": {
        "type": "array",
        "minItems": 2000,
        "items": {"type": "array", "minItems": 2000, "items": {"const": 0}},
    },
    "at most 10^9 items": {"type": "array", "maxItems": 10**9, "items": {"type": "boolean"}},
    "a text of 10^9 characters": {"type": "string", "minLength": 10**9},
    "a text of 20,000 to 30,000 characters": {"type": "string", "minLength": 20_000, "maxLength": 30_000},
    "40 texts of different lengths": {
        "prefixItems": [{"type": "string", "minLength": n, "maxLength": 3 * n} for n in range(40)]
    },
    "bounds of 300 digits": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "a bound of 10^308": {"type": "number", "minimum": -1e308, "maximum": 1e308},
    "multiples of 999,983": {"type": "integer", "multipleOf": 999_983},
    "multiples of 997": {"type": "integer", "multipleOf": 997},
    "3,000 values": {"enum": [f"value {i}" for i in range(3000)]},
    "2,000 values in 30 places": {
        "$defs": {"e": {"enum": [f"v{i}" for i in range(2000)]}},
        **_object(**{f"p{i}": {"$ref": "#/$defs/e"} for i in range(30)}),
    },
    "a value of 60,000 characters": {"const": "x" * 60_000},
    "values that part late": {"enum": ["a" * 4000 + str(i) for i in range(14)]},
    "256 optional properties": _object(False, **{f"p{i}": {"type": "string"} for i in range(256)}),
    "256 optional ones and free names": {
        **_object(False, **{f"p{i}": {"type": "integer"} for i in range(256)}),
        "additionalProperties": True,
    },
    "900 kinds of objects": {"anyOf": [_object(**{f"p{i % 7}": {"const": i}}) for i in range(440)]},
    "kinds of kinds of kinds": {
        "$defs": {f"k{i}": {"anyOf": [{"$ref": f"#/$defs/k{i + 1}"}] * 8} for i in range(30)}
        | {"k30": {"type": "null"}},
        "$ref": "#/$defs/k0",
    },
    "objects within objects, 8 each": {
        "$defs": {f"k{i}": _object(**{f"p{j}": {"$ref": f"#/$defs/k{i + 1}"} for j in range(8)}) for i in range(20)}
        | {"k20": {"type": "null"}},
        "$ref": "#/$defs/k0",
    },
    "32 levels": _nested(31),
    "300 levels": _nested(300),
    "a pattern in a pattern in a pattern": {"type": "string", "pattern": "((a{1,30}){1,30}){1,30}"},
    "60 patterns": {"prefixItems": [{"type": "string", "pattern": f"^[a-z]{{{n},200}}x$"} for n in range(60)]},
    "a pattern that blows up backwards": {"type": "string", "pattern": "^(a|b)*a(a|b){90}$"},
    "any pattern of names": {"type": "object", "patternProperties": {"^(a+)+$": _REF}},
    "64 tags": {"oneOf": [_object(t={"const": i}, a=_REF) for i in range(64)]},
}

PATTERNS: dict[str, str] = {
    "repeats within repeats": "((a{1,30}){1,30}){1,30}",
    "a million": "a{1000000}",
    "2,000 that are known": "a{2000}",
    "stars within stars": "((((a*)*)*)*)*b",
    "the same twice": "(x+x+)+y",
    "a or aa": "(a|aa){1,900}b",
    "what stood 200 before the end": "(a|b)*a(a|b){200}",
    "three that overlap": "(.*a.{60}|.*b.{60}|.*c.{59})*",
    "all but a few characters": r"([^a]{1,300}[^b]{1,300}[^c]{1,300})+",
    "Unicode classes": "([一-鿿]|[\\u0400-\\u04ff]|[^\\x00-\\x7f]){1,900}",
    "every plane": "([\\U00010000-\\U0010ffff]|.){400}",
    "properties": r"\p{L}{1,500}",
    "words of words": r"(\w+\s?){1,400}",
    "400 brackets": "(" * 400 + "a" + ")" * 400,
    "60 brackets with stars": "(" * 60 + "a" + ")*" * 60,
    "400 choices": "(" + "|".join(f"{'a' * (i % 4)}b{i}" for i in range(280)) + ")+",
}

GRAMMARS: dict[str, str] = {
    "a text without end": 'root ::= "a" root',
    "a text without end, once there was a choice": 'root ::= [xy] tail\ntail ::= "ab" tail',
    "itself first": 'root ::= root "a"',
    "itself twice": 'root ::= root root | "a"',
    "itself three times": "root ::= root root root | [a-z]",
    "itself and nothing": 'root ::= root root | "" | "a"',
    "nothing, often": 'root ::= (("")*)* "a"',
    "in turn": 'root ::= a | "x"\na ::= b | "x"\nb ::= root | "x" a',
    "8 rules that begin alike": _ambiguous(8),
    "22 rules that begin alike": _ambiguous(22),
    "text that doubles 30 times": _doubling(30),
    "text that doubles 400 times": _doubling(400),
    "brackets that close": 'root ::= "(" root ")" root | "[" root "]" root | ""',
    "an even number of letters": 'root ::= [a-z] root [a-z] | [a-z] [a-z] | ""',
    "repeats of 4,000": "root ::= ([a-z]{1,60}){1,60}",
    "repeats of repeats": 'root ::= (("a"{1,99}){1,99}){1,99}',
    "5,000 rules": "root ::= r0\n" + "\n".join(f'r{i} ::= "a" | r{i + 1}' for i in range(3000)) + '\nr3000 ::= "b"',
    "400 rules in a row": "root ::= r0\n"
    + "\n".join(f'r{i} ::= "" r{i + 1} | r{i + 1} "a"' for i in range(400))
    + '\nr400 ::= "b"',
    "4,000 characters, each of two kinds": "root ::= " + " ".join(["[ab]"] * 3900),
    "a text of 60,000 characters": f'root ::= "{"ab" * 30_000}"',
    "1,900 choices": "root ::= (" + " | ".join(f'"{"a" * (i % 9)}{i}"' for i in range(1900)) + ")+",
    "all of Unicode": "root ::= ([\\u0080-\\U0010ffff] | [^\\u0080-\\U0010ffff])+",
    "letters and letters": "root ::= ([a-z]+ [a-z]+ [a-z]+ [a-z]+)+",
    "sums without brackets": 'root ::= e\ne ::= e "+" e | e "*" e | e e | [a-z0-9]+',
}


def _tagged(schema: Any, tags: int = 1, **more: Any) -> Form:
    parts = [
        {"type": "tag", "begin": f"<t{i}>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</t>"}
        for i in range(tags)
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<t"], "tags": parts, **more}}


TAGS: dict[str, Form] = {
    "a call of its own kind": _tagged(SCHEMAS["a required property of its own kind"], at_least_one=True),
    "128 calls of 7 properties": _tagged(_object(**{f"p{i}": {"type": "string"} for i in range(7)}), 128),
    "3,000 triggers": _tagged({}, triggers=["<t", *(f"<{'a' * (i % 9)}{i}" for i in range(3000))]),
}

FORMS: dict[str, Form] = {
    **{f"json: {name}": {"json": schema} for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": {"regex": pattern} for name, pattern in PATTERNS.items()},
    **{f"grammar: {name}": {"grammar": grammar} for name, grammar in GRAMMARS.items()},
    **{f"structural_tag: {name}": {"structural_tag": tag} for name, tag in TAGS.items()},
    "choice: 1,000 that part late": {"choice": ["a" * 50 + str(i) for i in range(1000)]},
}


if __name__ == "__main__":
    print(json.dumps({name: len(json.dumps(form)) for name, form in FORMS.items()}, indent=1, ensure_ascii=False))

PROMPT = "Write a long story about a lighthouse keeper who counts the ships that pass before the fog comes in."
HEADERS = {"Content-Type": "application/json"}
ORDINARY = {"regex": "[a-z ]{400}"}
STREAMS = 4
LEAST_SPEED = 0.7
MOST_MB = 300.0
LEAST_S = 1.0
REMEDIES = ("more than", "at most", "must be", "cannot", "too ", "no text", "another")


class Streams:
    """Ordinary requests that never end, with a count of their tokens."""

    def __init__(self, port: int) -> None:
        self.tokens = 0
        self.over = False
        self._port = port
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def rate(self, meanwhile: Callable[[], Any]) -> tuple[float, Any]:
        """Tokens per second while `work` runs, and its result."""
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
    """Memory of a process and all its descendants."""
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
    """The kind of answer, and its fault."""
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
    """The same form with other names, since a server remembers forms."""
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
    """Send a form; once more if it seems to slow the others, since the machine may have been busy."""
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

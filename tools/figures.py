"""Every figure of the docs that needs a GPU, one command after another, in one call that can be interrupted.

    python tools/figures.py --out FOLDER --target BIG --prompts spec_bench.jsonl [--vllm DIR] [--budget 1500]
                            [--parts serve,cells,curve] [--heads FOLDER]
    python tools/figures.py --list

BIG is made by `python tools/widen.py default BIG` where it is not there. What each part printed is in FOLDER/PART.txt,
what it measured in a JSON file there; FOLDER/done.json says how each ended. A part that ended well is not run again, so
that an interrupted call can go on. With --budget no part is begun that would not end in time. The first call
on a machine should do nothing else beside it: these are timings.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
_PARTING_S = 20.0


@dataclass(frozen=True, slots=True)
class Asked:
    """The paths of a call. vllm: a folder with vLLM, if it is not installed."""

    out: Path
    target: Path
    prompts: Path
    heads: Path | None = None
    vllm: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One command. seconds: about its time on an H200; peer: it runs vLLM."""

    name: str
    seconds: int
    what: str
    command: Callable[[Asked], Sequence[str]]
    peer: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    seconds: float


def _wide(script: str, *flags: str) -> Callable[[Asked], Sequence[str]]:
    """A command that measures the large model. All parts of a script write into one file."""

    def command(asked: Asked) -> Sequence[str]:
        models = ["--small", "default", "--target", str(asked.target), "--work", str(asked.out / "wide")]
        heads = ["--heads", str(asked.heads)] if asked.heads else []
        peer = ["--peer-path", asked.vllm] if asked.vllm else []
        kept = ["--json", str(asked.out / f"{script}.json"), "--add"]
        return [str(HERE / f"{script}.py"), *models, *heads, *peer, "--prompts", str(asked.prompts), *kept, *flags]

    return command


def _accepted(drafter: str, tokens: int) -> Callable[[Asked], Sequence[str]]:
    def command(asked: Asked) -> Sequence[str]:
        named = f"{drafter}:{asked.heads / drafter}" if asked.heads else drafter
        kept = ["--json", str(asked.out / f"acceptance-{drafter}.json")]
        room = ["--at-once", "160", "--memory", "16GiB", "--draft-tokens", str(tokens)]
        return [str(HERE / "acceptance.py"), "--prompts", str(asked.prompts), "--drafter", named, *room, *kept]

    return command


def _served(large: bool) -> Callable[[Asked], Sequence[str]]:
    def command(asked: Asked) -> Sequence[str]:
        model, name = (str(asked.target), "serve-large") if large else ("default", "serve")
        kept = ["--json", str(asked.out / f"{name}.json")]
        return [str(HERE / "http_cost.py"), "--model", model, "--requests", "32", "--memory", "16GiB", *kept]

    return command


def _passes(parts: str, *flags: str) -> Callable[[Asked], Sequence[str]]:
    def command(asked: Asked) -> Sequence[str]:
        kept = ["--json", str(asked.out / "kernel_table.json"), "--add"]
        return [str(HERE / "kernel_table.py"), "--target", str(asked.target), "--parts", parts, *kept, *flags]

    return command


_LARGER = ("--sizes", "2,4,8,16,32", "--sampled-sizes", "", "--repeats", "1")
_OURS = "plain,eagle3,eagle3+suffix,draft"
PARTS = (
    Part("passes", 60, "what a pass and a draft take, kernel by kernel", _passes("tree,heads,kernels")),
    Part("crowds", 60, "the same with 16 and 64 requests", _passes("kernels", "--requests", "16,64")),
    Part("curve", 330, "one request, every mode, T=0 and 1", _wide("curve", "--parts", "curve", "--sizes", "1")),
    Part("serve", 60, "what HTTP costs, default model", _served(False)),
    Part("serve-large", 60, "what HTTP costs, large model", _served(True)),
    Part("cells", 540, "auto and fixed settings, cell by cell", _wide("cells", "--seconds", "0.3", "--budget", "520")),
    Part("sizes", 200, "2 to 32 at once", _wide("curve", "--parts", "curve", "--modes", _OURS, *_LARGER)),
    Part("acceptance-eagle3", 180, "tau on Spec-Bench", _accepted("eagle3", 63)),
    Part("acceptance-draft", 180, "tau on Spec-Bench", _accepted("draft", 5)),
    Part("acceptance-medusa", 180, "tau on Spec-Bench", _accepted("medusa", 63)),
    Part("interchange", 130, "our head's tau in vLLM", _wide("curve", "--parts", "interchange"), peer=True),
    Part("peers", 310, "vLLM's curve", _wide("curve", "--parts", "peers", "--peers", "plain,eagle3"), peer=True),
    Part(
        "peers-more",
        300,
        "vLLM's other modes",
        _wide("curve", "--parts", "peers", "--sizes", "1", "--sampled-sizes", "", "--peers", "ngram,draft"),
        peer=True,
    ),
    Part("cells-peers", 400, "vLLM in the same cells", _wide("cells", "--parts", "peers"), peer=True),
)


def left(parts: Sequence[Part], done: Mapping[str, Done]) -> list[Part]:
    """The parts that have not ended well yet."""
    return [part for part in parts if part.name not in done or done[part.name].code]


def run(asked: Asked, parts: Sequence[Part], budget: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """Run the parts that there is time for. False: one of them failed."""
    asked.out.mkdir(parents=True, exist_ok=True)
    kept = asked.out / "done.json"
    done = {name: Done(**told) for name, told in json.loads(kept.read_text()).items()} if kept.exists() else {}
    begun = clock()
    failed = []
    for part in left(parts, done):
        at = clock() - begun
        if at + part.seconds > budget:
            print(f"{at:5.0f} s  {part.name}: no time, it takes about {part.seconds} s", flush=True)
            continue
        print(f"{at:5.0f} s  {part.name}: {part.what} (about {part.seconds} s)", flush=True)
        code = _one(asked, part, budget - at)
        took = clock() - begun - at
        done[part.name] = Done(code, round(took, 1))
        kept.write_text(json.dumps({name: asdict(one) for name, one in done.items()}, indent=1) + "\n")
        if code:
            failed.append(part.name)
            print(f"         {part.name} failed ({code}) after {took:.0f} s: {asked.out / part.name}.txt", flush=True)
    return not failed


def _one(asked: Asked, part: Part, most_s: float) -> int:
    """Run a part in a process group of its own, which ends with it; returns the exit code."""
    surroundings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (asked.out / f"{part.name}.txt").open("w") as log:
        command = [sys.executable, *part.command(asked)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=surroundings, start_new_session=True)
        try:
            return process.wait(most_s)
        except subprocess.TimeoutExpired:
            return _ended(process)
        except BaseException:
            _ended(process)
            raise


def _ended(process: subprocess.Popen[bytes]) -> int:
    """End the group by SIGTERM, on which peers write their results, then by SIGKILL."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.wait(_PARTING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    known = {part.name: part for part in PARTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where logs and JSON files go")
    parser.add_argument("--target", type=Path, help="the large model")
    parser.add_argument("--prompts", type=Path, help="a Spec-Bench file (JSON lines)")
    parser.add_argument("--heads", type=Path, help="a folder with eagle3, draft and medusa; default: the shipped ones")
    parser.add_argument("--vllm", help="a folder with vLLM, where it is not installed; without vLLM leave peers out")
    parser.add_argument("--parts", default=",".join(known), help="by comma, in the order that they are to be run in")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all of them")
    parser.add_argument("--list", action="store_true", help="say what there is, and how long it takes")
    options = parser.parse_args(arguments)
    if options.list:
        for part in PARTS:
            print(f"{part.name:18} {part.seconds:4} s  {part.what}{' (needs vLLM)' if part.peer else ''}")
        return 0
    names = [name for name in options.parts.split(",") if name]
    if wrong := [name for name in names if name not in known]:
        parser.error(f"--parts: {wrong[0]!r} is unknown; choose from {', '.join(known)}")
    for name in ("out", "target", "prompts"):
        if getattr(options, name) is None:
            parser.error(f"--{name} is needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = Asked(options.out, options.target, options.prompts, options.heads, options.vllm)
    return 0 if run(asked, [known[name] for name in names], options.budget) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The planner's cells in a simulated engine, on made-up texts: to try a change of the planner without a GPU.

    python tools/play.py [--at-once 1,4,16,64] [--temperatures 0,1] [--seeds 1,2] [--tasks hard,math] [--json play.json]
    python tools/play.py --offers T0.json T1.json …              real text: `offers.py` wrote down what drafters guess

The scheduler, the drafting rules and the planner are the real ones (`slipstream/bench/replica.py`), and requests come
in a closed loop, as in `cells.py`. Passes, drafts, waits and catching up cost what they were seen to cost on an H200
with the 7B-class target. Texts are drawn: how often each drafter is right by what was measured for the task, more often
in stretches, which are the same for all drafters; `suffix` knows what echoes. So single figures mean little, but over
some seeds they tell whether a change helps, and where not. `hard` is text that hardly anybody guesses. With --offers
the texts are real, and so is what the drafters guess at every place of them; a seed is the order of the tasks.

Printed are, for each cell, tokens a second of `auto` by those of plain decoding and of the best fixed setting; then the
means, how many cells are below 0.93 of the best, and the worst of them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from cells_table import OVER_BEST, best_fixed
from cells_work import tokens_of
from results import chosen, sizes
from simulator.costs import Curve, RoundCosts
from simulator.recording import (
    Costs,
    DrafterKind,
    DraftSeen,
    HostSeen,
    Machine,
    Offer,
    PassSeen,
    Recording,
    Trace,
    WaitSeen,
    unpacked,
)
from simulator.replayed import Walk
from simulator.replica import Replica, Setting
from slipstream.bench.traffic import Served
from slipstream.core.errors import ConfigError
from slipstream.engine.state import Answer
from slipstream.plan import types as measured

PASS_MS = {1: 3.72, 4: 3.82, 8: 3.88, 16: 4.03, 32: 4.19, 48: 4.41, 64: 4.72, 128: 5.4, 256: 8.2}
TREE_MS = {1: 3.72, 4: 3.88, 8: 4.0, 16: 4.14, 32: 4.46, 48: 4.69, 64: 4.95, 128: 5.73, 256: 8.9}
READ_MS = {1: 4.1, 16: 4.2, 64: 4.4, 256: 8.0}
"""Of a pass, by its rows; of one that checks trees which grew on the device; and of one that reads prompts. Medians of
rounds in which the device did not wait."""
DRAFT_MS = {
    "model": {1: 0.087, 4: 0.09, 16: 0.107, 64: 0.156},
    "eagle": {1: 0.21, 4: 0.32, 16: 0.41, 64: 0.61},
}
WAIT_MS = {1: 1.0, 4: 1.6, 16: 3.0, 64: 7.0}
"""By requests: of a guess (of a tree: a level), and of a wait for drafters on the host."""
KEY_S = 1e-9
"""That a token of context adds to a pass, as an engine knows it: next to nothing here."""
CATCH_UP_MS = (1.8, 0.45)
"""Once, and for each request that a drafter has missed something of."""
DEEP, DEEPEST, NODES, LEVELS, ECHO = 5, 11, 63, 10, 24
"""A draft model's guesses, usually and at the most, a tree's nodes and levels, and tokens that `suffix` offers."""


class Text(NamedTuple):
    """Tokens of a round with the draft model and with the head, alone; and the part that echoes."""

    model: float
    eagle: float
    echoes: float = 0.0


TASKS: dict[str, tuple[Text, Text]] = {  # at temperature 0, and above
    "multi_turn": (Text(1.65, 2.64), Text(1.62, 2.61)),
    "translation": (Text(3.28, 4.34, 0.35), Text(1.58, 2.41)),
    "summarization": (Text(1.86, 2.67, 0.1), Text(1.71, 2.4)),
    "qa": (Text(2.11, 3.66, 0.05), Text(1.72, 2.93)),
    "math": (Text(2.94, 6.19, 0.05), Text(2.67, 4.86, 0.05)),
    "rag": (Text(2.19, 3.3, 0.1), Text(1.81, 3.02)),
    "hard": (Text(1.3, 1.8), Text(1.3, 1.8)),
}
USUAL = tuple(task for task in TASKS if task != "hard")
SETTINGS = {
    "plain": Setting("off"),
    "auto": Setting("planned", "suffix+eagle+model"),
    "draft": Setting("fixed", "model", DEEP),
    "eagle3": Setting("fixed", "eagle", NODES),
    "eagle3-15": Setting("fixed", "eagle", 15),
    "eagle3-3": Setting("fixed", "eagle", 3),
}
WARM_S, REPEATS, LONGEST = 0.2, 2, 128
NAMES = {"eagle3": "eagle", "draft": "model"}
"""Of the drafters that are shipped: what they are called here."""


# --- texts ------------------------------------------------------------------------------------------------------------


def traces(text: Text, temperature: float, answers: int, dice: random.Random, longest: int = LONGEST) -> list[Trace]:
    """So many answers to such prompts, and what each drafter offers at every place of them."""
    chances = _share(text.model, DEEP), _share(text.eagle, LEVELS)
    return [_trace(text, chances, temperature, dice, longest) for _ in range(answers)]


def _trace(text: Text, chances: tuple[float, float], temperature: float, dice: random.Random, longest: int) -> Trace:
    length = longest if dice.random() < 0.8 else dice.randrange(20, longest)
    own, ease, left = dice.gauss(0, 0.4), 0.0, 0
    model, eagle, echo = list[bool](), list[bool](), list[bool]()  # by place: is that token guessed?
    for _ in range(length + ECHO + DEEPEST):
        ease = 0.8 * ease + dice.gauss(0, 0.5)
        left = left - 1 if left else 18 if dice.random() < text.echoes / 18 else 0
        lean = own + ease + 2.5 * bool(left)
        for found, chance in ((model, chances[0]), (eagle, chances[1])):
            found.append(dice.random() < 1 / (1 + math.exp(-math.log(chance / (1 - chance)) - lean)))
        echo.append(bool(left))
    places = range(length)
    offers = {
        "suffix": tuple(_echo(at, _run(echo, at, ECHO), dice) for at in places),
        "eagle": tuple(_tree(at, _run(eagle, at, LEVELS), dice) for at in places),
        "model": tuple(Offer(at, DEEPEST, tuple(range(_run(model, at, DEEPEST)))) for at in places),
    }
    return Trace(100, length, 0.0, 0.0, 0.0, tuple(offers), offers, temperature, text.echoes)


def _share(tau: float, deep: int) -> float:
    """Of guesses that are right, where a round brings so many tokens with so many guesses in a row."""
    low, high = 0.001, 0.999
    for _ in range(40):
        share = (low + high) / 2
        low, high = (share, high) if sum(share**n for n in range(deep + 1)) < tau else (low, share)
    return low


def _run(right: Sequence[bool], at: int, most: int) -> int:
    return next((n for n in range(most) if not right[at + n]), most)


def _echo(at: int, right: int, dice: random.Random) -> Offer:
    if right >= 2:
        return Offer(at, ECHO, tuple(range(right)), tuple(0.93 ** (n + 1) for n in range(ECHO)))
    nodes = 4 * (dice.random() < 0.1)
    return Offer(at, nodes, (), tuple(0.3 ** (n + 1) for n in range(nodes)))


def _tree(at: int, right: int, dice: random.Random) -> Offer:
    """The best nodes come first, and the right ones are mostly among them."""
    path, place = list[int](), -1
    for _ in range(right):
        place += 1 if dice.random() < 0.62 else dice.randrange(2, 9)
        if place < NODES:
            path.append(place)
    above, depths, parents = dict(zip(path, [-1, *path], strict=False)), list[int](), list[int]()
    for node in range(NODES):
        parent = above.get(node, -1 if node < 2 or dice.random() < 0.1 else dice.randrange(max(0, node - 8), node))
        while parent >= 0 and depths[parent] >= LEVELS - 1:
            parent = parents[parent]
        parents.append(parent)
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return Offer(at, NODES, tuple(path), None, tuple(parents))


# --- engines ----------------------------------------------------------------------------------------------------------


class H200(RoundCosts):
    """As it was seen."""

    def __init__(self) -> None:
        super().__init__(seen_costs(), apart=True)
        self._trees = Curve((rows, 1e-3 * ms, 9) for rows, ms in TREE_MS.items())

    def pass_s(
        self,
        rows: int,
        read_rows: int,
        load: measured.Load,
        *,
        is_tree: bool = False,
        wake: float = 0.0,
        along: bool = False,
    ) -> float:
        seconds = super().pass_s(rows, read_rows, load, wake=wake, along=along)
        return seconds + self._trees.at(rows) - self._pass.at(rows) if is_tree else seconds

    def catch_up_s(self, drafter: str, requests: int) -> float:
        once, each = CATCH_UP_MS
        return 1e-3 * (once + each * requests)


def seen_costs() -> Costs:
    passes = [PassSeen(1, rows, 0, 0, 1e-3 * ms, 9) for rows, ms in PASS_MS.items()]
    reads = [PassSeen(1, 0, rows, 0, 1e-3 * ms, 9) for rows, ms in READ_MS.items()]
    drafts = [
        DraftSeen(name, requests, nodes, 1e-3 * nodes * ms, 9)
        for name, by_requests in DRAFT_MS.items()
        for requests, ms in by_requests.items()
        for nodes in (1, 2, 5, 10)
    ]
    waits = [WaitSeen(requests, requests, 0, 1e-3 * ms, 9) for requests, ms in WAIT_MS.items()]
    return Costs((*passes, *reads), tuple(drafts), (HostSeen(1, 0.0, 9),), tuple(waits))


def known_costs() -> measured.MeasuredCosts:
    """What an engine measures when it starts."""
    drafts = {
        name: tuple(
            measured.DraftSeen(requests, measured.Curve((1, 2, 5, 10), tuple(1e-3 * n * ms for n in (1, 2, 5, 10))))
            for requests, ms in by_requests.items()
        )
        for name, by_requests in DRAFT_MS.items()
    }
    passes = measured.Curve(tuple(PASS_MS), tuple(1e-3 * ms for ms in PASS_MS.values()))
    return measured.MeasuredCosts(passes, KEY_S, drafts=drafts)


MACHINE = Machine(
    num_pages=40000,
    page_size=16,
    max_model_len=2048,
    max_num_seqs=64,
    batch_tokens=2048,
    draft_rows=256,
    draft_tokens=None,
    row_slope=0.001,
    queued=True,
)
KINDS = (
    DrafterKind("suffix", False, ECHO),
    DrafterKind("eagle", True, NODES, levels=LEVELS, most_nodes=NODES, width=8),
    DrafterKind("model", True, DEEP, planned_draft_tokens=DEEPEST),
)


class Warm(Replica):
    """Prompts were read before, by all drafters, and are in the cache but for a few rows."""

    def _admit(self, answer: Answer) -> None:
        self.drafting.start(answer)


@dataclass(slots=True)
class Engine:
    """One that is simulated, with all that its planner has learned so far."""

    setting: Setting
    now: float = 0.0
    replica: Replica = field(init=False)

    def __post_init__(self) -> None:
        recording = Recording("made up", MACHINE, KINDS, seen_costs(), ())
        self.replica = Warm(recording, H200(), self.setting)
        self.replica.drafting.planner.adopt(known_costs())  # which tell apart more than a recording does

    def window(self, texts: Sequence[Trace], at_once: int, seconds: float) -> float:
        """Tokens a second in a closed loop of these, from when all of them decode."""
        replica, tokens, begun = self.replica, 0, None
        coming = self._requests(texts, at_once)
        for _ in range(at_once):
            next(coming)
        while begun is None or self.now - begun < seconds:
            decoding = sum(answer.decoding for answer in replica.scheduler.running)
            before = replica.accepted
            done = replica.step(self.now)
            self.now = replica.busy_until
            if begun is not None:
                tokens += decoding + replica.accepted - before
            elif decoding >= at_once:
                begun = self.now
            for _ in done:
                next(coming)
        replica.clear()
        return tokens / (self.now - begun)

    def _requests(self, texts: Sequence[Trace], at_once: int) -> Iterator[None]:
        """Each time the next of them comes."""
        longest = max(text.output_tokens for text in texts)
        for number in count():
            text = texts[number % len(texts)]
            tokens = min(text.output_tokens, tokens_of(number, at_once, longest))
            self.replica.add(Served(self.now, 8, tokens), Walk(text, {}, random.Random(number)))
            yield


# --- the cells --------------------------------------------------------------------------------------------------------


Texts = Callable[[str, float, int], list[Trace]]
"""By task, temperature and number of requests."""


def drawn(seed: int) -> Texts:
    dice = random.Random(seed)
    return lambda task, temperature, at_once: traces(TASKS[task][temperature > 0], temperature, max(16, at_once), dice)


def offered(files: Sequence[Path]) -> dict[tuple[str, float], list[Trace]]:
    """By task and temperature, what `offers.py` wrote."""
    found: dict[tuple[str, float], list[Trace]] = {}
    for file in files:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as opened:
            told = json.load(opened)
        for task, answers in told["tasks"].items():
            found[task, told["temperature"]] = [_renamed(unpacked(answer)) for answer in answers]
    return found


def _renamed(trace: Trace) -> Trace:
    offers = {NAMES.get(name, name): offers for name, offers in trace.offers.items()}
    return replace(trace, drafters=tuple(offers), offers=offers)


def play(
    tasks: Sequence[str], loads: Sequence[int], temperatures: Sequence[float], texts_of: Texts, seconds: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Cell after cell, tokens a second of every setting. Engines go on from one to the next."""
    engines = {name: Engine(setting) for name, setting in SETTINGS.items()}
    for at_once in loads:
        for temperature in temperatures:
            is_warm = False
            for task in tasks:
                texts = texts_of(task, temperature, at_once)
                found = {}
                for name, engine in engines.items():
                    if not is_warm:
                        engine.window(texts, at_once, WARM_S)
                    found[name] = fmean(engine.window(texts, at_once, seconds) for _ in range(REPEATS))
                is_warm = True
                yield f"{task} x{at_once} T={temperature:g}", found


def over_best(rates: dict[str, float]) -> float:
    return rates["auto"] / rates[best_fixed(rates)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--at-once", default="1,4,16,64", help="requests, by comma, of 1, 4, 16 and 64")
    made.add_argument("--temperatures", default="0,1", help="by comma, of 0 and 1")
    made.add_argument("--tasks", help=f"one after the other, by comma, of {', '.join(TASKS)}, or those of --offers")
    made.add_argument("--seeds", default="1", help="by comma: other texts for each")
    made.add_argument("--offers", type=Path, nargs="+", default=(), help="files that offers.py wrote: real texts")
    made.add_argument("--seconds", type=float, default=0.3, help="of each measurement of a setting in a cell")
    made.add_argument("--json", type=Path, help="where the results go")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    real = offered(options.offers)
    known = tuple(dict.fromkeys(task for task, _ in real)) if real else tuple(TASKS)
    try:
        seeds, loads = sizes("--seeds", options.seeds), sizes("--at-once", options.at_once)
        named = options.tasks or ",".join(known if real else USUAL)
        tasks = [chosen("--tasks", task, known)[0] for task in named.split(",") if task]
        temperatures = [float(one) for one in chosen("--temperatures", options.temperatures, ("0", "1"))]
    except ConfigError as error:
        parser().error(str(error))
    for task, warmth in product(tasks, temperatures) if real else ():
        if (task, warmth) not in real:
            parser().error(f"--offers: no file has {task} at --temperatures {warmth:g}; leave it out, or add its file")
    results: dict[str, Any] = {"cells": {}}
    ratios: dict[str, float] = {}
    for seed in seeds:
        texts_of = (lambda task, temperature, _: real[task, temperature]) if real else drawn(seed)
        order = random.Random(seed).sample(tasks, len(tasks)) if real else tasks
        for cell, rates in play(order, loads, temperatures, texts_of, options.seconds):
            name = f"{cell}, seed {seed}"
            while name in results["cells"]:
                name += "'"  # the same task, once more
            results["cells"][name] = rates
            ratios[name] = over_best(rates)
            print(f"{name}: {rates['auto'] / rates['plain']:.2f} by plain, {ratios[name]:.3f} by the best", flush=True)
    worst = sorted(ratios, key=ratios.__getitem__)[:6]
    results["mean"] = math.exp(fmean(map(math.log, ratios.values())))
    results["below"] = sum(ratio < OVER_BEST for ratio in ratios.values())
    print(f"{len(ratios)} cells, by the best setting of each: {results['mean']:.3f} in the mean")
    print(f"{results['below']} below {OVER_BEST}; the worst: " + ", ".join(f"{n} {ratios[n]:.3f}" for n in worst))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))


if __name__ == "__main__":
    main()

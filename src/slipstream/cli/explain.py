"""`slipstream explain`: the costs of passes and drafts on this machine, and the planner's choices that follow."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table

from slipstream.cli.loading import loaded
from slipstream.cli.options import OF_REQUESTS, OUTPUT, SPECULATION, Common, option, with_options
from slipstream.core.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.cli.forecast import Choice, Guesser
    from slipstream.engine.llm import LLM
    from slipstream.plan.types import MeasuredCosts

BATCHES = (1, 2, 4, 8, 16, 32, 64)
ALPHAS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
_CONTEXT = 500
_CONTEXTS = (100, 1000, 8000)
_BAR = 40  # characters of the longest bar
_WHOLE = "Its drafts are taken whole or not at all, by what they bring; here as if they were one chain of guesses."


@functools.partial(with_options, hidden=(*OF_REQUESTS, "no_speculation", "planner"))
def explain(
    common: Common,
    context: Annotated[
        int | None,
        option(
            metavar="TOKENS",
            min=1,
            panel=SPECULATION,
            help=f"Tokens of each request: long texts cost more. Default: {_CONTEXT}, or the model's limit.",
        ),
    ] = None,
    as_json: Annotated[
        bool, option("--json", panel=OUTPUT, help="Print one JSON object instead, for scripts.")
    ] = False,
) -> None:
    """Show the costs of passes and drafts here, and how much would be drafted by load and share of right guesses.

    Costs are measured now. In a run the planner also learns how often guesses are right, request by request.
    """
    if common.no_speculation:
        raise ConfigError("--no-speculation: there is nothing to explain without speculation; leave it out")
    if not common.drafters:
        raise ConfigError("explain: there is nothing to explain without a drafter; name one, such as --drafter suffix")
    if common.engine.get("measure_costs") is False:
        raise ConfigError("--no-measure-costs: explain shows what was measured; leave it out")
    if common.engine.get("planner") == "fixed":
        raise ConfigError("--planner fixed: nothing is planned then, drafters guess as much as they may; leave it out")
    for name in OF_REQUESTS:
        if name in common.given:
            raise ConfigError(f"--{name.replace('_', '-')}: nothing is sampled by explain; leave it out")
    with loaded(common, common.drafters, max_num_seqs=max(BATCHES), measure_costs=True, planner="adaptive") as llm:
        if context is not None and context > llm.max_model_len:
            raise ConfigError(f"--context {context}: requests have {llm.max_model_len} tokens here at the most")
        context = context or min(_CONTEXT, llm.max_model_len)
        costs = _costs(llm)
        guessers = _guessers(llm)
        choices = _choices(llm, guessers, costs, context)
        remarks = list(llm.remarks)
    deep = {guesser.name for guesser in guessers if guesser.levels}
    whole = {guesser.name for guesser in guessers if guesser.whole}
    if as_json:
        found = {
            "costs": costs.as_json(),
            "spread": costs.spread,
            "busy": not costs.is_steady,
            "why_dear": costs.why_dear() or None,
            "context": context,
            "choices": [asdict(choice) for choice in choices],
            "remarks": remarks,
        }
        print(json.dumps(found, ensure_ascii=False))
        return
    console = Console()
    for remark in remarks:
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
    console.print("A pass of the target, by rows (a request's own, and its guesses):")
    console.print(pass_table(costs))
    for line in [*spread_lines(costs), *context_lines(costs), *filter(None, [costs.why_dear()])]:
        console.print(line, highlight=False)
    for name, seen in costs.drafts.items():
        unit = " level" if name in deep else ""
        console.print(f"\nGuesses of {name}:", highlight=False)
        for one in seen:
            parts = zip(one.curve.sizes, one.curve.seconds, strict=True)
            what = ", ".join(f"{size}{_several(unit, size)} {1e3 * seconds:.2f} ms" for size, seconds in parts)
            console.print(f"  for {one.requests} at once: {what}", highlight=False)
    for name in dict.fromkeys(choice.drafter for choice in choices):
        mine = [choice for choice in choices if choice.drafter == name]
        console.print(
            f"\nWhat would be drafted with {name}, {context} tokens each: guesses for a request"
            f"{' / levels' if name in deep else ''}, and the gain"
        )
        if name in whole:
            console.print(_WHOLE, highlight=False)
        if common.min_gain is not None and common.min_gain > 1:
            console.print(f"To pay is to be {common.min_gain:g}x as fast here (--min-gain).", highlight=False)
        console.print(choice_table(mine))
        for line in in_words(mine):
            console.print(line, highlight=False, soft_wrap=True)


def _costs(llm: LLM) -> MeasuredCosts:
    if llm.costs is None:
        raise ConfigError("explain: the cache has no room to time passes in; give more --memory")
    return llm.costs


def _choices(llm: LLM, guessers: Sequence[Guesser], costs: MeasuredCosts, context: int) -> list[Choice]:
    from slipstream.cli.forecast import Engine, forecast
    from slipstream.engine.config import ROW_SLOPE

    engine = llm.engine
    slope, is_padded = ROW_SLOPE[engine.target.device.type], bool(engine.backend.depth)
    config, places = engine.config, engine.plan.draft_places
    asked = Engine(costs, slope, is_padded, config.draft_rows, context, config.min_gain, places)
    return [
        forecast(asked, guesser, requests, alpha) for guesser in guessers for alpha in ALPHAS for requests in BATCHES
    ]


def _guessers(llm: LLM) -> list[Guesser]:
    """The named drafters. Predictions and forms belong to a request."""
    from slipstream.cli.forecast import Guesser
    from slipstream.drafters.base import DeviceDrafter, HostDrafter
    from slipstream.engine.caps import levels_of, reach

    found, limit = [], llm.engine.config.draft_tokens
    for name, drafter in llm.engine.drafting.drafters.items():
        if name in ("prediction", "grammar") and len(llm.engine.drafting.drafters) > 2:
            continue
        nodes = reach(drafter) if limit is None else limit
        if isinstance(drafter, DeviceDrafter):
            found.append(Guesser(name, nodes, levels_of(drafter), is_free=False))
        elif isinstance(drafter, HostDrafter):
            found.append(Guesser(name, nodes, is_free=not drafter.costly, whole=drafter.whole))
    return found


def pass_table(costs: MeasuredCosts) -> Table:
    shown = Table(box=None, pad_edge=False)
    for name in ("rows", "ms", "x one row", "ms a row"):
        shown.add_column(name, justify="right")
    shown.add_column("")
    first, last = costs.passes.seconds[0], max(costs.passes.seconds)
    for rows, seconds in zip(costs.passes.sizes, costs.passes.seconds, strict=True):
        bar = "█" * max(1, round(_BAR * seconds / last))
        shown.add_row(str(rows), f"{1e3 * seconds:.2f}", f"{seconds / first:.2f}", f"{1e3 * seconds / rows:.2f}", bar)
    return shown


def spread_lines(costs: MeasuredCosts) -> list[str]:
    """The spread of repeated timings, as lines of text."""
    found = [f"The same pass, timed three times, took up to {costs.spread:.2f} times as long."]
    return found if costs.is_steady else [*found, "The machine is busy: these figures are rough, and not kept."]


def context_lines(costs: MeasuredCosts) -> list[str]:
    """The time that attention adds for one request, with and without drafts."""
    if not (costs.key_s or costs.row_key_s):
        return ["The length of the context adds nothing that could be measured."]
    found = []
    for tokens in _CONTEXTS:
        one, eight = (1e3 * tokens * (costs.key_s + rows * costs.row_key_s) for rows in (1, 8))
        found.append(f"{tokens} tokens of context add {one:.2f} ms to a pass over one row, {eight:.2f} ms over 8.")
    return found


def choice_table(choices: Sequence[Choice]) -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("right", justify="right")
    batches = list(dict.fromkeys(choice.requests for choice in choices))
    for requests in batches:
        shown.add_column(f"batch {requests}", justify="right")
    for alpha in dict.fromkeys(choice.alpha for choice in choices):
        cells: list[Any] = [f"{alpha:.0%}"]
        for choice in choices:
            if choice.alpha == alpha:
                size = f"{choice.nodes:.2g}" + (f"/{choice.levels}" if choice.levels else "")
                cells.append(f"{size} {choice.gain:.2f}x" if choice.nodes else "off")
        shown.add_row(*cells)
    return shown


def in_words(choices: Sequence[Choice]) -> list[str]:
    """For each batch size, the share of right guesses from which drafts pay, or why they never pay."""
    found = []
    for requests in dict.fromkeys(choice.requests for choice in choices):
        mine = [choice for choice in choices if choice.requests == requests]
        paying = [choice for choice in mine if choice.nodes]
        if not paying:
            found.append(f"{requests} at once: {mine[-1].why}.")
            continue
        least, most = paying[0], paying[-1]
        found.append(
            f"{requests} at once: drafts pay {_from(least, mine[0])}, with {_guesses(least)}; "
            f"at {most.alpha:.0%} {_guesses(most)} make{'s' if most.nodes == 1 else ''} it {most.gain:.2f}x as fast."
        )
    return found


def _several(unit: str, size: int) -> str:
    return f"{unit}s" if unit and size > 1 else unit


def _from(least: Choice, lowest: Choice) -> str:
    """The share as text. The lowest one tried may be higher than needed."""
    return (
        f"already at {least.alpha:.0%} right guesses" if least is lowest else f"from {least.alpha:.0%} right guesses on"
    )


def _guesses(choice: Choice) -> str:
    """The mean number of guesses of a request, as text."""
    return "1 guess" if choice.nodes == 1 else f"{choice.nodes:.3g} guesses"

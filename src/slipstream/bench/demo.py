"""The demo: one answer with and without speculation, whether the tokens are equal, and the speed of each.

`python -m slipstream.bench.demo`, which is what `make demo` runs. Exits with 1 if the tokens differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import CompletionOutput
from slipstream.core.params import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

ROUNDS = 3

FAVOURABLE = "The answer repeats the prompt, so guessing pays well here; `slipstream bench` shows other tasks."
UNFAVOURABLE = "The answer repeats the prompt, and yet guessing hardly paid here: "
UNKNOWN = "to check several tokens takes this machine about as long as to say them, or it is busy."
EXPLAIN = " `slipstream explain` shows what passes cost."
WORTH_IT = 1.1

CODE = """class Rectangle:
    def __init__(self, width, height):
        if width < 0 or height < 0:
            raise ValueError("width and height must be non-negative")
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)

    def scaled(self, factor):
        return Rectangle(self.width * factor, self.height * factor)

    def __repr__(self):
        return f"Rectangle({self.width}, {self.height})"
"""
PROMPT = f"```python\n{CODE}```\n\nThe same code again:\n\n```python\n"
"""A task that a small model does without mistakes, and a part of every edit that returns the whole file."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same prompt, decoded plainly and with speculation."""

    plain: CompletionOutput
    drafted: CompletionOutput
    why_dear: str = ""  # why drafts hardly pay on this machine, if that is known

    @property
    def same(self) -> bool:
        return self.plain.token_ids == self.drafted.token_ids

    @property
    def right(self) -> bool:
        """Whether the answer repeats the class exactly."""
        return self.drafted.text.strip() == CODE.strip()

    @property
    def plain_rate(self) -> float:
        return self.plain.timing.decode_tokens_per_s(len(self.plain.token_ids))

    @property
    def drafted_rate(self) -> float:
        return self.drafted.timing.decode_tokens_per_s(len(self.drafted.token_ids))

    @property
    def speedup(self) -> float:
        return self.drafted_rate / self.plain_rate if self.plain_rate else 0.0


def compare(llm: LLM, max_tokens: int) -> Comparison:
    """Decode with and without speculation in turn, and keep the faster of a few runs of each; the first warms up."""
    best: list[CompletionOutput] = []
    for number in range(ROUNDS + 1):
        for way, enabled in enumerate((False, True)):
            # a new tenant each time, so that no drafter has seen the last answer
            speculation = SpeculationParams(enabled=enabled, tenant=f"{number}, {way}")
            params = SamplingParams(temperature=0, max_tokens=max_tokens, stop="```", speculation=speculation)
            answer = llm.generate([PROMPT], params)[0].outputs[0]
            if number == 0:
                best.append(answer)
            elif number == 1 or answer.timing.total_s < best[way].timing.total_s:
                best[way] = answer
    plain, drafted = best
    return Comparison(plain, drafted, llm.costs.why_dear() if llm.costs else "")


def show(comparison: Comparison, console: Console) -> None:
    """Print the answer, both answers if they differ, and the rates."""
    rates = Table.grid(padding=(0, 3))
    plain, drafted = comparison.plain, comparison.drafted
    rates.add_row("plain", f"{comparison.plain_rate:.1f} tok/s", "tau 1.00", "")
    rates.add_row(
        Text("speculative", style="bold green"),
        Text(f"{comparison.drafted_rate:.1f} tok/s", style="bold green"),
        f"tau {drafted.speculation.tau:.2f}",
        Text(f"{comparison.speedup:.2f}x", style="bold green"),
    )
    verdict = Text("same tokens: yes", style="bold green") if comparison.same else Text("same tokens: NO", "bold red")
    verdict.append(
        "   right answer: " + ("yes" if comparison.right else "no"), "bold green" if comparison.right else ""
    )
    asked = Text("Asked for: this class once more, word for word. Answered:", style="dim")
    shown = [asked, Text(), Text(plain.text.strip()), Text()]
    if not comparison.same:
        shown += [Text("with speculation:", style="red"), Text(drafted.text.strip()), Text()]
    title = f"{len(drafted.token_ids)} tokens, with and without speculation"
    remark = FAVOURABLE if comparison.speedup >= WORTH_IT else UNFAVOURABLE + reason(comparison) + EXPLAIN
    console.print(Panel(Group(*shown, rates, verdict, Text(), Text(remark, style="dim")), title=title, padding=(1, 2)))


def reason(comparison: Comparison) -> str:
    """Why drafting hardly paid, as the end of a sentence."""
    known = comparison.why_dear
    return known[:1].lower() + known[1:] if known else UNKNOWN


def load(model: str, on_progress: Callable[[str], None]) -> LLM:
    from slipstream.engine.llm import LLM

    return LLM(model, on_progress=on_progress, prefix_caching=False)  # each side computes the prompt


@contextmanager
def saying(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows progress: a status line on a terminal, one line a message elsewhere."""
    if console.is_terminal:
        with console.status("loading the model") as status:
            yield status.update
    else:
        yield lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slipstream.bench.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="default", help="as for `slipstream generate`")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args(argv)
    console = Console()
    progress = Console(stderr=True)
    try:
        with saying(progress) as say, load(options.model, say) as llm:
            say("answering, with and without speculation")
            comparison = compare(llm, options.max_tokens)
    except KeyboardInterrupt:
        progress.print("interrupted")
        return 130
    except SlipstreamError as error:
        progress.print(f"error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        return 1
    show(comparison, console)
    return 0 if comparison.same else 1


if __name__ == "__main__":
    sys.exit(main())

"""What rounds take beside their decodes: where requests come and go, prompts of others are read in many of them.

On a GPU that is a pass of its own, which takes nearly as long for a few tokens as for a hundred. Then a round that
brings more tokens has more prompts beside it, but hardly takes longer for them: so it pays to bring more by the round
than passes and guesses alone say.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np

from slipstream.plan.extras import crowd_of
from slipstream.plan.measured import Floats

_DECAY = 0.97
"""The last 30 rounds or so of as many requests tell how often prompts come."""
_SELDOM, _OFTEN = 0.02, 0.98
"""Where fewer rounds have prompts beside them that is of no interest; and no more are taken to have any."""


@dataclass(slots=True)
class _Seen:
    """Of rounds."""

    rounds: float = 0.0
    reading: float = 0.0  # of these, those with prompts
    tokens: float = 0.0
    seconds: float = 0.0  # that prompts took, however few they were


class PromptReads:
    """Of one planner, by about how many requests run."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        """A round of so many brought so many tokens; to read any prompt beside it took so long, 0: there was none."""
        seen = self._seen.setdefault(crowd_of(requests), _Seen())
        seen.rounds = seen.rounds * _DECAY + 1
        seen.reading = seen.reading * _DECAY + (seconds > 0)
        seen.tokens = seen.tokens * _DECAY + tokens
        seen.seconds = seen.seconds * _DECAY + seconds

    def seconds(self, requests: int, tokens: Floats) -> Floats:
        """What is to be expected beside rounds of so many that bring so many tokens.

        Requests end by their tokens, so rounds with many are rarely without one that ends, and another that begins.
        """
        seen = self._seen.get(crowd_of(requests))
        if seen is None or seen.reading < _SELDOM * seen.rounds:
            return np.zeros_like(tokens)
        ends = -log(1 - min(seen.reading / seen.rounds, _OFTEN)) * seen.rounds / max(seen.tokens, 1.0)  # of a token
        return np.asarray(seen.seconds / seen.reading * (1 - np.exp(-ends * tokens)))

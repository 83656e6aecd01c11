"""How likely a drafter's next guess is right, by request, learned from verdicts."""

from __future__ import annotations

from dataclasses import dataclass

_PRIOR = 0.6
_PRIOR_WEIGHT = 4.0
_DECAY = 0.9
_SHARED_DECAY = 0.98


@dataclass(slots=True)
class _Tally:
    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int, decay: float) -> None:
        self.right = self.right * decay + right
        self.tried = self.tried * decay + tried


class Acceptance:
    """The chance that a guess is right when everything before it was. Newcomers start from everybody's record."""

    def __init__(self) -> None:
        self._shared = _Tally()
        self._requests: dict[str, _Tally] = {}

    def alpha(self, request_id: str) -> float:
        shared = (self._shared.right + _PRIOR * _PRIOR_WEIGHT) / (self._shared.tried + _PRIOR_WEIGHT)
        own = self._requests.get(request_id, _Tally())
        return (own.right + shared * _PRIOR_WEIGHT) / (own.tried + _PRIOR_WEIGHT)

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Guesses behind the first wrong one were never put to the test."""
        tried = accepted + (accepted < drafted)
        self._shared.add(accepted, tried, _SHARED_DECAY)
        self._requests.setdefault(request_id, _Tally()).add(accepted, tried, _DECAY)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

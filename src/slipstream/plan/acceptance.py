"""How likely a drafter's next guess is right, by request, learned from verdicts."""

from __future__ import annotations

from dataclasses import dataclass

_PRIOR = 0.6
_PRIOR_WEIGHT = 4.0
_DECAY = 0.9
_SHARED_DECAY = 0.98


@dataclass(slots=True)
class _Tally:
    right: float
    tried: float

    @property
    def share(self) -> float:
        return self.right / self.tried

    def add(self, right: int, tried: int, decay: float) -> None:
        self.right = self.right * decay + right
        self.tried = self.tried * decay + tried


class Acceptance:
    """The chance that a guess is right when everything before it was. Newcomers start from everybody's record."""

    def __init__(self) -> None:
        self._shared = _Tally(_PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
        self._requests: dict[str, _Tally] = {}

    def alpha(self, request_id: str) -> float:
        return self._requests.get(request_id, self._shared).share

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Guesses behind the first wrong one were never put to the test."""
        if not drafted:
            return
        tried = accepted + (accepted < drafted)
        start = _Tally(self._shared.share * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
        # what it starts from fades like everything else: one that fares worse than all others must not live on hope
        self._requests.setdefault(request_id, start).add(accepted, tried, _DECAY)
        self._shared.add(accepted, tried, _SHARED_DECAY)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

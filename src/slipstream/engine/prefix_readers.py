"""Drafters with a cache of their own, for prompts whose beginning was found in the target's cache.

A cached page holds the target's K, V and hidden states. A drafter's own cache has the page as well only if that drafter
read along when it was computed. This file records which drafters did; the others must read the page again.
"""

from __future__ import annotations

from slipstream.drafters.base import DeviceDrafter
from slipstream.engine.drafting import Drafting
from slipstream.engine.state import Answer
from slipstream.kv.prefix import PrefixStore


class PrefixReaders:
    """For steps that the host waits for: each drafter knows how far it has read, and reads the rest by itself."""

    def __init__(self, drafting: Drafting, prefixes: PrefixStore | None) -> None:
        self._prefixes = prefixes
        self._drafting = drafting
        self._drafters = {
            name: drafter
            for name, drafter in drafting.drafters.items()
            if isinstance(drafter, DeviceDrafter) and drafter.needs.own_cache
        }

    def resume(self, answer: Answer) -> None:
        """The answer starts: tell its drafters how many of the cached tokens they have read."""
        if answer.found_pages:
            for name in self._readers(answer):
                self._resume(answer, name, self._known(answer, name))

    def note(self, answer: Answer) -> None:
        """Record which of the pages that others can find are in the drafters' own caches."""
        if self._prefixes is None or not answer.kept_pages or answer.table is None:
            return
        for name in self._readers(answer):
            # a head's row for a token is in the slot of the token before, so the last one is missing
            pages = max(0, self._has_read(answer, name) - 1) // self._prefixes.pool.page_size
            self._prefixes.mark(answer.table.pages[: min(pages, answer.kept_pages)], name)

    def _known(self, answer: Answer, name: str) -> int:
        """The number of cached tokens that this drafter has read."""
        if self._prefixes is None or not answer.found_pages or answer.table is None:
            return 0
        return self._prefixes.read_by(answer.table.pages[: answer.found_pages], name) * self._prefixes.pool.page_size

    def _readers(self, answer: Answer) -> list[str]:
        """The drafters that read the whole prompt. One whose context is shorter may have left out a part of it."""
        names = [name for name in answer.drafters if name in self._drafters and name not in answer.refused]
        length = answer.prompt_length
        return [name for name in names if length <= (self._drafters[name].max_positions or length)]

    def _resume(self, answer: Answer, name: str, known: int) -> None:
        try:
            self._drafters[name].resume(answer.id, known)
        except Exception as error:
            self._drafting.drop([answer], name, error)

    def _has_read(self, answer: Answer, name: str) -> int:
        try:
            return self._drafters[name].has_read(answer.id)
        except Exception as error:
            self._drafting.drop([answer], name, error)
            return 0


class QueuedPrefixReaders(PrefixReaders):
    """For queued steps: drafters read beside the target, and `Answer.behind` says which have tokens to catch up on."""

    def resume(self, answer: Answer) -> None:
        super().resume(answer)
        leader = answer.leader
        if leader is not None and not answer.found_pages:  # its drafters have read no more of a fork than the leader's
            behind = {name: known for name, known in leader.behind.items() if name in answer.drafters}
            answer.behind.update({name: known for name, known in behind.items() if known < answer.cached})
        for name in self._readers(answer):
            if not self._drafting.planner.follows(name):
                answer.behind.setdefault(name, self._known(answer, name))

    def _resume(self, answer: Answer, name: str, known: int) -> None:
        if known < answer.cached:
            answer.behind[name] = known

    def _has_read(self, answer: Answer, name: str) -> int:
        return answer.behind.get(name, answer.cached)

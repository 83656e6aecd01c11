"""Drafters that read along in a cache of their own, and prompts whose beginning was found in the target's.

A page that others had computed holds the target's K and V, and its hidden states. Whether a drafter's own cache has it
as well depends on whether that drafter read along then: what it has is noted here, and what it lacks it must read.
"""

from __future__ import annotations

from slipstream.drafters.base import DeviceDrafter
from slipstream.engine.drafting import Drafting
from slipstream.engine.state import Answer
from slipstream.kv.prefix import PrefixStore


class Followers:
    """Where the host asks for drafts, a drafter itself knows how far it has read, and reads what is missing."""

    def __init__(self, drafting: Drafting, prefixes: PrefixStore | None) -> None:
        self._prefixes = prefixes
        self._drafting = drafting
        self._drafters = {
            name: drafter
            for name, drafter in drafting.drafters.items()
            if isinstance(drafter, DeviceDrafter) and drafter.needs.own_cache
        }

    def resume(self, answer: Answer) -> None:
        """The answer starts. Its drafters hear how much of what was found they have."""
        if self._prefixes is None or not answer.found_pages or answer.table is None:
            return
        for name in self._of(answer):
            self._resume(answer, name, self._knows(answer, name))

    def _knows(self, answer: Answer, name: str) -> int:
        """Tokens of what was found that this drafter has read."""
        if self._prefixes is None or not answer.found_pages or answer.table is None:
            return 0
        return self._prefixes.read_by(answer.table.pages[: answer.found_pages], name) * self._prefixes.pool.page_size

    def note(self, answer: Answer) -> None:
        """Note which of the pages that others may find are in the drafters' own caches by now."""
        if self._prefixes is None or not answer.kept_pages or answer.table is None:
            return
        for name in self._of(answer):
            # a head's row for a token lies in the slot of the one before, so the last one is missing
            pages = max(0, self._has_read(answer, name) - 1) // self._prefixes.pool.page_size
            self._prefixes.mark(answer.table.pages[: min(pages, answer.kept_pages)], name)

    def _of(self, answer: Answer) -> list[str]:
        """Those who follow this answer. One whose context its prompt exceeds may have left some of it out."""
        names = [name for name in answer.drafters if name in self._drafters and name not in answer.refused]
        longest = {name: self._drafters[name].max_positions for name in names}
        return [name for name in names if answer.prompt_length <= (longest[name] or answer.prompt_length)]

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


class QueuedFollowers(Followers):
    """Where rounds are queued, drafters read beside the target, and the host knows who is behind."""

    def resume(self, answer: Answer) -> None:
        super().resume(answer)
        leader = answer.leader
        if leader is not None and not answer.found_pages:  # what a sibling shares is no more than it has
            behind = {name: known for name, known in leader.behind.items() if name in answer.drafters}
            answer.behind.update({name: known for name, known in behind.items() if known < answer.cached})
        for name in self._of(answer):
            if not self._drafting.planner.follows(name):
                answer.behind.setdefault(name, self._knows(answer, name))

    def _resume(self, answer: Answer, name: str, known: int) -> None:
        if known < answer.cached:
            answer.behind[name] = known

    def _has_read(self, answer: Answer, name: str) -> int:
        return answer.behind.get(name, answer.cached)

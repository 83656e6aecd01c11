"""Who is asked when, of several drafters of one request, and how many of its nodes each may give."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.core.draft import MAX_NODES
from slipstream.drafters.base import DeviceDrafter, Drafter, HostDrafter
from slipstream.engine.state import Answer


class NodeShares:
    """Parts of a request's nodes, by what its drafters are made for."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters

    def turn(self, name: str) -> int:
        """When it is asked: on the host before on the device, and first of all what takes no time."""
        drafter = self._drafters[name]
        return int(drafter.costly) if isinstance(drafter, HostDrafter) else 2

    def usual(self, answer: Answer) -> int:
        """Nodes that all of a request's drafters together are made for."""
        return sum(self._made_for(name) for name in answer.drafters)

    def others(self, name: str, answer: Answer, nodes: int) -> int:
        """How many of the request's nodes are kept for drafters that are asked after this one."""
        order = sorted(answer.drafters, key=self.turn)
        later = [self._made_for(n) for n in order[order.index(name) + 1 :] if n not in answer.refused]
        least = 1 if nodes >= len(order) else 0
        return sum(max(least, nodes * made_for // self.usual(answer)) for made_for in later)

    def _made_for(self, name: str) -> int:
        drafter = self._drafters[name]
        most = drafter.most_nodes if isinstance(drafter, DeviceDrafter) else MAX_NODES
        return min(drafter.default_draft_tokens, most)

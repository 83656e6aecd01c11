"""Random trees for tests, and the paths that tell what a tree says whatever the order of its nodes."""

from __future__ import annotations

from hypothesis import strategies as st

from slipstream.core.draft import ROOT, Tree


@st.composite
def trees(draw: st.DrawFn, most: int = 12, tokens: int = 4) -> Tree:
    """Of so few tokens that two trees often say the same."""
    found: dict[tuple[int, int], None] = {}
    for _ in range(draw(st.integers(0, most))):
        found[draw(st.integers(ROOT, len(found) - 1)), draw(st.integers(0, tokens - 1))] = None
    return Tree(tuple(token for _, token in found), tuple(parent for parent, _ in found))


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return found

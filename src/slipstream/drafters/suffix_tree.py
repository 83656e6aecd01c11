"""From places to trees: what followed there, counted, for all requests of a round in one call.

The places that agree longest with a request's text vote on the next token; those that voted for a token vote on the
one after it. The tree takes the likeliest path next, wherever it hangs, until the budget is spent or no path is likely
enough: where the votes agree it is a chain, where they are close it branches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.core.draft import MAX_NODES
from slipstream.drafters.suffix_code import LENGTH, LONGEST, collect, take_in, text_of
from slipstream.drafters.suffix_compile import Numbers, compiled, inner, numbers_at, wide

STEPS = (1, 2, 3, 4, 6, 8, 12, 20, 32)
"""Classes of agreement: a token with up to so many agreeing ones before it."""
KINDS = 5
"""Classes of votes: all but few of three and more; all but few of less; most; some; few."""
STATES = len(STEPS) * KINDS

_CLASS = np.array(
    [next(i for i, top in enumerate(STEPS) if length <= top) for length in range(LONGEST + 1)], np.int32
)  # [LONGEST + 1]
_OTHERS = 0.5  # what all votes from shorter matches weigh together, against those from the longest ones

OWN, OWN_SIZE, SHARED, SHARED_SIZE, NEW, BUDGET, FIELDS = 0, 1, 2, 3, 4, 5, 6
"""Columns of a round's jobs: address and size of the request's index and of its tenant's; tokens that are
new; nodes that its tree may have."""


@inner
def state_of(length: int, share: float, votes: int) -> int:
    kind = 4 if share < 0.2 else 3 if share < 0.5 else 2 if share < 0.9 else 1 if votes < 3 else 0
    return wide(_CLASS[min(length, LONGEST)]) * KINDS + kind


@inner
def token_after(text: Numbers, end: int, place: int, depth: int) -> int:
    """What stands `depth` tokens behind a place. `end` > 0: past it the text goes on with its own guesses."""
    if end and place + depth >= end:
        return wide(text[place + depth % (end - place)])
    return wide(text[place + depth])


@inner
def draft_one(
    own: Numbers,
    shared: Numbers,
    budget: int,
    least: int,
    bar: float,
    chances: NDArray[np.float64],  # [STATES]
    scratch: Numbers,  # [2, candidates]
    voters: NDArray[np.int64],  # [10, 2 * candidates or MAX_NODES, whichever is more]: room for what it works with
    shares: NDArray[np.float64],  # [3, 2 * candidates]
    tokens: Numbers,  # [budget] out, as the next two
    parents: Numbers,
    states: Numbers,
) -> tuple[int, int]:
    """Write a tree; gives how many nodes it has, and the place in the shared text that its first node came from."""
    text, other = text_of(own), text_of(shared)
    end = wide(own[LENGTH])
    own_length, _, mine = collect(own, text, end, least, scratch[0])
    shared_length, _, theirs = collect(shared, text, end, least, scratch[1])
    count = mine + theirs
    if not count or not budget:
        return 0, -1
    place, at, says = voters[0], voters[1], voters[2]  # where a voter stands, at which node, and its next token
    weight = shares[0]
    at[:count] = -1
    weight[:count] = 1.0
    for i in range(count):
        place[i] = scratch[0, i] if i < mine else scratch[1, i - mine]
    if own_length > shared_length:
        weight[mine:count] = _OTHERS * mine / max(1, theirs)
    elif own_length < shared_length:
        weight[:mine] = _OTHERS * theirs / max(1, mine)
    # Children that wait to become nodes. No voter stands for two of them, so there are never more than voters.
    token, parent, state, votes, newest, length = voters[3], voters[4], voters[5], voters[6], voters[7], voters[8]
    weighs, path = shares[1], shares[2]
    depth_of = voters[9]
    waiting, nodes, node, depth, chance, source = 0, 0, -1, wide(0), 1.0, -1
    while True:
        # the children of the latest node
        first, total = waiting, 0.0
        for i in range(count):
            if at[i] != node:
                continue
            says[i] = (
                token_after(text, end, place[i], depth) if i < mine else token_after(other, wide(0), place[i], depth)
            )
            if says[i] < 0:  # its text ends here
                at[i] = -2
                continue
            child = first
            while child < waiting and token[child] != says[i]:
                child += 1
            if child == waiting:
                token[child], parent[child] = says[i], node
                votes[child], newest[child], length[child], weighs[child] = 0, -1, 0, 0.0
                waiting += 1
            votes[child] += 1
            weighs[child] += weight[i]
            total += weight[i]
            length[child] = max(length[child], own_length if i < mine else shared_length)
            newest[child] = max(newest[child], place[i] + (LONGEST << 32 if i < mine else 0))
        kept = first
        for child in range(first, waiting):
            state[child] = state_of(length[child] + depth, weighs[child] / total, votes[child])
            path[child] = chance * chances[state[child]]
            if path[child] >= bar:
                token[kept], parent[kept], state[kept], path[kept] = (
                    token[child],
                    parent[child],
                    state[child],
                    path[child],
                )
                weighs[kept], newest[kept] = weighs[child] / total, newest[child]
                kept += 1
        waiting = kept
        if not waiting or nodes == budget:
            return nodes, source
        # the likeliest of all that wait; of equals the one with more votes, then the latest said
        best = 0
        for child in range(1, waiting):
            if path[child] > path[best] or (
                path[child] == path[best]
                and (weighs[child] > weighs[best] or (weighs[child] == weighs[best] and newest[child] > newest[best]))
            ):
                best = child
        node = nodes
        nodes += 1
        tokens[node], parents[node], states[node] = token[best], parent[best], state[best]
        chance = path[best]
        depth = depth_of[node] = 1 if parent[best] < 0 else depth_of[parent[best]] + 1
        for i in range(count):
            if at[i] == parent[best] and says[i] == token[best]:
                at[i] = node
                if not node and i >= mine:
                    source = max(source, place[i])
        waiting -= 1
        token[best], parent[best], state[best] = token[waiting], parent[waiting], state[waiting]
        path[best], weighs[best], newest[best] = path[waiting], weighs[waiting], newest[waiting]


@compiled
def draft_round(
    jobs: NDArray[np.int64],  # [B, FIELDS]
    fresh: Numbers,  # the new tokens of all requests, end to end
    least: int,
    bar: float,
    candidates: int,
    chances: NDArray[np.float64],  # [STATES]
    nodes: Numbers,  # [3, N] out: tokens, parents and states of the trees, end to end
    results: NDArray[np.int64],  # [3, B] out: nodes; 1 for a chain; a place in the tenant's text it came from, or -1
) -> int:
    """Take in what is new of each request's text and draft for it. Gives the number of nodes together."""
    scratch = np.empty((2, candidates), np.int32)
    voters = np.empty((10, max(2 * candidates, MAX_NODES)), np.int64)
    shares = np.empty((3, 2 * candidates))
    read, written = 0, 0
    for b in range(len(jobs)):
        own = numbers_at(jobs[b, OWN], jobs[b, OWN_SIZE])
        text = text_of(own)
        for i in range(jobs[b, NEW]):
            text[own[LENGTH] + i] = fresh[read + i]
        read += jobs[b, NEW]
        own[LENGTH] += jobs[b, NEW]
        take_in(own)
        shared = numbers_at(jobs[b, SHARED], jobs[b, SHARED_SIZE])
        budget = max(0, min(jobs[b, BUDGET], MAX_NODES))
        to = slice(written, written + budget)
        tree = nodes[0, to], nodes[1, to], nodes[2, to]
        count, source = draft_one(own, shared, budget, least, bar, chances, scratch, voters, shares, *tree)
        is_chain = 1
        for node in range(count):
            is_chain &= tree[1][node] == node - 1
        results[0, b], results[1, b], results[2, b] = count, is_chain, source
        written += count
    return written

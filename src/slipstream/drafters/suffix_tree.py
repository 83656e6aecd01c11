"""From places to trees: what followed there, counted, for all requests of a round in one call.

The places that agree longest with a request's text vote on the next token (`suffix_votes.py`); those that voted for a
token vote on the one after it. The tree takes the likeliest path next, wherever it hangs, until the budget is spent or
no path is likely enough: where the votes agree it is a chain, where they are close it branches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.core.draft import MAX_NODES
from slipstream.drafters.suffix_code import LENGTH, LONGEST, take_in, text_of
from slipstream.drafters.suffix_compile import Numbers, compiled, inner, numbers_at, wide
from slipstream.drafters.suffix_votes import (
    NEXT,
    ORIGIN,
    ORIGINS,
    PAST,
    PLACE,
    REACH,
    UNASKED,
    VOTER_ROWS,
    summon,
)

STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 20, 32)
"""Classes of agreement: a token with up to so many agreeing ones before it."""
SHARES = (0.9, 0.5, 0.2, 0.07)
"""Classes of votes: a token with at least so much of what all votes weigh together."""
KINDS = len(SHARES) + 2  # one for less than all of these, and a better one for three votes and more that all agree
STATES = ORIGINS * len(STEPS) * KINDS

_CLASS = np.array(
    [next(i for i, top in enumerate(STEPS) if length <= top) for length in range(LONGEST + 1)], np.int32
)  # [LONGEST + 1]

OWN, OWN_SIZE, SHARED, SHARED_SIZE, NEW, BUDGET, FIELDS = 0, 1, 2, 3, 4, 5, 6
"""Columns of a round's jobs: address and size of the request's index and of its tenant's; tokens that are
new; nodes that its tree may have."""

# Of each child, that is a token which may become a node: itself, its parent, its state, votes, the latest place, the
# farthest agreement, its first voter, its depth, its best origin.
_TOKEN, _PARENT, _STATE, _VOTES, _NEWEST, _AGREES, _FIRST, _DEPTH, _FROM, _CHILD_ROWS = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9

# Rows of lists: children that wait, the best first; those of the latest node; free places for children.
_QUEUE, _LATEST, _FREE, _LIST_ROWS = 0, 1, 2, 3
# Rows of weights: of a voter; of a child its share of the votes, and the chance of its path; what those that wait are
# ordered by.
_WEIGHT, _SHARE, _PATH, _RANK, _WEIGHT_ROWS = 0, 1, 2, 3, 4
_OWN_FIRST = 1 << 29
_BY_SHARE, _BY_AGE = 1e-4, 1e-15  # of equal chances the one with more votes, then the latest said


@inner
def state_of(origin: int, length: int, share: float, votes: int) -> int:
    kind = wide(0)
    while kind < len(SHARES) and share < SHARES[kind]:
        kind += 1
    if kind or votes < 3:
        kind += 1
    return (origin * len(STEPS) + wide(_CLASS[min(length, LONGEST)])) * KINDS + kind


@inner
def token_after(text: Numbers, end: int, place: int, depth: int) -> int:
    """What stands `depth` tokens behind a place. `end` > 0: past it the text goes on with its own guesses."""
    if end and place + depth >= end:
        return wide(text[place + depth % (end - place)])
    return wide(text[place + depth])


@inner
def enqueue(queue: NDArray[np.int64], ranks: NDArray[np.float64], head: int, tail: int, child: int, rank: float) -> int:
    """Let a child wait among queue[head:tail], behind those that are as good; gives 1 if it took a place before them.

    The root's children come best first, more or less, and belong at the end; later ones are children of the best, so
    they belong near the front, where the best has left a place.
    """
    if head:
        i = head - 1
        while i + 1 < tail and ranks[i + 1] >= rank:
            queue[i], ranks[i] = queue[i + 1], ranks[i + 1]
            i += 1
        queue[i], ranks[i] = child, rank
        return 1
    i = tail
    while i and ranks[i - 1] < rank:
        queue[i], ranks[i] = queue[i - 1], ranks[i - 1]
        i -= 1
    queue[i], ranks[i] = child, rank
    return 0


@inner
def draft_one(
    own: Numbers,
    shared: Numbers,
    budget: int,
    least: int,
    bar: float,
    chances: NDArray[np.float64],  # [STATES]
    scratch: Numbers,  # [2, candidates]
    table: Numbers,  # [a power of two, more than twice the voters]: finds the root's children by their tokens
    voters: NDArray[np.int64],  # [VOTER_ROWS, room]
    children: NDArray[np.int64],  # [_CHILD_ROWS, room]
    lists: NDArray[np.int64],  # [_LIST_ROWS, room]
    weights: NDArray[np.float64],  # [_WEIGHT_ROWS, room]
    tokens: Numbers,  # [budget] out, as the next two
    parents: Numbers,
    states: Numbers,
) -> tuple[int, int]:
    """Write a tree; gives how many nodes it has, and the place in the shared text that its first node came from."""
    if budget < 1:
        return 0, -1
    text, other = text_of(own), text_of(shared)
    end = wide(own[LENGTH])
    token, parent, state, votes = children[_TOKEN], children[_PARENT], children[_STATE], children[_VOTES]
    newest, agrees, first_voter = children[_NEWEST], children[_AGREES], children[_FIRST]
    depth_of, origin, following = children[_DEPTH], children[_FROM], voters[NEXT]
    weight, share, path, ranks = weights[_WEIGHT], weights[_SHARE], weights[_PATH], weights[_RANK]
    queue, latest, free = lists[_QUEUE], lists[_LATEST], lists[_FREE]
    count = summon(own, shared, least, budget, scratch, voters, weight)
    spare = wide(len(free))
    for i in range(spare):
        free[i] = i
    table[:] = -1
    # `voter`: the first of those that stand at the latest node
    voter = wide(0) if count else wide(-1)
    head, tail, nodes, node, depth, chance, source = wide(0), wide(0), wide(0), wide(-1), wide(0), 1.0, wide(-1)
    while voter >= 0 and nodes < budget:
        # the children of the latest node
        found, total = wide(0), 0.0
        while voter >= 0:
            i, voter = voter, following[voter]
            place, past = voters[PLACE, i], voters[ORIGIN, i] == PAST
            says = token_after(other, wide(0), place, depth) if past else token_after(text, end, place, depth)
            if says < 0:  # its text ends here
                continue
            child = wide(-1)
            if depth:
                for k in range(found):
                    if token[latest[k]] == says:
                        child = latest[k]
                        break
            else:  # of the root there are many
                key = says & (len(table) - 1)
                while table[key] >= 0 and token[table[key]] != says:
                    key = (key + 1) & (len(table) - 1)
                child = wide(table[key])
            if child < 0:
                spare -= 1
                child = latest[found] = free[spare]
                found += 1
                if not depth:
                    table[key] = child
                token[child], parent[child], depth_of[child], first_voter[child] = says, node, depth + 1, -1
                votes[child], newest[child], agrees[child], origin[child] = 0, -1, 0, ORIGINS
                share[child] = 0.0
            following[i], first_voter[child] = first_voter[child], i
            votes[child] += 1
            share[child] += weight[i]
            total += weight[i]
            agrees[child] = max(agrees[child], voters[REACH, i])
            origin[child] = min(origin[child], voters[ORIGIN, i])
            newest[child] = max(newest[child], place + (0 if past else _OWN_FIRST))
        for k in range(found):
            child = latest[k]
            share[child] /= total
            state[child] = state_of(origin[child], agrees[child] + depth, share[child], votes[child])
            path[child] = chance * chances[state[child]]
            rank = path[child] * (1 + _BY_SHARE * share[child] + _BY_AGE * newest[child])
            if tail - head < budget - nodes or rank > ranks[tail - 1]:
                if tail - head >= budget - nodes:  # as many as can still become nodes
                    tail -= 1
                    free[spare] = queue[tail]
                    spare += 1
                if enqueue(queue, ranks, head, tail, child, rank):
                    head -= 1
                else:
                    tail += 1
            else:
                free[spare] = child
                spare += 1
        best = queue[head]
        if head == tail or path[best] < bar:
            break
        head += 1
        node = nodes
        nodes += 1
        free[spare] = best
        spare += 1
        tokens[node], parents[node], states[node] = token[best], parent[best], state[best]
        chance, depth, voter = path[best], depth_of[best], first_voter[best]
        if not node:
            i = voter
            while i >= 0:
                if voters[ORIGIN, i] == PAST:
                    source = max(source, voters[PLACE, i])
                i = following[i]
    return nodes, source


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
    room = 2 * candidates + UNASKED + MAX_NODES + 1  # no voter stands for two children of a node; the others wait
    scratch = np.empty((2, candidates), np.int32)
    voters = np.empty((VOTER_ROWS, room), np.int64)
    children = np.empty((_CHILD_ROWS, room), np.int64)
    lists = np.empty((_LIST_ROWS, room), np.int64)
    weights = np.empty((_WEIGHT_ROWS, room))
    size = 256
    while size < 2 * room:
        size *= 2
    table = np.empty(size, np.int32)
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
        count, source = draft_one(
            own, shared, budget, least, bar, chances, scratch, table, voters, children, lists, weights, *tree
        )
        is_chain = 1
        for node in range(count):
            is_chain &= tree[1][node] == node - 1
        results[0, b], results[1, b], results[2, b] = count, is_chain, source
        written += count
    return written

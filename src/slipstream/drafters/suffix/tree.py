"""Voting and growing: the places that agree with a request's text vote on the next tokens, which make a tree.

Places that agree longest vote on the next token; those that voted for a token vote on the one after it. The tree takes
the likeliest path next, wherever it hangs, until the budget is spent or no path is likely enough: clear votes give a
chain, close ones branches.

Longer agreement weighs more. An answer that just copied from a place in its own text and then differed most likely
continues near that place, so votes from near it weigh more. Where little agrees, two kinds of places vote without
agreement: those where that copy would continue if the new words replaced old ones or were inserted, and the latest
tokens, since a text repeats its own words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.core.draft import MAX_NODES
from slipstream.drafters.suffix.compiling import Numbers, compiled, inner, numbers_at, wide
from slipstream.drafters.suffix.index import BESIDE, LENGTH, LONGEST, SINCE, gather, take_in, text_of

NEAR, OWN_TEXT, PAST = 0, 1, 2
"""Origins of a vote: near the place of the last copy, elsewhere in the request's own text, in past outputs."""
ORIGINS = 3

_DEEP = 4  # places that agree in less than a fourth of the longest agreement do not vote
_WEIGHTS = np.array([2.0 ** min(length, 8) for length in range(LONGEST + 1)])  # [LONGEST + 1]
_PAST_WEIGHT = 0.5  # of a vote from past outputs, relative to one from the request's own text
_NEAR_WEIGHT = 4.0  # of a vote from near the last copy
_SURE = 3  # agreeing tokens that identify the place of a copy
_LOST = 32  # tokens after which that place is forgotten
_WINDOW = 16  # size of the part after it that counts as near
_GUESSES = 3  # places where a copy may continue
_RECENT = 64  # latest tokens that vote without agreement
_RECENT_WEIGHT = 0.05  # of each: all together little more than one vote that agrees
UNASKED = _GUESSES + _RECENT  # most votes without agreement

PLACE, REACH, ORIGIN, NEXT, VOTER_ROWS = 0, 1, 2, 3, 4
"""Rows of `voters`: place in its text, length of the agreement, origin, next voter for the same token."""


@inner
def find_voters(
    own: Numbers,
    shared: Numbers,
    least: int,
    budget: int,
    scratch: Numbers,  # [2, candidates]
    voters: NDArray[np.int64],  # [VOTER_ROWS, 2 * candidates + UNASKED] out
    weights: NDArray[np.float64],  # [2 * candidates + UNASKED] out
) -> int:
    """Collect the voters; returns their number. Those of the request's own text come first."""
    text = text_of(own)
    end = wide(own[LENGTH])
    places, lengths = scratch[0], scratch[1]
    some = max(wide(1), least)
    count, longest = gather(own, text, end, some, wide(_DEEP), places, lengths)
    for i in range(count):
        voters[PLACE, i], voters[REACH, i], voters[ORIGIN, i] = places[i], lengths[i], OWN_TEXT
        weights[i] = _WEIGHTS[lengths[i]]
    if longest >= _SURE:
        own[BESIDE], own[SINCE] = places[0], end
    else:
        if own[SINCE]:
            count = vote_near(own, least, voters, weights, count)
        if not least:
            count = add_recent(own, min(wide(_RECENT), 2 * budget), voters, weights, count)
    past, _ = gather(shared, text, end, max(some, longest // _DEEP), wide(_DEEP), places, lengths)
    for i in range(past):
        at = count + i
        voters[PLACE, at], voters[REACH, at], voters[ORIGIN, at] = places[i], lengths[i], PAST
        weights[at] = _PAST_WEIGHT * _WEIGHTS[lengths[i]]
    count += past
    for i in range(count):
        voters[NEXT, i] = i + 1
    if count:
        voters[NEXT, count - 1] = -1
    return count


@inner
def vote_near(own: Numbers, least: int, voters: NDArray[np.int64], weights: NDArray[np.float64], count: int) -> int:
    """After a copy ended: weigh voters near its place higher, and add guesses where it continues."""
    text = text_of(own)
    end = wide(own[LENGTH])
    beside, since = wide(own[BESIDE]), wide(own[SINCE])
    while since < end and text[beside] == text[since]:  # the copy went on
        beside += 1
        since += 1
    own[BESIDE], own[SINCE] = beside, since
    said = end - since  # tokens since the copy ended
    if said > _LOST:
        own[SINCE] = 0
        return count
    for i in range(count):
        if beside <= voters[PLACE, i] < beside + said + _WINDOW:
            voters[ORIGIN, i] = NEAR
            weights[i] *= _NEAR_WEIGHT
    for place in (beside + said, beside, beside + 1):  # these tokens replaced the same number, none, or one
        known = place >= end or text[place] < 0
        for i in range(count):
            known |= voters[PLACE, i] == place
        if not known and not least:
            voters[PLACE, count], voters[REACH, count], voters[ORIGIN, count] = place, 0, NEAR
            weights[count] = _NEAR_WEIGHT * _WEIGHTS[0]
            count += 1
    return count


@inner
def add_recent(own: Numbers, most: int, voters: NDArray[np.int64], weights: NDArray[np.float64], count: int) -> int:
    """Add the latest tokens as voters, for texts in which little agrees."""
    text, place = text_of(own), wide(own[LENGTH]) - 1
    for _ in range(most):
        if text[place] < 0:  # the beginning of the text
            break
        voters[PLACE, count], voters[REACH, count], voters[ORIGIN, count] = place, 0, OWN_TEXT
        weights[count] = _RECENT_WEIGHT
        place -= 1
        count += 1
    return count


STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 20, 32)  # classes of agreement: upper limits of the number of agreeing tokens
SHARES = (0.9, 0.5, 0.2, 0.07)  # classes of votes: lower limits of the share of all weights
KINDS = len(SHARES) + 2  # one below the last share, and one above the first for three or more unanimous votes
STATES = ORIGINS * len(STEPS) * KINDS

_CLASS = np.array(
    [next(i for i, top in enumerate(STEPS) if length <= top) for length in range(LONGEST + 1)], np.int32
)  # [LONGEST + 1]

OWN, OWN_SIZE, SHARED, SHARED_SIZE, NEW, BUDGET, FIELDS = 0, 1, 2, 3, 4, 5, 6
"""Columns of `jobs`: address and size of the request's index and of its tenant's; number of new tokens; budget."""

# Rows of `children`, the tokens that may become nodes: token, parent, state, votes, latest place, longest agreement,
# first voter, depth, best origin.
_TOKEN, _PARENT, _STATE, _VOTES, _NEWEST, _AGREES, _FIRST, _DEPTH, _FROM, _CHILD_ROWS = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9

# Rows of `lists`: waiting children, best first; children of the latest node; free places for children.
_QUEUE, _LATEST, _FREE, _LIST_ROWS = 0, 1, 2, 3
# Rows of `weights`: each voter's; each child's share of the votes; the probability of its path; the queue's ranks.
_WEIGHT, _SHARE, _PATH, _RANK, _WEIGHT_ROWS = 0, 1, 2, 3, 4
_OWN_FIRST = 1 << 29
_BY_SHARE, _BY_AGE = 1e-4, 1e-15  # break ties by votes, then by age


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
    """The token `depth` positions after a place. end > 0: past it the text continues with its own guesses."""
    if end and place + depth >= end:
        return wide(text[place + depth % (end - place)])
    return wide(text[place + depth])


@inner
def enqueue(queue: NDArray[np.int64], ranks: NDArray[np.float64], head: int, tail: int, child: int, rank: float) -> int:
    """Insert a child into queue[head:tail], after those of equal rank. Returns 1 if it took the place before `head`.

    The root's children come almost in order and belong at the end. Later ones are children of the best, belong near the
    front, and find a free place there.
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
    """Write a tree. Returns its number of nodes, and the place in the shared text that its first node came from."""
    if budget < 1:
        return 0, -1
    text, other = text_of(own), text_of(shared)
    end = wide(own[LENGTH])
    token, parent, state, votes = children[_TOKEN], children[_PARENT], children[_STATE], children[_VOTES]
    newest, agrees, first_voter = children[_NEWEST], children[_AGREES], children[_FIRST]
    depth_of, origin, following = children[_DEPTH], children[_FROM], voters[NEXT]
    weight, share, path, ranks = weights[_WEIGHT], weights[_SHARE], weights[_PATH], weights[_RANK]
    queue, latest, free = lists[_QUEUE], lists[_LATEST], lists[_FREE]
    count = find_voters(own, shared, least, budget, scratch, voters, weight)
    spare = wide(len(free))
    for i in range(spare):
        free[i] = i
    table[:] = -1
    # `voter`: the first voter at the latest node
    voter = wide(0) if count else wide(-1)
    head, tail, nodes, node, depth, chance, source = wide(0), wide(0), wide(0), wide(-1), wide(0), 1.0, wide(-1)
    while voter >= 0 and nodes < budget:
        # the children of the latest node
        found, total = wide(0), 0.0
        while voter >= 0:
            i, voter = voter, following[voter]
            place, past = voters[PLACE, i], voters[ORIGIN, i] == PAST
            says = token_after(other, wide(0), place, depth) if past else token_after(text, end, place, depth)
            if says < 0:  # the end of its text
                continue
            child = wide(-1)
            if depth:
                for k in range(found):
                    if token[latest[k]] == says:
                        child = latest[k]
                        break
            else:  # the root has many children: use a hash table
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
                if tail - head >= budget - nodes:  # the queue is full
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
    """Add the new tokens of each request to its index, and draft for it. Returns the total number of nodes."""
    room = 2 * candidates + UNASKED + MAX_NODES + 1  # a voter has one child at each node; other children wait
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

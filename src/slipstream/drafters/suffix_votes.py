"""Who votes on a request's next token: places in its own text and in past outputs, and what each vote weighs.

Places that agree further weigh more. An answer that copied from a place in its own text a moment ago, and then said
something else, most likely goes on near that place: those weigh more. Where little agrees, two more kinds of places
vote although nothing does: where that copy would go on if the new words replaced as many old ones or were put between
them, and the latest tokens of all, since a text says its own words again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.drafters.suffix_code import BESIDE, LENGTH, LONGEST, SINCE, gather, text_of
from slipstream.drafters.suffix_compile import Numbers, inner, wide

NEAR, OWN_TEXT, PAST = 0, 1, 2
"""Origins of a vote: near where the answer was copying, elsewhere in the request's own text, in past outputs."""
ORIGINS = 3

_DEEP = 4  # places that agree in less than a fourth of the longest match do not vote
_WEIGHTS = np.array([2.0 ** min(length, 8) for length in range(LONGEST + 1)])  # [LONGEST + 1]
_PAST = 0.5  # what a vote from past outputs weighs, and …
_NEAR = 4.0  # … one from near the copied place, against one from the rest of the text
_SURE = 3  # agreeing tokens that say where the answer is copying from
_LOST = 32  # tokens after which that is forgotten
_WINDOW = 16  # how far ahead of there is near
_GUESSES = 3  # places where a copy may go on
_RECENT = 64  # latest tokens that vote
_LATEST = 0.05  # what their votes weigh: all together not much more than one that agrees
UNASKED = _GUESSES + _RECENT  # places that vote though nothing agrees, at most

PLACE, REACH, ORIGIN, NEXT, VOTER_ROWS = 0, 1, 2, 3, 4
"""Of each voter: where it stands in its text, how far that agrees, its origin, the next voter for the same token."""


@inner
def summon(
    own: Numbers,
    shared: Numbers,
    least: int,
    budget: int,
    scratch: Numbers,  # [2, candidates]
    voters: NDArray[np.int64],  # [VOTER_ROWS, 2 * candidates + UNASKED] out
    weights: NDArray[np.float64],  # [2 * candidates + UNASKED] out
) -> int:
    """Write down the voters, and give how many there are: the places of the request's own text come first."""
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
            count = look_near(own, least, voters, weights, count)
        if not least:
            count = recall(own, min(wide(_RECENT), 2 * budget), voters, weights, count)
    past, _ = gather(shared, text, end, max(some, longest // _DEEP), wide(_DEEP), places, lengths)
    for i in range(past):
        at = count + i
        voters[PLACE, at], voters[REACH, at], voters[ORIGIN, at] = places[i], lengths[i], PAST
        weights[at] = _PAST * _WEIGHTS[lengths[i]]
    count += past
    for i in range(count):
        voters[NEXT, i] = i + 1
    if count:
        voters[NEXT, count - 1] = -1
    return count


@inner
def look_near(own: Numbers, least: int, voters: NDArray[np.int64], weights: NDArray[np.float64], count: int) -> int:
    """The answer left what it was copying: mark the voters near there, and add guesses at where it goes on."""
    text = text_of(own)
    end = wide(own[LENGTH])
    beside, since = wide(own[BESIDE]), wide(own[SINCE])
    while since < end and text[beside] == text[since]:  # it copied so far
        beside += 1
        since += 1
    own[BESIDE], own[SINCE] = beside, since
    said = end - since  # tokens that it said instead, or in between
    if said > _LOST:
        own[SINCE] = 0
        return count
    for i in range(count):
        if beside <= voters[PLACE, i] < beside + said + _WINDOW:
            voters[ORIGIN, i] = NEAR
            weights[i] *= _NEAR
    for place in (beside + said, beside, beside + 1):  # as many were replaced; none was; one was
        known = place >= end or text[place] < 0
        for i in range(count):
            known |= voters[PLACE, i] == place
        if not known and not least:
            voters[PLACE, count], voters[REACH, count], voters[ORIGIN, count] = place, 0, NEAR
            weights[count] = _NEAR * _WEIGHTS[0]
            count += 1
    return count


@inner
def recall(own: Numbers, most: int, voters: NDArray[np.int64], weights: NDArray[np.float64], count: int) -> int:
    """Little agrees: let the latest tokens stand for what this text says often."""
    text, place = text_of(own), wide(own[LENGTH]) - 1
    for _ in range(most):
        if text[place] < 0:  # the text begins here
            break
        voters[PLACE, count], voters[REACH, count], voters[ORIGIN, count] = place, 0, OWN_TEXT
        weights[count] = _LATEST
        place -= 1
        count += 1
    return count

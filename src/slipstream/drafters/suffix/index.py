"""The index of the suffix drafter: places of a text, sorted by the tokens before them.

A place is a position in the text, and what follows it is its continuation. Places are sorted by their context, which is
the tokens before them read backwards (`LONGEST` at most), and places of one context by age. All places that agree with
a text in its last tokens are neighbours, and the longest agreement is next to where the text itself would be. A new
token is one more place: an index grows with an answer that is still being written.

An index is one array of int32, which a step finds by its address (`tree.py`):

    head | blocks in order | their first places | the tokens before those | their sizes, by block |
    text: -1, tokens, -1, tokens, … | blocks of `WIDTH` places

A search goes through the first places and reads the text only if the token before one is the wanted one: at a million
tokens nearly every access to text or places is a cache miss.
"""

from slipstream.drafters.suffix.compiling import Numbers, compiled, inner, wide

LONGEST = 32  # longer agreement adds no information
WIDTH = 128  # most places in a block
SPAN = 2 * WIDTH  # a spot is rank * SPAN + offset; offsets go up to WIDTH
HEAD = 8
LENGTH, INDEXED, BLOCKS, MOST, ROOM, BESIDE, SINCE = 0, 1, 2, 3, 4, 5, 6
"""Fields of the head: length of the text; how much of it is indexed; blocks in use, and available; room for text; the
place that the text was copying from, and its own place at that time (0: it was not copying)."""

FIRST, LAST = -1, 2**31 - 1
"""Positions of a search among places of one context: before all of them, after all of them."""


@inner
def agreement(text: Numbers, place: int, other: Numbers, at: int, most: int) -> int:
    """Number of agreeing tokens before the two places."""
    length = 0
    while length < most:
        token = text[place - 1 - length]
        if token < 0 or token != other[at - 1 - length]:
            break
        length += 1
    return length


@inner
def comes_before(text: Numbers, place: int, other: Numbers, at: int, most: int, tie: int) -> bool:
    length = agreement(text, place, other, at, most)
    if length < most:
        token, wanted = text[place - 1 - length], other[at - 1 - length]
        if token != wanted:
            return bool(token < wanted)
    return place < tie


@compiled
def text_of(index: Numbers) -> Numbers:
    begin = HEAD + 4 * index[MOST]
    return index[begin : begin + index[ROOM]]


@compiled
def places_of(index: Numbers) -> Numbers:
    return index[HEAD + 4 * index[MOST] + index[ROOM] :]


@inner
def find(index: Numbers, other: Numbers, at: int, most: int, tie: int) -> int:
    """The spot of the place `at` of another text, by `most` tokens of context."""
    text, places = text_of(index), places_of(index)
    order, sizes = index[HEAD:], index[HEAD + 3 * index[MOST] :]
    firsts, tokens = index[HEAD + index[MOST] :], index[HEAD + 2 * index[MOST] :]
    low, high, token = 0, index[BLOCKS], other[at - 1]  # blocks below `low` begin before it
    while low < high:
        middle = (low + high) // 2
        if tokens[middle] < token or (
            tokens[middle] == token and comes_before(text, wide(firsts[middle]), other, at, most, tie)
        ):
            low = middle + 1
        else:
            high = middle
    rank = max(0, low - 1)
    begin = order[rank] * WIDTH
    low, high = 0, (sizes[order[rank]] if index[BLOCKS] else 0)
    while low < high:
        middle = (low + high) // 2
        if comes_before(text, wide(places[begin + middle]), other, at, most, tie):
            low = middle + 1
        else:
            high = middle
    return rank * SPAN + low


@inner
def note_first(index: Numbers, rank: int) -> None:
    """Update the first place of the block of this rank."""
    most = index[MOST]
    first = places_of(index)[index[HEAD + rank] * WIDTH]
    index[HEAD + most + rank] = first
    index[HEAD + 2 * most + rank] = text_of(index)[first - 1]


@inner
def open_block(index: Numbers, rank: int) -> int:
    """Insert an empty block at this rank; returns it. The free blocks follow those in use in `order`."""
    order, sizes = index[HEAD:], index[HEAD + 3 * index[MOST] :]
    block = order[index[BLOCKS]]
    firsts, tokens = index[HEAD + index[MOST] :], index[HEAD + 2 * index[MOST] :]
    for i in range(index[BLOCKS], rank, -1):
        order[i], firsts[i], tokens[i] = order[i - 1], firsts[i - 1], tokens[i - 1]
    order[rank] = block
    sizes[block] = 0
    index[BLOCKS] += 1
    return wide(block)


@inner
def close_block(index: Numbers, rank: int) -> None:
    order = index[HEAD:]
    firsts, tokens = index[HEAD + index[MOST] :], index[HEAD + 2 * index[MOST] :]
    block = order[rank]
    index[BLOCKS] -= 1
    for i in range(rank, index[BLOCKS]):
        order[i], firsts[i], tokens[i] = order[i + 1], firsts[i + 1], tokens[i + 1]
    order[index[BLOCKS]] = block


@inner
def insert(index: Numbers, place: int) -> None:
    text, places = text_of(index), places_of(index)
    order, sizes = index[HEAD:], index[HEAD + 3 * index[MOST] :]
    if not index[BLOCKS]:
        places[open_block(index, wide(0)) * WIDTH] = place
        note_first(index, wide(0))
    found = find(index, text, place, wide(LONGEST), place)
    rank, offset = found // SPAN, found % SPAN
    block = order[rank]
    if sizes[block] == WIDTH:
        half = WIDTH // 2
        upper = open_block(index, rank + 1)
        for i in range(half):
            places[upper * WIDTH + i] = places[block * WIDTH + half + i]
        sizes[block] = sizes[upper] = half
        note_first(index, rank + 1)
        if offset > half:
            block, offset, rank = upper, offset - half, rank + 1
    begin = block * WIDTH
    for i in range(begin + sizes[block], begin + offset, -1):
        places[i] = places[i - 1]
    places[begin + offset] = place
    sizes[block] += 1
    if not offset:
        note_first(index, rank)


@inner
def remove(index: Numbers, place: int) -> None:
    """Remove a place from the index. Its context must still be in the text."""
    places = places_of(index)
    order, sizes = index[HEAD:], index[HEAD + 3 * index[MOST] :]
    found = find(index, text_of(index), place, wide(LONGEST), place)
    rank, offset = found // SPAN, found % SPAN
    if offset == sizes[order[rank]]:  # it belongs behind the last of a block: it is the first of the next
        rank, offset = rank + 1, 0
    block = order[rank]
    sizes[block] -= 1
    for i in range(block * WIDTH + offset, block * WIDTH + sizes[block]):
        places[i] = places[i + 1]
    if not sizes[block]:
        close_block(index, rank)
        return
    if not offset:
        note_first(index, rank)
    # Merge neighbours that fill half a block together: blocks are a quarter full on average at least.
    for left in range(max(0, rank - 1), min(rank + 1, index[BLOCKS] - 1)):
        one, two = order[left], order[left + 1]
        if sizes[one] + sizes[two] <= WIDTH // 2:
            for i in range(sizes[two]):
                places[one * WIDTH + sizes[one] + i] = places[two * WIDTH + i]
            sizes[one] += sizes[two]
            close_block(index, left + 1)
            return


@compiled
def take_in(index: Numbers) -> None:
    """Index the text's new places. The first of a sequence has no context and is skipped."""
    text = text_of(index)
    for place in range(wide(index[INDEXED]), wide(index[LENGTH])):
        if text[place] >= 0 and text[place - 1] >= 0:
            insert(index, place)
    index[INDEXED] = index[LENGTH]


@compiled
def take_out(index: Numbers, begin: int, end: int) -> None:
    """Remove the places of the sequence text[begin:end] from the index."""
    for place in range(begin + 1, end):
        remove(index, place)


@compiled
def gather(
    index: Numbers, other: Numbers, at: int, least: int, deep: int, found: Numbers, lengths: Numbers
) -> tuple[int, int]:
    """Find the places whose context agrees longest with the text before `at` in `other`, longest first.

    Returns their number and the longest agreement. Agreement only shrinks to either side of the spot where `at` itself
    belongs, so the next place is always one of two. Places that agree in less than `least` tokens, or in less than one
    in `deep` of the longest, are left out.
    """
    if not index[BLOCKS]:
        return 0, 0
    text, places = text_of(index), places_of(index)
    order, sizes = index[HEAD:], index[HEAD + 3 * index[MOST] :]
    spot = find(index, other, at, wide(LONGEST), wide(LAST))
    # The texts of the nearest places are far apart in memory: touch them together to overlap the cache misses.
    rank, middle = spot // SPAN, spot % SPAN
    begin, touched = order[rank] * WIDTH, wide(0)
    for i in range(max(0, middle - len(found)), min(sizes[order[rank]], middle + len(found))):
        touched += text[places[begin + i] - 1]
    found[0] = touched
    # two cursors: the block's rank, the index in `places`, and the agreement there (0: no more places)
    right, right_at = spot // SPAN, spot % SPAN
    left, left_at = right, right_at - 1
    left_length = right_length = wide(LONGEST)
    move_left = move_right = True
    longest, count = wide(0), wide(0)
    while count < len(found):
        if move_left:
            if left_at < 0:
                left -= 1
                left_at = wide(sizes[order[left]]) - 1 if left >= 0 else wide(0)
            left_length = (
                agreement(text, wide(places[order[left] * WIDTH + left_at]), other, at, left_length)
                if left >= 0
                else wide(0)
            )
        if move_right:
            if right < index[BLOCKS] and right_at == sizes[order[right]]:
                right, right_at = right + 1, wide(0)
            right_length = (
                agreement(text, wide(places[order[right] * WIDTH + right_at]), other, at, right_length)
                if right < index[BLOCKS]
                else wide(0)
            )
        move_left = left_length >= right_length
        move_right = not move_left
        length = max(left_length, right_length)
        if length < least or length * deep < longest:
            break
        longest = max(longest, length)
        lengths[count] = length
        if move_left:
            found[count] = places[order[left] * WIDTH + left_at]
            left_at -= 1
        else:
            found[count] = places[order[right] * WIDTH + right_at]
            right_at += 1
        count += 1
    return count, longest

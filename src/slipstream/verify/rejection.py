"""The rejection verifier: the classic rule, for drafters that know the probability of the tokens that they drew.

A drawn node stands with probability min(1, p/q); where it falls, the next child of the same parent is tried against the
residual (p - q)+, and where none stands a token is drawn from the residual (Leviathan 2022, Chen 2023; children of a
tree are drawn without replacement). The tokens have the target's distribution; they are not those of plain decoding,
which the exact verifier gives. The gain is a little more acceptance.

No value is read on the host, so that a graph can hold it, and no row's result depends on the other rows: sums over the
vocabulary are of integers, whose order does not matter.

The distribution is the target's under these conditions:

* siblings stand in the order in which they were drawn, without replacement (those of several drafters may alternate);
* a drawn node is never left out for its value, with one exception: it equals an earlier sibling (a merged tree);
* a node that was chosen in any other way (the likeliest, a copied text, the best of many that were drawn) has q = 1;
* the drafter's noise is not this verifier's: `rejection_keys` gives keys of its own.

A pass may have both kinds of requests: `mixed_choices` puts this rule's choices in place of the target's own for those
that ask for it, in every step, drafted or not. (Guesses may come from the target's own later choices, as in lookahead;
so the length of the text may depend on the noise of the next place.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.verdict import Verdicts
from slipstream.sampling.choose import processed
from slipstream.sampling.noise import gumbel, position_keys, stream_keys, uniform
from slipstream.sampling.rows import SampleRows, group_rows, rows_where
from slipstream.sampling.table import Features, SamplingTable
from slipstream.verify.exact import verify_exact

OWN_NOISE = 0x52454A
"""A sample index beyond any request's, which separates this verifier's noise from the drafters'."""

_UNITS = 2.0**45
"""The largest weight of a row as an integer: 2^17 of them still fit 63 bits."""

JUDGED_ROWS = 64
"""Rows of probabilities that are judged together, at least those of one request. Six copies of them exist meanwhile: as
much memory as two copies of 192 rows of logits. Tiny vocabularies take more rows at once (`group_rows`)."""


def rejection_keys(streams: Tensor, positions: Tensor, places: int) -> Tensor:
    """Keys [B, places, 2] int32 for requests with these streams [B] (as in the sampling table).

    positions [B]: absolute position of the first token that the round can emit. A round of K nodes has K + 1 places.
    """
    own = stream_keys(streams, torch.full_like(streams, OWN_NOISE))  # [B]
    place = torch.arange(places, device=streams.device)
    return position_keys(own[:, None], positions[:, None] + place)


def mixed_choices(
    choices: Tensor,  # [B, K + 1] int64: the target's own
    logits: Tensor,  # [R, V]
    rows: SampleRows,  # [R]
    row_of: Tensor,  # [B, K + 1] int64: the row of each request's root (column 0) and nodes; padding: any
    draft: Draft,  # of these requests; `q` where its drafter told it
    table: SamplingTable,
    features: Features,
    drawn: Tensor | None = None,  # [B, K] bool: False: this node's row of `draft.q` means nothing
    *,
    allowed: Tensor | None = None,  # [R, W] int32: what grammars permit, as in `choose`
) -> Tensor:
    """The choices [B, K + 1] of each request's own verifier. Off the accepted path they are the target's."""
    slots = rows.slots[row_of[:, 0]]  # [B]
    asked = table.rejects[slots]  # [B]
    index = rows_where(asked)
    together = max(JUDGED_ROWS, group_rows(logits.shape[1]))
    room = max(1, together // (draft.width + 1))  # requests at a time
    for part in index.split(room) if index.shape[0] else ():
        own = Draft(draft.tokens[part], draft.parents[part], draft.counts[part], draft.is_chain, _at(draft.q, part))
        index_of = row_of[part].flatten()  # [b * (K + 1)]
        mine = _rows_at(rows, index_of)
        p = processed(logits[index_of], mine, table, features, allowed=_at(allowed, index_of)).softmax(1)
        first = mine.positions.view(own.tokens.shape[0], -1)[:, 0]  # [b]
        keys = rejection_keys(table.streams[slots[part]], first, draft.width + 1)
        found = rejection_choices(own, p.view(*keys.shape[:2], -1), keys, own.q, _at(drawn, part))  # -1 off the path
        decided = asked[part, None] & (found >= 0)  # [b, K + 1]
        choices = choices.index_copy(0, part, torch.where(decided, found, choices[part]))
    return choices


def undrafted_choices(
    choices: Tensor,  # [B] int64: the target's own, in the order of the rows
    logits: Tensor,  # [B, V]
    rows: SampleRows,  # [B]
    table: SamplingTable,
    features: Features,
    allowed: Tensor | None = None,  # [B, W] int32: what grammars permit, as in `choose`
) -> Tensor:  # [B]
    """`mixed_choices` without drafts, for the first token after a prompt."""
    nothing = choices.new_zeros(choices.shape[0], 0)  # [B, 0]
    draft = Draft(nothing, nothing, torch.zeros_like(choices), True)
    row_of = torch.arange(choices.shape[0], device=choices.device)[:, None]
    return mixed_choices(choices[:, None], logits, rows, row_of, draft, table, features, allowed=allowed)[:, 0]


def _rows_at(rows: SampleRows, index: Tensor) -> SampleRows:
    return SampleRows(rows.slots[index], rows.positions[index], rows.generated[index], _at(rows.path, index))


def _at(values: Tensor | None, index: Tensor) -> Tensor | None:
    return None if values is None else values[index]


def verify_rejection(
    draft: Draft, p: Tensor, keys: Tensor, q: Tensor | None = None, drawn: Tensor | None = None
) -> Verdicts:
    """Verdicts whose tokens have the distribution p; the arguments are those of `rejection_choices`."""
    return verify_exact(draft, rejection_choices(draft, p, keys, q, drawn))


def rejection_choices(
    draft: Draft, p: Tensor, keys: Tensor, q: Tensor | None = None, drawn: Tensor | None = None
) -> Tensor:
    """The verdict in the form of the target's choices: [B, K + 1] int64.

    Column 0 is the token after the last committed one, column 1 + i the token after node i, -1 where the path does not
    pass. They are one path: the last choice on it is no child of its row.

    p [B, K + 1, V]: the target's processed probabilities in rows of the same order, each with the sum 1. A row with NaN
        or without any possible token accepts nothing below it and chooses -1.
    keys [B, K + 1, 2] int32: `rejection_keys`.
    q [B, K, V]: for each node the distribution that its drafter drew it and its siblings from, each with the sum 1, as
        if it were the first of them; None: no node was drawn. A row that cannot be true (NaN, or 0 at the node's own
        token) counts as not drawn.
    drawn [B, K] bool: False: the node was not drawn (q = 1 at its token); its row of q is not read. None: all were.
    """
    p = p.float()
    total = p.sum(2)
    usable = total.isfinite() & (total > 0)  # [B, K + 1]
    node = torch.arange(draft.width, device=p.device)  # [K]
    real = node < draft.counts[:, None]  # [B, K]
    tokens = torch.where(real, draft.tokens, 0)  # [B, K]
    if q is not None:
        q = q.float()
        told = real & q.sum(2).isfinite()  # [B, K]
        drawn = told if drawn is None else told & drawn
    trials = _Trials(tokens, draft.parents + 1, real, p, usable, keys, q, drawn)
    if draft.is_chain or not draft.width:
        path = _walk_chain(trials)
    else:
        path = _walk_copied(trials) if q is None else _walk_tree(trials)
    at = path.row[:, None]  # [B, 1]
    own = _draw(path.left, keys.gather(1, path.depth[:, None, None].expand(-1, 1, 2))[:, 0])  # [B]
    return path.choices.scatter(1, at, torch.where(usable.gather(1, at), own[:, None], -1))


@dataclass(frozen=True, slots=True)
class _Trials:
    """The inputs of a walk down the drafts."""

    tokens: Tensor  # [B, K] int64, 0 is padding
    parent_row: Tensor  # [B, K] int64: row 0 is the root, row 1 + i is node i
    real: Tensor  # [B, K] bool: no padding
    p: Tensor  # [B, K + 1, V] fp32
    usable: Tensor  # [B, K + 1] bool: the row of p is one
    keys: Tensor  # [B, K + 1, 2] int32
    q: Tensor | None  # [B, K, V] fp32
    drawn: Tensor | None  # [B, K] bool


@dataclass(frozen=True, slots=True)
class _Path:
    """The ends of the walks."""

    choices: Tensor  # [B, K + 1] int64: the accepted tokens, each at its parent's row; -1 elsewhere
    row: Tensor  # [B] int64: the last row of the path
    depth: Tensor  # [B] int64: accepted nodes
    left: Tensor  # [B, V] fp32: what may follow, up to a factor; 0 at the children that fell


def _walk_chain(trials: _Trials) -> _Path:
    """Judge all nodes at once: in a chain each is the only child, so no trial needs the outcome of another."""
    tokens, p, q, drawn = trials.tokens, trials.p, trials.q, trials.drawn
    batch, width = tokens.shape
    choices = tokens.new_full((batch, width + 1), -1)
    if width == 0:
        none = tokens.new_zeros(batch)
        return _Path(choices, none, none, p[:, 0])
    here = tokens[:, :, None]  # [B, K, 1]
    left = p[:, :width]  # [B, K, V]
    chance = left.gather(2, here)[:, :, 0].double()  # [B, K]
    odds = torch.ones_like(chance)  # [B, K]
    if q is not None and drawn is not None:
        at_node = q.gather(2, here)[:, :, 0]  # [B, K]
        drawn = drawn & (at_node > 0)
        odds = torch.where(drawn, at_node.double().clamp(max=1), odds)
        left = torch.where(drawn[:, :, None], _residual(left, q), left)
    left = left.scatter(2, here, 0.0)
    u = uniform(trials.keys[:, :width].flatten(0, 1), tokens.reshape(-1, 1)).view(batch, width)
    certain = (chance > 0) & (left.amax(2) <= 0)  # nothing would be left: only rounding could let it fall
    stands = trials.real & trials.usable[:, :width] & (_passes(u, chance, odds) | certain)  # [B, K]
    accepted = stands.long().cumprod(1).sum(1)  # [B]
    falls = accepted < trials.real.sum(1)  # [B]: there was one more to try
    row = accepted[:, None, None].expand(-1, 1, p.shape[2])  # [B, 1, V]
    rest = left.gather(1, row.clamp(max=width - 1))[:, 0]  # [B, V]
    whole = p.gather(1, row)[:, 0]  # [B, V]
    rest = torch.where(rest.amax(1, keepdim=True) > 0, rest, whole)  # by rounding; the node that fell had no chance
    choices[:, :width] = torch.where(torch.arange(width, device=p.device) < accepted[:, None], tokens, -1)
    return _Path(choices, accepted, accepted, torch.where(falls[:, None], rest, whole))


def _walk_copied(trials: _Trials) -> _Path:
    """All nodes of trees of which none was drawn, at once: what is left when a node is tried is p of its parent's row
    without the siblings before it, whatever happened elsewhere. So no trial needs the outcome of another, and a graph
    has as many launches for 63 nodes as for two.
    """
    tokens, real, p = trials.tokens, trials.real, trials.p
    batch, width = tokens.shape
    above = torch.where(real, trials.parent_row, 0)  # [B, K]
    node = torch.arange(width, device=p.device)
    weight = p.flatten(1).gather(1, above * p.shape[2] + tokens)  # [B, K]
    siblings = (above[:, :, None] == above[:, None]) & real[:, :, None] & real[:, None]  # [B, K, K]
    before = siblings & (node < node[:, None])  # [B, K, K]: the second is tried before the first
    weight = torch.where((before & (tokens[:, :, None] == tokens[:, None])).any(2), 0.0, weight)  # none is tried twice
    # sums of integers: in which order they are added up does not matter
    gone = torch.where(before, (weight.double() * _UNITS).to(torch.int64)[:, None], 0).sum(2)  # [B, K]
    chance = weight.double() / (1 - gone.double() / _UNITS)
    possible = (p > 0).sum(2).gather(1, above)  # [B, K]: tokens that the parent's row has
    fallen = (before & (weight > 0)[:, None]).sum(2) + (weight > 0)
    last = (weight > 0) & (fallen >= possible)  # nothing would be left: only rounding could let it fall
    depth = _depths(above)  # [B, K]: accepted nodes before it, where the path comes there
    keys = trials.keys.gather(1, depth[:, :, None].expand(-1, -1, 2))
    u = uniform(keys.flatten(0, 1), tokens.reshape(-1, 1)).view(batch, width)
    passes = real & trials.usable.gather(1, above) & (_passes(u, chance, torch.ones_like(chance)) | last)
    stands = passes & ~(before & passes[:, None]).any(2)  # the first of its siblings that passes, where the path comes
    told = _at_rows(above, tokens, stands)
    found = verify_exact(Draft(tokens, above - 1, real.sum(1), False), told)
    accepted, path = found.accepted, found.path  # [B], [B, K]
    choices = _at_rows(above.gather(1, path), tokens.gather(1, path), node < accepted[:, None])
    row = torch.where(accepted > 0, path.gather(1, (accepted - 1).clamp_min(0)[:, None])[:, 0] + 1, 0)  # [B]
    left = p.gather(1, row[:, None, None].expand(-1, 1, p.shape[2]))[:, 0]  # [B, V]
    fell = torch.where(real & (above == row[:, None]), tokens, p.shape[2])  # [B, K]
    rest = torch.nn.functional.pad(left, (0, 1)).scatter(1, fell, 0.0)[:, :-1]
    return _Path(choices, row, accepted, torch.where(rest.amax(1, keepdim=True) > 0, rest, left))


def _at_rows(rows: Tensor, tokens: Tensor, where: Tensor) -> Tensor:  # [B, K + 1]
    """Choices: `tokens` [B, K] at `rows` [B, K] where `where` holds; -1 elsewhere."""
    width = rows.shape[1]
    nowhere = tokens.new_full((rows.shape[0], width + 2), -1)
    return nowhere.scatter(1, torch.where(where, rows, width + 1), tokens)[:, : width + 1]


def _depths(above: Tensor) -> Tensor:  # [B, K]
    """The number of nodes above each, by the rows of their parents [B, K] (row 0 is the root, row 1 + i is node i).

    Pointer doubling: after step s it has looked at 2^s ancestors.
    """
    jump = torch.nn.functional.pad(above, (1, 0))  # [B, K + 1]
    depth = torch.nn.functional.pad(torch.ones_like(above), (1, 0))
    for _ in range(above.shape[1].bit_length()):
        depth = depth + depth.gather(1, jump)
        jump = jump.gather(1, jump)
    return depth[:, 1:] - 1


def _walk_tree(trials: _Trials) -> _Path:
    """Once over the nodes: a parent stands before its children, and of siblings the one to be tried first."""
    tokens, p, q, drawn = trials.tokens, trials.p, trials.q, trials.drawn
    batch, width = tokens.shape
    noise = uniform(trials.keys.flatten(0, 1), tokens.repeat_interleave(width + 1, 0)).view(batch, width + 1, width)
    choices = tokens.new_full((batch, width + 1), -1)
    row, depth = tokens.new_zeros(batch), tokens.new_zeros(batch)  # [B]: how far the path has got
    left = p[:, 0]  # [B, V]
    mass = p.new_ones(batch, dtype=torch.float64)  # [B]: the sum of `left`
    fell = torch.zeros_like(left, dtype=torch.bool)  # [B, V]: children of this row that were tried
    first = trials.usable.new_ones(batch)  # [B]: none was
    for node in range(width):
        at, here = row[:, None], tokens[:, node, None]  # [B, 1]
        tries = trials.real[:, node] & (trials.parent_row[:, node] == row) & trials.usable.gather(1, at)[:, 0]  # [B]
        weight = left.gather(1, here)[:, 0].double()  # [B]
        chance = weight / mass
        odds = torch.ones_like(chance)
        rest, rest_mass = left.scatter(1, here, 0.0), mass - weight  # [B, V], [B]: if it falls
        if q is not None and drawn is not None:
            among = torch.where(fell, 0.0, q[:, node])  # [B, V]: drawn without those that were drawn before
            at_node = among.gather(1, here)[:, 0].double()  # [B]
            is_drawn = drawn[:, node] & (at_node > 0)
            among_mass = torch.where(first, 1.0, _mass(among))  # [B]
            odds = torch.where(is_drawn, (at_node / among_mass).clamp(max=1), odds)
            residual = _residual(left / mass.float()[:, None], among / among_mass.float()[:, None])
            rest = torch.where(is_drawn[:, None], residual.scatter(1, here, 0.0), rest)
            rest_mass = torch.where(is_drawn, _mass(rest), rest_mass)
        empty = rest.amax(1) <= 0  # [B]: by rounding. The node stands if it has a chance, else nothing is taken away
        u = noise[:, :, node].gather(1, depth[:, None])[:, 0]  # [B]
        stands = tries & (_passes(u, chance, odds) | (empty & (chance > 0)))  # [B]
        falls = tries & ~stands
        choices = choices.scatter(1, at, torch.where(stands[:, None], here, choices.gather(1, at)))
        changed = falls & ~empty
        left = torch.where(stands[:, None], p[:, node + 1], torch.where(changed[:, None], rest, left))
        mass = torch.where(stands, 1.0, torch.where(changed, rest_mass, mass))
        fell = fell.scatter(1, here, fell.gather(1, here) | falls[:, None]) & ~stands[:, None]
        first = stands | (first & ~falls)
        row, depth = torch.where(stands, node + 1, row), depth + stands
    return _Path(choices, row, depth, left)


def _passes(u: Tensor, chance: Tensor, odds: Tensor) -> Tensor:
    """The node stands: the target takes it with `chance`, and the drafter drew it with `odds`."""
    return u.double() * odds < chance


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """The target's weights after a token drawn from q fell; their sum is not 1."""
    return (p - q).clamp_(min=0)


def _mass(weights: Tensor) -> Tensor:
    """The sums [B] fp64 of weights [B, V], the same in any order of summation; 1 for a row without any."""
    largest = weights.amax(1, keepdim=True)  # [B, 1]
    units = (weights / largest * _UNITS).to(torch.int64).sum(1)  # [B]
    return torch.where(largest[:, 0] > 0, units.double() * (largest[:, 0].double() / _UNITS), 1.0)


def _draw(weights: Tensor, keys: Tensor) -> Tensor:
    """Tokens [B] drawn by weights [B, V]; a token that was tried has weight 0, so no noise is used twice."""
    vocabulary = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    return (weights.log() + gumbel(keys, vocabulary)).argmax(1)

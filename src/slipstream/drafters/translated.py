"""A draft model with another tokenizer than the target's: it reads the request's text in its own tokens.

There are two ways, chosen by what the vocabularies share. If all but a few tokens are shared, ids are mapped one by one
and the draft chooses among the shared ones by the target's rule. Otherwise it works through the text: emitted text is
tokenized again for the draft, and its guess for the target. The draft's cache has pages of its own, since its tokens
are not the target's. The host takes part in every step, so nothing here is captured. Translation errors can only make
guesses better or worse, never an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.core.draft import Tree
from slipstream.core.spellings import byte_of, from_byte_level
from slipstream.drafters.base import DraftRequest, HostDrafter, Needs, Services
from slipstream.kv.cache import KVCache
from slipstream.kv.pages import OutOfPages, PagePool, PageTable
from slipstream.models.batch import PassBatch
from slipstream.models.runner import Runner
from slipstream.sampling.choose import choose
from slipstream.sampling.rows import SampleRows

_EMPTY = Tree()


@dataclass(slots=True)
class _Reading:
    """The draft's view of one request."""

    table: PageTable
    text: GrowingText
    recut: Recut
    ids: list[int] = field(default_factory=list)  # the text so far, in the draft's tokens
    cached: list[int] = field(default_factory=list)  # tokens whose K and V are in the cache, guesses included
    mapped: int = 0  # number of target tokens in `ids`, if ids are mapped


@dataclass(frozen=True, slots=True)
class _Read:
    """The requests that are read to the end, and the logits after them."""

    rows: list[int]
    logits: Tensor  # [B, V]


@dataclass(frozen=True, slots=True)
class _Guesses:
    """The draft's choices, [K, B] int64 each, in its own ids and in the target's; exact where both have the token."""

    own: Tensor
    target: Tensor


class TranslatedDrafter(HostDrafter):
    """Drafts chains with a causal LM whose vocabulary is not the target's."""

    name: ClassVar[str] = "model"  # users name both kinds alike; the vocabularies decide
    needs: ClassVar[Needs] = Needs(own_cache=True)
    bounded: ClassVar[bool] = True  # it takes a few passes, whose cost the planner knows
    costly: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = 5
    _services: Services  # set by `attach`, as the next two
    _pool: PagePool
    _cache: KVCache

    def __init__(self, runner: Runner, own: Any, target: Any, target_size: int) -> None:
        self.runner = runner
        self.weights_bytes = runner.weights_bytes
        self._own, self._target = own, target
        shared = Shared.of(own, target, runner.vocab_size, target_size)
        self.alike = shared.alike
        self._own_of, self._target_of = shared.own_of.tolist(), shared.target_of.tolist()
        self._shared = shared.to(runner.device)
        pairs = (shared.own_of >= 0).nonzero()[:, 0]
        self._columns = pairs.to(runner.device)  # [S]: shared tokens in the target's ids
        self._own_columns = shared.own_of[pairs].to(runner.device)  # [S]: the same in the draft's
        self._special = frozenset(own.all_special_ids)
        self._readings: dict[str, _Reading] = {}

    def page_bytes(self, page_size: int) -> int:
        return KVCache.bytes_per_page(self.runner.layers, page_size, self.runner.dtype)

    def attach(self, services: Services) -> None:
        self._services = services
        self._pool = PagePool(services.cache_pages, services.pool.page_size)
        self._cache = self.runner.new_cache(services.cache_pages, services.pool.page_size)

    def start(self, request: DraftRequest) -> None:
        recut = Recut(self._own)
        reading = _Reading(PageTable(self._pool), GrowingText(self._target), recut, list(recut.ids))
        self._readings[request.id] = reading

    def stop(self, request_id: str) -> None:
        if (reading := self._readings.pop(request_id, None)) is not None:
            reading.table.release()

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        depth = max(budget, default=0)
        asked = [i for i, nodes in enumerate(budget) if nodes and self._follow(requests[i], depth)]
        ready = self._read([requests[i] for i in asked])
        if not ready.rows:
            return [_EMPTY] * len(requests)
        drafted = [asked[row] for row in ready.rows]
        guesses = self._guess([requests[i] for i in drafted], depth, ready.logits)
        trees = [_EMPTY] * len(requests)
        lines = zip(drafted, guesses.own.T.tolist(), guesses.target.T.tolist(), strict=True)
        for i, own, target in lines:
            self._readings[requests[i].id].cached += own[:-1]  # the last guess was not read
            tokens = target if self.alike else self._as_target_tokens(requests[i], own)
            trees[i] = Tree.chain(tokens[: budget[i]])
        return trees

    def _follow(self, request: DraftRequest, nodes: int) -> bool:
        """Translate new text into the draft's tokens. Returns False if the draft cannot continue from it."""
        reading = self._readings[request.id]
        before = same = len(reading.ids)
        if self.alike:
            for token in request.tokens[reading.mapped :]:
                own = self._own_of[token]
                reading.ids += [own] if own >= 0 else self._recut_one(token)
            reading.mapped = len(request.tokens)
        else:
            reading.text.update(request.tokens)
            if not reading.text.whole:
                return False
            same = reading.recut.update(reading.text.text)
            reading.ids = reading.recut.ids
        known, most = min(same, before, len(reading.cached)), min(len(reading.cached), len(reading.ids))
        while known < most and reading.cached[known] == reading.ids[known]:  # accepted guesses
            known += 1
        del reading.cached[min(known, len(reading.ids) - 1) :]  # always read the last one, which gives the first guess
        end = len(reading.ids) + nodes
        if not reading.ids or end > self.runner.max_positions:
            return False
        try:
            reading.table.reserve(end)
        except OutOfPages:
            return False
        return True

    def _recut_one(self, token: int) -> list[int]:
        """A token that the draft lacks, by its text."""
        text = decode(self._target, [token])
        return list(self._own.encode(text, add_special_tokens=False))

    def _read(self, requests: Sequence[DraftRequest]) -> _Read:
        """One pass over unread tokens, shortest requests first: a long prompt takes several steps."""
        room = self._services.max_rows
        readings = [self._readings[request.id] for request in requests]
        missing = [len(reading.ids) - len(reading.cached) for reading in readings]
        taken: list[int] = []
        for i in sorted(range(len(readings)), key=missing.__getitem__):
            if room:
                taken.append(i)
                missing[i] = min(missing[i], room)
                room -= missing[i]
        if not taken:
            return _Read([], torch.empty(0))
        mine = [readings[i] for i in taken]
        ids = [reading.ids[len(reading.cached) :][: missing[i]] for i, reading in zip(taken, mine, strict=True)]
        logits = self._pass(mine, torch.tensor([token for part in ids for token in part]), [len(part) for part in ids])
        for reading, part in zip(mine, ids, strict=True):
            reading.cached += part
        done = [row for row, reading in enumerate(mine) if len(reading.cached) == len(reading.ids)]
        return _Read([taken[row] for row in done], logits[torch.tensor(done, device=logits.device, dtype=torch.int64)])

    def _guess(self, requests: Sequence[DraftRequest], depth: int, logits: Tensor) -> _Guesses:
        """Guess token by token, all requests together, without looking at the guesses."""
        readings = [self._readings[request.id] for request in requests]
        slots = self._tensor([request.slot for request in requests])
        features = self._services.sampling.features([request.slot for request in requests])
        sampling = self._services.sampling.apart(self.name, features)
        lengths = self._tensor([len(request.tokens) for request in requests])
        generated = lengths - self._tensor([request.prompt_length for request in requests])
        own = torch.zeros((depth, len(requests)), dtype=torch.int64, device=self.runner.device)
        target = torch.zeros_like(own)
        for step in range(depth):
            if step:
                logits = self._pass(readings, own[step - 1], [1] * len(requests), ahead=step - 1)
            scores = logits.new_full((len(requests), sampling.vocab_size), float("-inf"))
            scores[:, self._columns] = logits[:, self._own_columns]
            path = target[:step].T if step and (features.penalties or features.bad_words) else None
            rows = SampleRows(slots, lengths + step, generated + step, path)
            target[step] = choose(scores, rows, sampling, features).clamp_min(0)
            own[step] = self._shared.own_of[target[step]].clamp_min(0)
            if not self.alike:  # continue from the draft's own best token if the target lacks it: the text will tell
                best = logits.argmax(1)
                own[step] = torch.where(self._shared.target_of[best] < 0, best, own[step])
        return _Guesses(own, target)

    def _as_target_tokens(self, request: DraftRequest, guess: list[int]) -> list[int]:
        """A guess in the target's tokens, by its text. A special token ends it."""
        end = next((i for i, token in enumerate(guess) if token in self._special), len(guess))
        reading = self._readings[request.id]
        tokens = translate(guess[:end], reading.ids, self._own, self._target, request.tokens)
        if tokens is None:  # inside a word: map tokens, as far as they are shared
            tokens = [self._target_of[token] for token in guess[:end]]
            if -1 in tokens:
                return tokens[: tokens.index(-1)]
        if end < len(guess) and (last := self._target_of[guess[end]]) >= 0:
            tokens.append(last)
        return tokens

    def _pass(self, readings: Sequence[_Reading], ids: Tensor, rows: Sequence[int], ahead: int = 0) -> Tensor:
        """Run `rows` tokens of each request behind its cache and `ahead` guesses. Returns the last rows' logits."""
        at = [len(reading.cached) + ahead for reading in readings]
        tables, device = [reading.table for reading in readings], self.runner.device
        batch = PassBatch.behind(tables, at, rows, ids.to(device), device)
        return self.runner.forward(batch, self._cache)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.runner.device)


_BROKEN = "\ufffd"
_CONTEXT = 6  # tokens decoded along: a token's text can depend on those before it
_UNFINISHED = 3  # most tokens of an incomplete character: four bytes make a whole one
_AGAIN = 32  # tokens at the end of a text that are tokenized again when it grows
_AGREE = 2  # consecutive tokens on which the new and the old tokenization must agree to be joined


class GrowingText:
    """The text of a growing list of tokens. An incomplete character waits for its rest."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""
        self.tokens = 0  # tokens in `text`
        self.whole = True  # False if the last tokens are an incomplete character

    def update(self, tokens: Sequence[int]) -> None:
        known = self.tokens
        start = 1 if tokens and tokens[0] == self._tokenizer.bos_token_id else 0
        known = max(known, start)
        begin = max(start, known - _CONTEXT)
        before = self._decode(tokens[begin:known])
        now = self._decode(tokens[begin:])
        # the context decodes differently: start again from the beginning
        if not now.startswith(before) or _BROKEN in before:
            self.text, known, begin, before, now = "", start, start, "", self._decode(tokens[start:])
        end = len(tokens)
        while now.endswith(_BROKEN) and end > max(known, len(tokens) - _UNFINISHED):
            end -= 1
            now = self._decode(tokens[begin:end])
        if now.endswith(_BROKEN) and end > known:  # not the beginning of a character: keep it
            end, now = len(tokens), self._decode(tokens[begin:])
        self.whole = end == len(tokens)
        self.text += now[len(before) :]
        self.tokens = end

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)


class Recut:
    """A growing text in one tokenizer's tokens.

    New text can change how the last words are tokenized, so the end is tokenized again from a little before, and joined
    where the new tokenization agrees with the old.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._first: list[int] = _beginning(tokenizer)
        self.ids: list[int] = list(self._first)
        self._ends: list[int] = [0] * len(self._first)  # each token's end in the text

    def update(self, text: str) -> int:
        """Update to this text. Returns how many tokens are unchanged."""
        kept = max(len(self._first), len(self.ids) - _AGAIN)
        while kept < len(self.ids) and self._ends[kept] == self._ends[kept - 1] and kept > len(self._first):
            kept += 1  # not inside a character
        begin = self._ends[kept - 1] if kept else 0
        found = self._tokenizer.backend_tokenizer.encode(text[begin:], add_special_tokens=False)
        ids, ends = found.ids, [begin + end for _, end in found.offsets]
        joined = self._join(kept, ids, ends)
        if joined is None:  # tokenize everything
            found = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            ids, ends = [*self._first, *found.ids], [*[0] * len(self._first), *[end for _, end in found.offsets]]
            old, self.ids, self._ends = self.ids, ids, ends
            return _common(old, ids, 0)
        at, new = joined
        old = self.ids
        self.ids = old[:at] + ids[new:]
        self._ends = self._ends[:at] + ends[new:]
        return _common(old, self.ids, at)

    def _join(self, kept: int, ids: list[int], ends: list[int]) -> tuple[int, int] | None:
        """The index among the old tokens and among the new ones from which on the new ones replace them."""
        if kept <= len(self._first):
            return kept, 0
        old = {end: kept + i for i, end in enumerate(self._ends[kept:])}  # by end: the last old token that ends there
        for new in range(_AGREE - 1, len(ids)):
            if ends[new : new + 2] == [ends[new]] * 2 or ends[new] not in old:
                continue  # inside a character, or no old token ends here
            at, first = old[ends[new]] + 1, new + 1 - _AGREE
            mine, theirs = slice(at - _AGREE, at), slice(first, new + 1)
            if at - _AGREE >= kept and self.ids[mine] == ids[theirs] and self._ends[mine] == ends[theirs]:
                return at, new + 1
        return None


def translate(
    ids: Sequence[int], context: Sequence[int], own: Any, target: Any, tail: Sequence[int]
) -> list[int] | None:
    """The target's tokens for the text of the draft's tokens `ids` after `context`. tail: the target's last tokens.

    None if the target would not split the text at the end of its own last token.
    """
    context = _end(own, context)
    before, said = decode(own, context), decode(own, [*context, *ids])
    if not said.startswith(before):
        return None
    said = said[len(before) :].rstrip(_BROKEN)
    known = decode(target, _end(target, tail))
    found = target.backend_tokenizer.encode(known + said, add_special_tokens=False)
    cut = [i for i, (_, end) in enumerate(found.offsets) if end > len(known)]
    if not cut:
        return []
    if found.offsets[cut[0]][0] < len(known):
        return None
    return list(found.ids[cut[0] :])


def _end(tokenizer: Any, tokens: Sequence[int]) -> Sequence[int]:
    """The last few tokens, without incomplete characters."""
    count = _CONTEXT
    while count < len(tokens) and _BROKEN in decode(tokenizer, tokens[-count:]):
        count *= 2
    return tokens[-count:]


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _beginning(tokenizer: Any) -> list[int]:
    """The token that the tokenizer puts before every text, if any."""
    ids: list[int] = tokenizer.encode("", add_special_tokens=True)
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _common(old: Sequence[int], new: Sequence[int], at: int) -> int:
    """Length of the common prefix, of which `at` tokens are known."""
    while at < len(old) and at < len(new) and old[at] == new[at]:
        at += 1
    return at


ALIKE = 0.98  # shared part from which on ids are mapped

_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Shared:
    """The tokens that two vocabularies share, and the id of each in the other; -1: none.

    Tokens match if they stand for the same bytes of text or the same special token. Tokenizers write bytes differently:
    byte-level ones have a character for each byte, others a mark for a space and `<0x0A>` for a byte.
    """

    own_of: Tensor  # [Vt] int64: the draft's id of each target token
    target_of: Tensor  # [Vd] int64: the target's id of each draft token
    alike: bool  # nearly all are shared: see `ALIKE`

    @staticmethod
    def of(own: Any, target: Any, own_size: int, target_size: int) -> Shared:
        """Compare two tokenizers. The sizes are those of the models' logits."""
        theirs = {meaning: token for token, meaning in meanings(target).items() if token < target_size}
        own_of = torch.full((target_size,), -1, dtype=torch.int64)
        target_of = torch.full((own_size,), -1, dtype=torch.int64)
        mine = {token: meaning for token, meaning in meanings(own).items() if token < own_size}
        pairs = [(token, theirs[meaning]) for token, meaning in mine.items() if meaning in theirs]
        end, targets_end = own.eos_token_id, target.eos_token_id
        if end is not None and targets_end is not None and end < own_size and targets_end < target_size:
            pairs.append((end, targets_end))  # whatever its name
        for token, their in sorted(pairs, reverse=True):  # the lowest id wins
            own_of[their], target_of[token] = token, their
        least = ALIKE * max(len(mine), len(theirs))
        return Shared(own_of, target_of, len(pairs) >= least)

    def to(self, device: torch.device) -> Shared:
        return Shared(self.own_of.to(device), self.target_of.to(device), self.alike)


def meanings(tokenizer: Any) -> Mapping[int, bytes | str]:
    """The meaning of each token: bytes of text, or the name of a special token."""
    decoder = tokenizer.backend_tokenizer.decoder
    written = "" if decoder is None else decoder.__getstate__().decode()
    byte_level = '"ByteLevel"' in written
    falls_back = '"ByteFallback"' in written
    added = tokenizer.added_tokens_decoder
    found: dict[int, bytes | str] = {}
    for text, token in tokenizer.get_vocab().items():
        if token in added:
            found[token] = added[token].content if added[token].special else added[token].content.encode()
        elif byte_level:
            found[token] = from_byte_level(text) or text.encode()
        elif falls_back and (byte := byte_of(text)):
            found[token] = byte
        else:
            found[token] = text.replace(_SPACE, " ").encode()
    return found

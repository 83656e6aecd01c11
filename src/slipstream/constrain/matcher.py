"""The state of one answer in its grammar: the tokens that may come next, after the last one and after each draft node.

The state follows the committed tokens. A draft is walked depth first: each token is accepted and rolled back, and the
state is the same afterwards. The accepted path of a draft is followed when the next step begins.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import MAX_NODES, ROOT, Tree

WORD = 32
"""Tokens of one word of a mask."""
GRACE_S = 0.25
MASK_S = 0.005
"""Seconds of a CPU that the grammar of one answer may take: in all, and for each mask in addition. A slower one delays
all requests, so its answer ends. Masks are counted, not steps: a draft never ends an answer; a slow grammar has small
drafts (`most_nodes`)."""
LONGEST_S = 0.05
"""Seconds of a CPU that the engine's thread waits for one call of a heavy grammar."""
_MOST_WAITS = 40
"""Waits of `LONGEST_S` by the clock for a call that gets too little of the CPU. A process that is stopped and goes on,
or a machine that sleeps, is one wait."""

_TOKEN_BYTES = 4
"""Bytes of forced text to look for, for each token that there is room for."""

_ALL, _NONE = -1, 0


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD)


class Ran(Enum):
    """The outcome of a call on the other thread."""

    DONE = auto()
    SLOW = auto()  # given up: it used too much of a CPU
    STARVED = auto()  # given up: others used the CPU, and nothing is known of the grammar


class GrammarThread:
    """A thread for grammars that may be slow. xgrammar cannot be interrupted, but it lets other threads run: its caller
    gives up a call that takes too long, and a new thread takes the next calls.
    """

    def __init__(self) -> None:
        self._given_up: list[threading.Thread] = []
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()

    @property
    def stuck(self) -> int:
        """The number of threads still busy with a call that was given up."""
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        return len(self._given_up)

    def run(self, call: Callable[[], object]) -> Ran:
        """Wait for the call, which must not raise, or give it up."""
        if self._thread is None:
            self._calls, self._done = SimpleQueue(), SimpleQueue()
            self._thread = threading.Thread(target=_work, args=(self._calls, self._done), name="grammar", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._calls.put, None)
        used = _cpu_clock(self._thread)
        until = used() + LONGEST_S
        self._calls.put(call)
        ran = Ran.STARVED
        for _ in range(_MOST_WAITS):
            try:
                self._done.get(timeout=LONGEST_S)
            except Empty:
                if used() < until:
                    continue
                ran = Ran.SLOW
                break
            return Ran.DONE
        self._given_up.append(self._thread)
        self._thread = None
        self._calls.put(None)
        return ran


@torch.inference_mode()  # as the engine's thread, for which it fills masks
def _work(calls: SimpleQueue[Callable[[], object] | None], done: SimpleQueue[None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # which refers to an answer
        done.put(None)


def _cpu_clock(thread: threading.Thread) -> Callable[[], float]:
    """CPU seconds that the thread has used; always 0 on systems that cannot tell."""
    if hasattr(time, "pthread_getcpuclockid") and thread.ident is not None:
        return partial(time.clock_gettime, time.pthread_getcpuclockid(thread.ident))
    return lambda: 0.0


class Texts:
    """The bytes of each token, and the first of them."""

    def __init__(self, texts: Sequence[bytes] = ()) -> None:
        self.texts = texts
        self.first = np.array([text[0] if text else -1 for text in texts], dtype=np.int16)  # [V]
        self.single = {text[0]: token for token, text in enumerate(texts) if len(text) == 1}


@dataclass(frozen=True, slots=True)
class Rules:
    """The data shared by all answers of one form."""

    compiled: Any  # xgrammar's
    end_ids: tuple[int, ...]
    vocab_size: int
    texts: Texts
    encode: Callable[[str], Sequence[int]] = lambda _: ()
    usual_end: int | None = None
    also: Tensor | None = None  # [W] int32: another mask, for all places
    never: frozenset[int] = frozenset()  # tokens that are no text; xgrammar writes to the terminal for these
    thread: GrammarThread | None = None  # for heavy forms
    report_slow: Callable[[str], None] = lambda _: None  # called with the reason if the form is too slow
    left_out: tuple[str, ...] = ()  # rules of a schema that the grammar does not hold, with places
    fault: Callable[[str], str | None] = lambda _: None  # the first of these that a finished answer breaks


class Constraint:
    """One answer's state. Only the engine's thread uses it once the answer is made.

    A grammar that fails allows nothing from then on, and `failure` says why: so the answer ends.
    """

    def __init__(self, rules: Rules) -> None:
        import xgrammar

        self._rules = rules
        self._matcher = xgrammar.GrammarMatcher(rules.compiled, override_stop_tokens=list(rules.end_ids))
        self._ends = frozenset(rules.end_ids)
        self._usual_end = rules.usual_end if rules.usual_end in self._ends else min(rules.end_ids)
        self._seen = 0  # tokens of the answer that the state has followed
        self._ended = False
        self._spent_s = 0.0
        self._masks = 0
        self._next = torch.zeros((1, mask_words(rules.vocab_size)), dtype=torch.int32)  # [1, W] scratch
        self._only_ends = torch.zeros_like(self._next)  # [1, W]
        for token in rules.end_ids:
            self._only_ends[0, token // WORD] |= _bit(token)
        self.failure: str | None = None

    def fresh(self) -> Constraint:
        """The state of another answer of this form at its beginning."""
        return Constraint(self._rules)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The rules of the form that the grammar does not hold."""
        return self._rules.left_out

    def fault(self, text: str) -> str | None:
        """The first of these rules that a finished answer breaks."""
        return self._rules.fault(text)

    @property
    def possible(self) -> bool:
        """True if some token may come next."""
        self._fill(self._next, 0)
        return bool(self._next.any())

    @property
    def complete(self) -> bool:
        """True if the answer may end here."""
        return bool(self._matcher.is_completed())

    @property
    def most_nodes(self) -> int:
        """Most nodes of a draft: all its masks together may take the time that one mask is allowed."""
        usual_s = self._spent_s / max(1, self._masks)
        return min(MAX_NODES, int(MASK_S / max(usual_s, 1e-9)))

    def advance(self, tokens: Sequence[int], begin: int) -> None:
        """Follow the answer `tokens[begin:]` up to its end; the first tokens may have been followed before."""
        if fresh := tokens[begin + self._seen :]:
            self._do(partial(self._follow, fresh))

    def legal(self, tree: Tree) -> list[bool]:
        """By node of a draft: True if the grammar allows it and all nodes above it."""
        kept = [False] * len(tree)
        self._do(lambda: self._walk(tree, kept.__setitem__))
        return kept

    def masks(self, tree: Tree, out: Tensor, row: int) -> None:
        """Write masks to rows of `out` [R, W] int32: for the token after the last one, then after each node.

        The mask after a node that is not allowed is full: no accepted path leads there.
        """
        rows = out[row : row + 1 + len(tree)]
        if self.failure is None:
            filled = torch.full_like(rows, _ALL)  # a copy: a call that was given up may still write
            self._do(partial(self._fill_all, tree, filled))
            rows.copy_(filled)
        if self.failure is not None:
            rows.fill_(_NONE)
        elif self._spent_s > GRACE_S + MASK_S * self._masks:  # these masks are correct; the next allow nothing
            self._too_slow(f"{self._spent_s:.2f} s for {self._masks} masks")

    def forced(self, most: int) -> list[int]:
        """The text that must come next, in the tokens that the tokenizer makes of it: `most` at most.

        It is read off masks, a bounded number of them: some grammars force text without end. It is a guess like others,
        since the model may choose other tokens for the same text.
        """
        found: list[int] = []
        if not self._ended:
            self._do(lambda: found.extend(self._forced(most)))
        return found if self.failure is None else []

    def _follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._ended:
                return
            if not self._accept(token):
                self.failure = f"token {token} was chosen against the grammar of structured_outputs"
                return
            self._seen += 1
            self._ended = token in self._ends

    def _fill_all(self, tree: Tree, rows: Tensor) -> None:
        self._fill(rows, 0)
        if tree.tokens:
            self._walk(tree, lambda node, _: self._fill(rows, 1 + node, tree.tokens[node]))

    def _forced(self, most: int) -> list[int]:
        """The text, found byte by byte, in the tokens of the tokenizer."""
        texts = self._rules.texts.texts
        path: list[int] = []
        end: list[int] = []
        while len(path) < _TOKEN_BYTES * most and not end:
            only = self._only_byte()
            if only in self._ends and only is not None:
                end.append(only)
            elif only is not None and self._accept(only):
                path.append(only)
            else:
                break
        self._rollback(len(path))
        text = b"".join([texts[token] for token in path])
        try:
            likely = self._rules.encode(text.decode())
        except UnicodeDecodeError:  # it begins or ends in the middle of a character
            likely = path
        same = b"".join([texts[token] for token in likely]) == text
        return [*(likely if same else path), *end][:most]

    def _only_byte(self) -> int | None:
        """The one-byte token of the byte that all allowed tokens begin with, or the usual end if only ends are allowed.

        None: there is a choice.
        """
        self._fill(self._next, 0)
        if torch.equal(self._next, self._only_ends):
            return self._usual_end
        texts = self._rules.texts
        allowed = np.unpackbits(self._next[0].numpy().view(np.uint8), bitorder="little")[: len(texts.first)]
        first = texts.first[allowed.view(bool)]
        return texts.single.get(int(first[0])) if len(first) and (first == first[0]).all() else None

    def _do(self, call: Callable[[], object]) -> None:
        """Run a call, for heavy forms on another thread. Nothing runs for an answer that failed."""
        if self.failure is not None:
            return
        ran = Ran.DONE
        if self._rules.thread is None:
            self._timed(call)
        else:
            ran = self._rules.thread.run(partial(self._timed, call))
        if ran is Ran.SLOW:
            self._too_slow(f"more than {LONGEST_S:g} s for one token")
        elif ran is Ran.STARVED:
            self.failure = (
                f"structured_outputs: the machine is too busy: one token took more than {_MOST_WAITS * LONGEST_S:g} s, "
                "nearly all of them without a CPU; try again"
            )

    def _timed(self, call: Callable[[], object]) -> None:
        """Run a call, with xgrammar's errors and the time on the account of this answer."""
        started = time.thread_time()
        try:
            call()
        except Exception as error:
            self.failure = f"the grammar of structured_outputs failed: {type(error).__name__}: {error}"
        finally:
            self._spent_s += time.thread_time() - started

    def _too_slow(self, spent: str) -> None:
        self.failure = f"structured_outputs: the grammar is too ambiguous: {spent} of a CPU; make it simpler"
        self._rules.report_slow(self.failure)

    def _walk(self, tree: Tree, enter: Callable[[int, bool], None]) -> None:
        """Call `enter(node, True)` for each allowed node, with the state after it. Restores the state."""
        if self._ended:
            return
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        path: list[int] = []  # the accepted nodes, from the root on
        todo = [(node, 0) for node in reversed(children.get(ROOT, ()))]  # nodes and their depths
        while todo:
            node, depth = todo.pop()
            self._rollback(len(path) - depth)
            del path[depth:]
            if not self._accept(tree.tokens[node]):
                continue
            path.append(node)
            enter(node, True)
            if tree.tokens[node] not in self._ends:
                todo += [(child, depth + 1) for child in reversed(children.get(node, ()))]
        self._rollback(len(path))

    def _fill(self, out: Tensor, row: int, token: int | None = None) -> None:
        """Write the mask of the current state, unless `token`, or the answer, is an end."""
        if not self._ended and token not in self._ends:
            self._masks += 1
            self._matcher.fill_next_token_bitmask(out, row)
            if self._rules.also is not None:
                out[row] &= self._rules.also

    def _accept(self, token: int) -> bool:
        if token in self._rules.never and token not in self._ends:
            return False
        return bool(self._matcher.accept_token(token))

    def _rollback(self, tokens: int) -> None:
        if tokens:
            self._matcher.rollback(tokens)


def _bit(token: int) -> int:
    """The token's bit as a signed number of 32 bits."""
    bit = 1 << (token % WORD)
    return bit - (1 << WORD) if bit >> (WORD - 1) else bit

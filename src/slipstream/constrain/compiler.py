"""From a form to a `Constraint`: checked, compiled by xgrammar, and cached.

Compiling takes milliseconds to seconds. It runs on the thread where a request comes in, and xgrammar lets other threads
run meanwhile: no step waits for it. For clients of a server, heavy forms are tried first (`trials.py`), a few at a
time, and equal forms at the same time are compiled once. xgrammar is an optional package, imported for the first such
request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.constrain.checker import Checker
from slipstream.constrain.limits import MOST_SHARING, CompileLimits, Places, Turns
from slipstream.constrain.matcher import WORD, Constraint, GrammarThread, Rules, Texts, mask_words
from slipstream.constrain.source import Source, source_of
from slipstream.constrain.trials import LONGEST_PART, TRIALS, Sample
from slipstream.core.errors import InvalidRequest, QueueFull, install
from slipstream.core.structured import StructuredOutputsParams

_CACHE_BYTES = 64 << 20
_KNOWN_TEXTS = 4096
_KNOWN_FORMS = 1024
_AT_ONCE = 2
_MOST_STUCK = 2
"""Threads that are still busy with grammars that were given up: from here on heavy forms are refused."""


class Grammars:
    """The compiled forms of one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        self._lock = threading.Lock()
        self._made: Any = None
        self._no_text: frozenset[int] = frozenset()
        self._texts = Texts()
        self._in_json: Tensor | None = None  # [W]: tokens that may occur in JSON
        self._sample: Sample | None = None
        self._counting = threading.Lock()
        self._thread = GrammarThread()
        self._places = Places()  # of heavy forms under way
        self._trying = Turns(_AT_ONCE)
        self._compiling = Turns(_AT_ONCE)
        self._tried: dict[tuple[StructuredOutputsParams, float], str | None] = {}  # by form: the error; None: fine
        self._joining = threading.Lock()
        self._under_way: dict[tuple[StructuredOutputsParams, float], Future[Any]] = {}  # forms that are being compiled
        self._sharing = 0  # callers that wait for the compilation of another
        self._encode = lru_cache(_KNOWN_TEXTS)(self._encoded)  # keys of a schema recur in every answer

    def constraint(
        self,
        form: StructuredOutputsParams,
        stop_ids: Iterable[int] = (),
        limits: CompileLimits | None = None,
        tenant: str = "",
    ) -> Constraint:
        """The state of an answer of this form at its beginning.

        Raises `InvalidRequest` where no answer can have the form or compiling exceeds the limits, and `QueueFull`.
        stop_ids: more ids that end the answer; special tokens among them stand where the form is complete, others are
        text. limits: None compiles without limit. tenant: time for heavy forms is shared by tenant.
        """
        source = source_of(form)
        slow = not source.light and limits is not None
        rules = Rules(
            self._compiled(form, source, limits, tenant),
            tuple(sorted(self._eos_ids.union(_special_ids(self._tokenizer).intersection(stop_ids)))),
            self._vocab_size,
            self._texts,
            self._encode,
            getattr(self._tokenizer, "eos_token_id", None),
            self._in_json if form.kind.startswith("json") else None,
            self._no_text,
            self._thread if slow else None,
            partial(self._learn, (form, limits.trial_s)) if slow and limits is not None else lambda _: None,
            source.left_out,
            Checker(form.rule).fault if source.left_out and form.kind == "json" else lambda _: None,
        )
        found = Constraint(rules)
        if not found.possible:
            raise InvalidRequest(f"structured_outputs.{form.kind}: no text has this form; change it")
        return found

    def warm(self) -> None:
        """Start the process of trials. Does not wait for it."""
        self._compiler()
        assert self._sample is not None
        TRIALS.warm(self._sample)

    def _compiled(
        self, form: StructuredOutputsParams, source: Source, limits: CompileLimits | None, tenant: str
    ) -> Any:
        compiler = self._compiler()
        if source.light or limits is None:
            return self._made_of(form, source, compiler)
        if self._thread.stuck >= _MOST_STUCK:
            raise QueueFull("structured_outputs: slow grammars of other requests hold the server's CPU; try again", 5.0)
        key, place = (form, limits.trial_s), ExitStack()
        with self._joining:
            shared = self._under_way.get(key)
            if shared is None:
                place.enter_context(self._places.taken(tenant, limits.waiting))
                mine = self._under_way[key] = Future[Any]()
            elif self._sharing >= MOST_SHARING:
                raise QueueFull("structured_outputs: too many requests wait for forms; try again", 1.0)
            else:
                self._sharing += 1
        if shared is not None:
            try:
                return shared.result()
            finally:
                with self._joining:
                    self._sharing -= 1
        with place:
            try:
                self._try_out(form, source, limits, tenant)
                with self._compiling.turn(tenant):
                    mine.set_result(self._made_of(form, source, compiler))
            except BaseException as error:
                mine.set_exception(error)
            finally:
                with self._joining:
                    del self._under_way[key]
        return mine.result()

    @staticmethod
    def _made_of(form: StructuredOutputsParams, source: Source, compiler: Any) -> Any:
        try:
            return source.compile(compiler)
        except Exception as error:  # any error of xgrammar's is one in the form
            raise InvalidRequest(_impossible(form, str(error) or type(error).__name__)) from None

    def _try_out(self, form: StructuredOutputsParams, source: Source, limits: CompileLimits, tenant: str) -> None:
        """Raise `InvalidRequest` where the form would take too long, or cannot be compiled."""
        known = (form, limits.trial_s)
        if known not in self._tried:
            assert self._sample is not None
            with self._trying.turn(tenant):
                try:
                    outcome = TRIALS.try_out(source, self._sample, limits.trial_s)
                except OSError as error:  # without a trial the time is unknown
                    raise InvalidRequest(
                        f"structured_outputs.{form.kind}: may take long to compile, and cannot be tried out on this "
                        f"server, which gets no process for it; {_SIMPLER[form.kind]}"
                    ) from error
            wrong = None
            if outcome.reason is not None:
                wrong = _impossible(form, outcome.reason)
            elif not outcome.fine:
                longest_ms = 1000 * LONGEST_PART * limits.trial_s
                wrong = (
                    f"structured_outputs.{form.kind}: would take too long to compile or to follow: more than "
                    f"{limits.trial_s:g} s of a CPU when tried out, or {longest_ms:g} ms for one token; "
                    f"{_SIMPLER[form.kind]}"
                )
            self._learn(known, wrong)
        if (wrong := self._tried.get(known)) is not None:
            raise InvalidRequest(wrong)

    def _learn(self, form: tuple[StructuredOutputsParams, float], wrong: str | None) -> None:
        with self._counting:
            self._tried[form] = wrong
            while len(self._tried) > _KNOWN_FORMS:
                del self._tried[next(iter(self._tried))]

    def _compiler(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> Any:
        try:
            import xgrammar
        except ImportError:
            raise InvalidRequest(f"structured_outputs needs the package xgrammar: {install('grammar')}") from None
        if not self._eos_ids:
            raise InvalidRequest("structured_outputs: this model has no end-of-text token to end such an answer with")
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=sorted(self._eos_ids)
            )
        except Exception as error:
            raise InvalidRequest(
                f"structured_outputs: not with this model's tokenizer: {_reason(str(error))}"
            ) from None
        self._no_text = frozenset(info.special_token_ids)
        vocabulary = info.decoded_vocab
        self._texts = Texts(vocabulary)
        self._in_json = _without_controls(vocabulary, self._vocab_size)
        self._sample = Sample.of(vocabulary)
        threads = max(1, min(8, (os.cpu_count() or 1) // 2))  # the others are for running requests
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=_CACHE_BYTES)

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*getattr(tokenizer, "all_special_ids", ()), *(token for token, of in added.items() if of.special)}


def _without_controls(vocabulary: Sequence[bytes], vocab_size: int) -> Tensor:  # [W] int32
    """A mask of the tokens without control characters. The compiler allows these in strings of a limited length, where
    JSON does not; it forbids ends of lines itself.
    """
    words = np.full(mask_words(vocab_size), -1, dtype=np.int32)
    for token, text in enumerate(vocabulary[:vocab_size]):
        if any(byte < 32 and byte not in b"\n\r" for byte in text):
            words.view(np.uint32)[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
    return torch.from_numpy(words)


_SIMPLER = {
    "grammar": "write fewer rules that can begin alike, and shorter repeats",
    "json": "use fewer or shorter patterns, lengths, enums and free properties",
    "regex": "write shorter repeats",
    "choice": "give fewer or shorter texts",
    "structural_tag": "give fewer tags or simpler schemas",
}


def _impossible(form: StructuredOutputsParams, message: str) -> str:
    return f"structured_outputs.{form.kind} cannot be followed: {_reason(message)}"


def _reason(message: str) -> str:
    """The last line of xgrammar's message without its place in the source."""
    if "Check failed" in message:  # a limit of the compiler's own, in the words of its source
        return "the compiler cannot; make patterns and lengths shorter"
    last = (message.strip().splitlines() or ["no reason was given"])[-1]
    _, found, reason = last.partition(".cc:")
    return reason.partition(": ")[2] if found else last

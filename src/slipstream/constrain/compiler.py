"""From a rule to something that can be followed: checked, compiled by xgrammar, and kept for the next who asks.

Compiling takes milliseconds to tenths of a second. It happens where a request comes in, on the caller's thread, and
xgrammar lets other threads run meanwhile: no round waits for it. xgrammar is an optional package, imported when the
first such request comes.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.constrain.matcher import WORD, Constraint, Rules, mask_words
from slipstream.constrain.patterns import check_pattern, dotless
from slipstream.constrain.schema import lawful_schema
from slipstream.core.errors import InvalidRequest
from slipstream.core.structured import StructuredOutputsParams

_CACHE_BYTES = 64 << 20
_MOST_SPACES = 40
"""Most white space in a row, where the model sets it: some small models would go on for ever."""
_KNOWN_TEXTS = 4096


class Grammars:
    """The compiled rules of one tokenizer. Any thread may ask."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        self._lock = threading.Lock()
        self._made: Any = None
        self._no_text: frozenset[int] = frozenset()
        self._in_json: Tensor | None = None  # [W]: tokens that JSON may have at all
        self._encode = lru_cache(_KNOWN_TEXTS)(self._encoded)  # keys of a schema come again in every answer

    def constraint(self, form: StructuredOutputsParams, stop_ids: Iterable[int] = ()) -> Constraint:
        """The beginning of an answer of this form. stop_ids: further ids that end it; special tokens among them stand
        where the form is complete, others are text. Raises `InvalidRequest` where no answer can have the form."""
        rules = Rules(
            self._compiled(form),
            tuple(sorted(self._eos_ids.union(_special_ids(self._tokenizer).intersection(stop_ids)))),
            self._vocab_size,
            self._encode,
            getattr(self._tokenizer, "eos_token_id", None),
            self._in_json if form.kind.startswith("json") else None,
            self._no_text,
        )
        found = Constraint(rules)
        if not found.possible:
            raise InvalidRequest(f"structured_outputs.{form.kind}: no text at all has this form; mend it")
        return found

    def _compiled(self, form: StructuredOutputsParams) -> Any:
        compiler = self._compiler()
        try:
            return _compile(compiler, form)
        except InvalidRequest:
            raise
        except Exception as error:  # whatever the compiler does not like
            raise InvalidRequest(f"structured_outputs.{form.kind} cannot be followed: {_reason(error)}") from None

    def _compiler(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> Any:
        try:
            import xgrammar
        except ImportError:
            raise InvalidRequest(
                "structured_outputs needs the package xgrammar: pip install 'slipstream-llm[grammar]'"
            ) from None
        if not self._eos_ids:
            raise InvalidRequest("structured_outputs: this model has no end-of-text token to end such an answer with")
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=sorted(self._eos_ids)
            )
        except Exception as error:
            raise InvalidRequest(f"structured_outputs: not with this model's tokenizer: {_reason(error)}") from None
        self._no_text = frozenset(info.special_token_ids)
        self._in_json = _without_controls(info.decoded_vocab, self._vocab_size)
        threads = max(1, min(8, (os.cpu_count() or 1) // 2))  # the rest is for those who run
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=_CACHE_BYTES)

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*getattr(tokenizer, "all_special_ids", ()), *(token for token, of in added.items() if of.special)}


def _without_controls(vocabulary: Sequence[bytes], vocab_size: int) -> Tensor:  # [W] int32
    """The tokens without control characters, but for ends of lines: the compiler lets them into strings of a limited
    length, where JSON does not have them. Ends of lines it keeps out itself."""
    words = np.full(mask_words(vocab_size), -1, dtype=np.int32)
    for token, text in enumerate(vocabulary[:vocab_size]):
        if any(byte < 32 and byte not in b"\n\r" for byte in text):
            words.view(np.uint32)[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
    return torch.from_numpy(words)


def _compile(compiler: Any, form: StructuredOutputsParams) -> Any:
    if form.kind == "regex":
        check_pattern("structured_outputs.regex", form.rule)
        return compiler.compile_regex(dotless("structured_outputs.regex", form.rule))
    if form.kind == "grammar":
        return compiler.compile_grammar(form.rule)
    if form.kind == "choice":
        listed = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(form.rule))
        return compiler.compile_grammar(f"root ::= {listed}")
    schema = lawful_schema(form.rule) if form.kind == "json" else {"type": "object", "additionalProperties": True}
    free = not form.disable_any_whitespace
    return compiler.compile_json_schema(
        json.dumps(schema, ensure_ascii=False), any_whitespace=free, max_whitespace_cnt=_MOST_SPACES if free else None
    )


def _reason(error: BaseException) -> str:
    """Its last line, without where in the library it was raised."""
    if "Check failed" in str(error):  # a limit of the compiler's own, in the words of its source
        return "the compiler cannot; make patterns and lengths shorter"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    _, found, reason = lines[-1].partition(".cc:")
    return reason.partition(": ")[2] if found else lines[-1]

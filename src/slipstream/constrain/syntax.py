"""Grammars and regular expressions as texts: bounded before they are compiled, and nothing in them is ignored.

xgrammar matches a pattern with the whole text, and leaves some things out without a word: look-ahead inside a schema,
anchors in the middle. Those are refused here, and so is what would take too long: the weight of a grammar or a pattern
is the number of its parts (texts, classes, names of rules), each counted as often as it may be repeated. Its ambiguity
cannot be read off it: that takes a trial (`trials.py`).
"""

from __future__ import annotations

import re

from slipstream.core.errors import InvalidRequest

MAX_RULES = 500
MAX_ALTERNATIVES = 2000
MAX_GRAMMAR_WEIGHT = 4000
MAX_WEIGHT = 2000
"""… of a pattern."""
MAX_JSON_WEIGHT = 256
"""… of a pattern in a schema: it is joined with the grammar of JSON strings, in time that grows with the square."""
MAX_NESTING = 64
"""Groups inside each other: the compiler recurses into them, and many thousands would end the process."""
_MANY = 2
"""The weight of a star or a plus."""
_CLASSES = "dDwWsS"
_ESCAPES = _CLASSES + "nrtfvaexuc0"
"""Letters with a meaning of their own behind a backslash. xgrammar takes others as themselves: `\\A`, `\\p`, `\\k`."""
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*+) | (?P<text>"(?:\\.|[^"\\])*+"?) | (?P<class>\[(?:\\.|[^\]\\])*+\]?) | (?P<defined>::=)
    | (?P<repeat>[*+?]|\{[^}]*+\}?) | (?P<open>\() | (?P<close>\)) | (?P<or>\|) | (?P<name>[\w.-]+) | (?P<other>\S)""",
    re.VERBOSE,
)
"""A text or class without its end goes to the end of the grammar: nothing is read twice."""


def check_grammar(key: str, grammar: str) -> int:
    """The grammar's weight. Raises `InvalidRequest` where it has too much of anything; errors are the compiler's to
    find."""
    rules, alternatives = 0, 0
    groups = [0]  # the weight of each open group, without the part just read
    last = 0  # … of the part just read
    for found in _TOKEN.finditer(grammar):
        kind = found.lastgroup
        if kind == "defined":
            rules += 1
            groups, last = [sum(groups)], max(0, last - 1)  # the name before it was no part
        elif kind == "repeat":
            last *= _times(found[0])
        elif kind == "open":
            groups[-1] += last
            groups.append(0)
            last = 0
        elif kind == "close":
            last = groups.pop() + last if len(groups) > 1 else last
        elif kind == "or":
            alternatives += 1
        elif kind in ("text", "class", "name"):
            groups[-1] += last
            last = 1
        weight = sum(groups) + last
        for many, what, most in (
            (rules, "rules", MAX_RULES),
            (alternatives, "alternatives", MAX_ALTERNATIVES),
            (weight, "parts, each counted as often as it may be repeated", MAX_GRAMMAR_WEIGHT),
            (len(groups), "brackets inside each other", MAX_NESTING),
        ):
            if many > most:
                raise InvalidRequest(f"{key}: too dear, it has more than {most} {what}; make it simpler")
    return sum(groups) + last


def _times(repeat: str) -> int:
    """The weight of a repetition."""
    if not repeat.startswith("{"):
        return 1 if repeat == "?" else _MANY
    bounds = [int(part[:9]) for part in repeat[1:-1].replace(" ", "").split(",") if part.isdecimal()]
    return max([_MANY if repeat.rstrip("} ").endswith(",") else 1, *bounds])


def check_pattern(key: str, pattern: str, *, in_json: bool = False) -> int:
    """The pattern's weight. Raises `InvalidRequest` where it cannot be followed. in_json: it is for strings of JSON."""
    return _scanned(key, pattern, in_json).weight


def dotless(key: str, pattern: str) -> str:
    """A checked pattern for the matcher, whose dot would match the end of a line."""
    return _scanned(key, pattern, False).dotless()


def _scanned(key: str, pattern: str, in_json: bool) -> _Scan:
    scan = _Scan(key, pattern, in_json)
    while not scan.done:
        scan.step()
    return scan


class _Scan:
    """One pass over the pattern, with the weight of each open group so far."""

    def __init__(self, key: str, pattern: str, in_json: bool) -> None:
        self._key, self._pattern, self._in_json = key, pattern, in_json
        self._at = 0
        self._most = MAX_JSON_WEIGHT if in_json else MAX_WEIGHT
        self._groups = [0]  # the weight of each open group, without the part just read
        self._closed = 0  # … of all of them
        self._last = 0  # … of the part just read
        self._inside_class = False
        self._dots: list[int] = []

    @property
    def weight(self) -> int:
        return self._closed + self._last

    @property
    def done(self) -> bool:
        return self._at >= len(self._pattern)

    def step(self) -> None:
        start, char = self._at, self._pattern[self._at]
        self._at += 1
        if self._in_json and (char == '"' or ord(char) < 32):
            self._refuse(start, "a quote or a control character, which JSON writes as an escape")
        if char == "\\":
            self._escape(start)
        elif self._inside_class:
            self._inside_class = char != "]"
        elif char == "[":
            self._inside_class = True
            self._part(1)
            if self._pattern[self._at : self._at + 1] == "^":
                self._at += 1
        elif char == "(":
            self._open(start)
        elif char == ")":
            self._part(0)
            self._last = self._groups.pop() if len(self._groups) > 1 else 0
            self._closed -= self._last
        elif char in "*+?{":
            self._repeat(start, char)
        elif (char == "^" and start > 0) or (char == "$" and not self.done):
            self._refuse(start, f"{char!r} in the middle; the whole text is matched in any case")
        else:
            self._part(1)
            if char == ".":
                self._dots.append(start)

    def dotless(self) -> str:
        """The pattern with classes in place of dots."""
        parts, begin = [], 0
        for at in self._dots:
            parts += [self._pattern[begin:at], "[^\\n\\r]"]
            begin = at + 1
        return "".join([*parts, self._pattern[begin:]])

    def _escape(self, start: int) -> None:
        char = self._pattern[self._at : self._at + 1]
        self._at += 1
        if not self._inside_class:
            self._part(1)
        if self._in_json and (char in '\\"' or char < " " or (char.isalnum() and char not in _CLASSES)):
            self._refuse(
                start,
                rf"\{char}; in a schema an escape must be one of \d \D \w \W \s \S or punctuation without quotes",
            )
        if char.isalnum() and char not in _ESCAPES:
            self._refuse(start, rf"\{char}, which cannot be followed; without the backslash it is the letter itself")

    def _open(self, start: int) -> None:
        if self._pattern[self._at : self._at + 1] == "?":
            if self._pattern[self._at : self._at + 2] != "?:":
                self._refuse(start, "look-around, a name or a flag; of groups only (…) and (?:…) can be followed")
            self._at += 2
        self._part(0)
        self._groups.append(0)
        if len(self._groups) > MAX_NESTING:
            self._refuse(start, f"more than {MAX_NESTING} groups inside each other; make it simpler")

    def _repeat(self, start: int, char: str) -> None:
        times = {"*": _MANY, "+": _MANY, "?": 1}.get(char)
        if times is None:
            end = self._pattern.find("}", self._at)
            bounds = self._pattern[self._at : end].split(",") if end >= 0 else []
            if not bounds or len(bounds) > 2 or not all(part.isdigit() or not part for part in bounds):
                self._refuse(start, "a brace that is no {m}, {m,} or {m,n}; escape it")
            self._at = end + 1
            times = max([int(part[:9]) for part in bounds if part], default=0)
            times = max(times, _MANY) if bounds[-1] == "" else times
        self._last *= max(1, times)
        self._part(0, closes=False)
        if self._pattern[self._at : self._at + 1] == "?":  # lazy: the same texts
            self._at += 1

    def _part(self, weight: int, *, closes: bool = True) -> None:
        """Begin a part of this weight; with `closes` the part before it ends."""
        if closes:
            self._groups[-1] += self._last
            self._closed += self._last
            self._last = weight
        if self.weight > self._most:
            raise InvalidRequest(
                f"{self._key}={_short(self._pattern)!r}: too dear, it has more than {self._most} parts, each "
                "counted as often as it may be repeated; make it simpler"
            )

    def _refuse(self, at: int, what: str) -> None:
        raise InvalidRequest(f"{self._key}={_short(self._pattern)!r}: at character {at} it has {what}")


def _short(pattern: str) -> str:
    return pattern if len(pattern) <= 80 else pattern[:80] + "…"

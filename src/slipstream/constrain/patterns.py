"""Regular expressions that may be followed: no dearer than a round can bear, and nothing in them that would be ignored.

The matcher reads a pattern as one for the whole text. It leaves some things out without a word: look-ahead inside a
schema, anchors in the middle. What it would leave out is refused here, and so is what would take too long: a pattern's
weight is the number of its parts, each counted as often as it may be repeated.
"""

from __future__ import annotations

from slipstream.core.errors import InvalidRequest

MAX_WEIGHT = 2000
MAX_JSON_WEIGHT = 256
"""… of a pattern in a schema: it is joined with what JSON says of strings, in time that grows with the square."""
_MANY = 2
"""What a star or a plus counts for."""
MAX_NESTING = 64
"""Groups inside each other: the compiler follows them down, and many thousands would end the whole process."""
_CLASSES = "dDwWsS"
_ESCAPES = _CLASSES + "nrtfvaexuc0"
"""Letters that mean something else behind a backslash. Others the matcher takes for themselves: `\\A`, `\\p`, `\\k`."""


def check_pattern(key: str, pattern: str, *, in_json: bool = False) -> int:
    """Its weight. Raises `InvalidRequest` where it cannot be followed. in_json: it is for a string of JSON."""
    return _scanned(key, pattern, in_json).weight


def dotless(key: str, pattern: str) -> str:
    """A pattern that was checked, as the matcher is to have it: its dot would match the end of a line as well."""
    return _scanned(key, pattern, False).dotless()


def _scanned(key: str, pattern: str, in_json: bool) -> _Scan:
    scan = _Scan(key, pattern, in_json)
    while not scan.done:
        scan.step()
    return scan


class _Scan:
    """Once over the pattern, with the weight of each open group so far."""

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
        """With classes in the place of dots."""
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
        if self._pattern[self._at : self._at + 1] == "?":  # as few as possible: the same texts
            self._at += 1

    def _part(self, weight: int, *, closes: bool = True) -> None:
        """A part of this weight begins, and the one before it is over, if it `closes`."""
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

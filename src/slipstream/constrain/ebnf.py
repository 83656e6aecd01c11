"""Grammars that may be compiled: how much is written in them, before anybody looks at what it means.

A grammar's weight is the number of its parts (texts, classes, names of rules), each counted as often as it may be
repeated where it stands; what a star or a plus repeats counts twice. How ambiguous a grammar is cannot be read off it:
that takes a trial (`trials.py`). What is no grammar at all is left for the compiler to say.
"""

from __future__ import annotations

import re

from slipstream.core.errors import InvalidRequest

MAX_RULES = 500
MAX_ALTERNATIVES = 2000
MAX_WEIGHT = 4000
MAX_NESTING = 64

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*+) | (?P<text>"(?:\\.|[^"\\])*+"?) | (?P<class>\[(?:\\.|[^\]\\])*+\]?) | (?P<defined>::=)
    | (?P<repeat>[*+?]|\{[^}]*+\}?) | (?P<open>\() | (?P<close>\)) | (?P<or>\|) | (?P<name>[\w.-]+) | (?P<other>\S)""",
    re.VERBOSE,
)
"""What is never closed goes to the end: nothing is read twice, whatever is written."""
_MANY = 2


def check_grammar(key: str, grammar: str) -> int:
    """Its weight. Raises `InvalidRequest` where it has too much of anything."""
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
            (weight, "parts, each counted as often as it may be repeated", MAX_WEIGHT),
            (len(groups), "brackets inside each other", MAX_NESTING),
        ):
            if many > most:
                raise InvalidRequest(f"{key}: too dear, it has more than {most} {what}; make it simpler")
    return sum(groups) + last


def _times(repeat: str) -> int:
    """How often a part counts that is repeated so."""
    if not repeat.startswith("{"):
        return 1 if repeat == "?" else _MANY
    bounds = [int(part[:9]) for part in repeat[1:-1].replace(" ", "").split(",") if part.isdecimal()]
    return max([_MANY if repeat.rstrip("} ").endswith(",") else 1, *bounds])

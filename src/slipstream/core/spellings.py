"""The spellings of tokens that are bytes rather than text."""

from __future__ import annotations

import re

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of(spelling: str) -> bytes | None:
    """The byte of a token such as `<0x0A>`; None for any other token."""
    found = _BYTE.fullmatch(spelling)
    return bytes([int(found[1], 16)]) if found else None


def from_byte_level(spelling: str) -> bytes | None:
    """The bytes of a byte-level tokenizer's spelling; None: it has characters that no such tokenizer writes."""
    try:
        return bytes([_BYTES[character] for character in spelling])
    except KeyError:
        return None


def _byte_characters() -> dict[str, int]:
    """Byte-level tokenizers write printable bytes as they are, and the others as characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()

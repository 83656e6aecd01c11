"""Who is asking: API keys, several of them as tenants."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.serve.config import ApiKey, read_keys
from slipstream.serve.errors import ApiError
from slipstream.serve.logs import log

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class Keyring:
    """The keys that are valid now: those given at start, and those of a file, which `reload` reads again."""

    def __init__(self, given: Sequence[ApiKey] = (), file: Path | None = None) -> None:
        self._given, self._file = tuple(given), file
        self._read()

    def reload(self) -> None:
        """Read the file again. Where it is wrong, the keys stay as they are and the log says why."""
        try:
            self._read()
        except ConfigError as error:
            log.error("keys not changed", extra={"fields": {"why": str(error)}})
        else:
            log.info("keys read", extra={"fields": {"keys": len(self._keys), "tenants": len(self.tenants)}})

    def _read(self) -> None:
        self._keys = {key.digest: key for key in read_keys(self._given, self._file)}
        self.tenants = frozenset(key.tenant for key in self._keys.values())  # empty without keys

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of a request; "" on a server without keys. Raises 401.

        The key is looked up by its digest, so the time of the lookup reveals nothing about other keys.
        """
        if not self._keys:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "replace")).digest()
        found = self._keys.get(digest)
        if found is None or not hmac.compare_digest(digest, found.digest) or scheme.lower() != "bearer":
            missing = "no API key was given" if not given else "the API key is not known here"
            remedy = "send it as `Authorization: Bearer KEY`"
            raise ApiError(401, f"{missing}; {remedy}", code="invalid_api_key", headers=_CHALLENGE)
        return found.tenant

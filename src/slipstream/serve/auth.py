"""Who is asking: API keys, several of them as tenants."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from slipstream.serve.config import ApiKey
from slipstream.serve.errors import ApiError

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


def tenant_of(authorization: str | None, keys: Sequence[ApiKey]) -> str:
    """Whose request it is; "" where nobody is asked for a key. Raises 401.

    Hashes are compared, and with every key there is: how long it takes tells nothing.
    """
    if not keys:
        return ""
    scheme, _, given = (authorization or "").partition(" ")
    digest = hashlib.sha256(given.strip().encode("utf-8", "replace")).digest()
    found = ""
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key.tenant
    if not found or scheme.lower() != "bearer":
        missing = "no API key was given" if not given else "the API key is not known here"
        remedy = "send it as `Authorization: Bearer KEY`"
        raise ApiError(401, f"{missing}; {remedy}", code="invalid_api_key", headers=_CHALLENGE)
    return found

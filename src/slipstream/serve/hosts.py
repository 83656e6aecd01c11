"""Under which names a server answers.

A page from elsewhere may have its own name lead to this machine (DNS rebinding), and a browser then takes this server
for the page's own. But it says in the `Host` header by which name it came.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from slipstream.serve.config import ServeConfig
from slipstream.serve.errors import ApiError

ANY = "*"


def checked_names(config: ServeConfig) -> frozenset[str] | None:
    """Names that a request may come by, beside those of this machine; None: any.

    Who listens beyond this machine, or asks for keys, which no page has, wants to be reached by other names.
    """
    if ANY in config.allowed_hosts:
        return None
    if not config.allowed_hosts and (config.asks_for_keys or not is_local(config.host)):
        return None
    return frozenset({config.host.lower(), *(name.lower() for name in config.allowed_hosts)})


def check_host(headers: Mapping[bytes, bytes], names: frozenset[str] | None) -> None:
    """Raise 403 for a name that is none of ours. Who says none is no browser."""
    if names is None or b"host" not in headers:
        return
    name = host_of(headers[b"host"].decode("latin-1"))
    if name not in names and not is_local(name):
        raise ApiError(
            403, "the Host header names no host of this server; `--allowed-host NAME` adds one", code="host_not_allowed"
        )


def host_of(header: str) -> str:
    """The name without its port, in lower case."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def is_local(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

"""HTTP as uvicorn reads it, but what cannot be read at all is refused in the same shape as everything else."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from slipstream.serve.errors import ApiError

_UNREADABLE = ApiError(400, "this is no HTTP request that can be read; mend its first line and headers").json
_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_UNREADABLE), _UNREADABLE)
)


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # whichever parser is installed
    transport: asyncio.Transport

    def send_400_response(self, msg: str) -> None:
        """Called where the parser gave up: no request has begun, so there is nobody else to answer."""
        self.transport.write(_ANSWER)
        self.transport.close()

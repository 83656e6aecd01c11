"""The page at `/`: a live view of the engine, and a playground. Its files need no build.

They have nothing about this server, so they need no key: the page asks its user for it and sends it with its requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI, Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = (
    "index.html",
    "style.css",
    "plots.css",
    "icon.svg",
    "main.js",
    "server.js",
    "watch.js",
    "plots.js",
    "playground.js",
    "answer.js",
    "colours.js",
)
PATHS = {"/" if name == "index.html" else f"/page/{name}": name for name in _FILES}
_HEADERS = {
    # Only files of this server may be loaded; no inline scripts or styles.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    for path, name in PATHS.items():
        app.get(path, response_class=Response, include_in_schema=False)(_sender(name))


def _sender(name: str) -> Callable[[], Awaitable[Response]]:
    content = files(__name__).joinpath(name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]

    async def send() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return send

"""The endpoints. `service.py` has their work, `gate.py` the checks before them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Scope

from slipstream import __version__
from slipstream.core.errors import SlipstreamError
from slipstream.engine.remote import EngineProcess
from slipstream.serve.config import ServeConfig
from slipstream.serve.errors import ApiError, for_log, from_exception, from_validation
from slipstream.serve.gate import IGNORED_FIELDS, UNENFORCED, Gate
from slipstream.serve.live import LiveView, Seen
from slipstream.serve.metrics import CONTENT_TYPE
from slipstream.serve.page import add_page
from slipstream.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from slipstream.serve.service import Service
from slipstream.serve.telemetry import Record, Tracer

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, words in (
        (400, "The request is wrong: the error names the field."),
        (401, "An API key is needed."),
        (404, "There is no such model."),
        (408, "It took too long."),
        (413, "The body is too long."),
        (429, "Too many requests: retry after Retry-After seconds."),
        (503, "The server is shutting down."),
    )
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream: true` as server-sent events.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    },
    **_ERRORS,
}


def make_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="Slipstream",
        version=__version__,
        description="OpenAI's API for a language model with speculative decoding.",
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
    )
    _add_errors(app)
    begun = Seen(time.perf_counter())

    @functools.cache
    def view_of(tenant: str) -> LiveView:
        return LiveView(
            lambda: service.snapshot(tenant),
            lambda: service.admission.inside_of(tenant),
            lambda: service.health().status,
            service.drain.watchers_end,
            lambda: not tenant or tenant in service.keys.tenants,
            begun,
        )

    @app.post("/v1/completions", response_class=Response, responses=_ANSWERS)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await service.complete(asked, Record.of(request.scope))

    @app.post("/v1/chat/completions", response_class=Response, responses=_ANSWERS)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await service.chat(asked, Record.of(request.scope))

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        return service.models()

    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def model(model: str) -> dict[str, Any]:
        return service.model(model)

    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(asked: TokenizeRequest, request: Request) -> dict[str, Any]:
        return await service.tokenize(asked, Record.of(request.scope))

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(asked: DetokenizeRequest, request: Request) -> dict[str, Any]:
        return await service.detokenize(asked, Record.of(request.scope))

    @app.get("/health", responses=_ERRORS)
    @app.get("/ping", responses=_ERRORS)
    async def health() -> JSONResponse:
        found = service.health()
        return JSONResponse({"status": found.status, "reason": found.reason}, found.http_status)

    @app.get("/metrics", response_class=Response, responses=_ERRORS)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/live", response_class=Response, responses=_ANSWERS)
    async def live(
        request: Request,
        stream: bool = False,
        every: Annotated[float, Query(ge=0.1, le=60, description="seconds")] = 1.0,
    ) -> Response:
        view = view_of(Record.of(request.scope).tenant)
        if stream:
            return StreamingResponse(view.watch(every), media_type="text/event-stream")
        return Response(view.view(begun)[0].json, media_type="application/json")

    @app.get("/version", responses=_ERRORS)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    add_page(app)  # last: routes are tried in order, and these are rare
    return app


def make_gate(
    llm: EngineProcess, config: ServeConfig, crowded: Callable[[], str] = lambda: ""
) -> tuple[ASGIApp, Service]:
    """The whole service as one ASGI application."""
    service = Service(llm, config, crowded)
    app = make_app(service)
    known = frozenset(path for route in app.routes if isinstance(path := getattr(route, "path", None), str))
    tracer = Tracer() if config.telemetry else None

    def ended(scope: Scope, record: Record) -> None:
        one_model = record.path.startswith("/v1/models/")
        endpoint = "/v1/models/{model}" if one_model else record.path if record.path in known else "other"
        if tracer is not None:
            tracer.trace(scope, record, endpoint)
        service.metrics.answered(endpoint, record.status)

    max_body = config.limits.body_for(llm.max_model_len)
    gate: ASGIApp = Gate(app, config, service.keys, service.admission, service.drain, max_body=max_body, ended=ended)
    if config.allowed_origins:  # around the gate: a browser's preflight has no key
        exposed = ("X-Request-Id", IGNORED_FIELDS, UNENFORCED, "Retry-After")
        origins = config.allowed_origins
        gate = CORSMiddleware(
            gate, origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=exposed
        )
    return gate, service


def _add_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's format, and note it in the record."""

    def api_error(request: Request, error: Exception) -> ApiError:
        if isinstance(error, UnicodeEncodeError):  # half a surrogate pair, which pydantic cannot show
            return ApiError(400, "the body has a text that is not UTF-8; mend its encoding", code="invalid_value")
        if isinstance(error, RequestValidationError):
            return from_validation(error.errors(), error.body)
        if isinstance(error, StarletteHTTPException):
            return _no_endpoint(request, error)
        return from_exception(error)

    async def answer(request: Request, error: Exception) -> Response:
        shown = api_error(request, error)
        Record.of(request.scope).error = shown.for_log if shown.status < 500 else for_log(error)
        return shown.response()

    kinds = (UnicodeEncodeError, ApiError, SlipstreamError, RequestValidationError, HTTPException, Exception)
    for kind in (*kinds, StarletteHTTPException):
        app.add_exception_handler(kind, answer)


def _no_endpoint(request: Request, error: StarletteHTTPException) -> ApiError:
    """An error of the framework, which says only the name of the status."""
    headers, asked = dict(error.headers or {}), f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return ApiError(404, f"{asked}: there is no such endpoint; /openapi.json lists them", code="not_found")
    if error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        remedy = f"{asked}: this endpoint does not know the method; use {allowed}"
        return ApiError(405, remedy, code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, str(error.detail), headers=headers)

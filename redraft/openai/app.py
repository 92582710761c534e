"""The routes of the `/v1` front end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from redraft.errors import Code
from redraft.openai.answers.chat import ChatAnswer
from redraft.openai.answers.completions import CompletionAnswer
from redraft.openai.answers.responses import ResponsesAnswer
from redraft.openai.bridge import Generation
from redraft.openai.errors import ApiError, internal
from redraft.openai.metrics import CONTENT_TYPE
from redraft.openai.model import ServedModel
from redraft.openai.page import add_page
from redraft.openai.schemas import ChatBody, CompletionBody, ResponsesBody
from redraft.openai.service import Service, ending_with_errors
from redraft.openai.sse import ClientGone, EventStream, attended, json_response
from redraft.openai.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from redraft.openai.translate import Job, chat_job, completion_job, responses_job
from redraft.request import clipped

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"),
    *("/health", "/metrics", "/"),
)
CLIENT_CLOSED = 499
"""Status, for the log only, of a request whose client went away."""


class AnswerWriter(Protocol):
    """How an endpoint writes what the worker generates."""

    async def whole(self, generation: Generation) -> dict[str, Any]: ...

    def events(self, generation: Generation) -> AsyncIterator[bytes]: ...

    def error(self, error: ApiError) -> bytes: ...


def create_app(service: Service) -> FastAPI:
    """The application; access is checked around it."""
    tracing = service.tracing
    app = FastAPI(
        title="redraft",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        telemetry={
            "tracer_provider": tracing.provider,
            "tracing": tracing.on,
            "metrics": False,
            "logs": False,  # they hold what exceptions say
            "operation_spans": False,
            "exclude": lambda scope: not scope["path"].startswith("/v1/"),
        },
    )
    add_page(app)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, job = await service.accept(request, ChatBody, chat_job)
        return await _answer(service, request, job, ChatAnswer(body, job, service.model), body.stream)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body, job = await service.accept(request, CompletionBody, completion_job)
        return await _answer(service, request, job, CompletionAnswer(body, job, service.model), body.stream)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body, job = await service.accept(request, ResponsesBody, responses_job)
        return await _answer(service, request, job, ResponsesAnswer(body, job, service.model), body.stream)

    @app.post("/tokenize")
    async def to_tokens(request: Request) -> Response:
        _, answer = await service.accept(request, TokenizeBody, tokenize)
        return json_response(answer)

    @app.post("/detokenize")
    async def to_text(request: Request) -> Response:
        _, answer = await service.accept(request, DetokenizeBody, detokenize)
        return json_response(answer)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(await service.current_model())]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        current = await service.current_model()
        current.check_name(name)
        return json_response(_model(current))

    @app.get("/health")
    async def health() -> Response:
        ready = await service.worker_ready() and not service.client.starting
        away = "restarting"
        if service.client.stopping:
            away = "shutting down"
        elif service.client.starting:
            away = "starting"
        return json_response({"status": "ok" if ready else away}, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        engine = (await service.worker_ready(metrics=True) and service.engine_metrics) or None
        return Response(service.metrics.page(engine), media_type=CONTENT_TYPE)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return json_response(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        texts = {
            404: f"unknown path {clipped(request.url.path, 100)!r}: expected one of {', '.join(PATHS)}",
            405: f"{request.method} is not for this path",
        }
        text = texts.get(error.status_code, error.detail)
        return json_response(
            ApiError(text, code=Code.of_http(error.status_code)).body, error.status_code, error.headers
        )

    @app.exception_handler(ClientGone)
    async def client_gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    @app.exception_handler(Exception)
    async def failure(_: Request, __: Exception) -> Response:
        return json_response(internal().body, 500)

    return app


async def _answer(service: Service, request: Request, job: Job, answer: AnswerWriter, stream: bool) -> Response:
    """Run the job's requests for as long as the client waits. What fails before a stream's first event is a status."""
    with ExitStack() as stack:
        generation = stack.enter_context(service.generation(request, job))
        if not stream:
            return json_response(await attended(request, answer.whole(generation)))
        events = answer.events(generation)
        first = await attended(request, anext(events))
        return EventStream(ending_with_errors(first, events, answer.error), stack.pop_all().close)


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "redraft",
        "max_model_len": model.max_len,
        "drafting_methods": model.methods,
    }

"""What a request is answered with that cannot be served: OpenAI's status codes and shape, whatever went wrong where.

400 the request is at fault, `param` names the field     404 no such model, file, batch or address
401 no valid key                                         413 larger than a limit
422 understood, but not possible with this model         429 too many requests; Retry-After says when again
503 no worker or no Redis; Retry-After                    504 not answered in time
"""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from contract import logs
from contract.errors import BadPrompt, DllmError
from contract.jobs import ErrorCode, ErrorDetail

RETRY_S = 1.0
"""When to come again after an outage that may be over at any moment."""

INVALID = "invalid_request_error"
STATUS: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.BAD_PARAMS: (422, INVALID),
    ErrorCode.EMPTY_PROMPT: (400, INVALID),
    ErrorCode.PROMPT_TOO_LONG: (400, INVALID),
    ErrorCode.UNKNOWN_MODEL: (404, INVALID),
    ErrorCode.OUT_OF_MEMORY: (422, INVALID),
    ErrorCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
    ErrorCode.CANCELLED: (503, "server_error"),
}
"""Status and type for what a worker says of a prompt; 500 for the rest, where the model or the machine failed."""
CODES = {ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded", ErrorCode.UNKNOWN_MODEL: "model_not_found"}
"""What OpenAI has a word of its own for."""


class Told(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is none."""

    error: Told


CAUSES: dict[int | str, str] = {
    400: "the request is at fault: `param` names the field",
    401: "no valid API key",
    404: "no such model, file or batch",
    413: "larger than a limit",
    422: "not possible with this model",
    429: "too many requests: `Retry-After` says when again",
    503: "no worker or no queue: `Retry-After` says when again",
    504: "not answered in time",
    "4XX": "anything else that is the request's fault",
    "5XX": "anything else that is ours",
}
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": cause} for status, cause in CAUSES.items()
}
"""For the OpenAPI page."""


class ApiError(DllmError, HTTPException):
    """A request that ends with an error. FastAPI lets it through also while it reads a body, as an HTTPException."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))} if retry_after_s is not None else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        HTTPException.__init__(self, status, message, headers or None)
        self.kind = kind
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.detail

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(_plain(self.body), self.status_code, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(404, message, param=param, code=code)


def too_large(message: str, param: str | None = None) -> ApiError:
    return ApiError(413, message, param=param, code="request_too_large")


def too_many(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)


def unavailable(message: str, code: str = "unavailable", retry_after_s: float = RETRY_S) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, retry_after_s=retry_after_s)


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, kind="timeout_error", code="timeout")


def of_bad_prompt(error: BadPrompt, param: str | None = None) -> ApiError:
    """What the parser of batch files says of a row, said of a request."""
    return bad_request(str(error), error.param or param, error.code)


def of_failure(error: ErrorDetail) -> ApiError:
    """What a worker says of a prompt."""
    status, kind = STATUS.get(error.code, (500, "server_error"))
    retry = RETRY_S if status == 503 else None
    return ApiError(status, error.message, kind=kind, code=CODES.get(error.code, error.code), retry_after_s=retry)


def install(app: FastAPI) -> None:
    """Let `app` answer every error in this shape."""
    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(BadPrompt)(_bad_prompt)
    app.exception_handler(RedisError)(_outage)
    app.exception_handler(Exception)(_bug)


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own: no such address, wrong method, a body that is no JSON."""
    where = f"{request.method} {request.url.path}"
    said = {404: f"no such address: {where}", 405: f"{where} is not offered"}.get(error.status_code, error.detail)
    told = ApiError(error.status_code, said)
    told.headers = error.headers
    return told.response()


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return bad_request("the body is not JSON", code="bad_json").response()
    place = [str(part) for part in first["loc"][1:]] or ["the body"]
    message = f"{'.'.join(place)}: {first['msg'].removeprefix('Value error, ')}"
    return bad_request(message, place[0] if len(first["loc"]) > 1 else None).response()


async def _bad_prompt(request: Request, error: BadPrompt) -> Response:
    return of_bad_prompt(error).response()


async def _outage(request: Request, error: RedisError) -> Response:
    logs.get().warning("redis_away", reason=str(error))
    return unavailable("the queue does not answer at the moment: try again").response()


async def _bug(request: Request, error: Exception) -> Response:
    told = ApiError(500, "an error of the service: its log says more", kind="server_error", code="internal")
    told.headers = {"x-request-id": request.state.entry.request}  # this answer does not pass the door
    return told.response()


def _plain(body: Any) -> Any:
    """What a client sent may be repeated to it, and half a surrogate pair has no UTF-8."""
    if isinstance(body, dict):
        return {name: _plain(value) for name, value in body.items()}
    return body.encode("utf-8", "backslashreplace").decode() if isinstance(body, str) else body

"""The application of the page, put together: on its own (`producer dashboard`) or below the HTTP service.

`create_app` is the front of the package. Where it is mounted, all addresses follow from the request.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from contract import logs
from contract.errors import DllmError
from contract.ledger import Ledger
from contract.settings import ProducerSettings
from producer.dashboard import pages, shield
from producer.dashboard.access import Access, Refused
from producer.dashboard.looking import Dashboard, LogIn
from producer.dashboard.rendering import page
from producer.dashboard.shield import Shield
from producer.gateway import keys
from producer.gateway.errors import ApiError

STATIC = Path(__file__).parent / "static"


def create_app(settings: ProducerSettings, ledger: Ledger, host: str) -> FastAPI:
    """The application. `host` is the address at which it will listen; `ledger` is used in threads.

    Raises SettingsError for keys that cannot be read.
    """
    app = FastAPI(title="dllm-batch", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.dashboard = Dashboard(settings, ledger, Access(settings, host, keys.load(settings)))
    app.include_router(pages.router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.exception_handler(LogIn)(_log_in)
    app.exception_handler(Refused)(_refused)
    app.exception_handler(ApiError)(_http_error)
    app.exception_handler(DllmError)(_told)
    app.exception_handler(RedisError)(_outage)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(Exception)(_bug)
    app.add_middleware(Shield)
    return app


async def _log_in(request: Request, error: LogIn) -> Response:
    """A browser is shown where; a program, and the page's script, are told."""
    if "text/html" in request.headers.get("accept", "") and request.method == "GET":
        return RedirectResponse(f"{_root(request)}/login", 303)
    answer = _message(request, 401, "an API key is needed: log in, or send 'Authorization: Bearer KEY'")
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


async def _refused(request: Request, error: Refused) -> Response:
    return _message(request, error.status, str(error))


async def _told(request: Request, error: DllmError) -> Response:
    """No such batch or row, mostly."""
    return _message(request, 404, str(error))


async def _outage(request: Request, error: RedisError) -> Response:
    logs.get().warning("redis_away", reason=str(error))
    return _message(request, 503, "Redis does not answer at the moment: try again")


async def _http_error(request: Request, error: HTTPException) -> Response:
    return _message(request, error.status_code, "there is no such page" if error.status_code == 404 else error.detail)


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    return _message(request, 400, "this address is not one that a page here leads to")


async def _bug(request: Request, error: Exception) -> Response:
    """This answer does not pass the shield."""
    logs.get().error("page_failed", path=request.url.path, exc_info=error)
    return PlainTextResponse("an error of this page: its log says more", 500, shield.HEADERS)


def _message(request: Request, status: int, message: str) -> Response:
    return page("message.html", status, root=_root(request), message=message)


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", ""))

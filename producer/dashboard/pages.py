"""The pages, and the two forms that change something: log in, and queue failed rows again.

Every page is whole without script; with it, the parts that are marked as live are replaced by those of the same page
asked for anew (`static/page.js`), which says so in a header and is spared what does not change.
"""

from __future__ import annotations

import math
from typing import Annotated, Any
from urllib.parse import parse_qs, quote, unquote

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import RedirectResponse, Response

from contract import queues
from contract.jobs import ErrorCode
from contract.ledger import Batch, Mark
from producer import report
from producer import story as stories
from producer.dashboard import chart, failing, telling
from producer.dashboard.access import COOKIE, SESSION_S, Refused, Viewer, check_origin
from producer.dashboard.looking import Dashboard, Here, Viewing
from producer.dashboard.rendering import page
from producer.dashboard.retrying import Wanted
from producer.gateway.metrics import exposition
from producer.story import Subject

BATCHES = 25
LARGE = 100_000
"""Rows of a batch from which on finding one output among them takes longer than a page may."""
LARGEST_FORM = 16_384
MOST_FIELDS = 10
router = APIRouter()


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form, read within bounds."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_FORM:
            raise Refused(413, "the form is too large")
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise Refused(400, "the form has too many fields") from None
    return {name: values[0] for name, values in fields.items()}


Form = Annotated[dict[str, str], Depends(_form)]
Number = Annotated[int, Query(alias="page", ge=1, le=10_000_000)]


@router.get("/")
def overview(request: Request, here: Here, viewer: Viewing, number: Number = 1) -> Response:
    known = here.ledger.known()
    batches = here.ledger.newest(BATCHES, (number - 1) * BATCHES)
    standing, hour = here.stand(), here.hour()
    return _page(
        "overview.html",
        request,
        here,
        viewer,
        batches=report.batch_reports(batches, here.ledger, here.settings.folders),
        known=known,
        number=number,
        pages=max(1, math.ceil(known / BATCHES)),
        standing=standing,
        hour=hour,
        chart=chart.throughput(hour) if hour else None,
    )


@router.get("/batches/{batch:path}")
def batch_or_prompt(request: Request, here: Here, viewer: Viewing, batch: str, after: int = -1) -> Response:
    """A batch's page at its id, a prompt's at `BATCH:INDEX`, as `producer logs` has them."""
    subject = Subject.of(batch)
    found = report.find(subject.batch, here.ledger)
    if subject.index is not None and subject.index >= found.counts.submitted:
        raise Refused(404, f"so far this batch has {found.counts.submitted:,} rows, the first of which is 0")
    if subject.index is None:
        return _batch(request, here, viewer, found, max(-1, after))
    return _prompt(request, here, viewer, found, subject)


def _batch(request: Request, here: Dashboard, viewer: Viewer, found: Batch, after: int) -> Response:
    folders = here.settings.folders
    causes, among = failing.causes(found, here.ledger, folders)
    live = "x-live" in request.headers
    return _page(
        "batch.html",
        request,
        here,
        viewer,
        batch=report.batch_reports([found], here.ledger, folders)[0],
        causes=causes,
        among=among,
        failed=failing.of_batch(found, after, here.ledger),
        after=after,
        story=None if live else telling.story(Subject(found.spec.batch), folders.logs, found.spec.created_at - 60),
    )


def _prompt(request: Request, here: Dashboard, viewer: Viewer, found: Batch, subject: Subject) -> Response:
    folders, index = here.settings.folders, subject.index or 0
    (mark,) = here.ledger.marks([(subject.batch, index)])
    (job,) = queues.prompts(here.ledger.redis, subject.batch, [index])
    failed = failing.of_row(subject.batch, index, here.ledger) if mark is Mark.FAILED else None
    if failed is None and (mark is None or (found.counts.total or 0) <= LARGE):
        told = stories.standing(subject, found, here.ledger, folders)
    else:
        told = {"state": str(mark)}
    return _page(
        "prompt.html",
        request,
        here,
        viewer,
        subject=subject,
        text=failing.whole(job).split("\n") if job else [],
        told=told,
        failed=failed,
        story=telling.story(subject, folders.logs, found.spec.created_at - 60),
    )


@router.get("/failures")
def failures(request: Request, here: Here, viewer: Viewing, code: str | None = None) -> Response:
    newest = failing.newest(here.stand().models, code, here.ledger)
    return _page("failures.html", request, here, viewer, newest=newest, code=code)


@router.post("/retry")
def retry(request: Request, here: Here, viewer: Viewing, form: Form) -> Response:
    """Queue failed rows of a batch again: all, those with a code, or the one with an index."""
    if not here.settings.dashboard_actions:
        raise Refused(403, "this page only shows: start it with --allow-actions, or use `producer retry`")
    here.access.check_form(request, viewer, form.get("token", ""))
    batch = report.find(unquote(form.get("batch", "")), here.ledger).spec.batch
    here.retrying.want(_wanted(batch, form.get("code"), form.get("index"), here), viewer.name)
    return RedirectResponse(f"{_root(request)}/batches/{_quoted(batch)}", 303)


def _wanted(batch: str, code: str | None, index: str | None, here: Dashboard) -> Wanted:
    if code is not None and code not in set(ErrorCode):
        raise Refused(400, "there is no such error code")
    if index is None:
        return Wanted(batch, ErrorCode(code) if code else None)
    if not (index.isascii() and index.isdecimal() and len(index) < 12):
        raise Refused(400, "a row's index is a number")
    (job,) = queues.prompts(here.ledger.redis, batch, [int(index)])
    if job is None:
        raise Refused(404, "there is no job for this row any more: it cannot be queued again")
    return Wanted(batch, id=job.id)


@router.get("/login")
def login(request: Request, here: Here) -> Response:
    if here.access.viewer(request):
        return RedirectResponse(f"{_root(request)}/", 303)
    return page("login.html", root=_root(request), wrong=False)


@router.post("/login")
def log_in(request: Request, here: Here, form: Form) -> Response:
    check_origin(request)
    cookie = here.access.cookie(form.get("key", "").strip())
    if cookie is None:
        return page("login.html", 401, root=_root(request), wrong=True)
    answer = RedirectResponse(f"{_root(request)}/", 303)
    answer.set_cookie(COOKIE, cookie, max_age=SESSION_S, **_flags(request))
    return answer


@router.post("/logout")
def log_out(request: Request, here: Here, viewer: Viewing, form: Form) -> Response:
    here.access.check_form(request, viewer, form.get("token", ""))
    answer = RedirectResponse(f"{_root(request)}/login", 303)
    answer.delete_cookie(COOKIE, **_flags(request))
    return answer


@router.get("/metrics")
def metrics(request: Request, here: Here, viewer: Viewing) -> Response:
    return exposition(here.registry, request)


def _page(name: str, request: Request, here: Dashboard, viewer: Viewer, **values: Any) -> Response:
    can_act = here.settings.dashboard_actions and viewer.token is not None
    return page(
        name,
        root=_root(request),
        viewer=viewer,
        can_act=can_act,
        notices=here.retrying.told,
        quoted=_quoted,
        **values,
    )


def _root(request: Request) -> str:
    """Where the page is mounted."""
    return str(request.scope.get("root_path", ""))


def _flags(request: Request) -> dict[str, Any]:
    """Of the cookie: no script reads it, no other site's request carries it, and none without TLS if we have it."""
    secure = request.url.scheme == "https"
    return {"path": _root(request) or "/", "httponly": True, "samesite": "strict", "secure": secure}


def _quoted(text: str) -> str:
    """`text` as a part of an address."""
    return quote(text, safe="")

"""Data becomes HTML. Whatever a template prints is made visible first, then escaped: control characters, those that
turn the direction of text and all that have no shape of their own are spelled out, wherever the text came from.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from contract.terminal import safe
from producer.display import duration, moment


def page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    return HTMLResponse(_templates().get_template(name).render(values), status)


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("producer.dashboard"),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"duration": duration, "count": _count, "rate": _rate, "time": _time, "short": _short}
    return found


def visible(value: Any) -> Any:
    """Everything that is printed passes here; what is markup already is of our own making."""
    if value is None:
        return "–"
    return safe(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _count(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"


def _rate(number: float | None) -> str:
    return "–" if number is None else f"{number:,.1f}" if number < 100 else f"{number:,.0f}"


def _short(text: str, length: int = 80) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _time(at: float | None) -> str | Markup:
    """The server's local time for people, and a whole one for their tools."""
    if at is None:
        return "–"
    whole = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(at))
    return Markup('<time datetime="{}">{}</time>').format(whole, moment(at))

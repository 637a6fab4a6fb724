"""What is logged is what `docs/logs.md` lists: held by reading the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from contract import events

ROOT = Path(__file__).parents[2]
LEVELS = {"debug", "info", "warning", "error", "critical"}
OFTEN = {"batch", "index", "worker", "exc_info"}
"""Bound values, and what every line may have."""
LIBRARIES = {"library_message", "python_warning"}


class Call(NamedTuple):
    where: str
    level: str
    event: ast.expr
    fields: set[str]


def calls() -> Iterator[Call]:
    """Every call of a logger, of `Notices.warn` and of the audit in our code."""
    for package in ("contract", "producer", "worker"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    where = f"{file.relative_to(ROOT)}:{node.lineno}"
                    fields = {word.arg for word in node.keywords if word.arg}
                    name, logger = node.func.attr, ast.unparse(node.func.value)
                    if (
                        ("log" in logger or logger.startswith("get("))
                        and file.name not in ("notices.py", "audit.py")
                        and (name in LEVELS or name == "exception")
                    ):
                        yield Call(where, "error" if name == "exception" else name, node.args[0], fields)
                    elif name == "warn" and len(node.args) > 1:
                        yield Call(where, "warning", node.args[1], fields)


def test_nothing_is_logged_that_is_not_in_the_registry() -> None:
    seen = set()
    for call in calls():
        assert isinstance(call.event, ast.Constant), f"{call.where}: the event's name must stand there"
        event = events.EVENTS.get(call.event.value)
        assert event, f"{call.where}: '{call.event.value}' is not in contract/events.py"
        assert call.level == event.level, f"{call.where}: {event.name} is of level {event.level}"
        assert call.fields <= {*event.fields, *OFTEN}, f"{call.where}: {call.fields - {*event.fields, *OFTEN}}"
        seen.add(event.name)
    assert seen == set(events.EVENTS) - LIBRARIES


def test_names_and_fields_are_plain_words() -> None:
    for event in [*events.EVENTS.values(), *events.AUDIT_EVENTS.values()]:
        assert event.name.replace("_", "").isalpha(), event.name
        assert event.level in LEVELS, event.name
        assert event.meaning, event.name
    assert len(events.EVENTS) == len(events.LIFE) + len(events.WORK) + len(events.TROUBLE)
    assert set(events.EVENTS) >= events.IN_FILE_ONLY


def test_the_document_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "logs.md").read_text(encoding="utf-8") == events.document()

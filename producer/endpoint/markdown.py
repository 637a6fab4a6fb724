"""The report as Markdown, to paste where results are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contract.terminal import safe
from producer.endpoint.report import Report, facts, lines, sheets


def markdown(found: Report) -> str:
    """Heading, tables, notes and conditions."""
    conditions = found.conditions
    parts = [f"# {_cell(conditions['model'])} at {_cell(conditions['base_url'])}"]
    for sheet in sheets(found):
        parts += [f"## {sheet.title}", _table(sheet.columns, sheet.rows)]
    parts.append("\n".join(f"- {_cell(line)}" for line in lines(found)))
    parts += ["## Conditions", _table(("condition", "value"), facts(conditions))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [_row(columns), "|" + "---|" * len(columns)]
    return "\n".join([*head, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """A server's words must not end a cell or begin markup."""
    return safe(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")

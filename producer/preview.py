"""What `producer submit --dry-run` tells: a source read to its end as it would be, and nothing put anywhere.

Memory is four bytes a row. Tokens are counted where the model's tokenizer lies on this machine, in the first rows only
and without the chat template; time is judged by the last throughput that a worker of the model logged here.
"""

from __future__ import annotations

import itertools
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from contract.jobs import ErrorCode, ErrorRow, Message, Prompt, PromptJob
from contract.ledger import BatchSpec, Cursor
from contract.parser import Parsed, parse
from contract.settings import ProducerSettings

FIRST_ERRORS = 10
COUNTED_ROWS = 10_000
AT_A_TIME = 500
LOG_TAIL = 1 << 20
"""Bytes at the end of a log in which throughput records are looked for."""
RECORDS = 50
"""Micro-batches over which throughput is measured: the worker's last."""
Count = Callable[[Sequence[str]], list[int]]


@dataclass(frozen=True)
class Throughput:
    """How fast a worker of the model went last: rows and output tokens per second, when, and on what."""

    rows_per_s: float
    tokens_per_s: float
    at: str
    worker: str
    device: str


@dataclass
class Preview:
    """One source. Lengths are those of prompts that can run, in `unit`; `counted` of them were measured."""

    source: str
    unit: str
    jobs: int = 0
    errors: Counter[ErrorCode] = field(default_factory=Counter)
    first: list[ErrorRow] = field(default_factory=list)
    lengths: array[int] = field(default_factory=lambda: array("L"))
    most_new_tokens: int = 0
    """The longest answers of all rows together."""

    @property
    def rows(self) -> int:
        return self.jobs + self.errors.total()

    def share(self, part: float) -> int:
        """The length that `part` of the prompts do not exceed."""
        ordered = sorted(self.lengths)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0

    def document(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "file": self.source,
            "rows": self.rows,
            "can_run": self.jobs,
            "errors": dict(self.errors),
            "first_errors": [row.model_dump(mode="json") for row in self.first],
            "unit": self.unit,
            "measured": len(self.lengths),
            "lengths": {
                "p50": self.share(0.5),
                "p95": self.share(0.95),
                "most": max(self.lengths, default=0),
                "sum": sum(self.lengths),
            },
            "max_new_tokens": self.most_new_tokens,
        }


def preview(file: Path, spec: BatchSpec, settings: ProducerSettings, stop: Callable[[], bool]) -> Preview:
    """Read `file` as the batch `spec` would."""
    count = token_count(settings)
    told = Preview(spec.source, "characters" if count is None else "tokens")
    with file.open("rb", buffering=1 << 20) as stream:
        rows = parse(stream, spec, Cursor(), settings.max_line_mb << 20)
        while not stop() and (chunk := list(itertools.islice(rows, AT_A_TIME))):
            _add(told, chunk, count)
        rows.close()
    return told


def _add(told: Preview, chunk: Sequence[Parsed], count: Count | None) -> None:
    jobs = [found.row for found in chunk if isinstance(found.row, PromptJob)]
    for found in chunk:
        if isinstance(found.row, ErrorRow):
            told.errors[found.row.error.code] += 1
            if len(told.first) < FIRST_ERRORS:
                told.first.append(found.row)
    told.most_new_tokens += sum(job.params.max_new_tokens for job in jobs)
    told.jobs += len(jobs)
    if count is None:
        told.lengths.extend(len(_text(job.asked)) for job in jobs)
    elif len(told.lengths) < COUNTED_ROWS:
        counted = count([_text(job.asked) for job in jobs])
        ids = [len(job.prompt_token_ids or ()) for job in jobs]
        told.lengths.extend(known or found for known, found in zip(ids, counted, strict=True))


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(turn.content for turn in prompt if isinstance(turn, Message))


def token_count(settings: ProducerSettings) -> Count | None:
    """Counts the tokens of texts by the model's `tokenizer.json`; None where there is none or it cannot be read."""
    places = (settings.folders.models / settings.model, Path(settings.model))
    file = next((place / "tokenizer.json" for place in places if (place / "tokenizer.json").is_file()), None)
    if file is None:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - whatever the library has against the file, characters will do
        return None
    return lambda texts: [len(one.ids) for one in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def last_throughput(logs: Path, model: str) -> Throughput | None:
    """The newest that any worker logged for `model`; None when none did."""
    found = [one for file in logs.glob("worker-*.jsonl") if (one := _throughput(file, model)) is not None]
    return max(found, key=lambda one: one.at, default=None)


def _throughput(file: Path, model: str) -> Throughput | None:
    records = list(_records(file, model))[-RECORDS:]
    if not records:
        return None
    # Micro-batches overlap: what counts is the stretch from the first one's beginning to the last one's end.
    begins = min(_moment(record) - record["seconds"] for record in records)
    seconds = max(1e-3, _moment(records[-1]) - begins)
    rows = sum(record["rows"] - record["unfinished"] for record in records)
    tokens = sum(record["output_tokens"] for record in records)
    if rows <= 0:
        return None
    last = records[-1]
    worker = str(last.get("worker") or file.name.removeprefix("worker-").removesuffix(".jsonl"))
    return Throughput(rows / seconds, tokens / seconds, last["timestamp"], worker, str(last.get("device", "?")))


def _records(file: Path, model: str) -> Iterator[dict[str, Any]]:
    with file.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - LOG_TAIL))
        for line in stream:
            if b'"batch_throughput"' not in line:
                continue
            try:
                record = json.loads(line)
                usable = record["model"] == model and record["seconds"] > 0 and _moment(record) > 0
            except (ValueError, KeyError, TypeError):
                continue
            if usable:
                yield record


def document(found: Sequence[Preview], last: Throughput | None) -> dict[str, Any]:
    """What sources would come to, and how long they would take: `seconds` with answers like the last ones."""
    rows = sum(one.jobs for one in found)
    estimate = None if last is None else {"seconds": round(rows / last.rows_per_s, 1), **asdict(last)}
    return {"files": [one.document() for one in found], "estimate": estimate}


def _moment(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["timestamp"]).timestamp()

"""Every event that our code logs: its name, level and fields, what it means, and what to do about it.

`docs/logs.md` is made of this (`python -m contract.events > docs/logs.md`), and tests hold that nothing is logged that
is not here. Scripts rely on these names and fields: one that is here keeps its meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Literal, NamedTuple

Level = Literal["debug", "info", "warning", "error", "critical"]


class Event(NamedTuple):
    """`fields` are those beside the ones of every line; `todo` is empty where nothing is to be done."""

    name: str
    level: Level
    fields: tuple[str, ...]
    meaning: str
    todo: str = ""


EVERY_LINE = {
    "timestamp": "when, in UTC, to the microsecond",
    "level": "debug, info, warning, error or critical",
    "event": "one of the names below",
    "host, pid": "which machine and process wrote the line",
    "worker": "which worker, on all lines of a worker's process",
    "batch, index": "which prompt, on lines about one prompt; `batch` alone on lines about a batch",
    "indices": 'which prompts, on lines about several: `{"BATCH": "0-31,40"}`, ranges of row numbers by batch',
    "exception": "the traceback, where there is one",
}


def _event(name: str, level: Level, fields: str, meaning: str, todo: str = "") -> Event:
    return Event(name, level, tuple(fields.split()), meaning, todo)


LIFE = (
    _event("batch_created", "info", "batch file output model", "a file was claimed for a new batch"),
    _event("claim_adopted", "info", "batch file", "a claimed file was found of which the ledger knew no batch"),
    _event(
        "rows_submitted",
        "info",
        "batch indices unreadable",
        "a chunk of the file is in the queue; `unreadable` of its rows are error rows at once",
    ),
    _event("submitting_resumed", "info", "batch row", "a submission that was interrupted goes on at this row"),
    _event("batch_submitted", "info", "batch rows", "the file was read to its end; `rows` is how many it has"),
    _event("batch_empty", "warning", "batch file", "the file holds no prompts: its output is empty", "look at it"),
    _event("rows_taken", "info", "indices rows", "prompts that this worker took from the queue, once a second"),
    _event("rows_finished", "info", "indices rows", "prompts whose answers are on the disk and marked, once a second"),
    _event("prompt_answered", "info", "batch index prompt output", "the text of an answer; only with `log_prompts`"),
    _event(
        "prompt_retried",
        "warning",
        "batch index attempt in_s code reason",
        "an attempt failed; the prompt runs again in about so many seconds",
        "nothing, unless there are many: `producer report` counts them",
    ),
    _event(
        "prompt_failed",
        "error",
        "batch index code attempt reason",
        "the prompt failed for good, or its job cannot run; its error row is written",
        "`producer failed BATCH` says what to do for its code",
    ),
    _event("rows_given_back", "info", "indices rows", "a worker that stops put prompts back to the front"),
    _event(
        "rows_put_back",
        "warning",
        "queue indices rows of_dead_workers stranded",
        "leases ran out, or jobs lay where a crash left them: they are at the front of the queue again",
        "look for the end of the worker that `rows_taken` names before",
    ),
    _event(
        "job_refused",
        "error",
        "job reason",
        "a job on our queue is not ours; it stands among RQ's failed jobs",
        "find who put it there",
    ),
    _event(
        "lease_lost",
        "warning",
        "batch index",
        "the row is somebody else's by now, or cancelled; what this worker has of it is dropped",
        "if it is often: the worker stood still for longer than `lease_s`",
    ),
    _event(
        "prompt_outlived_worker",
        "warning",
        "batch index crash of started_at",
        "the prompt's last start, by worker `of`, never ended: it ran through its n-th crash",
        "after three it fails as `worker_crashed`",
    ),
    _event(
        "prompt_runs_alone",
        "warning",
        "batch index",
        "the prompt ran through two crashes: the next one, if it comes, is its own",
        "look at the prompt",
    ),
    _event(
        "rows_cancelled",
        "info",
        "batch indices rows",
        "these were to be cancelled; `rows` of them had not ended just then",
    ),
    _event("batch_cancelled", "info", "batch rows", "so many rows that waited or ran were cancelled, of all or by ids"),
    _event("rows_requeued", "info", "batch indices rows", "rows that had failed or were cancelled are queued again"),
    _event(
        "batch_published", "info", "batch output done failed cancelled", "all rows have ended and the files are there"
    ),
)

WORK = (
    _event(
        "batch_throughput",
        "info",
        "micro_batch rows unfinished prompt_tokens output_tokens seconds row_seconds output_tokens_per_s steps "
        "forwards tokens_per_forward positions padding_share queue_wait_s peak_memory_mb model device dtype quantize",
        "a micro-batch has ended: as many prompts as run together, from the first one's entry to the last one's end. "
        "Micro-batches overlap, so their rates do not add up; `producer report` does that. Tokens, steps and forwards "
        "are summed over rows; `row_seconds` is the time that they were in the engine, `queue_wait_s` the mean wait",
    ),
    _event("worker_started", "info", "model device", "a process begins to be a worker"),
    _event(
        "model_loaded",
        "info",
        "seconds model device dtype quantize family parameters context mask_id stop_ids rows_at_full_context",
        "the worker is ready to take prompts",
    ),
    _event("worker_stopped", "info", "", "a worker ended in order"),
    _event("metrics_opened", "info", "address", "metrics and health are to be had there"),
    _event("watching", "info", "folder", "`producer watch` begins"),
    _event("watching_stopped", "info", "", "`producer watch` ended in order"),
    _event("serving", "info", "url", "`producer serve` or `producer dashboard` listens there"),
    _event("serving_stopped", "info", "", "it ended in order"),
    _event(
        "batch_deleted", "info", "batch jobs files", "`producer delete`: so many kept jobs and published files are gone"
    ),
    _event(
        "row_gives_way",
        "info",
        "batch index",
        "memory has no room for it and a request: it goes back to its queue, uncharged",
    ),
    _event(
        "request_withdrawn",
        "info",
        "batch rows",
        "nobody waits for this request any more; its rows have left the engine",
    ),
    _event("child_started", "info", "child device", "the command for several devices started one of its processes"),
)

TROUBLE = (
    _event(
        "process_failed",
        "critical",
        "reason",
        "a worker's process ends: with what the user can put right (`reason`), or with an error that nothing caught",
        "as the reason says; else read the exception; its prompts run again",
    ),
    _event(
        "child_died",
        "error",
        "child device code after_s",
        "a worker process of several devices ended; it is started again",
        "its own log says why; a negative code is a signal (-9: killed, often for memory)",
    ),
    _event(
        "child_given_up",
        "critical",
        "child device failed_starts",
        "a worker process cannot be started or kept alive: all of them are stopped",
        "its own log says why",
    ),
    _event(
        "process_restarted", "warning", "in_a_row begins_in_s", "the worker begins anew after a device error or hang"
    ),
    _event(
        "given_up",
        "critical",
        "reason",
        "the worker ends: it began anew too often in a row without finishing a prompt",
        "`worker check`; look at the device",
    ),
    _event(
        "device_error",
        "error",
        "in_a_row",
        "an error left the process without its device; it begins anew",
        "if it comes back, look at the device (`nvidia-smi -q`, the kernel's log)",
    ),
    _event(
        "step_timeout",
        "critical",
        "reason step rows stacks",
        "a step did not end within `step_timeout_s`; the worker begins anew",
        "`stacks` tells where every thread was",
    ),
    _event(
        "step_failed",
        "error",
        "rows",
        "a denoise step raised; its rows run again in halves until the culprit is alone",
        "read the exception",
    ),
    _event(
        "out_of_memory",
        "warning",
        "max_rows before",
        "memory ran out in a step: fewer rows run together from now on",
        "set `max_rows` lower, or give the worker more memory",
    ),
    _event(
        "disk_full",
        "error",
        "reason",
        "outputs cannot be written; no more prompts are taken until they can",
        "make room: nothing is lost",
    ),
    _event(
        "outputs_not_put",
        "error",
        "batch rows again_in_s reason",
        "the object store does not take these rows; they stay leased, no more prompts are taken, it is tried again",
        "see to the network and the store, as the reason says: nothing is lost",
    ),
    _event(
        "prompt_not_admitted",
        "error",
        "batch index",
        "the prompt could not be made ready for the engine, for a reason that is no fault of its own as far as we know",
        "read the traceback",
    ),
    _event(
        "answer_cache_failed", "warning", "reason", "answers cannot be kept or read: prompts are denoised", "as it says"
    ),
    _event(
        "record_unreadable",
        "error",
        "batch reason",
        "a batch's record in Redis is damaged, or of a newer version; it is left alone, others go on",
        "`producer doctor`; upgrade, or restore it from a backup",
    ),
    _event(
        "segments_not_removed", "warning", "batch reason", "rows of a published batch stay on the disk; tried again"
    ),
    _event(
        "file_being_written",
        "warning",
        "file",
        "it has been open for long; it is taken when it is closed and has stood still for `settle_s`",
    ),
    _event("refresh_failed", "warning", "reason", "how many workers live could not be asked; the last answer is used"),
    _event(
        "request_task_failed",
        "error",
        "",
        "what a request had left to be done, such as removing a file, ended by an error",
        "read the traceback",
    ),
    _event("page_failed", "error", "path", "a page of `producer dashboard` could not be made", "read the traceback"),
    _event(
        "retry_failed",
        "error",
        "batch",
        "failed rows were not queued again from the page, by an error of ours",
        "read the traceback; `producer retry BATCH`",
    ),
    _event(
        "withdrawal_failed",
        "warning",
        "request reason",
        "a request nobody waits for could not be withdrawn: it runs to its end",
    ),
    _event(
        "upload_unreadable",
        "warning",
        "file reason",
        "what tells of an uploaded file is damaged: it is not listed",
        "remove it",
    ),
    _event(
        "submitting_ended", "error", "", "the service submits batches no more", "read the traceback; start it again"
    ),
    _event("log_lines_lost", "warning", "lines", "so many log lines did not get onto the disk", "make room"),
    _event(
        "redis_away",
        "warning",
        "reason seconds rows",
        "Redis does not answer; it is tried again, and what ended meanwhile is recorded later",
        "start the server, or wait for it",
    ),
    _event("redis_loading", "info", "", "the Redis server loads its data; we wait"),
    _event(
        "redis_settings_hidden",
        "warning",
        "reason",
        "the server does not say how it is configured: whether it evicts keys cannot be checked",
        "allow CONFIG GET, or make sure that its memory policy is noeviction",
    ),
    _event(
        "upkeep_failed", "error", "queue", "unexpected error in a worker's upkeep, which goes on", "read the exception"
    ),
    _event(
        "publishing_failed",
        "error",
        "batch reason",
        "the batch cannot be published now; it is tried again at each scan",
        "make room, or correct the folder's mode, as the reason says",
    ),
    _event("sealing_taken_over", "warning", "batch", "publishing took longer than its lease; another process does it"),
    _event(
        "outputs_lost",
        "error",
        "batch rows first",
        "rows that were done are on no disk any more: they end as `worker_crashed`",
        "look at the disk; `producer retry`",
    ),
    _event("error_rows_lost", "error", "batch rows first", "the same of rows that had failed", "look at the disk"),
    _event("found_and_repaired", "warning", "kind where what done", "the audit found something and put it right"),
    _event(
        "found_for_a_person",
        "error",
        "kind where what to_do",
        "the audit found something that it must not repair",
        "as `to_do` says",
    ),
    _event(
        "repair_failed",
        "error",
        "kind where what reason",
        "the audit found something that cannot be repaired now; it is tried again",
        "as the reason says",
    ),
    _event("dead_letters_hidden", "warning", "batch reason", "failed rows cannot be read back", "as the reason says"),
    _event(
        "file_ignored",
        "warning",
        "file reason",
        "something in `batch_inputs/` is no input",
        "as the reason says, or take it away",
    ),
    _event(
        "file_not_claimed", "warning", "file reason", "a file cannot be taken; tried at each scan", "as the reason says"
    ),
    _event("scan_failed", "warning", "reason", "`batch_inputs/` cannot be looked through; tried again", "as it says"),
    _event(
        "submitting_interrupted",
        "warning",
        "batch reason",
        "the source or a segment cannot be read or written; tried at each scan",
        "as the reason says",
    ),
    _event(
        "not_submitted_to_its_end",
        "warning",
        "batch file reason",
        "`producer watch --once` ends before all was submitted",
        "run it again, or leave `producer watch` running",
    ),
    _event("source_missing", "warning", "batch file", "a claimed source is gone before it was read", "put it back"),
    _event(
        "claim_unreadable",
        "warning",
        "folder reason",
        "a claimed folder does not tell what it is for",
        "`producer doctor`",
    ),
    _event(
        "claim_left", "warning", "folder reason", "the folder of an abandoned claim holds something else", "look at it"
    ),
    _event("no_file_events", "warning", "folder reason", "only scans find new files", "as the reason says"),
    _event("audit_failed", "error", "batch reason", "a line of the audit log did not get onto the disk", "make room"),
    _event("library_message", "info", "logger message", "what a library has to say, at the level it chose"),
    _event("python_warning", "warning", "logger message", "a warning of Python's `warnings`"),
)

AUDIT = (
    _event(
        "submitted",
        "info",
        "batch via user file bytes model priority params output_format",
        "a batch was made of a file; `via` is command, watch or the name of an HTTP key",
    ),
    _event(
        "requeued",
        "info",
        "batch via user rows",
        "rows were queued again: `producer retry`, or the same submitted again",
    ),
    _event("cancelled", "info", "batch via user rows", "rows were cancelled"),
    _event(
        "published",
        "info",
        "batch model rows done failed cancelled output_tokens wall_s",
        "how the batch ended; once more after a retry, and maybe twice when a process died just then",
    ),
    _event(
        "request",
        "info",
        "request method path client caller status seconds",
        "a request of `producer serve` ended: `caller` is the key's name; what else is known of it (model, batch, "
        "tokens, the error's code) stands beside",
    ),
)

EVENTS: dict[str, Event] = {event.name: event for event in (*LIFE, *WORK, *TROUBLE)}
AUDIT_EVENTS: dict[str, Event] = {event.name: event for event in AUDIT}
IN_FILE_ONLY = frozenset({"rows_submitted", "rows_taken", "rows_finished", "worker_started", "process_failed"})
"""A terminal would show little else, or is told in other words."""

_HEAD = """\
# Logs

Made from `contract/events.py` by `python -m contract.events > docs/logs.md`; tests hold that both are equal, and that
nothing is logged that is not listed here. Names, levels and fields are stable: new ones come, old ones keep their
meaning.

Every process writes JSON lines to a file of its own under `logs/`: `worker-NAME.jsonl`, `producer-HOST.jsonl` (all
producer commands of a host). A file is rotated at `log_max_mb` or after `log_max_hours`, to
`NAME.YYYYMMDDTHHMMSSffffff.jsonl`; older ones are compressed, and go after `log_keep_days` or when all take more than
`log_keep_mb`. On a terminal the same events are shown for people, without {hidden}.

`producer logs BATCH[:INDEX]` merges all of them by time into the story of a batch or a prompt, `producer report` sums
up throughput and failures. What Python and libraries say is in there too (`library_message`, `python_warning`). Secrets
are masked (`***`): credentials in addresses, values of environment variables whose names hold KEY, TOKEN, PASSWORD or
SECRET, and whatever follows such a name or looks like a token. Prompts and outputs are logged only with `log_prompts`.

At the default level the story of each prompt is complete, and a million rows do not become a million lines: where all
goes well a prompt is a number in a range, once a second for each worker (`rows_taken`, `rows_finished`) and once for
each chunk of a file (`rows_submitted`). Only what goes wrong has lines of its own.
"""
_AUDIT = """
## The audit log

`logs/audit.jsonl`: who asked for what, and what came of it. One file for all hosts that share the folder, rotated as
the others and kept for `audit_keep_days`. The same first fields, no prompts, no outputs, no secrets. `user` is the
operating system's, of whoever ran the command or the service.
"""


def document() -> str:
    """`docs/logs.md`."""
    fields = "\n".join(f"| `{name.replace(', ', '`, `')}` | {meaning} |" for name, meaning in EVERY_LINE.items())
    hidden = ", ".join(f"`{name}`" for name in sorted(IN_FILE_ONLY))
    parts = [_HEAD.format(hidden=hidden), f"\n## Fields of every line\n\n| field | what it is |\n|---|---|\n{fields}\n"]
    for title, found in (("The life of a prompt", LIFE), ("Work", WORK), ("Trouble", TROUBLE)):
        parts.append(f"\n## {title}\n\n{_table(found)}")
    return "".join([*parts, _AUDIT, "\n", _table(AUDIT)])


def _table(found: Iterable[Event]) -> str:
    lines = ["| event | level | fields | meaning | what to do |", "|---|---|---|---|---|"]
    for event in found:
        fields = ", ".join(f"`{field}`" for field in event.fields)
        lines.append(f"| `{event.name}` | {event.level} | {fields} | {event.meaning} | {event.todo} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())

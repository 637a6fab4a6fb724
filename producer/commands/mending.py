"""`retry`, `cancel`, `rerun` and `doctor`: a batch, or all of them, takes another course."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated

import typer
import yaml

from contract import audit, cancelling, logs, sealing
from contract.errors import BadPrompt, UsageError
from contract.flags import Model, RedisUrl, Root
from contract.ledger import Batch, BatchState
from contract.sampling import SamplingParams, parse_params
from contract.settings import ProducerSettings, read
from producer import display, report
from producer.claims import Claims, checked_name
from producer.commands.options import BatchId, Codes, Debug, Ids, Json, MaybeBatch, error_codes
from producer.commands.session import LOG, Session, Stop, errors
from producer.commands.submitting import Submitted, finish, submit_claimed
from producer.doctor import examine


def retry(
    batch: MaybeBatch = None,
    all_: Annotated[bool, typer.Option("--all", help="Failed rows of all batches")] = False,
    code: Codes = None,
    id_: Ids = None,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Queue failed rows again, of a batch or of all. Rows that could not be read from the file stay failed.

    Example: producer retry questions-1a2b3c4d --code out_of_memory
    """
    with errors(debug):
        if (batch is None) != all_:
            raise UsageError("give BATCH or --all, and not both")
        if all_ and id_:
            raise UsageError("--id goes with BATCH: ids are a batch's own")
        codes = error_codes(code)
        session = Session.open({"root": root, "redis_url": redis_url})
        chosen = [report.find(batch, session.ledger).spec.batch] if batch else _with_failures(session)
        queued, refused = {}, []
        for one in chosen:
            try:
                queued[one] = sealing.retry(one, codes, session.ledger, session.folders, session.ledger.redis, id_)
                audit.requeued(one, queued[one])
            except UsageError as error:
                if batch:
                    raise
                refused.append(one)
                display.say(f"{one}: {error}")
        count = sum(queued.values())
        if as_json:
            batches = [{"batch": one, "queued": rows} for one, rows in queued.items() if rows or batch]
            display.answer(json.dumps({"queued": count, "batches": batches, "refused": refused}, indent=2))
        else:
            display.answer(f"{_rows(count)} queued again")
        if refused:
            raise typer.Exit(1)


def cancel(
    batch: BatchId,
    id_: Ids = None,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """End a batch's rows that wait or run, or only those with --id; what is done is published.

    Example: producer cancel questions-1a2b3c4d
    """
    with errors(debug):
        session = Session.open({"root": root, "redis_url": redis_url})
        before = report.find(batch, session.ledger)
        if id_:
            ended = cancelling.cancel_rows(batch, id_, session.ledger, session.folders)
        else:
            ended = cancelling.cancel(batch, session.ledger, session.folders)
        audit.cancelled(batch, ended.rows)
        after = report.batch_reports([report.find(batch, session.ledger)], session.ledger, session.folders)[0]
        if as_json:
            document = {"batch": batch, "cancelled": ended.rows, "unknown": ended.unknown}
            display.answer(json.dumps({**document, "status": after.model_dump(mode="json")}, indent=2))
        else:
            display.answer(_told(before, after, ended))
        for one in ended.unknown:
            display.say(f"no row with the id '{one}' waits or runs: it ended, or was not read yet, or never was")
        if ended.unknown:
            raise typer.Exit(1)


def rerun(
    batch: BatchId,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="NAME=VALUE", help="A sampling parameter; may be repeated")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the output files, if not that of BATCH")] = None,
    model: Model = None,
    wait_: Annotated[bool, typer.Option("--wait", help="Wait until the outputs are published")] = False,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Run a batch's source again as a new batch, with other parameters or another model; the old one stays.

    Example: producer rerun questions-1a2b3c4d --param temperature=0.7 --param seed=2
    """
    with errors(debug), Stop() as stop:
        if name is not None:
            checked_name(name)
        session = Session.open({"root": root, "redis_url": redis_url, "model": model})
        found = report.find(batch, session.ledger)
        session.settings = session.settings.model_copy(update={"model": model or found.spec.model})
        changes = {"params": _changed(found.spec.params, param or []), "model": session.settings.queue_model}
        file = report.source(found, session.folders)
        claims = Claims(session.settings, session.ledger)
        spec = claims.again(file, found.spec.model_copy(update=changes), name)
        if not as_json:
            display.answer(spec.batch)
        complete = submit_claimed(spec, session, stop)
        finish([Submitted(spec, file, complete)], wait_, as_json, session, stop)


def _changed(params: SamplingParams, given: list[str]) -> SamplingParams:
    values = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--param takes NAME=VALUE, such as --param temperature=0.7, not '{word}'")
        values[name] = yaml.safe_load(value) if value else ""
    try:
        return parse_params(values, params)
    except BadPrompt as error:
        raise UsageError(f"--param: {error}") from None


def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Repair what can be repaired")] = False,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Say, a line each, what is wrong with queues, folders, server and machine; exits 1 if anything is left so.

    Example: producer doctor --fix
    """
    with errors(debug):
        settings = read(ProducerSettings, {"root": root, "redis_url": redis_url})
        with contextlib.suppress(OSError):  # a folder that cannot be written is a finding
            logs.set_up(settings, LOG.format(logs.host()), quiet=True)
        found = []
        for one in examine(settings, fix):
            found.append(one)
            if not as_json:
                display.diagnosis(one)
        healthy = all(one.done is not None or one.note for one in found)
        if as_json:
            findings = [one.model_dump(mode="json") for one in found]
            display.answer(json.dumps({"healthy": healthy, "findings": findings}, indent=2))
        elif all(one.note for one in found):
            display.answer("all is well")
        if not healthy:
            raise typer.Exit(1)


def _with_failures(session: Session) -> list[str]:
    return [batch.spec.batch for batch in session.ledger.newest_first() if batch.counts.failed]


def _told(before: Batch, after: report.BatchReport, ended: cancelling.Cancelled) -> str:
    if before.state is BatchState.DONE:
        how = "cancelled" if before.cancelled_at is not None else "published"
        return f"nothing to cancel: the batch was {how} already"
    counts = f"{after.done} done, {after.failed} failed, {after.cancelled} cancelled"
    unread = ", and no more of the file is read" if after.unread and before.cancelled_at is None else ""
    return f"{_rows(ended.rows)} cancelled{unread}; the batch stands at {counts}"


def _rows(count: int) -> str:
    return f"{count} {'row' if count == 1 else 'rows'}"

"""Large and many files parsed, submitted and published: rows per second and peak memory, beside baselines.

    python benchmarks/intake.py [--rows 1000000] [--baseline-rows 50000] [--files 10000]

- parse: the file through the parser alone, against reading all of it into a list with `json.loads`.
- submit: the file from the disk into Redis, claim included, against RQ's `enqueue_many` on rows that are in memory.
- publish: the batch sealed from the segments of two workers, which hold its rows in no order, against sorting their
  lines in memory.
- watching: files of one prompt each that lie in the inbox when `producer watch` starts, until all are submitted.

Every measurement is a process of its own, and its peak memory is that process's; Redis is another one and holds every
row, for no worker takes any. Exits 1 if any of these took more than PEAK_MB.
"""

# ruff: noqa: E402, T201
from __future__ import annotations

import os.path
import sys

# Run as a script, this folder comes first on the path, and `queue.py` would hide the standard library's `queue`.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from rq import Queue
from rq.serializers import JSONSerializer

from contract import logs, sealing, server
from contract.jobs import Completion, Usage
from contract.ledger import BatchState, Cursor, Ledger, Mark
from contract.parser import parse
from contract.segments import SegmentWriter
from contract.settings import ProducerSettings
from producer.claims import Claims, columns, planned
from producer.submitter import submit
from producer.watcher import Watcher

PEAK_MB = 200
CHUNK = 500
QUESTION = "Why does the number {0} follow the number before it, and what would change if it did not? Be brief."


def settings(root: Path) -> ProducerSettings:
    return ProducerSettings(root=root, max_queued=10_000_000, max_queued_mb=100_000)


def parsing(root: Path, file: Path, rows: int) -> int:
    spec = planned(file, settings(root), columns(settings(root)))
    with file.open("rb", buffering=1 << 20) as stream:
        return sum(1 for _ in parse(stream, spec, Cursor(), 16 << 20))


def loading(root: Path, file: Path, rows: int) -> int:
    with file.open("rb") as stream:
        return len([json.loads(line) for line, _ in zip(stream, range(rows), strict=False)])


def submitting(root: Path, file: Path, rows: int) -> int:
    own = settings(root)
    own.folders.create()
    logs.set_up(own.model_copy(update={"log_level": "error"}), "benchmark", quiet=True)
    ledger = Ledger(server.open_redis(own))
    spec = Claims(own, ledger).snapshot(file)
    assert submit(spec, ledger, own)
    return ledger.cursor(spec.batch).index


def enqueuing(root: Path, file: Path, rows: int) -> int:
    queue = Queue("baseline", connection=server.open_redis(settings(root)), serializer=JSONSerializer)
    with file.open("rb") as stream:
        loaded = [json.loads(line) for line, _ in zip(stream, range(rows), strict=False)]
    for start in range(0, len(loaded), CHUNK):
        chunk = loaded[start : start + CHUNK]
        queue.enqueue_many([Queue.prepare_data("worker.tasks.denoise", (row,), job_id=row["id"]) for row in chunk])
    return len(loaded)


def watching(root: Path, file: Path, files: int) -> int:
    own = ProducerSettings(root=root, settle_s=0)
    own.folders.create()
    logs.set_up(own.model_copy(update={"log_level": "error"}), "benchmark", quiet=True)
    ledger = Ledger(server.open_redis(own))
    asked = [0.0]

    def all_submitted() -> bool:
        if time.monotonic() - asked[0] < 0.5:
            return False
        asked[0] = time.monotonic()
        return sum(state is BatchState.RUNNING for _, state, _ in ledger.glance()) >= files

    Watcher(own, ledger, all_submitted).run()
    return len(ledger.glance())


def answering(root: Path, file: Path, rows: int) -> int:
    """What two workers leave behind that have answered all rows, each taking some from anywhere."""
    ledger, folders = Ledger(server.open_redis(settings(root))), settings(root).folders
    (batch,) = ledger.open_batches()
    order = list(range(rows))
    random.Random(0).shuffle(order)
    writers = [SegmentWriter(folders, batch, name) for name in ("a", "b")]
    for start in range(0, rows, CHUNK):
        writers[start // CHUNK % 2].append([answer(index) for index in order[start : start + CHUNK]])
    for writer in writers:
        writer.close()
    ledger.redis.set(ledger.key(batch, Mark.DONE), b"\xff" * (rows // 8) + _ones(rows % 8))
    return rows


def _ones(bits: int) -> bytes:
    return bytes([0xFF << (8 - bits) & 0xFF]) if bits else b""


def answer(index: int) -> Completion:
    return Completion(
        index=index,
        id=f"row-{index}",
        prompt=QUESTION.format(index),
        output="Because one is added to it each time, and otherwise there would be no next number. " * 3,
        finish_reason="stop",
        usage=Usage(prompt_tokens=31, completion_tokens=57),
        model="demo",
        params={"max_new_tokens": 128, "seed": index},
        timing={"queued_s": 1.5, "denoise_s": 0.5},
        denoise={"steps": 20, "forwards": 24, "tokens_per_forward": 2.4},
        worker="a",
    )


def publishing(root: Path, file: Path, rows: int) -> int:
    ledger, folders = Ledger(server.open_redis(settings(root))), settings(root).folders
    logs.set_up(settings(root).model_copy(update={"log_level": "error"}), "benchmark", quiet=True)
    (batch,) = ledger.open_batches()
    assert sealing.seal(batch, ledger, folders)
    with (folders.outputs / "rows.jsonl").open("rb") as stream:
        return sum(1 for _ in stream)


def sorting(root: Path, file: Path, rows: int) -> int:
    (folder,) = settings(root).folders.segments.iterdir()
    lines = [line for part in sorted(folder.glob("*.jsonl")) for line in part.open("rb")]
    lines.sort(key=lambda line: int(json.loads(line)["index"]))
    with (root / "sorted.jsonl").open("wb") as stream:
        stream.writelines(lines)
    return len(lines)


Work = Callable[[Path, Path, int], int]


def measured(work: Work, root: Path, file: Path, rows: int) -> tuple[float, float]:
    """Rows, or files, per second and peak megabytes of `work` in a fresh process."""
    receive, send = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_measure, args=(send, work, root, file, rows))
    process.start()
    send.close()
    count, seconds, peak = receive.recv()
    process.join()
    assert count == rows, f"{work.__name__}: {count} of {rows} rows"
    print(f"{work.__name__:<12} {rows:>10,} rows {rows / seconds:>10,.0f} rows/s   peak {peak:>7,.0f} MB", flush=True)
    return rows / seconds, peak


def _measure(send: Connection, work: Work, root: Path, file: Path, rows: int) -> None:
    started = time.perf_counter()
    count = work(root, file, rows)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    send.send((count, seconds, peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)))


def write(file: Path, rows: int) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for number in range(rows):
            row = {"id": f"row-{number}", "prompt": QUESTION.format(number), "topic": number % 7, "seed": number}
            stream.write(json.dumps(row) + "\n")


def drop(root: Path, files: int) -> None:
    inputs = settings(root).folders.create().inputs
    for number in range(files):
        (inputs / f"question-{number}.txt").write_text(QUESTION.format(number), encoding="utf-8")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--files", type=int, default=10_000)
    arguments.add_argument("--baseline-rows", type=int, default=50_000, help="of RQ's own enqueuing, which is slow")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, inbox, file = Path(folder) / "root", Path(folder) / "many", Path(folder) / "rows.jsonl"
        write(file, chosen.rows)
        drop(inbox, chosen.files)
        print(f"{file.stat().st_size / 1e6:,.0f} MB of JSONL", flush=True)
        few = min(chosen.rows, chosen.baseline_rows)
        try:
            loaded, _ = measured(loading, root, file, chosen.rows)
            parsed, parse_peak = measured(parsing, root, file, chosen.rows)
            queued, _ = measured(enqueuing, root, file, few)
            submitted, submit_peak = measured(submitting, root, file, chosen.rows)
            _, watch_peak = measured(watching, inbox, file, chosen.files)
            measured(answering, root, file, chosen.rows)
            ordered, _ = measured(sorting, root, file, chosen.rows)
            published, publish_peak = measured(publishing, root, file, chosen.rows)
        finally:
            for one in (root, inbox):
                server.stop(settings(one))
    print(f"parsed at {parsed / loaded:.2f} of json.loads into a list, submitted at {submitted / queued:.2f} of RQ")
    print(f"published at {published / ordered:.2f} of sorting in memory")
    peak = max(parse_peak, submit_peak, publish_peak, watch_peak)
    flat = peak <= PEAK_MB
    print(f"peak {peak:,.0f} MB: {'under' if flat else 'OVER'} {PEAK_MB} MB")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())

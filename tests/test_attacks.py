"""Files, records and checkpoints made to do harm: what they can and cannot do, as docs/operations.md says."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import os
import pickle
import pty
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import ValidationError
from redis import Redis
from rq.job import Job
from rq.registry import FailedJobRegistry

from contract import claimed, logs, paths, queues, rows, sealing, tables
from contract.auditing import ORPHAN_IDLE_S, Auditor
from contract.errors import BadPrompt, DllmError, ModelLoadError, UsageError
from contract.jobs import ErrorCode, ErrorRow, PromptJob
from contract.ledger import BatchSpec, Cursor, Ledger, Mark
from contract.lines import lines, unpacked
from contract.parser import Parsed
from contract.paths import Folders
from contract.sampling import SamplingParams, parse_params
from contract.segments import SegmentWriter
from contract.settings import ProducerSettings, Settings, WorkerSettings
from producer import kinds
from producer.claims import Claims, Look, checked_name, output_stem
from producer.cli import app
from producer.inbox import Inbox
from producer.submitter import submit as submit_claimed
from tests import checkpoints
from tests.conftest import batch_spec, failure_row
from tests.producer.conftest import notices as notices  # a fixture
from tests.producer.conftest import run as run  # a fixture
from worker.engine import load
from worker.intake import Intake
from worker.loop import Loop
from worker.model import Model, open_model
from worker.outputs import Outputs
from worker.tokenizing import Tokenizer

OBEYED = "\x1b]0;owned\x07\x1b[31mred\x9b31m\u202e[bold]"
"""Names the window and colours the text of a terminal, in seven bits and in eight; turns text around; Rich's markup."""
SECRET = '{"prompt": "the secret"}\n'
Producer = Callable[..., ProducerSettings]
Rows = Callable[..., list[PromptJob | ErrorRow]]


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that the producer can read, and whoever fills its inbox cannot."""
    file = tmp_path_factory.mktemp("elsewhere") / "secret.jsonl"
    file.write_text(SECRET)
    return file


def put(folder: Path, name: str, content: str = '{"prompt": "one"}\n') -> Path:
    file = folder / name
    file.write_text(content)
    return file


# Names


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", ".hidden", "a/b", "a\x00b", "a\nb", OBEYED, "", "x" * 300])
def test_a_name_for_outputs_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a file name here"):
        checked_name(name)


@pytest.mark.parametrize("stem", ["..", "...", "-rf", "a\nb", OBEYED, "x" * 250, "*", "$(id)", "CON", "\u202egnp"])
def test_a_file_whatever_it_is_called_becomes_one_batch_and_one_file_of_outputs(
    folders: Folders, ledger: Ledger, producer_settings: Producer, stem: str
) -> None:
    file = put(folders.inputs, f"{stem[: 255 - len('.txt')]}.txt", "one\n")
    spec = Claims(producer_settings(), ledger).take(file, Look.at(file))
    assert spec is not None
    target = folders.outputs / f"{spec.output}.jsonl"
    assert (target.parent, target.name) == (folders.outputs, f"{output_stem(spec.output)}.jsonl")
    assert not set(spec.output) & set("\x00\n\x1b\x07\x7f\x9b\u202e")
    assert claimed.source(spec, folders).read_text() == "one\n"


@pytest.mark.parametrize(
    "values",
    [
        {"source": "../../../secret.jsonl"},
        {"source": "/etc/passwd"},
        {"source": ".."},
        {"output": "../x"},
        {"output": "/tmp/x"},
        {"output": "a/../../x"},
        {"output": ".claimed/x"},
        {"output": ""},
        {"batch": "../x"},
        {"batch": "a:b"},
        {"batch": ""},
    ],
    ids=str,
)
def test_a_record_of_a_batch_cannot_name_a_path(values: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        batch_spec(**values)


def test_a_forged_claim_reads_nothing_and_is_told_of(
    folders: Folders, ledger: Ledger, producer_settings: Producer, secret: Path, notices: list[dict[str, Any]]
) -> None:
    """Somebody with access to the inbox puts `.claimed/` folders of his own there."""
    folder = folders.claimed / "b"
    folder.mkdir()
    manifest = batch_spec(batch="b").model_dump(mode="json") | {"source": os.path.relpath(secret, folder)}
    (folder / "batch.json").write_text(json.dumps(manifest))
    os.utime(folder, (1, 1))
    os.utime(folder / "batch.json", (1, 1))
    claims = Claims(producer_settings(), ledger)
    assert claims.pending() == []
    assert ledger.open_batches() == []
    assert notices[-1]["event"] == "claim_unreadable"
    assert [found.kind for found in Auditor(ledger, folders).look()] == ["unreadable_claim"]


def test_ids_and_models_of_rows_are_words_and_no_paths(parsed: Callable[..., list[Parsed]]) -> None:
    evil = '{"id": "../../etc/passwd", "prompt": "a"}\n{"prompt": "a", "model": "../../etc/passwd"}\n'
    first, second = (found.row for found in parsed(evil))
    assert isinstance(first, PromptJob)
    assert (first.id, first.job_id) == ("../../etc/passwd", "b-0")
    assert isinstance(second, ErrorRow)
    assert second.error.code == ErrorCode.UNKNOWN_MODEL


def test_a_worker_is_called_nothing_that_is_a_path(
    redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]
) -> None:
    assert "/" not in Intake(redis, ledger, worker_settings(name="../../x")).name


def test_a_name_as_long_as_names_can_be_is_put_away_twice(tmp_path: Path) -> None:
    name = "ü" * 124 + ".jsonl"  # 254 bytes
    for number in range(3):
        put(tmp_path, name, str(number))
        paths.move(tmp_path / name, tmp_path / "processed")
    found = sorted(file.read_text() for file in (tmp_path / "processed").iterdir())
    assert found == ["0", "1", "2"]


# Links


class Swapping(Claims):
    """A producer that is interrupted in the worst of moments: between looking at a file and taking it."""

    def __init__(self, settings: ProducerSettings, ledger: Ledger, swap: Callable[[], object]) -> None:
        super().__init__(settings, ledger)
        self._swap = swap

    def _copy_params(self, beside: Path, spec: BatchSpec) -> None:
        self._swap()


def test_a_link_that_takes_a_files_place_is_given_back_unread(
    folders: Folders, ledger: Ledger, producer_settings: Producer, secret: Path, notices: list[dict[str, Any]]
) -> None:
    file = put(folders.inputs, "in.jsonl")
    look = Look.at(file)

    def swap() -> None:
        file.unlink()
        file.symlink_to(secret)

    assert Swapping(producer_settings(), ledger, swap).take(file, look) is None
    assert file.is_symlink()
    assert list(folders.claimed.iterdir()) == []
    assert ledger.open_batches() == []
    assert Inbox(folders.inputs, 0.0).look() == []
    assert notices[-1]["event"] == "file_ignored"
    assert "a link" in notices[-1]["reason"]


def test_a_file_that_was_written_on_when_it_was_taken_is_given_back(
    folders: Folders, ledger: Ledger, producer_settings: Producer
) -> None:
    file = put(folders.inputs, "in.jsonl")
    look = Look.at(file)
    claims = Swapping(producer_settings(), ledger, lambda: put(folders.inputs, "in.jsonl", SECRET * 2))
    assert claims.take(file, look) is None
    assert file.read_text() == SECRET * 2


def test_a_link_in_a_claimed_files_place_is_not_followed(
    folders: Folders, ledger: Ledger, producer_settings: Producer, secret: Path
) -> None:
    file = put(folders.inputs, "in.jsonl")
    settings = producer_settings()
    spec = Claims(settings, ledger).take(file, Look.at(file))
    assert spec is not None
    place = claimed.source(spec, folders)
    place.unlink()
    place.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        submit_claimed(spec, ledger, settings)
    assert ledger.cursor(spec.batch) == Cursor()


def test_parameters_beside_a_file_are_no_link(
    folders: Folders, ledger: Ledger, producer_settings: Producer, secret: Path
) -> None:
    """They would be copied to `batch_processed/`, and shown in what is wrong with them."""
    file = put(folders.inputs, "in.jsonl")
    (folders.inputs / "in.params.yaml").symlink_to(secret)
    with pytest.raises(UsageError, match="a link, or no file") as refused:
        Claims(producer_settings(), ledger).take(file, Look.at(file))
    assert "secret" not in str(refused.value).replace(str(secret), "")
    assert file.exists()


def test_files_are_for_those_whom_the_umask_leaves(
    folders: Folders, ledger: Ledger, producer_settings: Producer, completion: Callable[..., Any]
) -> None:
    before = os.umask(0o027)
    try:
        file = put(folders.inputs, "in.txt", "one\n")
        settings = producer_settings(output_format="csv")
        spec = Claims(settings, ledger).take(file, Look.at(file))
        assert spec is not None
        assert submit_claimed(spec, ledger, settings)
        with Outputs(folders, ledger, "w") as outputs, ledger.redis.pipeline() as pipe:
            outputs.write([(spec.batch, completion(0))])
            ledger.mark(pipe, spec.batch, 0, Mark.DONE)
            pipe.execute()
        assert sealing.seal(spec.batch, ledger, folders)
        written = [path for path in folders.root.rglob("*") if path.is_file()]
        assert len(written) >= 6
        assert {path.name: path.stat().st_mode & 0o007 for path in written} == {path.name: 0 for path in written}
    finally:
        os.umask(before)


# Bombs


def test_a_line_without_end_in_a_small_gz_is_one_error_in_little_memory() -> None:
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packed.compress(b"x" * (1 << 20)) for _ in range(128)) + packed.flush()
    assert len(bomb) < 1 << 18
    tracemalloc.start()
    try:
        (line,) = lines(unpacked(io.BytesIO(bomb)), Cursor(), 1 << 16, lambda: None)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert line.error is not None
    assert "longer than 65,536 bytes" in str(line.error)


class Cancelled(Exception):
    """What a producer's `tick` raises when its batch is cancelled or the process is told to stop."""


@pytest.mark.parametrize("content", [b"\n", b'{"prompt": "x"}\n', b"x"])
def test_a_gz_of_endless_content_can_be_left_at_any_time(content: bytes) -> None:
    bomb = gzip.compress(content * ((64 << 20) // len(content)), compresslevel=1)
    ticks = iter(range(20))

    def tick() -> None:
        if next(ticks, None) is None:
            raise Cancelled

    with pytest.raises(Cancelled):
        for _ in lines(unpacked(io.BytesIO(bomb)), Cursor(), 1 << 16, tick):
            pass


def test_a_value_that_a_parquet_says_a_thousand_times_is_read_a_few_times_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "PARQUET_BYTES", 16 << 20)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    value, count = "x" * (1 << 20), 2000
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([value]))
    bomb = io.BytesIO()
    parquet.write_table(pyarrow.table({"prompt": column}), bomb, compression="zstd", store_schema=False)
    assert len(bomb.getvalue()) < 1000
    before = pyarrow.total_allocated_bytes()
    found = tables.records(io.BytesIO(bomb.getvalue()), batch_spec(kind="parquet"), 1 << 16, lambda: None)
    for _ in range(3):
        record = next(found)
        assert "longer than" in str(record.error)
        assert pyarrow.total_allocated_bytes() - before < 64 << 20


def test_a_row_of_a_parquet_that_is_endless_is_refused() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    bomb = io.BytesIO()
    table = pyarrow.table({"prompt": pyarrow.array([[None] * (tables.MOST_VALUES + 1)], pyarrow.list_(pyarrow.int8()))})
    parquet.write_table(table, bomb)
    (record,) = tables.records(bomb, batch_spec(kind="parquet"), 1 << 16, lambda: None)
    assert "its rows hold more than 1,000,000 values each" in str(record.error)


def test_archives_are_not_opened(folders: Folders, parsed: Callable[..., list[Parsed]]) -> None:
    put(folders.inputs, "prompts.zip")
    assert Inbox(folders.inputs, 0.0).look() == []
    (row,) = (found.row for found in parsed(b"PK\x03\x04\x14\x00\x08\x00zip by another name"))
    assert isinstance(row, ErrorRow)
    assert row.error.code == ErrorCode.BAD_ENCODING


YAML_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}, *{before}, *{before}, *{before}, *{before}, *{before}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (YAML_BOMB, "references"),
        ("a: &a {x: 1}\nb:\n  <<: [*a, *a]\n", "references"),
        ("[" * 60_000, "not readable as YAML"),
        ("temperature: 2026-99-99", "not readable as YAML"),
        ("seed: " + "9" * 5000, "not readable as YAML"),
        ("!!python/object/apply:os.system [id]", "not readable as YAML"),
        ("x" * (1 << 17), "may have 65,536 bytes"),
    ],
    ids=["references", "merged", "deep", "no date", "digits", "python", "long"],
)
def test_parameters_beside_a_file_that_are_made_to_do_harm_are_refused(tmp_path: Path, text: str, why: str) -> None:
    put(tmp_path, "in.params.yaml", text)
    with pytest.raises(UsageError, match=why):
        kinds.own_params(put(tmp_path, "in.jsonl"), SamplingParams())


# Rows


DEEP = "[" * 100_000 + "]" * 100_000
HARMFUL: dict[str, tuple[str, ErrorCode]] = {
    "deep": (f'{{"prompt": "x", "note": {DEEP}}}', ErrorCode.BAD_JSON),
    "deep enough to be read": ('{"prompt": "x", "note": ' + "[" * 500 + "]" * 500 + "}", ErrorCode.BAD_ROW),
    "deep prompt": (f'{{"prompt": {DEEP}}}', ErrorCode.BAD_JSON),
    "a number of 5,000 digits": ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", ErrorCode.BAD_JSON),
    "a number beyond all": ('{"prompt": "x", "temperature": 1e999}', ErrorCode.BAD_PARAMS),
    "more than the engine counts": ('{"prompt": "x", "top_k": 9223372036854775808}', ErrorCode.BAD_PARAMS),
    "NaN": ('{"prompt": "x", "threshold": NaN}', ErrorCode.BAD_PARAMS),
    "minus infinity": ('{"prompt": "x", "factor": -Infinity}', ErrorCode.BAD_PARAMS),
    "a key twice": ('{"prompt": "harmless", "prompt": "x"}', ErrorCode.BAD_JSON),
    "a key twice further in": ('{"prompt": "x", "params": {"seed": 1, "seed": 2}}', ErrorCode.BAD_JSON),
    "half a character": ('{"prompt": "\\ud800"}', ErrorCode.BAD_ENCODING),
    "half a character as key": ('{"prompt": "x", "\\udfff": 1}', ErrorCode.BAD_ENCODING),
    "half a character as id": ('{"prompt": "x", "id": "\\ud800"}', ErrorCode.BAD_ENCODING),
    "a zero byte": ('{"prompt": "a\x00b"}', ErrorCode.BAD_ENCODING),
    "a mark amid the file": ('\ufeff{"prompt": "x"}', ErrorCode.BAD_JSON),
    "endless keys": (json.dumps({"prompt": "x"} | {f"k{n}": n for n in range(200_000)}), ErrorCode.BAD_ROW),
}


@pytest.mark.parametrize("what", HARMFUL)
def test_a_row_that_is_made_to_do_harm_is_one_error_row(rows: Rows, what: str) -> None:
    line, code = HARMFUL[what]
    good = '{"prompt": "good"}\n'
    found = rows(f"{good}{line}\n{good}", limit=8 << 20)
    assert [row.error.code if isinstance(row, ErrorRow) else row.prompt for row in found] == ["good", code, "good"]
    assert len(str(found[1].model_dump()["error"])) < 1000


def test_what_json_cannot_say_is_nothing_in_an_output_row(rows: Rows, completion: Callable[..., Any]) -> None:
    (job,) = rows('{"prompt": "a\\u0000b", "id": "\\u0000", "score": NaN, "best": [Infinity]}')
    assert isinstance(job, PromptJob)
    assert job.prompt == "a\x00b"  # written as an escape, it is text
    written = completion(0, id=job.id, prompt=job.prompt, metadata=job.metadata).model_dump_json()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(written, parse_constant=refuse)["metadata"] == {"score": None, "best": [None]}


def test_the_names_that_were_compared_are_forgotten_again() -> None:
    assert rows._mistyped.cache_info().maxsize == rows.REMEMBERED


def test_a_table_of_endless_columns_is_refused(rows: Rows) -> None:
    header = ",".join(f"c{number}" for number in range(100_000))
    (row,) = rows(f"prompt,{header}\n", kind="csv", source="in.csv", limit=8 << 20)
    assert isinstance(row, ErrorRow)
    assert row.error.code == ErrorCode.BAD_FILE


def test_the_cells_of_a_csv_are_as_they_were_written(
    submit: Callable[..., str], ledger: Ledger, folders: Folders, completion: Callable[..., Any]
) -> None:
    """Not defused for spreadsheets: programs read it, and answers do begin with a dash (docs/decisions/0020)."""
    batch = submit(1, output_format="csv")
    formula = '=HYPERLINK("http://x","y")'
    with SegmentWriter(folders, batch, "w") as segment, ledger.redis.pipeline() as pipe:
        segment.append([completion(0, output=formula)])
        ledger.mark(pipe, batch, 0, Mark.DONE)
        pipe.execute()
    assert sealing.seal(batch, ledger, folders)
    assert '"=HYPERLINK(""http://x"",""y"")"' in (folders.outputs / f"{batch}.csv").read_text()


# Terminals


@pytest.fixture
def hostile_batch(submit: Callable[..., str], ledger: Ledger, folders: Folders, completion: Callable[..., Any]) -> str:
    """A batch whose every text is made for terminals."""
    batch = submit(2, source=f"{OBEYED}.jsonl", model=OBEYED)
    with SegmentWriter(folders, batch, "w") as segment, ledger.redis.pipeline() as pipe:
        segment.append([completion(0, output=OBEYED, prompt=OBEYED, id=OBEYED)])
        segment.append([failure_row(1, OBEYED, prompt=OBEYED, id=OBEYED)])
        ledger.mark(pipe, batch, 0, Mark.DONE)
        ledger.mark(pipe, batch, 1, Mark.FAILED)
        pipe.execute()
    return batch


def on_a_terminal(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command writes to stdout when that is a terminal."""
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stdout, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        patched.setenv("COLUMNS", "400")
        assert app(words, standalone_mode=False) in (None, 0)
    found = bytearray()
    with contextlib.suppress(OSError):  # which is how a terminal ends whose other end is closed
        while piece := os.read(screen, 1 << 16):
            found += piece
    os.close(screen)
    return found.decode()


@pytest.mark.parametrize("words", ["status", "status --json", "status B", "failed B", "failed B --json", "results B"])
def test_nothing_that_others_wrote_is_obeyed_by_a_terminal(
    hostile_batch: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    shown = on_a_terminal(words.replace("B", hostile_batch).split(), monkeypatch)
    for harmful in ("\x1b]0", "\x1b[31m", "\x9b", "\x07", "\u202e"):
        assert harmful not in shown
    assert r"\u001b]0;owned" in shown.replace("\r\n", "")
    if not words.startswith("status"):
        assert "[bold]" in shown.replace("\r\n", "")  # cut elsewhere; never markup
    if words.endswith("--json"):
        json.loads(shown)


def test_errors_are_one_line_that_a_terminal_obeys_nothing_of(run: Callable[..., Any], tmp_path: Path) -> None:
    found = run("submit", tmp_path / f"{OBEYED}\n.jsonl")
    assert found.exit_code == 2
    assert found.stderr.count("\n") == 1
    assert not set(found.stderr) & set("\x1b\x07\x9b\u202e")


@pytest.fixture
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in before:
            handler.close()
    root.handlers, root.level = before, level
    structlog.reset_defaults()


@pytest.mark.usefixtures("_logging_as_it_was")
def test_logs_spell_out_what_a_terminal_obeys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(Settings(root=tmp_path), "producer")
    try:
        raise DllmError(OBEYED)
    except DllmError:
        logs.get().exception(OBEYED, file=OBEYED)
    logging.getLogger("library").warning(OBEYED)
    for written in (capsys.readouterr().err, (tmp_path / "logs" / "producer.jsonl").read_text()):
        assert written.count("owned") >= 4
        assert not set(written) & set("\x1b\x07\x9b")
    events = [json.loads(line) for line in (tmp_path / "logs" / "producer.jsonl").read_text().splitlines()]
    assert [event.get("message", event["event"]) for event in events] == [OBEYED, OBEYED]  # nothing is lost


# Redis


@pytest.fixture
def quiet(redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]) -> Intake:
    """An intake that only does what it is told."""
    return Intake(redis, ledger, worker_settings(name="quiet", lease_s=30.0))


class Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


def call(*arguments: Any) -> bytes:
    return zlib.compress(json.dumps([queues.TASK, None, list(arguments), {}]).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"data": "pickle"},
        {"data": b"\xff" * 100},
        {"data": zlib.compress(b"[" * 100_000)},
        {"data": call()},
        {"data": call(7)},
        {"data": call({"batch": "b", "index": 0})},
        {"data": call({"batch": "../../x", "index": 0, "line": 1, "id": "x", "prompt": "x", "submitted_at": 0})},
        {"data": call({"batch": "b", "index": 0, "line": 1, "id": "x", "prompt": 7, "submitted_at": "never"})},
        {"data": call({"schema_version": 99})},
        {"data": "bomb"},
        {"exc_info": "bomb"},
        {"meta": b'{"attempts": []}'},
        {"created_at": b"\xff\xfe"},
        {"timeout": b"forever"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_job_that_is_none_is_an_error_row_and_its_neighbour_runs(
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    quiet: Intake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
) -> None:
    monkeypatch.setattr(queues, "LARGEST_JOB", 1 << 20)
    marker = tmp_path / "unpickled"
    made = {"pickle": zlib.compress(pickle.dumps(Trap(marker))), "bomb": zlib.compress(b"x" * (1 << 24))}
    submit(2)
    for field, value in fields.items():
        redis.hset(Job.key_for("b-0"), field, made.get(value, value) if isinstance(value, str) else value)
    assert [row.index for row in quiet.take(8)] == [1]
    (rejected,) = quiet.rejected()
    assert rejected.error.code == ErrorCode.BAD_ROW
    assert len(str(rejected.error)) < 1000
    assert rejected.error_row("w").index == 0
    assert quiet.fail(rejected)
    assert ledger.marks([("b", 0), ("b", 1)]) == [Mark.FAILED, None]
    assert not marker.exists()


def test_a_bomb_is_not_kept_for_others_to_open(
    redis: Redis, submit: Callable[..., str], quiet: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "LARGEST_JOB", 1 << 20)
    submit(1)
    redis.hset(Job.key_for("b-0"), "data", zlib.compress(b"x" * (1 << 24)))
    assert queues.prompts(redis, "b", [0]) == [None]
    quiet.take(1)
    quiet.fail(*quiet.rejected())
    assert not redis.exists(Job.key_for("b-0"))


@pytest.mark.parametrize("part", ["done", "failed", "cancelled", "starts", None, "cursor", "backlog"])
def test_keys_of_other_types_cost_their_batch_and_no_other(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], quiet: Intake, part: str | None, folders: Folders
) -> None:
    submit(2)
    submit(2, batch="c")
    key = ledger.key("b", part)
    redis.delete(key)
    redis.xadd(key, {"no": "such type"})
    taken = quiet.take(8)
    assert [row.index for row in taken if row.batch == "c"] == [0, 1]
    assert quiet.rejected() == []
    assert quiet.finish([row for row in taken if row.batch == "c"]) == 2
    assert sealing.seal_ready(ledger, folders) == ["c"]
    failed = FailedJobRegistry(queue=queues.queue(redis, "demo", "normal"))
    if part not in ("cursor", "backlog"):
        assert sorted(redis.zrange(failed.key, 0, -1)) == [b"b-0", b"b-1"]


def test_what_stands_where_a_lease_is_written_does_not_keep_the_row(
    redis: Redis, submit: Callable[..., str], quiet: Intake
) -> None:
    submit(1)
    redis.set("rq:executions:b-0", "no lease")
    (row,) = quiet.take(1)
    redis.delete("rq:executions:b-0")
    redis.set("rq:executions:b-0", "no lease")
    quiet.reconciler.run()
    redis.delete("rq:executions:b-0")
    assert quiet.give_back([row]) == 1


@pytest.mark.parametrize(
    "record",
    [
        {"spec": "{"},
        {"spec": "[]"},
        {"spec": batch_spec(batch="other").model_dump_json()},
        {"spec": batch_spec().model_dump_json()[:-1] + ',"news":1}'},
        {"spec": batch_spec().model_dump_json().replace('"in.jsonl"', '"../../in.jsonl"')},
        {"state": "on holiday"},
        {"total": "many"},
        {"started_at": "\xff"},
        {"processed": "../../../etc/passwd"},
    ],
    ids=["torn", "no object", "another's", "newer", "path", "state", "total", "time", "source"],
)
def test_a_record_that_cannot_be_read_is_told_of_and_left_alone(
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    folders: Folders,
    run: Callable[..., Any],
    record: dict[str, str],
) -> None:
    submit(1)
    submit(0, batch="c")
    redis.hset(ledger.key("b"), mapping=record)
    with SegmentWriter(folders, "b", "w") as segment:
        segment.append([failure_row(0)])
    long_ago = 1_000_000_000 - ORPHAN_IDLE_S
    for path in (folders.segments / "b", *(folders.segments / "b").iterdir()):
        os.utime(path, (long_ago, long_ago))
    assert sealing.seal_ready(ledger, folders) == ["c"]
    assert [found.kind for found in Auditor(ledger, folders).look() if found.where == "b"] == ["unreadable_record"]
    assert (folders.segments / "b" / "w.jsonl").exists()
    assert "c" in run("status").stdout
    assert "cannot be read" in run("status", "b").stderr
    assert "unreadable_record" in run("doctor").stdout


@pytest.mark.parametrize(
    "record",
    [
        {"birth": "never"},
        {"queues": b"\xff\xfe"},
        {"queues": "dllm-demo-normal", "pid": "many", "birth": "2026-01-01T00:00:00.000000Z"},
    ],
    ids=["time", "queues", "pid"],
)
def test_a_worker_that_is_none_hides_no_other(
    redis: Redis, ledger: Ledger, quiet: Intake, run: Callable[..., Any], record: dict[str, Any]
) -> None:
    redis.sadd("rq:workers", "rq:worker:evil", b"rq:worker:\xff", "elsewhere")
    redis.hset("rq:worker:evil", mapping=record)
    redis.sadd("dllm:open", b"\xff")
    redis.hset("dllm:lives:quiet", "9", '{"rows": "x", "device": 7}')
    with quiet:
        redis.hset("dllm:lives:quiet", "9", '{"rows": "x", "device": 7}')
        shown = json.loads(run("status", "--json").stdout)
    assert [worker["name"] for worker in shown["workers"]] == ["quiet"]
    assert "evil" not in run("doctor").stdout


# Checkpoints


IMPOSSIBLE = [None, "many", -1, 0, 1.5, 10**6, 10**12, 10**30, [], {}, True, float("inf"), float("nan")]
SIZES = {
    checkpoints.llama_block: ("num_hidden_layers", "num_key_value_heads", "max_position_embeddings", "rope_parameters"),
    checkpoints.llada: ("n_layers", "n_heads", "d_model", "rope_theta", "architectures"),
    checkpoints.llada2: ("num_experts", "n_group", "first_k_dense_replace", "partial_rotary_factor"),
    checkpoints.modernbert: ("num_hidden_layers", "global_attn_every_n_layers", "hidden_size"),
}


@pytest.mark.parametrize("write", SIZES, ids=lambda write: write.__name__)
def test_a_config_that_lies_is_refused_or_does_no_harm(tmp_path: Path, write: Callable[..., Path]) -> None:
    """Counted through before anything is read, some of these would fill all memory."""
    folder = write(tmp_path / "model", tokenizer=False)
    file = folder / "config.json"
    honest = json.loads(file.read_text())
    refused = 0
    for field in SIZES[write]:
        for value in IMPOSSIBLE:
            file.write_text(json.dumps(honest | {field: value}))
            try:
                load(folder)
            except ModelLoadError:
                refused += 1
    assert refused > len(SIZES[write]) * len(IMPOSSIBLE) * 0.6


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 7, "a/b.safetensors"])
def test_an_index_names_no_shards_elsewhere(tmp_path: Path, shard: Any) -> None:
    folder = checkpoints.llama_block(tmp_path / "model", tokenizer=False)
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelLoadError, match="shards must lie in the folder itself"):
        load(folder)


@pytest.mark.parametrize("size", [2**40, 2**63, 0], ids=["long", "longer", "none"])
def test_a_weight_file_whose_header_lies_is_refused(tmp_path: Path, size: int) -> None:
    folder = checkpoints.llama_block(tmp_path / "model", tokenizer=False)
    file = folder / "model.safetensors"
    file.write_bytes(size.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(ModelLoadError, match="cannot be read as safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "[" * 200_000),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "Trap"}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "[" * 200_000),
        ("tokenizer_config.json", '{"tokenizer_class": 7}'),
        ("tokenizer_config.json", '{"model_max_length": "long"}'),
    ],
)
def test_a_tokenizer_that_is_none_is_refused_in_one_line(tmp_path: Path, name: str, text: str) -> None:
    folder = checkpoints.llama_block(tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(ModelLoadError, match="no usable tokenizer"):
        Tokenizer(folder, checkpoints.VOCABULARY)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{% include '/etc/passwd' %}",
        "{{ messages + 1 }}",
    ],
)
def test_a_template_that_reaches_out_or_fails_costs_the_prompt_alone(tmp_path: Path, template: str) -> None:
    folder = checkpoints.llama_block(tmp_path / "model", chat_template=True)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    with pytest.raises(BadPrompt, match="chat template") as refused:
        Tokenizer(folder, checkpoints.VOCABULARY).encode("hello")
    assert refused.value.code == ErrorCode.BAD_ROW


@pytest.mark.parametrize("write", [checkpoints.llama_block, checkpoints.llada], ids=lambda write: write.__name__)
@pytest.mark.parametrize("prompt", ["a<|mask|>b<|mask|>", "<|end|><|end|>", (checkpoints.MASK,) * 40])
def test_special_tokens_in_a_prompt_stay_in_the_prompt(
    tmp_path: Path, write: Callable[..., Path], prompt: str | tuple[int, ...]
) -> None:
    model = open_model(WorkerSettings(model=str(write(tmp_path / "model")), dtype="float32", threads=1))
    model.engine.add(model.request("r", prompt, SamplingParams(max_new_tokens=12)))
    for _ in range(100):
        if finished := model.engine.step():
            break
    assert finished[0].error is None
    assert checkpoints.MASK not in finished[0].token_ids
    assert len(finished[0].token_ids) <= 12


class Moody:
    """A model that cannot take one of the prompts, for a reason that nobody thought of."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def request(self, name: str, *rest: Any) -> Any:
        if name == "b-0":
            raise OverflowError("int too large")
        return self._model.request(name, *rest)


def test_a_prompt_that_cannot_be_taken_up_fails_alone(
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    folders: Folders,
    worker_settings: Callable[..., WorkerSettings],
    tmp_path: Path,
) -> None:
    folder = checkpoints.llama_block(tmp_path / "tiny")
    settings = worker_settings(model=str(folder), dtype="float32", threads=1, max_attempts=1, lease_s=10.0)
    submit(2, model="tiny", params=SamplingParams(max_new_tokens=4))
    with Intake(redis, ledger, settings) as intake, Outputs(folders, ledger, "w") as outputs:
        moody: Any = Moody(open_model(settings))
        Loop(intake, moody, outputs, grace_s=5.0, log=structlog.get_logger()).run(burst=True)
    assert ledger.marks([("b", 0), ("b", 1)]) == [Mark.FAILED, Mark.DONE]
    (row,) = sealing.errors("b", ledger, folders)
    assert (row.error.code, row.error.message) == (ErrorCode.MODEL_ERROR, "OverflowError: int too large")


def test_parameters_stay_below_what_the_engine_counts() -> None:
    assert parse_params({"top_k": 2**31 - 1}).top_k == 2**31 - 1
    with pytest.raises(BadPrompt):
        parse_params({"top_k": 2**31})

"""One model of each attention kind, from a file of prompts through producer, queue and worker to published rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import structlog
from redis import Redis

from contract.jobs import Message
from contract.ledger import Ledger
from contract.sampling import parse_params
from contract.settings import ProducerSettings, WorkerSettings
from producer.claims import Claims
from producer.submitter import submit
from tests import checkpoints
from tests.canvas_checkpoint import diffusion_gemma
from worker.engine.models.spec import Attention
from worker.intake import Intake
from worker.loop import Loop
from worker.model import Model, open_model
from worker.outputs import Outputs

KINDS: dict[Attention, Callable[..., Path]] = {
    "causal_context": checkpoints.nemotron,
    "block_causal": checkpoints.llada2,
    "bidirectional": checkpoints.dream,
    "causal": checkpoints.wedlm,
    "canvas": diffusion_gemma,
}
ROWS: list[dict[str, Any]] = [
    {"id": "plain", "prompt": "Why is the sky blue?", "max_new_tokens": 20, "seed": 1},
    {"id": "turns", "messages": [{"role": "user", "content": "Hi"}], "max_new_tokens": 9, "seed": 2},
    {"id": "tokens", "prompt_token_ids": [72, 105, 33], "max_new_tokens": 30, "seed": 3},
    {"id": "warm", "prompt": "Once", "max_new_tokens": 25, "temperature": 0.8, "seed": 4},
    {"id": "too long", "prompt": "x" * 5000},
]


def test_every_kind_is_here() -> None:
    assert set(KINDS) == set(get_args(Attention))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_prompts_is_answered(
    kind: Attention, redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings], tmp_path: Path
) -> None:
    folder = KINDS[kind](tmp_path / "models" / "tiny", chat_template=True)
    settings = worker_settings(model=str(folder), dtype="float32", threads=1, max_rows=3)
    producer = ProducerSettings(root=settings.root, model=str(folder))
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = Claims(producer, ledger).snapshot(source)
    assert submit(spec, ledger, producer)
    model = open_model(settings)
    with Intake(redis, ledger, settings) as intake, Outputs(settings.folders, ledger, "w") as outputs:
        Loop(intake, model, outputs, 5.0, structlog.get_logger()).run(burst=True)
    answers, errors = (_rows(settings.folders.outputs / f"prompts.{end}") for end in ("jsonl", "errors.jsonl"))
    assert [row["id"] for row in answers] == ["plain", "turns", "tokens", "warm"]
    assert [row["output"] for row in answers] == [_alone(model, row) for row in answers]
    assert [(row["id"], row["error"]["code"]) for row in errors] == [("too long", "prompt_too_long")]


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _alone(model: Model, row: dict[str, Any]) -> str:
    """The answer to an output row's prompt under its own parameters, with nothing beside it."""
    asked = next(one for one in ROWS if one["id"] == row["id"])
    messages = tuple(Message(**turn) for turn in asked.get("messages", ()))
    prompt = asked.get("prompt") or messages or tuple(asked["prompt_token_ids"])
    model.engine.add(model.request("alone", prompt, parse_params(row["params"])))
    while not (finished := model.engine.step()):
        pass
    return model.tokenizer.decode(finished[0].token_ids)

"""Layers on several devices: where they go, and that nothing of it shows in the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ModelLoadError
from tests import checkpoints
from tests.engine.running import prompt, request, run
from worker.engine import load
from worker.engine.placement import layer_devices, place_layers, stretches

CPU, META = torch.device("cpu"), torch.device("meta")
A, B, C = (torch.device("cuda", number) for number in range(3))


def test_layers_are_laid_end_to_end_over_devices_that_hold_alike() -> None:
    layer = {f"layers.{number}.q": (100, 10) for number in range(12)}
    assert stretches(place_layers(layer, 12, [A, B, C])) == [(A, 4), (B, 4), (C, 4)]
    outside = {"embed": (200, 10), "head": (200, 10)}  # as much as four layers, on the first device
    assert stretches(place_layers(outside | layer, 12, [A, B])) == [(A, 4), (B, 8)]
    assert stretches(place_layers(layer, 12, [A])) == [(A, 12)]


def test_a_head_larger_than_a_share_leaves_the_layers_to_the_others() -> None:
    tensors = {"embed": (1000, 10), "layers.0.q": (10, 10), "layers.1.q": (10, 10)}
    assert place_layers(tensors, 2, [A, B]) == [B, B]


@pytest.mark.parametrize(
    "write", [checkpoints.llama_block, checkpoints.sdar, checkpoints.llada], ids=lambda w: w.__name__
)
def test_two_parts_answer_as_one(tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of the same device: keys and values are in two tensors, shared beginnings too."""
    folder = write(tmp_path, tokenizer=False)
    system = prompt(7, 40)
    prompts = [request(n, (*system, *prompt(n, 5 + n)), max_new_tokens=20) for n in range(6)]
    whole = load(folder, "cpu", "float32")
    monkeypatch.setattr("worker.engine.cache.stretches", lambda devices: [(device, 1) for device in devices])
    split = load(folder, "cpu+cpu", "float32")
    expected = run(whole, prompts)
    assert {n: one.token_ids for n, one in run(split, prompts).items()} == {
        n: one.token_ids for n, one in expected.items()
    }


def test_every_weight_of_a_layer_is_where_the_layer_is(tmp_path: Path) -> None:
    folder = checkpoints.llama_block(tmp_path, tokenizer=False)
    decoder = load(folder, "cpu+meta", "float32").decoder
    assert layer_devices(decoder) == [CPU, META]
    assert decoder.embed.device == decoder.norm.device == decoder.device == CPU


def test_other_decoders_stay_on_one_device(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="name one device"):
        load(checkpoints.modernbert(tmp_path), "cpu+cpu", "float32")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_answer_as_one(tmp_path: Path) -> None:
    folder = checkpoints.llama_block(tmp_path, tokenizer=False)
    prompts = [request(n, prompt(n, 9 + n), max_new_tokens=20) for n in range(6)]
    one, two = (load(folder, device, "float32") for device in ("cuda:0", "cuda:0+cuda:1"))
    assert layer_devices(two.decoder) == [A, B]
    expected = {n: finished.token_ids for n, finished in run(one, prompts).items()}
    assert {n: finished.token_ids for n, finished in run(two, prompts).items()} == expected

"""Weights in fewer bits: nearly the same model, in less memory, and clear words where it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ModelLoadError
from tests import checkpoints
from tests.canvas_checkpoint import diffusion_gemma
from tests.engine.running import prompt, request, run
from worker.engine import load
from worker.engine.models.linear import Linear
from worker.engine.models.quantized import linear_for

CPU = torch.device("cpu")


@pytest.mark.parametrize(("quantize", "error"), [("int8", 0.02), ("int4", 0.2)])
def test_products_are_nearly_those_of_the_plain_weight(quantize: Any, error: float) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(64, 128).bfloat16(), torch.randn(64).bfloat16()
    x = torch.randn(9, 128).bfloat16()
    with torch.inference_mode():
        plain = Linear(weight, bias)(x)
        found = linear_for(quantize, CPU, torch.bfloat16)(weight, bias)(x)
    assert 0 < (found - plain).abs().mean() / plain.abs().mean() < error


def test_int8_weights_take_half_the_memory() -> None:
    linear: Any = linear_for("int8", CPU, torch.bfloat16)(torch.randn(256, 512).bfloat16())
    held = linear._weight
    assert held.qdata.dtype == torch.int8
    assert held.qdata.numel() == 256 * 512
    assert held.scale.numel() == 256


@pytest.mark.parametrize("write", [checkpoints.llama_block, checkpoints.llada2], ids=lambda write: write.__name__)
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantised_model_answers(tmp_path: Path, write: Any, quantize: Any) -> None:
    folder = write(tmp_path, tokenizer=False)
    loaded = load(folder, "cpu", "bfloat16", quantize=quantize)
    finished = run(loaded, [request(n, prompt(n, 9 + n), max_new_tokens=12) for n in range(3)])
    assert all(one.error is None for one in finished.values())


def test_int4_says_which_dtype_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="quantize: int4 needs dtype bfloat16, not float32"):
        load(checkpoints.llada(tmp_path, tokenizer=False), "cpu", "float32", quantize="int4")


@pytest.mark.parametrize("write", [checkpoints.modernbert, diffusion_gemma], ids=["modernbert", "diffusion_gemma"])
def test_other_decoders_are_not_quantised(tmp_path: Path, write: Any) -> None:
    with pytest.raises(ModelLoadError, match="quantize is for families with Llama's kind of decoder"):
        load(write(tmp_path), "cpu", "bfloat16", quantize="int8")


def test_without_torchao_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'dllm-batch\[quantize\]'"):
        linear_for("int8", CPU, torch.bfloat16)

"""ModernBERT, beside what `test_families` shows of it: its local layers, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ModelLoadError
from tests import checkpoints
from tests.engine.encoder_reference import ModernBertReference
from tests.engine.running import prompt, request
from tests.engine.test_against_reference import LENGTHS, recording
from worker.engine import Loaded, load
from worker.engine.models.decoders import build, shapes
from worker.engine.models.modernbert_decoder import ModernBertConfig
from worker.engine.models.registry import model_spec

LONG = (*LENGTHS, 64, 128, 129, 200, 300)  # around the window of 64 to either side, and several of them


@dataclass(frozen=True)
class Pair:
    loaded: Loaded
    reference: ModernBertReference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.modernbert(tmp_path_factory.mktemp("modernbert"), tokenizer=False)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return Pair(load(folder, device="cpu", dtype="float32"), ModernBertReference(folder))


def logits_of(loaded: Loaded) -> torch.Tensor:
    """What the model says about the first four masks after each of `LONG`, all computed together."""
    engine, logits = recording(loaded)
    for n in LONG:
        engine.add(request(n, prompt(n, n), max_new_tokens=n % 7 + 4, block_length=4))
    engine.step()
    return logits[-1]


def expected_logits(reference: ModernBertReference) -> torch.Tensor:
    canvases = {n: [*prompt(n, n), *[checkpoints.MASK] * (n % 7 + 4)] for n in LONG}
    return torch.cat([reference.full_logits(canvas)[n : n + 4] for n, canvas in canvases.items()])


def test_logits_agree_on_mixed_lengths(pair: Pair) -> None:
    torch.testing.assert_close(logits_of(pair.loaded), expected_logits(pair.reference), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "mistake",
    [
        {"local_layers": frozenset({0, 1, 3})},  # the pattern, shifted
        {"local_layers": frozenset({2, 3})},
        {"local_layers": frozenset()},
        {"local_rope_theta": 160_000.0},
        {"rope_theta": 10_000.0},
        {"window": 128},
        {"window": 63},
        {"window": 65},
    ],
    ids=str,
)
def test_what_would_run_and_answer_differently_is_noticed(
    pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch, mistake: dict[str, Any]
) -> None:
    right = pair.loaded.spec
    wrong = replace(right, decoder=replace(right.decoder, **mistake))
    monkeypatch.setattr("worker.engine.loading.model_spec", lambda _: wrong)
    off = (logits_of(load(folder, "cpu", "float32")) - expected_logits(pair.reference)).abs().max()
    assert off > 0.01


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def respelled(config: dict[str, Any]) -> dict[str, Any]:
    """The same as transformers 5 writes it."""
    config = dict(config)
    every = config.pop("global_attn_every_n_layers")
    thetas = {"full_attention": config.pop("global_rope_theta"), "sliding_attention": config.pop("local_rope_theta")}
    layers = range(config["num_hidden_layers"])
    kinds = ["sliding_attention" if number % every else "full_attention" for number in layers]
    rope = {kind: {"rope_theta": theta, "rope_type": "default"} for kind, theta in thetas.items()}
    return config | {"layer_types": kinds, "rope_parameters": rope}


def test_both_spellings_of_the_configuration_mean_the_same(folder: Path) -> None:
    config = config_of(folder)
    old, new = model_spec(config), model_spec(respelled(config))
    assert old == new
    assert isinstance(old.decoder, ModernBertConfig)
    assert (old.decoder.local_layers, old.decoder.window) == ({1, 2}, 64)
    assert (old.decoder.rope_theta, old.decoder.local_rope_theta) == (160_000.0, 10_000.0)


def test_without_a_theta_of_their_own_local_layers_have_the_others(folder: Path) -> None:
    decoder = model_spec(config_of(folder) | {"global_rope_theta": 80_000.0, "local_rope_theta": None}).decoder
    assert isinstance(decoder, ModernBertConfig)
    assert (decoder.rope_theta, decoder.local_rope_theta) == (80_000.0, 80_000.0)


def test_the_mask_is_the_familys_and_padding_ends_a_text(folder: Path) -> None:
    published = {"vocab_size": 50368, "mask_token_id": None, "eos_token_id": 50282, "pad_token_id": 50283}
    spec = model_spec(config_of(folder) | published)
    assert (spec.mask_id, spec.stop_ids, spec.shift, spec.attention) == (50284, {50283}, False, "bidirectional")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"norm_bias": True}, "norm_bias True is not supported"),
        ({"decoder_bias": False}, "decoder_bias False is not supported"),
        ({"hidden_activation": "gelu_new"}, "hidden_activation gelu_new is not supported"),
        ({"layer_types": ["full_attention"] * 3}, "for each of 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types must name"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope type 'linear'"),
    ],
    ids=str,
)
def test_what_would_change_the_forward_pass_is_refused(folder: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        model_spec(config_of(folder) | change)


@pytest.mark.parametrize(
    ("sizes", "tensors", "parameters"),
    [
        ({"hidden_size": 768, "intermediate_size": 1152, "layers": 22, "heads": 12}, 137, 149_655_232),
        ({"hidden_size": 1024, "intermediate_size": 2624, "layers": 28, "heads": 16}, 173, 395_881_664),
    ],
    ids=["base", "large"],
)
def test_the_real_configurations_have_the_published_totals(
    folder: Path, sizes: dict[str, int], tensors: int, parameters: int
) -> None:
    published = {"num_hidden_layers": sizes.pop("layers"), "num_attention_heads": sizes.pop("heads"), **sizes}
    published |= {"vocab_size": 50368, "max_position_embeddings": 8192, "mask_token_id": None, "pad_token_id": 50283}
    spec = model_spec(config_of(folder) | published)
    wanted = shapes(spec.decoder)
    assert len({spec.tensor_name(ours) for ours in wanted}) == len(wanted) == tensors
    assert sum(math.prod(shape) for shape in wanted.values()) == parameters
    decoder = build(replace(spec.decoder, max_positions=8), lambda ours: torch.empty(wanted[ours], device="meta"))
    assert decoder.head.shape == (50368, sizes["hidden_size"])

"""DiffusionGemma: published names and sizes, transformers' numbers in both modes, a plain sampler's answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from contract.errors import ModelLoadError
from contract.sampling import SamplingParams
from tests.canvas_checkpoint import CANVAS, GENERATION, LAYERS, WINDOW, config, diffusion_gemma
from tests.checkpoints import STOP, TURN, VOCABULARY
from tests.engine.canvas_reference import Recipe, Reference
from tests.engine.running import drain, prompt
from worker.engine import Request, engine_of, load
from worker.engine.canvas.context import Context, Stretch
from worker.engine.canvas.loading import CanvasLoaded
from worker.engine.canvas.model import CanvasModel
from worker.engine.canvas.native import published_shapes, text_models
from worker.engine.models.registry import canvas_spec

LENGTHS = (1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 70)
PUBLISHED_TEXT = {
    "vocab_size": 262144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_experts": 128,
    "top_k_experts": 8,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
}
PUBLISHED_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusion_gemma(tmp_path_factory.mktemp("gemma"), tokenizer=False)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> CanvasLoaded:
    return opened(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def opened(folder: Path) -> CanvasLoaded:
    model = load(folder, "cpu", "float32")
    assert isinstance(model, CanvasLoaded)
    return model


def stored(loaded: CanvasLoaded, texts: list[tuple[int, ...]], chunk: int) -> list[Context]:
    """The texts' contexts, filled side by side, `chunk` tokens of each in a forward."""
    contexts = [Context() for _ in texts]
    with torch.inference_mode():
        while any(context.length < len(text) for context, text in zip(contexts, texts, strict=True)):
            parts = [text[c.length : c.length + chunk] for c, text in zip(contexts, texts, strict=True)]
            some = [(context, part) for context, part in zip(contexts, parts, strict=True) if part]
            stretches = [Stretch(context, len(part), finished=True) for context, part in some]
            loaded.decoder.store(torch.tensor([token for _, part in some for token in part]), stretches)
    return contexts


@pytest.mark.parametrize("chunk", [7, WINDOW, 1000])
def test_stored_keys_and_values_are_those_of_transformers_cache(
    loaded: CanvasLoaded, reference: Reference, chunk: int
) -> None:
    """Encoder mode: causal, sliding layers holding a window, whatever else is in the forward."""
    texts = [prompt(n, length) for n, length in enumerate(LENGTHS)]
    for text, context in zip(texts, stored(loaded, texts, chunk), strict=True):
        cache, _ = reference.stored(list(text))
        for number, kind in enumerate(LAYERS):
            held = min(len(text), WINDOW - 1) if kind == "sliding_attention" else len(text)
            for mine, theirs in zip(
                context.held[number], (cache.layers[number].keys, cache.layers[number].values), strict=True
            ):
                assert mine.shape[1] == held
                torch.testing.assert_close(mine, theirs[0], rtol=1e-4, atol=1e-4)


def test_logits_of_canvases_are_those_of_transformers(loaded: CanvasLoaded, reference: Reference) -> None:
    """Decoder mode: canvases after texts of mixed length in one forward, without and with self-conditioning."""
    texts = [prompt(n, length) for n, length in enumerate(LENGTHS)]
    contexts = stored(loaded, texts, 1000)
    caches = [reference.stored(list(text))[0] for text in texts]
    canvases = [torch.tensor(prompt(100 + n, CANVAS)) for n in range(len(texts))]
    soft = loaded.decoder.no_soft(CANVAS * len(texts))
    before: list[Tensor | None] = [None] * len(texts)
    for _ in range(3):
        stretches = [Stretch(context, CANVAS, finished=False) for context in contexts]
        theirs = [reference.logits(*row) for row in zip(caches, canvases, before, strict=True)]
        with torch.inference_mode():
            mine = loaded.decoder.logits(loaded.decoder.denoise(torch.cat(canvases), soft, stretches))
            soft = loaded.decoder.soften(torch.cat(theirs))
        torch.testing.assert_close(mine, torch.cat(theirs), rtol=1e-4, atol=1e-4)
        before = list(theirs)


def test_the_two_modes_have_scalars_of_their_own(folder: Path, loaded: CanvasLoaded) -> None:
    """And share everything else."""
    weights = load_file(folder / "model.safetensors")
    decoder, encoder = loaded.decoder._decoder.layers, loaded.decoder._encoder_layers
    for number, (one, other) in enumerate(zip(decoder, encoder, strict=True)):
        assert one.layer_scalar.equal(weights[f"model.decoder.layers.{number}.layer_scalar"])
        assert other.layer_scalar.equal(weights[f"model.encoder.language_model.layers.{number}.layer_scalar"])
        shared = dict(other.named_parameters())
        assert all(shared[name].data_ptr() == weight.data_ptr() for name, weight in one.named_parameters())


CASES = [
    {},
    {"max_new_tokens": 1},
    {"max_new_tokens": CANVAS},
    {"denoise_steps": 1},
    {"denoise_steps": 30},
    {"entropy_bound": 1e-9},
    {"entropy_bound": 100.0},
    {"temperature": 0.3},
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_answers_are_those_of_the_plain_sampler(
    loaded: CanvasLoaded, reference: Reference, params: dict[str, Any]
) -> None:
    changes = {"max_new_tokens": 60} | {
        {"denoise_steps": "steps", "entropy_bound": "bound"}.get(name, name): value for name, value in params.items()
    }
    if (constant := changes.pop("temperature", None)) is not None:
        changes |= {"hottest": constant, "coldest": constant}
    engine = engine_of(loaded)
    for n in range(4):
        values = {"max_new_tokens": 60, "seed": n, **params}
        engine.add(Request(n, prompt(n, 3 + 20 * n), SamplingParams(**values)))
    for n, mine in drain(engine).items():
        recipe = Recipe(stop_ids=frozenset({STOP, TURN}), **{"seed": n, **changes})
        theirs = reference.answer(prompt(n, 3 + 20 * n), recipe)
        assert mine.token_ids == theirs.tokens
        assert mine.steps == sum(theirs.steps)
        assert mine.forwards == mine.steps + len(theirs.steps) - 1
        assert mine.finish_reason == ("length" if len(theirs.tokens) == recipe.max_new_tokens else "stop")


def test_answers_meet_every_way_to_end(loaded: CanvasLoaded) -> None:
    """The comparison above is worth as much as its cases: several canvases, early ends of canvases and of answers."""
    engine = engine_of(loaded)
    for n in range(8):
        engine.add(Request(n, prompt(n, 3 + 20 * n), SamplingParams(max_new_tokens=60, seed=n)))
    finished = drain(engine).values()
    assert {one.finish_reason for one in finished} == {"stop", "length"}
    assert any(one.steps % GENERATION["max_denoising_steps"] for one in finished)
    assert any(one.steps > GENERATION["max_denoising_steps"] for one in finished)


@pytest.mark.parametrize(("stable", "sure"), [(0, 1.0), (0, 0.6), (2, 1.0), (3, 0.5)])
def test_a_canvas_is_done_when_it_is_stable_and_sure(
    loaded: CanvasLoaded, reference: Reference, stable: int, sure: float
) -> None:
    changed = replace(loaded, spec=replace(loaded.spec, stable_steps=stable, sure_entropy=sure))
    steps: set[int] = set()
    for n in range(3):
        engine = engine_of(changed)
        engine.add(Request(n, prompt(n, 9), SamplingParams(max_new_tokens=40, seed=n, denoise_steps=25)))
        theirs = reference.answer(
            prompt(n, 9),
            Recipe(loaded.spec.stop_ids, max_new_tokens=40, seed=n, steps=25, stable=stable, sure=sure),
        )
        assert drain(engine)[n].token_ids == theirs.tokens
        steps |= set(theirs.steps)
    assert min(steps) < 25


# What is published


def published() -> dict[str, Any]:
    """The published configuration; what it shares with the tiny one is taken from there."""
    tiny = config()
    text = tiny["text_config"] | PUBLISHED_TEXT
    return tiny | {"canvas_length": 256, "eos_token_id": [1, 106], "text_config": text}


def test_the_real_configuration_has_the_published_totals() -> None:
    decoder, encoder = text_models(canvas_spec(published()))
    shapes = published_shapes(decoder, encoder)
    assert sum(name.startswith("model.decoder.") for name in shapes) == 661
    assert len(shapes) == 661 + 30
    assert shapes["model.decoder.layers.5.experts.gate_up_proj"] == (128, 1408, 2816)
    assert shapes["model.decoder.layers.5.self_attn.q_proj.weight"] == (8192, 2816)
    assert "model.decoder.layers.5.self_attn.v_proj.weight" not in shapes
    assert "model.decoder.layers.4.self_attn.v_proj.weight" in shapes
    conditioning = sum(one.numel() for one in decoder.self_conditioning.parameters())
    text = sum(one.numel() for one in decoder.parameters()) - conditioning
    assert (text, conditioning) == (25_233_141_760, 17_844_992)
    full, sliding = CanvasModel(decoder, encoder).position_bytes()  # of 4 bytes a number
    assert (full, sliding) == (5 * 2 * 2 * 512 * 4, 25 * 2 * 8 * 256 * 4)


def test_with_the_vision_tower_it_is_all_that_is_published() -> None:
    from transformers import DiffusionGemmaConfig
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaModel

    text = dict(canvas_spec(published()).text)
    with torch.device("meta"):
        whole = DiffusionGemmaModel(DiffusionGemmaConfig(text_config=text, vision_config=PUBLISHED_VISION))
    sizes = {name: one.numel() for name, one in whole.named_parameters()}
    vision = sum(size for name, size in sizes.items() if "vision" in name)
    assert vision == 572_792_112
    assert sum(sizes.values()) == 25_823_778_864  # encoder and decoder share theirs


def test_without_a_generation_config_the_published_sampler_applies() -> None:
    spec = canvas_spec(published())
    assert spec.stop_ids == {1, 50, 106}
    assert (spec.denoise_steps, spec.entropy_bound, spec.stable_steps, spec.sure_entropy) == (48, 0.1, 1, 0.005)
    assert spec.temperature(1, 48) == pytest.approx(0.8)
    assert spec.temperature(48, 48) == pytest.approx(0.4 + 0.4 / 48)


# What is wrong with a checkpoint is named


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


SCALAR = "model.encoder.language_model.layers.2.layer_scalar"
VALUES = "model.decoder.layers.1.self_attn.v_proj.weight"
EXPERTS = "model.decoder.layers.0.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop(SCALAR), f"missing {SCALAR}"),
        (lambda weights: weights.update({VALUES: torch.zeros(16, 32)}), f"unexpected {VALUES}"),
        (lambda weights: weights.update({EXPERTS: torch.zeros(6, 32, 8)}), rf"{EXPERTS} has shape \[6, 32, 8\]"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, said: str) -> None:
    change_weights(diffusion_gemma(tmp_path, tokenizer=False), change)
    with pytest.raises(ModelLoadError, match=said):
        load(tmp_path, "cpu", "float32")


def test_a_tied_head_that_is_stored_as_well_is_no_mistake(tmp_path: Path) -> None:
    diffusion_gemma(tmp_path, tokenizer=False)
    change_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": torch.zeros(VOCABULARY, 32)}))
    assert opened(tmp_path).parameters == opened(diffusion_gemma(tmp_path, tokenizer=False)).parameters


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ("text_config", "use_bidirectional_attention", "all"),
        ("text_config", "attention_k_eq_v", False),
        ("text_config", "attention_bias", True),
        (None, "tie_word_embeddings", False),
        (None, "quantization_config", {"quant_method": "modelopt"}),
    ],
)
def test_another_forward_pass_is_refused(place: str | None, field: str, value: Any) -> None:
    changed = config()
    (changed[place] if place else changed)[field] = value
    with pytest.raises(ModelLoadError, match=r"not supported"):
        canvas_spec(changed)


def test_a_missing_size_is_named() -> None:
    """transformers would fill in one that is not the published one."""
    changed = config()
    del changed["text_config"]["global_head_dim"]
    with pytest.raises(ModelLoadError, match="lacks the field 'global_head_dim'"):
        canvas_spec(changed)


def test_only_fields_that_are_understood_reach_transformers() -> None:
    """Others could name an implementation that is fetched from somewhere and run."""
    changed = config()
    changed["text_config"] |= {"attn_implementation": "org/kernel", "experts_implementation": "org/kernel"}
    assert canvas_spec(changed) == canvas_spec(config())


def test_what_transformers_refuses_is_said(tmp_path: Path) -> None:
    diffusion_gemma(tmp_path, tokenizer=False)
    changed = config()
    changed["text_config"]["hidden_size"] = "wide"
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ModelLoadError, match="transformers refuses the configuration"):
        load(tmp_path, "cpu", "float32")
